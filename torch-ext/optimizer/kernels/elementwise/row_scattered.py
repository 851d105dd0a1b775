"""`ScatteredRows`: stacks of matrices whose rows lie at scattered addresses, by row pointer table.

Newton-Schulz reads matrices directly from the receive buffer, and writes results directly to the
send buffer, without assembling the matrices in between. Imports `launch` only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from ..launch.jit import jit

tl = None  # Triton's language, put here by jit

# Bytes of the widest access of a thread; each row starts at a multiple. Unit of the row table
ALIGNMENT = 16
VECTOR = 8  # elements of the widest access in 16 bits


class ScatteredRows:
    """A stack of matrices (N, R, C) made of pieces that stay in place: a substitute for a tensor.

    Has the attributes and methods of a tensor that launchers use. Rows are contiguous; the stride
    from matrix to matrix does not exist and is given as -1.

    `table` (N, R), int64 on the device, holds the address of each row, in units of 16 bytes,
    relative to the table's own address. The table is viewed as a flat tensor of the pieces' dtype,
    so that a kernel gets a pointer to elements, see `rows_at`.
    """

    def __init__(self, matrices: Sequence[Sequence[torch.Tensor]]):
        """Make a stack of N matrices, each given by pieces (rows, C), from the first row on.

        All pieces have equal dtype, device and C. AssertionError unless each piece is contiguous,
        starts at a multiple of 16 bytes and has rows of a multiple of 16 bytes.
        """
        assert all(_is_aligned(piece) for pieces in matrices for piece in pieces), (
            "rows are no multiples of 16 bytes"
        )
        self.pieces = [list(pieces) for pieces in matrices]
        self.is_transposed = False
        first = matrices[0][0]
        N = len(matrices)
        R = sum(map(len, matrices[0]))
        C = first.shape[1]
        self.shape = torch.Size((N, R, C))
        self.dtype = first.dtype
        self.device = first.device
        table = torch.empty(N, R, dtype=torch.int64, device=self.device)
        table.copy_(torch.stack([_row_offsets(pieces, table.data_ptr()) for pieces in self.pieces]))
        self.table = table.view(-1).view(self.dtype)

    @property
    def mT(self) -> ScatteredRows:
        """The transposed matrices (N, C, R), in the same memory."""
        transposed = copy.copy(self)
        transposed.is_transposed = not self.is_transposed
        transposed.shape = torch.Size((self.shape[0], self.shape[2], self.shape[1]))
        return transposed

    def stride(self, dim: int | None = None) -> tuple[int, int, int] | int:
        """Return the strides within a piece, in elements; -1 from matrix to matrix."""
        strides = (-1, 1, self.shape[1]) if self.is_transposed else (-1, self.shape[2], 1)
        return strides if dim is None else strides[dim]

    def numel(self) -> int:
        """Return the number of elements of all matrices."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        """Return the address of the row table."""
        return self.table.data_ptr()

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, matrices: slice) -> _MatrixSlice:
        return _MatrixSlice(self.pieces[matrices], self.is_transposed)

    def matrix(self, index: int) -> torch.Tensor:
        """Return a matrix (R, C): a view if it is one piece, else a copy."""
        pieces = self.pieces[index]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return whole.mT if self.is_transposed else whole


class ScatteredMatrices:
    """Whole fp32 matrices (N, R, C), read by kernels beside a stack, each from the place where the
    matrix is stored.

    `table` (N,), int64 on the device: the address of each matrix.
    """

    def __init__(self, matrices: Sequence[torch.Tensor]):
        """`matrices`: tensors (R, C) for which `stays` is true, kept alive."""
        self.matrices = list(matrices)
        self.shape = torch.Size((len(self.matrices), *self.matrices[0].shape))
        addresses = [matrix.data_ptr() for matrix in matrices]
        self.table = torch.tensor(addresses, device=self.matrices[0].device)
        # By the size alone, as for a copy: for unaligned memory a kernel adds elements in another
        # layout, hence with other bits
        self.is_aligned = self.matrices[0].numel() % VECTOR == 0

    def unbind(self) -> list[torch.Tensor]:
        """Return the matrices."""
        return self.matrices


def stays(matrix: torch.Tensor, shape: tuple[int, int]) -> bool:
    """Say whether a stored tensor can be one of `ScatteredMatrices`, with the bits that a copy in a
    stack would give.
    """
    return (
        matrix.shape == shape
        and matrix.dtype == torch.float32
        and matrix.is_contiguous()
        and not matrix.data_ptr() % ALIGNMENT
    )


class _MatrixSlice:
    """Some matrices of `ScatteredRows`, for the torch path: read and written as whole tensors."""

    def __init__(self, pieces: list[list[torch.Tensor]], is_transposed: bool):
        self.pieces = pieces
        self.is_transposed = is_transposed

    def float(self) -> torch.Tensor:
        """Return the matrices as a new fp32 tensor (N, R, C)."""
        whole = torch.stack([torch.cat(pieces).float() for pieces in self.pieces])
        return whole.mT if self.is_transposed else whole

    def copy_(self, values: torch.Tensor) -> None:
        """Write `values` (N, R, C), of any dtype, to the pieces."""
        for pieces, whole in zip(self.pieces, values.mT if self.is_transposed else values):
            for piece, part in zip(pieces, whole.split([len(piece) for piece in pieces])):
                piece.copy_(part)


def _row_offsets(pieces: list[torch.Tensor], origin: int) -> torch.Tensor:
    """Return the addresses of a matrix' rows relative to `origin`, int64 in units of 16 bytes."""
    return (
        torch.cat(
            [
                torch.arange(len(piece), device="cpu") * piece[0].nbytes
                + (piece.data_ptr() - origin)
                for piece in pieces
            ]
        )
        // ALIGNMENT
    )


def _is_aligned(piece: torch.Tensor) -> bool:
    """Say whether a piece is contiguous and all of its rows start at multiples of 16 bytes."""
    return piece.is_contiguous() and not (
        piece.data_ptr() % ALIGNMENT or piece[0].nbytes % ALIGNMENT
    )


def memory_of(stack: torch.Tensor | ScatteredRows) -> torch.Tensor:
    """Return the tensor that a kernel gets for a stack: the stack, or the row table."""
    return stack.table if isinstance(stack, ScatteredRows) else stack


def strides_of(stack: torch.Tensor | ScatteredRows) -> tuple[int, int, int] | None:
    """Return the strides that a kernel gets for a stack; None if the memory is a row table."""
    return None if isinstance(stack, ScatteredRows) else stack.stride()


def memory_of_matrices(X: torch.Tensor | ScatteredMatrices) -> tuple[torch.Tensor, bool, bool]:
    """Return a kernel's arguments for whole matrices: (stack or table of addresses, whether the
    first is a table, whether every matrix begins at a multiple of ALIGNMENT, also in 16 bits).
    """
    if isinstance(X, ScatteredMatrices):
        return X.table, True, X.is_aligned
    assert X.is_contiguous()
    return X, False, not (X.data_ptr() % ALIGNMENT or X[0].numel() % VECTOR)


@jit
def rows_at(table, matrix, R, row, inside=None):
    """Return the pointers to the first elements of rows, known to the compiler as multiples of 16.

    `matrix`: number of a matrix with R rows. `row`: a number or a one-dimensional block of numbers;
    with two dimensions several threads would load equal entries. `inside`: mask of existing rows.
    """
    EACH: tl.constexpr = 128 // table.dtype.element_ty.primitive_bitwidth
    return (
        table + tl.load(table.to(tl.pointer_type(tl.int64)) + matrix * R + row, mask=inside) * EACH
    )


@jit
def matrix_at(X, matrix, size, TABLE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to the first element of a matrix. `X`: stack of matrices of `size`
    elements, or with TABLE the addresses (N,) of matrices in fp32.
    """
    if TABLE:
        start = tl.load(X + matrix).to(tl.pointer_type(tl.float32))
    else:
        start = X + matrix * size
    return tl.multiple_of(start, 16) if ALIGNED else start

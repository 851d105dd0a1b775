"""Stacks of matrices whose rows lie at scattered addresses (row pointer table)."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from ..launch.jit import jit

tl = None  # Triton's language, put here by jit

ALIGNMENT = 16  # bytes: every row begins where the widest access of a thread may


class ScatteredRows:
    """Matrices (N, R, C) in pieces that stay in place. Launchers take it for a tensor of whole
    matrices, but that there is no step from one to the next.

    `table` (N, R) holds for every row where it begins, in units of 16 bytes from where the table
    does. It is on the device, int64, and seen as of the dtype of what lies there.
    """

    def __init__(self, matrices: Sequence[Sequence[torch.Tensor]]):
        """Take the pieces (rows, C) of every matrix, from its first row to its last, contiguous;
        all have to fit.
        """
        assert all(_fits(piece) for pieces in matrices for piece in pieces), (
            "rows are no multiples of 16 bytes"
        )
        self.pieces, first, self.turned = (
            [list(pieces) for pieces in matrices],
            matrices[0][0],
            False,
        )
        N, R, C = len(matrices), sum(map(len, matrices[0])), first.shape[1]
        self.shape, self.dtype, self.device = torch.Size((N, R, C)), first.dtype, first.device
        table = torch.empty(N, R, dtype=torch.int64, device=self.device)
        table.copy_(torch.stack([_rows(pieces, table.data_ptr()) for pieces in self.pieces]))
        self.table = table.view(-1).view(self.dtype)

    @property
    def mT(self) -> ScatteredRows:
        """The transposed matrices, in the same memory."""
        turned = copy.copy(self)
        turned.turned, turned.shape = (
            not self.turned,
            torch.Size((self.shape[0], self.shape[2], self.shape[1])),
        )
        return turned

    def stride(self, dim: int | None = None):
        """Those inside of a piece; -1 from matrix to matrix, which no tensor has."""
        strides = (-1, 1, self.shape[1]) if self.turned else (-1, self.shape[2], 1)
        return strides if dim is None else strides[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        return self.table.data_ptr()

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, some: slice) -> _Matrices:
        return _Matrices(self.pieces[some], self.turned)


class _Matrices:
    """Some matrices of a Split, for operations of torch's."""

    def __init__(self, pieces, turned):
        self.pieces, self.turned = pieces, turned

    def float(self) -> torch.Tensor:
        whole = torch.stack([torch.cat(pieces).float() for pieces in self.pieces])
        return whole.mT if self.turned else whole

    def copy_(self, values: torch.Tensor) -> None:
        for pieces, whole in zip(self.pieces, values.mT if self.turned else values):
            for piece, part in zip(pieces, whole.split([len(piece) for piece in pieces])):
                piece.copy_(part)


def _rows(pieces, origin):
    """Where the rows of one matrix begin, from the address `origin`."""
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


def _fits(piece):
    return piece.is_contiguous() and not (
        piece.data_ptr() % ALIGNMENT or piece[0].nbytes % ALIGNMENT
    )


def memory_of(stack: torch.Tensor | ScatteredRows) -> torch.Tensor:
    """Return what a launch takes for a stack."""
    return stack.table if isinstance(stack, ScatteredRows) else stack


def strides_of(stack: torch.Tensor | ScatteredRows):
    """Return the strides that a launch takes; None tells the kernel that the memory is a table of
    rows.
    """
    return None if isinstance(stack, ScatteredRows) else stack.stride()


@jit
def rows_at(table, matrix, R, row, inside=None):
    """Return where rows of a matrix, one of those with R rows, begin. `row`, `inside`: a number, or
    one dimension (in two, threads would load alike), and those that there are. The compiler sees
    that they are multiples of 16 bytes.
    """
    EACH: tl.constexpr = 128 // table.dtype.element_ty.primitive_bitwidth
    return (
        table + tl.load(table.to(tl.pointer_type(tl.int64)) + matrix * R + row, mask=inside) * EACH
    )

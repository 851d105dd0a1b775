"""AOL preconditioning (arXiv 2208.03160): rows scaled to length 1, then A <- D A D.

AOL multiplies row i of U by (sum_j |(U U^T)_ij|)^(-1/2), after which no singular value exceeds 1.
To stay in range, rows are scaled to length 1 first: with Y the unit rows of U, e the row lengths
of U, and A = Y Y^T, the scaled matrix is T Y, T diagonal, T_ii = sqrt(e_i / sum_j |A_ij| e_j).
"""

from __future__ import annotations

import torch

from ..backend import cpu_slices, use_triton
from ..launch.jit import jit, launch_key

tl = None  # Triton's language, put here by jit

BLOCK = 1024  # elements of a row that a program reads at a time
TILE = 64  # side of a square tile of elementwise kernels
ROWS, COLUMNS = 32, 64  # of the tiles in which columns are added


def unit_rows(U: torch.Tensor, Y: torch.Tensor, lengths: torch.Tensor) -> None:
    """Write U with rows divided by their lengths to Y, and the lengths to `lengths`.

    U and Y (N, n, m) in fp32, bf16 or fp16, any strides. `lengths` (N, 2, n), fp32, contiguous: two
    factors of each length, the row's largest magnitude and the length in units of the largest
    magnitude, so that squares neither overflow nor vanish. A row of zeros stays zero.
    """
    if not use_triton(U.device):
        return unit_rows_torch(U, Y, lengths)
    N, n, m = U.shape
    # A program reads blocks of 4 x 512 elements if rows are lines of memory, else of 64 x 32
    rows, block = (4, 512) if U.stride(2) <= U.stride(1) else (64, 32)
    key = launch_key(U, Y, lengths)
    _lengths_kernel.launch(N * -(-n // rows), key, U, lengths, n, m, U.stride(), rows, block)
    _unit_rows_kernel.launch(
        N * -(-n // TILE) * -(-m // TILE),
        key,
        U,
        Y,
        lengths,
        n,
        m,
        U.stride(),
        Y.stride(),
        TILE,
        num_warps=8,
    )


def unit_rows_torch(U: torch.Tensor, Y: torch.Tensor, lengths: torch.Tensor) -> None:
    """Compute `unit_rows` in torch.

    Sums are computed matrix by matrix: the order of a sum, hence the bits, must not depend on the
    batch.
    """
    for some in cpu_slices(U):
        wide, (largest, length) = U[some].float(), lengths[some].unbind(1)
        torch.amax(wide.abs(), dim=2, out=largest)
        wide = wide / torch.where(largest > 0, largest, 1.0).unsqueeze(2)
        squares = torch.stack([matrix.sum(dim=1) for matrix in wide.square().unbind()])
        length.copy_(squares.sqrt_())
        Y[some].copy_(wide / torch.where(length == 0, 1.0, length).unsqueeze(2))


def aol(A: torch.Tensor, lengths: torch.Tensor, scales: torch.Tensor) -> None:
    """Replace A = Y Y^T by D A D, in place, and write the diagonals of T to `scales`.

    A (N, n, n) in fp32, bf16 or fp16, any strides; the result is rounded once. `lengths`: as
    written by `unit_rows`. `scales` (N, n), fp32, contiguous; 1 for rows of zeros.
    """
    if not use_triton(A.device):
        return aol_torch(A, lengths, scales)
    N, n, _ = A.shape
    down = -(-n // TILE)
    key = launch_key(A, lengths, scales)
    _scales_kernel.launch(N * n, key, A, lengths, scales, n, A.stride(), BLOCK)
    _rescale_kernel.launch(N * down * down, key, A, scales, scales, n, n, A.stride(), TILE)


def aol_torch(A: torch.Tensor, lengths: torch.Tensor, scales: torch.Tensor) -> None:
    """Compute `aol` in torch, sums matrix by matrix as in `unit_rows_torch`."""
    for some in cpu_slices(A):
        largest, length = lengths[some].unbind(1)
        top = largest.amax(dim=1, keepdim=True)
        # Lengths in units of the largest magnitude of the matrix: only ratios matter
        e = largest / torch.where(top > 0, top, 1.0) * length
        weighted = A[some].float().abs() * e.unsqueeze(1)
        sums = torch.stack([matrix.sum(dim=1) for matrix in weighted.unbind()])
        scale = scales[some].copy_(torch.where(sums > 0, (e / sums).sqrt(), 1.0))
        A[some].mul_(scale.unsqueeze(2) * scale.unsqueeze(1))


def scale_rows(X: torch.Tensor, scales: torch.Tensor) -> None:
    """Replace X by D X with D = diag(scales), in place, rounded once.

    X (N, n, m) in fp32, bf16 or fp16, any strides. `scales` (N, n), fp32, contiguous.
    """
    if not use_triton(X.device):
        return X.mul_(scales.unsqueeze(2))
    _scale(X, scales, None)


def scale_columns(P: torch.Tensor, scales: torch.Tensor) -> None:
    """Replace P (N, n, n) by P D with D = diag(scales), in place; dtypes as in `scale_rows`."""
    if not use_triton(P.device):
        return P.mul_(scales.unsqueeze(1))
    _scale(P, None, scales)


def _scale(X: torch.Tensor, left: torch.Tensor | None, right: torch.Tensor | None) -> None:
    """Multiply rows of X by `left` or columns by `right`, in place; the unused factor is None."""
    N, n, m = X.shape
    key = (left is None, launch_key(X, right if left is None else left))
    _rescale_kernel.launch(
        N * -(-n // TILE) * -(-m // TILE), key, X, left, right, n, m, X.stride(), TILE
    )


def absolute_sums(X: torch.Tensor, per: str) -> torch.Tensor:
    """Return the sums of absolute values of each "row" (N, R, 1) or "column" (N, 1, C) of X
    (N, R, C), in fp32.

    The bits of a sum depend on its own row or column only, so X may hold the rows, or the columns,
    of a shard. X is contiguous, at a multiple of 16 bytes.
    """
    N, R, C = X.shape
    dim = 2 if per == "row" else 1
    if X.numel() == 0 or not use_triton(X.device):
        parts = X.abs().float()
    elif per == "row":
        out = torch.empty((N, R, 1), dtype=torch.float32, device=X.device)
        _row_absolutes_kernel.launch(N * R, (C, launch_key(X)), X, out, C, BLOCK)
        return out
    else:
        # Lanes of the tile are stored, not added: their order in `tl.sum` depends on the layout
        # that the compiler gives to the tile, and that on C
        parts = torch.empty((N, ROWS, C), dtype=torch.float32, device=X.device)
        blocks = -(-C // COLUMNS)
        key = R, C, launch_key(X)
        _column_absolutes_kernel.launch(N * blocks, key, X, parts, R, C, blocks, ROWS, COLUMNS)
    return _added(parts, dim)


def _added(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the sums along `dim`, kept with size 1. Halves are added elementwise, so the order of
    a sum depends on the size of `dim` alone.
    """
    while (count := parts.shape[dim]) > 1:
        half = count // 2
        low = parts.narrow(dim, 0, half) + parts.narrow(dim, half, half)
        parts = torch.cat((low, parts.narrow(dim, count - 1, 1)), dim) if count % 2 else low
    return parts if parts.shape[dim] else parts.sum(dim, keepdim=True)


@jit
def _lengths_kernel(U, lengths, n, m, strides, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the largest magnitude and the length of each row; ROWS rows per program, read twice."""
    down = tl.cdiv(n, ROWS)
    matrix = (tl.program_id(0) // down).to(tl.int64)
    row = tl.program_id(0) % down * ROWS + tl.arange(0, ROWS)
    start = U + matrix * strides[0] + row.to(tl.int64)[:, None] * strides[1]
    largest = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(0, m, BLOCK):
        column = (first + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
        u = tl.load(start + column * strides[2], mask=(row < n)[:, None] & (column < m), other=0.0)
        largest = tl.maximum(largest, tl.abs(u.to(tl.float32)))
    unit = tl.max(largest, 1)
    divisor = tl.where(unit > 0, unit, 1.0)[:, None]
    squares = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(0, m, BLOCK):
        column = (first + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
        u = tl.load(start + column * strides[2], mask=(row < n)[:, None] & (column < m), other=0.0)
        u = u.to(tl.float32) / divisor
        squares += u * u
    at = lengths + matrix * 2 * n + row
    tl.store(at, unit, mask=row < n)
    tl.store(at + n, tl.sqrt(tl.sum(squares, 1)), mask=row < n)


@jit
def _unit_rows_kernel(U, Y, lengths, n, m, u_strides, y_strides, TILE: tl.constexpr):
    """Write Y = U / largest / length; a program per tile."""
    across = tl.cdiv(m, TILE)
    count = tl.cdiv(n, TILE) * across
    matrix, tile = (tl.program_id(0) // count).to(tl.int64), tl.program_id(0) % count
    row = (tile // across * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = (tile % across * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    inside = (row < n) & (column < m)
    at = lengths + matrix * 2 * n + row
    unit, length = tl.load(at, mask=row < n, other=0.0), tl.load(at + n, mask=row < n, other=0.0)
    u = tl.load(
        U + matrix * u_strides[0] + row * u_strides[1] + column * u_strides[2],
        mask=inside,
        other=0.0,
    )
    y = u.to(tl.float32) / tl.where(unit > 0, unit, 1.0) / tl.where(length == 0, 1.0, length)
    at = Y + matrix * y_strides[0] + row * y_strides[1] + column * y_strides[2]
    tl.store(at, y.to(Y.dtype.element_ty), mask=inside)


@jit
def _scales_kernel(A, lengths, scales, n, strides, BLOCK: tl.constexpr):
    """Write the diagonal elements of T; a program per row of A."""
    program = tl.program_id(0).to(tl.int64)
    matrix, row = program // n, program % n
    largest, length = lengths + matrix * 2 * n, lengths + matrix * 2 * n + n
    start = A + matrix * strides[0] + row * strides[1]
    top = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, n, BLOCK):
        column = (first + tl.arange(0, BLOCK)).to(tl.int64)
        top = tl.maximum(top, tl.load(largest + column, mask=column < n, other=0.0))
    unit = tl.max(top)
    unit = tl.where(unit > 0, unit, 1.0)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, n, BLOCK):
        column = (first + tl.arange(0, BLOCK)).to(tl.int64)
        e = tl.load(largest + column, mask=column < n, other=0.0) / unit
        e *= tl.load(length + column, mask=column < n, other=0.0)
        sums += e * tl.abs(
            tl.load(start + column * strides[2], mask=column < n, other=0.0).to(tl.float32)
        )
    total = tl.sum(sums)
    own = tl.load(largest + row) / unit * tl.load(length + row)
    tl.store(
        scales + program, tl.where(total > 0, tl.sqrt(own / tl.where(total > 0, total, 1.0)), 1.0)
    )


@jit
def _rescale_kernel(A, left, right, n, m, strides, TILE: tl.constexpr):
    """Multiply rows of A by `left`, columns by `right` (or None), in place; a program per tile."""
    across = tl.cdiv(m, TILE)
    count = tl.cdiv(n, TILE) * across
    matrix, tile = (tl.program_id(0) // count).to(tl.int64), tl.program_id(0) % count
    row = (tile // across * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = (tile % across * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    at, inside = (
        A + matrix * strides[0] + row * strides[1] + column * strides[2],
        (row < n) & (column < m),
    )
    if right is None:
        factor = tl.load(left + matrix * n + row, mask=row < n)
    elif left is None:
        factor = tl.load(right + matrix * m + column, mask=column < m)
    else:
        factor = tl.load(left + matrix * n + row, mask=row < n) * tl.load(
            right + matrix * m + column, mask=column < m
        )
    a = tl.load(at, mask=inside).to(tl.float32) * factor
    tl.store(at, a.to(A.dtype.element_ty), mask=inside)


@jit
def _row_absolutes_kernel(X, out, C, BLOCK: tl.constexpr):
    """Compute `absolute_sums` of a row, by a program."""
    program = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, C, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(X + program * C + column, mask=column < C, other=0.0)
        sums += tl.abs(x.to(tl.float32))
    tl.store(out + program, tl.sum(sums))


@jit
def _column_absolutes_kernel(X, out, R, C, blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute ROWS partial sums of `absolute_sums` of COLUMNS columns, by a program. `out`: (N,
    ROWS, C); row i has the sum of the rows i, i + ROWS and so on.
    """
    program = tl.program_id(0).to(tl.int64)
    matrix = program // blocks
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, R, ROWS):
        row = (first + lane).to(tl.int64)
        inside = (row[:, None] < R) & (column[None, :] < C)
        at = X + (matrix * R + row[:, None]) * C + column[None, :]
        sums += tl.abs(tl.load(at, mask=inside, other=0.0).to(tl.float32))
    at = out + (matrix * ROWS + lane[:, None]) * C + column[None, :]
    tl.store(at, sums, mask=column[None, :] < C)

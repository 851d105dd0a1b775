"""AOL preconditioning: rows to length 1, and A <- T A T."""

from __future__ import annotations

import torch

from ..backend import cpu_slices, use_triton
from ..launch.jit import jit, launch_key

tl = None  # Triton's language, put here by jit

BLOCK, TILE = 1024, 64


def unit_rows(U: torch.Tensor, Y: torch.Tensor, lengths: torch.Tensor) -> None:
    """Write U with every row divided by its length to Y; a row of zeros stays so.

    U (N, n, m) and Y alike, in fp32, bf16 or fp16, any strides. The lengths are written to
    `lengths` (N, 2, n), fp32, contiguous, each as two factors: the largest magnitude of a row, and
    its length in units of that.
    """
    if not use_triton(U.device):
        return unit_rows_torch(U, Y, lengths)
    N, n, m = U.shape
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


def unit_rows_torch(U, Y, lengths):
    """Compute `unit_rows`, sums matrix by matrix, so that a sum's order does not depend on the
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
    """Replace A = Y Y^T (N, n, n), any strides, by T A T, rounded once; write T's diagonals to
    `scales` (N, n), fp32, contiguous.
    """
    if not use_triton(A.device):
        return aol_torch(A, lengths, scales)
    N, n, _ = A.shape
    down, key = -(-n // TILE), launch_key(A, lengths, scales)
    _scales_kernel.launch(N * n, key, A, lengths, scales, n, A.stride(), BLOCK)
    _rescale_kernel.launch(N * down * down, key, A, scales, scales, n, n, A.stride(), TILE)


def aol_torch(A, lengths, scales):
    """Compute `aol`, sums matrix by matrix."""
    for some in cpu_slices(A):
        largest, length = lengths[some].unbind(1)
        top = largest.amax(dim=1, keepdim=True)
        e = largest / torch.where(top > 0, top, 1.0) * length
        weighed = A[some].float().abs() * e.unsqueeze(1)
        sums = torch.stack([matrix.sum(dim=1) for matrix in weighed.unbind()])
        scale = scales[some].copy_(torch.where(sums > 0, (e / sums).sqrt(), 1.0))
        A[some].mul_(scale.unsqueeze(2) * scale.unsqueeze(1))


def scale_rows(X: torch.Tensor, scales: torch.Tensor) -> None:
    """Replace X (N, n, m), any strides, by D X, D = diag(scales); `scales` (N, n) in fp32,
    contiguous. Rounded once.
    """
    if not use_triton(X.device):
        return X.mul_(scales.unsqueeze(2))
    _scale(X, scales, None)


def scale_columns(P: torch.Tensor, scales: torch.Tensor) -> None:
    """Replace P (N, n, n) by P D, as in `scale_rows`."""
    if not use_triton(P.device):
        return P.mul_(scales.unsqueeze(1))
    _scale(P, None, scales)


def _scale(X, left, right):
    (N, n, m), key = X.shape, (left is None, launch_key(X, right if left is None else left))
    _rescale_kernel.launch(
        N * -(-n // TILE) * -(-m // TILE), key, X, left, right, n, m, X.stride(), TILE
    )


@jit
def _lengths_kernel(U, lengths, n, m, strides, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS rows per program, each read twice."""
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
    """One tile per program: Y = U / largest / length."""
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
    """One row per program: its element of T."""
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
    """One tile per program: A times factors of its rows, of its columns, or both."""
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

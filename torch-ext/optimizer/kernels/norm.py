"""Scaling before the iteration: bring every matrix to Frobenius norm 1, whatever its scale, and cast it.

Decides: how maxima and squares are summed, in a fixed order that does not depend on the batch, and that nothing
overflows or vanishes on the way. Must not know: what happens to the matrices afterwards.
"""
from __future__ import annotations

import torch

from . import jit, use_triton

tl = None  # Triton's language, put here by jit
BLOCK = 1024
LONGEST = 16384  # elements of a row that are held in registers; a longer row is read twice
TILE = 64


def unit_norm(U: torch.Tensor, X: torch.Tensor, eps: float) -> None:
    """Write U / ||U|| to X, norms over whole matrices; a matrix of zeros stays so.

    U (N, n, m) and X alike, in fp32, bf16 or fp16, any strides (transposed views too). All in fp32, rounded once.
    U is divided by its largest element first, and eps is added to the norm then: a multiple of U gives the same X.
    """
    if not use_triton(U.device):
        return unit_norm_torch(U, X, eps)
    if U.stride(2) > U.stride(1):
        U, X = U.mT, X.mT
    N, R, C = U.shape
    rows = torch.empty((2, N, R), dtype=torch.float32, device=U.device)
    matrices = torch.empty((2, N), dtype=torch.float32, device=U.device)
    tiles = -(-R // TILE) * -(-C // TILE)
    block = min(LONGEST, 1 << (C - 1).bit_length())
    together = max(1, 4 * BLOCK // block)
    _rows_kernel[(-(-N * R // together),)](U, rows, N * R, R, C, U.stride(), ROWS=together, BLOCK=block,
                                           ONCE=C <= block, num_warps=8)
    _matrices_kernel[(N,)](rows, matrices, N, R, eps, BLOCK=BLOCK)
    _cast_kernel[(N * tiles,)](U, X, matrices, N, R, C, U.stride(), X.stride(), TILE=TILE)


def unit_norm_torch(U, X, eps):
    """Compute `unit_norm` matrix by matrix, so that a sum's order does not depend on the batch."""
    for u, x in zip(U, X):
        wide = u.float()
        wide = wide / _or_one(wide.abs().amax())
        x.copy_(wide / _or_one(wide.square().sum().sqrt(), eps))


def _or_one(divisor, eps=0.0):
    return torch.where(divisor > 0, divisor + eps, 1.0)


@jit
def _rows_kernel(U, rows, numel, R, C, strides, ROWS: tl.constexpr, BLOCK: tl.constexpr, ONCE: tl.constexpr):
    """ROWS rows per program: their largest magnitudes, and sums of squares in units of those, to rows (2, N, R)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = (U + row // R * strides[0] + row % R * strides[1])[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < numel)[:, None]
    if ONCE:
        u = tl.load(start + column * strides[2], mask=inside & (column < C), other=0.0).to(tl.float32)
        unit = tl.max(tl.abs(u), 1)
        u /= tl.where(unit > 0, unit, 1.0)[:, None]
        sums = tl.sum(u * u, 1)
    else:
        largest = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for first in range(0, C, BLOCK):
            at = (first + column).to(tl.int64)
            u = tl.load(start + at * strides[2], mask=inside & (at < C), other=0.0)
            largest = tl.maximum(largest, tl.abs(u.to(tl.float32)))
        unit = tl.max(largest, 1)
        squares = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for first in range(0, C, BLOCK):
            at = (first + column).to(tl.int64)
            u = tl.load(start + at * strides[2], mask=inside & (at < C), other=0.0).to(tl.float32)
            u /= tl.where(unit > 0, unit, 1.0)[:, None]
            squares += u * u
        sums = tl.sum(squares, 1)
    tl.store(rows + row, unit, mask=row < numel)
    tl.store(rows + numel + row, sums, mask=row < numel)


@jit
def _matrices_kernel(rows, matrices, N, R, eps, BLOCK: tl.constexpr):
    """One matrix per program: its largest magnitude, and its norm in units of that, to matrices (2, N)."""
    matrix = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, R, BLOCK):
        row = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(rows + matrix * R + row, mask=row < R, other=0.0))
    unit = tl.max(largest)
    divisor = tl.where(unit > 0, unit, 1.0)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, R, BLOCK):
        row = first + tl.arange(0, BLOCK)
        ratio = tl.load(rows + matrix * R + row, mask=row < R, other=0.0) / divisor
        sums += tl.load(rows + (N + matrix) * R + row, mask=row < R, other=0.0) * ratio * ratio
    norm = tl.sqrt(tl.sum(sums))
    tl.store(matrices + matrix, divisor)
    tl.store(matrices + N + matrix, tl.where(norm > 0, norm + eps, 1.0))


@jit
def _cast_kernel(U, X, matrices, N, R, C, u_strides, x_strides, TILE: tl.constexpr):
    """One tile per program: X = U / largest / norm."""
    program = tl.program_id(0)
    across = tl.cdiv(C, TILE)
    count = tl.cdiv(R, TILE) * across
    matrix, tile = (program // count).to(tl.int64), program % count
    row = ((tile // across) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = ((tile % across) * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    inside = (row < R) & (column < C)
    u = tl.load(U + matrix * u_strides[0] + row * u_strides[1] + column * u_strides[2], mask=inside, other=0.0)
    x = u.to(tl.float32) / tl.load(matrices + matrix) / tl.load(matrices + N + matrix)
    out = X + matrix * x_strides[0] + row * x_strides[1] + column * x_strides[2]
    tl.store(out, x.to(X.dtype.element_ty), mask=inside)

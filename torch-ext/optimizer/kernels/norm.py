"""Scaling before the iteration: bring every matrix to Frobenius norm 1, whatever its scale, and cast it.

Decides: how squares are summed, in a fixed order that does not depend on the batch, and that nothing overflows or
vanishes on the way. Must not know: what happens to the matrices afterwards.
"""
from __future__ import annotations

import math

import torch

from . import cpu_slices, has_pdl, jit, look, use_triton
from .split import Split, memory_of, piece_of, rows_at, strides_of, table_of

tl = None  # Triton's language, put here by jit
READ = 4096  # elements that a program reads at a time
SHARE = 8  # times that it reads, at least; few large shares are few sums to add for whoever casts a tile
PARTS = 256  # shares of one matrix, at most
LONG = 24  # turns from which on more reads are on their way at a time
LINES, SQUARE = (32, 256), (64, 64)  # rows and columns that are cast at a time, where X has them as lines, and else


def unit_norm(U: torch.Tensor | Split, X: torch.Tensor, eps: float, scratch: torch.Tensor | None = None) -> None:
    """Write U / ||U|| to X, norms over whole matrices; a matrix of zeros stays so.

    U (N, n, m) and X alike, in fp32, bf16 or fp16, any strides (transposed views too). All in fp32, rounded once.
    eps times the largest magnitude is added to the norm: a multiple of U gives the same X. scratch: a tensor like X of
    other memory, which is spoiled; what it is for needs less than the matrices do.
    """
    if not use_triton(U.device):
        return unit_norm_torch(U, X, eps)
    if U.stride(2) > U.stride(1):
        U, X = U.mT, X.mT
    N, R, C = U.shape
    block = min(READ, max(16, 1 << (C - 1).bit_length()))
    rows = READ // block
    span = max(rows * -(-R // (rows * PARTS)), rows * max(1, SHARE * block // max(block, C)))
    parts = -(-R // span)
    sums = _room_for_sums(scratch, N, parts, U.device)
    key, wide = look(U, X), U.dtype != torch.float16
    even, straight = _common_power(R, C, U, X), X.stride(2) == 1
    lines, columns = LINES if straight else SQUARE
    stages = 8 if span // rows * -(-C // block) > LONG else 4
    pdl = has_pdl(U.device)
    _sums_kernel.launch(
        N * parts, key, memory_of(U), sums, parts, span, R, C, strides_of(U), wide, rows, block, stages, pdl,
        num_warps=4)
    _unit_norm_kernel.launch(
        N * -(-R // lines) * -(-C // columns), key, memory_of(U), X, sums, parts, R, C, strides_of(U), X.stride(), eps,
        1 << (parts - 1).bit_length(), lines, columns, even, straight, pdl, num_warps=4,
        **({"launch_pdl": True} if pdl else {}))


def _room_for_sums(scratch, N, parts, device):
    """(N, 4, parts) in fp32, in the memory of `scratch` where that is long enough."""
    if scratch is None or scratch.stride(0) * scratch.itemsize < 16 * parts:
        return torch.empty((N, 4, parts), dtype=torch.float32, device=device)
    words = scratch.as_strided((16 // scratch.itemsize * N * parts,), (1,))
    return words.view(torch.float32).view(N, 4, parts)


def _common_power(R, C, U, X) -> int:
    """The largest power of two up to 16 that divides sizes and strides: how wide accesses may be; 1 for odd layouts."""
    strides = [step for t in (U, X) for step in t.stride()]
    if U.stride(2) != 1 or strides.count(1) != 2 or 1 in (R, C):
        return 1
    return math.gcd(16, R, C, *(step for step in strides if step > 1))


def unit_norm_torch(U, X, eps):
    """Compute `unit_norm`, sums matrix by matrix, so that a sum's order does not depend on the batch."""
    for some in cpu_slices(U):
        wide = U[some].float()
        largest = wide.abs().amax((1, 2), keepdim=True)
        unit = torch.ones_like(largest).masked_fill_(largest > 2.0**50, 2.0**-80)  # numbers alone have a default dtype
        unit.masked_fill_(largest < 2.0**-40, 2.0**80)
        wide = wide * unit
        squares = torch.stack([matrix.sum() for matrix in wide.square().unbind()]).view(-1, 1, 1)
        norm = squares.sqrt() + eps * (largest * unit)
        X[some].copy_(wide / torch.where(norm == 0, 1.0, norm))


@jit.alike("parts", "span")
def _sums_kernel(U, sums, parts, span, R, C, strides, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                 STAGES: tl.constexpr, PDL: tl.constexpr):
    """`span` rows per program: the largest magnitude, and the sum of squares in one of three units, to sums (N, 4,
    parts). The units keep squares from overflow and loss (WIDE: where the dtype has such numbers); it is the idea of
    J. L. Blue, ACM Trans. Math. Softw. 4, 1978, with one unit for all that a program reads.
    """
    part = tl.program_id(0) % parts
    matrix = (tl.program_id(0) // parts).to(tl.int64)
    start = table_of(U, matrix, R) if strides is None else U + matrix * strides[0]
    largest, unit, squares = squares_of(start, part * span, part * span + span, R, C, strides, WIDE, ROWS, BLOCK,
                                        STAGES)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    at = sums + matrix * 4 * parts + part
    tl.store(at, largest)
    tl.store(at + parts, tl.where(unit > 1, squares, 0.0))
    tl.store(at + 2 * parts, tl.where(unit == 1, squares, 0.0))
    tl.store(at + 3 * parts, tl.where(unit < 1, squares, 0.0))


@jit
def squares_of(start, first, end, R, C, strides, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
               STAGES: tl.constexpr):
    """Return the largest magnitude in rows from `first` to `end`, a unit, and the sum of squares in that unit."""
    largest, squares = _sum(start, first, end, R, C, strides, 1.0, ROWS, BLOCK, STAGES)
    unit = _unit_of(largest)
    if WIDE and unit != 1.0:
        _, squares = _sum(start, first, end, R, C, strides, unit, ROWS, BLOCK, STAGES)
    return largest, unit, squares


@jit
def _sum(start, first, end, R, C, strides, unit, ROWS: tl.constexpr, BLOCK: tl.constexpr,
         STAGES: tl.constexpr):
    """Return the largest magnitude in rows from `first` to `end`, and the sum of squares times the unit's square."""
    largest = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    squares = largest
    if strides is None:  # piece by piece; where one ends among rows that are read together, these are read twice
        row, last = first.to(tl.int64), tl.minimum(end, R).to(tl.int64)
        while row < last:
            piece, pitch, stop = piece_of(start, row, C)
            stop = tl.minimum(stop, last)
            turn = row - (row - first) % ROWS
            largest, squares = _add(largest, squares, piece, turn, turn + tl.cdiv(stop - turn, ROWS) * ROWS, row, stop,
                                    C, (0, pitch, 1), unit, ROWS, BLOCK, STAGES)
            row = stop
    else:
        largest, squares = _add(largest, squares, start, first, end, None, R, C, strides, unit, ROWS, BLOCK, STAGES)
    return tl.max(largest), tl.sum(squares)


@jit
def _add(largest, squares, start, first, end, low, R, C, strides, unit, ROWS: tl.constexpr, BLOCK: tl.constexpr,
         STAGES: tl.constexpr):
    """Add to each element's largest magnitude and sum of squares those of rows from `first` to `end`, of which there
    are those below R and from `low` on.
    """
    across = tl.cdiv(C, BLOCK)
    for turn in tl.range(0, (end - first) // ROWS * across, num_stages=STAGES):
        row = first + turn // across * ROWS + tl.arange(0, ROWS)[:, None]
        column = turn % across * BLOCK + tl.arange(0, BLOCK)[None, :]
        at = start + row.to(tl.int64) * strides[1] + column.to(tl.int64) * strides[2]
        inside = (row < R) & (column < C)
        if low is not None:
            inside &= row >= low
        u = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(u))
        squares = tl.fma(u * unit, u * unit, squares)  # of a sum of squares either could be what is rounded first
    return largest, squares


@jit
def _even(number, EVEN: tl.constexpr):
    """Tell the compiler that EVEN divides a number: it finds multiples of 16, and ignores tl.multiple_of here."""
    return number if EVEN == 1 or EVEN == 16 else number // EVEN * EVEN


@jit
def _unit_of(largest):
    """Return a power of two by which to multiply numbers up to `largest` before they are squared and summed."""
    return tl.where(largest > 2.0**50, 2.0**-80, tl.where(largest < 2.0**-40, 2.0**80, 1.0))


@jit
def _factors(sums, parts, eps, BLOCK: tl.constexpr):
    """Return the power of two by which a matrix is multiplied, and the number by which it is multiplied then, from its
    sums (4, parts): a division per element would take as long as the memory does.
    """
    row, part = tl.arange(0, 4), tl.arange(0, BLOCK)[None, :]
    found = tl.load(sums + row[:, None] * parts + part, mask=part < parts, other=0.0)
    largest, total = tl.max(tl.where(row[:, None] == 0, found, 0.0)), tl.sum(found, axis=1)
    small, middle = tl.sum(tl.where(row == 1, total, 0.0)), tl.sum(tl.where(row == 2, total, 0.0))
    power, norm = _norm_of(largest, small, middle, tl.sum(tl.where(row == 3, total, 0.0)), eps)
    return power, 1.0 / norm


@jit
def _norm_of(largest, small, middle, large, eps):
    """Return the power of two by which a matrix is multiplied, and then the number by which it is divided."""
    down, up = large > 0, (large == 0) & (middle < 2.0**-60)
    power = tl.where(down, 2.0**-80, tl.where(up, 2.0**80, 1.0))
    less = tl.where(up, 1.0, 2.0**-80)
    squares = middle * power * power + tl.where(down, large, small * less * less)
    norm = tl.sqrt(squares) + eps * (largest * power)
    return power, tl.where(norm == 0, 1.0, norm)


@jit.alike("parts")
def _unit_norm_kernel(U, X, sums, parts, R, C, u_strides, x_strides, eps, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr, EVEN: tl.constexpr, STRAIGHT: tl.constexpr, PDL: tl.constexpr):
    """One tile per program: X = U / norm. The tile is on its way while the sums are added. The last matrices first: the
    sums left these in the cache, and the product to come begins with the first ones.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    across = tl.cdiv(C, COLUMNS)
    count = tl.cdiv(R, ROWS) * across
    matrix, tile = (program // count).to(tl.int64), program % count
    row = ((tile // across) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = ((tile % across) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    inside = (row < _even(R, EVEN)) & (column < _even(C, EVEN))
    if u_strides is None:
        line = (tile // across) * ROWS + tl.arange(0, ROWS)
        u_at = rows_at(table_of(U, matrix, R), line, line < R)[:, None] + column
    else:
        u_at = U + matrix * _even(u_strides[0], EVEN) + row * _even(u_strides[1], EVEN) + column * u_strides[2]
    u = tl.load(u_at, mask=inside, other=0.0).to(tl.float32)
    power, inverse = _factors(sums + matrix * 4 * parts, parts, eps, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if STRAIGHT:
        x_at = X + matrix * _even(x_strides[0], EVEN) + row * _even(x_strides[1], EVEN) + column * x_strides[2]
    else:
        x_at = X + matrix * _even(x_strides[0], EVEN) + row * x_strides[1] + column * _even(x_strides[2], EVEN)
    tl.store(x_at, (u * power * inverse).to(X.dtype.element_ty), mask=inside)

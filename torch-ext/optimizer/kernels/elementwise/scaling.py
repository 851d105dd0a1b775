"""Scaling of matrices to Frobenius norm 1: cast with deferred scales, or the scales alone."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..backend import cpu_slices, has_pdl, use_triton
from ..launch.jit import jit, look
from .row_scattered import ScatteredRows, memory_of, rows_at, strides_of

tl = None  # Triton's language, put here by jit

# Rows and columns that are cast at a time, where X has them as lines, and else
LINES, SQUARE = (32, 256), (64, 64)
SAMPLE = 32, 16  # rows and columns of what a power of two is chosen by
SHARES = 16  # programs for a matrix whose sample says too little
ROOM = 2  # numbers of scratch for every tile
CAST, COPY, READ = 0, 1, 2  # what becomes of a matrix while it is read


def unit_norm(
    U: torch.Tensor | ScatteredRows,
    X: torch.Tensor,
    scales: torch.Tensor,
    eps: float,
    scratch: torch.Tensor | None = None,
) -> None:
    """Write c U to X, and to scales the numbers by which X would be U / ||U||; c is a power of two
    for each matrix, so that X is not far from that. A matrix of zeros stays so.

    U (N, n, m) and X alike, in fp32, bf16 or fp16, any strides (transposed views too); scales (N,)
    fp32. All in fp32, rounded once. eps times the largest magnitude is added to the norm: a
    multiple of U gives the same matrix. scratch: a tensor like X of other memory, which is spoiled;
    what it is for needs less than the matrices do.
    """
    if not use_triton(U.device):
        whole = isinstance(U, torch.Tensor) and X.dtype == torch.float32
        return (
            unit_norm_whole(U, X, scales, eps, scratch)
            if whole
            else unit_norm_torch(U, X, scales, eps)
        )
    if U.stride(2) > U.stride(1):
        U, X = U.mT, X.mT
    (N, R, C), cast = U.shape, cast_by_tiles(U, X, scratch, CAST)
    shares = min(SHARES, cast.parts)
    _norm_kernel.launch(
        N * shares,
        cast.key,
        memory_of(U),
        X,
        cast.sums,
        cast.guesses,
        scales,
        cast.parts,
        shares,
        R,
        C,
        strides_of(U),
        X.stride(),
        cast.aim,
        eps,
        cast.block,
        *cast.constants,
        **cast.options,
    )


class Cast(NamedTuple):
    """What a launch left, and what the one that makes the norms is told."""

    key: tuple
    sums: torch.Tensor
    guesses: torch.Tensor
    parts: int
    aim: float
    block: int
    constants: tuple
    options: dict


def cast_by_tiles(U, X, scratch, form) -> Cast:
    """Cast, copy or only read U, whose rows are lines."""
    N, R, C = U.shape
    straight = X.stride(2) == 1
    lines, columns = LINES if straight else SQUARE
    parts = -(-R // lines) * -(-C // columns)
    sums, guesses = _room_for_sums(scratch, N, parts, U.device)
    key, pdl = (LINES, SAMPLE, form, look(U, X)), has_pdl(U.device)
    constants = lines, columns, _common_power(R, C, U, X), straight
    aim = 1.25 * math.sqrt(R * C)  # norm over mean magnitude, for normal elements
    options = {"num_warps": 4} | ({"launch_pdl": True} if pdl else {})
    _cast_kernel.launch(
        N * parts,
        key,
        memory_of(U),
        X,
        sums,
        guesses,
        parts,
        R,
        C,
        strides_of(U),
        X.stride(),
        aim,
        *constants,
        *SAMPLE,
        form,
        pdl,
        **options,
    )
    block = min(1024, 1 << (parts - 1).bit_length())
    return Cast(key, sums, guesses, parts, aim, block, (*constants, pdl), options)


def _room_for_sums(scratch, N, parts, device):
    """(N, 2, parts) and (N,) in fp32, in the memory of `scratch` where that is long enough."""
    numbers = N * (ROOM * parts + 1)
    if scratch is None or scratch.stride(0) * scratch.itemsize * N < 4 * numbers:
        flat = torch.empty(numbers, dtype=torch.float32, device=device)
    else:
        flat = scratch.as_strided((4 * numbers // scratch.itemsize,), (1,)).view(torch.float32)
    return flat[:-N].view(N, ROOM, parts), flat[-N:]


def _common_power(R, C, U, X) -> int:
    """The largest power of two up to 16 that divides sizes and strides: how wide accesses may be; 1
    for odd layouts.
    """
    strides = [step for t in (U, X) for step in t.stride()]
    if U.stride(2) != 1 or strides.count(1) != 2 or 1 in (R, C):
        return 1
    return math.gcd(16, R, C, *(step for step in strides if step > 1))


def unit_norm_torch(U, X, scales, eps):
    """Compute `unit_norm`, with scales of 1, sums matrix by matrix, so that a sum's order does not
    depend on the batch.
    """
    scales.fill_(1.0)
    for some in cpu_slices(U):
        wide = U[some].float()
        largest = wide.abs().amax((1, 2), keepdim=True)
        # Numbers alone have a default dtype
        unit = torch.ones_like(largest).masked_fill_(largest > 2.0**50, 2.0**-80)
        unit.masked_fill_(largest < 2.0**-40, 2.0**80)
        wide = wide * unit
        squares = torch.stack([matrix.sum() for matrix in wide.square().unbind()]).view(-1, 1, 1)
        norm = squares.sqrt() + eps * (largest * unit)
        X[some].copy_(wide / torch.where(norm == 0, 1.0, norm))


def unit_norm_whole(
    U: torch.Tensor,
    X: torch.Tensor,
    scales: torch.Tensor,
    eps: float,
    scratch: torch.Tensor | None = None,
) -> None:
    """Compute `unit_norm` for X in fp32, with scales of 1, all matrices in each operation:
    `scratch` takes the squares.

    A sum is taken matrix by matrix, as in `unit_norm_torch`. Other operations give an element the
    same bits in every batch.
    """
    scales.fill_(1.0)
    wide = U if U.dtype == torch.float32 else X.copy_(U)
    largest = torch.maximum(wide.amax((1, 2), keepdim=True), wide.amin((1, 2), keepdim=True).neg_())
    unit = torch.ones_like(largest).masked_fill_(largest > 2.0**50, 2.0**-80)
    unit.masked_fill_(largest < 2.0**-40, 2.0**80)
    torch.mul(wide, unit, out=X)
    fits = scratch is not None and scratch.dtype == X.dtype and scratch.shape[1:] == X.shape[1:]
    rooms = scratch[: len(X)] if fits else torch.empty_like(X[:1]).expand_as(X)
    sums = [torch.square(x, out=room).sum() for x, room in zip(X.unbind(), rooms.unbind())]
    norm = torch.stack(sums).view(-1, 1, 1).sqrt_().add_(largest.mul_(unit), alpha=eps)
    X.div_(norm.masked_fill_(norm == 0, 1.0))


@jit.alike("parts")
def _cast_kernel(
    U,
    X,
    sums,
    guesses,
    parts,
    R,
    C,
    u_strides,
    x_strides,
    aim,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    STRAIGHT: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    FORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile per program: X = c U (FORM 0), U (1), or nothing (2); to sums (N, 2, parts) its
    largest magnitude, and the sum of its squares in one of three units. The units keep squares from
    overflow and loss; it is the idea of J. L. Blue, ACM Trans. Math. Softw. 4, 1978, with one unit
    for all that a program reads.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    matrix, tile = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    u_at, x_at, inside = _tile(
        U, X, matrix, tile, R, C, u_strides, x_strides, ROWS, COLUMNS, EVEN, STRAIGHT
    )
    u = tl.load(u_at, mask=inside, other=0.0).to(tl.float32)
    power = 1.0
    if FORM == 0:
        power = _guess(U, matrix, R, C, u_strides, aim, DOWN, ACROSS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if FORM < 2:
        tl.store(x_at, (u * power).to(X.dtype.element_ty), mask=inside)
    largest = tl.max(tl.abs(u))
    unit = unit_of(largest)
    at = sums + matrix * 2 * parts + tile
    tl.store(at, largest)
    tl.store(at + parts, tl.sum((u * unit) * (u * unit)))
    if FORM == 0 and tile == 0:
        tl.store(guesses + matrix, power)


@jit
def _tile(
    U,
    X,
    matrix,
    tile,
    R,
    C,
    u_strides,
    x_strides,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    STRAIGHT: tl.constexpr,
):
    """Return where a tile lies in U and in X, and what of it there is."""
    across = tl.cdiv(C, COLUMNS)
    line = (tile // across) * ROWS + tl.arange(0, ROWS)
    row = line.to(tl.int64)[:, None]
    column = ((tile % across) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    inside = (row < _even(R, EVEN)) & (column < _even(C, EVEN))
    if u_strides is None:
        u_at = rows_at(U, matrix, R, line, line < R)[:, None] + column
    else:
        u_at = (
            U
            + matrix * _even(u_strides[0], EVEN)
            + row * _even(u_strides[1], EVEN)
            + column * u_strides[2]
        )
    if STRAIGHT:
        x_at = (
            X
            + matrix * _even(x_strides[0], EVEN)
            + row * _even(x_strides[1], EVEN)
            + column * x_strides[2]
        )
    else:
        x_at = (
            X
            + matrix * _even(x_strides[0], EVEN)
            + row * x_strides[1]
            + column * _even(x_strides[2], EVEN)
        )
    return u_at, x_at, inside


@jit
def _guess(U, matrix, R, C, strides, aim, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Return the power of two for the norm that a matrix would have if it were everywhere as in
    some rows and columns, spread over it. Their mean magnitude tells, for a single element that is
    large would outweigh all others.
    """
    line = tl.arange(0, DOWN)
    row = line.to(tl.int64) * R // DOWN
    column = (line.to(tl.int64) * C // DOWN // ACROSS * ACROSS)[:, None] + tl.arange(0, ACROSS)[
        None, :
    ]
    if strides is None:
        at = rows_at(U, matrix, R, row)[:, None] + column
    else:
        at = U + matrix * strides[0] + row[:, None] * strides[1] + column * strides[2]
    inside = column < C
    total = tl.sum(tl.abs(tl.load(at, mask=inside, other=0.0).to(tl.float32)))
    return power_of(total / tl.sum(inside.to(tl.float32)) * aim)


@jit
def power_of(number):
    """Return the power of two that brings a number to [1, 2), as far as there is one; 1 for 0, Inf
    and NaN.
    """
    exponent = number.to(tl.int32, bitcast=True) >> 23 & 255
    power = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)
    return tl.where((number == 0) | (exponent == 255), 1.0, power)


@jit.alike("parts", "shares")
def _norm_kernel(
    U,
    X,
    sums,
    guesses,
    scales,
    parts,
    shares,
    R,
    C,
    u_strides,
    x_strides,
    aim,
    eps,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    STRAIGHT: tl.constexpr,
    PDL: tl.constexpr,
):
    """`shares` programs per matrix: its scale, from its sums. Where c U has left the range in which
    16 bits are exact, because the rest is not like the sample, each casts its share again.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    matrix, share = (tl.program_id(0) // shares).to(tl.int64), tl.program_id(0) % shares
    most, unit, norm = norm_of_sums(sums + matrix * 2 * parts, parts, eps, BLOCK)
    power = tl.load(guesses + matrix)
    if (most * power > 16384.0) | ((most * power * aim < 0.25) & (most > 0)):
        power = tl.minimum(power_of(norm) * unit, 2.0**127)
        for tile in range(share, parts, shares):
            u_at, x_at, inside = _tile(
                U, X, matrix, tile, R, C, u_strides, x_strides, ROWS, COLUMNS, EVEN, STRAIGHT
            )
            u = tl.load(u_at, mask=inside, other=0.0).to(tl.float32)
            tl.store(x_at, (u * power).to(X.dtype.element_ty), mask=inside)
    if share == 0:
        # X X^T takes its square
        tl.store(scales + matrix, tl.where(most == 0, 1.0, unit / power / norm))


@jit
def norm_of_sums(sums, parts, eps, BLOCK: tl.constexpr):
    """Return a matrix's largest magnitude, the power of two by which it is multiplied, and the
    number by which it is then divided.
    """
    part = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    small, middle, large = largest, largest, largest
    for first in range(0, parts, BLOCK):
        at, inside = sums + first + part, first + part < parts
        most = tl.load(at, mask=inside, other=0.0)
        squares, unit = tl.load(at + parts, mask=inside, other=0.0), unit_of(most)
        largest = tl.maximum(largest, most)
        small += tl.where(unit > 1, squares, 0.0)
        middle += tl.where(unit == 1, squares, 0.0)
        large += tl.where(unit < 1, squares, 0.0)
    most = tl.max(largest)
    unit, norm = _norm_of(most, tl.sum(small), tl.sum(middle), tl.sum(large), eps)
    return most, unit, norm


@jit
def _even(number, EVEN: tl.constexpr):
    """Tell the compiler that EVEN divides a number: it finds multiples of 16, and ignores
    tl.multiple_of here.
    """
    return number if EVEN == 1 or EVEN == 16 else number // EVEN * EVEN


@jit
def unit_of(largest):
    """Return a power of two by which to multiply numbers up to `largest` before they are squared
    and summed.
    """
    return tl.where(largest > 2.0**50, 2.0**-80, tl.where(largest < 2.0**-40, 2.0**80, 1.0))


@jit
def _norm_of(largest, small, middle, large, eps):
    """Return the power of two by which a matrix is multiplied, and then the number by which it is
    divided.
    """
    down, up = large > 0, (large == 0) & (middle < 2.0**-60)
    power = tl.where(down, 2.0**-80, tl.where(up, 2.0**80, 1.0))
    less = tl.where(up, 1.0, 2.0**-80)
    squares = middle * power * power + tl.where(down, large, small * less * less)
    norm = tl.sqrt(squares) + eps * (largest * power)
    return power, tl.where(norm == 0, 1.0, norm)


# Rows, and elements of a sum, that are taken at a time where squares leave the range of fp32
BEYOND = 32, 32
PROGRAMS = 128  # of a launch, or one for each matrix


def raw_norm(
    U: torch.Tensor | ScatteredRows,
    X: torch.Tensor | None,
    factors: torch.Tensor,
    A: torch.Tensor,
    eps: float,
    scratch: torch.Tensor | None = None,
) -> None:
    """Write to factors (3, N), fp32, of U (N, n, m) in 16 bits, which is not cast here: by what it
    is multiplied for U U^T, before it is cast, and after; eps and scratch as for `unit_norm`. X:
    memory that U is copied to, in U's dtype; None if U, whose rows then are lines, is read in place
    later, too.

    Where squares might leave the range of fp32, U U^T, scaled, is written to A (N, n, n), and the
    first factor is -1.
    """
    if not use_triton(U.device):
        return raw_norm_torch(U, X, factors, A, eps)
    raw, turned = U if X is None else X, U.stride(2) > U.stride(1)
    cast = cast_by_tiles(
        *((U.mT, raw.mT) if turned else (U, raw)), scratch, READ if X is None else COPY
    )
    shares = min(SHARES, max(1, PROGRAMS // len(U)))
    _raw_norm_kernel.launch(
        len(U) * shares,
        (cast.key, look(raw, A)),
        raw,
        A,
        cast.sums,
        factors,
        factors.stride(0),
        cast.parts,
        shares,
        *U.shape[1:],
        raw.stride(),
        A.stride(),
        eps,
        int(X is not None),
        cast.block,
        *BEYOND,
        has_pdl(U.device),
        **cast.options,
    )


def raw_norm_torch(U, X, factors, A, eps):
    """The same in fp64, in which nothing leaves the range."""
    for some in cpu_slices(U):
        wide = U[some].float()
        if X is not None:
            X[some].copy_(wide)
        wide = wide.double()
        largest = wide.abs().amax((1, 2))
        norm = wide.square().sum((1, 2)).sqrt() + eps * largest
        norm.masked_fill_(norm == 0, 1.0)
        power = norm.log2().floor().neg().exp2()
        beyond = (largest > 2.0**50) | (largest < 2.0**-40) & (largest > 0)
        factors[:, some] = torch.stack(
            [(1 / norm).masked_fill(beyond, -1.0), power, 1 / (norm * power)]
        ).float()
        wide = (wide / norm.view(-1, 1, 1))[beyond]
        A[some][beyond] = (wide @ wide.mT).to(A.dtype)


@jit.alike("apart", "parts", "shares", "copied")
def _raw_norm_kernel(
    U,
    A,
    sums,
    factors,
    apart,
    parts,
    shares,
    n,
    m,
    u_strides,
    a_strides,
    eps,
    copied,
    BLOCK: tl.constexpr,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """`shares` programs per matrix: its factors, from its sums; its A, where U's squares might
    leave the range of fp32, by products that are added in the order in which all are.
    """
    if PDL:
        # The next kernel may multiply U meanwhile, which was there before it was read
        if copied == 0:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # said again, it changes nothing
    matrix, share = (tl.program_id(0) // shares).to(tl.int64), tl.program_id(0) % shares
    most, unit, norm = norm_of_sums(sums + matrix * 2 * parts, parts, eps, BLOCK)
    power = tl.where(most == 0, 1.0, tl.minimum(power_of(norm) * unit, 2.0**127))
    scale = tl.where(most == 0, 1.0, unit / power / norm)
    beyond = (unit_of(most) != 1.0) & (most != 0)
    if share == 0:
        tl.store(factors + matrix, tl.where(beyond, -1.0, scale * power))
        tl.store(factors + apart + matrix, power)
        tl.store(factors + 2 * apart + matrix, scale)
    if beyond:
        down, side, step = tl.cdiv(n, SIDE), tl.arange(0, SIDE), tl.arange(0, STEP)
        for tile in range(share, down * down, shares):
            r, s = tile // down * SIDE + side, tile % down * SIDE + side
            total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
            for first in range(0, m, STEP):
                left = _scaled(U + matrix * u_strides[0], r, first + step, n, m, u_strides, power)
                right = _scaled(U + matrix * u_strides[0], s, first + step, n, m, u_strides, power)
                total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
            at = A + matrix * a_strides[0] + r.to(tl.int64)[:, None] * a_strides[1]
            result = (total * (scale * scale)).to(A.dtype.element_ty)
            tl.store(
                at + s.to(tl.int64)[None, :] * a_strides[2],
                result,
                mask=(r < n)[:, None] & (s < n)[None, :],
            )


@jit
def _scaled(U, r, k, n, m, strides, power):
    """Rows r and columns k of a matrix, times a power of two."""
    at = U + r.to(tl.int64)[:, None] * strides[1] + k.to(tl.int64)[None, :] * strides[2]
    u = tl.load(at, mask=(r < n)[:, None] & (k < m)[None, :], other=0.0)
    return (u.to(tl.float32) * power).to(U.dtype.element_ty)

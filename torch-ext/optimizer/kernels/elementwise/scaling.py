"""Scaling of matrices to Frobenius norm 1, before Newton-Schulz.

`unit_norm` casts a matrix times a power of two and returns the remaining factor (deferred scale),
so that a matrix is read once. `raw_norm` casts nothing: it returns factors of a 16-bit matrix.

The power of two is chosen from a sample of the matrix, read by every program. Each program leaves
the largest magnitude and the sum of squares of a tile; a second kernel makes the norm of them. Sums
of squares use one of three units, against overflow and loss of small squares: J. L. Blue, ACM
Trans. Math. Softw. 4, 1978, with a unit for all elements of a tile.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..backend import cpu_slices, has_pdl, use_triton
from ..launch.jit import jit, launch_key
from .row_scattered import ScatteredRows, memory_of, rows_at, strides_of

tl = None  # Triton's language, put here by jit

# (rows, columns) of a tile of the cast: if rows of X are contiguous, else
LINES = (32, 256)
SQUARE = (64, 64)
SAMPLE = 32, 16  # rows, and elements per row, of the sample that a power of two is chosen by
PROGRAMS_PER_MATRIX = 16  # most programs per matrix of the kernels that make norms of sums
NUMBERS_PER_TILE = 2  # fp32 numbers of scratch per tile: largest magnitude, sum of squares
# FORM of the cast kernel: X <- power U, X <- U, or U is only read
CAST = 0
COPY = 1
READ = 2


def unit_norm(
    U: torch.Tensor | ScatteredRows,
    X: torch.Tensor,
    scales: torch.Tensor,
    eps: float,
    scratch: torch.Tensor | None = None,
) -> None:
    """Write c U to X and scales s to `scales`, such that s X = U / (||U|| + eps max |U|).

    c is a power of two per matrix with a norm of c U near 1. eps counts in units of the largest
    magnitude, so that a multiple of U gives equal results. A matrix of zeros stays zero, with scale
    1. U (N, n, m) and X (N, n, m) each in fp32, bf16 or fp16, any strides (transposed views too),
    rounded once. `scales` (N,) fp32.

    `scratch`: a tensor with the shape and dtype of X in separate memory, overwritten; None, or too
    little memory (narrow matrices), allocates.
    """
    if not use_triton(U.device):
        if isinstance(U, torch.Tensor) and X.dtype == torch.float32:
            return unit_norm_whole(U, X, scales, eps, scratch)
        return unit_norm_torch(U, X, scales, eps)
    # Rows of U are lines of memory from here on
    if U.stride(2) > U.stride(1):
        U, X = U.mT, X.mT
    N, R, C = U.shape
    cast = cast_by_tiles(U, X, scratch, CAST)
    programs = min(PROGRAMS_PER_MATRIX, cast.parts)
    _norm_kernel.launch(
        N * programs,
        cast.key,
        memory_of(U),
        X,
        cast.sums,
        cast.guesses,
        scales,
        cast.parts,
        programs,
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
    """Results of the cast kernel, and arguments for the kernel that makes the norms."""

    key: tuple  # of the launch
    sums: torch.Tensor  # (N, 2, parts) fp32: largest magnitude and sum of squares of each tile
    guesses: torch.Tensor  # (N,) fp32: power of two of each matrix, chosen from the sample
    parts: int  # tiles per matrix
    aim: float  # expected ratio of a matrix' norm to its mean magnitude
    block: int  # sums that a program reads at a time
    constants: tuple  # ROWS, COLUMNS, EVEN, STRAIGHT, PDL
    options: dict[str, Any]  # of the launch


def cast_by_tiles(
    U: torch.Tensor | ScatteredRows, X: torch.Tensor, scratch: torch.Tensor | None, form: int
) -> Cast:
    """Launch the cast kernel: cast, copy or only read U (`form`: CAST, COPY or READ).

    Rows of U are lines of memory; otherwise U, X and `scratch` are as in `unit_norm`.
    """
    N, R, C = U.shape
    straight = X.stride(2) == 1
    lines, columns = LINES if straight else SQUARE
    parts = -(-R // lines) * -(-C // columns)
    sums, guesses = _memory_of_sums(scratch, N, parts, U.device)
    key = (LINES, SAMPLE, form, launch_key(U, X))
    pdl = has_pdl(U.device)
    constants = lines, columns, _common_power(R, C, U, X), straight
    # Normal elements: root mean square over mean magnitude is sqrt(pi / 2) = 1.25
    aim = 1.25 * math.sqrt(R * C)
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


def _memory_of_sums(
    scratch: torch.Tensor | None, N: int, parts: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp32 tensors (N, 2, parts) and (N,), in `scratch` if large enough, else new."""
    numbers = N * (NUMBERS_PER_TILE * parts + 1)
    if scratch is None or scratch.stride(0) * scratch.itemsize * N < 4 * numbers:
        flat = torch.empty(numbers, dtype=torch.float32, device=device)
    else:
        flat = scratch.as_strided((4 * numbers // scratch.itemsize,), (1,)).view(torch.float32)
    return flat[:-N].view(N, NUMBERS_PER_TILE, parts), flat[-N:]


def _common_power(R: int, C: int, U: torch.Tensor | ScatteredRows, X: torch.Tensor) -> int:
    """Return the largest power of two up to 16 that divides sizes and strides of U and X.

    The kernel may access as many elements at a time. 1 if rows of U are not contiguous, or if a
    further stride or a side is 1.
    """
    strides = [step for t in (U, X) for step in t.stride()]
    if U.stride(2) != 1 or strides.count(1) != 2 or 1 in (R, C):
        return 1
    return math.gcd(16, R, C, *(step for step in strides if step > 1))


def unit_norm_torch(
    U: torch.Tensor | ScatteredRows, X: torch.Tensor, scales: torch.Tensor, eps: float
) -> None:
    """Compute `unit_norm` in torch, with scales of 1: X = U / (||U|| + eps max |U|).

    Sums are computed matrix by matrix: the order of a sum, hence the bits, must not depend on the
    batch.
    """
    scales.fill_(1.0)
    for some in cpu_slices(U):
        # Contiguous: the order of a sum must not depend on where the rows of a matrix lie either
        wide = U[some].float().contiguous()
        largest = wide.abs().amax((1, 2), keepdim=True)
        # No torch.where of two Python numbers, whose result has torch's default dtype
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
    buffers = scratch[: len(X)] if fits else torch.empty_like(X[:1]).expand_as(X)
    sums = [torch.square(x, out=buffer).sum() for x, buffer in zip(X.unbind(), buffers.unbind())]
    norm = torch.stack(sums).view(-1, 1, 1).sqrt_().add_(largest.mul_(unit), alpha=eps)
    X.div_(norm.masked_fill_(norm == 0, 1.0))


@jit.unspecialized("parts")
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
    """Write X = power U (FORM 0) or X = U (1) or nothing (2), and sums; a program per tile.

    `sums` (N, 2, parts): the tile's largest magnitude, and the sum of squares in the unit given by
    `unit_of` the magnitude. `guesses` (N,): the power, written by the first tile (FORM 0). `aim`:
    see `Cast`. EVEN divides sizes and strides; STRAIGHT: rows of X are contiguous; DOWN, ACROSS:
    rows and columns of the sample. `u_strides`: None if U is a row table.
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
    """Return (pointers into U, pointers into X, mask of existing elements) of a tile."""
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
    """Return the power of two that brings the norm to [1, 2), estimated from a sample.

    The sample: ACROSS adjacent elements in each of DOWN rows, spread over both sides of the matrix.
    The estimate uses the mean magnitude: by the largest magnitude, a single spike would push all
    remaining elements below the normal range of fp16.
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
    """Return the power of two that brings a number to [1, 2), clamped to normal fp32 numbers.

    1 for 0, Inf and NaN.
    """
    exponent = number.to(tl.int32, bitcast=True) >> 23 & 255
    power = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)
    return tl.where((number == 0) | (exponent == 255), 1.0, power)


@jit.unspecialized("parts", "programs")
def _norm_kernel(
    U,
    X,
    sums,
    guesses,
    scales,
    parts,
    programs,
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
    """Write the scale of each matrix, from the sums; `programs` programs per matrix.

    If the matrix is unlike the sample, and power U leaves the normal range of fp16, the programs
    cast the matrix again, by a power of two chosen from the norm.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    matrix, program = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs
    most, unit, norm = norm_of_sums(sums + matrix * 2 * parts, parts, eps, BLOCK)
    power = tl.load(guesses + matrix)
    if (most * power > 16384.0) | ((most * power * aim < 0.25) & (most > 0)):
        power = tl.minimum(power_of(norm) * unit, 2.0**127)
        for tile in range(program, parts, programs):
            u_at, x_at, inside = _tile(
                U, X, matrix, tile, R, C, u_strides, x_strides, ROWS, COLUMNS, EVEN, STRAIGHT
            )
            u = tl.load(u_at, mask=inside, other=0.0).to(tl.float32)
            tl.store(x_at, (u * power).to(X.dtype.element_ty), mask=inside)
    if program == 0:
        # A matrix of zeros has scale 1: X X^T is multiplied by the square, which must be finite
        tl.store(scales + matrix, tl.where(most == 0, 1.0, unit / power / norm))


@jit
def norm_of_sums(sums, parts, eps, BLOCK: tl.constexpr):
    """Return (largest magnitude, unit, norm) of a matrix, from sums over `parts` tiles.

    `sums`: pointer to the matrix' part of `Cast.sums`. The norm counts in 1 / unit: the matrix
    times `unit`, a power of two, divided by `norm` has norm 1 (up to eps).
    """
    part = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    small = largest
    middle = largest
    large = largest
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
    """Return `number`, divisible by EVEN, in a form that shows the compiler the divisibility.

    The compiler ignores tl.multiple_of at the callers, and detects multiples of 16 itself.
    """
    return number if EVEN == 1 or EVEN == 16 else number // EVEN * EVEN


@jit
def unit_of(largest):
    """Return the power of two by which numbers up to `largest` are multiplied before squaring.

    One of three: 2^-80 for numbers beyond 2^50, 2^80 for numbers below 2^-40, else 1.
    """
    return tl.where(largest > 2.0**50, 2.0**-80, tl.where(largest < 2.0**-40, 2.0**80, 1.0))


@jit
def _norm_of(largest, small, middle, large, eps):
    """Return (unit, norm) as `norm_of_sums`, from sums of squares in the three units.

    `small`, `middle`, `large`: sums over tiles with units 2^80, 1 and 2^-80.
    """
    down, up = large > 0, (large == 0) & (middle < 2.0**-60)
    power = tl.where(down, 2.0**-80, tl.where(up, 2.0**80, 1.0))
    less = tl.where(up, 1.0, 2.0**-80)
    squares = middle * power * power + tl.where(down, large, small * less * less)
    norm = tl.sqrt(squares) + eps * (largest * power)
    return power, tl.where(norm == 0, 1.0, norm)


# Side of a tile, and elements of a sum per step, of U U^T if squares leave the range of fp32
BEYOND = 32, 32
PROGRAMS = 128  # programs of a launch of `raw_norm`, at least one per matrix


def raw_norm(
    U: torch.Tensor | ScatteredRows,
    X: torch.Tensor | None,
    factors: torch.Tensor,
    A: torch.Tensor,
    eps: float,
    scratch: torch.Tensor | None = None,
) -> None:
    """Write the factors that scale U to norm 1, without a cast of U; for mixed-input products.

    U (N, n, m) in 16 bits. `factors` (3, N) fp32: the factor of U in U U^T; the power of two by
    which U is multiplied before a cast; the remaining factor after the cast. eps and `scratch` as
    for `unit_norm`. `X`: tensor that U is copied to, in U's dtype; None if later products read U in
    place, with rows that are lines of memory.

    If squares might leave the range of fp32, the first factor is -1, and the scaled U U^T is
    written to A (N, n, n).
    """
    if not use_triton(U.device):
        return raw_norm_torch(U, X, factors, A, eps)
    raw = U if X is None else X
    transposed = U.stride(2) > U.stride(1)
    cast = cast_by_tiles(
        *((U.mT, raw.mT) if transposed else (U, raw)), scratch, READ if X is None else COPY
    )
    programs = min(PROGRAMS_PER_MATRIX, max(1, PROGRAMS // len(U)))
    _raw_norm_kernel.launch(
        len(U) * programs,
        (cast.key, launch_key(raw, A)),
        raw,
        A,
        cast.sums,
        factors,
        factors.stride(0),
        cast.parts,
        programs,
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


def raw_norm_torch(
    U: torch.Tensor | ScatteredRows,
    X: torch.Tensor | None,
    factors: torch.Tensor,
    A: torch.Tensor,
    eps: float,
) -> None:
    """Compute `raw_norm` in torch, in fp64: no square leaves the range."""
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


@jit.unspecialized("apart", "parts", "programs", "copied")
def _raw_norm_kernel(
    U,
    A,
    sums,
    factors,
    apart,
    parts,
    programs,
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
    """Write the factors of each matrix, from the sums, and perhaps A; `programs` programs per
    matrix.

    A is written if squares of U might leave the range of fp32: products of power U, summed in the
    order in which all products are summed. `apart`: stride of `factors`. `copied`: 0 if U is read
    in place. SIDE, STEP: see BEYOND.
    """
    if PDL:
        # The next kernel may start to multiply U at once if U was there before, not copied
        if copied == 0:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # without effect the second time
    matrix, program = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs
    most, unit, norm = norm_of_sums(sums + matrix * 2 * parts, parts, eps, BLOCK)
    power = tl.where(most == 0, 1.0, tl.minimum(power_of(norm) * unit, 2.0**127))
    scale = tl.where(most == 0, 1.0, unit / power / norm)
    beyond = (unit_of(most) != 1.0) & (most != 0)
    if program == 0:
        tl.store(factors + matrix, tl.where(beyond, -1.0, scale * power))
        tl.store(factors + apart + matrix, power)
        tl.store(factors + 2 * apart + matrix, scale)
    if beyond:
        down = tl.cdiv(n, SIDE)
        side = tl.arange(0, SIDE)
        step = tl.arange(0, STEP)
        for tile in range(program, down * down, programs):
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
    """Return rows r and columns k of the matrix U (n, m), times a power of two, in U's dtype."""
    at = U + r.to(tl.int64)[:, None] * strides[1] + k.to(tl.int64)[None, :] * strides[2]
    u = tl.load(at, mask=(r < n)[:, None] & (k < m)[None, :], other=0.0)
    return (u.to(tl.float32) * power).to(U.dtype.element_ty)

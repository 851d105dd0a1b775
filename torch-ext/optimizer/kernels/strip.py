"""Strips: 64 or 128 rows of a tile, whose sums one group of four warps holds, on sm90.

Decides: what becomes of the sums, in squares as high as the strip, which TMA stores where they belong and where their
mirror images do. Must not know: where the sums come from.
"""
from __future__ import annotations

from .ring import boxes_of, gluon_jit, matrices_of

gl = mbarrier = tma = fence = barrier = load_box = store_box = None  # Gluon's language, put here by gluon_jit


@gluon_jit
def ask(addend, own, arrived, matrix, row, column, COLUMNS: gl.constexpr, HIGH: gl.constexpr = 1):
    """Let the strip's boxes of an addend, squares or wider, HIGH of them one below another, arrive in the memory `own`,
    where nothing is stored from any more.
    """
    HEIGHT: gl.constexpr = addend.block_type.shape[1]
    WIDTH: gl.constexpr = addend.block_type.shape[2]
    boxes = boxes_of(own, addend)
    mbarrier.expect(arrived, 2 * HIGH * HEIGHT * COLUMNS)
    for k in gl.static_range(COLUMNS // WIDTH * HIGH):
        load_box(addend, [matrix, row + k % HIGH * HEIGHT, column + k // HIGH * WIDTH], arrived, boxes.index(k))


@gluon_jit
def factors_of(scales, factors, matrix, SYMMETRIC: gl.constexpr):
    """Those of a matrix: of X X^T and A X its scale, for X that is yet to be scaled."""
    if SYMMETRIC < 2:
        scale = gl.load(scales + matrix)
        factors = (scale * scale if SYMMETRIC == 1 else scale, 0.0, scale)
    return factors


@gluon_jit
def finish_strip(sums, addends, count, out, own, arrived, mine, factors, matrix, row, column, SYMMETRIC: gl.constexpr,
                 SEVERAL: gl.constexpr, mirror=1):
    """Scale, add, round and store a strip, the group's number `mine`, whose first element is at (row, column). The
    first of `count` addends has been asked for: one of a symmetric product, or SEVERAL.

    One binary for two and for three: of two the second is read again, with factor 0. LLVM takes three times as long for
    a branch or a loop that hands sums on.
    """
    if SYMMETRIC == 2:
        sums = add_first(sums, own, arrived, mine * count, factors)
    else:
        sums = sums * factors[0]
    for k in gl.static_range(1, 3 if SEVERAL else 1):
        sums = add_next(sums, addends[k], k, count, own, arrived, mine * count, factors, matrix, row, column,
                        sums.shape[0] // out.block_type.shape[1])
    store_strip(sums, out, own, own, factors, matrix, row, column, mirror, SYMMETRIC, SEVERAL, True)


@gluon_jit
def add_first(sums, own, arrived, asked, factors, count=1):
    """Scale sums and add the first addend, if the `count` is not 0; `asked` have been asked for in the memory `own`
    before. To add -0 changes nothing.
    """
    mbarrier.wait(arrived, asked & 1, pred=count > 0)
    flat = matrices_of(own, sums.shape[0], sums.shape[1]).index(0)
    addend = factors[2] * flat.load(sums.type.layout).to(gl.float32)
    return gl.fma(sums, factors[0], gl.where(count > 0, addend, -0.0))


@gluon_jit
def add_next(sums, addend, k: gl.constexpr, count, own, arrived, asked, factors, matrix, row, column,
             HIGH: gl.constexpr = 1):
    """Add the k-th after it, if there are so many; else what arrived last, whose factor is 0."""
    if k < count:
        barrier()
        ask(addend, own, arrived, matrix, row, column, sums.shape[1], HIGH)
    mbarrier.wait(arrived, (asked + k) & 1, pred=k < count)
    flat = matrices_of(own, sums.shape[0], sums.shape[1]).index(0)
    return now(sums) + factors[2 + k] * flat.load(sums.type.layout).to(gl.float32)


@gluon_jit
def store_strip(sums, out, own, other, factors, matrix, row, column, mirror, SYMMETRIC: gl.constexpr,
                DIAGONAL: gl.constexpr, SAME: gl.constexpr):
    """Add the diagonal, round and store a strip, through the memory `own`, mirror images (if `mirror` is not 0) through
    `other`, which may be the SAME. What was stored from the same memory is waited for; from others nothing is stored
    any more. X X^T whose scale is negative is there already: it goes where nothing is.
    """
    SIDE: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = sums.shape[1]
    BOX: gl.constexpr = out.block_type.shape[1]
    HIGH: gl.constexpr = SIDE // BOX
    if SYMMETRIC == 1:
        matrix = gl.where(factors[2] < 0, 1 << 30, matrix)
    squares = boxes_of(own, out)
    flat = matrices_of(squares, SIDE, COLUMNS).index(0)
    if DIAGONAL:
        if SAME:
            sums = add_diagonal(sums, factors[1], row, column)
        elif row < column + COLUMNS:
            sums = add_diagonal(sums, factors[1], row, column)
    result = sums.to(out.dtype)
    if SAME:
        tma.store_wait(0)
    barrier()
    flat.store(result)
    if SYMMETRIC == 2:
        if (row >= column) & (row < column + COLUMNS):
            barrier()
            _make_symmetric(matrices_of(squares, SIDE, SIDE).index((row - column) // SIDE), SIDE)
    fence()
    barrier()
    for k in gl.static_range(COLUMNS // SIDE):
        if (column + k * SIDE <= row) | (SYMMETRIC == 0):
            for box in gl.static_range(HIGH * HIGH):
                store_box(out, [matrix, row + box % HIGH * BOX, column + k * SIDE + box // HIGH * BOX],
                          squares.index(k * HIGH * HIGH + box))
    if SYMMETRIC:
        if (column < row) & (mirror != 0):
            if SAME:
                tma.store_wait(0)
                barrier()
            store_turned(result, out, boxes_of(other, out), matrix, row, column, True)


@gluon_jit
def add_diagonal(sums, factor, row, column):
    """Add factor I to sums whose first element is at (row, column)."""
    layout: gl.constexpr = sums.type.layout
    r = row + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    s = column + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    return sums + gl.where(r == s, factor, 0.0)


@gluon_jit
def now(sums):
    """The same numbers, which the compiler computes here, not later, when more is held in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [sums], gl.float32, False, 1)


@gluon_jit
def store_turned(result, out, squares, matrix, row, column, BELOW: gl.constexpr):
    """Store the mirror images of a strip's squares, or of those that lie BELOW the diagonal, through their memory."""
    SIDE: gl.constexpr = result.shape[0]
    COLUMNS: gl.constexpr = result.shape[1]
    matrices_of(squares, COLUMNS, SIDE).index(0).permute([1, 0]).store(result)
    fence()
    barrier()
    for k in gl.static_range(COLUMNS // SIDE):
        if not BELOW or column + k * SIDE < row:
            store_box(out, [matrix, column + k * SIDE, row], squares.index(k))


@gluon_jit
def _make_symmetric(square, SIDE: gl.constexpr):
    """Mirror the lower triangle of a square in shared memory."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SIDE, 16])
    r = gl.arange(0, SIDE, layout=gl.SliceLayout(1, layout))[:, None]
    s = gl.arange(0, SIDE, layout=gl.SliceLayout(0, layout))[None, :]
    values = gl.where(r < s, square.permute([1, 0]).load(layout), square.load(layout))
    barrier()
    square.store(values)

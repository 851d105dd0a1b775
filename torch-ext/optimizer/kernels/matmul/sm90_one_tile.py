"""Symmetric products on sm90, one tile per program, with prefetched addends."""
from __future__ import annotations

from ..launch.jit import gluon_jit
from .sm90_pipeline import (
    ask,
    boxes_of,
    factors_of,
    matrices_of,
    matrix_of,
    path_of,
    place,
    store_strip,
)

# Gluon's names, put here by gluon_jit
gl = mbarrier = tma = fence = multiply = multiplied = load_box = gdc_wait = None
gdc_launch_dependents = None


@gluon_jit.unspecialized("count", "inner", "addends", "early", "mirror")
def single_kernel(a, b, c, d, e, out, order, count, inner, addends, early, mirror, scales, factors,
                  SYMMETRIC: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """out = factors[0] A B + addends + factors[1] I, or A B without addends; names as in gram_sm90.
    STAGES - 1 steps or more; tiles of 64 x 64, 64 x 128 or 128 x 128 (COLUMNS); c, d, e, out: by
    squares (sm90_pipeline.py). order: None where a program computes its place. early: whether the
    next kernel may begin before this one stores.

    SYMMETRIC == 2: of addends, and in larger tiles than 64 x 64 of A and B, only squares on and
    below the diagonal are read; a and b: by boxes as high as wide. mirror: whether squares above
    the diagonal are stored.

    One binary for any number of addends: it is as fast as one for each number, and compiled once.
    """
    ROWS: gl.constexpr = out.block_type.shape[1]
    BLOCK_K: gl.constexpr = a.block_type.shape[2]
    TRIANGLES: gl.constexpr = SYMMETRIC == 2 and COLUMNS > BLOCK_K
    AHEAD: gl.constexpr = STAGES - 1
    steps = (inner + BLOCK_K - 1) // BLOCK_K
    if ROWS == COLUMNS:  # so that both operands of a stage are as long as a tile, or one of them
        left = gl.allocate_shared_memory(a.dtype, [2 * STAGES, 1, ROWS, BLOCK_K], a.layout)
        right = left
    else:
        left = gl.allocate_shared_memory(a.dtype, [STAGES, 1, ROWS, BLOCK_K], a.layout)
        right = gl.allocate_shared_memory(b.dtype, [STAGES, 1, COLUMNS, BLOCK_K], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    for number in gl.static_range(3):
        mbarrier.init(added.index(number), count=1)
    fence()
    path = path_of(count, gl.num_programs(0))
    if order is None:
        matrix, i, j = _place(path, gl.program_id(0), COLUMNS > ROWS)
    else:
        matrix, i, j = place(order, path, gl.program_id(0))
    row, column = i * ROWS, j * COLUMNS
    # steps up to which rows of A and of B do not reach beyond their squares on the diagonal
    straight = gl.minimum((row + ROWS) // BLOCK_K, steps), gl.minimum((column + ROWS) // BLOCK_K,
                                                                      steps)
    gdc_wait()
    own = factors_of(scales, factors, matrix, SYMMETRIC)
    for k in gl.static_range(AHEAD):
        _fetch(a, b, left, right, full, matrix, row, column, k, straight, TRIANGLES, ROWS, COLUMNS,
               STAGES)
    shape: gl.constexpr = [16, COLUMNS, 16]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=shape)
    sums = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    asked = c, d, e
    if TRIANGLES:
        ring, where = (left, right, full, added), (matrix, row, column, straight)
        sums = _products(a, b, asked, ring, where, sums, 0, straight[1], steps, addends, False,
                         False, ROWS, COLUMNS, STAGES)
        sums = _products(a, b, asked, ring, where, sums, straight[1], straight[0], steps, addends,
                         False, True, ROWS, COLUMNS, STAGES)
        sums = _products(a, b, asked, ring, where, sums, straight[0], steps, steps, addends, True,
                         True, ROWS, COLUMNS, STAGES)
    else:
        for k in range(steps - AHEAD):
            sums = _multiply(left, right, full, sums, k, False, False, ROWS, COLUMNS, BLOCK_K,
                             STAGES)
            _fetch(a, b, left, right, full, matrix, row, column, k + AHEAD, straight, False, ROWS,
                   COLUMNS, STAGES)
        for k in gl.static_range(AHEAD):
            sums = _multiply(left, right, full, sums, steps - AHEAD + k, False, False, ROWS,
                             COLUMNS, BLOCK_K, STAGES)
            if k < 3:
                _ask(asked[k], k, addends, left, right, added, steps, matrix, row, column, ROWS,
                     COLUMNS, STAGES)
    sums = multiplied(0, deps=(sums,))
    for k in gl.static_range(AHEAD, 3):
        _ask(asked[k], k, addends, left, right, added, steps, matrix, row, column, ROWS, COLUMNS,
             STAGES)
    for k in range(addends):
        room = _room(left, right, steps + k, ROWS, COLUMNS, STAGES)
        mbarrier.wait(added.index(k), 0)
        addend = matrices_of(room, ROWS, COLUMNS).index(0).load(layout).to(gl.float32)
        factor = gl.where(k == 0, factors[2], gl.where(k == 1, factors[3], factors[4]))
        sums = gl.fma(sums, gl.where(k == 0, factors[0], 1.0), factor * addend)
    if SYMMETRIC == 1:
        sums = sums * own[0]
    if early != 0:
        gdc_launch_dependents()
    store_strip(sums, out, _room(left, right, steps, ROWS, COLUMNS, STAGES),
                _room(left, right, steps + 1, ROWS, COLUMNS, STAGES), own, matrix, row, column,
                mirror, SYMMETRIC, SYMMETRIC == 2, False)
    gdc_launch_dependents()
    tma.store_wait(0)


@gluon_jit
def _place(path, turn, WIDE: gl.constexpr):
    """(matrix, tile row, tile column), without a table to wait for: of few tiles, row by row in the
    lower triangle, as wide as high or twice as wide (WIDE).
    """
    number = turn % path[0]
    if WIDE:
        half = _root(number)  # rows 2 half - 1 and 2 half begin at half^2 and half (half + 1)
        start = half * (half + 1)
        i = gl.where(number < start, 2 * half - 1, 2 * half)
        j = number - gl.where(number < start, half * half, start)
    else:
        i = (_root(8 * number + 1) - 1) // 2
        j = number - i * (i + 1) // 2
    return matrix_of(path, turn), i, j


@gluon_jit
def _root(number):
    """The largest integer whose square is not larger, of small numbers."""
    return gl.sqrt(number.to(gl.float32) + 0.5).to(gl.int32)


@gluon_jit
def _operands(left, right, stage, SAME: gl.constexpr):
    """Room for those of a stage."""
    if SAME:
        rows, columns = left.index(2 * stage), left.index(2 * stage + 1)
    else:
        rows, columns = left.index(stage), right.index(stage)
    return rows, columns


@gluon_jit
def _room(left, right, number, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """As much of a stage as a tile takes."""
    stage = number % STAGES
    if ROWS != COLUMNS:
        room = right.index(stage)
    elif ROWS == 64:
        room = left.index(2 * stage)
    else:
        room = matrices_of(left, ROWS, COLUMNS).index(stage)
    return room


@gluon_jit
def _fetch(a, b, left, right, full, matrix, row, column, k, straight, TRIANGLES: gl.constexpr,
           ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """Ask for the operands of step k."""
    BLOCK_K: gl.constexpr = a.block_type.shape[2]
    arrived = full.index(k % STAGES)
    rows, columns = _operands(left, right, k % STAGES, ROWS == COLUMNS)
    mbarrier.expect(arrived, 2 * (ROWS + COLUMNS) * BLOCK_K)
    _load(a, rows, arrived, matrix, row, k * BLOCK_K, k >= straight[0], TRIANGLES)
    _load(b, columns, arrived, matrix, column, k * BLOCK_K, k >= straight[1], TRIANGLES)


@gluon_jit
def _load(operand, own, arrived, matrix, row, at, turned, TRIANGLES: gl.constexpr):
    """Let rows of an operand arrive, or what mirrors them if `turned`, in boxes one after another:
    chosen without a branch, for which the assembler would let products wait for each other.
    """
    SIDE: gl.constexpr = operand.block_type.shape[1]
    boxes = boxes_of(own, operand)
    for k in gl.static_range(own.numel // (SIDE * operand.block_type.shape[2])):
        r, s = row + k * SIDE, at
        if TRIANGLES:
            r, s = gl.where(turned, at, r), gl.where(turned, r, at)
        load_box(operand, [matrix, r, s], arrived, boxes.index(k))


@gluon_jit
def _ask(addend, k: gl.constexpr, addends, left, right, added, steps, matrix, row, column,
         ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """Ask for addend k, if there are so many, in a stage whose operands are multiplied."""
    if k < addends:
        ask(addend, _room(left, right, steps + k, ROWS, COLUMNS, STAGES), added.index(k), matrix,
            row, column, COLUMNS)


@gluon_jit
def _ask_next(asked, number, addends, left, right, added, steps, matrix, row, column,
              ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """The same of an addend whose number, less than that of stages but one, is not constant."""
    for k in gl.static_range(STAGES - 1 if STAGES < 4 else 3):
        if k == number:
            _ask(asked[k], k, addends, left, right, added, steps, matrix, row, column, ROWS,
                 COLUMNS, STAGES)


@gluon_jit
def _products(a, b, asked, ring, where, sums, first, last, steps, addends, TURNED_A: gl.constexpr,
              TURNED_B: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
              STAGES: gl.constexpr):
    """Take steps from `first` up to `last`, whose operands arrive as rows or TURNED, an immediate
    of the instruction. Where no step is left to ask for, addends are.
    """
    left, right, full, added = ring
    matrix, row, column, straight = where
    BLOCK_K: gl.constexpr = a.block_type.shape[2]
    for k in range(first, last):
        sums = _multiply(left, right, full, sums, k, TURNED_A, TURNED_B, ROWS, COLUMNS, BLOCK_K,
                         STAGES)
        ahead = k + STAGES - 1
        if ahead < steps:
            _fetch(a, b, left, right, full, matrix, row, column, ahead, straight, True, ROWS,
                   COLUMNS, STAGES)
        else:
            _ask_next(asked, ahead - steps, addends, left, right, added, steps, matrix, row, column,
                      ROWS, COLUMNS, STAGES)
    return sums


@gluon_jit
def _multiply(left, right, full, sums, k, TURNED_A: gl.constexpr, TURNED_B: gl.constexpr,
              ROWS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr,
              STAGES: gl.constexpr):
    """Begin step k; the one before it is done."""
    stage = k % STAGES
    rows, columns = _operands(left, right, stage, ROWS == COLUMNS)
    mbarrier.wait(full.index(stage), (k // STAGES) & 1)
    if TURNED_A:
        rows = matrices_of(rows, BLOCK_K, ROWS).index(0).permute([1, 0])
    else:
        rows = matrices_of(rows, ROWS, BLOCK_K).index(0)
    if TURNED_B:
        columns = matrices_of(columns, BLOCK_K, COLUMNS).index(0)
    else:
        columns = matrices_of(columns, COLUMNS, BLOCK_K).index(0).permute([1, 0])
    sums = multiply(rows, columns, sums, is_async=True)
    return multiplied(1, deps=(sums,))

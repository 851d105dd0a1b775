"""The TMA pipeline (mainloop) and the epilogue that warp-specialized kernels of sm90 share. Needs
Gluon.
"""
from __future__ import annotations

from ..launch.jit import gluon_jit

# Gluon's names, put here by gluon_jit
gl = mbarrier = tma = fence = barrier = multiply = multiplied = load_box = None
store_box = view = None


@gluon_jit
def boxes_of(memory, descriptor):
    """View `memory` as boxes of a descriptor, one after another: all of it, for Triton 3.8 views no
    part.
    """
    ROWS: gl.constexpr = descriptor.block_type.shape[1]
    COLUMNS: gl.constexpr = descriptor.block_type.shape[2]
    LAYOUT: gl.constexpr = descriptor.layout
    return view(memory, descriptor.dtype, [memory.numel // (ROWS * COLUMNS), 1, ROWS, COLUMNS],
                LAYOUT)


@gluon_jit
def matrices_of(memory, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The same as matrices, which is what is multiplied, loaded and stored."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return view(memory, memory.dtype, [memory.numel // (ROWS * COLUMNS), ROWS, COLUMNS], LAYOUT)


@gluon_jit
def rounded(sums, DTYPE: gl.constexpr):
    """Round, two at a time."""
    low = sums
    if DTYPE == gl.float16:
        low = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [sums],
                                        gl.float16, True, 2)
    elif DTYPE == gl.bfloat16:
        low = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [sums],
                                        gl.bfloat16, True, 2)
    return low


@gluon_jit
def make_ring(a, b, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """Return (left, right, full, empty): room for boxes of a and b, and what stages wait for;
    GROUPS read each.
    """
    left = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    right = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    return left, right, full, empty


@gluon_jit
def path_of(count, tiles):
    """Return (tiles of a matrix, the matrix that is taken first) of a launch of so many tiles,
    `count` for each matrix; if that is negative, matrices are taken from the last one to the first.
    """
    size = gl.where(count < 0, -count, count)
    return size, gl.where(count < 0, tiles // size - 1, 0)


@gluon_jit
def matrix_of(path, turn):
    """Return the matrix that a turn is of."""
    count, first = path
    return gl.where(first > 0, first - turn // count, turn // count)


@gluon_jit
def place(order, path, turn):
    """Return (matrix, tile row, tile column)."""
    at = order + turn % path[0] * 2
    return matrix_of(path, turn), gl.load(at), gl.load(at + 1)


@gluon_jit
def place_of_half(order, path, whole, ACROSS: gl.constexpr):
    """Return the same of this program's half tile (tiles.divide): in columns of left and right
    halves if ACROSS, else in rows of upper and lower ones. Of a pair it is one of the squares.
    """
    matrix, i, j = place(order, path, whole + gl.program_id(0) // 2)
    if ACROSS:
        second = gl.program_id(0) % 2
        i = gl.where((j < 0) & (second > 0), -j, i)
        j = gl.where(j < 0, i, 2 * j + second)
    else:
        i = 2 * i + gl.program_id(0) % 2
    return matrix, i, j


@gluon_jit
def fetch(a, b, a_half, b_half, ring, work, ACROSS: gl.constexpr, SYMMETRIC: gl.constexpr,
          TURNED: gl.constexpr, STAGES: gl.constexpr):
    """Fill the ring with the operands of all tiles of this program, one after another. Of a pair
    (tile_scheduler.py, `tile_order`) the rows of one square are left operands, those of the other
    one right ones.
    """
    order, path, whole, halves, steps = work
    number = 0
    for turn in range(gl.program_id(0), whole, gl.num_programs(0)):
        matrix, i, j = place(order, path, turn)
        if j < 0:
            fill(a, b_half, ring, matrix, matrix, i, -j, number, 0, steps, SYMMETRIC, TURNED,
                 STAGES)
        else:
            fill(a, b, ring, matrix, matrix, i, j, number, 0, steps, SYMMETRIC, TURNED, STAGES)
        number += steps
    if gl.program_id(0) < halves:
        matrix, i, j = place_of_half(order, path, whole, ACROSS)
        fill(a_half, b_half, ring, matrix, matrix, i, j, number, 0, steps, SYMMETRIC, TURNED,
             STAGES)


@gluon_jit
def fill(a, b, ring, of_a, of_b, i, j, number, start, stop, SYMMETRIC: gl.constexpr,
         TURNED: gl.constexpr, STAGES: gl.constexpr):
    """Fetch steps of the operands of tile (i, j), of these matrices of a and b, as large as their
    boxes, into the ring from stage `number` on.
    """
    left, right, full, empty = ring
    BLOCK_K: gl.constexpr = a.block_type.shape[1 if TURNED else 2]
    ROWS: gl.constexpr = a.block_type.shape[2 if TURNED else 1]
    COLUMNS: gl.constexpr = b.block_type.shape[1 if SYMMETRIC else 2]
    for k in range(start * BLOCK_K, stop * BLOCK_K, BLOCK_K):
        stage = number % STAGES
        arrived = full.index(stage)
        rows, columns = boxes_of(left.index(stage), a).index(0), boxes_of(right.index(stage),
                                                                          b).index(0)
        mbarrier.wait(empty.index(stage), (number // STAGES + 1) & 1)
        mbarrier.expect(arrived, 2 * (ROWS + COLUMNS) * BLOCK_K)
        if TURNED:
            load_box(a, [of_a, k, i * ROWS], arrived, rows)
        else:
            load_box(a, [of_a, i * ROWS, k], arrived, rows)
        if SYMMETRIC:
            load_box(b, [of_b, j * COLUMNS, k], arrived, columns)
        else:
            load_box(b, [of_b, k, j * COLUMNS], arrived, columns)
        number += 1


@gluon_jit
def multiply_ring(ring, number, steps, next_one, part, SYMMETRIC: gl.constexpr,
                  TURNED: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
                  BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Return sums of products in fp32, from stage `number` of the ring on: of the left box the
    `part` of ROWS rows.

    `next_one`, or None: whom to tell when this group has its last operands.
    """
    left, right, full, empty = ring
    shape: gl.constexpr = [16, COLUMNS, 16]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=shape)
    sums = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    for k in range(steps):
        stage = number % STAGES
        mbarrier.wait(full.index(stage), (number // STAGES) & 1)
        if TURNED:
            rows = matrices_of(left.index(stage), BLOCK_K, ROWS).index(part).permute([1, 0])
        else:
            rows = matrices_of(left.index(stage), ROWS, BLOCK_K).index(part)
        if SYMMETRIC:
            columns = matrices_of(right.index(stage), COLUMNS, BLOCK_K).index(0).permute([1, 0])
        else:
            columns = matrices_of(right.index(stage), BLOCK_K, COLUMNS).index(0)
        sums = multiply(rows, columns, sums, is_async=True)
        sums = multiplied(1, deps=(sums,))
        mbarrier.arrive(empty.index((number + STAGES - 1) % STAGES), pred=k > 0)
        number += 1
    if next_one is not None:
        mbarrier.arrive(next_one)
    sums = multiplied(0, deps=(sums,))
    mbarrier.arrive(empty.index((number + STAGES - 1) % STAGES))
    return sums


@gluon_jit
def ask(addend, own, arrived, matrix, row, column, COLUMNS: gl.constexpr, HIGH: gl.constexpr = 1):
    """Let the strip's boxes of an addend, squares or wider, HIGH of them one below another, arrive
    in the memory `own`, where nothing is stored from any more.
    """
    HEIGHT: gl.constexpr = addend.block_type.shape[1]
    WIDTH: gl.constexpr = addend.block_type.shape[2]
    boxes = boxes_of(own, addend)
    mbarrier.expect(arrived, 2 * HIGH * HEIGHT * COLUMNS)
    for k in gl.static_range(COLUMNS // WIDTH * HIGH):
        load_box(addend, [matrix, row + k % HIGH * HEIGHT, column + k // HIGH * WIDTH], arrived,
                 boxes.index(k))


@gluon_jit
def factors_of(scales, factors, matrix, SYMMETRIC: gl.constexpr):
    """Those of a matrix: of X X^T and A X its scale, for X that is yet to be scaled."""
    if SYMMETRIC < 2:
        scale = gl.load(scales + matrix)
        factors = (scale * scale if SYMMETRIC == 1 else scale, 0.0, scale)
    return factors


@gluon_jit
def epilogue(sums, addends, count, out, own, arrived, mine, factors, matrix, row, column,
             SYMMETRIC: gl.constexpr, SEVERAL: gl.constexpr, mirror=1):
    """Scale, add, round and store a strip, the group's number `mine`, whose first element is at
    (row, column). The first of `count` addends has been asked for: one of a symmetric product, or
    SEVERAL.

    One binary for two and for three: of two the second is read again, with factor 0. LLVM takes
    three times as long for a branch or a loop that hands sums on.
    """
    if SYMMETRIC == 2:
        sums = add_first(sums, own, arrived, mine * count, factors)
    else:
        sums = sums * factors[0]
    for k in gl.static_range(1, 3 if SEVERAL else 1):
        sums = add_next(sums, addends[k], k, count, own, arrived, mine * count, factors, matrix,
                        row, column, sums.shape[0] // out.block_type.shape[1])
    store_strip(sums, out, own, own, factors, matrix, row, column, mirror, SYMMETRIC, SEVERAL, True)


@gluon_jit
def add_first(sums, own, arrived, asked, factors, count=1):
    """Scale sums and add the first addend, if the `count` is not 0; `asked` have been asked for in
    the memory `own` before. To add -0 changes nothing.
    """
    mbarrier.wait(arrived, asked & 1, pred=count > 0)
    flat = matrices_of(own, sums.shape[0], sums.shape[1]).index(0)
    addend = factors[2] * flat.load(sums.type.layout).to(gl.float32)
    return gl.fma(sums, factors[0], gl.where(count > 0, addend, -0.0))


@gluon_jit
def add_next(sums, addend, k: gl.constexpr, count, own, arrived, asked, factors, matrix, row,
             column, HIGH: gl.constexpr = 1):
    """Add the k-th after it, if there are so many; else what arrived last, whose factor is 0."""
    if k < count:
        barrier()
        ask(addend, own, arrived, matrix, row, column, sums.shape[1], HIGH)
    mbarrier.wait(arrived, (asked + k) & 1, pred=k < count)
    flat = matrices_of(own, sums.shape[0], sums.shape[1]).index(0)
    return now(sums) + factors[2 + k] * flat.load(sums.type.layout).to(gl.float32)


@gluon_jit
def store_strip(sums, out, own, other, factors, matrix, row, column, mirror,
                SYMMETRIC: gl.constexpr, DIAGONAL: gl.constexpr, SAME: gl.constexpr):
    """Add the diagonal, round and store a strip, through the memory `own`, mirror images (if
    `mirror` is not 0) through `other`, which may be the SAME. What was stored from the same memory
    is waited for; from others nothing is stored any more. X X^T whose scale is negative is there
    already: it goes where nothing is.
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
                store_box(out, [matrix, row + box % HIGH * BOX,
                                column + k * SIDE + box // HIGH * BOX],
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
    """The same numbers, which the compiler computes here, not later, when more is held in
    registers.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [sums], gl.float32, False, 1)


@gluon_jit
def store_turned(result, out, squares, matrix, row, column, BELOW: gl.constexpr):
    """Store the mirror images of a strip's squares, or of those that lie BELOW the diagonal,
    through their memory.
    """
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
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=[16, SIDE, 16])
    r = gl.arange(0, SIDE, layout=gl.SliceLayout(1, layout))[:, None]
    s = gl.arange(0, SIDE, layout=gl.SliceLayout(0, layout))[None, :]
    values = gl.where(r < s, square.permute([1, 0]).load(layout), square.load(layout))
    barrier()
    square.store(values)

"""TMA pipeline (mainloop) and epilogue of the Gluon kernels for sm90, as device functions.

A pipeline is (left, right, full, empty): STAGES boxes of both operands in shared memory, and two
mbarriers per stage. A producer warp fills stages by TMA (`load_operands`). Consumer warpgroups
multiply (`multiply_stages`), scale, add, round and store (`epilogue`).

A box is loaded or stored by a single TMA instruction; a step is a box of the inner dimension
(BLOCK_K); a tile is computed by a single warpgroup, unless two halves of a tile are mentioned.
SYMMETRIC is 0 for "product", 1 for "gram" and 2 for "symmetric" (`SYMMETRY` in sm90_tma.py).
TURNED: the left operand is stored transposed, and the kernel computes the transposed product.
"""
from __future__ import annotations

from ..launch.jit import gluon_jit

# Gluon's names, put here by gluon_jit
gl = mbarrier = tma = fence = barrier = multiply = multiplied = load_box = None
store_box = view = None


@gluon_jit
def tma_boxes(memory, descriptor):
    """View all of `memory` as consecutive boxes of a TMA descriptor, (number, 1, rows, columns).

    All of the memory, because Triton 3.8 cannot view a part.
    """
    ROWS: gl.constexpr = descriptor.block_type.shape[1]
    COLUMNS: gl.constexpr = descriptor.block_type.shape[2]
    LAYOUT: gl.constexpr = descriptor.layout
    return view(memory, descriptor.dtype, [memory.numel // (ROWS * COLUMNS), 1, ROWS, COLUMNS],
                LAYOUT)


@gluon_jit
def matrices_of(memory, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """View all of `memory` as (number, ROWS, COLUMNS) matrices of 16-bit elements, for wgmma and
    for loads and stores of registers.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return view(memory, memory.dtype, [memory.numel // (ROWS * COLUMNS), ROWS, COLUMNS], LAYOUT)


@gluon_jit
def rounded(sums, DTYPE: gl.constexpr):
    """Round fp32 to DTYPE, two elements per instruction for fp16 and bf16."""
    low = sums
    if DTYPE == gl.float16:
        low = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [sums],
                                        gl.float16, True, 2)
    elif DTYPE == gl.bfloat16:
        low = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [sums],
                                        gl.bfloat16, True, 2)
    return low


@gluon_jit
def make_pipeline(a, b, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """Allocate a pipeline for boxes of the descriptors a and b: (left, right, full, empty).

    full: per stage, completes when both boxes are loaded. empty: per stage, completes when GROUPS
    consumer warpgroups have read the stage.
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
def matrix_order(count, tiles):
    """Return (tiles per matrix, first matrix) of a launch of `tiles` tiles, |count| per matrix. A
    negative count visits matrices from last to first, see [Note: alternating batch direction].
    """
    size = gl.where(count < 0, -count, count)
    return size, gl.where(count < 0, tiles // size - 1, 0)


@gluon_jit
def matrix_index(batch_order, turn):
    """Return the matrix of tile number `turn`, counted over the whole launch."""
    count, first = batch_order
    return gl.where(first > 0, first - turn // count, turn // count)


@gluon_jit
def tile_coord(order, batch_order, turn):
    """Return (matrix, tile row, tile column) of tile number `turn`, from the table `order`
    (`tile_order` in tile_scheduler.py).
    """
    tile = order + turn % batch_order[0] * 2
    return matrix_index(batch_order, turn), gl.load(tile), gl.load(tile + 1)


@gluon_jit
def half_tile_coord(order, batch_order, whole, ACROSS: gl.constexpr):
    """Return (matrix, tile row, tile column), in units of half tiles, of this program's half.

    `divide` in tile_config.py splits the tiles of a last, unfilled wave between two programs: into
    left and right halves if ACROSS, otherwise into upper and lower halves. A pair of squares (i,
    -j) is split into square (i, i) and square (j, j).
    """
    matrix, i, j = tile_coord(order, batch_order, whole + gl.program_id(0) // 2)
    if ACROSS:
        second = gl.program_id(0) % 2
        i = gl.where((j < 0) & (second > 0), -j, i)
        j = gl.where(j < 0, i, 2 * j + second)
    else:
        i = 2 * i + gl.program_id(0) % 2
    return matrix, i, j


@gluon_jit
def load_operands(a, b, a_half, b_half, pipeline, schedule, ACROSS: gl.constexpr,
                  SYMMETRIC: gl.constexpr, TURNED: gl.constexpr, STAGES: gl.constexpr):
    """Producer warp: load the operands of all tiles of this program in order.

    schedule: (order, batch_order, whole, halves, steps). Of a pair of squares (i, -j) the left
    operand is the rows of square (i, i), the right operand the rows of square (j, j), see
    `tile_order` in tile_scheduler.py. a_half, b_half: descriptors for half tiles; b_half also loads the right
    operand of a pair.
    """
    order, batch_order, whole, halves, steps = schedule
    stage_number = 0
    for turn in range(gl.program_id(0), whole, gl.num_programs(0)):
        matrix, i, j = tile_coord(order, batch_order, turn)
        if j < 0:
            load_stages(a, b_half, pipeline, matrix, i, -j, stage_number, steps, SYMMETRIC, TURNED,
                        STAGES)
        else:
            load_stages(a, b, pipeline, matrix, i, j, stage_number, steps, SYMMETRIC, TURNED,
                        STAGES)
        stage_number += steps
    if gl.program_id(0) < halves:
        matrix, i, j = half_tile_coord(order, batch_order, whole, ACROSS)
        load_stages(a_half, b_half, pipeline, matrix, i, j, stage_number, steps, SYMMETRIC, TURNED,
                    STAGES)


@gluon_jit
def load_stages(a, b, pipeline, matrix, i, j, stage_number, steps, SYMMETRIC: gl.constexpr,
                TURNED: gl.constexpr, STAGES: gl.constexpr):
    """Load `steps` steps of the operands of tile (i, j) into consecutive stages, from stage_number
    % STAGES on. The boxes of the two descriptors give the size of the tile.
    """
    left, right, full, empty = pipeline
    BLOCK_K: gl.constexpr = a.block_type.shape[1 if TURNED else 2]
    ROWS: gl.constexpr = a.block_type.shape[2 if TURNED else 1]
    COLUMNS: gl.constexpr = b.block_type.shape[1 if SYMMETRIC else 2]
    for k in range(0, steps * BLOCK_K, BLOCK_K):
        stage = stage_number % STAGES
        loaded = full.index(stage)
        row_box = tma_boxes(left.index(stage), a).index(0)
        column_box = tma_boxes(right.index(stage), b).index(0)
        mbarrier.wait(empty.index(stage), (stage_number // STAGES + 1) & 1)
        mbarrier.expect(loaded, 2 * (ROWS + COLUMNS) * BLOCK_K)
        if TURNED:
            load_box(a, [matrix, k, i * ROWS], loaded, row_box)
        else:
            load_box(a, [matrix, i * ROWS, k], loaded, row_box)
        if SYMMETRIC:
            load_box(b, [matrix, j * COLUMNS, k], loaded, column_box)
        else:
            load_box(b, [matrix, k, j * COLUMNS], loaded, column_box)
        stage_number += 1


@gluon_jit
def multiply_stages(pipeline, stage_number, steps, next_turn, part, SYMMETRIC: gl.constexpr,
                    TURNED: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
                    BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Consumer warpgroup: return the fp32 sums (ROWS, COLUMNS) of `steps` consecutive stages, from
    stage_number % STAGES on.

    part: index of the ROWS rows of the left boxes to multiply. next_turn: mbarrier of the other
    warpgroup in pingpong, arrived at when the last product is issued; or None.
    """
    left, right, full, empty = pipeline
    shape: gl.constexpr = [16, COLUMNS, 16]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=shape)
    sums = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    for k in range(steps):
        stage = stage_number % STAGES
        mbarrier.wait(full.index(stage), (stage_number // STAGES) & 1)
        if TURNED:
            rows = matrices_of(left.index(stage), BLOCK_K, ROWS).index(part).permute([1, 0])
        else:
            rows = matrices_of(left.index(stage), ROWS, BLOCK_K).index(part)
        if SYMMETRIC:
            columns = matrices_of(right.index(stage), COLUMNS, BLOCK_K).index(0).permute([1, 0])
        else:
            columns = matrices_of(right.index(stage), BLOCK_K, COLUMNS).index(0)
        sums = multiply(rows, columns, sums, is_async=True)
        # At most one product in flight: the one before is done, so its stage may be refilled
        sums = multiplied(1, deps=(sums,))
        mbarrier.arrive(empty.index((stage_number + STAGES - 1) % STAGES), pred=k > 0)
        stage_number += 1
    if next_turn is not None:
        mbarrier.arrive(next_turn)
    sums = multiplied(0, deps=(sums,))
    mbarrier.arrive(empty.index((stage_number + STAGES - 1) % STAGES))
    return sums


@gluon_jit
def load_addend(addend, buffer, loaded, matrix, row, column, COLUMNS: gl.constexpr,
                BOXES_DOWN: gl.constexpr = 1):
    """Start TMA loads of an addend's tile at (row, column) into `buffer`; mbarrier `loaded`
    completes when the whole tile has arrived.

    The tile is COLUMNS wide and BOXES_DOWN boxes high, laid out in columns of boxes. No earlier TMA
    store may still read `buffer`. sm90_gram_chain.py also loads operands with this function.
    """
    BOX_ROWS: gl.constexpr = addend.block_type.shape[1]
    BOX_COLUMNS: gl.constexpr = addend.block_type.shape[2]
    boxes = tma_boxes(buffer, addend)
    mbarrier.expect(loaded, 2 * BOXES_DOWN * BOX_ROWS * COLUMNS)
    for k in gl.static_range(COLUMNS // BOX_COLUMNS * BOXES_DOWN):
        load_box(addend, [matrix, row + k % BOXES_DOWN * BOX_ROWS,
                          column + k // BOXES_DOWN * BOX_COLUMNS], loaded, boxes.index(k))


@gluon_jit
def factors_of(scales, factors, matrix, SYMMETRIC: gl.constexpr):
    """Return the factors of a matrix: (alpha, diagonal, betas of the addends) as given for
    "symmetric"; (scale^2, 0, scale) for "gram"; (scale, 0, scale) for "product".
    """
    if SYMMETRIC < 2:
        scale = gl.load(scales + matrix)
        factors = (scale * scale if SYMMETRIC == 1 else scale, 0.0, scale)
    return factors


@gluon_jit
def epilogue(sums, addends, count, out, buffer, loaded, tile_number, factors, matrix, row, column,
             SYMMETRIC: gl.constexpr, SEVERAL: gl.constexpr, mirror=1):
    """Scale, add, round and store a tile, the tile_number-th of this warpgroup, whose first element
    is at (row, column) of the result.

    For SYMMETRIC == 2 the caller has started `load_addend` of the first of `count` addends.
    SEVERAL: two or three addends, or a diagonal. Missing addends are the last addend again, with
    factor 0: a branch or a loop that yields sums would take LLVM three times as long, and a binary
    for each number of addends is no faster. mirror: 0 stores nothing above the diagonal.
    """
    if SYMMETRIC == 2:
        sums = add_first_addend(sums, buffer, loaded, tile_number * count, factors)
    else:
        sums = sums * factors[0]
    for k in gl.static_range(1, 3 if SEVERAL else 1):
        sums = add_next_addend(sums, addends[k], k, count, buffer, loaded, tile_number * count,
                               factors, matrix, row, column,
                               sums.shape[0] // out.block_type.shape[1])
    store_tile(sums, out, buffer, buffer, factors, matrix, row, column, mirror, SYMMETRIC, SEVERAL,
               True)


@gluon_jit
def add_first_addend(sums, buffer, loaded, loads_before, factors):
    """Return alpha sums + beta addend. loads_before: earlier loads into `buffer`, which give the
    phase of mbarrier `loaded`.
    """
    mbarrier.wait(loaded, loads_before & 1)
    tile = matrices_of(buffer, sums.shape[0], sums.shape[1]).index(0)
    addend = factors[2] * tile.load(sums.type.layout).to(gl.float32)
    return gl.fma(sums, factors[0], addend)


@gluon_jit
def add_next_addend(sums, addend, k: gl.constexpr, count, buffer, loaded, loads_before, factors,
                    matrix, row, column, BOXES_DOWN: gl.constexpr = 1):
    """Load the k-th addend after the first, if k < count, and return sums + factor addend.
    Otherwise the addend in `buffer` is added again, and factors[2 + k] is 0.
    """
    if k < count:
        barrier()
        load_addend(addend, buffer, loaded, matrix, row, column, sums.shape[1], BOXES_DOWN)
    mbarrier.wait(loaded, (loads_before + k) & 1, pred=k < count)
    tile = matrices_of(buffer, sums.shape[0], sums.shape[1]).index(0)
    return pinned(sums) + factors[2 + k] * tile.load(sums.type.layout).to(gl.float32)


@gluon_jit
def store_tile(sums, out, buffer, mirror_buffer, factors, matrix, row, column, mirror,
               SYMMETRIC: gl.constexpr, DIAGONAL: gl.constexpr, ONE_BUFFER: gl.constexpr):
    """Add the diagonal, round and store a tile through shared memory `buffer`; squares below the
    diagonal are also stored transposed, through `mirror_buffer`, unless `mirror` is 0.

    ONE_BUFFER: both buffers are a single buffer, and earlier TMA stores from the buffer are waited
    for. Otherwise no TMA store may still read the buffers. DIAGONAL: factors[1] may differ from 0.
    A negative scale of "gram" moves the stores to a matrix index beyond the batch, where TMA stores
    nothing: the result stays as before.
    """
    SIDE: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = sums.shape[1]
    BOX: gl.constexpr = out.block_type.shape[1]
    BOXES_DOWN: gl.constexpr = SIDE // BOX
    if SYMMETRIC == 1:  # No branch: TMA drops boxes beyond the edge of the tensor
        matrix = gl.where(factors[2] < 0, 1 << 30, matrix)
    boxes = tma_boxes(buffer, out)
    tile = matrices_of(boxes, SIDE, COLUMNS).index(0)
    if DIAGONAL:
        if ONE_BUFFER:
            sums = add_diagonal(sums, factors[1], row, column)
        elif row < column + COLUMNS:
            sums = add_diagonal(sums, factors[1], row, column)
    result = sums.to(out.dtype)
    if ONE_BUFFER:
        tma.store_wait(0)
    barrier()  # All threads have read the addend; earlier TMA stores have read the buffer
    tile.store(result)
    if SYMMETRIC == 2:
        if (row >= column) & (row < column + COLUMNS):
            barrier()
            _mirror_lower_triangle(matrices_of(boxes, SIDE, SIDE).index((row - column) // SIDE),
                                   SIDE)
    fence()
    barrier()
    for k in gl.static_range(COLUMNS // SIDE):
        if (column + k * SIDE <= row) | (SYMMETRIC == 0):
            for box in gl.static_range(BOXES_DOWN * BOXES_DOWN):
                store_box(out, [matrix, row + box % BOXES_DOWN * BOX,
                                column + k * SIDE + box // BOXES_DOWN * BOX],
                          boxes.index(k * BOXES_DOWN * BOXES_DOWN + box))
    if SYMMETRIC:
        if (column < row) & (mirror != 0):
            if ONE_BUFFER:
                tma.store_wait(0)
                barrier()
            store_transposed(result, out, tma_boxes(mirror_buffer, out), matrix, row, column, True)


@gluon_jit
def add_diagonal(sums, factor, row, column):
    """Return sums + factor I; the first element of sums is at (row, column) of the matrix."""
    layout: gl.constexpr = sums.type.layout
    r = row + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    s = column + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    return sums + gl.where(r == s, factor, 0.0)


@gluon_jit
def index_grid(like):
    """Return row indices (.., 1) and column indices (1, ..) in the layout of a 2-D tensor."""
    r = gl.arange(0, like.shape[0], layout=gl.SliceLayout(1, like.type.layout))[:, None]
    s = gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, like.type.layout))[None, :]
    return r, s


@gluon_jit
def pinned(sums):
    """Identity. Keeps the compiler from moving the computation of `sums` to a place with higher
    register pressure.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [sums], gl.float32, False, 1)


@gluon_jit
def store_transposed(result, out, boxes, matrix, row, column, BELOW: gl.constexpr):
    """Store a tile's squares transposed, through shared memory `boxes`; if BELOW, only squares
    below the diagonal. (row, column): the first element of the tile before transposition.
    """
    SIDE: gl.constexpr = result.shape[0]
    COLUMNS: gl.constexpr = result.shape[1]
    matrices_of(boxes, COLUMNS, SIDE).index(0).permute([1, 0]).store(result)
    fence()
    barrier()
    for k in gl.static_range(COLUMNS // SIDE):
        if not BELOW or column + k * SIDE < row:
            store_box(out, [matrix, column + k * SIDE, row], boxes.index(k))


@gluon_jit
def _mirror_lower_triangle(square, SIDE: gl.constexpr):
    """Copy the lower triangle of a square in shared memory to the upper triangle."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=[16, SIDE, 16])
    r = gl.arange(0, SIDE, layout=gl.SliceLayout(1, layout))[:, None]
    s = gl.arange(0, SIDE, layout=gl.SliceLayout(0, layout))[None, :]
    values = gl.where(r < s, square.permute([1, 0]).load(layout), square.load(layout))
    barrier()
    square.store(values)

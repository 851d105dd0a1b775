"""Symmetric products for sm90 in Gluon: a tile per CTA, with prefetched addends.

A warpgroup loads operands by TMA STAGES - 1 steps ahead, multiplies, and loads addends during the
last steps into stages that no operand needs any more. Short kernels: the launch is programmatic
(PDL), small results need no table of tiles, and several CTAs share a multiprocessor.
"""
from __future__ import annotations

from ..launch.jit import gluon_jit
from .sm90_pipeline import (
    factors_of,
    load_addend,
    matrices_of,
    matrix_index,
    matrix_order,
    store_tile,
    tile_coord,
    tma_boxes,
)

# Gluon's names, put here by gluon_jit
gl = mbarrier = tma = fence = multiply = multiplied = load_box = gdc_wait = None
gdc_launch_dependents = None


@gluon_jit.unspecialized("count", "inner", "addends", "early", "mirror")
def one_tile_kernel(a, b, c, d, e, out, order, count, inner, addends, early, mirror, scales,
                    factors, SYMMETRIC: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """Write factors[0] A B + addends + factors[1] I to `out`, a tile per program; of "gram"
    (SYMMETRIC == 1) scale^2 A B, without addends.

    Tiles of 64 x 64, 64 x 128 or 128 x 128 (COLUMNS); at least STAGES - 1 steps. a, b, c, d, e,
    out: descriptors; addends and `out` in boxes of ROWS x ROWS. order: table of tiles, or None to
    compute tile coordinates. count: tiles per matrix, negative to visit matrices from the last one
    on. addends: number of addends; a single binary for any number is as fast as a binary for each.
    early: not 0 if the next kernel may begin before this kernel stores.

    SYMMETRIC == 2: only squares on and below the diagonal are read, of addends, and of A and B if
    tiles are larger than 64 x 64; boxes of A and B are BLOCK_K x BLOCK_K. mirror: 0 leaves squares
    above the diagonal of `out` unwritten.
    """
    ROWS: gl.constexpr = out.block_type.shape[1]
    BLOCK_K: gl.constexpr = a.block_type.shape[2]
    TRIANGLES: gl.constexpr = SYMMETRIC == 2 and COLUMNS > BLOCK_K
    AHEAD: gl.constexpr = STAGES - 1
    steps = (inner + BLOCK_K - 1) // BLOCK_K
    # Addends and the result are laid over stages that no operand needs any more, so memory of a
    # stage must have the size of a tile: of 64 x 64 tiles an operand, of 128 x 128 tiles both
    # operands together (hence a single allocation), of 64 x 128 tiles the right operand.
    if ROWS == COLUMNS:
        left = gl.allocate_shared_memory(a.dtype, [2 * STAGES, 1, ROWS, BLOCK_K], a.layout)
        right = left
    else:
        left = gl.allocate_shared_memory(a.dtype, [STAGES, 1, ROWS, BLOCK_K], a.layout)
        right = gl.allocate_shared_memory(b.dtype, [STAGES, 1, COLUMNS, BLOCK_K], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    addend_loaded = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    for number in gl.static_range(3):
        mbarrier.init(addend_loaded.index(number), count=1)
    fence()
    batch_order = matrix_order(count, gl.num_programs(0))
    if order is None:
        matrix, i, j = _computed_tile_coord(batch_order, gl.program_id(0), COLUMNS > ROWS)
    else:
        matrix, i, j = tile_coord(order, batch_order, gl.program_id(0))
    row, column = i * ROWS, j * COLUMNS
    # Steps of A and of B that lie in ROWS x ROWS squares on or below the diagonal. Later steps are
    # read as the transpose of squares below the diagonal.
    lower_steps = (gl.minimum((row + ROWS) // BLOCK_K, steps),
                   gl.minimum((column + ROWS) // BLOCK_K, steps))
    gdc_wait()
    matrix_factors = factors_of(scales, factors, matrix, SYMMETRIC)
    for k in gl.static_range(AHEAD):
        _load_stage(a, b, left, right, full, matrix, row, column, k, lower_steps, TRIANGLES, ROWS,
                    COLUMNS, STAGES)
    shape: gl.constexpr = [16, COLUMNS, 16]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=shape)
    sums = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    addend_boxes = c, d, e
    # Neither operand transposed, then the right operand, then both: three loops, because wgmma has
    # the transposition of an operand as an immediate
    if TRIANGLES:
        pipeline = left, right, full, addend_loaded
        coords = matrix, row, column, lower_steps
        sums = _multiply_steps(a, b, addend_boxes, pipeline, coords, sums, 0, lower_steps[1], steps,
                               addends, False, False, ROWS, COLUMNS, STAGES)
        sums = _multiply_steps(a, b, addend_boxes, pipeline, coords, sums, lower_steps[1],
                               lower_steps[0], steps, addends, False, True, ROWS, COLUMNS, STAGES)
        sums = _multiply_steps(a, b, addend_boxes, pipeline, coords, sums, lower_steps[0], steps,
                               steps, addends, True, True, ROWS, COLUMNS, STAGES)
    else:
        for k in range(steps - AHEAD):
            sums = _multiply_step(left, right, full, sums, k, False, False, ROWS, COLUMNS, BLOCK_K,
                                  STAGES)
            _load_stage(a, b, left, right, full, matrix, row, column, k + AHEAD, lower_steps, False,
                        ROWS, COLUMNS, STAGES)
        for k in gl.static_range(AHEAD):
            sums = _multiply_step(left, right, full, sums, steps - AHEAD + k, False, False, ROWS,
                                  COLUMNS, BLOCK_K, STAGES)
            if k < 3:
                _load_kth_addend(addend_boxes[k], k, addends, left, right, addend_loaded, steps,
                                 matrix, row, column, ROWS, COLUMNS, STAGES)
    sums = multiplied(0, deps=(sums,))
    # With three stages, two addends are loaded during the products; the third has to wait
    for k in gl.static_range(AHEAD, 3):
        _load_kth_addend(addend_boxes[k], k, addends, left, right, addend_loaded, steps, matrix,
                         row, column, ROWS, COLUMNS, STAGES)
    for k in range(addends):
        buffer = _stage_buffer(left, right, steps + k, ROWS, COLUMNS, STAGES)
        mbarrier.wait(addend_loaded.index(k), 0)
        addend = matrices_of(buffer, ROWS, COLUMNS).index(0).load(layout).to(gl.float32)
        factor = gl.where(k == 0, factors[2], gl.where(k == 1, factors[3], factors[4]))
        sums = gl.fma(sums, gl.where(k == 0, factors[0], 1.0), factor * addend)
    if SYMMETRIC == 1:
        sums = sums * matrix_factors[0]
    if early != 0:
        gdc_launch_dependents()
    store_tile(sums, out, _stage_buffer(left, right, steps, ROWS, COLUMNS, STAGES),
               _stage_buffer(left, right, steps + 1, ROWS, COLUMNS, STAGES), matrix_factors, matrix,
               row, column, mirror, SYMMETRIC, SYMMETRIC == 2, False)
    gdc_launch_dependents()
    tma.store_wait(0)


@gluon_jit
def _computed_tile_coord(batch_order, turn, WIDE: gl.constexpr):
    """Return (matrix, tile row, tile column) without a load from a table. Tiles of the lower
    triangle, row by row, as wide as high, or twice as wide (WIDE).
    """
    tile = turn % batch_order[0]
    if WIDE:
        # Rows 2 half - 1 and 2 half begin at tiles half^2 and half (half + 1)
        half = _integer_root(tile)
        start = half * (half + 1)
        i = gl.where(tile < start, 2 * half - 1, 2 * half)
        j = tile - gl.where(tile < start, half * half, start)
    else:
        i = (_integer_root(8 * tile + 1) - 1) // 2
        j = tile - i * (i + 1) // 2
    return matrix_index(batch_order, turn), i, j


@gluon_jit
def _integer_root(number):
    """The integer part of the square root of a small integer."""
    return gl.sqrt(number.to(gl.float32) + 0.5).to(gl.int32)


@gluon_jit
def _stage_operands(left, right, stage, SQUARE: gl.constexpr):
    """Shared memory of the left and the right operand of a stage. SQUARE: both are in `left`."""
    if SQUARE:
        rows, columns = left.index(2 * stage), left.index(2 * stage + 1)
    else:
        rows, columns = left.index(stage), right.index(stage)
    return rows, columns


@gluon_jit
def _stage_buffer(left, right, number, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
                  STAGES: gl.constexpr):
    """A tile's worth of the shared memory of stage number % STAGES."""
    stage = number % STAGES
    if ROWS != COLUMNS:
        buffer = right.index(stage)
    elif ROWS == 64:
        buffer = left.index(2 * stage)
    else:
        buffer = matrices_of(left, ROWS, COLUMNS).index(stage)
    return buffer


@gluon_jit
def _load_stage(a, b, left, right, full, matrix, row, column, k, lower_steps,
                TRIANGLES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
                STAGES: gl.constexpr):
    """Start TMA loads of the operands of step k."""
    BLOCK_K: gl.constexpr = a.block_type.shape[2]
    loaded = full.index(k % STAGES)
    rows, columns = _stage_operands(left, right, k % STAGES, ROWS == COLUMNS)
    mbarrier.expect(loaded, 2 * (ROWS + COLUMNS) * BLOCK_K)
    _load_operand(a, rows, loaded, matrix, row, k * BLOCK_K, k >= lower_steps[0], TRIANGLES)
    _load_operand(b, columns, loaded, matrix, column, k * BLOCK_K, k >= lower_steps[1], TRIANGLES)


@gluon_jit
def _load_operand(operand, buffer, loaded, matrix, row, inner_offset, is_turned,
                  TRIANGLES: gl.constexpr):
    """Start TMA loads of an operand's rows, from `row` on, in columns from inner_offset on; if
    is_turned, of the boxes that mirror them at the diagonal.

    Selected without a branch: with a branch the assembler would serialize the products.
    """
    SIDE: gl.constexpr = operand.block_type.shape[1]
    boxes = tma_boxes(buffer, operand)
    for k in gl.static_range(buffer.numel // (SIDE * operand.block_type.shape[2])):
        r, s = row + k * SIDE, inner_offset
        if TRIANGLES:
            r, s = gl.where(is_turned, inner_offset, r), gl.where(is_turned, r, inner_offset)
        load_box(operand, [matrix, r, s], loaded, boxes.index(k))


@gluon_jit
def _load_kth_addend(addend, k: gl.constexpr, addends, left, right, addend_loaded, steps, matrix,
                     row, column, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """Start TMA loads of addend k, if k < addends, into a stage whose products are done."""
    if k < addends:
        load_addend(addend, _stage_buffer(left, right, steps + k, ROWS, COLUMNS, STAGES),
                    addend_loaded.index(k), matrix, row, column, COLUMNS)


@gluon_jit
def _load_next_addend(addend_boxes, number, addends, left, right, addend_loaded, steps, matrix, row,
                      column, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """`_load_kth_addend` for a number that is not constexpr, less than STAGES - 1."""
    for k in gl.static_range(STAGES - 1 if STAGES < 4 else 3):
        if k == number:
            _load_kth_addend(addend_boxes[k], k, addends, left, right, addend_loaded, steps, matrix,
                             row, column, ROWS, COLUMNS, STAGES)


@gluon_jit
def _multiply_steps(a, b, addend_boxes, pipeline, coords, sums, first, last, steps, addends,
                    TURNED_A: gl.constexpr, TURNED_B: gl.constexpr, ROWS: gl.constexpr,
                    COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """Multiply steps `first` to `last`, and start the load of a later step after each product, or
    of the next addend where all steps are loaded. TURNED_A, TURNED_B: the operand is loaded
    transposed.
    """
    left, right, full, addend_loaded = pipeline
    matrix, row, column, lower_steps = coords
    BLOCK_K: gl.constexpr = a.block_type.shape[2]
    for k in range(first, last):
        sums = _multiply_step(left, right, full, sums, k, TURNED_A, TURNED_B, ROWS, COLUMNS,
                              BLOCK_K, STAGES)
        ahead = k + STAGES - 1
        if ahead < steps:
            _load_stage(a, b, left, right, full, matrix, row, column, ahead, lower_steps, True,
                        ROWS, COLUMNS, STAGES)
        else:
            _load_next_addend(addend_boxes, ahead - steps, addends, left, right, addend_loaded,
                              steps, matrix, row, column, ROWS, COLUMNS, STAGES)
    return sums


@gluon_jit
def _multiply_step(left, right, full, sums, k, TURNED_A: gl.constexpr, TURNED_B: gl.constexpr,
                   ROWS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr,
                   STAGES: gl.constexpr):
    """Issue the product of step k, and wait until the product before is done."""
    stage = k % STAGES
    rows, columns = _stage_operands(left, right, stage, ROWS == COLUMNS)
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

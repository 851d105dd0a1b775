"""Warp-specialized GEMMs for sm90 in Gluon: pingpong and cooperative consumer warpgroups.

Both kernels are persistent: a program per multiprocessor, with a producer warp that loads operands
by TMA (sm90_pipeline.py), and two consumer warpgroups. In `pingpong_kernel` each warpgroup has
tiles of its own, and the epilogue of a warpgroup overlaps the products of the other. In
`cooperative_kernel` both warpgroups share a tile, half the rows each.

Both write factors[0] A B + addends + factors[1] I; of "gram" and "product" factors are made of the
scale of the matrix. The first addend is loaded during the products, into the buffer from which the
result is stored later.
"""
from __future__ import annotations

from ..launch.jit import gluon_jit
from .sm90_pipeline import (
    epilogue,
    factors_of,
    half_tile_coord,
    load_addend,
    load_operands,
    make_pipeline,
    matrix_order,
    multiply_stages,
    tile_coord,
)

gl = mbarrier = tma = fence = gdc_wait = None  # Gluon's names, put here by gluon_jit


@gluon_jit.unspecialized("count", "whole", "halves", "inner", "addends")
def pingpong_kernel(a, b, c, d, e, out, a_half, c_half, d_half, e_half, out_half, order, count,
                    whole, halves, inner, addends, scales, factors, SYMMETRIC: gl.constexpr,
                    TURNED: gl.constexpr, SEVERAL: gl.constexpr, STAGES: gl.constexpr):
    """Two consumer warpgroups with a tile each, that take turns at the tensor cores.

    a, b, c, d, e, out: descriptors of operands, addends and result, in boxes of a tile. Of a
    symmetric result, tiles of the lower triangle are computed and mirrored. order: table of tiles
    (`tile_order`); count: tiles per matrix, negative to visit matrices from the last one on.

    `whole` tiles are computed first, then upper and lower `halves` of the remaining tiles, at most
    a half per program (`divide` in tile_config.py). a_half: A in boxes of half a
    tile's rows. c_half, d_half, e_half, out_half: squares, two of which are half a tile.

    addends: number of addends, at least 1 for SYMMETRIC == 2. SEVERAL: see `epilogue`.
    """
    BLOCK: gl.constexpr = out.block_type.shape[1]
    BLOCK_K: gl.constexpr = a.block_type.shape[1 if TURNED else 2]
    steps = (inner + BLOCK_K - 1) // BLOCK_K
    pipeline = make_pipeline(a, b, STAGES, 1)
    tiles = gl.allocate_shared_memory(out.dtype, [2, 1, BLOCK, BLOCK], out.layout)
    addend_loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    may_multiply = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(2):
        mbarrier.init(addend_loaded.index(group), count=1)
        mbarrier.init(may_multiply.index(group), count=1)
    fence()
    gdc_wait()
    schedule = order, matrix_order(count, whole + halves // 2), whole, halves, steps
    whole_args, half_args = ((c, d, e), addends, out), ((c_half, d_half, e_half), addends, out_half)
    results = whole_args, half_args, (scales, factors)
    buffers = tiles, addend_loaded, may_multiply
    # Warps, and registers per thread, of the partitions after the first, which has num_warps = 4
    gl.warp_specialize([
        (_consume_pingpong, (pipeline, schedule, results, buffers, 0, SYMMETRIC, TURNED, SEVERAL,
                             BLOCK, BLOCK_K, STAGES)),
        (_consume_pingpong, (pipeline, schedule, results, buffers, 1, SYMMETRIC, TURNED, SEVERAL,
                             BLOCK, BLOCK_K, STAGES)),
        (load_operands, (a, b, a_half, b, pipeline, schedule, False, SYMMETRIC, TURNED, STAGES)),
    ], [4, 1], [232, 24])


@gluon_jit
def _consume_pingpong(pipeline, schedule, results, buffers, GROUP: gl.constexpr,
                      SYMMETRIC: gl.constexpr, TURNED: gl.constexpr, SEVERAL: gl.constexpr,
                      BLOCK: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Consumer warpgroup GROUP: compute every second tile of this program, then perhaps a half
    tile.
    """
    order, batch_order, whole, halves, steps = schedule
    whole_args, half_args, factors = results
    tile_number = 0
    for turn in range(gl.program_id(0) + GROUP * gl.num_programs(0), whole, 2 * gl.num_programs(0)):
        matrix, i, j = tile_coord(order, batch_order, turn)
        _pingpong_tile(pipeline, whole_args, factors, buffers, matrix, i, j, tile_number, steps,
                       GROUP, SYMMETRIC, TURNED, SEVERAL, BLOCK, BLOCK, BLOCK_K, STAGES)
        tile_number += 1
    if gl.program_id(0) < halves and whole // gl.num_programs(0) % 2 == GROUP:
        matrix, i, j = half_tile_coord(order, batch_order, whole, False)
        _pingpong_tile(pipeline, half_args, factors, buffers, matrix, i, j, tile_number, steps,
                       GROUP, SYMMETRIC, TURNED, SEVERAL, BLOCK // 2, BLOCK, BLOCK_K, STAGES)
    tma.store_wait(0)


@gluon_jit
def _pingpong_tile(pipeline, result_args, factors, buffers, matrix, i, j, tile_number, steps,
                   GROUP: gl.constexpr, SYMMETRIC: gl.constexpr, TURNED: gl.constexpr,
                   SEVERAL: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
                   BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Compute and store tile (i, j), the tile_number-th of this warpgroup.

    A warpgroup begins when the other has issued its last product. If both waited for stages at
    once, a warpgroup could mistake a full stage for that of a later round: the phase of an mbarrier
    is a single bit.
    """
    addends, number, out = result_args
    tiles, addend_loaded, may_multiply = buffers
    buffer, loaded = tiles.index(GROUP), addend_loaded.index(GROUP)
    factors = factors_of(factors[0], factors[1], matrix, SYMMETRIC)
    tma.store_wait(0)
    if SYMMETRIC == 2:
        load_addend(addends[0], buffer, loaded, matrix, i * ROWS, j * COLUMNS, COLUMNS)
    mbarrier.wait(may_multiply.index(GROUP), (tile_number + 1 + GROUP) & 1)
    # The warpgroups' tiles alternate in the pipeline: 2 tile_number + GROUP tiles come before
    sums = multiply_stages(pipeline, (2 * tile_number + GROUP) * steps, steps,
                           may_multiply.index(1 - GROUP), 0, SYMMETRIC, TURNED, ROWS, COLUMNS,
                           BLOCK_K, STAGES)
    epilogue(sums, addends, number, out, buffer, loaded, tile_number, factors, matrix, i * ROWS,
             j * COLUMNS, SYMMETRIC, SEVERAL)


@gluon_jit.unspecialized("count", "whole", "halves", "inner", "addends")
def cooperative_kernel(a, b, b_half, c, d, e, out, order, count, whole, halves, inner, addends,
                       scales, factors, SYMMETRIC: gl.constexpr, TURNED: gl.constexpr,
                       SEVERAL: gl.constexpr, BLOCK_R: gl.constexpr, BLOCK_C: gl.constexpr,
                       STAGES: gl.constexpr):
    """Two consumer warpgroups that share tiles of BLOCK_R x BLOCK_C, half the rows each.

    Arguments as in `pingpong_kernel`, but: halves are left and right halves of tiles; b_half: B in
    boxes of half a tile's columns; c, d, e, out: boxes of BLOCK_R / 2 squared. Of a matrix times
    itself, two squares on the diagonal are a turn, a square for each warpgroup (`tile_order`).
    """
    BLOCK_K: gl.constexpr = a.block_type.shape[1 if TURNED else 2]
    steps = (inner + BLOCK_K - 1) // BLOCK_K
    pipeline = make_pipeline(a, b, STAGES, 2)
    tile_halves = gl.allocate_shared_memory(out.dtype, [2, 1, BLOCK_R // 2, BLOCK_C], out.layout)
    addend_loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(2):
        mbarrier.init(addend_loaded.index(group), count=1)
    fence()
    gdc_wait()
    schedule = order, matrix_order(count, whole + halves // 2), whole, halves, steps
    results = ((c, d, e), addends, out, tile_halves, addend_loaded, scales, factors)
    gl.warp_specialize([
        (_consume_cooperative, (pipeline, schedule, results, 0, SYMMETRIC, TURNED, SEVERAL, BLOCK_R,
                                BLOCK_C, BLOCK_K, STAGES)),
        (_consume_cooperative, (pipeline, schedule, results, 1, SYMMETRIC, TURNED, SEVERAL, BLOCK_R,
                                BLOCK_C, BLOCK_K, STAGES)),
        (load_operands, (a, b, a, b_half, pipeline, schedule, True, SYMMETRIC, TURNED, STAGES)),
    ], [4, 1], [240, 24])


@gluon_jit
def _consume_cooperative(pipeline, schedule, results, GROUP: gl.constexpr, SYMMETRIC: gl.constexpr,
                         TURNED: gl.constexpr, SEVERAL: gl.constexpr, BLOCK_R: gl.constexpr,
                         BLOCK_C: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Consumer warpgroup GROUP: compute the upper (0) or lower (1) half of all tiles, or a square
    of each pair.
    """
    order, batch_order, whole, halves, steps = schedule
    tile_number = 0
    for turn in range(gl.program_id(0), whole, gl.num_programs(0)):
        matrix, i, j = tile_coord(order, batch_order, turn)
        if SYMMETRIC and j < 0:
            _pair_square(pipeline, results, matrix, i if GROUP == 0 else -j, tile_number, steps,
                         GROUP, SYMMETRIC, SEVERAL, BLOCK_R, BLOCK_K, STAGES)
        else:
            _half_tile(pipeline, results, matrix, i, j, tile_number, steps, GROUP, SYMMETRIC,
                       TURNED, SEVERAL, BLOCK_R, BLOCK_C, BLOCK_K, STAGES)
        tile_number += 1
    if gl.program_id(0) < halves:
        matrix, i, j = half_tile_coord(order, batch_order, whole, True)
        _half_tile(pipeline, results, matrix, i, j, tile_number, steps, GROUP, SYMMETRIC, TURNED,
                   SEVERAL, BLOCK_R, BLOCK_C // 2, BLOCK_K, STAGES)
    tma.store_wait(0)


@gluon_jit
def _half_tile(pipeline, results, matrix, i, j, tile_number, steps, GROUP: gl.constexpr,
               SYMMETRIC: gl.constexpr, TURNED: gl.constexpr, SEVERAL: gl.constexpr,
               HEIGHT: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr,
               STAGES: gl.constexpr):
    """Compute and store this warpgroup's half of the rows of tile (i, j), HEIGHT x COLUMNS, the
    program's tile_number-th.
    """
    ROWS: gl.constexpr = HEIGHT // 2
    addends, number, out, tile_halves, addend_loaded, scales, factors = results
    factors = factors_of(scales, factors, matrix, SYMMETRIC)
    buffer, loaded = tile_halves.index(GROUP), addend_loaded.index(GROUP)
    row, column = i * HEIGHT + GROUP * ROWS, j * COLUMNS
    if SYMMETRIC == 2:
        tma.store_wait(0)
        load_addend(addends[0], buffer, loaded, matrix, row, column, COLUMNS)
    sums = multiply_stages(pipeline, tile_number * steps, steps, None, GROUP, SYMMETRIC, TURNED,
                           ROWS, COLUMNS, BLOCK_K, STAGES)
    epilogue(sums, addends, number, out, buffer, loaded, tile_number, factors, matrix, row, column,
             SYMMETRIC, SEVERAL)


@gluon_jit
def _pair_square(pipeline, results, matrix, i, tile_number, steps, GROUP: gl.constexpr,
                 SYMMETRIC: gl.constexpr, SEVERAL: gl.constexpr, SIDE: gl.constexpr,
                 BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Compute and store square (i, i) of a pair: rows times their own transpose.

    Warpgroup 0 reads both factors from the left operands of the pipeline, warpgroup 1 from the
    right operands. mirror = 0, because a square on the diagonal has no mirror image.
    """
    addends, number, out, tile_halves, addend_loaded, scales, factors = results
    left, right, full, empty = pipeline
    factors = factors_of(scales, factors, matrix, SYMMETRIC)
    buffer, loaded = tile_halves.index(GROUP), addend_loaded.index(GROUP)
    offset = i * SIDE
    if SYMMETRIC == 2:
        tma.store_wait(0)
        load_addend(addends[0], buffer, loaded, matrix, offset, offset, SIDE, 2)
    rows = left if GROUP == 0 else right
    sums = multiply_stages((rows, rows, full, empty), tile_number * steps, steps, None, 0, 1, False,
                           SIDE, SIDE, BLOCK_K, STAGES)
    epilogue(sums, addends, number, out, buffer, loaded, tile_number, factors, matrix, offset,
             offset, SYMMETRIC, SEVERAL, 0)

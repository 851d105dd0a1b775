"""Mixed-input GEMM for sm90 in Gluon: A X for X in bf16 and A in fp16, with X scaled and cast in
registers.

The transposed result X^T A is computed, because wgmma takes the left factor from registers, but the
right factor only from shared memory. Saves the pass over X that would scale and cast beforehand
(docs/kernels.md). Persistent and warp-specialized as `cooperative_kernel`.
"""
from __future__ import annotations

from ..launch.jit import gluon_jit
from .sm90_pipeline import (
    half_tile_coord,
    load_operands,
    make_pipeline,
    matrices_of,
    matrix_order,
    rounded,
    store_transposed,
    tile_coord,
    tma_boxes,
)

# Gluon's names, put here by gluon_jit
gl = mbarrier = tma = fence = barrier = multiply = multiplied = gdc_wait = None


@gluon_jit.unspecialized("count", "whole", "halves", "inner")
def mixed_input_kernel(x, a, a_half, out, order, count, whole, halves, inner, scales, powers,
                       STAGES: gl.constexpr):
    """Write scale A cast(power X) to `out`, of every matrix, for symmetric A; scales and powers in
    fp32, a number per matrix.

    x, a, out: descriptors of (N, rows, columns). Tiles are those of the transposed result: columns
    of X by columns of A. a_half: A in boxes of half a tile's columns; out: boxes of half a tile's
    rows squared. `whole` tiles, then left and right `halves` of the remaining tiles (`divide` in
    tile_config.py). order, count: see `pingpong_kernel`.
    """
    BLOCK_K: gl.constexpr = x.block_type.shape[1]
    HEIGHT: gl.constexpr = x.block_type.shape[2]
    WIDTH: gl.constexpr = a.block_type.shape[2]
    steps = (inner + BLOCK_K - 1) // BLOCK_K
    pipeline = make_pipeline(x, a, STAGES, 2)
    buffers = gl.allocate_shared_memory(out.dtype, [2, 1, HEIGHT // 2, WIDTH // 2], out.layout)
    fence()
    gdc_wait()
    schedule = order, matrix_order(count, whole + halves // 2), whole, halves, steps
    results = out, buffers, scales, powers
    gl.warp_specialize([
        (_consume, (pipeline, schedule, results, 0, HEIGHT, WIDTH, BLOCK_K, STAGES)),
        (_consume, (pipeline, schedule, results, 1, HEIGHT, WIDTH, BLOCK_K, STAGES)),
        (load_operands, (x, a, x, a_half, pipeline, schedule, True, 0, True, STAGES)),
    ], [4, 1], [232, 24])


@gluon_jit
def _consume(pipeline, schedule, results, GROUP: gl.constexpr, HEIGHT: gl.constexpr,
             WIDTH: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Consumer warpgroup GROUP: compute and store the upper (0) or lower (1) half of all tiles."""
    order, batch_order, whole, halves, steps = schedule
    tile_number = 0
    for turn in range(gl.program_id(0), whole, gl.num_programs(0)):
        matrix, i, j = tile_coord(order, batch_order, turn)
        _half_tile(pipeline, results, matrix, i, j, tile_number, steps, GROUP, HEIGHT, WIDTH,
                   BLOCK_K, STAGES)
        tile_number += 1
    if gl.program_id(0) < halves:
        matrix, i, j = half_tile_coord(order, batch_order, whole, True)
        _half_tile(pipeline, results, matrix, i, j, tile_number, steps, GROUP, HEIGHT, WIDTH // 2,
                   BLOCK_K, STAGES)
    tma.store_wait(0)


@gluon_jit
def _half_tile(pipeline, results, matrix, i, j, tile_number, steps, GROUP: gl.constexpr,
               HEIGHT: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr,
               STAGES: gl.constexpr):
    """Compute and store half the rows of tile (i, j), HEIGHT x COLUMNS, the program's
    tile_number-th.

    Half of a step is cast while the tensor cores multiply the half before.
    """
    ROWS: gl.constexpr = HEIGHT // 2
    HALF: gl.constexpr = BLOCK_K // 2
    out, buffers, scales, powers = results
    left, right, full, empty = pipeline
    buffer = buffers.index(GROUP)
    row, column = i * HEIGHT + GROUP * ROWS, j * COLUMNS
    power, scale = gl.load(powers + matrix), gl.load(scales + matrix)
    shape: gl.constexpr = [16, COLUMNS, 16]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=shape)
    sums = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    for k in range(tile_number * steps, tile_number * steps + steps):
        stage = k % STAGES
        mbarrier.wait(full.index(stage), (k // STAGES) & 1)
        x = matrices_of(left.index(stage), BLOCK_K, HEIGHT).index(0)
        a = matrices_of(right.index(stage), BLOCK_K, COLUMNS).index(0)
        upper = _cast(x.slice(0, HALF), power, GROUP, ROWS, a.dtype, layout)
        sums = multiply(upper, a.slice(0, HALF), sums, is_async=True)
        lower = _cast(x.slice(HALF, HALF), power, GROUP, ROWS, a.dtype, layout)
        sums = multiply(lower, a.slice(HALF, HALF), sums, is_async=True)
        sums = multiplied(0, deps=(sums,))
        mbarrier.arrive(empty.index(stage))
    sums = sums * scale
    # The buffer holds half of a whole tile's columns, which leaves room for more pipeline stages.
    # So the halves are stored one after the other.
    if COLUMNS * ROWS > buffer.numel:
        SIDE: gl.constexpr = COLUMNS // 2
        first, second = gl.split(gl.permute(gl.reshape(sums, (ROWS, 2, SIDE)), (0, 2, 1)))
        _store(first, out, buffer, matrix, row, column)
        _store(second, out, buffer, matrix, row, column + SIDE)
    else:
        _store(sums, out, buffer, matrix, row, column)


@gluon_jit
def _cast(x, power, GROUP: gl.constexpr, ROWS: gl.constexpr, DTYPE: gl.constexpr,
          layout: gl.constexpr):
    """Return this warpgroup's ROWS columns of x, times `power`, in DTYPE, as rows of a left operand
    in registers.
    """
    rows = x.permute([1, 0]).slice(GROUP * ROWS,
                                   ROWS).load(gl.DotOperandLayout(0, layout, 2)).to(gl.float32)
    return rounded(rows * power, DTYPE)


@gluon_jit
def _store(sums, out, buffer, matrix, row, column):
    """Round sums and store their transpose through `buffer`, after earlier TMA stores have read the
    buffer.
    """
    result, boxes = sums.to(out.dtype), tma_boxes(buffer, out)
    tma.store_wait(0)
    barrier()
    store_transposed(result, out, boxes, matrix, row, column, False)

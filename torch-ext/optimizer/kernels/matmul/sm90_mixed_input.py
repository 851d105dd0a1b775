"""Products on sm90 of bf16 matrices that are scaled and cast to fp16 on their way into the first
product.
"""
from __future__ import annotations

from ..launch.jit import gluon_jit
from .sm90_pipeline import (
    boxes_of,
    fetch,
    make_ring,
    matrices_of,
    path_of,
    place,
    place_of_half,
    rounded,
    store_turned,
)

# Gluon's names, put here by gluon_jit
gl = mbarrier = tma = fence = barrier = multiply = multiplied = gdc_wait = None


@gluon_jit.unspecialized("count", "whole", "halves", "inner")
def raw_kernel(x, a, a_half, out, order, count, whole, halves, inner, scales, powers,
               STAGES: gl.constexpr):
    """out = scale A cast(power X), all (N, rows, columns), for symmetric A; tiles (columns of x,
    columns of a) of the transpose. `whole` tiles, then left and right `halves` of the rest
    (tiles.divide). a_half: A by half a tile's columns; out: by squares.
    """
    BLOCK_K: gl.constexpr = x.block_type.shape[1]
    HEIGHT: gl.constexpr = x.block_type.shape[2]
    WIDTH: gl.constexpr = a.block_type.shape[2]
    steps = (inner + BLOCK_K - 1) // BLOCK_K
    ring = make_ring(x, a, STAGES, 2)
    strips = gl.allocate_shared_memory(out.dtype, [2, 1, HEIGHT // 2, WIDTH // 2], out.layout)
    fence()
    gdc_wait()
    work, ends = (order, path_of(count, whole + halves // 2), whole, halves, steps), (out, strips,
                                                                                      scales,
                                                                                      powers)
    gl.warp_specialize([
        (_consume, (ring, work, ends, 0, HEIGHT, WIDTH, BLOCK_K, STAGES)),
        (_consume, (ring, work, ends, 1, HEIGHT, WIDTH, BLOCK_K, STAGES)),
        (fetch, (x, a, x, a_half, ring, work, True, 0, True, STAGES)),
    ], [4, 1], [232, 24])


@gluon_jit
def _consume(ring, work, ends, WHO: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr,
             BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Compute and store half the rows of every tile."""
    order, path, whole, halves, steps = work
    mine = 0
    for turn in range(gl.program_id(0), whole, gl.num_programs(0)):
        matrix, i, j = place(order, path, turn)
        _strip(ring, ends, matrix, i, j, mine, steps, WHO, HEIGHT, WIDTH, BLOCK_K, STAGES)
        mine += 1
    if gl.program_id(0) < halves:
        matrix, i, j = place_of_half(order, path, whole, True)
        _strip(ring, ends, matrix, i, j, mine, steps, WHO, HEIGHT, WIDTH // 2, BLOCK_K, STAGES)
    tma.store_wait(0)


@gluon_jit
def _strip(ring, ends, matrix, i, j, mine, steps, WHO: gl.constexpr, HEIGHT: gl.constexpr,
           COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Compute and store half the rows of tile (i, j), the program's number `mine`."""
    ROWS: gl.constexpr = HEIGHT // 2
    HALF: gl.constexpr = BLOCK_K // 2
    out, strips, scales, powers = ends
    left, right, full, empty = ring
    own, row, column = strips.index(WHO), i * HEIGHT + WHO * ROWS, j * COLUMNS
    power, scale = gl.load(powers + matrix), gl.load(scales + matrix)
    shape: gl.constexpr = [16, COLUMNS, 16]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=shape)
    sums = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    for k in range(mine * steps, mine * steps + steps):
        stage = k % STAGES
        mbarrier.wait(full.index(stage), (k // STAGES) & 1)
        x = matrices_of(left.index(stage), BLOCK_K, HEIGHT).index(0)
        a = matrices_of(right.index(stage), BLOCK_K, COLUMNS).index(0)
        upper = _cast(x.slice(0, HALF), power, WHO, ROWS, a.dtype, layout)
        sums = multiply(upper, a.slice(0, HALF), sums, is_async=True)
        lower = _cast(x.slice(HALF, HALF), power, WHO, ROWS, a.dtype, layout)
        sums = multiply(lower, a.slice(HALF, HALF), sums, is_async=True)
        sums = multiplied(0, deps=(sums,))
        mbarrier.arrive(empty.index(stage))
    sums = sums * scale
    # One half after the other, so that there is room for more stages
    if COLUMNS * ROWS > own.numel:
        SIDE: gl.constexpr = COLUMNS // 2
        one, other = gl.split(gl.permute(gl.reshape(sums, (ROWS, 2, SIDE)), (0, 2, 1)))
        _store(one, out, own, matrix, row, column)
        _store(other, out, own, matrix, row, column + SIDE)
    else:
        _store(sums, out, own, matrix, row, column)


@gluon_jit
def _cast(x, power, WHO: gl.constexpr, ROWS: gl.constexpr, DTYPE: gl.constexpr,
          layout: gl.constexpr):
    """The group's columns of x, as rows in registers."""
    rows = x.permute([1, 0]).slice(WHO * ROWS,
                                   ROWS).load(gl.DotOperandLayout(0, layout, 2)).to(gl.float32)
    return rounded(rows * power, DTYPE)


@gluon_jit
def _store(sums, out, own, matrix, row, column):
    """Round sums and store their transpose, when what was stored from the same memory is read."""
    result, squares = sums.to(out.dtype), boxes_of(own, out)
    tma.store_wait(0)
    barrier()
    store_turned(result, out, squares, matrix, row, column, False)

"""Warp-specialized products on sm90: pingpong and cooperative consumer warpgroups."""
from __future__ import annotations

from ..launch.jit import gluon_jit
from .sm90_pipeline import (
    ask,
    epilogue,
    factors_of,
    fetch,
    make_ring,
    multiply_ring,
    path_of,
    place,
    place_of_half,
)

gl = mbarrier = tma = fence = gdc_wait = None  # Gluon's names, put here by gluon_jit


@gluon_jit.unspecialized("count", "whole", "halves", "inner", "addends")
def pingpong_kernel(a, b, c, d, e, out, a_half, c_half, d_half, e_half, out_half, order, count,
                    whole, halves, inner, addends, scales, factors, SYMMETRIC: gl.constexpr,
                    TURNED: gl.constexpr, SEVERAL: gl.constexpr, STAGES: gl.constexpr):
    """out = factors[0] A B + addends + factors[1] I; names as in gram_sm90. Of a symmetric result
    tiles of the lower triangle are computed, and mirrored.

    `whole` tiles, which fill all turns but the last, then upper and lower `halves` of the rest, at
    most one per program (tiles.divide). a_half: A by half a tile's rows; c_half, d_half, e_half,
    out_half: by squares, two of which are a half.
    """
    BLOCK: gl.constexpr = out.block_type.shape[1]
    BLOCK_K: gl.constexpr = a.block_type.shape[1 if TURNED else 2]
    steps = (inner + BLOCK_K - 1) // BLOCK_K
    ring = make_ring(a, b, STAGES, 1)
    tiles = gl.allocate_shared_memory(out.dtype, [2, 1, BLOCK, BLOCK], out.layout)
    added = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    may_multiply = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for who in gl.static_range(2):
        mbarrier.init(added.index(who), count=1)
        mbarrier.init(may_multiply.index(who), count=1)
    fence()
    gdc_wait()
    ends = ((c, d, e), addends, out), ((c_half, d_half, e_half), addends, out_half), (scales,
                                                                                      factors)
    work, room = (order, path_of(count, whole + halves // 2), whole, halves, steps), (tiles, added,
                                                                                      may_multiply)
    gl.warp_specialize([(_consume_pingpong, (ring, work, ends, room, 0, SYMMETRIC, TURNED, SEVERAL,
                                             BLOCK, BLOCK_K, STAGES)),
                        (_consume_pingpong, (ring, work, ends, room, 1, SYMMETRIC, TURNED, SEVERAL,
                                             BLOCK, BLOCK_K, STAGES)),
                        (fetch, (a, b, a_half, b, ring, work, False, SYMMETRIC, TURNED, STAGES)),],
                       [4, 1], [232, 24])


@gluon_jit
def _consume_pingpong(ring, work, ends, room, WHO: gl.constexpr, SYMMETRIC: gl.constexpr,
                      TURNED: gl.constexpr, SEVERAL: gl.constexpr, BLOCK: gl.constexpr,
                      BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Take every second tile."""
    order, path, whole, halves, steps = work
    tensors, halved, factors = ends
    mine = 0
    for turn in range(gl.program_id(0) + WHO * gl.num_programs(0), whole, 2 * gl.num_programs(0)):
        matrix, i, j = place(order, path, turn)
        _pingpong_tile(ring, tensors, factors, room, matrix, i, j, mine, steps, WHO, SYMMETRIC,
                       TURNED, SEVERAL, BLOCK, BLOCK, BLOCK_K, STAGES)
        mine += 1
    if gl.program_id(0) < halves and whole // gl.num_programs(0) % 2 == WHO:
        matrix, i, j = place_of_half(order, path, whole, False)
        _pingpong_tile(ring, halved, factors, room, matrix, i, j, mine, steps, WHO, SYMMETRIC,
                       TURNED, SEVERAL, BLOCK // 2, BLOCK, BLOCK_K, STAGES)
    tma.store_wait(0)


@gluon_jit
def _pingpong_tile(ring, tensors, factors, room, matrix, i, j, mine, steps, WHO: gl.constexpr,
                   SYMMETRIC: gl.constexpr, TURNED: gl.constexpr, SEVERAL: gl.constexpr,
                   ROWS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr,
                   STAGES: gl.constexpr):
    """Compute and store tile (i, j), the group's number `mine`. The first addend arrives meanwhile,
    where the result will stand. The other group starts when this one has its last operands: were
    both to wait for stages, one could take a stage for another that is a round away.
    """
    addends, number, out = tensors
    tiles, added, may_multiply = room
    own, arrived = tiles.index(WHO), added.index(WHO)
    factors = factors_of(factors[0], factors[1], matrix, SYMMETRIC)
    tma.store_wait(0)
    if SYMMETRIC == 2:
        ask(addends[0], own, arrived, matrix, i * ROWS, j * COLUMNS, COLUMNS)
    mbarrier.wait(may_multiply.index(WHO), (mine + 1 + WHO) & 1)
    sums = multiply_ring(ring, (2 * mine + WHO) * steps, steps, may_multiply.index(1 - WHO), 0,
                         SYMMETRIC, TURNED, ROWS, COLUMNS, BLOCK_K, STAGES)
    epilogue(sums, addends, number, out, own, arrived, mine, factors, matrix, i * ROWS, j * COLUMNS,
             SYMMETRIC, SEVERAL)


@gluon_jit.unspecialized("count", "whole", "halves", "inner", "addends")
def cooperative_kernel(a, b, b_half, c, d, e, out, order, count, whole, halves, inner, addends,
                       scales, factors, SYMMETRIC: gl.constexpr, TURNED: gl.constexpr,
                       SEVERAL: gl.constexpr, BLOCK_R: gl.constexpr, BLOCK_C: gl.constexpr,
                       STAGES: gl.constexpr):
    """out = factors[0] A B + addends + factors[1] I; names as in gram_sm90. `whole` tiles, then
    left and right `halves` of the rest (tiles.divide). b_half: B by half a tile's columns; c, d, e,
    out: by squares (sm90_pipeline.py).
    """
    BLOCK_K: gl.constexpr = a.block_type.shape[1 if TURNED else 2]
    steps = (inner + BLOCK_K - 1) // BLOCK_K
    ring = make_ring(a, b, STAGES, 2)
    strips = gl.allocate_shared_memory(out.dtype, [2, 1, BLOCK_R // 2, BLOCK_C], out.layout)
    added = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for who in gl.static_range(2):
        mbarrier.init(added.index(who), count=1)
    fence()
    gdc_wait()
    work = order, path_of(count, whole + halves // 2), whole, halves, steps
    ends = ((c, d, e), addends, out, strips, added, scales, factors)
    gl.warp_specialize([(_consume_cooperative,
                         (ring, work, ends, 0, SYMMETRIC, TURNED, SEVERAL, BLOCK_R, BLOCK_C,
                          BLOCK_K, STAGES)), (_consume_cooperative,
                                              (ring, work, ends, 1, SYMMETRIC, TURNED, SEVERAL,
                                               BLOCK_R, BLOCK_C, BLOCK_K, STAGES)),
                        (fetch, (a, b, a, b_half, ring, work, True, SYMMETRIC, TURNED, STAGES)),],
                       [4, 1], [240, 24])


@gluon_jit
def _consume_cooperative(ring, work, ends, WHO: gl.constexpr, SYMMETRIC: gl.constexpr,
                         TURNED: gl.constexpr, SEVERAL: gl.constexpr, BLOCK_R: gl.constexpr,
                         BLOCK_C: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Compute and store the upper or the lower half of every tile."""
    order, path, whole, halves, steps = work
    mine = 0
    for turn in range(gl.program_id(0), whole, gl.num_programs(0)):
        matrix, i, j = place(order, path, turn)
        if SYMMETRIC and j < 0:
            _square(ring, ends, matrix, i if WHO == 0 else -j, mine, steps, WHO, SYMMETRIC, SEVERAL,
                    BLOCK_R, BLOCK_K, STAGES)
        else:
            _strip(ring, ends, matrix, i, j, mine, steps, WHO, SYMMETRIC, TURNED, SEVERAL, BLOCK_R,
                   BLOCK_C, BLOCK_K, STAGES)
        mine += 1
    if gl.program_id(0) < halves:
        matrix, i, j = place_of_half(order, path, whole, True)
        _strip(ring, ends, matrix, i, j, mine, steps, WHO, SYMMETRIC, TURNED, SEVERAL, BLOCK_R,
               BLOCK_C // 2, BLOCK_K, STAGES)
    tma.store_wait(0)


@gluon_jit
def _strip(ring, ends, matrix, i, j, mine, steps, WHO: gl.constexpr, SYMMETRIC: gl.constexpr,
           TURNED: gl.constexpr, SEVERAL: gl.constexpr, HEIGHT: gl.constexpr, COLUMNS: gl.constexpr,
           BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Compute and store half of tile (i, j), the program's number `mine`. The first addend arrives
    meanwhile.
    """
    ROWS: gl.constexpr = HEIGHT // 2
    addends, number, out, strips, added, scales, factors = ends
    factors = factors_of(scales, factors, matrix, SYMMETRIC)
    own, arrived = strips.index(WHO), added.index(WHO)
    row, column = i * HEIGHT + WHO * ROWS, j * COLUMNS
    if SYMMETRIC == 2:
        tma.store_wait(0)
        ask(addends[0], own, arrived, matrix, row, column, COLUMNS)
    sums = multiply_ring(ring, mine * steps, steps, None, WHO, SYMMETRIC, TURNED, ROWS, COLUMNS,
                         BLOCK_K, STAGES)
    epilogue(sums, addends, number, out, own, arrived, mine, factors, matrix, row, column,
             SYMMETRIC, SEVERAL)


@gluon_jit
def _square(ring, ends, matrix, i, mine, steps, WHO: gl.constexpr, SYMMETRIC: gl.constexpr,
            SEVERAL: gl.constexpr, SIDE: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Compute and store a square of a pair, the one of row i of tiles: rows times themselves."""
    addends, number, out, strips, added, scales, factors = ends
    left, right, full, empty = ring
    factors = factors_of(scales, factors, matrix, SYMMETRIC)
    own, arrived, at = strips.index(WHO), added.index(WHO), i * SIDE
    if SYMMETRIC == 2:
        tma.store_wait(0)
        ask(addends[0], own, arrived, matrix, at, at, SIDE, 2)
    rows = left if WHO == 0 else right
    sums = multiply_ring((rows, rows, full, empty), mine * steps, steps, None, 0, 1, False, SIDE,
                         SIDE, BLOCK_K, STAGES)
    epilogue(sums, addends, number, out, own, arrived, mine, factors, matrix, at, at, SYMMETRIC,
             SEVERAL, 0)

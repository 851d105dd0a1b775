"""Products on sm90 with specialised warps: two groups of warps multiply the upper and the lower half of one tile.

Decides: who does what inside a program. A warp fetches tiles into a ring of stages (ring.py), also those of the next
tile while this one is finished; the groups share what it fetches of the second factor, and do not wait for each other.
pingpong.py, whose groups each have a tile of their own, reads and writes more of the shared memory. Of a pair of
squares on the diagonal, rows times themselves, each group has one. Must not know: what the products are used for;
launches.py calls it.
"""
from __future__ import annotations

from .ring import fetch, gluon_jit, make_ring, multiply_ring, path_of, place, place_of_half
from .strip import ask, factors_of, finish_strip

gl = mbarrier = tma = fence = gdc_wait = None  # Gluon's language, put here by gluon_jit


@gluon_jit.alike("count", "whole", "halves", "inner", "addends")
def cooperative_kernel(a, b, b_half, c, d, e, out, order, count, whole, halves, inner, addends, scales, factors,
                       SYMMETRIC: gl.constexpr, TURNED: gl.constexpr, SEVERAL: gl.constexpr, BLOCK_R: gl.constexpr,
                       BLOCK_C: gl.constexpr, STAGES: gl.constexpr):
    """out = factors[0] A B + addends + factors[1] I; names as in gram_sm90. `whole` tiles, then left and right `halves`
    of the rest (tiles.divide). b_half: B by half a tile's columns; c, d, e, out: by squares (strip.py).
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
    gl.warp_specialize([
        (_consume, (ring, work, ends, 0, SYMMETRIC, TURNED, SEVERAL, BLOCK_R, BLOCK_C, BLOCK_K, STAGES)),
        (_consume, (ring, work, ends, 1, SYMMETRIC, TURNED, SEVERAL, BLOCK_R, BLOCK_C, BLOCK_K, STAGES)),
        (fetch, (a, b, a, b_half, ring, work, True, SYMMETRIC, TURNED, STAGES)),
    ], [4, 1], [240, 24])


@gluon_jit
def _consume(ring, work, ends, WHO: gl.constexpr, SYMMETRIC: gl.constexpr, TURNED: gl.constexpr,
             SEVERAL: gl.constexpr, BLOCK_R: gl.constexpr, BLOCK_C: gl.constexpr, BLOCK_K: gl.constexpr,
             STAGES: gl.constexpr):
    """Compute and store the upper or the lower half of every tile."""
    order, path, whole, halves, steps = work
    mine = 0
    for turn in range(gl.program_id(0), whole, gl.num_programs(0)):
        matrix, i, j = place(order, path, turn)
        if SYMMETRIC and j < 0:
            _square(ring, ends, matrix, i if WHO == 0 else -j, mine, steps, WHO, SYMMETRIC, SEVERAL, BLOCK_R, BLOCK_K,
                    STAGES)
        else:
            _strip(ring, ends, matrix, i, j, mine, steps, WHO, SYMMETRIC, TURNED, SEVERAL, BLOCK_R, BLOCK_C, BLOCK_K,
                   STAGES)
        mine += 1
    if gl.program_id(0) < halves:
        matrix, i, j = place_of_half(order, path, whole, True)
        _strip(ring, ends, matrix, i, j, mine, steps, WHO, SYMMETRIC, TURNED, SEVERAL, BLOCK_R, BLOCK_C // 2, BLOCK_K,
               STAGES)
    tma.store_wait(0)


@gluon_jit
def _strip(ring, ends, matrix, i, j, mine, steps, WHO: gl.constexpr, SYMMETRIC: gl.constexpr, TURNED: gl.constexpr,
           SEVERAL: gl.constexpr, HEIGHT: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr,
           STAGES: gl.constexpr):
    """Compute and store half of tile (i, j), the program's number `mine`. The first addend arrives meanwhile."""
    ROWS: gl.constexpr = HEIGHT // 2
    addends, number, out, strips, added, scales, factors = ends
    factors = factors_of(scales, factors, matrix, SYMMETRIC)
    own, arrived, row, column = strips.index(WHO), added.index(WHO), i * HEIGHT + WHO * ROWS, j * COLUMNS
    if SYMMETRIC == 2:
        tma.store_wait(0)
        ask(addends[0], own, arrived, matrix, row, column, COLUMNS)
    sums = multiply_ring(ring, mine * steps, steps, None, WHO, SYMMETRIC, TURNED, ROWS, COLUMNS, BLOCK_K, STAGES)
    finish_strip(sums, addends, number, out, own, arrived, mine, factors, matrix, row, column, SYMMETRIC, SEVERAL)


@gluon_jit
def _square(ring, ends, matrix, i, mine, steps, WHO: gl.constexpr, SYMMETRIC: gl.constexpr, SEVERAL: gl.constexpr,
            SIDE: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Compute and store a square of a pair, the one of row i of tiles: rows times themselves."""
    addends, number, out, strips, added, scales, factors = ends
    left, right, full, empty = ring
    factors = factors_of(scales, factors, matrix, SYMMETRIC)
    own, arrived, at = strips.index(WHO), added.index(WHO), i * SIDE
    if SYMMETRIC == 2:
        tma.store_wait(0)
        ask(addends[0], own, arrived, matrix, at, at, SIDE, 2)
    rows = left if WHO == 0 else right
    sums = multiply_ring((rows, rows, full, empty), mine * steps, steps, None, 0, 1, False, SIDE, SIDE, BLOCK_K, STAGES)
    finish_strip(sums, addends, number, out, own, arrived, mine, factors, matrix, at, at, SYMMETRIC, SEVERAL, 0)

"""Products on sm90 with specialised warps: one group of warps multiplies while another finishes its tile.

Decides: who does what inside a program. A warp fetches tiles into a ring of stages (ring.py); two groups of four warps
take turns at the tensor cores, and the one whose turn it is not adds, rounds, mirrors and stores. Must not know: what
the products are used for; gram_sm90.py calls it.
"""
from __future__ import annotations

from .ring import fetch, gluon_jit, make_ring, multiply_ring, path_of, place, place_of_half
from .strip import ask, factors_of, finish_strip

gl = mbarrier = tma = fence = gdc_wait = None  # Gluon's language, put here by gluon_jit


@gluon_jit.alike("count", "whole", "halves", "inner", "addends")
def pingpong_kernel(a, b, c, d, e, out, a_half, c_half, d_half, e_half, out_half, order, count, whole, halves, inner,
                    addends, scales, factors, SYMMETRIC: gl.constexpr, TURNED: gl.constexpr, SEVERAL: gl.constexpr,
                    STAGES: gl.constexpr):
    """out = factors[0] A B + addends + factors[1] I; names as in gram_sm90. Of a symmetric result tiles of the lower
    triangle are computed, and mirrored.

    `whole` tiles, which fill all turns but the last, then upper and lower `halves` of the rest, at most one per program
    (tiles.divide). a_half: A by half a tile's rows; c_half, d_half, e_half, out_half: by squares, two of which are a
    half.
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
    ends = ((c, d, e), addends, out), ((c_half, d_half, e_half), addends, out_half), (scales, factors)
    work, room = (order, path_of(count, whole + halves // 2), whole, halves, steps), (tiles, added, may_multiply)
    gl.warp_specialize([
        (_consume, (ring, work, ends, room, 0, SYMMETRIC, TURNED, SEVERAL, BLOCK, BLOCK_K, STAGES)),
        (_consume, (ring, work, ends, room, 1, SYMMETRIC, TURNED, SEVERAL, BLOCK, BLOCK_K, STAGES)),
        (fetch, (a, b, a_half, b, ring, work, False, SYMMETRIC, TURNED, STAGES)),
    ], [4, 1], [232, 24])


@gluon_jit
def _consume(ring, work, ends, room, WHO: gl.constexpr, SYMMETRIC: gl.constexpr, TURNED: gl.constexpr,
             SEVERAL: gl.constexpr, BLOCK: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Take every second tile."""
    order, path, whole, halves, steps = work
    tensors, halved, factors = ends
    mine = 0
    for turn in range(gl.program_id(0) + WHO * gl.num_programs(0), whole, 2 * gl.num_programs(0)):
        matrix, i, j = place(order, path, turn)
        _tile(ring, tensors, factors, room, matrix, i, j, mine, steps, WHO, SYMMETRIC, TURNED, SEVERAL, BLOCK, BLOCK,
              BLOCK_K, STAGES)
        mine += 1
    if gl.program_id(0) < halves and whole // gl.num_programs(0) % 2 == WHO:
        matrix, i, j = place_of_half(order, path, whole, False)
        _tile(ring, halved, factors, room, matrix, i, j, mine, steps, WHO, SYMMETRIC, TURNED, SEVERAL, BLOCK // 2,
              BLOCK, BLOCK_K, STAGES)
    tma.store_wait(0)


@gluon_jit
def _tile(ring, tensors, factors, room, matrix, i, j, mine, steps, WHO: gl.constexpr, SYMMETRIC: gl.constexpr,
          TURNED: gl.constexpr, SEVERAL: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
          BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Compute and store tile (i, j), the group's number `mine`. The first addend arrives meanwhile, where the result
    will stand. The other group starts when this one has its last operands: were both to wait for stages, one could take
    a stage for another that is a round away.
    """
    addends, number, out = tensors
    tiles, added, may_multiply = room
    own, arrived = tiles.index(WHO), added.index(WHO)
    factors = factors_of(factors[0], factors[1], matrix, SYMMETRIC)
    tma.store_wait(0)
    if SYMMETRIC == 2:
        ask(addends[0], own, arrived, matrix, i * ROWS, j * COLUMNS, COLUMNS)
    mbarrier.wait(may_multiply.index(WHO), (mine + 1 + WHO) & 1)
    sums = multiply_ring(ring, (2 * mine + WHO) * steps, steps, may_multiply.index(1 - WHO), 0, SYMMETRIC, TURNED,
                         ROWS, COLUMNS, BLOCK_K, STAGES)
    finish_strip(sums, addends, number, out, own, arrived, mine, factors, matrix, i * ROWS, j * COLUMNS, SYMMETRIC,
                 SEVERAL)

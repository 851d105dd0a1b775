"""Products on sm90 with specialised warps: one group of warps multiplies while another finishes its tile.

Decides: who does what inside a program. A warp fetches tiles into a ring of stages (ring.py); two groups of four warps
take turns at the tensor cores, and the one whose turn it is not adds, rounds, mirrors and stores. Must not know: what
the products are used for; gram_sm90.py calls it.
"""
from __future__ import annotations

from .ring import fetch, gluon_jit, make_ring, multiply_ring, place, place_of_half
from .strip import ask, finish_strip

gl = mbarrier = tma = fence = barrier = load_box = store_box = None  # Gluon's language, put here by gluon_jit


@gluon_jit.alike("count", "whole", "halves", "inner")
def pingpong_kernel(a, b, c, d, out, a_half, c_half, d_half, out_half, order, count, whole, halves, inner, factors,
                    SYMMETRIC: gl.constexpr, TURNED: gl.constexpr, ADDENDS: gl.constexpr, FORM: gl.constexpr,
                    STAGES: gl.constexpr):
    """out = factors[0] A B + addends + factors[1] I; names as in gram_sm90. Of a symmetric result tiles of the lower
    triangle are computed, and mirrored.

    `whole` tiles, which fill all turns but the last, then upper and lower `halves` of the rest, at most one per program
    (tiles.divide). a_half: A by half a tile's rows; c_half, d_half, out_half: by squares, two of which are a half.
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
    work, finish = (order, count, whole, halves, steps), (c, d, out, tiles, added, may_multiply)
    half = c_half, d_half, out_half
    gl.warp_specialize([
        (_consume, (ring, work, finish, half, factors, 0, SYMMETRIC, TURNED, ADDENDS, FORM, BLOCK, BLOCK_K, STAGES)),
        (_consume, (ring, work, finish, half, factors, 1, SYMMETRIC, TURNED, ADDENDS, FORM, BLOCK, BLOCK_K, STAGES)),
        (fetch, (a, b, a_half, b, ring, work, False, SYMMETRIC, TURNED, STAGES)),
    ], [4, 1], [232, 24])


@gluon_jit
def _consume(ring, work, finish, half, factors, WHO: gl.constexpr, SYMMETRIC: gl.constexpr, TURNED: gl.constexpr,
             ADDENDS: gl.constexpr, FORM: gl.constexpr, BLOCK: gl.constexpr, BLOCK_K: gl.constexpr,
             STAGES: gl.constexpr):
    """Take every second tile. The first addend arrives during the multiplication, where the result will stand. The
    other group starts when this one has its last operands: were both to wait for stages, one could take a stage for
    another that is a round away.
    """
    order, count, whole, halves, steps = work
    c, d, out, tiles, added, may_multiply = finish
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    tile, arrived = tiles.index(WHO), added.index(WHO)
    flat = tile.reshape([BLOCK, BLOCK])
    mine, loads = 0, 0
    for turn in range(gl.program_id(0) + WHO * gl.num_programs(0), whole, 2 * gl.num_programs(0)):
        matrix, i, j = place(order, count, turn)
        tma.store_wait(0)
        if ADDENDS > 0:
            mbarrier.expect(arrived, 2 * BLOCK * BLOCK)
            load_box(c, [matrix, i * BLOCK, j * BLOCK], arrived, tile)
        mbarrier.wait(may_multiply.index(WHO), (mine + 1 + WHO) & 1)
        sums = multiply_ring(ring, (2 * mine + WHO) * steps, steps, may_multiply.index(1 - WHO), SYMMETRIC, TURNED,
                             BLOCK, 0, BLOCK, BLOCK, BLOCK_K, STAGES)
        mine += 1
        if FORM % 2 == 1:
            sums = sums * factors[0]
        if ADDENDS > 0:
            mbarrier.wait(arrived, loads & 1)
            loads += 1
            sums = sums + factors[2] * flat.load(layout).to(gl.float32)
        if ADDENDS > 1:
            barrier()
            mbarrier.expect(arrived, 2 * BLOCK * BLOCK)
            load_box(d, [matrix, i * BLOCK, j * BLOCK], arrived, tile)
            mbarrier.wait(arrived, loads & 1)
            loads += 1
            sums = sums + factors[3] * flat.load(layout).to(gl.float32)
        _store(sums, factors, out, tile, matrix, i, j, layout, SYMMETRIC, FORM, BLOCK)
    if gl.program_id(0) < halves and whole // gl.num_programs(0) % 2 == WHO:
        c_half, d_half, out_half = half
        SIDE: gl.constexpr = BLOCK // 2
        matrix, i, j = place_of_half(order, count, whole, False)
        mbarrier.wait(may_multiply.index(WHO), (mine + 1 + WHO) & 1)
        tma.store_wait(0)
        if ADDENDS > 0:
            ask(c_half, tile, arrived, matrix, i * SIDE, j * BLOCK, BLOCK)
        some = multiply_ring(ring, (2 * mine + WHO) * steps, steps, may_multiply.index(1 - WHO), SYMMETRIC, TURNED,
                             SIDE, 0, SIDE, BLOCK, BLOCK_K, STAGES)
        finish_strip(some, d_half, out_half, tile, arrived, loads, factors, matrix, i * SIDE, j * BLOCK, SYMMETRIC,
                     ADDENDS, FORM)
    tma.store_wait(0)


@gluon_jit
def _store(sums, factors, out, tile, matrix, i, j, layout: gl.constexpr, SYMMETRIC: gl.constexpr, FORM: gl.constexpr,
           BLOCK: gl.constexpr):
    """Round a tile and store it; of a symmetric result its mirror image, too."""
    r = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))[:, None]
    s = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))[None, :]
    flat = tile.reshape([BLOCK, BLOCK])
    if FORM >= 2:
        sums = sums + gl.where((r == s) & (i == j), factors[1], 0.0)
    result = sums.to(out.dtype)
    barrier()
    flat.store(result)
    if SYMMETRIC == 2:
        if i == j:
            result = gl.where(r < s, flat.permute([1, 0]).load(layout), result)
            barrier()
            flat.store(result)
    fence()
    barrier()
    store_box(out, [matrix, i * BLOCK, j * BLOCK], tile)
    if SYMMETRIC:
        if i != j:
            tma.store_wait(0)
            barrier()
            flat.permute([1, 0]).store(result)
            fence()
            barrier()
            store_box(out, [matrix, j * BLOCK, i * BLOCK], tile)

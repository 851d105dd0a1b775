"""Symmetric products on sm90 with specialised warps: one group of warps multiplies while another finishes its tile.

Decides: who does what inside a program. A warp fetches tiles through TMA into a ring of stages; two groups of four
warps take turns at the tensor cores, and the one whose turn it is not adds, rounds, mirrors and stores. Needs Gluon,
the part of Triton in which this can be said. Must not know: what the products are used for; gram_sm90.py calls it.
"""
from __future__ import annotations

import functools

from . import jit

gl = mbarrier = tma = fence = multiply = multiplied = None  # Gluon's language, put here by gluon_jit
VERSION = "3.6."  # of Triton; Gluon is experimental and changes from one to the next


@functools.cache
def available() -> bool:
    """Say whether this Triton has the Gluon that the kernel is written in."""
    import triton

    return triton.__version__.startswith(VERSION)


def description(tensor, rows, columns):
    """A descriptor for boxes of (rows, columns) in one matrix, checked."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, rows, columns], layout)


class gluon_jit(jit):
    """Decorator: the same for a Gluon kernel."""

    def decorate(self, scope):
        from triton.experimental import gluon
        from triton.experimental.gluon import language
        from triton.experimental.gluon.language.nvidia import hopper

        scope.update(gl=language, mbarrier=hopper.mbarrier, tma=hopper.tma, fence=hopper.fence_async_shared,
                     multiply=hopper.warpgroup_mma, multiplied=hopper.warpgroup_mma_wait)
        return gluon.jit


@gluon_jit.alike("count", "whole", "halves", "inner")
def pingpong_kernel(a, b, c, d, out, a_half, c_half, d_half, out_half, order, count, whole, halves, inner, factors,
                    SYMMETRIC: gl.constexpr, ADDENDS: gl.constexpr, FORM: gl.constexpr, BLOCK: gl.constexpr,
                    STAGES: gl.constexpr):
    """out = factors[0] A B + addends + factors[1] I in tiles of the lower triangle, mirrored; names as in gram_sm90.

    `whole` tiles, which fill all turns but the last, then upper and lower `halves` of the rest, at most one per program
    (tiles.divide). a_half: A by half a tile's rows; c_half, d_half, out_half: by squares, two of which are a half.
    """
    BLOCK_K: gl.constexpr = a.block_type.shape[2]
    steps = (inner + BLOCK_K - 1) // BLOCK_K
    left = gl.allocate_shared_memory(a.dtype, [STAGES, 1, BLOCK, BLOCK_K], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [STAGES, 1, BLOCK, BLOCK_K], b.layout)
    tiles = gl.allocate_shared_memory(out.dtype, [2, 1, BLOCK, BLOCK], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    may_multiply = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    for who in gl.static_range(2):
        mbarrier.init(added.index(who), count=1)
        mbarrier.init(may_multiply.index(who), count=1)
    fence()
    ring, work = (left, right, full, empty), (order, count, whole, halves, steps)
    finish, half = (c, d, out, tiles, added, may_multiply), (c_half, d_half, out_half)
    gl.warp_specialize([
        (_consume, (ring, work, finish, half, factors, 0, SYMMETRIC, ADDENDS, FORM, BLOCK, BLOCK_K, STAGES)),
        (_consume, (ring, work, finish, half, factors, 1, SYMMETRIC, ADDENDS, FORM, BLOCK, BLOCK_K, STAGES)),
        (_fetch, (a, b, a_half, ring, work, BLOCK, BLOCK_K, STAGES)),
    ], [4, 1], [232, 24])


@gluon_jit
def _place(order, count, turn):
    """Return (matrix, tile row, tile column)."""
    at = order + turn % count * 2
    return turn // count, gl.load(at), gl.load(at + 1)


@gluon_jit
def _place_of_half(order, count, whole):
    """Return (matrix, row of half tiles, tile column) of this program's half tile."""
    matrix, i, j = _place(order, count, whole + gl.program_id(0) // 2)
    return matrix, 2 * i + gl.program_id(0) % 2, j


@gluon_jit
def _fetch(a, b, a_half, ring, work, BLOCK: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Fill the ring with the operands of all tiles of this program, one after another."""
    order, count, whole, halves, steps = work
    number = 0
    for turn in range(gl.program_id(0), whole, gl.num_programs(0)):
        matrix, i, j = _place(order, count, turn)
        _fill(a, b, ring, matrix, i, j, number, steps, BLOCK, BLOCK, BLOCK_K, STAGES)
        number += steps
    if gl.program_id(0) < halves:
        matrix, i, j = _place_of_half(order, count, whole)
        _fill(a_half, b, ring, matrix, i, j, number, steps, BLOCK // 2, BLOCK, BLOCK_K, STAGES)


@gluon_jit
def _fill(a, b, ring, matrix, i, j, number, steps, ROWS: gl.constexpr, BLOCK: gl.constexpr, BLOCK_K: gl.constexpr,
          STAGES: gl.constexpr):
    """Fetch the operands of one tile, or of half of it, into the ring from stage `number` on."""
    left, right, full, empty = ring
    for k in range(steps):
        stage = number % STAGES
        mbarrier.wait(empty.index(stage), (number // STAGES + 1) & 1)
        mbarrier.expect(full.index(stage), 2 * (ROWS + BLOCK) * BLOCK_K)
        rows = left.index(stage).slice(0, ROWS, dim=1)
        tma.async_copy_global_to_shared(a, [matrix, i * ROWS, k * BLOCK_K], full.index(stage), rows)
        tma.async_copy_global_to_shared(b, [matrix, j * BLOCK, k * BLOCK_K], full.index(stage), right.index(stage))
        number += 1


@gluon_jit
def _consume(ring, work, finish, half, factors, WHO: gl.constexpr, SYMMETRIC: gl.constexpr, ADDENDS: gl.constexpr,
             FORM: gl.constexpr, BLOCK: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Take every second tile. The first addend arrives during the multiplication, where the result will stand."""
    order, count, whole, halves, steps = work
    c, d, out, tiles, added, may_multiply = finish
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    tile, arrived = tiles.index(WHO), added.index(WHO)
    flat = tile.reshape([BLOCK, BLOCK])
    mine, loads = 0, 0
    for turn in range(gl.program_id(0) + WHO * gl.num_programs(0), whole, 2 * gl.num_programs(0)):
        matrix, i, j = _place(order, count, turn)
        tma.store_wait(0)
        if ADDENDS > 0:
            mbarrier.expect(arrived, 2 * BLOCK * BLOCK)
            tma.async_copy_global_to_shared(c, [matrix, i * BLOCK, j * BLOCK], arrived, tile)
        mbarrier.wait(may_multiply.index(WHO), (mine + 1 + WHO) & 1)
        sums = _sums(ring, (2 * mine + WHO) * steps, steps, may_multiply.index(1 - WHO), layout, BLOCK, BLOCK, BLOCK_K,
                     STAGES)
        mine += 1
        if FORM % 2 == 1:
            sums = sums * factors[0]
        if ADDENDS > 0:
            mbarrier.wait(arrived, loads & 1)
            loads += 1
            sums = sums + factors[2] * flat.load(layout).to(gl.float32)
        if ADDENDS > 1:
            gl.thread_barrier()
            mbarrier.expect(arrived, 2 * BLOCK * BLOCK)
            tma.async_copy_global_to_shared(d, [matrix, i * BLOCK, j * BLOCK], arrived, tile)
            mbarrier.wait(arrived, loads & 1)
            loads += 1
            sums = sums + factors[3] * flat.load(layout).to(gl.float32)
        _store(sums, factors, out, tile, matrix, i, j, layout, SYMMETRIC, FORM, BLOCK)
    if gl.program_id(0) < halves and whole // gl.num_programs(0) % 2 == WHO:
        mbarrier.wait(may_multiply.index(WHO), (mine + 1 + WHO) & 1)
        tma.store_wait(0)
        _half(ring, work, half, factors, tile, arrived, (2 * mine + WHO) * steps, loads, may_multiply.index(1 - WHO),
              layout, SYMMETRIC, ADDENDS, FORM, BLOCK, BLOCK_K, STAGES)
    tma.store_wait(0)


@gluon_jit
def _sums(ring, number, steps, next_one, layout: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr,
          BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Return the tile's sums of products, from stage `number` of the ring on. The other group starts when this one has
    its last operands: were both to wait for stages, one could take a stage for another that is a round away.
    """
    left, right, full, empty = ring
    sums = gl.zeros((ROWS, BLOCK), gl.float32, layout)
    for k in range(steps):
        stage = number % STAGES
        mbarrier.wait(full.index(stage), (number // STAGES) & 1)
        columns = right.index(stage).reshape([BLOCK, BLOCK_K]).permute([1, 0])
        rows = left.index(stage).reshape([BLOCK, BLOCK_K]).slice(0, ROWS)
        sums = multiply(rows, columns, sums, is_async=True)
        sums = multiplied(1, deps=(sums,))
        mbarrier.arrive(empty.index((number + STAGES - 1) % STAGES), pred=k > 0)
        number += 1
    mbarrier.arrive(next_one)
    sums = multiplied(0, deps=(sums,))
    mbarrier.arrive(empty.index((number + STAGES - 1) % STAGES))
    return sums


@gluon_jit
def _half(ring, work, half, factors, tile, arrived, number, loads, next_one, layout: gl.constexpr,
          SYMMETRIC: gl.constexpr, ADDENDS: gl.constexpr, FORM: gl.constexpr, BLOCK: gl.constexpr,
          BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Compute and store the upper or the lower half of a tile, in two squares that lie side by side."""
    c, d, out = half
    SIDE: gl.constexpr = BLOCK // 2
    order, count, whole, halves, steps = work
    matrix, i, j = _place_of_half(order, count, whole)
    squares = tile._reinterpret(out.dtype, [2, 1, SIDE, SIDE], out.layout)
    upright: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat = tile._reinterpret(out.dtype, [SIDE, BLOCK], upright)
    if ADDENDS > 0:
        _ask(c, matrix, i, j, arrived, squares, SIDE)
    sums = _sums(ring, number, steps, next_one, layout, SIDE, BLOCK, BLOCK_K, STAGES)
    if FORM % 2 == 1:
        sums = sums * factors[0]
    if ADDENDS > 0:
        mbarrier.wait(arrived, loads & 1)
        sums = sums + factors[2] * flat.load(layout).to(gl.float32)
    if ADDENDS > 1:
        gl.thread_barrier()
        _ask(d, matrix, i, j, arrived, squares, SIDE)
        mbarrier.wait(arrived, (loads + 1) & 1)
        sums = sums + factors[3] * flat.load(layout).to(gl.float32)
    r = i * SIDE + gl.arange(0, SIDE, layout=gl.SliceLayout(1, layout))[:, None]
    s = j * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))[None, :]
    if FORM >= 2:
        sums = sums + gl.where(r == s, factors[1], 0.0)
    result = sums.to(out.dtype)
    gl.thread_barrier()
    flat.store(result)
    if SYMMETRIC == 2:
        if i // 2 == j:
            gl.thread_barrier()
            _make_symmetric(squares.index(i % 2).reshape([SIDE, SIDE]), SIDE)
    fence()
    gl.thread_barrier()
    for k in gl.static_range(2):
        if 2 * j + k <= i:
            tma.async_copy_shared_to_global(out, [matrix, i * SIDE, (2 * j + k) * SIDE], squares.index(k))
    tma.store_wait(0)
    gl.thread_barrier()
    tile._reinterpret(out.dtype, [BLOCK, SIDE], upright).permute([1, 0]).store(result)
    fence()
    gl.thread_barrier()
    for k in gl.static_range(2):
        if 2 * j + k < i:
            tma.async_copy_shared_to_global(out, [matrix, (2 * j + k) * SIDE, i * SIDE], squares.index(k))


@gluon_jit
def _ask(addend, matrix, i, j, arrived, squares, SIDE: gl.constexpr):
    """Let an addend's two squares arrive."""
    mbarrier.expect(arrived, 4 * SIDE * SIDE)
    for k in gl.static_range(2):
        tma.async_copy_global_to_shared(addend, [matrix, i * SIDE, (2 * j + k) * SIDE], arrived, squares.index(k))


@gluon_jit
def _make_symmetric(square, SIDE: gl.constexpr):
    """Mirror the lower triangle of a square in shared memory."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SIDE, 16])
    r = gl.arange(0, SIDE, layout=gl.SliceLayout(1, layout))[:, None]
    s = gl.arange(0, SIDE, layout=gl.SliceLayout(0, layout))[None, :]
    values = gl.where(r < s, square.permute([1, 0]).load(layout), square.load(layout))
    gl.thread_barrier()
    square.store(values)


@gluon_jit
def _store(sums, factors, out, tile, matrix, i, j, layout: gl.constexpr, SYMMETRIC: gl.constexpr, FORM: gl.constexpr,
           BLOCK: gl.constexpr):
    """Round a tile on or below the diagonal; store it, and its mirror image."""
    r = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))[:, None]
    s = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))[None, :]
    flat = tile.reshape([BLOCK, BLOCK])
    if FORM >= 2:
        sums = sums + gl.where((r == s) & (i == j), factors[1], 0.0)
    result = sums.to(out.dtype)
    gl.thread_barrier()
    flat.store(result)
    if SYMMETRIC == 2:
        if i == j:
            result = gl.where(r < s, flat.permute([1, 0]).load(layout), result)
            gl.thread_barrier()
            flat.store(result)
    fence()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [matrix, i * BLOCK, j * BLOCK], tile)
    if i != j:
        tma.store_wait(0)
        gl.thread_barrier()
        flat.permute([1, 0]).store(result)
        fence()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out, [matrix, j * BLOCK, i * BLOCK], tile)

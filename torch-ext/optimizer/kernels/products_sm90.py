"""The kernel of products.py: X X^T and a list of symmetric products in one launch, on sm90.

Decides: who does what inside a program, and who waits for whom. Programs take tiles in turns from one list, product
after product; a tile begins when the rows that it reads are finished, by whichever program, and turns begin together.
Two groups of warps multiply as in pingpong.py, one warp fetches, and one waits for rows. Must not know: which products
there are, nor why. Needs Gluon, and all programs at the same time.
"""
from __future__ import annotations

from .ring import fill, gluon_jit, make_ring, multiply_ring, place
from .strip import add_first, add_next, ask, store_strip

gl = mbarrier = fence = barrier = None  # Gluon's language, put here by gluon_jit


@gluon_jit.alike("matrices", "count", "products", "inner", "long", "apart")
def products_kernel(x, boxes, squares, order, places, factors, scales, counts, matrices, count, products, inner, long,
                    apart, STAGES: gl.constexpr):
    """`products` of `matrices`, `count` tiles each. x, boxes, squares: what is multiplied at a time of X, with `long`
    columns, and of all matrices, and tiles, of all matrices, those of each name one after another. order: (tile row,
    tile column) of every tile. places, factors: eight of each for a product (products.py, `_numbers`); scales: of each
    X. apart: by how many steps programs may be, when they begin a turn. counts: zeros at first; how many turns programs
    have come to the end of, and how many warps have finished their part of a tile, by rows of tiles, for each matrix of
    each product.
    """
    BLOCK: gl.constexpr = squares.block_type.shape[1]
    BLOCK_K: gl.constexpr = boxes.block_type.shape[2]
    ring = make_ring(boxes, boxes, STAGES, 1)
    tiles = gl.allocate_shared_memory(squares.dtype, [2, 1, BLOCK, BLOCK], squares.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    known = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    may_multiply = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for who in gl.static_range(2):
        mbarrier.init(ready.index(who), count=1)
        mbarrier.init(known.index(who), count=2)
        mbarrier.init(added.index(who), count=1)
        mbarrier.init(may_multiply.index(who), count=1)
    fence()
    down, steps, total = (inner + BLOCK - 1) // BLOCK, (inner + BLOCK_K - 1) // BLOCK_K, matrices * count * products
    first = gl.where(gl.load(places) < 0, (long + BLOCK_K - 1) // BLOCK_K, steps)  # of the first product
    work, waits = (order, places, matrices, count, steps, first, total), (ready, known)
    done, room = (counts + 1, matrices, down), (tiles, added, may_multiply)
    gl.warp_specialize([
        (_consume, (squares, ring, work, factors, scales, waits, done, room, 0, BLOCK, BLOCK_K, STAGES)),
        (_consume, (squares, ring, work, factors, scales, waits, done, room, 1, BLOCK, BLOCK_K, STAGES)),
        (_fetch, (x, boxes, ring, work, waits, counts, apart, STAGES)),
        (_watch, (work, waits, done, counts)),
    ], [4, 1, 1], [232, 40, 24])


@gluon_jit
def _find(work, turn):
    """Return a turn's product, matrix, tile row and tile column."""
    order, _, matrices, count, _, _, _ = work
    matrix, i, j = place(order, (count, 0), turn % (matrices * count))
    return turn // (matrices * count), matrix, i, j


@gluon_jit
def _watch(work, waits, done, counts):
    """Say of each of this program's tiles when it may begin: when its rows are finished, and all programs have come to
    the end of the turn before. To ask takes longer than to fetch what is multiplied at a time.
    """
    ready, known = waits
    mine, turns = 0, work[6] // gl.num_programs(0)
    for turn in range(gl.program_id(0), work[6], gl.num_programs(0)):
        product, matrix, i, j = _find(work, turn)
        if product > 0:
            _wait_for(done, product - 1, matrix, i, j)
        _meet(counts, gl.minimum(mine, turns) * gl.num_programs(0))
        mbarrier.wait(known.index(mine % 2), (mine // 2 + 1) & 1)
        mbarrier.arrive(ready.index(mine % 2))
        mine += 1


@gluon_jit
def _hear(waits, mine):
    """Wait until that is said of the program's tile number `mine`: for the warp that fetches, and one of the groups."""
    ready, known = waits
    mbarrier.wait(ready.index(mine % 2), mine // 2 & 1)
    barrier()
    mbarrier.arrive(known.index(mine % 2))


@gluon_jit
def _fetch(x, boxes, ring, work, waits, counts, apart, STAGES: gl.constexpr):
    """Fetch the operands of tiles. Programs begin each turn together, but for one that not all of them have: what
    neighbours read at the same time comes from the cache once, and they would drift apart (docs/log.md). Where the next
    tile is has been looked up by then.
    """
    _, places, matrices, _, steps, first, total = work
    turns, mine, number = total // gl.num_programs(0), 0, 0
    product, matrix, i, j = _find(work, gl.program_id(0))
    a, b = gl.load(places + product * 8), gl.load(places + product * 8 + 1)
    for turn in range(gl.program_id(0), total, gl.num_programs(0)):
        end = gl.where(product == 0, first, steps)
        early = gl.maximum(end - apart, 0)
        _hear(waits, mine)
        _fill(x, boxes, ring, a, b, matrices, matrix, i, j, number, 0, early, STAGES)
        if mine < turns:
            _come(counts)
        product, next_matrix, next_i, next_j = _find(work, gl.minimum(turn + gl.num_programs(0), total - 1))
        next_a, next_b = gl.load(places + product * 8), gl.load(places + product * 8 + 1)
        _fill(x, boxes, ring, a, b, matrices, matrix, i, j, number + early, early, end, STAGES)
        mine += 1
        number += end
        matrix, i, j, a, b = next_matrix, next_i, next_j, next_a, next_b


@gluon_jit
def _fill(x, boxes, ring, a, b, matrices, matrix, i, j, number, start, stop, STAGES: gl.constexpr):
    """Fetch steps of a tile into the ring from stage `number` on, of X or of matrices that are named."""
    if a < 0:
        fill(x, x, ring, matrix, matrix, i, j, number, start, stop, 1, False, STAGES)
    else:
        fill(boxes, boxes, ring, a * matrices + matrix, b * matrices + matrix, i, j, number, start, stop, 1, False,
             STAGES)


@gluon_jit
def _consume(squares, ring, work, factors, scales, waits, done, room, WHO: gl.constexpr, BLOCK: gl.constexpr,
             BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Compute and store every second tile of this program. The first addend arrives meanwhile, where the result will
    stand. The other group starts when this one has its last operands (pingpong.py).
    """
    _, places, matrices, count, steps, first, total = work
    tiles, added, may_multiply = room
    own, arrived, mine, asked = tiles.index(WHO), added.index(WHO), 0, 0
    longer = (matrices * count - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)  # tiles of the first
    product, matrix, i, j = _find(work, gl.minimum(gl.program_id(0) + WHO * gl.num_programs(0), total - 1))
    for turn in range(gl.program_id(0) + WHO * gl.num_programs(0), total, 2 * gl.num_programs(0)):
        before = 2 * mine + WHO
        told = _told(places + product * 8, factors + product * 8, scales, matrices, matrix)
        addends = told[0]
        _hear(waits, before)
        if addends > 0:
            ask(squares, own, arrived, told[2], i * BLOCK, j * BLOCK, BLOCK)
        number = before * steps + gl.minimum(before, longer) * (first - steps)
        following = _find(work, gl.minimum(turn + 2 * gl.num_programs(0), total - 1))
        mbarrier.wait(may_multiply.index(WHO), (mine + 1 + WHO) & 1)
        sums = multiply_ring(ring, number, gl.where(product == 0, first, steps), may_multiply.index(1 - WHO), 0, 1,
                             False, BLOCK, BLOCK, BLOCK_K, STAGES)
        _finish(sums, squares, own, arrived, told, i * BLOCK, j * BLOCK, asked)
        _count(done, product, matrix, i, j)
        asked += addends
        mine += 1
        product, matrix, i, j = following


@gluon_jit
def _told(places, factors, scales, matrices, matrix):
    """Return (how many addends a product has, the result, the addends, the factors): of matrices of X whose scale is
    negative the result is nowhere, for X X^T is there already.
    """
    scale = gl.where(gl.load(places) < 0, gl.load(scales + matrix), 1.0)
    return (gl.load(places + 6), gl.where(scale < 0, 1 << 30, gl.load(places + 2) * matrices + matrix),
            gl.load(places + 3) * matrices + matrix, gl.load(places + 4) * matrices + matrix,
            gl.load(places + 5) * matrices + matrix, gl.load(factors) * (scale * scale), gl.load(factors + 1),
            gl.load(factors + 2), gl.load(factors + 3), gl.load(factors + 4))


@gluon_jit
def _finish(sums, squares, own, arrived, told, row, column, asked):
    """Scale, add, round and store a tile, for which one addend has been asked for, or none; `asked` before it."""
    addends, out, _, second, third, f0, f1, f2, f3, f4 = told
    f = f0, f1, f2, f3, f4
    sums = add_first(sums, own, arrived, asked, f, addends)
    if addends > 1:
        sums = add_next(sums, squares, 1, addends, own, arrived, asked, f, second, row, column)
        sums = add_next(sums, squares, 2, addends, own, arrived, asked, f, third, row, column)
    store_strip(sums, squares, own, own, f, out, row, column, 1, 2, True, True)


@gluon_jit
def _rows_of(done, product, matrix, i, j):
    """Return where the finished tiles of the rows are counted that tile (i, j) is of: its own, and the one that it
    mirrors.
    """
    counts, matrices, down = done
    at = counts + (product * matrices + matrix) * down
    return at + i, at + j


@gluon_jit
def _wait_for(done, product, matrix, i, j):
    """Wait until these rows are finished, of as many tiles as there are rows, and may be read by TMA. Then all of the
    product before is finished, too: a tile of each row waited for each of its rows.
    """
    one, other = _rows_of(done, product, matrix, i, j)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t, u; again: ld.relaxed.gpu.global.b32 t, [$1]; ld.relaxed.gpu.global.b32 u, [$2]; "
        "min.s32 t, t, u; setp.lt.s32 p, t, $3; @p bra again; fence.acq_rel.gpu; fence.proxy.async; mov.b32 $0, t; }",
        "=r,l,l,r", [one.to(gl.int64), other.to(gl.int64), 4 * done[2]], gl.int32, False, 1)


@gluon_jit
def _count(done, product, matrix, i, j):
    """Count tile (i, j), each of four warps, once its stores are in memory. A warp's elected thread counts: by threads'
    numbers, the assembler would take it that threads part, and make a loop of each TMA instruction.
    """
    one, other = _rows_of(done, product, matrix, i, j)
    gl.inline_asm_elementwise(
        "{ .reg .pred p, q; .reg .b32 t; cp.async.bulk.wait_group 0; fence.proxy.async; elect.sync t|p, -1; "
        "setp.ne.and.u64 q, $1, $2, p; @p red.release.gpu.global.add.u32 [$1], 1; "
        "@q red.release.gpu.global.add.u32 [$2], 1; mov.b32 $0, 0; }",
        "=r,l,l", [one.to(gl.int64), other.to(gl.int64)], gl.int32, False, 1)


@gluon_jit
def _come(counts):
    """Say that this program has fetched most of a tile."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; elect.sync t|p, -1; @p red.relaxed.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0; }",
        "=r,l", [counts.to(gl.int64)], gl.int32, False, 1)


@gluon_jit
def _meet(counts, least):
    """Wait until programs have said that so often."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; again: ld.relaxed.gpu.global.b32 t, [$1]; setp.lt.u32 p, t, $2; @p bra again; "
        "mov.b32 $0, t; }", "=r,l,r", [counts.to(gl.int64), least], gl.int32, False, 1)

"""The kernel of products.py: a list of symmetric products in one launch, on sm90.

Decides: who does what inside a program, and who waits for whom. Programs take tiles in turns from one list, product
after product; a tile begins when the rows that it reads are finished, by whichever program, and turns begin together.
Two groups of warps multiply as in pingpong.py; one warp looks tiles up, waits for their rows and tells the others, and
one fetches. Must not know: which products there are, nor why. Needs Gluon, and all programs at the same time.
"""
from __future__ import annotations

from .ring import boxes_of, gluon_jit, make_ring, multiply_ring
from .strip import add_first, add_next, ask, store_strip

gl = mbarrier = tma = fence = barrier = load_box = None  # Gluon's language, put here by gluon_jit


@gluon_jit.alike("matrices", "count", "products", "inner")
def products_kernel(boxes, squares, order, places, factors, counts, matrices, count, products, inner,
                   STAGES: gl.constexpr):
    """`products` of `matrices`, `count` tiles each. boxes, squares: what is multiplied at a time, and tiles, of all
    matrices, those of each name one after another. order: (tile row, tile column) of every tile. places, factors: eight
    of each for a product (products.py, `_numbers`). counts: zeros at first; how many turns programs have fetched, and
    how many warps have finished their part of a tile, by rows of tiles, for each matrix of each product.
    """
    BLOCK: gl.constexpr = squares.block_type.shape[1]
    BLOCK_K: gl.constexpr = boxes.block_type.shape[2]
    ring = make_ring(boxes, boxes, STAGES, 1)
    tiles = gl.allocate_shared_memory(squares.dtype, [2, 1, BLOCK, BLOCK], squares.layout)
    queue = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    may_multiply = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for who in gl.static_range(2):
        mbarrier.init(told.index(who), count=1)
        mbarrier.init(taken.index(who), count=2)
        mbarrier.init(added.index(who), count=1)
        mbarrier.init(may_multiply.index(who), count=1)
    fence()
    down, steps = (inner + BLOCK - 1) // BLOCK, (inner + BLOCK_K - 1) // BLOCK_K
    total = matrices * count * products
    work, room = (order, places, counts + 1, matrices, count, down, steps), (tiles, added, may_multiply)
    waits = queue, told, taken
    gl.warp_specialize([
        (_consume, (squares, ring, work, factors, waits, room, 0, BLOCK, BLOCK_K, STAGES)),
        (_consume, (squares, ring, work, factors, waits, room, 1, BLOCK, BLOCK_K, STAGES)),
        (_fetch, (boxes, ring, waits, counts, total // gl.num_programs(0), steps, STAGES)),
        (_look_up, (work, waits, total)),
    ], [4, 1, 1], [232, 40, 40])


@gluon_jit
def _look_up(work, waits, total):
    """Tell of this program's tiles when their rows are finished, which takes longer than to fetch what is multiplied at
    a time.
    """
    order, places, _, matrices, count, _, steps = work
    mine = 0
    for turn in range(gl.program_id(0), total, gl.num_programs(0)):
        product, rest = turn // (matrices * count), turn % (matrices * count)
        matrix, at = rest // count, order + rest % count * 2
        i, j = gl.load(at), gl.load(at + 1)
        a, b = gl.load(places + product * 8), gl.load(places + product * 8 + 1)
        if product > 0:
            _wait_for(work, product - 1, matrix, i, j)
        _tell(waits, mine, matrix * 8 + product, i * 65536 + j, a * matrices + matrix, b * matrices + matrix,
              mine * steps)
        mine += 1
    _tell(waits, mine, -1, 0, 0, 0, 0)
    _tell(waits, mine + 1, -1, 0, 0, 0, 0)


@gluon_jit
def _tell(waits, mine, what, where, a, b, number):
    """Tell the warp that fetches and the group whose turn it is of the program's tile number `mine`: its product and
    matrix, or -1; its place; its operands; the stage where they begin.
    """
    queue, told, taken = waits
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = mine % 2
    mbarrier.wait(taken.index(slot), (mine // 2 + 1) & 1)
    queue.index(slot * 8).store(gl.full([1], what, gl.int32, layout))
    queue.index(slot * 8 + 1).store(gl.full([1], where, gl.int32, layout))
    queue.index(slot * 8 + 2).store(gl.full([1], a, gl.int32, layout))
    queue.index(slot * 8 + 3).store(gl.full([1], b, gl.int32, layout))
    queue.index(slot * 8 + 4).store(gl.full([1], number, gl.int32, layout))
    barrier()
    mbarrier.arrive(told.index(slot))


@gluon_jit
def _hear(waits, mine, WARPS: gl.constexpr):
    """Return what is told of the program's tile number `mine`."""
    queue, told, taken = waits
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    slot = mine % 2
    mbarrier.wait(told.index(slot), mine // 2 & 1)
    what = gl.sum(queue.index(slot * 8).load(layout), 0)
    where = gl.sum(queue.index(slot * 8 + 1).load(layout), 0)
    a = gl.sum(queue.index(slot * 8 + 2).load(layout), 0)
    b = gl.sum(queue.index(slot * 8 + 3).load(layout), 0)
    number = gl.sum(queue.index(slot * 8 + 4).load(layout), 0)
    barrier()
    mbarrier.arrive(taken.index(slot))
    return what, where, a, b, number


@gluon_jit
def _fetch(boxes, ring, waits, counts, turns, steps, STAGES: gl.constexpr):
    """Fetch the operands of tiles. Programs begin each of the `turns` that all of them have together: what neighbours
    read at the same time comes from the cache once, and they would drift apart (docs/log.md).
    """
    mine = 0
    what, where, a, b, number = _hear(waits, mine, 1)
    while what >= 0:
        early = gl.maximum(steps - 12, 0)  # what is left takes longer than to hear that all have come
        _fill(boxes, ring, a, b, where, number, 0, early, STAGES)
        if mine < turns:
            _come(counts)
        _fill(boxes, ring, a, b, where, number, early, steps, STAGES)
        if mine < turns:
            _meet(counts, (mine + 1) * gl.num_programs(0))
        mine += 1
        what, where, a, b, number = _hear(waits, mine, 1)


@gluon_jit
def _fill(boxes, ring, a, b, where, number, first, last, STAGES: gl.constexpr):
    """Fetch steps of a tile into the ring, whose operands begin at stage `number`."""
    BLOCK: gl.constexpr = boxes.block_type.shape[1]
    BLOCK_K: gl.constexpr = boxes.block_type.shape[2]
    left, right, full, empty = ring
    i, j = where // 65536, where % 65536
    for k in range(number + first, number + last):
        stage, at = k % STAGES, (k - number) * BLOCK_K
        arrived = full.index(stage)
        mbarrier.wait(empty.index(stage), (k // STAGES + 1) & 1)
        mbarrier.expect(arrived, 4 * BLOCK * BLOCK_K)
        load_box(boxes, [a, i * BLOCK, at], arrived, boxes_of(left.index(stage), boxes).index(0))
        load_box(boxes, [b, j * BLOCK, at], arrived, boxes_of(right.index(stage), boxes).index(0))


@gluon_jit
def _consume(squares, ring, work, factors, waits, room, WHO: gl.constexpr, BLOCK: gl.constexpr, BLOCK_K: gl.constexpr,
             STAGES: gl.constexpr):
    """Compute and store every second tile of this program. The first addend arrives meanwhile, where the result will
    stand. The other group starts when this one has its last operands (pingpong.py).
    """
    _, places, _, matrices, _, _, steps = work
    tiles, added, may_multiply = room
    own, arrived, mine, asked = tiles.index(WHO), added.index(WHO), 0, 0
    what, where, _, _, number = _hear(waits, 2 * mine + WHO, 4)
    while what >= 0:
        product, matrix, i, j = what % 8, what // 8, where // 65536, where % 65536
        at = places + product * 8
        ask(squares, own, arrived, gl.load(at + 3) * matrices + matrix, i * BLOCK, j * BLOCK, BLOCK)
        mbarrier.wait(may_multiply.index(WHO), (mine + 1 + WHO) & 1)
        sums = multiply_ring(ring, number, steps, may_multiply.index(1 - WHO), 0, 1, False, BLOCK, BLOCK, BLOCK_K,
                             STAGES)
        asked = _finish(sums, squares, own, arrived, at, factors + product * 8, matrices, matrix, i * BLOCK, j * BLOCK,
                        asked)
        _count(work, product, matrix, i, j)
        mine += 1
        what, where, _, _, number = _hear(waits, 2 * mine + WHO, 4)


@gluon_jit
def _finish(sums, squares, own, arrived, at, factors, matrices, matrix, row, column, asked):
    """Scale, add, round and store a tile. Return how many addends have been asked for by now; one has for this tile."""
    f = gl.load(factors), gl.load(factors + 1), gl.load(factors + 2), gl.load(factors + 3), gl.load(factors + 4)
    addends, second, third = gl.load(at + 6), gl.load(at + 4), gl.load(at + 5)
    out = gl.load(at + 2) * matrices + matrix
    sums = add_first(sums, own, arrived, asked, f)
    if addends > 1:
        sums = add_next(sums, squares, 1, addends, own, arrived, asked, f, second * matrices + matrix, row, column)
        sums = add_next(sums, squares, 2, addends, own, arrived, asked, f, third * matrices + matrix, row, column)
    store_strip(sums, squares, own, own, f, out, row, column, 1, 2, True, True)
    return asked + addends


@gluon_jit
def _rows_of(work, product, matrix, i, j):
    """Return where the finished tiles of the rows are counted that tile (i, j) is of: its own, and the one that it
    mirrors.
    """
    _, _, done, matrices, _, down, _ = work
    at = done + (product * matrices + matrix) * down
    return at + i, at + j


@gluon_jit
def _wait_for(work, product, matrix, i, j):
    """Wait until these rows are finished, of as many tiles as there are rows, and may be read by TMA. Then all of the
    product before is finished, too: a tile of each row waited for each of its rows.
    """
    one, other = _rows_of(work, product, matrix, i, j)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t, u; again: ld.relaxed.gpu.global.b32 t, [$1]; ld.relaxed.gpu.global.b32 u, [$2]; "
        "min.s32 t, t, u; setp.lt.s32 p, t, $3; @p bra again; fence.acq_rel.gpu; fence.proxy.async; mov.b32 $0, t; }",
        "=r,l,l,r", [one.to(gl.int64), other.to(gl.int64), 4 * work[5]], gl.int32, False, 1)


@gluon_jit
def _count(work, product, matrix, i, j):
    """Count tile (i, j), each of four warps, once its stores are in memory. A warp's elected thread counts: by threads'
    numbers, the assembler would take it that threads part, and make a loop of each TMA instruction.
    """
    one, other = _rows_of(work, product, matrix, i, j)
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

"""What the two processors of cluster_sm90.py do with X, which arrives in boxes as high as it is: X X^T before the
products, and V X after them.

Decides: in which memory the boxes lie: where the squares are not, or not any more. Must not know: what V is. Needs
Gluon.
"""
from __future__ import annotations

from .hands import came, here, meet, packed, turn
from .ring import boxes_of, gluon_jit, matrices_of, rounded
from .squares import no_sums, step
from .strip import ask

gl = mbarrier = tma = fence = barrier = multiply = multiplied = load_box = store_box = None  # Gluon, put here
gdc_wait = None


@gluon_jit
def make_stages():
    """Return (full, empty, arrived): barriers of the ring for X X^T, and of the boxes that are multiplied by V."""
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    arrived = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(4):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=2)
        mbarrier.init(arrived.index(k), count=1)
    return full, empty, arrived


@gluon_jit
def square_of_gram(x, steps, scales, ring, squares, matrix, SEGMENT: gl.constexpr, EARLY: gl.constexpr,
                   RANK: gl.constexpr, SIDE: gl.constexpr):
    """Return the halves of a square of scale^2 X X^T, and the scale. The memory of all squares is a ring, which this
    group fills.
    """
    full, empty, arrived = ring
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_K: gl.constexpr = x.block_type.shape[2]
    AHEAD: gl.constexpr = STAGES - 1
    HALF: gl.constexpr = SIDE // 2
    boxes, first = boxes_of(squares, x), SEGMENT * steps
    stages = matrices_of(boxes, 2 * SIDE, BLOCK_K)
    for early in gl.static_range(AHEAD):
        if early < steps:
            at = (first + early) % STAGES
            ask(x, boxes.index(at), full.index(at), matrix, 0, early * BLOCK_K, BLOCK_K)
    upper, lower = no_sums(0, SIDE, HALF)
    if steps > 0:
        for k in range(first, first + steps):
            upper, lower = step(stages, full, empty, upper, lower, k, first, 2 * RANK, SIDE, HALF)
            ahead = k + AHEAD
            later, more = ahead % STAGES, ahead < first + steps
            mbarrier.wait(empty.index(later), (ahead // STAGES + 1) & 1, pred=more)
            mbarrier.expect(full.index(later), 4 * SIDE * BLOCK_K, pred=more)
            load_box(x, [matrix, 0, (ahead - first) * BLOCK_K], full.index(later), boxes.index(later), pred=more)
        upper, lower = multiplied(0, deps=(upper, lower))
        mbarrier.arrive(empty.index((first + steps + AHEAD) % STAGES))
    scale = _scale(scales, steps, matrix, SEGMENT, EARLY)
    upper, lower = rounded(upper * (scale * scale), squares.dtype), rounded(lower * (scale * scale), squares.dtype)
    return packed(upper), packed(lower), scale


@gluon_jit
def strip_of_gram(x, steps, scales, ring, squares, matrix, SEGMENT: gl.constexpr, EARLY: gl.constexpr,
                  RANK: gl.constexpr, SIDE: gl.constexpr):
    """The same of a strip."""
    full, empty, arrived = ring
    STAGES: gl.constexpr = full.shape[0]
    HALF: gl.constexpr = SIDE // 2
    first = SEGMENT * steps
    stages = matrices_of(boxes_of(squares, x), 2 * SIDE, x.block_type.shape[2])
    upper, strip = no_sums(1, SIDE, HALF)
    if steps > 0:
        for k in range(first, first + steps):
            stage = k % STAGES
            mbarrier.wait(full.index(stage), (k // STAGES) & 1)
            strip = multiply(stages.index(stage).slice(SIDE + RANK * HALF, HALF),
                             stages.index(stage).slice(0, SIDE).permute([1, 0]), strip, is_async=True)
            strip = multiplied(1, deps=(strip,))
            mbarrier.arrive(empty.index((k + STAGES - 1) % STAGES), pred=k > first)
        strip = multiplied(0, deps=(strip,))
        mbarrier.arrive(empty.index((first + steps + STAGES - 1) % STAGES))
    scale = _scale(scales, steps, matrix, SEGMENT, EARLY)
    return packed(rounded(strip * (scale * scale), squares.dtype)), scale


@gluon_jit
def _scale(scales, steps, matrix, SEGMENT: gl.constexpr, EARLY: gl.constexpr):
    """By what X is yet to be multiplied, first of all; a negative number where nothing is to be written."""
    if EARLY:
        gdc_wait()
    scale = gl.where(steps > 0, 1.0, -1.0)
    if SEGMENT == 0:
        if steps > 0:
            scale = gl.load(scales + matrix)
    return scale


@gluon_jit
def go_on(x, steps, onward, ring, hands, squares, segment, phase, matrix, WHO: gl.constexpr, RANK: gl.constexpr,
          SIDE: gl.constexpr):
    """Multiply X by the result, where there is a way: into `middle`, and that into y, or X into y."""
    middle, y, ends, powers = onward
    end, power = gl.load(ends + matrix), gl.load(powers + matrix)
    if middle is None:
        if y is not None:
            _multiply_by_v(x, y, end, power, steps, phase, ring, hands, squares, matrix, 0, WHO, RANK, SIDE)
    elif segment == 0:
        _multiply_by_v(x, middle, end, power, steps, phase, ring, hands, squares, matrix, 0, WHO, RANK, SIDE)
        _wait_for_stores()
        meet()
    else:
        _multiply_by_v(middle, y, 1.0, 1.0, steps, phase, ring, hands, squares, matrix, 1, WHO, RANK, SIDE)


@gluon_jit
def _multiply_by_v(x, y, end, power, steps, phase, ring, hands, squares, matrix, SEGMENT: gl.constexpr,
                   WHO: gl.constexpr, RANK: gl.constexpr, SIDE: gl.constexpr):
    """Y = end V X, X times its power, and cast, if it is in another dtype than V: this group's boxes of X, one of four,
    whose place those of Y take. Groups take turns: one multiplies, while the other one does the rest.
    """
    full, empty, arrived = ring
    BLOCK_K: gl.constexpr = x.block_type.shape[2]
    shape: gl.constexpr = [16, BLOCK_K, 16]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=shape)
    boxes, results, flat = boxes_of(squares, x), boxes_of(squares, y), matrices_of(squares, SIDE, SIDE)
    parts, outs = matrices_of(squares, SIDE, BLOCK_K), matrices_of(results, SIDE, BLOCK_K)
    count, turns = (steps + 3 - RANK - 2 * WHO) // 4, (steps + 3 - RANK) // 4
    first = SEGMENT * count
    for k in gl.static_range(2):
        if k < count:
            ask(x, boxes.index(_place(first + k, WHO)), arrived.index(2 * WHO + (first + k) % 2), matrix, 0,
                (RANK + 2 * WHO + 4 * k) * BLOCK_K, BLOCK_K)
    mbarrier.wait(here(hands, 1 - WHO), phase & 1)
    mbarrier.wait(came(hands, 0), phase & 1)
    mbarrier.wait(came(hands, 1), phase & 1)
    for number in range(first, first + count):
        place, box = _place(number, WHO), RANK + 2 * WHO + 4 * (number - first)
        mbarrier.wait(arrived.index(2 * WHO + number % 2), (number // 2) & 1)
        if x.dtype != squares.dtype:
            _cast(squares, boxes, place, power, layout, SIDE // 2, BLOCK_K)
        mbarrier.wait(turn(hands, WHO), (SEGMENT * turns + number - first + 1 - WHO) & 1)
        above, below = parts.index(2 * place), parts.index(2 * place + 1)
        upper, lower = gl.zeros((SIDE, BLOCK_K), gl.float32, layout), gl.zeros((SIDE, BLOCK_K), gl.float32, layout)
        V = gl.inline_asm_elementwise("mov.b32 $0, 3;", "=r,r", [number], gl.int32, False, 1)  # no addresses are kept
        upper = multiply(flat.index(V), above, upper, use_acc=False, is_async=True)
        upper = multiply(flat.index(V + 1).permute([1, 0]), below, upper, is_async=True)
        lower = multiply(flat.index(V + 1), above, lower, use_acc=False, is_async=True)
        lower = multiply(flat.index(V + 2), below, lower, is_async=True)
        mbarrier.arrive(turn(hands, 1 - WHO))
        tma.store_wait(0)
        more, later = (number > first) & (box + 4 < steps), arrived.index(2 * WHO + (number + 1) % 2)
        mbarrier.expect(later, 4 * SIDE * BLOCK_K, pred=more)
        load_box(x, [matrix, 0, (box + 4) * BLOCK_K], later, boxes.index(_place(number + 1, WHO)), pred=more)
        upper = rounded(multiplied(2, deps=(upper,)) * end, y.dtype)
        lower = rounded(multiplied(0, deps=(lower,)) * end, y.dtype)
        barrier()
        outs.index(2 * place).store(upper)
        outs.index(2 * place + 1).store(lower)
        fence()
        barrier()
        store_box(y, [matrix, 0, box * BLOCK_K], results.index(place))
    if WHO == 1:
        mbarrier.arrive(turn(hands, 0), pred=count < turns)  # a turn for each of the other group's


@gluon_jit
def _place(number, WHO: gl.constexpr):
    """Where a group's box lies while it is multiplied by V: in U, or in the seventh square."""
    return gl.where(number % 2 == 0, WHO, 2 if WHO == 0 else 6)


@gluon_jit
def _cast(squares, boxes, place, power, layout: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Multiply a box by a power and cast it, where it is."""
    given, cast = matrices_of(boxes, ROWS, COLUMNS), matrices_of(squares, ROWS, COLUMNS)
    for part in range(4 * place, 4 * place + 4):
        cast.index(part).store(rounded(given.index(part).load(layout).to(gl.float32) * power, squares.dtype))
    fence()
    barrier()


@gluon_jit
def _wait_for_stores():
    """Wait until what this thread stored by TMA is in memory, for others to read by TMA."""
    lanes = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, $1;", "=r,r", [lanes], gl.int32, False, 1)

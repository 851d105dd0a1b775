"""The kernel of gram_chain.py: X X^T and a list of products of symmetric matrices, one matrix per
program.

Three warpgroups compute a square of 128 x 128 each, on and below the diagonal. Needs Gluon.
"""
from __future__ import annotations

from ..launch.jit import gluon_jit
from ..matmul.sm90_pipeline import add_diagonal, ask, boxes_of, matrices_of, rounded

# Gluon's names, put here by gluon_jit
gl = mbarrier = tma = fence = barrier = multiply = multiplied = load_box = None
store_box = gdc_wait = gdc_launch_dependents = None


@gluon_jit.unspecialized("steps", "products", "keep")
def resident_kernel(x, a, z, one_box, other_box, one_half, other_half, one, other, apart, scales,
                    steps, codes, factors, products, keep, EARLY: gl.constexpr):
    """One matrix per program. x: by boxes as high as it is, `steps` of them, of which a = scale^2 X
    X^T is made, if there are any; else, and where the scale is negative, a is read; z: what is lent
    and the result, both by squares; one, other: room for what is kept, by squares, by their upper
    and lower halves, and itself, `apart` elements from one matrix to the next. codes, each with
    five factors, say what the `products` are (gram_chain.py, `_code`); keep: whether a is kept as
    the one. EARLY: x was there before the launch before this one began.
    """
    SIDE: gl.constexpr = a.block_type.shape[1]
    STAGES: gl.constexpr = 4  # six would fit, and gain nothing
    squares = gl.allocate_shared_memory(a.dtype, [6, 1, SIDE, SIDE], a.layout)  # U's three, and V's
    staging = gl.allocate_shared_memory(a.dtype, [2, 1, SIDE // 2, SIDE], a.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    lent = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    staged = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    written = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=3)
    mbarrier.init(done.index(0), count=3)
    for who in gl.static_range(3):
        mbarrier.init(loaded.index(who), count=1)
        mbarrier.init(lent.index(who), count=1)
        mbarrier.init(written.index(who), count=1)
        mbarrier.init(read.index(who), count=1)
    mbarrier.init(staged.index(0), count=1)
    mbarrier.init(staged.index(1), count=1)
    fence()
    if not EARLY:
        gdc_wait()
    matrix = gl.program_id(0)
    offset = matrix.to(gl.int64) * apart
    kept = one + offset, other + offset, one_half, other_half
    long = x, scales, steps, full, empty, done
    work = long, a, z, one_box, other_box, kept, codes, factors, products, keep, matrix
    room = squares, staging, loaded, lent, staged, written, read
    gl.warp_specialize([
        (_products, (work, room, EARLY, 0, SIDE)),
        (_products, (work, room, EARLY, 1, SIDE)),
        (_products, (work, room, EARLY, 2, SIDE)),
    ], [4, 4], [184, 160])


@gluon_jit
def _products(work, room, EARLY: gl.constexpr, WHO: gl.constexpr, SIDE: gl.constexpr):
    """Compute a square of each product: the upper one on the diagonal, the one below it, or the
    lower one (WHO).

    written: a group's square of the product before; read: what its multiplication reads. Groups
    wait for the squares that they read, and, before they write, for those who read what was there.
    The lower one multiplies last, for the next product begins without it.
    """
    long, a, z, one_box, other_box, kept, codes, factors, products, keep, matrix = work
    squares, staging, loaded, lent, staged, written, read = room
    ROW: gl.constexpr = SIDE if WHO > 0 else 0
    COLUMN: gl.constexpr = SIDE if WHO > 1 else 0
    HALF: gl.constexpr = SIDE // 2
    flat, boxes = matrices_of(squares, SIDE, SIDE), boxes_of(squares, a)
    scale = gram(long, squares, flat, matrix, EARLY, WHO, SIDE, HALF)
    if scale < 0:
        ask(a, boxes.index(WHO), loaded.index(WHO), matrix, ROW, COLUMN, SIDE)
        mbarrier.wait(loaded.index(WHO), 0)
    mbarrier.arrive(written.index(WHO))
    if keep != 0:
        store_box(one_box, [matrix, WHO * SIDE, 0], boxes.index(WHO))
    for number in range(products):
        code, f = product_of(codes, factors, number)
        to, then = result_of(code)
        # Not before: the next kernel's programs would wait where another stream's could run
        if then == 4:
            gdc_launch_dependents()
        _stage(code, kept, staging, staged, matrix, 0, WHO, SIDE)
        _wait_for_others(written, number, WHO)
        if WHO == 2:
            _wait_for_others(read, number, WHO)
        upper, lower = _multiply(flat, code, WHO, SIDE, HALF)
        upper = _finish(multiplied(2, deps=(upper,)), code, f, flat, kept, staging, staged, 0, WHO)
        lower = multiplied(0, deps=(lower,))
        barrier()
        mbarrier.arrive(read.index(WHO))
        _stage(code, kept, staging, staged, matrix, HALF, WHO, SIDE)
        lower = _finish(lower, code, f, flat, kept, staging, staged, HALF, WHO)
        if WHO != 2:
            _wait_for_others(read, number, WHO)
        if settles(code):
            _wait_for_stores()
        else:
            tma.store_wait(0)
        barrier()
        write(upper, lower, flat.index(to + WHO), mirrors(code), WHO, HALF)
        if borrows(code):
            ask(z, boxes.index(WHO), lent.index(WHO), matrix, ROW, COLUMN, SIDE)
            mbarrier.wait(lent.index(WHO), 0)
        mbarrier.arrive(written.index(WHO))
        if then == 1:
            store_box(one_box, [matrix, WHO * SIDE, 0], boxes.index(to + WHO))
        elif then == 2:
            store_box(other_box, [matrix, WHO * SIDE, 0], boxes.index(to + WHO))
        elif then > 2:
            store_box(z, [matrix, ROW, COLUMN], boxes.index(to + WHO))
        if WHO == 1:
            _store_turned(upper, lower, z, flat.index(1), boxes.index(1), matrix, then, SIDE)
    tma.store_wait(0)


@gluon_jit
def _wait_for_others(barriers, number, WHO: gl.constexpr):
    """Wait for the groups that share operands with this one, in a product."""
    if WHO == 1:
        mbarrier.wait(barriers.index(0), number & 1)
        mbarrier.wait(barriers.index(2), number & 1)
    else:
        mbarrier.wait(barriers.index(1), number & 1)


@gluon_jit
def _multiply(flat, code, WHO: gl.constexpr, SIDE: gl.constexpr, HALF: gl.constexpr):
    """Begin to multiply: the upper and the lower half of a square."""
    left, right = operands_of(code)
    if WHO == 0:
        rows, more_rows = flat.index(left), flat.index(left + 1).permute([1, 0])
    else:
        rows, more_rows = flat.index(left + 1), flat.index(left + 2)
    if WHO == 2:
        columns, more_columns = flat.index(right + 1).permute([1, 0]), flat.index(right + 2)
    else:
        columns, more_columns = flat.index(right), flat.index(right + 1)
    upper, lower = no_sums(WHO, SIDE, HALF)
    WIDTH: gl.constexpr = upper.shape[1]
    upper = multiply(rows.slice(0, HALF), columns.slice(0, WIDTH, 1), upper, use_acc=False,
                     is_async=True)
    upper = multiply(more_rows.slice(0, HALF), more_columns.slice(0, WIDTH, 1), upper,
                     is_async=True)
    lower = multiply(rows.slice(HALF, HALF), columns, lower, use_acc=False, is_async=True)
    lower = multiply(more_rows.slice(HALF, HALF), more_columns, lower, is_async=True)
    return upper, lower


@gluon_jit
def _stage(code, kept, staging, staged, matrix, ROW: gl.constexpr, WHO: gl.constexpr,
           SIDE: gl.constexpr):
    """Let half a square, from ROW on, of what was kept arrive, where it is an addend; but not of
    the upper square, for which there is no room.
    """
    one, other, one_half, other_half = kept
    if WHO > 0:
        if ROW > 0:
            barrier()  # the upper half is read
        if (code >> 3 & 3) == 2:
            ask(one_half, staging.index(WHO - 1), staged.index(WHO - 1), matrix, WHO * SIDE + ROW,
                0, SIDE)
        if (code >> 5 & 3) == 2:
            ask(other_half, staging.index(WHO - 1), staged.index(WHO - 1), matrix, WHO * SIDE + ROW,
                0, SIDE)


@gluon_jit
def _finish(sums, code, f, flat, kept, staging, staged, ROW: gl.constexpr, WHO: gl.constexpr):
    """Scale sums, add and round: half a square, from ROW on. In a loop, for long code has to be
    waited for; added in each branch by itself, for of a tensor that comes from either of two the
    registers would be moved.
    """
    one, other, one_half, other_half = kept
    for k in range(addends_of(code)):
        place, alpha, beta = addend_of(code, f, k)
        if place == 2:
            memory = gl.where(k == 0, one, other)
            sums = gl.fma(sums, alpha, beta * _kept(memory, sums, staging, staged, ROW, WHO))
        else:
            sums = gl.fma(sums, alpha, beta * part_of(flat.index(place * 3 + WHO), sums, ROW))
    if WHO != 1:
        if has_diagonal(code):
            sums = add_diagonal(sums, f[1], ROW, 0)
    return rounded(sums, flat.dtype)


@gluon_jit
def _kept(memory, like, staging, staged, ROW: gl.constexpr, WHO: gl.constexpr):
    """The same of a square of 128 x 128 that was kept: staged, or read from memory. There, what
    differs between threads is added apart from what does not: else each address would take
    registers.
    """
    if WHO > 0:
        mbarrier.wait(staged.index(WHO - 1), ROW // like.shape[0])  # the halves take turns
        values = part_of(matrices_of(staging, like.shape[0], 2 * like.shape[0]).index(WHO - 1),
                         like, 0)
    else:
        r, s = places(like)
        own = r // 16 * 2048 + r % 8 * 128 + s % 8
        values = gl.load(memory + own + r // 8 % 2 * 1024 + s // 8 * 8 + ROW * 128).to(gl.float32)
    return values


@gluon_jit
def _store_turned(upper, lower, z, square, box, matrix, then, SIDE: gl.constexpr):
    """Store the mirror image of what is below the diagonal of the end, through U, of which all is
    read by then.
    """
    if then == 4:
        turned = square.permute([1, 0])
        turned.slice(0, SIDE // 2).store(upper)
        turned.slice(SIDE // 2, SIDE // 2).store(lower)
        fence()
        barrier()
        store_box(z, [matrix, 0, SIDE], box)


@gluon_jit
def _wait_for_stores():
    """Wait until what this thread stored by TMA is in memory, not only read, as by
    `tma.store_wait`. It also empties the processor's cache.
    """
    lanes = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [lanes],
                              gl.int32, False, 1)


@gluon_jit
def gram(long, squares, flat, matrix, EARLY: gl.constexpr, WHO: gl.constexpr, SIDE: gl.constexpr,
         HALF: gl.constexpr):
    """Write a square of scale^2 X X^T; return the scale: where that is negative, nothing is
    written. The memory of all squares is a ring until all are `done`, which the first group fills.
    """
    x, scales, steps, full, empty, done = long
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_K: gl.constexpr = x.block_type.shape[2]
    AHEAD: gl.constexpr = STAGES - 1
    boxes = boxes_of(squares, x)
    stages = matrices_of(boxes, 2 * SIDE, BLOCK_K)
    if WHO == 0:
        for k in gl.static_range(AHEAD):
            if k < steps:
                ask(x, boxes.index(k), full.index(k), matrix, 0, k * BLOCK_K, BLOCK_K)
    upper, lower = no_sums(WHO, SIDE, HALF)
    for k in range(steps):
        upper, lower = step(stages, full, empty, upper, lower, k, 0, WHO, SIDE, HALF)
        if WHO == 0:
            ahead = k + AHEAD
            stage, more = ahead % STAGES, ahead < steps
            mbarrier.wait(empty.index(stage), (ahead // STAGES + 1) & 1, pred=more)
            mbarrier.expect(full.index(stage), 4 * SIDE * BLOCK_K, pred=more)
            load_box(x, [matrix, 0, ahead * BLOCK_K], full.index(stage), boxes.index(stage),
                     pred=more)
    upper, lower = multiplied(0, deps=(upper, lower))
    if EARLY:
        gdc_wait()
    scale = -1.0
    mbarrier.arrive(done.index(0))
    if steps > 0:
        scale = gl.load(scales + matrix)
    mbarrier.wait(done.index(0), 0)
    if scale >= 0:
        factor = scale * scale
        write(rounded(upper * factor, flat.dtype), rounded(lower * factor, flat.dtype),
              flat.index(WHO), 0, WHO, HALF)
    return scale


@gluon_jit
def no_sums(WHO: gl.constexpr, SIDE: gl.constexpr, HALF: gl.constexpr):
    """Sums of the upper and the lower half of a square. Of those on the diagonal what is right of
    the upper half is mirrored afterwards.
    """
    WIDTH: gl.constexpr = SIDE if WHO == 1 else HALF
    narrow: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=[16, WIDTH, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                   instr_shape=[16, SIDE, 16])
    return gl.zeros((HALF, WIDTH), gl.float32, narrow), gl.zeros((HALF, SIDE), gl.float32, wide)


@gluon_jit
def step(stages, full, empty, upper, lower, k, first, WHO: gl.constexpr, SIDE: gl.constexpr,
         HALF: gl.constexpr):
    """Begin step k of those from `first` on; the one before it is done."""
    stage = k % full.shape[0]
    ROW: gl.constexpr = SIDE if WHO > 0 else 0
    COLUMN: gl.constexpr = SIDE if WHO > 1 else 0
    mbarrier.wait(full.index(stage), (k // full.shape[0]) & 1)
    rows, columns = stages.index(stage).slice(ROW, SIDE), stages.index(stage).slice(COLUMN, SIDE)
    upper = multiply(rows.slice(0, HALF), columns.slice(0, upper.shape[1]).permute([1, 0]), upper,
                     is_async=True)
    lower = multiply(rows.slice(HALF, HALF), columns.permute([1, 0]), lower, is_async=True)
    upper, lower = multiplied(2, deps=(upper, lower))
    mbarrier.arrive(empty.index((k + full.shape[0] - 1) % full.shape[0]), pred=k > first)
    return upper, lower


@gluon_jit
def write(upper, lower, own, mirror, WHO: gl.constexpr, HALF: gl.constexpr):
    """Write a square for all to read, whole."""
    corner = own.slice(0, HALF).slice(0, upper.shape[1], 1)
    corner.store(upper)
    own.slice(HALF, HALF).store(lower)
    if WHO != 1:
        below, last = gl.split(gl.permute(gl.reshape(lower, (HALF, 2, HALF)), (0, 2, 1)))
        own.slice(0, HALF).slice(HALF, HALF, 1).permute([1, 0]).store(below)
        if mirror != 0:
            other_corner = own.slice(HALF, HALF).slice(HALF, HALF, 1)
            barrier()
            upper, last = _mirrored(upper, corner), _mirrored(last, other_corner)
            barrier()
            corner.store(upper)
            other_corner.store(last)
    fence()
    barrier()


@gluon_jit
def _mirrored(values, square):
    """What is above the diagonal comes from below it."""
    r, s = places(values)
    return gl.where(r < s, square.permute([1, 0]).load(values.type.layout), values)


@gluon_jit
def places(like):
    """Return rows (.., 1) and columns (1, ..) of what lies like this tensor."""
    r = gl.arange(0, like.shape[0], layout=gl.SliceLayout(1, like.type.layout))[:, None]
    return r, gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, like.type.layout))[None, :]


@gluon_jit
def product_of(codes, factors, number):
    """Return a product's code and its five factors; read before there is anything to wait for."""
    code, at = gl.load(codes + number), factors + 5 * number
    return code, (gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4))


@gluon_jit
def operands_of(code):
    """Return the first squares of the factors: that of U, 0, or of V, 3."""
    return (code & 1) * 3, (code >> 1 & 1) * 3


@gluon_jit
def result_of(code):
    """Return the first square of where the result goes, and what becomes of it beside."""
    return (code >> 2 & 1) * 3, code >> 8 & 7


@gluon_jit
def mirrors(code):
    """Whether squares on the diagonal are made symmetric."""
    return code >> 11 & 1


@gluon_jit
def borrows(code):
    """Whether what was lent comes to U afterwards."""
    return (code >> 12 & 1) != 0


@gluon_jit
def has_diagonal(code):
    """Whether a multiple of I is added."""
    return (code >> 13 & 1) != 0


@gluon_jit
def settles(code):
    """Whether what was kept or lent before is in memory afterwards."""
    return (code >> 14 & 1) != 0


@gluon_jit
def addends_of(code):
    """How many there are."""
    return 1 + ((code >> 5 & 3) != 0) + (code >> 7 & 1)


@gluon_jit
def addend_of(code, f, k):
    """Return (where addend k lies: in U, 0, in V, 1, or in what was kept, 2; by what the sums are
    multiplied; by what the addend is).
    """
    place = gl.where(k == 0, code >> 3 & 3, gl.where(k == 1, code >> 5 & 3, 0))
    return place, gl.where(k == 0, f[0], 1.0), gl.where(k == 0, f[2], gl.where(k == 1, f[3], f[4]))


@gluon_jit
def part_of(square, like, ROW: gl.constexpr):
    """As much of an addend's square as there are sums, from row ROW on."""
    return square.slice(ROW, like.shape[0]).slice(0, like.shape[1],
                                                  1).load(like.type.layout).to(gl.float32)

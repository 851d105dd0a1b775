"""The kernel of resident.py for few matrices: the same products with the same bits, a matrix on two processors of a
cluster; and what X is multiplied by before and after them.

Decides: who computes what. Of the squares of 128 x 128 on and below the diagonal each processor has one on it, and a
strip, half the rows of the one below; a group of four warps computes the one, another one the other. Must not know:
which products there are, nor why. Needs Gluon.
"""
from __future__ import annotations

from .cluster_x import go_on, make_stages, square_of_gram, strip_of_gram
from .hands import (
    came,
    expect_copies,
    here,
    loaded,
    make_hands,
    meet,
    packed,
    say_read,
    send_square,
    send_strip,
    unpacked,
    wait_to_write,
)
from .program import (
    addend_of,
    addends_of,
    borrows,
    has_diagonal,
    mirrors,
    operands_of,
    part_of,
    product_of,
    result_of,
    settles,
)
from .ring import boxes_of, gluon_jit, matrices_of, rounded
from .squares import no_sums, write
from .strip import add_diagonal

gl = mbarrier = tma = fence = barrier = multiply = multiplied = load_box = store_box = None  # Gluon, put here
gdc_wait = gdc_launch_dependents = None


@gluon_jit.alike("steps", "products", "more")
def cluster_kernel(x, a, z, z_strip, z_turned, middle, y, scales, ends, powers, steps, codes, factors, products, more,
                   EARLY: gl.constexpr):
    """One matrix for two programs. x: by boxes as high as it is, `steps` of them, of which a = scale^2 X X^T is made,
    if there are any; else, and where the scale is negative, a is read; z, by squares, and what is below the diagonal
    by halves of these and their mirror images: the result. codes, each with five factors, say what the `products` are
    (resident.py, `_code`). EARLY: x was there before the launch before this one began.

    y, by boxes like x, or None: in place of the result, y = end result X is written, X times its power, and cast, if it
    is in another dtype. middle, the same, or None: that is written there; then all of it again, with `more` products,
    X <- middle and no factors.
    """
    SIDE: gl.constexpr = a.block_type.shape[1]
    squares = gl.allocate_shared_memory(a.dtype, [7, 1, SIDE, SIDE], a.layout)  # U's three, V's, and one
    hands, ring = make_hands(), make_stages()
    fence()
    if not EARLY:
        gdc_wait()
    whole, onward, counts = (z, z_strip, z_turned), (middle, y, ends, powers), (products, more)
    work = x, steps, scales, a, whole, onward, codes, factors, counts, gl.program_id(0) // 2
    gl.warp_specialize([
        (_either, (work, (squares, hands, ring), EARLY, 0, SIDE)),
        (_either, (work, (squares, hands, ring), EARLY, 1, SIDE)),
    ], [4], [240])


@gluon_jit
def _either(work, room, EARLY: gl.constexpr, WHO: gl.constexpr, SIDE: gl.constexpr):
    """Compute what the group with the squares (WHO 0), or the strips (1), does on either processor."""
    meet()
    if gl.program_id(0) % 2 == 0:
        _compute(work, room, EARLY, WHO, 0, SIDE)
    else:
        _compute(work, room, EARLY, WHO, 1, SIDE)
    meet()


@gluon_jit
def _compute(work, room, EARLY: gl.constexpr, WHO: gl.constexpr, RANK: gl.constexpr, SIDE: gl.constexpr):
    if WHO == 0:
        _squares(work, room, EARLY, RANK, SIDE)
    else:
        _strips(work, room, EARLY, RANK, SIDE)


@gluon_jit
def _squares(work, room, EARLY: gl.constexpr, RANK: gl.constexpr, SIDE: gl.constexpr):
    """Compute a processor's square of each product, of which what is right of the upper half is mirrored."""
    x, steps, scales, a, whole, onward, codes, factors, counts, matrix = work
    squares, hands, ring = room
    middle, y, ends, powers = onward
    HALF: gl.constexpr = SIDE // 2
    OWN: gl.constexpr = 2 * RANK
    SEGMENTS: gl.constexpr = 1 if middle is None else 2
    flat, boxes = matrices_of(squares, SIDE, SIDE), boxes_of(squares, a)
    lent = flat.index(6)
    upper, lower = no_sums(0, SIDE, HALF)
    kept, kept_lower = packed(rounded(upper, flat.dtype)), packed(rounded(lower, flat.dtype))
    for segment in range(SEGMENTS):
        first, scale = segment * (counts[0] + 1), 1.0 * segment
        end = first + gl.where(segment == 0, counts[0], counts[1])
        if segment == 0:
            kept, kept_lower, scale = square_of_gram(
                x, steps, scales, ring, squares, matrix, 0, EARLY, RANK, SIDE)
        elif middle is not None:
            kept, kept_lower, scale = square_of_gram(
                middle, steps, scales, ring, squares, matrix, 1, False, RANK, SIDE)
        say_read(hands, 0, RANK, SIDE)
        wait_to_write(hands, first, 0)
        if scale < 0:
            _load(a, boxes, hands, matrix, SIDE)
        else:  # also where it is NaN
            write(unpacked(kept, upper), unpacked(kept_lower, lower), flat.index(OWN), 0, 0, HALF)
            send_square(0, RANK, False, SIDE)
        mbarrier.arrive(here(hands, 0))
        for number in range(first, end):
            code, f = product_of(codes, factors, number - segment)
            to, then = result_of(code)
            if (then == 4) & (segment == SEGMENTS - 1):  # not before: others could run where programs would wait
                gdc_launch_dependents()
            sums, more_sums = _multiply(flat, hands, code, number, RANK, SIDE)
            result = _finish(multiplied(2, deps=(sums,)), code, f, kept, flat, OWN, 0, True)
            more_sums = multiplied(0, deps=(more_sums,))
            say_read(hands, 0, RANK, SIDE)
            result_lower = _finish(more_sums, code, f, kept_lower, flat, OWN, HALF, True)
            if settles(code):
                kept = packed(flat.index(OWN).slice(0, HALF).slice(0, HALF, 1).load(upper.type.layout))
                kept_lower = packed(flat.index(OWN).slice(HALF, HALF).load(lower.type.layout))
            wait_to_write(hands, number + 1, 0)
            write(result, result_lower, flat.index(to + OWN), mirrors(code), 0, HALF)
            if then == 3:
                lent.slice(0, HALF).slice(0, HALF, 1).store(result)
                lent.slice(HALF, HALF).store(result_lower)
            if borrows(code):
                result = lent.slice(0, HALF).slice(0, HALF, 1).load(upper.type.layout)
                write(result, lent.slice(HALF, HALF).load(lower.type.layout), flat.index(OWN), 0, 0, HALF)
                send_square(0, RANK, False, SIDE)
            mbarrier.arrive(here(hands, 0))
            if then != 4:
                send_square(to, RANK, False, SIDE)
            elif y is None:
                store_box(whole[0], [matrix, RANK * SIDE, RANK * SIDE], boxes.index(3 + OWN))
            else:
                send_square(to, RANK, True, SIDE)
        go_on(x, steps, onward, ring, hands, squares, segment, end, matrix, 0, RANK, SIDE)
    tma.store_wait(0)


@gluon_jit
def _strips(work, room, EARLY: gl.constexpr, RANK: gl.constexpr, SIDE: gl.constexpr):
    """Compute a processor's strip of each product."""
    x, steps, scales, a, whole, onward, codes, factors, counts, matrix = work
    squares, hands, ring = room
    middle, y, ends, powers = onward
    HALF: gl.constexpr = SIDE // 2
    ROW: gl.constexpr = RANK * HALF
    SEGMENTS: gl.constexpr = 1 if middle is None else 2
    flat = matrices_of(squares, SIDE, SIDE)
    none, strip = no_sums(1, SIDE, HALF)
    kept = packed(rounded(strip, flat.dtype))
    for segment in range(SEGMENTS):
        first, scale = segment * (counts[0] + 1), 1.0 * segment
        end = first + gl.where(segment == 0, counts[0], counts[1])
        if segment == 0:
            kept, scale = strip_of_gram(x, steps, scales, ring, squares, matrix, 0, EARLY, RANK, SIDE)
        elif middle is not None:
            kept, scale = strip_of_gram(middle, steps, scales, ring, squares, matrix, 1, False, RANK, SIDE)
        lent = kept
        say_read(hands, 1, RANK, SIDE)
        wait_to_write(hands, first, 1)
        if scale < 0:
            mbarrier.wait(loaded(hands), 0)
            mbarrier.arrive(came(hands, 0))
            mbarrier.arrive(came(hands, 1))
        else:
            expect_copies(hands, (1 + RANK) * SIDE * SIDE, SIDE * SIDE)
            _write_strip(unpacked(kept, strip), flat, 0, ROW)
            send_strip(0, RANK, SIDE)
        mbarrier.arrive(here(hands, 1))
        for number in range(first, end):
            code, f = product_of(codes, factors, number - segment)
            to, then = result_of(code)
            left, right = operands_of(code)
            mbarrier.wait(here(hands, 0), number & 1)
            mbarrier.wait(came(hands, 1), number & 1)
            mbarrier.wait(came(hands, 0), number & 1)
            none, sums = no_sums(1, SIDE, HALF)
            sums = multiply(flat.index(left + 1).slice(ROW, HALF), flat.index(right), sums, use_acc=False,
                            is_async=True)
            sums = multiply(flat.index(left + 2).slice(ROW, HALF), flat.index(right + 1), sums, is_async=True)
            if borrows(code):
                expect_copies(hands, 2 * (1 + RANK) * SIDE * SIDE, 2 * SIDE * SIDE)
            elif then != 4:
                expect_copies(hands, (1 + RANK) * SIDE * SIDE, SIDE * SIDE)
            elif y is not None:
                expect_copies(hands, 2 * SIDE * SIDE, SIDE * SIDE)
            sums = multiplied(0, deps=(sums,))
            say_read(hands, 1, RANK, SIDE)
            result = _finish(sums, code, f, kept, flat, 1, ROW, False)
            if settles(code):
                kept = packed(flat.index(1).slice(ROW, HALF).load(strip.type.layout))
            wait_to_write(hands, number + 1, 1)
            _write_strip(result, flat, to, ROW)
            if then == 3:
                lent = packed(result)
            if borrows(code):
                _write_strip(unpacked(lent, strip), flat, 0, ROW)
                send_strip(0, RANK, SIDE)
            mbarrier.arrive(here(hands, 1))
            if then != 4:
                send_strip(to, RANK, SIDE)
            elif y is None:
                _store_strip(result, whole, squares, matrix, RANK, SIDE)
            else:
                send_strip(to, RANK, SIDE)
        go_on(x, steps, onward, ring, hands, squares, segment, end, matrix, 1, RANK, SIDE)
    tma.store_wait(0)


@gluon_jit
def _load(a, boxes, hands, matrix, SIDE: gl.constexpr):
    """Let a itself arrive, all that both groups read of it."""
    mbarrier.expect(loaded(hands), 6 * SIDE * SIDE)
    load_box(a, [matrix, 0, 0], loaded(hands), boxes.index(0))
    load_box(a, [matrix, SIDE, 0], loaded(hands), boxes.index(1))
    load_box(a, [matrix, SIDE, SIDE], loaded(hands), boxes.index(2))
    mbarrier.wait(loaded(hands), 0)


@gluon_jit
def _multiply(flat, hands, code, number, RANK: gl.constexpr, SIDE: gl.constexpr):
    """Begin to multiply: the upper half of a square, as far as the diagonal, and the lower one."""
    HALF: gl.constexpr = SIDE // 2
    left, right = operands_of(code)
    if RANK == 0:
        rows, more_rows = flat.index(left), flat.index(left + 1).permute([1, 0])
        columns, more_columns = flat.index(right), flat.index(right + 1)
    else:
        rows, more_rows = flat.index(left + 1), flat.index(left + 2)
        columns, more_columns = flat.index(right + 1).permute([1, 0]), flat.index(right + 2)
    mbarrier.wait(here(hands, 1), number & 1)
    mbarrier.wait(came(hands, 1), number & 1)
    upper, lower = no_sums(0, SIDE, HALF)
    upper = multiply(rows.slice(0, HALF), columns.slice(0, HALF, 1), upper, use_acc=False, is_async=True)
    upper = multiply(more_rows.slice(0, HALF), more_columns.slice(0, HALF, 1), upper, is_async=True)
    lower = multiply(rows.slice(HALF, HALF), columns, lower, use_acc=False, is_async=True)
    lower = multiply(more_rows.slice(HALF, HALF), more_columns, lower, is_async=True)
    return upper, lower


@gluon_jit
def _finish(sums, code, f, kept, flat, SQUARE: gl.constexpr, ROW: gl.constexpr, DIAGONAL: gl.constexpr):
    """Scale sums, add and round: of a square, from row ROW on. Added in each branch by itself, for of a tensor that
    comes from either of two the registers would be moved.
    """
    for k in range(addends_of(code)):
        place, alpha, beta = addend_of(code, f, k)
        if place == 2:
            sums = gl.fma(sums, alpha, beta * unpacked(kept, sums).to(gl.float32))
        else:
            sums = gl.fma(sums, alpha, beta * part_of(flat.index(place * 3 + SQUARE), sums, ROW))
    if DIAGONAL:
        if has_diagonal(code):
            sums = add_diagonal(sums, f[1], ROW, 0)
    return rounded(sums, flat.dtype)


@gluon_jit
def _write_strip(strip, flat, to, ROW: gl.constexpr):
    flat.index(to + 1).slice(ROW, strip.shape[0]).store(strip)
    fence()
    barrier()


@gluon_jit
def _store_strip(strip, whole, squares, matrix, RANK: gl.constexpr, SIDE: gl.constexpr):
    """Store a strip of the result and its mirror image, through U, which nobody reads any more."""
    HALF: gl.constexpr = SIDE // 2
    z, z_strip, z_turned = whole
    matrices_of(squares, HALF, SIDE).index(0).store(strip)
    matrices_of(squares, SIDE, HALF).index(1).permute([1, 0]).store(strip)
    fence()
    barrier()
    store_box(z_strip, [matrix, SIDE + RANK * HALF, 0], boxes_of(squares, z_strip).index(0))
    store_box(z_turned, [matrix, 0, SIDE + RANK * HALF], boxes_of(squares, z_turned).index(1))

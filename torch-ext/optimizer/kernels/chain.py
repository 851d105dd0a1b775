"""The whole iteration of a matrix with a short side of 65 to 128 and a long side of 129 to 512 on sm90: between its
first read and its last store nothing leaves the chip, not even X.

Decides: what lies in shared memory and what in registers, and which products wait for which. Nothing is made symmetric
on the way, for which products have an order: with P = Z + a I, X <- P X makes A <- P A P^T and Q <- P Q, whether or not
rounding left Z symmetric. Left factors never leave the registers. Needs Gluon. Must not know: what coefficients mean.
"""
from __future__ import annotations

import functools

import torch

from . import look, typed
from .chain_begin import begin, begin_raw
from .chain_pieces import cast, finish, restart, show
from .gram_sm90 import addressable
from .ring import description, gluon_jit, rounded
from .tape import knows_triton, lasting
from .tiles import architecture

gl = fence = barrier = multiply = multiplied = None  # Gluon's language, put here by gluon_jit
SIDE, LONGEST = 128, 512  # short side, and long side
MOST_STEPS = 10  # each is compiled for itself
WIDTH = 64  # columns of X that are multiplied at a time


def takes(n: int, m: int, steps: int) -> bool:
    """Say whether so many steps on matrices (n, m), n <= m, are taken here, where the kernel runs."""
    return SIDE // 2 < n <= SIDE < m <= LONGEST and steps <= MOST_STEPS


def fits(U: torch.Tensor, dtype: torch.dtype, steps: int) -> bool:
    """Say whether so many steps on matrices U (N, n, m), n <= m, in `dtype`, go through `polar`."""
    small = dtype.itemsize == 2 and takes(*U.shape[1:], steps)
    return small and architecture(U.device.type, U.device.index) == "sm90" and knows_triton()


def polar(U: torch.Tensor, out: torch.Tensor, segments, eps: float, dtype: torch.dtype) -> None:
    """Write to out the polar factor of every matrix of U (N, n, m); they may be the same memory. segments: the triples
    (a, b, c) between restarts.
    """
    (N, n, m), head, tail = U.shape, *_divided(segments)
    triples, firsts = _in_a_row(head)
    steps = len(triples) // 3
    lines, boxes = [_lines(t.element_size(), _is_turned(t)) for t in (U, out)], [_box(t) for t in (U, out)]
    _chain_kernel.launch(
        N, (dtype, steps, firsts, *look(U, out)), U, out, *boxes, U.stride(), out.stride(), triples,
        _in_memory(tail, U.device), len(tail), n, m, 2 * -(-m // (2 * WIDTH)), eps, U.dtype != torch.float16, steps,
        firsts, _is_turned(U), *lines, SIDE, WIDTH, LONGEST // WIDTH, typed(dtype), num_warps=8)


def _divided(segments) -> tuple:
    """(The first segments, all others, which are of two steps)."""
    count = len(segments)
    while count > 1 and len(segments[count - 1]) == 2:
        count -= 1
    return segments[:count], tuple(segments[count:])


def _in_a_row(segments) -> tuple:
    """(All coefficients, one after another; a number whose bit s says that step s begins a segment, or comes after the
    last).
    """
    firsts, steps = 0, 0
    for segment in segments:
        firsts |= 1 << steps
        steps += len(segment)
    return tuple(float(x) for segment in segments for triple in segment for x in triple), firsts | 1 << steps


@functools.lru_cache(maxsize=256)
def _in_memory(segments, device) -> torch.Tensor:
    """The coefficients of segments of two steps, one after another, on the device; there is one at least."""
    coefficients = _in_a_row(segments)[0] or (0.0,)
    return lasting(torch.tensor(coefficients, dtype=torch.float32, device="cpu"), device)


def _is_turned(t) -> bool:
    """Whether matrices lie transposed."""
    return t.stride(1) < t.stride(2)


def _box(t):
    """A descriptor of pieces of matrices in 16 bits as they lie, or None where TMA cannot address them."""
    turned = _is_turned(t)
    rows = t.mT if turned else t
    if t.element_size() != 2 or not addressable(rows):
        return None
    return description(rows, *((WIDTH, SIDE) if turned else (SIDE, WIDTH)))


@functools.cache
def _lines(itemsize: int, turned: bool, width: int = WIDTH):
    """How 256 threads read or write a piece of a matrix, 16 bytes each at a time."""
    from triton.experimental.gluon.language import BlockedLayout

    each = 16 // itemsize
    across = min(32, (SIDE if turned else width) // each)
    if turned:
        return BlockedLayout([each, 1], [across, 32 // across], [1, 8], [0, 1])
    return BlockedLayout([1, each], [32 // across, across], [8, 1], [1, 0])


@gluon_jit.alike("count", "pieces")
def _chain_kernel(U, out, u_box, out_box, u_strides, out_strides, triples, others, count, n, m, pieces, eps,
                  WIDE: gl.constexpr, STEPS: gl.constexpr, FIRSTS: gl.constexpr, TURNED: gl.constexpr,
                  FROM: gl.constexpr, TO: gl.constexpr, SIDE: gl.constexpr, WIDTH: gl.constexpr, MOST: gl.constexpr,
                  DTYPE: gl.constexpr):
    """One matrix per program: STEPS, and after them `count` segments of two steps, whose coefficients are in memory, as
    `others`. X has so many pieces, an even number, at MOST. FIRSTS: bit s says that step s begins a segment, or is one
    after the last; TURNED: a matrix lies transposed, and so it does in shared memory; FROM, TO: how it is read and
    written.
    """
    matrix = gl.program_id(0).to(gl.int64)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    RAW: gl.constexpr = U.dtype.element_ty if U.dtype.element_ty.primitive_bitwidth == 16 else None
    X = gl.allocate_shared_memory(DTYPE, [MOST, WIDTH, SIDE] if TURNED else [MOST, SIDE, WIDTH], swizzled)
    one = gl.allocate_shared_memory(DTYPE, [1, SIDE, SIDE], swizzled)  # of memory in one piece the compiler would not
    two = gl.allocate_shared_memory(DTYPE, [1, SIDE, SIDE], swizzled)  # know what is read where
    three = gl.allocate_shared_memory(DTYPE, [1, SIDE, SIDE], swizzled)
    u, scale, power, ready = (U + matrix * u_strides[0], u_strides[1], u_strides[2], n, m), 1.0, 1.0, pieces
    if RAW is not None:
        if count > 0 or FIRSTS % (1 << STEPS) > 1:
            ready = 2  # pieces that are cast at once; others are when X is multiplied
        A, zero, power, scale = begin_raw(u, u_box, X, pieces, eps, WIDE, TURNED, FROM)
    else:
        A, zero = begin(u, X, pieces, eps, TURNED, FROM)
    Q, room = A, (one.index(0), two.index(0), three.index(0))
    for step in gl.static_range(STEPS):
        if (FIRSTS >> step) % 2 == 1:
            show(A, room[0])
        square = _begin_product(A, room[0])
        if RAW is not None and step == 0:
            for piece in range(ready):
                cast(X, piece, power, RAW, TURNED, FROM)
            fence()
            barrier()
        # parameters as they are would be loaded again by each of their uses
        a, b, c = triples[3 * step] + zero, triples[3 * step + 1] + zero, triples[3 * step + 2] + zero
        q = triples[0 if step == 0 else 3 * step - 3] + zero
        A, Q = _step(A, Q, square, room, a, b, c, q, scale, (FIRSTS >> step) % 2 == 1, (FIRSTS << 1 >> step) % 2 == 1,
                     (FIRSTS >> (step + 1)) % 2 == 1)
        if (FIRSTS >> (step + 1)) % 2 == 1:
            scale = 1.0
            if step + 1 < STEPS:
                A = restart(Q, X, pieces, ready, power, RAW, TURNED, FROM)
                ready = pieces
    for segment in range(count):
        A = restart(Q, X, pieces, ready, power, RAW, TURNED, FROM)
        ready, at = pieces, segment >> 30  # 0, of which the compiler does not know, or it would keep all addresses
        Q = _two_steps(A, (one.index(at), None, three.index(at)), others + 6 * segment)
    out = out + matrix * out_strides[0], out_strides[1], out_strides[2], n, m
    finish(Q, X, pieces, out, out_box, TURNED, TO)


@gluon_jit
def _two_steps(A, room, triples):
    """Return what a segment of two steps makes of A, their coefficients in memory."""
    show(A, room[0])
    square = _begin_product(A, room[0])
    a, b, c = gl.load(triples), gl.load(triples + 1), gl.load(triples + 2)
    A, Q = _step(A, A, square, room, a, b, c, a, 1.0, True, False, False)
    square = _begin_product(A, room[0])
    last, b, c = gl.load(triples + 3), gl.load(triples + 4), gl.load(triples + 5)
    A, Q = _step(A, Q, square, room, last, b, c, a, 1.0, False, True, True)
    return Q


@gluon_jit
def _step(A, Q, square, room, a, b, c, q, scale, FIRST: gl.constexpr, SECOND: gl.constexpr, LAST: gl.constexpr):
    """With Z = b A + c A^2: A <- (Z + a I) A (Z + a I)^T, Q <- (Z + a I) Q; see iteration.py. After the first step of a
    segment Q + q I stands for Q, where q is that step's a. A lies in the first tile, too, Q in the last; the `square`
    of A is being computed. The last Q is multiplied by `scale`.
    """
    a_tile, q_tile = room[0], room[2]
    left: gl.constexpr = gl.DotOperandLayout(0, A.type.layout, 2)
    Z = rounded(c * multiplied(0, deps=(square,)) + b * wide(A), A.dtype)
    z = gl.convert_layout(Z, left)
    if LAST and FIRST:
        Q = rounded((wide(Z) + _diagonal(a, A)) * scale, A.dtype)
    elif LAST:
        sums = multiply(z, q_tile, _addends(Q, Z, q, a, SECOND), is_async=True)
        Q = rounded(multiplied(0, deps=(sums,)) * scale, A.dtype)
    else:
        sums = multiply(z, a_tile, a * wide(A), is_async=True)
        if not FIRST:
            follow = multiply(z, q_tile, _addends(Q, Z, q, a, SECOND), is_async=True)
        tile = q_tile if FIRST else room[1]
        tile.store(Z)
        T = rounded(multiplied(0 if FIRST else 1, deps=(sums,)), A.dtype)
        fence()
        barrier()
        sums = multiply(gl.convert_layout(T, left), tile.permute([1, 0]), a * wide(T), is_async=True)
        if FIRST:
            Q = Z
        else:
            Q = rounded(multiplied(1, deps=(follow,)), A.dtype)
            barrier()
            q_tile.store(Q)
        A = rounded(multiplied(0, deps=(sums,)), A.dtype)
        show(A, a_tile)
    return A, Q


@gluon_jit
def _addends(Q, Z, q, a, SECOND: gl.constexpr):
    """a Q, or what is added to Z Q for (Z + a I) (Q + q I)."""
    sums = a * wide(Q)
    if SECOND:
        sums += q * wide(Z) + _diagonal(q * a, Q)
    return sums


@gluon_jit
def wide(u):
    """The same numbers in fp32, of which the compiler keeps no copies for later."""
    EACH: gl.constexpr = 32 // u.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [u], u.dtype, False, EACH).to(gl.float32)


@gluon_jit
def _begin_product(left, tile):
    """Begin to multiply what lies in registers by what lies in shared memory."""
    layout: gl.constexpr = left.type.layout
    sums = gl.zeros(left.shape, gl.float32, layout)
    left = gl.convert_layout(left, gl.DotOperandLayout(0, layout, 2))
    return multiply(left, tile, sums, use_acc=False, is_async=True)


@gluon_jit
def _diagonal(value, like):
    """`value` on the diagonal, and zeros."""
    r = gl.arange(0, like.shape[0], layout=gl.SliceLayout(1, like.type.layout))[:, None]
    s = gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, like.type.layout))[None, :]
    return gl.where(r == s, value, 0.0)

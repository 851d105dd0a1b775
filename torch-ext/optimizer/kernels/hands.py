"""How two processors of a cluster work on one matrix: each copies what it computes into the other's shared memory, and
they tell each other when it may be written, and that it is there. For sm90.

Decides: how shared memory is addressed, here and there, for which Gluon has no words. Must not know: what is computed.
Needs Gluon, and that seven squares in 16 bits are the first thing in shared memory and the barriers the second: largest
first, as Triton arranges it (tests/test_tiles.py).
"""
from __future__ import annotations

from .ring import gluon_jit

gl = mbarrier = fence = barrier = None  # Gluon's language, put here by gluon_jit


@gluon_jit
def make_hands():
    """Return barriers; there are more than are used, so that nothing that is larger stands before them."""
    hands = gl.allocate_shared_memory(gl.int64, [64, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(10):
        mbarrier.init(hands.index(number), count=2 if number == 2 else 1)
    return hands


@gluon_jit
def came(hands, WHO: gl.constexpr):
    """The other processor's square (WHO 0), or strip (1), has come."""
    return hands.index(WHO)


@gluon_jit
def free(hands):
    """Both groups of the other processor no longer read what this one will overwrite there."""
    return hands.index(2)


@gluon_jit
def here(hands, WHO: gl.constexpr):
    """This processor's square, or strip, is written."""
    return hands.index(3 + WHO)


@gluon_jit
def read(hands, WHO: gl.constexpr):
    """The group with the square, or the strip, no longer reads what the other group of this processor will write."""
    return hands.index(5 + WHO)


@gluon_jit
def loaded(hands):
    """A matrix that is only read has come."""
    return hands.index(7)


@gluon_jit
def turn(hands, WHO: gl.constexpr):
    """The group may multiply; for those that take turns."""
    return hands.index(8 + WHO)


@gluon_jit
def meet():
    """Wait for all warps of both processors."""
    gl.inline_asm_elementwise(
        "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.release.aligned; "
        "barrier.cluster.wait.acquire.aligned; mov.u32 $0, $1;", "=r,r", [gl.program_id(0)], gl.int32, False, 1)


@gluon_jit
def say_read(hands, WHO: gl.constexpr, RANK: gl.constexpr, SIDE: gl.constexpr):
    """Tell the other group and the other processor that this group has read its operands. Relaxed: a release would wait
    for all that was stored before, and nothing was that they read.
    """
    barrier()
    mbarrier.arrive(read(hands, WHO))
    none = gl.program_id(0) * 0
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 b, t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0; "
        "mov.u32 b, global_smem; add.u32 b, b, $1; mapa.shared::cluster.u32 b, b, $2; "
        "@p mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [b]; mov.u32 $0, 0; }",
        "=r,r,r", [none + (14 * SIDE * SIDE + 8 * 2), none + (1 - RANK)], gl.int32, False, 1)


@gluon_jit
def wait_to_write(hands, phase, WHO: gl.constexpr):
    """Wait until nobody reads what this group will write."""
    mbarrier.wait(read(hands, 1 - WHO), phase & 1)
    mbarrier.wait(free(hands), phase & 1)


@gluon_jit
def expect_copies(hands, SQUARE: gl.constexpr, STRIP: gl.constexpr):
    """Expect so many bytes of the other processor's square and strip."""
    mbarrier.expect(came(hands, 0), SQUARE)
    mbarrier.expect(came(hands, 1), STRIP)


@gluon_jit
def send_square(to, RANK: gl.constexpr, WHOLE: gl.constexpr, SIDE: gl.constexpr):
    """Copy a square to where the other processor has it, too, which of the lower one needs the upper half, unless it is
    to be WHOLE: half of the left columns, and half of the right ones.
    """
    PIECE: gl.constexpr = SIDE * SIDE // 2
    start = (to + 2 * RANK) * (4 * PIECE)
    if RANK == 0 or WHOLE:
        _copy(start, 4 * PIECE, 0, RANK, SIDE)
    else:
        _copy(start, PIECE, 0, RANK, SIDE)
        _copy(start + 2 * PIECE, PIECE, 0, RANK, SIDE)


@gluon_jit
def send_strip(to, RANK: gl.constexpr, SIDE: gl.constexpr):
    """The same of a strip: half the rows of the square below the diagonal."""
    PIECE: gl.constexpr = SIDE * SIDE // 2
    start = (to + 1) * (4 * PIECE) + RANK * PIECE
    _copy(start, PIECE, 1, RANK, SIDE)
    _copy(start + 2 * PIECE, PIECE, 1, RANK, SIDE)


@gluon_jit
def _copy(at, size, WHO: gl.constexpr, RANK: gl.constexpr, SIDE: gl.constexpr):
    """Copy bytes of the squares to the same place there, where `came` waits for them."""
    none = at * 0
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a, b, d, t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0; "
        "mov.u32 b, global_smem; add.u32 a, b, $1; add.u32 b, b, $3; mapa.shared::cluster.u32 d, a, $4; "
        "mapa.shared::cluster.u32 b, b, $4; "
        "@p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [d], [a], $2, [b]; mov.u32 $0, 0; }",
        "=r,r,r,r,r", [at, none + size, none + (14 * SIDE * SIDE + 8 * WHO), none + (1 - RANK)], gl.int32, False, 1)


@gluon_jit
def packed(values):
    """Numbers in 16 bits two to a register; loops would hold each by itself."""
    low, high = gl.split(gl.reshape(values, (values.shape[0], values.shape[1] // 2, 2)))
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], gl.int32, True, 1)


@gluon_jit
def unpacked(pairs, like):
    """The same numbers, where those of `like` are."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], (gl.float16, gl.float16), True, 1)
    return gl.convert_layout(gl.reshape(gl.join(low, high), (pairs.shape[0], 2 * pairs.shape[1])), like.type.layout)

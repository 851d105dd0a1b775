"""How chain.py's programs begin: a matrix is read, scaled, cast and multiplied by itself. For sm90.

Decides: what is known of a matrix when. In 16 bits it is multiplied as it is, while the rest of it still arrives; its
scale goes into what follows, so that the cast, by a power of two, loses nothing. In fp32 it has to be cast first, so
its squares are summed before. Must not know: what follows.
"""
from __future__ import annotations

from .chain_pieces import raw_of, read, show, tile_of
from .ring import boxes_of, gluon_jit, rounded

gl = mbarrier = fence = barrier = multiply = multiplied = load_box = None  # Gluon, put here by gluon_jit


@gluon_jit
def begin_raw(u, box, X, pieces, eps, WIDE: gl.constexpr, TURNED: gl.constexpr, layout: gl.constexpr):
    """X <- U, as it is, through TMA, or where that cannot address it, and there is no `box`, through registers. Return
    A, the product of U / ||U||; a zero of which the compiler does not know; the power of two to `cast` X by, to a norm
    in [1, 2); and what is left of the scale.
    """
    RAW: gl.constexpr = u[0].dtype.element_ty
    memory = raw_of(X, RAW)
    SIDE: gl.constexpr = memory.shape[2 if TURNED else 1]
    WIDTH: gl.constexpr = memory.shape[1 if TURNED else 2]
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, SIDE, 16])
    if box is not None:
        arrived = _ask(box, X, pieces, TURNED, WIDTH)
    else:
        values = read(u, 0, SIDE, WIDTH, layout)
    sums, most = gl.zeros((SIDE, SIDE), gl.float32, mma), gl.zeros((SIDE, WIDTH), RAW, layout)
    squares = gl.zeros((SIDE, WIDTH), gl.float32, layout)
    for piece in range(pieces):
        tile = tile_of(memory, piece, TURNED)
        if box is not None:
            mbarrier.wait(arrived.index(piece), 0)
        else:
            show(values, tile)
        sums = multiply(tile, tile.permute([1, 0]), sums, is_async=True)
        if box is not None:
            values = tile.load(layout)
        most, squares = _larger(most, values), _with_squares(squares, values)
        if box is None:
            values = read(u, piece + 1, SIDE, WIDTH, layout)
        sums = multiplied(1, deps=(sums,))
    largest, total = gl.reduce((most.to(gl.float32), squares), None, _both)
    unit, sums = unit_of(largest), multiplied(0, deps=(sums,))
    if WIDE:
        if unit != 1.0:
            sums, total = _again(memory, pieces, unit, sums, squares, TURNED, layout)
    norm = gl.sqrt(total) + eps * (largest * unit)
    norm = gl.where(norm == 0, 1.0, norm)
    power = ((254 << 23) - (norm.to(gl.int32, bitcast=True) & 0x7F800000)).to(gl.float32, bitcast=True)
    return rounded(sums * (1.0 / (norm * norm)), X.dtype), 0.0 * norm, power, 1.0 / power / norm


@gluon_jit
def _ask(box, X, pieces, TURNED: gl.constexpr, WIDTH: gl.constexpr):
    """Let all pieces of a matrix arrive; return what tells of each that it has."""
    MOST: gl.constexpr = X.shape[0]
    arrived = gl.allocate_shared_memory(gl.int64, [MOST, 1], mbarrier.MBarrierLayout())
    for piece in gl.static_range(MOST):
        mbarrier.init(arrived.index(piece), count=1)
    fence()
    barrier()
    boxes = boxes_of(X, box)
    for piece in range(pieces):
        mbarrier.expect(arrived.index(piece), box.block_type.nbytes)
        at = [gl.program_id(0), piece * WIDTH, 0] if TURNED else [gl.program_id(0), 0, piece * WIDTH]
        load_box(box, at, arrived.index(piece), boxes.index(piece))
    return arrived


@gluon_jit
def _again(memory, pieces, unit, sums, squares, TURNED: gl.constexpr, layout: gl.constexpr):
    """U <- U in a unit; return U U^T, and the sum of squares."""
    sums = gl.full(sums.shape, 0.0, gl.float32, sums.type.layout)
    squares = gl.full(squares.shape, 0.0, gl.float32, squares.type.layout)
    for piece in range(pieces):
        tile = tile_of(memory, piece, TURNED)
        values = (tile.load(layout).to(gl.float32) * unit).to(memory.dtype)
        squares = _with_squares(squares, values)
        show(values, tile)
        sums = multiplied(0, deps=(multiply(tile, tile.permute([1, 0]), sums, is_async=True),))
    return sums, gl.sum(squares)


@gluon_jit
def _with_squares(squares, values):
    values = values.to(gl.float32)
    return gl.fma(values, values, squares)


@gluon_jit
def _larger(most, u):
    """The larger magnitudes, two at a time: bits of positive numbers are in the order of these."""
    return gl.inline_asm_elementwise("{ .reg .b32 t; and.b32 t, $2, 0x7fff7fff; max.u16x2 $0, $1, t; }", "=r,r,r",
                                     [most, u], u.dtype, True, 2)


@gluon_jit
def begin(u, X, pieces, eps, TURNED: gl.constexpr, layout: gl.constexpr):
    """X <- U scaled and cast; return X X^T, and a zero of which the compiler does not know."""
    SIDE: gl.constexpr = X.shape[2 if TURNED else 1]
    WIDTH: gl.constexpr = X.shape[1 if TURNED else 2]
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, SIDE, 16])
    unit, norm = _factors(u, pieces, eps, SIDE, WIDTH, layout)
    sums, values = gl.zeros((SIDE, SIDE), gl.float32, mma), read(u, 0, SIDE, WIDTH, layout)
    for piece in range(pieces):
        tile = tile_of(X, piece, TURNED)
        show(rounded(values * unit * norm, X.dtype), tile)
        sums = multiply(tile, tile.permute([1, 0]), sums, is_async=True)
        values = read(u, piece + 1, SIDE, WIDTH, layout)
        sums = multiplied(1, deps=(sums,))
    return rounded(multiplied(0, deps=(sums,)), X.dtype), 0.0 * norm


@gluon_jit
def _factors(u, pieces, eps, SIDE: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Return two factors of a matrix, to be applied one after the other: a power of two, and the rest (norm.py)."""
    largest = gl.zeros((SIDE, WIDTH), gl.float32, layout)
    squares, values = largest, read(u, 0, SIDE, WIDTH, layout)
    for piece in range(pieces):
        after = read(u, piece + 1, SIDE, WIDTH, layout)
        largest = gl.maximum(largest, gl.abs(values))
        squares = gl.fma(values, values, squares)
        values = after
    largest, squares = gl.reduce((largest, squares), None, _both)
    unit = unit_of(largest)
    if unit != 1.0:
        sums = gl.zeros((SIDE, WIDTH), gl.float32, layout)
        for piece in range(pieces):
            values = read(u, piece, SIDE, WIDTH, layout) * unit
            sums = gl.fma(values, values, sums)
        squares = gl.sum(sums)
    norm = gl.sqrt(squares) + eps * (largest * unit)
    return unit, 1.0 / gl.where(norm == 0, 1.0, norm)


@gluon_jit
def unit_of(largest):
    """A power of two by which squares do not leave the range of fp32."""
    return gl.where(largest > 2.0**50, 2.0**-80, gl.where(largest < 2.0**-40, 2.0**80, 1.0))


@gluon_jit
def _both(largest, squares, other, others):
    return gl.maximum(largest, other), squares + others

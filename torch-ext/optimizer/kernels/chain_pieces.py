"""The matrix X of chain.py, in shared memory in pieces of so many columns: what is multiplied, cast, read and stored.
For sm90.

Decides: who waits for whom where pieces change. Two of them are taken at a time, for what is between two products takes
nearly as long for one. Must not know: what a matrix is multiplied by, nor when.
"""
from __future__ import annotations

from .ring import boxes_of, gluon_jit, matrices_of, rounded

gl = tma = fence = barrier = multiply = multiplied = store_box = view = None  # Gluon, put here by gluon_jit


@gluon_jit
def raw_of(X, RAW: gl.constexpr):
    """The memory of X, for U."""
    LAYOUT: gl.constexpr = X.layout
    return view(X, RAW, X.shape, LAYOUT)


@gluon_jit
def cast(X, piece, power, RAW: gl.constexpr, TURNED: gl.constexpr, layout: gl.constexpr):
    """A piece of X, as it is, <- it times a power of two; yet to be shown."""
    values = tile_of(raw_of(X, RAW), piece, TURNED).load(layout).to(gl.float32)
    tile_of(X, piece, TURNED).store(rounded(values * power, X.dtype))


@gluon_jit
def restart(Q, X, pieces, ready, power, RAW: gl.constexpr, TURNED: gl.constexpr, layout: gl.constexpr):
    """X <- Q X, of which the first `ready` pieces are cast, two at least; return X X^T. Two pieces at a time, for what
    is between two products takes nearly as long for one.
    """
    q, sums = _left_of(Q, X, TURNED), gl.full(Q.shape, 0.0, gl.float32, Q.type.layout)
    one, other = _product(q, X, 0, TURNED), _product(q, X, 1, TURNED)
    if RAW is not None:
        _cast_two(X, 2, pieces, ready, power, RAW, TURNED, layout)
        fence()
        barrier()
    one, other = multiplied(0, deps=(one, other))
    x, y = rounded(one, X.dtype), rounded(other, X.dtype)
    for piece in range(0, pieces - 2, 2):
        one, other = _product(q, X, piece + 2, TURNED), _product(q, X, piece + 3, TURNED)
        if RAW is not None:
            _cast_two(X, piece + 4, pieces, ready, power, RAW, TURNED, layout)
        sums = _square_of(x, y, X, piece, sums, TURNED)
        one, other, sums = multiplied(2, deps=(one, other, sums))
        x, y = rounded(one, X.dtype), rounded(other, X.dtype)
    return rounded(multiplied(0, deps=(_square_of(x, y, X, pieces - 2, sums, TURNED),)), X.dtype)


@gluon_jit
def _cast_two(X, piece, pieces, ready, power, RAW: gl.constexpr, TURNED: gl.constexpr, layout: gl.constexpr):
    """Cast two pieces that are there, and not `ready`."""
    if (piece >= ready) & (piece < pieces):
        cast(X, piece, power, RAW, TURNED, layout)
        cast(X, piece + 1, power, RAW, TURNED, layout)


@gluon_jit
def _square_of(x, y, X, piece, sums, TURNED: gl.constexpr):
    """Put two pieces into X, where all have read what was there, and begin to add their part of X X^T."""
    one, other = tile_of(X, piece, TURNED), tile_of(X, piece + 1, TURNED)
    barrier()
    one.store(x)
    show(y, other)
    sums = multiply(one, one.permute([1, 0]), sums, is_async=True)
    return multiply(other, other.permute([1, 0]), sums, is_async=True)


@gluon_jit
def finish(Q, X, pieces, out, box, TURNED: gl.constexpr, layout: gl.constexpr):
    """Store Q X, by TMA, or where that cannot address it, and there is no `box`, by pointers."""
    DTYPE: gl.constexpr = out[0].dtype.element_ty
    q = _left_of(Q, X, TURNED)
    one, other = multiplied(0, deps=(_product(q, X, 0, TURNED), _product(q, X, 1, TURNED)))
    for piece in range(0, pieces - 2, 2):
        x, y = rounded(one, DTYPE), rounded(other, DTYPE)
        one, other = _product(q, X, piece + 2, TURNED), _product(q, X, piece + 3, TURNED)
        _store(x, y, X, piece, out, box, layout)
        one, other = multiplied(0, deps=(one, other))
    _store(rounded(one, DTYPE), rounded(other, DTYPE), X, pieces - 2, out, box, layout)
    if box is not None:
        tma.store_wait(0)


@gluon_jit
def _store(x, y, X, piece, out, box, layout: gl.constexpr):
    """Store two pieces, through their memory of X, where all have read what was there."""
    TURNED: gl.constexpr = layout.order[0] == 0
    WIDTH: gl.constexpr = x.shape[1]
    if box is not None:
        boxes = boxes_of(X, box)
        tiles = matrices_of(boxes, box.block_type.shape[1], box.block_type.shape[2])
        barrier()
        tile_of(tiles, piece, TURNED).store(x)
        show(y, tile_of(tiles, piece + 1, TURNED))
        for k in gl.static_range(2):
            column = (piece + k) * WIDTH
            at = [gl.program_id(0), column, 0] if TURNED else [gl.program_id(0), 0, column]
            store_box(box, at, boxes.index(piece + k))
    else:
        at, inside = place_of(out, piece, x.shape[0], WIDTH, layout)
        gl.store(at, gl.convert_layout(x, layout), mask=inside)
        at, inside = place_of(out, piece + 1, x.shape[0], WIDTH, layout)
        gl.store(at, gl.convert_layout(y, layout), mask=inside)


@gluon_jit
def _left_of(Q, X, TURNED: gl.constexpr):
    """Q as the left factor of pieces of X."""
    WIDTH: gl.constexpr = X.shape[1 if TURNED else 2]
    narrow: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, WIDTH, 16])
    return gl.convert_layout(Q, gl.DotOperandLayout(0, narrow, 2))


@gluon_jit
def _product(q, X, piece, TURNED: gl.constexpr):
    """Begin to multiply a piece of X."""
    layout: gl.constexpr = q.type.layout.parent
    WIDTH: gl.constexpr = layout.instr_shape[1]
    sums = gl.full((q.shape[0], WIDTH), 0.0, gl.float32, layout)
    return multiply(q, tile_of(X, piece, TURNED), sums, use_acc=False, is_async=True)


@gluon_jit
def read(u, piece, SIDE: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """A piece of a matrix, with zeros beyond its edges."""
    at, inside = place_of(u, piece, SIDE, WIDTH, layout)
    return gl.load(at, mask=inside, other=0.0)


@gluon_jit
def place_of(u, piece, SIDE: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Return where a piece of a matrix lies, and which of its elements are there."""
    start, down, across, n, m = u
    row = gl.arange(0, SIDE, layout=gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))[None, :] + piece * WIDTH
    at = start + row.to(gl.int64) * down + column.to(gl.int64) * across
    return at, (row < n) & (column < m)


@gluon_jit
def tile_of(X, piece, TURNED: gl.constexpr):
    """A piece of X, which is stored transposed if TURNED."""
    tile = X.index(piece)
    if TURNED:
        tile = tile.permute([1, 0])
    return tile


@gluon_jit
def show(values, tile):
    """Store where no product reads any more, for products to come."""
    tile.store(values)
    fence()
    barrier()

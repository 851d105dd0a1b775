"""Whole iterations in shared memory on sm90: short sides of 65 to 128, long sides of 129 to 512.
Needs Gluon.
"""
from __future__ import annotations

import functools

import torch

from ..launch.jit import gluon_jit, launch_key, triton_dtype
from ..launch.replay import knows_triton
from ..launch.tile_config import architecture
from ..matmul.sm90_pipeline import rounded

gl = fence = barrier = multiply = multiplied = None  # Gluon's names, put here by gluon_jit

SIDE, LONGEST = 128, 512  # short side, and long side
MOST_STEPS = 10  # each is compiled for itself; `_afresh` has no addresses for more
WIDTH = 64  # columns of X that are multiplied at a time
# Pieces of so many columns that stay in registers between norm and cast, by element size
KEPT = {2: 8, 4: 4}


def takes(n: int, m: int, steps: int) -> bool:
    """Say whether so many steps on matrices (n, m), n <= m, are taken here, where the kernel runs.
    """
    return SIDE // 2 < n <= SIDE < m <= LONGEST and steps <= MOST_STEPS


def fits(U: torch.Tensor, dtype: torch.dtype, steps: int) -> bool:
    """Say whether so many steps on matrices U (N, n, m), n <= m, in `dtype`, go through `polar`."""
    small = dtype.itemsize == 2 and takes(*U.shape[1:], steps)
    return small and architecture(U.device.type, U.device.index) == "sm90" and knows_triton()


def polar(U: torch.Tensor, out: torch.Tensor, triples: tuple, firsts: int, eps: float,
          dtype: torch.dtype) -> None:
    """Write to out the polar factor of every matrix of U (N, n, m); they may be the same memory.

    triples: all coefficients, one after another; firsts: bit s says that step s begins a segment.
    """
    (N, n, m), steps = U.shape, len(triples) // 3
    pieces, turned = -(-m // WIDTH), U.stride(1) < U.stride(2)
    lines = _lines(U.element_size(), turned), _lines(out.element_size(),
                                                     out.stride(1) < out.stride(2))
    key = (dtype, steps, firsts, *launch_key(U, out))
    _chain_kernel.launch(N, key, U, out, U.stride(), out.stride(),
                         triples, n, m, eps, U.dtype != torch.float16, steps, firsts | 1 << steps,
                         turned, *lines, SIDE, WIDTH, pieces, min(KEPT[U.element_size()], pieces),
                         triton_dtype(dtype), num_warps=8)


@functools.cache
def _lines(itemsize: int, turned: bool, width: int = WIDTH):
    """How 256 threads read or write a piece of a matrix, 16 bytes each at a time."""
    from triton.experimental.gluon.language import BlockedLayout

    each = 16 // itemsize
    across = min(32, (SIDE if turned else width) // each)
    if turned:
        return BlockedLayout([each, 1], [across, 32 // across], [1, 8], [0, 1])
    return BlockedLayout([1, each], [32 // across, across], [8, 1], [1, 0])


@gluon_jit
def _chain_kernel(U, out, u_strides, out_strides, triples, n, m, eps, WIDE: gl.constexpr,
                  STEPS: gl.constexpr, FIRSTS: gl.constexpr, TURNED: gl.constexpr,
                  FROM: gl.constexpr, TO: gl.constexpr, SIDE: gl.constexpr, WIDTH: gl.constexpr,
                  PIECES: gl.constexpr, KEPT: gl.constexpr, DTYPE: gl.constexpr):
    """One matrix per program. FIRSTS: bit s says that step s begins a segment, or is one after the
    last; TURNED: a matrix lies transposed, and so it does in shared memory; FROM, TO: how it is
    read and written.
    """
    matrix = gl.program_id(0).to(gl.int64)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16,
                                                  rank=2)
    narrow: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1],
                                                     instr_shape=[16, WIDTH, 16])
    X, tiles = (), ()  # of memory in one piece the compiler would not know what is read where
    for piece in gl.static_range(PIECES + 3):
        if piece < PIECES:
            X = X + (gl.allocate_shared_memory(DTYPE,
                                               [1, WIDTH, SIDE] if TURNED else [1, SIDE, WIDTH],
                                               swizzled),)
        else:
            tiles = tiles + (gl.allocate_shared_memory(DTYPE, [1, SIDE, SIDE], swizzled),)
    A, zero = _begin(U + matrix * u_strides[0], u_strides, n, m, eps,
                     _afresh(X, m, 0, PIECES, TURNED), WIDE, SIDE, WIDTH, PIECES, KEPT, FROM)
    Q = A
    for step in gl.static_range(STEPS):
        squares = _afresh(tiles, m, 2 * step + 1, 3, False)
        if (FIRSTS >> step) % 2 == 1:
            _show(A, squares[0])
        A, Q = _step(A, Q, squares, triples, zero, step, FIRSTS)
        if (FIRSTS >> (step + 1)) % 2 == 1 and step + 1 < STEPS:
            A = _restart(Q, _afresh(X, m, 2 * step + 2, PIECES, TURNED), PIECES, narrow)
    _finish(Q, _afresh(X, m, 2 * STEPS + 1, PIECES, TURNED), out + matrix * out_strides[0],
            out_strides, n, m, PIECES, narrow, SIDE, WIDTH, TO)


@gluon_jit
def _afresh(memory, m, phase: gl.constexpr, COUNT: gl.constexpr, TURNED: gl.constexpr):
    """Matrices in shared memory, transposed if they lie TURNED, for a phase. The compiler does not
    know that m is less than 1 << 10, which is why it keeps no addresses for the next phase; it
    would need more registers than there are.
    """
    views = ()
    for k in gl.static_range(COUNT):
        view = memory[k].index(m >> (10 + phase))
        if TURNED:
            view = view.permute([1, 0])
        views = views + (view,)
    return views


@gluon_jit
def _begin(start, strides, n, m, eps, X, WIDE: gl.constexpr, SIDE: gl.constexpr,
           WIDTH: gl.constexpr, PIECES: gl.constexpr, KEPT: gl.constexpr, layout: gl.constexpr):
    """X <- U scaled and cast; return X X^T, and a zero of which the compiler does not know. The
    first pieces are read once, the others again after the sum of squares.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1],
                                                  instr_shape=[16, SIDE, 16])
    others, pieces = (), ()
    for piece in gl.static_range(KEPT, PIECES):
        others = others + (_read(start, strides, piece, n, m, SIDE, WIDTH, layout),)
    for piece in gl.static_range(KEPT):
        pieces = pieces + (_read(start, strides, piece, n, m, SIDE, WIDTH, layout),)
    unit, norm = _factors(others + pieces, start, strides, n, m, eps, WIDE, SIDE, WIDTH, PIECES,
                          KEPT, layout)
    sums = gl.zeros((SIDE, SIDE), gl.float32, mma)
    for piece in gl.static_range(PIECES):
        if piece + KEPT < PIECES:
            pieces = pieces + (_read(start, strides, piece + KEPT, n, m, SIDE, WIDTH, layout),)
        _show(rounded(_again(pieces[piece]) * unit * norm, X[piece].dtype), X[piece])
        sums = multiply(X[piece], X[piece].permute([1, 0]), sums, use_acc=piece > 0, is_async=True)
    return rounded(multiplied(0, deps=(sums,)), X[0].dtype), 0.0 * norm


@gluon_jit
def _factors(pieces, start, strides, n, m, eps, WIDE: gl.constexpr, SIDE: gl.constexpr,
             WIDTH: gl.constexpr, PIECES: gl.constexpr, KEPT: gl.constexpr, layout: gl.constexpr):
    """Return two factors of a matrix, to be applied one after the other: a power of two, and the
    rest (scaling.py).
    """
    largest = gl.zeros((SIDE, WIDTH), gl.float32, layout)
    squares = largest
    for piece in gl.static_range(PIECES):
        u = pieces[piece].to(gl.float32)
        largest = gl.maximum(largest, gl.abs(u))
        squares = gl.fma(u, u, squares)
    largest, squares = gl.reduce((largest, squares), None, _both)
    unit = gl.where(largest > 2.0**50, 2.0**-80, gl.where(largest < 2.0**-40, 2.0**80, 1.0))
    if WIDE and unit != 1.0:
        squares = _sum(start, strides, unit, n, m, SIDE, WIDTH, PIECES, KEPT, layout)
    norm = gl.sqrt(squares) + eps * (largest * unit)
    return unit, 1.0 / gl.where(norm == 0, 1.0, norm)


@gluon_jit
def _both(largest, squares, other, others):
    return gl.maximum(largest, other), squares + others


@gluon_jit
def _sum(start, strides, unit, n, m, SIDE: gl.constexpr, WIDTH: gl.constexpr, PIECES: gl.constexpr,
         KEPT: gl.constexpr, layout: gl.constexpr):
    """Return the sum of squares in a unit, added and rounded as by `_factors`."""
    squares = gl.zeros((SIDE, WIDTH), gl.float32, layout)
    for number in range(PIECES):
        u = _read(start, strides, (number + KEPT) % PIECES, n, m, SIDE, WIDTH,
                  layout).to(gl.float32) * unit
        squares = gl.fma(u, u, squares)
    return gl.sum(squares)


@gluon_jit
def _step(A, Q, tiles, triples, zero, step: gl.constexpr, FIRSTS: gl.constexpr):
    """With Z = b A + c A^2: A <- (Z + a I) A (Z + a I)^T, Q <- (Z + a I) Q; see iteration.py. After
    the first step of a segment Q + q I stands for Q, where q is that step's a. A lies in the first
    tile, too, Q in the last.
    """
    FIRST: gl.constexpr = (FIRSTS >> step) % 2 == 1
    SECOND: gl.constexpr = (FIRSTS << 1 >> step) % 2 == 1
    LAST: gl.constexpr = (FIRSTS >> (step + 1)) % 2 == 1
    # parameters as they are would be loaded again by each of their uses
    a, b, c = triples[3 * step] + zero, triples[3 * step + 1] + zero, triples[3 * step + 2] + zero
    q = triples[0 if FIRST else 3 * step - 3] + zero
    a_tile, q_tile = tiles[0], tiles[2]
    mma: gl.constexpr = A.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    sums = gl.zeros(A.shape, gl.float32, mma)
    sums = multiply(gl.convert_layout(A, left), a_tile, sums, use_acc=False, is_async=True)
    Z = rounded(c * multiplied(0, deps=(sums,)) + b * _again(A), A.dtype)
    z = gl.convert_layout(Z, left)
    if LAST and FIRST:
        Q = rounded(_again(Z) + _diagonal(a, A), A.dtype)
    elif LAST:
        sums = multiply(z, q_tile, _addends(Q, Z, q, a, SECOND), is_async=True)
        Q = rounded(multiplied(0, deps=(sums,)), A.dtype)
    else:
        sums = multiply(z, a_tile, a * _again(A), is_async=True)
        if not FIRST:
            follow = multiply(z, q_tile, _addends(Q, Z, q, a, SECOND), is_async=True)
        tile = tiles[2 if FIRST else 1]
        tile.store(Z)
        T = rounded(multiplied(0 if FIRST else 1, deps=(sums,)), A.dtype)
        fence()
        barrier()
        sums = multiply(gl.convert_layout(T, left), tile.permute([1, 0]), a * _again(T),
                        is_async=True)
        if FIRST:
            Q = Z
        else:
            Q = rounded(multiplied(1, deps=(follow,)), A.dtype)
            barrier()
            q_tile.store(Q)
        A = rounded(multiplied(0, deps=(sums,)), A.dtype)
        _show(A, a_tile)
    return A, Q


@gluon_jit
def _addends(Q, Z, q, a, SECOND: gl.constexpr):
    """a Q, or what is added to Z Q for (Z + a I) (Q + q I)."""
    sums = a * _again(Q)
    if SECOND:
        sums += q * _again(Z) + _diagonal(q * a, Q)
    return sums


@gluon_jit
def _restart(Q, X, PIECES: gl.constexpr, narrow: gl.constexpr):
    """X <- Q X; return X X^T."""
    q = gl.convert_layout(Q, gl.DotOperandLayout(0, narrow, 2))
    sums = gl.full(Q.shape, 0.0, gl.float32, Q.type.layout)
    products = (_product(q, X[0], narrow),)
    for piece in gl.static_range(PIECES):
        if piece + 1 < PIECES:
            products = products + (_product(q, X[piece + 1], narrow),)
        x = rounded(multiplied((piece > 0) + (piece + 1 < PIECES), deps=(products[piece],)),
                    Q.dtype)
        barrier()
        _show(x, X[piece])
        sums = multiply(X[piece], X[piece].permute([1, 0]), sums, use_acc=piece > 0, is_async=True)
    return rounded(multiplied(0, deps=(sums,)), Q.dtype)


@gluon_jit
def _finish(Q, X, start, strides, n, m, PIECES: gl.constexpr, narrow: gl.constexpr,
            SIDE: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Store Q X, through shared memory where it can be read in lines."""
    DTYPE: gl.constexpr = start.dtype.element_ty
    OUT_TURNED: gl.constexpr = layout.order[0] == 0
    shape: gl.constexpr = [WIDTH, SIDE] if OUT_TURNED else [SIDE, WIDTH]
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, rank=2)
    stages = (gl.allocate_shared_memory(DTYPE, shape, swizzled),
              gl.allocate_shared_memory(DTYPE, shape, swizzled))
    q = gl.convert_layout(Q, gl.DotOperandLayout(0, narrow, 2))
    products = (_product(q, X[0], narrow),)
    for piece in gl.static_range(PIECES):
        if piece + 1 < PIECES:
            products = products + (_product(q, X[piece + 1], narrow),)
        tile = stages[piece % 2]
        if OUT_TURNED:
            tile = tile.permute([1, 0])
        tile.store(rounded(multiplied(piece + 1 < PIECES, deps=(products[piece],)), DTYPE))
        barrier()
        at, inside = _place(start, strides, piece, n, m, SIDE, WIDTH, layout)
        gl.store(at, tile.load(layout), mask=inside)


@gluon_jit
def _product(q, piece, narrow: gl.constexpr):
    """Begin to multiply a piece of X."""
    return multiply(q, piece, gl.full(piece.shape, 0.0, gl.float32, narrow), use_acc=False,
                    is_async=True)


@gluon_jit
def _show(values, tile):
    """Store where no product reads any more, for products to come."""
    tile.store(values)
    fence()
    barrier()


@gluon_jit
def _read(start, strides, piece, n, m, SIDE: gl.constexpr, WIDTH: gl.constexpr,
          layout: gl.constexpr):
    """A piece of a matrix, with zeros beyond its edges."""
    at, inside = _place(start, strides, piece, n, m, SIDE, WIDTH, layout)
    return gl.load(at, mask=inside, other=0.0)


@gluon_jit
def _again(u):
    """The same numbers in fp32, of which the compiler keeps no copies."""
    EACH: gl.constexpr = 32 // u.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [u], u.dtype, False,
                                     EACH).to(gl.float32)


@gluon_jit
def _place(start, strides, piece, n, m, SIDE: gl.constexpr, WIDTH: gl.constexpr,
           layout: gl.constexpr):
    """Return where a piece of a matrix lies, and which of its elements are there."""
    row = gl.arange(0, SIDE, layout=gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))[None, :] + piece * WIDTH
    at = start + row.to(gl.int64) * strides[1] + column.to(gl.int64) * strides[2]
    return at, (row < n) & (column < m)


@gluon_jit
def _diagonal(value, like):
    r = gl.arange(0, like.shape[0], layout=gl.SliceLayout(1, like.type.layout))[:, None]
    s = gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, like.type.layout))[None, :]
    return gl.where(r == s, value, 0.0)

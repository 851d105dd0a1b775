"""Whole Newton-Schulz iterations in shared memory on sm90, a matrix per CTA, in Gluon: short sides
of 65 to 128, long sides of 129 to 512.

X stays in shared memory as pieces of 64 columns, A, Z and Q as tiles of 128 x 128; left factors of
wgmma come from registers. polar.py calls `polar` where `supports` is true. A and Q need not be
symmetric in every bit: the updates A <- P A P^T and Q <- P Q hold for any P = Z + a I.
"""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from ..launch.jit import gluon_jit, launch_key, triton_dtype
from ..launch.replay import knows_triton
from ..launch.tile_config import architecture
from ..matmul.sm90_pipeline import index_grid, rounded

if TYPE_CHECKING:
    from triton.experimental.gluon.language import BlockedLayout

gl = fence = barrier = multiply = multiplied = None  # Gluon's names, put here by gluon_jit

SIDE = 128  # Longest short side; a matrix is computed as SIDE rows, with zeros below
MAX_LONG_SIDE = 512
MAX_STEPS = 10  # Steps are unrolled; more would shift by 32 bits or more in `_views_of_phase`
WIDTH = 64  # Columns of a piece of X, which is multiplied at a time
# Element size in bytes -> pieces that stay in registers between norm and cast
IN_REGISTERS = {2: 8, 4: 4}


def supports_shape(n: int, m: int, steps: int) -> bool:
    """Whether `polar` supports `steps` steps on matrices (n, m), n <= m, where the kernel runs."""
    return SIDE // 2 < n <= SIDE < m <= MAX_LONG_SIDE and steps <= MAX_STEPS


def supports(U: torch.Tensor, dtype: torch.dtype, steps: int) -> bool:
    """Whether `polar` computes `steps` steps on matrices like U (N, n, m), n <= m, in `dtype`."""
    small = dtype.itemsize == 2 and supports_shape(*U.shape[1:], steps)
    return small and architecture(U.device.type, U.device.index) == "sm90" and knows_triton()


def polar(U: torch.Tensor, out: torch.Tensor, triples: tuple[float, ...], firsts: int, eps: float,
          dtype: torch.dtype) -> None:
    """Write the approximate polar factor of every matrix of U (N, n, m) to `out`, which may be U.
    Products and X are in `dtype`.

    triples: the coefficients (a, b, c) of all steps in a row. firsts: bit s is set if step s begins
    a restart interval.
    """
    N, n, m = U.shape
    steps = len(triples) // 3
    pieces = -(-m // WIDTH)
    turned = U.stride(1) < U.stride(2)  # X lies in shared memory as U does in global memory
    lines = (_lines(U.element_size(), turned),
             _lines(out.element_size(), out.stride(1) < out.stride(2)))
    key = dtype, steps, firsts, *launch_key(U, out)
    _polar_kernel.launch(N, key, U, out, U.stride(), out.stride(),
                         triples, n, m, eps, U.dtype != torch.float16, steps, firsts | 1 << steps,
                         turned, *lines, SIDE, WIDTH, pieces,
                         min(IN_REGISTERS[U.element_size()], pieces),
                         triton_dtype(dtype), num_warps=8)


@functools.cache
def _lines(itemsize: int, turned: bool, width: int = WIDTH) -> BlockedLayout:
    """The layout in which 256 threads load or store a piece (SIDE, width): 16 bytes per thread
    along the contiguous dimension, which is the first dimension if `turned`.
    """
    from triton.experimental.gluon.language import BlockedLayout

    each = 16 // itemsize
    across = min(32, (SIDE if turned else width) // each)
    if turned:
        return BlockedLayout([each, 1], [across, 32 // across], [1, 8], [0, 1])
    return BlockedLayout([1, each], [32 // across, across], [8, 1], [1, 0])


@gluon_jit
def _polar_kernel(U, out, u_strides, out_strides, triples, n, m, eps, WIDE: gl.constexpr,
                  STEPS: gl.constexpr, FIRSTS: gl.constexpr, TURNED: gl.constexpr,
                  FROM: gl.constexpr, TO: gl.constexpr, SIDE: gl.constexpr, WIDTH: gl.constexpr,
                  PIECES: gl.constexpr, IN_REGISTERS: gl.constexpr, DTYPE: gl.constexpr):
    """Gram iteration of a matrix per program, from U to `out`.

    triples: the coefficients of all STEPS steps in a row. FIRSTS: bit s is set if step s begins a
    restart interval, and bit STEPS. WIDE: squares may leave the range of fp32. TURNED: U is stored
    transposed, and X in shared memory, too. FROM, TO: layouts that load U and store `out` in lines.
    PIECES: pieces of WIDTH columns, of which IN_REGISTERS stay in registers until they are cast.
    """
    matrix = gl.program_id(0).to(gl.int64)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16,
                                                  rank=2)
    narrow: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1],
                                                     instr_shape=[16, WIDTH, 16])
    # Separate allocations, because of a single allocation the compiler does not know which part is
    # read where
    X, tiles = (), ()
    for piece in gl.static_range(PIECES + 3):
        if piece < PIECES:
            X = X + (gl.allocate_shared_memory(DTYPE,
                                               [1, WIDTH, SIDE] if TURNED else [1, SIDE, WIDTH],
                                               swizzled),)
        else:
            tiles = tiles + (gl.allocate_shared_memory(DTYPE, [1, SIDE, SIDE], swizzled),)
    A, zero = _load_scaled(U + matrix * u_strides[0], u_strides, n, m, eps,
                           _views_of_phase(X, m, 0, PIECES, TURNED), WIDE, SIDE, WIDTH, PIECES,
                           IN_REGISTERS, FROM)
    Q = A
    for step in gl.static_range(STEPS):
        squares = _views_of_phase(tiles, m, 2 * step + 1, 3, False)
        if (FIRSTS >> step) % 2 == 1:
            _store_operand(A, squares[0])
        A, Q = _gram_step(A, Q, squares, triples, zero, step, FIRSTS)
        if (FIRSTS >> (step + 1)) % 2 == 1 and step + 1 < STEPS:
            A = _restart(Q, _views_of_phase(X, m, 2 * step + 2, PIECES, TURNED), PIECES, narrow)
    _store_product(Q, _views_of_phase(X, m, 2 * STEPS + 1, PIECES, TURNED),
                   out + matrix * out_strides[0], out_strides, n, m, PIECES, narrow, SIDE, WIDTH,
                   TO)


@gluon_jit
def _views_of_phase(memory, m, phase: gl.constexpr, COUNT: gl.constexpr, TURNED: gl.constexpr):
    """Views of matrices in shared memory for a phase, transposed if TURNED.

    The index is not foldable by the compiler: m >> (10 + phase) is always 0, since m <= 512. With a
    constant index the compiler keeps the addresses of all phases, and spills registers.
    """
    views = ()
    for k in gl.static_range(COUNT):
        view = memory[k].index(m >> (10 + phase))
        if TURNED:
            view = view.permute([1, 0])
        views = views + (view,)
    return views


@gluon_jit
def _load_scaled(start, strides, n, m, eps, X, WIDE: gl.constexpr, SIDE: gl.constexpr,
                 WIDTH: gl.constexpr, PIECES: gl.constexpr, IN_REGISTERS: gl.constexpr,
                 layout: gl.constexpr):
    """X <- U scaled to Frobenius norm 1 and cast; return X X^T, and a zero unknown to the compiler.

    Pieces from IN_REGISTERS on are loaded first, for the norm only, and again when registers are
    free. The other pieces are loaded once.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1],
                                                  instr_shape=[16, SIDE, 16])
    last_pieces, pieces = (), ()
    for piece in gl.static_range(IN_REGISTERS, PIECES):
        last_pieces = last_pieces + (_load_piece(start, strides, piece, n, m, SIDE, WIDTH, layout),)
    for piece in gl.static_range(IN_REGISTERS):
        pieces = pieces + (_load_piece(start, strides, piece, n, m, SIDE, WIDTH, layout),)
    unit, norm = _unit_and_inverse_norm(last_pieces + pieces, start, strides, n, m, eps, WIDE, SIDE,
                                        WIDTH, PIECES, IN_REGISTERS, layout)
    sums = gl.zeros((SIDE, SIDE), gl.float32, mma)
    for piece in gl.static_range(PIECES):
        if piece + IN_REGISTERS < PIECES:
            pieces = pieces + (_load_piece(start, strides, piece + IN_REGISTERS, n, m, SIDE, WIDTH,
                                           layout),)
        _store_operand(rounded(_to_fp32(pieces[piece]) * unit * norm, X[piece].dtype), X[piece])
        sums = multiply(X[piece], X[piece].permute([1, 0]), sums, use_acc=piece > 0, is_async=True)
    return rounded(multiplied(0, deps=(sums,)), X[0].dtype), 0.0 * norm


@gluon_jit
def _unit_and_inverse_norm(pieces, start, strides, n, m, eps, WIDE: gl.constexpr,
                           SIDE: gl.constexpr, WIDTH: gl.constexpr, PIECES: gl.constexpr,
                           IN_REGISTERS: gl.constexpr, layout: gl.constexpr):
    """Return (unit, 1 / norm): the scaled matrix is U unit / norm. unit is a power of two that
    keeps squares in the range of fp32, as `unit_of` in scaling.py.
    """
    largest = gl.zeros((SIDE, WIDTH), gl.float32, layout)
    squares = largest
    for piece in gl.static_range(PIECES):
        u = pieces[piece].to(gl.float32)
        largest = gl.maximum(largest, gl.abs(u))
        squares = gl.fma(u, u, squares)
    largest, squares = gl.reduce((largest, squares), None, _max_and_sum)
    unit = gl.where(largest > 2.0**50, 2.0**-80, gl.where(largest < 2.0**-40, 2.0**80, 1.0))
    if WIDE and unit != 1.0:
        squares = _sum_of_squares(start, strides, unit, n, m, SIDE, WIDTH, PIECES, IN_REGISTERS,
                                  layout)
    norm = gl.sqrt(squares) + eps * (largest * unit)
    return unit, 1.0 / gl.where(norm == 0, 1.0, norm)


@gluon_jit
def _max_and_sum(largest, squares, other, others):
    """Combine (largest magnitude, sum of squares) of two parts of a matrix."""
    return gl.maximum(largest, other), squares + others


@gluon_jit
def _sum_of_squares(start, strides, unit, n, m, SIDE: gl.constexpr, WIDTH: gl.constexpr,
                    PIECES: gl.constexpr, IN_REGISTERS: gl.constexpr, layout: gl.constexpr):
    """Return the sum of squares of unit U, added in the order of `_unit_and_inverse_norm`: a power
    of two changes no bit of the result.
    """
    squares = gl.zeros((SIDE, WIDTH), gl.float32, layout)
    for piece in range(PIECES):
        u = _load_piece(start, strides, (piece + IN_REGISTERS) % PIECES, n, m, SIDE, WIDTH,
                        layout).to(gl.float32) * unit
        squares = gl.fma(u, u, squares)
    return gl.sum(squares)


@gluon_jit
def _gram_step(A, Q, tiles, triples, zero, step: gl.constexpr, FIRSTS: gl.constexpr):
    """A step of the Gram iteration, with Z = b A + c A^2: return A <- (Z + a I) A (Z + a I)^T and Q
    <- (Z + a I) Q; see iteration.py.

    After the first step of a restart interval Q + q I stands for Q, with q the a of the first step.
    A is also in tiles[0], Q in tiles[2]. The last step of an interval does not update A.
    """
    FIRST: gl.constexpr = (FIRSTS >> step) % 2 == 1
    SECOND: gl.constexpr = (FIRSTS << 1 >> step) % 2 == 1
    LAST: gl.constexpr = (FIRSTS >> (step + 1)) % 2 == 1
    # zero hides from the compiler that these are parameters, which each use would load again
    a = triples[3 * step] + zero
    b, c = triples[3 * step + 1] + zero, triples[3 * step + 2] + zero
    q = triples[0 if FIRST else 3 * step - 3] + zero
    a_tile, q_tile = tiles[0], tiles[2]
    mma: gl.constexpr = A.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    sums = gl.zeros(A.shape, gl.float32, mma)
    sums = multiply(gl.convert_layout(A, left), a_tile, sums, use_acc=False, is_async=True)
    Z = rounded(c * multiplied(0, deps=(sums,)) + b * _to_fp32(A), A.dtype)
    z = gl.convert_layout(Z, left)
    if LAST and FIRST:
        Q = rounded(_to_fp32(Z) + _identity_times(a, A), A.dtype)
    elif LAST:
        sums = multiply(z, q_tile, _initial_sums(Q, Z, q, a, SECOND), is_async=True)
        Q = rounded(multiplied(0, deps=(sums,)), A.dtype)
    else:
        sums = multiply(z, a_tile, a * _to_fp32(A), is_async=True)
        if not FIRST:
            q_sums = multiply(z, q_tile, _initial_sums(Q, Z, q, a, SECOND), is_async=True)
        z_tile = tiles[2 if FIRST else 1]
        z_tile.store(Z)
        T = rounded(multiplied(0 if FIRST else 1, deps=(sums,)), A.dtype)
        fence()
        barrier()
        sums = multiply(gl.convert_layout(T, left), z_tile.permute([1, 0]), a * _to_fp32(T),
                        is_async=True)
        if FIRST:
            Q = Z
        else:
            Q = rounded(multiplied(1, deps=(q_sums,)), A.dtype)
            barrier()
            q_tile.store(Q)
        A = rounded(multiplied(0, deps=(sums,)), A.dtype)
        _store_operand(A, a_tile)
    return A, Q


@gluon_jit
def _initial_sums(Q, Z, q, a, SECOND: gl.constexpr):
    """Return a Q, to which Z Q is added. In the SECOND step Q stands for Q + q I: return a Q + q Z
    + q a I.
    """
    sums = a * _to_fp32(Q)
    if SECOND:
        sums += q * _to_fp32(Z) + _identity_times(q * a, Q)
    return sums


@gluon_jit
def _restart(Q, X, PIECES: gl.constexpr, narrow: gl.constexpr):
    """X <- Q X in place; return X X^T."""
    q = gl.convert_layout(Q, gl.DotOperandLayout(0, narrow, 2))
    sums = gl.full(Q.shape, 0.0, gl.float32, Q.type.layout)
    products = (_start_product(q, X[0], narrow),)
    for piece in gl.static_range(PIECES):
        if piece + 1 < PIECES:
            products = products + (_start_product(q, X[piece + 1], narrow),)
        x = rounded(multiplied((piece > 0) + (piece + 1 < PIECES), deps=(products[piece],)),
                    Q.dtype)
        barrier()
        _store_operand(x, X[piece])
        sums = multiply(X[piece], X[piece].permute([1, 0]), sums, use_acc=piece > 0, is_async=True)
    return rounded(multiplied(0, deps=(sums,)), Q.dtype)


@gluon_jit
def _store_product(Q, X, start, strides, n, m, PIECES: gl.constexpr, narrow: gl.constexpr,
                   SIDE: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Store Q X to global memory. Pieces go through shared memory, from which they are loaded in
    the layout of lines.
    """
    DTYPE: gl.constexpr = start.dtype.element_ty
    OUT_TURNED: gl.constexpr = layout.order[0] == 0
    shape: gl.constexpr = [WIDTH, SIDE] if OUT_TURNED else [SIDE, WIDTH]
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, rank=2)
    stages = (gl.allocate_shared_memory(DTYPE, shape, swizzled),
              gl.allocate_shared_memory(DTYPE, shape, swizzled))
    q = gl.convert_layout(Q, gl.DotOperandLayout(0, narrow, 2))
    products = (_start_product(q, X[0], narrow),)
    for piece in gl.static_range(PIECES):
        if piece + 1 < PIECES:
            products = products + (_start_product(q, X[piece + 1], narrow),)
        tile = stages[piece % 2]
        if OUT_TURNED:
            tile = tile.permute([1, 0])
        tile.store(rounded(multiplied(piece + 1 < PIECES, deps=(products[piece],)), DTYPE))
        barrier()
        address, inside = _addresses_of(start, strides, piece, n, m, SIDE, WIDTH, layout)
        gl.store(address, tile.load(layout), mask=inside)


@gluon_jit
def _start_product(q, piece, narrow: gl.constexpr):
    """Issue the product of q and a piece of X."""
    return multiply(q, piece, gl.full(piece.shape, 0.0, gl.float32, narrow), use_acc=False,
                    is_async=True)


@gluon_jit
def _store_operand(values, tile):
    """Store a tile to shared memory for later products. No product may still read the tile."""
    tile.store(values)
    fence()
    barrier()


@gluon_jit
def _load_piece(start, strides, piece, n, m, SIDE: gl.constexpr, WIDTH: gl.constexpr,
                layout: gl.constexpr):
    """Load a piece of a matrix, with zeros beyond the edges."""
    address, inside = _addresses_of(start, strides, piece, n, m, SIDE, WIDTH, layout)
    return gl.load(address, mask=inside, other=0.0)


@gluon_jit
def _to_fp32(u):
    """Convert to fp32, through an identity that the compiler cannot see through: the compiler then
    keeps the 16-bit registers between uses, not fp32 copies.
    """
    EACH: gl.constexpr = 32 // u.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [u], u.dtype, False,
                                     EACH).to(gl.float32)


@gluon_jit
def _addresses_of(start, strides, piece, n, m, SIDE: gl.constexpr, WIDTH: gl.constexpr,
                  layout: gl.constexpr):
    """Return the addresses of a piece's elements, and which of them are inside the matrix."""
    row = gl.arange(0, SIDE, layout=gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))[None, :] + piece * WIDTH
    address = start + row.to(gl.int64) * strides[1] + column.to(gl.int64) * strides[2]
    return address, (row < n) & (column < m)


@gluon_jit
def _identity_times(value, like):
    """Return value I, in the layout of `like`."""
    r, s = index_grid(like)
    return gl.where(r == s, value, 0.0)

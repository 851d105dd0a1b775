"""Batched products for the Newton-Schulz iterations: X X^T, products of symmetric matrices, and A X.

Decides: how a product is computed and rounded. A symmetric result is computed in one triangle and mirrored, where more
is read than that, so it is exactly symmetric; the Gram iteration loses accuracy where it is not. The result for one
matrix does not depend, in any bit, on the batch that it is in: no atomics, no split sums, and launch choices that agree
in every bit. Must not know: what the products are used for.
"""
from __future__ import annotations

import torch

from . import gram_sm90, jit, launches, look, tiles, use_triton
from .gram_torch import gram_torch, product_torch, symmetric_product_torch
from .split import Split, memory_of, rows_at, strides_of
from .tape import knows_triton, ones

tl = None  # Triton's language, put here by jit
SIDE = 64  # of a tile of `linear`
RAW_SIDES = range(129, 1024)  # short sides of matrices that gain by being cast late, and few kernels more (docs/log.md)


def gram(X: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Write X X^T to out, of every matrix times its scale; where that is negative, nothing.

    X (N, n, m) in fp16, bf16 or fp32, any strides; out (N, n, n), any strides, sharing no memory with X; scales (N,) in
    fp32, None for 1. Sums in fp32, rounded once.
    """
    if use_triton(X.device):
        return _launch("gram", X, X.mT, out, more=scales)
    return gram_torch(X, out, scales)


def symmetric_product(A, B, out, alpha=1.0, addends=(), diagonal=0.0, whole=True) -> torch.Tensor:
    """Write alpha A B + sum of beta C over addends (C, beta) + diagonal I to out, for symmetric A and B that commute.

    All (N, n, n), any strides; at most three addends, symmetric too, of which only the lower triangles count. out may
    be an addend; it shares no memory with A or B. Sums and the rest in fp32, rounded once. Not `whole`: where products
    of such matrices `read_triangles`, what only they read of out need be written.
    """
    if use_triton(A.device):  # kernels take one addend or more
        return _launch("symmetric", A, B, out, addends or [(A, 0.0)], (alpha, diagonal), whole)
    return symmetric_product_torch(A, B, out, alpha, addends, diagonal)


def read_triangles(*matrices: torch.Tensor) -> bool:
    """Say whether symmetric products of these (N, n, n) alike, with addends, read no squares above the diagonal."""
    if not use_triton(matrices[0].device) or not gram_sm90.addressable(*matrices):
        return False
    A = matrices[0]
    tile = tiles.choose("symmetric", A.dtype, A.shape[1], A.shape[2], A.device, A.shape[0])
    return tile.columns > tile.inner and _is_single("symmetric", A, tile)


def product(A: torch.Tensor, X: torch.Tensor, out: torch.Tensor | Split, scales: torch.Tensor | None = None,
            powers: torch.Tensor | None = None) -> torch.Tensor | Split:
    """Write A X to out, every X times its scale.

    A (N, n, n), X (N, n, m); out (N, n, m) of any dtype and strides (a transposed view too), sharing no memory with
    them; scales (N,) in fp32, None for 1. Sums in fp32, rounded once.

    powers (N,) in fp32, with scales: X is in another dtype than A, by these it is multiplied before it is cast. In
    Triton X must be one that it `takes_raw` and `takes_in_place`; out lies alike.
    """
    if use_triton(A.device):
        return _launch("product", A, X, out, more=scales if powers is None else (scales, powers))
    if powers is not None:
        X = (X.float() * powers.view(-1, 1, 1)).to(A.dtype)
    return product_torch(A, X, out, 1.0 if scales is None else scales.view(-1, 1, 1))


def takes_raw(U: torch.Tensor | Split, dtype: torch.dtype) -> bool:
    """Say whether `gram` takes matrices like U (N, n, m) as they are, and `product` casts them to `dtype`: nothing
    else decides, so that the bits of a matrix do not depend on where it lies, nor on its batch.
    """
    if not use_triton(U.device) or (U.dtype, dtype) != (torch.bfloat16, torch.float16) or U.shape[1] not in RAW_SIDES:
        return False
    return tiles.architecture(U.device.type, U.device.index) == "sm90" and knows_triton()


def takes_in_place(U: torch.Tensor | Split) -> bool:
    """Say whether raw matrices are taken where they lie: rows apart from each other, where TMA can address them."""
    apart = U.stride(1) >= U.shape[2] and U.stride(0) >= U.shape[1] * U.stride(1)
    return apart and gram_sm90.addressable(U)


def linear(A: torch.Tensor, b: float, a: float, out: torch.Tensor) -> torch.Tensor:
    """Write b A + a I to out, which may be A: (N, n, n), any strides."""
    if not use_triton(A.device):
        torch.mul(A, b, out=out).diagonal(dim1=1, dim2=2).add_(a)
        return out
    N, n, _ = A.shape
    _linear_kernel.launch(N * (-(-n // SIDE)) ** 2, look(A, out), A, out, n, A.stride(), out.stride(), float(b),
                          float(a), SIDE)
    return out


_before = 1  # the direction of the launch before
_known: dict = {}  # what decides about a launch -> the tile, or what is bound


def _launch(op, A, B, out, addends=(), factors=(1.0, 0.0), more=None):
    """Choose kernel and tile, once per kind of input, and launch. `more`: the scales, None for 1; of a symmetric
    product whether it need be whole.
    """
    if out.numel() == 0:
        return out
    columns_of_b = B.mT if op == "gram" else B  # a symmetric B holds its columns as rows
    key = (op, tiles.forced(), factors[1] != 0.0, A is B, look(A, B, out, *(C for C, _ in addends)))
    if more is None:
        more = ones(len(A), A.device)
    known = _known.get(key)
    if known is None:
        known = _known[key] = _choose(op, A, columns_of_b, out, addends, factors)
    if isinstance(known, gram_sm90.TmaLaunch):
        known(A, columns_of_b, out, addends, factors, more, _direction(op))
    else:
        _launch_by_pointers(key, known, (A, B, out), addends, factors, more)
    return out


def _direction(op) -> int:
    """Say where a launch begins: with the first matrix, 1, or the last, -1. It is where the one before has ended, whose
    results are in the cache still. X is written from the first matrix on, if not by a product.
    """
    global _before
    _before = -1 if op == "gram" else -_before
    return _before


def _choose(op, A, columns_of_b, out, addends, factors):
    """A tile for `_launch_by_pointers`, or a bound launch by TMA."""
    if A.dtype != columns_of_b.dtype:
        return launches.Raw(A, columns_of_b, out)
    (N, rows, columns), inner = out.shape, A.shape[2]
    shape = op, A.dtype, rows, inner if op == "gram" else columns, out.device, N
    tile = tiles.choose(*shape)
    if tile.loop == "pointers":
        return tile
    by_tma = [A, columns_of_b, *(C for C, _ in addends), *([out] if op != "product" else [])]
    if not gram_sm90.addressable(*by_tma):
        return tiles.DEFAULT
    if tile.loop in tiles.SPECIALISED and not (knows_triton() and (op != "product" or gram_sm90.stores(out))):
        tile = gram_sm90.POINTERS if tiles.forced() else tiles.choose(*shape, without=tiles.SPECIALISED)
    kind = launches.Cooperative if tile.loop == "cooperative" else gram_sm90.TmaLaunch
    if _is_single(op, A, tile):
        kind = launches.Single
    return kind(op, A, columns_of_b, out, addends, factors, tile)


def _is_single(op, A, tile) -> bool:
    return launches.Single.takes(op, A, tile) and knows_triton()


def _launch_by_pointers(key, tile, matrices, addends, factors, more):
    op, (A, B, out), scales = key[0], matrices, more if isinstance(more, torch.Tensor) else None
    (N, rows, columns), inner = out.shape, A.shape[2]
    down, across = -(-rows // tile.rows), -(-columns // tile.columns)
    count = down * across if op == "product" else down * (down + 1) // 2
    (C, beta), (D, delta), (E, epsilon) = (*addends, *3 * [(None, 0.0)])[:3]
    strides = [strides_of(t) if t is not None else (0, 0, 0) for t in (A, B, C, D, E, out)]
    _product_kernel.launch(
        N * count, (tile, key), A, B, C, D, E, memory_of(out), scales, *strides, (rows, columns, inner),
        (*factors, beta, delta, epsilon), op != "product", inner % tile.inner == 0, out.stride(2) != 1, tile.rows,
        tile.columns, tile.inner, tile.group, num_stages=tile.stages, num_warps=tile.warps)


@jit
def _product_kernel(A, B, C, D, E, OUT, scales, a_strides, b_strides, c_strides, d_strides, e_strides, out_strides,
                    sizes, factors, SYMMETRIC: tl.constexpr, EVEN: tl.constexpr, TURNED: tl.constexpr,
                    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """OUT = alpha A B + beta C + delta D + epsilon E + diagonal I, or with scales alpha from them; offsets of matrices
    and rows are 64 bit. Without out_strides OUT is a table (split.py), TURNED: of columns.
    """
    rows, columns, inner = sizes
    alpha, diagonal, beta, delta, epsilon = factors
    matrix, i, j = _tile_of(rows, columns, SYMMETRIC, BLOCK_R, BLOCK_C, GROUP)
    if scales is not None:
        alpha = tl.load(scales + matrix)
        if SYMMETRIC:
            there = alpha < 0
            alpha = alpha * alpha
    r = i * BLOCK_R + tl.arange(0, BLOCK_R)
    c = j * BLOCK_C + tl.arange(0, BLOCK_C)
    k = tl.arange(0, BLOCK_K)
    # rows beyond the edge wrap round: they are read, multiplied and never stored
    a = A + matrix * a_strides[0] + (r % rows).to(tl.int64)[:, None] * a_strides[1] + k[None, :] * a_strides[2]
    b = B + matrix * b_strides[0] + (c % columns).to(tl.int64)[None, :] * b_strides[2]
    b += k.to(tl.int64)[:, None] * b_strides[1]
    sums = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for first in range(0, inner, BLOCK_K):
        if EVEN:
            left, right = tl.load(a), tl.load(b)
        else:
            left = tl.load(a, mask=k[None, :] < inner - first, other=0.0)
            right = tl.load(b, mask=k[:, None] < inner - first, other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        a += BLOCK_K * a_strides[2]
        b += tl.full((), BLOCK_K, tl.int64) * b_strides[1]
    if out_strides is None and TURNED:
        out = rows_at(OUT, matrix, columns, c, c < columns)[None, :]
    elif out_strides is None:
        out = rows_at(OUT, matrix, rows, r, r < rows)[:, None]
    r, c = r.to(tl.int64)[:, None], c.to(tl.int64)[None, :]
    inside = (r < rows) & (c < columns)
    if scales is not None and SYMMETRIC:
        inside = inside & (there == 0)
    if C is not None:
        addend = tl.load(C + matrix * c_strides[0] + r * c_strides[1] + c * c_strides[2], mask=inside, other=0.0)
        sums = tl.fma(sums, alpha, beta * addend.to(tl.float32))
    else:
        sums *= alpha
    if D is not None:
        addend = tl.load(D + matrix * d_strides[0] + r * d_strides[1] + c * d_strides[2], mask=inside, other=0.0)
        sums += delta * addend.to(tl.float32)
    if E is not None:
        addend = tl.load(E + matrix * e_strides[0] + r * e_strides[1] + c * e_strides[2], mask=inside, other=0.0)
        sums += epsilon * addend.to(tl.float32)
    if SYMMETRIC and i == j:
        down, across = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_C)[None, :]
        sums += tl.where(down == across, diagonal, 0.0)
        sums = tl.where(down >= across, sums, tl.trans(sums))
    result = sums.to(OUT.dtype.element_ty)
    if out_strides is None:
        tl.store(out + (r if TURNED else c), result, mask=inside)
    else:
        out = OUT + matrix * out_strides[0]
        tl.store(out + r * out_strides[1] + c * out_strides[2], result, mask=inside)
    if SYMMETRIC and i != j:
        tl.store(out + c * out_strides[1] + r * out_strides[2], result, mask=inside)


@jit
def _tile_of(rows, columns, SYMMETRIC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr):
    """Return this program's (matrix, tile row, tile column): the lower triangle row by row, or GROUP rows at a time."""
    program = tl.program_id(0)
    down = tl.cdiv(rows, BLOCK_R)
    if SYMMETRIC:
        count = down * (down + 1) // 2
        tile = program % count
        i = ((tl.sqrt((8 * tile + 1).to(tl.float32)) - 1) * 0.5).to(tl.int32)
        i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)  # the square root may be one off
        i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
        j = tile - i * (i + 1) // 2
    else:
        across = tl.cdiv(columns, BLOCK_C)
        count = down * across
        tile = program % count
        first = tile // (GROUP * across) * GROUP
        size = min(down - first, GROUP)
        within = tile % (GROUP * across)
        i = first + within % size
        j = within // size
    return (program // count).to(tl.int64), i, j


@jit
def _linear_kernel(A, OUT, n, a_strides, out_strides, b, a, SIDE: tl.constexpr):
    """One tile per program."""
    down = tl.cdiv(n, SIDE)
    matrix, tile = (tl.program_id(0) // (down * down)).to(tl.int64), tl.program_id(0) % (down * down)
    r = (tile // down * SIDE + tl.arange(0, SIDE)).to(tl.int64)[:, None]
    c = (tile % down * SIDE + tl.arange(0, SIDE)).to(tl.int64)[None, :]
    inside = (r < n) & (c < n)
    values = tl.load(A + matrix * a_strides[0] + r * a_strides[1] + c * a_strides[2], mask=inside, other=0.0)
    result = b * values.to(tl.float32) + tl.where(r == c, a, 0.0)
    at = OUT + matrix * out_strides[0] + r * out_strides[1] + c * out_strides[2]
    tl.store(at, result.to(OUT.dtype.element_ty), mask=inside)

"""Products on NVIDIA GPUs from sm90 on: the tensor memory accelerator (TMA) fetches and stores tiles.

Decides: what TMA can address, the order of tiles, and how programs take turns. Must not know: what the products are
used for, nor other architectures: gram.py calls it.
"""
from __future__ import annotations

import functools

import torch

from . import jit

tl = None  # Triton's language, put here by jit
SQUARE = 8  # squares of 8 x 8 tiles are visited one after another, so that their operands stay in the cache


def addressable(*tensors: torch.Tensor) -> bool:
    """Say whether TMA can address 3-D tensors: columns side by side, rows and matrices at multiples of 16 bytes."""
    return all(t.stride(2) == 1 and t.data_ptr() % 16 == 0
               and all(step * t.element_size() % 16 == 0 for step in t.stride()[:2]) for t in tensors)


def launch(A, B, out, C, factors, tile, symmetric) -> None:
    """Write factors[0] A B + factors[1] C + factors[2] I to out, batched.

    A (N, R, K) and C (N, R, R) addressable, in fp16 or bf16. With `symmetric`, B (N, K, R) is the transpose of an
    addressable tensor or symmetric, and so is the result; else B (N, K, C) is addressable. out (N, R, C):
    addressable, or a transposed view of what is, or anything (then it is stored by pointers).
    """
    (N, rows, columns), inner = out.shape, A.shape[2]
    down, across, ratio = -(-rows // tile.rows), -(-columns // tile.columns), tile.columns // tile.rows
    order, count = _order(down, across, ratio if symmetric else 0, out.device)
    programs = N * count if tile.loop == "once" else min(N * count, _processors(out.device))
    half = tile.rows if symmetric else tile.columns
    store = "pointers" if out.element_size() != 2 else "straight" if addressable(out) else \
        "flipped" if addressable(out.mT) else "pointers"
    stored = {"straight": (out, tile.rows, half), "flipped": (out.mT, half, tile.rows), "pointers": (A, 16, 16)}
    a = _describe(A, tile.rows, tile.inner)
    b = _describe(B.mT, tile.columns, tile.inner) if symmetric else _describe(B, tile.inner, tile.columns)
    c = _describe(A if C is None else C, tile.rows, half)
    _kernel[(programs,)](
        a, b, c, _describe(*stored[store]), out, out.stride(), order, count, N * count, (rows, columns, inner), factors,
        SYMMETRIC=symmetric, STORE=store, SCALE=factors[0] != 1.0, ADD=C is not None, DIAGONAL=factors[2] != 0.0,
        BLOCK_R=tile.rows, BLOCK_C=tile.columns, BLOCK_K=tile.inner, LOOP=tile.loop,
        num_stages=tile.stages, num_warps=tile.warps)


def _describe(tensor, rows, columns):
    """A descriptor for boxes of (rows, columns) in one matrix of `tensor`."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, rows, columns])


@functools.cache
def _processors(device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache(maxsize=1024)
def _order(down, across, ratio, device):
    """(tile row, tile column) of every tile on the device, and their number; of a symmetric result those of the lower
    triangle, whose tiles are `ratio` times as wide as high (0: all tiles)."""
    tiles = [(i, j) for i in range(down) for j in range(across) if not ratio or j * ratio <= i]
    tiles.sort(key=lambda tile: (tile[0] // SQUARE, tile[1] // SQUARE, tile[1], tile[0]))
    return torch.tensor(tiles, dtype=torch.int32).to(device), len(tiles)


@jit
def _kernel(a, b, c, out, pointer, strides, order, count, total, sizes, factors, SYMMETRIC: tl.constexpr,
            STORE: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr, DIAGONAL: tl.constexpr, BLOCK_R: tl.constexpr,
            BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, LOOP: tl.constexpr):
    """Tiles in turns; without turns, one tile each."""
    if LOOP == "once":
        matrix, i, j = _tile(order, count, tl.program_id(0))
        sums = _sums(a, b, matrix, i, j, sizes[2], SYMMETRIC, BLOCK_R, BLOCK_C, BLOCK_K)
        _finish(sums, c, out, pointer, strides, matrix, i, j, sizes, factors, SYMMETRIC, STORE, SCALE, ADD, DIAGONAL,
                BLOCK_R, BLOCK_C, False)
    else:
        for turn in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=LOOP == "flat"):
            matrix, i, j = _tile(order, count, turn)
            sums = _sums(a, b, matrix, i, j, sizes[2], SYMMETRIC, BLOCK_R, BLOCK_C, BLOCK_K)
            _finish(sums, c, out, pointer, strides, matrix, i, j, sizes, factors, SYMMETRIC, STORE, SCALE, ADD,
                    DIAGONAL, BLOCK_R, BLOCK_C, LOOP == "flat")


@jit
def _tile(order, count, turn):
    """Return (matrix, tile row, tile column)."""
    tile = order + turn % count * 2
    return turn // count, tl.load(tile), tl.load(tile + 1)


@jit
def _sums(a, b, matrix, i, j, inner, ROWS_OF_B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
          BLOCK_K: tl.constexpr):
    """Return the tile's sums of products in fp32; beyond the edges TMA reads zeros."""
    sums = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for k in range(0, inner, BLOCK_K):
        left = a.load([matrix, i * BLOCK_R, k]).reshape(BLOCK_R, BLOCK_K)
        if ROWS_OF_B:
            right = b.load([matrix, j * BLOCK_C, k]).reshape(BLOCK_C, BLOCK_K).T
        else:
            right = b.load([matrix, k, j * BLOCK_C]).reshape(BLOCK_K, BLOCK_C)
        sums = tl.dot(left, right, sums)
    return sums


@jit
def _finish(sums, c, out, pointer, strides, matrix, i, j, sizes, factors, SYMMETRIC: tl.constexpr, STORE: tl.constexpr,
            SCALE: tl.constexpr, ADD: tl.constexpr, DIAGONAL: tl.constexpr, BLOCK_R: tl.constexpr,
            BLOCK_C: tl.constexpr, STRAIGHT: tl.constexpr):
    """Add what is to be added, round, and store."""
    TYPE: tl.constexpr = pointer.dtype.element_ty
    if SCALE:
        sums *= factors[0]
    if SYMMETRIC and BLOCK_C == 2 * BLOCK_R:
        left, right = tl.split(tl.permute(tl.reshape(sums, (BLOCK_R, 2, BLOCK_R)), (0, 2, 1)))
        _finish_square(left, c, out, matrix, i, 2 * j, sizes[0], factors, ADD, DIAGONAL, BLOCK_R, TYPE, STRAIGHT)
        _finish_square(right, c, out, matrix, i, 2 * j + 1, sizes[0], factors, ADD, DIAGONAL, BLOCK_R, TYPE, STRAIGHT)
    elif SYMMETRIC:
        _finish_square(sums, c, out, matrix, i, j, sizes[0], factors, ADD, DIAGONAL, BLOCK_R, TYPE, STRAIGHT)
    elif STORE == "straight":
        out.store([matrix, i * BLOCK_R, j * BLOCK_C], sums.to(TYPE).reshape(1, BLOCK_R, BLOCK_C))
    elif STORE == "flipped":
        out.store([matrix, j * BLOCK_C, i * BLOCK_R], sums.to(TYPE).T.reshape(1, BLOCK_C, BLOCK_R))
    else:
        r = (i * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
        s = (j * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
        at = pointer + matrix.to(tl.int64) * strides[0] + r * strides[1] + s * strides[2]
        tl.store(at, sums.to(TYPE), mask=(r < sizes[0]) & (s < sizes[1]))


@jit
def _finish_square(sums, c, out, matrix, i, j, rows, factors, ADD: tl.constexpr, DIAGONAL: tl.constexpr,
                   BLOCK: tl.constexpr, TYPE: tl.constexpr, STRAIGHT: tl.constexpr):
    """Store a square on or below the diagonal, and its mirror image. What is not wanted goes beyond the edge, where
    TMA stores nothing: a loop with an `if` would not be pipelined from one tile to the next (STRAIGHT).
    """
    r, s = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    if ADD:
        sums += factors[1] * c.load([matrix, i * BLOCK, j * BLOCK]).reshape(BLOCK, BLOCK).to(tl.float32)
    if DIAGONAL:
        sums += tl.where((i == j) & (r == s), factors[2], 0.0)
    result = sums.to(TYPE)
    flipped = result.T
    if STRAIGHT:
        result = tl.where((i == j) & (r < s), flipped, result)
    elif i == j:
        result = tl.where(r < s, flipped, result)
    nowhere = rows + BLOCK
    out.store([matrix, tl.where(j <= i, i * BLOCK, nowhere), j * BLOCK], result.reshape(1, BLOCK, BLOCK))
    out.store([matrix, tl.where(j < i, j * BLOCK, nowhere), i * BLOCK], flipped.reshape(1, BLOCK, BLOCK))

"""Products through TMA on sm90, tile by tile in a loop; bound launches of them."""
from __future__ import annotations

import torch

from ..backend import has_pdl
from ..elementwise.row_scattered import ScatteredRows, memory_of, rows_at, strides_of
from ..launch.jit import descriptor_template, jit, make_descriptor, with_tensor
from ..launch.tile_config import Tile
from ..launch.tile_scheduler import schedule_tiles
from .sm90_warp_specialized import pingpong_kernel

tl = None  # Triton's language, put here by jit

# X X^T sums the same products in the same order on both sides
SYMMETRY = {"product": 0, "gram": 1, "symmetric": 2}
# Where the result is stored by pointers, which takes more memory
POINTERS = Tile(128, 128, 64, 8, 3, 4, "once")
NONE = 0.0, 0.0, 0.0  # factors of addends that are not there


def addressable(*tensors: torch.Tensor) -> bool:
    """Say whether TMA can address 3-D tensors: columns side by side, rows and matrices at multiples
    of 16 bytes.
    """
    return all(t.stride(2) == 1 and t.data_ptr() % 16 == 0 and
               all(step * t.element_size() % 16 == 0 for step in t.stride()[:2]) for t in tensors)


def stores(out: torch.Tensor | ScatteredRows) -> bool:
    """Say whether TMA can store a result in `out`, or its transpose."""
    return out.element_size() == 2 and addressable(out if out.stride(2) == 1 else out.mT)


def gains_by_pdl(op, A) -> bool:
    """Say whether kernels of many turns are launched to begin early. They end all at once, so that
    one like it gains nothing, and symmetric products come one after another; others follow
    sm90_one_tile.py's.
    """
    return has_pdl(A.device) and op != "symmetric"


class TmaLaunch:
    """A product of tensors of certain shapes, strides and dtypes: everything about its launch but
    their addresses.

    Writes factors[0] A B + addends + factors[1] I to out, batched; of "gram" and "product"
    factors[0] is made of each matrix's scale. A and B, in fp16 or bf16, and the addends are
    addressable, a symmetric out too. A (N, R, K); out (N, R, C), of a "product" anything. "gram"
    and "symmetric": B (N, R, K) holds the columns of the second factor as its rows. "product": B is
    (N, K, C), A symmetric, out perhaps a Split.
    """

    def __init__(self, op, A, B, out, addends, factors, tile):
        symmetric, self.turned = op != "product", op == "product" and out.stride(2) != 1
        A, B, out = self._straightened(A, B, out)
        self.straight = symmetric or stores(out)
        narrow = isinstance(out, ScatteredRows) and out.element_size() == 2
        tile = tile if self.straight or narrow else POINTERS
        (rows, columns), inner = out.shape[1:], A.shape[1 if self.turned else 2]
        half, describe = (tile.rows if symmetric else tile.columns), _description
        wide = not symmetric and tile.columns > tile.rows and tile.loop != "once"
        self.programs, self.order, self.count, *places = schedule_tiles(op, out, inner, tile, wide)
        # With a diagonal, which is 0 with some: one kernel less
        several = len(addends) > 1 or factors[1] != 0.0
        self.pdl = gains_by_pdl(op, A)
        # Fused multiply-adds, which depend on the tile, give other bits
        self.options = {"num_stages": tile.stages, "num_warps": tile.warps, "launch_pdl": self.pdl,
                        "enable_fp_fusion": False}
        if tile.loop == "pingpong":
            self.kernel, self.strides, describe = pingpong_kernel, (), make_descriptor
            self.numbers = *places, inner, len(addends)
            self.constants = SYMMETRY[op], self.turned, several, tile.stages
        else:
            self.kernel, self.strides = _tma_kernel, (strides_of(out),)
            self.numbers = *places, (rows, columns, inner)
            self.constants = SYMMETRY[op], self.turned, len(addends), several, tile.loop, self.pdl
        left = (tile.inner, tile.rows) if self.turned else (tile.rows, tile.inner)
        right = (tile.columns, tile.inner) if symmetric else (tile.inner, tile.columns)
        self.left = descriptor_template(describe(A, *left))
        self.right = descriptor_template(describe(B, *right))
        beside = [(C, tile.rows, half) for C, _ in addends]
        if wide:
            beside = [(B, tile.inner, tile.columns // 2),
                      (out, tile.rows, tile.columns // 2)][:1 + self.straight]
        self.beside = [descriptor_template(describe(*box)) for box in beside]
        self.result = descriptor_template(describe(out, tile.rows, half)) if self.straight else None
        halved = _of_halves(A, out, addends) if tile.loop == "pingpong" else ()
        self.halves = [descriptor_template(describe(t, tile.rows // 2, tile.inner)) for t in halved]

    def __call__(self, A, B, out, addends, factors, more, direction) -> None:
        """more, direction: see api.py; a result that need not be whole is so here nevertheless."""
        A, B, out = self._straightened(A, B, out)
        result = with_tensor(self.result, out) if self.straight else None
        beside = [C for C, _ in addends] or [B, out]
        # What is more is unused
        beside = [with_tensor(blank, t) for blank, t in zip(self.beside, beside)] + 3 * [result]
        halved = _of_halves(A, out, addends)
        halves = [with_tensor(blank, t) for blank, t in zip(self.halves, halved)]
        self.kernel.launch(self.programs, self, with_tensor(self.left, A),
                           with_tensor(self.right, B), *beside[:3], result, *halves,
                           *((memory_of(out), *self.strides) if self.strides else ()), self.order,
                           direction * self.count, *self.numbers, self._scales(more),
                           (*factors, *(beta for _, beta in addends), *NONE[len(addends):]),
                           *self.constants, **self.options)

    def _scales(self, more):
        """What a launch takes for them; symmetric products do not look there."""
        return more if isinstance(more, torch.Tensor) else self.order

    def _straightened(self, A, B, out):
        """What is multiplied and stored: the transpose, B^T A, into what is a transposed view."""
        return (B, A, out.mT) if self.turned else (A, B, out)


def _of_halves(A, out, addends):
    """The tensors of which sm90_warp_specialized.py takes halves of tiles, too."""
    return A, *three(addends, out), out


def three(addends, out):
    """The addends' tensors; out in place of one that is not there."""
    return ([C for C, _ in addends] + 3 * [out])[:3]


def _description(tensor, rows, columns):
    """A descriptor for boxes of (rows, columns) in one matrix, checked."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, rows, columns])


@jit.unspecialized("count", "whole", "halves")
def _tma_kernel(a, b, c, d, e, out, pointer, strides, order, count, whole, halves, sizes, scales,
                factors, SYMMETRIC: tl.constexpr, TURNED: tl.constexpr, ADDENDS: tl.constexpr,
                DIAGONAL: tl.constexpr, LOOP: tl.constexpr, PDL: tl.constexpr):
    """`whole` tiles in turns, then left and right `halves` of the rest (tiles.divide); without
    turns, one tile each.

    SYMMETRIC: 1 for a result that is so in every bit, 2 for one that is made so, and scaled; c, d,
    e: addends; c and d of a product in wide tiles: b and out by half a tile's columns. count: see
    `path_of` of sm90_pipeline.py.
    """
    BLOCK_R: tl.constexpr = a.block_type.shape[2 if TURNED else 1]
    BLOCK_C: tl.constexpr = b.block_type.shape[1 if SYMMETRIC else 2]
    if PDL:
        tl.extra.cuda.gdc_wait()
    if LOOP == "once":
        matrix, i, j = _tile(order, count, whole, tl.program_id(0))
        own = _factors_of(factors, scales, matrix, SYMMETRIC)
        sums = _sums(a, b, matrix, i, j, sizes[2], SYMMETRIC, TURNED)
        if SYMMETRIC:
            _finish_symmetric(sums, (c, d, e), out, matrix, i, j, sizes[0], own, SYMMETRIC, ADDENDS,
                              DIAGONAL, False)
        else:
            _finish(sums, own, out, pointer, strides, matrix, i, j, sizes, BLOCK_R, BLOCK_C)
    else:
        for turn in tl.range(tl.program_id(0), whole, tl.num_programs(0), flatten=LOOP == "flat"):
            matrix, i, j = _tile(order, count, whole + halves // 2, turn)
            own = _factors_of(factors, scales, matrix, SYMMETRIC)
            sums = _sums(a, b, matrix, i, j, sizes[2], SYMMETRIC, TURNED)
            if SYMMETRIC:
                _finish_symmetric(sums, (c, d, e), out, matrix, i, j, sizes[0], own, SYMMETRIC,
                                  ADDENDS, DIAGONAL, True)
            else:
                _finish(sums, own, out, pointer, strides, matrix, i, j, sizes, BLOCK_R, BLOCK_C)
        if SYMMETRIC == 0 and BLOCK_C > BLOCK_R:
            if tl.program_id(0) < halves:
                matrix, i, j = _tile(order, count, whole + halves // 2,
                                     whole + tl.program_id(0) // 2)
                j = 2 * j + tl.program_id(0) % 2
                own = _factors_of(factors, scales, matrix, SYMMETRIC)
                sums = _sums(a, c, matrix, i, j, sizes[2], False, TURNED)
                _finish(sums, own, d, pointer, strides, matrix, i, j, sizes, BLOCK_R, BLOCK_C // 2)


@jit
def _tile(order, count, tiles, turn):
    """Return (matrix, tile row, tile column)."""
    matrix, tile = turn // tl.abs(count), order + turn % tl.abs(count) * 2
    return tl.where(count < 0, tiles // tl.abs(count) - 1 - matrix,
                    matrix), tl.load(tile), tl.load(tile + 1)


@jit
def _factors_of(factors, scales, matrix, SYMMETRIC: tl.constexpr):
    """Those of a matrix: of X X^T and A X its scale, for X that is yet to be scaled."""
    if SYMMETRIC < 2:
        scale = tl.load(scales + matrix)
        factors = (scale * scale if SYMMETRIC == 1 else scale, 0.0, scale)
    return factors


@jit
def _sums(a, b, matrix, i, j, inner, ROWS_OF_B: tl.constexpr, TURNED: tl.constexpr):
    """Return the tile's sums of products in fp32; beyond the edges TMA reads zeros."""
    BLOCK_R: tl.constexpr = a.block_type.shape[2 if TURNED else 1]
    BLOCK_K: tl.constexpr = a.block_type.shape[1 if TURNED else 2]
    BLOCK_C: tl.constexpr = b.block_type.shape[1 if ROWS_OF_B else 2]
    sums = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for k in range(0, inner, BLOCK_K):
        if TURNED:
            left = a.load([matrix, k, i * BLOCK_R]).reshape(BLOCK_K, BLOCK_R).T
        else:
            left = a.load([matrix, i * BLOCK_R, k]).reshape(BLOCK_R, BLOCK_K)
        if ROWS_OF_B:
            right = b.load([matrix, j * BLOCK_C, k]).reshape(BLOCK_C, BLOCK_K).T
        else:
            right = b.load([matrix, k, j * BLOCK_C]).reshape(BLOCK_K, BLOCK_C)
        sums = tl.dot(left, right, sums)
    return sums


@jit
def _finish(sums, factors, out, pointer, strides, matrix, i, j, sizes, BLOCK_R: tl.constexpr,
            BLOCK_C: tl.constexpr):
    """Scale, round and store a tile of a rectangular result: by TMA, or by pointers where TMA
    cannot address it and there is no `out`; without strides by a table of rows (row_scattered.py).
    """
    result = (sums * factors[0]).to(pointer.dtype.element_ty)
    if out is not None:
        out.store([matrix, i * BLOCK_R, j * BLOCK_C], result.reshape(1, BLOCK_R, BLOCK_C))
    else:
        r = (i * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
        s = (j * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
        if strides is None:
            line = i * BLOCK_R + tl.arange(0, BLOCK_R)
            at = rows_at(pointer, matrix.to(tl.int64), sizes[0], line, line < sizes[0])[:, None] + s
        else:
            at = pointer + matrix.to(tl.int64) * strides[0] + r * strides[1] + s * strides[2]
        tl.store(at, result, mask=(r < sizes[0]) & (s < sizes[1]))


@jit
def _finish_symmetric(sums, addends, out, matrix, i, j, rows, factors, SYMMETRIC: tl.constexpr,
                      ADDENDS: tl.constexpr, DIAGONAL: tl.constexpr, LOOPED: tl.constexpr):
    """Finish a tile of a symmetric result, square by square; of X X^T whose scale is negative,
    where nothing is.
    """
    BLOCK: tl.constexpr = sums.shape[0]
    if SYMMETRIC == 1:
        matrix = tl.where(factors[2] < 0, 1 << 30, matrix)
    if sums.shape[1] == BLOCK:
        _finish_square(sums, addends, out, matrix, i, j, rows, factors, SYMMETRIC, ADDENDS,
                       DIAGONAL, LOOPED)
    else:
        left, right = tl.split(tl.permute(tl.reshape(sums, (BLOCK, 2, BLOCK)), (0, 2, 1)))
        _finish_square(left, addends, out, matrix, i, 2 * j, rows, factors, SYMMETRIC, ADDENDS,
                       DIAGONAL, LOOPED)
        _finish_square(right, addends, out, matrix, i, 2 * j + 1, rows, factors, SYMMETRIC, ADDENDS,
                       DIAGONAL, LOOPED)


@jit
def _finish_square(sums, addends, out, matrix, i, j, rows, factors, SYMMETRIC: tl.constexpr,
                   ADDENDS: tl.constexpr, DIAGONAL: tl.constexpr, LOOPED: tl.constexpr):
    """Store a square on or below the diagonal, and its mirror image. What is not wanted goes beyond
    the edge, where TMA stores nothing: a loop with an `if` would not be pipelined from one tile to
    the next (LOOPED).
    """
    BLOCK: tl.constexpr = sums.shape[0]
    r, s = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    if ADDENDS > 0:
        addend = addends[0].load([matrix, i * BLOCK, j * BLOCK]).reshape(BLOCK,
                                                                         BLOCK).to(tl.float32)
        sums = tl.fma(sums, factors[0], factors[2] * addend)
    else:
        sums *= factors[0]
    if ADDENDS > 1:
        addend = addends[1].load([matrix, i * BLOCK, j * BLOCK])
        sums += factors[3] * addend.reshape(BLOCK, BLOCK).to(tl.float32)
    if ADDENDS > 2:
        addend = addends[2].load([matrix, i * BLOCK, j * BLOCK])
        sums += factors[4] * addend.reshape(BLOCK, BLOCK).to(tl.float32)
    if DIAGONAL:
        sums += tl.where((i == j) & (r == s), factors[1], 0.0)
    result = sums.to(out.dtype)
    flipped = result.T
    if SYMMETRIC == 2 and LOOPED:
        result = tl.where((i == j) & (r < s), flipped, result)
    elif SYMMETRIC == 2:
        if i == j:
            result = tl.where(r < s, flipped, result)
    nowhere = rows + BLOCK
    out.store([matrix, tl.where(j <= i, i * BLOCK, nowhere), j * BLOCK],
              result.reshape(1, BLOCK, BLOCK))
    out.store([matrix, tl.where(j < i, j * BLOCK, nowhere), i * BLOCK],
              flipped.reshape(1, BLOCK, BLOCK))

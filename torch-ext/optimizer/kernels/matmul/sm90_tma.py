"""GEMMs by TMA descriptors for sm90 and newer in Triton, a tile per program or persistent; launches
of kernels that use TMA.

`_tma_kernel` computes all three products of api.py. `TmaLaunch` binds a launch of `_tma_kernel` or
of `pingpong_kernel` (sm90_warp_specialized.py).
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..backend import has_pdl
from ..elementwise.row_scattered import ScatteredRows, memory_of, rows_at, strides_of
from ..launch.jit import descriptor_template, jit, make_descriptor, with_tensor
from ..launch.tile_config import Tile
from ..launch.tile_scheduler import schedule_tiles
from .sm90_warp_specialized import pingpong_kernel

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor

tl = None  # Triton's language, put here by jit

# The constexpr SYMMETRIC of kernels. "gram" is symmetric in every bit, since X X^T sums equal
# products in equal order on both sides of the diagonal; a "symmetric" result is made symmetric.
SYMMETRY = {"product": 0, "gram": 1, "symmetric": 2}
# Fits shared memory also if the result is stored by pointers, which takes more of it
POINTER_STORE_TILE = Tile(128, 128, 64, 8, 3, 4, "once")
NO_FACTORS = 0.0, 0.0, 0.0  # Factors of missing addends


def is_addressable(*tensors: torch.Tensor) -> bool:
    """Whether TMA can address these 3-D tensors: contiguous columns; rows, matrices and the first
    element at multiples of 16 bytes.
    """
    return all(t.stride(2) == 1 and t.data_ptr() % 16 == 0 and
               all(step * t.element_size() % 16 == 0 for step in t.stride()[:2]) for t in tensors)


def can_store(out: torch.Tensor | ScatteredRows) -> bool:
    """Whether TMA can store a 16-bit result in `out`, or the transposed result in out^T."""
    return out.element_size() == 2 and is_addressable(out if out.stride(2) == 1 else out.mT)


def use_pdl(op: str, A: torch.Tensor) -> bool:
    """Whether a persistent kernel for `op` is launched by programmatic dependent launch.

    The programs of a persistent kernel end together, so an early start gains nothing after a
    persistent kernel. Symmetric products follow each other; "gram" and "product" follow kernels of
    sm90_one_tile.py.
    """
    return has_pdl(A.device) and op != "symmetric"


class TmaLaunch:
    """A product of tensors of certain shapes, strides and dtypes: everything about the launch but
    addresses.

    Writes factors[0] A B + addends + factors[1] I to `out`, batched; of "gram" and "product"
    factors[0] is made of each matrix's scale. A (N, R, K) and B in fp16 or bf16, and the addends,
    are `is_addressable`, and a symmetric `out`, too. "gram" and "symmetric": B (N, R, K) holds the
    columns of the right factor as rows. "product": B (N, K, C), A symmetric, and `out` (N, R, C)
    may have any layout, or be ScatteredRows.
    """

    def __init__(
        self,
        op: str,
        A: torch.Tensor,
        B: torch.Tensor,
        out: torch.Tensor | ScatteredRows,
        addends: Sequence[tuple[torch.Tensor, float]],
        factors: tuple[float, float],
        tile: Tile,
    ):
        """Bind everything that does not change between launches with such tensors and `tile`."""
        symmetric = op != "product"
        self.turned = not symmetric and out.stride(2) != 1  # Compute the transposed product
        A, B, out = self._as_multiplied(A, B, out)
        self.by_tma = symmetric or can_store(out)  # How the result is stored
        narrow = isinstance(out, ScatteredRows) and out.element_size() == 2
        tile = tile if self.by_tma or narrow else POINTER_STORE_TILE
        rows, columns = out.shape[1:]
        inner = A.shape[1 if self.turned else 2]
        half = tile.rows if symmetric else tile.columns
        # Tiles of the last wave can be halved if a half is no narrower than high
        wide = not symmetric and tile.columns > tile.rows and tile.loop != "once"
        self.programs, self.order, self.count, *places = schedule_tiles(op, out, inner, tile, wide)
        # Several addends imply a diagonal, which may be 0; in pingpong also the reverse, with
        # addends whose factor is 0. A binary less to compile.
        several = len(addends) > 1 or factors[1] != 0.0
        self.pdl = use_pdl(op, A)
        # Without fused multiply-adds: the compiler's choice of them depends on the tile, and so
        # would the bits
        self.options = {"num_stages": tile.stages, "num_warps": tile.warps, "launch_pdl": self.pdl,
                        "enable_fp_fusion": False}
        if tile.loop == "pingpong":
            describe = make_descriptor
            self.kernel = pingpong_kernel
            self.strides = ()
            self.numbers = *places, inner, len(addends)  # places: whole tiles, halves of tiles
            self.constants = SYMMETRY[op], self.turned, several, tile.stages
        else:
            describe = _descriptor
            self.kernel = _tma_kernel
            self.strides = (strides_of(out),)
            self.numbers = *places, (rows, columns, inner)
            self.constants = SYMMETRY[op], self.turned, len(addends), several, tile.loop, self.pdl
        left = (tile.inner, tile.rows) if self.turned else (tile.rows, tile.inner)
        right = (tile.columns, tile.inner) if symmetric else (tile.inner, tile.columns)
        self.left = descriptor_template(describe(A, *left))
        self.right = descriptor_template(describe(B, *right))
        beside = [(C, tile.rows, half) for C, _ in addends]
        if wide:  # Descriptors of half tiles take the place of addends: a product has none
            beside = [(B, tile.inner, tile.columns // 2),
                      (out, tile.rows, tile.columns // 2)][:1 + self.by_tma]
        self.beside = [descriptor_template(describe(*box)) for box in beside]
        self.result = descriptor_template(describe(out, tile.rows, half)) if self.by_tma else None
        halved = _half_tile_tensors(A, out, addends) if tile.loop == "pingpong" else ()
        self.halves = [descriptor_template(describe(t, tile.rows // 2, tile.inner)) for t in halved]

    def __call__(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        out: torch.Tensor | ScatteredRows,
        addends: Sequence[tuple[torch.Tensor, float]],
        factors: tuple[float, float],
        more: torch.Tensor | bool,
        direction: int,
    ) -> None:
        """Launch for tensors of the bound shapes, strides and dtypes. `more`: see `_launch` in
        api.py; a symmetric result is always written whole. direction: see [Note: alternating batch
        direction].
        """
        A, B, out = self._as_multiplied(A, B, out)
        result = with_tensor(self.result, out) if self.by_tma else None
        beside = [C for C, _ in addends] or [B, out]
        # Descriptors that the kernel does not use are filled up with the result's
        beside = [with_tensor(blank, t) for blank, t in zip(self.beside, beside)] + 3 * [result]
        halves = [with_tensor(blank, t)
                  for blank, t in zip(self.halves, _half_tile_tensors(A, out, addends))]
        left, right = with_tensor(self.left, A), with_tensor(self.right, B)
        self.kernel.launch(self.programs, self, left, right, *beside[:3], result, *halves,
                           *((memory_of(out), *self.strides) if self.strides else ()), self.order,
                           direction * self.count, *self.numbers, self._scales(more),
                           (*factors, *(beta for _, beta in addends), *NO_FACTORS[len(addends):]),
                           *self.constants, **self.options)

    def _scales(self, more: torch.Tensor | bool) -> torch.Tensor:
        """The kernel's `scales`. Symmetric products have none, and get any tensor that lasts."""
        return more if isinstance(more, torch.Tensor) else self.order

    def _as_multiplied(
        self, A: torch.Tensor, B: torch.Tensor, out: torch.Tensor | ScatteredRows
    ) -> tuple:
        """The operands and the result of the product that the kernel computes: with self.turned the
        transpose (A B)^T = B^T A, since A is symmetric, into the transpose of `out`.
        """
        return (B, A, out.mT) if self.turned else (A, B, out)


def _half_tile_tensors(
    A: torch.Tensor, out: torch.Tensor, addends: Sequence[tuple[torch.Tensor, float]]
) -> tuple[torch.Tensor, ...]:
    """Tensors of `pingpong_kernel`'s descriptors a_half, c_half, d_half, e_half, out_half."""
    return A, *addend_tensors(addends, out), out


def addend_tensors(
    addends: Sequence[tuple[torch.Tensor, float]], out: torch.Tensor
) -> list[torch.Tensor]:
    """The three addends' tensors; `out` in place of a missing addend."""
    return ([C for C, _ in addends] + 3 * [out])[:3]


def _descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A checked descriptor for boxes of (rows, columns) in a matrix of a 3-D tensor."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, rows, columns])


@jit.unspecialized("count", "whole", "halves")
def _tma_kernel(a, b, c, d, e, out, pointer, strides, order, count, whole, halves, sizes, scales,
                factors, SYMMETRIC: tl.constexpr, TURNED: tl.constexpr, ADDENDS: tl.constexpr,
                DIAGONAL: tl.constexpr, LOOP: tl.constexpr, PDL: tl.constexpr):
    """Write factors[0] A B + addends + factors[1] I to `out`, or to `pointer` with `strides`.

    LOOP: "once" is a tile per program; "turns" and "flat" are persistent, `whole` tiles first, then
    left and right `halves` of the remaining tiles (`divide` in tile_config.py).

    a, b, out: descriptors of operands and result. c, d, e: addends; of a product in wide tiles, c
    and d are b and `out` in boxes of half a tile's columns. pointer, strides: where `out` is None,
    the result or its table of rows (strides None). order: table of tiles; count: tiles per matrix,
    see `matrix_order` in sm90_pipeline.py. sizes: (rows, columns, inner). SYMMETRIC: see SYMMETRY.
    TURNED: a is stored transposed. DIAGONAL: factors[1] may differ from 0.
    """
    BLOCK_R: tl.constexpr = a.block_type.shape[2 if TURNED else 1]
    BLOCK_C: tl.constexpr = b.block_type.shape[1 if SYMMETRIC else 2]
    if PDL:
        tl.extra.cuda.gdc_wait()
    if LOOP == "once":
        matrix, i, j = _tile(order, count, whole, tl.program_id(0))
        matrix_factors = _factors_of(factors, scales, matrix, SYMMETRIC)
        sums = _tile_sums(a, b, matrix, i, j, sizes[2], SYMMETRIC, TURNED)
        if SYMMETRIC:
            _store_symmetric_tile(sums, (c, d, e), out, matrix, i, j, sizes[0], matrix_factors,
                                  SYMMETRIC, ADDENDS, DIAGONAL, False)
        else:
            _store_tile(sums, matrix_factors, out, pointer, strides, matrix, i, j, sizes, BLOCK_R,
                        BLOCK_C)
    else:
        for turn in tl.range(tl.program_id(0), whole, tl.num_programs(0), flatten=LOOP == "flat"):
            matrix, i, j = _tile(order, count, whole + halves // 2, turn)
            matrix_factors = _factors_of(factors, scales, matrix, SYMMETRIC)
            sums = _tile_sums(a, b, matrix, i, j, sizes[2], SYMMETRIC, TURNED)
            if SYMMETRIC:
                _store_symmetric_tile(sums, (c, d, e), out, matrix, i, j, sizes[0], matrix_factors,
                                      SYMMETRIC, ADDENDS, DIAGONAL, True)
            else:
                _store_tile(sums, matrix_factors, out, pointer, strides, matrix, i, j, sizes,
                            BLOCK_R, BLOCK_C)
        if SYMMETRIC == 0 and BLOCK_C > BLOCK_R:
            if tl.program_id(0) < halves:
                matrix, i, j = _tile(order, count, whole + halves // 2,
                                     whole + tl.program_id(0) // 2)
                j = 2 * j + tl.program_id(0) % 2
                matrix_factors = _factors_of(factors, scales, matrix, SYMMETRIC)
                sums = _tile_sums(a, c, matrix, i, j, sizes[2], False, TURNED)
                _store_tile(sums, matrix_factors, d, pointer, strides, matrix, i, j, sizes, BLOCK_R,
                            BLOCK_C // 2)


@jit
def _tile(order, count, tiles, turn):
    """Return (matrix, tile row, tile column) of tile number `turn` of `tiles`."""
    matrix, address = turn // tl.abs(count), order + turn % tl.abs(count) * 2
    return (tl.where(count < 0, tiles // tl.abs(count) - 1 - matrix, matrix), tl.load(address),
            tl.load(address + 1))


@jit
def _factors_of(factors, scales, matrix, SYMMETRIC: tl.constexpr):
    """Return the factors of a matrix: (alpha, diagonal, betas of the addends) as given for
    "symmetric"; (scale^2, 0, scale) for "gram"; (scale, 0, scale) for "product".
    """
    if SYMMETRIC < 2:
        scale = tl.load(scales + matrix)
        factors = (scale * scale if SYMMETRIC == 1 else scale, 0.0, scale)
    return factors


@jit
def _tile_sums(a, b, matrix, i, j, inner, ROWS_OF_B: tl.constexpr, TURNED: tl.constexpr):
    """Return the sums of products of tile (i, j) in fp32. Beyond the edges TMA reads zeros.
    ROWS_OF_B: b holds columns of the right factor as rows.
    """
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
def _store_tile(sums, factors, out, pointer, strides, matrix, i, j, sizes, BLOCK_R: tl.constexpr,
                BLOCK_C: tl.constexpr):
    """Scale, round and store a tile of a rectangular result: by TMA, or by pointers if `out` is
    None; without strides `pointer` is a table of rows (row_scattered.py).
    """
    result = (sums * factors[0]).to(pointer.dtype.element_ty)
    if out is not None:
        out.store([matrix, i * BLOCK_R, j * BLOCK_C], result.reshape(1, BLOCK_R, BLOCK_C))
    else:
        r = (i * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
        s = (j * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
        if strides is None:
            row = i * BLOCK_R + tl.arange(0, BLOCK_R)
            address = rows_at(pointer, matrix.to(tl.int64), sizes[0], row,
                              row < sizes[0])[:, None] + s
        else:
            address = pointer + matrix.to(tl.int64) * strides[0] + r * strides[1] + s * strides[2]
        tl.store(address, result, mask=(r < sizes[0]) & (s < sizes[1]))


@jit
def _store_symmetric_tile(sums, addends, out, matrix, i, j, rows, factors, SYMMETRIC: tl.constexpr,
                          ADDENDS: tl.constexpr, DIAGONAL: tl.constexpr, LOOPED: tl.constexpr):
    """Scale, add, round and store a tile of a symmetric result, square by square.

    A negative scale of "gram" moves the stores to a matrix index beyond the batch, where TMA stores
    nothing: the result stays as before.
    """
    BLOCK: tl.constexpr = sums.shape[0]
    if SYMMETRIC == 1:
        matrix = tl.where(factors[2] < 0, 1 << 30, matrix)
    if sums.shape[1] == BLOCK:
        _store_square(sums, addends, out, matrix, i, j, rows, factors, SYMMETRIC, ADDENDS, DIAGONAL,
                      LOOPED)
    else:
        left, right = tl.split(tl.permute(tl.reshape(sums, (BLOCK, 2, BLOCK)), (0, 2, 1)))
        _store_square(left, addends, out, matrix, i, 2 * j, rows, factors, SYMMETRIC, ADDENDS,
                      DIAGONAL, LOOPED)
        _store_square(right, addends, out, matrix, i, 2 * j + 1, rows, factors, SYMMETRIC, ADDENDS,
                      DIAGONAL, LOOPED)


@jit
def _store_square(sums, addends, out, matrix, i, j, rows, factors, SYMMETRIC: tl.constexpr,
                  ADDENDS: tl.constexpr, DIAGONAL: tl.constexpr, LOOPED: tl.constexpr):
    """Scale, add, round and store a square on or below the diagonal, and the transposed square.

    Unwanted squares (above the diagonal; the transpose of a square on the diagonal) are stored
    beyond the edge, where TMA stores nothing: a loop with an `if` would not be pipelined from tile
    to tile. LOOPED: whether the caller is such a loop.
    """
    BLOCK: tl.constexpr = sums.shape[0]
    r, s = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    if ADDENDS > 0:
        addend = addends[0].load([matrix, i * BLOCK, j * BLOCK])
        addend = addend.reshape(BLOCK, BLOCK).to(tl.float32)
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
    outside = rows + BLOCK
    out.store([matrix, tl.where(j <= i, i * BLOCK, outside), j * BLOCK],
              result.reshape(1, BLOCK, BLOCK))
    out.store([matrix, tl.where(j < i, j * BLOCK, outside), i * BLOCK],
              flipped.reshape(1, BLOCK, BLOCK))

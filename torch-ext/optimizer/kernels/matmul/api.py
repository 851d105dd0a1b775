"""Batched products of the Newton-Schulz iteration, and the choice of kernel and tile for each.

`gram`: A = X X^T. `symmetric_product`: products of commuting symmetric matrices with addends.
`product`: A X.
"""

from __future__ import annotations

import torch

from ..backend import use_triton
from ..elementwise.row_scattered import ScatteredRows, memory_of, strides_of
from ..launch import jit, tile_config
from ..launch.jit import descriptor_template, launch_key, with_tensor
from ..launch.replay import knows_triton, unit_scales
from ..launch.tile_config import Tile, architecture
from ..launch.tile_scheduler import schedule_tiles
from . import sm90_tma
from .pointer import _linear_kernel, _product_kernel
from .reference import gram_torch, product_torch, symmetric_product_torch
from .sm90_mixed_input import raw_kernel
from .sm90_one_tile import single_kernel
from .sm90_tma import NONE, SYMMETRY, TmaLaunch, gains_by_pdl, three
from .sm90_warp_specialized import cooperative_kernel

SIDE = 64  # of a tile of `linear`
# Short sides of matrices that gain by being cast late, and few kernels more (docs/log.md)
RAW_SIDES = range(129, 1024)


def gram(X: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Write X X^T to out, of every matrix times its scale; where that is negative, nothing.

    X (N, n, m) in fp16, bf16 or fp32, any strides; out (N, n, n), any strides, sharing no memory
    with X; scales (N,) in fp32, None for 1. Sums in fp32, rounded once.
    """
    if use_triton(X.device):
        return _launch("gram", X, X.mT, out, more=scales)
    return gram_torch(X, out, scales)


def symmetric_product(A, B, out, alpha=1.0, addends=(), diagonal=0.0, whole=True) -> torch.Tensor:
    """Write alpha A B + sum of beta C over addends (C, beta) + diagonal I to out, for symmetric A
    and B that commute.

    All (N, n, n), any strides; at most three addends, symmetric too, of which only the lower
    triangles count. out may be an addend; it shares no memory with A or B. Sums and the rest in
    fp32, rounded once. Not `whole`: where products of such matrices `read_triangles`, what only
    they read of out need be written.
    """
    if use_triton(A.device):  # kernels take one addend or more
        return _launch("symmetric", A, B, out, addends or [(A, 0.0)], (alpha, diagonal), whole)
    return symmetric_product_torch(A, B, out, alpha, addends, diagonal)


def read_triangles(*matrices: torch.Tensor) -> bool:
    """Say whether symmetric products of these (N, n, n) alike, with addends, read no squares above
    the diagonal.
    """
    if not use_triton(matrices[0].device) or not sm90_tma.addressable(*matrices):
        return False
    A = matrices[0]
    tile = tile_config.choose("symmetric", A.dtype, A.shape[1], A.shape[2], A.device, A.shape[0])
    return tile.columns > tile.inner and _is_single("symmetric", A, tile)


def product(
    A: torch.Tensor,
    X: torch.Tensor,
    out: torch.Tensor | ScatteredRows,
    scales: torch.Tensor | None = None,
    powers: torch.Tensor | None = None,
) -> torch.Tensor | ScatteredRows:
    """Write A X to out, every X times its scale.

    A (N, n, n), X (N, n, m); out (N, n, m) of any dtype and strides (a transposed view too),
    sharing no memory with them; scales (N,) in fp32, None for 1. Sums in fp32, rounded once.

    powers (N,) in fp32, with scales: X is in another dtype than A, by these it is multiplied before
    it is cast. In Triton X must be one that it `takes_raw` and `takes_in_place`; out lies alike.
    """
    if use_triton(A.device):
        return _launch("product", A, X, out, more=scales if powers is None else (scales, powers))
    if powers is not None:
        X = (X.float() * powers.view(-1, 1, 1)).to(A.dtype)
    return product_torch(A, X, out, 1.0 if scales is None else scales.view(-1, 1, 1))


def takes_raw(U: torch.Tensor | ScatteredRows, dtype: torch.dtype) -> bool:
    """Say whether `gram` takes matrices like U (N, n, m) as they are, and `product` casts them to
    `dtype`: nothing else decides, so that the bits of a matrix do not depend on where it lies, nor
    on its batch.
    """
    if (
        not use_triton(U.device)
        or (U.dtype, dtype) != (torch.bfloat16, torch.float16)
        or U.shape[1] not in RAW_SIDES
    ):
        return False
    return tile_config.architecture(U.device.type, U.device.index) == "sm90" and knows_triton()


def takes_in_place(U: torch.Tensor | ScatteredRows) -> bool:
    """Say whether raw matrices are taken where they lie: rows apart from each other, where TMA can
    address them.
    """
    apart = U.stride(1) >= U.shape[2] and U.stride(0) >= U.shape[1] * U.stride(1)
    return apart and sm90_tma.addressable(U)


def linear(A: torch.Tensor, b: float, a: float, out: torch.Tensor) -> torch.Tensor:
    """Write b A + a I to out, which may be A: (N, n, n), any strides."""
    if not use_triton(A.device):
        torch.mul(A, b, out=out).diagonal(dim1=1, dim2=2).add_(a)
        return out
    N, n, _ = A.shape
    _linear_kernel.launch(
        N * (-(-n // SIDE)) ** 2,
        launch_key(A, out),
        A,
        out,
        n,
        A.stride(),
        out.stride(),
        float(b),
        float(a),
        SIDE,
    )
    return out


_before = 1  # the direction of the launch before
_known: dict = {}  # what decides about a launch -> the tile, or what is bound


def _launch(op, A, B, out, addends=(), factors=(1.0, 0.0), more=None):
    """Choose kernel and tile, once per kind of input, and launch. `more`: the scales, None for 1;
    of a symmetric product whether it need be whole.
    """
    if out.numel() == 0:
        return out
    columns_of_b = B.mT if op == "gram" else B  # a symmetric B holds its columns as rows
    key = (
        op,
        tile_config.forced(),
        factors[1] != 0.0,
        A is B,
        launch_key(A, B, out, *(C for C, _ in addends)),
    )
    if more is None:
        more = unit_scales(len(A), A.device)
    known = _known.get(key)
    if known is None:
        known = _known[key] = _choose(op, A, columns_of_b, out, addends, factors)
    if isinstance(known, sm90_tma.TmaLaunch):
        known(A, columns_of_b, out, addends, factors, more, _direction(op))
    else:
        _launch_by_pointers(key, known, (A, B, out), addends, factors, more)
    return out


def _direction(op) -> int:
    """Say where a launch begins: with the first matrix, 1, or the last, -1. It is where the one
    before has ended, whose results are in the cache still. X is written from the first matrix on,
    if not by a product.
    """
    global _before
    _before = -1 if op == "gram" else -_before
    return _before


def _choose(op, A, columns_of_b, out, addends, factors):
    """A tile for `_launch_by_pointers`, or a bound launch by TMA."""
    if A.dtype != columns_of_b.dtype:
        return Raw(A, columns_of_b, out)
    (N, rows, columns), inner = out.shape, A.shape[2]
    shape = op, A.dtype, rows, inner if op == "gram" else columns, out.device, N
    tile = tile_config.choose(*shape)
    if tile.loop == "pointers":
        return tile
    by_tma = [A, columns_of_b, *(C for C, _ in addends), *([out] if op != "product" else [])]
    if not sm90_tma.addressable(*by_tma):
        return tile_config.DEFAULT
    if tile.loop in tile_config.SPECIALISED and not (
        knows_triton() and (op != "product" or sm90_tma.stores(out))
    ):
        tile = (
            sm90_tma.POINTERS
            if tile_config.forced()
            else tile_config.choose(*shape, without=tile_config.SPECIALISED)
        )
    kind = Cooperative if tile.loop == "cooperative" else sm90_tma.TmaLaunch
    if _is_single(op, A, tile):
        kind = Single
    return kind(op, A, columns_of_b, out, addends, factors, tile)


def _is_single(op, A, tile) -> bool:
    return Single.takes(op, A, tile) and knows_triton()


def _launch_by_pointers(key, tile, matrices, addends, factors, more):
    op, (A, B, out), scales = key[0], matrices, more if isinstance(more, torch.Tensor) else None
    (N, rows, columns), inner = out.shape, A.shape[2]
    down, across = -(-rows // tile.rows), -(-columns // tile.columns)
    count = down * across if op == "product" else down * (down + 1) // 2
    (C, beta), (D, delta), (E, epsilon) = (*addends, *3 * [(None, 0.0)])[:3]
    strides = [strides_of(t) if t is not None else (0, 0, 0) for t in (A, B, C, D, E, out)]
    _product_kernel.launch(
        N * count,
        (tile, key),
        A,
        B,
        C,
        D,
        E,
        memory_of(out),
        scales,
        *strides,
        (rows, columns, inner),
        (*factors, beta, delta, epsilon),
        op != "product",
        inner % tile.inner == 0,
        out.stride(2) != 1,
        tile.rows,
        tile.columns,
        tile.inner,
        tile.group,
        num_stages=tile.stages,
        num_warps=tile.warps,
    )


# Elements of a sum up to which the next kernel begins early after small tiles (docs/log.md)
SHORT = 256
# Of sm90_mixed_input.py: for many tiles, for few
RAW = [Tile(128, columns, 64, 8, 4, 4, "cooperative") for columns in (256, 128)]
# Rows of tiles up to which their order matters less than the time until it is read (docs/log.md)
FEW = 12


class OfGluon(TmaLaunch):
    """The same by a Gluon kernel: `kernel`, told `_tensors` by the descriptors `blanks`, by `table`
    the order of tiles, if it is to be told that, their `count`, `numbers` and `constants`, and
    where it `mirrors` only what need be whole, whether the result need be.
    """

    mirrors = False

    def __call__(self, A, B, out, addends, factors, more, direction) -> None:
        tensors = self._tensors(*self._straightened(A, B, out), addends)
        told = (int(more is not False),) if self.mirrors else ()
        self.kernel.launch(
            self.programs,
            self,
            *map(with_tensor, self.blanks, tensors),
            self.table,
            direction * self.count,
            *self.numbers,
            *told,
            self._scales(more),
            (*factors, *(beta for _, beta in addends), *NONE[len(addends) :]),
            *self.constants,
            num_warps=4,
            enable_fp_fusion=False,
            launch_pdl=self.pdl,
        )


class Cooperative(OfGluon):
    """The same by sm90_warp_specialized.py; of a "product" TMA can store the result."""

    kernel = cooperative_kernel

    def __init__(self, op, A, B, out, addends, factors, tile):
        symmetric, self.turned = op != "product", op == "product" and out.stride(2) != 1
        self.pdl = gains_by_pdl(op, A)
        # Squares on the diagonal are rows times themselves
        same = op == "gram" or symmetric and A is B
        A, B, out = self._straightened(A, B, out)
        inner = B.shape[2 if symmetric else 1]
        self.programs, self.order, self.count, *places = schedule_tiles(
            op, out, inner, tile, paired=same
        )
        self.table, self.numbers = self.order, (*places, inner, len(addends))
        several = len(addends) > 1 or factors[1] != 0.0
        self.constants = SYMMETRY[op], self.turned, several, tile.rows, tile.columns, tile.stages
        side, step = tile.rows // 2, tile.inner
        left, right = (tile.rows, step), [(tile.columns, step), (tile.columns // 2, step)]
        boxes = [
            left[::-1] if self.turned else left,
            *(box if symmetric else box[::-1] for box in right),
        ]
        blanks = zip(self._tensors(A, B, out, addends), boxes + 4 * [(side, side)])
        self.blanks = [descriptor_template(jit.make_descriptor(t, *box)) for t, box in blanks]

    @staticmethod
    def _tensors(A, B, out, addends):
        return A, B, B, *three(addends, out), out


class Single(OfGluon):
    """The same by sm90_one_tile.py; of what it `takes`."""

    kernel, turned, pdl, mirrors = single_kernel, False, True, True

    @staticmethod
    def takes(op, A, tile) -> bool:
        """Say whether so many addends can arrive in a ring that so many steps fill."""
        shape = tile.rows, tile.columns, tile.inner, tile.warps
        on_sm90 = architecture(A.device.type, A.device.index) == "sm90"  # others have no wgmma
        return (
            on_sm90
            and tile.loop == "once"
            and op != "product"
            and shape in ((64, 64, 64, 4), (64, 128, 64, 4), (128, 128, 64, 4))
            and tile.stages >= 3
            and A.shape[2] > (tile.stages - 2) * tile.inner
        )

    def __init__(self, op, A, B, out, addends, factors, tile):
        inner = A.shape[2]
        self.programs, self.order, self.count, _, _ = schedule_tiles(op, out, inner, tile)
        short = inner <= SHORT and tile.columns == 64
        self.table = None if out.shape[1] <= FEW * tile.rows else self.order
        self.numbers = inner, len(addends), int(short)
        self.constants = SYMMETRY[op], tile.columns, tile.stages
        whole = [(tile.rows, tile.inner), (tile.columns, tile.inner)]
        # One form for rows and what mirrors them
        operands = whole if op == "gram" else 2 * [(tile.inner, tile.inner)]
        boxes = operands + 4 * [(tile.rows, tile.rows)]
        self.blanks = [
            descriptor_template(jit.make_descriptor(t, *box))
            for t, box in zip(self._tensors(A, B, out, addends), boxes)
        ]

    @staticmethod
    def _tensors(A, B, out, addends):
        return A, B, *three(addends, out), out


class Raw(TmaLaunch):
    """A X for X that is yet to be cast, by sm90_mixed_input.py; `more`: scales and powers. Tiles
    are of the transposed result.
    """

    def __init__(self, A, X, out):
        for tile in RAW:
            self.programs, self.order, self.count, *places = schedule_tiles(
                "product", out.mT, A.shape[2], tile
            )
            if places[0]:  # else all tiles are halved
                break
        self.numbers, self.stages = (*places, A.shape[2]), tile.stages
        half = tile.rows // 2, tile.columns // 2
        boxes = (
            (tile.inner, tile.rows),
            (tile.inner, tile.columns),
            (tile.inner, half[1]),
            (half[0], half[0]),
        )
        self.blanks = [
            descriptor_template(jit.make_descriptor(t, *box))
            for t, box in zip((X, A, A, out), boxes)
        ]
        self.pdl = gains_by_pdl("product", A)

    def __call__(self, A, X, out, addends, factors, more, direction) -> None:
        raw_kernel.launch(
            self.programs,
            self,
            *map(with_tensor, self.blanks, (X, A, A, out)),
            self.order,
            direction * self.count,
            *self.numbers,
            *more,
            self.stages,
            num_warps=4,
            enable_fp_fusion=False,
            launch_pdl=self.pdl,
        )

"""Batched products of the Newton-Schulz iteration: choice of kernel and tile, and launch.

`gram` computes A = X X^T, `symmetric_product` products of commuting symmetric matrices with
addends, `product` A X, `linear` b A + a I. Without Triton, reference.py computes all four.
With Triton, each call goes to a kernel of:

- pointer.py: any architecture, dtype and strides.
- sm90_tma.py: operands by TMA descriptors, sm90 and newer.
- sm90_warp_specialized.py: pingpong and cooperative warpgroups, sm90.
- sm90_one_tile.py: a tile of a symmetric result per CTA, sm90.
- sm90_mixed_input.py: A X for X in bf16 and A in fp16, sm90.

The tile table (launch/tile_config.py) names the kernel of a shape. All kernels sum in the order of
the inner dimension and round once, so the bits of a matrix depend neither on the kernel nor on the
batch. A Launch object holds everything about a launch but addresses, and is made once per shape,
strides and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from .sm90_mixed_input import mixed_input_kernel
from .sm90_one_tile import one_tile_kernel
from .sm90_tma import NO_FACTORS, SYMMETRY, TmaLaunch, addend_tensors, use_pdl
from .sm90_warp_specialized import cooperative_kernel

LINEAR_TILE = 64  # rows and columns of a tile of `linear`
# Short sides for which casting inside the first A X beats casting beforehand (docs/log.md).
# A range, not a measurement at run time: all ranks must decide alike.
MIXED_INPUT_SIDES = range(129, 1024)


def gram(X: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Write scale^2 X X^T of every matrix to `out`, and return `out`.

    X (N, n, m) in fp16, bf16 or fp32, any strides. out (N, n, n), any strides, sharing no memory
    with X; exactly symmetric. scales (N,) in fp32, None for 1: a negative scale leaves the matrix
    in `out` as it was. Sums in fp32, scaled, then rounded once.
    """
    if use_triton(X.device):
        return _launch("gram", X, X.mT, out, more=scales)
    return gram_torch(X, out, scales)


def symmetric_product(
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor,
    alpha: float = 1.0,
    addends: Sequence[tuple[torch.Tensor, float]] = (),
    diagonal: float = 0.0,
    whole: bool = True,
) -> torch.Tensor:
    """Write alpha A B + sum of beta C over addends (C, beta) + diagonal I to `out`, and return
    `out`. A and B are symmetric and commute, so the result is symmetric.

    All matrices (N, n, n), any strides. At most three addends, symmetric too; only their lower
    triangles are read. `out` may be an addend, but shares no memory with A or B. Sums, addends and
    diagonal in fp32, rounded once; the result is exactly symmetric.

    `whole=False` permits a kernel to leave the tiles above the diagonal of `out` unwritten. Allowed
    if `read_triangles` is true of these matrices and only symmetric products read `out`.
    """
    if use_triton(A.device):
        # Kernels of symmetric products add one addend or more: A with factor 0 if there is none
        return _launch("symmetric", A, B, out, addends or [(A, 0.0)], (alpha, diagonal), whole)
    return symmetric_product_torch(A, B, out, alpha, addends, diagonal)


def read_triangles(*matrices: torch.Tensor) -> bool:
    """Whether symmetric products with addends of these (N, n, n) matrices, alike in shape and
    dtype, read no tile above the diagonal.

    True only if sm90_one_tile.py computes the products, with tiles wider than a K step.
    """
    if not use_triton(matrices[0].device) or not sm90_tma.is_addressable(*matrices):
        return False
    A = matrices[0]
    tile = tile_config.choose("symmetric", A.dtype, A.shape[1], A.shape[2], A.device, A.shape[0])
    return tile.columns > tile.inner and _is_one_tile("symmetric", A, tile)


def product(
    A: torch.Tensor,
    X: torch.Tensor,
    out: torch.Tensor | ScatteredRows,
    scales: torch.Tensor | None = None,
    powers: torch.Tensor | None = None,
) -> torch.Tensor | ScatteredRows:
    """Write A (scale X) of every matrix to `out`, and return `out`. A is symmetric.

    A (N, n, n), X (N, n, m). out (N, n, m) of any dtype and strides (a transposed view too), apart
    from A and X. scales (N,) in fp32, None for 1. Sums in fp32, scaled, then rounded once.

    powers (N,) in fp32, only together with scales: X has another dtype than A, and each X is
    multiplied by its power before the cast to A's dtype. In Triton `supports_mixed_input` and
    `supports_in_place` must be true of X, and `supports_in_place` of out.
    """
    if use_triton(A.device):
        return _launch("product", A, X, out, more=scales if powers is None else (scales, powers))
    if powers is not None:
        X = (X.float() * powers.view(-1, 1, 1)).to(A.dtype)
    return product_torch(A, X, out, 1.0 if scales is None else scales.view(-1, 1, 1))


def supports_mixed_input(U: torch.Tensor | ScatteredRows, dtype: torch.dtype) -> bool:
    """Whether `gram` multiplies matrices like U (N, n, m) uncast, and `product` casts them to
    `dtype` on the fly.

    Depends on dtypes, short side, GPU and Triton only. Batch, long side and memory layout must not
    count, or a matrix would have other bits on another rank.
    """
    if (
        not use_triton(U.device)
        or (U.dtype, dtype) != (torch.bfloat16, torch.float16)
        or U.shape[1] not in MIXED_INPUT_SIDES
    ):
        return False
    return tile_config.architecture(U.device.type, U.device.index) == "sm90" and knows_triton()


def supports_in_place(U: torch.Tensor | ScatteredRows) -> bool:
    """Whether U (N, n, m) is multiplied uncast without a copy: rows do not overlap, and TMA can
    address all of U.
    """
    apart = U.stride(1) >= U.shape[2] and U.stride(0) >= U.shape[1] * U.stride(1)
    return apart and sm90_tma.is_addressable(U)


def linear(A: torch.Tensor, b: float, a: float, out: torch.Tensor) -> torch.Tensor:
    """Write b A + a I to `out`, and return `out`. (N, n, n), any strides; `out` may be A."""
    if not use_triton(A.device):
        torch.mul(A, b, out=out).diagonal(dim1=1, dim2=2).add_(a)
        return out
    N, n, _ = A.shape
    _linear_kernel.launch(
        N * (-(-n // LINEAR_TILE)) ** 2,
        launch_key(A, out),
        A,
        out,
        n,
        A.stride(),
        out.stride(),
        float(b),
        float(a),
        LINEAR_TILE,
    )
    return out


# Batch direction of the last launch by TMA: 1 from the first matrix on, -1 from the last one on
_last_direction = 1
# Key of `_launch` -> the tile of a launch by pointers, or a Launch object
_known: dict[tuple, Tile | TmaLaunch] = {}


def _launch(
    op: str,
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor | ScatteredRows,
    addends: Sequence[tuple[torch.Tensor, float]] = (),
    factors: tuple[float, float] = (1.0, 0.0),
    more: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | bool | None = None,
) -> torch.Tensor | ScatteredRows:
    """Launch a product and return `out`; kernel and tile are chosen once per kind of input.

    op: "gram", "symmetric" or "product". factors: (alpha, diagonal). more: of "gram" and "product"
    the scales (None for 1) or (scales, powers), of "symmetric" whether `out` must be whole.
    """
    if out.numel() == 0:
        return out
    # Launches want the columns of a symmetric product's second factor as rows: B itself
    columns_of_b = B.mT if op == "gram" else B
    # `look`: the properties that a compiled kernel depends on: dtype, device, shape, strides,
    # alignment. Values of factors are arguments; only whether there is a diagonal selects a kernel.
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


def _direction(op: str) -> int:
    """The batch direction of the next launch: 1 from first to last matrix, -1 from last to first.

    [Note: alternating batch direction] The matrices that a launch has written last are still in the
    L2 cache. Directions alternate, so the next launch begins with the cached matrices. X X^T always
    begins with the last matrix, because kernels that write X (norms, copies) end with the last one.
    """
    global _last_direction
    _last_direction = -1 if op == "gram" else -_last_direction
    return _last_direction


def _choose(
    op: str,
    A: torch.Tensor,
    columns_of_b: torch.Tensor,
    out: torch.Tensor | ScatteredRows,
    addends: Sequence[tuple[torch.Tensor, float]],
    factors: tuple[float, float],
) -> Tile | TmaLaunch:
    """The tile for `_launch_by_pointers`, or the Launch object of a kernel that uses TMA."""
    if A.dtype != columns_of_b.dtype:
        return MixedInputLaunch(A, columns_of_b, out)
    N, rows, columns = out.shape
    inner = A.shape[2]
    shape = op, A.dtype, rows, inner if op == "gram" else columns, out.device, N
    tile = tile_config.choose(*shape)
    if tile.loop == "pointers":
        return tile
    # The result of "product" may have any layout; without TMA stores it is written by pointers
    by_tma = [A, columns_of_b, *(C for C, _ in addends), *([out] if op != "product" else [])]
    if not sm90_tma.is_addressable(*by_tma):
        return tile_config.DEFAULT
    # Warp-specialized kernels need Gluon, and store by TMA only
    if tile.loop in tile_config.SPECIALISED and not (
        knows_triton() and (op != "product" or sm90_tma.can_store(out))
    ):
        tile = (
            sm90_tma.POINTER_STORE_TILE
            if tile_config.forced()
            else tile_config.choose(*shape, without=tile_config.SPECIALISED)
        )
    kind = CooperativeLaunch if tile.loop == "cooperative" else sm90_tma.TmaLaunch
    if _is_one_tile(op, A, tile):
        kind = OneTileLaunch
    return kind(op, A, columns_of_b, out, addends, factors, tile)


def _is_one_tile(op: str, A: torch.Tensor, tile: Tile) -> bool:
    """Whether sm90_one_tile.py computes products `op` of matrices like A with this tile."""
    return OneTileLaunch.supports(op, A, tile) and knows_triton()


def _launch_by_pointers(
    key: tuple,
    tile: Tile,
    matrices: tuple,
    addends: Sequence[tuple[torch.Tensor, float]],
    factors: tuple[float, float],
    more: torch.Tensor | bool,
) -> None:
    """Launch the kernel of pointer.py: a CTA per tile. matrices: (A, B, out); more: see `_launch`.
    A symmetric result is always written whole.
    """
    op = key[0]
    A, B, out = matrices
    scales = more if isinstance(more, torch.Tensor) else None
    N, rows, columns = out.shape
    inner = A.shape[2]
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


# Inner dimension up to which the next kernel may begin before small tiles are stored (docs/log.md)
SHORT_SUM = 256
# Tiles of sm90_mixed_input.py: the first for many tiles, the second for few
MIXED_INPUT_TILES = [Tile(128, columns, 64, 8, 4, 4, "cooperative") for columns in (256, 128)]
# Rows of tiles up to which CTAs compute their tile's coordinates. Waiting for a load from the table
# of tiles would cost more than the table's order gains (docs/log.md).
FEW_TILE_ROWS = 12


class GluonLaunch(TmaLaunch):
    """Base of launches of a Gluon kernel for tensors of certain shapes, strides and dtypes.

    Subclasses set: `kernel`; `blanks`, descriptors without addresses, in the order of `_tensors`;
    `table`, the order of tiles or None; `count`, tiles per matrix; `numbers` and `constants`, the
    kernel's integers and constexprs; `takes_mirror`, whether the kernel is told if tiles above the
    diagonal must be written.
    """

    takes_mirror = False

    def __call__(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        out: torch.Tensor,
        addends: Sequence[tuple[torch.Tensor, float]],
        factors: tuple[float, float],
        more: torch.Tensor | bool,
        direction: int,
    ) -> None:
        """Launch for tensors of the bound shapes, strides and dtypes. `more`: see `_launch`;
        direction: see [Note: alternating batch direction].
        """
        tensors = self._tensors(*self._as_multiplied(A, B, out), addends)
        mirror = (int(more is not False),) if self.takes_mirror else ()
        self.kernel.launch(
            self.programs,
            self,
            *map(with_tensor, self.blanks, tensors),
            self.table,
            direction * self.count,
            *self.numbers,
            *mirror,
            self._scales(more),
            (*factors, *(beta for _, beta in addends), *NO_FACTORS[len(addends) :]),
            *self.constants,
            num_warps=4,
            enable_fp_fusion=False,
            launch_pdl=self.pdl,
        )


class CooperativeLaunch(GluonLaunch):
    """A launch of `cooperative_kernel` (sm90_warp_specialized.py). TMA can store the result of a
    "product".
    """

    kernel = cooperative_kernel

    def __init__(
        self,
        op: str,
        A: torch.Tensor,
        B: torch.Tensor,
        out: torch.Tensor,
        addends: Sequence[tuple[torch.Tensor, float]],
        factors: tuple[float, float],
        tile: Tile,
    ):
        """Arguments: see `TmaLaunch`."""
        symmetric = op != "product"
        self.turned = not symmetric and out.stride(2) != 1
        self.pdl = use_pdl(op, A)
        # Of a matrix times itself, two squares on the diagonal are one turn (`tile_order`)
        paired = op == "gram" or symmetric and A is B
        A, B, out = self._as_multiplied(A, B, out)
        inner = B.shape[2 if symmetric else 1]
        self.programs, self.order, self.count, *places = schedule_tiles(
            op, out, inner, tile, paired=paired
        )
        self.table = self.order
        self.numbers = *places, inner, len(addends)  # places: whole tiles, halves of tiles
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
    def _tensors(
        A: torch.Tensor,
        B: torch.Tensor,
        out: torch.Tensor,
        addends: Sequence[tuple[torch.Tensor, float]],
    ) -> tuple[torch.Tensor, ...]:
        """Tensors in the order of the kernel's descriptors a, b, b_half, c, d, e, out."""
        return A, B, B, *addend_tensors(addends, out), out


class OneTileLaunch(GluonLaunch):
    """A launch of `one_tile_kernel` (sm90_one_tile.py), where `supports` is true."""

    kernel = one_tile_kernel
    turned = False
    pdl = True
    takes_mirror = True

    @staticmethod
    def supports(op: str, A: torch.Tensor, tile: Tile) -> bool:
        """Whether `one_tile_kernel` computes products `op` of matrices like A with this tile.

        The kernel loads up to three addends into pipeline stages that no operand needs any more:
        at least three stages are required, and enough K steps to fill all stages but the last.
        """
        shape = tile.rows, tile.columns, tile.inner, tile.warps
        on_sm90 = architecture(A.device.type, A.device.index) == "sm90"  # only sm90 has wgmma
        return (
            on_sm90
            and tile.loop == "once"
            and op != "product"
            and shape in ((64, 64, 64, 4), (64, 128, 64, 4), (128, 128, 64, 4))
            and tile.stages >= 3
            and A.shape[2] > (tile.stages - 2) * tile.inner
        )

    def __init__(
        self,
        op: str,
        A: torch.Tensor,
        B: torch.Tensor,
        out: torch.Tensor,
        addends: Sequence[tuple[torch.Tensor, float]],
        factors: tuple[float, float],
        tile: Tile,
    ):
        """Arguments: see `TmaLaunch`."""
        inner = A.shape[2]
        self.programs, self.order, self.count, _, _ = schedule_tiles(op, out, inner, tile)
        short = inner <= SHORT_SUM and tile.columns == 64
        self.table = None if out.shape[1] <= FEW_TILE_ROWS * tile.rows else self.order
        self.numbers = inner, len(addends), int(short)
        self.constants = SYMMETRY[op], tile.columns, tile.stages
        whole = [(tile.rows, tile.inner), (tile.columns, tile.inner)]
        # Of a symmetric operand, boxes are square: rows and mirrored columns have one descriptor
        operands = whole if op == "gram" else 2 * [(tile.inner, tile.inner)]
        boxes = operands + 4 * [(tile.rows, tile.rows)]
        self.blanks = [
            descriptor_template(jit.make_descriptor(t, *box))
            for t, box in zip(self._tensors(A, B, out, addends), boxes)
        ]

    @staticmethod
    def _tensors(
        A: torch.Tensor,
        B: torch.Tensor,
        out: torch.Tensor,
        addends: Sequence[tuple[torch.Tensor, float]],
    ) -> tuple[torch.Tensor, ...]:
        """Tensors in the order of the kernel's descriptors a, b, c, d, e, out."""
        return A, B, *addend_tensors(addends, out), out


class MixedInputLaunch(TmaLaunch):
    """A launch of `mixed_input_kernel` (sm90_mixed_input.py): A X for X in another dtype than A.

    The kernel computes the transposed result X^T A: tiles are tiles of out^T.
    """

    def __init__(self, A: torch.Tensor, X: torch.Tensor, out: torch.Tensor):
        for tile in MIXED_INPUT_TILES:
            self.programs, self.order, self.count, *places = schedule_tiles(
                "product", out.mT, A.shape[2], tile
            )
            if places[0]:  # Otherwise all tiles are halved: a smaller tile is better
                break
        self.numbers = *places, A.shape[2]  # whole tiles, halves of tiles, inner dimension
        self.stages = tile.stages
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
        self.pdl = use_pdl("product", A)

    def __call__(
        self,
        A: torch.Tensor,
        X: torch.Tensor,
        out: torch.Tensor,
        addends: Sequence[tuple[torch.Tensor, float]],
        factors: tuple[float, float],
        more: tuple[torch.Tensor, torch.Tensor],
        direction: int,
    ) -> None:
        """Launch for tensors of the bound shapes, strides and dtypes. more: (scales, powers), see
        `product`; direction: see [Note: alternating batch direction]. addends, factors: unused.
        """
        mixed_input_kernel.launch(
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

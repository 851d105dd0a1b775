"""Momentum stored in 8-bit blocks: `Pack` and the momentum part of `WeightUpdate` in one class.

Each program reads and writes whole blocks of rows: no more of the momentum than a tile ever exists
in fp32. Views are bound once and called at every step with new gradients, as in
elementwise/momentum.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..backend import use_triton
from ..elementwise.momentum import NESTEROV, MomentumForm, lerp, summed
from ..elementwise.multi_tensor import BLOCK as ELEMENTS_OF_PROGRAM
from ..elementwise.multi_tensor import (
    ELEMENTS,
    NUMBERS,
    VECTORS,
    Launch,
    Skip,
    Source,
    Squares,
    access_of,
    element_pointers,
    gradient_address,
    group_offset,
    groups_of,
    rows_of,
    run,
    skips_of,
    total_square,
    unskipped,
    write_momentum_squares,
)
from ..launch.jit import jit
from .blocks import BLOCK, block_count, dequantize, dequantized_tile, quantize, quantized_tile

tl = None  # Triton's language, put here by jit


@dataclass(frozen=True)
class QuantizedView:
    """The momentum of a rectangle: views of numbers and scales with blocks along the last dim."""

    values: torch.Tensor  # int8 (r, c), from the beginning of a block on
    scales: torch.Tensor  # fp32 (r, blocks)
    transposed: bool = False  # r and c are the columns and the rows of the rectangle


class QuantizedMomentum:
    """Momentum of many rectangles in 8 bits, by the formulas of `Pack`; format: blocks.py."""

    def __init__(
        self,
        M: Sequence[QuantizedView],
        U: Sequence[torch.Tensor] | None,
        sources: Sequence[Source],
        gradients: Sequence[torch.Tensor],
        skip: Skip | None = None,
        groups: Sequence[int] | None = None,
        form: MomentumForm = "ema",
        signs: bool = False,
        squares: Squares | None = None,
    ):
        """Arguments of `Pack`. `U`: None for calls that write M only, in which "bias_corrected" is
        "ema" and `signs` have no effect. Raises NotImplementedError for "feedback", with which M
        depends on O; a new optimizer refuses its rules.
        """
        if form == "feedback":
            raise NotImplementedError(
                "momentum with error feedback, that of rules that orthogonalize a part of each "
                "matrix, is not kept in 8 bits: use state_dtype=torch.bfloat16"
            )
        turned = [m.transposed for m in M]
        self.M = list(M)
        self.U = [u.mT if is_turned else u for u, is_turned in zip(U or (), turned)]
        self.writes_updates = U is not None
        self.sources = [
            Source(s.tensor, s.offset, s.strides[::-1]) if is_turned else s
            for s, is_turned in zip(sources, turned)
        ]
        self.launches = None
        if self.M and use_triton(self.M[0].values.device):
            self.launches = _bind(self.M, self.U, self.sources, gradients)
        self.sums = form == "sum"
        self.corrected = form == "bias_corrected"
        self.signs = signs
        self.group_offsets = [n * NUMBERS for n in groups or [0] * len(self.M)]
        self.groups = groups_of(groups, self.launches)
        self.squares = squares
        device = self.M[0].values.device if self.M else None
        self.rows = rows_of(squares, self.launches, len(self.M), device)
        self.skip = skip
        self.skips = skips_of(skip, self.launches)  # kernel arguments for each launch

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        addresses: torch.Tensor | None,
        weight: torch.Tensor,
        nesterov: bool,
        update_momentum: bool = True,
    ) -> None:
        """Write U, if bound, and with `update_momentum` M. Arguments of `Pack.__call__`.

        U is computed from the new M before it is rounded. Skipped rectangles keep M to the last
        bit, and U gets M.
        """
        if self.launches is None:
            for i in range(len(self.M)):
                self._call_torch(i, tensors, weight, nesterov, update_momentum)
            return
        for launch, (flags, places, skips), (groups, grouped), rows in zip(
            self.launches, self.skips, self.groups, self.rows
        ):
            run(
                _momentum_kernel,
                launch,
                addresses,
                weight,
                flags,
                places,
                groups,
                rows,
                int(update_momentum),
                NESTEROV=nesterov,
                SKIPS=skips,
                GROUPED=grouped,
                SUMS=self.sums,
                CORRECTED=self.corrected,
                SIGNS=self.signs,
                TO_U=self.writes_updates,
                LENGTH=BLOCK,
                COLLECTS=self.squares is not None,
            )

    def clear_sums(self) -> None:
        """Write sums of 0: M is written, and its squares are added up, by another launch."""
        for rows in self.rows if self.squares is not None else ():
            rows.zero_()

    def _call_torch(
        self,
        i: int,
        tensors: Sequence[torch.Tensor],
        weight: torch.Tensor,
        nesterov: bool,
        update_momentum: bool,
    ) -> None:
        """Compute rectangle `i` in torch, with the bits of the kernel."""
        values, scales = self.M[i].values, self.M[i].scales
        old = dequantize(values, scales)
        gradient = self.sources[i].view(tensors, values.shape)
        # 1 - mu, or mu of a sum
        number = weight[self.group_offsets[i] + self.sums]
        add = summed if self.sums else lerp
        new = add(old, gradient, number)
        if self.writes_updates:
            # The weight of G in U
            mix = weight[self.group_offsets[i] + NESTEROV] if self.corrected else number
            update = add(new, gradient, mix) if nesterov else new
            u = self.U[i].copy_(self._unless_skipped(i, update, old))
            if self.signs:
                u.copy_(torch.where(u > 0, 1.0, torch.where(u < 0, -1.0, u)))
        if update_momentum:
            for kept, found in zip((values, scales), quantize(new)):
                kept.copy_(self._unless_skipped(i, found, kept))
        if self.squares is not None:
            stored = dequantize(values, scales)
            write_momentum_squares(self.rows[0][i : i + 1], [stored], update_momentum)

    def _unless_skipped(self, i: int, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """Return `new`, or `old` if rectangle `i` is skipped."""
        return new if self.skip is None else torch.where(self.skip.is_updated(i), new, old)


class UpdateWithMomentum:
    """A weight update beside 8-bit momentum: M is written first, by a launch of its own. No byte
    moves twice: W and O are read by one launch, G and M by the other.
    """

    def __init__(self, update: Callable, momentum: QuantizedMomentum) -> None:
        """`update`: a `WeightUpdate` without momenta, or a rule's counterpart."""
        self.update = update
        self.momentum = momentum

    def __call__(
        self,
        factors: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        addresses: torch.Tensor | None,
        weight: torch.Tensor,
        update_momentum: bool = True,
    ) -> None:
        """Write W and, with `update_momentum`, M. Arguments of `WeightUpdate.__call__`."""
        if update_momentum:
            self.momentum(tensors, addresses, weight, False)
        else:
            self.momentum.clear_sums()
        self.update(factors)


def _bind(
    M: Sequence[QuantizedView],
    U: Sequence[torch.Tensor],
    sources: Sequence[Source],
    gradients: Sequence[torch.Tensor],
) -> list[Launch]:
    """Return tables of rectangles, one for each combination of dtypes. Lists: numbers and scales of
    M, then U if there are any, then gradients; records as in multi_tensor.py.
    """
    groups = defaultdict(list)  # (dtypes, access) -> [(index of the rectangle, record)]
    for origin, (m, source) in enumerate(zip(M, sources)):
        example = gradients[source.tensor]
        tensors = [m.values, *U[origin : origin + 1]]
        assert all(t.shape == m.values.shape for t in tensors), [t.shape for t in tensors]
        if not m.values.numel():
            continue
        fields = [[t.data_ptr(), *t.stride()] for t in tensors]
        fields.append([source.offset * example.element_size(), *source.strides])
        # A row of a tile is a row of vectors: a lone row needs no further access than several
        plain = [*m.values.shape, *(number for field in fields for number in field)]
        access = ELEMENTS if access_of(plain, example.data_ptr()) == ELEMENTS else VECTORS
        fields.insert(1, [m.scales.data_ptr(), *m.scales.stride()])
        record = [*m.values.shape, *(number for field in fields for number in field), source.tensor]
        types = (m.values.dtype, m.scales.dtype, *(t.dtype for t in tensors[1:]), example.dtype)
        groups[types, access].append((origin, record))
    return [_launch(*key, group, M[0].values.device) for key, group in groups.items()]


def _launch(
    types: tuple[torch.dtype, ...],
    access: int,
    group: list[tuple[int, list[int]]],
    device: torch.device,
) -> Launch:
    """Return the table of `group` on `device`; `blocks` counts 8-bit blocks, row by row."""
    each = ELEMENTS_OF_PROGRAM // BLOCK  # 8-bit blocks of a program
    records = torch.tensor([record for _, record in group], dtype=torch.int64, device="cpu")
    counts = (records[:, 0] * block_count(records[:, 1]) + each - 1) // each
    index = torch.repeat_interleave(torch.arange(len(group), device="cpu"), counts)
    place = torch.arange(len(index), device="cpu") - (counts.cumsum(0) - counts)[index]
    blocks = torch.stack((index, place * each), dim=1)
    origins = torch.tensor([origin for origin, _ in group], device="cpu")
    return Launch(types, access, records.to(device), blocks.to(device), origins)


@jit
def _locate_blocks(
    records,
    blocks,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCESS: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Return (record, row, block, column, is_row, inside) of the current program's tile of BLOCK /
    LENGTH 8-bit blocks, each a row of the tile. `is_row`: mask of the blocks that exist.
    """
    entry = blocks + tl.program_id(0).to(tl.int64) * 2
    record = records + tl.load(entry) * FIELDS
    first = tl.load(entry + 1)
    rows = tl.load(record)
    columns = tl.load(record + 1)
    of_row = (columns + (LENGTH - 1)) // LENGTH
    # One division of 64-bit integers for each program
    row = first // of_row
    place = (first - row * of_row).to(tl.int32) + tl.arange(0, BLOCK // LENGTH)[:, None]
    down = place // of_row.to(tl.int32)
    row += down
    block = place - down * of_row.to(tl.int32)
    column = block * LENGTH + tl.arange(0, LENGTH)[None, :]
    is_row = row < rows
    last = columns.to(tl.int32)
    if ACCESS == 1:  # VECTORS: a mask for whole vectors
        last = tl.multiple_of(last, 8)
    return record, row, block, column, is_row, is_row & (column < last)


@jit.unspecialized("update_momentum")
def _momentum_kernel(
    records,
    blocks,
    addresses,
    weight,
    flags,
    places,
    groups,
    squares,
    update_momentum,
    NESTEROV: tl.constexpr,
    SKIPS: tl.constexpr,
    GROUPED: tl.constexpr,
    SUMS: tl.constexpr,
    CORRECTED: tl.constexpr,
    SIGNS: tl.constexpr,
    TO_U: tl.constexpr,
    LENGTH: tl.constexpr,
    COLLECTS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCESS: tl.constexpr,
    TYPE_0: tl.constexpr,
    TYPE_1: tl.constexpr,
    TYPE_2: tl.constexpr,
    TYPE_3: tl.constexpr = None,
):
    """Compute `QuantizedMomentum` for a tile of blocks. Lists of the table: numbers, scales, U if
    TO_U, G. Further arguments as in `_pack_kernel`; CORRECTED and SIGNS concern U.
    """
    record, row, block, column, is_row, inside = _locate_blocks(
        records, blocks, FIELDS, BLOCK, ACCESS, LENGTH
    )
    m_at = element_pointers(record, row, column, 0, TYPE_0, 0, ACCESS)
    s_at = element_pointers(record, row, block, 1, TYPE_1, 0, 0)
    g_base = gradient_address(record, addresses, FIELDS)
    if TO_U:
        g_at = element_pointers(record, row, column, 3, TYPE_3, g_base, ACCESS)
    else:
        g_at = element_pointers(record, row, column, 2, TYPE_2, g_base, ACCESS)
    # 0 beside the matrix: `quantized_tile` takes the largest magnitude of whole blocks
    g = tl.load(g_at, mask=inside, other=0.0).to(tl.float32)
    m = dequantized_tile(tl.load(m_at, mask=inside, other=0), tl.load(s_at, mask=is_row, other=0.0))
    at = weight + group_offset(blocks, groups, GROUPED)
    number = tl.load(at + (1 if SUMS else 0))
    new = m * number + g if SUMS else m + number * (g - m)
    if SKIPS:
        is_row = unskipped(is_row, blocks, flags, places)
    if TO_U:
        u = new
        if NESTEROV:
            mix = tl.load(at + 4) if CORRECTED else number
            u = new * mix + g if SUMS else new + mix * (g - new)
        if SKIPS:
            u = tl.where(is_row, u, m)
        u_at = element_pointers(record, row, column, 2, TYPE_2, 0, ACCESS)
        u = u.to(TYPE_2)
        if SIGNS:
            wide = u.to(tl.float32)
            u = tl.where(wide > 0, 1.0, tl.where(wide < 0, -1.0, wide)).to(TYPE_2)
        tl.store(u_at, u, mask=inside)
    if update_momentum != 0:
        numbers, scales = quantized_tile(new)
        tl.store(m_at, numbers.to(TYPE_0), mask=inside & is_row)
        tl.store(s_at, scales, mask=is_row)
        if COLLECTS:
            kept = tl.where(is_row, dequantized_tile(numbers, scales), m)
            square = total_square(kept, inside, 1)  # 1: a tile of two dims
            tl.store(squares + tl.program_id(0).to(tl.int64) * 3 + 2, square)
    else:
        if COLLECTS:
            tl.store(squares + tl.program_id(0).to(tl.int64) * 3 + 2, 0.0)

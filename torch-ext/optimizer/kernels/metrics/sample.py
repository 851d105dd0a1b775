"""`SampledSquares`: sums of squares of weights, updates and momenta of many tensors that another
library's kernels step, from a sample of their elements.

[Note: sample of a parameter]
Elements have numbers: row-major in the whole parameter, however it is sharded. A stratum is `share`
CHUNKs of consecutive numbers, and one CHUNK of each stratum is read. Its place in the stratum is a
multiplicative hash of the stratum's number (Knuth, TAOCP 3, 6.4): the golden ratio spreads the
places over rows and columns evenly, also where strata repeat with the rows. With share 1 every
element is read.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..backend import use_triton
from ..elementwise.multi_tensor import BLOCK as SLOTS
from ..elementwise.multi_tensor import ELEMENTS, Launch, Squares, run, total_square, write_squares
from ..launch.jit import jit
from ..quantized.adamw import wide_momenta
from ..weights.split import joined_tile, wide_copies, wide_weights

tl = None  # Triton's language, put here by jit

# Elements: 64 bytes of fp32, two sectors of an L2 cache. Larger chunks would meet fewer rows, and
# some rows of an embedding may have far larger squares than others
CHUNK = 16
GOLDEN = 2654435769  # 2^32 divided by the golden ratio, odd; kernels have the number itself
CHUNKS = SLOTS // CHUNK  # of a program
DTYPES = torch.float32, torch.bfloat16, torch.float16  # that the kernels read


@dataclass(frozen=True)
class Region:
    """A rectangle of elements of a contiguous local tensor, and their numbers in the whole
    parameter. Columns follow each other in both.
    """

    rows: int
    cols: int
    at: int  # elements from the local tensor's first element to the rectangle's
    stride: int  # elements from row to row in the local tensor
    first: int  # number of the first element
    step: int  # from the number of an element to that below it
    share: int  # chunks of a stratum: a power of two, at most 32

    @property
    def shift(self) -> int:
        """log2 of the elements of a stratum."""
        return (self.share * CHUNK).bit_length() - 1

    @property
    def strata(self) -> int:
        """Strata that any row has elements of, at most."""
        size = 1 << self.shift
        if self.rows > 1 and self.step % size:
            return (self.cols + size - 2) // size + 1
        return ((self.first + self.cols - 1) >> self.shift) - (self.first >> self.shift) + 1

    @property
    def slots(self) -> int:
        """Elements of memory for the sample."""
        return self.rows * self.strata * CHUNK

    def starts(self) -> torch.Tensor:
        """Return the column of the first element of each chunk, int64 (rows, strata) on the CPU. A
        chunk may begin before the first column, or end behind the last.
        """
        row = torch.arange(self.rows, device="cpu")[:, None]
        first = self.first + row * self.step
        stratum = (first >> self.shift) + torch.arange(self.strata, device="cpu")
        place = (((stratum * GOLDEN) & 0xFFFFFFFF) >> 27) & (self.share - 1)
        return (stratum << self.shift) + place * CHUNK - first

    def count(self) -> int:
        """Return how many elements are read."""
        return _count(self)

    def indices(self) -> torch.Tensor:
        """Return the places of the elements that are read in the local tensor, int64 on the CPU."""
        columns = self.starts()[..., None] + torch.arange(CHUNK, device="cpu")
        rows = torch.arange(self.rows, device="cpu")[:, None, None]
        inside = (columns >= 0) & (columns < self.cols)
        return (self.at + rows * self.stride + columns)[inside]


# A step is bound anew whenever a gradient is missing, and for an embedding the count takes 0.4 s
@functools.lru_cache(maxsize=256)
def _count(region: Region) -> int:
    """Compute `Region.count`."""
    if region.share == 1:
        return region.rows * region.cols
    starts = region.starts()
    ends = (starts + CHUNK).clamp_(0, region.cols)
    return int((ends - starts.clamp_(0, region.cols)).sum())


@dataclass(frozen=True)
class Weights:
    """Weights of some tensors; `rests`: of split weights (kernels/weights), () if none is split."""

    W: Sequence[torch.Tensor]
    rests: Sequence[torch.Tensor] = ()

    def lists(self) -> list[list[torch.Tensor]]:
        """Return the lists of a table; split weights are int16 there."""
        if self.rests:
            return [[w.view(torch.int16) for w in self.W], list(self.rests)]
        return [list(self.W)]

    def part(self, indices: Sequence[torch.Tensor | None]) -> tuple[list, list]:
        """Return (weights, rests) at `indices`, see `_part_of`."""
        return _part_of(self.W, indices), _part_of(self.rests, indices)


class SampledSquares:
    """Sums for `Squares` of tensors, in two launches for each combination of dtypes: one saves old
    weights of the sample, and one adds up after the step. Elements of the sample are read four
    times in all, and written once: 20 bytes in fp32.

    Kernels need contiguous tensors of fp32, bf16 or fp16. torch computes the sums of all other
    tensors, and of momenta in 8 bits.
    """

    def __init__(
        self,
        squares: Squares,
        regions: Sequence[Sequence[Region]],
        old: Weights,
        new: Weights,
        M: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor] = (),
    ) -> None:
        """`squares`: filled by each call, with a rectangle for each tensor. `regions`: of each
        tensor. `old`, `new`: weights before and after the step, the same memory or not. `M`:
        momenta after the step. `scales`: of 8-bit momenta, else (). Tensors at fixed addresses.
        """
        self.old = old
        self.new = new
        self.M = M
        self.scales = scales
        device = M[0].device
        lists = [*old.lists(), *new.lists(), M]
        tensors = [t for some in lists for t in some]
        can_run = all(t.is_contiguous() and t.dtype in (*DTYPES, torch.int16) for t in tensors)
        self.saves = self.adds = None
        self.size = sum(region.slots for some in regions for region in some)
        if can_run and use_triton(device):
            self.saves = _bind(regions, old.lists(), device)
            self.adds = _bind(regions, [*new.lists(), M], device)
        else:
            # None: the tensor is read whole
            self.indices = [
                torch.cat([region.indices() for region in some]).to(device)
                if any(region.share > 1 for region in some)
                else None
                for some in regions
            ]
        self.rows = squares.lay_out(self.adds, len(M), device)

    def save(self) -> torch.Tensor | list[torch.Tensor]:
        """Return copies of the old weights of the sample, for `__call__`; before the step."""
        if self.saves is None:
            return wide_copies(*self.old.part(self.indices))
        saved = torch.empty(self.size, dtype=torch.float32, device=self.M[0].device)
        for launch in self.saves:
            run(_save_kernel, launch, saved, SPLIT=bool(self.old.rests))
        return saved

    def __call__(self, saved: torch.Tensor | list[torch.Tensor]) -> None:
        """Write the sums; after the step. `saved`: of `save`, overwritten."""
        if self.adds is None:
            W, rests = self.new.part(self.indices)
            if self.scales:
                M = wide_momenta(self.M, self.scales, self.indices)
            else:
                M = _part_of(self.M, self.indices)
            return write_squares(*self.rows, saved, wide_weights(W, rests), M)
        for launch, rows in zip(self.adds, self.rows):
            run(_add_kernel, launch, saved, rows, SPLIT=bool(self.new.rests))


def _part_of(
    tensors: Sequence[torch.Tensor], indices: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Return the elements of tensors at `indices`, in row-major order; for None the tensor."""
    return [t if i is None else t.reshape(-1)[i] for t, i in zip(tensors, indices)]


def _bind(
    regions: Sequence[Sequence[Region]],
    lists: Sequence[Sequence[torch.Tensor]],
    device: torch.device,
) -> list[Launch]:
    """Return a table for each combination of dtypes. `lists`: of corresponding tensors.

    Layout of a record (int64): rows, columns, strata of a row, first number, numbers from row to
    row, shift, share - 1, place of the sample in the saved weights, elements from row to row; then
    the address of the rectangle in each list. A block: number of the record, and its first chunk.
    """
    groups = defaultdict(list)
    saved_at = 0
    for origin, (some, tensors) in enumerate(zip(regions, zip(*lists))):
        for region in some:
            fields = [region.rows, region.cols, region.strata, region.first, region.step]
            fields += [region.shift, region.share - 1, saved_at, region.stride]
            fields += [t.data_ptr() + region.at * t.itemsize for t in tensors]
            groups[tuple(t.dtype for t in tensors)].append((origin, region.slots // CHUNK, fields))
            saved_at += region.slots
    launches = []
    for types, group in groups.items():
        origins, chunks, records = (torch.tensor(x, device="cpu") for x in zip(*group))
        counts = (chunks + CHUNKS - 1) // CHUNKS
        index = torch.repeat_interleave(torch.arange(len(group), device="cpu"), counts)
        place = torch.arange(len(index), device="cpu") - (counts.cumsum(0) - counts)[index]
        blocks = torch.stack((index, place * CHUNKS), dim=1)
        table = records.to(device), blocks.to(device)
        launches.append(Launch(types, ELEMENTS, *table, origins))
    return launches


@jit
def _locate(records, blocks, FIELDS: tl.constexpr, CHUNKS: tl.constexpr):
    """Return (record, places in the local tensor, places in the saved weights, inside) of the
    program's chunks of 16 elements (CHUNK): tiles (CHUNKS, 16). See [Note: sample of a parameter].
    """
    block = blocks + tl.program_id(0).to(tl.int64) * 2
    record = records + tl.load(block) * FIELDS
    chunk = tl.load(block + 1).to(tl.int32) + tl.arange(0, CHUNKS)[:, None]
    strata = tl.load(record + 2).to(tl.int32)
    row = chunk // strata
    first = tl.load(record + 3) + row * tl.load(record + 4)
    shift = tl.load(record + 5)
    stratum = (first >> shift) + (chunk - row * strata)
    place = ((stratum.to(tl.uint32) * 2654435769) >> 27).to(tl.int64) & tl.load(record + 6)
    lane = tl.arange(0, 16)[None, :]
    column = (stratum << shift) + place * 16 - first + lane
    inside = (row < tl.load(record)) & (column >= 0) & (column < tl.load(record + 1))
    saved_at = tl.load(record + 7) + chunk.to(tl.int64) * 16 + lane
    return record, row * tl.load(record + 8) + column, saved_at, inside


@jit
def _values(record, places, inside, LIST: tl.constexpr, TYPE: tl.constexpr):
    """Return the elements of list number LIST, of dtype TYPE; 0 outside."""
    address = tl.load(record + 9 + LIST).to(tl.pointer_type(TYPE))
    return tl.load(address + places, mask=inside, other=0)


@jit
def _weights(record, places, inside, SPLIT: tl.constexpr, TYPE: tl.constexpr):
    """Return weights in fp32, of the first list; with SPLIT of the first and their rests of the
    second.
    """
    w = _values(record, places, inside, 0, TYPE)
    if SPLIT:
        w = joined_tile(w, _values(record, places, inside, 1, tl.int16))
    return w.to(tl.float32)


@jit
def _save_kernel(
    records,
    blocks,
    saved,
    SPLIT: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCESS: tl.constexpr,
    TYPE_0: tl.constexpr,
    TYPE_1: tl.constexpr = None,
):
    """Compute `SampledSquares.save` for BLOCK / 16 chunks. Lists of the table: W, rests if SPLIT.

    `saved`: fp32.
    """
    record, places, saved_at, inside = _locate(records, blocks, FIELDS, BLOCK // 16)
    w = _weights(record, places, inside, SPLIT, TYPE_0)
    tl.store(saved + saved_at, w, mask=inside)


@jit
def _add_kernel(
    records,
    blocks,
    saved,
    squares,
    SPLIT: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCESS: tl.constexpr,
    TYPE_0: tl.constexpr,
    TYPE_1: tl.constexpr,
    TYPE_2: tl.constexpr = None,
):
    """Write a row of `Squares` for BLOCK / 16 chunks. Lists of the table: W, rests if SPLIT, M.

    `saved`: of `_save_kernel`.
    """
    record, places, saved_at, inside = _locate(records, blocks, FIELDS, BLOCK // 16)
    w = _weights(record, places, inside, SPLIT, TYPE_0)
    old = tl.load(saved + saved_at, mask=inside, other=0.0)
    if SPLIT:
        m = _values(record, places, inside, 2, TYPE_2).to(tl.float32)
    else:
        m = _values(record, places, inside, 1, TYPE_1).to(tl.float32)
    squares_at = squares + tl.program_id(0).to(tl.int64) * 3
    tl.store(squares_at, total_square(w - old, inside, 1))
    tl.store(squares_at + 1, total_square(w, inside, 1))
    tl.store(squares_at + 2, total_square(m, inside, 1))

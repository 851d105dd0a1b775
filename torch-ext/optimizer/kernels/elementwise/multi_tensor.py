"""Multi-tensor launches: one table of addresses for the tensors of a kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..launch.jit import here, jit, typed

tl = None  # Triton's language, put here by jit

BLOCK = 4096  # elements per program
ALIGNMENT = 16  # bytes: the widest access of a thread
LONGEST = 1 << 30  # elements per row of a record: a position in a row stays a 32-bit number


@dataclass(frozen=True)
class Source:
    """Where a rectangle lies in a fresh gradient.

    `tensor` is the index in the list of gradients, `offset` the elements from the gradient's data
    pointer to the first element, `strides` the elements from row to row and from column to column.
    """

    tensor: int
    offset: int
    strides: tuple[int, int]

    def view(self, tensors: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """Return the rectangle as a view of this step's gradient."""
        whole = tensors[self.tensor]
        return whole.as_strided(shape, self.strides, whole.storage_offset() + self.offset)


@dataclass(frozen=True)
class Launch:
    """The rectangles of one combination of dtypes, in device memory.

    `aligned` says that all of them are one row without gaps that begins at a multiple of 16 bytes,
    in every list. `blocks` (count, 2) says per program which record, and which element of it is the
    first; `origins` says per record from which place of the bound lists it comes. `started`: the
    kernels that were launched, each with its constants.
    """

    types: tuple[torch.dtype, ...]
    aligned: bool
    records: torch.Tensor
    blocks: torch.Tensor
    origins: torch.Tensor
    started: set = field(default_factory=set, compare=False)


@dataclass(frozen=True)
class Skip:
    """Which rectangles stay as they are: those whose flag is not 0 when the launch runs.

    `flags` (F,) fp32 on the device, `places` the number of every rectangle's flag.
    """

    flags: torch.Tensor
    places: tuple[int, ...]

    def moves(self, number: int) -> torch.Tensor:
        """Return whether rectangle `number` moves, as a tensor of one bool."""
        return self.flags[self.places[number]] == 0

    def of(self, launch: Launch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the flags and, for each record of a launch, the number of its flag."""
        places = torch.tensor(self.places, dtype=torch.int64, device="cpu")[launch.origins.cpu()]
        return self.flags, places.to(self.flags.device)


def skips_of(skip: Skip | None, launches: Sequence[Launch] | None) -> list[tuple]:
    """Return for each launch what its kernel takes: flags, places and whether there are any."""
    return [
        (*skip.of(launch), True) if skip else (launch.records, launch.records, False)
        for launch in launches or ()
    ]


def bind(lists: Sequence[Sequence[torch.Tensor]], sources=None, gradients=None) -> list[Launch]:
    """Write corresponding rectangles into tables, one for each combination of dtypes.

    `lists` holds lists of 2-D tensors, equal in shapes; with `sources`, a fresh gradient is the
    last list of the launch and `gradients` shows the dtypes and whether addresses are multiples of
    16 bytes. The caller keeps the tensors.
    """
    groups = defaultdict(list)
    for origin, rectangle in enumerate(zip(*lists)):
        shape = rectangle[0].shape
        assert all(t.shape == shape for t in rectangle), [t.shape for t in rectangle]
        types = tuple(t.dtype for t in rectangle)
        fields = [(t.data_ptr(), *t.stride(), t.element_size()) for t in rectangle]
        index, base = [], 0
        if sources is not None:
            example = gradients[sources[origin].tensor]
            index, base, size = [sources[origin].tensor], example.data_ptr(), example.element_size()
            types += (example.dtype,)
            fields.append((sources[origin].offset * size, *sources[origin].strides, size))
        for record in _records(shape, fields):
            aligned = record[:1] == [1] and not any(
                at % ALIGNMENT for at in (2 * record[1], base, *record[2::3])
            )
            groups[types, aligned].append((origin, record + index))
    return [_launch(*key, group, lists[0][0].device) for key, group in groups.items()]


def _records(shape, fields):
    """Return the records of one rectangle: none for an empty one, one long row where all is
    contiguous.
    """
    rows, columns = shape
    if rows * columns == 0:
        return []
    if not all(_is_one_row(rows, columns, *strides) for _, *strides, _ in fields):
        return [[rows, columns] + [x for field in fields for x in field[:3]]]
    records = []
    for first in range(0, rows * columns, LONGEST):
        columns_here = min(LONGEST, rows * columns - first)
        records.append(
            [1, columns_here] + [x for at, _, _, size in fields for x in (at + first * size, 0, 1)]
        )
    return records


def _is_one_row(rows, columns, down, across):
    return (columns == 1 or across == 1) and (rows == 1 or down == columns)


def _launch(types, aligned, group, device):
    """Cut the records into blocks and send the table to the device."""
    records = torch.tensor([record for _, record in group], dtype=torch.int64, device="cpu")
    counts = (records[:, 0] * records[:, 1] + BLOCK - 1) // BLOCK
    index = torch.repeat_interleave(torch.arange(len(group), device="cpu"), counts)
    place = torch.arange(len(index), device="cpu") - (counts.cumsum(0) - counts)[index]
    blocks = torch.stack((index, place * BLOCK), dim=1)
    origins = torch.tensor([origin for origin, _ in group], device="cpu")
    return Launch(types, aligned, records.to(device), blocks.to(device), origins)


def run(kernel, launch: Launch, *arguments, **constants):
    """Launch a kernel over a table; products and sums are rounded one by one, as torch rounds
    them.
    """
    types = {f"TYPE_{i}": typed(t) for i, t in enumerate(launch.types)}
    options = {
        "FIELDS": launch.records.shape[1],
        "BLOCK": BLOCK,
        "ALIGNED": launch.aligned,
        **types,
        **constants,
        "num_warps": 8,
        "enable_fp_fusion": False,
    }
    start = kernel, *constants.values()
    # Another thread may be about to launch the kernel for the first time, too
    if start not in launch.started:
        key = launch.types, launch.aligned, launch.records.device.index, *constants.items()
        kernel.prepare(key, launch.records, launch.blocks, *arguments, **options)
        if not here.dry_run:
            launch.started.add(start)
    kernel[(len(launch.blocks),)](launch.records, launch.blocks, *arguments, **options)


@jit
def locate(records, blocks, FIELDS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Return this program's record, the rows and columns of its elements, and which of them
    exist.
    """
    block = blocks + tl.program_id(0).to(tl.int64) * 2
    record = records + tl.load(block) * FIELDS
    first = tl.load(block + 1)
    rows = tl.load(record)
    columns = tl.load(record + 1)
    if ALIGNED:
        row = first * 0
        column = tl.multiple_of(first.to(tl.int32), BLOCK) + tl.arange(0, BLOCK)
        inside = column < tl.multiple_of(columns.to(tl.int32), 8)
    else:
        # divide by 64 bits once per program, by 32 bits per element
        row = first // columns
        column = (first - row * columns).to(tl.int32) + tl.arange(0, BLOCK)
        down = column // columns.to(tl.int32)
        row += down
        column -= down * columns.to(tl.int32)
        inside = row < rows
    return record, row, column, inside


@jit
def moving(inside, blocks, flags, places):
    """Return `inside`, without the elements of a rectangle whose flag is set."""
    record = tl.load(blocks + tl.program_id(0).to(tl.int64) * 2)
    # As integers, for the interpreter
    flag = tl.load(flags + tl.load(places + record)).to(tl.int32)
    return tl.where(flag == 0, inside, False)


@jit
def elements(
    record, row, column, LIST: tl.constexpr, TYPE: tl.constexpr, base, ALIGNED: tl.constexpr
):
    """Return the pointers to elements of a list; `base` is added to the record's address (0 for
    bound memory).
    """
    field = record + 2 + 3 * LIST
    address = (tl.load(field) + base).to(tl.pointer_type(TYPE))
    if ALIGNED:
        at = tl.multiple_of(address, 16) + column
    else:
        at = address + row * tl.load(field + 1) + column * tl.load(field + 2)
    return at


@jit
def fresh(record, addresses, FIELDS: tl.constexpr):
    """Return the address of this step's gradient, from the record's last field."""
    return tl.load(addresses + tl.load(record + FIELDS - 1))

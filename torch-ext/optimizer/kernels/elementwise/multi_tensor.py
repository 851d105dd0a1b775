"""Multi-tensor apply: one kernel launch for rectangles of many tensors.

`bind` writes addresses, shapes and strides of corresponding rectangles of several lists of tensors
into a device table, once for each combination of dtypes (`Launch`). Per step, `run` launches a
kernel over the table. Gradients are new tensors at every step: a record holds their place relative
to the gradient (`Source`), and a launch gets the gradients' addresses.

Kernels call the jit functions at the end of the file: `locate`, `element_pointers`,
`gradient_address`, `unskipped`, `group_offset`, `total_square`.

Layout of a record (int64): rows, columns, then (address, stride of rows, stride of columns) for
each list, then, for tables with gradients, the number of the gradient. Strides count elements. A
gradient's address is relative: bytes from the gradient's first element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..launch.jit import jit, thread_state, triton_dtype
from ..launch.replay import FixedLaunch

tl = None  # Triton's language, put here by jit

BLOCK = 4096  # elements per program
ALIGNMENT = 16  # bytes: the widest access of a thread
NUMBERS = 12  # fp32 elements of a parameter group in `rules.rule.device_scalars`
LONGEST = 1 << 30  # elements in a row of a record: a position in a row stays a 32-bit number
VECTOR = 8  # elements of a vector access: 16 bytes of a 16-bit dtype, 32 of fp32
# How a launch accesses the elements of its records, from the slowest to the fastest:
ELEMENTS, VECTORS, ROW = 0, 1, 2  # any strides; rows of whole aligned vectors; a single such row


@dataclass(frozen=True)
class Source:
    """Place of a rectangle in a gradient, independent of the gradient's address."""

    tensor: int  # index in the list of gradients
    offset: int  # elements from the gradient's first element to the rectangle's
    strides: tuple[int, int]  # elements from row to row, from column to column

    def view(self, tensors: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """Return the rectangle of shape (rows, columns) as a view of a gradient in `tensors`."""
        whole = tensors[self.tensor]
        return whole.as_strided(shape, self.strides, whole.storage_offset() + self.offset)


@dataclass(frozen=True)
class Positions:
    """Numbers of a rectangle's elements in the whole parameter, as a list for `bind`. A kernel
    knows an element by its number, whatever part of the parameter the rectangle is.

    A record has 16 times the number of the first element in place of an address, so that the number
    never decides how elements are accessed.
    """

    first: int  # number of the first element, below 2^59
    shape: tuple[int, int]  # of the rectangle
    stride: int  # from row to row; columns follow each other
    dtype: ClassVar[torch.dtype] = torch.int64

    def data_ptr(self) -> int:
        """Return the entry of a record in place of the address."""
        return self.first * ALIGNMENT

    def element_size(self) -> int:
        """Return by how much the entry grows from element to element."""
        return ALIGNMENT

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Return the numbers, int64 (rows, columns)."""
        rows, columns = (torch.arange(n, device=device) for n in self.shape)
        return self.first + rows[:, None] * self.stride + columns

    def strides(self) -> tuple[int, int]:
        """Return the strides of rows and columns, in elements."""
        return self.stride, 1


@dataclass(frozen=True)
class Launch:
    """Table of the rectangles of a combination of dtypes, on the device."""

    types: tuple[torch.dtype, ...]  # dtype of each list, the gradients' last
    access: int  # ELEMENTS, VECTORS or ROW: in every list of every record, see `access_of`
    records: torch.Tensor  # (records, fields) int64, see the module's docstring
    blocks: torch.Tensor  # (programs, 2) int64: number of the record, first element in the record
    origins: torch.Tensor  # (records,) int64: index of the rectangle in the bound lists
    # (kernel, arguments, constants) of past launches -> the launch to start again; None: only
    # Triton can launch. The key of a tensor is its address: an argument has one dtype per table
    started: dict[tuple, FixedLaunch | None] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Skip:
    """Rectangles left unchanged by a launch: their flag is not 0 when the kernel runs.

    Flags mark matrices with non-finite gradients. Launches read them on the device: no host sync.
    """

    flags: torch.Tensor  # (F,) fp32 on the device
    places: tuple[int, ...]  # index of each rectangle's flag in `flags`

    def is_updated(self, number: int) -> torch.Tensor:
        """Return whether rectangle `number` is to be changed, as a tensor with a single bool."""
        return self.flags[self.places[number]] == 0

    def of(self, launch: Launch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (flags, index of the flag of each record of `launch`, int64), on the device."""
        places = torch.tensor(self.places, dtype=torch.int64, device="cpu")[launch.origins.cpu()]
        return self.flags, places.to(self.flags.device)


# Columns of `Squares`
UPDATE, WEIGHT, MOMENTUM = 0, 1, 2


class Squares:
    """Sums of squares of each rectangle, made by the launches that step it: of the update of the
    weight, of the new weight and of the new momentum, all as stored.

    A kernel writes a row for each of its programs, and torch a row for each rectangle, in every
    launch and always at the same place: nothing is zeroed, and nothing is added up in a step. The
    sum of a momentum comes from the launch that writes it, and is 0 in all others.
    """

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []  # of each launch, (programs, 3) fp32 on the device
        self.origins: list[torch.Tensor] = []  # rectangle of each row, int64 on the CPU

    def lay_out(
        self, launches: Sequence[Launch] | None, count: int, device: torch.device
    ) -> list[torch.Tensor]:
        """Take memory for the programs of further `launches`; None: for `count` rectangles in
        torch. Return the rows of each launch.
        """
        origins = [torch.arange(count, device="cpu")]
        if launches is not None:
            origins = [one.origins[one.blocks[:, 0].cpu()] for one in launches]
        rows = [torch.zeros(len(of), 3, dtype=torch.float32, device=device) for of in origins]
        self.origins += origins
        self.rows += rows
        return rows

    def totals(self, count: int) -> torch.Tensor:
        """Return the sums of each of `count` rectangles, fp64 (count, 3) on the device. Needs an
        earlier call of `lay_out`.
        """
        total = self.rows[0].new_zeros(count, 3, dtype=torch.float64)
        for rows, origins in zip(self.rows, self.origins):
            total.index_add_(0, origins.to(rows.device), rows.double())
        return total


def rows_of(
    squares: Squares | None, launches: Sequence[Launch] | None, count: int, device: torch.device
) -> list[torch.Tensor]:
    """Lay out `squares` for launches over `count` rectangles; return the rows that each launch
    writes, or torch. Without sums the rows are placeholders, never written by the kernel.
    """
    if squares is None:
        return [launch.records for launch in launches or ()]
    return squares.lay_out(launches, count, device)


def write_squares(
    rows: torch.Tensor,
    old: Sequence[torch.Tensor],
    W: Sequence[torch.Tensor],
    M: Sequence[torch.Tensor] | None,
) -> None:
    """Write `rows` of `Squares` in torch, one for each rectangle. `old`: `wide_copies` of the
    weights before the step, overwritten. `M`: None if the launch writes no momentum.
    """
    tensors = [*old, *W, *(M or ())]
    if not tensors:
        return
    torch._foreach_sub_(list(old), list(W))
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    squares = torch.stack(torch._foreach_norm(tensors, 2, wide)).square_().view(-1, len(W)).T
    rows[:, : squares.shape[1]].copy_(squares)
    if M is None:
        rows[:, MOMENTUM].zero_()


def write_momentum_squares(
    rows: torch.Tensor, M: Sequence[torch.Tensor], are_new: bool = True
) -> None:
    """Write the sums of momenta to `rows` of `Squares` in torch; 0 unless the launch has written
    the momenta.
    """
    if not are_new:
        rows[:, MOMENTUM].zero_()
    elif M:
        norms = torch._foreach_norm(M, 2, torch.float32)
        rows[:, MOMENTUM].copy_(torch.stack(norms).square_())


def skips_of(skip: Skip | None, launches: Sequence[Launch] | None) -> list[tuple]:
    """Return (flags, index of the flag of each record, whether to skip) for each launch.

    Without a `Skip` the two tensors are placeholders, never read by the kernel.
    """
    return [
        (*skip.of(launch), True) if skip else (launch.records, launch.records, False)
        for launch in launches or ()
    ]


def groups_of(
    groups: Sequence[int] | None, launches: Sequence[Launch] | None
) -> list[tuple[torch.Tensor, bool]]:
    """Return (first element of the numbers of each record's parameter group, whether any rectangle
    belongs to a group other than 0) for each launch.

    `groups`: number of the group of each rectangle, None for group 0. Numbers of a group are
    NUMBERS consecutive elements. Without groups the tensor is a placeholder, never read by the
    kernel.
    """
    if groups is None or not any(groups):
        return [(launch.records, False) for launch in launches or ()]
    first = torch.tensor(groups, dtype=torch.int64, device="cpu") * NUMBERS
    return [
        (first[launch.origins.cpu()].to(launch.records.device), True) for launch in launches or ()
    ]


def bind(
    lists: Sequence[Sequence[torch.Tensor]],
    sources: Sequence[Source] | None = None,
    gradients: Sequence[torch.Tensor] | None = None,
    shapes: Sequence[tuple[int, int]] | None = None,
    keep_rows: bool = False,
) -> list[Launch]:
    """Return tables of corresponding rectangles, a table for each combination of dtypes.

    `lists`: lists of 2-D tensors, or of `Positions`, with equal shapes at equal index
    (AssertionError otherwise). With `sources`, the gradients form the last list: `sources[i]` is
    the place of rectangle i, and `gradients` are examples with the dtypes, and the alignment to 16
    bytes, of all later gradients. `shapes`: of the rectangles, if the gradients are the only list.
    `keep_rows`: kernels need the row of an element, so no rectangle becomes a single row. Tables
    hold addresses: the caller keeps the tensors alive.
    """
    # (dtypes, access) -> [(index in the bound lists, record)]
    groups = defaultdict(list)
    rectangles = zip(*lists) if lists else [()] * len(shapes)
    for origin, rectangle in enumerate(rectangles):
        shape = rectangle[0].shape if lists else shapes[origin]
        assert all(t.shape == shape for t in rectangle), [t.shape for t in rectangle]
        types = tuple(t.dtype for t in rectangle)
        fields = [(t.data_ptr(), *_strides(t), t.element_size()) for t in rectangle]
        index, base = [], 0
        if sources is not None:
            example = gradients[sources[origin].tensor]
            index = [sources[origin].tensor]
            base = example.data_ptr()
            size = example.element_size()
            types += (example.dtype,)
            fields.append((sources[origin].offset * size, *sources[origin].strides, size))
        for record in _records(shape, fields, keep_rows):
            groups[types, access_of(record, base)].append((origin, record + index))
    device = (lists[0] if lists else gradients)[0].device
    return [_launch(*key, group, device) for key, group in groups.items()]


def _strides(rectangle: torch.Tensor | Positions) -> tuple[int, int]:
    """Return the strides of rows and columns, in elements."""
    return rectangle.strides() if isinstance(rectangle, Positions) else rectangle.stride()


def access_of(record: list[int], base: int) -> int:
    """Return how the elements of a record can be accessed.

    Vectors need columns without gaps, rows that are multiples of VECTOR elements long and apart,
    and addresses at multiples of ALIGNMENT. `base`: address of the gradient.
    """
    rows, columns = record[:2]
    addresses, down, across = record[2::3], record[3::3], record[4::3]
    is_aligned = not any(at % ALIGNMENT for at in (base, *addresses))
    if set(across) != {1} or columns % VECTOR or not is_aligned:
        return ELEMENTS
    if rows == 1:
        return ROW
    return ELEMENTS if any(stride % VECTOR for stride in down) else VECTORS


def _records(
    shape: Sequence[int], fields: list[tuple[int, int, int, int]], keep_rows: bool
) -> list[list[int]]:
    """Return the records of a rectangle, as lists of integers without the gradient's number.

    `fields`: (address, stride of rows, stride of columns, bytes of an element) in each list. If the
    rectangle is contiguous in all lists, each record is a single row of at most LONGEST elements,
    unless `keep_rows`. An empty rectangle has no record.
    """
    rows, columns = shape
    if rows * columns == 0:
        return []
    if keep_rows or not all(_is_contiguous(rows, columns, *strides) for _, *strides, _ in fields):
        return [[rows, columns] + [x for field in fields for x in field[:3]]]
    records = []
    for first in range(0, rows * columns, LONGEST):
        length = min(LONGEST, rows * columns - first)
        records.append(
            [1, length] + [x for at, _, _, size in fields for x in (at + first * size, 0, 1)]
        )
    return records


def _is_contiguous(rows: int, columns: int, down: int, across: int) -> bool:
    """Say whether a rectangle with strides (down, across) is contiguous."""
    return (columns == 1 or across == 1) and (rows == 1 or down == columns)


def _launch(
    types: tuple[torch.dtype, ...],
    access: int,
    group: list[tuple[int, list[int]]],
    device: torch.device,
) -> Launch:
    """Cut records into blocks of BLOCK elements and return the table on `device`.

    `group`: (index in the bound lists, record) of each record.
    """
    records = torch.tensor([record for _, record in group], dtype=torch.int64, device="cpu")
    counts = (records[:, 0] * records[:, 1] + BLOCK - 1) // BLOCK
    index = torch.repeat_interleave(torch.arange(len(group), device="cpu"), counts)
    place = torch.arange(len(index), device="cpu") - (counts.cumsum(0) - counts)[index]
    blocks = torch.stack((index, place * BLOCK), dim=1)
    origins = torch.tensor([origin for origin, _ in group], device="cpu")
    return Launch(types, access, records.to(device), blocks.to(device), origins)


# Most entries of `Launch.started`. Few are needed: arguments are at fixed addresses, and host
# constants rarely change
MOST_STARTED = 8


def run(kernel: jit, launch: Launch, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel over a table, a program per block.

    The kernel gets records and blocks, `arguments`, FIELDS, BLOCK, ACCESS, a TYPE_i per list, and
    `constants`. No fused multiply-adds: products and sums are rounded separately, as in torch. A
    launch with equal arguments is started again with little host time, see `FixedLaunch`.
    """
    # The binary depends on the alignment of tensors, which follows from the addresses
    given = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
    known = kernel, *given, *constants.values()
    if not thread_state.dry_run:
        fixed = launch.started.get(known)
        if fixed is not None and fixed.start():
            return
    types = {f"TYPE_{i}": triton_dtype(t) for i, t in enumerate(launch.types)}
    numbers = {"FIELDS": launch.records.shape[1], "BLOCK": BLOCK, "ACCESS": launch.access}
    numbers |= {**types, **constants}
    options = {**numbers, "num_warps": 8, "enable_fp_fusion": False}
    # Another thread may be about to launch the kernel for the first time, too
    if known not in launch.started:
        key = launch.types, launch.access, launch.records.device.index, *constants.items()
        kernel.prepare(key, launch.records, launch.blocks, *arguments, **options)
    programs = len(launch.blocks)
    compiled = kernel[(programs,)](launch.records, launch.blocks, *arguments, **options)
    if known in launch.started or thread_state.dry_run:
        return
    if len(launch.started) >= MOST_STARTED:
        launch.started.clear()
    # The C function takes constants by position, in the order of the kernel's parameters
    code, count = kernel.function.__code__, 2 + len(arguments)
    values = [numbers.get(name) for name in code.co_varnames[count : code.co_argcount]]
    all_given = launch.records, launch.blocks, *arguments, *values
    device = launch.records.get_device()
    launch.started[known] = FixedLaunch.of(device, compiled, programs, all_given)


@jit
def locate(records, blocks, FIELDS: tl.constexpr, BLOCK: tl.constexpr, ACCESS: tl.constexpr):
    """Return (record, row, column, inside) of the elements of the current program.

    `record`: pointer to the record. `row`, `column`: indices of BLOCK elements in the rectangle;
    with VECTORS (2-D) of BLOCK / 8 vectors, a row of the tile each. `inside`: mask of existing
    elements.
    """
    block = blocks + tl.program_id(0).to(tl.int64) * 2
    record = records + tl.load(block) * FIELDS
    first = tl.load(block + 1)
    rows = tl.load(record)
    columns = tl.load(record + 1)
    if ACCESS == 2:  # ROW
        row = first * 0
        column = tl.multiple_of(first.to(tl.int32), BLOCK) + tl.arange(0, BLOCK)
        inside = column < tl.multiple_of(columns.to(tl.int32), 8)
    elif ACCESS == 1:  # VECTORS
        # One division for each vector: no vector reaches into the next row
        vectors = columns // 8
        first_vector = first // 8
        row = first_vector // vectors
        place = (first_vector - row * vectors).to(tl.int32) + tl.arange(0, BLOCK // 8)[:, None]
        down = place // vectors.to(tl.int32)
        row += down
        column = (place - down * vectors.to(tl.int32)) * 8 + tl.arange(0, 8)[None, :]
        inside = (row < rows) & (column >= 0)  # a mask for each element
    else:
        # Divisions of 64-bit integers are slow: one per program; one of 32 bits per element
        row = first // columns
        column = (first - row * columns).to(tl.int32) + tl.arange(0, BLOCK)
        down = column // columns.to(tl.int32)
        row += down
        column -= down * columns.to(tl.int32)
        inside = row < rows
    return record, row, column, inside


@jit
def unskipped(inside, blocks, flags, places):
    """Return the mask `inside`, all False if the rectangle's flag is set (`Skip`)."""
    record = tl.load(blocks + tl.program_id(0).to(tl.int64) * 2)
    # Compared as an integer, for Triton's interpreter
    flag = tl.load(flags + tl.load(places + record)).to(tl.int32)
    return tl.where(flag == 0, inside, False)


@jit
def group_offset(blocks, groups, GROUPED: tl.constexpr):
    """Return the offset of the numbers of the rectangle's parameter group, see `groups_of`."""
    offset = 0
    if GROUPED:
        offset = tl.load(groups + tl.load(blocks + tl.program_id(0).to(tl.int64) * 2))
    return offset


@jit
def element_pointers(
    record, row, column, LIST: tl.constexpr, TYPE: tl.constexpr, base, ACCESS: tl.constexpr
):
    """Return pointers to elements (row, column) of list number LIST, of dtype TYPE.

    `base`: added to the record's address; 0 for bound memory, the gradient's address for gradients.
    """
    field = record + 2 + 3 * LIST
    address = (tl.load(field) + base).to(tl.pointer_type(TYPE))
    if ACCESS == 2:  # ROW
        at = tl.multiple_of(address, 16) + column
    elif ACCESS == 1:  # VECTORS
        at = tl.multiple_of(address, 16) + row * tl.multiple_of(tl.load(field + 1), 8) + column
    else:
        at = address + row * tl.load(field + 1) + column * tl.load(field + 2)
    return at


@jit
def element_numbers(record, row, column, LIST: tl.constexpr, ACCESS: tl.constexpr):
    """Return the numbers of elements (row, column) in the whole parameter, int64. List number LIST
    is of `Positions`.
    """
    field = record + 2 + 3 * LIST
    numbers = (tl.load(field) >> 4) + column  # 16 times the number: see `Positions`
    if ACCESS != 2:  # of several rows
        numbers += row * tl.load(field + 1)
    return numbers


@jit
def total_square(values, inside, ACCESS: tl.constexpr):
    """Return the sum of the squares of `values`, fp32, where `inside`."""
    squares = tl.where(inside, values * values, 0.0)
    if ACCESS == 1:  # VECTORS: a tile of two dims
        squares = tl.sum(squares, axis=1)
    return tl.sum(squares, axis=0)


@jit
def gradient_address(record, addresses, FIELDS: tl.constexpr):
    """Return the address of the current step's gradient, numbered by the record's last field.

    `addresses`: int64 addresses of all gradients.
    """
    return tl.load(addresses + tl.load(record + FIELDS - 1))

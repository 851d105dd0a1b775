"""`RowSample`: rows of a rectangle whose squares are added up, chosen alike on every sharding.

[Note: sampled rows]
Rows have numbers: in all matrices of a parameter, one behind the other, however it is sharded. Some
consecutive rows are a group, `share` groups are a stratum, and of each stratum one group is read,
at the place of [Note: sample of a parameter] in kernels/metrics/sample.py. Whole rows are read, so
that it does not matter how columns are sharded. A program of a kernel steps neighbouring elements:
most programs have no row of the sample, and add nothing up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..launch.jit import jit

tl = None  # Triton's language, put here by jit

GOLDEN = 2654435769  # 2^32 divided by the golden ratio, odd; kernels have the number itself


def place_of(stratum: Any, share: Any) -> Any:
    """Return the place in a stratum that is read, from 0 to `share` - 1: integers or int64 tensors.
    A multiplicative hash (Knuth, TAOCP 3, 6.4).
    """
    return (((stratum * GOLDEN) & 0xFFFFFFFF) >> 27) & (share - 1)


@dataclass(frozen=True)
class RowSample:
    """The rows of a rectangle that are read, see [Note: sampled rows]."""

    first: int  # number of the rectangle's first row
    group: int  # rows of a group: a power of two
    share: int  # groups of a stratum: a power of two, at most 32; 1: all rows are read

    def count(self, rows: int) -> int:
        """Return how many of the rectangle's `rows` are read."""
        return self._before(self.first + rows) - self._before(self.first)

    def _before(self, number: int) -> int:
        """Return how many rows are read of those with smaller numbers."""
        group, rest = divmod(number, self.group)
        stratum, place = divmod(group, self.share)
        own = place_of(stratum, self.share)
        return (stratum + (own < place)) * self.group + rest * (own == place)

    def indices(self, rows: int) -> torch.Tensor:
        """Return which of the rectangle's `rows` are read, int64 on the CPU."""
        group = (self.first + torch.arange(rows, device="cpu")) // self.group
        is_read = group % self.share == place_of(group // self.share, self.share)
        return is_read.nonzero()[:, 0]


def table_of(
    records: torch.Tensor,
    origins: torch.Tensor,
    shapes: Sequence[tuple[int, int]],
    samples: Sequence[RowSample],
) -> torch.Tensor:
    """Return what `sampled_rows` reads of each record of a multi-tensor launch, int64 (records, 6)
    on the CPU: number of the first row, columns of the rectangle, elements of that row before the
    record, log2 of the rows of a group, share - 1, log2 of the share.

    `records`, `origins`: of the launch, on the CPU. `shapes`, `samples`: of the rectangles. The
    records of a rectangle follow each other.
    """
    found, at, last = [], 0, None
    sizes = (records[:, 0] * records[:, 1]).tolist()
    for origin, size in zip(origins.tolist(), sizes):
        at = at if origin == last else 0
        last, sample, columns = origin, samples[origin], shapes[origin][1]
        down, rest = divmod(at, columns)
        logs = sample.group.bit_length() - 1, sample.share - 1, sample.share.bit_length() - 1
        found.append((sample.first + down, columns, rest, *logs))
        at += size
    return torch.tensor(found, dtype=torch.int64, device="cpu").view(-1, 6)


def reads(
    table: torch.Tensor, records: torch.Tensor, blocks: torch.Tensor, block: int
) -> torch.Tensor:
    """Return for each program of a launch whether it has rows of the sample, bool on the CPU.

    `table`: of `table_of`. `records`, `blocks`: of the launch, on the CPU. `block`: elements of a
    program.
    """
    number, at = blocks.unbind(1)
    first, columns, rest, group, most, share = table[number].unbind(1)
    stop = torch.minimum(at + block, (records[:, 0] * records[:, 1])[number])
    low, high = ((first + (rest + place) // columns) >> group for place in (at, stop - 1))
    found = (high >> share) - (low >> share) > 1  # a whole stratum
    for stratum in (low >> share, high >> share):
        own = (stratum << share) + place_of(stratum, most + 1)
        found |= (low <= own) & (own <= high)
    return found


@jit
def sampled_rows(inside, row, at, table, number, TILE: tl.constexpr, ACCESS: tl.constexpr):
    """Return the mask `inside` where rows are of the sample. `inside`, `row`: of `locate`, for a
    tile of TILE elements from element `at` of the record on. `table`: of `table_of`. `number`: of
    the record.
    """
    entry = table + number * 6
    line = tl.load(entry)
    if ACCESS == 1:  # VECTORS: the rows of the record are those of the rectangle
        line += row
    else:
        # A record may be several rows that follow each other in memory
        columns = tl.load(entry + 1)
        first = tl.load(entry + 2) + at
        down = first // columns
        place = (first - down * columns).to(tl.int32) + tl.arange(0, TILE)
        line += down + place // columns.to(tl.int32)
    group = line >> tl.load(entry + 3)
    most = tl.load(entry + 4)
    stratum = group >> tl.load(entry + 5)
    place = ((stratum.to(tl.uint32) * 2654435769) >> 27).to(tl.int64) & most
    return inside & ((group & most) == place)

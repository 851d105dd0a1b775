"""Selection of rows or columns: only a fraction of a matrix is orthogonalized (Dion2).

`Selection` says how many rows or columns of a shape, from shapes alone: all sizes are static.
`choose` finds the indices, on the device and without a host sync. The choice depends on the
elements of a matrix only: sums have a fixed order (`absolute_sums`), ties go to the lower index.

[Note: unselected elements] Where a whole matrix O is written, unselected elements are -0.0, and
zeros of selected elements are +0.0. So every shard tells from an element alone whether the element
was selected, and a weight update with -0.0 only decays the weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.elementwise.aol import absolute_sums
from .coefficients import is_number

AXES = {"row": 0, "column": 1}
Block = tuple[int, int, int]  # (start, stop, number of selected rows or columns) of a block


@dataclass(frozen=True)
class Selection:
    """The part of each matrix that is orthogonalized.

    `select`: "row", "column", or "short" for the shorter side (rows of a square matrix). Rows are
    cut into `blocks` blocks like torch.chunk, and each block selects the ceil(fraction n) of its n
    rows with the largest sums of absolute values; columns likewise.
    """

    fraction: float
    select: str = "row"
    blocks: int = 1

    def axis(self, R: int, C: int) -> int:
        """Return 0 if rows of an (R, C) matrix are selected, 1 if columns are."""
        return AXES.get(self.select, int(R > C))

    def blocks_of(self, size: int) -> list[Block]:
        """Return the blocks of `size` rows or columns, without empty ones."""
        length = max(1, -(-size // self.blocks))
        ends = [(start, min(start + length, size)) for start in range(0, size, length)]
        return [(a, b, math.ceil(self.fraction * (b - a))) for a, b in ends]

    def shape(self, R: int, C: int) -> tuple[int, int]:
        """Return the shape of the selected part of an (R, C) matrix."""
        axis = self.axis(R, C)
        count = sum(count for _, _, count in self.blocks_of((R, C)[axis]))
        return (count, C) if axis == 0 else (R, count)


def check_selection(group: Mapping[str, Any]) -> None:
    """Raise ValueError for values of a parameter group that are no `Selection`, and for a form of
    momentum other than that with error feedback.
    """
    fraction, blocks = group["fraction"], group["blocks"]
    if not is_number(fraction) or isinstance(fraction, bool) or not 0 < fraction <= 1:
        raise ValueError(
            f"fraction={fraction!r} must be a number > 0 and <= 1: the fraction of the rows, or "
            "columns, that is orthogonalized in a step"
        )
    if not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 1:
        raise ValueError(
            f"blocks={blocks!r} must be an int >= 1: the number of blocks of rows, or columns, of "
            "which each selects a fraction of its own"
        )
    if group.get("select", "row") not in ("short", *AXES):
        raise ValueError(f"select={group['select']!r} must be one of {['short', *AXES]}")
    if group.get("momentum_form", "ema") != "ema":
        raise ValueError(
            f"momentum_form={group['momentum_form']!r} with rule={group['rule']!r}, whose momentum "
            "has error feedback: leave momentum_form out, or use another rule"
        )


def starts_of(blocks: list[Block], device: torch.device) -> torch.Tensor:
    """Return the first row or column of each block, (blocks, 1) int64, for `choose`."""
    length = blocks[0][1] if blocks else 1
    return torch.arange(0, length * len(blocks), length, device=device).view(-1, 1)


def choose(
    stack: torch.Tensor, axis: int, blocks: list[Block], starts: torch.Tensor
) -> torch.Tensor:
    """Return the selected rows (`axis` 0) or columns (1) of a stack (N, R, C): (N, k) int64,
    ascending in each matrix. `blocks`: of all rows or columns, equally long but for the last one.
    `starts`: of `starts_of`.

    Of equal sums the lower index is selected; NaN counts as larger than every number.
    """
    sums = absolute_sums(stack, "row" if axis == 0 else "column").flatten(1)
    N, size = sums.shape
    if not sums.numel():
        return sums.new_empty((N, 0), dtype=torch.int64)
    length, count = blocks[0][1] - blocks[0][0], blocks[0][2]
    padding = length * len(blocks) - size
    if padding:
        sums = torch.nn.functional.pad(sums, (0, padding), value=-1.0)
    order = sums.view(N, -1, length).sort(dim=2, descending=True, stable=True).indices
    order = order[..., :count] + starts
    # The last block may be shorter, and select fewer
    found = order[:, :-1].flatten(1), order[:, -1, : blocks[-1][2]]
    return torch.cat(found, 1).sort(1).values


def gather(stack: torch.Tensor, axis: int, chosen: torch.Tensor, out: torch.Tensor) -> None:
    """Write the chosen (N, k) rows or columns of a stack (N, R, C) to `out`, (N, k, C) or
    (N, R, k).
    """
    torch.gather(stack, axis + 1, _expanded(chosen, axis, out.shape), out=out)


def scatter(part: torch.Tensor, axis: int, chosen: torch.Tensor, out: torch.Tensor) -> None:
    """Write rows or columns to the chosen places of `out` (N, R, C), and -0.0 elsewhere; see
    [Note: unselected elements]. Zeros of `part` become +0.0, in place.
    """
    out.fill_(-0.0)
    out.scatter_(axis + 1, _expanded(chosen, axis, part.shape), part.add_(0.0))


def _expanded(chosen: torch.Tensor, axis: int, shape: torch.Size) -> torch.Tensor:
    """Return the indices (N, k) for all elements of a part of `shape`."""
    return chosen.unsqueeze(2 - axis).expand(shape)

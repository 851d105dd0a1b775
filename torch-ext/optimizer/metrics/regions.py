"""Elements of a parameter on a rank as rectangles, for the sums of `SampledSquares`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ..kernels.metrics.sample import Region
from ..params.layout import Box, Layout
from ..params.units import box_shape

# Parameters of up to READ_ELEMENTS elements are read whole. Of a larger parameter at least half as
# many elements are read, and at least one chunk of SHARE.
READ_ELEMENTS = 1 << 18
SHARE = 32


def regions_of(layout: Layout, rank: int) -> list[Region]:
    """Return the rectangles of the elements of a parameter that `rank` stores, in a contiguous
    local tensor.
    """
    boxes = layout.boxes_of(rank)
    if share_of(layout.shape) == 1:
        return _whole(sum(math.prod(box_shape(box)) for box in boxes))
    if not layout.interleaved:
        return _of_box(layout.shape, boxes[0], box_shape(boxes[0]), [0] * len(layout.shape))
    dim, _ = layout.interleaved
    local = list(box_shape(boxes[0]))
    local[dim] = sum(box_shape(box)[dim] for box in boxes)
    found, behind = [], 0
    for box in boxes:
        start = [0] * len(local)
        start[dim] = behind
        found += _of_box(layout.shape, box, local, start)
        behind += box_shape(box)[dim]
    return found


def regions_of_rows(shape: Sequence[int], first: int, count: int) -> list[Region]:
    """Return the rectangle of `count` rows of dim 0 of a parameter, from row `first` on, in a
    contiguous tensor with these rows.
    """
    shape = tuple(shape) or (1,)
    if share_of(shape) == 1:
        return _whole(count * math.prod(shape[1:]))
    box = (first, first + count), *((0, n) for n in shape[1:])
    return _of_box(shape, box, box_shape(box), [0] * len(shape))


def share_of(shape: Sequence[int]) -> int:
    """Return the number of chunks of which one is read, for the whole `shape` of a parameter: a
    power of two, 1 for a parameter that is read whole.
    """
    numel, share = math.prod(shape), 1
    while share < SHARE and numel > share * READ_ELEMENTS:
        share *= 2
    return share


def _whole(numel: int) -> list[Region]:
    """Return a single rectangle for a local tensor that is read whole. Positions of the elements in
    the parameter do not matter then.
    """
    return [Region(1, numel, 0, 0, 0, 0, 1)] if numel else []


def _of_box(
    shape: Sequence[int], box: Box, local: Sequence[int], start: Sequence[int]
) -> list[Region]:
    """Return the rectangles of `box` of a large parameter. `local`: shape of the local tensor.
    `start`: indices of the box in it.
    """
    sizes, share = box_shape(box), share_of(shape)
    if not math.prod(sizes):
        return []
    # Elements between neighbours along each dim: in numbers, and in the local tensor
    steps, strides = ([math.prod(of[d + 1 :]) for d in range(len(of))] for of in (shape, local))
    cuts = [d for d, size in enumerate(sizes) if size != shape[d]]
    # Columns: the last cut dim and the dims behind. Rows: the dims from the cut before up to there.
    last = cuts[-1] if cuts else 0
    before = cuts[-2] if len(cuts) > 1 else 0
    cols = math.prod(sizes[last:])
    rows = math.prod(sizes[before:last])
    found = []
    for index in itertools.product(*map(range, sizes[:before])):
        place = [*index, *[0] * (len(sizes) - before)]
        first = sum((i + at[0]) * step for i, at, step in zip(place, box, steps))
        at = sum((i + own) * stride for i, own, stride in zip(place, start, strides))
        down = last - 1 if last else 0
        found.append(Region(rows, cols, at, strides[down], first, steps[down], share))
    return found

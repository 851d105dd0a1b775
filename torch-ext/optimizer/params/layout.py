"""`Layout`: the boxes of global indices of a parameter stored by each rank.

`layout_of` turns the placements of a DTensor into boxes; `check_placements` refuses placements with
uncertain boxes. All further code plans with boxes: FSDP2, HSDP, TP and EP differ in boxes only.
Besides communication/redistribute.py, no module names placements. Sends nothing.

[Note: FakeTensorMode] Under FakeTensorMode, operators on a real tensor raise. `DeviceMesh.mesh` is
a real tensor: code reads the values under `no_dispatch`.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.utils._mode_utils import no_dispatch

from .config import AssumedRanks
from .dtensor import as_dtensor, is_dtensor, mesh_coordinates, once_per_mesh, this_rank
from .units import WHOLE, Block, Cut, Split, box_shape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Box = tuple[tuple[int, int], ...]  # (start, stop) for each dim, stop excluded
# (box inside a unit, (row, column) of the matrix at which the box begins)
UnitBox = tuple[Box, tuple[int, int]]
# Indices of a dim in one unit: (start, stop, number of the block, start inside the block)
Segment = tuple[int, int, int, int]


@dataclass(frozen=True)
class Layout:
    """The boxes of a tensor on all ranks, in global indices. Equal on every rank.

    An interleaved dim is a concatenation of groups (fused gate and up projections under tensor
    parallelism) with each group sharded over the ranks: the dim of a lone `_StridedShard`. A rank
    then stores a slice of every group, concatenated. The rank's entry of `boxes` has the length of
    all slices together along the interleaved dim; start and stop divided by the number of groups
    are the indices inside each group. `boxes_of` gives the true boxes.
    """

    shape: tuple[int, ...]  # global
    boxes: dict[int, Box] = field(hash=False)  # rank -> stored box
    replicas: tuple[
        tuple[int, ...], ...
    ]  # per replica: the ranks that together hold the tensor once
    plain: bool = True  # not a DTensor: gradients may come unreduced
    interleaved: tuple[int, ...] = ()  # (dim, number of groups); () without interleaved dim
    cut_into: Cut | None = None  # units of each matrix; None: the matrix is one unit

    @functools.cached_property
    def unit_count(self) -> int:
        """Number of units of each matrix."""
        return 1 if self.cut_into is None else self.cut_into.count

    @functools.cached_property
    def unit_shapes(self) -> list[tuple[int, int]]:
        """(rows, columns) of each unit."""
        return [self.shape[-2:]] if self.cut_into is None else self.cut_into.shapes()

    @functools.cached_property
    def matrices(self) -> list[tuple[tuple[int, ...], int]]:
        """(leading indices, unit) of each matrix, row-major; equal on every rank."""
        leading = itertools.product(*map(range, self.shape[:-2]))
        return list(itertools.product(leading, range(self.unit_count)))

    @functools.cached_property
    def selected_shapes(self) -> list[tuple[int, int] | None]:
        """Shape of the part of each unit that its owner selects; None: the whole unit."""
        return [None] * self.unit_count

    @property
    def sends_parts(self) -> bool:
        """Whether ranks send only selected rows or columns of the boxes that they store."""
        return False

    def as_matrices(
        self, split: Split, param_shape: Sequence[int] | None = None, per: str = "element"
    ) -> Layout:
        """The layout of `split.matrices` of the tensor, cut into units. `param_shape`: the tensor
        is state of a parameter of this shape, with a number for each `per`, see
        `Split.state_shape`.
        """
        if split.is_whole:
            return self
        shape = split.shape(self.shape)
        cut = split.cut(self.shape if param_shape is None else param_shape)
        # State has one row for each block of rows, one column for each block of columns
        if per in ("row", "matrix"):
            cut = Cut(cut.rows, _one_each(cut.columns))
        if per in ("column", "matrix"):
            cut = Cut(_one_each(cut.rows), cut.columns)
        boxes = {rank: split.box(self.shape, box) for rank, box in self.boxes.items()}
        interleaved = ()
        if self.interleaved:
            dim, groups = self.interleaved
            interleaved = split.dim(len(self.shape), dim), groups
        return Layout(shape, boxes, self.replicas, self.plain, interleaved, cut)

    @functools.cached_property
    def _segments(self) -> tuple[list[Segment], list[Segment]]:
        """Segments of the rows and of the columns, ascending; without `cut_into` one of each."""
        blocks = [(Block(((0, size),)),) for size in self.shape[-2:]]
        if self.cut_into is not None:
            blocks = [self.cut_into.rows, self.cut_into.columns]
        return tuple(map(_segments_of, blocks))

    @functools.cached_property
    def _unit_boxes(self) -> dict[int, dict[int, list[UnitBox]]]:
        """Cache of `unit_boxes`: rank -> unit -> boxes."""
        return {}

    def unit_boxes(self, rank: int, unit: int) -> list[UnitBox]:
        """Boxes of a unit stored by `rank`, in memory order; equal in every matrix of a stack."""
        if rank not in self._unit_boxes:
            self._unit_boxes[rank] = self._cut_boxes(rank)
        return self._unit_boxes[rank].get(unit, [])

    def _cut_boxes(self, rank: int) -> dict[int, list[UnitBox]]:
        """unit -> boxes stored by `rank`."""
        found = {}
        columns = 1 if self.cut_into is None else len(self.cut_into.columns)
        for part in self.boxes_of(rank):
            for top, row, height, inner_row in _overlaps(self._segments[0], part[-2]):
                for left, column, width, inner_column in _overlaps(self._segments[1], part[-1]):
                    box = (inner_row, inner_row + height), (inner_column, inner_column + width)
                    found.setdefault(row * columns + column, []).append((box, (top, left)))
        return found

    def unit_sizes(self, rank: int) -> dict[int, int]:
        """unit -> elements stored by `rank`, without units of 0 elements."""
        self.unit_boxes(rank, 0)
        return {unit: self.unit_numel(rank, unit) for unit in self._unit_boxes[rank]}

    def unit_numel(self, rank: int, unit: int) -> int:
        """Elements of a unit stored by `rank`."""
        boxes = self.unit_boxes(rank, unit)
        return sum((r1 - r0) * (c1 - c0) for ((r0, r1), (c0, c1)), _ in boxes)

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks with a box, possibly empty, in ascending order."""
        return tuple(sorted(self.boxes))

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of shape, boxes, replicas, interleaved and units; ranks compare digests."""
        # Cached: writing out the boxes of thousands of ranks takes long
        boxes = [(rank, self.boxes[rank]) for rank in self.ranks]
        text = repr((self.shape, self.replicas, boxes, self.interleaved, self.cut_into))
        return hashlib.sha256(text.encode()).hexdigest()

    @functools.cached_property
    def replica_of(self) -> dict[int, int]:
        """rank -> index in `replicas` of the rank's replica."""
        return {rank: i for i, ranks in enumerate(self.replicas) for rank in ranks}

    def boxes_of(self, rank: int) -> list[Box]:
        """The boxes stored by `rank`: a single box, or a box per group of the interleaved dim, in
        memory order.
        """
        box = self.boxes[rank]
        if not self.interleaved:
            return [box]
        dim, count = self.interleaved
        start, stop = (end // count for end in box[dim])
        group = self.shape[dim] // count  # length of a group
        sides = [(i * group + start, i * group + stop) for i in range(count)]
        return [(*box[:dim], side, *box[dim + 1 :]) for side in sides]

    def place_of(self, rank: int, start: tuple[int, int], shape: tuple[int, int]) -> tuple:
        """The slices (rows, columns) of a box in the local shard of a matrix on `rank`.

        `start`: (row, column) of the matrix at which the box begins. `shape`: of the box, which
        lies within one element of `boxes_of(rank)`.
        """
        # Without loops: called for each view of each piece
        (top, _), (left, _) = self.boxes[rank][-2:]
        place = [start[0] - top, start[1] - left]
        if self.interleaved:
            axis = self.interleaved[0] - len(self.shape) + 2  # 0 for rows, 1 for columns
            behind = 0  # rows or columns of the shard before the part
            for part in self.boxes_of(rank):
                first, stop = part[-2:][axis]
                if first <= start[axis] < stop:
                    place[axis] = behind + start[axis] - first
                behind += stop - first
        row, column = place
        return slice(row, row + shape[0]), slice(column, column + shape[1])

    def shard_of(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A contiguous copy of the elements of `whole` (global shape) stored by `rank`."""
        parts = [whole[tuple(slice(*side) for side in box)] for box in self.boxes_of(rank)]
        if len(parts) > 1:
            return torch.cat(parts, dim=self.interleaved[0])
        # A view would keep all of `whole` in memory
        return parts[0].clone(memory_format=torch.contiguous_format)


def _one_each(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """A block of one index for each of `blocks`."""
    return tuple(Block(((k, k + 1),)) for k in range(len(blocks)))


def _segments_of(blocks: Sequence[Block]) -> list[Segment]:
    """The segments of a dim, ascending."""
    segments = []
    for number, block in enumerate(blocks):
        inner = 0
        for start, stop in block.ranges:
            segments.append((start, stop, number, inner))
            inner += stop - start
    return sorted(segments)


def _overlaps(
    segments: Sequence[Segment], side: tuple[int, int]
) -> list[tuple[int, int, int, int]]:
    """[(first index, number of the block, length, first index inside the block)] of the nonempty
    intersections of segments with `side`.
    """
    start, stop = side
    found = []
    first = bisect.bisect_right(segments, start, key=itemgetter(1))
    for low, high, number, inner in itertools.islice(segments, first, None):
        if low >= stop:
            break
        begin, end = max(low, start), min(high, stop)
        if begin < end:
            found.append((begin, number, end - begin, inner + begin - low))
    return found


def ranks_of_group(group: dist.ProcessGroup | AssumedRanks) -> tuple[int, ...]:
    """The global ranks of a process group, in its order."""
    if isinstance(group, AssumedRanks):
        return tuple(range(group.count))
    return tuple(dist.get_process_group_ranks(group))


def layout_by_rows(shape: Sequence[int], count: int) -> Layout:
    """The layout of a tensor that FSDP2 shards along dim 0 over ranks 0 to `count` - 1."""
    if not shape:  # a scalar is on every rank
        return Layout((), dict.fromkeys(range(count), ()), tuple((r,) for r in range(count)))
    ends = itertools.accumulate(row_chunks(shape[0], count), initial=0)
    others = tuple((0, n) for n in shape[1:])
    boxes = {rank: (side, *others) for rank, side in enumerate(itertools.pairwise(ends))}
    return Layout(tuple(shape), boxes, (tuple(range(count)),), plain=False)


def zeros_with_placements(
    param: DTensor,
    placements: Sequence[Placement],
    dtype: torch.dtype,
    shape: Sequence[int] | None = None,
) -> DTensor:
    """Zeros with mesh and device of `param`, but with `placements`; nothing is sent. `shape`:
    global; None: the parameter's.
    """
    mesh = param.device_mesh
    shape = param.shape if shape is None else shape
    box = box_at(mesh.get_coordinate(), tuple(shape), placements, tuple(mesh.shape))
    local = torch.zeros(box_shape(box), dtype=dtype, device=param.device)
    return as_dtensor(local, shape, mesh, placements)


def layout_of(
    param: torch.Tensor, group: dist.ProcessGroup | None = None, shape: Sequence[int] | None = None
) -> Layout:
    """The layout of `param`, or of a tensor of global `shape` with the placements of `param` (row
    state has the shape (..., R, 1)).

    group: the ranks with a replica of a plain tensor each; None: this rank alone. Unused for
    DTensors.
    """
    shape = tuple(param.shape if shape is None else shape)
    if is_dtensor(param):
        return _dtensor_layout(param, shape)
    ranks = (this_rank(),) if group is None else ranks_of_group(group)
    return Layout(
        shape, dict.fromkeys(ranks, tuple((0, n) for n in shape)), tuple((r,) for r in ranks)
    )


def _dtensor_layout(param: DTensor, shape: tuple[int, ...]) -> Layout:
    """The layout of a DTensor, or of a tensor of global `shape` with equal placements."""
    sizes = tuple(param.device_mesh.shape)
    boxes: dict[int, Box] = {}
    replicas: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in mesh_coordinates(param.device_mesh).items():
        boxes[rank] = box_at(coordinate, shape, param.placements, sizes)
        # Ranks of one replica have equal coordinates on the replicated axes
        coordinates = tuple(i for i, p in zip(coordinate, param.placements) if p.is_replicate())
        replicas.setdefault(coordinates, []).append(rank)
    ranks = tuple(map(tuple, replicas.values()))
    return Layout(shape, boxes, ranks, plain=False, interleaved=_interleaved(param.placements))


def local_layout(param: DTensor, shape: Sequence[int]) -> Layout:
    """The layout of the local shard of a tensor of global `shape`, placed like `param`: `boxes` has
    the calling rank only, which must be on the mesh, and `replicas` is empty. In contrast to
    `layout_of` the time does not grow with the mesh.
    """
    mesh, shape = param.device_mesh, tuple(shape)
    box = box_at(mesh.get_coordinate(), shape, param.placements, tuple(mesh.shape))
    return Layout(
        shape, {this_rank(): box}, (), plain=False, interleaved=_interleaved(param.placements)
    )


def _interleaved(placements: Sequence[Placement]) -> tuple[int, ...]:
    """(dim, split_factor) of a _StridedShard alone on a dim, else (); see `Layout`."""
    dims = list(map(_shard_dim, placements))
    alone = [p for p, dim in zip(placements, dims) if dims.count(dim) == 1]
    alone = [p for p in alone if _is_strided(p) and p.split_factor > 1]
    return (alone[0].dim, alone[0].split_factor) if alone else ()


def box_at(
    coordinate: Sequence[int],
    shape: tuple[int, ...],
    placements: Sequence[Placement],
    sizes: tuple[int, ...],
) -> Box:
    """The box stored at a mesh coordinate, as in `Layout.boxes`.

    shape: global; sizes: lengths of the mesh axes. Chunks have ceil(n / size) indices, as in
    torch.chunk: the last chunks may be shorter or empty.
    """
    box = [(0, n) for n in shape]
    axes = [i for i, p in enumerate(placements) if _shard_dim(p) is not None]
    # FSDP2 over TP shards the result of TP, though its mesh axis comes first: torch marks FSDP2's
    # placement as _StridedShard, and the _StridedShard is applied last.
    for axis in sorted(axes, key=lambda i: _is_strided(placements[i])):
        dim = _shard_dim(placements[axis])
        start, stop = box[dim]
        chunk = -(-(stop - start) // sizes[axis])
        box[dim] = (
            min(start + chunk * coordinate[axis], stop),
            min(start + chunk * (coordinate[axis] + 1), stop),
        )
    return tuple(box)


def sharded_among(mesh: DeviceMesh, placements: Sequence[Placement]) -> frozenset[int]:
    """The ranks of the replica of a DTensor to which the calling rank belongs: all ranks with equal
    coordinates on the axes without sharding. Empty on ranks outside the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return frozenset()
    index = tuple(
        slice(None) if _shard_dim(p) is not None else i for i, p in zip(coordinate, placements)
    )
    with no_dispatch():  # see [Note: FakeTensorMode]
        return frozenset(mesh.mesh[index].flatten().tolist())


def row_chunks(rows: int, parts: int) -> list[int]:
    """The numbers of rows of the `parts` chunks of Shard(0); the last chunks may be empty."""
    return [row_chunk(rows, parts, i) for i in range(parts)]


def row_chunk(rows: int, parts: int, i: int) -> int:
    """Entry `i` of `row_chunks`, in a time that does not grow with `parts`."""
    chunk = -(-rows // parts)
    return min(chunk, max(0, rows - chunk * i))


def stored_by(tensor: DTensor) -> int | None:
    """The global rank to which the local shard of `tensor` belongs; None: a rank outside the mesh.

    Differs from the calling rank for a DTensor loaded from another rank's file.
    """
    # torch pickles the mesh together with the coordinate of the rank that wrote the file
    coordinate = tensor.device_mesh.get_coordinate()
    with no_dispatch():  # see [Note: FakeTensorMode]
        return None if coordinate is None else int(tensor.device_mesh.mesh[tuple(coordinate)])


def is_own_shard(tensor: DTensor) -> bool:
    """Whether the local shard of `tensor` belongs to the calling rank. False for a DTensor loaded
    from another rank's file, unless replicated.

    For Shard(0) on a 1-D mesh, the number of local rows must be right, too.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    theirs = mesh.get_coordinate()  # of the rank that made the mesh: see `stored_by`
    ours = _coordinate_of(this_rank(), mesh)
    # Replicated axes may differ: all ranks along a replicated axis store equal elements
    if ours is None or theirs is None:
        return ours is theirs or all(p.is_replicate() for p in placements)
    if any(a != b and not p.is_replicate() for a, b, p in zip(theirs, ours, placements)):
        return False
    # Owner state has this form (communication/redistribute.py, `by_rows`), and loading moves its
    # rows between owners by the counts of `row_chunks`.
    by_rows = mesh.ndim == 1 and placements[0].is_shard(0) and not _is_strided(placements[0])
    if not by_rows:
        return True
    return len(tensor._local_tensor) == row_chunk(tensor.shape[0], mesh.size(), ours[0])


def _coordinate_of(rank: int, mesh: DeviceMesh) -> tuple[int, ...] | None:
    """The coordinate of a global rank on a mesh, computed from the mesh's ranks, not from the
    mesh's own `get_coordinate`; None if the rank is not on the mesh.
    """
    return mesh_coordinates(mesh).get(rank)


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The global ranks of a mesh, in ascending order."""
    return sorted(mesh_coordinates(mesh))


def stored_ranges(param: torch.Tensor, dim: int) -> list[tuple[int, int]]:
    """The ranges (start, stop) of global indices along `dim` that the calling rank stores, in
    memory order. Raises NotImplementedError for placements without certain boxes.
    """
    shape = tuple(param.shape)
    if not is_dtensor(param):
        return [(0, shape[dim])]
    mesh, placements = param.device_mesh, param.placements
    coordinate = mesh.get_coordinate()
    if objection := unsupported_sharding(param):
        raise NotImplementedError(f"placements {placements} of shape {shape}: {objection}")
    if coordinate is None:
        return []
    box = box_at(coordinate, shape, placements, tuple(mesh.shape))
    interleaved = _interleaved(placements)
    if not interleaved or interleaved[0] != dim:
        return [box[dim]]
    return [part[dim] for part in Layout(shape, {0: box}, (), False, interleaved).boxes_of(0)]


def coordinates_of_parts(
    param: torch.Tensor, dim: int, parts: int, name: str | None = None
) -> list[int]:
    """The calling rank's coordinate on each mesh axis of `parts` ranks that shards `dim`; an axis
    of FSDP2 over TP does not count. `name`: of the only axis that counts.
    """
    if not is_dtensor(param) or param.device_mesh.get_coordinate() is None:
        return []
    mesh = param.device_mesh
    axes = [i for i, p in enumerate(param.placements) if _shard_dim(p) == dim]
    if name is not None:
        axes = [i for i in axes if (mesh.mesh_dim_names or ())[i : i + 1] == (name,)]
    elif len(axes) > 1:
        axes = [i for i in axes if not _is_strided(param.placements[i])]
    return [mesh.get_coordinate()[i] for i in axes if mesh.shape[i] == parts]


def groups_of_mesh(mesh: DeviceMesh) -> list[dist.ProcessGroup] | None:
    """The calling rank's process group of each mesh axis. None if the rank is not on the mesh, or
    if a group is missing or connects ranks unlike the mesh's.

    The mesh of a DTensor loaded from another run's file may name groups that do not exist, or name
    groups of unlike ranks.
    """
    ours = _coordinate_of(this_rank(), mesh)
    if ours is None or not (dist.is_available() and dist.is_initialized()):
        return None
    groups = []
    for axis in range(mesh.ndim):
        try:
            group = mesh.get_group(axis)
            ranks = dist.get_process_group_ranks(group)
        except (RuntimeError, KeyError, ValueError):
            # The errors of torch for a group that this process does not have
            return None
        with no_dispatch():  # see [Note: FakeTensorMode]
            row = mesh.mesh[(*ours[:axis], slice(None), *ours[axis + 1 :])].tolist()
        if sorted(ranks) != sorted(row):
            return None
        groups.append(group)
    return groups


def check_placements(param: torch.Tensor, name: str, use_muon: bool = True) -> None:
    """Raise NotImplementedError, naming the parameter, for placements with uncertain boxes.

    Accepted are Replicate, Shard and _StridedShard; the latter with `use_muon` only if
    `unsupported_sharding` has no objection. AdamW works on local shards and needs no boxes.
    """
    if not is_dtensor(param):
        return
    placements = param.placements
    label = f"parameter {name} of shape {tuple(param.shape)} with placements {placements}"
    if any(p.is_partial() for p in placements):
        raise NotImplementedError(
            f"{label}: Partial holds unsummed terms; redistribute it to Replicate or Shard first"
        )
    # Placements that a later torch, or a user, may add
    if any(_shard_dim(p) is None and not p.is_replicate() for p in placements):
        raise NotImplementedError(
            f"{label}: only Replicate, Shard and _StridedShard are known; redistribute it to these"
        )
    if use_muon and (objection := unsupported_sharding(param)):
        raise NotImplementedError(
            f"{label}: {objection}. Put it into a group with use_muon=False, since AdamW takes "
            "every _StridedShard, or shard it in another way"
        )
    _check_shard_order(param, label)
    _check_rank_order(param, label)


def check_state_sharding(
    param: torch.Tensor,
    name: str,
    per: str,
    split: Split = WHOLE,
    by_rows: bool = False,
    selects: bool = False,
) -> None:
    """Raise NotImplementedError, naming the parameter, if state with a number for each `per` cannot
    be stored like `param`: along an interleaved dim the state has another size. `split`: how the
    parameter is cut into matrices. `by_rows`: owners keep the state, by rows of the parameter.
    `selects`: ranks send selected rows or columns, with their state.
    """
    interleaved = _interleaved(param.placements) if is_dtensor(param) else ()
    shape, of_state = tuple(param.shape), split.state_shape(param.shape, per)
    if interleaved and of_state[interleaved[0]] != shape[interleaved[0]]:
        raise NotImplementedError(
            f"parameter {name} of shape {shape} with placements {param.placements}: the rule "
            f"keeps one number for each {per}, which torch cannot shard like this interleaved "
            "dim. Use Muon's rule for it, or put it into a group with use_muon=False"
        )
    if selects and is_dtensor(param) and not split.is_whole:
        blocks = layout_of(param).as_matrices(split)
        numbers = layout_of(param, shape=of_state).as_matrices(split, shape, per)
        if any(numbers.unit_sizes(r).keys() - blocks.unit_sizes(r).keys() for r in blocks.ranks):
            raise NotImplementedError(
                f"parameter {name} of shape {shape} with placements {param.placements}: the rule "
                "selects rows with their state, but a rank has state of a block of `split` that is "
                "on another rank: shard another dim, or take rule='dion2'"
            )
    if by_rows and of_state[0] != shape[0]:
        raise NotImplementedError(
            f"parameter {name} of shape {shape}: the rule keeps state of shape {of_state}, one "
            f"number for each {per}, which cannot be divided by rows of the parameter among "
            "owners: leave out shard_state=True and grads_are_reduced=False, or use Muon's rule "
            "for it"
        )


def check_unit_sharding(param: torch.Tensor, name: str, split: Split) -> None:
    """Raise NotImplementedError, naming the parameter, if the units of `split` cannot have the
    placements of `param`.
    """
    interleaved = _interleaved(param.placements) if is_dtensor(param) else ()
    # `Layout.place_of` slices rows and columns of matrices only
    if interleaved and split.dim(param.ndim, interleaved[0]) < len(split.shape(param.shape)) - 2:
        raise NotImplementedError(
            f"parameter {name} of shape {tuple(param.shape)} with placements {param.placements}: "
            "its _StridedShard is alone on a dim along which split='taps' stacks matrices: shard "
            "it in another way"
        )


def unsupported_sharding(param: DTensor) -> str:
    """The reason, in words, why `Layout` has no certain boxes for a DTensor; "" for a supported
    DTensor.

    Supported: any Shard and Replicate, and a single _StridedShard, either FSDP2's over TP (with a
    split_factor equal to the size of the later mesh axes on the dim), or alone on the rows or
    columns of a matrix and in equal parts.
    """
    placements = param.placements
    sizes = param.device_mesh.shape
    strided = [i for i, p in enumerate(placements) if _is_strided(p)]
    if len(strided) > 1:
        return "it has more than one _StridedShard, but only one is allowed"
    for i in strided:
        dim, factor = placements[i].dim, placements[i].split_factor
        others = [j for j, p in enumerate(placements) if j != i and _shard_dim(p) == dim]
        # FSDP2 sets split_factor to the number of parts into which TP has cut the dim. Any value
        # but this one means another order of cuts, for which `box_at` would be wrong.
        split = math.prod(sizes[j] for j in others if j > i)
        if others and factor != split:
            return (
                "several mesh axes shard one dim in an order that is not FSDP2's over TP, where "
                "the split_factor of the _StridedShard is the size of the later mesh axes on its "
                f"dim ({split}, not {factor})"
            )
        # With split_factor 1 a _StridedShard is a Shard
        if others or factor == 1:
            continue
        if param.shape[dim] % (factor * sizes[i]):
            return (
                f"its _StridedShard is alone on a dim of {param.shape[dim]}, which {factor} "
                f"groups x {sizes[i]} ranks do not divide into equal parts"
            )
        # `Layout.place_of` slices rows and columns of matrices, not the dims that stack matrices
        if dim < param.ndim - 2:
            return "its _StridedShard is alone on a leading dim, along which matrices are stacked"
    return ""


def _check_shard_order(param: DTensor, label: str) -> None:
    """Raise NotImplementedError if mesh axes shard a dim in another order than left to right.

    `box_at` assumes left to right; torch >= 2.10 allows any order. label: for the message.
    """
    # Both attributes are missing before torch 2.10
    order = getattr(param._spec, "shard_order", None)
    usual = getattr(type(param._spec), "compute_default_shard_order", None)
    if (
        order
        and usual
        and not any(map(_is_strided, param.placements))
        and order != usual(param.placements)
    ):
        raise NotImplementedError(
            f"{label}: shard order {order} is unknown, only mesh axes from left to right are "
            "allowed; redistribute it"
        )


def _check_rank_order(param: DTensor, label: str) -> None:
    """Raise NotImplementedError if ranks do not ascend along a sharding mesh axis.

    Torch is inconsistent about descending ranks: sharding follows the order of the mesh, gathering
    the order of the ranks. label: for the message.
    """
    mesh = param.device_mesh
    if mesh.get_coordinate() is None:
        return
    descending = _descending_axes(mesh)
    axes = [i for i, p in enumerate(param.placements) if i in descending and not p.is_replicate()]
    if axes:
        with no_dispatch():  # see [Note: FakeTensorMode]
            ranks = mesh.mesh.tolist()
        raise NotImplementedError(
            f"{label}: its mesh {ranks} has ranks that do not ascend along axis {axes[0]}, on "
            "which it is sharded; torch itself is not consistent about which rank stores which "
            "part: build the DeviceMesh with ascending ranks along the axes that shard"
        )


@once_per_mesh
def _descending_axes(mesh: DeviceMesh) -> frozenset[int]:
    """The axes of a mesh along which ranks do not ascend."""
    ranks = mesh.mesh
    return frozenset(i for i in range(ranks.ndim) if (ranks.diff(dim=i) < 0).any())


def check_local_shape(param: torch.Tensor, name: str) -> None:
    """Raise NotImplementedError if shape of local shard and placements of a DTensor disagree, or if
    the calling rank is not on the mesh of a DTensor with requires_grad=True.
    """
    coordinate = param.device_mesh.get_coordinate() if is_dtensor(param) else None
    if coordinate is None:
        if is_dtensor(param) and param.requires_grad:
            raise NotImplementedError(
                f"parameter {name} lies on {param.device_mesh}, which rank {this_rank()} is no "
                "part of: leave it out of the groups on this rank"
            )
        return
    box = box_at(coordinate, tuple(param.shape), param.placements, tuple(param.device_mesh.shape))
    # AdamW takes any sharding, also if the box is uncertain
    if unsupported_sharding(param):
        return
    expected = box_shape(box)
    if expected != tuple(param._local_tensor.shape):
        raise NotImplementedError(
            f"parameter {name} of shape {tuple(param.shape)}: this rank stores a shard of shape "
            f"{tuple(param._local_tensor.shape)}, but its placements {param.placements} say "
            f"{expected} (indices {box}); only torch's own sharding is known: shard it with "
            "distribute_tensor or fully_shard"
        )


def _shard_dim(placement: Placement) -> int | None:
    """The tensor dim sharded by a placement; None for Replicate and Partial."""
    # _StridedShard is a subclass of Shard in some versions of torch only
    return placement.dim if placement.is_shard() or _is_strided(placement) else None


def _is_strided(placement: Placement) -> bool:
    """Whether a placement is a _StridedShard, by class name: the class is private in torch."""
    return type(placement).__name__ == "_StridedShard"

"""`Layout`: the box of global indices that each rank stores of a parameter.

Turns the placements of a DTensor into boxes, and refuses placements for which the boxes are not
certain. Besides communication/redistribute.py the only module that names placements. Knows no
owners and no buckets.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.utils._mode_utils import no_dispatch

from .dtensor import as_dtensor, is_dtensor


@dataclass(frozen=True)
class Layout:
    """`boxes`: rank -> ((start, stop) for each dim), the global indices it stores; `copies`: the
    rank sets which together hold the tensor once, one for each replica; `plain`: not a DTensor, so
    that gradients may come unreduced.

    `interleaved`: (dim, number of groups) if the dim is a concatenation of groups, each of which is
    cut over the ranks: DTensor's `_StridedShard` that is alone on its dim, as tensor parallelism
    stores fused gate and up projections; () if there is none. A rank then stores one part of each
    group, one after another. Its entry of `boxes` has their size together, and says by its start
    which part of each group they are; `parts_of` has the indices.
    """

    shape: tuple
    boxes: dict = field(hash=False)
    copies: tuple
    plain: bool = True
    interleaved: tuple = ()

    @functools.cached_property
    def ranks(self) -> tuple:
        """The ranks that have a box, in ascending order."""
        return tuple(sorted(self.boxes))

    @functools.cached_property
    def digest(self) -> str:
        """A text that differs where two ranks' layouts do; thousands of boxes are written out
        once.
        """
        boxes = [(rank, self.boxes[rank]) for rank in self.ranks]
        text = repr((self.shape, self.copies, boxes, self.interleaved))
        return hashlib.sha256(text.encode()).hexdigest()

    @functools.cached_property
    def copy_of(self) -> dict:
        """rank -> number of the copy that it is part of."""
        return {rank: i for i, ranks in enumerate(self.copies) for rank in ranks}

    def parts_of(self, rank: int) -> list[tuple]:
        """The boxes of global indices that `rank` stores, in the order of its memory along the
        interleaved dim.
        """
        box = self.boxes[rank]
        if not self.interleaved:
            return [box]
        dim, count = self.interleaved
        start, stop = (end // count for end in box[dim])
        group = self.shape[dim] // count  # indices from one group to the next
        sides = [(i * group + start, i * group + stop) for i in range(count)]
        return [(*box[:dim], side, *box[dim + 1 :]) for side in sides]

    def place_of(self, rank: int, box: tuple) -> tuple:
        """Index into a matrix's part at `rank`, (rows, columns): where `box` is, the last two sides
        of one of `parts_of(rank)`.
        """
        place = [slice(None), slice(None)]
        if self.interleaved:
            dim = self.interleaved[0] - len(self.shape)
            number = [part[-2:] for part in self.parts_of(rank)].index(box)
            size = box[dim][1] - box[dim][0]
            place[dim] = slice(number * size, (number + 1) * size)
        return tuple(place)

    def cut(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """What `rank` stores of `whole`, in memory of its own."""
        parts = [whole[tuple(slice(*side) for side in box)] for box in self.parts_of(rank)]
        if len(parts) > 1:
            return torch.cat(parts, dim=self.interleaved[0])
        # a view would keep all of `whole` in memory
        return parts[0].clone(memory_format=torch.contiguous_format)


def zeros_with_placements(param, placements, dtype):
    """Zeros of a parameter's shape with placements of a gradient; nothing is sent."""
    mesh = param.device_mesh
    box = box_at(mesh.get_coordinate(), tuple(param.shape), placements, tuple(mesh.shape))
    local = torch.zeros([b - a for a, b in box], dtype=dtype, device=param.device)
    return as_dtensor(local, param.shape, mesh, placements)


def layout_of(param, group=None, shape=None) -> Layout:
    """The layout of `param`, or of a tensor of another `shape` placed like it (row state is (...,
    R, 1)).

    `group`: the ranks which hold a copy of a plain tensor; None means that nobody else does.
    """
    shape = tuple(param.shape if shape is None else shape)
    if is_dtensor(param):
        return _dtensor_layout(param, shape)
    ranks = [this_rank()] if group is None else dist.get_process_group_ranks(group)
    return Layout(
        shape, dict.fromkeys(ranks, tuple((0, n) for n in shape)), tuple((r,) for r in ranks)
    )


def _dtensor_layout(param, shape) -> Layout:
    mesh, boxes, copies = param.device_mesh.mesh, {}, {}
    sizes = tuple(mesh.shape)
    for coordinate in (mesh >= 0).nonzero().tolist():
        rank = int(mesh[tuple(coordinate)])
        boxes[rank] = box_at(coordinate, shape, param.placements, sizes)
        replica = tuple(i for i, p in zip(coordinate, param.placements) if p.is_replicate())
        copies.setdefault(replica, []).append(rank)
    copies = tuple(map(tuple, copies.values()))
    return Layout(shape, boxes, copies, plain=False, interleaved=_interleaved(param.placements))


def _interleaved(placements) -> tuple:
    """(dim, split factor) of a _StridedShard that is alone on its dim, else ()."""
    dims = list(map(_shard_dim, placements))
    alone = [p for p, dim in zip(placements, dims) if dims.count(dim) == 1]
    alone = [p for p in alone if _is_strided(p) and p.split_factor > 1]
    return (alone[0].dim, alone[0].split_factor) if alone else ()


def box_at(coordinate, shape, placements, sizes):
    """The box stored at one mesh coordinate, as in `Layout.boxes`. FSDP2 over TP cuts what TP left:
    its _StridedShard goes last.
    """
    box = [(0, n) for n in shape]
    axes = [i for i, p in enumerate(placements) if _shard_dim(p) is not None]
    for axis in sorted(axes, key=lambda i: _is_strided(placements[i])):
        dim = _shard_dim(placements[axis])
        start, stop = box[dim]
        chunk = -(-(stop - start) // sizes[axis])
        box[dim] = (
            min(start + chunk * coordinate[axis], stop),
            min(start + chunk * (coordinate[axis] + 1), stop),
        )
    return tuple(box)


def sharded_among(mesh, placements) -> frozenset:
    """The ranks that together with this one hold a tensor once: along the axes of the mesh that
    shard it.
    """
    here = mesh.get_coordinate()
    if here is None:
        return frozenset()
    places = tuple(
        slice(None) if _shard_dim(p) is not None else at for at, p in zip(here, placements)
    )
    with no_dispatch():
        return frozenset(mesh.mesh[places].flatten().tolist())


def row_chunks(rows, parts) -> list:
    """The sizes of the chunks into which torch cuts so many rows."""
    part = -(-rows // parts)
    return [min(part, max(0, rows - part * i)) for i in range(parts)]


def stored_by(tensor) -> int | None:
    """The global rank whose shard of a DTensor this is; None: a rank that is not part of the mesh.

    A DTensor from a file has the shard of the rank that wrote it: torch pickles the coordinate of
    that rank on the mesh.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    with no_dispatch():  # a FakeTensorMode takes no real tensors
        return None if coordinate is None else int(tensor.device_mesh.mesh[tuple(coordinate)])


def is_own_shard(tensor) -> bool:
    """Whether the local elements of a DTensor are those that this rank stores of it, and not those
    of the rank that wrote the file from which it comes. Of rows cut over one group, also whether
    their number is right.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    theirs, ours = mesh.get_coordinate(), _coordinate_of(this_rank(), mesh)
    if ours is None or theirs is None:
        return ours is theirs or all(p.is_replicate() for p in placements)
    if any(a != b and not p.is_replicate() for a, b, p in zip(theirs, ours, placements)):
        return False
    by_rows = mesh.ndim == 1 and placements[0].is_shard(0) and not _is_strided(placements[0])
    if not by_rows:
        return True
    return len(tensor._local_tensor) == row_chunks(tensor.shape[0], mesh.size())[ours[0]]


def _coordinate_of(rank: int, mesh) -> tuple | None:
    """Where a global rank is on a mesh; None: nowhere."""
    with no_dispatch():
        ranks, sizes = mesh.mesh.flatten().tolist(), tuple(mesh.mesh.shape)
    if rank not in ranks:
        return None
    place, coordinate = ranks.index(rank), []
    for size in reversed(sizes):
        place, at = divmod(place, size)
        coordinate.insert(0, at)
    return tuple(coordinate)


def ranks_of(mesh) -> list[int]:
    """The global ranks of a mesh, in ascending order."""
    with no_dispatch():  # a FakeTensorMode takes no real tensors
        return sorted(mesh.mesh.flatten().tolist())


def groups_of_mesh(mesh) -> list | None:
    """The process group of each axis of a mesh that has this rank; None where a group is missing or
    connects other ranks, as may be for a mesh from the file of another run.
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
            return None
        with no_dispatch():
            row = mesh.mesh[(*ours[:axis], slice(None), *ours[axis + 1 :])].tolist()
        if sorted(ranks) != sorted(row):
            return None
        groups.append(group)
    return groups


def _cut_by_torch(whole: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """What this rank stores of `whole`, cut by torch's own code; nothing is sent."""
    from torch.distributed.tensor import Replicate

    mesh = param.device_mesh
    copy = as_dtensor(whole.to(param.device), whole.shape, mesh, [Replicate()] * mesh.ndim)
    local = copy.redistribute(placements=param.placements).to_local()
    return local.clone(memory_format=torch.contiguous_format)


def check_placements(param, name, use_muon=True) -> None:
    """Raise NotImplementedError, naming the parameter, for placements whose boxes would be a guess.

    Accepted are Replicate, Shard and _StridedShard. Without `use_muon`, for AdamW, which asks for
    no boxes, every _StridedShard is; with it, those of `_is_unknown`'s rules.
    """
    if not is_dtensor(param):
        return
    kinds, what = (
        param.placements,
        f"parameter {name} of shape {tuple(param.shape)} with placements {param.placements}",
    )
    if any(p.is_partial() for p in kinds):
        raise NotImplementedError(
            f"{what}: Partial holds unsummed terms; redistribute it to Replicate or Shard first"
        )
    if any(_shard_dim(p) is None and not p.is_replicate() for p in kinds):
        raise NotImplementedError(
            f"{what}: only Replicate, Shard and _StridedShard are known; redistribute it to these"
        )
    if use_muon and (wrong := _is_unknown(param)):
        raise NotImplementedError(
            f"{what}: {wrong}. Put it into a group with use_muon=False, "
            "since AdamW takes every _StridedShard, or shard it in another way"
        )
    _check_shard_order(param, what)
    _check_rank_order(param, what)


def check_row_state(param, name) -> None:
    """Raise NotImplementedError, naming the parameter, if torch could not put NorMuon's row state
    together again.
    """
    interleaved = _interleaved(param.placements) if is_dtensor(param) else ()
    if interleaved and interleaved[0] == param.ndim - 1:
        raise NotImplementedError(
            f"parameter {name} of shape {tuple(param.shape)} with placements {param.placements}: "
            "NorMuon keeps one number for each row, which torch cannot cut like these columns. Use "
            "Muon for it, or use_muon=False"
        )


def _is_unknown(param) -> str:
    """What is unknown of how a DTensor is cut, in words; "" where `Layout` has the boxes."""
    kinds, sizes = param.placements, param.device_mesh.shape
    strided = [i for i, p in enumerate(kinds) if _is_strided(p)]
    if len(strided) > 1:
        return "it has more than one _StridedShard, but only one is allowed"
    for i in strided:
        dim, factor = kinds[i].dim, kinds[i].split_factor
        others = [j for j, p in enumerate(kinds) if j != i and _shard_dim(p) == dim]
        split = math.prod(sizes[j] for j in others if j > i)
        if others and factor != split:
            return (
                "several mesh axes cut one dim in an order that is not FSDP2's over TP, where "
                "the split_factor of the _StridedShard is the size of the later mesh axes on "
                f"its dim ({split})"
            )
        if others or factor == 1:
            continue
        if param.shape[dim] % (factor * sizes[i]):
            return (
                f"its _StridedShard is alone on a dim of {param.shape[dim]}, which {factor} "
                f"groups x {sizes[i]} ranks do not divide into equal parts"
            )
        if dim < param.ndim - 2:
            return "its _StridedShard is alone on a leading dim, along which matrices are stacked"
    return ""


def _check_shard_order(param, what) -> None:
    """torch >= 2.10 can shard one dim over mesh axes in any order; the boxes here assume left to
    right.
    """
    order = getattr(param._spec, "shard_order", None)
    usual = getattr(type(param._spec), "compute_default_shard_order", None)
    if (
        order
        and usual
        and not any(map(_is_strided, param.placements))
        and order != usual(param.placements)
    ):
        raise NotImplementedError(
            f"{what}: shard order {order} is not left to right; redistribute it"
        )


def _check_rank_order(param, what) -> None:
    """Where ranks do not ascend along a sharded axis, torch cuts in the mesh's order, and gathers
    in the ranks'.
    """
    mesh = param.device_mesh
    if mesh.get_coordinate() is None:
        return
    with no_dispatch():  # a FakeTensorMode takes no real tensors
        ranks = mesh.mesh
        odd = [
            i
            for i, p in enumerate(param.placements)
            if not p.is_replicate() and (ranks.diff(dim=i) < 0).any()
        ]
        if odd:
            raise NotImplementedError(
                f"{what}: its mesh {ranks.tolist()} has ranks that do not ascend along axis "
                f"{odd[0]}, on which it is "
                "sharded; torch itself does not say which of them stores what: build the "
                "DeviceMesh with ascending "
                "ranks along the axes that shard"
            )


def check_local_shape(param, name) -> None:
    """Raise NotImplementedError if this rank stores another box of a DTensor than its placements
    say, or none at all, of one that is to be stepped.
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
    if _is_unknown(param):
        return
    if tuple(b - a for a, b in box) != tuple(param._local_tensor.shape):
        raise NotImplementedError(
            f"parameter {name}: this rank stores {tuple(param._local_tensor.shape)}, its "
            f"placements {param.placements} say {box}; only torch's own sharding is known"
        )


def _shard_dim(placement):
    """The sharded dim, or None. _StridedShard is a subclass of Shard in some versions of torch and
    not in others.
    """
    return placement.dim if placement.is_shard() or _is_strided(placement) else None


def _is_strided(placement) -> bool:
    return type(placement).__name__ == "_StridedShard"


def this_rank() -> int:
    """The global rank of this process; 0 where nothing is distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

"""Whether the DTensors of a loaded state hold what this rank stores of them.

A file that one rank wrote with torch.save has that rank's part of each DTensor. Loaded on another
rank it fits in shape and dtype, and would be taken for the part of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..communication.store_barrier import wait_for_all
from ..params.dtensor import is_by_rows, is_dtensor, is_placed_like
from ..params.layout import groups_of_mesh, is_own_shard, stored_by, this_rank
from ..rules.rule import ROW_SHARDED_KEYS

ADVICE = (
    "A file that one rank writes has only that rank's part of such state. Save with "
    "torch.distributed.checkpoint, or get_optimizer_state_dict with full_state_dict=True; "
    "with shard_state=True or grads_are_reduced=False also by calling "
    "consolidate_state_dict() on all ranks before rank 0 writes its state_dict()"
)


def check_shards(members: list, options: object) -> None:
    """Raise ValueError if a loaded DTensor is another rank's part of it, or lies on ranks that are
    no process group here.

    `members`: [(parameter, group, name, its loaded state)]; `options`: the optimizer's. Ranks that
    load DTensors which are gathered, or which owners keep, wait for each other: all of them raise
    if one does. RuntimeError if some of them do not come.
    """
    shards = [
        (param, f"{key} of parameter {name}", state[key])
        for param, _, name, state in members
        for key in ROW_SHARDED_KEYS
        if is_dtensor(state.get(key))
    ]
    if not shards:
        return
    fault = next(filter(None, (_fault(*shard, options) for shard in shards)), None)
    group = _loading_group(shards, options)
    refusing = []
    if group is not None:
        call = "load_state_dict() with DTensors"
        refusing = wait_for_all(group, call, "All of them load together", fault is not None)
    if fault is not None:
        raise ValueError(f"{fault}. {ADVICE}")
    if refusing:
        raise ValueError(
            f"{shards[0][1]} is this rank's own part, but ranks {refusing} were given "
            f"a part that is not theirs. {ADVICE}"
        )


def _fault(param: torch.Tensor, what: str, value: torch.Tensor, options: object) -> str | None:
    """What is wrong with one DTensor, or None."""
    mesh = value.device_mesh
    if not is_own_shard(value):
        owner = stored_by(value)
        whose = "another rank" if owner in (None, this_rank()) else f"rank {owner}"
        return (
            f"{what} is the part that {whose} of {mesh.size()} stored, but this is rank "
            f"{this_rank()}"
        )
    if _is_gathered(param, value, options) and groups_of_mesh(mesh) is None:
        return (
            f"{what} was stored in parts by {mesh.size()} ranks, of which there is no process "
            f"group here to gather it (this is rank {this_rank()})"
        )
    return None


def _is_gathered(param: torch.Tensor, value: torch.Tensor, options: object) -> bool:
    """Whether `load_state_dict` has to gather a DTensor, over the process groups of its mesh."""
    if all(p.is_replicate() for p in value.placements) or is_placed_like(value, param):
        return False
    return not (options.owner_keeps_state and is_by_rows(value, options.process_group))


def _loading_group(shards: list, options: object) -> dist.ProcessGroup | None:
    """The ranks that have to load together; None where each may load alone, or where they are not
    all in one process group.
    """
    if options.owner_keeps_state:
        return options.process_group
    for param, _, value in shards:
        if value.device_mesh.ndim == 1 and _is_gathered(param, value, options):
            groups = groups_of_mesh(value.device_mesh)
            return None if groups is None else groups[0]
    return None

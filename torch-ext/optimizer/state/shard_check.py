"""Whether the DTensors of a loaded state hold what this rank stores of them.

A file that one rank wrote with torch.save has that rank's part of each DTensor. Loaded on another
rank it fits in shape and dtype, and would be taken for the part of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..communication.process_groups import world_now
from ..communication.store_barrier import wait_for_all
from ..params.dtensor import is_by_rows, is_dtensor, is_placed_like
from ..params.layout import groups_of_mesh, is_own_shard, ranks_of, stored_by, this_rank
from ..rules.rule import ROWS

ADVICE = (
    "A file that one rank writes has only that rank's part of such state. Save with "
    "torch.distributed.checkpoint, or get_optimizer_state_dict with full_state_dict=True; "
    "with shard_state=True or grads_are_reduced=False also by calling "
    "consolidate_state_dict() on all ranks before rank 0 writes its state_dict()"
)


def check_shards(members: list, options: object, refusal: ValueError | None = None) -> None:
    """Raise ValueError if a loaded DTensor is another rank's part of it, or lies on ranks that are
    no process group here; or `refusal`, an error for which this rank does not load.

    `members`: [(parameter, group, name, its loaded state)]; `options`: the optimizer's. Ranks that
    load DTensors which are gathered, or which owners keep, wait for each other: all of them raise
    if one does. RuntimeError if some of them do not come.
    """
    shards = [
        (param, f"{key} of parameter {name}", state[key])
        for param, _, name, state in members
        if isinstance(state, dict)
        for key in ROWS
        if is_dtensor(state.get(key))
    ]
    fault = next(filter(None, (_fault(*shard, options) for shard in shards if not refusal)), None)
    if fault is not None:
        refusal = ValueError(f"{fault}. {ADVICE}")
    groups, refusing = _loading_groups(shards, options), set()
    for group in groups:
        call = "load_state_dict() with DTensors"
        refuses = refusal is not None or bool(refusing)
        refusing.update(wait_for_all(group, call, "All of them load together", refuses))
    if refusal is not None:
        raise refusal
    if refusing:
        relayed = " or ranks that load with them" if len(groups) > 1 else ""
        raise ValueError(
            f"{shards[0][1]} is this rank's own part, but ranks {sorted(refusing)}"
            f"{relayed} were given a part that is not theirs or does not fit. {ADVICE}"
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


def _loading_groups(shards: list, options: object) -> list[dist.ProcessGroup]:
    """The process groups over which ranks that load together tell each other of a refusal, one
    after another; [] where each may load alone, or where no groups join them.

    A refusal has to cross one mesh to reach the ranks of the next one, so all groups come as many
    times as there are meshes.
    """
    joined, known = [], []
    if shards and options.owner_keeps_state:
        joined.append([options.process_group])
    for param, _, value in shards:
        if value.device_mesh not in known and _is_gathered(param, value, options):
            known.append(value.device_mesh)
            joined.append(_groups_joining(value.device_mesh, param))
    joined = list(filter(None, joined))
    return [group for groups in joined for group in groups] * len(joined)


def _groups_joining(mesh: object, param: torch.Tensor) -> list[dist.ProcessGroup]:
    """Process groups that together join the ranks of a mesh, as all of these ranks find them.

    A mesh from a file has the groups of the rank that wrote it, so the default group or those of
    the parameter's mesh are taken where they have the same ranks.
    """
    ranks, world = ranks_of(mesh), world_now()
    if world is not None and sorted(dist.get_process_group_ranks(world)) == ranks:
        return [world]
    if is_dtensor(param) and ranks_of(param.device_mesh) == ranks:
        mesh = param.device_mesh
    return groups_of_mesh(mesh) or []

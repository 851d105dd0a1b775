"""Check of the DTensors in a loaded state: does each hold the shard of this rank?

A file written by a single rank with torch.save holds the rank's shard of each DTensor. On another
rank the shard would fit in shape and dtype, and would silently be taken for the own shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..communication.process_groups import world_now
from ..communication.store_barrier import wait_for_all
from ..params.config import MuonConfig
from ..params.dtensor import is_by_rows, is_dtensor, is_placed_like
from ..params.layout import groups_of_mesh, is_own_shard, ranks_of, stored_by, this_rank
from ..planning.plan import bucket_sort_key
from ..rules.rule import row_sharded_keys

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ADVICE = (
    "A file that one rank writes has only that rank's part of such state. Save with "
    "torch.distributed.checkpoint, or get_optimizer_state_dict with full_state_dict=True; "
    "with shard_state=True or grads_are_reduced=False also by calling "
    "consolidate_state_dict() on all ranks before rank 0 writes its state_dict()"
)


def check_shards(
    members: list[tuple[torch.Tensor, dict, str, object]],
    options: Mapping[torch.Tensor, MuonConfig],
    refusal: ValueError | None = None,
) -> None:
    """Raise ValueError if a loaded DTensor holds the shard of another rank, or lies on ranks
    without a process group in the process; or raise `refusal`, an earlier error of the rank.

    `members`: [(parameter, group, name, loaded state)]. `options`: of each parameter. Ranks with
    DTensors loaded by communication (gathered, or kept by owners) wait for all peers: if any rank
    raises, all raise. RuntimeError if peers do not come.
    """
    shards = [
        (param, f"{key} of parameter {name}", state[key])
        for param, _, name, state in members
        if isinstance(state, dict)
        for key in row_sharded_keys()
        if is_dtensor(state.get(key))
    ]
    # A refusal is not raised before the ranks have met below: other ranks may wait for this rank
    faults = (_fault(*shard, options[shard[0]]) for shard in shards if not refusal)
    fault = next(filter(None, faults), None)
    if fault is not None:
        refusal = ValueError(f"{fault}. {ADVICE}")
    groups = _loading_groups(shards, options)
    refusing = set()  # global ranks
    # A rank that learns of a refusal passes it on to the groups after
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


def _fault(param: torch.Tensor, what: str, value: torch.Tensor, options: MuonConfig) -> str | None:
    """Return the fault of a DTensor as text, or None."""
    mesh = value.device_mesh  # as the writing rank saw it: coordinates tell whose shard it is
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


def _is_gathered(param: torch.Tensor, value: torch.Tensor, options: MuonConfig) -> bool:
    """Return whether `load_state_dict` has to gather a DTensor, over the process groups of its
    mesh.
    """
    # Replicated or placed like the parameter: the local tensor is enough
    if all(p.is_replicate() for p in value.placements) or is_placed_like(value, param):
        return False
    return not (options.owner_keeps_state and is_by_rows(value, options.process_group))


def _loading_groups(
    shards: list, options: Mapping[torch.Tensor, MuonConfig]
) -> list[dist.ProcessGroup]:
    """Return the process groups over which ranks exchange refusals, in order; [] if each rank may
    load alone, or if no groups connect the ranks.

    A refusal has to cross a mesh to reach the ranks of the next mesh: all groups are listed once
    for each mesh.
    """
    joined = []  # process groups of each mesh
    known = []  # meshes
    # The rows of owner state move among all ranks of the group at the next step
    at_owners = {}  # ranks -> process group
    for param, _, _ in shards:
        if options[param].owner_keeps_state:
            group = options[param].process_group
            at_owners.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    # Large sets of ranks first, the order of all collectives of several sets
    if at_owners:
        joined.append([at_owners[ranks] for ranks in sorted(at_owners, key=bucket_sort_key)])
    for param, _, value in shards:
        if value.device_mesh not in known and _is_gathered(param, value, options[param]):
            known.append(value.device_mesh)
            joined.append(_groups_joining(value.device_mesh, param))
    # A refusal crosses one mesh in each pass, so as many passes as meshes reach all ranks
    joined = list(filter(None, joined))
    return [group for groups in joined for group in groups] * len(joined)


def _groups_joining(mesh: DeviceMesh, param: torch.Tensor) -> list[dist.ProcessGroup]:
    """Return process groups that together connect the ranks of a mesh; all ranks of the mesh find
    equal groups. [] if the process has none.

    The default group or the groups of the parameter's mesh come first if they have equal ranks.
    """
    ranks = ranks_of(mesh)
    world = world_now()
    # Preferred: a mesh from a file has the groups of the rank that wrote the file
    if world is not None and sorted(dist.get_process_group_ranks(world)) == ranks:
        return [world]
    if is_dtensor(param) and ranks_of(param.device_mesh) == ranks:
        mesh = param.device_mesh
    return groups_of_mesh(mesh) or []

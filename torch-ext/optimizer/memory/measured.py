"""Bytes of the tensors that exist on this rank: of weights, state and a bound step (`measured`)."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from ..execution.cuda_graphs import Graphs
from ..execution.prepare.state_place import StatePlace
from ..execution.prepare.step import BoundStep
from ..execution.workspace import buffer_name, layout_of
from ..params.config import MuonConfig
from ..params.dtensor import local_of
from ..params.layout import Layout
from ..params.validation import device_of
from ..planning.plan import Bucket
from ..planning.planner import Plan
from ..planning.rank_plan import Piece, RankPlan
from ..rules.rule import OWNERS_KEY
from .rows import SLOT_ROW, Key, row_key

# Classes of plans, which hold numbers only: `_tensors_in` does not search inside
PLANNED = (Plan, Bucket, RankPlan, Piece, Layout, MuonConfig)


def measured(
    bound: BoundStep,
    groups: Sequence[dict],
    state: Mapping,
    graphs: Sequence[Graphs | None],
    place: StatePlace,
) -> Counter:
    """Return key of a row -> bytes of this rank: of weights, state, workspace, tables and graphs
    that exist. `place`: of state.
    """
    found, counted = Counter(), set()
    home = device_of(groups).type
    for row, tensor in _held_by(groups, state, place):
        found[row] += local_of(tensor).nbytes
        counted.add(_memory_of(tensor))
    counted.update(_memory_of(p.grad) for g in groups for p in g["params"] if p.grad is not None)
    for memory in place.slots():
        found[SLOT_ROW] += memory.nbytes
        counted.add(_memory_of(memory))
    for name, memory in _workspace_of(bound).items():
        found[row_key("workspace", name, None, None)] += memory.nbytes()
        counted.add(memory.data_ptr())
    for tensor in _tensors_in((bound.all_jobs, bound.inputs, bound.hooks, bound.stores)):
        if (at := _memory_of(tensor)) not in counted:
            counted.add(at)
            where = "device" if tensor.device.type == home else "host"
            row = row_key("tables", "addresses and shapes", None, None, where)
            found[row] += tensor.untyped_storage().nbytes()
    if nbytes := sum(map(_pool_bytes, filter(None, graphs))):
        found[row_key("graphs", "memory pools of CUDA graphs", None, None)] = nbytes
    return +found


def _held_by(
    groups: Sequence[dict], state: Mapping, place: StatePlace
) -> Iterator[tuple[Key, torch.Tensor]]:
    """Yield (key of the row, tensor) of all weights and state."""
    for number, group in enumerate(groups):
        for param in group["params"]:
            yield row_key("weights", "weights", number, param.dtype), param
            held = [(key, t) for key, t in state.get(param, {}).items() if torch.is_tensor(t)]
            for key, value in [entry for entry in held if entry[0] != OWNERS_KEY]:
                is_away = place.holds(local_of(value)) or value.device.type != param.device.type
                where = "host" if is_away else "device"
                yield row_key("state", key, number, value.dtype, where), value


def _memory_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory of a tensor."""
    return local_of(tensor).untyped_storage().data_ptr()


def _workspace_of(bound: BoundStep) -> dict[str, torch.UntypedStorage]:
    """Return name of a buffer -> memory of the buffer."""
    found = {}
    for update, _ in bound.all_jobs:
        if update.bucket is None:
            continue
        for use, (memory, _) in layout_of(update.rank_plan, update.stack_name)[0].items():
            key = update.buffer_index if memory == "bucket_buffer" else memory
            found[buffer_name(key)] = update.memory[use].untyped_storage()
    return found


def _tensors_in(root: object) -> Iterator[torch.Tensor]:
    """Yield the tensors that objects of this package hold, at any depth."""
    package = __package__.rpartition(".")[0]
    visited, waiting = set(), [root]
    while waiting:
        item = waiting.pop()
        if id(item) in visited or isinstance(item, PLANNED):
            continue
        visited.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, Mapping):
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting.extend(item)
        elif isinstance(item, functools.partial):
            waiting += [item.func, item.args, item.keywords]
        elif type(item).__module__.startswith(package) and hasattr(item, "__dict__"):
            waiting.append(vars(item))
        else:  # a method, or a function with a closure
            waiting.append(getattr(item, "__self__", None))
            cells = getattr(item, "__closure__", None) or ()
            waiting += [cell.cell_contents for cell in cells]


def _pool_bytes(graphs: Graphs) -> int:
    """Return the bytes that torch's allocator holds for the graphs of a step."""
    pools = {part.graph.pool() for part in graphs.parts.values() if part.graph is not None}
    segments = torch.cuda.memory_snapshot() if pools else ()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) in pools)

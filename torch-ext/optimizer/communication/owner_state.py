"""State that one rank keeps for all (`shard_state`, unreduced gradients): gather, scatter and move
between owners.

Others see such state as DTensors cut by rows over the process group. Collective, outside of the
step: all ranks of the group call these functions for the same parameters in one order.
"""

from __future__ import annotations

import contextlib
import math
from operator import attrgetter

import torch
import torch.distributed as dist

from ..params import errors
from ..params.dtensor import local_of
from ..params.layout import row_chunks
from ..rules.rule import ROWS, state_shape
from .redistribute import by_rows
from .store_barrier import wait_for_all

# For a rank that waited in vain for the others.
ADVICE = (
    "Where one rank saves alone, as transformers' Trainer does, call "
    "consolidate_state_dict() on all ranks before it, or leave out shard_state=True and "
    "grads_are_reduced=False (docs/checkpoint.md)"
)


@contextlib.contextmanager
def shown_as_row_dtensors(optimizer, named, group, complete=None):
    """Meanwhile, an optimizer's state is as `as_row_dtensors` shows it.

    `complete`: a function that creates the state that no rank has, called on every rank; None: none
    is created. The rows are counted before it, so that zeros never stand for rows that a rank
    failed to load.
    """
    with errors.during(
        "state_dict(), which all ranks of process_group call together where owners keep the state"
    ):
        wait_for_all(group, "state_dict()", ADVICE)
        if complete is not None:
            _count_rows(optimizer.state, named, group)
            complete()
        shown = as_row_dtensors(optimizer.state, named, group)
    with replaced_state(optimizer, shown):
        yield


@contextlib.contextmanager
def replaced_state(optimizer: torch.optim.Optimizer, state: dict):
    """Meanwhile, an optimizer has another `state`."""
    held, optimizer.state = optimizer.state, state
    try:
        yield
    finally:
        optimizer.state = held


def as_row_dtensors(state, named, group) -> dict:
    """{parameter: its state as DTensors by rows over `group`}, of a 0-D parameter plain. `named`:
    {parameter: name}.

    Raises RuntimeError, naming the parameter, if the ranks together do not hold the state once.
    """
    shown = {param: dict(state[param]) for param in named if param in state}
    for param, key, have in _count_rows(shown, named, group):
        local, rows = _rows(shown[param][key]).to(param.device), _row_count(param)
        if param.ndim == 0:
            shown[param][key] = _everywhere(local, have, group)
        else:
            local = _move(local, have, row_chunks(rows, len(have)), group)
            shown[param][key] = by_rows(local, state_shape(param, key), group)
    return shown


def move_to_owners(state, named, wanted, group) -> None:
    """Give every rank the rows it is to keep. `wanted`: {parameter: rows of each rank}. Errors as
    in `as_row_dtensors`.
    """
    for param, key, have in _count_rows(state, named, group):
        # A model that moved left its state behind
        local = _rows(state[param][key]).to(param.device)
        state[param][key] = _move(local, have, wanted[param], group)


def gather(state: dict, named: dict, group: dist.ProcessGroup, to: int | None) -> dict:
    """{parameter: {key: the whole tensor, on the CPU}} on rank `to` of the group (None: on every
    rank), {} on the others.

    A device holds one whole tensor at a time. `named` and errors as in `as_row_dtensors`.
    """
    whole = {}
    for param, key, have in _count_rows(state, named, group):
        local = _rows(state[param][key]).to(param.device)
        if (tensor := _whole(local, have, _row_count(param), group, to)) is not None:
            tensor = tensor.reshape(state_shape(param, key))
            whole.setdefault(param, {})[key] = tensor.to("cpu", copy=True)
    return whole


def _count_rows(state, named, group) -> list:
    """[(parameter, key, how many rows each rank has of it)]."""
    if not named:
        return []
    entries = [(param, key) for param in named for key in ROWS]
    # Frozen ones may lie anywhere
    trained = next(filter(attrgetter("requires_grad"), named), next(iter(named)))
    counts = [len(_rows(state[p][key])) if key in state.get(p, {}) else -1 for p, key in entries]
    mine = torch.tensor(counts, dtype=torch.int64, device=local_of(trained).device)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group=group)
    columns = zip(*(vector.tolist() for vector in every))
    found = [(*entry, list(have)) for entry, have in zip(entries, columns) if max(have) >= 0]
    for param, key, have in found:
        rows = _row_count(param)
        # Rows on every rank, or, as loaded, whole on every rank; -1: a rank has no such state.
        if min(have) < 0 or sum(have) != rows and have != [rows] * len(have):
            raise RuntimeError(
                f"the ranks of process_group hold {have} rows of {key} of parameter "
                f"{named[param]}, "
                f"which has {rows}: load the state on all ranks, or on none"
            )
    return found


def _row_count(param) -> int:
    return param.shape[0] if param.ndim else 1


def _rows(tensor):
    return torch.atleast_1d(local_of(tensor))


def _move(local, have, want, group):
    """The rows that this rank wants, of a tensor whose rows lie over the ranks; if all have all,
    from the first.
    """
    if have == want:
        return local
    me, nbytes = group.rank(), math.prod(local.shape[1:]) * local.element_size()
    moved = local.new_empty((want[me], *local.shape[1:]))
    leave = [nbytes * _overlap(have, me, want, rank) for rank in range(len(have))]
    arrive = [nbytes * _overlap(want, me, have, rank) for rank in range(len(have))]
    send, recv = (t.contiguous().flatten().view(torch.uint8) for t in (local, moved))
    dist.all_to_all_single(recv, send[: sum(leave)], arrive, leave, group=group)
    return moved


def _whole(
    local: torch.Tensor, have: list, rows: int, group: dist.ProcessGroup, to: int | None
) -> torch.Tensor | None:
    """All rows of a tensor whose rows lie over the ranks, on rank `to` (None: on every rank); else
    None.
    """
    me = group.rank()
    if have == [rows] * len(have):  # whole everywhere, as a load leaves it
        return local if to in (None, me) else None
    if to is not None:
        want = [rows * (rank == to) for rank in range(len(have))]
        moved = _move(local, have, want, group)
        return moved if to == me else None
    parts = [
        local.contiguous() if rank == me else local.new_empty((count, *local.shape[1:]))
        for rank, count in enumerate(have)
    ]
    for rank, part in enumerate(parts):
        if part.numel():  # as bytes, of which every backend can send any dtype
            source = dist.get_global_rank(group, rank)
            dist.broadcast(part.flatten().view(torch.uint8), source, group=group)
    return torch.cat(parts)


def _overlap(first, i, second, j) -> int:
    """How many of rank i's rows in one division are rank j's in another."""
    a, b = sum(first[:i]), sum(second[:j])
    return max(0, min(a + first[i], b + second[j]) - max(a, b))


def _everywhere(local, have, group):
    """The only row of a 0-D parameter's state, on every rank."""
    value = local.clone() if len(local) else local.new_empty(1)
    dist.broadcast(value, dist.get_global_rank(group, have.index(1)), group=group)
    return value[0]

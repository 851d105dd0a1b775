"""State kept by owners (`shard_state`, unreduced gradients): gather, scatter and move rows between
ranks.

Each owner keeps some rows (dim 0) of a parameter's state. Outside of the step the state appears as
DTensors sharded by rows over the process group. All functions are collective: all ranks of the
group call a function for equal parameters in an equal order. `have`, `want`: rows on each rank, by
rank of the group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
import torch.distributed as dist

from ..params import errors
from ..params.dtensor import local_of, with_local
from ..params.layout import row_chunks
from ..rules.rule import BASE_KEYS
from .process_groups import gather_integers
from .redistribute import by_rows
from .store_barrier import wait_for_all

# End of the error message on ranks that waited in vain for other ranks
ADVICE = (
    "Where one rank saves alone, as transformers' Trainer does, call "
    "consolidate_state_dict() on all ranks before it, or leave out shard_state=True and "
    "grads_are_reduced=False (docs/checkpoint.md)"
)


# Parameter -> (name, `rules.rule.sharded_keys` of its group, equal on all ranks)
Members = dict[torch.Tensor, tuple[str, Sequence[str]]]
# (process group, the parameters whose state its ranks share)
Shared = tuple[dist.ProcessGroup, Members]


def state_for_checkpoint(
    state: dict,
    named: dict[torch.Tensor, str],
    shared: Sequence[Shared],
    create_missing: Callable[[], dict] | None = None,
    offloads: bool = False,
) -> dict:
    """Return the state as row DTensors, see `as_row_dtensors`; state in no process group stays as
    stored. Collective; raises RuntimeError, before any collective, if a rank does not call in time.

    `named`: all parameters. `shared`: in an equal order on ranks with common process groups.
    `create_missing`: a function that creates missing entries of `state`, called on every rank, and
    returns the state to show in place of `state`; None: no state is created. `offloads`: as in
    `as_row_dtensors`.
    """
    with errors.during(
        "state_dict(), which all ranks of process_group call together where owners keep the state"
    ):
        # A rank that saves alone gets an error, before it issues a collective
        for group, members in shared:
            wait_for_all(group, call_with_keys("state_dict()", members), ADVICE)
        # Rows are counted before `create_missing` creates zeros: a rank that failed to load its
        # rows must get an error, not zeros
        if create_missing is not None:
            for group, members in shared:
                _count_rows(state, members, group)
            state = create_missing()
        shown = {param: state[param] for param in named if param in state}
        for group, members in shared:
            shown |= as_row_dtensors(state, members, group, offloads)
        return shown


def call_with_keys(call: str, members: Members) -> str:
    """Return `call`, for `wait_for_all`, with the keys that some rules add to the state of Muon,
    NorMuon and AdamW: ranks whose groups have different rules get an error, and not collectives of
    different sizes.
    """
    counts = Counter(key for _, keys in members.values() for key in keys if key not in BASE_KEYS)
    added = ", ".join(f"{key} of {counts[key]} parameters" for key in sorted(counts))
    return f"{call} with {added}" if added else call


def as_row_dtensors(
    state: dict, members: Members, group: dist.ProcessGroup, offloads: bool = False
) -> dict:
    """Return {parameter: state with DTensors sharded by rows over `group`}; the state of a 0-D
    parameter is plain and whole. `offloads`: shards of state on the host are on the host.

    Raises RuntimeError, with the parameter's name, if the ranks together do not hold every row
    exactly once.
    """
    shown = {param: dict(state[param]) for param in members if param in state}
    for param, key, have in _count_rows(shown, members, group):
        # The model may have moved to another device, and the state not
        local = _rows(shown[param][key]).to(param.device)
        home = shown[param][key].device if offloads else param.device
        rows = _row_count(param)
        # A 0-D state has no dim 0 to shard
        if param.ndim == 0:
            shown[param][key] = _broadcast_row(local, have, group)
        else:
            local = _exchange_rows(local, have, row_chunks(rows, len(have)), group)
            found = by_rows(local, (rows, *local.shape[1:]), group)
            # Offloaded state stays on the host
            shown[param][key] = with_local(found, local.to(home)) if home != found.device else found
    return shown


def move_to_owners(
    state: dict,
    members: Members,
    wanted: dict[torch.Tensor, list[int]],
    group: dist.ProcessGroup,
    offloads: bool = False,
) -> None:
    """Move rows of state, in place of the dict's entries, so that every rank holds its `wanted`
    rows.

    `wanted`: {parameter: rows of each rank}. `offloads`: rows that were on the host go back there
    at once, so that a device holds one state at a time. Raises as `as_row_dtensors`.
    """
    for param, key, have in _count_rows(state, members, group):
        # The model may have moved to another device, and the state not
        rows = _rows(state[param][key])
        moved = _exchange_rows(rows.to(param.device), have, wanted[param], group)
        state[param][key] = moved.to(rows.device) if offloads else moved


def gather(state: dict, members: Members, group: dist.ProcessGroup, to: int | None) -> dict:
    """Return {parameter: {key: whole tensor on the CPU}} on rank `to` of the group (None: on every
    rank), {} on other ranks.

    A device holds a single whole tensor at a time. Errors as in `as_row_dtensors`.
    """
    whole = {}
    for param, key, have in _count_rows(state, members, group):
        local = _rows(state[param][key]).to(param.device)
        if (tensor := _gather_rows(local, have, _row_count(param), group, to)) is not None:
            if param.ndim == 0:
                tensor = tensor.reshape(())
            whole.setdefault(param, {})[key] = tensor.to("cpu", copy=True)
    return whole


def _count_rows(
    state: dict, members: Members, group: dist.ProcessGroup
) -> list[tuple[torch.Tensor, str, list[int]]]:
    """Return [(parameter, key, rows on each rank)] of all state held by any rank. Raises
    RuntimeError as `as_row_dtensors`.
    """
    if not members:
        return []
    entries = [(param, key) for param, (_, keys) in members.items() for key in keys]
    # Frozen parameters may be on any device, even without a backend of the group
    trained = next(filter(attrgetter("requires_grad"), members), next(iter(members)))
    counts = [len(_rows(state[p][key])) if key in state.get(p, {}) else -1 for p, key in entries]
    columns = zip(*gather_integers(counts, group, local_of(trained).device))
    found = [(*entry, list(have)) for entry, have in zip(entries, columns) if max(have) >= 0]
    for param, key, have in found:
        rows = _row_count(param)
        # Allowed: disjoint rows on the ranks, or, after a load, the whole state on every rank.
        # -1: the rank lacks the state.
        if min(have) < 0 or sum(have) != rows and have != [rows] * len(have):
            raise RuntimeError(
                f"the ranks of process_group hold {have} rows of {key} of parameter "
                f"{members[param][0]}, "
                f"which has {rows}: load the state on all ranks, or on none"
            )
    return found


def _row_count(param: torch.Tensor) -> int:
    """Return the rows of a parameter's state; 1 for a 0-D parameter."""
    return param.shape[0] if param.ndim else 1


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local rows of a state, at least 1-D."""
    return torch.atleast_1d(local_of(tensor))


def _exchange_rows(
    local: torch.Tensor, have: list[int], want: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the rows that this rank wants of a tensor with `have` rows on the ranks, by an
    all-to-all.
    """
    if have == want:
        return local
    me = group.rank()
    row_bytes = math.prod(local.shape[1:]) * local.element_size()
    moved = local.new_empty((want[me], *local.shape[1:]))
    # If the state is whole on every rank, `have` sums to more than the rows: rows of the first rank
    # come first, cover all of `want`, and the overlap with other ranks is 0
    send_bytes = [row_bytes * _overlap(have, me, want, rank) for rank in range(len(have))]
    recv_bytes = [row_bytes * _overlap(want, me, have, rank) for rank in range(len(have))]
    # As bytes, of which every backend can send any dtype. `recv` is a view of `moved`.
    send, recv = (t.contiguous().flatten().view(torch.uint8) for t in (local, moved))
    dist.all_to_all_single(recv, send[: sum(send_bytes)], recv_bytes, send_bytes, group=group)
    return moved


def _gather_rows(
    local: torch.Tensor, have: list, rows: int, group: dist.ProcessGroup, to: int | None
) -> torch.Tensor | None:
    """Return all rows of a tensor with `have` rows on the ranks, on rank `to` (None: on every
    rank); None on other ranks.
    """
    me = group.rank()
    # The state is whole on every rank, as after a load
    if have == [rows] * len(have):
        return local if to in (None, me) else None
    if to is not None:
        want = [rows * (rank == to) for rank in range(len(have))]
        moved = _exchange_rows(local, have, want, group)
        return moved if to == me else None
    parts = [
        local.contiguous() if rank == me else local.new_empty((count, *local.shape[1:]))
        for rank, count in enumerate(have)
    ]
    for rank, part in enumerate(parts):
        if part.numel():
            # As bytes, of which every backend can send any dtype
            source = dist.get_global_rank(group, rank)
            dist.broadcast(part.flatten().view(torch.uint8), source, group=group)
    return torch.cat(parts)


def _overlap(first: list[int], i: int, second: list[int], j: int) -> int:
    """Return how many of rank i's rows in a division `first` belong to rank j in the division
    `second`.
    """
    start = sum(first[:i])
    other_start = sum(second[:j])
    end = min(start + first[i], other_start + second[j])
    return max(0, end - max(start, other_start))


def _broadcast_row(local: torch.Tensor, have: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return the only row of a 0-D parameter's state, on every rank."""
    value = local.clone() if len(local) else local.new_empty(1)
    dist.broadcast(value, dist.get_global_rank(group, have.index(1)), group=group)
    return value[0]

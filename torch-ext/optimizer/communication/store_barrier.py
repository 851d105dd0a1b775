"""A barrier with a time limit through the store of a process group, before collective calls of the
user.

A rank alone in `state_dict()` gets an error with the missing ranks before the rank issues a
collective. Without the barrier the lone collective would pair with a later collective of the
remaining ranks.

[Note: rounds of the barrier] Each call takes a numbered round with keys `<number>/<rank>` (a rank
has come), `<number>/count` and `<number>/end` (the result as JSON, equal for all ranks). The last
rank to come, or the first rank to time out, writes the end by compare-and-set. A rank skips rounds
ended in its absence: a lone call does not shift later rounds.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import time
import weakref

import torch.distributed as dist

from .process_groups import timeout_of

# Time limit of the first rank of a group. Frameworks let this rank save alone, while other ranks
# wait for it in their next collective: the rank has to give up before that collective times out.
FIRST_RANK_SECONDS = 60.0
DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)  # of backends that do not tell a timeout
POLL_SECONDS = (0.001, 0.1)  # first and longest pause between polls of the store

# Group -> number of the rank's next round. Numbers may differ between ranks, see
# [Note: rounds of the barrier].
_next_round: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def wait_for_all(
    group: dist.ProcessGroup, call: str, advice: str, refuse: bool = False
) -> list[int]:
    """Wait until all ranks of `group` are in `call`. Returns the global ranks with `refuse`.

    Raises RuntimeError on every rank present, with the missing ranks and `advice`, if ranks do not
    come in time or come with a different call. The first rank of the group waits
    FIRST_RANK_SECONDS, at most half of the group's timeout; other ranks wait for the timeout.
    Without a store between the ranks (threads as ranks, a single rank) nothing is waited for, and a
    rank knows only its own refusal.
    """
    ranks = dist.get_process_group_ranks(group)
    me = group.rank()
    if (store := _shared_store(group)) is None:
        return [ranks[me]] if refuse else []
    for number in itertools.count(_next_round.get(group, 0)):
        _next_round[group] = number + 1
        # The round ended without this rank, or belongs to an earlier group with the same store
        if store.check([f"{number}/end"]):
            continue
        bound = _bound_seconds(group)
        end = _round(store, f"{number}/", me, len(ranks), f"{refuse:d}{call}", bound)
        # The round ended between the check above and this rank's entry
        if me in end["missing"]:
            continue
        _raise_unless_alike(end, ranks, call, advice, bound)
        return [ranks[rank] for rank in end["refusing"]]


def _round(store: dist.Store, prefix: str, me: int, world: int, entry: str, bound: float) -> dict:
    """Enter a round and wait for the end; return the end's content, equal on all ranks."""
    store.set(f"{prefix}{me}", entry)
    is_last = store.add(f"{prefix}count", 1) == world
    deadline = time.monotonic() + bound
    pause, longest = POLL_SECONDS
    while not is_last and time.monotonic() < deadline and not store.check([f"{prefix}end"]):
        time.sleep(pause)
        pause = min(2 * pause, longest)
    # Several ranks may try to end the round; the store keeps the first text
    if store.check([f"{prefix}end"]):
        return json.loads(store.get(f"{prefix}end"))
    end = json.dumps(_seen(store, prefix, world))
    return json.loads(store.compare_set(f"{prefix}end", "", end))


def _seen(store: dist.Store, prefix: str, world: int) -> dict:
    """Return the result of a round: missing ranks of the group, ranks by call, and refusing
    ranks.
    """
    came = {
        rank: store.get(f"{prefix}{rank}").decode()
        for rank in range(world)
        if store.check([f"{prefix}{rank}"])
    }
    calls = {
        entry[1:]: [rank for rank in came if came[rank][1:] == entry[1:]] for entry in came.values()
    }
    return {
        "missing": [rank for rank in range(world) if rank not in came],
        "calls": calls,
        "refusing": [rank for rank, entry in came.items() if entry[0] == "1"],
    }


def _raise_unless_alike(end: dict, ranks: list[int], call: str, advice: str, bound: float) -> None:
    """Raise RuntimeError if ranks made different calls or are missing; see `wait_for_all`."""
    differing = {
        name: [ranks[rank] for rank in callers]
        for name, callers in end["calls"].items()
        if name != call
    }
    mine = [ranks[rank] for rank in end["calls"][call]]
    if differing:
        came = ", ".join(f"ranks {callers} {name}" for name, callers in differing.items())
        raise RuntimeError(f"ranks {mine} called {call}, but {came}: call the same on all of them")
    if end["missing"]:
        missing = [ranks[rank] for rank in end["missing"]]
        raise RuntimeError(
            f"ranks {mine} called {call}, but ranks {missing} did not within {bound:g} s. {advice}"
        )


def _bound_seconds(group: dist.ProcessGroup) -> float:
    """Return how long the rank waits for other ranks."""
    timeout = (timeout_of(group) or DEFAULT_TIMEOUT).total_seconds()
    return timeout if group.rank() else min(FIRST_RANK_SECONDS, timeout / 2)


def _shared_store(group: dist.ProcessGroup) -> dist.Store | None:
    """Return the store of the group with a prefix for the rounds; None if no other process reaches
    the store.
    """
    if group.size() == 1:
        return None
    store = None
    with contextlib.suppress(AttributeError, RuntimeError):  # raised for groups without a store
        store = group.get_group_store()
    # A HashStore, of threads as ranks, reaches no other process
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, (dist.TCPStore, dist.FileStore)):
        return None
    return dist.PrefixStore("optimizer/calls", store)

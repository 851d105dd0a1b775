"""A bounded barrier through the store of a process group, for calls that all its ranks make.

A rank that makes such a call alone gets an error that names the missing ranks, before it issues a
collective: the next collectives of the other ranks then do not pair with one of its own.
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

# The longest that the first rank of a group waits for the others. Frameworks let this rank save
# alone. The others then wait for it in their next collective, and it gives up before that times
# out.
FIRST_RANK_SECONDS = 60.0
DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)  # of backends that do not say theirs
POLL_SECONDS = (0.001, 0.1)  # the first pause between two looks at the store, and the longest

# group -> number of its next round. Ranks may be at different numbers, since a lone call takes one:
# a rank skips the rounds that ended without it.
_next_round: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def wait_for_all(
    group: dist.ProcessGroup, call: str, advice: str, refuse: bool = False
) -> list[int]:
    """Wait until all ranks of `group` are in the same `call`. Returns the global ranks that refuse.

    Raises RuntimeError, on every rank that came, if some ranks do not come in time or come with
    another call; it names these ranks and ends with `advice`. The first rank of the group waits
    FIRST_RANK_SECONDS, but at most half of the group's timeout; the others wait for the timeout.
    Where no store connects the ranks (threads as ranks, one rank), nothing is waited for, and a
    rank knows of its own refusal only.
    """
    ranks, me = dist.get_process_group_ranks(group), group.rank()
    if (store := _shared_store(group)) is None:
        return [ranks[me]] if refuse else []
    for number in itertools.count(_next_round.get(group, 0)):
        _next_round[group] = number + 1
        if store.check([f"{number}/end"]):  # ended without this rank, or of an earlier group
            continue
        bound = _bound_seconds(group)
        end = _round(store, f"{number}/", me, len(ranks), f"{refuse:d}{call}", bound)
        if me in end["missing"]:  # it ended while this rank was about to come
            continue
        _raise_unless_alike(end, ranks, call, advice, bound)
        return [ranks[rank] for rank in end["refusing"]]


def _round(store: dist.Store, prefix: str, me: int, world: int, entry: str, bound: float) -> dict:
    """Come to one round and wait for its end, which is the same text on every rank."""
    store.set(f"{prefix}{me}", entry)
    is_last = store.add(f"{prefix}count", 1) == world
    deadline = time.monotonic() + bound
    pause, longest = POLL_SECONDS
    while not is_last and time.monotonic() < deadline and not store.check([f"{prefix}end"]):
        time.sleep(pause)
        pause = min(2 * pause, longest)
    # The last rank to come ends the round, or a rank that has waited enough. The first text counts.
    if store.check([f"{prefix}end"]):
        return json.loads(store.get(f"{prefix}end"))
    end = json.dumps(_seen(store, prefix, world))
    return json.loads(store.compare_set(f"{prefix}end", "", end))


def _seen(store: dist.Store, prefix: str, world: int) -> dict:
    """The ranks of the group that did not come to a round, the calls of those that did, and the
    ranks that refuse.
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
    others = {
        other: [ranks[rank] for rank in those]
        for other, those in end["calls"].items()
        if other != call
    }
    mine = [ranks[rank] for rank in end["calls"][call]]
    if others:
        came = ", ".join(f"ranks {those} {other}" for other, those in others.items())
        raise RuntimeError(f"ranks {mine} called {call}, but {came}: call the same on all of them")
    if end["missing"]:
        missing = [ranks[rank] for rank in end["missing"]]
        raise RuntimeError(
            f"ranks {mine} called {call}, but ranks {missing} did not within {bound:g} s. {advice}"
        )


def _bound_seconds(group: dist.ProcessGroup) -> float:
    timeout = (timeout_of(group) or DEFAULT_TIMEOUT).total_seconds()
    return timeout if group.rank() else min(FIRST_RANK_SECONDS, timeout / 2)


def _shared_store(group: dist.ProcessGroup) -> dist.Store | None:
    """The store of a group with a prefix for these rounds; None where no other process reaches
    one.
    """
    if group.size() == 1:
        return None
    store = None
    with contextlib.suppress(AttributeError, RuntimeError):  # of groups without a store
        store = group.get_group_store()
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, (dist.TCPStore, dist.FileStore)):
        return None
    return dist.PrefixStore("optimizer/calls", store)

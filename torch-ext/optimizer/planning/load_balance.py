"""Assignment of matrices to owner ranks: longest processing time first (LPT).

`assign` returns the owner of each unit of work. `least_load` is a lower bound for the load of the
most loaded rank. Pure integer arithmetic: every rank computes the same owners from the same input.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

# 2^32 divided by the golden ratio (Fibonacci hashing): the multiples modulo 2^32 of any number of
# consecutive ranks are spread evenly
GOLDEN = 2654435769


def assign(units: Sequence[tuple[int, tuple[int, ...]]], base: Mapping[int, int]) -> list[int]:
    """Return the owner rank of each unit.

    `units`: (work, ranks that may own the unit), work > 0. `base`: rank -> load from earlier plans.

    The LPT rule (Graham 1969) takes units in descending order of work and gives each to the least
    loaded allowed rank. If every rank may own every unit and `base` is empty, the largest load is
    at most 4/3 of the best possible.
    """
    # LPT alone, although swaps between owners would level the loads further. With LPT the ranks get
    # mostly equal shapes in each round, and a bucket ends with its slowest rank: with swaps the
    # expected step is longer in most cases (docs/log.md).
    loads = dict(base)
    # Id of the tuple of allowed ranks -> heap of (load at the time of the entry, tie break, rank).
    # Keys are ids because hashing a tuple of thousands of ranks for every unit would be slow.
    heaps: dict[int, list[tuple[int, int, int]]] = {}
    owners = [None] * len(units)
    for i in sorted(range(len(units)), key=lambda i: (-units[i][0], i)):
        work, ranks = units[i]
        if id(ranks) not in heaps:
            # Equally loaded ranks are taken in a scattered order. Consecutive ranks often share a
            # mesh dim, and work that only they may own (experts) still needs room on them.
            # A sorted list is a heap.
            heaps[id(ranks)] = sorted(
                (loads.setdefault(r, 0), r * GOLDEN % 2**32, r) for r in ranks
            )
        owners[i] = _lightest(loads, heaps[id(ranks)])
        loads[owners[i]] += work
    return owners


def _lightest(loads: Mapping[int, int], heap: list[tuple[int, int, int]]) -> int:
    """Return the least loaded rank of a heap; renew outdated entries in place.

    A rank is in the heap of every set of ranks with it, and only `loads` is current. During LPT
    loads only grow, so an outdated entry is too small and comes to the top before its rank counts.
    """
    while loads[heap[0][2]] != heap[0][0]:
        heapq.heapreplace(heap, (loads[heap[0][2]], *heap[0][1:]))
    return heap[0][2]


def least_load(works: Iterable[float], count: int) -> float:
    """Return a lower bound for the load of the most loaded of `count` ranks, however `works` are
    assigned.

    The bound is the larger of the mean and, for every k, the sum of the k + 1 smallest of the
    k * count + 1 largest works: by the pigeonhole principle some rank owns k + 1 of these.
    """
    works, least = sorted(works, reverse=True), 0
    for k in range((len(works) - 1) // count + 1 if works else 0):
        first = k * count - k
        least = max(least, sum(works[first : k * count + 1]))
    return max(least, sum(works) / count)

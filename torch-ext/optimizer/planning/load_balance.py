"""Assignment of matrices to owner ranks: longest processing time first (LPT), then a local search.

`assign` returns the owner of each unit of work. `least_load` is a lower bound for the load of the
most loaded rank. Pure integer arithmetic: every rank computes the same owners from the same input.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

Kind = tuple[int, int]  # (work, index of a set of allowed ranks)
Bundle = tuple[tuple[Kind, ...], int]  # (kinds of the units, sum of their work)

# The most loaded rank exchanges units with one of so many of the least loaded ranks. A search over
# all ranks would be quadratic in the number of ranks.
CANDIDATES = 32
# 2^32 divided by the golden ratio (Fibonacci hashing): the multiples modulo 2^32 of any number of
# consecutive ranks are spread evenly
GOLDEN = 2654435769
# Limit of bundle comparisons of the local search: a few seconds in a plan for thousands of ranks. A
# limit of time would let ranks stop at different points and choose different owners.
EFFORT = 1_000_000


def assign(
    units: Sequence[tuple[int, tuple[int, ...]]], base: Mapping[int, int], effort: int = EFFORT
) -> tuple[list[int], int]:
    """Return (owner rank of each unit, number of comparisons of the local search).

    `units`: (work, ranks that may own the unit), work > 0. `base`: rank -> load from earlier plans.
    `effort`: limit of comparisons; 0 leaves the LPT assignment unchanged.

    The LPT rule (Graham 1969) takes units in descending order of work and gives each to the least
    loaded allowed rank. If every rank may own every unit and `base` is empty, the largest load is
    at most 4/3 of the best possible. The local search then moves or swaps up to two units at a time
    between the most loaded rank and another rank, until no exchange lowers the largest load.
    """
    loads = dict(base)
    # By set of allowed ranks: a heap of (load at the time of the entry, tie break, rank)
    queues: dict[int, list[tuple[int, int, int]]] = {}
    owners = [None] * len(units)
    kinds, allowed = _kinds(units)
    for i in sorted(range(len(units)), key=lambda i: (-units[i][0], i)):
        work, ranks = units[i]
        number = kinds[i][1]
        if number not in queues:
            # Equally loaded ranks are taken in a scattered order. Consecutive ranks often share a
            # mesh dim, and work that only they may own (experts) still needs room on them.
            # A sorted list is a heap.
            queues[number] = sorted((loads.setdefault(r, 0), r * GOLDEN % 2**32, r) for r in ranks)
        owners[i] = _lightest(loads, queues[number])
        loads[owners[i]] += work
    return _LocalSearch(kinds, allowed, owners, loads, effort).run()


def _kinds(units: Sequence[tuple[int, tuple[int, ...]]]) -> tuple[list[Kind], list[frozenset[int]]]:
    """Return ([kind of each unit], [set of allowed ranks]); a kind holds an index into the sets.

    Units with equal work and an equal set of ranks have equal kinds.
    """
    # Sets are found by id first: hashing a tuple of thousands of ranks for every unit is slow
    sets = {id(ranks): ranks for _, ranks in units}
    numbers: dict[tuple[int, ...], int] = {}
    number_of = {key: numbers.setdefault(ranks, len(numbers)) for key, ranks in sets.items()}
    kinds = [(work, number_of[id(ranks)]) for work, ranks in units]
    return kinds, [frozenset(ranks) for ranks in numbers]


def _lightest(loads: Mapping[int, int], heap: list[tuple[int, int, int]]) -> int:
    """Return the least loaded rank of a heap; renew outdated entries in place.

    A rank is in the heap of every set of ranks with it, and only `loads` is current. During LPT
    loads only grow, so an outdated entry is too small and comes to the top before its rank counts.
    """
    while loads[heap[0][2]] != heap[0][0]:
        heapq.heapreplace(heap, (loads[heap[0][2]], *heap[0][1:]))
    return heap[0][2]


class _LocalSearch:
    """Exchanges of units between ranks that lower the largest load; changes `owners` and `loads`.

    All units of a kind are interchangeable, so the search compares kinds and not units.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        allowed: Sequence[frozenset[int]],
        owners: list[int],
        loads: dict[int, int],
        effort: int,
    ) -> None:
        self.allowed = allowed
        self.owners = owners
        self.loads = loads
        self.effort = effort  # limit of `spent`
        self.spent = 0  # comparisons so far
        self.order = sorted((load, rank) for rank, load in loads.items())
        # rank -> kind -> indices of the rank's units
        self.held: dict[int, dict[Kind, list[int]]] = defaultdict(lambda: defaultdict(list))
        for i, owner in enumerate(owners):
            self.held[owner][kinds[i]].append(i)

    def run(self) -> tuple[list[int], int]:
        """Exchange until nothing helps or the effort is spent; return (owners, comparisons)."""
        while self.order and self.spent < self.effort:
            most_loaded = self.order[-1][1]
            # Pairs of units are tried only where no single unit helps: they are many more
            best = self._best(most_loaded, 1) or self._best(most_loaded, 2)
            if not best:
                break
            self._exchange(*best)
        return self.owners, self.spent

    def _best(
        self, rank: int, size: int
    ) -> tuple[int, int, tuple[Kind, ...], tuple[Kind, ...]] | None:
        """Return the best exchange (rank, partner, kinds to give, kinds to take), at most `size`
        units each way; None if no exchange lowers the larger of the two loads below `rank`'s.
        """
        best, top = None, self.loads[rank]
        for load, partner in self.order[:CANDIDATES]:
            if partner == rank:
                continue
            gives = self._bundles(rank, partner, size)[1:]  # without the empty bundle
            takes = self._bundles(partner, rank, size)
            self.spent += len(gives) * len(takes)
            for (give, more), (take, less) in itertools.product(gives, takes):
                larger = max(top - more + less, load + more - less)
                if larger < (best[0] if best else top):
                    best = larger, (rank, partner, give, take)
        return best and best[1]

    def _bundles(self, rank: int, partner: int, size: int) -> list[Bundle]:
        """Return the distinct bundles of up to `size` units of `rank` that `partner` may own. The
        empty bundle comes first.
        """
        movable = [
            (kind, len(held))
            for kind, held in self.held[rank].items()
            if held and partner in self.allowed[kind[1]]
        ]
        units = [kind for kind, count in movable for _ in range(min(count, size))]
        # A dict drops duplicates and keeps the order, on which ties between exchanges depend
        bundles = dict.fromkeys(
            b for n in range(size + 1) for b in itertools.combinations(units, n)
        )
        return [(bundle, sum(work for work, _ in bundle)) for bundle in bundles]

    def _exchange(
        self, rank: int, partner: int, give: tuple[Kind, ...], take: tuple[Kind, ...]
    ) -> None:
        """Move a unit of each kind of `give` from `rank` to `partner`, and of `take` back."""
        moves = [(kind, rank, partner) for kind in give] + [(kind, partner, rank) for kind in take]
        # All units leave before the first arrives: else a kind in both directions would come back
        for unit, kind, source, target in [
            (self.held[a][kind].pop(), kind, a, b) for kind, a, b in moves
        ]:
            self.held[target][kind].append(unit)
            self.owners[unit] = target
            self._add_load(source, -kind[0])
            self._add_load(target, kind[0])

    def _add_load(self, rank: int, work: int) -> None:
        """Add `work` to a rank's load and keep `order` sorted."""
        del self.order[bisect_left(self.order, (self.loads[rank], rank))]
        self.loads[rank] += work
        insort(self.order, (self.loads[rank], rank))


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

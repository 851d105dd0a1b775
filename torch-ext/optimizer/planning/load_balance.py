"""Assignment of matrices to ranks: longest processing time first (LPT), then exchanges that relieve
the most loaded rank.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections import defaultdict

NEIGHBOURS = 32  # an exchange is sought with so many of the least loaded ranks
# 2^32 over the golden ratio: multiples of it, modulo 2^32, lie evenly however many are taken
GOLDEN = 2654435769
# Pairs of kinds of work that are compared at most: seconds, in a plan for thousands of ranks
EFFORT = 1_000_000


def assign(units, base, effort=EFFORT) -> tuple:
    """(owner of each unit, comparisons made). `units`: [(work > 0, ranks that may own it)]; `base`:
    rank -> load.

    Graham's LPT rule (1969), at most 4/3 of the best possible where every rank may own everything;
    of equally loaded ranks those first that lie far apart, so that work which is bound to
    neighbours finds room later. Then moves and swaps of one or two units, as long as they relieve
    the most loaded rank.
    """
    loads, queues, owners = dict(base), {}, [None] * len(units)
    kinds, allowed = _kinds(units)
    for i in sorted(range(len(units)), key=lambda i: (-units[i][0], i)):
        (work, ranks), (_, number) = units[i], kinds[i]
        if number not in queues:
            queues[number] = sorted((loads.setdefault(r, 0), r * GOLDEN % 2**32, r) for r in ranks)
        owners[i] = _lightest(loads, queues[number])
        loads[owners[i]] += work
    return _Exchange(kinds, allowed, owners, loads, effort).run()


def _kinds(units):
    """([(work, number of its set of ranks)], [set of ranks]): thousands of ranks are not hashed for
    every unit.
    """
    sets, numbers = {id(ranks): ranks for _, ranks in units}, {}
    of = {key: numbers.setdefault(ranks, len(numbers)) for key, ranks in sets.items()}
    return [(work, of[id(ranks)]) for work, ranks in units], [frozenset(ranks) for ranks in numbers]


def _lightest(loads, heap):
    """The rank with the least work. What the heap says of the one on top may be out of date: then
    it is renewed.
    """
    while loads[heap[0][2]] != heap[0][0]:
        heapq.heapreplace(heap, (loads[heap[0][2]], *heap[0][1:]))
    return heap[0][2]


class _Exchange:
    """Local improvement. Units of the same work and the same ranks are of one kind; one of a kind
    stands for all.
    """

    def __init__(self, kinds, allowed, owners, loads, effort):
        self.allowed, self.owners, self.loads, self.effort, self.spent = (
            allowed,
            owners,
            loads,
            effort,
            0,
        )
        self.order = sorted((load, rank) for rank, load in loads.items())
        self.held = defaultdict(lambda: defaultdict(list))  # rank -> kind -> units
        for i, owner in enumerate(owners):
            self.held[owner][kinds[i]].append(i)

    def run(self):
        while self.order and self.spent < self.effort:
            best = self._best(self.order[-1][1], 1) or self._best(self.order[-1][1], 2)
            if not best:
                break
            self._do(*best)
        return self.owners, self.spent

    def _best(self, rank, size):
        """(rank, other, kinds to give, kinds to take), at most `size` of each: what leaves the
        smallest larger load.
        """
        best, top = None, self.loads[rank]
        for load, other in self.order[:NEIGHBOURS]:
            if other == rank:
                continue
            gives, takes = self._bundles(rank, other, size)[1:], self._bundles(other, rank, size)
            self.spent += len(gives) * len(takes)
            for (give, more), (take, less) in itertools.product(gives, takes):
                larger = max(top - more + less, load + more - less)
                if larger < (best[0] if best else top):
                    best = larger, (rank, other, give, take)
        return best and best[1]

    def _bundles(self, rank, other, size):
        """[(kinds, their work)] of what `rank` has and `other` may own, up to so many units;
        nothing comes first.
        """
        mine = [
            (kind, len(held))
            for kind, held in self.held[rank].items()
            if held and other in self.allowed[kind[1]]
        ]
        units = [kind for kind, count in mine for _ in range(min(count, size))]
        bundles = dict.fromkeys(
            b for n in range(size + 1) for b in itertools.combinations(units, n)
        )
        return [(bundle, sum(work for work, _ in bundle)) for bundle in bundles]

    def _do(self, rank, other, give, take):
        moves = [(kind, rank, other) for kind in give] + [(kind, other, rank) for kind in take]
        for unit, kind, source, target in [
            (self.held[a][kind].pop(), kind, a, b) for kind, a, b in moves
        ]:
            self.held[target][kind].append(unit)
            self.owners[unit] = target
            self._load(source, -kind[0])
            self._load(target, kind[0])

    def _load(self, rank, more):
        del self.order[bisect_left(self.order, (self.loads[rank], rank))]
        self.loads[rank] += more
        insort(self.order, (self.loads[rank], rank))


def least_load(works, count) -> float:
    """What the most loaded of `count` ranks has at least, however `works` are shared: the mean, or
    k + 1 of the units.

    Of the k count + 1 largest units some rank has k + 1: no less than the smallest k + 1 of those.
    """
    works, least = sorted(works, reverse=True), 0
    for k in range((len(works) - 1) // count + 1 if works else 0):
        first = k * count - k
        least = max(least, sum(works[first : k * count + 1]))
    return max(least, sum(works) / count)

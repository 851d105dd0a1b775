"""Owners from numbers: never worse than the greedy rule, the best possible where that is known, and quick."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter

import pytest

from tests.ranks import part


def assign(works, count, base=None, **options):
    """(load of each rank, comparisons) with every rank allowed to own everything."""
    ranks = tuple(range(count))
    owners, spent = part("planning.load_balance").assign(
        [(w, ranks) for w in works], base or dict.fromkeys(ranks, 0), **options
    )
    loads = Counter(base or {})
    for work, owner in zip(works, owners):
        loads[owner] += work
    return [loads[r] for r in ranks], spent


def greedy(works, count):
    """The largest load by Graham's rule alone."""
    loads = [0] * count
    for work in sorted(works, reverse=True):
        heapq.heapreplace(loads, loads[0] + work)
    return max(loads)


def best_possible(works, count):
    """The smallest largest load, by trying everything."""
    return min(max(sum(w for w, o in zip(works, owners) if o == r) for r in range(count))
               for owners in itertools.product(range(count), repeat=len(works)))


def test_exchanges_improve_on_the_greedy_rule(optimizer):
    """Graham's own example: the greedy rule ends at 11, a swap at 9."""
    assert greedy([5, 5, 4, 4, 3, 3, 3], 3) == 11
    assert sorted(assign([5, 5, 4, 4, 3, 3, 3], 3)[0]) == [9, 9, 9]
    assert max(assign([5, 5, 4, 4, 3, 3, 3], 3, effort=0)[0]) == 11


def test_two_units_at_a_time_help_where_one_does_not(optimizer):
    """8 + 3 + 3 against 5 + 4 + 3: no move or swap of one unit helps, 8 + 5 and 4 + 3 + 3 + 3 are even."""
    assert greedy([8, 5, 4, 3, 3, 3], 2) == 14 and sorted(assign([8, 5, 4, 3, 3, 3], 2)[0]) == [13, 13]


def test_no_assignment_is_worse_than_greedy_or_better_than_possible(optimizer):
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies

    @hypothesis.settings(max_examples=100)
    @hypothesis.given(st.integers(1, 3), st.lists(st.integers(1, 40), max_size=7))
    def check(count, works):
        loads, _ = assign(works, count)
        possible = best_possible(works, count)
        assert sum(loads) == sum(works)
        assert part("planning.load_balance").least_load(works, count) <= possible <= max(loads) <= greedy(works, count)

    check()


def test_the_bound_counts_what_cannot_be_cut(optimizer):
    least = part("planning.load_balance").least_load
    assert least([10, 1, 1], 3) == 10  # one unit is larger than the mean
    assert least([4, 4, 4, 4], 3) == 8  # four units, three ranks: one has two
    assert least([1] * 12, 3) == 4 and least([], 3) == 0


def test_only_allowed_ranks_own(optimizer):
    """Also after exchanges: here everything large may only lie on two ranks, and the small goes to the others."""
    few, every = (0, 1), (0, 1, 2, 3)
    units = [(30, few)] * 3 + [(7, every)] * 12
    owners, _ = part("planning.load_balance").assign(units, dict.fromkeys(every, 0))
    assert set(owners[:3]) == {0, 1} and 60 in Counter(
        {r: sum(w for (w, _), o in zip(units, owners) if o == r) for r in every}).values()
    assert sum(o > 1 for o in owners[3:]) >= 9


@pytest.mark.parametrize("stride", [1, 16], ids=["neighbours", "far apart"])
def test_work_for_all_leaves_room_for_work_that_is_bound(stride, optimizer):
    """Each 16 of 256 ranks have 160 small units of their own; 80 large ones may go anywhere."""
    every = tuple(range(256))
    sets = [tuple(every[i::16]) if stride == 16 else every[16 * i:16 * i + 16] for i in range(16)]
    units = [(50, every)] * 80 + [(7, ranks) for ranks in sets for _ in range(160)]
    owners, _ = part("planning.load_balance").assign(units, dict.fromkeys(every, 0))
    loads = Counter()
    for (work, ranks), owner in zip(units, owners):
        loads[owner] += work
        assert owner in ranks
    assert max(loads.values()) <= 1.12 * sum(loads.values()) / 256


def test_earlier_work_counts(optimizer):
    loads, _ = assign([4] * 6, 3, {0: 8, 1: 0, 2: 0})
    assert sorted(loads) == [8, 12, 12] and assign([], 3, {0: 5, 1: 0, 2: 0})[0] == [5, 0, 0]


def test_the_effort_is_bounded(optimizer):
    """10,000 units of 50 kinds on 4096 ranks: counted, not timed."""
    works = [100 + 13 * (i % 50) for i in range(10_000)]
    loads, spent = assign(works, 4096)
    assert spent < 2_000_000 and max(loads) <= greedy(works, 4096)
    assert assign(works, 4096, effort=1000)[1] < 3000

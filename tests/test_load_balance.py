"""Owners from numbers: those of the greedy rule, on allowed ranks only, over earlier work."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter

import pytest

from tests.ranks import part


def assign(works, count, base=None):
    """Load of each rank, with every rank allowed to own everything."""
    ranks = tuple(range(count))
    owners = part("planning.load_balance").assign([(w, ranks) for w in works], base or dict.fromkeys(ranks, 0))
    loads = Counter(base or {})
    for work, owner in zip(works, owners):
        loads[owner] += work
    return [loads[r] for r in ranks]


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


def test_the_worst_case_of_the_greedy_rule(optimizer):
    """Graham's own example: 11, where 9 is possible."""
    assert best_possible([5, 5, 4, 4, 3, 3, 3], 3) == 9 and greedy([5, 5, 4, 4, 3, 3, 3], 3) == 11
    assert max(assign([5, 5, 4, 4, 3, 3, 3], 3)) == 11


def test_no_assignment_differs_from_greedy_or_is_better_than_possible(optimizer):
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies

    @hypothesis.settings(max_examples=100)
    @hypothesis.given(st.integers(1, 3), st.lists(st.integers(1, 40), max_size=7))
    def check(count, works):
        loads, possible = assign(works, count), best_possible(works, count)
        assert sum(loads) == sum(works) and max(loads) == greedy(works, count)
        assert part("planning.load_balance").least_load(works, count) <= possible <= max(loads) <= 4 / 3 * possible

    check()


def test_the_bound_counts_what_cannot_be_cut(optimizer):
    least = part("planning.load_balance").least_load
    assert least([10, 1, 1], 3) == 10  # one unit is larger than the mean
    assert least([4, 4, 4, 4], 3) == 8  # four units, three ranks: one has two
    assert least([1] * 12, 3) == 4 and least([], 3) == 0


def test_only_allowed_ranks_own(optimizer):
    """Everything large may only lie on two ranks, and the small goes to the others."""
    few, every = (0, 1), (0, 1, 2, 3)
    units = [(30, few)] * 3 + [(7, every)] * 12
    owners = part("planning.load_balance").assign(units, dict.fromkeys(every, 0))
    assert set(owners[:3]) == {0, 1} and 60 in Counter(
        {r: sum(w for (w, _), o in zip(units, owners) if o == r) for r in every}).values()
    assert sum(o > 1 for o in owners[3:]) >= 9


@pytest.mark.parametrize("stride", [1, 16], ids=["neighbours", "far apart"])
def test_work_for_all_leaves_room_for_work_that_is_bound(stride, optimizer):
    """Each 16 of 256 ranks have 160 small units of their own; 80 large ones may go anywhere."""
    every = tuple(range(256))
    sets = [tuple(every[i::16]) if stride == 16 else every[16 * i:16 * i + 16] for i in range(16)]
    units = [(50, every)] * 80 + [(7, ranks) for ranks in sets for _ in range(160)]
    owners = part("planning.load_balance").assign(units, dict.fromkeys(every, 0))
    loads = Counter()
    for (work, ranks), owner in zip(units, owners):
        loads[owner] += work
        assert owner in ranks
    assert max(loads.values()) <= 1.12 * sum(loads.values()) / 256


def test_earlier_work_counts(optimizer):
    loads = assign([4] * 6, 3, {0: 8, 1: 0, 2: 0})
    assert sorted(loads) == [8, 12, 12] and assign([], 3, {0: 5, 1: 0, 2: 0}) == [5, 0, 0]


def test_thousands_of_units_and_ranks(optimizer):
    """10,000 units of 50 kinds on 4096 ranks."""
    works = [100 + 13 * (i % 50) for i in range(10_000)]
    assert max(assign(works, 4096)) == greedy(works, 4096)


def test_equal_sets_of_ranks_need_not_be_one_tuple(optimizer):
    """Nor does their order count: a heap for each tuple sees the loads of all."""
    units = [(5, (0, 1)), (5, tuple([0, 1])), (3, (1, 0)), (3, tuple([0, 1]))]
    owners = part("planning.load_balance").assign(units, {0: 0, 1: 0})
    assert owners[0] != owners[1] and owners[2] != owners[3]

"""Cutting into buckets: nothing is lost, the room is kept, and where times are known all is done earlier."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import pytest

from tests.ranks import part


def layers(works, count=4):
    """One layer per entry: (matrices, bytes)."""
    Round = part("planning.memory_model").Round
    return [Round(tuple(f"{i}.{j}" for j in range(n or count)), Counter(bytes=nbytes))
            for i, (nbytes, n) in enumerate(works)]


def most(taken):
    return taken["bytes"]


def flat(buckets):
    return sorted(m for bucket in buckets for layer in bucket for m in layer.matrices)


def bytes_of(bucket):
    """Of a list of layers, or of what a bucket takes, as `cut` says it."""
    return bucket["bytes"] if isinstance(bucket, Counter) else sum(layer.taken["bytes"] for layer in bucket)


def held(buckets):
    return max(map(bytes_of, buckets))


def price_of(pack, wire, products, fixed):
    """Price buckets by a rate of bytes for each kind of work, and a time for each bucket."""
    cost_model = part("planning.cost_model")
    def predicted_end(buckets):
        parts = []
        for bucket in buckets:
            n = bytes_of(bucket)
            parts.append(
                cost_model.BucketTimes(int(pack * n), int(wire * n), int(products * n) + fixed, int(wire * n), 0)
            )
        return max(span.end for span in cost_model.spans(parts, 0.0))
    return predicted_end


def test_without_prices_as_few_as_fit(optimizer):
    bucketing = part("planning.bucketing")
    work = layers([(40, 4), (30, 4), (30, 4), (10, 4), (5, 1)])
    assert [len(b) for b in bucketing.cut(work, most, 100)] == [3, 2]
    assert [len(b) for b in bucketing.cut(work, most, 1)] == [1] * 5
    assert [len(b) for b in bucketing.cut(work, most, 10**6)] == [5]


def test_nothing_is_lost_and_the_room_is_kept(optimizer):
    bucketing = part("planning.bucketing")
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies

    @hypothesis.settings(max_examples=80)
    @hypothesis.given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(0, 4), st.integers(1, 150),
                      *[st.floats(0.1, 10)] * 3, st.integers(0, 300))
    def check(sizes, ragged, room, pack, wire, products, fixed):
        sizes = sorted(sizes, reverse=True)
        work = layers([(n, 4 if i < len(sizes) - ragged else 2) for i, n in enumerate(sizes)])
        predicted_end = price_of(pack, wire, products, fixed)
        plain, chosen = bucketing.cut(work, most, room), bucketing.cut(work, most, room, predicted_end)
        assert flat(chosen) == flat(plain) and all(chosen)
        assert all(len(b) == 1 or sum(map(most, (x.taken for x in b))) <= room for b in chosen)
        assert predicted_end(chosen) <= predicted_end(plain)
        small = bucketing.cut(work, most, room, predicted_end, held)
        assert flat(small) == flat(plain) and all(small)
        assert held(small) <= held(chosen) and predicted_end(small) <= 1.01 * predicted_end(chosen)

    check()


def test_products_start_early_and_the_last_transfer_is_small(optimizer):
    """Enough work to hide every transfer but the first and the last: those are the smallest."""
    bucketing = part("planning.bucketing")
    work = layers([(100, 4)] * 6 + [(20, 4), (10, 4)])
    predicted_end = price_of(0.0, 1.0, 4.0, 1)
    chosen = bucketing.cut(work, most, 200, predicted_end)
    assert {bytes_of(chosen[0]), bytes_of(chosen[-1])} == {10, 20}
    assert predicted_end(chosen) < 0.95 * predicted_end(bucketing.cut(work, most, 200))


def test_one_bucket_is_cut_where_its_transfers_would_be_waited_for(optimizer):
    bucketing = part("planning.bucketing")
    work, slow_network = layers([(100, 4)] * 8), price_of(0.0, 1.0, 2.0, 5)
    assert len(bucketing.cut(work, most, 1000, slow_network)) > 2
    costly_buckets = price_of(0.0, 1.0, 2.0, 5000)
    assert len(bucketing.cut(work, most, 1000, costly_buckets)) == 1


def test_a_limit_of_several_times_all_bytes_gives_the_same_buckets(optimizer):
    """A limit is halved while all rounds together take at most half of it: fractions of a larger limit would cut
    nothing. Without any rounds the halving ends, too.
    """
    bucketing = part("planning.bucketing")
    work, slow_network = layers([(100, 4)] * 8), price_of(0.0, 1.0, 2.0, 5)
    for together in (None, held):
        chosen = [bucketing.cut(work, most, 800 * n, slow_network, together) for n in (1, 2, 4, 8, 64)]
        assert len(chosen[0]) > 2 and all(buckets == chosen[0] for buckets in chosen)
    assert bucketing.cut([], most, 100) == bucketing.cut([], most, 100, lambda buckets: 0.0) == []


@pytest.mark.parametrize("fixed", [5, 20, 80])
def test_the_fewest_bytes_that_cost_one_percent(fixed, optimizer):
    """Every bucket takes `fixed` longer: of all equal cuts that take 1 % longer than one bucket, the finest."""
    bucketing = part("planning.bucketing")
    work, predicted_end = layers([(50, 4)] * 200), price_of(0.0, 0.0, 1.0, fixed)
    assert len(bucketing.cut(work, most, 10_000, predicted_end)) == 1
    chosen, latest = bucketing.cut(work, most, 10_000, predicted_end, held), 1.01 * (10_000 + fixed)
    least = min(50 * n for n in range(1, 201) if 10_000 + -(-200 // n) * fixed <= latest)
    assert predicted_end(chosen) <= latest and least <= held(chosen) <= least / bucketing.SHRINK


def test_all_of_the_room_is_for_time(optimizer):
    """Without `held`: nothing slower than what fits the room, or a share of it, however much memory that takes."""
    bucketing = part("planning.bucketing")
    work, rates = layers([(100 - i, 4) for i in range(60)]), [(0.0, 1.0, 2.0, 5), (0.5, 3.0, 1.0, 200), (0, 0, 1, 9)]
    for room in (200, 1000, 5000):
        for predicted_end in (price_of(*rate) for rate in rates):
            shares = [bucketing.cut(work, most, room / n) for n in (1, 2, 4, 8)]
            chosen = bucketing.cut(work, most, room, predicted_end)
            assert predicted_end(chosen) <= min(map(predicted_end, shares)) / bucketing.WORTHWHILE
    assert len(chosen) == 1  # where all of it fits, and each bucket costs something


def peak_of(count):
    """The bytes that are alive at most while so many layers are cut."""
    work = layers([(1, 4)] * count)
    tracemalloc.start()
    part("planning.bucketing").cut(work, most, 10**6, lambda buckets: 1.0 * len(buckets), held)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_the_work_of_cutting_grows_with_the_number_of_layers(optimizer):
    """Each longer list of layers had a key as long as itself: 8,000 parameters took 5 s to plan."""
    assert peak_of(2000) < 6 * peak_of(500)

"""When buckets move on: overlap, order and the memory that they share, with routes that only write a diary."""

from __future__ import annotations

import pytest

from tests.ranks import everywhere, part


class Collective:
    def __init__(self, diary, name):
        self.diary, self.name, self.done = diary, name, False

    def wait(self):
        assert not self.done, "waited for twice"
        self.done = True
        self.diary.append(f"wait {self.name}")


class BucketUpdate:
    """Yields `hops` collectives; says when each part of its story runs, and that it has its slot to itself."""
    label, written = "bucket", None

    def __init__(self, number, hops, diary, slots, has_collectives=True):
        self.number, self.hops, self.diary, self.slots = number, hops, diary, slots
        self.has_collectives = has_collectives

    def run(self, hp):
        assert hp == {"group": self.number}
        slot = self.number % part("pipeline").BUCKETS_IN_FLIGHT if self.has_collectives else 1
        assert self.slots.setdefault(slot, self) is self, f"slot {slot} is still in use"
        for hop in range(self.hops):
            self.diary.append(f"{self.number}.{hop}")
            collective = Collective(self.diary, f"{self.number}.{hop}")
            yield collective
            assert collective.done and self.slots[slot] is self
        self.diary.append(f"{self.number} ends")
        del self.slots[slot]


def diary_of(hops, at_home=0, closing=False):
    """What happens, in order, for buckets with so many collectives each and some that stay at home."""
    diary, slots = [], {}
    jobs = [(BucketUpdate(i, count, diary, slots), {"group": i}) for i, count in enumerate(hops)]
    home = [(BucketUpdate(f"home {i}", 0, diary, slots, has_collectives=False), {"group": f"home {i}"})
            for i in range(at_home)]
    jobs[len(jobs) // 2:len(jobs) // 2] = home
    part("pipeline").run(jobs, *([lambda: diary.append("closing")] if closing else ()))
    assert not slots, "a story did not come to its end"
    return diary


@pytest.mark.kernels_ci
@pytest.mark.parametrize("hops", [0, 1, 2])
@pytest.mark.parametrize("count", range(7))
@pytest.mark.parametrize("at_home", [0, 1, 3])
def test_every_story_comes_to_its_end(count, hops, at_home, optimizer):
    diary = diary_of([hops] * count, at_home)
    ends = [line for line in diary if line.endswith("ends")]
    assert [e for e in ends if "home" not in e] == [f"{i} ends" for i in range(count)]
    assert [e for e in ends if "home" in e] == [f"home {i} ends" for i in range(at_home)]
    assert sum(line.startswith("wait") for line in diary) == count * hops


def test_stories_of_mixed_length_share_their_slots(optimizer):
    """A bucket whose gradients are already where they are needed has one collective instead of two."""
    hypothesis = pytest.importorskip("hypothesis")

    @hypothesis.settings(max_examples=200)
    @hypothesis.given(hypothesis.strategies.lists(hypothesis.strategies.integers(0, 2), max_size=12),
                      hypothesis.strategies.integers(0, 2))
    def check(hops, at_home):
        diary = diary_of(hops, at_home)
        waits = [line for line in diary if line.startswith("wait")]
        assert sorted(waits) == sorted(f"wait {i}.{hop}" for i, count in enumerate(hops) for hop in range(count))

    check()


@pytest.mark.kernels_ci
def test_the_next_bucket_travels_while_one_is_computed(optimizer):
    """In words: 1 leaves before 0 is computed; 2 leaves before 1 is computed; 0 is applied after that."""
    assert diary_of([2, 2, 2]) == [
        "0.0", "1.0", "wait 0.0", "0.1", "2.0", "wait 1.0", "1.1", "wait 0.1", "0 ends",
        "wait 2.0", "2.1", "wait 1.1", "1 ends", "wait 2.1", "2 ends"]


def test_answers_travel_while_the_next_is_computed(optimizer):
    """DDP: nothing to wait for before the work, so the answer of 0 is on its way while 1 is computed."""
    assert diary_of([1, 1, 1]) == [
        "0.0", "1.0", "wait 0.0", "0 ends", "2.0", "wait 1.0", "1 ends", "wait 2.0", "2 ends"]


def test_what_stays_at_home_runs_while_the_first_bucket_travels(optimizer):
    diary = diary_of([2, 2], at_home=2)
    assert diary[:4] == ["0.0", "home 0 ends", "home 1 ends", "1.0"]


def test_nothing_travels(optimizer):
    assert diary_of([], at_home=2) == ["home 0 ends", "home 1 ends"]


@pytest.mark.parametrize("hops", [[], [1], [2], [1, 1], [2, 2], [2, 1], [1, 2], [2] * 5, [1, 2, 2, 1]])
def test_what_closes_comes_after_all_collectives_and_before_the_last_lands(hops, optimizer):
    """A collective that ranks add there is the last for each of them, whichever buckets they share with others."""
    diary = diary_of(hops, at_home=1, closing=True)
    before, after = diary[:diary.index("closing")], diary[diary.index("closing") + 1:]
    assert "home 0 ends" in before and diary.count("closing") == 1
    assert all(line.startswith("wait") or line.endswith("ends") for line in after)
    assert hops[-1:] != [2] or f"{len(hops) - 1} ends" in after


@pytest.mark.parametrize("count", [2, 5])
def test_a_bucket_that_other_ranks_have_does_not_change_the_order_of_the_rest(count, optimizer):
    """A rank without bucket 1 takes part in the others in the order in which the ranks with it do.

    The collectives of the others share a process group: if one rank starts 2 before it answers 0, all have to.
    """
    with_it = [line for line in diary_of([2] * count) if "." in line and not line.startswith(("wait", "1"))]
    pipeline, diary, slots = part("pipeline"), [], {}
    jobs = [(BucketUpdate(i, 2 if i != 1 else 0, diary, slots), {"group": i}) for i in range(count)]
    pipeline.run(jobs)
    assert [line for line in diary if "." in line and not line.startswith("wait")] == with_it


def test_all_are_in_before_the_first_goes_out(optimizer):
    """In words: all leave, then all are computed and sent back, then all are applied; what stays at home is first."""
    pipeline, diary, slots = part("pipeline"), [], {}
    jobs = [(BucketUpdate(i, hop, diary, slots), {"group": i}) for i, hop in ((0, 2), (2, 2), (3, 1))]
    home = BucketUpdate("home", 0, diary, slots, has_collectives=False), {"group": "home"}
    with pytest.MonkeyPatch.context() as patch:
        everywhere(patch, pipeline, "BUCKETS_IN_FLIGHT", 5)  # one for each
        pipeline.run_all_inbound_first([jobs[0], home, *jobs[1:]])
        late, diary[:] = list(diary), []
        begun = [pipeline.begin(*job) for job in jobs[:2]]
        assert diary == ["0.0", "2.0"]
        pipeline.run_all_inbound_first([jobs[0], home, *jobs[1:]], lambda: diary.append("closing"), begun)
        assert diary.pop() == "closing"
    assert diary == late == [
        "0.0", "2.0", "3.0", "home ends", "wait 0.0", "0.1", "wait 2.0", "2.1", "wait 3.0", "3 ends",
        "wait 0.1", "0 ends", "wait 2.1", "2 ends"]


def test_an_error_in_one_bucket_is_not_swallowed(optimizer):
    class Broken(BucketUpdate):
        def run(self, hp):
            yield Collective(self.diary, "broken")
            raise RuntimeError("a kernel failed")

    with pytest.raises(RuntimeError, match="a kernel failed"):
        part("pipeline").run([(Broken(0, 1, [], {}), {"group": 0})])

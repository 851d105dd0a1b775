"""The waits between the streams of offloaded state. No GPU is needed: a recorder stands in for the streams and keeps,
for each stream, what is certain to have ended (vector clocks). Two accesses to one memory, one of them a write, must be
ordered, and so must the host's. Each wait is dropped in turn: the check has to see it.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from dataclasses import dataclass

import pytest
import torch

from tests.ranks import part, run_threads
from tests.test_bucket_updates import cut
from tests.test_offload import build

HOST = "host"
# Wait that is dropped: (stream that waits, event)
WAITS = [("inward", "used"), ("inward", "written"), ("compute", "fetched"), ("outward", "used"), (HOST, "written"),
         (HOST, "fetched")]
ITEMS = 12  # elements of host memory, each a state of its own


class Event:
    def __init__(self, name):
        self.name, self.clock = name.split()[0], {}


@dataclass
class Access:
    """An operation of a stream: what it reads and writes, as ranges of addresses."""

    kind: str
    stream: str
    tick: int
    clock: dict  # stream -> ticks that have ended when it begins
    reads: list
    writes: list
    is_used: bool = True  # False: a fetch whose result nobody reads

    def follows(self, other):
        return self.stream == other.stream and self.tick > other.tick or self.clock.get(other.stream, 0) >= other.tick


def place(tensor):
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def meet(ours, theirs):
    return any(a < d and c < b for a, b in ours for c, d in theirs)


class Recorder:
    """Stands in for `CopyStreams`. Copies are made at once, so that values can be compared, too.

    `dropped`: a wait of WAITS that is left out; with `instance`, only the one of this number.
    """

    def __init__(self, dropped=None, instance=None, compute_streams=1):
        self.dropped, self.instance, self.compute_streams = dropped, instance, compute_streams
        self.clocks = collections.defaultdict(dict)
        self.accesses, self.shared, self.count = [], [], 0
        self.waits = collections.Counter()
        self.is_packing = False

    def named(self, stream):
        """The current stream may be another one for each launch, as during backward."""
        if stream == "compute" and self.is_packing:
            return "pack"
        return f"compute {self.count % self.compute_streams}" if stream == "compute" else stream

    def add(self, kind, stream, reads=(), writes=()):
        stream = self.named(stream)
        clock = self.join(stream, self.clocks[HOST])  # what the host knows when it enqueues has ended
        tick = clock.get(stream, 0) + 1
        reads, writes = ([place(t) for t in some if t.nbytes] for some in (reads, writes))
        self.accesses.append(Access(kind, stream, tick, dict(clock), reads, writes))
        clock[stream] = tick
        return self.accesses[-1]

    def join(self, stream, other):
        clock = self.clocks[stream]
        for name, tick in other.items():
            clock[name] = max(clock.get(name, 0), tick)
        return clock

    def is_dropped(self, wait):
        self.waits[wait] += 1
        return self.dropped == wait and self.instance in (None, self.waits[wait])

    # The calls of `CopyStreams`

    def event(self, name):
        return Event(name)

    def record(self, event, stream):
        event.clock = dict(self.join(self.named(stream), self.clocks[HOST]))

    def wait(self, stream, event):
        if not self.is_dropped((stream, event.name)):
            self.join(self.named(stream), event.clock)

    def synchronize(self, event):
        if not self.is_dropped((HOST, event.name)):
            self.join(HOST, event.clock)

    def copy(self, stream, copies):
        self.add(stream, stream, [source for _, source in copies], [to for to, _ in copies])
        for to, source in copies:
            to.copy_(source)

    def share(self, memory):
        self.shared.append(memory)
        self.add("memory", "compute", writes=[memory])  # of something freed that may still be in use

    @contextlib.contextmanager
    def on_pack_stream(self):
        assert not self.is_packing
        self.is_packing = True
        try:
            yield
        finally:
            self.is_packing = False

    # The check

    def check(self):
        """Every two accesses that conflict are in the order in which they were enqueued; a launch reads what was
        fetched last, and what was fetched is not stale.
        """
        self._check_launches()
        for first, second in itertools.combinations(self.accesses, 2):
            pairs = [(first.writes, second.writes)]
            pairs += [(first.reads, second.writes)] * first.is_used + [(first.writes, second.reads)] * second.is_used
            if any(meet(*pair) for pair in pairs):
                assert second.follows(first), f"{first.kind} {first.tick} and {second.kind} {second.tick} race"

    def _check_launches(self):
        for access in self.accesses:
            access.is_used = access.kind != "inward"
        for number, launch in enumerate(self.accesses):
            if launch.kind != "launch":
                continue
            before = self.accesses[:number]
            fetch = [a for a in before if a.kind == "inward" and meet(a.writes, launch.reads)][-1]
            fetch.is_used = True
            after = before[before.index(fetch):]
            assert all(meet([span], fetch.writes) for span in launch.reads), "the slot holds another part"
            assert not any(meet(a.writes, fetch.reads) for a in after), "what was fetched is stale"


class Program:
    """Steps of launches on the states of a host memory, and what they should have computed."""

    def __init__(self, recorder, slots, following=False):
        self.following = following  # launches know the parts after them, as those of one `InParts`
        self.scheduling, self.recorder = part("execution.offload.scheduler"), recorder
        # Two blocks, as where some states came later
        self.memory, half = part("execution.offload.memory").HostBlocks(), ITEMS // 2
        blocks = [self.memory.add([4] * half, torch.device("cpu")) for _ in range(2)]
        self.views = [block.view(i, (1,), (1,), torch.float32) for block in blocks for i in range(half)]
        self.expected = [float(i) for i in range(ITEMS)]
        for view, value in zip(self.views, self.expected):
            view.fill_(value)
        self.scheduler = self.scheduling.Scheduler(recorder, torch.device("cpu"), 256 * ITEMS, slots)
        self.known = {}
        self.launches = 0

    def part_of(self, items, writes):
        key = tuple(items), writes
        if key not in self.known:
            self.known[key] = self.scheduling.Part(self.memory, [self.views[i] for i in items], writes)
        return self.known[key]

    def launch(self, items, writes, following=()):
        """A launch on some states, one part: x <- 2 x + number of the launch."""
        self.launches += 1
        some = [self.views[i] for i in items]
        one = self.part_of(items, writes)
        self.scheduler.place(one)

        def work():
            places = [one.on_device(view) for view in some]
            self.recorder.add("launch", "compute", places, places if writes else [])
            for i, at in zip(items, places):
                assert at.item() == self.expected[i]
                if writes:
                    at.mul_(2).add_(self.launches)
                    self.expected[i] = at.item()

        self.scheduler.run(one, work, [self.part_of(*other) for other in following])
        self.recorder.count += 1

    def step(self, launches):
        self.scheduler.prefetch()
        for number, (items, writes) in enumerate(launches):
            self.launch(items, writes, launches[number + 1:] if self.following else ())
        self.scheduler.end_step()

    def read(self):
        """What the host does between steps: it waits, reads, and writes."""
        self.scheduler.wait()
        blocks = [block.flat for block in self.memory.blocks]
        self.recorder.add("host", HOST, blocks, blocks)
        assert [view.item() for view in self.views] == self.expected
        self.views[0].add_(1)
        self.expected[0] += 1


def in_a_row(count, writes=True):
    """`count` launches on states of their own."""
    return [([i], writes) for i in range(count)]


PROGRAMS = {f"{count} parts": [in_a_row(count)] * 3 for count in (1, 3, 5, 7)}
PROGRAMS |= {
    "read, then written in other parts": [in_a_row(6, False) + [([0, 1, 2], True), ([3, 4], True), ([5], True)]] * 3,
    "neighbours share states": [[([0, 1], True), ([1, 2], True), ([2, 3], True), ([0, 3], False), ([3], True)]] * 3,
    "one twice in a row": [[([0], True), ([0], True), ([1], False), ([1], True), ([0], False)]] * 3,
    "another order": [in_a_row(5), in_a_row(5)[::-1], in_a_row(3), in_a_row(7), in_a_row(5)],
    "only read": [in_a_row(5, False)] * 3,
    "parts of other steps": [in_a_row(5), [([1, 2], True), ([0, 3], True), ([4], False)]] * 3,
}


def played(name, recorder, slots, *, reads=True, following=False):
    program = Program(recorder, slots, following)
    for step in PROGRAMS[name]:
        program.step(step)
        if reads:
            program.read()
    program.read()
    return program


SHARED = ("read, then written in other parts", "neighbours share states", "one twice in a row", "parts of other steps")


# Launches on one state are in the order of the compute stream: a step on a side stream is joined before they share one
@pytest.mark.parametrize("name, compute_streams", [(name, 1) for name in PROGRAMS] +
                         [(name, 2) for name in PROGRAMS if name not in SHARED])
@pytest.mark.parametrize("slots, following", [(1, False), (2, False), (3, False), (1, True), (3, True)])
def test_no_two_accesses_race(name, slots, following, compute_streams):
    recorder = Recorder(compute_streams=compute_streams)
    program = played(name, recorder, slots, following=following)
    recorder.check()
    assert set(recorder.waits) >= set(WAITS) - {("outward", "used")}
    # Every stream is told of the memory of the slots, and there is no other memory
    assert [m.data_ptr() for m in recorder.shared] == [slot.memory.data_ptr() for slot in program.scheduler.slots]
    assert len(recorder.shared) == slots


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("dropped", WAITS, ids=" ".join)
def test_the_check_sees_each_wait_that_is_dropped(dropped, slots):
    missed = []
    for name in PROGRAMS:
        recorder = Recorder(dropped)
        played(name, recorder, slots)
        try:
            recorder.check()
        except AssertionError:
            continue
        missed.append(name)
    seen = set(PROGRAMS) - set(missed)
    # Where every launch writes, the fetch waits for the write-back of its slot, which waits for the launch
    reading = dropped in (("inward", "used"), (HOST, "fetched"))
    assert seen >= ({"only read"} if reading else {"5 parts", "7 parts", "another order"}), missed


@pytest.mark.parametrize("dropped", WAITS[1:5], ids=" ".join)
def test_none_of_the_waits_of_a_step_is_spare(dropped):
    """Each single wait is needed: of fetches, those of the second step into slots that are used again in it, parts 3
    and 4. Fetches before them follow one that has waited for all that was written.
    """
    count = Recorder()
    played("5 parts", count, 3, reads=False)
    instances = (9, 10) if dropped == ("inward", "written") else range(1, count.waits[dropped] + 1)
    for instance in instances:
        recorder = Recorder(dropped, instance)
        played("5 parts", recorder, 3, reads=False)
        with pytest.raises(AssertionError, match="race"):
            recorder.check()


def test_parts_are_fetched_ahead_from_the_second_step_on():
    """While a part is computed, the next one is on its way, and the one before is written back."""
    recorder = Recorder()
    played("7 parts", recorder, 3)
    kinds = [access.kind for access in recorder.accesses if access.kind in ("inward", "launch", "outward", HOST)]
    first, second = kinds[:kinds.index(HOST)], kinds[kinds.index(HOST) + 1:][:21]
    assert first == ["inward", "launch", "outward"] * 7
    assert second == ["inward"] * 3 + ["launch", "outward", "inward"] * 4 + ["launch", "outward"] * 3


class Counting(Recorder):
    """Counts events that are recorded, and calls of copies."""

    def __init__(self):
        super().__init__()
        self.records = self.copies = 0

    def record(self, event, stream):
        self.records += 1
        super().record(event, stream)

    def copy(self, stream, copies):
        self.copies += len(copies)
        super().copy(stream, copies)


def test_a_part_takes_few_calls_of_the_host():
    """From the second step on: three events, each recorded and waited for once, and a copy each way."""
    recorder = Counting()
    program = Program(recorder, 3)
    program.step(in_a_row(12))
    recorder.records = recorder.copies = 0
    recorder.waits.clear()
    program.step(in_a_row(12))
    of_the_step = recorder.waits.pop(("compute", "packed"))
    assert (recorder.records, recorder.copies, sum(recorder.waits.values())) == (3 * 12, 2 * 12, 3 * 12)
    assert of_the_step == 1 and program.scheduler.disjoint == set(program.scheduler.order)


def test_parts_that_share_memory_are_known():
    program = Program(Recorder(), 2)
    for launches, disjoint in [([([0, 1], True), ([1, 2], True), ([3], True), ([5, 6], False)], [2, 3]),
                            ([([0], True), ([0], True), ([4], True)], [2]),
                            ([([0, 1, 2, 3], True), ([1], True), ([4], True), ([3], False)], [2]), ([], [])]:
        program.step(launches)
        order = program.scheduler.order
        assert program.scheduler.disjoint == {order[number] for number in disjoint}


def test_the_first_step_fetches_the_parts_of_a_launch_ahead():
    recorder = Recorder()
    played("7 parts", recorder, 3, following=True)
    kinds = [access.kind for access in recorder.accesses if access.kind in ("inward", "launch", "outward", HOST)]
    first = kinds[:kinds.index(HOST)]
    assert first == ["inward", "launch", "outward"] + ["inward"] * 3 + ["launch", "outward", "inward"] * 3 + \
        ["launch", "outward"] * 3


def test_a_launch_that_raises_leaves_its_slot_ordered():
    """Kernels that it has launched before the error use the slot, which the next fetch overwrites."""
    recorder = Recorder()
    program = Program(recorder, 1)
    program.launch([0], True)
    one = program.part_of([1], True)
    program.scheduler.place(one)

    def broken():
        recorder.add("kernel", "compute", [one.on_device(program.views[1])])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program.scheduler.run(one, broken)
    program.scheduler.end_step()
    program.launch([2], False)
    recorder.check()


# Launches on the stream "pack", of whole optimizers

BESIDE = [("pack", "given"), ("compute", "packed")]


def watch(monkeypatch, make):
    """Have optimizers step with recorders that `make` returns, and kernels tell what they use."""
    monkeypatch.setattr(part("execution.offload.offload"), "LEAST_SLOT", 2048)
    monkeypatch.setattr(part("execution.offload.offload"), "streams_for", lambda *_: make())
    bound, elementwise = part("execution.bucket_updates").LaunchedUpdate, part("execution.offload.updates")

    def told(cls, name, uses):
        method = getattr(cls, name)

        def call(self, *args, **options):
            method(self, *args, **options)
            self.store.scheduler.streams.add("kernel", "compute", *uses(self))

        monkeypatch.setattr(cls, name, call)

    def packed(update):
        """Sharded buckets write U to the memory of an all-to-all, local ones to the stacks."""
        uses = ["stack"] if update.bucket.route == "local" else ["leave", "kept"]
        return update.store.gradients, [update.memory[use] for use in uses]

    told(bound, "_run_pack", packed)
    told(bound, "_run_iteration", lambda update: ([], list(update.memory.values())))
    told(bound, "_run_weight_update", lambda update: (list(update.memory.values()), update.store.locals()))
    told(elementwise.OffloadedElementwiseUpdate, "_launch", lambda update: (update.store.gradients, update.weights))


def stepped(place=lambda t: t, steps=3, **options):
    """A step's user writes gradients before, and reads weights after."""
    params, opt = build(place, shapes=[(16, 24)] * 8, others=[(40, 8)], offload_state=True, **options)
    local = part("params.dtensor").local_of
    gradients = [place(torch.ones(p.shape)) for p in params]
    recorder = None
    for _ in range(steps):
        if recorder is not None:
            recorder.add("user", "compute", list(map(local, params)), list(map(local, gradients)))
        for p, g in zip(params, gradients):
            p.grad = g
        opt.step()
        recorder = opt._preparation.place.scheduler.streams
    recorder.add("user", "compute", list(map(local, params)), list(map(local, gradients)))
    return opt, recorder


@pytest.mark.parametrize("dropped", [None, *BESIDE], ids=str)
@pytest.mark.parametrize("options", [{}, {"rule": "adamuon"}, {"decay": "initial"}], ids=str)
def test_launches_beside_newton_schulz_do_not_race(options, dropped, monkeypatch):
    watch(monkeypatch, lambda: Recorder(dropped))
    wide = 2 if "rule" in options else 1
    opt, recorder = stepped(workspace_bytes=40000 * wide, **options)
    buckets = opt._preparation.place.scheduler.buckets
    assert len(buckets) >= 3 and [b.stack_name for b in buckets[:3]] == ["stacks 0", "stacks 1", "stacks 0"]
    with pytest.raises(AssertionError, match="race") if dropped else contextlib.nullcontext():
        recorder.check()


def test_the_next_bucket_is_packed_before_newton_schulz(monkeypatch):
    """So are AdamW's parameters."""
    watch(monkeypatch, Recorder)
    _, recorder = stepped(steps=1, workspace_bytes=40000)
    streams = [access.stream for access in recorder.accesses if access.kind == "kernel"]
    count = streams.count("pack") - 1
    assert streams == ["pack"] * 3 + ["compute 0"] * 2 + ["pack", *["compute 0"] * 2] * (count - 2) + ["compute 0"] * 2


def sharded(rank, world, dropped):
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    opt, recorder = stepped(lambda t: cut(t, mesh, [Shard(0)]), workspace_bytes=28000)
    routes = [update.bucket.route for update, _ in opt._bound.jobs if update.bucket]
    try:
        recorder.check()
    except AssertionError as error:
        return routes, "race" in str(error)
    return routes, False


@pytest.mark.parametrize("dropped", [None, *BESIDE], ids=str)
def test_sharded_buckets_are_packed_beside_newton_schulz(dropped, monkeypatch):
    watch(monkeypatch, lambda: Recorder(dropped))
    for routes, races in run_threads(2, sharded, dropped):
        assert routes == ["exchange"] * 4 and races == (dropped is not None)


# Streams of CUDA


class FakeStream:
    made = []

    def __init__(self, device, priority=0):
        self.device, self.priority = device, priority
        self.made.append(self)


class FakeMemory:
    def __init__(self):
        self.told = []

    def record_stream(self, stream):
        assert stream not in self.told
        self.told.append(stream)


def test_the_allocator_knows_every_stream_that_uses_a_slot(monkeypatch):
    """Also streams of callers that step once, or launch during backward, and slots that come later."""
    streams, device = part("execution.offload.streams"), torch.device("cuda", 1)
    users = [FakeStream(device) for _ in range(2)]
    current, first, second = [users[0]], FakeMemory(), FakeMemory()
    FakeStream.made.clear()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    kept = {}
    ours = streams.CopyStreams(device, kept)
    ours.share(first)
    assert first.told and set(first.told) == {ours.streams[name] for name in ("inward", "outward", "pack")}
    for user in (users[0], users[1], users[0]):
        current[0] = user
        assert ours._stream("compute") is user
    ours.share(second)
    assert set(first.told) == set(second.told) == {*FakeStream.made, *users}
    # Torch has 32 streams of a priority: those of the last binding are taken again, on one device
    again = streams.CopyStreams(device, kept)
    assert len(FakeStream.made) == 3 and again.streams == ours.streams and again.shared == []
    assert streams.CopyStreams(torch.device("cuda", 0), kept).streams["pack"].device.index == 0


class FakeEvent:
    def record(self, stream):
        self.recorded = stream

    def wait(self, stream):
        self.waited = stream


class FakeTensor:
    def __init__(self, current):
        self.current = current

    def copy_(self, source, non_blocking):
        assert non_blocking
        self.copied_on = self.current[0]
        return 1 / source


@pytest.mark.parametrize("packs", [True, False])
def test_copies_run_on_their_streams_and_launches_on_the_current_one(packs, monkeypatch):
    """Also after a copy that raises. While U is written, torch is not asked for the current stream."""
    streams, device = part("execution.offload.streams"), torch.device("cuda", 0)
    user, asked = FakeStream(device), []
    current = [user]

    @contextlib.contextmanager
    def on(stream):
        before, current[0] = current[0], stream
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: asked.append(0) or current[0])
    ours = streams.CopyStreams(device, {})
    with ours.on_pack_stream() if packs else contextlib.nullcontext():
        caller, to, event = current[0], FakeTensor(current), ours.event("used")
        assert caller is (ours.streams["pack"] if packs else user)
        for name in ("inward", "outward"):
            ours.copy(name, [(to, 1)])
            assert to.copied_on is ours.streams[name] and current[0] is caller
            ours.wait(name, event)
            assert event.waited is ours.streams[name]
        ours.record(event, "compute")
        ours.wait("compute", event)
        assert event.recorded is event.waited is caller
        assert bool(asked) is not packs
        if packs:
            with pytest.raises(ZeroDivisionError):
                ours.copy("inward", [(to, 0)])
            assert current[0] is caller
    ours.record(event, "compute")
    assert current[0] is event.recorded is user


def test_nothing_is_waited_for_or_fetched_during_a_capture(monkeypatch):
    """A wait of the host would end the capture; whoever captures has synchronized before."""
    params, opt = build(offload_state=True)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    waits, place = [], opt._preparation.place
    monkeypatch.setattr(place.scheduler.streams, "synchronize", waits.append)
    monkeypatch.setattr(part("execution.offload.offload"), "capturing", lambda device: True)
    opt.wait()
    assert waits == []
    with pytest.raises(RuntimeError, match="inside a CUDA graph of your own"):
        place.prefetch()

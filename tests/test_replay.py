"""kernels/launch/replay.py: the second call of a kind on the same memory calls launchers only, with the same bits."""
from __future__ import annotations

import functools
import weakref
from types import SimpleNamespace

import pytest
import torch

from tests import paths
from tests.ranks import everywhere

pytestmark = pytest.mark.skipif(bool(paths.why_no_triton()), reason=str(paths.why_no_triton()))


class Descriptor:
    """Stands for Triton's: the tape knows them by their boxes."""
    block_shape = (1, 8, 8)

    def __init__(self, base):
        self.base, self.shape = base, [2, 3]


class Kernel:
    """Stands for what Triton compiles: a C function, inside a Python function that encodes descriptors."""

    def __init__(self, calls, scratch=0, **more):
        def launcher(*arguments):
            calls.append(arguments)

        def encoding(*arguments):
            return launcher(*arguments)

        self.run = SimpleNamespace(launch=encoding, global_scratch_size=scratch, profile_scratch_size=0,
                                   launch_cooperative_grid=False, launch_pdl=False, **more)
        self.metadata = SimpleNamespace(tensordesc_meta=["form 1", "form 2"])
        self.function, self.packed_metadata = 7, (4, 1)


@pytest.fixture
def tape(part, monkeypatch):
    from triton.backends.nvidia import driver

    module = part("kernels.launch.replay")
    monkeypatch.setattr(module, "_recordings", type(module._recordings)())
    monkeypatch.setattr(module, "_stream", lambda device: 5)
    monkeypatch.setattr(driver, "make_tensordesc_arg", lambda box, form: [(form, box.base.data_ptr()), *box.shape])
    return module


class Recorder:
    """Stands for a C function."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, *given):
        self.calls.append(given)


LATER = {"arg_annotations": "which are constants", "kernel_signature": b"types"}  # Triton 3.7


@pytest.mark.parametrize("more", [{}, LATER], ids=["3.6", "3.7"])
def test_what_was_recorded_is_played(tape, more):
    calls, done, memory, forever = [], [], torch.zeros(8), tape.persistent_copy(torch.ones(2), torch.device("cpu"))
    kernel, mine = Kernel(calls, **more), torch.ones(4)

    def work(tensor):
        done.append("work")
        tape.record(kernel, 3, (Descriptor(memory), memory[2:], forever, 0.5, None, tensor, Descriptor(tensor)))

    tape.replay_or_record("kind", [memory], [mine], lambda: work(mine))
    assert done == ["work"] and not calls
    other = torch.ones(4)
    tape.replay_or_record("kind", [memory], [other], lambda: work(other))
    assert done == ["work"]
    (call,) = calls
    assert call[:5] == (3, 1, 1, 5, 7) and call[7 if more else 9] == (4, 1)
    here, there = memory.data_ptr(), other.data_ptr()
    if more:
        assert call[13:15] == tuple(LATER.values()) and len(call) == 16
    played = ("form 1", here), 2, 3, here + 8, forever, 0.5, None, there, ("form 2", there), 2, 3
    assert tuple(call[15] if more else call[13:]) == played


def test_what_launchers_are_given_follows_tensors_and_the_stream(tape, monkeypatch):
    """It is kept from one play to the next."""
    calls, memory, tensors, streams = [], torch.zeros(8), [torch.ones(4), torch.ones(4)], iter([5, 5, 5, 6, 6, 5])
    kernel = Kernel(calls)
    monkeypatch.setattr(tape, "_stream", lambda device: next(streams))
    for tensor in (tensors[0], *tensors, tensors[0], tensors[0], *tensors):
        tape.replay_or_record("kind", [memory], [tensor], functools.partial(tape.record, kernel, 1, (memory, tensor)))
    starts = [t.data_ptr() for t in tensors]
    expected = [(5, starts[0]), (5, starts[1]), (5, starts[0]), (6, starts[0]), (6, starts[0]), (5, starts[1])]
    assert [(call[3], call[-1]) for call in calls] == expected


def test_a_thread_that_plays_the_same_tape_for_others_changes_nothing(tape):
    """Where a call takes no memory, threads on streams of their own have one tape."""
    calls, tensors = [], [torch.ones(4), torch.ones(4)]
    kernel = Kernel(calls)

    def play(tensor):
        tape.replay_or_record("kind", [], [tensor], functools.partial(tape.record, kernel, 1, (tensor,)))

    play(tensors[0])
    recorded = next(iter(tape._recordings.values()))

    class Interrupted(type(recorded)):
        """Another thread plays after each time that `last` is set."""
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "last" and value[1] == [tensors[0].data_ptr()]:
                super().__setattr__(name, (5, [tensors[1].data_ptr()], []))

    recorded.__class__ = Interrupted
    play(tensors[0])
    assert [call[-1] for call in calls] == [tensors[0].data_ptr()]


def test_other_memory_another_kind_and_other_sharing_are_recorded_anew(tape):
    done, memories, tensors = [], [torch.zeros(8), torch.zeros(8)], [torch.zeros(2), torch.zeros(2)]

    def work(memory):
        done.append(0)
        tape.record(Kernel([]), 1, (memory,))

    for memory in memories * 2:
        for kind in "ab" * 2:
            for together in (tensors, tensors[:1] * 2, tensors[1:] * 2):
                tape.replay_or_record(kind, [memory], together, functools.partial(work, memory))
    assert len(done) == 8


def test_nothing_is_kept_alive_and_not_too_much_is_kept(tape):
    pair = [torch.zeros(8), torch.zeros(8)]
    gone, start = list(map(weakref.ref, pair)), pair[0].data_ptr()
    tape.replay_or_record("kind", pair[:1], pair[1:], lambda: tape.record(Kernel([]), 1, (*pair, Descriptor(pair[0]))))
    pair.clear()
    assert [ref() for ref in gone] == [None, None] and any(key[2] == (start,) for key in tape._recordings)
    memory, kernel = torch.zeros(8), Kernel([])
    for kind in range(2 * tape.MAX_RECORDINGS):
        tape.replay_or_record(kind, [memory], [], lambda: tape.record(kernel, 1, (memory,)))
    assert len(tape._recordings) == tape.MAX_RECORDINGS


def test_a_tape_that_another_thread_drops_is_played_to_its_end(tape, monkeypatch):
    class Shared(type(tape._recordings)):
        def get(self, key):
            return self.pop(key, None)

    calls, memory = [], torch.zeros(8)
    kernel = Kernel(calls)
    monkeypatch.setattr(tape, "_recordings", Shared())
    for _ in range(2):
        tape.replay_or_record("kind", [memory], [], lambda: tape.record(kernel, 1, (memory,)))
    assert len(calls) == 1


def test_work_without_launches_is_done_again(tape):
    """A rehearsal launches nothing; what it leaves out must not be left out for ever."""
    done, memory = [], torch.zeros(8)
    for _ in range(3):
        tape.replay_or_record("kind", [memory], [], lambda: done.append(0))
    assert len(done) == 3


def test_from_the_third_call_on_nothing_is_looked_at(tape, part, optimizer, monkeypatch):
    """The second is the first that comes from a tape; matrices that are copied first are on none, and always looked at.
    """
    polar, calls, looked = part("newton_schulz.orthogonalize"), [], []
    paths.forget(polar, monkeypatch)
    monkeypatch.setenv("OPTIMIZER_KERNELS", "triton")
    monkeypatch.setattr(polar, "_launch", lambda pairs, *_: tape.record(Kernel(calls), 1, pairs[0]))
    everywhere(monkeypatch, polar, "check", lambda *_: looked.append(1))
    polar_of = functools.partial(optimizer.orthogonalize, dtype=torch.float16)  # so small, it takes no memory
    X, apart = torch.randn(2, 3, 8, 32), torch.randn(3, 2, 8, 32).transpose(0, 1)
    found = [polar_of(X) for _ in range(4)]
    assert len(looked) == 2 and len(calls) == 3 and len({O.data_ptr() for O in found}) == 4
    assert [call[-2:] for call in calls] == [(X.data_ptr(), O.data_ptr()) for O in found[1:]]
    for _ in range(4):
        polar_of(apart)
    assert len(looked) == 6 and len(calls) == 3 and len(polar._signatures) == 3


@pytest.mark.parametrize("kernel", [Kernel([], scratch=16), SimpleNamespace(), None])
def test_what_cannot_be_called_so_is_done_as_before(tape, kernel):
    """Kernels with scratch memory, another kind of launcher, Triton's interpreter."""
    done, memory = [], torch.zeros(8)
    for _ in range(3):
        tape.replay_or_record("kind", [memory], [], lambda: (done.append(0), tape.record(kernel, 1, (memory,))))
    assert len(done) == 3 and not tape._recordings


def test_another_triton_is_launched_as_before(tape, monkeypatch):
    done, memory = [], torch.zeros(8)
    everywhere(monkeypatch, tape, "knows_triton", lambda: False)
    for _ in range(3):
        tape.replay_or_record("kind", [memory], [], lambda: (done.append(0), tape.record(Kernel([]), 1, (memory,))))
    assert len(done) == 3 and not tape._recordings


def test_launchers_are_called_as_triton_calls_them(tape, monkeypatch):
    """The C function gets from a tape what the launcher of the Triton that is installed gives it."""
    import triton
    from triton.backends.nvidia import driver

    calls, memory, kernel = [], torch.zeros(8), Kernel([])
    later = LATER if "kernel_signature" in driver.CudaLauncher.__call__.__code__.co_names else {}
    kernel.run = launcher = object.__new__(driver.CudaLauncher)
    vars(launcher).update(vars(Kernel([], **later).run), launch=Recorder(calls), num_ctas=1,
                          gsan_enabled=False, global_scratch_align=1, profile_scratch_align=1)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=None))
    launcher(3, 1, 1, 5, kernel.function, kernel.packed_metadata, None, None, None, memory.data_ptr(), 0.5)
    for _ in range(2):
        tape.replay_or_record("kind", [memory], [], lambda: tape.record(kernel, 3, (memory, 0.5)))
    assert len(calls) == 2 and calls[0] == calls[1]


def test_memory_that_nobody_named_is_not_played(tape):
    """It would be read where it was at the first call."""
    done, memory = [], torch.zeros(8)

    def work(tensor):
        done.append("work")
        tape.record(Kernel([]), 1, (tensor,))

    for _ in range(3):
        tape.replay_or_record("kind", [memory], [], lambda: work(torch.zeros(3)))
        tape.replay_or_record("view", [memory], [memory], lambda: work(torch.zeros(3)))
    assert len(done) == 6 and not tape._recordings


def test_an_error_ends_the_recording(tape):
    memory = torch.zeros(8)
    with pytest.raises(ZeroDivisionError):
        tape.replay_or_record("kind", [memory], [], lambda: 1 / 0)
    tape.record(None, 1, ())
    assert tape._thread.recording is None and not tape._recordings


def test_a_profiler_of_triton_hears_of_launches(tape):
    from triton import knobs

    done, memory, kernel = [], torch.zeros(8), Kernel([])

    def work():
        done.append(0)
        tape.record(kernel, 1, (memory,))

    tape.replay_or_record("kind", [memory], [], work)
    knobs.runtime.launch_enter_hook.add(print)
    try:
        tape.replay_or_record("kind", [memory], [], work)
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    tape.replay_or_record("kind", [memory], [], work)
    assert len(done) == 2


def multiply(records, blocks, values, factor, NEGATES, FIELDS, BLOCK, ACCESS, TYPE_0, TYPE_1=None):
    """Stands for the Python function of a kernel over a table."""


class Jit:
    """Stands for a decorated kernel."""
    function = staticmethod(multiply)

    def __init__(self, compiled, launched):
        self.compiled, self.launched = compiled, launched

    def prepare(self, *arguments, **options):
        self.launched.append("prepared")

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launched.append((grid, arguments)) or self.compiled


def a_table(tables):
    """A launch over a table, and its records and blocks."""
    records, blocks = torch.zeros(1, 9, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64)
    return tables.Launch((torch.float32,), tables.ROW, records, blocks, torch.zeros(1, dtype=torch.int64))


def test_a_launch_over_a_table_with_equal_arguments_calls_the_launcher_only(tape, part):
    import triton.language as tl

    tables, calls, launched = part("kernels.elementwise.multi_tensor"), [], []
    launch, kernel, values = a_table(tables), Jit(Kernel(calls), launched), torch.zeros(4)
    for _ in range(3):
        tables.run(kernel, launch, values, 2, NEGATES=True)
    assert launched == ["prepared", ((3,), (launch.records, launch.blocks, values, 2))]
    own = launch.records.data_ptr(), launch.blocks.data_ptr(), values.data_ptr(), 2
    assert len(calls) == 2 and calls[0] == calls[1]
    assert calls[0][:5] == (3, 1, 1, 5, 7)
    # By position: the constants, those of the table, and no second list
    assert calls[0][-len(own) - 6:] == (*own, True, 9, tables.BLOCK, tables.ROW, tl.float32, None)
    # Another address, number or constant is another launch
    for others in [(torch.zeros(4), 2, True), (values, 3, True), (values, 2, False)]:
        before = len(launched)
        tables.run(kernel, launch, *others[:2], NEGATES=others[2])
        assert len(launched) == before + 2 and len(calls) == 2
        tables.run(kernel, launch, *others[:2], NEGATES=others[2])
        assert len(launched) == before + 2 and calls.pop()[-7:-4] == (*others[1:], 9)
    for number in range(20):
        tables.run(kernel, launch, values, number, NEGATES=True)
    assert len(launch.started) <= tables.MOST_STARTED


def test_a_fixed_launch_follows_the_stream_and_profilers(tape, monkeypatch):
    from triton import knobs

    calls, streams = [], [5, 5, 6]
    monkeypatch.setattr(tape, "_stream", lambda device: streams.pop(0))
    fixed = tape.FixedLaunch.of(0, Kernel(calls), 2, (1.5, None))
    assert fixed.start() and fixed.start() and fixed.start()
    assert [call[3] for call in calls] == [5, 5, 6] and calls[0] is not calls[2]
    knobs.runtime.launch_enter_hook.add(print)
    try:
        assert not fixed.start() and len(calls) == 3
    finally:
        knobs.runtime.launch_enter_hook.remove(print)


def test_launches_over_tables_that_cannot_be_fixed_are_made_as_before(tape, part, monkeypatch):
    """In the interpreter, where memory of Triton's is needed, with an unknown Triton, and in a dry run."""
    tables, calls = part("kernels.elementwise.multi_tensor"), []
    for compiled in (None, Kernel(calls, scratch=8), object()):
        launch, launched = a_table(tables), []
        for _ in range(3):
            tables.run(Jit(compiled, launched), launch, 2, NEGATES=False)
        assert len(launched) == 6 and not calls
    launch, launched = a_table(tables), []
    kernel = Jit(Kernel(calls), launched)
    monkeypatch.setattr(part("kernels.launch.jit").thread_state, "dry_run", True, raising=False)
    for _ in range(3):
        tables.run(kernel, launch, 2, NEGATES=False)
    assert len(launched) == 6 and not calls and not launch.started


@pytest.mark.gpu
def test_a_fixed_launch_has_the_bits_of_the_first(part):
    """On new gradients at other addresses, on another stream, and inside of a graph."""
    tables, momentum = part("kernels.elementwise.multi_tensor"), part("kernels.elementwise.momentum")
    shapes = [(64, 96), (40, 24), (33, 7)]
    torch.manual_seed(0)
    M, U, expected = ([torch.zeros(s, device="cuda") for s in shapes] for _ in range(3))
    U = [u.bfloat16() for u in U]
    sources = [tables.Source(i, 0, (s[1], 1)) for i, s in enumerate(shapes)]
    addresses, weight = torch.zeros(3, dtype=torch.int64, device="cuda"), torch.full((12,), 0.05, device="cuda")
    gradients = [[torch.randn(s, device="cuda") for s in shapes] for _ in range(5)]
    pack = momentum.Pack(M, U, sources, gradients[0])
    others = [torch.empty_like(u) for u in U]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    for number, some in enumerate(gradients):
        addresses.copy_(torch.tensor([g.data_ptr() for g in some]))
        torch.cuda.synchronize()
        if number == 3:
            with torch.cuda.graph(graph):
                pack(some, addresses, weight, True)
            graph.replay()
        else:
            with torch.cuda.stream(side if number == 2 else torch.cuda.current_stream()):
                pack(some, addresses, weight, True)
        torch.cuda.synchronize()
        momentum.pack_torch(expected, others, some, [weight[0]] * 3, True)
        assert all(map(torch.equal, M, expected)) and all(map(torch.equal, U, others))
    started = [fixed for launch in pack.launches for fixed in launch.started.values()]
    assert len(started) == len(pack.launches) and all(started)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["polar_express", "turbo", "cubic"])
@pytest.mark.parametrize("shape", [(3, 200, 700), (2, 512, 512), (300, 1000), (5, 250, 130), (1, 65, 3000)])
def test_the_bits_are_those_of_the_first_call(part, optimizer, shape, name):
    """Other matrices come from other memory and go to other memory; tapes are really played."""
    module = part("kernels.launch.replay")
    Xs, expected = [torch.randn(shape, device="cuda") for _ in range(4)], []
    for X in Xs:
        module._recordings.clear()
        expected.append(optimizer.orthogonalize(X, name))
    recorded = len(module._recordings)
    for X, wanted in zip(Xs * 2, expected * 2):
        assert torch.equal(optimizer.orthogonalize(X, name), wanted)
    assert recorded == 1 and len(module._recordings) <= 2


@pytest.mark.gpu
def test_in_place_and_out_of_place_have_tapes_of_their_own(part):
    polar, X = part("newton_schulz.orthogonalize"), torch.randn(2, 300, 500, device="cuda")
    steps, results = polar.steps_of("polar_express", 5), []
    for _ in range(2):
        results.append(polar.orthogonalize(X))
        results.append(X.clone())
        polar.orthogonalize_(results[-1:], steps)
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.gpu
def test_tapes_inside_a_graph_of_the_user(optimizer):
    X = torch.randn(2, 300, 700, device="cuda")
    expected = optimizer.orthogonalize(X)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = optimizer.orthogonalize(X), optimizer.orthogonalize(X)
    graph.replay()
    assert torch.equal(first, expected) and torch.equal(second, expected)

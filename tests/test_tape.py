"""kernels/tape.py: the second call of a kind on the same memory calls launchers only, with the same bits."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests import paths

pytestmark = pytest.mark.skipif(bool(paths.why_no_triton()), reason=str(paths.why_no_triton()))


class Descriptor:
    """Stands for Triton's: the tape knows them by their boxes."""
    block_shape = (1, 8, 8)

    def __init__(self, base):
        self.base, self.shape, self.strides, self.padding = base, [2, 3], [3, 1], "zero"


class Kernel:
    """Stands for what Triton compiles: a C function, inside a Python function that encodes descriptors."""

    def __init__(self, calls, scratch=0):
        def launcher(*arguments):
            calls.append(arguments)

        def encoding(*arguments):
            return launcher(*arguments)

        self.run = SimpleNamespace(launch=encoding, global_scratch_size=scratch, profile_scratch_size=0,
                                   launch_cooperative_grid=False, launch_pdl=False)
        self.function, self.packed_metadata, self.metadata = 7, (4, 1), SimpleNamespace(tensordesc_meta=[None])


@pytest.fixture
def tape(part, monkeypatch):
    module = part("kernels.tape")
    monkeypatch.setattr(module, "_tapes", type(module._tapes)())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    return module


def test_what_was_recorded_is_played(tape):
    calls, done, memory, forever = [], [], torch.zeros(8), torch.ones(2)
    kernel = Kernel(calls)

    def work():
        done.append("work")
        tape.note(kernel, 3, (Descriptor(memory), memory[2:], forever, 0.5, None))
        return [1, 0]

    assert tape.play("key", memory, work) == [1, 0] and done == ["work"] and not calls
    assert tape.play("key", memory, work) == [1, 0] and done == ["work"]
    (call,), base = calls, memory.data_ptr()
    assert call[:5] == (3, 1, 1, 5, 7) and call[9:14] == ((4, 1), None, None, None, memory)  # decomposed: no TMA here
    assert call[-4:] == (base + 8, forever, 0.5, None)


def test_other_memory_or_another_key_is_recorded_anew(tape):
    done, memories = [], [torch.zeros(8), torch.zeros(8)]
    for memory in memories * 2:
        for key in "ab" * 2:
            tape.play(key, memory, lambda: done.append(0))
    assert len(done) == 4


def test_nothing_is_kept_alive_and_not_too_much_is_kept(tape):
    import weakref

    memory = torch.zeros(8)
    gone, start = weakref.ref(memory), memory.data_ptr()
    tape.play("key", memory, lambda: tape.note(Kernel([]), 1, (memory,)))
    del memory
    assert gone() is None and any(key[0] == start for key in tape._tapes)
    memory = torch.zeros(8)
    for key in range(2 * tape.TAPES):
        tape.play(key, memory, lambda: None)
    assert len(tape._tapes) == tape.TAPES


@pytest.mark.parametrize("kernel", [Kernel([], scratch=16), SimpleNamespace(), None])
def test_what_cannot_be_called_so_is_done_as_before(tape, kernel):
    """Kernels with scratch memory, another Triton, its interpreter."""
    done, memory = [], torch.zeros(8)

    def work():
        done.append("work")
        tape.note(kernel, 1, (memory,))

    for _ in range(3):
        tape.play("key", memory, work)
    assert len(done) == 3 and not tape._tapes


def test_an_error_ends_the_recording(tape):
    memory = torch.zeros(8)
    with pytest.raises(ZeroDivisionError):
        tape.play("key", memory, lambda: 1 / 0)
    tape.note(None, 1, ())
    assert tape._local.tape is None and not tape._tapes


def test_a_profiler_of_triton_hears_of_launches(tape):
    from triton import knobs

    done, memory = [], torch.zeros(8)
    tape.play("key", memory, lambda: done.append(1))
    knobs.runtime.launch_enter_hook.add(print)
    try:
        tape.play("key", memory, lambda: done.append(2))
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    assert done == [1, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 200, 700), (2, 512, 512), (300, 1000), (5, 250, 130), (1, 65, 3000)])
def test_the_bits_are_those_of_the_first_call(part, optimizer, shape):
    """Other matrices come on the same memory; the host waits for nothing, and a tape is really played."""
    module = part("kernels.tape")
    Xs = [torch.randn(shape, device="cuda") for _ in range(4)]
    module._tapes.clear()
    expected = []
    for X in Xs:
        expected.append(optimizer.orthogonalize(X))
        module._tapes.clear()
    played = []
    for X, wanted in zip(Xs * 2, expected * 2):
        before = dict(module._tapes)
        result = optimizer.orthogonalize(X)
        played.append(before == dict(module._tapes))
        assert torch.equal(result, wanted)
    assert len(module._tapes) > 0 and sum(played) >= 4


@pytest.mark.gpu
def test_tapes_inside_a_graph_of_the_user(optimizer):
    X = torch.randn(2, 300, 700, device="cuda")
    expected = optimizer.orthogonalize(X)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = optimizer.orthogonalize(X), optimizer.orthogonalize(X)
    graph.replay()
    assert torch.equal(first, expected) and torch.equal(second, expected)

"""Recording and replay of the launches of one call."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

# With which kernels ran on a GPU; others do without tapes and Gluon
TRITONS = ("3.6.", "3.7.", "3.8.", "3.9.")
MAX_RECORDINGS = 256  # kept, those that were played last

_recordings: OrderedDict = OrderedDict()  # key -> _Recording
_persistent: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # id -> tensor
_thread = threading.local()


class _Recording:
    """Launches, and what their launchers were given last."""

    def __init__(self, calls):
        self.calls, self.last = calls, (None, None, ())

    def given(self, stream, starts, tensors) -> list:
        """[(C function, its arguments)] for tensors that begin at `starts`."""
        last = self.last  # another thread may play it for others meanwhile
        if last[:2] != (stream, starts):
            calls = [(call[0], _filled(stream, tensors, *call[1:])) for call in self.calls]
            self.last = last = stream, starts, calls
        return last[2]


def replay_or_record(
    kind: Hashable,
    memory: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    work: Callable[[], None],
) -> bool:
    """Do `work()`, which `kind` describes whole, but for addresses. Return whether it was on a
    tape.

    All that it does on the device are launches by `jit.launch`, on `tensors` from their first
    element on, on views of `memory`, flat tensors that often lie where they lay, and on lasting
    tensors.
    """
    played = replay(kind, memory, tensors)
    if not played:
        starts = _starts(tensors)
        _record_launches(_key(kind, memory, tensors, starts), memory, starts, work)
    return played


def replay(kind: Hashable, memory: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    """Do the same, if it is on a tape; say whether it was."""
    starts = _starts(tensors)
    key = _key(kind, memory, tensors, starts)
    tape = _recordings.get(key)
    if tape is None or _hooked():
        return False
    try:  # contextlib.suppress takes longer
        _recordings.move_to_end(key)
    except KeyError:  # another thread has just dropped it
        pass
    for launcher, given in tape.given(_stream(key[1]), starts, tensors):
        launcher(*given)
    return True


def _starts(tensors) -> list:
    return [t.data_ptr() for t in tensors]


def _key(kind, memory, tensors, starts) -> tuple:
    """What decides about a tape; lists are made faster than generators."""
    device, room = (tensors or memory)[0].get_device(), tuple([m.data_ptr() for m in memory])
    return kind, device, room, tuple([*map(starts.index, starts)])


def _stream(device) -> int:
    """The address of the current one; torch's own object takes 3 us."""
    import triton  # found at once; `from triton.runtime import driver` looks again

    return triton.runtime.driver.active.get_current_stream(device)


def _filled(stream, tensors, programs, head, arguments, gaps, together) -> tuple:
    """All that a launcher is given, with what is made of `tensors` in the gaps."""
    arguments = list(arguments)
    for first, last, number, fill in gaps:
        arguments[first:last] = fill(tensors[number])
    return programs, 1, 1, stream, *head, *([tuple(arguments)] if together else arguments)


@functools.cache
def knows_triton() -> bool:
    """Say whether this Triton's insides, which a tape calls, and its experimental Gluon are those
    that are known.
    """
    import triton

    return triton.__version__.startswith(TRITONS)


def persistent_copy(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on `device` for launches to use, which never changes; a tape may keep it.

    Made in a thread of its own: what this one allocates may belong to a graph that is being made.
    """
    with ThreadPoolExecutor(1) as thread:
        tensor = thread.submit(values.to, device, copy=True).result()
    _persistent[id(tensor)] = tensor
    return tensor


def unit_scales(count: int, device: torch.device) -> torch.Tensor:
    """Return scales for so many matrices, or more, that have none."""
    return _unit_scales(1 << count.bit_length(), device)


@functools.cache
def _unit_scales(count, device):
    return persistent_copy(torch.ones(count, dtype=torch.float32, device="cpu"), device)


def record(compiled, programs: int, arguments) -> None:
    """A kernel was launched: put it on the tape, if one is recorded in this thread."""
    tape = getattr(_thread, "recording", None)
    if tape is not None:
        tape.append(_call(compiled, programs, arguments, *_thread.memory))


def _record_launches(key, memory, starts, work):
    _thread.recording = []
    _thread.memory = [range(m.data_ptr(), m.data_ptr() + m.nbytes) for m in memory], starts
    try:
        work()
        if _thread.recording and None not in _thread.recording:
            _recordings[key] = _Recording(_thread.recording)
    finally:
        _thread.recording = None
    if len(_recordings) > MAX_RECORDINGS:
        _recordings.popitem(last=False)


def _call(compiled, programs, arguments, memory, starts):
    """(C function, programs, what stands between stream and arguments, arguments, gaps in them:
    from, to, number of the tensor, what makes arguments of it; whether it takes the arguments
    together). None if this cannot be said.
    """
    try:
        called = _function(compiled)
        if called is None:
            return None
        function, head, together = called
        flat, gaps, forms = [], [], iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        for argument in arguments:
            fill, tensor = _address, argument
            if hasattr(argument, "block_shape"):
                fill, tensor = _Encode(argument, next(forms)), argument.base
            if not isinstance(tensor, torch.Tensor) or _persistent.get(id(tensor)) is tensor:
                flat.append(argument)
                continue
            first = len(flat)
            flat += fill(tensor)
            if tensor.data_ptr() in starts:
                gaps.append((first, len(flat), starts.index(tensor.data_ptr()), fill))
            elif not any(tensor.data_ptr() in addresses for addresses in memory):
                return None
        return function, programs, head, tuple(flat), gaps, together
    except (ImportError, AttributeError, KeyError, StopIteration, TypeError):
        return None


def _function(compiled):
    """(C function, what stands between stream and arguments, whether it takes the arguments
    together). None if this Triton is none of those whose insides are known.

    A launcher of Triton's for NVIDIA has a C function `launch`, inside a Python function where
    there are descriptors, which that encodes at every call. Here they are encoded once; addresses
    are kept in place of tensors, which may go. From 3.7 on the function is the same for all
    kernels, and is told what their arguments are.
    """
    launcher, function = compiled.run, compiled.run.launch
    scratch = launcher.global_scratch_size or launcher.profile_scratch_size
    if scratch or getattr(launcher, "gsan_enabled", False) or not knows_triton():
        return None
    if hasattr(function, "__closure__"):
        function = dict(zip(function.__code__.co_freevars, function.__closure__))[
            "launcher"
        ].cell_contents
    start, about = (
        (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl),
        compiled.packed_metadata,
    )
    if hasattr(launcher, "kernel_signature"):
        return (
            function,
            (*start, about, *[None] * 5, launcher.arg_annotations, launcher.kernel_signature),
            True,
        )
    return function, (*start, None, None, about, None, None, None), False


def _address(tensor):
    return [tensor.data_ptr()]


class _Encode:
    """Makes of a tensor what a launcher takes for a descriptor of it."""

    def __init__(self, descriptor, form):
        from triton.backends.nvidia.driver import make_tensordesc_arg

        self.kind, self.fields = type(descriptor), vars(descriptor) | {"base": None}
        self.encode, others = make_tensordesc_arg, make_tensordesc_arg.__code__.co_argcount - 2
        self.form = (form, *[None] * others)  # from 3.8 on, also what AMD's wants to know

    def __call__(self, tensor):
        descriptor = object.__new__(self.kind)
        vars(descriptor).update(self.fields, base=tensor)
        return self.encode(descriptor, *self.form)


def _hooked() -> bool:
    """Whether somebody (a profiler of Triton's) wants to hear of launches."""
    import triton

    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

"""Launches repeated from a tape: for work of a known kind on known memory, only Triton's launchers are called.

Decides: when launches are recorded and played, and how Triton is called without its Python. Must not know: what is
launched. Python takes 30 to 40 us for a launch with descriptors, longer than a small kernel runs.
"""
from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

TAPES = 256  # kept, those that were played last

_tapes: OrderedDict = OrderedDict()  # key -> calls
_lasting: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # id -> tensor
_local = threading.local()


def play(kind: Hashable, memory: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor],
         work: Callable[[], None]) -> None:
    """Do `work()`, which `kind` describes whole, but for addresses.

    All that it does on the device are launches by `jit.launch`, on `tensors` from their first element on, on views of
    `memory`, flat tensors that often lie where they lay, and on lasting tensors.
    """
    starts, device = [t.data_ptr() for t in tensors], (*memory, *tensors)[0].device
    key = tuple(m.data_ptr() for m in memory), device.index, tuple(map(starts.index, starts)), kind
    calls = _tapes.get(key)
    if calls is None or _hooked():
        return _record(key, memory, starts, work)
    with contextlib.suppress(KeyError):  # another thread has just dropped it
        _tapes.move_to_end(key)
    stream = torch.cuda.current_stream(device).cuda_stream
    for launcher, programs, head, arguments, gaps in calls:
        if gaps:
            arguments = list(arguments)
            for first, last, number, fill in gaps:
                arguments[first:last] = fill(tensors[number])
        launcher(programs, 1, 1, stream, *head, *arguments)


def lasting(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on `device` for launches to use, which never changes; a tape may keep it.

    Made in a thread of its own: what this one allocates may belong to a graph that is being made.
    """
    with ThreadPoolExecutor(1) as thread:
        tensor = thread.submit(values.to, device, copy=True).result()
    _lasting[id(tensor)] = tensor
    return tensor


def note(compiled, programs: int, arguments) -> None:
    """A kernel was launched: put it on the tape, if one is recorded in this thread."""
    tape = getattr(_local, "tape", None)
    if tape is not None:
        tape.append(_call(compiled, programs, arguments, *_local.memory))


def _record(key, memory, starts, work):
    _local.tape = []
    _local.memory = [range(m.data_ptr(), m.data_ptr() + m.nbytes) for m in memory], starts
    try:
        work()
        if _local.tape and None not in _local.tape:
            _tapes[key] = tuple(_local.tape)
    finally:
        _local.tape = None
    if len(_tapes) > TAPES:
        _tapes.popitem(last=False)


def _call(compiled, programs, arguments, memory, starts):
    """(C function, programs, what stands between stream and arguments, arguments, gaps in them: from, to, number of the
    tensor, what makes arguments of it). None if this cannot be said, or if Triton is another one.

    Triton 3.6: a launcher has a C function `launch`, inside a Python function where there are descriptors, which that
    encodes at every call. Here they are encoded once; addresses are kept in place of tensors, which may go.
    """
    try:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        launcher, function = compiled.run, compiled.run.launch
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        if hasattr(function, "__closure__"):
            function = dict(zip(function.__code__.co_freevars, function.__closure__))["launcher"].cell_contents
        head = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None,
                compiled.packed_metadata, None, None, None)
        flat, gaps, forms = [], [], iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        for argument in arguments:
            fill, tensor = _address, argument
            if hasattr(argument, "block_shape"):
                fill, tensor = _Encode(argument, make_tensordesc_arg, next(forms)), argument.base
            if not isinstance(tensor, torch.Tensor) or _lasting.get(id(tensor)) is tensor:
                flat.append(argument)
                continue
            first = len(flat)
            flat += fill(tensor)
            if tensor.data_ptr() in starts:
                gaps.append((first, len(flat), starts.index(tensor.data_ptr()), fill))
            elif not any(tensor.data_ptr() in addresses for addresses in memory):
                return None
        return function, programs, head, tuple(flat), gaps
    except (ImportError, AttributeError, KeyError, StopIteration, TypeError):
        return None


def _address(tensor):
    return [tensor.data_ptr()]


class _Encode:
    """Makes of a tensor what a launcher takes for a descriptor of it."""

    def __init__(self, descriptor, encode, form):
        self.kind, self.fields = type(descriptor), vars(descriptor) | {"base": None}
        self.encode, self.form = encode, form

    def __call__(self, tensor):
        descriptor = object.__new__(self.kind)
        vars(descriptor).update(self.fields, base=tensor)
        return self.encode(descriptor, self.form)


def _hooked() -> bool:
    """Whether somebody (a profiler of Triton's) wants to hear of launches."""
    from triton import knobs

    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)

"""Recording and replay of the kernel launches of one call.

The first call of a kind is recorded by `replay_or_record`: for each launch the C function of
Triton's launcher with its arguments. Later calls on scratch memory at the recorded addresses call
the C functions only, with new addresses of the caller's tensors filled in. Anything that a
recording cannot hold is launched as usual. `FixedLaunch` is a single launch whose arguments never
change. Known Triton versions only, see `knows_triton`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

# Versions of Triton whose launchers are known and whose Gluon kernels ran on a GPU. With a further
# version nothing is recorded and no Gluon kernel is used.
TRITONS = ("3.6.", "3.7.", "3.8.", "3.9.")
MAX_RECORDINGS = 256  # the least recently replayed recording is dropped first

_recordings: OrderedDict = OrderedDict()  # key (`_key`) -> _Recording
# Tensors of `persistent_copy`: id -> tensor
_persistent: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
# `recording`: launches recorded in this thread, None if none are being recorded.
# `memory`: (address ranges of the scratch memory, addresses of the caller's tensors)
_thread = threading.local()


class _Launch(NamedTuple):
    """One recorded launch."""

    function: Callable  # C function of Triton's launcher
    programs: int
    head: tuple  # arguments of the C function between the stream and the kernel's arguments
    # The kernel's arguments, tensors as addresses and descriptors encoded
    arguments: tuple
    # (first, last, number of the caller's tensor, function of the tensor): arguments[first:last] is
    # what the function returns for the tensor
    gaps: list
    together: bool  # the C function takes the kernel's arguments as one tuple (Triton 3.7 on)


class _Recording:
    """The launches of one kind of call, and the arguments of their last replay."""

    def __init__(self, calls: list[_Launch]):
        self.calls = calls
        # (stream, addresses of the caller's tensors, [(C function, arguments)])
        self.last = (None, None, ())

    def given(
        self, stream: int, starts: list[int], tensors: Sequence[torch.Tensor]
    ) -> list[tuple[Callable, tuple]]:
        """Return (C function, arguments) of each launch for `tensors`, with addresses `starts`.

        Arguments of the last replay are returned again if stream and addresses are unchanged.
        """
        # Read once: another thread may replay the recording meanwhile, for tensors of its own
        last = self.last
        if last[:2] != (stream, starts):
            calls = [(call[0], _filled(stream, tensors, *call[1:])) for call in self.calls]
            self.last = last = stream, starts, calls
        return last[2]


class FixedLaunch:
    """A launch whose arguments are fixed: later starts call the C function of Triton's launcher."""

    def __init__(self, device: int, launch: _Launch):
        """`device`: index of the device of the tensors, the current device at every start."""
        self.device = device
        self.launch = launch
        self.last: tuple = (None, ())  # (stream, arguments of the C function)

    @classmethod
    def of(
        cls, device: int, compiled: Any, programs: int, arguments: Sequence
    ) -> FixedLaunch | None:
        """Return the `FixedLaunch` of a launch that Triton has just made; None if only Triton can
        repeat the launch. `compiled`: Triton's compiled kernel, None in the interpreter.
        `arguments`: the kernel's by position, tensors and constants, no descriptors. Holds
        addresses only: the caller keeps the tensors alive at these addresses.
        """
        try:
            called = _launcher_of(compiled)
        except (ImportError, AttributeError, KeyError, TypeError):
            # Triton's internals differ from the known ones
            return None
        if called is None:
            return None
        function, head, together = called
        flat = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
        return cls(device, _Launch(function, programs, head, flat, [], together))

    def start(self) -> bool:
        """Launch on the current stream; return False, without a launch, while a profiler listens to
        launches.
        """
        if _has_launch_hooks():
            return False
        stream = _stream(self.device)
        last = self.last  # read once, as in `_Recording.given`
        if last[0] != stream:
            self.last = last = stream, _filled(stream, (), *self.launch[1:])
        self.launch.function(*last[1])
        return True


def replay_or_record(
    kind: Hashable,
    memory: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    work: Callable[[], None],
) -> bool:
    """Replay the launches of `work()`, or call and record `work()`. Return whether replayed.

    `kind`: all properties of the call that determine `work`, apart from addresses. `memory`: flat
    scratch tensors; a recording is valid for their addresses only (torch's caching allocator tends
    to return equal addresses). `tensors`: the caller's tensors, at any address; two tensors have
    equal addresses in a replay if and only if they had in the recording.

    `work` must act on the device by `jit.launch` alone. Tensor arguments of the launches may be
    `tensors` from their first element on, views of `memory`, and results of `persistent_copy`. With
    any further tensor, the whole call is not recorded.
    """
    played = replay(kind, memory, tensors)
    if not played:
        starts = _starts(tensors)
        _record_launches(_key(kind, memory, tensors, starts), memory, starts, work)
    return played


def replay(kind: Hashable, memory: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    """Replay the recorded launches of a call; return whether a recording existed.

    Arguments as in `replay_or_record`. Nothing is replayed while a profiler listens to launches.
    """
    starts = _starts(tensors)
    key = _key(kind, memory, tensors, starts)
    recording = _recordings.get(key)
    if recording is None or _has_launch_hooks():
        return False
    try:  # contextlib.suppress takes longer
        _recordings.move_to_end(key)
    except KeyError:  # another thread has just dropped the recording
        pass
    for launcher, given in recording.given(_stream(key[1]), starts, tensors):
        launcher(*given)
    return True


def _starts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the addresses of tensors."""
    return [t.data_ptr() for t in tensors]


def _key(
    kind: Hashable,
    memory: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    starts: list[int],
) -> tuple:
    """Return the key of a recording: (kind, device index, addresses of `memory`, aliasing).

    Aliasing: per tensor the number of the first tensor with an equal address.
    """
    # Lists are made faster than generators
    device, memory_addresses = (
        (tensors or memory)[0].get_device(),
        tuple([m.data_ptr() for m in memory]),
    )
    return kind, device, memory_addresses, tuple([*map(starts.index, starts)])


def _stream(device: int) -> int:
    """Return the address of the device's current stream. torch's own object takes 3 us."""
    import triton  # found at once; `from triton.runtime import driver` looks again

    return triton.runtime.driver.active.get_current_stream(device)


def _filled(
    stream: int,
    tensors: Sequence[torch.Tensor],
    programs: int,
    head: tuple,
    arguments: tuple,
    gaps: list,
    together: bool,
) -> tuple:
    """Return all arguments of a C function, gaps filled from `tensors`; fields as in `_Launch`."""
    arguments = list(arguments)
    for first, last, number, fill in gaps:
        arguments[first:last] = fill(tensors[number])
    return programs, 1, 1, stream, *head, *([tuple(arguments)] if together else arguments)


@functools.cache
def knows_triton() -> bool:
    """Say whether the installed Triton is one of TRITONS.

    Recordings call functions inside Triton, and Gluon is experimental: both may change.
    """
    import triton

    return triton.__version__.startswith(TRITONS)


def persistent_copy(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an immutable copy of `values` on `device`, for arguments of launches.

    A recording keeps the copy itself, not its address: recorded launches keep the copy alive.
    """
    # In a thread of its own: while a CUDA graph is captured, memory that the capturing thread
    # allocates belongs to the graph
    with ThreadPoolExecutor(1) as thread:
        tensor = thread.submit(values.to, device, copy=True).result()
    _persistent[id(tensor)] = tensor
    return tensor


def unit_scales(count: int, device: torch.device) -> torch.Tensor:
    """Return more than `count` ones, fp32: scales of matrices without scales of their own."""
    # Powers of two: few tensors serve all counts
    return _unit_scales(1 << count.bit_length(), device)


@functools.cache
def _unit_scales(count: int, device: torch.device) -> torch.Tensor:
    """Return `count` ones, fp32."""
    return persistent_copy(torch.ones(count, dtype=torch.float32, device="cpu"), device)


def record(compiled: Any, programs: int, arguments: Sequence) -> None:
    """Add a launch to the current thread's recording, if any. Called by `jit.launch`.

    `compiled`: Triton's compiled kernel, None in the interpreter. `arguments`: the kernel's.
    """
    recording = getattr(_thread, "recording", None)
    if recording is not None:
        recording.append(_recorded_launch(compiled, programs, arguments, *_thread.memory))


def _record_launches(
    key: tuple, memory: Sequence[torch.Tensor], starts: list[int], work: Callable[[], None]
) -> None:
    """Call `work` and keep the launches under `key`, if all of them can be recorded.

    A call without launches is not kept: a dry run launches nothing, and would be replayed as
    nothing. An error of `work` ends the recording.
    """
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


def _recorded_launch(
    compiled: Any, programs: int, arguments: Sequence, memory: list[range], starts: list[int]
) -> _Launch | None:
    """Return a launch as `_Launch`, None if the launch cannot be recorded.

    `memory`: address ranges of the scratch memory. `starts`: addresses of the caller's tensors. A
    launch cannot be recorded if Triton's launcher is unknown, or if a tensor argument is neither
    persistent, nor in `memory`, nor the caller's.
    """
    try:
        called = _launcher_of(compiled)
        if called is None:
            return None
        function, head, together = called
        flat = []
        gaps = []
        forms = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        for argument in arguments:
            fill, tensor = _address, argument
            if hasattr(argument, "block_shape"):  # a TMA descriptor
                fill, tensor = _DescriptorEncoder(argument, next(forms)), argument.base
            if not isinstance(tensor, torch.Tensor) or _persistent.get(id(tensor)) is tensor:
                flat.append(argument)
                continue
            first = len(flat)
            flat += fill(tensor)
            if tensor.data_ptr() in starts:
                gaps.append((first, len(flat), starts.index(tensor.data_ptr()), fill))
            elif not any(tensor.data_ptr() in addresses for addresses in memory):
                return None
        return _Launch(function, programs, head, tuple(flat), gaps, together)
    except (ImportError, AttributeError, KeyError, StopIteration, TypeError):
        # Triton's internals differ from the known ones
        return None


def _launcher_of(compiled: Any) -> tuple[Callable, tuple, bool] | None:
    """Return (function, head, together) of a compiled kernel, as in `_Launch`.

    None if the kernel needs scratch memory of Triton's, or Triton's version is unknown. Raises
    AttributeError or KeyError if launchers are not as expected.

    Triton's launcher for NVIDIA has a C function `launch`. For kernels with descriptors a Python
    function around the C function encodes all descriptors at every call. A recording calls the C
    function with descriptors encoded once. Addresses take the place of tensors: a recording keeps
    no memory alive. From Triton 3.7 on all kernels share a single C function, and pass the types of
    the kernel's arguments.
    """
    launcher, function = compiled.run, compiled.run.launch
    scratch = launcher.global_scratch_size or launcher.profile_scratch_size
    if scratch or getattr(launcher, "gsan_enabled", False) or not knows_triton():
        return None
    if hasattr(function, "__closure__"):  # the Python function around the C function
        function = dict(zip(function.__code__.co_freevars, function.__closure__))[
            "launcher"
        ].cell_contents
    start = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
    metadata = compiled.packed_metadata
    # None: scratch memory of the kernel and of a profiler, launch hooks and their metadata
    if hasattr(launcher, "kernel_signature"):
        return (
            function,
            (*start, metadata, *[None] * 5, launcher.arg_annotations, launcher.kernel_signature),
            True,
        )
    return function, (*start, None, None, metadata, None, None, None), False


def _address(tensor: torch.Tensor) -> list[int]:
    """Return the arguments of a C function for a tensor: a list with the address."""
    return [tensor.data_ptr()]


class _DescriptorEncoder:
    """Encoder of TMA descriptors for tensors with the recorded shape and strides.

    Holds the recorded descriptor's fields without the tensor.
    """

    def __init__(self, descriptor: Any, form: Any):
        """`form`: entry of the descriptor in the compiled kernel's metadata (swizzle, box)."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        self.kind = type(descriptor)
        self.fields = vars(descriptor) | {"base": None}
        self.encode = make_tensordesc_arg
        # From Triton 3.8 on the function has further parameters, for AMD only
        others = make_tensordesc_arg.__code__.co_argcount - 2
        self.form = (form, *[None] * others)

    def __call__(self, tensor: torch.Tensor) -> list:
        """Return the arguments of a C function for a descriptor of `tensor`."""
        descriptor = object.__new__(self.kind)
        vars(descriptor).update(self.fields, base=tensor)
        return self.encode(descriptor, *self.form)


def _has_launch_hooks() -> bool:
    """Say whether launch hooks are installed, as Triton's profilers do."""
    import triton

    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

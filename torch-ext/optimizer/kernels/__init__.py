"""What the device does: every operation has a torch reference, a Triton kernel and a launcher; products also a
launch choice (tiles.py).

Decides: whether Triton is used on a device and kernels may overlap there, when Triton is imported (by the first launch,
never by loading the package), and how many matrices a CPU takes at once. Must not know: what the operations are for.
"""
from __future__ import annotations

import functools
import importlib
import importlib.util
import threading

import torch

from .. import debug
from . import loading, tape

CPU_ELEMENTS = 1 << 10  # elements that a CPU takes in one thread; what they take is no workspace


def use_triton(device: torch.device) -> bool:
    """Say whether operations on `device` run in Triton: NVIDIA from sm80, ROCm, XPU, where Triton is installed."""
    choice = debug.kernels()
    if choice == "auto":
        return _triton_runs_on(device.type, device.index)
    return choice == "triton"


def check_choice(device: torch.device) -> None:
    """Raise ValueError where OPTIMIZER_KERNELS asks for Triton and it cannot run on `device`: it is not installed, or
    the device is a CPU and Triton's interpreter is off.
    """
    if debug.kernels() != "triton":
        return
    if importlib.util.find_spec("triton") is None:
        raise ValueError("OPTIMIZER_KERNELS is 'triton', but Triton is not installed: install it, or unset the "
                         "variable")
    if device.type == "cpu" and not _is_interpreted():
        raise ValueError("OPTIMIZER_KERNELS is 'triton', but the parameters are on a CPU, where Triton's kernels run "
                         "in its interpreter only: set TRITON_INTERPRET=1 before triton is imported, or unset "
                         "OPTIMIZER_KERNELS")


def _is_interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


@functools.cache
def _triton_runs_on(kind: str, index: int | None) -> bool:
    if kind not in ("cuda", "xpu") or importlib.util.find_spec("triton") is None:
        return False
    return kind == "xpu" or torch.version.hip is not None or torch.cuda.get_device_capability(index) >= (8, 0)


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Say whether a kernel on `device` may begin before those launched earlier are done, and wait for them itself
    (programmatic dependent launch): on NVIDIA GPUs from sm90 on.
    """
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def processors_of(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def capturing(device: torch.device) -> bool:
    """Say whether what is launched now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def triton_version(device: torch.device) -> str | None:
    """Return the version of the Triton that operations on `device` run in; None where they run in torch."""
    return importlib.import_module("triton").__version__ if use_triton(device) else None


class _Here(threading.local):
    """What is so in this thread; `rehearsing`: kernels are not launched, but compiled (ahead.py); `slow`: this one
    takes long.
    """

    rehearsing = slow = False


here = _Here()
_compiling = threading.Lock()  # held while a thread makes a kernel ready for its first launch, not while it launches


class jit:
    """Decorator: a Triton kernel that is made by its first launch, so that loading the package imports no Triton.

    The kernel is written as plain Python at module level; its annotations stay strings, and the name `tl` is put into
    its module here. Functions that it calls are decorated alike.
    """

    slow = False  # to compile

    def __init__(self, function, numbers=()):
        functools.update_wrapper(self, function)
        self.function, self.numbers, self.made, self.compiled = function, numbers, None, {}

    @classmethod
    def alike(cls, *numbers: str):
        """Decorate a kernel whose binary is the same for all values of these integers, also 1 and multiples of 16."""
        return functools.partial(cls, numbers=numbers)

    def __getitem__(self, grid):
        """With fused multiply-adds where nothing else is said: what Triton does without a word depends on version and
        environment.
        """
        made, here.slow = self.make(), self.slow
        run = functools.partial(made.run, grid=grid, warmup=True) if here.rehearsing else made[grid]
        return functools.partial(run, enable_fp_fusion=True)

    def launch(self, programs: int, key, *arguments, **options) -> None:
        """Launch so many programs; `arguments` are all of the kernel's, constants too, in its order.

        `key` stands for what decides about the binary: the device, types, alignments, constants, and numbers that are 1
        or multiples of 16. From the second launch with it on, Triton does not look at that again, which would take
        longer than a small kernel.
        """
        compiled = self.compiled.get(key)
        if here.rehearsing:
            if compiled is None:
                self[programs, 1, 1](*arguments, **options)
            return
        if compiled is None:
            with _compiling:
                compiled = self.compiled[key] = self._ready(*arguments, **options)
        if compiled is None:  # the interpreter compiles nothing
            self[programs, 1, 1](*arguments, **options)
        else:
            compiled[programs, 1, 1](*arguments)
        tape.note(compiled, programs, arguments)

    def _ready(self, *arguments, **options):
        """Return the compiled kernel with its launcher and its binary loaded; None in the interpreter.

        Triton's own first launch sets the launcher first: another thread that launches the kernel before its binary is
        loaded would find the launcher and launch nothing.
        """
        options = {"enable_fp_fusion": True, **options}
        compiled = self.make().run(*arguments, grid=(1, 1, 1), warmup=True, **options)
        if compiled is not None:
            compiled._init_handles()
        return compiled

    def make(self):
        """Return Triton's own function object; the same one at every call."""
        if self.made is None:
            decorator, scope = self.decorate(self.function.__globals__), self.function.__globals__
            loading.name_launchers_apart()
            for name in self.function.__code__.co_names:
                if isinstance(scope.get(name), jit):
                    scope[name] = scope[name].make()
            self.made = decorator(self.function, do_not_specialize=self.numbers)
        return self.made

    def decorate(self, scope: dict):
        """Put the names of the language into the kernel's module, and return Triton's decorator."""
        import triton

        scope["tl"] = triton.language
        return triton.jit


def typed(dtype: torch.dtype):
    """Return Triton's name of a dtype."""
    import triton.language

    return getattr(triton.language, str(dtype).rpartition(".")[2])


def look(*tensors: torch.Tensor) -> tuple:
    """Return what a kernel's binary knows of tensors, and more: a part of a key for `jit.launch`."""
    return tuple((t.dtype, t.device.index, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors)


def cpu_slices(stack) -> list[slice]:
    """Return slices of as many matrices of a tensor or Split as one thread of a CPU takes at once: of one, where they
    lie in each other, or in pieces.
    """
    N, R, C = stack.shape
    apart = max(1, R * C + -(R * C) % 16)  # where each begins as new memory does
    count = max(1, CPU_ELEMENTS // apart) if stack.stride(0) >= R * C else 1
    return [slice(start, start + count) for start in range(0, N, count)]

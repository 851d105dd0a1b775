"""`jit` and `gluon_jit`: decorators of Triton and Gluon kernels, compiled by their first launch.

Loading the package imports no Triton. `jit.launch` starts a kernel with little host time: a key
names everything the binary depends on, and a known key skips Triton's own look at the arguments.
Also TMA descriptors for Gluon kernels, and the state of the current thread (dry run or not).
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch

from .. import backend
from . import replay, triton_launchers


def check_choice(device: torch.device) -> None:
    """Raise ValueError if OPTIMIZER_KERNELS is "triton" and Triton cannot run on `device`.

    Either Triton is not installed, or the device is a CPU and Triton's interpreter is off.
    """
    if backend.requested_backend() != "triton":
        return
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            "OPTIMIZER_KERNELS is 'triton', but Triton is not installed: install it, or unset the "
            "variable"
        )
    if device.type == "cpu" and not _is_interpreted():
        raise ValueError(
            "OPTIMIZER_KERNELS is 'triton', but the parameters are on a CPU, where Triton's "
            "kernels run in its interpreter only: set TRITON_INTERPRET=1 before triton is "
            "imported, or unset OPTIMIZER_KERNELS"
        )


def _is_interpreted() -> bool:
    """Say whether Triton runs kernels in its interpreter (TRITON_INTERPRET=1)."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


class _ThreadState(threading.local):
    """State of the current thread.

    `dry_run`: kernels are compiled, not launched (precompile.py). `slow`: the kernel at hand takes
    long to compile; read by the thread pool of precompile.py.
    """

    dry_run = False
    slow = False


thread_state = _ThreadState()

# Held while a thread compiles and loads a kernel for its first launch, not during the launch
_compiling = threading.Lock()


class jit:
    """Decorator of a Triton kernel: Triton's function object is made by the first launch.

    The kernel is plain Python at module level. The name `tl` is put into the kernel's module by
    `decorate`; the module declares `tl = None`, and annotations stay strings until then. Functions
    called by the kernel are decorated likewise.
    """

    # Whether kernels take long to compile (Gluon)
    slow = False

    def __init__(self, function: Callable, numbers: tuple[str, ...] = ()):
        functools.update_wrapper(self, function)
        self.function = function
        self.numbers = numbers  # names of integer arguments that Triton must not specialize on
        self.made = None  # Triton's function object
        self.compiled: dict[Hashable, Any] = {}  # key of `launch` -> compiled kernel, or None

    @classmethod
    def unspecialized(cls, *numbers: str) -> Callable[[Callable], jit]:
        """Return a decorator of a kernel with integer arguments `numbers` left unspecialized.

        Triton otherwise compiles a further binary for the value 1 and for multiples of 16.
        """
        return functools.partial(cls, numbers=numbers)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        """Return the launcher for `grid`, as Triton's `kernel[grid]`.

        A dry run compiles without a launch. Fused multiply-adds are on unless the caller passes
        `enable_fp_fusion`: Triton's default depends on version and environment.
        """
        made = self.make()
        thread_state.slow = self.slow
        run = (
            functools.partial(made.run, grid=grid, warmup=True)
            if thread_state.dry_run
            else made[grid]
        )
        return functools.partial(run, enable_fp_fusion=True)

    def launch(self, programs: int, key: Hashable, *arguments: Any, **options: Any) -> None:
        """Launch a one-dimensional grid of `programs` programs.

        `arguments`: all arguments of the kernel by position, constants included. `options`:
        Triton's compilation options (num_warps, launch_pdl, ...). `key` determines the binary:
        device, dtypes, alignments, constants, options, and integers that are 1 or a multiple of 16.

        From the second launch with a key on, the compiled kernel is called directly. Triton would
        examine every argument again, for longer than a small kernel runs. A recording of the
        current thread notes the launch (replay.py).
        """
        compiled = self.compiled.get(key)
        if thread_state.dry_run:
            if compiled is None:
                self[programs, 1, 1](*arguments, **options)
            return
        if compiled is None:
            compiled = self._prepared(key, *arguments, **options)
        if compiled is None:  # the interpreter compiles nothing
            self[programs, 1, 1](*arguments, **options)
        else:
            compiled[programs, 1, 1](*arguments)
        replay.record(compiled, programs, arguments)

    def prepare(self, key: Hashable, *arguments: Any, **options: Any) -> None:
        """Make the kernel ready for its first launch by `jit[grid]`, once for each `key` (as in
        `launch`). Does nothing in a dry run.
        """
        if key not in self.compiled and not thread_state.dry_run:
            self._prepared(key, *arguments, **options)

    def _prepared(self, key: Hashable, *arguments: Any, **options: Any) -> Any:
        with _compiling:
            compiled = self.compiled[key] = self._ready(*arguments, **options)
        return compiled

    def _ready(self, *arguments: Any, **options: Any) -> Any:
        """Return the compiled kernel, launcher and binary loaded; None in the interpreter.

        Triton's own first launch sets the launcher before the binary is loaded. A second thread
        would find the launcher in between, and launch nothing: so both are loaded under a lock.
        """
        options = {"enable_fp_fusion": True, **options}
        compiled = self.make().run(*arguments, grid=(1, 1, 1), warmup=True, **options)
        if compiled is not None:
            compiled._init_handles()
        return compiled

    def make(self) -> Any:
        """Return Triton's function object, made on the first call.

        Replaces all `jit` objects that the kernel calls, in the kernel's module, by Triton's
        function objects.
        """
        if self.made is None:
            scope = self.function.__globals__
            decorator = self.decorate(scope)
            triton_launchers.name_launchers_apart()
            for name in self.function.__code__.co_names:
                if isinstance(scope.get(name), jit):
                    scope[name] = scope[name].make()
            self.made = decorator(self.function, do_not_specialize=self.numbers)
        return self.made

    def decorate(self, scope: dict[str, Any]) -> Callable:
        """Put the language's names into `scope`, the kernel's module; return Triton's decorator."""
        import triton

        scope["tl"] = triton.language
        return triton.jit


def triton_dtype(dtype: torch.dtype) -> Any:
    """Return Triton's counterpart of a torch dtype."""
    import triton.language

    return getattr(triton.language, str(dtype).rpartition(".")[2])


def launch_key(*tensors: torch.Tensor) -> tuple:
    """Return the part of a key for `jit.launch` that stands for tensors.

    Per tensor: dtype, device index, shape, strides, and the address modulo 16 bytes.
    """
    return tuple((t.dtype, t.device.index, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors)


def make_descriptor(tensor: torch.Tensor, rows: int, columns: int) -> Any:
    """Return a Gluon TMA descriptor of a 16-bit tensor (N, R, C) for boxes (1, rows, columns).

    Shared memory is swizzled by 128 bytes. Triton checks address and strides.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), [1, rows, columns], layout
    )


def descriptor_template(descriptor: Any) -> Any:
    """Remove the tensor from a descriptor, in place, and return the descriptor.

    A bound launch keeps templates, hence no memory of the caller's alive.
    """
    descriptor.base = None
    return descriptor


def with_tensor(template: Any, tensor: torch.Tensor) -> Any:
    """Return a copy of a descriptor template for `tensor`, without Triton's checks.

    Shape, strides and dtype must be those of the tensor the template was made from.
    """
    descriptor = object.__new__(type(template))
    vars(descriptor).update(vars(template), base=tensor)
    return descriptor


class gluon_jit(jit):
    """Decorator of a Gluon kernel, see `jit`. Puts Gluon's names into the kernel's module."""

    slow = True

    def decorate(self, scope: dict[str, Any]) -> Callable:
        """Put Gluon's names into `scope`, the kernel's module; return Gluon's decorator."""
        from triton.experimental import gluon
        from triton.experimental.gluon import language
        from triton.experimental.gluon.language.nvidia import hopper
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

        def either(owner: Any, name: str, alternative: str) -> Any:
            """Return an attribute of `owner` that Triton's versions call by two names."""
            return getattr(owner, name, None) or getattr(owner, alternative)

        scope.update(
            gl=language,
            mbarrier=hopper.mbarrier,
            tma=hopper.tma,
            fence=hopper.fence_async_shared,
            gdc_wait=gdc_wait,
            gdc_launch_dependents=gdc_launch_dependents,
            multiply=hopper.warpgroup_mma,
            multiplied=hopper.warpgroup_mma_wait,
            barrier=either(language, "thread_barrier", "barrier"),
            load_box=either(hopper.tma, "async_load", "async_copy_global_to_shared"),
            store_box=either(hopper.tma, "async_store", "async_copy_shared_to_global"),
            view=either(language.shared_memory_descriptor, "reinterpret", "_reinterpret"),
        )
        return gluon.jit

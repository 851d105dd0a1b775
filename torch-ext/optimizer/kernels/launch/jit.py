"""`jit` and `gluon_jit`: Triton kernels that are made by their first launch, so that loading
imports no Triton.
"""

from __future__ import annotations

import functools
import importlib.util
import threading

import torch

from .. import backend
from . import replay, triton_launchers


def check_choice(device: torch.device) -> None:
    """Raise ValueError where OPTIMIZER_KERNELS asks for Triton and it cannot run on `device`: it is
    not installed, or the device is a CPU and Triton's interpreter is off.
    """
    if backend.kernels() != "triton":
        return
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            "OPTIMIZER_KERNELS is 'triton', but Triton is not installed: install it, or unset the "
            "variable"
        )
    if device.type == "cpu" and not _is_interpreted():
        raise ValueError(
            "OPTIMIZER_KERNELS is 'triton', but the parameters are on a CPU, where Triton's "
            "kernels run "
            "in its interpreter only: set TRITON_INTERPRET=1 before triton is imported, or unset "
            "OPTIMIZER_KERNELS"
        )


def _is_interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


class _Here(threading.local):
    """What is so in this thread; `dry_run`: kernels are not launched, but compiled (precompile.py);
    `slow`: this one takes long.
    """

    dry_run = slow = False


here = _Here()
# Held while a thread makes a kernel ready for its first launch, not while it launches
_compiling = threading.Lock()


class jit:
    """Decorator: a Triton kernel that is made by its first launch, so that loading the package
    imports no Triton.

    The kernel is written as plain Python at module level; its annotations stay strings, and the
    name `tl` is put into its module here. Functions that it calls are decorated alike.
    """

    slow = False  # to compile

    def __init__(self, function, numbers=()):
        functools.update_wrapper(self, function)
        self.function, self.numbers, self.made, self.compiled = function, numbers, None, {}

    @classmethod
    def alike(cls, *numbers: str):
        """Decorate a kernel whose binary is the same for all values of these integers, also 1 and
        multiples of 16.
        """
        return functools.partial(cls, numbers=numbers)

    def __getitem__(self, grid):
        """With fused multiply-adds where nothing else is said: what Triton does without a word
        depends on version and environment.
        """
        made, here.slow = self.make(), self.slow
        run = functools.partial(made.run, grid=grid, warmup=True) if here.dry_run else made[grid]
        return functools.partial(run, enable_fp_fusion=True)

    def launch(self, programs: int, key, *arguments, **options) -> None:
        """Launch so many programs; `arguments` are all of the kernel's, constants too, in its
        order.

        `key` stands for what decides about the binary: the device, types, alignments, constants,
        and numbers that are 1 or multiples of 16. From the second launch with it on, Triton does
        not look at that again, which would take longer than a small kernel.
        """
        compiled = self.compiled.get(key)
        if here.dry_run:
            if compiled is None:
                self[programs, 1, 1](*arguments, **options)
            return
        if compiled is None:
            compiled = self._prepared(key, *arguments, **options)
        if compiled is None:  # the interpreter compiles nothing
            self[programs, 1, 1](*arguments, **options)
        else:
            compiled[programs, 1, 1](*arguments)
        replay.note(compiled, programs, arguments)

    def prepare(self, key, *arguments, **options) -> None:
        """Make the kernel ready for its first launch by `jit[grid]`, unless that was done for
        `key`, which stands for the same as in `launch`. Does nothing in a rehearsal.
        """
        if key not in self.compiled and not here.dry_run:
            self._prepared(key, *arguments, **options)

    def _prepared(self, key, *arguments, **options):
        with _compiling:
            compiled = self.compiled[key] = self._ready(*arguments, **options)
        return compiled

    def _ready(self, *arguments, **options):
        """Return the compiled kernel with its launcher and its binary loaded; None in the
        interpreter.

        Triton's own first launch sets the launcher first: another thread that launches the kernel
        before its binary is loaded would find the launcher and launch nothing.
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
            triton_launchers.name_launchers_apart()
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
    """Return what a kernel's binary knows of tensors, and more: a part of a key for
    `jit.launch`.
    """
    return tuple((t.dtype, t.device.index, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors)


def description(tensor, rows, columns):
    """A descriptor for boxes of (rows, columns) in one matrix, checked."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), [1, rows, columns], layout
    )


def blank(descriptor):
    """A descriptor without its tensor."""
    descriptor.base = None
    return descriptor


def filled(blank, tensor):
    """A descriptor of another tensor of the same shape and strides, without the checks."""
    descriptor = object.__new__(type(blank))
    vars(descriptor).update(vars(blank), base=tensor)
    return descriptor


class gluon_jit(jit):
    """Decorator: the same for a Gluon kernel."""

    slow = True

    def decorate(self, scope):
        from triton.experimental import gluon
        from triton.experimental.gluon import language
        from triton.experimental.gluon.language.nvidia import hopper
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

        def either(owner, one, other):
            return getattr(owner, one, None) or getattr(owner, other)

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

"""Kernels compiled side by side: before work is done for the first time, it is rehearsed, to learn what it launches.

Decides: when there is a rehearsal, and how many threads compile. In a rehearsal no kernel is launched; one that is not
known yet goes to a thread, which compiles it, builds its launcher and loads it. A rehearsal is a hint: what fails in it
is tried again, and fails or not, by the launch itself. Must not know: what the work is.
"""
from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

import torch

from . import here, use_triton

MOST_THREADS = 16  # of a process; on a node there are several, which compile the same kernels at the same time
MANY_THREADS = 8  # from which on kernels are compiled that are not sure to be wanted
_done: set = set()
_alone = threading.Lock()


def begin(device: torch.device) -> None:
    """Import Triton in a thread, where work on `device` will need it soon, and have it read what its cache's keys do:
    itself, 400 MB. What waits for other ranks meanwhile waits no longer for that.
    """
    if _is_possible(device):
        _reader()


@functools.cache
def _reader() -> threading.Thread:
    thread = threading.Thread(target=_read_compiler, name="read the compiler", daemon=True)
    thread.start()
    return thread


def _read_compiler() -> None:
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


def rehearse(device: torch.device, work: Callable[[], None], kind: Hashable = None,
             likely: Callable[[], object] | None = None) -> None:
    """Have all kernels compiled that `work` launches on `device`, before it is called for the first time.

    Calls `work` without launches, once for each `kind` other than None. All else that it does it does twice: it may
    write only to memory that nobody reads before `work` has written it again. Does nothing on a CPU, while a CUDA graph
    is captured, or where this Triton cannot compile in threads. `likely`: what may well follow; where there are many
    processors its kernels are compiled beside the others.
    """
    if kind in _done or not _is_possible(device):
        return
    if kind is not None:
        _done.add(kind)
    if not here.rehearsing:  # else it is part of a longer rehearsal
        with contextlib.suppress(Exception):
            _rehearse(work, likely if _threads() >= MANY_THREADS else None)


def _is_possible(device) -> bool:
    return device.type == "cuda" and use_triton(device) and not torch.cuda.is_current_stream_capturing()


def _rehearse(work, likely=None) -> None:
    import triton
    from triton.runtime import driver

    if not hasattr(triton, "AsyncCompileMode"):  # it came with 3.5
        return
    reader = _reader()
    gpus, number = driver.active.get_device_interface(), driver.active.get_current_device()
    reader.join()  # Triton would read it twice
    pool = _Pool(_threads(), "compile", gpus.set_device, (number,))  # a new thread is on the first GPU
    with _alone, triton.AsyncCompileMode(pool, ignore_errors=True), pool:
        here.rehearsing = True
        try:
            work()
            if likely is not None:
                likely()
        finally:
            here.rehearsing = False


def _threads() -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_THREADS, allowed)


class _Pool(ThreadPoolExecutor):
    """What Triton hands over is compiled, and made ready for its first launch."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.kernels = []  # that are ready

    def submit(self, compile_kernel):
        return super().submit(self._make_ready, compile_kernel)

    def _make_ready(self, compile_kernel):
        """Return a kernel whose launcher is built and whose binary is on the device, else its first launch would do it.
        It does where that fails here: a Triton from 3.7 on would raise the same error again.
        """
        kernel = compile_kernel()
        try:
            kernel._init_handles()
            self.kernels.append(kernel)
        except Exception:
            if kernel.module is None:
                kernel._run = None
        return kernel

    def __exit__(self, *about):
        """Give each kernel its launcher again, in this thread alone, from what was built. In Triton 3.6 launchers are
        modules of one name, and of two threads that load one at a time, one can get the other's.
        """
        from triton.runtime import driver

        super().__exit__(*about)
        for kernel in self.kernels:
            kernel._run = driver.active.launcher_cls(kernel.src, kernel.metadata)

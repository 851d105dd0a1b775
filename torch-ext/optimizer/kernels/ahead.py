"""Kernels compiled side by side: before work is done for the first time, it is rehearsed, to learn what it launches.

Decides: when there is a rehearsal, how many threads compile, and in which order. In a rehearsal no kernel is launched;
those that are not known yet go to threads, which compile them, build their launchers and load them. A rehearsal is a
hint: what fails in it is tried again, and fails or not, by the launch itself. Must not know: what the work is.
"""
from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor, wait

import torch

from . import capturing, here, use_triton
from .neighbours import alone, place

MOST_THREADS = 16  # of a process
MANY_PROCESSORS = 8  # from which on kernels are compiled that are not sure to be wanted
HEAD_START = 0.5  # seconds for which a process compiles nothing but its share of what its neighbours need, too
_alone = threading.Lock()
_turn = threading.Lock()


def begin(device: torch.device) -> None:
    """Import Triton in a thread, where work on `device` will need it soon, and have it read what its cache's keys do:
    itself, 400 MB. What waits for other ranks meanwhile waits no longer for that.
    """
    if _is_possible(device):
        _reader()


@functools.cache
def _reader() -> threading.Thread:
    # No daemon: Python (before 3.14) ends a daemon that runs while it is finalized inside whatever C++ called it, which
    # aborts the process. A process that ends at once waits a second for this thread.
    thread = threading.Thread(target=_read_compiler, name="read the compiler")
    thread.start()
    return thread


def _read_compiler() -> None:
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


def rehearse(device: torch.device, work: Callable[[], None], likely: Callable[[], object] | None = None) -> None:
    """Have all kernels compiled that `work` launches on `device`, before it is called for the first time.

    Calls `work` without launches. All else that it does it does twice: it may write only to memory that nobody reads
    before `work` has written it again. Does nothing on a CPU, while a CUDA graph is captured, or where this Triton
    cannot compile in threads. `likely`: what may well follow; where there are many processors its kernels are compiled
    beside the others.
    """
    if _is_possible(device) and not here.rehearsing:  # else it is part of a longer rehearsal
        with contextlib.suppress(Exception):
            _rehearse(work, likely if _processors() >= MANY_PROCESSORS else None)


def _is_possible(device) -> bool:
    return device.type == "cuda" and use_triton(device) and not capturing(device)


def _rehearse(work, likely=None) -> None:
    import triton
    from triton.runtime import driver

    if not hasattr(triton, "AsyncCompileMode"):  # it came with 3.5
        return
    reader = _reader()
    gpus, number = driver.active.get_device_interface(), driver.active.get_current_device()
    reader.join()  # Triton would read it twice
    threads = min(MOST_THREADS, _processors())
    pool = _Pool(threads, "compile", gpus.set_device, (number,))  # a new thread is on the first GPU
    with _alone, triton.AsyncCompileMode(pool, ignore_errors=True), pool:
        here.rehearsing = True
        try:
            work()
            if likely is not None:
                likely()
        finally:
            here.rehearsing = False


def _processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _take_turns(compile_kernel) -> None:
    """Let compilations walk through their kernels' sources one after another, of which one at a time may use Python:
    else all would come to what other threads do beside them, the longer part, at the end.
    """
    with contextlib.suppress(AttributeError, KeyError, TypeError):  # another Triton
        source = dict(zip(compile_kernel.__code__.co_freevars, compile_kernel.__closure__))["src"].cell_contents
        walk = source.make_ir

        def walk_alone(*arguments):
            with _turn:
                return walk(*arguments)

        source.make_ir = walk_alone


class _Pool(ThreadPoolExecutor):
    """What Triton hands over is compiled once all is known, and made ready for its first launch."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.handed_over = []  # (whether it compiles fast, what compiles it, what comes of it)
        self.kernels = []  # that are ready

    def submit(self, compile_kernel):
        _take_turns(compile_kernel)
        future = Future()
        self.handed_over.append((not here.slow, compile_kernel, future))
        return future

    def start(self) -> None:
        """What takes long first, then what is wanted first: Python's part of compilations is done one at a time. And of
        what all processes of this machine need each does a share first, and by then finds the rest done, or waits for
        it.
        """
        kernels = [kernel[1:] for kernel in sorted(self.handed_over, key=lambda kernel: kernel[0])]
        number, count = place()
        own, others = kernels[number::count], [kernel for i, kernel in enumerate(kernels) if i % count != number]
        begin = super().submit
        try:
            begun = [begin(self._fulfil, *kernel) for kernel in own]
            wait(begun, HEAD_START if others else 0)
            for kernel in others:
                begin(self._fulfil, *kernel)
        except BaseException:  # no thread, or the user has had enough
            for _, future in kernels:  # for which Triton would wait
                with contextlib.suppress(InvalidStateError):
                    future.set_exception(CancelledError())
            raise

    def _fulfil(self, compile_kernel, future):
        try:
            with alone(getattr(future, "_key", None)):  # Triton's own
                kernel = self._make_ready(compile_kernel)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(kernel)

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

        self.start()
        super().__exit__(*about)
        for kernel in self.kernels:
            kernel._run = driver.active.launcher_cls(kernel.src, kernel.metadata)

"""Parallel compilation of all kernels of a step before the first launch, shared between processes.

`precompile_kernels` calls the work in a dry run: Triton collects the kernels and launches nothing.
Threads then compile and load all kernels. Processes of a machine with a common Triton cache start
with different kernels, and wait for kernels already in work elsewhere (`compile_lock`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor, wait
from typing import Any

import torch

from ..backend import capturing, use_triton
from .jit import thread_state

MOST_THREADS = 16  # compiling threads of a process
# Least processors for compiling the kernels of `likely`, too: some of them are never launched
MANY_PROCESSORS = 8
# Seconds for which a process compiles its own share of the kernels only. Afterwards the other
# processes of the machine have compiled theirs, or hold the locks of kernels in work.
HEAD_START = 0.5
PATIENCE = 30.0  # seconds for which a process waits until another one has compiled a kernel
# Linux' `struct flock`: type, whence, start, length, process; padded to whole words
FLOCK = "hhqqi0q"

# One dry run at a time: threads that act as ranks may start theirs together
_dry_run_lock = threading.Lock()
# One thread at a time walks through a kernel's source, see `_serialize_front_end`
_front_end_lock = threading.Lock()
# Processes that have held one lock for PATIENCE: this process waits for none of their locks
_stuck: set[int] = set()


def preload_compiler(device: torch.device) -> None:
    """Start a thread to import Triton and to compute the constant part of Triton's cache keys.

    The constant part is a hash of Triton's own files, 400 MB. Planning calls `preload_compiler`
    before waiting for ranks: both waits overlap. Does nothing if `device` never compiles.
    """
    if _is_possible(device):
        _reader()


@functools.cache
def _reader() -> threading.Thread:
    """Return the thread of `preload_compiler`, started by the first call."""
    # No daemon: Python (before 3.14) ends a daemon that runs during finalization inside whatever
    # C++ function it has called, and the process aborts. The price: a process that ends at once
    # waits a second for the thread.
    thread = threading.Thread(target=_read_compiler, name="read the compiler")
    thread.start()
    return thread


def _read_compiler() -> None:
    """Compute and cache Triton's hash of itself. Errors are left to the first compilation."""
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


def precompile_kernels(
    device: torch.device, work: Callable[[], None], likely: Callable[[], object] | None = None
) -> None:
    """Compile and load all kernels launched by `work` on `device`, before the first real call.

    Calls `work` once without launches (dry run). All remaining effects of `work` happen twice, at
    the dry run and at the real call: `work` may write only to memory that the real call writes
    again before anybody reads. `likely`: further work, whose kernels may be needed soon; compiled
    beside the rest if the process has at least MANY_PROCESSORS.

    Does nothing on a CPU, during capture of a CUDA graph, inside another dry run, or if Triton has
    no asynchronous compilation. Suppresses every Exception: launches repeat failed compilations.
    """
    # Inside a dry run, kernels are part of the outer one
    if _is_possible(device) and not thread_state.dry_run:
        with contextlib.suppress(Exception):
            _dry_run(work, likely if _processors() >= MANY_PROCESSORS else None)


def _is_possible(device: torch.device) -> bool:
    """Say whether kernels can be compiled ahead: on a GPU, by Triton, outside of graph capture."""
    return device.type == "cuda" and use_triton(device) and not capturing(device)


def in_dry_run() -> bool:
    """Return whether the calling thread is in a dry run: kernels are collected, not launched.

    Callers then skip torch's own operations, which would run on memory without content.
    """
    return thread_state.dry_run


def _dry_run(work: Callable[[], None], likely: Callable[[], object] | None = None) -> None:
    """Call `work` and `likely` without launches; compile and load the kernels in threads."""
    import triton
    from triton.runtime import driver

    if not hasattr(triton, "AsyncCompileMode"):  # new in Triton 3.5
        return
    reader = _reader()
    gpus = driver.active.get_device_interface()
    number = driver.active.get_current_device()
    reader.join()  # Triton would hash itself a second time
    threads = min(MOST_THREADS, _processors())
    # A new thread is on the first GPU, hence set_device
    pool = _Pool(threads, "compile", gpus.set_device, (number,))
    with _dry_run_lock, triton.AsyncCompileMode(pool, ignore_errors=True), pool:
        thread_state.dry_run = True
        try:
            work()
            if likely is not None:
                likely()
        finally:
            thread_state.dry_run = False


def _processors() -> int:
    """Return the number of processors available to the process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _serialize_front_end(compile_kernel: Callable) -> None:
    """Make compilations walk through their kernels' sources one after another (`make_ir`).

    The walk is pure Python, hence limited to a single thread at a time; LLVM and the assembler run
    beside the walk. If all walks advanced together, all of LLVM's work, the longer part, would
    start at the end. Does nothing if Triton's compilation has no `make_ir`.
    """
    with contextlib.suppress(AttributeError, KeyError, TypeError):  # another Triton
        source = dict(zip(compile_kernel.__code__.co_freevars, compile_kernel.__closure__))[
            "src"
        ].cell_contents
        walk = source.make_ir

        def walk_alone(*arguments: Any) -> Any:
            with _front_end_lock:
                return walk(*arguments)

        source.make_ir = walk_alone


class _Pool(ThreadPoolExecutor):
    """Executor of Triton's AsyncCompileMode: compiles and loads kernels after the dry run.

    `submit` collects compilations; leaving the `with` block runs all of them.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        # (whether it compiles fast, Triton's compile function, future of the compiled kernel)
        self.handed_over: list[tuple[bool, Callable, Future]] = []
        self.kernels = []  # compiled and loaded

    def submit(self, compile_kernel: Callable) -> Future:
        """Keep a compilation for `start` and return the future of the compiled kernel."""
        _serialize_front_end(compile_kernel)
        future = Future()
        self.handed_over.append((not thread_state.slow, compile_kernel, future))
        return future

    def start(self) -> None:
        """Start all compilations: slow kernels (Gluon) first, then in order of their launches.

        Slow kernels first: up to half of a Gluon compilation is Python, limited to a single thread
        at a time. Each process of the machine starts with a share of all kernels and, HEAD_START
        later, with the rest. By then, the rest is in Triton's cache, compiled by the processes of
        the machine, or `compile_lock` waits.

        Raises an error of starting a thread, or KeyboardInterrupt, after all futures are done.
        """
        kernels = [kernel[1:] for kernel in sorted(self.handed_over, key=lambda kernel: kernel[0])]
        number, count = local_rank_and_count()
        own, others = (
            kernels[number::count],
            [kernel for i, kernel in enumerate(kernels) if i % count != number],
        )
        begin = super().submit
        try:
            begun = [begin(self._fulfil, *kernel) for kernel in own]
            wait(begun, HEAD_START if others else 0)
            for kernel in others:
                begin(self._fulfil, *kernel)
        except BaseException:
            # Triton waits for every future when its mode ends
            for _, future in kernels:
                with contextlib.suppress(InvalidStateError):
                    future.set_exception(CancelledError())
            raise

    def _fulfil(self, compile_kernel: Callable, future: Future) -> None:
        """Compile a kernel under the kernel's lock; set the future to the kernel or the error."""
        try:
            with compile_lock(getattr(future, "_key", None)):  # Triton's own
                kernel = self._make_ready(compile_kernel)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(kernel)

    def _make_ready(self, compile_kernel: Callable) -> Any:
        """Return a compiled kernel, launcher built and binary loaded onto the device.

        If loading fails, the kernel's first launch loads again and raises the error.
        """
        kernel = compile_kernel()
        try:
            kernel._init_handles()
            self.kernels.append(kernel)
        except Exception:
            # Triton 3.7 leaves a launcher that raises the old error again. Without a launcher the
            # first launch tries anew. With a module, the binary is loaded and cannot run at all
            # (it needs more threads than there are): then the launcher that raises stays.
            if kernel.module is None:
                kernel._run = None
        return kernel

    def __exit__(self, *about: object) -> None:
        """Compile and load all kernels, wait for the threads, and set each launcher again.

        Launchers of Triton 3.6 are modules with a common name: if two threads load launchers at a
        time, a kernel can get the launcher of another kernel. The calling thread alone loads all
        launchers again.
        """
        from triton.runtime import driver

        self.start()
        super().__exit__(*about)
        for kernel in self.kernels:
            kernel._run = driver.active.launcher_cls(kernel.src, kernel.metadata)


def local_rank_and_count() -> tuple[int, int]:
    """Return (number of this process, number of processes) of the job on the machine.

    Read from torchrun's LOCAL_RANK and LOCAL_WORLD_SIZE; (0, 1) without valid values.
    """
    number, count = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    known = number.isdecimal() and count.isdecimal() and int(number) < int(count)
    return (int(number), int(count)) if known else (0, 1)


@contextlib.contextmanager
def compile_lock(key: str | None) -> Iterator[None]:
    """Hold the lock of a kernel, between all processes of a user with a common Triton cache.

    `key`: Triton's cache key; None takes no lock. The `with` block runs without the lock, too, if
    locks are unavailable or waiting takes longer than PATIENCE: two processes then compile a kernel
    twice, at a loss of time only.
    """
    release = _lock(key) if key else None
    try:
        yield
    finally:
        if release is not None:
            release()


def _lock(key: str) -> Callable[[], None] | None:
    """Lock the byte of the lock file for kernel `key`; return the function to unlock the byte.

    The system unlocks the bytes of an ended process. None if locks are unavailable, if waiting
    takes longer than PATIENCE, or if a stuck process holds the lock.
    """
    end = time.monotonic() + PATIENCE
    try:
        import fcntl

        from triton import knobs

        # One byte of a sparse range of 2^56 per cache folder and kernel, by hash
        name = hashlib.sha256(f"{knobs.cache.dir} {key}".encode()).digest()
        file, byte = _file(), int.from_bytes(name[:7], "big")
        while not _is_stuck(holder := _holder(file, byte)):
            with contextlib.suppress(BlockingIOError, PermissionError):
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
                return functools.partial(fcntl.lockf, file, fcntl.LOCK_UN, 1, byte)
            if holder is not None and time.monotonic() >= end:
                _stuck.add(holder)
            time.sleep(0.01)
    except (ImportError, AttributeError, OSError):
        pass
    return None


def _holder(file: int, byte: int) -> int | None:
    """Return the id of the process with a lock on `byte` of `file`, None if the byte is free.

    0 if the system does not know the process (of another container), or off Linux.
    """
    import fcntl

    if sys.platform != "linux":  # FLOCK is Linux' layout
        return 0
    asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, process = struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else max(process, 0)


def _is_stuck(process: int | None) -> bool:
    """Say whether waiting for `process` is vain.

    A stuck process has held a lock for PATIENCE, or is stopped (SIGSTOP).
    """
    if process in _stuck:
        return True
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            # Behind the process's name, which may contain brackets itself
            state = file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state == b"T"


@functools.cache
def _file() -> int:
    """Return the descriptor of the lock file, in a folder writable by the current user only.

    The file stays open for as long as the process lives: closing a file releases all locks of the
    process on it. Raises OSError if folder or file belong to another user or are links.
    """
    # The folder of temporary files is shared by all users, hence O_NOFOLLOW and the checks of owner
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    path = os.path.join(tempfile.gettempdir(), f"optimizer-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    folder = os.open(path, flags | os.O_DIRECTORY)
    try:
        _check_owner(folder)
        file = os.open("lock", flags | os.O_RDWR | os.O_CREAT, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        _check_owner(file)
    except BaseException:
        os.close(file)
        raise
    return file


def _check_owner(file: int) -> None:
    """Raise PermissionError unless the current user owns a file and nobody else can write to it.

    `file`: descriptor of an open file or folder.
    """
    found = os.fstat(file)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise PermissionError(
            f"file of user {found.st_uid} and mode {found.st_mode:o}, which others can write"
        )

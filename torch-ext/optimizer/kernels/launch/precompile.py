"""Compilation of all kernels of a step side by side before the first launch (dry run), shared
between processes.
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
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor, wait

import torch

from ..backend import capturing, use_triton
from .jit import thread_state

MOST_THREADS = 16  # of a process
MANY_PROCESSORS = 8  # from which on kernels are compiled that are not sure to be wanted
# Seconds for which a process compiles nothing but its share of what its neighbours need, too
HEAD_START = 0.5
_alone = threading.Lock()
_turn = threading.Lock()


def preload_compiler(device: torch.device) -> None:
    """Import Triton in a thread, where work on `device` will need it soon, and have it read what
    its cache's keys do: itself, 400 MB. What waits for other ranks meanwhile waits no longer for
    that.
    """
    if _is_possible(device):
        _reader()


@functools.cache
def _reader() -> threading.Thread:
    # No daemon: Python (before 3.14) ends a daemon that runs while it is finalized inside whatever
    # C++ called it, which aborts the process. A process that ends at once waits a second for this
    # thread.
    thread = threading.Thread(target=_read_compiler, name="read the compiler")
    thread.start()
    return thread


def _read_compiler() -> None:
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


def precompile_kernels(
    device: torch.device, work: Callable[[], None], likely: Callable[[], object] | None = None
) -> None:
    """Have all kernels compiled that `work` launches on `device`, before it is called for the first
    time.

    Calls `work` without launches. All else that it does it does twice: it may write only to memory
    that nobody reads before `work` has written it again. Does nothing on a CPU, while a CUDA graph
    is captured, or where this Triton cannot compile in threads. `likely`: what may well follow;
    where there are many processors its kernels are compiled beside the others.
    """
    if _is_possible(device) and not thread_state.dry_run:  # else it is part of a longer rehearsal
        with contextlib.suppress(Exception):
            _dry_run(work, likely if _processors() >= MANY_PROCESSORS else None)


def _is_possible(device) -> bool:
    return device.type == "cuda" and use_triton(device) and not capturing(device)


def _dry_run(work, likely=None) -> None:
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
        thread_state.dry_run = True
        try:
            work()
            if likely is not None:
                likely()
        finally:
            thread_state.dry_run = False


def _processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _take_turns(compile_kernel) -> None:
    """Let compilations walk through their kernels' sources one after another, of which one at a
    time may use Python: else all would come to what other threads do beside them, the longer part,
    at the end.
    """
    with contextlib.suppress(AttributeError, KeyError, TypeError):  # another Triton
        source = dict(zip(compile_kernel.__code__.co_freevars, compile_kernel.__closure__))[
            "src"
        ].cell_contents
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
        self.handed_over.append((not thread_state.slow, compile_kernel, future))
        return future

    def start(self) -> None:
        """What takes long first, then what is wanted first: Python's part of compilations is done
        one at a time. And of what all processes of this machine need each does a share first, and
        by then finds the rest done, or waits for it.
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
        except BaseException:  # no thread, or the user has had enough
            for _, future in kernels:  # for which Triton would wait
                with contextlib.suppress(InvalidStateError):
                    future.set_exception(CancelledError())
            raise

    def _fulfil(self, compile_kernel, future):
        try:
            with compile_lock(getattr(future, "_key", None)):  # Triton's own
                kernel = self._make_ready(compile_kernel)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(kernel)

    def _make_ready(self, compile_kernel):
        """Return a kernel whose launcher is built and whose binary is on the device, else its first
        launch would do it. It does where that fails here: a Triton from 3.7 on would raise the same
        error again.
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
        """Give each kernel its launcher again, in this thread alone, from what was built. In Triton
        3.6 launchers are modules of one name, and of two threads that load one at a time, one can
        get the other's.
        """
        from triton.runtime import driver

        self.start()
        super().__exit__(*about)
        for kernel in self.kernels:
            kernel._run = driver.active.launcher_cls(kernel.src, kernel.metadata)


PATIENCE = 30.0  # seconds for which a process waits until another has compiled a kernel
# Linux' `struct flock`: type, whence, start, length, process; padded to whole words
FLOCK = "hhqqi0q"

# Processes that have held one lock for PATIENCE: this process waits for none of theirs
_stuck: set[int] = set()


def local_rank_and_count() -> tuple[int, int]:
    """The number of this process among those of its job on this machine, and how many there are, as
    torchrun says.
    """
    number, count = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    known = number.isdecimal() and count.isdecimal() and int(number) < int(count)
    return (int(number), int(count)) if known else (0, 1)


@contextlib.contextmanager
def compile_lock(key: str | None):
    """Let processes that share a cache do what is inside, for one kernel known by Triton's `key`,
    one after the other. Where that is not possible, or takes too long, they do it all the same.
    """
    release = _lock(key) if key else None
    try:
        yield
    finally:
        if release is not None:
            release()


def _lock(key):
    """Lock the byte of a file that stands for the kernel, and return what frees it; it is free,
    too, where the process that has locked it is no more. None where it cannot be locked, or not in
    time, or where a stuck process holds it.
    """
    end = time.monotonic() + PATIENCE
    try:
        import fcntl

        from triton import knobs

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
    """Return the id of the process that has locked `byte` of `file`, 0 where the system does not
    know it (the process is in another container), None where the byte is free.
    """
    import fcntl

    if sys.platform != "linux":  # FLOCK is Linux' layout
        return 0
    asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, process = struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else max(process, 0)


def _is_stuck(process: int | None) -> bool:
    """Say whether waiting for `process` is vain: it has held one lock for PATIENCE, or is stopped
    (SIGSTOP).
    """
    if process in _stuck:
        return True
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            # Behind the name, which may hold brackets itself
            state = file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state == b"T"


@functools.cache
def _file() -> int:
    """The lock file, in a folder that only this user can write. It stays open for as long as the
    process lives, since closing it releases all locks. Raises OSError where another user has made
    the folder or the file.
    """
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
    """Raise PermissionError unless an open file or folder is this user's and nobody else can write
    it.
    """
    found = os.fstat(file)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise PermissionError(
            f"file of user {found.st_uid} and mode {found.st_mode:o}, which others can write"
        )

"""Processes of one machine, which need the same kernels: a kernel is compiled by one of them, and read by the others.

Decides: who has which place among them, and who waits for whom. Must not know: how a kernel is compiled.
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
import time

PATIENCE = 30.0  # seconds for which a process waits until another has compiled a kernel
FLOCK = "hhqqi0q"  # Linux' `struct flock`: type, whence, start, length, process; padded to whole words

_stuck: set[int] = set()  # processes that have held one lock for PATIENCE: this process waits for none of theirs


def place() -> tuple[int, int]:
    """The number of this process among those of its job on this machine, and how many there are, as torchrun says."""
    number, count = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    known = number.isdecimal() and count.isdecimal() and int(number) < int(count)
    return (int(number), int(count)) if known else (0, 1)


@contextlib.contextmanager
def alone(key: str | None):
    """Let processes that share a cache do what is inside, for one kernel known by Triton's `key`, one after the other.
    Where that is not possible, or takes too long, they do it all the same.
    """
    release = _lock(key) if key else None
    try:
        yield
    finally:
        if release is not None:
            release()


def _lock(key):
    """Lock the byte of a file that stands for the kernel, and return what frees it; it is free, too, where the process
    that has locked it is no more. None where it cannot be locked, or not in time, or where a stuck process holds it.
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
    """Return the id of the process that has locked `byte` of `file`, 0 where the system does not know it (the process
    is in another container), None where the byte is free.
    """
    import fcntl

    if sys.platform != "linux":  # FLOCK is Linux' layout
        return 0
    asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, process = struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else max(process, 0)


def _is_stuck(process: int | None) -> bool:
    """Say whether waiting for `process` is vain: it has held one lock for PATIENCE, or is stopped (SIGSTOP)."""
    if process in _stuck:
        return True
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]  # behind the name, which may hold brackets itself
    except (OSError, IndexError):
        return False
    return state == b"T"


@functools.cache
def _file() -> int:
    """The lock file, in a folder that only this user can write. It stays open for as long as the process lives, since
    closing it releases all locks. Raises OSError where another user has made the folder or the file.
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
    """Raise PermissionError unless an open file or folder is this user's and nobody else can write it."""
    found = os.fstat(file)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise PermissionError(f"file of user {found.st_uid} and mode {found.st_mode:o}, which others can write")

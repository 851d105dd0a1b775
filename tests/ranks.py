"""Run a test's function on several ranks: in processes (gloo, nccl) or as threads of this process (bookkeeping only).

The processes stay alive between calls, since starting one costs seconds; every call gets a process group of its own.
A call never hangs: ranks that do not answer in time are killed, and the next call starts fresh ones.
"""

from __future__ import annotations

import atexit
import datetime
import faulthandler
import functools
import gc
import importlib
import itertools
import multiprocessing
import os
import pickle
import sys
import threading
import time
import traceback
from multiprocessing import connection
from types import ModuleType

import torch
import torch.distributed as dist

THOROUGH = bool(os.environ.get("OPTIMIZER_THOROUGH"))  # all pairs where each choice is met otherwise (docs/env.md)
START_S = 180.0  # importing torch in many processes on a busy machine
GRACE_S = 5.0  # how long the other ranks may go on once one has failed
HOST = "127.0.0.1"
# Imported once, in the process that forks the workers. A first step imports torch._dynamo, which takes seconds.
PRELOADED = ["torch", "torch.distributed.tensor.debug", "torch._dynamo", "kernels", "pytest", "tests.preloaded"]


@functools.cache
def package() -> ModuleType:
    """Return the package under test, loaded as a user loads it (LOCAL_KERNELS names the build)."""
    from kernels import get_kernel

    return get_kernel("org/optimizer", version=1)


def everywhere(monkeypatch, module: ModuleType, name: str, value: object) -> None:
    """monkeypatch.setattr in every module of the package that has imported the object by its name."""
    original = getattr(module, name)
    monkeypatch.setattr(module, name, value)
    for other in [m for key, m in sys.modules.items() if key.startswith(f"{package().__name__}.")]:
        if vars(other).get(name) is original:
            monkeypatch.setattr(other, name, value)


def part(name: str) -> ModuleType:
    """Return a module of the package under test, such as part("newton_schulz.orthogonalize") or
    part("kernels.matmul.api").
    """
    return importlib.import_module(f"{package().__name__}.{name}")


def muon_before_a_step(params, **options):
    """A Muon of parameters that have gradients of ones."""
    for p in params:
        p.grad = torch.ones_like(p)
    return package().Muon(params, **options)


def _is_own(name: str) -> bool:
    return name.startswith("OPTIMIZER_")


OWN = {name: value for name, value in os.environ.items() if _is_own(name)}  # before tests


def run_ranks(world: int, function, *args, backend: str = "gloo", timeout: float = 60.0) -> list:
    """Run function(rank, world, *args) on `world` processes and return the results by rank.

    `function` is defined at the top level of a test module; arguments and results are pickled. With an nccl backend
    rank i uses GPU i. Random number generators keep their state from call to call: seed them in `function`.
    Raises RuntimeError with the traceback of the rank that failed first, TimeoutError if ranks do not answer.
    """
    return _pool().run(world, (function, args), backend, timeout)


def run_threads(world: int, function, *args, timeout: float = 60.0) -> list:
    """Run function(rank, world, *args) on `world` threads, each a rank of a process group of backend "threaded".

    For bookkeeping on many ranks: collectives complete when they are issued, all ranks share one random number
    generator, nothing is pickled. Errors as in run_ranks.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    store, results, failures = dist.HashStore(), [None] * world, []

    def rank_main(rank: int) -> None:
        torch.set_num_threads(1)  # a new thread starts with OpenMP's default
        with turn:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
                results[rank] = function(rank, world, *args)
            except BaseException as error:  # SystemExit is how a rank leaves a collective that another rank missed
                failures.append((time.monotonic(), rank, traceback.format_exc()))
                threaded.ProcessLocalGroup.exception_handle(error)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
                # else a thread that ends does it, and two at once can wait for each other for ever
                getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", int)()

    torch._C._ensureCUDADeviceGuardSet()  # the first FakeTensorMode does it, and two at once crash (2.11 without a GPU)
    if not hasattr(threaded.ThreadLocalWorld, "comms"):  # torch 2.11's own, without which it destroys no group
        threaded.ThreadLocalWorld.comms = []
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded.AllToAllBase._size_cumsum = _starts
    turn = _take_turns(threaded)
    threaded._install_threaded_pg()
    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world)]
    try:
        stuck = _join(threads, timeout, failures)
        if stuck and turn.acquire(timeout=GRACE_S):
            threaded.ProcessLocalGroup.exception_handle(TimeoutError())
            turn.release()
            _join(stuck, GRACE_S, failures)
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        _forget_meshes()
    if stuck:
        late = [rank for rank, thread in enumerate(threads) if thread in stuck]
        raise TimeoutError(f"{_name(function)}: thread ranks {late} of {world} took longer than {timeout:g} s")
    _raise_first(failures, world, function)
    return results


def _take_turns(threaded: ModuleType):
    """Return the lock that a rank holds unless it waits for others: ranks that all want the interpreter take it from
    each other at every operation of torch.
    """
    turn = threading.RLock()

    class Collective(threaded.Collective.__mro__[-2]):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            self._start_cond, self._done_cond = threading.Condition(turn), threading.Condition(turn)

    def barrier(*args) -> None:
        turn.release()
        try:
            dist.distributed_c10d._store_based_barrier(*args)
        finally:
            turn.acquire()

    threaded.Collective, threaded._store_based_barrier = Collective, barrier
    return turn


def _starts(_, size: int, sizes: list[int] | None, world: int) -> list[int]:
    """Where the part of each rank begins; torch works it out in tensors, for every pair of ranks."""
    return [0, *itertools.accumulate(sizes if sizes is not None and len(sizes) else [size // world] * world)]


def _join(threads: list[threading.Thread], timeout: float, failures: list) -> list[threading.Thread]:
    """Start the threads that were not started, wait for all of them, and return those still running at the end."""
    deadline = time.monotonic() + timeout
    for thread in threads:
        if thread.ident is None:
            thread.start()
    for thread in threads:
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(0.05)
            if failures:
                deadline = min(deadline, failures[0][0] + GRACE_S)
    return [thread for thread in threads if thread.is_alive() and not failures]


def _raise_first(failures: list[tuple[float, int, str]], world: int, function) -> None:
    """Raise the failure that happened first, if there is one: the others are mostly its consequences."""
    if failures:
        _, rank, text = min(failures)
        others = sorted(other for _, other, _ in failures if other != rank)
        also = f" (then ranks {others} too)" if others else ""
        raise RuntimeError(f"{_name(function)}: rank {rank} of {world} failed first{also}:\n{text}")


def _name(function) -> str:
    return getattr(function, "__qualname__", repr(function))


class _Pool:
    """Worker processes, each with a pipe to this one; grows to the largest world that was asked for."""

    def __init__(self) -> None:
        self.workers: list[tuple[multiprocessing.process.BaseProcess, connection.Connection]] = []
        self.calls = 0
        # Importing torch may touch the driver, and a process forked after that cannot use the GPU.
        self.context = multiprocessing.get_context("spawn" if torch.cuda.device_count() else "forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        atexit.register(self.close)

    def run(self, world: int, job: tuple, backend: str, timeout: float) -> list:
        self._grow(world)
        self.calls += 1
        payload = pickle.dumps(job)
        for rank, (_, pipe) in enumerate(self.workers[:world]):
            pipe.send_bytes(pickle.dumps((rank, world, backend, self.store.port, self.calls, timeout, payload)))
        results, failures, late = self._collect(world, timeout)
        if late or len(failures) > 0 and "nccl" in backend:
            self.close()
        _raise_first(failures, world, job[0])
        if late:
            raise TimeoutError(f"{_name(job[0])}: ranks {late} of {world} took longer than {timeout:g} s")
        return results

    def close(self) -> None:
        """Kill all workers; the next run starts new ones."""
        for process, pipe in self.workers:
            process.kill()
            process.join()
            pipe.close()
        self.workers = []

    def _grow(self, world: int) -> None:
        fresh = []
        while len(self.workers) < world:
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=_worker, args=(theirs, OWN), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))
            fresh.append(ours)
        for pipe in fresh:
            if not pipe.poll(START_S):
                self.close()
                raise TimeoutError(f"a worker process did not start within {START_S:g} s")
            pipe.recv_bytes()

    def _collect(self, world: int, timeout: float) -> tuple[list, list, list[int]]:
        """Return the results, the failures, and the ranks that gave no answer and have to be killed."""
        results, failures, dead = [None] * world, [], []
        pending = {pipe: rank for rank, (_, pipe) in enumerate(self.workers[:world])}
        deadline = time.monotonic() + timeout
        while pending:
            ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = pending.pop(pipe)
                try:
                    failed_at, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    dead.append(rank)
                    failed_at, value = time.monotonic(), "the process died"
                if failed_at is None:
                    results[rank] = value
                else:
                    failures.append((failed_at, rank, value))
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return results, failures, dead + list(pending.values())


@functools.cache
def _pool() -> _Pool:
    return _Pool()


def _worker(pipe: connection.Connection, own: dict) -> None:
    """Answer jobs from the pipe until the other end closes it. `own`: what the environment says of the package."""
    for name in filter(_is_own, list(os.environ)):  # a test that has set it may have started the fork server
        del os.environ[name]
    os.environ.update(own)
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gc.freeze()  # the collection after each call need not look at all of torch
    pipe.send_bytes(b"ready")
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(_answer(*job))


def _answer(rank: int, world: int, backend: str, port: int, call: int, timeout: float, payload: bytes) -> bytes:
    """Run one job in a process group of its own; return the pickled (None, result) or (time of failure, traceback)."""
    faulthandler.dump_traceback_later(max(0.5, timeout - 1.0))  # where it hangs, before the pool kills it
    try:
        function, args = pickle.loads(payload)
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        store = dist.PrefixStore(f"call{call}", _connect(port))
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
        return pickle.dumps((None, function(rank, world, *args)))
    except BaseException:
        _connect.cache_clear()  # nobody knows what waits in that connection
        return pickle.dumps((time.monotonic(), traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()
        _forget_meshes()
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


@functools.cache
def _connect(port: int) -> dist.TCPStore:
    """Connect to the store once: now and then the other end takes 5 s to answer a new connection."""
    return dist.TCPStore(HOST, port, is_master=False)


def _forget_meshes() -> None:
    """Clear DTensor's caches: a mesh of an earlier group equals a later one, but names groups that are gone.

    A group lives as long as a cached mesh does, and with it gloo's threads, which spin once its other ranks are gone.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute as redistribute
        from torch.distributed.tensor._collective_utils import MeshTopoInfo
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        MeshTopoInfo.build_from_mesh.cache_clear()
        redistribute._gen_transform_infos.cache_clear()
        getattr(redistribute, "_planner_cache", {}).clear()  # torch 2.11 may have none

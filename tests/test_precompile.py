"""Kernels compiled side by side: a rehearsal submits all of them, launches and changes nothing, and hides no error."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import paths
from tests.ranks import everywhere

ROOT = Path(__file__).resolve().parent.parent


def scenarios(cache: Path, *names: str) -> list[dict]:
    """What processes of their own report, the first with an empty cache of kernels (tests/dry_runs.py)."""
    if reason := paths.why_no_triton():
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.dry_runs", *names]
    done = subprocess.run(command, cwd=ROOT, env=paths.compiler_environment(cache), capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(names)
    return found


def of(what: str, events: list) -> list[tuple[str, bool]]:
    """(kernel, whether in the main thread) of all events of a kind."""
    return [(name, main) for kind, name, main in events if kind == what]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stub stands for the driver")
def test_rehearsals(tmp_path):
    """All in one cache, first the scenario that takes the most kernels; `compile` is noted where one is read, too."""
    checks = {"untouched": a_rehearsal_launches_nothing_and_leaves_the_callers_tensors_alone,
              "order": all_kernels_of_a_call_are_submitted_before_one_is_waited_for,
              "errors": errors_are_raised_by_the_launch, "turns": one_rehearsal_waits_for_another,
              "alike": counts_do_not_split_binaries,
              "akin": what_may_come_next_is_compiled_where_there_are_many_threads,
              "akin_alone": elsewhere_each_call_compiles_its_own,
              "fallback": without_compilation_in_threads_launches_compile}
    for found, check in zip(scenarios(tmp_path, *checks), checks.values()):
        check(found)


def all_kernels_of_a_call_are_submitted_before_one_is_waited_for(found):
    first, kinds = found["first"], [kind for kind, *_ in found["first"]]
    compiled, loaded = of("compile", first), of("load", first)
    assert len(compiled) >= 6 and len(loaded) == len(compiled)
    assert kinds.index("wait") < kinds.index("compile") and of("wait", first) == [(str(len(compiled)), True)]
    assert not any(main for _, main in compiled + loaded)
    assert kinds.index("launch") > max(i for i, kind in enumerate(kinds) if kind == "load")
    assert len(of("launch", first)) > len(compiled)
    assert all(found["turns"]) and len(found["turns"]) == len(compiled)  # Triton's own sources, found where they are
    assert found["devices"] and set(found["devices"]) == {1}  # each thread takes the caller's GPU
    assert {kind for kind, *_ in found["second"]} == {"launch"}
    assert len(of("launch", found["second"])) == len(of("launch", first))


def a_rehearsal_launches_nothing_and_leaves_the_callers_tensors_alone(found):
    assert found["launched"] == [] and found["changed"] == [] and found["read"] == 1
    compiled, launched = of("compile", found["events"]), of("launch", found["events"])
    assert {"_pack_kernel", "_update_kernel", "_rows_kernel"} <= {name for name, _ in compiled}
    assert {name for name, _ in compiled} >= {name for name, _ in launched} != set()
    assert not any(main for _, main in compiled)  # the step's own rehearsal misses none


def errors_are_raised_by_the_launch(found):
    assert "CompileTimeAssertionFailure" in found["said"][0] and "wrong on purpose" in found["said"][0]
    assert of("load", found["rehearsed"]) == [("plain_kernel", False)]  # which failed that time
    assert found["said"][1] == "" and of("launch", found["after"]) == [("plain_kernel", True)]


def one_rehearsal_waits_for_another(found):
    assert found["seen"] == ["begin", "end"] * 2


def without_compilation_in_threads_launches_compile(found):
    for events in (found["first"], found["second"]):
        compiled, launched = of("compile", events), of("launch", events)
        assert compiled and launched and all(main for _, main in compiled)
    assert found["devices"] == []


def counts_do_not_split_binaries(found):
    events = found["events"]
    compiled, launched = ([name for name, _ in of(what, events)] for what in ("compile", "launch"))
    assert launched.count("_cast_kernel") == 3 and compiled.count("_cast_kernel") == 1
    pingpong = launched.count("pingpong_kernel"), compiled.count("pingpong_kernel")
    assert pingpong in ((4, 1), (0, 0))  # if this Triton has what it is written in
    assert launched.count("_tma_kernel") == 4 and compiled.count("_tma_kernel") == 1


def what_may_come_next_is_compiled_where_there_are_many_threads(found):
    square, wide, tall = ([name for name, _ in of("compile", events)] for events in found["calls"])
    assert square.count("_tma_kernel") >= 6 and not wide and not tall
    for events in found["calls"]:
        assert of("launch", events) and not any(main for _, main in of("compile", events))


def elsewhere_each_call_compiles_its_own(found):  # but wide and tall products, which are akin
    square, wide, tall = ([name for name, _ in of("compile", events)] for events in found["calls"])
    assert square.count("_tma_kernel") == 8 and wide.count("_tma_kernel") == 0 and wide and tall


def test_what_is_akin_to_large_stacks_is_not_longer_than_they_are(part, monkeypatch):
    polar, seen, U = part("newton_schulz.orthogonalize"), set(), torch.empty(2, 256, 256, dtype=torch.bfloat16)
    monkeypatch.setattr(polar, "_launch", lambda pairs, options, max_steps: seen.add(tuple(pairs[0][0].shape)))
    options = polar.steps_of("polar_express"), 0.0, torch.float16
    for most, longer in ((U.nbytes, {(2, 256, 1024), (2, 1024, 256)}), (U.nbytes - 1, set())):
        monkeypatch.setattr(polar, "MAX_COMPANION_BYTES", most)
        seen.clear()
        polar._launch_companions(U, options)
        assert seen == {(2, 256, 256), *longer}


def test_what_takes_long_is_compiled_first_and_each_process_begins_with_its_share(part, monkeypatch):
    ahead, here, begun = part("kernels.launch.precompile"), part("kernels.launch.jit").thread_state, []
    monkeypatch.setattr(ahead._Pool, "_make_ready", lambda pool, number: begun.append(number) or number)
    for place, order in ((None, [1, 3, 5, 0, 2, 4]), ((0, 2), [1, 5, 2, 3, 0, 4]), ((1, 2), [3, 0, 4, 1, 5, 2])):
        for name, value in zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), place or ("", "")):
            monkeypatch.setenv(name, str(value))
        pool, begun[:] = ahead._Pool(1), []
        for number in range(6):
            here.slow = number % 2 == 1
            pool.submit(number)
        assert begun == []  # until all is known
        pool.start()
        pool.shutdown()
        assert begun == order and [f.result() for *_, f in pool.handed_over] == list(range(6))


def test_sources_are_walked_through_one_after_another(part):
    """And what comes after that is not waited for: the pool's threads do it side by side."""
    together, most = threading.Barrier(4, timeout=60), []

    class Source:
        walking = 0

        def make_ir(self, number):
            Source.walking += 1
            time.sleep(0.02)
            most.append(Source.walking)
            Source.walking -= 1
            return number

    def handed_over(src):
        def compile_kernel():
            number = src.make_ir(7)
            together.wait()
            return number
        return compile_kernel

    pool = part("kernels.launch.precompile")._Pool(4)
    pool._make_ready = lambda compile_kernel: compile_kernel()
    futures = [pool.submit(handed_over(Source())) for _ in range(4)]
    pool.start()
    pool.shutdown()
    assert [future.result() for future in futures] == [7] * 4 and most == [1] * 4


def test_nobody_waits_for_what_could_not_be_begun(part, monkeypatch):
    """Triton waits for all that was handed over, also where the machine has no thread left or the user interrupts."""
    ahead = part("kernels.launch.precompile")
    begin = ahead.ThreadPoolExecutor.submit

    def interrupted(pool, *arguments):
        if arguments[1] == 1:
            raise KeyboardInterrupt
        return begin(pool, *arguments)

    monkeypatch.setattr(ahead.ThreadPoolExecutor, "submit", interrupted)
    monkeypatch.setattr(ahead._Pool, "_make_ready", lambda pool, number: number)
    pool = ahead._Pool(1)
    futures = [pool.submit(number) for number in range(3)]
    with pytest.raises(KeyboardInterrupt):
        pool.start()
    pool.shutdown()
    assert all(future.done() for future in futures) and isinstance(futures[1].exception(), ahead.CancelledError)


def test_processes_of_a_machine_compile_a_kernel_once(tmp_path):
    """Two processes begin with an empty cache at the same time."""
    if reason := paths.why_no_triton():
        pytest.skip(reason)
    environment = paths.compiler_environment(tmp_path / "cache") | {"LOCAL_WORLD_SIZE": "2"}
    ranks = [subprocess.Popen([sys.executable, "-m", "tests.dry_runs", "shares"], cwd=ROOT, stdout=subprocess.PIPE,
                              env=environment | {"LOCAL_RANK": str(rank), "MEET": str(tmp_path)}, text=True)
             for rank in range(2)]
    found = [json.loads(rank.communicate(timeout=240)[0].splitlines()[-1]) for rank in ranks]
    compiled = [kernel for rank in found for kernel in rank["compiled"]]
    assert len(compiled) == len(set(compiled)) >= 6
    assert set(compiled) == set(found[0]["ready"]) == set(found[1]["ready"])


def test_a_kernel_that_another_process_compiles_is_waited_for_but_not_for_ever(part, monkeypatch, tmp_path):
    """It lets go where it ends, and where its process does."""
    pytest.importorskip("triton")
    precompile = part("kernels.launch.precompile")
    monkeypatch.setattr(precompile.tempfile, "gettempdir", lambda: str(tmp_path))
    precompile._file.cache_clear()
    holds = ("import fcntl, os, sys; f = os.open(sys.argv[1], os.O_RDWR); "
             "fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()")
    with precompile.compile_lock("before"):
        pass  # makes the file
    other = subprocess.Popen([sys.executable, "-c", holds, f"{tmp_path}/optimizer-{os.getuid()}/lock"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        other.stdout.readline()
        monkeypatch.setattr(precompile, "PATIENCE", 0.05)
        assert precompile._lock("kernel") is None
        with precompile.compile_lock("kernel"):
            pass
        monkeypatch.setattr(precompile, "PATIENCE", 30.0)
        other.kill()
        other.wait()  # the system frees the lock once the process has ended
        release = precompile._lock("kernel")
        assert release is not None
        release()
    finally:
        other.kill()
        precompile._file.cache_clear()


def elsewhere(folder, place):
    """Somebody else's file, where the lock file is to be; returns the file that opening it must not make or lock."""
    victim = folder / "victim"
    if place == "a link in the folder":
        (folder / f"optimizer-{os.getuid()}").mkdir(mode=0o700)
        (folder / f"optimizer-{os.getuid()}" / "lock").symlink_to(victim)
    elif place == "a link to a folder":
        victim.mkdir(mode=0o700)
        (folder / f"optimizer-{os.getuid()}").symlink_to(victim)
        return victim / "lock"
    else:
        (folder / f"optimizer-{os.getuid()}").mkdir()
        (folder / f"optimizer-{os.getuid()}").chmod(0o777)
        return folder / f"optimizer-{os.getuid()}" / "lock"
    return victim


@pytest.mark.parametrize("place", ["a link in the folder", "a link to a folder", "a folder that others can write"])
def test_a_lock_file_is_neither_followed_nor_shared(place, part, monkeypatch, tmp_path):
    """The folder of temporary files is everybody's."""
    pytest.importorskip("triton")
    precompile, victim = part("kernels.launch.precompile"), elsewhere(tmp_path, place)
    monkeypatch.setattr(precompile.tempfile, "gettempdir", lambda: str(tmp_path))
    precompile._file.cache_clear()
    with precompile.compile_lock("kernel"):  # without a lock, then
        pass
    assert not victim.exists() and precompile._lock("kernel") is None


def test_a_lock_file_of_another_user_is_left_alone(part, monkeypatch, tmp_path):
    pytest.importorskip("triton")
    precompile = part("kernels.launch.precompile")
    monkeypatch.setattr(precompile.tempfile, "gettempdir", lambda: str(tmp_path))
    precompile._file.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(precompile.os, "getuid", lambda: os.geteuid() + 1)
        assert precompile._lock("kernel") is None
    release = precompile._lock("kernel")
    assert release is not None
    release()
    folder = tmp_path / f"optimizer-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE((folder / "lock").stat().st_mode) == 0o600
    precompile._file.cache_clear()


def test_what_could_not_be_loaded_is_loaded_by_its_launch(part):
    """What is loaded, but cannot run (it wants more threads than there are), keeps what raises that."""
    pool = part("kernels.launch.precompile")._Pool(1)

    def made(module):
        kernel = SimpleNamespace(module=None, _run=None)

        def load():
            kernel.module, kernel._run = module, "a launcher, or what raises"
            raise RuntimeError

        kernel._init_handles = load
        return pool._make_ready(lambda: kernel)

    assert made(None)._run is None and made("module")._run == "a launcher, or what raises" and pool.kernels == []


@pytest.mark.parametrize("dry_run", [False, True])
def test_launches_say_whether_multiplications_and_additions_are_fused(part, monkeypatch, dry_run):
    """Else it depends on Triton's version and on TRITON_DEFAULT_FP_FUSION."""
    kernels, said = part("kernels.launch.jit"), []

    class Made:
        def run(self, **options):
            said.append(options["enable_fp_fusion"])

        def __getitem__(self, grid):
            return self.run

    kernel = kernels.jit(lambda: None)
    kernel.made = Made()
    monkeypatch.setattr(kernels.thread_state, "dry_run", dry_run)
    kernel[1, 1, 1]()
    kernel[1, 1, 1](enable_fp_fusion=False)
    assert said == [True, False]


def test_only_launches_on_a_gpu_outside_of_captures_are_rehearsed(part, monkeypatch):
    ahead, capturing = part("kernels.launch.precompile"), []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setenv("OPTIMIZER_KERNELS", "triton")
    assert ahead._is_possible(torch.device("cuda", 0)) and not ahead._is_possible(torch.device("cpu"))
    capturing.append(True)
    assert not ahead._is_possible(torch.device("cuda", 0))
    capturing.clear()
    monkeypatch.setenv("OPTIMIZER_KERNELS", "torch")  # there, all work is torch's own, and would be done
    assert not ahead._is_possible(torch.device("cuda", 0))


def test_a_kind_of_call_is_rehearsed_once_and_never_while_a_graph_is_made(part, monkeypatch):
    polar, capturing, calls, X = part("newton_schulz.orthogonalize"), [True], [], torch.randn(2, 6, 20)
    ahead = part("kernels.launch.precompile")
    paths.forget(polar, monkeypatch)
    monkeypatch.setenv("OPTIMIZER_KERNELS", "triton")
    everywhere(monkeypatch, polar, "capturing", lambda device: bool(capturing))
    monkeypatch.setattr(polar, "_launch", lambda *_: None)
    monkeypatch.setattr(ahead, "precompile_kernels", lambda device, work, likely: calls.append(device))
    monkeypatch.setattr(polar, "MAX_SIGNATURES", 2)
    polar.polar_factor(X, polar.steps_of("cans"), 0.0)
    assert not calls and not polar._signatures
    capturing.clear()
    for kinds, eps in enumerate((0.0, 1e-3, 1e-4), start=1):
        for _ in range(3):
            polar.polar_factor(X, polar.steps_of("cans"), eps)
        assert len(calls) == kinds and 0 < len(polar._signatures) <= 2


def test_nothing_is_rehearsed_inside_a_rehearsal(part, monkeypatch):
    ahead, calls = part("kernels.launch.precompile"), []
    monkeypatch.setattr(ahead, "_is_possible", lambda device: True)
    monkeypatch.setattr(ahead, "_dry_run", lambda work, _: calls.append(work()))
    for dry_run in (True, False):
        monkeypatch.setattr(part("kernels.launch.jit").thread_state, "dry_run", dry_run)
        ahead.precompile_kernels(torch.device("cpu"), list)
    assert calls == [[]]


@pytest.mark.gpu
def test_the_same_bits_with_and_without_rehearsals(tmp_path):
    (found,), (plain,) = scenarios(tmp_path / "with", "bits"), scenarios(tmp_path / "without", "bits_without")
    assert found["digest"] == plain["digest"]
    first, second = (of("compile", compiled) for compiled in found["compiled"])
    assert second == [] == of("compile", plain["compiled"][1])
    assert sorted(name for name, _ in first) == sorted(name for name, _ in of("compile", plain["compiled"][0]))
    assert not any(main for _, main in first)


ENDS = """
import sys, time
from pathlib import Path
from tests.ranks import everywhere, part
ahead = part("kernels.launch.precompile")
ahead._read_compiler = lambda: (Path(sys.argv[1], "began").touch(), time.sleep(1.0), Path(sys.argv[1], "read").touch())
ahead._reader()
while not Path(sys.argv[1], "began").exists():
    time.sleep(0.01)
"""


def test_a_process_that_ends_at_once_has_read_the_compiler(optimizer, tmp_path):
    """Python (before 3.14) ends a daemon that runs while it is finalized, inside C++ too, which aborts the process."""
    subprocess.run([sys.executable, "-c", ENDS, tmp_path], cwd=ROOT, check=True)
    assert (tmp_path / "read").exists()


# a process that holds a lock, and does not go on --------------------------------------------------------------------

HOLDER = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"


@pytest.fixture
def precompile(part, monkeypatch, tmp_path):
    """The module, with a lock file of its own and a clock that only its own waiting moves."""
    pytest.importorskip("triton")
    precompile, clock = part("kernels.launch.precompile"), [0.0]
    monkeypatch.setattr(precompile.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(precompile, "time", SimpleNamespace(
        monotonic=lambda: clock[0], sleep=lambda seconds: clock.append(clock.pop() + seconds), waited=clock))
    monkeypatch.setattr(precompile, "_stuck", set())
    precompile._file.cache_clear()
    yield precompile
    precompile._file.cache_clear()


@pytest.fixture
def holder(precompile):
    """A process that has locked all kernels."""
    file = os.readlink(f"/proc/self/fd/{precompile._file()}")
    process = subprocess.Popen([sys.executable, "-c", HOLDER, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def state_of(process: subprocess.Popen) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who holds a lock")
def test_a_stopped_process_is_not_waited_for(precompile, holder):
    """A rank stopped while it compiled held up its neighbours for 30 s, and again for each of its kernels."""
    holder.send_signal(signal.SIGSTOP)
    while state_of(holder) != "T":
        pass
    for kernel in ("one", "two"):
        assert precompile._lock(kernel) is None
    assert precompile.time.waited == [0.0]
    holder.send_signal(signal.SIGCONT)
    while state_of(holder) == "T":
        pass
    assert precompile._lock("three") is None and precompile.time.waited[0] >= precompile.PATIENCE


@pytest.mark.parametrize("known", [True, False])
def test_a_process_that_keeps_a_lock_is_waited_for_once(precompile, holder, monkeypatch, known):
    """Also where the system does not say which process it is: it may be in another container."""
    if not known:
        monkeypatch.setattr(precompile.sys, "platform", "another")
    for kernel in ("one", "two", "three"):
        assert precompile._lock(kernel) is None
    assert precompile.PATIENCE <= precompile.time.waited[0] < precompile.PATIENCE + 1.0


def test_other_processes_are_waited_for_all_the_same(precompile, holder, monkeypatch):
    """Until they let go: here the holder ends while it is waited for."""
    precompile._stuck.add(os.getpid())

    def end(seconds):
        holder.kill()
        holder.wait()

    precompile.time.sleep = end
    release = precompile._lock("one")
    assert release is not None and holder.returncode is not None
    release()


# launchers of Triton 3.6 ---------------------------------------------------------------------------------------------

LAUNCHER = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&definition); }
"""


def test_launchers_that_are_loaded_again_are_not_each_others(part, monkeypatch, tmp_path):
    """A thread that loaded one read another's, where that was loaded, by another thread, before it read."""
    triton, build = pytest.importorskip("triton"), pytest.importorskip("triton.runtime.build")
    if not triton.__version__.startswith("3.6."):
        pytest.skip("from Triton 3.7 on launchers are no modules")
    monkeypatch.setattr(build, "_load_module_from_path", getattr(
        build._load_module_from_path, "__wrapped__", build._load_module_from_path))
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    loading = part("kernels.launch.triton_launchers")
    loading.name_launchers_apart.__wrapped__()
    before = set(sys.modules)

    def load(number):
        return build.compile_module_from_src(LAUNCHER % number, "__triton_launcher")

    modules = [load(number) for number in (1, 2, 1, 2, 3, 1)]  # each is read once all are loaded
    assert [module.launch() for module in modules] == [1, 2, 1, 2, 3, 1]
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_kernel_is_launched_once_it_is_ready(part):
    """Another thread that launched it meanwhile found a launcher, but no binary."""
    kernels, events = part("kernels.launch.jit"), []

    class Compiled:
        def _init_handles(self):
            events.append(("ready", kernels._compiling.locked()))

        def __getitem__(self, grid):
            return lambda *arguments: events.append((arguments, kernels._compiling.locked()))

    def run(*arguments, grid, warmup, **options):
        events.append((warmup, options, kernels._compiling.locked()))
        return Compiled()

    kernel = kernels.jit(lambda: None)
    kernel.make = lambda: SimpleNamespace(run=run)
    for argument in (7, 8):
        kernel.launch(3, "key", argument, num_warps=4)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    assert events == [(True, options, True), ("ready", True), ((7,), False), ((8,), False)]


def test_launches_over_a_table_are_prepared_once(part, monkeypatch):
    """Before its first launch a kernel is made ready while no other thread does that."""
    kernels, table, events = part("kernels.launch.jit"), part("kernels.elementwise.multi_tensor"), []
    monkeypatch.setattr(table, "triton_dtype", str)
    launch = table.bind([[torch.zeros(2, 3)], [torch.zeros(2, 3)]])[0]
    kernel = kernels.jit(lambda: None)

    class Made:
        def run(self, *arguments, warmup, **options):
            events.append(("made ready", kernels._compiling.locked()))

        def __getitem__(self, grid):
            return lambda *arguments, **options: events.append(("launched", kernels._compiling.locked()))

    kernel.make = Made
    for moves in (True, True, False):
        table.run(kernel, launch, 7, MOVES=moves)
    ready, launched = ("made ready", True), ("launched", False)
    assert events == [ready, launched, launched, ready, launched]
    table.run(kernel, table.bind([[torch.zeros(2, 3)], [torch.zeros(2, 3)]])[0], 7, MOVES=True)
    assert events[5:] == [launched]  # another table of the same form

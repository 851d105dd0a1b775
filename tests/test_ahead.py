"""Kernels compiled side by side: a rehearsal submits all of them, launches and changes nothing, and hides no error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import paths

ROOT = Path(__file__).resolve().parent.parent


def scenarios(cache: Path, *names: str) -> list[dict]:
    """What processes of their own report, the first with an empty cache of kernels (tests/rehearsals.py)."""
    if reason := paths.why_no_triton():
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.rehearsals", *names]
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
    assert found["devices"] and set(found["devices"]) == {1}  # each thread takes the caller's GPU
    assert {kind for kind, *_ in found["second"]} == {"launch"}
    assert len(of("launch", found["second"])) == len(of("launch", first))


def a_rehearsal_launches_nothing_and_leaves_the_callers_tensors_alone(found):
    assert found["launched"] == [] and found["changed"] == [] and found["read"] == 1
    compiled, launched = of("compile", found["events"]), of("launch", found["events"])
    assert {"_pack_kernel", "_update_kernel", "_moments_kernel"} <= {name for name, _ in compiled}
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
    assert launched.count("_sums_kernel") == 2 and compiled.count("_sums_kernel") == 1
    pingpong = launched.count("pingpong_kernel"), compiled.count("pingpong_kernel")
    assert pingpong in ((4, 1), (0, 0))  # if this Triton has what it is written in
    assert launched.count("_kernel") == 4 and compiled.count("_kernel") == 3  # N * count = 1, 3, 16 k are three


def what_may_come_next_is_compiled_where_there_are_many_threads(found):
    square, wide, tall = ([name for name, _ in of("compile", events)] for events in found["calls"])
    assert square.count("_kernel") >= 6 and wide.count("_kernel") <= 1 and not tall  # one for the long result
    for events in found["calls"]:
        assert of("launch", events) and not any(main for _, main in of("compile", events))


def elsewhere_each_call_compiles_its_own(found):
    square, wide, tall = ([name for name, _ in of("compile", events)] for events in found["calls"])
    assert square.count("_kernel") <= 4 and wide.count("_kernel") >= 3 and tall


def test_what_could_not_be_loaded_is_loaded_by_its_launch(part):
    """What is loaded, but cannot run (it wants more threads than there are), keeps what raises that."""
    pool = part("kernels.ahead")._Pool(1)

    def made(module):
        kernel = SimpleNamespace(module=None, _run=None)

        def load():
            kernel.module, kernel._run = module, "a launcher, or what raises"
            raise RuntimeError

        kernel._init_handles = load
        return pool._make_ready(lambda: kernel)

    assert made(None)._run is None and made("module")._run == "a launcher, or what raises" and pool.kernels == []


@pytest.mark.parametrize("rehearsing", [False, True])
def test_launches_say_whether_multiplications_and_additions_are_fused(part, monkeypatch, rehearsing):
    """Else it depends on Triton's version and on TRITON_DEFAULT_FP_FUSION."""
    kernels, said = part("kernels"), []

    class Made:
        def run(self, **options):
            said.append(options["enable_fp_fusion"])

        def __getitem__(self, grid):
            return self.run

    kernel = kernels.jit(lambda: None)
    kernel.made = Made()
    monkeypatch.setattr(kernels.here, "rehearsing", rehearsing)
    kernel[1, 1, 1]()
    kernel[1, 1, 1](enable_fp_fusion=False)
    assert said == [True, False]


def test_only_launches_on_a_gpu_outside_of_captures_are_rehearsed(part, monkeypatch):
    ahead, capturing = part("kernels.ahead"), []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setenv("OPTIMIZER_KERNELS", "triton")
    assert ahead._is_possible(torch.device("cuda", 0)) and not ahead._is_possible(torch.device("cpu"))
    capturing.append(True)
    assert not ahead._is_possible(torch.device("cuda", 0))
    capturing.clear()
    monkeypatch.setenv("OPTIMIZER_KERNELS", "torch")  # there, all work is torch's own, and would be done
    assert not ahead._is_possible(torch.device("cuda", 0))


def test_what_could_not_be_rehearsed_is_rehearsed_later_and_once(part, monkeypatch):
    ahead, possible, calls = part("kernels.ahead"), [], []
    monkeypatch.setattr(ahead, "_is_possible", lambda device: bool(possible))
    monkeypatch.setattr(ahead, "_done", set())
    monkeypatch.setattr(ahead, "_rehearse", lambda work, _: work())
    for _ in range(3):
        ahead.rehearse(torch.device("cpu"), lambda: calls.append(len(calls)), "kind")
        possible.append(True)
    assert calls == [0]


@pytest.mark.gpu
def test_the_same_bits_with_and_without_rehearsals(tmp_path):
    (found,), (plain,) = scenarios(tmp_path / "with", "bits"), scenarios(tmp_path / "without", "bits_without")
    assert found["digest"] == plain["digest"]
    first, second = (of("compile", compiled) for compiled in found["compiled"])
    assert second == [] == of("compile", plain["compiled"][1])
    assert sorted(name for name, _ in first) == sorted(name for name, _ in of("compile", plain["compiled"][0]))
    assert not any(main for _, main in first)

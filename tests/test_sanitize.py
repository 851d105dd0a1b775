"""tools/sanitize.py: it reaches every kernel, and on a GPU the sanitizer finds nothing."""
from __future__ import annotations

import ast
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import paths

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tools" / "sanitize.py"
HASTENED = """
import runpy, sys
from tests import interpreter
interpreter.hasten()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def kernels() -> set[str]:
    """Every function under @jit that takes program_id itself or is launched: by convention its name ends so."""
    found = set()
    for path in (ROOT / "torch-ext" / "optimizer" / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.decorator_list and node.name.endswith("kernel"):
                found.add(f"kernels.{path.stem}.{node.name}")
    return found


def test_every_kernel_is_run():
    """In Triton's interpreter, where only TMA cannot be; a new kernel has to be added to the script."""
    if reason := paths.why_no_triton():
        pytest.skip(reason)
    interpreter = {"TRITON_INTERPRET": "1"} if paths.INTERPRETED else {}
    environment = os.environ | {"OPTIMIZER_KERNELS": "triton"} | interpreter
    command = [sys.executable, *(("-c", HASTENED) if paths.INTERPRETED else ()), SCRIPT, "--run", "--small"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    launched = {f"kernels.{name.removeprefix('kernels.')}" for name in done.stdout.split("launched:")[1].split()}
    missing = kernels() - launched
    by_tma = {"kernels.gram_sm90._tma_kernel", "kernels.pingpong.pingpong_kernel",
              "kernels.cooperative.cooperative_kernel", "kernels.chain._chain_kernel"}
    assert len(kernels()) > 12 and missing <= (by_tma if paths.INTERPRETED else set()), missing


def test_all_options_reach_the_sanitizer(tmp_path, monkeypatch):
    """--small did nothing without --run."""
    commands = []

    def run(command, **options):
        commands.append(list(map(str, command)))
        return subprocess.CompletedProcess(command, 0, "========= ERROR SUMMARY: 0 errors", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--small", "--cases", "rows", "--sanitizer", "one"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert left.value.code == 0 and len(commands) == 4
    assert all(command[-4:] == ["--run", "--cases", "rows", "--small"] for command in commands)


def test_without_the_sanitizer_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert left.value.code == 2 and "compute-sanitizer is not installed" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_the_sanitizer_finds_nothing(tool):
    done = subprocess.run([sys.executable, SCRIPT, "--tools", tool], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_racecheck_says_of_the_hand_over_does_not_hide_anything_else(part, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import sanitize

    places = sorted(sanitize.hand_overs())
    assert [place.partition(":")[0] for place in places] == 2 * ["cooperative.py"] + 2 * ["pingpong.py"]
    report = ["========= Error: Race reported between Read access at kernel+0x100 in " + places[0],
              "=========     and Write access at kernel+0xf770 in " + places[1] + " [18 hazards]"]
    assert sanitize.only_hand_over(report) and not sanitize.only_hand_over([])
    elsewhere = "=========     and Write access at kernel+0x10 in pingpong.py:999 [1 hazards]"
    nowhere = "=========     and Write access at kernel+0x10 [1 hazards]"
    assert not any(sanitize.only_hand_over([*report, line]) for line in (elsewhere, nowhere))


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("kind", ["alone", "barrier"])
def test_racecheck_does_not_follow_a_hand_over(kind):
    """Why its reports there do not count: one barrier among some warps, and a kernel without shared memory has them."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not Hopper")
    command = ["compute-sanitizer", "--tool", "racecheck", sys.executable, "-m", "tests.hand_over", kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("Race reported" in done.stdout) == (kind == "barrier")

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

from tests.ranks import everywhere
interpreter.hasten()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def kernels() -> set[str]:
    """Every function under @jit that takes program_id itself or is launched: by convention its name ends so."""
    found = set()
    for path in (ROOT / "torch-ext" / "optimizer" / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.decorator_list and node.name.endswith("kernel"):
                found.add(f"kernels.{path.parent.name}.{path.stem}.{node.name}")
    return found


def test_every_kernel_is_run():
    """In Triton's interpreter, where only TMA cannot be; a new kernel has to be added to the script."""
    if reason := paths.why_no_triton():
        pytest.skip(reason)
    interpreter = {"TRITON_INTERPRET": "1"} if paths.INTERPRETED else {}
    environment = os.environ | {"OPTIMIZER_KERNELS": "triton"} | interpreter
    command = [sys.executable, *(("-c", HASTENED) if paths.INTERPRETED else ()), SCRIPT, "--run",
               *["--small"] * paths.INTERPRETED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    launched = {f"kernels.{name.removeprefix('kernels.')}" for name in done.stdout.split("launched:")[1].split()}
    missing = kernels() - launched
    by_tma = {
        "kernels.matmul.sm90_tma._tma_kernel",
        "kernels.matmul.sm90_warp_specialized.pingpong_kernel",
        "kernels.matmul.sm90_warp_specialized.cooperative_kernel",
        "kernels.matmul.sm90_one_tile.one_tile_kernel",
        "kernels.onchip.sm90_polar._polar_kernel",
        "kernels.matmul.sm90_mixed_input.mixed_input_kernel",
        "kernels.onchip.sm90_gram_chain.gram_chain_kernel",
    }
    assert len(kernels()) > 12 and missing <= (by_tma if paths.INTERPRETED else set()), missing


def answer(monkeypatch, *arguments, gpu=True, said="========= ERROR SUMMARY: 0 errors") -> tuple[int, list]:
    """The script's exit status, and the commands that it ran, beside a sanitizer that says this and finds nothing."""
    commands = []

    def run(command, **options):
        commands.append(list(map(str, command)))
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return left.value.code, commands


def test_all_options_reach_the_sanitizer(monkeypatch):
    """--small did nothing without --run."""
    status, commands = answer(monkeypatch, "--small", "--cases", "rows", "--sanitizer", "one")
    assert status == 0 and len(commands) == 4
    assert all(command[-4:] == ["--run", "--cases", "rows", "--small"] for command in commands)


def test_no_answer_is_no_clean_bill(monkeypatch, capsys):
    status, _ = answer(monkeypatch, "--sanitizer", "one", said="launched: nothing")
    assert status == 1 and capsys.readouterr().out.count("no answer") == 3


def test_without_the_sanitizer_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert answer(monkeypatch) == (2, []) and "compute-sanitizer is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "said"), [(["--sanitizer", "one"], "needs a GPU"), (["--run"], "without a GPU")])
@pytest.mark.parametrize("setting", [{}, {"TRITON_INTERPRET": "1"}, {"OPTIMIZER_KERNELS": "triton"}])
def test_without_a_gpu_it_says_so(monkeypatch, capsys, arguments, said, setting):
    """It compiled for the CPU and found nothing, or ended in a traceback."""
    for name in ("TRITON_INTERPRET", "OPTIMIZER_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    assert answer(monkeypatch, *arguments, gpu=False) == (2, [])
    printed = capsys.readouterr().out
    assert said in printed and "TRITON_INTERPRET=1 OPTIMIZER_KERNELS=triton" in printed


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
    files = ("sm90_warp_specialized.py", "sm90_warp_specialized.py", "sm90_mixed_input.py", "sm90_gram_chain.py")
    assert [place.partition(":")[0] for place in places] == sorted([*files, *files])
    report = ["========= Error: Race reported between Read access at kernel+0x100 in " + places[0],
              "=========     and Write access at kernel+0xf770 in " + places[1] + " [18 hazards]"]
    known = ["1 races where work is handed over"]
    assert sanitize.hand_over_apart(report) == known and sanitize.hand_over_apart([]) == []
    elsewhere = "=========     and Write access at kernel+0x10 in sm90_warp_specialized.py:999 [1 hazards]"
    nowhere = "=========     and Write access at kernel+0x10 [1 hazards]"
    for line in (elsewhere, nowhere):
        assert sanitize.hand_over_apart([*report, line]) == [*report, line]
        assert sanitize.hand_over_apart([*report, "=========", report[0], line]) == [report[0], line, *known]
        assert sanitize.hand_over_apart([line, *report]) == [line, *known]


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

"""The inputs of the installed torch's own tests of Muon, given to torch.optim.Muon and to this
package's.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
UNCLAMPED = "spectral_unclamped" in (
    getattr(torch.optim.Muon, "__doc__", None) or ""
)  # from torch 2.14 on


@functools.cache
def printed() -> subprocess.CompletedProcess:
    """What the program did, whose imports take longer than all that it compares."""
    return subprocess.run(
        [sys.executable, "-m", "tests.torch_inputs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def lines_of(kind: str) -> list[str]:
    """The lines of a kind, one for each input; skips where torch has no inputs for Muon."""
    done = printed()
    if done.returncode == 3:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(f"{kind}: ")]


@pytest.mark.parametrize("kind", ["results", "states"])
def test_torchs_inputs_give_torchs_results(kind: str) -> None:
    """From the start with its arguments, and from its state dict, with its products in fp64."""
    lines = lines_of(kind)
    assert len(lines) >= 10
    assert UNCLAMPED == any("spectral_unclamped" in line for line in lines)


def test_torchs_error_inputs_are_refused() -> None:
    """Duplicates and complex parameters already when the optimizer is built; more dims than two are
    allowed.
    """
    assert len(lines_of("errors")) >= 9

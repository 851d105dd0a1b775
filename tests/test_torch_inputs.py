"""The inputs of the installed torch's own tests of Muon, given to torch.optim.Muon and to this
package's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
UNCLAMPED = "spectral_unclamped" in (
    getattr(torch.optim.Muon, "__doc__", None) or ""
)  # from torch 2.14 on


def lines_of(mode: str) -> list[str]:
    """What the program printed, a line for each input; skips where torch has no inputs for Muon."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch_inputs", mode],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode == 3:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("mode", ["results", "states"])
def test_torchs_inputs_give_torchs_results(mode: str) -> None:
    """From the start with its arguments, and from its state dict, with its products in fp64."""
    lines = lines_of(mode)
    assert len(lines) >= 10
    assert UNCLAMPED == any("spectral_unclamped" in line for line in lines)


def test_torchs_error_inputs_are_refused() -> None:
    """Duplicates and complex parameters already when the optimizer is built; more dims than two are
    allowed.
    """
    assert len(lines_of("errors")) >= 9

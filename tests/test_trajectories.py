"""benchmarks/trajectories.py: packages that are installed step as this one does, with the arguments mapped."""
from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
STEPS = 50


@pytest.fixture
def trajectories(optimizer, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("trajectories")


def test_torch_takes_the_same_steps(trajectories):
    found = list(trajectories.compared("torch", None, STEPS))
    assert len(found) >= 4
    assert all(row["agrees"] and float(row["deviation"]) <= 1e-5 for row in found), found
    # In bf16, as torch iterates by itself, the two are further apart: the comparison sees that much
    assert all(float(row["deviation_bf16"]) > 100 * trajectories.TOLERANCE for row in found)


def test_a_wrong_mapping_is_seen(trajectories, monkeypatch):
    """And its row does not agree, although it says why."""
    import torch

    options = {**trajectories.OPTIONS, "ns_coefficients": "jordan"}
    case = trajectories.Case("muon", "", lambda weights: torch.optim.Muon(weights, **trajectories.OPTIONS),
                             trajectories.ours(**{**options, "momentum": trajectories.MOMENTUM + 1e-3}))
    assert trajectories.deviation(case, 3, trajectories.InFloat32()) > 10 * trajectories.TOLERANCE
    case = dataclasses.replace(case, why="another momentum")
    monkeypatch.setitem(trajectories.PEERS, "wrong", (lambda place: [case], "torch"))
    [row] = trajectories.compared("wrong", None, 3)
    assert row["agrees"] is False and float(row["deviation"]) > 1e-4 and row["reason"] == "another momentum"


@pytest.mark.parametrize("name", ["torch_elementwise", "keller_jordan", "scion", "emerging_optimizers", "megatron",
                                  "timm", "pytorch_optimizer", "heavyball", "dion", "muonium"])
def test_an_installed_package_takes_the_same_steps(name, trajectories):
    # After more steps, the sign of an update near 0 decides a cautious decay of Dion's: docs/peers.md
    for row in trajectories.compared(name, None, trajectories.STEPS if name == "dion" else STEPS):
        if row["agrees"] == "":
            pytest.skip(row["reason"])
        assert row["agrees"] == (float(row["deviation"]) <= 1e-5) and (row["agrees"] or row["reason"]), row


def test_a_peer_that_is_not_there_is_a_row_with_the_reason(trajectories, tmp_path):
    [row] = trajectories.compared("timm", tmp_path)
    assert (row["agrees"], row["reason"]) == ("", "there is no optim/muon.py")

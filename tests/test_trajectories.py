"""benchmarks/trajectories.py: other packages step as this one does, with the arguments mapped.

OPTIMIZER_PEERS names the packages that must be there, as in CI, each with =DIR if it is a checkout.
"""
from __future__ import annotations

import dataclasses
import importlib
import os
import re
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
STEPS = 50
PEERS = ("torch_elementwise", "keller_jordan", "normuon", "adamuon", "muon_plus", "scion", "emerging_optimizers",
         "megatron", "timm", "pytorch_optimizer", "heavyball", "dion", "muonium", "nanochat", "modded_nanogpt")
REQUIRED = {name: folder for name, _, folder in
            (entry.partition("=") for entry in os.environ.get("OPTIMIZER_PEERS", "").split())}


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


def test_an_element_that_one_decays_is_told_from_another_mask(trajectories):
    """Only where an update is 0 within rounding: where all elements decay is seen still."""
    import torch

    small, large = 1e-8, 4e-3
    theirs = torch.tensor([small, -2e-4, small, large, large])
    ours = torch.tensor([2e-4, small, -small, large - 2e-4, -large])
    assert trajectories.decayed_by_one(theirs, ours).tolist() == [True, True, False, False, False]
    cautious = trajectories.ours(decay="cautious", **trajectories.OPTIONS)
    case = trajectories.Case("muon", "", trajectories.ours(**trajectories.OPTIONS), cautious, cautious=True)
    assert trajectories.difference(case, 3)[0] > 100 * trajectories.TOLERANCE
    case = dataclasses.replace(case, theirs=cautious)
    assert trajectories.difference(case, 3) == (0, 0)


def test_the_workflow_has_every_peer(trajectories):
    """All but torch, which every job has, and motif, of which trajectories.py has no case."""
    assert {*PEERS} == trajectories.PEERS.keys() - {"torch", "motif"}
    root = FOLDER.parent
    job = yaml.safe_load((root / ".github" / "workflows" / "test.yml").read_text())["jobs"]["peers"]
    installed = next(step["env"]["OPTIMIZER_PEERS"].split() for step in job["steps"] if "env" in step)
    checkouts = [line.split() for line in (root / "requirements" / "peer_checkouts.txt").read_text().splitlines()]
    assert sorted(PEERS) == sorted([*installed, *(name for name, _, _ in checkouts)])
    assert all(re.fullmatch("[0-9a-f]{40}", commit) for _, _, commit in checkouts)


@pytest.mark.parametrize("name", PEERS)
def test_a_package_takes_the_same_steps(name, trajectories):
    assert REQUIRED.keys() <= {*PEERS}
    folder = Path(REQUIRED[name]).resolve() if REQUIRED.get(name) else None
    rows = [*trajectories.compared(name, folder, STEPS)]
    assert any("case" not in row or row["agrees"] != "" for row in rows), "no case was compared"
    for row in rows:
        if "case" not in row:
            (pytest.fail if name in REQUIRED else pytest.skip)(row["reason"])
        elif row["agrees"] == "":
            assert row["reason"], row
        else:
            differs = bool(row["reason"]) and not row["reason"].startswith(trajectories.ROUNDING)
            assert row["agrees"] == (float(row["deviation"]) <= 1e-5) == (not differs), row


def test_a_peer_that_is_not_there_is_a_row_with_the_reason(trajectories, tmp_path):
    [row] = trajectories.compared("timm", tmp_path)
    assert (row["agrees"], row["reason"]) == ("", "there is no optim/muon.py")

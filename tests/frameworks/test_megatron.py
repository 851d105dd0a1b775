"""Megatron-Core's own registry, wrappers, models and checkpoints, with the entry of register_megatron_muon."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.frameworks.common import ROOT, run
from tests.ranks import package, part

pytest.importorskip("megatron.core", reason="megatron.core needs Python 3.12")
pytest.importorskip("emerging_optimizers")


@pytest.fixture
def registry(monkeypatch):
    from megatron.core.optimizer import emerging_optimizers

    monkeypatch.setattr(emerging_optimizers, "_EMERGING_OPTIMIZERS", dict(emerging_optimizers._EMERGING_OPTIMIZERS))
    return emerging_optimizers


def created(registry, model, config, name):
    chunk = SimpleNamespace(config=SimpleNamespace(num_attention_heads=2, num_query_groups=1, kv_channels=4),
                            named_parameters=model.named_parameters)
    groups = [{"params": list(model.parameters())}]
    return registry._create_emerging_optimizer(config, groups, name, [chunk], None)


def test_the_registry_builds_the_entry_from_its_config(registry):
    """With defaults of Megatron's config, whose names and values are all known, and Megatron's routing to Adam."""
    from megatron.core.optimizer import OptimizerConfig

    theirs = registry._EMERGING_OPTIMIZERS["muon"]
    package().register_megatron_muon()
    ours = registry._EMERGING_OPTIMIZERS["muon"]
    assert type(ours) is type(theirs) and ours.default_param_overrides == theirs.default_param_overrides
    config = OptimizerConfig(optimizer="muon", lr=0.02)
    known = part("integrations.megatron")
    assert set(known.COEFFICIENTS) == set(registry.get_supported_coefficient_types()) - {"custom"}
    for coefficients in known.COEFFICIENTS:
        model = nn.ModuleDict({"linear_proj": nn.Linear(8, 8, bias=False)})
        steps = {"aol": 4, "deepseekv4": 10}.get(coefficients, 5)
        changed = replace(config, muon_coefficient_type=coefficients, muon_num_ns_steps=steps)
        optimizer, init_state = created(registry, model, changed, "muon")
        init_state(optimizer, config)
        assert type(optimizer) is known.MegatronMuon
        assert [set(state) for state in optimizer.state.values()] == [{"momentum_buffer"}]


@pytest.mark.parametrize("changed", [
    {}, {"muon_nesterov": True}, {"muon_split_qkv": False}, {"muon_scale_mode": "unit_rms_norm"},
    {"muon_coefficient_type": "simple", "muon_extra_scale_factor": 0.2},
    {"muon_scale_mode": "shape_scaling", "muon_coefficient_type": "simple", "muon_num_ns_steps": 3}])
def test_fifty_steps_are_those_of_megatrons_own_muon(registry, changed):
    """To 1e-5 of the movement of each weight. A part of each gradient is the weight, so deviations are carried on."""
    from megatron.core.optimizer import OptimizerConfig

    config = OptimizerConfig(optimizer="muon", lr=0.02, weight_decay=0.1, muon_fp32_matmul_prec="highest", **changed)
    package().register_megatron_muon("ours", wire_dtype="fp32")
    results = []
    for name in ("muon", "ours"):
        torch.manual_seed(0)
        model = nn.ModuleDict({"linear_qkv": nn.Linear(8, 32, bias=False), "linear_proj": nn.Linear(8, 8, bias=False)})
        model["linear_qkv"].weight.is_qkv = True
        optimizer, _ = created(registry, model, config, name)
        start = [p.detach().clone() for p in model.parameters()]
        for _ in range(50):
            for p in model.parameters():
                p.grad = torch.randn_like(p) + p.detach()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    for theirs, ours, first in zip(*results, start):
        assert float((ours - theirs).norm()) <= 1e-5 * float((theirs - first).norm())


def test_bits_on_ranks(tmp_path):
    """2 ranks of tensor, 2 of data or expert parallelism have the bits of one process, also after a resume."""
    alone = run("megatron", 1, tmp_path, "bits", "1", "1")[0]
    for said in [alone, *run("megatron", 4, tmp_path, "bits", "2", "2")]:
        for how, found in said.items():
            assert found["straight"] == found["resumed"] == alone[how]["straight"]
            assert (found["optimizer"], found["state"]) == ("MegatronMuon", ["momentum_buffer"])


def test_a_gpt_trains_as_with_megatrons_own_muon(tmp_path):
    """Fifty steps: equal losses, and weights to 1e-5 of their movement, of attention to 5e-5."""
    for said in run("megatron", 2, tmp_path, "train", "2", "1"):
        assert said["copies"] == pytest.approx(said["own"], rel=1e-5)
        assert said["copies"][-1] < 0.75 * said["copies"][0]
        attention = {name for name in said["deviation"] if "self_attention" in name}
        assert all(value <= 1e-5 for name, value in said["deviation"].items() if name not in attention)
        # Square matrices have smaller singular values, which "quintic" multiplies by 490 together with their rounding
        assert len(attention) == 4 and all(said["deviation"][name] <= 5e-5 for name in attention)


@pytest.mark.gpus(n=2)
@pytest.mark.parametrize("layout", [["--tensor-parallel", "2"], ["--tensor-parallel", "1", "--layer-wise"]])
def test_a_gpt_trains_on_gpus_as_with_megatrons_own_muon(tmp_path, layout):
    """In bf16, without the stand-ins for CUDA."""
    program, table = ROOT / "benchmarks" / "megatron_core.py", tmp_path / "losses.csv"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program, *layout,
               "--layers", "2", "--hidden", "256", "--sequence", "64", "--steps", "20", "--out", table]
    subprocess.run(command, check=True, timeout=500)
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert float(row["last_loss"]) < float(row["first_loss"]) - 0.3
        assert float(row["largest_difference"]) < 0.05
    assert [row["implementation"] for row in rows] == ["megatron duplicated", "ours"]

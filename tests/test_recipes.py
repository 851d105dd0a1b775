"""Recipes of docs/frameworks.md that replace a function or class of a framework, as they stand there, on stand-ins.

A stand-in has the names that a recipe imports or replaces, and calls them as the framework of docs/frameworks.md does.
"""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import package, run_threads

PAGE = Path(__file__).resolve().parents[1] / "docs" / "frameworks.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documents are not here")


def recipe(section: str) -> str:
    """The first code block of a section."""
    text = PAGE.read_text(encoding="utf-8").partition(f"# {section}\n")[2]
    return re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]


def defined_by(section: str) -> types.SimpleNamespace:
    """What the code of a section defines."""
    made: dict = {"__name__": "plugin"}
    exec(compile(recipe(section), str(PAGE), "exec"), made)
    return types.SimpleNamespace(**made)


class StandInModules:
    """Stand-in modules by dotted name."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        monkeypatch.setitem(sys.modules, "sharded_muon", package())

    def module(self, name: str, **content) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(content, __path__=[])
        self.monkeypatch.setitem(sys.modules, name, made)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, made)
        return made

    def run(self, section: str) -> types.SimpleNamespace:
        return defined_by(section)


@pytest.fixture
def stand(monkeypatch):
    return StandInModules(monkeypatch)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}) for _ in range(2))
        self.lm_head = nn.Linear(8, 16, bias=False)


def muon_names(optimizer) -> set[str]:
    return {name for group in optimizer.param_groups if group["use_muon"] for name in group["param_names"]}


def assert_sorted(optimizer, lr: float, weight_decay: float | None = None):
    """Hidden matrices alone are with Muon; rates are the framework's."""
    assert isinstance(optimizer, package().Muon)
    assert muon_names(optimizer) == {f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("up", "down")}
    assert {group["lr"] for group in optimizer.param_groups} == {lr}
    if weight_decay is not None:
        assert optimizer.param_groups[0]["weight_decay"] == weight_decay


def test_llama_factory(stand):
    built = []
    stand.module("llamafactory")
    stand.module("llamafactory.train")
    utils = stand.module("llamafactory.train.trainer_utils", _create_muon_optimizer=None)
    args = types.SimpleNamespace(learning_rate=0.25, weight_decay=0.5)
    stand.module("llamafactory.train.tuner", run_exp=lambda: built.append(utils._create_muon_optimizer(Model(), args)))
    stand.run("LLaMA-Factory")
    assert_sorted(*built, 0.25, 0.5)


@pytest.mark.parametrize("more", [{"momentum": 0.9, "eps": 1e-8}, {"betas": (0.9, 0.98)}], ids=["timm", "open_clip"])
def test_timm(stand, monkeypatch, tmp_path, more):
    stand.module("timm")
    optim = stand.module("timm.optim", create_optimizer_v2=None)
    call = f"create_optimizer_v2(Model(), opt='sgd', lr=0.25, weight_decay=0.5, **{more!r})"
    (tmp_path / "train.py").write_text(f"from timm.optim import create_optimizer_v2\nimport timm.optim\n"
                                       f"from tests.test_recipes import Model\ntimm.optim.built = {call}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(PAGE.parents[1]))
    stand.run("timm and open_clip")
    assert_sorted(optim.built, 0.25, 0.5)


def test_lerobot(stand):
    built = []
    config = types.SimpleNamespace(optimizer=types.SimpleNamespace(lr=0.25), scheduler=None, steps=9)
    stand.module("lerobot")
    stand.module("lerobot.scripts")
    train = stand.module("lerobot.scripts.lerobot_train", make_optimizer_and_scheduler=None)
    train.main = lambda: built.extend(train.make_optimizer_and_scheduler(config, Model()))
    made = stand.run("lerobot")
    assert_sorted(built[0], 0.25)
    assert built[1] is None
    config.scheduler = types.SimpleNamespace(build=lambda optimizer, steps: (optimizer, steps))
    optimizer, schedule = made.make(config, Model())
    assert schedule == (optimizer, 9)


def test_verl(stand):
    for name in ("verl", "verl.workers", "verl.workers.engine", "verl.workers.engine.fsdp"):
        stand.module(name)
    engine = type("FSDPEngine", (), {"optimizer_config": types.SimpleNamespace(lr=0.25, weight_decay=0.5)})
    stand.module("verl.workers.engine.fsdp.transformer_impl", FSDPEngine=engine)
    stand.run("verl with FSDP2")
    assert_sorted(engine()._build_optimizer(Model()), 0.25, 0.5)


def test_ultralytics(stand):
    """Filters of hidden convolutions are matrices; the last layers, and what is frozen, are not with Muon."""
    for name in ("ultralytics", "ultralytics.models", "ultralytics.models.yolo"):
        stand.module(name)
    stand.module("ultralytics.models.yolo.detect", DetectionTrainer=object)
    block = nn.ModuleDict({"conv": nn.Conv2d(4, 8, 3, bias=False), "bn": nn.BatchNorm2d(8)})
    detect = nn.ModuleDict({"cv2": nn.Sequential(block, nn.Conv2d(8, 5, 1)), "dfl": nn.ModuleDict({
        "conv": nn.Conv2d(16, 1, 1, bias=False).requires_grad_(False)})})
    trainer = stand.run("Ultralytics").MuonTrainer()
    optimizer = trainer.build_optimizer(nn.ModuleDict({"model": detect}), "AdamW", 0.25, 0.9, 0.5, 100)
    assert muon_names(optimizer) == {"model.cv2.0.conv.weight"}
    assert optimizer.param_groups[0]["split"] == "flatten" and optimizer.param_groups[0]["weight_decay"] == 0.5
    before = block["conv"].weight.detach().clone()
    torch.manual_seed(0)
    for p in detect.parameters():
        p.grad = torch.randn(p.shape) if p.requires_grad else None
    optimizer.step()
    moved = ((block["conv"].weight - before) / 0.25 + 0.5 * before).detach()
    singular = torch.linalg.svdvals(moved.flatten(1))
    assert singular.max() < 1.5 * singular.min()  # of one matrix 8 x 36, not of 32 filters 3 x 3


def sd_scripts(rank, world):
    """On ranks, and alone. The groups are of `networks.lora`: views of dictionaries, without names."""
    weights = {"down": nn.Parameter(torch.ones(2, 8, 1, 1)), "up": nn.Parameter(torch.ones(8, 2))}
    muon = defined_by("sd-scripts of kohya").muon
    optimizer = muon([{"params": weights.values(), "lr": 0.25}], lr=0.5, weight_decay=0.0, momentum=0.9)
    [group] = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["momentum"], group["split"]) == (0.25, 0.0, 0.9, "flatten")
    for p in weights.values():
        p.grad = torch.arange(16.0).reshape(p.shape).sin()
    optimizer.step()
    with pytest.raises(ValueError, match="is 1-D"):
        muon([{"params": [nn.Parameter(torch.ones(4))]}], lr=0.5)
    with pytest.raises(TypeError):  # parameters without groups
        muon([nn.Parameter(torch.ones(4, 4))], lr=0.5)
    rms = [float((p.detach() - 1).square().mean().sqrt()) / 0.25 for p in weights.values()]
    return rms, optimizer._options.process_group is (dist.group.WORLD if world > 1 else None)


@pytest.mark.parametrize("world", [1, 2])
def test_sd_scripts(stand, world):
    """Updates are as large as AdamW's for filters, too."""
    results = run_threads(world, sd_scripts) if world > 1 else [sd_scripts(0, 1)]
    for rms, is_group in results:
        assert is_group and rms == pytest.approx([0.2, 0.2], rel=0.15)

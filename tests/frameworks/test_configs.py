"""Recipes of docs/frameworks.md, as they stand there, in the config parsers of the frameworks' wheels."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from torch import nn

from tests.ranks import package

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"


def recipe(section: str, language: str) -> str:
    """The first code block of a section of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.search(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]


def module_of(section: str, monkeypatch) -> types.ModuleType:
    """`my_module` with the code of a section, imports included."""
    made = types.ModuleType("my_module")
    monkeypatch.setitem(sys.modules, "sharded_muon", package())
    monkeypatch.setitem(sys.modules, "my_module", made)
    exec(compile(recipe(section, "python"), str(PAGE), "exec"), made.__dict__)
    return made


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)})])
        self.lm_head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["down"](layer["up"](x).relu())
        return self.lm_head(x)


def lowers_the_loss(model: nn.Module, optimizer: torch.optim.Optimizer, vocabulary: int) -> bool:
    tokens = torch.arange(vocabulary)[None]
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses == sorted(losses, reverse=True)


def test_nemo_automodel(monkeypatch):
    config = pytest.importorskip("nemo_automodel.recipes._typed_config")
    from nemo_automodel.components.config.loader import ConfigNode

    module_of("NeMo Automodel", monkeypatch)
    text = recipe("NeMo Automodel", "yaml")
    entry = config.RecipeConfig(ConfigNode(yaml.safe_load(text))).optimizer
    model = Model()
    [optimizer] = entry.build(model, device_mesh=None, is_peft=False)
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert isinstance(optimizer, package().Muon)
    assert (rates["layers.0.up.weight"], rates["layers.0.down.weight"]) == (3e-4, 1.5e-4)
    assert lowers_the_loss(model, optimizer, 16)
    wrong = ConfigNode(yaml.safe_load(text.replace("weight_decay", "wieght_decay")))
    with pytest.raises(ValueError, match="there is no key 'wieght_decay'; did you mean 'weight_decay'"):
        config.RecipeConfig(wrong).optimizer.build(model)


def olmo_core_optim(monkeypatch) -> types.ModuleType:
    """olmo_core.optim, of OLMo-core without its client of object stores, which needs the SDKs of clouds."""
    cached_path = mock.MagicMock(SchemeClient=object, S3Client=type("S3Client", (), {"recoverable_errors": ()}))
    for name in ("cached_path", "cached_path.schemes"):
        monkeypatch.setitem(sys.modules, name, cached_path)
    return pytest.importorskip("olmo_core.optim")


def test_olmo_core(monkeypatch):
    olmo = olmo_core_optim(monkeypatch)
    from olmo_core.nn.transformer import TransformerConfig

    made = module_of("OLMo-core", monkeypatch)
    entry = olmo.OptimConfig.from_dict(yaml.safe_load(recipe("OLMo-core", "yaml")))
    assert type(entry) is made.ShardedMuonConfig
    model = TransformerConfig.llama_like(vocab_size=16, d_model=16, n_layers=1, n_heads=2).build(init_device="cpu")
    optimizer = entry.build(model)
    assert isinstance(optimizer, package().DionMuon)
    matrices, *others = optimizer.param_groups
    assert len(matrices["params"]) == 7 and all(p.ndim == 2 for p in matrices["params"])
    assert (matrices["adjust_lr_fn"], matrices["lr"], matrices["weight_decay"]) == ("rms_norm", 0.003, 0.1)
    assert [group["use_muon"] for group in others] == [False] * 3
    assert lowers_the_loss(model, optimizer, 16)


def test_prime_rl(monkeypatch):
    """Without its fork of dion, which the recipe replaces. prime-rl is no wheel: see prime_rl.txt in requirements/."""
    monkeypatch.setitem(sys.modules, "dion", types.SimpleNamespace(Muon=None))
    optim = pytest.importorskip("prime_rl.trainer.optim")
    from prime_rl.configs.trainer import MuonConfig

    monkeypatch.setattr(optim, "Muon", module_of("prime-rl", monkeypatch).muon)
    model = Model()
    config = MuonConfig(lr=0.02, weight_decay=0.3, mu=0.9)
    dims = types.SimpleNamespace(ep_enabled=False, dp_shard_enabled=False, cp_enabled=False, dp_replicate_enabled=False,
                                 world_mesh=None)
    optimizer = optim._create_optimizer(config, [*model.named_parameters()], dims)
    assert isinstance(optimizer, package().DionMuon)
    matrices, others = optimizer.param_groups
    assert len(matrices["params"]) == 3 and matrices["use_muon"] and not others["use_muon"]
    assert (matrices["lr"], matrices["weight_decay"], matrices["momentum"]) == (0.02, 0.3, 0.9)
    assert lowers_the_loss(model, optimizer, 16)


def test_axolotl(monkeypatch):
    """The wheel pins versions that other frameworks do not take: see axolotl.txt in requirements/."""
    mixin = pytest.importorskip("axolotl.core.trainers.mixins.optimizer")
    import axolotl.integrations.base as base

    module_of("axolotl", monkeypatch)
    manager = base.PluginManager.get_instance()
    manager.register("my_module.MuonPlugin")
    trainer = mixin.OptimizerMixin.__new__(mixin.OptimizerMixin)  # Trainer's own constructor reads a whole config
    trainer.model, trainer.optimizer = Model(), None
    trainer.args = mock.MagicMock(loraplus_lr_ratio=None, embedding_lr_scale=None, embedding_lr=None, lr_groups=None)
    manager.post_trainer_create(types.SimpleNamespace(learning_rate=0.02, weight_decay=0.3), trainer)
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, package().Muon)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.02, 0.3)
    assert lowers_the_loss(trainer.model, optimizer, 16)


def test_ms_swift(monkeypatch):
    """The wheel has an environment of its own, too: see ms_swift.txt."""
    optimizers = pytest.importorskip("swift.optimizers")
    module_of("ms-swift", monkeypatch)
    model = Model()
    callback = optimizers.optimizers_map.pop("sharded_muon")
    arguments = types.SimpleNamespace(learning_rate=0.02, weight_decay=0.3)
    optimizer = callback(arguments, types.SimpleNamespace(model=model)).create_optimizer()
    assert isinstance(optimizer, package().Muon)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.02, 0.3)
    assert lowers_the_loss(model, optimizer, 16)


def test_a_skip_fails_where_its_framework_is_required(monkeypatch):
    from tests.frameworks import conftest

    monkeypatch.setattr(conftest, "REQUIRED", ["swift"])
    for name, outcome in (("swift.optimizers", "failed"), ("axolotl", "skipped")):
        place = "file", 1, "test"
        report = pytest.TestReport("test", place, {}, "skipped", ("file", 1, f"could not import '{name}'"), "call")
        assert conftest._failed_if_required(report).outcome == outcome

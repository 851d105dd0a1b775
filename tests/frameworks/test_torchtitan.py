"""torchtitan's containers with torchtitan_muon: one part, two parts, two parts loaded as one, pipeline stages."""

from __future__ import annotations

import pytest
from torch import nn

from tests.frameworks.common import run
from tests.ranks import package

pytest.importorskip("torchtitan")


def assert_resumed(said):
    for rank in said:
        assert rank["straight"] == rank["resumed"] and rank["unmoved"]
        assert {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"} == set(rank["state"]) and rank["warned"] == []


def test_parts_have_the_bits_of_the_whole(tmp_path):
    """Under FSDP2, with a checkpoint after half of the steps; recut: of two parts, loaded into one."""
    found = []
    for mode, count in (("one", 1), ("parts", 2), ("recut", 1)):
        (tmp_path / mode).mkdir()
        said = run("titan", 2, tmp_path / mode, mode)
        assert_resumed(said)
        assert said[0]["optimizers"] == ["Muon"] * count
        found.append(said[0]["straight"])
    assert found == [found[0]] * 3


def test_stages_on_other_ranks(tmp_path):
    assert_resumed(run("titan", 4, tmp_path, "pipeline"))


def parts():
    last = nn.ModuleDict({"up": nn.Linear(4, 4), "lm_head": nn.Linear(4, 8)})
    return [nn.ModuleDict({"embed": nn.Embedding(8, 4)}), last]


def test_a_pattern_of_no_stage_warns():
    with pytest.warns(UserWarning, match=r"overrides: '\*.down.weight' matches no trainable parameter"):
        package().torchtitan_muon(overrides={"*.down.weight": {"lr": 1.0}}).build(model_parts=parts())


def test_torchtitans_own_parser_takes_the_entry(monkeypatch):
    from torchtitan.config.manager import ConfigManager
    from torchtitan.models.llama3 import config_registry

    def debug_muon():
        config = config_registry.llama3_debugmodel()
        config.optimizer = package().torchtitan_muon(lr=3e-4, overrides={"*.wo.weight": {"lr": 1e-4}})
        return config

    monkeypatch.setattr(config_registry, "debug_muon", debug_muon, raising=False)
    config = ConfigManager().parse_args(["--module", "llama3", "--config", "debug_muon", "--training.steps", "3"])
    assert config.training.steps == 3
    assert config.optimizer.muon == {"lr": 3e-4, "overrides": {"*.wo.weight": {"lr": 1e-4}}}
    assert config.optimizer.to_dict()["muon"] == config.optimizer.muon


def test_errors_name_keys_of_the_config():
    with pytest.raises(ValueError, match="there is no key 'wieght_decay'; did you mean 'weight_decay'"):
        package().torchtitan_muon(wieght_decay=0.1).build(model_parts=parts())
    entry = package().torchtitan_muon()
    entry.implementation = "fused_opt_states_bf16"
    with pytest.raises(ValueError, match="fused_opt_states_bf16.* not supported with Muon.*state_dtype='bf16'"):
        entry.build(model_parts=parts())

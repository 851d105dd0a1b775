"""Entries for frameworks, without the frameworks: configs as plain values, errors in their words, dion's arguments.

tests/frameworks runs the frameworks themselves.
"""

from __future__ import annotations

import ast
import copy
import json
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn

from tests.ranks import package, part, run_threads
from tests.test_checkpoint_foreign import (
    ROUNDING,
    STEPS,
    Dion,
    DionBlocks,
    DionHeads,
    DionNorMuon,
    assert_next_step_is_theirs,
    drawn,
)

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "torch-ext" / "optimizer"
DOCUMENT = ROOT / "docs" / "frameworks.md"


class Model(nn.Module):
    """Names as those of a language model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.ModuleDict({"q_proj": nn.Linear(8, 8, bias=False), "up": nn.Linear(8, 16)})
                                    for _ in range(2))
        self.lm_head = nn.Linear(8, 16, bias=False)


def built(**config):
    """From a config that was a file."""
    return package().MuonFactory()(Model(), **json.loads(json.dumps(config)))


def values(optimizer, key):
    """{name: value of a key of its group} of the parameters whose group has the key."""
    return {name: group[key] for group in optimizer.param_groups if key in group for name in group["param_names"]}


def bits(optimizer, steps=2):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return [p.detach().clone() for p in params]


def test_integrations_use_public_names_only():
    public = set(package().__all__)
    for path in (SOURCE / "integrations").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 2:
                names = {alias.name for alias in node.names}
                assert names <= public, f"{path.name}:{node.lineno} imports {names - public}"


# A config of plain values


def test_a_config_builds_what_the_arguments_build():
    """With Trainer's keys: betas and eps are AdamW's."""
    optimizer = built(lr=0.02, betas=[0.8, 0.9], eps=1e-6, ns_eps=1e-5, weight_decay=0.2, momentum=0.9, ns_steps=3,
                      wire_dtype="fp32", state_dtype="torch.bfloat16", adamw="re:^layers.0.up", adamw_lr=0.01)
    groups = package().get_default_muon_param_groups(Model(), adamw="^layers.0.up", adamw_lr=0.01)
    plain = package().Muon(groups, lr=0.02, adamw_betas=(0.8, 0.9), adamw_eps=1e-6, eps=1e-5, weight_decay=0.2,
                           momentum=0.9, ns_steps=3, wire_dtype=torch.float32, state_dtype=torch.bfloat16)
    assert type(optimizer) is type(plain)
    assert all(map(torch.equal, bits(optimizer), bits(plain)))
    assert [set(group) for group in optimizer.param_groups] == [set(group) for group in plain.param_groups]
    eight = built(lr=0.02, state_dtype="int8")
    eight.init_state()
    assert torch.int8 in {state[key].dtype for state in eight.state.values() for key in state}


@pytest.mark.skipif(not DOCUMENT.exists(), reason="the documents are not here")
def test_the_config_of_the_document():
    """Its YAML builds what it says, and its table has every key that has no effect."""
    text = DOCUMENT.read_text()
    config = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.S)[1])
    tower = nn.ModuleDict({"vision_tower": nn.ModuleDict({"up": nn.Linear(32, 32, bias=False)})})
    layers = nn.ModuleDict({"q_proj": nn.Linear(32, 64, bias=False)})
    model = nn.ModuleDict({"layers": layers, "embed": nn.Embedding(8, 32), "model": tower})
    optimizer = package().MuonFactory()(model, **config)
    assert isinstance(optimizer, package().NorMuon)
    assert values(optimizer, "split") == {"layers.q_proj.weight": {"heads": 32}}
    assert values(optimizer, "lr") == {
        "layers.q_proj.weight": 1.5e-4, "embed.weight": 1e-3, "model.vision_tower.up.weight": 3e-4}
    assert not values(optimizer, "use_muon")["model.vision_tower.up.weight"]
    keys = part("integrations.config")
    assert all(f"`{key}`" in text for key in (*keys.IGNORED, *keys.ONLY_FALSE, *keys.CALLED, *keys.DTYPES))


def test_keys_that_frameworks_give_to_every_optimizer_are_ignored():
    optimizer = package().MuonFactory()(Model(), object(), lr=0.02, fused=True, foreach=None, device_mesh=object(),
                                        amsgrad=False, differentiable=False, maximize=False)
    assert all(map(torch.equal, bits(optimizer), bits(built(lr=0.02))))


def test_patterns_are_globs_or_regular_expressions():
    def adamw(pattern):
        return {name for name, use in values(built(adamw=pattern), "use_muon").items() if not use}

    always = adamw(None)
    assert adamw("layers.*.q_proj.weight") - always == {f"layers.{i}.q_proj.weight" for i in (0, 1)}
    assert adamw(["layers.0.*", "re:1.up"]) - always == {
        "layers.0.q_proj.weight", "layers.0.up.weight", "layers.1.up.weight"}
    with pytest.raises(ValueError, match="adamw='layers.0.q_proj' matches no trainable parameter"):
        built(adamw="layers.0.q_proj")  # a glob is of the whole name, not of a prefix


def test_overrides_are_keys_of_groups_and_the_first_pattern_counts():
    optimizer = built(lr=0.02, overrides={
        "layers.0.q_proj.weight": {"lr": 0.5, "split": {"heads": 2}, "ns_eps": 1e-4},
        "*.q_proj.weight": {"lr": 0.25, "rule": "muon_plus", "normalize": "row"},
        "re:^embed": {"lr": 0.125, "betas": [0.5, 0.75], "eps": 1e-5, "weight_decay": 0.0, "state_dtype": "int8"}})
    lr = values(optimizer, "lr")
    assert [lr[f"{name}.weight"] for name in (
        "layers.0.q_proj", "layers.1.q_proj", "embed_tokens", "lm_head")] == [0.5, 0.25, 0.125, 0.02]
    assert values(optimizer, "split") == {"layers.0.q_proj.weight": {"heads": 2}}
    assert values(optimizer, "rule") == {"layers.1.q_proj.weight": "muon_plus"}
    assert values(optimizer, "normalize") == {"layers.1.q_proj.weight": "row"}
    assert values(optimizer, "state_dtype") == {"embed_tokens.weight": torch.int8}
    eps = values(optimizer, "eps")
    assert (eps["layers.0.q_proj.weight"], eps["embed_tokens.weight"]) == (1e-4, 1e-5)
    assert len(lr) == len(list(Model().parameters()))
    bits(optimizer)


def test_named_splits_have_patterns_of_configs():
    optimizer = built(lr=0.02, named_splits={"*.q_proj.weight": {"heads": 2}, "re:up": None})
    assert values(optimizer, "split") == {f"layers.{i}.q_proj.weight": {"heads": 2} for i in (0, 1)}
    told = r"named_splits='q_proj' matches no trainable parameter.*a glob of the whole name, or 're:' and a regex"
    with pytest.raises(ValueError, match=told):
        built(named_splits={"q_proj": {"heads": 2}})
    with pytest.raises(TypeError, match=r'such as {"re:qkv"'):
        built(named_splits=["q_proj"])


def test_the_advice_for_a_weight_that_looks_fused_is_in_terms_of_configs():
    class MyAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)

    model = nn.ModuleDict({"attn": MyAttention()})
    with pytest.raises(ValueError, match=r"named_splits={'re:attn.c_attn': .* set split in overrides"):
        package().MuonFactory()(model, split="auto")
    opt = package().MuonFactory()(model, split="auto", named_splits={"re:attn.c_attn": {"rows": [8, 8, 8]}})
    assert [group.get("split") for group in opt.param_groups] == [None, {"rows": [8, 8, 8]}]
    for form in ({"rows": [8, 8, 8]}, None):  # as the advice says
        opt = package().MuonFactory()(model, split="auto", overrides={"*c_attn*": {"split": form}, "*": {"lr": 0.5}})
        assert values(opt, "split") == {"attn.c_attn.weight": form}
    with pytest.raises(ValueError, match="looks like a fused weight"):  # the first pattern that matches counts
        package().MuonFactory()(model, split="auto", overrides={"*": {"lr": 0.5}, "*c_attn*": {"split": None}})


def test_an_override_has_the_options_of_its_rule():
    """Of a rule of its own, else of the config's rule, whose options are no keys of another rule or of AdamW."""
    optimizer = built(rule="muon_plus", normalize="row", overrides={
        "layers.0.q_proj.weight": {"normalize": "column"},
        "layers.1.q_proj.weight": {"rule": "dion2", "fraction": 0.5}, "re:^embed": {"rule": "lion", "lr": 0.125}})
    assert values(optimizer, "normalize") == {
        "layers.0.q_proj.weight": "column", "layers.0.up.weight": "row", "layers.1.up.weight": "row"}
    assert values(optimizer, "fraction") == {"layers.1.q_proj.weight": 0.5}
    assert values(optimizer, "rule")["embed_tokens.weight"] == "lion"
    bits(optimizer)


def test_the_factor_of_the_config_replaces_the_factor_of_the_groups():
    """`get_default_muon_param_groups` writes `adjust_lr_fn` into its groups."""
    plain, factor = bits(built(lr=0.02)), bits(built(lr=0.02, adjust_lr_fn=3.0))
    same = [torch.equal(a, b) for a, b in zip(plain, factor)]
    assert same == [not use for use in values(built(), "use_muon").values()]


@pytest.mark.parametrize(("rule", "options"), [
    ("normuon", {"beta2": 0.5}), ("muon_plus", {"normalize": "row"}), ("hyperball", {})])
def test_a_rule_brings_its_options(rule, options):
    optimizer = built(rule=rule, **options)
    plain = package().Muon(package().get_default_muon_param_groups(Model()), rule=rule)
    for group in plain.param_groups:
        group.update(options if group["use_muon"] else {})
    assert isinstance(optimizer, package().NorMuon) == (rule == "normuon")
    assert all(map(torch.equal, bits(optimizer), bits(plain)))


class Attention(nn.Module):
    """As transformers has it: separate projections, heads of the config."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=2, num_key_value_heads=2)
        self.head_dim = 4
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(8, 8, bias=False))


def test_a_clip_is_described_by_its_arguments():
    model = nn.ModuleDict({"attn": Attention()})
    optimizer = package().MuonFactory()(model, qk_clip={"threshold": 5.0, "shared_keys": "shrink"})
    assert list(optimizer.qk_clip.layers) == ["attn"]
    assert (optimizer.qk_clip.threshold, optimizer.qk_clip.shared_keys) == (5.0, "shrink")
    config = {"qk_clip": {"threshold": 5.0, "exclude": ["*"], "shared": 1}}
    with pytest.raises(ValueError, match="qk_clip: there is no key 'shared'; did you mean 'shared_keys'"):
        built(**config)


def test_the_groups_are_printed_on_demand(capsys):
    built(report=True)
    assert "embed_tokens.weight" in capsys.readouterr().out
    built(report=False)
    assert capsys.readouterr().out == ""
    run_threads(2, reported)
    assert capsys.readouterr().out.count("embed_tokens.weight") == 1  # of rank 0 only


def reported(rank, world):
    built(report=True)


def resolved_group(rank, world):
    optimizer = package().MuonFactory()(Model(), process_group="world", shard_state=True)
    own = optimizer._options.process_group is dist.group.WORLD and optimizer._options.shard_state
    return own and all(torch.isfinite(p).all() for p in bits(optimizer))


def test_world_is_found_when_the_factory_is_called():
    """Of one process there are no copies: one config serves any number."""
    assert all(run_threads(2, resolved_group))
    alone = built(process_group="world", shard_state=True)
    assert alone._options.process_group is None and not alone._options.shard_state
    unreduced = built(process_group="world", grads_are_reduced=False)
    assert unreduced._options.process_group is None and unreduced._options.grads_are_reduced


def test_world_before_the_processes_know_each_other_warns(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    match = "torch.distributed is not initialized yet, though WORLD_SIZE is 2: each"
    with pytest.warns(UserWarning, match=match) as messages:
        early = built(process_group="world", shard_state=True)
    assert early._options.process_group is None and {message.filename for message in messages} == {__file__}
    for alone in ("1", "0", "", "x"):
        monkeypatch.setenv("WORLD_SIZE", alone)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            built(process_group="world")
            built()


WRONG = {
    "misspelt": ({"wieght_decay": 0.1}, "config: there is no key 'wieght_decay'; did you mean 'weight_decay'"),
    "unknown": ({"zzz": 1}, "there is no key 'zzz'; allowed: adamw, "),
    "option of another rule": ({"rule": "hyperball", "beta2": 0.9}, "there is no key 'beta2'"),
    "text": ({"lr": "1e-3"}, "lr: '1e-3' is a text, but float is needed .YAML reads 1e-3 as a text"),
    "whole number as text": ({"ns_steps": "5"}, "ns_steps: '5' is a text, but int is needed"),
    "rate of AdamW as text": ({"adamw_lr": "1e-3"}, "adamw_lr: '1e-3' is a text, but float is needed"),
    "amsgrad": ({"amsgrad": True}, "amsgrad=True is not supported"),
    "maximize": ({"maximize": True}, "maximize=True is not supported: leave it out"),
    "differentiable": ({"differentiable": True}, "differentiable=True is not supported: leave it out"),
    "momentum beside an override": (
        {"momentum": 2.0, "overrides": {"*.up.weight": {"lr": 0.1}}}, "MuonFactory: momentum=2.0 is not allowed"),
    "eps of an override": ({"overrides": {"embed*": {"eps": -1}}},
                           r"overrides\['embed\*'\]: parameters embed_tokens.weight: eps=-1 is not allowed"),
    "eps of matrices in an override": ({"overrides": {"*.up.weight": {"eps": 1e-5}}}, "for Muon .* no key 'eps'"),
    "two names": ({"eps": 1e-8, "adamw_eps": 1e-8}, "eps and adamw_eps mean one value"),
    "betas": ({"betas": [0.9, 2.0]}, r"MuonFactory: betas=\(0.9, 2.0\) is not allowed"),
    "adam's eps": ({"eps": -1.0}, "MuonFactory: eps=-1.0 is not allowed"),
    "Muon's eps": ({"ns_eps": -1.0}, "ns_eps=-1.0 is not allowed"),
    "dtype": ({"wire_dtype": "bf61"}, "wire_dtype: there is no dtype 'bf61'; did you mean 'bf16'"),
    "group": ({"process_group": "wrld"}, "process_group: 'wrld' is not allowed: it must be 'world'"),
    "rule": ({"rule": "normoun"}, "there is no rule 'normoun'"),
    "rule in override": ({"overrides": {"*.up.weight": {"rule": "x"}}}, r"overrides\['\*.up.weight'\]: .*no rule 'x'"),
    "pattern": ({"adamw": "^layers"}, "adamw='\\^layers' matches no trainable parameter"),
    "no pattern": ({"adamw": 3}, "adamw: 3 is not allowed: it must be a pattern"),
    "regex": ({"muon": "re:("}, r"muon: 're:\(' is no regular expression"),
    "split": ({"split": "heds"}, "split='heds' is not allowed"),
    "overrides": ({"overrides": ["*"]}, "overrides: .* it must map patterns to keys of groups"),
    "keys": ({"overrides": {"*.up.weight": 0.1}}, "it must map keys to values"),
    "no match": ({"overrides": {"*.down": {"lr": 0.1}}}, r"overrides\['\*.down'\] matches no trainable parameter"),
    "second match": ({"overrides": {"*": {"lr": 0.1}, "*.up.weight": {"lr": 0.1}}}, "only parameters that patterns"),
    "key of AdamW": ({"overrides": {"*.up.weight": {"betas": [0.9, 0.9]}}}, "for Muon .* no key 'betas'; allowed"),
    "key of Muon": ({"overrides": {"embed*": {"split": "taps"}}}, "for AdamW .embed_tokens.weight.: there is no key"),
    "process group in override": (
        {"overrides": {"*.up.weight": {"process_group": "world"}}}, "for Muon .* no key 'process_group'"),
    "matrices' key with rule of AdamW": (
        {"overrides": {"embed*": {"rule": "lion", "eps": 1e-5}}}, "for AdamW .* no key 'eps'"),
    "text in override": ({"overrides": {"*.up.weight": {"lr": "1e-3"}}}, r"overrides\['\*.up.weight'\]: lr: '1e-3'"),
    "split that does not fit": (
        {"overrides": {"*.up.weight": {"split": {"rows": [3, 4]}}}}, r"MuonFactory: overrides\['\*.up.weight'\]: "
        "parameter layers.0.up.weight .*add up to 7 rows, not to 16: correct split"),
    "heads that do not fit": ({"overrides": {"*.up.weight": {"split": {"heads": 3}}}},
                              r"overrides\['\*.up.weight'\]: parameter layers.0.up.weight .*: correct split"),
    "split of some parameters": ({"split": {"heads": 2}}, r"split: \{'heads': 2\} is not .* overrides: \{pattern"),
    "betas as spelt": ({"adamw_betas": [0.9, 2.0]}, r"MuonFactory: adamw_betas=\(0.9, 2.0\) is not allowed"),
    "eps as spelt": ({"adamw_eps": -1.0}, "MuonFactory: adamw_eps=-1.0 is not allowed"),
    "rate of truth": ({"lr": True}, "MuonFactory: lr: True is a truth value, but float is needed"),
    "rate of AdamW of truth": ({"adamw_lr": False}, "MuonFactory: adamw_lr: False is a truth value"),
    "decay of truth in override": ({"overrides": {"*.up.weight": {"weight_decay": True}}},
                                   r"overrides\['\*.up.weight'\]: weight_decay: True is a truth value"),
    "threshold of truth": ({"qk_clip": {"threshold": True}}, "qk_clip: threshold: True is a truth value"),
    "what a clip leaves out": ({"qk_clip": {"exclude": 3}}, "qk_clip: exclude: 3 is not allowed"),
    "dtype of the weights": ({"rounding": "stochastic"}, "parameter layers.0.q_proj.weight .* has dtype torch.float32"),
    "rate of AdamW": ({"adamw_lr": -1.0}, "MuonFactory: adamw_lr=-1.0 is not allowed"),
    "factor as spelt": ({"adjust_lr": "spectrl"}, "MuonFactory: adjust_lr='spectrl' is not allowed"),
    "factor with its usual name": ({"adjust_lr_fn": "spectrl"}, "MuonFactory: adjust_lr_fn='spectrl' is not allowed"),
    "two factors": ({"adjust_lr": 1.0, "adjust_lr_fn": 1.0}, "adjust_lr and adjust_lr_fn mean one value"),
    "two factors in override": ({"overrides": {"*.up.weight": {"adjust_lr": 1.0, "adjust_lr_fn": 1.0}}},
                                r"overrides\['\*.up.weight'\]: two keys mean adjust_lr_fn"),
    "factor of an override": ({"overrides": {"*.up.weight": {"adjust_lr": "x"}}},
                              r"overrides\['\*.up.weight'\]: parameters .*up.weight, ...: adjust_lr='x' is not"),
    "Muon's eps as text in override": ({"overrides": {"*.up.weight": {"ns_eps": "1e-7"}}},
                                       r"overrides\['\*.up.weight'\]: ns_eps: '1e-7' is a text, but float"),
    "option of the rule": ({"rule": "dion2", "fraction": 2}, "parameters layers.0.q_proj.weight, ...: fraction=2"),
    "bytes as text": ({"workspace_bytes": "1e9"}, "workspace_bytes: '1e9' is a text, but int is needed"),
    "truth as text": ({"nesterov": "no"}, "nesterov: 'no' is a text, but bool is needed .write true or false"),
    "text for a refused option": ({"amsgrad": "false"}, "amsgrad='false' is not supported: leave it out"),
    "report": ({"report": "yes"}, "report: 'yes' is not allowed: it must be true or false"),
    "clip": ({"qk_clip": 100.0}, "qk_clip: 100.0 is not allowed: it must map arguments of QKClip.of"),
    "threshold as text": ({"qk_clip": {"threshold": "1e2"}}, "qk_clip: threshold: '1e2' is a text, but float"),
    "group of ranks": ({"process_group": True}, "process_group: True is not allowed: it must be 'world'"),
    "Trainer's name": ({"learning_rate": 0.1}, "there is no key 'learning_rate'; did you mean 'lr'"),
    "capitals": ({"Weight_Decay": 0.1}, "there is no key 'Weight_Decay'; did you mean 'weight_decay'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_speak_of_keys_of_the_config(name):
    config, message = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        built(**config)
    assert str(raised.value).startswith("MuonFactory: ")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_defaults_of_torch_change_no_error_of_a_config(device):
    """Options are tried on a matrix, whose dtype no option refuses."""
    muon = part("integrations.megatron")
    expected = (built().state_dict(), part("integrations.config").group_keys("dion2"))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device(device):
            model = Model().to_empty(device="cpu").float()
            found = package().MuonFactory()(model, overrides={"*.up.weight": {"rule": "normuon"}})
            assert len(found.param_groups) == len(expected[0]["param_groups"]) + 1
            assert part("integrations.config").group_keys("dion2") == expected[1]
            muon._try({"ns_steps": 3, "state_dtype": torch.int8})
            with pytest.raises(ValueError, match="MuonFactory: momentum=2.0 is not allowed"):
                package().MuonFactory()(model, momentum=2.0)
    finally:
        torch.set_default_dtype(torch.float32)


# dion's arguments


def optimizer_of_dion(theirs, matrices, rest, **more):
    """Ours by the arguments and groups of one of the references of dion."""
    copies = [[nn.Parameter(p.detach().clone()) for p in params] for params in (matrices, rest)]
    keys = theirs.defaults
    options = {key: keys[key] for key in ("lr", "mu", "weight_decay", "cautious_wd", "epsilon", "nesterov")}
    options["adjust_lr"] = keys["adjust_lr"]
    options |= {"muon_beta2": keys["muon_beta2"]} if "muon_beta2" in keys else {}
    inner = {key: keys[key] for key in ("num_heads", "split_sizes") if key in keys}
    make = package().DionNorMuon if "muon_beta2" in keys else package().DionMuon
    groups = [{"params": copies[0], **inner}, {"params": copies[1], "algorithm": "adamw"}]
    return sum(copies, []), make(groups, betas=(keys["beta1"], keys["beta2"]), **options, **more)


@pytest.mark.parametrize(("make", "options"), [
    (Dion, {}), (Dion, {"nesterov": True, "adjust_lr": "rms_norm"}), (Dion, {"adjust_lr": None}),
    (DionNorMuon, {}), (DionHeads, {"num_heads": 4}), (DionBlocks, {"split_sizes": (16, 8)}),
    (Dion, {"cautious_wd": True})], ids=lambda value: getattr(value, "__name__", None) or "-".join(value) or "plain")
def test_steps_with_dions_arguments_are_dions(make, options):
    matrices, rest = drawn([(24, 16), (24, 8)], [(30, 6), (7,)])
    theirs = make(matrices, rest, **options)
    ours, optimizer = optimizer_of_dion(theirs, matrices, rest)
    apart = 0.04 if "cautious_wd" in options else ROUNDING  # the sign of an update near 0 is that of its rounding
    for number in range(STEPS):
        assert_next_step_is_theirs(theirs, matrices + rest, ours, optimizer, number, apart=apart)


def test_lion_of_dion():
    """U = sign(beta1 M + (1 - beta1) G), M <- beta2 M + (1 - beta2) G, decoupled decay."""
    (p,), = drawn([(30, 6)])
    groups = [{"params": [p], "algorithm": "lion", "lr": 0.1}]
    optimizer = package().DionMuon(groups, betas=(0.8, 0.9), weight_decay=0.5)
    W, M = p.detach().double(), torch.zeros(30, 6, dtype=torch.float64)
    for step in range(3):
        G = torch.randn(30, 6, generator=torch.Generator().manual_seed(step))
        p.grad = G.clone()
        optimizer.step()
        W = W * (1 - 0.1 * 0.5) - 0.1 * (0.8 * M + 0.2 * G).sign()
        M = 0.9 * M + 0.1 * G
        torch.testing.assert_close(p.detach().double(), W, atol=1e-6, rtol=1e-6)


def test_dions_signatures():
    """By position, as dion at 0a059a4 has them."""
    (matrices,) = drawn([(8, 4)])
    optimizer = package().DionMuon(matrices, None, 0.5, 0.75, (0.25, 0.5), 0.125)
    (group,) = optimizer.param_groups
    keys = ("lr", "momentum", "weight_decay", "nesterov", "adjust_lr_fn", "ns_coefficients", "momentum_form")
    assert [group[key] for key in keys] == [0.5, 0.75, 0.125, False, "spectral_norm", "polar_express_dion", "sum"]
    (group,) = package().DionNorMuon(matrices, None, 0.5, 0.75, 0.875, use_polar_express=False).param_groups
    assert (group["beta2"], group["ns_coefficients"]) == (0.875, "quintic")
    named = package().DionMuon([("w", matrices[0])], use_triton=True, use_gram_newton_schulz=True)
    assert named.param_groups[0]["param_names"] == ["w"]


def test_flatten_of_dion_takes_a_convolution_as_one_matrix():
    conv, plain = drawn([(6, 2, 3, 3), (6, 18)])[0]
    plain.data.copy_(conv.detach().view(6, 18))
    first = package().DionMuon([conv, nn.Parameter(torch.ones(4, 4))], flatten=True)
    second = package().DionMuon([plain])
    for p in (conv, plain):
        p.grad = torch.linspace(-1, 1, 108).sin().view(p.shape)
    first.step()
    second.step()
    assert torch.equal(conv.view(6, 18), plain)


def test_an_optimizer_with_dions_arguments_can_be_copied():
    (matrices,) = drawn([(8, 4)])
    optimizer = copy.deepcopy(package().DionMuon(matrices, lr=0.5))
    assert type(optimizer) is package().DionMuon and optimizer.param_groups[0]["lr"] == 0.5
    assert all(torch.isfinite(p).all() for p in bits(optimizer))


@pytest.mark.parametrize("name", ["DionMuon", "DionNorMuon"])
def test_an_added_group_has_dions_keys_too(name):
    """And the defaults of the arguments, also in a copy."""
    (matrices, rest, more) = drawn([(8, 4)], [(8,)], [(4, 4)])
    options = {"muon_beta2": 0.25} if name == "DionNorMuon" else {}
    optimizer = getattr(package(), name)(matrices, lr=0.5, mu=0.75, adjust_lr=None, betas=(0.5, 0.25), **options)
    optimizer = copy.deepcopy(optimizer)
    optimizer.add_param_group({"params": rest, "algorithm": "adamw", "epsilon": 1e-5})
    optimizer.add_param_group({"params": more, "mu": 0.5, "num_heads": 2})
    first, adamw, added = optimizer.param_groups
    assert not adamw["use_muon"] and (adamw["lr"], adamw["betas"], adamw["eps"]) == (0.5, (0.5, 0.25), 1e-5)
    assert (added["momentum"], added["split"], added["adjust_lr_fn"]) == (0.5, {"heads": 2}, 1.0)
    assert added.get("beta2") == first.get("beta2") == options.get("muon_beta2")
    assert not {"algorithm", "mu", "muon_beta2", "num_heads", "epsilon"} & {*adamw, *added}
    for group, key in (({"use_muon": False}, "use_muon"), ({"momentum": 0.5}, "momentum")):
        with pytest.raises(ValueError, match=f"group of dion: there is no key '{key}'"):
            optimizer.add_param_group({"params": drawn([(4, 4)])[0], **group})
    assert len(optimizer.param_groups) == 3
    assert all(torch.isfinite(p).all() for p in bits(optimizer))


def ranks_of_dion(rank, world):
    (matrices,) = drawn([(8, 4), (4, 4)])
    matrices[0].device_mesh = None  # an attribute of the user's makes no DTensor
    optimizer = package().DionMuon(matrices[:1], dist.group.WORLD)
    return optimizer._options.process_group is dist.group.WORLD


def test_the_process_group_of_dion_is_that_of_copies():
    assert all(run_threads(2, ranks_of_dion))


@pytest.mark.parametrize(("options", "message"), [
    ({"newton_schulz_func": abs}, "newton_schulz_func is not supported"),
    ({"weight_decay": torch.tensor(0.1)}, "weight_decay is a tensor"),
    ({"adjust_lr": "spectral"}, "adjust_lr='spectral' must be one of"),
    ({"group": {"algorithm": "dion"}}, "algorithm='dion' must be 'muon', 'adamw' or 'lion'"),
    ({"group": {"algorithm": "normuon"}}, "algorithm='normuon' must be 'muon', 'adamw' or 'lion'"),
    ({"group": {"mu_": 0.9}}, "group of dion: there is no key 'mu_'; did you mean 'mu'"),
    ({"group": {"num_heads": 2, "split_sizes": (4, 4)}}, "exclude each other")])
def test_what_dion_has_and_this_package_has_not_is_refused(options, message):
    (matrices,) = drawn([(8, 4)])
    group = options.pop("group", {})
    with pytest.raises((ValueError, NotImplementedError), match=message):
        package().DionMuon([{"params": matrices, **group}], **options)


# torchtitan's stages


WRONG_OF_DION = {
    "rate": ({"lr": "1e-3"}, "lr: '1e-3' is a text, but float is needed"),
    "momentum as text": ({"mu": "0.9"}, "mu: '0.9' is a text"),
    "momentum": ({"mu": 2.0}, "mu=2.0 is not allowed"),
    "betas": ({"betas": (0.9, 2.0)}, r"betas=\(0.9, 2.0\) is not allowed"),
    "one beta": ({"betas": 0.9}, "betas=0.9 is not allowed: it must be two numbers"),
    "truth": ({"cautious_wd": "yes"}, "cautious_wd: 'yes' is a text, but bool"),
    "coefficients": ({"use_polar_express": "false"}, "use_polar_express: 'false' is a text, but bool"),
    "rate of truth": ({"lr": True}, "lr: True is a truth value, but float is needed"),
    "epsilon of truth": ({"epsilon": False}, "epsilon: False is a truth value"),
    "factor": ({"adjust_lr": ["rms_norm"]}, r"adjust_lr=\['rms_norm'\] must be one of"),
    "mesh": ({"distributed_mesh": "world"}, "distributed_mesh='world' is a text: pass the process group itself"),
}
WRONG_GROUPS_OF_DION = {
    "momentum": ({"mu": 2.0}, r"in group 0 \(#0\): mu=2.0 is not allowed"),
    "other rule": ({"muon_beta2": 0.5}, "there is no key 'muon_beta2'"),
    "heads as text": ({"num_heads": "2"}, "num_heads='2' is not allowed: it must be a whole number"),
    "heads": ({"num_heads": 3}, "num_heads=3 does not divide the 8 rows"),
    "sizes": ({"split_sizes": [3, 4]}, r"split_sizes=\[3, 4\] add up to 7 rows, but a parameter has 8"),
    "a size": ({"split_sizes": 8}, "split_sizes=8 is not allowed: it must be a list"),
    "misspelt": ({"num_haeds": 2}, "there is no key 'num_haeds'; did you mean 'num_heads'"),
    "epsilon": ({"algorithm": "adamw", "epsilon": -1.0}, "epsilon=-1.0 is not allowed"),
    "beta": ({"algorithm": "adamw", "beta1": 2.0}, "beta1=2.0 is not allowed"),
    "algorithm": ({"algorithm": "adam"}, "algorithm='adam' must be 'muon', 'adamw' or 'lion'"),
}


@pytest.mark.parametrize("name", WRONG_OF_DION)
def test_errors_speak_of_dions_arguments(name):
    options, message = WRONG_OF_DION[name]
    with pytest.raises(ValueError, match=f"^DionMuon: .*{message}"):
        package().DionMuon(drawn([(8, 4)])[0], **options)


@pytest.mark.parametrize("name", WRONG_GROUPS_OF_DION)
def test_errors_speak_of_keys_of_dions_groups(name):
    """At construction and when a group is added."""
    keys, message = WRONG_GROUPS_OF_DION[name]
    with pytest.raises(ValueError, match=f"^DionMuon: .*{message}"):
        package().DionMuon([{"params": drawn([(8, 4)])[0], **keys}])
    optimizer = package().DionMuon(drawn([(8, 4)])[0])
    with pytest.raises(ValueError, match=f"^DionMuon: .*{message.replace('group 0', 'group 1')}"):
        optimizer.add_param_group({"params": drawn([(8, 4)])[0], **keys})
    with pytest.raises(ValueError, match="DionMuon: group of dion: the key 'params' is missing"):
        optimizer.add_param_group({"lr": 0.1})
    assert len(optimizer.param_groups) == 1


def test_dions_parameters_are_given_in_groups_or_without():
    """An iterator that is used up has no parameters; an optimizer without any stepped nothing."""
    with pytest.raises(ValueError, match="DionMuon: .*empty parameter list"):
        package().DionMuon(iter(()))
    with pytest.raises(ValueError, match="DionMuon: params has groups and a Parameter: put parameters beside"):
        package().DionMuon([{"params": drawn([(8, 4)])[0]}, *drawn([(8, 4)])[0]])


def test_a_factor_has_dions_name_too():
    """Some frameworks take keys that end with _fn for functions to import."""
    optimizer = built(adjust_lr=3.0, overrides={"layers.0.q_proj.weight": {"adjust_lr": 2.0}})
    factors = values(optimizer, "adjust_lr_fn")
    assert (factors["layers.0.q_proj.weight"], factors["layers.1.q_proj.weight"]) == (2.0, 3.0)


def test_stages_keep_the_patterns_that_concern_them():
    of_part, warn = part("integrations.titan")._values_of_part, part("integrations.titan")._warn_unmatched
    overrides = {"lm_head*": {"lr": 1.0}, "*.q*": {"lr": 2.0}}
    config = {"lr": 0.1, "adamw": ["embed*", "*.up.weight"], "overrides": overrides}
    names = ["layers.0.q_proj.weight", "layers.0.up.weight"]
    assert of_part(config, names, names) == {
        "lr": 0.1, "adamw": ["*.up.weight"], "overrides": {"*.q*": {"lr": 2.0}}, "allow_no_matrices": True}
    # The first override that matches a name counts, so one behind it that matches no further name is left out
    shadowed = {"*.q*": {"lr": 2.0}, "layers.0.q*": {"lr": 3.0}}
    assert of_part({"overrides": shadowed}, names, names)["overrides"] == {"*.q*": {"lr": 2.0}}
    # All splits count; a pattern that matches only vectors of a part is left out
    splits = {"*.q*": {"heads": 2}, "re:q_proj": {"heads": 2}, "*.bias": None, "lm_head*": None}
    kept = of_part({"named_splits": splits}, [*names, "layers.0.up.bias"], names)["named_splits"]
    assert kept == {"*.q*": {"heads": 2}, "re:q_proj": {"heads": 2}}
    with pytest.warns(UserWarning, match="overrides: 'layers.0.q\\*' matches no"):
        warn({"overrides": shadowed}, names, names)
    with pytest.warns(UserWarning, match="adamw: 'embed\\*' matches no trainable parameter of this rank's parts"):
        with pytest.warns(UserWarning, match="overrides: 'lm_head\\*' matches no"):
            warn(config, names, names)
    with pytest.warns(UserWarning, match="named_splits: '\\*.bias' matches no"):
        warn({"named_splits": {"*.q*": {"heads": 2}, "*.bias": None}}, [*names, "layers.0.up.bias"], names)


def test_no_framework_needs_more_than_five_lines_of_code():
    """Besides imports, and besides blank lines. Every block imports what it uses of this package."""
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 10
    for block in blocks:
        assert ";" not in block
        code = [line for line in block.splitlines() if line and not re.match(r"import |from \S+ import ", line)]
        assert len(code) <= 5
        if re.search(r"\b(?:optimizer|sharded_muon)\.[A-Za-z]", "\n".join(code)):
            assert re.search(r"^import sharded_muon( as optimizer)?$", block, re.MULTILINE), block


def test_without_torchtitan_its_entry_says_so(monkeypatch):
    part("integrations.titan")._container.cache_clear()
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(ImportError, match="torchtitan"):
        package().torchtitan_muon(lr=1e-3)

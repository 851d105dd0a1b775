"""State of the Muons in tests/peer_rules.py goes on here: the next step is theirs, or they are
refused by name.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from tests import peer_rules
from tests import test_checkpoint_foreign as foreign
from tests.peer_rules import (
    DeepSpeed,
    DeepSpeedAlone,
    Emerging,
    Megatron,
    Muonium,
    MuoniumNorMuon,
    Nanochat,
    NanochatExpress,
    Timm,
)
from tests.ranks import package
from tests.test_checkpoint_foreign import REST, SHAPES, drawn, train

STEPS = 3
EXACT = {"wire_dtype": torch.float32, "ns_dtype": torch.float32}


def flagged(matrices, rest):
    return [{"params": matrices}, {"params": rest, "use_fallback": True, "lr": 0.03}]


SOURCES = {
    "Emerging-Optimizers": (Emerging, {}),
    "Emerging-Optimizers, AdamW's RMS": (Emerging, {"extra_scale_factor": 0.2, "nesterov": True}),
    "Emerging-Optimizers, Polar Express": (
        Emerging,
        {
            "coefficient_type": "polar_express",
            "num_ns_steps": 9,
            "scale_mode": "unit_rms_norm",
            "extra_scale_factor": 0.3,
        },
    ),
    "Emerging-Optimizers, cycled": (Emerging, {"num_ns_steps": 7, "scale_mode": "shape_scaling"}),
    **{
        f"Emerging-Optimizers, {kind}": (
            Emerging,
            {"coefficient_type": kind, "num_ns_steps": steps},
        )
        for kind, steps in (
            ("simple", 6),
            ("cans", 5),
            ("aol", 4),
            ("deepseekv4", 10),
            ("cubic5", 5),
        )
    },
    "Emerging-Optimizers, independent decay": (
        Emerging,
        {"weight_decay_method": "independent", "extra_scale_factor": 0.5},
    ),
    "Emerging-Optimizers, PaLM's decay": (
        Emerging,
        {
            "weight_decay_method": "palm",
            "extra_scale_factor": 0.5,
            "keys": {"weight_decay": 200.0},
        },
    ),
    "Megatron": (Megatron, {}),
    "Megatron, Nesterov": (
        Megatron,
        {"nesterov": True, "extra_scale_factor": 0.5, "scale_mode": "unit_rms_norm"},
    ),
    "timm": (Timm, {}),
    "timm, fallback": (Timm, {"fallback_lr_scale": 0.1}),
    "timm, two groups": (
        Timm,
        {"groups": flagged, "fallback_lr_scale": 0.5, "ns_coefficients": "original"},
    ),
    "timm, Polar Express": (
        Timm,
        {"ns_coefficients": "polar_express", "safety_factor": 1.01, "ns_steps": 6},
    ),
    "timm, safer": (
        Timm,
        {"ns_coefficients": "polar_express_safer", "ns_steps": 9, "adjust_lr_fn": "rms_to_rms"},
    ),
    "timm, a triple": (
        Timm,
        {"ns_coefficients": (2.0, -1.5, 0.5), "safety_factor": 1.1, "adjust_lr_fn": "original"},
    ),
    "timm, triples": (
        Timm,
        {"ns_coefficients": [(3.0, -3.2, 1.2), (2.0, -1.5, 0.5)], "ns_steps": 4},
    ),
    "nanochat": (Nanochat, {}),
    "nanochat, no Nesterov": (Nanochat, {"nesterov": False, "ns_steps": 4}),
    "nanochat, Polar Express": (NanochatExpress, {}),
    "nanochat, 3 steps": (NanochatExpress, {"ns_steps": 3}),
    "DeepSpeed": (DeepSpeed, {}),
    "DeepSpeed, standard": (DeepSpeed, {"ns_method": "standard"}),
    "DeepSpeed, Muon alone": (DeepSpeedAlone, {}),
    "muonium": (Muonium, {}),
    "muonium, Newton-Schulz": (
        Muonium,
        {"orthogonalization_strategy": "newton_schulz", "ns_steps": 6, "nesterov": False},
    ),
    "muonium, 4 steps": (Muonium, {"ns_steps": 4}),
    "muonium's NorMuon": (MuoniumNorMuon, {}),
}
AMBIGUOUS = (Emerging, Nanochat)  # sources whose keys others have, too


def problem(source, shapes=SHAPES):
    matrices, rest = drawn(shapes, REST)
    make, options = SOURCES[source]
    rest = rest if make.takes_rest else []
    return matrices + rest, make(matrices, rest, **options)


def converted(theirs, saved, **more):
    named = {"source": theirs.name} if type(theirs) in AMBIGUOUS else {}
    return package().convert_state_dict(saved, **named, **theirs.arguments, **more)


def heir_of(theirs, params, **options):
    """Ours on copies of their parameters, with options that are not theirs."""
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    groups = [
        {"params": [p for p in copies if p.ndim == 2 and min(p.shape) > 6]},
        {"params": [p for p in copies if p.ndim < 2 or min(p.shape) <= 6], "use_muon": False},
    ]
    optimizer = getattr(package(), theirs.ours)(
        [g for g in groups if g["params"]], lr=9.0, momentum=0.5, **EXACT, **options
    )
    return copies, optimizer


assert_next_step_is_theirs = functools.partial(
    foreign.assert_next_step_is_theirs, number=STEPS, moved=1e-4, apart=1e-4
)


@pytest.mark.parametrize("source", SOURCES)
def test_the_next_step_is_theirs(source):
    params, theirs = problem(source)
    train(theirs, params, range(STEPS))
    saved = theirs.state_dict()
    kept = copy.deepcopy(saved)
    ours, optimizer = heir_of(theirs, params)
    optimizer.load_state_dict(converted(theirs, saved))
    assert repr(saved) == repr(kept)
    assert_next_step_is_theirs(theirs, params, ours, optimizer)


@pytest.mark.parametrize("source", SOURCES)
def test_the_state_is_a_mean_in_our_names(source):
    params, theirs = problem(source)
    train(theirs, params, range(STEPS))
    ours, optimizer = heir_of(theirs, params)
    optimizer.load_state_dict(converted(theirs, theirs.state_dict()))
    for p, q in zip(ours, params):
        state, kept = theirs.state[q], optimizer.state[p]
        if "exp_avg" in state:
            assert set(kept) == {"step", "exp_avg", "exp_avg_sq"} and kept["step"] == STEPS
            continue
        assert set(kept) == {"momentum_buffer"} | (
            {"second_moment"} if theirs.ours == "NorMuon" else set()
        )
        momentum = state["momentum_buffer"] * (1 - 0.9 if theirs.sums else 1.0)
        torch.testing.assert_close(kept["momentum_buffer"], momentum, rtol=1e-6, atol=0)


def test_a_state_dict_with_keys_of_two_sources_is_refused_with_both_names():
    """Keller Jordan's and Emerging-Optimizers' groups have the same keys, and other rules."""
    params, theirs = problem("Emerging-Optimizers")
    train(theirs, params, range(STEPS))
    saved = theirs.state_dict()
    with pytest.raises(
        ValueError,
        match="Keller Jordan's Muon and Emerging-Optimizers' Muon.*source='keller_jordan' "
        "or source='emerging_optimizers'",
    ):
        package().convert_state_dict(saved)
    as_jordans = package().convert_state_dict(saved, source="keller_jordan")["param_groups"][0]
    assert as_jordans["nesterov"] is True and as_jordans["ns_coefficients"] == "jordan"
    params, theirs = problem("nanochat")
    with pytest.raises(ValueError, match="source='keller_jordan' or source='nanochat'"):
        package().convert_state_dict(theirs.state_dict())
    with pytest.raises(
        ValueError,
        match="group 0 has nesterov, ns_steps, which Keller Jordan's Muon does not write",
    ):
        package().convert_state_dict({**theirs.state_dict(), "state": {}}, source="keller_jordan")


@pytest.mark.parametrize("source", SOURCES)
def test_an_unconverted_group_is_refused_with_what_to_do(source):
    """load_state_dict refuses Muon's group of each source, for its keys or for those that it lacks.
    """
    params, theirs = problem(source)
    train(theirs, params, range(1))
    optimizer = package().Muon([nn.Parameter(torch.randn(4, 3))])
    group = {**theirs.state_dict()["param_groups"][0], "params": [0]}
    with pytest.raises(ValueError, match="parameter group 0 was saved by .* convert_state_dict"):
        optimizer.load_state_dict(
            {"state": {0: {"momentum_buffer": torch.zeros(4, 3)}}, "param_groups": [group]}
        )
    assert not optimizer.state


def changed(source, number=0, **more):
    """A state dict of a few steps, with options of a group replaced."""
    params, theirs = problem(source)
    train(theirs, params, range(STEPS))
    saved = copy.deepcopy(theirs.state_dict())
    saved["param_groups"][number].update(more)
    return theirs, saved


@pytest.mark.parametrize(
    ("source", "number", "key", "value", "title"),
    [
        ("timm", 0, "algo", "adamuon", "timm's Muon"),
        ("timm", 0, "scale_eps", True, "timm's Muon"),
        ("timm", 0, "adjust_lr_fn", None, "timm's Muon"),
        ("timm", 0, "eps", 1e-3, "timm's Muon"),
        ("timm", 0, "nesterov", True, "timm's Muon"),
        ("nanochat, Polar Express", 0, "beta2", 0.9, "nanochat's Muon"),
        ("nanochat, Polar Express", 0, "weight_decay", 0.1, "nanochat's Muon"),
        ("DeepSpeed", 1, "bias_correction", False, "DeepSpeed's Muon"),
        ("DeepSpeed", 1, "amsgrad", True, "DeepSpeed's"),
        ("muonium", 0, "maximize", True, "muonium's Muon"),
        ("muonium", 0, "split_sizes", (8, 8, 8), "muonium's Muon"),
        ("muonium", 0, "wd", 0.1, "muonium's Muon"),
        ("muonium", 1, "amsgrad", True, "muonium's Muon"),
        ("muonium", 1, "decoupled_weight_decay", False, "muonium's Muon"),
    ],
)
def test_options_without_a_counterpart_are_refused_with_option_and_source(
    source, number, key, value, title
):
    theirs, saved = changed(source, number, **{key: value})
    key = "use_cautious_wd" if key == "wd" else key
    with pytest.raises(
        NotImplementedError, match=rf"group {number} has {key}=.* an option of {title}.* set {key}="
    ):
        converted(theirs, saved)


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        (
            "Emerging-Optimizers",
            {"weight_decay_method": "l2"},
            "weight_decay_method='l2'.*Emerging-Optimizers' Muon",
        ),
        (
            "Megatron",
            {"split_qkv": True},
            "split_qkv=True, an argument of Megatron-LM's Muon.* set split_qkv=False as an",
        ),
        ("Megatron", {"tp_mode": "blockwise"}, "tp_mode='blockwise'.*Megatron"),
        (
            "Megatron",
            {"use_decoupled_weight_decay": False},
            "weight_decay_method='l2'.*Megatron-LM's Muon",
        ),
        ("DeepSpeed", {"muon_num_heads": 4}, "muon_num_heads=4.*DeepSpeed's Muon"),
        ("DeepSpeed", {"adam_w_mode": False}, "adam_w_mode=False.*DeepSpeed's Muon"),
    ],
)
def test_arguments_without_a_counterpart_are_refused(source, arguments, message):
    params, theirs = problem(source)
    train(theirs, params, range(STEPS))
    theirs.arguments = {**theirs.arguments, **arguments}
    with pytest.raises(NotImplementedError, match=message):
        converted(theirs, theirs.state_dict())


def test_megatrons_fused_projections_are_refused_unless_there_are_none():
    """Its default orthogonalizes Q, K and V of a fused weight apart, and no key says which weights
    these are.
    """
    params, theirs = problem("Megatron")
    with pytest.raises(NotImplementedError, match="split_qkv=True.* set split_qkv=False"):
        package().convert_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        (
            "emerging_optimizers",
            {"coefficient_type": "custom"},
            "coefficient_type='custom' is not known.*simple, quintic",
        ),
        ("emerging_optimizers", {"scale_mode": "rms"}, "scale_mode='rms' is not known.*spectral"),
        ("emerging_optimizers", {"extra_scale_factor": 0}, "extra_scale_factor=0.0 is not allowed"),
        (
            "emerging_optimizers",
            {"ns_steps": 5},
            "ns_steps=5 is no argument .*allowed are nesterov",
        ),
        ("keller_jordan", {"nesterov": False}, "nesterov=False is no argument .*allowed are none"),
        ("kellerjordan", {}, "source='kellerjordan' is not known.*torch, keller_jordan, motif"),
    ],
)
def test_wrong_arguments_are_refused(source, arguments, message):
    params, theirs = problem("Emerging-Optimizers")
    with pytest.raises(ValueError, match=message):
        package().convert_state_dict(theirs.state_dict(), source, **arguments)


def test_a_source_that_the_keys_contradict_is_refused():
    theirs, saved = changed("timm")
    with pytest.raises(ValueError, match="source='dion', but .*keys that timm's Muon alone writes"):
        package().convert_state_dict(saved, source="dion")
    with pytest.raises(
        ValueError,
        match="group 0 or its states have no key 'algorithm', which those of Dion's Muon",
    ):
        package().convert_state_dict(problem("Emerging-Optimizers")[1].state_dict(), source="dion")


@pytest.mark.parametrize("source", ["timm", "DeepSpeed", "muonium"])
def test_unknown_keys_are_refused(source):
    theirs, saved = changed(source, lookahead=2)
    with pytest.raises(
        ValueError, match="group 0 has lookahead, which .* does not write: another optimizer"
    ):
        converted(theirs, saved)
    theirs, saved = changed(source, name="matrices", lr_scale=0.5)
    converted(theirs, saved)


@pytest.mark.parametrize(
    ("source", "shape"), [("timm", (16, 8, 3, 3)), ("timm", (4, 8, 8)), ("DeepSpeed", (8, 4, 3, 3))]
)
def test_flattened_convolutions_are_refused(source, shape):
    theirs, saved = changed(source)
    saved["state"][0]["momentum_buffer"] = torch.zeros(shape)
    with pytest.raises(NotImplementedError, match=f"group 0 has {len(shape)}-D parameters"):
        converted(theirs, saved)


def test_adaptive_muon_is_refused():
    """Of Emerging-Optimizers, by the keys of its states."""
    theirs, saved = changed("Emerging-Optimizers", beta2=0.95, eps=1e-8)
    saved["state"][0]["moment2_buffer"] = torch.zeros(24, 1)
    with pytest.raises(
        NotImplementedError, match="AdaptiveMuon, which Emerging-Optimizers' Muon comes with"
    ):
        package().convert_state_dict(saved)


def test_flat_partitions_are_refused():
    """DeepSpeed's ZeRO keeps them."""
    theirs, saved = changed("DeepSpeed")
    saved["state"] = {0: {"momentum_buffer": torch.zeros(384)}}
    saved["param_groups"][0]["params"], saved["param_groups"][1]["params"] = [0], []
    with pytest.raises(NotImplementedError, match="DeepSpeed's Muon under ZeRO"):
        converted(theirs, saved)


def nanochats():
    """The state dict of MuonAdamW (92d63d4): one state for the matrices of a group."""
    state = {
        "momentum_buffer": torch.zeros(2, 8, 4),
        "second_momentum_buffer": torch.zeros(2, 8, 1),
    }
    muon = {
        "kind": "muon",
        "lr": 0.02,
        "momentum": 0.95,
        "ns_steps": 5,
        "beta2": 0.9,
        "weight_decay": 0.1,
    }
    adam = {"kind": "adamw", "lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-10, "weight_decay": 0.0}
    return {
        "state": {0: state},
        "param_groups": [{**muon, "params": [0, 1]}, {**adam, "params": [2]}],
    }


def moddeds():
    """The state dict of the medium track's NorMuon (f411b3d): state in the groups."""
    group = {
        "lr": 0.02,
        "momentum": 0.95,
        "beta2": 0.95,
        "weight_decay": 0.1,
        "chunk_size": 2,
        "params": [0, 1],
        "momentum_buffer": torch.zeros(2, 8, 4),
        "second_momentum_buffer": torch.zeros(2, 8, 1),
        "param_lr_cpu": torch.ones(2),
        "param_wd_cpu": torch.ones(2),
    }
    return {"state": {}, "param_groups": [group]}


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (nanochats(), "group 0 is of nanochat's MuonAdamW, .* has no counterpart here"),
        (moddeds(), "group 0 is of modded-nanogpt's NorMuon, .* has no counterpart here"),
        ({"param_states": {}, "param_cfgs": {}}, "a checkpoint of modded-nanogpt's NorMuon"),
        (
            {"optimizer": {}, "fp32_from_fp16_params": []},
            "a checkpoint of Megatron-LM's Muon.*pass its 'optimizer'",
        ),
        (
            {"zero_stage": 2, "single_partition_of_fp32_groups": []},
            "a checkpoint of DeepSpeed's Muon.*flat partitions",
        ),
        (
            {"zero_stage": 3, "fp32_flat_groups": []},
            "a checkpoint of DeepSpeed's Muon.*flat partitions",
        ),
    ],
)
def test_rules_without_a_counterpart_are_refused_by_name(saved, message):
    with pytest.raises(NotImplementedError, match=message):
        package().convert_state_dict(saved)


def test_a_list_of_state_dicts_is_refused():
    with pytest.raises(ValueError, match="this is a list: pass it as state_dict"):
        package().convert_state_dict([{}])


def test_muoniums_decay_is_that_of_one_shape():
    """It multiplies wd by sqrt(max(1, R / C)), so a group of one ratio can go on, and no other."""
    SOURCES["decayed"] = (Muonium, {"wd": 0.3, "use_cautious_wd": False})
    try:
        params, theirs = problem("decayed", [(24, 6 * 2), (32, 16)])
        train(theirs, params, range(STEPS))
        ours, optimizer = heir_of(theirs, params)
        optimizer.load_state_dict(converted(theirs, theirs.state_dict()))
        assert_next_step_is_theirs(theirs, params, ours, optimizer)
        params, theirs = problem("decayed")
        train(theirs, params, range(STEPS))
        with pytest.raises(
            NotImplementedError, match=r"wd=0.3, and muonium's Muon multiplies it by sqrt"
        ):
            converted(theirs, theirs.state_dict())
    finally:
        del SOURCES["decayed"]


def test_timms_group_is_parted_by_the_states():
    """Matrices first; without states nothing tells which parameters are which."""
    params, theirs = problem("timm")
    train(theirs, params, range(STEPS))
    saved = theirs.state_dict()
    saved["param_groups"][0]["param_names"] = list("abcdef")
    groups = package().convert_state_dict(saved)["param_groups"]
    assert [group["use_muon"] for group in groups] == [True, False]
    assert [group["param_names"] for group in groups] == [["a", "c", "e", "f"], ["b", "d"]]
    del saved["state"][1]
    with pytest.raises(
        ValueError, match="group 0 does not say whether timm's Muon steps parameter 1"
    ):
        package().convert_state_dict(saved)


def test_timms_versions_with_adamw_lr():
    """fallback_lr_scale was adamw_lr / lr, of the rate before a schedule."""
    params, theirs = problem("timm, fallback")
    train(theirs, params, range(STEPS))
    saved = copy.deepcopy(theirs.state_dict())
    group = saved["param_groups"][0]
    group.update(adamw_lr=0.004, initial_lr=0.04)
    for key in ("fallback_lr_scale", "algo", "scale_eps", "capturable"):
        del group[key]
    ours, optimizer = heir_of(theirs, params)
    optimizer.load_state_dict(converted(theirs, saved))
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.002)
    assert_next_step_is_theirs(theirs, params, ours, optimizer)


def test_rates_of_schedules_are_scaled_along():
    """A factor that no scale here has goes into lr, so also into what a schedule starts from; lr wd
    stays.
    """
    theirs, saved = changed("Megatron, Nesterov", initial_lr=0.04)
    group = converted(theirs, saved)["param_groups"][0]
    assert (group["lr"], group["initial_lr"], group["max_lr"], group["weight_decay"]) == (
        0.01,
        0.02,
        0.01,
        0.2,
    )


def test_dions_steps_are_those_of_each_parameter():
    """A parameter without gradients is behind the group's count; newer versions keep its own."""
    saved = foreign.saved_by("Dion")
    saved["state"][4]["step_dev"] = torch.tensor(2.0)
    states = package().convert_state_dict(saved)["state"]
    assert states[4]["step"] == 2 and states[5]["step"] == saved["param_groups"][1]["step"]


@pytest.mark.parametrize(("given", "name"), [(True, "polar_express_dion"), (False, "quintic")])
def test_dions_coefficients_may_be_told(given, name):
    saved = foreign.saved_by("Dion")
    groups = package().convert_state_dict(saved, use_polar_express=given)["param_groups"]
    assert groups[0]["ns_coefficients"] == name and "ns_coefficients" not in groups[1]


def test_quantized_state_is_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    theirs, saved = changed("muonium")
    plain = saved["state"][0]["momentum_buffer"]
    saved["state"][0]["momentum_buffer"] = TwoTensor(plain, plain)
    with pytest.raises(NotImplementedError, match="muonium's Muon keeps state as TwoTensor"):
        converted(theirs, saved)


def test_other_optimizers_momentum_is_refused_when_loaded():
    """SGD's momentum is a sum of gradients; before, its state was taken for ours."""
    params = [nn.Parameter(torch.randn(4, 3))]
    theirs = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    train(theirs, params, range(1))
    saved = theirs.state_dict()
    with pytest.raises(ValueError, match="group 0 was saved by torch.optim.SGD"):
        package().Muon(params).load_state_dict(saved)
    for key in ("dampening", "nesterov"):
        del saved["param_groups"][0][key]
    with pytest.raises(
        ValueError, match="saved by another optimizer: it has momentum, but no adjust_lr_fn"
    ):
        package().Muon(params).load_state_dict(saved)


@pytest.mark.parametrize("name", ["NAdam", "RAdam"])
def test_averages_of_nadam_and_radam_are_not_taken_for_those_of_adamw(name):
    params = [nn.Parameter(torch.randn(8))]
    theirs = getattr(torch.optim, name)(params, decoupled_weight_decay=True)
    train(theirs, params, range(1))
    saved = theirs.state_dict()
    ours = package().Muon([{"params": params, "use_muon": False}])
    with pytest.raises(ValueError, match=f"group 0 was saved by torch.optim.{name}"):
        ours.load_state_dict(saved)
    del saved["param_groups"][0]["decoupled_weight_decay"]
    ours.load_state_dict(saved)
    assert torch.equal(ours.state[params[0]]["exp_avg_sq"], theirs.state[params[0]]["exp_avg_sq"])
    adamw = torch.optim.AdamW(params)
    train(adamw, params, range(1))
    ours.load_state_dict(adamw.state_dict())
    of_radam = package().Muon([{**group, "use_muon": False} for group in theirs.param_groups])
    of_radam.load_state_dict(of_radam.state_dict())


def test_keys_that_the_own_group_has_are_no_marks():
    """Somebody may keep a number in our groups under a name that another Muon writes."""
    optimizer = package().Muon([nn.Parameter(torch.randn(4, 3))])
    optimizer.param_groups[0]["mu"] = 1
    optimizer.param_groups[0]["decoupled_weight_decay"] = True
    optimizer.load_state_dict(optimizer.state_dict())


def test_the_references_state_what_they_are():
    assert {make.name for make, _ in SOURCES.values()} == {
        "emerging_optimizers",
        "megatron",
        "timm",
        "nanochat",
        "deepspeed",
        "muonium",
    }
    assert peer_rules.Peer.name is None

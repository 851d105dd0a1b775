"""Parameter groups, parameters, arguments and variables as other tools and users bring them: taken as torch takes them,
or refused at construction in words that say which.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import paths
from tests.ranks import package, part, run_ranks, run_threads
from tests.test_bad_input import matrix, refuse
from tests.test_muon import same

# keys --------------------------------------------------------------------------------------------------------------

OTHERS = {"name": "decoder", "lr_scale": 0.5, "lr_multiplier": 0.5, "wd_multiplier": 2.0, "is_last_layer": False,
          "rho": 0.05, "adaptive": True, "weight_decay_mult": 0.1, "base_lr": 1.0, "layer_decay": 0.75,
          "apply_decay": True, "label": "head", "group_names": ("a",), "callback": len, 3: "a number"}


def stepped(params, extra):
    groups = [{"params": params[:1], **extra}, {"params": params[1:], "use_muon": False, **extra}]
    opt = package().Muon(groups, lr=0.1)
    for p in params:
        p.grad = torch.full_like(p, 0.5).cumsum(0)
    opt.step()
    return opt


@pytest.mark.parametrize("key", OTHERS, ids=str)
def test_keys_of_others_are_kept_without_effect(key, tmp_path, optimizer):
    params = [matrix(), matrix(4)]
    plain = copy.deepcopy(params)
    opt = stepped(params, {key: OTHERS[key]})
    stepped(plain, {})
    assert same(params, plain)
    other = package().Muon([{"params": [matrix()]}, {"params": [matrix(4)], "use_muon": False}])
    other.load_state_dict(opt.state_dict())
    assert [group[key] for group in other.param_groups] == [OTHERS[key]] * 2
    names = [("a", matrix()), ("b", matrix())]
    named = [package().Muon([{"params": [pair], key: OTHERS[key]}]) for pair in names[:1] * 2]
    optimizer.export_state(named[0], tmp_path / "state")
    optimizer.import_state(named[1], tmp_path / "state")
    assert named[1].param_groups[0][key] == OTHERS[key]


class SharpnessAware(torch.optim.Optimizer):
    """A wrapper as there are many: the base optimizer is made from groups that have all arguments and the wrapper's."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)


@pytest.mark.parametrize("options", [{"lr": 0.02}, {"momentum": 0.8, "nonfinite": "skip", "adamw_betas": (0.8, 0.9),
                                                    "wire_dtype": torch.float32, "capturable": False}], ids=str)
def test_groups_that_have_all_arguments_of_the_optimizer(options, optimizer):
    wrapper = SharpnessAware([{"params": [matrix()]}, {"params": [matrix(3)], "use_muon": False}], optimizer.Muon,
                             **options)
    groups = wrapper.base.param_groups
    assert groups[0]["rho"] == 0.05 and groups[1]["betas"] == options.get("adamw_betas", (0.9, 0.95))
    again = copy.deepcopy(wrapper.base.state_dict())
    wrapper.base.load_state_dict(again)
    assert wrapper.base.param_groups[0]["rho"] == 0.05


@pytest.mark.parametrize(("key", "value"), [("nonfinite", "skip"), ("wire_dtype", torch.float32), ("adamw_eps", 1e-6),
                                            ("capturable", True), ("adamw_betas", np.ones(2))], ids=str)
def test_an_argument_of_the_optimizer_in_a_group(key, value):
    """It would be without effect there."""
    refuse([f"{key}=", "argument of the optimizer", "pass it to the optimizer"], [{"params": [matrix()], key: value}])


@pytest.mark.parametrize(("key", "meant"), [
    ("wieght_decay", "weight_decay"), ("ns_step", "ns_steps"), ("ns_coef", "ns_coefficients"), ("use_moun", "use_muon"),
    ("Momentum", "momentum"), ("LR", "lr"), ("weight-decay", "weight_decay"), ("adjust_lr", "adjust_lr_fn"),
    ("nestrov", "nesterov"), ("beta", "betas"), ("Eps", "eps"), ("learning_rate", "lr"), ("wd", "weight_decay"),
    ("epsilon", "eps"), ("muon", "use_muon"), ("use_adamw", "use_muon"), ("param_name", "param_names")])
def test_a_misspelling_of_a_key_is_refused(key, meant):
    refuse([f"unknown key {key!r}, which resembles {meant!r}", "allowed are", "rename"],
           [{"params": [matrix()], key: 0.1}])


@pytest.mark.parametrize("key", ["maximize", "amsgrad", "differentiable"])
def test_options_of_torch_that_change_a_step(key, optimizer):
    refuse([f"{key}=True"], [{"params": [matrix()], key: True}])
    assert optimizer.Muon([{"params": [matrix()], key: False}]).param_groups[0][key] is False


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# keys of live groups -------------------------------------------------------------------------------------------------

def live():
    """A Muon of a matrix and a vector that has taken a step, and the parameters with their gradients."""
    params = [matrix(), matrix(4)]
    return params, stepped(params, {})


def all_arguments():
    options = vars(part("params.config").MuonConfig())
    return {**options, "adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8}


def test_each_argument_holds_for_all_groups_or_is_a_key_of_one(optimizer):
    """So that a new argument is either taken from live groups or refused there."""
    keys = {"params", *part("params.checks.group_keys").GROUP_KEYS, *all_arguments()}
    assert set(inspect.signature(optimizer.Muon).parameters) <= keys


@pytest.mark.parametrize("number", [0, 1])
def test_what_has_no_effect_in_a_live_group_is_refused(number, optimizer):
    """Nothing changes, and steps go on without the key."""
    params, opt = live()
    before, group = copy.deepcopy(params), opt.param_groups[number]
    said = {key: "is an argument of the optimizer.*pass it to the optimizer" for key in all_arguments()}
    del said["process_group"]  # has a message of its own
    if number:
        del said["state_dtype"]
    said |= {"wieght_decay": "resembles 'weight_decay'", "wd": "resembles 'weight_decay'",
             "beta2": "only groups of NorMuon", "maximize": "no such option"}
    for key, text in said.items():
        group[key] = 0.5
        if key == "wd":
            opt.add_param_group({"params": [matrix()]})
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"group {number} \(#0\): .*{key}.*{text}"):
                opt.step()
        del group[key]
    was = group.pop("use_muon")
    with pytest.raises(ValueError, match=rf"group {number} \(#0\): the key use_muon is missing"):
        opt.step()
    group["use_muon"] = was
    assert same(params, before)
    opt.step()
    assert not same(params, before)


def test_values_of_keys_that_were_there_are_looked_at_again(optimizer):
    """A key with the value of the optimizer contradicts nothing, until the value changes."""
    params = [matrix(), matrix(4)]
    opt = stepped(params, {"nonfinite": "propagate", "maximize": False, "wire_dtype": torch.bfloat16})
    for key, value in (("nonfinite", "skip"), ("maximize", True)):
        was, opt.param_groups[1][key] = opt.param_groups[1][key], value
        with pytest.raises(ValueError, match=f"group 1 .*{key}={value!r}"):
            opt.step()
        opt.param_groups[1][key] = was
    opt.param_groups[0]["nonfinite"] = "".join(["propa", "gate"])  # equal, and another object
    opt.step()


def test_a_key_that_only_groups_of_adamw_have_is_refused_once_the_group_is_muons(optimizer):
    group = {"params": [p := matrix()], "use_muon": False, "state_dtype": torch.bfloat16}
    opt = optimizer.Muon([group])
    p.grad = torch.ones_like(p)
    opt.step()
    opt.param_groups[0]["use_muon"] = True
    with pytest.raises(ValueError, match="state_dtype=torch.bfloat16 is an argument of the optimizer"):
        opt.step()


def test_keys_of_others_in_live_groups_are_kept_in_silence(optimizer):
    params = [matrix(), matrix(4)]
    plain = copy.deepcopy(params)
    opt, other = stepped(params, {}), stepped(plain, {})
    with no_warning():
        for key, value in {**OTHERS, "initial_lr": 1.0, "swap": 1, "layer_name": "x"}.items():
            for group in opt.param_groups:
                group[key] = value
            opt.step()
            other.step()
        assert same(params, plain) and other.param_groups[0].keys() < opt.param_groups[0].keys()
        torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, 10)
        opt.step()


def test_keys_that_a_state_dict_brings_stay(optimizer):
    """Also in copies, and once a scheduler has added keys; and so does what is left of a rule."""
    _, opt = live()
    saved = opt.state_dict()
    saved["param_groups"][0] |= {"wd": 0.1, "kind": "adamw", "capturable": True}
    opt.load_state_dict(saved)
    for one in (opt, copy.deepcopy(opt)):
        one.param_groups[0]["initial_lr"] = 0.1
        for p in one.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        one.step()
        assert one.param_groups[0]["kind"] == "adamw" and "capturable" not in one.param_groups[0]
    normuon = optimizer.Muon([{"params": [p := matrix()], "rule": "normuon"}])
    p.grad = torch.ones_like(p)
    normuon.step()
    normuon.param_groups[0].update(rule="muon", initial_lr=0.1)
    normuon.step()
    assert normuon.param_groups[0]["beta2"] == 0.95


@pytest.mark.parametrize(("extra", "text"), [
    ({"fraction": 0.5}, "fraction=0.5, which its rule 'muon' does not read: it is an option of 'dion2', 'dion3'. Set"),
    ({"rule": "dion2", "radius": 2}, "radius=2, .*'dion2' does not.* of 'scion', and of 'sign' with use_muon=False"),
    ({"betas": (0.8, 0.9)}, "betas=.* option of 'adamw', 'lion' with use_muon=False. Set"),
    ({"use_muon": False, "sign": False}, "sign=False, .*'adamw' does not.* 'adamuon' with use_muon=True. Set"),
    ({"use_muon": False, "rule": "sgd", "betas": (0.8, 0.9)}, "betas=.*'sgd' does not read.* of 'adamw', 'lion'. Set"),
    ({"rule": "muon", "beta2": 0.9}, "beta2=0.9, .*'muon' does not read.* 'normuon'")], ids=str)
def test_an_option_of_another_rule_is_told_once(extra, text, optimizer):
    """At the user's line, and not again for groups alike."""
    make = optimizer.NorMuon if "beta2" in extra else optimizer.Muon
    with pytest.warns(UserWarning, match=rf"^group 0 \(a\) has {text}") as found:
        opt = make([{"params": [(name, matrix())], **extra} for name in "ab"])
        opt.add_param_group({"params": [("c", matrix())], **extra})
    assert [warning.filename for warning in found] == [__file__]
    opt = make([("a", matrix())])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as by python -W error
        with pytest.raises(UserWarning, match="group 1"):
            opt.add_param_group({"params": [("b", matrix())], **extra})
    assert len(opt.param_groups) == 1


def test_an_option_of_another_rule_in_a_live_group_is_told_once():
    _, opt = live()
    for key, value in {"fraction": 0.5, "initial_lr": 0.1}.items():
        opt.param_groups[1][key] = value
        with pytest.warns(UserWarning, match="group 1 .*fraction=") if key == "fraction" else no_warning():
            opt.step()


@pytest.mark.filterwarnings("error")
def test_an_option_that_no_user_put_there_is_no_matter(optimizer):
    """Defaults, of the optimizer, too; what state dicts bring, copies, and groups of another optimizer."""
    optimizer.Muon([{"params": [matrix()], "fraction": 0.25, "betas": [0.9, 0.99], "normalize": "column_row"}])
    optimizer.Muon([{"params": [matrix()], "betas": (0.5, 0.5)}, {"params": [matrix(4)], "use_muon": False}],
                   adamw_betas=(0.5, 0.5))
    groups = [{"params": [matrix()], "beta2": 0.75}, {"params": [matrix()], "rule": "muon"},
              {"params": [matrix(4)], "use_muon": False}]
    normuon = optimizer.NorMuon(groups, beta2=0.5)
    assert [group["beta2"] for group in optimizer.NorMuon(normuon.param_groups).param_groups] == [0.75, 0.5, 0.5]
    saved = normuon.state_dict()
    saved["param_groups"][1] |= {"fraction": 0.5, "betas": (0.5, 0.5)}
    loaded = optimizer.NorMuon(copy.deepcopy(groups))
    loaded.load_state_dict(saved)
    for opt in (loaded, copy.deepcopy(loaded)):
        opt.param_groups[1]["initial_lr"] = 0.1
        for group in opt.param_groups:
            group["params"][0].grad = torch.ones_like(group["params"][0])
        opt.step()
        assert opt.param_groups[1]["fraction"] == 0.5


def test_an_argument_in_a_state_dict_is_named_and_dropped(optimizer):
    params, opt = live()
    saved = opt.state_dict()
    saved["param_groups"][1] |= {"wire_dtype": torch.float32, "nonfinite": "propagate"}
    text = "group 1 of the state dict has wire_dtype=torch.float32.*stays torch.bfloat16"
    with pytest.warns(UserWarning, match=text):
        opt.load_state_dict(saved)
    assert not {"wire_dtype", "nonfinite"} & set(opt.param_groups[1])
    opt.step()


def test_groups_of_torchs_adamw(optimizer):
    theirs = torch.optim.AdamW([{"params": [matrix()]}, {"params": [matrix(3)]}], lr=0.01, betas=(0.8, 0.9))
    groups = [{**group, "use_muon": group["params"][0].ndim == 2} for group in theirs.param_groups]
    with pytest.warns(UserWarning, match="group 0 .*betas=.*rule 'muon' does not read"):
        assert optimizer.Muon(groups).param_groups[1]["betas"] == (0.8, 0.9)
    with no_warning():  # of torch's defaults
        optimizer.Muon([{**group, "use_muon": True} for group in torch.optim.AdamW([matrix()]).param_groups])


@pytest.mark.parametrize(("extra", "use_muon"), [({"algorithm": "adamw"}, True), ({"kind": "AdamW"}, True),
                                                 ({"name": "adam"}, True), ({"kind": "muon"}, False)], ids=str)
def test_groups_that_name_another_algorithm(extra, use_muon, optimizer):
    (key, value), = extra.items()
    refuse([f"{key}={value!r}", f"use_muon={use_muon}"], [{"params": [matrix()], "use_muon": use_muon, **extra}])
    optimizer.Muon([{"params": [matrix()], "use_muon": not use_muon, **extra}])


@pytest.mark.parametrize(("key", "value"), [("momentum", "x"), ("momentum", 1.0), ("ns_steps", -1),
                                            ("adjust_lr_fn", "f"), ("ns_coefficients", "foo"), ("nesterov", "no")],
                         ids=str)
def test_what_an_adamw_group_does_not_read_is_checked(key, value):
    refuse(["group 0 (bias)", key, repr(value)], [{"params": [("bias", matrix(3))], "use_muon": False, key: value}])


@pytest.mark.parametrize("betas", [None, 0.9, (0.9, 1.0), "ab"])
def test_betas_of_a_muon_group_are_checked(betas):
    refuse(["group 0 (weight)", "betas=", "[0, 1)"], [{"params": [("weight", matrix())], "betas": betas}])


@pytest.mark.parametrize(("key", "value"), [("adamw_betas", "x"), ("adamw_betas", (0.9, -1)), ("adamw_eps", -1),
                                            ("adamw_eps", "1e-8")])
def test_arguments_for_adamw_are_checked_without_a_group_of_it(key, value):
    refuse([f"{key}={value!r} is not allowed"], [matrix()], **{key: value})


# parameters that are divided ---------------------------------------------------------------------------------------

def test_more_names_than_parameters(optimizer):
    """Which of them are left, nobody says: messages number the parameters then."""
    group = {"params": [matrix(), matrix(5)], "param_names": ["a", "b", "c"]}
    refuse(["parameter #1", "1-D"], [group])
    opt = optimizer.Muon([{**group, "params": [matrix(), matrix()]}])
    assert opt.param_groups[0]["param_names"] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="parameter #0 of shape .* has no name"):
        optimizer.export_state(opt, "nowhere")


def divided(rank, world):
    """Steps by ZeroRedundancyOptimizer beside those of one process: whether the weights are the same."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    zero = ZeroRedundancyOptimizer(package().get_default_muon_param_groups(model), optimizer_class=package().Muon,
                                   lr=0.02)
    opt = package().Muon(package().get_default_muon_param_groups(plain), lr=0.02)
    for _ in range(3):
        for own, optim in ((model, zero), (plain, opt)):
            optim.zero_grad()
            own(torch.ones(2, 8)).square().sum().backward()
            optim.step()
    return same(model.parameters(), plain.parameters())


def test_zero_redundancy_optimizer_divides_the_default_groups(optimizer):
    assert run_ranks(2, divided) == [True, True]


# memory ------------------------------------------------------------------------------------------------------------

BUFFER = functools.partial(torch.zeros, 4, 12)
SHARING = {  # name -> the two parameters
    "twice the same": lambda b: (b[:2], b[:2]),
    "another shape": lambda b: (b, b.view(12, 4)),
    "rows that overlap": lambda b: (b[:3], b[2:]),
    "columns that overlap": lambda b: (b[:, :7], b[:, 6:]),
    "another dtype": lambda b: (b[:2], b.view(torch.bfloat16)[1:]),
    "a part": lambda b: (b, b[1:3, 2:4]),
}
APART = {
    "rows": lambda b: (b[:2], b[2:]),
    "columns": lambda b: (b[:, :6], b[:, 6:]),
    "every second column": lambda b: (b[:, ::2], b[:, 1::2]),
    "a transposed view": lambda b: (b[:, :6].t(), b[:, 6:].t()),
    "another dtype": lambda b: (b[:2], b.view(torch.bfloat16)[2:]),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("how", SHARING)
def test_parameters_that_share_memory_are_refused(how, late):
    """Tied weights are one parameter; two of the same memory would be stepped twice."""
    one, two = map(nn.Parameter, SHARING[how](BUFFER()))
    said = ["parameter", "a of group 0", "b of group 1", "share memory", "clone()"]
    if not late:
        return refuse(said, [{"params": [("a", one)]}, {"params": [("b", two)]}])
    opt = package().Muon([("a", one)])
    with pytest.raises(ValueError, match="a of group 0 and parameter b of group 1 share memory"):
        opt.add_param_group({"params": [("b", two)]})
    assert len(opt.param_groups) == 1
    return None


@pytest.mark.parametrize("how", APART)
def test_parts_of_one_tensor_are_parameters(how, optimizer):
    """Projections that were fused, and are stepped apart."""
    params = [nn.Parameter(view) for view in APART[how](torch.ones(4, 12))]
    others = [nn.Parameter(p.detach().clone()) for p in params]
    for ps in (params, others):
        opt = optimizer.Muon(ps, lr=0.1)
        for p in ps:
            p.grad = torch.ones_like(p)
        opt.step()
    assert same(params, others)


@pytest.mark.parametrize("make", [lambda: torch.ones(1, 6).expand(4, 6), lambda: torch.ones(4, 1).expand(4, 6),
                                  lambda: torch.ones(12).as_strided((4, 6), (2, 1))])
def test_a_parameter_whose_elements_share_memory_is_refused(make):
    refuse(["parameter wide of shape (4, 6)", "strides", "clone()"], [("wide", nn.Parameter(make()))])


def test_many_parameters_of_one_buffer_are_looked_at_once(monkeypatch, optimizer):
    """A look takes memory for a map of all of the buffer."""
    maps, module = [], part("params.checks.memory")
    monkeypatch.setattr(module, "_MemoryMap", lambda spans, own=module._MemoryMap: maps.append(1) or own(spans))
    buffer = torch.ones(8, 3000)
    optimizer.Muon([nn.Parameter(buffer[:, 3 * i:3 * i + 3]) for i in range(1000)])
    assert len(maps) == 1


# FSDP1 -------------------------------------------------------------------------------------------------------------

def under_fsdp1(rank, world, original, before):
    """What is said of parameters that FSDP1 has flattened."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    opt = package().Muon(list(model.named_parameters())) if before else None
    model = FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
    try:
        opt = opt or package().Muon([*model.named_parameters()])
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
    except ValueError as error:
        return str(error)
    return "stepped"


@pytest.mark.parametrize(("original", "before"), [(False, False), (True, False), (True, True)],
                         ids=["flat", "original", "original, optimizer first"])
def test_fsdp1_is_named_with_the_way_out(original, before, optimizer):
    for said in run_ranks(2, under_fsdp1, original, before):
        assert "FSDP1 (torch.distributed.fsdp.FullyShardedDataParallel)" in said and "fully_shard (FSDP2)" in said


# a mesh for a process group ----------------------------------------------------------------------------------------

def by_mesh(rank, world):
    from torch.distributed.device_mesh import init_device_mesh

    flat, grid = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.full_like(weight, rank + 1.0).cumsum(0)
    opt = package().Muon([weight], process_group=flat, grads_are_reduced=False)
    opt.step()
    part_of = package().Muon([matrix()], process_group=grid["b"])._options.process_group
    with pytest.raises(ValueError, match="DeviceMesh of 2 dims .*'a', 'b'.*get_group"):
        package().Muon([matrix()], process_group=grid)
    return weight.detach(), dist.get_process_group_ranks(part_of)


def test_a_mesh_of_one_dim_is_its_process_group(optimizer):
    results = run_ranks(4, by_mesh)
    assert all(torch.equal(results[0][0], weight) for weight, _ in results)
    assert [ranks for _, ranks in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]


# arguments ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("key", ["adjust_lr_fn", "nonfinite", "state_dtype", "wire_dtype", "ns_dtype", "capturable",
                                 "workspace_bytes", "process_group", "unscale_in_step", "lr", "momentum", "nesterov",
                                 "ns_steps", "ns_coefficients", "eps", "adamw_betas", "adamw_eps", "use_muon"])
@pytest.mark.parametrize("value", [np.ones(2), torch.ones(2), b"1", [torch.ones(2)]],
                         ids=["array", "tensor", "bytes", "list"])
def test_arrays_and_bytes_are_no_arguments(key, value):
    if dist.is_initialized():
        pytest.skip("a process group was left behind")
    if key == "use_muon":
        return refuse([key], [{"params": [matrix()], key: value}])
    return refuse([key], [matrix()], **{key: value})


def test_a_lazy_parameter_has_no_shape_yet():
    refuse(["parameter late", "lazy", "run the model once"], [("late", nn.UninitializedParameter())])


@pytest.mark.parametrize("model", [[matrix()], None, matrix()], ids=["list", "nothing", "parameter"])
def test_default_groups_of_what_is_no_module(model, optimizer):
    with pytest.raises(TypeError, match=f"takes one torch.nn.Module, not {type(model).__name__}"):
        optimizer.get_default_muon_param_groups(model)


LONG = "w" * 100_000


@pytest.mark.parametrize(("params", "options"), [
    ([(LONG, matrix(3))], {}), ([{"params": [matrix()], "lr": LONG}], {}),
    ([{"params": [matrix()], "nonfinite": LONG}], {}),
    ([matrix()], {"ns_coefficients": LONG}), ([matrix()], {"ns_coefficients": (LONG, 1, 1)}),
    ([matrix()], {"ns_steps": LONG}), ([matrix()], {"nonfinite": LONG}), ([matrix()], {"wire_dtype": LONG}),
    ([matrix()], {"process_group": LONG}), ([matrix()], {LONG: 1}), ([{LONG: 1}], {}),
    ([{"params": [(LONG, matrix(2)), (LONG, matrix(2))]}], {}), ([matrix()], {"adamw_betas": LONG})])
def test_errors_repeat_little_of_what_came(params, options):
    with pytest.raises((ValueError, TypeError)) as raised:
        package().Muon(params, **options)
    assert len(str(raised.value)) < 1500


# variables ---------------------------------------------------------------------------------------------------------

TABLE = {"arch": "sm00", "measured": [], "entries": []}
FILES = {"no JSON": "tiles", "deep": "[" * 100_000, "no table": "[]", "no UTF-8": b"\xff\xfe{}",
         "an entry": json.dumps({**TABLE, "entries": [{"op": "x" * 100_000}]})}


@pytest.mark.parametrize("inside", FILES)
def test_a_file_of_tiles_that_is_none(inside, monkeypatch, tmp_path):
    path = tmp_path / "tiles.json"
    path.write_bytes(FILES[inside] if isinstance(FILES[inside], bytes) else FILES[inside].encode())
    monkeypatch.setenv("OPTIMIZER_TILES", str(path))
    refuse(["OPTIMIZER_TILES", str(path)], [matrix()])


@pytest.mark.parametrize("name", ["a" * 5000, "nowhere", "."])
def test_a_path_of_tiles_that_is_none(name, monkeypatch):
    monkeypatch.setenv("OPTIMIZER_TILES", name)
    refuse(["OPTIMIZER_TILES", name[:190], "no file"], [matrix()])


@pytest.mark.parametrize(("name", "allowed"), [("OPTIMIZER_GRAPHS", "auto, off"), ("OPTIMIZER_KERNELS", "auto, torch")])
def test_nonsense_in_a_variable(name, allowed, monkeypatch):
    monkeypatch.setenv(name, "nonsense")
    refuse([f"{name} is 'nonsense'", allowed], [matrix()])


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch, optimizer):
    pytest.importorskip("triton")
    kernels = part("kernels.launch.jit")
    monkeypatch.setenv("OPTIMIZER_KERNELS", "triton")
    monkeypatch.setattr(kernels, "_is_interpreted", lambda: False)
    refuse(["OPTIMIZER_KERNELS is 'triton'", "CPU", "TRITON_INTERPRET=1"], [matrix()])
    monkeypatch.setattr(kernels, "_is_interpreted", lambda: True)
    optimizer.Muon([matrix()])
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    refuse(["OPTIMIZER_KERNELS is 'triton'", "not installed"], [matrix()])


@pytest.mark.skipif(not paths.INTERPRETED, reason="Triton is not interpreted here")
def test_the_interpreter_is_known_by_triton_itself():
    pytest.importorskip("triton")
    assert part("kernels.launch.jit")._is_interpreted()


def on_two_devices(rank, world):
    """Frozen parameters count for nothing; one that is thawed elsewhere is refused at the step."""
    frozen, weight = nn.Parameter(torch.ones(4, 4, device="meta"), requires_grad=False), matrix()
    opt = package().Muon([("frozen", frozen), ("weight", weight)])
    frozen.requires_grad_()
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match="parameter weight is on cpu, but frozen is on meta"):
        opt.step()
    return True


def test_a_parameter_that_is_thawed_on_another_device(optimizer):
    assert run_threads(1, on_two_devices) == [True]

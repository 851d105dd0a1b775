"""What could not be stepped is refused at construction, with its name, what came, what is allowed and what to do."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import package, part, run_ranks, run_threads


def matrix(*shape, dtype=torch.float32, device="cpu"):
    return nn.Parameter(torch.randn(*(shape or (4, 3)), device=device).to(dtype))


def refuse(parts, params, error=ValueError, name="Muon", **options):
    """Assert that construction raises `error` with all the `parts` in its message."""
    with pytest.raises(error) as raised:
        getattr(package(), name)(params, **options)
    missing = [part for part in parts if part not in str(raised.value)]
    assert not missing, f"{missing} not in {raised.value}"


@pytest.fixture(autouse=True)
def loaded(optimizer):
    """The package is loaded before the first test is timed."""


# parameters ------------------------------------------------------------------------------------------------------

@pytest.mark.kernels_ci
def test_a_scalar_parameter():
    refuse(["norm.scale", "shape ()", "0-D", "use_muon=False"], [("norm.scale", nn.Parameter(torch.tensor(1.0)))])


@pytest.mark.kernels_ci
def test_a_vector_parameter():
    refuse(["fc.bias", "(5,)", "1-D", "use_muon=False"], [("fc.weight", matrix()), ("fc.bias", matrix(5))])


def test_a_vector_parameter_without_names_is_named_by_its_number():
    refuse(["#1", "(5,)", "1-D"], [matrix(), matrix(5)])


def test_a_sparse_parameter():
    refuse(["table", "sparse", "dense", "to_dense"], [("table", torch.eye(4).to_sparse().requires_grad_())])


def test_a_compressed_sparse_parameter():
    refuse(["table", "sparse", "to_dense"], [("table", torch.eye(4).to_sparse_csr().requires_grad_())])


@pytest.mark.parametrize("use_muon", [True, False])
def test_a_complex_parameter(use_muon):
    params = [("rotor", matrix(dtype=torch.complex64))]
    refuse(["rotor", "complex64", "floating-point", "view_as_real"], [{"params": params, "use_muon": use_muon}])


def test_a_parameter_of_8_bits():
    """Its arithmetic is not defined here."""
    weight = nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn))
    refuse(["quantized", "float8_e4m3fn", "bfloat16"], [("quantized", weight)])


FROZEN = {"integers": lambda: torch.ones(4, 4, dtype=torch.uint8),
          "8 bits": lambda: torch.ones(4).to(torch.float8_e5m2),
          "complex": lambda: torch.ones(4, 4, dtype=torch.complex64), "a vector": lambda: torch.ones(4),
          "expanded": lambda: torch.ones(1, 4).expand(4, 4), "elsewhere": lambda: torch.ones(4, 4, device="meta")}


@pytest.mark.parametrize("what", FROZEN)
@pytest.mark.parametrize("first", [True, False])
def test_frozen_parameters_are_left_alone_whatever_they_are(what, first):
    """As those of a quantized base model beside adapters, in any order, with the step of the others as without them."""
    frozen, ours = nn.Parameter(FROZEN[what](), requires_grad=False), matrix()
    alone = nn.Parameter(ours.detach().clone())
    optimizer = package().Muon([frozen, ours] if first else [ours, frozen], lr=0.1)
    other = package().Muon([alone], lr=0.1)
    for number in range(3):
        for p in (ours, alone):
            p.grad = torch.full_like(p, number + 1.0).cumsum(0)
        optimizer.step()
        other.step()
    assert torch.equal(ours, alone) and frozen not in optimizer.state
    if what not in ("elsewhere", "8 bits"):
        assert torch.equal(frozen, FROZEN[what]())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()


def test_a_parameter_that_is_thawed_is_checked_then():
    frozen, weight = nn.Parameter(torch.ones(4), requires_grad=False), matrix()
    optimizer = package().Muon([("bias", frozen), ("weight", weight)])
    for p in (frozen, weight):
        p.requires_grad_().grad = torch.ones_like(p)
    before = weight.detach().clone()
    with pytest.raises(ValueError, match=r"parameter bias of shape \(4,\) is 1-D"):
        optimizer.step()
    assert torch.equal(weight, before)


def test_a_parameter_of_64_bits_keeps_its_precision_or_is_refused():
    """Momentum and update are fp32: silently less than the parameter has."""
    refuse(["precise", "float64", "float32"], [("precise", matrix(dtype=torch.float64))])


def test_a_tensor_that_is_no_leaf():
    refuse(["leaf"], [matrix() * 2])


def test_something_else_than_a_tensor():
    refuse(["Tensor", "list"], [[1.0, 2.0]], error=TypeError)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))], ids=["one layer", "iterable"])
def test_a_model_in_place_of_its_parameters(model):
    refuse(["model", type(model).__name__, "get_default_muon_param_groups(model)"], model, error=TypeError)


def test_a_list_of_parameters_that_is_a_module():
    package().Muon(nn.ParameterList([matrix()]))


# groups ----------------------------------------------------------------------------------------------------------

def test_no_parameters():
    refuse(["empty"], [])


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_group_without_parameters_is_taken(place, named):
    """As in torch; `step`, reports and state dicts are those of the other groups."""
    params = [matrix(), matrix(4)]
    alone = [nn.Parameter(p.detach().clone()) for p in params]

    def groups(own):
        entries = [[(str(i), p)] if named else [p] for i, p in enumerate(own)]
        return [{"params": entries[0]}, {"params": entries[1], "use_muon": False}]

    with_empty = groups(params)
    with_empty.insert(place, {"params": [], "use_muon": False})
    optimizer, other = package().Muon(with_empty, lr=0.1), package().Muon(groups(alone), lr=0.1)
    for _ in range(2):
        for p in (*params, *alone):
            p.grad = torch.full_like(p, 0.5).cumsum(0)
        optimizer.step()
        other.step()
    assert all(map(torch.equal, params, alone)) and str(optimizer.plan_report())
    again = package().Muon([{**group, "params": list(group["params"])} for group in optimizer.param_groups])
    again.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(again.state[p][key], value) for p in params for key, value in optimizer.state[p].items())


def test_an_optimizer_of_empty_groups_alone():
    optimizer = package().Muon([{"params": []}, {"params": [], "use_muon": False}])
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    late = nn.Parameter(torch.ones(4, 4))
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert not torch.equal(late, torch.ones(4, 4)) and len(optimizer.state) == 1


def test_empty_groups_of_another_kind_in_a_state_dict():
    saved = package().Muon([{"params": [matrix()]}, {"params": []}]).state_dict()
    optimizer = package().Muon([{"params": [matrix()]}, {"params": [], "use_muon": False}])
    with pytest.raises(ValueError, match="group 1 .* is one of Muon in the state dict, but of AdamW here"):
        optimizer.load_state_dict(saved)


@pytest.mark.kernels_ci
def test_an_unknown_group_key():
    refuse(["learning_rate", "allowed", "lr", "use_muon"], [{"params": [matrix()], "learning_rate": 0.1}])


def test_beta2_is_unknown_to_muon():
    refuse(["beta2", "allowed"], [{"params": [matrix()], "beta2": 0.9}])


@pytest.mark.parametrize("key", ["fused", "foreach", "initial_lr"])
def test_keys_of_other_tools_are_let_through(key):
    package().Muon([{"params": [matrix()], key: True}])


def test_groups_that_schedulers_have_written_to_make_another_optimizer():
    first = package().Muon([{"params": [matrix()]}, {"params": [matrix(3)], "use_muon": False}])
    torch.optim.lr_scheduler.OneCycleLR(first, 0.1, total_steps=10, cycle_momentum=False)
    torch.optim.swa_utils.SWALR(first, swa_lr=0.05)
    second = package().Muon(first.param_groups)
    assert [group["max_lr"] for group in second.param_groups] == [0.1, 0.1] and "swa_lr" in second.param_groups[0]


def test_who_reduces_gradients_is_said_by_a_bool():
    refuse(["grads_are_reduced='no'", "True or False"], [matrix()], grads_are_reduced="no")


def test_a_parameter_in_two_groups():
    shared = matrix()
    second = {"params": [("b.bias", matrix(3)), ("b.weight", shared)], "use_muon": False}
    refuse(["weight", "more than one"], [{"params": [("a.weight", shared)]}, second])


def test_a_parameter_twice_in_a_group():
    """It would be stepped twice."""
    shared = matrix()
    refuse(["tied.weight", "twice"], [("first.weight", matrix()), ("tied.weight", shared), ("tied.weight", shared)])


def test_a_list_of_names_of_another_length():
    refuse(["param_names", "1", "2"], [{"params": [matrix(), matrix()], "param_names": ["only.one"]}])


def test_a_group_without_the_key_of_parameters():
    refuse(["group 1", "'params'", "'parms'"], [{"params": [matrix()]}, {"parms": [matrix()]}])


def test_an_entry_that_is_no_pair():
    refuse(["group 0 (a", "tuple of 3", "(name, parameter)"], [("a", matrix(), 1)])


@pytest.mark.parametrize("key, usual, wrong", [
    ("momentum_steps", 3, [-1, True, 3.0, 1 << 60]), ("rounding_seed", 0, [1 << 63, None]),
    ("rounding_step", (1 << 63) - 1, [-1]), ("radius", 2.0, [0.0, math.inf, math.nan, "2"])])
def test_live_values_of_many_groups_are_checked_together(key, usual, wrong, monkeypatch):
    """The groups are not looked at one by one unless a value is unusual."""
    values, counts, seen = part("params.checks.scheduled_values"), {}, []
    options = {"rule": "scion", "radius": 1.0} if key == "radius" else {
        "rounding": "stochastic", "momentum_form": "bias_corrected"}
    params = [matrix(dtype=torch.bfloat16) for _ in range(6)]
    groups = package().Muon([{"params": [p]} for p in params], **options).param_groups
    for name in ("check_counts", "check_radius"):
        counts[name] = getattr(values, name)
        monkeypatch.setattr(values, name, lambda group, name=name: seen.append(name) or counts[name](group))
    groups[4][key] = usual
    values.check_scheduled_values(groups)
    assert seen == []
    for value in wrong:
        groups[4][key] = value
        with pytest.raises(ValueError, match=f"group 4.*{key}="):
            values.check_scheduled_values(groups)
    assert seen


@pytest.mark.parametrize("groups", [1, 6])
@pytest.mark.parametrize("key, value", [("beta2", 2.0), ("beta2", math.nan), ("use_muon", "no"), ("nesterov", "no")])
def test_a_live_value_that_construction_refuses_is_refused(groups, key, value):
    """With a beta2 of 2 all weights would be NaN, and "no" would count as True."""
    params = [matrix() for _ in range(groups)]
    opt = package().NorMuon([{"params": [p]} for p in params])
    for p in params:
        p.grad = torch.randn_like(p)
    opt.step()
    before, right = [p.detach().clone() for p in params], opt.param_groups[-1][key]
    opt.param_groups[-1][key] = value
    with pytest.raises(ValueError, match=f"group {groups - 1}.*{key}="):
        opt.step()
    assert all(map(torch.equal, params, before))
    opt.param_groups[-1][key] = right
    opt.step()


@pytest.mark.parametrize(("wrong", "parts"), [
    ({"lr": -1.0}, ["lr=-1.0", "finite number"]), ({"eps": -1.0}, ["eps=-1.0"]),
    ({"wieght_decay": 1.0}, ["'wieght_decay'", "'weight_decay'"]),
    ({"ns_coefficients": "quintik"}, ["'quintik'"]), ({"ns_steps": 0}, ["ns_steps is 0"]),
    ({"nesterov": torch.ones(2)}, ["nesterov=tensor", "True or False"]),
    ({"use_muon": torch.ones(2)}, ["use_muon=tensor", "True or False"]), ({"differentiable": True}, ["differentiable"]),
    ({"param_names": ["q"]}, ["1 names for 2"]), ({"use_muon": False, "betas": 0.9}, ["betas=0.9"])], ids=str)
def test_one_wrong_group_among_many_is_named(wrong, parts):
    def group(i):
        return {"params": [matrix(), matrix()], "param_names": [f"layers.{i}.q", f"layers.{i}.k"]}

    first = ["group 3 (q, ...)" if "param_names" in wrong else "group 3 (layers.3.q, ...)"]
    refuse(first + parts, [group(0), group(1), group(2), {**group(3), **wrong}, group(4)])


@pytest.mark.parametrize("value", [True, 1, torch.tensor(True)], ids=str)
def test_what_equals_a_bool_is_one(value):
    package().Muon([{"params": [matrix()], "use_muon": value, "nesterov": value}])


@pytest.mark.parametrize(("key", "value", "message"), [
    ("eps", -1.0, r"group 1 \(b\): eps=-1.0 is not allowed"),
    ("use_muon", False, r"group 1 \(b\): use_muon=False, but the group has no betas: .* set betas and eps")])
def test_a_live_group_that_is_wrong_is_named(key, value, message):
    params = [matrix(), matrix()]
    optimizer = package().Muon([{"params": [("a", params[0])]}, {"params": [("b", params[1])]}])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[1][key] = value
    with pytest.raises(ValueError, match=message):
        optimizer.step()


def test_a_group_that_goes_over_to_adamw():
    param = matrix()
    optimizer = package().Muon([param])
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.param_groups[0].update(use_muon=False, betas=(0.9, 0.95), eps=1e-8)
    assert optimizer.state[param]["step"] == 1


@pytest.mark.parametrize(("state", "parts"), [
    ({"state": {0: None}}, ["state of parameter a", "NoneType", "momentum_buffer"]),
    ({"state": {1: [1]}}, ["state of parameter b", "list"]),
    ({"state": {1: {"momentum_buffer": None}}}, ["momentum_buffer of parameter b"]),
    ({"param_groups": None}, ["'param_groups'", "state_dict()"]), ({"state": "left out"}, ["'state'", "state_dict()"])])
def test_a_state_dict_of_another_form(state, parts):
    optimizer = package().Muon([("a", matrix()), ("b", matrix())])
    saved = {**optimizer.state_dict(), **state}
    saved = {key: value for key, value in saved.items() if value not in (None, "left out")}
    with pytest.raises(ValueError) as raised:
        optimizer.load_state_dict(saved)
    assert all(part in str(raised.value) for part in parts), raised.value


def test_a_group_that_is_no_dict():
    optimizer = package().Muon([matrix()])
    with pytest.raises(TypeError, match="dict"):
        optimizer.add_param_group([matrix()])


# numbers ---------------------------------------------------------------------------------------------------------

OUT_OF_RANGE = [("lr", -1e-3), ("lr", math.nan), ("lr", math.inf), ("lr", torch.tensor(-1.0)), ("lr", 1e39),
                ("weight_decay", -0.1), ("weight_decay", math.nan), ("weight_decay", math.inf),
                ("eps", -1e-8), ("eps", math.nan), ("eps", 10**400),
                ("eps", 1e39), ("weight_decay", 1e39)]


@pytest.mark.kernels_ci
@pytest.mark.parametrize(("key", "value"), OUT_OF_RANGE, ids=lambda x: str(x)[:20])
def test_a_number_that_must_not_be_negative(key, value):
    came = f"{key}={value!r}"[:200]
    refuse([came, "finite", ">= 0"], [matrix()], **{key: value})
    refuse([came, "finite", ">= 0"], [{"params": [matrix()], key: value}])
    refuse([came, "finite", ">= 0"], [{"params": [matrix()], key: value, "use_muon": False}])


@pytest.mark.parametrize("value", [1.0, 1.5, -0.1, math.nan])
def test_momentum_outside_its_range(value):
    refuse([f"momentum={value!r}", "[0, 1)"], [matrix()], momentum=value)


@pytest.mark.parametrize("value", [1.0, -0.1, math.nan])
def test_beta2_outside_its_range(value):
    refuse([f"beta2={value!r}", "[0, 1)"], [matrix()], name="NorMuon", beta2=value)
    refuse([f"beta2={value!r}", "[0, 1)"], [{"params": [matrix()], "beta2": value}], name="NorMuon")


@pytest.mark.parametrize("value", [(0.9, 1.0), (-0.1, 0.9), (0.9,), (0.9, 0.9, 0.9), (0.9, math.nan)])
def test_betas_outside_their_range(value):
    refuse(["betas", repr(value), "[0, 1)"], [{"params": [matrix(3)], "use_muon": False}], adamw_betas=value)
    refuse(["betas", repr(value), "[0, 1)"], [{"params": [matrix(3)], "use_muon": False, "betas": value}])


@pytest.mark.parametrize("value", [-1e-8, math.nan])
def test_adamw_eps_outside_its_range(value):
    refuse(["eps", "finite"], [{"params": [matrix(3)], "use_muon": False}], adamw_eps=value)


@pytest.mark.parametrize(("key", "value"), [("lr", "1e-3"), ("lr", None), ("lr", torch.ones(2)), ("momentum", "0.95"),
                                            ("weight_decay", None), ("eps", "1e-7"), ("adamw_betas", 0.9)])
def test_something_else_than_a_number(key, value):
    """A YAML file says 1e-3 and means a string."""
    key_in_group = key.replace("adamw_", "")
    refuse([key_in_group], [{"params": [matrix(3)], "use_muon": False}, {"params": [matrix()]}],
           error=(ValueError, TypeError), **{key: value})


@pytest.mark.parametrize("key", ["lr", "weight_decay", "momentum", "eps", "adamw_eps", "adamw_betas", "beta2"])
@pytest.mark.parametrize("value", [True, False])
def test_a_boolean_is_no_number(key, value):
    """A YAML file says yes or on; True counted as 1. Schedules may not set booleans either."""
    given = (value, 0.9) if key == "adamw_betas" else value
    name = "NorMuon" if key == "beta2" else "Muon"
    refuse([f"{key}={given} is not allowed"], [matrix()], name=name, **{key: given})
    key = {"adamw_betas": "betas", "adamw_eps": "eps"}.get(key, key)
    group = {"params": [matrix()], "use_muon": key not in ("betas", "eps"), key: given}
    refuse([f"{key}={given} is not allowed"], [group], name=name)
    if key in ("lr", "momentum", "weight_decay"):
        opt = package().Muon([matrix()])
        opt.param_groups[0][key] = value
        with pytest.raises(ValueError, match=f"{key}={value} is not allowed"):
            opt.step()


def test_an_unknown_coefficient_set():
    refuse(["ns_coefficients", "'quintik'", "polar_express", "quintic"], [matrix()], ns_coefficients="quintik")
    refuse(["'quintik'"], [{"params": [matrix()], "ns_coefficients": "quintik"}])


TRIPLES = [(1.0, 2.0), (1.0, 2.0, 3.0, 4.0), (), 3.0, None, (1.0, 2.0, math.nan), (1.0, "2", 3.0),
           (1e39, 0.0, 0.0), (1.0, 10**39, 0.0),
           [(1.0, 2.0, 3.0), (1.0, 2.0)], [(1.0, 2.0, math.inf)] * 5]


@pytest.mark.parametrize("value", TRIPLES, ids=str)
def test_a_wrong_triple(value):
    refuse(["ns_coefficients", "triple"], [matrix()], ns_coefficients=value)


@pytest.mark.parametrize("value", [(True, -0.25, 0.0), [(True, -0.25, 0.0)] * 5])
def test_what_was_allowed_before_says_nothing(value):
    """True and 1.0 are equal, but one of them is a mistake."""
    package().orthogonalize(torch.eye(2), (1.0, -0.25, 0.0))
    package().orthogonalize(torch.eye(2), [(1.0, -0.25, 0.0)] * 5)
    refuse(["ns_coefficients", "triple", "True"], [matrix()], ns_coefficients=value)
    with pytest.raises(ValueError, match="True"):
        package().orthogonalize(torch.eye(2), value)


def test_schedules_of_coefficients_leave_nothing_behind():
    """A cache that keeps all grows without end."""
    caches = [
        thing for thing in vars(part("newton_schulz.coefficients")).values() if hasattr(thing, "cache_parameters")
    ]
    assert caches and all(cache.cache_parameters()["maxsize"] for cache in caches)


def test_another_number_of_triples_than_steps():
    refuse(["2 triples", "ns_steps is 5", "ns_steps=2"], [matrix()], ns_coefficients=[(1.5, -0.5, 0.0)] * 2)


def test_another_number_of_steps_than_the_set_has():
    refuse(["ns_steps is 7", "'cans'", "ns_steps=5"], [matrix()], ns_coefficients="cans", ns_steps=7)


@pytest.mark.parametrize("value", [0, -1, 100, 2.5, "5", True, None])
def test_ns_steps_outside_its_range(value):
    refuse(["ns_steps", repr(value), "1 to 99"], [matrix()], ns_steps=value)


def test_an_unknown_adjust_lr_fn():
    refuse(["adjust_lr_fn", "'rms'", "original", "match_rms_adamw", "spectral_norm"], [matrix()], adjust_lr_fn="rms")


# options of the whole optimizer ----------------------------------------------------------------------------------

@pytest.mark.parametrize(("key", "value"), [("wire_dtype", torch.float16), ("state_dtype", torch.float16),
                                            ("ns_dtype", torch.float64), ("wire_dtype", "bf16"), ("state_dtype", None)])
def test_a_dtype_that_is_not_allowed(key, value):
    refuse([f"{key}={value!r}", "bfloat16", "float32"], [matrix()], **{key: value})


UNKNOWN = {
    "wire_dtpye": "did you mean 'wire_dtype'", "wieght_decay": "did you mean 'weight_decay'?",
    "LR": "did you mean 'lr'?", "learning_rate": "did you mean 'lr'?",
    "betas": "did you mean 'adamw_betas'?", "fused": "leave it out",
    "adamw_lr": "pass it to get_default_muon_param_groups", "beta2": "an option of NorMuon",
    "fraction": "an option of 'dion2', 'dion3': pass the rule", "normalise": "did you mean 'normalize'?",
    "named_split": "did you mean 'named_splits'", "beta_2": "did you mean 'beta2'",
    "split": "it is a key of parameter groups", "use_muon": "it is a key of parameter groups", "seed": "leave it out",
}


@pytest.mark.parametrize("argument", UNKNOWN)
def test_an_unknown_argument(argument):
    refuse([f"there is no argument {argument!r}: ", UNKNOWN[argument]], [matrix()], error=TypeError, **{argument: 1})


def test_names_for_unknown_arguments_are_complete(part):
    config, muon = part("params.config"), inspect.signature(package().Muon.__init__).parameters
    groups = inspect.signature(package().get_default_muon_param_groups).parameters
    assert {field.name for field in dataclasses.fields(config.MuonConfig)} < set(muon)
    refuse(["leave it out", *(name for name, p in muon.items() if p.kind is p.KEYWORD_ONLY)], [matrix()],
           error=TypeError, fused=True)
    assert set(config.OTHER_NAMES.values()) < set(muon)
    assert set(config.OF_DEFAULT_GROUPS) == set(groups) - {"model"}


@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_a_workspace_without_room(value):
    refuse(["workspace_bytes", repr(value)], [matrix()], workspace_bytes=value)


def test_unreduced_gradients_without_a_process_group():
    refuse(["grads_are_reduced=False", "process_group"], [matrix()], grads_are_reduced=False)


def test_a_misspelt_option_of_a_rule_of_the_users_own():
    rule = type("Shrinking", (package().Rule,), {"options": {"gamma": 0.5}, "after": lambda self, O, units: O / 2})
    refuse(["there is no argument 'gama': did you mean 'gamma'?"], [matrix()], error=TypeError, rule=rule, gama=0.4)


def test_a_process_group_by_name():
    refuse(["process_group='world' is a text", "dist.group.WORLD"], [matrix()], process_group="world")


def test_a_process_group_of_nothing():
    refuse(["process_group", "init_process_group"], [matrix()], process_group=object())


def test_parameters_on_different_devices():
    refuse(["b.weight", "meta", "a.weight", "cpu"], [("a.weight", matrix()), ("b.weight", matrix(device="meta"))])
    second = {"params": [("b.bias", matrix(3, device="meta"))], "use_muon": False}
    refuse(["b.bias", "meta", "a.weight", "cpu"], [{"params": [("a.weight", matrix())]}, second])


# DTensors --------------------------------------------------------------------------------------------------------

def dtensor(shape, mesh_shape, placements, order=None):
    """A DTensor parameter of zeros, cut evenly."""
    from torch.distributed.tensor import DTensor, init_device_mesh

    mesh, local = init_device_mesh("cpu", mesh_shape), list(shape)
    for size, placement in zip(mesh_shape, placements):
        if hasattr(placement, "dim"):
            local[placement.dim] //= size
    tensor = DTensor.from_local(torch.zeros(local), mesh, placements, run_check=False, shape=torch.Size(shape),
                                stride=torch.empty(shape).stride())
    param = nn.Parameter(tensor)
    if order is not None:
        param._spec.shard_order = order
    return param


def refused_on_ranks(rank, world, make, parts, error, options):
    groups = make()
    if options.pop("end", False):
        dist.destroy_process_group()
    if "process_group" in options:
        options["process_group"] = dist.group.WORLD
    refuse(parts, groups, error, **options)
    return True


def refuse_on_ranks(make, parts, error=NotImplementedError, **options):
    assert all(run_threads(4, lambda *args: refused_on_ranks(*args, dict(options)), make, parts, error))


def test_partial_placements():
    from torch.distributed.tensor import Partial, Shard

    refuse_on_ranks(lambda: [("fc.weight", dtensor((8, 4), (2, 2), [Shard(0), Partial()]))],
                    ["fc.weight", "(8, 4)", "Partial", "Replicate", "redistribute"])


@pytest.mark.parametrize("use_muon", [True, False])
def test_partial_placements_in_either_kind_of_group(use_muon):
    from torch.distributed.tensor import Partial

    refuse_on_ranks(lambda: [{"params": [("fc.weight", dtensor((8, 4), (4,), [Partial()]))], "use_muon": use_muon}],
                    ["fc.weight", "Partial"])


STRIDED = {
    "of another factor": lambda S, T: ([T(0, split_factor=3), S(0)], (2, 2), "FSDP2's over TP"),
    "last": lambda S, T: ([S(0), T(0, split_factor=2)], (2, 2), "FSDP2's over TP"),
    "twice": lambda S, T: ([T(0, split_factor=2), T(0, split_factor=1)], (2, 2), "more than one _StridedShard"),
}


@pytest.mark.parametrize("case", STRIDED)
def test_a_strided_shard_that_is_not_fsdp_over_tp(case):
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placements, mesh_shape, why = STRIDED[case](Shard, _StridedShard)
    refuse_on_ranks(lambda: [("fc.weight", dtensor((12, 8), mesh_shape, placements))],
                    ["fc.weight", "(12, 8)", "_StridedShard", why, "AdamW takes every _StridedShard"])


def test_row_state_that_cannot_be_cut_like_the_columns():
    """NorMuon's, at construction; `Muon` takes the parameter."""
    from torch.distributed.tensor.placement_types import _StridedShard

    def make():
        return [("fc.weight", dtensor((6, 8), (4,), [_StridedShard(1, split_factor=2)]))]

    refuse_on_ranks(make, ["fc.weight", "(6, 8)", "_StridedShard", "keeps one number for each row"],
                    name="NorMuon")
    assert all(run_threads(4, lambda rank, world: bool(package().Muon(make()))))


def test_an_order_of_shards_from_right_to_left():
    from torch.distributed.tensor import Shard, _dtensor_spec

    entry = getattr(_dtensor_spec, "ShardOrderEntry", None)
    if entry is None:
        pytest.skip("this torch knows one order only")
    order = (entry(tensor_dim=0, mesh_dims=(1, 0)),)
    refuse_on_ranks(lambda: [("fc.weight", dtensor((8, 4), (2, 2), [Shard(0), Shard(0)], order))],
                    ["fc.weight", "(8, 4)", "order", "redistribute"])


@pytest.mark.parametrize("more", [0, 1], ids=["alone", "among others"])
def test_unreduced_gradients_of_a_dtensor(more):
    from torch.distributed.tensor import Shard

    def make():
        return [("plain", matrix())] * more + [("fc.weight", dtensor((8, 4), (4,), [Shard(0)]))]

    refuse_on_ranks(make, ["grads_are_reduced=False", "fc.weight", "DTensor"], ValueError, process_group=None,
                    grads_are_reduced=False)


def test_a_mesh_that_is_not_initialized():
    from torch.distributed.tensor import Shard

    refuse_on_ranks(lambda: [("fc.weight", dtensor((8, 4), (4,), [Shard(0)]))],
                    ["fc.weight", "not initialized", "init_process_group"], ValueError, end=True)


def elsewhere(rank, world, frozen):
    """A parameter on a mesh of the first two ranks, with all others; what each is told."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    tensor = distribute_tensor(matrix().detach(), DeviceMesh("cpu", [0, 1]), [Shard(0)], src_data_rank=None)
    param = nn.Parameter(tensor, requires_grad=not frozen)
    try:
        package().Muon([("fc.weight", param)])
    except NotImplementedError as refused:
        return str(refused)


def test_a_mesh_of_other_ranks():
    told = run_threads(3, elsewhere, False)
    assert told[:2] == [None] * 2
    assert "fc.weight" in told[2]
    assert "rank 2 is no part of: leave it out of the groups on this rank" in told[2]
    assert run_threads(3, elsewhere, True) == [None] * 3  # what is not stepped is nobody's trouble


def uneven(rank, world):
    """Chunks that torch itself would not make."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh, rows = init_device_mesh("cpu", (world,)), (1, 3, 2, 2)
    tensor = DTensor.from_local(torch.zeros(rows[rank], 4), mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 4)),
                                stride=(4, 1))
    param = nn.Parameter(tensor)
    with pytest.raises(NotImplementedError) as raised:
        optimizer = package().Muon([("fc.weight", param)])
        param.grad = torch.zeros_like(param)
        optimizer.step()
    return str(raised.value)


def test_chunks_of_ones_own():
    """Only the ranks that store something else than torch would can see it."""
    for message in run_threads(2, uneven):
        assert "fc.weight" in message and "(1, 4)" in message or "(3, 4)" in message


# sparse gradients, at step time ----------------------------------------------------------------------------------

@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("steps", [0, 1], ids=["first step", "second step"])
def test_a_sparse_gradient(steps, use_muon):
    weight = matrix(6, 4)
    other = matrix(6, 4)
    optimizer = package().Muon([{"params": [("other", other), ("table.weight", weight)], "use_muon": use_muon}])
    for _ in range(steps):
        weight.grad = other.grad = torch.randn(6, 4)
        optimizer.step()
    before = weight.detach().clone()
    weight.grad = torch.eye(6, 4).to_sparse()
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    assert all(part in str(raised.value) for part in ("table.weight", "(6, 4)", "sparse gradient", "sparse=False"))
    assert torch.equal(weight, before)


def test_the_gradient_of_a_sparse_embedding():
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = package().Muon([{"params": table.parameters(), "use_muon": False}])
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        optimizer.step()


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "third step"])
def test_a_lazily_negated_gradient(steps, use_muon):
    """Its memory has the other sign, and kernels read memory."""
    weight, usual = matrix(6, 4), matrix(6, 4)
    usual.data.copy_(weight)
    optimizer, other = (package().Muon([{"params": [p], "use_muon": use_muon}]) for p in (weight, usual))
    for _ in range(steps):
        weight.grad = usual.grad = torch.randn(6, 4)
        optimizer.step()
        other.step()
    before, memory = weight.detach().clone(), torch.randn(6, 4)
    weight.grad = torch._neg_view(memory)
    for _ in "12":
        with pytest.raises(RuntimeError, match="parameter #0 .*negated view.*resolve_neg"):
            optimizer.step()
    assert torch.equal(weight, before)
    weight.grad, usual.grad = weight.grad.resolve_neg(), -memory
    optimizer.step()
    other.step()
    assert torch.equal(weight, usual)


# a refused group -------------------------------------------------------------------------------------------------

REFUSED = {
    "vector": lambda: {"params": [matrix(3)]},
    "unknown key": lambda: {"params": [matrix()], "learning_rate": 1.0},
    "negative lr": lambda: {"params": [matrix()], "lr": -1.0},
    "use_muon of text": lambda: {"params": [matrix()], "use_muon": "false"},
    "nesterov of text": lambda: {"params": [matrix()], "nesterov": "no"},
    "use_muon of nothing": lambda: {"params": [matrix()], "use_muon": None},
    "lr of text": lambda: {"params": [matrix()], "lr": "1e-3"},
    "betas of one": lambda: {"params": [matrix(3)], "use_muon": False, "betas": 0.9},
    "coefficients": lambda: {"params": [matrix()], "ns_coefficients": "quintik"},
    "device": lambda: {"params": [matrix(device="meta")]},
    "complex": lambda: {"params": [matrix(dtype=torch.complex64)], "use_muon": False},
    "no leaf": lambda: {"params": [matrix() * 2]},
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_group_leaves_the_optimizer_as_it_was(case):
    weight, group = matrix(), REFUSED[case]()
    optimizer = package().NorMuon([weight], lr=0.1)
    twin = copy.deepcopy(optimizer)
    for number in range(2):
        with pytest.raises((ValueError, TypeError)):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1 and optimizer.param_groups[0]["params"][0] is weight
        weight.grad = torch.full_like(weight, number + 1.0).cumsum(0)
        twin.param_groups[0]["params"][0].grad = weight.grad.clone()
        optimizer.step()
        twin.step()
    assert torch.equal(weight, twin.param_groups[0]["params"][0]) and len(optimizer.state) == 1


def test_a_parameter_of_another_group_leaves_the_optimizer_as_it_was():
    weight = matrix()
    optimizer = package().Muon([weight])
    with pytest.raises(ValueError, match="more than one"):
        optimizer.add_param_group({"params": [matrix(), weight]})
    assert len(optimizer.param_groups) == 1


def test_a_parameter_that_keeps_its_elements_elsewhere():
    """A quantized weight (torchao's) has no memory of its own: kernels would read address 0."""
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(NotImplementedError, match="parameter w of shape .* is a TwoTensor, which keeps its elements"):
        package().Muon([("w", nn.Parameter(TwoTensor(torch.zeros(2, 2), torch.zeros(2, 2))))])


@pytest.mark.parametrize("kind, use_muon", [("fake", True), ("fake", False), ("meta", True)])
def test_a_step_of_parameters_without_memory(kind, use_muon):
    """Of estimates of memory, and of models that are yet to be initialized; the optimizer may be made before."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        weight = nn.Parameter(torch.empty(3, 4))
        weight.grad = torch.empty(3, 4)
    optimizer = package().Muon([{"params": [("w", weight)], "use_muon": use_muon}])
    with pytest.raises(RuntimeError, match="parameter w is a fake tensor|parameter w; .*meta tensors hold no numbers"):
        optimizer.step()


@pytest.mark.parametrize("key, value, good", [("ns_steps", 2.0, 2), ("eps", None, 1e-7), ("adjust_lr_fn", "foo", None),
                                              ("ns_coefficients", "nope", "jordan")])
def test_a_wrong_number_between_steps_is_refused_before_anything_changes(key, value, good):
    param = nn.Parameter(torch.ones(2, 3))
    param.grad = torch.ones(2, 3)
    optimizer = package().Muon([param])
    optimizer.step()
    before = param.detach().clone()
    optimizer.param_groups[0][key] = value
    with pytest.raises(ValueError, match=key):
        optimizer.step()
    assert torch.equal(param, before)
    optimizer.param_groups[0][key] = good
    optimizer.step()
    assert not torch.equal(param, before)


@pytest.mark.parametrize(("use_muon", "key", "first", "wrong", "then"), [
    (True, "ns_coefficients", [[3.4445, -4.7750, 2.0315]] * 5, [[1.0, 2.0]] * 5, [[1.5, -0.5, 0.0]] * 5),
    (True, "ns_coefficients", [3.4445, -4.7750, 2.0315], [1.0, "2", 3.0], [1.5, -0.5, 0.0]),
    (True, "ns_coefficients", [[3.4445, -4.7750, 2.0315]] * 5, [[1.5, -0.5, 0.0]], [[1.5, -0.5, 0.0]] * 5),
    (True, "ns_coefficients", [[1.5, -0.5, 0.0]] * 5, [], [[3.4445, -4.7750, 2.0315]] * 5),
    (False, "betas", [0.9, 0.95], [0.9, 1.5], [0.8, 0.9]), (False, "betas", [0.9, 0.95], [0.9], [0.8, 0.9])])
def test_numbers_that_change_in_place(use_muon, key, first, wrong, then):
    """As if they had been put into the group: a wrong one is refused before anything changes, a right one works."""
    param, usual = both = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 64))
    usual.data.copy_(param)
    live = copy.deepcopy(first)
    ours, theirs = (package().Muon([{"params": [p], "use_muon": use_muon, key: value}])
                    for p, value in ((param, live), (usual, first)))

    def step():
        param.grad = usual.grad = torch.randn(64, 64)
        ours.step()
        theirs.step()
        assert torch.equal(*both)

    step()
    step()
    before = param.detach().clone()
    live[:] = copy.deepcopy(wrong)
    for _ in range(2):
        with pytest.raises(ValueError, match=key):
            ours.step()
    assert torch.equal(param, before)
    live[:] = copy.deepcopy(then)
    theirs.param_groups[0][key] = then
    step()
    if key == "ns_coefficients" and isinstance(live[0], list):
        live[2][:] = [1.4, -0.4, 0.0]
        theirs.param_groups[0][key] = copy.deepcopy(live)
    step()


def test_two_numbers_in_the_place_of_one_between_steps():
    param = nn.Parameter(torch.ones(2, 3))
    param.grad = torch.ones(2, 3)
    optimizer = package().Muon([param])
    optimizer.param_groups[0]["eps"] = torch.tensor(1e-7)
    optimizer.step()
    optimizer.param_groups[0]["eps"] = torch.ones(2)
    with pytest.raises(ValueError, match="eps="):
        optimizer.step()


@pytest.mark.parametrize("key, value", [("dtype", torch.float64), ("eps", -1.0), ("eps", float("nan")), ("eps", "a"),
                                        ("eps", 1e39)])
def test_options_of_orthogonalize(key, value):
    with pytest.raises(ValueError, match=f"{key}=.* is not allowed"):
        package().orthogonalize(torch.eye(2), **{key: value})


def outsider(rank, world):
    group = dist.new_group([0])
    if rank == 0:
        return ""
    with pytest.raises(ValueError, match="no process group of which this rank is a member") as error:
        package().Muon([nn.Parameter(torch.ones(2, 2))], process_group=group)
    return str(error.value)


def test_a_process_group_of_others():
    assert run_ranks(2, outsider)[1].startswith("process_group=")


def test_another_default_device():
    """Tables and flags are made where they are needed, not where the user makes tensors."""
    param = nn.Parameter(torch.ones(2, 3))
    param.grad = torch.ones(2, 3)
    with torch.device("meta"):
        package().Muon([param], nonfinite="skip").step()
    assert param[0, 0] != 1


def test_a_differentiable_step():
    with pytest.raises(ValueError, match="differentiable=True is not allowed"):
        package().Muon([{"params": [nn.Parameter(torch.ones(2, 3))], "differentiable": True}])

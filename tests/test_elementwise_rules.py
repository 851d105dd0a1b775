"""Rules of groups with use_muon=False, and Scion: formulas in fp64, every layout against one process, checkpoints, live
changes and refusals.
"""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import package, part, run_threads
from tests.test_decay import tensors
from tests.test_muon import same
from tests.test_same_bits import mine, shown_state
from tests.test_units import OWNERS, layouts, placed

LR, WD, MU, BETAS, RADIUS = 0.05, 0.2, 0.8, (0.7, 0.6), 3.0
OPTIONS = {
    "lion": {"betas": BETAS}, "sgd": {"momentum": MU, "nesterov": False}, "sgd, nesterov": {"momentum": MU},
    "sgd, without momentum": {"momentum": 0.0}, "sign": {"momentum": MU, "radius": RADIUS},
}
KEYS = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "lion": {"exp_avg"}, "sgd": {"momentum_sum"},
        "sign": {"momentum_buffer"}}


def group_of(case, params, **more):
    return {"params": params, "use_muon": False, "rule": case.split(",")[0], **OPTIONS.get(case, {}), **more}


def fill(params, step):
    for i, p in enumerate(params):
        generator = torch.Generator().manual_seed(50 * step + i)
        p.grad = (torch.randint(-9, 10, p.shape, generator=generator) / 4).to(p)


def train(made, params, steps):
    for step in steps:
        fill(params, step)
        made.step()
    return [t.detach().clone() for t in params]


# formulas ----------------------------------------------------------------------------------------------------------

def formula(case, g, state):
    """The update, without lr and weight decay, from the papers and torch.optim.SGD."""
    m = state.get("m", torch.zeros_like(g))
    if case == "lion":
        state["m"] = BETAS[1] * m + (1 - BETAS[1]) * g
        return torch.sign(BETAS[0] * m + (1 - BETAS[0]) * g)
    if case == "sign":
        state["m"] = MU * m + (1 - MU) * g
        return RADIUS * torch.sign(state["m"])
    mu = OPTIONS[case]["momentum"]
    state["m"] = mu * m + g
    return g + mu * state["m"] if case == "sgd, nesterov" else state["m"]


def decayed(decay, w, update, first):
    """What weight decay takes from w."""
    if decay == "cautious":
        return LR * WD * torch.where(w * update >= 0, w, 0.0)
    return {"decoupled": LR * w, "independent": w, "lr_squared": LR**2 * w, "initial": LR * (w - first)}[decay] * WD


@pytest.mark.parametrize("decay", ["decoupled", "cautious", "independent", "lr_squared", "initial"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", OPTIONS)
def test_a_rule_computes_its_formula(case, dtype, decay, device, optimizer):
    """In fp64; weights in bf16 are stepped in fp32."""
    params = [nn.Parameter(w.to(device, dtype)) for w in tensors([(6, 4), (5,), (), (0, 3)])]
    made = optimizer.Muon([group_of(case, params, decay=decay)], lr=LR, weight_decay=WD)
    expected, states = [p.detach().double().cpu() for p in params], [{} for _ in params]
    for step in range(3):
        fill(params, step)
        for i, (p, w, first) in enumerate(zip(params, list(expected), tensors([(6, 4), (5,), (), (0, 3)]))):
            update = formula(case, p.grad.double().cpu(), states[i])
            expected[i] = w - LR * update - decayed(decay, w, update, first.to(dtype).double())
            if dtype == torch.bfloat16:  # as the weight is kept
                expected[i] = expected[i].to(dtype).double()
        gradients = [p.grad.clone() for p in params]
        made.step()
        assert same(gradients, [p.grad for p in params]), "gradients are never changed"
        for p, w in zip(params, expected):
            torch.testing.assert_close(p.double().cpu(), w, rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-5)
    keys = KEYS[case.split(",")[0]] | ({"initial_weight"} if decay == "initial" else set())
    assert all(set(made.state[p]) == keys for p in params)
    assert all(t.dtype == torch.float32 for p in params for key, t in made.state[p].items() if key != "initial_weight")


def test_sgd_and_its_peer_step_alike(optimizer):
    """torch.optim.SGD, without weight decay, which it adds to the gradient."""
    ours, theirs = ([nn.Parameter(w) for w in tensors([(6, 4), (5,)])] for _ in range(2))
    made = optimizer.Muon([group_of("sgd, nesterov", ours)], lr=LR, weight_decay=0.0)
    peer = torch.optim.SGD(theirs, lr=LR, momentum=MU, nesterov=True)
    assert same(train(made, ours, range(3)), train(peer, theirs, range(3)))


@pytest.mark.parametrize("case", OPTIONS)
def test_fp64_is_stepped_in_fp64(case, device, optimizer):
    (w,) = tensors([(6, 4)])
    p = nn.Parameter(w.double().to(device))
    made = optimizer.Muon([group_of(case, [p])], lr=LR, weight_decay=WD)
    expected, state = w.double(), {}
    for step in range(3):
        fill([p], step)
        update = formula(case, p.grad.cpu(), state)
        made.step()
        expected = expected * (1 - LR * WD) - LR * update
    torch.testing.assert_close(p.detach().cpu(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(8, 30), (24, 8)])
def test_scion_steps_in_the_spectral_norm(shape, device, optimizer):
    """radius sqrt(R / C) times the polar factor of the mean, whatever `nesterov` and `adjust_lr_fn`."""
    (w,) = tensors([shape])
    p = nn.Parameter(w.to(device))
    group = {"params": [p], "rule": "scion", "radius": RADIUS, "momentum": MU, "adjust_lr_fn": "match_rms_adamw"}
    made = optimizer.Muon([group], lr=LR, weight_decay=1.0, ns_coefficients=(1.875, -1.25, 0.375), ns_steps=22,
                          wire_dtype=torch.float32, ns_dtype=torch.float32)
    W, M = w.double(), 0.0
    for step in range(3):
        fill([p], step)
        M = MU * M + (1 - MU) * p.grad.double().cpu()
        P, _, Q = torch.linalg.svd(M, full_matrices=False)
        W = (1 - LR) * W - LR * RADIUS * (shape[0] / shape[1]) ** 0.5 * P @ Q
        made.step()
    assert (p.detach().double().cpu() - W).norm() < 1e-6 * W.norm()
    assert set(made.state[p]) == {"momentum_buffer"}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_rule_rounds_state_in_bf16_once(case, device, optimizer):
    """Weight and state in bf16 are stepped in fp32."""
    weights = tensors([(6, 4), (5,)])
    params = [nn.Parameter(w.to(device, torch.bfloat16)) for w in weights]
    made = optimizer.Muon([group_of(case, params)], lr=LR, weight_decay=WD, state_dtype=torch.bfloat16)
    states = [{} for _ in params]
    for step in range(3):
        old = [p.detach().double().cpu() for p in params]
        fill(params, step)
        made.step()
        for i, (p, w) in enumerate(zip(params, old)):
            update = formula(case, p.grad.double().cpu(), states[i])
            (held,) = made.state[p].values()
            assert held.dtype == torch.bfloat16
            if case == "sgd, without momentum":  # torch leaves the buffer alone
                states[i]["m"] = torch.zeros_like(w)
            for ours, exact in ((held, states[i]["m"]), (p, w * (1 - LR * WD) - LR * update)):
                torch.testing.assert_close(ours.double().cpu(), exact, rtol=2.0**-8, atol=1e-6)  # half a unit in bf16
            states[i]["m"] = held.double().cpu()


# layouts -----------------------------------------------------------------------------------------------------------

def several(place, **options):
    """(parameters, optimizer) after two steps: Scion with two radii, and every rule of other groups."""
    fulls = tensors([(12, 8), (8, 12)] + [(12, 8)] * len(OPTIONS))
    params = [nn.Parameter(place(f)) for f in fulls]
    groups = [{"params": [p], "rule": "scion", "radius": r} for p, r in zip(params, (2.0, 5.0))]
    groups += [group_of(case, [p]) for case, p in zip(OPTIONS, params[2:])]
    made = package().Muon(groups, lr=LR, weight_decay=WD, wire_dtype=torch.float32, **options)
    for step in range(2):
        for i, (p, f) in enumerate(zip(params, fulls)):
            generator = torch.Generator().manual_seed(50 * step + i)
            p.grad = place(torch.randint(-9, 10, f.shape, generator=generator) / 4)
        made.step()
    return params, made


def on_rank(rank, world, layout, wholes):
    from torch.distributed.tensor import init_device_mesh

    mesh_shape, *placements = layouts()[layout]
    mesh = init_device_mesh("cpu", mesh_shape) if placements else None
    options = {} if mesh or world == 1 else {"process_group": dist.group.WORLD}
    options |= {OWNERS[0]: {"shard_state": True}, OWNERS[1]: {"grads_are_reduced": False}}.get(layout, {})

    def place(full):
        return placed(full, mesh, placements[0]) if mesh else full.clone()

    params, made = several(place, **options)
    state = shown_state(made) if layout in OWNERS else made.state
    local_of, wrong = part("params.dtensor").local_of, []
    for i, (p, whole) in enumerate(zip(params, wholes)):
        ours = {"weight": p.detach(), **state[p]}
        assert ours.keys() == whole.keys()
        for key, value in whole.items():
            here = mine(value, ours[key]) if layout in OWNERS else place(value)
            wrong += [] if torch.equal(local_of(ours[key]), local_of(here)) else [(i, key)]
    return wrong


@pytest.mark.parametrize("layout", layouts())
def test_every_layout_has_the_bits_of_one_process(layout, optimizer):
    params, made = several(torch.clone)
    assert len(made._bound.jobs) == 1 + len(OPTIONS), "matrices of two radii share their buckets"
    wholes = [{"weight": p.detach(), **made.state[p]} for p in params]
    world = math.prod(layouts()[layout][0])
    assert run_threads(world, on_rank, layout, wholes) == [[]] * world


def own_groups_on_rank(rank, world):
    """A vector of this rank alone beside one that both ranks have."""
    params = [nn.Parameter(w) for w in tensors([(6, 4), (6, 4)])]
    groups = [group_of("lion", params[:1]), group_of("sign", params[1:], process_group=None)]
    made = package().Muon(groups, lr=LR, process_group=dist.group.WORLD, shard_state=True)
    train(made, params, range(2))
    return [p.detach() for p in params], [tuple(made.state[p].popitem()[1].shape) for p in params]


def test_a_group_with_a_process_group_of_its_own(optimizer):
    params = [nn.Parameter(w) for w in tensors([(6, 4), (6, 4)])]
    made = optimizer.Muon([group_of("lion", params[:1]), group_of("sign", params[1:])], lr=LR)
    expected = train(made, params, range(2))
    for weights, shapes in run_threads(2, own_groups_on_rank):
        assert same(weights, expected) and shapes == [(3, 4), (6, 4)]


def moved_on_rank(rank, world):
    """A state dict gathered from rows, loaded onto columns, and stepped on."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh, names, fulls = init_device_mesh("cpu", (world,)), [*OPTIONS, "scion"], tensors([(9, 7)] * 6)

    class Model(nn.Module):
        def __init__(self, values, dim):
            super().__init__()
            self.all = nn.ParameterList(
                nn.Parameter(distribute_tensor(v, mesh, [Shard(dim)], src_data_rank=None)) for v in values)

    def built(model):
        named = list(model.named_parameters())
        groups = [group_of(case, [entry]) for case, entry in zip(names, named[:-1])]
        return package().Muon([*groups, {"params": named[-1:], "rule": "scion"}], lr=LR)

    def steps(model, made, some):
        for step in some:
            for i, p in enumerate(model.all):
                grad = torch.randint(-9, 10, (9, 7), generator=torch.Generator().manual_seed(50 * step + i)) / 4
                p.grad = distribute_tensor(grad, mesh, p.placements, src_data_rank=None)
            made.step()
        return [p.detach().full_tensor() for p in model.all]

    options, model = StateDictOptions(full_state_dict=True), Model(fulls, 0)
    made = built(model)
    middle = steps(model, made, range(2))
    saved = get_optimizer_state_dict(model, made, options=options)
    other = Model(middle, 1)
    again = built(other)
    again.init_state()
    set_optimizer_state_dict(other, again, saved, options=options)
    return same(steps(model, made, [2]), steps(other, again, [2]))


def test_state_moves_to_other_placements(optimizer):
    assert run_threads(2, moved_on_rank) == [True, True]


# state -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))], ids=["copy", "pickle"])
def test_a_schedule_of_beta1_goes_on_in_a_copy(copied, optimizer):
    """OneCycleLR sets `momentum`, which `betas` follow. In a copy `betas` had undone the first change."""
    param = nn.Parameter(torch.ones(4))
    made = optimizer.Muon([{"params": [param], "use_muon": False}], lr=LR)
    train(made, [param], [0])
    again = copied(made)
    (group,) = again.param_groups
    group["momentum"] = 0.5
    train(again, group["params"], [1])
    assert (group["momentum"], group["betas"][0]) == (0.5, 0.5)


@pytest.mark.parametrize("case", ["lion", "sgd, nesterov", "sign"])
def test_a_checkpoint_goes_on(case, tmp_path, optimizer):
    params = [nn.Parameter(w) for w in tensors([(6, 4), (5,)])]
    made = optimizer.Muon([group_of(case, list(zip("ab", params)))], lr=LR)
    middle = train(made, params, range(2))
    saved = copy.deepcopy(made.state_dict())
    optimizer.export_state(made, tmp_path / "state.safetensors")
    twin = copy.deepcopy(made)
    end = train(made, params, [2])
    for how in ("dict", "file", "copy"):
        own = [nn.Parameter(t.clone()) for t in middle]
        again = optimizer.Muon([group_of(case, list(zip("ab", own)))], lr=9.0)
        if how == "dict":
            again.load_state_dict(saved)
        elif how == "file":
            optimizer.import_state(again, tmp_path / "state.safetensors")
        else:
            again, own = twin, twin.param_groups[0]["params"]
        assert same(train(again, own, [2]), end), how


@pytest.mark.parametrize("was, now", [("lion", "adamw"), ("adamw", "lion"), ("sgd", "sign"), ("sign", "sgd")])
def test_a_checkpoint_of_another_rule_is_refused(was, now, optimizer):
    made = []
    for rule in (was, now):
        group = {"params": tensors([(4, 3)]), "use_muon": False, **({} if rule == "adamw" else {"rule": rule})}
        made.append(optimizer.Muon([group]))
        train(made[-1], group["params"], [0])
    with pytest.raises(ValueError, match=f"rule='{was}', but has '{now}' here"):
        made[1].load_state_dict(made[0].state_dict())


def test_a_live_change_of_the_rule(optimizer):
    """State of equal keys stays, as the momentum of Lion after AdamW; other state begins at zero."""
    params = [nn.Parameter(w) for w in tensors([(6, 4)])]
    made = optimizer.Muon([group_of("adamw", params, betas=BETAS)], lr=LR, weight_decay=0.0)
    train(made, params, [0])
    state = {key: t.clone() for key, t in made.state[params[0]].items()}
    made.param_groups[0]["rule"] = "lion"
    before = params[0].detach().clone()
    train(made, params, [1])
    g, m = params[0].grad, state["exp_avg"]
    torch.testing.assert_close(params[0], before - LR * torch.sign(BETAS[0] * m + (1 - BETAS[0]) * g))
    torch.testing.assert_close(made.state[params[0]]["exp_avg"], BETAS[1] * m + (1 - BETAS[1]) * g)
    made.param_groups[0]["rule"] = "sign"
    fill(params, 2)
    with pytest.raises(ValueError, match="rule='sign' needs the key 'radius', by default 1.0"):
        made.step()
    made.param_groups[0]["radius"] = RADIUS
    made.step()
    assert made.state[params[0]]["momentum_buffer"].any()


@pytest.mark.parametrize("rule", ["scion", "sign"])
def test_radius_and_lr_are_read_live(rule, optimizer):
    """A step is of lr times radius, and no launch is bound anew."""
    params = [nn.Parameter(w) for w in tensors([(6, 4)])]
    made = optimizer.Muon([{"params": params, "use_muon": rule == "scion", "rule": rule}], lr=LR, weight_decay=0.0)
    moved = []
    for lr, radius in ((LR, 1.0), (LR, 4.0), (4 * LR, 1.0)):
        made.param_groups[0].update(lr=lr, radius=radius)
        before = params[0].detach().clone()
        made.state.clear()
        made._drop_plans()
        train(made, params, [0])
        moved.append((params[0].detach() - before).norm() / moved[0] if moved else (params[0].detach() - before).norm())
    assert moved[1:] == pytest.approx([4.0, 4.0], rel=1e-4)
    bound = made._bound
    made.param_groups[0]["radius"] = 2.0
    train(made, params, [1])
    assert made._bound is bound


def test_a_cycled_momentum(optimizer):
    """It is beta1 of Lion, and the momentum of SGD and of the sign, which have no betas."""
    params = [nn.Parameter(w) for w in tensors([(3, 2)] * 3)]
    made = optimizer.Muon([group_of(rule, [p]) for rule, p in zip(("lion", "sgd", "sign"), params)])
    for group in made.param_groups:
        group["momentum"] = 0.4
    train(made, params, [0])
    lion, sgd, sign = made.param_groups
    assert lion["betas"] == (0.4, BETAS[1]) and "betas" not in sgd and "betas" not in sign
    torch.testing.assert_close(made.state[params[2]]["momentum_buffer"], 0.6 * params[2].grad)


@pytest.mark.parametrize("case", ["lion", "sgd, nesterov", "sign"])
def test_nan_and_missing_gradients_leave_a_parameter(case, optimizer):
    params = [nn.Parameter(w) for w in tensors([(6, 4)] * 3)]
    made = optimizer.Muon([group_of(case, params)], lr=LR, nonfinite="skip")
    train(made, params, [0])

    def held():
        return [[t.clone() for t in (p.detach(), *made.state[p].values())] for p in params]

    before = held()
    fill(params, 1)
    params[0].grad, params[1].grad[2, 3] = None, math.nan
    made.step()
    assert [same(*pair) for pair in zip(before, held())] == [True, True, False]


# refusals ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("changes, error, text", [
    ({"rule": "hyperball"}, ValueError, r"group 0 .*rule='hyperball' is not .*\('adamw', 'lion', 'sgd', 'sign'\)"),
    ({"rule": 3}, ValueError, "rule=3 is not allowed in a group with use_muon=False"),
    ({"rule": "lion", "betas": (0.9,)}, ValueError, "betas=.*two numbers"),
    ({"rule": "lion", "momentum": 0.3}, ValueError, "momentum=0.3 in a group of lion, whose betas"),
    ({"rule": "sign", "radius": 0}, ValueError, "radius=0 is not allowed: it must be a finite number > 0"),
    ({"rule": "sign", "radius": "1"}, ValueError, "radius='1' is not allowed"),
    ({"rule": "scion", "use_muon": True, "radius": math.inf}, ValueError, "radius=inf is not allowed"),
    ({"rule": "lion", "use_muon": True}, ValueError, "there is no rule 'lion'"),
])
def test_bad_input_is_refused(changes, error, text, optimizer):
    with pytest.raises(error, match=text):
        optimizer.Muon([{"params": tensors([(4, 4)]), "use_muon": False, **changes}])


def test_a_class_is_no_rule_of_elements(optimizer):
    with pytest.raises(TypeError, match="a class steps matrices"):
        optimizer.Muon([{"params": tensors([(4, 4)]), "use_muon": False, "rule": optimizer.Rule}])


# GPUs --------------------------------------------------------------------------------------------------------------

@pytest.mark.gpu
@pytest.mark.parametrize("decay", ["decoupled", "cautious"])
@pytest.mark.parametrize("case", OPTIONS)
def test_a_graph_has_the_bits_of_launches(case, decay, optimizer):
    """With lr and, for the sign, radius changed in between."""
    results = []
    for capturable in (False, True):
        params = [nn.Parameter(w.cuda()) for w in tensors([(60, 40), (50,)])]
        made = optimizer.Muon([group_of(case, params, decay=decay)], lr=LR, weight_decay=WD, capturable=capturable)
        for p in params:
            p.grad = torch.empty_like(p)
        for step in range(5):
            for i, p in enumerate(params):
                p.grad.copy_(torch.randint(-9, 10, p.shape, generator=torch.Generator().manual_seed(50 * step + i)) / 4)
            made.param_groups[0]["lr"] = LR * (1 + step)
            if "radius" in made.param_groups[0]:
                made.param_groups[0]["radius"] = RADIUS + step
            made.step()
        results.append([t for p in params for t in (p.detach(), *made.state[p].values())])
    assert same(*results)


@pytest.mark.parametrize("rule", ["scion", "sign"])
@pytest.mark.parametrize("radius", [float("nan"), -1.0, "2"])
def test_a_wrong_radius_set_live_is_refused(rule, radius, optimizer):
    (weight,) = tensors([(6, 4)])
    p = nn.Parameter(weight.clone())
    made = optimizer.Muon([{"params": [p], "use_muon": rule == "scion", "rule": rule}], lr=LR)
    train(made, [p], [0])
    before = p.detach().clone()
    made.param_groups[0]["radius"] = radius
    fill([p], 1)
    with pytest.raises(ValueError, match="in group 0 .*radius=.* is not allowed: it must be a finite number > 0"):
        made.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize("rule", ["sgd", "sign"])
def test_state_of_torchs_sgd_is_refused_with_the_way_out(rule, optimizer):
    """Its weight decay is part of the gradient, and its momentum is a sum."""
    theirs, ours = ([nn.Parameter(w.clone()) for w in tensors([(6, 4)])] for _ in "12")
    peer = torch.optim.SGD(theirs, lr=LR, momentum=MU)
    train(peer, theirs, [0])
    made = optimizer.Muon([group_of(rule, ours)], lr=LR, momentum=MU, weight_decay=0.0)
    with pytest.raises(ValueError, match="saved by torch.optim.SGD.*rename the key and remove dampening"):
        made.load_state_dict(peer.state_dict())
    if rule == "sgd":
        state = peer.state_dict()
        state["state"] = {i: {"momentum_sum": s["momentum_buffer"]} for i, s in state["state"].items()}
        del state["param_groups"][0]["dampening"]
        made.load_state_dict(state)
        ours[0].data.copy_(theirs[0].detach())
        for params, stepped in ((theirs, peer), (ours, made)):
            train(stepped, params, [1])
        torch.testing.assert_close(ours[0], theirs[0])

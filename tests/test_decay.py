"""Forms of weight decay: against formulas in fp64, on every layout, in checkpoints and through the kernels."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.paths import INTERPRETED, take
from tests.ranks import package, part, run_threads
from tests.test_bucket_updates import cut
from tests.test_modes import DENSE, LAYOUTS, placements_of
from tests.test_muon import quiet, same
from tests.test_same_bits import mine, shown_state

DECAYS = ["decoupled", "cautious", "independent", "initial", "lr_squared"]
every_decay = pytest.mark.parametrize("decay", DECAYS)
LR, WD = 0.3, 0.4


def decayed(w, first, decay, direction, lr=LR, wd=WD):
    """What is subtracted from w for the sake of decay, in fp64."""
    if decay == "cautious":
        return lr * wd * w * (torch.sign(w) * torch.sign(direction) >= 0)
    if decay == "initial":
        return lr * wd * (w - first)
    return w * {"decoupled": lr * wd, "independent": wd, "lr_squared": lr * lr * wd}[decay]


def tensors(shapes, seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]


def train(optimizer, params, steps, seed=100):
    for step in steps:
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed * (step + 1) + i)).to(p)
        optimizer.step()
    return [p.detach().clone() for p in params]


# values ------------------------------------------------------------------------------------------------------------

@every_decay
@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_matrices(name, decay, optimizer):
    """What decay takes away is what a step without decay does not take away, from the same weights."""
    shapes = [(12, 8), (3, 6, 10)]
    params = [nn.Parameter(w) for w in tensors(shapes)]
    first = [p.detach().double() for p in params]
    made = getattr(optimizer, name)(params, lr=LR, weight_decay=WD, decay=decay, wire_dtype=torch.float32)
    bare = [nn.Parameter(w) for w in tensors(shapes)]
    plain = getattr(optimizer, name)(bare, lr=LR, weight_decay=0.0, wire_dtype=torch.float32)
    for step in range(3):
        old = [p.detach().double() for p in params]
        for p, b in zip(params, bare):
            b.data.copy_(p.data)
        train(made, params, [step])
        train(plain, bare, [step])
        for p, b, w, w0 in zip(params, bare, old, first):
            moved = w - b.detach().double()  # lr scale O
            expected = w - decayed(w, w0, decay, moved) - moved
            torch.testing.assert_close(p.detach().double(), expected, rtol=1e-5, atol=1e-6)
    assert ("initial_weight" in made.state[params[0]]) == (decay == "initial")


def adamw_reference(w, grads, decay, dtype, betas=(0.9, 0.95), eps=1e-8):
    """Weights after the steps, in fp64 from the formulas, rounded to the weight's dtype after each step."""
    first, m, v, (b1, b2) = w.double(), 0.0, 0.0, betas
    w = first
    for t, g in enumerate(grads, 1):
        g = g.double()
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        update = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
        w = (w - decayed(w, first, decay, update) - LR * update).to(dtype).double()
    return w


@every_decay
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_adamw(decay, dtype, optimizer):
    """Also vectors and numbers."""
    shapes = [(7,), (4, 6), (), (2, 3, 4), (0, 3)]
    params = [nn.Parameter(w) for w in tensors(shapes, dtype=dtype)]
    before = [p.detach().clone() for p in params]
    made = optimizer.Muon([{"params": params, "use_muon": False, "decay": decay}], lr=LR, weight_decay=WD)
    grads = []
    for step in range(3):
        grads.append(tensors(shapes, 10 + step, dtype))
        for p, g in zip(params, grads[-1]):
            p.grad = g.clone()
        made.step()
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 0.01}[dtype]
    for i, (p, w) in enumerate(zip(params, before)):
        expected = adamw_reference(w, [g[i] for g in grads], decay, dtype)
        torch.testing.assert_close(p.detach().double(), expected, rtol=tolerance, atol=tolerance)
    if decay == "initial":
        assert all(torch.equal(made.state[p]["initial_weight"], w) for p, w in zip(params, before))


@every_decay
def test_an_update_of_zero_decays(decay, optimizer):
    """Cautious decay leaves out only what has the opposite sign, as the paper and Dion do."""
    params = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(3))]
    groups = [{"params": params[:1]}, {"params": params[1:], "use_muon": False}]
    made = optimizer.Muon(groups, lr=LR, weight_decay=WD, decay=decay)
    for p in params:
        p.grad = torch.zeros_like(p)
    made.step()
    rate = {"independent": WD, "initial": 0.0, "lr_squared": LR * LR * WD}.get(decay, LR * WD)
    for p in params:
        torch.testing.assert_close(p.detach(), torch.full_like(p, 1 - rate))


def test_weight_and_schedule_are_read_at_each_step(optimizer):
    """A new lr or weight_decay keeps the plan, and another form makes a new one."""
    for decay in DECAYS:
        params = [nn.Parameter(w) for w in tensors([(8, 6), (5,)])]
        groups = [{"params": params[:1]}, {"params": params[1:], "use_muon": False}]
        made = optimizer.Muon(groups, lr=LR, weight_decay=WD, decay=decay)
        train(made, params, [0])
        bound = made._bound
        made.param_groups[0].update(lr=0.1, weight_decay=0.2)
        train(made, params, [1])
        assert made._bound is bound
        twin = copy.deepcopy(made)
        made.param_groups[0]["decay"] = made.param_groups[1]["decay"] = "cautious" if decay != "cautious" else "initial"
        train(made, params, [2])
        others = [p for group in twin.param_groups for p in group["params"]]
        train(twin, others, [2])
        assert not any(torch.equal(a, b) for a, b in zip(params, others))


def test_groups_of_one_form_are_stepped_together(optimizer):
    params = [nn.Parameter(w) for w in tensors([(8, 6)] * 5)]
    groups = [{"params": [p], **({} if decay == "decoupled" else {"decay": decay})} for p, decay in zip(params, DECAYS)]
    made = optimizer.Muon(groups, lr=LR, weight_decay=WD)
    together = train(made, params, range(3))
    assert len(made._bound.jobs) == 3  # uniform decay, cautious, and towards the initial weights
    for i, decay in enumerate(DECAYS):
        own = [nn.Parameter(w) for w in tensors([(8, 6)] * 5)]
        alone = optimizer.Muon(own, lr=LR, weight_decay=WD, decay=decay)
        assert torch.equal(train(alone, own, range(3))[i], together[i])


def test_the_default_has_the_bits_of_before(optimizer):
    """Spelt out or left out, and no key appears."""
    results = []
    for more in ({}, {"decay": "decoupled"}):
        params = [nn.Parameter(w) for w in tensors([(8, 6), (5,)])]
        groups = [{"params": params[:1], **more}, {"params": params[1:], "use_muon": False, **more}]
        results.append(train(optimizer.Muon(groups, lr=LR, weight_decay=WD), params, range(2)))
    assert same(*results)
    assert "decay" not in optimizer.Muon(params[:1], decay="decoupled").param_groups[0]


def test_large_parameters_are_stepped_in_parts(optimizer, monkeypatch):
    for decay in ("cautious", "initial"):
        results = []
        for most in (1 << 24, 7):
            monkeypatch.setattr(part("rules.elementwise"), "MAX_COPIED_ELEMENTS", most)
            params = [nn.Parameter(w) for w in tensors([(5, 6), (11,), (2, 2)])]
            made = optimizer.Muon([{"params": params, "use_muon": False}], lr=LR, weight_decay=WD, decay=decay)
            results.append(train(made, params, range(3)) + [made.state[p]["step"] for p in params])
        assert same(*results)


# refusals ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("value", ["Cautious", "", None, True, 1, ["cautious"]])
@pytest.mark.parametrize("use_muon", [True, False])
def test_an_unknown_form_is_refused(value, use_muon, optimizer):
    with pytest.raises(ValueError, match=r"group 0 .*decay=.* is not allowed: it must be one of .*'cautious'"):
        optimizer.Muon([{"params": tensors([(4, 4)]), "use_muon": use_muon, "decay": value}])


@pytest.mark.parametrize("key", ["decays", "Decay", "weigth_decay", "weight_decay_"])
def test_a_misspelt_key_is_refused(key, optimizer):
    with pytest.raises(ValueError, match="decay"):
        optimizer.Muon([{"params": [nn.Parameter(torch.ones(4, 4))], key: 0.1}])


@pytest.mark.parametrize("key", ["lr_decay", "decay_steps", "my_decay"])
def test_keys_of_other_tools_stay(key, optimizer):
    optimizer.Muon([{"params": [nn.Parameter(torch.ones(4, 4))], key: 0.1}])


def owners_refuse(rank, world, options, use_muon):
    params = [nn.Parameter(torch.ones(4, 4))]
    with pytest.raises(NotImplementedError, match="decay='initial' keeps the initial weights where"):
        package().Muon([{"params": params, "use_muon": use_muon, "decay": "initial"}],
                       process_group=dist.group.WORLD, **options)
    return True


@pytest.mark.parametrize("options", [{"shard_state": True}, {"grads_are_reduced": False}])
@pytest.mark.parametrize("use_muon", [True, False])
def test_initial_weights_do_not_lie_at_owners(options, use_muon, optimizer):
    assert run_threads(2, owners_refuse, options, use_muon) == [True, True]


def odd_rank(rank, world):
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    messages = []
    for odd, usual in (({"decay": "cautious"}, {}), ({"decay": "decoupled"}, {})):
        p = nn.Parameter(cut(torch.ones(8, 6), mesh, [Shard(0)]))
        p.grad = torch.ones_like(p)
        made = package().Muon([{"params": [p], **(odd if rank == 2 else usual)}])
        try:
            made.step()
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_ranks_compare_the_form(optimizer):
    for differs, equal in run_threads(4, odd_rank, timeout=20):
        assert "[2]" in differs and "group option decay" in differs and equal == ""


# layouts -----------------------------------------------------------------------------------------------------------

def stepped(decay, shapes, place, **options):
    """Weights and state after two steps."""
    fulls = tensors([*shapes, shapes[0], (9,)])
    params = [nn.Parameter(place(f)) for f in fulls]
    groups = [{"params": params[:-2]}, {"params": params[-2:], "use_muon": False}]
    made = package().NorMuon(groups, lr=LR, weight_decay=WD, decay=decay, wire_dtype=torch.float32, **options)
    for step in range(2):
        for i, (p, f) in enumerate(zip(params, fulls)):
            grad = torch.randint(-9, 9, f.shape, generator=torch.Generator().manual_seed(50 * step + i)) / 4
            p.grad = place(grad)
        made.step()
    owners = options.get("shard_state") or not options.get("grads_are_reduced", True)
    state = shown_state(made) if owners else made.state
    return [t for p in params for t in (p.detach(), *(state[p][k] for k in sorted(state[p])))]


def placed(full, mesh, placements):
    """A matrix by its placements; a vector by rows, where one dim of the mesh shards it, else whole; a number whole."""
    from torch.distributed.tensor import Replicate, Shard

    if full.ndim == 0:
        return full
    if full.ndim == 1:
        shards = [p for p in placements if p != Replicate()]
        placements = [p if p == Replicate() or len(shards) > 1 else Shard(0) for p in placements]
        placements = [Replicate()] * len(placements) if len(shards) > 1 else placements
    return cut(full, mesh, placements)


def on_layouts(rank, world, expected):
    """The cases in which this rank has not the bits of one process."""
    from torch.distributed.tensor import init_device_mesh

    local_of, wrong, meshes = part("params.dtensor").local_of, [], {}
    for (decay, shapes), wholes in expected.items():
        names = [n for n in LAYOUTS if tuple(placements_of(n, world)[2]) == shapes
                 and math.prod(placements_of(n, world)[0]) == world]
        for name in names:
            mesh_shape, placements, _ = placements_of(name, world)
            if mesh_shape not in meshes:
                meshes[mesh_shape] = init_device_mesh("cpu", mesh_shape)

            place = functools.partial(placed, mesh=meshes[mesh_shape], placements=placements)
            ours = [local_of(t) for t in stepped(decay, shapes, place)]
            if not same(ours, [local_of(place(t)) for t in wholes]):
                wrong.append((decay, name))
        for options in ({}, {"shard_state": True}, {"grads_are_reduced": False}):
            if shapes != tuple(DENSE) or options and decay == "initial":
                continue
            ours = stepped(decay, shapes, torch.clone, process_group=dist.group.WORLD, **options)
            if not same(list(map(local_of, ours)), [mine(w, t) for w, t in zip(wholes, ours, strict=True)]):
                wrong.append((decay, options))
    return wrong


@pytest.mark.parametrize("world", [3, 4])
def test_every_layout_has_the_bits_of_one_process(world, optimizer):
    shapes = {tuple(placements_of(layout, 4)[2]) for layout in LAYOUTS} | {tuple(DENSE)}
    expected = {(decay, s): stepped(decay, s, torch.clone) for decay in DECAYS for s in shapes}
    for wrong in run_threads(world, on_layouts, expected, timeout=200):
        assert wrong == []


@every_decay
def test_splits_have_the_bits_of_separate_parameters(decay, optimizer):
    full = tensors([(12, 8)])[0]
    whole = [nn.Parameter(full.clone())]
    group = {"params": whole, "split": {"rows": [4, 8]}}
    made = optimizer.Muon([group], lr=LR, weight_decay=WD, decay=decay)
    parts = [nn.Parameter(full[:4].clone()), nn.Parameter(full[4:].clone())]
    other = optimizer.Muon(parts, lr=LR, weight_decay=WD, decay=decay)
    for step in range(3):
        grad = tensors([(12, 8)], 5 + step)[0]
        whole[0].grad, parts[0].grad, parts[1].grad = grad, grad[:4].clone(), grad[4:].clone()
        made.step()
        other.step()
    assert torch.equal(whole[0], torch.cat([p.detach() for p in parts]))


@every_decay
def test_matrices_with_nan_are_skipped(decay, optimizer):
    params = [nn.Parameter(w) for w in tensors([(6, 4), (6, 4), (5,), (5,)])]
    groups = [{"params": params[:2]}, {"params": params[2:], "use_muon": False}]
    made = optimizer.Muon(groups, lr=LR, weight_decay=WD, decay=decay, nonfinite="skip")
    before = train(made, params, [0])
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, math.nan if i % 2 else 1.0)
    made.step()
    assert [torch.equal(p, b) for p, b in zip(params, before)] == [False, True, False, True]


# state -------------------------------------------------------------------------------------------------------------

def model_of(decay, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
    matrices, rest = ([p for p in model.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    return model, package().Muon([{"params": matrices}, {"params": rest, "use_muon": False}], lr=LR, weight_decay=WD,
                                 **({} if decay is None else {"decay": decay}))


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


@every_decay
def test_a_state_dict_goes_on(decay, optimizer):
    model, made = model_of(decay)
    train(made, params_of(made), range(2))
    saved = copy.deepcopy(made.state_dict())
    for own in (decay, None):  # an optimizer without the key takes the saved one
        again, other = model_of(own, 1)
        again.load_state_dict(model.state_dict())
        other.load_state_dict(saved)
        assert other.param_groups[0].get("decay", "decoupled") == decay
        twin = copy.deepcopy(made)
        assert same(train(other, params_of(other), [2]), train(twin, params_of(twin), [2]))


@pytest.mark.parametrize("flat", [False, True])
@every_decay
def test_torchs_distributed_checkpoint(decay, flat, tmp_path, optimizer):
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, made = model_of(decay)
    train(made, params_of(made), range(2))
    dcp.save({"o": get_optimizer_state_dict(model, made, options=how)}, checkpoint_id=tmp_path)
    again, other = model_of(decay, 1)
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        weights = [p.clone() for p in params_of(other)]
    state = {"o": get_optimizer_state_dict(again, other, options=how)}
    assert same([p.detach() for p in params_of(other)], weights)  # also with a decay that lr 0 does not stop
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(again, other, state["o"], options=how)
    assert same(train(other, params_of(other), [2]), train(made, params_of(made), [2]))


@pytest.mark.parametrize("flat", [False, True])
def test_a_checkpoint_from_before_the_key_loads(flat, tmp_path, optimizer):
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, made = model_of(None)
    train(made, params_of(made), [0])
    dcp.save({"o": get_optimizer_state_dict(model, made, options=how)}, checkpoint_id=tmp_path)
    again, other = model_of(None, 1)
    state = {"o": get_optimizer_state_dict(again, other, options=how)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(again, other, state["o"], options=how)
    assert "decay" not in other.param_groups[0]
    again, other = model_of("cautious", 1)
    other.load_state_dict(made.state_dict())
    assert other.param_groups[0]["decay"] == "cautious"


@every_decay
def test_files_of_one_process(decay, tmp_path, optimizer):
    model, made = model_of(decay)
    train(made, params_of(made), range(2))
    optimizer.export_state(made, tmp_path / "state.safetensors", model)
    for own in (decay, None):
        again, other = model_of(own, 1)
        again.load_state_dict(model.state_dict())
        optimizer.import_state(other, tmp_path / "state.safetensors", again)
        assert other.param_groups[1].get("decay", "decoupled") == decay
        twin = copy.deepcopy(made)
        assert same(train(other, params_of(other), [2]), train(twin, params_of(twin), [2]))


def test_initial_weights_are_those_of_the_first_step_with_the_key(optimizer):
    model, made = model_of(None)
    train(made, params_of(made), range(2))
    now = [p.detach().clone() for p in params_of(made)]
    for group in made.param_groups:
        group["decay"] = "initial"
    train(made, params_of(made), [2])
    assert same([made.state[p]["initial_weight"] for p in params_of(made)], now)


def test_initial_weights_in_bf16_stay_exact(optimizer):
    params = [nn.Parameter(w) for w in tensors([(6, 4), (5,)], dtype=torch.float32)]
    groups = [{"params": params[:1]}, {"params": params[1:], "use_muon": False}]
    before = [p.detach().clone() for p in params]
    made = optimizer.Muon(groups, decay="initial", state_dtype=torch.bfloat16)
    train(made, params, [0])
    saved = made.state_dict()
    made.load_state_dict(copy.deepcopy(saved))
    assert same([made.state[p]["initial_weight"] for p in params], before)


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_creating_state_decays_nothing(lr, optimizer):
    """The first step with lr 0 and zero gradients, by which torch.distributed.checkpoint creates state."""
    params = [nn.Parameter(w) for w in tensors([(6, 4), (5,)])]
    before = [p.detach().clone() for p in params]
    groups = [{"params": params[:1]}, {"params": params[1:], "use_muon": False}]
    made = optimizer.Muon(groups, lr=lr, weight_decay=WD, decay="independent")
    for p in params:
        p.grad = torch.zeros_like(p)
    made.step()
    assert same([p.detach() for p in params], before) == (lr == 0)
    assert float(made.state[params[1]]["step"]) == (lr != 0)


# kernels -----------------------------------------------------------------------------------------------------------

@quiet
@pytest.mark.interpreter
@pytest.mark.parametrize("momenta", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float16, torch.float32),
                                    (torch.bfloat16, torch.bfloat16)], ids=str)
def test_the_kernel_has_the_bits_of_torch(dtypes, momenta, device, monkeypatch):
    w_dtype, o_dtype = dtypes
    if INTERPRETED and torch.bfloat16 in dtypes:
        pytest.skip("the interpreter rounds to bf16 towards zero")
    shapes, update = [(3, 5), (1, 7), (0, 4), (40, 16), (9, 1)], part("kernels.elementwise.weight_update")
    table = part("kernels.elementwise.multi_tensor")
    group = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9, "decay": "initial"}
    numbers = torch.tensor(part("rules.rule").device_scalars(group) * 2, device=device)
    numbers[table.NUMBERS:] *= 0.5
    start, O, first, M, G = (tensors(shapes, i, d, device) for i, d in
                             enumerate((w_dtype, o_dtype, w_dtype, torch.float32, torch.float32)))
    start[0][0, :2], O[0][0, 0], O[0][0, 2] = 0, -0.0, 1e-38
    for form in (update.ALL, update.CAUTIOUS, update.TO_INITIAL):
        results = []
        for path in ("torch", "triton"):
            take(path, monkeypatch)
            W, momentum = ([t.clone() for t in some] for some in (start, M))
            sources = [table.Source(i, 0, tuple(g.stride())) for i, g in enumerate(G)]
            own = (momentum, sources, G) if momenta else (None, (), ())
            initial = first if form == update.TO_INITIAL else ()
            bound = update.WeightUpdate(W, O, [0.5] * len(W), None, *own, [0, 1, 0, 1, 0], form, initial)
            at = None if torch.device(device).type == "cpu" and path == "torch" else torch.tensor(
                [g.data_ptr() for g in G], device=device)
            bound(numbers, G, at, numbers[4:])
            results.append(W + momentum)
        assert same(*results)


@quiet
@pytest.mark.interpreter
@every_decay
def test_steps_through_the_kernels(decay, device, monkeypatch):
    """Where there is no GPU, in Triton's interpreter."""
    results = []
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        params = [nn.Parameter(w) for w in tensors([(6, 4), (2, 4, 6), (5,)], device=device)]
        groups = [{"params": params[:2]}, {"params": params[2:], "use_muon": False}]
        made = package().NorMuon(groups, lr=LR, weight_decay=WD, decay=decay, ns_steps=2, wire_dtype=torch.float32,
                                     ns_dtype=torch.float32)
        results.append(train(made, params, range(2)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

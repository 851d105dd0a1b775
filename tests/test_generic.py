"""What PyTorch asks of any optimizer: state dicts, copies, schedulers, hooks, closures, and odd memory."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.ranks import package
from tests.test_muon import EXACT, JORDAN, copies, gradients, same, train, weights, zeropower

MATRICES, REST = [(8, 6), (6, 8), (2, 4, 6), (0, 3)], [(6,), (), (5, 3)]
NAMES = pytest.mark.parametrize("name", ["Muon", "NorMuon"])


def build(name, params, **options):
    """An optimizer with two Muon groups and one AdamW group."""
    groups = [{"params": params[:2]}, {"params": params[2:4], "momentum": 0.8, "lr": 0.05},
              {"params": params[4:], "use_muon": False, "lr": 0.02}]
    return getattr(package(), name)(groups, **{"lr": 0.1, **options})


def problem(device="cpu", dtype=torch.float32):
    params = weights(MATRICES + REST, device, dtype)
    return params, gradients(params, 6)


def twins(name, device):
    """A problem twice: (parameters, their optimizer, equal parameters, theirs, the gradients of both)."""
    params, grads = problem(device)
    others = copies(params)
    return params, build(name, params), others, build(name, others), grads


def tensors_of(optimizer):
    return [t for group in optimizer.param_groups for p in group["params"] for t in optimizer.state[p].values()]


# state dicts -----------------------------------------------------------------------------------------------------

@pytest.mark.kernels_ci
@NAMES
@pytest.mark.parametrize("steps_before", [0, 2], ids=["fresh", "used"])
def test_a_loaded_state_dict_continues_with_the_very_bits(name, steps_before, device):
    params, grads = problem(device)
    optimizer = build(name, params)
    train(optimizer, params, grads[:3])
    saved = copy.deepcopy(optimizer.state_dict())
    again, kept = copies(params), copy.deepcopy(saved)
    other = build(name, again, lr=9.0, momentum=0.1)
    train(other, copies(params), grads[:steps_before])
    other.load_state_dict(saved)
    assert_equal(saved, kept)
    assert_equal(other.state_dict(), kept)
    train(optimizer, params, grads[3:])
    train(other, again, grads[3:])
    assert same(params, again) and same(tensors_of(optimizer), tensors_of(other))


def assert_equal(first, second):
    assert list(first) == list(second)
    for key in first["state"]:
        assert list(first["state"][key]) == list(second["state"][key])
        for a, b in zip(first["state"][key].values(), second["state"][key].values()):
            assert torch.equal(a, b) and a.dtype == b.dtype
    assert first["param_groups"] == second["param_groups"]


@NAMES
def test_the_state_dict_has_torchs_form(name):
    params, grads = problem()
    optimizer = build(name, params)
    train(optimizer, params, grads[:1])
    saved = optimizer.state_dict()
    assert set(saved) == {"state", "param_groups"} and list(saved["state"]) == list(range(len(params)))
    assert [g["params"] for g in saved["param_groups"]] == [[0, 1], [2, 3], [4, 5, 6]]
    muon = {"momentum_buffer"} if name == "Muon" else {"momentum_buffer", "second_moment"}
    assert [set(state) for state in saved["state"].values()] == [muon] * 4 + [{"step", "exp_avg", "exp_avg_sq"}] * 3
    for p, state in zip(params, saved["state"].values()):
        assert all(t.shape == p.shape for key, t in state.items() if key not in ("step", "second_moment"))


@NAMES
def test_saved_with_torch_and_loaded_with_weights_only(name):
    params, grads = problem()
    optimizer, file = build(name, params), io.BytesIO()
    train(optimizer, params, grads[:2])
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = copies(params)
    other = build(name, again)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert same(train(optimizer, params, grads[2:]), train(other, again, grads[2:]))


def test_a_loaded_optimizer_shares_no_memory_with_the_dict():
    params, grads = problem()
    optimizer = build("NorMuon", params)
    train(optimizer, params, grads[:2])
    others = [copies(params), copies(params)]
    for again in others:
        other = build("NorMuon", again)
        other.load_state_dict(optimizer.state_dict())
        train(other, again, grads[2:])
    assert same(*others)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_the_state_of_bf16_parameters_keeps_its_dtype(state_dtype, device):
    """torch casts loaded state to the parameter's dtype."""
    params, grads = problem(device, torch.bfloat16)
    optimizer = build("NorMuon", params, state_dtype=state_dtype)
    train(optimizer, params, grads[:2])
    again = copies(params)
    other = build("NorMuon", again, state_dtype=state_dtype)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {t.dtype for t in tensors_of(other)} == {torch.float32, state_dtype}
    assert_equal(optimizer.state_dict(), other.state_dict())
    assert same(train(optimizer, params, grads[2:]), train(other, again, grads[2:]))


def test_the_state_of_torchs_muon(monkeypatch):
    """A run of torch.optim.Muon goes on here: its groups say nothing of use_muon, betas or beta2."""
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", zeropower(torch.float64))
    params = weights([(8, 6), (6, 8)])
    grads, ours = gradients(params, 6), copies(params)
    theirs = torch.optim.Muon(params, lr=0.1, momentum=0.8)
    train(theirs, params, grads[:3])
    optimizer = package().Muon(ours, **EXACT)
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for p, old in zip(ours, params):
        p.data.copy_(old.data)
    assert optimizer.param_groups[0]["momentum"] == 0.8 and optimizer.param_groups[0]["ns_coefficients"] == JORDAN
    before = copies(params)
    train(theirs, params, grads[3:])
    train(optimizer, ours, grads[3:])
    for old, a, b in zip(before, ours, params):
        assert (a - b).abs().max() < 1e-5 * (b - old).abs().max()


def test_the_state_of_torchs_muon_does_for_normuon():
    """What the saved groups and states lack is the optimizer's own."""
    params = weights([(8, 6), (6, 8)])
    grads = gradients(params, 3)
    theirs = torch.optim.Muon(params, lr=0.1)
    train(theirs, params, grads[:2])
    optimizer = package().NorMuon(params, beta2=0.9)
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert optimizer.param_groups[0]["beta2"] == 0.9 and optimizer.param_groups[0]["lr"] == 0.1
    train(optimizer, params, grads[2:])
    assert all(p.isfinite().all() and optimizer.state[p]["second_moment"].all() for p in params)


def test_the_state_of_torchs_adamw():
    """Loaded into a group with use_muon=False, which stays one."""
    params = weights([(8, 6), (6,), ()])
    grads, ours = gradients(params, 6), copies(params)
    theirs = torch.optim.AdamW(params, lr=0.1, betas=(0.8, 0.9), foreach=True)
    train(theirs, params, grads[:3])
    optimizer = package().Muon([{"params": ours, "use_muon": False}])
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for p, old in zip(ours, params):
        p.data.copy_(old.data)
    assert same(train(theirs, params, grads[3:]), train(optimizer, ours, grads[3:]))


@pytest.mark.parametrize("use_muon", [True, False])
def test_state_of_two_dtypes(use_muon):
    """torch's optimizers keep state in the parameter's dtype: a group of bf16 and fp32 parameters has both."""
    params = weights([(8, 6)], dtype=torch.bfloat16) + weights([(6, 8)])
    grads, ours = gradients(params, 2), copies(params)
    theirs = torch.optim.Muon(params) if use_muon else torch.optim.AdamW(params)
    train(theirs, params, grads[:1])
    optimizer = package().Muon([{"params": ours, "use_muon": use_muon}])
    saved = copy.deepcopy(theirs.state_dict())
    saved["param_groups"] = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(saved)
    train(optimizer, ours, grads[1:])
    assert all(p.isfinite().all() for p in ours)


def test_a_count_of_steps_that_is_a_number_or_on_the_host(device):
    """Older AdamWs kept a number; a checkpoint may be loaded to the host. Where it belongs is known here."""
    params = weights([(8, 6), (6,)], device)
    grads, others = gradients(params, 4), [copies(params), copies(params)]
    optimizer = package().Muon([{"params": params, "use_muon": False}])
    train(optimizer, params, grads[:2])
    for again, changed in zip(others, (lambda step: step.item(), lambda step: step.cpu().double())):
        other, saved = package().Muon([{"params": again, "use_muon": False}]), copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            state["step"] = changed(state["step"])
            state["max_exp_avg_sq"] = None  # of no use here
        other.load_state_dict(saved)
        for p, q in zip(again, params):
            p.data.copy_(q.data)
        train(other, again, grads[2:])
        assert set(other.state[again[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    train(optimizer, params, grads[2:])
    assert same(params, others[0]) and same(params, others[1])


@NAMES
@pytest.mark.parametrize("key", ["adjust_lr_fn", "ns_steps", "betas", "use_muon"])
def test_a_state_dict_that_lacks_a_key(key, name):
    """Saved by an earlier version: what it lacks is the optimizer's own."""
    params, grads = problem()
    optimizer = build(name, params)
    train(optimizer, params, grads[:2])
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group.pop(key, None)
    again = copies(params)
    other = build(name, again)
    other.load_state_dict(saved)
    assert same(train(optimizer, params, grads[2:]), train(other, again, grads[2:]))


def test_a_state_dict_of_other_groups_is_refused():
    params, grads = problem()
    optimizer = build("Muon", params)
    with pytest.raises(ValueError):
        optimizer.load_state_dict(package().Muon(copies(params[:2])).state_dict())
    train(optimizer, params, grads[:1])


# copies ----------------------------------------------------------------------------------------------------------

def repickled(thing):
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.kernels_ci
@NAMES
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("copied", [copy.deepcopy, repickled])
def test_a_copy_continues_with_the_very_bits(copied, steps, name, device):
    params, grads = problem(device)
    optimizer = build(name, params, wire_dtype=torch.float32)
    train(optimizer, params, grads[:steps])
    again, other = copied((params, optimizer))
    assert other.param_groups[0]["params"][0] is again[0] is not params[0]
    assert_equal(optimizer.state_dict(), other.state_dict())
    assert same(train(optimizer, params, grads[steps:]), train(other, again, grads[steps:]))
    assert same(tensors_of(optimizer), tensors_of(other))


@NAMES
@pytest.mark.parametrize("copied", [copy.deepcopy, repickled])
def test_a_copy_can_do_all_that_the_original_can(copied, name):
    params, grads = problem()
    optimizer = build(name, params)
    train(optimizer, params, grads[:1])
    again, other = copied((params, optimizer))
    assert {k for k in vars(optimizer) if not k.startswith("_")} == {k for k in vars(other) if not k.startswith("_")}
    assert repr(optimizer) == repr(other)
    for who in (optimizer, other):
        who.add_param_group({"params": [nn.Parameter(torch.ones(3, 3))]})
        who.load_state_dict(copy.deepcopy(who.state_dict()))
        who.param_groups[-1].pop("differentiable", None)  # torch's __setstate__ makes it a default
    assert_equal(optimizer.state_dict(), other.state_dict())


# learning rate schedules -----------------------------------------------------------------------------------------

SCHEDULES = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda t: 0.9 ** t, lambda t: 1 / (t + 1), lambda t: t / 10]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.2, 0.3], total_steps=8),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "warm-up, then cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 4)], milestones=[2]),
}


@pytest.mark.kernels_ci
@NAMES
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_is_what_its_numbers_say(schedule, name):
    params, grads = problem()
    by_hand = copies(params)
    optimizer, other = build(name, params), build(name, by_hand)
    scheduler, seen = SCHEDULES[schedule](optimizer), []
    for step in grads:
        for group, theirs in zip(other.param_groups, optimizer.param_groups):
            group.update({key: theirs[key] for key in ("lr", "momentum", "betas") if key in theirs})
        seen.append(other.param_groups[0]["lr"])
        train(optimizer, params, [step])
        train(other, by_hand, [step])
        scheduler.step()
    assert len(set(seen)) > 2 and same(params, by_hand)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert same(train(optimizer, params, grads), train(other, by_hand, grads))


@pytest.mark.parametrize("schedule", ["one cycle", "cyclic"])
def test_a_schedule_that_cycles_momentum_does_so_as_for_torchs_muon(schedule):
    """It looks for `betas` in the defaults first, then for `momentum`."""
    params = weights([(4, 4)] * 3)
    seen = []
    for cls in (torch.optim.Muon, package().Muon):
        optimizer = cls([{"params": [p]} for p in params])
        scheduler = SCHEDULES[schedule](optimizer)
        seen.append([])
        for _ in range(6):
            seen[-1].append(tuple((g["lr"], g["momentum"]) for g in optimizer.param_groups))
            train(optimizer, params, gradients(params, 1))
            scheduler.step()
    assert seen[0] == seen[1] and len(set(seen[0])) == 6


def test_a_plateau_lowers_the_learning_rate():
    params, grads = problem()
    optimizer = build("Muon", params)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    for step in grads[:3]:
        train(optimizer, params, [step])
        scheduler.step(1.0)
    assert [round(g["lr"], 9) for g in optimizer.param_groups] == [0.001, 0.0005, 0.0002]


def test_groups_added_after_a_schedule_began():
    params, grads = problem()
    optimizer = build("Muon", params)
    lr_scheduler.StepLR(optimizer, step_size=1)
    train(optimizer, params, grads[:1])
    optimizer.add_param_group({"params": weights([(3, 3)]), "initial_lr": 0.1})
    train(optimizer, params, grads[1:])


# groups ----------------------------------------------------------------------------------------------------------

@pytest.mark.kernels_ci
@NAMES
@pytest.mark.parametrize("use_muon", [True, False])
def test_a_group_added_after_steps(use_muon, name, device):
    """The old parameters go on; the new ones start as in an optimizer of their own."""
    params, grads = problem(device)
    more = weights([(7, 5), (5, 7)], device)
    more_grads, alone, twin = gradients(more, 4), copies(more), copies(params)
    optimizer, unchanged = build(name, params), build(name, twin)
    train(optimizer, params, grads[:2])
    optimizer.add_param_group({"params": more, "use_muon": use_muon, "lr": 0.3})
    for step, extra in zip(grads[2:], more_grads):
        train(optimizer, params + more, [[*step, *extra]])
    assert same(train(unchanged, twin, grads), params)
    own = getattr(package(), name)([{"params": alone, "use_muon": use_muon, "lr": 0.3}])
    assert same(train(own, alone, more_grads), more)


@NAMES
def test_a_group_added_after_loading(name):
    """torch's own __setstate__ writes a key into the defaults."""
    params, grads = problem()
    optimizer, more = build(name, params), weights([(3, 3)])
    train(optimizer, params, grads[:1])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.add_param_group({"params": more})
    train(optimizer, more, gradients(more, 2))


def test_named_parameters():
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    optimizer = package().Muon(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "1.weight"]
    params = list(model.parameters())
    train(optimizer, params, gradients(params, 2))
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["0.weight", "1.weight"]
    optimizer.load_state_dict(saved)


def test_a_generator_of_parameters_and_a_single_tensor():
    model = nn.Linear(4, 3, bias=False)
    assert len(package().Muon(model.parameters()).param_groups[0]["params"]) == 1
    assert len(package().Muon([{"params": model.weight}]).param_groups[0]["params"]) == 1


def test_it_can_be_printed():
    params, _ = problem()
    text = repr(build("NorMuon", params))
    assert text.startswith("NorMuon") and "use_muon: False" in text and "beta2" in text


# closures and hooks ----------------------------------------------------------------------------------------------

@NAMES
def test_a_closure(name):
    params, grads = problem()
    by_hand, calls = copies(params), []
    optimizer, other = build(name, params), build(name, by_hand)
    for step in grads[:3]:
        def closure(step=step):
            optimizer.zero_grad()
            loss = sum((p * g).sum() for p, g in zip(params, step))
            assert torch.is_grad_enabled() and loss.requires_grad
            loss.backward()
            calls.append(loss.item())
            return loss
        assert optimizer.step(closure).item() == calls[-1]
        train(other, by_hand, [step])
    assert len(calls) == 3 and same(params, by_hand)
    assert optimizer.step() is None and all(p.requires_grad for p in params)


@NAMES
def test_step_hooks(name):
    params, grads = problem()
    optimizer, calls = build(name, params), []
    handles = [register_optimizer_step_pre_hook(lambda o, *_: calls.append("all before")),
               register_optimizer_step_post_hook(lambda o, *_: calls.append("all after")),
               optimizer.register_step_pre_hook(lambda o, *_: calls.append("before")),
               optimizer.register_step_post_hook(lambda o, *_: calls.append("after"))]
    try:
        train(optimizer, params, grads[:1])
    finally:
        for handle in handles:
            handle.remove()
    train(optimizer, params, grads[:1])
    assert calls == ["all before", "before", "after", "all after"]


def test_a_pre_hook_may_change_the_gradients():
    params, grads = problem()
    scaled = copies(params)
    optimizer, other = build("Muon", params), build("Muon", scaled)

    @optimizer.register_step_pre_hook
    def halve(_, args, kwargs):
        for p in params:
            p.grad.mul_(0.5)

    train(optimizer, params, grads)
    assert same(params, train(other, scaled, [[g * 0.5 for g in step] for step in grads]))


@NAMES
def test_state_dict_hooks(name):
    params, grads = problem()
    optimizer, calls = build(name, params), []
    train(optimizer, params, grads[:2])
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda o, d: {**d, "note": 1})
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))

    @optimizer.register_load_state_dict_pre_hook
    def doubled(_, loaded):
        calls.append("load")
        state = {number: dict(state) for number, state in loaded["state"].items()}
        for number in range(4):
            state[number]["momentum_buffer"] = 2 * state[number]["momentum_buffer"]
        return {**loaded, "state": state}

    saved = copy.deepcopy(optimizer.state_dict())
    assert saved.pop("note") == 1
    for _ in range(2):
        optimizer.load_state_dict(saved)
    assert calls == ["save", "load", "loaded", "load", "loaded"]
    for number, p in enumerate(params[:4]):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], 2 * saved["state"][number]["momentum_buffer"])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    params, grads = problem()
    optimizer = build("NorMuon", params)
    train(optimizer, params, grads[:2])
    optimizer.zero_grad(set_to_none=set_to_none)
    assert all((p.grad is None) if set_to_none else not p.grad.any() for p in params)
    before = copies(params)
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(params, before)] == [set_to_none or a.numel() == 0 for a in params]


# memory ----------------------------------------------------------------------------------------------------------

def transposed(t):
    return t.mT.contiguous().mT if t.ndim > 1 else t.repeat_interleave(2)[::2] if t.ndim else t


def inside(t):
    """A view into larger memory, with an offset and gaps."""
    room = torch.full([n + 3 for n in t.shape], float("nan"), dtype=t.dtype, device=t.device)
    view = room[tuple(slice(2, 2 + n) for n in t.shape)]
    return view.copy_(t)


def widened(t):
    return t[..., None].expand(*t.shape, 2).contiguous()[..., 0]


@pytest.mark.kernels_ci
@NAMES
@pytest.mark.parametrize("of_grad", [transposed, inside, widened, torch.clone])
@pytest.mark.parametrize("of_param", [transposed, inside, widened, torch.clone])
def test_memory_that_is_not_contiguous(of_param, of_grad, name, device):
    params, grads = problem(device)
    odd = [nn.Parameter(of_param(p.detach())) for p in params]
    optimizer, other = build(name, params), build(name, odd)
    for step in grads:
        for p, q, g in zip(params, odd, step):
            p.grad, q.grad = g.clone(), of_grad(g)
        optimizer.step()
        other.step()
    assert same(params, odd) and same(tensors_of(optimizer), tensors_of(other))


@NAMES
def test_gradients_whose_memory_changes_from_step_to_step(name, device):
    """Views of a communication bucket, then of their own, then transposed: only the values count."""
    params, optimizer, odd, other, grads = twins(name, device)
    for number, step in enumerate(grads):
        flat = torch.cat([torch.zeros(number, device=device), *(g.flatten() for g in step)])
        at = number
        for p, q, g in zip(params, odd, step):
            p.grad = g.clone()
            in_bucket = flat[at:at + g.numel()].view(g.shape)
            q.grad = [torch.Tensor.detach, transposed, inside][number % 3](in_bucket)
            at += g.numel()
        optimizer.step()
        other.step()
    assert same(params, odd)


def test_an_expanded_gradient(device):
    """All elements share one memory cell, as the gradient of a sum would."""
    params, other = weights([(6, 4), (4,)], device), None
    other = copies(params)
    for ours, expand in ((params, True), (other, False)):
        optimizer = package().NorMuon([{"params": ours[:1]}, {"params": ours[1:], "use_muon": False}])
        for p in ours:
            p.grad = torch.ones((), device=device).expand(p.shape) if expand else torch.ones_like(p)
        optimizer.step()
    assert same(params, other)


@pytest.mark.kernels_ci
@NAMES
@pytest.mark.parametrize("steps", [0, 2])
def test_parameters_swapped_after_construction(steps, name, device):
    """Accelerate and FSDP2 put other tensors into group["params"]; state that moved along is kept."""
    params, optimizer, swapped, other, grads = twins(name, device)
    train(other, swapped, grads[:steps])
    fresh = copies(swapped)
    for group in other.param_groups:
        for i, old in enumerate(group["params"]):
            new = next(f for f, s in zip(fresh, swapped) if s is old)
            group["params"][i] = new
            if old in other.state:
                other.state[new] = other.state.pop(old)
    train(other, fresh, grads[steps:])
    assert same(train(optimizer, params, grads), fresh)
    assert len(other.state) == len(fresh)


@NAMES
def test_groups_that_were_replaced_are_read_from_then_on(name, device):
    """By dicts of the same parameters, as those do who rebuild `param_groups`: schedules write to the new ones."""
    params, optimizer, alike, other, grads = twins(name, device)
    for number, step in enumerate(grads):
        if number == 2:
            optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
        if number == 4:
            optimizer.param_groups[2] = dict(optimizer.param_groups[2])
        for group in optimizer.param_groups + other.param_groups:
            group["lr"] *= 0.5
        train(optimizer, params, [step])
        assert same(params, train(other, alike, [step]))


@pytest.mark.parametrize("left", [(), (0,), (1, 2)], ids=str)
def test_groups_whose_parameters_were_taken_out(left, device):
    """Freezing by hand: what is in no group is left alone, as in torch, and is stepped again once it is back."""
    params, grads = problem(device)
    optimizer = build("Muon", params)
    train(optimizer, params, grads[:1])
    whole, before = [list(group["params"]) for group in optimizer.param_groups], copies(params)
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = whole[number] if number in left else []
    train(optimizer, params, grads[1:2])
    moved = [not torch.equal(p, b) for p, b in zip(params, before) if p.numel()]
    assert moved == [number in left for number, group in enumerate(whole) for p in group if p.numel()]
    for group, members in zip(optimizer.param_groups, whole):
        group["params"] = members
    train(optimizer, params, grads[2:3])
    assert not any(torch.equal(p, b) for p, b in zip(params, before) if p.numel())


def test_a_parameter_that_is_appended_without_a_name():
    first, second = weights([(8, 6), (6, 8)])
    optimizer, before = package().Muon([("first", first)]), second.detach().clone()
    optimizer.param_groups[0]["params"].append(second)
    train(optimizer, [first, second], gradients([first, second], 2))
    assert not torch.equal(second, before)


@NAMES
def test_what_others_keep_in_the_state_of_a_parameter(name, device, tmp_path):
    """It may have any form, is left alone, and is saved and loaded as in torch."""
    params, optimizer, alike, other, grads = twins(name, device)
    for p in params:
        optimizer.state[p].update(mask=torch.ones(3, device=p.device), decay=torch.tensor(0.9), count=1)
    assert same(train(optimizer, params, grads[:3]), train(other, alike, grads[:3]))
    params[0].grad, alike[0].grad = None, None  # with others' gradients there, it is left out
    optimizer.step(), other.step()
    again = copies(params)
    loaded = build(name, again)
    loaded.load_state_dict(optimizer.state_dict())
    assert all(loaded.state[p]["mask"].tolist() == [1, 1, 1] and loaded.state[p]["count"] == 1 for p in again)
    train(other, alike, grads[3:])
    assert same(train(loaded, again, grads[3:]), alike)
    named = {p: f"p{i}" for i, p in enumerate(again)}
    for group in loaded.param_groups:
        group["param_names"] = [named[p] for p in group["params"]]
    package().export_state(loaded, tmp_path / "state")
    package().import_state(loaded, tmp_path / "state")


@NAMES
def test_parameters_moved_in_memory(name, device):
    params, optimizer, moved, other, grads = twins(name, device)
    for step in grads:
        train(other, moved, [step])
        for p in moved:
            p.data = p.data.clone()
    assert same(train(optimizer, params, grads), moved)


@NAMES
def test_parameters_that_change_their_dtype(name, device):
    """model.bfloat16() after some steps: the state stays."""
    params, grads = problem(device)
    optimizer = build(name, params)
    train(optimizer, params, grads[:2])
    state = [t.clone() for t in tensors_of(optimizer)]
    again = copies([p.detach().bfloat16() for p in params])
    for p in params:
        p.grad, p.data = None, p.data.bfloat16()
    assert same(tensors_of(optimizer), state)
    other = build(name, again)
    for p, q in zip(params, again):
        other.state[q] = {k: v.clone() for k, v in optimizer.state[p].items()}
    low = [[g.bfloat16() for g in step] for step in grads[2:]]
    assert same(train(optimizer, params, low), train(other, again, low))


@NAMES
@pytest.mark.parametrize("shapes", [[(0, 5)], [(5, 0)], [(0, 4, 4)], [(3, 0, 4)], [(0, 5), (4, 4)]], ids=str)
def test_parameters_without_elements(shapes, name, device):
    params = weights(shapes, device)
    optimizer = getattr(package(), name)(params)
    train(optimizer, params, gradients(params, 2))
    assert all(optimizer.state[p]["momentum_buffer"].shape == p.shape for p in params)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elementwise = getattr(package(), name)([{"params": params, "use_muon": False}])
    train(elementwise, params, gradients(params, 2))


def test_two_optimizers_of_one_model(device):
    """They share parameters of different groups, and nothing else."""
    params, grads = problem(device)
    together = copies(params)
    whole = build("Muon", params)
    first = package().Muon([{"params": together[:2]}, {"params": together[2:4], "momentum": 0.8, "lr": 0.05}], lr=0.1)
    second = package().Muon([{"params": together[4:], "use_muon": False, "lr": 0.02}])
    for step in grads:
        train(first, together, [step])
        second.step()
    assert same(train(whole, params, grads), together)


def test_a_step_keeps_the_versions_that_autograd_checks():
    """Weights that a backward still needs may not change unnoticed."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = package().Muon(model.parameters())
    loss = model(torch.randn(2, 4)).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

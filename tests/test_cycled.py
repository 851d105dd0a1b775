"""Numbers that schedules write: `momentum` of AdamW groups is beta1, and each group has tensors of its own."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

from tests.ranks import everywhere, package, run_threads
from tests.test_muon import copies, gradients, same, weights
from tests.test_overlap_backward import backward, departures, fsdp

SHAPES = [(6, 4), (5,), (7, 3)]
SCHEDULES = {"one cycle": lambda opt: OneCycleLR(opt, max_lr=0.1, total_steps=12),
             "cyclic": lambda opt: CyclicLR(opt, base_lr=0.01, max_lr=0.1, step_size_up=3)}


def adamw(params, **options):
    return package().Muon([{"params": params, "use_muon": False}], adamw_betas=(0.9, 0.99), weight_decay=0.1, **options)


def run(opt, params, grads, schedule=None):
    for step in grads:
        for p, g in zip(params, step):
            p.grad = g.clone()
        opt.step()
        if schedule is not None:
            schedule.step()


def close(ours, theirs):
    return all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_cycles_momentum_cycles_beta1_of_adamw(name, optimizer):
    """As that of torch.optim.AdamW, whose betas it finds; here it finds momentum, the one of Muon's groups."""
    params = weights(SHAPES)
    grads, ours, theirs, kept = gradients(params, 9), copies(params), copies(params), copies(params)
    muon, reference = adamw(ours), torch.optim.AdamW(theirs, betas=(0.9, 0.99), weight_decay=0.1)
    other = adamw(kept)
    schedules = [SCHEDULES[name](opt) for opt in (muon, reference, other)]
    seen = []
    for step in grads:
        for p, g in zip(theirs, step):
            p.grad = g.clone()
        reference.step()
        run(muon, ours, [step])
        assert muon.param_groups[0]["betas"] == reference.param_groups[0]["betas"]
        other.param_groups[0]["momentum"] = 0.9
        run(other, kept, [step])
        seen.append(muon.param_groups[0]["betas"][0])
        for schedule in schedules:
            schedule.step()
    assert len(set(seen)) > 3 and close(ours, theirs) and not close(kept, theirs)


def test_momentum_of_an_adamw_group_is_beta1_from_the_start(optimizer):
    muon = package().Muon([{"params": weights([(4, 4)])}, {"params": weights([(3,)]), "use_muon": False},
                           {"params": weights([(2,)]), "use_muon": False, "betas": (0.7, 0.8)}])
    assert [group["momentum"] for group in muon.param_groups] == [0.95, 0.9, 0.7]


def test_betas_that_are_set_count_and_momentum_follows(optimizer):
    params = weights(SHAPES)
    grads, ours, theirs = gradients(params, 4), copies(params), copies(params)
    muon, reference = adamw(ours), torch.optim.AdamW(theirs, betas=(0.9, 0.99), weight_decay=0.1)
    for betas, step in zip([(0.9, 0.99), (0.5, 0.9), [0.6, 0.9], (0.6, 0.8)], grads):
        muon.param_groups[0]["betas"] = reference.param_groups[0]["betas"] = betas
        run(muon, ours, [step])
        run(reference, theirs, [step])
        assert muon.param_groups[0]["momentum"] == betas[0]
    assert close(ours, theirs)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_cycle_goes_on_from_a_state_dict(name, optimizer):
    """Saved after the schedule's step, before the optimizer's: the new momentum is that of the next step."""
    params = weights(SHAPES)
    grads, ours, again = gradients(params, 8), copies(params), copies(params)
    muon = adamw(ours)
    schedule = SCHEDULES[name](muon)
    run(muon, ours, grads[:4], schedule)
    saved = copy.deepcopy((muon.state_dict(), schedule.state_dict(), [p.detach() for p in ours]))
    run(muon, ours, grads[4:], schedule)
    second = adamw(again)
    schedule = SCHEDULES[name](second)
    second.load_state_dict(saved[0])
    schedule.load_state_dict(saved[1])
    with torch.no_grad():
        for p, q in zip(again, saved[2]):
            p.copy_(q)
    assert second.param_groups[0]["betas"][0] == second.param_groups[0]["momentum"] != 0.9
    run(second, again, grads[4:], schedule)
    assert same(ours, again)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_a_cycle_goes_on_in_a_copy(copied, optimizer):
    params = weights(SHAPES)
    grads, muon = gradients(params, 3), adamw(params)
    run(muon, params, grads[:1])
    muon.param_groups[0]["momentum"] = 0.5
    twin = copied(muon)
    others = twin.param_groups[0]["params"]
    assert twin.param_groups[0]["betas"] == (0.5, 0.99)
    for momentum, step in zip((0.5, 0.6), grads[1:]):
        muon.param_groups[0]["momentum"] = twin.param_groups[0]["momentum"] = momentum
        run(muon, params, [step])
        run(twin, others, [step])
    assert same(params, others)


def test_a_file_keeps_a_momentum_that_is_not_stepped_yet(tmp_path, optimizer):
    muon = package().Muon([{"params": [("bias", nn.Parameter(torch.ones(3)))], "use_muon": False}])
    muon.param_groups[0]["momentum"] = 0.5
    package().export_state(muon, tmp_path / "state")
    other = package().Muon([{"params": [("bias", nn.Parameter(torch.ones(3)))], "use_muon": False}])
    package().import_state(other, tmp_path / "state")
    assert other.param_groups[0]["betas"][0] == other.param_groups[0]["momentum"] == 0.5


def test_momentum_of_an_old_state_dict_is_not_beta1(optimizer):
    """There, that of AdamW groups was Muon's default and had no effect."""
    muon = adamw(weights(SHAPES))
    saved = muon.state_dict()
    saved["param_groups"][0].update(momentum=0.95, betas=(0.8, 0.99))
    muon.load_state_dict(saved)
    assert muon.param_groups[0]["betas"] == (0.8, 0.99) and muon.param_groups[0]["momentum"] == 0.8


def test_an_adamw_group_with_a_momentum_of_its_own(optimizer):
    """What a wrapper copies from the optimizer's arguments is let through."""
    def build(momentum, **group):
        return package().Muon([{"params": weights([(3,)]), "use_muon": False, "momentum": momentum, **group}])

    with pytest.raises(ValueError, match=r"group 0 .*momentum=0.8 in a group of AdamW, whose betas are \(0.9, 0.95\)"):
        build(0.8)
    assert build(0.95).param_groups[0]["momentum"] == build(0.9).param_groups[0]["momentum"] == 0.9
    assert build(0.8, betas=(0.8, 0.9)).param_groups[0]["betas"] == (0.8, 0.9)


def cycling(rank, world):
    """Buckets leave during backward while beta1 of the AdamW group is another one in every step."""
    found = []
    for early in (True, False):
        found.append(departures(*fsdp(world, overlap_backward=early), momenta=(0.8, 0.7, 0.6)))
    return found


def test_a_cycle_of_beta1_lets_buckets_leave_during_backward(optimizer):
    for (left, ours), (never, theirs) in run_threads(2, cycling):
        assert min(left) > 0 and max(never) == 0 and same(ours, theirs)


def test_a_cycle_of_beta1_has_nothing_looked_at_again(monkeypatch, optimizer):
    params = weights(SHAPES)
    muon, looked = adamw(params), []
    module = importlib.import_module(type(muon).__module__).validation
    own = module.check_changed_groups
    everywhere(monkeypatch, module, "check_changed_groups", lambda *args: looked.append(1) or own(*args))
    for number, step in enumerate(gradients(params, 4)):
        muon.param_groups[0]["momentum"] = 0.9 - number / 10
        for p, g in zip(params, step):
            p.grad = g
        muon.step()
    assert len(looked) == 1


# tensors ------------------------------------------------------------------------------------------------------------

def three_groups(lr, **second):
    return package().Muon([{"params": weights([(4, 4)])}, {"params": weights([(3,)]), "use_muon": False, **second},
                           {"params": weights([(2, 5)])}], lr=lr)


def test_each_group_has_a_tensor_of_its_own(optimizer):
    """Schedulers write into it; torch gives one to all groups. The first group keeps the one that was given."""
    lr = torch.tensor(0.5)
    muon = three_groups(lr)
    assert muon.param_groups[0]["lr"] is lr and len({id(group["lr"]) for group in muon.param_groups}) == 3
    schedule = LambdaLR(muon, [lambda step: 1 / (step + 1), lambda step: 0.5, lambda step: 1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            schedule.step()
    assert [float(group["lr"]) for group in muon.param_groups] == [0.125, 0.25, 0.5]
    assert all(isinstance(group["lr"], torch.Tensor) for group in muon.param_groups)


def test_a_group_that_is_added_has_a_tensor_of_its_own(optimizer):
    lr = torch.tensor(0.5)
    muon = three_groups(lr)
    muon.add_param_group({"params": weights([(4, 2)]), "lr": muon.param_groups[1]["lr"], "weight_decay": lr})
    numbers = [value for group in muon.param_groups for value in group.values() if torch.is_tensor(value)]
    assert len(numbers) == 5 and len({value.data_ptr() for value in numbers}) == 5


def test_views_of_one_tensor_stay_what_they_are(optimizer):
    """Whoever gives each group an element of one tensor writes into that."""
    rates = torch.tensor([0.1, 0.2])
    muon = three_groups(0.05, weight_decay=rates[0])
    muon.add_param_group({"params": weights([(4, 2)]), "weight_decay": rates[1]})
    rates.mul_(2)
    assert [round(float(group["weight_decay"]), 4) for group in muon.param_groups] == [0.1, 0.2, 0.1, 0.4]


@pytest.mark.parametrize("shared", ["one object", "one memory"])
def test_groups_of_a_state_dict_have_tensors_of_their_own(shared, optimizer):
    """Old files have one for all groups; torch.save keeps what shares memory."""
    muon, lr = three_groups(0.1), torch.tensor(0.5)
    saved = muon.state_dict()
    for group in saved["param_groups"]:
        group["lr"] = lr if shared == "one object" else lr.view(())
    muon.load_state_dict(saved)
    assert len({group["lr"].data_ptr() for group in muon.param_groups}) == 3
    muon.param_groups[0]["lr"].fill_(0.25)
    assert [float(group["lr"]) for group in muon.param_groups] == [0.25, 0.5, 0.5]


# numbers that are put in between steps ------------------------------------------------------------------------------

WRONG = {"lr": ["x", b"1", None, 1e39, -0.1, float("nan"), torch.ones(2)], "momentum": ["x", 1.0, -0.5, None, [0.9]],
         "weight_decay": ["0.1", -1, float("inf"), torch.tensor(-1.0)]}


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize(("key", "value"), [(key, value) for key in WRONG for value in WRONG[key]], ids=repr)
def test_a_wrong_number_fails_at_the_step_with_group_and_key(key, value, use_muon, optimizer):
    """Before anything changes: with the right number again, steps are as if nothing had been."""
    first, params = weights([(4, 4)]), weights(SHAPES[::2])
    muon = package().Muon([{"params": first}, {"params": params, "use_muon": use_muon}])
    twin = copy.deepcopy(muon)
    others = [p for group in twin.param_groups for p in group["params"]]
    grads = gradients([*first, *params], 3)
    run(muon, [*first, *params], grads[:1])
    run(twin, others, grads[:1])
    right, muon.param_groups[1][key] = muon.param_groups[1][key], value
    with pytest.raises(ValueError, match=rf"in group 1 \(#0, ...\): {key}={re.escape(repr(value))} is not allowed"):
        run(muon, [*first, *params], grads[1:2])
    assert same([*first, *params], others)
    muon.param_groups[1][key] = right
    for step in grads[1:]:
        run(muon, [*first, *params], [step])
        run(twin, others, [step])
    assert same([*first, *params], others)


@pytest.mark.parametrize("betas", [("x", 0.9), (1.5, 0.9), (0.9,), 0.9])
def test_wrong_betas_fail_at_the_step(betas, optimizer):
    params = weights(SHAPES)
    muon, grads = adamw(params), gradients(params, 2)
    run(muon, params, grads[:1])
    muon.param_groups[0]["betas"] = betas
    with pytest.raises(ValueError, match=r"in group 0 \(#0, ...\): betas=.* is not allowed: it must be two numbers"):
        run(muon, params, grads[1:])
    muon.param_groups[0]["betas"] = (0.5, 0.9)
    run(muon, params, grads[1:])
    assert muon.param_groups[0]["momentum"] == 0.5


@pytest.mark.parametrize("momentum", ["x", "0.5", b"1", None, [0.9], torch.ones(2)], ids=repr)
def test_a_momentum_that_is_no_number_stays_until_the_step(momentum, optimizer):
    """State dicts and copies are as they were; they say nothing of it and do not make it a number."""
    params = weights(SHAPES)
    muon, grads = adamw(params), gradients(params, 2)
    run(muon, params, grads[:1])
    muon.param_groups[0]["momentum"] = momentum
    for group in (muon.state_dict()["param_groups"][0], copy.deepcopy(muon).param_groups[0], *muon.param_groups):
        assert group["betas"] == (0.9, 0.99) and repr(group["momentum"]) == repr(momentum)
    with pytest.raises(ValueError, match=r"in group 0 \(#0, ...\): momentum=.* is not allowed"):
        run(muon, params, grads[1:])
    muon.param_groups[0]["momentum"] = 0.5
    run(muon, params, grads[1:])
    assert muon.param_groups[0]["betas"] == (0.5, 0.99)


def wrong_before_backward(rank, world):
    params, opt, place = fsdp(world)
    opt.param_groups[0]["lr"] = "x"
    with pytest.raises(ValueError, match="in group 0 .*: lr='x' is not allowed"):
        backward(params, place, 1, opt)
    opt.param_groups[0]["lr"] = 0.02
    backward(params, place, 1, opt)
    opt.step()
    return len(opt._backward_overlap.started)


def test_a_wrong_number_lets_no_bucket_leave(optimizer):
    assert run_threads(2, wrong_before_backward) == [0, 0]

"""torch.amp.GradScaler: it leaves out steps by itself, unless scalers of several ranks may decide differently."""

from __future__ import annotations

import collections
import contextlib
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import muon_before_a_step, package, part, run_ranks, run_threads
from tests.test_bucket_updates import cut
from tests.test_muon import copies, gradients, same, weights
from tests.test_steady import counting

SHAPES = [(8, 6), (6, 8), (5,)]


def build(params, **options):
    return package().Muon([{"params": params[:-1]}, {"params": params[-1:], "use_muon": False}], lr=0.1, **options)


def scaled(optimizer, params, grads, scaler, clip=None):
    """Steps with gradients of a scaled loss; how often `step` was called."""
    calls = []
    hook = optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    for step in grads:
        optimizer.zero_grad()
        loss = sum((p * g).sum() for p, g in zip(params, step))
        (scaler.scale(loss) if scaler else loss).backward()
        if clip is not None:
            if scaler:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, clip)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    hook.remove()
    return len(calls)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("in_step", [None, False, True])
def test_a_step_with_inf_is_left_out(in_step, clip, optimizer):
    """By the scaler, which then does not call `step`, or by the step."""
    params = weights(SHAPES)
    grads, ours, plain = gradients(params, 4), copies(params), copies(params)
    muon, other = build(ours, unscale_in_step=in_step), build(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert muon._step_supports_amp_scaling is bool(in_step)
    bad = [g.clone() for g in grads[2]]
    bad[0][0, 0] = math.inf
    calls = scaled(muon, ours, [*grads[:2], bad, *grads[3:]], scaler, clip)
    scaled(other, plain, [*grads[:2], *grads[3:]], None, clip)
    assert same(ours, plain) and calls == (4 if in_step else 3) and scaler.get_scale() == 512.0


def test_what_says_who_unscales_is_an_attribute_of_the_optimizer(optimizer):
    """Lightning asks before it clips, and other tools set it."""
    muon = build(weights(SHAPES))
    assert not muon._step_supports_amp_scaling
    muon._step_supports_amp_scaling = True
    assert muon._step_supports_amp_scaling and not build(weights(SHAPES))._step_supports_amp_scaling
    with pytest.raises(ValueError, match="unscale_in_step='yes' is not allowed: it must be True, False or None"):
        build(weights(SHAPES), unscale_in_step="yes")


def placed(mesh, shape, placements):
    return nn.Parameter(cut(torch.ones(shape), mesh, placements))


def decided(rank, world, options):
    """Whether `step` unscales, for parameters placed in several ways."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    flat = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    rows, columns, whole = Shard(0), Shard(1), Replicate()
    layouts = {
        "plain": [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))],
        "fsdp": [placed(flat, (8, 4), [rows]), placed(flat, (8, 4), [columns])],
        "hsdp": [placed(grid, (8, 4), [whole, rows]), placed(grid, (4, 8), [whole, rows])],
        "tp": [placed(flat, (8, 4), [whole]), placed(flat, (8, 4), [rows])],
        "fsdp x tp": [placed(grid, (8, 4), [rows, columns]), placed(grid, (8, 4), [rows, whole])],
        "two meshes": [placed(grid["dp"], (8, 4), [rows]), placed(grid["tp"], (8, 4), [rows])],
        "a frozen one": [placed(flat, (8, 4), [whole]).requires_grad_(False), placed(flat, (8, 4), [rows])],
    }
    return {name: package().Muon(params, **options)._step_supports_amp_scaling for name, params in layouts.items()}


def test_the_step_decides_only_where_scalers_may_differ(optimizer):
    expected = {"plain": False, "fsdp": False, "hsdp": False, "tp": True, "fsdp x tp": True, "two meshes": True,
                "a frozen one": False}
    assert run_threads(4, decided, {}) == [expected] * 4
    for asked in (True, False):
        assert run_threads(4, decided, {"unscale_in_step": asked}) == [dict.fromkeys(expected, asked)] * 4


def reduced_or_not(rank, world):
    return [package().Muon([nn.Parameter(torch.ones(4, 4))], process_group=dist.group.WORLD,
                           grads_are_reduced=reduced)._step_supports_amp_scaling for reduced in (True, False)]


def test_the_step_decides_where_each_rank_has_gradients_of_its_own(optimizer):
    assert run_threads(2, reduced_or_not) == [[False, True]] * 2


def of_unlike_placements(rank, world):
    """A whole weight and one cut by rows; one rank alone sees Inf, of which torch's comparison, by the first gradient,
    tells nobody: whether each of four steps changed anything here.
    """
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    places = [Replicate()], [Shard(0)]
    params = [placed(mesh, (8, 6), place) for place in places]
    muon, local, changed = package().Muon(params, lr=0.1), part("params.dtensor").local_of, []
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        scaler.scale(torch.zeros(()))
        for p, place in zip(params, places):
            p.grad = cut(torch.ones(8, 6).cumsum(0), mesh, place)
        if step == 2 and rank == 1:
            params[1].grad.to_local().fill_(math.inf)
        before = [local(p).clone() for p in params]
        scaler.step(muon)
        scaler.update()
        changed.append(not same([local(p) for p in params], before))
    return changed


def test_ranks_whose_scalers_differ_leave_out_the_same_step(optimizer):
    assert run_ranks(2, of_unlike_placements) == [[True, True, False, True]] * 2


def told(rank, world, gone):
    """What is said where gradients `gone` are missing here, before a GradScaler compares."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    places = {"a": [Shard(0)], "b": [Shard(0)], "c": [Replicate()]}
    params = {name: placed(mesh, (8, 6), place) for name, place in places.items()}
    muon = package().Muon(list(params.items()))
    for name, p in params.items():
        p.grad = None if name in gone else torch.ones_like(p)
    said = []
    for _ in "12":
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert muon._step_supports_amp_scaling
        said += [str(warning.message) for warning in seen]
    return said


@pytest.mark.parametrize("gone", ["", "a", "b", "c"])
def test_another_first_gradient_of_the_same_placement_is_fine(gone, optimizer):
    assert run_ranks(2, told, gone) == [[], []]


def test_a_first_gradient_of_another_placement_is_warned_of_once(optimizer):
    """The scaler waits then, for a rank that compares over another mesh or by other placements."""
    for said in run_ranks(2, told, "ab"):
        assert len(said) == 1 and "parameter a has no gradient here" in said[0] and "that of c" in said[0]


def unlike(rank, world, asks):
    """The message of the first step where the last rank alone has a plain parameter besides a
    DTensor, so that its scaler cannot be trusted; `asks`: whether a GradScaler asked.
    """
    from torch.distributed.tensor import Shard, init_device_mesh

    params = [placed(init_device_mesh("cpu", (world,)), (8, 6), [Shard(0)])]
    params += [nn.Parameter(torch.ones(4, 4))] * (rank == world - 1)
    muon = muon_before_a_step(params)
    if asks:
        assert muon._step_supports_amp_scaling is (rank == world - 1)
    try:
        muon.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_decide_differently_are_told(optimizer):
    """One would take a scaler's found_inf to the other ranks, which ask nobody."""
    for message in run_threads(3, unlike, True, timeout=20):
        assert "Ranks [2] and ranks [0, 1] differ in: unscale_in_step, which None has each" in message
    assert run_threads(3, unlike, False) == [""] * 3  # without a scaler it does not matter


def scaled_steps(rank, world, count):
    """How much of nonfinite.py is interpreted in a steady step with a GradScaler, for so many pairs of
    parameters; its answers before and after a parameter is frozen.
    """
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    mesh, found, answers = init_device_mesh("cpu", (world,)), collections.Counter(), []
    params = [placed(mesh, (4, 4), [place]) for place in (Replicate(), Shard(0)) for _ in range(count)]
    muon = muon_before_a_step(params)
    muon.grad_scale, muon.found_inf = torch.ones(()), torch.zeros(())
    for step in range(4):
        with counting(found) if step == 3 else contextlib.nullcontext():
            answers.append(muon._step_supports_amp_scaling)
            muon.step()
    for p in params[count:]:
        p.requires_grad_(False)
    return found["communication/nonfinite"], [*answers, muon._step_supports_amp_scaling]


def test_a_steady_step_with_a_scaler_does_no_work_for_each_parameter(optimizer):
    (few, answers), _ = run_threads(2, scaled_steps, 4)
    (many, _), _ = run_threads(2, scaled_steps, 8)
    assert few == many > 0
    assert answers == [True] * 4 + [False]

"""Plans that are known when a step plans anew, as after a load: equal to new plans, and compared between ranks."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from tests.ranks import package, part, run_ranks, run_threads
from tests.test_muon import EXACT, same

SHAPES = [(16, 8), (8, 16), (12, 8), (6,), (9, 5)]
PLAIN = [{}, {"shard_state": True}, {"grads_are_reduced": False},
         {"grads_are_reduced": False, "overlap_backward": True}, {"shard_state": True, "overlap_forward": True}]
SHARDED = [{}, {"rule": "adamuon", "state_at_owners": True}]


def build(params, **options):
    groups = [{"params": params[:3]}, {"params": params[3:], "use_muon": False}]
    return package().Muon(groups, **{"lr": 0.1, "weight_decay": 0.0, **EXACT, **options})


def wholes():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def step(optimizer, params, number):
    generator = torch.Generator().manual_seed(100 + number)
    for p in params:
        gradient = torch.randn(p.shape, generator=generator)
        is_sharded = isinstance(p, DTensor)
        p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if is_sharded else gradient
    optimizer.step()


def forget(optimizer):
    """Let the next plan be made as if none was known."""
    kind = type(optimizer._preparation._known[False])
    optimizer._preparation._known = {False: kind(), True: kind()}


class Planned:
    """Counts the plans that are made, in a `with` block."""

    def __enter__(self):
        self.count, self.kind = 0, part("planning.planner").Planner
        self.plan = self.kind.plan
        self.kind.plan = self._counted(self.plan)
        return self

    def _counted(self, plan):
        def counted(planner, *args):
            self.count += 1
            return plan(planner, *args)
        return counted

    def __exit__(self, *_):
        self.kind.plan = self.plan


def plans_of(optimizer):
    """All fields of all plans but groups, which must be the live ones, and parameters."""
    found = []
    for plan in sum(optimizer._preparation._plans.values(), []):
        assert all(any(group is live for live in optimizer.param_groups) for group in plan.groups)
        names = [field.name for field in dataclasses.fields(plan) if field.name not in ("groups", "params")]
        found.append({name: getattr(plan, name) for name in names})
    return found


def loaded(optimizer, change=None):
    """Load the optimizer's own state, with the groups changed by `change`."""
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group["lr"] = 0.07
        if change is not None and group["use_muon"]:
            group.update(change)
    optimizer.load_state_dict(saved)


def beside_new_plans(params, others, options, rank, one_only=False):
    """After loads, steps of known plans and steps of plans made anew: whether bits and plans are equal, and the number
    of plans that the first made. `one_only`: on odd ranks the first optimizer plans anew, too.
    """
    ours, theirs = build(params, **options), build(others, **options)
    step(ours, params, 0)
    step(theirs, others, 0)
    for number in (1, 2):
        for optimizer in (ours, theirs):
            loaded(optimizer)
            if optimizer is theirs or one_only and rank % 2:
                forget(optimizer)
        with Planned() as planned:
            step(ours, params, number)
        step(theirs, others, number)
        weights = [[t.to_local() if isinstance(t, DTensor) else t for t in some] for some in (params, others)]
        yield plans_of(ours) == plans_of(theirs) and same(*weights), planned.count


def of_copies(rank, world, options, one_only=False):
    two = [[nn.Parameter(full.clone()) for full in wholes()] for _ in "12"]
    return list(beside_new_plans(*two, {"process_group": dist.group.WORLD, **options}, rank, one_only))


def of_shards(rank, world, options, one_only=False):
    mesh = init_device_mesh("cpu", (world,))
    two = [[nn.Parameter(distribute_tensor(full.clone(), mesh, [Shard(0)])) for full in wholes()] for _ in "12"]
    return list(beside_new_plans(*two, options, rank, one_only))


def test_a_process_alone(optimizer):
    two = [[nn.Parameter(full.clone()) for full in wholes()] for _ in "12"]
    assert list(beside_new_plans(*two, {}, 0)) == [(True, 0)] * 2


LAYOUTS = pytest.mark.parametrize(
    "function, options", [*((of_copies, options) for options in PLAIN), *((of_shards, options) for options in SHARDED)],
    ids=lambda value: getattr(value, "__name__", None) or str(value))


@LAYOUTS
def test_ranks_go_on_with_the_plans_of_before_a_load(function, options, optimizer):
    assert run_ranks(2, function, options) == [[(True, 0)] * 2] * 2


@LAYOUTS
def test_ranks_need_not_agree_on_who_plans(function, options, optimizer):
    """A rank that plans anew issues the collectives of the ranks that know the plan."""
    results = run_ranks(2, function, options, True)
    assert all(equal for found in results for equal, _ in found)
    assert [[bool(count) for _, count in found] for found in results] == [[False] * 2, [True] * 2]


def after_dcp(rank, world):
    """The step by which torch.distributed.checkpoint creates state has made the plan of the first step."""
    mesh = init_device_mesh("cpu", (world,))
    names = [f"p{i}" for i in range(len(SHAPES))]

    def made():
        params = [nn.Parameter(distribute_tensor(full, mesh, [Shard(0)])) for full in wholes()]
        return nn.ParameterDict(dict(zip(names, params))), params, build(params)

    model, params, optimizer = made()
    step(optimizer, params, 0)
    state = dsd.get_optimizer_state_dict(model, optimizer)
    again, others, resumed = made()
    dsd.set_optimizer_state_dict(again, resumed, state)
    with Planned() as planned:
        step(resumed, others, 1)
    step(optimizer, params, 1)
    momenta = [[made.state[p]["momentum_buffer"].to_local() for p in some[:3]]
               for made, some in ((optimizer, params), (resumed, others))]
    return same(*momenta), planned.count


def test_a_resume_by_dcp_plans_once(optimizer):
    assert run_ranks(2, after_dcp) == [(True, 0)] * 2


CHANGES = {"ns_coefficients": {"ns_coefficients": "cubic"}, "ns_steps": {"ns_steps": 3},
           "adjust_lr_fn": {"adjust_lr_fn": "rms_norm"}, "decay": {"decay": "cautious"},
           "momentum_form": {"momentum_form": "bias_corrected", "momentum_steps": 3}}


@pytest.mark.parametrize("what", [*CHANGES, "split", "cast", "frozen", "added", "rule"])
def test_a_step_plans_anew_if_something_has_changed(what, optimizer):
    """Also where the change comes with the load, or after it."""
    params = [nn.Parameter(torch.ones(8, 6)) for _ in range(5)]
    made = build(params)
    step(made, params, 0)
    loaded(made, CHANGES.get(what))
    if what == "split":
        made.param_groups[0]["split"] = {"rows": [4, 4]}
    if what == "cast":
        for p in params:
            p.data = p.data.bfloat16()
    if what == "frozen":
        params[0].requires_grad_(False)
    if what == "added":
        params.append(nn.Parameter(torch.ones(4, 4)))
        made.add_param_group({"params": params[-1:]})
    if what == "rule":
        made.param_groups[0].update(rule="normuon", beta2=0.95)
    with Planned() as planned:
        for p in params:
            p.grad = torch.ones_like(p) if p.requires_grad else None
        made.step()
    assert planned.count


def with_other_gradients(rank, world):
    """A gradient placed unlike its parameter before the load, and none after it: its plan says so no longer."""
    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(distribute_tensor(full, mesh, [Shard(0)])) for full in wholes()]
    made = build(params)
    found = []
    for placement in (Replicate(), Shard(0), Replicate()):
        for p in params:
            p.grad = distribute_tensor(torch.ones(p.shape), mesh, [placement])
        with Planned() as planned:
            made.step()
        found.append((planned.count > 0, {len(plan["mismatched"]) for plan in plans_of(made)}))
        loaded(made)
    return found


def test_placements_of_gradients_are_those_of_the_step(optimizer):
    assert run_threads(2, with_other_gradients) == [[(True, {2, 3}), (False, {0}), (False, {2, 3})]] * 2


def test_another_job_knows_no_plans(optimizer):
    def in_a_job(rank, world, made, params, counts):
        with Planned() as planned:
            step(made, params, len(counts))
        counts.append(planned.count)

    params = [nn.Parameter(full.clone()) for full in wholes()]
    made, counts = build(params), []
    for _ in range(2):
        run_threads(1, in_a_job, made, params, counts)
    assert all(counts)


def test_replaced_parameters_are_free_after_a_load(optimizer):
    """Known plans hold the parameters that they were made for, and only as long as the groups do."""
    params = [nn.Parameter(torch.ones(8, 6)) for _ in range(5)]
    made = build(params)
    step(made, params, 0)
    gone = list(map(weakref.ref, params))
    for group in made.param_groups:
        group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
    made.load_state_dict(made.state_dict())
    del params
    gc.collect()
    assert [ref() for ref in gone] == [None] * 5

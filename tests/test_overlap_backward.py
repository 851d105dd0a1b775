"""Buckets that leave during backward: the bits of a step without, on every layout; what is told where they cannot."""

from __future__ import annotations

import copy
import datetime
import functools
import gc
import itertools
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import muon_before_a_step, package, part, run_ranks, run_threads
from tests.test_bucket_updates import cut
from tests.test_faults import TIMEOUT_S, Faulty, run_mortal
from tests.test_missing_grads import pattern
from tests.test_modes import DENSE, placements_of
from tests.test_muon import same

SHAPES = [(16, 24), (24, 16), (10, 12), (16, 16)] * 3
LAYOUTS = ["fsdp rows", "fsdp columns", "hsdp", "tp columns x fsdp rows", "ep x fsdp rows", "experts, fsdp rows"]
STEPS = 4


def come(param, gradient) -> None:
    """A gradient, as FSDP2 brings it: put in place or added, then the hooks are called."""
    if param.grad is None:
        param.grad = gradient
    else:
        param.grad._local_tensor.add_(gradient._local_tensor)
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        hook(param)


def build(fulls, place, kind="NorMuon", adamw=2, **options):
    """Parameters, the last of them AdamW's, and an optimizer that lets buckets leave."""
    params = [nn.Parameter(place(f)) for f in fulls]
    groups = [{"params": params[:-adamw]}, {"params": params[-adamw:], "use_muon": False}]
    return params, getattr(package(), kind)(groups, lr=0.02, **{"overlap_backward": True, **options})


def drawn(shapes, generator):
    return [torch.randn(s, generator=generator) for s in shapes]


def tensors(params, optimizer):
    local = part("params.dtensor").local_of
    return [local(t).clone() for p in params for t in (p, *optimizer.state[p].values())]


def fsdp(world, fulls=None, **options):
    """Parameters cut by rows and an optimizer that has taken a first step; the place of a tensor."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh, generator = init_device_mesh("cpu", (world,)), torch.Generator().manual_seed(0)

    def place(full):
        return cut(full, mesh, [Shard(0)])

    params, opt = build(fulls or drawn(SHAPES, generator), place, **options)
    backward(params, place, 0, opt)
    opt.step()
    opt.zero_grad()
    return params, opt, place


def backward(params, place, step, opt, upto=None):
    """Gradients come, the last parameter's first; those of the first `upto` parameters do not."""
    generator = torch.Generator().manual_seed(99 + step)
    gradients = drawn([p.shape for p in params], generator)
    with opt.last_backward():
        for p, g in [*zip(params, gradients)][upto:][::-1]:
            come(p, place(g))


# the bits --------------------------------------------------------------------------------------------------------

def step_both(early, late) -> int:
    """Step both, and let their gradients go; how many buckets had left before."""
    left = len(early._backward_overlap.started)
    for opt in (early, late):
        opt.step()
        opt.zero_grad()
    return left


@functools.cache
def alone(shapes, kind):
    """(weights, gradients of each step, weights and state in the end) of one process, whose bits those of steps without
    are on every layout (test_same_bits.py). Each gradient comes in three micro-batches.
    """
    generator = torch.Generator().manual_seed(len(shapes))
    fulls = drawn([*shapes, *shapes, shapes[0], shapes[1]], generator)
    steps = [drawn([f.shape for f in fulls], generator) for _ in range(STEPS)]
    params, opt = build(fulls, torch.clone, kind, overlap_backward=False)
    for step, gradients in enumerate(steps):
        vary(opt, step)
        for p, g in zip(params, gradients):
            p.grad = g + g + g
        opt.step()
    return fulls, steps, tensors(params, opt)


def vary(opt, step):
    opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"] = 0.02 / (1 + step), 0.9 + 0.01 * step


def cut_up(rank, world, layout, kind, fulls, steps, expected):
    """Steps with gradients on the way during backward; ([how many buckets left], whether this rank has the bits of one
    process).
    """
    from torch.distributed.tensor import init_device_mesh

    mesh_shape, placements, _ = placements_of(layout, world)
    mesh, local = init_device_mesh("cpu", mesh_shape), part("params.dtensor").local_of

    def place(full):
        return cut(full, mesh, placements) if full.ndim > 1 else full

    (params, opt), left = build(fulls, place, kind), []
    for step, gradients in enumerate(steps):
        vary(opt, step)
        placed = [place(g) for g in gradients]
        for p, g, here in zip(params, gradients, placed):  # two micro-batches
            come(p, place(g))
            come(p, here)
        assert not opt._backward_overlap.started
        with opt.last_backward():
            for p, here in [*zip(params, placed)][::-1]:
                come(p, here)
        left.append(len(opt._backward_overlap.started))
        opt.step()
        opt.zero_grad()
    return left, same(tensors(params, opt), [local(place(t)) for t in expected])


@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize("kind", ["Muon", "NorMuon"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "replicated", "ep"])
def test_every_layout_has_the_bits_of_a_step_without(layout, kind, world, optimizer):
    for left, equal in run_threads(world, cut_up, layout, kind, *alone(tuple(placements_of(layout, world)[2]), kind)):
        assert equal
        assert left == [0] * STEPS if layout in ("replicated", "ep") else left[0] == 0 and min(left[1:]) >= 4, left


def trained(rank, world, mesh_shape, kind, overlap, steps=STEPS, device="cpu"):
    """A model under FSDP2, two micro-batches per step; (buckets that left at each step, collectives seen meanwhile,
    the weights).
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    torch.manual_seed(0)
    mesh = init_device_mesh(device, mesh_shape, mesh_dim_names=("replica", "shard")[-len(mesh_shape):])
    few, more = (16, 24) if device == "cpu" else (256, 640)
    blocks = [nn.Sequential(nn.Linear(few, more), nn.ReLU(), nn.Linear(more, few)) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(20, few), *blocks).to(device)
    model[2][0].weight.requires_grad_(False)
    model[0].weight.requires_grad_(device == "cpu")  # on GPUs its gradient is summed in any order
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = getattr(package(), kind)(package().get_default_muon_param_groups(model), overlap_backward=overlap)
    schedule, left, calls = torch.optim.lr_scheduler.LinearLR(opt, total_iters=steps), [], []
    with observed(calls):
        for step in range(steps):
            torch.manual_seed(world * step + rank)
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                loss = model(torch.randint(20, (8,)).to(device)).square().mean()
                if last:
                    with opt.last_backward():
                        loss.backward()
                else:
                    loss.backward()
            left.append((len(opt._backward_overlap.started), len(calls)))
            opt.step()
            opt.zero_grad()
            schedule.step()
            calls.clear()
    return left, [p._local_tensor.detach().cpu() for p in model.parameters()]


class observed:
    """Meanwhile, every all-to-all leaves an entry in `calls`."""

    def __init__(self, calls):
        self.calls, self.function = calls, dist.all_to_all_single

    def __enter__(self):
        def call(*args, **options):
            self.calls.append(options["group"])
            return self.function(*args, **options)

        dist.all_to_all_single = call

    def __exit__(self, *_):
        dist.all_to_all_single = self.function


@pytest.mark.parametrize("kind", ["Muon", "NorMuon"])
@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2)], ids=["fsdp2", "fsdp4", "hsdp"])
def test_fsdp2_trains_with_the_bits_of_steps_without(mesh_shape, kind, optimizer):
    world = mesh_shape[0] * mesh_shape[-1] ** (len(mesh_shape) - 1)
    runs = [run_ranks(world, trained, mesh_shape, kind, overlap) for overlap in (True, False)]
    for (left, ours), (_, theirs) in zip(*runs):
        assert same(ours, theirs)
        assert left[0] == (0, 0) and all(count == calls >= 4 for count, calls in left[1:]), left


@pytest.mark.parametrize("kind", ["Muon", "NorMuon"])
@pytest.mark.parametrize(("world", "mesh_shape"), [
    pytest.param(2, (2,), marks=pytest.mark.gpus(2)), pytest.param(4, (4,), marks=pytest.mark.gpus(4)),
    pytest.param(4, (2, 2), marks=pytest.mark.gpus(4))])
@pytest.mark.gpu
def test_fsdp2_trains_with_the_bits_of_steps_without_on_gpus(world, mesh_shape, kind, optimizer):
    """Buckets leave on a stream of their own, beside reduce-scatters; parts of them are replayed from graphs."""
    runs = [run_ranks(world, trained, mesh_shape, kind, overlap, 8, "cuda", backend="nccl", timeout=120)
            for overlap in (True, False)]
    for (left, ours), (_, theirs) in zip(*runs):
        assert same(ours, theirs)
        assert left[0] == (0, 0) and all(count == calls >= 1 for count, calls in left[1:]), left


def unreduced(rank, world, way):
    """Plain parameters and their own gradients: buckets on the way during backward ("early"), the same buckets in the
    step ("late"), or those that are planned without ("without"); (how many left, weights and state).
    """
    generator, left = torch.Generator().manual_seed(3), []
    fulls = drawn([*DENSE, (50, 6), (7,), (3, 2, 2)], generator)
    params, opt = build(fulls, torch.clone, adamw=3, process_group=dist.group.WORLD, grads_are_reduced=False,
                        overlap_backward=way != "without", wire_dtype=torch.float32)
    for _ in range(STEPS):
        gradients = [torch.randn((world, *f.shape), generator=generator)[rank] for f in fulls]
        loss = sum((p * g).sum() for p, g in zip(params, gradients))
        if way == "late":
            loss.backward()
        else:
            with opt.last_backward():
                loss.backward()
        left.append(len(opt._backward_overlap.started))
        opt.step()
        opt.zero_grad()
    return left, tensors(params, opt)


@pytest.mark.parametrize("world", [2, 4])
def test_unreduced_gradients_leave_during_backward(world, optimizer):
    """Against other buckets there is the bound of test_same_bits.py, against the same ones none is needed."""
    runs = {way: run_threads(world, unreduced, way) for way in ("early", "late", "without")}
    for rank in range(world):
        (left, early), (none, late), (_, without) = (runs[way][rank] for way in runs)
        assert same(early, late) and not any(none)
        assert left[0] == 0 and min(left[1:]) >= 8
        assert max((a - b).abs().max().item() if a.numel() else 0 for a, b in zip(early, without)) < 1e-5


def mixed(rank, world):
    """Two groups of one mesh, one of its halves, and experts that are whole: one order on all ranks."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh, generator = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b")), torch.Generator()
    everybody = init_device_mesh("cpu", (world,))
    meshes = [everybody, everybody, mesh["b"], everybody]
    shapes = [[(16, 24), (8, 8)] * 3, [(12, 8)] * 5, [(16, 16), (4, 8)] * 2, [(world, 6, 4)]]
    fulls = [drawn(s, generator) for s in shapes]

    def made(overlap):
        params = [[nn.Parameter(cut(f, m, [Shard(0)])) for f in fs] for fs, m in zip(fulls, meshes)]
        groups = [{"params": ps, "lr": 0.01 * (1 + i)} for i, ps in enumerate(params)]
        return list(itertools.chain(*params)), package().Muon(groups, overlap_backward=overlap)

    (ours, early), (theirs, late) = made(True), made(False)
    order = torch.randperm(len(ours), generator=generator).tolist()
    counts = []
    for _ in range(STEPS):
        gradients = [cut(torch.randn(p.shape, generator=generator), p.device_mesh, p.placements) for p in ours]
        with early.last_backward():
            for i in order[rank % 2:]:  # one comes late, on every other rank another one
                come(ours[i], gradients[i])
        for p, q, g in zip(ours, theirs, gradients):
            p.grad, q.grad = g if p.grad is None else p.grad, g
        counts.append(step_both(early, late))
    return counts, same(tensors(ours, early), tensors(theirs, late))


def test_several_groups_and_meshes_have_one_order(optimizer):
    results = run_threads(4, mixed)
    assert all(equal for _, equal in results)
    assert max(counts[-1] for counts, _ in results) > 8
    assert len({counts[-1] for counts, _ in results}) > 1, "not all ranks let the same buckets leave"


# missing and odd gradients ---------------------------------------------------------------------------------------

def missing(rank, world, odd):
    """Another subset of gradients at each step and rank; `odd`: some lie elsewhere in memory, in other strides."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh, generator = init_device_mesh("cpu", (world,)), torch.Generator().manual_seed(5)

    def place(full):
        return cut(full, mesh, [Shard(0)])

    fulls, left = drawn(SHAPES, generator), set()
    (ours, early), (theirs, late) = (build(fulls, place, overlap_backward=on) for on in (True, False))
    for step in range(20):
        has = pattern(len(fulls), world, generator) | (torch.rand(len(fulls), 1, generator=generator) < 0.6)
        odds = (torch.rand(len(fulls), generator=generator) < 0.2) & (torch.tensor(odd) and step % 3 == 2)
        with early.last_backward():
            for i in reversed(range(len(fulls))):
                full = torch.randn(fulls[i].shape, generator=generator)
                theirs[i].grad = place(full) if has[i, rank] else None
                if has[i, rank]:
                    come(ours[i], elsewhere(place(full)) if odds[i] else place(full))
        left.add(step_both(early, late))
    return left, same(tensors(ours, early), tensors(theirs, late))


def missing_in_any_dtype(rank, world):
    """A bf16 parameter that takes gradients of every dtype gets none in one step."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(cut(torch.ones(8, 8, dtype=torch.bfloat16), mesh, [Shard(0)])) for _ in range(2)]
    params[0].grad_dtype = None
    optimizer, before = package().Muon(params, lr=0.1, overlap_backward=True), None
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.last_backward():
            for p in params[step == 2:]:
                come(p, cut(torch.ones(8, 8, dtype=torch.bfloat16), mesh, [Shard(0)]))
        before = [p.to_local().clone() for p in params]
        optimizer.step()
    return [torch.equal(p.to_local(), old) for p, old in zip(params, before)]


def test_a_missing_gradient_needs_no_dtype(optimizer):
    """Its zeros were fp32, for which the buckets that had been sent had no room."""
    assert run_threads(2, missing_in_any_dtype) == [[True, False]] * 2


def first_seen_later(rank, world):
    """An expert of this process alone gets no tokens in the first steps, nor in the last: in which steps it and its
    state changed, and whether its bits are those of steps without the option.
    """
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh, runs = init_device_mesh("cpu", (world,)), []
    for overlap in (True, False):
        generator = torch.Generator().manual_seed(0)
        shared = nn.Parameter(cut(torch.randn(8, 6, generator=generator), mesh, [Shard(0)]))
        params = [shared, *(nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 6), (5,)))]
        groups = [{"params": params[:2]}, {"params": params[2:], "use_muon": False}]
        opt, moved = package().Muon(groups, lr=0.02, overlap_backward=overlap), []
        for step in range(5):
            before = [p.detach().clone() for p in params[1:]]
            used = params if step in (2 + rank, 3) else params[:1]
            with opt.last_backward():
                sum((p.to_local() if p is shared else p).square().sum() for p in used).backward()
            opt.step()
            opt.zero_grad()
            moved.append([not torch.equal(p, then) for p, then in zip(params[1:], before)])
        runs.append((moved, tensors(params, opt)))
    (early, ours), (late, theirs) = runs
    return early == late, [any(step) and all(step) for step in early], same(ours, theirs)


def test_what_one_process_steps_alone_may_get_its_first_gradient_later(optimizer):
    """A step that has begun does not plan, and left it out for ever."""
    alike = run_threads(2, first_seen_later)
    assert alike == [(True, [False, False, True, True, False], True), (True, [False, False, False, True, False], True)]


def elsewhere(gradient):
    """The same, with the rows' stride and the address of another."""
    local = gradient._local_tensor
    wide = torch.zeros(local.shape[0] + 1, local.shape[1] + 3)[1:, 1:-2]
    gradient._local_tensor = wide.copy_(local)
    return gradient


@pytest.mark.parametrize("odd", [False, True])
def test_missing_and_odd_gradients_wait_for_the_step(odd, optimizer):
    results = run_threads(4, missing, odd)
    assert all(equal for _, equal in results)
    assert all(len(left) > 3 for left, _ in results) and len({frozenset(left) for left, _ in results}) > 1


def astray(rank, world):
    """Gradients that come as parts of a sum are brought home by the step; what was before them has left."""
    from torch.distributed.tensor import DTensor, Partial

    params, opt, place = fsdp(world)
    twins, late, _ = fsdp(world, overlap_backward=False)
    generator, left = torch.Generator().manual_seed(1), []
    for _ in range(3):
        gradients = drawn([p.shape for p in params], generator)
        with opt.last_backward():
            for i in reversed(range(len(params))):
                whole = DTensor.from_local(gradients[i] / world, params[0].device_mesh, [Partial()])
                come(params[i], whole if i == 4 else place(gradients[i]))
        left.append(len(opt._backward_overlap.started))
        for q, g in zip(twins, gradients):
            q.grad = place(g)
        for optimizer in (opt, late):
            optimizer.step()
            optimizer.zero_grad()
    return left, same(tensors(params, opt), tensors(twins, late))


def test_gradients_astray_wait_for_the_step(optimizer):
    for left, equal in run_threads(2, astray):
        assert equal and 0 < min(left[0], left[2]) and max(left) < 7, left


# what changes between steps --------------------------------------------------------------------------------------

def changing(rank, world):
    """Parameters moved, frozen, thawed and added between steps: nothing leaves in the next step, then it does."""
    params, opt, place = fsdp(world)
    twins, late, _ = fsdp(world, overlap_backward=False)
    more = [nn.Parameter(place(torch.ones(12, 8))) for _ in "12"]

    def move(ps, opt, last):
        ps[1]._local_tensor = ps[1]._local_tensor.clone()

    def freeze(ps, opt, last):
        ps[3].requires_grad_(False)

    def thaw(ps, opt, last):
        ps[3].requires_grad_(True)

    def add(ps, opt, last):
        opt.add_param_group({"params": [last]})
        ps.append(last)

    counts = []
    for number, change in enumerate([None, move, None, freeze, None, thaw, None, add, None]):
        for ps, one, last in ((params, opt, more[0]), (twins, late, more[1])):
            if change:
                change(ps, one, last)
            backward([p for p in ps if p.requires_grad], place, number, one)
        counts.append(bool(opt._backward_overlap.started))
        for one in (opt, late):
            one.step()
            one.zero_grad()
    return counts, same(tensors(params, opt), tensors(twins, late))


def test_what_changes_between_steps_is_planned_anew_first(optimizer):
    for counts, equal in run_threads(2, changing):
        assert equal and counts == [True, False] * 4 + [True], counts


def hooks(rank, world):
    """Hooks of a parameter: with the optimizer, after a new plan, without it; and what is alive then."""
    params, opt, place = fsdp(world)
    counts = [len(params[0]._post_accumulate_grad_hooks)]
    opt.add_param_group({"params": [nn.Parameter(place(torch.ones(12, 8)))]})
    counts.append(len(params[0]._post_accumulate_grad_hooks))
    backward(params, place, 1, opt)
    opt.step()
    counts.append(len(params[0]._post_accumulate_grad_hooks))
    del opt
    gc.collect()
    return [*counts, len(params[0]._post_accumulate_grad_hooks)]


def test_hooks_go_with_the_optimizer(optimizer):
    assert run_threads(2, hooks) == [[1, 0, 1, 0]] * 2


def departures(params, opt, place, through=None, momenta=(None, None)):
    """How many buckets leave during the backward of each step, and the tensors after the steps. `through`: a wrapper of
    the optimizer that is used in its place; `momenta`: for each step, the momentum that the AdamW group is given.
    """
    through, left = through or opt, []
    for step, momentum in enumerate(momenta, 1):
        if momentum is not None:
            opt.param_groups[1]["momentum"] = momentum
        backward(params, place, step, through)
        left.append(len(opt._backward_overlap.started))
        through.step()
        through.zero_grad()
    return left, tensors(params, opt)


# what is refused -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options, message", [
    ({"overlap_backward": 1}, "overlap_backward=1 is not allowed: it must be True or False"),
    ({"capturable": True}, "not allowed with capturable=True"),
    ({"nonfinite": "skip"}, "not allowed with nonfinite='skip'"),
    ({"nonfinite": "raise"}, "not allowed with nonfinite='raise'")])
def test_options_that_do_not_go_together(options, message, optimizer):
    with pytest.raises(ValueError, match=message):
        optimizer.Muon([nn.Parameter(torch.ones(2, 2))], **{"overlap_backward": True, **options})


def reduced(rank, world):
    with pytest.raises(ValueError, match="Use grads_are_reduced=False without DistributedDataParallel"):
        package().Muon([nn.Parameter(torch.ones(2, 2))], process_group=dist.group.WORLD, overlap_backward=True)
    return True


def test_reduced_gradients_of_copies_are_refused(optimizer):
    assert run_threads(2, reduced) == [True] * 2


def test_alone_and_without_the_option_nothing_happens(optimizer):
    params = [[nn.Parameter(torch.ones(4, 6) + i) for i in range(2)] for _ in range(3)]
    muons = [optimizer.Muon(params[0], overlap_backward=True), optimizer.Muon(params[1]), optimizer.Muon(params[2])]
    for _ in range(3):
        for (p, q), muon in zip(params, muons):
            with muon.last_backward():
                (p.cos() * q).sum().backward()
            muon.step()
            muon.zero_grad()
    assert same(params[0], params[2]) and same(params[1], params[2])


def clip(params, opt):
    torch.nn.utils.clip_grad_norm_(params, 1e-3)


def accumulate(params, opt):
    come(params[-3], params[-3].grad.detach())


def drop(params, opt):
    opt.zero_grad()


def scale(params, opt):
    opt.found_inf, opt.grad_scale = torch.zeros(()), torch.ones(())


def hurry(params, opt):
    opt.param_groups[0]["momentum"] = 0.5


def move(params, opt):
    params[0]._local_tensor = params[0]._local_tensor.clone()


TORN = "the gradient of parameter .* changed"
CHANGES = {clip: "gradients changed", accumulate: TORN, drop: TORN, scale: "a GradScaler wants",
           hurry: "momentum or nesterov changed", move: "parameters, their state"}


def changed(rank, world, number):
    """A change after buckets have left: the step says what, the next one that it is half-way, a load heals it."""
    params, opt, place = fsdp(world)
    saved, weights = copy.deepcopy(opt.state_dict()), [p.full_tensor().detach().clone() for p in params]
    backward(params, place, 1, opt)
    left = len(opt._backward_overlap.started)
    [*CHANGES][number](params, opt)
    with pytest.raises(RuntimeError, match=f"after buckets were sent during backward, ({[*CHANGES.values()][number]})"):
        opt.step()
    opt.found_inf = opt.grad_scale = None
    for again in (opt.step, opt.last_backward, pickle.loads(pickle.dumps(opt)).step):
        with pytest.raises(RuntimeError, match="failed half-way.*load_state_dict"):
            again()
    return left, heals(params, opt, place, saved, weights, world)


def heals(params, opt, place, saved, weights, world):
    """Whether steps after a load have the bits of an optimizer that took no other."""
    twins, late, _ = fsdp(world, overlap_backward=False)
    opt.zero_grad()
    opt.load_state_dict(saved)
    for p, w in zip(params, weights):
        p._local_tensor.detach().copy_(place(w)._local_tensor)
    for step in (2, 3):
        for ps, one in ((params, opt), (twins, late)):
            backward(ps, place, step, one)
            one.step()
            one.zero_grad()
    return same(tensors(params, opt), tensors(twins, late))


@pytest.mark.parametrize("number", range(len(CHANGES)), ids=[change.__name__ for change in CHANGES])
def test_changes_after_buckets_have_left_are_told(number, optimizer):
    for left, healed in run_threads(2, changed, number):
        assert left == 7 and healed


def judged_late(rank, world):
    """Clipped DTensors as on GPUs, where the host has not looked when the step ends; then a step that binds anew."""
    params, opt, place = fsdp(world)
    backward(params, place, 1, opt)
    clip(params, opt)
    opt._backward_overlap.raise_if_changed = lambda: None
    opt.step()
    del opt._backward_overlap.raise_if_changed
    move(params, opt)
    with pytest.raises(RuntimeError, match="gradients changed"):
        opt.step()
    with pytest.raises(RuntimeError, match="failed half-way"):
        opt.step()


def test_a_step_that_binds_anew_does_not_forget_that_gradients_had_changed(optimizer):
    run_threads(2, judged_late)


def half_way(rank, world, upto):
    """Between backward and step: nothing has changed, what is refused, and that loading makes it whole. `upto`:
    gradients missing, more of them on rank 1.
    """
    params, opt, place = fsdp(world)
    saved, weights = copy.deepcopy(opt.state_dict()), [p.full_tensor().detach().clone() for p in params]
    backward(params, place, 1, opt, upto)
    assert str(opt.state_dict()) == str(saved) and not pickle.loads(pickle.dumps(opt))._half_way
    with pytest.raises(RuntimeError, match="add_param_group is not possible now.*Call step"):
        opt.add_param_group({"params": [nn.Parameter(place(torch.ones(4, 4)))]})
    for name, method in {"init_state": opt.init_state, "release": opt.release,
                         "export_state": lambda: package().export_state(opt, os.devnull)}.items():
        with pytest.raises(RuntimeError, match=f"{name} is not possible now.*Call step"):
            method()
    with pytest.raises(RuntimeError, match="call step.. before the next last_backward"), opt.last_backward():
        pass
    with pytest.raises(ValueError, match="needs"):
        opt.load_state_dict({**saved, "state": {0: {"momentum_buffer": torch.ones(1)}}})
    with pytest.raises(RuntimeError, match="failed half-way"):
        opt.step()
    return heals(params, opt, place, saved, weights, world)


@pytest.mark.parametrize("upto", [None, 5])
def test_between_backward_and_step(upto, optimizer):
    assert run_threads(2, half_way, upto) == [True] * 2


def thrown(rank, world):
    """An error inside backward after buckets have left: the step goes on with what is there."""
    params, opt, place = fsdp(world)
    twins, late, _ = fsdp(world, overlap_backward=False)
    gradients = [place(g) for g in drawn([p.shape for p in params], torch.Generator().manual_seed(7))]
    with pytest.raises(KeyError), opt.last_backward():
        for p, g in [*zip(params, gradients)][:4:-1]:
            come(p, g)
        raise KeyError
    left = len(opt._backward_overlap.started)
    for p, q, g in zip(params, twins, gradients):
        p.grad, q.grad = g if p.grad is None else p.grad, g
    for ps, one in ((params, opt), (twins, late)):
        one.step()
        one.zero_grad()
        backward(ps, place, 8, one)
        one.step()
    return left, same(tensors(params, opt), tensors(twins, late))


def test_an_error_inside_backward_loses_nothing(optimizer):
    for left, equal in run_threads(2, thrown):
        assert 0 < left < 7 and equal


# faults ----------------------------------------------------------------------------------------------------------

def struck(rank, world, place_, fault, hop):
    """Rank 1 fails at one collective of a step that begins during backward; what is told at each rank, by whom."""
    params, opt, place = fsdp(world)
    group = opt._backward_overlap.buckets[0][0].process_group
    opt._bound.missing.wait()  # for the end of the first step
    dist.barrier(group)
    # rank 1 must come as far as its fault, and rank 0 with it, on a busy machine too
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2 * TIMEOUT_S * (1 + 9 * rank)), group)
    if rank == 1:
        Faulty(place_, fault, hop)
    told = {}
    for name, act in (("backward", lambda: backward(params, place, 1, opt)), ("step", opt.step), ("again", opt.step),
                      ("last_backward", opt.last_backward)):
        try:
            act()
        except RuntimeError as error:
            told[name] = str(error)
    return told


@pytest.mark.parametrize("hop", [0, 3, 9])
def test_a_fault_names_the_bucket(hop, tmp_path, optimizer):
    """Of the first two, what leaves during backward; of the last, what comes back in the step."""
    cases = [(struck, *case, hop) for case in itertools.product(["before", "in", "after"], ["dies", "raises"])]
    for case, (seen, own) in zip(cases, run_mortal(cases, tmp_path)):
        assert (own is None) == (case[2] == "dies")
        if own is not None:
            here = "backward" if hop < 7 and case[1] != "after" else "step"
            assert next(iter(own)) == here and "a fault of this rank's own" in own[here]
        for told in filter(None, (seen, own)):
            first = next(iter(told.values()))
            if "in the comparison of missing gradients" in first:  # it had all that it needed, and hears of it later
                assert hop > 7 and case[1] == "after" and told is seen, (case, told)
                continue
            assert "in bucket " in first and "exchange" in first, (case, told)
            assert "failed half-way" in told["again"] and "failed half-way" in told["last_backward"], (case, told)


# memory and plan -------------------------------------------------------------------------------------------------

def roomy(rank, world, given):
    """(what is refused, the largest workspace that is taken, the report)."""
    try:
        params, opt, place = fsdp(world, workspace_bytes=given)
    except ValueError as error:
        return str(error), 0, ""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for route, _ in opt._bound.jobs if route.bucket is not None for t in route.memory.values()}
    backward(params, place, 1, opt)
    report = opt.plan_report()
    assert sum(report.workspace.values()) == sum(storages.values()) and len(report.workspace) == 8
    opt.timing = True
    opt.step()
    assert len(report.rows) == 8 and str(opt.plan_report())
    return "", sum(storages.values()), str(report)


def one_needs_more(rank, world):
    """What each rank is told if only the workspace of one with a large matrix at home is too small."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(cut(torch.ones(shape), mesh, [Shard(0)])) for shape in [(8, 6), (1, 4000)]]
    opt = muon_before_a_step(params, overlap_backward=True, workspace_bytes=5000)
    with pytest.raises(ValueError, match="workspace_bytes=5000 is too small") as raised:
        opt.step()
    return str(raised.value)


def one_at_home(rank, world):
    """What is shared has room in the workspace; not with what a rank steps alone."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(cut(torch.ones(8, 6), mesh, [Shard(0)])), nn.Parameter(torch.ones(8, 6))]
    opt = muon_before_a_step(params, overlap_backward=True, workspace_bytes=6000)
    with pytest.raises(ValueError, match="workspace_bytes=6000 is too small"):
        opt.step()
    return True


def test_what_a_rank_steps_alone_counts_for_its_workspace(optimizer):
    assert all(run_threads(2, one_at_home, timeout=20))


def test_a_workspace_too_small_for_one_rank_is_refused_by_all(optimizer):
    """It said so after the comparison of plans, when the others already waited for it."""
    assert len(set(run_threads(2, one_needs_more, timeout=20))) == 1


@pytest.mark.parametrize("world", [2, 4])
def test_the_workspace_holds_every_bucket_that_travels(world, optimizer):
    messages = [message for message, _, _ in run_threads(world, roomy, 1000)]
    assert len(set(messages)) == 1 and "every bucket has a buffer of its own, which takes" in messages[0]
    needed = int(messages[0].split("takes ")[1].split(" ")[0])
    for message, taken, report in run_threads(world, roomy, needed):
        assert not message and 0.3 * needed < taken <= needed and "bucket buffer 6" in report
    assert all("too small" in message for message, _, _ in run_threads(world, roomy, needed - 1))


def timed(rank, world):
    """A step whose parts are timed begins with the step."""
    params, opt, place = fsdp(world)
    opt.timing = True
    backward(params, place, 1, opt)
    left = len(opt._backward_overlap.started)
    opt.step()
    return left, len({span.bucket for span in opt.plan_report().measured})


def test_a_timed_step_begins_with_the_step(optimizer):
    assert run_threads(2, timed) == [(0, 8)] * 2


def planned_along(which, W, *more):
    """The buckets of 40 matrices on W ranks and of one that is whole on rank 0, as they are, and cut anew `which` way:
    the same matrices with the same owners.
    """
    plan, layout = part("planning.plan"), part("params.layout")
    heights = [4 + 2 * (i % 3) for i in range(40)]
    layouts = [layout.Layout((W * h, 24), {r: ((h * r, h * (r + 1)), (0, 24)) for r in range(W)}, (tuple(range(W)),),
                             plain=False) for h in heights]
    layouts.append(layout.Layout((8, 8), {0: ((0, 8), (0, 8))}, ((0,),), plain=False))
    cost, terms = lambda R, C: R * C * min(R, C), part("planning.memory_model").PlanInputs()
    before = plan.make_plan(layouts, cost, {}, terms)
    after = getattr(plan, which)(before, layouts, cost, terms, *more)
    pairs = [{(m, o) for b in buckets for m, o in zip(b.matrices, b.owners)} for buckets in (before, after)]
    assert pairs[0] == pairs[1]
    return before, after


@pytest.mark.parametrize("latency", [0, 300, 1 << 30])
def test_buckets_are_complete_one_after_another(latency, optimizer):
    """The same matrices and owners, the last parameter first, of about one size, as few as an all-to-all's latency
    says.
    """
    W, (before, after) = 4, planned_along("along_backward", 4, latency)
    assert [b for b in after if b.route == "local"] == [b for b in before if b.route == "local"]
    away = [b for b in after if b.route == "exchange"]
    params = [[m.param for m in b.matrices] for b in away]
    assert list(itertools.chain(*params)) == list(range(39, -1, -1))
    numels = [sum(m.numel for m in b.matrices) for b in away]
    assert len(away) == {0: 8, 300: 8, 1 << 30: 1}[latency]
    assert all(n * 2 >= latency * W for n in numels[:-1]) and max(numels) <= sum(numels) / len(away) + 32 * 24


@pytest.mark.parametrize("latency", [0, 200, 1 << 30])
def test_chunks_are_complete_one_after_another(latency, optimizer):
    plan, shapes, ranks = part("planning.plan"), [(50, 6), (7, 1), (3, 4), (1, 5), (90, 2)], (0, 1, 2)
    terms = part("planning.memory_model").ChunkPlanInputs(4, 4, 4)
    whole, = plan.plan_chunks(shapes, ranks, 1 << 40, terms)
    parts = plan.chunks_along_backward(shapes, ranks, terms, latency)
    rows = sorted((m.param, row) for b in parts for m in b.matrices for row in range(m.at[0], m.at[0] + m.rows))
    assert rows == sorted((m.param, row) for m in whole.matrices for row in range(m.rows))
    lasts = [max(m.param for m in b.matrices) for b in parts]
    assert lasts == sorted(lasts, reverse=True)
    assert len(parts) == 1 if latency > 200 else 4 <= len(parts) <= 2 * part("planning.bucketing").OVERLAP_BUCKETS

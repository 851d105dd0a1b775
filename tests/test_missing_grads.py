"""Missing gradients, another subset on each rank at each step: never a hang, and the result that is documented."""

from __future__ import annotations

import contextlib
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import package, part, run_threads
from tests.test_bucket_updates import cut
from tests.test_graphs import graphs_as

WORLD, PATTERNS = 8, 50
DENSE, EXPERTS = [(16, 8), (8, 16), (9, 5), (2, 7)], [(8, 6, 4), (8, 4, 6)]
COPIED = {"ddp": 1, "hsdp": 4}  # ranks that share a copy: those that hold the same elements have the same gradients
MODES = {"fsdp": DENSE, "tp x fsdp": DENSE, "ep x fsdp": EXPERTS, "unreduced": DENSE}


def pattern(shares, world, generator):
    """[for each parameter, which ranks have a gradient]: none at all, single ones, most, everybody."""
    likely = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0])[torch.randint(5, (shares,), generator=generator)]
    likely = likely * (torch.rand((), generator=generator) > 0.1)
    return torch.rand(shares, world, generator=generator) < likely[:, None]


def placing(mode, world, device):
    """(how tensors are placed, the options that go with it); "alone": no rank knows of another."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    if mode == "alone":
        return torch.clone, {}
    if mode in ("unreduced", "ddp"):
        return torch.clone, {"process_group": dist.group.WORLD, "grads_are_reduced": mode == "ddp"}
    shape = {"fsdp": (world,), "tp x fsdp": (2, world // 2), "ep x fsdp": (world // 2, 2), "hsdp": (2, world // 2)}
    mesh, ways = init_device_mesh(device, shape[mode]), [Shard(0), Shard(1)][:len(shape[mode])]
    ways = [Replicate(), Shard(0)] if mode == "hsdp" else ways
    return lambda full: cut(full, mesh, ways), {}


def patterns(rank, world, mode, device="cpu", kind=None, hold=1, count=PATTERNS):
    """Steps with gradients missing beside steps with zeros in their place, and with nothing where no rank has one.

    `kind`: of the first ones (test_graphs.py), the others then are without graphs; `hold`: steps with one pattern, of
    which there are `count`.
    Returns whether all there is to miss was missed, and whether weights and state have the same bits.
    """
    generator = torch.Generator().manual_seed(len(mode))
    place, options = placing(mode, world, device)
    shapes = [*MODES.get(mode, DENSE), DENSE[0]]
    if kind and device == "cpu":  # the interpreter is slow
        shapes, options = shapes[-3:], {**options, "ns_coefficients": "jordan", "ns_steps": 1}
    fulls = [torch.randn(s, generator=generator).to(device) for s in shapes]
    ours, theirs = ([nn.Parameter(place(f)) for f in fulls] for _ in "12")
    missing, filled = (
        package().NorMuon([{"params": ps[:-1]}, {"params": ps[-1:], "use_muon": False}], lr=0.1, capturable=captured,
                          **options) for ps, captured in ((ours, kind == "capturable"), (theirs, False)))
    local, seen, grads = part("params.dtensor").local_of, set(), [place(torch.zeros_like(f)) for f in fulls]
    has, shards = torch.ones(len(fulls), world, dtype=torch.bool), COPIED.get(mode, world)
    for step in range(count * hold):
        if step and step % hold == 0:
            has = pattern(len(fulls), shards, generator).repeat(1, world // shards)
        kept = []
        for i, (p, q) in enumerate(zip(ours, theirs)):
            own = rank if mode == "unreduced" else 0
            gradient = place(torch.randn(world, *fulls[i].shape, generator=generator)[own].to(device))
            p.grad = grads[i].copy_(gradient) if has[i, rank] else None
            q.grad = gradient if has[i, rank] else torch.zeros_like(gradient)
            if not has[i].any():
                kept += [(t, t.clone()) for t in (local(q), *(local(s) for s in filled.state[q].values()))]
        with graphs_as(kind):
            missing.step()
        with graphs_as(kind and "off"):
            filled.step()
        for now, then in kept:
            now.copy_(then)
        seen |= {"none" if not row.any() else "all" if row.all() else "some" for row in has}
    pairs = [*zip(ours, theirs)] + [(s, filled.state[q][k]) for p, q in zip(ours, theirs)
                                    for k, s in missing.state[p].items()]
    ways = {"none", "all"} if shards == 1 else {"none", "some", "all"}
    return seen == ways, all(torch.equal(local(a), local(b)) for a, b in pairs)


@pytest.mark.parametrize("mode", MODES)
def test_random_patterns_over_eight_ranks(mode, optimizer):
    """200 in all."""
    assert PATTERNS * len(MODES) == 200
    for varied, equal in run_threads(WORLD, patterns, mode, timeout=120):
        assert varied and equal


@pytest.mark.parametrize("mode", COPIED)
def test_random_patterns_that_copies_share(mode, optimizer):
    for varied, equal in run_threads(WORLD, patterns, mode, timeout=120):
        assert varied and equal


def nothing(rank, world, mode):
    """No rank has any gradient, from the first step on; then one rank has one."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    options = {} if mode == "fsdp" else {"process_group": dist.group.WORLD, "grads_are_reduced": mode == "reduced"}
    fulls = [torch.ones(s) for s in [(8, 4), (4, 8), (6, 3)]]
    params = [nn.Parameter(cut(f, mesh, [Shard(0)]) if mode == "fsdp" else f.clone()) for f in fulls]
    optimizer = package().NorMuon([{"params": params[:2]}, {"params": params[2:], "use_muon": False}], **options)
    for _ in range(3):
        optimizer.step()
    local = part("params.dtensor").local_of
    still = all((local(p) == 1).all() and not any(t.any() for t in map(local, optimizer.state[p].values()))
                for p in params)
    if rank == 1:
        params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    return still, bool((local(params[0]) != 1).any()) or not local(params[0]).numel()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("mode", ["fsdp", "reduced", "unreduced"])
def test_steps_in_which_no_rank_has_any(mode, world, optimizer):
    for still, moved in run_threads(world, nothing, mode):
        assert still and moved


def single(rank, world, mode):
    """A mesh or a group of one rank: two steps, the second without gradients; whether that one changed anything."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    options = {} if mode == "fsdp" else {"process_group": dist.group.WORLD, "grads_are_reduced": mode == "reduced"}
    fulls = torch.ones(4, 3), torch.ones(5)
    params = [nn.Parameter(cut(f, mesh, [Shard(0)]) if mode == "fsdp" else f) for f in fulls]
    optimizer = package().NorMuon([{"params": params[:1]}, {"params": params[1:], "use_muon": False}], **options)
    local, history = part("params.dtensor").local_of, []
    for has in (True, False):
        for p in params:
            p.grad = torch.ones_like(p) if has else None
        optimizer.step()
        history.append([local(t).clone() for p in params for t in (p, *optimizer.state[p].values())])
    return all(map(torch.equal, *history))


@pytest.mark.parametrize("mode", ["fsdp", "reduced", "unreduced"])
def test_a_mesh_of_one_rank_leaves_alone_what_has_no_gradient(mode, optimizer):
    """Found by test_random: it was stepped with zeros."""
    assert run_threads(1, single, mode) == [True]


def apart(full):
    """The same matrix, whose rows do not follow each other in memory."""
    return torch.full((full.shape[0], full.shape[1] + 3), 7.0)[:, :full.shape[1]].copy_(full)


def in_rows(rank, world, reduced, first):
    """Two steps, one of them without gradients; how far a parameter whose rows lie apart is from one without gaps."""
    fulls = torch.randn(2, 8, 30, generator=torch.Generator().manual_seed(0))
    ours, theirs = nn.Parameter(apart(fulls[0])), nn.Parameter(fulls[0].clone())
    options = {"lr": 0.1, "wire_dtype": torch.float32}
    many = package().Muon([ours], process_group=dist.group.WORLD, grads_are_reduced=reduced, **options)
    one = package().Muon([theirs], **options)
    for has in (first, not first):
        ours.grad, theirs.grad = (apart(fulls[1]), fulls[1]) if has else (None, None)
        many.step()
        one.step()
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("reduced", [True, False])
def test_a_missing_gradient_of_a_parameter_whose_rows_lie_apart(reduced, first, optimizer):
    """Zeros in its place had no gaps, so the gradient in another step was read in the wrong places, or beyond its end.
    """
    assert max(run_threads(2, in_rows, reduced, first)) < 1e-6


def failed(rank, world):
    """Steps of which the second fails at its end; whether it changed parameters with gradients, and those without."""
    params = [nn.Parameter(torch.ones(s)) for s in [(8, 4), (4, 8), (6, 3), (5,)]]
    optimizer = package().NorMuon([{"params": params[:2]}, {"params": params[2:], "use_muon": False}],
                                  process_group=dist.group.WORLD)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    held = [[t.clone() for t in (p, *optimizer.state[p].values())] for p in params]
    params[1].grad = params[3].grad = None
    optimizer._bound.missing.compare = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    now = [[p, *optimizer.state[p].values()] for p in params]
    return [not all(map(torch.equal, then, here)) for then, here in zip(held, now)]


def test_a_step_that_fails_leaves_alone_what_has_no_gradient(optimizer):
    assert run_threads(2, failed) == [[True, False] * 2] * 2


def after_a_failed_creation(rank, world):
    """Whether a parameter without gradient stays as it was, after a first step with lr 0 failed
    while gradients were searched for NaN.
    """
    params = [nn.Parameter(torch.ones(4, 3)) for _ in "12"]
    for p in params:
        p.grad = torch.zeros_like(p)
    options = {"process_group": dist.group.WORLD, "nonfinite": "skip"}
    optimizer = package().Muon(params, lr=0.0, weight_decay=0.1, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part("communication.nonfinite").NonfiniteFlags, "before_buckets", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    params[0].grad, params[1].grad = torch.ones(4, 3), None
    optimizer.step()
    return [bool((p == 1).all()) for p in params]


def test_a_step_that_failed_to_create_state_leaves_no_trace(optimizer):
    assert run_threads(1, after_a_failed_creation) == [[False, True]]


@contextlib.contextmanager
def hooked(presence):
    """The calls of `Muon.step` around the buckets."""
    presence.before_buckets()
    try:
        yield
        presence.after_buckets()
    except BaseException:
        presence.on_error()
        raise


def test_a_step_waits_for_the_comparison_of_the_one_before(optimizer):
    """Its answers stand in memory that the next one writes to; a step whose gradients are all there waits for no more.
    """
    presence, waited = part("communication.missing_grads").MissingGradients(), []
    presence.works = [SimpleNamespace(wait=lambda: waited.append("before the next step"))]
    with hooked(presence):
        assert waited == ["before the next step"]
        presence.works = [SimpleNamespace(wait=lambda: waited.append("at the end"))]
    assert waited == ["before the next step"] and len(presence.works) == 1  # nothing is to be put back


def test_an_error_of_the_comparison_is_raised_where_its_answer_is_needed(optimizer):
    """On CPUs every rank waits for it, but a rank with all gradients has taken a whole step: the next one raises."""
    def fail():
        raise RuntimeError("a peer is gone")

    presence = part("communication.missing_grads").MissingGradients()

    def compare():
        presence.works = [SimpleNamespace(wait=fail), SimpleNamespace(wait=lambda: waited.append("the second one"))]

    presence.compare, waited = compare, []
    with hooked(presence), presence.comparing():
        pass
    assert waited == ["the second one"] and not presence.works
    with (pytest.raises(RuntimeError, match="in the comparison of missing gradients: a peer is gone"),
          hooked(presence)):
        pass
    with hooked(presence):
        pass  # told once


def idle(params):
    """What the first two steps of an optimizer warn of."""
    stepper = package().Muon([{"params": params[:1]}, {"params": params[1:], "use_muon": False}])
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        for _ in range(2):
            stepper.step()
    assert all(message.filename == __file__ for message in messages)  # where the caller is
    return [str(message.message) for message in messages]


def test_a_first_step_that_finds_no_gradient_anywhere_is_told(optimizer):
    params = [("0.weight", nn.Parameter(torch.ones(4, 3))), ("0.bias", nn.Parameter(torch.ones(4)))]
    message, = idle(params)
    assert "finds a gradient at none of 2 parameters, the first of which is 0.weight" in message
    assert "build it after that" in message
    params[1][1].grad = torch.ones(4)
    assert idle(params) == []


def test_a_parameter_on_the_meta_device_is_told(optimizer):
    with torch.device("meta"):
        params = [("0.weight", nn.Parameter(torch.ones(4, 3))), ("0.bias", nn.Parameter(torch.ones(4)))]
    message, = idle(params)
    assert "parameter 0.weight is on the meta device, where a step changes nothing" in message

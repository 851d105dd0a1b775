"""State of replicated parameters at their owners alone, with gradients that come reduced: the bits of one process."""
from __future__ import annotations

import copy
import datetime
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import package, run_ranks, run_threads

MATRICES = [(40, 30), (20, 16), (16, 20), (8, 12), (9, 7), (3, 6, 10), (1, 9)]
REST = [(50, 6), (7,), (), (0, 3)]
F32 = torch.float32


def built(name, params, shard_state=True, **more):
    groups = [{"params": params[:len(MATRICES)]}, {"params": params[len(MATRICES):], "use_muon": False, "lr": 0.01}]
    group = {} if shard_state is None else {"process_group": dist.group.WORLD, "shard_state": shard_state}
    return getattr(package(), name)(groups, lr=0.1, weight_decay=0.1, **group, **more)


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator)) for s in MATRICES + REST]


def train(optimizer, params, numbers, missing=lambda number, i: False, broken=lambda number, i: False):
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for i, p in enumerate(params):
            gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = None if missing(number, i) else gradient.fill_(float("nan")) if broken(number, i) else gradient
        optimizer.step()


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def state_of(optimizer, params):
    """As a state dict has it, whole: collective where owners keep it."""
    found = optimizer.state_dict()["state"]
    return [t.full_tensor() if hasattr(t, "full_tensor") else t
            for i in range(len(params)) if i in found for _, t in sorted(found[i].items())]


def kept(optimizer, params):
    return sum(t.numel() for p in params for key, t in optimizer.state[p].items() if key != "step")


def against_one(rank, world, name, options, numbers=range(4), **gradients):
    """Whether weights and state are those of one process; numbers of the state that this rank keeps, and of all."""
    alone, many = parameters(), parameters()
    one = built(name, alone, None, wire_dtype=F32, **options)
    opt = built(name, many, wire_dtype=F32, **options)
    for params, optimizer in ((alone, one), (many, opt)):
        train(optimizer, params, numbers, **gradients)
    equal = same(alone, many) and same(state_of(one, alone), state_of(opt, many))
    return equal, kept(opt, many), kept(one, alone), {bucket.route for plan in opt._preparation._plans[False]
                                                      for bucket, _ in plan.rank_plans or ()}


@pytest.mark.parametrize("options", [{}, {"workspace_bytes": 110_000}, {"nonfinite": "skip"},
                                     {"overlap_forward": True}], ids=str)
@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_it_has_the_bits_of_one_process_and_every_element_once(name, options, optimizer):
    results = run_threads(4, against_one, name, options)
    assert all(equal for equal, *_ in results)
    assert sum(mine for _, mine, _, _ in results) == results[0][2] and max(mine for _, mine, *_ in results) > 0
    assert results[0][3] == {"own", "own_elementwise"}


def of_many_dtypes(rank, world):
    """AdamW on weights and state of several dtypes, in one bucket and in several, against one process."""
    results = []
    for options in ({}, {"state_dtype": torch.bfloat16}, {"workspace_bytes": 4000}):
        alone, many = ([nn.Parameter(torch.randn(s, generator=torch.Generator().manual_seed(i)).to(d))
                        for i, (s, d) in enumerate(itertools.product(REST, (F32, torch.bfloat16, torch.float64)))]
                       for _ in range(2))
        group = {"process_group": dist.group.WORLD, "shard_state": True}
        one, opt = (package().Muon([{"params": params, "use_muon": False}], lr=0.1, **options, **more)
                    for params, more in ((alone, {}), (many, group)))
        for params, optimizer in ((alone, one), (many, opt)):
            train(optimizer, params, range(3))
        results.append(same(alone, many) and same(state_of(one, alone), state_of(opt, many)))
    return results


def test_adamw_of_many_dtypes(optimizer):
    assert run_threads(3, of_many_dtypes) == [[True] * 3] * 3


def broken_ones(rank, world):
    return against_one(rank, world, "NorMuon", {"nonfinite": "skip"}, broken=lambda number, i: (number + i) % 4 == 0)


def missing_ones(rank, world):
    return against_one(rank, world, "NorMuon", {}, missing=lambda number, i: number > 0 and (number + i) % 3 == 0)


@pytest.mark.parametrize("work", [broken_ones, missing_ones])
def test_broken_and_missing_gradients(work, optimizer):
    assert all(equal for equal, *_ in run_threads(3, work))


def test_processes_agree_too(optimizer):
    """By collectives that take time."""
    assert all(equal for equal, *_ in run_ranks(4, against_one, "NorMuon", {}))


def goes_on(rank, world, first, second):
    """Two steps with one way to keep state, two more with another, by a state dict; against four in one process."""
    alone, params = parameters(), parameters()
    train(built("NorMuon", alone, None, wire_dtype=F32), alone, range(4))
    before = built("NorMuon", params, first, wire_dtype=F32)
    train(before, params, range(2))
    after = built("NorMuon", params, second, wire_dtype=F32)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    train(after, params, range(2, 4))
    return same(alone, params), kept(after, params)


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True), (None, True), (True, None)])
def test_state_goes_from_one_way_to_another(first, second, optimizer):
    results = run_threads(3, goes_on, first, second)
    assert all(equal for equal, _ in results)
    whole = sum(torch.Size(s).numel() + torch.Size(s[:-1]).numel() for s in MATRICES)
    whole += sum(2 * torch.Size(s).numel() for s in REST)
    assert sum(mine for _, mine in results) == (whole if second else 3 * whole)


def frozen(rank, world):
    """A matrix that is frozen for a while gives the others other owners."""
    results, owners = [], set()
    for shard_state in (True, None):
        params = parameters()
        opt = built("NorMuon", params, shard_state, wire_dtype=F32)
        for number in range(6):
            params[0].requires_grad_(number not in (2, 3))
            train(opt, params, [number], missing=lambda number, i: i == 0 and number in (2, 3))
            if shard_state:
                owners.add(tuple(len(opt.state[p]["momentum_buffer"]) > 0 for p in params[:len(MATRICES)]))
        results.append(params)
    return same(*results), len(owners)


def test_state_follows_its_owner(optimizer):
    results = run_threads(3, frozen)
    assert all(equal for equal, _ in results) and max(count for _, count in results) > 1


def refusals(rank, world):
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match="shard_state=True needs process_group"):
        package().Muon([weight], shard_state=True)
    with pytest.raises(ValueError, match="shard_state='yes' is not allowed: it must be True or False"):
        package().Muon([weight], shard_state="yes", process_group=dist.group.WORLD)
    placed = nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (world,)), [Replicate()]))
    with pytest.raises(ValueError, match="shard_state=True, but parameter w is a DTensor.*leave the option out"):
        package().Muon([("w", placed)], shard_state=True, process_group=dist.group.WORLD)
    weight.grad = torch.ones_like(weight)
    opt = package().Muon([("w", weight)], shard_state=rank == 0, process_group=dist.group.WORLD)
    with pytest.raises(RuntimeError, match="differ in: shard_state"):
        opt.step()
    return True


def test_what_is_not_allowed_is_told(optimizer):
    assert all(run_threads(2, refusals))


def shown_to_one(rank, world, unreduced):
    """Rank 0 saves alone, as it may where every rank has all of the state; what it is told."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    options = {"grads_are_reduced": False} if unreduced else {"shard_state": True}
    weight = nn.Parameter(torch.ones(4, 3))
    opt = package().Muon([("w", weight)], process_group=group, **options)
    weight.grad = torch.ones_like(weight)
    opt.step()
    told = None
    if rank == 0:
        with pytest.raises(RuntimeError) as raised:
            opt.state_dict()
        told = str(raised.value)
    dist.barrier()
    return told


@pytest.mark.parametrize("unreduced", [False, True])
def test_a_rank_that_saves_alone_is_told(unreduced, optimizer):
    told, _ = run_ranks(2, shown_to_one, unreduced)
    assert told.startswith("in state_dict(), which all ranks of process_group call together")

"""`release` lets go of all memory that is bound at a rank, at once; the next step has the same bits."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.ranks import package, part, run_threads
from tests.test_bucket_updates import cut
from tests.test_muon import same
from tests.test_overlap_forward import install
from tests.test_replan import alone, build, step, wholes

WAYS = {"alone": None, "sharded": {}, "replicated": {}, "shard_state": {"shard_state": True},
        "unreduced": {"grads_are_reduced": False}}


def storages(tensors):
    return [StorageWeakRef(local(t).untyped_storage()) for t in tensors]


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


def bound(opt):
    """The workspace."""
    return [memory for route, _ in opt._bound.jobs if route.bucket is not None for memory in route.memory.values()]


def offload(opt, params):
    """Move weights and state away, as `.cpu()` does; a function that brings them back, elsewhere in memory."""
    held = [(p, local(p.detach()).clone()) for p in params]
    state = {p: {key: copy.deepcopy(value) for key, value in opt.state[p].items()} for p in params}
    for p in params:
        p.grad = None
        local(p).data = torch.empty(0)
        opt.state[p].clear()

    def bring_back():
        for p, value in held:
            local(p).data = value
            opt.state[p].update(state[p])

    return bring_back


def freed(rank, world, way):
    """How many storages live before and after `release`, which not all ranks call, and the weights in the end."""
    from torch.distributed.tensor import Shard, init_device_mesh

    options, place = dict(WAYS[way] or {}), torch.clone
    if way == "sharded":
        mesh = init_device_mesh("cpu", (world,))

        def place(whole):
            return cut(whole, mesh, [Shard(0)])
    elif way != "alone":
        options["process_group"] = dist.group.WORLD
    params = [nn.Parameter(place(f)) for f in wholes()]
    opt, counts = build(params, **options), []
    for number in range(4):
        step(opt, params, number, place)
        if number < 2 and rank == 0:
            weak = storages([*params, *(t for p in params for t in opt.state[p].values() if t.numel()), *bound(opt)])
            bring_back = offload(opt, params)
            counts.append(sum(not ref.expired() for ref in weak))
            opt.release()
            counts.append(sum(not ref.expired() for ref in weak))
            bring_back()
    return counts, [local(p).detach() for p in params], [local(place(p.detach())) for p in alone(4)[0]]


@pytest.fixture
def no_collection():
    """What goes by itself goes when it is released."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("way", WAYS)
def test_memory_goes_and_the_next_step_has_the_same_bits(way, optimizer, no_collection):
    results = run_threads(1 if way == "alone" else 2, freed, way)
    for _, ours, theirs in results:
        assert way == "unreduced" or same(ours, theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours, results[0][1])) or way == "sharded"
    counts, *_ = results[0]
    assert all(counts[::2]) and not any(counts[1::2]), counts


def in_pieces(rank, world):
    """Matrices that are read where their pieces are, of which some stay while others travel."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(cut(torch.randn(512, 256), mesh, [Shard(0)])) for _ in range(4)]
    opt = package().Muon(params, ns_steps=1)
    step(opt, params, 0, lambda g: cut(g, mesh, [Shard(0)]))
    assert any(route.packs_local for route, _ in opt._bound.jobs)
    weak = storages(bound(opt))
    opt.release()
    return [ref.expired() for ref in weak]


def test_routes_hold_no_circles(optimizer, no_collection):
    assert all(all(expired) for expired in run_threads(2, in_pieces))


def left(rank, world):
    torch.manual_seed(0)
    results, seen = [], 0
    for releases in (False, True):
        params = [nn.Parameter(f) for f in wholes()]
        opt = package().Muon(params[:3], process_group=dist.group.WORLD, grads_are_reduced=False, overlap_backward=True)
        for number in range(4):
            loss = sum((p * (number + rank + 1)).square().sum() for p in params[:3])
            with opt.last_backward():
                loss.backward()
            if releases and opt._backward_overlap.started:
                seen += 1
                with pytest.raises(RuntimeError, match="release is not possible now: buckets were sent"):
                    opt.release()
            opt.step()
            if releases and rank == number % 2:
                opt.release()
            opt.zero_grad()
        results.append([p.detach() for p in params[:3]])
    return same(*results) and seen


def test_not_while_buckets_have_left(optimizer):
    assert all(run_threads(2, left))


def test_while_updates_return(optimizer, monkeypatch):
    """Who reads a weight after `release` waits for the step before."""
    machine = install(monkeypatch)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    opt = package().Muon(package().get_default_muon_param_groups(model), overlap_forward=True)
    opt.updates_return_during(model)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        opt.release()
        stream = opt._forward_overlap.stream
        assert machine.main.seen.get(stream, 0) == stream.seen[stream]
        assert not opt._forward_overlap.bucket_params
        reader = machine.Stream()
        opt._forward_overlap.wait_for_params(frozenset(map(id, model.parameters())), reader)
        assert reader.seen.get(stream)
    assert not machine.wrong


def test_before_the_first_step_and_twice(optimizer):
    params = [nn.Parameter(f) for f in wholes()]
    opt = build(params)
    for number in range(3):
        opt.release()
        opt.release()
        with pytest.raises(RuntimeError, match="nothing is bound before the first step, nor after release"):
            opt.plan_report()
        step(opt, params, number)
    assert same(params, alone(3)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True])
def test_memory_of_a_gpu_goes(capturable, optimizer):
    params = [nn.Parameter(torch.randn(512, 512, device="cuda")) for _ in range(4)]
    opt, usual = package().Muon(params, capturable=capturable), [nn.Parameter(p.detach().clone()) for p in params]
    other = package().Muon(usual, capturable=capturable)
    for number in range(8):
        for p, q in zip(params, usual):
            p.grad = q.grad = torch.randn(512, 512, generator=torch.Generator().manual_seed(number)).cuda()
        opt.step()
        other.step()
        if number % 4 == 3:
            before = torch.cuda.memory_allocated()
            opt.release()
            assert torch.cuda.memory_allocated() < before
    assert same(params, usual) and part("execution.cuda_graphs").available(params[0].device)

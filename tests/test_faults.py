"""Ranks that die, stall or raise, in real processes: the others say where, and a restart goes on with the very bits."""

from __future__ import annotations

import datetime
import itertools
import multiprocessing
import os
import pickle
import signal
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import PRELOADED, START_S, package, part
from tests.test_routes import cut

TIMEOUT_S = 1.5  # of the process group, in the step with the fault
AT_ONCE = 18  # cases that run side by side; most of them only wait
ROUTES = {"exchange": "Exchange", "reduce": "Reduce", "reduce_elementwise": "ReduceElementwise"}
PLACES, FAULTS, HOPS = ["before", "in", "after"], ["dies", "stalls", "raises"], {"inbound": 0, "outbound": 2}


# processes that may die -------------------------------------------------------------------------------------------

def run_mortal(cases, folder, world=2) -> list:
    """[[what function(rank, world, *args) returned, None if the rank died]] of (function, *args), side by side.

    Every rank is a process of its own, forked from one that has the package already. The folder takes the results.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    parent = context.Process(target=_fork_all, args=(cases, str(folder), world))
    parent.start()
    parent.join(START_S)
    assert parent.exitcode == 0
    return [[_read(folder / f"{i}.{rank}") for rank in range(world)] for i in range(len(cases))]


def _read(path):
    result = pickle.loads(path.read_bytes()) if path.exists() else None
    if isinstance(result, str):
        raise RuntimeError(result)
    return result


def _fork_all(cases, folder, world):
    torch.set_num_threads(1)
    params = [nn.Parameter(torch.ones(2, 2)) for _ in "12"]
    optimizer = package().Muon([{"params": params[:1]}, {"params": params[1:], "use_muon": False}])
    params[0].grad = params[1].grad = torch.ones(2, 2)
    optimizer.step()  # what a first step imports, once for all
    for first in range(0, len(cases), AT_ONCE):
        batch = enumerate(cases[first:first + AT_ONCE], first)
        children = [_fork(rank, world, i, case, folder) for i, case in batch for rank in range(world)]
        for child in children:
            os.waitpid(child, 0)


def _fork(rank, world, number, case, folder):
    child = os.fork()
    if child:
        return child
    signal.alarm(60)  # no child outlives its test
    _answer(rank, world, number, case, folder, "gloo")


def _answer(rank, world, number, case, folder, backend):
    """Leave what case[0](rank, world, *case[1:]) returns, or its traceback, in the folder, and end this process."""
    try:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(os.path.join(folder, f"store{number}"), world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world,
                                timeout=datetime.timedelta(seconds=40))
        result = case[0](rank, world, *case[1:])
    except BaseException:
        result = traceback.format_exc()
    with open(os.path.join(folder, f"{number}.{rank}.part"), "wb") as file:
        pickle.dump(result, file)
    os.rename(file.name, file.name.removesuffix(".part"))
    os._exit(0)


class Faulty:
    """A collective that fails at its n-th call: before it is issued, while it is in flight, or once it is done."""

    def __init__(self, place, fault, hop):
        self.function, self.place, self.fault, self.left = dist.all_to_all_single, place, fault, hop
        dist.all_to_all_single = self

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left != -1:
            return self.function(*args, **kwargs)
        if self.place == "before":
            self.strike()
        self.work = self.function(*args, **kwargs)
        if self.place == "in":
            self.strike()
        return self

    def wait(self):
        self.work.wait()
        self.strike()

    def strike(self):
        if self.fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "stalls":
            time.sleep(2 * TIMEOUT_S)
        raise RuntimeError("a fault of this rank's own")


def run_on_gpus(cases, folder, world=2, backend="nccl") -> list:
    """As run_mortal, with every rank in a new process that has a GPU; those that take too long are killed."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank_on_gpu, args=(rank, world, i, case, str(folder), backend), daemon=True)
             for i, case in enumerate(cases) for rank in range(world)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + START_S
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
    return [[_read(folder / f"{i}.{rank}") for rank in range(world)] for i in range(len(cases))]


def _rank_on_gpu(rank, world, number, case, folder, backend):
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    _answer(rank, world, number, case, folder, backend)


# problems --------------------------------------------------------------------------------------------------------

def build(route, fulls):
    """Parameters and an optimizer whose step is three buckets of one route."""
    from torch.distributed.tensor import Shard, init_device_mesh

    if route == "exchange":
        mesh = init_device_mesh(fulls[0].device.type, (dist.get_world_size(),))
        params = [nn.Parameter(cut(f, mesh, [Shard(0)])) for f in fulls]
        return params, package().NorMuon(params, lr=0.1, workspace_bytes=28_000)
    params = [nn.Parameter(f.clone()) for f in fulls]
    group = {"params": params, "use_muon": route == "reduce"}
    room = 33_000 if route == "reduce" else 30_000
    return params, package().NorMuon([group], lr=0.1, process_group=dist.group.WORLD, grads_are_reduced=False,
                                     workspace_bytes=room)


def wholes(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(device) for s in [(16, 24), (24, 16)] * 3]


def give(params, route, step):
    generator = torch.Generator().manual_seed(step)
    for p in params:
        grads = torch.randn(dist.get_world_size(), *p.shape, generator=generator).to(p.device)
        p.grad = cut(grads[0], p.device_mesh, p.placements) if route == "exchange" else grads[dist.get_rank()]


def tensors(params, optimizer):
    local = part("layout").local_of
    return [local(t).clone() for p in params for t in (p, *optimizer.state[p].values())]


def struck(rank, world, route, place, fault, hop, device="cpu"):
    """Two good steps, then one in which rank 1 fails; what rank 0 saw."""
    (params, optimizer), (others, twin) = build(route, wholes(device)), build(route, wholes(device))
    for step in range(2):
        for ps, opt in ((params, optimizer), (others, twin)):
            give(ps, route, step)
            opt.step()
    give(others, route, 2)
    twin.step()
    old, new = tensors(params, optimizer), tensors(others, twin)
    buckets = [type(r).__name__ for r, _ in optimizer._jobs]
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT_S), dist.group.WORLD)
    if rank == 1:
        Faulty(place, fault, hop)
    give(params, route, 2)
    began = time.monotonic()
    message, took = fail(optimizer), time.monotonic() - began
    now = tensors(params, optimizer)
    steps = [of_which(*three) for three in zip(now, old, new)]
    again = fail(optimizer)
    if fault == "raises" and rank == 1:
        time.sleep(1.5 * TIMEOUT_S)  # it lives on
    return {"message": message, "seconds": took, "steps": steps, "again": again, "buckets": buckets}


def of_which(now, old, new):
    """The step that a tensor is of; "both" where several buckets bring its rows."""
    if torch.equal(now, old) or torch.equal(now, new):
        return "old" if torch.equal(now, old) else "new"
    return "both" if ((now == old) | (now == new)).flatten(1).all(1).all() else "torn"


def fail(optimizer):
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("route", ROUTES)
def test_a_fault_at_every_yield_is_told_and_nothing_goes_on_silently(route, tmp_path, optimizer):
    """The others raise within the timeout and name the bucket, all of which is of the old step or of the new."""
    cases = [(struck, route, place, fault, hop) for place, fault, hop in
             itertools.product(PLACES, FAULTS, HOPS.values())]
    for case, (seen, own) in zip(cases, run_mortal(cases, tmp_path)):
        check_struck(route, case, seen, own)


def check_struck(route, case, seen, own):
    """What the rank saw that lives on, and what the other one did."""
    assert seen["buckets"] == [ROUTES[route]] * 3, seen["buckets"]
    assert f"({route}; " in seen["message"] and "in bucket " in seen["message"], (case, seen["message"])
    assert "the first of parameter #" in seen["message"] and "ranks 0, 1)" in seen["message"]
    of = {"old", "new"} | ({"both"} if route == "reduce_elementwise" else set())
    assert seen["seconds"] < 3 * TIMEOUT_S and set(seen["steps"]) <= of
    assert "failed half-way" in seen["again"] and "load_state_dict" in seen["again"]
    assert (own is None) == (case[3] == "dies")
    if own is not None:
        assert "a fault of this rank's own" in own["message"] and "in bucket " in own["message"]
        assert "failed half-way" in own["again"] and set(own["steps"]) <= of


@pytest.mark.gpus(2)
@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_gpus_is_told_where_the_host_waits(fault, tmp_path, optimizer):
    """With TORCH_NCCL_BLOCKING_WAIT=1; without, torch ends the process."""
    cases = [(struck, route, "before", fault, HOPS["inbound"], "cuda") for route in ROUTES]
    for case, (seen, own) in zip(cases, run_on_gpus(cases, tmp_path)):
        check_struck(case[1], case, seen, own)


def gone(rank, world):
    """Rank 1 dies before the first step, when plans are compared."""
    params, optimizer = build("exchange", wholes())
    give(params, "exchange", 0)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return fail(optimizer), [torch.equal(t, f) for t, f in zip(tensors(params, optimizer)[::3], wholes())]


def test_a_rank_that_is_gone_before_the_first_step(tmp_path, optimizer):
    ((message, _), _), = run_mortal([(gone,)], tmp_path)
    assert "in the comparison of plans of ranks (0, 1)" in message


# restart ---------------------------------------------------------------------------------------------------------

def training(rank, world, route, folder, first, fault):
    """Six steps of a regression with a checkpoint after the second; the losses, from step `first` on."""
    local, losses = part("layout").local_of, []
    params, optimizer = build(route, wholes())
    saved = os.path.join(folder, f"{route}.{rank}.pt")
    if first:
        restore(params, optimizer, torch.load(saved, weights_only=True))
    for step in range(first, 6):
        if fault and step == 3 and rank == 1:
            Faulty(*fault)
        losses.append(descend(params, route, step))
        optimizer.step()
        if step == 1 and not first:
            states = [{k: local(v) for k, v in state.items()} for state in optimizer.state_dict()["state"].values()]
            torch.save(([local(p) for p in params], states), saved)
    return losses


def descend(params, route, step):
    """The loss of this step's data, and its gradients as the route wants them."""
    generator, loss = torch.Generator().manual_seed(step), 0.0
    wholes_ = [(p.full_tensor() if route == "exchange" else p).detach().requires_grad_() for p in params]
    for p, W in zip(params, wholes_):
        x = torch.randn(dist.get_world_size(), 5, W.shape[1], generator=generator)
        terms = (x @ W.mT - 1).square().mean((1, 2))
        term = terms.mean() if route == "exchange" else terms[dist.get_rank()]
        G, = torch.autograd.grad(term, W)
        p.grad = cut(G, p.device_mesh, p.placements) if route == "exchange" else G
        loss += terms.mean().item()
    return loss


def restore(params, optimizer, saved):
    """The weights in place; the state through load_state_dict, in the form in which state_dict gave it."""
    layout, (weights, states) = part("layout"), saved
    for p, W, state in zip(params, weights, states):
        layout.local_of(p).copy_(W)
        for key in set(state) - {"step"}:
            shape = part("store").state_shape(p, key)
            if layout.is_dtensor(p):
                state[key] = layout.as_dtensor(state[key], shape, p.device_mesh, p.placements)
            else:
                state[key] = layout.by_rows(state[key], shape, dist.group.WORLD)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(enumerate(states))})


def test_after_a_fault_the_checkpoint_goes_on_with_the_very_bits(tmp_path, optimizer):
    kinds = {"exchange": ("in", "dies", 2), "reduce": ("after", "raises", 0),
             "reduce_elementwise": ("before", "dies", 1)}
    folders = {name: tmp_path / name for name in ("through", "struck", "restarted", "saved", "unused")}
    for folder in folders.values():
        folder.mkdir()
    through = run_mortal([(training, r, str(folders["unused"]), 0, None) for r in kinds], folders["through"])
    with pytest.raises(RuntimeError, match="in bucket"):
        run_mortal([(training, r, str(folders["saved"]), 0, kind) for r, kind in kinds.items()], folders["struck"])
    restarted = run_mortal([(training, r, str(folders["saved"]), 2, None) for r in kinds], folders["restarted"])
    for uninterrupted, again in zip(through, restarted):
        for losses, rest in zip(uninterrupted, again):
            assert losses[2:] == rest and losses[0] > losses[-1]


# half-way, in one process ----------------------------------------------------------------------------------------

def test_a_step_that_failed_half_way_refuses_until_a_checkpoint_is_loaded(optimizer, monkeypatch):
    import copy

    params = [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(5))]
    muon = optimizer.NorMuon([{"params": params[:1]}, {"params": params[1:], "use_muon": False}])

    def give_all():
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, 1.0 + i)

    give_all()
    muon.step()
    saved, before = copy.deepcopy(muon.state_dict()), [p.detach().clone() for p in params]
    with monkeypatch.context() as patch:
        patch.setattr(part("recipe"), "adamw", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory")))
        with pytest.raises(torch.OutOfMemoryError, match="in Elementwise: no memory"):
            muon.step()
    for broken in (muon, pickle.loads(pickle.dumps(muon)), copy.deepcopy(muon)):
        with pytest.raises(RuntimeError, match="failed half-way.*Load a checkpoint.*load_state_dict"):
            broken.step()
    assert muon._half_way
    with pytest.warns(UserWarning, match="failed half-way.*do not save this state"):
        muon.state_dict()
    muon.load_state_dict(saved)
    for p, b in zip(params, before):
        p.data.copy_(b)
    muon.step()
    again = [nn.Parameter(b.clone()) for b in before]
    other = optimizer.NorMuon([{"params": again[:1]}, {"params": again[1:], "use_muon": False}])
    other.load_state_dict(saved)
    for p, q in zip(params, again):
        q.grad = p.grad
    other.step()
    assert all(map(torch.equal, params, again))


def test_what_fails_before_anything_has_changed_may_be_tried_again(optimizer):
    param = nn.Parameter(torch.randn(4, 6))
    muon = optimizer.Muon([param])
    param.grad = torch.ones(4, 6).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        muon.step()
    param.grad = torch.ones(4, 6)
    muon.step()

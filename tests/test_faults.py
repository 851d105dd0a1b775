"""Ranks that die, stall or raise, in real processes: the others say where, and a restart goes on with the very bits."""

from __future__ import annotations

import copy
import datetime
import functools
import gc
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import PRELOADED, START_S, THOROUGH, package, part
from tests.test_bucket_updates import cut

TIMEOUT_S = 1.5  # of the process group, in the step with the fault
AT_ONCE = 48  # processes that run side by side; most of them only wait
BUCKET_UPDATES = {
    "exchange": "ShardedUpdate",
    "reduce": "UnreducedUpdate",
    "reduce_elementwise": "UnreducedElementwiseUpdate",
}
PLACED = {"exchange": 28_000, "experts": 14_400}  # DTensors, and the room that makes several buckets
PLACES, FAULTS = ["before", "in", "after"], ["dies", "stalls", "raises"]
COLLECTIVES = ("all_to_all_single", "all_to_all", "all_reduce")
# During what each collective of a step is issued, in their order. The last one is waited for in the next step.
BROKEN, MISSING = "the comparison of NaN and Inf in gradients", "the comparison of missing gradients"
HOPS = [*(f"bucket {number} (" for number in (0, 1, 0, 2, 1, 2)), MISSING]
KNOWN = {}  # what cases that ran first have returned, by rank: (function, *args) -> results


# processes that may die -------------------------------------------------------------------------------------------

def run_mortal(cases, folder, world=2, first=()) -> list:
    """[[what function(rank, world, *args) returned, None if the rank died]] of (function, *args), side by side.

    Every rank is a process of its own, forked from one that has the package already. The folder takes the results.
    `first`: cases that run before; the others find their results in KNOWN.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    parent = context.Process(target=_fork_all, args=(first, cases, folder, world))
    parent.start()
    parent.join(START_S)
    numbers = range(len(first) + len(cases))
    results = [[_read(folder / f"{i}.{rank}") for rank in range(world)] for i in numbers][len(first):]
    assert parent.exitcode == 0
    return results


def _read(path):
    result = pickle.loads(path.read_bytes()) if path.exists() else None
    if isinstance(result, str):
        raise RuntimeError(result)
    return result


def _fork_all(first, cases, folder, world):
    torch.set_num_threads(1)
    params = [nn.Parameter(torch.ones(2, 2)) for _ in "12"]
    optimizer = package().Muon([{"params": params[:1]}, {"params": params[1:], "use_muon": False}])
    params[0].grad = params[1].grad = torch.ones(2, 2)
    optimizer.step()  # what a first step imports, once for all
    part("communication.plan_check")._sources()  # what each would read
    gc.freeze()  # a collection would copy the memory that they share
    _fork_cases(enumerate(first), folder, world)
    KNOWN.update((case, [_read(folder / f"{i}.{rank}") for rank in range(world)]) for i, case in enumerate(first))
    _fork_cases(enumerate(cases, len(first)), folder, world)


def _fork_cases(numbered, folder, world):
    running = set()
    for number, case in numbered:
        while len(running) > AT_ONCE - world:
            running.remove(os.wait()[0])
        running.update(_fork(rank, world, number, case, folder) for rank in range(world))
    for child in running:
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
    """The n-th collective of a step fails: before it is issued, while it is in flight, or once it is done."""

    def __init__(self, place, fault, hop):
        self.place, self.fault, self.left = place, fault, hop
        for name in COLLECTIVES:
            setattr(dist, name, functools.partial(self.call, getattr(dist, name)))

    def call(self, function, *args, async_op=False, **kwargs):
        self.left -= 1
        if self.left != -1:
            return function(*args, async_op=async_op, **kwargs)
        if self.place == "before":
            self.strike()
        self.work = function(*args, async_op=True, **kwargs)
        if self.place == "in":
            self.strike()
        return self if async_op else self.wait()

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

def build(route, fulls, **options):
    """Parameters and an optimizer whose step is three buckets of one route; for "experts" two buckets of two matrices
    among the ranks of an expert, and two of all ranks.
    """
    if route in PLACED:
        groups = [{"params": [nn.Parameter(cut(f, *place)) for f, place in zip(fulls, places(route, fulls))]}]
        params = groups[0]["params"]
        return params, package().NorMuon(groups, lr=0.1, workspace_bytes=PLACED[route], **options)
    params = [nn.Parameter(f.clone()) for f in fulls]
    group = {"params": params, "use_muon": route == "reduce"}
    room = 33_000 if route == "reduce" else 50_000
    return params, package().NorMuon([group], lr=0.1, process_group=dist.group.WORLD, grads_are_reduced=False,
                                     workspace_bytes=room, **options)


def places(route, fulls):
    """(mesh, placements) of each parameter."""
    from torch.distributed.tensor import Shard, init_device_mesh

    flat = init_device_mesh(fulls[0].device.type, (dist.get_world_size(),))
    if route == "exchange":
        return [(flat, [Shard(0)])] * len(fulls)
    square = init_device_mesh("cpu", (2, 2))
    return [(flat, [Shard(0)]) if f.ndim == 2 else (square, [Shard(1), Shard(0)]) for f in fulls]


def wholes(device="cpu", route="exchange"):
    generator, shapes = torch.Generator().manual_seed(0), [(16, 24), (24, 16)] * 3
    shapes = [(4, 8, 6), (12, 8), (4, 8, 6), (8, 12)] if route == "experts" else shapes
    return [torch.randn(s, generator=generator).to(device) for s in shapes]


def give(params, route, step):
    generator = torch.Generator().manual_seed(step)
    for p in params:
        grads = torch.randn(dist.get_world_size(), *p.shape, generator=generator).to(p.device)
        p.grad = cut(grads[0], p.device_mesh, p.placements) if route in PLACED else grads[dist.get_rank()]


def tensors(params, optimizer):
    local = part("params.dtensor").local_of
    return [local(t).clone() for p in params for t in (p, *optimizer.state[p].values())]


def by_bucket(optimizer):
    """Of each bucket that travels, what it changes at this rank: weights of all its pieces, and their state kept here.
    """
    found = []
    for bound in [route for route, _ in optimizer._bound.jobs if route.bucket is not None]:
        stored = [p for p in bound.rank_plan.stored if not p.kind.startswith("sent:")]
        pieces = [p for p in stored if p.kind != "second_moment"]
        here = [p for p in stored if bound.bucket.route == "exchange" or p.owner == bound.rank]
        rows, others = ([p for p in here if (p.kind == "second_moment") == is_row] for is_row in (True, False))
        keys = ("exp_avg", "exp_avg_sq") if "chunk" in {p.kind for p in pieces} else ("momentum_buffer",)
        views = [bound.store.weights(pieces), bound.store.states(rows, "second_moment"),
                 *(bound.store.states(others, k) for k in keys)]
        found.append([view.clone() for view in itertools.chain(*views)])
    return found


def through(rank, world, route, nonfinite="propagate", device="cpu"):
    """Two steps, then two with the gradients of a third; what they leave, from the second on, and of each bucket."""
    params, optimizer = build(route, wholes(device, route), nonfinite=nonfinite)
    seen = []
    for step in range(4):
        if step < 3:
            give(params, route, step)
        optimizer.step()
        seen.append((tensors(params, optimizer), by_bucket(optimizer)))
    return seen[1:]


def struck(rank, world, route, place, fault, hop, nonfinite="propagate", device="cpu"):
    """Two good steps, then two in which the last rank fails at one of the collectives; what was seen."""
    known = KNOWN.get((through, route, nonfinite))
    (now, whole), *expected = known[rank] if known else through(rank, world, route, nonfinite, device)
    params, optimizer = build(route, wholes(device, route), nonfinite=nonfinite)
    for step in range(2):
        count = Faulty("", "", sys.maxsize)
        give(params, route, step)
        optimizer.step()
    collectives = sys.maxsize - count.left
    assert all(map(torch.equal, now, tensors(params, optimizer)))
    give(params, route, 2)
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT_S), group)
    if rank == world - 1:
        Faulty(place, fault, hop)
    seen = {"collectives": collectives, "buckets": [type(r).__name__ for r, _ in optimizer._bound.jobs],
            "messages": [], "seconds": [], "steps": [], "whole": []}
    for new, new_whole in expected:
        message, seconds = fail(optimizer)
        old, now, old_whole, whole = now, tensors(params, optimizer), whole, by_bucket(optimizer)
        seen["whole"] += [{of_which(*three) for three in zip(*bucket)} for bucket in zip(whole, old_whole, new_whole)]
        seen["messages"].append(message)
        seen["seconds"].append(seconds)
        seen["steps"].append({of_which(*three) for three in zip(now, old, new)})
        time.sleep(1.5 * TIMEOUT_S * (fault == "raises" and rank == world - 1))  # it lives on
    return seen


def of_which(now, old, new):
    """The step that a tensor is of; "rows" or "matrices" where each of those is of one step, but not all of the same.
    """
    if torch.equal(now, old) or torch.equal(now, new):
        return "same" if torch.equal(old, new) else "old" if torch.equal(now, old) else "new"
    of_one = ((now == old).flatten(1).all(1) | (now == new).flatten(1).all(1)).all()
    return "torn" if not of_one else "matrices" if now.ndim > 2 else "rows"


def fail(optimizer):
    """(what a step raises, or "", how many seconds it takes)."""
    began, message = time.monotonic(), ""
    try:
        optimizer.step()
    except RuntimeError as error:
        message = str(error)
    return message, time.monotonic() - began


@pytest.mark.parametrize("route", BUCKET_UPDATES)
def test_a_fault_at_every_hop_is_told_and_nothing_goes_on_silently(route, tmp_path, optimizer):
    """The others raise within the timeout and name the bucket, all of which is of the old step or of the new. Each
    route meets every pair of a place, a fault and a hop; each triple of them is met on one route.
    """
    cases = [(struck, route, *case) for case in itertools.product(PLACES, FAULTS, range(len(HOPS)))]
    cases += [(struck, route, *case, "skip") for case in itertools.product(PLACES, FAULTS, (0, len(HOPS)))]
    turn = [*BUCKET_UPDATES].index(route)
    cases = [case for case in cases
             if THOROUGH or turn == (PLACES.index(case[2]) + fault_of(case) + case[4]) % len(BUCKET_UPDATES)]
    cases.sort(key=fault_of, reverse=True)
    first = [(through, route, nonfinite) for nonfinite in ("propagate", "skip")]
    for case, (seen, own) in zip(cases, run_mortal(cases, tmp_path, first=first)):
        hops = [BROKEN, *HOPS] if case[-1] == "skip" else HOPS
        assert seen["buckets"] == [BUCKET_UPDATES[route]] * 3, seen["buckets"]
        check_struck(case, seen, hops, len(hops) - 3)  # two answers on their way, and what is missing
        assert (own is None) == (case[3] == "dies")
        if own is not None:
            check_own(case, own, hops)


def fault_of(case):
    """Its place in FAULTS: the later, the longer the ranks wait, and they are to do so while others still compute."""
    return FAULTS.index(case[3])


def check_struck(case, seen, hops, last):
    """What a rank saw that lives on: it raises in this step or, from collective `last` on, in the next one."""
    _, route, _, _, hop, *_ = case
    told = seen["messages"][0] or seen["messages"][1]
    assert seen["collectives"] == len(hops)
    assert seen["messages"][0] or hop >= last, (case, seen)
    assert any(f"in {label}" in told for label in hops), (case, seen)
    if "in bucket" in told:
        route = {"experts": "exchange"}.get(route, route)
        assert re.search(rf"\({route}; \d+ matrices, the first of parameter #\d+; ranks \d, \d", told), (case, told)
    check_rest(case, seen)


def check_own(case, own, hops):
    """What the rank saw that failed and lives on: its own error, at the very hop."""
    _, _, place, _, hop, *_ = case
    told = own["messages"][0] or own["messages"][1]
    if own["messages"][0] or BROKEN not in told:
        assert f"in {hops[hop]}" in told and "a fault of this rank's own" in told, (case, own)
    assert own["messages"][0] or hop == len(hops) - 1 and place == "after", (case, own)
    check_rest(case, own)


def check_rest(case, seen):
    """No bucket is torn, none changes once a step has failed half-way, and further ones are refused."""
    (first, then), (steps, later) = seen["messages"], seen["steps"]
    assert all(bucket - {"same"} in ({"old"}, {"new"}) for bucket in seen["whole"]), (case, seen)
    of = {"old", "new", "same", {"reduce_elementwise": "rows", "experts": "matrices"}.get(case[1])}
    assert max(seen["seconds"]) < 3 * TIMEOUT_S and steps | later <= of, (case, seen)
    if BROKEN in first:
        assert steps | later <= {"old", "same"} and BROKEN in then, (case, seen)
    elif first:
        assert "failed half-way" in then and "load_state_dict" in then and later <= {"old", "same"}, (case, seen)
    else:
        assert steps <= {"new", "same"}, (case, seen)


def test_a_fault_among_the_ranks_of_an_expert_is_told_on_all(tmp_path, optimizer):
    """EP x FSDP: rank 3 fails; rank 1 shares its experts with it, ranks 0 and 2 hear of it by what all ranks share.

    Each hop meets both faults, one with either value of `nonfinite`.
    """
    own = [f"bucket {number} (" for number in (0, 0, 2, 3, 2, 3)] + [MISSING]  # 1: a pause between ranks of both kinds
    hops, turn = {"propagate": own, "raise": [BROKEN] * 3 + own}, itertools.cycle(PLACES)
    cases = [(struck, "experts", next(turn), fault, hop, nonfinite)
             for nonfinite in hops for fault in ("dies", "raises") for hop in range(len(hops[nonfinite]))
             if THOROUGH or (fault == "dies") == ((hop + (nonfinite == "raise")) % 2 == 0)]
    cases.sort(key=fault_of, reverse=True)
    first = [(through, "experts", nonfinite) for nonfinite in hops]
    for case, (*seen, own) in zip(cases, run_mortal(cases, tmp_path, 4, first)):
        told = hops[case[-1]]
        assert seen[0]["buckets"] == ["ShardedUpdate", "Pause", "ShardedUpdate", "ShardedUpdate"], seen[0]["buckets"]
        for rank, one in enumerate(seen):
            check_struck(case, one, told, len(told) - (3 if rank == 1 else 6))
        if own is not None:
            check_own(case, own, told)


@pytest.mark.gpus(2)
@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_gpus_is_told_where_the_host_waits(fault, tmp_path, optimizer):
    """With TORCH_NCCL_BLOCKING_WAIT=1; without, torch ends the process."""
    cases = [(struck, route, "before", fault, 0, "propagate", "cuda") for route in BUCKET_UPDATES]
    for case, (seen, own) in zip(cases, run_on_gpus(cases, tmp_path)):
        check_struck(case, seen, HOPS, len(HOPS) - 3)
        assert (own is None) == (fault == "dies")
        if own is not None:
            check_own(case, own, HOPS)


def gone(rank, world):
    """Rank 1 dies before the first step, when plans are compared."""
    params, optimizer = build("exchange", wholes())
    give(params, "exchange", 0)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return fail(optimizer)[0], [torch.equal(t, f) for t, f in zip(tensors(params, optimizer)[::3], wholes())]


def test_a_rank_that_is_gone_before_the_first_step(tmp_path, optimizer):
    ((message, _), _), = run_mortal([(gone,)], tmp_path)
    assert "in the comparison of plans of ranks (0, 1)" in message


# the end of a process --------------------------------------------------------------------------------------------

ENDS = """
import atexit
import os
import signal
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])


@atexit.register  # before torch's own, so that it runs last
def leave():
    (folder / f"left{rank}").touch()
    end = time.perf_counter() + 0.5
    while time.perf_counter() < end:  # who wants the interpreter meanwhile still waits for it when that is finalized
        pass


import torch
import torch._dynamo
import torch.distributed as dist
from kernels import get_kernel

ranks = []
for rank in range(2):  # each ends as a process does that was not forked
    ranks.append(os.fork())
    if not ranks[-1]:
        signal.alarm(60)  # it does not outlive its test
        break
else:
    print([os.waitpid(child, 0)[1] for child in ranks], flush=True)
    os._exit(0)


def train():
    param = torch.nn.Parameter(torch.ones(8, 8))
    optimizer = get_kernel("org/optimizer", version=1).Muon([param], process_group=dist.group.WORLD)
    param.grad = torch.ones_like(param)
    optimizer.step()
    if rank == 1:
        compare = optimizer._bound.missing.compare
        optimizer._bound.missing.compare = lambda: (wait(), compare())
    optimizer.step()


def wait():
    time.sleep(1.0)
    assert not (folder / "left0").exists()


sys.setswitchinterval(100.0)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
kept = dist.group.WORLD  # torch keeps it too, once there are DTensors; its threads go on until Python has ended
train()
dist.destroy_process_group()
"""


def test_a_process_ends_while_another_is_still_in_its_last_step(tmp_path, optimizer):
    """It waits until its part of the comparison of missing gradients is sent. Where it did not, gloo's thread let go of
    the comparison last, and torch aborted the process.
    """
    done = subprocess.run([sys.executable, "-c", ENDS, tmp_path], capture_output=True, text=True, timeout=90)
    assert done.stdout == "[0, 0]\n", done.stdout + done.stderr


# restart ---------------------------------------------------------------------------------------------------------

def training(rank, world, route, folder, first, fault):
    """Six steps of a regression with a checkpoint after the second; the losses, from step `first` on."""
    local, losses = part("params.dtensor").local_of, []
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
    """The loss of this step's data, and its gradients as the route wants them, by hand: autograd's threads are not for
    forked processes.
    """
    generator, loss = torch.Generator().manual_seed(step), 0.0
    for p in params:
        W = (p.full_tensor() if route == "exchange" else p).detach()
        x = torch.randn(dist.get_world_size(), 5, W.shape[1], generator=generator)
        errors = x @ W.mT - 1  # (ranks, 5, rows)
        G = 2 / errors[0].numel() * errors.mT @ x
        G = G.mean(0) if route == "exchange" else G[dist.get_rank()]
        p.grad = cut(G, p.device_mesh, p.placements) if route == "exchange" else G
        loss += errors.square().mean().item()
    return loss


def restore(params, optimizer, saved):
    """The weights in place; the state through load_state_dict, in the form in which state_dict gave it."""
    dtensor = part("params.dtensor")
    weights, states = saved
    for p, W, state in zip(params, weights, states):
        dtensor.local_of(p).copy_(W)
        for key in set(state) - {"step"}:
            shape = part("rules.rule").state_shape(p, key)
            if dtensor.is_dtensor(p):
                state[key] = dtensor.as_dtensor(state[key], shape, p.device_mesh, p.placements)
            else:
                state[key] = part("communication.redistribute").by_rows(state[key], shape, dist.group.WORLD)
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
    params = [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(5))]
    muon = optimizer.NorMuon([{"params": params[:1]}, {"params": params[1:], "use_muon": False}])

    def give_all():
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, 1.0 + i)

    give_all()
    muon.step()
    saved, before = copy.deepcopy(muon.state_dict()), [p.detach().clone() for p in params]
    with monkeypatch.context() as patch:
        patch.setattr(
            part("rules.elementwise"), "step", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory"))
        )
        with pytest.raises(torch.OutOfMemoryError, match="in AdamW .*: no memory"):
            muon.step()
    for broken in (muon, pickle.loads(pickle.dumps(muon)), copy.deepcopy(muon)):
        with pytest.raises(RuntimeError, match="failed half-way.*Load a checkpoint.*load_state_dict"):
            broken.step()
    assert muon._half_way
    with pytest.warns(UserWarning, match="failed half-way.*do not save this state") as told:
        muon.state_dict()
    assert told[0].filename == __file__
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


@pytest.mark.parametrize("options", [{}, {"state_dtype": torch.int8}, {"master_weights": "split16"},
                                     {"rounding": "stochastic"}], ids=str)
def test_an_error_while_matrices_are_multiplied_leaves_the_bucket_of_the_old_step(options, optimizer, monkeypatch):
    """Also where nothing travels: the momentum moves with the weight. A checkpoint goes on with the bits."""
    dtype = torch.bfloat16 if {"master_weights", "rounding"} & options.keys() else torch.float32
    params = [nn.Parameter(torch.randn(*shape).to(dtype)) for shape in ((4, 6), (6, 4))]
    muon = optimizer.NorMuon(params, **options)
    for p in params:
        p.grad = torch.randn_like(p)
    muon.step()
    before, saved = tensors(params, muon), copy.deepcopy(muon.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(
            part("newton_schulz.orthogonalize").BoundOrthogonalization, "__call__",
            lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no")),
        )
        with pytest.raises(torch.OutOfMemoryError, match="in bucket"):
            muon.step()
    assert all(map(torch.equal, before, tensors(params, muon)))
    others = [nn.Parameter(p.detach().clone()) for p in params]
    other = optimizer.NorMuon(others, **options)
    for one in (other, muon):
        one.load_state_dict(copy.deepcopy(saved))
    for p, q in zip(params, others):
        q.grad = p.grad
    muon.step()
    other.step()
    after = tensors(params, muon)
    assert all(map(torch.equal, after, tensors(others, other))) and not torch.equal(after[0], before[0])


def test_what_fails_before_anything_has_changed_may_be_tried_again(optimizer):
    param = nn.Parameter(torch.randn(4, 6))
    muon = optimizer.Muon([param])
    param.grad = torch.ones(4, 6).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        muon.step()
    param.grad = torch.ones(4, 6)
    muon.step()


def last_step(rank, world):
    """Three steps, in the last of which rank 1 lacks a gradient and is late; then all leave."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh, full = init_device_mesh("cpu", (world,)), torch.arange(48.0).view(8, 6)
    params = [nn.Parameter(cut(full, mesh, [Shard(0)])) for _ in "12"]
    optimizer = package().Muon([(f"w{i}", p) for i, p in enumerate(params)])
    all_reduce = dist.all_reduce
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = None if (step, rank, i) == (2, 1, 1) else cut(full, mesh, [Shard(0)])
        if step == 2 and rank == 1:
            dist.all_reduce = lambda *args, **options: (time.sleep(TIMEOUT_S), all_reduce(*args, **options))[1]
        optimizer.step()
    dist.destroy_process_group()
    return True


def test_a_rank_that_lacks_a_gradient_in_the_last_step_is_not_left_alone(tmp_path, optimizer):
    """Others left before their part of the comparison was sent: what `_answer` does once a rank is done."""
    assert run_mortal([(last_step,)], tmp_path) == [[True, True]]

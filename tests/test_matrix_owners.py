"""State at the owners of matrices (`state_at_owners`): what is sent, what state dicts hold, how state follows owners.

Bits on every layout are in test_rule_protocol.py, checkpoints that change the layout in test_checkpoint.py, bytes in
test_memory_report.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.ranks import package, part, run_ranks, run_threads
from tests.test_bucket_updates import cut
from tests.test_muon import same

SHAPES = [(12, 8), (7, 10), (8, 12), (4, 6, 5), (33, 7), (16, 16)]
MATRICES = [shape for shape in SHAPES if len(shape) == 2]
AT = {"state_at_owners": True}
V = "second_moment_of_elements"


def by_rows(world, device="cpu", dim=0):
    """A function that cuts a tensor by rows, or along another dim, over all ranks."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh(device, (world,))
    return lambda full: cut(full.to(device), mesh, [Shard(dim)])


def built(place, shapes=SHAPES, rule="adamuon", dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(place(torch.randn(shape, generator=generator).to(dtype))) for shape in shapes]
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    return params, package().Muon(named, lr=0.1, rule=rule, **options)


def train(optimizer, params, place, numbers, missing=(), broken=None):
    """Steps with gradients by number. `missing`: parameters without one. `broken`: one with a NaN."""
    for number in numbers:
        generator = torch.Generator().manual_seed(100 + number)
        for i, p in enumerate(params):
            gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
            if i == broken:
                gradient.view(-1)[0] = torch.nan
            p.grad = None if i in missing else place(gradient)
        with optimizer.last_backward():
            for p in params:
                for hook in (p._post_accumulate_grad_hooks or {}).values():
                    hook(p)
        optimizer.step()


def shown(optimizer, params):
    """Copies of the local tensors of all weights, and of all state as a state dict has it."""
    state = optimizer.state_dict()["state"]
    held = [t for number in sorted(state) for _, t in sorted(state[number].items())]
    found = [part("params.dtensor").local_of(t).clone() for t in (*params, *held)]
    return [t.view(torch.int16) if t.dtype == torch.bfloat16 else t for t in found]  # rests are any bits


def both(place, numbers, options, **gradients):
    """Whether a run with state at owners has the bits of one without; its optimizer and parameters."""
    runs = []
    for more in ({}, AT):
        params, optimizer = built(place, **options, **more)
        train(optimizer, params, place, numbers)
        train(optimizer, params, place, [9], **gradients)
        train(optimizer, params, place, numbers)
        runs.append(shown(optimizer, params))
    return same(*runs), optimizer, params


def owners_of(optimizer, params):
    return [optimizer.state[p]["matrix_owners"].tolist() for p in params]


def sent_and_held(rank, world):
    equal, optimizer, params = both(by_rows(world), range(2), {"shapes": MATRICES})
    plans = [p for bucket, p in optimizer._preparation._plans[False][0].rank_plans if bucket.route == "exchange"]
    ways = [way for plan in plans for way in (plan.inbound, plan.outbound)]
    kinds = {p.kind for way in ways for p in (*way.leave, *way.arrive)}
    jobs = [update for update, _ in optimizer._bound.jobs if update.bucket is not None]
    in_place = sum(p.numel for update in jobs for p in update.in_place)
    held = [optimizer.state[p][V] for p in params]
    return equal, kinds, in_place, sum(p.numel for plan in plans for p in plan.stored if p.kind == V), held


def test_nothing_of_the_state_is_sent_and_kernels_step_it_where_it_lies(optimizer):
    results = run_threads(3, sent_and_held)
    assert all(equal for equal, *_ in results)
    assert all(kinds == {"matrix", "sent:size"} for _, kinds, *_ in results)
    assert all(in_place == owned for _, _, in_place, owned, _ in results)
    assert sum(owned for *_, owned, _ in results) == sum(R * C for R, C in MATRICES)
    assert all(t.ndim == 1 and type(t) is torch.Tensor for *_, held in results for t in held)


WAYS = {
    "a missing gradient": ({}, {"missing": [1, 3]}),
    "skip": ({"nonfinite": "skip"}, {"broken": 2}),
    "during backward": ({"overlap_backward": True}, {}),
    "during forward": ({"overlap_forward": True, "momentum_form": "sum"}, {}),
    "8 bits": ({"state_dtype": torch.int8}, {}),
    "halves": ({"dtype": torch.bfloat16, "master_weights": "split16", "decay": "initial"}, {"missing": [0]}),
    "many buckets": ({"workspace_bytes": 40_000, "rule": "hyperball"}, {}),
}


def of_ways(rank, world):
    place = by_rows(world)
    found = {way: both(place, [1], options, **gradients)[0] for way, (options, gradients) in WAYS.items()}
    # A gradient that only this rank lacks
    found["lacked by one"] = both(place, [1], {}, missing=[0, 4] if rank else [])[0]
    return found


def test_it_has_the_bits_of_state_beside_weights_in_every_way_to_step(optimizer):
    for found in run_threads(2, of_ways):
        assert [way for way, equal in found.items() if not equal] == []


def on_gpus(rank, world):
    """Launched, captured and replayed, in parts and as a whole; large matrices beside small ones."""
    place, shapes = by_rows(world, "cuda"), [*SHAPES, (512, 384), (256, 1024)]
    ways = {**WAYS, "capturable": ({"capturable": True}, {})}
    ways["many buckets"] = {"workspace_bytes": 9 << 20, "rule": "hyperball"}, {}
    return {way: both(place, range(4), {"shapes": shapes, **options}, **gradients)[0]
            for way, (options, gradients) in ways.items()}


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_and_on_gpus(optimizer):
    for found in run_ranks(2, on_gpus, backend="nccl"):
        assert [way for way, equal in found.items() if not equal] == []


def moves(rank, world):
    """Owners change, state is copied, deleted and created: always with the bits of state beside weights."""
    place, runs, seen = by_rows(world), [], []
    for more in ({}, AT):
        params, optimizer = built(place, **more)
        optimizer.init_state()  # placed like the parameters until the first step
        train(optimizer, params, place, [0])
        results = [shown(optimizer, params)]
        seen.append(owners_of(optimizer, params) if more else None)
        added = nn.Parameter(place(torch.ones(40, 40)))
        optimizer.add_param_group({"params": [("added", added)], "rule": "adamuon"})
        train(optimizer, [*params, added], place, [1])
        seen.append(owners_of(optimizer, params) if more else None)
        for p in params[:2]:
            p.requires_grad_(False)
        for p in params[:2]:
            p.grad = None
        train(optimizer, params[2:], place, [2])
        twin = copy.deepcopy(optimizer)
        copied = [p for group in twin.param_groups for p in group["params"]]
        train(twin, copied[2:-1], place, [3])
        results.append(shown(twin, copied))
        for p in params:
            p.requires_grad_(True)
        optimizer.state[params[4]].clear()
        del optimizer.state[params[5]][V]
        train(optimizer, params, place, [4])
        results.append(shown(optimizer, params))
        # A checkpoint of Muon's rule has no such state
        plain, muon = built(place, rule=None)
        train(muon, plain, place, [5])
        optimizer = built(place, **more)[1]
        optimizer.load_state_dict(muon.state_dict())
        params = optimizer.param_groups[0]["params"]
        train(optimizer, params, place, [6])
        results.append(shown(optimizer, params))
        # The model is sharded otherwise, after the optimizer was built
        by_columns = by_rows(world, dim=1)
        params = [nn.Parameter(by_columns(p.full_tensor())) for p in params]
        optimizer.param_groups[0]["params"] = params
        train(optimizer, params, by_columns, [7])
        results.append(shown(optimizer, params))
        runs.append(results)
    return [same(*pair) for pair in zip(*runs)], seen[2] != seen[3]


def test_state_follows_its_owners(optimizer):
    results = run_threads(3, moves)
    assert all(equal == [True] * 5 for equal, _ in results)
    assert all(moved for _, moved in results)


def plain_now(rank, world):
    """What is told where state cannot follow, and where ranks differ."""
    place = by_rows(world)
    params, optimizer = built(place, [(6, 4), (4, 6)], **AT)
    train(optimizer, params, place, [0])
    saved = copy.deepcopy(optimizer.state_dict())
    whole = [nn.Parameter(torch.ones(p.shape)) for p in params]
    optimizer.param_groups[0]["params"] = whole
    for p in whole:
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError) as told:
        optimizer.step()
    params, optimizer = built(place, [(6, 4), (4, 6)], **AT)
    optimizer.load_state_dict(saved)
    if rank:
        del optimizer.state[params[1]][V]
    with pytest.raises(RuntimeError) as differs:
        train(optimizer, params, place, [1])
    return str(told.value), str(differs.value)


def test_it_is_told_where_state_cannot_go(optimizer):
    for told, differs in run_threads(2, plain_now):
        assert told.startswith(f"{V} of parameter w0 is kept by the owners of its matrices, but the parameter was")
        assert f"{V} of parameter w1 is at other places on some ranks of its mesh: load the state on all" in differs


def lone_call(rank, world):
    place = by_rows(world)
    params, optimizer = built(place, [(6, 4), (4, 6)], **AT)
    train(optimizer, params, place, [0])
    told = ""
    if rank == 0:
        barrier = part("communication.store_barrier")
        usual, barrier.FIRST_RANK_SECONDS = barrier.FIRST_RANK_SECONDS, 0.3
        with pytest.raises(RuntimeError) as raised:
            optimizer.state_dict()
        told, barrier.FIRST_RANK_SECONDS = str(raised.value), usual
    train(optimizer, params, place, [1])
    return told, len(shown(optimizer, params))


def test_a_rank_that_saves_alone_is_told_and_disturbs_nobody(optimizer):
    (told, count), (_, other) = run_ranks(2, lone_call)
    assert "ranks [0] called state_dict(), but ranks [1] did not within" in told
    assert "Call it on all ranks, or leave out state_at_owners=True" in told
    assert count == other == 6


def test_refusals(optimizer):
    weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match="state_at_owners='yes' is not allowed: it must be True or False"):
        optimizer.Muon([weight], state_at_owners="yes")
    with pytest.raises(ValueError, match="offload_state is not allowed with state_at_owners=True"):
        optimizer.Muon([weight], rule="adamuon", offload_state=True, **AT)
    with pytest.raises(NotImplementedError, match="rule='dion3' selects rows, and their state"):
        optimizer.Muon([weight], rule="dion3", **AT)
    optimizer.Muon([weight], rule="dion2", **AT)  # keeps no state of its own


def test_a_plain_parameter_keeps_its_state(optimizer):
    plain, usual = (nn.Parameter(torch.eye(4, 6)) for _ in range(2))
    runs = optimizer.Muon([plain], rule="adamuon", **AT), optimizer.Muon([usual], rule="adamuon")
    for p, run in zip((plain, usual), runs):
        p.grad = torch.eye(4, 6) + 1
        run.step()
    assert torch.equal(plain, usual) and runs[0].state[plain].keys() == runs[1].state[usual].keys()

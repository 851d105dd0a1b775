"""Every layout takes the very step that one process takes on the full tensors, to the last bit."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import package, part, run_ranks, run_threads
from tests.test_routes import cut

DENSE = [(16, 24), (24, 16), (10, 12), (3, 8), (16, 16), (33, 7), (16, 24), (1, 9)]  # 3 and 1 rows: empty shards
EVEN = [(16, 24), (24, 16), (32, 8), (16, 16)]
EXPERTS = [(8, 6, 10), (8, 10, 6), (8, 5, 3)]
STEPS = 3


def placements_of(layout, world):
    """(mesh shape, placements, shapes) of a layout's name."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    R, S, half = Replicate(), Shard, max(world // 2, 1)
    return {
        "replicated": ((world,), [R], DENSE),
        "fsdp rows": ((world,), [S(0)], DENSE),
        "fsdp columns": ((world,), [S(1)], DENSE),
        "hsdp": ((2, half), [R, S(0)], DENSE),
        "hsdp, many replicas": ((half, 2), [R, S(0)], DENSE),
        "tp columns x fsdp rows": ((2, half), [S(0), S(1)], DENSE),
        "tp rows x fsdp rows, strided": ((2, half), [_StridedShard(0, split_factor=half), S(0)], EVEN),
        "tp rows x fsdp rows, uneven": ((2, half), [_StridedShard(0, split_factor=half), S(0)], [(20, 6), (36, 5)]),
        "rows over both axes": ((2, half), [S(0), S(0)], EVEN),
        "hsdp x tp": ((2, 2, world // 4), [R, S(0), S(1)], DENSE),
        "ep": ((world,), [S(0)], EXPERTS),
        "ep, replicated": ((2, half), [R, S(0)], EXPERTS),
        "ep x fsdp rows": ((2, half), [S(1), S(0)], EXPERTS),
        "ep x fsdp columns": ((half, 2), [S(0), S(2)], EXPERTS),
        "experts, fsdp rows": ((world,), [S(1)], EXPERTS),
    }[layout]


LAYOUTS = ["replicated", "fsdp rows", "fsdp columns", "hsdp", "hsdp, many replicas", "tp columns x fsdp rows",
           "tp rows x fsdp rows, strided", "tp rows x fsdp rows, uneven", "rows over both axes", "hsdp x tp", "ep",
           "ep, replicated", "ep x fsdp rows", "ep x fsdp columns", "experts, fsdp rows"]


def sharded(full, mesh, placements):
    """A DTensor with the values of `full`, cut as the package's own boxes say; torch has to agree."""
    from torch.distributed.tensor import DTensor

    box = part("layout").box_at(mesh.get_coordinate(), full.shape, placements, tuple(mesh.shape))
    local = full[tuple(slice(a, b) for a, b in box)].clone()
    tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
    assert torch.equal(tensor.full_tensor(), full), ("our boxes disagree with torch", placements)
    return tensor


def spread(shape, generator):
    """Random entries whose rows differ in size by a factor of 100, as NorMuon has to see."""
    return torch.randn(shape, generator=generator) * torch.logspace(0, 2, shape[-2])[:, None]


def make(name, params, world, **options):
    """With as little workspace as there may be, so that there are several buckets."""
    group, room = {"params": params}, 16_000 * max(world, 4)
    return getattr(package(), name)([group], lr=0.02, weight_decay=0.1, workspace_bytes=room, **options)


@functools.cache
def alone(name, shapes, options, device):
    """(weights, gradients of each step, weights and state in the end) of a process without others."""
    generator = torch.Generator().manual_seed(0)
    full = [spread(s, generator).to(device) for s in shapes]
    gradients = [[spread(s, generator).to(device) for s in shapes] for _ in range(STEPS)]
    params = [nn.Parameter(f.clone()) for f in full]
    optimizer = make(name, params, 1, **dict(options))
    for step in gradients:
        for p, g in zip(params, step):
            p.grad = g.clone()
        optimizer.step()
    return full, gradients, [{"weight": p.detach(), **optimizer.state[p]} for p in params]


def compare(rank, world, name, layout, options, device="cpu"):
    """Step the same matrices sharded and whole; return the largest difference and how far the weights moved."""
    from torch.distributed.tensor import init_device_mesh

    mesh_shape, placements, shapes = placements_of(layout, world)
    full, gradients, expected = alone(name, tuple(shapes), tuple(options.items()), device)
    mesh = init_device_mesh(device, mesh_shape)
    params = [nn.Parameter(sharded(f, mesh, placements)) for f in full]
    optimizer = make(name, params, world, **options)
    for step in gradients:
        for p, g in zip(params, step):
            p.grad = cut(g, mesh, placements)
        optimizer.step()
    return difference(expected, optimizer, params, full)


def difference(expected, optimizer, params, full):
    """(largest difference of weights and state, smallest largest movement of a weight, names of the routes)."""
    error = 0.0
    for whole, p in zip(expected, params):
        for key, a in whole.items():
            b = p.detach() if key == "weight" else optimizer.state[p][key]
            b = b.full_tensor() if hasattr(b, "full_tensor") else b
            error = max(error, (a - b).abs().max().item() if a.numel() else 0.0)
    moved = min((whole["weight"] - f).abs().max().item() for whole, f in zip(expected, full))
    return error, moved, sorted({type(route).__name__ for route, _ in optimizer._jobs})


@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_is_one_process(layout, name, world):
    for error, moved, _ in run_ranks(world, compare, name, layout, {"wire_dtype": torch.float32}):
        assert error == 0.0
        assert moved > 1e-4


@pytest.mark.parametrize("options", [{}, {"ns_dtype": torch.bfloat16}, {"state_dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("layout", ["fsdp rows", "hsdp", "tp columns x fsdp rows", "ep x fsdp rows"])
def test_a_16_bit_wire_is_part_of_the_rule_on_every_layout(layout, options):
    assert [error for error, _, _ in run_ranks(4, compare, "NorMuon", layout, options)] == [0.0] * 4


@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
@pytest.mark.parametrize("layout", ["replicated", "hsdp", "hsdp, many replicas", "hsdp x tp"])
def test_what_several_ranks_get_leaves_from_one_place(layout, name, optimizer, monkeypatch):
    """As on GPUs; gloo's collectives, of other tests, cannot send one place to several ranks."""
    apart, collective = [], dist.all_to_all

    def send(received, sent, **options):
        apart.append((len({t.data_ptr() for t in sent if t.numel()}), sum(t.numel() > 0 for t in sent)))
        return collective(received, sent, **options)

    monkeypatch.setattr(part("process_groups").Groups, "send_once", lambda groups, device: True)
    monkeypatch.setattr(dist, "all_to_all", send)
    for error, moved, _ in run_threads(8, compare, name, layout, {"wire_dtype": torch.float32}):
        assert error == 0.0
        assert moved > 1e-4
    assert all(places <= peers for places, peers in apart) and any(places < peers for places, peers in apart)


def compare_all(rank, world, name):
    """Every layout that this many ranks have, over both wires: {layout and wire: (error, moved)}."""
    layouts = [layout for layout in LAYOUTS if math.prod(placements_of(layout, world)[0]) == world]
    return {(layout, wire): compare(rank, world, name, layout, {"wire_dtype": wire}, "cuda")[:2]
            for layout in layouts for wire in (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("world", [1, *(pytest.param(n, marks=pytest.mark.gpus(n)) for n in (2, 4))])
@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
@pytest.mark.gpu
def test_sharded_is_one_gpu(name, world):
    for results in run_ranks(world, compare_all, name, backend="nccl", timeout=120):
        assert {key: error for key, (error, _) in results.items() if error} == {}
        assert min(moved for _, moved in results.values()) > 1e-4
        assert len(results) >= 10


def plain(rank, world, name, reduced, options):
    """Plain replicated parameters, matrices and AdamW ones, against one process with the averaged gradients."""
    generator = torch.Generator().manual_seed(1)
    shapes = [*DENSE, *EXPERTS]
    full = [spread(s, generator) for s in shapes]
    rest = [torch.randn(s, generator=generator) for s in [(50, 6), (7,), (), (3, 2, 2), (1, 5)]]

    def build(**more):
        params = [[nn.Parameter(t.clone()) for t in tensors] for tensors in (full, rest)]
        groups = [{"params": params[0]}, {"params": params[1], "use_muon": False, "lr": 0.01, "weight_decay": 0.3}]
        room = 16_000 * max(world, 4)
        optimizer = getattr(package(), name)(groups, lr=0.02, workspace_bytes=room, **options, **more)
        return params[0] + params[1], optimizer

    whole, one = build()
    copied, many = build(process_group=dist.group.WORLD, grads_are_reduced=reduced)
    for _ in range(STEPS):
        for w, c in zip(whole, copied):
            gradients = torch.randn((world, *w.shape), generator=generator)
            w.grad = gradients.double().mean(0).float()
            c.grad = w.grad.clone() if reduced else gradients[rank].clone()
        one.step()
        many.step()
    error = max((w - c).abs().max().item() for w, c in zip(whole, copied))
    moved = min((w - f).abs().max().item() for w, f in zip(whole, full + rest))
    stored = sum(t.numel() for c in copied for key, t in many.state[c].items() if key != "step")
    same = all(torch.equal(flat(copied), other) for other in everybody(copied, world))
    return error, moved, stored, sum(t.numel() for w in whole for k, t in one.state[w].items() if k != "step"), same


def flat(params):
    return torch.cat([p.detach().flatten() for p in params])


def everybody(params, world):
    mine = flat(params)
    theirs = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(theirs, mine)
    return theirs


@pytest.mark.parametrize("world", [1, 4, 8])
@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_ddp_splits_the_work_and_changes_no_bit(name, world):
    for error, moved, stored, whole, same in run_ranks(world, plain, name, True, {"wire_dtype": torch.float32}):
        assert error == 0.0 and same
        assert moved > 1e-4
        assert stored == whole


@pytest.mark.parametrize("world", [1, 4, 8])
@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_unreduced_gradients_are_averaged_and_state_is_owned(name, world):
    results = run_ranks(world, plain, name, False, {"wire_dtype": torch.float32})
    for error, moved, _, _, same in results:
        assert error < 2e-4 and same  # sums in another order, through five steps of a polynomial that amplifies
        assert moved > 1e-4
    assert sum(stored for _, _, stored, _, _ in results) == results[0][3]  # every element of the state is kept once


def missing(rank, world, layout, options):
    """Steps in which gradients are missing: on no rank, on some, on all."""
    from torch.distributed.tensor import init_device_mesh

    mesh_shape, placements, shapes = placements_of(layout, world)
    mesh = init_device_mesh("cpu", mesh_shape)
    generator = torch.Generator().manual_seed(2)
    full = [spread(s, generator) for s in shapes]
    whole = [nn.Parameter(f.clone()) for f in full]
    placed = [nn.Parameter(sharded(f, mesh, placements)) for f in full]
    half = len(full) // 2

    def build(params):
        groups = [{"params": params[:half]}, {"params": params[half:], "use_muon": False}]
        return package().NorMuon(groups, lr=0.02, wire_dtype=torch.float32, workspace_bytes=34_000)

    one, many = build(whole), build(placed)
    for _ in range(6):
        for w, c in zip(whole, placed):
            gradient, has = spread(w.shape, generator), torch.rand(world, generator=generator) < 0.5
            if torch.rand((), generator=generator) < 0.4:
                has[:] = False
            shard = sharded(gradient, mesh, placements)
            if not has[rank]:
                shard._local_tensor.zero_()
            w.grad = shard.full_tensor() if has.any() else None
            c.grad = shard if has[rank] else None
        one.step()
        many.step()
    expected = [{"weight": w.detach(), **one.state[w]} for w in whole]
    return difference(expected, many, placed, full)[0]


@pytest.mark.parametrize("layout", ["fsdp rows", "fsdp columns", "tp columns x fsdp rows", "ep x fsdp rows"])
def test_missing_gradients_count_as_zero_unless_no_rank_has_one(layout):
    assert run_ranks(4, missing, layout, {}) == [0.0] * 4

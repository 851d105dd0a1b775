"""Every layout takes the very step that one process takes on the full tensors, to the last bit."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import THOROUGH, package, part, run_ranks, run_threads
from tests.test_bucket_updates import cut

DENSE = [(16, 24), (24, 16), (10, 12), (3, 8), (16, 16), (33, 7), (16, 24), (1, 9)]  # 3 and 1 rows: empty shards
EVEN = [(16, 24), (24, 16), (32, 8), (16, 16)]
EXPERTS = [(8, 6, 10), (8, 10, 6), (8, 5, 3)]
NAMES = ["Muon", "NorMuon"]
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
    tensor = cut(full, mesh, placements)
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


def cases_of(layout, world, kinds, device="cpu"):
    """{(name, options): what one process has} of a layout's shapes, for `compare`. `kinds`: (name, options)."""
    shapes = tuple(placements_of(layout, world)[2])
    return {(name, tuple(options.items())): alone(name, shapes, tuple(options.items()), device)
            for name, options in kinds}


def compare(rank, world, layout, cases, device="cpu"):
    """Step the same matrices sharded, in each of the cases; by case the largest difference of this rank's part to one
    process, and how far the weights moved.
    """
    from torch.distributed.tensor import init_device_mesh

    mesh_shape, placements, shapes = placements_of(layout, world)
    mesh, results = init_device_mesh(device, mesh_shape), {}
    for (name, options), (full, gradients, expected) in cases.items():
        params = [nn.Parameter((cut if results else sharded)(f, mesh, placements)) for f in full]  # torch agrees, once
        assert [p.shape for p in params] == [torch.Size(shape) for shape in shapes]
        optimizer = make(name, params, world, **dict(options))
        for step in gradients:
            for p, g in zip(params, step):
                p.grad = cut(g, mesh, placements)
            optimizer.step()
        results[name, options] = difference(expected, optimizer, params, full)
    return results


def difference(expected, optimizer, params, full):
    """(largest difference of weights and state on this rank, smallest largest movement of a weight)."""
    error, local_of = 0.0, part("params.dtensor").local_of
    for whole, p in zip(expected, params):
        assert optimizer.state[p].keys() == whole.keys() - {"weight"}
        for key, a in whole.items():
            b = p.detach() if key == "weight" else optimizer.state[p][key]
            assert a.shape == b.shape and a.dtype == b.dtype, key
            if a.ndim:
                assert (b.device_mesh, b.placements) == (p.device_mesh, p.placements), key
                a, b = local_of(cut(a, p.device_mesh, p.placements)), local_of(b)
            assert a.shape == b.shape, key
            error = max(error, (a - b).abs().nan_to_num(math.inf).max().item() if a.numel() else 0.0)
    moved = min((whole["weight"] - f).abs().max().item() for whole, f in zip(expected, full))
    return error, moved


EXACT = [(name, {"wire_dtype": torch.float32}) for name in NAMES]
SHORT = [("NorMuon", options) for options in ({}, {"ns_dtype": torch.bfloat16}, {"state_dtype": torch.bfloat16})]


def assert_exact(everybody, count):
    """What `compare` gave, by rank."""
    for results in everybody:
        assert len(results) == count
        assert {case: error for case, (error, _) in results.items() if error != 0.0} == {}


def assert_moved(everybody):
    for results in everybody:
        assert {case: moved for case, (_, moved) in results.items() if not moved > 1e-4} == {}


@pytest.mark.parametrize("layout, world", [
    (layout, world) for number, layout in enumerate(LAYOUTS) for i, world in enumerate((4, 8))
    if THOROUGH or "many" in layout or number % 2 == i])
def test_sharded_is_one_process(layout, world):
    """In processes; as threads (test_same_bits.py) every layout has every number of ranks."""
    results = run_ranks(world, compare, layout, cases_of(layout, world, EXACT))
    assert_exact(results, len(NAMES))
    assert_moved(results)


@pytest.mark.parametrize("layout", ["fsdp rows", "hsdp", "tp columns x fsdp rows", "ep x fsdp rows"])
def test_a_16_bit_wire_is_part_of_the_rule_on_every_layout(layout):
    assert_exact(run_ranks(4, compare, layout, cases_of(layout, 4, SHORT)), len(SHORT))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["replicated", "hsdp", "hsdp, many replicas", "hsdp x tp"])
def test_what_several_ranks_get_leaves_from_one_place(layout, name, optimizer, monkeypatch):
    """As on GPUs; gloo's collectives, of other tests, cannot send one place to several ranks."""
    apart, collective = [], dist.all_to_all

    def send(received, sent, **options):
        apart.append((len({t.data_ptr() for t in sent if t.numel()}), sum(t.numel() > 0 for t in sent)))
        return collective(received, sent, **options)

    monkeypatch.setattr(part("communication.process_groups").ProcessGroups, "can_send_once", lambda *_: True)
    monkeypatch.setattr(dist, "all_to_all", send)
    results = run_threads(8, compare, layout, cases_of(layout, 8, [(name, {"wire_dtype": torch.float32})]))
    assert_exact(results, 1)
    assert_moved(results)
    assert all(places <= peers for places, peers in apart) and any(places < peers for places, peers in apart)


def compare_all(rank, world, name):
    """Every layout that this many ranks have, over both wires: {layout and wire: (error, moved)}."""
    layouts = [layout for layout in LAYOUTS if math.prod(placements_of(layout, world)[0]) == world]
    kinds = [(name, {"wire_dtype": wire}) for wire in (torch.float32, torch.bfloat16)]
    return {(layout, case): result for layout in layouts for case, result in compare(
        rank, world, layout, cases_of(layout, world, kinds, "cuda"), "cuda").items()}


@pytest.mark.parametrize("world", [1, *(pytest.param(n, marks=pytest.mark.gpus(n)) for n in (2, 4))])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.gpu
def test_sharded_is_one_gpu(name, world):
    for results in run_ranks(world, compare_all, name, backend="nccl", timeout=120):
        assert {key: error for key, (error, _) in results.items() if error} == {}
        assert min(moved for _, moved in results.values()) > 1e-4
        assert len(results) >= 10


@functools.cache
def averaged(name, world):
    """(weights at first, gradients of each step and rank, weights in the end, elements of state) of one process that
    steps matrices and AdamW's parameters with the averaged gradients.
    """
    generator = torch.Generator().manual_seed(1)
    shapes = [*DENSE, *EXPERTS]
    full = [spread(s, generator) for s in shapes]
    full += [torch.randn(s, generator=generator) for s in [(50, 6), (7,), (), (3, 2, 2), (1, 5)]]
    params, one = built(name, full, world, wire_dtype=torch.float32)
    gradients = [[torch.randn((world, *f.shape), generator=generator) for f in full] for _ in range(STEPS)]
    for step in gradients:
        for p, g in zip(params, step):
            p.grad = g.double().mean(0).float()
        one.step()
    return full, gradients, [p.detach() for p in params], sum(map(stored, [one] * len(params), params))


def built(name, full, world, **options):
    """(parameters, optimizer): matrices, and AdamW's, which come last."""
    params, count = [nn.Parameter(t.clone()) for t in full], len(DENSE) + len(EXPERTS)
    rest = {"params": params[count:], "use_muon": False, "lr": 0.01, "weight_decay": 0.3}
    groups, room = [{"params": params[:count]}, rest], 16_000 * max(world, 4)
    return params, getattr(package(), name)(groups, lr=0.02, workspace_bytes=room, **options)


def stored(optimizer, param):
    return sum(t.numel() for key, t in optimizer.state[param].items() if key != "step")


def plain(rank, world, references, reduced):
    """Plain replicated parameters against one process: for each name (difference, movement, elements of state, whether
    all ranks have the same weights).
    """
    results = {}
    for name, (full, gradients, expected, _) in references.items():
        params, many = built(name, full, world, process_group=dist.group.WORLD, grads_are_reduced=reduced,
                             wire_dtype=torch.float32)
        for step in gradients:
            for p, g in zip(params, step):
                p.grad = g.double().mean(0).float() if reduced else g[rank].clone()
            many.step()
        error = max((w - p).abs().max().item() for w, p in zip(expected, params))
        moved = min((w - f).abs().max().item() for w, f in zip(expected, full))
        same = all(torch.equal(flat(params), other) for other in everybody(params, world))
        results[name] = error, moved, sum(map(stored, [many] * len(params), params)), same
    return results


def flat(params):
    return torch.cat([p.detach().flatten() for p in params])


def everybody(params, world):
    mine = flat(params)
    theirs = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(theirs, mine)
    return theirs


@pytest.mark.parametrize("world", [1, 4, 8])
def test_ddp_splits_the_work_and_changes_no_bit(world):
    references = {name: averaged(name, world) for name in NAMES}
    for results in run_ranks(world, plain, references, True):
        for name, (error, moved, elements, same) in results.items():
            assert error == 0.0 and same, name
            assert moved > 1e-4, name
            assert elements == references[name][3], name


@pytest.mark.parametrize("world", [1, 4, 8])
def test_unreduced_gradients_are_averaged_and_state_is_owned(world):
    references = {name: averaged(name, world) for name in NAMES}
    everybodys = run_ranks(world, plain, references, False)
    for name in NAMES:
        results = [results[name] for results in everybodys]
        for error, moved, _, same in results:
            assert error < 2e-4 and same, name  # sums in another order, through five steps that amplify
            assert moved > 1e-4, name
        assert sum(elements for _, _, elements, _ in results) == references[name][3], name  # each is kept once


def scarce(layout, world):
    """Steps in which gradients are missing, on no rank, on some, on all: (weights at first, [(gradient, which ranks
    have one) of each matrix] of each step, weights and state in the end) of one process.
    """
    mesh_shape, placements, shapes = placements_of(layout, world)
    generator, box_at = torch.Generator().manual_seed(2), part("params.layout").box_at
    full, steps = [spread(s, generator) for s in shapes], []
    params = [nn.Parameter(f.clone()) for f in full]
    one = halved(params)
    for _ in range(6):
        steps.append([])
        for p in params:
            gradient, has = spread(p.shape, generator), torch.rand(world, generator=generator) < 0.5
            if torch.rand((), generator=generator) < 0.4:
                has[:] = False
            steps[-1].append((gradient, has))
            p.grad = gradient.clone() if has.any() else None
            for coordinate, there in zip(itertools.product(*map(range, mesh_shape)), has):
                if p.grad is not None and not there:
                    p.grad[tuple(slice(*side) for side in box_at(coordinate, p.shape, placements, mesh_shape))] = 0
        one.step()
    return full, steps, [{"weight": p.detach(), **one.state[p]} for p in params]


def halved(params):
    half = len(params) // 2
    groups = [{"params": params[:half]}, {"params": params[half:], "use_muon": False}]
    return package().NorMuon(groups, lr=0.02, wire_dtype=torch.float32, workspace_bytes=34_000)


def missing(rank, world, layout, full, steps, expected):
    """The largest difference to one process of what this rank has in the end."""
    from torch.distributed.tensor import init_device_mesh

    mesh_shape, placements, _ = placements_of(layout, world)
    mesh = init_device_mesh("cpu", mesh_shape)
    params = [nn.Parameter(sharded(f, mesh, placements)) for f in full]
    many = halved(params)
    for step in steps:
        for p, (gradient, has) in zip(params, step):
            p.grad = cut(gradient, mesh, placements) if has[rank] else None
        many.step()
    return difference(expected, many, params, full)[0]


@pytest.mark.parametrize("layout", ["fsdp rows", "fsdp columns", "tp columns x fsdp rows", "ep x fsdp rows"])
def test_missing_gradients_count_as_zero_unless_no_rank_has_one(layout):
    assert run_ranks(4, missing, layout, *scarce(layout, 4)) == [0.0] * 4

"""One step has one result: for every layout, world size, bucket size, order of parameters and wire, to the last bit."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import package, part, run_ranks, run_threads
from tests.test_bucket_updates import cut
from tests.test_graphs import KINDS, counted, graphs_as
from tests.test_modes import DENSE, EXPERTS, LAYOUTS, placements_of
from tests.test_muon import same

FLAT = ["replicated", "fsdp rows", "fsdp columns", "experts, fsdp rows", "ep"]  # of any number of ranks
WIRES, STEPS, LR = (torch.float32, torch.bfloat16), 2, 0.1
REPLICATED = ["ddp", "ddp, state at owners"]  # plain parameters, and a process group
GROWN = 16  # by how much matrices on GPUs are larger in each of the last two dims


def grown(shapes, device):
    """On GPUs beside each matrix one that takes many tiles."""
    more = [(*s[:-2], GROWN * s[-2], GROWN * s[-1]) for s in shapes]
    return tuple(shapes) if device == "cpu" else (*shapes, *more)


def room_of(many, world, device):
    """`workspace_bytes` for many buckets or for few."""
    return 16_000 * max(world, 4) * (1 if device == "cpu" else GROWN * GROWN) if many else None


@functools.cache
def problem(shapes, device):
    """(weights, gradients of each step) of matrices, and of two parameters for AdamW."""
    generator = torch.Generator().manual_seed(len(shapes))
    fulls = [torch.randn(s, generator=generator).to(device) for s in (*shapes, shapes[0], shapes[-1])]
    steps = STEPS if device == "cpu" else STEPS + 1  # launched, captured, replayed
    return fulls, [[torch.randn(f.shape, generator=generator).to(device) for f in fulls] for _ in range(steps)]


def stepped(shapes, device, wire, place=torch.clone, order=1, room=None, **options):
    """Weights and state after the steps, in the order of the problem."""
    fulls, grads = problem(shapes, device)
    params = [nn.Parameter(place(f)) for f in fulls]
    groups = [{"params": params[:-2][::order]}, {"params": params[-2:][::order], "use_muon": False}]
    optimizer = package().NorMuon(groups[::order], lr=LR, wire_dtype=wire, workspace_bytes=room, **options)
    local_of = part("params.dtensor").local_of
    for step in grads:
        for p, g in zip(params, step):
            if p.grad is None:
                p.grad = place(g)
            else:  # in the same memory; DTensor's own copy_ takes longer than the step
                local_of(p.grad).copy_(local_of(place(g)))
        optimizer.step()
    state = shown_state(optimizer) if options.get("shard_state") else optimizer.state
    return [t for p in params for t in (p.detach(), *(state[p][k] for k in sorted(state[p])))]


def shown_state(optimizer):
    """{parameter: state} as a state dict has it: of what owners keep alone by rows, as DTensors."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {params[i]: state for i, state in optimizer.state_dict()["state"].items()}


def mine(full, like):
    """This rank's rows of a whole tensor, where `like` is a DTensor."""
    if not hasattr(like, "to_local"):
        return full
    rank, rows = dist.get_rank(), full.chunk(dist.get_world_size())
    return rows[rank] if rank < len(rows) else full[:0]


@functools.cache
def expected(shapes, device, wire):
    if device == "cpu":  # whose ranks may be threads, which share the environment
        return stepped(shapes, device, wire)
    with graphs_as("off"):
        return stepped(shapes, device, wire)


def cases_of(world):
    """(layout, many buckets, order of the parameters, wire) for so many ranks."""
    names = LAYOUTS if world >= 4 and world % 2 == 0 else FLAT
    fits = [n for n in names if math.prod(placements_of(n, world)[0]) == world]
    for number, (layout, wire) in enumerate((name, wire) for name in [*fits, *REPLICATED] for wire in WIRES):
        yield layout, (number + world) % 3 != 2, 1 if (number + world) // 2 % 2 else -1, wire


def all_layouts(rank, world):
    """{case: whether this rank has the bits of one process}."""
    meshes = {}
    return {case: has_the_bits_of_one(world, "cpu", meshes, *case) for case in cases_of(world)}


def on_gpus(rank, world, device="cuda", kinds=KINDS):
    """As all_layouts, each case in every kind of step (test_graphs.py) and once more with the other buckets and order.
    Returns {(kind, *case): whether this rank has the bits of one process}, and how many graphs were replayed by kind.
    """
    results, meshes, replays = {}, {}, {}
    for kind in kinds:
        with graphs_as(kind), counted(torch.cuda.CUDAGraph) as seen:
            for layout, many, order, wire in cases_of(world):
                for case in ((layout, many, order, wire), (layout, not many, -order, wire)):
                    results[(kind, *case)] = has_the_bits_of_one(world, device, meshes, *case,
                                                                 capturable=kind == "capturable")
            replays[kind] = len(seen)
    return results, replays


def has_the_bits_of_one(world, device, meshes, layout, many, order, wire, **options):
    """Whether this rank has, after the steps of a case, what one process has. `meshes`: those that are there, by shape,
    for others of that shape.
    """
    from torch.distributed.tensor import init_device_mesh

    local, room = part("params.dtensor").local_of, room_of(many, world, device)
    if layout in REPLICATED:
        shapes, options = grown(DENSE, device), {**options, "shard_state": layout == "ddp, state at owners"}
        ours = stepped(shapes, device, wire, order=order, room=room, process_group=dist.group.WORLD, **options)
        wholes = [mine(full, t) for full, t in zip(expected(shapes, device, wire), ours, strict=True)]
        return same(list(map(local, ours)), wholes)
    mesh_shape, placements, shapes = placements_of(layout, world)
    if mesh_shape not in meshes:
        meshes[mesh_shape] = init_device_mesh(device, mesh_shape)

    def place(full):
        return cut(full, meshes[mesh_shape], placements) if full.ndim else full

    shapes = grown(shapes, device)
    ours = [local(t) for t in stepped(shapes, device, wire, place, order, room, **options)]
    return same(ours, [local(place(t)) for t in expected(shapes, device, wire)])


def warm(device="cpu"):
    """What the ranks compare with, made before they start: threads share it."""
    shapes = {tuple(placements_of(layout, 8)[2]) for layout in LAYOUTS} | {tuple(DENSE), tuple(EXPERTS)}
    for wire in WIRES:
        for s in shapes:
            expected(s, device, wire)


@pytest.mark.parametrize("world", range(1, 9))
def test_every_layout_gives_the_bits_of_one_process(world, optimizer):
    warm()
    for results in run_threads(world, all_layouts, timeout=120):
        assert [case for case, equal in results.items() if not equal] == []
        assert len(results) >= 12


def test_the_matrix_is_large(optimizer):
    layouts = {(world, case[0]) for world in range(1, 9) for case in cases_of(world)}
    cases = [case[1:] for world in range(1, 9) for case in cases_of(world)]
    assert len(layouts) >= 40 and len(cases) >= 120 and len(set(cases)) == 8


@pytest.mark.parametrize("world", [1, *(pytest.param(n, marks=pytest.mark.gpus(n)) for n in (2, 4, 8))])
@pytest.mark.gpu
def test_every_layout_gives_the_bits_of_one_gpu(world, optimizer):
    """84 cases for 1 and 2 GPUs, 204 for 4 and for 8: layouts, wires, buckets, order, graphs or not."""
    for results, replays in run_ranks(world, on_gpus, backend="nccl", timeout=240):
        assert [case for case, equal in results.items() if not equal] == []
        assert len(results) == (204 if world > 2 else 84)
        least = 2 * len(results) // len(KINDS)  # of three steps, the first is launched
        assert replays["off"] == 0 and replays["auto"] >= least and replays["capturable"] >= least


def on_shared_gpus(rank, world):
    """As on_gpus; the ranks share what GPUs there are, over gloo, which no graph of a whole step can hold."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return on_gpus(rank, world, kinds=KINDS[:2])


@pytest.mark.parametrize("world", [3, 8])
@pytest.mark.gpu
def test_ranks_that_share_a_gpu_have_its_bits(world, optimizer):
    for results, replays in run_ranks(world, on_shared_gpus, timeout=400):
        assert [case for case, equal in results.items() if not equal] == []
        assert len(results) == 4 * len(list(cases_of(world))) and replays["auto"] >= len(results)


# unreduced gradients: a bound instead ------------------------------------------------------------------------------

def unreduced(rank, world, device="cpu"):
    """For both wires: (difference to one process relative to the movement, the same between two ways of cutting it
    into buckets, the weights). Of two runs alike, the bits are compared here.
    """
    results = []
    for wire in WIRES:
        runs = []
        for order, many in ((1, True), (-1, False), (1, True)):
            fulls, grads = problem(tuple(DENSE), device)
            noise = [[torch.randn((world, *g.shape), generator=torch.Generator().manual_seed(i + 99 * step)).to(device)
                      for i, g in enumerate(gs)] for step, gs in enumerate(grads)]
            params = [nn.Parameter(f.clone()) for f in fulls]
            groups = [{"params": params[:-2][::order]}, {"params": params[-2:][::order], "use_muon": False}]
            opt = package().NorMuon(groups, lr=LR, wire_dtype=wire, process_group=dist.group.WORLD,
                                    grads_are_reduced=False, workspace_bytes=40_000 * max(4, world) if many else None)
            for step, gs in enumerate(grads):
                for p, g, n in zip(params, gs, noise[step]):
                    p.grad = g + (n - n.mean(0))[rank]
                opt.step()
            runs.append([p.detach() for p in params])
        one = weights_of(expected(tuple(DENSE), device, wire), len(DENSE))
        results.append((*(max((a - b).norm().item() / (b - f).norm().item() for a, b, f in zip(runs[0], other, fulls))
                          for other in (one, runs[1])), [w.cpu() for w in runs[0]]))
        assert same(runs[0], runs[2])
    return results


def weights_of(tensors, matrices):
    """The weights among what `stepped` gives: one of three tensors of a matrix, of four of AdamW's two parameters."""
    return [*tensors[:3 * matrices:3], *tensors[3 * matrices::4]]


@pytest.mark.parametrize("world", [2, 3, 8])
def test_unreduced_gradients_stay_within_a_bound(world, optimizer):
    """The mean is summed in another order; over bf16 it is a mean of rounded gradients. Replicas are alike."""
    warm()
    everybody = run_threads(world, unreduced)
    for (exact, between, weights), (rounded, also, low) in everybody:
        assert exact < 1e-4 and rounded < 0.03  # relative to how far the weights moved
        assert between < 1e-5 and also < 1e-5  # torch.sum's order depends on where in the bucket an element lies
        assert same(weights, everybody[0][0][2]) and same(low, everybody[0][1][2])


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.gpus(n)) for n in (2, 4)])
@pytest.mark.gpu
def test_unreduced_gradients_stay_within_a_bound_on_gpus(world, optimizer):
    """Newton-Schulz takes fp16 there, to which another last bit of the mean may round otherwise."""
    everybody = run_ranks(world, unreduced, "cuda", backend="nccl", timeout=120)
    for results in everybody:
        for (far, between, weights), (_, _, first) in zip(results, everybody[0]):
            assert far < 0.03 and between < 0.03
            assert same(weights, first)


# runs ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("capturable", [False, True])
def test_two_runs_from_one_seed_are_identical(capturable, optimizer, device):
    def run():
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
        groups = optimizer.get_default_muon_param_groups(model)
        muon = optimizer.NorMuon(groups, lr=LR, capturable=capturable)
        for _ in range(5):
            muon.zero_grad()
            model(torch.randn(32, 8, device=device)).square().mean().backward()
            muon.step()
        return [p.detach() for p in model.parameters()]

    assert same(run(), run())


def deterministic(rank, world, device="cpu", **options):
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh(device, (world,))
    return [part("params.dtensor").local_of(t) for t in stepped(
        tuple(DENSE), device, torch.bfloat16, lambda f: cut(f, mesh, [Shard(0)]) if f.ndim else f, nonfinite="skip",
        **options)]


def strictly(function, *args, **options):
    """What a function gives while torch accepts deterministic algorithms only."""
    torch.use_deterministic_algorithms(True)
    try:
        return function(*args, **options)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("world", [1, 4])
def test_deterministic_algorithms_are_honoured(world, optimizer):
    """Nothing that torch knows to be nondeterministic is used, and memory it fills with NaN is not read."""
    usual = run_threads(world, deterministic)
    strict = strictly(run_threads, world, deterministic)
    assert all(same(a, b) for a, b in zip(usual, strict))


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True])
def test_deterministic_algorithms_are_honoured_on_a_gpu(capturable, optimizer, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    what, how = (tuple(DENSE), "cuda", torch.bfloat16), {"nonfinite": "skip", "capturable": capturable}
    assert same(stepped(*what, **how), strictly(stepped, *what, **how))


def strict_ranks(rank, world, capturable, device="cuda"):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        usual = deterministic(rank, world, device, capturable=capturable)
        return same(usual, strictly(deterministic, rank, world, device, capturable=capturable))


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.gpus(n)) for n in (2, 4)])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.gpu
def test_deterministic_algorithms_are_honoured_on_many_gpus(capturable, world, optimizer):
    assert run_ranks(world, strict_ranks, capturable, backend="nccl", timeout=120) == [True] * world

"""Routes on real ranks: what `test_modes` does not mix, and what must not hang, alias or grow."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import muon_before_a_step, package, part, run_ranks, run_threads

EXACT = {"wire_dtype": torch.float32}


def cut(full, mesh, placements):
    """A DTensor of the values of `full`, which every rank has; what DTensor.from_local gives in a third of its time."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    box = part("params.layout").box_at(mesh.get_coordinate(), full.shape, placements, tuple(mesh.shape))
    local = full.detach()[tuple(slice(*side) for side in box)].clone()
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def both(cls, fulls, place, **options):
    """The same parameters whole and placed, and an optimizer for each; `fulls` holds a list for each Muon group."""
    whole = [[nn.Parameter(f.clone()) for f in group] for group in fulls]
    placed = [[nn.Parameter(place(i, j, f)) for j, f in enumerate(group)] for i, group in enumerate(fulls)]
    one, many = (cls([{"params": group} for group in groups], lr=0.1, **EXACT, **options) for groups in (whole, placed))
    return sum(whole, []), sum(placed, []), one, many


def overlapping(rank, world, experts, first, second):
    """Dense matrices of all ranks in two groups, and experts that lie unevenly on pairs of ranks between them."""
    from torch.distributed.tensor import Shard, init_device_mesh

    flat, pairs = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (world // 2, 2))
    generator = torch.Generator().manual_seed(0)
    fulls = [[torch.randn(s, generator=generator) for s in group] for group in ([first, experts], [second] * 3)]

    def place(_, __, full):
        return cut(full, flat, [Shard(0)]) if full.ndim == 2 else cut(full, pairs, [Shard(0), Shard(1)])

    whole, placed, one, many = both(package().NorMuon, fulls, place, workspace_bytes=34_000)
    for _ in range(3):
        for w, p in zip(whole, placed):
            w.grad = torch.randn(w.shape, generator=generator)
            p.grad = place(0, 0, w.grad)
        one.step()
        many.step()
    return max((w - p.full_tensor()).abs().max().item() for w, p in zip(whole, placed))


@pytest.mark.parametrize("case", [((3, 16, 16), (20, 20), (24, 16)), ((1, 16, 16), (8, 8), (24, 16)),
                                  ((1, 8, 8), (24, 16), (24, 16))], ids=["uneven", "large", "small"])
def test_ranks_that_take_part_in_different_buckets_keep_the_order_of_each_group(case, optimizer):
    """A bucket between two others on some ranks only must not let one rank send what another expects later."""
    assert run_ranks(4, overlapping, *case, timeout=20) == [0.0] * 4


def issued(rank, world):
    """Matrices on all ranks, on this rank's row and on its column of a square mesh: the collectives in order."""
    from torch.distributed.tensor import Shard, init_device_mesh

    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    params = [nn.Parameter(cut(torch.ones(shape), mesh, [Shard(0)]))
              for shape in [(8, 6), (6, 8)] for mesh in (square["rows"], flat, square["columns"])]
    # A bucket for each: groups of one eps would be stepped together
    groups = [{"params": [p], "eps": 1e-7 * (i + 1)} for i, p in enumerate(params)]
    stepper, mine = package().Muon(groups), ISSUED[rank]
    for p in params:
        p.grad = torch.ones_like(p)
    stepper.step()
    mine.clear()
    stepper.step()
    return mine


ISSUED = {rank: [] for rank in range(4)}


def test_ranks_issue_the_collectives_of_all_their_groups_in_one_order(optimizer, monkeypatch):
    """NCCL may not get on with collectives of two groups in different orders, even where no rank waits for another."""
    function = dist.all_to_all_single

    def noted(*args, group=None, **kwargs):
        ranks, mine = tuple(dist.get_process_group_ranks(group)), ISSUED[dist.get_rank()]
        mine.append((ranks, sum(other == ranks for other, _ in mine)))
        return function(*args, group=group, **kwargs)

    monkeypatch.setattr(dist, "all_to_all_single", noted)
    orders = run_threads(4, issued)
    assert all(len(set(order)) == 12 for order in orders)
    for first in orders:
        for second in orders:
            assert [c for c in first if c in second] == [c for c in second if c in first]


def lopsided(rank, world):
    """Stacks on the upper and the lower half of the ranks, and one matrix that the even ranks alone have."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    R, cube = Replicate(), init_device_mesh("cpu", (2, 2, 2))
    ways = {(2, 8, 6): [Shard(0), R, Shard(1)], (1, 6, 8): [Shard(1), R, Shard(0)]}
    before = len(dist.distributed_c10d._world.pg_map)
    params = [nn.Parameter(cut(torch.ones(shape), cube, way)) for shape, way in ways.items()]
    stepper = package().Muon(params)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        stepper.step()
        stepper.load_state_dict(stepper.state_dict())
    return len(dist.distributed_c10d._world.pg_map) - before


def test_ranks_in_different_numbers_of_groups_find_each_other(optimizer):
    """Found by test_random: torch names a new group by how many groups a rank has. And none is made twice."""
    assert run_threads(8, lopsided, timeout=20) == [2, 1] * 4


# plain parameters with unreduced gradients -----------------------------------------------------------------------

def unreduced(rank, world, shapes, odd, dtype, grad_dtype, missing):
    """Two steps on `world` ranks and one process: the largest difference relative to the movement, per parameter."""
    generator = torch.Generator().manual_seed(0)
    fulls = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    ours, alone = ([nn.Parameter(in_format(f.clone(), odd)) for f in fulls] for _ in "12")
    options = {"lr": 0.1, "wire_dtype": torch.float32}
    many = package().NorMuon(groups_of(ours), process_group=dist.group.WORLD, grads_are_reduced=False, **options)
    one = package().NorMuon(groups_of(alone), **options)
    for _ in range(2):
        for i, (p, q) in enumerate(zip(ours, alone)):
            grads = torch.randn(world, *p.shape, generator=generator).to(grad_dtype)
            if i in missing and world > 1:
                grads[0] = 0
            if dtype != grad_dtype:
                p.grad_dtype = q.grad_dtype = None
            q.grad = grads.float().mean(0).to(grad_dtype)
            p.grad = None if i in missing and rank == 0 and world > 1 else in_format(grads[rank], odd)
        many.step()
        one.step()
    moved = [(q - f).float().norm().clamp_min(1e-12) for q, f in zip(alone, fulls)]
    return [((p - q).float().norm() / m).item() for p, q, m in zip(ours, alone, moved)]


def in_format(tensor, memory_format):
    return tensor.contiguous(memory_format=memory_format) if tensor.ndim == 4 else tensor


def groups_of(params):
    muon = [p for p in params if p.ndim == 2 and p.numel() > 8]
    rest = [p for p in params if not (p.ndim == 2 and p.numel() > 8)]
    return [group for group in ({"params": muon}, {"params": rest, "use_muon": False}) if group["params"]]


MIXED = [(12, 8), (8, 12), (20, 4), (7,), (), (1, 5), (6, 2, 3, 3)]
CASES = {
    "usual": (MIXED, torch.contiguous_format, torch.float32, torch.float32, ()),
    "channels last": (MIXED, torch.channels_last, torch.float32, torch.float32, ()),
    "no elements": ([(12, 8), (7,), (0, 5), (3, 0)], torch.contiguous_format, torch.float32, torch.float32, ()),
    "bf16": (MIXED, torch.contiguous_format, torch.bfloat16, torch.bfloat16, ()),
    "bf16 with gradients in fp32": (MIXED, torch.contiguous_format, torch.bfloat16, torch.float32, ()),
    "fp32 with gradients in bf16": (MIXED, torch.contiguous_format, torch.float32, torch.bfloat16, ()),
    "missing on one rank": (MIXED, torch.contiguous_format, torch.float32, torch.float32, (0, 3)),
    "missing, gradients in fp32": (MIXED, torch.contiguous_format, torch.bfloat16, torch.float32, (0, 3)),
}


@pytest.mark.parametrize("world, once", [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("case", CASES)
def test_unreduced_gradients(case, world, once, optimizer, monkeypatch):
    """`once`: what several ranks get leaves from one place, as on GPUs."""
    monkeypatch.setattr(part("communication.process_groups").ProcessGroups, "can_send_once", lambda *_: once)
    shapes, odd, dtype, grad_dtype, missing = CASES[case]
    if dtype != grad_dtype and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch ties the gradient's dtype to the parameter's")
    for errors in run_threads(world, unreduced, *CASES[case]):
        assert all(error < (2e-3 if dtype == grad_dtype == torch.float32 else 0.1) for error in errors), errors


# agreement -------------------------------------------------------------------------------------------------------

def disagreeing(rank, world, kind):
    """Ranks whose optimizers differ: they have to say so, not to wait for each other or to mix up bytes."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh, shapes = init_device_mesh("cpu", (world,)), [(8, 6), (6, 8), (12, 4)]
    name, options = "Muon", {}
    if kind == "order" and rank:
        shapes.reverse()
    if kind == "wire_dtype" and rank:
        options["wire_dtype"] = torch.float32
    if kind == "class" and rank:
        name = "NorMuon"
    if kind == "workspace":
        options["workspace_bytes"] = 10_600 if rank else 100_000_000
        shapes *= 4
    dim = rank if kind == "dim" else 0
    params = [nn.Parameter(cut(torch.ones(shape), mesh, [Shard(dim)])) for shape in shapes]
    stepper = getattr(package(), name)(params, **options)
    for p in params:
        p.grad = torch.ones_like(p)
    try:
        stepper.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["order", "wire_dtype", "class", "workspace", "dim"])
def test_ranks_that_planned_differently_say_so(kind, optimizer):
    for message in run_ranks(2, disagreeing, kind, timeout=10):
        assert "different plans" in message and "alike" in message


# exactness, counts and state -------------------------------------------------------------------------------------

def default_wire(rank, world, dim):
    dtensor = part("params.dtensor")
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh, generator = init_device_mesh("cpu", (world,)), torch.Generator().manual_seed(0)
    fulls = [torch.randn(s, generator=generator).to(torch.bfloat16) for s in [(16, 24), (9, 5), (24, 16), (3, 8)]]
    whole, placed = [nn.Parameter(f.clone()) for f in fulls], [nn.Parameter(cut(f, mesh, [Shard(dim)])) for f in fulls]
    one, many = package().NorMuon(whole, lr=0.1), package().NorMuon(placed, lr=0.1)
    for _ in range(3):
        for w, p in zip(whole, placed):
            w.grad = torch.randn(w.shape, generator=generator).to(torch.bfloat16)
            p.grad = cut(w.grad, mesh, [Shard(dim)])
        one.step()
        many.step()
    return all(torch.equal(dtensor.local_of(p), dtensor.local_of(cut(w.detach(), mesh, [Shard(dim)])))
               for w, p in zip(whole, placed))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dim", [0, 1])
def test_with_the_default_wire_too_all_layouts_give_the_same_bits(dim, optimizer):
    """bf16 parameters, bf16 wire: the update is rounded in one process as it is between ranks."""
    assert all(run_threads(4, default_wire, dim))


class Counted:
    """Counts the calls of one collective per thread."""

    def __init__(self, function):
        self.function, self.calls = function, []

    def __call__(self, output, *args, **kwargs):
        self.calls.append(output.numel() * output.itemsize)
        return self.function(output, *args, **kwargs)


def counted_step(rank, world, mode):
    """Two steps; the routes."""
    stepper = stepper_of(world, mode)
    stepper.step()
    stepper.step()
    return [type(route).__name__ for route, _ in stepper._bound.jobs]


def stepper_of(world, mode):
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    mesh, generator = init_device_mesh("cpu", (world,)), torch.Generator().manual_seed(0)
    placements = {"fsdp": [Shard(0)], "replicated": [Replicate()], "ep": [Shard(0)]}.get(mode)
    shapes = [(world, 6, 8), (world, 8, 6)] if mode == "ep" else [(16, 8), (8, 16), (16, 8), (8, 8)]
    fulls = [torch.randn(s, generator=generator) for s in shapes]
    params = [nn.Parameter(cut(f, mesh, placements) if placements else f.clone()) for f in fulls]
    group = dist.group.WORLD if mode in ("ddp", "unreduced") else None
    stepper = package().Muon(params, process_group=group, grads_are_reduced=mode != "unreduced")
    for p in params:
        p.grad = torch.ones_like(p)
    return stepper


@pytest.mark.parametrize(("mode", "route", "per_step"), [
    ("alone", "LocalUpdate", 0), ("ep", "LocalUpdate", 0), ("ddp", "ShardedUpdate", 1),
    ("replicated", "ShardedUpdate", 1),
    ("fsdp", "ShardedUpdate", 2), ("unreduced", "UnreducedUpdate", 2)])
def test_the_number_of_collectives(mode, route, per_step, optimizer, monkeypatch):
    """Nothing travels that is there already: DDP sends answers only, experts nothing, and ask nobody for gradients."""
    exchanges, questions, world = Counted(dist.all_to_all_single), Counted(dist.all_reduce), 4
    monkeypatch.setattr(dist, "all_to_all_single", exchanges)
    monkeypatch.setattr(dist, "all_reduce", questions)
    comparisons = []
    monkeypatch.setattr(dist, "all_gather", lambda *a, f=dist.all_gather, **k: (comparisons.append(a), f(*a, **k)))
    for routes in run_threads(world, counted_step, mode):
        assert set(routes) == {route} and len(routes) == 1
    shares = per_step > 0
    assert len(exchanges.calls) == 2 * world * per_step + world * shares
    assert exchanges.calls[:world] == [4 * world] * world * shares  # of nothing, before all else: pairs get to know
    has_copies = mode in ("ddp", "replicated", "unreduced")
    assert len(questions.calls) == 2 * world * shares + world * has_copies  # the first elements of copies, once
    assert len(comparisons) == world * (shares + (mode == "unreduced"))  # of plans, once; of who has which state


class NoDTensors(TorchDispatchMode):
    """No operation is given a DTensor."""

    def __torch_dispatch__(self, function, types, arguments=(), constants=None):
        from torch.distributed.tensor import DTensor

        assert not any(issubclass(kind, DTensor) for kind in types), f"{function} of a DTensor"
        return function(*arguments, **(constants or {}))


def undispatched(rank, world, mode):
    """A step after the first ones, in which no operation goes through DTensor."""
    stepper = stepper_of(world, mode)
    stepper.step()
    stepper.step()
    with NoDTensors():
        with pytest.raises(AssertionError, match="of a DTensor"):
            stepper.param_groups[0]["params"][0].grad + 1
        stepper.step()
    return True


@pytest.mark.parametrize("mode", ["ep", "replicated", "fsdp"])
def test_a_steady_step_does_not_go_through_dtensor(mode, optimizer):
    assert all(run_ranks(2, undispatched, mode))


def two_groups(rank, world, meshes):
    """The routes of two Muon groups, of matrices on all ranks; or the second one of experts on pairs of them."""
    from torch.distributed.tensor import Shard, init_device_mesh

    flat, pairs = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (world // 2, 2))
    shapes = [(16, 8), (8, 16)] * 4
    params = [[nn.Parameter(cut(torch.ones(s), flat, [Shard(0)])) for s in shapes],
              [nn.Parameter(cut(torch.ones(s), flat, [Shard(0)]) if meshes == "one" else
                            cut(torch.ones(4, *s), pairs, [Shard(0), Shard(1)])) for s in shapes]]
    stepper = package().Muon([{"params": group} for group in params], workspace_bytes=14_400)
    for p in sum(params, []):
        p.grad = torch.ones_like(p)
    stepper.step()
    return [type(route).__name__ for route, _ in stepper._bound.jobs]


@pytest.mark.parametrize(("meshes", "pauses"), [("one", 0), ("two", 1)])
def test_a_pause_only_between_buckets_of_different_ranks(meshes, pauses, optimizer):
    for routes in run_threads(4, two_groups, meshes):
        assert routes.count("Pause") == pauses and routes.count("ShardedUpdate") > 2


def experts_alone(rank, world):
    """Experts by rank, with gradients missing on some ranks, against an optimizer of this rank's own experts."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh, generator = init_device_mesh("cpu", (world,)), torch.Generator().manual_seed(0)
    fulls = [torch.randn(s, generator=generator) for s in [(8, 6, 10), (5, 10, 6)]]
    local, placed = part("params.dtensor").local_of, [nn.Parameter(cut(f, mesh, [Shard(0)])) for f in fulls]
    own = [nn.Parameter(local(p).clone()) for p in placed]
    many, one = package().NorMuon(placed, lr=0.1), package().NorMuon(own, lr=0.1)
    for step in range(6):
        for p, q in zip(placed, own):
            here = cut(torch.randn(p.shape, generator=generator), mesh, [Shard(0)])
            has = step == 0 or torch.rand(world, generator=generator)[rank] < 0.5
            p.grad, q.grad = (here, local(here).clone()) if has else (None, None)
        many.step()
        one.step()
    pairs = [(p, q) for p, q in zip(placed, own)]
    pairs += [(many.state[p][key], one.state[q][key]) for p, q in zip(placed, own) for key in one.state[q]]
    return all(torch.equal(local(a), local(b)) for a, b in pairs)


def test_experts_without_a_gradient_on_their_rank_are_left_alone(optimizer):
    assert all(run_threads(4, experts_alone))


def chunked(rank, world, workspace_bytes):
    """AdamW on unreduced gradients, in buckets of so many bytes, with gradients missing everywhere at times."""
    generator = torch.Generator().manual_seed(0)
    fulls = [torch.randn(s, generator=generator, dtype=d) for s, d in [
        ((50, 6), torch.float32), ((7,), torch.float32), ((), torch.float32), ((9, 4), torch.float64)]]
    params = [nn.Parameter(f.clone()) for f in fulls]
    stepper = package().Muon([{"params": params, "use_muon": False}], lr=0.1, process_group=dist.group.WORLD,
                             grads_are_reduced=False, workspace_bytes=workspace_bytes)
    for step in range(6):
        for p in params:
            grad = torch.randn(world, *p.shape, generator=generator, dtype=p.dtype)[rank]
            p.grad = grad if step in (0, 4, 5) or torch.rand((), generator=generator) < 0.5 else None
        stepper.step()
    return [p.detach() for p in params], sum(
        type(route).__name__ == "UnreducedElementwiseUpdate" for route, _ in stepper._bound.jobs
    )


@pytest.mark.parametrize("world", [1, 3])
def test_the_buckets_of_adamw_change_no_bit(world, optimizer):
    """A parameter may be in several: its steps are counted once."""
    one, many = (run_threads(world, chunked, nbytes) for nbytes in (None, 4000))
    for (whole, few), (pieces, buckets) in zip(one, many):
        assert few == 2 and buckets >= 5
        assert all(map(torch.equal, whole, pieces))


def elementless(rank, world, shapes, options):
    params = [nn.Parameter(torch.ones(s)) for s in shapes]
    stepper = package().Muon([{"params": params, "use_muon": False}], process_group=dist.group.WORLD, **options)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        stepper.step()
    return [stepper.state[p]["step"].item() for p in params]


@pytest.mark.parametrize("options", [{}, {"shard_state": True}, {"grads_are_reduced": False}], ids=str)
@pytest.mark.parametrize("shapes", [[(0, 3), (5, 4), (2, 0), (1, 2)], [(0, 3)]], ids=["among others", "alone"])
def test_what_has_no_elements_counts_its_steps(shapes, options, optimizer):
    """As in one process, so that a checkpoint is the same from every layout."""
    assert run_threads(3, elementless, shapes, options) == [[3.0] * len(shapes)] * 3


def too_small(rank, world):
    params = [nn.Parameter(torch.ones(64, 64)) for _ in range(world)]
    stepper = muon_before_a_step(params, process_group=dist.group.WORLD, workspace_bytes=50_000)
    with pytest.raises(ValueError, match="workspace_bytes=50000 is too small.*one matrix per rank.*takes [0-9]+ bytes"):
        stepper.step()
    return True


def test_a_workspace_that_does_not_hold_one_matrix_per_rank(optimizer):
    assert all(run_threads(4, too_small))


def round_trip(rank, world, mode, copied):
    """Save after two steps, load into a new optimizer, go on: the very bits."""
    import copy

    from torch.distributed.tensor import Shard, init_device_mesh

    mesh, generator = init_device_mesh("cpu", (world,)), torch.Generator().manual_seed(0)
    fulls = [torch.randn(s, generator=generator) for s in [(16, 8), (8, 16), (3, 8), (1, 5), (7,), (4, 2)]]

    def place(full):
        return cut(full, mesh, [Shard(0)]) if mode == "fsdp" else full.clone()

    def build(params):
        groups = [{"params": params[:4]}, {"params": params[4:], "use_muon": False}]
        if mode == "fsdp":
            return package().NorMuon(groups, lr=0.1)
        return package().NorMuon(groups, lr=0.1, process_group=dist.group.WORLD, grads_are_reduced=mode == "reduced")

    first = [nn.Parameter(place(f)) for f in fulls]
    stepper = build(first)
    step_with(stepper, first, place, range(2))
    if copied:
        again, other = copy.deepcopy((first, stepper))
    else:
        again = [nn.Parameter(p.detach().clone()) for p in first]
        other = build(again)
        other.load_state_dict(copy.deepcopy(stepper.state_dict()))
    step_with(stepper, first, place, range(2, 4))
    step_with(other, again, place, range(2, 4))
    local = part("params.dtensor").local_of
    keys = [sorted(stepper.state[p]) for p in first]
    pairs = [(p, q) for p, q in zip(first, again)]
    pairs += [(s, other.state[q][key]) for p, q in zip(first, again) for key, s in stepper.state[p].items()]
    return all(torch.equal(local(a), local(b)) for a, b in pairs), keys


def step_with(stepper, params, place, numbers):
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for p in params:
            p.grad = place(torch.randn(p.shape, generator=generator))
        stepper.step()


@pytest.mark.parametrize("copied", [False, True], ids=["load_state_dict", "deepcopy"])
@pytest.mark.parametrize("mode", ["fsdp", "reduced", "unreduced"])
def test_state_comes_back_on_every_rank(mode, copied, optimizer):
    """Also where nothing is stored, and with the same keys on every rank."""
    results = run_threads(3, round_trip, mode, copied)
    assert all(equal for equal, _ in results)
    assert all(keys == results[0][1] for _, keys in results)


def placed_state(rank, world):
    """State of the first step with lr 0 and zero gradients, as DCP takes it to learn the keys."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh, placements = init_device_mesh("cpu", (2, 2)), [Shard(1), Shard(0)]
    params = [nn.Parameter(cut(torch.ones(shape), mesh, placements)) for shape in [(3, 8), (1, 5), (5, 4, 6), (8, 8)]]
    stepper = package().NorMuon(params, lr=0.0)
    for p in params:
        p.grad = torch.zeros_like(p)
    stepper.step()
    for p in params:
        for key, value in stepper.state[p].items():
            rows = (*p.shape[:-1], 1) if key == "second_moment" else tuple(p.shape)
            assert tuple(value.shape) == rows
            assert value.placements == p.placements and value.device_mesh == p.device_mesh
            assert not value.full_tensor().any()
        assert torch.equal(p.full_tensor(), torch.ones(p.shape))
    return [sorted(stepper.state[p]) for p in params]


def test_state_is_placed_like_its_parameter(optimizer):
    results = run_threads(4, placed_state)
    assert results == [[["momentum_buffer", "second_moment"]] * 4] * 4


def test_steps_leave_no_tensors_behind(optimizer):
    """In the steady state nothing is kept from step to step."""
    import gc

    params = [nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(5))]
    stepper, counts = optimizer.NorMuon([{"params": params[:1]}, {"params": params[1:], "use_muon": False}]), []
    for _ in range(6):
        for p in params:
            p.grad = torch.randn_like(p)
        stepper.step()
        gc.collect()
        counts.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    assert counts[2] == counts[-1]


@pytest.mark.parametrize("use_muon", [True, False])
def test_the_step_keeps_no_gradient_alive(optimizer, use_muon):
    """After zero_grad their memory is the next backward pass's, not the optimizer's until its next step."""
    import weakref

    param = nn.Parameter(torch.randn(12, 8))
    stepper = optimizer.Muon([{"params": [param], "use_muon": use_muon}])
    for _ in range(3):
        param.grad = torch.randn_like(param)
        memory = weakref.ref(param.grad.untyped_storage())
        stepper.step()
        assert memory() is not None
        stepper.zero_grad()
        assert memory() is None

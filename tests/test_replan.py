"""What changes under an optimizer's feet: process groups, meshes, parameters and their memory. State is kept."""

from __future__ import annotations

import gc
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from tests.ranks import package, part, run_ranks, run_threads
from tests.test_bucket_updates import cut
from tests.test_muon import EXACT, copies, same, weights

SHAPES = [(16, 8), (8, 16), (3, 8), (6,), (9, 5)]


def wholes(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(device) for s in SHAPES]


def groups(params):
    return [{"params": params[:3]}, {"params": params[3:], "use_muon": False}]


def build(params, **options):
    return package().NorMuon(groups(params), lr=0.1, **EXACT, **options)


def step(optimizer, params, number, place=torch.clone):
    generator = torch.Generator().manual_seed(100 + number)
    for p in params:
        p.grad = place(torch.randn(p.shape, generator=generator).to(p.device))
    optimizer.step()


def alone(steps, device="cpu"):
    """The weights and state of one process after so many steps."""
    params = [nn.Parameter(f) for f in wholes(device)]
    optimizer = build(params)
    for number in range(steps):
        step(optimizer, params, number)
    return params, [t for p in params for t in optimizer.state[p].values()]


def again(folder, name, rank, world):
    """Another process group in this process, of the same backend."""
    backend = dist.get_backend()
    dist.destroy_process_group()
    if rank < world:
        dist.init_process_group(backend, store=dist.FileStore(f"{folder}/{name}", world), rank=rank, world_size=world)
        part("params.layout")
        from tests.ranks import _forget_meshes
        _forget_meshes()
    return rank < world


def elastic(rank, world, folder, worlds, device="cpu", capturable=False):
    """Replicated parameters: the same optimizer goes on in process groups of other sizes."""
    params = [nn.Parameter(f) for f in wholes(device)]
    optimizer, number = build(params, process_group=dist.group.WORLD, capturable=capturable), 0
    for size in (world, *worlds):
        if number and not again(folder, f"plain{number}", rank, size):
            return None
        for _ in range(2):
            step(optimizer, params, number)
            number += 1
    expected, state = alone(number, device)
    return same(params, expected) and same([t for p in params for t in optimizer.state[p].values()], state)


@pytest.mark.parametrize("worlds", [(4,), (2,), (3, 1)], ids=str)
def test_an_elastic_restart_with_replicas(worlds, tmp_path, optimizer):
    """Also with as many ranks as before: the groups are others."""
    results = run_ranks(4, elastic, str(tmp_path), worlds)
    assert results == [True] * worlds[-1] + [None] * (4 - worlds[-1])


def elastic_shards(rank, world, folder, worlds, device="cpu", capturable=False):
    """Sharded parameters, put anew on the mesh of each process group; their state comes along."""
    from torch.distributed.tensor import Shard, init_device_mesh

    def place(full):
        return cut(full, mesh, [Shard(0)])

    mesh, number = init_device_mesh(device, (world,)), 0
    params = [nn.Parameter(place(f)) for f in wholes(device)]
    optimizer = build(params, capturable=capturable)
    for size in (world, *worlds):
        if number:
            full = [(p.full_tensor(), {k: gathered(v) for k, v in optimizer.state.pop(p).items()}) for p in params]
            if not again(folder, f"shards{number}", rank, size):
                return None
            mesh = init_device_mesh(device, (size,))
            params = [nn.Parameter(place(W.detach())) for W, _ in full]
            for group, new in zip(optimizer.param_groups, (params[:3], params[3:])):
                group["params"] = list(new)
            for p, (_, state) in zip(params, full):
                optimizer.state[p] = {k: place(v) if v.ndim else v for k, v in state.items()}
        for _ in range(2):
            step(optimizer, params, number, place)
            number += 1
    expected, state = alone(number, device)
    return (same([p.full_tensor() for p in params], expected)
            and same([gathered(t) for p in params for t in optimizer.state[p].values()], state))


def gathered(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


@pytest.mark.parametrize("worlds", [(4,), (3, 2)], ids=str)
def test_an_elastic_restart_with_shards(worlds, tmp_path, optimizer):
    results = run_ranks(4, elastic_shards, str(tmp_path), worlds)
    assert results == [True] * worlds[-1] + [None] * (4 - worlds[-1])


@pytest.mark.parametrize(("world", "worlds"), [pytest.param(2, (2, 1), marks=pytest.mark.gpus(2)),
                                              pytest.param(4, (4, 3, 2), marks=pytest.mark.gpus(4))], ids=str)
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("what", [elastic, elastic_shards])
@pytest.mark.gpu
def test_an_elastic_restart_on_gpus(what, capturable, world, worlds, tmp_path, optimizer):
    """Graphs that hold collectives go with the process group."""
    results = run_ranks(world, what, str(tmp_path), worlds, "cuda", capturable, backend="nccl", timeout=120)
    assert results == [True] * worlds[-1] + [None] * (world - worlds[-1])


def another_group(rank, world, folder):
    """A group that is not the default one cannot be found again."""
    params = [nn.Parameter(f) for f in wholes()]
    optimizer = build(params, process_group=dist.new_group([0, 1]))
    step(optimizer, params, 0)
    again(folder, "other", rank, world)
    with pytest.raises(RuntimeError, match="process_group was destroyed.*state_dict"):
        step(optimizer, params, 1)
    other = build(params, process_group=dist.new_group([0, 1]))
    other.load_state_dict(optimizer.state_dict())
    step(other, params, 1)
    return same(params, alone(2)[0])


def test_a_process_group_that_is_gone_is_named(tmp_path, optimizer):
    assert run_ranks(2, another_group, str(tmp_path)) == [True] * 2


def owned_again(rank, world, folder):
    """State that each rank has a part of is saved and loaded in a process group made anew, before any step there."""
    params = [nn.Parameter(f) for f in wholes()]
    optimizer = build(params, process_group=dist.group.WORLD, grads_are_reduced=False)
    step(optimizer, params, 0)
    again(folder, "owned", rank, world)
    optimizer.load_state_dict(optimizer.state_dict())
    step(optimizer, params, 1)
    return same(params, alone(2)[0])


def test_owned_state_outlives_its_process_group(tmp_path, optimizer):
    assert run_ranks(2, owned_again, str(tmp_path)) == [True] * 2


# meshes and parameters -------------------------------------------------------------------------------------------

def remeshed(rank, world, by_hand):
    """The very parameter objects come to lie on another mesh, with other placements; the state `by_hand` too."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    flat, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, 2))
    ways = [(flat, [Shard(0)]), (square, [Shard(0), Shard(1)]), (square, [Replicate(), Shard(0)]), (flat, [Shard(0)])]
    fulls = [f for f in wholes() if f.ndim == 2]
    params = [nn.Parameter(cut(f, *ways[0])) for f in fulls]
    expected = [nn.Parameter(f.clone()) for f in fulls]
    optimizer, other = (package().NorMuon(ps, lr=0.1, **EXACT) for ps in (params, expected))
    for number, (mesh, placements) in enumerate(ways):
        if number:
            move(optimizer, params, other, expected, mesh, placements, by_hand)
        step(optimizer, params, number, lambda g, way=(mesh, placements): cut(g, *way))
        step(other, expected, number)
    local = part("params.dtensor").local_of
    return all(torch.equal(local(p), cut(e.detach(), mesh, placements)._local_tensor) for p, e in zip(params, expected))


def move(optimizer, params, other, expected, mesh, placements, by_hand):
    """Place parameters anew, and state; the values are those of the optimizer that has them whole."""
    for p, whole in zip(params, expected):
        p.grad = None
        torch.utils.swap_tensors(p, nn.Parameter(cut(whole.detach(), mesh, placements)))
        for key, value in other.state[whole].items() if by_hand else ():
            optimizer.state[p][key] = cut(value, mesh, placements)


@pytest.mark.parametrize("by_hand", [False, True])
def test_another_mesh_under_the_same_parameters(by_hand, optimizer):
    assert all(run_threads(4, remeshed, by_hand))


def followed(rank, world, start, end):
    """(bytes of memory that the moved momentum holds, bytes that it needs, whether torch.save takes it)."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    mesh, ways = init_device_mesh("cpu", (world,)), {"rows": [Shard(0)], "columns": [Shard(1)], "copies": [Replicate()]}
    params = [nn.Parameter(cut(torch.ones(8, 6), mesh, ways[start]))]
    optimizer = package().Muon(params)
    step(optimizer, params, 0, lambda g: cut(g, mesh, ways[start]))
    optimizer.param_groups[0]["params"] = params = [nn.Parameter(cut(torch.ones(8, 6), mesh, ways[end]))]
    step(optimizer, params, 1, lambda g: cut(g, mesh, ways[end]))
    local = optimizer.state[params[0]]["momentum_buffer"]._local_tensor
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return local.untyped_storage().nbytes(), local.nbytes, local.is_contiguous() and file.tell() > 0


@pytest.mark.parametrize(("start", "end"), [("rows", "columns"), ("columns", "rows"), ("copies", "rows"),
                                            ("rows", "copies")])
def test_state_that_follows_its_parameter_holds_its_own_part_only(start, end, optimizer):
    """As a view it held all of the gathered tensor on every rank, and torch.save crashed."""
    for held, needed, saved in run_ranks(2, followed, start, end):
        assert held == needed and saved


def swapped(rank, world, by_hand):
    """Accelerate prepares the model after the optimizer, and puts the new parameters into the groups."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    first, expected = [nn.Parameter(f) for f in wholes()], [nn.Parameter(f.clone()) for f in wholes()]
    optimizer, other = build(first), build(expected)
    for steps in (0, 1):
        params = [nn.Parameter(cut(e.detach(), mesh, [Shard(0)])) for e in expected]
        for group, new in zip(optimizer.param_groups, (params[:3], params[3:])):
            group["params"] = list(new)
        if steps and by_hand:
            for p, e in zip(params, expected):
                optimizer.state[p] = {k: cut(v, mesh, [Shard(0)]) if v.ndim else v.clone()
                                      for k, v in other.state[e].items()}
        for number in (2 * steps, 2 * steps + 1):
            step(optimizer, params, number, lambda g: cut(g, mesh, [Shard(0)]))
            step(other, expected, number)
    assert len(optimizer.state_dict()["state"]) == len(optimizer.state) == len(params)
    local = part("params.dtensor").local_of
    return all(torch.equal(local(p), cut(e.detach(), mesh, [Shard(0)])._local_tensor) for p, e in zip(params, expected))


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_swapped_parameter_list(by_hand, optimizer):
    """The state of a parameter goes to the one in its place."""
    assert all(run_threads(4, swapped, by_hand))


def test_a_parameter_of_another_shape_in_the_place_of_one_begins_anew(optimizer):
    params = weights([(8, 6), (6, 8)])
    muon = optimizer.Muon(params)
    step(muon, params, 0)
    kept, momentum = params[1], muon.state[params[1]]["momentum_buffer"].clone()
    muon.param_groups[0]["params"] = now = [nn.Parameter(torch.ones(8, 8)), kept]
    now[0].grad, kept.grad = torch.ones(8, 8), torch.zeros(6, 8)
    muon.step()
    torch.testing.assert_close(muon.state[now[0]]["momentum_buffer"], torch.full((8, 8), 0.05))
    torch.testing.assert_close(muon.state[kept]["momentum_buffer"], 0.95 * momentum)


# memory ----------------------------------------------------------------------------------------------------------

def test_another_shape_under_the_same_parameter(optimizer):
    """Vocabulary resized in place, before there is state of it; the others keep theirs."""
    params = weights([(8, 6), (6, 8)])
    muon = optimizer.Muon(params)
    step(muon, params, 0)
    momentum = muon.state[params[1]]["momentum_buffer"].clone()
    params[0].grad, params[0].data = None, torch.randn(10, 6)
    del muon.state[params[0]]["momentum_buffer"]
    params[0].grad, params[1].grad = torch.ones(10, 6), torch.zeros(6, 8)
    muon.step()
    assert muon.state[params[0]]["momentum_buffer"].shape == (10, 6)
    torch.testing.assert_close(muon.state[params[1]]["momentum_buffer"], 0.95 * momentum)


VIEWS = {
    "transposed weight": lambda p, held: setattr(p, "data", p.data.t()),
    "transposed state": lambda p, held: held.update({key: v.t() for key, v in held.items() if v.ndim}),
    "state in place": lambda p, held: [v.t_() for v in held.values() if v.ndim],
}


@pytest.mark.parametrize("guards", [True, False])
@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("case", VIEWS)
def test_other_strides_at_the_same_address(case, use_muon, guards, optimizer, monkeypatch):
    """Bound views would show other elements; copies elsewhere in memory are bound anew in any case."""
    if not guards:
        monkeypatch.setattr(part("execution.fingerprint"), "TensorGuards", None)
    (param,), (usual,) = both = weights([(6, 6)]), weights([(6, 6)])
    usual.data.copy_(param)
    muon, other = (optimizer.Muon([{"params": params, "use_muon": use_muon}]) for params in both)
    for number in range(4):
        if number == 2:
            VIEWS[case](param, muon.state[param])
            VIEWS[case](usual, other.state[usual])
            for key, value in other.state[usual].items():
                other.state[usual][key] = value.clone(memory_format=torch.contiguous_format)
            usual.data = usual.data.clone(memory_format=torch.contiguous_format)
        param.grad = usual.grad = None
        step(muon, [param], number)
        step(other, [usual], number)
        assert torch.equal(param, usual)


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("rows", [4, 10])
def test_other_rows_at_the_same_address(rows, use_muon, optimizer):
    memory = torch.randn(10, 4)
    param = nn.Parameter(memory[:8])
    muon = optimizer.Muon([{"params": [("w", param)], "use_muon": use_muon}])
    for number in range(2):
        step(muon, [param], number)
    before, param.grad, param.data = memory.clone(), None, memory[:rows]
    for number in range(2):
        with pytest.raises(RuntimeError, match=f"of parameter w has shape .8, 4., .* needs .{rows}, 4."):
            step(muon, [param], number)
    assert torch.equal(memory, before)
    muon.state.clear()
    usual = nn.Parameter(param.detach().clone())
    step(muon, [param], 2)
    step(optimizer.Muon([{"params": [usual], "use_muon": use_muon}]), [usual], 2)
    assert torch.equal(param, usual)


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_gradient_of_before_the_parameter_was_resized(steps, use_muon, optimizer):
    """Parameters in the same memory as before; torch compares shapes only when a gradient is put there."""
    params = weights([(8, 4), (8, 4)])
    muon = optimizer.Muon([{"params": [("a", params[0]), ("b", params[1])], "use_muon": use_muon}])
    for number in range(steps):
        step(muon, params, number)
    before, state = copies(params), [t.clone() for s in muon.state.values() for t in s.values()]
    for p in params:
        p.grad = torch.ones_like(p)
    params[1].grad.data = torch.ones(4, 4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"parameter b of shape \(8, 4\) has a gradient of shape \(4, 4\)"):
            muon.step()
    assert same(before, params) and same(state, [t for s in muon.state.values() for t in s.values()] if state else [])
    step(muon, params, steps)


def turned_shard(rank, world, use_muon):
    """The elements of a DTensor here become a view of the same memory with other strides."""
    mesh, both = init_device_mesh("cpu", (world,)), []
    values = torch.arange(16.0).cos().view(4, 4) + rank
    for _ in range(2):
        param = nn.Parameter(DTensor.from_local(values.clone(), mesh, [Shard(0)]))
        both.append((param, package().Muon([{"params": [param], "use_muon": use_muon}])))
    for number in range(5):
        for (param, muon), form in zip(both, (torch.t, lambda t: t.t().contiguous())):
            if number == 3:
                param._local_tensor.data = form(param._local_tensor.data)
            param.grad = None
            step(muon, [param], number, lambda g: distribute_tensor(g, mesh, [Shard(0)]))
    return torch.equal(*(param.to_local() for param, _ in both))


@pytest.mark.parametrize("use_muon", [True, False])
def test_a_shard_of_other_strides_at_the_same_address(use_muon):
    assert run_threads(2, turned_shard, use_muon) == [True, True]


def shard_of_another_shape(rank, world, steps, use_muon):
    """A DTensor whose gradient says the parameter's shape, and holds less of it here."""
    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(distribute_tensor(w.detach(), mesh, [Shard(0)])) for w in weights([(8, 4), (8, 4)])]
    muon = package().Muon([{"params": [("a", params[0]), ("b", params[1])], "use_muon": use_muon}])
    for number in range(steps):
        step(muon, params, number, lambda g: distribute_tensor(g, mesh, [Shard(0)]))
    before = [p.to_local().clone() for p in params]
    for p, rows in zip(params, (8 // world, 8 // world - 1)):
        p.grad = DTensor.from_local(torch.ones(rows, 4), mesh, [Shard(0)], run_check=False, shape=p.shape,
                                    stride=p.stride())
    with pytest.raises(RuntimeError, match=r"parameter b of shape \(8, 4\) has a gradient of shape \(3, 4\) on this "
                                           r"rank, but the parameter has shape \(4, 4\)"):
        muon.step()
    assert same(before, [p.to_local() for p in params])
    step(muon, params, steps, lambda g: distribute_tensor(g, mesh, [Shard(0)]))
    return True


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("steps", [0, 2, 4])
def test_a_shard_of_a_gradient_of_another_shape(steps, use_muon):
    assert run_threads(2, shard_of_another_shape, steps, use_muon) == [True, True]


def test_state_of_another_shape_is_named_before_anything_changes(optimizer):
    params = weights([(6, 8), (1, 6)])
    muon = optimizer.NorMuon(params)
    step(muon, params, 0)
    before = copies(params)[:1]
    params[1].grad, params[1].data = None, torch.randn(8, 6)
    params[1].grad = torch.ones(8, 6)
    for _ in "12":
        with pytest.raises(RuntimeError, match=r"momentum_buffer of parameter #1 has shape \(1, 6\), .*needs \(8, 6\)"):
            muon.step()
    assert same(before, params[:1])
    del muon.state[params[1]]
    muon.step()
    assert muon.state[params[1]]["momentum_buffer"].shape == (8, 6)


def mended(rank, world):
    """State of another shape on rank 0, which takes it away and steps again."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(cut(torch.ones(8, 6), mesh, [Shard(0)]))]
    optimizer = package().Muon(params)
    if rank == 0:
        optimizer.state[params[0]]["momentum_buffer"] = torch.zeros(3, 3)
        with pytest.raises(RuntimeError, match="momentum_buffer of parameter #0 has shape"):
            step(optimizer, params, 0, lambda g: cut(g, mesh, [Shard(0)]))
        del optimizer.state[params[0]]
    step(optimizer, params, 0, lambda g: cut(g, mesh, [Shard(0)]))
    return params[0].full_tensor()


def test_who_mends_its_state_can_step_again_with_the_others(optimizer):
    """They wait for its plan, not already in the step."""
    first, second = run_ranks(2, mended, timeout=30)
    assert torch.equal(first, second) and first.std() > 0


def test_a_matrix_that_was_flattened_is_named(optimizer):
    """FSDP1, which wraps the model after the optimizer was built, leaves each rank a part of it as a vector."""
    (param,) = params = weights([(6, 8)])
    muon = optimizer.Muon([("up.weight", param)])
    for _ in range(2):
        step(muon, params, 0)
        param.grad, (whole, param.data) = None, (param.data, torch.randn(48))
        with pytest.raises(ValueError, match=r"parameter up.weight of shape \(48,\) is 1-D; Muon takes matrices"):
            step(muon, params, 1)
        param.grad, param.data = None, whole


def begun_anew(rank, world, replicated, options):
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh, place = init_device_mesh("cpu", (world,)), torch.clone
    if not replicated:
        def place(tensor):
            return cut(tensor, mesh, [Shard(0)])
    options = {**options, "process_group": dist.group.WORLD} if replicated else options
    params, expected = [nn.Parameter(place(f)) for f in wholes()], [nn.Parameter(f) for f in wholes()]
    optimizer, other = build(params, **options), build(expected)
    for number in range(4):
        if number == 2:
            optimizer.state.clear()
            other = build(expected)
        if number == 3:
            del optimizer.state[params[0]], other.state[expected[0]]
            optimizer.state[params[3]].pop("step"), other.state[expected[3]].pop("step")
        step(optimizer, params, number, place)
        step(other, expected, number)
    local = part("params.dtensor").local_of
    return all(torch.equal(local(p), local(place(e.detach()))) for p, e in zip(params, expected))


@pytest.mark.parametrize(("replicated", "options"), [
    (False, {}), (True, {}), (True, {"shard_state": True}), (True, {"grads_are_reduced": False})], ids=str)
def test_state_that_was_taken_away_begins_anew(replicated, options, optimizer):
    """`state.clear()`, as those do who begin anew, and a part of it."""
    world = 1 if "grads_are_reduced" in options else 4
    assert all(run_threads(world, begun_anew, replicated, options))


def test_a_model_that_was_cast_to_what_muon_does_not_step(optimizer):
    model = nn.Linear(8, 6, bias=False)
    muon = optimizer.Muon(model.parameters())
    step(muon, [model.weight], 0)
    model.double().weight.grad = torch.ones(6, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="parameter #0 of shape .* has dtype torch.float64; Muon steps"):
        muon.step()
    model.float()
    step(muon, [model.weight], 1)


@pytest.mark.parametrize("shape", [(64, 64), (64, 128), (96, 512)])
@pytest.mark.parametrize(("first", "then"), [
    (("jordan", 1), ("jordan", 5)), (("jordan", 5), ("cubic", 5)), (("polar_express", 5), ("cubic", 5)),
    (("polar_express", 5), ("polar_express", 8))], ids=str)
def test_other_coefficients_between_steps(first, then, shape, optimizer):
    """They may take another form of the iteration, and with it more memory than was planned."""
    (param,) = weights([shape])
    usual, keys = copies([param])[0], ("ns_coefficients", "ns_steps")
    muon = optimizer.Muon([param], **EXACT, **dict(zip(keys, first)))
    step(muon, [param], 0)
    usual.data.copy_(param.detach())
    other = optimizer.Muon([usual], **EXACT, **dict(zip(keys, then)))
    other.load_state_dict({**other.state_dict(), "state": muon.state_dict()["state"]})
    muon.param_groups[0].update(zip(keys, then))
    for optimizer, p in ((muon, param), (other, usual)):
        step(optimizer, [p], 1)
    assert torch.equal(param, usual)


@pytest.mark.parametrize("part_of_it", ["_bind", "MissingGradients"])
def test_binding_that_failed_is_done_again(part_of_it, optimizer, monkeypatch):
    """Out of memory, say, for gradients of another dtype; with those of before, the step is whole."""
    (param,) = weights([(8, 6)])
    muon, before = optimizer.Muon([param], nonfinite="skip"), param.detach().clone()
    param.grad, module = torch.zeros(8, 6), part("execution.prepare.step")
    muon.param_groups[0]["weight_decay"] = 0.0
    for _ in range(2):  # the second sees the state that the first has made
        muon.step()
    with monkeypatch.context() as patch:
        patch.setattr(module, part_of_it, lambda *_: 1 / 0)
        param.grad = torch.zeros(6, 8).mT
        with pytest.raises(ZeroDivisionError):
            muon.step()
    param.grad = torch.full((8, 6), torch.nan)
    muon.step()
    assert torch.equal(param, before) and int(muon.skipped) == 1


def test_parameters_freed_and_materialized_again(optimizer):
    """Between steps, as FSDP1 and CPU offload do; a step on freed memory is refused."""
    params, usual = weights([(8, 6), (6, 8)]), None
    usual = copies(params)
    muon, other = optimizer.NorMuon(params), optimizer.NorMuon(usual)
    for number in range(3):
        step(muon, params, number)
        step(other, usual, number)
        for p in params:
            value, size = p.detach().clone(), p.untyped_storage().nbytes()
            p.untyped_storage().resize_(0)
            if number == 1 and p is params[1]:
                with pytest.raises(RuntimeError, match="parameter #0 has no memory: it was freed"):
                    p.untyped_storage().resize_(size)
                    p.data.copy_(value)
                    params[0].untyped_storage().resize_(0)
                    muon.step()
                params[0].untyped_storage().resize_(usual[0].untyped_storage().nbytes())
                params[0].data.copy_(usual[0])
                continue
            p.untyped_storage().resize_(size)
            p.data.copy_(value)
    assert same(params, usual)


def test_a_model_that_moves_takes_its_state_along_on_any_machine(optimizer, monkeypatch):
    """To "meta", where everything runs but the iteration; AdamW's count of steps stays on the CPU, as in torch."""
    params = weights([(8, 6), (3, 6, 4), (5,)])
    muon = optimizer.NorMuon([{"params": params[:2]}, {"params": params[2:], "use_muon": False}])
    for number, device in enumerate(("cpu", "cpu", "meta", "meta")):
        for p in params if number == 2 else ():
            monkeypatch.setattr(
                part("newton_schulz.orthogonalize").BoundOrthogonalization, "__call__", lambda *_: None)
            p.grad = None
            torch.utils.swap_tensors(p, nn.Parameter(torch.empty_like(p, device=device)))
        step(muon, params, number)
        places = {(key, t.device.type) for p in params for key, t in muon.state[p].items()}
        assert places == {("step", "cpu"), *((key, device) for key in
                                             ("momentum_buffer", "second_moment", "exp_avg", "exp_avg_sq"))}


@pytest.mark.gpu
def test_a_model_that_moves_to_the_gpu_takes_its_state_along(optimizer):
    results = []
    for before in (0, 2):
        torch.manual_seed(0)
        model = nn.Linear(8, 6)
        muon = optimizer.NorMuon([{"params": [model.weight]}, {"params": [model.bias], "use_muon": False}], **EXACT)
        model.to("cpu" if before else "cuda")
        for number in range(4):
            if number == before:
                model.to("cuda")
            for p, shape in ((model.weight, (6, 8)), (model.bias, (6,))):
                p.grad = torch.full(shape, 1.0 + number, device=p.device) + torch.arange(shape[-1], device=p.device)
            muon.step()
        assert all(t.device == p.device for p in model.parameters() for t in muon.state[p].values())
        results.append([p.detach() for p in model.parameters()])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# unreduced gradients: the owners' state ----------------------------------------------------------------------------

def thawed(rank, world, change):
    """Matrices that are frozen, thawed or added give the others other owners; their bits do not notice."""
    fulls = [torch.randn(s, generator=torch.Generator().manual_seed(i))
             for i, s in enumerate([(40, 30), (20, 16), (16, 20), (8, 12), (9, 7)])]
    results, owners = [], []
    for changed in (False, True):
        params = [nn.Parameter(f.clone()) for f in fulls]
        optimizer = package().NorMuon(params, lr=0.1, process_group=dist.group.WORLD, grads_are_reduced=False)
        for number in range(6):
            if changed and change == "frozen":
                params[0].requires_grad_(number not in (2, 3))
            if changed and change == "added" and number == 2:
                optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(64, 64)))
            generator = torch.Generator().manual_seed(number)
            for p in optimizer.param_groups[0]["params"]:
                p.grad = torch.randn(world, *p.shape, generator=generator)[rank]
            if changed and change == "frozen" and number in (2, 3):
                params[0].grad = None
            optimizer.step()
            owners.append([len(optimizer.state[p]["momentum_buffer"]) > 0 for p in params])
        results.append([p.detach() for p in params])
    stored = sum(t.numel() for p in params for t in optimizer.state[p].values())
    return same(results[0][1:], results[1][1:]), owners, stored


@pytest.mark.parametrize("change", ["frozen", "added"])
def test_state_goes_to_its_new_owner(change, optimizer):
    results = run_threads(3, thawed, change)
    assert all(equal for equal, _, _ in results)
    assert any(len({tuple(row) for row in owners}) > 1 for _, owners, _ in results), "no owner changed: a weak test"
    total = sum(r * c + r for r, c in [(40, 30), (20, 16), (16, 20), (8, 12), (9, 7)])
    assert sum(stored for _, _, stored in results) == total


def lost(rank, world):
    params = [nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(4, 6))]
    optimizer = package().Muon(params, process_group=dist.group.WORLD, grads_are_reduced=False)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p in params:
        optimizer.state[p]["momentum_buffer"] = optimizer.state[p]["momentum_buffer"][:0].clone()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 3))]})
    with pytest.raises(RuntimeError, match=r"hold \[0, 0\] rows of momentum_buffer of parameter #0, which has 6"):
        optimizer.step()
    return True


def test_state_that_is_lost_is_not_taken_for_zeros(optimizer):
    assert all(run_threads(2, lost))


@pytest.mark.parametrize("before", [True, False])
def test_garbage_is_not_collected_while_a_step_is_prepared(before, monkeypatch, optimizer):
    """Also after an error the collector is as it was."""
    seen, module = [], part("execution.prepare.preparation")
    make_plans = module.make_plans

    def planned(*arguments):
        seen.append(gc.isenabled())
        if len(seen) == 1:
            raise RuntimeError("no plan")
        return make_plans(*arguments)

    monkeypatch.setattr(module, "make_plans", planned)
    params = [nn.Parameter(f) for f in wholes()]
    built, was_on = build(params), gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with pytest.raises(RuntimeError, match="no plan"):
            step(built, params, 0)
        assert gc.isenabled() is before
        step(built, params, 0)
        assert gc.isenabled() is before and len(seen) > 1 and not any(seen)
    finally:
        (gc.enable if was_on else gc.disable)()

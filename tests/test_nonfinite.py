"""NaN and Inf in gradients: one matrix is left alone, on every rank and layout, or nothing changes; no host sync."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.paths import quiet, take
from tests.ranks import package, part, run_ranks, run_threads
from tests.test_bucket_updates import cut
from tests.test_modes import DENSE, LAYOUTS, placements_of
from tests.test_muon import EXACT, copies, gradients, same, train, weights

SHAPES = [(12, 7), (7, 12), (3, 6, 4), (5,), (4, 3)]
BAD = [math.nan, math.inf, -math.inf]
NAMES = pytest.mark.parametrize("name", ["Muon", "NorMuon"])


def build(name, params, **options):
    groups = [{"params": params[:3]}, {"params": params[3:], "use_muon": False, "lr": 0.02}]
    return getattr(package(), name)(groups, lr=0.1, **options)


def state_of(optimizer, params):
    return [t for p in params for t in optimizer.state[p].values()]


class Reads(TorchDispatchMode):
    """Notes every operation that makes the host wait for the device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(word in str(function) for word in ("local_scalar_dense", "is_nonzero", "aten.nonzero", "equal")):
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


# the kernel ------------------------------------------------------------------------------------------------------

@pytest.mark.kernels_ci
@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_rectangle_has_its_flag(dtype, device, monkeypatch):
    """Any strides, vectors and rows; a NaN beside a rectangle is not its own, and some rectangles share a flag."""
    take("triton", monkeypatch)
    table, check = part("kernels.elementwise.multi_tensor"), part("kernels.elementwise.nonfinite_check")
    largest = torch.finfo(dtype).max
    G = [torch.full(shape, largest, dtype=dtype, device=device) for shape in ((90, 104), (5000,))]
    places = {  # shape, (gradient, offset, strides), flag
        "transposed": ((7, 40), (0, 0, (1, 104)), 0), "vectors": ((60, 64), (0, 8, (104, 1)), 1),
        "any": ((80, 31), (0, 73, (104, 1)), 2), "row": ((1, 5000), (1, 0, (5000, 1)), 3),
        "empty": ((0, 4), (0, 0, (4, 1)), 4), "shares": ((2, 8), (0, 88 * 104, (104, 1)), 0)}
    sources = [table.Source(tensor, offset, strides) for _, (tensor, offset, strides), _ in places.values()]
    shapes, owners = [shape for shape, _, _ in places.values()], tuple(flag for _, _, flag in places.values())
    flags = torch.tensor([0.0] * 5 + [7.0], device=device)
    bound = check.NonfiniteCheck(shapes, sources, G, table.Skip(flags, owners))
    assert {launch.access for launch in bound.launches} == {table.ELEMENTS, table.VECTORS, table.ROW}

    def found(tensors):
        flags[:5] = 0.0
        bound(torch.tensor([g.data_ptr() for g in tensors], dtype=torch.int64, device=device))
        return flags.tolist()

    assert found(G) == [0.0] * 5 + [7.0]
    torch.manual_seed(0)
    for number, value in itertools.product(range(len(G)), BAD):
        for at in torch.randint(G[number].numel(), (6,)).tolist() + [0, G[number].numel() - 1]:
            tensors = [g.clone() for g in G]
            tensors[number].view(-1)[at] = value
            expected = [0.0] * 5 + [7.0]
            for shape, source, flag in zip(shapes, sources, owners):
                if not source.view(tensors, shape).isfinite().all():
                    expected[flag] = 1.0
            assert found(tensors) == expected


@pytest.mark.interpreter
@pytest.mark.parametrize("split, transposed", [
    ({"heads": 3}, False), ({"heads": 4, "dim": 1}, True), ({"rows": [3, 1], "repeat": 3}, False)], ids=str)
def test_kernel_and_torch_flag_the_same_units(split, transposed, device, monkeypatch):
    """Also of experts: the launches are as many as for one unit."""
    shapes, results, launches = [(12, 8), (2, 12, 8)], [], []
    is_dry = part("kernels.launch.precompile").in_dry_run  # on a GPU, kernels are compiled in a dry run
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        params = [nn.Parameter(torch.ones(shape, device=device)) for shape in shapes]
        groups = [{"params": params, "split": split, "transposed": transposed}]
        optimizer = package().Muon(groups, lr=0.1, nonfinite="skip")
        run = part("kernels.elementwise.multi_tensor").run
        monkeypatch.setattr(part("kernels.elementwise.nonfinite_check"), "run",
                            lambda *given, run=run: (is_dry() or launches.append(given), run(*given)))
        torch.manual_seed(0)
        for step in range(4):
            for p in params:
                p.grad = torch.randn(p.shape, device=device)
                p.grad.view(-1)[torch.randint(p.numel(), (step,))] = BAD[step % 3]
            optimizer.step()
            results.append(optimizer._preparation.bound.nonfinite.flags.tolist())
    assert results[:4] == results[4:] and any(map(sum, results)) and len(launches) == 4


# one process -----------------------------------------------------------------------------------------------------

@pytest.mark.kernels_ci
@NAMES
@pytest.mark.parametrize("broken", [0, 1, 3, 4])
@pytest.mark.parametrize("value", BAD)
def test_skip_leaves_one_parameter_alone(value, broken, name, device):
    """It steps as if it had had no gradient; the others take the very step that they would have taken."""
    params = weights(SHAPES, device)
    grads = gradients(params)
    good, without = ([list(step) for step in grads] for _ in "12")
    grads[1][broken] = grads[1][broken].clone()
    grads[1][broken].view(-1)[-1] = value
    without[1][broken] = None
    results = []
    for steps, options in ((grads, {"nonfinite": "skip"}), (good, {}), (without, {})):
        ours = copies(params)
        optimizer = build(name, ours, **options)
        train(optimizer, ours, steps)
        results.append((ours, state_of(optimizer, ours), optimizer))
    (ours, _, optimizer), (clean, _, _), (left, state, _) = results
    assert [torch.equal(a, b) for a, b in zip(ours, clean)] == [i != broken for i in range(len(params))]
    assert same(ours, left) and same(state_of(optimizer, ours), state)
    assert optimizer.skipped.item() == 1 and optimizer.skipped.device == ours[0].device


@NAMES
def test_skip_knows_the_experts_of_a_stack(name, device):
    params = weights([(2, 3, 6, 4), (3, 4, 6)], device)
    grads = gradients(params, 3)
    clean, ours = copies(params), copies(params)
    train(getattr(package(), name)(clean, lr=0.1), clean, grads)
    for step, places in ((0, [(0, 1, 2)]), (2, [(0, 1, 2), (1, 0)])):
        for index, *place in places:
            grads[step][index][tuple(place)][0, 0] = math.nan
    optimizer = getattr(package(), name)(ours, lr=0.1, nonfinite="skip")
    train(optimizer, ours, grads)
    differs = [(i, at) for i, p in enumerate(ours) for at in itertools.product(*map(range, p.shape[:-2]))
               if not torch.equal(p[at], clean[i][at])]
    assert differs == [(0, (1, 2)), (1, (0,))] and optimizer.skipped.item() == 3
    assert all(t.isfinite().all() for t in [*ours, *state_of(optimizer, ours)])


@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_watching_changes_no_bit(dtype, name, device):
    params = weights(SHAPES, device, dtype)
    grads, results = gradients(params), []
    for mode in ("propagate", "skip", "raise"):
        ours = copies(params)
        results.append(train(build(name, ours, nonfinite=mode), ours, grads))
    assert same(results[0], results[1]) and same(results[0], results[2])


@NAMES
def test_raise_changes_nothing_and_names_the_parameter(name, device):
    params = weights(SHAPES, device)
    grads = gradients(params)
    optimizer = build(name, params, nonfinite="raise")
    train(optimizer, params, grads[:2])
    before = copies(params), [t.clone() for t in state_of(optimizer, params)]
    grads[2][1][0, 0] = math.inf
    with pytest.raises(RuntimeError, match="NaN or Inf in the gradient of #1: no weight and no state has changed"):
        train(optimizer, params, [grads[2]])
    assert same(params, before[0]) and same(state_of(optimizer, params), before[1])
    train(optimizer, params, [grads[3]])
    assert not torch.equal(params[1], before[0][1])


@pytest.mark.parametrize("count, clipped", [(1, False), (6, True)])
def test_raise_points_at_clipping_where_many_gradients_are_broken(count, clipped):
    """clip_grad_norm_ multiplies all gradients by a norm of NaN, so that the names do not lead to the cause."""
    params = [nn.Parameter(torch.randn(4, 3)) for _ in range(6)]
    optimizer = package().Muon(params, nonfinite="raise")
    for param in params:
        param.grad = torch.ones_like(param)
    for param in params[:count]:
        param.grad[0, 0] = math.nan
    with pytest.raises(RuntimeError, match="Look for what caused it") as raised:
        optimizer.step()
    assert ("before gradients are clipped, which spreads it to all" in str(raised.value)) == clipped


def test_a_mode_that_is_not_allowed():
    with pytest.raises(ValueError, match="nonfinite='ignore' is not allowed: it must be one of"):
        package().Muon(weights([(4, 4)]), nonfinite="ignore")


@NAMES
@pytest.mark.parametrize("mode", ["propagate", "skip"])
def test_no_step_makes_the_host_wait(mode, name, device):
    """torch's AdamW of the CPU reads its steps there; the one of GPUs does not."""
    params = weights(SHAPES if device.type == "cuda" else SHAPES[:3], device)
    optimizer = build(name, params, nonfinite=mode) if params[3:] else getattr(package(), name)(params, nonfinite=mode)
    train(optimizer, params, gradients(params, 1))
    with Reads() as reads:
        train(optimizer, params, gradients(params, 1))
    assert reads.found == []
    with Reads() as reads:
        torch.ones(()).item()
    assert reads.found != []


@quiet
@pytest.mark.interpreter
def test_the_kernels_skip_as_the_torch_path_does(monkeypatch, device):
    torch.manual_seed(0)
    params = weights([(12, 7), (7, 12), (2, 5, 3), (6,)], device)
    grads, results = gradients(params, 2), []
    grads[1][0][3, 3] = grads[1][2][1, 0, 0] = math.nan
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        ours = copies(params)
        groups = [{"params": ours[:3]}, {"params": ours[3:], "use_muon": False}]
        optimizer = package().NorMuon(groups, lr=0.1, nonfinite="skip", **EXACT)
        train(optimizer, ours, grads[:1])
        before = copies(ours)
        train(optimizer, ours, grads[1:])
        assert torch.equal(before[0], ours[0]) and torch.equal(before[2][1], ours[2][1])
        assert not torch.equal(before[1], ours[1]) and not torch.equal(before[2][0], ours[2][0])
        results.append([*ours, *state_of(optimizer, ours)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


# many ranks ------------------------------------------------------------------------------------------------------

def broken_steps(world, layout):
    """([full parameters], [[full gradients] of four steps]), some of which have one broken element."""
    *_, shapes = placements_of(layout, world)
    generator, steps = torch.Generator().manual_seed(0), []
    fulls = [torch.randn(s, generator=generator) for s in [*shapes, shapes[0]]]
    for step in range(4):
        steps.append([torch.randn(f.shape, generator=generator) for f in fulls])
        for i, grad in enumerate(steps[-1]):
            if step in (1, 2) and i in (step, len(fulls) - 1):
                grad.view(-1)[step * 5] = math.nan
    return fulls, steps


def stepped(params, steps, name, mode):
    """The optimizer that has taken the steps, and [(step, whether what it raised was right)]."""
    groups = [{"params": params[:-1]}, {"params": params[-1:], "use_muon": False}]
    optimizer, raised = getattr(package(), name)(groups, lr=0.1, nonfinite=mode), []
    for step, grads in enumerate(steps):
        for p, grad in zip(params, grads):
            p.grad = grad
        try:
            optimizer.step()
        except RuntimeError as error:
            raised.append((step, "no weight and no state has changed" in str(error)))
    return optimizer, raised


def skipping(rank, world, layout, name, mode, fulls, steps, whole, one):
    """Steps with one broken element, on the rank that stores it alone: sharded against one process; (equal, count)."""
    from torch.distributed.tensor import init_device_mesh

    shape, placements, _ = placements_of(layout, world)
    mesh = init_device_mesh("cpu", shape)
    placed = [nn.Parameter(cut(f, mesh, placements)) for f in fulls]
    many, raised = stepped(placed, ([cut(g, mesh, placements) for g in grads] for grads in steps), name, mode)
    local, pairs = part("params.dtensor").local_of, [*zip(whole, placed)]
    pairs += [(one.state[w][key], many.state[p][key]) for w, p in zip(whole, placed) for key in one.state[w]]
    same_bits = all(torch.equal(local(cut(a.detach(), mesh, placements)) if a.ndim else a, local(b)) for a, b in pairs)
    return same_bits, many.skipped.item(), raised


def sharded_and_whole(layout, name, mode):
    """([what `skipping` says on eight ranks], how many were skipped in one process, what that one raised)."""
    fulls, steps = broken_steps(8, layout)
    whole = [nn.Parameter(f.clone()) for f in fulls]
    one, raised = stepped(whole, [[g.clone() for g in grads] for grads in steps], name, mode)
    assert all(w.isfinite().all() for w in whole)
    return run_threads(8, skipping, layout, name, mode, fulls, steps, whole, one), one.skipped.item(), raised


@pytest.mark.parametrize("layout, name", [*((layout, "NorMuon") for layout in LAYOUTS),
                                          *((layout, "Muon") for layout in [*LAYOUTS][::4])])
def test_skip_on_every_layout_is_skip_in_one_process(layout, name):
    results, one, _ = sharded_and_whole(layout, name, "skip")
    assert all(equal for equal, _, _ in results)
    assert all(0 < one and (many == one or layout.startswith("ep")) for _, many, _ in results)


@pytest.mark.parametrize("layout", ["fsdp rows", "hsdp x tp", "ep x fsdp rows"])
def test_raise_keeps_every_rank_at_the_old_step(layout):
    """Also where the rank itself saw nothing wrong."""
    results, _, raised = sharded_and_whole(layout, "NorMuon", "raise")
    for equal, _, also in results:
        assert equal and also == raised == [(1, True), (2, True)]


def chained(rank, world, bad, scaler):
    """One parameter lies along x, one along y: no set of ranks has all four. A good step, one that rank `bad` spoils,
    a good one: (whether each changed anything, what the second raised).
    """
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    params = [nn.Parameter(cut(torch.ones(8, 6), mesh[axis], [Shard(0)])) for axis in "xy"]
    optimizer, local = package().NorMuon(params, lr=0.1, nonfinite="raise"), part("params.dtensor").local_of
    changed, said = [], ""
    for step in range(3):
        for p in params:
            p.grad = cut(torch.ones(8, 6), p.device_mesh, [Shard(0)])
        before = [local(t).clone() for t in (*params, *state_of(optimizer, params))]
        if scaler:
            optimizer.found_inf = torch.tensor(float(step == 1 and rank == bad))
        elif step == 1 and rank == bad:
            params[bad % 2].grad.to_local().fill_(math.nan)
        try:
            optimizer.step()
        except RuntimeError as error:
            said = str(error)
        changed.append(not same([local(t) for t in (*params, *state_of(optimizer, params))][:len(before)], before))
    return changed, said


@pytest.mark.parametrize("scaler", [False, True], ids=["raise", "found_inf"])
@pytest.mark.parametrize("bad", range(4))
def test_ranks_that_only_a_chain_of_two_sets_joins_keep_the_step_together(bad, scaler):
    for rank, (changed, said) in enumerate(run_threads(4, chained, bad, scaler)):
        assert changed == [True, False, True]
        assert ("no weight and no state has changed" in said) != scaler
        assert scaler or ("on another rank" in said) == (rank != bad)


def in_a_chain(rank, world, sets, bad):
    """Each set of ranks shares a weight; that of `bad` has a NaN: whether a weight changed, what was raised."""
    groups, weights = [dist.new_group(list(ranks)) for ranks in sets], {}
    for i, ranks in enumerate(sets):
        if rank in ranks:
            weights[i] = nn.Parameter(torch.ones(8, 4))
            weights[i].grad = torch.full((8, 4), math.nan if i == bad else 1.0)
    optimizer = package().Muon([{"params": [p], "process_group": groups[i]} for i, p in sorted(weights.items())],
                               nonfinite="raise")
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    return any(bool((p != 1).any()) for p in weights.values()), str(raised.value)


@pytest.mark.parametrize("bad", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("sets", [[(0, 1), (1, 2), (2, 3), (3, 4)], [(1, 4), (0, 1), (0, 5), (2, 3, 5)],
                                  [(3, 4), (0, 1, 2, 3), (0, 5)]], ids=str)
def test_raise_reaches_the_other_end_of_a_chain_of_sets(sets, bad, optimizer):
    """All ranks compare the sets in one order, large ones first, whatever the order in the chain."""
    for changed, said in run_threads(max(map(max, sets)) + 1, in_a_chain, sets, bad % len(sets)):
        assert not changed and "no weight and no state has changed" in said


def experts_at_home(rank, world, mesh_shape):
    """Experts that are whole on one rank, NaN in one of rank 1's: (whether anything changed, what was raised)."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", mesh_shape)
    param = nn.Parameter(cut(torch.ones(8, 6, 4), mesh, [Shard(0)] * mesh.ndim))
    optimizer, local = package().Muon([param], nonfinite="raise"), part("params.dtensor").local_of
    gradient = torch.ones(8, 6, 4)
    gradient[8 // world] = math.nan
    param.grad = cut(gradient, mesh, param.placements)
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    return bool((local(param) != 1).any() or local(optimizer.state[param]["momentum_buffer"]).any()), str(raised.value)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_raise_holds_where_experts_share_nothing_but_their_mesh(mesh_shape, optimizer):
    """The other ranks stepped."""
    results = run_threads(math.prod(mesh_shape), experts_at_home, mesh_shape)
    assert not any(changed for changed, _ in results)
    assert ["gradient of #0:" in told for _, told in results] == [i == 1 for i in range(len(results))]
    assert all("gradient on another rank:" in told for i, (_, told) in enumerate(results) if i != 1)


def unreduced(rank, world, name, reduced):
    """Plain parameters, one rank's gradient broken: (weights of all steps, the count, AdamW's steps)."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=generator)) for s in [*DENSE[:4], (50, 6), (3,), ()]]
    groups = [{"params": params[:4]}, {"params": params[4:], "use_muon": False}]
    optimizer = getattr(package(), name)(groups, lr=0.1, process_group=dist.group.WORLD, grads_are_reduced=reduced,
                                         nonfinite="skip")
    history = []
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = torch.randn(world, *p.shape, generator=generator)[0 if reduced else rank]
            if step == 1 and i in (1, 4, 5) and rank == 2:
                p.grad.view(-1)[2] = math.inf
        optimizer.step()
        history.append([p.detach().clone() for p in params])
    return history, optimizer.skipped.item(), [optimizer.state[p]["step"].item() for p in params[4:]]


@NAMES
@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "unreduced"])
def test_a_broken_gradient_of_one_replica_counts_on_all(reduced, name):
    """Also on the ranks that, of 3 rows and of a scalar, keep no state but the count of steps."""
    results = run_threads(4, unreduced, name, reduced)
    for history, count, steps in results:
        assert count == 3 and steps == [2, 2, 3]
        for ours, theirs in zip(history, results[0][0]):
            assert same(ours, theirs)
        stays = [torch.equal(a, b) for a, b in zip(history[0], history[1])]
        assert stays == [i in (1, 4, 5) for i in range(7)] and all(p.isfinite().all() for p in history[2])


# GradScaler ------------------------------------------------------------------------------------------------------

def scaled(optimizer, params, grads, scaler, clip):
    """Step with gradients of a scaled loss."""
    for step in grads:
        optimizer.zero_grad()
        loss = sum((p * g).sum() for p, g in zip(params, step))
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler and clip:
            scaler.unscale_(optimizer)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    return params


@NAMES
@pytest.mark.parametrize("clip", [False, True], ids=["as it is", "unscaled before"])
@pytest.mark.parametrize("mode", ["propagate", "skip", "raise"])
def test_a_grad_scaler_changes_no_bit_and_keeps_a_step_with_inf(mode, clip, name, device):
    params = weights(SHAPES, device)
    grads, ours, plain = gradients(params, 5), copies(params), copies(params)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=2)
    optimizer, other = build(name, ours, nonfinite=mode, unscale_in_step=True), build(name, plain)
    assert same(scaled(optimizer, ours, grads[:3], scaler, clip), scaled(other, plain, grads[:3], None, clip))
    assert scaler.get_scale() == 2048.0
    before, state = copies(ours), [t.clone() for t in state_of(optimizer, ours)]
    grads[3][0] = grads[3][0].clone()
    grads[3][0][0, 0] = math.inf
    scaled(optimizer, ours, grads[3:4], scaler, clip)
    assert same(before, ours) and same(state, state_of(optimizer, ours))
    assert scaler.get_scale() == 1024.0 and optimizer.skipped.item() == len(params) + 2
    assert same(scaled(optimizer, ours, grads[4:], scaler, clip), scaled(other, plain, grads[4:], None, clip))
    assert optimizer.found_inf is None if hasattr(optimizer, "found_inf") else True


def scaled_on_ranks(rank, world, mode, in_step):
    """FSDP2-like shards, or plain parameters with gradients of their own per rank; one rank sees Inf."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh, generator = init_device_mesh("cpu", (world,)), torch.Generator().manual_seed(0)
    fulls = [torch.randn(s, generator=generator) for s in [(12, 8), (8, 12), (9, 4), (6,)]]

    def place(full):
        return cut(full, mesh, [Shard(0)]) if mode == "fsdp" else full.clone()

    ways = {"fsdp": {}, "reduced": {"process_group": dist.group.WORLD},
            "unreduced": {"process_group": dist.group.WORLD, "grads_are_reduced": False}}
    optimizers, sets = [], []
    for _ in range(2):
        params = [nn.Parameter(place(f)) for f in fulls]
        groups = [{"params": params[:3]}, {"params": params[3:], "use_muon": False}]
        optimizers.append(package().NorMuon(groups, lr=0.1, unscale_in_step=in_step, **ways[mode]))
        sets.append(params)
    scaler, local, kept = torch.amp.GradScaler("cpu", init_scale=256.0), part("params.dtensor").local_of, []
    for step in range(4):
        scale = scaler.get_scale()
        before = [local(p).clone() for p in sets[0]]
        for i, (p, q) in enumerate(zip(*sets)):
            gradient = torch.randn(world, *fulls[i].shape, generator=generator)[rank if mode == "unreduced" else 0]
            broken = step == 2 and i == 1 and (mode != "unreduced" or rank == 1)
            q.grad, p.grad = place(gradient), place(gradient * scale)
            if broken:
                p.grad = place((gradient * scale).index_fill(0, torch.tensor([0]), math.inf))
        scaler.scale(torch.zeros(()))  # makes the scale, as a loss would
        scaler.step(optimizers[0])
        scaler.update()
        if step != 2:
            optimizers[1].step()
        kept.append(all(torch.equal(local(p), b) for p, b in zip(sets[0], before)))
    return all(torch.equal(local(p), local(q)) for p, q in zip(*sets)), kept, scaler.get_scale()


@pytest.mark.parametrize("in_step", [True, None])
@pytest.mark.parametrize("mode", ["fsdp", "reduced", "unreduced"])
def test_a_grad_scaler_on_many_ranks(mode, in_step, optimizer):
    for rank, (equal, kept, scale) in enumerate(run_ranks(2, scaled_on_ranks, mode, in_step)):
        assert equal and kept == [False, False, True, False]
        assert scale == (256.0 if mode == "unreduced" and rank == 0 else 128.0)  # the scaler's own affair


@NAMES
@pytest.mark.parametrize("mode", ["propagate", "skip", "raise"])
def test_steps_without_any_gradient(mode, name, device):
    """Among steps with some; of a process of its own, which then has nothing to look at."""
    params = weights(SHAPES, device)
    optimizer, grads = build(name, params, nonfinite=mode), gradients(params, 2)
    for step in (None, grads[0], None, grads[1], None):
        before = copies(params)
        for p, g in zip(params, step or [None] * len(params)):
            p.grad = g
        optimizer.step()
        assert same(before, params) == (step is None)


def scaled_on_some(rank, world, reduced):
    """A GradScaler's step where one rank has no gradient, for which torch says found_inf=0, a plain number."""
    params = [nn.Parameter(torch.ones(8, 6)) for _ in "12"]
    optimizer, other = (package().Muon([p], lr=0.1, process_group=dist.group.WORLD, grads_are_reduced=reduced,
                                       wire_dtype=torch.float32, unscale_in_step=True) for p in params)
    scaler, elsewhere = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD([nn.Parameter(torch.ones(3))])
    for step in range(4):
        scaler.scale(torch.zeros(()))
        elsewhere.param_groups[0]["params"][0].grad = torch.ones(3)
        params[0].grad = params[1].grad = None
        if rank == 0 or step == 0:
            gradient = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            params[0].grad, params[1].grad = 8 * gradient, gradient
        for stepped in (elsewhere, optimizer):
            scaler.step(stepped)
        scaler.update()
        other.step()
    return torch.equal(*params)


@pytest.mark.parametrize("reduced", [True, False])
def test_a_grad_scaler_where_a_rank_has_no_gradient(reduced, optimizer):
    assert all(run_ranks(2, scaled_on_some, reduced))


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_the_number_of_a_grad_scaler_under_another_default_device(found, optimizer):
    """`with torch.device("meta")` is how models are built without memory."""
    p = nn.Parameter(torch.ones(8, 6))
    muon = optimizer.Muon([p], lr=0.1)
    p.grad, muon.grad_scale, muon.found_inf = torch.ones(8, 6), torch.ones(()), found
    with torch.device("meta"):
        muon.step()
    assert bool((p == 1).all()) == bool(found)

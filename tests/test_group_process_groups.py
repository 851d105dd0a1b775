"""A process_group of a parameter group: experts that differ by rank beside dense copies, in one optimizer."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import package, run_ranks

DENSE, EXPERTS, BIASES = [(12, 8), (8, 8), (5, 9)], [(3, 6, 8), (10, 4)], [(7,), (4, 3)]
WAYS = {
    "reduced": {},
    "shard_state": {"shard_state": True},
    "unreduced": {"grads_are_reduced": False},
}


def made(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def pairs(rank, world):
    """(process group of this rank and the other one of its pair, its ranks): ranks 0, 1 share experts, and 2, 3 do."""
    groups = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    first = rank - rank % 2
    return groups[rank // 2], (first, first + 1)


class Model:
    """Dense parameters equal on all ranks, and experts equal on the ranks of `expert_ranks`."""

    def __init__(self, expert_ranks):
        self.expert_ranks = expert_ranks
        self.dense, self.dense_biases = made(DENSE, 1), made(BIASES, 2)
        self.experts, self.expert_biases = made(EXPERTS, 10 + expert_ranks[0]), made(BIASES, 20 + expert_ranks[0])

    @property
    def params(self):
        return [*self.dense, *self.dense_biases, *self.experts, *self.expert_biases]

    def groups(self, dense, experts):
        """Groups of the dense parameters and of the experts, with `dense` and `experts` as further keys."""
        return [
            {"params": self.expert_biases, "use_muon": False, **experts},
            {"params": self.dense, **dense},
            {"params": self.experts, "lr": 0.05, **experts},
            {"params": self.dense_biases, "use_muon": False, **dense},
        ]

    def backward(self, step, rank, ranks, reduced):
        """Gradients of one step: of each rank, or their means over the ranks that hold copies."""

        def grads(params, seed, among):
            parts = []
            for r in among:
                generator = torch.Generator().manual_seed(1000 * step + 10 * seed + r)
                parts.append([torch.randn(p.shape, generator=generator) for p in params])
            means = [torch.stack(some).mean(0) for some in zip(*parts)]
            for p, own, mean in zip(params, parts[among.index(rank)], means):
                p.grad = mean.clone() if reduced else own.clone()

        grads([*self.dense, *self.dense_biases], 1, list(ranks))
        grads([*self.experts, *self.expert_biases], 2 + self.expert_ranks[0], list(self.expert_ranks))


def same(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs))


def halves(model, cls, dense_group, expert_group, **options):
    """Two optimizers: what one optimizer with groups of both kinds replaces."""
    groups = model.groups({}, {})
    return (getattr(package(), cls)([groups[1], groups[3]], lr=0.1, process_group=dense_group, **options),
            getattr(package(), cls)([groups[0], groups[2]], lr=0.1, process_group=expert_group, **options))


def as_two_optimizers(rank, world, cls, way, default):
    expert_group, ranks = pairs(rank, world)
    one, two = Model(ranks), Model(ranks)
    wide, experts = dist.group.WORLD, {"process_group": expert_group}
    if default == "dense":
        built = getattr(package(), cls)(one.groups({}, experts), lr=0.1, process_group=wide, **WAYS[way])
    elif default == "experts":
        built = getattr(package(), cls)(one.groups({"process_group": wide}, {}), lr=0.1, process_group=expert_group,
                                        **WAYS[way])
    else:
        built = getattr(package(), cls)(one.groups({"process_group": wide}, experts), lr=0.1, **WAYS[way])
    assert all("process_group" not in group for group in built.param_groups)
    others = halves(two, cls, wide, expert_group, **WAYS[way])
    for step in range(3):
        for model in (one, two):
            model.backward(step, rank, range(world), way != "unreduced")
        for optimizer in (built, *others):
            optimizer.step()
        assert same(one.params, two.params), (step, rank)
    return [p.detach() for p in one.params]


@pytest.mark.parametrize("cls", ["Muon", "NorMuon"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("default", ["dense", "experts", "none"])
def test_the_bits_of_two_optimizers(cls, way, default):
    results = run_ranks(4, as_two_optimizers, cls, way, default)
    count = len(DENSE) + len(BIASES)
    assert all(same(results[0][:count], result[:count]) for result in results)
    assert same(results[0], results[1]) and same(results[2], results[3])
    assert not same(results[0], results[2])


def alone(rank, world, cls, way):
    """Experts that no other rank holds: process_group=None in their groups."""
    one, two = Model((rank,)), Model((rank,))
    built = getattr(package(), cls)(one.groups({}, {"process_group": None}), lr=0.1, process_group=dist.group.WORLD,
                                    **WAYS[way])
    dense, experts = halves(two, cls, dist.group.WORLD, None, **WAYS[way]) if way == "reduced" else (
        halves(two, cls, dist.group.WORLD, dist.group.WORLD, **WAYS[way])[0], halves(two, cls, None, None)[1])
    for step in range(2):
        for model in (one, two):
            model.backward(step, rank, range(world), way != "unreduced")
        for optimizer in (built, dense, experts):
            optimizer.step()
        assert same(one.params, two.params), (step, rank)
    # The whole state of the experts is on this rank, also where owners keep the state of the dense parameters
    for p in one.experts:
        assert built.state[p]["momentum_buffer"].shape == p.shape
    return True


@pytest.mark.parametrize("cls", ["Muon", "NorMuon"])
@pytest.mark.parametrize("way", WAYS)
def test_parameters_of_one_rank(cls, way):
    assert run_ranks(2, alone, cls, way) == [True, True]


def chained(rank, world):
    """Four sets of two ranks in a circle, in a different order of groups on each rank, and a set of all."""
    sets = [(0, 1), (1, 3), (2, 3), (0, 2)]
    groups = {ranks: dist.new_group(list(ranks)) for ranks in sets}
    mine = [ranks for ranks in sets if rank in ranks]
    mine = mine[::-1] if rank in (0, 3) else mine
    steps = {}
    for cls, options in [("Muon", {}), ("Muon", {"shard_state": True}), ("NorMuon", {"grads_are_reduced": False})]:
        params = {ranks: made([(6, 4), (4,)], sum(ranks)) for ranks in mine}
        shared = made([(8, 8), (3,)], 99)
        groups_of = [
            group for ranks in mine
            for group in ({"params": params[ranks][:1], "process_group": groups[ranks]},
                          {"params": params[ranks][1:], "use_muon": False, "process_group": groups[ranks]})
        ]
        groups_of += [{"params": shared[:1]}, {"params": shared[1:], "use_muon": False}]
        optimizer = getattr(package(), cls)(groups_of, lr=0.1, process_group=dist.group.WORLD, **options)
        for step in range(2):
            for p in [*shared, *(p for some in params.values() for p in some)]:
                p.grad = torch.full_like(p, 1.0 + step)
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        for p in [*shared, *(p for some in params.values() for p in some)]:
            p.grad = torch.full_like(p, 3.0)
        optimizer.step()
        steps[(cls, *options)] = {ranks: [p.detach() for p in some] for ranks, some in params.items()}
    return steps


def test_sets_of_ranks_in_a_circle_wait_for_no_one():
    results = run_ranks(4, chained)
    for way in results[0]:
        for ranks in [(0, 1), (1, 3), (2, 3), (0, 2)]:
            first, second = (results[rank][way][ranks] for rank in ranks)
            assert same(first, second)


def on_some_ranks(rank, world, way):
    """Ranks 0 and 1 have experts, rank 2 has none, and none of the groups for them."""
    expert_group = dist.new_group([0, 1])
    runs = []
    for apart in (False, True):
        model = Model((0, 1))
        dense, experts = model.groups({}, {})[1::2], model.groups({}, {})[0::2] if rank < 2 else []
        options = {"lr": 0.1, **WAYS[way]}
        if apart:
            optimizers = [package().NorMuon(dense, process_group=dist.group.WORLD, **options)]
            optimizers += [package().NorMuon(experts, process_group=expert_group, **options)] if experts else []
        else:
            experts = [{**group, "process_group": expert_group} for group in experts]
            optimizers = [package().NorMuon([*experts, *dense], process_group=dist.group.WORLD, **options)]
        for step in range(4):
            model.backward(step, rank % 2, range(2), True)
            for optimizer in optimizers:
                optimizer.step()
                if step == 1:
                    optimizer.load_state_dict(optimizer.state_dict())
        runs.append([p.detach() for p in (model.params if rank < 2 else [*model.dense, *model.dense_biases])])
    assert same(*runs)
    return True


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_without_experts(way):
    assert run_ranks(3, on_some_ranks, way) == [True] * 3


def missing(rank, world):
    """An expert without gradient on one rank or on both of its ranks; a dense parameter likewise."""
    expert_group, ranks = pairs(rank, world)
    found = []
    for way in WAYS:
        one, two = Model(ranks), Model(ranks)
        built = package().Muon(one.groups({}, {"process_group": expert_group}), lr=0.1,
                               process_group=dist.group.WORLD, **WAYS[way])
        others = halves(two, "Muon", dist.group.WORLD, expert_group, **WAYS[way])
        for step in range(3):
            for model in (one, two):
                model.backward(step, rank, range(world), way != "unreduced")
                if step == 1:
                    if rank in (2, 3):  # none of its ranks has it
                        model.experts[1].grad = model.expert_biases[1].grad = None
                    model.dense_biases[0].grad = None
                    # With unreduced gradients a missing one counts as zero, if another rank has it
                    if rank == 0 and way == "unreduced":
                        model.experts[0].grad = model.expert_biases[0].grad = None
                    if rank != 3 and way == "unreduced":
                        model.dense[0].grad = None
            before = [p.detach().clone() for p in (one.experts[1], one.expert_biases[1], one.dense_biases[0])]
            for optimizer in (built, *others):
                optimizer.step()
            assert same(one.params, two.params), (way, step, rank)
            if step == 1:
                after = [one.experts[1], one.expert_biases[1], one.dense_biases[0]]
                assert [torch.equal(a, b) for a, b in zip(before, after)] == [rank > 1, rank > 1, True]
        found.append([p.detach() for p in one.params])
    return found


def test_a_missing_gradient_is_agreed_on_within_its_ranks():
    results = run_ranks(4, missing)
    assert all(same(a, b) for pair in (results[:2], results[2:]) for a, b in zip(*pair))


def nonfinite(rank, world, mode):
    expert_group, ranks = pairs(rank, world)
    model = Model(ranks)
    optimizer = package().Muon(model.groups({}, {"process_group": expert_group}), lr=0.1,
                               process_group=dist.group.WORLD, nonfinite=mode)
    model.backward(0, rank, range(world), True)
    optimizer.step()
    before = [p.detach().clone() for p in model.params]
    model.backward(1, rank, range(world), True)
    if rank == 2:
        model.experts[1].grad[0, 0] = float("nan")
    error = None
    try:
        optimizer.step()
    except RuntimeError as raised:
        error = str(raised)
    kept = [torch.equal(a, b) for a, b in zip(before, model.params)]
    assert all(p.isfinite().all() for p in model.params)
    return kept[len(DENSE) + len(BIASES) + 1], sum(kept), int(optimizer.skipped), error


def test_a_nan_of_an_expert_skips_it_on_its_ranks_only():
    results = run_ranks(4, nonfinite, "skip")
    assert [result[:3] for result in results] == [(False, 0, 0)] * 2 + [(True, 1, 1)] * 2


def test_a_nan_of_an_expert_is_an_error_on_all_ranks():
    results = run_ranks(4, nonfinite, "raise")
    count = len(DENSE) + len(EXPERTS) + 2 * len(BIASES)
    assert [result[1] for result in results] == [count] * 4
    assert all("no weight and no state has changed" in result[3] for result in results)


def saved(rank, world, way):
    """A round trip through state_dict, pickle and a copy, on every rank by itself."""
    expert_group, ranks = pairs(rank, world)

    def build(model):
        return package().NorMuon(model.groups({}, {"process_group": expert_group}), lr=0.1,
                                 process_group=dist.group.WORLD, **WAYS[way])

    one = Model(ranks)
    first = build(one)
    for step in range(2):
        one.backward(step, rank, range(world), way != "unreduced")
        first.step()
    two = Model(ranks)
    for p, other in zip(two.params, one.params):
        p.data.copy_(other.detach())
    second = build(two)
    if way != "reduced":
        with pytest.raises(ValueError, match="to=0 is not allowed where parameter groups have several process groups"):
            first.consolidate_state_dict(to=0)
        sharded = first.state_dict()
        first.consolidate_state_dict(to=None)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert all("process_group" not in group for group in loaded["param_groups"])
    numbers = {p: i for i, p in enumerate(p for group in first.param_groups for p in group["params"])}
    for p in one.experts:  # whole, and this rank's own
        assert loaded["state"][numbers[p]]["momentum_buffer"].shape == p.shape
    second.load_state_dict(loaded)
    models, optimizers = [one, two], [first, second]
    if way != "reduced":  # rows of the state on each rank, which load on all ranks together
        models.append(Model(ranks))
        for p, other in zip(models[2].params, one.params):
            p.data.copy_(other.detach())
        optimizers.append(build(models[2]))
        optimizers[2].load_state_dict(sharded)
    for step in range(2, 4):
        for model, optimizer in zip(models, optimizers):
            model.backward(step, rank, range(world), way != "unreduced")
            optimizer.step()
            assert same(one.params, model.params) or model is one, (step, rank)
    return [p.detach() for p in one.params]


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_of_every_rank(way):
    results = run_ranks(4, saved, way)
    assert same(results[0], results[1]) and not same(results[0], results[2])


def during_backward(rank, world):
    """overlap_backward: ranks send buckets of several sets of ranks while backward runs."""
    expert_group, ranks = pairs(rank, world)
    models = [Model(ranks), Model(ranks)]
    one, two = (
        package().Muon(model.groups({}, {"process_group": expert_group}), lr=0.1, process_group=dist.group.WORLD,
                       grads_are_reduced=False, overlap_backward=overlap)
        for model, overlap in zip(models, (True, False))
    )
    for step in range(4):
        for model, optimizer in zip(models, (one, two)):
            optimizer.zero_grad()
            loss = sum((p * (p + rank + step)).sum() for p in model.params)
            with optimizer.last_backward():
                loss.backward()
            optimizer.step()
        assert same(*(model.params for model in models)), (step, rank)
    return [p.detach() for p in models[0].params]


def test_buckets_of_several_sets_during_backward():
    results = run_ranks(4, during_backward)
    assert same(results[0], results[1]) and not same(results[0], results[2])


class Named(nn.Module):
    """A model whose experts have names that differ between the pairs of ranks, as a checkpoint needs."""

    def __init__(self, model):
        super().__init__()
        self.dense = nn.ParameterList([*model.dense, *model.dense_biases])
        self.add_module(f"experts_{model.expert_ranks[0]}", nn.ParameterList([*model.experts, *model.expert_biases]))


def in_one_checkpoint(rank, world, way, path):
    """torch.distributed.checkpoint, by all ranks together: every pair saves and loads the state of its experts."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    expert_group, ranks = pairs(rank, world)
    runs = []
    for flat in (False, True):
        models, optimizers = [Model(ranks), Model(ranks)], []
        for model in models:
            names = {p: name for name, p in Named(model).named_parameters()}
            groups = model.groups({}, {"process_group": expert_group})
            for group in groups:
                group["params"] = [(names[p], p) for p in group["params"]]
            optimizers.append(package().Muon(groups, lr=0.1, process_group=dist.group.WORLD, **WAYS[way]))
        for step in range(2):
            models[0].backward(step, rank, range(world), way != "unreduced")
            optimizers[0].step()
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        where = f"{path}/{flat}"
        dcp.save({"optim": get_optimizer_state_dict(Named(models[0]), optimizers[0], options=options)},
                 checkpoint_id=where)
        loaded = {"optim": get_optimizer_state_dict(Named(models[1]), optimizers[1], options=options)}
        dcp.load(loaded, checkpoint_id=where)
        set_optimizer_state_dict(Named(models[1]), optimizers[1], loaded["optim"], options=options)
        for p, other in zip(models[1].params, models[0].params):
            p.data.copy_(other.detach())
        for model, optimizer in zip(models, optimizers):
            model.backward(2, rank, range(world), way != "unreduced")
            optimizer.step()
        assert same(models[0].params, models[1].params), (flat, rank)
        runs.append([p.detach() for p in models[1].params])
    return runs


@pytest.mark.parametrize("way", WAYS)
def test_one_checkpoint_of_all_ranks(way, tmp_path):
    results = run_ranks(4, in_one_checkpoint, way, str(tmp_path))
    assert same(results[0][0], results[1][0]) and not same(results[0][0], results[2][0])


def beside_dtensors(rank, world, cls):
    """DTensors follow their mesh, in whatever group they are; plain parameters follow the group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    expert_group, ranks = pairs(rank, world)
    mesh = init_device_mesh("cpu", (world,))
    models, sharded = [Model(ranks), Model(ranks)], []
    for _ in models:
        sharded.append([nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
                        for p in made([(8, 6), (6, 8), (9,)], 5)])
    groups = models[0].groups({}, {"process_group": expert_group})
    groups[2]["params"] = [sharded[0][0], *models[0].experts]
    groups[1]["params"] = [*models[0].dense, sharded[0][1]]
    groups[0]["params"] = [*models[0].expert_biases, sharded[0][2]]
    one = getattr(package(), cls)(groups, lr=0.1, process_group=dist.group.WORLD)
    apart = getattr(package(), cls)([{"params": sharded[1][:1], "lr": 0.05}, {"params": sharded[1][1:2]},
                                     {"params": sharded[1][2:], "use_muon": False}], lr=0.1)
    others = [*halves(models[1], cls, dist.group.WORLD, expert_group), apart]
    for step in range(3):
        for model, dtensors in zip(models, sharded):
            model.backward(step, rank, range(world), True)
            for p, g in zip(dtensors, made([p.shape for p in dtensors], 50 + step)):
                p.grad = distribute_tensor(g.detach(), mesh, [Shard(0)])
        for optimizer in (one, *others):
            optimizer.step()
        assert same(models[0].params, models[1].params)
        assert same(*([p.full_tensor() for p in dtensors] for dtensors in sharded))
    return True


@pytest.mark.parametrize("cls", ["Muon", "NorMuon"])
def test_dtensors_follow_their_mesh(cls):
    assert all(run_ranks(4, beside_dtensors, cls))


def scaled(rank, world, in_step):
    """Inf in an expert of ranks 2 and 3: the scalers of the ranks differ, and all ranks skip the step."""
    expert_group, ranks = pairs(rank, world)
    model = Model(ranks)
    optimizer = package().Muon(model.groups({}, {"process_group": expert_group}), lr=0.1,
                               process_group=dist.group.WORLD, unscale_in_step=in_step)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))  # begins the scale
    kept = []
    for step in range(3):
        model.backward(step, rank, range(world), True)
        for p in model.params:
            p.grad.mul_(scaler.get_scale())
        if step == 1 and rank > 1:
            model.experts[0].grad[0, 0, 0] = float("inf")
        before = [p.detach().clone() for p in model.params]
        scaler.step(optimizer)
        scaler.update(4.0)
        kept.append(sum(torch.equal(a, b) for a, b in zip(before, model.params)))
    return kept


@pytest.mark.parametrize("in_step", [None, True])
def test_a_grad_scaler_whose_ranks_differ(in_step):
    count = len(DENSE) + len(EXPERTS) + 2 * len(BIASES)
    assert run_ranks(4, scaled, in_step) == [[0, count, 0]] * 4


def copied(rank, world):
    expert_group, ranks = pairs(rank, world)
    one = Model(ranks)
    first = package().Muon(one.groups({}, {"process_group": expert_group}), lr=0.1, process_group=dist.group.WORLD,
                           shard_state=True)
    one.backward(0, rank, range(world), True)
    first.step()
    two, second = copy.deepcopy((one, first))
    assert copy.deepcopy(first.param_groups)
    for step in range(1, 3):
        for model in (one, two):
            model.backward(step, rank, range(world), True)
        first.step()
        second.step()
    assert same(one.params, two.params)
    # Another group, of this rank's pair
    more = {id(model): made([(6, 6)], ranks[0]) for model in (one, two)}
    for model, optimizer in ((one, first), (two, second)):
        with pytest.raises(ValueError, match="process_group='x' is not allowed: it must be a process group of which"):
            optimizer.add_param_group({"params": more[id(model)], "process_group": "x"})
        with pytest.raises(ValueError, match="rule='x'"):
            optimizer.add_param_group({"params": more[id(model)], "use_muon": False, "rule": "x"})
        optimizer.add_param_group({"params": more[id(model)], "process_group": expert_group})
        model.backward(3, rank, range(world), True)
        more[id(model)][0].grad = torch.ones(6, 6)
        optimizer.step()
    assert same(one.params, two.params) and torch.equal(*(some[0] for some in more.values()))
    return more[id(one)][0].detach()


def test_copies_and_groups_that_are_added():
    results = run_ranks(4, copied)
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def anew(rank, world, folder):
    """torch.distributed is initialized anew: the default group is found again, another group is not."""
    from tests.test_replan import again

    for number, options in enumerate(({}, {"shard_state": True})):
        models = [Model((0, 1)), Model((0, 1))]
        one = package().Muon(models[0].groups({}, {"process_group": dist.group.WORLD}), lr=0.1, process_group=None)
        pair = dist.new_group([0, 1])
        two = package().Muon(models[1].groups({}, {"process_group": pair}), lr=0.1, process_group=dist.group.WORLD,
                             **options)
        for step in range(2):
            for model, optimizer in zip(models, (one, two)):
                model.backward(step, rank, range(world), True)
                if step and optimizer is two:
                    for call in (optimizer.step, *([optimizer.consolidate_state_dict] if options else [])):
                        with pytest.raises(RuntimeError, match="process_group was destroyed since the optimizer was"):
                            call()
                else:
                    optimizer.step()
            if not step:
                assert again(folder, f"anew{number}", rank, world)
        # A destroyed group takes no state along
        if not options:
            three = package().Muon(models[1].groups({}, {"process_group": dist.new_group([0, 1])}), lr=0.1,
                                   process_group=dist.group.WORLD)
            three.load_state_dict(two.state_dict())
            three.step()
            assert same(models[0].experts, models[1].experts)
    return True


def test_a_default_group_that_is_initialized_anew(tmp_path):
    assert run_ranks(2, anew, str(tmp_path)) == [True, True]


def refused(rank, world):
    from torch.distributed.device_mesh import init_device_mesh

    p = made([(4, 4)], 0)
    other = dist.new_group([0])
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("a", "b"))
    texts = []
    for given, options in [("x", {}), (mesh, {}), (0, {}), *([(other, {})] if rank else []),
                           (dist.group.WORLD, {"overlap_backward": True}), (None, {"shard_state": True})]:
        with pytest.raises(ValueError) as error:
            package().Muon([{"params": p, "process_group": given}], **options)
        texts.append(str(error.value))
    with pytest.raises(ValueError, match="unknown key 'process_groups', which resembles 'process_group'"):
        package().Muon([{"params": p, "process_groups": None}])
    optimizer = package().Muon([{"params": p, "process_group": mesh["b"]}])  # of a mesh of one dim its group is taken
    optimizer.param_groups[0]["process_group"] = None
    p[0].grad = torch.ones(4, 4)
    with pytest.raises(ValueError, match="group 0 .*the key process_group was set after the group was added"):
        optimizer.step()
    del optimizer.param_groups[0]["process_group"]
    optimizer.step()
    return texts


def test_what_is_no_process_group_is_refused():
    for rank, texts in enumerate(run_ranks(2, refused)):
        assert all("in group 0" in text for text in texts[:-1])
        assert "process_group='x' is not allowed: it must be a process group of which this rank is a member" in texts[0]
        assert "DeviceMesh of 2 dims" in texts[1] and "process_group=0 is not allowed" in texts[2]
        assert rank == 0 or "it must be a process group of which this rank is a member" in texts[3]
        assert "overlap_backward=True is not allowed with process_group" in texts[-2]
        assert "shard_state=True needs process_group" in texts[-1]


def test_without_torch_distributed(optimizer):
    """None changes nothing where there is one process, and one dict of a group serves several optimizers."""
    groups = [{"params": made([(6, 4)], 0), "process_group": None}]
    for _ in range(2):
        built = optimizer.Muon(groups)
        groups[0]["params"][0].grad = torch.ones(6, 4)
        built.step()
        assert "process_group" in groups[0] and "process_group" not in built.param_groups[0]


def differing(rank, world):
    """Ranks 0 and 1 build the experts that they share with other options, ranks 2 and 3 alike."""
    expert_group, ranks = pairs(rank, world)
    experts = made([(6, 4)], ranks[0])
    experts[0].grad = torch.ones(6, 4)
    optimizer = package().Muon([{"params": experts, "process_group": expert_group, "nesterov": rank != 1}])
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_difference_is_found_within_its_ranks():
    texts = run_ranks(4, differing)
    assert all("Ranks [1] and ranks [0] differ in: group option nesterov" in text for text in texts[:2]), texts
    assert texts[2:] == ["", ""]


def differing_beside_dtensors(rank, world):
    """An option of the whole optimizer differs: ranks that share only a mesh find it, and so do ranks of a pair."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    expert_group, ranks = pairs(rank, world)
    mesh, texts = init_device_mesh("cpu", (world,)), []
    for odd in (1, 3):
        model = Model(ranks)
        model.backward(0, rank, range(world), True)
        sharded = nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)]))
        sharded.grad = distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)])
        groups = model.groups({"process_group": None}, {"process_group": expert_group})
        groups.append({"params": [sharded]})
        optimizer = package().Muon(groups, process_group=dist.group.WORLD, nonfinite="skip" if rank == odd else "raise")
        before = [p.detach().clone() for p in model.params]
        try:
            optimizer.step()
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
        assert same(before, model.params)
    return texts


def test_a_difference_of_the_optimizer_is_found_over_a_mesh():
    """Rank 1, which is in the pair (0, 1), and then rank 3, which is in the pair (2, 3), has another `nonfinite`: each
    rank raises in both cases, also the ranks of the pair without a difference, and names the rank that differs.
    """
    for texts in run_ranks(4, differing_beside_dtensors):
        assert ["nonfinite" in text for text in texts] == [True, True], texts
        assert "[1]" in texts[0] and "[3]" in texts[1]


def missing_on_one_copy(rank, world):
    """Reduced gradients, and one rank of a pair lacks one: against the contract, but no rank hangs."""
    expert_group, ranks = pairs(rank, world)
    found = []
    for way in ("reduced", "shard_state"):
        model = Model(ranks)
        optimizer = package().Muon(model.groups({}, {"process_group": expert_group}), lr=0.1,
                                   process_group=dist.group.WORLD, **WAYS[way])
        for step in range(3):
            model.backward(step, rank, range(world), True)
            if step == 1 and rank == 0:
                model.experts[0].grad = model.expert_biases[0].grad = None
                model.dense[0].grad = model.dense_biases[0].grad = None
            optimizer.step()
        assert all(p.isfinite().all() for p in model.params)
        found.append([p.detach() for p in model.params])
    return found


def test_a_gradient_that_one_copy_lacks_hangs_no_rank():
    """Parameters whose gradients no rank lacks have equal bits, and matrices do, since one owner updates them."""
    results = run_ranks(4, missing_on_one_copy)
    for way in (0, 1):
        matrices = slice(0, len(DENSE))
        assert all(same(results[0][way][matrices], result[way][matrices]) for result in results[1:])
        assert torch.equal(results[2][way][-1], results[3][way][-1])

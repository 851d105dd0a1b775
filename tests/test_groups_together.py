"""Groups that differ only in numbers of the device are stepped as one, with the bits of optimizers of their own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import package, part, run_ranks, run_threads


def stepped(groups, cls="NorMuon", steps=2, change=None, **options):
    """The parameters after some steps; `change` is called with the groups before the last one."""
    params = [p for group in groups for p in group["params"]]
    optimizer = getattr(package(), cls)(groups, **options)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        if change is not None and step == steps - 1:
            change(optimizer.param_groups)
        optimizer.step()
    return [p.detach().clone() for p in params], optimizer


def weights(count=3):
    return [nn.Parameter(torch.randn(12, 8, generator=torch.Generator().manual_seed(i))) for i in range(count)]


@pytest.mark.parametrize("cls", ["Muon", "NorMuon"])
def test_each_matrix_has_the_numbers_of_its_group(cls, optimizer):
    numbers = [{"lr": 0.1 / (i + 1), "weight_decay": 0.1 * i, "momentum": 0.9 - 0.1 * i} for i in range(3)]
    if cls == "NorMuon":
        numbers = [{**own, "beta2": 0.95 - 0.2 * i} for i, own in enumerate(numbers)]
    together, one = stepped([{"params": [p], **n} for p, n in zip(weights(), numbers)], cls, 3)
    assert len(one._bound.jobs) == 1
    for i, own in enumerate(numbers):
        params = weights()[i:i + 1]
        apart = getattr(optimizer, cls)([{"params": params, **own}])
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            params[0].grad = [torch.randn(12, 8, generator=generator) for _ in range(3)][i]
            apart.step()
        assert torch.equal(together[i], params[0])


CHANGES = {
    "nesterov": (True, False), "eps": (1e-7, 1e-3), "ns_steps": (5, 3),
    "ns_coefficients": ("polar_express", "jordan"), "adjust_lr_fn": ("original", "match_rms_adamw"),
}


@pytest.mark.parametrize(("key", "as_tensor"), [*((key, False) for key in CHANGES), ("nesterov", True), ("eps", True)])
def test_a_group_that_becomes_unlike_is_stepped_apart(key, as_tensor, optimizer):
    """A number may be a tensor that is changed in place: its value counts."""
    before, after = CHANGES[key]

    def groups(value):
        return [{"params": [p], key: torch.tensor(value) if as_tensor else value} for p in weights()]

    def change(found):
        if as_tensor:
            found[1][key].fill_(after)
        else:
            found[1][key] = after

    together, one = stepped(groups(before), steps=3, change=change)
    assert len(one._bound.jobs) == 2
    for i in range(3):
        params = weights()[i:i + 1]
        apart = optimizer.NorMuon([{"params": params, key: before}])
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            params[0].grad = [torch.randn(12, 8, generator=generator) for _ in range(3)][i]
            if step == 2 and i == 1:
                apart.param_groups[0][key] = after
            apart.step()
        assert torch.equal(together[i], params[0]), i


def test_values_that_change_alike_keep_the_plan(optimizer):
    def change(groups):
        for group in groups:
            group["nesterov"] = False

    groups = [{"params": [p]} for p in weights()]
    params, one = stepped(groups)
    before = one._bound
    change(one.param_groups)
    one.param_groups[1]["beta2"] = 0.5  # read on the device
    one.step()
    assert one._bound is before


def further_groups(rank, world, case):
    """Whether ranks of which some hold a further group step, and what all have in common is equal."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    flat, pairs = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def on(mesh):
        return nn.Parameter(distribute_tensor(torch.ones(16, 8), mesh, [Shard(0)], src_data_rank=None))

    all_ranks, other = on(flat), on(flat)
    pair = on(pairs["b"]) if case == "own rates" or rank < 2 else None
    groups = [{"params": [("q", other)], "ns_steps": 4}, {"params": [("a", all_ranks)]}]
    if pair is not None:
        groups.insert(0, {"params": [("b", pair)], "lr": 0.05 if rank < 2 else 0.06})
    optimizer = package().Muon(groups)
    for step in range(3):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, step + 1.0)
        optimizer.step()
    return [p.full_tensor().clone() for p in (all_ranks, other)]


@pytest.mark.parametrize("case", ["own rates", "own group"])
def test_ranks_may_hold_further_groups(case, optimizer):
    """They are compared by what they have in common, and plan in a common order."""
    found = run_threads(4, further_groups, case, timeout=20)
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, found[0]))


def test_muon_groups_come_in_an_order_that_no_further_group_changes(optimizer):
    together = part("execution.prepare.select").step_together
    found = package().Muon([{"params": weights(1), "ns_steps": n, "lr": 0.1 * n} for n in (5, 4, 5, 3)]).param_groups
    groups = [(group, group["params"], part("params.config").MuonConfig()) for group in found]
    orders = [[part_.groups[0]["ns_steps"] for part_ in together(some)] for some in (groups, groups[1:], groups[::-1])]
    assert orders == [orders[0]] * 3 and sorted(orders[0]) == [3, 4, 5]


def test_state_of_other_strides_is_viewed_as_one_matrix(optimizer):
    """Momentum of a model in channels_last, loaded into a contiguous one that steps filters as one matrix."""
    filters = torch.randn(8, 4, 3, 3)
    before = nn.Parameter(filters.to(memory_format=torch.channels_last))
    after = nn.Parameter(filters.clone())
    first = optimizer.Muon([{"params": [before], "split": "taps"}])
    before.grad = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
    first.step()
    second = optimizer.Muon([{"params": [after], "split": "flatten"}])
    second.load_state_dict(first.state_dict())
    after.grad = torch.ones_like(after)
    second.step()
    assert torch.isfinite(after).all()
    expected = 0.95 * first.state[before]["momentum_buffer"] + 0.05
    torch.testing.assert_close(second.state[after]["momentum_buffer"], expected)


def test_a_frozen_parameter_with_a_gradient_is_named(optimizer):
    param = nn.Parameter(torch.ones(8, 6))
    opt = optimizer.Muon([{"params": [("frozen", param)], "split": {"rows": [3, 5]}}])
    param.requires_grad_(False)
    param.grad = torch.ones(8, 6)
    opt.param_groups[0]["split"] = {"rows": [3, 3]}
    with pytest.raises(ValueError, match=r"parameter frozen of shape \(8, 6\): the sizes \[3, 3\] add up to 6"):
        opt.step()


def interleaved_columns(rank, world):
    """Experts stored as (in, out), gate and up interleaved over ranks: row state keeps the columns as stored."""
    from torch.distributed.tensor import DTensor, init_device_mesh
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, whole = init_device_mesh("cpu", (world,)), torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    local = torch.cat([half.chunk(world, 1)[rank] for half in whole.chunk(2, 1)], 1).contiguous()
    place = [_StridedShard(1, split_factor=2)]

    def sharded(tensor):
        return DTensor.from_local(tensor, mesh, place, run_check=False, shape=whole.shape, stride=whole.stride())

    param, alone = nn.Parameter(sharded(local.clone())), nn.Parameter(whole.clone())
    optimizers = [package().NorMuon([{"params": [p], "transposed": True}]) for p in (param, alone)]
    for _ in range(2):
        param.grad, alone.grad = sharded(local.clone()), whole.clone()
        for optimizer in optimizers:
            optimizer.step()
    mine = torch.cat([half.chunk(world, 1)[rank] for half in alone.detach().chunk(2, 1)], 1)
    return torch.equal(param.detach().to_local(), mine)


def test_rows_of_a_transposed_weight_may_be_interleaved(optimizer):
    assert run_threads(2, interleaved_columns, timeout=20) == [True, True]


ADAMW_GROUPS = [{"lr": 0.1}, {"lr": 0.02, "weight_decay": 0.3}, {"betas": (0.8, 0.9), "eps": 1e-3},
                {"betas": (0.5, 0.99)}]


def adamw_at_owners(rank, world, options, dtype):
    """AdamW groups with numbers of their own, in one optimizer and in an optimizer for each group."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (7,), (), (2, 3, 4), (1, 6), (9, 2), (4, 4), (3,)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    dtypes = [dtype if i % 3 else torch.float32 for i in range(len(shapes))]
    sets = [[nn.Parameter(v.to(d)) for v, d in zip(values, dtypes)] for _ in range(2)]
    groups = [[{"params": params[2 * i:2 * i + 2], "use_muon": False, **own} for i, own in enumerate(ADAMW_GROUPS)]
              for params in sets]
    options = {"process_group": dist.group.WORLD, **options}
    one = package().Muon(groups[0], **options)
    apart = [package().Muon([group], **options) for group in groups[1]]
    for step in range(4):
        for i, (p, q) in enumerate(zip(*sets)):
            seed = 100 * step + i + (0 if options.get("grads_are_reduced", True) else 1000 * rank)
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p.dtype)
            q.grad = p.grad.clone()
        if step == 2:  # of no rank
            sets[0][2].grad = sets[1][2].grad = None
        if step == 3:
            one.param_groups[1]["lr"] = apart[1].param_groups[0]["lr"] = 0.5
        for optimizer in (one, *apart):
            optimizer.step()
        for p, q in zip(*sets):
            assert torch.equal(p, q), (step, p.shape)
    for optimizer in (one, *apart):
        optimizer.consolidate_state_dict(to=None)
    whole = one.state_dict()["state"]
    parts = [optimizer.state_dict()["state"][i] for optimizer in apart for i in range(2)]
    for i, part_ in enumerate(parts):
        assert all(torch.equal(whole[i][key], part_[key]) for key in part_), i
    return len({update.label for update, _ in one._bound.jobs if update.bucket is not None})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{"shard_state": True}, {"grads_are_reduced": False},
                                     {"grads_are_reduced": False, "nonfinite": "skip"}])
def test_adamw_groups_with_state_at_owners_share_buckets(options, dtype):
    """A bucket for each dtype, though every group has numbers of its own."""
    assert run_ranks(2, adamw_at_owners, options, dtype) == [1 if dtype == torch.float32 else 2] * 2

"""Ranks whose optimizers differ are told at the first step which rank and what, and nobody waits in vain."""

from __future__ import annotations

import hashlib
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import muon_before_a_step, package, part, run_ranks, run_threads
from tests.test_bucket_updates import cut

SHAPES = [(8, 6), (6, 8), (12, 4), (6,)]
MODES = ["fsdp", "reduced", "unreduced"]


def build(mode, name, shapes, split=3, dtype=torch.float32, dim=0, group=(), other=(), **options):
    """An optimizer with Muon and AdamW groups; `split`: how many go to Muon; `group`, `other`: what the first and the
    second group set.
    """
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fulls = [torch.ones(shape, dtype=dtype) for shape in shapes]
    params = [nn.Parameter(cut(f, mesh, [Shard(min(dim, f.ndim - 1))]) if mode == "fsdp" else f) for f in fulls]
    groups = [{"params": params[:split], **dict(group)}, {"params": params[split:], "use_muon": False, **dict(other)}]
    if mode != "fsdp":
        options |= {"process_group": dist.group.WORLD, "grads_are_reduced": mode == "reduced"}
    for p in params:
        p.grad = torch.ones_like(p)
    return params, getattr(package(), name)([g for g in groups if g["params"]], **options)


CORRECTED, ROUNDED = {"momentum_form": "bias_corrected"}, {"rounding": "stochastic"}
USUAL = {  # of the other ranks, where it is not the default
    "beta2": {"name": "NorMuon"}, "momentum_steps": {"group": CORRECTED}, "radius": {"group": {"rule": "scion"}},
    "master_weights": {"dtype": torch.bfloat16},
    **dict.fromkeys(("rounding_seed", "rounding_step"), {"group": ROUNDED, "dtype": torch.bfloat16}),
}
# what the odd rank has; what it is told
CASES = {
    "order": ({"shapes": [(6, 8), (8, 6), (12, 4), (6,)]}, "parameters; the first is number 0, here #0 of shape"),
    "shape": ({"shapes": [(8, 6), (6, 8), (12, 5), (6,)]}, "parameters; the first is number 2, here #2 of shape"),
    "one more": ({"shapes": [(8, 6), (6, 8), (12, 4), (6,), (3,)]}, "number of parameters"),
    "a group less": ({"shapes": SHAPES[:3]}, "number of parameter groups"),
    "dtype": ({"dtype": torch.bfloat16}, "parameters; the first is number 0"),
    "lr": ({"group": {"lr": 0.5}}, "group option lr"),
    "weight_decay": ({"weight_decay": 0.5}, "group option weight_decay"),
    "momentum": ({"group": {"momentum": 0.5}}, "group option momentum"),
    "nesterov": ({"nesterov": False}, "group option nesterov"),
    "ns_coefficients": ({"ns_coefficients": "jordan"}, "group option ns_coefficients"),
    "ns_steps": ({"ns_steps": 6}, "group option ns_steps"),
    "adjust_lr_fn": ({"group": {"adjust_lr_fn": "spectral_norm"}}, "group option adjust_lr_fn"),
    "betas": ({"adamw_betas": (0.8, 0.9)}, "group option betas"),
    "beta2": ({"name": "NorMuon", "beta2": 0.5}, "group option beta2"),
    "class": ({"name": "NorMuon"}, "group option beta2"),
    "momentum_steps": ({"group": CORRECTED | {"momentum_steps": 2}}, "group option momentum_steps"),
    "rounding_seed": ({"group": ROUNDED | {"rounding_seed": 2}}, "group option rounding_seed"),
    "rounding_step": ({"group": ROUNDED | {"rounding_step": 2}}, "group option rounding_step"),
    "master_weights": ({"group": {"master_weights": "split16"}}, "group option master_weights"),
    "group's state_dtype": ({"other": {"state_dtype": torch.bfloat16}}, "group option state_dtype"),
    "radius": ({"group": {"rule": "scion", "radius": 2.0}}, "group option rule options"),
    "wire_dtype": ({"wire_dtype": torch.float32}, "wire_dtype"),
    "state_dtype": ({"state_dtype": torch.bfloat16}, "state_dtype"),
    "ns_dtype": ({"ns_dtype": torch.float32}, "ns_dtype"),
    "nonfinite": ({"nonfinite": "skip"}, "nonfinite"),
    "overlap_forward": ({"overlap_forward": True}, "overlap_forward"),
}


def told(rank, world, mode, odd, usual=None):
    """What rank 2 of the others, whose optimizer is another, and they themselves are told; whether anything moved."""
    form = {"name": "Muon", "shapes": SHAPES, **(usual or {}), **(odd if rank == 2 else {})}
    params, optimizer = build(mode, **form)
    messages = []
    for _ in "12":  # and again: nothing was planned
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        messages.append(str(raised.value))
    moved = not all((part("params.dtensor").local_of(p) == 1).all() for p in params)
    return messages, moved


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_the_odd_rank_and_what_it_has_are_told(case, mode, optimizer):
    odd, what = CASES[case]
    for rank, (messages, moved) in enumerate(run_threads(4, told, mode, odd, USUAL.get(case), timeout=20)):
        for message in messages:
            assert f"rank {rank}: the ranks have different plans. Ranks [2] and ranks [0, 1, 3] differ in: {what}" in (
                message), message
            assert "Build the optimizer alike on all ranks" in message
            assert "; on this rank" in message or what.startswith("parameters; "), message
        assert not moved


def test_each_rank_says_its_own_value(optimizer):
    odd = {"group": {"split": {"heads": 2}}}
    for rank, (messages, _) in enumerate(run_threads(4, told, "reduced", odd, timeout=20)):
        own = [{"heads": 2} if rank == 2 else None, None]
        assert f"differ in: group option split; on this rank by group: {own}. Build the optimizer" in messages[0]


def test_another_placement_is_told(optimizer):
    for messages, _ in run_threads(4, told, "fsdp", {"dim": 1}):
        assert "Ranks [2] and ranks [0, 1, 3] differ in: parameters; the first is number 0, here #0" in messages[0]


def test_overlap_on_some_ranks_is_told(optimizer):
    """These ranks want process groups of their own, and made them while the others compared over shared ones."""
    for messages, _ in run_threads(4, told, "fsdp", {"overlap_backward": True}, timeout=20):
        assert "Ranks [2] and ranks [0, 1, 3] differ in: overlap_backward" in messages[0]


def with_odd_strides(rank, world, odd, mode):
    """What a rank is told at the first step, where ranks of `odd` made a convolution channels_last after construction;
    whether anything moved.
    """
    from torch.distributed.tensor import Shard, init_device_mesh

    fulls = [torch.ones(8, 6), torch.ones(3, 4, 2, 2), torch.ones(6, 4, 2, 2)]
    mesh, options = init_device_mesh("cpu", (world,)), {}
    if mode == "fsdp":  # of (3, ...), rank 3 has no element
        fulls = [cut(full, mesh, [Shard(0)]) for full in fulls]
    else:
        options = {"process_group": dist.group.WORLD}
    params = [(f"p{i}", nn.Parameter(full)) for i, full in enumerate(fulls)]
    groups = [{"params": params[:1]}, {"params": params[1:], "split": "flatten"}]
    optimizer = package().Muon(groups, lr=0.1, **options)
    local = part("params.dtensor").local_of
    for _, p in params:
        p.grad = torch.ones_like(p)
    if rank in odd:
        weight = params[1][1]
        strided = local(weight).detach().to(memory_format=torch.channels_last)
        if mode == "fsdp":
            weight._local_tensor = strided
        else:
            weight.data = strided
    messages = []
    for _ in "12":
        with pytest.raises(NotImplementedError) as raised:
            optimizer.step()
        messages.append(str(raised.value))
    return messages, not all((local(p) == 1).all() for _, p in params)


@pytest.mark.parametrize("mode", ["fsdp", "reduced"])
@pytest.mark.parametrize("odd", [(0, 1, 2), (1,)])
def test_strides_that_a_split_cannot_view_are_told_to_all_ranks(odd, mode, optimizer):
    """A rank whose shard is empty, or which has other strides, waited for the others."""
    told = (f"parameter p1 of shape (3, 4, 2, 2): split=\"flatten\" needs a contiguous parameter, not strides as on "
            f"ranks {', '.join(map(str, odd))} (channels_last?)")
    for messages, moved in run_threads(4, with_odd_strides, odd, mode, timeout=20):
        assert all(told in message for message in messages) and not moved


def of_two_dtypes(rank, world):
    """Of a group whose dtypes owners step apart, which is two plans where one of its parameters is odd."""
    params = [nn.Parameter(torch.ones(6, 8)), nn.Parameter(torch.ones(8)),
              nn.Parameter(torch.ones(8, dtype=torch.bfloat16 if rank == 1 else torch.float32))]
    for p in params:
        p.grad = torch.ones_like(p)
    groups = [{"params": params[:1], "use_muon": True}, {"params": params[1:], "use_muon": False}]
    with pytest.raises(RuntimeError) as raised:
        package().Muon(groups, process_group=dist.group.WORLD, shard_state=True).step()
    return str(raised.value)


def test_another_dtype_in_a_group_is_no_other_number_of_groups(optimizer):
    for message in run_threads(2, of_two_dtypes, timeout=20):
        assert "differ in: parameters; the first is number 2" in message


@pytest.mark.parametrize(("where", "name", "what"), [
    ("communication.plan_check", "_sources", "version of the package"),
    ("communication.plan_check", "use_triton", "device, OPTIMIZER_KERNELS or OPTIMIZER_TILES"),
    ("communication.plan_check", "triton_version", "version of Triton")])
def test_another_version_is_told(where, name, what, optimizer, monkeypatch):
    monkeypatch.setattr(part(where), name, lambda *_: dist.get_rank() == 2)
    for messages, _ in run_threads(4, told, "fsdp", {}):
        assert f"Ranks [2] and ranks [0, 1, 3] differ in: {what}" in messages[0]


def test_the_version_is_that_of_the_sources(optimizer, tmp_path, monkeypatch):
    agree = part("communication.plan_check")
    before = agree._sources()
    (tmp_path / "muon.py").write_text("pass")
    agree._sources.cache_clear()
    monkeypatch.setattr(agree, "__file__", str(tmp_path / "communication" / "plan_check.py"))
    other = agree._sources()
    (tmp_path / "muon.py").write_text("pass ")
    agree._sources.cache_clear()
    assert len({before, other, agree._sources()}) == 3
    agree._sources.cache_clear()


def test_another_order_of_names_is_told_where_shapes_are_equal(optimizer):
    for messages, moved in run_threads(4, told, "fsdp", {"group": {"param_names": ["k", "q", "o"]}},
                                       {"shapes": [(8, 8)] * 3, "group": {"param_names": ["q", "k", "o"]}}):
        assert "Ranks [2] and ranks [0, 1, 3] differ in: parameters; the first is number 0, here " in messages[0]
        assert not moved


def many(rank, world):
    params, optimizer = build("fsdp", "Muon", [(8, 6), (6, 8)] * 20, split=40)
    optimizer.step()


def test_layouts_are_digested_once(optimizer, monkeypatch):
    """Not for each parameter: 10,000 of them with 4096 boxes each took half a minute."""
    layout, digested = part("params.layout"), []
    counted = types.SimpleNamespace(sha256=lambda text: (digested.append(text), hashlib.sha256(text))[1])
    monkeypatch.setattr(layout, "hashlib", counted)
    run_threads(2, many)
    assert len(digested) == 2 * 2


def adamw_only(rank, world):
    """No bucket travels, but flags of missing gradients do."""
    odd = {"shapes": [(8, 6), (6,)]} if rank == 1 else {"shapes": [(8, 6)]}
    _, optimizer = build("fsdp", "Muon", split=0, **odd)
    with pytest.raises(RuntimeError, match="number of parameters"):
        optimizer.step()
    return True


def test_adamw_alone_is_compared_too(optimizer):
    assert all(run_threads(2, adamw_only, timeout=20))


def alike(rank, world):
    """What may differ: how an equal thing is written, and what ranks step alone."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(cut(torch.ones(s), mesh, [Shard(0)])) for s in SHAPES]
    own = [nn.Parameter(torch.ones(4 + rank, 3)) for _ in range(1 + rank)]
    groups = [{"params": params[:3], "lr": torch.tensor(0.25) if rank else 0.25, "adjust_lr_fn": None},
              {"params": params[3:], "use_muon": False, "betas": [0.9, 0.95] if rank else (0.9, 0.95)},
              {"params": own, "lr": 0.1 * (1 + rank)}]
    optimizer = package().Muon(groups)
    for p in (*params, *own):
        p.grad = torch.ones_like(p)
    optimizer.step()
    return True


def test_what_may_differ_between_ranks(optimizer):
    assert all(run_threads(3, alike))


def of_a_stage(rank, world):
    """Stages of a pipeline: each half of the ranks has a matrix of its own, one of them before what all ranks have.
    The largest difference from one process after two steps.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, init_device_mesh

    stage, half = 2 * rank // world, world // 2
    meshes = [DeviceMesh("cpu", list(range(i * half, i * half + half))) for i in range(2)]
    generator = torch.Generator().manual_seed(0)
    *tied, own = [torch.randn(shape, generator=generator) for shape in [(8, 6), (6, 8), (5, 8)]]
    tied = [cut(full, init_device_mesh("cpu", (world,)), [Shard(0)]) for full in tied]
    own = cut(own, meshes[stage], [Shard(0)])
    many = [nn.Parameter(p) for p in ([*tied, own] if stage == 0 else [own, *tied])]
    one = [nn.Parameter(p.full_tensor()) for p in many]
    optimizers = [package().Muon(params, lr=0.1) for params in (one, many)]
    for _ in "12":
        for params in (one, many):
            for p in params:
                p.grad = p.detach().clone()
        for optimizer in optimizers:
            optimizer.step()
    return max((whole - p.full_tensor()).abs().max().item() for whole, p in zip(one, many))


def test_what_a_stage_has_of_its_own_may_stand_before_what_all_have(optimizer):
    assert run_threads(4, of_a_stage) == [0.0] * 4


# parameters without names, and copies that differ


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)


def without_names(rank, world, turned):
    """What a step is told whose parameters FSDP2 has cut, in another order on the last rank."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(Attention(), Attention())
    fully_shard(model[1].q)
    fully_shard(model)
    params = list(model.parameters())
    optimizer = muon_before_a_step(params[::-1] if turned and rank == world - 1 else params)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return sorted(part("params.errors").fsdp_names()[id(p)] for p in params)


def test_parameters_without_names_have_those_of_fsdp2(optimizer):
    assert run_threads(2, without_names, False) == [["0.k.weight", "0.q.weight", "1.k.weight", "1.q.weight"]] * 2
    for rank, message in enumerate(run_threads(3, without_names, True)):
        assert "Ranks [2] and ranks [0, 1] differ in: parameters; the first is number 0, here " in message
        assert ("1.k.weight" if rank == 2 else "0.q.weight") + " of shape (8, 8)" in message


def copies(rank, world, kind, turned):
    """What a step is told whose parameters without names all ranks have, in another order on the last rank."""
    from torch.distributed.tensor import Replicate, init_device_mesh

    fulls = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0))
    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(cut(full, mesh, [Replicate()]) if kind == "replicate" else full) for full in fulls]
    options = {} if kind == "replicate" else {"process_group": dist.group.WORLD, "grads_are_reduced": kind == "reduced"}
    last = turned and rank == world - 1
    optimizer = muon_before_a_step(params[::-1] if last else params, **options)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["reduced", "unreduced", "replicate"])
def test_copies_in_another_order_are_told_by_their_first_elements(kind, optimizer):
    assert run_threads(3, copies, kind, False) == [""] * 3
    what = "the order of parameters, as their first elements show; the first is here #0"
    for message in run_threads(3, copies, kind, True):
        assert f"Ranks [2] and ranks [0, 1] differ in: {what}" in message


def warned(rank, world, kind):
    """What the steps of an optimizer warn of."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 8), (8, 6) if kind == "of two forms" else (8, 8), (8,)]
    fulls = [torch.randn(shape, generator=generator) * (kind != "zeros") for shape in shapes]
    options = {"process_group": dist.group.WORLD, "grads_are_reduced": "unreduced" not in kind}
    if kind in ("sharded", "sharded, named", "of two forms"):
        from torch.distributed.tensor import Shard, init_device_mesh

        mesh, options = init_device_mesh("cpu", (world,)), {}
        fulls = [cut(full, mesh, [Shard(0)]) for full in fulls]
    params = [nn.Parameter(full + (rank if kind == "weights" and i == 1 else 0)) for i, full in enumerate(fulls)]
    for i, p in enumerate(params):
        differs = kind in ("gradients", "unreduced") and i == 2 or kind == "one is missing"
        p.grad = torch.ones_like(p) * (1 + rank * differs)
    if kind == "one is missing" and rank == 1:
        for p in params:
            p.grad = None
    named = ["q", "k", "bias"] if kind in ("sharded, named", "weights", "gradients") else None
    groups = [{"params": params[:2]}, {"params": params[2:], "use_muon": False}]
    if named:
        groups = [{**group, "params": list(zip(part_of, group["params"]))}
                  for group, part_of in zip(groups, (named[:2], named[2:]))]
    optimizer = package().Muon(groups, **options)
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.step()
    return [str(message.message) for message in messages if message.category is UserWarning]


WARNED = {
    "weights": "the weights of k differ between ranks 0, 1, which hold copies of them",
    "gradients": "the gradients of bias differ between ranks 0, 1, although grads_are_reduced=True",
    **dict.fromkeys(("sharded", "zeros"), "parameters #0, #1 have no names, others have the same shape, dtype and "
                                          "placement, and ranks 0, 1 share them"),
    **dict.fromkeys(("alike", "unreduced", "one is missing", "sharded, named", "of two forms")),
}


@pytest.mark.parametrize("kind", WARNED)
def test_what_nobody_else_says_of_copies_is_warned_of_once(kind, optimizer):
    told, silent = run_ranks(2, warned, kind)
    expected = WARNED[kind]
    assert [expected in message for message in told] == ([True] if expected else []), told
    assert silent == [] or kind == "one is missing" and len(silent) == 1 and "finds a gradient at none" in silent[0]


def after_a_step_that_creates_state(rank, world):
    """Steps whose gradients are zero, then others on each rank; the first one has lr 0."""
    params = [nn.Parameter(torch.ones(8, 6)), nn.Parameter(torch.ones(8))]
    groups = [{"params": [("w", params[0])]}, {"params": [("b", params[1])], "use_muon": False}]
    optimizer = package().Muon(groups, lr=0.0, process_group=dist.group.WORLD)
    for step in range(4):
        for p in params:
            p.grad = torch.full_like(p, float(step > 0))
        params[1].grad *= 1 + rank
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 0.1


def test_gradients_are_compared_after_a_step_that_only_creates_state(optimizer, monkeypatch):
    """torch.distributed.checkpoint takes one with zero gradients, which are alike on all ranks."""
    found = []
    monkeypatch.setattr(part("communication.plan_check"), "_warn_of_gradients",
                        lambda differ, ranks: found.append([c.name for c in differ]))
    run_threads(2, after_a_step_that_creates_state)
    assert found == [[], ["b"]]


def loaded_alone(rank, world, ranks):
    """A state dict that only some ranks load into a new optimizer."""
    def stepped(saved=None):
        params = [nn.Parameter(torch.ones(8, 6)), nn.Parameter(torch.ones(8))]
        groups = [{"params": [("w", params[0])]}, {"params": [("b", params[1])], "use_muon": False}]
        optimizer = package().Muon(groups, process_group=dist.group.WORLD)
        if saved is not None and rank in ranks:
            optimizer.load_state_dict(saved)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        return optimizer

    saved = stepped().state_dict()
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        stepped(saved)
    return [str(message.message) for message in messages if message.category is UserWarning]


def test_a_checkpoint_that_only_some_ranks_load_is_told_once(optimizer):
    told, silent = run_ranks(2, loaded_alone, (0,))
    [message] = told
    assert ("ranks 1 have no state of any of the 2 parameters that ranks 0, 1 share, and other ranks have state of 2: "
            "there momentum and averages begin at zero") in message
    assert silent == [] and run_ranks(2, loaded_alone, (0, 1)) == run_ranks(2, loaded_alone, ()) == [[], []]

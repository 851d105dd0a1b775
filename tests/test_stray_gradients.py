"""Gradients that autograd leaves in other placements than their parameters have, as after SequenceParallel."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.ranks import package, run_ranks


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16, bias=False), nn.Linear(16, 8))


def optimizer_of(model, name):
    groups = [{"params": [p for p in model.parameters() if p.ndim == 2]},
              {"params": [p for p in model.parameters() if p.ndim == 1], "use_muon": False}]
    return getattr(package(), name)(groups, lr=0.02, wire_dtype=torch.float32)


def sequence_parallel(rank, world, name):
    """Two steps beside one process; the largest differences, and the placements of the norm's gradient."""
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )
    from torch.distributed.tensor.placement_types import Shard

    mesh = init_device_mesh("cpu", (world,))
    plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)),
            "2": RowwiseParallel(output_layouts=Shard(1))}
    alone, ours = model(), parallelize_module(model(), mesh, plan)
    optimizers = [optimizer_of(m, name) for m in (alone, ours)]
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        alone(x).square().sum().backward()
        y = ours(x.chunk(world, 1)[rank].contiguous())
        (y.to_local() if hasattr(y, "to_local") else y).square().sum().backward()
        placements = str(ours[0].weight.grad.placements)
        for optimizer in optimizers:
            optimizer.step()
    return [(p.full_tensor() - q).abs().max().item() for p, q in zip(ours.parameters(), alone.parameters())], placements


@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_sequence_parallel_is_one_process(name):
    """The norms' gradients are Partial: each rank has seen some of the tokens."""
    for differences, placements in run_ranks(2, sequence_parallel, name):
        assert "Partial" in placements and max(differences) < 1e-5


def placed_otherwise(rank, world):
    """Steps with gradients in every placement; the differences from one process."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh, wrong = init_device_mesh("cpu", (world,)), {}
    for place in (Replicate(), Shard(1), Partial(), Shard(0)):
        full = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
        params = [nn.Parameter(full.clone()), nn.Parameter(distribute_tensor(full, mesh, [Shard(0)]))]
        optimizers = [package().Muon([p], lr=0.02, wire_dtype=torch.float32) for p in params]
        for step in range(3):
            gradient = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
            params[0].grad = gradient
            if place.is_partial() and step:  # also a change of placements between steps
                params[1].grad = DTensor.from_local(gradient / world, mesh, [place], run_check=False)
            else:
                params[1].grad = distribute_tensor(gradient, mesh, [Shard(0) if place.is_partial() else place])
            for optimizer in optimizers:
                optimizer.step()
        wrong[str(place)] = (params[1].full_tensor() - params[0]).abs().max().item()
    return wrong


def test_gradients_in_any_placement():
    for wrong in run_ranks(4, placed_otherwise):
        assert len(wrong) == 4 and max(wrong.values()) < 1e-6


def missing_astray(rank, world, from_the_first):
    """The gradient of a replicated parameter is Partial on one rank, and there is none on the other. Returns the
    difference from one process, or what is said.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor, init_device_mesh

    mesh, full = init_device_mesh("cpu", (world,)), torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    params = [nn.Parameter(full.clone()), nn.Parameter(distribute_tensor(full, mesh, [Replicate()]))]
    alone, ours = (package().Muon([p], lr=0.02, wire_dtype=torch.float32) for p in params)
    for step in range(4):
        gradients = torch.randn(world, 7, 5, generator=torch.Generator().manual_seed(step))
        here = [step != 2 and (rank == 0 or not (step or from_the_first)) for rank in range(world)]
        params[0].grad = sum(g for g, there in zip(gradients, here) if there) if any(here) else None
        part = DTensor.from_local(gradients[rank], mesh, [Partial()], run_check=False)
        params[1].grad = part if here[rank] else None
        alone.step()
        try:
            ours.step()
        except RuntimeError as error:
            return str(error)
    return (params[1].to_local() - params[0]).abs().max().item()


def test_a_missing_gradient_counts_as_zero_among_partial_ones():
    assert max(run_ranks(2, missing_astray, False)) < 1e-6


def test_a_gradient_that_is_partial_on_some_ranks_only_is_told():
    """Which placements the others have, a rank without a gradient cannot know in the first step."""
    for said in run_ranks(2, missing_astray, True):
        assert "differ in: parameters; the first is number 0" in said and "of its gradient" in said


def plain_gradient(rank, world, steps, options):
    """What is said of a DTensor's gradient that is a plain tensor, at once or after so many steps."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    param = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
    optimizer = package().Muon([("fc.weight", param)], **options)
    for _ in range(steps):
        param.grad = torch.ones_like(param)
        optimizer.step()
    param.grad = torch.ones(6, 4)
    with optimizer.last_backward():
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            hook(param)
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    return str(raised.value)


@pytest.mark.parametrize("options", [{}, {"overlap_backward": True}], ids=str)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_plain_gradient_of_a_dtensor_is_named(steps, options):
    for said in run_ranks(2, plain_gradient, steps, options):
        assert "parameter fc.weight is a DTensor, but its gradient is a plain tensor of shape (6, 4)" in said

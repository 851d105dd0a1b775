"""Splits as other packages publish them, written anew from their descriptions in fp64: the same blocks, factors and
updates within rounding.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.ranks import part

LR = 0.1


def polar(X: torch.Tensor) -> torch.Tensor:
    """The orthogonalization of each of (..., R, C), in fp64."""
    X = X.double()
    X = X / torch.linalg.matrix_norm(X, keepdim=True)
    for a, b, c in part("newton_schulz.coefficients").steps_of("polar_express", 5).triples:
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return X


def step_of(block: torch.Tensor, factor) -> torch.Tensor:
    return LR * factor(*block.shape[-2:]) * polar(block)


def original(R: int, C: int) -> float:
    return math.sqrt(max(1.0, R / C))


def rms(R: int, C: int) -> float:
    return 0.2 * math.sqrt(max(R, C))


def megatron_qkv(G: torch.Tensor, factor) -> torch.Tensor:
    """Megatron-Core: rows of linear_qkv are query groups of [q heads, k, v]; q, k and v of all groups are one matrix
    each (`qkv_split_shapes`).
    """
    groups, shapes = 4, [32, 8, 8]
    parts = G.view(groups, sum(shapes), -1).split(shapes, dim=1)
    steps = [step_of(p.reshape(-1, G.shape[1]), factor).view(p.shape) for p in parts]
    return torch.cat(steps, dim=1).view(G.shape)


def dion_heads(G: torch.Tensor, factor) -> torch.Tensor:
    """Dion `num_heads`, torchtitan's BlockShard, DeepSpeed `per_head_muon`: rows of a head are a matrix."""
    return step_of(G.view(8, -1, G.shape[1]), factor).view(G.shape)


def dion_sizes(G: torch.Tensor, factor) -> torch.Tensor:
    """Dion `split_sizes`, gram-newton-schulz `param_split_fn` and `param_recombine_fn`: blocks of rows."""
    return torch.cat([step_of(block, factor) for block in G.split([96, 64, 32])])


def paddle_output(G: torch.Tensor, factor) -> torch.Tensor:
    """An output projection per head: blocks of columns."""
    return torch.cat([step_of(block, factor) for block in G.chunk(4, dim=1)], dim=1)


def keller_jordan_filter(G: torch.Tensor, factor) -> torch.Tensor:
    """Keller Jordan, Dion `flatten`: a filter (O, I, H, W) is one matrix O x I H W."""
    return step_of(G.flatten(1), factor).view(G.shape)


PEERS = {
    "megatron": (megatron_qkv, (192, 96), {"rows": [32, 8, 8], "repeat": 4}),
    "heads": (dion_heads, (192, 96), {"heads": 8}),
    "sizes": (dion_sizes, (192, 96), {"rows": [96, 64, 32]}),
    "output": (paddle_output, (96, 192), {"heads": 4, "dim": 1}),
    "filter": (keller_jordan_filter, (32, 8, 3, 3), "flatten"),
}


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("peer", PEERS)
def test_splits_are_those_that_others_publish(peer, adjust, optimizer):
    published, shape, split = PEERS[peer]
    torch.manual_seed(0)
    gradient, weight = torch.randn(shape), nn.Parameter(torch.zeros(shape))
    weight.grad = gradient.clone()
    options = {"momentum": 0.0, "weight_decay": 0.0, "adjust_lr_fn": adjust, "wire_dtype": torch.float32}
    optimizer.Muon([{"params": [weight], "split": split}], lr=LR, **options).step()
    expected = -published(gradient, {"original": original, "match_rms_adamw": rms}[adjust])
    torch.testing.assert_close(weight.double(), expected, rtol=1e-4, atol=1e-5)
    whole = nn.Parameter(torch.zeros(shape))
    whole.grad = gradient.clone()
    optimizer.Muon([whole], lr=LR, **options).step()
    assert (whole - expected).norm() > 0.1 * expected.norm()  # the split is no trifle

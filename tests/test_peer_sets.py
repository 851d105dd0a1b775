"""Coefficient sets with a peer's name against the peer's published iteration, written out here as a
program.
"""

from __future__ import annotations

import pytest
import torch

from tests.ranks import package

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# name -> (divisor of the norm, what is added to it, triples), read from microsoft/dion 0a059a4
# (polar_express.py),
# KellerJordan/modded-nanogpt f411b3d (train_gpt.py) and karpathy/nanochat 92d63d4 (optim.py)
PUBLISHED = {
    "polar_express_dion": (1.02, 1e-8, POLAR_EXPRESS),
    "polar_express_modded_nanogpt": (1.02, 1e-6, POLAR_EXPRESS),
    "polar_express_nanochat": (1.01, 1e-6, POLAR_EXPRESS),
}
# Converged sets: another divisor of the norm changes little. DeepSeek-V4's report as Emerging-Optimizers
# quotes it (muon_utils.py), and KellerJordan/modded-nanogpt's pull request 349 (b5e4e7e,
# records/080626_ANVIL/train_gpt.py)
CONVERGED = {
    "deepseek_v4": (1.0, 1e-7, ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2),
    "anvil": (
        1.02,
        1e-6,
        (
            (4.447393659248992, -8.6592834371539, 4.484453950130224),
            (3.0003381342927278, -3.180035633097396, 0.959298544318381),
            (3.5997737315685896, -5.129961939372116, 1.94624091228252),
            (3.238755176943844, -3.988313284248892, 1.4073635628857994),
            (2.558664852492382, -2.5626431459988033, 0.9815933969681315),
            (2.38665846260798, -2.223181615281231, 0.835162681686761),
        ),
    ),
}
SHAPES = [(48, 32), (64, 128), (128, 128), (256, 1024), (2, 24, 40)]


def published(U: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    """The peer's iteration on (..., R, C), every product rounded to `dtype`; the result in fp64."""
    divisor, eps, triples = (PUBLISHED | CONVERGED)[name]
    X = U.to(dtype)
    tall = U.shape[-2] > U.shape[-1]
    X = X / (X.norm(dim=(-2, -1), keepdim=True) * divisor + eps)
    for a, b, c in triples:
        A = X.mT @ X if tall else X @ X.mT
        B = b * A + c * (A @ A)
        X = a * X + (X @ B if tall else B @ X)
    return X.double()


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def gaussian(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_name_gives_the_numbers_of_its_peer(name: str, shape: tuple[int, ...]) -> None:
    """fp32 against the peer's program in fp64; the other divisor is .02 to .06 away."""
    U = gaussian(shape)
    ours = package().orthogonalize(U, name, dtype=torch.float32).double()
    assert difference(ours, published(U, name, torch.float64)) < 1e-4
    for other in [other for other in PUBLISHED if PUBLISHED[other][0] != PUBLISHED[name][0]]:
        assert difference(ours, published(U, other, torch.float64)) > 0.02


@pytest.mark.parametrize("shape", [(48, 32), (64, 128), (256, 1024), (2, 24, 40)], ids=str)
@pytest.mark.parametrize("name", CONVERGED)
def test_a_converged_set_gives_the_numbers_of_its_peer(name: str, shape: tuple[int, ...]) -> None:
    """In fp32 against the peer's program in fp64, which takes no options but the name."""
    U = gaussian(shape)
    ours = package().orthogonalize(U, name, dtype=torch.float32).double()
    assert difference(ours, published(U, name, torch.float64)) < 1e-4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_peer_is_as_far_from_ours_as_bf16_is_from_exact(
    name: str, shape: tuple[int, ...]
) -> None:
    U = gaussian(shape)
    rounded, exact = published(U, name, torch.bfloat16), published(U, name, torch.float64)
    ours = package().orthogonalize(U, name, dtype=torch.float16).double()
    assert difference(rounded, exact) < 0.06 and difference(ours, rounded) < 1.25 * difference(
        rounded, exact
    )

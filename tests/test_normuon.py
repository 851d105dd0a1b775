"""NorMuon's normalisation: against fp64, with the whole matrix's norm, and safe for zeros."""
from __future__ import annotations

import math

import pytest
import torch

from tests.paths import quiet

pytestmark = quiet

BETA2, EPS = 0.95, 1e-8
every_shape = pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 50), (2, 40, 3), (2, 3, 70), (1, 40, 2)], ids=str)


@pytest.fixture
def normalize(part, path, monkeypatch):
    """The function, on short blocks, so that short rows have many."""
    monkeypatch.setattr(part("kernels.elementwise.norms"), "BLOCK", 16)
    return part("kernels.elementwise.norms").normalize


def exact(O, V):
    """Return the result and the new V in fp64 (arXiv 2510.05491, norm preserving)."""
    O, V = O.double(), V.double()
    V = BETA2 * V + (1 - BETA2) * O.square().mean(dim=2, keepdim=True)
    N = O / (V.sqrt() + EPS)
    return N * torch.linalg.matrix_norm(O, keepdim=True) / torch.linalg.matrix_norm(N, keepdim=True), V


def test_each_matrix_has_the_beta2_of_its_group(normalize, part, device):
    O, V = torch.randn(3, 20, 33, device=device), torch.rand(3, 20, 1, device=device)
    count, betas, groups = part("kernels.elementwise.multi_tensor").NUMBERS, [0.9, 0.5], [1, 0, 1]
    numbers = torch.full((2, count), math.nan)
    numbers[:, 2] = torch.tensor(betas)
    numbers[:, 3] = 1 - torch.tensor(betas, dtype=torch.float64)
    together, v = O.clone(), V.clone()
    offsets = torch.tensor([count * n for n in groups], device=device)
    normalize(together, v, numbers.flatten().to(device), EPS, offsets)
    for i, group in enumerate(groups):
        one, own = O[i:i + 1].clone(), V[i:i + 1].clone()
        normalize(one, own, betas[group], EPS)
        assert torch.equal(one, together[i:i + 1]) and torch.equal(own, v[i:i + 1])


@pytest.mark.kernels_ci
@every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_against_fp64(normalize, device, shape, dtype):
    O, V = torch.randn(shape, device=device).to(dtype), torch.rand(*shape[:2], 1, device=device)
    result, second = exact(O, V)
    normalize(O, V, BETA2, EPS)
    torch.testing.assert_close(V.double(), second, rtol=1e-6, atol=0)
    torch.testing.assert_close(O.double(), result, rtol=torch.finfo(dtype).eps + 2e-6, atol=1e-7)


def test_several_steps_of_transposed_memory(normalize, device):
    stack, V = torch.randn(2, 9, 5, device=device).mT, torch.zeros(1, 5, 2, device=device).permute(2, 1, 0)
    second = V.clone()
    for _ in range(3):
        stack.normal_()
        result, second = exact(stack, second)
        normalize(stack, V, BETA2, EPS)
        torch.testing.assert_close(stack.double(), result, rtol=1e-5, atol=1e-7)


def test_zeros_stay_zero(normalize, device):
    """Peers' defect: a zero gradient gave NaN. A zero row in another matrix is as harmless."""
    O, V = torch.randn(3, 6, 10, device=device), torch.zeros(3, 6, 1, device=device)
    O[1], O[2, 3] = 0, 0
    norm = torch.linalg.matrix_norm(O)
    for eps in (EPS, 0.0):
        normalize(O, V, BETA2, eps)
        assert O.isfinite().all() and V.isfinite().all()
        assert not O[1].any() and not O[2, 3].any()
        torch.testing.assert_close(torch.linalg.matrix_norm(O), norm)


def test_nan_stays_in_its_matrix(normalize, device):
    O, V = torch.randn(3, 6, 10, device=device), torch.rand(3, 6, 1, device=device)
    O[1, 2, 3] = float("nan")
    normalize(O, V, BETA2, EPS)
    assert O[1].isnan().any() and O[[0, 2]].isfinite().all() and V[[0, 2]].isfinite().all()


@every_shape
def test_one_matrix_has_the_same_bits_in_every_batch(normalize, device, shape):
    O = torch.randn(4, *shape[1:], device=device)
    V = torch.rand(4, shape[1], 1, device=device)
    alone = [(o[None].clone(), v[None].clone()) for o, v in zip(O, V)]
    normalize(O, V, BETA2, EPS)
    for i, (o, v) in enumerate(alone):
        normalize(o, v, BETA2, EPS)
        assert torch.equal(O[i], o[0]) and torch.equal(V[i], v[0])


def test_an_empty_stack(normalize, device):
    normalize(torch.empty(0, 3, 4, device=device), torch.empty(0, 3, 1, device=device), BETA2, EPS)

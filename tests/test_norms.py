"""Sums of squares of rows, columns and matrices, and divisions by them: against fp64, in the bits of a matrix alone."""
from __future__ import annotations

import math

import pytest
import torch

from tests.paths import quiet

pytestmark = quiet

SHAPES = [(1, 1, 1), (3, 7, 50), (2, 40, 3), (2, 3, 70), (1, 40, 2), (4, 33, 17)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


@pytest.fixture
def norms(part, path, monkeypatch):
    """The module, on short blocks, so that short rows have many."""
    module = part("kernels.elementwise.norms")
    for name, size in (("TILE", 64), ("WIDTH", 8), ("LONGEST", 16), ("STEPS", 2), ("BLOCK", 16)):
        monkeypatch.setattr(module, name, size)
    return module


def close(ours, expected, dtype=torch.float32):
    torch.testing.assert_close(ours.double(), expected, rtol=torch.finfo(dtype).eps + 3e-6, atol=1e-7)


@pytest.mark.kernels_ci
@every_shape
@every_dtype
@pytest.mark.parametrize("per", ["row", "column"])
@pytest.mark.parametrize("weighted", [False, True])
def test_squares(norms, device, shape, dtype, per, weighted):
    X = torch.randn(shape, device=device).to(dtype)
    N, R, C = shape
    dim, other = (2, (N, 1, C)) if per == "row" else (1, (N, R, 1))
    factors = torch.rand(other, device=device) if weighted else None
    wide = X.double() * (1 if factors is None else factors.double())
    found = norms.squares(X, per, factors)
    close(found, wide.square().sum(dim, keepdim=True))
    close(norms.total(found), wide.square().sum((1, 2), keepdim=True))
    for i in range(N):
        alone = norms.squares(X[i:i + 1].clone(), per, None if factors is None else factors[i:i + 1].clone())
        assert torch.equal(alone, found[i:i + 1]) and torch.equal(norms.total(alone), norms.total(found)[i:i + 1])


@every_shape
@every_dtype
def test_scale_rounds_once(norms, device, shape, dtype):
    X = torch.randn(shape, device=device).to(dtype)
    N, R, C = shape
    rows, columns = torch.rand(N, R, 1, device=device), torch.rand(N, 1, C, device=device)
    expected = ((X.float() * rows) * columns).to(dtype)
    exact = X.double() * rows.double() * columns.double()
    norms.scale(X, rows, columns)
    assert torch.equal(X, expected)
    # Half a unit of the result, beside two roundings in fp32
    torch.testing.assert_close(X.double(), exact, rtol=torch.finfo(dtype).eps / 2 + 3e-7, atol=1e-7)


@every_shape
@every_dtype
def test_difference(norms, device, shape, dtype):
    W, O = torch.randn(shape, device=device), torch.randn(shape, device=device).to(dtype)
    factors = torch.rand(shape[0], 1, 1, device=device)
    found = norms.difference_squares(W, O, factors)
    close(found, (W.double() - factors.double() * O.double()).square().sum(2, keepdim=True))
    for i in range(shape[0]):
        one = slice(i, i + 1)
        assert torch.equal(norms.difference_squares(W[one].clone(), O[one].clone(), factors[one].clone()), found[one])


@pytest.mark.kernels_ci
@every_shape
@every_dtype
@pytest.mark.parametrize("grouped", [False, True])
def test_elements_are_divided_by_their_moments(norms, part, device, shape, dtype, grouped):
    O, V = torch.randn(shape, device=device).to(dtype), torch.rand(shape, device=device)
    N, R, C = shape
    count, betas = part("kernels.elementwise.multi_tensor").NUMBERS, [0.9, 0.5]
    numbers = torch.full((2, count), math.nan)
    numbers[:, 2], numbers[:, 3] = torch.tensor(betas), 1 - torch.tensor(betas)
    numbers, of = numbers.flatten().to(device), [i % 2 for i in range(N)] if grouped else [0] * N
    groups = torch.tensor([count * g for g in of], device=device) if grouped else None
    beta = torch.tensor([betas[g] for g in of], dtype=torch.float64, device=device).view(N, 1, 1)
    second = beta * V.double() + (1 - beta) * O.double().square()
    A = O.double() / (second.sqrt() + 1e-8)
    expected = A * math.sqrt(R * C) / A.square().sum((1, 2), keepdim=True).sqrt()
    separate = [(O[i:i + 1].clone(), V[i:i + 1].clone()) for i in range(N)]
    norms.divide_by_moments(O, V, numbers, 1e-8, groups)
    close(V, second)
    torch.testing.assert_close(O.double(), expected, rtol=torch.finfo(dtype).eps + 1e-5, atol=1e-6)
    for i, (o, v) in enumerate(separate):
        norms.divide_by_moments(o, v, numbers, 1e-8, None if groups is None else groups[i:i + 1].clone())
        assert torch.equal(o, O[i:i + 1]) and torch.equal(v, V[i:i + 1])


def test_zeros_stay_zero(norms, device):
    O, V = torch.zeros(2, 5, 6, device=device), torch.zeros(2, 5, 6, device=device)
    norms.divide_by_moments(O, V, torch.tensor([0.0, 0.0, 0.9, 0.1], device=device), 1e-8)
    assert not O.any() and not V.any()
    for shape in [(0, 3, 4), (2, 0, 4), (2, 3, 0)]:
        X = torch.zeros(shape, device=device)
        assert not norms.squares(X, "row").any() and not norms.squares(X, "column").any()
        norms.scale(X, X.new_ones(shape[0], shape[1], 1), X.new_ones(shape[0], 1, shape[2]))
        norms.divide_by_moments(X, X.clone(), torch.zeros(8, device=device), 1e-8)

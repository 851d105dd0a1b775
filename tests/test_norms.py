"""Sums of squares of rows, columns and matrices, and divisions by them: against fp64, in the bits of a matrix alone."""
from __future__ import annotations

import math

import pytest
import torch

from tests.paths import INTERPRETED, quiet

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


@pytest.fixture
def keep_norms(norms, part, monkeypatch):
    """The function, on short blocks as well."""
    module = part("kernels.elementwise.weight_update")
    for name in ("TILE", "BLOCK"):
        monkeypatch.setattr(module, name, getattr(norms, name))
    return module.keep_norms


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


def numbers_of(part, N, device):
    """Numbers of two groups, with the first element of each matrix's, lr and beta2."""
    count, lrs, betas = part("kernels.elementwise.multi_tensor").NUMBERS, [0.02, 0.3], [0.9, 0.5]
    numbers = torch.full((2, count), math.nan)
    numbers[:, 0], numbers[:, 2], numbers[:, 3] = torch.tensor(lrs), torch.tensor(betas), 1 - torch.tensor(betas)
    of = [i % 2 for i in range(N)]
    lr, beta = (torch.tensor([x[g] for g in of], dtype=torch.float64).view(N, 1, 1).to(device) for x in (lrs, betas))
    return numbers.flatten().to(device), torch.tensor([count * g for g in of], device=device), lr, beta


@pytest.mark.kernels_ci
@every_shape
@every_dtype
@pytest.mark.parametrize("apart", [False, True])
def test_factors_that_keep_norms(keep_norms, part, device, shape, dtype, apart):
    """Of weights in a stack, and where they are stored: equal bits, in any stack."""
    N, R, C = shape
    W, O = torch.randn(shape, device=device), torch.randn(shape, device=device).to(dtype)
    radius = torch.rand(N, 1, 1, device=device).repeat(1, R, 1)
    radius[::2] = 0  # at the first step
    numbers, groups, lr, _ = numbers_of(part, N, device)
    norm = W.double().square().sum((1, 2), keepdim=True).sqrt()
    r = torch.where(radius[:, :1] > 0, radius[:, :1].double(), norm)
    length = lr * r / O.double().square().sum((1, 2), keepdim=True).sqrt()
    expected = r / (W.double() - length * O.double()).square().sum((1, 2), keepdim=True).sqrt()
    keep, step = (torch.full((N, 1, 1), math.nan, device=device) for _ in "12")
    separate = [(W[i:i + 1].clone(), O[i:i + 1].clone(), radius[i:i + 1].clone()) for i in range(N)]
    stored = part("kernels.elementwise.row_scattered").ScatteredMatrices([w.clone() for w in W]) if apart else W
    keep_norms(stored, O, radius, keep, step, numbers, groups)
    torch.testing.assert_close(keep.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(step.double(), expected * length, rtol=1e-5, atol=0)
    close(radius, r.expand(-1, R, 1))
    for i, (w, o, own) in enumerate(separate):
        k, s = keep[i:i + 1] * 0, step[i:i + 1] * 0
        keep_norms(w, o, own, k, s, numbers, groups[i:i + 1].clone())
        assert torch.equal(k, keep[i:i + 1]) and torch.equal(s, step[i:i + 1]) and torch.equal(own, radius[i:i + 1])


@pytest.mark.parametrize("shape", [(40, 24), (1, 56)])
def test_a_weight_is_read_in_the_dtype_of_bf16_updates(keep_norms, part, path, device, shape):
    """Where it is stored, and where it was sent to in bf16: equal bits, whatever the width of accesses."""
    if INTERPRETED and path == "triton":
        pytest.skip("the interpreter rounds to bf16 towards zero")
    W, O = torch.randn(1, *shape, device=device), torch.randn(1, *shape, device=device).bfloat16()
    stored = part("kernels.elementwise.row_scattered").ScatteredMatrices([W[0].clone()])
    found = []
    for weight in (stored, W, W.bfloat16(), W.bfloat16().float()):
        one = [torch.zeros(1, n, 1, device=device) for n in (shape[0], 1, 1)]
        keep_norms(weight, O, *one, torch.tensor([0.1], device=device))
        found.append(one[1:])
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0])) and one[0] > 0


@every_shape
@every_dtype
def test_columns_are_rows_of_the_transpose(norms, part, device, shape, dtype):
    N, R, C = shape
    O, V = torch.randn(shape, device=device).to(dtype), torch.rand(N, 1, C, device=device)
    numbers, groups, _, beta = numbers_of(part, N, device)
    second = beta * V.double() + (1 - beta) * O.double().square().mean(1, keepdim=True)
    Y = O.double() / (second.sqrt() + 1e-8)
    norm = O.double().square().sum((1, 2), keepdim=True) / Y.square().sum((1, 2), keepdim=True)
    separate = [(O[i:i + 1].clone(), V[i:i + 1].clone(), groups[i:i + 1].clone()) for i in range(N)]
    norms.normalize_columns(O, V, numbers, 1e-8, groups)
    close(V, second)
    torch.testing.assert_close(O.double(), Y * norm.sqrt(), rtol=torch.finfo(dtype).eps + 1e-5, atol=1e-6)
    for i, (o, v, group) in enumerate(separate):
        norms.normalize_columns(o, v, numbers, 1e-8, group)
        assert torch.equal(o, O[i:i + 1]) and torch.equal(v, V[i:i + 1])


@every_shape
def test_factors_are_those_by_which_rows_are_multiplied(norms, device, shape):
    """And the matrix stays; likewise of `divide_by_moments`, wherever the moments are stored."""
    N, R, C = shape
    O, V = torch.randn(shape, device=device), torch.rand(N, R, 1, device=device)
    kept, other, factors = O.clone(), V.clone(), torch.full((N, R, 1), math.nan, device=device)
    norms.normalize(O, V, 0.9, 1e-8, None, factors)
    assert torch.equal(O, kept)
    norms.normalize(O, other, 0.9, 1e-8)
    assert torch.equal(O, kept * factors) and torch.equal(V, other)


@every_shape
def test_moments_may_stay_where_they_are_stored(norms, part, device, shape):
    O, V = torch.randn(shape, device=device), torch.rand(shape, device=device)
    whole, stack, size = O.clone(), V.clone(), torch.full((len(O), 1, 1), math.nan, device=device)
    stored = part("kernels.elementwise.row_scattered").ScatteredMatrices([v.clone() for v in V])
    numbers = torch.tensor([0.0, 0.0, 0.9, 0.1], device=device)
    norms.divide_by_moments(O, stored, numbers, 1e-8, None, size)
    norms.divide_by_moments(whole, stack, numbers, 1e-8)
    assert torch.equal(O * size, whole) and torch.equal(torch.stack(stored.unbind()), stack)


@every_shape
@every_dtype
@pytest.mark.parametrize("order", [("row",), ("column",), ("row", "column"), ("column", "row")])
def test_lines_are_divided_by_their_norms(norms, device, shape, dtype, order):
    X = torch.randn(shape, device=device).to(dtype)
    exact, alone = X.double(), X[-1:].clone()
    for per in order:
        exact = exact / (exact.square().sum(2 if per == "row" else 1, keepdim=True) + 1e-7).sqrt()
    norms.equalize(X, order, 1e-7)
    norms.equalize(alone, order, 1e-7)
    torch.testing.assert_close(X.double(), exact, rtol=torch.finfo(dtype).eps / 2 + 3e-6, atol=1e-7)
    assert torch.equal(alone, X[-1:])


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


def test_moments_do_not_depend_on_the_default_dtype(norms, device):
    """Factors were kept in it."""
    O, V = torch.randn(2, 5, 6, device=device), torch.rand(2, 5, 6, device=device)
    numbers, before, results = torch.tensor([0.0, 0.0, 0.9, 0.1], device=device), torch.get_default_dtype(), []
    try:
        for dtype in (before, torch.bfloat16):
            torch.set_default_dtype(dtype)
            results.append(O.clone())
            norms.divide_by_moments(results[-1], V.clone(), numbers, 1e-8)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(*results)


def test_zeros_stay_zero(norms, keep_norms, device):
    O, V = torch.zeros(2, 5, 6, device=device), torch.zeros(2, 5, 6, device=device)
    numbers = torch.tensor([0.0, 0.0, 0.9, 0.1], device=device)
    norms.divide_by_moments(O, V, numbers, 1e-8)
    norms.normalize_columns(O, V[:, :1], numbers, 1e-8)
    norms.equalize(O, ("column", "row"), 0.0)
    assert not O.any() and not V.any()
    sent = [torch.full((2, n, 1), math.nan, device=device) for n in (5, 1, 1)]
    sent[0].zero_()
    keep_norms(V, O, *sent, numbers)
    assert not any(t.any() for t in sent)
    for shape in [(0, 3, 4), (2, 0, 4), (2, 3, 0)]:
        X = torch.zeros(shape, device=device)
        assert not norms.squares(X, "row").any() and not norms.squares(X, "column").any()
        norms.scale(X, X.new_ones(shape[0], shape[1], 1), X.new_ones(shape[0], 1, shape[2]))
        norms.divide_by_moments(X, X.clone(), torch.zeros(8, device=device), 1e-8)
        norms.normalize_columns(X, X[:, :1], torch.zeros(8, device=device), 1e-8)
        norms.equalize(X, ("row", "column"), 1e-7)
        keep_norms(X, X, X[:, :, :1], X, X, torch.zeros(8, device=device))


def test_nan_stays_in_its_matrix(norms, keep_norms, device):
    W, O = torch.randn(2, 6, 10, device=device), torch.randn(2, 6, 10, device=device)
    O[1, 2, 3] = math.nan
    numbers, sent = torch.tensor([0.1, 0.0, 0.9, 0.1], device=device), torch.zeros(2, 2, 1, 1, device=device)
    V, columns, radius = torch.rand_like(W), torch.rand(2, 1, 10, device=device), torch.zeros(2, 6, 1, device=device)
    keep_norms(W, O, radius, *sent, numbers)
    norms.divide_by_moments(O, V, numbers, 1e-8)
    norms.normalize_columns(O, columns, numbers, 1e-8)
    norms.equalize(O, ("column", "row"), 1e-7)
    assert sent[:, 1].isnan().all() and O[1].isnan().any()
    assert all(t.isfinite().all() for t in (sent[:, 0], V[0], columns[0], radius[0], O[0]))

"""Scaling before the iteration: what is cast, and by what it is multiplied yet, give Frobenius norm 1."""
from __future__ import annotations

import pytest
import torch

from tests.paths import PATHS, quiet, take

pytestmark = quiet
KINDS = ("normal", "spike", "one element", "few rows", "unlike the sample", "zeros")
MULTIPLES = (1.0, 3e-37, 1e-20, 1e20, 3e30)


@pytest.fixture(params=PATHS)
def norm(request, part, monkeypatch):
    take(request.param, monkeypatch)
    return part("kernels.elementwise.scaling")


def matrix_of(kind, R, C):
    """A matrix of which a sample tells something, little, or nothing."""
    U = torch.randn(R, C)
    if kind == "spike":
        U[0, 0] = 1000.0
    elif kind == "one element":
        U = torch.zeros(R, C)
        U[R - 1, C - 1] = -0.7
    elif kind == "few rows":
        U[torch.arange(R) % 5 != 3] = 0.0
    elif kind == "unlike the sample":
        U[:, 16:] *= 1e5
        U[:, :16] *= 1e-5
    return U if kind != "zeros" else torch.zeros(R, C)


@pytest.mark.parametrize("multiple", MULTIPLES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("R, C", [(40, 72), (72, 40), (33, 300), (1, 50)], ids=str)
def test_what_is_cast_and_its_scale_make_norm_one(norm, device, R, C, kind, multiple):
    """Whatever a sample says, also beyond the range of 16 bits; no element loses what 16 bits hold of it."""
    torch.manual_seed(0)
    U = torch.stack([matrix_of(name, R, C) for name in (kind, "normal")]).to(device) * multiple
    X = torch.empty(2, R, C, dtype=torch.float16, device=device)
    scales = torch.full((2,), float("nan"), device=device)
    norm.unit_norm(U, X, scales, 1e-7)
    exact = U.double() / U.double().norm(dim=(1, 2), keepdim=True).clamp(min=1e-300)
    error = (X.double() * scales.double().view(-1, 1, 1) - exact).abs()
    assert X.isfinite().all() and scales.square().isfinite().all()  # by the square X X^T is multiplied
    assert (error <= 2.0**-11 * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_power_of_two_changes_no_bit(norm, device, kind):
    torch.manual_seed(0)
    U, results = matrix_of(kind, 48, 96)[None].to(device), []
    for exponent in (0, 7, -30, 60):
        X, scales = torch.empty(1, 48, 96, dtype=torch.float16, device=device), torch.empty(1, device=device)
        norm.unit_norm(U * 2.0**exponent, X, scales, 1e-7)
        results.append(X.float() * scales)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_all_matrices_at_once_give_each_its_bits(part, dtype, turned):
    """Out of the range of squares and within it, beside zeros and NaN, with room for squares or without."""
    norm = part("kernels.elementwise.scaling")
    torch.manual_seed(0)
    U = torch.stack([matrix_of(kind, 24, 40) * multiple for kind in KINDS for multiple in MULTIPLES]).to(dtype)
    U[-1] = float("nan")
    U = U.mT.contiguous().mT if turned else U
    expected, scales = torch.empty(U.shape), torch.empty(len(U))
    for i, x in enumerate(expected):
        norm.unit_norm_torch(U[i:i + 1], x[None], scales[:1], 1e-7)
        again = torch.empty_like(x)
        norm.unit_norm_torch(U[i:i + 1].contiguous(), again[None], scales[:1], 1e-7)
        assert torch.equal(again.nan_to_num(7.0), x.nan_to_num(7.0))  # wherever its rows lie
    for scratch in (None, torch.empty(U.shape)):
        X = torch.empty(U.shape)
        norm.unit_norm(U, X, scales.zero_(), 1e-7, scratch)
        assert torch.equal(X.nan_to_num(7.0), expected.nan_to_num(7.0)) and (scales == 1).all()
    assert expected.isnan().all((1, 2)).tolist() == [False] * (len(U) - 1) + [True]

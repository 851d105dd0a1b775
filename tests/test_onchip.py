"""What follows a Gram matrix in one program: `polar` as a whole is tested in test_orthogonalize.py."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests import paths
from tests.ranks import everywhere

pytestmark = [paths.quiet, *([pytest.mark.interpreter] if paths.INTERPRETED else [])]

TRIPLES = ((8.2, -23.0, 16.4), (4.0, -2.9, 0.55), (3.9, -2.8, 0.52))  # of polar_express, rounded


@pytest.fixture
def on_chip(part):
    if reason := paths.why_no_triton():
        pytest.skip(reason)
    return part("kernels.onchip.polar")


def gram_matrices(N, n, device):
    """Symmetric in every bit, of trace 1, in memory whose rows begin apart."""
    X = torch.randn(N, n, 2 * n, device=device)
    X /= X.flatten(1).norm(dim=1)[:, None, None]
    A = torch.zeros(N, n, n + 8, dtype=torch.float16, device=device)[:, :, :n]
    return A.copy_((X @ X.mT).tril() + (X @ X.mT).tril(-1).mT)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("n", [33, 64, 70, 128])
def test_an_interval_is_the_product_of_its_polynomials(on_chip, device, n, count):
    torch.manual_seed(n)
    A = gram_matrices(3, n, device)
    before, Q = A.clone(), torch.full_like(A, 7.0)
    on_chip.follow(A, Q, TRIPLES[:count])
    now, expected = A.double(), torch.eye(n, dtype=torch.float64, device=device)
    for a, b, c in TRIPLES[:count]:
        P = a * torch.eye(n, dtype=torch.float64, device=device) + b * now + c * now @ now
        now, expected = P @ now @ P, expected @ P
    assert torch.equal(A, before) and torch.equal(Q, Q.mT)
    assert (Q - expected).abs().max() <= 2.5e-3 * count * expected.abs().max()
    on_chip.follow(A[1:2], alone := torch.empty_like(A[:1]), TRIPLES[:count])
    assert torch.equal(alone[0], Q[1])


def test_who_goes_through_it(on_chip, device, monkeypatch):
    monkeypatch.setenv("OPTIMIZER_KERNELS", "triton")
    assert on_chip.follows(gram_matrices(1, 128, device)) and not on_chip.follows(gram_matrices(1, 129, device))
    assert not on_chip.follows(torch.zeros(1, 8, 8, device=device))
    monkeypatch.setenv("OPTIMIZER_KERNELS", "torch")
    assert not on_chip.follows(gram_matrices(1, 8, device))


def test_how_far_ahead_by_the_shared_memory(on_chip):
    """H200, A100 in bf16 and in fp32, RTX 4090, and a GPU with less than either way takes."""
    far, near = (4, {}), (1, {"num_stages": 1})
    expected = {(232448, 4): far, (166912, 2): far, (166912, 4): near, (101376, 2): near, (49152, 2): None}
    assert {key: on_chip.pipeline_depth(key[0], 128 * 128, key[1]) for key in expected} == expected


@pytest.mark.parametrize("long, most", [(70, 1), (140, 3)])
def test_matrices_that_do_not_fit_the_chip_take_products(on_chip, part, device, monkeypatch, long, most):
    """In the iteration that the chip takes: square matrices are in the standard one there."""
    polar = part("newton_schulz.orthogonalize")
    monkeypatch.setenv("OPTIMIZER_KERNELS", "triton")
    everywhere(monkeypatch, part("newton_schulz.method"), "restart_interval", lambda *about: most)
    X = torch.randn(2, 70, long, device=device)
    usual = polar.orthogonalize(X, dtype=torch.float16)
    assert on_chip.supports(X, torch.float16)
    monkeypatch.setattr(on_chip, "shared_bytes", lambda kind, index: 49152)
    monkeypatch.setattr(on_chip, "polar", None)
    paths.forget(polar, monkeypatch)
    assert on_chip.supports(X[:, :64, :64], torch.float16) and not on_chip.supports(X, torch.float16)
    assert (polar.orthogonalize(X, dtype=torch.float16) - usual).norm() < 5e-3 * usual.norm()


def test_the_shared_memory_of_a_device(on_chip, monkeypatch):
    """Not every torch knows it."""
    for properties, expected in (({"shared_memory_per_block_optin": 101376}, 101376), ({}, 65536)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, p=properties: SimpleNamespace(**p))
        assert on_chip.shared_bytes.__wrapped__("cuda", 0) == expected
    assert on_chip.shared_bytes("cpu", None) == 65536

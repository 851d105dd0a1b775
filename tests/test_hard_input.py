"""Input that is empty, thin, scattered, not finite or very large: a right result, and neighbours that notice nothing.

A matrix has the same bits whatever else is computed with it; the batch itself is tested in test_orthogonalize.py.
"""
from __future__ import annotations

import pytest
import torch

from tests.paths import quiet, take
from tests.test_orthogonalize import exact

pytestmark = quiet

F32, F16 = torch.float32, torch.float16
INF, NAN = float("inf"), float("nan")
SETS = ["polar_express", "turbo", "cubic"]
JORDAN = (3.4445, -4.7750, 2.0315)


# Views, vectors, nothing


VIEWS = {
    "flipped rows": lambda X: X.flip(1),
    "flipped columns": lambda X: X.flip(2),
    "transposed": lambda X: X.mT,
    "every second matrix": lambda X: X[::2],
    "every third column": lambda X: X[:, :, ::3],
    "matrices innermost": lambda X: X.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "one matrix many times": lambda X: X[:1].expand(3, -1, -1),
    "one column many times": lambda X: X[:, :, :1].expand(-1, -1, 30),
    "a diagonal band": lambda X: X.as_strided((2, 10, 20), (500, 41, 1)),
    "overlapping windows": lambda X: X.as_strided((2, 10, 20), (7, 3, 1)),
    "an odd address": lambda X: X.flatten()[1:1 + 2 * 11 * 30].view(2, 11, 30),
}


@pytest.mark.parametrize("view", VIEWS)
def test_memory_of_any_layout(optimizer, device, path, small_tiles, view):
    """torch has no negative strides: flip makes a copy, and the polar factor of the flipped is the flipped factor."""
    X = VIEWS[view](torch.randn(4, 21, 40, device=device))
    before = X.clone()

    def polar(X):
        return optimizer.orthogonalize(X, JORDAN, 2 if path == "triton" else 5, dtype=F32)

    O = polar(X)
    assert O.is_contiguous() and torch.equal(X, before)
    torch.testing.assert_close(O, polar(before.contiguous()), rtol=1e-4, atol=1e-5)
    if view.startswith("flipped"):
        dim = 1 if view.endswith("rows") else 2
        torch.testing.assert_close(O.flip(dim), polar(X.flip(dim)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("shape", [(2, 1, 9), (2, 9, 1), (2, 1, 1), (1, 7), (40, 1)], ids=str)
def test_vectors(optimizer, part, device, path, small_tiles, name, shape):
    """R or C = 1: the only singular value is 1, so the result is p(1) X / ||X||."""
    X = torch.randn(shape, device=device)
    O = optimizer.orthogonalize(X, name, dtype=F32)
    torch.testing.assert_close(
        O.double(), exact(X, part("newton_schulz.orthogonalize").steps_of(name)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("shape", [(0, 4, 6), (3, 0, 6), (3, 4, 0), (0, 0, 0), (0, 4), (4, 0), (2, 0, 4, 6)], ids=str)
def test_nothing(optimizer, part, device, path, shape):
    orthogonalize = part("newton_schulz.orthogonalize")
    X = torch.empty(shape, device=device)
    O = optimizer.orthogonalize(X)
    assert O.shape == X.shape and O.dtype == X.dtype and O is not X
    if len(shape) == 3:
        orthogonalize.orthogonalize_([X], orthogonalize.steps_of("turbo"))
        part("kernels.elementwise.norms").normalize(X, torch.zeros(*shape[:2], 1, device=device), 0.95, 1e-8)


# Not finite: the matrix itself is lost, its neighbours have the bits that they have without it


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("shape", [(3, 12, 40), (3, 40, 12), (3, 20, 20)], ids=str)
@pytest.mark.parametrize("bad, dtype", [(NAN, F32), (INF, F32), (-INF, F32), (NAN, F16), (INF, F16)], ids=str)
def test_one_bad_matrix_touches_no_other(optimizer, device, name, shape, bad, dtype):
    """Wherever it lies, and also not through memory that a later call uses again."""
    check_neighbours(lambda X: optimizer.orthogonalize(X, name, dtype=dtype), torch.randn(shape, device=device), bad,
                     places=range(3))


@pytest.mark.interpreter
@pytest.mark.parametrize("choice, shape", [((JORDAN, 2), (3, 18, 20)), ((JORDAN, 2), (3, 40, 12)),
                                           (("turbo",), (3, 5, 20))], ids=str)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_one_bad_matrix_touches_no_other_in_triton(optimizer, device, small_tiles, monkeypatch, choice, shape, bad):
    take("triton", monkeypatch)
    check_neighbours(lambda X: optimizer.orthogonalize(X, *choice, dtype=F16), torch.randn(shape, device=device), bad,
                     places=[1])


def check_neighbours(polar, X, bad, places):
    """Spoil one matrix of a batch after another; the others keep their bits, then and afterwards."""
    clean = polar(X)
    for place in places:
        spoilt = X.clone()
        spoilt[place, -1, -1] = bad
        O = polar(spoilt)
        others = [i for i in range(len(X)) if i != place]
        assert O[place].isnan().any() and torch.equal(O[others], clean[others])
    assert torch.equal(polar(X), clean)


@pytest.mark.parametrize("size", [3e38, 1e-44], ids=str)
def test_the_ends_of_the_range_are_no_bad_input(optimizer, part, device, path, small_tiles, size):
    """Largest and subnormal numbers beside ordinary ones."""
    X = torch.randn(3, 12, 40, device=device)
    clean = optimizer.orthogonalize(X, dtype=F32)
    X[1] = size * X[1].sign()
    O = optimizer.orthogonalize(X, dtype=F32)
    assert torch.equal(O[[0, 2]], clean[[0, 2]])
    steps = part("newton_schulz.orthogonalize").steps_of("polar_express")
    torch.testing.assert_close(O[1].double(), exact(X[1].sign(), steps), rtol=1e-3, atol=1e-4)


def weights_after(optimizer, device, gradients, name="Muon"):
    """Two steps of two iterations with these gradients; the weights."""
    weights = [torch.nn.Parameter(torch.full_like(g, 0.5)) for g in gradients]
    opt = getattr(optimizer, name)(weights, lr=0.1, ns_coefficients=JORDAN, ns_steps=2)
    for _ in range(2):
        for w, g in zip(weights, gradients):
            w.grad = g.clone()
        opt.step()
    return [w.detach() for w in weights]


@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_gradient_spoils_one_weight(optimizer, device, path, small_tiles, name, bad):
    """Three weights of one shape share every launch of a step."""
    gradients = [torch.randn(12, 18, device=device) for _ in range(3)]
    clean = weights_after(optimizer, device, gradients, name)
    gradients[1][3, 4] = bad
    spoilt = weights_after(optimizer, device, gradients, name)
    assert not spoilt[1].isfinite().all()
    assert torch.equal(spoilt[0], clean[0]) and torch.equal(spoilt[2], clean[2])


# The same bits in any company


@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_a_weight_has_the_same_bits_beside_any_others(optimizer, device, path, small_tiles, name):
    """Alone, first, last, between others of its shape and of other shapes."""
    A, B = torch.randn(12, 20, device=device), torch.randn(20, 12, device=device)
    a, b = (weights_after(optimizer, device, [g], name)[0] for g in (A, B))
    others = [torch.randn(s, device=device) for s in ((12, 20), (18, 18), (1, 7), (20, 12))]
    for company in ([A, *others, B], [*others[1:3], B, others[0], A, others[3]]):
        weights = weights_after(optimizer, device, company, name)
        for g, expected in ((A, a), (B, b)):
            assert torch.equal(next(w for w, other in zip(weights, company) if other is g), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(768, 3072), (3072, 768), (1000, 3001), (2048, 2048), (64, 64), (128, 1024),
                                   (250, 70)], ids=str)
@pytest.mark.parametrize("name", SETS)
def test_large_matrices_have_the_same_bits_in_any_place(optimizer, shape, name):
    X = torch.randn(9, *shape, device="cuda", dtype=torch.bfloat16)
    whole = optimizer.orthogonalize(X, name)
    for N in (1, 2, 5):
        for first in range(0, 9 - N, 3):
            assert torch.equal(optimizer.orthogonalize(X[first:first + N], name), whole[first:first + N])
    assert torch.equal(optimizer.orthogonalize(X.flip(0), name), whole.flip(0))


# More than 2^31 elements: 32-bit offsets would wrap (a peer's defect)


@pytest.mark.gpu
@pytest.mark.parametrize("R, C", [(64, 64), (200, 520)])
def test_more_than_2_31_elements_in_a_batch(optimizer, R, C):
    N = (1 << 31) // (R * C) + 3
    X = torch.zeros(N, R, C, device="cuda", dtype=torch.bfloat16)
    ends = [0, N // 2, N - 1]
    X[ends] = torch.randn(3, R, C, device="cuda").bfloat16()
    O = optimizer.orthogonalize(X)
    assert torch.equal(O[ends], optimizer.orthogonalize(X[ends])) and O.count_nonzero() <= 3 * R * C


@pytest.mark.gpu
@pytest.mark.parametrize("tall", [False, True])
def test_more_than_2_31_elements_in_a_matrix(optimizer, tall):
    """Its first and last columns are those of a small matrix, the rest is zero: so is its polar factor."""
    n, m, k = 16, (1 << 27) + 1000, 200
    X = torch.zeros((m, n) if tall else (n, m), device="cuda", dtype=torch.bfloat16)
    wide = X.mT if tall else X
    wide[:, :k], wide[:, -k:] = torch.randn(2, n, k, device="cuda").bfloat16()
    O = optimizer.orthogonalize(X)
    O = O.mT if tall else O
    few = optimizer.orthogonalize(torch.cat((wide[:, :k], wide[:, -k:]), dim=1))
    assert (torch.cat((O[:, :k], O[:, -k:]), dim=1) - few).float().norm() < 0.02 * few.float().norm()
    assert not O[:, k:-k].any()


@pytest.mark.gpu
def test_rows_of_more_than_2_31_elements(part):
    N, R, C = 3, 1 << 15, (1 << 15) // 3 * 2 + 8
    rows = part("kernels.elementwise.norms")
    U, V = torch.randn(N, R, C, device="cuda", dtype=torch.bfloat16), torch.rand(N, R, 1, device="cuda")
    last, v = U[-1:].clone(), V[-1:].clone()
    rows.normalize(U, V, 0.9, 1e-8)
    rows.normalize(last, v, 0.9, 1e-8)
    assert U.numel() > 1 << 31 and torch.equal(U[-1:], last) and torch.equal(V[-1:], v)


@pytest.mark.gpu
@pytest.mark.parametrize("strides", [(1 << 21, 1), (1, 1 << 21)], ids=str)
def test_rectangles_that_end_beyond_2_31_elements(part, strides):
    """What WeightUpdate and Copy reach lies more than 2^31 elements behind the first element of its own rectangle."""
    weight_update = part("kernels.elementwise.weight_update")
    memory = torch.zeros((1 << 31) + (1 << 22), dtype=F16, device="cuda")
    W = memory.as_strided((1025, 40) if strides[1] == 1 else (40, 1025), strides)
    values, U = torch.randn(W.shape, device="cuda").half(), torch.randn(W.shape, device="cuda").half()
    W.copy_(values)
    factors, near = torch.tensor([0.1, 0.98], device="cuda"), values.clone()
    weight_update.WeightUpdate([W], [U], [0.5])(factors)
    weight_update.WeightUpdate([near], [U], [0.5])(factors)
    assert torch.equal(W, near)
    part("kernels.elementwise.momentum").Copy([W], [U])()
    assert torch.equal(W, U) and memory.count_nonzero() <= W.numel()

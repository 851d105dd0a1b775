"""Weight decay and update over many rectangles: values, scales, one rounding, bits that do not depend on the cuts."""
from __future__ import annotations

import pytest
import torch

from tests.paths import INTERPRETED, quiet, take

pytestmark = quiet

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [(F32, F32), (F32, BF16), (BF16, BF16), (BF16, F32), (F16, F16)]
every_dtype = pytest.mark.parametrize("w_dtype, o_dtype", DTYPES, ids=str)
SHAPES = [(3, 5), (1, 7), (0, 4), (9, 1), (70, 90)]
SCALES = [0.2, 1.0, 3.0, 1.7, 0.31]


def factors_of(lr, weight_decay, device):
    """What the kernel reads from the device."""
    return torch.tensor([lr, 1.0 - lr * weight_decay], dtype=torch.float32, device=device)


@pytest.fixture
def update(part, path):
    return part("kernels.elementwise.weight_update")


@pytest.mark.kernels_ci
@every_dtype
def test_update_against_fp64(update, device, w_dtype, o_dtype):
    W = [torch.randn(c, r, device=device).to(w_dtype).mT for r, c in SHAPES]
    O = [torch.randn(r, c, device=device).to(o_dtype) for r, c in SHAPES]
    before, kept = [w.double() for w in W], [o.clone() for o in O]
    bound = update.WeightUpdate(W, O, SCALES)
    bound(factors_of(0.02, 0.1, device))
    bound(factors_of(0.5, 0.0, device))
    for w, old, o, scale in zip(W, before, O, SCALES):
        once = ((1 - 0.02 * 0.1) * old - 0.02 * scale * o.double()).to(w_dtype)
        exact = once.double() - 0.5 * scale * o.double()
        eps = torch.finfo(w_dtype).eps
        torch.testing.assert_close(w.double(), exact, rtol=2 * eps, atol=4 * eps)
    assert all(map(torch.equal, O, kept))


@every_dtype
def test_bits_do_not_depend_on_how_a_matrix_is_cut(update, device, w_dtype, o_dtype):
    R, C = 13, 67
    W, O = torch.randn(R, C, device=device).to(w_dtype), torch.randn(R, C, device=device).to(o_dtype)

    def run(pieces, contiguous):
        full = W.clone()
        w = [full[piece].clone() if contiguous else full[piece] for piece in pieces]
        update.WeightUpdate(w, [O[piece] for piece in pieces], [0.37] * len(pieces))(factors_of(0.013, 0.1, device))
        for piece, part_w in zip(pieces, w):
            full[piece] = part_w
        return full

    whole = run([(slice(0, R), slice(0, C))], False)
    by_rows = [(slice(a, b), slice(0, C)) for a, b in ((0, 1), (1, 4), (4, 4), (4, R))]
    by_columns = [(slice(0, R), slice(a, b)) for a, b in ((0, 7), (7, 8), (8, 31), (31, C))]
    for pieces in (by_rows, by_columns):
        assert all(torch.equal(whole, run(pieces, contiguous)) for contiguous in (True, False))


def test_scales_follow_their_rectangles_when_dtypes_are_mixed(update, device):
    """One launch per combination of dtypes: the order of the lists changes, the scales go with them."""
    W = [torch.zeros(3, 5, device=device, dtype=dtype) for dtype in (F32, BF16, F32, BF16, F32)]
    update.WeightUpdate(W, [torch.ones(3, 5, device=device) for _ in W], [1.0, 2.0, 4.0, 8.0, 16.0])(
        factors_of(0.5, 0.1, device))
    assert [w.unique().tolist() for w in W] == [[-0.5], [-1.0], [-2.0], [-4.0], [-8.0]]


def test_empty_lists(update):
    update.WeightUpdate([], [], [])(factors_of(0.1, 0.1, "cpu"))


@pytest.mark.interpreter
@every_dtype
def test_triton_and_torch_give_the_same_bits(part, device, monkeypatch, w_dtype, o_dtype):
    if INTERPRETED and w_dtype == BF16:
        pytest.skip("the interpreter rounds to bf16 towards zero")
    start = [torch.randn(r, c, device=device).to(w_dtype) for r, c in SHAPES]
    O, results = [torch.randn(r, c, device=device).to(o_dtype) for r, c in SHAPES], []
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        W = [w.clone() for w in start]
        part("kernels.elementwise.weight_update").WeightUpdate(W, O, SCALES)(factors_of(0.02, 0.1, device))
        results.append(W)
    assert all(map(torch.equal, *results))


@pytest.mark.interpreter
@pytest.mark.kernels_ci
@pytest.mark.parametrize("kind", ["rows", "matrices", "both factors"])
def test_factors_of_the_owner(part, device, monkeypatch, kind):
    """One for each row or rectangle, beside lr and scale; or one of O and one of W, which stand for all others."""
    shapes = [*SHAPES, (6, 16), (1, 8)]
    start, O = ([torch.randn(s, device=device) for s in shapes] for _ in "12")
    factors = [torch.rand(r if kind == "rows" else 1, 1, device=device) for r, _ in shapes]
    keeps = [torch.rand(1, 1, device=device) for _ in shapes] if kind == "both factors" else []
    numbers, scales, results = factors_of(0.02, 0.1, device), [*SCALES, 2.0, 0.7], []
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        W = [w.clone() for w in start]
        part("kernels.elementwise.weight_update").WeightUpdate(W, O, scales, factors=factors, keeps=keeps)(numbers)
        results.append(W)
        for i, (w, old, o, f) in enumerate(zip(W, start, O, factors)):
            old, o, f = old.double(), o.double(), f.double()
            exact = old * keeps[i].double() - o * f if keeps else 0.998 * old - 0.02 * scales[i] * f * o
            torch.testing.assert_close(w.double(), exact, rtol=1e-6, atol=1e-6)
    assert all(map(torch.equal, *results))


@every_dtype
def test_factors_of_rows_give_equal_bits_however_a_matrix_is_cut(update, device, w_dtype, o_dtype):
    R, C = 13, 64
    W, O = torch.randn(R, C, device=device).to(w_dtype), torch.randn(R, C, device=device).to(o_dtype)
    rows, results = torch.rand(R, 1, device=device), []
    cuts = [[(slice(0, R), slice(0, C))], [(slice(a, b), slice(0, C)) for a, b in ((0, 1), (1, 4), (4, R))],
            [(slice(0, R), slice(a, b)) for a, b in ((0, 7), (7, 40), (40, C))]]
    for pieces in cuts:
        w = W.clone()
        o, own = [O[piece].clone() for piece in pieces], [rows[piece[0]].clone() for piece in pieces]
        update.WeightUpdate([w[piece] for piece in pieces], o, [0.37] * len(o), factors=own)(
            factors_of(0.013, 0.1, device))
        results.append(w)
    assert all(torch.equal(w, results[0]) for w in results) and not torch.equal(results[0], W)


@pytest.mark.kernels_ci
@pytest.mark.interpreter
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_scaled_weights_have_the_bits_of_torch(part, device, monkeypatch, dtype, across):
    """Of rows and columns, without gaps and with gaps, and vectors; nothing beside a weight changes."""
    take("triton", monkeypatch)
    table, update = part("kernels.elementwise.multi_tensor"), part("kernels.elementwise.weight_update")
    memory = torch.randn(100, 128, device=device).to(dtype)
    if INTERPRETED and dtype == BF16:  # which rounds to bf16 towards zero
        memory = torch.randint(-8, 8, memory.shape, device=device).to(dtype)
    factors = torch.randint(0, 16, (256,), device=device) / 16
    factors = factors if INTERPRETED and dtype == BF16 else factors.sqrt()

    def weights(whole):  # (weight, dim of its factors)
        found = [(whole[:70, :64], 0), (whole[70:83, :31], 0), (whole[83:90].mT[:90], 0), (whole[70:80, 40], 0),
                 (whole[91, :100], 0), (whole[92:93], 0), (whole[60:60], 0)]
        return found + [(whole[93:, :9], 1), (whole[:30, 64:], 1)] * across

    twin, first, firsts = memory.clone(), 0, []
    for w, dim in weights(twin):
        of_w = factors[first:first + w.shape[dim]]
        w.mul_(of_w[:, None] if (w.ndim, dim) == (2, 0) else of_w)
        firsts.append((first, dim))
        first = (first + w.shape[dim]) % 128
    bound = update.ScaledWeights([w for w, _ in weights(memory)], firsts, factors)
    assert {launch.access for launch in bound.launches} == {table.ELEMENTS, table.VECTORS, table.ROW}
    bound()
    assert torch.equal(memory, twin)

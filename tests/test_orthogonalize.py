"""The polar factor: every set against its own polynomial in fp64, in every precision, at every scale, in any batch."""
from __future__ import annotations

import importlib
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.paths import forget, quiet, take
from tests.ranks import everywhere
from tests.spectra import KINDS, spectrum

pytestmark = quiet

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LENGTHS = {"jordan": 5, "quintic": 5, "polar_express": 5, "polar_express_nanochat": 5, "polar_express_dion": 5,
           "polar_express_modded_nanogpt": 5, "cans": 5, "turbo": 4, "aol": 4, "cubic": 5, "deepseek_v4": 10,
           "qwen3_8": 8, "anvil": 6}

# The largest relative error allowed in fp16, up to twice the largest seen (docs/math.md); other dtypes by FACTORS.
BOUNDS = {"gaussian": 0.004, "k^-1/2": 0.010, "1/k": 0.030, "1/k^2": 0.100, "log to 1e-3": 0.025, "log to 1e-5": 0.040,
          "half rank": 0.050, "steps": 0.110, "spike": 0.006, "heavy rows": 0.012}
# The same for the presets in fp16: "turbo" with its rows scaled before the cast, "cubic" without a restart.
PRESETS = {"turbo": dict(zip(KINDS, (.003, .009, .005, .018, .012, .016, .024, .040, .003, .004))),
           "cubic": dict(zip(KINDS, (.006, .008, .040, .070, .025, .030, .012, .025, .003, .006)))}
# "polar_express" in fp16 with short sides from 256 on, cut 2+3 (docs/math.md, "Five steps"): more is left of directions
# that the matrix hardly has
CUT_2_3 = {"log to 1e-3": 0.045, "half rank": 0.200}
FACTORS = {F32: 2.0**-8, F16: 1.0, BF16: 8.0}


@pytest.fixture
def polar(part, monkeypatch):
    forget(part("newton_schulz.orthogonalize"), monkeypatch)
    return part("newton_schulz.orthogonalize")


def scaled(X, steps):
    """What the polynomials are applied to, of X with the short side first, in fp64."""
    X = X.double()
    X = X / torch.linalg.matrix_norm(X, keepdim=True)
    if steps.aol:
        sums = (X @ X.mT).abs().sum(dim=-1, keepdim=True)
        X = X / torch.where(sums > 0, sums, 1.0).sqrt()
    return X


def exact(X, steps):
    """Apply the set's polynomials to the singular values in fp64: what the iteration computes, by definition."""
    if X.shape[-2] > X.shape[-1]:
        return exact(X.mT, steps).mT
    left, S, right = torch.linalg.svd(scaled(X, steps), full_matrices=False)
    for a, b, c in steps.triples:
        S = a * S + b * S**3 + c * S**5
    return (left * S.unsqueeze(-2)) @ right


def error(O, X, steps):
    """Return the largest relative error, in the Frobenius norm, of a batch."""
    reference = exact(X, steps)
    return (torch.linalg.matrix_norm(O.double() - reference) / torch.linalg.matrix_norm(reference)).max().item()


# Accuracy


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("shape", [(2, 40, 40), (2, 24, 80), (80, 24)], ids=str)
def test_every_set_against_its_polynomial(polar, device, name, shape):
    """A singular value near 0 grows 20,000 times, and what rounding adds to it, too: there is none here."""
    left, S, right = torch.linalg.svd(torch.randn(shape, device=device), full_matrices=False)
    X = (left * S.clamp(min=S.max() / 50).unsqueeze(-2)) @ right
    assert error(polar.orthogonalize(X, name, dtype=F32), X, polar.steps_of(name)) < 2e-5


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_error_over_spectra(part, polar, device, monkeypatch, kind, dtype, most):
    """Standard and Gram iteration keep the same bounds (a peer's defect: without a restart 1/k and 1/k^2 explode)."""
    everywhere(monkeypatch, part("newton_schulz.method"), "restart_interval", lambda *about: most)
    X = spectrum(kind, 96, 288).float().to(device)
    O = polar.orthogonalize(X, dtype=dtype)
    assert error(O, X, polar.steps_of("polar_express")) < BOUNDS[kind] * FACTORS[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("most", [1, 100])
@pytest.mark.parametrize("name", PRESETS)
def test_error_of_the_presets_over_spectra(part, polar, device, monkeypatch, name, kind, dtype, most):
    """Rows of unlike lengths that are cast before AOL scaling evens them out would give .04 to .16 ("heavy rows")."""
    everywhere(monkeypatch, part("newton_schulz.method"), "restart_interval", lambda *about: most)
    X = spectrum(kind, 96, 288).float().to(device)
    O = polar.orthogonalize(X, name, dtype=dtype)
    assert error(O, X, polar.steps_of(name)) < PRESETS[name][kind] * FACTORS[dtype]


@pytest.mark.parametrize("name", ["turbo", "aol"])
@pytest.mark.parametrize("shape", [(2, 20, 60), (2, 60, 20), (2, 33, 33)], ids=str)
def test_aol_in_both_paths(part, polar, device, path, name, shape):
    """Rows of any length, from subnormal to the largest numbers, and rows of zeros."""
    tile_config = part("kernels.launch.tile_config")
    X = torch.randn(shape, device=device)
    rows = X if shape[1] <= shape[2] else X.mT
    rows[0, 1], rows[0, 2], rows[1, 3] = 0, 1e-20 * rows[0, 2], 1e3 * rows[1, 3]
    with tile_config.force(tile_config.Tile(16, 16, 16, 2, 2, 4)):
        O = polar.orthogonalize(X * 1e25, name, dtype=F32)
    assert error(O, X, polar.steps_of(name)) < 1e-4


def test_no_restart_would_fail_the_bounds(part, polar, monkeypatch):
    """The bounds can fail: one interval of five steps breaks the one of 1/k."""
    monkeypatch.setitem(part("newton_schulz.coefficients").MAX_INTERVAL, F16, 5)
    everywhere(monkeypatch, part("newton_schulz.coefficients"), "SMALL_SHORT_SIDE", 0)
    everywhere(monkeypatch, part("newton_schulz.method"), "restart_interval", lambda *about: 5)
    X = spectrum("1/k", 96, 288).float()
    assert error(polar.orthogonalize(X, dtype=F16), X, polar.steps_of("polar_express")) > BOUNDS["1/k"]


@pytest.mark.parametrize("shape", [(2, 20, 33), (33, 20), (18, 18), (1, 7), (7, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_both_paths(part, polar, device, path, shape, dtype):
    tiles = part("kernels.launch.tile_config")
    X = torch.randn(shape, device=device)
    with tiles.force(tiles.Tile(16, 16, 16, 2, 2, 4)):
        result = polar.orthogonalize(X, "quintic", dtype=dtype)
    assert error(result, X, polar.steps_of("quintic")) < (1e-5 if dtype == F32 else 1e-2)


@pytest.mark.parametrize("x_dtype", [BF16, F16], ids=str)
def test_sixteen_bit_input(polar, device, x_dtype):
    X = torch.randn(2, 24, 60, device=device).to(x_dtype)
    O = polar.orthogonalize(X, dtype=F32)
    assert O.dtype == x_dtype and error(O, X, polar.steps_of("polar_express")) < torch.finfo(x_dtype).eps


def test_polar_express_ends_at_one(polar):
    """With more steps every singular value within reach goes to 1."""
    O = polar.orthogonalize(torch.randn(30, 90), ns_steps=9)
    torch.testing.assert_close(O @ O.mT, torch.eye(30), rtol=0, atol=1e-4)


def test_the_result_of_torch_optim_muon(polar):
    """Its default: the Jordan triple, in bf16."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    X, triple = torch.randn(48, 96), (3.4445, -4.7750, 2.0315)
    theirs = _zeropower_via_newtonschulz(X, triple, 5, 1e-7).float()
    ours = polar.orthogonalize(X, triple, 5)
    assert (theirs - ours).norm() / ours.norm() < 0.03


# Scale, zeros, NaN


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e-20, 1e-12, 1e-6, 1e6, 1e30])
@pytest.mark.parametrize("dtype, bound", [(F32, 2e-5), (F16, 1e-2)], ids=str)
def test_any_scale_gives_the_same_result(polar, device, scale, dtype, bound):
    """Peers' defect: a cast before the normalisation, an absolute eps, squares that underflow."""
    X = torch.randn(2, 24, 60, device=device)
    assert error(polar.orthogonalize(X * scale, dtype=dtype), X, polar.steps_of("polar_express")) < bound


@pytest.mark.parametrize("power", [-126, -60, 60, 120])
def test_powers_of_two_give_the_same_bits(polar, power):
    X = torch.rand(2, 24, 60).add_(1.0)
    assert torch.equal(polar.orthogonalize(X * 2.0**power), polar.orthogonalize(X))


@pytest.mark.parametrize("x_dtype, scale", [(F16, 2.0**-8), (F16, 2.0**8), (BF16, 2.0**-90), (BF16, 2.0**90)], ids=str)
def test_any_scale_of_sixteen_bits(polar, x_dtype, scale):
    X = torch.rand(24, 60).add_(0.1).to(x_dtype)
    assert torch.equal(polar.orthogonalize(X * scale, dtype=F16), polar.orthogonalize(X, dtype=F16))


def test_subnormal_input(polar):
    X = torch.randn(20, 50) * 1e-40
    assert error(polar.orthogonalize(X), X, polar.steps_of("polar_express")) < 1e-3


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("eps", [1e-7, 0.0])
@pytest.mark.parametrize("shape", [(12, 30), (136, 200)], ids=str)
def test_zeros_give_zeros(polar, device, name, eps, shape):
    """Peers' defect; a zero row of another matrix is as harmless. On the chip, where there is one, and outside."""
    X = torch.randn(3, *shape, device=device)
    X[1], X[2, 4] = 0, 0
    O = polar.orthogonalize(X, name, eps=eps)
    assert O.isfinite().all() and not O[1].any() and not O[2, 4].any() and O[[0, 2]].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(3, 20, 60), (3, 20, 20)], ids=str)
def test_nan_stays_in_its_matrix(polar, device, path, bad, shape):
    X = torch.randn(shape, device=device)
    X[1, 2, 3] = bad
    O = polar.orthogonalize(X, dtype=F32)
    assert O[1].isnan().any()
    torch.testing.assert_close(O[[0, 2]], polar.orthogonalize(X[[0, 2]], dtype=F32), rtol=0, atol=0)


def test_aol_sets_never_turn_a_direction_round(polar, device):
    """Peers' defect: the polynomials of these sets are negative from 0.884 on, where unscaled input may lie."""
    u, v = torch.randn(2, 20, 1, dtype=torch.float64), torch.randn(2, 1, 60, dtype=torch.float64)
    u, v = u / u.norm(dim=1, keepdim=True), v / v.norm(dim=2, keepdim=True)
    for size in (0.02, 0.05, 0.4, 0.9):
        X = (u @ v + size / 20 * torch.randn(2, 20, 60, dtype=torch.float64)).float().to(device)
        for name in ("turbo", "aol"):
            O = polar.orthogonalize(X, name)
            left, _, right = torch.linalg.svd(X.double(), full_matrices=False)
            along = (left.mT @ O.double() @ right.mT).diagonal(dim1=1, dim2=2)
            assert (along[:, 0] > 0.3).all() and (O.double() * (left @ right)).sum(dim=(1, 2)).min() > 0


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("shape", [(5, 32, 32), (5, 24, 80)], ids=str)
def test_rounding_above_one_is_harmless(polar, device, name, dtype, shape):
    """Equal elements are all rounded the same way, which brings the only singular value up to 2^-9 above 1."""
    O = polar.orthogonalize(torch.ones(shape, device=device) * torch.rand(5, 1, 1, device=device), name, dtype=dtype)
    along = O.sum(dim=(1, 2)) / math.sqrt(shape[1] * shape[2])
    assert (along > 0.5).all() and (along < 1.5).all()


# Batches, layouts, memory


@pytest.mark.parametrize("shape", [(33, 70), (70, 33), (27, 27), (5, 17)], ids=str)
@pytest.mark.parametrize("dtype, threads", [(F32, 1), (F32, 2), (F16, 1)], ids=str)
@pytest.mark.parametrize("name", ["polar_express", "turbo", "cubic"])
def test_one_matrix_has_the_same_bits_in_every_batch(polar, device, shape, dtype, threads, name):
    """Peers' defect: replicas, and N stacked weights, must agree to the bit with one by one."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        X = torch.randn(5, *shape, device=device)
        whole = polar.orthogonalize(X, name, dtype=dtype)
        assert torch.equal(whole, torch.stack([polar.orthogonalize(x, name, dtype=dtype) for x in X]))
        assert torch.equal(whole[1:4], polar.orthogonalize(X[1:4], name, dtype=dtype))
        X = X.permute(1, 2, 0).contiguous().permute(2, 0, 1)  # in each other
        whole = polar.orthogonalize(X, name, dtype=dtype)
        assert torch.equal(whole, torch.cat([polar.orthogonalize(x, name, dtype=dtype) for x in X.split(1)]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.interpreter
def test_one_matrix_has_the_same_bits_in_every_batch_in_triton(part, polar, device, monkeypatch):
    take("triton", monkeypatch)
    tiles, X = part("kernels.launch.tile_config"), torch.randn(3, 17, 40, device=device)
    with tiles.force(tiles.Tile(16, 16, 16, 2, 2, 4)):
        whole = polar.orthogonalize(X, ns_steps=2, dtype=F16)
        assert all(torch.equal(o, polar.orthogonalize(x, ns_steps=2, dtype=F16)) for x, o in zip(X, whole))


@pytest.mark.parametrize("shape", [(0, 4, 6), (3, 0, 6), (3, 4, 0), (2, 0, 4, 6)], ids=str)
def test_empty_input(polar, device, shape):
    assert polar.orthogonalize(torch.empty(shape, device=device)).shape == shape
    polar.orthogonalize_([torch.empty(shape[-3:], device=device)], polar.steps_of("jordan"))


def test_transposed_and_scattered_memory(polar, device):
    X = torch.randn(4, 20, 60, device=device)
    expected = polar.orthogonalize(X, dtype=F32)
    scattered = torch.randn(60, 20, 8, device=device).permute(2, 1, 0)[::2]
    scattered.copy_(X)
    for other in (scattered, X.mT.contiguous().mT, X.view(2, 2, 20, 60)):
        result = polar.orthogonalize(other, dtype=F32)
        assert result.is_contiguous() and result.shape == other.shape
        torch.testing.assert_close(result.view(X.shape), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(polar.orthogonalize(X.mT, dtype=F32), expected.mT, rtol=1e-4, atol=1e-5)


def test_input_is_unchanged_and_needs_no_gradient(polar, device):
    """Peers' defect: the caller's fp32 input normalised in place."""
    X = torch.randn(2, 20, 60, device=device, requires_grad=True)
    before = X.detach().clone()
    assert not polar.orthogonalize(X).requires_grad and torch.equal(X, before)


@pytest.mark.parametrize("x_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(2, 20, 60), (2, 60, 20)], ids=str)
def test_in_place_is_the_same(polar, device, x_dtype, shape):
    stack = torch.randn(shape, device=device).to(x_dtype)
    expected = polar.orthogonalize(stack, "cans", dtype=F16)
    polar.orthogonalize_([stack], polar.steps_of("cans"), 1e-7, F16)
    assert torch.equal(stack, expected)


@pytest.mark.parametrize("name", ["polar_express", "turbo", "cubic"])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_bits_do_not_depend_on_other_stacks(polar, device, name, dtype):
    """Tall and wide, long and square matrices of one short side share launches."""
    shapes = [(2, 24, 60), (1, 60, 24), (3, 24, 24), (2, 24, 130), (1, 16, 24), (0, 24, 60), (2, 130, 1040)]
    stacks, steps = [torch.randn(shape, device=device) for shape in shapes], polar.steps_of(name)
    alone = [stack.clone() for stack in stacks]
    for stack in alone:
        polar.orthogonalize_([stack], steps, 1e-7, dtype)
    polar.orthogonalize_(stacks, steps, 1e-7, dtype)
    assert all(torch.equal(a, b) for a, b in zip(alone, stacks))


@pytest.mark.parametrize("name", ["polar_express", "turbo", "cubic"])
@pytest.mark.parametrize("x_dtype", [F32, BF16], ids=str)
def test_bits_do_not_depend_on_other_stacks_off_the_chip(polar, device, name, x_dtype):
    """The same of a short side of 256; matrices in other memory, the last of a larger stack, too."""
    shapes = [(1, 256, 512), (2, 512, 256), (1, 256, 256), (1, 256, 300), (1, 301, 256), (3, 256, 512)]
    stacks, steps = [torch.randn(shape, device=device).to(x_dtype) for shape in shapes], polar.steps_of(name)
    alone = [torch.cat([polar.orthogonalize(X[None].clone(), name, dtype=F16) for X in stack]) for stack in stacks]
    polar.orthogonalize_(stacks, steps, 1e-7, F16)
    assert all(torch.equal(a, b) for a, b in zip(alone, stacks))


# Sets


@pytest.mark.parametrize("name, length", LENGTHS.items())
def test_named_sets(part, polar, name, length):
    steps = polar.steps_of(name)
    assert (len(steps.triples), steps.aol) == (length, name in ("turbo", "aol"))
    assert polar.steps_of(name, length) == steps and hash(steps) == hash(polar.steps_of(name))
    assert set(part("newton_schulz.coefficients").SETS) == set(LENGTHS)


@pytest.mark.parametrize("name", ["jordan", "polar_express"])
@pytest.mark.parametrize("ns_steps", [1, 4, 7, 99])
def test_sets_of_any_length(polar, name, ns_steps):
    triples = polar.steps_of(name, ns_steps).triples
    assert len(triples) == ns_steps and triples[:1] == polar.steps_of(name).triples[:1]
    assert name == "jordan" or ns_steps < 7 or triples[6:] == ((1.875, -1.25, 0.375),) * (ns_steps - 6)


def test_the_safety_factor_scales_the_argument(polar):
    """p_s(x) = p(x / s): here for the first step of Polar Express as published, with s = 1.05."""
    raw, safe = (8.28721201814563, -23.595886519098837, 17.300387312530933), polar.steps_of("polar_express").triples[0]
    for x in (0.01, 0.5, 1.0):
        values = [sum(k * y**e for k, e in zip(t, (1, 3, 5))) for t, y in ((safe, x), (raw, x / 1.05))]
        assert math.isclose(*values, rel_tol=1e-12)


@pytest.mark.parametrize("name", LENGTHS)
def test_sets_keep_singular_values_positive_and_near_one(polar, name):
    """On [0.05, 1], where normalised input lies, and a little beyond, where rounding may push it."""
    S = torch.linspace(0.05, 1.01, 20000, dtype=torch.float64)
    for a, b, c in polar.steps_of(name).triples:
        S = a * S + b * S**3 + c * S**5
    assert 0.65 < S.min() and S.max() < 1.35


def test_triples(polar):
    triple, other = (3.0, -3.0, 1.0), [2, -1.5, 0.5]
    assert polar.steps_of(triple, 3).triples == (triple,) * 3
    assert polar.steps_of([triple, other], 2).triples == (triple, tuple(map(float, other)))
    assert polar.steps_of((other,) * 3, 3).triples == (tuple(map(float, other)),) * 3


@pytest.mark.parametrize("coefficients, ns_steps, message", [
    ("newton", 5, "ns_coefficients is 'newton'; the sets are jordan, "),
    ("turbo", 3, "ns_steps is 3, but the set 'turbo' has 4 steps; pass ns_steps=4, or leave it at 5"),
    ("deepseek_v4", 4, "has 10 steps"),
    ("jordan", 0, "ns_steps is 0; pass a whole number from 1 to 99"),
    ("jordan", 100, "ns_steps is 100"),
    ("jordan", 2.5, "ns_steps is 2.5"),
    ("jordan", True, "ns_steps is True"),
    ((1.0, 2.0), 5, "a triple is three finite numbers"),
    ((1.0, 2.0, float("nan")), 5, "holds .*nan.*; a triple is three finite numbers"),
    ([(1.0, 2.0, 3.0), (1.0, 2.0)], 2, r"holds \(1.0, 2.0\); a triple"),
    ([(1.0, 2.0, float("inf"))], 1, "inf"),
    ((1.0, 2.0, "3"), 5, "a triple is three finite numbers"),
    ([(1.0, -1.0, 0.5)] * 3, 5, "holds 3 triples and ns_steps is 5; pass ns_steps=3, or 5 triples"),
    ([], 5, "holds 0 triples"),
    (None, 5, "ns_coefficients is None; pass a name, a triple, or a sequence of triples"),
    (3.0, 5, "ns_coefficients is 3.0"),
    (b"abc", 5, "ns_coefficients is b'abc'; pass a name, a triple, or a sequence of triples"),
    ({1.0, 2.0, 3.0}, 5, "ns_coefficients is {.*}; pass a name"),
    ({1.0: 0, 2.0: 0, 3.0: 0}, 5, "ns_coefficients is {.*}; pass a name"),
    ([[[1, 2, 3]]], 1, "a triple is three finite numbers"),
    ([{}], 1, "holds {}; a triple is three finite numbers"),
    ([b"abc"], 1, "holds b'abc'; a triple is three finite numbers"),
    ((10**400, 1, 1), 5, "a triple is three finite numbers"),
    ((True, 1, 1), 5, "holds .True, 1, 1.; a triple is three finite numbers"),
    ("jordan", [5], "ns_steps is .5.; pass a whole number"),
])
def test_wrong_sets_raise(polar, coefficients, ns_steps, message):
    with pytest.raises(ValueError, match=message):
        polar.steps_of(coefficients, ns_steps)


@pytest.mark.parametrize("shape, dtype", [((5,), F32), ((2, 2), torch.float64), ((2, 2), torch.int32)], ids=str)
def test_wrong_input_raises(polar, shape, dtype):
    with pytest.raises(ValueError, match="pass matrices"):
        polar.orthogonalize(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("X", [None, [[1.0, 2.0]], 3.0, torch.zeros(2, 2).numpy()], ids=lambda X: type(X).__name__)
def test_what_is_no_tensor_raises(polar, X):
    with pytest.raises(ValueError, match="X is of type .*; pass a tensor"):
        polar.orthogonalize(X)


@pytest.mark.parametrize("eps", [True, "0", None, -1.0, math.nan, math.inf, 10**400], ids=lambda eps: str(eps)[:5])
def test_wrong_eps_raises(polar, eps):
    with pytest.raises(ValueError, match="eps=.* is not allowed: it must be a finite number >= 0"):
        polar.orthogonalize(torch.zeros(2, 2), eps=eps)


def test_cost_counts_the_cheaper_iteration(part, polar):
    """Per n^3, a = long / short: 3 a k + 4 T - 3 k with k intervals; a pair saves one product, as a cubic step does."""
    method = part("newton_schulz.method")
    steps, other, n = polar.steps_of("polar_express"), polar.steps_of((3.0, -4.0, 2.0), 5), 300
    assert method.cost(n, n, steps) == method.cost(4096, 4096, steps) * n**3 // 4096**3 == 18 * n**3
    assert method.cost(n, n, other) == 5 * 4 * n**3
    assert method.cost(n, 4 * n, steps) == method.cost(4 * n, n, steps) == (6 * 4 + 13) * n**3
    assert method.cost(n, 4 * n, other) == (6 * 4 + 14) * n**3
    assert method.cost(n, 4 * n, polar.steps_of("cubic")) == (3 * 4 + 12) * n**3
    assert method.cost(n, 4 * n, polar.steps_of("jordan", 1)) == 13 * n**3
    assert method.cost(100, 400, steps) == (9 * 4 + 9) * 100**3 and method.cost(100, 100, steps) == 18 * 100**3
    assert method.cost(0, 5, steps) == 0


def test_the_iteration_that_is_taken(part, polar):
    """1: the standard iteration; pairs, in fp16, pay for square matrices, too. 3 where it saves a twentieth, or
    has the cuts of 2.
    """
    method = part("newton_schulz.method")
    steps, other = polar.steps_of("polar_express"), polar.steps_of((3.0, -4.0, 2.0), 5)
    for n in (100, 300, 4096):
        sides = [n, n * 5 // 4, n * 4 // 3, n * 3 // 2, 4 * n]
        assert [method.restart_interval(n, m, steps) for m in sides] == [3 if n == 100 else 2] * 4 + [3]
        assert [method.restart_interval(n, m, steps, F32) for m in sides] == [1, 1, 3, 3, 3]
        assert [method.restart_interval(n, m, other) for m in sides] == [1, 1, 1 if n == 100 else 3, 3, 3]
        assert [method.restart_interval(n, m, steps, BF16) == 1 for m in sides] == [True, True, True, False, False]
        assert method.restart_interval(n, n, polar.steps_of("cubic")) > 5
        assert method.restart_interval(n, 9 * n, polar.steps_of("jordan", 1)) == 1


def test_the_iteration_that_a_cpu_takes(part, polar):
    """A CPU computes symmetric products in full, so the Gram iteration pays later, and for no small matrix. Where it
    pays, `most` is the same as elsewhere: memory was planned for that.
    """
    method = part("newton_schulz.method")
    steps = polar.steps_of((3.4445, -4.7750, 2.0315), 5)
    for n, m in itertools.product((8, 48, 128, 512, 4096), (1, 2, 3, 4, 6, 8, 16)):
        chosen = method.restart_interval(n, m * n, steps, F32, True)
        assert chosen in (1, method.restart_interval(n, m * n, steps, F32))
    assert [method.restart_interval(128, m * 128, steps, F32, True) for m in (4, 5, 6, 8)] == [1, 1, 3, 3]
    assert [method.restart_interval(1024, m * 1024, steps, F32, True) for m in (1, 2, 4)] == [1, 1, 3]
    assert method.restart_interval(8, 64, steps, F32, True) == method.restart_interval(48, 768, steps, F32, True) == 1
    assert method.restart_interval(8, 8, polar.steps_of("cubic"), F32, True) > 5


class Operations(TorchDispatchMode):
    """Counts operations of torch other than views."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(16, 128, 128), (8, 512, 128), (64, 48, 128), (64, 8, 32), (4, 62, 187)], ids=str)
def test_a_cpu_does_no_more_than_plain_torch(polar, monkeypatch, shape):
    """No more FLOPs and fewer operations than plain torch, on the stacks of benchmarks/benchmark.py."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, which must find the interpreter chosen

    monkeypatch.setenv("OPTIMIZER_KERNELS", "torch")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    benchmark, X = importlib.import_module("benchmark"), torch.randn(shape)
    ways = [lambda: polar.orthogonalize(X, benchmark.COEFFICIENTS, benchmark.STEPS),
            lambda: torch.stack([benchmark.newton_schulz(x) for x in X])]
    operations, flops = [], []
    for way in ways:
        with Operations() as counted:
            way()
        with FlopCounterMode(display=False) as counter:
            way()
        operations.append(counted.count)
        flops.append(counter.get_total_flops())
    assert operations[0] < operations[1] and 0 < flops[0] <= flops[1]


@pytest.mark.parametrize("ns_steps, dtype, most, lengths", [
    (1, F16, 100, [1]), (3, F16, 100, [3]), (4, F16, 100, [2, 2]), (5, F16, 100, [3, 2]), (5, F32, 100, [3, 2]),
    (5, BF16, 100, [2, 2, 1]), (7, F16, 100, [1, 2, 2, 2]), (10, F16, 100, [2] * 5), (5, F16, 1, [1] * 5),
    (5, F16, 2, [1, 2, 2]), (4, F16, 2, [2, 2]), (5, F32, 2, [2, 2, 1]), (5, BF16, 3, [2, 2, 1])])
def test_intervals_between_restarts(polar, ns_steps, dtype, most, lengths):
    """Longer intervals drift: in bf16, three steps of 1/k already explode."""
    steps = polar.steps_of("jordan", ns_steps)
    intervals = steps.intervals(dtype, most)
    assert [len(interval) for interval in intervals] == lengths and sum(intervals, ()) == steps.triples


@pytest.mark.parametrize("ns_steps, small, other", [
    (1, [1], [1]), (2, [2], [2]), (3, [1, 2], [1, 2]), (4, [2, 2], [2, 2]), (5, [1, 2, 2], [2, 3]),
    (6, [2, 2, 2], [2, 2, 2]), (7, [1, 2, 2, 2], [1, 2, 2, 2]), (10, [2] * 5, [2] * 5)])
def test_first_segments_are_short_in_fp16_but_for_large_matrices_of_steady_sets(polar, ns_steps, small, other):
    """After three steps the largest singular value may leave the range of the others (test_accuracy.py)."""
    steps, unknown = polar.steps_of("polar_express", ns_steps), polar.steps_of((3.0, -4.0, 2.0), ns_steps)
    for found in (steps, unknown):
        assert [len(interval) for interval in found.intervals(n=255)] == small
        assert [len(interval) for interval in found.intervals(F32, n=255)] == [len(s) for s in steps.intervals(F32)]
    assert [len(interval) for interval in unknown.intervals(n=256)] == other
    assert [len(interval) for interval in polar.steps_of("cans").intervals(n=4096)] == [2, 3]


def test_up_to_five_cubic_steps_need_no_restart(polar):
    def lengths(steps):
        return [[len(interval) for interval in steps.intervals(dtype)] for dtype in (F16, F32, BF16)]

    assert lengths(polar.steps_of("cubic")) == [[5], [5], [2, 2, 1]]
    assert lengths(polar.steps_of((1.5, -0.5, 0.0), 12)) == [[4] * 3, [4] * 3, [2] * 6]


@pytest.mark.parametrize("ns_steps, half, single", [
    (5, [5], [5]), (6, [3, 3], [3, 3]), (9, [5, 4], [3, 3, 3]), (10, [5, 5], [4, 3, 3]), (15, [5] * 3, [4] * 3 + [3])])
def test_more_than_five_cubic_steps_are_cut_after_four_in_fp32(polar, ns_steps, half, single):
    """Ten steps cut 5 + 5 had three times the error of the standard iteration in fp32 (test_accuracy.py)."""
    steps = polar.steps_of((2.0, -1.0, 0.0), ns_steps)
    for dtype, lengths in ((F16, half), (F32, single)):
        intervals = steps.intervals(dtype)
        assert [len(interval) for interval in intervals] == lengths and sum(intervals, ()) == steps.triples


# GPU


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4, 768, 3072), (3, 1000, 1003), (2, 4096, 1024), (2, 257, 129)], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_large_matrices_on_a_gpu(polar, monkeypatch, shape, dtype):
    """Accuracy by the bounds, and one matrix has the same bits in every batch and place."""
    monkeypatch.setenv("OPTIMIZER_KERNELS", "triton")
    X = torch.randn(shape, device="cuda")
    O = polar.orthogonalize(X, dtype=dtype)
    assert error(O, X, polar.steps_of("polar_express")) < BOUNDS["gaussian"] * FACTORS[dtype]
    assert all(torch.equal(o, polar.orthogonalize(x.clone(), dtype=dtype)) for x, o in zip(X, O))
    assert torch.equal(polar.orthogonalize(X[1:], dtype=dtype), O[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_error_over_spectra_on_a_gpu(part, polar, monkeypatch, kind, dtype, most):
    monkeypatch.setenv("OPTIMIZER_KERNELS", "triton")
    everywhere(monkeypatch, part("newton_schulz.method"), "restart_interval", lambda *about: most)
    X = spectrum(kind, 384, 1536).float().cuda()
    O = polar.orthogonalize(X, dtype=dtype)
    bound = CUT_2_3.get(kind, BOUNDS[kind]) if (dtype, most) == (F16, 3) else BOUNDS[kind]
    assert error(O, X, polar.steps_of("polar_express")) < bound * FACTORS[dtype]


@pytest.mark.gpu
def test_no_host_synchronisation(polar):
    X = torch.randn(2, 128, 512, device="cuda")
    expected = polar.orthogonalize(X)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = polar.orthogonalize(X)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(result, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["polar_express", "turbo", "cubic"])
@pytest.mark.parametrize("shape", [(2, 100, 100), (2, 128, 512), (4, 768, 3072), (1, 1000, 3000)], ids=str)
def test_a_second_call_allocates_the_output_and_the_workspaces_only(part, polar, name, shape):
    """In bytes that were ever asked for (the allocator may give more): nothing of X's size besides."""
    def allocated():
        return torch.cuda.memory_stats()["requested_bytes.all.allocated"]

    X = torch.randn(shape, device="cuda", dtype=BF16)
    steps, (N, n, m) = polar.steps_of(name), shape
    polar.orthogonalize(X, name)
    before = allocated()
    O = polar.orthogonalize(X, name)
    own = O.numel() * O.element_size() + N * sum(part("newton_schulz.method").scratch_bytes(n, m, steps, F16)[1:])
    assert allocated() - before <= own + (64 << 10)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["polar_express", "turbo", "cubic"])
def test_the_number_of_allocations_of_a_second_call(polar, name):
    """The output and the workspace; no more for more matrices."""
    def allocations(N):
        X = torch.randn(N, 768, 3072, device="cuda", dtype=BF16)
        polar.orthogonalize(X, name)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        polar.orthogonalize(X, name)
        return torch.cuda.memory_stats()["allocation.all.allocated"] - before

    assert allocations(1) == allocations(5) == 2


@pytest.mark.parametrize("name", ["polar_express", "turbo"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(3, 2, 130, 300), (3, 2, 300, 130), (2, 2, 24, 17)], ids=str)
def test_matrices_keep_their_bits_in_a_batch_that_has_to_be_copied(polar, device, shape, turned, name):
    """The dims of the batch cannot be viewed as one; what is column-major stays so."""
    V = torch.randn(shape, device=device)
    V = V.mT.contiguous().mT if turned else V
    V = V.permute(1, 0, 2, 3)
    with pytest.raises(RuntimeError):
        V.view(-1, *shape[2:])
    O = polar.orthogonalize(V, name)
    assert all(torch.equal(O[i, j], polar.orthogonalize(V[i, j], name)) for i in range(2) for j in range(shape[0]))

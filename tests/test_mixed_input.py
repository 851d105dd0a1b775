"""Matrices in bf16 that are multiplied as they are, and cast on their way: the same bits however they lie."""
from __future__ import annotations

import pytest
import torch

from tests.paths import PATHS, quiet, take
from tests.ranks import everywhere, part
from tests.references import standard

pytestmark = quiet
SHAPES = [(3, 256, 768), (2, 768, 768), (2, 130, 1000), (5, 200, 520), (2, 1000, 3000), (1, 1023, 2048),
          (2, 960, 1600), (2, 900, 904), (4, 136, 640)]
on_gpu = pytest.mark.gpu


@pytest.fixture(params=PATHS)
def kernels(request, monkeypatch):
    take(request.param, monkeypatch)


def factors_of(U, in_place, A):
    factors = torch.full((3, len(U)), float("nan"), device=U.device)
    X = None if in_place else torch.empty_like(U)
    part("kernels.elementwise.scaling").raw_norm(U, X, factors, A, 1e-7)
    assert in_place or torch.equal(X, U)
    return factors


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("exponent", [0, -20, 12])
def test_factors_make_norm_one(kernels, device, in_place, exponent):
    """In one product by one factor, in the other by a power of two, after which it is near 1, and the rest."""
    torch.manual_seed(0)
    U = (torch.randn(3, 40, 72) * 2.0**exponent).to(device)
    U[1] = 0.0
    A = torch.full((3, 40, 40), 7.0, device=device)
    whole, power, rest = factors_of(U, in_place, A)
    expected = torch.where(U.norm(dim=(1, 2)) == 0, 1.0, 1 / U.norm(dim=(1, 2)))
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(power * rest, whole, rtol=0, atol=0)
    assert torch.equal(power.log2(), power.log2().round()) and (rest > 0.5).all() and (rest <= 1).all()
    assert (A == 7.0).all()


@pytest.mark.parametrize("exponent", [-100, -45, 60, 100])
def test_squares_beyond_fp32(kernels, device, exponent):
    """U U^T is there already, and `gram` leaves it alone; that of others in the batch it computes."""
    torch.manual_seed(0)
    U, gram = torch.randn(2, 40, 72).to(device), part("kernels.matmul.api").gram
    A, apart = (torch.full((2, 40, 40), 7.0, device=device) for _ in "12")
    ordinary = factors_of(U, True, apart)[0]
    gram(U, apart, ordinary)
    U[1] *= 2.0**exponent
    whole, power, rest = factors_of(U, True, A)
    assert whole[1] == -1.0 and whole[0] == ordinary[0] and (power * rest)[1] == ordinary[1] / 2.0**exponent
    gram(U, A, whole)
    torch.testing.assert_close(A, apart, rtol=1e-5, atol=1e-7)
    assert torch.equal(A[0], apart[0])


def test_matrices_in_pieces_are_copied(kernels, device):
    torch.manual_seed(0)
    U = torch.randn(2, 40, 64).to(device).half()
    split = part("kernels.elementwise.row_scattered").ScatteredRows(
        [[U[0, :7].clone(), U[0, 7:].clone()], [U[1].clone()]]
    )
    A, X, found = torch.empty(2, 40, 40, device=device), torch.empty_like(U), torch.empty(3, 2, device=device)
    part("kernels.elementwise.scaling").raw_norm(split, X, found, A, 1e-7)
    assert torch.equal(X, U) and torch.equal(found, factors_of(U, False, A))


@pytest.mark.parametrize("steps", [1, 3, 5, 8])
def test_an_iteration_of_raw_matrices(steps, monkeypatch, optimizer):
    """As of cast ones, but for their rounding: alone and in company, wide and tall, zeros, squares beyond fp32. What is
    given is left alone. One step has nothing to restart, and casts.
    """
    torch.manual_seed(0)
    U = torch.randn(4, 20, 64).bfloat16()
    U[1], U[2] = 0.0, U[2] * 2.0**60
    stacks = [U, torch.randn(1, 20, 64).bfloat16(), torch.randn(2, 40, 20).bfloat16(), torch.randn(1, 20, 64)]
    steps, kept = part("newton_schulz.coefficients").steps_of("jordan", steps), [stack.clone() for stack in stacks]

    def polar(*some):
        out = [torch.empty_like(stack) for stack in some]
        part("newton_schulz.orthogonalize").orthogonalize_(some, steps, dtype=torch.float16, into=out)
        return out

    expected, casts = polar(*stacks), []
    iteration = part("newton_schulz.iteration")
    monkeypatch.setattr(iteration, "supports_mixed_input", lambda U, dtype: U.dtype == torch.bfloat16)
    monkeypatch.setattr(iteration, "unit_norm", lambda U, *rest: casts.append(U.dtype) or unit_norm(U, *rest))
    unit_norm = part("kernels.elementwise.scaling").unit_norm
    found = polar(*stacks)
    assert set(casts) == {torch.float32} if len(steps.triples) > 1 else len(casts) == 4
    for result, other in zip(found, expected):
        assert (result.float() - other.float()).norm() <= 4e-3 * other.float().norm()
    assert torch.equal(found[3], expected[3]) and not found[0][1].any() and all(map(torch.equal, stacks, kept))
    assert torch.equal(polar(U)[0], found[0]) and torch.equal(polar(U[2:3])[0], found[0][2:3])


def test_what_is_taken_raw(monkeypatch):
    """By dtypes, short side and GPU, whatever the batch and the long side; nothing on a CPU."""
    gram, bf16, fp16 = part("kernels.matmul.api"), torch.bfloat16, torch.float16

    def taken(n, given=bf16, dtype=fp16):
        stacks = [torch.empty(N, n, m, dtype=given) for N, m in ((1, 1030), (3, 2000))]
        assert len({gram.supports_mixed_input(U, dtype) for U in stacks}) == 1
        return gram.supports_mixed_input(stacks[0], dtype)

    assert not taken(256)
    everywhere(monkeypatch, gram, "use_triton", lambda device: True)
    everywhere(monkeypatch, gram, "knows_triton", lambda: True)
    for arch in ("sm100", "sm80", "sm90"):
        everywhere(monkeypatch, part("kernels.launch.tile_config"), "architecture", lambda *_, arch=arch: arch)
        assert list(map(taken, (128, 129, 1023, 1024))) == [False, arch == "sm90", arch == "sm90", False]
    assert not any((taken(256, given=torch.float32), taken(256, given=fp16), taken(256, dtype=bf16)))
    everywhere(monkeypatch, gram, "knows_triton", lambda: False)
    assert not taken(256)


def test_the_product_in_torch_casts_as_it_was_told():
    torch.manual_seed(0)
    A, X, out = torch.randn(2, 5, 5).double(), torch.randn(2, 5, 7).bfloat16(), torch.empty(2, 5, 7).double()
    scales, powers = torch.tensor([0.5, 3.0]), torch.tensor([4.0, 0.25])
    part("kernels.matmul.api").product(A, X, out, scales, powers)
    torch.testing.assert_close(out, A @ X.double() * (scales * powers).double().view(-1, 1, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape, strides, offset, lies", [
    ((2, 4, 128), (512, 128, 1), 0, True), ((2, 4, 64), (256, 64, 1), 0, True), ((2, 4, 100), (768, 192, 1), 64, True),
    ((2, 4, 72), (288, 72, 1), 0, False), ((2, 64, 128), (8192, 1, 64), 0, False), ((3, 4, 64), (0, 64, 1), 0, False),
    ((2, 4, 64), (64, 0, 1), 0, False), ((2, 4, 128), (512, 64, 1), 0, False), ((2, 4, 64), (256, 64, 1), 1, False)])
def test_where_a_matrix_is_read_in_place(shape, strides, offset, lies):
    """Rows at multiples of a line of the cache, apart from each other."""
    memory = torch.empty(1 << 14, dtype=torch.bfloat16)
    assert part("newton_schulz.iteration")._is_laid_out(memory.as_strided(shape, strides, offset)) == lies


def raw(shape):
    U = torch.randn(shape, device="cuda").bfloat16()
    if not part("kernels.matmul.api").supports_mixed_input(U, torch.float16):
        pytest.skip("no sm90, or a Triton whose Gluon is not known")
    return U


@on_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_bits_however_matrices_lie(shape, optimizer):
    """In place or copied, in any batch, beside others, from a graph; U stays as it was."""
    torch.manual_seed(0)
    U, polar, steps_of = raw(shape), optimizer.orthogonalize, part("newton_schulz.coefficients").steps_of
    (N, R, C), kept = shape, U.clone()
    expected = polar(U)
    assert torch.equal(U, kept) and torch.equal(polar(U), expected)
    exact = torch.stack([standard(one, steps_of("polar_express"), torch.float32) for one in U])
    assert (expected.float() - exact).norm() / exact.norm() < 4e-3
    wide = torch.full((N, R, C + 4), float("nan"), device="cuda").bfloat16()
    wide[:, :, 2:-2] = U
    odd = torch.empty(U.numel() + 1, dtype=U.dtype, device="cuda")[1:].view(shape).copy_(U)
    for other in (wide[:, :, 2:-2], odd):
        assert torch.equal(polar(other), expected)
    assert all(torch.equal(polar(one), result) for one, result in zip(U, expected))
    assert torch.equal(polar(U[:1].expand(3, R, C)), expected[:1].expand(3, R, C))
    many = torch.cat([U] * (140 // N))
    assert torch.equal(polar(many).view(-1, *shape), expected.expand(140 // N, *shape))
    stacks = [U.clone(), U[:1].clone(), torch.randn(2, R, C, device="cuda")]
    alone = polar(stacks[2])
    part("newton_schulz.orthogonalize").orthogonalize_(stacks, steps_of("polar_express"))
    assert all(map(torch.equal, stacks, (expected, expected[:1], alone)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = polar(U)
    graph.replay()
    assert torch.equal(out, expected)


@on_gpu
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_powers_of_two_zeros_and_bad_numbers(shape, optimizer):
    """Also where squares leave the range of fp32; no matrix touches its neighbours."""
    torch.manual_seed(0)
    U, polar = raw(shape), optimizer.orthogonalize
    expected = polar(U)
    for exponent in (-60, -41, -20, 5, 30, 49, 55, 100):
        assert torch.equal(polar(U * 2.0**exponent), expected), exponent
    bad = U[:1].clone()
    bad[0, 0, 0] = float("nan")
    infinite = bad.nan_to_num(nan=float("inf"))
    together = polar(torch.cat([U, torch.zeros_like(bad), U * 2.0**70, bad, infinite]))
    N = shape[0]
    assert torch.equal(together[:N], expected) and torch.equal(together[N + 1:2 * N + 1], expected)
    assert (together[N] == 0).all() and not together[2 * N + 1:].isfinite().all(2).all(1).any()

"""Gram matrices that stay on one processor, and what follows them: programs, who takes them so, and on an
H100 or an H200 the bits of launches. `tests/test_tile_config.py` compiles the kernels without one.
"""
from __future__ import annotations

import inspect

import pytest
import torch

from tests import paths
from tests.ranks import everywhere
from tests.test_coefficients import SETS

F16, BF16 = torch.float16, torch.bfloat16
SIZES = [(3, 193), (2, 200), (140, 240), (1, 255), (140, 256), (2, 256)]
on_gpu = pytest.mark.gpu


@pytest.fixture
def resident(part):
    return part("kernels.onchip.gram_chain")


@pytest.fixture
def taken(resident, part, monkeypatch):
    """Where it is for any number of matrices; counts its launches, those from a tape left out."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm90")
    launch, calls = resident.follow, []
    monkeypatch.setenv("OPTIMIZER_KERNELS", "triton")
    monkeypatch.setattr(resident, "FROM", 1)
    monkeypatch.setattr(resident, "_known", {})
    monkeypatch.setattr(resident, "follow", lambda *arguments: calls.append(1) or launch(*arguments))
    paths.forget(part("newton_schulz.orthogonalize"), monkeypatch)
    return calls


def intervals(part, name, n=256, count=None):
    """[(interval, pair)] of those intervals of a set that have a pair."""
    steps = part("newton_schulz.coefficients").steps_of(name, count or SETS[name])
    return [(interval, pair) for interval, pair in zip(steps.intervals(F16, 3, n), steps.pairs(F16, 3, n)) if pair]


def rooms(part, N, n):
    """Four stacks of (n, n) matrices as an iteration has them on a GPU, of NaN."""
    room = part("newton_schulz.iteration").ScratchLayout(((N, n, n),) * 4, F16, torch.device("cuda"))
    room.bind(torch.full((room.nbytes // 2,), float("nan"), dtype=F16, device="cuda").view(torch.uint8))
    return room.views()


def grams(N, n, largest, device="cpu"):
    """Gram matrices with eigenvalues from nearly 0 to `largest`."""
    X = torch.randn(N, n, 2 * n, device=device)
    A = X @ X.mT
    return A * (largest / torch.linalg.matrix_norm(A, 2)[:, None, None])


def played(codes, factors, keep, A):
    """What a program computes, read as `_code` says it is written."""
    held, kept = {0: A, 1: None}, {1: A if keep else None, 2: None}
    result, settled, lent, eye = None, None, None, torch.eye(A.shape[1])
    for code, (alpha, diagonal, *betas) in zip(codes.tolist(), factors.tolist()):
        first, second, third = code >> 3 & 3, code >> 5 & 3, code >> 7 & 1
        addends = [held[first] if first < 2 else kept[1]]
        addends += [held[1] if second == 1 else kept[2]] if second else []
        addends += [held[0]] if third else []
        assert all(kept[k] is settled for k, place in ((1, first), (2, second)) if place == 2), "in memory"
        assert bool(diagonal) <= bool(code >> 13 & 1), "I is added where the code says so"
        result = alpha * held[code & 1] @ held[code >> 1 & 1] + diagonal * eye
        result += sum(beta * addend for beta, addend in zip(betas, addends, strict=False))
        square = (code & 1) == (code >> 1 & 1)
        assert square or code >> 11 & 1, "only the squares of what is symmetric are so in every bit"
        then = code >> 8 & 7
        settled = held[0] if code >> 14 & 1 else settled
        assert then != 4 or not any(addend is held[0] for addend in addends), "X takes its place"
        held[code >> 2 & 1] = result
        kept |= {then: result} if then in (1, 2) else {}
        lent = result if then == 3 else lent
        if code >> 12 & 1:
            held[0] = lent
    assert then == 4 and code >> 2 & 1 == 1
    return result


@pytest.mark.parametrize("name", SETS)
def test_programs_compute_what_launches_do(resident, part, name):
    torch.manual_seed(0)
    for interval, pair in intervals(part, name):
        A = grams(2, 24, 0.5 if len(interval) == 3 else 0.9)
        codes, factors, count, keep = resident._program(tuple(interval[:-2]), pair)
        assert len(codes) == len(factors) == count == 4 * (len(interval) - 1) and keep == (len(interval) == 2)
        expected, *_ = part("newton_schulz.iteration").follow(
            interval, pair, A.clone(), *(torch.empty_like(A) for _ in "123")
        )
        torch.testing.assert_close(played(codes, factors, keep, A), expected, rtol=1e-4, atol=1e-4)


def test_factors_do_not_depend_on_the_default_dtype(resident, part):
    (interval, pair), *_ = intervals(part, "polar_express")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        _, factors, *_ = resident._program(tuple(interval[:-2]), pair)
    finally:
        torch.set_default_dtype(before)
    assert factors.dtype == torch.float32


def test_who_goes_through_it(resident, part, monkeypatch):
    everywhere(monkeypatch, resident, "architecture", lambda kind, index: "sm90")
    everywhere(monkeypatch, resident, "knows_triton", lambda: True)
    (three, pair), (two, last) = intervals(part, "jordan", count=5)

    def fits(N, n, interval, pair, dtype=F16):
        pitch = n + -n % 64
        A, Q = (torch.empty(N, n, pitch, dtype=dtype)[:, :, :n] for _ in "12")
        return resident.supports(A, Q, interval, pair)

    assert (len(three), len(two)) == (3, 2) and fits(48, 256, three, pair) and fits(200, 193, two, last)
    assert not (fits(47, 256, three, pair) or fits(200, 192, two, last) or fits(200, 257, two, last))
    assert not fits(80, 256, three, None) and not fits(80, 256, three, pair, BF16)
    linear = ((1.5, -0.5, 0.0), *three[1:])
    assert not fits(80, 256, linear, pair) and not fits(80, 256, (three[0], *three), pair)
    everywhere(monkeypatch, resident, "architecture", lambda kind, index: "sm100")
    assert not fits(80, 256, three, pair)


@pytest.mark.parametrize("name, sides, whole", [
    ("polar_express", [48], True), ("polar_express", [48, 64], False), ("turbo", [64], False)], ids=str)
def test_gram_matrices_of_one_long_side_are_computed_there(resident, part, monkeypatch, name, sides, whole):
    """Of several long sides, or where rows are to be scaled first (AOL), launches make them."""
    iteration, steps = part("newton_schulz.iteration"), part("newton_schulz.coefficients").steps_of(name)
    U = [torch.randn(3, 16, m) for m in sides]
    expected, results, calls = [torch.empty_like(u) for u in U], [torch.empty_like(u) for u in U], []
    iteration.Iteration([*zip(U, expected)], steps, torch.float32, 3).run(1e-7)

    def follow(interval, pair, A, Q, Z, T, long):
        calls.append(long is not None)
        if long is not None:
            A.fill_(float("nan"))
            part("kernels.matmul.api").gram(long[0], A, long[1])
        return part("newton_schulz.iteration").follow(interval, pair, A, Q, Z, T)

    monkeypatch.setattr(resident, "supports", lambda A, Q, interval, pair: len(interval) > 1)
    monkeypatch.setattr(resident, "follow", follow)
    iteration.Iteration([*zip(U, results)], steps, torch.float32, 3).run(1e-7)
    assert calls[0] == whole and all(map(torch.equal, results, expected))



@pytest.mark.parametrize("n", [193, 200, 256])
def test_what_a_launch_is_told(resident, part, monkeypatch, n):
    """Without a GPU: each argument has its place, and what is kept lies in the memory of its own matrix."""
    if reason := paths.why_no_triton():
        pytest.skip(reason)
    kernel, launched = part("kernels.onchip.sm90_gram_chain").gram_chain_kernel, []
    monkeypatch.setattr(kernel, "launch", lambda *arguments, **options: launched.append(arguments))
    monkeypatch.setattr(resident, "_known", {})
    A, Q, Z, T = torch.empty(4, 3, n, 256, dtype=F16)[..., :n]  # as on a GPU
    for interval, pair in intervals(part, "polar_express", n)[:2]:
        result, *others = resident.follow(interval, pair, A, Q, Z, T)
        assert result is Z and {id(t) for t in others} == {id(Q), id(T)}
        programs, _, *arguments = launched.pop()
        names = list(inspect.signature(kernel.function).parameters)
        assert programs == 3 and len(arguments) == len(names)
        told = dict(zip(names, arguments))
        for name, base in (("a", A), ("z", Z)):
            assert told[name].base is base and told[name].block_shape == [1, 128, 128]
        for name, base in (("one", T), ("other", Q)):
            box, half = told[f"{name}_box"], told[f"{name}_half"]
            assert told[name] is base is box.base is half.base and half.block_shape == [1, 64, 128]
            assert box.shape == half.shape == [3, 384, 128] and box.strides == [told["apart"], 128, 1]
        assert told["apart"] == A.stride(0) >= 384 * 128 and told["products"] == len(told["codes"])
        assert (told["x"].base, told["steps"], told["EARLY"]) == (A, 0, False), "nothing is multiplied"
    for dtype, scales in ((F16, None), (BF16, torch.ones(3))):
        X = torch.empty(3, n, 320, dtype=dtype)[..., :300]
        resident.follow(*intervals(part, "polar_express", n)[0], A, Q, Z, T, (X, scales))
        told = dict(zip(names, launched.pop()[2:]))
        assert told["x"].base is X and told["x"].block_shape == [1, 256, 64] and told["steps"] == 5
        assert told["EARLY"] == (dtype == BF16), "what was cast or multiplied is by the launch before"
        assert told["a"].base is A and (told["scales"] is scales if dtype == BF16 else torch.all(told["scales"] == 1))


@on_gpu
@pytest.mark.parametrize("name", ["polar_express", "quintic", "jordan"])
@pytest.mark.parametrize("N, n", SIZES)
def test_the_bits_are_those_of_launches(taken, resident, part, N, n, name):
    torch.manual_seed(n)
    for interval, pair in intervals(part, name, n):
        A = grams(N, n, 0.5 if len(interval) == 3 else 0.9, "cuda").to(F16)
        A[-1] = 0.0
        squares = rooms(part, N, n)
        squares[0].copy_(A)
        expected = part("newton_schulz.iteration").follow(interval, pair, *squares)[0].clone()
        assert torch.equal(expected, expected.mT) and expected.isfinite().all()
        for _ in range(3):
            squares = rooms(part, N, n)
            squares[0].copy_(A)
            assert resident.supports(*squares[:2], interval, pair)
            result, *_ = resident.follow(interval, pair, *squares)
            assert torch.equal(result, expected)
    assert len(taken) >= 3


@on_gpu
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("N, n, m", [(3, 193, 200), (140, 240, 1000), (2, 256, 320), (64, 256, 768), (1, 255, 8)])
def test_gram_matrices_have_the_bits_of_launches(taken, resident, part, N, n, m, dtype):
    torch.manual_seed(m)
    X, scales = torch.zeros(N, n, m + -m % 64, device="cuda", dtype=dtype)[..., :m], torch.rand(N, device="cuda")
    X.normal_()
    scales /= torch.linalg.matrix_norm(X.float())
    X[-1, 2, 3] = float("nan") if N > 2 else 1.0
    scales[0] *= -1.0 if N > 1 else 1.0
    for interval, pair in intervals(part, "polar_express", n):
        A, Q, Z, T = rooms(part, N, n)
        A.copy_(grams(N, n, 0.5, "cuda"))
        given = A.clone()
        expected = (
            part("newton_schulz.iteration")
            .follow(interval, pair, part("kernels.matmul.api").gram(X, A, scales), Q, Z, T)[0]
            .clone()
        )
        for _ in range(3):
            squares = rooms(part, N, n)
            squares[0].copy_(given)
            result, *_ = resident.follow(interval, pair, *squares, (X, scales))
            torch.testing.assert_close(result, expected, rtol=0.0, atol=0.0, equal_nan=True)
    assert taken and (N < 3 or expected[-1].isnan().any()) and expected[0].isfinite().all()


@on_gpu
@pytest.mark.parametrize("dtype", [BF16, F16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [
    (140, 256, 512), (95, 200, 640), (93, 700, 256), (64, 256, 768), (14, 193, 260), (20, 240, 193), (66, 256, 1000),
], ids=str)
def test_bits_do_not_depend_on_the_batch(taken, part, shape, dtype):
    polar = part("newton_schulz.orthogonalize")
    X = torch.randn(shape, device="cuda").to(dtype)
    X[7], X[5, 2, 3], X[9] = X[0], float("nan"), 0.0
    if dtype == BF16:
        X[11:13] *= torch.tensor([2.0**70, 2.0**-70], device="cuda").view(2, 1, 1)
    whole = polar.orthogonalize(X)
    assert taken and torch.equal(whole[7], whole[0]) and not whole[9].any()
    assert whole[5].isnan().any() and whole[[0, 4, 6, 10, 11, 12]].isfinite().all()
    others = [i for i in range(shape[0]) if i != 5]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part("kernels.onchip.gram_chain"), "FROM", 1000)
        paths.forget(polar, patch)
        before = len(taken)
        assert torch.equal(polar.orthogonalize(X)[others], whole[others]) and len(taken) == before
    for i in (0, 6, shape[0] - 1):
        assert torch.equal(polar.orthogonalize(X[i:i + 1]), whole[i:i + 1])


@on_gpu
def test_a_graph_and_a_tape_give_the_same_bits(taken, part):
    orthogonalize = part("newton_schulz.orthogonalize").orthogonalize
    X = torch.randn(100, 256, 300, device="cuda", dtype=BF16)
    expected = orthogonalize(X)
    launched = len(taken)
    assert torch.equal(orthogonalize(X), expected) and torch.equal(orthogonalize(X.clone()), expected)
    assert len(taken) <= launched + 2, "later calls are played"
    assert paths.repeats(lambda: orthogonalize(X), expected)

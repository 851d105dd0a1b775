"""The products of a segment in one launch: which they are, who takes them so, and on an H100 or an H200 the
bits of launches. `tests/test_tiles.py` compiles the kernel without one.
"""
from __future__ import annotations

import pytest
import torch

from tests import paths
from tests.test_pairs import SETS

F16, BF16 = torch.float16, torch.bfloat16
on_gpu = pytest.mark.gpu


@pytest.fixture
def products(part):
    return part("kernels.products")


@pytest.fixture
def taken(products, part, monkeypatch):
    """Where matrices of any side are taken so; counts the launches, those from a tape left out."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm90")
    launch, calls = products.take, []
    monkeypatch.setenv("OPTIMIZER_KERNELS", "triton")
    monkeypatch.setattr(products, "SIDES", range(129, 1 << 20))
    monkeypatch.setattr(products, "LARGE", 1)
    monkeypatch.setattr(products, "processors_of", lambda device: 1)
    monkeypatch.setattr(products, "choose", lambda *about: products.TILE)
    monkeypatch.setattr(products, "take", lambda *arguments: calls.append(1) or launch(*arguments))
    paths.forget(part("polar"), monkeypatch)
    return calls


def segments(part, name, n=1024, most=3):
    """Those that are longer than a step."""
    steps = part("steps").steps_of(name)
    found = zip(steps.segments(F16, most, n), steps.pairs(F16, most, n))
    return [(tuple(segment), pair) for segment, pair in found if len(segment) > 1 and all(c for _, _, c in segment)]


def squares(N, n, device="cpu", dtype=torch.float32):
    """Four stacks one after another, the first of matrices with eigenvalues from 0 to 0.8."""
    pitch = n + -n % 64
    every = torch.zeros(4 * N, n, pitch, device=device, dtype=dtype)[:, :, :n]
    G = torch.randn(N, n, 2 * n, device=device)
    A = G @ G.mT
    every[:N] = (0.8 * A / torch.linalg.matrix_norm(A, 2)[:, None, None]).to(dtype)
    return every.split(N)


def played(part, made, stacks):
    """Do the listed products one by one."""
    for left, right, out, alpha, addends, diagonal in made:
        given = [(stacks[k], beta) for k, beta in addends]
        part("kernels.gram").symmetric_product(stacks[left], stacks[right], stacks[out], alpha, given, diagonal)


@pytest.mark.parametrize("most", [2, 3, 5])
@pytest.mark.parametrize("name", SETS)
def test_what_is_listed_is_what_is_done(part, products, name, most):
    for segment, pair in segments(part, name, most=most):
        ours, others = squares(2, 24), [stack.clone() for stack in squares(2, 24)]
        for mine, other in zip(ours, others):
            other.copy_(mine)
        made, names = part("segment")._listed(segment, pair)
        played(part, made, ours)
        results = part("segment").follow(segment, pair, *others)
        assert torch.equal(ours[names[0]], results[0]) and sorted(names) == [1, 2, 3]
        assert 0 < len(made) and all(out != left and out != right for left, right, out, *_ in made)


def test_who_is_taken(products, part, monkeypatch):
    monkeypatch.setattr(products, "architecture", lambda kind, index: "sm90")
    monkeypatch.setattr(products, "knows_triton", lambda: True)
    monkeypatch.setattr(products, "processors_of", lambda device: 132)

    def takes(N, n, dtype=F16):
        return products.takes(torch.empty(N, n, n + -n % 64, dtype=dtype)[:, :, :n])

    assert takes(2, 2048) and takes(8, 1024) and takes(10, 1280) and takes(3, 2100, dtype=BF16)
    assert takes(1, 4097) and takes(1, 7168)
    assert not (takes(1, 4096) or takes(100, 1023) or takes(1, 7169) or takes(7, 1024))
    assert not (takes(9, 1200) or takes(9, 1025)), "much of the tiles would be in vain"
    assert not takes(2, 2048, dtype=torch.float32)
    tiles = part("kernels.tiles")
    with tiles.force(tiles.Tile(64, 64, 64, 8, 3, 8, "once")):
        assert not takes(2, 2048)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "choose", lambda *about: tiles.Tile(128, 256, 64, 8, 3, 4, "cooperative"))
        assert takes(2, 2048) and takes(8, 4096) and not takes(8, 2752), "those are faster by launches"
    monkeypatch.setattr(products, "architecture", lambda kind, index: "sm100")
    assert not takes(2, 2048)


def test_which_gram_matrices_are_taken_along(products, part, monkeypatch):
    A, tiles = torch.zeros(2, 1024, 1024, dtype=F16), part("kernels.tiles")
    found = dict(zip(("pingpong", "cooperative"), (products.TILE, tiles.Tile(128, 256, 64, 8, 3, 4, "cooperative"))))
    for loop, tile in found.items():
        monkeypatch.setattr(products, "choose", lambda *about, tile=tile: tile)
        assert products.takes_gram(torch.zeros(2, 1024, 2048, dtype=F16), A) == (loop == "pingpong")
        assert not products.takes_gram(torch.zeros(2, 1024, 2048, dtype=BF16), A), "of matrices that are yet to be cast"
        assert not products.takes_gram(torch.zeros(2, 1024, 2047, dtype=F16), A)


@pytest.mark.parametrize("apart", [(2, 2560), (3, 2048), (4, 1600), (12, 1600), (1, 5120), (2, 5120)])
def test_programs_begin_turns_together(products, apart):
    """As closely as gains, but where they would wait for each other's ends."""
    N, n = apart
    down = -(-n // 128)
    assert products._apart(N, n, down * (down + 1) / 2 / 132) == 2


@pytest.mark.parametrize("apart", [(2, 2048), (2, 2304), (8, 1024), (16, 1024), (10, 1280)])
def test_programs_do_not_wait_for_ends(products, apart):
    N, n = apart
    down = -(-n // 128)
    assert products._apart(N, n, down * (down + 1) / 2 / 132) > 8192 / 64


@pytest.mark.parametrize("name", ["polar_express", "turbo"])
@pytest.mark.parametrize("whole_gpu, along", [(True, True), (True, False), (False, True)])
def test_the_iteration_lends_it_what_it_takes(products, part, monkeypatch, name, whole_gpu, along):
    """Four stacks one after another, and what nobody reads meanwhile; beside other work launches do it. X X^T goes
    along unless rows of it are scaled first.
    """
    iteration, steps = part("iteration"), part("steps").steps_of(name)
    U = torch.randn(3, 40, 64)
    expected, result, calls, grams = torch.empty_like(U), torch.empty_like(U), [], []
    iteration.iterate([(U, expected)], steps, 1e-7, torch.float32, 3)

    def take(made, A, spare, X=None, scales=None):
        N, n, _ = A.shape
        if X is not None:
            A.fill_(float("nan"))
            part("kernels.gram").gram(X, A, scales)
            grams.append(1)
        assert spare.shape[:2] == A.shape[:2] and spare.shape[2] >= n
        spare[-1, n // 2:] = float("nan")
        every = A.as_strided((4 * N, n, n), A.stride())
        every[N:] = float("nan")
        played(part, made, every.split(N))
        calls.append(len(made))

    monkeypatch.setattr(products, "takes", lambda A: True)
    monkeypatch.setattr(products, "takes_gram", lambda X, A: along)
    monkeypatch.setattr(products, "take", take)
    sizes = iteration.takes(40, 64, 4, 3)
    lent = [torch.empty(3 * size, dtype=torch.uint8) for size in (sizes[0] // 2, sizes[0] // 2, sizes[1])]
    iteration.iterate([(U, result)], steps, 1e-7, torch.float32, 3, lent, whole_gpu)
    longer = sum(len(segment) > 1 for segment in steps.segments(torch.float32, 3, 40))
    assert torch.equal(result, expected) and longer > 0 and len(calls) == longer * whole_gpu
    assert len(grams) == (len(calls) - (name == "turbo") if along and whole_gpu else 0)


def test_only_the_function_has_the_whole_gpu(optimizer, products, part, monkeypatch):
    """An optimizer may do other things beside: updates in a stream of their own, messages, other stacks. In a process
    with a process group messages may come at any time, also when calls like this one were made before there was one.
    """
    polar, asked = part("polar"), []
    monkeypatch.setattr(products, "takes", lambda A: asked.append(len(A)))
    X = torch.randn(3, 200, 300)
    expected = optimizer.orthogonalize(X, dtype=F16)
    assert asked and set(asked) == {3}
    asked.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        for U in (X, X.clone().requires_grad_()):  # around torch's dispatcher, and through it
            assert torch.equal(optimizer.orthogonalize(U, dtype=F16), expected)
    polar.orthogonalize_([X], polar.steps_of("polar_express"), dtype=F16)
    assert torch.equal(X, expected) and not asked


def test_the_next_product_begins_with_what_was_taken_last(products, part, monkeypatch):
    """Which is in the cache still: matrices are taken from the first on, and the one after begins with the last."""

    class Launch:
        counted = 1

        def __call__(self, *tensors):
            pass

    gram, (A, spare) = part("kernels.gram"), torch.zeros(2, 2, 128, 128, dtype=F16)
    monkeypatch.setattr(products, "_Launch", lambda *kind: Launch())
    monkeypatch.setattr(products, "_known", {})
    gram._direction("gram")
    assert gram._direction("product") == 1
    gram._direction("gram")
    products.take(((0, 0, 1, 1.0, ((0, 0.5),), 0.0),), A, spare)
    assert gram._direction("product") == -1


def test_counts_are_at_the_end_of_what_is_spare(products):
    for N, n, m in ((2, 128, 128), (3, 300, 512)):
        spare, size = torch.zeros(N, n, m, dtype=F16), 1 + N * 8 * -(-n // 128)
        counts = products._counts(spare, size)
        counts.fill_(-1)
        assert counts.shape == (size,) and counts.dtype == torch.int32
        changed = spare.flatten().view(torch.int16).nonzero()
        assert len(changed) == 2 * size == changed[-1] - changed[0] + 1 and changed[-1] >= spare.numel() - 64
        assert (counts.data_ptr() - spare.data_ptr()) % 128 == 0


def test_a_launch_is_told_of_products(products):
    places, factors = products._numbers((2, 1, 3, 0.5, ((2, 0.25), (0, 2.0)), 1.5))
    assert places == [2, 1, 3, 2, 0, 3, 2, 0] and factors == [0.5, 1.5, 0.25, 2.0, 0.0, 0.0, 0.0, 0.0]


@on_gpu
@pytest.mark.parametrize("N, n", [(1, 130), (3, 300), (40, 200), (1, 1000), (5, 1024), (2, 2048), (3, 2100), (9, 640)])
def test_the_bits_are_those_of_launches(taken, products, part, N, n):
    torch.manual_seed(n)
    for name in ("polar_express", "jordan"):
        for segment, pair in segments(part, name, n):
            given = squares(N, n, "cuda", F16)
            if N > 1:
                given[0][-1] = 0.0
            if N > 2:
                given[0][1, n // 2, n // 2] = float("nan")
            made, names = part("segment")._listed(segment, pair)
            A, expected = given[0].clone(), squares(N, n, "cuda", F16)
            expected[0].copy_(A)
            played(part, made, expected)
            for _ in range(4):
                given[0].copy_(A)
                products.take(made, given[0], torch.ones(N, n, n + n % 2, dtype=F16, device="cuda"))
                torch.testing.assert_close(given[names[0]], expected[names[0]], rtol=0.0, atol=0.0, equal_nan=True)
            assert given[names[0]][0].isfinite().all() and (N < 3 or given[names[0]][1].isnan().any())
    assert len(taken) >= 8


@on_gpu
@pytest.mark.parametrize("N, n, m", [(1, 130, 200), (4, 300, 520), (2, 1000, 1500), (3, 1024, 8192), (1, 2304, 2304),
                                     (2, 2100, 2500)])
def test_the_gram_matrix_goes_along(taken, products, part, N, n, m):
    """Also of matrices whose scale is negative: theirs is there already, and stays."""
    torch.manual_seed(n)
    X = torch.zeros(N, n, m + -m % 64, device="cuda", dtype=F16)[:, :, :m]
    X.copy_(torch.randn(N, n, m, device="cuda") / (1.1 * m**0.5 + n**0.5))
    scales = torch.rand(N, device="cuda") / 2 + 0.4
    if N > 1:
        X[-1], scales[0] = 0.0, -1.0
    if N > 2:
        X[1, n // 2, m // 2] = float("nan")
    for segment, pair in segments(part, "polar_express", n):
        made, names = part("segment")._listed(segment, pair)
        expected, given = squares(N, n, "cuda", F16), squares(N, n, "cuda", F16)
        there = given[0].clone()
        for A in (expected[0], given[0]):
            A.copy_(there)
        part("kernels.gram").gram(X, expected[0], scales)
        played(part, made, expected)
        for _ in range(4):
            given[0].copy_(there)
            for stack in given[1:]:
                stack.fill_(float("nan"))
            products.take(made, given[0], torch.ones(N, n, n + n % 2, dtype=F16, device="cuda"), X, scales)
            torch.testing.assert_close(given[names[0]], expected[names[0]], rtol=0.0, atol=0.0, equal_nan=True)
        assert given[names[0]][0].isfinite().all() and (N < 3 or given[names[0]][1].isnan().any())


@on_gpu
def test_a_call_a_tape_and_a_graph_give_the_same_bits(taken, part, monkeypatch):
    polar = part("polar")
    X = torch.randn(6, 740, 900, device="cuda", dtype=BF16)
    expected = polar.orthogonalize(X)
    assert len(taken) >= 2
    for _ in range(3):
        assert torch.equal(polar.orthogonalize(X), expected)
    assert paths.repeats(lambda: polar.orthogonalize(X), expected)
    launched = len(taken)
    monkeypatch.setattr(part("kernels.products"), "takes", lambda A: False)
    paths.forget(polar, monkeypatch)
    assert torch.equal(polar.orthogonalize(X), expected) and len(taken) == launched


@on_gpu
def test_another_stream_may_have_the_processors(taken, part):
    """What runs beside it, on processors that it wants, does not stop it, nor the other way round."""
    X, busy = torch.randn(4, 1140, 1140, device="cuda", dtype=BF16), torch.randn(6000, 6000, device="cuda")
    expected, product = part("polar").orthogonalize(X), busy @ busy
    streams, results = [torch.cuda.Stream() for _ in range(3)], []
    for _ in range(10):
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append(busy @ busy if stream is streams[0] else part("polar").orthogonalize(X))
    torch.cuda.synchronize()
    assert taken and all(torch.equal(result, product if len(result) > 4 else expected) for result in results)

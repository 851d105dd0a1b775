"""The batched products: accuracy against fp64, symmetry, aliasing, layouts, bits that do not depend on the batch."""
from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from tests.paths import INTERPRETED, poisoned, quiet
from tests.ranks import everywhere

pytestmark = quiet

SHAPES = [(1, 1), (1, 9), (5, 3), (16, 16), (17, 1), (33, 50), (40, 20)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
every_shape = pytest.mark.parametrize("n, m", SHAPES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def gram(part, path):
    """The module, on small tiles, so that small matrices have many."""
    tiles = part("kernels.launch.tile_config")
    with tiles.force(tiles.Tile(rows=16, columns=16, inner=16, group=2, stages=2, warps=4)):
        yield part("kernels.matmul.api")


def skip_interpreted_bf16(path, dtype):
    if INTERPRETED and path == "triton" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies bf16 wrongly")


def check(out, exact, magnitude, inner):
    """Compare with fp64: one rounding of the result, and the rounding of `inner` fp32 sums of this magnitude."""
    bound = torch.finfo(out.dtype).eps * exact.abs() + (inner + 4) * 2.0**-23 * magnitude
    bound += torch.finfo(out.dtype).smallest_normal
    assert ((out.double() - exact).abs() <= bound).all()


def symmetric(N, n, dtype, device):
    """Return two symmetric matrices that commute: polynomials of one."""
    X = torch.randn(N, n, n, dtype=torch.float64, device=device) / n**0.5
    A = (X + X.mT) / 2
    return A.to(dtype), (A @ A).to(dtype)


@pytest.mark.parametrize("n", [1, 17, 130])
@every_dtype
def test_what_is_linear_against_fp64(gram, device, n, dtype):
    """Also in place, and in transposed memory."""
    A = torch.randn(3, n, n, device=device).to(dtype)
    exact = -1.5 * A.double() + 0.75 * torch.eye(n, device=device, dtype=torch.float64)
    for out in (poisoned(3, n, n, dtype=dtype, device=device), poisoned(3, n, n, dtype=dtype, device=device).mT, A):
        assert gram.linear(A, -1.5, 0.75, out) is out
        assert ((out.double() - exact).abs() <= torch.finfo(dtype).eps * (exact.abs() + 2)).all()


@pytest.mark.kernels_ci
@every_shape
@every_dtype
def test_gram_against_fp64(gram, device, path, n, m, dtype):
    skip_interpreted_bf16(path, dtype)
    X, out = torch.randn(3, n, m, device=device).to(dtype), poisoned(3, n, n, dtype=dtype, device=device)
    assert gram.gram(X, out) is out
    wide = X.double()
    check(out, wide @ wide.mT, wide.abs() @ wide.abs().mT, m)
    assert torch.equal(out, out.mT)


@every_shape
@every_dtype
def test_product_against_fp64_into_a_transposed_view_of_another_dtype(gram, device, path, n, m, dtype):
    skip_interpreted_bf16(path, dtype)
    A, X = torch.randn(2, n, n, device=device).to(dtype), torch.randn(2, m, n, device=device).to(dtype).mT
    out = poisoned(2, m, n, device=device).mT
    gram.product(A, X, out)
    A, X = A.double(), X.double()
    check(out, A @ X, A.abs() @ X.abs(), n)


@pytest.mark.parametrize("n", [1, 5, 16, 33])
@every_dtype
@pytest.mark.parametrize("addends", [1, 2, 3])
@pytest.mark.parametrize("aliased", [False, True])
def test_symmetric_product_against_fp64(gram, device, path, n, dtype, addends, aliased):
    """Addends are read in their lower triangles only, and one may be the output."""
    skip_interpreted_bf16(path, dtype)
    A, B = symmetric(2, n, dtype, device)
    Cs, factors = [symmetric(2, n, dtype, device)[0] for _ in range(addends)], [-1.5, 0.75, 2.0]
    sums = sum(factor * C.double() for C, factor in zip(Cs, factors))
    exact = 0.5 * A.double() @ B.double() + sums + 0.25 * torch.eye(n, device=device)
    exact = exact.tril() + exact.tril(-1).mT
    upper = torch.ones(n, n, dtype=torch.bool, device=device).triu(1)
    given = [C.masked_fill(upper, float("nan")) for C in Cs]
    out = given[-1] if aliased else poisoned(2, n, n, dtype=dtype, device=device)
    gram.symmetric_product(A, B, out, 0.5, list(zip(given, factors)), 0.25)
    magnitude = A.double().abs() @ B.double().abs() + torch.eye(n, device=device)
    magnitude += sum(2 * C.double().abs() for C in Cs)
    check(out, exact, torch.maximum(magnitude, magnitude.mT), n)
    assert torch.equal(out, out.mT)


@every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_one_matrix_has_the_same_bits_in_every_batch(gram, device, n, m, dtype):
    X, A = torch.randn(4, n, m, device=device).to(dtype), symmetric(4, n, dtype, device)[0]

    def results(X, A):
        square, rectangle = (poisoned(*t.shape, dtype=dtype, device=device) for t in (A, X))
        sums = gram.symmetric_product(A, A, square.clone(), 1.0, [(A, 2.0), (A.mT, 0.5)], 1.0)
        return gram.gram(X, square.clone()), sums, gram.product(A, X, rectangle)

    whole = results(X, A)
    for some in (slice(1, 3), slice(3, 4)):
        for copied in (False, True):
            part = results(*(t[some].clone() if copied else t[some] for t in (X, A)))
            assert all(torch.equal(w[some], p) for w, p in zip(whole, part))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n, m", [(33, 7), (54, 11), (9, 49), (128, 300)])
def test_bits_do_not_depend_on_the_batch_on_any_number_of_threads(part, monkeypatch, threads, n, m):
    """A CPU's batched product does not do this: its order of summation changes with the batch and with alignment."""
    monkeypatch.setenv("OPTIMIZER_KERNELS", "torch")
    module, before = part("kernels.matmul.api"), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        X = torch.randn(6, n, m)
        whole = module.gram(X, torch.empty(6, n, n))
        alone = [module.gram(x[None], torch.empty(1, n, n))[0] for x in X]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(whole, torch.stack(alone))


def test_nan_stays_in_its_matrix(gram, device):
    X = torch.randn(3, 20, 24, device=device)
    X[1, 3, 3] = float("nan")
    out = gram.gram(X, poisoned(3, 20, 20, device=device))
    assert out[1].isnan().any() and out[[0, 2]].isfinite().all()


def test_empty_batches_and_empty_sums(gram, device):
    assert gram.gram(torch.empty(0, 3, 4, device=device), torch.empty(0, 3, 3, device=device)).shape == (0, 3, 3)
    out = gram.gram(torch.empty(2, 3, 0, device=device), poisoned(2, 3, 3, device=device))
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("strides", [(1 << 30, 8, 1), (8, (1 << 31) // 3 + 1, 1)], ids=str)
def test_offsets_beyond_32_bits(gram, device, strides):
    """Peers' defect: batched kernels whose offsets overflow from 2^31 elements on."""
    memory = torch.empty((1 << 31) + 4096, dtype=torch.float16, device=device)
    X = memory.as_strided((3, 4, 8), strides)
    X.copy_(values := torch.randn(3, 4, 8, device=device))
    out = gram.gram(X, poisoned(3, 4, 4, device=device))
    values = values.half().double()
    check(out, values @ values.mT, values.abs() @ values.abs().mT, 8)
    A = values @ values.mT / 8
    out = gram.product(A.half(), X, poisoned(3, 4, 8, device=device))
    check(out, A.half().double() @ values, A.half().double().abs() @ values.abs(), 4)


@pytest.mark.gpu
@pytest.mark.parametrize("n, m", [(768, 3072), (1000, 1003), (4096, 1024), (64, 256)])
@every_dtype
def test_large_matrices_with_the_tiles_of_the_table(part, monkeypatch, n, m, dtype):
    """No worse than cuBLAS on the same input, and the same bits in another batch."""
    monkeypatch.setenv("OPTIMIZER_KERNELS", "triton")
    module = part("kernels.matmul.api")
    X = torch.randn(3, n, m, device="cuda").to(dtype) / m**0.5
    out = module.gram(X, poisoned(3, n, n, dtype=dtype, device="cuda"))
    exact = X.double() @ X.double().mT
    error, reference = ((x.double() - exact).abs().max() for x in (out, torch.bmm(X, X.mT)))
    assert error <= 1.5 * reference + 4e-6 and torch.equal(out, out.mT)
    assert torch.equal(module.gram(X[2:].clone(), torch.empty_like(out[:1]))[0], out[2])
    P = module.symmetric_product(out, out, torch.empty_like(out), 0.5, [(out, -1.0)], 2.0)
    exact = 0.5 * out.double() @ out.double() - out.double() + 2 * torch.eye(n, device="cuda")
    bound = 4 * torch.finfo(dtype).eps + n * 2.0**-23 * (out.double().abs() @ out.double().abs()).max()
    assert (P.double() - exact).abs().max() < bound and torch.equal(P, P.mT)
    Y = module.product(P, X, torch.empty_like(X))
    check(Y, P.double() @ X.double(), P.double().abs() @ X.double().abs(), n)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["gram", "symmetric", "product"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N, n, m", [(3, 200, 520), (2, 768, 776), (1, 1000, 3000), (5, 768, 136), (8, 1000, 136),
                                     (6, 768, 1100)])
def test_measured_tiles_agree_in_every_bit(part, device, op, dtype, N, n, m, monkeypatch):
    """Otherwise a matrix would get other bits on a rank that owns more matrices: measured choices count the batch. From
    whichever end matrices are taken.

    On 132 processors, some of the shapes are halves of tiles only, some whole ones only, some both, for each tile.
    """
    gram, tiles = part("kernels.matmul.api"), part("kernels.launch.tile_config")
    entries = [e for e in tiles.table(tiles.architecture("cuda"))["entries"] if e["op"] == op and "us" in e]
    if not entries:
        pytest.skip("this architecture has no measured entries")
    X, (A, B) = torch.randn(N, n, m, device=device).to(dtype), symmetric(N, n, dtype, device)
    results = []
    for entry, direction in itertools.product(entries, (1, -1)):
        monkeypatch.setattr(gram, "_direction", lambda op, direction=direction: direction)
        out = poisoned(N, n, m if op == "product" else n, dtype=dtype, device=device)
        with tiles.force(tiles.tile_of(entry)):
            if op == "gram":
                gram.gram(X, out)
            elif op == "product":
                gram.product(A, X, out)
                turned = poisoned(N, m, n, dtype=dtype, device=device).mT
                out = torch.cat([out, gram.product(A, X, turned)])
                square = gram.product(A, A, poisoned(N, n, n, dtype=dtype, device=device))
                out = torch.cat([out.flatten(), square.flatten()])
            else:
                addends = [(A, 0.3), (B, -1.1), (X[:, :, :n] if m >= n else A, 0.9)]
                out = torch.cat([gram.symmetric_product(A, right, out.clone(), 0.7, addends[:count], 0.5 * (count % 2))
                                 for right in (A, B) for count in range(4)])
        results.append(out)
    assert all(torch.equal(out, results[0]) for out in results)


def test_the_sign_of_count_says_which_matrix_comes_first(part, monkeypatch):
    """What kernels compute of it, in Python: `load` shows where the order of tiles is read."""
    pipeline, by_tma = part("kernels.matmul.sm90_pipeline"), part("kernels.matmul.sm90_tma")
    language = SimpleNamespace(where=lambda which, one, other: one if which else other, abs=abs, load=lambda at: at)
    monkeypatch.setattr(pipeline, "gl", language)
    monkeypatch.setattr(by_tma, "tl", language)
    matrix_order, matrix_index, tile = map(plain, (pipeline.matrix_order, pipeline.matrix_index, by_tma._tile))
    for count, matrices in ((6, [0, 1, 2]), (-6, [2, 1, 0])):
        order, turns = matrix_order(count, 18), [(matrix, 2 * number) for matrix in matrices for number in range(6)]
        assert [(matrix_index(order, turn), turn % order[0] * 2) for turn in range(18)] == turns
        assert [tile(0, count, 18, turn)[:2] for turn in range(18)] == turns


def plain(function):
    """What was decorated, also where Triton has it by now."""
    return function.function if hasattr(function, "function") else function.fn


def test_launches_begin_where_the_one_before_has_ended(part):
    """Where its results are in the cache still; norms end with the last matrix."""
    ops = "gram symmetric symmetric product gram symmetric product".split()
    assert [part("kernels.matmul.api")._direction(op) for op in ops] == [-1, 1, -1, 1, -1, 1, -1]


@pytest.mark.gpu
@pytest.mark.parametrize("rows, columns, stages", [(64, 128, 3), (128, 128, 3), (128, 128, 4)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [129, 200, 256, 321, 512, 777, 1000])
def test_only_lower_triangles_are_read_and_written(part, device, rows, columns, stages, dtype, n):
    """By sm90_one_tile.py, with the same bits: squares above the diagonal may hold anything, and keep it."""
    gram, tiles = part("kernels.matmul.api"), part("kernels.launch.tile_config")
    side = torch.arange(n, device=device) // rows
    if tiles.architecture("cuda", torch.cuda.current_device()) != "sm90":
        pytest.skip("sm90_one_tile.py is for sm90")
    above = side[:, None] < side

    def lay(matrices):
        return torch.empty(3, n, n + -n % 8, dtype=dtype, device=device)[:, :, :n].copy_(matrices)

    def spoil(matrices):
        return lay(matrices.masked_fill(above, float("nan")))

    A, B = (lay(C.tril() + C.tril(-1).mT) for C in symmetric(3, n, dtype, device))
    addends = [(A, 0.3), (lay(torch.randn_like(A)), -1.1), (B, 0.9)]
    with tiles.force(tiles.Tile(rows, columns, 64, 8, stages, 4, "once")):
        assert gram.read_triangles(A, B)
        for count in (1, 2, 3):
            out, spoiled, some = (lay(torch.full_like(A, 7.0)) for _ in range(3))
            gram.symmetric_product(A, B, out, 0.7, addends[:count], 0.5)
            given = [(spoil(C), factor) for C, factor in addends[:count]]
            gram.symmetric_product(spoil(A), spoil(B), spoiled, 0.7, given, 0.5)
            gram.symmetric_product(spoil(A), spoil(B), some, 0.7, given, 0.5, whole=False)
            assert torch.equal(out, out.mT) and torch.equal(out, spoiled)
            assert torch.equal(some, out.masked_fill(above, 7.0))


def test_what_need_not_be_whole_is_whole_by_other_kernels(gram, device):
    A, B = symmetric(2, 33, torch.float32, device)
    out, other = (gram.symmetric_product(A, B, poisoned(2, 33, 33, device=device), 0.5, [(A, 2.0)], 1.0, whole)
                  for whole in (True, False))
    assert torch.equal(out, other) and not gram.read_triangles(A, B)


def test_where_triangles_are_read(part, monkeypatch):
    """Of the tile's kernel and of memory; without a GPU."""
    gram, tiles, launches = (
        part(f"{name}") for name in ("kernels.matmul.api", "kernels.launch.tile_config", "kernels.matmul.api")
    )
    for module in (tiles, launches):
        everywhere(monkeypatch, module, "architecture", lambda kind, index: "sm90")
    for name in ("use_triton", "knows_triton"):
        monkeypatch.setattr(gram, name, lambda *about: True)
    A, odd = torch.empty(3, 768, 768, dtype=torch.float16), torch.empty(3, 768, 769, dtype=torch.float16)[:, :, :768]
    wide, pingpong = tiles.Tile(64, 128, 64, 8, 3, 4, "once"), tiles.Tile(128, 128, 64, 8, 4, 4, "pingpong")
    with tiles.force(wide):
        assert gram.read_triangles(A, A) and not gram.read_triangles(A, odd)
        everywhere(monkeypatch, gram, "knows_triton", lambda: False)
        assert not gram.read_triangles(A)
        everywhere(monkeypatch, gram, "knows_triton", lambda: True)
    others = [tiles.Tile(64, 64, 64, 8, 4, 4, "once"), tiles.Tile(128, 256, 64, 8, 3, 8, "once")]
    for other in (pingpong, *others, tiles.DEFAULT):
        with tiles.force(other):
            assert not gram.read_triangles(A)


def test_groups_of_warps_are_taken_where_tma_stores_the_result(part, monkeypatch):
    """By sm90's table, of the result's layout alone; without a GPU, so nothing is launched."""
    gram, by_tma, tiles, split = (
        part(f"{name}")
        for name in (
            "kernels.matmul.api",
            "kernels.matmul.sm90_tma",
            "kernels.launch.tile_config",
            "kernels.elementwise.row_scattered",
        )
    )
    everywhere(monkeypatch, tiles, "architecture", lambda kind, index: "sm90")
    everywhere(monkeypatch, gram, "knows_triton", lambda: True)
    for module, kind in ((by_tma, "TmaLaunch"), (part("kernels.matmul.api"), "CooperativeLaunch")):
        monkeypatch.setattr(module, kind, lambda *about: about[-1].loop)
    F16, BF16, (N, n, m) = torch.float16, torch.bfloat16, (12, 768, 3072)
    A, X, rows = torch.empty(N, n, n, dtype=F16), torch.empty(N, n, m, dtype=F16), torch.empty(N, n, m, dtype=BF16)
    odd, pieces = torch.empty(N, n, m + 4, dtype=F16), split.ScatteredRows([list(matrix.split(96)) for matrix in rows])

    def loop(out):
        return gram._choose("product", A, X, out, (), (1.0, 0.0))

    for out in (torch.empty_like(X), rows, torch.empty(N, m, n, dtype=F16).mT):
        assert loop(out) == "cooperative"
    for out in (X.float(), odd[..., :m], pieces, pieces.mT.mT):
        assert loop(out) == "flat"
    everywhere(monkeypatch, gram, "knows_triton", lambda: False)
    assert loop(torch.empty_like(X)) == "flat"
    with tiles.force(tiles.Tile(128, 256, 64, 8, 3, 4, "cooperative")):
        assert loop(X) == loop(pieces) == "once"


@pytest.mark.parametrize("turned", [False, True])
def test_lower_triangles_are_mirrored(part, turned):
    """For every size, in blocks of all sizes, also beside what fills no block."""
    for n in range(1, 70):
        X = torch.randn(3, n, n + 2)[..., 1:n + 1]
        expected = X.tril() + X.tril(-1).mT
        result = X.mT.contiguous().mT if turned else X
        assert torch.equal(part("kernels.matmul.reference")._mirror(result), expected), n

"""Momentum and copies over many rectangles: values, layouts, fresh addresses, bits that do not depend on the cuts."""
from __future__ import annotations

import math

import pytest
import torch

from tests.paths import INTERPRETED, poisoned, quiet, take

pytestmark = quiet

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [(F32, F32, F32), (F32, BF16, F32), (F32, BF16, BF16), (BF16, F16, F32), (F16, F32, BF16)]
every_dtype = pytest.mark.parametrize("m_dtype, u_dtype, g_dtype", DTYPES, ids=str)
SHAPES = [(3, 5), (1, 7), (0, 4), (9, 1), (6, 0), (70, 90)]


@pytest.fixture
def pack(part, path):
    return part("kernels.elementwise.momentum")


def addresses(gradients, path):
    """Return what the optimizer passes: the gradients' addresses where Triton reads them."""
    if path == "torch":
        return None
    return torch.tensor([g.data_ptr() for g in gradients], dtype=torch.int64, device=gradients[0].device)


def weight(momentum, device):
    """The share of the gradient, where the kernel reads it."""
    return torch.tensor([1.0 - momentum], dtype=torch.float32, device=device)


def setting(part, device, m_dtype, u_dtype, g_dtype, shapes=SHAPES):
    """Momenta with transposed memory, poisoned updates, and gradients that are windows of larger tensors."""
    Source = part("kernels.elementwise.multi_tensor").Source
    M = [torch.randn(c, r, device=device).to(m_dtype).mT for r, c in shapes]
    U = [poisoned(r, c, dtype=u_dtype, device=device) for r, c in shapes]
    sources = [Source(i, 203, (100, 1)) for i in range(len(shapes))]
    return M, U, sources, [torch.randn(80, 100, device=device).to(g_dtype) for _ in shapes]


def assert_close(result, exact, dtype):
    """One rounding to dtype after fp32 arithmetic (towards zero for bf16 in the interpreter)."""
    torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.kernels_ci
@every_dtype
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_against_fp64(pack, part, device, path, m_dtype, u_dtype, g_dtype, nesterov):
    M, U, sources, G = setting(part, device, m_dtype, u_dtype, g_dtype)
    before, kept = [m.double() for m in M], [g.clone() for g in G]
    pack.Pack(M, U, sources, G)(G, addresses(G, path), weight(0.9, device), nesterov)
    for old, m, u, source, g in zip(before, M, U, sources, G):
        g = source.view([g] * len(M), m.shape).double()
        new = 0.9 * old + 0.1 * g
        assert_close(m, new, m_dtype)
        assert_close(u, 0.1 * g + 0.9 * new if nesterov else new, u_dtype)
    assert all(map(torch.equal, G, kept)), "gradients are never changed (a peer's defect)"


def test_fresh_gradients_at_every_step(pack, part, device, path):
    """The sum form of the momentum, scaled by 1 - mu, is the same (math: EMA and sum agree for constant mu)."""
    M, U, sources, G = setting(part, device, F32, F32, F32)
    [m.zero_() for m in M]
    bound, sums = pack.Pack(M, U, sources, G), [torch.zeros_like(m, dtype=torch.float64) for m in M]
    for _ in range(3):
        G = [torch.randn_like(g) for g in G]
        bound(G, addresses(G, path), weight(0.95, device), True)
        sums = [0.95 * s + source.view(G, m.shape).double() for s, source, m in zip(sums, sources, M)]
    for m, u, s, source in zip(M, U, sums, sources):
        assert_close(m, 0.05 * s, F32)
        assert_close(u, 0.05 * (source.view(G, m.shape).double() + 0.95 * s), F32)


def test_signs_of_updates(pack, part, device, path):
    """Of U as rounded; zeros and NaN stay, and the momentum is what it is without them."""
    (M, U, sources, G), found = setting(part, device, F32, F16, F32), []
    G[0].zero_()
    G[1].fill_(math.nan)
    M[0].zero_()
    for signs in (False, True):
        m, u = [m.clone() for m in M], [poisoned(*u.shape, dtype=F16, device=device) for u in U]
        pack.Pack(m, u, sources, G, signs=signs)(G, addresses(G, path), weight(0.9, device), True)
        found.append((m, u))
    (m, u), (other, signs) = found
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(m, other))
    assert all(torch.equal(s.nan_to_num(7.0), t.sign().where(~t.isnan(), 7.0)) for s, t in zip(signs, u))
    assert not signs[0].any() and signs[1].isnan().all() and signs[5].unique().tolist() == [-1.0, 1.0]


def cuts(rows, columns):
    """Return two tilings of a matrix into odd rectangles, (rows, columns) slices."""
    by_rows = [(slice(a, b), slice(0, columns)) for a, b in ((0, 1), (1, 4), (4, 4), (4, rows))]
    by_columns = [(slice(0, rows), slice(a, b)) for a, b in ((0, 7), (7, 8), (8, 31), (31, columns))]
    return by_rows, by_columns


@every_dtype
def test_blocks_of_columns_are_read_in_vectors(pack, part, device, path, m_dtype, u_dtype, g_dtype):
    """Heads of an output projection: rows of whole vectors, with the bits of single elements."""
    table = part("kernels.elementwise.multi_tensor")
    G, M = torch.randn(13, 200, device=device).to(g_dtype), torch.randn(13, 200, device=device).to(m_dtype)
    results, access = [], []
    for start, stop in ((64, 144), (65, 144)):  # the second block begins between two vectors
        m, u = M.clone(), poisoned(13, stop - start, dtype=u_dtype, device=device)
        bound = pack.Pack([m[:, start:stop]], [u], [table.Source(0, start, (200, 1))], [G])
        bound([G], addresses([G], path), weight(0.95, device), True)
        access += [launch.access for launch in bound.launches or ()]
        results.append((m[:, 65:144], u[:, 65 - start:]))
    assert all(map(torch.equal, *results))
    assert access in ([], [table.VECTORS, table.ELEMENTS])


@pytest.mark.parametrize("nesterov", [True, False])
def test_each_rectangle_has_the_momentum_of_its_group(pack, part, device, path, nesterov):
    Source, numbers = part("kernels.elementwise.multi_tensor").Source, part("kernels.elementwise.multi_tensor").NUMBERS
    G = [torch.randn(4, 5, device=device) for _ in range(3)]
    M = [torch.randn(4, 5, device=device) for _ in range(3)]
    groups, momenta = [1, 0, 1], [0.9, 0.8]
    weights = torch.full((2 * numbers,), math.nan, device=device)
    weights[::numbers] = 1 - torch.tensor(momenta)
    results = []
    for together in (True, False):
        m, u = [x.clone() for x in M], [poisoned(4, 5, dtype=F32, device=device) for _ in M]
        sources = [Source(i, 0, (5, 1)) for i in range(3)]
        if together:
            pack.Pack(m, u, sources, G, groups=groups)(G, addresses(G, path), weights, nesterov)
        for i in range(0 if together else 3):
            pack.Pack(m[i:i + 1], u[i:i + 1], sources[i:i + 1], G)(
                G, addresses(G, path), weights[groups[i] * numbers:][:1], nesterov)
        results.append(m + u)
    assert all(map(torch.equal, *results))


@every_dtype
def test_bits_do_not_depend_on_how_a_matrix_is_cut(pack, part, device, path, m_dtype, u_dtype, g_dtype):
    Source = part("kernels.elementwise.multi_tensor").Source
    R, C = 13, 67
    G, M = torch.randn(R, C, device=device).to(g_dtype), torch.randn(R, C, device=device).to(m_dtype)

    def run(pieces, contiguous):
        full_m, full_u = M.clone(), poisoned(R, C, dtype=u_dtype, device=device)
        m, u = ([t[piece].clone() if contiguous else t[piece] for piece in pieces] for t in (full_m, full_u))
        sources = [Source(0, rows.start * C + columns.start, (C, 1)) for rows, columns in pieces]
        pack.Pack(m, u, sources, [G])([G], addresses([G], path), weight(0.95, device), True)
        for piece, part_m, part_u in zip(pieces, m, u):
            full_m[piece], full_u[piece] = part_m, part_u
        return full_m, full_u

    whole = run([(slice(0, R), slice(0, C))], False)
    assert not whole[1].isnan().any()
    for pieces in cuts(R, C):
        for contiguous in (True, False):
            assert all(map(torch.equal, whole, run(pieces, contiguous)))


@pytest.mark.interpreter
@every_dtype
def test_triton_and_torch_give_the_same_bits(part, device, monkeypatch, m_dtype, u_dtype, g_dtype):
    if INTERPRETED and BF16 in (m_dtype, u_dtype):
        pytest.skip("the interpreter rounds to bf16 towards zero")
    results = []
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        torch.manual_seed(0)
        M, U, sources, G = setting(part, device, m_dtype, u_dtype, g_dtype)
        part("kernels.elementwise.momentum").Pack(M, U, sources, G)(G, addresses(G, path), weight(0.95, device), True)
        results.append(M + U)
    assert all(map(torch.equal, *results))


def test_gradients_of_several_dtypes_in_one_call(pack, part, device, path):
    M, U, sources, G = setting(part, device, F32, BF16, F32)
    G = [g.to(dtype) for g, dtype in zip(G, (F32, BF16) * 3)]
    bound = pack.Pack(M, U, sources, G)
    assert bound.launches is None or sorted(launch.types[2] == F32 for launch in bound.launches) == [False, True]
    bound(G, addresses(G, path), weight(0.0, device), False)
    for m, source in zip(M, sources):
        assert_close(m, source.view(G, m.shape).double(), F32)


def test_empty_lists(pack):
    pack.Pack([], [], [], [])([], None, weight(0.9, "cpu"), True)
    pack.Copy([], [])()
    pack.Copy.of_gradients([], [], [])([], None)


CASTS = [(F32, BF16), (BF16, F32), (F16, F32), (F16, BF16), (BF16, BF16), (F32, F32)]


@pytest.mark.parametrize("to, what", CASTS, ids=str)
def test_copy_casts_as_torch_does(pack, device, path, to, what):
    sources = [torch.randn(c, r, device=device).to(what).mT for r, c in SHAPES]
    copies = [poisoned(r, c, dtype=to, device=device) for r, c in SHAPES]
    pack.Copy(copies, sources)()
    for copy, source in zip(copies, sources):
        if INTERPRETED and path == "triton" and (to, what) == (BF16, F32):
            assert_close(copy, source.double(), BF16)
        else:
            assert torch.equal(copy, source.to(to))


def test_copy_of_fresh_gradients(pack, part, device, path):
    _, U, sources, G = setting(part, device, F32, F32, BF16)
    bound = pack.Copy.of_gradients(U, sources, G)
    for _ in range(2):
        G = [torch.randn_like(g) for g in G]
        bound(G, addresses(G, path))
        assert all(torch.equal(u, s.view(G, u.shape).float()) for u, s in zip(U, sources))


def test_rows_longer_than_a_position_can_say(pack, part, device, monkeypatch):
    """Contiguous rectangles are one row, and longer ones several records."""
    monkeypatch.setattr(part("kernels.elementwise.multi_tensor"), "LONGEST", 1000)
    source, copy = torch.randn(50, 77, device=device), poisoned(50, 77, device=device)
    bound = pack.Copy([copy], [source])
    bound()
    assert torch.equal(copy, source)
    assert bound.launches is None or sum(len(launch.records) for launch in bound.launches) == 4


@pytest.mark.gpu
def test_many_large_rectangles(part, monkeypatch):
    """On a GPU, with bf16: the bits of the torch path, also where the gradient has more than 2^31 elements."""
    table, results = part("kernels.elementwise.multi_tensor"), []
    G = [torch.randn(1000, 3001, device="cuda"), torch.empty((1 << 31) + (1 << 20), dtype=BF16, device="cuda")]
    G[1][-(1 << 20):].normal_()
    sources = [table.Source(0, 0, (3001, 1)), table.Source(0, 5, (3001, 1)), table.Source(1, 1 << 31, (1 << 10, 1))]
    shapes = [(1000, 3001), (999, 2000), (1 << 10, 1 << 10)]
    start = [torch.randn(shape, device="cuda") for shape in shapes]
    for path in ("torch", "triton"):
        monkeypatch.setenv("OPTIMIZER_KERNELS", path)
        M, U = [m.clone() for m in start], [poisoned(*s, dtype=BF16, device="cuda") for s in shapes]
        part("kernels.elementwise.momentum").Pack(M, U, sources, G)(G, addresses(G, path), weight(0.95, "cuda"), True)
        results.append(M + U)
    assert all(map(torch.equal, *results))

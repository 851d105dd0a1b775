"""Matrices in pieces, read where they arrived and written where they leave, against whole ones, to the last bit."""
from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.paths import forget, poisoned, quiet
from tests.ranks import package, part, run_ranks, run_threads
from tests.test_bucket_updates import cut

pytestmark = quiet

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CUTS = [[[0, 7, 24], [0, 24], [0, 3, 20, 24]], [[0, 1, 2, 3, 24], [0, 23, 24], [0, 24]], [list(range(25))] * 3]
SHAPES = [(24, 40), (24, 24), (24, 8), (24, 72)]
SUMMED = [(24, 48), (24, 16), (24, 80), (24, 2064)]  # of a GPU's sums over rows the order depends on multiples of 16


def pieces_of(U, cuts, gap=16):
    """(a Split of the matrices of U, the memory that it lies in): pieces in any order, between numbers that stay."""
    pieces = [(i, a, b) for i, bounds in enumerate(cuts) for a, b in itertools.pairwise(bounds)]
    memory, at, views = poisoned(U.numel() + gap * (len(pieces) + 1), dtype=U.dtype, device=U.device), gap, {}
    for i, a, b in reversed(pieces):
        views[i, a] = memory[at:at + (b - a) * U.shape[2]].view(b - a, U.shape[2])
        views[i, a].copy_(U[i, a:b])
        at += views[i, a].numel() + gap
    return part("kernels.elementwise.row_scattered").ScatteredRows(
        [[views[i, a] for a in bounds[:-1]] for i, bounds in enumerate(cuts)]
    ), memory


def whole(split, memory):
    """The matrices, after a look at what lies between their pieces."""
    values = torch.stack([torch.cat(pieces) for pieces in split.pieces])
    assert memory.isnan().sum() == memory.numel() - values.numel() + values.isnan().sum()
    return values


# kernels ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e-30])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("shape", SUMMED, ids=str)
def test_norms_have_the_bits_of_whole_matrices(part, path, device, shape, cuts, scale, turned):
    U = torch.randn(3, *shape, device=device) * scale
    split, memory = pieces_of(U, cuts)
    X, Y = (poisoned(*(U.mT if turned else U).shape, dtype=F16, device=device) for _ in range(2))
    assert_same_norms(part, U.mT if turned else U, split.mT if turned else split, X, Y)
    assert torch.equal(whole(split, memory), U)


def assert_same_norms(part, U, split, X, Y):
    scaling = part("kernels.elementwise.scaling")
    scales = torch.full((2, len(X)), float("nan"), device=X.device)
    scaling.unit_norm(U, X, scales[0], 1e-7)
    scaling.unit_norm(split, Y, scales[1], 1e-7)
    assert torch.equal(X, Y) and torch.equal(*scales)


def test_norms_where_tiles_are_cut(part, path, device, monkeypatch):
    """Tiles of several rows, several tiles of a row, each cut anywhere; some cast again for what a sample missed."""
    for lines, sample, missed in itertools.product((2, 8), (1, 4), (False, True)):
        monkeypatch.setattr(part("kernels.elementwise.scaling"), "LINES", (lines, 16))
        monkeypatch.setattr(part("kernels.elementwise.scaling"), "SAMPLE", (sample, 2))
        U = torch.randn(3, 24, 8, device=device)
        U[:, 0, :2] *= 1e-30 if missed else 1.0
        for cuts in CUTS:
            assert_same_norms(part, U, pieces_of(U, cuts)[0], torch.empty_like(U), torch.empty_like(U))


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_have_the_bits_of_whole_matrices(part, path, device, small_tiles, shape, dtype, cuts):
    api = part("kernels.matmul.api")
    n, m = sorted(shape)
    A, X = torch.randn(3, n, n, device=device).to(F16), torch.randn(3, n, m, device=device).to(F16)
    A, out = A + A.mT, poisoned(3, *shape, dtype=dtype, device=device)
    split, memory = pieces_of(out, cuts)
    tall = shape[0] > shape[1]
    api.product(A, X, out.mT if tall else out)
    api.product(A, X, split.mT if tall else split)
    assert torch.equal(whole(split, memory), out) and out.isfinite().all()


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_rows_are_normalized_alike(part, path, device, dtype, cuts):
    normuon = part("kernels.elementwise.norms")
    U, V = torch.randn(3, 24, 48, device=device).to(dtype), torch.rand(3, 24, 1, device=device)
    (split, memory), W = pieces_of(U, cuts), V.clone()
    normuon.normalize(U, V, 0.95, 1e-8)
    normuon.normalize(split, W, 0.95, 1e-8)
    assert torch.equal(whole(split, memory), U) and torch.equal(V, W)


def test_rows_have_to_begin_at_multiples_of_16_bytes(part):
    ScatteredRows, memory = part("kernels.elementwise.row_scattered").ScatteredRows, torch.zeros(256)
    for wrong in (memory[1:9].view(1, 8), memory[:9].view(1, 9), memory[:32].view(4, 8)[:, :4]):
        with pytest.raises(AssertionError, match="16 bytes"):
            ScatteredRows([[wrong]])
    assert ScatteredRows([[memory[4:12].view(1, 8)], [memory[:8].view(1, 8)]]).shape == (2, 1, 8)


@pytest.mark.parametrize("name", ["polar_express", "jordan", "cubic"])
def test_an_iteration_of_splits_and_stacks_together(part, path, device, small_tiles, name, monkeypatch):
    """Matrices of one short side share launches, whole or not; read here, written there."""
    polar, steps = part("newton_schulz.orthogonalize"), part("newton_schulz.orthogonalize").steps_of(name)
    monkeypatch.setattr(part("kernels.onchip.polar"), "supports", lambda U, dtype: False)  # no Split would come there
    forget(polar, monkeypatch)
    shapes = SHAPES if device.type == "cpu" else SUMMED
    Us = [torch.randn(3, *shape, device=device).to(F16) for shape in shapes[:3]]
    sources = [pieces_of(U, cuts)[0] for U, cuts in zip(Us, CUTS)]
    targets = [pieces_of(torch.full_like(U, float("nan")), cuts) for U, cuts in zip(Us, CUTS[::-1])]
    given, into = [*sources, Us[0].clone()], [*(split for split, _ in targets), torch.empty_like(Us[0])]
    for _ in range(2):  # the second time from a tape
        polar.orthogonalize_(given, steps, 1e-7, F32 if device.type == "cpu" else F16, into=into)
    polar.orthogonalize_(Us, steps, 1e-7, F32 if device.type == "cpu" else F16)
    assert all(torch.equal(whole(*target), U) for target, U in zip(targets, Us)) and torch.equal(into[-1], Us[0])


# steps -----------------------------------------------------------------------------------------------------------

MATRICES = (96, 32), (32, 96), (64, 64), (32, 64), (128, 32), (64, 64), (32, 32), (96, 64)
ODD = (24, 30), (33, 8), (5, 16)
LAYOUTS = {"rows": ((4,), "0"), "rows of some": ((7,), "0"), "replicas": ((2, 2), "r0"), "all alike": ((4,), "r"),
           "columns": ((4,), "1"), "rows of rows": ((2, 2), "00"), "both": ((2, 2), "10")}


def placements_of(text):
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if letter == "r" else Shard(int(letter)) for letter in text]


@contextlib.contextmanager
def way(directly, device="cpu"):
    """Matrices in pieces, where layouts allow it, or whole ones as before; on a CPU small ones are as large as any."""
    with pytest.MonkeyPatch.context() as patch:
        if not directly:
            patch.setattr(part("newton_schulz.method"), "supports_scattered_rows", lambda R, C, steps: False)
        elif device == "cpu":
            patch.setattr(part("kernels.onchip.polar"), "is_small", lambda n, m: False)
        yield


def steps(rank, world, name, layout, wire, device="cpu", shapes=MATRICES):
    """(weights and state after three steps, what `copied` says of all buckets)."""
    from torch.distributed.tensor import init_device_mesh

    mesh, placements = init_device_mesh(device, LAYOUTS[layout][0]), placements_of(LAYOUTS[layout][1])
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(cut(torch.randn(s, generator=generator).to(device), mesh, placements)) for s in shapes]
    optimizer = getattr(package(), name)(params, lr=0.1, wire_dtype=wire)
    for step in range(3):
        for p in params:
            gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            p.grad = cut(gradient.to(device), mesh, placements)
        optimizer.step()
    counts = [sum(x) for x in zip(*(copied(route) for route, _ in optimizer._bound.jobs if hasattr(route, "assemble")))]
    tensors = [t for p in params for t in (p.detach(), *(optimizer.state[p][k] for k in sorted(optimizer.state[p])))]
    return [t.to_local().cpu() for t in tensors], counts


def both_ways(name, layout, wire, shapes=MATRICES):
    """The same on the threads of a layout, in pieces and whole."""
    found = []
    for directly in (True, False):
        with way(directly):
            found.append(run_threads(math.prod(LAYOUTS[layout][0]), steps, name, layout, wire, "cpu", shapes))
    return found


def copied(route):
    """(pieces of updates that arrive and stay, of these copied; that leave and stay, of these copied)."""
    rank_plan = route.rank_plan
    ways = rank_plan.inbound.arrive, rank_plan.outbound.leave
    arrive, leave = ({p for p in way if p.kind == "matrix"} for way in ways)
    rows = [sum(p.kind != "matrix" for p in way) for way in ways]
    return (len(arrive), len(route.assemble.to) - rows[0], len(leave | set(rank_plan.kept)),
            len(route.disassemble.to) - rows[1])


@pytest.mark.parametrize("wire", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_has_the_same_bits_in_pieces(optimizer, layout, name, wire):
    """And nothing is copied: what is cut into whole rows, at multiples of 16 bytes, is read and written in place."""
    direct, usual = both_ways(name, layout, wire)
    for (mine, counts), (theirs, all_) in zip(direct, usual):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs))
        assert all_[0] == all_[1] == counts[0] and all_[2] == all_[3] == counts[2], "copied one by one"
        if layout in ("columns", "both"):
            assert counts == all_
        elif layout in ("rows", "rows of rows"):
            assert counts[1] == counts[3] == 0 < counts[2]
        elif layout == "all alike":  # from the first of the places from which it leaves to the two others
            assert 4 * counts[3] == 2 * counts[2]


@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_whose_rows_lie_anywhere_go_as_before(optimizer, layout, name):
    direct, usual = both_ways(name, layout, F32, MATRICES + ODD)
    for (mine, counts), (theirs, all_) in zip(direct, usual):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs)) and counts[::2] == all_[::2]
    if name == "Muon" and layout == "rows":
        assert all(0 < sum(counts[i] for _, counts in direct) < sum(counts[i] for _, counts in usual) for i in (1, 3))


@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_processes_agree_too(optimizer, name):
    """By collectives that really take time."""
    direct, usual = (run_ranks(4, in_a_process, name, directly) for directly in (True, False))
    assert all(torch.equal(a, b) for (mine, _), (theirs, _) in zip(direct, usual) for a, b in zip(mine, theirs))
    assert all(counts[1] == counts[3] == 0 < all_[1] for (_, counts), (_, all_) in zip(direct, usual))


def in_a_process(rank, world, name, directly):
    with way(directly):
        return steps(rank, world, name, "rows", F32)


@pytest.mark.parametrize("layout", ["all alike", "replicas"])
def test_what_several_ranks_get_leaves_from_where_it_is_written(optimizer, layout, monkeypatch):
    """As on GPUs: not even the owner's own copy is copied."""
    monkeypatch.setattr(part("communication.process_groups").ProcessGroups, "can_send_once", lambda *_: True)
    direct, usual = both_ways("Muon", layout, F32)
    assert all(torch.equal(a, b) for (mine, _), (theirs, _) in zip(direct, usual) for a, b in zip(mine, theirs))
    assert all(layout == "replicas" or counts[3] == 0 < all_[3] for (_, counts), (_, all_) in zip(direct, usual))
    assert sum(counts[3] for _, counts in direct) < sum(counts[3] for _, counts in usual)


def test_what_stays_is_packed_while_the_rest_travels(optimizer, monkeypatch):
    """Before anybody waits for what travels in: the device has nothing else to do in a step of one bucket."""
    Pack = part("kernels.elementwise.momentum").Pack
    events, momentum, exchange = defaultdict(list), Pack.__call__, dist.all_to_all_single

    class Flying:
        def __init__(self, work):
            self.work = work

        def wait(self):
            events[dist.get_rank()].append("waited")
            return self.work.wait()

    def packed(pack, *args):
        events[dist.get_rank()].append(len(pack.M))
        momentum(pack, *args)

    def sent(*args, **options):
        events[dist.get_rank()].append("sent")
        return Flying(exchange(*args, **options))

    monkeypatch.setattr(Pack, "__call__", packed)
    monkeypatch.setattr(dist, "all_to_all_single", sent)
    with way(True):
        run_threads(4, steps, "Muon", "rows", F32)
    assert len(events) == 4
    for leave, first, stay, *rest in (mine[-7:] for mine in events.values()):
        assert leave > 0 < stay and [first, *rest] == ["sent", "waited", 0, "sent", "waited"]


def test_what_is_read_elsewhere_shows(optimizer, monkeypatch):
    """The control: were pieces taken for each other, bits would differ."""
    ScatteredRows = part("kernels.elementwise.row_scattered").ScatteredRows
    monkeypatch.setattr(part("execution.workspace"), "ScatteredRows",
                        lambda matrices: ScatteredRows([pieces[::-1] for pieces in matrices]))
    direct, usual = both_ways("Muon", "rows", F32)
    assert not all(torch.equal(a, b) for a, b in zip(direct[0][0], usual[0][0]))


def test_coefficients_that_read_whole_matrices_bind_anew(optimizer):
    """A set with AOL scaling takes the memory of the others, but no pieces."""
    method = part("newton_schulz.method")
    polar, found = part("newton_schulz.orthogonalize"), []
    assert method.supports_scattered_rows(256, 512, polar.steps_of("polar_express"))
    assert not method.supports_scattered_rows(512, 264, polar.steps_of("polar_express"))  # rows of no multiple of 16
    assert not method.supports_scattered_rows(256, 512, polar.steps_of("turbo"))
    assert not method.supports_scattered_rows(64, 64, polar.steps_of("cans"))
    for directly in (True, False):
        with way(directly):
            found.append(run_threads(2, switched))
    assert all(torch.equal(a, b) for mine, theirs in zip(*found) for a, b in zip(mine, theirs))


def switched(rank, world):
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(cut(torch.ones(40, 64), mesh, [Shard(0)])) for _ in range(2)]
    stepper = package().Muon(params, lr=0.1)
    for step, name in enumerate(("polar_express", "turbo", "jordan")):
        stepper.param_groups[0].update(ns_coefficients=name, ns_steps=5 if name != "turbo" else 4)
        for p in params:
            p.grad = cut(torch.randn(p.shape, generator=torch.Generator().manual_seed(step)), mesh, [Shard(0)])
        stepper.step()
    return [p.detach().to_local() for p in params]


# GPUs ------------------------------------------------------------------------------------------------------------

LARGE = [(768, 768), (768, 3072), (3072, 768), (1000, 3008), (2100, 528), (520, 2112)]


def uneven(rows, ranks):
    """The bounds of Shard(0)."""
    each = -(-rows // ranks)
    return sorted({min(each * i, rows) for i in range(ranks + 1)})


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_every_tile_of_the_table_stores_in_pieces(part, device, shape, dtype):
    """Tall and wide, several matrices cut otherwise, boundaries inside of tiles."""
    gram, tiles, (n, m) = part("kernels.matmul.api"), part("kernels.launch.tile_config"), sorted(shape)
    table = tiles.table(tiles.architecture("cuda"))
    entries = [e for e in table["entries"] if (e["op"], e["bytes"]) == ("product", 2)]
    room = part("newton_schulz.iteration").ScratchLayout(((3, n, m), (3, n, n)), F16, device)
    room.bind(torch.empty(room.nbytes, dtype=torch.uint8, device=device))
    X, A = (t.copy_(torch.randn(t.shape, device=device)) for t in room.views())
    A.copy_(A + A.mT)
    cuts, tall = [uneven(shape[0], ranks) for ranks in (7, 8, 64)], shape[0] > shape[1]
    for entry in entries or [None]:
        tile = entry and tiles.tile_of(entry)
        out = poisoned(3, *shape, dtype=dtype, device=device)
        split, memory = pieces_of(out, cuts)
        with tiles.force(tile):
            gram.product(A, X, out.mT if tall else out)
            gram.product(A, X, split.mT if tall else split)
        assert torch.equal(whole(split, memory), out) and out.isfinite().all(), entry


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_large_norms_and_iterations_in_pieces(part, device, shape, dtype):
    polar, U = part("newton_schulz.orthogonalize"), torch.randn(3, *shape, device=device).to(dtype)
    cuts, tall = [uneven(shape[0], ranks) for ranks in (7, 8, 64)], shape[0] > shape[1]
    (split, memory), room = (
        pieces_of(U, cuts),
        part("newton_schulz.iteration").ScratchLayout(((3, *sorted(shape)),) * 2, F16, device),
    )
    room.bind(torch.empty(room.nbytes, dtype=torch.uint8, device=device))
    X, Y = room.views()
    assert_same_norms(part, U.mT if tall else U, split.mT if tall else split, X, Y)
    steps, tape = polar.steps_of("polar_express"), part("kernels.launch.replay")
    target, there = pieces_of(torch.full_like(U, float("nan")), cuts[::-1])
    expected = U.clone()
    polar.orthogonalize_([expected], steps)
    tape._recordings.clear()
    for _ in range(3):
        there.fill_(float("nan"))
        polar.orthogonalize_([split], steps, into=[target])
        assert torch.equal(whole(target, there), expected) and torch.equal(whole(split, memory), U)
    assert len(tape._recordings) >= 1, "from the second time on it is played"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        polar.orthogonalize_([split], steps, into=[target])
    there.fill_(float("nan"))
    graph.replay()
    assert torch.equal(whole(target, there), expected)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
@pytest.mark.parametrize("wire", [BF16, F32], ids=str)
def test_steps_on_gpus_have_the_same_bits_in_pieces(optimizer, name, wire, monkeypatch):
    world = min(torch.cuda.device_count(), 4)
    monkeypatch.setitem(LAYOUTS, "rows", ((world,), "0"))
    shapes = (*LARGE, (768, 768), (200, 336), (768, 3072))
    direct, usual = (run_ranks(world, steps_on, name, directly, wire, shapes, backend="nccl", timeout=240)
                     for directly in (True, False))
    for (mine, counts), (theirs, _) in zip(direct, usual):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs))
        assert name == "NorMuon" or counts[1] == counts[3] == 0 < counts[0], "row state of 250 rows moves what follows"


def steps_on(rank, world, name, directly, wire, shapes):
    LAYOUTS["rows"] = (world,), "0"
    with way(directly, "cuda"):
        return steps(rank, world, name, "rows", wire, "cuda", shapes)

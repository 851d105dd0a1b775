"""Iterations side by side: which gain by it, the memory that they take, and the bits, which stay the same."""
from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.paths import quiet

pytestmark = quiet

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMALL = [(3, 24, 24), (2, 24, 96), (2, 40, 24), (1, 16, 16), (2, 16, 64)]  # four iterations: two of squares, two others
LARGE = [(3, 768, 768), (2, 768, 3072), (1, 3072, 768), (2, 1024, 1024), (2, 512, 2048)]


@pytest.fixture
def side_by_side(part, monkeypatch):
    """What is given to `_side_by_side`: the memory of each iteration."""
    found, iteration = [], part("newton_schulz.iteration")
    before = iteration._side_by_side

    def noted(works, device):
        found.append([work.args[-1] for work in works])
        before(works, device)

    monkeypatch.setattr(iteration, "_side_by_side", noted)
    return found


def memory_for(part, shapes, steps, dtype, device, together):
    """As a rank plan has it: the bytes of all keys together, or of the one that takes most."""
    sums = {}
    for N, R, C in shapes:
        key, long, square = part("newton_schulz.method").scratch_bytes(R, C, steps, dtype)
        one = sums.setdefault(key, [0, 0, 0])
        for i, nbytes in enumerate((long // 2, long // 2, square)):
            one[i] += N * nbytes
    return [torch.full((together(each),), 0xFF, dtype=torch.uint8, device=device) for each in zip(*sums.values())]


@pytest.mark.parametrize("name", ["polar_express", "turbo", "cubic"])
def test_with_memory_for_all_bits_are_the_same(part, name, monkeypatch):
    polar, steps = (
        part("newton_schulz.orthogonalize"),
        part("newton_schulz.orthogonalize").steps_of(name, 4 if name == "turbo" else 5),
    )
    monkeypatch.setattr(part("kernels.onchip.polar"), "supports", lambda U, dtype: False)
    Us, lent, results = [torch.randn(shape) for shape in SMALL], [], []
    before = part("newton_schulz.iteration").Iteration
    monkeypatch.setattr(
        part("newton_schulz.iteration"), "Iteration", lambda *args: (lent.append(args[4]), before(*args))[1]
    )
    for together in (max, sum):
        stacks, memory = [U.clone() for U in Us], memory_for(part, SMALL, steps, F32, torch.device("cpu"), together)
        polar.orthogonalize_(stacks, steps, 1e-7, memory=memory)
        results.append(stacks)
    assert all(map(torch.equal, *results))
    shared, apart = lent[:len(lent) // 2], lent[len(lent) // 2:]
    assert len(apart) >= 2 and all(memory is shared[0] for memory in shared)
    for flats in zip(*apart):
        ends = [(flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in flats]
        assert all(end <= first for (_, end), (first, _) in zip(ends, ends[1:])), "one after another, none overlaps"


def test_small_ones_gain_and_large_ones_do_not(part):
    gain = part("newton_schulz.method").gain_side_by_side
    assert gain([(768, 768)] * 6 + [(768, 3072)] * 3) and gain([(2048, 2048)] * 7 + [(2048, 6144)] * 8)
    assert not gain([(4096, 4096), (1024, 4096)]) and not gain([(1600, 1600)] * 96 + [(1600, 6400)] * 24)


def bucket_of(part, shapes):
    """One bucket at one rank that has all of these matrices, at home."""
    method = part("newton_schulz.method")
    Layout = part("params.layout").Layout
    layouts = [Layout(shape, {0: ((0, shape[0]), (0, shape[1]))}, replicas=((0,),), plain=True) for shape in shapes]
    steps = part("newton_schulz.orthogonalize").steps_of("polar_express")
    terms = part("planning.memory_model").PlanInputs(
        scratch=partial(method.scratch_bytes, steps=steps, dtype=torch.float16),
        supports_scattered_rows=partial(method.supports_scattered_rows, steps=steps),
        side_by_side=method.gain_side_by_side)
    bucket, = part("planning.plan").make_plan(layouts, lambda rows, cols: rows * cols, {}, terms)
    return bucket, layouts, terms


@pytest.mark.parametrize("shapes", [
    [(768, 768), (960, 960)], [(768, 768), (768, 3072)], [(768, 768)] * 2, [(4096, 4096), (4096, 8192)]], ids=str)
@pytest.mark.parametrize("short", [False, True])
def test_memory_for_all_is_taken_where_they_gain_and_there_is_room(part, shapes, short):
    memory_model = part("planning.memory_model")
    bucket, layouts, terms = bucket_of(part, shapes)
    rank_bytes = memory_model.workspace_bytes(*bucket.memory) if short else 1 << 31
    rank_plan, usual = (
        part("planning.rank_plan").rank_plan_of(
            bucket, 0, layouts, {}, replace(terms, rank_bytes=rank_bytes, side_by_side=gain)
        )
        for gain in (terms.side_by_side, lambda shapes: False)
    )
    uses = ("scratch_a", "scratch_b", "gram_scratch")
    # Square matrices are cut otherwise than long ones, and so are a batch of their own
    wide = shapes in ([(768, 768), (960, 960)], [(768, 768), (768, 3072)]) and not short
    assert all((rank_plan.use_bytes[use] > usual.use_bytes[use]) == wide for use in uses)
    assert all(rank_plan.use_bytes[use] == usual.use_bytes[use] for use in rank_plan.use_bytes if use not in uses)
    taken = rank_plan.workspace_layout()[1].values()
    assert all(nbytes <= place for nbytes, place in zip(taken, memory_model.split_workspace(rank_bytes)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["polar_express", "turbo", "cubic"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_graph_of_several_has_the_bits_of_one_after_the_other(part, side_by_side, name, dtype):
    polar, device = part("newton_schulz.orthogonalize"), torch.device("cuda")
    steps = polar.steps_of(name, 4 if name == "turbo" else 5)
    Us = [torch.randn(shape, device=device).to(dtype) for shape in LARGE]
    expected, stacks = [U.clone() for U in Us], [torch.empty_like(U) for U in Us]
    memory = memory_for(part, LARGE, steps, F16, device, sum)
    polar.orthogonalize_(expected, steps)
    for _ in range(2):
        polar.orthogonalize_(Us, steps, memory=memory, into=stacks)
    assert not side_by_side, "it costs the host more, and gains only in a graph"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        polar.orthogonalize_(Us, steps, memory=memory, into=stacks)
    assert len(side_by_side) == 1 and len(side_by_side[0]) >= 2
    for _ in range(20):
        for flat in [*stacks, *memory]:
            flat.view(torch.uint8).fill_(0xFF)
        graph.replay()
        assert all(map(torch.equal, stacks, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True])
def test_a_step_of_a_graph_has_the_bits_of_launches(optimizer, side_by_side, capturable, monkeypatch):
    """The memory of matrices whose iterations run side by side comes from the workspace."""
    found = []
    for graphs in ("auto", "off"):
        monkeypatch.setenv("OPTIMIZER_GRAPHS", graphs)
        side_by_side.clear()
        generator = torch.Generator("cuda").manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape[1:], device="cuda", generator=generator)) for shape in LARGE * 2]
        opt = optimizer.Muon(params, lr=0.1, capturable=capturable)
        for _ in range(5):
            for p in params:
                p.grad = torch.randn(p.shape, device="cuda", generator=generator)
            opt.step()
        found.append([p.detach() for p in params])
        assert bool(side_by_side) == (graphs == "auto")
    assert all(map(torch.equal, *found))

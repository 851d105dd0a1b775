"""`Muon.metrics`: values against fp64 from the weights before and after a step, on every layout; sums of the kernels;
what is counted once, skipped or left out; equal bits with it on and off; no wait of the host in a step.
"""
from __future__ import annotations

import copy
import csv
import importlib
import itertools
import math
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.paths import INTERPRETED, quiet, take
from tests.ranks import package, part, run_ranks, run_threads
from tests.test_bucket_updates import cut
from tests.test_muon import EXACT, same
from tests.test_nonfinite import Reads

pytestmark = quiet

# Group keys, then shapes; 3 rows on 4 ranks are an empty shard
GROUPS = [({}, [(12, 7), (20, 24), (3, 8), (4, 6, 10)]), ({"lr": 0.05}, [(24, 20)]),
          ({"use_muon": False}, [(17, 6), (5,)]), ({"use_muon": False, "rule": "lion"}, [(9, 4)]),
          ({"use_muon": False, "rule": "sgd"}, [(8, 3), (3,)])]
MOMENTA = ["momentum_buffer", "momentum_buffer", "exp_avg", "exp_avg", "momentum_sum"]
PER = ("update_rms", "weight_rms", "update_to_weight", "momentum_norm", "update_share")


def whole(seed):
    """A tensor for each parameter, by group."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _, shapes in GROUPS]


def groups_of(tensors):
    return [{"params": [(f"{i}.{j}", t) for j, t in enumerate(some)], **keys}
            for i, ((keys, _), some) in enumerate(zip(GROUPS, tensors))]


def build(params, name="Muon", **options):
    opt = getattr(package(), name)(groups_of(params), lr=0.02, weight_decay=0.1, workspace_bytes=128_000, **options)
    opt.collect_metrics = True
    return opt


def flat(lists):
    return [t for some in lists for t in some]


def take_steps(opt, params, place, steps=(1, 2)):
    for seed in steps:
        for p, g in zip(flat(params), flat(whole(seed))):
            p.grad = place(g)
        before = [p.detach().clone() for p in flat(params)]
        opt.step()
    return before


def exact(before, after, momenta):
    """The values of tensors as if they were one, in fp64, and the sum of the squares of the update."""
    W, old, M = (torch.cat([t.double().flatten() for t in some]) for some in (after, before, momenta))
    update = (W - old).square().sum().item()
    rms = math.sqrt(update / len(W)), W.square().mean().sqrt().item()
    return [*rms, rms[0] / rms[1], M.norm().item()], update


def momentum_of(state, key):
    """In fp32, if it is kept in 8 bits."""
    if state[key].dtype == torch.int8:
        return part("kernels.quantized.blocks").dequantize(state[key], state["momentum_scale"])
    return state[key]


def expected_of(opt, params, before):
    """What `as_dict` has to give, from whole tensors; without errors of orthogonality and counts."""
    old, found, squares = iter(before), {}, {}
    for i, (some, key) in enumerate(zip(params, MOMENTA)):
        olds, states = [next(old) for _ in some], [opt.state[p][key] for p in some]
        entries = [(f"muon/group{i}", olds, some, states)]
        entries += [(f"muon/parameters/{i}.{j}", [o], [p], [m]) for j, (o, p, m) in enumerate(zip(olds, some, states))]
        for name, *tensors in entries:
            values, squares[name] = exact(*([t.detach() for t in some] for some in tensors))
            found |= {f"{name}/{key}": value for key, value in zip(PER, values)}
    total = sum(value for name, value in squares.items() if "group" in name)
    return found | {f"{name}/update_share": value / total for name, value in squares.items()}


def assert_close(found, expected, rtol=1e-5):
    wrong = {key: (found.get(key), value) for key, value in expected.items()
             if not math.isclose(found.get(key, math.nan), value, rel_tol=rtol, abs_tol=1e-12)}
    assert wrong == {}


# Values --------------------------------------------------------------------------------------------------------------

LAYOUTS = ["fsdp rows", "ep", "fsdp columns", "hsdp", "tp x fsdp", "replicated", "ddp", "shard_state", "unreduced",
           "fsdp rows, overlap", "unreduced, overlap"]
OPTIONS = {"ddp": {}, "shard_state": {"shard_state": True}, "unreduced": {"grads_are_reduced": False},
           "unreduced, overlap": {"grads_are_reduced": False}}


def sharded(rank, world, layout, device="cpu"):
    """(all values, values of this rank, whether plain steps give equal bits) after two steps on a layout."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    R, S = Replicate(), Shard
    mesh_shape, placements = {
        "fsdp rows": ((world,), [S(0)]), "ep": ((4,), [S(0)]), "fsdp columns": ((4,), [S(1)]),
        "hsdp": ((2, 2), [R, S(0)]), "tp x fsdp": ((2, 2), [S(1), S(0)]), "replicated": ((4,), [R]),
        "fsdp rows, overlap": ((4,), [S(0)]),
    }.get(layout, (None, None))
    mesh = init_device_mesh(device, mesh_shape) if mesh_shape else None

    def place(t):
        t = t.to(device)
        if mesh is None:
            return t.clone()
        ahead = t.ndim == 3 and layout != "ep"  # a stack is sharded like its matrices
        dims = [p.dim + ahead if p.is_shard() else None for p in placements]
        return cut(t, mesh, [R if d is None or d >= t.ndim else S(d) for d in dims])

    params = [[nn.Parameter(place(t)) for t in some] for some in whole(0)]
    options = dict(OPTIONS[layout], process_group=dist.group.WORLD) if mesh is None else {}
    opt = build(params, **options, **EXACT, overlap_backward="overlap" in layout)
    backward = layout == "unreduced, overlap"
    take_steps(opt, params, place, [1] if backward else [1, 2])
    if backward:  # buckets start in it
        opt.zero_grad()
        with opt.last_backward():
            sum((p * g).sum() for p, g in zip(flat(params), flat(whole(2)))).backward()
        with pytest.raises(RuntimeError, match="metrics is not possible now"):
            opt.metrics()
        opt.step()
    found = opt.metrics(per_parameter=True).as_dict(), opt.metrics(local=True).as_dict()
    plain = [[nn.Parameter(place(t)) for t in some] for some in whole(0)]
    other = build(plain, **options, **EXACT)
    other.collect_metrics = False
    take_steps(other, plain, place)
    local = part("params.dtensor").local_of
    return *found, same(map(local, flat(params)), map(local, flat(plain)))


@pytest.fixture(scope="module")
def one_process():
    params = [[nn.Parameter(t) for t in some] for some in whole(0)]
    opt = build(params, **EXACT)
    before = take_steps(opt, params, torch.clone)
    found = opt.metrics(per_parameter=True).as_dict()
    assert_close(found, expected_of(opt, params, before))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_values_of_one_process(layout, one_process):
    results = run_threads(4, sharded, layout)
    for found, _, bits in results:
        assert bits and found.keys() == one_process.keys()
        own = {"muon/group0/orthogonality_error"} if layout == "ep" else set()  # of a matrix of each rank, too
        assert_close(found, {key: value for key, value in one_process.items() if key not in own})
    # Every element is counted by one rank
    for i in range(len(GROUPS)):
        key = f"muon/group{i}/momentum_norm"
        parts = [local.get(key, 0.0) ** 2 for _, local, _ in results]
        assert math.isclose(sum(parts), one_process[key] ** 2, rel_tol=1e-5)


@pytest.mark.gpus(2)
def test_ranks_over_nccl(one_process):
    for found, _, bits in run_ranks(2, sharded, "fsdp rows", "cuda", backend="nccl"):
        assert bits and found.keys() == one_process.keys()
        assert_close(found, one_process, 0.01)  # of another device's products


@pytest.mark.parametrize("more", [{}, {"name": "NorMuon"}, {"rule": "dion2"}, {"rule": "muon_plus"},
                                  {"decay": "cautious"}, {"momentum_form": "sum"},
                                  {"state_dtype": torch.bfloat16}, {"weights": torch.bfloat16},
                                  {"state_dtype": torch.int8}], ids=str)
def test_rules_and_forms(more, device, optimizer):
    """Bits are those of steps that collect nothing, and the values those of the weights."""
    results, more = [], dict(more)
    dtype = more.pop("weights", torch.float32)
    for collects in (True, False):
        params = [[nn.Parameter(t.to(device, dtype)) for t in some] for some in whole(0)]
        opt = build(params, **more)
        opt.collect_metrics = collects
        before = take_steps(opt, params, lambda t: t.to(device, dtype, copy=True))
        results.append([*flat(params), *(t for p in flat(params) for t in opt.state[p].values())])
        if collects:
            keys = [opt.state[some[0]] for some in params]
            momenta = ["momentum_sum" if "momentum_sum" in state else key for state, key in zip(keys, MOMENTA)]
            found = opt.metrics(per_parameter=True).as_dict()
            old = iter(before)
            for i, (some, key) in enumerate(zip(params, momenta)):
                values, _ = exact([next(old) for _ in some], some, [momentum_of(opt.state[p], key) for p in some])
                assert_close(found, {f"muon/group{i}/{k}": v for k, v in zip(PER, values)})
    assert same(*results)


class TorchRule:
    """A rule that is written in torch, made where the package is loaded."""

    @staticmethod
    def of(package_):
        class Signed(package_.Rule):
            name = "signed of the tests"

            def update(self, G, M, numbers):
                M = 0.9 * M + 0.1 * G
                return M, M

            def write(self, W, O, scale, sent, numbers):
                return W - 0.01 * torch.sign(O)

        return Signed


def test_a_rule_in_torch(optimizer):
    p = nn.Parameter(torch.randn(6, 9))
    opt = optimizer.Muon([p], lr=0.1, rule=TorchRule.of(optimizer))
    opt.collect_metrics = True
    p.grad, old = torch.randn(6, 9), p.detach().clone()
    opt.step()
    values, _ = exact([old], [p.detach()], [opt.state[p]["momentum_buffer"]])
    assert_close(opt.metrics().as_dict(), {f"muon/group0/{k}": v for k, v in zip(PER, values)})


@pytest.mark.parametrize("shape, rtol", [((10, 24), 1e-4), ((64, 48), 0.1), ((48, 96), 0.1)])
def test_orthogonality_error(shape, rtol, optimizer):
    """Exact up to 16 rows, else estimated: against fp64, with O from a step with lr 1 and no decay."""
    p = nn.Parameter(torch.zeros(shape))
    opt = optimizer.Muon([p], lr=1.0, weight_decay=0.0, adjust_lr_fn=1.0, ns_steps=3, **EXACT)
    opt.collect_metrics = True
    p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    opt.step()
    O = p.detach().double()
    O = O.mT if shape[0] > shape[1] else O
    error = (O @ O.mT - torch.eye(len(O))).norm() / math.sqrt(len(O))
    assert 0.02 < error < 2
    assert math.isclose(opt.metrics().groups[0].orthogonality_error, error, rel_tol=rtol)


@pytest.mark.parametrize("dtype, atol", [(torch.bfloat16, 5e-3), (torch.float16, 1e-3), (torch.float32, 1e-5)],
                         ids=str)
def test_orthogonality_error_in_the_dtype_of_O(dtype, atol, part, device):
    """Of nearly orthogonal matrices, up to 16 rows exact but for rounding: in a stack and in pieces, wide and tall."""
    sample = part("metrics.collector").OrthogonalitySample
    Rows = part("kernels.elementwise.row_scattered").ScatteredRows
    O = torch.linalg.qr(torch.randn(64, 16))[0].mT * torch.linspace(0.8, 1.2, 16)[:, None]
    O = O.to(device, dtype)
    wide = O.double()
    error = ((wide @ wide.mT - torch.eye(16, device=device)).norm() / 4).item()
    pieces = [O[:8].contiguous(), O[8:].contiguous()]
    for stack in (torch.stack([O, O]), torch.stack([O.mT, O.mT]), Rows([[O], pieces]), Rows([[O], pieces]).mT):
        one = sample(stack, 1, 0)
        one.measure()
        assert math.isclose(one.error().item(), error, abs_tol=atol) and error > 0.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_values_do_not_depend_on_the_default_dtype(dtype, optimizer):
    """Sums and probes were kept in it: steps failed half-way. Errors of a small matrix are exact, and estimated of a
    large one.
    """
    shapes, before, found = [(6, 9), (20, 24), (5,)], torch.get_default_dtype(), []
    values, grads = ([torch.randn(s, generator=torch.Generator().manual_seed(seed)) for s in shapes] for seed in (0, 1))
    try:
        for default in (before, dtype):
            torch.set_default_dtype(default)
            params = [nn.Parameter(t.clone()) for t in values]
            groups = [{"params": [p], "use_muon": p.ndim == 2} for p in params]
            opt = optimizer.Muon(groups)
            opt.collect_metrics = True
            for p, g in zip(params, grads):
                p.grad = g.clone()
            opt.step()
            found.append(opt.metrics().as_dict())
    finally:
        torch.set_default_dtype(before)
    assert found[0] == found[1] and len(found[0]) == 3 * 6 + 2


def test_sampled_matrices_are_large_but_cheap(part, optimizer, monkeypatch):
    monkeypatch.setattr(part("metrics.collector"), "SAMPLED_ELEMENTS", 100)
    chosen = []
    for shapes in ([(4, 5), (10, 10), (20, 10)], [(30, 30), (20, 10)]):
        params = [nn.Parameter(torch.randn(s)) for s in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        opt = optimizer.Muon(params)
        opt.collect_metrics = True
        opt.step()
        (sampled,) = [store.collector.sampled for store in opt._bound.stores]
        chosen.append([(m.rows, m.cols) for m in sampled])
    assert chosen == [[(10, 10)], [(20, 10)]]


# Sampled elements ----------------------------------------------------------------------------------------------------

SAMPLED = [((97, 70), "rows"), ((60, 96), "columns"), ((48, 60), "tiles"), ((6, 8, 90), "tiles"), ((4, 30, 64), "3d"),
           ((5000,), "rows"), ((40, 96), "interleaved")]


@pytest.mark.parametrize("shape, way", SAMPLED)
def test_ranks_read_the_elements_that_one_process_reads(shape, way, part, monkeypatch):
    """Elements of a sample are known by their number in the whole parameter; every stratum has one chunk."""
    monkeypatch.setattr(part("metrics.regions"), "READ_ELEMENTS", 1)
    sampled, Layout = part("metrics.regions").regions_of, part("params.layout").Layout
    cuts = {"rows": [(0, 3)], "columns": [(1, 4)], "tiles": [(0, 2), (1, 3)], "3d": [(0, 2), (1, 2), (2, 2)],
            "interleaved": [(1, 4)]}[way]
    interleaved, groups = ((1, 2), 2) if way == "interleaved" else ((), 1)
    sides = [[(i * n // k // groups * groups, (i + 1) * n // k // groups * groups) for i in range(k)]
             for d, n in enumerate(shape) for k in [dict(cuts).get(d, 1)]]
    boxes = dict(enumerate(itertools.product(*sides)))
    layout = Layout(shape, boxes, (tuple(boxes),), interleaved=interleaved)
    numbers = torch.arange(math.prod(shape)).view(shape)

    def read(layout, rank):
        """The numbers that a rank reads, from its local tensor."""
        local, regions = layout.shard_of(numbers, rank).flatten(), sampled(layout, rank)
        found = [local[region.indices()] for region in regions]
        assert [region.count() for region in regions] == list(map(len, found))
        assert all(len(some) <= region.slots for some, region in zip(found, regions))
        return torch.cat(found) if found else local[:0]

    whole = Layout(shape, {0: tuple((0, n) for n in shape)}, ((0,),))
    expected = read(whole, 0)
    assert torch.equal(torch.cat([read(layout, rank) for rank in boxes]).sort().values, expected.sort().values)
    strata = (expected // 512).bincount()  # 32 chunks of 16
    assert set(strata[:numbers.numel() // 512].tolist()) == {16} and len(expected) == len(expected.unique())


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "split"], ids=str)
def test_sums_of_sampled_elements(dtype, part, device, monkeypatch):
    """Against fp64, in both paths: of a large tensor, a rectangle of one, a small tensor, and an empty one."""
    table, sample, split = (part(f"kernels.{name}") for name in
                            ("elementwise.multi_tensor", "metrics.sample", "weights.split"))
    regions = [[sample.Region(1, 70_000, 0, 0, 0, 0, 32)], [sample.Region(7, 90, 0, 90, 40, 300, 32)],
               [sample.Region(1, 35, 0, 0, 0, 0, 1)], []]
    torch.manual_seed(0)
    before, after, M = ([torch.randn(n, device=device) for n in (70_000, 630, 35, 0)] for _ in "123")
    M[1] = M[1].bfloat16()
    if dtype == torch.bfloat16:
        before, after = ([w.bfloat16() for w in some] for some in (before, after))
    wide = [[w.double() for w in some] for some in (before, after)]
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        old = [w.clone() for w in before]
        weights, new = sample.Weights(old), sample.Weights(after)
        if dtype == "split":
            weights, new = (sample.Weights(*map(list, zip(*map(split.split, some)))) for some in (old, after))
        squares = table.Squares()
        sums = sample.SampledSquares(squares, regions, weights, new, M)
        saved = sums.save()
        for w in weights.W:
            w.fill_(math.nan)  # the step changes weights in place
        sums(saved)
        assert sum(region.count() for some in regions for region in some) < 3000
        for i, found in enumerate(squares.totals(4)):
            index = torch.cat([torch.arange(0), *(region.indices() for region in regions[i])]).to(device)
            w, o, m = (t.flatten()[index].double() for t in (wide[1][i], wide[0][i], M[i]))
            wanted = torch.stack([t.square().sum() for t in (w - o, w, m)])
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("layout", ["fsdp columns", "tp x fsdp", "hsdp", "shard_state", "unreduced"])
def test_sums_of_samples_do_not_depend_on_the_layout(layout, part, monkeypatch):
    """Parameters of AdamW, Lion and SGD are sampled here, of which some ranks read nothing."""
    monkeypatch.setattr(part("metrics.regions"), "READ_ELEMENTS", 8)
    monkeypatch.setattr(part("metrics.regions"), "SHARE", 2)
    params = [[nn.Parameter(t) for t in some] for some in whole(0)]
    opt = build(params, **EXACT)
    before = take_steps(opt, params, torch.clone)
    expected = opt.metrics(per_parameter=True).as_dict()
    exact_values = expected_of(opt, params, before)
    sampled = [key for key, value in exact_values.items() if not math.isclose(expected[key], value, rel_tol=1e-3)]
    assert "muon/parameters/2.0/momentum_norm" in sampled and not any("parameters/0" in key and "share" not in key
                                                                      for key in sampled)
    for found, _, bits in run_threads(4, sharded, layout):
        assert bits
        assert_close(found, expected)


def test_samples_are_near_all_elements(device, optimizer):
    """Of an embedding, tokens by Zipf's law: rows of frequent tokens have most of the momentum (docs/metrics.md). Bits
    are those of a step without sums. Gradients stay where they are, so that GPUs replay the step.
    """
    torch.manual_seed(0)
    V, D, p = 4096, 256, 1 / torch.arange(1.0, 4097.0)
    values = 0.02 * torch.randn(V, D)
    params = [nn.Parameter(values.to(device, copy=True)) for _ in "12"]
    opts = [optimizer.Muon([{"params": [w], "use_muon": False}], lr=1e-3) for w in params]
    opts[0].collect_metrics = True
    for w in params:
        w.grad = torch.empty_like(w)
    for _ in range(5):
        tokens = torch.multinomial(p, 2048, replacement=True)
        grad = torch.zeros(V, D).index_add_(0, tokens, torch.randn(2048, D))
        before = params[0].detach().clone()
        for w, opt in zip(params, opts):
            w.grad.copy_(grad)
            opt.step()
    values, _ = exact([before], [params[0].detach()], [opts[0].state[params[0]]["exp_avg"]])
    found = opts[0].metrics().groups[0]
    errors = [getattr(found, key) / value - 1 for key, value in zip(PER, values)]
    assert all(0 < abs(error) < most for error, most in zip(errors, (0.01, 0.01, 0.02, 0.05))), errors
    assert torch.equal(*params)


# What is left out ----------------------------------------------------------------------------------------------------

def test_skipped_matrices(optimizer):
    params = [[nn.Parameter(t) for t in some] for some in whole(0)]
    opt = build(params, nonfinite="skip")
    take_steps(opt, params, torch.clone, [1])
    for p, g in zip(flat(params), flat(whole(2))):
        p.grad = g
    params[0][1].grad[3, 4] = math.nan
    params[0][3].grad[2, 0, 0] = math.inf  # one matrix of a stack
    params[2][1].grad[0] = math.inf
    before = [p.detach().clone() for p in flat(params)]
    opt.step()
    found = opt.metrics(per_parameter=True)
    assert [found.groups[i].skipped for i in range(len(GROUPS))] == [2, 0, 1, 0, 0]
    assert_close(found.as_dict(), expected_of(opt, params, before))
    assert found.parameters["0.1"].update_rms == 0.0 < found.parameters["0.1"].weight_rms


def test_skipped_matrices_without_momentum_and_sums_of_sgd(optimizer):
    """The error of an update of zeros is 1; momentum of SGD is a sum, which is not kept with momentum=0."""
    p = nn.Parameter(torch.randn(6, 8))
    vectors = [nn.Parameter(torch.randn(5)) for _ in "12"]
    sgd = [{"params": [v], "use_muon": False, "rule": "sgd", "momentum": mu} for v, mu in zip(vectors, (0.0, 0.5))]
    opt = optimizer.Muon([{"params": [p]}, *sgd], nonfinite="skip")
    opt.collect_metrics = True
    for _ in range(30):
        p.grad = torch.full((6, 8), math.nan)
        for v in vectors:
            v.grad = torch.ones(5)
        opt.step()
    matrix, *found = opt.metrics().groups.values()
    assert matrix.skipped == 1 and math.isclose(matrix.orthogonality_error, 1.0)
    assert found[0].momentum_norm == 0.0 and math.isclose(found[1].momentum_norm, 2.0 * math.sqrt(5), rel_tol=1e-5)


def missing(rank, world):
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    params = [[nn.Parameter(cut(t, mesh, [Shard(0)])) for t in some] for some in whole(0)]
    opt = build(params)
    for p, g in zip(flat(params), flat(whole(1))):
        p.grad = cut(g, mesh, [Shard(0)])
    params[0][0].grad = params[1][0].grad = params[2][1].grad = None
    if rank:
        params[0][1].grad = None  # rank 0 has a gradient
    opt.step()
    found = opt.metrics(per_parameter=True)
    opt = package().Muon(some := [nn.Parameter(cut(torch.ones(n, n), mesh, [Shard(0)])) for n in (8, 4)])
    opt.collect_metrics, errors = True, []
    for is_missing in (False, True):  # the sampled matrix has no gradient
        for p in some:
            p.grad = None if is_missing and len(p) == 8 else cut(torch.ones(p.shape), mesh, [Shard(0)])
        opt.step()
        errors.append(opt.metrics().groups[0].orthogonality_error)
    return list(found.groups), list(found.parameters), errors


def test_parameters_without_a_gradient_are_left_out():
    names = {f"{i}.{j}" for i, (_, shapes) in enumerate(GROUPS) for j in range(len(shapes))} - {"0.0", "1.0", "2.1"}
    for groups, parameters, (error, of_none) in run_threads(2, missing):
        assert groups == [0, 2, 3, 4] and set(parameters) == names
        assert error > 0.0 and of_none is None


def test_every_parameter_has_a_key_of_its_own(optimizer):
    """Numbers of parameters without names begin anew in each group, and long names are not cut as in messages. A name
    that several have is told apart, as of layers whose groups were made one by one."""
    tensors, names = [torch.randn(4, 4) for _ in range(3)], [f"{'blocks.' * 60}{i}" for i in range(2)]
    unnamed = [{"params": tensors[:2]}, {"params": tensors[2:], "use_muon": False}]
    alike = [{"params": [("up", tensors[0]), ("down", tensors[1])]}, {"params": [("up", tensors[2])]}]
    for groups, keys in ((unnamed, ["group0.#0", "group0.#1", "group1.#0"]), ([*zip(names, tensors)], names),
                         (alike, ["group0.#0.up", "down", "group1.#0.up"])):
        opt = optimizer.Muon(groups)
        opt.collect_metrics = True
        for t in tensors:
            t.grad = torch.randn(4, 4)
        opt.step()
        assert list(opt.metrics(per_parameter=True).parameters) == keys


def test_clipped_heads(optimizer):
    q, k = (nn.Parameter(torch.randn(8, 6)) for _ in "qk")
    clip = optimizer.QKClip(1.0, {"attention": {"heads": 2, "weights": {"q": "q", "k": "k"}}})
    opt = optimizer.Muon([("q", q), ("k", k)], qk_clip=clip)
    opt.collect_metrics = True
    q.grad, k.grad = torch.randn(8, 6), torch.randn(8, 6)
    opt.step(qk_logits={"attention": torch.tensor([0.5, 3.0])})
    assert opt.metrics().clipped_heads == 1 == opt.metrics().as_dict()["muon/clipped_heads"]


# Steps that collect nothing ------------------------------------------------------------------------------------------

def test_off_by_default_and_switched_without_a_plan(optimizer, monkeypatch):
    p = nn.Parameter(torch.randn(6, 5))
    p.grad = torch.randn(6, 5)
    opt = optimizer.Muon([p])
    planned = []
    preparation = part("execution.prepare.preparation")
    plan = preparation.make_plans
    monkeypatch.setattr(preparation, "make_plans", lambda *a: planned.append(1) or plan(*a))
    assert not opt.collect_metrics
    opt.step()
    (store,), bound, count = opt._bound.stores, opt._bound, len(planned)
    assert store.collector is None
    with pytest.raises(RuntimeError, match="collect_metrics=True"):
        opt.metrics()
    for on in (True, False):
        opt.collect_metrics = on
        opt.step()
        assert opt._bound is not bound and len(planned) == count
        bound = opt._bound
        opt.step()
        assert opt._bound is bound, "a steady step binds nothing"
    with pytest.raises(RuntimeError, match="no step since collect_metrics was set"):
        opt.metrics()
    opt.collect_metrics = True
    opt.step()
    opt.release()
    with pytest.raises(RuntimeError, match="add_param_group or release"):
        opt.metrics()
    opt.step()
    opt.load_state_dict(opt.state_dict())
    with pytest.raises(RuntimeError, match="no step since collect_metrics was set, load_state_dict"):
        opt.metrics()
    with pytest.raises(ValueError, match="collect_metrics='yes'"):
        opt.collect_metrics = "yes"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))],
                         ids=["deepcopy", "pickle"])
def test_copies_collect_as_the_optimizer_does(copied, optimizer):
    opt = optimizer.Muon([nn.Parameter(torch.randn(6, 5))])
    assert not (copied(opt).collect_metrics or copied(opt).timing)
    opt.collect_metrics = opt.timing = True
    twin = copied(opt)
    assert twin.timing
    (p,) = twin.param_groups[0]["params"]
    p.grad = torch.randn(6, 5)
    twin.step()
    assert twin.metrics().groups[0].update_rms > 0.0 and twin.plan_report()


def test_no_wait_of_the_host_in_a_step(optimizer):
    params = [[nn.Parameter(t) for t in some] for some in whole(0)]
    opt = build(params, nonfinite="skip")
    take_steps(opt, params, torch.clone)
    found = []
    for on in (False, True):
        opt.collect_metrics = on
        take_steps(opt, params, torch.clone, [3])
        with Reads() as reads:
            opt.step()
        found.append(reads.found)
    assert found[0] == found[1]


# Kernels -------------------------------------------------------------------------------------------------------------

def rectangles(device):
    shapes = [(3, 5), (1, 4104), (0, 4), (70, 96), (9, 1), (64, 200)]
    return [torch.randn(s, device=device) for s in shapes]


@pytest.mark.kernels_ci
@pytest.mark.interpreter
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_sums_of_the_kernels(early, skips, device, monkeypatch):
    """Of every rectangle, in every form of access, in both paths; weights and momenta have the bits of calls without
    sums. The sum of a momentum comes from the launch that writes it.
    """
    table, momentum = part("kernels.elementwise.multi_tensor"), part("kernels.elementwise.momentum")
    update = part("kernels.elementwise.weight_update")
    torch.manual_seed(0)
    W0, M0, G, O = (rectangles(device) for _ in range(4))
    W0[3], M0[3] = W0[3][:, :90], M0[3][:, :90]  # rows with gaps
    G[3], O[3] = (t[3][:, :90].contiguous() for t in (G, O))
    flags = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 0.0], device=device)
    numbers = torch.tensor([0.02, 0.99, 0, 0, 0.05, 0.95], device=device)
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        addresses = None if path == "torch" else torch.tensor([g.data_ptr() for g in G], device=device)
        results = []
        for collects in (True, False):
            W, M = ([t.clone() if t.is_contiguous() else t.new_empty(70, 96)[:, :90].copy_(t) for t in some]
                    for some in (W0, M0))
            sources = [table.Source(i, 0, tuple(g.stride())) for i, g in enumerate(G)]
            skip = table.Skip(flags, tuple(range(6))) if skips else None
            first, second = (table.Squares() if collects else None for _ in "12")
            U = [torch.empty_like(g) for g in G]
            pack = momentum.Pack(M, U, sources, G, skip, squares=first)
            write = update.WeightUpdate(W, O, [1.0] * 6, skip, M, sources, G, squares=second)
            pack(G, addresses, numbers[4:], True, early)
            write(numbers, G, addresses, numbers[4:], not early)
            results.append([*W, *M])
            if not collects:
                continue
            packed, written = first.totals(6), second.totals(6)
            for i, (w, old, m) in enumerate(zip(W, W0, M)):
                wanted = [(w.double() - old.double()).square().sum(), w.double().square().sum(),
                          m.double().square().sum()]
                found = written[i] + packed[i]
                torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-5, atol=1e-9)
                assert (written if early else packed)[i, 2] == 0.0
        assert same(*results)


@pytest.mark.interpreter
@pytest.mark.parametrize("skips", [False, True])
def test_sums_of_momenta_in_8_bits(skips, device, monkeypatch):
    """As stored, from the launch that writes them."""
    table, blocks = part("kernels.elementwise.multi_tensor"), part("kernels.quantized.blocks")
    inside = part("kernels.quantized.momentum")
    torch.manual_seed(0)
    G = [torch.randn(s, device=device) for s in ((5, 70), (64, 128), (1, 9))]
    flags, weight = torch.tensor([0.0, 1.0, 0.0], device=device), torch.tensor([0.05, 0.95], device=device)
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        M = [inside.QuantizedView(*blocks.quantize(torch.randn_like(g))) for g in G]
        U, squares = [torch.empty_like(g) for g in G], table.Squares()
        sources = [table.Source(i, 0, tuple(g.stride())) for i, g in enumerate(G)]
        skip = table.Skip(flags, (0, 1, 2)) if skips else None
        addresses = None if path == "torch" else torch.tensor([g.data_ptr() for g in G], device=device)
        pack = inside.QuantizedMomentum(M, U, sources, G, skip, squares=squares)
        write = inside.QuantizedMomentum(M, None, sources, G, skip, squares=squares)
        update = inside.UpdateWithMomentum(lambda numbers: None, write)
        for early in (False, True, False):
            pack(G, addresses, weight, True, early)
            update(None, G, addresses, weight, not early)
            for m, found in zip(M, squares.totals(3)[:, 2]):
                stored = blocks.dequantize(m.values, m.scales).double()
                torch.testing.assert_close(found, stored.square().sum(), rtol=1e-5, atol=0.0)


def test_sums_are_of_weights_as_stored(device, monkeypatch):
    """In bf16 a small update rounds away."""
    if INTERPRETED:
        take("torch", monkeypatch)  # the interpreter rounds to bf16 towards zero
    table, update = part("kernels.elementwise.multi_tensor"), part("kernels.elementwise.weight_update")
    W, O = [torch.ones(8, 64, device=device, dtype=torch.bfloat16)], [torch.ones(8, 64, device=device)]
    squares = table.Squares()
    bound = update.WeightUpdate(W, O, [1.0], squares=squares)
    bound(torch.tensor([1e-4, 1.0], device=device))
    (update_, weight_, momentum_), = squares.totals(1).tolist()
    assert update_ == momentum_ == 0.0 and math.isclose(weight_, 512.0, rel_tol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=str)
def test_captured_steps_have_the_values_of_eager_ones(options, device, optimizer, monkeypatch):
    found = []
    for graphs in ("off", "auto"):
        monkeypatch.setenv("OPTIMIZER_GRAPHS", graphs)
        params = [[nn.Parameter(t.to(device)) for t in some] for some in whole(0)]
        opt = build(params, **options)
        for p in flat(params):
            p.grad = torch.empty_like(p)
        for seed in range(1, 6):
            for p, g in zip(flat(params), flat(whole(seed))):
                p.grad.copy_(g)
            before = [p.detach().clone() for p in flat(params)]
            opt.step()
        found.append(opt.metrics(per_parameter=True).as_dict())
        assert_close(found[-1], expected_of(opt, params, before))
    assert_close(found[1], found[0], 1e-6)


# Integrations --------------------------------------------------------------------------------------------------------

def test_keys_are_flat_and_values_numbers(one_process):
    assert all(key.startswith("muon/") and isinstance(value, (int, float)) for key, value in one_process.items())
    group = {key.rsplit("/", 1)[1] for key in one_process if key.startswith("muon/group0/")}
    assert group == {*PER, "skipped", "orthogonality_error"}
    assert "muon/group2/orthogonality_error" not in one_process
    shares = [one_process[f"muon/group{i}/update_share"] for i in range(len(GROUPS))]
    assert math.isclose(sum(shares), 1.0)


def test_sinks_of_the_example(one_process, monkeypatch, tmp_path):
    """TensorBoard's writer, wandb's run, and a table."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "examples"))
    example, seen = importlib.import_module("log_metrics"), []
    writer = types.SimpleNamespace(add_scalar=lambda key, value, step: seen.append((key, value, step)))
    run = types.SimpleNamespace(log=lambda values, step: seen.append((values, step)))
    sinks = [example.to_tensorboard(writer), example.to_wandb(run), example.to_csv(tmp_path / "table.csv")]
    opt = types.SimpleNamespace(metrics=lambda: types.SimpleNamespace(as_dict=lambda: one_process))
    after_step = example.logging(sinks, 2)
    for step in (1, 2, 3, 4):
        after_step(step, opt)
    of_step = [*((key, value, 2) for key, value in one_process.items()), (one_process, 2)]
    assert seen[:len(of_step)] == of_step and len(seen) == 2 * len(of_step)
    with open(tmp_path / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "4"] and rows[0].keys() == {"step", *one_process}


@pytest.fixture
def trainer_callbacks(monkeypatch):
    """Callbacks of `trainer_metrics` have a base class as transformers' TrainerCallback."""
    module = types.ModuleType("transformers")
    module.TrainerCallback = type("TrainerCallback", (), {})
    monkeypatch.setitem(sys.modules, "transformers", module)
    inside = part("integrations.trainer")
    inside._callback_class.cache_clear()
    yield
    inside._callback_class.cache_clear()


def test_columns_of_the_table_stay_if_keys_change(monkeypatch, tmp_path):
    """A group without a gradient is left out; cells of the next were written in its place."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "examples"))
    log = importlib.import_module("log_metrics").to_csv(tmp_path / "table.csv")
    log({"a": 1.0, "b": 2.0}, 1)
    log({"b": 3.0, "c": 4.0}, 2)
    assert (tmp_path / "table.csv").read_text() == "step,a,b\n1,1.0,2.0\n2,,3.0\n"


def test_trainer_metrics(optimizer, trainer_callbacks):
    """With the events that transformers sends, and accelerate's wrapper."""
    logs = []
    trainer = types.SimpleNamespace(log=logs.append)
    callback = optimizer.trainer_metrics(trainer, every=2)
    params = [[nn.Parameter(t) for t in some] for some in whole(0)]
    opt = build(params)
    opt.collect_metrics = False
    wrapped = types.SimpleNamespace(optimizer=opt)
    callback.on_train_begin(None, None, None, optimizer=wrapped)
    for step in range(1, 5):
        take_steps(opt, params, torch.clone, [step])
        callback.on_step_end(None, types.SimpleNamespace(global_step=step), None, optimizer=wrapped)
    assert len(logs) == 2 and logs[1] == opt.metrics().as_dict()
    with pytest.raises(TypeError, match="not SGD: pass optimizer_cls_and_kwargs"):
        callback.on_train_begin(None, None, None, optimizer=torch.optim.SGD(flat(params)))
    with pytest.raises(ValueError, match="every=0"):
        optimizer.trainer_metrics(trainer, every=0)


def test_trainer_metrics_with_a_scaler_that_skips_steps(optimizer, trainer_callbacks):
    """Nothing is logged for a step that the scaler left out: at first nothing is bound, then values would be old."""
    logs, p = [], nn.Parameter(torch.randn(8, 6))
    callback = optimizer.trainer_metrics(types.SimpleNamespace(log=logs.append), every=1)
    opt, scaler = optimizer.Muon([p], unscale_in_step=False), torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(number, is_bad=False, then=lambda: None):
        scaler.scale(p.square().sum() * (math.inf if is_bad else 1.0)).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        then()
        callback.on_step_end(None, types.SimpleNamespace(global_step=number), None, optimizer=opt)
        return len(logs)

    for _ in "12":  # two calls of train()
        callback.on_train_begin(None, None, None, optimizer=opt)
        found = [step(1, True), step(2), step(3, True), step(4, then=opt.release), step(5)]
        assert found == [0, 1, 1, 1, 2] and all("muon/group0/update_rms" in values for values in logs)
        callback.on_train_end(None, None, None, optimizer=opt)
        assert not opt._optimizer_step_post_hooks
        opt.release()
        logs.clear()

"""Random models, meshes, placements, dtypes and options: sharded against one process to the bit, and that against a
plain fp64 reference.

By default the same 120 examples. OPTIMIZER_EXAMPLES is another number of them, OPTIMIZER_SEED another beginning: each
seed has its own examples, the same at every run of it.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import package, part, run_threads
from tests.test_bucket_updates import cut

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, assume, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

EXAMPLES, SEED = (int(os.environ.get(name, usual)) for name, usual in
                  (("OPTIMIZER_EXAMPLES", "120"), ("OPTIMIZER_SEED", "0")))
PORTIONS, NAMES = 4, ["Muon", "NorMuon"]  # of each, with nesterov and without
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
MESHES = {1: [(1,)], 2: [(2,)], 3: [(3,)], 4: [(4,), (2, 2)], 5: [(5,)], 6: [(6,), (2, 3), (3, 2)], 7: [(7,)],
          8: [(8,), (2, 4), (4, 2), (2, 2, 2)]}
STEPS, LR = 2, 0.1
# fp32 weights as bf16 ones with a rest, momentum and averages in host memory, weights rounded at random
SMALL_STATE = {"halves": {"master_weights": "split16"}, "host memory": {"offload_state": True},
               "at random": {"rounding": "stochastic", "rounding_seed": 1}}
OF_BF16 = ("halves", "at random")
# What the examples of each portion have to meet
MET = {"dtensor", "ddp", "unreduced", "two axes", "strided", F32, BF16, F16, None, *SMALL_STATE}


class Independent(HypothesisProvider):
    """Hypothesis makes most examples out of others by repeating what they drew. Of 120 such examples none had a mesh of
    two axes, a strided placement or split weights. As a backend of another name it draws each anew.
    """


AVAILABLE_PROVIDERS["independent"] = f"{__name__}.{Independent.__name__}"


# problems --------------------------------------------------------------------------------------------------------

def work(shape):
    r, c = sorted(shape[-2:])
    return math.prod(shape[:-2]) * r * r * c


DIM = st.one_of(st.integers(1, 8), st.integers(1, 40), st.integers(1, 300))  # made once: a strategy is checked when new
SHAPES = st.lists(st.tuples(st.lists(st.integers(1, 4), max_size=2), DIM, DIM), min_size=1, max_size=8)
AXIS = {dims: st.one_of(st.none(), st.integers(0, dims - 1)) for dims in (2, 3, 4)}
KIND, MUON = st.sampled_from(["usual"] * 5 + ["zero", "rows", "none"]), st.integers(0, 4)


@st.composite
def shapes(draw):
    """1 to 40 parameters of 2 to 4 dims from 1 to 300, of up to 8 shapes, which are made smaller until they are quick
    to step; some models have one large parameter.
    """
    of = [[*lead, r, c] for lead, r, c in draw(SHAPES)]
    one = st.integers(0, len(of) - 1)
    found = [of[draw(one)] for _ in range(draw(st.integers(1, 40)))]
    room = draw(st.sampled_from([1e5] * 4 + [1e6] * 4 + [1e7]))
    while sum(map(work, found)) > room:
        largest = max(found, key=work)
        place = largest.index(max(largest))
        largest[place] = max(1, largest[place] * 2 // 3)
    large, small = st.integers(200, 300), st.integers(1, 4)
    kinds = {"matrix": [large, large], "stack": [small, large, large], "of stacks": [small, small, large, large],
             "experts": [large, small, small]}
    if kind := kinds.get(draw(st.sampled_from([None] * 30 + list(kinds)))):
        found[-1] = [draw(side) for side in kind]
    return [tuple(shape) for shape in found]


@st.composite
def placement(draw, shape, mesh):
    """For each axis of the mesh the dim that it cuts, None for a copy, or -1 - dim: strided, as FSDP2 over TP."""
    cuts = [draw(AXIS[len(shape)]) for _ in mesh]
    if len(mesh) == 2 and cuts[0] is not None and cuts[0] == cuts[1] and draw(st.booleans()):
        cuts[0] = -1 - cuts[0]
    return cuts


@st.composite
def problems(draw, portion):
    """Everything that a run depends on, as plain values. Few ranks for many parameters, but in one of thirty."""
    mode = draw(st.sampled_from(["dtensor"] * 4 + ["ddp", "unreduced"]))
    sizes = draw(shapes())
    most = 8 if draw(st.integers(0, 29)) == 0 else min(8, max(2, 16 // len(sizes)))
    world = draw(st.sampled_from([*range(2, most + 1)] * 3 + [1]))
    mesh = (2, 2) if draw(st.integers(0, 4)) == 4 else draw(st.sampled_from(MESHES[world]))
    coefficients, ns_steps = draw(st.sampled_from([("polar_express", 5), ("polar_express", 3), ("jordan", 5),
                                                   ("cubic", 5), ("aol", 5), ((1.5, -0.5, 0.0), 4)]))
    small_state = draw(st.sampled_from([None] * 5 + list(SMALL_STATE)))
    dtype = BF16 if small_state in OF_BF16 else draw(st.sampled_from([F32, F32, BF16, F16]))
    return {
        "mode": mode, "world": math.prod(mesh), "mesh": mesh, "shapes": sizes, "name": NAMES[portion // 2],
        "placements": [draw(placement(s, mesh)) for s in sizes] if mode == "dtensor" else None,
        "muon": [draw(MUON) > 0 for _ in sizes], "gradients": [[draw(KIND) for _ in sizes] for _ in range(STEPS)],
        "dtype": dtype, "small_state": small_state, "state_dtype": draw(st.sampled_from([F32, F32, BF16])),
        "wire_dtype": draw(st.sampled_from([F32, BF16])), "small": draw(st.booleans()),
        "nonfinite": draw(st.sampled_from(["propagate", "skip"])), "momentum": draw(st.sampled_from([0.0, 0.5, 0.95])),
        "nesterov": portion % 2 == 0, "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "adjust_lr_fn": draw(st.sampled_from([None, "match_rms_adamw", "spectral_norm"])),
        "ns_coefficients": coefficients, "ns_steps": ns_steps, "seed": draw(st.integers(0, 1000)),
    }


def values(problem):
    """(weights, gradients of each step; None where no rank has one)."""
    generator = torch.Generator().manual_seed(problem["seed"])

    def random(shape, kind="usual"):
        value = torch.randn(shape, generator=generator) * (kind != "zero")
        if kind == "rows":
            value *= torch.logspace(-1, 1, shape[-2])[:, None]
        return None if kind == "none" else value.to(problem["dtype"])

    fulls = [random(s) for s in problem["shapes"]]
    return fulls, [[random(s, kind) for s, kind in zip(problem["shapes"], step)] for step in problem["gradients"]]


def built(problem, params, **options):
    muon = [p for p, use in zip(params, problem["muon"]) if use]
    rest = [p for p, use in zip(params, problem["muon"]) if not use]
    keys = ("state_dtype", "wire_dtype", "nonfinite", "momentum", "nesterov", "weight_decay", "adjust_lr_fn",
            "ns_coefficients", "ns_steps")
    groups = [group for group in ({"params": muon}, {"params": rest, "use_muon": False}) if group["params"]]
    options |= SMALL_STATE.get(problem["small_state"], {})
    return getattr(package(), problem["name"])(groups, lr=LR, **{k: problem[k] for k in keys}, **options)


# three ways to step ------------------------------------------------------------------------------------------------

def alone(problem, fulls, grads):
    """The package in one process: weights, and the state of each."""
    params = [nn.Parameter(f.clone()) for f in fulls]
    on_device = {**problem, "small_state": None} if problem["small_state"] == "host memory" else problem
    optimizer = built(on_device, params)
    for step in grads:
        for p, g in zip(params, step):
            p.grad = g
        optimizer.step()
    return [p.detach() for p in params], [dict(optimizer.state[p]) for p in params]


def together(rank, world, problem, fulls, grads, one):
    """The package on many ranks: the names of what is not what one process has."""
    from torch.distributed.tensor import init_device_mesh

    mode = problem["mode"]
    mesh = init_device_mesh("cpu", problem["mesh"])
    ways = [placements(cuts, problem["mesh"]) for cuts in problem["placements"] or ()]

    def place(i, full):
        return cut(full, mesh, ways[i]) if ways else full.clone()

    def shard(i, full):
        if not ways or not full.ndim:
            return full
        box = part("params.layout").box_at(mesh.get_coordinate(), full.shape, ways[i], problem["mesh"])
        return full[tuple(slice(*side) for side in box)]

    options = {} if mode == "dtensor" else {"process_group": dist.group.WORLD, "grads_are_reduced": mode == "ddp"}
    params = [place(i, f).requires_grad_() for i, f in enumerate(fulls)]  # of a DTensor, nn.Parameter takes its time
    room = {"workspace_bytes": least_room(problem)} if problem["small"] else {}
    optimizer = built(problem, params, **options, **room)
    for step in grads:
        for i, (p, g) in enumerate(zip(params, step)):
            p.grad = None if g is None else place(i, g)
        optimizer.step()
    local, wrong = part("params.dtensor").local_of, []
    for i, (p, W, state) in enumerate(zip(params, *one)):
        if mode == "unreduced":
            moved = (W - fulls[i]).float().norm()
            if (p.detach() - W).float().norm() > 0.1 * moved + 4 * ulp(problem) * W.float().norm():
                wrong.append((i, "weight"))
            continue
        pairs = {"weight": (p, W), **{k: (optimizer.state[p][k], v) for k, v in state.items()}}
        for key, (here, whole) in pairs.items():
            if not torch.equal(local(here), shard(i, whole)):
                wrong.append((i, key))
    return wrong


def placements(cuts, mesh):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    return [Replicate() if dim is None else Shard(dim) if dim >= 0 else _StridedShard(-1 - dim, split_factor=mesh[1])
            for dim in cuts]


def least_room(problem):
    """Enough for one matrix, or one row of a parameter, per rank, and little more."""
    largest = max(max(math.prod(s[-2:]), math.prod(s[1:])) for s in problem["shapes"])
    return 36 * (problem["world"] + 2) * (largest + 400) + 3000 * problem["world"]


def reference(problem, fulls, grads):
    """The rule in plain fp64, rounded where the package says that it rounds."""
    weights, states = [f.double() for f in fulls], [{} for _ in fulls]
    for step in grads:
        here = {i: g.double() for i, g in enumerate(step) if g is not None}
        factors = polars({i: momentum(problem, g, states[i]) for i, g in here.items() if problem["muon"][i]}, problem)
        for i, g in here.items():
            rule, g = (muon_step, factors[i]) if i in factors else (adamw_step, g)
            weights[i] = rule(problem, weights[i], g, states[i]).to(problem["dtype"]).double()
    return weights


def momentum(problem, G, state):
    mu = problem["momentum"]
    M = mu * state.get("M", torch.zeros_like(G)) + (1 - mu) * G
    U = (1 - mu) * G + mu * M if problem["nesterov"] else M
    state["M"] = M.to(problem["state_dtype"]).double()
    return U.to(problem["wire_dtype"]).double()


def polars(Us, problem):
    """The polar factors, those of one shape in one call."""
    found = {}
    for shape in {U.shape for U in Us.values()}:
        some = [i for i, U in Us.items() if U.shape == shape]
        found.update(zip(some, polar(torch.stack([Us[i] for i in some]), problem)))
    return found


def muon_step(problem, W, U, state):
    R, C = W.shape[-2:]
    if problem["name"] == "NorMuon":
        square = U.square().mean(-1, keepdim=True)
        V = state["V"] = 0.95 * state.get("V", torch.zeros_like(square)) + 0.05 * square
        N = torch.where(V > 0, U / (V.sqrt() + 1e-8), 0.0)
        before, after = (X.square().sum((-1, -2), keepdim=True) for X in (U, N))
        U = torch.where(after > 0, N * (before / after).sqrt(), 0.0)
    scale = {None: max(1.0, R / C) ** 0.5, "match_rms_adamw": 0.2 * max(R, C) ** 0.5,
             "spectral_norm": (R / C) ** 0.5}[problem["adjust_lr_fn"]]
    return (1 - LR * problem["weight_decay"]) * W - LR * scale * U


def polar(U, problem):
    steps = part("newton_schulz.orthogonalize").steps_of(problem["ns_coefficients"], problem["ns_steps"])
    X = U.mT if U.shape[-2] > U.shape[-1] else U
    largest = X.abs().amax((-1, -2), keepdim=True)
    X = torch.where(largest > 0, X / largest, 0.0)
    X = torch.where(largest > 0, X / (X.square().sum((-1, -2), keepdim=True).sqrt() + 1e-7), 0.0)
    if steps.aol:
        rows = (X @ X.mT).abs().sum(-1, keepdim=True)
        X = torch.where(rows > 0, X * rows.rsqrt(), 0.0)
    for a, b, c in steps.triples:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if U.shape[-2] > U.shape[-1] else X


def adamw_step(problem, W, G, state):
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = 0.9 * state.get("m", torch.zeros_like(W)) + 0.1 * G
    v = state["v"] = 0.95 * state.get("v", torch.zeros_like(W)) + 0.05 * G.square()
    return (1 - LR * problem["weight_decay"]) * W - LR * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)


def ulp(problem):
    return torch.finfo(problem["dtype"]).eps


def far(problem, ours, theirs):
    """The parameters whose weights are not the reference's, up to rounding."""
    coarse, wrong = [problem[key] != F32 for key in ("state_dtype", "wire_dtype")], []
    for i, (W, expected, shape) in enumerate(zip(ours, theirs, problem["shapes"])):
        R, C = shape[-2:]
        size = math.sqrt(min(R, C)) * max(1.0, R / C, 0.04 * max(R, C)) ** 0.5 if problem["muon"][i] else (R * C) ** 0.5
        rounding = 2e-3 if not any(coarse[:1 + problem["muon"][i]]) else 0.05 if problem["muon"][i] else 0.02
        allowed = STEPS * LR * size * math.prod(shape[:-2]) ** 0.5 * rounding
        if not (W.double() - expected).norm() <= allowed + 2 * STEPS * ulp(problem) * expected.norm():
            wrong.append((i, shape, (W.double() - expected).norm().item(), allowed))
    return wrong


def check(problem):
    given_ = values(problem)
    one = alone(problem, *given_)
    assert far(problem, one[0], reference(problem, *given_)) == []
    assert run_threads(problem["world"], together, problem, *given_, one) == [[]] * problem["world"]


EXTREMES = [  # (world, mesh, shapes); the first parameter is AdamW's
    (8, (2, 4), [(7 + i, 5) for i in range(39)] + [(300, 300)]),
    (8, (8,), [(1, 300), (300, 1), (300, 3, 4), (300, 2, 3, 3)]),
    (6, (3, 2), [(2, 300, 2), (2, 300, 260), (300, 299)]),
    (1, (1,), [(2, 2, 280, 300)]),
]


def extreme(portion):
    world, mesh, sizes = EXTREMES[portion]
    return {
        "mode": "dtensor", "world": world, "mesh": mesh, "shapes": sizes, "name": NAMES[portion // 2],
        "placements": [[i % len(s), None][:len(mesh)] for i, s in enumerate(sizes)],
        "muon": [i > 0 or len(sizes) == 1 for i in range(len(sizes))], "gradients": [["usual"] * len(sizes)] * STEPS,
        "dtype": F32, "small_state": [None, "host memory"][portion % 2], "state_dtype": F32,
        "wire_dtype": [F32, BF16][portion % 2], "small": portion == 0,
        "nonfinite": "skip", "momentum": 0.95, "nesterov": True, "weight_decay": 0.1, "adjust_lr_fn": None,
        "ns_coefficients": "polar_express", "ns_steps": 5, "seed": portion,
    }


@pytest.mark.parametrize("portion", range(PORTIONS))
def test_random_models(portion, monkeypatch):
    """In portions, which workers take side by side; none comes twice. In each, one as large as they may be."""
    monkeypatch.setattr(part("execution.offload.offload"), "LEAST_SLOT", 4096)  # of offloaded state, in many parts
    tried, met = set(), set()

    def once(problem):
        key = repr({**problem, "seed": None})
        assume(key not in tried)
        check(problem)
        tried.add(key)
        met.update(kinds_of(problem))

    check(extreme(portion))
    run = settings(max_examples=EXAMPLES // PORTIONS, suppress_health_check=list(HealthCheck), backend="independent")
    seed(PORTIONS * SEED + portion)(run(given(problems(portion))(once)))()
    assert len(tried) >= EXAMPLES // PORTIONS
    assert met >= MET or SEED or EXAMPLES < 120, MET - met


def kinds_of(problem):
    dims = {dim for cuts in problem["placements"] or () for dim in cuts if dim is not None}
    axes = {"two axes"} if len(problem["mesh"]) > 1 and problem["mode"] == "dtensor" else set()
    strided = {"strided"} if any(dim < 0 for dim in dims) else set()
    return {problem["mode"], problem["dtype"], problem["small_state"]} | axes | strided

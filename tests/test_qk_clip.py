"""QK-clip: factors against an fp64 reference, the bits of one process on every layout, maxima of all ranks, and what is
refused. The reference works on weights viewed as (heads, ...), without row indices.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import package, part, run_ranks, run_threads
from tests.test_fused_weights import ATTENTION, attention, kind, linear, within
from tests.test_muon import same
from tests.test_overlap_forward import Seen, install

E, H, KV, D, NOPE, ROPE, V = 12, 4, 2, 6, 6, 4, 5
TAU = 2.0
INF, BF16 = math.inf, torch.bfloat16


# Weights, layers and the reference ------------------------------------------------------------------------------------

def rows(sizes, roles, repeat=1):
    return {"rows": sizes, "roles": roles, **({"repeat": repeat} if repeat > 1 else {})}


# Name: (heads, key heads, {parameter: (rows, blocks, view)}). A view makes (heads, rows of a head, ...) of each role
def heads_view(role, heads):
    return lambda w: {role: w.unflatten(0, (heads, -1))}


def fused(sizes, roles, heads):
    def view(w):
        return {role: one.unflatten(0, (heads[role], -1)) for role, one in zip(roles, w.split(sizes)) if role in heads}
    return view


def per_group(w):
    groups = w.unflatten(0, (KV, H // KV + 2, D))
    return {"q": groups[:, :-2].flatten(0, 1), "k": groups[:, -2]}  # flatten is a copy: see `put`


def of_latent(first, second):
    def view(w):
        heads = w.unflatten(0, (H, -1))
        found = {}
        for role, part_ in zip((first[0], second[0]), heads.split((first[1], second[1]), 1)):
            found[role] = part_
        return {role: one for role, one in found.items() if role != "v"}
    return view


CASES = {
    "MHA": (H, H, {"q": (H * D, "q", heads_view("q", H)), "k": (H * D, "k", heads_view("k", H))}),
    "GQA": (H, KV, {"q": (H * D, "q", heads_view("q", H)), "k": (KV * D, "k", heads_view("k", KV))}),
    "fused": (H, KV, {"qkv": ((H + 2 * KV) * D, rows([H * D, KV * D, KV * D], ["q", "k", "v"]),
                              fused([H * D, KV * D, KV * D], ["q", "k", "v"], {"q": H, "k": KV}))}),
    "fused per head": (H, H, {"qkv": (3 * H * D, rows([D, D, D], ["q", "k", "v"], H),
                                      lambda w: dict(zip("qk", w.unflatten(0, (H, 3, D)).unbind(1))))}),
    "fused by group": (H, KV, {"qkv": ((H + 2 * KV) * D, rows([H // KV * D, D, D], ["q", "k", "v"], KV), per_group)}),
    "MLA": (H, H, {"q_b": (H * (NOPE + ROPE), rows([NOPE, ROPE], ["q", "q_rope"], H),
                           of_latent(("q", NOPE), ("q_rope", ROPE))),
                   "kv_b": (H * (NOPE + V), rows([NOPE, V], ["k", "v"], H), of_latent(("k", NOPE), ("v", V)))}),
}  # fmt: skip


def layer_of(case, prefix="", transposed=()):
    heads, kv_heads, weights = CASES[case]
    parts = {}
    for name, (_, blocks, _) in weights.items():
        if name in transposed:
            blocks = {"columns": [], "roles": [blocks]} if isinstance(blocks, str) else blocks
            blocks = {("columns" if key == "rows" else key): value for key, value in blocks.items()}
        parts[f"{prefix}{name}"] = blocks
    return {"heads": heads, **({"kv_heads": kv_heads} if kv_heads != heads else {}), "weights": parts}


def factors_of(case, maxima, mode):
    """{role: fp64 factor of each head}, as the formulas say."""
    heads, kv_heads, _ = CASES[case]
    gamma = [TAU / s if s > TAU and s < INF else 1.0 for s in maxima]
    found = {"q": [math.sqrt(g) for g in gamma], "k": [math.sqrt(g) for g in gamma], "q_rope": gamma}
    if kv_heads < heads and mode == "keep":
        found |= {"q": gamma, "k": [1.0] * kv_heads}
    elif kv_heads < heads:
        each = heads // kv_heads
        keys = [min(math.sqrt(g) for g in gamma[k * each:(k + 1) * each]) for k in range(kv_heads)]
        found |= {"k": keys, "q": [min(1.0, g / keys[h // each]) for h, g in enumerate(gamma)]}
    return {role: torch.tensor(values, dtype=torch.float64) for role, values in found.items()}


def reference(case, weights, maxima, mode="keep"):
    """fp64 weights after QK-clip."""
    factors, clipped = factors_of(case, maxima, mode), {}
    for name, w in weights.items():
        whole = w.double().clone()
        view = CASES[case][2][name][2]
        mask = torch.ones_like(whole)
        for role, heads in view(mask).items():
            # Views of a view cannot be changed where they are copies: find the rows by their numbers instead
            number = view(torch.arange(len(whole)).view(-1, *[1] * (whole.ndim - 1)).expand(whole.shape))[role]
            factor = factors[role].view(-1, *[1] * (heads.ndim - 1)).expand(heads.shape)
            index = number.flatten(0, 1)[(slice(None), *[0] * (whole.ndim - 1))]
            mask[index] = factor.flatten(0, 1)
        clipped[name] = whole * mask
    return clipped


def weights_of(case, dtype=torch.float32, seed=0, prefix=""):
    generator = torch.Generator().manual_seed(seed)
    return {f"{prefix}{name}": torch.randn(count, E, generator=generator).to(dtype)
            for name, (count, _, _) in CASES[case][2].items()}


def muon(named, clip, lr=0.0, **options):
    """A Muon of {name: parameter}; vectors and fp64 with AdamW."""
    def is_matrix(p):
        return p.ndim > 1 and p.dtype != torch.float64

    groups = [{"params": [(n, p) for n, p in named.items() if is_matrix(p)]},
              {"params": [(n, p) for n, p in named.items() if not is_matrix(p)], "use_muon": False}]
    return package().Muon([g for g in groups if g["params"]], lr=lr, weight_decay=0.0, qk_clip=clip, **options)


def stepped(named, clip, maxima, **options):
    """The optimizer after one step with lr 0: nothing but QK-clip changes weights."""
    opt = muon(named, clip, **options)
    for p in named.values():
        p.grad = torch.ones_like(p)
    opt.step(qk_logits=maxima)
    return opt


def params(weights):
    return {name: nn.Parameter(w.clone()) for name, w in weights.items()}


MAXIMA = [5.0, 1.0, 2.0, 90.0]


# Formulas -------------------------------------------------------------------------------------------------------------

@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["keep", "shrink"])
@pytest.mark.parametrize("case", CASES)
def test_factors_are_those_of_the_formula(case, mode, dtype, optimizer):
    """In fp32, rounded once: half a unit of the last place, and what fp32 loses before."""
    weights = weights_of(case, dtype)
    named = params(weights)
    clip = optimizer.QKClip(TAU, {"layer": layer_of(case)}, shared_keys=mode)
    opt = stepped(named, clip, {"layer": torch.tensor(MAXIMA)})
    for name, expected in reference(case, weights, MAXIMA, mode).items():
        error = (named[name].double() - expected).abs() / expected.abs()
        rounding = 0 if dtype.itemsize > 2 else torch.finfo(dtype).eps / 2
        assert error.max() <= rounding * 1.001 + 4e-7, name
        untouched = expected == weights[name].double()
        assert torch.equal(named[name][untouched], weights[name][untouched])
    assert int(opt.qk_clip.clipped) == 2 and int(clip.nonfinite) == 0
    assert clip.maxima["layer"].tolist() == MAXIMA


@pytest.mark.parametrize("case", ["MHA", "GQA", "fused", "MLA"])
def test_weights_stored_as_in_out(case, optimizer):
    weights = weights_of(case)
    named = params({name: w.mT.contiguous() for name, w in weights.items()})
    layer = layer_of(case, transposed=list(weights))
    stepped(named, optimizer.QKClip(TAU, {"layer": layer}), {"layer": torch.tensor(MAXIMA)})
    for name, expected in reference(case, weights, MAXIMA).items():
        torch.testing.assert_close(named[name].mT.double(), expected, rtol=4e-7, atol=0)


def test_biases_are_scaled_with_their_rows(optimizer):
    weights = weights_of("GQA")
    biases = {f"{name}.bias": w[:, 0].clone() for name, w in weights.items()}
    named = params({**weights, **biases})
    layer = layer_of("GQA")
    layer["weights"] |= {f"{name}.bias": blocks for name, blocks in layer["weights"].items()}
    stepped(named, optimizer.QKClip(TAU, {"layer": layer}), {"layer": torch.tensor(MAXIMA)})
    for name in weights:
        assert torch.equal(named[f"{name}.bias"], named[name][:, 0])


def attention_logits(case, weights, x, k_rope):
    """fp64 (heads, tokens, tokens)."""
    x, heads = x.double(), {}
    for name, w in weights.items():
        views = CASES[case][2][name][2](w.double())
        heads |= {role: torch.einsum("hde,te->htd", one, x) for role, one in views.items()}
    keys = heads["k"].repeat_interleave(len(heads["q"]) // len(heads["k"]), 0)
    logits = heads["q"] @ keys.mT
    return logits + heads["q_rope"] @ (x @ k_rope).T if "q_rope" in heads else logits


@pytest.mark.parametrize("mode", ["keep", "shrink"])
@pytest.mark.parametrize("case", CASES)
def test_the_largest_logit_becomes_the_threshold(case, mode, optimizer):
    """Heads below it keep their logits, but for heads that share a key head with "shrink"."""
    torch.manual_seed(1)
    x, k_rope = torch.randn(9, E), torch.randn(E, ROPE, dtype=torch.float64)
    weights = weights_of(case, torch.float64, 3)
    first = attention_logits(case, weights, x, k_rope).amax((1, 2))
    tau = float(first.sort().values[1:3].mean())  # two heads above it
    named = params(weights)
    clip = optimizer.QKClip(tau, {"layer": layer_of(case)}, shared_keys=mode)
    stepped(named, clip, {"layer": first})
    then = attention_logits(case, {n: p.detach() for n, p in named.items()}, x, k_rope).amax((1, 2))
    above = first > tau
    assert int(clip.clipped) == int(above.sum()) == 2 and (then <= tau * (1 + 1e-6)).all()
    exact = CASES[case][0] == CASES[case][1] or mode == "keep"
    if exact:
        torch.testing.assert_close(then, first.clamp(max=tau), rtol=1e-6, atol=0)
    assert (then <= first * (1 + 1e-6)).all(), "no logit grows"


def test_the_step_comes_first_and_momentum_stays(optimizer):
    weights = weights_of("MHA")
    named, twins = params(weights), params(weights)
    clip = optimizer.QKClip(TAU, {"layer": layer_of("MHA")})
    opt, plain = muon(named, clip, lr=0.1), muon(twins, None, lr=0.1)
    for ps in (named, twins):
        for p in ps.values():
            p.grad = torch.arange(p.numel(), dtype=torch.float32).view_as(p).sin()
    opt.step(qk_logits={"layer": torch.tensor(MAXIMA)})
    plain.step()
    for name, expected in reference("MHA", {n: p.detach() for n, p in twins.items()}, MAXIMA).items():
        torch.testing.assert_close(named[name].double(), expected, rtol=4e-7, atol=0)
        assert torch.equal(opt.state[named[name]]["momentum_buffer"], plain.state[twins[name]]["momentum_buffer"])


def test_another_default_dtype_or_device_changes_no_bit(optimizer):
    """Also of maxima that are lists of numbers, which 16 bits do not hold."""
    results = []
    for dtype, device in ((torch.float32, "cpu"), (torch.float16, "cpu"), (torch.float64, "meta")):
        named = params(weights_of("MHA"))
        for p in named.values():
            p.grad = torch.ones_like(p)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                clip = optimizer.QKClip(TAU, {"layer": layer_of("MHA")})
                opt = muon(named, clip, lr=0.1)
                assert clip.clipped.item() == clip.nonfinite.item() == 0
                opt.step(qk_logits={"layer": [TAU * 1.2345678] * len(MAXIMA)})
                results.append([p.detach() for p in named.values()] + [clip.clipped, clip.maxima["layer"]])
        finally:
            torch.set_default_dtype(torch.float32)
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others))


# Maxima ---------------------------------------------------------------------------------------------------------------

def test_the_largest_of_several_records_counts_and_each_step_starts_anew(optimizer):
    named = params(weights_of("MHA"))
    clip = optimizer.QKClip(TAU, {"layer": layer_of("MHA")})
    opt = muon(named, clip)
    for p in named.values():
        p.grad = torch.ones_like(p)
    for values in ([5.0, -3.0, 1.0, 2.0], [1.0, -9.0, 4.0, 2.0]):
        clip.record("layer", torch.tensor(values, dtype=torch.bfloat16))
    opt.step(qk_logits={"layer": torch.tensor([0.0, -4.0, 0.0, 0.0])})
    assert clip.maxima["layer"].tolist() == [5.0, -3.0, 4.0, 2.0] and int(clip.clipped) == 2
    before = [p.detach().clone() for p in named.values()]
    opt.step()
    opt.step(qk_logits={"layer": None})
    assert clip.maxima["layer"].tolist() == [-INF] * 4 and int(clip.clipped) == 0
    assert same(before, named.values())


@pytest.mark.parametrize("broken", [float("nan"), INF])
def test_nan_and_inf_are_left_out_and_counted(broken, optimizer):
    weights = weights_of("MHA")
    named = params(weights)
    clip = optimizer.QKClip(TAU, {"layer": layer_of("MHA")})
    clip.record("layer", torch.tensor([broken, broken, 1.0, -INF]))
    stepped(named, clip, {"layer": torch.tensor([5.0, -INF, 1.0, 1.0])})
    assert int(clip.nonfinite) == 2 and int(clip.clipped) == 1
    assert clip.maxima["layer"].tolist() == [5.0, -INF, 1.0, 1.0]
    for name, expected in reference("MHA", weights, [5.0, 0.0, 0.0, 0.0]).items():
        torch.testing.assert_close(named[name].double(), expected, rtol=4e-7, atol=0)


def test_maxima_of_any_layers_in_any_order_and_dtype(optimizer):
    """Against lists of numbers; layers have different numbers of heads, and the sets of given layers are many."""
    sizes, draw = {"a": 4, "b": 2, "c": 8, "d": 1}, random.Random(0)
    layers = {name: {"heads": heads, "weights": {f"{name}.q": "q", f"{name}.k": "k"}} for name, heads in sizes.items()}
    named = {key: nn.Parameter(torch.ones(8, 4)) for layer in layers.values() for key in layer["weights"]}
    clip = optimizer.QKClip(2.0, layers)
    opt = muon(named, clip)
    for p in named.values():
        p.grad = torch.zeros_like(p)
    numbers = [-INF, INF, float("nan"), *range(-3, 7)]
    for _ in range(40):
        calls = []
        for _ in range(3):
            chosen = draw.sample(sorted(sizes), draw.randint(0, 4))
            calls.append({name: draw.choices(numbers, k=sizes[name]) for name in chosen})
        *recorded, given = [{name: values if draw.random() < 0.1 else
                             torch.tensor(values, dtype=draw.choice([torch.float32, torch.float64, BF16]))
                             for name, values in call.items()} for call in calls]
        for name, values in ((name, values) for call in recorded for name, values in call.items()):
            clip.record(name, values)
        opt.step(qk_logits=given)
        seen = {name: [[call[name][head] for call in calls if name in call] for head in range(heads)]
                for name, heads in sizes.items()}
        largest = {name: [max([x for x in values if abs(x) < INF], default=-INF) for values in heads]
                   for name, heads in seen.items()}
        assert {name: values.tolist() for name, values in clip.maxima.items()} == largest
        assert int(clip.clipped) == sum(x > 2.0 for values in largest.values() for x in values)
        broken = [any(x != x or x == INF for x in values) for heads in seen.values() for values in heads]
        assert int(clip.nonfinite) == sum(broken)


class Operators(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_the_number_of_operators_does_not_grow_with_the_layers(optimizer):
    """Each is a launch on a GPU, but for one `_foreach_mul_`, which scales the weights where Triton does not."""
    called = []
    for count in (2, 7):
        layers = {str(i): layer_of("GQA", f"{i}.") for i in range(count)}
        named = {name: p for i in range(count) for name, p in params(weights_of("GQA", prefix=f"{i}.")).items()}
        clip = optimizer.QKClip(TAU, layers, shared_keys="shrink")
        maxima = {str(i): torch.tensor(MAXIMA) for i in range(count)}
        opt = stepped(named, clip, maxima)
        (hook,) = (hook for hook in opt._preparation.bound.hooks if type(hook).__name__ == "HeadClipping")
        with torch.no_grad(), Operators() as operators:
            clip.take(maxima)
            hook.before_buckets(None)
            hook.after_buckets()
        assert int(clip.clipped) == 2 * count
        called.append(operators.names)
    assert called[0] == called[1] and len(called[0]) < 25
    assert called[0].count("aten._foreach_mul_.List") == 1


@pytest.mark.interpreter
def test_weights_scaled_by_triton_have_the_bits_of_torch(monkeypatch, device, optimizer):
    from tests.paths import take

    results = []
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        named = {f"{dtype}.{name}": p for dtype in (torch.float32, torch.float16, torch.float64)
                 for name, p in params(weights_of("GQA", dtype)).items()}
        named["bias"] = nn.Parameter(torch.arange(H * D, dtype=torch.float32))
        named = {name: nn.Parameter(p.detach().to(device)) for name, p in named.items()}
        layers = {str(dtype): layer_of("GQA", f"{dtype}.") for dtype in (torch.float32, torch.float16, torch.float64)}
        layers["torch.float32"]["weights"]["bias"] = "q"
        for p in named.values():
            p.grad = torch.zeros_like(p)
        opt = optimizer.Muon([{"params": [*named.items()], "use_muon": False}], lr=0.0, weight_decay=0.0,
                             qk_clip=optimizer.QKClip(TAU, layers, shared_keys="shrink"))
        for _ in range(2):
            opt.step(qk_logits=dict.fromkeys(layers, torch.tensor(MAXIMA, device=device)))
        (hook,) = (hook for hook in opt._preparation.bound.hooks if type(hook).__name__ == "HeadClipping")
        assert (len(hook.launches), len(hook.locals)) == ((0, 7) if path == "torch" else (1, 2))
        results.append(list(named.values()))
    assert same(*results)


def test_a_threshold_may_change_between_steps(optimizer):
    named = params(weights_of("MHA"))
    clip = optimizer.QKClip(100.0, {"layer": layer_of("MHA")})
    opt = stepped(named, clip, {"layer": torch.tensor(MAXIMA)})
    assert int(clip.clipped) == 0
    clip.threshold = 4
    opt.step(qk_logits={"layer": torch.tensor(MAXIMA)})
    assert int(clip.clipped) == 2


def test_a_step_that_raises_or_is_skipped_as_a_whole_clips_nothing(optimizer):
    weights = weights_of("MHA")
    named = params(weights)
    clip = optimizer.QKClip(TAU, {"layer": layer_of("MHA")})
    opt = muon(named, clip, nonfinite="raise")
    for p in named.values():
        p.grad = torch.full_like(p, float("nan"))
    with pytest.raises(RuntimeError, match="NaN or Inf in the gradient"):
        opt.step(qk_logits={"layer": torch.tensor(MAXIMA)})
    assert same(weights.values(), named.values()) and int(clip.clipped) == 0


def test_a_scaler_that_finds_inf_skips_the_scaling_too(optimizer):
    weights = weights_of("MHA")
    named = params(weights)
    opt = muon(named, optimizer.QKClip(TAU, {"layer": layer_of("MHA")}), unscale_in_step=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(sum(p.sum() for p in named.values()) * INF).backward()
    scaler.step(opt, qk_logits={"layer": torch.tensor(MAXIMA)})
    assert same(weights.values(), named.values()) and int(opt.qk_clip.clipped) == 0
    assert opt.qk_clip.maxima["layer"].tolist() == MAXIMA


def test_a_step_that_fails_before_it_begins_keeps_the_maxima(optimizer):
    named = params(weights_of("MHA"))
    clip = optimizer.QKClip(TAU, {"layer": layer_of("MHA")})
    opt = muon(named, clip)
    named["q"].grad = torch.ones(H * D, E).to_sparse()
    with pytest.raises(RuntimeError):
        opt.step(qk_logits={"layer": torch.tensor(MAXIMA)})
    for p in named.values():
        p.grad = torch.ones_like(p)
    opt.step()
    assert clip.maxima["layer"].tolist() == MAXIMA and int(clip.clipped) == 2


# Layouts --------------------------------------------------------------------------------------------------------------

LAYERS = {"a": "MHA", "b": "GQA", "c": "fused by group", "d": "MLA", "e": "fused"}
STEPS = 2


@functools.cache
def problem():
    """({name: weight}, [{name: gradient}] of each step, [{layer: maxima}] of each step)."""
    weights, generator = {}, torch.Generator().manual_seed(7)
    for number, (layer, case) in enumerate(LAYERS.items()):
        weights |= weights_of(case, torch.bfloat16 if layer == "b" else torch.float32, number, f"{layer}.")
    weights["other"] = torch.randn(10, 12, generator=generator)
    weights["a.q.bias"] = torch.randn(H * D, generator=generator)
    gradients = [{name: torch.randn(w.shape, generator=generator).to(w.dtype) for name, w in weights.items()}
                 for _ in range(STEPS)]
    return weights, gradients, [{layer: torch.rand(H, generator=generator) * 4 for layer in LAYERS} for _ in gradients]


def layers_of_problem():
    layers = {layer: layer_of(case, f"{layer}.") for layer, case in LAYERS.items()}
    layers["a"]["weights"]["a.q.bias"] = "q"
    return layers


@functools.cache
def of_one_process(mode, wire):
    """Called before there are ranks."""
    weights, gradients, maxima = problem()
    named = params(weights)
    clip = package().QKClip(TAU, layers_of_problem(), shared_keys=mode)
    opt, counts = muon(named, clip, lr=0.02, wire_dtype=wire), []
    for step, most in zip(gradients, maxima):
        for name, p in named.items():
            p.grad = step[name].clone()
        opt.step(qk_logits=most)
        counts.append(int(clip.clipped))
    return {name: p.detach() for name, p in named.items()}, counts


def placed(full, mesh, placements):
    from tests.test_bucket_updates import cut

    placements = [type(p)(0) if p.is_shard() and p.dim >= full.ndim else p for p in placements]
    return cut(full, mesh, placements)


def layouts():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    R, S = Replicate(), Shard
    return {
        "fsdp rows": ((4,), ["dp"], [S(0)], {}),
        "fsdp columns": ((4,), ["dp"], [S(1)], {}),
        "hsdp": ((2, 2), ["replicas", "dp"], [R, S(0)], {}),
        "tp": ((4,), ["tp"], [S(0)], {"local": "tp"}),
        "tp x fsdp, strided": ((2, 2), ["dp", "tp"], [_StridedShard(0, split_factor=2), S(0)], {"local": "tp"}),
        "tp x fsdp, all heads": ((2, 2), ["dp", "tp"], [_StridedShard(0, split_factor=2), S(0)], {}),
        "tp x fsdp columns": ((2, 2), ["dp", "tp"], [S(1), S(0)], {"local": "tp", "heads_dim": "tp"}),
    }


def on_ranks(rank, world, layout, mode, options):
    """Whether this rank has the bits of one process, and the counts. Ranks see logits of batches of their own."""
    from torch.distributed.tensor import init_device_mesh

    weights, gradients, maxima = problem()
    local_of, how, settings = part("params.dtensor").local_of, {}, dict(options)
    if layout == "ddp":
        mesh, settings["process_group"] = None, dist.group.WORLD

        def place(full):
            return full.clone()
    elif layout == "ddp, alone":
        mesh, how["process_group"] = None, dist.group.WORLD

        def place(full):
            return full.clone()
    else:
        shape, names, placements, extra = layouts()[layout]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(names))
        how = {key: extra[key] for key in extra if key == "heads_dim"}

        def place(full):
            return placed(full, mesh, placements)
    named = {name: nn.Parameter(place(w)) for name, w in weights.items()}
    clip = package().QKClip(TAU, layers_of_problem(), shared_keys=mode, **how)
    opt, counts = muon(named, clip, lr=0.02, **settings), []
    for number, (step, most) in enumerate(zip(gradients, maxima)):
        for name, p in named.items():
            p.grad = place(step[name])
        opt.step(qk_logits=given(rank, world, number, most, mesh, layout))
        counts.append(int(clip.clipped))
    one, _ = of_one_process(mode, settings.get("wire_dtype", BF16))
    wholes = {name: one[name] if mesh is None else local_of(place(one[name])) for name in named}
    return all(torch.equal(local_of(p.detach()), wholes[name]) for name, p in named.items()), counts


def given(rank, world, number, most, mesh, layout):
    """The maxima that a rank gives: each true maximum is seen by one rank alone, and some layers not at all."""
    local = mesh is not None and "local" in layouts()[layout][3]
    found = {}
    for i, (layer, values) in enumerate(most.items()):
        seen = values.clone()
        if local:
            seen = seen.chunk(mesh.size(mesh.mesh_dim_names.index("tp")))[mesh.get_local_rank("tp")].clone()
            if mesh.ndim > 1 and mesh.get_local_rank("dp") != number % 2:
                seen -= 1.0
        else:
            keeps = [(i + number + head) % world == rank for head in range(len(seen))]
            seen = seen.where(torch.tensor(keeps), seen - 1.0)
            if not any(keeps) or rank == 3 and i == 0 and 3 not in [(number + h) % world for h in range(H)]:
                continue
        found[layer] = seen
    return found if found else None


@pytest.mark.parametrize("mode", ["keep", "shrink"])
@pytest.mark.parametrize("layout", ["fsdp rows", "fsdp columns", "hsdp", "tp", "tp x fsdp, strided",
                                    "tp x fsdp, all heads", "tp x fsdp columns", "ddp", "ddp, alone"])
def test_every_layout_has_the_bits_of_one_process(layout, mode, optimizer):
    _, counts = of_one_process(mode, BF16)
    assert min(counts) > 3
    assert run_threads(4, on_ranks, layout, mode, {}) == [(True, counts)] * 4


@pytest.mark.parametrize("options", [{"overlap_backward": True}, {"overlap_forward": True}, {"nonfinite": "skip"},
                                     {"workspace_bytes": 64_000}], ids=str)
def test_options_of_the_optimizer_leave_the_bits(options, optimizer):
    _, counts = of_one_process("keep", BF16)
    assert run_threads(4, on_ranks, "fsdp rows", "keep", options) == [(True, counts)] * 4


@pytest.mark.parametrize("options", [
    {"shard_state": True}, {"grads_are_reduced": False, "wire_dtype": torch.float32}], ids=str)
def test_owners_of_state_leave_the_bits(options, optimizer):
    _, counts = of_one_process("keep", options.get("wire_dtype", BF16))
    assert run_threads(4, on_ranks, "ddp", "keep", options) == [(True, counts)] * 4


def silent_rank(rank, world, lacking, options):
    """Rank 1 gives nothing, ranks `lacking` have no gradient of q, and take part all the same."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh, weights = init_device_mesh("cpu", (world,)), weights_of("MHA")
    named = {name: nn.Parameter(placed(w, mesh, [Shard(0)])) for name, w in weights.items()}
    clip = package().QKClip(TAU, {"layer": layer_of("MHA")})
    opt = muon(named, clip, **options)
    for name, p in named.items():
        p.grad = None if rank in lacking and name == "q" else torch.ones_like(p)
    opt.step(qk_logits=None if rank == 1 else {"layer": torch.tensor(MAXIMA)})
    expected = reference("MHA", weights, MAXIMA)
    if len(lacking) == world:
        expected["q"] = weights["q"].double()
    return [float((p.detach().full_tensor().double() - expected[n]).abs().max()) < 1e-5 for n, p in named.items()]


@pytest.mark.parametrize("options", [{}, {"overlap_forward": True}], ids=str)
@pytest.mark.parametrize("lacking", [(1,), (0, 1, 2)])
def test_a_rank_without_maxima_or_gradients_takes_part(lacking, options, optimizer):
    """Where no rank has a gradient, the weight stays as it is, as in one process, which does not step it."""
    assert run_threads(3, silent_rank, lacking, options) == [[True, True]] * 3


def interleaved(rank, world, w, layer, expected):
    """q, k and v of a fused weight, each sharded over the ranks: torch's form is a lone _StridedShard."""
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, placements = init_device_mesh("cpu", (world,)), [_StridedShard(0, split_factor=3)]
    w, expected = (full.unflatten(0, (3, -1)).chunk(world, 1)[rank].flatten(0, 1) for full in (w, expected))
    p = nn.Parameter(part("params.dtensor").as_dtensor(w.clone(), (3 * H * D, E), mesh, placements))
    clip = package().QKClip(TAU, {"layer": layer})
    opt = muon({"qkv": p}, clip)
    p.grad = torch.zeros_like(p)
    opt.step(qk_logits={"layer": torch.tensor(MAXIMA).chunk(world)[rank]})
    return torch.equal(part("params.dtensor").local_of(p), expected), int(clip.clipped)


def without_gradient(rank, world, sharded, overlap_forward):
    """The queries have no gradient on any rank, and a logit above the threshold: the weights after a step."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    def place(full):
        return distribute_tensor(full, init_device_mesh("cpu", (world,)), [Shard(0)]) if sharded else full

    weights = weights_of("MHA")
    named = {name: nn.Parameter(place(w.clone())) for name, w in weights.items()}
    shared = {"process_group": dist.group.WORLD} if world > 1 and not sharded else {}
    shared["overlap_forward"] = overlap_forward
    opt = muon(named, package().QKClip(TAU, {"layer": layer_of("MHA")}), lr=0.1, **shared)
    named["k"].grad = place(torch.ones_like(weights["k"]))
    opt.step(qk_logits={"layer": torch.tensor(MAXIMA)})
    return {name: (p.full_tensor() if sharded else p).detach() for name, p in named.items()}


@pytest.mark.parametrize("overlap_forward", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_weights_without_any_gradient_are_not_scaled(sharded, overlap_forward, optimizer):
    alone = without_gradient(0, 1, False, False)
    assert torch.equal(alone["q"], weights_of("MHA")["q"])
    for found in run_threads(2, without_gradient, sharded, overlap_forward):
        assert all(torch.equal(found[name], weight) for name, weight in alone.items())


def test_interleaved_rows_of_tensor_parallelism(optimizer):
    w = torch.randn(3 * H * D, E, generator=torch.Generator().manual_seed(0))
    layer = {"heads": H, "weights": {"qkv": rows([H * D] * 3, ["q", "k", "v"])}}
    one = nn.Parameter(w.clone())
    stepped({"qkv": one}, optimizer.QKClip(TAU, {"layer": layer}), {"layer": torch.tensor(MAXIMA)})
    assert run_threads(2, interleaved, w, layer, one.detach()) == [(True, 2)] * 2


def ambiguous(rank, world):
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2))
    named = {name: nn.Parameter(placed(w, mesh, [Shard(0), Shard(0)])) for name, w in weights_of("MHA").items()}
    with pytest.raises(ValueError, match="2 mesh dims shard its queries into 2 parts.*heads_dim"):
        stepped(named, package().QKClip(TAU, {"layer": layer_of("MHA")}), {"layer": torch.ones(2)})
    return True


def test_maxima_of_unknown_heads_are_refused(optimizer):
    """And do not stay: the next step takes those of all heads."""
    assert run_threads(4, ambiguous) == [True] * 4
    named = params(weights_of("MHA"))
    opt = muon(named, optimizer.QKClip(TAU, {"layer": layer_of("MHA")}))
    for p in named.values():
        p.grad = torch.zeros_like(p)
    with pytest.raises(ValueError, match="0 mesh dims shard its queries into 2 parts"):
        opt.step(qk_logits={"layer": torch.full((H // 2,), 1e3)})
    opt.step(qk_logits={"layer": torch.full((H,), TAU / 2)})
    assert int(opt.qk_clip.clipped) == 0 and opt.qk_clip.maxima["layer"].tolist() == [TAU / 2] * H


def copies_alone(rank, world):
    named = params(weights_of("MHA"))
    with pytest.raises(ValueError, match="layer layer of qk_clip has parameters that each process steps alone"):
        stepped(named, package().QKClip(TAU, {"layer": layer_of("MHA")}), None)
    return True


def test_copies_without_a_process_group_are_refused(optimizer):
    assert run_threads(2, copies_alone) == [True] * 2


def in_groups(way):
    """(process_group of the parameter group, of the optimizer, ranks that share the layer)."""
    rank, everyone = dist.get_rank(), dist.group.WORLD
    if way == "pairs":
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        return pairs[rank // 2], everyone, [(0, 1), (2, 3)][rank // 2]
    if way == "none":
        return None, everyone, (rank,)
    return everyone, None, (0, 1, 2, 3)


def own_group(rank, world, way, beside, options):
    """A layer in a parameter group with a process group of its own; `beside`: another with the optimizer's."""
    key, whole, ranks = in_groups(way)
    case, case_beside = ("MHA", "GQA")[ranks[0] // 2], "MLA"
    named = params(weights_of(case, prefix="a."))
    named_beside = params(weights_of(case_beside, prefix="b.")) if beside else {}
    layers = {f"a{ranks}": layer_of(case, "a."), **({"b": layer_of(case_beside, "b.")} if beside else {})}
    clip = package().QKClip(TAU, layers)
    groups = [{"params": [*named.items()], "process_group": key}, {"params": [*named_beside.items()]}]
    opt = package().Muon([g for g in groups if g["params"]], lr=0.0, weight_decay=0.0, qk_clip=clip,
                         process_group=whole, **options)
    for p in (*named.values(), *named_beside.values()):
        p.grad = torch.ones_like(p)
    heads = torch.arange(H, dtype=torch.float32)
    maxima = {name: heads * (rank + 1 + (name == "b")) for name in layers}
    opt.step(qk_logits=maxima)
    made = [("a.", case, ranks[-1] + 1), *([("b.", case_beside, world + 1)] if beside else [])]
    expected = {f"{prefix}{name}": w for prefix, case, most in made
                for name, w in reference(case, weights_of(case), (heads * most).tolist()).items()}
    return [float((p.detach().double() - expected[n]).abs().max()) < 1e-5 for n, p in (named | named_beside).items()]


@pytest.mark.parametrize("way, beside, options", [
    ("pairs", False, {}), ("pairs", True, {}), ("pairs", True, {"overlap_forward": True}), ("none", False, {}),
    ("none", True, {}), ("world", False, {})], ids=str)
def test_a_group_with_a_process_group_of_its_own_is_scaled_by_the_maxima_of_its_ranks(way, beside, options, optimizer):
    assert all(all(found) for found in run_ranks(4, own_group, way, beside, options))


def divided(rank, world):
    named = params(weights_of("MHA"))
    q, k = ([(name, named[name])] for name in "qk")
    opt = package().Muon([{"params": q, "process_group": None}, {"params": k}], process_group=dist.group.WORLD,
                         qk_clip=package().QKClip(TAU, {"layer": layer_of("MHA")}))
    for p in named.values():
        p.grad = torch.ones_like(p)
    with pytest.raises(NotImplementedError, match="layer layer of qk_clip .* one process_group"):
        opt.step()
    return True


def test_a_layer_on_unlike_process_groups_is_refused(optimizer):
    assert run_threads(2, divided) == [True] * 2


def unlike(rank, world, thresholds, modes):
    named = params(weights_of("GQA"))
    clip = package().QKClip(thresholds[rank], {"layer": layer_of("GQA")}, shared_keys=modes[rank])
    with pytest.raises(RuntimeError, match="qk_clip"):
        stepped(named, clip, None, process_group=dist.group.WORLD)
    return True


@pytest.mark.parametrize("thresholds, modes", [((1.0, 2.0), ("keep", "keep")), ((1.0, 1.0), ("keep", "shrink"))])
def test_ranks_with_unlike_settings_are_refused(thresholds, modes, optimizer):
    assert run_threads(2, unlike, thresholds, modes) == [True] * 2


# Overlap with forward -------------------------------------------------------------------------------------------------

class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = (Seen(E, rows_, bias=False) for rows_ in (H * D, KV * D, E))

    def forward(self, x):
        self.q(x), self.k(x)
        return self.out(x)


@pytest.mark.parametrize("missing", [False, True])
def test_readers_wait_for_clipped_weights(missing, monkeypatch, optimizer):
    machine = install(monkeypatch)
    scale = part("qk_clip.hook").HeadClipping._scale

    def then(self, indices):
        scale(self, indices)
        for i in indices:
            machine.write(self.weights[i].store.params[self.weights[i].number])

    monkeypatch.setattr(part("qk_clip.hook").HeadClipping, "_scale", then)
    torch.manual_seed(0)
    model = nn.Sequential(*(Reads() for _ in range(4)))
    twin = copy.deepcopy(model)
    layers = {str(i): {"heads": H, "kv_heads": KV, "weights": {f"{i}.q.weight": "q", f"{i}.k.weight": "k"}}
              for i in range(4)}

    def optimizer_of(m, **options):
        return muon(dict(m.named_parameters()), package().QKClip(TAU, layers, shared_keys="shrink"), lr=0.02, **options)

    late, plain = optimizer_of(model, overlap_forward=True, workspace_bytes=22_000), optimizer_of(twin)
    late.updates_return_during(model)
    for m, opt in ((twin, plain), (model, late)):
        Seen.machine = machine if m is model else None
        for step in range(3):
            m(torch.ones(2, E))
            for number, p in enumerate(m.parameters()):
                p.grad = None if missing and number == 4 else torch.full_like(p, 0.1).add_(p.detach() * 0.3)
            opt.step(qk_logits={str(i): torch.arange(H) + step + i for i in range(4)})
    try:
        assert machine.wrong == [] and same(model.parameters(), twin.parameters())
        marks = late._forward_overlap
        first = marks.last_event_of(frozenset(id(p) for p in model[3].parameters()))
        assert 0 <= first and len(marks.events) > 3
    finally:
        Seen.machine = None


# Recording ------------------------------------------------------------------------------------------------------------

def dense(q, k, mask, causal, scale):
    """fp64 maxima of logits written out."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -INF)
    if mask is not None:
        keep = mask if mask.dtype == torch.bool else mask > -1000
        logits = logits.masked_fill(~keep, -INF)
    return logits.flatten(0, -4).amax((0, -2, -1))


MASKS = {
    "none": lambda: None,
    "keys": lambda: torch.rand(2, 1, 1, 9) > 0.3,
    "all": lambda: torch.rand(2, 4, 7, 9) > 0.3,
    "numbers": lambda: torch.where(torch.rand(7, 9) > 0.3, 0.0, torch.finfo(torch.float32).min),
    "-1e9": lambda: torch.where(torch.rand(7, 9) > 0.3, 0.0, -1e9),
    "-1e4, half": lambda: torch.where(torch.rand(7, 9) > 0.3, 0.0, -1e4).half(),
    "-1e3": lambda: torch.where(torch.rand(7, 9) > 0.3, -999.0, -1000.0),
    "nothing seen": lambda: torch.zeros(7, 9, dtype=torch.bool),
}


@pytest.mark.parametrize("chunk", [1, 150, 1 << 20])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal, scale, kv", [(False, None, 4), (True, None, 2), (True, 0.3, 1), (False, 2.0, 2)])
def test_max_logits(mask, causal, scale, kv, chunk, part, monkeypatch):
    module = part("qk_clip.logits")
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    q, k, mask = torch.randn(2, 4, 7, 5, requires_grad=True), torch.randn(2, kv, 9, 5), MASKS[mask]()
    found = module.max_logits(q, k, mask, causal, scale)
    assert found.dtype == torch.float32 and not found.requires_grad
    torch.testing.assert_close(found.double(), dense(q.detach(), k, mask, causal, scale), rtol=1e-5, atol=0)


class Attention(nn.Module):
    """As in transformers: q_proj, k_proj, v_proj, o_proj, and a config's numbers as attributes."""

    def __init__(self, kv_heads=KV):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = H, kv_heads, D
        self.q_proj = nn.Linear(E, H * D)
        self.k_proj, self.v_proj = nn.Linear(E, kv_heads * D), nn.Linear(E, kv_heads * D, bias=False)
        self.o_proj = nn.Linear(H * D, E, bias=False)
        self.seen = None

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, D)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        self.seen = q.detach(), k.detach()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o_proj(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, E), nn.Linear(E, 11)
        self.layers = nn.ModuleList(nn.ModuleDict({"attention": Attention()}) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer["attention"], x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_training_loop_with_recording_holds_logits_at_the_threshold(wrapped, optimizer):
    torch.manual_seed(0)
    model = Model()
    outer = nn.parallel.DataParallel(model) if wrapped else model  # the prefix "module."
    clip = optimizer.QKClip.of(outer, 0.2)
    opt = optimizer.Muon(optimizer.get_default_muon_param_groups(outer), lr=0.0, weight_decay=0.0, qk_clip=clip)
    tokens, counts = torch.randint(0, 11, (2, 8)), []
    for _ in range(4):
        with clip.recording(outer):
            loss = outer(tokens).square().mean()
            loss.backward()
        opt.step()
        opt.zero_grad()
        counts.append(int(clip.clipped))
    assert counts[0] == 2 * H and counts[-1] == 0
    for i, layer in enumerate(model.layers):
        q, k = layer["attention"].seen
        expected = dense(q, k, None, True, None).float()
        torch.testing.assert_close(clip.maxima[f"layers.{i}.attention"], expected, rtol=1e-5, atol=0)
    assert max(float(m.max()) for m in clip.maxima.values()) <= 0.2 * (1 + 1e-5)
    model(tokens)
    assert clip._recorded[torch.device("cpu")].values[0].tolist() == [-INF] * 2 * H, "nothing is recorded outside"


def batches_of(rank, count):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 11, (2, 8), generator=generator) for _ in range(count)]


def trained(rank, world, overlap, expected):
    """FSDP2 with batches of each rank: whether this rank has the weights of one process that saw all batches."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, mesh = Model(), init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer["attention"], mesh=mesh)
    fully_shard(model, mesh=mesh)
    clip = package().QKClip.of(model, 0.2)
    opt = package().Muon(package().get_default_muon_param_groups(model), lr=0.0, weight_decay=0.0, qk_clip=clip,
                         **{overlap: True for overlap in overlap})
    if "overlap_forward" in overlap:
        opt.updates_return_during(model)
    for tokens in batches_of(rank, 3):
        with clip.recording(model):
            loss = model(tokens).square().mean()
            with opt.last_backward():
                loss.backward()
        opt.step()
        opt.zero_grad()
    opt.wait()
    found = {name: p.full_tensor() for name, p in model.named_parameters()}
    return all(torch.equal(found[name], w) for name, w in expected.items()), int(opt.qk_clip.clipped)


@pytest.mark.parametrize("overlap", [(), ("overlap_backward",), ("overlap_forward",),
                                     ("overlap_backward", "overlap_forward")], ids=str)
def test_ranks_with_fsdp2_scale_by_the_batches_of_all(overlap, optimizer):
    world = 2
    torch.manual_seed(0)
    model = Model()
    clip = optimizer.QKClip.of(model, 0.2)
    opt = optimizer.Muon(optimizer.get_default_muon_param_groups(model), lr=0.0, weight_decay=0.0, qk_clip=clip)
    counts = []
    for step in zip(*(batches_of(rank, 3) for rank in range(world))):
        with clip.recording(model):
            for tokens in step:
                model(tokens).square().mean().backward()
        opt.step()
        opt.zero_grad()
        counts.append(int(clip.clipped))
    assert counts[0] == 2 * H and counts[-1] > 0
    expected = {name: p.detach() for name, p in model.named_parameters()}
    assert run_ranks(world, trained, overlap, expected) == [(True, counts[-1])] * world


def stages(rank, world):
    """Two stages of a pipeline: a mesh and a layer for each; and logits that the other stage must not see."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    layer = "ab"[rank // 2]
    weights = weights_of("MHA", prefix=f"{layer}.")
    named = {name: nn.Parameter(placed(w, mesh, [Shard(0)])) for name, w in weights.items()}
    clip = package().QKClip(TAU, {layer: layer_of("MHA", f"{layer}.")})
    stepped(named, clip, {layer: torch.tensor([1.0 + rank, 0.0, 0.0, 0.0])})
    return clip.maxima[layer].tolist()[0], int(clip.clipped)


def test_stages_of_a_pipeline_have_layers_of_their_own(optimizer):
    assert run_threads(4, stages) == [(2.0, 0), (2.0, 0), (4.0, 1), (4.0, 1)]


class Silent(Attention):
    def forward(self, x):
        return super().forward(x) if self.seen is None else x


def test_layers_that_cannot_be_recorded_are_told(optimizer):
    model = nn.ModuleDict({"a": Attention(), "b": Silent()})
    clip = optimizer.QKClip.of(model)
    model["b"].seen = ()

    def run():
        with clip.recording(model):
            model["b"](model["a"](torch.randn(1, 3, E)))

    with pytest.warns(UserWarning, match="1 of 2 layers, the first b, called no scaled_dot_product_attention"):
        run()
    model["b"].seen = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
    model["a"] = torch.compile(model["a"], backend="eager")
    with pytest.warns(UserWarning, match="layers, the first"):
        run()


@pytest.mark.gpu
def test_flex_attention_gives_the_same_maxima(part, optimizer):
    """torch 2.10 on: `record` takes the auxiliary output of FlexAttention, of scores that a `score_mod` changed."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    if not hasattr(flex, "AuxRequest"):
        pytest.skip("this torch has no AuxRequest")
    q, k, v = (torch.randn(2, heads, 128, 16, device="cuda") for heads in (H, KV, KV))
    _, aux = flex.flex_attention(q, k, v, enable_gqa=True, return_aux=flex.AuxRequest(max_scores=True))
    found = part("qk_clip.logits").max_logits(q, k)
    torch.testing.assert_close(aux.max_scores.amax((0, 2)).float(), found, rtol=1e-4, atol=0)

    model = nn.ModuleDict({"a": Attention()}).cuda()
    threshold = 1.5 * float(found.sort().values[:2].mean())
    clip = optimizer.QKClip.of(model, threshold=threshold)
    groups = optimizer.get_default_muon_param_groups(model)
    muon = optimizer.Muon(groups, lr=0.0, weight_decay=0.0, qk_clip=clip)
    _, aux = flex.flex_attention(q, k, v, score_mod=lambda score, *_: score * 1.5, enable_gqa=True,
                                 return_aux=flex.AuxRequest(max_scores=True))
    clip.record("a", aux.max_scores.amax((0, 2)))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    muon.step()
    assert int(clip.clipped) == int((1.5 * found > threshold).sum()) == H - 1


# Layers of models -----------------------------------------------------------------------------------------------------

ROLES = {"CodeGen": ["q", "v", "k"]}
REFUSED = {"torchvision": "module layers.0.attn .*: the number of its heads is unknown",
           "MiniMax": "no attention whose queries and keys are known"}  # linear attention


@pytest.mark.parametrize("name", ATTENTION)
def test_roles_of_fused_weights(name, part, optimizer):
    module, split = copy.deepcopy(ATTENTION[name])
    find = part("qk_clip.models").find_layers
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            find(within(attn=module))
        return
    (layer,) = find(within(attn=module)).values()
    (weight,) = (parts for key, parts in layer["weights"].items() if not key.endswith("bias"))
    sizes = weight.get("rows") or weight.get("columns")
    assert weight["roles"] == ROLES.get(name, ["q", "k", "v"])
    if isinstance(split, dict) and "heads" not in split:
        assert sizes == (split.get("rows") or split.get("columns"))
        assert weight.get("repeat", 1) == split.get("repeat", 1)
    assert set(part("qk_clip.layers").parse_layer(layer).weights) == set(layer["weights"])


def test_layers_of_latent_attention(part, optimizer):
    numbers = {"kv_lora_rank": 8, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V, "num_heads": H}
    module = kind("DeepseekV3Attention", q_a_proj=linear(8, E), q_b_proj=linear(H * (NOPE + ROPE), 8),
                  q_a_layernorm=nn.LayerNorm(8), kv_a_proj_with_mqa=linear(8 + ROPE, E),
                  kv_a_layernorm=nn.LayerNorm(8), kv_b_proj=linear(H * (NOPE + V), 8),
                  o_proj=linear(E, H * V), **numbers)
    (layer,) = part("qk_clip.models").find_layers(within(attn=module)).values()
    assert layer == {"heads": H, "weights": {
        "layers.0.attn.q_b_proj.weight": {"rows": [NOPE, ROPE], "repeat": H, "roles": ["q", "q_rope"]},
        "layers.0.attn.kv_b_proj.weight": {"rows": [NOPE, V], "repeat": H, "roles": ["k", "v"]}}}


def test_layers_of_separate_projections(optimizer):
    clip = optimizer.QKClip.of(Model(), exclude="layers.1")
    ((name, layer),) = clip.layers.items()
    assert name == "layers.0.attention" and (layer.heads, layer.kv_heads) == (H, KV)
    assert {key.removeprefix(f"{name}."): parts.roles for key, parts in layer.weights.items()} == {
        "q_proj.weight": ("q",), "q_proj.bias": ("q",), "k_proj.weight": ("k",), "k_proj.bias": ("k",)}


def with_norm():
    module = Attention()
    module.q_norm, module.k_norm = nn.LayerNorm(D), nn.LayerNorm(D)
    return module


def test_models_that_cannot_be_clipped_are_refused(optimizer):
    unknown = attention("StrangeAttention", "qkv", 3 * E)  # no rule for the class
    for model, said in ((within(attn=with_norm()), "module layers.0.attn .*a norm .q_norm, k_norm. between"),
                        (within(attn=unknown), "module layers.0.attn .*StrangeAttention.: its qkv of shape .36, 24. "
                                               "looks like fused queries, keys and values of an unknown order"),
                        (nn.Sequential(nn.Linear(3, 3)), "no attention whose queries and keys are known")):
        with pytest.raises(ValueError, match=said):
            optimizer.QKClip.of(model)
    module = kind("Half", q_proj=linear(E, E), num_heads=H, kv_lora_rank=3, qk_nope_head_dim=2, qk_rope_head_dim=1)
    with pytest.raises(ValueError, match="module layers.0.attn"):
        optimizer.QKClip.of(within(attn=module))


def test_attention_with_unknown_names_is_told(optimizer):
    """By name: in an error where no layer is known, else in a warning that `exclude` turns off."""
    def strange():
        return kind("StrangeAttention", project_q=linear(E, E), project_k=linear(E, E), num_heads=H)

    def model():
        outer = kind("OuterAttention", inner=strange(), norm=nn.LayerNorm(E))
        layers = [Attention(), outer, strange(), kind("PooledAttention", one=linear(E, E)),
                  kind("GatedDeltaAttention", q=linear(E, E), k=linear(E, E), num_heads=H),
                  kind("FastLinearAttention", project_q=linear(E, E), project_k=linear(E, E))]
        return nn.ModuleList([*layers, layers[0]])  # a module that is used twice

    with pytest.raises(ValueError, match="1 modules, the first module layers.0.attn .model.Strange.*, look like"):
        optimizer.QKClip.of(within(attn=strange()))
    with pytest.warns(UserWarning, match="^2 modules, the first module 1.inner .* are unknown: QK-clip will not scale"):
        assert [*optimizer.QKClip.of(model()).layers] == ["0"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.QKClip.of(model(), exclude=["1", "2"])


# Bad input ------------------------------------------------------------------------------------------------------------

GOOD = {"heads": 4, "weights": {"q": "q", "k": "k"}}
BAD = {
    "no layers": ({}, "layers must be a dict"),
    "a list": ([GOOD], "layers must be a dict"),
    "no dict": ({"l": 3}, "layer l: a layer must be a dict"),
    "key": ({"l": {**GOOD, "head": 3}}, "layer l: a layer has the unknown key 'head'"),
    "heads": ({"l": {**GOOD, "heads": 0}}, "layer l: heads=0 must be a positive integer"),
    "no heads": ({"l": {"weights": GOOD["weights"]}}, "layer l: heads=None"),
    "kv_heads": ({"l": {**GOOD, "kv_heads": 3}}, "layer l: kv_heads=3 does not divide heads=4"),
    "weights": ({"l": {**GOOD, "weights": ["q", "k"]}}, "layer l: weights must be a dict"),
    "role": ({"l": {**GOOD, "weights": {"q": "query"}}}, "layer l: parameter q: the role 'query' is unknown"),
    "no keys": ({"l": {**GOOD, "weights": {"q": "q"}}}, "both queries .q. and keys .k. are needed"),
    "roles": ({"l": {**GOOD, "weights": {"q": rows([3, 3], ["q"])}}}, "parameter q: 2 blocks need as many roles"),
    "sizes": ({"l": {**GOOD, "weights": {"q": rows([0], ["q"])}}}, "rows=.0. must be positive integers"),
    "no sizes": ({"l": {**GOOD, "weights": {"q": {"roles": ["q"]}}}}, "blocks need either rows or columns"),
    "repeat": ({"l": {**GOOD, "weights": {"q": {**rows([3], ["q"]), "repeat": 0}}}}, "repeat=0"),
    "text": ({"l": {**GOOD, "weights": {"q": {"rows": "3", "roles": ["q"]}}}}, "rows must be a list"),
}


@pytest.mark.parametrize("name", BAD)
def test_layers_are_checked_by_name(name, optimizer):
    layers, said = BAD[name]
    with pytest.raises((ValueError, TypeError), match=said):
        optimizer.QKClip(1.0, layers)


@pytest.mark.parametrize("threshold", [0, -1.0, INF, float("nan"), True, "100", None])
def test_thresholds_are_checked(threshold, optimizer):
    with pytest.raises(ValueError, match="threshold"):
        optimizer.QKClip(threshold, {"l": GOOD})
    clip = optimizer.QKClip(1.0, {"l": GOOD})
    with pytest.raises(ValueError, match="threshold"):
        clip.threshold = threshold
    assert clip.threshold == 1.0


@pytest.mark.parametrize("options", [{"shared_keys": "queries"}, {"heads_dim": 1}, {"process_group": 3}], ids=str)
def test_options_are_checked(options, optimizer):
    with pytest.raises(ValueError, match=next(iter(options))):
        optimizer.QKClip(1.0, {"l": GOOD}, **options)


def test_parameters_are_checked_at_construction(optimizer):
    named = params(weights_of("MHA"))
    def refused(said, layer, ps=named, error=ValueError):
        with pytest.raises(error, match=said):
            muon(ps, optimizer.QKClip(1.0, {"l": layer}))

    refused("layer l: parameter p is not among the names", {"heads": 4, "weights": {"p": "q", "k": "k"}})
    refused("layer l: parameter q of shape .24, 12.: 5 heads do not divide its 24 rows of the role 'q'",
            {**GOOD, "heads": 5})
    refused("parameter q of shape .24, 12.: 1 times .7. makes 7 rows, not 24",
            {**GOOD, "weights": {"q": rows([7], ["q"]), "k": "k"}})
    refused("must be a matrix", GOOD, {**named, "k": nn.Parameter(torch.randn(2, 24, 12))})
    with pytest.raises(ValueError, match="^layer m: parameter q is in layer l, too: describe both by one layer"):
        muon(named, optimizer.QKClip(1.0, {"l": GOOD, "m": GOOD}))
    with pytest.raises(ValueError, match="is not among the names of the optimizer"):
        optimizer.Muon(list(named.values()), qk_clip=optimizer.QKClip(1.0, {"l": GOOD}))
    with pytest.raises(TypeError, match="qk_clip must be a QKClip"):
        muon(named, {"threshold": 1.0})
    clip = optimizer.QKClip(1.0, {"l": GOOD})
    muon(named, clip)
    with pytest.raises(RuntimeError, match="another optimizer"):
        muon(named, clip)
    with pytest.raises(ValueError, match="qk_logits needs an optimizer with qk_clip"):
        stepped(params(weights_of("MHA")), None, {"l": torch.ones(4)})


def with_zero_gradients(optimizer):
    """An optimizer with QK-clip of a layer."""
    ps = params(weights_of("MHA"))
    for p in ps.values():
        p.grad = torch.zeros_like(p)
    return muon(ps, optimizer.QKClip(1.0, {"l": GOOD}))


def test_an_optimizer_without_any_logits_warns_once(optimizer):
    opt = with_zero_gradients(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()  # as get_optimizer_state_dict does
    with pytest.warns(UserWarning, match="qk_clip has no attention logits on this rank.*recording") as told:
        opt.step()
        opt.step()
    assert len(told) == 1


def test_an_optimizer_with_logits_before_some_steps_does_not_warn(optimizer):
    opt = with_zero_gradients(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(4):
            opt.step(qk_logits={"l": torch.ones(4)} if number == 1 else None)


def test_maxima_are_checked(optimizer):
    clip = optimizer.QKClip(1.0, {"l": GOOD})
    for layer, values, said in (("m", torch.ones(4), "there is no layer 'm'; there are l"),
                                ("l", torch.ones(3), "shape .3,., not .4,."), ("l", torch.ones(8), "shape .8,."),
                                ("l", torch.ones(2, 4), "shape .2, 4."), ("l", torch.ones(()), "shape")):
        with pytest.raises(ValueError, match=said):
            clip.record(layer, values)
    clip.record("l", torch.ones(4))
    with pytest.raises(ValueError, match="had 4 heads before, and now 2"):
        clip.record("l", torch.ones(2))
    with pytest.raises(TypeError, match="qk_logits must be a dict"):
        muon(params(weights_of("MHA")), clip).step(qk_logits=torch.ones(4))
    with pytest.raises(ValueError, match="has no module l"):
        clip.recording(Model())


# Around it ------------------------------------------------------------------------------------------------------------

def test_schedulers_scalers_and_closures_pass_maxima_on(optimizer):
    named = params(weights_of("MHA"))
    clip = optimizer.QKClip(TAU, {"layer": layer_of("MHA")})
    opt = muon(named, clip, lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(opt)
    scaler = torch.amp.GradScaler("cpu")
    loss = sum(p.square().sum() for p in named.values())
    scaler.scale(loss).backward()
    scaler.step(opt, qk_logits={"layer": torch.tensor(MAXIMA)})
    scaler.update()
    schedule.step()
    assert int(clip.clipped) == 2
    assert opt.step(lambda: 3.0, qk_logits={"layer": torch.tensor(MAXIMA) * 0}) == 3.0 and int(clip.clipped) == 0


@pytest.mark.parametrize("way", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
def test_copies_have_a_clip_of_their_own(way, optimizer):
    weights = weights_of("GQA")
    named = params(weights)
    opt = stepped(named, optimizer.QKClip(TAU, {"layer": layer_of("GQA")}), None)
    opt.qk_clip.record("layer", torch.tensor(MAXIMA))
    twin = way(opt)
    for p in twin.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    assert twin.qk_clip is not opt.qk_clip
    twin.step()
    assert int(twin.qk_clip.clipped) == 2 and int(opt.qk_clip.clipped) == 0
    opt.step()
    assert int(opt.qk_clip.clipped) == 2
    assert same(named.values(), [p for g in twin.param_groups for p in g["params"]])


def test_state_dicts_do_not_know_of_it(optimizer):
    named = params(weights_of("MHA"))
    opt = stepped(named, optimizer.QKClip(TAU, {"layer": layer_of("MHA")}), {"layer": torch.tensor(MAXIMA)})
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    plain = stepped(params(weights_of("MHA")), None, None)
    plain.load_state_dict(torch.load(io.BytesIO(buffer.getvalue())))
    opt.load_state_dict(plain.state_dict())
    opt.step(qk_logits={"layer": torch.tensor(MAXIMA)})
    assert int(opt.qk_clip.clipped) == 2


# On GPUs --------------------------------------------------------------------------------------------------------------

def many_steps(kind, count=6, **options):
    """The weights after steps of the problem on a GPU, each with other maxima; from the fourth on without a sync."""
    weights, gradients, maxima = problem()
    named = {name: nn.Parameter(w.cuda()) for name, w in weights.items()}
    clip = package().QKClip(TAU, layers_of_problem(), shared_keys="shrink")
    opt, counts = muon(named, clip, lr=0.02, capturable=kind == "capturable", **options), []
    for name, p in named.items():
        p.grad = gradients[0][name].cuda()
    steps = [{layer: (values + 0.5 * step).cuda() for layer, values in maxima[0].items()} for step in range(count)]
    for step, most in enumerate(steps):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step > 3 else "default")
        opt.step(qk_logits=most)
        torch.cuda.set_sync_debug_mode("default")
        counts.append(int(opt.qk_clip.clipped))
    return [p.detach() for p in named.values()], counts


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"nonfinite": "skip"}, {"overlap_forward": True}], ids=str)
def test_graphs_replay_with_the_maxima_of_each_step(options, optimizer):
    from tests.test_graphs import graphs_as

    with graphs_as("off"):
        expected, counts = many_steps("launched")
    assert counts == sorted(counts) and counts[0] < counts[-1]
    for graph in ("parts", "capturable"):
        if graph == "parts" or "overlap_forward" not in options:
            found, as_many = many_steps(graph, **options)
            assert as_many == counts and same(found, expected), graph


@pytest.mark.gpu
def test_a_graph_of_the_user_holds_recording_and_step(optimizer):
    def made():
        named = params({name: w.cuda() for name, w in weights_of("GQA").items()})
        for p in named.values():
            p.grad = torch.ones_like(p)
        return named, muon(named, optimizer.QKClip(TAU, {"layer": layer_of("GQA")}), lr=0.01, capturable=True)

    (named, opt), (twins, plain) = made(), made()
    static, graph = torch.zeros(H, device="cuda"), torch.cuda.CUDAGraph()
    for _ in range(3):
        for one in (opt, plain):
            one.step(qk_logits={"layer": static})
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        opt.step(qk_logits={"layer": static})
    for values in ([5.0, 1.0, 3.0, 0.0], [0.0, 1.0, 1.0, 1.0], [9.0, 9.0, 0.0, 9.0]):
        static.copy_(torch.tensor(values))
        graph.replay()
        plain.step(qk_logits={"layer": static})
        assert opt.qk_clip.maxima["layer"].tolist() == values and int(opt.qk_clip.clipped) == int(plain.qk_clip.clipped)
    assert same(named.values(), twins.values())

"""Momentum as a sum, and bias-corrected: against the formula, beside the mean, on every layout, in checkpoints and
through the kernels.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.paths import take
from tests.ranks import package, part, run_threads
from tests.test_bucket_updates import cut
from tests.test_checkpoint_foreign import SOURCES, STEPS, assert_next_step_is_theirs, heir_of, problem, train
from tests.test_decay import tensors
from tests.test_muon import quiet, same
from tests.test_same_bits import mine, shown_state

SHAPES = [(12, 8), (3, 6, 10), (5, 16)]
MOMENTA = [0.9, 0.5, 0.95, 0.0]  # a schedule
CORRECTED = "bias_corrected"


def stepped(name="Muon", place=torch.clone, momenta=MOMENTA, shapes=SHAPES, form="sum", **options):
    """(Parameters, optimizer) after a step with each momentum."""
    fulls = tensors(shapes)
    params = [nn.Parameter(place(f)) for f in fulls]
    made = getattr(package(), name)(params, lr=0.1, momentum_form=form, **options)
    go_on(made, params, fulls, momenta, place)
    return params, made


def go_on(made, params, fulls, momenta, place=torch.clone, first=0):
    for step, momentum in enumerate(momenta, first):
        made.param_groups[0]["momentum"] = momentum
        for i, (p, f) in enumerate(zip(params, fulls)):
            grad = torch.randint(-9, 10, f.shape, generator=torch.Generator().manual_seed(50 * step + i)) / 4
            p.grad = place(grad)
        made.step()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_the_sum_and_what_is_orthogonalized(nesterov, name, optimizer):
    """M <- mu M + G; U <- G + mu M with Nesterov. One step has the bits of a step without momentum on U."""
    params, made = stepped(name, nesterov=nesterov, wire_dtype=torch.float32, weight_decay=0.0)
    for i, (p, w) in enumerate(zip(params, tensors(SHAPES))):
        M, own = 0.0, nn.Parameter(w)
        plain = getattr(optimizer, name)([own], lr=0.1, momentum=0.0, nesterov=False, wire_dtype=torch.float32,
                                         weight_decay=0.0)
        for step, mu in enumerate(MOMENTA):
            G = torch.randint(-9, 10, w.shape, generator=torch.Generator().manual_seed(50 * step + i)).double() / 4
            M = mu * M + G
            own.grad = (G + mu * M if nesterov else M).float()
            plain.step()
        torch.testing.assert_close(made.state[p]["momentum_sum"].double(), M, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(p, own, rtol=1e-4, atol=1e-4)
        assert "momentum_buffer" not in made.state[p]


def test_with_constant_momentum_both_forms_step_alike(optimizer):
    runs = {form: stepped(form=form, momenta=[0.9] * 4, wire_dtype=torch.float32) for form in ("ema", "sum")}
    for a, b in zip(runs["ema"][0], runs["sum"][0]):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        sums, means = runs["sum"][1].state[b]["momentum_sum"], runs["ema"][1].state[a]["momentum_buffer"]
        torch.testing.assert_close(sums * 0.1, means, rtol=1e-5, atol=1e-6)
    scheduled = [stepped(form=form)[0] for form in ("ema", "sum")]
    assert not any(torch.allclose(a, b, atol=1e-3) for a, b in zip(*scheduled))


def test_the_default_has_no_key(optimizer):
    made = optimizer.Muon([nn.Parameter(torch.ones(4, 4))], momentum_form="ema")
    assert "momentum_form" not in made.param_groups[0]
    assert same(*(stepped(form="ema", **more)[0] for more in ({}, {"workspace_bytes": None})))


@pytest.mark.parametrize("value", ["mean", "Sum", None, True, 1])
def test_an_unknown_form_is_refused(value, optimizer):
    with pytest.raises(ValueError, match=r"group 0 .*momentum_form=.* is not allowed: it must be one of .*'sum'"):
        optimizer.Muon([{"params": tensors([(4, 4)]), "momentum_form": value}])


def test_groups_of_other_forms_are_stepped_apart(optimizer):
    params = [nn.Parameter(w) for w in tensors([(8, 6)] * 3)]
    groups = [{"params": params[:1]}, {"params": params[1:2], "momentum_form": "sum"},
              {"params": params[2:], "momentum_form": "ema"}]
    made = optimizer.Muon(groups)
    for p in params:
        p.grad = torch.ones_like(p)
    made.step()
    assert len(made._bound.jobs) == 2
    assert [list(made.state[p]) for p in params] == [["momentum_buffer"], ["momentum_sum"], ["momentum_buffer"]]


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_matrix_with_nan_keeps_its_sum(nonfinite, optimizer):
    params, made = stepped(shapes=[(6, 4), (6, 4)], nonfinite=nonfinite)
    before = [t.clone() for p in params for t in (p.detach(), made.state[p]["momentum_sum"])]
    params[0].grad, params[1].grad = torch.full((6, 4), math.nan), torch.ones(6, 4)
    if nonfinite == "raise":
        with pytest.raises(RuntimeError):
            made.step()
    else:
        made.step()
    now = [t.clone() for p in params for t in (p.detach(), made.state[p]["momentum_sum"])]
    kept = [torch.equal(a, b) for a, b in zip(before, now)]
    assert kept == [True, True, nonfinite == "raise", nonfinite == "raise"]


# bias correction ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_the_bias_corrected_mix(nesterov, name, optimizer):
    """optax.contrib.muon: each of M and G is divided by 1 minus a power of mu, then they are mixed. Steps as above."""
    mu, shapes = 0.9, SHAPES[:2]
    plain = {"wire_dtype": torch.float32, "weight_decay": 0.0}
    params, made = stepped(name, form=CORRECTED, momenta=[mu] * 4, shapes=shapes, nesterov=nesterov, **plain)
    for i, (p, w) in enumerate(zip(params, tensors(shapes))):
        M, own = 0.0, nn.Parameter(w)
        one = getattr(optimizer, name)([own], lr=0.1, momentum=0.0, nesterov=False, **plain)
        for step in range(4):
            G = torch.randint(-9, 10, w.shape, generator=torch.Generator().manual_seed(50 * step + i)).double() / 4
            t, M = step + 1, mu * M + (1 - mu) * G
            U = mu * M / (1 - mu ** (t + 1)) + (1 - mu) * G / (1 - mu**t) if nesterov else M / (1 - mu**t)
            own.grad = U.float()
            one.step()
        torch.testing.assert_close(p, own, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(made.state[p]["momentum_buffer"].double(), M, rtol=1e-5, atol=1e-6)
    assert made.param_groups[0]["momentum_steps"] == 4
    others = stepped(name, form="ema", momenta=[mu] * 4, shapes=shapes, nesterov=nesterov, **plain)[0]
    differs = [not torch.allclose(p, q, atol=1e-3) for p, q in zip(params, others)]
    assert differs == [nesterov] * 2, "without Nesterov the correction is a factor"


def test_the_correction_fades_and_needs_no_new_launches(optimizer):
    group = {"use_muon": True, "lr": 0.1, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "eps": 1e-7,
             "ns_coefficients": "polar_express", "ns_steps": 5, "momentum_form": CORRECTED, "momentum_steps": 0}
    rule, seen = part("rules.rule"), []
    for t in (1, 2, 20, 200, 2000):
        group["momentum_steps"] = t - 1
        seen.append((rule.device_scalars(group)[8], rule.host_constants(group)))
    weights, constants = zip(*seen)
    assert weights == tuple(sorted(weights, reverse=True)) and weights[0] == pytest.approx(0.0975 / 1.0475)
    assert weights[1] == pytest.approx(0.0715, abs=1e-4) and weights[-1] == pytest.approx(0.05)
    assert len(set(map(repr, constants))) == 1
    del group["momentum_steps"]
    assert rule.device_scalars(group)[8] == pytest.approx(0.05), "a momentum of unknown age is old"


@pytest.mark.parametrize("value", [-1, 1.0, True, None, "3"])
def test_a_wrong_count_is_refused(value, optimizer):
    group = {"params": tensors([(4, 4)]), "momentum_form": CORRECTED, "momentum_steps": value}
    with pytest.raises(ValueError, match=r"momentum_steps=.* is not allowed: it must be a whole number from 0"):
        optimizer.Muon([group])


def test_rules_with_a_momentum_of_their_own_refuse_the_correction(optimizer):
    class Heavy(optimizer.Rule):
        def update(self, G, M, numbers):
            return M + G, M + G

    with pytest.raises(ValueError, match="momentum_form='bias_corrected' with rule='Heavy'"):
        optimizer.Muon(tensors([(4, 4)]), rule=Heavy, momentum_form=CORRECTED)
    params, made = stepped(form=CORRECTED, rule="hyperball")
    assert not same(params, stepped(form="ema", rule="hyperball")[0])


def test_steps_that_change_nothing_are_not_counted(optimizer):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = nn.Linear(4, 6, bias=False)
    made = optimizer.Muon(model.parameters(), momentum_form=CORRECTED, nonfinite="raise")
    saved = get_optimizer_state_dict(model, made)
    assert made.param_groups[0]["momentum_steps"] == saved["param_groups"][0]["momentum_steps"] == 0
    model.weight.grad = torch.full((6, 4), math.nan)
    with pytest.raises(RuntimeError):
        made.step()
    assert made.param_groups[0]["momentum_steps"] == 0
    model.weight.grad = torch.ones(6, 4)
    made.step()
    assert made.param_groups[0]["momentum_steps"] == 1


@pytest.mark.parametrize("how", ["dict", "file"])
def test_the_count_goes_on(how, tmp_path, optimizer):
    """From a checkpoint of either form of the mean, into either."""
    for form in ("ema", CORRECTED):
        params, made = stepped(form=form, momenta=[0.9] * 2)
        made.param_groups[0]["param_names"] = ["a", "b", "c"]
        saved = copy.deepcopy(made.state_dict())
        optimizer.export_state(made, tmp_path / form)
        go_on(made, params, params, [0.9], first=9)
        for into in ("ema", CORRECTED):
            own = [nn.Parameter(t) for t in stepped(form=form, momenta=[0.9] * 2)[0]]
            other = optimizer.Muon(list(zip("abc", own)), lr=9.0, momentum_form=into)
            if how == "dict":
                other.load_state_dict(saved)
            else:
                optimizer.import_state(other, tmp_path / form)
            group = other.param_groups[0]
            if form == "ema" and into == CORRECTED:
                assert group["momentum_steps"] == part("rules.muon").SETTLED
            else:
                assert group.get("momentum_steps") == (2 if form == CORRECTED else None)
            go_on(other, own, own, [0.9], first=9)
            if form == CORRECTED or into == "ema":
                assert same(params, own) and group.get("momentum_form", "ema") == form
            for p, q in zip(params, own):  # without a count the correction is over, up to rounding
                torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)


# layouts -----------------------------------------------------------------------------------------------------------

PLACED = {"rows": [0], "columns": [1], "hsdp": [None, 0], "tp x fsdp": [0, 1], "strided": [0, 0]}
OWNED = {"ddp": {}, "shard_state": {"shard_state": True}, "unreduced": {"grads_are_reduced": False}}


def on_layout(rank, world, layout, wholes, form):
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    local_of, shapes = part("params.dtensor").local_of, [(10, 7), (5, 12)]
    if layout in OWNED:
        params, made = stepped("NorMuon", shapes=shapes, process_group=dist.group.WORLD, wire_dtype=torch.float32,
                               form=form, **OWNED[layout])
        state = shown_state(made)
        ours = [t for p in params for t in (p.detach(), *state[p].values())]
        return same([local_of(t) for t in ours], [mine(w, t) for w, t in zip(wholes, ours, strict=True)])
    dims = PLACED[layout]
    mesh = init_device_mesh("cpu", (world,) if len(dims) == 1 else (2, world // 2))

    def place(full):
        return cut(full, mesh, [Replicate() if dim is None else Shard(dim) for dim in dims])

    params, made = stepped("NorMuon", place, shapes=shapes, wire_dtype=torch.float32, form=form)
    ours = [t for p in params for t in (p.detach(), *made.state[p].values())]
    return same([local_of(t) for t in ours], [local_of(place(w)) for w in wholes])


@pytest.mark.parametrize("form", ["sum", CORRECTED])
@pytest.mark.parametrize("layout", [*PLACED, *OWNED])
def test_every_layout_has_the_bits_of_one_process(layout, form, optimizer):
    params, made = stepped("NorMuon", shapes=[(10, 7), (5, 12)], wire_dtype=torch.float32, form=form)
    wholes = [t for p in params for t in (p.detach(), *made.state[p].values())]
    assert run_threads(4, on_layout, layout, wholes, form) == [True] * 4


def on_experts(rank, world, wholes, form):
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    params, made = stepped("NorMuon", lambda full: cut(full, mesh, [Shard(0)]), shapes=[(6, 10, 7)], form=form,
                           wire_dtype=torch.float32)
    found = [t for p in params for t in (p.detach(), *made.state[p].values())]
    return same([part("params.dtensor").local_of(t) for t in found], [w.chunk(world)[rank] for w in wholes])


@pytest.mark.parametrize("form", ["sum", CORRECTED])
def test_experts_over_ranks_have_the_bits_of_one_process(form, optimizer):
    params, made = stepped("NorMuon", shapes=[(6, 10, 7)], wire_dtype=torch.float32, form=form)
    wholes = [t for p in params for t in (p.detach(), *made.state[p].values())]
    assert run_threads(3, on_experts, wholes, form) == [True] * 3


# state -------------------------------------------------------------------------------------------------------------

def test_state_dicts_and_files_go_on(tmp_path, optimizer):
    params, made = stepped()
    made.param_groups[0]["param_names"] = ["a", "b", "c"]
    saved = copy.deepcopy(made.state_dict())
    optimizer.export_state(made, tmp_path / "state.safetensors")
    results = []
    for form in ("sum", "ema"):
        for how in ("dict", "file"):
            own = [nn.Parameter(p.detach().clone()) for p in params]
            other = optimizer.Muon(list(zip("abc", own)), lr=9.0, momentum_form=form)
            if how == "dict":
                other.load_state_dict(saved)
            else:
                optimizer.import_state(other, tmp_path / "state.safetensors")
            assert other.param_groups[0]["momentum_form"] == "sum"
            go_on(other, own, own, [0.7], first=9)
            results.append(own)
    go_on(made, params, params, [0.7], first=9)
    assert all(same(params, own) for own in results)


def test_a_mean_becomes_a_sum(tmp_path, optimizer):
    """Of a checkpoint from before the group had sums: exact up to rounding while momentum was constant."""
    params, made = stepped(form="ema", momenta=[0.9] * 3, wire_dtype=torch.float32)
    expected, sums = stepped(momenta=[0.9] * 3, wire_dtype=torch.float32)
    made.param_groups[0]["param_names"] = ["a", "b", "c"]
    optimizer.export_state(made, tmp_path / "state.safetensors")
    for how in ("dict", "file"):
        own = [nn.Parameter(p.detach().clone()) for p in params]
        other = optimizer.Muon(list(zip("abc", own)), momentum=0.5, momentum_form="sum", wire_dtype=torch.float32)
        if how == "dict":
            other.load_state_dict(made.state_dict())
        else:
            optimizer.import_state(other, tmp_path / "state.safetensors")
        for a, b in zip(own, expected):
            torch.testing.assert_close(other.state[a]["momentum_sum"], sums.state[b]["momentum_sum"])
            assert list(other.state[a]) == ["momentum_sum"]
    assert all("momentum_buffer" in made.state[p] for p in params)


@pytest.mark.parametrize("source", ["Motif", "Dion", "Dion, Nesterov, rms", "Dion's NorMuon"])
def test_sums_of_others_go_on_although_momentum_is_scheduled(source):
    params, theirs = problem(source)
    key = "mu" if "mu" in theirs.param_groups[0] else "momentum"
    for step, momentum in enumerate((0.5, 0.8, 0.9)):
        theirs.param_groups[0][key] = momentum
        train(theirs, params, [step])
    ours, made = heir_of(theirs, params)
    made.load_state_dict(package().convert_state_dict(theirs.state_dict(), momentum_form="sum"))
    for p, q in zip(ours[:4], params):
        state = theirs.state[q]
        torch.testing.assert_close(made.state[p]["momentum_sum"], state.get("momentum_buffer", state.get("momentum")))
    theirs.param_groups[0][key] = made.param_groups[0]["momentum"] = 0.3
    assert_next_step_is_theirs(theirs, params, ours, made)


def test_sources_with_means_have_no_sums():
    for source in ("Keller Jordan", "torch"):
        params, theirs = problem(source)
        train(theirs, params, range(STEPS))
        with pytest.raises(ValueError, match="momentum_form='sum' is not allowed.*motif, dion, muonium"):
            package().convert_state_dict(theirs.state_dict(), momentum_form="sum")
    assert set(SOURCES)


# kernels -----------------------------------------------------------------------------------------------------------

@quiet
@pytest.mark.interpreter
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("early, form", [(True, "sum"), (False, "sum"), (True, CORRECTED)])
def test_the_kernels_have_the_bits_of_torch(early, form, nesterov, skips, device, monkeypatch):
    """Pack, which may write M, and then WeightUpdate, which writes M otherwise."""
    shapes, table = [(3, 5), (1, 7), (0, 4), (40, 16)], part("kernels.elementwise.multi_tensor")
    group = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9, "momentum_form": form, "momentum_steps": 1}
    numbers = torch.tensor(part("rules.rule").device_scalars(group) * 2, device=device)
    numbers[table.NUMBERS:] *= 0.5
    start, M, G = (tensors(shapes, i, device=device) for i in range(3))
    flags = torch.tensor([0.0, 1.0, 0.0, 0.0], device=device)
    skip, results = table.Skip(flags, (0, 1, 2, 3)) if skips else None, []
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        W, momentum = ([t.clone() for t in some] for some in (start, M))
        U = [torch.full_like(m, math.nan) for m in M]
        sources = [table.Source(i, 0, tuple(g.stride())) for i, g in enumerate(G)]
        at = torch.tensor([g.data_ptr() for g in G], device=device)
        pack = part("kernels.elementwise.momentum").Pack(
            momentum, U, sources, G, skip, [0, 1, 0, 1], form)
        pack(G, at, numbers[4:], nesterov, early)
        update = part("kernels.elementwise.weight_update").WeightUpdate(
            W, U, [0.5] * len(W), skip, momentum, sources, G, [0, 1, 0, 1], momentum_form=form)
        update(numbers, G, at, numbers[4:], not early)
        results.append(W + momentum + U)
    assert same(*results)
    for i, (m, old, g) in enumerate(zip(results[0][4:], M, G)):
        half = 0.5 if i % 2 else 1.0
        new = 0.9 * half * old + g if form == "sum" else torch.lerp(old, g, 0.1 * half)
        torch.testing.assert_close(m, old if skips and i == 1 else new)
        if form == CORRECTED and not (skips and i == 1):
            a, b = 0.1 / (1 - 0.9**2), 0.9 / (1 - 0.9**3)
            torch.testing.assert_close(results[0][8 + i], torch.lerp(m, g, a / (a + b) * half) if nesterov else m)


def from_lr_0(rank, world):
    """The counts of each step of a warm-up from lr 0 whose first gradients are zero on the last rank."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh, generator = init_device_mesh("cpu", (world,)), torch.Generator().manual_seed(0)

    def placed(t):
        return distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None)

    p = nn.Parameter(placed(torch.randn(6, 4, generator=generator)))
    optimizer, counts = package().Muon([("w", p)], lr=0.0, momentum_form="bias_corrected"), []
    for step in range(3):
        gradient = torch.randn(6, 4, generator=generator)
        gradient[4:] *= step > 0
        p.grad = placed(gradient)
        optimizer.param_groups[0]["lr"] = 0.1 * step
        optimizer.step()
        counts.append(optimizer.param_groups[0]["momentum_steps"])
    return counts


def test_ranks_count_a_step_alike_whose_gradients_are_zero_on_some(optimizer):
    assert run_threads(3, from_lr_0) == [[1, 2, 3]] * 3

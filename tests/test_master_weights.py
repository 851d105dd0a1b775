"""master_weights="split16": bf16 parameters with a 16-bit rest step as fp32 parameters do, to the last bit."""

from __future__ import annotations

import copy
import io
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.paths import quiet, take
from tests.ranks import package, part, run_ranks, run_threads

pytestmark = quiet

BF16, FP32 = torch.bfloat16, torch.float32


def weights_module():
    return part("kernels.weights.split")


def fp32_of(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(FP32)


# The two halves


def test_every_fp32_number_comes_back_and_the_upper_half_is_the_nearest_bf16(optimizer):
    split, joined = weights_module().split, weights_module().joined
    generator = torch.Generator().manual_seed(0)
    low = torch.arange(1 << 16)
    some = torch.randint(0, 1 << 16, (64,), generator=generator)
    # Zeros, smallest and largest numbers, infinities, odd and even upper halves
    uppers = torch.cat([some, torch.tensor([0, 0x8000, 1, 0x7F7F, 0xFF7F, 0x3F80, 0x3F81, 0xBF81])])
    bits = (uppers[:, None] << 16) + low
    wide = torch.where(bits > 0x7FFFFFFF, bits - (1 << 32), bits).int().view(FP32)
    wide = torch.cat([wide[wide.isfinite()], torch.tensor([math.inf, -math.inf])])
    high, rest = split(wide)
    assert (high.dtype, rest.dtype) == (BF16, torch.int16)
    assert torch.equal(joined(high, rest).view(torch.int32), wide.view(torch.int32))
    is_tie = (wide.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(high[~is_tie], wide.to(BF16)[~is_tie])
    ties = wide[is_tie]
    assert torch.equal(high[is_tie], (ties.view(torch.int32) + 1).view(FP32).to(BF16))  # away from zero
    largest = torch.finfo(FP32).max
    assert torch.equal(split(torch.tensor([largest, -largest]))[0].float(), torch.tensor([math.inf, -math.inf]))


def test_nans_stay_nans_and_a_rest_of_another_weight_makes_none(optimizer):
    split, joined = weights_module().split, weights_module().joined
    nans = fp32_of(0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF808000, 0x7FC00000)
    high, rest = split(nans)
    assert high.isnan().all() and not rest.any() and joined(high, rest).isnan().all()
    weights = torch.cat([torch.zeros(2), -torch.zeros(2), torch.randn(100), torch.full((2,), 1e-40)]).to(BF16)
    for rests in (torch.full(weights.shape, -32768), torch.full(weights.shape, 32767), torch.full(weights.shape, -1)):
        wide = joined(weights, rests.to(torch.int16))
        unit = (weights.view(torch.int16) + 1).view(BF16).float() - weights.float()
        assert ((wide - weights.float()).abs() <= unit.abs() / 2).all()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the largest number, squared
@pytest.mark.interpreter
@pytest.mark.parametrize("decay, momenta", [(0, False), (1, True), (2, True)])
def test_kernel_and_torch_give_the_same_bits(part, device, monkeypatch, decay, momenta):
    update, tables = part("kernels.elementwise.weight_update"), part("kernels.elementwise.multi_tensor")
    halves_of = part("kernels.weights.split")
    shapes = [(3, 40), (5, 7), (4, 8)]
    generator = torch.Generator().manual_seed(decay)

    def random(dtype):
        return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]

    wide, O, M, first, G = map(random, (FP32, BF16, FP32, BF16, BF16))
    wide[0][0, :4] = torch.tensor([math.nan, 3.4e38, 0.0, -0.0], device=device)
    numbers = torch.zeros(tables.NUMBERS, device=device)
    numbers[:8] = torch.tensor([1e-3, 0.9, 0, 0, 0.1, 0.9, 0.1, 1])
    flags = tables.Skip(torch.tensor([0.0, 1.0], device=device), (0, 1, 0))

    def run(is_split):
        halves = [halves_of.split(w) for w in wide]
        W = [high.clone() for high, _ in halves] if is_split else [w.clone() for w in wide]
        rests = [rest.clone() for _, rest in halves]
        W[2], m = wide[2].clone(), [t.clone() for t in M]
        sources = [tables.Source(i, 0, g.stride()) for i, g in enumerate(G)]
        own = (m, sources, G) if momenta else (None, (), ())
        rounding, squares = halves_of.SplitWeights([*rests[:2], None]) if is_split else None, tables.Squares()
        bound = update.WeightUpdate(W, O, [0.3] * 3, flags, *own, None, decay, first if decay == 2 else (),
                                    rounding=rounding, squares=squares)
        bound(numbers, G, torch.tensor([g.data_ptr() for g in G], device=device), numbers[4:])
        found = [halves_of.joined(w, rest) for w, rest in zip(W[:2], rests)] if is_split else W[:2]
        sums.append(squares.totals(3))
        return [t.nan_to_num(7.0).view(torch.int32) for t in (*found, W[2], *m)], W[1].clone()

    results, sums = [], []
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        for is_split in (False, True):
            found, skipped = run(is_split)
            assert torch.equal(skipped, halves_of.split(wide[1])[0] if is_split else wide[1])
            results.append(found)
    for found, totals in zip(results, sums):
        assert all(map(torch.equal, found, results[0]))
        torch.testing.assert_close(totals, sums[0], rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.interpreter
def test_halves_are_joined_and_split_alike_in_one_launch(part, device, monkeypatch):
    halves_of = part("kernels.weights.split")
    base = torch.randn(70, 66, device=device)
    for wide in (base, base[:, :33], base[:0], base[0, 0]):
        results = []
        for path in ("torch", "triton"):
            take(path, monkeypatch)
            high, rest = (torch.empty_like(wide, dtype=dtype) for dtype in (BF16, torch.int16))
            halves_of.split_into(wide, high, rest)
            back = torch.full_like(wide, 7.0)
            halves_of.join_into(back, high, rest)
            assert torch.equal(back, wide)
            results.append((high, rest))
        assert all(map(torch.equal, *results))


# The optimizer

SHAPES = [(16, 24), (24, 16), (3, 8, 6), (12, 20)]
OTHERS = [(9, 4), (7,)]
FORMS = {"split": [None, None, None, {"heads": 4}]}


def own_rule():
    base = package().Rule

    class Halved(base):
        name = "halved_for_tests"
        batched = True

        def write(self, W, O, scale, sent, numbers):
            return W - 0.5 * numbers.lr * scale * (O + W)

    return Halved


WAYS = {
    "muon": ({}, {}), "normuon": ({"cls": "NorMuon", "decay": "cautious"}, {}),
    "initial": ({"decay": "initial", "momentum_form": "sum"}, {}), "bf16 state": ({"state_dtype": BF16}, {}),
    "adamuon": ({}, {"rule": "adamuon"}), "dion2": ({}, {"rule": "dion2", "select": "row", "blocks": 3}),
    "own rule": ({}, {"rule": own_rule}), "lion": ({"decay": "cautious"}, {"other": {"rule": "lion"}}),
    "8-bit momentum": ({"state_dtype": torch.int8}, {}), "sgd": ({}, {"other": {"rule": "sgd"}}),
    "skip": ({"nonfinite": "skip"}, {}),
}


def random_weights(generator, dtype=FP32):
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES + OTHERS]


def make(params, way="muon", split=True, names=None, **more):
    """An optimizer of SHAPES by Muon and of OTHERS by AdamW."""
    options, group = (dict(x) for x in WAYS[way])
    rule = group.pop("rule", None)
    other = group.pop("other", {})
    if rule is not None:
        group["rule"] = rule() if callable(rule) else rule
    names = names or [f"w{i}" for i in range(len(params))]
    named = list(zip(names, params))
    count = len(SHAPES)
    groups = [{"params": named[:count], **FORMS, **group},
              {"params": named[count:], "use_muon": False, "lr": 1e-3, **other}]
    options |= {"master_weights": "split16"} if split else {}
    options |= more
    kind = getattr(package(), options.pop("cls", "Muon"))
    return kind(groups, lr=2e-3, **options)


def train(params, opt, generator, steps, placed=lambda t: t, without=()):
    for _ in range(steps):
        for i, p in enumerate(params):
            gradient = torch.randn(p.shape, generator=generator).to(BF16).to(p.dtype)
            p.grad = None if i in without else placed(gradient)
        opt.step()


@pytest.mark.parametrize("way", WAYS)
def test_steps_have_the_bits_of_fp32_weights(optimizer, way):
    start = random_weights(torch.Generator().manual_seed(1))
    if way == "initial":  # initial weights are kept in the dtype of the parameter
        start = [w.to(BF16).float() for w in start]
    results, metrics = [], []
    for dtype in (FP32, BF16):
        params = [nn.Parameter(w.to(dtype, copy=True)) for w in start]
        opt = make(params, way, split=dtype == BF16)
        opt.load_master_weights({f"w{i}": w for i, w in enumerate(start)})
        opt.collect_metrics = way != "muon"
        train(params, opt, torch.Generator().manual_seed(2), 100 if way in ("muon", "normuon") else 8)
        results.append(opt.master_weights())
        metrics.append(opt.metrics(per_parameter=True) if way != "muon" else None)
    assert metrics[0] == metrics[1]
    assert all(t.dtype == FP32 for found in results for t in found.values())
    for name, weight in results[0].items():
        assert torch.equal(weight, results[1][name]), name
        assert not torch.equal(weight, start[int(name[1:])])
    for weight, param in zip(results[1].values(), params):
        assert torch.equal(weights_module().split(weight)[0], param)


def test_large_parameters_are_stepped_in_pieces(optimizer, monkeypatch):
    """Of those that torch steps as copies: with the bits of one piece."""
    results = []
    for most in (1 << 24, 10):
        monkeypatch.setattr(part("rules.elementwise"), "MAX_COPIED_ELEMENTS", most)
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(w) for w in random_weights(generator, BF16)]
        opt = make(params, nonfinite="skip" if most == 10 else "propagate")
        train(params, opt, generator, 3)
        results.append(opt.master_weights())
    assert all(torch.equal(results[0][name], weight) for name, weight in results[1].items())


def test_hyperball_keeps_the_norm_of_the_fp32_weight(optimizer):
    """The owner takes norms of the bf16 weights; they are those of the fp32 weights to one part in 10^4."""
    start = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    results = []
    for dtype in (FP32, BF16):
        param = nn.Parameter(start.to(dtype, copy=True))
        opt = optimizer.Muon([("w", param)], lr=0.01, rule="hyperball",
                             **({"master_weights": "split16"} if dtype == BF16 else {}))
        opt.load_master_weights({"w": start})
        for step in range(5):
            param.grad = torch.randn(32, 48, generator=torch.Generator().manual_seed(step)).to(BF16).to(dtype)
            opt.step()
        results.append(opt.master_weights()["w"])
    assert (results[0] - results[1]).norm() < 1e-4 * start.norm()
    assert (results[1] - results[1].to(BF16)).abs().max() > 0


OWNERS = {"owners": {"shard_state": True}, "unreduced": {"grads_are_reduced": False, "wire_dtype": FP32}}


def sharded(rank, world, kind, full):
    """(function that places a whole tensor, arguments of the optimizer) of a layout."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    if not kind.startswith("shard"):
        options = {} if kind == "alone" else {"process_group": dist.group.WORLD}
        return lambda t: t, options | OWNERS.get(kind, {})
    mesh = init_device_mesh("cpu", (world,))

    def placed(t):
        dim = int(kind[-1]) if t.ndim > 1 else 0
        return distribute_tensor(t, mesh, [Shard(dim)], src_data_rank=None)

    return placed, {}


def whole(weights):
    return {name: w.full_tensor() if hasattr(w, "full_tensor") else w for name, w in weights.items()}


def stepped(rank, world, kind, steps=3, way="muon", then=None, more=None):
    """Whole fp32 weights after some steps, and with `then` after a load into this other layout and more steps."""
    generator = torch.Generator().manual_seed(1)
    full, saved = random_weights(generator), None
    for layout in filter(None, (kind, then)):
        placed, options = sharded(rank, world, layout, full)
        params = [nn.Parameter(placed(w.to(BF16))) for w in full]
        opt = make(params, way, **options, **(more or {}), workspace_bytes=60_000)
        if saved is None:
            opt.load_master_weights({f"w{i}": w for i, w in enumerate(full)})
        else:
            opt.load_state_dict(saved)
        train(params, opt, generator, steps, placed)
        saved = opt.state_dict()
        full = [w.detach().clone().float() for w in whole({i: p for i, p in enumerate(params)}).values()]
    return whole(opt.master_weights())


@pytest.mark.parametrize("way, kind", [
    ("muon", "shard0"), ("normuon", "shard1"), ("skip", "ddp"), ("bf16 state", "owners"), ("skip", "owners"),
    ("muon", "unreduced"), ("lion", "owners")])
def test_layouts_give_the_bits_of_one_process(way, kind):
    more = {"wire_dtype": FP32} if kind == "unreduced" else {}  # the mean of equal gradients is exact then
    alone = stepped(0, 1, "alone", way=way, more=more)
    for weights in run_threads(4, stepped, kind, 3, way):
        assert all(torch.equal(alone[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("kind, then", [
    ("shard0", "shard1"), ("shard1", "ddp"), ("ddp", "shard0"), ("owners", "shard0"), ("shard0", "owners")])
def test_a_load_into_another_layout_goes_on_with_the_bits(kind, then):
    alone = stepped(0, 1, "alone", steps=4)
    for weights in run_threads(3, stepped, kind, 2, "muon", then):
        assert all(torch.equal(alone[name], weight) for name, weight in weights.items())


def saved_by_torch(rank, world, folder):
    """State gathered by torch over gloo, which sends no int16, or saved by each rank, and loaded into a plain
    optimizer: (fp32 weights, those of both loads).
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as dsd
    from torch.distributed.fsdp import fully_shard

    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(6, 8, generator=generator)

    def trained(opt, model, steps):
        for _ in range(steps):
            model(torch.randn(4, 8, generator=generator).to(BF16)).square().mean().backward()
            opt.step()
            opt.zero_grad()

    def made(shard):
        model = nn.Sequential(nn.Linear(8, 6, bias=False, dtype=BF16))
        opt = None
        if shard:
            fully_shard(model)
        opt = package().Muon(model.named_parameters(), lr=1e-3, master_weights="split16")
        return model, opt

    model, opt = made(True)
    opt.load_master_weights({"0.weight": wide})
    trained(opt, model, 2)
    options = dsd.StateDictOptions(full_state_dict=True)
    state = dsd.get_optimizer_state_dict(model, opt, options=options)
    dcp.save({"optimizer": dsd.get_optimizer_state_dict(model, opt)}, checkpoint_id=folder)
    weights = {name: w.full_tensor() for name, w in opt.master_weights().items()}
    (param,) = model.parameters()
    gathered = part("communication.redistribute").place_like(opt.state[param]["weight_rest"], wide)
    assert torch.equal(gathered, weights_module().split(weights["0.weight"])[1])
    if rank:
        return None
    other, own = made(False)
    other.load_state_dict({name: weights_module().split(w)[0] for name, w in weights.items()})
    dsd.set_optimizer_state_dict(other, own, state, options=options)
    found = [own.master_weights()["0.weight"]]
    own.state.clear()
    state = {"optimizer": dsd.get_optimizer_state_dict(other, own)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    dsd.set_optimizer_state_dict(other, own, state["optimizer"])
    return weights["0.weight"], *found, own.master_weights()["0.weight"]


def test_torch_saves_and_gathers_the_state(tmp_path):
    weight, *loaded = run_ranks(2, saved_by_torch, str(tmp_path))[0]
    assert not torch.equal(weight, weight.to(BF16).float())
    assert all(torch.equal(weight, one) for one in loaded)


@pytest.mark.parametrize("kind", ["alone", "ddp", "owners"])
def test_missing_gradients_and_flagged_ones_leave_both_halves(kind):
    for found in run_threads(2, half_stepped, kind):
        assert found


def half_stepped(rank, world, kind):
    generator = torch.Generator().manual_seed(1)
    full = random_weights(generator)
    placed, options = sharded(rank, world, kind, full)
    params = [nn.Parameter(w.to(BF16)) for w in full]
    opt = make(params, nonfinite="skip", **options)
    opt.load_master_weights({f"w{i}": w for i, w in enumerate(full)})
    train(params, opt, generator, 1)
    before = opt.master_weights()
    for i, p in enumerate(params):
        p.grad = None if i in (0, 4) else torch.full_like(p, math.nan if i in (1, 5) else 1.0)
    opt.step()
    after = opt.master_weights()
    same = [torch.equal(before[name], after[name]) for name in before]
    return same == [i in (0, 1, 4, 5) for i in range(len(params))]


def test_overlap_with_backward_has_the_same_bits(optimizer):
    results = []
    for overlap in (False, True):
        model = nn.Sequential(*[nn.Linear(12, 12, bias=False, dtype=BF16) for _ in range(3)])
        for i, layer in enumerate(model):
            weight = torch.randn(12, 12, generator=torch.Generator().manual_seed(i))
            layer.weight.data.copy_(weight)
        opt = optimizer.Muon(model.named_parameters(), lr=1e-3, master_weights="split16", overlap_backward=overlap)
        for step in range(3):
            x = torch.randn(4, 12, generator=torch.Generator().manual_seed(step)).to(BF16)
            with opt.last_backward():
                model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
        results.append(opt.master_weights())
    assert all(torch.equal(results[0][name], weight) for name, weight in results[1].items())


@pytest.mark.parametrize("in_turn", [False, True])
def test_qk_clip_scales_the_fp32_weight(optimizer, in_turn):
    """Queries and keys of two heads, one of which has logits above the threshold."""
    start = {key: torch.randn(8, 6, generator=torch.Generator().manual_seed(i)) for i, key in enumerate("qk")}
    results = []
    for dtype in (FP32, BF16):
        params = {key: nn.Parameter(w.to(dtype, copy=True)) for key, w in start.items()}
        clip = optimizer.QKClip(2.0, {"layer": {"heads": 2, "weights": {"q": "q", "k": "k"}}})
        opt = optimizer.Muon(params.items(), lr=1e-3, qk_clip=clip, overlap_forward=in_turn,
                             **({"master_weights": "split16"} if dtype == BF16 else {}))
        opt.load_master_weights(start)
        for step in range(2):
            for key, p in params.items():
                p.grad = start[key].roll(step).to(BF16).to(dtype)
            opt.step(qk_logits={"layer": torch.tensor([3.0, 1.0])})
        results.append(opt.master_weights())
    for key, weight in results[0].items():
        assert torch.equal(weight, results[1][key])
        assert weight[:4].norm() < 0.8 * start[key][:4].norm() and weight[4:].norm() > 0.9 * start[key][4:].norm()


# Checkpoints


@pytest.mark.parametrize("way", ["state_dict", "copy", "safetensors"])
def test_bits_go_on_after_a_resume(optimizer, way, tmp_path):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(w) for w in random_weights(generator, BF16)]
    opt = make(params)
    train(params, opt, generator, 2)
    if way == "copy":
        other = copy.deepcopy(opt)
        twins = [p for group in other.param_groups for p in group["params"]]
    else:
        twins = [nn.Parameter(p.detach().clone()) for p in params]
        other = make(twins, split=False)  # the groups of the checkpoint say how
        if way == "state_dict":
            saved = opt.state_dict()
            assert {s["weight_rest"].dtype for s in saved["state"].values()} == {BF16}
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            other.load_state_dict(torch.load(file, weights_only=True))
        else:
            optimizer.export_state(opt, str(tmp_path / "state"))
            optimizer.import_state(other, str(tmp_path / "state"))
    assert {s["weight_rest"].dtype for s in other.state.values()} == {torch.int16}
    start = generator.get_state()
    train(params, opt, generator, 2)
    train(twins, other, generator.set_state(start), 2)
    after = other.master_weights()
    assert all(torch.equal(weight, after[name]) for name, weight in opt.master_weights().items())
    assert any(not torch.equal(weight, weight.to(BF16).float()) for weight in after.values())


def test_states_of_fp32_and_bf16_weights_load_and_the_other_way_round(optimizer):
    generator = torch.Generator().manual_seed(0)
    start = random_weights(generator)
    fp32 = [nn.Parameter(w.clone()) for w in start]
    source = make(fp32, split=False)
    train(fp32, source, generator, 2)
    # fp32 -> split16: the state, then the weights
    params = [nn.Parameter(w.to(BF16)) for w in source.master_weights().values()]
    opt = make(params)
    with pytest.warns(UserWarning, match="has no weight_rest: it was saved without master_weights") as warned:
        opt.load_state_dict(source.state_dict())
    assert len(warned) == 1
    assert torch.equal(opt.master_weights()["w0"], params[0].float())
    opt.load_master_weights(source.master_weights())
    state = generator.get_state()
    train(fp32, source, generator, 2)
    train(params, opt, generator.set_state(state), 2)
    assert all(torch.equal(w, p) for w, p in zip(opt.master_weights().values(), fp32))
    # split16 -> fp32
    back = [nn.Parameter(w.clone()) for w in opt.master_weights().values()]
    other = make(back, split=False)
    with pytest.warns(UserWarning, match="weight_rest of .* is not loaded"):
        other.load_state_dict(opt.state_dict())
    assert "weight_rest" not in other.state[back[0]]
    state = generator.get_state()
    train(params, opt, generator, 2)
    train(back, other, generator.set_state(state), 2)
    assert all(torch.equal(w, p) for w, p in zip(opt.master_weights().values(), back))
    # bf16 -> split16: nothing is missing that there was
    plain = [nn.Parameter(w.to(BF16)) for w in start]
    rounded = make(plain, split=False)
    train(plain, rounded, generator, 1)
    params = [nn.Parameter(w.detach().clone()) for w in plain]
    opt = make(params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt.load_state_dict(rounded.state_dict())
    train(params, opt, generator, 1)
    assert opt.state[params[0]]["weight_rest"].any()


def test_a_rest_that_was_cast_is_refused(optimizer):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(w) for w in random_weights(generator, BF16)]
    opt = make(params)
    train(params, opt, generator, 1)
    saved = opt.state_dict()
    saved["state"] = {key: {**s, "weight_rest": s["weight_rest"].float()} for key, s in saved["state"].items()}
    with pytest.raises(ValueError, match="weight_rest of parameter w0 has dtype torch.float32 in the state, but holds"):
        opt.load_state_dict(saved)


# Groups


def test_groups_choose_and_change(optimizer):
    params = [nn.Parameter(torch.randn(8, 8).to(dtype)) for dtype in (BF16, FP32, BF16, BF16)]
    groups = [{"params": params[:2]}, {"params": params[2:3], "master_weights": None},
              {"params": params[3:], "use_muon": False}]
    opt = optimizer.Muon(groups, lr=1e-3, master_weights="split16")
    assert [group["master_weights"] for group in opt.param_groups] == ["split16", None, "split16"]

    def step():
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        return ["weight_rest" in opt.state[p] for p in params]

    assert step() == [True, False, False, True]
    opt.param_groups[0]["master_weights"] = None
    assert step() == [False, False, False, True]
    opt.param_groups[0]["master_weights"] = opt.param_groups[1]["master_weights"] = "split16"
    assert step() == [True, False, True, True]


def test_memory_is_reported(optimizer):
    params = [nn.Parameter(w) for w in random_weights(torch.Generator().manual_seed(0), BF16)]
    opt, plain = make(params), make(params, split=False)
    count = sum(p.numel() for p in params)
    report = opt.memory_report()
    assert report.bytes_of("state") == plain.memory_report().bytes_of("state") + 2 * count
    # Weight, gradient: to fp32
    assert report.bytes_of("temporary") == sum(8 * math.prod(shape) for shape in OTHERS)
    train(params, opt, torch.Generator().manual_seed(0), 1)
    assert opt.memory_report().bytes_of("state") == report.bytes_of("state")


def owned_bytes(rank, world):
    """(predicted, measured) bytes of state and workspace of an optimizer whose owners keep the state."""
    params = [nn.Parameter(w) for w in random_weights(torch.Generator().manual_seed(0), BF16)]
    opt = make(params, process_group=dist.group.WORLD, shard_state=True)
    predicted = opt.memory_report()
    train(params, opt, torch.Generator().manual_seed(0), 1)
    assert all(opt.state[p]["weight_rest"].shape == p.shape for p in params)
    return [report.bytes_of(kind) for report in (predicted, opt.memory_report()) for kind in ("state", "workspace")]


def test_memory_is_reported_with_state_at_owners():
    for found in run_threads(3, owned_bytes):
        assert found[:2] == found[2:]


@pytest.mark.parametrize("group, options, error, message", [
    ({}, {"master_weights": "fp32"}, ValueError, "master_weights='fp32' is not allowed: it must be one of"),
    ({"master_weights": True}, {}, ValueError, "master_weights=True is not allowed"),
    ({"rounding": "stochastic"}, {"master_weights": "split16"}, ValueError, "keeps all bits of a weight"),
])
def test_what_is_refused(optimizer, group, options, error, message):
    with pytest.raises(error, match=message):
        optimizer.Muon([{"params": [nn.Parameter(torch.ones(4, 4, dtype=BF16))], **group}], **options)


@pytest.mark.parametrize("use_muon", [True, False])
def test_fp16_is_refused_with_the_reason(optimizer, use_muon):
    with pytest.raises(ValueError, match="'split16' is for bf16 weights, which are the upper half of an fp32 number"):
        optimizer.Muon([{"params": [nn.Parameter(torch.ones(4, 4, dtype=torch.float16))], "use_muon": use_muon}],
                       master_weights="split16")


@pytest.mark.parametrize("change, message", [
    (lambda weights: weights.pop("w1"), "there is no weight of parameter w1 among 5 weights"),
    (lambda weights: weights.update(w4=torch.ones(3)), r"parameter w4 is Tensor of shape \(3,\), but"),
    (lambda weights: weights.update(w5=1.0), "parameter w5 is float of shape"),
])
def test_master_weights_that_do_not_fit_are_refused(optimizer, change, message):
    params = [nn.Parameter(w) for w in random_weights(torch.Generator().manual_seed(0), BF16)]
    opt = make(params)
    weights = {name: w + 1 for name, w in opt.master_weights().items()}
    change(weights)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=message):
        opt.load_master_weights(weights)
    assert all(map(torch.equal, before, params))
    unnamed = optimizer.Muon([nn.Parameter(torch.ones(4, 4, dtype=BF16))])
    with pytest.raises(ValueError, match="parameter #0 of shape .* has no name"):
        unnamed.master_weights()

"""Stochastic rounding of bf16 weights: unbiased, equal bits on all layouts and paths, and after a resume."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.paths import quiet, take
from tests.ranks import package, part, run_threads

pytestmark = quiet

BF16 = torch.bfloat16
KEY = torch.tensor([0x123456789ABCDEF, -5])


def rounded(values: torch.Tensor, first: int = 0, key: torch.Tensor = KEY[0]) -> torch.Tensor:
    """Values with the numbers from `first` on, rounded."""
    numbers = torch.arange(first, first + values.numel()).view(values.shape)
    return part("kernels.elementwise.weight_update").rounded_torch(values, numbers, key)


# The rounding


def test_the_mean_of_many_roundings_is_the_value(optimizer):
    """A rounding is off by less than a unit in the last place, with a variance of at most a quarter: the mean of N is
    within 5 / (2 sqrt(N)) units of the value, but for one case in a million.
    """
    count = 1 << 16
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-30, 0.02, 1.0, 3e20):
        for value in (scale * torch.randn(8, generator=generator)).tolist():
            exact = torch.full((count,), value)
            found = rounded(exact, first=1 << 33)
            assert torch.equal(found, found.to(BF16).float())
            down, up = found.min().item(), found.max().item()
            unit = 2.0 ** (math.frexp(exact[0].item())[1] - 8)
            assert down <= exact[0] <= up and up - down == unit
            assert abs(found.double().mean() - exact[0].double()) < 5 * unit / (2 * math.sqrt(count))


def test_elements_and_keys_draw_bits_of_their_own(optimizer):
    """Correlations of the bits of neighbours, of rows, of steps and of parameters are those of chance."""
    part_of, muon = part("kernels.elementwise.weight_update"), part("rules.muon")
    numbers = torch.arange(1 << 16)
    keys = [muon.rounding_key({"rounding_seed": seed, "rounding_step": step})
            for seed, step in ((0, 0), (0, 1), (1, 0), (1 << 62, 7))]
    assert len(set(keys)) == 4 and all(-(1 << 63) <= key < 1 << 63 for key in keys)
    half = torch.full((1 << 16,), 1 + 2.0**-8)  # up or down with probability 1/2
    signs = []
    for key, first in [*((key, 0) for key in keys), (keys[0], 1), (keys[0], 4096), (keys[0], 12345 << 32)]:
        up = part_of.rounded_torch(half, numbers + first, torch.tensor(key)) > 1
        signs.append(2.0 * up.float() - 1)
    together = torch.stack(signs) @ torch.stack(signs).T / (1 << 16)
    apart = together - torch.eye(len(signs))
    assert apart.abs().max() < 5 / math.sqrt(1 << 16)


def test_bf16_values_nan_and_infinities_stay(optimizer):
    values = torch.cat([torch.randn(1000).to(BF16).float(), torch.tensor([0.0, -0.0, math.inf, -math.inf])])
    assert torch.equal(rounded(values), values)
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int64).int().view(torch.float32)
    assert rounded(nans.repeat(100)).isnan().all()


@pytest.mark.interpreter
@pytest.mark.parametrize("decay, momenta", [(0, False), (1, True), (2, True)])
def test_kernel_and_torch_give_the_same_bits_however_a_matrix_is_cut(part, device, monkeypatch, decay, momenta):
    R, C = 13, 40
    update, tables = part("kernels.elementwise.weight_update"), part("kernels.elementwise.multi_tensor")
    W, O, M, first = (torch.randn(R, C, device=device).to(dtype) for dtype in (BF16, BF16, torch.float32, BF16))
    gradient = torch.randn(R, C, device=device)
    numbers = torch.zeros(2, tables.NUMBERS, device=device)
    numbers[:, :8] = torch.tensor([[9e9, 9e9, 0, 0, 9e9, 9e9, 9e9, 9e9], [1e-3, 0.9, 0, 0, 0.1, 0.9, 0.1, 1]])
    keys = KEY.to(device)

    def run(pieces):
        """The new weights, from memory in which each piece lies alone, and the new momentum."""
        w, m, w0 = ([whole[piece].clone() for piece in pieces] for whole in (W, M, first))
        grads = [gradient[piece].clone() for piece in pieces]
        sources = [tables.Source(i, 0, g.stride()) for i, g in enumerate(grads)]
        positions = [tables.Positions((7 << 32) + a.start * C + b.start, tuple(x.shape), C)
                     for (a, b), x in zip(pieces, w)]
        own = (m, sources, grads) if momenta else (None, (), ())
        bound = update.WeightUpdate(
            w, [O[piece] for piece in pieces], [0.3] * len(pieces), None, *own, [1] * len(pieces), decay,
            w0 if decay == 2 else (), rounding=update.StochasticRounding(positions, keys))
        addresses = torch.tensor([g.data_ptr() for g in grads], device=device)
        bound(numbers.view(-1), grads, addresses, numbers.view(-1)[4:])
        whole = W.clone(), M.clone()
        for piece, *new in zip(pieces, w, m):
            whole[0][piece], whole[1][piece] = new
        return whole

    cuts = [[(slice(0, R), slice(0, C))],
            [(slice(a, b), slice(0, C)) for a, b in ((0, 1), (1, 4), (4, R))],
            [(slice(0, R), slice(a, b)) for a, b in ((0, 7), (7, 8), (8, 32), (32, C))]]
    results = []
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        results += map(run, cuts)
    assert all(torch.equal(a, b) for one in results for a, b in zip(one, results[0]))
    if decay == 0:  # with the key of group 1
        numbers_of = ((7 << 32) + torch.arange(R * C, device=device)).view(R, C)
        wide = (W.float() * numbers[1, 1]).sub_(O.float() * (torch.tensor(0.3, device=device) * numbers[1, 0]))
        assert torch.equal(results[0][0], update.rounded_torch(wide, numbers_of, keys[1]).to(BF16))
    nearest = (W.float() * 0.9 - O.float() * 3e-4).to(BF16)
    assert decay or 0 < (results[0][0] != nearest).float().mean() < 0.6


# The optimizer

SHAPES = [(16, 24), (24, 16), (10, 12), (3, 8, 6), (24, 16), (12, 20)]
FORMS = {"split": [None, None, None, None, {"heads": 4}, None], "transposed": 5 * [False] + [True]}


WAYS = {
    "plain": {}, "normuon": {"cls": "NorMuon", "decay": "cautious"}, "skip": {"nonfinite": "skip"},
    "dion2": {"rule": "dion2", "select": "row", "blocks": 3, "decay": "initial"},
    "dion3": {"rule": "dion3", "blocks": 2},
}


def stepped(rank, world, kind, steps=3, named=True, way="plain"):
    """Whole weights after some steps, which begin and go on equally on every layout."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    generator = torch.Generator().manual_seed(1)
    full = [torch.randn(shape, generator=generator).to(BF16) for shape in SHAPES]
    is_sharded = kind.startswith("shard")
    mesh = init_device_mesh("cpu", (world,)) if is_sharded else None

    def placed(t):
        return distribute_tensor(t, mesh, [Shard(int(kind[-1]))], src_data_rank=None) if is_sharded else t

    params = [nn.Parameter(placed(t.clone())) for t in full]
    options = {} if kind in ("alone", "shard0", "shard1") else {"process_group": dist.group.WORLD}
    options |= {"shard_state": True} if kind == "owners" else {}
    names = [f"module.layer{i}.weight" if kind == "ddp" else f"layer{i}.weight" for i in range(len(params))]
    given = list(zip(names, params)) if named else params
    options |= {"rounding": "stochastic", "rounding_seed": 3, "workspace_bytes": 40_000}
    options |= WAYS[way]
    opt = getattr(package(), options.pop("cls", "Muon"))([{"params": given, **FORMS}], lr=1e-4, **options)
    for _ in range(steps):
        for i, p in enumerate(params):
            p.grad = placed(torch.randn(SHAPES[i], generator=generator).to(BF16))
        opt.step()
    assert opt.param_groups[0]["rounding_step"] == steps
    return [p.full_tensor().detach() if is_sharded else p.detach().clone() for p in params]


@pytest.mark.parametrize("way, kind", [
    *(("plain", kind) for kind in ("shard0", "shard1", "ddp", "owners")), ("normuon", "shard0"), ("skip", "shard1"),
    ("dion2", "shard0"), ("dion2", "ddp"), ("dion3", "shard1"), ("dion3", "ddp")])
def test_layouts_give_the_bits_of_one_process(way, kind):
    alone = stepped(0, 1, "alone", way=way)
    for weights in run_threads(3, stepped, kind, 3, True, way):
        assert all(map(torch.equal, weights, alone))


def counted(rank, world, together):
    """A step without any gradient counts like the others: (the weight, the count)."""
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(8, 8, generator=generator).to(BF16))
    opt = package().Muon([param], lr=0.1, rounding="stochastic", process_group=dist.group.WORLD if together else None)
    for step in range(4):
        param.grad = torch.randn(8, 8, generator=generator).to(BF16) if step != 1 else None
        opt.step()
    return param.detach(), opt.param_groups[0]["rounding_step"]


def test_ranks_count_a_step_without_gradients_as_one_process_does(optimizer):
    weight, count = counted(0, 1, False)
    for other, also in run_threads(2, counted, True):
        assert also == count == 4 and torch.equal(other, weight)


@pytest.mark.parametrize("way", WAYS)
def test_every_form_of_a_step_draws(way, monkeypatch, optimizer):
    """Of each matrix some elements are rounded otherwise than to nearest."""
    drawn = stepped(0, 1, "alone", way=way)
    monkeypatch.setattr(part("kernels.elementwise.weight_update"), "rounded_torch", lambda values, *_: values)
    assert not any(map(torch.equal, drawn, stepped(0, 1, "alone", way=way)))


def test_groups_and_experts_have_bits_of_their_own(optimizer):
    """Equal weights and gradients: two experts of a stack, and two groups whose seeds differ."""
    full = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).to(BF16)
    stack, one, two = nn.Parameter(full.repeat(2, 1, 1)), nn.Parameter(full.clone()), nn.Parameter(full.clone())
    groups = [{"params": [p], "rounding_seed": seed} for seed, p in enumerate((stack, one, two))]
    opt = optimizer.Muon(groups, lr=1e-2, rounding="stochastic")
    for p in (stack, one, two):
        p.grad = torch.ones_like(p) * full
    opt.step()
    weights = [*stack.detach(), one.detach(), two.detach()]
    assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_names_give_parameters_bits_of_their_own(optimizer):
    named, unnamed = stepped(0, 1, "alone", 1), stepped(0, 1, "alone", 1, named=False)
    assert not any(map(torch.equal, named, unnamed))


def train(opt, weight, generator, steps):
    for _ in range(steps):
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        opt.step()


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True])
def test_graphs_have_the_bits_of_launches(capturable, optimizer, monkeypatch):
    """The key of a step is uploaded before each replay."""
    results = []
    for graphs in ("off", "auto"):
        monkeypatch.setenv("OPTIMIZER_GRAPHS", graphs)
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(96, 64, generator=generator).cuda().to(BF16))
        weight.grad = torch.empty_like(weight)
        opt = optimizer.Muon([weight], lr=1e-4, rounding="stochastic", rounding_seed=7, capturable=capturable)
        for _ in range(6):
            weight.grad.copy_(torch.randn(96, 64, generator=generator))
            opt.step()
        assert opt.param_groups[0]["rounding_step"] == 6
        results.append((weight.detach().clone(), opt.state[weight]["momentum_buffer"]))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("way", ["state_dict", "copy"])
def test_bits_go_on_after_a_resume(optimizer, way):
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(16, 24, generator=generator).to(BF16))
    opt = optimizer.Muon([weight], lr=1e-4, rounding="stochastic", rounding_seed=11)
    train(opt, weight, generator, 2)
    if way == "copy":
        other = copy.deepcopy(opt)
        twin = other.param_groups[0]["params"][0]
    else:
        twin = nn.Parameter(weight.detach().clone())
        other = optimizer.Muon([twin], lr=1e-4, rounding="stochastic")
        other.load_state_dict(copy.deepcopy(opt.state_dict()))
    start = generator.get_state()
    train(opt, weight, generator, 2)
    train(other, twin, generator.set_state(start), 2)
    assert torch.equal(weight, twin)
    assert (other.param_groups[0]["rounding_seed"], other.param_groups[0]["rounding_step"]) == (11, 4)
    # With another seed, or another count, the bits would differ
    anew = optimizer.Muon([nn.Parameter(twin.detach().clone())], lr=1e-4, rounding="stochastic", rounding_seed=11)
    again = anew.param_groups[0]["params"][0]
    anew.load_state_dict({**opt.state_dict(), "param_groups": [
        {**opt.state_dict()["param_groups"][0], "rounding_step": 9}]})
    train(opt, weight, generator.set_state(start), 1)
    train(anew, again, generator.set_state(start), 1)
    assert not torch.equal(weight, again)


def test_small_updates_move_bf16_weights_as_far_as_fp32_weights(optimizer):
    """At a learning rate of fine-tuning most updates are below half a unit in the last place. The random part of the
    movement is orthogonal to that of fp32 weights but for chance.
    """
    moved = {}
    for name, dtype, options in (("fp32", torch.float32, {}), ("nearest", BF16, {}),
                                 ("stochastic", BF16, {"rounding": "stochastic"})):
        generator = torch.Generator().manual_seed(0)
        start = 0.02 * torch.randn(64, 64, generator=generator)
        usual = torch.randn(64, 64, generator=generator)
        weight = nn.Parameter(start.to(dtype))
        before = weight.detach().float().clone()
        opt = optimizer.Muon([weight], lr=2e-5, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", **options)
        for _ in range(50):
            weight.grad = (usual + 0.1 * torch.randn(64, 64, generator=generator)).to(dtype)
            opt.step()
        moved[name] = weight.detach().float() - before
    along = {name: (change * moved["fp32"]).sum() / moved["fp32"].square().sum() for name, change in moved.items()}
    assert along["nearest"] < 0.3
    assert 0.9 < along["stochastic"] < 1.1


def test_groups_choose_and_change(optimizer):
    params = [nn.Parameter(torch.randn(8, 8).to(BF16)) for _ in range(2)] + [nn.Parameter(torch.randn(8))]
    groups = [{"params": params[:1]}, {"params": params[1:2], "rounding": "nearest"},
              {"params": params[2:], "use_muon": False}]
    opt = optimizer.Muon(groups, lr=1e-4, rounding="stochastic", rounding_seed=2)
    kept = [{key: group[key] for key in group if key.startswith("rounding")} for group in opt.param_groups]
    assert kept == [{"rounding": "stochastic", "rounding_seed": 2, "rounding_step": 0}, {"rounding": "nearest"}, {}]
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
    assert [group.get("rounding_step") for group in opt.param_groups] == [2, None, None]
    opt.param_groups[0]["rounding"] = "nearest"
    before = params[0].detach().clone()
    params[0].grad = torch.ones_like(params[0])
    opt.step()
    assert opt.param_groups[0]["rounding_step"] == 2  # nothing was drawn
    assert not opt._bound.inputs.draws and before.shape == params[0].shape


@pytest.mark.parametrize("group, options, message", [
    ({}, {"rounding": "up"}, "rounding='up' is not allowed: it must be one of"),
    ({"rounding": None}, {}, "rounding=None is not allowed"),
    ({"rounding": "stochastic", "rounding_seed": 1.0}, {}, "rounding_seed=1.0 is not allowed"),
    ({}, {"rounding_seed": -1}, "rounding_seed=-1 is not allowed"),
    ({"rounding": "stochastic", "rounding_step": True}, {}, "rounding_step=True is not allowed"),
    ({"rounding": "stochastic", "use_muon": False}, {}, "torch's kernels write the weights of AdamW"),
    ({"rounding": "stochastic", "rule": "hyperball"}, {}, "writes weights by formulas of its own"),
])
def test_what_is_refused(optimizer, group, options, message):
    with pytest.raises(ValueError, match=message):
        optimizer.Muon([{"params": [nn.Parameter(torch.ones(4, 4, dtype=BF16))], **group}], **options)


@pytest.mark.parametrize("groups", [1, 6])
@pytest.mark.parametrize("key, value", [("rounding_seed", "x"), ("rounding_step", -1), ("momentum_steps", 0.5)])
def test_wrong_numbers_set_between_steps_are_refused_by_the_step(optimizer, key, value, groups):
    """By name, as a wrong lr is, before anything changes; with many groups, too."""
    params = [nn.Parameter(torch.ones(4, 4, dtype=BF16)) for _ in range(groups)]
    opt = optimizer.Muon([{"params": [p]} for p in params], rounding="stochastic", momentum_form="bias_corrected")
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    before = [p.detach().clone() for p in params]
    opt.param_groups[-1][key] = value
    with pytest.raises(ValueError, match=f"in group {groups - 1} .*{key}={value!r} is not allowed: it must be a whole"):
        opt.step()
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_refused_with_the_reason(optimizer, dtype):
    with pytest.raises(ValueError, match="is for bf16 weights only: fp32 weights keep small updates"):
        optimizer.Muon([nn.Parameter(torch.ones(4, 4, dtype=dtype))], rounding="stochastic")


def test_a_graph_of_the_user_would_repeat_the_bits(optimizer, monkeypatch):
    weight = nn.Parameter(torch.ones(4, 4, dtype=BF16))
    opt = optimizer.Muon([weight], rounding="stochastic")
    weight.grad = torch.ones_like(weight)
    opt.step()
    monkeypatch.setattr(part("execution.step_inputs"), "capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="inside a CUDA graph of your own"):
        opt.step()


@pytest.mark.filterwarnings("ignore:.*has no weight_rest")
@pytest.mark.parametrize("way", ["state dict", "file"])
def test_runs_that_keep_small_updates_in_other_ways_load_each_other(optimizer, way, tmp_path):
    """Each goes on in its own way, with the momentum of the other."""
    ways = {"at random": (BF16, {"rounding": "stochastic"}), "fp32": (torch.float32, {}),
            "halves": (BF16, {"master_weights": "split16"})}

    def made(name):
        dtype, options = ways[name]
        weight = nn.Parameter(torch.eye(4, 6, dtype=dtype))
        opt = optimizer.Muon([("weight", weight)], **options)
        weight.grad = torch.ones_like(weight)
        return weight, opt

    for saved, here, told in (("at random", "fp32", "rounding='stochastic' of the state dict is not loaded"),
                              ("at random", "halves", "rounding='stochastic' of the state dict is not loaded"),
                              ("halves", "at random", "weight_rest of 1 parameters .* is not loaded")):
        (weight, source), (other, opt) = made(saved), made(here)
        source.step()
        keys = set(opt.param_groups[0])
        with pytest.warns(UserWarning, match=told):
            if way == "file":
                optimizer.export_state(source, tmp_path / "state.safetensors")
                optimizer.import_state(opt, tmp_path / "state.safetensors")
            else:
                opt.load_state_dict(source.state_dict())
        assert set(opt.param_groups[0]) == keys
        assert torch.equal(opt.state[other]["momentum_buffer"], source.state[weight]["momentum_buffer"])
        opt.step()

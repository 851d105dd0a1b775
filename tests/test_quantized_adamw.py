"""AdamW's averages in 8 bits: the format of squares, equal bits of kernel and torch, of every layout, and after loads;
faults, conversions, refusals.
"""
from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.paths import quiet, take
from tests.ranks import package, part, run_threads
from tests.test_bucket_updates import cut
from tests.test_muon import same
from tests.test_overlap_backward import come

pytestmark = quiet

INT8, F32, BF16 = torch.int8, torch.float32, torch.bfloat16
KEYS = ["exp_avg_8bit", "exp_avg_sq_8bit", "exp_avg_scale", "exp_avg_sq_scale"]


# format ------------------------------------------------------------------------------------------------------------

def test_each_square_becomes_the_nearest_value_and_none_above_zero_becomes_zero():
    squares = part("kernels.quantized.squares")
    torch.manual_seed(0)
    wide = torch.randn(12, 150) ** 2
    wide[:6] **= 6
    wide *= 10.0 ** torch.empty(12, 1).uniform_(-20, 20)
    wide[3, 5] = 0.0
    numbers, scales = squares.quantize(wide)
    assert numbers.dtype == torch.uint8 and scales.shape == (12, 3)
    back = squares.dequantize(numbers, scales)
    assert torch.equal(back == 0, wide == 0) and (wide < back.new_tensor(1e-10) * wide.amax(1, True)).any()
    known = (torch.arange(256).double() / 255) ** 4
    for i in range(12):
        for k in range(3):
            columns = slice(64 * k, min(64 * k + 64, 150))
            exact, largest = wide[i, columns].double(), wide[i, columns].max().double()
            nearest = (exact[:, None] - known[1:] * largest).abs().amin(1)
            lost = (exact - back[i, columns].double()).abs()
            assert (lost <= torch.where(exact > 0, nearest, 0) + 1e-6 * largest).all()
            assert scales[i, k] == wide[i, columns].max() and numbers[i, columns].max() == 255
    again = squares.quantize(back)
    assert torch.equal(again[0], numbers) and torch.equal(again[1], scales)


def test_squares_that_are_not_finite_read_as_nan():
    squares = part("kernels.quantized.squares")
    wide = torch.zeros(3, 70)
    wide[0], wide[1, 3], wide[2, 66] = 1e-39, math.inf, math.nan
    numbers, scales = squares.quantize(wide)
    back = squares.dequantize(numbers, scales)
    assert not numbers.any() and not back[0].any()
    assert back[1, :64].isnan().all() and not back[1, 64:].any()
    assert back[2, 64:].isnan().all() and not back[2, :64].any()


# kernel ------------------------------------------------------------------------------------------------------------

def averages_of(shape, device="cpu"):
    adamw, blocks, squares = (part(f"kernels.quantized.{name}") for name in ("adamw", "blocks", "squares"))
    m = torch.randn(shape) * torch.rand(shape[-1]) ** 3
    v = (m * torch.rand(shape) * 2) ** 2
    (mn, ms), (vn, vs) = blocks.quantize(m), squares.quantize(v)
    return adamw.Averages(*(t.contiguous().to(device) for t in (mn, vn, ms, vs)))


@pytest.mark.interpreter
@pytest.mark.parametrize("decay", [0, 1, 2])
@pytest.mark.parametrize("form", ["fp32", "split", "strided"])
def test_the_kernel_has_the_bits_of_torch_and_computes_the_formula(form, decay, device, monkeypatch):
    torch.manual_seed(decay)
    adamw, halves = part("kernels.quantized.adamw"), part("kernels.weights.split")
    shape = (3, 5, 200) if form == "fp32" else (7, 70)
    start, g, first = (torch.randn(shape, device=device) for _ in range(3))
    g[..., 2], g[..., 69] = 0.0, 1e-20
    averages, results = averages_of(shape, device), []
    blocks, squares = part("kernels.quantized.blocks"), part("kernels.quantized.squares")
    m, v = (f.dequantize(n, s).double() for f, n, s in zip((blocks, squares), averages[:2], averages[2:]))
    factors = torch.tensor([0.99, 0.01, 0.2, 0.7], device=device)
    constants = adamw.Constants.of(0.9, 0.95, 1e-8, decay)
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        own, w, rest = adamw.Averages(*(t.clone() for t in averages)), start.clone(), None
        if form == "split":
            w, rest = halves.split(w)
        if form == "strided":
            w = torch.empty(7, 90, device=device)[:, 3:73].copy_(w)
        adamw.step(w, g, own, factors, constants, rest, first if decay == 2 else None)
        results.append([w, *own, *(() if rest is None else (rest,))])
    assert all(map(torch.equal, *results))
    w = halves.wide_weight(w, rest).double()
    old, g = start.double(), g.double()
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    update = m / (v.sqrt() / 0.7 + 1e-8)
    decayed = [0.99 * old, torch.where(old * m < 0, old, 0.99 * old), old - 0.01 * (old - first.double())][decay]
    torch.testing.assert_close(w, decayed - 0.2 * update, rtol=1e-5, atol=1e-5)
    found = blocks.dequantize(own.m, own.m_scale).double()
    assert ((found - m).abs() <= 0.017 * m.abs().amax(-1, True)).all()
    found = squares.dequantize(own.v, own.v_scale).double()
    assert ((found - v).abs() <= 0.008 * v.amax(-1, True)).all()


def test_slices_of_rows_have_the_bits_of_the_whole(monkeypatch):
    adamw, results = part("kernels.quantized.adamw"), []
    torch.manual_seed(0)
    start, g, averages = torch.randn(9, 130), torch.randn(9, 130), averages_of((9, 130))
    for most in (1 << 18, 300):
        monkeypatch.setattr(adamw, "SLICE", most)
        w, own = start.clone(), adamw.Averages(*(t.clone() for t in averages))
        adamw.step(w, g, own, torch.tensor([0.9, 0.1, 0.2, 0.7]), adamw.Constants.of(0.9, 0.95, 1e-8, 0))
        results.append([w, *own])
    assert all(map(torch.equal, *results))


# steps -------------------------------------------------------------------------------------------------------------

def adamw_of(params, dtype=INT8, names="abcdef", group=(), **options):
    named = list(zip(names, params))
    return package().Muon([{"params": named, "use_muon": False, "lr": 0.01, "state_dtype": dtype, **dict(group)}],
                          **options)


def go_on(params, optimizer, seeds, scale=1.0):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)
        optimizer.step()


def trained(dtype, seeds, shapes=((20, 130), (3, 6, 64), (7,), (9, 5)), **more):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = adamw_of(params, dtype, **more)
    go_on(params, optimizer, seeds)
    return params, optimizer


def test_only_rows_of_a_block_or_more_are_in_8_bits(optimizer):
    params, muon = trained(INT8, [0])
    for p in params[:2]:
        state = muon.state[p]
        assert sorted(state) == sorted([*KEYS, "step"]) and state["step"] == 1
        assert [state[key].dtype for key in KEYS] == [INT8, torch.uint8, F32, F32]
        assert [tuple(state[key].shape) for key in KEYS[::2]] == [p.shape, (*p.shape[:-1], -(-p.shape[-1] // 64))]
    for p in params[2:]:
        assert sorted(muon.state[p]) == ["exp_avg", "exp_avg_sq", "step"] and muon.state[p]["exp_avg"].dtype == F32
    fp64 = nn.Parameter(torch.randn(4, 64, dtype=torch.float64))
    go_on([fp64], other := adamw_of([fp64]), [0])
    assert other.state[fp64]["exp_avg"].dtype == torch.float64


@pytest.mark.parametrize("decay", ["decoupled", "cautious", "initial", "independent"])
def test_a_first_step_is_that_of_fp32(decay, optimizer):
    """Its averages are not rounded before the weight is written."""
    group = {"decay": decay, "weight_decay": 0.1}
    (p, *_), _ = trained(INT8, [0], group=group)
    (q, *_), _ = trained(F32, [0], group=group)
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def moved(gradients, dtype, betas=(0.9, 0.95), lr=1.0):
    """The movement of a weight in each step, in steps of lr."""
    p = nn.Parameter(torch.zeros(gradients[0].shape))
    muon, found = adamw_of([p], dtype, group={"betas": betas, "lr": lr, "weight_decay": 0.0}), []
    for g in gradients:
        before = p.detach().clone()
        p.grad = g
        muon.step()
        found.append((p.detach() - before) / lr)
    return torch.stack(found)


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_no_step_is_larger_for_a_second_moment_that_rounds_to_zero(beta2, optimizer):
    """Columns of sizes from 1 to 1e-12, beside each other in a block. Rounding to the least number doubles a first
    moment at most, and divides a second one by at most (1 + 16) / 2.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** -torch.linspace(0, 12, 64)
    gradients = [torch.randn(8, 64, generator=generator) * sizes for _ in range(60)]
    ours, exact = moved(gradients, INT8, (0.9, beta2)), moved(gradients, F32, (0.9, beta2))
    assert ours.isfinite().all() and ours.abs().max() < 2 * 8.5**0.5 * exact.abs().max()
    assert (ours - exact)[..., :4].norm() < 0.1 * exact[..., :4].norm()


def test_an_element_without_gradient_comes_to_rest(optimizer):
    """Beside others that go on; and a row without any gradient has the steps of fp32."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(4, 64, generator=generator) + 0.3 for _ in range(150)]
    for g in gradients[50:]:
        g[:, ::8] = 0.0
        g[3] = 0.0
    ours, exact = moved(gradients, INT8), moved(gradients, F32)
    assert ours[49, :, ::8].abs().min() > 0 and not ours[-1, :3, ::8].any() and ours[-1, :3, 1].all()
    assert (ours - exact)[60:80, 3].norm() < 0.1 * exact[60:80, 3].norm()


def final_loss(dtype, seed):
    """Of a small network on a function of its inputs: the mean over the last 10 of 60 steps, in parts of the first."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 8))
    teacher = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).requires_grad_(False)
    muon, losses = adamw_of(list(model.parameters()), dtype, group={"lr": 3e-3}), []
    for _ in range(60):
        x = torch.randn(64, 64)
        loss = (model(x) - teacher(x)).square().mean()
        muon.zero_grad()
        loss.backward()
        muon.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10 / losses[0]


def test_a_small_network_learns_as_with_fp32(optimizer):
    """Within 2 %."""
    wide, narrow = ([final_loss(dtype, seed) for seed in range(2)] for dtype in (None, INT8))
    assert all(abs(ours / theirs - 1) < 0.02 for ours, theirs in zip(narrow, wide)), (wide, narrow)
    assert max(wide) < 0.2 and narrow != wide


# layouts -----------------------------------------------------------------------------------------------------------

def layouts():
    """name: (mesh shape, placements of a matrix, of a stack); without placements plain parameters."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    R, S = Replicate(), Shard
    return {
        "ddp": ((2,),), "owners": ((3,),), "unreduced": ((4,),),
        "rows, uneven": ((3,), [S(0)], [S(1)]), "columns": ((2,), [S(1)], [S(2)]),
        "hsdp": ((2, 2), [R, S(0)], [R, S(1)]), "ep": ((3,), [R], [S(0)]),
        "tp columns x fsdp rows": ((2, 2), [S(0), S(1)], [S(0), S(2)]),
        "strided": ((2, 2), [_StridedShard(0, split_factor=2), S(0)], [_StridedShard(1, split_factor=2), S(1)]),
    }


OWNERS = {"owners": {"shard_state": True}, "unreduced": {"grads_are_reduced": False, "wire_dtype": F32}}
SHAPES = [(10, 256), (3, 12, 128), (70, 65), (9,), (4, 5)]


def fulls_and_gradients(strided=False):
    generator = torch.Generator().manual_seed(1)
    shapes = [(12, 256), *SHAPES[1:]] if strided else SHAPES
    fulls = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [[torch.randint(-127, 128, f.shape, generator=generator) / 16 for f in fulls] for _ in range(4)]
    gradients[1][0][3, 5] = math.nan
    return fulls, gradients


def place_on(rank, world, layout):
    """(function that places a whole tensor, arguments of the optimizer)."""
    from torch.distributed.tensor import Replicate, init_device_mesh

    shape, *placements = layouts().get(layout, ((1,),))
    if not placements:
        return lambda t: t.clone(), {"process_group": dist.group.WORLD, **OWNERS.get(layout, {})} if world > 1 else {}
    mesh = init_device_mesh("cpu", shape)

    def place(t):
        # The last matrix, a vector and a small matrix lie on rows or are whole
        if tuple(t.shape) == (70, 65) and any(p.is_shard(1) for p in placements[0]):
            return cut(t, mesh, [Replicate()] * len(shape))
        whole = [Replicate()] * len(shape)
        return cut(t, mesh, placements[t.ndim - 2] if t.ndim > 1 and t.numel() > 20 else whole)

    return place, {}


def steps_on(rank, world, layout, then=None, steps=(range(2), range(2, 4)), saved=None, more=(), dtypes=(INT8, INT8)):
    """Whole weights and states after the first steps and, with `then`, after a load into this layout and the rest."""
    fulls, gradients = fulls_and_gradients(layout == "strided")
    for where, some, dtype in zip(filter(None, (layout, then)), steps, dtypes):
        place, options = place_on(rank, world, where)
        params = [nn.Parameter(place(f)) for f in fulls]
        muon = adamw_of(params, dtype, **{"nonfinite": "skip", **options, **dict(more)})
        if saved is not None:
            muon.load_state_dict(saved)
        for i in some:
            muon.zero_grad()
            with muon.last_backward():
                for p, g in zip(params, gradients[i]):
                    come(p, place(g))
            muon.step()
        muon.wait()
        saved = muon.state_dict()
        fulls = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in params]
    states = [saved["state"][i] for i in range(len(params))]
    return [{"weight": w, **{key: getattr(t, "full_tensor", lambda t=t: t)().clone() for key, t in state.items()}}
            for w, state in zip(fulls, states)]


def different(ours, theirs):
    assert [sorted(state) for state in ours] == [sorted(state) for state in theirs]
    return [(i, key) for i, (a, b) in enumerate(zip(ours, theirs)) for key in a if not torch.equal(a[key], b[key])]


@pytest.mark.parametrize("layout", layouts())
def test_the_bits_of_one_process_on_every_layout(layout, optimizer):
    """In four steps, one of them with a NaN that is skipped."""
    expected = steps_alone(layout == "strided")
    world = math.prod(layouts()[layout][0])
    for found in run_threads(world, steps_on, layout, None, [range(4)]):
        assert different(found, expected) == []


def steps_alone(strided=False, steps=4):
    fulls, gradients = fulls_and_gradients(strided)
    params = [nn.Parameter(f.clone()) for f in fulls]
    muon = adamw_of(params, nonfinite="skip")
    for some in gradients[:steps]:
        for p, g in zip(params, some):
            p.grad = g.clone()
        muon.step()
    return [{"weight": p.detach(), **muon.state[p]} for p in params]


@pytest.mark.parametrize("layout, then", [("rows, uneven", "owners"), ("owners", "rows, uneven"),
                                          ("columns", "ddp"), ("unreduced", "ep")])
@pytest.mark.parametrize("dtypes", [(INT8, INT8), (None, INT8), (INT8, None)], ids=str)
def test_a_load_into_another_layout_goes_on_with_the_bits(layout, then, dtypes, optimizer):
    """Also where the format changes on the way, as in one process."""
    if math.prod(layouts()[layout][0]) != math.prod(layouts()[then][0]):
        then = "ddp"
    world = math.prod(layouts()[layout][0])
    expected = steps_on(0, 1, "alone", "alone", dtypes=dtypes)
    assert ("exp_avg_8bit" in expected[0]) == (dtypes[1] is INT8)
    for found in run_threads(world, steps_on, layout, then, (range(2), range(2, 4)), None, (), dtypes):
        assert different(found, expected) == []


@pytest.mark.parametrize("option", ["overlap_backward", "overlap_forward"])
def test_overlap_leaves_the_bits(option, optimizer):
    more = {"nonfinite": "propagate", option: True}
    expected = steps_on(0, 1, "alone", steps=[[0, 2, 3]], more={"nonfinite": "propagate"})
    for found in run_threads(4, steps_on, "unreduced", None, [[0, 2, 3]], None, more):
        assert different(found, expected) == []


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True])
def test_cuda_graphs_have_the_bits_of_steps_from_python(capturable, monkeypatch):
    """While lr changes in every step."""
    results = []
    for graphs in ("auto", "off"):
        monkeypatch.setenv("OPTIMIZER_GRAPHS", graphs)
        fulls, _ = fulls_and_gradients()
        params = [nn.Parameter(full.cuda()) for full in fulls]
        muon = adamw_of(params, nonfinite="skip", capturable=capturable and graphs == "auto")
        for p in params:
            p.grad = torch.empty_like(p)
        for i in range(6):
            muon.param_groups[0]["lr"] = 0.01 / (i + 1)
            for p in params:
                p.grad.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
            params[0].grad[3, 5] = math.nan if i == 4 else 1.0
            muon.step()
        results.append([t.detach() for p in params for t in (p, *muon.state[p].values())])
    assert same(*results)


# saved state -------------------------------------------------------------------------------------------------------

def through_memory(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_averages_in_8_bits_are_saved_and_go_on(optimizer, tmp_path):
    """By torch.save, as a file of this package, and as a copy."""
    params, muon = trained(INT8, range(3))
    optimizer.export_state(muon, tmp_path / "state.safetensors")
    saved, weights, heirs = through_memory(muon), copy.deepcopy([p.detach() for p in params]), []
    for way in ("file", "torch", "copy"):
        others, heir = trained(INT8, [])
        if way == "copy":
            heir = copy.deepcopy(muon)
            others = [p for group in heir.param_groups for p in group["params"]]
        elif way == "torch":
            heir.load_state_dict(saved)
        else:
            optimizer.import_state(heir, tmp_path / "state.safetensors")
        for p, w in zip(others, weights):
            p.data.copy_(w)
        go_on(others, heir, [3])
        heirs.append((others, heir))
    go_on(params, muon, [3])
    for others, heir in heirs:
        assert same(params, others) and heir.param_groups[0]["state_dtype"] is INT8
        assert all(same(list(heir.state[q].values()), list(muon.state[p].values())) for p, q in zip(params, others))


@pytest.mark.parametrize("way", ["state dict", "file", "live"])
@pytest.mark.parametrize("was, now", [(None, INT8), (INT8, None), (BF16, INT8), (INT8, BF16), (None, BF16),
                                      (BF16, None)], ids=str)
def test_a_load_converts_averages(was, now, way, optimizer, tmp_path):
    """And so does a change of the key in a live group. The group keeps its own dtype."""
    blocks, squares = part("kernels.quantized.blocks"), part("kernels.quantized.squares")
    params, source = trained(was, range(3))
    before = copy.deepcopy(source.state_dict()["state"])
    if way == "live":
        source.param_groups[0]["state_dtype"] = now
        source.init_state()
        others, heir = params, source
    else:
        others, heir = trained(now, [0])
        if way == "file":
            optimizer.export_state(source, tmp_path / "state.safetensors")
            optimizer.import_state(heir, tmp_path / "state.safetensors")
        else:
            heir.load_state_dict(through_memory(source))
    assert heir.param_groups[0]["state_dtype"] is now
    for i, p in enumerate(others[:2]):
        state, old = heir.state[p], before[i]
        if now is INT8:
            (m, ms), (v, vs) = blocks.quantize(old["exp_avg"].float()), squares.quantize(old["exp_avg_sq"].float())
            expected = dict(zip(KEYS, (m, v, ms, vs)))
        elif was is not INT8:
            expected = {key: old[key].to(now or F32) for key in ("exp_avg", "exp_avg_sq")}
        else:
            wide = [blocks.dequantize(*(old[key] for key in KEYS[::2])),
                    squares.dequantize(*(old[key] for key in KEYS[1::2]))]
            expected = dict(zip(("exp_avg", "exp_avg_sq"), (t.to(now or F32) for t in wide)))
        assert sorted(state) == sorted([*expected, "step"]) and state["step"] == 3
        assert all(torch.equal(state[key], value) for key, value in expected.items())
        assert all(state[key].dtype is value.dtype for key, value in expected.items())
    go_on(others, heir, [3])
    assert sorted(heir.state[others[0]]) == sorted([*expected, "step"]) and heir.state[others[0]]["step"] == 4


PAIRS = [(INT8, INT8), (None, INT8), (INT8, None)]  # state_dtype of the group that saves, and of the group that loads


@pytest.mark.parametrize("was, now", PAIRS, ids=str)
def test_a_checkpoint_of_torch_keeps_the_bits_or_misses_keys(was, now, optimizer, tmp_path):
    import torch.distributed.checkpoint as dcp

    params, source = trained(was, range(2))
    dcp.save({"optimizer": source.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    others, muon = trained(now, [])
    muon.init_state()
    loaded = {"optimizer": muon.state_dict()}
    if was is not now:
        with pytest.raises(BaseException, match="Missing key.*exp_avg"):
            dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
        return
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    muon.load_state_dict(loaded["optimizer"])
    assert muon.param_groups[0]["state_dtype"] is now
    assert all(torch.equal(muon.state[q][key], t) for p, q in zip(params, others) for key, t in source.state[p].items())


@pytest.mark.parametrize("was, now", PAIRS, ids=str)
def test_formats_that_torch_mixes_are_refused(was, now, optimizer):
    """set_optimizer_state_dict adds saved averages to new ones of the optimizer."""
    from torch.distributed.checkpoint import state_dict as dsd

    states, options = [], dsd.StateDictOptions(full_state_dict=True)
    for dtype in (was, now):
        model = nn.Linear(70, 4, bias=False)
        muon = adamw_of(list(model.parameters()), dtype, ["weight"])
        if not states:
            go_on(list(model.parameters()), muon, range(2))
            saved = dsd.get_optimizer_state_dict(model, muon, options=options)
        elif was is not now:
            with pytest.raises(ValueError, match="parameter weight has averages in 8 bits and wide ones: torch's set_"):
                dsd.set_optimizer_state_dict(model, muon, saved, options=options)
            return
        else:
            dsd.set_optimizer_state_dict(model, muon, saved, options=options)
        states.append(muon.state[model.weight])
    assert all(torch.equal(states[0][key], states[1][key]) for key in (*KEYS, "step"))


DAMAGES = {
    "no scales": (lambda s: s.pop("exp_avg_scale"), "exp_avg_scale"),
    "no numbers": (lambda s: s.pop("exp_avg_sq_8bit"), "exp_avg_sq_8bit"),
    "scales of other blocks": (lambda s: s.update(exp_avg_scale=torch.ones(20, 2)), r"exp_avg_scale .*\(20, 2\)"),
    "other numbers": (lambda s: s.update(exp_avg_sq_8bit=s["exp_avg_sq_8bit"].to(INT8)),
                      "exp_avg_sq_8bit of parameter a has dtype torch.int8"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("dtype", [INT8, None], ids=str)
def test_damaged_state_is_refused(damage, dtype, optimizer):
    change, message = DAMAGES[damage]
    _, source = trained(INT8, [0])
    saved = copy.deepcopy(source.state_dict())
    change(saved["state"][0])
    _, muon = trained(dtype, [1])
    before = copy.deepcopy(muon.state_dict()["state"])
    with pytest.raises(ValueError, match=message):
        muon.load_state_dict(saved)
    for number, state in muon.state_dict()["state"].items():
        assert same(list(state.values()), list(before[number].values()))


# faults ------------------------------------------------------------------------------------------------------------

def state_of(optimizer, param):
    return [t.clone() for t in (param.detach(), *optimizer.state[param].values())]


@pytest.mark.parametrize("fault", ["missing", "scaler", "scaler in step", "raise"])
def test_a_step_that_is_left_out_changes_nothing(fault, optimizer):
    options = {"raise": {"nonfinite": "raise"}, "scaler in step": {"unscale_in_step": True}}.get(fault, {})
    params, muon = trained(INT8, [0], **options)
    before = state_of(muon, params[0])
    others = state_of(muon, params[1])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    gradients = [torch.randn(p.shape) for p in params]
    gradients[0][3, 70] = math.inf
    muon.zero_grad()
    for p, g in zip(params, gradients):
        p.grad = None if fault == "missing" and p is params[0] else g
    if "scaler" in fault:
        scaler.scale(torch.zeros(()))
        scaler.step(muon)
        scaler.update()
        assert scaler.get_scale() == 1.0
    elif fault == "raise":
        with pytest.raises(RuntimeError, match="nonfinite|non-finite|NaN"):
            muon.step()
    else:
        muon.step()
    assert same(state_of(muon, params[0]), before)
    assert same(state_of(muon, params[1]), others) == (fault != "missing")


def test_a_nan_spoils_its_block_alone(optimizer):
    """nonfinite="propagate"; a load repairs it."""
    params, muon = trained(INT8, [0])
    saved = copy.deepcopy(muon.state_dict())
    for p in params:
        p.grad = torch.randn(p.shape)
    params[0].grad[3, 70] = math.nan
    muon.step()
    assert params[0].isnan().nonzero().tolist() == [[3, 70]]
    for key in KEYS[2:]:
        assert muon.state[params[0]][key].isnan().nonzero().tolist() == [[3, 1]]
    muon.load_state_dict(saved)
    go_on(params, muon, [1])
    assert muon.state[params[0]][KEYS[2]].isfinite().all()


def test_a_step_that_creates_state_only_leaves_zeros(optimizer):
    """As torch.distributed.checkpoint takes one: lr 0, gradients of zero."""
    params, muon = trained(INT8, [])
    muon.param_groups[0]["lr"] = 0.0
    for p in params:
        p.grad = torch.zeros_like(p)
    muon.step()
    assert not any(t.any() for state in muon.state.values() for t in state.values())


# fp32 weights in halves, metrics, memory ---------------------------------------------------------------------------

def test_split_weights_have_the_bits_of_fp32_weights(optimizer):
    results = []
    start = torch.randn(20, 130)
    for dtype in (F32, BF16):
        p = nn.Parameter(start.to(dtype, copy=True))
        muon = adamw_of([p], master_weights=None if dtype == F32 else "split16")
        muon.load_master_weights({"a": start})
        for seed in range(3):
            p.grad = torch.randn(20, 130, generator=torch.Generator().manual_seed(seed)).to(BF16).to(dtype)
            muon.step()
        results.append([muon.master_weights()["a"], *(muon.state[p][key] for key in KEYS)])
    assert same(*results) and not torch.equal(results[0][0], start)


def of_metrics(rank, world, layout):
    fulls, gradients = fulls_and_gradients()
    place, options = place_on(rank, world, layout)
    params = [nn.Parameter(place(f)) for f in fulls]
    muon = adamw_of(params, **options)
    muon.collect_metrics = True
    for p, g in zip(params, gradients[0]):
        p.grad = place(g)
    muon.step()
    return muon.metrics().as_dict()["muon/group0/momentum_norm"]


def test_metrics_read_the_averages_in_fp32(optimizer):
    _, gradients = fulls_and_gradients()
    exact = 0.1 * math.sqrt(sum(g.square().sum().item() for g in gradients[0]))
    assert math.isclose(of_metrics(0, 1, "alone"), exact, rel_tol=0.01)
    for layout in ("rows, uneven", "owners"):
        assert all(math.isclose(found, exact, rel_tol=0.01) for found in run_threads(3, of_metrics, layout))


@pytest.mark.parametrize("shape", [(2, 7, 130), (9, 64)])
def test_metrics_widen_the_elements_that_they_read(shape, monkeypatch):
    adamw, blocks = part("kernels.quantized.adamw"), part("kernels.quantized.blocks")
    m, scale = blocks.quantize(torch.randn(shape) * torch.rand(shape[-1]) ** 3)
    wide, places = blocks.dequantize(m, scale), torch.randperm(m.numel())[:200]
    whole, = adamw.wide_momenta([m], [scale], [None])
    monkeypatch.setattr(blocks, "dequantize", None)
    some, = adamw.wide_momenta([m], [scale], [places])
    assert torch.equal(whole, wide) and torch.equal(some, wide.reshape(-1)[places])


def of_memory(rank, world, layout, nonfinite):
    """(report before the first step, after it) as {row: bytes}; bytes of state of the rank."""
    fulls, gradients = fulls_and_gradients()
    place, options = place_on(rank, world, layout)
    params = [nn.Parameter(place(f)) for f in fulls]
    muon = adamw_of(params, nonfinite=nonfinite, **options)
    local, reports = part("params.dtensor").local_of, [muon.memory_report()]
    for p, g in zip(params, gradients[0]):
        p.grad = place(g)
    muon.step()
    reports.append(muon.memory_report())
    held = sum(local(t).nbytes for state in muon.state.values() for t in state.values())
    return [{(r.kind, r.what, r.dtype): r.nbytes for r in one.rows if r.kind != "tables" and r.nbytes}
            for one in reports], held, reports[1].bytes_of("state")


@pytest.mark.parametrize("layout", ["rows, uneven", "owners"])
def test_the_memory_report_is_exact(layout, optimizer):
    for nonfinite in ("propagate", "skip"):
        for (before, after), held, reported in run_threads(3, of_memory, layout, nonfinite):
            assert before == after and held == reported


def test_bytes_of_each_parameter(optimizer):
    (p,), muon = trained(INT8, [0], [(64, 1024)])
    assert sum(t.nbytes for key, t in muon.state[p].items() if key != "step") / p.numel() == 2.125


# refusals ----------------------------------------------------------------------------------------------------------

def test_what_cannot_be_is_refused(optimizer):
    matrix = nn.Parameter(torch.ones(4, 64))
    for rule in ("lion", "sgd", "sign"):
        with pytest.raises(ValueError, match=f"state_dtype=torch.int8 with rule='{rule}': only AdamW keeps"):
            adamw_of([matrix], group={"rule": rule})
    for dtype in (torch.uint8, torch.float16, "int8"):
        with pytest.raises(ValueError, match="state_dtype=.* is not allowed: it must be one of .*torch.int8"):
            adamw_of([matrix], dtype)
    with pytest.raises(ValueError, match="state_dtype=torch.int8 is an argument of the optimizer"):
        optimizer.Muon([{"params": [matrix], "state_dtype": INT8}])
    with pytest.raises(NotImplementedError, match="parameter a: state_dtype=torch.int8 .* offload_state .* leave one"):
        adamw_of([matrix], offload_state=True)
    adamw_of([nn.Parameter(torch.ones(64))], offload_state=True)
    # AdamW's averages follow the group, others the optimizer
    assert not part("rules.elementwise").is_8bit(adamw_of([matrix], None, state_dtype=INT8).param_groups[0], matrix)


def sharded_within_blocks(rank, world):
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    with pytest.raises(NotImplementedError, match=r"parameter a of shape \(8, 96\).*each 64 columns.*Shard rows"):
        adamw_of([nn.Parameter(cut(torch.ones(8, 96), mesh, [Shard(1)]))])
    adamw_of([nn.Parameter(cut(torch.ones(8, 128), mesh, [Shard(1)]))])


def test_columns_sharded_within_blocks_are_refused(optimizer):
    run_threads(2, sharded_within_blocks)


def differing(rank, world):
    muon = adamw_of([nn.Parameter(torch.ones(8, 64))], INT8 if rank else None, process_group=dist.group.WORLD)
    muon.param_groups[0]["params"][0].grad = torch.ones(8, 64)
    with pytest.raises(RuntimeError, match="differ in: group option state_dtype"):
        muon.step()


def test_ranks_with_different_formats_are_told(optimizer):
    run_threads(2, differing)

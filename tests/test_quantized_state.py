"""8-bit momentum of an optimizer: on every layout the bits of one process, also after a load from another layout;
faults, conversions, training, refusals.
"""
from __future__ import annotations

import copy
import io
import math
import re

import pytest
import torch
from torch import nn

from tests.ranks import package, part, run_ranks, run_threads
from tests.test_bucket_updates import cut
from tests.test_muon import same
from tests.test_rule_protocol import alone
from tests.test_units import OWNERS, layouts, stepped

INT8, F32, BF16 = torch.int8, torch.float32, torch.bfloat16
NO_LAYOUT = "tp columns x fsdp columns, strided"  # parts of a convolution there begin within blocks


def problem_of(layout, rule):
    """Matrices, a stack and convolutions whose columns are cut at multiples of 64 on every layout; of three steps, one
    with a NaN.
    """
    even = "strided" in layout or layout == "interleaved"
    transposable = rule == "muon" or layout not in OWNERS and layout != "interleaved"
    members = [((12 if even else 10, 768), None, False), ((8, 768), {"heads": 3, "dim": 1}, False),
               ((4, 8, 768), {"rows": [2, 6]}, False), ((8, 768), {"rows": [4, 4]}, transposable)]
    if layout not in ("interleaved", NO_LAYOUT):
        members += [((8, 384, 3), "flatten", False), ((8, 384, 1, 2), "taps", False)]
    generator = torch.Generator().manual_seed(0)

    def gradient(shape):  # the sum over 4 equal ranks is exact
        return torch.randint(-127, 128, shape, generator=generator) / 16

    gradients = [[gradient(shape) for shape, *_ in members] for _ in range(3)]
    gradients[1][0][3, 5] = math.nan
    return {"members": members, "form": "list", "fulls": [torch.randn(m[0], generator=generator) for m in members],
            "gradients": gradients, "options": {"nonfinite": "skip", "state_dtype": INT8}, "has_little_room": False}


def on_rank(rank, world, layout, problem, expected, rule, more=None):
    return stepped(rank, world, layout, [("Muon", problem, expected)], {"rule": rule, **(more or {})})


# On other layouts Muon's
OF_RULES = {"hsdp columns": "muon_plus", "tp columns x fsdp rows": "normuon", "unreduced": "hyperball"}


@pytest.mark.parametrize("layout, rule", [(layout, OF_RULES.get(layout, "muon")) for layout in layouts()])
def test_the_bits_of_one_process_on_every_layout(layout, rule, optimizer):
    problem = problem_of(layout, rule)
    expected = alone(problem, rule, {})
    assert all(state["momentum_buffer"].dtype == INT8 for state in expected)
    world = math.prod(layouts()[layout][0])
    assert [wrong for found in run_threads(world, on_rank, layout, problem, expected, rule) for wrong in found] == []


@pytest.mark.parametrize("option", ["overlap_backward", "overlap_forward"])
def test_overlap_leaves_the_bits(option, optimizer):
    layout = "tp columns x fsdp rows"
    problem = problem_of(layout, "muon")
    problem["options"]["nonfinite"], problem["gradients"][1][0][3, 5] = "propagate", 1.0
    expected = alone(problem, "muon", {})
    for wrong in run_threads(4, on_rank, layout, problem, expected, "muon", {option: True}):
        assert wrong == []


def as_on_one_device(rank, world, device, options):
    """(placement, number, key) of what differs from steps of this device alone."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    mesh, wrong = init_device_mesh(device, (world,)), []
    generator = torch.Generator(device).manual_seed(0)
    fulls = [torch.randn(shape, generator=generator, device=device) for shape in ((96, 256), (40, 128), (3, 24, 384))]
    gradients = [[torch.randn(f.shape, generator=generator, device=device) for f in fulls] for _ in range(5)]
    gradients[2][0][5, 70] = math.nan

    def run(place, **more):
        params = [nn.Parameter(place(full)) for full in fulls]
        named = [(f"w{i}", p) for i, p in enumerate(params)]
        muon = package().NorMuon(named, lr=0.1, state_dtype=INT8, nonfinite="skip", **more)
        for some in gradients:
            for p, g in zip(params, some):
                p.grad = place(g)
            muon.step()
        return [{"weight": p.detach(), **muon.state[p]} for p in params]

    expected = run(torch.clone)
    for placement in (Shard(0), Shard(1), Replicate()):
        found = run(lambda full, one=placement: cut(full, mesh, [one]), **options)
        wrong += [(str(placement), i, key) for i, (ours, theirs) in enumerate(zip(found, expected))
                  for key in theirs if not torch.equal(ours[key].full_tensor(), theirs[key])]
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.gpus(2))])
@pytest.mark.parametrize("capturable", [False, True])
def test_the_bits_of_one_gpu(capturable, world, optimizer):
    """In parts replayed as graphs, and as one graph."""
    found = run_ranks(world, as_on_one_device, "cuda", {"capturable": capturable}, backend="nccl")
    assert found == [[]] * world


FORMS = {"corrected": {"momentum_form": "bias_corrected"}, "sum": {"momentum_form": "sum"},
         "signs": {"rule": "adamuon"}, "rounded": {"rounding": "stochastic"}, "mean": {}}


def third_step(options):
    """Weights after three steps, and numbers and scales of the momentum; before the third, the momentum of fp32 becomes
    that of 8 bits.
    """
    torch.manual_seed(0)
    start, grads = torch.randn(20, 130), torch.randn(3, 20, 130)
    if "rounding" in options:
        start, grads = start.bfloat16(), grads.bfloat16()
    eight, wide = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours = package().Muon([eight], lr=0.1, state_dtype=INT8, **options)
    theirs = package().Muon([wide], lr=0.1, **options)
    for i, g in enumerate(grads):
        if i == 2:
            wide.data.copy_(eight.detach())
            theirs.load_state_dict(ours.state_dict())
        for p, one in ((eight, ours), (wide, theirs)):
            p.grad = g.clone()
            one.step()
    numbers, scales, *_ = ours.state[eight].values()
    (momentum, *_) = theirs.state[wide].values()
    expected = part("kernels.quantized.blocks").quantize(momentum.float())
    return [eight.detach().float(), numbers, scales], [wide.detach().float(), *expected]


def test_all_forms_of_momentum_have_the_update_of_fp32_momentum(optimizer):
    """Computed before the new momentum is rounded, to the nearest."""
    found = {}
    for form, options in FORMS.items():
        ours, expected = third_step(options)
        assert all(map(torch.equal, ours, expected)), form
        found[form] = ours[0]
    assert all(not torch.equal(found[a], found[b]) for a in found for b in found if a < b)


@pytest.mark.parametrize("rule", ["adamw", "lion", "sgd", "sign"])
def test_elementwise_rules_keep_fp32(rule, optimizer, tmp_path):
    """Also after a load and through a file; SGD and sign keep a key of Muon's momentum."""
    torch.manual_seed(0)
    starts, grads, results = [torch.randn(6, 70), torch.randn(6, 70)], torch.randn(3, 2, 6, 70), []
    for dtype in (F32, INT8):
        ours, made = [], []
        for _ in range(3):
            params = [nn.Parameter(s.clone()) for s in starts]
            ours.append(params)
            groups = [{"params": [("a", params[0])]}, {"params": [("b", params[1])], "use_muon": False, "rule": rule}]
            made.append(optimizer.Muon(groups, lr=0.1, state_dtype=dtype))
        for step, some in enumerate(grads):
            if step == 2:
                made[1].load_state_dict(made[0].state_dict())
                optimizer.export_state(made[0], tmp_path / "state.safetensors")
                optimizer.import_state(made[2], tmp_path / "state.safetensors")
                for params in ours[1:]:
                    params[1].data.copy_(ours[0][1].detach())
            for params, one in zip(ours, made) if step == 2 else [(ours[0], made[0])]:
                for p, g in zip(params, some):
                    p.grad = g.clone()
                one.step()
        results += [[params[1].detach(), *one.state[params[1]].values()] for params, one in zip(ours, made)]
    assert {t.dtype for t in results[0]} == {F32}
    assert all(same(results[0], other) for other in results[1:])


@pytest.mark.parametrize("form, rule, key", [("ema", "sign", "momentum_buffer"), ("sum", "sgd", "momentum_sum")])
def test_8_bit_momentum_is_not_read_by_a_rule_of_elements(form, rule, key, optimizer):
    p = nn.Parameter(torch.randn(6, 70))
    p.grad = torch.randn(6, 70)
    muon = optimizer.Muon([("w", p)], state_dtype=INT8, momentum_form=form)
    muon.step()
    muon.param_groups[0].update(use_muon=False, rule=rule, radius=1.0)
    with pytest.raises(RuntimeError, match=f"{key} of parameter w is torch.int8.*reads torch.float32"):
        muon.step()


# conversions -------------------------------------------------------------------------------------------------------

def trained(dtype, gradients, name="Muon", **options):
    """Parameters (20, 130) and (3, 6, 64), and one of AdamW, after these steps."""
    torch.manual_seed(0)
    shapes = [(20, 130), (3, 6, 64), (5, 4)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    named = [("a", params[0]), ("b", params[1])]
    optimizer = getattr(package(), name)(
        [{"params": named, **options}, {"params": [("c", params[2])], "use_muon": False}], lr=0.02, state_dtype=dtype)
    go_on(params, optimizer, gradients)
    return params, optimizer


def go_on(params, optimizer, seeds):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def through_memory(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("form", ["ema", "sum"])
def test_momentum_in_8_bits_is_saved_and_goes_on(form, optimizer, tmp_path):
    """By torch.save, as a file of this package, and as a copy."""
    key = {"ema": "momentum_buffer", "sum": "momentum_sum"}[form]
    params, muon = trained(INT8, range(3), "NorMuon", momentum_form=form)
    assert list(muon.state[params[0]]) == [key, "momentum_scale", "second_moment"]
    assert muon.state[params[0]][key].dtype == INT8 and muon.state[params[0]]["momentum_scale"].shape == (20, 3)
    assert muon.state[params[2]]["exp_avg"].dtype == F32  # AdamW has no 8 bits
    optimizer.export_state(muon, tmp_path / "state.safetensors")
    saved, weights, heirs = through_memory(muon), copy.deepcopy([p.detach() for p in params]), []
    for way in ("file", "torch", "copy"):
        others, heir = trained(INT8, [], "NorMuon", momentum_form=form)
        if way == "copy":
            heir = copy.deepcopy(muon)
            others = [p for group in heir.param_groups for p in group["params"]]
        elif way == "torch":
            heir.load_state_dict(saved)
        else:
            optimizer.import_state(heir, tmp_path / "state.safetensors")
        for other, weight in zip(others, weights):
            other.data.copy_(weight)
        heirs.append((others, heir))
    go_on(params, muon, range(3, 6))
    for others, heir in heirs:
        go_on(others, heir, range(3, 6))
        assert same(others, params)


@pytest.mark.parametrize("was, now", [(F32, INT8), (BF16, INT8), (INT8, F32), (INT8, BF16)], ids=str)
@pytest.mark.parametrize("way", ["state dict", "file"])
def test_momentum_of_another_dtype_is_converted_by_loading(was, now, way, optimizer, tmp_path):
    _, source = trained(was, range(3))
    params, muon = trained(now, [])
    if way == "file":
        optimizer.export_state(source, tmp_path / "state.safetensors")
        optimizer.import_state(muon, tmp_path / "state.safetensors")
    else:
        muon.load_state_dict(source.state_dict())
    blocks = part("kernels.quantized.blocks")
    for p, ours in zip(params[:2], list(source.state.values())[:2]):
        theirs = muon.state[p]
        if now == INT8:
            numbers, scales = blocks.quantize(ours["momentum_buffer"].float())
            assert torch.equal(theirs["momentum_buffer"], numbers) and torch.equal(theirs["momentum_scale"], scales)
        else:
            wide = blocks.dequantize(ours["momentum_buffer"], ours["momentum_scale"])
            assert torch.equal(theirs["momentum_buffer"], wide.to(now)) and "momentum_scale" not in theirs
    go_on(params, muon, [3])


@pytest.mark.parametrize("shape, split", [((6, 70, 3), "flatten"), ((6, 70, 1, 2), "taps"), ((130, 5), None)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_of_convolutions_and_of_transposed_weights(shape, split, transposed, optimizer):
    """Loaded momentum has the blocks in which a step reads and writes it."""
    torch.manual_seed(0)
    wide, narrow, grad = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.zeros(shape)), torch.randn(shape)
    group = {"split": split, "transposed": transposed}
    muon = optimizer.Muon([{"params": [wide], **group}])
    eight = optimizer.Muon([{"params": [narrow], **group}], state_dtype=INT8, momentum=0.0)
    for p, one in ((wide, muon), (narrow, eight)):
        p.grad = grad.clone()
        one.step()
    of_step = [t.clone() for t in eight.state[narrow].values()]  # with momentum 0, of the gradient
    muon.state[wide]["momentum_buffer"].copy_(grad)
    eight.load_state_dict(muon.state_dict())
    assert same(of_step, list(eight.state[narrow].values()))
    muon.load_state_dict(eight.state_dict())
    back = muon.state[wide]["momentum_buffer"]
    assert back.shape == grad.shape and (back - grad).norm() < 0.01 * grad.norm()


def test_a_mean_in_8_bits_becomes_a_sum(optimizer):
    ours, source = trained(INT8, range(3))
    params, muon = trained(INT8, [], momentum_form="sum")
    muon.load_state_dict(source.state_dict())
    blocks = part("kernels.quantized.blocks")
    for p, q in zip(ours[:2], params):
        mean, total = ([state[key], state["momentum_scale"]] for state, key in (
            (source.state[p], "momentum_buffer"), (muon.state[q], "momentum_sum")))
        torch.testing.assert_close(blocks.dequantize(*total), blocks.dequantize(*mean) * 20, rtol=1e-5, atol=1e-6)


def columns_to_rows(rank, world):
    """An fp32 optimizer sharded by columns within blocks takes an 8-bit state sharded by rows, and the other way."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh, wrong = init_device_mesh("cpu", (world,)), []
    torch.manual_seed(0)
    full, grad = torch.randn(8, 130), torch.randn(8, 130)
    blocks = part("kernels.quantized.blocks")

    def built(dtype, dim):
        place = [Shard(dim)]
        param = nn.Parameter(distribute_tensor(full, mesh, place))
        param.grad = distribute_tensor(grad, mesh, place)
        return param, package().Muon([param], lr=0.1, state_dtype=dtype)

    (eight, source), (wide, target), (again, last) = built(INT8, 0), built(F32, 1), built(INT8, 0)
    source.step()
    target.load_state_dict(source.state_dict())
    state = {key: value.full_tensor() for key, value in source.state[eight].items()}
    expected = blocks.dequantize(state["momentum_buffer"], state["momentum_scale"])
    wrong += ["widened"] * (not torch.equal(target.state[wide]["momentum_buffer"].full_tensor(), expected))
    last.load_state_dict(target.state_dict())
    numbers, scales = blocks.quantize(expected)
    found = {key: value.full_tensor() for key, value in last.state[again].items()}
    wrong += ["numbers"] * (not torch.equal(found["momentum_buffer"], numbers))
    return wrong + ["scales"] * (not torch.equal(found["momentum_scale"], scales))


def test_conversion_between_layouts(optimizer):
    assert run_threads(3, columns_to_rows) == [[]] * 3


def filters_loaded(rank, world, was, now):
    """Filters as rows, of which the last rank has none; whether a load works there, too."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))

    def built(dtype):
        param = nn.Parameter(distribute_tensor(torch.ones(2, 2, 3, 1), mesh, [Shard(0)]))
        param.grad = torch.ones_like(param)
        return package().Muon([{"params": [param], "split": "flatten"}], lr=0.1, state_dtype=dtype)

    source, target = built(was), built(now)
    source.step()
    target.load_state_dict(source.state_dict())
    target.step()
    return True


@pytest.mark.parametrize("was, now", [(INT8, INT8), (F32, INT8), (INT8, F32)])
def test_filters_load_where_a_rank_has_none(was, now, optimizer):
    """One rank raised, and the others waited."""
    assert run_threads(3, filters_loaded, was, now) == [True] * 3


def test_numbers_without_their_scales_are_refused(optimizer, tmp_path):
    """torch.distributed.checkpoint casts what it reads to the dtype of the tensor that it loads into."""
    import torch.distributed.checkpoint as dcp

    params, source = trained(INT8, range(3))
    dcp.save({"optimizer": source.state_dict()}, checkpoint_id=tmp_path / "8 bits", no_dist=True)
    _, wide = trained(F32, [9])
    before, copies = (copy.deepcopy(wide.state_dict()) for _ in "12")
    dcp.load({"optimizer": copies}, checkpoint_id=tmp_path / "8 bits", no_dist=True)
    with pytest.raises(ValueError, match="momentum_buffer of parameter a holds whole numbers up to 127.*in 8 bits"):
        wide.load_state_dict(copies)
    assert same([s["momentum_buffer"] for s in list(wide.state_dict()["state"].values())[:2]],
                [s["momentum_buffer"] for s in list(before["state"].values())[:2]])
    dcp.save({"optimizer": wide.state_dict()}, checkpoint_id=tmp_path / "fp32", no_dist=True)
    with pytest.raises(BaseException, match="Missing key.*momentum_scale"):
        dcp.load({"optimizer": copy.deepcopy(source.state_dict())}, checkpoint_id=tmp_path / "fp32", no_dist=True)


def by_torch(rank, world, was, now, sharded, broadcast):
    """For an optimizer of the dtype `now`, at last: whether the momentum is the saved one after a load by torch's
    set_optimizer_state_dict, or the message of its error. For one case, before that for the dtype `was`.
    """
    from torch.distributed.checkpoint import state_dict as dsd
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    def built(dtype):
        model = nn.Linear(70, 4, bias=False)
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        return model, package().Muon(package().get_default_muon_param_groups(model), lr=0.1, state_dtype=dtype)

    def momentum_of(muon):
        (state,) = [{key: value.full_tensor() if sharded else value for key, value in one.items()}
                    for one in muon.state.values()]
        values = state["momentum_buffer"]
        wide = part("kernels.quantized.blocks").dequantize
        return wide(values, state["momentum_scale"]) if values.dtype == INT8 else values

    torch.manual_seed(0)
    model, source = built(was)
    for p in model.parameters():
        p.grad = torch.ones_like(p) * 0.3  # a cast to int8 makes zeros of it
    source.step()
    full = dsd.StateDictOptions(full_state_dict=True, cpu_offload=broadcast)
    saved = dsd.get_optimizer_state_dict(model, source, options=full)
    options = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    found = []
    for dtype in [was] * (sharded and broadcast) + [now]:
        model, muon = built(dtype)
        try:
            dsd.set_optimizer_state_dict(model, muon, saved if rank == 0 or not broadcast else {}, options=options)
            found.append(torch.allclose(momentum_of(muon), momentum_of(source), rtol=0.02))
        except ValueError as error:
            found.append(str(error))
    return found


def all_by_torch(rank, world, cases):
    return {case: by_torch(rank, world, *case) for case in cases}


def test_formats_that_torch_mixes_are_refused(optimizer):
    """set_optimizer_state_dict copies fp32 into new int8 numbers, and leaves the new scales as they are."""
    ways = [(sharded, broadcast) for sharded in (True, False) for broadcast in (True, False)]
    cases = [(*pair, *way) for pair in ((F32, INT8), (INT8, F32)) for way in ways] + [(BF16, INT8, True, True)]
    for of_rank in run_ranks(2, all_by_torch, cases):
        for case, (*same_dtype, other) in of_rank.items():
            assert all(found is True for found in same_dtype), case
            if other is not True:
                assert re.search("saved [a-z_]*_dtype, then pass that optim|has cast the num", other), case
            # torch passes whole plain tensors on as saved, with broadcast on rank 0
            assert other is not True or case[:3] == (INT8, F32, False), case


def test_new_state_is_loaded_as_new(optimizer, tmp_path):
    """Of a parameter that no step has written, beside one with momentum; the next step has the bits of both."""
    params, muon = trained(INT8, [])
    muon.init_state()
    go_on(params[1:], muon, [3])
    blocks = part("kernels.quantized.blocks")
    others, heir = trained(INT8, [])
    wides, wide = trained(F32, [])
    for other in (heir, wide):
        other.load_state_dict(through_memory(muon))
    assert not wide.state[wides[0]]["momentum_buffer"].any()
    numbers, scales = heir.state[others[0]].values()
    assert same([numbers, scales], list(muon.state[params[0]].values())) and scales.signbit().all()
    assert not blocks.dequantize(numbers, scales).any()
    others[1].data.copy_(params[1].detach())
    for some, one in ((params, muon), (others, heir)):
        some[2].data.zero_()
        go_on(some, one, [4])
    assert same(params, others)


DAMAGES = {
    "other numbers": (lambda s: s["momentum_buffer"].clamp_(-126, 126), INT8, "of parameter a are not those that"),
    "other numbers, fp32": (lambda s: s["momentum_scale"].zero_(), F32, "of parameter a are not those that"),
    "no scales": (lambda s: s.pop("momentum_scale"), INT8, "momentum_buffer of parameter a has dtype torch.int8"),
    "no scales, fp32": (lambda s: s.pop("momentum_scale"), F32, "momentum_buffer of parameter a has dtype torch.int8"),
    "scales of other blocks": (lambda s: s.update(momentum_scale=torch.ones(20, 2)), INT8,
                               r"momentum_scale of parameter a has shape \(20, 2\)"),
    "scales of other blocks, fp32": (lambda s: s.update(momentum_scale=torch.ones(20, 2)), F32,
                                     r"parameter a has momentum_scale of shape \(20, 2\).*needs \(20, 3\)"),
    "scales of fp32": (lambda s: s.update(momentum_buffer=torch.ones(20, 130)), INT8, "needs .* beside torch.int8"),
    "scales alone": (lambda s: s.pop("momentum_buffer"), INT8, "needs momentum_buffer, momentum_scale"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_8_bit_state_is_refused(damage, optimizer):
    change, dtype, message = DAMAGES[damage]
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


def test_a_missing_gradient_leaves_numbers_and_scales(optimizer):
    params, muon = trained(INT8, range(2))
    before = state_of(muon, params[0])
    for p in params[1:]:
        p.grad = torch.randn(p.shape)
    params[0].grad = None
    others = state_of(muon, params[1])
    muon.step()
    assert same(state_of(muon, params[0]), before) and not same(state_of(muon, params[1]), others)


def some_are_missing(rank, world):
    """State of a parameter without gradient on any rank, and of one with a gradient on the other rank only."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    fulls, grads = torch.randn(2, 6, 130), torch.randn(3, 2, 6, 130)
    named = [(name, nn.Parameter(cut(full, mesh, [Shard(0)]))) for name, full in zip("ab", fulls)]
    params = [p for _, p in named]
    muon = package().Muon(named, lr=0.1, state_dtype=INT8)
    for step, some in enumerate(grads):
        for i, (p, g) in enumerate(zip(params, some)):
            missing = step == 1 and (i == 0 or rank == 0)
            p.grad = None if missing else cut(g, mesh, [Shard(0)])
        muon.step()
    return [{key: value.full_tensor() for key, value in muon.state[p].items()} for p in params]


def test_missing_gradients_on_some_ranks(optimizer):
    first, second = run_threads(2, some_are_missing)
    torch.manual_seed(0)
    fulls, grads = torch.randn(2, 6, 130), torch.randn(3, 2, 6, 130)
    grads[1, 1, :3] = 0  # rows of rank 0
    params = [nn.Parameter(full.clone()) for full in fulls]
    muon = optimizer.Muon(params, lr=0.1, state_dtype=INT8)
    for step, some in enumerate(grads):
        for i, (p, g) in enumerate(zip(params, some)):
            p.grad = None if step == 1 and i == 0 else g.clone()
        muon.step()
    for found in (first, second):
        for p, ours in zip(params, found):
            assert same(list(muon.state[p].values()), list(ours.values()))


@pytest.mark.parametrize("in_step", [False, True])
def test_a_scaler_leaves_out_steps_with_inf(in_step, optimizer):
    torch.manual_seed(0)
    weight, grads = torch.randn(6, 130), torch.randn(4, 6, 130)
    p, q = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    muon = optimizer.Muon([p], lr=0.1, state_dtype=INT8, unscale_in_step=in_step)
    plain = optimizer.Muon([q], lr=0.1, state_dtype=INT8)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i, g in enumerate(grads):
        muon.zero_grad()
        wrong = g.clone()
        wrong[2, 3] = math.inf if i == 2 else g[2, 3]
        scaler.scale((p * wrong).sum()).backward()
        scaler.step(muon)
        scaler.update()
        if i != 2:
            q.grad = g.clone()
            plain.step()
    assert same(state_of(muon, p), state_of(plain, q)) and scaler.get_scale() == 512.0


def test_a_nan_spoils_its_matrix_alone(optimizer):
    """nonfinite="propagate": as in fp32, and a load repairs it. "raise": nothing changes."""
    params, muon = trained(INT8, [0])
    saved = copy.deepcopy(muon.state_dict())
    for p in params:
        p.grad = torch.randn(p.shape)
    params[0].grad[3, 70] = math.nan
    muon.step()
    assert params[0].isnan().all() and params[1].isfinite().all()
    scales = muon.state[params[0]]["momentum_scale"]
    assert scales.isnan().nonzero().tolist() == [[3, 1]]
    del muon.state[params[0]]["momentum_buffer"]  # new numbers have new scales
    go_on(params, muon, [1])
    assert muon.state[params[0]]["momentum_scale"].isfinite().all()
    muon.load_state_dict(saved)
    assert muon.state[params[0]]["momentum_scale"].isfinite().all()
    strict = optimizer.Muon([params[1]], state_dtype=INT8, nonfinite="raise")
    params[1].grad = torch.randn(3, 6, 64)
    strict.step()
    before = state_of(strict, params[1])
    params[1].grad[0, 0, 0] = math.inf
    with pytest.raises(RuntimeError, match="nonfinite|non-finite|NaN"):
        strict.step()
    assert same(state_of(strict, params[1]), before)


def test_state_of_another_dtype_that_was_put_in_place_is_refused(optimizer):
    """It would be misread."""
    for dtype, other in ((INT8, F32), (F32, INT8)):
        params, muon = trained(dtype, [0])
        muon.state[params[0]]["momentum_buffer"] = torch.zeros(20, 130, dtype=other)
        with pytest.raises(RuntimeError, match=f"momentum_buffer of parameter a is {other}.*pass the state to load"):
            go_on(params, muon, [1])


def test_numbers_that_lost_their_scales_are_not_stepped(optimizer):
    params, muon = trained(INT8, [0])
    before = params[0].detach().clone()
    del muon.state[params[0]]["momentum_scale"]
    with pytest.raises(RuntimeError, match="momentum_scale of parameter a is missing.*delete both entries"):
        go_on(params, muon, [1])
    assert torch.equal(params[0], before)
    del muon.state[params[0]]["momentum_buffer"]
    go_on(params, muon, [1])
    others, fresh = trained(INT8, [])
    others[0].data.copy_(before)
    go_on(others, fresh, [1])
    assert torch.equal(params[0], others[0])


def test_a_change_of_the_split_says_which_entries_to_delete(optimizer):
    """And a load says how to keep the momentum, which is followed here."""
    torch.manual_seed(0)

    def built(split, dtype):
        p = nn.Parameter(torch.randn(6, 70, 3))
        p.grad = torch.randn(6, 70, 3)
        return p, optimizer.Muon([{"params": [("w", p)], "split": split}], state_dtype=dtype)

    (p, muon), (q, wide), (r, other) = (built(*one) for one in (
        ("flatten", INT8), ("flatten", F32), ("taps", INT8)))
    muon.step()
    with pytest.raises(ValueError, match="the saved split and state_dtype=torch.float32"):
        other.load_state_dict(muon.state_dict())
    wide.load_state_dict(muon.state_dict())
    other.load_state_dict(wide.state_dict())
    blocks, momentum = part("kernels.quantized.blocks"), wide.state[q]["momentum_buffer"]
    numbers, scales = (blocks.matrices_of(t, "taps") for t in other.state[r].values())
    error = blocks.dequantize(numbers, scales) - blocks.matrices_of(momentum, "taps")
    assert momentum.any() and error.norm() < 0.01 * momentum.norm()
    muon.param_groups[0]["split"] = "taps"
    with pytest.raises(RuntimeError, match="Delete the momentum and momentum_scale in the optimizer's `state`"):
        muon.step()
    del muon.state[p]["momentum_buffer"], muon.state[p]["momentum_scale"]
    muon.step()


# training ----------------------------------------------------------------------------------------------------------

def final_loss(dtype, seed):
    """Of a small network on a function of its inputs: the mean over the last 10 of 50 steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 70), nn.Tanh(), nn.Linear(70, 8))
    teacher = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)).requires_grad_(False)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    muon = package().Muon([{"params": matrices, "weight_decay": 0.0}, {"params": rest, "use_muon": False}], lr=0.01,
                          state_dtype=dtype)
    losses = []
    for step in range(50):
        muon.param_groups[0]["lr"] = 0.01 * (1 - step / 50)
        x = torch.randn(64, 16)
        loss = (model(x) - teacher(x)).square().mean()
        muon.zero_grad()
        loss.backward()
        muon.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


def test_a_small_network_learns_as_with_fp32(optimizer):
    """Within 2 %: seeds differ by more."""
    wide, narrow = ([final_loss(dtype, seed) for seed in range(2)] for dtype in (F32, INT8))
    assert all(abs(ours / theirs - 1) < 0.02 for ours, theirs in zip(narrow, wide)), (wide, narrow)
    assert abs(wide[0] / wide[1] - 1) > 0.02


# refusals ----------------------------------------------------------------------------------------------------------

def test_what_cannot_be_is_refused_at_construction(optimizer):
    def muon(shape, **group):
        return optimizer.Muon([{"params": [("w", nn.Parameter(torch.ones(shape)))], **group}], state_dtype=INT8)

    muon((8, 256), split={"heads": 4, "dim": 1})
    with pytest.raises(NotImplementedError, match=r"parameter w of shape \(8, 96\).*each 64 columns.*multiples of 64"):
        muon((8, 96), split={"heads": 2, "dim": 1})
    with pytest.raises(NotImplementedError, match="each 64 columns"):
        muon((96, 8), split={"heads": 2}, transposed=True) and muon((8, 96), split={"columns": [32, 64]})

    class Own(optimizer.Rule):
        name = "a momentum of its own"

        def update(self, G, M, numbers):
            return G, G

    with pytest.raises(NotImplementedError, match="overrides `update`.*state_dtype=torch.bfloat16"):
        muon((8, 64), rule=Own)
    for rule in ("dion2", "dion3"):
        with pytest.raises(NotImplementedError, match=f"rule='{rule}' keeps what it does not.*state_dtype=torch.bf"):
            muon((8, 64), rule=rule)
    for dtype in (torch.float8_e4m3fn, torch.uint8, torch.float16):
        with pytest.raises(ValueError, match="state_dtype=torch.*must be one of.*torch.int8"):
            optimizer.Muon([nn.Parameter(torch.ones(4, 4))], state_dtype=dtype)


def sharded_within_blocks(rank, world):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    param = nn.Parameter(distribute_tensor(torch.ones(8, 96), mesh, [Shard(1)]))
    with pytest.raises(NotImplementedError, match=r"parameter w of shape \(8, 96\).*begins within them. Shard rows"):
        package().Muon([("w", param)], state_dtype=INT8)
    package().Muon([nn.Parameter(distribute_tensor(torch.ones(8, 128), mesh, [Shard(1)]))], state_dtype=INT8)


def test_columns_sharded_within_blocks_are_refused(optimizer):
    run_threads(2, sharded_within_blocks)


def test_bytes_of_each_parameter(optimizer):
    """At most 1.1, with blocks of 64."""
    p = nn.Parameter(torch.randn(64, 1024))
    p.grad = torch.randn(64, 1024)
    muon = optimizer.Muon([p], state_dtype=INT8)
    muon.step()
    assert sum(t.nbytes for t in muon.state[p].values()) / p.numel() == 1.0625

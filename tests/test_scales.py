"""`adjust_lr_fn` as a number, as a function of (R, C), and by the names of other packages."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from tests.ranks import package, part, run_threads
from tests.test_bucket_updates import cut
from tests.test_same_bits import shown_state

SHAPES = [(12, 8), (6, 10), (3, 8, 6)]


def area(rows, columns):
    """A function that pickle finds."""
    return 0.01 * rows * columns


def weights(shapes=SHAPES):
    return [nn.Parameter(torch.randn(s, generator=torch.Generator().manual_seed(i))) for i, s in enumerate(shapes)]


def train(optimizer, params, steps=2):
    for step in range(steps):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
        optimizer.step()
    return [p.detach().clone() for p in params]


def stepped(steps=2, group=None, shapes=SHAPES, **options):
    params = weights(shapes)
    optimizer = package().Muon([{"params": params, **(group or {})}], **options)
    return train(optimizer, params, steps), optimizer


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["original", "match_rms_adamw", "spectral_norm", "sqrt_max"])
def test_a_function_has_the_bits_of_the_name(name, optimizer):
    scales = part("rules.muon").SCALES
    assert same(stepped(adjust_lr_fn=name)[0], stepped(adjust_lr_fn=lambda R, C: scales[name](R, C))[0])


def test_names_of_one_formula_have_equal_bits(optimizer):
    for names in (
        ("original", "shape_scaling", None),
        ("spectral_norm", "spectral_unclamped", "unit_rms_norm"),
        ("match_rms_adamw", "rms_norm"),
    ):
        found = [stepped(adjust_lr_fn=name)[0] for name in names]
        assert all(same(found[0], other) for other in found)


def test_a_number_is_the_factor_of_all_shapes(optimizer):
    assert same(stepped(adjust_lr_fn=0.5)[0], stepped(adjust_lr_fn=lambda R, C: 0.5)[0])
    one = stepped(1, adjust_lr_fn=1, lr=0.5, weight_decay=0.0)[0]
    half = stepped(1, adjust_lr_fn=0.5, lr=1.0, weight_decay=0.0)[0]
    assert same(one, half)


def test_a_function_gets_the_shape_of_each_unit(optimizer):
    seen = set()

    def scale(rows, columns):
        seen.add((rows, columns))
        return 1.0

    group = {"params": weights([(12, 8), (6, 10)]), "split": [{"rows": [4, 8]}, None], "transposed": [False, True]}
    built = optimizer.Muon([group], adjust_lr_fn=scale)
    assert seen == {(4, 8), (8, 8), (10, 6)}
    train(built, group["params"], 1)
    assert seen == {(4, 8), (8, 8), (10, 6)}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("spectral", ["'spectral'", "'sqrt_max'", "'spectral_norm'"]),
        ("rms", ["'rms'", "a finite number > 0"]),
        (0, ["adjust_lr_fn=0 "]),
        (-1.0, ["adjust_lr_fn=-1.0 "]),
        (math.inf, ["inf"]),
        (math.nan, ["nan"]),
        (1e39, ["1e+39"]),
        (True, ["True"]),
        ([1.0], ["[1.0]", "a function of (rows, columns)"]),
        (lambda R, C: 0.0, ["parameter first", "(12, 8)", "returned 0.0"]),
        (lambda R, C: -1 if (R, C) == (6, 10) else 1, ["parameter second", "(6, 10)", "returned -1"]),
        (lambda R, C: math.nan, ["returned nan"]),
        (lambda R, C: "1", ["returned '1'"]),
        (lambda R, C: None, ["None"]),
        (lambda R: R, ["raised TypeError", "two ints"]),
        (lambda R, C: 1 / 0, ["raised ZeroDivisionError"]),
    ],
    ids=map(str, range(16)),
)
def test_a_wrong_factor_is_refused_at_construction(value, words, optimizer):
    named = list(zip(("first", "second", "third"), weights()))
    with pytest.raises(ValueError) as raised:
        optimizer.Muon([{"params": named, "adjust_lr_fn": value}])
    assert all(word in str(raised.value) for word in [*words, "group 0"])


def test_a_wrong_factor_is_refused_in_add_param_group_and_before_a_step(optimizer):
    (one, two), built = stepped(1, shapes=SHAPES[:2])
    with pytest.raises(ValueError, match=r"\(3, 5\), returned 0"):
        built.add_param_group({"params": weights([(3, 5)]), "adjust_lr_fn": lambda R, C: 0})
    assert len(built.param_groups) == 1
    built.param_groups[0]["adjust_lr_fn"] = lambda R, C: 0
    params = built.param_groups[0]["params"]
    with pytest.raises(ValueError, match="returned 0"):
        train(built, params, 1)
    assert same([p.detach() for p in params], [one, two])


def test_adamw_groups_never_call_the_function(optimizer):
    params = weights([(4, 4)]) + [nn.Parameter(torch.ones(3))]
    groups = [{"params": params[:1]}, {"params": params[1:], "use_muon": False}]
    train(optimizer.Muon(groups, adjust_lr_fn=lambda R, C: {(4, 4): 2.0}[R, C]), params)


def test_groups_with_equal_factors_are_stepped_together(optimizer):
    """Two functions with the same factors, as made anew for each group."""
    params = weights(SHAPES[:2] * 2)
    groups = [{"params": params[i : i + 2], "adjust_lr_fn": (lambda R, C: 0.1 * R)} for i in (0, 2)]
    built = optimizer.Muon(groups)
    found = train(built, params)
    assert len(built._bound.jobs) == 1
    one = weights(SHAPES[:2] * 2)
    assert same(found, train(optimizer.Muon(one, adjust_lr_fn=lambda R, C: 0.1 * R), one))
    built.param_groups[1]["adjust_lr_fn"] = lambda R, C: 0.2 * R
    train(built, params)
    assert len(built._bound.jobs) == 2


# state -------------------------------------------------------------------------------------------------------------


def test_a_saved_function_needs_a_function(optimizer):
    saved = stepped(adjust_lr_fn=area)[1].state_dict()
    for value in (None, 0.5, "original"):
        other = optimizer.Muon(weights(), adjust_lr_fn=value)
        with pytest.raises(ValueError, match="parameter group 0 was saved with a function as adjust_lr_fn"):
            other.load_state_dict(saved)
        assert not other.state
    with pytest.raises(ValueError, match="'function' is not allowed"):
        optimizer.Muon(weights(), adjust_lr_fn="function")


def test_a_state_dict_holds_no_function(optimizer):
    found, one = stepped(adjust_lr_fn=lambda R, C: 0.5)
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["param_groups"][0]["adjust_lr_fn"] == "function" and callable(one.param_groups[0]["adjust_lr_fn"])
    params = [nn.Parameter(w.clone()) for w in found]
    other = optimizer.Muon(params, adjust_lr_fn=area)
    other.load_state_dict(optimizer.convert_state_dict(saved))
    assert other.param_groups[0]["adjust_lr_fn"] is area
    other.param_groups[0]["adjust_lr_fn"] = 0.5
    assert same(train(other, params, 1), train(one, one.param_groups[0]["params"], 1))


def test_a_saved_name_or_number_replaces_the_function(optimizer):
    for value in ("match_rms_adamw", 0.5, None):
        saved = stepped(adjust_lr_fn=value)[1].state_dict()
        other = optimizer.Muon(weights(), adjust_lr_fn=area)
        other.load_state_dict(saved)
        assert other.param_groups[0]["adjust_lr_fn"] == value


@pytest.mark.parametrize("value", [area, 0.5, "sqrt_max"])
def test_files_of_one_process(value, tmp_path, optimizer):
    names = ["a", "b", "c"]

    def built(params, value):
        return optimizer.Muon([{"params": list(zip(names, params))}], adjust_lr_fn=value)

    params = weights()
    one = built(params, value)
    train(one, params)
    optimizer.export_state(one, tmp_path / "state.safetensors")
    for own in (area,) if value is area else (area, 2.0, None):
        other = built([nn.Parameter(p.detach().clone()) for p in params], own)
        optimizer.import_state(other, tmp_path / "state.safetensors")
        assert other.param_groups[0]["adjust_lr_fn"] == (own if value is area else value)


def test_copies_keep_the_function(optimizer):
    _, one = stepped(adjust_lr_fn=area)
    found = []
    for made in (copy.deepcopy(one), copy.copy(one)):
        assert made.param_groups[0]["adjust_lr_fn"] is area
    for made in (copy.deepcopy(one), one):
        found.append(train(made, made.param_groups[0]["params"], 1))
    assert same(*found)
    stepped_by_lambda = stepped(adjust_lr_fn=lambda R, C: 0.5)[1]
    assert callable(copy.deepcopy(stepped_by_lambda).param_groups[0]["adjust_lr_fn"])


@pytest.mark.parametrize("flat", [False, True])
def test_torchs_distributed_checkpoint(flat, tmp_path, optimizer):
    def built():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(12, 4, bias=False))
        return model, optimizer.Muon(model.parameters(), adjust_lr_fn=lambda R, C: 0.5)

    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, one = built()
    train(one, list(model.parameters()))
    dcp.save({"optimizer": get_optimizer_state_dict(model, one, options=how)}, checkpoint_id=tmp_path)
    again, other = built()
    again.load_state_dict(model.state_dict())
    state = {"optimizer": get_optimizer_state_dict(again, other, options=how)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(again, other, state["optimizer"], options=how)
    assert callable(other.param_groups[0]["adjust_lr_fn"])
    assert same(train(one, list(model.parameters())), train(other, list(again.parameters())))


# ranks -------------------------------------------------------------------------------------------------------------


def sharded(rank, world, layout):
    """Weights and state after two steps, whole."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    dims, options = {
        "rows": ([0], {}),
        "columns": ([1], {}),
        "hsdp": ([None, 0], {}),
        "tp x fsdp": ([0, 1], {}),
        "ddp": (None, {}),
        "shard_state": (None, {"shard_state": True}),
        "unreduced": (None, {"grads_are_reduced": False}),
    }[layout]
    if dims is None:
        options["process_group"] = dist.group.WORLD

        def place(full):
            return full.clone()
    else:
        mesh = init_device_mesh("cpu", (world,) if len(dims) == 1 else (2, world // 2))
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims]

        def place(full):
            return cut(full, mesh, placements)

    params = [nn.Parameter(place(p.detach())) for p in weights([(10, 7), (5, 12)])]
    # A function of its own on each rank, with equal factors
    built = package().Muon(params, adjust_lr_fn=lambda R, C: 0.1 * R + 0.01 * C, wire_dtype=torch.float32, **options)
    for step in range(2):
        for i, p in enumerate(params):
            p.grad = place(torch.randint(-9, 9, p.shape, generator=torch.Generator().manual_seed(10 * step + i)) / 4)
        built.step()
    state = shown_state(built)
    tensors = [t for p in params for t in (p.detach(), *state[p].values())]
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]


@pytest.mark.parametrize("layout", ["rows", "columns", "hsdp", "tp x fsdp", "ddp", "shard_state", "unreduced"])
def test_a_piece_has_the_factor_of_its_whole_matrix(layout, optimizer):
    params = weights([(10, 7), (5, 12)])
    one = optimizer.Muon(params, adjust_lr_fn=lambda R, C: 0.1 * R + 0.01 * C, wire_dtype=torch.float32)
    for step in range(2):
        for i, p in enumerate(params):
            p.grad = torch.randint(-9, 9, p.shape, generator=torch.Generator().manual_seed(10 * step + i)) / 4
        one.step()
    expected = [t for p in params for t in (p.detach(), *one.state[p].values())]
    for found in run_threads(4, sharded, layout):
        assert same(found, expected)


def told(rank, world, odd):
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(cut(p.detach(), mesh, [Shard(0)])) for p in weights()]
    scales = {"function": lambda R, C: R + (C == 10), "name": "original", "number": 2.0}
    built = package().Muon(params, adjust_lr_fn=scales[odd] if rank == 2 else lambda R, C: R)
    for p in params:
        p.grad = torch.ones_like(p)
    try:
        built.step()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("odd", ["function", "name", "number"])
def test_ranks_compare_the_factors(odd, optimizer):
    for message in run_threads(4, told, odd, timeout=20):
        assert "group option adjust_lr_fn" in message and "[2]" in message

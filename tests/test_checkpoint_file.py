"""The state of one process in one safetensors file: what is in it, what comes back, and what is refused."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from tests.ranks import package, part, run_threads


def assert_equal(first, second):
    """Nested dicts and lists of tensors and options: the same bits, dtypes and values."""
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second) and first.dtype == second.dtype
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_equal(first[key], second[key])
    elif isinstance(first, list):
        assert len(first) == len(second)
        for a, b in zip(first, second):
            assert_equal(a, b)
    else:
        assert first == second


class Model(nn.Module):
    def __init__(self, dtype=torch.float32, **shapes):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        usual = {"up": (12, 8), "down": (8, 12), "experts": (3, 4, 6), "embed": (10, 4), "scale": ()}
        for name, shape in {**usual, **shapes}.items():
            if shape is not None:
                self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))


def build(model, make="NorMuon", split=1, **options):
    """The first `split` parameters in one group, the other matrices in another; AdamW for the rest."""
    named = list(model.named_parameters())
    matrices = [pair for pair in named if pair[0] not in ("embed", "scale")]
    groups = [{"params": matrices[:split], "momentum": 0.8}, {"params": matrices[split:], "lr": 0.05},
              {"params": [pair for pair in named if pair not in matrices], "use_muon": False, "betas": (0.7, 0.8)}]
    return getattr(package(), make)([group for group in groups if group["params"]], **{"lr": 0.1, **options})


def train(model, optimizer, numbers):
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def trained(steps=3, dtype=torch.float32, **options):
    model = Model(dtype)
    optimizer = build(model, **options)
    train(model, optimizer, range(steps))
    return model, optimizer


def clone_of(model, steps=0, **options):
    """The same weights under another optimizer, which has state of its own after so many steps."""
    other = Model(model.up.dtype)
    optimizer = build(other, **{"lr": 7.0, "momentum": 0.1, **options})
    train(other, optimizer, range(50, 50 + steps))
    other.load_state_dict(model.state_dict())
    return other, optimizer


@pytest.mark.parametrize(("dtype", "state_dtype"), [
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("make", ["Muon", "NorMuon"])
@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "used"])
def test_a_run_goes_on_with_its_bits(make, dtype, state_dtype, steps, tmp_path):
    options = {"make": make, "state_dtype": state_dtype}
    model, optimizer = trained(dtype=dtype, **options)
    package().export_state(optimizer, tmp_path / "state.safetensors")
    other, heir = clone_of(model, steps, **options)
    package().import_state(heir, tmp_path / "state.safetensors")
    assert_equal(heir.state_dict(), optimizer.state_dict())
    train(model, optimizer, range(3, 6))
    train(other, heir, range(3, 6))
    assert_equal(other.state_dict(), model.state_dict())
    assert os.listdir(tmp_path) == ["state.safetensors"]


def test_the_file_says_what_is_in_it(tmp_path):
    model, optimizer = trained(1)
    package().export_state(optimizer, tmp_path / "state")
    with safe_open(tmp_path / "state", framework="pt") as file:
        header = {key: json.loads(value) if value[0] in "[{" else value for key, value in file.metadata().items()}
    tensors = load_file(tmp_path / "state")
    assert (header["format"], header["version"]) == ("optimizer-state", "1")
    assert header["params"] == {name: list(p.shape) for name, p in model.named_parameters()}
    assert header["tensors"]["state.up.momentum_buffer"] == ["float32", [12, 8]]
    assert header["tensors"].keys() == tensors.keys()
    assert [group["params"] for group in header["groups"]] == [["up"], ["down", "experts"], ["embed", "scale"]]
    assert header["groups"][2]["options"]["betas"] == [0.7, 0.8]
    assert torch.equal(tensors["state.experts.second_moment"], optimizer.state[model.experts]["second_moment"])


@pytest.mark.parametrize("what", ["export_state", "import_state"])
def test_a_state_dict_in_place_of_a_path_is_refused(what):
    optimizer = package().Muon([("w", nn.Parameter(torch.zeros(4, 4)))])
    with pytest.raises(TypeError, match="path is of type dict, but .* A state dict goes to optimizer.load_state_dict"):
        getattr(package(), what)(optimizer, optimizer.state_dict())


def test_names_come_from_the_model_under_any_wrapper(tmp_path):
    """Groups without names; saved from a compiled model, loaded into a plain one."""
    model, _ = trained(0)
    params = list(model.parameters())
    optimizer = package().Muon([{"params": params[:3]}, {"params": params[3:], "use_muon": False}])
    train(model, optimizer, range(2))
    package().export_state(optimizer, tmp_path / "state", torch.compile(model))
    other, heir = clone_of(model, make="Muon", split=3)
    package().import_state(heir, tmp_path / "state", other)
    for name, param in other.named_parameters():
        assert_equal(heir.state[param], optimizer.state[model.get_parameter(name)])
    with pytest.raises(ValueError, match="parameter #0 .*has no name: pass model="):
        package().export_state(optimizer, tmp_path / "other")


def test_state_finds_its_parameter_in_other_groups(tmp_path):
    """State goes by name. A group that was cut from one takes its options, one made of two keeps its own."""
    model, optimizer = trained(split=1)
    package().export_state(optimizer, tmp_path / "state")
    other, heir = clone_of(model, split=3)
    package().import_state(heir, tmp_path / "state")
    for name, param in other.named_parameters():
        assert_equal(heir.state[param], optimizer.state[model.get_parameter(name)])
    assert [(g["lr"], g["use_muon"]) for g in heir.param_groups] == [(7.0, True), (0.1, False)]
    package().export_state(heir, tmp_path / "state")
    _, third = clone_of(model, split=2)
    package().import_state(third, tmp_path / "state")
    assert [g["lr"] for g in third.param_groups] == [7.0, 7.0, 0.1]


def test_options_keep_their_form(tmp_path):
    model, optimizer = trained(1, lr=torch.tensor(0.25), ns_coefficients=((2.0, -1.5, 0.5),) * 5)
    package().export_state(optimizer, tmp_path / "state")
    _, heir = clone_of(model, lr=torch.tensor(0.5))
    package().import_state(heir, tmp_path / "state")
    group, other = heir.param_groups[0], heir.param_groups[2]
    assert isinstance(group["lr"], torch.Tensor) and group["lr"] == 0.25
    assert group["ns_coefficients"] == ((2.0, -1.5, 0.5),) * 5 and other["betas"] == (0.7, 0.8)
    assert group["adjust_lr_fn"] is None and group["nesterov"] is True and group["momentum"] == 0.8


@pytest.mark.parametrize("lr", [torch.tensor([0.25]).numpy()[0], torch.tensor(0.25).numpy()], ids=["number", "0-D"])
def test_numbers_of_numpy_are_written(lr, tmp_path):
    """A schedule kept in an array gives such."""
    model, optimizer = trained(1, lr=lr)
    package().export_state(optimizer, tmp_path / "state")
    _, heir = clone_of(model, lr=0.5)
    package().import_state(heir, tmp_path / "state")
    assert heir.param_groups[0]["lr"] == 0.25 and type(heir.param_groups[0]["lr"]) is float


def test_a_parameter_that_was_never_stepped_has_no_state(tmp_path):
    model, optimizer = trained(0)
    model.up.grad = torch.ones_like(model.up)
    optimizer.step()
    package().export_state(optimizer, tmp_path / "state")
    other, heir = clone_of(model, steps=2)
    package().import_state(heir, tmp_path / "state")
    assert set(heir.state) == {other.up}


def refused(path, message, **options):
    """`import_state` raises, and the optimizer goes on as if it had never been called."""
    model, optimizer = trained(2, **options)
    other, untouched = trained(2, **options)
    before = copy.deepcopy(optimizer.state_dict())
    memory = [t.data_ptr() for state in optimizer.state.values() for t in state.values()]
    with pytest.raises(ValueError, match=message):
        package().import_state(optimizer, path)
    assert_equal(optimizer.state_dict(), before)
    assert memory == [t.data_ptr() for state in optimizer.state.values() for t in state.values()]
    train(model, optimizer, range(2, 4))
    train(other, untouched, range(2, 4))
    assert_equal(other.state_dict(), model.state_dict())


@pytest.fixture
def whole(tmp_path):
    """A good file, as (path, metadata, tensors)."""
    path = tmp_path / "state"
    package().export_state(trained()[1], path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    return path, metadata, {name: tensor.clone() for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("part", [0.0, 0.001, 0.1, 0.5, 0.99, "one byte"])
def test_a_truncated_file_is_refused(whole, part):
    path, data = whole[0], whole[0].read_bytes()
    path.write_bytes(data[:-1] if part == "one byte" else data[:int(len(data) * part)])
    refused(path, "state is truncated or no safetensors file")


def test_a_file_is_refused_wherever_it_ends(whole):
    path, data = whole[0], whole[0].read_bytes()
    optimizer = build(Model())
    for end in range(0, len(data), 61):
        path.write_bytes(data[:end])
        with pytest.raises(ValueError, match="truncated or no safetensors file"):
            package().import_state(optimizer, path)
    assert not optimizer.state


def test_a_damaged_header_is_refused_if_it_can_be_told(whole):
    """Any byte of it changed: a ValueError, or state that fits, but never another error, or half of a load."""
    path, data = whole[0], whole[0].read_bytes()
    size, generator = 8 + int.from_bytes(data[:8], "little"), random.Random(0)
    model, optimizer = trained(1)
    before, refusals = copy.deepcopy(optimizer.state_dict()), 0
    for _ in range(300):
        damaged = bytearray(data)
        damaged[generator.randrange(8, size)] = generator.choice(b'0a"[]{}:,. ')
        path.write_bytes(damaged)
        try:
            package().import_state(optimizer, path)
        except ValueError:
            refusals += 1
            assert_equal(optimizer.state_dict(), before)
        before = copy.deepcopy(optimizer.state_dict())
    assert refusals > 200
    train(model, optimizer, [1])


def test_a_longer_file_is_refused(whole):
    path = whole[0]
    path.write_bytes(path.read_bytes() + b"\0" * 8)
    refused(path, "truncated or no safetensors file")


class Attack:
    """What a pickle could do to whoever loads it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_pickle_is_refused_and_not_loaded(write, tmp_path):
    write({"state": Attack(str(tmp_path / "was here"))}, tmp_path / "state")
    refused(tmp_path / "state", "truncated or no safetensors file")
    assert not (tmp_path / "was here").exists()


def test_a_foreign_safetensors_file_is_refused(tmp_path):
    save_file(Model().state_dict(), tmp_path / "model.safetensors")
    refused(tmp_path / "model.safetensors", "not one that export_state wrote: its format is None")


def option(old, new):
    """A change of an option in the header, in all groups."""
    def change(metadata, tensors):
        assert old in metadata["groups"]
        metadata["groups"] = metadata["groups"].replace(old, new)
    return change


@pytest.mark.parametrize(("change", "message"), [
    (lambda m, t: m.update(version="2"), "has version '2' of the format, but this package reads '1'"),
    (lambda m, t: m.pop("groups"), "a header that cannot be read"),
    (lambda m, t: m.update(params="{"), "a header that cannot be read"),
    (lambda m, t: m.update(params="[]"), "params, groups, tensors are not of the types"),
    (lambda m, t: m.update(groups='[{"params": ["up"]}]'), "a header that cannot be read: 'use_muon'"),
    (option('"use_muon": true', '"use_muon": "no"'), "a header that cannot be read: use_muon='no' must be True"),
    (option('"lr": 0.1', '"lr": "fast"'), r"group 0 \(up\): lr='fast' is not allowed: it must be a number"),
    (option('"weight_decay": 0.1', '"weight_decay": false'), "weight_decay=False is not allowed: it must be a number"),
    (option('"nesterov": true', '"nesterov": "no"'), "nesterov='no' is not allowed: it must be True or False"),
    (option('"nesterov": true', '"nesterov": 0'), "nesterov=0 is not allowed: it must be True or False"),
    (option('"nesterov": true', '"nesterov": null'), "nesterov=None is not allowed: it must be True or False"),
    (option('"adjust_lr_fn": null', '"adjust_lr_fn": -1'), "adjust_lr_fn=-1 is not allowed"),
    (lambda m, t: t.pop("state.down.second_moment"), "holds state.down.second_moment as nothing, but its header says"),
    (lambda m, t: t.update(more=torch.zeros(1)), "holds more as .*, but its header says nothing"),
    (lambda m, t: t.update({"state.embed.step": torch.tensor(1.0, dtype=torch.float64)}), "holds state.embed.step as"),
    (lambda m, t: t.update({"state.up.momentum_buffer": torch.zeros(8, 12)}), "holds state.up.momentum_buffer as"),
], ids=["version", "no groups", "no JSON", "no dict", "half a group", "no kind", "no number", "bool for a number",
        "word for a bool", "number for a bool", "null for a bool", "negative factor", "tensor gone", "tensor added",
        "other dtype", "other shape"])
def test_a_file_that_is_not_what_its_header_says_is_refused(whole, change, message):
    path, metadata, tensors = whole
    change(metadata, tensors)
    save_file(tensors, path, metadata)
    refused(path, message)


def test_a_number_may_be_whole_and_none_stay_none(whole):
    path, metadata, tensors = whole
    option('"lr": 0.1', '"lr": 0')(metadata, tensors)
    option('"adjust_lr_fn": null', '"adjust_lr_fn": "original"')(metadata, tensors)
    option('"nesterov": true', '"fused": null, "nesterov": false')(metadata, tensors)
    save_file(tensors, path, metadata)
    optimizer = build(Model(), adjust_lr_fn="rms_norm")
    optimizer.param_groups[0]["fused"] = True
    package().import_state(optimizer, path)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["adjust_lr_fn"], group["nesterov"], group["fused"]) == (0, "original", False, None)


def test_a_tensor_takes_a_number_only(whole):
    path, metadata, tensors = whole
    option('"lr": 0.1', '"lr": "fast"')(metadata, tensors)
    save_file(tensors, path, metadata)
    refused(path, "lr='fast' is not allowed: it must be a number", lr=torch.tensor(0.1))


def test_averages_of_whole_numbers_are_refused(whole):
    path, metadata, tensors = whole
    tensors["state.up.momentum_buffer"] = tensors["state.up.momentum_buffer"].long()
    metadata["tensors"] = metadata["tensors"].replace('"state.up.momentum_buffer": ["float32"',
                                                      '"state.up.momentum_buffer": ["int64"')
    save_file(tensors, path, metadata)
    refused(path, "momentum_buffer of parameter up has dtype torch.int64 in the state")


@pytest.mark.parametrize(("shapes", "message"), [
    ({"down": (8, 11)}, r"parameter down has shape \[8, 12\] here, but \[8, 11\] in"),
    ({"experts": None}, "has no parameter experts, which the optimizer has"),
    ({"gate": (4, 4)}, "has a parameter gate, which the optimizer does not have"),
], ids=["shape", "missing", "unknown"])
def test_the_file_of_another_model_is_refused(shapes, message, tmp_path):
    model = Model(**shapes)
    optimizer = build(model)
    train(model, optimizer, range(1))
    package().export_state(optimizer, tmp_path / "state")
    refused(tmp_path / "state", message)


def test_state_of_another_rule_is_refused(whole):
    refused(whole[0], "has momentum_buffer, second_moment of parameter up, but its state here is momentum_buffer",
            make="Muon")


def test_another_kind_of_group_is_refused(tmp_path):
    model = Model()
    named = list(model.named_parameters())
    optimizer = package().NorMuon([{"params": named[:2]}, {"params": named[2:], "use_muon": False}])
    train(model, optimizer, range(1))
    package().export_state(optimizer, tmp_path / "state")
    refused(tmp_path / "state", "parameter experts was in a group of AdamW when .* was written, but is in one of Muon")


def test_who_is_interrupted_leaves_the_old_file(whole, monkeypatch):
    path, data = whole[0], whole[0].read_bytes()

    def half(tensors, part, metadata):
        with open(part, "wb") as file:
            file.write(data[:100])
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", half)
    with pytest.raises(OSError, match="no space left"):
        package().export_state(trained(1)[1], path)
    assert path.read_bytes() == data and os.listdir(path.parent) == [path.name]


def test_torn_state_is_not_exported(whole, monkeypatch):
    path, data = whole[0], whole[0].read_bytes()
    model, optimizer = trained(1)
    with monkeypatch.context() as patch:
        patch.setattr(
            part("rules.elementwise"), "step", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory"))
        )
        with pytest.raises(torch.OutOfMemoryError):
            train(model, optimizer, [1])
    for target in (path, path.with_name("other")):
        with pytest.raises(RuntimeError, match="last step of this optimizer failed half-way, .* load a checkpoint"):
            package().export_state(optimizer, target)
    assert path.read_bytes() == data and os.listdir(path.parent) == [path.name]
    package().import_state(optimizer, path)
    package().export_state(optimizer, path.with_name("other"))
    assert_equal(load_file(path.with_name("other")), load_file(path))


def spread_state(rank, world, folder):
    mesh = init_device_mesh("cpu", (world,))
    shard = DTensor.from_local(torch.randn(2, 3), mesh, [Shard(0)], run_check=False)
    sharded = package().Muon([("w", nn.Parameter(shard))])
    owned = package().Muon([("w", nn.Parameter(torch.randn(4, 3)))], process_group=dist.group.WORLD,
                           grads_are_reduced=False)
    for optimizer in (sharded, owned):
        for function in (package().export_state, package().import_state):
            with pytest.raises(ValueError, match="state of parameter w is spread over several ranks"):
                function(optimizer, os.path.join(folder, "state"))
    return os.listdir(folder)


def test_sharded_state_is_refused(tmp_path):
    assert run_threads(2, spread_state, str(tmp_path)) == [[], []]


def test_two_parameters_of_one_name_are_refused(optimizer, tmp_path):
    """One would overwrite the other's state."""
    params = [nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
    opt = optimizer.Muon([{"params": [p], "param_names": ["w"]} for p in params])
    with pytest.raises(ValueError, match="two parameters, .* have the name w"):
        optimizer.export_state(opt, tmp_path / "state.safetensors")
    assert not (tmp_path / "state.safetensors").exists()


def test_a_child_called_module_keeps_its_name(optimizer, tmp_path):
    model = nn.Linear(4, 4, bias=False)
    model.module = nn.Linear(4, 4, bias=False)
    opt = optimizer.Muon(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn(4, 4)
    opt.step()
    optimizer.export_state(opt, tmp_path / "state.safetensors", model)
    heir = optimizer.Muon(model.parameters())
    optimizer.import_state(heir, tmp_path / "state.safetensors", model)
    for param in model.parameters():
        assert torch.equal(heir.state[param]["momentum_buffer"], opt.state[param]["momentum_buffer"])

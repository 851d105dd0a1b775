"""State dicts of other parameter groups: state goes by name, and options where they are certain."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dsd

from tests.ranks import package
from tests.test_checkpoint import FLAT, NESTED
from tests.test_checkpoint_file import assert_equal

BOTH = pytest.mark.parametrize("options", [NESTED, FLAT], ids=["nested", "flat"])
ADAMW = "xyz"  # parameters of AdamW; the others are Muon's
SQUARE = (6, 6)  # all matrices have one shape, so that nothing but names tells them apart


def parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = dict.fromkeys("abcd", SQUARE) | dict.fromkeys(ADAMW, (4,))
    return nn.ParameterDict({name: nn.Parameter(torch.randn(shape, generator=generator))
                             for name, shape in shapes.items()})


def build(model, division, named=True, **options):
    """An optimizer of the groups in `division`, such as "ab cd xyz"; lr of each: 0.1, 0.2, ..."""
    groups = []
    for number, names in enumerate(division.split()):
        params = [(name, model[name]) if named else model[name] for name in names]
        groups.append({"params": params, "use_muon": names[0] not in ADAMW, "lr": 0.1 * (number + 1)})
    return package().Muon(groups, **options)


def train(model, optimizer, numbers):
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for param in model.values():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    optimizer.zero_grad()


def trained(division, **more):
    model = parameters()
    optimizer = build(model, division, **more)
    train(model, optimizer, range(2))
    return model, optimizer


def other_rates(optimizer):
    """Rates that no saved group has."""
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 7.0 + number
    return optimizer


def state_by_name(model, optimizer):
    return {name: dict(optimizer.state[param]) for name, param in model.items()}


def rates(optimizer):
    return ["own" if group["lr"] >= 7 else round(group["lr"], 6) for group in optimizer.param_groups]


DIVISIONS = [
    ("abcd xyz", "ab cd x yz", [0.1, 0.1, 0.2, 0.2], 0),  # groups that were cut
    ("ab cd x yz", "abcd xyz", ["own", "own"], 2),  # groups that were put together
    ("abcd xyz", "xyz abcd", [0.2, 0.1], 0),  # another order of groups
    ("ab cd xyz", "cd ab zyx", [0.2, 0.1, 0.3], 0),  # lengths alike; by position, nothing would differ
    ("ab cd xyz", "ac bd xyz", ["own", "own", 0.3], 2),  # lengths alike
    ("abc d xyz", "ba dc zxy", [0.1, "own", 0.3], 1),
]


@pytest.mark.parametrize(("before", "after", "taken", "told"), DIVISIONS, ids=lambda x: str(x))
def test_state_goes_by_name_to_other_groups(before, after, taken, told):
    model, optimizer = trained(before)
    heir = other_rates(build(model, after))
    saved = copy.deepcopy(optimizer.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        heir.load_state_dict(saved)
    assert_equal(state_by_name(model, heir), state_by_name(model, optimizer))
    assert rates(heir) == taken and len(caught) == told
    assert all("keeps its own lr" in str(w.message) and w.filename == __file__ for w in caught)
    assert_equal(saved, optimizer.state_dict())
    assert [g["param_names"] for g in heir.param_groups] == [list(names) for names in after.split()]
    train(model, heir, [2])


@pytest.mark.parametrize("way", ["dict", "file"])
def test_groups_with_equal_options_are_put_together(way, tmp_path, recwarn):
    model, optimizer = trained("ab cd x yz")
    for group in optimizer.param_groups:
        group["lr"] = 0.3
    heir = other_rates(build(model, "abcd xyz"))
    if way == "dict":
        heir.load_state_dict(optimizer.state_dict())
    else:
        package().export_state(optimizer, tmp_path / "state")
        package().import_state(heir, tmp_path / "state")
    assert rates(heir) == [0.3, 0.3] and not recwarn.list


@pytest.mark.parametrize(("before", "after", "taken", "told"), DIVISIONS, ids=lambda x: str(x))
def test_a_file_gives_what_a_state_dict_does(before, after, taken, told, tmp_path):
    """One rule for both."""
    model, optimizer = trained(before)
    package().export_state(optimizer, tmp_path / "state")
    heir = other_rates(build(model, after))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        package().import_state(heir, tmp_path / "state")
    assert_equal(state_by_name(model, heir), state_by_name(model, optimizer))
    assert rates(heir) == taken and [w.filename for w in caught] == [__file__] * told


@BOTH
@pytest.mark.parametrize(("before", "after", "taken", "told"), DIVISIONS, ids=lambda x: str(x))
def test_and_torchs_checkpoints_too(before, after, taken, told, options):
    model, optimizer = trained(before)
    heir = other_rates(build(model, after))
    saved = copy.deepcopy(dsd.get_optimizer_state_dict(model, optimizer, options=options))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dsd.set_optimizer_state_dict(model, heir, saved, options=options)
    assert_equal(state_by_name(model, heir), state_by_name(model, optimizer))
    if options is NESTED and before == "abc d xyz":  # torch has let go of the options of "abc"
        taken = ["own", "own", 0.3]
    assert rates(heir) == taken


def test_through_a_checkpoint_on_disk(tmp_path):
    """Flattened, since torch writes the options of groups by their numbers otherwise."""
    model, optimizer = trained("abcd xyz")
    dcp.save(dsd.get_optimizer_state_dict(model, optimizer, options=FLAT), checkpoint_id=tmp_path)
    heir = other_rates(build(model, "ab cd x yz"))
    state = dsd.get_optimizer_state_dict(model, heir, options=FLAT)
    dcp.load(state, checkpoint_id=tmp_path)
    dsd.set_optimizer_state_dict(model, heir, state, options=FLAT)
    assert_equal(state_by_name(model, heir), state_by_name(model, optimizer))
    assert rates(heir) == [0.1, 0.1, 0.2, 0.2]


def test_what_others_keep_goes_with_its_parameter():
    model, optimizer = trained("abcd xyz")
    for name, param in model.items():
        optimizer.state[param]["mine"] = ord(name)
    heir = build(model, "ba x dc zy")
    heir.load_state_dict(optimizer.state_dict())
    assert {name: heir.state[param]["mine"] for name, param in model.items()} == {
        name: ord(name) for name in model}


def test_prefixes_of_wrappers_do_not_count():
    model, optimizer = trained("abcd xyz")
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["param_names"] = [f"module._orig_mod.{name}" for name in group["param_names"]]
    heir = build(model, "ab cd xyz")
    heir.load_state_dict(saved)
    assert_equal(state_by_name(model, heir), state_by_name(model, optimizer))


def rename(saved, number, names):
    saved["param_groups"][number]["param_names"] = list(names)


@pytest.mark.parametrize(("change", "reason"), [
    (lambda s: s["param_groups"][1].pop("param_names"), "group 1 in the state dict does not name its parameters"),
    (lambda s: rename(s, 0, "abc"), "group 0 in the state dict does not name its parameters"),
    (lambda s: rename(s, 0, "abca"), "a is the name of two parameters in the state dict"),
    (lambda s: rename(s, 0, "abce"), "parameter e is only in the state dict"),
], ids=["no names", "too few names", "twice", "unknown"])
def test_other_groups_that_cannot_be_told_apart_are_refused(change, reason):
    model, optimizer = trained("abcd xyz")
    heir = build(model, "ab cd xyz")
    train(model, heir, [0])
    saved, before = optimizer.state_dict(), copy.deepcopy(heir.state_dict())
    change(saved)
    with pytest.raises(ValueError, match=rf"groups of \[4, 3\] parameters, this optimizer of \[2, 2, 3\], .*{reason}"
                                         r"\. Build the groups as they were saved, or name the parameters"):
        heir.load_state_dict(saved)
    assert_equal(heir.state_dict(), before)


def test_unnamed_groups_of_the_same_lengths_go_by_position():
    model, optimizer = trained("ab cd xyz", named=False)
    heir = build(model, "ab cd xyz", named=False)
    heir.load_state_dict(optimizer.state_dict())
    assert_equal(state_by_name(model, heir), state_by_name(model, optimizer))
    with pytest.raises(ValueError, match="group 0 in the state dict does not name its parameters"):
        build(model, "abcd xyz", named=False).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("places", ["bace", "eabc"])
def test_names_that_contradict_the_positions_are_refused(places):
    """A parameter would get the state of another although its own is there."""
    model, optimizer = trained("abcd xyz")
    heir = build(model, "abcd xyz")
    saved = optimizer.state_dict()
    rename(saved, 0, places)
    first = next(name for name, place in zip("abcd", places) if name != place and name in places)
    there = places["abcd".index(first)]
    with pytest.raises(ValueError, match=f"parameter {first} of group 0 would get the state of {there}, .*parameter "
                                         "e is only in the state dict.*remove 'param_names'"):
        heir.load_state_dict(saved)
    assert not heir.state


def test_new_names_at_the_same_positions_are_warned_of_once():
    """As of a model whose modules were renamed; torch goes by position without a word."""
    model, optimizer = trained("abcd xyz")
    heir = build(model, "abcd xyz")
    saved = optimizer.state_dict()
    rename(saved, 0, "efcd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        heir.load_state_dict(saved)
    message, = [str(w.message) for w in caught if w.filename == __file__]
    assert "2 parameters have other names here" in message and "the first is a here and e there" in message
    assert_equal(state_by_name(model, heir), state_by_name(model, optimizer))


def test_a_parameter_of_the_other_kind_is_refused():
    model, optimizer = trained("abcd xyz")
    other = nn.ParameterDict(dict(model.items()))
    groups = [{"params": [(n, other[n]) for n in "abc"]},
              {"params": [(n, other[n]) for n in "dxyz"], "use_muon": False}]
    heir = package().Muon(groups)
    with pytest.raises(ValueError, match="parameter d is in a group of Muon in the state dict, but in one of AdamW "
                                         "here: put it into a group of the kind in which it was saved"):
        heir.load_state_dict(optimizer.state_dict())
    assert not heir.state


@pytest.mark.parametrize("key", ["maximize", "amsgrad"])
def test_options_of_every_saved_group_are_checked(key):
    """Also of groups whose options are not taken."""
    model, optimizer = trained("abcd x yz")
    saved = optimizer.state_dict()
    saved["param_groups"][2][key] = True
    with pytest.raises(ValueError, match=f"was saved with {key}=True"):
        build(model, "abcd xyz").load_state_dict(saved)


@pytest.mark.parametrize("division", ["abcd xyz", "ab cd xyz"], ids=["alike", "other groups"])
def test_a_group_that_was_emptied_is_no_trouble(division):
    """As of who freezes parameters by taking them out."""
    def without_last(optimizer):
        group = optimizer.param_groups[-1]
        for param in group["params"]:
            optimizer.state.pop(param, None)
        group["params"].clear()
        group["param_names"].clear()
        return optimizer

    model, optimizer = trained("abcd xyz")
    saved = without_last(optimizer).state_dict()
    heir = without_last(other_rates(build(model, division)))
    heir.load_state_dict(saved)
    assert rates(heir) == ([0.1, 0.2] if division == "abcd xyz" else [0.1, 0.1, "own"])
    for name in "abcd":
        assert_equal(dict(heir.state[model[name]]), dict(optimizer.state[model[name]]))


def default_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))


def load_by_state_dict(optimizer, heir, _):
    heir.load_state_dict(optimizer.state_dict())


def load_by_file(optimizer, heir, folder):
    package().export_state(optimizer, folder / "state")
    package().import_state(heir, folder / "state")


@pytest.mark.parametrize("weight_decay", [0.1, 0.0], ids=["built with decay", "built without"])
@pytest.mark.parametrize("load", [load_by_state_dict, load_by_file])
def test_the_default_groups_load_what_fewer_groups_saved(load, weight_decay, tmp_path):
    """Of a version that had one group for all of AdamW's parameters. Names stay, and the group
    "no_decay" goes on without weight decay.
    """
    def coarser(model):
        muon, *others = package().get_default_muon_param_groups(model)
        assert len(others) > 1
        named = [pair for group in others for pair in zip(group["param_names"], group["params"])]
        return [muon, {"params": named, "use_muon": False, "name": "adamw"}]

    model, other = default_model(), default_model()
    optimizer = package().Muon(coarser(model), lr=0.05, weight_decay=0.3)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    heir = package().Muon(package().get_default_muon_param_groups(other), lr=0.9, weight_decay=weight_decay)
    labels = [group["name"] for group in heir.param_groups]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(optimizer, heir, tmp_path)
    message, = [str(w.message) for w in caught if w.filename == __file__]
    assert "keeps weight_decay=0" in message and "with weight_decay=0.3" in message
    assert {group["lr"] for group in heir.param_groups} == {0.05} and len(heir.param_groups) > 2
    assert [group["name"] for group in heir.param_groups] == labels
    assert {group["name"]: group["weight_decay"] for group in heir.param_groups} == {
        **dict.fromkeys(labels, 0.3), "no_decay": 0.0}
    for (name, param), theirs in zip(other.named_parameters(), model.parameters()):
        assert_equal(dict(heir.state[param]), dict(optimizer.state[theirs])), name


@pytest.mark.parametrize(("decays", "expected"), [((0.2, 0.0), [0.1, 0.0]), ((0.0, 0.0), [0.1, 0.1])])
def test_a_group_that_was_split_off_to_have_no_weight_decay_has_none(decays, expected):
    """Where all groups are built without, they take what was saved, as in torch."""
    model, optimizer = trained("abcd xyz")
    heir = build(model, "abcd x yz")
    for group, decay in zip(heir.param_groups[1:], decays):
        group["weight_decay"] = decay
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        heir.load_state_dict(optimizer.state_dict())
    assert [group["weight_decay"] for group in heir.param_groups[1:]] == expected


@pytest.mark.parametrize("load", [load_by_state_dict, load_by_file])
def test_a_group_keeps_its_name(load, tmp_path):
    model, optimizer = trained("abcd xyz")
    heir = build(model, "abcd xyz")
    for group in optimizer.param_groups:
        group["name"] = "theirs"
    heir.param_groups[0]["name"] = "mine"
    load(optimizer, heir, tmp_path)
    assert heir.param_groups[0]["name"] == "mine"

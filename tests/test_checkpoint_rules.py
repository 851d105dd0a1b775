"""Checkpoints of another rule: torch.distributed.checkpoint, and live changes that were saved before the next step."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dsd

from tests.ranks import package, run_ranks
from tests.test_checkpoint import FLAT, NESTED


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False))


def model_and_optimizer(cls="Muon", **options):
    model = two_layers()
    return model, getattr(package(), cls)(model.named_parameters(), lr=0.05, **options)


def step(model, optimizer, seed, first=0):
    generator = torch.Generator().manual_seed(seed)
    for number, p in enumerate(model.parameters()):
        p.grad = torch.randn(p.shape, generator=generator) if number >= first else None
    optimizer.step()


# torch.distributed.checkpoint ------------------------------------------------------------------------------------

def save(model, optimizer, form, folder, older=False):
    """`older`: as versions without the name of the rule in `use_muon` saved."""
    state = optimizer if form is None else dsd.get_optimizer_state_dict(model, optimizer, options=form)
    if older and form is FLAT:
        state = {key: True if key.endswith("use_muon") else value for key, value in state.items()}
    elif older:
        state = optimizer.state_dict() if form is None else state
        state["param_groups"] = [{**group, "use_muon": True} for group in state["param_groups"]]
    dcp.save({"optimizer": state}, checkpoint_id=folder)


def load(model, optimizer, form, folder):
    if form is None:
        dcp.load({"optimizer": optimizer}, checkpoint_id=folder)
        return
    state = {"optimizer": dsd.get_optimizer_state_dict(model, optimizer, options=form)}
    dcp.load(state, checkpoint_id=folder)
    dsd.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=form)


FORMS = pytest.mark.parametrize("form", [NESTED, FLAT, None], ids=["nested", "flat", "by itself"])


@FORMS
@pytest.mark.parametrize("saved, here, rule", [
    ({"cls": "NorMuon"}, {}, "normuon"), ({"rule": "adamuon"}, {}, "adamuon"), ({"rule": "scion"}, {}, "scion"),
    ({"rule": "dion3"}, {"cls": "NorMuon"}, "dion3")], ids=str)
def test_dcp_refuses_another_rule(saved, here, rule, form, tmp_path):
    """Groups of Muon and NorMuon ask the checkpoint for no key that only the other rule has."""
    model, optimizer = model_and_optimizer(**saved)
    step(model, optimizer, 1)
    save(model, optimizer, form, tmp_path)
    model, optimizer = model_and_optimizer(**here)
    with pytest.raises(ValueError, match=f"group 0 was saved with rule='{rule}', but has"):
        load(model, optimizer, form, tmp_path)


@FORMS
@pytest.mark.parametrize("older", [False, True], ids=["now", "older"])
@pytest.mark.parametrize("options", [{"cls": "NorMuon"}, {"rule": "adamuon"}], ids=str)
def test_dcp_loads_the_same_rule_also_from_older_versions(options, older, form, tmp_path):
    model, optimizer = model_and_optimizer(**options)
    step(model, optimizer, 1)
    save(model, optimizer, form, tmp_path, older)
    heir, resumed = model_and_optimizer(**options)
    heir.load_state_dict(model.state_dict())
    load(heir, resumed, form, tmp_path)
    assert resumed.param_groups[0].keys() == optimizer.param_groups[0].keys()
    assert resumed.param_groups[0]["use_muon"] is True
    step(model, optimizer, 2)
    step(heir, resumed, 2)
    assert all(map(torch.equal, model.parameters(), heir.parameters()))


def test_a_checkpoint_of_muon_loads_into_a_rule_without_further_state(tmp_path):
    """Every rule takes the momentum of Muon."""
    model, optimizer = model_and_optimizer()
    step(model, optimizer, 1)
    save(model, optimizer, NESTED, tmp_path)
    heir, resumed = model_and_optimizer(rule="scion")
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    state = {"optimizer": dsd.get_optimizer_state_dict(heir, resumed)}
    dcp.load(state, checkpoint_id=tmp_path, planner=planner)
    dsd.set_optimizer_state_dict(heir, resumed, state["optimizer"])
    assert resumed.param_groups[0]["rule"] == "scion"
    assert all(torch.equal(resumed.state[q]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])
               for p, q in zip(model.parameters(), heir.parameters()))


# live changes ----------------------------------------------------------------------------------------------------

CHANGES = {  # options of the group before, and the keys that change
    "a rule with further state": ({}, {"rule": "adamuon", "beta2": 0.95, "sign": True}),
    "a rule with less state": ({"rule": "hyperball"}, {"rule": "scion", "radius": 1.0}),
    "lion to adamw": ({"use_muon": False, "rule": "lion"}, {"rule": "adamw", "eps": 1e-8}),
    "adamw to sgd": ({"use_muon": False}, {"rule": "sgd", "momentum": 0.9, "nesterov": False}),
    "mean to sum": ({}, {"momentum_form": "sum"}),
    "sum to mean": ({"momentum_form": "sum"}, {"momentum_form": "ema"}),
    "decay": ({}, {"decay": "initial"}),
}


def live(before, change, first, **options):
    """(model, optimizer) after a live change, and after a step of the parameters from number `first` on."""
    model = two_layers()
    optimizer = package().Muon([{"params": list(model.named_parameters()), **before}], lr=0.05, **options)
    if change is None:
        return model, optimizer
    step(model, optimizer, 1)
    optimizer.param_groups[0].update(change)
    if first < 2:
        step(model, optimizer, 2, first)
    return model, optimizer


def goes_on_alike(model, optimizer, before, change, load_into, **options):
    """Whether two runs have equal bits: that of the optimizer, and one that goes on from its state."""
    heir, again = live({**before, **change}, None, 2, **options)
    heir.load_state_dict(model.state_dict())
    load_into(again)
    for seed in (3, 4):
        step(model, optimizer, seed)
        step(heir, again, seed)
    return all(map(torch.equal, model.parameters(), heir.parameters()))


@pytest.mark.parametrize("first", [2, 1], ids=["no step", "a step of one parameter"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_live_change_may_be_saved_before_every_parameter_was_stepped(name, first, tmp_path):
    before, change = CHANGES[name]
    file = tmp_path / "state.safetensors"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # keys that the rule does not read
        model, optimizer = live(before, change, first)
        held = {p: dict(state) for p, state in optimizer.state.items()}
        saved = optimizer.state_dict()
        package().export_state(optimizer, file)
        for p, state in held.items():  # saving changes nothing
            assert optimizer.state[p].keys() == state.keys()
        assert goes_on_alike(*live(before, change, first), before, change, lambda again: again.load_state_dict(saved))
        assert goes_on_alike(model, optimizer, before, change, lambda again: package().import_state(again, file))


def of_owners(rank, world, gathered):
    """Of state that owners keep: rows of new state are divided, too, also where all ranks gather them."""
    before, change = {"use_muon": False, "rule": "lion"}, {"rule": "adamw", "eps": 1e-8}
    options = {"process_group": dist.group.WORLD, "shard_state": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model, optimizer = live(before, change, 1, **options)
        if gathered:
            optimizer.consolidate_state_dict(to=None)
        saved = optimizer.state_dict()
        return goes_on_alike(model, optimizer, before, change, lambda again: again.load_state_dict(saved), **options)


@pytest.mark.parametrize("gathered", [False, True])
def test_a_live_change_of_state_at_owners(gathered, optimizer):
    assert all(run_ranks(2, of_owners, gathered))


WRONG = {"rule": ["unknown", 3], "split": ["unknown", {"rows": [3, 4]}], "momentum_form": [[]]}


@pytest.mark.parametrize("key, value", [(key, value) for key in WRONG for value in WRONG[key]], ids=str)
@pytest.mark.parametrize("cls", ["Muon", "NorMuon", "hyperball"])
def test_a_wrong_live_key_does_not_hinder_saving(cls, key, value, optimizer, tmp_path):
    """The next step refuses it."""
    model, muon = model_and_optimizer(**({"rule": cls} if cls == "hyperball" else {"cls": cls}))
    step(model, muon, 1)
    held = {p: dict(state) for p, state in muon.state.items()}
    muon.param_groups[0][key] = value
    assert len(muon.state_dict()["state"]) == 2
    optimizer.export_state(muon, tmp_path / "state.safetensors")
    assert len(dsd.get_optimizer_state_dict(model, muon)["state"]) == 2
    assert all(muon.state[p].keys() == state.keys() for p, state in held.items())
    with pytest.raises((TypeError, ValueError)):
        step(model, muon, 2)


@pytest.mark.parametrize("value", ["sums", [], None], ids=str)
def test_a_wrong_form_of_momentum_loses_no_momentum(value, optimizer):
    """It counted as "ema", and the sum as a momentum that was missing: zeros were saved."""
    model, muon = model_and_optimizer(momentum_form="sum")
    step(model, muon, 1)
    before = muon.state_dict()["state"][0]["momentum_sum"].clone()
    muon.param_groups[0]["momentum_form"] = value
    saved = muon.state_dict()["state"][0]
    assert saved.keys() == {"momentum_sum"} and torch.equal(saved["momentum_sum"], before) and before.any()


def whole_state(state_dict):
    """Copies of all tensors of a state dict, whole."""
    return {(number, key): (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
            for number, state in state_dict["state"].items() for key, value in state.items()}


def of_owners_with_a_wrong_key(rank, world, options):
    """Whether state kept by owners is saved, in each way, as it was before a key of its group got a wrong value."""
    model, muon = model_and_optimizer(process_group=dist.group.WORLD, **options)
    step(model, muon, 1)
    group, same = muon.param_groups[0], []
    before = whole_state(muon.state_dict())
    by_dcp = whole_state(dsd.get_optimizer_state_dict(model, muon))
    right = dict(group)
    wrong = [{key: value} for key, values in WRONG.items() for value in values]
    for change in (*wrong, {"eps": "small"}):
        group.update(change)
        same.append((before, whole_state(muon.state_dict())))
        same.append((by_dcp, whole_state(dsd.get_optimizer_state_dict(model, muon))))
        muon.consolidate_state_dict(to=None)
        same.append((before, whole_state(muon.state_dict())))
        with pytest.raises((TypeError, ValueError)):
            step(model, muon, 2)
        group.clear()
        group.update(right)
    return all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in same)


@pytest.mark.parametrize("options", [{"shard_state": True, "momentum_form": "sum"}, {"grads_are_reduced": False},
                                     {"rule": "hyperball", "shard_state": True}], ids=str)
def test_a_wrong_live_key_does_not_hinder_saving_state_of_owners(options, optimizer):
    assert all(run_ranks(2, of_owners_with_a_wrong_key, options))


def of_owners_with_different_rules(rank, world, wrong):
    """The message where a key of the group was changed on one rank, and whether all is saved once it is set back."""
    model, muon = model_and_optimizer(process_group=dist.group.WORLD, rule="hyperball", shard_state=True)
    step(model, muon, 1)
    before = whole_state(muon.state_dict())
    if rank:
        muon.param_groups[0]["rule"] = wrong
    messages = []
    for call in (muon.state_dict, partial(muon.consolidate_state_dict, None)):
        try:
            call()
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    muon.param_groups[0]["rule"] = "hyperball"
    after = whole_state(muon.state_dict())
    return messages, before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_a_rule_changed_on_one_rank_only(optimizer):
    """Ranks gathered rows of different keys: gloo ended the process."""
    for rank, (messages, same) in enumerate(run_ranks(2, of_owners_with_different_rules, "muon")):
        called = ["", " with radius of 2 parameters"][:: -1 if rank == 0 else 1]
        for call, message in zip(("state_dict()", "consolidate_state_dict(to=None)"), messages):
            assert f"ranks [{rank}] called {call}{called[0]}, but ranks [{1 - rank}] {call}{called[1]}" in message
        assert same
    # A wrong rule leaves the keys of the last step, which the other ranks have
    assert run_ranks(2, of_owners_with_different_rules, "unknown") == [(["", ""], True)] * 2


def test_an_empty_state_dict_names_its_likely_cause(optimizer):
    with pytest.raises(ValueError, match="no 'param_groups', only None.*Fabric's wrapper returns {} on all ranks but"):
        model_and_optimizer()[1].load_state_dict({})


# another split ---------------------------------------------------------------------------------------------------

THIRDS = {"rows": [4, 4, 4]}


def hyperball(split, steps, **options):
    """(weight, optimizer) after some steps. Rows have different norms."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(12, 8) * torch.arange(1.0, 13.0)[:, None])
    group = {"params": [weight], "split": split}
    muon = package().Muon([group], lr=0.01, rule="hyperball", **options)
    for seed in range(steps):
        step_of(weight, muon, seed)
    return weight, muon


def step_of(weight, muon, seed):
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    muon.step()


def keeps_norms(weight, muon, split):
    """Whether a step keeps the norms of the matrices of a split."""
    sizes = split["rows"] if split else [12]
    norms = [part.norm() for part in weight.detach().split(sizes)]
    step_of(weight, muon, 9)
    return torch.allclose(torch.stack([part.norm() for part in weight.detach().split(sizes)]), torch.stack(norms), 1e-3)


@pytest.mark.parametrize("way", ["live", "saved after it", "copied after it", "loaded"])
@pytest.mark.parametrize("before, after", [(None, THIRDS), (THIRDS, None), ({"rows": [8, 4]}, {"rows": [4, 8]})],
                         ids=str)
def test_hyperball_keeps_the_norms_of_matrices_that_are_cut_otherwise(before, after, way, optimizer):
    """The radius, a number of a whole matrix, has a shape that fits; kept, it would rescale weights to
    the norms of other matrices.
    """
    weight, muon = hyperball(before, 2)
    if way != "loaded":
        muon.param_groups[0]["split"] = after
    if way in ("saved after it", "loaded"):
        heir, again = hyperball(after, 0)
        again.load_state_dict(muon.state_dict())
        heir.data.copy_(weight.data)
        weight, muon = heir, again
    elif way == "copied after it":
        weight, muon = copy.deepcopy((weight, muon))
    assert keeps_norms(weight, muon, after)


def dropped_plans(way):
    """(weight, optimizer) whose plans were dropped since the last step, by one of several ways."""
    weight, muon = hyperball(None, 2)
    if way == "loaded":
        muon.load_state_dict(muon.state_dict())
    elif way == "copied":
        weight, muon = copy.deepcopy((weight, muon))
    elif way == "added to":
        muon.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    else:  # and without a gradient in a step before the change
        other = nn.Parameter(torch.ones(2, 2))
        muon.add_param_group({"params": [other]})
        other.grad, weight.grad = torch.ones(2, 2), None
        muon.step()
    return weight, muon


@pytest.mark.parametrize("way", ["loaded", "copied", "added to", "frozen"])
def test_a_radius_begins_anew_although_plans_were_dropped_before_the_split_changed(way, optimizer):
    weight, muon = dropped_plans(way)
    muon.param_groups[0]["split"] = THIRDS
    assert not muon.state_dict()["state"][0]["radius"].any()  # as the next step would begin from
    assert keeps_norms(weight, muon, THIRDS)


def test_a_replaced_parameter_keeps_the_split_of_its_radius(optimizer):
    weight, muon = hyperball(None, 2)
    muon.load_state_dict(muon.state_dict())
    new = nn.Parameter(weight.detach().clone())
    muon.param_groups[0].update(params=[new], split=THIRDS)
    assert keeps_norms(new, muon, THIRDS)
    assert list(muon._preparation.state_splits) == [new]  # nothing holds the old weight


def of_ranks_with_other_splits(rank, world):
    """Whether the radius stays, since all ranks raise, and a later common change begins it anew."""
    weight, muon = hyperball(None, 2, process_group=dist.group.WORLD)
    before = muon.state[weight]["radius"].clone()
    muon.param_groups[0]["split"] = THIRDS if rank else {"rows": [8, 4]}
    with pytest.raises(RuntimeError, match="group option split"):
        step_of(weight, muon, 3)
    muon.param_groups[0]["split"] = None
    stays = torch.equal(muon.state[weight]["radius"], before)
    step_of(weight, muon, 3)
    muon.param_groups[0]["split"] = THIRDS
    return stays and torch.equal(muon.state[weight]["radius"], before) and keeps_norms(weight, muon, THIRDS)


def of_owners_with_another_split(rank, world):
    """No state dict has the radius of the old split: consolidated before the change, after it, and by DCP."""
    weight, muon = hyperball(None, 2, process_group=dist.group.WORLD, shard_state=True)

    def radius(state):
        return state["radius"].full_tensor() if hasattr(state["radius"], "full_tensor") else state["radius"]

    muon.consolidate_state_dict(to=None)
    assert radius(muon.state_dict()["state"][0]).all()
    muon.param_groups[0]["split"] = THIRDS
    live = radius(muon.state_dict()["state"][0])  # not from the gathered state
    muon.consolidate_state_dict(to=None)
    gathered = muon.state_dict()["state"][0]["radius"]
    by_dcp = radius(dsd.get_optimizer_state_dict(nn.ParameterDict({"w": weight}), muon)["state"]["w"])
    assert all(found.shape == (12, 1) and not found.any() for found in (live, gathered, by_dcp))
    return keeps_norms(weight, muon, THIRDS)


@pytest.mark.parametrize("function", [of_ranks_with_other_splits, of_owners_with_another_split])
def test_a_radius_on_several_ranks(function, optimizer):
    assert all(run_ranks(2, function))


def of_a_rule_changed_after_the_gather(rank, world):
    """The shape of a state that the rule before the change had not: whole, as all state."""
    before, change = CHANGES["lion to adamw"]
    model, muon = live(before, None, 2, process_group=dist.group.WORLD, shard_state=True)
    step(model, muon, 1)
    muon.consolidate_state_dict(to=None)
    muon.param_groups[0].update(change)
    return [tuple(state["exp_avg_sq"].shape) for state in muon.state_dict()["state"].values()]


def test_a_rule_changed_after_the_gather(optimizer):
    assert run_ranks(2, of_a_rule_changed_after_the_gather) == [[(8, 6), (6, 8)]] * 2

"""What may change between saving and loading: wrappers, groups, schedules, forms of state; and what may not."""

from __future__ import annotations

import copy
import functools
import glob
import os
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.api import CheckpointException

from tests import test_checkpoint as chains
from tests.ranks import package, part, run_ranks, run_threads
from tests.test_checkpoint import FLAT, NESTED, STEPS, UNEVEN, Dcp, content, initial, model_of, unequal, whole
from tests.test_checkpoint_file import assert_equal

OPTIONS = pytest.mark.parametrize("options", [NESTED, FLAT], ids=["nested", "flat"])


def clean(name):
    return part("params.model.names").clean_name(name)


# wrappers --------------------------------------------------------------------------------------------------------

def wrapped(kind):
    """(model, options of the optimizer): one of 7 x 5, 9 x 7 and smaller parameters, under a wrapper."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 9), nn.LayerNorm(9))
    if "FSDP2" in kind:
        for layer in (model[1], model[3]):
            fully_shard(layer)
        fully_shard(model)
    if "compile" in kind:
        model = torch.compile(model)
    if "DDP" in kind:
        return nn.parallel.DistributedDataParallel(model), {"process_group": dist.group.WORLD}
    if "unreduced" in kind:
        return model, {"process_group": dist.group.WORLD, "grads_are_reduced": False}
    return model, {}


def make(kind):
    model, options = wrapped(kind)
    return model, package().NorMuon(package().get_default_muon_param_groups(model), lr=0.05, **options)


def step(model, optimizer, numbers):
    from torch.distributed.tensor import distribute_tensor

    for number in numbers:
        for i, (_, param) in enumerate(model.named_parameters()):
            generator = torch.Generator().manual_seed(100 * number + i)
            gradient = torch.randint(-99, 99, param.shape, generator=generator) / 16
            if hasattr(param, "device_mesh"):
                gradient = distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)
            param.grad = gradient
        optimizer.step()


WRAPPERS = ["plain", "DDP", "FSDP2", "compile", "compile FSDP2", "unreduced", "compile DDP", "FSDP2", "plain"]


def change_wrappers(rank, world, folder):
    differences, (other, one_process) = [], make("plain")
    for number, kind in enumerate(WRAPPERS):
        model, optimizer = make(kind)
        checkpoint = Dcp((NESTED, FLAT)[number % 2])
        if number:
            checkpoint.options = (NESTED, FLAT)[(number - 1) % 2]
            step(model, optimizer, [77])  # weights and state that the load has to replace
            checkpoint.load(model, optimizer, f"{folder}/{number - 1}")
            checkpoint.options = (NESTED, FLAT)[number % 2]
        step(model, optimizer, range(STEPS * number, STEPS * (number + 1)))
        checkpoint.save(model, optimizer, f"{folder}/{number}")
        step(other, one_process, range(STEPS * number, STEPS * (number + 1)))
        differences.append(unequal(model, optimizer, content(other, one_process)))
    return differences


def test_the_wrapper_may_change(tmp_path):
    assert run_ranks(2, change_wrappers, str(tmp_path)) == [[[]] * len(WRAPPERS)] * 2


# groups, schedules -----------------------------------------------------------------------------------------------

def matrices():
    generator = torch.Generator().manual_seed(0)
    return nn.ParameterDict({name: nn.Parameter(torch.randn(6, 4, generator=generator)) for name in "abcd"})


def grouped(kind, model, cuts, rates):
    """An optimizer of the kind with the parameters cut into groups; each with an lr of its own."""
    params = list(model.values())
    groups = [{"params": params[i:j], "lr": lr} for (i, j), lr in zip(zip(cuts, cuts[1:]), rates)]
    return kind(groups, lr=0.0)


@OPTIONS
@pytest.mark.parametrize(("before", "after"), [((0, 2, 4), (0, 1, 2, 4)), ((0, 2, 4), (0, 4)), ((0, 1, 4), (0, 3, 4))],
                         ids=["more", "one", "others"])
def test_the_group_list_may_change_as_in_torch(before, after, options):
    """Which rates the new groups get is torch's choice: they are those that its AdamW gets. Nested, all but the last of
    the groups that were cut from one get none, which leaves AdamW without; ours keep their own.
    """
    rates = {}
    for kind in (package().Muon, torch.optim.AdamW):
        model = matrices()
        optimizer = grouped(kind, model, before, (0.1, 0.2))
        step(model, optimizer, range(2))
        saved = copy.deepcopy(dsd.get_optimizer_state_dict(model, optimizer, options=options))
        optimizer.zero_grad()  # with gradients, torch creates no state to load into
        heir = grouped(kind, model, after, (5.0, 6.0, 7.0))
        dsd.set_optimizer_state_dict(model, heir, saved, options=options)
        for param in model.values():
            assert_equal(dict(heir.state[param]), dict(optimizer.state[param]))
        rates[kind] = [group.get("lr", own) for group, own in zip(heir.param_groups, (5.0, 6.0, 7.0))]
    assert rates[package().Muon] == rates[torch.optim.AdamW]
    assert options is NESTED or not {5.0, 6.0, 7.0} & set(rates[package().Muon])


@OPTIONS
def test_names_in_groups_stay_those_of_the_parameters(options):
    model = matrices()
    named = list(model.named_parameters())
    optimizer = package().Muon([{"params": named[:1]}, {"params": named[1:]}])
    step(model, optimizer, range(1))
    saved = copy.deepcopy(dsd.get_optimizer_state_dict(model, optimizer, options=options))
    heir = package().Muon([{"params": named[:2]}, {"params": named[2:]}])
    dsd.set_optimizer_state_dict(model, heir, saved, options=options)
    assert [group["param_names"] for group in heir.param_groups] == [["a", "b"], ["c", "d"]]


def named(model, order, prefix=""):
    """An optimizer of two groups that names its parameters."""
    groups = [[(prefix + name, model[name]) for name in part] for part in order]
    return package().Muon([{"params": groups[0]}, {"params": groups[1], "use_muon": False}])


@pytest.mark.parametrize(("saved_as", "order", "same_names"), [
    ("", ("ba", "dc"), True), ("_orig_mod.", ("ba", "dc"), True), ("", ("ab", "dc"), True),
    ("other.", ("ba", "dc"), False)])
def test_state_goes_by_name_where_both_sides_have_the_same(saved_as, order, same_names):
    """Else by position, as in torch; what somebody else keeps of a parameter goes with it."""
    model = matrices()
    optimizer = named(model, ("ab", "cd"), saved_as)
    step(model, optimizer, range(1))
    for name, param in model.items():
        optimizer.state[param]["mine"] = ord(name)
    heir = named(model, order)
    heir.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["param_names"] for group in heir.param_groups] == [list(part) for part in order]
    for ours, theirs in zip("".join(order) if same_names else "abcd", "".join(order)):
        assert_equal(dict(heir.state[model[theirs]]), dict(optimizer.state[model[ours]]))


def test_groups_that_came_from_torchs_adamw_make_another_optimizer():
    model = matrices()
    theirs = torch.optim.AdamW(model.values(), lr=0.2)
    step(model, theirs, range(1))
    ours = package().Muon([{"params": [*model.values()], "use_muon": False}])
    keys = set(ours.param_groups[0])
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.2
    assert set(ours.param_groups[0]) <= keys | {"fused", "foreach", "differentiable"}
    assert package().Muon(ours.param_groups).param_groups[0]["lr"] == 0.2


@OPTIONS
def test_dcp_knows_parameters_by_name_alone(options):
    """Its groups come with the names in the order in which they were saved, and the parameters in that of here."""
    model = matrices()
    optimizer, heir = named(model, ("ab", "cd")), named(model, ("ba", "dc"))
    step(model, optimizer, range(1))
    for param in model.values():
        param.grad = None
    saved = copy.deepcopy(dsd.get_optimizer_state_dict(model, optimizer, options=options))
    dsd.set_optimizer_state_dict(model, heir, saved, options=options)
    for param in model.values():
        assert_equal(dict(heir.state[param]), dict(optimizer.state[param]))


@OPTIONS
def test_a_schedule_goes_on(options):
    """Optimizer and scheduler saved in the warm-up, loaded into others with other rates."""
    def build(lr):
        model = matrices()
        optimizer = grouped(package().NorMuon, model, (0, 2, 4), (lr, 2 * lr))
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: (number + 1) / 8)

    def advance(model, optimizer, scheduler, numbers):
        for number in numbers:
            step(model, optimizer, [number])
            scheduler.step()

    model, optimizer, scheduler = build(0.1)
    advance(model, optimizer, scheduler, range(3))
    saved = copy.deepcopy((model.state_dict(), dsd.get_optimizer_state_dict(model, optimizer, options=options),
                           scheduler.state_dict()))
    other, heir, its_scheduler = build(3.0)
    other.load_state_dict(saved[0])
    dsd.set_optimizer_state_dict(other, heir, saved[1], options=options)
    its_scheduler.load_state_dict(saved[2])
    advance(model, optimizer, scheduler, range(3, 6))
    advance(other, heir, its_scheduler, range(3, 6))
    assert [g["lr"] for g in heir.param_groups] == [g["lr"] for g in optimizer.param_groups]
    assert_equal(other.state_dict(), model.state_dict())


def add_after_loading(rank, world, layout, folder):
    """Save, load, add a group with a matrix and one of AdamW, go on; beside one process that does it without stop."""
    results = []
    for where in (layout, "one process"):
        model, cut = model_of(UNEVEN, where, world)
        chains.fill(model, cut, initial(UNEVEN))
        later = {"dense.up", "rest.norm"}

        def build(model, where=where, later=later):
            plain = {"process_group": dist.group.WORLD, "grads_are_reduced": False} if where == "unreduced" else {}
            named = {name: p for name, p in model.named_parameters() if name not in later}
            rest = [p for name, p in named.items() if name.startswith("rest")]
            dense = [p for name, p in named.items() if not name.startswith("rest")]
            return package().NorMuon([{"params": dense}, {"params": rest, "use_muon": False}], lr=0.02, **plain)

        optimizer = build(model)
        chains.train(model, cut, optimizer, range(2))
        if where == layout:
            Dcp(NESTED).save(model, optimizer, folder)
            model, cut = model_of(UNEVEN, where, world)
            optimizer = build(model)
            Dcp(NESTED).load(model, optimizer, folder)
        named = dict(model.named_parameters())
        optimizer.add_param_group({"params": [named["dense.up"]], "lr": 0.5})
        optimizer.add_param_group({"params": [named["rest.norm"]], "lr": 0.5, "use_muon": False})
        chains.train(model, cut, optimizer, range(2, 5))
        results.append((model, optimizer))
    return unequal(*results[0], content(*results[1]))


@pytest.mark.parametrize("layout", ["fsdp", "unreduced"])
def test_groups_are_added_after_loading(layout, tmp_path):
    assert run_ranks(4, add_after_loading, layout, str(tmp_path)) == [[]] * 4


# state at its owner ----------------------------------------------------------------------------------------------

def freeze(rank, world):
    """Other parameters are trainable than before, so others own: state follows. Frozen ones keep theirs."""
    results, moved = [], 0
    for where in ("unreduced", "one process"):
        model, cut = model_of(UNEVEN, where, world)
        chains.fill(model, cut, initial(UNEVEN))
        optimizer = chains.build(model, "NorMuon", where)
        for phase, frozen in enumerate([(), ("dense.up", "experts.w1", "rest.embed"), ("dense.square",), ()]):
            before = {p: len(s["momentum_buffer"]) for p, s in optimizer.state.items() if "momentum_buffer" in s}
            for name, param in model.named_parameters():
                param.requires_grad_(name not in frozen)
            for number in (2 * phase, 2 * phase + 1):
                generator = torch.Generator().manual_seed(number)
                for name, param in model.named_parameters():
                    gradient = torch.randint(-99, 99, param.shape, generator=generator) / 16
                    param.grad = None if name in frozen else gradient.to(param.dtype)
                optimizer.step()
            moved += sum(len(optimizer.state[p]["momentum_buffer"]) != rows for p, rows in before.items())
        for param in model.parameters():
            param.requires_grad_(True)
        results.append((model, optimizer))
    return unequal(*results[0], content(*results[1])), moved


def test_owned_state_follows_its_owner():
    results = run_ranks(4, freeze)
    assert [difference for difference, _ in results] == [[]] * 4
    assert sum(moved for _, moved in results) > 0


def present_rows(rank, world):
    """The shown state is 1/W on each rank, the optimizer's own stays where it was."""
    model, cut = model_of(UNEVEN, "unreduced", world)
    optimizer = chains.build(model, "NorMuon", "unreduced")
    chains.train(model, cut, optimizer, range(3))
    own = {p: {key: (t.data_ptr(), t.shape) for key, t in s.items()} for p, s in optimizer.state.items()}
    shown = optimizer.state_dict()["state"]
    for param, state in zip((p for g in optimizer.param_groups for p in g["params"]), shown.values()):
        for key, value in state.items():
            rows = -(-param.shape[0] // world)
            assert key == "step" or len(value.to_local()) == max(0, min(rows, param.shape[0] - rank * rows))
            assert value.shape == part("rules.rule").state_shape(param, key)
    assert own == {p: {key: (t.data_ptr(), t.shape) for key, t in s.items()} for p, s in optimizer.state.items()}


def test_owned_state_is_shown_by_rows():
    run_threads(4, present_rows)


def count_steps(rank, world):
    """AdamW's parameters of 5 rows, of which the last rank has none, each cut over several buckets."""
    results = []
    for options in ({"process_group": dist.group.WORLD, "grads_are_reduced": False, "workspace_bytes": 16_000}, {}):
        params = [nn.Parameter(torch.full((5, 60), float(i))) for i in range(3)]
        optimizer = package().Muon([{"params": params, "use_muon": False}], lr=0.1, **options)
        for missing in (None, 1, 1, None):
            for i, param in enumerate(params):
                param.grad = None if i == missing else torch.full_like(param, 0.5 + i)
            optimizer.step()
        shown = optimizer.state_dict()["state"].values()
        results.append([params, *([whole(state[key]) for state in shown] for key in ("exp_avg", "exp_avg_sq", "step"))])
        results[-1].append([optimizer.state[param]["step"] for param in params])
        routes = [type(route).__name__ for route, _ in optimizer._bound.jobs]
        assert not options or routes.count("UnreducedElementwiseUpdate") == 6
    return all(torch.equal(a, b) for first, second in zip(*results) for a, b in zip(first, second))


def test_steps_are_true_on_every_rank():
    """Also where a rank has no row of a parameter, and where no rank had a gradient for a while."""
    assert run_threads(4, count_steps) == [True] * 4


def load_and_show(rank, world):
    """What was loaded is shown before the next step as after it, whole or by rows."""
    for form in (whole, lambda value: value):
        model, cut, optimizer = trained("unreduced", world)
        saved = optimizer.state_dict()
        saved["state"] = {number: {key: form(value) for key, value in state.items()}
                          for number, state in saved["state"].items()}
        kept = content(model, optimizer)
        heir = chains.build(model, "NorMuon", "unreduced")
        heir.load_state_dict(saved)
        if unequal(model, heir, kept):
            return False
    return True


def test_loaded_state_is_shown_before_it_is_claimed():
    assert run_threads(4, load_and_show) == [True] * 4


def scalar(rank, world):
    """A 0-D parameter cannot be cut: its state is shown whole."""
    params = [nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(5))]

    def build(params):
        return package().Muon([{"params": params, "use_muon": False}], lr=0.1, process_group=dist.group.WORLD,
                              grads_are_reduced=False)

    optimizer, rows = build(params), []
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0]["exp_avg"].shape == () and saved["state"][0]["exp_avg"] > 0
    again = [nn.Parameter(p.detach().clone()) for p in params]
    heir = build(again)
    heir.load_state_dict(saved)
    for ours, stepped in ((params, optimizer), (again, heir)):
        for param in ours:
            param.grad = torch.full_like(param, 0.5)
        stepped.step()
        rows.append([t.tolist() for p in ours for t in (p, *stepped.state[p].values())])
    return rows[0] == rows[1]


def test_owned_state_of_a_scalar():
    assert run_threads(3, scalar) == [True] * 3


def half_loaded(rank, world):
    """One rank loads, the other does not: both are told, by whichever call comes first."""
    messages = []
    for use in ("step", "state_dict"):
        params = [("w", nn.Parameter(torch.ones(4, 3)))]
        optimizer = package().Muon(params, process_group=dist.group.WORLD, grads_are_reduced=False)
        if rank == 0:
            momentum = {"momentum_buffer": torch.ones(4, 3)}
            group = optimizer.param_groups[0] | {"params": [0]}
            optimizer.load_state_dict({"state": {0: momentum}, "param_groups": [group]})
        params[0][1].grad = torch.ones(4, 3)
        with pytest.raises(RuntimeError, match="of parameter w, .*: load the state on all ranks") as caught:
            getattr(optimizer, use)()
        messages.append(str(caught.value))
    return messages


def test_a_load_on_some_ranks_only_is_told():
    first, second = run_threads(2, half_loaded)
    assert first == second and len(first) == 2


# other forms of state --------------------------------------------------------------------------------------------

LAYOUTS = ["fsdp columns", "tp x fsdp", "unreduced", "fsdp", "ddp", "unreduced", "ep x fsdp", "one process"]


def trained(layout, world, steps=2):
    model, cut = model_of(UNEVEN, layout, world)
    chains.fill(model, cut, initial(UNEVEN))
    optimizer = chains.build(model, "NorMuon", layout)
    chains.train(model, cut, optimizer, range(steps))
    return model, cut, optimizer


@functools.cache
def alone():
    """Of one process: the state after two steps as DCP has it, and the content after four."""
    model, cut, optimizer = trained("one process", 1)
    state = copy.deepcopy(dsd.get_optimizer_state_dict(model, optimizer)["state"])
    chains.train(model, cut, optimizer, range(2, 4))
    return state, content(model, optimizer)


def full_states(rank, world, theirs, after):
    """full_state_dict gives every rank the whole; loaded from rank 0 alone, it does for every layout."""
    differences = []
    for layout in ("fsdp columns", "hsdp", "unreduced", "ddp"):
        model, cut, optimizer = trained(layout, world)
        full = dsd.get_optimizer_state_dict(model, optimizer, options=dsd.StateDictOptions(full_state_dict=True))
        for name, state in full["state"].items():
            whole_state = theirs[name]
            assert state.keys() == whole_state.keys()
            differences += [(layout, name, key) for key in state if not torch.equal(state[key], whole_state[key])]
        if layout == "fsdp columns" and torch.__version__.startswith("2.11."):
            continue  # it loads wrong values there, torch's AdamW too (docs/checkpoint.md)
        heir_of, cut, heir = trained(layout, world, steps=1)
        chains.fill(heir_of, cut, {name: whole(p.detach()) for name, p in model.named_parameters()})
        from_first = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        dsd.set_optimizer_state_dict(heir_of, heir, full if rank == 0 else {}, options=from_first)
        chains.train(heir_of, cut, heir, range(2, 4))
        differences += [(layout, key) for key in unequal(heir_of, heir, after)]
    return differences


def test_full_state_dicts_are_whole_on_every_rank():
    assert run_ranks(4, full_states, *alone()) == [[]] * 4


def plain_loads(rank, world, after):
    """load_state_dict takes the live state of any layout, without a file between."""
    differences = []
    for first, second in zip(LAYOUTS, LAYOUTS[1:] + LAYOUTS[:1]):
        model, _, optimizer = trained(first, world)
        heir_of, cut, heir = trained(second, world, steps=1)
        chains.fill(heir_of, cut, {name: whole(p.detach()) for name, p in model.named_parameters()})
        heir.load_state_dict(optimizer.state_dict())
        chains.train(heir_of, cut, heir, range(2, 4))
        differences += [(first, second, key) for key in unequal(heir_of, heir, after)]
    return differences


def test_load_state_dict_takes_the_state_of_any_layout():
    assert run_ranks(4, plain_loads, alone()[1]) == [[]] * 4


SAFE = ["tp x fsdp", "unreduced", "ddp", "one process"]


def safe_loads(rank, world, folder):
    """torch.load needs no unpickling of code for the state of any layout."""
    equal = []
    for layout in SAFE:
        model, cut, optimizer = trained(layout, world)
        path = os.path.join(folder, f"{layout} {rank}")
        torch.save(optimizer.state_dict(), path)
        heir_of, cut, heir = trained(layout, world, steps=0)
        heir.load_state_dict(torch.load(path, weights_only=True))
        chains.fill(heir_of, cut, {name: whole(p.detach()) for name, p in model.named_parameters()})
        for pair in ((model, cut, optimizer), (heir_of, cut, heir)):
            chains.train(*pair, [2])
        equal.append(unequal(model, optimizer, content(heir_of, heir)))
    return equal


def test_files_of_torch_save_load_with_weights_only(tmp_path):
    assert run_ranks(4, safe_loads, str(tmp_path)) == [[[]] * len(SAFE)] * 4


def from_one_file(rank, world, folder):
    model, cut, optimizer = trained("fsdp", world, steps=1)
    weights, _, one_process = trained("one process", world)
    tensors = chains.tensors_of(chains.flat_state(model, optimizer))
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(folder))
    state = chains.flat_state(model, optimizer) | tensors
    dsd.set_optimizer_state_dict(model, optimizer, state, options=FLAT)
    chains.fill(model, cut, dict(weights.named_parameters()))
    for member in ((model, cut, optimizer), (weights, lambda name, full: full, one_process)):
        chains.train(*member, [2])
    return unequal(model, optimizer, content(weights, one_process))


def test_the_file_of_one_process_is_read_by_dcp(tmp_path):
    """Its names are DCP's: state that one process exported goes on sharded."""
    model, _, optimizer = trained("one process", 1)
    package().export_state(optimizer, tmp_path / "state.safetensors", model)
    assert run_ranks(2, from_one_file, str(tmp_path)) == [[]] * 2


# what does not fit -----------------------------------------------------------------------------------------------

def swap_kinds(saved):
    saved["param_groups"].reverse()
    for group in saved["param_groups"]:
        del group["param_names"]


def swap_names(saved):
    first, second = saved["param_groups"]
    first["param_names"], second["param_names"] = second["param_names"], first["param_names"]


def transpose(saved):
    saved["state"][1]["momentum_buffer"] = saved["state"][1]["momentum_buffer"].T


def rename(saved):
    saved["state"][2] = {"moment1": saved["state"][2]["exp_avg"], "moment2": saved["state"][2]["exp_avg_sq"]}


def lose(number, key):
    return lambda saved: saved["state"][number].pop(key)


def recast(number, key, dtype):
    def change(saved):
        saved["state"][number][key] = saved["state"][number][key].to(dtype)
    return change


@pytest.mark.parametrize(("change", "message"), [
    (swap_kinds, "parameter group 0 .* is one of AdamW in the state dict, but of Muon here"),
    (swap_names, "parameter a is in a group of AdamW in the state dict, but in one of Muon here"),
    (transpose, r"momentum_buffer of parameter b has shape \(4, 6\) in the state, but .* of shape \(6, 4\) needs"),
    (rename, "the state of parameter c is moment1, moment2, but it needs step, exp_avg, exp_avg_sq"),
    (lose(3, "exp_avg_sq"), "parameter d is exp_avg, step, but it needs step, exp_avg, exp_avg_sq: a part"),
    (lose(3, "exp_avg"), "parameter d is exp_avg_sq, step, but it needs step, exp_avg, exp_avg_sq: a part"),
    (lose(3, "step"), "parameter d is exp_avg, exp_avg_sq, but it needs step, exp_avg, exp_avg_sq: a part"),
    (lose(1, "momentum_buffer"), "the state of parameter b is second_moment, but it needs momentum_buffer"),
    (recast(1, "momentum_buffer", torch.int64), "momentum_buffer of parameter b has dtype torch.int64 in the state"),
    (recast(1, "second_moment", torch.bool), "second_moment of parameter b has dtype torch.bool in the state"),
    (recast(3, "exp_avg", torch.complex64), "exp_avg of parameter d has dtype torch.complex64 in the state"),
    (recast(3, "step", torch.bool), "step of parameter d has dtype torch.bool in the state"),
], ids=["kinds", "kinds of names", "shape", "keys", "no exp_avg_sq", "no exp_avg", "no step", "no momentum", "int64",
        "bool", "complex", "bool step"])
def test_state_that_does_not_fit_is_refused_and_changes_nothing(change, message):
    runs = []
    for refuse in (True, False):
        model = matrices()
        named = list(model.named_parameters())
        optimizer = package().NorMuon([{"params": named[:2]}, {"params": named[2:], "use_muon": False}], lr=0.1)
        step(model, optimizer, range(2))
        if refuse:
            saved = copy.deepcopy(optimizer.state_dict())
            change(saved)
            with pytest.raises(ValueError, match=message):
                optimizer.load_state_dict(saved)
        step(model, optimizer, range(2, 4))
        runs.append((model.state_dict(), optimizer.state_dict()))
    assert_equal(*(list(run) for run in runs))


@pytest.mark.parametrize("change", [lambda state: state.clear(), lambda state: state.update(step=2),
                                    lambda state: state.update(step=torch.tensor(2))],
                         ids=["none", "whole number", "tensor of whole number"])
def test_state_of_adamw_is_whole_or_none(change):
    """And steps may be whole numbers, as other optimizers count them."""
    model = matrices()
    groups = [{"params": list(model.values()), "use_muon": False}]
    optimizer, heir = (package().Muon(groups, lr=0.1) for _ in range(2))
    step(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved["state"][0])
    heir.load_state_dict(saved)
    assert_equal(heir.state[model["a"]], dict(optimizer.state[model["a"]]) if saved["state"][0] else {})


def test_normuon_goes_on_with_the_state_of_muon():
    """Its second moment begins at zero, as in a first step."""
    model = matrices()
    muon, normuon = (getattr(package(), make)(model.parameters(), lr=0.1) for make in ("Muon", "NorMuon"))
    step(model, muon, range(2))
    normuon.load_state_dict(muon.state_dict())
    step(model, normuon, range(2, 3))
    step(model, muon, range(2, 3))
    for param in model.values():
        assert torch.equal(normuon.state[param]["momentum_buffer"], muon.state[param]["momentum_buffer"])
        assert normuon.state[param]["second_moment"].min() > 0


def truncate(path):
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) * 6 // 10)


def edit(change):
    """Damage that leaves a good file. `change`: of {name: tensor} and the name of a momentum."""
    def damage(path):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        change(tensors, next(name for name in tensors if name.endswith("up.momentum_buffer")))
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata)
    return damage


def shorten(tensors, name):
    tensors[name] = tensors[name][:-1]


DAMAGES = {"truncated": truncate, "file gone": os.remove, "tensor gone": edit(dict.pop), "shape": edit(shorten)}


def damaged(rank, world, folder, kind):
    """What each kind of damage to the last file does to a run that loads them; what the whole files do."""
    model, cut, optimizer = trained("fsdp", world)
    chains.FORMATS[kind].save(model, optimizer, f"{folder}/whole")
    saved = content(model, optimizer)
    chains.train(model, cut, optimizer, range(2, 4))
    live, told = content(model, optimizer), {}
    for name, damage in DAMAGES.items():
        if rank == 0:
            shutil.copytree(f"{folder}/whole", f"{folder}/{name}")
            damage(max(glob.glob(f"{folder}/{name}/*.safetensors")))
        dist.barrier()
        try:
            chains.FORMATS[kind].load(model, optimizer, f"{folder}/{name}")
        except CheckpointException as error:
            told[name] = repr(error.failures)
        told[name] = told.get(name), unequal(model, optimizer, live)
    chains.FORMATS[kind].load(model, optimizer, f"{folder}/whole")
    return told, len(unequal(model, optimizer, live)), unequal(model, optimizer, saved)


@pytest.mark.parametrize(("kind", "gone"), [
    ("safetensors", "Size mismatch"), ("consolidated safetensors", "Missing key")])
def test_damaged_safetensors_are_refused_and_change_nothing(kind, gone, tmp_path):
    """Of files for each rank, the last says how long a tensor is. That another is gone, DCP does not notice."""
    messages = {"truncated": "metadata is None", "file gone": gone, "tensor gone": gone, "shape": "Size mismatch"}
    for told, replaced, unlike in run_ranks(2, damaged, str(tmp_path), kind):
        assert replaced > 8 and not unlike
        for name, message in messages.items():
            assert message in told[name][0] and not told[name][1], (name, told[name])


def test_hooks_see_the_state_that_was_loaded():
    model = matrices()
    optimizer = package().Muon(model.parameters(), lr=0.1)
    step(model, optimizer, range(2))
    heir, seen = package().Muon(model.parameters(), lr=5.0), []
    heir.register_load_state_dict_post_hook(lambda o: seen.append((o.param_groups[0]["lr"], dict(o.state))))
    heir.load_state_dict(optimizer.state_dict())
    ((lr, state),) = seen
    assert lr == 0.1
    assert_equal(state, dict(optimizer.state))


@pytest.mark.parametrize("key, value", [("maximize", True), ("amsgrad", True), ("decoupled_weight_decay", False)])
def test_options_that_would_be_lost_are_refused(optimizer, key, value):
    params = [nn.Parameter(torch.randn(4, 4))]
    theirs = torch.optim.Adam(params, weight_decay=0.1)
    state, ours = theirs.state_dict(), optimizer.Muon([{"params": params, "use_muon": False}])
    state["param_groups"][0] |= {"decoupled_weight_decay": True, key: value}
    with pytest.raises(ValueError, match=f"was saved with {key}={value}"):
        ours.load_state_dict(state)


def test_a_state_of_normuon_is_none_of_muon(optimizer):
    params = [nn.Parameter(torch.randn(4, 4))]
    with pytest.raises(ValueError, match="was saved with rule='normuon', but has 'muon' here"):
        optimizer.Muon(params).load_state_dict(optimizer.NorMuon(params).state_dict())


@pytest.mark.parametrize(("key", "value"), [
    ("lr", -1.0), ("lr", "1e-3"), ("momentum", 2.0), ("weight_decay", float("nan")), ("adjust_lr_fn", "none"),
    ("ns_steps", 0)], ids=str)
def test_wrong_numbers_are_refused_before_anything_is_changed(key, value, optimizer):
    param = nn.Parameter(torch.ones(4, 6))
    muon = optimizer.Muon([param], lr=0.1)
    param.grad = torch.ones(4, 6)
    muon.step()
    saved, kept = muon.state_dict(), muon.state[param]["momentum_buffer"].clone()
    saved = {**saved, "param_groups": [{**saved["param_groups"][0], key: value}]}
    with pytest.raises(ValueError, match=key.partition("_")[0]):
        muon.load_state_dict(saved)
    assert muon.param_groups[0][key] != value and torch.equal(muon.state[param]["momentum_buffer"], kept)
    muon.step()


@pytest.mark.parametrize(("key", "value"), [("lr", -1.0), ("weight_decay", "much"), ("ns_steps", 0)])
def test_a_number_that_is_not_allowed_names_its_group(key, value):
    params = [nn.Parameter(torch.randn(4, 6)) for _ in range(3)]
    optimizer = package().Muon([{"params": [("a", params[0])]}, {"params": [("b", params[1]), ("c", params[2])]}])
    saved, before = optimizer.state_dict(), optimizer.param_groups[1][key]
    saved["param_groups"][1][key] = value
    with pytest.raises(ValueError, match=rf"group 1 \(b, \.\.\.\): {key}"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[1][key] == before

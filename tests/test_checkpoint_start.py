"""State before there is any: created on request, by torch.distributed.checkpoint, or lost."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from tests import test_checkpoint as chains
from tests.ranks import package, run_ranks, run_threads
from tests.test_checkpoint import FLAT, NESTED, UNEVEN, content, initial, model_of, unequal
from tests.test_checkpoint_file import assert_equal

LAYOUTS = ("fsdp", "ddp", "unreduced", "one process")
BOTH = pytest.mark.parametrize("options", [NESTED, FLAT], ids=["nested", "flat"])


def small(seed=0):
    """A model with two matrices and two biases, and its default groups."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
    return model, package().get_default_muon_param_groups(model)


def give_gradients(model, number=0):
    generator = torch.Generator().manual_seed(number)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def with_one_gradient(make="NorMuon"):
    """A model and its optimizer after a step in which the first matrix alone had a gradient."""
    model, groups = small()
    optimizer = getattr(package(), make)(groups)
    model[0].weight.grad = torch.ones(24, 16)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def flat_after_a_step(model, optimizer):
    """The flattened state after a step with all gradients, which are gone then."""
    give_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    return copy.deepcopy(dsd.get_optimizer_state_dict(model, optimizer, options=FLAT))


def forms(optimizer):
    """What state there is: of each parameter, by its place, (shape, dtype, device, placements)."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [{key: (t.shape, t.dtype, t.device, getattr(t, "placements", None))
             for key, t in sorted(optimizer.state[p].items())} for p in params if p in optimizer.state]


# init_state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["Muon", "NorMuon"])
def test_state_on_request_is_that_of_a_first_step_before_it(make):
    model, groups = small()
    stepped, fresh = (getattr(package(), make)(groups) for _ in range(2))
    give_gradients(model)
    stepped.step()
    fresh.init_state()
    assert forms(fresh) == forms(stepped) and len(forms(fresh)) == 4
    assert not any(t.any() for state in fresh.state.values() for t in state.values())


def test_what_is_frozen_or_has_state_is_left_alone():
    model, groups = small()
    optimizer = package().NorMuon(groups)
    model[2].bias.requires_grad_(False)
    momentum = torch.ones(24, 16)
    optimizer.state[model[0].weight]["momentum_buffer"] = momentum
    optimizer.init_state()
    assert model[2].bias not in optimizer.state and len(optimizer.state) == 3
    assert optimizer.state[model[0].weight]["momentum_buffer"] is momentum and (momentum == 1).all()
    assert not optimizer.state[model[0].weight]["second_moment"].any()


def start_on_request(rank, world):
    """Nothing travels, and training has the bits of a run that never asked."""
    results = []
    for layout in LAYOUTS[:3]:
        runs = []
        for ask in (True, False):
            model, cut = model_of(UNEVEN, layout, world)
            chains.fill(model, cut, initial(UNEVEN))
            optimizer = chains.build(model, "NorMuon", layout)
            if ask:
                with pytest.MonkeyPatch.context() as patch:
                    for name in ("all_gather", "all_reduce", "all_to_all_single", "broadcast"):
                        patch.setattr(dist, name, None)
                    optimizer.init_state()
            chains.train(model, cut, optimizer, range(2))
            runs.append((model, optimizer))
        results.append(unequal(*runs[0], content(*runs[1])))
    return results


def test_a_run_that_began_on_request_has_the_same_bits():
    """Also where owners keep the state: rows go to them in the first step."""
    assert run_ranks(3, start_on_request) == [[[]] * 3] * 3


def count_rows(rank, world):
    shapes = [(5, 3), (7,), (), (2, 4, 3)]
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = package().NorMuon([{"params": [params[0], params[3]]},
                                   {"params": params[1:3], "use_muon": False}],
                                  process_group=dist.group.WORLD, shard_state=True)
    optimizer.init_state()
    return [{key: tuple(t.shape) for key, t in optimizer.state[p].items() if key != "step"}
            for p in params]


def test_state_of_owners_is_no_larger_on_request():
    """Each rank has some rows: as many as a DTensor cut by rows has there."""
    first, second, third = run_threads(3, count_rows)
    assert first[0] == {"momentum_buffer": (2, 3), "second_moment": (2, 1)} == second[0]
    assert third[0] == {"momentum_buffer": (1, 3), "second_moment": (1, 1)}
    assert [ranks[1]["exp_avg"] for ranks in (first, second, third)] == [(3,), (3,), (1,)]
    assert [ranks[2]["exp_avg_sq"] for ranks in (first, second, third)] == [(1,), (0,), (0,)]
    assert [ranks[3]["momentum_buffer"][0] for ranks in (first, second, third)] == [1, 1, 0]


def test_it_waits_for_what_has_left_during_backward(monkeypatch):
    _, groups = small()
    optimizer = package().Muon(groups)
    monkeypatch.setattr(type(optimizer._backward_overlap), "has_started", True)
    with pytest.raises(RuntimeError, match="init_state is not possible now: .* Call step"):
        optimizer.init_state()
    assert not optimizer.state


# what asks for a state dict ----------------------------------------------------------------------


def load_by_itself(rank, world, folder):
    """dcp.save and dcp.load of optimizers, without get_optimizer_state_dict."""
    differences = []
    for layout in LAYOUTS[:3]:
        model, cut = model_of(UNEVEN, layout, world)
        chains.fill(model, cut, initial(UNEVEN))
        optimizer = chains.build(model, "NorMuon", layout)
        chains.train(model, cut, optimizer, range(2))
        dcp.save({"optimizer": optimizer}, checkpoint_id=f"{folder}/{layout}")
        heir = chains.build(model, "NorMuon", layout)
        dcp.load({"optimizer": heir}, checkpoint_id=f"{folder}/{layout}")
        differences += unequal(model, heir, content(model, optimizer))
    return differences


def test_a_fresh_optimizer_is_loaded_as_it_is(tmp_path):
    assert run_ranks(2, load_by_itself, str(tmp_path)) == [[]] * 2


def test_who_shards_later_gets_no_state_and_its_memory_back():
    """accelerate's `prepare` loads the state dict of an optimizer back, and then shards the model.
    State would be whole on every rank then, and keep whole parameters in memory.
    """
    model, groups = small()
    optimizer = package().Muon(groups)
    del groups
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state
    gone = weakref.ref(model[0].weight)
    for group in optimizer.param_groups:
        group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
    del model
    gc.collect()
    assert gone() is None


def other_half(rank, world):
    """Rank 0 has loaded its rows, rank 1 nothing, which zeros must not make up for."""
    def build():
        param = nn.Parameter(torch.ones(4, 3))
        model = nn.ParameterDict({"w": param})
        return model, package().Muon([("w", param)], process_group=dist.group.WORLD, shard_state=True)

    model, optimizer = build()
    model["w"].grad = torch.ones(4, 3)
    optimizer.step()
    saved = optimizer.state_dict()
    model, heir = build()
    if rank == 0:
        heir.load_state_dict(saved)
    else:
        heir.state[nn.Parameter(torch.ones(1))] = {}  # so that torch takes no step
    with pytest.raises(RuntimeError, match="of parameter w, .*: load the state on all ranks"):
        dsd.get_optimizer_state_dict(model, heir)
    return True


def test_rows_that_one_rank_has_not_loaded_are_told():
    assert run_threads(2, other_half) == [True] * 2


# a first step with zero gradients and lr 0 --------------------------------------------------------


@pytest.mark.parametrize("nonfinite", ["propagate", "skip", "raise"])
def test_a_look_is_no_step(nonfinite):
    """The step that torch takes to create state; the next one is the first."""
    runs = []
    for look in (True, False):
        model, groups = small()
        optimizer = package().NorMuon(groups, lr=0.1, nonfinite=nonfinite)
        if look:
            dsd.get_optimizer_state_dict(model, optimizer)
            assert len(optimizer.state) == 4
            assert not any(t.any() for s in optimizer.state.values() for t in s.values())
        for number in range(2):
            give_gradients(model, number)
            optimizer.step()
        runs.append((model.state_dict(), optimizer.state_dict()))
    assert_equal(*map(list, runs))


def count_looks(rank, world):
    counts = []
    for layout in LAYOUTS[:3]:
        model, cut = model_of(UNEVEN, layout, world)
        optimizer = chains.build(model, "Muon", layout)
        dsd.get_optimizer_state_dict(model, optimizer)
        steps = [s["step"].item() for s in optimizer.state.values() if "step" in s]
        chains.train(model, cut, optimizer, range(1))
        counts += [steps, [s["step"].item() for s in optimizer.state.values() if "step" in s]]
    return counts


def test_a_look_is_no_step_on_any_layout():
    assert run_ranks(3, count_looks) == [[[0.0, 0.0], [1.0, 1.0]] * 3] * 3


def warm_up(rank, world):
    """lr 0 with real gradients; of some parameters, and on some ranks, they are all zero."""
    counts = []
    for layout in LAYOUTS[:3]:
        model, cut = model_of(UNEVEN, layout, world)
        optimizer = chains.build(model, "Muon", layout)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for name, param in model.named_parameters():
            gradient = torch.zeros(UNEVEN[name], dtype=param.dtype)
            if name == "rest.embed":
                gradient[:2] = 1.0  # of rank 0 alone, where rows are cut
            param.grad = cut(name, gradient)
        optimizer.step()
        counts.append([s["step"].item() for s in optimizer.state.values() if "step" in s])
    return counts


def test_a_warm_up_that_begins_at_zero_counts():
    """On every rank with a part of a parameter whose gradient is not zero. All copies of gradients
    are alike, so that with plain parameters every rank has seen one.
    """
    sharded, *plain = zip(*run_ranks(2, warm_up))
    assert plain == [([1.0, 1.0],) * 2] * 2
    assert sharded == ([1.0, 1.0],) * 2


def test_a_zero_gradient_counts_beside_others_as_with_torch():
    """As of an adapter's first factor while the second one is zero."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizers = [package().Muon([{"params": params, "use_muon": False}], lr=0.0),
                  torch.optim.AdamW(params, lr=0.0)]
    params[0].grad, params[1].grad = torch.zeros(3), torch.ones(3)
    for optimizer in optimizers:
        optimizer.step()
        assert [optimizer.state[p]["step"].item() for p in params] == [1.0, 1.0]


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_only_the_first_step_creates(lr):
    """A later one with lr 0 and zero gradients counts, as in torch; so does the first with lr."""
    for first in (0.1, lr):
        param = nn.Parameter(torch.ones(3))
        optimizer = package().Muon([{"params": [param], "use_muon": False}], lr=first)
        counts = []
        for _ in range(2):
            param.grad = torch.zeros(3)
            optimizer.step()
            counts.append(optimizer.state[param]["step"].item())
            optimizer.param_groups[0]["lr"] = lr
        assert counts == ([1.0, 2.0] if first == 0.1 else [0.0, 1.0])


# state with holes, or with other keys -------------------------------------------------------------


def with_a_hole():
    """The flattened state of a model of which one parameter alone had a gradient, as torch's own
    optimizers leave it: without keys of the others.
    """
    model, optimizer = with_one_gradient()
    saved = dsd.get_optimizer_state_dict(model, optimizer, options=FLAT)
    return {key: value for key, value in saved.items()
            if not key.startswith("state.") or key.startswith("state.0.weight.")}, optimizer, model


def test_holes_of_a_checkpoint_begin_anew():
    saved, optimizer, model = with_a_hole()
    other, groups = small()
    heir = package().NorMuon(groups)
    with pytest.warns(UserWarning, match="no state was loaded for 3 parameters .*begin anew") as told:
        dsd.set_optimizer_state_dict(other, heir, copy.deepcopy(saved), options=FLAT)
    assert told[0].filename == __file__
    assert_equal(dict(heir.state[other[0].weight]), dict(optimizer.state[model[0].weight]))
    assert not any(heir.state[p] for p in list(other.parameters())[1:])
    give_gradients(other)
    heir.step()
    assert [heir.state[p]["step"].item() for p in (other[0].bias, other[2].bias)] == [1.0, 1.0]


def hand_over(adamw, optimizer):
    """The block of docs/migration.md."""
    matrices = {p for group in optimizer.param_groups if group["use_muon"] for p in group["params"]}
    number = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state = optimizer.state_dict()
    for p, kept in adamw.state.items():
        state["state"][number[p]] = {"momentum_buffer": kept["exp_avg"]} if p in matrices else kept
    for group in state["param_groups"]:
        group.pop("momentum_steps", None)
    optimizer.load_state_dict(state)


def after_adamw(shard=None):
    """The weights after two steps of AdamW and two of Muon, which goes on with AdamW's averages."""
    model, _ = small()
    if shard is not None:
        shard(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=generator)
            param.grad = grad if shard is None else distribute_tensor(grad, param.device_mesh, param.placements)
        if number == 2:
            optimizer = package().Muon(package().get_default_muon_param_groups(model), lr=1e-2)
            hand_over(adamw, optimizer)
            assert optimizer.state[model[0].bias]["step"].item() == 2
        (adamw if number < 2 else optimizer).step()
    return [p.detach() if shard is None else p.full_tensor() for p in model.parameters()]


def after_adamw_on_two_ranks(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    return after_adamw(lambda model: [fully_shard(part, mesh=mesh) for part in (model[0], model)])


def test_adamws_averages_go_on_as_momentum_sharded_and_whole():
    whole = after_adamw()
    for weights in run_ranks(2, after_adamw_on_two_ranks):
        assert all(map(torch.equal, weights, whole))


def test_adamws_averages_count_as_a_full_mean_with_bias_correction():
    weights = []
    for form in ("ema", "bias_corrected"):
        model, groups = small()
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = package().Muon(groups, lr=1e-2, momentum_form=form)
        for number, stepped in enumerate((adamw, adamw, optimizer)):
            give_gradients(model, number)
            if stepped is optimizer:
                hand_over(adamw, optimizer)
            stepped.step()
        weights.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("named", [False, True])
def test_state_of_adamw_for_all_parameters_names_the_way(named):
    model, groups = small()
    adamw = torch.optim.AdamW(model.named_parameters() if named else model.parameters())
    give_gradients(model)
    adamw.step()
    with pytest.warns(UserWarning) if named else warnings.catch_warnings():
        with pytest.raises(ValueError, match="AdamW's averages can become momentum: docs/migration.md"):
            package().Muon(groups).load_state_dict(adamw.state_dict())


@pytest.mark.parametrize("key", ["exp_avg", "step"])
def test_half_a_hole_is_a_loss(key):
    saved, _, _ = with_a_hole()
    zeros = {"exp_avg": torch.zeros(24), "exp_avg_sq": torch.zeros(24), "step": torch.tensor(1.0)}
    saved |= {f"state.0.bias.{name}": t for name, t in zeros.items() if name != key}
    other, groups = small()
    with pytest.raises(ValueError, match="the state of parameter 0.bias is .* a part of it was lost"):
        dsd.set_optimizer_state_dict(other, package().NorMuon(groups), saved, options=FLAT)


@BOTH
def test_checkpoints_have_no_holes(options, tmp_path):
    """Where torch.distributed.checkpoint asks, every parameter that is trained has state."""
    model, optimizer = with_one_gradient()
    state = dsd.get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save(state, checkpoint_id=tmp_path)
    other, groups = small()
    heir = package().NorMuon(groups)
    state = dsd.get_optimizer_state_dict(other, heir, options=options)
    dcp.load(state, checkpoint_id=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        dsd.set_optimizer_state_dict(other, heir, state, options=options)
    assert_equal(heir.state_dict()["state"], optimizer.state_dict()["state"])
    for member, its in ((model, optimizer), (other, heir)):
        member.load_state_dict(small(1)[0].state_dict())
        give_gradients(member)
        its.step()
    assert_equal(other.state_dict(), model.state_dict())


def test_holes_of_the_optimizer_lose_nothing_if_it_is_asked_first():
    """The flattened form takes no state of a parameter that has none yet: what docs/checkpoint.md
    says to do about it.
    """
    model, groups = small()
    optimizer = package().Muon(groups)
    saved = flat_after_a_step(model, optimizer)
    for complete in (False, True):
        other, heir = with_one_gradient("Muon")
        if complete:
            heir.init_state()
            dsd.set_optimizer_state_dict(other, heir, saved, options=FLAT)
            assert_equal(heir.state_dict(), optimizer.state_dict())
            continue
        with pytest.warns(UserWarning, match=r"no state was loaded for 3 .*call init_state\(\) first"):
            dsd.set_optimizer_state_dict(other, heir, saved, options=FLAT)


@BOTH
def test_a_fresh_optimizer_is_loaded_while_there_are_gradients(options):
    """torch takes no step then, and creates no state."""
    model, groups = small()
    optimizer, heir, ignorant = (package().Muon(groups) for _ in range(3))
    give_gradients(model)
    optimizer.step()
    saved = copy.deepcopy(dsd.get_optimizer_state_dict(model, optimizer, options=options))
    dsd.get_optimizer_state_dict(model, heir, options=options)
    dsd.set_optimizer_state_dict(model, heir, copy.deepcopy(saved), options=options)
    assert_equal(heir.state_dict(), optimizer.state_dict())
    if options is FLAT:  # which needs state to load into
        with pytest.warns(UserWarning, match=r"no state was loaded for 4 .*call init_state\(\) first"):
            dsd.set_optimizer_state_dict(model, ignorant, saved, options=options)
        assert not any(ignorant.state.values())


def of_kind(kind, model):
    groups = package().get_default_muon_param_groups(model)
    if kind == "unnamed":
        for group in groups:
            del group["param_names"]
    optimizer = package().Muon(groups, lr=0.02 if kind == "unnamed" else 0.5)
    if kind == "scheduled":
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.7, total_steps=10)
    return optimizer


@pytest.mark.parametrize("after", ["named", "scheduled"])
def test_keys_that_a_flattened_checkpoint_lacks_can_be_filled_in(after):
    """torch raises KeyError for them; docs/checkpoint.md says what to do."""
    model, _ = small()
    optimizer, heir = of_kind("unnamed", model), of_kind(after, model)
    saved = flat_after_a_step(model, optimizer)
    with pytest.raises(KeyError, match="param_names"):
        dsd.set_optimizer_state_dict(model, heir, saved, options=FLAT)
    own = copy.deepcopy(heir.param_groups[0].get("max_lr"))
    full = dsd.get_optimizer_state_dict(model, heir, options=FLAT) | saved
    dsd.set_optimizer_state_dict(model, heir, full, options=FLAT)
    assert [group["lr"] for group in heir.param_groups] == [0.02] * 2
    assert heir.param_groups[0].get("max_lr") == own
    assert heir.param_groups[0]["param_names"] == ["0.weight", "2.weight"]
    for param in model.parameters():
        assert_equal(dict(heir.state[param]), dict(optimizer.state[param]))


@pytest.mark.parametrize("after", ["named", "scheduled"])
def test_and_on_disk(after, tmp_path):
    """With a hole beside the keys, as an older version left it."""
    model, _ = small()
    optimizer, heir = of_kind("unnamed", model), of_kind(after, model)
    saved = flat_after_a_step(model, optimizer)
    dcp.save({k: v for k, v in saved.items() if not k.startswith("state.2.bias.")}, checkpoint_id=tmp_path)
    state = dsd.get_optimizer_state_dict(model, heir, options=FLAT)
    dcp.load(state, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    dsd.set_optimizer_state_dict(model, heir, state, options=FLAT)
    assert [group["lr"] for group in heir.param_groups] == [0.02] * 2
    assert not any(t.any() for t in heir.state[model[2].bias].values())
    for param in list(model.parameters())[:3]:
        assert_equal(dict(heir.state[param]), dict(optimizer.state[param]))


# parameters that are replaced before the first step ----------------------------------------------


def replaced(rank, world, source):
    """An optimizer of whole parameters with state, whose model is then sharded, as accelerate does
    it for FSDP2.
    """
    mesh = init_device_mesh("cpu", (world,))
    whole = nn.Parameter(torch.arange(15.0).view(5, 3))
    bias = nn.Parameter(torch.arange(5.0))
    model = nn.ParameterDict({"w": whole, "b": bias})

    def build():
        return package().Muon([{"params": [("w", model["w"])]},
                               {"params": [("b", model["b"])], "use_muon": False}], lr=0.1)

    optimizer = build()
    if source == "loaded":
        first = build()
        for param in model.values():
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(0))
        first.step()
        optimizer.load_state_dict(first.state_dict())
        first.zero_grad()
    else:
        optimizer.init_state()
    expected = [{key: t.clone() for key, t in optimizer.state[p].items()} for p in (whole, bias)]
    for name, group in zip("wb", optimizer.param_groups):
        model[name] = nn.Parameter(distribute_tensor(model[name].detach(), mesh, [Shard(0)]))
        group["params"] = [model[name]]
    state = dsd.get_optimizer_state_dict(model, optimizer)["state"]
    same = all(torch.equal(t.full_tensor() if key != "step" else t, expected[i][key])
               for i, name in enumerate("wb") for key, t in state[name].items())
    placed = all(t.placements == (Shard(0),) for s in state.values() for k, t in s.items() if k != "step")
    for param in model.values():
        param.grad = distribute_tensor(torch.ones(param.shape), mesh, [Shard(0)])
    optimizer.step()
    return same, placed, set(optimizer.state) == set(model.values())


@pytest.mark.parametrize("source", ["loaded", "on request"])
def test_state_goes_to_the_parameters_that_replace_its_own(source):
    assert run_ranks(2, replaced, source) == [(True, True, True)] * 2


def put_in_place(optimizer):
    """Replace all parameters by new ones of equal values, as code that prepares a model does."""
    for group in optimizer.param_groups:
        group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]


def stepped(optimizer, number):
    generator = torch.Generator().manual_seed(number)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))],
                         ids=["copy", "pickle"])
def test_a_copy_has_the_state_of_parameters_that_were_just_replaced(copied):
    ours, theirs = (stepped(package().Muon(small()[1]), 0) for _ in range(2))
    put_in_place(ours)
    ours = copied(ours)
    assert ours.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()
    assert_equal(*[[stepped(optimizer, 1).state_dict(), optimizer.param_groups[0]["params"]]
                   for optimizer in (ours, theirs)])


def test_master_weights_have_the_rests_of_parameters_that_were_just_replaced():
    model = small()[0].to(torch.bfloat16)
    optimizer = stepped(package().Muon([("w", model[0].weight)], master_weights="split16"), 0)
    expected = optimizer.master_weights()["w"]
    put_in_place(optimizer)
    assert torch.equal(optimizer.master_weights()["w"], expected) and not torch.equal(expected, model[0].weight.float())


def consolidated_after_replacement(rank, world):
    optimizer = stepped(package().Muon(small()[1], process_group=dist.group.WORLD, shard_state=True), 0)
    put_in_place(optimizer)
    optimizer.consolidate_state_dict()
    return optimizer.state_dict()["state"] if rank == 0 else None  # one rank saves alone


def test_a_consolidated_state_has_that_of_parameters_that_were_just_replaced():
    expected = stepped(package().Muon(small()[1]), 0).state_dict()["state"]
    assert_equal(run_threads(2, consolidated_after_replacement)[0], expected)


# inference mode, and what plan_report says --------------------------------------------------------


@pytest.mark.parametrize("inside", ["step after release", "first step", "init_state", "load_state_dict"])
def test_what_is_made_in_inference_mode_can_be_stepped_outside(inside):
    runs = []
    for mode in (True, False):
        model, groups = small()
        optimizer = package().NorMuon(groups, nonfinite="skip")
        if inside != "first step":
            give_gradients(model)
            optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        with torch.inference_mode(mode), torch.no_grad():
            if inside == "init_state":
                optimizer.state.clear()
                optimizer.init_state()
            elif inside == "load_state_dict":
                optimizer.load_state_dict(saved)
            else:
                optimizer.release()
                give_gradients(model, 1)
                optimizer.step()
        for number in (2, 3):
            give_gradients(model, number)
            model[0].weight.grad[0, 0] = float("nan")
            optimizer.step()
        assert optimizer.skipped == 2
        runs.append((model.state_dict(), optimizer.state_dict()))
    assert_equal(*map(list, runs))


def test_plan_report_says_why_there_is_no_plan():
    model, groups = small()
    optimizer = package().Muon(groups)
    extra = nn.Parameter(torch.ones(3, 2))
    changes = {
        "before the first step, nor after release()": lambda: None,
        "after load_state_dict(), which drops the plan":
            lambda: optimizer.load_state_dict(optimizer.state_dict()),
        "after add_param_group(), which drops the plan":
            lambda: optimizer.add_param_group({"params": [("extra", extra)]}),
    }
    for reason, change in changes.items():
        change()
        with pytest.raises(RuntimeError) as caught:
            optimizer.plan_report()
        assert str(caught.value) == f"nothing is bound {reason}: call step() before plan_report()"
        give_gradients(model)
        optimizer.step()
        optimizer.plan_report()
    optimizer.release()
    with pytest.raises(RuntimeError, match=r"nor after release\(\): call step"):
        optimizer.plan_report()
    with pytest.raises(RuntimeError, match="nothing is bound in a copy, or after unpickling: call"):
        copy.deepcopy(optimizer).plan_report()

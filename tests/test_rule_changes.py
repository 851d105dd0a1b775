"""Rules of a third party while a run changes: graphs and new gradients, live options, loading, pickles and the step
that creates state.
"""

from __future__ import annotations

import sys
import types
import warnings

import pytest
import torch
from torch import nn

from tests.ranks import package, part, run_ranks
from tests.scripts import run_script
from tests.test_graphs import taped


def weights(count=1):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(8, 6)) for _ in range(count)]


def fill(params):
    for p in params:
        p.grad = torch.randn_like(p)


def on_rank(rank, world, layout, graphs):
    """Weights and momenta after six steps with gradients at six addresses."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    with pytest.MonkeyPatch.context() as patch:
        taped(patch)
        patch.setenv("OPTIMIZER_GRAPHS", graphs)

        class WriteOnly(package().Rule):
            def write(self, W, O, scale, sent, numbers):
                return W * numbers.decay - O * (scale * numbers.lr)

        mesh = init_device_mesh("cpu", (world,))
        placement = Shard(0) if layout == "fsdp" else Replicate()
        generator, held = torch.Generator().manual_seed(0), []

        def random(shape):
            full = torch.randn(shape, generator=generator)
            return distribute_tensor(full, mesh, [placement], src_data_rank=None)

        params = [nn.Parameter(random(shape)) for shape in ((8, 12), (12, 8))]
        muon = package().Muon(params, lr=0.1, rule=WriteOnly, wire_dtype=torch.float32)
        for _ in range(6):
            for p in params:
                p.grad = random(p.shape)
                held.append(p.grad)  # the next gradient lies elsewhere
            muon.step()
        state = [muon.state[p]["momentum_buffer"].to_local().clone() for p in params]
        return [p.detach().full_tensor() for p in params] + state


@pytest.mark.interpreter
@pytest.mark.parametrize("layout", ["fsdp", "replicated"])
def test_a_rule_with_write_reads_new_gradients_in_graphs(layout, optimizer):
    for ours, expected in zip(run_ranks(2, on_rank, layout, "auto"), run_ranks(2, on_rank, layout, "off")):
        assert all(map(torch.equal, ours, expected))


def test_numbers_of_a_rule_are_those_of_each_group(optimizer):
    """In `before` and `after` of groups that are stepped together, too."""
    class Shrunk(optimizer.Rule):
        def after(self, O, units):
            return O * units.numbers.weight_decay * units.numbers.momentum

    params, twins = weights(2), weights(2)
    groups = [{"params": [p], "weight_decay": d, "momentum": m} for p, d, m in zip(params, (0.1, 0.5), (0.9, 0.8))]
    together = optimizer.Muon(groups, lr=0.1, rule=Shrunk)
    apart = [optimizer.Muon([p], lr=0.1, rule=Shrunk, weight_decay=d, momentum=m)
             for p, d, m in zip(twins, (0.1, 0.5), (0.9, 0.8))]
    for _ in range(2):
        fill(params)
        for p, q, one in zip(params, twins, apart):
            q.grad = p.grad.clone()
            one.step()
        together.step()
    assert all(map(torch.equal, params, twins))


def test_a_number_that_is_no_option_is_refused(optimizer):
    class Wrong(optimizer.Rule):
        def after(self, O, units):
            return O * units.numbers.eps

    with pytest.raises(ValueError, match="no number 'eps': add it to Rule.options"):
        optimizer.Muon(weights(), rule=Wrong)


@pytest.mark.parametrize("key, value", [("momentum_form", "sum"), ("decay", "cautious")])
def test_forms_that_a_rule_does_not_have_are_refused_later(key, value, optimizer):
    plain = optimizer.Muon([{"params": weights(), key: value}])
    muon = optimizer.Muon(weights(), rule="hyperball")
    fill(plain.param_groups[0]["params"])
    plain.step()
    with pytest.raises(ValueError, match=f"{key}='{value}' with rule='hyperball'"):
        muon.load_state_dict(plain.state_dict())
    muon.param_groups[0][key] = value
    fill(muon.param_groups[0]["params"])
    with pytest.raises(ValueError, match=f"{key}='{value}' with rule='hyperball'"):
        muon.step()


def test_a_wrong_option_set_live_is_refused(optimizer):
    params = weights()
    muon = optimizer.Muon(params, rule="muon_plus")
    fill(params)
    muon.step()
    before = params[0].detach().clone()
    muon.param_groups[0]["normalize"] = "rows"
    with pytest.raises(ValueError, match="normalize='rows' must be one of"):
        muon.step()
    assert torch.equal(params[0], before)
    muon.param_groups[0]["normalize"] = "row"
    muon.step()
    assert not torch.equal(params[0], before)


def test_a_rule_may_change_live(optimizer):
    """From the next step on: the step is that of a new optimizer with the momentum of the old one."""
    params, twins = weights(), weights()
    muon = optimizer.Muon(params, rule="muon_plus", lr=0.1)
    fill(params)
    muon.step()
    plain = optimizer.Muon(twins, lr=0.1)
    plain.load_state_dict(optimizer.Muon(weights(), lr=0.1).state_dict())
    with torch.no_grad():
        twins[0].copy_(params[0])
    plain.init_state()
    plain.state[twins[0]]["momentum_buffer"].copy_(muon.state[params[0]]["momentum_buffer"])
    muon.param_groups[0]["rule"] = "muon"
    fill(params)
    twins[0].grad = params[0].grad.clone()
    muon.step()
    plain.step()
    assert torch.equal(params[0], twins[0])


SWITCHES = {
    "sign": ({"rule": "adamuon"}, {"sign": True}, {"sign": False}),
    "rounding": ({}, {"rounding": "nearest"}, {"rounding": "stochastic", "rounding_seed": 1, "rounding_step": 0}),
    "momentum_form": ({}, {"momentum_form": "ema"}, {"momentum_form": "bias_corrected", "momentum_steps": 1}),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_that_chooses_a_kernel_may_change_live(switch, optimizer):
    """The second step has the bits of an optimizer that had the new value from its construction on, and others than
    without the change.
    """
    options, old, new = SWITCHES[switch]
    (first,), gradients = weights(), [torch.randn(8, 6) for _ in "12"]
    first.data = first.detach().to(torch.bfloat16)

    def stepped(second, then):
        p = nn.Parameter(first.detach().clone())
        live = optimizer.Muon([{"params": [p], **old}], lr=0.1, **options)
        p.grad = gradients[0].to(p.dtype)
        live.step()
        if second is not None:
            state = live.state_dict()
            live = optimizer.Muon([{"params": [p], **second}], lr=0.1, **options)
            state["param_groups"][0].update(second)
            live.load_state_dict(state)
        live.param_groups[0].update(then)
        p.grad = gradients[1].to(p.dtype)
        live.step()
        return p.detach()

    changed = stepped(None, new)
    assert torch.equal(changed, stepped(new, {})) and not torch.equal(changed, stepped(None, {}))


def test_a_rule_without_its_options_is_refused(optimizer):
    params = weights()
    muon = optimizer.Muon(params)
    fill(params)
    muon.step()
    muon.param_groups[0]["rule"] = "muon_plus"
    with pytest.raises(ValueError, match="rule='muon_plus' needs the key"):
        muon.step()


def test_classes_that_a_function_makes_need_names(optimizer):
    def make(factor, **named):
        class Made(optimizer.Rule):
            def after(self, O, units):
                return O * factor

        for key, value in named.items():
            setattr(Made, key, value)
        return Made

    optimizer.Muon(weights(), rule=make(1.0))
    optimizer.Muon(weights(), rule=make(1.0))
    with pytest.raises(ValueError, match="Made is defined again with other values.*`name`"):
        optimizer.Muon(weights(), rule=make(5.0))
    optimizer.Muon(weights(), rule=make(5.0, name="five times"))


def test_a_class_that_is_defined_again_warns_if_it_changed(optimizer):
    """As after an edit of a notebook: optimizers that exist would step with the new class, once they plan anew."""
    module = types.ModuleType("notebook")
    cell = "class Edited(Rule):\n    def after(self, O, units):\n        return O * {}\n"

    def run(factor):
        exec(cell.format(factor), vars(module))
        optimizer.Muon(weights(), rule=module.Edited)

    vars(module).update(__name__="notebook", Rule=optimizer.Rule)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for factor in (0.5, 0.5, 2.0, 2.0):
            run(factor)
    (warning,) = [str(one.message) for one in found]
    assert "rule 'Edited': Edited is defined again with other values" in warning


def test_the_step_that_creates_state_changes_nothing(optimizer):
    """lr 0 and gradients of zero, as torch.distributed.checkpoint takes before it loads."""
    class Counted(optimizer.Rule):
        state = (optimizer.State("times", "matrix"),)

        def after(self, O, units):
            units.state["times"].add_(1)
            return O

        def write(self, W, O, scale, sent, numbers):
            return W * 0.9

    for rule, key in ((Counted, "times"), ("hyperball", "radius")):
        params = weights()
        before = params[0].detach().clone()
        muon = optimizer.Muon(params, rule=rule, lr=0.0)
        params[0].grad = torch.zeros_like(params[0])
        muon.step()
        assert torch.equal(params[0], before)
        assert not muon.state[params[0]][key].any()


def test_options_that_are_lists(optimizer):
    """A change in place counts, and groups do not share the default."""
    class Listed(optimizer.Rule):
        options = {"factors": [1.0, 2.0]}

        def after(self, O, units):
            return O * units.numbers.factors[0]

    params = weights(2)
    muon = optimizer.Muon([{"params": [p], "lr": lr} for p, lr in zip(params, (0.1, 0.1))], rule=Listed)
    muon.param_groups[0]["factors"][0] = 0.0
    assert muon.param_groups[1]["factors"] == Listed.options["factors"] == [1.0, 2.0]
    constants = part("rules.rule").host_constants
    before = constants(muon.param_groups[1])
    muon.param_groups[1]["factors"][0] = 3.0
    assert constants(muon.param_groups[1]) != before


def test_a_change_of_the_momentum_and_back_begins_from_zero(optimizer):
    params = weights()
    muon = optimizer.Muon(params)
    for form in ("ema", "sum", "ema"):
        muon.param_groups[0]["momentum_form"] = form
        fill(params)
        muon.step()
        assert set(muon.state[params[0]]) == {"momentum_sum" if form == "sum" else "momentum_buffer"}
    expected = params[0].grad * (1 - muon.param_groups[0]["momentum"])
    assert torch.allclose(muon.state[params[0]]["momentum_buffer"], expected)


@pytest.mark.parametrize("kind, rule, has_state", [("Muon", "hyperball", True), ("NorMuon", None, True),
                                                   ("Muon", "scion", False), ("Muon", None, False)])
def test_state_of_muon_by_name_loads_into_a_rule(kind, rule, has_state, optimizer, tmp_path):
    """The rule stays that of the group; options come from the checkpoint. A file must have every key of the state."""
    def made():
        return getattr(optimizer, kind)([("weight", p) for p in weights()], **{"rule": rule} if rule else {})

    saved = optimizer.Muon([("weight", p) for p in weights()], rule="muon", lr=0.03)
    fill(saved.param_groups[0]["params"])
    saved.step()
    optimizer.export_state(saved, tmp_path / "state")
    by_dict, by_file = made(), made()
    by_dict.load_state_dict(saved.state_dict())
    if has_state:
        with pytest.raises(ValueError, match="but its state here is"):
            optimizer.import_state(by_file, tmp_path / "state")
    else:
        optimizer.import_state(by_file, tmp_path / "state")
    for muon in [by_dict] if has_state else [by_dict, by_file]:
        (group,) = muon.param_groups
        assert (part("rules.rule").rule_of(group).name, group["lr"]) == (rule or kind.lower(), 0.03)
        fill(group["params"])
        muon.step()


def test_a_pickle_finds_its_rule_in_another_process(optimizer, tmp_path):
    """By module and name; a class of a function is named in the message."""
    register = part("rules.rule").register_origins
    register({"muon": ("nowhere", "Nothing")})  # known here
    with pytest.raises(ValueError, match="rule 'lost' .* Made of the module nowhere, which cannot be imported"):
        register({"lost": ("nowhere", "Made")})
    name = optimizer.__name__
    module = f"from {name} import Rule\nclass Mine(Rule):\n    def after(self, O, units):\n        return O * 0.5\n"
    (tmp_path / "their_module.py").write_text(module)
    begin = f"import sys; sys.path[:0] = {[str(tmp_path), *sys.path]!r}\nfrom tests.ranks import package; package()\n"
    save = begin + (
        "import pickle, torch, their_module\n"
        "muon = package().Muon([torch.nn.Parameter(torch.ones(4, 3))], rule=their_module.Mine)\n"
        f"pickle.dump(muon, open({str(tmp_path / 'muon.pkl')!r}, 'wb'))\n"
    )
    load = begin + (
        f"import pickle, torch\nmuon = pickle.load(open({str(tmp_path / 'muon.pkl')!r}, 'rb'))\n"
        "muon.param_groups[0]['params'][0].grad = torch.ones(4, 3)\nmuon.step(); print('stepped')\n"
    )
    for script in (save, load):
        (tmp_path / "script.py").write_text(script)
        done = run_script(tmp_path / "script.py")
        assert done.returncode == 0, done.stderr
    assert "stepped" in done.stdout

"""Updates that return during the next forward: every weight is waited for before it is read, and the bits stay.

On a CPU a machine of notes stands for streams and events: it knows which work comes after which, and tells what is read
while it may be half-written, or written while it may still be read. On GPUs: test_overlap_forward_gpus.py.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.ranks import THOROUGH, package, part, run_ranks, run_threads
from tests.test_bucket_updates import cut
from tests.test_modes import DENSE, placements_of
from tests.test_muon import same
from tests.test_overlap_backward import LAYOUTS, alone, build, drawn, planned_along, tensors, vary

STEPS = 4


# a machine that only takes notes -----------------------------------------------------------------------------------

class Machine:
    """In the place of torch.cuda and torch.cpu: `Stream`, `Event`, `stream`, `current_stream`; and what is wrong."""

    def __init__(self):
        self.wrong, self.writes, self.reads, self.running = [], {}, {}, []
        self.running.append(self.Stream("cpu"))
        self.main = self.running[0]

    def Stream(self, device=None, priority=0):
        return Line(self)

    def Event(self):
        return Note(self)

    def current_stream(self, device=None):
        return self.running[-1]

    def stream(self, line):
        return On(self, line)

    def write(self, param):
        line = self.running[-1]
        for reader, tick in self.reads.pop(id(param), ()):
            if line.seen.get(reader, 0) < tick:
                self.wrong.append(f"a parameter of shape {tuple(param.shape)} is written while it is read")
        self.writes[id(param)] = line, line.tick()

    def read(self, param):
        line, (writer, tick) = self.running[-1], self.writes.get(id(param), (None, 0))
        if line.seen.get(writer, 0) < tick:
            self.wrong.append(f"a parameter of shape {tuple(param.shape)} is read while it is written")
        self.reads.setdefault(id(param), []).append((line, line.tick()))


class Line:
    """A stream: how far it has come, and how far others had come when it last waited for them."""
    device = torch.device("cpu")

    def __init__(self, machine):
        self.machine, self.seen = machine, {}

    def tick(self):
        self.seen[self] = self.seen.get(self, 0) + 1
        return self.seen[self]

    def wait_stream(self, other):
        self.learn(other.seen)

    def wait_event(self, event):
        self.learn(event.seen)

    def learn(self, seen):
        for line, tick in seen.items():
            self.seen[line] = max(self.seen.get(line, 0), tick)

    def record_event(self, event=None):
        event = Note(self.machine) if event is None else event
        event.record(self)
        return event

    def synchronize(self):
        pass


class Note:
    """An event."""

    def __init__(self, machine):
        self.machine, self.seen = machine, {}

    def record(self, line=None):
        self.seen = dict((line or self.machine.running[-1]).seen)


class On:
    def __init__(self, machine, line):
        self.machine, self.line = machine, line

    def __enter__(self):
        self.machine.running.append(self.line)

    def __exit__(self, *_):
        self.machine.running.pop()


def params_of(route):
    return route.store.params if route.bucket is None else [
        route.store.params[i] for i in {m.param for m in route.bucket.matrices}]


@pytest.fixture
def machine(optimizer, monkeypatch):
    return install(monkeypatch)


def install(patch) -> Machine:
    """A machine that hears of every write of a step and every read of FSDP2's; of others a model has to tell."""
    machine, routes, elementwise = Machine(), part("execution.bucket_updates"), part("execution.elementwise_updates")
    presence = part("communication.missing_grads").MissingGradients
    for name in ("Stream", "Event", "stream", "current_stream"):
        patch.setattr(torch.cpu, name, getattr(machine, name))
    patch.setattr(part("execution.overlap.forward"), "_streams", lambda device: machine)

    def written(kind, name):
        function = getattr(kind, name)

        def then(self, *args):
            function(self, *args)
            for param in params_of(self):
                machine.write(param)

        patch.setattr(kind, name, then)

    for kind, name in (
        ("LocalUpdate", "step"),
        ("ShardedUpdate", "apply"),
        ("UnreducedUpdate", "apply"),
        ("UnreducedElementwiseUpdate", "apply"),
        ("ElementwiseUpdate", "step"),
    ):
        written(getattr(elementwise if "Elementwise" in kind else routes, kind), name)
    restore = presence.restore

    def then(self, *args):
        restore(self, *args)
        for ranks, i in self.saved:
            store, number = self.members[ranks][i]
            machine.write(store.params[number])

    patch.setattr(presence, "restore", then)
    if dist.is_available():
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param

        gather = _fsdp_collectives._get_param_all_gather_inputs

        def inputs(fsdp_params):
            for p in fsdp_params:
                machine.read(p.sharded_param)
            return gather(fsdp_params)

        patch.setattr(_fsdp_collectives, "_get_param_all_gather_inputs", inputs)
        whole = _fsdp_param.FSDPParam.all_gather_inputs

        def own(self):
            machine.read(self.sharded_param)
            return whole.fget(self)

        patch.setattr(_fsdp_param.FSDPParam, "all_gather_inputs", property(own))
    return machine


# plain models -------------------------------------------------------------------------------------------------------

class Seen(nn.Linear):
    """Tells the machine of its weight when it reads it."""
    machine = None

    def forward(self, x):
        return seen_linear(x, self.weight)


def seen_linear(x, weight):
    if Seen.machine is not None:
        Seen.machine.read(weight)
    return F.linear(x, weight)


class Block(nn.Module):
    """Reads the weight of one module without calling it, and parameters of a list."""

    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = Seen(width, width, bias=False), nn.Sequential(Seen(width, width, bias=False))
        self.more = nn.ParameterList([torch.randn(width, width)])

    def forward(self, x):
        x = seen_linear(x.relu(), self.inner.weight) + seen_linear(x, self.more[0])
        return self.outer(x).tanh()


class Model(nn.Module):
    """Its first weight is also its last one."""

    def __init__(self, width=8, layers=6, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = Seen(width, width, bias=False), Seen(width, width, bias=False)
        self.layers = nn.ModuleList(nn.ModuleDict({"block": Block(width)}) for _ in range(layers))
        self.between = nn.ModuleList(nn.Linear(width, width) for _ in "12")
        self.scale = nn.ParameterDict({"last": torch.ones(width)})
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer["block"], x, use_reentrant=False)
        return self.head(x) * self.scale["last"]


def steps(model, opt, count=STEPS, seed=0, between=lambda: None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for _ in range(2):  # two micro-batches
            model(torch.randn((3, 8), generator=generator).to(dtype)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        between()


def muon(model, told=True, **options):
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim < 2],
                                                              "use_muon": False}]
    opt = package().Muon([g for g in groups if g["params"]], lr=0.02,
                         **{"overlap_forward": True, "workspace_bytes": 11_000, **options})
    if told:
        opt.updates_return_during(model)
    return opt


def place(opt, *params):
    """The mark behind which they are written."""
    return opt._forward_overlap.last_event_of(frozenset(map(id, params)))


@pytest.fixture
def looking(machine):
    Seen.machine = machine
    yield machine
    Seen.machine = None


def test_every_weight_of_a_plain_model_is_waited_for(looking):
    model, twin = Model(), Model()
    opt, late = muon(model), part("execution.overlap.forward")
    steps(model, opt)
    assert looking.wrong == [] and looking.writes
    Seen.machine = None
    steps(twin, package().Muon([{"params": [p for p in twin.parameters() if p.ndim > 1]},
                                {"params": [twin.scale["last"], *(m.bias for m in twin.between)], "use_muon": False}],
                               lr=0.02))
    assert same(model.parameters(), twin.parameters())
    assert isinstance(opt._forward_overlap, late.ForwardOverlap) and len(opt._forward_overlap.events) > 4


def test_split_weights_are_waited_for_with_their_rests(looking):
    """master_weights="split16": the bits of steps without the option, and of its state."""
    results = []
    for overlap_forward in (True, False):
        model = Model().to(torch.bfloat16)
        Seen.machine = looking if overlap_forward else None
        opt = muon(model, told=overlap_forward, overlap_forward=overlap_forward, master_weights="split16")
        steps(model, opt, dtype=torch.bfloat16)
        opt.wait()
        results.append([t for p in model.parameters() for t in (p.detach(), *opt.state[p].values())])
    assert looking.wrong == [] and looking.writes and same(*results)
    assert any(t.dtype == torch.int16 and t.any() for t in results[0])


@pytest.mark.parametrize("told", [True, False])
def test_the_current_stream_waits_only_where_it_must(told, looking):
    """Nobody waits for a known model in the step; each block for its own weights only. Unknown models: in the step."""
    model = Model()
    opt = muon(model, told)
    steps(model, opt)
    late, main = opt._forward_overlap, looking.main
    last = len(late.events) - 1
    assert late.waited_event.get(main, -1) == (-1 if told else last)
    model.layers[0]["block"](torch.ones(1, 8))
    assert late.waited_event[main] == place(opt, *model.layers[0].parameters()) if told else last
    model(torch.ones(1, 8))
    assert late.waited_event[main] == (max(late.written_event.values()) if told else last) and looking.wrong == []


def test_the_machine_sees_what_does_not_wait(looking, monkeypatch):
    monkeypatch.setattr(part("execution.overlap.module_hooks").WaitHook, "_wait", lambda self: None)
    model = Model()
    steps(model, muon(model))
    assert any("read while it is written" in what for what in looking.wrong)


def test_another_stream_waits_for_itself(looking):
    """A forward on other streams than the step's; and the step, for what they have read."""
    model = Model()
    opt = muon(model)
    for _ in range(3):
        other = looking.Stream()
        other.wait_stream(looking.main)
        with looking.stream(other):
            model(torch.ones(3, 8)).sum().backward()
            model(torch.ones(3, 8)).sum().backward()
        looking.main.wait_stream(other)
        opt.step()
        opt.zero_grad()
    assert looking.wrong == []


def test_gradients_live_until_their_weights_are_written(looking):
    model = Model()
    opt = muon(model)
    steps(model, opt, 1)
    model(torch.ones(3, 8)).sum().backward()
    mine = {p: weakref.ref(p.grad) for p in model.parameters() if p.grad is not None}
    opt.step()
    opt.zero_grad()
    gc.collect()
    assert all(ref() is not None for ref in mine.values())
    model.layers[0]["block"](torch.ones(1, 8))
    block = list(model.layers[0].parameters())
    assert all(mine[p]() is None for p in block) and any(ref() is not None for ref in mine.values())
    opt.wait()
    assert all(ref() is None for ref in mine.values()) and looking.wrong == []


def missing(rank, world, found):
    """Parameters without a gradient are put back after the step: their marks are the last one. `found`: they have one
    again in the step after.
    """
    with pytest.MonkeyPatch.context() as patch:
        machine, generator = install(patch), torch.Generator().manual_seed(0)
        model = nn.ModuleList(Seen(6, 6, bias=False) for _ in range(5))
        opt = package().Muon(model.parameters(), process_group=dist.group.WORLD, overlap_forward=True)
        opt.updates_return_during(model)
        for step in range(4 if found else 3):
            for i, module in enumerate(model):
                has = step in (0, 3) or i != 2 and (i != 3 or rank)
                module.weight.grad = torch.randn(6, 6, generator=generator) if has else None
            opt.step()
        places = [place(opt, m.weight) for m in model]
        opt.wait()
        return places, len(opt._forward_overlap.events) - 1, machine.wrong


@pytest.mark.parametrize("found", [False, True])
def test_what_is_put_back_is_written_at_the_end(found, optimizer):
    for rank, (places, last, wrong) in enumerate(run_ranks(2, missing, found)):
        at_end = [place == last for place in places]
        assert wrong == [] and at_end == [False, False, not found, rank == 0 and not found, False]


def test_events_are_used_again(looking):
    model = Model()
    opt = muon(model)
    steps(model, opt, 2)
    before = opt._forward_overlap.events
    steps(model, opt, 1)
    assert opt._forward_overlap.events == before and opt._forward_overlap.events is not before and looking.wrong == []


# who waits, before anything else sees weights, state or gradients ----------------------------------------------------

DRAINS = {
    "wait": lambda model, opt: opt.wait(),
    "step": lambda model, opt: opt.step(),
    "last_backward": lambda model, opt: opt.last_backward().__enter__(),
    "state_dict": lambda model, opt: opt.state_dict(),
    "load_state_dict": lambda model, opt: opt.load_state_dict(saved_of(opt)),
    "zeros": lambda model, opt: opt.zero_grad(set_to_none=False),
    "add_param_group": lambda model, opt: opt.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]}),
    "skipped": lambda model, opt: opt.skipped,
    "pickle": lambda model, opt: pickle.dumps(opt),
    "deepcopy": lambda model, opt: copy.deepcopy(opt),
    "updates_return_during": lambda model, opt: opt.updates_return_during(model),
    "model.state_dict": lambda model, opt: model.state_dict(),
    "block.state_dict": lambda model, opt: model.layers[0]["block"].state_dict(),
    "model.load_state_dict": lambda model, opt: model.load_state_dict({}, strict=False),
    "export_state": lambda model, opt: export(model, opt),
}


def saved_of(opt):
    return torch.optim.Optimizer.state_dict(opt)


def export(model, opt):
    try:
        package().export_state(opt, "nowhere/at/all", model)
    except Exception:
        pass


@pytest.mark.parametrize("name", DRAINS)
def test_what_sees_weights_state_or_gradients_waits_first(name, looking):
    model = Model()
    opt = muon(model, nonfinite="skip")
    steps(model, opt, 2)
    last = opt._forward_overlap.events[-1]
    written = {line: tick for line, tick in last.seen.items() if line is opt._forward_overlap.stream}
    assert any(looking.main.seen.get(line, 0) < tick for line, tick in written.items())
    DRAINS[name](model, opt)
    assert all(looking.main.seen[line] >= tick for line, tick in written.items())
    assert looking.wrong == []


def test_gradients_that_go_need_no_wait(looking):
    model = Model()
    opt = muon(model)
    steps(model, opt, 1)
    opt.zero_grad()
    assert opt._forward_overlap.waited_event.get(looking.main, -1) == -1


def test_a_copy_waits_in_its_step(looking):
    """It knows no model: hooks are for one optimizer. Those of a copied model do nothing."""
    model = Model()
    opt = muon(model)
    steps(model, opt, 2)
    twin, clone = copy.deepcopy(opt), copy.deepcopy(model)
    for p in itertools.chain(*(g["params"] for g in twin.param_groups)):
        p.grad = torch.ones_like(p)
    twin.step()
    late = twin._forward_overlap
    assert late.waited_event[looking.main] == len(late.events) - 1 and not len(late.models)
    opt.step()
    clone(torch.ones(1, 8))
    pickle.dumps(model)
    opt.load_state_dict(opt.state_dict())
    assert len(opt._forward_overlap.models) == 1, "a load forgets no model"


def test_a_grad_scaler_waits_in_the_step(looking):
    """It goes on with its scale and its flag at once."""
    model = Model()
    opt = muon(model)
    model(torch.ones(1, 8)).sum().backward()
    opt.grad_scale, opt.found_inf = torch.ones(()), torch.zeros(())
    opt.step()
    assert opt._forward_overlap.waited_event[looking.main] == len(opt._forward_overlap.events) - 1


def test_an_error_in_the_step_leaves_nothing_behind(looking, monkeypatch):
    model = Model()
    opt = muon(model)
    steps(model, opt, 2)
    model(torch.ones(1, 8)).sum().backward()

    def fail(self, *_):
        raise KeyError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(part("execution.elementwise_updates").ElementwiseUpdate, "step", fail)
        with pytest.raises(KeyError, match="a fault"):
            opt.step()
    late = opt._forward_overlap
    assert looking.current_stream() is looking.main and late.events == [] and late.held_gradients == {}
    assert all(looking.main.seen[line] >= tick for line, tick in looking.writes.values())
    with pytest.raises(RuntimeError, match="failed half-way"):
        opt.step()
    model(torch.ones(1, 8))
    assert looking.wrong == []


def test_closures_run_before_the_step_leaves(looking):
    model = Model()
    opt = muon(model)

    def closure():
        assert looking.current_stream() is looking.main
        loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure)
    assert looking.wrong == []


@pytest.mark.parametrize("options, message", [
    ({"overlap_forward": 1}, "overlap_forward=1 is not allowed: it must be True or False"),
    ({"capturable": True}, "overlap_forward=True is not allowed with capturable=True"),
    ({"nonfinite": "raise"}, "not allowed with nonfinite='raise'")])
def test_options_that_do_not_go_together(options, message, optimizer):
    with pytest.raises(ValueError, match=message):
        optimizer.Muon([nn.Parameter(torch.ones(2, 2))], **{"overlap_forward": True, **options})


def test_without_the_option_and_on_a_cpu_nothing_happens(optimizer):
    models = [Model() for _ in range(3)]
    for model, options in zip(models, ({}, {"overlap_forward": False}, {"overlap_forward": False, "told": False})):
        opt = muon(model, **options)
        steps(model, opt)
        opt.wait()
        late = opt._forward_overlap
        assert late.events == [] and late.held_gradients == {} and late.stream is None
        assert len(model._forward_pre_hooks) == (not options)
    assert all(same(models[0].parameters(), model.parameters()) for model in models)


# which modules wait ---------------------------------------------------------------------------------------------------

def stops(model, keys=None):
    found, quiet, unseen = part("execution.overlap.module_hooks")._wait_points(
        model, {id(p) for p in model.parameters()} if keys is None else keys
    )
    names = {id(p): name for name, p in model.named_parameters()}
    called = {m: name for name, m in model.named_modules()}
    return {called[m]: {names[k] for k in ks} for m, ks in found.items()}, quiet, {names[k] for k in unseen}


def test_blocks_wait_for_all_below_them_and_the_model_for_the_rest(optimizer):
    found, quiet, unseen = stops(Model(layers=2))
    own = ("inner.weight", "more.0", "outer.0.weight")
    for i in range(2):
        block = f"layers.{i}.block"
        assert found[block] == {f"{block}.{name}" for name in own} and found[f"{block}.inner"] < found[block]
    assert found[""] == {"embed.weight", "scale.last"} and not quiet and not unseen
    assert found["between.0"] == {"between.0.weight", "between.0.bias"} and found["head"] == {"embed.weight"}


def test_what_is_used_without_being_called_is_waited_for(optimizer):
    found, _, unseen = stops(nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.MultiheadAttention(8, 2)))
    assert {"1.out_proj.weight", "1.in_proj_weight"} <= found["1"]
    assert {"0.self_attn.out_proj.weight", "0.linear1.bias"} <= found["0"] and "" not in found and not unseen
    alone, _, _ = stops(nn.MultiheadAttention(8, 2))
    assert len(alone[""]) == 4
    _, _, unseen = stops(nn.ParameterList([torch.ones(2, 2)]))
    assert unseen == {"0"}, "nobody calls a list: the step has to wait"


class Pair(nn.Module):
    """Two models in one, each called on its own."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.both = nn.Linear(2, 2), Model(layers=1), nn.Parameter(torch.ones(2, 2))


def test_parts_of_what_has_no_forward_wait_for_themselves(looking):
    model = Pair()
    found, _, unseen = stops(model)
    assert unseen == {"both"} and found["one"] == {"one.weight", "one.bias"} and len(found["other"]) == 9
    opt = muon(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    late = opt._forward_overlap
    assert late.waited_event[looking.main] == place(opt, model.both)
    model.other(torch.ones(1, 8))
    assert looking.wrong == []


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_module_waits_for_all_of_it_before_it(whole, looking):
    """In place, torch breaks the region at the hook; around, the region stays whole."""
    model = Model(layers=3)
    blocks = [layer["block"] for layer in model.layers]
    if whole:
        model.layers = nn.ModuleList(torch.compile(block, backend="eager") for block in blocks)
        model.forward = lambda x: model.head(model.layers[1](model.layers[0](model.embed(x))))
    else:
        blocks[0].compile(backend="eager")
    opt = muon(model)
    counts = [[len(m._forward_pre_hooks) for m in block.modules()] for block in blocks]
    assert counts == [[1, 1, 0, 1, 1]] * 3
    inner, quiet = (
        [m._forward_pre_hooks.values() for m in list(blocks[0].modules())[1:]],
        part("execution.overlap.module_hooks").EagerWaitHook,
    )
    assert all(type(hook) is quiet for hook in itertools.chain(*inner)), "they leave the region whole"
    if whole:
        assert [len(layer._forward_pre_hooks) for layer in model.layers] == [1] * 3
    Seen.machine, late = None, opt._forward_overlap
    steps(model, opt)
    model(torch.ones(1, 8))
    assert late.waited_event[looking.main] >= place(opt, *blocks[0].parameters())
    steps(model, opt, 1)
    Seen.machine = looking
    blocks[1](torch.ones(1, 8))  # as it is, not compiled
    assert looking.wrong == []
    torch._dynamo.reset()


def test_a_region_stays_whole_where_its_wrapper_waits(optimizer, machine):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    opt = muon(compiled)
    for _ in range(3):
        compiled(torch.ones(2, 4)).sum().backward()
        opt.step()
        assert opt._forward_overlap.waited_event.get(machine.main, -1) == -1
        compiled(torch.ones(2, 4))
        assert opt._forward_overlap.waited_event[machine.main] == max(opt._forward_overlap.written_event.values())
    torch._dynamo.reset()


def test_hooks_go_with_the_optimizer_and_are_not_doubled(optimizer):
    model = Model()
    opt = muon(model)
    opt.updates_return_during(model)
    kinds = ("_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    assert [len(getattr(model, kind)) for kind in kinds] == [1, 1, 1]
    del opt
    gc.collect()
    assert not any(getattr(m, kind) for m in model.modules() for kind in kinds)


def test_an_optimizer_that_goes_is_waited_for(looking):
    model = Model()
    opt = muon(model)
    steps(model, opt, 2)
    del opt
    gc.collect()
    model(torch.ones(1, 8))
    assert looking.wrong == []


def test_an_optimizer_that_lives_until_python_ends_says_nothing(optimizer):
    """Names of modules are gone by then."""
    script = ("import torch\nfrom kernels import get_kernel\np = torch.nn.Parameter(torch.ones(8, 6))\n"
              "opt = get_kernel('org/optimizer', version=1).Muon([p])\ntorch.keep = opt\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "Exception ignored" not in done.stderr


def test_models_are_not_kept_and_one_that_is_gone_waits_for_nothing(looking):
    model, other = Model(), Model(seed=1)
    params = [*model.parameters(), *other.parameters()]
    opt = package().Muon([{"params": [p for p in params if p.ndim > 1]}], overlap_forward=True, workspace_bytes=11_000)
    for m in (model, other):
        opt.updates_return_during(m)
    weights, ref = [p for p in other.parameters() if p.ndim > 1], weakref.ref(other)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    late = opt._forward_overlap
    assert late.waited_event.get(looking.main, -1) == -1
    del other, m
    gc.collect()
    assert ref() is None
    opt.step()
    assert late.waited_event[looking.main] == place(opt, *weights)


# FSDP2 --------------------------------------------------------------------------------------------------------------

class Stack(nn.Sequential):
    """Blocks that may be computed again in backward."""
    again = False

    def forward(self, x):
        x = self[0](x)
        for block in list(self)[1:]:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


WAYS = ("plain", "prefetch", "kept", "narrow", "unshard", "grouped", "checkpoint", "event", "method", "two", "early")


def sharded(rank, world, mesh_shape, way):
    """A model under FSDP2 on a machine of notes; (what is wrong, how many marks there are, the first block's)."""
    from torch.distributed.device_mesh import init_device_mesh

    with pytest.MonkeyPatch.context() as patch:
        machine = install(patch)
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replica", "shard")[-len(mesh_shape):])
        model = Stack(nn.Embedding(20, 16), *(
            nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)) for _ in range(6)))
        shard(model, mesh, way)
        opts = optimizers(model, way)
        for opt in opts:
            opt.updates_return_during(model)
        for step in range(STEPS):
            torch.manual_seed(world * step + rank)
            train(model, opts, machine, way, torch.randint(20, (8,)))
        return machine.wrong, len(opts[0]._forward_overlap.events), place(opts[0], *model[1].parameters())


def shard(model, mesh, way):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    more = {"reshard_after_forward": False} if way == "kept" else {}
    if way == "narrow":
        more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = list(model)[1:]
    if way == "grouped":
        for pair in zip(blocks[::2], blocks[1::2]):
            fully_shard(list(pair), mesh=mesh, **more)
    else:
        for block in blocks:
            fully_shard(block, mesh=mesh, **more)
    fully_shard(model, mesh=mesh, **more)
    if way == "prefetch":
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1:i + 3])
        model.set_modules_to_forward_prefetch(blocks[:2])
    if way == "method":
        type(model).encode = lambda self, x: self.forward(x)
        register_fsdp_forward_method(model, "encode")


def optimizers(model, way):
    """One of all parameters, or ("two") one of every other block, and one of the rest."""
    params, options = list(model.parameters()), {"overlap_forward": True, "overlap_backward": way == "early"}
    parts = [params[::2], params[1::2]] if way == "two" else [params]
    groups = [[{"params": [p for p in some if p.ndim > 1]}, {"params": [p for p in some if p.ndim < 2],
                                                             "use_muon": False}] for some in parts]
    return [package().Muon([g for g in group if g["params"]], lr=0.02, **options) for group in groups]


def train(model, opts, machine, way, tokens):
    call = model.encode if way == "method" else model
    if way == "unshard":
        for block in list(model)[1:3]:
            block.unshard(async_op=True)
    if way == "event":
        model.set_post_optim_event(machine.current_stream().record_event())
    model.again, loss = way == "checkpoint", call(tokens).square().mean()
    with opts[0].last_backward():
        loss.backward()
    for opt in opts:
        opt.step()
        opt.zero_grad()


MESHES = {"one": (1,), "fsdp": (2,), "hsdp of one": (2, 1), "hsdp": (2, 2)}


# Each way meets one of the two meshes that have an axis of 1, and all others
@pytest.mark.parametrize("mesh_shape, way", [
    pytest.param(shape, way, id=f"{name}-{way}") for name, shape in MESHES.items() for number, way in enumerate(WAYS)
    if THOROUGH or 1 not in shape or (len(shape) + number) % 2])
def test_fsdp2_gathers_nothing_that_is_half_written(mesh_shape, way, optimizer):
    world = mesh_shape[0] * mesh_shape[-1] ** (len(mesh_shape) - 1)
    for wrong, marks, first in run_ranks(world, sharded, mesh_shape, way):
        assert wrong == []
        if world > 1 and way not in ("two", "early"):
            assert marks >= 6 and first < marks - 2, "the first block waits for its own weights, not for the last ones"


def unhooked(rank, world, what):
    """As "plain", but something does not wait."""
    with pytest.MonkeyPatch.context() as patch:
        if what == "gates":
            patch.setattr(
                part("execution.overlap.module_hooks").UnshardHook,
                "__call__",
                lambda self, async_op=False: self.gather(async_op),
            )
        else:
            kind = part("execution.overlap.forward").ForwardOverlap
            patch.setattr(kind, "wait_for_event", lambda self, stream, place: None)
        wrong, *_ = sharded(rank, world, (world,), "plain")
    return wrong


@pytest.mark.parametrize("what", ["gates", "all"])
def test_the_machine_sees_what_fsdp2_gathers_too_early(what, optimizer):
    assert all(run_ranks(2, unhooked, what))


def unknown(rank, world):
    """FSDP2 is another one than it was: the step waits, and says so once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    with pytest.MonkeyPatch.context() as patch:
        machine = install(patch)
        model = fully_shard(nn.Linear(4, 4, bias=False), mesh=init_device_mesh("cpu", (world,)))
        opt = package().Muon(model.parameters(), overlap_forward=True)
        with patch.context() as other, pytest.warns(UserWarning, match="step.. waits until its weights are written"):
            other.setattr(FSDPModule, "_get_fsdp_state", lambda self: object())
            opt.updates_return_during(model)
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        late = opt._forward_overlap
        return late.waited_event[machine.main] == len(late.events) - 1, len(model._forward_pre_hooks), machine.wrong


def test_another_fsdp_is_waited_for_in_the_step(optimizer):
    assert run_ranks(2, unknown) == [(True, 1, [])] * 2


def gone(rank, world):
    """Gates of two optimizers before one group; they go one after another."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=init_device_mesh("cpu", (world,)))
    opts = [package().Muon(model.parameters(), overlap_forward=True) for _ in "12"]
    for opt in opts:
        opt.updates_return_during(model)
    state = model._get_fsdp_state()
    group = state._fsdp_param_groups[0] if hasattr(state, "_fsdp_param_groups") else state._fsdp_param_group
    kinds = []
    while opts:
        kinds.append(type(group.unshard).__name__)
        del opts[-1], opt
        opt = None
        gc.collect()
        model(torch.ones(2, 4)).sum().backward()
    return [*kinds, type(group.unshard).__name__]


def test_gates_go_with_their_optimizer(optimizer):
    assert run_ranks(2, gone) == [["UnshardHook", "UnshardHook", "method"]] * 2


# the bits -------------------------------------------------------------------------------------------------------------

def cut_up(rank, world, layout, kind, fulls, steps, expected):
    """Steps in buckets along forward; (whether this rank has the bits of one process, how many jobs there are)."""
    from torch.distributed.tensor import init_device_mesh

    mesh_shape, placements, _ = placements_of(layout, world)
    mesh, local = init_device_mesh("cpu", mesh_shape), part("params.dtensor").local_of

    def place(full):
        return cut(full, mesh, placements) if full.ndim > 1 else full

    params, opt = build(fulls, place, kind, overlap_backward=False, overlap_forward=True)
    for step, gradients in enumerate(steps):
        vary(opt, step)
        for p, g in zip(params, gradients):
            p.grad = place(g + g + g)
        opt.step()
        opt.zero_grad()
    return same(tensors(params, opt), [local(place(t)) for t in expected]), len(opt._bound.jobs)


@pytest.mark.parametrize("kind", ["Muon", "NorMuon"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "replicated", "ep"])
def test_every_layout_has_the_bits_of_a_step_without(layout, kind, optimizer):
    for equal, jobs in run_threads(4, cut_up, layout, kind, *alone(tuple(placements_of(layout, 4)[2]), kind)):
        assert equal and jobs >= (2 if layout in ("replicated", "ep") else 5)


def unreduced(rank, world, way):
    """Plain parameters and their own gradients; "late": on a machine of notes."""
    generator = torch.Generator().manual_seed(3)
    fulls = drawn([*DENSE, (50, 6), (7,), (3, 2, 2)], generator)
    with pytest.MonkeyPatch.context() as patch:
        machine = install(patch) if way == "late" else Machine()
        params, opt = build(fulls, torch.clone, adamw=3, process_group=dist.group.WORLD, grads_are_reduced=False,
                            overlap_backward=False, overlap_forward=way != "without", wire_dtype=torch.float32)
        for _ in range(STEPS):
            for p, f in zip(params, fulls):
                p.grad = torch.randn((world, *f.shape), generator=generator)[rank]
            opt.step()
            opt.zero_grad()
        opt.wait()
        return machine.wrong, len(opt._forward_overlap.events), tensors(params, opt)


def test_unreduced_gradients_return_during_forward(optimizer):
    """Against other buckets there is the bound of test_same_bits.py, against the same ones none is needed."""
    runs = {way: run_ranks(2, unreduced, way) for way in ("late", "now", "without")}
    for rank in range(2):
        (wrong, marks, late), (_, none, now), (_, _, without) = (runs[way][rank] for way in runs)
        assert wrong == [] and marks > 8 and not none and same(late, now)
        assert max((a - b).abs().max().item() if a.numel() else 0 for a, b in zip(late, without)) < 1e-5


# the plan -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("room, latency", [(1 << 40, 0), (1 << 40, 1 << 30), (16_000, 0), (1, 0), (1, 1 << 30)])
def test_buckets_land_one_after_another(room, latency, optimizer):
    """The same matrices and owners, the first parameter of each owner first, and as much as there is room for."""
    W, (_, after) = 4, planned_along("along_forward", 4, latency, room)
    away = [b for b in after if b.route == "exchange"]
    for owner in range(W):
        mine = [m.param for b in away for m, o in zip(b.matrices, b.owners) if o == owner]
        assert mine == sorted(mine)
    rounds = [max(b.owners.count(owner) for owner in range(W)) for b in away]
    assert all(b.nbytes <= room for b in away) or rounds == [1] * len(away)
    assert len(away) == {0: 8, 1 << 30: 1}[latency] if room > 16_000 else len(away) > 8


@pytest.mark.parametrize("room", [1 << 40, 3000, 1])
def test_chunks_land_one_after_another(room, optimizer):
    plan, shapes, ranks = part("planning.plan"), [(50, 6), (7, 1), (3, 4), (1, 5), (90, 2)], (0, 1, 2)
    sizes = part("planning.memory_model").ChunkPlanInputs(4, 4, 4)
    whole, = plan.plan_chunks(shapes, ranks, 1 << 40, sizes)
    parts = plan.chunks_along_forward(shapes, ranks, sizes, 0, room)
    rows = [(m.param, row) for b in parts for m in b.matrices for row in range(m.at[0], m.at[0] + m.rows)]
    assert rows == sorted((m.param, row) for m in whole.matrices for row in range(m.rows))
    assert all(b.nbytes <= room for b in parts) or room < 3000
    assert len(parts) >= (8 if room > 3000 else 12)

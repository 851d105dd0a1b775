"""Updates that return during the next forward, on a CPU machine of notes (test_overlap_forward.py): ways in which
weights are read that a module's forward is not, and what else may see an update that is under way.
"""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import package, part, run_ranks
from tests.test_overlap_forward import install, muon, place

VIEWS = ("detach", "alias", "view", "aten::t", "transpose")


@pytest.fixture
def machine(optimizer, monkeypatch):
    return install(monkeypatch)


class Eyes(TorchDispatchMode):
    """Tells the machine of every read of some parameters, whoever reads them."""

    def __init__(self, machine, params):
        super().__init__()
        self.machine, self.of = machine, {p.untyped_storage().data_ptr(): p for p in params}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        there = [] if any(name in func.name() for name in VIEWS) else torch.utils._pytree.tree_leaves((args, kwargs))
        for tensor in there:
            if type(tensor) in (torch.Tensor, nn.Parameter):
                param = self.of.get(tensor.untyped_storage().data_ptr())
                self.machine.read(param) if param is not None else None
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embed, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8, 8))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(layers))

    def encode(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        return self.encode(x) @ self.scale


def launch(model, opt):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    opt.zero_grad()


def wrong(machine, model, opt, read):
    """What `read` sees half-written after a step."""
    for _ in range(2):
        launch(model, opt)
    with Eyes(machine, list(model.parameters())):
        read()
    return machine.wrong


X = torch.ones(2, 8)


def test_the_machine_sees_who_reads(machine):
    model = Net()
    opt = muon(model)
    assert wrong(machine, model, opt, lambda: model(X)) == []
    assert wrong(machine, model, opt, lambda: [p.sum() for p in model.parameters()])


# what was compiled ---------------------------------------------------------------------------------------------------

PAST = {
    "state_dict": lambda model, saved: [v.clone() for v in model.state_dict().values()],
    "load_state_dict": lambda model, saved: model.load_state_dict(saved),
    "a module": lambda model, saved: model.embed(X),
    "a layer": lambda model, saved: model.layers[0](X),
    "a method": lambda model, saved: model.encode(X),
    "itself": lambda model, saved: model(X),
}


@pytest.mark.parametrize("kind", ["around", "in place", "replicated"])
@pytest.mark.parametrize("name", PAST)
def test_what_is_used_past_its_wrapper_waits(name, kind, machine):
    model = Net()
    saved = copy.deepcopy(model.state_dict())
    if kind == "in place":
        model.compile(backend="eager")
    told = {"around": lambda: torch.compile(model, backend="eager"), "in place": lambda: model,
            "replicated": lambda: nn.DataParallel(model)}[kind]()
    opt = muon(told)
    assert wrong(machine, model, opt, lambda: PAST[name](model, saved)) == [] and len(opt._forward_overlap.models) == 1
    torch._dynamo.reset()


class Decorated(Net):
    @torch.compile(backend="eager", fullgraph=True)
    def forward(self, x):
        return self.encode(x) @ self.scale


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("kind", ["class", "instance", "layers"])
def test_a_compiled_forward_stays_whole_and_waits_before_it(kind, ran, machine):
    torch._dynamo.reset()
    model = Decorated() if kind == "class" else Net()
    for module in {"class": [], "instance": [model], "layers": model.layers}[kind]:
        module.forward = torch.compile(module.forward, backend="eager", fullgraph=True)
    if ran:
        model(X)
    opt = muon(model)
    for _ in range(3):
        launch(model, opt)
        model(X)
        assert opt._forward_overlap.waited_event[machine.main] == max(opt._forward_overlap.written_event.values())
    torch._dynamo.reset()


def test_copies_of_devices_wait_before_they_are_made(machine):
    """nn.DataParallel reads all weights in its own forward."""
    model = Net()
    around = nn.DataParallel(model)
    opt = muon(around)
    hooks = list(around._forward_pre_hooks.values())
    assert wrong(machine, model, opt, lambda: [hook(around, ()) for hook in hooks] + [
        p.clone() for p in model.parameters()]) == []


# modules whose hooks do not run --------------------------------------------------------------------------------------

class Direct(nn.Linear):
    def __call__(self, x):
        return self.forward(x)


def bare():
    """A forward that no class has."""
    model = nn.Module()
    model.one, model.other = nn.Linear(8, 8), nn.Linear(8, 8)
    model.forward = lambda x: F.linear(model.one(x), model.other.weight)
    return model


UNHOOKED = {
    "own call": lambda: nn.Sequential(nn.Linear(8, 8), Direct(8, 8)),
    "own call below": lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(Direct(8, 8))),
    "own call alone": lambda: Direct(8, 8),
    "instance": bare,
    "traced": lambda: torch.fx.symbolic_trace(Net()),
    "exported": lambda: torch.export.export(Net(), (X,)).module(),
}


@pytest.mark.parametrize("name", UNHOOKED)
def test_modules_that_run_no_hooks_are_waited_for(name, machine):
    model = UNHOOKED[name]()
    opt = muon(model)
    assert wrong(machine, model, opt, lambda: model(X)) == []


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("alone", [True, False])
def test_the_step_waits_for_torchscript(alone, machine):
    script = torch.jit.script(Net())
    model = script if alone else nn.Sequential(nn.Linear(8, 8), script)
    opt = muon(model)
    launch(model, opt)
    assert opt._forward_overlap.waited_event[machine.main] >= place(opt, *script.parameters())
    model(X)


# copies of a model ---------------------------------------------------------------------------------------------------

def test_a_pickled_model_is_loaded_where_this_package_is_not(machine, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8))
    muon_ = muon(model)
    torch.save(model, tmp_path / "model.pt")
    code = ("import sys, torch; model = torch.load(sys.argv[1], weights_only=False); "
            "model.load_state_dict(model.state_dict()); print(tuple(model(torch.ones(2, 8)).shape))")
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "model.pt"], capture_output=True, text=True)
    assert done.stdout.strip() == "(2, 8)" and muon_, done.stderr


@pytest.mark.parametrize("strict", [True, False])
def test_a_model_is_exported_and_its_copy_compiled_whole(strict, machine):
    model = Net()
    opt = muon(model)
    launch(model, opt)
    torch.export.export(model, (X,), strict=strict)
    torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)(X)
    torch._dynamo.reset()


# what else is under way ----------------------------------------------------------------------------------------------

def apart(rank, world):
    """A gradient that does not lie as it leaves: a copy leaves, and both live until that has landed."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        model = nn.Linear(8, 6, bias=False)
        opt = package().Muon([{"params": [model.weight], "use_muon": False}], overlap_forward=True,
                             process_group=dist.group.WORLD, grads_are_reduced=False)
        opt.updates_return_during(model)
        model.weight.grad = torch.ones(8, 6).t()
        gradient = weakref.ref(model.weight.grad)
        opt.step()
        opt.zero_grad()
        gc.collect()
        alive = gradient() is not None
        opt.wait()
        return alive, gradient() is not None


def test_gradients_that_were_copied_live_until_the_copy_is_made(optimizer):
    assert run_ranks(2, apart) == [(True, False)] * 2


def test_state_that_may_move_is_kept_from_others_meanwhile(machine, monkeypatch):
    """A step that plans may put other tensors in the place of state, whose memory goes back while it is read."""
    model, more = Net(), nn.Parameter(torch.ones(4, 4))
    opt = muon(model)
    launch(model, opt)
    shared, late = [], part("execution.overlap.forward").ForwardOverlap
    monkeypatch.setattr(late, "record_stream", lambda self, tensors: shared.extend(map(id, tensors)))
    opt.add_param_group({"params": [more]})
    more.grad = torch.ones_like(more)
    held = {id(t) for p in model.parameters() for t in opt.state[p].values()}
    launch(model, opt)
    assert held and held <= set(shared)


def test_what_was_read_of_skipped_stays_as_it_was(machine):
    model = Net()
    opt = muon(model, nonfinite="skip")
    seen = []
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.full_like(p, float("nan"))
        opt.step()
        seen.append(opt.skipped)
    assert seen[0] > 0 and [int(s) for s in seen] == [int(seen[0]) * i for i in (1, 2, 3)]


def test_forwards_in_several_threads(machine):
    model, errors, switch = Net(20), [], sys.getswitchinterval()
    opt = muon(model)

    def forward():
        try:
            for _ in range(5):
                model(X)
        except Exception as error:
            errors.append(error)

    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            launch(model, opt)
            threads = [threading.Thread(target=forward) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert errors == []


@pytest.mark.parametrize("on", [True, False])
def test_what_is_no_model_is_refused(on, optimizer):
    opt = muon(Net(), overlap_forward=on)
    with pytest.raises(TypeError, match="takes one torch.nn.Module, not list: call it once for each model"):
        opt.updates_return_during([Net()])

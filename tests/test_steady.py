"""A steady step does no Python work for each parameter: what it interprets outside the kernels is counted for two
sizes of a model. On a CPU the kernels' stand-ins go from matrix to matrix; what they stand for is one launch.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import package, run_ranks
from tests.test_overlap_forward import install

FEW, MANY = 32, 64  # matrices, and as many vectors
WAYS = {
    "alone": {},
    "replicated": {"process_group": True},
    "unreduced": {"process_group": True, "grads_are_reduced": False},
    "sharded": {},
    "late": {"overlap_forward": True},
    "late and replicated": {"overlap_forward": True, "process_group": True},
    "late and unreduced": {"overlap_forward": True, "process_group": True, "grads_are_reduced": False},
    "late and sharded": {"overlap_forward": True},
}


class Model(nn.Module):
    """One module waits for all of it."""

    def __init__(self, count, place):
        super().__init__()
        self.matrices = nn.ParameterList(nn.Parameter(place(torch.randn(8, 8))) for _ in range(count))
        self.vectors = nn.ParameterList(nn.Parameter(place(torch.randn(8))) for _ in range(count))

    def forward(self, x):
        return x


@contextlib.contextmanager
def counting(found):
    """Count what is interpreted meanwhile in each file of the package."""
    home = Path(package().__file__).parent

    @functools.cache  # called for each operation
    def file_of(name):
        path = Path(name)
        counts = home in path.parents and home / "kernels" not in path.parents
        return path.relative_to(home).with_suffix("").as_posix() if counts else None

    def each(frame, event, _):
        found[file_of(frame.f_code.co_filename)] += event == "opcode"
        return each

    def begin(frame, *_):
        if file_of(frame.f_code.co_filename) is None:
            return None
        frame.f_trace, frame.f_trace_opcodes = each, True  # for Python 3.13, in this order
        return each

    gc.collect()  # what another optimizer leaves behind is not to end meanwhile
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for such frames when it is told to trace
    sys.settrace(begin)
    try:
        yield
    finally:
        sys.settrace(before)


def work(count, way, place):
    """({file: how much it interprets in a steady step and the forward after it}, how many buckets there are)."""
    options = {**WAYS[way], **({"process_group": dist.group.WORLD} if "process_group" in WAYS[way] else {})}
    model, found = Model(count, place), collections.Counter()
    opt = package().NorMuon([{"params": [*model.matrices]}, {"params": [*model.vectors], "use_muon": False}], **options)
    if "late" in way:
        opt.updates_return_during(model)
    for step in range(5):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with counting(found) if step == 4 else contextlib.nullcontext():
            opt.step()
            model(None)
    assert bool(opt._forward_overlap.events) == ("late" in way)
    return found, len(opt._bound.jobs)


def growth(rank, world, way):
    """{file: how much more it interprets for each parameter more}, of those that interpret more."""
    torch.manual_seed(0)
    place = torch.clone
    if "sharded" in way:
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (world,))

        def place(full):
            return distribute_tensor(full, mesh, [Shard(0)])

    with pytest.MonkeyPatch.context() as patch:
        install(patch) if "late" in way else None
        (few, buckets), (many, as_many) = (work(count, way, place) for count in (FEW, MANY))
    assert buckets == as_many and few["muon"] and few["pipeline"]
    assert "late" not in way or few["execution/overlap/forward"]
    more = 2 * (MANY - FEW)
    return {name: (many[name] - few[name]) / more for name in many if many[name] - few[name] >= more}


def bound_three_times(optimizer, released):
    """(weights, the bound steps) of a model bound anew for metrics, and again for fewer parameters. The workspace is
    spoiled between steps, or with `released` freed.
    """
    generator, bound = torch.Generator().manual_seed(0), []
    params = [nn.Parameter(torch.randn(size, generator=generator)) for size in ((16, 8), (16, 8), (8, 24))]
    opt = optimizer.NorMuon(params)
    for step in range(3):
        opt.collect_metrics = step > 0
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        if step == 2:
            params[2].grad = None
        if released:
            opt.release()
        for buffer in [b for one in bound for b in one.workspace.buffers.values()]:
            buffer.fill_(255)
        opt.step()
        bound.append(opt._bound)
    return params, bound


def test_a_step_bound_anew_takes_over_the_workspace(optimizer):
    """Where sizes are equal: else two workspaces would exist at a time."""
    params, bound = bound_three_times(optimizer, released=False)
    first, equal, smaller = (one.workspace.buffers for one in bound)
    assert len({*map(id, bound)}) == 3 and first.keys() == equal.keys() and first
    assert all(equal[key] is first[key] for key in first)
    kept = [key for key in smaller if smaller[key] is equal.get(key)]
    assert all((smaller[key].nbytes == equal[key].nbytes) == (key in kept) for key in smaller) and kept != [*smaller]
    same, others = bound_three_times(optimizer, released=True)
    assert all(map(torch.equal, params, same))
    assert not any(others[1].workspace.buffers[key] is buffer for key, buffer in others[0].workspace.buffers.items())


@pytest.mark.parametrize("way", WAYS)
def test_a_steady_step_does_no_work_for_each_parameter(way, optimizer):
    """The least that could be done for each is more than one operation."""
    world = 1 if way in ("alone", "late") else 2
    assert run_ranks(world, growth, way) == [{}] * world


@pytest.mark.parametrize("frozen", [False, True])
def test_construction_takes_work_in_proportion_to_the_groups(frozen, optimizer):
    """No group is looked at again for each one that follows."""
    work = []
    for count in (40, 80):
        params, found = [nn.Parameter(torch.ones(2, 2), not frozen) for _ in range(count)], collections.Counter()
        with counting(found):
            package().Muon([{"params": [p]} for p in (*params, nn.Parameter(torch.ones(2, 2)))])
        work.append(found.total())
    assert work[0] < work[1] < 2.06 * work[0]


# One step followed: how many calls and files a reader goes through


def followed(rank, world, count, device):
    """(calls, switches between files) of a steady step outside kernels/, of `count` sharded parameters."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(device, (world,))
    params = [nn.Parameter(distribute_tensor(torch.randn(32, 32, device=device), mesh, [Shard(0)]))
              for _ in range(count)]
    opt, home, files = package().Muon(params), Path(package().__file__).parent, []

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and home in path.parents and home / "kernels" not in path.parents:
            files.append(path)

    for step in range(6):
        for p in params:
            p.grad = torch.ones_like(p)
        sys.setprofile(note if step == 5 else None)
        opt.step()
        sys.setprofile(None)
    assert len(opt._bound.jobs) == 1
    return len(files), sum(map(Path.__ne__, files, files[1:]))


def test_a_step_is_followed_in_few_calls(optimizer):
    """Of 2 ranks and 1 bucket; as many for 72 parameters as for 12. A call more is one more on GPUs, too, where the
    bound is reached.
    """
    few, many = (run_ranks(2, followed, count, "cpu", backend="gloo")[0] for count in (12, 72))
    calls, switches = few
    assert calls <= 88 and switches <= 39, few
    assert many == few


@pytest.mark.gpus(2)
def test_a_step_on_gpus_is_followed_in_few_calls(optimizer):
    """From the third step on the parts are replayed as graphs."""
    few, many = (run_ranks(2, followed, count, "cuda", backend="nccl")[0] for count in (12, 72))
    calls, switches = few
    assert calls <= 83 and switches <= 45, few
    assert many == few

"""What the host pays does not grow with the ranks times the parameters. By counts, in a process of a large job."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.ranks import everywhere, package, part

HIDDEN = 24


@contextlib.contextmanager
def job(*sizes, rank=0):
    """A rank of a job on a mesh; its collectives send nothing."""
    world = torch.Size(sizes).numel()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[:len(sizes)]))
    finally:
        dist.destroy_process_group()


def matrices(mesh, shapes, *placements):
    """Named DTensors of this rank's shards."""
    box_at, as_dtensor = part("params.layout").box_at, part("params.dtensor").as_dtensor
    found = []
    for number, shape in enumerate(shapes):
        box = box_at(mesh.get_coordinate(), shape, placements, tuple(mesh.shape))
        local = torch.zeros([stop - start for start, stop in box])
        found.append((f"m{number}", nn.Parameter(as_dtensor(local, shape, mesh, placements))))
    return found


def counted(monkeypatch, owner, name):
    """A list that grows by one entry at each call of `owner.name`, also by modules that have imported it by name, or
    at each read of a property.
    """
    calls, known = [], vars(owner)[name]
    if isinstance(known, property):
        monkeypatch.setattr(owner, name, property(lambda self: calls.append(name) or known.fget(self)))
    else:
        everywhere(monkeypatch, owner, name, lambda *args, **kwargs: calls.append(name) or known(*args, **kwargs))
    return calls


def test_the_ranks_of_a_mesh_are_read_once_for_all_parameters(monkeypatch):
    """torch computes `DeviceMesh.mesh` anew at each read, in a time that grows with the ranks."""
    chunks = counted(monkeypatch, part("params.layout"), "row_chunks")
    with job(64) as mesh:
        first, later = (matrices(mesh, 12 * [(rows, HIDDEN)], Shard(0)) for rows in (128, 64))
        reads = counted(monkeypatch, DeviceMesh, "mesh")
        opt = package().Muon(first)
        opt.init_state()
        opt.load_state_dict(opt.state_dict())
        opt.add_param_group({"params": later})
    assert 0 < len(reads) <= 6  # 24 parameters
    assert not chunks  # the rows of all ranks, where only this rank's count


def test_a_submesh_has_the_ranks_around_this_rank():
    """A process that joins another job may have another rank, while equal meshes of the first job live."""
    meshes, coordinates = [], part("params.dtensor").mesh_coordinates
    for rank in (0, 2):
        with job(2, 2, rank=rank) as mesh:
            meshes.append(mesh["b"])
            assert list(coordinates(meshes[-1])) == meshes[-1].mesh.tolist() == [rank, rank + 1]


def test_a_memory_report_looks_at_one_rank_of_each_kind(monkeypatch):
    """64 and 1024 ranks own no matrix, or one of two shapes: three kinds of ranks, beside the rank shown."""
    rank_plans = counted(monkeypatch, part("planning.planner"), "rank_plan_of")
    counts = {}
    for ranks in (64, 1024):
        rank_plans.clear()
        shapes = 8 * [(2048, HIDDEN), (1024, 64)]
        params = [nn.Parameter(torch.zeros(shape, device="meta")) for shape in shapes]
        report = package().Muon.memory_forecast(params, ranks=ranks)
        counts[ranks] = len(rank_plans)
        assert report.rank_count == ranks
    assert 0 < counts[64] == counts[1024] <= 4


def assert_report_of_all_ranks(opt, monkeypatch):
    """The memory report, which looks at some ranks, is the one by all ranks and single parameters."""
    reports, found = part("memory.predicted"), opt.memory_report()
    monkeypatch.setattr(part("memory.rank_classes").BucketParts, "weighed", lambda parts, rank, weigh: (
        parts.at(rank), sum(weigh(*one) for one in parts.at(rank))))
    monkeypatch.setattr(reports, "representatives", lambda plans, ranks, offloads: list(ranks))
    monkeypatch.setattr(reports, "parameter_forms", lambda plan, *_: [[i] for i in range(len(plan.params))])
    assert dataclasses.asdict(opt.memory_report()) == dataclasses.asdict(found)


SHAPES = [(36, 40), (36, 40), (25, 16), (5, 24), (25, 16), (48, 16), (36, 40)]


@pytest.mark.parametrize("options", [
    {"shard_state": True}, {"shard_state": True, "rule": "normuon"}, {"grads_are_reduced": False},
    {"shard_state": True, "offload_state": 3000}], ids=str)
def test_the_largest_owner_of_plain_state_is_among_those_looked_at(options, monkeypatch):
    with job(6):
        plain = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        others = [nn.Parameter(torch.zeros(shape)) for shape in ((50, 3), (7,), (50, 3), (2, 9))]
        rule = {"rule": options["rule"]} if "rule" in options else {}
        groups = [{"params": plain, **rule}, {"params": others, "use_muon": False}]
        arguments = {key: value for key, value in options.items() if key != "rule"}
        assert_report_of_all_ranks(package().Muon(groups, process_group=dist.group.WORLD, **arguments), monkeypatch)


@pytest.mark.parametrize("sizes, placements", [((6,), [Shard(0)]), ((2, 3), [Replicate(), Shard(0)])])
def test_the_largest_owner_of_matrices_is_among_those_looked_at(sizes, placements, monkeypatch):
    with job(*sizes) as mesh:
        groups = [{"params": matrices(mesh, SHAPES, *placements), "rule": "adamuon"}]
        assert_report_of_all_ranks(package().Muon(groups, state_at_owners=True), monkeypatch)


@pytest.mark.parametrize("rule", ["muon", "normuon", "dion2"])
@pytest.mark.parametrize("sizes, placements", [
    ((12,), [Shard(0)]), ((3, 4), [Replicate(), Shard(0)]), ((4, 3), [Shard(0), Replicate()]),
    ((2, 6), [Shard(1), Shard(0)])])
def test_the_largest_rank_is_among_those_looked_at(sizes, placements, rule, monkeypatch):
    """Reports by some ranks are those by all ranks, also where ranks store unequal parts or nothing."""
    with job(*sizes) as mesh:
        split = [{"params": matrices(mesh, SHAPES, *placements)},
                 {"params": matrices(mesh, 2 * [(36, 24)], *placements), "split": {"rows": [12, 24]}}]
        opt = package().Muon(split, rule=rule, **({"fraction": 0.5} if rule == "dion2" else {}))
        assert_report_of_all_ranks(opt, monkeypatch)


def test_replaced_state_is_not_kept():
    """Else state takes twice its memory between a load and the next step."""
    params = [(f"m{i}", nn.Parameter(torch.ones(8, 6))) for i in range(2)]
    opt = package().Muon(params)
    for _, p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    old = [weakref.ref(t) for state in opt.state.values() for t in state.values() if torch.is_tensor(t)]
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    del saved
    gc.collect()
    assert old and [ref for ref in old if ref() is not None] == []


def test_routers_are_found_in_a_time_of_the_layers(monkeypatch):
    """A router asks for the layers beside it, not for those of all experts of the model."""
    structure, visits = part("params.model.structure"), []

    class Layers(list):
        def __iter__(self):
            return map(lambda layer: visits.append(layer) or layer, super().__iter__())

    find = structure.Structure._find_layers
    monkeypatch.setattr(structure.Structure, "_find_layers", lambda self: Layers(find(self)))
    reads = counted(monkeypatch, structure, "own_parameters")

    def model(layers):
        def block():
            experts = nn.ModuleList([nn.Linear(HIDDEN, 8, bias=False) for _ in range(16)])
            return nn.ModuleDict({"gate": nn.Linear(HIDDEN, 16, bias=False), "experts": experts,
                                  "other": nn.ModuleDict({"gate": nn.Linear(512, 2, bias=False)})})
        with torch.device("meta"):
            return nn.ModuleDict({"layers": nn.ModuleList([block() for _ in range(layers)])})

    counts, comparisons = {}, counted(monkeypatch, structure, "_is_below")
    for layers in (4, 8):
        reads.clear(), comparisons.clear(), visits.clear()
        report = []
        package().get_default_muon_param_groups(model(layers), report=report.append)
        counts[layers] = len(reads), len(comparisons), len(visits)
        assert report[0].count("router") == 2 * layers
    assert all(0 < twice <= 2.2 * once for once, twice in zip(*counts.values())), counts

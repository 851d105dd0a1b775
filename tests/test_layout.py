"""Boxes against torch's own: what DTensor stores where, and what is refused because it would be a guess."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tests.ranks import package, part, run_ranks, run_threads

R, S = Replicate(), Shard
SHAPES = [(16, 24), (10, 12), (3, 8), (33, 7), (1, 9), (0, 5), (7, 0), (8, 6, 10), (5, 4, 3), (2, 3, 4, 5), (9,)]
MESHES = {
    "replicated": ((4,), [R]),
    "rows": ((4,), [S(0)]),
    "columns": ((4,), [S(1)]),
    "last dim": ((4,), [S(2)]),
    "hsdp": ((2, 3), [R, S(0)]),
    "hsdp, turned": ((3, 2), [S(1), R]),
    "tp x fsdp": ((2, 3), [S(0), S(1)]),
    "fsdp x tp": ((3, 2), [S(1), S(0)]),
    "rows twice": ((2, 3), [S(0), S(0)]),
    "columns twice": ((3, 2), [S(1), S(1)]),
    "three axes": ((2, 2, 2), [R, S(1), S(0)]),
    "three axes of rows": ((2, 2, 2), [S(0), S(0), S(0)]),
    "experts": ((2, 3), [S(0), S(2)]),
}
STRIDED = {  # FSDP2 over TP: the TP axis comes last in the mesh and first in the cutting
    "rows": ((2, 2), [_StridedShard(0, split_factor=2), S(0)], (16, 24)),
    "more shards than TP": ((4, 2), [_StridedShard(0, split_factor=2), S(0)], (32, 3)),
    "more TP than shards": ((2, 4), [_StridedShard(0, split_factor=4), S(0)], (32, 3)),
    "uneven": ((2, 2), [_StridedShard(0, split_factor=2), S(0)], (20, 6)),
    "columns": ((2, 3), [_StridedShard(1, split_factor=3), S(1)], (5, 24)),
    "replicated too": ((2, 2, 2), [R, _StridedShard(0, split_factor=2), S(0)], (16, 3)),
    "an ordinary axis before": ((2, 2, 2), [S(0), _StridedShard(0, split_factor=2), S(0)], (16, 3)),
    "an axis between": ((2, 2, 2), [_StridedShard(0, split_factor=2), S(1), S(0)], (16, 6)),
}


def boxes_on_rank(rank, world, mesh_shape, placements, shapes):
    """[(our box of this rank, torch's)] for each shape; our layout is the same on every rank."""
    layout, mesh, found = part("params.layout"), init_device_mesh("cpu", mesh_shape), []
    for shape in shapes:
        local, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        tensor = DTensor.from_local(torch.zeros(local), mesh, placements, run_check=False, shape=torch.Size(shape),
                                    stride=torch.empty(shape).stride())
        ours = layout.layout_of(tensor)
        layout.check_placements(tensor, "w")
        layout.check_local_shape(tensor, "w")
        theirs = tuple((start, start + size) for start, size in zip(offset, local))
        found.append((ours.boxes[rank], theirs, ours.boxes, ours.replicas))
    return found


def extent(box):
    """The elements of a box; all empty ones are alike."""
    return box if all(a < b for a, b in box) else None


@pytest.mark.parametrize("mesh", MESHES)
def test_boxes_are_torchs(mesh, optimizer):
    mesh_shape, placements = MESHES[mesh]
    least = 1 + max((p.dim for p in placements if p.is_shard()), default=0)
    shapes = [shape for shape in SHAPES if len(shape) >= least]
    results = run_threads(torch.Size(mesh_shape).numel(), boxes_on_rank, mesh_shape, placements, shapes)
    for of_shape in zip(*results):
        for rank, (ours, theirs, boxes, replicas) in enumerate(of_shape):
            assert extent(ours) == extent(theirs)
            assert boxes[rank] == ours and (boxes, replicas) == of_shape[0][2:]


def check_replicas(shape, boxes, replicas):
    """Each replica holds every element once; the replicas share no rank and leave none out."""
    assert sorted(itertools.chain(*replicas)) == sorted(boxes)
    for ranks in replicas:
        count = torch.zeros(shape, dtype=torch.int64)
        for rank in ranks:
            count[tuple(slice(*side) for side in boxes[rank])] += 1
        assert (count == 1).all()


@pytest.mark.parametrize("mesh", MESHES)
def test_each_copy_is_the_whole_tensor(mesh, optimizer):
    mesh_shape, placements = MESHES[mesh]
    shapes = [(8, 6, 10), (5, 7, 3)]
    results = run_threads(torch.Size(mesh_shape).numel(), boxes_on_rank, mesh_shape, placements, shapes)
    for shape, (_, _, boxes, replicas) in zip(shapes, results[0]):
        check_replicas(shape, boxes, replicas)
        assert len(replicas) == torch.Size(n for n, p in zip(mesh_shape, placements) if p.is_replicate()).numel()


def strided_on_rank(rank, world, mesh_shape, placements, shape):
    """Cut an arange as our boxes say; torch has to put it together again."""
    layout, mesh = part("params.layout"), init_device_mesh("cpu", mesh_shape)
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    box = layout.box_at(mesh.get_coordinate(), shape, placements, mesh_shape)
    local = full[tuple(slice(*side) for side in box)].clone()
    tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
    layout.check_placements(tensor, "w")
    ours = layout.layout_of(tensor)
    check_replicas(shape, ours.boxes, ours.replicas)
    return torch.equal(tensor.full_tensor(), full), ours.boxes


@pytest.mark.parametrize("case", STRIDED)
def test_strided_shards_of_fsdp_over_tp_are_torchs(case, optimizer):
    mesh_shape, placements, shape = STRIDED[case]
    results = run_threads(torch.Size(mesh_shape).numel(), strided_on_rank, mesh_shape, placements, shape)
    assert all(equal for equal, _ in results)
    assert all(boxes == results[0][1] for _, boxes in results)


def fsdp_over_tp_on_rank(rank, world, mesh_shape, shape, style):
    """What FSDP2 really makes of a Linear that TP has cut: our boxes hold the very elements that are stored."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layout, mesh = part("params.layout"), init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    model[0].weight.data.copy_(full)
    if style:
        parallelize_module(model, mesh["tp"], {"0": {"rows": ColwiseParallel(), "columns": RowwiseParallel()}[style]})
    fully_shard(model, mesh=mesh["dp"])
    param = model[0].weight
    layout.check_placements(param, "w")
    ours = layout.layout_of(param)
    layout.check_local_shape(param, "w")
    stored = full[tuple(slice(*side) for side in ours.boxes[rank])]
    return torch.equal(part("params.dtensor").local_of(param), stored), str(param.placements)


@pytest.mark.parametrize(("style", "shape"), [("rows", (16, 6)), ("rows", (20, 6)), ("columns", (16, 6)),
                                              ("columns", (5, 6)), (None, (7, 6)), (None, (1, 3))])
def test_what_fsdp2_makes_is_known(style, shape, optimizer):
    results = run_threads(4, fsdp_over_tp_on_rank, (2, 2), shape, style)
    assert all(equal for equal, _ in results), results[0][1]
    assert ("_StridedShard" in results[0][1]) == (style == "rows")


INTERLEAVED = {  # fused projections under TP: every rank stores a part of each of them
    "rows": ((2,), [_StridedShard(0, split_factor=2)], (8, 6)),
    "columns": ((2,), [_StridedShard(1, split_factor=2)], (5, 8)),
    "experts": ((2,), [_StridedShard(1, split_factor=2)], (4, 8, 6)),
    "three groups on three ranks": ((3,), [_StridedShard(0, split_factor=3)], (18, 4)),
    "experts over fsdp": ((2, 2), [S(0), _StridedShard(1, split_factor=2)], (4, 8, 6)),
    "columns over another axis": ((2, 2), [_StridedShard(0, split_factor=2), S(1)], (8, 7)),
    "replicas": ((2, 2), [R, _StridedShard(0, split_factor=2)], (8, 6)),
    "replicas last": ((2, 2), [_StridedShard(0, split_factor=2), R], (8, 6)),
}


def interleaved_on_rank(rank, world, mesh_shape, placements, shape):
    """Whether the parts of this rank are what torch stores; how often each element is in a copy; our parts."""
    layout, mesh = part("params.layout"), init_device_mesh("cpu", mesh_shape)
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
    layout.check_placements(tensor, "w")
    layout.check_local_shape(tensor, "w")
    ours = layout.layout_of(tensor)
    count = torch.zeros(shape)
    for holder in ours.replicas[0]:
        for box in ours.boxes_of(holder):
            count[tuple(slice(*side) for side in box)] += 1
    same = torch.equal(ours.shard_of(full, rank), tensor.to_local()) and torch.equal(tensor.full_tensor(), full)
    placed = part("communication.redistribute").place_like(full, tensor)
    return same and torch.equal(placed.to_local(), tensor.to_local()), bool((count == 1).all()), ours.digest


@pytest.mark.parametrize("case", INTERLEAVED)
def test_interleaved_dims_are_torchs(case, optimizer):
    mesh_shape, placements, shape = INTERLEAVED[case]
    results = run_threads(torch.Size(mesh_shape).numel(), interleaved_on_rank, mesh_shape, placements, shape)
    assert all(same and once for same, once, _ in results)
    assert len({digest for *_, digest in results}) == 1


def steps_on_rank(rank, world, name, mesh_shape, placements, shape):
    """The largest difference of weights and state from one process, after three steps with the same gradients, with an
    interleaved matrix beside one that is cut by rows and an AdamW parameter that is interleaved too.
    """
    mesh, generator = init_device_mesh("cpu", mesh_shape), torch.Generator().manual_seed(0)
    forms = [(shape, placements), (shape, [S(0)] * len(mesh_shape)), (shape, placements)]

    def placed():
        return [(torch.randn(s, generator=generator), way) for s, way in forms]

    fulls = placed()
    many = [nn.Parameter(distribute_tensor(f, mesh, way, src_data_rank=None)) for f, way in fulls]
    one = [nn.Parameter(f.clone()) for f, _ in fulls]
    optimizers = [getattr(package(), name)([{"params": ps[:2]}, {"params": ps[2:], "use_muon": False}], lr=0.1)
                  for ps in (one, many)]
    for _ in range(3):
        for p, q, (grad, way) in zip(one, many, placed()):
            p.grad, q.grad = grad, distribute_tensor(grad, mesh, way, src_data_rank=None)
        for optimizer in optimizers:
            optimizer.step()
    pairs = list(zip(one, many))
    for p, q in list(pairs):
        pairs += [(optimizers[0].state[p][key], optimizers[1].state[q][key]) for key in optimizers[0].state[p]]
    return max((p - (q.full_tensor() if isinstance(q, DTensor) else q)).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("case", INTERLEAVED)
@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_steps_of_interleaved_parameters_have_the_bits_of_one_process(name, case, optimizer):
    mesh_shape, placements, shape = INTERLEAVED[case]
    if case == "columns" and name == "NorMuon":
        with pytest.raises(RuntimeError, match="the rule keeps one number for each row"):
            run_threads(2, steps_on_rank, name, mesh_shape, placements, shape)
        return
    assert set(run_threads(torch.Size(mesh_shape).numel(), steps_on_rank, name, mesh_shape, placements, shape)) == {0.0}


def test_fused_experts_over_gloo(optimizer):
    """As transformers' tensor parallelism stores `gate_up_proj`."""
    assert run_ranks(2, steps_on_rank, "NorMuon", *INTERLEAVED["experts"]) == [0.0] * 2


def adamw_on_rank(rank, world):
    """AdamW of a parameter whose boxes are unknown, and whether a whole state that is loaded is cut as torch does."""
    mesh, full = init_device_mesh("cpu", (2, 2)), torch.arange(64.0).view(16, 4)
    way = [S(0), _StridedShard(0, split_factor=2)]
    many = nn.Parameter(distribute_tensor(full, mesh, way, src_data_rank=None))
    one = nn.Parameter(full.clone())
    with pytest.raises(NotImplementedError, match="Put it into a group with use_muon=False"):
        package().Muon([("fused", many)])
    optimizers = [package().Muon([{"params": [p], "use_muon": False}], lr=0.1) for p in (one, many)]
    for _ in range(2):
        one.grad, many.grad = full.sin(), distribute_tensor(full.sin(), mesh, way, src_data_rank=None)
        for optimizer in optimizers:
            optimizer.step()
        optimizers[1].load_state_dict(optimizers[0].state_dict())  # whole tensors
    local = distribute_tensor(one.detach(), mesh, way, src_data_rank=None).to_local()
    state = distribute_tensor(optimizers[0].state[one]["exp_avg"], mesh, way, src_data_rank=None).to_local()
    return torch.equal(many.to_local(), local) and torch.equal(
        part("params.dtensor").local_of(optimizers[1].state[many]["exp_avg"]), state)


def test_adamw_takes_shardings_that_muon_refuses(optimizer):
    assert all(run_threads(4, adamw_on_rank))


REFUSED = {
    "partial": ((2, 2), [Partial(), S(0)], "unsummed terms"),
    "factor of another size": ((2, 2), [_StridedShard(0, split_factor=3), S(0)], "not FSDP2's over TP"),
    "unequal groups": ((3, 2), [_StridedShard(0, split_factor=2), S(1)], "do not divide into equal parts"),
    "strided axis last": ((2, 2), [S(0), _StridedShard(0, split_factor=2)], "not FSDP2's over TP"),
    "two strided": ((2, 2, 2), [_StridedShard(0, split_factor=2)] * 2 + [S(0)], "more than one _StridedShard"),
    "two strided dims": ((2, 2, 2), [_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=1), S(0)],
                         "more than one _StridedShard"),
}


def refused_on_rank(rank, world, mesh_shape, placements, why):
    mesh, layout = init_device_mesh("cpu", mesh_shape), part("params.layout")
    tensor = DTensor.from_local(torch.zeros(4, 4), mesh, placements, run_check=False, shape=torch.Size((16, 16)),
                                stride=(16, 1))
    with pytest.raises(NotImplementedError, match=rf"fc\.weight of shape \(16, 16\) with placements .*{why}"):
        layout.check_placements(tensor, "fc.weight")
    return True


@pytest.mark.parametrize("case", REFUSED)
def test_placements_that_would_be_a_guess_are_refused(case, optimizer):
    mesh_shape = REFUSED[case][0]
    assert all(run_threads(torch.Size(mesh_shape).numel(), refused_on_rank, *REFUSED[case]))


def out_of_order(rank, world, ranks, placements, allowed, fake):
    from torch._subclasses import FakeTensorMode
    from torch.distributed.device_mesh import DeviceMesh

    mesh, layout = DeviceMesh("cpu", ranks), part("params.layout")
    with FakeTensorMode() if fake else contextlib.nullcontext():
        tensor = DTensor.from_local(torch.zeros(4, 4), mesh, placements, run_check=False)
        if allowed:
            layout.check_placements(tensor, "fc.weight")
            return True
        with pytest.raises(NotImplementedError, match=r"parameter fc\.weight .* ranks that do not ascend along axis"):
            layout.check_placements(tensor, "fc.weight")
        return True


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(("ranks", "placements", "allowed"), [
    ([1, 0, 2, 3], [S(0)], False), ([[0, 1], [3, 2]], [S(1), S(0)], False), ([[2, 3], [0, 1]], [S(0), R], False),
    ([[0, 2], [1, 3]], [S(0), S(0)], True), ([[2, 3], [0, 1]], [R, S(0)], True), ([3, 1, 0, 2], [R], True)])
def test_ranks_that_do_not_ascend_along_a_sharded_axis_are_refused(ranks, placements, allowed, fake, optimizer):
    """torch gives rank 0 of a mesh [1, 0] the second half, and full_tensor() puts it first."""
    assert all(run_threads(4, out_of_order, ranks, placements, allowed, fake))


def test_state_under_a_fake_mode(optimizer):
    """State of a sharded parameter whose tensors have no values: positions of a mesh are values, too."""
    def built(rank, world):
        from torch._subclasses import FakeTensorMode

        mesh = init_device_mesh("cpu", (world,))
        with FakeTensorMode():
            local = torch.empty(16, 128)
            param = torch.nn.Parameter(DTensor.from_local(local, mesh, [S(0)], run_check=False))
            muon = optimizer.NorMuon([param], state_dtype=torch.int8)
            muon.init_state()
            return {key: tuple(value.shape) for key, value in muon.state[param].items()}

    shapes = {"momentum_buffer": (32, 128), "momentum_scale": (32, 2), "second_moment": (32, 1)}
    assert run_threads(2, built) == [shapes, shapes]


def row_state_on_rank(rank, world, mesh_shape, placements, shape):
    layout, mesh = part("params.layout"), init_device_mesh("cpu", mesh_shape)
    tensor = distribute_tensor(torch.zeros(shape), mesh, placements, src_data_rank=None)
    rows = layout.layout_of(tensor, shape=(*shape[:-1], 1))
    whole = layout.layout_of(tensor)
    check_replicas(rows.shape, rows.boxes, rows.replicas)
    if not any(p.is_shard() and p.dim == len(shape) - 1 for p in placements):
        assert all(rows.boxes[r][:-1] == whole.boxes[r][:-1] for r in rows.boxes)
    return rows.boxes


@pytest.mark.parametrize("mesh", ["rows", "columns", "hsdp", "tp x fsdp", "three axes"])
@pytest.mark.parametrize("shape", [(10, 12), (3, 8, 6)])
def test_row_state_lies_where_its_rows_do(mesh, shape, optimizer):
    """(R, 1) cut along columns lies on one rank of them."""
    mesh_shape, placements = MESHES[mesh]
    results = run_threads(torch.Size(mesh_shape).numel(), row_state_on_rank, mesh_shape, placements, shape)
    assert all(boxes == results[0] for boxes in results)


def test_a_plain_tensor_is_whole_where_it_is(optimizer):
    layout = part("params.layout").layout_of(torch.zeros(3, 4))
    assert layout.boxes == {0: ((0, 3), (0, 4))} and layout.replicas == ((0,),) and layout.plain


def plain_on_rank(rank, world):
    import torch.distributed as dist

    layout = part("params.layout")
    alone, shared = layout.layout_of(torch.zeros(3, 4)), layout.layout_of(torch.zeros(3, 4), dist.group.WORLD)
    assert list(alone.boxes) == [rank]
    return shared.boxes, shared.replicas, shared.replica_of


def test_a_plain_tensor_of_a_process_group_is_whole_on_each_rank(optimizer):
    for boxes, replicas, replica_of in run_threads(3, plain_on_rank):
        assert boxes == dict.fromkeys(range(3), ((0, 3), (0, 4)))
        assert replicas == ((0,), (1,), (2,)) and replica_of == {0: 0, 1: 1, 2: 2}

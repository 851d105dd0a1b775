"""Which process group connects a set of ranks: that all of them take the same one, and what a new one is like."""

from __future__ import annotations

import datetime
import inspect
import threading
import time
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import muon_before_a_step, package, part, run_ranks, run_threads
from tests.test_bucket_updates import cut


def two_meshes(rank, world):
    """A dense mesh and one of the experts with an axis over the same ranks, as two calls make them: the largest
    difference from one process.
    """
    from torch.distributed.tensor import Shard, init_device_mesh

    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    sub = dense["tp"]
    generator = torch.Generator().manual_seed(0)
    fulls = [torch.randn(shape, generator=generator) for shape in ((8, 6), (4, 8, 6))]
    many = [nn.Parameter(cut(fulls[0], sub, [Shard(0)])), nn.Parameter(cut(fulls[1], sparse, [Shard(1), Shard(0)]))]
    one = [nn.Parameter(full) for full in fulls]
    for params in (one, many):
        for p in params:
            p.grad = p.detach().clone()
        package().Muon(params, lr=0.1).step()
    return max((whole - p.full_tensor()).abs().max().item() for whole, p in zip(one, many))


@pytest.mark.parametrize("shift", [0, 1])
def test_ranks_choose_alike_among_groups_of_the_same_ranks(shift, optimizer, monkeypatch):
    """A `shift` has the odd ranks come upon the groups of the meshes in another order."""
    found = part("communication.process_groups")._meshes_groups
    monkeypatch.setattr(part("communication.process_groups"), "_meshes_groups", lambda params: sorted(
        found(params), key=attrgetter("group_name"), reverse=bool(shift * dist.get_rank() % 2)))
    assert run_threads(4, two_meshes, timeout=20) == [0.0] * 4


def of_the_users(rank, world, kind):
    """Which group carries the steps with a process_group of all ranks, whether it has the same backends, and its
    timeout in seconds.
    """
    mine = dist.new_group(backend="cpu:gloo", timeout=datetime.timedelta(seconds=47))
    options = {"own": {"overlap_forward": True}, "unreduced": {"grads_are_reduced": False}}.get(kind, {})
    params = [nn.Parameter(torch.ones(shape)) for shape in ((8, 6), (6, 8))]
    optimizer = package().Muon(params, process_group=mine, **options)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    used = optimizer._preparation.process_groups.get_or_create((0, 1))
    alike = dist.get_backend_config(used) == dist.get_backend_config(mine)
    return (
        used is mine,
        used is dist.group.WORLD,
        alike,
        part("communication.process_groups").timeout_of(used).total_seconds(),
    )


@pytest.mark.parametrize("kind", ["", "unreduced", "own"])
def test_a_process_group_of_all_ranks_is_not_replaced_by_the_default_one(kind, optimizer):
    """It may have another backend, or another timeout; a group that is made beside it gets the same."""
    assert run_ranks(2, of_the_users, kind) == [(kind != "own", False, True, 47.0)] * 2


def bound(rank, world):
    """What torch would split for a group of two of three ranks: (the device while it is made, after it)."""
    make, seen, groups = dist.new_group, [], part("communication.process_groups").ProcessGroups()
    groups.find_existing([], None)
    dist.group.WORLD.bound_device_id = torch.device("cuda:0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", lambda *args, **options: (
            seen.append(dist.group.WORLD.bound_device_id), make(*args, **options))[1])
        if rank < 2:
            groups.get_or_create((0, 1))
    after, dist.group.WORLD.bound_device_id = dist.group.WORLD.bound_device_id, None
    return seen, str(after)


def test_a_new_group_is_not_split_from_a_default_one_that_is_bound_to_a_device(optimizer):
    """init_process_group("nccl", device_id=...): all ranks would have to take part in the split; only members do."""
    assert run_ranks(3, bound) == [([None], "cuda:0"), ([None], "cuda:0"), ([], "cuda:0")]


def devices_of_new_groups(rank, world, kind):
    """What `new_group` gets to bind a group, if groups of the default one's backend have devices of their own."""
    make, seen, groups = dist.new_group, [], part("communication.process_groups").ProcessGroups()
    groups.find_existing([], None)
    dist.group.WORLD.bound_device_id = torch.device("cuda:1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "ProcessGroupNCCL2", getattr(dist, kind), raising=False)
        patch.setattr(dist, "new_group", lambda *args, device_id=None, **options: (
            seen.append(str(device_id)), make(*args, **options))[1])
        if rank < 2:
            groups.get_or_create((0, 1))
    dist.group.WORLD.bound_device_id = None
    return seen


@pytest.mark.parametrize("kind, device", [("ProcessGroupGloo", "cuda:1"), ("PrefixStore", "None")])
def test_a_new_group_of_a_bound_backend_has_the_default_ones_device(kind, device, optimizer):
    """NCCL of torch 2.15 would take a device by LOCAL_RANK; other backends take that of the tensors. Here gloo's class
    stands for NCCL's, or a class that is no group.
    """
    assert run_ranks(3, devices_of_new_groups, kind) == [[device], [device], []]


def test_a_patient_group_is_known_by_its_ranks_in_any_order(optimizer, monkeypatch):
    """A mesh may list its ranks in another order than a plan does."""
    process_groups, patient = part("communication.process_groups"), SimpleNamespace(group_name="of a mesh")
    answers = {"_meshes_groups": [patient], "_default_and_given": [], "_is_slow": True, "_ranks_of": (1, 0)}
    for name, answer in answers.items():
        monkeypatch.setattr(process_groups, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(process_groups, "timeout_of", lambda group: group)  # of the mesh, or the default one's
    groups = process_groups.ProcessGroups()
    groups.find_existing([], None)
    assert groups.find_any_order((0, 1)) is patient
    assert groups._timeout((0, 1)) is groups._timeout((1, 0)) is dist.group.WORLD is not patient


def unsorted(rank, world, options):
    """The largest difference from one process of matrices and AdamW's parameters, and the timeouts of all groups."""
    group = dist.new_group([2, 0, 1], sort_ranks=False, timeout=datetime.timedelta(seconds=47))
    generator = torch.Generator().manual_seed(0)
    fulls = [torch.randn(shape, generator=generator) for shape in ((7, 5), (5, 7), (3, 4, 5), (7,), (5, 3))]
    runs = [[nn.Parameter(full.clone()) for full in fulls] for _ in "12"]
    one, many = (package().NorMuon([{"params": params[:3]}, {"params": params[3:], "use_muon": False}], lr=0.1,
                                   wire_dtype=torch.float32, **more)
                 for params, more in zip(runs, ({}, {"process_group": group, **options})))
    for number in range(3):
        for p, q, full in zip(*runs, fulls):
            p.grad, q.grad = full * number, full * number
        one.step()
        many.step()
        if number == 1:
            many.load_state_dict(many.state_dict())
    groups = many._preparation.process_groups
    timeouts = {
        part("communication.process_groups").timeout_of(groups.get_or_create(ranks)).total_seconds()
        for ranks in groups.used
    }
    return max((p - q).abs().max().item() for p, q in zip(*runs)), timeouts


@pytest.mark.parametrize("options", [{}, {"shard_state": True}, {"grads_are_reduced": False},
                                     {"grads_are_reduced": False, "overlap_backward": True},
                                     {"shard_state": True, "overlap_forward": True}], ids=str)
def test_a_process_group_of_ranks_in_another_order(options, optimizer):
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        pytest.skip("this torch sorts the ranks of every group")
    for difference, timeouts in run_ranks(3, unsorted, options):
        assert difference < 1e-5 and timeouts == {47.0}


def groups_now():
    return len(dist.distributed_c10d._world.pg_map)


def cut_up(mesh, way):
    from torch.distributed.tensor import Shard

    return [nn.Parameter(cut(torch.ones(shape), mesh, way or [Shard(0)] * mesh.ndim)) for shape in ((8, 6), (6, 8))]


def dropped(rank, world, options, kept):
    """How many groups there are after each of several optimizers, which odd ranks let go one later than the others."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    cube = init_device_mesh("cpu", (2, 2, world // 4))
    params, last, counts = cut_up(cube, [Shard(0), Shard(1), Replicate()]), [], []
    params.append(nn.Parameter(cut(torch.ones(2, 8, 6), cube, [Shard(0), Shard(1), Shard(1)])))  # four ranks each
    for _ in range(6):
        optimizer = package().Muon(params, **options)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        last = [*last, optimizer][-(kept + rank % 2):]
        del optimizer
        counts.append(groups_now())
    return counts


@pytest.mark.parametrize("options", [{}, {"overlap_forward": True}, {"overlap_backward": True}], ids=str)
def test_optimizers_that_go_leave_their_process_groups_to_others(options, optimizer):
    """Some ranks let them go later."""
    for counts in run_threads(8, dropped, options, 1, timeout=60):
        assert counts[2:] == counts[2:3] * 4, counts


def scaled(rank, world):
    """How many groups there are after each of several optimizers that a GradScaler tells of Inf."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh, counts = init_device_mesh("cpu", (world,)), []
    experts = nn.Parameter(cut(torch.ones(4, 8, 6), mesh, [Shard(0)]))
    for _ in range(4):
        optimizer = package().Muon([experts], overlap_forward=True)
        experts.grad = torch.ones_like(experts)
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
        optimizer.step()
        del optimizer
        counts.append(groups_now())
    return counts


def test_what_a_gradscaler_found_needs_no_new_process_groups(optimizer):
    """Experts that are whole at their ranks share nothing else, so these never agreed on a group to use again."""
    for counts in run_threads(2, scaled, timeout=30):
        assert counts == counts[:1] * 4, counts


def loaded(rank, world, leave):
    """How many groups there are after each of several loads, before each of which some ranks had buckets `leave`; the
    largest difference from one process.
    """
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    many, one, counts = cut_up(mesh, [Shard(0)]), [nn.Parameter(torch.ones(s)) for s in ((8, 6), (6, 8))], []
    optimizers = [package().Muon(params, lr=0.1, overlap_backward=params is many) for params in (one, many)]
    for number in range(5):
        for params, optimizer in zip((one, many), optimizers):
            for p in params:
                p.grad = torch.full_like(p, 1.0 + number)
            optimizer.step()
        ours, saved = optimizers[1], optimizers[1].state_dict()
        if rank in leave:
            with ours.last_backward():
                for p in many:
                    for hook in p._post_accumulate_grad_hooks.values():
                        hook(p)
        ours.load_state_dict(saved)
        counts.append(groups_now())
    return counts, max((p.full_tensor() - q).abs().max().item() for p, q in zip(many, one))


def test_a_load_before_which_nothing_had_left_keeps_the_process_groups(optimizer):
    for counts, difference in run_ranks(2, loaded, []):
        assert counts == counts[:1] * 5 and difference < 1e-6


def test_groups_over_which_something_had_left_are_not_used_again(optimizer):
    for counts, difference in run_ranks(2, loaded, [0, 1]):
        assert counts == list(range(counts[0], counts[0] + 5)) and difference < 1e-6


def two_threads(rank, world):
    """Two optimizers with a group and a thread each. On even ranks the first one is ready to make its own group before
    the other, on odd ranks after it. Returns what each raised, or the largest difference of its weights from one
    process.
    """
    groups = [dist.new_group(list(range(world))) for _ in "12"]
    fulls = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    before, here, came = part("communication.process_groups").ProcessGroups.reuse_idle, threading.local(), {}

    def take_idle(*args):
        before(*args)
        time.sleep(here.number != rank % 2)

    def train(number):
        here.number = number
        try:
            weight, one = (nn.Parameter(torch.zeros(6, 4)) for _ in "12")
            many = package().Muon([weight], lr=0.1, process_group=groups[number], grads_are_reduced=False,
                                  overlap_backward=True, wire_dtype=torch.float32)
            alone = package().Muon([one], lr=0.1, wire_dtype=torch.float32)
            for _ in range(3):
                weight.grad = None
                with many.last_backward():
                    (weight * fulls[number]).sum().backward()
                one.grad = fulls[number].clone()
                many.step()
                alone.step()
            came[number] = (weight - one).abs().max().item()
        except Exception as error:
            came[number] = repr(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part("communication.process_groups").ProcessGroups, "reuse_idle", take_idle)
        threads = [threading.Thread(target=train, args=(number,), daemon=True) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
    return [came.get(number, "still waiting") for number in (0, 1)]


def test_two_threads_that_make_groups_in_an_order_of_their_own(optimizer):
    for differences in run_ranks(2, two_threads):
        assert all(isinstance(difference, float) and difference < 1e-5 for difference in differences), differences


def one_axis(rank, world, seconds):
    """The timeouts of the groups of a mesh's axis and of what the optimizer uses there, whether these are one group,
    and how many groups a second optimizer makes.
    """
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    if seconds is not None:
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), mesh.get_group())
    counts = []
    for _ in "12":
        params = [nn.Parameter(cut(torch.ones(8, 6), mesh, [Shard(0)]))]
        stepper = muon_before_a_step(params)
        stepper.step()
        counts.append(groups_now())
    used = stepper._preparation.process_groups.get_or_create(tuple(dist.get_process_group_ranks(mesh.get_group())))
    timeout = part("communication.process_groups").timeout_of
    return timeout(mesh.get_group()).total_seconds(), timeout(used).total_seconds(), used is mesh.get_group(), \
        counts[1] - counts[0]


@pytest.mark.parametrize(("seconds", "expected"), [(None, (1800.0, 60.0, False, 0)), (20, (20.0, 20.0, True, 0))])
def test_a_peer_on_one_axis_of_a_mesh_is_waited_for_no_longer_than_on_the_default_group(seconds, expected, optimizer):
    """torch gives 30 minutes to the groups of a mesh, whatever init_process_group was told."""
    assert run_ranks(4, one_axis, seconds) == [expected] * 4

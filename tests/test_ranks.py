"""The rank runner itself: results, failures, hangs, uneven exchanges, and a pool that survives them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import package, run_ranks, run_threads

RUNNERS = {"processes": run_ranks, "threads": run_threads}


@pytest.fixture(params=RUNNERS)
def run(request):
    return RUNNERS[request.param]


def exchange(rank, world, asynchronous, device="cpu"):
    """Rank r sends (r + d + 1) copies of r to rank d."""
    sent, taken = [rank + d + 1 for d in range(world)], [s + rank + 1 for s in range(world)]
    out = torch.full((sum(taken),), float("nan"), device=device)
    given = torch.full((sum(sent),), float(rank), device=device)
    work = dist.all_to_all_single(out, given, taken, sent, async_op=asynchronous)
    if asynchronous:
        work.wait()
    return out.tolist() == [float(s) for s in range(world) for _ in range(taken[s])]


def meshes(rank, world, shape, groups_before=0):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    for _ in range(groups_before):
        dist.new_group([0])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
    whole = torch.arange(world * 3.0)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(0)], src_data_rank=None)
    sums = torch.ones(())
    dist.all_reduce(sums, group=mesh.get_group("a"))
    return torch.equal((sharded + 0).full_tensor(), whole) and sums.item() == shape[0]


def fail(rank, world, culprit):
    if rank == culprit:
        time.sleep(0.2)
        raise KeyError("the culprit")
    dist.barrier()


def hang(rank, world):
    if rank == 1:
        time.sleep(60)


def die(rank, world):
    if rank == 1:
        os._exit(3)
    dist.barrier()


def identity(rank, world, *args):
    return rank, world, dist.get_rank(), dist.get_world_size(), args


def build(rank, world):
    return package().__name__, torch.get_num_threads()


def test_results_come_by_rank(run):
    assert run(3, identity, "x", 2) == [(rank, 3, rank, 3, ("x", 2)) for rank in range(3)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_uneven_exchange(run, asynchronous):
    assert all(run(3, exchange, asynchronous))


@pytest.mark.gpus(2)
def test_uneven_exchange_between_gpus():
    for _ in range(2):
        assert all(run_ranks(2, exchange, True, "cuda", backend="nccl"))


def test_every_call_has_its_own_groups(run):
    for shape, groups_before in [((2, 2), 0), ((4, 1), 0), ((2, 2), 2)]:
        assert all(run(4, meshes, shape, groups_before))


def meshes_left(rank, world):
    from torch.distributed.device_mesh import DeviceMesh

    return sum(isinstance(thing, DeviceMesh) for thing in gc.get_objects())


def test_a_call_leaves_no_groups_behind():
    """Threads of groups that outlive their call spin: after a hundred calls they would have most of the machine."""
    before = run_ranks(3, meshes_left)
    assert all(run_ranks(3, meshes, (3, 1)))  # no other test's mesh, which a cache may have
    assert run_ranks(3, meshes_left) == before


def test_the_first_failure_is_reported(run):
    with pytest.raises(RuntimeError, match="rank 2 of 4 failed first(.|\n)*the culprit"):
        run(4, fail, 2)
    assert all(run(4, exchange, False))


def test_a_dead_rank_is_reported():
    with pytest.raises(RuntimeError, match="the process died|Connection"):
        run_ranks(2, die)
    assert all(run_ranks(2, exchange, False))


def test_a_hanging_rank_is_killed():
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2"):
        run_ranks(2, hang, timeout=1.0)
    assert all(run_ranks(2, exchange, False))


def test_ranks_load_the_package_on_one_thread(optimizer):
    assert run_ranks(2, build) == [(optimizer.__name__, 1)] * 2


def test_64_threads():
    assert all(run_threads(64, exchange, True))
    assert all(run_threads(64, meshes, (8, 8)))
    assert threading.active_count() < 64


def own_environment(rank, world):
    return {name: value for name, value in os.environ.items() if name.startswith("OPTIMIZER_")}


def test_what_a_test_sets_stays_in_its_process():
    """Whichever test starts the fork server: its environment would be that of all later ranks."""
    program = ("import os; from tests import ranks, test_ranks; os.environ['OPTIMIZER_KERNELS'] = 'triton'; "
               "ranks.PRELOADED[:] = ['torch']; print(ranks.run_ranks(1, test_ranks.own_environment))")
    environment = os.environ | {"OPTIMIZER_GRAPHS": "off"}
    environment.pop("OPTIMIZER_KERNELS", None)
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent.parent, env=environment,
                          capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[{'OPTIMIZER_GRAPHS': 'off'}]", done.stderr

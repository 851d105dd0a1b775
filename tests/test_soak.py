"""1,200 steps with everything that happens in a long run: nothing grows, and what is loaded runs nothing."""

from __future__ import annotations

import gc
import io
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import package, run_ranks
from tests.test_bucket_updates import cut

STEPS, MEASURED = 1200, (399, 1199)  # the steps after which things are counted; 400 is the period of what is frozen


def handles():
    """Open files and sockets of this process; 0 where the system does not say."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def resident_mib():
    if not os.path.exists("/proc/self/statm"):
        return 0.0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def counts():
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    return {"tensors": len(tensors), "objects": len(gc.get_objects()), "handles": handles(),
            "MiB": resident_mib(), "groups": len(dist.distributed_c10d._world.pg_map)}


def long_run(rank, world, mode):
    """What there is early and in the end, and how many matrices were skipped."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh, generator = init_device_mesh("cpu", (world,)), torch.Generator().manual_seed(0)

    def fresh(*shape):
        full = torch.randn(shape, generator=generator)
        return nn.Parameter(cut(full, mesh, [Shard(0)]) if mode == "fsdp" else full)

    options = {"fsdp": {}, "unreduced": {"process_group": dist.group.WORLD, "grads_are_reduced": False}}[mode]
    params = [fresh(*s) for s in [(6, 4), (4, 6), (6, 4), (3, 5), (5,), (4, 3)]]
    parts = [{"params": params[:2]}, {"params": params[4:], "use_muon": False}]
    optimizer = package().NorMuon([dict(part) for part in parts], lr=0.1, nonfinite="skip", **options)
    schedule, seen, rates = torch.optim.lr_scheduler.LambdaLR(optimizer, wave), [], set()
    for step in range(STEPS):
        if step == 150:
            add(optimizer, schedule, {"params": params[2:4], "momentum": 0.9})
        if step % 100 == 50:  # a group that comes, and below goes
            add(optimizer, schedule, {"params": [fresh(4, 6)], "use_muon": step % 200 == 50})
        if step % 100 == 80:
            drop(optimizer, schedule)
        if step % 100 == 20:  # the same on every rank
            params[step // 100 % 2].requires_grad_(step // 200 % 2 == 0)
        if step % 250 == 60:
            save_and_load(optimizer)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            has = torch.rand((), generator=generator) > 0.1 or step in MEASURED
            value = float(torch.randn((), generator=generator))
            p.grad = torch.full_like(p, value) if p.requires_grad and has else None
        if step % 97 == 5 and params[0].grad is not None and rank == 0:
            params[0].grad = params[0].grad * float("nan")
        optimizer.param_groups[0]["weight_decay"] = float(torch.rand((), generator=generator))
        optimizer.step()
        schedule.step()
        rates.add(optimizer.param_groups[0]["lr"])
        if step in MEASURED:
            seen.append(counts())
    assert all((p.to_local() if mode == "fsdp" else p).isfinite().all() for p in params)
    return seen, optimizer.skipped.item(), len(rates)


def wave(step):
    return 0.55 + 0.45 * math.cos(step)


def add(optimizer, schedule, group):
    optimizer.add_param_group(group)
    schedule.base_lrs.append(0.1)
    schedule.lr_lambdas.append(wave)


def drop(optimizer, schedule):
    """The last group, as one does who removes an adapter."""
    for p in optimizer.param_groups.pop()["params"]:
        del optimizer.state[p]
    del schedule.base_lrs[-1], schedule.lr_lambdas[-1]


def save_and_load(optimizer):
    """All of it through a file in memory; DTensors too."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))


@pytest.mark.parametrize("mode", ["fsdp", "unreduced"])
def test_a_long_run_leaves_nothing_behind(mode, optimizer):
    """Between the two counts 8 groups come and go, and 3 checkpoints; at both, the same parameters are there."""
    for (early, late), skipped, rates in run_ranks(2, long_run, mode, timeout=180):
        assert skipped > 3 and rates > STEPS - 10
        assert late["tensors"] <= early["tensors"] + 2 and late["groups"] == early["groups"] == 1
        assert late["handles"] <= early["handles"] and late["objects"] <= early["objects"] + 100
        assert late["MiB"] <= early["MiB"] + 4  # an allocator's slack; one float per parameter and step is more


# loading -----------------------------------------------------------------------------------------------------------

WATCHED = """
import sys
seen = []
def hook(event, arguments):
    if event in ("open", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec",
                 "urllib.Request", "os.remove", "os.rename", "os.mkdir", "shutil.rmtree", "ctypes.dlopen"):
        seen.append((event, arguments[0] if event == "open" else str(arguments)))
import torch, torch.distributed.tensor, importlib.util
folder = sys.argv[1]
sys.addaudithook(hook)
spec = importlib.util.spec_from_file_location("optimizer_alone", folder + "/__init__.py",
                                              submodule_search_locations=[folder])
module = importlib.util.module_from_spec(spec)
sys.modules["optimizer_alone"] = module
spec.loader.exec_module(module)
loaded = len(seen)
p = torch.nn.Parameter(torch.ones(4, 6))
opt = module.NorMuon([p])
p.grad = torch.ones(4, 6)
opt.step()
own = [thing for event, thing in seen if event == "open" and str(thing).startswith(folder)]
other = [(e, t) for e, t in seen[:loaded] if not (e == "open" and str(t).startswith(folder))]
later = [(e, t) for e, t in seen[loaded:] if e.startswith(("socket", "urllib", "subprocess", "os.system", "os.exec"))]
print(len(own) > 5, other, later)
"""


def test_loading_runs_nothing_and_opens_only_its_own_files(optimizer, tmp_path):
    """Python's audit events while the package is loaded; at its first step, torch opens files of its own."""
    folder = os.path.dirname(optimizer.__file__)
    done = subprocess.run([sys.executable, "-B", "-W", "ignore", "-c", WATCHED, folder], capture_output=True, text=True,
                          check=False, timeout=120)
    assert done.stdout.strip().splitlines()[-1:] == ["True [] []"], done.stdout + done.stderr

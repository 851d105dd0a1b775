"""Many steps on a model's matrices: does memory or the time of a step grow, and are the replicas alike in the end?

    make build && python benchmarks/soak.py --ranks 8
    ... --ranks 4 --mode ddp --run graph
    ... --mode hsdp hsdp4 ddp reduce fsdp            fsdp has one copy of everything, with nothing to compare

More ranks than GPUs share them, over gloo, which no graph can hold: then only --run eager.

Gradients, learning rate and weight decay are others at every step; at some, one gradient has a NaN (which
nonfinite="skip" keeps out) or is missing. After each tenth of the steps a line says the median time of its steps, and
memory, open files and process groups of rank 0. The program fails if weights or state of two copies differ in a bit,
or if any rank has more memory in use, more files or groups after the last step than after the third tenth.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from models import MODELS, shapes_of  # noqa: E402
from step import (  # noqa: E402
    MESHES,
    device_name,
    fits,
    leave,
    meet,
    meeting,
    parameters,
    pick_device,
    start,
    synchronize,
)

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={Path(__file__).resolve().parents[1]}")

SLACK_MIB = {"cuda": 1, "cpu": 32}  # of a CPU, the whole process is counted, whose allocator keeps what is freed
BROKEN, MISSING = 37, 41  # every so many steps


def main() -> None:
    options, store = arguments(), meeting()
    start(worker, (options, store.port), options.ranks)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2, help="processes")
    parser.add_argument("--model", default="qwen3_1p7b", choices=MODELS, help="whose matrices, and a vector per layer")
    parser.add_argument("--mode", nargs="+", default=["hsdp"], choices=["fsdp", "hsdp", "hsdp4", "ddp", "reduce"])
    parser.add_argument("--optimizer", default="NorMuon", choices=["Muon", "NorMuon"])
    parser.add_argument("--run", default="eager", choices=["eager", "graph"], help="graph: capturable=True")
    parser.add_argument("--layers", type=int, default=None, help="in place of the model's own number")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    if options.steps < 20:
        parser.error(f"--steps {options.steps} is too few: memory is compared from tenth to tenth, of 2 steps or more")
    if wrong := [mode for mode in options.mode if not fits(mode, options.ranks)]:
        parser.error(f"--mode {' '.join(wrong)} needs another number of ranks than {options.ranks}")
    if options.run == "graph" and 0 < torch.cuda.device_count() < options.ranks:
        parser.error(f"--run graph needs a GPU for each of {options.ranks} ranks: no graph holds what gloo does")
    return options


def worker(rank: int, options, port: int) -> None:
    gpus = torch.cuda.device_count()
    device = pick_device(rank % max(gpus, 1))
    if gpus:
        torch.cuda.set_device(device)
    where = {"device_id": device} if options.ranks <= gpus else {}
    dist.init_process_group("nccl" if where else "gloo", store=meet(port), rank=rank, world_size=options.ranks, **where)
    try:
        for mode in options.mode:
            soak(Run(options, mode, rank, device), options.steps)
    except SystemExit:  # all ranks raise it alike
        leave()
        raise
    leave()


class Run:
    """One optimizer, its parameters and what it is given."""

    def __init__(self, options, mode, rank, device):
        from kernels import get_kernel

        package, ranks = get_kernel("org/optimizer", version=1), options.ranks
        self.mode, self.rank, self.device = mode, rank, device
        shapes = shapes_of(options.model, options.layers)
        matrices = parameters(shapes, mode, ranks, device)
        vectors = parameters([(shapes[0][-1],)] * max(count for count, _ in MODELS[options.model]), mode, ranks, device)
        self.params = matrices + vectors
        self.gradients = [p.grad for p in self.params]
        mesh = MESHES[mode](ranks)
        self.copies = ranks if mesh is None else mesh[0][0] if mesh[1][0] == "R" else 1
        shared = {"process_group": dist.group.WORLD, "grads_are_reduced": mode != "reduce"} if mesh is None else {}
        self.opt = getattr(package, options.optimizer)(
            [{"params": matrices}, {"params": vectors, "use_muon": False}], lr=1e-3, adjust_lr_fn="match_rms_adamw",
            nonfinite="skip", capturable=options.run == "graph", **shared)

    def give(self, number, all_of_them) -> None:
        """This step's gradients and rates: alike on ranks with one shard, own ones of each rank if they are unreduced.

        `all_of_them`: none is missing.
        """
        shard = self.rank if self.mode == "reduce" else self.rank % (dist.get_world_size() // self.copies)
        generator = torch.Generator(self.device).manual_seed(number * dist.get_world_size() + shard)
        for p, gradient in zip(self.params, self.gradients):
            local(gradient).normal_(0, 0.01, generator=generator)
            p.grad = gradient
        if number % BROKEN == 5:
            local(self.gradients[number % len(self.params)]).fill_(float("nan"))
        if number % MISSING == 7 and not all_of_them:
            self.params[number % len(self.params)].grad = None
        for group in self.opt.param_groups:
            group.update(lr=1e-3 / (1 + number % 100), weight_decay=0.1 * (number % 2) if group["use_muon"] else 0.1)

    def step(self):
        """Take one; return a function that says how many ms it took, once the device is done."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            self.opt.step()
            took_ms = 1e3 * (time.perf_counter() - start)
            return lambda: took_ms
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.opt.step()
        end.record()
        return lambda: begin.elapsed_time(end)

    def differing(self) -> int:
        """How many weights and states are not those of the first copy, bit for bit. Unreduced, state has one copy."""
        tensors = list(self.params)
        if self.mode != "reduce":
            tensors += [t for p in self.params for t in self.opt.state[p].values()]
        group = dist.device_mesh.init_device_mesh(
            self.device.type, (self.copies, dist.get_world_size() // self.copies)).get_group(0)
        count = 0
        for mine in map(local, tensors):
            first = mine.detach().clone().to(self.device)
            dist.broadcast(first, group=group, group_src=0)
            count += not torch.equal(first, mine.to(self.device))
        return count


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def soak(run, steps) -> None:
    """Raises SystemExit for growth or differences, on all ranks alike."""
    tenth, had, medians = steps // 10, [], []
    for part in range(10):
        times = []
        for number in range(part * tenth, (part + 1) * tenth):
            run.give(number, all_of_them=number + 1 == (part + 1) * tenth)  # what stands for one would be counted
            times.append(run.step())
        synchronize(run.device)
        medians.append(statistics.median(ms() for ms in times))
        had.append(holdings(run.device))
        if run.rank == 0:
            mib, files, groups = had[-1]
            print(f"{run.mode} step {(part + 1) * tenth}: {medians[-1]:.3f} ms, {mib:.1f} MiB in use, "
                  f"{reserved_mib(run.device):.1f} MiB reserved, {files:.0f} open files, {groups:.0f} process groups",
                  flush=True)
    grown = torch.tensor([now - then for now, then in zip(had[-1], had[2])], device=run.device)
    figures = torch.cat([grown, grown.new_tensor([run.differing(), not run.opt.skipped.item()])])
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    mib, files, groups, different, unskipped = figures.tolist()
    if run.rank == 0:
        print(f"{run.mode}, {steps} steps of {dist.get_world_size()} ranks on {machine(run.device)}: {mib:+.1f} MiB, "
              f"{files:+.0f} files, {groups:+.0f} groups since step {3 * tenth}; {run.copies} copies, {different:.0f} "
              f"tensors differ; last tenth's median step {medians[-1]:.3f} ms, third's {medians[2]:.3f} ms", flush=True)
    if mib > SLACK_MIB[run.device.type] or files > 0 or groups > 0 or different or unskipped:
        raise SystemExit(f"{run.mode}: something grew, copies differ, or no broken gradient was skipped")


def machine(device) -> str:
    count = min(dist.get_world_size(), max(torch.cuda.device_count(), 1))
    return f"{count} x {device_name(device)}"


def reserved_mib(device) -> float:
    return torch.cuda.memory_reserved() / 2**20 if device.type == "cuda" else 0.0


def holdings(device) -> list[float]:
    """[MiB of memory in use, open files, process groups] of this process."""
    if device.type == "cuda":
        nbytes = torch.cuda.memory_allocated()
    else:
        statm = Path("/proc/self/statm")
        nbytes = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return [nbytes / 2**20, float(files), float(len(dist.distributed_c10d._world.pg_map))]


if __name__ == "__main__":
    main()

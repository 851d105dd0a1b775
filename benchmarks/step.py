"""Time of the whole optimizer step on several GPUs, by model, mode and optimizer; one CSV row for each measurement.

    LOCAL_KERNELS=org/optimizer=build python benchmarks/step.py --ranks 8 --models gpt2_124m llama3_8b --out step.csv

Weights are 0.02 x normal and gradients 0.01 x normal, fp32. After warm-up, every step is timed between CUDA events,
with a synchronize and a barrier before it; a figure is the largest over the ranks, then the median over the steps.
"""

from __future__ import annotations

import argparse
import csv
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from models import MODELS, floor_ms, shapes_of  # noqa: E402

COLUMNS = ("commit gpu ranks mode model implementation optimizer run median_ms p20_ms p80_ms host_ms first_step_s "
           "extra_mib floor_ms torch triton layers").split()


def main() -> None:
    options = arguments()
    rows = mp.get_context("spawn").SimpleQueue()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, (options, port, rows), nprocs=options.ranks)
    while not rows.empty():
        append(options.out, rows.get())


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="GPUs, one process each")
    parser.add_argument("--models", nargs="+", default=["gpt2_124m"], choices=MODELS, help="which models' matrices")
    parser.add_argument("--modes", nargs="+", default=["fsdp"], choices=MESHES, help="how the parameters are laid out")
    parser.add_argument("--optimizers", nargs="+", default=["muon"], choices=["muon", "normuon"])
    parser.add_argument("--runs", nargs="+", default=["eager"], choices=["eager", "graph"],
                        help="graph: capturable=True")
    parser.add_argument("--layers", type=int, default=None, help="layers in place of the model's own number")
    parser.add_argument("--steps", type=int, default=12, help="timed steps")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them")
    parser.add_argument("--commit", default=None, help="what to write as the commit where there is no git")
    parser.add_argument("--out", default="step.csv", help="CSV to append to")
    return parser.parse_args()


MESHES = {  # mode -> (mesh shape for W ranks, placements as letters)
    "fsdp": lambda W: ((W,), "0"),
    "hsdp": lambda W: ((2, W // 2), "R0"),
    "hsdp4": lambda W: ((4, W // 4), "R0"),
    "tp_fsdp": lambda W: ((W // 2, 2), "01"),
    "ep": lambda W: ((W,), "0"),
    **dict.fromkeys(("ddp", "reduce", "single"), lambda W: None),
}


def worker(rank: int, options, port: int, rows) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=options.ranks,
                            device_id=torch.device("cuda", rank))
    for model in options.models:
        for mode in options.modes:
            for optimizer in options.optimizers:
                for run in options.runs:
                    row = measure(rank, options, model, mode, optimizer, run)
                    if rank == 0:
                        print({k: row[k] for k in COLUMNS[3:15]}, flush=True)
                        rows.put(row)
    dist.destroy_process_group()


def measure(rank, options, model, mode, optimizer, run) -> dict:
    from kernels import get_kernel

    package = get_kernel("org/optimizer", version=1)
    shapes = shapes_of(model, options.layers)
    params = parameters(shapes, mode, options.ranks)
    shared = {"process_group": dist.group.WORLD} if mode in ("ddp", "reduce") else {}
    opt = {"muon": package.Muon, "normuon": package.NorMuon}[optimizer](
        params, lr=1e-3, adjust_lr_fn="match_rms_adamw", grads_are_reduced=mode != "reduce",
        capturable=run == "graph", **shared)
    state = create_state(opt, params, mode)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    opt.step()
    torch.cuda.synchronize()
    first_s = time.perf_counter() - start
    for _ in range(options.warmup):
        opt.step()
    times, hosts = zip(*(timed(opt.step) for _ in range(options.steps)))
    extra = torch.cuda.max_memory_allocated() - before
    figures = torch.tensor([*times, *hosts, first_s, extra], dtype=torch.float64, device="cuda")
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    times, hosts = figures[:len(times)].tolist(), figures[len(times):-2].tolist()
    quantiles = statistics.quantiles(times, n=5, method="inclusive")
    del opt, params, state
    torch.cuda.empty_cache()
    return {
        "commit": options.commit or commit(), "gpu": torch.cuda.get_device_name(), "ranks": options.ranks, "mode": mode,
        "model": model, "implementation": "ours", "optimizer": optimizer, "run": run,
        "median_ms": round(statistics.median(times), 4), "p20_ms": round(quantiles[0], 4),
        "p80_ms": round(quantiles[3], 4),
        "host_ms": round(statistics.median(hosts), 4), "first_step_s": round(figures[-2].item(), 3),
        "extra_mib": round(figures[-1].item() / 2**20, 1),
        "floor_ms": round(floor_ms(shapes, options.ranks, mode in ("ddp", "reduce")), 3),
        "torch": torch.__version__, "triton": triton_version(), "layers": options.layers or ""}


def create_state(opt, params, mode):
    """Momentum that is there before memory is measured, as in a run that goes on (targets count what the step adds)."""
    if mode == "reduce":
        return None
    for p in params:
        opt.state[p]["momentum_buffer"] = torch.zeros_like(p.detach(), dtype=torch.float32)


def parameters(shapes, mode, ranks) -> list:
    """Parameters with gradients, as DTensors on the mode's mesh or plain and equal on all ranks."""
    layout = MESHES[mode](ranks)
    if layout is None:
        generator = torch.Generator("cuda").manual_seed(0)
        params = [nn.Parameter(0.02 * torch.randn(s, device="cuda", generator=generator)) for s in shapes]
        for p in params:
            p.grad = 0.01 * torch.randn(p.shape, device="cuda", generator=generator)
        return params
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh, randn

    mesh = init_device_mesh("cuda", layout[0])
    placements = [Replicate() if letter == "R" else Shard(int(letter)) for letter in layout[1]]
    params = []
    for shape in shapes:
        param = nn.Parameter(randn(*shape, device_mesh=mesh, placements=placements).mul_(0.02))
        param.grad = randn(*shape, device_mesh=mesh, placements=placements).mul_(0.01)
        params.append(param)
    return params


def timed(step) -> tuple[float, float]:
    """(GPU ms, host ms) of one call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    begin.record()
    step()
    end.record()
    host_ms = 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    return begin.elapsed_time(end), host_ms


def append(path, row) -> None:
    new = not Path(path).exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(row)


def commit() -> str:
    here = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    return found.stdout.strip() or os.environ.get("COMMIT", "unknown")


def triton_version() -> str:
    import triton

    return triton.__version__


if __name__ == "__main__":
    main()

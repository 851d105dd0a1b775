"""Collectives that could carry copies and unreduced gradients, against each other; one CSV row for each measurement.

    python benchmarks/wire.py --ranks 8 --out wire.csv

Every rank has one part of so many MiB in bf16 for each rank. Of updates that all ranks get: all_gather; all_to_all
from one place, which is what the optimizer does; all_to_all_single, which needs a copy for each rank. Of gradients to
be reduced: reduce_scatter in bf16 and in fp32; all_to_all_single and a sum in fp32, which is what the optimizer does.
Times are the largest over the ranks, then the median. Without a GPU, ranks are CPU processes with gloo, which has no
all_to_all from one place: good to try the script.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from rows import add_output, append
from step import device_name, join, leave, on_ranks, one_gpu_each

COLUMNS = "commit gpu ranks what collective mib_per_rank median_us torch".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2, help="processes, a GPU each")
    parser.add_argument("--mib", type=float, nargs="+", default=[0.25, 1, 4, 16, 64, 256], help="from rank to rank")
    parser.add_argument("--rounds", type=int, default=15)
    add_output(parser, COLUMNS, "wire.csv")
    options = parser.parse_args()
    one_gpu_each(parser, options.ranks)
    on_ranks(worker, options, options.ranks)


def worker(rank: int, ranks: int, port: int, options) -> None:
    device = join(rank, ranks, port)
    for mib in options.mib:
        for (what, name), call in collectives(int(mib * 2**20) // 2, ranks, device).items():
            us = microseconds(call, device, options.rounds)
            if rank == 0:
                row = (options.commit, device_name(device), ranks, what, name, mib, round(us, 1),
                       torch.__version__)
                print(*row[2:7], flush=True)
                append(options.out, COLUMNS, [dict(zip(COLUMNS, row))])
    leave()


def collectives(numel: int, ranks: int, device) -> dict:
    """(what travels, name) -> call, on `numel` elements from rank to rank."""
    mine, got = (torch.ones(n, dtype=torch.bfloat16, device=device) for n in (numel, numel * ranks))
    copies, gradients = (torch.ones(numel * ranks, dtype=torch.bfloat16, device=device) for _ in range(2))
    wide, low, high = gradients.float(), mine.clone(), mine.float()
    parts, places = list(got.chunk(ranks)), [mine] * ranks

    def from_copies():
        copies.view(ranks, numel).copy_(mine)
        dist.all_to_all_single(got, copies)

    def own_sum():
        dist.all_to_all_single(got, gradients)
        torch.sum(got.view(ranks, numel), 0, dtype=torch.float32, out=high)

    made = {("updates", "all_gather"): lambda: dist.all_gather_into_tensor(got, mine),
            ("updates", "all_to_all_single"): from_copies,
            ("gradients", "reduce_scatter bf16"): lambda: dist.reduce_scatter_tensor(low, gradients),
            ("gradients", "reduce_scatter fp32"): lambda: dist.reduce_scatter_tensor(high, wide),
            ("gradients", "all_to_all_single, fp32 sum"): own_sum}
    if device.type == "cuda":
        made["updates", "all_to_all"] = lambda: dist.all_to_all(parts, places)
    return made


def microseconds(call, device, rounds) -> float:
    """The median over rounds of the slowest rank's time, after four calls to warm up."""
    for _ in range(4):
        call()
    times = torch.tensor([timed(call, device) for _ in range(rounds)], device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return statistics.median(times.tolist())


def timed(call, device) -> float:
    dist.barrier()
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - begin)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


if __name__ == "__main__":
    main()

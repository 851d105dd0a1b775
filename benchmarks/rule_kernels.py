"""Kernels of a step of each rule on one GPU, by torch's profiler: launches and us of a step. A CSV row for each kernel.

    make build && python benchmarks/rule_kernels.py --rules muon normuon

The times are sums over the launches of a step, without gaps between them. Without a GPU the rows are of torch's
operations on the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
from models import MODELS, shapes_of  # noqa: E402
from rows import add_output, append  # noqa: E402
from step import parameters, synchronize, triton_version  # noqa: E402

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={HERE.parent}")

COLUMNS = "commit gpu model layers turn rule kernel launches us torch triton".split()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RULES = ("muon", "normuon", "normuon_columns", "muon_plus", "hyperball", "adamuon", "muon")


def kernels_of(package, rule: str, shapes: list[tuple[int, ...]], steps: int) -> dict[str, tuple[float, float]]:
    """{kernel: (launches, us) of a step}."""
    params = parameters(shapes, "single", 1, DEVICE)
    opt = package.Muon([{"params": params}], lr=1e-3, adjust_lr_fn="match_rms_adamw", rule=rule)
    for _ in range(5):  # graphs are captured
        opt.step()
    synchronize(DEVICE)
    is_gpu = DEVICE.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_gpu) as found:
        for _ in range(steps):
            opt.step()
        synchronize(DEVICE)
    sums = defaultdict(lambda: [0, 0.0])
    for event in found.events():
        is_range = "#" in event.name  # torch's "Optimizer.step#Muon.step" spans all kernels
        if not is_range and (not is_gpu or "CUDA" in str(event.device_type)):
            sums[event.name][0] += 1
            us = event.self_device_time_total or event.device_time_total
            sums[event.name][1] += us if is_gpu else event.self_cpu_time_total
    return {name: (count / steps, us / steps) for name, (count, us) in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt2_124m", "qwen3_1p7b"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rules", nargs="+", default=RULES)
    parser.add_argument("--steps", type=int, default=10)
    add_output(parser, COLUMNS, "rule_kernels.csv")
    options = parser.parse_args()
    from kernels import get_kernel

    package = get_kernel("org/optimizer", version=1)
    for model in options.models:
        for turn, rule in enumerate(options.rules):
            about = {"commit": options.commit, "gpu": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU",
                     "model": model, "layers": options.layers, "turn": turn, "rule": rule,
                     "torch": torch.__version__, "triton": triton_version()}
            found = kernels_of(package, rule, shapes_of(model, options.layers), options.steps)
            for kernel, (launches, us) in sorted(found.items(), key=lambda item: -item[1][1]):
                append(options.out, COLUMNS, [{**about, "kernel": kernel[:120], "launches": launches,
                                               "us": round(us, 2)}])
            print(model, rule, len(found), "kernels", flush=True)
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""Time of a step with weights split into units, and with many parameter groups, in turns with the step without.

    make build && python benchmarks/units.py --ranks 1 --models llama3_8b heads --variants whole heads stacks
    ... --ranks 2 4 --models gpt2_124m --variants one layer each --runs eager graph

Variants of the splits: "whole" orthogonalizes each weight as one matrix, "heads" each head (rows of q, k and v, columns
of o), "stacks" holds the matrices of "heads" in parameters (heads, rows, columns). Variants of the groups: "one" group,
a group for each "layer", a group for "each" parameter; their learning rates differ. All variants step in turns, on one
mesh and with equal numbers. A figure is the largest over the ranks, then the median over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from models import products_flops, shapes_of  # noqa: E402
from rows import add_output, append  # noqa: E402
from step import device_name, join, leave, on_ranks, one_gpu_each, parameters, timed, triton_version  # noqa: E402

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={Path(__file__).resolve().parents[1]}")

COLUMNS = ("commit gpu ranks model layers optimizer run variant median_ms p20_ms p80_ms host_ms ratio gflops groups "
           "buckets torch triton").split()
MODE = {False: "fsdp", True: "single"}


def layer_of(model: str) -> list[tuple[tuple[int, ...], object]]:
    """[(shape, split)] of a layer."""
    if model == "heads":  # heads of 64, 192 and 256
        return [entry for heads, size in ((32, 64), (16, 192), (16, 256))
                for entry in 3 * [((heads * size, 2048), {"heads": heads})]
                + [((2048, heads * size), {"heads": heads, "dim": 1})]]
    if model == "tiny":  # for tests, on a CPU
        return [((32, 16), {"heads": 4}), ((16, 32), {"heads": 4, "dim": 1}), ((16, 16), None)]
    forms = {"llama3_8b": [{"heads": 32}, {"heads": 32, "dim": 1}, {"heads": 8}, {"heads": 8}, None, None, None]}
    shapes = shapes_of(model, 1)
    return list(zip(shapes, forms.get(model, [None] * len(shapes))))


def stack_shape(shape, split) -> tuple[int, ...]:
    """The shape of a parameter that holds the units of `split` as a stack."""
    if split is None:
        return shape
    heads, (rows, columns) = split["heads"], shape
    return (heads, rows, columns // heads) if split.get("dim") else (heads, rows // heads, columns)


class Variant:
    """An optimizer of one variant."""

    def __init__(self, name, model, layers, ranks, device, optimizer, run):
        from kernels import get_kernel

        package, self.name = get_kernel("org/optimizer", version=1), name
        layer = layer_of(model)
        shapes = [stack_shape(*entry) if name == "stacks" else entry[0] for entry in layer]
        self.splits = [entry[1] if name == "heads" else None for entry in layer]
        params = parameters(layers * shapes, MODE[ranks == 1], ranks, device)
        per_group = {"layer": len(layer), "each": 1}.get(name, len(params))
        # Groups of one split each, as get_default_muon_param_groups makes them
        groups = {}
        for i, p in enumerate(params):
            key = i // per_group, repr(self.splits[i % len(layer)])
            group = groups.setdefault(key, {"params": [], "split": self.splits[i % len(layer)]})
            group["params"].append((f"layers.{i}", p))
            group["lr"] = 1e-3 * (1 + i // per_group)
        self.flops = layers * sum(products_flops(*unit) * count for unit, count in map(units, layer))
        self.opt = {"muon": package.Muon, "normuon": package.NorMuon}[optimizer](
            list(groups.values()), adjust_lr_fn="match_rms_adamw", capturable=run == "graph")
        self.count = len(groups)


def units(entry) -> tuple[tuple[int, int], int]:
    """(shape, number) of the units of a weight split into heads."""
    *lead, rows, columns = stack_shape(*entry)
    return (rows, columns), lead[0] if lead else 1


def worker(rank: int, ranks: int, port: int, options) -> None:
    device = join(rank, ranks, port)
    for model in options.models:
        for optimizer in options.optimizers:
            for run in options.runs:
                measure(rank, ranks, device, options, model, optimizer, run)
    leave()


def measure(rank, ranks, device, options, model, optimizer, run) -> None:
    own = 4 if model in ("heads", "tiny") else len(shapes_of(model)) // len(layer_of(model))
    layers = options.layers or own
    variants = [Variant(name, model, layers, ranks, device, optimizer, run) for name in options.variants]
    for _ in range(options.warmup):
        for variant in variants:
            variant.opt.step()
    times = [[timed(variant.opt.step, device) for variant in variants] for _ in range(options.steps)]
    figures = torch.tensor(times, dtype=torch.float64, device=device)  # rounds, variants, (device, host)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    figures = figures.cpu()
    rows = []
    for i, variant in enumerate(variants):
        ms = figures[:, i, 0].tolist()
        quantiles = statistics.quantiles(ms, n=5, method="inclusive")
        rows.append({
            "commit": options.commit, "gpu": device_name(device), "ranks": ranks, "model": model, "layers": layers,
            "optimizer": optimizer, "run": run, "variant": variant.name, "median_ms": round(statistics.median(ms), 4),
            "p20_ms": round(quantiles[0], 4), "p80_ms": round(quantiles[3], 4),
            "host_ms": round(figures[:, i, 1].median().item(), 4),
            "ratio": round((figures[:, i, 0] / figures[:, 0, 0]).median().item(), 4),
            "gflops": round(variant.flops / 1e9, 1) if variant.name in ("heads", "stacks") else "",
            "groups": variant.count, "buckets": len(variant.opt.plan_report().rows),
            "torch": torch.__version__, "triton": triton_version()})
    if rank == 0:
        for row in rows:
            print({k: row[k] for k in COLUMNS[2:16]}, flush=True)
        append(options.out, COLUMNS, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--models", nargs="+", default=["llama3_8b"])
    parser.add_argument("--layers", type=int, default=None, help="in place of the model's own number")
    parser.add_argument("--variants", nargs="+", default=["whole", "heads", "stacks"],
                        choices=["whole", "heads", "stacks", "one", "layer", "each"])
    parser.add_argument("--optimizers", nargs="+", default=["muon"], choices=["muon", "normuon"])
    parser.add_argument("--runs", nargs="+", default=["eager"], choices=["eager", "graph"])
    parser.add_argument("--steps", type=int, default=20, help="timed rounds")
    parser.add_argument("--warmup", type=int, default=4, help="rounds before them")
    add_output(parser, COLUMNS, "units.csv")
    options = parser.parse_args()
    one_gpu_each(parser, max(options.ranks))
    for ranks in options.ranks:
        on_ranks(worker, options, ranks)


if __name__ == "__main__":
    main()

"""Time and error of `orthogonalize` on one GPU, by shape; one CSV row for each measurement.

    LOCAL_KERNELS=org/optimizer=build python benchmarks/polar.py --out polar.csv

Matrices are normal, bf16, in place. `graph`: replays of a captured call; `eager`: calls between events. Times are
medians; the error is that of the last matrix against the same polynomials applied to its singular values in fp64.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import statistics
from pathlib import Path

import torch
from kernels import get_kernel
from step import commit, triton_version

SHAPES = [(12, 768, 768), (12, 768, 3072), (4, 1024, 4096), (1, 4096, 4096), (4, 4096, 4096), (1, 4096, 14336),
          (4, 4096, 14336), (16, 2048, 8192), (64, 768, 2048), (64, 256, 768), (64, 128, 512)]
COLUMNS = ("commit gpu implementation algorithm n rows cols dtype run median_ms p20_ms p80_ms error_fp64 torch triton "
           "tflops_needed").split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="polar.csv", help="CSV to append to")
    parser.add_argument("--commit", default=None, help="what to write as the commit where there is no git")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls")
    options = parser.parse_args()
    polar = importlib.import_module(f"{get_kernel('org/optimizer', version=1).__name__}.polar")
    new = not Path(options.out).exists()
    with open(options.out, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        for shape in SHAPES:
            for row in measure(polar, shape, options):
                writer.writerow(row)
                print({key: row[key] for key in COLUMNS[4:13]}, flush=True)


def measure(polar, shape, options):
    """Yield the rows of one stack."""
    steps = polar.steps_of("polar_express", 5)
    X = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    last = X[-1].double()
    error = distance(polar.orthogonalize_(X.clone(), steps)[-1], last, steps)
    flops = shape[0] * polar.cost(*shape[1:], steps)
    for run, call in (("eager", lambda: polar.orthogonalize_(X, steps)), ("graph", captured(polar, X, steps))):
        times = timed(call, options.repeats)
        quantiles = statistics.quantiles(times, n=5, method="inclusive")
        median = statistics.median(times)
        yield dict(zip(COLUMNS, (
            options.commit or commit(), torch.cuda.get_device_name(), "ours", algorithm(polar, shape, steps), *shape,
            "bf16", run, round(median, 4), round(quantiles[0], 4), round(quantiles[3], 4), f"{error:.2e}",
            torch.__version__, triton_version(), round(flops / median / 1e9))))


def algorithm(polar, shape, steps) -> str:
    return "gram" if polar._uses_gram(*sorted(shape[1:]), steps) else "standard"


def distance(out, X, steps) -> float:
    """The relative error of a polar factor against the composed polynomials in fp64."""
    U, S, V = torch.linalg.svd(X, full_matrices=False)
    S = S / S.square().sum().sqrt()
    for a, b, c in steps.triples:
        S = a * S + b * S**3 + c * S**5
    exact = (U * S) @ V
    return ((out.double() - exact).norm() / exact.norm()).item()


def captured(polar, X, steps):
    """A replay of one call, captured after a call that compiled its kernels."""
    polar.orthogonalize_(X, steps)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        polar.orthogonalize_(X, steps)
    return graph.replay


def timed(call, repeats) -> list[float]:
    """ms of each call, after three to warm up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return times


if __name__ == "__main__":
    main()

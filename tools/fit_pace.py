"""Write the cost model of an architecture, kernels/tables/<arch>_pace.json, from measured stacks of matrices.

    python tools/fit_pace.py --gpu "NVIDIA H200" --arch sm90

Reads the captured runs of benchmarks/results/polar.csv on that GPU, of each shape the newest; what every stack takes
(`stack_us`) is fitted to all of them together, with a rate that saturates in the short side. Figures of the wire and of
memory, which are measured by other means (docs/facts.md), are kept as they stand in the table or given as arguments.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import math
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FACTS = {"copy_gbps": 4300, "wire_gbps": 330, "wire_us": 50, "exposed": 0.63}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="NVIDIA H200", help="the CSV's name of the GPU")
    parser.add_argument("--arch", default="sm90", help="name of the table")
    parser.add_argument("--csv", type=Path, default=ROOT / "benchmarks" / "results" / "polar.csv")
    parser.add_argument("--out", type=Path, default=None, help="the table; default: the package's")
    for name in FACTS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=None)
    options = parser.parse_args()
    out = options.out or ROOT / "torch-ext" / "optimizer" / "kernels" / "tables" / f"{options.arch}_pace.json"
    before = json.loads(out.read_text()) if out.is_file() else FACTS
    facts = {name: before[name] if getattr(options, name) is None else getattr(options, name) for name in FACTS}
    stacks = read(options.csv, options.gpu)
    stack_us, rate, half, errors = fit(stacks)
    print(f"{len(stacks)} stacks; {stack_us} us each and {rate} n / (n + {half}) TFLOP/s fit them within "
          f"{100 * max(map(abs, errors)):.0f} % (root mean square {100 * rms(errors):.0f} %)")
    out.write_text(written({"arch": options.arch, "gpu": options.gpu, "stack_us": stack_us, **facts}, stacks))


def read(path, gpu) -> list[dict]:
    """[{count, rows, columns, us}], of each stack the last captured run in the file."""
    found = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            if (row["gpu"], row["run"], row["implementation"]) == (gpu, "graph", "ours"):
                shape = tuple(int(row[key]) for key in ("n", "rows", "cols"))
                found[shape] = round(1e3 * float(row["median_ms"]), 1)
    return [dict(zip(("count", "rows", "columns", "us"), (*shape, us))) for shape, us in found.items()]


def fit(stacks):
    """(us of every stack, TFLOP/s, short side of half the rate, relative errors): the best of a grid."""
    polar, best = package("polar"), None
    steps = polar.steps_of("polar_express", 5)
    flops = [s["count"] * polar.cost(s["rows"], s["columns"], steps) for s in stacks]
    shortest = min(s["us"] for s in stacks)
    for stack_us in range(0, int(0.9 * shortest), 2):
        for rate in range(400, 1000, 10):
            for half in range(0, 1000, 25):
                errors = [math.log((stack_us + f / 1e6 / rate * (1 + half / min(s["rows"], s["columns"]))) / s["us"])
                          for s, f in zip(stacks, flops)]
                if best is None or rms(errors) < rms(best[3]):
                    best = stack_us, rate, half, errors
    return best


def rms(errors) -> float:
    return math.sqrt(sum(e * e for e in errors) / len(errors))


def package(module):
    """A module of the package as it lies in the repository."""
    import sys

    sys.path.insert(0, str(ROOT / "torch-ext"))
    return importlib.import_module(f"optimizer.{module}")


def written(numbers, stacks) -> str:
    """JSON with one stack per line."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in numbers.items()]
    rows = ",\n".join(f"    {json.dumps(stack)}" for stack in stacks)
    return "\n".join(["{", *lines, '  "stacks": [', rows, "  ]", "}"]) + "\n"


if __name__ == "__main__":
    main()

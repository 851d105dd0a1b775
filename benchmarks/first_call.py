"""Time of the first `orthogonalize` of a process, for all shapes of a model together, by a cold and by a warm cache.

    make build && python benchmarks/first_call.py --out first_call.csv

Every row is a process of its own with a Triton cache of its own: empty for `cold`, left behind by that for `warm`.
load_s: get_kernel, after torch was imported; first_s: the first calls until the device is done, of which the longest
is longest_s; again_s: the same calls once more; compiled: kernels that the cache holds afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from models import MODELS, shapes_of  # noqa: E402
from rows import add_output, append  # noqa: E402

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={Path(__file__).resolve().parents[1]}")

COLUMNS = "commit gpu model cache shapes load_s first_s longest_s again_s compiled torch triton".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama3_8b"], choices=MODELS, help="whose shapes")
    parser.add_argument("--divide", type=int, default=1, help="divide all sides by this, for a CPU")
    add_output(parser, COLUMNS, "first_call.csv")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options)))
        return
    for model in options.models:
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                command = [sys.executable, __file__, "--child", state, "--models", model, "--divide",
                           str(options.divide), "--out", str(options.out)]
                done = subprocess.run(command, env=os.environ | {"TRITON_CACHE_DIR": cache}, check=True,
                                      stdout=subprocess.PIPE, text=True)
                row = json.loads(done.stdout.splitlines()[-1])
                row["compiled"] = sum(1 for path in Path(cache).rglob("*") if path.suffix in (".cubin", ".hsaco"))
                write(options, row)


def child(options) -> dict:
    """One process: load, call once for each distinct shape, and again."""
    import torch
    from kernels import get_kernel
    from step import triton_version

    on_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    (model,) = options.models
    shapes = sorted({tuple(side // options.divide for side in shape) for shape in shapes_of(model, None)})
    stacks = [torch.randn(1, *shape, device="cuda" if on_gpu else "cpu", dtype=torch.bfloat16) for shape in shapes]
    wait()
    start = time.perf_counter()
    package = get_kernel("org/optimizer", version=1)
    seconds = [time.perf_counter() - start]
    for _ in range(2):
        for stack in stacks:
            start = time.perf_counter()
            package.orthogonalize(stack)
            wait()
            seconds.append(time.perf_counter() - start)
    load, first, again = seconds[0], seconds[1:1 + len(stacks)], seconds[1 + len(stacks):]
    return {"gpu": torch.cuda.get_device_name() if on_gpu else "CPU", "model": model, "cache": options.child,
            "shapes": len(shapes), "load_s": round(load, 3), "first_s": round(sum(first), 3),
            "longest_s": round(max(first), 3), "again_s": round(sum(again), 4), "torch": torch.__version__,
            "triton": triton_version()}


def write(options, row) -> None:
    row["commit"] = options.commit
    append(options.out, COLUMNS, [row])
    print(row, flush=True)


if __name__ == "__main__":
    main()

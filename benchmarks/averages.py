"""AdamW with averages in fp32, bf16 and 8 bits, and torch's fused AdamW: ms of a step on one GPU; a CSV row each.

    make build && python benchmarks/averages.py

Times as in offload.py, behind 10 ms of products. `gb_moved`: what a step has to read and write. Without a GPU: --small,
to try the script.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
from offload import CUDA, DEVICE, empty, median_times, other_work, peak_bytes  # noqa: E402
from rows import add_output, append  # noqa: E402
from step import parameters  # noqa: E402

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={HERE.parent}")

COLUMNS = ("commit gpu torch parameters elements case behind_ms idle_ms host_ms state_mib "
           "peak_over_weights_and_gradients_mib gb_moved gb_per_s").split()
# bytes that a step reads and writes for an element: gradient, weight twice, averages twice
BYTES = {"torch_fused": 28, "fp32": 28, "fp32_capturable": 28, "bf16": 20, "int8": 16.25, "int8_capturable": 16.25}
PRODUCTS = 6  # of other work


def make(package, case, params):
    if case == "torch_fused":
        return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=CUDA or None)
    dtype = {"bf16": torch.bfloat16, "int8": torch.int8}.get(case.split("_")[0])
    group = {"params": params, "use_muon": False}
    if dtype is not None:
        group["state_dtype"] = dtype
    return package.Muon([group], lr=1e-3, weight_decay=0.1, capturable=case.endswith("capturable") and CUDA)


def measure(package, name, shapes, case, commit):
    params = parameters(shapes, "single", 1, DEVICE)
    elements = sum(p.numel() for p in params)
    opt = make(package, case, params)
    for _ in range(5):
        opt.step()
    peak = peak_bytes(opt.step)
    idle, host = median_times(opt.step, 20)
    behind, _ = median_times(opt.step, 20, PRODUCTS)
    state = sum(t.nbytes for p in params for t in opt.state[p].values() if isinstance(t, torch.Tensor))
    moved = BYTES[case] * elements / 1e9
    return {"commit": commit, "gpu": torch.cuda.get_device_name() if CUDA else "cpu", "torch": torch.__version__,
            "parameters": name, "elements": elements, "case": case, "behind_ms": round(behind, 4),
            "idle_ms": round(idle, 4), "host_ms": round(host, 4), "state_mib": round(state / 2**20, 1),
            "peak_over_weights_and_gradients_mib": round((peak - 8 * elements) / 2**20, 1),
            "gb_moved": round(moved, 3), "gb_per_s": round(moved / behind * 1e3, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small parameters")
    add_output(parser, COLUMNS, "averages.csv")
    options = parser.parse_args()
    from kernels import get_kernel

    package = get_kernel("org/optimizer", version=1)
    sets = {"embedding 151936 x 2048": [(151936, 2048)], "100 of 256 x 256": [(256, 256)] * 100,
            "100 of 2048": [(2048,)] * 100}
    if options.small:
        sets = {"embedding 100 x 128": [(100, 128)], "10 of 64 x 64": [(64, 64)] * 10}
    other_work()
    for name, shapes in sets.items():
        for case in BYTES:
            if len(shapes[0]) == 1 and case.startswith("int8"):
                continue  # vectors keep fp32
            row = measure(package, name, shapes, case, options.commit)
            append(options.out, COLUMNS, [row])
            print(row, flush=True)
            empty()


if __name__ == "__main__":
    main()

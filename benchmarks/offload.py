"""Muon with state on the GPU, in 8 bits and in host memory on one GPU: times, memory and PCIe's rate; a CSV row each.

    make build && python benchmarks/offload.py --profile profile.txt

`in_a_row_ms`: a step of six in a row. `behind_ms`: a step behind 40 ms of products. `idle_ms`, `host_ms`: a step from
an idle GPU, and the host's part. `pcie_floor_ms`: state over the rate of copies both ways at once, in pieces of 8 MiB.
`muon_offload_launches_by_triton` has each part launched by Triton. --profile appends the host's functions and the busy
times of copies and kernels. Without a GPU: --models tiny, to try the script.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import gc
import io
import itertools
import os
import pstats
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
import torch  # noqa: E402
from models import shapes_of  # noqa: E402
from rows import add_output, append  # noqa: E402
from step import OTHER_WORK, parameters  # noqa: E402

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={HERE.parent}")

LAYERS = {"gpt2_124m": 12, "qwen3_1p7b": 12, "llama3_8b": 4, "tiny": 2}
CASES = ["muon", "muon_int8", "muon_offload", "muon_offload_launches_by_triton"]
COLUMNS = ("commit gpu torch model layers elements case in_a_row_ms behind_ms idle_ms host_ms host_behind_ms first_s "
           "parts pcie_both_gbs pcie_floor_ms state_gpu_mib state_host_mib workspace_mib slots_mib tables_mib "
           "peak_mib peak_over_weights_and_gradients_mib state_and_slots_bytes_per_element").split()
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def sync():
    if CUDA:
        torch.cuda.synchronize()


def empty():
    """Give the memory of a case back."""
    gc.collect()
    if CUDA:
        sync()
        torch.cuda.empty_cache()


def part(package, name):
    import importlib
    return importlib.import_module(f"{package.__name__}.{name}")


def pcie(seconds=0.3):
    """GB/s each way, with both ways at once, in pieces of 8 MiB."""
    if not CUDA:
        return 10.0
    size, count = 8 << 20, 40
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    gpu = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    best = 0.0
    for _ in range(3):
        sync()
        start = time.perf_counter()
        for _ in range(count):
            with torch.cuda.stream(streams[0]):
                gpu[0].copy_(host[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                host[1].copy_(gpu[1], non_blocking=True)
        sync()
        best = max(best, size * count / (time.perf_counter() - start) / 1e9)
    return best


def make(package, case, params):
    options = {"muon_int8": {"state_dtype": torch.int8}}.get(case, {})
    if case.startswith("muon_offload"):
        options = {"offload_state": True}
    return package.Muon([{"params": params}], lr=1e-3, adjust_lr_fn="match_rms_adamw", **options)


@functools.cache
def factors() -> tuple[torch.Tensor, ...]:
    """Two factors and a result of `other_work`."""
    size = OTHER_WORK[1]
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return a, b, torch.empty_like(a)


def other_work(count=OTHER_WORK[0]):
    """So many products, behind which the host is ahead; none without a GPU."""
    for _ in range(count if CUDA else 0):
        torch.mm(*factors()[:2], out=factors()[2])


def bytes_of_other_work() -> int:
    """Memory that is no part of a step."""
    return sum(t.nbytes for t in factors())


def timed(work, count):
    """ms of `count` calls of `work`, by events; and the host's ms."""
    if not CUDA:
        start = time.perf_counter()
        for _ in range(count):
            work()
        ms = 1e3 * (time.perf_counter() - start)
        return ms, ms
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start = time.perf_counter()
    begin.record()
    for _ in range(count):
        work()
    end.record()
    host = 1e3 * (time.perf_counter() - start)
    sync()
    return begin.elapsed_time(end), host


def median_times(step, count, products=0):
    """Medians of the ms of `count` steps and of the host's ms, each step from an idle GPU or behind `products`."""
    times = []
    for _ in range(count):
        sync()
        other_work(products)
        times.append(timed(step, 1))
    return [statistics.median(some) for some in zip(*times)]


def peak_bytes(step):
    """The most bytes that are allocated during a step, without those of `other_work`; 0 without a GPU."""
    if not CUDA:
        return 0
    gc.collect()
    sync()
    torch.cuda.reset_peak_memory_stats()
    step()
    sync()
    return torch.cuda.max_memory_allocated() - bytes_of_other_work()


def measure(package, model, case, options, rate):
    layers = LAYERS[model]
    params = parameters(shapes_of(model, layers), "single", 1, DEVICE)
    elements = sum(p.numel() for p in params)
    opt = make(package, case, params)
    sync()
    start = time.perf_counter()
    opt.step()
    sync()
    first = time.perf_counter() - start
    for _ in range(4):
        opt.step()
    sync()
    row = [timed(opt.step, 6)[0] / 6 for _ in range(2)]
    idle, host = median_times(opt.step, 5)
    behind, host_behind = median_times(opt.step, 5, OTHER_WORK[0])
    peak = peak_bytes(opt.step)
    report = opt.memory_report()
    slots = sum(r.nbytes for r in report.rows if "slots" in r.what)
    on_gpu, on_host = (report.bytes_of("state", where=w) for w in ("device", "host"))
    workspace = sum(r.nbytes for r in report.rows if r.kind == "workspace") - slots
    tables = sum(r.nbytes for r in report.rows if r.kind == "tables")
    parts = len(opt._preparation.place.scheduler.order) if "offload" in case else 0
    mib = 2.0**20
    found = {
        "commit": options.commit, "gpu": torch.cuda.get_device_name() if CUDA else "cpu", "torch": torch.__version__,
        "model": model, "layers": layers, "elements": elements, "case": case,
        "in_a_row_ms": min(row), "behind_ms": behind, "idle_ms": idle, "host_ms": host,
        "host_behind_ms": host_behind, "first_s": first, "parts": parts, "pcie_both_gbs": rate,
        "pcie_floor_ms": on_host / rate / 1e6,
        "state_gpu_mib": on_gpu / mib, "state_host_mib": on_host / mib, "workspace_mib": workspace / mib,
        "slots_mib": slots / mib, "tables_mib": tables / mib, "peak_mib": peak / mib,
        "peak_over_weights_and_gradients_mib": (peak - 8 * elements) / mib,
        "state_and_slots_bytes_per_element": (on_gpu + slots) / elements,
    }
    if options.profile and case == "muon_offload":
        profile(opt, model, options.profile)
        if CUDA:
            trace(opt, model, options.profile)
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}


def profile(opt, model, path):
    """The functions of a step that take the host longest."""
    profiler = cProfile.Profile()
    sync()
    profiler.enable()
    opt.step()
    profiler.disable()
    sync()
    out = io.StringIO()
    pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(25)
    with open(path, "a") as file:
        file.write(f"{model}: one step\n{out.getvalue()}\n")


def trace(opt, model, path):
    """Busy ms of each kind of work of a step on the GPU, and of both kinds at once."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    opt.step()
    sync()
    with profiling(activities=[ProfilerActivity.CUDA]) as profiler:
        opt.step()
        sync()
    spans = {"in": [], "out": [], "kernels": []}
    for event in profiler.profiler.kineto_results.events():
        if "CUDA" not in str(event.device_type()):
            continue
        name, start = event.name(), event.start_ns()
        kind = "in" if "HtoD" in name else "out" if "DtoH" in name else None if "Mem" in name else "kernels"
        if kind:
            spans[kind].append((start, start + event.duration_ns()))

    def union(some):
        total, end = 0, 0
        for a, b in sorted(some):
            total += max(0, b - max(a, end))
            end = max(end, b)
        return total / 1e6

    copies = spans["in"] + spans["out"]
    every = copies + spans["kernels"]
    if not every:
        return
    whole = (max(b for _, b in every) - min(a for a, _ in every)) / 1e6
    lines = [f"{model}: ms under the profiler, whole {whole:.1f}, busy {union(every):.1f}, "
             f"in {union(spans['in']):.1f}, out {union(spans['out']):.1f}, any copy {union(copies):.1f}, "
             f"kernels {union(spans['kernels']):.1f}, "
             f"copies beside kernels {union(copies) + union(spans['kernels']) - union(every):.1f}, "
             f"copies in and out {len(spans['in'])} {len(spans['out'])}, kernels {len(spans['kernels'])}"]
    print(*lines, flush=True)
    with open(path, "a") as file:
        file.write("\n".join(lines) + "\n\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=["gpt2_124m", "qwen3_1p7b", "llama3_8b"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--profile", default=None, help="file to which profiles are appended")
    add_output(parser, COLUMNS, "offload.csv")
    options = parser.parse_args()
    from kernels import get_kernel

    package = get_kernel("org/optimizer", version=1)
    fixed = part(package, "kernels.launch.replay").FixedLaunch
    rate = pcie()
    other_work()
    for model, case in itertools.product(options.models, options.cases):
        by_triton = case.endswith("by_triton")
        if by_triton and model not in ("qwen3_1p7b", "tiny"):
            continue
        with mock.patch.object(fixed, "start", lambda self: False) if by_triton else contextlib.nullcontext():
            row = measure(package, model, case, options, rate)
        append(options.out, COLUMNS, [row])
        print({key: row[key] for key in COLUMNS[3:]}, flush=True)
        empty()


if __name__ == "__main__":
    main()

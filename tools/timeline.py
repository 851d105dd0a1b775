"""Where a step's time goes: a figure and a CSV from the profiler's traces, one or several ranks.

    python tools/timeline.py traces/*.json.gz --out timeline.png

Reads Chrome traces as torch.profiler writes them (json or json.gz), takes what ran on the device (without a GPU:
torch's operators on the CPU), and sorts it by name into wire, products, memory and other. If the trace holds a range
named "step" (benchmarks/step.py --trace marks it), only that is shown. The CSV has the busy time of each kind per rank,
the time in which only the wire was busy (exposed), and the idle rest.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gzip
import itertools
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

STEP = "step"
SOURCES = Path(__file__).resolve().parent.parent / "torch-ext" / "optimizer" / "kernels"
PRODUCTS = {"matmul", "onchip"}  # folders of kernels
OTHERS = {  # kind -> names of kernels and operators that are not this package's; the first kind that fits is taken
    "wire": re.compile(r"nccl|^c10d::|^gloo:|^_c10d|all_?to_?all|all_?gather|all_?reduce|reduce_?scatter", re.I),
    "products": re.compile(r"gemm|cutlass|cublas|xmma|wgmma|nvjet|flash|sdpa|^Cijk_"
                           r"|^aten::(mm|bmm|addmm|baddbmm)$", re.I),
    "memory": re.compile(r"memcpy|memset|foreach|multi_tensor|elementwise|reduce_kernel|fused_?adam"
                         r"|^aten::(copy_|_fused|fill_|zero_|mul|add|sub|div|lerp|sum|where|clone|sqrt|amax)", re.I),
}
CLOCK = 1.0  # us by which the times of works that follow each other may overlap
GAP = 50.0  # us without work that end a line of the printed timeline
COLORS = {"wire": "#6366f1", "products": "#c2410c", "memory": "#0ea5e9", "other": "#6b7280"}


@dataclass(frozen=True)
class Work:
    """Something that ran: of which kind, from and to, in us."""
    kind: str
    name: str
    start: float
    end: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, help="Chrome traces, one per rank")
    parser.add_argument("--out", type=Path, default=Path("timeline.png"), help="the figure; the CSV lies beside it")
    parser.add_argument("--title", default=None, help="of the figure")
    parser.add_argument("--whole", action="store_true", help="all of the trace, not the marked step alone")
    parser.add_argument("--print", action="store_true", help="print what ran when, lane by lane")
    options = parser.parse_args()
    ranks = {}
    for number, path in enumerate(options.traces):
        rank, works = read(path, options.whole)
        ranks[number if rank is None or rank in ranks else rank] = works
    rows = [row for rank, works in sorted(ranks.items()) for row in busy(rank, works)]
    write(options.out.with_suffix(".csv"), rows)
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    for rank, works in sorted(ranks.items()) if options.print else ():
        print("\n".join(lines(rank, works)))
    drawn = draw(ranks, options.out, options.title)
    table = options.out.with_suffix(".csv")
    print(f"{options.out} and {table}" if drawn else f"{table}; matplotlib, which draws the figure, is not installed")


def read(path, whole=False) -> tuple[int | None, list[Work]]:
    """(rank, what ran in the marked step or in the whole trace, from 0 on). ValueError where nothing did."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        trace = json.load(file)
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("dur", 0) > 0]
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    works = [work(e) for e in device]
    if not works:  # a trace without a GPU
        works = [work(e) for e in outermost([e for e in events if e.get("cat") == "cpu_op"])]
    begin, end = not whole and window(events, bool(device)) or (0, float("inf"))
    works = sorted((w for w in works if begin <= w.start < end), key=lambda w: w.start)
    if not works:
        raise ValueError(f"{path}: no kernels and no operators in this trace; record it with torch.profiler")
    first = min(w.start for w in works)
    works = [Work(w.kind, w.name, w.start - first, w.end - first) for w in works]
    return trace.get("distributedInfo", {}).get("rank"), works


def work(event) -> Work:
    return Work(kind_of(event["name"]), event["name"], event["ts"], event["ts"] + event["dur"])


@functools.cache
def own_kernels() -> dict[str, str]:
    """Kernel -> kind, of the package's Triton kernels: a kernel is a function under `jit` whose name ends so."""
    kinds = {}
    for path in SOURCES.rglob("*.py"):
        names = re.findall(r"^@\w*jit\b.*\ndef (\w*kernel)\(", path.read_text(), re.MULTILINE)
        kinds.update(dict.fromkeys(names, "products" if path.parent.name in PRODUCTS else "memory"))
    return kinds


@functools.cache
def kind_of(name) -> str:
    """wire, products, memory or other."""
    if name in own_kernels():
        return own_kernels()[name]
    return next((kind for kind, pattern in OTHERS.items() if pattern.search(name)), "other")


def outermost(events) -> list:
    """Of operators that call each other, the outermost ones of a known kind; and of what is left, those that call none.
    """
    found, threads = [], defaultdict(list)
    for event in events:
        threads[event["tid"]].append(event)
    for thread in threads.values():
        thread.sort(key=lambda e: (e["ts"], -e["dur"]))
        covered = float("-inf")
        for event, after in zip(thread, [*thread[1:], None]):
            end = event["ts"] + event["dur"]
            calls_none = after is None or after["ts"] >= end
            if event["ts"] >= covered and (calls_none or kind_of(event["name"]) != "other"):
                found.append(event)
                covered = end
    return found


def window(events, on_device) -> tuple[float, float] | None:
    """(begin, end) of the last range that is named "step": on the device, if it is there, over all streams. There,
    torch's own range of `Optimizer.step` counts, too: of nested ranges, a trace has only the inner one on the device.
    """
    for category in ("gpu_user_annotation", "user_annotation") if on_device else ("user_annotation",):
        ranges = [e for e in events if e.get("cat") == category]
        marked = [e for e in ranges if e["name"] == STEP
                  or category == "gpu_user_annotation" and e["name"].startswith("Optimizer.step#")]
        if marked:
            last = marked[-1]
            same = [e for e in marked if e["ts"] < last["ts"] + last["dur"] and last["ts"] < e["ts"] + e["dur"]]
            return min(e["ts"] for e in same), max(e["ts"] + e["dur"] for e in same)
    return None


def union(works) -> list[tuple[float, float]]:
    """The times in which at least one of them ran, as disjoint intervals."""
    merged = []
    for start, end in sorted((w.start, w.end) for w in works):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [tuple(pair) for pair in merged]


def length(intervals) -> float:
    return sum(end - start for start, end in intervals)


def overlap(one, other) -> float:
    """How long two lists of disjoint intervals have in common."""
    return length(one) + length(other) - length(union([Work("", "", *pair) for pair in (*one, *other)]))


def busy(rank, works) -> list[dict]:
    """One row for each kind: how long it ran; of the wire also how long nothing else did; and the idle rest."""
    whole = max(w.end for w in works)
    rows, kinds = [], {kind: union([w for w in works if w.kind == kind]) for kind in COLORS}
    computing = union([w for w in works if w.kind != "wire"])
    for kind, intervals in kinds.items():
        rows.append({"rank": rank, "kind": kind, "busy_ms": round(length(intervals) / 1e3, 4),
                     "share": round(length(intervals) / whole, 4), "launches": sum(w.kind == kind for w in works)})
    exposed = length(kinds["wire"]) - overlap(kinds["wire"], computing)
    idle = whole - length(union(works))
    for kind, us in (("wire, exposed", exposed), ("idle", idle), ("all", whole)):
        rows.append({"rank": rank, "kind": kind, "busy_ms": round(us / 1e3, 4), "share": round(us / whole, 4),
                     "launches": len(works) if kind == "all" else 0})
    return rows


def write(path, rows) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def lanes_of(works) -> list[tuple[str, list[Work]]]:
    """(wire or compute, work one after another): as many lanes as run side by side. A graph's streams say nothing."""
    lanes = []
    for work in sorted(works, key=lambda w: (w.kind == "wire", w.start)):
        name = "wire" if work.kind == "wire" else "compute"
        free = next((lane for of, lane in lanes if of == name and lane[-1].end <= work.start + CLOCK), None)
        if free is None:
            lanes.append((name, [work]))
        else:
            free.append(work)
    return lanes


def lines(rank, works) -> list[str]:
    """What ran when, in ms: a line for each run of works of one kind in a lane without a gap, with the kernel that ran
    longest; a line for each collective.
    """
    found = []
    for name, lane in lanes_of(works):
        runs = [[lane[0]]]
        for before, w in itertools.pairwise(lane):
            if name == "wire" or w.kind != before.kind or w.start > before.end + GAP:
                runs.append([])
            runs[-1].append(w)
        for run in runs:
            took = defaultdict(float)
            for w in run:
                took[w.name] += w.end - w.start
            longest, (begin, end) = max(took, key=took.get), (run[0].start, run[-1].end)
            found.append((begin, f"rank {rank}, {name}: {begin / 1e3:8.3f} to {end / 1e3:8.3f}, busy "
                          f"{sum(took.values()) / 1e3:7.3f}, {run[0].kind}, {len(run)} launches, {longest[:50]}"))
    return [line for _, line in sorted(found)]


def draw(ranks, path, title=None) -> bool:
    """A lane for the wire of each rank and one for the rest; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ModuleNotFoundError:
        return False
    lanes = [(f"rank {rank}, {name}", lane) for rank, works in sorted(ranks.items()) for name, lane in lanes_of(works)]
    figure = Figure(figsize=(12, 1.4 + 0.45 * len(lanes)), dpi=100, layout="constrained")
    axes = figure.subplots()
    for place, (_, lane) in enumerate(lanes):
        for kind, color in COLORS.items():
            bars = [(w.start / 1e3, (w.end - w.start) / 1e3) for w in lane if w.kind == kind]
            axes.broken_barh(bars, (-place - 0.4, 0.8), color=color, linewidth=0)
    axes.set_yticks([-place for place in range(len(lanes))], [name for name, _ in lanes])
    axes.set_xlabel("ms")
    axes.set_title(title or "")
    figure.legend(handles=[Patch(color=color, label=kind) for kind, color in COLORS.items()], ncols=len(COLORS),
                  loc="outside lower center", frameon=False)
    figure.savefig(path)
    return True


if __name__ == "__main__":
    main()

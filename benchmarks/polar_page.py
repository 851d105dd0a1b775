"""Polar factors by many packages at 5, 8 and 10 steps: time, error and memory. Rows for docs/polar_benchmark.md.

    make build && python benchmarks/polar_page.py --stacks all --jobs 12 --out polar_page.csv
    ... --stacks 12x768x3072 --schedules qwen3_8:8 --peers gns dion       one stack, one schedule, two packages
    ... --pause FILE     measure nothing while FILE exists; FILE.idle says that nothing is measured any more
    python benchmarks/polar_page.py --docs docs                           write the table of the page anew
    python benchmarks/polar_page.py --short-side 256                      print it, of stacks with a short side from 256

Inputs are normal, bf16, fresh for each round; the packages of a stack take turns. All have equal coefficients, given by
the schedule. Times are of a CUDA graph of one call, or with --eager of calls one after another. A package that is
missing or fails leaves its fields empty, and the note says why. With --tuning-ms the notes of tuned packages say it.
The error is that of the last matrix against the same polynomials in fp64, relative, in the Frobenius norm; that of
torch.linalg.polar, which is exact, is how far the polynomials are from the polar factor. memory_mib is the most memory
that a call takes beyond its input, the result included.

A stack and schedule that --out has rows of, of all packages at this commit on this kind of GPU, is not measured again,
unless a package that was missing can be imported now. Rows of --eager and of graphs count apart.
--docs reads benchmarks/results/polar_page.csv, and the older rows in polar.csv (five steps) and schedules.csv.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import itertools
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.multiprocessing as mp

sys.path[:0] = [str(Path(__file__).parent)]
import peers  # noqa: E402
import polar  # noqa: E402  benchmarks/polar.py
import shapes  # noqa: E402
from documents import dates, write_parts  # noqa: E402
from rows import add_output, append, read  # noqa: E402
from schedules import PUBLISHED, Package, makers, schedule_of  # noqa: E402

COLUMNS = ("date commit gpu implementation version set steps n rows cols dtype run median_ms p20_ms p80_ms error "
           "memory_mib torch triton note").split()
RESULTS = Path(__file__).parent / "results"
STACKS = {"eleven": shapes.ROWS, "all": shapes.ROWS + shapes.GRID, "tiny": shapes.TINY}


def main() -> None:
    options = arguments()
    if options.docs:
        write_parts(Path(options.docs, "polar_benchmark.md"), page(known_rows(RESULTS)))
        return
    if options.short_side:
        rows = [row for row in known_rows(RESULTS) if min(int(row["rows"]), int(row["cols"])) >= options.short_side]
        print(*page(rows)["table"], sep="\n")
        return
    end = time.monotonic() + options.seconds
    tasks, left = not_measured(options), []
    if options.jobs and polar.DEVICE == "cuda" and tasks:
        compile_side_by_side(tasks, options)
    if options.tuning_ms:
        peers.set_tuning_time(options.tuning_ms, options.peers)
    package = Package()
    for shape, (name, count) in tasks:
        hold(options.pause)
        if time.monotonic() > end:
            left.append((*shape, count))
            continue
        for row in measure(package, shape, name, count, options):
            append(options.out, COLUMNS, [row])
            print(*(row[key] for key in COLUMNS[3:17]), row["note"], flush=True)
    print(f"not measured within {options.seconds} s: {left}" if left else "all stacks and schedules were measured")


def not_measured(options: argparse.Namespace) -> list[tuple]:
    """The (stack, (set, steps)) of which the table lacks a row of some package at this commit on this kind of GPU."""
    known, about = set(), {"commit": options.commit, "gpu": gpu(), "run": run_of(options)}
    missing = functools.cache(peers.is_missing)
    for row in read(options.out) if options.out.exists() else []:
        name, was_missing = row["implementation"], row["note"] in peers.MISSING
        if all(row[key] == value for key, value in about.items()) and (not was_missing or missing(name)):
            known.add((*(int(row[key]) for key in ("n", "rows", "cols", "steps")), row["set"], name))
    return [(shape, (name, count)) for shape, (name, count) in itertools.product(options.stacks, options.schedules)
            if any((*shape, count, name, peer) not in known for peer in ("ours", *options.peers))]


def run_of(options: argparse.Namespace) -> str:
    """What is timed: a graph of one call, or calls."""
    return "graph" if polar.DEVICE == "cuda" and not options.eager else "eager"


def gpu() -> str:
    return torch.cuda.get_device_name() if polar.DEVICE == "cuda" else "CPU"


def hold(pause: str | None) -> None:
    """Wait while this file exists, without memory that others could have."""
    if pause and Path(pause).exists() and polar.DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    while paused(pause):
        time.sleep(0.2)


def paused(pause: str | None) -> bool:
    """Whether this file exists. If so there is another one, with .idle behind its name: nothing is measured."""
    if not pause:
        return False
    idle = Path(f"{pause}.idle")
    if Path(pause).exists():
        idle.touch()
        return True
    idle.unlink(missing_ok=True)
    return False


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stacks", nargs="+", default=["eleven"], help=f"NxRxC, or one of {', '.join(STACKS)}")
    parser.add_argument("--schedules", nargs="+", type=schedule_of, default=PUBLISHED, help="SET:STEPS")
    parser.add_argument("--peers", nargs="*", default=list(peers.POLAR), choices=list(peers.POLAR))
    parser.add_argument("--eager", action="store_true", help="time calls, not a graph of one")
    parser.add_argument("--seconds", type=float, default=480, help="begin no stack this long after the start")
    parser.add_argument("--compile-seconds", type=float, default=300, help="then --jobs end, finished or not")
    parser.add_argument("--pause", default=None, help="a file: measure nothing while it exists")
    parser.add_argument("--rounds", type=int, default=5, help="bursts of each competitor")
    parser.add_argument("--burst-ms", type=float, default=5.0, help="about how long a burst lasts")
    parser.add_argument("--rest-ms", type=float, default=10.0, help="how long the GPU rests before each burst")
    parser.add_argument("--jobs", type=int, default=0, help="processes that fill the compilers' caches beforehand")
    parser.add_argument("--tuning-ms", type=float, default=0, help="for how long Triton's tuner times a configuration")
    parser.add_argument("--short-side", type=int, default=0, help="print the table of these stacks, measure nothing")
    parser.add_argument("--docs", default=None, help="folder of documents: write the table, and measure nothing")
    add_output(parser, COLUMNS, "polar_page.csv")
    options = parser.parse_args()
    try:
        options.stacks = [s for name in options.stacks for s in STACKS.get(name) or [shapes.stack_of(name)]]
    except argparse.ArgumentTypeError as why:
        parser.error(f"--stacks: {why}")
    return options


def measure(package: Package, shape: tuple[int, int, int], name: str, count: int, options: argparse.Namespace):
    """Yield a row for each implementation on one stack with one schedule."""
    torch._dynamo.reset()
    steps, X = package.steps(name, count), torch.randn(shape, device=polar.DEVICE, dtype=torch.bfloat16)
    exact, memory = polar.composed(X[-1], steps), {}
    contest = polar.Contest(X.normal_, options, (run_of(options),))
    for maker, make in makers(package, steps, name, count, options).items():
        hold(options.pause)
        contest.enter(maker, functools.partial(with_memory, make, X, memory, maker), lambda f: lambda: f(X),
                      lambda out: polar.distance(out[-1], exact))
    hold(options.pause)
    for maker, run, result in contest.results():
        row = polar.row(maker, "", shape, run, result)
        if options.tuning_ms and maker in peers.TUNED and not row["note"]:
            row["note"] = f"tuned for {options.tuning_ms:g} ms"
        yield {key: row.get(key, "") for key in COLUMNS} | {
            "date": datetime.date.today().isoformat(), "commit": options.commit, "set": name, "steps": count,
            "error": row["error_fp64"], "memory_mib": memory.get(maker, "")}
    if polar.DEVICE == "cuda":
        torch.cuda.empty_cache()


def with_memory(make, X: torch.Tensor, memory: dict[str, float], maker: str):
    """The function that `make` returns; its second call says the memory, in MiB. The first compiles and tunes.

    Cycles keep tensors of the first call alive, such as a tuner's buffer. Collected during the second, they would hide
    what it allocates, down to a memory of 0. So they are freed before, and nothing is collected meanwhile.
    """
    start = time.monotonic()
    try:
        call = make()
        call(X)
    except Exception as why:  # its row has the name alone
        print(f"{maker} {tuple(X.shape)}: {why!r}"[:400], flush=True)
        raise
    if polar.DEVICE == "cuda":
        torch.cuda.synchronize()
        if time.monotonic() - start > 2:
            print(f"{maker} {tuple(X.shape)}: {time.monotonic() - start:.0f} s to compile and tune", flush=True)
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        try:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call(X)
            memory[maker] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
        finally:
            if collects:
                gc.enable()
    return call


def compile_side_by_side(tasks: list[tuple], options: argparse.Namespace) -> None:
    """Fill the compilers' caches by --jobs processes; one that is late or fails keeps nobody else from measuring."""
    start, process = time.monotonic(), mp.get_context("spawn").Process
    jobs = [process(target=compile_all, args=(rank, tasks, options), daemon=True) for rank in range(options.jobs)]
    for job in jobs:
        job.start()
    while any(job.is_alive() for job in jobs) and time.monotonic() < start + options.compile_seconds:
        paused(options.pause)
        time.sleep(0.2)
    late = [job for job in jobs if job.is_alive()]
    for job in late:
        job.kill()
        job.join()
    failed = sum(bool(job.exitcode) for job in jobs if job not in late)
    took = time.monotonic() - start
    print(f"compiled for {took:.0f} s by {len(jobs)} processes, of which {len(late)} were late and {failed} failed",
          flush=True)


def compile_all(rank: int, tasks: list[tuple], options: argparse.Namespace) -> None:
    """Call all packages on every jobs-th stack and schedule, ours first, so that the compilers' caches on disk know
    them. Of tuned kernels each process compiles its share of the configurations, on one stack of each kind.
    """
    from torch._inductor import config

    config.compile_threads = 1  # torch.compile would start as many processes as there are cores, in each of these
    package = Package()
    peers.take_share_of_configs(rank, options.jobs, options.peers)
    if options.tuning_ms:
        peers.set_tuning_time(options.tuning_ms, options.peers)
    tuned = itertools.product(a_task_of_each_kind(tasks), [name for name in options.peers if name in peers.TUNED])
    others = [name for name in options.peers if name not in (*peers.TUNED, *peers.TUNED_BY_COMPILER)]
    share = tasks[rank::options.jobs]
    for (shape, (name, count)), maker in [
            *itertools.product(share, ["ours"]), *tuned, *itertools.product(share, others)]:
        hold(options.pause)
        torch._dynamo.reset()
        try:
            X = torch.randn(shape, device=polar.DEVICE, dtype=torch.bfloat16)
            makers(package, package.steps(name, count), name, count, options)[maker]()(X)
        except Exception:  # the note of its row says why
            continue
        finally:
            X = None
            torch.cuda.empty_cache()


def a_task_of_each_kind(tasks: list[tuple]) -> list[tuple]:
    """The task of the least work for each kind of stack. Triton compiles a kernel anew where a size or a stride ceases
    to be a multiple of 16, and where other strides are 1, as in tall matrices.
    """
    found = {}
    for task in sorted(tasks, key=lambda task: math.prod(task[0]) * min(task[0][1:])):
        _, rows, cols = task[0]
        multiples = tuple(size % 16 == 0 for size in (rows, cols, rows * cols, min(rows, cols) ** 2))
        found.setdefault((rows > cols, *multiples), task)
    return list(found.values())


# The page


def known_rows(results: Path) -> list[dict[str, str]]:
    """The timed rows of all packages on GPUs, dated, in the order of the tables."""
    found, dated = [], dates()
    for row in read(results / "polar.csv"):
        if not row["spectrum"] and row["algorithm"] not in ("product", "matmul"):
            found.append(row | {"set": "polar_express", "steps": "5", "error": row["error_fp64"]})
    found += [row for row in read(results / "schedules.csv") if row["what"] == "peers"]
    if (results / "polar_page.csv").exists():
        found += read(results / "polar_page.csv")
    return [row | {"date": row.get("date") or dated.get(row["commit"], ""), "memory_mib": row.get("memory_mib", "")}
            for row in found if row["median_ms"] and row["gpu"] != "CPU"]


def page(rows: list[dict[str, str]]) -> dict[str, list[str]]:
    """The parts of the page: a line for each GPU, schedule and package, and the packages that lack rows."""
    heads = ("date", "GPU", "steps", "package", "stacks", "time / ours", "least, most", "ours slower at", "error, ours",
             "memory / ours", "commit")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    by_commit = {(gpu, steps, name): {} for gpu in {row["gpu"] for row in rows} for name, steps in PUBLISHED}
    ours = {}
    for row in rows:
        stack = tuple(int(row[key]) for key in ("n", "rows", "cols"))
        key, about = (row["gpu"], int(row["steps"]), row["set"]), (row["commit"], row["run"])
        if row["implementation"] == "ours":  # above those that took turns with it
            ours[key, about, stack] = row
        elif (key, about, stack) in ours:
            found = by_commit.setdefault(key, {}).setdefault(row["implementation"], {}).setdefault(about, {})
            found[stack] = ours[key, about, stack], row
    lacking = defaultdict(list)
    for key, packages in sorted(by_commit.items()):
        for peer in peers.POLAR:
            pairs = packages.get(peer, {})
            # Graphs before calls; most stacks, then the newest: rows of some stacks do not displace those of all
            about = max(pairs, default=None, key=lambda about: (
                about[1] == "graph", len(pairs[about]), newest(pairs[about].values())))
            if about:
                lines.append(line(key, peer, about, list(pairs[about].values())))
            elif (key[2], key[1]) in PUBLISHED:
                lacking[f"{key[0]}, {key[1]} steps"].append(peer)
    missing = [f"- {where}: {', '.join(names)}." for where, names in lacking.items()]
    return {"table": lines, "missing rows": missing or ["None."]}


def newest(pairs: Iterable[tuple[dict, dict]]) -> str:
    """The last date of a package's rows, each of which comes with ours. Rows of one commit can be of several days."""
    return max(row["date"] for _, row in pairs)


def line(key: tuple, peer: str, about: tuple[str, str], pairs: list[tuple[dict, dict]]) -> str:
    """One line of the table: a package beside ours at one commit. `about`: commit, and what was timed."""
    ratios = [float(row["median_ms"]) / float(ours["median_ms"]) for ours, row in pairs]
    memory = [float(row["memory_mib"]) / float(ours["memory_mib"]) for ours, row in pairs
              if float(row["memory_mib"] or 0) and float(ours["memory_mib"] or 0)]
    errors = [statistics.median(float(row["error"]) for row in side if row["error"]) for side in zip(*pairs)]
    version = pairs[-1][1]["version"]
    slower = sum(ratio < 0.99 for ratio in ratios)
    cells = (newest(pairs), key[0].replace("NVIDIA ", "").replace(" 80GB HBM3", ""), f"{key[1]}, {key[2]}",
             f"{peer}{f' ({version})' if version else ''}{', called' * (about[1] != 'graph')}", str(len(pairs)),
             f"{geometric_mean(ratios):.2f}",
             f"{min(ratios):.2f}, {max(ratios):.2f}", str(slower), f"{errors[1]:.1e}, {errors[0]:.1e}",
             f"{geometric_mean(memory):.2f}" if memory else "", about[0])
    return f"| {' | '.join(cells)} |"


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.mean(map(math.log, values)))


if __name__ == "__main__":
    main()

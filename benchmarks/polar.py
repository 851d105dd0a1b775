"""Time and error of `orthogonalize` and of X X^T on one GPU, beside other packages; one CSV row for each measurement.

    make build && python benchmarks/polar.py --rows --products --grid --out polar.csv
    python benchmarks/plot.py polar.csv --out figures

Inputs are normal, bf16, fresh for each round. All competitors of a shape take turns in short bursts with a rest between
them. `graph`: replays of one captured call; `eager`: calls one after another, host_us and launches are those of a call.
The error is that of the last matrix against the same polynomials in fp64. A missing peer leaves its fields empty, and
the note says why. tflops_needed counts a symmetric result once; tflops_dense counts 2 n^2 K. With --grid the compilers
of the peers take most of the time: --jobs 12 runs them beforehand, side by side, into their caches on disk.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp
from kernels import get_kernel

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import peers  # noqa: E402
import shapes  # noqa: E402
from race import captured, race  # noqa: E402
from rows import add_output, append  # noqa: E402
from step import triton_version  # noqa: E402

from tests.spectra import KINDS, spectrum  # noqa: E402

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={Path(__file__).resolve().parents[1]}")

COLUMNS = ("commit gpu implementation algorithm n rows cols dtype run median_ms p20_ms p80_ms error_fp64 torch triton "
           "tflops_needed tflops_dense host_us launches host_us_per_launch spectrum version note").split()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS = ("graph", "eager") if DEVICE == "cuda" else ("eager",)


def main() -> None:
    options = arguments()
    if options.jobs and DEVICE == "cuda":
        mp.spawn(compile_all, (options,), nprocs=options.jobs)
    package = get_kernel("org/optimizer", version=1).__name__
    polar, gram = (
        importlib.import_module(f"{package}.{name}") for name in ("newton_schulz.orthogonalize", "kernels.matmul.api")
    )
    end, rows, left = time.monotonic() + options.seconds, [], []
    for measure, shape in tasks(options):
        if time.monotonic() > end:
            left.append(shape)
            continue
        for values in measure(polar, gram, shape, options):
            rows.append(values | {"commit": options.commit})
            append(options.out, COLUMNS, rows[-1:])
            print(" ".join(f"{values[key]}" for key in COLUMNS[2:13]), values["note"], flush=True)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    print(summary(rows) + (f"; not measured within {options.seconds} s: {left}" if left else ""))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="the shapes of the targets")
    parser.add_argument("--grid", action="store_true", help=f"{len(shapes.GRID)} other shapes")
    parser.add_argument("--products", action="store_true", help="X X^T alone")
    parser.add_argument("--spectra", action="store_true", help="errors over spectra, untimed")
    parser.add_argument("--shapes", nargs="+", default=[], type=shapes.stack_of, help="stacks NxRxC: 12x768x3072")
    parser.add_argument("--peers", nargs="*", default=["torch.compile", "gns", "dion", "cublas", "quack"],
                        choices=[*peers.POLAR, *peers.PRODUCTS], help="which other packages")
    parser.add_argument("--presets", nargs="*", default=[], help="coefficient sets to time beside the default's")
    parser.add_argument("--seconds", type=float, default=480, help="begin no shape after this time")
    parser.add_argument("--rounds", type=int, default=5, help="bursts of each competitor")
    parser.add_argument("--burst-ms", type=float, default=5.0, help="about how long a burst lasts")
    parser.add_argument("--rest-ms", type=float, default=10.0, help="how long the GPU rests before each burst")
    parser.add_argument("--jobs", type=int, default=0,
                        help="processes that fill the compilers' caches beforehand, where there is a GPU")
    add_output(parser, COLUMNS, "polar.csv")
    options = parser.parse_args()
    if not any((options.rows, options.grid, options.products, options.spectra, options.shapes)):
        options.rows = True
    return options


def tasks(options) -> list:
    """(function, shape) of everything that was asked for; what the rest is judged by comes first."""
    small = DEVICE == "cpu"
    stacks = options.shapes + (shapes.ROWS if options.rows and not small else shapes.TINY if options.rows else [])
    found = [(rates, s) for s in shapes.MATMULS if not small]
    found += [(stack, s) for s in stacks]
    found += [(product, s) for s in ((2, 16, 40),) if options.products and small]
    found += [(product, s) for s in shapes.PRODUCTS if options.products and not small]
    found += [(errors, kind) for kind in KINDS if options.spectra]
    return found + [(stack, s) for s in shapes.GRID if options.grid]


def module(polar, name=""):
    """A module of the package that `polar` is a module of; the package itself without a name."""
    return importlib.import_module(polar.__package__.partition(".")[0] + name)


def polar_calls(polar, steps, options):
    """name -> function that makes a function of a stack; all with the coefficients of our default."""
    made = {"ours": lambda: module(polar).orthogonalize}
    for name in options.peers:
        if name in peers.POLAR:
            made[name] = lambda maker=peers.POLAR[name]: maker(steps)
    return made


def stack(polar, gram, shape, options):
    """Yield the rows of one stack: every implementation, as a graph and eager."""
    torch._dynamo.reset()
    steps, cost = polar.steps_of("polar_express", 5), module(polar, ".newton_schulz.method").cost
    X = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    exact = composed(X[-1], steps)
    flops = shape[0] * cost(*shape[1:], steps)
    contest = Contest(lambda: X.normal_(), options)
    for name, make in polar_calls(polar, steps, options).items():
        contest.enter(name, make, lambda f: lambda: f(X), lambda out: distance(out[-1], exact))
    orthogonalize = module(polar).orthogonalize
    for name in options.presets:
        contest.enter(f"ours {name}", lambda name=name: lambda X: orthogonalize(X, name), lambda f: lambda: f(X),
                      lambda out, name=name: distance(out[-1], composed(X[-1], polar.steps_of(name))))
    for name, run, result in contest.results():
        if name.startswith("ours "):
            steps = polar.steps_of(name.removeprefix("ours "))
            flops = shape[0] * cost(*shape[1:], steps)
        yield row(name, algorithm(polar, name, X, steps), shape, run, result, needed=flops)


def product(polar, gram, shape, options):
    """Yield the rows of X X^T (N, n, K)."""
    N, n, K = shape
    X = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    exact = X[-1].double() @ X[-1].double().mT
    contest = Contest(lambda: X.normal_(), options)
    makers = {"ours": lambda: from_tape(polar, gram)} | {k: m for k, m in peers.PRODUCTS.items() if k in options.peers}
    for name, make in makers.items():
        out = torch.empty((N, n, n), device=DEVICE, dtype=X.dtype)
        contest.enter(name, make, lambda f, out=out: lambda: (f(X, out), out)[1],
                      lambda out: distance(out[-1], exact))
    for name, run, result in contest.results():
        yield row(name, "product", shape, run, result, needed=N * n * n * K, dense=2 * N * n * n * K)


def from_tape(polar, gram):
    """X X^T as `orthogonalize` launches it from the second call of a kind on."""
    def call(X, out):
        polar.replay_or_record(("X X^T", *polar.launch_key(X, out)), (), (X, out), functools.partial(gram.gram, X, out))
    return call


def rates(polar, gram, shape, options):
    """Yield the rows of an ordinary product (n, K) x (K, n) by cuBLAS."""
    _, n, K = shape
    A, B = torch.randn(n, K, device=DEVICE).bfloat16(), torch.randn(K, n, device=DEVICE).bfloat16()
    out = torch.empty(n, n, device=DEVICE, dtype=A.dtype)
    contest = Contest(lambda: (A.normal_(), B.normal_()), options)
    contest.enter("cublas", lambda: torch.mm, lambda f: lambda: f(A, B, out=out), lambda out: "")
    for name, run, result in contest.results():
        yield row(name, "matmul", shape, run, result, needed=2 * n * n * K, dense=2 * n * n * K)


def errors(polar, gram, kind, options):
    """Yield the errors of all implementations on one kind of matrix; nothing is timed."""
    torch._dynamo.reset()
    torch.manual_seed(KINDS.index(kind))
    steps = polar.steps_of("polar_express", 5)
    shape = (1, 512, 2048) if DEVICE == "cuda" else (1, 24, 96)
    X = spectrum(kind, *shape[1:])[None].to(DEVICE, torch.float32)
    exact = composed(X[-1], steps)
    for name, make in polar_calls(polar, steps, options).items():
        result = Result()
        try:
            result.error = distance(make()(X)[-1], exact)
        except Exception as why:  # whatever a peer raises, the others are measured
            result.note = type(why).__name__
        values = row(name, algorithm(polar, name, X, steps), shape, "error", result)
        yield values | {"dtype": "fp32", "spectrum": kind}


class Result:
    """What was found out about one implementation in one run; what was not stays None."""

    def __init__(self):
        self.times = self.error = None
        self.launches = self.note = ""


class Contest:
    """Competitors on one input: entered one by one, timed together. `runs`: "graph", "eager" or both."""

    def __init__(self, refill, options, runs=RUNS):
        self.refill, self.options, self.runs, self.calls, self.found = refill, options, runs, {}, {}

    def enter(self, name, make, bind, judge) -> None:
        """make() returns a function, bind(function) a call without arguments, judge(its result) the error."""
        for run in self.runs:
            self.found[name, run] = Result()
        try:
            call = bind(make())
            error = judge(call())
            replay, launches = captured(call) if DEVICE == "cuda" and "graph" in self.runs else (None, "")
        except Exception as why:  # whatever a peer raises, the others are measured
            for run in self.runs:
                self.found[name, run].note = type(why).__name__
            return
        for run in self.runs:
            self.found[name, run].error, self.found[name, run].launches = error, launches
            self.calls[name, run] = call if run == "eager" else replay

    def results(self):
        """Time everybody; yield (name, run, result)."""
        options = self.options
        if self.calls:
            times = race(self.calls, self.refill, options.rounds, options.burst_ms, options.rest_ms)
            for key, measured in times.items():
                self.found[key].times = measured
        for (name, run), result in self.found.items():
            yield name, run, result


def row(name, form, shape, run, result, needed=None, dense=None) -> dict:
    """One line of the CSV."""
    values = dict.fromkeys(COLUMNS, "") | dict(
        gpu=torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU", implementation=name, algorithm=form,
        n=shape[0], rows=shape[1], cols=shape[2], dtype="bf16", run=run, torch=torch.__version__,
        triton=triton_version(), version=peers.version(name), note=result.note)
    if result.error not in (None, ""):
        values["error_fp64"] = f"{result.error:.2e}"
    if result.times:
        median, low, high = result.times.summary()
        values |= dict(median_ms=round(median, 5), p20_ms=round(low, 5), p80_ms=round(high, 5))
        values |= {key: round(count / median / 1e9, 1) for key, count in
                   (("tflops_needed", needed), ("tflops_dense", dense)) if count}
        values["launches"] = result.launches
        if run == "eager":
            host_us = statistics.median(result.times.host_us)
            values["host_us"] = round(host_us, 1)
            values["host_us_per_launch"] = round(host_us / result.launches, 2) if result.launches else ""
    return values


def algorithm(polar, name, X, steps) -> str:
    """Which form of the iteration an implementation takes."""
    n, m = sorted(X.shape[1:])
    if name == "gns":
        return "gram" if n < m else "standard"
    if not name.startswith("ours"):
        return "standard"
    on_chip = module(polar, ".kernels.onchip.polar")
    if on_chip.supports(X if X.shape[1] == n else X.mT, torch.float16) and not steps.aol:
        return "on chip"
    return "standard" if polar.restart_interval(n, m, steps) == 1 else "gram"


def composed(X, steps) -> torch.Tensor:
    """The composed polynomials of one matrix, in fp64."""
    tall = X.shape[0] > X.shape[1]
    X = X.double().mT if tall else X.double()
    X = X / X.norm()
    if steps.aol:
        X = X / (X @ X.mT).abs().sum(dim=1, keepdim=True).sqrt()
    for a, b, c in steps.triples:
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return X.mT if tall else X


def distance(out, exact) -> float:
    """The relative error in the Frobenius norm."""
    return ((out.double() - exact).norm() / exact.norm()).item()


def compile_all(rank, options) -> None:
    """Call everything once on every jobs-th shape, so that the compilers' caches on disk know it."""
    package = get_kernel("org/optimizer", version=1).__name__
    polar = importlib.import_module(f"{package}.newton_schulz.orthogonalize")
    steps = polar.steps_of("polar_express", 5)
    stacks = [shape for measure, shape in tasks(options) if measure is stack]
    for shape in stacks[rank::options.jobs]:
        torch._dynamo.reset()
        for make in polar_calls(polar, steps, options).values():
            try:
                make()(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16))
            except Exception:  # it is told when it is measured
                continue
        torch.cuda.empty_cache()


def summary(rows) -> str:
    """How we stand: the geometric mean against each peer, and where the best of them is faster."""
    ms = {}
    for r in rows:
        if r["median_ms"] != "" and r["algorithm"] != "matmul":
            key = (r["algorithm"] == "product", r["run"], r["n"], r["rows"], r["cols"])
            ms.setdefault(key, {})[r["implementation"]] = r["median_ms"]
    lines = []
    for run in RUNS:
        pairs = [(key, times) for key, times in ms.items() if key[1] == run and "ours" in times]
        for peer in sorted({name for _, times in pairs for name in times} - {"ours"}):
            ratios = [math.log(times[peer] / times["ours"]) for _, times in pairs if peer in times]
            lines.append(f"{run}: {math.exp(statistics.mean(ratios)):.2f}x faster than {peer} ({len(ratios)} shapes)")
        best = [(key, times["ours"], min(ms for name, ms in times.items() if not name.startswith("ours ")))
                for key, times in pairs]
        slower = ["{}x{}x{}".format(*key[2:]) for key, ms_ours, ms_best in best if ms_ours > 1.01 * ms_best]
        lines.append(f"{run}: slower than the best at {', '.join(slower) or 'no shape'}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

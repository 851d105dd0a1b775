"""Restart intervals of long Newton-Schulz schedules: their errors and times; and 5, 8 and 10 steps beside other
packages. One CSV row for each measurement.

    make build && python benchmarks/schedules.py errors times peers
    ... errors --schedules polar_express:8 deepseek_v4:10 --shapes 512x2048
    ... times --stacks 2x3072x8192
    ... errors times --schedules polar_express:5 --cuts 3+2 2+3 1+2+2
    ... errors --cuts standard taken                                     1+1+... and the cut that the package takes
    ... errors --momenta momenta.pt --schedules polar_express:5    of a training, {name: matrix} as torch.save writes it
    ... peers --peers torch.compile gns dion --jobs 8

A cut is the steps of each restart interval, "3+5"; "1+1+1" is the standard iteration. "errors": cuts of a schedule over
all spectra of tests/spectra.py, over matrices with two to four levels of singular values ("levels"), over noise plus
one direction ("line"), and over 2 to 24 parallel rows with most of the norm above a flat floor ("parallel"), relative
to the same polynomials in fp64: a column for each kind, the largest of its matrices, and the largest of all.
`largest` is the largest singular value of a result, divided by that of the exact result, to 2e-4; in rows of 49e4b58,
the ratio of their Schatten norms of order 64. "times": the standard
iteration and cuts with at most two, at most three and more steps, in turns by CUDA graph; the note says which one the
package takes. "peers": the package beside torch.compile, gram-newton-schulz and Dion, with the same triples for all.
Products of the package are in fp16, inputs in bf16 where nothing else is said. A missing peer leaves its fields empty,
and the note says why.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.multiprocessing as mp

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import peers  # noqa: E402
import polar as single  # noqa: E402  benchmarks/polar.py
from kernels import get_kernel  # noqa: E402
from race import captured, race  # noqa: E402
from rows import add_output, append  # noqa: E402
from shapes import stack_of  # noqa: E402
from step import triton_version  # noqa: E402

from tests.spectra import KINDS, spectrum  # noqa: E402

MORE_KINDS = "levels", "line", "parallel", "momentum"
COLUMNS = ("commit gpu what set steps implementation cut products n rows cols dtype run median_ms p20_ms p80_ms "
           "error largest torch triton version note").split() + [f"error {kind}" for kind in (*KINDS, *MORE_KINDS)]
DEVICE = single.DEVICE
LONGEST = 8  # steps of an interval that is tried
SCHEDULES = [("polar_express", count) for count in range(6, 13)] + [("jordan", count) for count in range(6, 13)] + [
    ("deepseek_v4", 10), ("anvil", 6)]
STACKS = [(28, 2048, 2048), (4, 4096, 4096), (2, 3072, 8192), (12, 768, 3072), (8, 2048, 6144)]
PUBLISHED = [("polar_express", 5), ("qwen3_8", 8), ("deepseek_v4", 10)]
INPUTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    options = arguments()
    if options.jobs and DEVICE == "cuda" and "peers" in options.what:
        mp.spawn(compile_all, (options,), nprocs=options.jobs)
    package = Package()
    for what in options.what:
        for row in {"errors": errors, "times": times, "peers": beside_peers}[what](package, options):
            values = dict.fromkeys(COLUMNS, "") | {
                "commit": options.commit, "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU",
                "what": what, "torch": torch.__version__, "triton": triton_version()} | row
            append(options.out, COLUMNS, [values])
            print(*(values[key] for key in COLUMNS[3:13] + ["median_ms", "error", "note"]), flush=True)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["errors", "times", "peers"])
    parser.add_argument("--schedules", nargs="+", type=schedule_of, default=None, help="SET:STEPS")
    parser.add_argument("--shapes", nargs="+", type=lambda text: stack_of(f"1x{text}")[1:],
                        default=[(256, 1024), (512, 2048)], help="of errors, NxM with N <= M")
    parser.add_argument("--matrices", type=int, default=4, help="of each spectrum; 16 times as many levels and lines")
    parser.add_argument("--stacks", nargs="+", type=stack_of, default=STACKS, help="of times, NxRxC")
    parser.add_argument("--cuts", nargs="+", type=cut_of, default=None, help="of errors and times, in place of many")
    parser.add_argument("--momenta", default=None, help="of errors, a file {name: matrix} in place of the spectra")
    parser.add_argument("--peers", nargs="*", default=list(peers.POLAR), choices=list(peers.POLAR))
    parser.add_argument("--rounds", type=int, default=5, help="bursts of each competitor")
    parser.add_argument("--burst-ms", type=float, default=5.0, help="about how long a burst lasts")
    parser.add_argument("--rest-ms", type=float, default=10.0, help="how long the GPU rests before each burst")
    parser.add_argument("--jobs", type=int, default=0, help="processes that fill the compilers' caches beforehand")
    add_output(parser, COLUMNS, "schedules.csv")
    return parser.parse_args()


def schedule_of(text: str) -> tuple[str, int]:
    """The `type` of an option: "polar_express:8" is ("polar_express", 8)."""
    name, _, count = text.partition(":")
    if not count.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no SET:STEPS, as in polar_express:8")
    return name, int(count)


def cut_of(text: str) -> tuple[int, ...] | str:
    """The `type` of an option: "3+2" is (3, 2); "standard" and "taken" stay."""
    parts = text.split("+")
    if text in ("standard", "taken"):
        return text
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text} is no cut, as in 3+2, nor standard or taken")
    return tuple(map(int, parts))


class Package:
    """The package, made to take given cuts."""

    def __init__(self):
        self.root = get_kernel("org/optimizer", version=1)
        self.polar, self.method, self.coefficients = (
            single.module(self.root, f".newton_schulz.{name}") for name in ("orthogonalize", "method", "coefficients"))
        Steps, chosen = self.coefficients.Steps, self.polar.restart_interval

        @dataclass(frozen=True)
        class CutSteps(Steps):
            """Steps with a given cut."""

            cut: tuple[int, ...] = ()

            def intervals(self, *about, **more):
                ends = [0, *itertools.accumulate(self.cut)]
                return tuple(self.triples[first:last] for first, last in itertools.pairwise(ends))

        def restart_interval(n, m, steps, *about):
            cut = getattr(steps, "cut", None)
            return chosen(n, m, steps, *about) if cut is None else 1 if max(cut) == 1 else self.coefficients.NO_RESTART

        self.polar.restart_interval = restart_interval
        self.with_cut = lambda steps, cut: CutSteps(steps.triples, steps.aol, cut)

    def steps(self, name, count):
        return self.coefficients.steps_of(name, count)

    def cut(self, steps, n, m, most=None):
        """The lengths of the intervals that the package takes, with at most `most` steps each if given."""
        most = most or self.method.restart_interval(n, m, steps)
        return tuple(map(len, steps.intervals(torch.float16, most, n)))

    def products(self, steps, cut):
        """Products with long matrices + n x n products of a cut."""
        counts = self.method._launches.__wrapped__(self.with_cut(steps, cut), torch.float16, max(cut), 256)
        return "{}+{}".format(counts["gram"] + counts["product"], counts["symmetric"])

    def orthogonalize(self, X, steps, into=None):
        out = torch.empty_like(X) if into is None else into
        self.polar.orthogonalize_([X], steps, into=[out])
        return out


def errors(package, options):
    """Yield a row for each shape, schedule, input dtype and cut."""
    shapes = sorted(momenta_of(options.momenta)) if options.momenta else options.shapes
    for n, m in shapes:
        if options.momenta:
            matrices = torch.stack(momenta_of(options.momenta)[n, m]).to(DEVICE)
            kinds = {"momentum": slice(None)}
        else:
            kinds, matrices = matrices_of(n, m, options.matrices)
        for (name, count), (label, dtype) in itertools.product(options.schedules or SCHEDULES, INPUTS.items()):
            steps, X = package.steps(name, count), matrices.to(dtype)
            exact = composed(X, steps)
            sizes, largest_exact = exact.norm(dim=(1, 2)), largest_values(exact)
            cuts = options.cuts
            for cut in given_cuts(package, steps, n, m, cuts) if cuts else candidates(package, steps, n, m):
                O = package.orthogonalize(X, package.with_cut(steps, cut))
                found = ((O.double() - exact).norm(dim=(1, 2)) / sizes).nan_to_num(float("inf")).cpu()
                by_kind = {f"error {kind}": f"{found[place].max().item():.2e}" for kind, place in kinds.items()}
                growth = (largest_values(O) / largest_exact).nan_to_num(float("inf")).max().item()
                yield by_kind | dict(set=name, steps=count, implementation="ours", cut=text(cut), n=len(X), rows=n,
                                     products=package.products(steps, cut), cols=m, dtype=label,
                                     error=f"{found.max().item():.2e}", largest=f"{growth:.4f}")


def given_cuts(package, steps, n, m, cuts) -> list[tuple[int, ...]]:
    """The cuts of --cuts that have as many steps as `steps`. SystemExit if none has."""
    count = len(steps.triples)
    named = {"standard": lambda: (1,) * count, "taken": lambda: package.cut(steps, n, m)}
    found = [named[cut]() if cut in named else cut for cut in cuts]
    found = [*dict.fromkeys(cut for cut in found if sum(cut) == count)]
    if not found:
        raise SystemExit(f"--cuts has no cut of {count} steps")
    return found


def largest_values(O):
    """The largest singular value of each of the matrices (N, n, m), at most 1e-4 too large; inf for one that is not
    finite. The norm of a power of O O^T lies between that power of the largest eigenvalue and sqrt(n) times that.
    """
    finite = O.isfinite().all(dim=2).all(dim=1)
    X = torch.where(finite[:, None, None], O.double(), 0.0)
    power, logarithm = X @ X.mT, 0.0
    for doubling in range(16):
        size = power.norm(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(power.dtype).tiny)
        logarithm = logarithm + size.log() / 2**doubling
        power = (power / size) @ (power / size)
    values = (logarithm.flatten() / 2).exp()
    return torch.where(finite, values, float("inf"))


@functools.cache
def momenta_of(path):
    """{(n, m): [matrix (n, m) in fp32, with elements of at most 1]} of a file, n <= m."""
    found = {}
    for matrix in torch.load(path, map_location="cpu").values():
        matrix = matrix.float() if matrix.shape[0] <= matrix.shape[1] else matrix.float().mT
        found.setdefault(tuple(matrix.shape), []).append(matrix / matrix.abs().max())
    return found


def candidates(package, steps, n, m) -> list[tuple[int, ...]]:
    """The standard iteration, the cut that the package takes for long matrices, cuts with at most three steps, as equal
    as possible, and all others of two or more steps with one interval less than those, or with as few as the package's.
    """
    total = len(steps.triples)
    taken = package.cut(steps, n, 4 * n, package.coefficients.NO_RESTART)
    found = [(1,) * total, taken, package.cut(steps, n, 4 * n, 3)]
    for count, rounded in ((-(-total // 3), math.ceil), (-(-(total + 1) // 3), math.floor)):
        ends = [rounded(total * i / count) for i in range(count + 1)]
        found.append(tuple(last - first for first, last in itertools.pairwise(ends)))
    for count in {len(taken), len(found[3]) - 1}:
        found += [cut for cut in itertools.product(range(2, LONGEST + 1), repeat=count)
                  if sum(cut) == total and cut[0] <= 3]
    return [*dict.fromkeys(found)]


def matrices_of(n, m, count):
    """({kind: slice}, matrices (N, n, m) in fp32), with elements of at most 1."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        parts = {kind: torch.stack([spectrum(kind, n, m) for _ in range(count)]) for kind in KINDS}
        parts["levels"] = torch.stack([of_levels(n, m) for _ in range(16 * count)])
        noise = torch.randn(16 * count, n, m, dtype=torch.float64) / (n**0.5 + m**0.5)
        ratios = torch.logspace(0, 2.5, 16 * count, dtype=torch.float64)[:, None, None]
        parts["line"] = noise + ratios / (n * m) ** 0.5
        parts["parallel"] = torch.stack([of_parallel_rows(n, m) for _ in range(16 * count)])
    ends = list(itertools.accumulate(map(len, parts.values())))
    kinds = {kind: slice(end - len(part), end) for (kind, part), end in zip(parts.items(), ends)}
    return kinds, torch.cat([part / part.abs().amax(dim=(1, 2), keepdim=True) for part in parts.values()]).float()


def of_levels(n, m):
    """A matrix with two to four levels of singular values from 1 to 1e-4, in fp64."""
    levels = int(torch.randint(2, 5, (), device="cpu"))
    heights = torch.cat([torch.ones(1), 10 ** (-4 * torch.rand(levels - 1))]).double()
    ends = (n ** torch.rand(levels - 1)).sort().values  # few large values are as likely as many
    values = heights[(torch.arange(n)[:, None] >= ends).sum(dim=1)]
    left, right = (torch.linalg.qr(torch.randn(side, n, dtype=torch.float64))[0] for side in (n, m))
    return (left * values) @ right.mT


def of_parallel_rows(n, m):
    """A matrix of 2 to 24 almost parallel rows with most of the norm over a flat floor, in fp64."""
    floor = 10 ** -float(1.1 + 0.8 * torch.rand((), device="cpu"))
    X = floor * torch.linalg.qr(torch.randn(m, n, dtype=torch.float64))[0].mT
    count = int(torch.randint(2, min(25, n + 1), (), device="cpu"))
    weights = 1 + 0.1 * torch.randn(count, 1, dtype=torch.float64)
    line = torch.randn(m, dtype=torch.float64)
    X[:count] += weights / weights.norm() * line / line.norm()
    return X


def composed(X, steps):
    """The polynomials of matrices (N, n, m), n <= m, in fp64."""
    X = X.double()
    X = X / X.norm(dim=(1, 2), keepdim=True)
    for a, b, c in steps.triples:
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return X


def text(cut) -> str:
    return "+".join(map(str, cut))


def times(package, options):
    """Yield a row for each schedule, stack and cut."""
    for shape, (name, count) in itertools.product(options.stacks, options.schedules or SCHEDULES):
        steps, X = package.steps(name, count), torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        n, m = sorted(shape[1:])
        cuts = {(1,) * count: None}
        cuts |= {package.cut(steps, n, m, most): None for most in (2, 3, package.coefficients.NO_RESTART)}
        cuts = dict.fromkeys(given_cuts(package, steps, n, m, options.cuts)) if options.cuts else cuts
        calls = {}
        for cut in cuts:
            call = functools.partial(package.orthogonalize, X, package.with_cut(steps, cut), torch.empty_like(X))
            call()
            calls[cut] = captured(call)[0] if DEVICE == "cuda" else call
        found = race(calls, X.normal_, options.rounds, options.burst_ms, options.rest_ms)
        taken = package.cut(steps, n, m)
        for cut in cuts:
            median, p20, p80 = (round(ms, 5) for ms in found[cut].summary())
            yield dict(set=name, steps=count, implementation="ours", cut=text(cut), n=shape[0], rows=shape[1],
                       products=package.products(steps, cut), cols=shape[2], dtype="bf16",
                       run="graph" if DEVICE == "cuda" else "eager", median_ms=median, p20_ms=p20, p80_ms=p80,
                       note="taken" if cut == taken else "")


def beside_peers(package, options):
    """Yield a row for each schedule, stack, implementation and run."""
    for shape, (name, count) in itertools.product(options.stacks, options.schedules or PUBLISHED):
        torch._dynamo.reset()
        steps, X = package.steps(name, count), torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        exact, (n, m) = single.composed(X[-1], steps), sorted(shape[1:])
        contest = single.Contest(X.normal_, options)
        for maker, make in makers(package, steps, name, count, options).items():
            contest.enter(maker, make, lambda f, X=X: lambda: f(X), functools.partial(error_of_last, exact))
        for maker, run, result in contest.results():
            cut = text(package.cut(steps, n, m)) if maker == "ours" else ""
            row = single.row(maker, "", shape, run, result)
            yield {key: row[key] for key in row if key in COLUMNS and key not in ("commit", "gpu", "spectrum")} | dict(
                set=name, steps=count, cut=cut, error=row["error_fp64"])


def error_of_last(exact, out) -> float:
    return single.distance(out[-1], exact)


def makers(package, steps, name, count, options):
    """{name: function that makes a function of a stack}."""
    ours = {"ours": lambda: lambda X: package.root.orthogonalize(X, ns_coefficients=name, ns_steps=count)}
    return ours | {peer: lambda maker=peers.POLAR[peer]: maker(steps) for peer in options.peers}


def compile_all(rank, options) -> None:
    """Call the peers once on every jobs-th stack and schedule, so that the compilers' caches on disk know them. The
    package's own kernels are the same for all, and would be compiled by every process.
    """
    package = Package()
    tasks = [*itertools.product(options.stacks, options.schedules or PUBLISHED)]
    for shape, (name, count) in tasks[rank::options.jobs]:
        torch._dynamo.reset()
        for peer in options.peers:
            try:
                peers.POLAR[peer](package.steps(name, count))(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16))
            except Exception:  # it is told when it is measured
                continue
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""Losses of a GPT trained with several optimizers, with learning rates swept alike. One CSV row for each run.

    make build && python benchmarks/convergence.py --size 30m --out convergence.csv
    ... --optimizers muon normuon           some optimizers; AdamW always trains, for the rates of embeddings and head
    ... --seconds 500                       begin no run that would not end in 500 s; the next call continues the sweep
    ... --queue FILE                        several sweeps: the options of one in each line, on top of those given
    ... --pause FILE                        begin no run while FILE exists; FILE.idle exists while none is running then
    ... --show                              print the table of the rows so far, and train nothing
    ... --plan                              print how many runs are missing for each optimizer, and train nothing
    ... --path keller_jordan=DIR dion=DIR   checkouts of other packages that are not installed

Tokens are bytes, weights are fp32, compute is bf16 by autocast. All runs of a size have the same text in the same
order for a seed, the same warm-up and linear decay to 0, weight decay 0.1 on matrices, embeddings and head, and
gradients clipped to norm 1. Each GPU trains one run at a time; without a GPU one process trains on the CPU. A GPU
takes the first run that can begin, of the first sweep of the queue that has one. So GPUs that the searches of the first
sweep leave idle train runs of later sweeps.

Weights in bf16. `split16` and `bf16_weights_stochastic` keep the hidden matrices in bf16; embeddings, head and norms
stay in fp32. Autocast rounds fp32 matrices to bf16 for every product, so the products are those of the other runs.
The gradients of these matrices are bf16: their norms and the clipped gradients are rounded to bf16, where other runs
have fp32. `split16` begins with the fp32 weights of the other runs, `bf16_weights_stochastic` with them rounded.

Other packages. `keller` is SingleDeviceMuon of KellerJordan/Muon, `dion_normuon` is NorMuon of microsoft/dion, in
its default form without Triton. Both have AdamW of torch for the rest. Arguments are those of `muon` and `normuon` as
far as the packages have them: momentum 0.95, Nesterov, and with Dion the factor 0.2 sqrt(max(R, C)). Keller Jordan's
factor is sqrt(max(1, R/C)). Its rates begin where square and tall matrices of width 512 move as far as with `muon`,
and its weight decay is smaller by the same ratio, so that rate times decay is equal. A package that is neither
installed nor named by --path is left out, and a line says so.

Rates. AdamW has three, of matrices (and norms), of embeddings and of the head. They are searched by factors of 2, with
seed 0: first all together, then each by itself, in rounds until a round changes nothing. With 124m they are searched
all together only, at the ratios that were best with 30m on the text "packages". A rate counts as found once both of
its neighbours are worse. All further optimizers take AdamW's rates for embeddings and head, and sweep the rate of
matrices likewise: Muon from its first rate, the others from where Muon's search is then. So AdamW has three swept
rates (124m: one), and every other optimizer one. Rates at which training diverged are halved until a run has a loss.
Optimizers whose step is that of `muon` up to rounding or coefficients take its rate (RATE_OF_MUON). With 30m on
"packages" each of them was swept, and the best rate was that of `muon` for all eight.

Seeds. The best rates train with three seeds, 0 to 2, and `muon` with five, 0 to 4 (124m: three). `torch_muon` also
trains with the best rates of `muon` and the seeds of `muon`, for the comparison of both seed by seed. The table says
the number of seeds.

The table, and the comparison of our Muon with torch's, are those of convergence_table.py.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]
from convergence_table import LOST, RATE_OF_MUON, RATES, table  # noqa: E402
from corpus import VOCABULARY, even_windows, is_heldout, read_corpus, source_files, windows  # noqa: E402
from gpt import GPT  # noqa: E402
from rows import add_output, append, read  # noqa: E402
from trajectories import Missing, Place, alone  # noqa: E402

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={HERE.parent}")

COLUMNS = ("commit gpu size parameters corpus text_mb optimizer lr embed_lr head_lr seed steps tokens heldout_loss "
           "step_ms optimizer_ms peak_mib curve torch").split()
SEEDS = (0, 1, 2)
PARITY_SEEDS = (0, 1, 2, 3, 4)  # of our Muon and torch's, which are compared seed by seed
WARMUP, DECAY, CLIP, BETAS = 0.05, 0.1, 1.0, (0.9, 0.95)
HELDOUT_WINDOWS, EVALUATIONS = 128, 20
LEAST = 2.0**-12  # of an optimizer's first rate: below it, rates of runs that diverged are no longer halved


@dataclass(frozen=True)
class Size:
    """A model and the length of its training."""

    layers: int
    width: int
    heads: int
    batch: int
    seq: int
    steps: int
    rates: tuple[float, float, float] = (2e-3, 2e-3, 2e-3)  # where the search of AdamW's rates begins
    apart: bool = True  # AdamW's rates are also searched each by itself
    first: float = 1.0  # of the other optimizers' first rates
    parity: tuple[int, ...] = PARITY_SEEDS


SIZES = {
    "tiny": Size(1, 64, 2, 4, 32, 8),  # for tests
    "30m": Size(9, 512, 8, 64, 512, 600),
    # As many tokens as 30m, in the same order. A run takes three times as long, so the search is shorter
    "124m": Size(13, 896, 14, 64, 512, 600, rates=(1e-3, 2e-3, 2e-3), apart=False, first=0.5, parity=SEEDS),
}


def main() -> None:
    options = arguments()
    if not (options.show or options.plan):
        Queue([Sweep(part) for part in options.parts], options).run()
    for part in {key_of(part): part for part in options.parts}.values():
        rows = rows_so_far(part)
        if len(options.parts) > 1:
            print(f"\n{' '.join(key_of(part))} steps\n")
        if options.plan:
            print("\n".join(plan(rows, part.optimizers, SIZES[part.size])))
        else:
            print("\n".join(table(rows)) if rows else "no run of this size, text and length has ended")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="30m", help="of the model (default: %(default)s)")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), metavar="NAME",
                        help=f"{', '.join(OPTIMIZERS)} (default: all)")
    parser.add_argument("--steps", type=int, default=None, help="in place of the size's own number")
    parser.add_argument("--data", default=None, help="folder whose *.py files are the text (default: Python's library)")
    parser.add_argument("--corpus", default=None, help="name of the text, for the rows (without --data: stdlib)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run that would end later")
    parser.add_argument("--runs", type=int, default=None, help="end after this number of runs")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--show", action="store_true", help="print the table of --out, and train nothing")
    parser.add_argument("--plan", action="store_true", help="print the runs that --out lacks, and train nothing")
    parser.add_argument("--path", nargs="+", default=[], metavar="NAME=DIR", help="another package's checkout")
    parser.add_argument("--queue", type=Path, default=None, help="file of sweeps, the options of one in each line")
    parser.add_argument("--pause", type=Path, default=None, help="file that holds back new runs while it exists")
    add_output(parser, COLUMNS, "convergence.csv")
    options = parser.parse_args()
    options.folders = {name: Path(folder).resolve() for name, _, folder in (t.partition("=") for t in options.path)}
    known = sorted({kind.peer for kind in OPTIMIZERS.values()} - {""})
    if unknown := sorted(options.folders.keys() - set(known)):
        parser.error(f"--path {unknown[0]}=...: there is no such package here, only {' and '.join(known)}")
    lines = options.queue.read_text().splitlines() if options.queue else [""]
    lines = [line for line in lines if line.strip()] if options.queue else lines
    options.parts = [parser.parse_args(shlex.split(line, comments=True), copy.copy(options)) for line in lines]
    for part in options.parts:
        if part.data and not part.corpus:
            parser.error(f"name the text of --data {part.data} by --corpus")
        part.corpus = part.corpus or "stdlib"
    return options


# Optimizers. Each takes (matrices, rest, lr): `rest` are groups for AdamW, with their own lr. It returns optimizers
# that step one after another.


def adamw(matrices: list[nn.Parameter], rest: list[dict], lr: float) -> list[torch.optim.Optimizer]:
    groups = [{"params": matrices, "lr": lr, "weight_decay": DECAY}, *rest]
    return [torch.optim.AdamW(groups, betas=BETAS, fused=matrices[0].is_cuda)]


def torch_muon(matrices: list[nn.Parameter], rest: list[dict], lr: float) -> list[torch.optim.Optimizer]:
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, betas=BETAS, fused=matrices[0].is_cuda)]


def ours(name: str = "Muon", split: bool = False, averages: torch.dtype | None = None, **keys: object) -> Callable:
    """An optimizer of this package; `split`: queries, keys, values and outputs by heads. `averages`: the `state_dtype`
    of the groups of AdamW.
    """

    def make(matrices: list[nn.Parameter], rest: list[dict], lr: float) -> list[torch.optim.Optimizer]:
        from kernels import get_kernel

        package = get_kernel("org/optimizer", version=1)
        forms = [p.by_heads if split else None for p in matrices]
        groups = [{"params": matrices, "lr": lr, "weight_decay": DECAY, "split": forms}]
        own = {} if averages is None else {"state_dtype": averages}
        groups += [{**group, "use_muon": False, **own} for group in rest]
        for group in groups:
            group["params"] = [(p.path, p) for p in group["params"]]
        keywords = {"adjust_lr_fn": "match_rms_adamw", "adamw_betas": BETAS, **keys}
        return [getattr(package, name)(groups, **keywords)]

    return make


# Optimizers of other packages take (package's class, matrices, rest, lr).


def keller(Muon: type, matrices: list[nn.Parameter], rest: list[dict], lr: float) -> list[torch.optim.Optimizer]:
    decay = DECAY * OPTIMIZERS["muon"].lr / OPTIMIZERS["keller"].lr  # rate times decay as with our Muon
    return [Muon(matrices, lr=lr, weight_decay=decay, momentum=0.95),
            torch.optim.AdamW(rest, betas=BETAS, fused=matrices[0].is_cuda)]


def dion_normuon(NorMuon: type, matrices: list[nn.Parameter], rest: list[dict], lr: float
                 ) -> list[torch.optim.Optimizer]:
    normuon = NorMuon(matrices, lr=lr, mu=0.95, weight_decay=DECAY, nesterov=True, adjust_lr="rms_norm")
    return [normuon, torch.optim.AdamW(rest, betas=BETAS, fused=matrices[0].is_cuda)]


class Kind(NamedTuple):
    """An optimizer of the sweep."""

    make: Callable  # how it is built
    lr: float  # where the sweep of its rate begins
    bf16: bool = False  # hidden matrices are kept in bf16
    peer: str = ""  # the package that it comes from, a name of PEERS


# Packages by the names that benchmarks/trajectories.py has for them -> the class, found in a `Place`
PEERS = {
    "keller_jordan": lambda place: place.load("muon").SingleDeviceMuon,
    "dion": lambda place: alone(place.root("dion") / "dion", "normuon").NorMuon,
}

OPTIMIZERS = {
    "adamw": Kind(adamw, 2e-3),
    "torch_muon": Kind(torch_muon, 4e-3),
    "muon": Kind(ours(), 4e-3),
    "normuon": Kind(ours("NorMuon"), 4e-3),
    # 4e-3 times the ratio of the factors, 0.2 sqrt(512), of a matrix of 512 columns and as many rows or more
    "keller": Kind(keller, 1.8e-2, peer="keller_jordan"),
    "dion_normuon": Kind(dion_normuon, 4e-3, peer="dion"),
    "int8_momentum": Kind(ours(state_dtype=torch.int8), 4e-3),
    "int8_averages": Kind(ours(averages=torch.int8), 4e-3),
    "split16": Kind(ours(master_weights="split16"), 4e-3, bf16=True),
    "bf16_weights_stochastic": Kind(ours(rounding="stochastic"), 4e-3, bf16=True),
    "bf16_momentum": Kind(ours(state_dtype=torch.bfloat16), 4e-3),
    "adamuon": Kind(ours(rule="adamuon", adjust_lr_fn=0.2), 4e-3),
    "hyperball": Kind(ours(rule="hyperball"), 8e-3),
    "muon_plus": Kind(ours(rule="muon_plus"), 4e-3),
    "cautious": Kind(ours(decay="cautious"), 4e-3),
    "per_head": Kind(ours(split=True), 4e-3),
    "turbo": Kind(ours(ns_coefficients="turbo", ns_steps=4), 4e-3),
    "cubic": Kind(ours(ns_coefficients="cubic"), 4e-3),
    "eight_steps": Kind(ours(ns_steps=8), 4e-3),
}


def maker(name: str, folders: dict[str, Path]) -> Callable:
    """How an optimizer is built. `folders`: those of --path. Raises Missing without its package."""
    kind = OPTIMIZERS[name]
    if not kind.peer:
        return kind.make
    return functools.partial(kind.make, PEERS[kind.peer](Place(kind.peer, folders.get(kind.peer))))


@dataclass(frozen=True)
class Run:
    """One training."""

    optimizer: str
    lr: float
    embed_lr: float
    head_lr: float
    seed: int

    @classmethod
    def of(cls, row: dict[str, str]) -> Run:
        return cls(row["optimizer"], *(float(row[key]) for key in RATES), int(row["seed"]))


# The next runs are a function of the rows so far, so a sweep goes on after an interruption.


def losses_of(rows: list[dict[str, str]]) -> dict[Run, float]:
    return {Run.of(row): float(row["heldout_loss"]) for row in rows}


def search(start: Run, rates: tuple[str, ...], losses: dict[Run, float]) -> tuple[Run, list[Run]]:
    """(Best run as `rates` are multiplied together, runs that are missing to compare it with its neighbours)."""
    best = start
    while best in losses:
        beside = [replace(best, **{rate: getattr(best, rate) * factor for rate in rates}) for factor in (0.5, 2.0)]
        if losses[best] >= LOST and getattr(best, rates[0]) > LEAST * OPTIMIZERS[best.optimizer].lr:
            best = beside[0]  # neighbours that diverged as well would end the search here
            continue
        if missing := [run for run in beside if run not in losses]:
            return best, missing
        better = min(beside, key=losses.get)
        if losses[better] >= losses[best]:
            return best, []
        best = better
    return best, [best]


def wanted(name: str, losses: dict[Run, float], size: Size = SIZES["30m"]) -> list[Run]:
    """The runs of an optimizer that can begin now; [] if all have ended, or if AdamW's rates are not found yet."""
    best, missing = adamw_rates(losses, size)
    if name != "adamw":
        if missing:
            return []
        swept = "muon" if name in RATE_OF_MUON else name
        best, missing = matrix_rate(swept, best, losses, size)
        if swept != name:
            if missing:
                return []
            best = replace(best, optimizer=name)
    runs = missing or [replace(best, seed=seed) for seed in (size.parity if name == "muon" else SEEDS)]
    if name == "torch_muon" and not missing:  # compared with our Muon at our rate, seed by seed
        ours, waits = matrix_rate("muon", best, losses, size)
        runs += [] if waits else [replace(best, lr=ours.lr, seed=seed) for seed in size.parity]
    return [run for run in dict.fromkeys(runs) if run not in losses]


def matrix_rate(name: str, start: Run, losses: dict[Run, float], size: Size) -> tuple[Run, list[Run]]:
    """(Best run of an optimizer with the rates of embeddings and head of `start`, runs that are missing to find it)."""
    lr = size.first
    if name != "muon":  # moved as far as Muon's rate was, so that fewer runs are spent far from the best rate
        lr = matrix_rate("muon", start, losses, size)[0].lr / OPTIMIZERS["muon"].lr
    return search(replace(start, optimizer=name, lr=lr * OPTIMIZERS[name].lr), ("lr",), losses)


def adamw_rates(losses: dict[Run, float], size: Size = SIZES["30m"]) -> tuple[Run, list[Run]]:
    """(AdamW's best run of seed 0, runs that are missing to find it)."""
    best, missing = search(Run("adamw", *size.rates, 0), RATES, losses)
    before = None
    while size.apart and not missing and best != before:
        before = best
        for rates in (("embed_lr",), ("head_lr",), ("lr",)):
            if not missing:
                best, missing = search(best, rates, losses)
    return best, missing


def key_of(options: argparse.Namespace) -> tuple[str, str, str]:
    """(Size, text, steps): what the rows of a sweep have in common."""
    return options.size, options.corpus, str(options.steps or SIZES[options.size].steps)


def rows_so_far(options: argparse.Namespace) -> list[dict[str, str]]:
    """The rows of this size, text and length."""
    rows = read(options.out) if Path(options.out).exists() else []
    return [row for row in rows if (row["size"], row["corpus"], row["steps"]) == key_of(options)]


def still_missing(names: list[str], losses: dict[Run, float], size: Size = SIZES["30m"]) -> dict[str, list[Run]]:
    """The runs that each optimizer lacks if the best run so far stays the best: no sweep can end with fewer."""
    losses, found = dict(losses), {name: [] for name in dict.fromkeys(["adamw", *names])}
    while runs := [run for name in found for run in wanted(name, losses, size)]:
        for run in runs:
            if run not in losses:
                found[run.optimizer].append(run)
                first = all(run.optimizer != other.optimizer for other in losses)
                losses[run] = 0.0 if first else LOST / 2  # a run that diverged, LOST, would be halved
    return found


def plan(rows: list[dict[str, str]], names: list[str], size: Size) -> list[str]:
    """One line for each optimizer: the runs that are there and those that are missing."""
    losses = losses_of(rows)
    lines = ["| optimizer | runs | missing, at least | can begin now |", "|---|---|---|---|"]
    total = 0
    for name, runs in still_missing(names, losses, size).items():
        total += len(runs)
        there = sum(run.optimizer == name for run in losses)
        lines.append(f"| {name} | {there} | {len(runs)} | {len(wanted(name, losses, size))} |")
    time = f", {seconds_of(rows):.0f} s of steps each" if rows else ""
    return [*lines, "", f"At least {total} runs are missing{time}."]


def seconds_of(rows: list[dict[str, str]]) -> float:
    """Expected time of a run, without its start: the median over rows; 0 without rows."""
    seconds = [float(row["step_ms"]) * float(row["steps"]) / 1e3 for row in rows]
    return statistics.median(seconds) if seconds else 0.0


class Sweep:
    """The runs of one size, text and length. SystemExit if the text is not that of the rows so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        texts = {row["text_mb"] for row in rows_so_far(options)} - {str(text_mb(options.data))}
        if texts:
            raise SystemExit(f"the text has {text_mb(options.data)} MB, that of the rows of {options.out} "
                             f"{' and '.join(sorted(texts))} MB: name the same --data, or another --corpus")
        self.names = ["adamw"]
        for name in dict.fromkeys(options.optimizers):
            try:
                maker(name, options.folders)
            except Missing as why:
                print(f"{name} is left out: {why}", flush=True)
            else:
                self.names += [name] * (name not in self.names)
        self.failed = []  # optimizers of runs that raised an error

    def next_run(self, begun: set[Run], seconds: float = math.inf) -> Run | None:
        """A run that can begin and takes at most `seconds`, as far as known."""
        rows, size = rows_so_far(self.options), SIZES[self.options.size]
        losses = losses_of(rows)
        found = (run for name in self.names for run in wanted(name, losses, size) if run not in begun
                 and seconds_of([row for row in rows if row["optimizer"] == name] or rows) <= seconds)
        return next(found, None)

    def end(self, run: Run, row: dict | str) -> None:
        """Keep the row of a run, or, for the text of an error, begin no further run of its optimizer."""
        if isinstance(row, str):
            print(f"{run} failed, {run.optimizer} is left out from here on:\n{row}", flush=True)
            self.names = [name for name in self.names if name != run.optimizer]
            self.failed.append(run.optimizer)
        else:
            append(self.options.out, COLUMNS, [row])
            print({key: row[key] for key in ("size", "corpus", *COLUMNS[6:17])}, flush=True)


class Queue:
    """Hands the runs of sweeps to processes, one for each GPU, until none is wanted or the time is over."""

    def __init__(self, sweeps: list[Sweep], options: argparse.Namespace) -> None:
        self.sweeps, self.options, self.began = sweeps, options, time.perf_counter()
        self.left = options.runs  # runs that may still begin; None: all
        self.context = mp.get_context("spawn")
        self.results = self.context.SimpleQueue()
        self.workers = [self.worker(i) for i in range(torch.cuda.device_count() or 1)]
        self.begun = {}  # number of the worker -> (sweep, run)

    def worker(self, number: int) -> tuple[mp.Process, mp.SimpleQueue]:
        """(Process on GPU `number`, the queue of its orders)."""
        orders, parts = self.context.SimpleQueue(), [sweep.options for sweep in self.sweeps]
        process = self.context.Process(target=work, args=(number, parts, orders, self.results), daemon=True)
        process.start()
        return process, orders

    def next_order(self) -> tuple[Sweep, Run] | None:
        left = self.options.seconds - (time.perf_counter() - self.began)
        if left <= 0 or self.left == 0:
            return None
        for sweep in self.sweeps:
            key = key_of(sweep.options)
            begun = {run for other, run in self.begun.values() if key_of(other.options) == key}
            if (run := sweep.next_run(begun, left)) is not None:
                return sweep, run
        return None

    def run(self) -> None:
        while True:
            self.wait_while_paused()
            for number, (_, orders) in enumerate(self.workers):
                if number not in self.begun and not self.paused() and (order := self.next_order()) is not None:
                    self.left = None if self.left is None else self.left - 1
                    self.begun[number] = order
                    orders.put((self.sweeps.index(order[0]), order[1]))
            if not self.begun and not self.paused():
                break
            self.receive()
        for _, orders in self.workers:
            orders.put(None)
        for process, _ in self.workers:
            process.join()
        if failed := [name for sweep in self.sweeps for name in sweep.failed]:
            raise SystemExit(f"runs failed of: {', '.join(failed)}")

    def paused(self) -> bool:
        return self.options.pause is not None and self.options.pause.exists()

    def wait_while_paused(self) -> None:
        """Once no run is left, FILE.idle says so until FILE is gone."""
        if self.paused() and not self.begun:
            idle = self.options.pause.with_name(f"{self.options.pause.name}.idle")
            idle.touch()
            while self.paused():
                time.sleep(0.2)
            idle.unlink(missing_ok=True)

    def receive(self) -> None:
        """Wait for the end of a run. A process ends with a run that failed, and another one takes its place. Returns
        without a run once a pause ends or a process died, so that the next runs can begin.
        """
        paused = self.paused()
        while self.begun and self.results.empty():
            time.sleep(0.05)
            for number, (process, _) in enumerate(self.workers):
                if not process.is_alive() and self.results.empty():
                    if number in self.begun:
                        sweep, run = self.begun.pop(number)
                        sweep.end(run, f"the process ended with exit code {process.exitcode}")
                    self.workers[number] = self.worker(number)
                    return
            if paused and not self.paused():
                return
        if not self.results.empty():
            number, row = self.results.get()
            sweep, run = self.begun.pop(number)
            sweep.end(run, row)
            if isinstance(row, str):
                self.workers[number][0].join()
                self.workers[number] = self.worker(number)


def work(worker: int, parts: list[argparse.Namespace], orders: mp.SimpleQueue, results: mp.SimpleQueue) -> None:
    """Train the runs from `orders`, (number of the part, run), until None or until one fails."""
    import traceback

    device = torch.device("cuda", worker) if torch.cuda.is_available() else torch.device("cpu")
    gc.freeze()  # a collection after each run need not look at all of torch
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        while (order := orders.get()) is not None:
            part, run = order
            try:
                results.put((worker, Training(run, parts[part], device).row()))
            except Exception:
                results.put((worker, traceback.format_exc()))
                break  # an error of a GPU stays with its process
            gc.collect()  # graphs and hooks make cycles, which hold a model each
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


def text_mb(folder: str | None) -> float:
    """The size of the text to train on, as `Training` has it, without reading it."""
    return round(sum(path.stat().st_size for path in source_files(folder) if not is_heldout(path)) / 1e6, 1)


class Training:
    """One run on one device."""

    def __init__(self, run: Run, options: argparse.Namespace, device: torch.device) -> None:
        self.run, self.options, self.device = run, options, device
        self.size = SIZES[options.size]
        self.steps = options.steps or self.size.steps
        text, heldout = read_corpus(options.data)
        self.text_mb = round(len(text) / 1e6, 1)
        self.text = text.to(device)
        self.heldout = [part.to(device) for part in even_windows(heldout, HELDOUT_WINDOWS, self.size.seq)]
        torch.manual_seed(run.seed)
        self.model = GPT(VOCABULARY, self.size.layers, self.size.width, self.size.heads).to(device)
        if not options.eager:
            # Graphs of a layer: one for each size and dtype of its weights, with and without gradients
            torch._dynamo.config.recompile_limit = 64
            for block in self.model.blocks:
                block.compile(dynamic=False)  # another size is compiled for itself
        matrices, rest = self.groups()
        self.bf16 = OPTIMIZERS[run.optimizer].bf16
        whole = {name: p.detach() for name, p in self.model.named_parameters()}
        for p in matrices if self.bf16 else ():
            p.data = p.data.bfloat16()
        self.optimizers = maker(run.optimizer, options.folders)(matrices, rest, run.lr)
        if self.bf16:
            self.optimizers[0].load_master_weights(whole)
        # As numbers: a package may hold its rate in a tensor, and write to it
        self.rates = [[float(group["lr"]) for group in opt.param_groups] for opt in self.optimizers]
        self.order = torch.Generator().manual_seed(run.seed)

    def groups(self) -> tuple[list[nn.Parameter], list[dict]]:
        """(Hidden matrices, AdamW's groups of embeddings, head and norms)."""
        model, heads = self.model, self.size.heads
        for name, p in model.named_parameters():
            p.path = name
        for block in model.blocks:
            for p in block.parameters():
                p.by_heads = None
            for module in (block.attention.query, block.attention.key, block.attention.value):
                module.weight.by_heads = {"heads": heads}
            block.attention.out.weight.by_heads = {"heads": heads, "dim": 1}
        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        norms = [p for p in model.parameters() if p.ndim == 1]
        # Norms have AdamW's rate for the head, which no optimizer sweeps but AdamW
        return matrices, [
            {"params": [model.embed.weight], "lr": self.run.embed_lr, "weight_decay": DECAY},
            {"params": [model.lm_head.weight], "lr": self.run.head_lr, "weight_decay": DECAY},
            {"params": norms, "lr": self.run.head_lr, "weight_decay": 0.0},
        ]

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        enabled = self.device.type == "cuda" or self.bf16
        with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled):
            logits = self.model(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def heldout_loss(self) -> torch.Tensor:
        """The mean over batches of the size of a training step."""
        count = min(self.size.batch, HELDOUT_WINDOWS)
        batches = zip(*(part.split(count) for part in self.heldout))
        return torch.stack([self.loss(*batch) for batch in batches]).mean()

    def factor(self, step: int) -> float:
        """Factor on the rates: linear warm-up, then linear decay to 0."""
        warmup = max(1, int(WARMUP * self.steps))
        return (step + 1) / warmup if step < warmup else (self.steps - step) / (self.steps - warmup)

    def prepare(self, step: int) -> torch.Tensor:
        """Write the rates of a step into the groups, and return where the windows of its batch begin."""
        for opt, lrs in zip(self.optimizers, self.rates):
            for group, lr in zip(opt.param_groups, lrs):
                group["lr"] = lr * self.factor(step)
        return torch.randint(len(self.text) - self.size.seq, (self.size.batch,), generator=self.order)

    def backward(self, starts: torch.Tensor) -> torch.Tensor:
        """The loss of a batch; its clipped gradients are in the parameters."""
        loss = self.loss(*windows(self.text, starts.to(self.device), self.size.seq))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        return loss.detach()

    def row(self) -> dict:
        size, curve, marks = self.size, [], []
        for step in range(self.steps):
            starts = self.prepare(step)
            begin = self.mark()
            self.backward(starts)
            middle = self.mark()
            for opt in self.optimizers:
                opt.step()
            marks.append((begin, middle, self.mark()))
            self.model.zero_grad()
            if (step + 1) % max(1, self.steps // EVALUATIONS) == 0 or step + 1 == self.steps:
                curve.append((step + 1, self.heldout_loss()))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        # Steps of the second half: kernels are compiled, graphs are captured
        times = [(between(a, c), between(b, c)) for a, b, c in marks[self.steps // 2:]]
        losses = [loss.item() if loss.isfinite() else LOST for _, loss in curve]
        run, cuda = self.run, self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
        return {
            "commit": self.options.commit, "gpu": torch.cuda.get_device_name() if cuda else "cpu",
            "size": self.options.size, "parameters": sum(p.numel() for p in self.model.parameters()),
            "corpus": self.options.corpus, "text_mb": self.text_mb, "optimizer": run.optimizer, "lr": run.lr,
            "embed_lr": run.embed_lr, "head_lr": run.head_lr, "seed": run.seed, "steps": self.steps,
            "tokens": self.steps * size.batch * size.seq, "heldout_loss": round(losses[-1], 5),
            "step_ms": round(statistics.median(ms for ms, _ in times), 3),
            "optimizer_ms": round(statistics.median(ms for _, ms in times), 3), "peak_mib": round(peak, 1),
            "curve": " ".join(f"{step}:{loss:.4f}" for (step, _), loss in zip(curve, losses)),
            "torch": torch.__version__}

    def mark(self) -> torch.cuda.Event | float:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def between(begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    """Time between two marks, in ms."""
    return 1e3 * (end - begin) if isinstance(begin, float) else begin.elapsed_time(end)


if __name__ == "__main__":
    main()

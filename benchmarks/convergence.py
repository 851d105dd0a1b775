"""Losses of a GPT trained with several optimizers, with learning rates swept alike. One CSV row for each run.

    make build && python benchmarks/convergence.py --size 30m --out convergence.csv
    ... --optimizers muon normuon           some optimizers; AdamW always trains, for the rates of embeddings and head
    ... --seconds 500                       begin no run after 500 s; the next call continues the sweep
    ... --show                              print the table of the rows so far, and train nothing
    ... --plan                              print how many runs are missing for each optimizer, and train nothing
    ... --path keller_jordan=DIR dion=DIR   checkouts of other packages that are not installed

Tokens are bytes, weights are fp32, compute is bf16 by autocast. All runs of a size have the same text in the same
order for a seed, the same warm-up and linear decay to 0, weight decay 0.1 on matrices, embeddings and head, and
gradients clipped to norm 1. Each GPU trains one run at a time; without a GPU one process trains on the CPU.

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
seed 0: first all together, then each by itself, in rounds until a round changes nothing. A rate counts as found once
both of its neighbours are worse. All further optimizers take AdamW's rates for embeddings and head, and sweep the rate
of matrices likewise. So AdamW has three swept rates, and every other optimizer one. Rates at which training diverged
are halved until a run has a loss.

Seeds. The best rates train with three seeds, 0 to 2, and `muon` with five, 0 to 4. `torch_muon` also trains with the
best rates of `muon` and these five seeds, for the comparison of both seed by seed. The table says the number of seeds.

Parity. Below the table stands our Muon less torch's at equal rates, seed by seed: the mean, its 95 % interval by the
paired t-test, and the difference that the test finds with a probability of 80 %. Both count as equal if two one-sided
tests (TOST) at 5 % each exclude a difference of MARGIN; the power of that is said, too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import math
import os
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
STUDENT_T = {3: (4.303, 2.920, 1.061), 4: (3.182, 2.353, 0.978), 5: (2.776, 2.132, 0.941)}  # seeds -> .975, .95, .8
# Nats per byte. On seed 0 of 30m, twice and half the best rate cost our Muon 0.026 and 0.013
MARGIN = 0.005
LOST = 1e9  # loss of a run that diverged, so that rows can be compared
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


SIZES = {
    "tiny": Size(1, 64, 2, 4, 32, 8),  # for tests
    "30m": Size(9, 512, 8, 64, 512, 600),
    "124m": Size(13, 896, 14, 128, 512, 1500),
}


def main() -> None:
    options = arguments()
    if not (options.show or options.plan):
        Sweep(options).run()
    rows = rows_so_far(options)
    if options.plan:
        print("\n".join(plan(rows, options.optimizers)))
    else:
        print("\n".join(table(rows)) if rows else "no run of this size, text and length has ended")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="30m")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--steps", type=int, default=None, help="in place of the size's own number")
    parser.add_argument("--data", default=None, help="folder whose *.py files are the text (default: Python's library)")
    parser.add_argument("--corpus", default="stdlib", help="name of the text, for the rows")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run after this time")
    parser.add_argument("--runs", type=int, default=None, help="end after this number of runs")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--show", action="store_true", help="print the table of --out, and train nothing")
    parser.add_argument("--plan", action="store_true", help="print the runs that --out lacks, and train nothing")
    parser.add_argument("--path", nargs="+", default=[], metavar="NAME=DIR", help="another package's checkout")
    add_output(parser, COLUMNS, "convergence.csv")
    options = parser.parse_args()
    options.folders = {name: Path(folder).resolve() for name, _, folder in (t.partition("=") for t in options.path)}
    known = sorted({kind.peer for kind in OPTIMIZERS.values()} - {""})
    if unknown := sorted(options.folders.keys() - set(known)):
        parser.error(f"--path {unknown[0]}=...: there is no such package here, only {' and '.join(known)}")
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
        rates = (float(row[key]) for key in ("lr", "embed_lr", "head_lr"))
        return cls(row["optimizer"], *rates, int(row["seed"]))


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


def wanted(name: str, losses: dict[Run, float]) -> list[Run]:
    """The runs of an optimizer that can begin now; [] if all have ended, or if AdamW's rates are not found yet."""
    best, missing = adamw_rates(losses)
    if name != "adamw":
        if missing:
            return []
        best, missing = search(replace(best, optimizer=name, lr=OPTIMIZERS[name].lr), ("lr",), losses)
    runs = missing or [replace(best, seed=seed) for seed in (PARITY_SEEDS if name == "muon" else SEEDS)]
    if name == "torch_muon" and not missing:  # compared with our Muon at our rate, seed by seed
        ours, waits = search(replace(best, optimizer="muon", lr=OPTIMIZERS["muon"].lr), ("lr",), losses)
        runs += [] if waits else [replace(best, lr=ours.lr, seed=seed) for seed in PARITY_SEEDS]
    return [run for run in runs if run not in losses]


def adamw_rates(losses: dict[Run, float]) -> tuple[Run, list[Run]]:
    """(AdamW's best run of seed 0, runs that are missing to find it)."""
    lr = OPTIMIZERS["adamw"].lr
    best, missing = search(Run("adamw", lr, lr, lr, 0), ("lr", "embed_lr", "head_lr"), losses)
    before = None
    while not missing and best != before:
        before = best
        for rates in (("embed_lr",), ("head_lr",), ("lr",)):
            if not missing:
                best, missing = search(best, rates, losses)
    return best, missing


def rows_so_far(options: argparse.Namespace) -> list[dict[str, str]]:
    """The rows of this size, text and length."""
    steps = str(options.steps or SIZES[options.size].steps)
    rows = read(options.out) if Path(options.out).exists() else []
    return [row for row in rows if (row["size"], row["corpus"], row["steps"]) == (options.size, options.corpus, steps)]


def still_missing(names: list[str], losses: dict[Run, float]) -> dict[str, list[Run]]:
    """The runs that each optimizer lacks if the best run so far stays the best: no sweep can end with fewer."""
    losses, found = dict(losses), {name: [] for name in dict.fromkeys(["adamw", *names])}
    while runs := [run for name in found for run in wanted(name, losses)]:
        for run in runs:
            if run not in losses:
                found[run.optimizer].append(run)
                first = all(run.optimizer != other.optimizer for other in losses)
                losses[run] = 0.0 if first else LOST / 2  # a run that diverged, LOST, would be halved
    return found


def plan(rows: list[dict[str, str]], names: list[str]) -> list[str]:
    """One line for each optimizer: the runs that are there and those that are missing."""
    losses = losses_of(rows)
    lines = ["| optimizer | runs | missing, at least | can begin now |", "|---|---|---|---|"]
    total = 0
    for name, runs in still_missing(names, losses).items():
        total += len(runs)
        there = sum(run.optimizer == name for run in losses)
        lines.append(f"| {name} | {there} | {len(runs)} | {len(wanted(name, losses))} |")
    seconds = [float(row["step_ms"]) * float(row["steps"]) / 1e3 for row in rows]
    time = f", {statistics.median(seconds):.0f} s of steps each" if seconds else ""
    return [*lines, "", f"At least {total} runs are missing{time}."]


class Sweep:
    """Hands runs to processes, one for each GPU, until none is wanted or the time is over. SystemExit if the text is
    not that of the rows so far.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.perf_counter()
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
        self.workers = torch.cuda.device_count() or 1
        self.left = options.runs  # runs that may still begin; None: all
        self.failed = []  # optimizers of runs that raised an error

    def next_run(self, begun: set[Run]) -> Run | None:
        if time.perf_counter() - self.began > self.options.seconds or self.left == 0:
            return None
        losses = losses_of(rows_so_far(self.options))
        found = (run for name in self.names for run in wanted(name, losses) if run not in begun)
        return next(found, None)

    def run(self) -> None:
        context = mp.get_context("spawn")
        orders, results = [context.SimpleQueue() for _ in range(self.workers)], context.SimpleQueue()
        processes = [context.Process(target=work, args=(i, self.options, orders[i], results), daemon=True)
                     for i in range(self.workers)]
        for process in processes:
            process.start()
        idle, begun = set(range(self.workers)), {}
        while True:
            while idle and (run := self.next_run(set(begun.values()))) is not None:
                worker = idle.pop()
                self.left = None if self.left is None else self.left - 1
                begun[worker] = run
                orders[worker].put(run)
            if not begun:
                break
            worker, row = results.get()
            self.end(begun.pop(worker), row)
            idle.add(worker)
        for order in orders:
            order.put(None)
        for process in processes:
            process.join()
        if self.failed:
            raise SystemExit(f"runs failed of: {', '.join(self.failed)}")

    def end(self, run: Run, row: dict | str) -> None:
        """Keep the row of a run, or, for the text of an error, begin no further run of its optimizer."""
        if isinstance(row, str):
            print(f"{run} failed, {run.optimizer} is left out from here on:\n{row}", flush=True)
            self.names = [name for name in self.names if name != run.optimizer]
            self.failed.append(run.optimizer)
        else:
            append(self.options.out, COLUMNS, [row])
            print({key: row[key] for key in COLUMNS[6:17]}, flush=True)


def work(worker: int, options: argparse.Namespace, orders: mp.SimpleQueue, results: mp.SimpleQueue) -> None:
    """Train the runs from `orders`, until None."""
    import traceback

    device = torch.device("cuda", worker) if torch.cuda.is_available() else torch.device("cpu")
    gc.freeze()  # a collection after each run need not look at all of torch
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        while (run := orders.get()) is not None:
            try:
                results.put((worker, Training(run, options, device).row()))
            except Exception:
                results.put((worker, traceback.format_exc()))
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
            for block in self.model.blocks:
                block.compile()
        matrices, rest = self.groups()
        self.bf16 = OPTIMIZERS[run.optimizer].bf16
        whole = {name: p.detach() for name, p in self.model.named_parameters()}
        for p in matrices if self.bf16 else ():
            p.data = p.data.bfloat16()
        self.optimizers = maker(run.optimizer, options.folders)(matrices, rest, run.lr)
        if self.bf16:
            self.optimizers[0].load_master_weights(whole)
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

    def row(self) -> dict:
        # As numbers: a package may hold its rate in a tensor, and write to it
        size, rates = self.size, [[float(group["lr"]) for group in opt.param_groups] for opt in self.optimizers]
        curve, marks = [], []
        for step in range(self.steps):
            for opt, lrs in zip(self.optimizers, rates):
                for group, lr in zip(opt.param_groups, lrs):
                    group["lr"] = lr * self.factor(step)
            starts = torch.randint(len(self.text) - size.seq, (size.batch,), generator=self.order)
            begin = self.mark()
            self.loss(*windows(self.text, starts.to(self.device), size.seq)).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
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


# The table


def best_rows(rows: list[dict[str, str]], name: str) -> list[dict[str, str]]:
    """The rows of an optimizer with its best rates, over the seeds that were trained with them."""
    rows = [row for row in rows if row["optimizer"] == name]
    if not rows:
        return []
    best = min((row for row in rows if row["seed"] == "0"), key=lambda row: float(row["heldout_loss"]))
    rates = ("lr", "embed_lr", "head_lr")
    return [row for row in rows if all(row[key] == best[key] for key in rates)]


def mean_curve(rows: list[dict[str, str]]) -> list[tuple[int, float]]:
    """[(step, mean held-out loss over the rows)]."""
    curves = [[point.split(":") for point in row["curve"].split()] for row in rows]
    return [(int(points[0][0]), statistics.mean(float(loss) for _, loss in points)) for points in zip(*curves)]


def share_to_reach(curve: list[tuple[int, float]], loss: float, steps: int) -> float | None:
    """The share of the steps after which a curve first has a loss, between two measurements by a straight line. Rates
    fall to 0 over all steps, so a run that was planned shorter would reach it earlier.
    """
    for (before, high), (after, low) in zip(curve, curve[1:]):
        if low <= loss < high:
            return (before + (after - before) * (high - loss) / (high - low)) / steps
    return None


def table(rows: list[dict[str, str]]) -> list[str]:
    """One line for each optimizer, in the order of their losses, and the comparison with torch.optim.Muon."""
    found = {name: best for name in OPTIMIZERS if (best := best_rows(rows, name))}
    losses = {name: [float(row["heldout_loss"]) for row in best] for name, best in found.items()}
    target = statistics.mean(losses["adamw"]) if "adamw" in losses else None
    heads = ("optimizer", "lr", "seeds", "held-out loss", "spread", "tokens to AdamW's loss", "less muon's",
             "step ms", "optimizer ms", "MiB", "GPU")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in sorted(found, key=lambda name: statistics.mean(losses[name])):
        best, spread = found[name], f"{statistics.stdev(losses[name]):.4f}" if len(losses[name]) > 1 else ""
        share = None
        if target is not None and name != "adamw":
            share = share_to_reach(mean_curve(best), target, int(best[0]["steps"]))
        tokens = "" if share is None else f"{share * int(best[0]['tokens']) / 1e6:.1f} M, {100 * share:.0f} %"
        # Times of two GPUs have no meaning together: those of the newest row's
        last = best[-1]
        alike = [row for row in best if all(row[key] == last[key] for key in ("gpu", "commit", "torch"))]
        whole, own, memory = (statistics.median(float(row[key]) for row in alike)
                              for key in ("step_ms", "optimizer_ms", "peak_mib"))
        cells = (name, f"{float(best[0]['lr']):g}", str(len(best)), f"{statistics.mean(losses[name]):.4f}", spread,
                 tokens, beside(best, found["muon"])[1] if "muon" in found and name != "muon" else "",
                 f"{whole:.2f}", f"{own:.2f}", f"{memory:.0f}", short_name(last["gpu"]))
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, *parity(rows)]


def short_name(gpu: str) -> str:
    """The name of a GPU as tables have it."""
    return gpu.replace("NVIDIA ", "").replace(" 80GB HBM3", "")


def gaps_of(rows: list[dict[str, str]], others: list[dict[str, str]]) -> list[float]:
    """Loss of `rows` less that of `others`, for each seed that both have."""
    losses = {row["seed"]: float(row["heldout_loss"]) for row in others}
    return [float(row["heldout_loss"]) - losses[row["seed"]] for row in rows if row["seed"] in losses]


def half_width(gaps: list[float]) -> float:
    """Half of the 95 % interval of the mean, by Student's t."""
    return STUDENT_T[len(gaps)][0] * statistics.stdev(gaps) / math.sqrt(len(gaps))


def beside(rows: list[dict[str, str]], others: list[dict[str, str]]) -> tuple[str, str]:
    """How a loss compares with another one, seed by seed: ("lower", "higher", "no difference found", or "open" with too
    few seeds; the mean difference and its 95 % interval).
    """
    gaps = gaps_of(rows, others)
    if len(gaps) not in STUDENT_T:
        return "open", ""
    mean, half = statistics.mean(gaps), half_width(gaps)
    answer = "no difference found" if abs(mean) <= half else "lower" if mean < 0 else "higher"
    return answer, f"{mean:+.4f} +- {half:.4f}"


def parity(rows: list[dict[str, str]]) -> list[str]:
    """Our Muon less torch's, seed by seed, at the best rates of ours: the interval of the paired t-test, the difference
    that it finds with a probability of 80 % at a level of 5 %, and whether two one-sided tests find both equal.
    """
    ours, rates = best_rows(rows, "muon"), ("lr", "embed_lr", "head_lr")
    theirs = [row for row in rows if row["optimizer"] == "torch_muon" and all(row[k] == ours[0][k] for k in rates)
              ] if ours else []
    gaps = gaps_of(ours, theirs)
    if len(gaps) not in STUDENT_T:
        few = f"{len(gaps)} seed{'s' * (len(gaps) != 1)} with both at these rates; 3 to {len(PARITY_SEEDS)} are needed"
        return ["", f"muon less torch_muon: {few}."] if ours else []
    error, mean = statistics.stdev(gaps) / math.sqrt(len(gaps)), statistics.mean(gaps)
    level, one_sided, power = STUDENT_T[len(gaps)]
    equal = abs(mean) + one_sided * error < MARGIN
    return ["", f"muon less torch_muon, {len(gaps)} seeds: {mean:+.5f} +- {level * error:.5f} (95 %). "
            f"A difference of {(level + power) * error:.5f} would be found with a probability of 80 %. "
            f"Equal within {MARGIN} by two one-sided tests at 5 %: {'yes' if equal else 'no'}; their power, if both "
            f"are equal, is {100 * power_of_tost(error, len(gaps)):.0f} %."]


def power_of_tost(error: float, count: int, margin: float = MARGIN) -> float:
    """The probability that two one-sided t-tests at 5 % find means equal that are equal. `error`: the true standard
    error of the mean of `count` differences.
    """
    if error == 0:
        return 1.0
    free, normal, step = count - 1, statistics.NormalDist(), 1e-3
    constant = 2 ** (1 - free / 2) / math.gamma(free / 2)
    total = 0.0
    for number in range(1, 10_000):  # over the estimated error, which is error chi / sqrt(free), by its density
        chi = number * step
        room = margin / error - STUDENT_T[count][1] * chi / math.sqrt(free)
        if room <= 0:
            break
        total += step * constant * chi ** (free - 1) * math.exp(-chi * chi / 2) * (2 * normal.cdf(room) - 1)
    return total


if __name__ == "__main__":
    main()

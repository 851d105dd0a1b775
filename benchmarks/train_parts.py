"""Why forward and backward take longer with one optimizer than with another, in the training of benchmarks/train.py.

    make build && python benchmarks/train_parts.py --ranks 4 --batch 96 --out train_parts.csv

All optimizers step the same parameters, in one process for each GPU. Variants take turns in blocks of steps; of each
block the first steps are left out. A variant is OPTIMIZER[+ALSO][@WEIGHTS]:

    adamw, muon, none     what steps the weights; none: nothing does
    +idle, +products      after each step the GPU waits, or multiplies matrices, for --after-ms
    +pageable             the text comes from memory that is not pinned
    @adamw, @muon         learning rates are 0, and weights those of a training with this optimizer. Forward and
                          backward of variants with equal weights multiply equal numbers of equal text. Without @ rates
                          are those of benchmarks/train.py, and the training goes on with weights and state of its own

So variants with equal weights differ by what the step itself does to the GPU, its clock and its memory; and variants
with equal optimizers differ by the numbers that forward and backward multiply. Trainings have their turns first, since
their optimizers step the weights of others later. Before Muon is built, AdamW has a block of its own ("before"), and
again after Muon's `release()` ("released"): workspace, graphs and process groups.

One CSV row for each block. Times in ms are the largest over the ranks, then the median over the block's steps;
outside_ms is a step less `step()` and less what +idle and +products add. Clocks, watts and the share of samples with a
clock held down by the power limit ("capped") are means over the ranks, of forward and backward; mhz_low is the slowest
rank's; joules are of a whole step. NVML's watts are means over the last second, so they include other phases and, in
short blocks, the variant before; joules / step_ms is a block's power in kW. Without NVML all these columns are empty.
`--summary` prints the medians of a table, and differences between variants turn by turn. It measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from clocks import Clocks
from convergence_table import STUDENT_T, half_width
from rows import add_output, append, read
from step import OTHER_WORK, device_name, export, join, leave, on_ranks, profiled, synchronize
from train import PHASES, Training, add_training, checked, make_optimizer

COLUMNS = ("commit gpu ranks model variant when turn steps step_ms outside_ms forward_ms backward_ms clip_ms "
           "optimizer_ms after_ms mhz mhz_low watts capped mhz_optimizer joules loss torch batch seq").split()
FIGURES = ("step", "outside", *PHASES, "after")
OPTIMIZERS = ("adamw", "muon")
ALSO = ("", "idle", "products", "pageable")
VARIANTS = ("adamw muon adamw@adamw muon@adamw adamw@muon muon@muon none@muon adamw+idle@muon adamw+products@muon "
            "muon+pageable@muon").split()
CALIBRATION = 20_000_000  # cycles
PAIRS = (("muon", "adamw"), ("muon@muon", "adamw@adamw"), ("adamw@muon", "adamw@adamw"), ("muon@muon", "muon@adamw"),
         ("muon@adamw", "adamw@adamw"), ("muon@muon", "adamw@muon"), ("adamw+products@muon", "adamw@muon"),
         ("adamw+idle@muon", "adamw@muon"), ("none@muon", "adamw@muon"), ("muon+pageable@muon", "muon@muon"))


@dataclass(frozen=True)
class Variant:
    """What a block of steps does."""

    optimizer: str
    also: str = ""
    weights: str = ""

    @classmethod
    def of(cls, text: str) -> Variant:
        rest, _, weights = text.partition("@")
        optimizer, _, also = rest.partition("+")
        if optimizer not in ("none", *OPTIMIZERS) or also not in ALSO or weights not in ("", *OPTIMIZERS):
            raise argparse.ArgumentTypeError(f"{text} is no OPTIMIZER[+ALSO][@WEIGHTS]")
        if optimizer == "none" and not weights:
            raise argparse.ArgumentTypeError(f"{text}: without an optimizer nothing trains; name the @WEIGHTS")
        return cls(optimizer, also, weights)

    def __str__(self):
        return self.optimizer + f"+{self.also}" * bool(self.also) + f"@{self.weights}" * bool(self.weights)


def main() -> None:
    options = arguments()
    if options.summary:
        rows = [numbers(row) for row in read(options.summary)]
        print("\n".join([*summary(rows), *differences(rows)]))
        return
    on_ranks(worker, options, options.ranks)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_training(parser)
    parser.add_argument("--variants", nargs="+", type=Variant.of, default=[Variant.of(text) for text in VARIANTS],
                        help=f"(default: {' '.join(VARIANTS)})")
    parser.add_argument("--training", type=int, default=20, help="steps of each training before any is timed")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7, help="timed steps of a block")
    parser.add_argument("--settle", type=int, default=3, help="steps of a block before the timed ones")
    parser.add_argument("--after-ms", type=float, default=14.0, help="of +idle and +products")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no other turn begins after so many")
    parser.add_argument("--trace", type=Path, default=None,
                        help="folder for the traces of rank 0, two steps of each of --traced; step() of the second is "
                        "marked for tools/timeline.py")
    parser.add_argument("--traced", nargs="+", type=Variant.of, help="(default: adamw@muon muon@muon)",
                        default=[Variant.of(text) for text in ("adamw@muon", "muon@muon")])
    parser.add_argument("--summary", type=Path, default=None, help="a table to print, instead of a run")
    add_output(parser, COLUMNS, "train_parts.csv")
    options = checked(parser)
    options.run, options.overlap = "eager", False  # of train.py
    return options


def worker(rank: int, ranks: int, port: int, options) -> None:
    device = join(rank, ranks, port)
    clocks = Clocks(device) if device.type == "cuda" else None
    parts = Parts(rank, device, options, clocks)
    parts.take_turns()
    if clocks:
        clocks.stop()
    if rank == 0:
        for line in summary(parts.rows):
            print(line, flush=True)
    leave()


class Parts(Training):
    """A training whose optimizer and weights change from block to block."""

    def __init__(self, rank, device, options, clocks):
        super().__init__("adamw", rank, device, options)
        self.optimizers, self.clocks, self.rows = {"adamw": self.optimizer}, clocks, []
        self.rates = {"adamw": [group["lr"] for group in self.optimizer.param_groups]}
        self.local = [p.detach().to_local() for p in self.model.parameters()]
        self.sets = {name: [p.clone() for p in self.local] for name in OPTIMIZERS}
        self.variant, self.marked, self.began = Variant("adamw"), False, time.perf_counter()
        self.add_work()

    def add_work(self) -> None:
        """What +idle and +products run: cycles and products that take --after-ms."""
        if self.device.type != "cuda":
            return
        size = OTHER_WORK[1]
        self.operands = [torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(3)]
        spin = self.measured(lambda: torch.cuda._sleep(CALIBRATION))
        product = self.measured(lambda: torch.mm(*self.operands[:2], out=self.operands[2]))
        self.cycles = round(CALIBRATION * self.options.after_ms / spin)
        self.products = max(1, round(self.options.after_ms / product))

    def measured(self, call) -> float:
        """ms of a call, the least of five."""
        took = []
        for _ in range(5):
            begin = self.mark()
            call()
            end = self.mark()
            synchronize(self.device)
            took.append(self.between(begin, end))
        return min(took)

    def take_turns(self) -> None:
        """All turns, and the blocks before and after them."""
        options = self.options
        trained, frozen = ([v for v in options.variants if bool(v.weights) is held] for held in (False, True))
        self.block(Variant("adamw"), "warm-up", 0, options.training)
        self.block(Variant("adamw"), "before", 0)
        self.optimizers["muon"] = make_optimizer(self.model, "muon", options)
        self.rates["muon"] = [group["lr"] for group in self.optimizers["muon"].param_groups]
        self.block(Variant("muon"), "warm-up", 0, options.training)
        for variants in (trained, frozen):
            for turn in range(options.turns):
                if self.late():
                    break
                for variant in variants[::-1] if turn % 2 else variants:
                    self.block(variant, "turn", turn)
        if options.trace is not None:
            for variant in options.traced:
                self.trace(variant)
        self.optimizers["muon"].release()
        self.block(Variant("adamw", weights="adamw"), "released", 0)

    def late(self) -> bool:
        """Whether rank 0's time is over: the same answer on all ranks."""
        over = torch.tensor(float(time.perf_counter() - self.began > self.options.seconds), device=self.device)
        dist.broadcast(over, 0)
        return bool(over.item())

    def block(self, variant: Variant, when: str, turn: int, steps: int | None = None) -> None:
        """Steps of one variant, on text that depends on the turn alone, and their row."""
        self.take(variant)
        self.order.manual_seed(1000 * (when == "warm-up") + self.options.seed + turn)
        synchronize(self.device)
        dist.barrier()
        synchronize(self.device)
        self.marks, energy = [], self.clocks.joules() if self.clocks else math.nan
        start = time.perf_counter(), self.mark()
        count = steps or self.options.settle + self.options.steps
        for _ in range(count):
            self.step()
        end = self.mark()
        synchronize(self.device)
        energy = (self.clocks.joules() if self.clocks else math.nan) - energy
        self.keep(variant)
        row = self.figures(start, end, energy / count, count)
        if self.rank == 0 and when != "warm-up":
            options = self.options
            row |= {"commit": options.commit, "gpu": device_name(self.device), "ranks": options.ranks,
                    "model": f"gpt_{options.layers}x{options.width}", "variant": str(variant), "when": when,
                    "turn": turn, "torch": torch.__version__, "batch": options.batch, "seq": options.seq}
            append(options.out, COLUMNS, [row])
            self.rows.append(row)
            print({key: row[key] for key in COLUMNS[4:22]}, flush=True)

    def take(self, variant: Variant) -> None:
        """Weights and rates of a variant."""
        self.variant, self.optimizer = variant, self.optimizers.get(variant.optimizer)
        torch._foreach_copy_(self.local, self.sets[variant.weights or variant.optimizer])
        if self.optimizer:
            for group, lr in zip(self.optimizer.param_groups, self.rates[variant.optimizer]):
                group["lr"] = 0.0 if variant.weights else lr

    def keep(self, variant: Variant) -> None:
        """A training goes on from here in its next turn."""
        if not variant.weights:
            torch._foreach_copy_(self.sets[variant.optimizer], self.local)

    def update(self) -> None:
        if self.optimizer:
            with torch.profiler.record_function("step") if self.marked else contextlib.nullcontext():
                self.optimizer.step()

    def step(self) -> None:
        """As that of train.py, with a mark at the end of what comes after the optimizer's step."""
        super().step()
        if self.variant.also == "idle" and self.device.type == "cuda":
            torch.cuda._sleep(self.cycles)
        if self.variant.also == "products" and self.device.type == "cuda":
            for _ in range(self.products):
                torch.mm(*self.operands[:2], out=self.operands[2])
        self.marks[-1] = (*self.marks[-1], self.mark())

    def sent(self, part):
        if self.variant.also == "pageable":
            return part.to(self.device, non_blocking=True)
        return super().sent(part)

    def forget(self) -> None:
        self.model.zero_grad()

    def figures(self, start, end, joules: float, count: int) -> dict:
        """The part of a row that is measured."""
        marks, skip = self.marks, self.options.settle if count > self.options.settle else 0
        begins = [step[0] for step in marks[1:]] + [end]
        times = [[self.between(*pair) for pair in zip(step, step[1:])] for step in marks]
        whole = [self.between(step[0], after) for step, after in zip(marks, begins)]
        table = [[step, step - took[-2] - took[-1], *took] for step, took in zip(whole, times)][skip:]
        largest = torch.tensor(table, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        row = {f"{name}_ms": round(statistics.median(column), 3)
               for name, column in zip(FIGURES, zip(*largest.tolist()))}
        loss = self.loss.detach().clone()
        dist.all_reduce(loss)
        row |= {"steps": len(table), "loss": round(loss.item() / self.options.ranks, 4)}
        return row | dict.fromkeys("mhz mhz_low watts capped mhz_optimizer joules".split(), "") | (
            self.measured_clocks(start, skip, joules) if self.device.type == "cuda" else {})

    def measured_clocks(self, start, skip, joules) -> dict:
        """Clock and power in forward and backward, and the clock in `step()`, over the ranks."""
        host, first = start

        def spans(*phase):
            return [tuple(host + 1e-3 * first.elapsed_time(step[at]) for at in phase) for step in self.marks[skip:]]

        mine = [*self.clocks.during(spans(0, 2)), self.clocks.during(spans(3, 4))[0], joules]
        ranks = torch.zeros(self.options.ranks, len(mine), dtype=torch.float64, device=self.device)
        ranks[self.rank] = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(ranks)
        mhz, watts, capped, in_step, energy = ranks.mean(0).tolist()
        found = {"mhz": mhz, "mhz_low": ranks[:, 0].min().item(), "watts": watts, "capped": capped,
                 "mhz_optimizer": in_step, "joules": energy}
        return {key: "" if math.isnan(value) else round(value, 3) for key, value in found.items()}

    def trace(self, variant: Variant) -> None:
        """Rank 0's trace of two steps, as `profiled` writes it."""
        self.take(variant)
        self.marks = []
        for _ in range(2):
            self.step()
        synchronize(self.device)
        dist.barrier()
        with profiled(self.device) as profiler:
            self.step()
            self.marked = True
            self.step()
            self.marked = False
            synchronize(self.device)
        self.keep(variant)
        if self.rank == 0:
            self.options.trace.mkdir(parents=True, exist_ok=True)
            export(profiler, self.options.trace / f"train_{variant}.json.gz".replace("+", "_").replace("@", "_at_"))
        dist.barrier()


def numbers(row: dict[str, str]) -> dict:
    """A row as it was before it was written."""
    measured = {key: float(row[key]) for key in COLUMNS[8:22] if row[key] != ""}
    return row | measured | {"turn": int(row["turn"])}


def summary(rows) -> list[str]:
    """A line for each variant: medians over its turns, and the difference of the time outside of `step()` from turn to
    turn with AdamW's on the same weights.
    """
    lines = []
    for variant in dict.fromkeys((row["variant"], row["when"]) for row in rows):
        mine = {row["turn"]: row for row in rows if (row["variant"], row["when"]) == variant}
        weights = variant[0].partition("@")[2]
        base = {row["turn"]: row for row in rows if row["when"] == "turn"
                and row["variant"] == "adamw" + f"@{weights}" * bool(weights)}
        medians = {key: statistics.median(values) for key in COLUMNS[8:21]
                   if (values := [row[key] for row in mine.values() if row[key] != ""])}
        text = ", ".join(f"{key} {value:.2f}" for key, value in medians.items())
        gaps = [row["outside_ms"] - base[turn]["outside_ms"] for turn, row in mine.items() if turn in base]
        told = f"; outside less AdamW's: {', '.join(f'{gap:+.2f}' for gap in gaps)}" if gaps else ""
        lines.append(f"{variant[0]} ({variant[1]}): {text}{told}")
    return lines


def differences(rows) -> list[str]:
    """A line for each of PAIRS with turns in common, and each of outside_ms, forward_ms and backward_ms: the mean
    difference, its 95 % interval by a paired t-test with three to five turns, and the difference of each turn, in ms.
    """
    turns = {}
    for row in rows:
        if row["when"] == "turn":
            turns.setdefault(row["variant"], {})[row["turn"]] = row
    lines = []
    for first, second in PAIRS:
        mine, other = turns.get(first, {}), turns.get(second, {})
        for key in ("outside_ms", "forward_ms", "backward_ms"):
            if gaps := [mine[turn][key] - other[turn][key] for turn in sorted(mine.keys() & other.keys())]:
                half = f" +- {half_width(gaps):.2f}" if len(gaps) in STUDENT_T else ""
                each = ", ".join(f"{gap:+.2f}" for gap in gaps)
                lines.append(f"{first} less {second}, {key}: {statistics.mean(gaps):+.2f}{half} ({each})")
    return lines


if __name__ == "__main__":
    main()

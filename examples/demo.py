"""Muon against AdamW: the same small GPT, seed and text, under FSDP2 over two processes (or all GPUs).

It ends with a table and writes demo.png, summary.json and one CSV per optimizer. It takes about three minutes on two
CPU cores; where a machine is too slow for that, both runs are shortened alike.
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from corpus import VOCABULARY
from figure import NAMES, draw
from gpt import GPT
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from train_gpt import (
    BEST_LR,
    Options,
    Record,
    leave_process_group,
    options_of,
    parser,
    pick_device,
    rounded,
    train,
    write_csv,
)

REPOSITORY = Path(__file__).resolve().parents[1]
BASELINE = "adamw"
PROBE_STEPS = 5
EVALUATION = 1.1  # training with the measurements of the held-out loss takes so much longer
MAX_THREADS = 8
LIVE_COLUMNS = ("loss {task.fields[loss]:.3f}  held-out {task.fields[heldout]:.3f}  "
                "{task.fields[speed]:,.0f} tokens/s{task.fields[metrics]}")


@dataclass(frozen=True)
class Summary:
    """One row of the final table; times are medians over the steps without metrics, losses in nats per byte."""
    optimizer: str
    lr: float
    train_loss: float
    heldout_loss: float
    step_ms: float
    optimizer_ms: float
    tokens_per_s: float


def arguments() -> argparse.Namespace:
    """The options of train_gpt.py, some with another meaning, and the demo's own two."""
    made = parser(__doc__)
    made.add_argument("--optimizer", choices=("muon", "normuon"), default="muon",
                      help="what is compared with AdamW (default: %(default)s)")
    made.add_argument("--out", default=str(REPOSITORY / "build" / "demo"), help="folder for the results")
    made.add_argument("--processes", type=int, help="processes to train on (default: as many GPUs as can share the "
                      "batch evenly, or 2 without a GPU)")
    made.add_argument("--seconds", type=float, default=180.0,
                      help="shorten both runs if the training would take longer (default: %(default)s)")
    given = made.parse_args()
    if given.processes and given.batch % given.processes:
        made.error(f"--batch {given.batch} cannot be split over {given.processes} processes")
    return given


def affordable_steps(options: Options, device: torch.device, seconds: float) -> int:
    """How many steps, at most options.steps, all runs can make in `seconds`: tried out, the same on every rank."""
    began, pair_s = time.perf_counter(), 0.0
    for name in (options.optimizer, BASELINE):
        records = train(replace(options, optimizer=name, steps=PROBE_STEPS), device)
        pair_s += statistics.median(record.step_ms for record in records) / 1e3
    left_s = seconds - (time.perf_counter() - began)
    steps = torch.tensor(left_s / (pair_s * EVALUATION), device=device)
    dist.all_reduce(steps, dist.ReduceOp.MIN)
    return min(options.steps, max(PROBE_STEPS, int(steps)))


class Watch:
    """Metrics of the steps in which the held-out loss is measured; empty with torch's AdamW.

    Only these steps collect, and they and the steps behind them bind the optimizer's step anew. All other steps are
    plain: the times of the table are theirs. Shorter runs than three steps, and measurements of every step or every
    second, leave no plain step: such runs have no metrics.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.short = self.text = ""

    def collects(self, step: int) -> bool:
        """Whether metrics of a step are shown; with AdamW, whether Muon's are."""
        every, steps = self.options.eval_every, self.options.steps
        return min(every, steps) > 2 and (step % every == 0 or step == steps)

    def is_plain(self, step: int) -> bool:
        """Whether the time of a step is that of a step without metrics."""
        return not (self.collects(step) or self.collects(step - 1) and step > 1)

    def __call__(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Read the group of hidden matrices, on all ranks together."""
        if self.collects(step) and self.options.optimizer != BASELINE:
            values = optimizer.metrics().groups[0]
            self.short = f"  update/weight {values.update_to_weight:.1e}"
            self.text = f"{self.short}  orthogonality error {values.orthogonality_error:.2f}"


def watched(records: Iterator[Record], title: str, steps: int, screen: Progress, watch: Watch) -> Iterator[Record]:
    """The same records, shown as a progress bar, or as lines of text where the output is no terminal."""
    bar = screen.add_task(title, total=steps, loss=float("nan"), heldout=float("nan"), speed=0.0, metrics="")
    for record in records:
        screen.update(bar, advance=1, loss=record.train_loss, speed=record.tokens_per_s, metrics=watch.short)
        if record.heldout_loss is not None:
            screen.update(bar, heldout=record.heldout_loss)
            if not screen.console.is_terminal:
                print(f"{title:6} step {record.step:4d}/{steps}  loss {record.train_loss:.3f}  held-out "
                      f"{record.heldout_loss:.3f}  {record.tokens_per_s:,.0f} tokens/s{watch.text}", flush=True)
        yield record


def run_rank(rank: int, processes: int, folder: str, options: Options, seconds: float) -> None:
    """One process of the demo: a few steps to see how fast they are, then one run per optimizer."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent alone answers Ctrl-C
    warnings.filterwarnings("ignore")
    device = pick_device(rank)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=processes,
                            init_method=f"file://{folder}/rendezvous")
    steps = affordable_steps(options, device, seconds)
    console = Console(quiet=rank > 0)
    if steps < options.steps:
        console.print(f"Shortened to {steps} steps, to stay within {seconds:.0f} s (--seconds)", style="yellow")
    columns = [TextColumn("{task.description:6}"), BarColumn(), MofNCompleteColumn(), TextColumn(LIVE_COLUMNS),
               TimeElapsedColumn()]
    with Progress(*columns, console=console, disable=rank > 0 or not console.is_terminal) as screen:
        for name in (options.optimizer, BASELINE):
            run = replace(options, optimizer=name, steps=steps)
            watch = Watch(run)
            records = train(run, device, watch, watch.collects)
            records = list(watched(records, NAMES[name], steps, screen, watch) if rank == 0 else records)
            if rank == 0:
                write_csv(Path(options.out) / f"{name}.csv", records)
                summary = summarize(NAMES[name], options.lr or BEST_LR[name], records, watch)
                Path(folder, f"{name}.json").write_text(json.dumps(asdict(summary)))
    leave_process_group()


def summarize(title: str, lr: float, records: list[Record], watch: Watch) -> Summary:
    """A run in one row; the train loss is the mean of the last tenth of the steps, times are those of plain steps."""
    last = records[-max(1, len(records) // 10):]
    train_loss = statistics.mean(record.train_loss for record in last)
    plain = [record for record in records if watch.is_plain(record.step)]
    medians = (statistics.median(getattr(record, key) for record in plain)
               for key in ("step_ms", "optimizer_ms", "tokens_per_s"))
    return Summary(title, *map(rounded, (lr, train_loss, records[-1].heldout_loss, *medians)))


def describe(options: Options, processes: int, threads: int) -> str:
    """What is trained, on what, in one line."""
    count = sum(p.numel() for p in GPT(VOCABULARY, options.layers, options.width, options.heads).parameters())
    text = "the *.py files of a folder" if options.data else "the sources of Python's standard library"
    if torch.cuda.is_available():
        where = f"{processes} x {torch.cuda.get_device_name()}"
    else:
        where = f"{processes} CPU processes with {threads} thread{'s' * (threads > 1)} each"
    return f"GPT with {count / 1e6:.1f} M parameters on {text}, {options.batch * options.seq} bytes a step; {where}"


def run_all(processes: int, options: Options, seconds: float) -> list[Summary]:
    """Start the processes, wait, and stop them all if one fails or the user interrupts."""
    with tempfile.TemporaryDirectory() as folder:
        # torch (2.13) aborts a process in which a thread of gloo lets go of a tensor just as Python (before 3.14) is
        # finalized. Forked processes end without finalizing it; those on GPUs have no gloo.
        method = "spawn" if torch.cuda.is_available() else "forkserver"
        mp.set_forkserver_preload(["torch._dynamo"])  # with torch, most of what a process imports: once for all
        group = mp.start_processes(run_rank, (processes, folder, options, seconds), processes, join=False,
                                   start_method=method)
        try:
            while not group.join():
                pass
        finally:
            for process in group.processes:
                process.terminate()
        return [Summary(**json.loads(Path(folder, f"{name}.json").read_text()))
                for name in (options.optimizer, BASELINE)]


def print_table(console: Console, summaries: list[Summary]) -> None:
    """The final table."""
    title = "Losses in nats per byte, times are medians of steps without metrics"
    table = Table("optimizer", box=box.SIMPLE_HEAD, title=title)
    for heading in ("lr", "train loss", "held-out", "step ms", "optimizer ms", "tokens/s"):
        table.add_column(heading, justify="right")
    for row in summaries:
        table.add_row(row.optimizer, f"{row.lr:g}", f"{row.train_loss:.3f}", f"{row.heldout_loss:.3f}",
                      f"{row.step_ms:.1f}", f"{row.optimizer_ms:.1f}", f"{row.tokens_per_s:,.0f}")
    console.print(table)


def processes_for(batch: int) -> int:
    """As many as there are GPUs, or fewer, so that they share the batch evenly; two on a CPU."""
    return max(n for n in range(1, 1 + (torch.cuda.device_count() or 2)) if batch % n == 0)


def main() -> int:
    """Train, then report; returns the exit status."""
    began, chosen, console = time.perf_counter(), arguments(), Console()
    options, folder = options_of(chosen), Path(chosen.out)
    processes = chosen.processes or processes_for(options.batch)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, min(MAX_THREADS, cores // processes))
    os.environ["LOCAL_KERNELS"] = os.environ.get("LOCAL_KERNELS") or f"org/optimizer={REPOSITORY}"
    os.environ.update(OMP_NUM_THREADS=str(threads), TORCH_CPP_LOG_LEVEL="ERROR")
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / f"{name}.csv").unlink(missing_ok=True)
    title = describe(options, processes, threads)
    console.print(title, soft_wrap=True)
    try:
        summaries = run_all(processes, options, chosen.seconds)
    except KeyboardInterrupt:
        console.show_cursor()
        console.print("Stopped.")
        return 130
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as failure:
        console.show_cursor()
        console.print(f"The demo failed: {failure}", style="red", markup=False)
        return 1
    summary = {"title": title, "runs": [asdict(row) for row in summaries]}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print_table(console, summaries)
    console.print(f"Picture: {draw(folder)}   ({time.perf_counter() - began:.0f} s in all)", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

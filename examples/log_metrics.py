"""Train the demo's GPT with Muon and log `optimizer.metrics()` to TensorBoard, to objects like wandb's run, or to CSV.

    python examples/log_metrics.py --tensorboard runs         with `pip install tensorboard`
    python examples/log_metrics.py --wandb my-project         with `pip install wandb`
    python examples/log_metrics.py --steps 160 --csv examples/results/metrics.csv --figure docs/figures/metrics.png

The last line is how the figure of docs/metrics.md was made. --figure draws the rows of --csv; with --steps 0 those that
are there. Also runs under torchrun: `metrics` is called on all ranks, and rank 0 logs.
"""
from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from train_gpt import Options, leave_process_group, options_of, parser, pick_device, rounded, train

Sink = Callable[[Mapping[str, float], int], None]  # (flat values, number of the step)
PANELS = {"update_rms": "RMS of the update", "update_to_weight": "update / weight",
          "momentum_norm": "norm of the momentum", "orthogonality_error": "orthogonality error"}
COLORS = "#c2410c", "#1d4ed8", "#15803d", "#7c3aed", "#6b7280"


def to_tensorboard(writer: object) -> Sink:
    """Log to a torch.utils.tensorboard.SummaryWriter, or to another object with `add_scalar`."""
    def log(values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return log


def to_wandb(run: object) -> Sink:
    """Log to the result of wandb.init, or to another object with `log(values, step=...)`."""
    return lambda values, step: run.log(dict(values), step=step)


def to_csv(path: str | Path) -> Sink:
    """Write a row per logged step; the keys of the first step are the columns.

    A cell is empty if its key is missing in a later step; keys that come later are left out.
    """
    Path(path).write_text("")
    columns = []

    def log(values: Mapping[str, float], step: int) -> None:
        with open(path, "a", newline="") as file:
            if not columns:
                columns.extend(["step", *values])
                csv.writer(file, lineterminator="\n").writerow(columns)
            writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
            writer.writerow({"step": step, **{key: rounded(value) for key, value in values.items()}})

    return log


def logging(sinks: list[Sink], every: int) -> Callable[[int, torch.optim.Optimizer], None]:
    """A function for `after_step` of `train`: every so many steps, all ranks read the metrics and rank 0 logs them."""
    def after_step(step: int, optimizer: torch.optim.Optimizer) -> None:
        if step % every:
            return
        values = optimizer.metrics().as_dict()
        if not dist.is_initialized() or dist.get_rank() == 0:
            for log in sinks:
                log(values, step)

    return after_step


def draw(table: str | Path, path: str | Path) -> None:
    """Draw the columns of PANELS, a line for each group, from the rows of a CSV file."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 3.2), dpi=120, layout="constrained")
    for axis, (name, title) in zip(axes, PANELS.items()):
        for key in [key for key in rows[0] if key.endswith(f"/{name}")]:
            group = key.split("/")[1]
            axis.plot([int(row["step"]) for row in rows], [float(row[key] or "nan") for row in rows], label=group,
                      color=COLORS[int(group.removeprefix("group")) % len(COLORS)], linewidth=1.5)
        axis.set(title=title, xlabel="step", yscale="linear" if name == "orthogonality_error" else "log")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    """One run, started by hand or by torchrun."""
    made = parser(__doc__)
    made.add_argument("--every", type=int, default=2, help="steps between two logs (default: %(default)s)")
    made.add_argument("--tensorboard", help="folder for TensorBoard")
    made.add_argument("--wandb", help="project of wandb")
    made.add_argument("--csv", help="CSV file for one row per log")
    made.add_argument("--figure", help="PNG file to draw from the rows of --csv")
    given = made.parse_args()
    if given.figure and not given.csv or given.optimizer == "adamw":
        made.error("--figure needs --csv" if given.figure else "--optimizer must be muon or normuon")
    options: Options = options_of(given)
    device = pick_device(int(os.environ.get("LOCAL_RANK", "0")))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    chief = not dist.is_initialized() or dist.get_rank() == 0
    sinks = []
    if chief and given.tensorboard:
        from torch.utils.tensorboard import SummaryWriter
        sinks.append(to_tensorboard(SummaryWriter(given.tensorboard)))
    if chief and given.wandb:
        import wandb
        sinks.append(to_wandb(wandb.init(project=given.wandb)))
    if chief and given.csv and options.steps:
        sinks.append(to_csv(given.csv))
    for record in train(options, device, logging(sinks, given.every)):
        if chief and record.heldout_loss is not None:
            losses = f"loss {record.train_loss:.3f}  held-out {record.heldout_loss:.3f}"
            print(f"step {record.step:5d}  {losses}", flush=True)
    if chief and given.figure:
        draw(given.csv, given.figure)
    if dist.is_initialized():
        leave_process_group()


if __name__ == "__main__":
    sys.exit(main())

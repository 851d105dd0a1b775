"""Held-out loss over learning rates, from the CSV of convergence.py and the demo's own sweep.

    python benchmarks/plot_lr.py benchmarks/results/convergence.csv --out docs/figures

Writes learning_rates_<size>.png for each size in the CSV, and learning_rates_demo.png. A dot is a run, a line joins the
means over seeds. Of AdamW, the runs with the rates of embeddings and head that all other optimizers have.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from functools import partial
from pathlib import Path

from figures import arguments, rows_of, write
from rows import read

DEMO = Path(__file__).resolve().parents[1] / "examples" / "results" / "sweep.csv"
COLOURS = {"adamw": "tab:blue", "muon": "tab:red", "normuon": "tab:purple", "torch_muon": "tab:gray"}

Losses = dict[str, dict[float, list[float]]]  # optimizer -> lr -> loss of each seed


def main() -> None:
    options = arguments(__doc__, "convergence.py")
    rows, gpu = rows_of(options.csv, options.gpu, options.commit)
    sizes = dict.fromkeys(row["size"] for row in rows)
    figures = {f"learning_rates_{size}": partial(draw, size=size) for size in sizes}
    write(options.out, {**figures, "learning_rates_demo": draw_demo}, rows, gpu)


def losses_of(rows: list[dict[str, str]]) -> Losses:
    """The losses of rows of one size; of runs with AdamW's rates of embeddings and head that most rows have."""
    losses = defaultdict(lambda: defaultdict(list))
    rates = [(row["embed_lr"], row["head_lr"]) for row in rows if row["optimizer"] != "adamw"]
    for row in rows:
        if not rates or (row["embed_lr"], row["head_lr"]) == statistics.mode(rates):
            losses[row["optimizer"]][float(row["lr"])].append(float(row["heldout_loss"]))
    return losses


def demo_losses(path: Path = DEMO) -> Losses:
    """The losses of the demo's sweep, in which all parameters have one rate."""
    losses = defaultdict(lambda: defaultdict(list))
    for row in read(path):
        losses[row["optimizer"]][float(row["lr"])].append(float(row["heldout_loss"]))
    return losses


def best(losses: dict[float, list[float]]) -> float:
    """The learning rate of the lowest mean loss."""
    return min(losses, key=lambda lr: statistics.mean(losses[lr]))


def draw(axes, rows: list[dict[str, str]], gpu: str, size: str) -> bool:
    return draw_losses(axes, losses_of([row for row in rows if row["size"] == size]), f"GPT, {size}, {gpu}")


def draw_demo(axes, rows: list[dict[str, str]], gpu: str) -> bool:
    return draw_losses(axes, demo_losses(), "the demo's GPT, 2.3 M parameters")


def draw_losses(axes, losses: Losses, title: str) -> bool:
    for name, by_lr in losses.items():
        colour = COLOURS.get(name)
        means = sorted((lr, statistics.mean(found)) for lr, found in by_lr.items())
        finite = [(lr, mean) for lr, mean in means if math.isfinite(mean)]
        axes.plot(*zip(*finite), color=colour, label=f"{name}, best {best(by_lr):g}")
        dots = [(lr, loss) for lr, found in by_lr.items() for loss in found]
        axes.plot(*zip(*dots), "o", markersize=4, color=colour)
    every = [loss for by_lr in losses.values() for found in by_lr.values() for loss in found]
    axes.set_ylim(top=min(1.6 * min(every), 1.05 * max(every)))  # without runs that diverged
    axes.set_xscale("log", base=2)
    rates = sorted({lr for by_lr in losses.values() for lr in by_lr})
    axes.set_xticks(rates, [f"{lr:g}" for lr in rates])
    axes.set(xlabel="learning rate of matrices", ylabel="held-out loss (nats per byte)", title=title)
    return True


if __name__ == "__main__":
    main()

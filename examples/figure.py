"""The demo's picture, drawn from the CSV files and the summary that a run left in a folder.

    python examples/figure.py examples/results/demo     draws demo.png there from the committed run
"""
from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

COLORS = {"Muon": "#c2410c", "NorMuon": "#7c3aed", "AdamW": "#1d4ed8"}
NAMES = {"muon": "Muon", "normuon": "NorMuon", "adamw": "AdamW"}


def read_runs(folder: Path) -> dict[str, list[dict]]:
    """The rows of every <optimizer>.csv in `folder`, Muon first; numbers as floats, empty cells as None."""
    runs = {}
    for key, name in NAMES.items():
        path = folder / f"{key}.csv"
        if path.exists():
            with open(path, newline="") as file:
                rows = csv.DictReader(file)
                runs[name] = [{cell: float(text) if text else None for cell, text in row.items()} for row in rows]
    return runs


def smooth(values: list[float], width: int) -> list[float]:
    """Mean of the last `width` values at every place."""
    return [sum(values[max(0, i + 1 - width):i + 1]) / min(width, i + 1) for i in range(len(values))]


def draw_losses(axes, runs: dict, across: str) -> None:
    """Train loss (thin, smoothed) and held-out loss (dots) against the column `across`."""
    for name, rows in runs.items():
        measured = [row for row in rows if row["heldout_loss"] is not None]
        axes.plot([row[across] for row in rows], smooth([row["train_loss"] for row in rows], 1 + len(rows) // 50),
                  color=COLORS[name], linewidth=1, alpha=0.45, label=f"{name}, train")
        axes.plot([row[across] for row in measured], [row["heldout_loss"] for row in measured],
                  color=COLORS[name], linewidth=2, marker="o", markersize=4, label=f"{name}, held out")
    axes.set_ylim(top=1.2 * max(row["heldout_loss"] for rows in runs.values() for row in rows if row["heldout_loss"]))
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.25)


def draw_step(axes, runs: list[dict]) -> None:
    """One bar per optimizer, from a row of the summary: median time of a step, the optimizer's share marked."""
    for place, run in enumerate(runs):
        name, whole, own = run["optimizer"], run["step_ms"], run["optimizer_ms"]
        axes.bar(place, whole - own, color=COLORS[name], alpha=0.25, width=0.6)
        axes.bar(place, own, bottom=whole - own, color=COLORS[name], width=0.6)
        axes.annotate(f"optimizer\n{own:.1f} ms", (place, whole), (0, 4), textcoords="offset points",
                      ha="center", va="bottom")
        axes.annotate("forward,\nbackward", (place, (whole - own) / 2), ha="center", va="center", color="#374151")
    axes.set_xticks(range(len(runs)), [run["optimizer"] for run in runs])
    axes.set_ylabel("median time of a step (ms)")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.18)
    axes.set_title("Time of a step")


def draw(folder: Path) -> Path:
    """Write demo.png into `folder` and return its path."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    runs = read_runs(folder)
    for rows in runs.values():
        seconds = 0.0
        for row in rows:
            seconds += row["step_ms"] / 1e3
            row["seconds"] = seconds
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (by_step, by_time, step) = plt.subplots(1, 3, figsize=(12, 3.9), dpi=150, layout="constrained",
                                                    width_ratios=(1, 1, 0.62))
    draw_losses(by_step, runs, "step")
    by_step.set(xlabel="step", title="Loss by step")
    by_step.legend(frameon=False)
    draw_losses(by_time, runs, "seconds")
    by_time.set(xlabel="training time (s)", title="Loss by time, optimizer included")
    by_time.sharey(by_step)
    summary = json.loads((folder / "summary.json").read_text())
    draw_step(step, summary["runs"])
    figure.suptitle(summary["title"], fontsize=10, color="#4b5563")
    figure.savefig(folder / "demo.png")
    return folder / "demo.png"


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))

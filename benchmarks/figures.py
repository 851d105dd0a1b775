"""What plot.py and plot_step.py share: their options, and a file for each figure that the CSV has rows for."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import matplotlib
from rows import read

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def arguments(description: str, writer: str, docs: str = ""):
    """The command line of a script that draws what `writer` wrote; `docs`: what it writes to documents, if anything."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", help=f"what {writer} wrote")
    parser.add_argument("--out", default=".", help="folder for the figures")
    parser.add_argument("--gpu", default=None, help="rows of this GPU (default: that of most rows)")
    parser.add_argument("--commit", default=None, help="rows of this commit (default: of all)")
    if docs:
        parser.add_argument("--docs", default=None, help=f"folder of documents: write {docs}")
    return parser.parse_args()


def usual_gpu(rows) -> str:
    """The GPU of most rows."""
    return statistics.mode(row["gpu"] for row in rows)


def rows_of(path, gpu=None, commit=None) -> tuple[list[dict[str, str]], str]:
    """(The rows of one GPU, its name): by default of that of most rows. SystemExit where there are none."""
    rows = [row for row in read(path) if not commit or row["commit"] == commit]
    gpu = gpu or (usual_gpu(rows) if rows else "any GPU")
    found = [row for row in rows if row["gpu"] == gpu]
    if not found:
        others = ", ".join(sorted({row["gpu"] for row in rows}))
        raise SystemExit(f"{path} has no rows of {gpu}, but of: {others or 'none'}")
    return found, gpu


def write(out: str, figures: dict, *rows) -> None:
    """Write NAME.png to the folder `out` for each name -> draw(axes, *rows) that returns True."""
    Path(out).mkdir(parents=True, exist_ok=True)
    for name, draw in figures.items():
        figure, axes = plt.subplots(figsize=(11, 5), layout="constrained")
        if draw(axes, *rows):
            axes.legend(frameon=False, fontsize=8)
            figure.savefig(Path(out) / f"{name}.png", dpi=120)
            print(Path(out) / f"{name}.png")
        plt.close(figure)

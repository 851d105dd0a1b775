"""Find the learning rates that the demo uses: the same grid and seeds for every optimizer, the demo's own length.

Each run is one row appended to examples/results/sweep.csv; runs that are already there are not repeated, so several
of these can share the work.
"""
from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from rows import append, read, table  # noqa: E402
from train_gpt import BEST_LR, Options, options_of, parser, pick_device, train  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "sweep.csv"
GRID = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
SEEDS = (0, 1, 2)
COLUMNS = ("optimizer", "lr", "seed", "steps", "train_loss", "heldout_loss", "device", "torch")
MODEL = ("layers", "width", "heads", "batch", "seq", "data")  # options that no column tells of


def read_rows(path: Path = RESULTS) -> list[dict[str, str]]:
    """The rows so far, as text."""
    return read(path) if path.exists() else []


def command_line(description: str, columns: tuple[str, ...], path: Path) -> argparse.ArgumentParser:
    """The options of a training, and --out: by default the demo's own table."""
    made = parser(description)
    made.add_argument("--out", type=table(columns), default=str(path), help="CSV file, continued where it exists "
                      "(default: %(default)s)")
    return made


def parsed(made: argparse.ArgumentParser, path: Path) -> argparse.Namespace:
    """The arguments; the demo's own table is for the demo's own model."""
    given = made.parse_args()
    if given.out == path and (other := [name for name in MODEL if getattr(given, name) != getattr(Options, name)]):
        made.error(f"--{other[0]} wants an --out of its own: {path.name} does not say of which model a row is")
    return given


def mean_losses(rows: list[dict[str, str]]) -> dict[str, dict[float, float]]:
    """Per optimizer and learning rate, the held-out loss averaged over the seeds; infinite if one run diverged."""
    losses = defaultdict(lambda: defaultdict(list))
    for row in rows:
        loss = float(row["heldout_loss"])
        losses[row["optimizer"]][float(row["lr"])].append(loss if math.isfinite(loss) else math.inf)
    return {name: {lr: statistics.mean(values) for lr, values in sorted(by_lr.items())}
            for name, by_lr in sorted(losses.items())}


def run_one(options, device: torch.device) -> dict:
    """Train once and return its row; the train loss is the mean of the last tenth of the steps."""
    records = list(train(options, device))
    last = records[-max(1, len(records) // 10):]
    train_loss = statistics.mean(record.train_loss for record in last)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    values = (options.optimizer, options.lr, options.seed, options.steps, round(train_loss, 4),
              round(records[-1].heldout_loss, 4), where, torch.__version__)
    return dict(zip(COLUMNS, values))


def main() -> None:
    """Run what is missing of the grid, then print the mean losses."""
    made = command_line(__doc__, COLUMNS, RESULTS)
    made.add_argument("--optimizer", choices=sorted(BEST_LR), help="only this one (default: all)")
    made.add_argument("--lr", type=float, help="only this rate (default: the whole grid)")
    made.add_argument("--seed", type=int, help="only this seed (default: all)")
    made.set_defaults(eval_every=10**9)  # at the end only
    given = parsed(made, RESULTS)
    base, device, path = options_of(given), pick_device(0), given.out

    def found() -> list[dict[str, str]]:
        return [row for row in read_rows(path) if int(row["steps"]) == base.steps]

    done = {(row["optimizer"], float(row["lr"]), int(row["seed"])) for row in found()}
    for name in [base.optimizer] if base.optimizer else BEST_LR:
        for lr in [base.lr] if base.lr else GRID:
            for seed in SEEDS if base.seed is None else [base.seed]:
                if (name, lr, seed) not in done:
                    append(path, COLUMNS, [run_one(replace(base, optimizer=name, lr=lr, seed=seed), device)])
    for name, by_lr in mean_losses(found()).items():
        best = min(by_lr, key=by_lr.get)
        print(f"{name:8}", "  ".join(f"{lr:g}: {loss:.3f}{'*' if lr == best else ' '}" for lr, loss in by_lr.items()))


if __name__ == "__main__":
    sys.exit(main())

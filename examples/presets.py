"""Losses of the demo's model under several coefficient sets of the polar factor: the same data, seeds and rates.

    python examples/presets.py --ns-dtype float16 --seeds 0 1 2

One CSV row per measurement of the held-out loss; runs that the file already has are not repeated. The other options
are those of train_gpt.py.
"""
from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from sweep import append, command_line, parsed, read_rows
from train_gpt import BEST_LR, options_of, pick_device, rounded, train

RESULTS = Path(__file__).parent / "results" / "presets.csv"
SETS = ("polar_express", "turbo", "cubic")
COLUMNS = ("ns_coefficients", "ns_dtype", "optimizer", "lr", "seed", "steps", "step", "train_loss", "heldout_loss",
           "device", "torch")
ALIKE = ("ns_dtype", "optimizer", "lr", "steps")  # of runs that are compared


def run_one(options, device: torch.device) -> list[dict]:
    """Train once; the train loss of a row is the mean since the row before."""
    rows, losses = [], []
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    for record in train(options, device):
        losses.append(record.train_loss)
        if record.heldout_loss is not None:
            values = (options.ns_coefficients, options.ns_dtype or "default", options.optimizer, rate_of(options),
                      options.seed, options.steps, record.step, rounded(statistics.mean(losses)),
                      rounded(record.heldout_loss), where, torch.__version__)
            rows.append(dict(zip(COLUMNS, values)))
            losses.clear()
    return rows


def rate_of(options) -> float:
    return options.lr or BEST_LR[options.optimizer]


def last_losses(rows: list[dict[str, str]]) -> dict[str, list[float]]:
    """Per set, the held-out losses at the end of its runs."""
    losses = defaultdict(list)
    for row in rows:
        if row["step"] == row["steps"]:
            losses[row["ns_coefficients"]].append(float(row["heldout_loss"]))
    return losses


def main() -> None:
    """Train what is missing, then print the last held-out losses."""
    made = command_line(__doc__, COLUMNS, RESULTS)
    made.add_argument("--sets", nargs="+", default=SETS, help="coefficient sets (default: %(default)s)")
    made.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2), help="one run each (default: %(default)s)")
    given = parsed(made, RESULTS)
    base, path, device = options_of(given), given.out, pick_device(0)
    wanted = [str(x) for x in (base.ns_dtype or "default", base.optimizer, rate_of(base), base.steps)]  # as ALIKE

    def found() -> list[dict[str, str]]:
        return [row for row in read_rows(path) if [row[key] for key in ALIKE] == wanted]

    for seed in given.seeds:
        for name in given.sets:
            if not any((row["ns_coefficients"], row["seed"]) == (name, str(seed)) for row in found()):
                append(path, COLUMNS, run_one(replace(base, ns_coefficients=name, seed=seed), device))
    for name, losses in last_losses(found()).items():
        print(f"{name:15} held-out {statistics.mean(losses):.4f}  ({', '.join(f'{loss:.4f}' for loss in losses)})")


if __name__ == "__main__":
    sys.exit(main())

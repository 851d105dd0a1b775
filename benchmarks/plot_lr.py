"""Held-out loss over learning rates, from the CSV of convergence.py and the demo's own sweep.

    python benchmarks/plot_lr.py benchmarks/results/convergence.csv --out docs/figures --docs docs

Writes learning_rates_<size>.png for each size in the CSV, and learning_rates_demo.png. A dot is a run, a line joins the
means over seeds. Of AdamW, the runs with the rates of embeddings and head that all other optimizers have. Figures are
of all GPUs without --gpu and --commit: a loss is comparable, other than a time. With --docs, writes the tables of
learning_rates.md and evidence.md in that folder anew, too. Those are of all rows, also with --gpu and --commit.
"""

from __future__ import annotations

import itertools
import math
import statistics
import textwrap
from collections import defaultdict
from functools import partial
from pathlib import Path

import convergence
from documents import write_parts
from figures import arguments, rows_of, write
from rows import read

DEMO = Path(__file__).resolve().parents[1] / "examples" / "results" / "sweep.csv"
COLOURS = {"adamw": "tab:blue", "muon": "tab:red", "normuon": "tab:purple", "torch_muon": "tab:gray"}
STYLES = [(style, colour) for style in ("-", "--", ":")
          for colour in ("tab:orange", "tab:green", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")]

Losses = dict[str, dict[float, list[float]]]  # optimizer -> lr -> loss of each seed


def main() -> None:
    options = arguments(__doc__, "convergence.py", docs="the tables of learning_rates.md and evidence.md")
    rows = read(options.csv)
    gpu = ", ".join(dict.fromkeys(convergence.short_name(row["gpu"]) for row in rows))
    if options.gpu or options.commit or not rows:
        rows, gpu = rows_of(options.csv, options.gpu, options.commit)
    sizes = dict.fromkeys(row["size"] for row in rows)
    figures = {f"learning_rates_{size}": partial(draw, size=size) for size in sizes}
    write(options.out, {**figures, "learning_rates_demo": draw_demo}, rows, gpu)
    if options.docs:
        rows = read(options.csv)
        write_parts(Path(options.docs, "learning_rates.md"), {"best rates": best_rates(rows)})
        write_parts(Path(options.docs, "evidence.md"), evidence(rows))


def sizes_of(rows: list[dict[str, str]]) -> dict[tuple[str, ...], list[dict[str, str]]]:
    """The rows of each (size, text, steps)."""
    found = {}
    for row in rows:
        found.setdefault((row["size"], row["corpus"], row["steps"]), []).append(row)
    return found


def best_rates(rows: list[dict[str, str]]) -> list[str]:
    """The table of best rates of all sweeps, the demo's being the last."""
    lines = ["| model | optimizer | best `lr` | held-out loss | seeds at this `lr` | seeds at other rates |",
             "|---|---|---|---|---|---|"]
    sizes = sorted({row["size"] for row in rows})
    sweeps = {size: losses_of([row for row in rows if row["size"] == size]) for size in sizes}
    for model, losses in {**sweeps, "demo": demo_losses()}.items():
        for name, by_lr in sorted(losses.items()):
            lr = best(by_lr)
            others = sorted({len(found) for other, found in by_lr.items() if other != lr})
            lines.append(f"| {model} | {name} | {lr:g} | {statistics.mean(by_lr[lr]):.4f} | {len(by_lr[lr])} | "
                         f"{'/'.join(map(str, others))} |")
    return lines


def evidence(rows: list[dict[str, str]]) -> dict[str, list[str]]:
    """The parts of evidence.md: losses, the rules that pay or do not, and the runs that are missing."""
    parts = {"losses": [], "rules": [], "missing runs": []}
    for (size, corpus, steps), found in sizes_of(rows).items():
        one = found[0]
        seen = {key: ", ".join(dict.fromkeys(row[key] for row in found)) for key in ("gpu", "torch", "commit")}
        head = (f"**{size}**: {float(one['parameters']) / 1e6:.1f} M parameters, {steps} steps, "
                f"{float(one['tokens']) / 1e6:.1f} M tokens of the text \"{corpus}\" ({one['text_mb']} MB). "
                f"GPU: {seen['gpu']}. torch {seen['torch']}. Commit: {seen['commit']}.")
        parts["losses"] += [head, "", *convergence.table(found), ""]
        parts["rules"] += [f"- {size}, {line}" for line in verdicts(found)]
        missing = convergence.plan(found, list(convergence.OPTIMIZERS))
        parts["missing runs"] += [f"**{size}**:", "", *(line for line in missing if not line.endswith(" 0 | 0 |")), ""]
    return {name: wrapped("\n".join(lines).strip().split("\n")) for name, lines in parts.items()}


def wrapped(lines: list[str]) -> list[str]:
    """Lines of at most 120 characters, tables as they are."""
    return [part for line in lines for part in (
        [line] if line.startswith("|") or not line else
        textwrap.wrap(line, 120, subsequent_indent="  " if line.startswith("- ") else "", break_on_hyphens=False))]


def verdicts(rows: list[dict[str, str]]) -> list[str]:
    """Which optimizers have a lower loss than Muon, which have not, and of which too few runs are there to say."""
    muon = convergence.best_rows(rows, "muon")
    answers = defaultdict(list)
    for name in convergence.OPTIMIZERS:
        if name != "muon":
            found = convergence.best_rows(rows, name)
            answers[convergence.beside(found, muon)[0] if found else "not run"].append(name)
    texts = {"lower": "loss lower than Muon's", "no difference found": "no difference from Muon's loss found",
             "higher": "loss higher than Muon's", "open": "open, fewer than three seeds in common with Muon",
             "not run": "not run"}
    return [f"{text}: {', '.join(answers[answer]) or 'none'}." for answer, text in texts.items()]


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
    styles = itertools.cycle(STYLES)
    for name, by_lr in losses.items():
        style, colour = ("-", COLOURS[name]) if name in COLOURS else next(styles)
        means = sorted((lr, statistics.mean(found)) for lr, found in by_lr.items())
        finite = [(lr, mean) for lr, mean in means if math.isfinite(mean)]
        axes.plot(*zip(*finite), style, color=colour, label=f"{name}, best {best(by_lr):g}")
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

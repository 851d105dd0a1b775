"""Held-out loss over learning rates, from the CSV of convergence.py and the demo's own sweep.

    python benchmarks/plot_lr.py benchmarks/results/convergence.csv --out docs/figures --docs docs

Writes learning_rates_<size>_<text>.png and losses_<size>_<text>.png (loss over tokens at the best rates) for each size
and text in the CSV, differences.png (loss minus Muon's, all sizes and texts) and learning_rates_demo.png. In figures of
rates a dot is a run. A line joins the means over the seeds that all rates of an optimizer have, by which the best is
chosen: more seeds of the best rate alone would bend the line. Of AdamW, the runs with the rates of embeddings and head
that all other optimizers have. Figures are of all GPUs without --gpu and --commit: a loss is comparable, other than a
time. With --docs, writes the tables of learning_rates.md and evidence.md in that folder anew, too, and the list of
figures. Those are of all rows, also with --gpu and --commit.
"""

from __future__ import annotations

import itertools
import statistics
import textwrap
from collections import defaultdict
from functools import partial
from pathlib import Path

import convergence
import convergence_table
from documents import write_parts
from figures import arguments, rows_of, write
from rows import read

DEMO = Path(__file__).resolve().parents[1] / "examples" / "results" / "sweep.csv"
# (Line style, colour) of each optimizer, the same in all figures
COLOURS = {"adamw": "tab:blue", "muon": "tab:red", "normuon": "tab:purple", "torch_muon": "tab:gray"}
STYLES = {name: ("-", colour) for name, colour in COLOURS.items()}
STYLES |= zip((name for name in convergence.OPTIMIZERS if name not in COLOURS), itertools.product(
    ("-", "--", ":"), ("tab:orange", "tab:green", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")))

TEXTS = ("packages", "stdlib")  # each size is to be trained on
Losses = dict[str, dict[float, dict[int, float]]]  # optimizer -> lr -> seed -> loss
Sweep = tuple[str, str, str]  # size, text, steps


def main() -> None:
    options = arguments(__doc__, "convergence.py", docs="the tables of learning_rates.md and evidence.md")
    rows = read(options.csv)
    if options.gpu or options.commit or not rows:
        rows, _ = rows_of(options.csv, options.gpu, options.commit)
    figures = {figure_of(sweep): partial(draw, sweep=sweep) for sweep in sweeps_of(rows)}
    figures |= {figure_of(sweep, "losses"): partial(draw_curves, sweep=sweep) for sweep in sweeps_of(rows)}
    write(options.out, {**figures, "differences": draw_differences, "learning_rates_demo": draw_demo}, rows)
    if options.docs:
        rows = read(options.csv)
        write_parts(Path(options.docs, "learning_rates.md"),
                    {"figures": links(rows), "best rates": best_rates(rows)})
        write_parts(Path(options.docs, "evidence.md"), evidence(rows))


def sweeps_of(rows: list[dict[str, str]]) -> dict[Sweep, list[dict[str, str]]]:
    """The rows of each sweep, small sizes first."""
    found = defaultdict(list)
    for row in rows:
        found[row["size"], row["corpus"], row["steps"]].append(row)
    sizes = list(convergence.SIZES)
    return dict(sorted(found.items(), key=lambda pair: (sizes.index(pair[0][0]), pair[0][1], int(pair[0][2]))))


def name_of(sweep: Sweep) -> str:
    """A sweep in words. The number of steps is said if it is not that of the size."""
    size, corpus, steps = sweep
    usual = steps == str(convergence.SIZES[size].steps)
    return f"{size} on {corpus}" + ("" if usual else f", {steps} steps")


def figure_of(sweep: Sweep, what: str = "learning_rates") -> str:
    """The name of a figure's file: "learning_rates" or "losses" of a sweep."""
    return f"{what}_{name_of(sweep).replace(' on ', '_').replace(', ', '_').replace(' ', '_')}"


def links(rows: list[dict[str, str]]) -> list[str]:
    """The figures of all sweeps, the demo's being the last."""
    figures = {name_of(sweep): figure_of(sweep) for sweep in sweeps_of(rows)}
    figures["the demo's GPT"] = "learning_rates_demo"
    lines = (f"![Held-out loss over learning rates, {name}](figures/{file}.png)" for name, file in figures.items())
    return "\n\n".join(lines).split("\n")


def best_rates(rows: list[dict[str, str]]) -> list[str]:
    """The table of best rates: a line for each optimizer, a column for each sweep, the demo's being the last."""
    sweeps, demo = sweeps_of(rows), demo_losses()
    lines = [f"| {' | '.join(('optimizer', *map(name_of, sweeps), 'demo'))} |", "|---" * (len(sweeps) + 2) + "|"]
    for name in convergence.OPTIMIZERS:
        cells = [best_rate(found, name) for found in sweeps.values()]
        lr = convergence_table.best_rate(demo[name]) if name in demo else None
        cells += ["" if lr is None else f"{lr:g} ({len(demo[name][lr])})"]
        lines += [f"| {' | '.join((name, *cells))} |"] if any(cells) else []
    return lines


def best_rate(rows: list[dict[str, str]], name: str) -> str:
    """A cell of `best_rates`: the rate, its number of seeds, and what `shown_rate` adds."""
    best = convergence_table.best_rows(rows, name)
    if not best:
        return ""
    if statistics.mean(float(row["heldout_loss"]) for row in best) >= convergence_table.LOST:
        return "all diverged"
    rate, comma, note = convergence_table.shown_rate(rows, best).partition(",")
    return f"{rate} ({len(best)}){comma}{note}"


def evidence(rows: list[dict[str, str]]) -> dict[str, list[str]]:
    """The parts of evidence.md: a summary, losses, the differences from Muon, and the runs that are missing."""
    sweeps = sweeps_of(rows)
    parts = {"summary": summary(sweeps), "losses": [], "rules": differences(sweeps), "missing runs": []}
    for sweep, found in sweeps.items():
        one, name, size = found[0], name_of(sweep), convergence.SIZES[sweep[0]]
        seen = {key: ", ".join(dict.fromkeys(row[key] for row in found)) for key in ("gpu", "torch", "commit")}
        head = (f"**{name}**: {float(one['parameters']) / 1e6:.1f} M parameters, {sweep[2]} steps, "
                f"{float(one['tokens']) / 1e6:.1f} M tokens of the text \"{sweep[1]}\" ({one['text_mb']} MB). "
                f"GPU: {seen['gpu']}. torch {seen['torch']}. Commit: {seen['commit']}.")
        parts["losses"] += [head, "", *convergence_table.table(found), ""]
        if last_losses(found):
            parts["losses"] += [f"![Held-out loss over tokens, {name}](figures/{figure_of(sweep, 'losses')}.png)", ""]
        missing = convergence.plan(found, list(convergence.OPTIMIZERS), size)
        missing = [line for line in missing if not line.endswith(" 0 | 0 |")]
        none = missing[2] == ""  # no line of an optimizer
        parts["missing runs"] += [f"**{name}**: {'none.' if none else ''}".rstrip(), ""]
        parts["missing runs"] += [] if none else [*missing, ""]
    parts["rules"] += ["", "![Loss minus Muon's in all sweeps, with 95 % intervals](figures/differences.png)"]
    texts = dict.fromkeys([*TEXTS, *(corpus for _, corpus, _ in sweeps)])
    unseen = [f"{size} on {corpus}" for size in convergence.SIZES if size != "tiny" for corpus in texts
              if (size, corpus) not in {sweep[:2] for sweep in sweeps}]
    parts["missing runs"] += [f"No run yet: {', '.join(unseen) or 'none'}."] if unseen else []
    return {name: wrapped("\n".join(lines).strip().split("\n")) for name, lines in parts.items()}


def wrapped(lines: list[str]) -> list[str]:
    """Lines of at most 120 characters, tables as they are."""
    return [part for line in lines for part in (
        [line] if line.startswith("|") or not line else
        textwrap.wrap(line, 120, subsequent_indent="  " if line.startswith("- ") else "", break_on_hyphens=False))]


def summary(sweeps: dict[Sweep, list[dict[str, str]]]) -> list[str]:
    """The table of Muon and NorMuon beside AdamW, with a column for each sweep that has the best rates of all three."""
    titles = {"muon": "Muon", "normuon": "NorMuon"}
    cells = {name_of(sweep): convergence_table.summary(found, titles) for sweep, found in sweeps.items()}
    cells = {name: own for name, own in cells.items() if own}
    lines = [f"| {' | '.join(('', *cells))} |", "|---" * (len(cells) + 1) + "|"]
    return lines + [f"| {' | '.join((line, *(own[line] for own in cells.values())))} |"
                    for line in next(iter(cells.values()), {})]


def differences(sweeps: dict[Sweep, list[dict[str, str]]]) -> list[str]:
    """The table of losses minus Muon's: a line for each optimizer, a column for each sweep."""
    lines = [f"| {' | '.join(('optimizer', 'how to have it', *map(name_of, sweeps)))} |",
             "|---" * (len(sweeps) + 2) + "|"]
    for name in convergence.OPTIMIZERS:
        if name != "muon":
            cells = (name, convergence_table.CALLS[name], *(verdict(found, name) for found in sweeps.values()))
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def verdict(rows: list[dict[str, str]], name: str) -> str:
    """A cell of `differences`: the mean difference and its 95 % interval, with **lower** or **higher** if 0 is outside;
    or open (too few seeds), rate not found, diverged, or not run.
    """
    answer, interval = convergence_table.beside_muon(rows, name)
    if answer == "open":
        gaps = convergence_table.gaps_of(*(convergence_table.best_rows(rows, one) for one in (name, "muon")))
        few = f"{len(gaps)} seed{'s' * (len(gaps) != 1)}"
        return f"open, {few}" + (f": {round(statistics.mean(gaps), 4) + 0.0:+.4f}" if gaps else "")
    texts = {"lower": "**lower** ", "higher": "**higher** ", "no difference found": ""}
    return texts.get(answer, answer) + interval


def losses_of(rows: list[dict[str, str]]) -> Losses:
    """The losses of a sweep; of runs with AdamW's rates of embeddings and head that most rows have."""
    losses = defaultdict(lambda: defaultdict(dict))
    rates = [(row["embed_lr"], row["head_lr"]) for row in rows if row["optimizer"] != "adamw"]
    if not rates:
        rates = [(row["embed_lr"], row["head_lr"]) for row in convergence_table.best_rows(rows, "adamw")]
    for row in rows:
        if (row["embed_lr"], row["head_lr"]) == statistics.mode(rates):
            losses[row["optimizer"]][float(row["lr"])][int(row["seed"])] = float(row["heldout_loss"])
    return losses


def demo_losses(path: Path = DEMO) -> Losses:
    """The losses of the demo's sweep, in which all parameters have one rate."""
    losses = defaultdict(lambda: defaultdict(dict))
    for row in read(path):
        losses[row["optimizer"]][float(row["lr"])][int(row["seed"])] = float(row["heldout_loss"])
    return losses


def draw(axes, rows: list[dict[str, str]], sweep: Sweep) -> bool:
    found = sweeps_of(rows)[sweep]
    gpus = ", ".join(dict.fromkeys(convergence_table.short_name(row["gpu"]) for row in found))
    return draw_losses(axes, losses_of(found), f"GPT, {name_of(sweep)}, {gpus}")


def last_losses(rows: list[dict[str, str]]) -> dict[str, float]:
    """{optimizer: mean last loss of its curves} of those whose best rate is found and which learned."""
    last = {name: convergence_table.mean_curve(own)[-1][1]
            for name, own in convergence_table.results_of(rows).items()}
    return {name: loss for name, loss in last.items() if loss < convergence_table.LOST}


def draw_curves(axes, rows: list[dict[str, str]], sweep: Sweep) -> bool:
    """Held-out loss over tokens at the best rate of each optimizer, mean of its seeds. In colour: AdamW, Muon, NorMuon,
    and those whose loss differs from Muon's; all others are gray. Dotted: AdamW's last loss. Optimizers whose best rate
    is not found are left out. False if it is none's.
    """
    found = sweeps_of(rows)[sweep]
    millions_per_step = float(found[0]["tokens"]) / int(sweep[2]) / 1e6
    last = last_losses(found)
    if not last:
        return False
    few = any(convergence_table.beside_muon(found, name)[0] == "open" for name in last)
    gray = f"no difference from muon found{', or too few seeds' * few}"
    for name in sorted(last, key=last.get, reverse=True):
        curve = convergence_table.mean_curve(convergence_table.best_rows(found, name))
        tokens, losses = zip(*((millions_per_step * step, loss) for step, loss in curve))
        style, colour = STYLES[name]
        answer = convergence_table.beside_muon(found, name)[0]
        if name in ("adamw", "muon", "normuon") or answer in ("lower", "higher"):
            axes.plot(tokens, losses, style, color=colour, zorder=3, label=f"{name}, {losses[-1]:.3f}")
        else:
            axes.plot(tokens, losses, color="lightgray", linewidth=1, label=gray)
            gray = None  # one entry of the legend for all
        if name == "adamw":
            axes.axhline(losses[-1], color=colour, linestyle=":", linewidth=1)
    axes.set_ylim(0.97 * min(last.values()), 1.6 * min(last.values()))
    axes.set(xlabel="tokens (millions)", ylabel="held-out loss (nats per byte)", title=f"GPT, {name_of(sweep)}")
    return True


def draw_differences(axes, rows: list[dict[str, str]]) -> bool:
    """Loss minus Muon's at the best rates of each sweep: mean and 95 % interval over seeds, or hollow and without an
    interval with too few seeds. Without AdamW, which is far beyond the others, and without optimizers whose best rate
    is not found. False if no optimizer has enough seeds.
    """
    sweeps, names = sweeps_of(rows), [name for name in convergence.OPTIMIZERS if name not in ("adamw", "muon")]
    seen = False
    for number, (sweep, found) in enumerate(sweeps.items()):
        results, labelled = convergence_table.results_of(found), False
        for place, name in enumerate(names):
            gaps = convergence_table.gaps_of(results.get(name, []), results.get("muon", []))
            if not gaps or max(map(abs, gaps)) >= convergence_table.LOST / 2:
                continue
            enough = len(gaps) in convergence_table.STUDENT_T
            axes.errorbar(statistics.mean(gaps), place + 0.2 * (number - (len(sweeps) - 1) / 2),
                          xerr=convergence_table.half_width(gaps) if enough else None, fmt="o", markersize=4,
                          capsize=2, color=f"C{number}", markerfacecolor=None if enough else "white",
                          label=name_of(sweep) if enough and not labelled else None)
            seen, labelled = seen or enough, labelled or enough
    axes.axvline(0, color="black", linewidth=0.5)
    for place in range(1, len(names)):
        axes.axhline(place - 0.5, color="lightgray", linewidth=0.5)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="held-out loss minus Muon's (nats per byte); left of 0 is better",
             title="95 % intervals; hollow: fewer than three seeds, no interval")
    return seen


def draw_demo(axes, rows: list[dict[str, str]]) -> bool:
    return draw_losses(axes, demo_losses(), "the demo's GPT, 2.3 M parameters")


def draw_losses(axes, losses: Losses, title: str) -> bool:
    for name, by_lr in losses.items():
        style, colour = STYLES[name]
        means = sorted(convergence_table.comparable_means(by_lr).items())
        finite = [(lr, mean) for lr, mean in means if mean < convergence_table.LOST]
        if not finite:
            continue
        best = convergence_table.best_rate(by_lr)
        note = "best " if convergence_table.is_bracketed(best, by_lr) else "so far " if len(by_lr) > 1 else ""
        axes.plot(*zip(*finite), style, color=colour, label=f"{name}, {note}{best:g}")
        dots = [(lr, loss) for lr, found in by_lr.items() for loss in found.values() if loss < convergence_table.LOST]
        axes.plot(*zip(*dots), "o", markersize=4, color=colour)
    every = [loss for by_lr in losses.values() for found in by_lr.values() for loss in found.values()]
    axes.set_ylim(top=min(1.6 * min(every), 1.05 * max(every)))  # without rates far too large
    axes.set_xscale("log", base=2)
    rates = sorted({lr for by_lr in losses.values() for lr in by_lr})
    axes.set_xticks(rates, [f"{lr:g}" for lr in rates], rotation=45)
    axes.set(xlabel="learning rate of matrices", ylabel="held-out loss (nats per byte)", title=title)
    return True


if __name__ == "__main__":
    main()

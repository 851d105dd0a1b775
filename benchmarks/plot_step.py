"""Figures from the CSV of step.py alone: time by model with its floor, cost as GPUs are added, time against layers.

    python benchmarks/plot_step.py benchmarks/results/step.csv --out figures

Of rows that were measured more than once, the last counts. Writes step.png, gpus.png and layers.png; a figure for which
the CSV has no rows is left out.
"""

from __future__ import annotations

from collections import defaultdict

from figures import arguments, rows_of, write

KEY = ("ranks", "mode", "model", "implementation", "optimizer", "run", "layers")


def main() -> None:
    options = arguments(__doc__, "step.py")
    rows = newest(options.csv, options.gpu, options.commit)
    write(options.out, {"step": times, "gpus": growth, "layers": layers}, rows)


def newest(path, gpu=None, commit=None) -> list[dict]:
    """The last row of each kind of step on one GPU, numbers as such."""
    last = {tuple(row[key] for key in KEY): row for row in rows_of(path, gpu, commit)[0]}
    times = ("median_ms", "floor_ms", "host_ms")
    return [{**row, "ranks": int(row["ranks"]), **{key: float(row[key]) for key in times}} for row in last.values()]


def times(axes, rows) -> bool:
    """A bar for each kind of step of whole models, with the host's time and the floor marked."""
    rows = sorted((r for r in rows if not r["layers"]), key=lambda r: [r[key] for key in (
        "model", "ranks", "mode", "optimizer", "implementation", "run")])
    for at, row in enumerate(rows):
        ours = row["implementation"] == "ours"
        color = ("tab:red" if row["run"] == "graph" else "tab:orange") if ours else "tab:gray"
        axes.bar(at, row["median_ms"], color=color, width=0.7)
        axes.hlines(row["floor_ms"], at - 0.4, at + 0.4, color="black", linewidth=2)
        axes.plot(at, row["host_ms"], "x", color="tab:blue", markersize=5)
    axes.set_xticks(range(len(rows)), ["{model} {mode} {optimizer} {run}, {ranks} GPUs".format(**r)
                                       + ("" if r["implementation"] == "ours" else f", {r['implementation']}")
                                       for r in rows], rotation=90, fontsize=6)
    for label, style in (("ours, eager", {"color": "tab:orange", "linewidth": 6}),
                         ("ours, graph", {"color": "tab:red", "linewidth": 6}),
                         ("peer", {"color": "tab:gray", "linewidth": 6}), ("floor", {"color": "black"}),
                         ("host time", {"color": "tab:blue", "marker": "x", "linewidth": 0})):
        axes.plot([], [], label=label, **style)
    axes.set(yscale="log", ylabel="ms per step")
    return bool(rows)


def growth(axes, rows) -> bool:
    """Time x GPUs, relative to the fewest GPUs: 1 is perfect."""
    return lines(axes, rows, "ranks", lambda row, first: row["median_ms"] * row["ranks"] / (
        first["median_ms"] * first["ranks"]), ("model", "mode", "optimizer", "run", "layers"),
        {"xlabel": "GPUs", "ylabel": "time x GPUs, relative"})


def layers(axes, rows) -> bool:
    """Time against the number of layers: a line whose start is what every step takes."""
    rows = [{**row, "layers": int(row["layers"])} for row in rows if row["layers"]]
    return lines(axes, rows, "layers", lambda row, first: row["median_ms"],
                 ("model", "mode", "optimizer", "run", "ranks"), {"xlabel": "layers", "ylabel": "ms per step"})


def lines(axes, rows, across, value, key, labels) -> bool:
    """A line for each kind of step that was measured at several places."""
    cases = defaultdict(list)
    for row in rows:
        if row["implementation"] == "ours":
            cases[tuple(row[k] for k in key)].append(row)
    drawn = False
    for name, points in cases.items():
        points.sort(key=lambda row: row[across])
        if len(points) > 1:
            axes.plot([p[across] for p in points], [value(p, points[0]) for p in points], marker="o",
                      label=" ".join(map(str, filter(None, name))))
            drawn = True
    axes.set(xlim=(0, None), ylim=(0, None), **labels)
    axes.grid(alpha=0.3)
    return drawn


if __name__ == "__main__":
    main()

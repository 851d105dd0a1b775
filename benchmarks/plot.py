"""Figures from the CSV of polar.py alone: time per shape, roofline, error over spectra.

    python benchmarks/plot.py polar.csv --out figures

Of rows that were measured more than once, the last counts. Writes time.png, roofline.png and spectra.png; a figure for
which the CSV has no rows is left out.
"""

from __future__ import annotations

from figures import arguments, rows_of, write

CUBLAS = "cuBLAS, n x n x n"
COLOURS = {"ours": "tab:red", "ours turbo": "tab:orange", "ours cubic": "tab:pink", "gns": "tab:blue",
           "torch.compile": "tab:gray", "dion": "tab:green", CUBLAS: "black"}


def main() -> None:
    options = arguments(__doc__, "polar.py")
    rows, gpu = rows_of(options.csv, options.gpu, options.commit)
    write(options.out, {"time": times, "roofline": roofline, "spectra": spectra}, rows, gpu)


def times(axes, rows, gpu) -> bool:
    """Time of each stack relative to ours of the same commit, ours being the last; below 1 the peer is faster."""
    ms, commits = {}, {}
    for row in rows:
        if timed(row) and row["algorithm"] not in ("product", "matmul"):
            ms.setdefault(row["implementation"], {})[shape(row), row["commit"]] = float(row["median_ms"])
            if row["implementation"] == "ours":
                commits[shape(row)] = row["commit"]
    ours = {s: ms["ours"][s, commit] for s, commit in commits.items()}
    order = sorted(ours, key=lambda s: (min(s[1:]), max(s[1:]), s))
    for name in sorted(ms.keys() - {"ours"}):
        found = {s: ms[name].get((s, commit)) for s, commit in commits.items()}
        points = [(at, found[s] / ours[s]) for at, s in enumerate(order) if found[s]]
        axes.plot(*zip(*points), "o", markersize=4, label=name, color=COLOURS.get(name)) if points else None
    axes.axhline(1, color=COLOURS["ours"], label="ours")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [tick for tick in (0.25, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32) if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    labels = ["{} x {} x {}: {:.3g} ms".format(*s, ours[s]) for s in order]
    axes.set_xticks(range(len(order)), labels, rotation=90, fontsize=6)
    axes.set(ylabel="time / ours", title=f"orthogonalize, bf16, five steps, {gpu}")
    return bool(order)


def roofline(axes, rows, gpu) -> bool:
    """Rate over the FLOPs that are needed, by short side, and cuBLAS's rate of ordinary products in the same run."""
    rates = {}
    for row in rows:
        if timed(row) and row["algorithm"] != "product":
            name = CUBLAS if row["algorithm"] == "matmul" else row["implementation"]
            rates.setdefault(name, {})[shape(row)] = float(row["tflops_needed"])
    for name, found in rates.items():
        style = "--" if name == CUBLAS else "o"
        points = sorted((min(s[1:]), rate) for s, rate in found.items())
        axes.plot(*zip(*points), style, markersize=4, label=name, color=COLOURS.get(name))
        if name == CUBLAS:
            axes.axhline(0.8 * points[-1][1], color="black", linewidth=0.5, label="80 % of its last")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="short side", ylabel="TFLOP/s of what is needed", title=f"orthogonalize, bf16, {gpu}")
    return bool(rates)


def spectra(axes, rows, gpu) -> bool:
    """Error of the polar factor over singular values of several kinds."""
    errors = {}
    for row in rows:
        if row["spectrum"] and row["error_fp64"]:
            errors.setdefault(row["implementation"], {})[row["spectrum"]] = float(row["error_fp64"])
    kinds = list(dict.fromkeys(kind for found in errors.values() for kind in found))
    for name, found in errors.items():
        axes.plot([kinds.index(kind) for kind in found], list(found.values()), "o", label=name, color=COLOURS.get(name))
    axes.set_yscale("log")
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set(ylabel="relative error against fp64", title=f"five steps of Polar Express, {gpu}")
    return bool(kinds)


def timed(row) -> bool:
    """Whether a row holds a time: of graphs, or of eager calls where the machine has no graphs."""
    return bool(row["median_ms"]) and row["run"] == ("eager" if row["gpu"] == "CPU" else "graph")


def shape(row) -> tuple[int, int, int]:
    return int(row["n"]), int(row["rows"]), int(row["cols"])


if __name__ == "__main__":
    main()

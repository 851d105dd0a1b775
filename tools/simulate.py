"""What a step takes on 8 to 4096 GPUs, on paper: the optimizer's own plan, on a stated cluster.

    make build && python tools/simulate.py --models llama3_8b kimi_k2 --out scaling

The planner of the package plans for every number of ranks; its buckets run through the package's pipeline on a clock,
with times of products as measured on one GPU, and times of all-to-alls from bytes, bandwidths and messages. Two things
are fitted to benchmarks/results/step.csv: how much longer the device takes than the sum of its parts, and the host's
time for a stack of matrices where a step is not captured. What lies beyond one node is assumed, by arguments.
Writes scaling.csv and scaling.png into a folder, and prints tables.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import importlib
import itertools
import math
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={ROOT}")
from kernels import get_kernel  # noqa: E402
from models import MODELS, shapes_of  # noqa: E402
from rows import read  # noqa: E402

PACKAGE = get_kernel("org/optimizer", version=1).__name__
balance, freight, layout, pace, pipeline, plan, method, coefficients, units = (
    importlib.import_module(f"{PACKAGE}.{name}") for name in (
        "planning.load_balance", "planning.memory_model", "params.layout", "planning.cost_model", "pipeline",
        "planning.plan", "newton_schulz.method", "newton_schulz.coefficients", "params.units"))
ARCH = "sm90"  # whose measured times are taken, of an H200
PACE = pace.table(ARCH)
RESULTS = ROOT / "benchmarks" / "results" / "step.csv"
PAIRS_FROM = "6d124ed"  # the first rows of step.csv in which two steps were one
CUTS_FROM = "d4255ba"  # and the first in which five steps were cut 1 + 2 + 2 or 2 + 3, in place of 3 + 2
WORKSPACE = 2 << 30  # bytes, at most
PLAIN = {"ddp": "exchange", "ddp_sharded": "own"}  # mode of plain parameters -> their route
COLUMNS = ("model mode ranks shards exchange matrices buckets plan_s balance least_balance network_mb nvlink_mb "
           "messages all_to_all_ms products_ms step_ms workspace_mib").split()


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of `node` GPUs, `nvlink_gbps` GB/s inside and `network_gbps` GB/s per GPU outside, each way; a collective
    takes `nvlink_us` or `network_us` at least, and `message_us` for each message that leaves a node. What NVLink takes
    is what the package expects of it.
    """
    node: int = 8
    nvlink_gbps: float = PACE["all_to_all_gbps"]
    nvlink_us: float = PACE["all_to_all_us"]
    network_gbps: float = 50.0
    network_us: float = 60.0
    message_us: float = 2.0


def main() -> None:
    options = arguments()
    cluster = Cluster(*(getattr(options, field.name) for field in dataclasses.fields(Cluster)))
    fitted = fit(cluster, read_measured(options.measured))
    show("fitted to measured steps", fitted["rows"])
    rows = []
    for model, ranks in itertools.product(options.models, options.ranks):
        for mode in options.modes:
            rows += simulate(model, mode, ranks, cluster, fitted, options)
            show(f"{model}, {mode}, {ranks} ranks", rows[-2:])
    options.out.mkdir(parents=True, exist_ok=True)
    with open(options.out / "scaling.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, options.out / "scaling.png")
    for line in verdict(rows):
        print(line)


def arguments(given=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["qwen3_1p7b", "llama3_8b", "kimi_k2"], choices=MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--modes", nargs="+", default=["fsdp"], choices=["fsdp", "hsdp", "hsdp_alone", *PLAIN],
                        help="hsdp: each --shards ranks hold a copy; hsdp_alone: and every copy does all of the work")
    parser.add_argument("--shards", type=int, default=64, help="ranks that share one copy, in the hsdp modes")
    parser.add_argument("--expert-parallel", type=int, default=64, help="ranks that share the experts; FSDP cuts them "
                        "further where there are more ranks")
    parser.add_argument("--expert-shards", default="far", choices=["far", "near"], help="where FSDP's pieces of an "
                        "expert lie: in other nodes (neighbours hold other experts), or side by side")
    parser.add_argument("--run", default="graph", choices=["graph", "eager"], help="eager: the host's time counts too")
    parser.add_argument("--layers", type=int, default=None, help="layers in place of the model's own number")
    parser.add_argument("--heads", action="store_true", help="a matrix for each head, in the models of HEADS")
    parser.add_argument("--copy-gbps", type=float, default=PACE["copy_gbps"], help="GB/s of a copy, read and written "
                        "together (default: %(default)s, of an H200; of an H100 about 3000)")
    parser.add_argument("--measured", type=Path, default=RESULTS,
                        help="what benchmarks/step.py wrote, to fit to (default: the committed steps)")
    parser.add_argument("--out", type=Path, default=Path("scaling"), help="folder for scaling.csv and scaling.png")
    for field in dataclasses.fields(Cluster):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int if field.name == "node" else float,
                            default=field.default, help="of the cluster, default: %(default)s")
    return parser.parse_args(given)


# The plan


# Splits of weights of attention by shape: rows of queries, of keys and values (in latent attention of each head 128 of
# both), columns of outputs
HEADS = {
    "llama3_8b": {(4096, 4096): {"heads": 32}, (1024, 4096): {"heads": 8}},
    "kimi_k2": {(12288, 1536): {"heads": 64}, (16384, 512): {"heads": 128}, (7168, 8192): {"heads": 64, "dim": 1}},
    "tiny": {(32, 32): {"heads": 4}},
}


def layouts_of(model, mode, ranks, options) -> list:
    """The layouts of a model's parameters, as the mode's mesh places them; those of one shape share theirs."""
    known, found = {}, []
    for shape in shapes_of(model, options.layers):
        if shape not in known:
            split = units.parse(HEADS.get(model, {}).get(shape) if options.heads else None)
            known[shape] = _layout(shape, mode, ranks, options).as_matrices(split)
        found.append(known[shape])
    return found


def _layout(shape, mode, ranks, options):
    from torch.distributed.tensor import Replicate, Shard

    shards, dim = min(options.shards, ranks), len(shape) - 2
    if mode in PLAIN:
        sizes, placements = (ranks,), [Replicate()]
    elif mode == "fsdp" and dim:  # experts: expert parallel, then FSDP over the rows of each
        inner = math.gcd(math.gcd(options.expert_parallel, shape[0]), ranks)
        sizes, placements = (ranks // inner, inner), [Shard(1), Shard(0)]
        if options.expert_shards == "near":
            sizes, placements = sizes[::-1], placements[::-1]
    elif mode == "fsdp":
        sizes, placements = (ranks,), [Shard(0)]
    else:
        sizes, placements = (ranks // shards, shards), [Replicate(), Shard(0)]
    boxes, replicas = {}, defaultdict(list)
    for rank, at in enumerate(itertools.product(*map(range, sizes))):
        boxes[rank] = layout.box_at(at, shape, placements, sizes)
        replicas[tuple(i for i, p in zip(at, placements) if p.is_replicate())].append(rank)
    return layout.Layout(shape, boxes, tuple(map(tuple, replicas.values())), plain=mode in PLAIN)


class FormerCuts(coefficients.Steps):
    """Five steps cut as before CUTS_FROM: 3 + 2 for short sides from 256 on. Short sides from 3072 on, with aspect
    ratios up to 1.35, were cut 1 + 2 + 2 then, too. They are priced as 3 + 2: for squares equal FLOPs, 2 to 3 % more
    expected time.
    """

    def intervals(self, dtype=coefficients.F16, max_steps=coefficients.NO_RESTART, n=coefficients.SMALL_SHORT_SIDE):
        if max_steps == 1 or n < coefficients.SMALL_SHORT_SIDE:
            return super().intervals(dtype, max_steps, n)
        return self.triples[:3], self.triples[3:]


def planned(model, mode, ranks, options, pairs=True, former_cuts=False):
    """(layouts, buckets, cost model, seconds of planning); a mode whose copies work alone is planned for one copy.
    Without `pairs` as before two steps were one, with `former_cuts` as before CUTS_FROM.
    """
    if mode == "hsdp_alone":
        mode, ranks = "hsdp", min(options.shards, ranks)
    layouts = layouts_of(model, mode, ranks, options)
    steps = coefficients.steps_of("polar_express")
    if not pairs:  # coefficients that no set begins with
        steps = coefficients.steps_of([(a, b, c * (1 + 1e-12)) for a, b, c in steps.triples])
    elif former_cuts:
        steps = FormerCuts(steps.triples)
    times, start = pace.CostModel(steps, ARCH), time.perf_counter()
    times.table = {**times.table, "copy_gbps": options.copy_gbps}
    buckets = plan.make_plan(layouts, times, {}, terms_of(times), rank_bytes=WORKSPACE, minimize_workspace=True,
                             plain=PLAIN.get(mode, "exchange"))
    return layouts, buckets, times, time.perf_counter() - start


def terms_of(times) -> freight.PlanInputs:
    """What the optimizer plans by, on GPUs."""
    return freight.PlanInputs(
        once=True,
        scratch=functools.partial(method.scratch_bytes, steps=times.steps, dtype=coefficients.F16),
        supports_scattered_rows=functools.partial(method.supports_scattered_rows, steps=times.steps),
        rank_bytes=WORKSPACE,
    )


# All-to-alls


def traffic(bucket, layouts, cluster, inbound) -> dict:
    """What each rank of a bucket sends and receives in one direction: bytes inside nodes and between them, messages."""
    ranks = np.array(bucket.ranks)
    node, by_owner, pieces = ranks // cluster.node, defaultdict(Counter), {}
    for matrix, owner in zip(bucket.matrices, bucket.owners):
        by_owner[owner][id(layouts[matrix.param]), matrix.unit] += 1
    known = {(id(layouts[m.param]), m.unit): layouts[m.param] for m in bucket.matrices}
    for key, where in known.items():
        sizes = np.array([where.unit_sizes(r).get(key[1], 0) for r in bucket.ranks])
        pieces[key] = 2 * sizes, np.array([where.replica_of[r] for r in bucket.ranks])
    found = {f"{end}{what}": np.zeros(len(ranks)) for end in ("", "owner ") for what in ("near", "far", "messages")}
    for owner, counts in by_owner.items():
        at = int(np.searchsorted(ranks, owner))
        nbytes = sum(n * pieces[key][0] * (pieces[key][1] == pieces[key][1][at] if inbound else 1)
                     for key, n in counts.items())
        nbytes = np.where(np.arange(len(ranks)) == at, 0, nbytes)
        far = node != node[at]
        for what, values in (("near", nbytes * ~far), ("far", nbytes * far), ("messages", (nbytes > 0) & far)):
            found[what] += values
            found[f"owner {what}"][at] += values.sum()
    return found


def all_to_all_ms(found, bucket, cluster, exchange) -> float:
    """An all-to-all, flat, or first inside nodes and then between GPUs of the same place in each node."""
    near, far, messages = (np.maximum(found[what], found[f"owner {what}"])
                           for what in ("near", "far", "messages"))
    if not near.any() and not far.any():
        return 0.0
    nodes = np.array(bucket.ranks) // cluster.node
    latency = cluster.network_us if far.any() else cluster.nvlink_us
    if exchange == "flat" or not far.any():
        times = np.maximum(near / cluster.nvlink_gbps / 1e3, far / cluster.network_gbps / 1e3
                           + messages * cluster.message_us)
        return (latency + times.max()) / 1e3
    _, index, sizes = np.unique(nodes, return_inverse=True, return_counts=True)
    together = np.maximum(*(np.bincount(index, found[what]) for what in ("far", "owner far"))) / sizes
    inside = (near + far * (1 - 1 / cluster.node)).max() / cluster.nvlink_gbps / 1e3
    between = together.max() / cluster.network_gbps / 1e3 + (len(sizes) - 1) * cluster.message_us
    return (cluster.nvlink_us + latency + inside + between) / 1e3


# A step


def simulate(model, mode, ranks, cluster, fitted, options) -> list[dict]:
    """One row for each form of exchange."""
    layouts, buckets, times, plan_s = planned(model, mode, ranks, options)
    loads = Counter(dict.fromkeys(range(max(b.ranks[-1] for b in buckets) + 1), 0))
    for bucket in buckets:
        for matrix, owner in zip(bucket.matrices, bucket.owners):
            loads[owner] += times(matrix.rows, matrix.cols)
    mean = sum(loads.values()) / len(loads)
    least = balance.least_load([times(m.rows, m.cols) for b in buckets for m in b.matrices], len(loads))
    ways = [[traffic(b, layouts, cluster, inbound) if b.route != "local" else None for inbound in (True, False)]
            for b in buckets]
    rows = []
    for exchange in ("flat", "two-level"):
        step, all_to_alls = step_ms(buckets, ways, times, cluster, exchange)
        host = fitted["host_ms"] + fitted["stack_ms"] * stacks_of(buckets)
        totals = sums(buckets, ways, len(loads))
        rows.append({
            "model": model, "mode": mode, "ranks": ranks, "shards": len(layouts[0].replicas[0]), "exchange": exchange,
            "matrices": sum(len(b.matrices) for b in buckets), "buckets": most_buckets(buckets),
            "plan_s": round(plan_s, 2), "balance": round(max(loads.values()) / mean, 4),
            "least_balance": round(least / mean, 4), "network_mb": round(totals["far"] / 1e6, 2),
            "nvlink_mb": round(totals["near"] / 1e6, 2), "messages": int(totals["messages"]),
            "all_to_all_ms": round(all_to_alls, 3), "products_ms": round(max(loads.values()) / 1e6, 3),
            "step_ms": round(max(fitted["device_ms"] + fitted["scale"] * step, host * (options.run == "eager")), 3),
            "workspace_mib": workspace_mib(buckets)})
    return rows


def step_ms(buckets, ways, times, cluster, exchange):
    """(when the last rank is done, the time of its all-to-alls), from the package's pipeline on a clock."""
    parts = []
    for bucket, (inbound, outbound) in zip(buckets, ways):
        if inbound is not None:
            there, back = (round(1e6 * all_to_all_ms(way, bucket, cluster, exchange)) for way in (inbound, outbound))
            parts.append(dataclasses.replace(bucket.times, inbound=there, outbound=back))
        else:
            parts.append(bucket.times)
    done, all_to_alls, pause = 0.0, 0.0, pace.BucketTimes(0, 0, 0, 0, 0)
    for families in of_ranks(buckets):
        mine = [part for numbers in families for part in (*(parts[number] for number in numbers), pause)]
        spans = times.spans(mine)
        if (end := max(span.end for span in spans) / 1e6) > done:
            done, all_to_alls = end, sum(p.inbound + p.outbound for p in mine) / 1e6
    return done, all_to_alls


def of_ranks(buckets) -> list:
    """The buckets that a rank has part in, as [numbers of those that travel over the same ranks]; once for all ranks
    that have part in the same.
    """
    members, families = defaultdict(list), defaultdict(list)
    for number, bucket in enumerate(buckets):
        members[bucket.ranks].append(number)
    for ranks in members:
        for rank in ranks:
            families[rank].append(ranks)
    return [[members[ranks] for ranks in mine] for mine in {tuple(mine) for mine in families.values()}]


def workspace_mib(buckets) -> int:
    """Of the rank that has the most: bucket buffers and shared scratch, each as large as the
    largest of its buckets that uses it, of all families in turn; those of route "local" share the buffer of the
    second that travels.
    """
    most = 0
    for families in of_ranks(buckets):
        mine = [buckets[number] for numbers in families for number in numbers]
        slots, travelling = [0] * pipeline.BUCKETS_IN_FLIGHT, 0
        for bucket in mine:
            travels = bucket.route != "local"
            place = travelling % pipeline.BUCKETS_IN_FLIGHT if travels else 1
            slots[place], travelling = max(slots[place], bucket.memory[0]), travelling + travels
        most = max(most, sum(slots) + max(bucket.memory[1] for bucket in mine))
    return round(most / 2**20)


def most_buckets(buckets) -> int:
    """Of the rank that has part in the most."""
    counts = Counter()
    for bucket in buckets:
        counts.update(bucket.ranks)
    return max(counts.values())


def stacks_of(buckets) -> int:
    """Batches of matrices of one shape on the rank that has the most."""
    found = defaultdict(int)
    for bucket in buckets:
        mine = defaultdict(set)
        for matrix, owner in zip(bucket.matrices, bucket.owners):
            mine[owner].add((matrix.rows, matrix.cols))
        for owner, shapes in mine.items():
            found[owner] += len(shapes)
    return max(found.values())


def sums(buckets, ways, ranks) -> dict:
    """The most that any rank sends or receives in a step, both ways together."""
    totals = {what: np.zeros((2, ranks)) for what in ("near", "far", "messages")}
    for bucket, pair in zip(buckets, ways):
        for way, what in itertools.product(filter(None, pair), totals):
            at = np.array(bucket.ranks)
            totals[what][0, at] += way[what]
            totals[what][1, at] += way[f"owner {what}"]
    return {what: (value.sum(0)).max() for what, value in totals.items()}


# What was measured


def read_measured(path) -> list[dict]:
    """The newest row of each kind of step with Muon that this file can plan, of the GPU whose times are taken if there
    is one; and whether its step took pairs, and had the cuts before CUTS_FROM: in a file without rows of these commits
    all took pairs and none had, since it was measured later and by somebody else.
    """
    rows = read(path)
    single, former = (commits_before(commit, rows) for commit in (PAIRS_FROM, CUTS_FROM))
    newest = {}
    for row in [row for row in rows if row.get("gpu") == PACE["gpu"]] or rows:
        known = row["mode"] in ("fsdp", "hsdp", "ddp", "ddp_sharded", "ep", "single") and row["model"] in MODELS
        if known and (row["implementation"], row["optimizer"]) == ("ours", "muon") and row["run"] != "replay":
            key = tuple(row[name] for name in ("model", "mode", "ranks", "run", "layers"))
            newest[key] = row | {"pairs": row.get("commit") not in single, "former_cuts": row.get("commit") in former}
    return list(newest.values())


def commits_before(commit, rows) -> set:
    """The commits whose first row is above the first row of `commit`; none without such a row. By their first rows,
    because two builds measured in turns have rows of the former build below those of the later one. A former build
    that is first measured below is taken for a later one.
    """
    commits = [row.get("commit") for row in rows]
    return set(commits[:commits.index(commit)] if commit in commits else [])


def fit(cluster, measured) -> dict:
    """What the device takes for a step (`device_ms`) and for a ms of its parts (`scale`), the host for a step and for a
    stack; the rows with measured, predicted and error. Steps no longer than their host time say nothing of the device.
    """
    rows, points = [], []
    for row in measured:
        options = arguments(["--layers", row["layers"]] if row["layers"] else [])
        mode, ranks = row["mode"], int(row["ranks"])
        options.shards, options.expert_parallel = max(1, ranks // 2) if mode == "hsdp" else ranks, ranks
        mode = {"ep": "fsdp", "single": "ddp"}.get(mode, mode)
        layouts, buckets, times, _ = planned(row["model"], mode, ranks, options, row["pairs"],
                                            row["former_cuts"])
        ways = [[traffic(b, layouts, cluster, inbound) if b.route != "local" else None for inbound in (True, False)]
                for b in buckets]
        device, _ = step_ms(buckets, ways, times, cluster, "flat")
        points.append((row, device, stacks_of(buckets)))
    bound = [(device, float(row["median_ms"])) for row, device, _ in points
             if row["run"] == "graph" or float(row["median_ms"]) > 1.1 * float(row["host_ms"])]
    if len(bound) > 2:
        device_ms, scale = line(bound)
    else:  # a line through two points would foretell nothing
        device_ms, scale = 0.0, statistics.geometric_mean([ms / device for device, ms in bound]) if bound else 1.0
    host_ms, stack_ms = line([(stacks, float(row["host_ms"])) for row, _, stacks in points if row["run"] == "eager"])
    for row, device, stacks in points:
        eager = row["run"] == "eager"
        device = device_ms + scale * device
        predicted = round(max(device, (host_ms + stack_ms * stacks) * eager), 2)
        ms = round(float(row["median_ms"]), 2)
        rows.append({**{key: row[key] for key in ("model", "layers", "mode", "ranks", "run")}, "stacks": stacks,
                     "device_ms": round(device, 2), "host_ms": round(host_ms + stack_ms * stacks, 2),
                     "predicted_ms": predicted, "measured_ms": ms,
                     "error": f"{100 * (predicted / ms - 1):+.0f} %"})
    return {"device_ms": device_ms, "scale": scale, "host_ms": host_ms, "stack_ms": stack_ms, "rows": rows}


def line(points) -> tuple[float, float]:
    """(at 0, slope) of the straight line with the least squared relative errors, neither below 0."""
    if len({x for x, _ in points}) < 2:
        return 0.0, statistics.mean([y / x for x, y in points]) if points else 1.0
    X = np.array([[1 / y, x / y] for x, y in points])
    at, slope = np.linalg.lstsq(X, np.ones(len(points)), rcond=None)[0]
    return (float(at), float(slope)) if at >= 0 and slope >= 0 else (0.0, float(1 / statistics.mean(
        [x / y for x, y in points])))


# Output


def show(title, rows) -> None:
    """Print rows of equal keys as a table; plain where rich is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        print(title, *rows, sep="\n")
        return
    table = Table(title=title, title_justify="left")
    for key in rows[0] if rows else ():
        table.add_column(key, justify="left" if isinstance(rows[0][key], str) else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=200 if not sys.stdout.isatty() else None).print(table)


def verdict(rows) -> list[str]:
    """For each model and mode: from how many ranks on a flat all-to-all is slower, and what a step gains after that."""
    lines, cases = [], defaultdict(dict)
    for row in rows:
        cases[row["model"], row["mode"]].setdefault(row["ranks"], {})[row["exchange"]] = row
    for (model, mode), by_ranks in cases.items():
        worse = [ranks for ranks, pair in sorted(by_ranks.items())
                 if pair["two-level"]["all_to_all_ms"] < 0.95 * pair["flat"]["all_to_all_ms"]]
        text = f"{model}, {mode}: a flat all-to-all pays everywhere here"
        if worse:
            pair = by_ranks[worse[0]]
            text = (f"{model}, {mode}: from {worse[0]} ranks on a flat all-to-all takes longer than two "
                    f"levels ({pair['flat']['all_to_all_ms']} against {pair['two-level']['all_to_all_ms']} ms "
                    f"there); step at "
                    f"{max(by_ranks)} ranks: {by_ranks[max(by_ranks)]['flat']['step_ms']} flat, "
                    f"{by_ranks[max(by_ranks)]['two-level']['step_ms']} ms on two levels")
        best = min(by_ranks, key=lambda ranks: min(r["step_ms"] for r in by_ranks[ranks].values()))
        lines.append(f"{text}; the shortest step is at {best} ranks")
    return lines


def draw(rows, path) -> None:
    """Step time against ranks, a line for each model, mode and exchange; nothing where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return
    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots(1, 2)
    lines = defaultdict(list)
    for row in rows:
        lines[row["model"], row["mode"], row["exchange"]].append(row)
    for number, ((model, mode, exchange), points) in enumerate(sorted(lines.items())):
        style = {"color": f"C{number // 2 % 10}", "linestyle": "-" if exchange == "flat" else "--"}
        for ax, key in zip(axes, ("step_ms", "network_mb")):
            ax.plot([p["ranks"] for p in points], [p[key] for p in points], marker="o", markersize=3, **style,
                    label=f"{model}, {mode}, {exchange}")
    axes[0].set_yscale("log")
    axes[1].set_yscale("symlog", linthresh=10)
    axes[1].set_ylim(bottom=0)
    for ax, what in zip(axes, ("step (ms)", "MB on a GPU's network link, both ways")):
        ax.set(xlabel="GPUs", ylabel=what)
        ax.set_xscale("log", base=2)
        ax.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=7)
    figure.savefig(path)


if __name__ == "__main__":
    main()

"""The table of a sweep of convergence.py: the best rate of each optimizer, losses, tokens, times.

Parity. Below the table stands our Muon less torch's at equal rates, seed by seed: the mean, its 95 % interval by the
paired t-test, and the difference that the test finds with a probability of 80 %. Both count as equal if two one-sided
tests (TOST) at 5 % each exclude a difference of MARGIN; the power of that is said, too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

RATES = ("lr", "embed_lr", "head_lr")
STUDENT_T = {3: (4.303, 2.920, 1.061), 4: (3.182, 2.353, 0.978), 5: (2.776, 2.132, 0.941)}  # seeds -> .975, .95, .8
# Nats per byte. On seed 0 of 30m on packages, twice and half the best rate cost our Muon 0.025 and 0.011
MARGIN = 0.005
# Optimizers whose step is Muon's up to rounding or coefficients, and which take its rate. Each was swept with 30m on
# packages, and all found Muon's
RATE_OF_MUON = ("int8_momentum", "int8_averages", "split16", "bf16_weights_stochastic", "bf16_momentum", "turbo",
                "cubic", "eight_steps")
# What a reader writes to have an optimizer of the sweep, or where it comes from
CALLS = {
    "adamw": "torch.optim.AdamW for all parameters",
    "torch_muon": "torch.optim.Muon",
    "muon": "`Muon(...)`",
    "normuon": "`NorMuon(...)`",
    "keller": "Keller Jordan's Muon",
    "dion_normuon": "Dion's NorMuon, without its Triton kernels",
    "int8_momentum": "`state_dtype=torch.int8`",
    "int8_averages": '`"state_dtype": torch.int8` in the groups of AdamW',
    "split16": 'hidden matrices in bf16, `master_weights="split16"`',
    "bf16_weights_stochastic": 'hidden matrices in bf16, `rounding="stochastic"`',
    "bf16_momentum": "`state_dtype=torch.bfloat16`, also for AdamW's averages",
    "adamuon": '`rule="adamuon"`, `adjust_lr_fn=0.2`',
    "hyperball": '`rule="hyperball"`',
    "muon_plus": '`rule="muon_plus"`',
    "cautious": '`decay="cautious"`',
    "per_head": '`split={"heads": ...}` for q, k, v and the output of attention',
    "turbo": '`ns_coefficients="turbo"`, `ns_steps=4`',
    "cubic": '`ns_coefficients="cubic"`',
    "eight_steps": "`ns_steps=8`",
}
LOST = 1e9  # loss of a run that diverged, so that rows can be compared


def comparable_means(losses: dict[object, dict[int, float]]) -> dict[object, float]:
    """{rate: mean loss over the seeds that all rates have} of {rate: {seed: loss}}. Sweeps train a rate with seed 0
    first, and only the best with more; a rate without the first seed is left out.
    """
    first = min(seed for found in losses.values() for seed in found)
    losses = {rate: found for rate, found in losses.items() if first in found}
    common = set.intersection(*map(set, losses.values()))
    return {rate: statistics.mean(found[seed] for seed in common) for rate, found in losses.items()}


def best_rate(losses: dict[object, dict[int, float]]) -> object:
    """The rate with the lowest of `comparable_means`."""
    means = comparable_means(losses)
    return min(means, key=means.__getitem__)


def is_bracketed(rate: float, rates: Iterable[float]) -> bool:
    """Whether a rate has both a lower and a higher one among `rates`: else the best rate may lie beyond all of them."""
    return any(other < rate for other in rates) and any(other > rate for other in rates)


def best_rows(rows: list[dict[str, str]], name: str) -> list[dict[str, str]]:
    """The rows of an optimizer with its best rates, over the seeds that were trained with them."""
    found = {}
    for row in rows:
        if row["optimizer"] == name:
            found.setdefault(tuple(row[key] for key in RATES), {})[int(row["seed"])] = row
    if not found:
        return []
    best = best_rate({rates: {seed: float(row["heldout_loss"]) for seed, row in seeds.items()}
                      for rates, seeds in found.items()})
    return list(found[best].values())


def timed_rows(rows: list[dict[str, str]], best: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows with the optimizer and rates of `best` whose loss is finite, older rows of a seed included."""
    return [row for row in rows if all(row[key] == best[0][key] for key in ("optimizer", *RATES))
            and float(row["heldout_loss"]) < LOST]


def newest_of(rows: list[dict[str, str]], gpu: str) -> list[dict[str, str]]:
    """The rows of a GPU that have the commit and the torch of its newest one."""
    rows = [row for row in rows if row["gpu"] == gpu]
    return [row for row in rows if all(row[key] == rows[-1][key] for key in ("commit", "torch"))]


def times_of(rows: list[dict[str, str]]) -> tuple[str, str, str]:
    """The medians of a step and of the optimizer, in ms, and of the memory in MiB."""
    whole, own, memory = (statistics.median(float(row[key]) for row in rows)
                          for key in ("step_ms", "optimizer_ms", "peak_mib"))
    return f"{whole:.2f}", f"{own:.2f}", f"{memory:.0f}"


def note_of_rate(rows: list[dict[str, str]], best: list[dict[str, str]]) -> str:
    """"" if a lower and a higher rate of matrices than that of `best` were tried, else "at the edge". Where no other
    rate was tried: "Muon's" if it was taken from Muon, else "unswept". Of AdamW all runs count; of another optimizer,
    those with the rates of embeddings and head that `best` has.
    """
    name = best[0]["optimizer"]
    alike = [row for row in rows if row["optimizer"] == name and (
        name == "adamw" or all(row[key] == best[0][key] for key in RATES[1:]))]
    lr, rates = float(best[0]["lr"]), {float(row["lr"]) for row in alike}
    if len(rates) > 1:
        return "" if is_bracketed(lr, rates) else "at the edge"
    of_muon = best_rows(rows, "muon") if name in RATE_OF_MUON else []
    return "Muon's" if of_muon and all(of_muon[0][key] == best[0][key] for key in RATES) else "unswept"


def shown_rate(rows: list[dict[str, str]], best: list[dict[str, str]]) -> str:
    """The rate of matrices of `best`, and what `note_of_rate` says."""
    note = note_of_rate(rows, best)
    return f"{float(best[0]['lr']):g}" + (f", {note}" if note else "")


def rate_is_found(rows: list[dict[str, str]], name: str) -> bool:
    """Whether the best rate of an optimizer is known: not at the edge, nor unswept. A rate of Muon's counts as found
    once Muon's is. Without it, the lowest loss so far is no result of the optimizer. False without rows.
    """
    best = best_rows(rows, name)
    note = note_of_rate(rows, best) if best else "unswept"
    return rate_is_found(rows, "muon") if note == "Muon's" else note == ""


def results_of(rows: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    """{optimizer: its `best_rows`} of those whose best rate is found."""
    names = dict.fromkeys(row["optimizer"] for row in rows)
    return {name: best_rows(rows, name) for name in names if rate_is_found(rows, name)}


def mean_curve(rows: list[dict[str, str]]) -> list[tuple[int, float]]:
    """[(step, mean held-out loss over the rows)]."""
    curves = [[point.split(":") for point in row["curve"].split()] for row in rows]
    return [(int(points[0][0]), statistics.mean(float(loss) for _, loss in points)) for points in zip(*curves)]


def share_to_reach(curve: list[tuple[int, float]], loss: float, steps: int) -> float | None:
    """The share of the steps after which a curve first has a loss, between two measurements by a straight line. Rates
    fall to 0 over all steps, so a run that was planned shorter would reach it earlier.
    """
    for (before, high), (after, low) in zip(curve, curve[1:]):
        if low <= loss < high:
            return (before + (after - before) * (high - loss) / (high - low)) / steps
    return None


def table(rows: list[dict[str, str]]) -> list[str]:
    """One line for each optimizer of a sweep, in the order of losses, and the comparison with torch.optim.Muon. Those
    whose rate is not found are the last, and have no tokens and no difference.
    """
    found = {name: best_rows(rows, name) for name in dict.fromkeys(row["optimizer"] for row in rows)}
    losses = {name: [float(row["heldout_loss"]) for row in best] for name, best in found.items()}
    results = results_of(rows)
    target = statistics.mean(losses["adamw"]) if "adamw" in results else None
    timed = {name: timed_rows(rows, best) or best for name, best in found.items()}
    common = statistics.mode(gpu for own in timed.values() for gpu in {row["gpu"]: None for row in own})
    # A line has the times of one GPU: the one that most optimizers ran on or, without rows of it, the newest row's
    gpu_of = {name: common if any(row["gpu"] == common for row in own) else own[-1]["gpu"]
              for name, own in timed.items()}
    heads = ("optimizer", "lr", "seeds", "held-out loss", "spread", "tokens to AdamW's loss", "minus muon's",
             "step ms", "optimizer ms", "MiB", "GPU")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in sorted(found, key=lambda name: (name not in results, statistics.mean(losses[name]))):
        best, spread = found[name], f"{statistics.stdev(losses[name]):.4f}" if len(losses[name]) > 1 else ""
        share = None
        if target is not None and name in results and name != "adamw":
            share = share_to_reach(mean_curve(best), target, int(best[0]["steps"]))
        tokens = "" if share is None else f"{share * int(best[0]['tokens']) / 1e6:.1f} M, {100 * share:.0f} %"
        loss = statistics.mean(losses[name])
        shown = "diverged" if loss >= LOST else f"{loss:.4f}"
        cells = (name, shown_rate(rows, best), str(len(best)), shown, spread, tokens,
                 beside_muon(rows, name)[1] if name != "muon" else "",
                 *times_of(newest_of(timed[name], gpu_of[name])), short_name(gpu_of[name]))
        lines.append(f"| {' | '.join(cells)} |")
    others = [gpu for gpu in dict.fromkeys(gpu_of.values()) if gpu != gpu_of.get("muon")]
    return [*lines, *elsewhere(timed.get("muon", []), others), *parity(rows)]


def summary(rows: list[dict[str, str]], titles: dict[str, str]) -> dict[str, str]:
    """{line: cell} of a sweep: AdamW's loss and, of each optimizer in `titles` (name -> how the page calls it), the
    share of the tokens until that loss, the difference of the last losses, the ratio of the best rates and that of the
    times of a training step on AdamW's GPU. {} if the best rate of one of these is not found. A cell is "" if the loss
    was not reached, or without a time on that GPU.
    """
    results = results_of(rows)
    if not {"adamw", *titles} <= set(results):
        return {}
    adamw, found = results["adamw"], {title: results[name] for name, title in titles.items()}
    loss = statistics.mean(float(row["heldout_loss"]) for row in adamw)
    cells = {"AdamW: last loss": f"{loss:.4f}"}
    for title, best in found.items():
        share = share_to_reach(mean_curve(best), loss, int(best[0]["steps"]))
        less = statistics.mean(float(row["heldout_loss"]) for row in best) - loss
        gpu = adamw[-1]["gpu"]
        timed = [newest_of(timed_rows(rows, runs), gpu) for runs in (best, adamw)]
        times = [float(times_of(own)[0]) for own in timed if own]
        ratio = float(best[0]["lr"]) / float(adamw[0]["lr"])
        cells |= {f"{title}: tokens to that loss": "" if share is None else f"{100 * share:.0f} %",
                  f"{title}: last loss minus AdamW's": f"{less:+.4f}",
                  f"{title}: best `lr` of matrices / AdamW's": f"{ratio:g}",
                  f"{title}: time of a training step / AdamW's":
                      f"{times[0] / times[1]:.3f} ({short_name(gpu)})" if len(times) == 2 else ""}
    return cells


def elsewhere(rows: list[dict[str, str]], gpus: list[str]) -> list[str]:
    """Lines with the times of Muon's `rows` on each of `gpus`, which other optimizers were timed on."""
    found = {gpu: times_of(newest_of(rows, gpu)) for gpu in gpus if any(row["gpu"] == gpu for row in rows)}
    return [line for gpu, (whole, own, memory) in found.items() for line in (
        "", f"muon on {short_name(gpu)}: step {whole} ms, optimizer {own} ms, {memory} MiB.")]


def short_name(gpu: str) -> str:
    """The name of a GPU as tables have it."""
    return gpu.replace("NVIDIA ", "").replace(" 80GB HBM3", "")


def gaps_of(rows: list[dict[str, str]], others: list[dict[str, str]]) -> list[float]:
    """Loss of `rows` less that of `others`, for each seed that both have."""
    losses = {row["seed"]: float(row["heldout_loss"]) for row in others}
    return [float(row["heldout_loss"]) - losses[row["seed"]] for row in rows if row["seed"] in losses]


def half_width(gaps: list[float]) -> float:
    """Half of the 95 % interval of the mean, by Student's t."""
    return STUDENT_T[len(gaps)][0] * statistics.stdev(gaps) / math.sqrt(len(gaps))


def beside(rows: list[dict[str, str]], others: list[dict[str, str]]) -> tuple[str, str]:
    """How a loss compares with another one, seed by seed: ("lower", "higher", "no difference found", "open" with too
    few seeds, or "diverged" if the best rate did; the mean difference and its 95 % interval).
    """
    gaps = gaps_of(rows, others)
    if all(float(row["heldout_loss"]) >= LOST for row in rows):
        return "diverged", ""
    if len(gaps) not in STUDENT_T:
        return "open", ""
    mean, half = statistics.mean(gaps), half_width(gaps)
    answer = "no difference found" if abs(mean) <= half else "lower" if mean < 0 else "higher"
    return answer, f"{round(mean, 4) + 0.0:+.4f} +- {half:.4f}"  # + 0.0: no -0.0000


def beside_muon(rows: list[dict[str, str]], name: str) -> tuple[str, str]:
    """`beside` of an optimizer's best rows and Muon's; also ("not run", ""), and ("rate not found", "") if the best
    rate of either is not found: a difference there says nothing about the optimizers.
    """
    best, muon = best_rows(rows, name), best_rows(rows, "muon")
    if not best:
        return "not run", ""
    answer = beside(best, muon)
    if answer[0] == "diverged" or not muon or rate_is_found(rows, name) and rate_is_found(rows, "muon"):
        return answer
    return "rate not found", ""


def parity(rows: list[dict[str, str]]) -> list[str]:
    """Our Muon less torch's, seed by seed, at the best rates of ours: the interval of the paired t-test, the difference
    that it finds with a probability of 80 % at a level of 5 %, and whether two one-sided tests find both equal.
    """
    ours = best_rows(rows, "muon")
    theirs = [row for row in rows if row["optimizer"] == "torch_muon" and all(row[k] == ours[0][k] for k in RATES)
              ] if ours else []
    gaps = gaps_of(ours, theirs)
    if len(gaps) not in STUDENT_T:
        few = (f"{len(gaps)} seed{'s' * (len(gaps) != 1)} with both at these rates; "
               f"{min(STUDENT_T)} to {max(STUDENT_T)} are needed")
        return ["", f"muon less torch_muon: {few}."] if ours else []
    error, mean = statistics.stdev(gaps) / math.sqrt(len(gaps)), statistics.mean(gaps)
    level, one_sided, power = STUDENT_T[len(gaps)]
    equal = abs(mean) + one_sided * error < MARGIN
    return ["", f"muon less torch_muon, {len(gaps)} seeds: {mean:+.5f} +- {level * error:.5f} (95 %). "
            f"A difference of {(level + power) * error:.5f} would be found with a probability of about 80 %. "
            f"Equal within {MARGIN} by two one-sided tests at 5 %: {'yes' if equal else 'no'}; their power, if both "
            f"are equal, is {100 * power_of_tost(error, len(gaps)):.0f} %."]


def power_of_tost(error: float, count: int, margin: float = MARGIN) -> float:
    """The probability that two one-sided t-tests at 5 % find means equal that are equal. `error`: the true standard
    error of the mean of `count` differences.
    """
    if error == 0:
        return 1.0
    free, normal, step = count - 1, statistics.NormalDist(), 1e-3
    constant = 2 ** (1 - free / 2) / math.gamma(free / 2)
    total = 0.0
    for number in range(1, 10_000):  # over the estimated error, which is error chi / sqrt(free), by its density
        chi = number * step
        room = margin / error - STUDENT_T[count][1] * chi / math.sqrt(free)
        if room <= 0:
            break
        total += step * constant * chi ** (free - 1) * math.exp(-chi * chi / 2) * (2 * normal.cdf(room) - 1)
    return total

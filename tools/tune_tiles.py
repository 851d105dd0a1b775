"""Measure this machine's tiles and write its table: what kernels/tables/*.json holds for a GPU that we have measured.

    make build && python tools/tune_tiles.py --out my_tiles.json
    export OPTIMIZER_TILES=$PWD/my_tiles.json        # alike on all ranks

Every tile is timed on matrices of many sizes, under CUDA graphs. Four numbers, and how many programs a processor takes
at a time, are fitted to its times (tile_config.py, expected_us), and the few tiles are kept whose predicted choice is
best; their numbers are then moved a little, for a choice that is better still. A tile that gives other bits than the
rest is left out: which tile is chosen depends on the batch, and the bits must not. About ten minutes with the defaults.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import os
import statistics
import time
from pathlib import Path

import torch
from kernels import get_kernel

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={Path(__file__).resolve().parents[1]}")

OPS = ("gram", "symmetric", "product")
SIDES = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
ASPECTS = (1, 4)
TILES_OF_WORK = (0.25, 1, 2, 5, 12, 40)  # matrices in a case: about so many 128 x 128 tiles per processor
MOST_ELEMENTS = 1 << 28
RESIDENT = (1, 2, 3, 4)  # programs on one processor at a time
REST = 3  # as many times as long as a call took
LEAST = 8  # cases that a tile's numbers are fitted to
KEPT, GAIN = 8, 0.001  # tiles of an operation at most; another one has to bring so much of the time
TRIES, MOVE, WRONG = 10000, 0.05, 0.02  # of `refine`: how often, by how much, and what a wrong expectation counts for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="the table")
    parser.add_argument("--ops", nargs="+", default=OPS, choices=OPS, help="operations to measure")
    parser.add_argument("--seconds", type=float, default=600,
                        help="measure no further case after this time, once there are enough for a fit")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("tiles are timed on a GPU, and there is none")
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)  # now, not after ten minutes
    package = get_kernel("org/optimizer", version=1).__name__
    gram, tiles = (
        importlib.import_module(f"{package}.{name}") for name in ("kernels.matmul.api", "kernels.launch.tile_config")
    )
    arch, device = tiles.architecture("cuda", torch.cuda.current_device()), torch.cuda.get_device_properties()
    processors, known = device.multi_processor_count, tiles.table(arch)
    shared = getattr(device, "shared_memory_per_block_optin", 64 << 10)
    end, entries = time.monotonic() + options.seconds, []
    for at, op in enumerate(options.ops):
        until = time.monotonic() + (end - time.monotonic()) / (len(options.ops) - at)
        times = measure(gram, tiles, op, list(candidates(op, arch, shared)), processors, until)
        entries += choose(tiles, op, times, processors)
        print(f"{op}: {len(times)} tiles measured, {sum(e['op'] == op for e in entries)} kept", flush=True)
    measured = {(e["op"], e["bytes"]) for e in entries}
    entries += [e for e in known["entries"] if (e["op"], e["bytes"]) not in measured]
    write(options.out, {"arch": arch, "measured": [2], "processors": processors, "gpu": device.name,
                        "torch": torch.__version__, "entries": entries})


def candidates(op: str, arch: str, shared: int):
    """Entries without times: what fits the shared memory, with TMA from sm90 on."""
    tma = arch.startswith("sm") and int(arch[2:]) >= 90
    sides = [(64, 64), (64, 128), (128, 128), (128, 256)] if tma or op == "product" else [(64, 64), (128, 128)]
    loops = ("once", "turns", "flat") if tma else ("pointers",)
    for (rows, columns), inner, stages, warps, loop in itertools.product(sides, (32, 64), (3, 4, 5), (4, 8), loops):
        result = 2 * rows * columns if loop in ("turns", "flat") else 0  # stored while the next tile is fetched
        fits = 2 * stages * inner * (rows + columns) + result <= shared
        sensible = (warps == 8) >= (rows * columns > 128 * 128) and (warps == 4) >= (rows * columns <= 64 * 64)
        if fits and sensible and (not tma or inner == 64):
            yield {"op": op, "bytes": 2, "tile": [rows, columns, inner], "group": 8, "stages": stages, "warps": warps,
                   "loop": loop}
    for stages, (loop, columns) in itertools.product((3, 4, 5), (("pingpong", 128), ("cooperative", 256))):
        if arch == "sm90" and 2 * (stages * 64 * (128 + columns) + 2 * 128 * 128) <= shared:
            yield {"op": op, "bytes": 2, "tile": [128, columns, 64], "group": 8, "stages": stages, "warps": 4,
                   "loop": loop}


def cases(op: str, processors: int):
    """(matrices, rows, columns) of all sizes, from few tiles to many: if time is short, the largest batches go."""
    for work, aspect, side in itertools.product(TILES_OF_WORK, ASPECTS if op != "symmetric" else (1,), SIDES):
        n, m = side, side * aspect
        per_matrix = math.ceil(n / 128) * math.ceil((m if op == "product" else n / 2) / 128)
        N = max(1, round(work * processors / per_matrix))
        if N == 1 and work > TILES_OF_WORK[0] and per_matrix > 2 * work * processors or N * n * m > MOST_ELEMENTS:
            continue
        yield N, n, m


def measure(gram, tiles, op, entries, processors, until) -> dict:
    """Index of the entry -> {case: microseconds}; tiles that fail or give other bits than most are left out."""
    times = {number: {} for number in range(len(entries))}
    for count, case in enumerate(dict.fromkeys(cases(op, processors)), start=1):
        calls, results = {}, {}
        X, A = operands(op, *case)
        for number in list(times):
            out = torch.empty_like(X if op == "product" else A)
            tile = tiles.tile_of(entries[number])
            try:
                with tiles.force(tile):
                    calls[number] = captured(call_of(gram, op, X, A, out))
            except Exception as why:  # too many registers, too much shared memory: no tile for this machine
                print(f"{op} {tile} left out: {type(why).__name__}", flush=True)
                del times[number]
                continue
            calls[number]()
            counts = out.tril() if op == "symmetric" else out
            results[number] = hash(counts.cpu().numpy().tobytes()) if out.numel() < 1 << 22 else 0
        most = statistics.mode(results.values()) if results else 0
        for number, found in results.items():
            if found != most:
                print(f"{op} {entries[number]['tile']} left out: other bits than most", flush=True)
                del times[number], calls[number]
        for number, us in race(calls).items():
            times[number][case] = us
        if time.monotonic() > until and count >= LEAST:
            break
    return {json.dumps(entries[number]): found for number, found in times.items()}


def operands(op, N, n, m):
    X = torch.randn(N, n, m, device="cuda").half() / math.sqrt(m)
    A = torch.empty(N, n, n, device="cuda", dtype=X.dtype)
    return X, torch.matmul(X, X.mT, out=A)


def call_of(gram, op, X, A, out):
    """One launch of the operation as the iterations use it."""
    if op == "gram":
        return lambda: gram.gram(X, out)
    if op == "product":
        return lambda: gram.product(A, X, out)
    return lambda: gram.symmetric_product(A, A, out, 0.5, [(A, -1.0)], whole=False)


def captured(call):
    """A replay of one launch, which keeps the call's tensors alive: a graph knows addresses only."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            call()
    return lambda tensors=call: graph.replay()


def race(calls, rounds=5) -> dict:
    """Microseconds of a launch, the median over rounds in which all calls take turns; the GPU rests after each, or what
    comes after long products would be measured at the clock that their power leaves.
    """
    times = {key: [] for key in calls}
    for _, (key, call) in itertools.product(range(rounds), list(calls.items())):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times[key].append(1e3 * begin.elapsed_time(end) / 4)
        time.sleep(REST * 1e-6 * 8 * times[key][-1])
    return {key: statistics.median(found) for key, found in times.items()}


def fit(tiles, entry, times, processors) -> dict:
    """What expected_us needs, with the least relative error over {case: microseconds}: `resident`, and the four numbers
    `us`, none negative.
    """
    loops = RESIDENT if entry["loop"] == "once" else RESIDENT[:1]  # others start one program per processor
    solved = [_solve(tiles, entry | {"resident": resident}, times, processors) for resident in loops]
    _, resident, us = min((error, resident, us) for resident, (us, error) in zip(loops, solved))
    return {"resident": resident, "us": us}


def _solve(tiles, entry, times, processors):
    """(The four numbers, their error.)"""
    units = torch.eye(4, dtype=torch.float64).tolist()
    terms = torch.tensor([[tiles.expected_us(entry | {"us": unit}, n, m, N, processors) / us for unit in units]
                          for (N, n, m), us in times.items()], dtype=torch.float64)
    best, smallest = [0.0] * 4, math.inf
    for used in itertools.product((False, True), repeat=4):  # the best solution is that of one of the 15 subsets
        if not any(used):
            continue
        columns = [i for i in range(4) if used[i]]
        solution = torch.linalg.lstsq(terms[:, columns], torch.ones(len(terms), 1, dtype=torch.float64)).solution[:, 0]
        error = (terms[:, columns] @ solution - 1).square().sum().item()
        if (solution >= 0).all() and error < smallest:
            best, smallest = [0.0] * 4, error
            for i, value in zip(columns, solution.tolist()):
                best[i] = value
    return [float(f"{x:.4g}") for x in best], smallest


def choose(tiles, op, times, processors) -> list[dict]:
    """Entries with their numbers: one after another the tile that shortens the predicted choices' times most; none if
    no tile was measured often enough.
    """
    fitted = {key: json.loads(key) for key, found in times.items() if len(found) >= LEAST}
    for key, entry in fitted.items():
        entry |= fit(tiles, entry, times[key], processors)
    common = set.intersection(*(set(times[key]) for key in fitted)) if fitted else set()
    kept, loss = [], math.inf
    while fitted.keys() - kept and len(kept) < KEPT:
        losses = {key: loss_of(tiles, [*kept, key], fitted, times, common, processors) for key in fitted.keys() - kept}
        best = min(losses, key=lambda key: (losses[key], key))
        if losses[best] > loss - GAIN:
            break
        kept, loss = [*kept, best], losses[best]
    return refine(tiles, [fitted[key] for key in kept], [times[key] for key in kept], processors) if kept else []


def refine(tiles, entries, times, processors) -> list[dict]:
    """Move the entries' numbers by chance, a little at a time, wherever less is lost by what is then chosen: they were
    fitted to all cases alike, and a choice is between the few that are about equal. times: of each entry.
    """
    cases, units = sorted(set.intersection(*map(set, times))), torch.eye(4).tolist()
    terms = torch.tensor([[[tiles.expected_us(entry | {"us": unit}, n, m, N, processors) for unit in units]
                           for N, n, m in cases] for entry in entries], dtype=torch.float64)
    actual = torch.tensor([[found[case] for case in cases] for found in times], dtype=torch.float64)
    best = torch.tensor([entry["us"] for entry in entries], dtype=torch.float64)
    chance = torch.Generator().manual_seed(0)

    def loss(numbers):
        expected = (terms @ numbers[:, :, None])[..., 0]
        chosen = actual.gather(0, expected.argmin(0)[None])[0]
        return (chosen / actual.amin(0) - 1).mean() + WRONG * (expected / actual).log().abs().mean()

    least = loss(best)
    for _ in range(TRIES):
        some = torch.rand(best.shape, generator=chance) < 0.3
        tried = best * (MOVE * some * torch.randn(best.shape, generator=chance, dtype=torch.float64)).exp()
        if (lost := loss(tried)) < least:
            best, least = tried, lost
    return [entry | {"us": [float(f"{x:.4g}") for x in us]} for entry, us in zip(entries, best.tolist())]


def loss_of(tiles, keys, fitted, times, common, processors) -> float:
    """The mean relative excess of what the table would choose over the fastest of all tiles."""
    excess = []
    for case in common:
        N, n, m = case
        chosen = min(keys, key=lambda key: tiles.expected_us(fitted[key], n, m, N, processors))
        excess.append(times[chosen][case] / min(found[case] for found in times.values() if case in found) - 1)
    return statistics.mean(excess)


def write(path, table) -> None:
    """JSON with one entry per line."""
    head = {key: value for key, value in table.items() if key != "entries"}
    lines = ",\n".join("    " + json.dumps(entry) for entry in table["entries"])
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(head, indent=2)[:-2] + f',\n  "entries": [\n{lines}\n  ]\n}}\n')


if __name__ == "__main__":
    main()

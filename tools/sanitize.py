"""Run every kernel on one shape under NVIDIA's compute-sanitizer: memcheck, racecheck and initcheck.

    make build && python tools/sanitize.py

It compiles everything first, without the sanitizer, then starts itself once per tool. Shapes are no multiples of a
tile, so that every edge is there. Exit status 0: nothing found; 1: something, or no answer; 2: there is no GPU or no
compute-sanitizer.

racecheck takes the hand-over of work to groups of warps (`warp_specialize`) for a race wherever some of a program's
warps wait for each other elsewhere, also in a kernel that does nothing else (tests/hand_over.py). What it reports there
is shown, and does not count as found.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from kernels import get_kernel

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={Path(__file__).resolve().parents[1]}")

TOOLS = ("memcheck", "racecheck", "initcheck")
SOMETHING = 9  # exit status of the sanitizer where it found something
FULL, SMALL = {"sides": (200, 328), "chip": (100, 300)}, {"sides": (20, 40), "chip": (20, 300)}
HALF, WIDE = torch.float16, torch.float32
INTERPRETED = "TRITON_INTERPRET=1 OPTIMIZER_KERNELS=triton"
TRIPLES = ((3.4445, -4.7750, 2.0315),) * 2


def part(name: str):
    return importlib.import_module(f"{get_kernel('org/optimizer', version=1).__name__}.{name}")


def padded(N: int, n: int, m: int, dtype: torch.dtype, device) -> torch.Tensor:
    """Normal numbers whose rows begin at multiples of 16 bytes."""
    X = torch.randn(N, n, -(-m // 8) * 8, device=device).to(dtype)
    return X[:, :, :m]


def products(device, size) -> None:
    """The three products by pointers, in both precisions; on sm90 and later also by TMA in all its loops."""
    gram, tiles, (n, m) = part("kernels.matmul.api"), part("kernels.launch.tile_config"), size["sides"]
    found = [(HALF, tiles.Tile(64, 64, 32, 2, 2, 4)), (WIDE, tiles.Tile(32, 32, 32, 2, 2, 4))]
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0):
        found += [(HALF, tiles.Tile(*sides, 64, 8, 3, 8, loop)) for loop in ("once", "turns", "flat")
                  for sides in ((64, 64), (64, 128))]
        if torch.cuda.get_device_capability() == (9, 0) and part("kernels.launch.replay").knows_triton():
            groups = tiles.Tile(128, 128, 64, 8, 5, 4, "pingpong"), tiles.Tile(128, 256, 64, 8, 3, 4, "cooperative")
            found += [(HALF, tile, count) for tile in groups for count in (4, None)]
            for sides in ((64, 64), (64, 128), (128, 128)):  # by sm90_one_tile.py, which wants two steps or more
                A, out = (padded(2, max(n, 72), max(n, 72), HALF, device) for _ in "12")
                with tiles.force(tiles.Tile(*sides, 64, 8, 3, 4, "once")):
                    gram.symmetric_product(A, A, out, 0.5, [(A, 2.0), (A, 0.1), (out, 1.0)], 1.0)
            raw(gram, device, n, m)
            in_pairs(gram, groups[1], device)
            resident(device)
    for dtype, tile, *few in found:
        X, A, out = padded(2, n, m, dtype, device), padded(2, n, n, dtype, device), padded(2, n, n, dtype, device)
        with tiles.force(tile), processors(*few):
            gram.gram(X, A)
            gram.symmetric_product(A, A, out, 0.5, [(A, 2.0), (A, 0.1)], 1.0)
            gram.product(out, X, padded(2, n, m, dtype, device))
            gram.product(out, X, torch.empty(2, m, n, device=device, dtype=torch.bfloat16).mT)


def in_pairs(gram, tile, device) -> None:
    """Squares on the diagonal in pairs, whole and in halves of tiles: of three rows of tiles or more."""
    X, (A, out) = padded(2, 300, 136, HALF, device), (padded(2, 300, 300, HALF, device) for _ in "12")
    for count in (4, None):
        with part("kernels.launch.tile_config").force(tile), processors(count):
            gram.gram(X, A)
            gram.symmetric_product(A, A, out, 0.5, [(A, 2.0), (A, 0.1)], 1.0)


def raw(gram, device, n, m) -> None:
    """Products of matrices in bf16 as they are, in halves of tiles and in whole ones."""
    X, A = padded(2, n, m, torch.bfloat16, device), padded(2, n, n, HALF, device)
    for count in (4, None):
        with processors(count):
            gram.gram(X, A, torch.ones(2, device=device))
            gram.product(A, X, padded(2, n, m, HALF, device), *torch.ones(2, 2, device=device))


def resident(device) -> None:
    """Gram matrices that stay in shared memory, and what follows them: a pair, and a step before one (cut 3+2)."""
    module, steps = part("kernels.onchip.gram_chain"), part("newton_schulz.coefficients").steps_of("jordan")
    raw = padded(2, 200, 500, torch.bfloat16, device)
    squares = [(1e-3 * torch.randn(2, 256, 256, device=device)).to(HALF)[:, :200, :200] for _ in range(4)]
    module._known.clear()
    for interval, pair in zip(steps.intervals(), steps.pairs(), strict=True):
        module.follow(interval, pair, *squares)
        for X in (padded(2, 200, 500, HALF, device), raw):
            module.follow(interval, pair, *squares, (X, None))


@contextlib.contextmanager
def processors(count: int | None = None):
    """Let products by TMA believe in so many: in whole turns and a shared one of few tiles, as large products have.

    None: in those that there are.
    """
    order, known = part("kernels.launch.tile_scheduler"), part("kernels.matmul.api")._known
    known.clear()  # a launch that is bound keeps its number
    real, order.processors_of = order.processors_of, lambda device: count or real(device)
    try:
        yield
    finally:
        order.processors_of = real


def norms(device, size) -> None:
    """Frobenius norm and cast, or not, of ordinary and of tiny numbers, wide and tall."""
    norm, (n, m) = part("kernels.elementwise.scaling"), size["sides"]
    raw_norm = norm.raw_norm
    for U in (torch.randn(2, n, m, device=device), torch.randn(2, m, n, device=device).mT * 1e-30):
        norm.unit_norm(U, padded(2, n, m, HALF, device), torch.empty(2, device=device), 1e-7)
        factors, A = torch.empty(3, 2, device=device), padded(2, n, n, HALF, device)
        raw_norm(U, padded(2, n, m, U.dtype, device), factors, A, 1e-7)
        raw_norm(padded(2, n, m, HALF, device), None, factors, A, 1e-7)


def pieces(device, size) -> None:
    """What is read and stored in pieces of whole rows: norms, NorMuon's rows, and products, wide and tall."""
    gram, norm, rows_, split, tiles = (
        part(f"{name}")
        for name in (
            "kernels.matmul.api",
            "kernels.elementwise.scaling",
            "kernels.elementwise.norms",
            "kernels.elementwise.row_scattered",
            "kernels.launch.tile_config",
        )
    )
    n, m = size["sides"]
    found = [tiles.Tile(64, 64, 32, 2, 2, 4)]
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0):
        found += [tiles.Tile(64, 128, 64, 8, 3, 8, loop) for loop in ("once", "turns", "flat")]
    for R, C, dtype in ((n, m, HALF), (m, n // 8 * 8, HALF), (n, m, WIDE)):
        ends = ((0, 3, R), (0, R // 2 + 1, R))
        U = split.ScatteredRows([[torch.randn(b - a, C, device=device).to(dtype) for a, b in zip(bounds, bounds[1:])]
                         for bounds in ends])
        U, short = (U.mT if R > C else U), min(R, C)
        X, A = padded(*U.shape, HALF, device), padded(2, short, short, HALF, device)
        norm.unit_norm(U, X, torch.empty(2, device=device), 1e-7)
        for tile in found:
            with tiles.force(tile):
                gram.product(A, X, U)
        rows_.normalize(U.mT if R > C else U, torch.rand(2, R, 1, device=device), 0.9, 1e-8)


def aol(device, size) -> None:
    """Lengths of rows, cast, the scaling of a Gram matrix, and what presets do to matrices besides."""
    module, (n, m) = part("kernels.elementwise.aol"), size["sides"]
    for U in (torch.randn(2, n, m, device=device), torch.randn(2, m, n, device=device).mT):
        Y = padded(2, n, m, HALF, device)
        lengths, scales = (torch.empty(*shape, device=device) for shape in ((2, 2, n), (2, n)))
        module.unit_rows(U, Y, lengths)
        host = Y.float().cpu()  # initcheck does not see what cuBLAS writes by TMA
        A = (host @ host.mT).to(device, HALF)
        module.aol(A, lengths, scales)
        module.scale_rows(Y, scales)
        module.scale_columns(A, scales)
        part("kernels.matmul.api").linear(A, 2.0, 0.5, A)


def small_matrices(device, size) -> None:
    """The iteration in one program: of matrices that fit, of longer ones, and from the Gram matrix on."""
    module, (n, m) = part("kernels.onchip.polar"), size["chip"]
    for N, rows, columns in ((3, n, m), (1, n, 2 * m), (2, 20, 30)):
        X = torch.randn(N, rows, columns, device=device)
        if module.supports(X, HALF):
            module.polar(X, torch.empty_like(X), (TRIPLES,), 1e-7, HALF)
        A = padded(2, rows, rows, HALF, device)
        A.copy_(torch.eye(rows, device=device))
        module.follow(A, padded(2, rows, rows, HALF, device), TRIPLES)


def rows(device, size) -> None:
    """NorMuon's rows, and the norms and moments of other rules."""
    n, m = size["sides"]
    norms, keep_norms = part("kernels.elementwise.norms"), part("kernels.elementwise.weight_update").keep_norms
    numbers = torch.rand(8, device=device)
    norms.normalize(torch.randn(2, n, m, device=device), torch.rand(2, n, 1, device=device), 0.9, 1e-8)
    for R, C in ((n, m), (m, n)):
        X, sent = torch.randn(2, R, C, device=device).bfloat16(), torch.empty(2, 2, 1, 1, device=device)
        norms.normalize_columns(X, torch.rand(2, 1, C, device=device), numbers, 1e-8)
        norms.divide_by_moments(X, torch.rand(2, R, C, device=device), numbers, 1e-8)
        keep_norms(X.float(), X, torch.zeros(2, R, 1, device=device), *sent, numbers)
        for order in (("row",), ("column",), ("row", "column"), ("column", "row")):
            norms.equalize(X, order, 1e-7)
            norms.equalize(X, order, 1e-7, torch.ones(2, 1, 1, device=device))
        for per in ("row", "column"):
            part("kernels.elementwise.aol").absolute_sums(X, per)


def rectangles(device, size) -> None:
    """Momentum, copies and updates: rectangles without gaps and others."""
    pack, table, update, check, quantized, averages, blocks, squares, halves = (
        part(f"{name}")
        for name in (
            "kernels.elementwise.momentum",
            "kernels.elementwise.multi_tensor",
            "kernels.elementwise.weight_update",
            "kernels.elementwise.nonfinite_check",
            "kernels.quantized.momentum",
            "kernels.quantized.adamw",
            "kernels.quantized.blocks",
            "kernels.quantized.squares",
            "kernels.weights.split",
        )
    )
    n, m = size["sides"]
    for width in (m, m - 3):
        M, U, G, W = (torch.randn(n, m, device=device)[:, :width] for _ in range(4))
        sources = [table.Source(0, 0, (m, 1))]
        addresses = torch.tensor([G.data_ptr()], dtype=torch.int64, device=device)
        numbers = torch.tensor([0.1, 0.99], device=device)
        pack.Pack([M], [U], sources, [G])([G], addresses, numbers[:1], True)
        in_8_bits = quantized.QuantizedView(*blocks.quantize(M.contiguous()))
        quantized.QuantizedMomentum([in_8_bits], [U], sources, [G])([G], addresses, numbers[:1], True)
        # The last program of the contiguous tensors, of whole blocks, has fewer blocks than the others
        for w, g in ((W, G), (torch.randn(n - 1, 128, device=device), torch.randn(n - 1, 128, device=device))):
            (first, first_scale), (second, second_scale) = blocks.quantize(g * 0.1), squares.quantize(g.square())
            own = averages.Averages(first.contiguous(), second.contiguous(), first_scale, second_scale)
            factors = torch.tensor([0.99, 0.01, 0.1, 0.5], device=device)
            averages.step(w, g, own, factors, averages.Constants.of(0.9, 0.95, 1e-8, 0))
        pack.Copy.of_gradients([U], sources, [G])([G], addresses)
        pack.Copy([W], [M])()
        update.WeightUpdate([W], [U], [0.5])(numbers)
        high, rest = (torch.empty_like(W, dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
        halves.split_into(W, high, rest)
        split = halves.SplitWeights([rest])
        update.WeightUpdate([high], [U], [0.5], rounding=split)(numbers)
        halves.join_into(torch.empty_like(high, dtype=torch.float32), high, rest)
        scales = torch.rand(n + m, device=device)
        update.ScaledWeights([W, M[0]], [(0, 0), (n, 0)], scales)()
        update.ScaledWeights([W, M], [(n, 1), (0, 0)], scales)()
        flags = table.Skip(torch.zeros(1, device=device), (0,))
        check.NonfiniteCheck([(n, width)], sources, [G], flags)(addresses)


def samples(device, size) -> None:
    """Sums of squares from samples of weights and momenta, whole weights and split ones."""
    sample, table, halves = (
        part(name) for name in ("kernels.metrics.sample", "kernels.elementwise.multi_tensor", "kernels.weights.split"))
    W, M = ([torch.randn(n, device=device) for n in (3000, 35)] for _ in "12")
    regions = [[sample.Region(2, 1490, 7, 1500, 5, 1500, 4)], [sample.Region(5, 7, 0, 7, 0, 7, 1)]]
    for weights in (sample.Weights(W), sample.Weights(*map(list, zip(*map(halves.split, W))))):
        sums = sample.SampledSquares(table.Squares(), regions, weights, weights, M)
        sums(sums.save())


CASES = {function.__name__: function
         for function in (products, norms, pieces, aol, small_matrices, rows, rectangles, samples)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--sanitizer", default=None, help="compute-sanitizer (default: that of PATH or of CUDA_HOME)")
    parser.add_argument("--run", action="store_true", help="run the cases in this process, without a sanitizer")
    parser.add_argument("--small", action="store_true", help="smaller shapes, as Triton's interpreter needs them")
    options = parser.parse_args()
    if options.run:
        return run(options)
    if not torch.cuda.is_available():
        print("compute-sanitizer needs a GPU, and there is none. In Triton's interpreter, without the sanitizer: "
              f"{INTERPRETED} python {sys.argv[0]} --run --small")
        return 2
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    sanitizer = options.sanitizer or shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:{home / 'bin'}")
    if sanitizer is None:
        print("compute-sanitizer is not installed; it comes with the CUDA toolkit (or name it with --sanitizer)")
        return 2
    myself = [sys.executable, __file__, "--run", "--cases", *options.cases, *["--small"] * options.small]
    subprocess.run(myself, check=True)
    # without a cache in between, every tensor is an allocation of its own
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    failed = 0
    for tool in options.tools:
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(SOMETHING), *myself]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        found = [line for line in done.stdout.splitlines() if line.startswith("=========")]
        print(f"{tool}: {found[-1].strip('= ') if found else 'no answer'} (exit status {done.returncode})", flush=True)
        if done.returncode or not found:
            told = tool == "racecheck" and hand_over_apart(found)
            print("\n".join((told or found)[:60]) or done.stderr[-2000:])
            failed += not (done.returncode == SOMETHING and told and not any(" access at " in line for line in told))
    return int(failed > 0)


def hand_over_apart(report: list[str]) -> list[str]:
    """Return what racecheck reports elsewhere than where a kernel hands work to groups of warps, each race as a whole,
    and how many are only there; nothing of a report without races.
    """
    races, known = [[]], hand_overs()
    for line in report:
        if "Race reported between" in line:
            races.append([])
        if " access at " in line:
            races[-1].append(line)
    places = [[re.search(r" in (\S+:\d+)", line) for line in race] for race in races]
    elsewhere = [race for race, found in zip(races, places) if not all(place and place[1] in known for place in found)]
    left = len(list(filter(None, races))) - len(elsewhere)
    return sum(elsewhere, []) + [f"{left} races where work is handed over"] * (left > 0)


def hand_overs() -> set[str]:
    """file:line of each call of warp_specialize in the kernels, and of its kernel's `def`, for what Triton adds."""
    found = set()
    for path in Path(part("kernels").__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                calls = [node for node in ast.walk(function) if getattr(node, "attr", "") == "warp_specialize"]
                found |= {f"{path.name}:{node.lineno}" for node in (*calls, *([function] if calls else []))}
    return found


def run(options) -> int:
    """Run the cases, and print which kernels they launched. Exit status 2: there is nothing that runs kernels."""
    asked = dict(setting.split("=") for setting in INTERPRETED.split())
    if not torch.cuda.is_available() and not asked.items() <= os.environ.items():
        print(f"without a GPU, kernels run in Triton's interpreter only: set {INTERPRETED}, and use --small")
        return 2
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in options.cases:
        CASES[name](device, SMALL if options.small else FULL)
        if device.type == "cuda":
            torch.cuda.synchronize()
    package = part("kernels").__name__
    launched = sorted(f"{name.removeprefix(package + '.')}.{key}" for name, module in list(sys.modules.items())
                      if name.startswith(package + ".") for key, value in vars(module).items()
                      if getattr(value, "made", None) is not None)
    print("launched:", *launched)
    return 0


if __name__ == "__main__":
    sys.exit(main())

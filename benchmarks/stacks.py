"""The iteration of one bucket's matrices, in ways that give the same bits; one CSV row for each measurement.

    make build && python benchmarks/stacks.py pieces --ranks 8 --stacks 6x768x768 2x768x3072
    ... side_by_side --stacks 6x768x768+2x768x3072 2x2048x2048+2x2048x6144
    ... last_turn --stacks 3x2048x6144 8x1024x4096
    ... ends --stacks 24x896x896 32x512x2048
    ... processors --stacks 64x256x768
    ... gram_tiles --stacks 1x1024x8192
    ... symmetric --stacks 3x2048x2048           one product with an addend alone
    ... product --stacks 4x2880x2880             A X alone
    ... --rest-ms 0                              of large stacks a long run, at the power limit

"pieces": matrices that arrive cut by rows over so many ranks are copied together, iterated and copied to where they
leave ("copied"), or read and written where their pieces are ("in pieces"). "side_by_side": stacks follow each other in
the same memory ("in turns"), or each has memory of its own, which lets a CUDA graph run them together ("side by side").
"ends": launches take the matrices from the first on, or each from where the one before has ended ("either end").
"processors": what stays on processors (gram_chain.py) is done by launches, or by one processor for each matrix.
"gram_tiles": X X^T in the tiles that the table chooses ("chosen"), or in those of one of its entries. Among others a
product does not take what it takes alone: this says which of two about equal entries should be chosen.
"last_turn", "symmetric", "product": processors compute whole tiles only, or two share a tile of the last turn.
By CUDA graphs, in turns; without a GPU called, where the ways take the same time: good to try the script.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
from functools import partial
from pathlib import Path

import torch
from kernels import get_kernel
from race import captured, race
from rows import add_output, append
from shapes import stack_of
from step import device_name, triton_version

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={Path(__file__).resolve().parents[1]}")
PACKAGE = get_kernel("org/optimizer", version=1).__name__
polar, method, split, pack, gram, order, resident, tape, tiles = (
    importlib.import_module(f"{PACKAGE}.{name}")
    for name in (
        "newton_schulz.orthogonalize",
        "newton_schulz.method",
        "kernels.elementwise.row_scattered",
        "kernels.elementwise.momentum",
        "kernels.matmul.api",
        "kernels.launch.tile_scheduler",
        "kernels.onchip.gram_chain",
        "kernels.launch.replay",
        "kernels.launch.tile_config",
    )
)
COLUMNS = "commit gpu what stacks ranks way median_us p20_us p80_us torch triton".split()
STEPS, WIRE_DTYPE, CHOOSE = polar.steps_of("polar_express"), torch.bfloat16, tiles.choose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WAYS)
    parser.add_argument("--stacks", nargs="+", required=True, type=bucket_of,
                        help="NxRxC, several of one bucket joined by +")
    parser.add_argument("--ranks", type=int, default=8, help="over which rows are cut, in pieces")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--rest-ms", type=float, default=6.0, help="how long the GPU rests before each burst")
    add_output(parser, COLUMNS, "stacks.csv")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for text, shapes in options.stacks:
        if options.what == "symmetric" and any(R != C for _, R, C in shapes):
            parser.error(f"{text}: symmetric matrices have as many rows as columns")
        if options.what == "pieces" and not all(method.supports_scattered_rows(R, C, STEPS) for _, R, C in shapes):
            parser.error(f"{text}: small matrices, and rows of no multiple of 16 elements, do not go in pieces")
        ways, results = WAYS[options.what](shapes, options.ranks, device)
        same_bits(ways, results)
        calls = {way: captured(call)[0] if device.type == "cuda" else call for way, call in ways.items()}
        for way, times in race(calls, lambda: None, options.rounds, burst_ms=3, rest_ms=options.rest_ms).items():
            median, p20, p80 = (round(1e3 * ms, 1) for ms in times.summary())
            row = [options.commit, device_name(device), options.what, text, options.ranks, way, median, p20,
                   p80, torch.__version__, triton_version()]
            append(options.out, COLUMNS, [dict(zip(COLUMNS, row))])
            print(*row[2:7], flush=True)


def bucket_of(text) -> tuple:
    """(what was given, its stacks)."""
    return text, [stack_of(stack) for stack in text.split("+")]


def in_pieces(shapes, ranks, device):
    """({way: function}, where both leave their results)."""
    stacks = [torch.randn(shape, device=device).to(WIRE_DTYPE) for shape in shapes]
    arrived, leaves = (torch.empty(sum(t.numel() for t in stacks), dtype=WIRE_DTYPE, device=device) for _ in "12")
    came, go = (in_buffer(flat, shapes, ranks) for flat in (arrived, leaves))
    wholes = [pieces_of(t, ranks) for t in stacks]
    flat = [[piece for stack in where for matrix in stack for piece in matrix] for where in (came, go, wholes)]
    for place, piece in zip(flat[0], flat[2]):
        place.copy_(piece)
    assemble, dismantle = pack.Copy(flat[2], flat[0]), pack.Copy(flat[1], flat[2])

    def copied():
        assemble()
        polar.orthogonalize_(stacks, STEPS)
        dismantle()

    read, written = ([split.ScatteredRows(stack) for stack in where] for where in (came, go))
    return {"copied": copied, "in pieces": partial(polar.orthogonalize_, read, STEPS, into=written)}, [leaves]


def pieces_of(stack, ranks):
    """Of each matrix its rows as Shard(0) cuts them."""
    return [list(matrix.split(-(-len(matrix) // ranks))) for matrix in stack]


def in_buffer(flat, shapes, ranks):
    """Places for all pieces in a flat tensor: by rank, then by matrix."""
    at, places = 0, [[[] for _ in range(N)] for N, _, _ in shapes]
    for rank in range(ranks):
        for stack, (_, R, C) in zip(places, shapes):
            each = -(-R // ranks)
            rows = max(0, min(R - rank * each, each))
            for matrix in stack if rows else ():
                matrix.append(flat[at:at + rows * C].view(rows, C))
                at += rows * C
    return places


def side_by_side(shapes, ranks, device):
    """({way: function}, where both leave their results)."""
    stacks = [torch.randn(shape, device=device).to(WIRE_DTYPE) for shape in shapes]
    results = [torch.empty_like(t) for t in stacks]
    needs = {}
    for N, R, C in shapes:
        key, long, square = method.scratch_bytes(R, C, STEPS, method.products_dtype(None, device))
        before = needs.get(key, (0, 0, 0))
        needs[key] = tuple(a + N * b for a, b in zip(before, (long // 2, long // 2, square)))

    def way(together):
        memory = [torch.empty(together(sizes), dtype=torch.uint8, device=device) for sizes in zip(*needs.values())]
        return partial(polar.orthogonalize_, stacks, STEPS, memory=memory, into=results)

    return {"in turns": way(max), "side by side": way(sum)}, results


def last_turn(shapes, ranks, device):
    """({way: function}, where both leave their results). Both take the tiles that the table chooses for shared ones."""
    work, results = whole_call(shapes, device)
    return whole_and_shared(work), results


def ends(shapes, ranks, device):
    """({way: function}, where both leave their results)."""
    work, results = whole_call(shapes, device)

    def way(direction):
        gram._direction = direction
        tape._recordings.clear()  # what was recorded with the other one
        work()

    return {"from the first": partial(way, lambda op: 1), "either end": partial(way, gram._direction)}, results


def processors(shapes, ranks, device):
    """({way: function}, where all leave their results)."""
    work, results = whole_call(shapes, device)

    def way(least):
        resident.FROM = least
        resident._known.clear()
        tape._recordings.clear()
        work()

    return {"launches": partial(way, 1 << 30), "one processor": partial(way, 1)}, results


def gram_tiles(shapes, ranks, device):
    """The same, for as many ways as there are tiles."""
    work, results = function_call(shapes, device)

    def way(tile):
        def choose(op, *about, **more):
            return CHOOSE(op, *about, **more) if tile is None or op != "gram" or more else tile

        tiles.choose = choose
        gram._known.clear()
        tape._recordings.clear()
        work()

    ways = {"chosen": partial(way, None)}
    for tile in map(tiles.tile_of, tiles.entries_of("gram", 2, tiles._gpu(device.type, device.index))):
        ways[f"{tile.rows}x{tile.columns} {tile.loop}"] = partial(way, tile)
    return ways, results


def function_call(shapes, device):
    """(`orthogonalize` of all stacks, where it leaves its results)."""
    stacks = [torch.randn(shape, device=device).to(WIRE_DTYPE) for shape in shapes]
    results = [torch.empty_like(t) for t in stacks]

    def work():
        for X, out in zip(stacks, results):
            out.copy_(polar.orthogonalize(X))

    return work, results


def whole_call(shapes, device):
    """(function, where it leaves its results)."""
    stacks = [torch.randn(shape, device=device).to(WIRE_DTYPE) for shape in shapes]
    results = [torch.empty_like(t) for t in stacks]
    return partial(polar.orthogonalize_, stacks, STEPS, into=results), results


def symmetric(shapes, ranks, device):
    """The same of A A + 2 A for symmetric A (N, n, n)."""
    stacks = [torch.randn(shape, device=device) / shape[1]**0.5 for shape in shapes]
    stacks = [((A + A.mT) / 2).to(method.products_dtype(None, device)) for A in stacks]
    results = [torch.empty_like(A) for A in stacks]

    def multiply():
        for A, out in zip(stacks, results):
            gram.symmetric_product(A, A, out, 1.0, [(A, 2.0)])

    return whole_and_shared(multiply), results


def product(shapes, ranks, device):
    """The same of A X for symmetric A (N, R, R) and X (N, R, C)."""
    dtype, pairs = method.products_dtype(None, device), []
    for N, R, C in shapes:
        A = torch.randn(N, R, R, device=device) / R**0.5
        pairs.append((((A + A.mT) / 2).to(dtype), torch.randn(N, R, C, device=device).to(dtype)))
    results = [torch.empty_like(X) for _, X in pairs]

    def multiply():
        for (A, X), out in zip(pairs, results):
            gram.product(A, X, out)

    return whole_and_shared(multiply), results


def whole_and_shared(work) -> dict:
    """{way: function}."""
    def way(divide):
        order.divide = divide
        gram._known.clear()  # what was bound with the other one
        tape._recordings.clear()
        work()

    def whole(count, processors, loop, wide=False):
        return min(count, tiles.divide(count, processors, loop, wide)[0]), count, 0

    return {"whole tiles": partial(way, whole), "shared tiles": partial(way, tiles.divide)}


def same_bits(ways, results) -> None:
    """Try all ways once."""
    found = []
    for call in ways.values():
        call()
        found.append([t.clone() for t in results])
        for t in results:
            t.fill_(float("nan"))
    for first, second in itertools.pairwise(found):
        assert all(map(torch.equal, first, second)), f"{list(ways)} differ"


WAYS = {"pieces": in_pieces} | {
    way.__name__: way for way in (side_by_side, last_turn, ends, processors, gram_tiles, symmetric, product)}

if __name__ == "__main__":
    main()

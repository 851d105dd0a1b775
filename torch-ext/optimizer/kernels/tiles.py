"""Launch choice: how a batched product is cut into tiles.

Decides: tile, stages and warps by (operation, element size, shape, architecture), from one table per architecture in
tables/, with a conservative default. Where the table holds measured times, the batch counts too: such entries have to
give one matrix the same bits, all of them (tests/test_gram.py). Must not know: timing at run time, by which ranks would
choose differently.
"""
from __future__ import annotations

import contextlib
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import debug

TABLES = Path(__file__).with_name("tables")


@dataclass(frozen=True)
class Tile:
    """Elements of the output (rows, columns) and of the sum (inner) that a program takes at a time, and its resources.

    `loop` says which kernel, and how its programs take turns: "pointers" (any memory, a tile each); with TMA (sm90 on)
    "once" (a tile each), "turns" (a program per processor, tile after tile), "flat" (the same as one pipelined loop) or
    "pingpong" (a program per processor, two groups of warps in turns; pingpong.py). Symmetric results need square
    tiles; with TMA, but not in pingpong.py, they may be twice as wide as high. `group` rows of tiles are visited
    together, so that they share the cache ("pointers" only).
    """

    rows: int
    columns: int
    inner: int
    group: int
    stages: int
    warps: int
    loop: str = "pointers"


# fit every GPU from 64 KiB of shared memory on
DEFAULT, DEFAULT_FP32 = Tile(64, 64, 32, 8, 3, 4), Tile(32, 32, 32, 8, 2, 4)
_forced: Tile | None = None


def choose(op: str, dtype: torch.dtype, rows: int, columns: int, device: torch.device, matrices: int = 1,
           without: str = "") -> Tile:
    """Return the tile for `op` on so many matrices: "gram" of (rows, columns), "symmetric" (rows, rows), or "product"
    of (rows, rows) and (rows, columns). `without`: a loop that cannot be had here.
    """
    arch = architecture(device.type, device.index)
    return _forced or _best(op, dtype.itemsize, rows, columns, matrices, arch, without)


def forced() -> Tile | None:
    """Return the tile that a `with` block forces."""
    return _forced


@contextlib.contextmanager
def force(tile: Tile):
    """Use `tile` for every launch inside a `with` block (tests and tuning only)."""
    global _forced
    before, _forced = _forced, tile
    try:
        yield
    finally:
        _forced = before


@functools.cache
def architecture(kind: str, index: int | None = None) -> str:
    """Return the name that tables go by: sm90, gfx942, or the kind of device where there is no finer name."""
    if kind != "cuda":
        return kind
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
    return "sm{}{}".format(*torch.cuda.get_device_capability(index))


@functools.cache
def table(arch: str) -> dict:
    """Read the table of an architecture, the user's own (OPTIMIZER_TILES) or ours; an unknown one has no entries.

    Read once: a later change of the variable or of the file has no effect.
    """
    if own := debug.tiles():
        given = json.loads(own.read_text(encoding="utf-8"))
        check_table(given, str(own))
        if given["arch"] == arch:
            return given
    path = TABLES / f"{arch}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"measured": [], "entries": []}


def check_table(given: dict, name: str) -> None:
    """Raise ValueError where a table lacks something, or holds an entry that no kernel takes."""
    timed = {(e.get("op"), e.get("bytes"), "us" in e) for e in given.get("entries", ())}
    needed = {"arch", "measured", "entries"} | ({"processors"} if any(us for *_, us in timed) else set())
    missing = needed - set(given)
    if missing:
        raise ValueError(f"{name}: a table of tiles needs {', '.join(sorted(missing))}; see docs/kernels.md")
    for entry in given["entries"]:
        both = (entry.get("op"), entry.get("bytes"), "us" not in entry) in timed
        if fault := "us, which others of its kind have or lack," if both else _fault(entry):
            raise ValueError(f"{name}: {fault} in the entry {entry}; see docs/kernels.md")


def _fault(entry):
    rows, columns, inner = tile = entry.get("tile", (0, 0, 0))
    loop = entry.get("loop", "pointers")
    wide = loop not in ("pointers", "pingpong") and columns == 2 * rows
    checks = {
        'op is none of "gram", "symmetric", "product"': entry.get("op") in ("gram", "symmetric", "product"),
        "bytes is neither 2 nor 4": entry.get("bytes") in (2, 4),
        "a side of the tile is no power of two from 16 on": all(x >= 16 and x & (x - 1) == 0 for x in tile),
        "a symmetric result needs square tiles": entry.get("op") == "product" or rows == columns or wide,
        "loop is unknown": loop in ("pointers", "once", "turns", "flat", "pingpong"),
        "group, stages or warps is no positive number": all(entry.get(k, 0) > 0 for k in ("group", "stages", "warps")),
        "there are neither four numbers `us` nor `rows` and `columns`":
            len(entry.get("us", ())) == 4 or {"rows", "columns"} <= set(entry),
    }
    return next((fault for fault, right in checks.items() if not right), None)


@functools.lru_cache(maxsize=4096)
def _best(op: str, itemsize: int, rows: int, columns: int, matrices: int, arch: str, without: str = "") -> Tile:
    """Take the entry that is expected to be fastest, or without times the one whose shape is nearest, in powers of two;
    the first of equals.
    """
    entries = [e for e in table(arch)["entries"] if e["op"] == op and e["bytes"] == itemsize]
    entries = [e for e in entries if e.get("loop") != without]
    if not entries:
        return DEFAULT_FP32 if itemsize > 2 else DEFAULT

    def distance(entry):
        return abs(math.log2(entry["rows"] / max(rows, 1))) + abs(math.log2(entry["columns"] / max(columns, 1)))

    def time(entry):
        return expected_us(entry, rows, columns, matrices, table(arch)["processors"])

    best = min(entries, key=time if all("us" in e for e in entries) else distance)
    return Tile(*best["tile"], best["group"], best["stages"], best["warps"], best.get("loop", "pointers"))


def expected_us(entry: dict, rows: int, columns: int, matrices: int, processors: int) -> float:
    """Return the microseconds that a launch should take, from the four numbers of its entry that were fitted to
    measurements: per launch, per turn (the most tiles that one processor gets), per step of a turn (`inner` elements of
    the sum), and per step of an even share of all tiles.
    """
    height, width, inner = entry["tile"]
    product, down = entry["op"] == "product", -(-rows // height)
    if product:
        tiles = down * -(-columns // width)
    else:  # the lower triangle, in tiles that are `ratio` times as wide as high
        ratio = width // height
        tiles = sum(i // ratio + 1 for i in range(down))
    turns, steps = -(-matrices * tiles // processors), -(-(rows if product else columns) // inner)
    launch, turn, turn_step, share_step = entry["us"]
    return launch + turn * turns + turn_step * turns * steps + share_step * steps * matrices * tiles / processors

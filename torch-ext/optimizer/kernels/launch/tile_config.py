"""Tile configurations of products, from tables by architecture."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from ...params import errors
from .. import backend

TABLES = Path(__file__).with_name("tables")
# GPUs without a table of their own -> one whose entries suit them: the instructions are alike, and
# the tiles fit
RELATIVES = {
    "sm86": "sm80",
    "sm87": "sm80",
    "sm89": "sm80",
    "sm120": "sm80",
    "sm121": "sm80",
    "sm103": "sm100",
    "gfx90a": "gfx942",
    "gfx950": "gfx942",
}


@dataclass(frozen=True)
class Tile:
    """Elements of the output (rows, columns) and of the sum (inner) that a program takes at a time,
    and its resources.

    `loop` says which kernel, and how its programs take turns: "pointers" (any memory, a tile each);
    with TMA (sm90 on) "once" (a tile each), "turns" (a program per processor, tile after tile),
    "flat" (the same as one pipelined loop); or, of two groups of warps, "pingpong" (a tile each, in
    turns; sm90_warp_specialized.py) and "cooperative" (half a tile each; sm90_warp_specialized.py).
    Symmetric results need square tiles; with TMA, but not in sm90_warp_specialized.py, they may be
    twice as wide as high. `group` rows of tiles are visited together, so that they share the cache
    ("pointers" only).
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
HALF_TURN = 0.6  # of a turn: the last one, in which processors share tiles (docs/log.md)
# Loops of sm90 whose groups of warps differ; they store by TMA only
SPECIALISED = "pingpong", "cooperative"
MOST_SHARED = 232448  # bytes: what a program has on the GPU with the most
_forced: Tile | None = None


def choose(
    op: str,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    device: torch.device,
    matrices: int = 1,
    without: tuple[str, ...] = (),
) -> Tile:
    """Return the tile for `op` on so many matrices: "gram" of (rows, columns), "symmetric" (rows,
    rows), or "product" of (rows, rows) and (rows, columns). `without`: loops that cannot be had
    here.
    """
    return _forced or _best(
        op, dtype.itemsize, rows, columns, matrices, _gpu(device.type, device.index), without
    )


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
    """Return the name that tables go by: sm90, gfx942, or the kind of device where there is no
    finer name.
    """
    if kind != "cuda":
        return kind
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
    return "sm{}{}".format(*torch.cuda.get_device_capability(index))


def _gpu(kind: str, index: int | None) -> str:
    """The architecture, and after a space what the driver calls the GPU."""
    name = torch.cuda.get_device_properties(index).name if kind == "cuda" else ""
    return f"{architecture(kind, index)} {name}"


@functools.cache
def table(arch: str) -> dict:
    """Read the table of an architecture, the user's own (OPTIMIZER_TILES), ours or a relative's; an
    unknown one has no entries.

    Read once: a later change of the variable or of the file has no effect.
    """
    if (given := own_table()) and given["arch"] == arch:
        return given
    path = TABLES / f"{RELATIVES.get(arch, arch)}.json"
    return (
        json.loads(path.read_text(encoding="utf-8"))
        if path.is_file()
        else {"measured": [], "entries": []}
    )


def own_table() -> dict | None:
    """Read the table that OPTIMIZER_TILES names; None if the variable is unset.

    Raises ValueError, with the variable and the file, for one that cannot be read or is malformed.
    """
    own = backend.tiles()
    if own is None:
        return None
    name = f"OPTIMIZER_TILES is {errors.shortened(own)}"
    try:
        given = json.loads(own.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # no JSON, no UTF-8, nested too deep
        raise ValueError(
            f"{name}, which is no JSON: {errors.shortened(error)}; tools/tune_tiles.py writes such "
            "a file, or unset the variable"
        ) from error
    check_table(given, name)
    return given


def check_table(given: dict, name: str) -> None:
    """Raise ValueError where a table is malformed or lacks something, or holds an entry that no
    kernel takes.
    """
    if fault := _malformed(given):
        raise ValueError(f"{name}: {fault}; see docs/kernels.md")
    timed = [(e.get("op"), e.get("bytes"), "us" in e) for e in given["entries"]]
    for entry in given["entries"]:
        both = (entry.get("op"), entry.get("bytes"), "us" not in entry) in timed
        if (
            fault := "us is in some entries of this op and size only"
            if both
            else _fault(entry, given["arch"])
        ):
            raise ValueError(
                f"{name}: {fault} in the entry {errors.shortened(entry)}; see docs/kernels.md"
            )


def _malformed(given):
    if not isinstance(given, dict):
        return "a table of tiles is an object of JSON"
    entries = given.get("entries", [])
    if not (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)):
        return "entries is no list of objects"
    needed = {"arch", "measured", "entries"} | (
        {"processors"} if any("us" in entry for entry in entries) else set()
    )
    if missing := needed - set(given):
        return f"a table of tiles needs {', '.join(sorted(missing))}"
    if not (isinstance(given["arch"], str) and _whole(given.get("processors", 1))):
        return "arch is no text, or processors no positive whole number"
    return None


def _whole(*numbers) -> bool:
    return all(type(x) is int and 0 < x < 1 << 31 for x in numbers)  # True is no number


def _power(*numbers) -> bool:
    return _whole(*numbers) and all(x & (x - 1) == 0 for x in numbers)


def _fault(entry, arch):
    tile, us = (
        entry.get(key) if isinstance(entry.get(key), list) else [] for key in ("tile", "us")
    )
    op, loop, warps = entry.get("op"), entry.get("loop", "pointers"), entry.get("warps")
    checks = {
        'op is none of "gram", "symmetric", "product"': op in ("gram", "symmetric", "product"),
        "bytes is neither 2 nor 4": entry.get("bytes") in (2, 4),
        "gpu is no part of a GPU's name": isinstance(entry.get("gpu", ""), str),
        "a side of the tile is no power of two from 16 on": len(tile) == 3
        and _power(*tile)
        and min(tile) >= 16,
        "loop is unknown": loop in ("pointers", "once", "turns", "flat", *SPECIALISED),
        "group, stages or resident is no positive whole number": _whole(
            entry.get("group"), entry.get("stages"), entry.get("resident", 1)
        ),
        "warps is no power of two up to 32": _power(warps) and warps <= 32,
        "there are neither four numbers `us` nor `rows` and `columns`": len(us) == 4
        and all(type(x) in (int, float) and abs(x) < 1e9 for x in us)
        or "us" not in entry
        and _whole(entry.get("rows"), entry.get("columns")),
    }
    return next((fault for fault, right in checks.items() if not right), None) or _misfit(
        entry, arch, op, loop
    )


def _misfit(entry, arch, op, loop):
    """Say what no kernel takes of an entry whose fields are right one by one."""
    (rows, columns, inner), stages = entry["tile"], entry["stages"]
    wide = loop not in ("pointers", "pingpong") and columns == 2 * rows
    tma = arch[:2] == "sm" and arch[2:].isdecimal() and int(arch[2:]) >= 90 and entry["bytes"] == 2
    likes_pingpong = (arch, rows, columns, inner, entry["warps"]) == ("sm90", 128, 128, 64, 4)
    likes_cooperative = (arch, rows, columns, inner, entry["warps"], stages) == (
        "sm90",
        128,
        256,
        64,
        4,
        3,
    )
    checks = {
        "a symmetric result needs square tiles": op == "product" or rows == columns or wide,
        "TMA needs 2 bytes and sm90 or newer": loop == "pointers" or tma,
        "pingpong is for sm90, tiles of 128 x 128 x 64, 4 warps and 3 to 5 stages": loop
        != "pingpong"
        or likes_pingpong
        and tma
        and 3 <= stages <= 5,
        "cooperative is for sm90, tiles of 128 x 256 x 64, 4 warps and 3 stages": loop
        != "cooperative"
        or likes_cooperative
        and tma,
        "the tile is too large for any GPU": rows * columns <= 1 << 16
        and stages * inner * (rows + columns) * entry["bytes"] <= MOST_SHARED,
    }
    return next((fault for fault, right in checks.items() if not right), None)


@functools.lru_cache(maxsize=4096)
def _best(
    op: str, itemsize: int, rows: int, columns: int, matrices: int, gpu: str, without=()
) -> Tile:
    """Take the entry that is expected to be fastest, or without times the one whose shape is
    nearest, in powers of two; the first of equals. gpu: an architecture, and after a space the
    name, of which an entry may want a part.
    """
    entries = [e for e in entries_of(op, itemsize, gpu) if e.get("loop") not in without]
    if not entries:
        return DEFAULT_FP32 if itemsize > 2 else DEFAULT

    def distance(entry):
        return abs(math.log2(entry["rows"] / max(rows, 1))) + abs(
            math.log2(entry["columns"] / max(columns, 1))
        )

    def time(entry):
        return expected_us(
            entry, rows, columns, matrices, table(gpu.partition(" ")[0])["processors"]
        )

    return tile_of(min(entries, key=time if all("us" in e for e in entries) else distance))


def entries_of(op: str, itemsize: int, gpu: str) -> list[dict]:
    """Return the entries for an operation and a size of elements that are for this GPU, called as
    `_gpu` does.
    """
    arch, _, name = gpu.partition(" ")
    return [
        e
        for e in table(arch)["entries"]
        if (e["op"], e["bytes"]) == (op, itemsize) and e.get("gpu", "") in name
    ]


def tile_of(entry: dict) -> Tile:
    """Return an entry's tile."""
    return Tile(
        *entry["tile"],
        entry["group"],
        entry["stages"],
        entry["warps"],
        entry.get("loop", "pointers"),
    )


def expected_us(entry: dict, rows: int, columns: int, matrices: int, processors: int) -> float:
    """Return the microseconds that a launch should take, from the four numbers of its entry that
    were fitted to measurements: per launch, per turn (the most tiles that one processor gets,
    `resident` of them at a time), per step of a turn (`inner` elements of the sum), and per step of
    an even share of all tiles.
    """
    height, width, inner = entry["tile"]
    product, down = entry["op"] == "product", -(-rows // height)
    if product:
        tiles = down * -(-columns // width)
    else:  # the lower triangle, in tiles that are `ratio` times as wide as high
        ratio = width // height
        tiles = sum(i // ratio + 1 for i in range(down))
        # Squares in pairs (tile_scheduler.py, `order_of`)
        if (entry["op"], entry.get("loop")) == ("gram", "cooperative"):
            tiles -= -(-down // 2) // 2
    turns = -(-matrices * tiles // (processors * entry.get("resident", 1)))
    if (loop := entry.get("loop")) in SPECIALISED:
        _, whole, halves = divide(matrices * tiles, processors, loop)
        early = loop == "pingpong" and whole < 2 * processors  # small tiles are faster then
        alone = whole == 0 and entry["op"] == "gram"  # but X X^T of nothing but halves is not slow
        turns -= 1 - HALF_TURN if halves and (alone or not early) else 0
    steps = -(-(rows if product else columns) // inner)
    launch, turn, turn_step, share_step = entry["us"]
    return (
        launch
        + turn * turns
        + turn_step * turns * steps
        + share_step * steps * matrices * tiles / processors
    )


def divide(tiles: int, processors: int, loop: str, wide: bool = False) -> tuple[int, int, int]:
    """Return (programs, tiles that they compute whole, halves of the other tiles): where the last
    turn would leave half of the processors idle or more, two of them share a tile, in SPECIALISED
    loops or of a product's `wide` tiles. Halves of narrower ones gain nothing where those are
    chosen (docs/log.md).
    """
    if loop not in ("turns", "flat", *SPECIALISED):
        return tiles, tiles, 0
    last = tiles % processors
    halves = 2 * last if 2 * last <= processors and (loop in SPECIALISED or wide) else 0
    whole = tiles - halves // 2
    return min(whole + halves, processors), whole, halves

"""Tile configurations of matrix products, from tables of measurements by GPU architecture.

`choose` returns the `Tile` with the least expected time for an operation and a shape. A table holds
candidate tiles with fitted times (`expected_us`), or with the shape a tile was tuned for. Tables
are the files in tables/, or the file of OPTIMIZER_TILES.

In this file a wave is the set of tiles that all multiprocessors compute at a time; persistent
kernels (loops "turns" and "flat") run one program per multiprocessor for all waves.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...params import errors
from .. import backend

TABLES = Path(__file__).with_name("tables")
# Architecture without a table -> architecture whose table is used: the matrix instructions are
# alike, and the tiles fit into shared memory
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
    """Tile of a matrix product, kernel, and resources of a program.

    `loop` names the kernel and how tiles are distributed to programs:
      "pointers"     any memory; a tile per program
      "once"         TMA (sm90 on); a tile per program
      "turns"        TMA; persistent, a program per multiprocessor
      "flat"         TMA; persistent, all tiles in a single pipelined loop
      "pingpong"     warp-specialized (sm90); two warpgroups compute alternate tiles
      "cooperative"  warp-specialized (sm90); two warpgroups compute half of each tile

    Symmetric results need square tiles. With TMA, but not with "pingpong", tiles of a symmetric
    result may also be twice as wide as high.
    """

    rows: int  # of the output, in elements
    columns: int  # of the output, in elements
    inner: int  # elements of the sum per pipeline stage
    group: int  # rows of tiles visited together, for the cache ("pointers" only)
    stages: int  # of the pipeline
    warps: int  # per program; per warpgroup in warp-specialized kernels
    loop: str = "pointers"


# Tiles for architectures without a table: fit every GPU with at least 64 KiB of shared memory
DEFAULT = Tile(64, 64, 32, 8, 3, 4)
DEFAULT_FP32 = Tile(32, 32, 32, 8, 2, 4)
# Time of a last wave of half tiles, in waves of whole tiles (docs/log.md)
HALF_TURN = 0.6
# Loops with warp specialization: producer and consumer warps. Results are stored by TMA only
SPECIALISED = "pingpong", "cooperative"
MOST_SHARED = 232448  # bytes of shared memory of a program, on the GPU with the most
_forced: Tile | None = None  # tile of `force`


def choose(
    op: str,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    device: torch.device,
    matrices: int = 1,
    without: tuple[str, ...] = (),
) -> Tile:
    """Return the tile for an operation on a batch of `matrices` matrices.

    `op`: "gram", X X^T for X (rows, columns); "symmetric", a product of (rows, rows) with a
    symmetric result; "product", (rows, rows) times (rows, columns). `without`: loops that the
    caller cannot use.
    """
    return _forced or _best(
        op, dtype.itemsize, rows, columns, matrices, _gpu(device.type, device.index), without
    )


def forced() -> Tile | None:
    """Return the tile of the innermost `force` block, None outside."""
    return _forced


@contextlib.contextmanager
def force(tile: Tile) -> Iterator[None]:
    """Use `tile` for every launch inside the `with` block, in all threads (tests and tuning)."""
    global _forced
    before, _forced = _forced, tile
    try:
        yield
    finally:
        _forced = before


@functools.cache
def architecture(kind: str, index: int | None = None) -> str:
    """Return the architecture of a device, as tables name it: sm90, gfx942, xpu.

    `kind`: type of the device; `index`: its number.
    """
    if kind != "cuda":
        return kind
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
    return "sm{}{}".format(*torch.cuda.get_device_capability(index))


def _gpu(kind: str, index: int | None) -> str:
    """Return the architecture and, after a space, the driver's name of the GPU (empty if none)."""
    name = torch.cuda.get_device_properties(index).name if kind == "cuda" else ""
    return f"{architecture(kind, index)} {name}"


@functools.cache
def table(arch: str) -> dict[str, Any]:
    """Return the table of an architecture.

    The file of OPTIMIZER_TILES if `arch` is its architecture, else the package's table of `arch`
    or of RELATIVES[arch], else a table without entries. Files are read once: a later change of the
    variable or of a file has no effect. Raises ValueError as `own_table` does.
    """
    if (given := own_table()) and given["arch"] == arch:
        return given
    path = TABLES / f"{RELATIVES.get(arch, arch)}.json"
    return (
        json.loads(path.read_text(encoding="utf-8"))
        if path.is_file()
        else {"measured": [], "entries": []}
    )


def own_table() -> dict[str, Any] | None:
    """Read the file of OPTIMIZER_TILES; None if the variable is unset.

    Raises ValueError, with the names of variable and file, if the file is unreadable or malformed.
    """
    own = backend.tile_table_path()
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


def check_table(given: Any, name: str) -> None:
    """Raise ValueError if a table is malformed, or has an entry that no kernel supports.

    `given`: the table as JSON. `name`: where it comes from, for messages. Fields of a table are
    described in docs/kernels.md.
    """
    if fault := _malformed(given):
        raise ValueError(f"{name}: {fault}; see docs/kernels.md")
    timed = [(e.get("op"), e.get("bytes"), "us" in e) for e in given["entries"]]
    for entry in given["entries"]:
        # Times compare entries: either all entries of an operation and element size have them
        both = (entry.get("op"), entry.get("bytes"), "us" not in entry) in timed
        if (
            fault := "us is in some entries of this op and size only"
            if both
            else _fault(entry, given["arch"])
        ):
            raise ValueError(
                f"{name}: {fault} in the entry {errors.shortened(entry)}; see docs/kernels.md"
            )


def _malformed(given: Any) -> str | None:
    """Return what is wrong with a table apart from its entries' fields, None if nothing is."""
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


def _whole(*numbers: object) -> bool:
    """Say whether all arguments are positive integers below 2^31."""
    return all(type(x) is int and 0 < x < 1 << 31 for x in numbers)  # True is no number


def _power(*numbers: object) -> bool:
    """Say whether all arguments are powers of two."""
    return _whole(*numbers) and all(x & (x - 1) == 0 for x in numbers)


def _fault(entry: dict[str, Any], arch: str) -> str | None:
    """Return what is wrong with an entry of a table, None if nothing is."""
    tile, us = (
        entry.get(key) if isinstance(entry.get(key), list) else [] for key in ("tile", "us")
    )
    op = entry.get("op")
    loop = entry.get("loop", "pointers")
    warps = entry.get("warps")
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


def _misfit(entry: dict[str, Any], arch: str, op: str, loop: str) -> str | None:
    """Return which combination of an entry's valid fields no kernel supports, None if all do."""
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
    op: str,
    itemsize: int,
    rows: int,
    columns: int,
    matrices: int,
    gpu: str,
    without: tuple[str, ...] = (),
) -> Tile:
    """Return the tile of the entry with the least expected time, the first of equals.

    Without times, the entry with the nearest shape: distance of the binary logarithms of rows and
    columns. Without entries, DEFAULT or DEFAULT_FP32. `itemsize`: bytes of an element. `gpu`: as
    returned by `_gpu`. The rest as in `choose`.
    """
    entries = [e for e in entries_of(op, itemsize, gpu) if e.get("loop") not in without]
    if not entries:
        return DEFAULT_FP32 if itemsize > 2 else DEFAULT

    def distance(entry: dict[str, Any]) -> float:
        return abs(math.log2(entry["rows"] / max(rows, 1))) + abs(
            math.log2(entry["columns"] / max(columns, 1))
        )

    def time(entry: dict[str, Any]) -> float:
        return expected_us(
            entry, rows, columns, matrices, table(gpu.partition(" ")[0])["processors"]
        )

    return tile_of(min(entries, key=time if all("us" in e for e in entries) else distance))


def entries_of(op: str, itemsize: int, gpu: str) -> list[dict[str, Any]]:
    """Return the table's entries for an operation, an element size in bytes and a GPU.

    `gpu`: as returned by `_gpu`. An entry with a field "gpu" is for GPUs whose name contains it.
    """
    arch, _, name = gpu.partition(" ")
    return [
        e
        for e in table(arch)["entries"]
        if (e["op"], e["bytes"]) == (op, itemsize) and e.get("gpu", "") in name
    ]


def tile_of(entry: dict[str, Any]) -> Tile:
    """Return the tile of a table's entry."""
    return Tile(
        *entry["tile"],
        entry["group"],
        entry["stages"],
        entry["warps"],
        entry.get("loop", "pointers"),
    )


def expected_us(
    entry: dict[str, Any], rows: int, columns: int, matrices: int, processors: int
) -> float:
    """Return the expected time of a launch in microseconds.

    The entry's field "us" holds four coefficients, fitted to measurements: per launch; per wave;
    per wave and step (`inner` elements of the sum); per step and tile, divided by `processors`. A
    wave has `resident` tiles per multiprocessor (1 without the field). Shape and `matrices` as in
    `choose`.
    """
    height, width, inner = entry["tile"]
    product, down = entry["op"] == "product", -(-rows // height)
    if product:
        tiles = down * -(-columns // width)
    else:  # the lower triangle, in tiles `ratio` times as wide as high
        ratio = width // height
        tiles = sum(i // ratio + 1 for i in range(down))
        # A program computes two squares on the diagonal (tile_scheduler.py, `tile_order`)
        if (entry["op"], entry.get("loop")) == ("gram", "cooperative"):
            tiles -= -(-down // 2) // 2
    waves = -(-matrices * tiles // (processors * entry.get("resident", 1)))
    if (loop := entry.get("loop")) in SPECIALISED:
        _, whole, halves = divide(matrices * tiles, processors, loop)
        # Half tiles save time in the last wave. With "pingpong" and less than two waves the gain is
        # not counted, so that smaller tiles are chosen, which are faster then; except for X X^T
        # computed in half tiles only
        few = loop == "pingpong" and whole < 2 * processors
        only_halves = whole == 0 and entry["op"] == "gram"
        waves -= 1 - HALF_TURN if halves and (only_halves or not few) else 0
    steps = -(-(rows if product else columns) // inner)
    launch, wave, wave_step, tile_step = entry["us"]
    return (
        launch
        + wave * waves
        + wave_step * waves * steps
        + tile_step * steps * matrices * tiles / processors
    )


def divide(tiles: int, processors: int, loop: str, wide: bool = False) -> tuple[int, int, int]:
    """Distribute tiles to programs: return (programs, whole tiles, half tiles).

    If the last wave would leave at least half of the multiprocessors idle, the tiles of the last
    wave are cut in halves, in SPECIALISED loops or if the tiles of a product are `wide`. Half tiles
    of narrower tiles gain nothing for the shapes that choose them (docs/log.md). Loops that are not
    persistent have a program per tile.
    """
    if loop not in ("turns", "flat", *SPECIALISED):
        return tiles, tiles, 0
    last = tiles % processors  # tiles of the last wave
    halves = 2 * last if 2 * last <= processors and (loop in SPECIALISED or wide) else 0
    whole = tiles - halves // 2
    return min(whole + halves, processors), whole, halves

"""Launch choice: how a batched product is cut into tiles.

Decides: tile, stages and warps by (operation, element size, shape, architecture), from one table per architecture in
tables/, with a conservative default. Must not know: the number of matrices in the batch. A choice that depended on it,
or on timing at run time, would give one matrix different bits on different ranks.
"""
from __future__ import annotations

import contextlib
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

TABLES = Path(__file__).with_name("tables")


@dataclass(frozen=True)
class Tile:
    """Elements of the output (rows, columns) and of the sum (inner) that a program takes at a time, and its resources.

    `loop` says which kernel, and how its programs take turns: "pointers" (any memory, a tile each); with TMA (sm90 on)
    "once" (a tile each), "turns" (a program per processor, tile after tile) or "flat" (the same as one pipelined loop).
    Symmetric results need square tiles; with TMA they may be twice as wide as high. `group` rows of tiles are visited
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


def choose(op: str, dtype: torch.dtype, rows: int, columns: int, device: torch.device) -> Tile:
    """Return the tile for `op` ("gram", "symmetric" or "product") on matrices of this shape."""
    return _forced or _nearest(op, dtype.itemsize, rows, columns, architecture(device.type, device.index))


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
    """Read the table of an architecture; an unknown one has no entries."""
    path = TABLES / f"{arch}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"measured": [], "entries": []}


@functools.cache
def _nearest(op: str, itemsize: int, rows: int, columns: int, arch: str) -> Tile:
    """Take the entry whose shape is nearest, in powers of two; the first of equals."""
    entries = [e for e in table(arch)["entries"] if e["op"] == op and e["bytes"] == itemsize]
    if not entries:
        return DEFAULT_FP32 if itemsize > 2 else DEFAULT

    def distance(entry):
        return abs(math.log2(entry["rows"] / max(rows, 1))) + abs(math.log2(entry["columns"] / max(columns, 1)))

    best = min(entries, key=distance)
    return Tile(*best["tile"], best["group"], best["stages"], best["warps"], best.get("loop", "pointers"))

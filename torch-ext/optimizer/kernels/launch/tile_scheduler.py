"""The order in which programs visit tiles."""

from __future__ import annotations

import functools

import torch

from ..backend import processors_of
from . import replay
from .tile_config import divide


def schedule_tiles(op, out, inner, tile, wide=False, paired=False):
    """(Programs, order of tiles (`tile_order`), tiles of a matrix, tiles that are computed whole,
    halves).
    """
    (N, rows, columns), symmetric = out.shape, op != "product"
    down, across, ratio = (
        -(-rows // tile.rows),
        -(-columns // tile.columns),
        tile.columns // tile.rows,
    )
    together = tile_rows_per_group(op, rows, inner, tile)
    order, count = tile_order(down, across, ratio if symmetric else 0, together, paired, out.device)
    programs, whole, halves = divide(N * count, processors_of(out.device), tile.loop, wide)
    return programs, order, count, whole, halves


def tile_rows_per_group(op, rows, inner, tile) -> int:
    """Return about how many rows of tiles are visited together. Neighbouring programs run on
    neighbouring processors, which share a way to the cache: the fewer operands they have, the
    better (docs/log.md).
    """
    if tile.columns > tile.rows and rows > 6016:  # 47 rows of tiles
        return 16
    return 4 if op != "product" and max(rows, inner) <= 4096 else 8


@functools.lru_cache(maxsize=1024)
def tile_order(down, across, ratio, together, paired, device):
    """(tile row, tile column) of every tile on the device, and their number; of a symmetric result
    those of the lower triangle, whose tiles are `ratio` times as wide as high (0: all tiles).
    Column by column of about `together` rows, as many each time.

    If `paired`, of tiles twice as wide as high: those of which only the left half is on or below
    the diagonal are taken two at a time, squares (i, i) and (k, k) as (i, -k).
    """
    parts = max(1, round(down / together))
    tiles = [(i, j) for i in range(down) for j in range(across) if not ratio or j * ratio <= i]
    tiles.sort(key=lambda tile: (tile[0] * parts // down, tile[1], tile[0]))
    if paired:
        other = dict(zip(range(0, down, 4), range(2, down, 4)))
        tiles = [
            (i, -other[i]) if i == 2 * j and i in other else (i, j)
            for i, j in tiles
            if i != 2 * j or i not in other.values()
        ]
    return replay.persistent_copy(
        torch.tensor(tiles, dtype=torch.int32, device="cpu"), device
    ), len(tiles)

"""Tile scheduler: how many programs a product has, and the order in which they visit tiles."""

from __future__ import annotations

import functools

import torch

from ..backend import processors_of
from . import replay
from .tile_config import Tile, divide


def schedule_tiles(
    op: str, out: torch.Tensor, inner: int, tile: Tile, wide: bool = False, paired: bool = False
) -> tuple[int, torch.Tensor, int, int, int]:
    """Return (programs, order, tiles of a matrix, whole tiles, half tiles) of a product.

    `op`: "gram", "symmetric" or "product". `out` (N, rows, columns): the result, a tensor or
    `ScatteredRows`. `inner`: elements of each sum. `wide`: whether the last wave's tiles may be
    halved in any persistent loop, see `divide`. `paired`, order: see `tile_order`. Whole and half
    tiles count over the batch.
    """
    N, rows, columns = out.shape
    symmetric = op != "product"
    down = -(-rows // tile.rows)
    across = -(-columns // tile.columns)
    ratio = tile.columns // tile.rows
    together = tile_rows_per_group(op, rows, inner, tile)
    order, count = tile_order(down, across, ratio if symmetric else 0, together, paired, out.device)
    programs, whole, halves = divide(N * count, processors_of(out.device), tile.loop, wide)
    return programs, order, count, whole, halves


def tile_rows_per_group(op: str, rows: int, inner: int, tile: Tile) -> int:
    """Return about how many rows of tiles are visited together.

    Programs with neighbouring numbers run on neighbouring multiprocessors, with a common path to
    the L2 cache: the fewer different operands they read at a time, the better (docs/log.md).
    """
    if tile.columns > tile.rows and rows > 6016:  # 47 rows of tiles
        return 16
    return 4 if op != "product" and max(rows, inner) <= 4096 else 8


@functools.lru_cache(maxsize=1024)
def tile_order(
    down: int, across: int, ratio: int, together: int, paired: bool, device: torch.device
) -> tuple[torch.Tensor, int]:
    """Return ((tile row, tile column) of every tile, number of tiles) of a matrix.

    The order is an int32 tensor (tiles, 2) on `device`, never written. `down`, `across`: rows and
    columns of tiles. `ratio`: 0 for all tiles; for a symmetric result the ratio of a tile's width
    to the height, and only tiles of the lower triangle are listed. Tiles are visited in groups of
    about `together` rows, groups of nearly equal size, each group column by column.

    `paired`, for tiles twice as wide as high: a tile on the diagonal with only the left half in the
    lower triangle is a square (i, i). Two squares (i, i) and (k, k) make a single entry (i, -k).
    """
    parts = max(1, round(down / together))
    tiles = [(i, j) for i in range(down) for j in range(across) if not ratio or j * ratio <= i]
    tiles.sort(key=lambda tile: (tile[0] * parts // down, tile[1], tile[0]))
    if paired:
        # Squares are the tiles (2 j, j): the squares of rows 0 and 2, 4 and 6, ... are paired
        partner = dict(zip(range(0, down, 4), range(2, down, 4)))
        tiles = [
            (i, -partner[i]) if i == 2 * j and i in partner else (i, j)
            for i, j in tiles
            if i != 2 * j or i not in partner.values()
        ]
    order = torch.tensor(tiles, dtype=torch.int32, device="cpu")
    return replay.persistent_copy(order, device), len(tiles)

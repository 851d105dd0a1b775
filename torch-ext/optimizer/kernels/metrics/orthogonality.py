"""`OrthogonalityError`: ||O O^T - I||_F / sqrt(n) of a matrix of a stack, in one launch.

Each program computes a tile of O O^T, of which nothing but the sum of squares is written. Tiles
above the diagonal are those below. The product takes n^2 m multiply-adds in half of its tiles: less
than a tenth of Newton-Schulz on the matrix, which makes about three such products in each step.

[Note: sampled tiles]
Of large matrices all tiles on the diagonal are computed, and a sample of those below it: one in
each stratum of consecutive tiles, at the place of [Note: sample of a parameter] in sample.py. A
zero row of O, or one of another norm, is seen on the diagonal.
"""

from __future__ import annotations

import math

import torch

from ..backend import use_triton
from ..elementwise.row_scattered import ScatteredRows, memory_of, rows_at
from ..launch.jit import jit, launch_key
from ..launch.precompile import in_dry_run
from ..sums.row_sample import place_of

tl = None  # Triton's language, put here by jit

TILE = 64  # rows and columns of a tile of O O^T: small matrices have as many as a GPU has cores
INNER = {2: 64, 4: 16}  # bytes of an element -> elements of a row that are loaded at a time
TILES = 256  # below the diagonal, at most; above short sides of 32768 more


class OrthogonalityError:
    """The error of one matrix, bound once: see the module."""

    def __init__(self, stack: torch.Tensor | ScatteredRows, index: int) -> None:
        """`stack`: O (N, R, C) in fp32, bf16 or fp16, at a fixed address, of which matrix `index`
        is measured.
        """
        self.stack = stack
        self.index = index
        self.n = min(stack.shape[1:])
        pairs, self.share = _pairs(-(-self.n // TILE))
        self.pairs = torch.tensor(pairs, dtype=torch.int32, device=stack.device)
        # Squares of each tile of O O^T - I: always at the same place, nothing is added up in a step
        self.sums = torch.zeros(len(pairs), dtype=torch.float32, device=stack.device)

    def measure(self) -> None:
        """Write the sums, without a wait of the host."""
        if not use_triton(self.stack.device):
            return None if in_dry_run() else self._measure_torch()
        is_table = isinstance(self.stack, ScatteredRows)
        O = memory_of(self.stack) if is_table else self.stack[self.index]
        down, across = self.stack.stride()[1:]
        R, C = self.stack.shape[1:]
        # Rows of a table are contiguous
        lines = R if across == 1 else C
        if R > C:
            down, across = across, down
        inner = INNER[self.stack.element_size()]
        even = not (self.n % TILE or max(R, C) % inner)
        strides = None if is_table else (down, across)
        arguments = self.index, self.n, max(R, C), lines, strides
        constants = is_table and lines != self.n, even, TILE, inner
        key = launch_key(O), *arguments, *constants
        _tile_kernel.launch(
            len(self.sums), key, O, self.pairs, self.sums, *arguments, *constants, num_warps=4
        )

    def _measure_torch(self) -> None:
        """Compute `measure` in torch."""
        is_table = isinstance(self.stack, ScatteredRows)
        X = (self.stack.matrix(self.index) if is_table else self.stack[self.index]).float()
        X = X.mT if X.shape[0] > X.shape[1] else X
        if self.share == 1:
            rest = X @ X.mT
            rest.diagonal().sub_(1.0)
            self.sums[0] = rest.square().sum()  # of all tiles
            return
        parts = X.split(TILE)
        for i, (row, column) in enumerate(self.pairs.tolist()):
            rest = parts[row] @ parts[column].mT
            if row == column:
                rest.diagonal().sub_(1.0)
            self.sums[i] = rest.square().sum()

    def error(self) -> torch.Tensor:
        """Return the error, fp64 on the device."""
        count = -(-self.n // TILE)
        diagonal, others = self.sums.double().split([count, len(self.sums) - count])
        # Of all tiles beside the diagonal
        scale = count * (count - 1) / max(len(others), 1)
        return ((diagonal.sum() + scale * others.sum()) / self.n).sqrt()


def _pairs(count: int) -> tuple[list[tuple[int, int]], int]:
    """Return the (row, column) of each tile that is computed, of `count` rows of tiles: those on
    the diagonal first; and of how many tiles below it one is computed.
    """
    below = [(i, j) for i in range(count) for j in range(i)]
    share = 1
    while share < 32 and len(below) > share * TILES:
        share *= 2
    some = [
        below[at]
        for stratum in range(math.ceil(len(below) / share))
        if (at := stratum * share + place_of(stratum, share)) < len(below)
    ]
    return [(i, i) for i in range(count)] + some, share


@jit
def _rows(O, matrix, lines, row, inner, strides, TURNED: tl.constexpr):
    """Return pointers to elements (row, inner) of the matrix, short side first. Arguments as for
    `_tile_kernel`.
    """
    if strides is not None:
        at = O + row[:, None].to(tl.int64) * strides[0] + inner[None, :].to(tl.int64) * strides[1]
    elif TURNED:
        at = rows_at(O, matrix, lines, inner)[None, :] + row[:, None]
    else:
        at = rows_at(O, matrix, lines, row)[:, None] + inner[None, :]
    return at


@jit
def _tile_kernel(
    O,
    pairs,
    sums,
    matrix,
    n,
    m,
    lines,
    strides,
    TURNED: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
    INNER: tl.constexpr,
):
    """Write the sum of the squares of a tile of O O^T - I, O (n, m) with the short side first.

    `O`: the matrix, with `strides` (of n, of m); or a row table of which `matrix` is the number of
    the matrix, with `lines` rows, and `strides` is None. TURNED: its rows are the long side.
    `pairs`: row and column of each program's tile. EVEN: sizes are multiples of TILE and INNER.
    """
    program = tl.program_id(0)
    first = tl.load(pairs + 2 * program) * TILE + tl.arange(0, TILE)
    second = tl.load(pairs + 2 * program + 1) * TILE + tl.arange(0, TILE)
    # Rows behind the last are the first again, and not counted
    left, right = first % n, second % n
    tile = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, m, INNER):
        inner = start + tl.arange(0, INNER)
        place = inner if EVEN else inner % m
        a = tl.load(_rows(O, matrix, lines, left, place, strides, TURNED))
        b = tl.load(_rows(O, matrix, lines, right, place, strides, TURNED))
        if not EVEN:
            a = tl.where(inner[None, :] < m, a, 0.0)
        tile = tl.dot(a, tl.trans(b), tile, input_precision="ieee")
    tile = tl.where(first[:, None] == second[None, :], tile - 1.0, tile)
    inside = (first[:, None] < n) & (second[None, :] < n)
    squares = tl.where(inside, tile * tile, 0.0)
    tl.store(sums + program, tl.sum(tl.sum(squares, axis=1), axis=0))

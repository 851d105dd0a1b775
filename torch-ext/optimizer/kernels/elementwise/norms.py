"""Norms of rows, columns, elements and whole matrices of a stack (N, R, C), for the update rules.

`normalize` and `normalize_columns`: NorMuon (arXiv 2510.05491). `divide_by_moments`: AdaMuon (arXiv
2507.11005). `equalize`: Muon+ (arXiv 2602.21545) and MuonEq (arXiv 2603.28254). A factor of rows or
matrices can be left to the weight update: then O is not written again.

Arithmetic is in fp32. The order of a sum depends on R, C and strides, so the bits of a matrix do
not depend on N, on the other matrices, or on where the matrix lies. Columns are added in two
stages, because a matrix is read along its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..backend import cpu_slices, use_triton
from ..launch.jit import jit, launch_key
from .row_scattered import (
    ALIGNMENT,
    ScatteredMatrices,
    ScatteredRows,
    matrix_at,
    memory_of,
    memory_of_matrices,
    rows_at,
    strides_of,
)

tl = None  # Triton's language, put here by jit

Groups = torch.Tensor | None  # (N,) int64: first element of the numbers of each matrix; None: 0

BETA2 = 2  # index of beta2 among the numbers of a parameter group; 1 - beta2 is the next
TILE = 4096  # elements that a program reads at a time
WIDTH = 256  # most columns of a tile that goes down columns
STEPS = 8  # tiles below each other whose squares a program adds, column by column
LONGEST = 8192  # most elements of a row that a program reads at a time
BLOCK = 1024  # sums that a program reads at a time
# Products and sums are rounded separately, as in torch
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


def normalize(
    O: torch.Tensor | ScatteredRows,
    V: torch.Tensor,
    numbers: torch.Tensor | float,
    eps: float,
    groups: Groups = None,
    factors: torch.Tensor | None = None,
) -> None:
    """Normalize the rows of O and update the second moments V, both in place.

    O (N, R, C) in fp32, bf16 or fp16; V (N, R, 1) in fp32; any strides. `numbers`: of parameter
    groups as in `rules.rule.device_scalars`, fp32 on the device, with beta2 and 1 - beta2 at
    BETA2 and BETA2 + 1; or beta2 itself. With s the mean square of a row:
    V <- beta2 V + (1 - beta2) s, Y = O / (sqrt(V) + eps), O <- Y ||O|| / ||Y||, with Frobenius
    norms of whole matrices. A matrix of zeros stays zero. Source: arXiv 2510.05491, in the
    norm-preserving form of the authors' code.

    `factors` (N, R, 1), contiguous: gets the factors of the rows, and O stays.
    """
    if O.numel() == 0:
        return
    N, R, C = O.shape
    rows = new(V, N, R, 1) if factors is None else factors
    numbers = _numbers(numbers, V.device)
    if use_triton(O.device):
        squares = new(V, N, R)
        _launch_rows(O, rows, eps, None, (V, squares, numbers, groups))
        _launch_norms(squares, rows, R)
    else:
        _row_factors_torch(O, V, numbers, eps, groups, rows)
    if factors is None:
        scale(O, rows, None)


def normalize_columns(
    O: torch.Tensor,
    V: torch.Tensor,
    numbers: torch.Tensor | float,
    eps: float,
    groups: Groups = None,
) -> None:
    """Normalize the columns of O and update the second moments V, both in place.

    As `normalize` of O.mT and V.mT, with O (N, R, C) read along rows; V (N, 1, C).
    """
    if O.numel() == 0:
        return
    N, _, C = O.shape
    columns, numbers = new(V, N, 1, C), _numbers(numbers, V.device)
    if use_triton(O.device):
        squares = new(V, N, C)
        _launch_columns(O, columns, eps, None, (V, squares, numbers, groups))
        _launch_norms(squares, columns, C)
    else:
        _row_factors_torch(O.mT, V.mT, numbers, eps, groups, columns.mT)
    scale(O, None, columns)


def divide_by_moments(
    O: torch.Tensor,
    V: torch.Tensor | ScatteredMatrices,
    numbers: torch.Tensor,
    eps: float,
    groups: Groups = None,
    factors: torch.Tensor | None = None,
) -> None:
    """Divide O (N, R, C) by the roots of its elements' second moments V, in place, to an RMS of 1.

    V <- beta2 V + (1 - beta2) O^2, A = O / (sqrt(V) + eps), O <- A sqrt(R C) / ||A||; a matrix of
    zeros stays zero. O and V (N, R, C) contiguous, V in fp32, updated in place. `numbers`,
    `groups`: as for `normalize`.

    `factors` (N, 1, 1), contiguous: gets sqrt(R C) / ||A||, and O becomes A.
    """
    if O.numel() == 0:
        return
    N, R, C = O.shape
    found = factors if factors is not None else O.new_empty((N, 1, 1), dtype=torch.float32)
    if use_triton(O.device):
        size, tiles = R * C, -(-R * C // TILE)
        sums = new(found, N, tiles)
        memory, table, aligned = memory_of_matrices(V)
        key = TILE, table, aligned, groups is None, launch_key(O, memory)
        arguments = O, memory, sums, size, tiles, numbers, groups, float(eps), table, aligned, TILE
        _element_moments_kernel.launch(N * tiles, key, *arguments, **OPTIONS)
        key = "root", BLOCK, tiles, launch_key(found)
        _roots_kernel.launch(N, key, sums, found, tiles, math.sqrt(size), BLOCK, **OPTIONS)
    else:
        for i, (o, v) in enumerate(zip(O.unbind(), V.unbind())):
            beta2, rest = (number_of(numbers, at, groups, i) for at in (BETA2, BETA2 + 1))
            wide = o.float()
            v.mul_(beta2).add_(wide.square().mul(rest))
            a = torch.where(v == 0, 0.0, wide / v.sqrt().add_(eps))
            square = a.square().sum(dim=1).sum()
            o.copy_(a)
            found[i] = torch.where(square > 0, R * C / square, square).sqrt()
    if factors is None:
        scale(O, found.expand(-1, R, 1), None)


def equalize(
    X: torch.Tensor, order: Sequence[str], eps: float, powers: torch.Tensor | None = None
) -> None:
    """Divide rows or columns of X (N, R, C) by their norms, in place. `order`: "row", "column", or
    both, one after the other.

    A norm is sqrt(sum of squares + eps). `powers` (N, 1, 1) in fp32: X counts as multiplied by
    them, so that squares do not overflow, and then as divided by its Frobenius norm. A matrix of
    zeros stays zero. X in fp32, bf16 or fp16, any strides.
    """
    if X.numel() == 0 or not order:
        return
    N, R, C = X.shape
    size = rows = columns = None
    if powers is not None:
        columns, rows = powers.expand(-1, 1, C).contiguous(), powers.expand(-1, R, 1).contiguous()
        size = total(squares(X, "row", columns))
    first, *second = order
    if first == "row":
        if powers is None and not second:
            return _divide_rows(X, None, eps)
        rows = _times(_inverse_norms(X, "row", eps, columns, size), rows)
        columns = _inverse_norms(X, "column", eps, rows) if second else None
    else:
        columns = _times(_inverse_norms(X, "column", eps, rows, size), columns)
        if second:
            return _divide_rows(X, columns, eps)
        rows = None
    scale(X, rows, columns)


def squares(X: torch.Tensor, per: str, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sums of squares of each "row" (N, R, 1) or "column" (N, 1, C) of X (N, R, C), in
    fp32.

    `factors`: multiplied to the elements before, (N, 1, C) for rows, (N, R, 1) for columns;
    contiguous.
    """
    N, R, C = X.shape
    shape = (N, R, 1) if per == "row" else (N, 1, C)
    if X.numel() == 0:
        return torch.zeros(shape, dtype=torch.float32, device=X.device)
    if use_triton(X.device):
        out = torch.empty(shape, dtype=torch.float32, device=X.device)
        (_launch_rows if per == "row" else _launch_columns)(X, out, None, factors)
        return out
    parts = []
    for i, matrix in enumerate(X.unbind()):
        wide = matrix.float() if factors is None else matrix.float() * factors[i]
        parts.append(wide.square().sum(1 if per == "row" else 0, keepdim=True))
    return torch.stack(parts)


def total(numbers: torch.Tensor) -> torch.Tensor:
    """Return the sum over each matrix of `squares`, (N, 1, 1) in fp32."""
    N, count = numbers.shape[0], numbers[0].numel() if len(numbers) else 0
    out = torch.zeros((N, 1, 1), dtype=torch.float32, device=numbers.device)
    if not numbers.numel():
        return out
    if not use_triton(numbers.device):
        return torch.stack([part.sum() for part in numbers.unbind()]).view(N, 1, 1)
    numbers = numbers.contiguous()
    key = "sum", BLOCK, count, launch_key(numbers)
    _roots_kernel.launch(N, key, numbers, out, count, None, BLOCK, **OPTIONS)
    return out


def scale(
    X: torch.Tensor | ScatteredRows, rows: torch.Tensor | None, columns: torch.Tensor | None
) -> None:
    """Multiply X (N, R, C) by factors of its rows (N, R, 1) and columns (N, 1, C), fp32; in place,
    rounded once. None: 1.
    """
    if X.numel() == 0:
        return
    if not use_triton(X.device):
        for some in cpu_slices(X):
            wide = X[some].float()
            for factors in (rows, columns):
                wide = wide if factors is None else wide * factors[some]
            X[some].copy_(wide)
        return
    N, R, C = X.shape
    rows, columns = (None if t is None else t.contiguous() for t in (rows, columns))
    down, across = _tile_of(C)
    key = down, across, rows is None, columns is None, _key(X, rows, columns)
    arguments = memory_of(X), rows, columns, R, C, strides_of(X), _is_aligned(X), down, across
    _scale_kernel.launch(N * -(-R // down) * -(-C // across), key, *arguments, **OPTIONS)


def _numbers(numbers: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """Return the numbers of a group as a tensor. `numbers`: such a tensor, or beta2 alone."""
    if isinstance(numbers, torch.Tensor):
        return numbers
    values = [0.0] * BETA2 + [numbers, 1.0 - numbers]
    return torch.tensor(values, dtype=torch.float32, device=device)


def number_of(numbers: torch.Tensor, at: int, groups: Groups, i: int) -> torch.Tensor:
    """Return number `at` of the group of matrix i, without a copy to the host."""
    return numbers[at] if groups is None else numbers[groups[i] + at]


def new(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return new fp32 memory on the device of a tensor."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _tile_of(C: int) -> tuple[int, int]:
    """Return (rows, columns) of a tile of matrices with C columns."""
    columns = min(WIDTH, _power_of_two(C))
    return max(1, TILE // columns), columns


def _is_aligned(X: torch.Tensor | ScatteredRows) -> bool:
    """Say whether every row begins at a multiple of ALIGNMENT, always so in `ScatteredRows`. A
    kernel adds the elements of aligned rows in another order.
    """
    if isinstance(X, ScatteredRows):
        return True
    places = X.data_ptr(), *(stride * X.element_size() for stride in X.stride()[:2])
    return X.stride(2) == 1 and not any(place % ALIGNMENT for place in places)


def _key(X: torch.Tensor | ScatteredRows, *others: torch.Tensor | None) -> tuple:
    """Return the part of a launch key for a stack that `rows_at` may read, and further tensors."""
    given = [t for t in others if t is not None]
    return isinstance(X, ScatteredRows), _is_aligned(X), launch_key(X, *given)


def _launch_rows(
    X: torch.Tensor | ScatteredRows,
    out: torch.Tensor | None,
    eps: float | None,
    columns: torch.Tensor | None,
    moments: tuple | None = None,
) -> None:
    """Launch `_rows_kernel`. `moments`: (V, squares, numbers, groups) or None."""
    N, R, C = X.shape
    width = min(LONGEST, _power_of_two(C))
    rows = max(1, TILE // width)
    V, *others = moments or (None, None, None, None)
    v_strides = None if V is None else V.stride()[:2]
    eps = None if eps is None else float(eps)
    absent = [t is None for t in (columns, out, V, others[2], eps)]
    key = rows, width, *absent, _key(X, columns, out, V)
    memory, strides, aligned = memory_of(X), strides_of(X), _is_aligned(X)
    arguments = memory, columns, out, V, *others, R, C, strides, v_strides, eps, aligned
    _rows_kernel.launch(N * -(-R // rows), key, *arguments, rows, width, **OPTIONS)


def _launch_columns(
    X: torch.Tensor,
    out: torch.Tensor,
    eps: float | None,
    rows: torch.Tensor | None,
    moments: tuple | None = None,
) -> None:
    """Launch `_column_sums_kernel` and `_columns_kernel`. `moments`: as for `_launch_rows`."""
    N, R, C = X.shape
    down, across = _tile_of(C)
    parts = -(-R // (down * STEPS))
    sums = new(out, N, parts, C)
    blocks = N * -(-C // across)
    key = down, across, STEPS, rows is None, _key(X, rows)
    arguments = memory_of(X), rows, sums, R, C, strides_of(X), parts, _is_aligned(X)
    _column_sums_kernel.launch(blocks * parts, key, *arguments, down, across, STEPS, **OPTIONS)
    V, *others = moments or (None, None, None, None)
    v_strides = None if V is None else (V.stride(0), V.stride(2))
    eps = None if eps is None else float(eps)
    absent = [t is None for t in (V, others[2], eps)]
    key = across, parts, *absent, _key(X, out, V)
    arguments = sums, out, V, *others, parts, R, C, v_strides, eps, across
    _columns_kernel.launch(blocks, key, *arguments, **OPTIONS)


def _launch_norms(squares: torch.Tensor, weights: torch.Tensor, lines: int) -> None:
    """Launch `_norms_kernel`."""
    key = BLOCK, lines, launch_key(squares, weights)
    _norms_kernel.launch(len(squares), key, squares, weights, lines, BLOCK, **OPTIONS)


def _divide_rows(X: torch.Tensor, columns: torch.Tensor | None, eps: float) -> None:
    """Multiply columns of X by `columns` (N, 1, C), and divide rows by their norms, in one pass."""
    if use_triton(X.device):
        return _launch_rows(X, None, eps, columns)
    scale(X, _inverse_norms(X, "row", eps, columns), columns)


def _inverse_norms(
    X: torch.Tensor,
    per: str,
    eps: float,
    factors: torch.Tensor | None = None,
    size: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return 1 / sqrt(square + eps) of `squares`, 1 for 0. `size` (N, 1, 1): factor of eps."""
    if size is None and use_triton(X.device):
        out = new(X, *((len(X), X.shape[1], 1) if per == "row" else (len(X), 1, X.shape[2])))
        (_launch_rows if per == "row" else _launch_columns)(X, out, eps, factors)
        return out
    square = squares(X, per, factors) + (eps if size is None else eps * size)
    return square.masked_fill_(square == 0, 1.0).sqrt_().reciprocal_()


def _times(factors: torch.Tensor, others: torch.Tensor | None) -> torch.Tensor:
    """Return the product of factors; None: 1."""
    return factors if others is None else factors * others


def _row_factors_torch(
    O: torch.Tensor | ScatteredRows,
    V: torch.Tensor,
    numbers: torch.Tensor,
    eps: float,
    groups: Groups,
    factors: torch.Tensor,
) -> None:
    """Update V and write `factors` of `normalize` in torch.

    Sums are computed matrix by matrix: the order of a sum, hence the bits, must not depend on the
    batch.
    """
    for some in cpu_slices(O):
        wide, v = O[some].float(), V[some]
        square = torch.stack(
            [matrix.mean(dim=1, keepdim=True) for matrix in wide.square().unbind()]
        )
        beta2, rest = numbers[BETA2], numbers[BETA2 + 1]
        if groups is not None:
            at = groups[some].view(-1, 1, 1) + BETA2
            beta2, rest = numbers[at], numbers[at + 1]
        v.mul_(beta2).add_(square.mul(rest))
        w = v.sqrt().add_(eps).reciprocal_().masked_fill_(v == 0, 0.0)
        sums = [
            torch.stack([matrix.sum() for matrix in x.unbind()])
            for x in (square, square.mul(w).mul(w))
        ]
        before, after = (x.view(-1, 1, 1) for x in sums)
        factors[some] = w * torch.where(after > 0, before / after, after).sqrt()


@jit
def _weight(v, eps):
    """Return 1 / (sqrt(v) + eps); 0 if v is 0, for a row that has always been zero."""
    return tl.where(v == 0, 0.0, 1.0 / (tl.sqrt(v) + eps))


@jit
def inverse(square):
    """Return 1 / sqrt(square); 1 for 0."""
    return 1.0 / tl.sqrt(tl.where(square == 0, 1.0, square))


@jit
def _from_the_end():
    """Return the number of a program, counted from the end: the kernel before has read the end
    last, which may still be in the cache.
    """
    return tl.num_programs(0) - 1 - tl.program_id(0)


@jit
def _starts_of_rows(X, matrix, R, row, strides, ALIGNED: tl.constexpr):
    """Return pointers to the first elements of rows of a matrix. `strides`: None for a row table,
    see `rows_at`.
    """
    if strides is None:
        start = rows_at(X, matrix, R, row, row < R)
    else:
        start = X + matrix * strides[0] + row.to(tl.int64) * strides[1]
        if ALIGNED:
            start = tl.multiple_of(start, 16)
    return start


@jit
def _places(start, column, strides):
    """Return pointers to elements (row, column) of rows that begin at `start`."""
    column = column.to(tl.int64)[None, :]
    return start[:, None] + (column if strides is None else column * strides[2])


@jit
def _finish(square, count, V, v_at, squares, out, at, inside, matrix, numbers, groups, eps):
    """Write what lines (rows or columns) make of their sums of squares to `out`: without V and eps
    the sums; without V 1 / sqrt(sum + eps); with V, which is updated, 1 / (sqrt(V) + eps), and mean
    squares to `squares`. `at`, `v_at`: places of the lines.
    """
    if V is not None:
        square = square / count
        number = numbers + 2  # BETA2
        if groups is not None:
            number += tl.load(groups + matrix)
        old = tl.load(V + v_at, mask=inside, other=0.0)
        v = tl.load(number) * old + tl.load(number + 1) * square
        tl.store(V + v_at, v, mask=inside)
        tl.store(squares + at, square, mask=inside)
        tl.store(out + at, _weight(v, eps), mask=inside)
    elif eps is not None:
        tl.store(out + at, inverse(square + eps), mask=inside)
    else:
        tl.store(out + at, square, mask=inside)


@jit
def _rows_kernel(
    X,
    columns,
    out,
    V,
    squares,
    numbers,
    groups,
    R,
    C,
    strides,
    v_strides,
    eps,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add the squares of ROWS rows, with columns multiplied by `columns` (N, C), None: 1. Write
    what `_finish` makes of the sums to `out` (N, R) or, if `out` is None, divide X by
    sqrt(sum + eps) in place.
    """
    program = _from_the_end()
    across = tl.cdiv(R, ROWS)
    matrix = (program // across).to(tl.int64)
    row = (program % across) * ROWS + tl.arange(0, ROWS)
    start = _starts_of_rows(X, matrix, R, row, strides, ALIGNED)
    # The first part stays in registers
    at, inside, x = _part_of_rows(start, columns, matrix, row, R, C, 0, strides, WIDTH)
    sums = x * x
    for first in range(WIDTH, C, WIDTH):
        _, _, y = _part_of_rows(start, columns, matrix, row, R, C, first, strides, WIDTH)
        sums += y * y
    square = tl.sum(sums, axis=1)
    if out is not None:
        place = matrix * R + row
        v_at = 0 if V is None else matrix * v_strides[0] + row.to(tl.int64) * v_strides[1]
        _finish(square, C, V, v_at, squares, out, place, row < R, matrix, numbers, groups, eps)
    else:
        factor = inverse(square + eps)[:, None]
        tl.store(at, (x * factor).to(X.dtype.element_ty), mask=inside)
        for first in range(WIDTH, C, WIDTH):
            at, inside, y = _part_of_rows(start, columns, matrix, row, R, C, first, strides, WIDTH)
            tl.store(at, (y * factor).to(X.dtype.element_ty), mask=inside)


@jit
def _part_of_rows(start, columns, matrix, row, R, C, first, strides, WIDTH: tl.constexpr):
    """Return (pointers, mask, elements in fp32 times `columns`) of WIDTH columns of rows."""
    column = first + tl.arange(0, WIDTH)
    inside = (row < R)[:, None] & (column < C)[None, :]
    at = _places(start, column, strides)
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if columns is not None:
        x *= tl.load(columns + matrix * C + column, mask=column < C, other=0.0)[None, :]
    return at, inside, x


@jit
def _column_sums_kernel(
    X,
    rows,
    sums,
    R,
    C,
    strides,
    parts,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Write sums of squares of columns over ROWS * STEPS rows to `sums` (N, parts, C).

    `rows` (N, R): factors of rows; None: 1.
    """
    program = tl.program_id(0)
    across = tl.cdiv(C, COLUMNS)
    matrix = (program // (parts * across)).to(tl.int64)
    part = (program // across) % parts
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    # Unrolled: many loads are in flight
    for number in tl.static_range(STEPS):
        row = (part * STEPS + number) * ROWS + tl.arange(0, ROWS)
        inside = (row < R)[:, None] & (column < C)[None, :]
        start = _starts_of_rows(X, matrix, R, row, strides, ALIGNED)
        x = tl.load(_places(start, column, strides), mask=inside, other=0.0).to(tl.float32)
        if rows is not None:
            x *= tl.load(rows + matrix * R + row, mask=row < R, other=0.0)[:, None]
        total += x * x
    tl.store(sums + (matrix * parts + part) * C + column, tl.sum(total, axis=0), mask=column < C)


@jit
def _columns_kernel(
    sums, out, V, squares, numbers, groups, parts, R, C, v_strides, eps, BLOCK: tl.constexpr
):
    """Add the parts of `sums` (N, parts, C), and write what `_finish` makes of them to `out`
    (N, C).
    """
    across = tl.cdiv(C, BLOCK)
    matrix = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    inside = column < C
    square = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(parts):
        square += tl.load(sums + (matrix * parts + part) * C + column, mask=inside, other=0.0)
    v_at = 0 if V is None else matrix * v_strides[0] + column.to(tl.int64) * v_strides[1]
    at = matrix * C + column
    _finish(square, R, V, v_at, squares, out, at, inside, matrix, numbers, groups, eps)


@jit
def _norms_kernel(squares, weights, lines, BLOCK: tl.constexpr):
    """Multiply `weights` (N, lines) by ||O|| / ||Y||, Y with lines multiplied by `weights`; a
    program per matrix. `squares` (N, lines): mean squares of the lines of O.
    """
    start = tl.program_id(0).to(tl.int64) * lines
    before = tl.zeros((BLOCK,), dtype=tl.float32)
    after = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, lines, BLOCK):
        line = first + tl.arange(0, BLOCK)
        square = tl.load(squares + start + line, mask=line < lines, other=0.0)
        w = tl.load(weights + start + line, mask=line < lines, other=0.0)
        before += square
        after += square * w * w
    total = tl.sum(after)
    factor = tl.sqrt(tl.sum(before) / tl.where(total > 0, total, 1.0))
    factor = tl.where(total > 0, factor, total)
    for first in range(0, lines, BLOCK):
        line = first + tl.arange(0, BLOCK)
        at = weights + start + line
        tl.store(at, tl.load(at, mask=line < lines, other=0.0) * factor, mask=line < lines)


@jit
def _scale_kernel(
    X,
    rows,
    columns,
    R,
    C,
    strides,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute `scale`; a program per tile."""
    program = _from_the_end()
    across, down = tl.cdiv(C, COLUMNS), tl.cdiv(R, ROWS)
    matrix = (program // (down * across)).to(tl.int64)
    row = (program // across) % down * ROWS + tl.arange(0, ROWS)
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < R)[:, None] & (column < C)[None, :]
    at = _places(_starts_of_rows(X, matrix, R, row, strides, ALIGNED), column, strides)
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if rows is not None:
        x *= tl.load(rows + matrix * R + row, mask=row < R, other=0.0)[:, None]
    if columns is not None:
        x *= tl.load(columns + matrix * C + column, mask=column < C, other=0.0)[None, :]
    tl.store(at, x.to(X.dtype.element_ty), mask=inside)


@jit
def total_of(sums, count, BLOCK: tl.constexpr):
    """Return the sum of `count` numbers."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, count, BLOCK):
        number = first + tl.arange(0, BLOCK)
        total += tl.load(sums + number, mask=number < count, other=0.0)
    return tl.sum(total)


@jit
def _roots_kernel(sums, out, count, root, BLOCK: tl.constexpr):
    """Write the sum of the `count` numbers of a matrix to `out` (N,); with `root`, root over the
    square root of the sum, 0 for 0.
    """
    matrix = tl.program_id(0).to(tl.int64)
    found = total_of(sums + matrix * count, count, BLOCK)
    if root is not None:
        found = tl.where(found > 0, root * inverse(found), found)
    tl.store(out + matrix, found)


@jit
def _element_moments_kernel(
    O,
    V,
    sums,
    size,
    tiles,
    numbers,
    groups,
    eps,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Update V, write A over O, and sums of A^2 over tiles to `sums` (N, tiles). `size`: R C."""
    matrix, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    place = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < size
    o_at = O + matrix * size + place
    v_at = matrix_at(V, matrix, size, TABLE, ALIGNED) + place
    o = tl.load(o_at, mask=inside, other=0.0).to(tl.float32)
    number = numbers + 2  # BETA2
    if groups is not None:
        number += tl.load(groups + matrix)
    v = tl.load(number) * tl.load(v_at, mask=inside, other=0.0) + tl.load(number + 1) * (o * o)
    tl.store(v_at, v, mask=inside)
    a = tl.where(v == 0, 0.0, o / (tl.sqrt(v) + eps))
    tl.store(o_at, a.to(O.dtype.element_ty), mask=inside)
    tl.store(sums + matrix * tiles + tile, tl.sum(a * a))

"""Norms of rows, columns and whole matrices of a stack, and updates that divide by them.

`normalize` is NorMuon's row normalization (arXiv 2510.05491): moments of rows, a factor per matrix,
normalization of rows. `divide_by_moments` is AdaMuon's by elements (arXiv 2507.11005). `squares`,
`total` and `scale` serve rules that divide rows and columns by their norms. All read each matrix
twice or three times, in fp32, and the bits of a matrix do not depend on the others of its stack.
"""

from __future__ import annotations

import torch

from ..backend import cpu_slices, use_triton
from ..launch.jit import jit, launch_key
from .row_scattered import ScatteredRows, memory_of, rows_at, strides_of

tl = None  # Triton's language, put here by jit

BETA2 = 2  # index of beta2 among the numbers of a parameter group; 1 - beta2 is the next
BLOCK = 1024  # elements of a row, or rows of a matrix, that a program reads at a time
ROWS, COLUMNS = 32, 64  # of the tile by which a program goes down columns


def normalize(
    O: torch.Tensor | ScatteredRows,
    V: torch.Tensor,
    numbers: torch.Tensor | float,
    eps: float,
    groups: torch.Tensor | None = None,
) -> None:
    """Normalize the rows of O and update the second moments V, both in place.

    O (N, R, C) in fp32, bf16 or fp16; V (N, R, 1) in fp32; any strides. `numbers`: of parameter
    groups as in `rules.rule.device_scalars`, fp32 on the device, with beta2 and 1 - beta2 at
    BETA2 and BETA2 + 1; or beta2 itself. `groups`: (N,) int64, first element of the numbers of each
    matrix; None: 0. With s the mean square of a
    row: V <- beta2 V + (1 - beta2) s, Y = O / (sqrt(V) + eps), O <- Y ||O|| / ||Y||, with Frobenius
    norms of whole matrices. A matrix of zeros stays zero. Source: arXiv 2510.05491, in the
    norm-preserving form of the authors' code.
    """
    if O.numel() == 0:
        return
    if not isinstance(numbers, torch.Tensor):
        numbers = torch.tensor([0.0] * BETA2 + [numbers, 1.0 - numbers], device=V.device)
    if not use_triton(O.device):
        return normalize_torch(O, V, numbers, eps, groups)
    eps = float(eps)  # an integer would have a binary of its own
    N, R, C = O.shape
    squares = torch.empty((2, N, R), dtype=torch.float32, device=O.device)
    factors = torch.empty(N, dtype=torch.float32, device=O.device)
    memory, strides = memory_of(O), strides_of(O)
    key = BLOCK, launch_key(O, V)
    grouped = groups is not None
    _moments_kernel.launch(
        N * R,
        (*key, grouped),
        memory,
        V,
        squares,
        N * R,
        R,
        C,
        strides,
        V.stride(),
        numbers,
        groups if grouped else squares,  # a placeholder, never read
        eps,
        grouped,
        BLOCK,
    )
    _norms_kernel.launch(N, key, squares, factors, N * R, R, BLOCK)
    _normalize_kernel.launch(N * R, key, memory, V, factors, R, C, strides, V.stride(), eps, BLOCK)


def normalize_torch(
    O: torch.Tensor | ScatteredRows,
    V: torch.Tensor,
    numbers: torch.Tensor,
    eps: float,
    groups: torch.Tensor | None = None,
) -> None:
    """Compute `normalize` in torch.

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
        factor = torch.where(after > 0, before / after, after).sqrt()
        O[some].copy_(wide * (w * factor))


def squares(X: torch.Tensor, per: str, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sums of squares of each "row" (N, R, 1) or "column" (N, 1, C) of X (N, R, C), in
    fp32.

    `factors`: multiplied to the elements before, (N, 1, C) for rows, (N, R, 1) for columns.
    """
    N, R, C = X.shape
    shape = (N, R, 1) if per == "row" else (N, 1, C)
    if X.numel() == 0:
        return torch.zeros(shape, dtype=torch.float32, device=X.device)
    if not use_triton(X.device):
        dim = 1 if per == "row" else 0
        parts = []
        for i, matrix in enumerate(X.unbind()):
            wide = matrix.float() if factors is None else matrix.float() * factors[i]
            parts.append(wide.square().sum(dim, keepdim=True))
        return torch.stack(parts)
    out = torch.empty(shape, dtype=torch.float32, device=X.device)
    has_factors = factors is not None
    given = factors.contiguous() if has_factors else out  # a placeholder, never read
    key = per, has_factors, launch_key(X, given)
    if per == "row":
        _row_squares_kernel.launch(N * R, key, X, given, out, R, C, X.stride(), has_factors, BLOCK)
    else:
        blocks = -(-C // COLUMNS)
        _column_squares_kernel.launch(
            N * blocks, key, X, given, out, R, C, blocks, X.stride(), has_factors, ROWS, COLUMNS
        )
    return out


def absolute_sums(X: torch.Tensor, per: str) -> torch.Tensor:
    """Return the sums of absolute values of each "row" (N, R, 1) or "column" (N, 1, C) of X
    (N, R, C), in fp32.

    The bits of a row, or of a column, do not depend on the others of its matrix: X may be the rows,
    or the columns, of a shard. X is contiguous, at a multiple of 16 bytes.
    """
    N, R, C = X.shape
    dim = 2 if per == "row" else 1
    if X.numel() == 0 or not use_triton(X.device):
        parts = X.abs().float()
    elif per == "row":
        out = torch.empty((N, R, 1), dtype=torch.float32, device=X.device)
        _row_absolutes_kernel.launch(N * R, (C, launch_key(X)), X, out, C, BLOCK)
        return out
    else:
        # Lanes of the tile are stored, not added: their order in `tl.sum` depends on the layout
        # that the compiler gives to the tile, and that on C
        parts = torch.empty((N, ROWS, C), dtype=torch.float32, device=X.device)
        blocks = -(-C // COLUMNS)
        key = R, C, launch_key(X)
        _column_absolutes_kernel.launch(N * blocks, key, X, parts, R, C, blocks, ROWS, COLUMNS)
    return _added(parts, dim)


def _added(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the sums along `dim`, kept with size 1: elementwise sums of halves, whose order
    depends on the size of `dim` alone.
    """
    while (count := parts.shape[dim]) > 1:
        half = count // 2
        low = parts.narrow(dim, 0, half) + parts.narrow(dim, half, half)
        parts = torch.cat((low, parts.narrow(dim, count - 1, 1)), dim) if count % 2 else low
    return parts if parts.shape[dim] else parts.sum(dim, keepdim=True)


def total(numbers: torch.Tensor) -> torch.Tensor:
    """Return the sum over each matrix of `squares`, (N, 1, 1) in fp32."""
    N, count = numbers.shape[0], numbers[0].numel() if len(numbers) else 0
    out = torch.zeros((N, 1, 1), dtype=torch.float32, device=numbers.device)
    if not numbers.numel():
        return out
    if not use_triton(numbers.device):
        return torch.stack([part.sum() for part in numbers.unbind()]).view(N, 1, 1)
    numbers = numbers.contiguous()
    _total_kernel.launch(N, (count, launch_key(numbers)), numbers, out, count, BLOCK)
    return out


def scale(X: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Multiply X (N, R, C) by factors of its rows (N, R, 1) and columns (N, 1, C), fp32; in place,
    rounded once.
    """
    if X.numel() == 0:
        return
    if not use_triton(X.device):
        X.copy_(X.float() * rows * columns)
        return
    N, R, C = X.shape
    rows, columns = rows.contiguous(), columns.contiguous()
    key = BLOCK, launch_key(X, rows, columns)
    _scale_kernel.launch(N * R, key, X, rows, columns, R, C, X.stride(), BLOCK)


def difference_squares(W: torch.Tensor, O: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the sums of squares of each row of W - factor O, (N, R, 1) in fp32.

    W (N, R, C) in fp32, O (N, R, C), `factors` (N, 1, 1) in fp32.
    """
    N, R, C = O.shape
    if O.numel() == 0:
        return torch.zeros((N, R, 1), dtype=torch.float32, device=O.device)
    if not use_triton(O.device):
        parts = [w - f * o.float() for w, o, f in zip(W.unbind(), O.unbind(), factors.unbind())]
        return torch.stack([part.square().sum(1, keepdim=True) for part in parts])
    out = torch.empty((N, R, 1), dtype=torch.float32, device=O.device)
    factors = factors.contiguous()
    key = BLOCK, launch_key(W, O, factors)
    _difference_kernel.launch(N * R, key, W, O, factors, out, R, C, W.stride(), O.stride(), BLOCK)
    return out


def divide_by_moments(
    O: torch.Tensor,
    V: torch.Tensor,
    numbers: torch.Tensor,
    eps: float,
    groups: torch.Tensor | None = None,
) -> None:
    """Divide O (N, R, C) by the roots of its elements' second moments V, in place, to an RMS of 1.

    V <- beta2 V + (1 - beta2) O^2, A = O / (sqrt(V) + eps), O <- A sqrt(R C) / ||A||; a matrix of
    zeros stays zero. V (N, R, C) in fp32, updated in place. `numbers`, `groups`: as for
    `normalize`.
    """
    if O.numel() == 0:
        return
    N, R, C = O.shape
    if not use_triton(O.device):
        at = torch.zeros(N, dtype=torch.int64) if groups is None else groups
        for o, v, start in zip(O.unbind(), V.unbind(), at.tolist()):
            wide = o.float()
            v.mul_(numbers[start + BETA2]).add_(wide.square().mul(numbers[start + BETA2 + 1]))
            a = wide / v.sqrt().add_(eps)
            square = a.square().sum(dim=1).sum()
            o.copy_(a * torch.where(square > 0, R * C / square, square).sqrt())
        return
    eps = float(eps)
    sums = torch.empty((N, R, 1), dtype=torch.float32, device=O.device)
    key = BLOCK, launch_key(O, V)
    grouped = groups is not None
    _element_moments_kernel.launch(
        N * R,
        (*key, grouped),
        O,
        V,
        sums,
        R,
        C,
        O.stride(),
        V.stride(),
        numbers,
        groups if grouped else sums,  # a placeholder, never read
        eps,
        grouped,
        BLOCK,
    )
    square = total(sums)
    factors = torch.where(square > 0, R * C / square, square).sqrt()
    _divide_kernel.launch(N * R, key, O, V, factors, R, C, O.stride(), V.stride(), eps, BLOCK)


@jit
def _weight(v, eps):
    """Return 1 / (sqrt(v) + eps); 0 if v is 0, for a row that has always been zero."""
    return tl.where(v == 0, 0.0, 1.0 / (tl.sqrt(v) + eps))


@jit
def _moments_kernel(
    O,
    V,
    squares,
    numel,
    R,
    C,
    o_strides,
    v_strides,
    numbers,
    groups,
    eps,
    GROUPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update V and write mean squares of rows; a program per row.

    `squares` (2, N, R): mean square of the row before and after division by sqrt(V) + eps. `numel`:
    N R. `numbers`, `groups`: as for `normalize`; `groups` is read if GROUPED only. `o_strides`:
    None if O is a row table, see `rows_at`.
    """
    program = tl.program_id(0).to(tl.int64)
    matrix, row = program // R, program % R
    if o_strides is None:
        start, step = rows_at(O, matrix, R, row), 1
    else:
        start, step = O + matrix * o_strides[0] + row * o_strides[1], o_strides[2]
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, C, BLOCK):
        column = first + tl.arange(0, BLOCK)
        o = tl.load(start + column.to(tl.int64) * step, mask=column < C, other=0.0).to(tl.float32)
        sums += o * o
    square = tl.sum(sums) / C
    v_at = V + matrix * v_strides[0] + row * v_strides[1]
    at = numbers + 2  # BETA2
    if GROUPED:
        at += tl.load(groups + matrix)
    v = tl.load(at) * tl.load(v_at) + tl.load(at + 1) * square
    tl.store(v_at, v)
    w = _weight(v, eps)
    tl.store(squares + program, square)
    tl.store(squares + numel + program, square * w * w)


@jit
def _norms_kernel(squares, factors, numel, R, BLOCK: tl.constexpr):
    """Write the factor ||O|| / ||Y|| of each matrix to `factors` (N,); a program per matrix."""
    matrix = tl.program_id(0).to(tl.int64)
    before = tl.zeros((BLOCK,), dtype=tl.float32)
    after = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, R, BLOCK):
        row = first + tl.arange(0, BLOCK)
        before += tl.load(squares + matrix * R + row, mask=row < R, other=0.0)
        after += tl.load(squares + numel + matrix * R + row, mask=row < R, other=0.0)
    total = tl.sum(after)
    factor = tl.sqrt(tl.sum(before) / tl.where(total > 0, total, 1.0))
    tl.store(factors + matrix, tl.where(total > 0, factor, total))


@jit
def _normalize_kernel(O, V, factors, R, C, o_strides, v_strides, eps, BLOCK: tl.constexpr):
    """Multiply a row of O by its weight and the matrix' factor, in place; a program per row."""
    program = tl.program_id(0).to(tl.int64)
    matrix, row = program // R, program % R
    v = tl.load(V + matrix * v_strides[0] + row * v_strides[1])
    factor = _weight(v, eps) * tl.load(factors + matrix)
    if o_strides is None:
        start, step = rows_at(O, matrix, R, row), 1
    else:
        start, step = O + matrix * o_strides[0] + row * o_strides[1], o_strides[2]
    for first in range(0, C, BLOCK):
        column = first + tl.arange(0, BLOCK)
        at = start + column.to(tl.int64) * step
        o = tl.load(at, mask=column < C, other=0.0).to(tl.float32)
        tl.store(at, (o * factor).to(O.dtype.element_ty), mask=column < C)


@jit
def _row_squares_kernel(X, factors, out, R, C, strides, FACTORS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute `squares` of a row, by a program. `factors` (N, C): read if FACTORS only."""
    program = tl.program_id(0).to(tl.int64)
    matrix, row = program // R, program % R
    start = X + matrix * strides[0] + row * strides[1]
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, C, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < C
        x = tl.load(start + column.to(tl.int64) * strides[2], mask=inside, other=0.0)
        x = x.to(tl.float32)
        if FACTORS:
            x *= tl.load(factors + matrix * C + column, mask=inside, other=0.0)
        sums += x * x
    tl.store(out + program, tl.sum(sums))


@jit
def _row_absolutes_kernel(X, out, C, BLOCK: tl.constexpr):
    """Compute `absolute_sums` of a row, by a program."""
    program = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, C, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(X + program * C + column, mask=column < C, other=0.0)
        sums += tl.abs(x.to(tl.float32))
    tl.store(out + program, tl.sum(sums))


@jit
def _column_absolutes_kernel(X, out, R, C, blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute ROWS partial sums of `absolute_sums` of COLUMNS columns, by a program. `out`: (N,
    ROWS, C); row i has the sum of the rows i, i + ROWS and so on.
    """
    program = tl.program_id(0).to(tl.int64)
    matrix = program // blocks
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, R, ROWS):
        row = (first + lane).to(tl.int64)
        inside = (row[:, None] < R) & (column[None, :] < C)
        at = X + (matrix * R + row[:, None]) * C + column[None, :]
        sums += tl.abs(tl.load(at, mask=inside, other=0.0).to(tl.float32))
    at = out + (matrix * ROWS + lane[:, None]) * C + column[None, :]
    tl.store(at, sums, mask=column[None, :] < C)


@jit
def _difference_kernel(W, O, factors, out, R, C, w_strides, o_strides, BLOCK: tl.constexpr):
    """Compute `difference_squares` of a row, by a program."""
    program = tl.program_id(0).to(tl.int64)
    matrix, row = program // R, program % R
    w_start = W + matrix * w_strides[0] + row * w_strides[1]
    o_start = O + matrix * o_strides[0] + row * o_strides[1]
    factor = tl.load(factors + matrix)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, C, BLOCK):
        column = (first + tl.arange(0, BLOCK)).to(tl.int64)
        w = tl.load(w_start + column * w_strides[2], mask=column < C, other=0.0)
        o = tl.load(o_start + column * o_strides[2], mask=column < C, other=0.0).to(tl.float32)
        d = w - factor * o
        sums += d * d
    tl.store(out + program, tl.sum(sums))


@jit
def _column_squares_kernel(
    X,
    factors,
    out,
    R,
    C,
    blocks,
    strides,
    FACTORS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute `squares` of COLUMNS columns, by a program. `factors` (N, R): read if FACTORS
    only.
    """
    program = tl.program_id(0).to(tl.int64)
    matrix = program // blocks
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    start = X + matrix * strides[0] + column[None, :] * strides[2]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, R, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row[:, None] < R) & (column[None, :] < C)
        x = tl.load(start + row[:, None].to(tl.int64) * strides[1], mask=inside, other=0.0)
        x = x.to(tl.float32)
        if FACTORS:
            x *= tl.load(factors + matrix * R + row, mask=row < R, other=0.0)[:, None]
        sums += x * x
    tl.store(out + matrix * C + column, tl.sum(sums, axis=0), mask=column < C)


@jit
def _total_kernel(numbers, out, count, BLOCK: tl.constexpr):
    """Compute `total` of a matrix, by a program."""
    matrix = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        sums += tl.load(numbers + matrix * count + at, mask=at < count, other=0.0)
    tl.store(out + matrix, tl.sum(sums))


@jit
def _scale_kernel(X, rows, columns, R, C, strides, BLOCK: tl.constexpr):
    """Compute `scale` of a row, by a program."""
    program = tl.program_id(0).to(tl.int64)
    matrix, row = program // R, program % R
    start = X + matrix * strides[0] + row * strides[1]
    factor = tl.load(rows + program)
    for first in range(0, C, BLOCK):
        column = first + tl.arange(0, BLOCK)
        at = start + column.to(tl.int64) * strides[2]
        x = tl.load(at, mask=column < C, other=0.0).to(tl.float32)
        x = x * factor * tl.load(columns + matrix * C + column, mask=column < C, other=0.0)
        tl.store(at, x.to(X.dtype.element_ty), mask=column < C)


@jit
def _element_moments_kernel(
    O,
    V,
    sums,
    R,
    C,
    o_strides,
    v_strides,
    numbers,
    groups,
    eps,
    GROUPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update V of a row, and write the row's sum of squares of A; see `divide_by_moments`."""
    program = tl.program_id(0).to(tl.int64)
    matrix, row = program // R, program % R
    o_start = O + matrix * o_strides[0] + row * o_strides[1]
    v_start = V + matrix * v_strides[0] + row * v_strides[1]
    at = numbers + 2  # BETA2
    if GROUPED:
        at += tl.load(groups + matrix)
    beta2 = tl.load(at)
    rest = tl.load(at + 1)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, C, BLOCK):
        column = (first + tl.arange(0, BLOCK)).to(tl.int64)
        inside = column < C
        o = tl.load(o_start + column * o_strides[2], mask=inside, other=0.0).to(tl.float32)
        v_at = v_start + column * v_strides[2]
        v = beta2 * tl.load(v_at, mask=inside, other=0.0) + rest * (o * o)
        tl.store(v_at, v, mask=inside)
        a = o / (tl.sqrt(v) + eps)
        squares += a * a
    tl.store(sums + program, tl.sum(squares))


@jit
def _divide_kernel(O, V, factors, R, C, o_strides, v_strides, eps, BLOCK: tl.constexpr):
    """Write A times the factor of the matrix to a row of O; see `divide_by_moments`."""
    program = tl.program_id(0).to(tl.int64)
    matrix, row = program // R, program % R
    o_start = O + matrix * o_strides[0] + row * o_strides[1]
    v_start = V + matrix * v_strides[0] + row * v_strides[1]
    factor = tl.load(factors + matrix)
    for first in range(0, C, BLOCK):
        column = (first + tl.arange(0, BLOCK)).to(tl.int64)
        inside = column < C
        at = o_start + column * o_strides[2]
        o = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_start + column * v_strides[2], mask=inside, other=0.0)
        a = o / (tl.sqrt(v) + eps)
        tl.store(at, (a * factor).to(O.dtype.element_ty), mask=inside)

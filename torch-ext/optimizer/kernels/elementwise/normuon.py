"""NorMuon's row normalization of orthogonalized matrices (arXiv 2510.05491).

Three kernels: moments of rows, a factor per matrix, normalization of rows. Reads each matrix twice.
"""

from __future__ import annotations

import torch

from ..backend import cpu_slices, use_triton
from ..launch.jit import jit, launch_key
from .row_scattered import ScatteredRows, memory_of, rows_at, strides_of

tl = None  # Triton's language, put here by jit

BETA2 = 2  # index of beta2 among the numbers of a parameter group; 1 - beta2 is the next
BLOCK = 1024  # elements of a row, or rows of a matrix, that a program reads at a time


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

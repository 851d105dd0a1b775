"""NorMuon's row normalization of orthogonalized matrices (arXiv 2510.05491).

With O the polar factor of a matrix, s the mean square of a row of O, and V the second moment of the
row (state `second_moment`):

    V <- beta2 V + (1 - beta2) s
    N <- O / (sqrt(V) + EPS)          row by row
    O <- N ||O|| / ||N||              Frobenius norms of the whole matrix

The last line is the norm-preserving form of the authors' code. Because of the norms the
normalization runs on whole matrices, at the owner, right after Newton-Schulz. V needs no bias
correction: a factor common to all rows cancels in the ratio of norms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernels.elementwise.normuon import normalize as normalize_rows
from ..kernels.elementwise.row_scattered import ScatteredRows

# Added to the root, as in the authors' code
EPS = 1e-8


def normalize(
    stacks: Sequence[torch.Tensor | ScatteredRows],
    rows: Sequence[torch.Tensor],
    numbers: torch.Tensor | float,
    groups: Sequence[torch.Tensor | None] | None = None,
) -> None:
    """Normalize the rows of every matrix in place, by the formulas of the module.

    `stacks`: O (N, R, C) in fp32, bf16 or fp16. `rows`: V (N, R, 1) in fp32, one for each stack,
    updated in place. `numbers`: `device_scalars` of the parameter groups, on the device, or beta2.
    `groups`: for each stack, the first element of the numbers of each matrix, (N,) int64; None:
    group 0. A matrix of zeros stays zero.
    """
    for i, (O, V) in enumerate(zip(stacks, rows)):
        normalize_rows(O, V, numbers, EPS, None if groups is None else groups[i])

"""NorMuon's row normalization of orthogonalized updates (arXiv 2510.05491)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernels.elementwise.normuon import normalize as normalize_rows
from ..kernels.elementwise.row_scattered import ScatteredRows

EPS = 1e-8  # added to the root, as in the authors' code


def normalize(
    stacks: Sequence[torch.Tensor | ScatteredRows], rows: Sequence[torch.Tensor], beta2: float
) -> None:
    """Divide each row of each matrix by the root of its mean square over time, in place, and keep
    the Frobenius norm of the matrix.

    `stacks`: (N, R, C); `rows`: (N, R, 1) in fp32, the means, updated in place; `beta2`: their
    decay.
    """
    for U, V in zip(stacks, rows):
        normalize_rows(U, V, beta2, EPS)

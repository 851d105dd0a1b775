"""Muon's update rule (Keller Jordan, 2024; arXiv 2502.16982).

Letters: W weight, G gradient, M momentum, U update (momentum to orthogonalize), O orthogonalized
update (polar factor of U), all (R, C) for a matrix of R rows (fan out) and C columns (fan in); mu
(`momentum`), lr and weight_decay from the group.

    M <- M + (1 - mu) (G - M)                     momentum, an exponential mean
    U <- M + (1 - mu) (G - M) with nesterov       with the new M
    U <- M otherwise
    O <- polar factor of U                        a few Newton-Schulz steps approximate P Q^T
                                                  of U = P S Q^T
    W <- (1 - lr weight_decay) W - lr scale O     scale by the shape of the matrix, see `scale_of`

The phases of rule.py:

1. M and U: elementwise, where M is stored (kernels/elementwise/momentum.py).
2. O: on whole matrices, at the owner (newton_schulz/).
3. W: elementwise, where W is stored (kernels/elementwise/weight_update.py).

Elementwise arithmetic is in fp32, without fused multiply-adds, so an element's bits do not depend
on how a matrix is sharded. M, U and W are each rounded once. `execution/bucket_updates.py` connects
the phases. This module holds the scale, the only part of the rule that is neither a kernel nor
Newton-Schulz.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from .rule import Rule, register

# adjust_lr_fn -> scale of a whole (R, C) matrix, a factor on the learning rate
SCALES: dict[str, Callable[[int, int], float]] = {
    # Keller Jordan, torch.optim.Muon
    "original": lambda R, C: math.sqrt(max(1.0, R / C)),
    # Moonlight, arXiv 2502.16982: the RMS of scale O is 0.2, about that of AdamW, so that both
    # take one learning rate
    "match_rms_adamw": lambda R, C: 0.2 * math.sqrt(max(R, C)),
    # Dion's name of match_rms_adamw
    "rms_norm": lambda R, C: 0.2 * math.sqrt(max(R, C)),
    # Dion's default, arXiv 2310.17813
    "spectral_norm": lambda R, C: math.sqrt(R / C),
    # torch.optim.Muon's name of spectral_norm (torch 2.14)
    "spectral_unclamped": lambda R, C: math.sqrt(R / C),
    # Emerging-Optimizers' "spectral": the RMS of scale O is 1
    "sqrt_max": lambda R, C: math.sqrt(max(R, C)),
}


class MatrixShape(Protocol):
    """Anything with the shape of a whole matrix, such as `planning.plan.Matrix`."""

    rows: int
    cols: int


@register
class MuonRule(Rule):
    """See the module: the phases of `Rule`, which overrides nothing."""

    name = "muon"
    fused = True
    takes_scattered_rows = True


def scale_of(matrix: MatrixShape, adjust_lr_fn: str | None) -> float:
    """Return the factor on the learning rate of a matrix; None is "original", as in torch.

    A piece of a sharded matrix gets the scale of its whole matrix: the polar factor is that of the
    whole matrix, and a scale by the shape of the shard would depend on the number of ranks.
    """
    return SCALES[adjust_lr_fn or "original"](matrix.rows, matrix.cols)

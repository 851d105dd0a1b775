"""Muon's update rule on lists of tensors and stacks of matrices: momentum, orthogonalization,
weight update.

Keller Jordan, 2024; arXiv 2502.16982. `group` is the live parameter group: schedules change its
numbers between steps.
"""

from __future__ import annotations

import math

from ..newton_schulz import coefficients
from ..newton_schulz.orthogonalize import orthogonalize_

SCALES = {  # adjust_lr_fn -> factor on the learning rate of a whole (R, C) matrix
    "original": lambda R, C: math.sqrt(max(1.0, R / C)),  # Keller Jordan, torch.optim.Muon
    "match_rms_adamw": lambda R, C: 0.2 * math.sqrt(max(R, C)),  # Moonlight, arXiv 2502.16982
    "rms_norm": lambda R, C: 0.2 * math.sqrt(max(R, C)),  # the same, by Dion's name
    "spectral_norm": lambda R, C: math.sqrt(R / C),  # Dion's default, arXiv 2310.17813
    # The same, by torch.optim.Muon's name (torch 2.14)
    "spectral_unclamped": lambda R, C: math.sqrt(R / C),
    # Emerging-Optimizers' "spectral": an update's RMS is 1
    "sqrt_max": lambda R, C: math.sqrt(max(R, C)),
}


def scale_of(matrix, adjust_lr_fn) -> float:
    """The factor on the learning rate of a piece: that of its whole matrix, never of the piece."""
    return SCALES[adjust_lr_fn or "original"](matrix.rows, matrix.cols)


def momentum(pack, gradients, numbers, hp, moves=True) -> None:
    """M <- mu M + (1 - mu) G and U <- (1 - mu) G + mu M (Nesterov) or M, for all pieces of a bound
    `pack`. Without `moves`, M stays until `apply`.
    """
    pack(*gradients, numbers[4:5], bool(hp["nesterov"]), moves)


def orthogonalize(stacks, hp, dtype, memory=None, into=None) -> None:
    """Replace each (R, C) matrix of each stack (N, R, C) by its polar factor, as the coefficients
    approximate it.

    `memory`, `into`: see `polar.orthogonalize_`.
    """
    steps = coefficients.steps_of(hp["ns_coefficients"], hp["ns_steps"])
    orthogonalize_(stacks, steps, float(hp["eps"]), dtype, memory, into)


def apply(update, numbers, gradients=((), None), moves=True) -> None:
    """W <- (1 - lr wd) W - lr s U for all pieces of a bound `update`, and M as in `momentum` of
    those bound with it. Without `moves`, M has changed before.
    """
    update(numbers[:2], *gradients, numbers[4:5], moves)

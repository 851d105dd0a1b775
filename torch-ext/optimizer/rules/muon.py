"""Muon's update rule (Keller Jordan, 2024; arXiv 2502.16982).

    M <- mu M + (1 - mu) G
    U <- (1 - mu) G + mu M with nesterov, else M
    O <- polar factor of U, as the coefficients approximate it
    W <- (1 - lr weight_decay) W - lr scale O

Momentum and weight are elementwise and run where a parameter is stored
(kernels/elementwise/momentum.py, weight_update.py); the polar factor needs the whole matrix and
runs at its owner (newton_schulz/). This module holds the scale, which depends on the whole matrix's
shape.
"""

from __future__ import annotations

import math

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

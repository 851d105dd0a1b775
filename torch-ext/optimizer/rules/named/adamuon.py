"""AdaMuon (arXiv 2507.11005): an elementwise second moment of the orthogonalized update.

    O <- polar factor of sign(U)
    V <- beta2 V + (1 - beta2) O^2             element by element
    A <- O / (sqrt(V) + EPS)
    O <- A sqrt(R C) / ||A||                   of RMS 1; `scale` is 0.2 in the paper

V needs no bias correction: a common factor cancels in the norm.
"""

from __future__ import annotations

import math

import torch

from ..rule import Rule, State, Units, norm, register

EPS = 1e-8


@register
class AdaMuon(Rule):
    """See the module. The factor on lr is that of `adjust_lr_fn`: 0.2 for the paper's rule."""

    name = "adamuon"
    state = (State("second_moment_of_elements"),)
    options = {"beta2": 0.95}

    def before(self, U: torch.Tensor, units: Units) -> torch.Tensor:
        """Return the signs of U (1, R, C)."""
        return U.sign()

    def after(self, O: torch.Tensor, units: Units) -> torch.Tensor:
        """Update V, and return O (1, R, C) with RMS 1; zeros stay zero."""
        V = units.state["second_moment_of_elements"]
        V.mul_(units.numbers.beta2).add_(O.square() * units.numbers.one_minus_beta2)
        A = O / (V.sqrt() + EPS)
        size = norm(A, "matrix")
        return A * torch.where(size > 0, math.sqrt(A[0].numel()) / size, size)

"""AdaMuon (arXiv 2507.11005): an elementwise second moment of the orthogonalized update.

    O <- polar factor of sign(U)
    V <- beta2 V + (1 - beta2) O^2             element by element
    A <- O / (sqrt(V) + EPS)
    O <- A sqrt(R C) / ||A||                   of RMS 1; `scale` is 0.2 in the paper

V needs no bias correction: a common factor cancels in the norm. The owner makes A, and sends the
factor after it to the weight update. The option `sign` (True): False takes the polar factor of U,
as timm and pytorch_optimizer do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...kernels.elementwise.norms import divide_by_moments
from ..rule import Rule, State, Units, register

EPS = 1e-8


@register
class AdaMuon(Rule):
    """See the module. The factor on lr is that of `adjust_lr_fn`: 0.2 for the paper's rule."""

    name = "adamuon"
    state = (State("second_moment_of_elements"),)
    options = {"beta2": 0.95, "sign": True}
    sends = {"size": "matrix"}
    fused = True
    planned = ("sign",)
    sends_signs = "sign"
    write_factors = ("size",)

    @classmethod
    def check(cls, group: Mapping[str, Any]) -> None:
        """Raise ValueError for a `sign` that is no bool."""
        if not isinstance(group["sign"], bool):
            raise ValueError(f"sign={group['sign']!r} must be True or False")

    def after(self, O: torch.Tensor, units: Units) -> torch.Tensor:
        """Update V, make A of O (N, R, C), and send the factor to RMS 1; zeros stay zero."""
        V, size = units.state["second_moment_of_elements"], units.sent["size"]
        divide_by_moments(O, V, units.scalars, EPS, units.groups, size)
        return O

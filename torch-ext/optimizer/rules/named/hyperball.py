"""Hyperball (arXiv 2606.16899): the Frobenius norms of weight and update are fixed.

With r the norm of the weight at the first step (state `radius`, repeated for each row, so that it
is stored like the rows on every layout):

    D <- W - lr r O / ||O||
    W <- r D / ||D||

weight_decay and adjust_lr_fn have no effect: both norms are fixed. lr is the length of a step
relative to the weight.
"""

from __future__ import annotations

import torch

from ...kernels.elementwise.weight_update import keep_norms
from ..rule import Rule, State, Units, register


@register
class Hyperball(Rule):
    """See the module. A weight of zeros has no radius and stays zero."""

    name = "hyperball"
    state = (State("radius", per="row", of_matrix=True),)
    sends = {"keep": "matrix", "step": "matrix"}
    reads_weight = True
    fused = True
    write_factors = ("step", "keep")

    def after(self, O: torch.Tensor, units: Units) -> torch.Tensor:
        """Send the factors of W and of O (N, R, C) in the new weight, W keep - O step."""
        radius, sent = units.state["radius"], units.sent
        factors = sent["keep"], sent["step"]
        keep_norms(units.weight, O, radius, *factors, units.scalars, units.groups)
        return O

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

from ...kernels.elementwise.norms import difference_squares, squares, total
from ..rule import Rule, State, Units, register


@register
class Hyperball(Rule):
    """See the module. A weight of zeros has no radius and stays zero."""

    name = "hyperball"
    state = (State("radius", per="row"),)
    sends = {"keep": "matrix", "step": "matrix"}
    reads_weight = True
    fused = True
    write_factors = ("keep", "step")

    def after(self, O: torch.Tensor, units: Units) -> torch.Tensor:
        """Send the factors of W and of O (N, R, C) in the new weight."""
        W = units.weight
        radius = units.state["radius"][:, :1]
        radius = torch.where(radius > 0, radius, total(squares(W, "row")).sqrt())
        units.state["radius"].copy_(radius)
        size = total(squares(O, "row")).sqrt()
        step = torch.where(size > 0, units.numbers.lr * radius / size, size)
        length = total(difference_squares(W, O, step)).sqrt()
        keep = torch.where(length > 0, radius / length, length)
        units.sent["keep"].copy_(keep)
        units.sent["step"].copy_(keep * step)
        return O

"""NorMuon along the longer side, as in modded-nanogpt's `_apply_normuon_variance_reduction`.

A matrix with R >= C is stepped by NorMuon, with a mean square for each row; a matrix with R < C by
NorMuon of columns. See normuon.py for the formula. Every matrix has state for both sides, R + C
numbers, because a stack of state has one shape; the state of the shorter side stays zero.
"""

from __future__ import annotations

import torch

from ...kernels.elementwise.norms import normalize
from ..normuon import EPS, NorMuonColumnsRule
from ..rule import Rule, State, Units, register


@register
class NorMuonAspect(Rule):
    """See the module. modded-nanogpt bounds V below by 1e-10; here EPS is added to its root."""

    name = "normuon_aspect"
    state = (State("second_moment", per="row"), State("second_moment_of_columns", per="column"))
    options = {"beta2": 0.95}
    fused = True

    def after(self, O: torch.Tensor, units: Units) -> torch.Tensor:
        """Normalize the rows of O (N, R, C) in place if R >= C, else the columns."""
        rows, columns = O.shape[1:]
        if rows < columns:
            return NorMuonColumnsRule.after(self, O, units)
        normalize(O, units.state["second_moment"], units.scalars, EPS, units.groups)
        return O

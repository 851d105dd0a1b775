"""NorMuon's row normalization of orthogonalized matrices (arXiv 2510.05491).

With O the polar factor of a matrix, s the mean square of a row of O, and V the second moment of the
row (state `second_moment`):

    V <- beta2 V + (1 - beta2) s
    N <- O / (sqrt(V) + EPS)          row by row
    O <- N ||O|| / ||N||              Frobenius norms of the whole matrix

The last line is the norm-preserving form of the authors' code. Because of the norms the
normalization runs on whole matrices, at the owner, right after Newton-Schulz. O is only read there:
the owner sends a factor for each row, and the weight update multiplies. V needs no bias correction:
a factor common to all rows cancels in the ratio of norms.
"""

from __future__ import annotations

import torch

from ..kernels.elementwise.norms import normalize, normalize_columns
from ..kernels.elementwise.row_scattered import ScatteredRows
from .rule import Rule, State, Units, register

# Added to the root, as in the authors' code
EPS = 1e-8


@register
class MuonRule(Rule):
    """Muon's rule: the phases of `Rule`, none overridden."""

    name = "muon"
    fused = True
    takes_scattered_rows = True


@register
class NorMuonRule(Rule):
    """See the module."""

    name = "normuon"
    state = (State("second_moment", per="row"),)
    options = {"beta2": 0.95}
    sends = {"factor": "row"}
    fused = True
    write_factors = ("factor",)
    takes_scattered_rows = True

    def after(self, O: torch.Tensor | ScatteredRows, units: Units) -> torch.Tensor | ScatteredRows:
        """Update V, and send the factors that normalize the rows of O (N, R, C) to the weight
        update. A matrix of zeros stays zero.
        """
        V, factors = units.state["second_moment"], units.sent["factor"]
        normalize(O, V, units.scalars, EPS, units.groups, factors)
        return O


@register
class NorMuonColumnsRule(Rule):
    """NorMuon with columns in place of rows, as for weights stored transposed."""

    name = "normuon_columns"
    state = (State("second_moment_of_columns", per="column"),)
    options = {"beta2": 0.95}
    fused = True

    def after(self, O: torch.Tensor, units: Units) -> torch.Tensor:
        """Normalize the columns of O (N, R, C) in place, and update V (N, 1, C)."""
        V = units.state["second_moment_of_columns"]
        normalize_columns(O, V, units.scalars, EPS, units.groups)
        return O

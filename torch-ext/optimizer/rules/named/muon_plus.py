"""Muon+ (arXiv 2602.21545) and MuonEq (arXiv 2603.28254): rows and columns of equal norm.

Option `equilibrate` (None) divides rows or columns of U by their norms before Newton-Schulz:
MuonEq takes "row". Option `normalize` ("column_row") divides rows or columns of O by their norms
after Newton-Schulz: Muon+. Values: None, "row", "column", and for both in turn "row_column" or
"column_row".
EPS is added to the squared norm, as in the authors' code of Muon+.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...kernels.elementwise import norms
from ..rule import Rule, Units, register

EPS = 1e-7
ORDERS = {None: (), "row": ("row",), "column": ("column",), "row_column": ("row", "column"),
          "column_row": ("column", "row")}  # fmt: skip


def equalize(X: torch.Tensor, order: str | None, unit: bool) -> None:
    """Divide rows or columns of X (N, R, C) by their norms, in the given order, in place. `unit`:
    EPS is added as if X had norm 1.
    """
    powers = None
    if unit and order is not None and X.numel():
        # Squares of 1e20 overflow. A power of two, by which the largest element is near 1, changes
        # no bits elsewhere
        largest = torch.linalg.vector_norm(X, torch.inf, (1, 2), keepdim=True).float()
        is_normal = (largest >= torch.finfo(torch.float32).tiny) & largest.isfinite()
        powers = torch.where(is_normal, torch.frexp(largest).mantissa / largest, 1.0)
    norms.equalize(X, ORDERS[order], EPS, powers)


@register
class MuonPlus(Rule):
    """See the module."""

    name = "muon_plus"
    options = {"equilibrate": None, "normalize": "column_row"}
    fused = True

    @classmethod
    def check(cls, group: Mapping[str, Any]) -> None:
        """Raise ValueError for an order that is not known."""
        for key in cls.options:
            if group[key] not in ORDERS:
                raise ValueError(f"{key}={group[key]!r} must be one of {[*ORDERS]}")

    def before(self, U: torch.Tensor, units: Units) -> torch.Tensor:
        """Equalize U (N, R, C) for Newton-Schulz. A factor on U has no effect."""
        equalize(U, units.numbers.equilibrate, unit=True)
        return U

    def after(self, O: torch.Tensor, units: Units) -> torch.Tensor:
        """Equalize O (N, R, C) for the weight update."""
        equalize(O, units.numbers.normalize, unit=False)
        return O

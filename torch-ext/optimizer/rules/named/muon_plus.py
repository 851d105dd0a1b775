"""Muon+ (arXiv 2602.21545) and MuonEq (arXiv 2603.28254): rows and columns of equal norm.

Option `equilibrate` (None) divides rows or columns of U by their norms before Newton-Schulz:
MuonEq takes "row". Option `normalize` ("column_row") divides those of O by their norms after it:
Muon+. Values: None, "row", "column", and "row_column" or "column_row" for one after the other.
EPS is added to the squared norm, as in the authors' code of Muon+.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..rule import Rule, Units, norm, register

EPS = 1e-7
ORDERS = {None: (), "row": ("row",), "column": ("column",), "row_column": ("row", "column"),
          "column_row": ("column", "row")}  # fmt: skip


def equalize(X: torch.Tensor, order: str | None) -> torch.Tensor:
    """Return X (1, R, C) with rows or columns divided by their norms, in the given order."""
    for per in ORDERS[order]:
        X = X / (norm(X, per).square() + EPS).sqrt()
    return X


@register
class MuonPlus(Rule):
    """See the module."""

    name = "muon_plus"
    options = {"equilibrate": None, "normalize": "column_row"}

    @classmethod
    def check(cls, group: Mapping[str, Any]) -> None:
        """Raise ValueError for an order that is not known."""
        for key in cls.options:
            if group[key] not in ORDERS:
                raise ValueError(f"{key}={group[key]!r} must be one of {[*ORDERS]}")

    def before(self, U: torch.Tensor, units: Units) -> torch.Tensor:
        """Return U (1, R, C) for Newton-Schulz. Its size has no effect: EPS is for U of norm 1."""
        size = norm(U, "matrix")
        U = torch.where(size > 0, U / size, U)
        return equalize(U, units.numbers.equilibrate)

    def after(self, O: torch.Tensor, units: Units) -> torch.Tensor:
        """Return O (1, R, C) for the weight update."""
        return equalize(O, units.numbers.normalize)

"""Dion2 (arXiv 2512.16928) and Dion3, both of github.com/microsoft/dion.

    U <- M + (1 - momentum) G
    K <- the rows, or columns, of U with the largest sums of absolute values; a fraction of all
    O <- polar factor of U[K]
    M <- U, then M[K] <- momentum M[K]            error feedback: M keeps the rest
    W <- (1 - lr weight_decay) W, then W[K] <- W[K] - lr scale O

The authors' M is M / (1 - momentum). `scale` is that of the whole matrix. Dion3, there also called
NorDion2, normalizes the rows of O as NorMuon does, with V[K].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...kernels.elementwise.norms import normalize
from ...newton_schulz.selection import Selection, check_selection
from ..normuon import EPS
from ..rule import Rule, State, Units, register


@register
class Dion2(Rule):
    """See the module."""

    name = "dion2"
    options = {"fraction": 0.25, "select": "short", "blocks": 1}
    planned = ("fraction", "select", "blocks")
    fused = True
    has_nesterov = False

    @classmethod
    def check(cls, group: Mapping[str, Any]) -> None:
        """Raise ValueError for wrong values of options."""
        check_selection(group)

    @classmethod
    def selection(cls, group: Mapping[str, Any]) -> Selection:
        """Return the selection of a group."""
        return Selection(float(group["fraction"]), group["select"], group["blocks"])


@register
class Dion3(Rule):
    """See the module. Rows are selected."""

    name = "dion3"
    state = (State("second_moment", per="row"),)
    options = {"fraction": 0.25, "blocks": 1, "beta2": 0.95}
    planned = ("fraction", "blocks")
    fused = True
    has_nesterov = False

    @classmethod
    def check(cls, group: Mapping[str, Any]) -> None:
        """Raise ValueError for wrong values of options."""
        check_selection(group)

    @classmethod
    def selection(cls, group: Mapping[str, Any]) -> Selection:
        """Return the selection of a group."""
        return Selection(float(group["fraction"]), "row", group["blocks"])

    def after(self, O: torch.Tensor, units: Units) -> torch.Tensor:
        """Normalize the selected rows O (N, k, C) in place, and update their V."""
        normalize(O, units.state["second_moment"], units.scalars, EPS, units.groups)
        return O

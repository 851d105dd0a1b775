"""Dion2 (arXiv 2512.16928) and Dion3, both of github.com/microsoft/dion.

    U <- M + (1 - momentum) G
    K <- the rows, or columns, of U with the largest sums of absolute values; a fraction of all
    O <- polar factor of U[K]
    M <- U, then M[K] <- momentum M[K]            error feedback: the rest waits in M
    W <- (1 - lr weight_decay) W, then W[K] <- W[K] - lr scale O

The authors' M is M / (1 - momentum). `scale` is that of the whole matrix. Dion3, there also called
NorDion2, normalizes the rows of O as NorMuon does, with V[K].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...newton_schulz.selection import AXES, Selection
from ..normuon import NorMuonRule
from ..rule import Rule, State, number_of, register


class _Selecting(Rule):
    """Options of both rules, and their checks."""

    fused = True

    @classmethod
    def check(cls, group: Mapping[str, Any]) -> None:
        """Raise ValueError for wrong values of options."""
        fraction, blocks = group["fraction"], group["blocks"]
        if isinstance(fraction, bool) or not 0 < number_of(fraction) <= 1:
            raise ValueError(f"fraction={fraction!r} must be a number > 0 and <= 1")
        if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
            raise ValueError(f"blocks={blocks!r} must be an int >= 1: blocks that select rows each")
        if group.get("select", "row") not in ("short", *AXES):
            raise ValueError(f"select={group['select']!r} must be one of {['short', *AXES]}")
        if group.get("momentum_form", "ema") != "ema":
            raise ValueError(
                f"momentum_form={group['momentum_form']!r} with a rule that has a momentum of its "
                "own, with error feedback: leave momentum_form out"
            )

    @classmethod
    def selection(cls, group: Mapping[str, Any]) -> Selection:
        """Return the selection of a group."""
        return Selection(float(group["fraction"]), group.get("select", "row"), group["blocks"])


@register
class Dion2(_Selecting):
    """See the module."""

    name = "dion2"
    options = {"fraction": 0.25, "select": "short", "blocks": 1}
    planned = ("fraction", "select", "blocks")


@register
class Dion3(_Selecting):
    """See the module. Rows are selected."""

    name = "dion3"
    state = (State("second_moment", per="row"),)
    options = {"fraction": 0.25, "blocks": 1, "beta2": 0.95}
    planned = ("fraction", "blocks")
    after = NorMuonRule.after

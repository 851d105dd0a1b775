"""Scion on matrices: steps in the spectral norm, of a radius (arXiv 2502.07529, the authors' code).

    M <- mu M + (1 - mu) G
    W <- (1 - lr weight_decay) W - lr radius sqrt(R / C) O       O the polar factor of M

weight_decay=1 is the paper's constrained form: once the spectral norm of W is below radius
sqrt(R / C), it stays below. weight_decay=0 is the unconstrained form. In the authors' code
`momentum` is 1 - mu, and `scale` is radius. Embeddings, heads and vectors take the rule "sign".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..elementwise import check_radius
from ..rule import Rule, register


@register
class Scion(Rule):
    """See the module. The keys `nesterov` and `adjust_lr_fn` are not read."""

    name = "scion"
    options = {"radius": 1.0}
    fused = True
    takes_scattered_rows = True
    has_nesterov = False
    has_radius = True
    adjust_lr_fn = "spectral_norm"

    @classmethod
    def check(cls, group: Mapping[str, Any]) -> None:
        """Raise ValueError for a radius that is no number > 0."""
        check_radius(group)

"""Sign of the momentum, Scion's step for embeddings and heads (arXiv 2502.07529, authors' code).

    M <- mu M + (1 - mu) G                                               momentum_buffer
    W <- (1 - lr weight_decay) W - lr radius sign(M)

The authors' `Sign` with scale s is radius = s / C for a head of C columns, and radius = s with
normalized=False. mu is the key `momentum` of the group. For vectors the authors divide M by its
RMS, a sum over all shards; sign(M) has RMS 1 as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..elementwise import Elementwise, Members, Tensors, register_elementwise


@register_elementwise
class Sign(Elementwise):
    """See the module."""

    name = "sign"
    averages = ("momentum_buffer",)
    options = {"radius": 1.0}
    has_radius = True
    reads = ("momentum",)
    makes = (2, 1)

    def step(self, of: Members, group: Mapping[str, Any]) -> Tensors:
        """See `Elementwise.step`. `lr`: times the radius."""
        W, G, (M,), _, lr, _ = of
        (momentum,) = self.constants(group)
        torch._foreach_add_(M, torch._foreach_mul(torch._foreach_sub(G, M), 1.0 - momentum))
        update = torch._foreach_sign(M)
        torch._foreach_sub_(W, torch._foreach_mul(update, lr))
        return update

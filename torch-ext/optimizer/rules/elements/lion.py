"""Lion (arXiv 2302.06675, Algorithm 2): the sign of a mix of momentum and gradient.

    u <- sign(beta1 m + (1 - beta1) G)
    W <- (1 - lr weight_decay) W - lr u
    m <- beta2 m + (1 - beta2) G                                         exp_avg

The authors take 3 to 10 times less lr than for AdamW, and as many times more weight_decay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..elementwise import Elementwise, Members, Tensors, register_elementwise


@register_elementwise
class Lion(Elementwise):
    """See the module. torch has no Lion: a few foreach operations, without fused multiply-adds."""

    name = "lion"
    averages = ("exp_avg",)
    options = {"betas": (0.9, 0.99)}
    reads = ("betas",)
    makes = (2, 1)

    def step(self, of: Members, group: Mapping[str, Any]) -> Tensors:
        """See `Elementwise.step`."""
        W, G, (m,), _, lr, _ = of
        beta1, beta2 = self.constants(group)
        update = torch._foreach_mul(m, beta1)
        torch._foreach_add_(update, torch._foreach_mul(G, 1.0 - beta1))
        torch._foreach_sign_(update)
        torch._foreach_sub_(W, torch._foreach_mul(update, lr))
        torch._foreach_mul_(m, beta2)
        torch._foreach_add_(m, torch._foreach_mul(G, 1.0 - beta2))
        return update

"""SGD with momentum, through torch's fused or foreach function.

    M <- mu M + G                                                        momentum_sum
    W <- (1 - lr weight_decay) W - lr (G + mu M with nesterov, else M)

mu is the key `momentum` of the group; with mu = 0 torch leaves M alone. As in every rule here,
weight decay is no part of the gradient, unlike that of torch.optim.SGD. torch's `momentum_buffer`
is the same sum, but the key means an average in all other groups here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.sgd import sgd as torch_sgd

from ..elementwise import Elementwise, Members, Tensors, register_elementwise, torch_options
from ..muon import SUM_KEY


@register_elementwise
class SGD(Elementwise):
    """See the module."""

    name = "sgd"
    averages = (SUM_KEY,)

    def constants(self, group: Mapping[str, Any]) -> tuple:
        """Return (momentum, nesterov)."""
        momentum = float(group["momentum"])
        return momentum, bool(group["nesterov"]) and momentum > 0

    def temporaries(self, group: Mapping[str, Any]) -> tuple[int, int]:
        """See `Elementwise.temporaries`."""
        _, nesterov = self.constants(group)
        # Else the update is the gradient or M
        return (2, 1) if nesterov and group.get("decay") == "cautious" else (0, 0)

    def step(self, of: Members, group: Mapping[str, Any]) -> Tensors:
        """See `Elementwise.step`."""
        W, G, (M,), _, lr, _ = of
        momentum, nesterov = self.constants(group)
        options = torch_options(W)
        fused = options["fused"]
        # torch's foreach function writes Nesterov's update to the gradients
        update = [g.clone() for g in G] if nesterov and not fused else G
        torch_sgd(
            W,
            update,
            M,
            weight_decay=0.0,
            momentum=momentum,
            lr=lr,
            dampening=0.0,
            nesterov=nesterov,
            **options,
        )
        if fused and nesterov and group.get("decay") == "cautious":
            return torch._foreach_add(torch._foreach_mul(M, momentum), G)
        return update if nesterov or not momentum else M

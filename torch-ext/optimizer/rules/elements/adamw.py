"""AdamW (arXiv 1711.05101), through torch's fused or foreach kernels.

For each element, with t the count of steps (state `step`):

    m <- beta1 m + (1 - beta1) G,   v <- beta2 v + (1 - beta2) G^2       exp_avg, exp_avg_sq
    W <- (1 - lr weight_decay) W - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

The update has the sign of the new m. Averages in 8 bits have a kernel of the package's own, see
kernels/quantized/adamw.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw as torch_adamw

from ...kernels.elementwise.weight_update import RATE, TO_INITIAL
from ...kernels.quantized.adamw import Averages, Constants
from ...kernels.quantized.adamw import step as step_8bit
from ..decay import form_of, rate_of
from ..elementwise import (
    Elementwise,
    Members,
    Tensors,
    register_elementwise,
    step_size,
    torch_options,
)


@register_elementwise
class AdamW(Elementwise):
    """See the module. The defaults of its options are arguments of the optimizer."""

    name = "adamw"
    averages = ("exp_avg", "exp_avg_sq")
    counts = True
    quantized = ("exp_avg_8bit", "exp_avg_sq_8bit", "exp_avg_scale", "exp_avg_sq_scale")
    options = {"betas": (0.9, 0.95), "eps": 1e-8}
    reads = ("betas", "eps")
    decays = True
    in_fp32 = False  # torch's fused kernel computes in fp32

    def step(self, of: Members, group: Mapping[str, Any]) -> Tensors:
        """See `Elementwise.step`."""
        beta1, beta2, eps = self.constants(group)
        torch_adamw(
            of.W,
            of.G,
            *of.averages,
            [],
            of.steps,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=of.lr,
            weight_decay=of.weight_decay,
            eps=eps,
            **torch_options(of.W),
        )
        return of.averages[0]

    def step_quantized(
        self,
        W: Tensors,
        G: Tensors,
        states: Sequence[Tensors],
        group: Mapping[str, Any],
        scalars: torch.Tensor | None,
    ) -> None:
        """See `Elementwise.step_quantized`."""
        count = len(self.quantized)
        steps, further = states[count], list(states[count + 1 :])
        initial = further.pop(0) if form_of(group) == TO_INITIAL else [None] * len(W)
        rests = further.pop(0) if further else [None] * len(W)
        torch._foreach_add_(steps, 1)
        factors = self._factors(steps, group, scalars if W[0].is_cuda else None)
        constants = Constants.of(*self.constants(group), form_of(group))
        averages = map(Averages, *states[:count])
        for w, g, own, numbers, rest, first in zip(W, G, averages, factors, rests, initial):
            step_8bit(w, g, own, numbers, constants, rest, first)

    def _factors(
        self, steps: Tensors, group: Mapping[str, Any], scalars: torch.Tensor | None
    ) -> torch.Tensor:
        """Return fp32 (parameters, 4), the FACTORS of each. Computed where `steps` are, in fp64.
        `scalars`: of the group on the device, by which schedules need no new CUDA graph.
        """
        beta1, beta2, _ = self.constants(group)
        t = torch.stack(list(steps)).double()
        if scalars is None:
            lr, rate = (torch.full_like(t, n) for n in (step_size(group), rate_of(group)))
        else:
            lr, rate = (scalars[i].double().expand(len(t)) for i in (0, RATE))
        corrections = [1.0 - torch.pow(beta, t) for beta in (beta1, beta2)]
        numbers = [1.0 - rate, rate, lr / corrections[0], corrections[1].sqrt()]
        return torch.stack(numbers, 1).float()

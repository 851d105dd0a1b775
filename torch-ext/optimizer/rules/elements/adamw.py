"""AdamW (arXiv 1711.05101), through torch's fused or foreach kernels.

For each element, with t the count of steps (state `step`):

    m <- beta1 m + (1 - beta1) G,   v <- beta2 v + (1 - beta2) G^2       exp_avg, exp_avg_sq
    W <- (1 - lr weight_decay) W - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

The update has the sign of the new m. Averages in 8 bits have a kernel of the package's own, see
kernels/quantized/adamw.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.adamw import adamw as torch_adamw

from ..elementwise import Elementwise, Members, Tensors, register_elementwise, torch_options
from .averages_8bit import step_adamw


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

    step_quantized = step_adamw

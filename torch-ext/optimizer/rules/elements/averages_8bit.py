"""A step of AdamW with averages in 8 bits, by the kernel of kernels/quantized/adamw.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...kernels.elementwise.weight_update import RATE, TO_INITIAL
from ...kernels.quantized.adamw import Averages, Constants, step
from ..decay import form_of, rate_of
from ..elementwise import Elementwise, Tensors, step_size


def step_adamw(
    rule: Elementwise,
    W: Tensors,
    G: Tensors,
    states: Sequence[Tensors],
    group: Mapping[str, Any],
    scalars: torch.Tensor | None,
) -> None:
    """Step AdamW with averages in 8 bits; arguments as of `Elementwise.step_quantized`."""
    count = len(rule.quantized)
    steps, further = states[count], list(states[count + 1 :])
    initial = further.pop(0) if form_of(group) == TO_INITIAL else [None] * len(W)
    rests = further.pop(0) if further else [None] * len(W)
    torch._foreach_add_(steps, 1)
    factors = _factors(rule, steps, group, scalars if W[0].is_cuda else None)
    constants = Constants.of(*rule.constants(group), form_of(group))
    averages = map(Averages, *states[:count])
    for w, g, own, numbers, rest, first in zip(W, G, averages, factors, rests, initial):
        step(w, g, own, numbers, constants, rest, first)


def _factors(
    rule: Elementwise, steps: Tensors, group: Mapping[str, Any], scalars: torch.Tensor | None
) -> torch.Tensor:
    """Return fp32 (parameters, 4), the FACTORS of each. Computed where `steps` are, in fp64.
    `scalars`: of the group on the device, by which schedules need no new CUDA graph.
    """
    beta1, beta2, _ = rule.constants(group)
    t = torch.stack(list(steps)).double()
    if scalars is None:
        lr, rate = (torch.full_like(t, n) for n in (step_size(group), rate_of(group)))
    else:
        lr, rate = (scalars[i].double().expand(len(t)) for i in (0, RATE))
    corrections = [1.0 - torch.pow(beta, t) for beta in (beta1, beta2)]
    numbers = [1.0 - rate, rate, lr / corrections[0], corrections[1].sqrt()]
    return torch.stack(numbers, 1).float()

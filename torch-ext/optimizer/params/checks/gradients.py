"""Checks of gradients, and attributes of many tensors read in C."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch

from ..dtensor import is_mismatched, raw_locals
from ..errors import name_among

# Attributes read in C, for `map` over all parameters at every step
gradient_of, dtype_of, requires_grad_of, spec_of = map(
    operator.attrgetter, ("grad", "dtype", "requires_grad", "_spec")
)


def check_gradients(params: Iterable[torch.Tensor], groups: Sequence[dict]) -> None:
    """Raise RuntimeError, naming the parameter, if a gradient is sparse, is lazily negated, or has
    another shape than the parameter.

    params: parameters of `groups`; parameters without gradient are skipped.
    """
    params = [p for p in params if p.grad is not None]
    for param, local, own in zip(params, raw_locals(map(gradient_of, params)), raw_locals(params)):
        wrong = _wrong_with(param, local, own)
        if wrong:
            raise RuntimeError(
                f"parameter {name_among(groups, param)} of shape {tuple(param.shape)} has a {wrong}"
            )


def _wrong_with(param: torch.Tensor, local: torch.Tensor, own: torch.Tensor) -> str:
    """The fault of the gradient of `param` in words; "" without fault.

    local, own: the local shards of gradient and parameter.
    """
    if param.grad.layout is not torch.strided:
        return (
            "sparse gradient, but only dense gradients are allowed: use sparse=False in "
            "nn.Embedding, or step the parameter with torch.optim.SparseAdam"
        )
    # Kernels read memory and ignore the lazy sign bit
    if local.is_neg():
        return (
            "gradient that is a lazily negated view (is_neg), whose memory has the opposite sign: "
            "replace it by p.grad.resolve_neg()"
        )
    # Shards of a mismatched gradient have other shapes: the gradient is redistributed later
    if param.grad.shape != param.shape or local.shape != own.shape and not is_mismatched(param):
        return (
            f"gradient of shape {tuple(local.shape)} on this rank, but the parameter has shape "
            f"{tuple(own.shape)} on this rank: the gradient was made before the parameter was "
            "resized or resharded; set p.grad to None and run backward again"
        )
    return ""

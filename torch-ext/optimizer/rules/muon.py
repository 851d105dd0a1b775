"""Muon's update rule (Keller Jordan, 2024; arXiv 2502.16982).

Letters: W weight, G gradient, M momentum, U update (momentum to orthogonalize), O orthogonalized
update (polar factor of U), all (R, C) for a matrix of R rows (fan out) and C columns (fan in); mu
(`momentum`), lr and weight_decay from the group.

    M <- M + (1 - mu) (G - M)                     momentum, an exponential mean
    U <- M + (1 - mu) (G - M) with nesterov       with the new M
    U <- M otherwise
    O <- polar factor of U                        a few Newton-Schulz steps approximate P Q^T
                                                  of U = P S Q^T
    W <- (1 - lr weight_decay) W - lr scale O     scale by the shape of the matrix, see `scale_of`

With momentum_form="sum" (Keller Jordan's first version, Dion, Motif), M is a sum, state
`momentum_sum`:

    M <- mu M + G
    U <- mu M + G with nesterov, else M

With constant mu since the first step, the sum is the mean / (1 - mu), and O is equal.

With momentum_form="bias_corrected" (optax.contrib.muon), M is the mean, and Nesterov's U is mixed
from M and G as means without the weight of the zero at the start. In step t = 1, 2, ...:

    U <- mu M / (1 - mu^(t + 1)) + (1 - mu) G / (1 - mu^t)

up to a positive factor of all of U, which O does not depend on: U <- M + y (G - M), with y from
`nesterov_weight`. Early steps give G more weight: in step 2 at mu = 0.95, 0.071 instead of 0.05.
Without nesterov the correction is a factor, and has no effect.

The phases of rule.py:

1. M and U: elementwise, where M is stored (kernels/elementwise/momentum.py).
2. O: on whole matrices, at the owner (newton_schulz/).
3. W: elementwise, where W is stored (kernels/elementwise/weight_update.py).

Elementwise arithmetic is in fp32, without fused multiply-adds, so an element's bits do not depend
on how a matrix is sharded. M, U and W are each rounded once. `execution/bucket_updates.py` connects
the phases. This module holds the scale, the only part of the rule that is neither a kernel nor
Newton-Schulz.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

# Allowed values of `momentum_form`; the first is the default
MOMENTUM_FORMS = ("ema", "sum", "bias_corrected")
SUM_KEY = "momentum_sum"  # state of the momentum as a sum


def is_sum(group: Mapping[str, Any]) -> bool:
    """Return whether the momentum of a group is a sum."""
    return group.get("momentum_form") == "sum"


# Key of a group: completed steps of its momentum, see `nesterov_weight`. A number of the group, and
# no state, because kernels take numbers of groups: the host counts without reading the device
STEPS_KEY = "momentum_steps"
SETTLED = 1 << 30  # in place of an unknown number of steps: the correction is over


def is_corrected(group: Mapping[str, Any]) -> bool:
    """Return whether Nesterov's mix of momentum and gradient is bias-corrected."""
    return group.get("momentum_form") == "bias_corrected"


def count_momentum(groups: Iterable[dict[str, Any]]) -> None:
    """Count a completed step in groups with the key STEPS_KEY, in place."""
    for group in groups:
        group[STEPS_KEY] = min(group[STEPS_KEY] + 1, SETTLED)


def nesterov_weight(group: Mapping[str, Any]) -> float:
    """Return the weight of G in Nesterov's U of the next step; 1 - mu without correction."""
    momentum = float(group["momentum"])
    if not is_corrected(group):
        return 1.0 - momentum
    t = group.get(STEPS_KEY, SETTLED) + 1
    of_gradient = (1.0 - momentum) / (1.0 - momentum**t)
    return of_gradient / (of_gradient + momentum / (1.0 - momentum ** (t + 1)))


# Allowed values of `rounding`, how new weights are rounded; the first is the default
ROUNDINGS = ("nearest", "stochastic")
# Keys of a group with stochastic rounding: the seed, and how many steps have drawn from it
SEED_KEY, DRAWN_KEY = "rounding_seed", "rounding_step"
MASK_64 = (1 << 64) - 1


def is_stochastic(group: Mapping[str, Any]) -> bool:
    """Return whether the weights of a group are rounded stochastically."""
    return group.get("rounding") == "stochastic"


def adopt_rounding(group: dict[str, Any], rounding: str, seed: int) -> None:
    """Add the keys of stochastic rounding to a new Muon group, in place. `rounding`, `seed`: of the
    optimizer; the group's own come first.
    """
    if rounding != ROUNDINGS[0]:
        group.setdefault("rounding", rounding)
    if is_stochastic(group):
        group.setdefault(SEED_KEY, seed)
        group.setdefault(DRAWN_KEY, 0)


def rounding_key(group: Mapping[str, Any]) -> int:
    """Return the key of the random bits of a step of a group: 64 bits, as a signed integer. A hash
    of seed and step by the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    key = _mix(_mix(int(group.get(SEED_KEY, 0))) + int(group.get(DRAWN_KEY, 0)))
    return key - (1 << 64) if key >> 63 else key


def _mix(x: int) -> int:
    """Return the next value of SplitMix64 after the state `x`."""
    x = (x + 0x9E3779B97F4A7C15) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)


def count_drawn(groups: Iterable[dict[str, Any]]) -> None:
    """Count a step of groups with stochastic rounding, in place: the next has other bits."""
    for group in groups:
        group[DRAWN_KEY] = group.get(DRAWN_KEY, 0) + 1


# Allowed values of `master_weights`. None: a weight is its parameter. "split16": an fp32 weight is
# a bf16 parameter and state REST_KEY (kernels/weights/split.py, `SplitWeights`)
MASTER_WEIGHTS = (None, "split16")
MASTER_KEY, REST_KEY = "master_weights", "weight_rest"


def is_split(group: Mapping[str, Any], param: torch.Tensor) -> bool:
    """Return whether a parameter of a group holds the upper half of its fp32 weight. Parameters in
    fp32 or fp64 stay whole.
    """
    return group.get(MASTER_KEY) is not None and param.dtype == torch.bfloat16


# A factor on the learning rate of an (R, C) matrix: a name of SCALES (None: "original"), a number
# for all shapes, or a function of (R, C)
Scale = str | float | Callable[[int, int], float] | None

# adjust_lr_fn -> scale of a whole (R, C) matrix, a factor on the learning rate
SCALES: dict[str, Callable[[int, int], float]] = {
    # Keller Jordan, torch.optim.Muon
    "original": lambda R, C: math.sqrt(max(1.0, R / C)),
    # Moonlight, arXiv 2502.16982: the RMS of scale O is 0.2, about that of AdamW, so that both
    # take one learning rate
    "match_rms_adamw": lambda R, C: 0.2 * math.sqrt(max(R, C)),
    # Dion's name of match_rms_adamw
    "rms_norm": lambda R, C: 0.2 * math.sqrt(max(R, C)),
    # Dion's default, arXiv 2310.17813
    "spectral_norm": lambda R, C: math.sqrt(R / C),
    # torch.optim.Muon's name of spectral_norm (torch 2.14)
    "spectral_unclamped": lambda R, C: math.sqrt(R / C),
    # Emerging-Optimizers' "spectral": the RMS of scale O is 1
    "sqrt_max": lambda R, C: math.sqrt(max(R, C)),
    # Emerging-Optimizers' and Megatron-LM's names of original and of spectral_norm
    "shape_scaling": lambda R, C: math.sqrt(max(1.0, R / C)),
    "unit_rms_norm": lambda R, C: math.sqrt(R / C),
}
# Names of other packages that would be misread here -> advice
AMBIGUOUS_SCALES = {
    "spectral": "Emerging-Optimizers and Megatron-LM call sqrt(max(R, C)) so, which is 'sqrt_max' "
    "here; sqrt(R / C) is 'spectral_norm'"
}


def scale_of(rows: int, cols: int, adjust_lr_fn: Scale) -> float:
    """Return the factor on the learning rate of a (rows, cols) matrix; None is "original", as in
    torch.

    A piece of a sharded matrix gets the scale of its whole matrix: the polar factor is that of the
    whole matrix, and a scale by the shape of the shard would depend on the number of ranks.
    """
    if adjust_lr_fn is None or isinstance(adjust_lr_fn, str):
        return SCALES[adjust_lr_fn or "original"](rows, cols)
    return float(adjust_lr_fn(rows, cols) if callable(adjust_lr_fn) else adjust_lr_fn)


def comparable_scale(adjust_lr_fn: Scale, shapes: Iterable[tuple[int, int]]) -> object:
    """Return `adjust_lr_fn` in a form with equal text for equal factors: in place of a function,
    its factors for `shapes`. The text of a function is an address, which differs between ranks.
    """
    if not callable(adjust_lr_fn):
        return adjust_lr_fn
    return [(*shape, scale_of(*shape, adjust_lr_fn)) for shape in sorted(set(shapes))]

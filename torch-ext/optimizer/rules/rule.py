"""Every update rule has state and up to three phases; today's rules are Muon, NorMuon and AdamW.

State, by the part of a parameter (..., R, C) that one number belongs to:

| key               | rules         | one number per | shape       | dtype                  |
|-------------------|---------------|----------------|-------------|------------------------|
| `momentum_buffer` | Muon, NorMuon | element        | (..., R, C) | `state_dtype`          |
| `momentum_sum`    | Muon, NorMuon | element        | (..., R, C) | `state_dtype`          |
| `second_moment`   | NorMuon       | row            | (..., R, 1) | fp32                   |
| `exp_avg`         | AdamW         | element        | (..., R, C) | `state_dtype`, or fp64 |
| `exp_avg_sq`      | AdamW         | element        | (..., R, C) | `state_dtype`, or fp64 |
| `step`            | AdamW         | parameter      | ()          | fp32                   |
| `initial_weight`  | all           | element        | (..., R, C) | of the weight          |

`momentum_sum` takes the place of `momentum_buffer` with `momentum_form="sum"`. Only groups with
`decay="initial"` keep `initial_weight`. `state_dtype` is fp32 or bf16; AdamW keeps the averages of
fp64 parameters in fp64. State per element and per row is sharded with the rows of the parameter;
state per parameter is equal on every rank. No rule keeps state per matrix today.

Phases, in the order of a step:

1. Elementwise, where the momentum is stored: usually at the rank that stores the shard of the
   weight, at the owner if the owner keeps the state. Input: gradient and state per element. Output:
   the update U of each element. Muon and NorMuon: kernels/elementwise/momentum.py.
2. On whole matrices, at the owner. Input: U of all pieces of a matrix, and state per row. Muon:
   Newton-Schulz (newton_schulz/). NorMuon: Newton-Schulz, then normuon.py.
3. Elementwise, where the weight is stored. Input: the result of phase 2, the weight, and the scale
   of the whole matrix. Muon and NorMuon: kernels/elementwise/weight_update.py, `muon.scale_of`.

AdamW steps weight and state in a single elementwise phase, without phase 2 (adamw.py).

A rule reads two kinds of numbers. `host_constants` are arguments of launches; a CUDA graph keeps
the values of its capture, so a change means a new capture. `device_scalars` are uploaded before a
step, so schedules may change lr, weight decay, momentum and beta2 without a new capture.

Layouts, batching, buffers, all-to-alls and overlap are the work of planning/, communication/ and
execution/: a rule works on lists of tensors and stacks of matrices, and knows no ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.elementwise.weight_update import ALL
from ..newton_schulz import coefficients
from .decay import INITIAL_KEY, form_of, rate_of
from .muon import SUM_KEY, is_sum


def device_scalars(group: Mapping[str, Any]) -> list[float]:
    """Return the numbers of a group that schedules change, for device memory in fp32:
    [lr, 1 - rate, beta2, 1 - beta2, 1 - momentum, momentum, rate, 0], with the rate of decay (lr
    weight_decay, see decay.py) and beta2 of NorMuon. AdamW reads lr, and the rate of other forms of
    decay than the default.
    """
    lr = float(group["lr"])
    rate = lr * float(group["weight_decay"]) if "decay" not in group else rate_of(group)
    beta2 = float(group.get("beta2", 0.0))
    momentum = float(group["momentum"])
    # The weight update reads from element 0, the momentum from element 4. Both addresses are
    # multiples of 16 bytes: Triton would compile each kernel anew for an unaligned pointer
    return [lr, 1.0 - rate, beta2, 1.0 - beta2, 1.0 - momentum, momentum, rate, 0.0]


class MuonConstants(NamedTuple):
    """Numbers of a Muon group that launches take as arguments from the host."""

    steps: coefficients.Steps
    eps: float
    has_row_state: bool  # NorMuon's row normalization; beta2 is on the device
    nesterov: bool
    decay: int  # form of decay of the weight update
    is_sum: bool  # the momentum is a sum


def number_of(value: object) -> float:
    """Return a number, or a tensor of one element, as a float; NaN for anything else, such as
    "1e-3" from a YAML file.
    """
    try:
        return math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def host_constants(group: Mapping[str, Any], wide: bool = False) -> tuple:
    """Return the numbers of a group that launches take as arguments from the host.

    A Muon group: `MuonConstants`. An AdamW group: (beta1, beta2, eps, weight_decay, lr or None,
    decay). A
    captured CUDA graph is valid as long as these numbers are equal. `wide`: AdamW steps in fp64, in
    which torch's fused kernel takes lr from the host only.
    """
    if group["use_muon"]:
        steps = coefficients.steps_of(group["ns_coefficients"], group["ns_steps"])
        has_row_state = "beta2" in group
        nesterov = bool(group["nesterov"])
        # Without a call for groups without these keys: each part of a bucket reads the constants
        decay = form_of(group) if "decay" in group else ALL
        rule = has_row_state, nesterov, decay, "momentum_form" in group and is_sum(group)
        return MuonConstants(steps, float(group["eps"]), *rule)
    fixed = map(float, (*group["betas"], group["eps"], group["weight_decay"]))
    return *fixed, float(group["lr"]) if wide else None, group.get("decay")


def per_row(shape: Sequence[int]) -> tuple[int, ...]:
    """Return (..., R, 1) for the shape (..., R, C)."""
    return *shape[:-1], 1


# State that is sharded by rows of the parameter
ROW_SHARDED_KEYS = (
    "momentum_buffer",
    "second_moment",
    "exp_avg",
    "exp_avg_sq",
    INITIAL_KEY,
    SUM_KEY,
)
# All keys of this optimizer in the state of a parameter. Users may keep further keys in there
STATE_KEYS = (*ROW_SHARDED_KEYS, "step")


def momentum_key(group: Mapping[str, Any]) -> str:
    """Return the key of the momentum in the state of a Muon group."""
    return SUM_KEY if is_sum(group) else "momentum_buffer"


def state_keys(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of the state that a parameter of a group has."""
    keys = (momentum_key(group), *(["second_moment"] if "beta2" in group else []))
    if not group["use_muon"]:
        keys = ("step", "exp_avg", "exp_avg_sq")
    return (*keys, INITIAL_KEY) if group.get("decay") == "initial" else keys


def state_device_and_dtype(
    key: str, param: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.device, torch.dtype]:
    """Return (device, dtype) of a parameter's state; `dtype`: the option `state_dtype`.

    `step` lies on the GPU of a parameter there, since torch's fused AdamW reads it on the device;
    otherwise on the CPU, as in torch.
    """
    # Always fp32: bf16 has too few bits for an average over 20 steps, and to count beyond 256
    if key in ("step", "second_moment"):
        on_device = param.is_cuda or key != "step"
        return param.device if on_device else torch.device("cpu"), torch.float32
    # A copy of the weight is exact only in the weight's dtype
    if key == INITIAL_KEY:
        return param.device, param.dtype
    return param.device, torch.float64 if param.dtype == torch.float64 else dtype


def state_shape(
    param: torch.Tensor, key: str, row_state_shape: Callable[[torch.Size], tuple] = per_row
) -> tuple[int, ...]:
    """Return the global shape of a parameter's state, by the table of the module.

    `row_state_shape`: shape of a parameter -> shape of its state per row, see
    `params.units.Split.row_state_shape`; by default, one number for each row of (..., R, C).
    """
    if key == "step":
        return ()
    return row_state_shape(param.shape) if key == "second_moment" else tuple(param.shape)

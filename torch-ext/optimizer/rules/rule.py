"""What every update rule has: the state that a parameter keeps, and the numbers that change from
step to step.

State is per element (`momentum_buffer`, `exp_avg`, `exp_avg_sq`), per row (`second_moment`) or per
parameter (`step`). Rules know no ranks and no buckets.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..newton_schulz import coefficients


def device_scalars(hp) -> list[float]:
    """What may be another at every step, for the device's memory in fp32: lr, 1 - lr wd; and, 16
    bytes on, 1 - mu.

    Each kernel finds its part aligned, and is compiled once.
    """
    lr = float(hp["lr"])
    return [
        lr,
        1.0 - lr * float(hp["weight_decay"]),
        0.0,
        0.0,
        1.0 - float(hp["momentum"]),
        0.0,
        0.0,
        0.0,
    ]


class MuonConstants(NamedTuple):
    """Numbers of a Muon group that launches take from the host."""

    steps: coefficients.Steps
    eps: float
    beta2: float | None  # None without NorMuon's row normalization
    nesterov: bool


def number_of(value: object) -> float:
    """The value of a number or of a tensor of one element; NaN for anything else, such as "1e-3"
    from a YAML file.
    """
    try:
        return math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def host_constants(hp: dict, wide: bool = False) -> tuple:
    """Numbers that launches of a group take from the host; a CUDA graph of these launches keeps
    them. `wide`: AdamW steps in fp64.
    """
    if hp["use_muon"]:
        steps = coefficients.steps_of(hp["ns_coefficients"], hp["ns_steps"])
        beta2 = float(hp["beta2"]) if "beta2" in hp else None
        return MuonConstants(steps, float(hp["eps"]), beta2, bool(hp["nesterov"]))
    return *map(float, (*hp["betas"], hp["eps"], hp["weight_decay"])), float(
        hp["lr"]
    ) if wide else None


# State that is cut by rows of the parameter
ROWS = ("momentum_buffer", "second_moment", "exp_avg", "exp_avg_sq")
# All that is this optimizer's; who keeps something else in the state of a parameter may
STATE_KEYS = (*ROWS, "step")


def state_keys(group) -> tuple:
    """What a parameter of a group has in its state."""
    if not group["use_muon"]:
        return ("step", "exp_avg", "exp_avg_sq")
    return ("momentum_buffer", "second_moment") if "beta2" in group else ("momentum_buffer",)


def home_of(key, param, dtype):
    """(device, dtype) of a state. Of AdamW's implementations the fused one, on GPUs, wants the
    steps there.
    """
    if key in ("step", "second_moment"):
        return param.device if param.is_cuda or key != "step" else torch.device(
            "cpu"
        ), torch.float32
    return param.device, torch.float64 if param.dtype == torch.float64 else dtype


def state_shape(param, key) -> tuple:
    """The global shape of a state: (..., R, 1) for the rows' second moments, () for the steps, else
    the parameter's.
    """
    if key == "step":
        return ()
    return (*param.shape[:-1], 1) if key == "second_moment" else tuple(param.shape)

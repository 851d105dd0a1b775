"""The update rule of Muon, NorMuon and AdamW on lists of tensors and stacks of matrices. Knows no rank and no bucket.

momentum -> orthogonalize -> (normalize) -> apply. `hp` is the live parameter group: schedules change it between
steps.
"""
from __future__ import annotations

import math

import torch
from torch.optim.adamw import adamw as torch_adamw

from . import polar
from .kernels.rows import normalize as normalize_rows

SCALES = {  # adjust_lr_fn -> factor on the learning rate of a whole (R, C) matrix
    "original": lambda R, C: math.sqrt(max(1.0, R / C)),  # Keller Jordan, torch.optim.Muon
    "match_rms_adamw": lambda R, C: 0.2 * math.sqrt(max(R, C)),  # Moonlight, arXiv 2502.16982
    "rms_norm": lambda R, C: 0.2 * math.sqrt(max(R, C)),  # the same, by Dion's name
    "spectral_norm": lambda R, C: math.sqrt(R / C),  # Dion's default, arXiv 2310.17813
}


def scale_of(matrix, adjust_lr_fn) -> float:
    """The factor on the learning rate of a piece: that of its whole matrix, never of the piece."""
    return SCALES[adjust_lr_fn or "original"](matrix.rows, matrix.cols)


def numbers_of(hp) -> list[float]:
    """What may be another at every step, for the device's memory in fp32: lr, 1 - lr wd; and, 16 bytes on, 1 - mu.

    Each kernel finds its part aligned, and is compiled once.
    """
    lr = float(hp["lr"])
    return [lr, 1.0 - lr * float(hp["weight_decay"]), 0.0, 0.0, 1.0 - float(hp["momentum"]), 0.0, 0.0, 0.0]


def baked(hp, wide=False) -> tuple:
    """What launches of a group take from the host, and a CUDA graph of them keeps. `wide`: AdamW steps in fp64."""
    if hp["use_muon"]:
        steps = polar.steps_of(hp["ns_coefficients"], hp["ns_steps"])
        return steps, hp["eps"], hp.get("beta2"), bool(hp["nesterov"])
    return tuple(hp["betas"]), hp["eps"], float(hp["weight_decay"]), float(hp["lr"]) if wide else None


def momentum(pack, gradients, numbers, hp) -> None:
    """M <- mu M + (1 - mu) G and U <- (1 - mu) G + mu M (Nesterov) or M, for all pieces of a bound `pack`."""
    pack(*gradients, numbers[4:5], hp["nesterov"])


def orthogonalize(stacks, hp, dtype, memory=(None, None)) -> None:
    """Replace each (R, C) matrix of each stack (N, R, C) by its polar factor, as the coefficients approximate it.

    `memory`: see `polar.orthogonalize_`.
    """
    steps = polar.steps_of(hp["ns_coefficients"], hp["ns_steps"])
    polar.orthogonalize_(stacks, steps, hp["eps"], dtype, memory)


def normalize(stacks, rows, hp) -> None:
    """NorMuon (arXiv 2510.05491): divide each row by the root of its mean square over time; keep the Frobenius norm.

    A group without `beta2` is plain Muon's.
    """
    for U, V in zip(stacks, rows if "beta2" in hp else ()):
        normalize_rows(U, V, hp["beta2"], 1e-8)


def apply(update, numbers) -> None:
    """W <- (1 - lr wd) W - lr s U for all pieces of a bound `update`."""
    update(numbers[:2])


def adamw_unless(flags, W, G, states, hp, numbers) -> None:
    """AdamW parameter by parameter; one whose flag is set keeps its weight and state. The rest as `adamw` takes it."""
    for flag, w, g, *own in zip(flags, W, G, *states):
        old = [t.clone() for t in (w, *own)]
        adamw([w], [g], [[t] for t in own], hp, numbers)
        for now, then in zip((w, *own), old):
            now.copy_(torch.where((flag > 0).to(now.device), then, now))


def adamw(W, G, states, hp, numbers) -> None:
    """AdamW (arXiv 1711.05101) in place, through torch's fused or foreach kernels, in the wider dtype of
    each weight and its state: rounded to bf16, a weight would not notice a small step.

    `states`: exp_avg, exp_avg_sq and step of each. The fused kernel wants W, G and the first two alike in dtype and
    strides: what lies otherwise in memory is stepped as a copy. It reads lr from the device, in fp32; in fp64 it does
    not.
    """
    if not W:
        return
    exp_avgs, exp_avg_sqs, steps = states
    wide = [torch.promote_types(w.dtype, state.dtype) for w, state in zip(W, exp_avgs)]
    alike = [[_like(*three) for three in zip(tensors, exp_avgs, wide)]
             for tensors in (W, G, exp_avgs, exp_avg_sqs)]
    fused, narrow = W[0].is_cuda, exp_avgs[0].dtype != torch.float64
    torch_adamw(*alike, [], steps, foreach=not fused, fused=fused,
                amsgrad=False, beta1=hp["betas"][0], beta2=hp["betas"][1],
                lr=numbers[0] if fused and narrow else float(hp["lr"]),
                weight_decay=float(hp["weight_decay"]), eps=hp["eps"], maximize=False)
    copied = [pair for pair in zip([*W, *exp_avgs, *exp_avg_sqs], [*alike[0], *alike[2], *alike[3]])
              if pair[0] is not pair[1]]
    if copied:
        torch._foreach_copy_(*map(list, zip(*copied)))


def count(steps, flags=None) -> None:
    """AdamW's count of steps, where another rank keeps all else of a parameter: its state is true on every rank.

    `flags`: as in `adamw_unless`; what is left alone is not counted.
    """
    if flags is not None:
        for step, flag in zip(steps, flags):
            step.add_((flag == 0).to(step))
    elif steps:
        torch._foreach_add_(steps, 1)


def _like(tensor, pattern, dtype):
    if tensor.dtype == dtype and tensor.stride() == pattern.stride():
        return tensor
    return torch.empty_like(pattern, dtype=dtype).copy_(tensor)

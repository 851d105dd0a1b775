"""The update rule of Muon, NorMuon and AdamW on lists of tensors and stacks of matrices. Knows no rank and no bucket.

momentum -> orthogonalize -> (normalize) -> apply. `hp` is the live parameter group: schedules change it between
steps.
"""
from __future__ import annotations

import itertools
import math
from operator import attrgetter

import torch
from torch.optim.adamw import adamw as torch_adamw

from . import polar
from .kernels.rows import normalize as normalize_rows

_dtype = attrgetter("dtype")
COPIED = 1 << 24  # elements of which AdamW has copies in another dtype at a time
SCALES = {  # adjust_lr_fn -> factor on the learning rate of a whole (R, C) matrix
    "original": lambda R, C: math.sqrt(max(1.0, R / C)),  # Keller Jordan, torch.optim.Muon
    "match_rms_adamw": lambda R, C: 0.2 * math.sqrt(max(R, C)),  # Moonlight, arXiv 2502.16982
    "rms_norm": lambda R, C: 0.2 * math.sqrt(max(R, C)),  # the same, by Dion's name
    "spectral_norm": lambda R, C: math.sqrt(R / C),  # Dion's default, arXiv 2310.17813
    "spectral_unclamped": lambda R, C: math.sqrt(R / C),  # the same, by torch.optim.Muon's name (torch 2.14)
    "sqrt_max": lambda R, C: math.sqrt(max(R, C)),  # Emerging-Optimizers' "spectral": an update's RMS is 1
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
        return steps, float(hp["eps"]), float(hp.get("beta2", 0)), bool(hp["nesterov"])
    return *map(float, (*hp["betas"], hp["eps"], hp["weight_decay"])), float(hp["lr"]) if wide else None


def momentum(pack, gradients, numbers, hp, moves=True) -> None:
    """M <- mu M + (1 - mu) G and U <- (1 - mu) G + mu M (Nesterov) or M, for all pieces of a bound `pack`. Without
    `moves`, M stays until `apply`.
    """
    pack(*gradients, numbers[4:5], bool(hp["nesterov"]), moves)


def orthogonalize(stacks, hp, dtype, memory=None, into=None) -> None:
    """Replace each (R, C) matrix of each stack (N, R, C) by its polar factor, as the coefficients approximate it.

    `memory`, `into`: see `polar.orthogonalize_`.
    """
    steps = polar.steps_of(hp["ns_coefficients"], hp["ns_steps"])
    polar.orthogonalize_(stacks, steps, float(hp["eps"]), dtype, memory, into)


def normalize(stacks, rows, hp) -> None:
    """NorMuon (arXiv 2510.05491): divide each row by the root of its mean square over time; keep the Frobenius norm.

    A group without `beta2` is plain Muon's.
    """
    for U, V in zip(stacks, rows if "beta2" in hp else ()):
        normalize_rows(U, V, float(hp["beta2"]), 1e-8)


def apply(update, numbers, gradients=((), None), moves=True) -> None:
    """W <- (1 - lr wd) W - lr s U for all pieces of a bound `update`, and M as in `momentum` of those bound with it.
    Without `moves`, M has changed before.
    """
    update(numbers[:2], *gradients, numbers[4:5], moves)


def adamw_unless(flags, W, G, states, hp, numbers) -> None:
    """AdamW parameter by parameter; one whose flag is set keeps its weight and state. None: as `adamw`, which says
    what the rest is.
    """
    if flags is None:
        return adamw(W, G, states, hp, numbers)
    for flag, w, g, *own in zip(flags, W, G, *states):
        old = [t.clone() for t in (w, *own)]
        adamw([w], [g], [[t] for t in own], hp, numbers)
        for now, then in zip((w, *own), old):
            now.copy_(torch.where((flag > 0).to(now.device), then, now))


def adamw(W, G, states, hp, numbers) -> None:
    """AdamW (arXiv 1711.05101) in place, through torch's fused or foreach kernels, in the wider dtype of each weight
    and its state: rounded to bf16, a weight would not notice a small step.

    `states`: exp_avg, exp_avg_sq and step of each. The fused kernel wants W, G and the first two alike in dtype and
    strides: what lies otherwise in memory is stepped as a copy, COPIED elements at a time.
    """
    straight, others = list(zip(W, G, *states)), []
    if not _all_fit(W, G, *states[:2]):
        members, straight = straight, []
        for w, g, m, v, step in members:
            (straight if all(_fits(t, w, m) for t in (w, g, m, v)) else others).append((w, g, m, v, step))
    if straight:
        _fused(straight, hp, numbers)
    for part in _in_parts(others):
        copies = [_copied(*member[:4]) for member in part]
        _fused([(*four, member[4]) for four, member in zip(copies, part)], hp, numbers)
        pairs = [(member[i], four[i]) for four, member in zip(copies, part) for i in (0, 2, 3)]
        if pairs := [pair for pair in pairs if pair[0] is not pair[1]]:
            torch._foreach_copy_(*map(list, zip(*pairs)))


def _fused(members, hp, numbers):
    """The fused kernel reads lr from the device, in fp32; in fp64 it does not."""
    W, G, exp_avgs, exp_avg_sqs, steps = map(list, zip(*members))
    fused, narrow = W[0].is_cuda, exp_avgs[0].dtype != torch.float64
    beta1, beta2, eps = map(float, (*hp["betas"], hp["eps"]))
    torch_adamw(W, G, exp_avgs, exp_avg_sqs, [], steps, foreach=not fused, fused=fused,
                amsgrad=False, beta1=beta1, beta2=beta2,
                lr=numbers[0] if fused and narrow else float(hp["lr"]),
                weight_decay=float(hp["weight_decay"]), eps=eps, maximize=False)


def _fits(tensor, w, m) -> bool:
    return tensor.dtype == torch.promote_types(w.dtype, m.dtype) and tensor.stride() == m.stride()


def _all_fit(*lists) -> bool:
    """Whether all have one dtype and strides, as is usual: without Python for each of them."""
    strides = [list(map(torch.Tensor.stride, tensors)) for tensors in lists]
    return len(set(map(_dtype, itertools.chain(*lists)))) == 1 and strides.count(strides[0]) == len(strides)


def _copied(w, g, m, v) -> list:
    """Those that are as they should be, and copies of the others."""
    wide = torch.promote_types(w.dtype, m.dtype)
    return [t if _fits(t, w, m) else torch.empty_like(m, dtype=wide).copy_(t) for t in (w, g, m, v)]


def _in_parts(members):
    """Lists of at most COPIED elements, but for what cannot be cut."""
    part, numel = [], 0
    for piece in (piece for member in members for piece in _pieces(*member)):
        if part and numel + piece[0].numel() > COPIED:
            yield part
            part, numel = [], 0
        part.append(piece)
        numel += piece[0].numel()
    if part:
        yield part


def _pieces(*member):
    """A parameter in pieces, each with a count of steps of its own; they count along."""
    *tensors, step = member
    if tensors[0].numel() <= COPIED or not all(t.is_contiguous() for t in tensors):
        return [member]
    flat = zip(*(t.view(-1).split(COPIED) for t in tensors))
    return [(*four, step.clone() if number else step) for number, four in enumerate(flat)]


def count(steps, flags=None) -> None:
    """AdamW's count of steps, where another rank keeps all else of a parameter: its state is true on every rank.

    `flags`: as in `adamw_unless`; what is left alone is not counted.
    """
    if flags is not None:
        for step, flag in zip(steps, flags):
            step.add_((flag == 0).to(step))
    elif steps:
        torch._foreach_add_(steps, 1)

"""AdamW (arXiv 1711.05101) on lists of tensors, through torch's fused or foreach kernels."""

from __future__ import annotations

import itertools
from operator import attrgetter

import torch
from torch.optim.adamw import adamw as torch_adamw

_dtype = attrgetter("dtype")
MAX_COPIED_ELEMENTS = 1 << 24  # elements of which AdamW has copies in another dtype at a time


def adamw_skipping_flagged(flags, W, G, states, hp, numbers) -> None:
    """AdamW parameter by parameter; one whose flag is set keeps its weight and state. None: as
    `adamw`, which says what the rest is.
    """
    if flags is None:
        return adamw(W, G, states, hp, numbers)
    for flag, w, g, *own in zip(flags, W, G, *states):
        old = [t.clone() for t in (w, *own)]
        adamw([w], [g], [[t] for t in own], hp, numbers)
        for now, then in zip((w, *own), old):
            now.copy_(torch.where((flag > 0).to(now.device), then, now))


def adamw(W, G, states, hp, numbers) -> None:
    """AdamW (arXiv 1711.05101) in place, through torch's fused or foreach kernels, in the wider
    dtype of each weight and its state: rounded to bf16, a weight would not notice a small step.

    `states`: exp_avg, exp_avg_sq and step of each. The fused kernel wants W, G and the first two
    alike in dtype and strides: what lies otherwise in memory is stepped as a copy, MAX_COPIED_ELEMENTS elements
    at a time.
    """
    straight, others = list(zip(W, G, *states)), []
    if not _all_fit(W, G, *states[:2]):
        members, straight = straight, []
        for w, g, m, v, step in members:
            (straight if all(_fits(t, w, m) for t in (w, g, m, v)) else others).append(
                (w, g, m, v, step)
            )
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
    torch_adamw(
        W,
        G,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        foreach=not fused,
        fused=fused,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=numbers[0] if fused and narrow else float(hp["lr"]),
        weight_decay=float(hp["weight_decay"]),
        eps=eps,
        maximize=False,
    )


def _fits(tensor, w, m) -> bool:
    return tensor.dtype == torch.promote_types(w.dtype, m.dtype) and tensor.stride() == m.stride()


def _all_fit(*lists) -> bool:
    """Whether all have one dtype and strides, as is usual: without Python for each of them."""
    strides = [list(map(torch.Tensor.stride, tensors)) for tensors in lists]
    return len(set(map(_dtype, itertools.chain(*lists)))) == 1 and strides.count(strides[0]) == len(
        strides
    )


def _copied(w, g, m, v) -> list:
    """Those that are as they should be, and copies of the others."""
    wide = torch.promote_types(w.dtype, m.dtype)
    return [t if _fits(t, w, m) else torch.empty_like(m, dtype=wide).copy_(t) for t in (w, g, m, v)]


def _in_parts(members):
    """Lists of at most MAX_COPIED_ELEMENTS elements, but for what cannot be cut."""
    part, numel = [], 0
    for piece in (piece for member in members for piece in _pieces(*member)):
        if part and numel + piece[0].numel() > MAX_COPIED_ELEMENTS:
            yield part
            part, numel = [], 0
        part.append(piece)
        numel += piece[0].numel()
    if part:
        yield part


def _pieces(*member):
    """A parameter in pieces, each with a count of steps of its own; they count along."""
    *tensors, step = member
    if tensors[0].numel() <= MAX_COPIED_ELEMENTS or not all(t.is_contiguous() for t in tensors):
        return [member]
    flat = zip(*(t.view(-1).split(MAX_COPIED_ELEMENTS) for t in tensors))
    return [(*four, step.clone() if number else step) for number, four in enumerate(flat)]


def count_steps(steps, flags=None) -> None:
    """AdamW's count of steps, where another rank keeps all else of a parameter: its state is true
    on every rank.

    `flags`: as in `adamw_skipping_flagged`; what is left alone is not counted.
    """
    if flags is not None:
        for step, flag in zip(steps, flags):
            step.add_((flag == 0).to(step))
    elif steps:
        torch._foreach_add_(steps, 1)

"""AdamW (arXiv 1711.05101) on lists of tensors, through torch's fused or foreach kernels.

For each element, with t the count of steps (state `step`):

    m <- beta1 m + (1 - beta1) G,   v <- beta2 v + (1 - beta2) G^2       exp_avg, exp_avg_sq
    W <- (1 - lr weight_decay) W - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

A single elementwise phase: every rank steps the elements that it stores. Other forms of weight
decay than `decoupled` (decay.py) run beside torch's kernel, as foreach operations; the update has
the sign of the new m.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.optim.adamw import adamw as torch_adamw

from ..kernels.elementwise.weight_update import CAUTIOUS, RATE, TO_INITIAL
from .decay import DECOUPLED, INITIAL_KEY, form_of, rate_of

Tensors = Sequence[torch.Tensor]
# (weight, gradient, exp_avg, exp_avg_sq, step) of one parameter, or of a piece of one; with
# decay="initial" also the initial weight
Member = tuple[torch.Tensor, ...]

_dtype = attrgetter("dtype")
# Elements of tensors that are stepped as copies at a time; bounds the memory of the copies
MAX_COPIED_ELEMENTS = 1 << 24


def state_keys_of(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of state that a step reads, in the order of `states` of `adamw`."""
    keys = ("exp_avg", "exp_avg_sq", "step")
    return (*keys, INITIAL_KEY) if form_of(group) == TO_INITIAL else keys


def adamw_skipping_flagged(
    flags: Tensors | None,
    W: Tensors,
    G: Tensors,
    states: Sequence[Tensors],
    group: Mapping[str, Any],
    scalars: torch.Tensor | None,
) -> None:
    """Compute `adamw`, but keep weight and state of each parameter with a flag above 0.

    `flags`: a number on the device per parameter (non-finite gradients), or None for plain `adamw`.
    The host never reads a flag: parameters are stepped one at a time, and old values copied back.
    """
    if flags is None:
        return adamw(W, G, states, group, scalars)
    for flag, w, g, *own in zip(flags, W, G, *states):
        old = [t.clone() for t in (w, *own)]
        adamw([w], [g], [[t] for t in own], group, scalars)
        # Selected on the device; the flag goes to the CPU only for state that lies there
        for new, before in zip((w, *own), old):
            new.copy_(torch.where((flag > 0).to(new.device), before, new))


def adamw(
    W: Tensors,
    G: Tensors,
    states: Sequence[Tensors],
    group: Mapping[str, Any],
    scalars: torch.Tensor | None,
) -> None:
    """Step weights and state in place, in the wider dtype of each weight and its averages: rounded
    to bf16, a weight would lose a small step.

    `W`, `G`: weights and gradients, of equal shapes. `states`: lists of exp_avg, exp_avg_sq and
    step, and of the initial weights with decay="initial". `scalars`: `device_scalars` in fp32 on
    the device; read on GPUs only.

    The fused kernel wants weight, gradient and averages alike in dtype and strides. Parameters that
    differ are stepped as copies, at most MAX_COPIED_ELEMENTS elements at a time.
    """
    straight = list(zip(W, G, *states))
    copied = []
    if not _all_fit(W, G, *states[:2]):
        members, straight = straight, []
        for member in members:
            w, _, m, *_ = member
            fits = all(_fits(t, w, m) for t in member[:4])
            (straight if fits else copied).append(member)
    # Decay beside the kernel needs copies, too
    is_beside = group.get("decay", DECOUPLED) != DECOUPLED
    for part in _in_parts(straight) if is_beside else [straight] if straight else ():
        _fused(part, group, scalars)
    for part in _in_parts(copied):
        copies = [_copied(*member[:4]) for member in part]
        _fused([(*four, *member[4:]) for four, member in zip(copies, part)], group, scalars)
        # Back to weight, exp_avg and exp_avg_sq; the gradient has not changed
        pairs = [(member[i], four[i]) for four, member in zip(copies, part) for i in (0, 2, 3)]
        if pairs := [pair for pair in pairs if pair[0] is not pair[1]]:
            torch._foreach_copy_(*map(list, zip(*pairs)))


def _fused(
    members: Sequence[Member], group: Mapping[str, Any], scalars: torch.Tensor | None
) -> None:
    """Step members of uniform dtype and strides: torch's fused kernel on GPUs, else foreach."""
    W, G, exp_avgs, exp_avg_sqs, steps, *initial = map(list, zip(*members))
    fused = W[0].is_cuda
    # The fused kernel reads lr from device memory in fp32, so a schedule needs no new CUDA graph.
    # In fp64 lr comes from the host, unrounded, and is among `host_constants`
    narrow = exp_avgs[0].dtype != torch.float64
    beta1, beta2, eps = map(float, (*group["betas"], group["eps"]))
    weight_decay = float(group["weight_decay"])
    old = []
    if weight_decay and group.get("decay", DECOUPLED) != DECOUPLED:
        weight_decay = 0.0
        rate = scalars[RATE] if fused and narrow else rate_of(group)
        if form_of(group) == CAUTIOUS:
            old = [w.clone() for w in W]
        else:
            towards = initial[0] if form_of(group) == TO_INITIAL else None
            _decay(W, rate, towards)
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
        lr=scalars[0] if fused and narrow else float(group["lr"]),
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
    if old:
        # The signs of the update are those of the new exp_avg. 0 where the two are opposite, else 1
        keeps = torch._foreach_mul(torch._foreach_sign(old), torch._foreach_sign(exp_avgs))
        torch._foreach_add_(keeps, 1.0)
        torch._foreach_clamp_max_(keeps, 1.0)
        torch._foreach_mul_(keeps, old)
        torch._foreach_mul_(keeps, rate)
        torch._foreach_sub_(W, keeps)


def _decay(
    W: Sequence[torch.Tensor], rate: torch.Tensor | float, towards: Sequence[torch.Tensor] | None
) -> None:
    """Compute W - rate (W - towards) in place; `towards` None: zeros. `towards` may have other
    dtypes and strides.
    """
    difference = W if towards is None else torch._foreach_sub(W, towards)
    torch._foreach_sub_(W, torch._foreach_mul(difference, rate))


def _fits(tensor: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> bool:
    """Whether a tensor of a parameter with weight w and exp_avg m needs no copy."""
    return tensor.dtype == torch.promote_types(w.dtype, m.dtype) and tensor.stride() == m.stride()


def _all_fit(*lists: Tensors) -> bool:
    """Whether no tensor needs a copy, decided without a Python loop over parameters: all dtypes are
    equal, and the strides of each parameter's tensors. The usual case.
    """
    # `map`, `set` and `count` loop in C
    strides = [list(map(torch.Tensor.stride, tensors)) for tensors in lists]
    return len(set(map(_dtype, itertools.chain(*lists)))) == 1 and strides.count(strides[0]) == len(
        strides
    )


def _copied(
    w: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> list[torch.Tensor]:
    """Return w, g, m and v in the wider dtype and the strides of m; copies only where `_fits` is
    false.
    """
    wide = torch.promote_types(w.dtype, m.dtype)
    return [t if _fits(t, w, m) else torch.empty_like(m, dtype=wide).copy_(t) for t in (w, g, m, v)]


def _in_parts(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Yield lists of members, or pieces of members, with at most MAX_COPIED_ELEMENTS elements. A
    large member that cannot be cut makes a list by itself.
    """
    part = []
    numel = 0
    for piece in (piece for member in members for piece in _pieces(*member)):
        if part and numel + piece[0].numel() > MAX_COPIED_ELEMENTS:
            yield part
            part = []
            numel = 0
        part.append(piece)
        numel += piece[0].numel()
    if part:
        yield part


def _pieces(*member: torch.Tensor) -> list[Member]:
    """Cut a large contiguous member into flat pieces of MAX_COPIED_ELEMENTS elements.

    The first piece has the parameter's own `step`, the further pieces have clones of the old count,
    since torch's AdamW increments `step` for every piece.
    """
    tensors, step, more = member[:4], member[4], member[5:]
    if tensors[0].numel() <= MAX_COPIED_ELEMENTS or not all(
        t.is_contiguous() for t in (*tensors, *more)
    ):
        return [member]
    flat = zip(*(t.view(-1).split(MAX_COPIED_ELEMENTS) for t in (*tensors, *more)))
    return [
        (*pieces[:4], step.clone() if number else step, *pieces[4:])
        for number, pieces in enumerate(flat)
    ]


def count_steps(steps: Tensors, flags: Tensors | None = None) -> None:
    """Increment AdamW's `step` of parameters that other ranks step: `step` is equal on every rank,
    also where no rows of a parameter are stored.

    `flags`: as in `adamw_skipping_flagged`; the step of a flagged parameter is not counted.
    """
    if flags is not None:
        for step, flag in zip(steps, flags):
            step.add_((flag == 0).to(step))
    elif steps:
        torch._foreach_add_(steps, 1)

"""What a step depends on besides numbers: while it stays the same, nothing is planned or bound anew.

Decides what has to be looked at in every step, cheaply, and what more closely where that has changed. Knows neither
plans nor what is bound.
"""
from __future__ import annotations

import itertools
import operator
from operator import attrgetter, itemgetter

import torch

from .freight import ALIGNMENT
from .layout import local_of, placements_of, raw_locals

gradient_of, _dtype, _requires_grad = map(attrgetter, ("grad", "dtype", "requires_grad"))
_params = itemgetter("params")
FIXED = "use_muon", "adjust_lr_fn", "ns_coefficients", "ns_steps", "eps", "betas"  # numbers that no schedule changes


def glance(groups, state, *more):
    """What a step depends on besides numbers, and `more`, as cheaply as it can be had: if it equals the last step's,
    nothing has to be planned or bound anew. Equals nothing where a closer look is due (a gradient that is sparse or
    lazily negated, a state of somebody else's that is no tensor). One list for each attribute, which is cheaper than
    one tuple for each parameter.
    """
    params = list(itertools.chain.from_iterable(map(_params, groups)))
    whole = list(map(gradient_of, params))
    gradients = raw_locals(whole)
    missing = missing_from(gradients)
    weights = raw_locals(params) if missing else ()
    for i in missing:
        gradients[i] = weights[i]
    try:
        if any(map(torch.Tensor.is_neg, gradients)):
            return object()
        forms = [list(map(look, gradients)) for look in (_dtype, torch.Tensor.stride)]
        odd = list(map(operator.mod, map(torch.Tensor.data_ptr, gradients), itertools.repeat(ALIGNMENT)))
        return (at_rest(groups, state), forms, odd, missing, placements_of(whole),
                [gradient_dtype(params[i]) for i in missing], more)
    except (AttributeError, RuntimeError, TypeError):  # no addresses, no strides
        return object()


def missing_from(gradients) -> list[int]:
    """The numbers of those that are None; without Python for each of them where all are there."""
    return [i for i, g in enumerate(gradients) if g is None] if type(None) in set(map(type, gradients)) else []


def at_rest(groups, state):
    """The part of a glance that is there without gradients: parameters, what no schedule changes, where they lie."""
    params = list(itertools.chain.from_iterable(map(_params, groups)))
    try:
        held = raw_locals(params) + raw_locals(itertools.chain.from_iterable(map(dict.values, state.values())))
        return ([(len(group["params"]), *map(group.get, FIXED)) for group in groups],
                list(map(id, params)), list(map(_requires_grad, params)), list(map(torch.Tensor.data_ptr, held)))
    except (AttributeError, RuntimeError, TypeError):
        return object()


def memory_key(params, state):
    """What bound views and launches depend on: where parameters and state lie, and how the gradients are laid out. A
    missing gradient changes nothing: other ranks, which may have it, do not bind anew either.
    """
    gradients = [p.grad for p in params]
    there = [g for g in gradients if g is not None]
    check_dense(there)
    forms = map(form_of_gradient, raw_locals(there))
    return ([t.data_ptr() for t in raw_locals(t for p in params for t in (p, *state[p].values()))],
            [next(forms) if g is not None else form_of_zeros(p) for p, g in zip(params, gradients)],
            placements_of(p if g is None else g for p, g in zip(params, gradients)))


def form_of_gradient(local):
    """(dtype, stride, bytes beyond alignment) of this rank's part of a gradient."""
    return local.dtype, local.stride(), local.data_ptr() % ALIGNMENT


def in_form(gradient, form):
    """A copy of a gradient in the form of another. RuntimeError where the dtype does not hold its numbers."""
    dtype, stride, odd = form
    if torch.promote_types(gradient.dtype, dtype) != dtype:
        raise RuntimeError(f"a gradient of shape {tuple(gradient.shape)} came in {gradient.dtype}, after buckets had "
                           f"left during backward; in the steps before it came in {dtype}. Load a checkpoint, and take "
                           "a step without last_backward() when dtypes change")
    extent = 1 + sum((size - 1) * step for size, step in zip(gradient.shape, stride)) if gradient.numel() else 0
    flat = torch.empty(extent + odd // dtype.itemsize, dtype=dtype, device=gradient.device)
    return flat.as_strided(gradient.shape, stride, odd // dtype.itemsize).copy_(gradient)


def check_dense(gradients) -> None:
    """Raise RuntimeError if one of them is sparse, or if its memory holds the numbers with the other sign."""
    for grad, local in zip(gradients, raw_locals(gradients)):
        what = f"a parameter of shape {tuple(grad.shape)} has a"
        if grad.layout is not torch.strided:
            raise RuntimeError(f"{what} sparse gradient; Muon and its AdamW take dense ones: use sparse=False in "
                               "nn.Embedding, or torch.optim.SparseAdam for it")
        if local.is_neg():
            raise RuntimeError(f"{what} gradient that is a lazily negated view (is_neg), whose memory has the other "
                               "sign: put p.grad.resolve_neg() in its place")


def gradient_dtype(param):
    """The dtype in which all ranks exchange the gradient of a parameter, whether or not they have one."""
    dtype = getattr(param, "grad_dtype", param.dtype)  # torch before 2.10 has no such attribute; None: any dtype
    return dtype or torch.promote_types(param.dtype, torch.float32)


def form_of_zeros(param):
    """The form of what stands for a missing gradient."""
    return gradient_dtype(param), local_of(param).stride(), 0

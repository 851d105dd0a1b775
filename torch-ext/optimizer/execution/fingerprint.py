"""Fingerprint of everything that bound views and CUDA graphs depend on, besides scalars.

While it stays equal, a step plans and binds nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from operator import itemgetter

import torch

from ..params.dtensor import gradient_dtype, local_of, placements_of, raw_locals
from ..params.validation import _dtype, _requires_grad, _spec, check_gradients, gradient_of
from ..planning.memory_model import ALIGNMENT

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # no part of torch's interface: without it looks take longer
    TensorGuards = None
_params = itemgetter("params")
# Numbers that no schedule changes
FIXED = "use_muon", "adjust_lr_fn", "ns_steps", "eps"


def fingerprint(groups, state, *more):
    """What a step depends on besides numbers, and `more`, as cheaply as it can be had: if it equals
    the last step's, nothing has to be planned or bound anew. Equals nothing where a closer look is
    due (a gradient that is sparse or lazily negated, a state of somebody else's that is no tensor).
    One list for each attribute, which is cheaper than one tuple for each parameter.
    """
    params = _params_of(groups)
    whole = list(map(gradient_of, params))
    gradients = raw_locals(whole)
    missing = missing_from(gradients)
    weights = raw_locals(params) if missing else ()
    for i in missing:
        gradients[i] = weights[i]
    try:
        if any(map(torch.Tensor.is_neg, gradients)):
            return object()
        forms = [
            list(map(look, gradients)) for look in (_dtype, torch.Tensor.size, torch.Tensor.stride)
        ]
        return (
            static_fingerprint(groups, state),
            forms,
            _odd(gradients),
            missing,
            placements_of(whole),
            [gradient_dtype(params[i]) for i in missing],
            more,
        )
    except (AttributeError, RuntimeError, TypeError):  # no addresses, no strides
        return object()


class StepFingerprint:
    """What `fingerprint` saw, and a quicker look whether it is so again: at every step Python takes
    longer for that than a GPU for some models. It sees a change wherever `fingerprint` sees one.
    The guards are those by which compiled code knows tensors: types, dtypes, shapes, strides, what
    is lazy or sparse, and whether gradients are wanted.
    """

    def __init__(self, groups, state, *more):
        self.seen, self.gradients, self.has_fast_check = (
            fingerprint(groups, state, *more),
            None,
            False,
        )
        self.params = _params_of(groups)
        whole = list(map(gradient_of, self.params))
        known = (
            isinstance(self.seen, tuple) and isinstance(self.seen[0], tuple) and not self.seen[3]
        )
        if TensorGuards is None or not known or len(set(map(type, whole))) != 1:
            return
        self.values = _values_of(state)
        gradients, held = raw_locals(whole), self.params + self.values
        local = raw_locals(held)
        self.numbers, self.more, self.odd, self.placements = (
            _numbers(groups),
            more,
            *self.seen[2:5:2],
        )
        self.kind, self.specs = type(whole[0]), list(map(_spec, whole)) if self.placements else []
        self.plain, self.places = _same(local, held), list(map(torch.Tensor.data_ptr, local))
        with torch.enable_grad():  # else guards do not see who wants gradients
            self.guards = [
                TensorGuards(*ts, dynamic_dims_sizes=None, dynamic_dims_strides=None)
                for ts in (held, gradients, local)[: 2 if self.plain else 3]
            ]
            self.has_fast_check = self._guarded(held, gradients, local)

    def is_current(self, groups, state, *more) -> bool:
        """Whether nothing that a step depends on has changed."""
        self.gradients = None  # should the step before have failed
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):  # as in a glance
            if self.has_fast_check and self._fast_check(groups, state, more):
                return True
        # What is no number may be anything: it is refused next
        with contextlib.suppress(RuntimeError):
            return fingerprint(groups, state, *more) == self.seen
        return False

    def is_static_current(self, groups, state) -> bool:
        """The same without gradients, where it is known."""
        return isinstance(self.seen, tuple) and static_fingerprint(groups, state) == self.seen[0]

    def pop_gradients(self) -> dict:
        """{parameter's id: its gradient here} as the quick look just saw them, once; empty where it
        did not.
        """
        came, self.gradients = self.gradients, None
        return {} if came is None else dict(zip(map(id, self.params), came))

    def _fast_check(self, groups, state, more) -> bool:
        params, values = _params_of(groups), _values_of(state)
        if not (
            _same(params, self.params)
            and _same(values, self.values)
            and more == self.more
            and _numbers(groups) == self.numbers
        ):
            return False
        whole, held = list(map(gradient_of, params)), params + values
        if set(map(type, whole)) != {self.kind}:
            return False
        gradients, specs = (
            _locals(whole, not self.placements),
            list(map(_spec, whole)) if self.placements else [],
        )
        local = _locals(held, self.plain)
        with torch.enable_grad():
            if not self._guarded(held, gradients, local):
                return False
        if not (
            (_same(specs, self.specs) or placements_of(whole) == self.placements)
            and _odd(gradients) == self.odd
            and list(map(torch.Tensor.data_ptr, local)) == self.places
        ):
            return False
        self.gradients = gradients
        return True

    def _guarded(self, *lists) -> bool:
        """Where nothing is a DTensor, what is held and the local part of it are the same, and
        looked at once.
        """
        for guard, tensors in zip(self.guards, lists):
            if not guard.check(*tensors):
                return False
        return True


def _locals(tensors, plain) -> list:
    """`raw_locals` of DTensors and others, or of `plain` ones only."""
    return (
        tensors
        if plain
        else list(map(getattr, tensors, itertools.repeat("_local_tensor"), tensors))
    )


def _same(ours, theirs) -> bool:
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


def _params_of(groups) -> list:
    return list(itertools.chain.from_iterable(map(_params, groups)))


def _values_of(state) -> list:
    return list(itertools.chain.from_iterable(map(dict.values, state.values())))


def _numbers(groups) -> list:
    """Of each group the numbers that no schedule changes. Of betas only beta2: beta1 may change at
    every step (schedules.py).
    """
    found = []
    for group in groups:
        coefficients = group.get("ns_coefficients")
        betas = group.get("betas")
        found.append(
            (
                id(group),
                len(group["params"]),
                *map(group.get, FIXED),
                coefficients if type(coefficients) is str else _kept(coefficients),
                tuple(betas[1:]) if isinstance(betas, (tuple, list)) else betas,
            )
        )
    return found


def _kept(value):
    """A list may change in place: what it holds is kept instead."""
    return tuple(map(_kept, value)) if isinstance(value, (list, tuple)) else value


def _odd(gradients) -> list:
    return list(
        map(operator.mod, map(torch.Tensor.data_ptr, gradients), itertools.repeat(ALIGNMENT))
    )


def missing_from(gradients) -> list[int]:
    """The numbers of those that are None; without Python for each of them where all are there."""
    return (
        [i for i, g in enumerate(gradients) if g is None]
        if type(None) in set(map(type, gradients))
        else []
    )


def static_fingerprint(groups, state):
    """The part of a glance that is there without gradients: parameters, what no schedule changes,
    where they lie.
    """
    params = _params_of(groups)
    try:
        held = raw_locals(params) + raw_locals(_values_of(state))
        return (
            _numbers(groups),
            list(map(id, params)),
            list(map(_requires_grad, params)),
            _memory(held),
        )
    except (AttributeError, RuntimeError, TypeError):
        return object()


def _memory(tensors) -> list:
    """Where tensors lie, and how: a view of the same address may show other elements."""
    looks = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride, _dtype
    return [list(map(look, tensors)) for look in looks]


def memory_key(params, state, groups):
    """What bound views and launches depend on: where parameters and state lie, and how the
    gradients are laid out. A missing gradient changes nothing: other ranks, which may have it, do
    not bind anew either. Raises RuntimeError for a gradient that cannot be stepped.
    """
    check_gradients(params, groups)
    gradients = [p.grad for p in params]
    forms = map(form_of_gradient, raw_locals(g for g in gradients if g is not None))
    held = [t for p in params for t in (p, *state[p].values()) if isinstance(t, torch.Tensor)]
    return (
        _memory(raw_locals(held)),
        [next(forms) if g is not None else form_of_zeros(p) for p, g in zip(params, gradients)],
        placements_of(p if g is None else g for p, g in zip(params, gradients)),
    )


def form_of_gradient(local):
    """(dtype, stride, bytes beyond alignment) of this rank's part of a gradient."""
    return local.dtype, local.stride(), local.data_ptr() % ALIGNMENT


def copy_in_form(gradient, form, name):
    """A copy of a gradient in the form of another. RuntimeError where the dtype does not hold its
    numbers.
    """
    dtype, stride, odd = form
    if torch.promote_types(gradient.dtype, dtype) != dtype:
        raise RuntimeError(
            f"the gradient of parameter {name} came in {gradient.dtype}, after buckets had left "
            "during "
            f"backward; in the steps before it came in {dtype}. Load a checkpoint, and take a step "
            "without last_backward() when dtypes change"
        )
    extent = (
        1 + sum((size - 1) * step for size, step in zip(gradient.shape, stride))
        if gradient.numel()
        else 0
    )
    flat = torch.empty(extent + odd // dtype.itemsize, dtype=dtype, device=gradient.device)
    return flat.as_strided(gradient.shape, stride, odd // dtype.itemsize).copy_(gradient)


def form_of_zeros(param):
    """The form of what stands for a missing gradient."""
    return gradient_dtype(param), local_of(param).stride(), 0

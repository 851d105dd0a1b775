"""Fingerprint of a step: everything that plans, bound views and CUDA graphs depend on, besides
numbers that schedules change.

While the fingerprint stays equal, a step plans and binds nothing. `StepFingerprint` compares fast,
by torch.compile's guards; `fingerprint` computes the slow exact form. Issues no collective and does
not wait for the device.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterable, Sequence
from operator import itemgetter

import torch

from ..params.checks.gradients import (
    check_gradients,
    dtype_of,
    gradient_of,
    requires_grad_of,
    spec_of,
)
from ..params.dtensor import extent, gradient_dtype, local_of, placements_of, raw_locals
from ..planning.memory_model import ALIGNMENT
from ..rules.rule import PLANNED_OPTIONS, frozen, option_keys

# A private class of torch, with all checks of many tensors in a single C++ call
try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # every comparison then takes the slow check
    TensorGuards = None
_params = itemgetter("params")
# Options of a group that no schedule changes
FIXED = (
    "use_muon",
    "adjust_lr_fn",
    "ns_steps",
    "eps",
    "rule",
    "decay",
    "momentum_form",
    "rounding",
    "master_weights",
    "state_dtype",
    "process_group",  # a key added after construction is refused
)
RULE = FIXED.index("rule")
# Options that may be a list or a dict, which could be changed in place
MUTABLE = "ns_coefficients", "split", "transposed"
SIMPLE = {str, bool, type(None)}  # types of values that cannot be changed in place
# Options with numbers that launches take from the host
LAUNCH_OPTIONS = "eps", "nesterov"
NUMBER_TYPES = {float, int, bool, type(None)}

# (dtype, stride, data pointer modulo ALIGNMENT in bytes) of the local part of a gradient
GradientForm = tuple[torch.dtype, tuple[int, ...], int]


def fingerprint(groups: Sequence[dict], state: dict, *more: object) -> object:
    """The fingerprint of the groups, the optimizer state and the current gradients, with `more`
    values.

    While the fingerprint stays equal, nothing has to be planned or bound anew. Returns a fresh
    object(), equal to nothing, when the slow check of `memory_key` is needed: sparse or lazily
    negated gradients, non-tensor state.
    """
    params = _params_of(groups)
    grads = list(map(gradient_of, params))  # with DTensors; `gradients`: their local tensors
    gradients = raw_locals(grads)
    missing = missing_from(gradients)
    # A missing gradient counts as zeros in the form of the weight
    weights = raw_locals(params) if missing else ()
    for i in missing:
        gradients[i] = weights[i]
    try:
        if any(map(torch.Tensor.is_neg, gradients)):
            return object()
        # A list per attribute takes less time than a tuple per parameter
        getters = dtype_of, torch.Tensor.size, torch.Tensor.stride
        forms = [list(map(get, gradients)) for get in getters]
        return (
            static_fingerprint(groups, state),
            forms,
            _misalignments(gradients),
            missing,
            placements_of(grads),
            [gradient_dtype(params[i]) for i in missing],
            more,
        )
    # Sparse gradients have no strides, and state of another tool may be no tensor
    except (AttributeError, RuntimeError, TypeError):
        return object()


class StepFingerprint:
    """The fingerprint of a step, and a fast check whether it is still current.

    For some models a step takes the GPU less time than `fingerprint` takes Python. The fast check
    uses the guards of torch.compile: types, dtypes, shapes, strides, dispatch keys (lazy negation,
    sparse layout) and requires_grad of all tensors in one call, and adds identities, addresses and
    placements. The fast check finds every change that `fingerprint` finds.
    """

    def __init__(self, groups: Sequence[dict], state: dict, *more: object) -> None:
        self.seen = fingerprint(groups, state, *more)
        # Local gradients that the last successful fast check has read; see `pop_gradients`
        self.gradients: list[torch.Tensor] | None = None
        self.has_fast_check = False
        self.params = _params_of(groups)
        grads = list(map(gradient_of, self.params))
        known = (
            isinstance(self.seen, tuple) and isinstance(self.seen[0], tuple) and not self.seen[3]
        )
        # Guards need a tensor for every gradient, and `_locals` a common type
        if TensorGuards is None or not known or len(set(map(type, grads))) != 1:
            return
        self.state_values = _state_values(state)
        gradients = raw_locals(grads)
        stored = self.params + self.state_values
        local = raw_locals(stored)
        self.constants = _constants_of(groups)
        self.more = more
        self.misalignments = self.seen[2]
        self.placements = self.seen[4]  # of gradients; empty without DTensors
        self.grad_type = type(grads[0])  # of all gradients
        self.grad_specs = list(map(spec_of, grads)) if self.placements else []
        self.is_plain = _is_same(local, stored)  # no parameter or state is a DTensor
        self.addresses = list(map(torch.Tensor.data_ptr, local))
        # Guards ignore requires_grad where gradients are disabled, as in `step`. Without guards, as
        # with another signature in a later torch, every comparison takes the slow check.
        with torch.enable_grad(), contextlib.suppress(AttributeError, RuntimeError, TypeError):
            self.guards = [
                TensorGuards(*ts, dynamic_dims_sizes=None, dynamic_dims_strides=None)
                for ts in (stored, gradients, local)[: 2 if self.is_plain else 3]
            ]
            self.has_fast_check = self._pass_guards(stored, gradients, local)

    def is_current(self, groups: Sequence[dict], state: dict, *more: object) -> bool:
        """Whether nothing has changed that plans and bound views depend on."""
        # A step that raised may not have popped the gradients
        self.gradients = None
        # As in `fingerprint`: an unexpected object is left to the slow check
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):
            if self.has_fast_check and self._fast_check(groups, state, more):
                return True
        # Comparing options of a group may raise, if a user put a tensor of many elements there;
        # validation refuses it right after
        with contextlib.suppress(RuntimeError):
            return fingerprint(groups, state, *more) == self.seen
        return False

    def is_static_current(self, groups: Sequence[dict], state: dict) -> bool:
        """`is_current` without gradients; False if the fingerprint was not computed."""
        return isinstance(self.seen, tuple) and static_fingerprint(groups, state) == self.seen[0]

    def pop_gradients(self) -> dict[int, torch.Tensor]:
        """{id of a parameter: local gradient} as read by the last fast check; {} if the slow check
        ran, or on a second call.
        """
        gradients, self.gradients = self.gradients, None
        return {} if gradients is None else dict(zip(map(id, self.params), gradients))

    def _fast_check(self, groups: Sequence[dict], state: dict, more: tuple) -> bool:
        """Whether nothing has changed; on success keep the local gradients."""
        params = _params_of(groups)
        values = _state_values(state)
        if not (
            _is_same(params, self.params)
            and _is_same(values, self.state_values)
            and more == self.more
            and _constants_of(groups) == self.constants
        ):
            return False
        grads = list(map(gradient_of, params))
        stored = params + values
        if set(map(type, grads)) != {self.grad_type}:
            return False
        gradients = _locals(grads, not self.placements)
        specs = list(map(spec_of, grads)) if self.placements else []
        local = _locals(stored, self.is_plain)
        with torch.enable_grad():
            if not self._pass_guards(stored, gradients, local):
                return False
        # Autograd makes a new DTensor in each step, usually with one cached spec
        if not (
            (_is_same(specs, self.grad_specs) or placements_of(grads) == self.placements)
            and _misalignments(gradients) == self.misalignments
            and list(map(torch.Tensor.data_ptr, local)) == self.addresses
        ):
            return False
        self.gradients = gradients
        return True

    def _pass_guards(self, *lists: list[torch.Tensor]) -> bool:
        """Whether the guards accept (parameters and state, local gradients, local parameters and
        state). Without DTensors the third list equals the first and has no guard.
        """
        for guard, tensors in zip(self.guards, lists):
            if not guard.check(*tensors):
                return False
        return True


def _locals(tensors: list[torch.Tensor], is_plain: bool) -> list[torch.Tensor]:
    """`raw_locals`, without a look at types if no tensor is a DTensor (`is_plain`)."""
    if is_plain:
        return tensors
    return list(map(getattr, tensors, itertools.repeat("_local_tensor"), tensors))


def _is_same(ours: Sequence[object], theirs: Sequence[object]) -> bool:
    """Whether two sequences hold identical objects."""
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


def _params_of(groups: Iterable[dict]) -> list[torch.Tensor]:
    """Parameters of all groups."""
    return list(itertools.chain.from_iterable(map(_params, groups)))


def _state_values(state: dict) -> list:
    """Values in the state of all parameters."""
    return list(itertools.chain.from_iterable(map(dict.values, state.values())))


def _constants_of(groups: Sequence[dict]) -> tuple:
    """Options of all groups that plans and launches keep. Of betas only beta2: beta1 may change at
    every step (schedules.py).
    """
    # Lists filled in C: there may be a group for each parameter
    fixed, forms = [], []
    for key in FIXED:
        fixed.append(list(map(dict.get, groups, itertools.repeat(key))))
    for key in MUTABLE:
        values = list(map(dict.get, groups, itertools.repeat(key)))
        forms.append(values if set(map(type, values)) <= SIMPLE else frozen(values))
    betas = list(map(dict.get, groups, itertools.repeat("betas")))
    if set(map(type, betas)) != {type(None)}:
        betas = [tuple(b[1:]) if isinstance(b, (tuple, list)) else b for b in betas]
    counts = list(map(len, map(_params, groups)))
    # Usually no group has a rule by name: then no call, which would loop over the groups
    keys = option_keys(groups) if any(fixed[RULE]) else []
    for key in keys:
        values = list(map(dict.get, groups, itertools.repeat(key)))
        # Plans hold the numbers of PLANNED_OPTIONS only; every step reads all other numbers anew
        live = () if key in PLANNED_OPTIONS else NUMBER_TYPES
        forms.append([None if type(v) in live else frozen(v) for v in values])
    first_equal = _first_equal(groups, keys) if len(groups) > 1 else []
    return list(map(id, groups)), counts, fixed, forms, betas, first_equal


def _first_equal(groups: Sequence[dict], keys: Sequence[str]) -> list[int]:
    """For each group, the first group with equal values of the options that decide which groups are
    stepped together (`step_together` in prepare/select.py); [] if all groups are alike.

    `keys`: options of the groups' rules. Values themselves are not in the result: if a schedule
    changes the values of all groups alike, the plan stays.
    """
    options = (*LAUNCH_OPTIONS, *keys)
    values = [list(map(dict.get, groups, itertools.repeat(key))) for key in options]
    # A tensor may change in place: its value counts, not the object
    values = [
        some
        if set(map(type, some)) <= NUMBER_TYPES
        else [frozen(_as_number(value)) for value in some]
        for some in values
    ]
    keys = list(zip(*values))
    if len(set(keys)) <= 1:
        return []
    first: dict[tuple, int] = {}
    return [first.setdefault(key, i) for i, key in enumerate(keys)]


def _as_number(value: object) -> object:
    """The number in a tensor of one element; everything else unchanged."""
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _misalignments(tensors: list[torch.Tensor]) -> list[int]:
    """Data pointers modulo ALIGNMENT, in bytes: aligned gradients have kernels of their own."""
    return list(map(operator.mod, map(torch.Tensor.data_ptr, tensors), itertools.repeat(ALIGNMENT)))


def missing_from(gradients: Sequence[torch.Tensor | None]) -> list[int]:
    """Indices of gradients that are None."""
    # Usually no gradient is missing: then no Python loop over gradients
    if type(None) not in set(map(type, gradients)):
        return []
    return [i for i, g in enumerate(gradients) if g is None]


def static_fingerprint(groups: Sequence[dict], state: dict) -> object:
    """The part of `fingerprint` without gradients: parameters, constants of groups, and where
    weights and state lie. A fresh object() in the cases of `fingerprint`.
    """
    params = _params_of(groups)
    try:
        stored = raw_locals(params) + raw_locals(_state_values(state))
        return (
            _constants_of(groups),
            list(map(id, params)),
            list(map(requires_grad_of, params)),
            _memory(stored),
        )
    except (AttributeError, RuntimeError, TypeError):
        return object()


def _memory(tensors: list[torch.Tensor]) -> list[list]:
    """Address, shape, strides and dtype of tensors: a new view of equal address may have other
    elements.
    """
    getters = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride, dtype_of
    return [list(map(get, tensors)) for get in getters]


def memory_key(
    params: Sequence[torch.Tensor], state: dict, groups: Sequence[dict]
) -> tuple[list, list[GradientForm], list]:
    """Memory that bound views and launches depend on: of weights and state, and the forms and
    placements of gradients.

    A missing gradient counts in the form of the zeros in its place, so the key stays equal: ranks
    with the gradient bind nothing anew either. Raises RuntimeError for a gradient that cannot be
    stepped.
    """
    check_gradients(params, groups)
    gradients = [p.grad for p in params]
    forms = map(form_of_gradient, raw_locals(g for g in gradients if g is not None))
    stored = [t for p in params for t in (p, *state[p].values()) if isinstance(t, torch.Tensor)]
    return (
        _memory(raw_locals(stored)),
        [next(forms) if g is not None else form_of_zeros(p) for p, g in zip(params, gradients)],
        placements_of(p if g is None else g for p, g in zip(params, gradients)),
    )


def form_of_gradient(local: torch.Tensor) -> GradientForm:
    """The form of the local part of a gradient."""
    return local.dtype, local.stride(), local.data_ptr() % ALIGNMENT


def copy_in_form(gradient: torch.Tensor, form: GradientForm, name: str | int) -> torch.Tensor:
    """Return a copy of `gradient` in another form. Raises RuntimeError, naming the parameter, if
    the dtype of the form cannot hold all values.
    """
    dtype, stride, misalignment = form
    if torch.promote_types(gradient.dtype, dtype) != dtype:
        raise RuntimeError(
            f"the gradient of parameter {name} came in {gradient.dtype}, after buckets were sent "
            f"during backward; in the steps before it came in {dtype}. Load a checkpoint, and take "
            "a step without last_backward() when dtypes change"
        )
    # torch's allocators return aligned memory: begin `misalignment` bytes behind its start
    first = misalignment // dtype.itemsize
    count = first + extent(gradient.shape, stride)
    flat = torch.empty(count, dtype=dtype, device=gradient.device)
    return flat.as_strided(gradient.shape, stride, first).copy_(gradient)


def form_of_zeros(param: torch.Tensor) -> GradientForm:
    """The form of the zeros in place of a missing gradient, see `param_store._zeros`."""
    return gradient_dtype(param), local_of(param).stride(), 0

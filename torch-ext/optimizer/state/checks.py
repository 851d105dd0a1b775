"""Checks of the state that an optimizer holds: before ranks compare plans, where a view of momentum
is bound, and after a step that failed half-way. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..communication.matrix_owners import state as at_owners
from ..kernels.quantized.blocks import is_quantized
from ..params.errors import warn_caller
from ..params.units import Split
from ..planning.planner import Plan
from ..rules.muon import SUM_KEY
from ..rules.rule import (
    SCALE_KEY,
    group_state_dtype,
    keys_of,
    row_sharded_keys,
    state_keys,
    state_shape,
)

# Begin of messages after a failed step
INCONSISTENT = (
    "the last step of this optimizer failed half-way: some weights and state are those of before "
    "it, some those of after it"
)


def inconsistent_error() -> RuntimeError:
    """The error for steps and reports after a step that failed half-way."""
    return RuntimeError(
        f"{INCONSISTENT}. Load a checkpoint into the model and into the optimizer "
        "(load_state_dict), then go on. A single process may also accept weights and state as "
        "they are: optimizer.load_state_dict(optimizer.state_dict())"
    )


def warn_inconsistent(is_inconsistent: bool) -> bool:
    """Warn if a step failed half-way, before the user saves its state. Returns
    `is_inconsistent`.
    """
    if is_inconsistent:
        warn_caller(f"{INCONSISTENT}: do not save this state, load what was saved before")
    return is_inconsistent


def is_state_missing(plans: Sequence[Plan], state: dict, dtype: torch.dtype) -> bool:
    """Return whether the user removed state after creation, as by `state.clear()` to start anew.
    `dtype`: the option `state_dtype`.
    """
    # Each key: whoever resets state may delete single entries
    return any(
        key not in state.get(p, ())
        for plan in plans
        for p in plan.params
        for key in keys_of(plan.group, p, dtype)
    )


def check_held_state(plans: Sequence[Plan], state: dict, dtype: torch.dtype) -> None:
    """Raise RuntimeError if state does not have its parameter's shape, if momentum in 8 bits lacks
    its scales, or if momentum is in 8 bits and `dtype` is not, or the reverse. `dtype`: the option
    `state_dtype`. Called before ranks compare plans: other ranks wait in the comparison until the
    rank has repaired its state and steps again.
    """
    for plan in plans:
        for number, p in enumerate(plan.params):
            by_rows = plan.state_rows is not None
            held = state.get(p, {})
            layouts = {key: of_key[number] for key, of_key in plan.state_layouts.items()}
            at_owners.check(held, p, layouts, plan.split(number), plan.names[number])
            _check_shapes(held, p, plan.names[number], plan.split(number), by_rows)
            # Also SGD's and sign's, which have the keys of matrices
            for key in {"momentum_buffer", SUM_KEY}.intersection(state_keys(plan.group)):
                found = getattr(held.get(key), "dtype", None)
                check_bits(key, plan.names[number], found, group_state_dtype(plan.group, dtype))
                _check_scales(held, key, plan.names[number])


def _check_shapes(state: dict, param: torch.Tensor, name: str, split: Split, by_rows: bool) -> None:
    """Raise RuntimeError for state without its parameter's shape. `by_rows`: a rank may hold some
    rows only.
    """
    # With `by_rows` dim 0 has as many rows as the rank keeps
    first = 1 if by_rows else 0
    for key, value in row_entries(state):
        expected = state_shape(param, key, split)
        is_8bit = SCALE_KEY in state and key in (SCALE_KEY, "momentum_buffer", SUM_KEY)
        entries = f"the momentum and {SCALE_KEY}" if is_8bit else "its entry"
        if param.ndim and tuple(value.shape[first:]) != expected[first:]:
            raise RuntimeError(
                f"{key} of parameter {name} has shape {tuple(value.shape)}, but the parameter, of "
                f"shape {tuple(param.shape)}, needs {expected}: it was resized, or its split has "
                f"changed. Delete {entries} in the optimizer's `state`, or load state that fits"
            )


def _check_scales(state: dict, key: str, name: str) -> None:
    """Raise RuntimeError for momentum `key` in 8 bits without its scales."""
    if is_quantized(getattr(state.get(key), "dtype", None)) and SCALE_KEY not in state:
        raise RuntimeError(
            f"{SCALE_KEY} of parameter {name} is missing in the optimizer's `state`, but {key} in "
            "8 bits is there and means nothing without it: delete both entries for a new momentum, "
            "or load both"
        )


def check_bits(key: str, name: str, found: object, dtype: torch.dtype) -> None:
    """Raise RuntimeError if momentum of dtype `found` would be misread by a step with `dtype`, of
    `group_state_dtype`. None: there is no momentum yet.
    """
    if found is not None and is_quantized(found) != is_quantized(dtype):
        raise RuntimeError(
            f"{key} of parameter {name} is {found} in the optimizer's `state`, but a step of its "
            f"group reads {dtype}: pass the state to load_state_dict(), which converts momentum of "
            "matrices, or delete the entry for a new momentum"
        )


def row_entries(state: dict) -> list[tuple[str, torch.Tensor]]:
    """Return [(key, tensor)] of the state with rows of the parameter: all but step counts, and
    state at the owners of matrices.
    """
    return [
        (key, value)
        for key in row_sharded_keys()  # sorted: callers move the tensors by collectives
        if isinstance(value := state.get(key), torch.Tensor)
        and not at_owners.is_at_owners(state, key)
    ]

"""State before it is bound: creation, and how it follows a parameter to another mesh, placement or
object.

Collective where DTensors move: ranks that share parameters call it together, before a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ..communication.owner_state import move_to_owners
from ..communication.redistribute import place_like
from ..kernels.backend import capturing
from ..params import errors
from ..params.config import MuonConfig
from ..params.dtensor import as_dtensor, is_dtensor, is_placed_like, zeros_of
from ..params.errors import names_in, warn_caller
from ..params.layout import layout_of, row_chunks, this_rank
from ..params.validation import device_of
from ..rules.rule import ROWS, home_of, state_keys, state_shape

INCONSISTENT = (
    "the last step of this optimizer failed half-way: some weights and state are those of before "
    "it, some those of "
    "after it"
)


def refuse_inconsistent(torn) -> None:
    """Raise RuntimeError if a step failed half-way."""
    if torn:
        raise RuntimeError(
            f"{INCONSISTENT}. Load a checkpoint into the model and into the optimizer (load_state_dict), "
            "then "
            "go on"
        )


def warn_inconsistent(torn) -> bool:
    """Warn if a step failed half-way, where somebody may save what it left."""
    if torn:
        warn_caller(f"{INCONSISTENT}: do not save this state, load what was saved before")
    return torn


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Context manager in which state and buffers are made. A step outside of torch.inference_mode
    could not write to tensors that were made inside of it.
    """
    with torch.inference_mode(False), torch.no_grad():  # the former alone turns gradients on
        yield


def adopt_state(before, groups, state) -> list:
    """Give the state of a parameter that has left its group to the one in its place, of the same
    shape: who prepares a model after its optimizer puts other parameters into the groups. Returns
    each group's parameters, which are to be `before` at the next call.
    """
    here = {p for group in groups for p in group["params"]}
    for gone, group in zip(before, groups):
        for old, new in zip(gone, group["params"]) if len(gone) == len(group["params"]) else ():
            if old not in here and old in state and old.shape == new.shape:
                held = state.pop(old)
                state.setdefault(new, held)
    return [list(group["params"]) for group in groups]


def complete_state(groups: list[dict], state: dict, options: MuonConfig) -> None:
    """Create zero state where a parameter that requires a gradient lacks some, in place; without
    communication.

    It lies as the parameter does. Where owners keep the state, which are not chosen before the
    first step, each rank gets as many rows as a DTensor cut by rows has there; `move_to_owners`
    brings them to the owners. All parameters get theirs on every rank, since the keys of a
    checkpoint may not differ between ranks.
    """
    for group in groups:
        for param in [p for p in group["params"] if p.requires_grad]:
            held = state.setdefault(param, {})
            if is_dtensor(param):
                _cut_like(held, param)
            rows = _rows_here(param, options) if options.owner_keeps_state else None
            create_state(held, param, state_keys(group), options.state_dtype, rows=rows)


def _cut_like(state: dict, param: torch.Tensor) -> None:
    """Cut plain state, from before the model was sharded, as the DTensor `param` is."""
    for key, value in _of_elements(state):
        if not is_dtensor(value) and tuple(value.shape) == state_shape(param, key):
            state[key] = place_like(value, param)


def _rows_here(param: torch.Tensor, options: MuonConfig) -> int:
    """How many rows this rank gets of the state of a plain parameter that is cut by rows."""
    group = options.process_group
    rows = row_chunks(param.shape[0] if param.ndim else 1, group.size())
    return rows[dist.get_group_rank(group, this_rank())]


def creates_state_only(groups: list[dict], state: dict) -> bool:
    """Whether a step may be one that only creates state: there is none yet, and every lr is 0. So
    is that of torch.distributed.checkpoint, with zero gradients, and the first one of a warm-up,
    which counts.
    """
    if state:
        return False
    return not capturing(device_of(groups)) and all(float(group["lr"]) == 0 for group in groups)


def is_state_missing(plans, state) -> bool:
    """Whether somebody has taken state away since it was created, as those do who begin anew:
    `state.clear()`.
    """
    return any(
        key not in state.get(p, ())
        for plan in plans
        for p in plan.params
        for key in state_keys(plan.group)
    )


def check_state(plans, state) -> None:
    """Raise RuntimeError where a state has not its parameter's shape: before ranks compare their
    plans, so that who mends it can step again, for which the others wait there.
    """
    for plan in plans:
        names = names_in(plan.group)
        for p in plan.params:
            _check_shapes(state.get(p, {}), p, names[p], by_rows=plan.kept is not None)


def prepare_state(plans, state, options) -> None:
    """Bring state to the ranks that are to keep it and to where their parameters lie, and create
    what there is none of.

    Raises RuntimeError where a part of it is at no rank.
    """
    for plan in plans:
        if plan.kept is not None:
            names, kept = names_in(plan.group), dict(zip(plan.params, plan.kept))
            with errors.during("the move of state to new owners"):
                move_to_owners(
                    state, {p: names[p] for p in plan.params}, kept, options.process_group
                )
        mine = (
            None if plan.kept is None else dist.get_group_rank(options.process_group, this_rank())
        )
        for i, p in enumerate(plan.params):
            if mine is None:
                _follow(state[p], p)
            rows = None if mine is None else plan.kept[i][mine]
            create_state(state[p], p, state_keys(plan.group), options.state_dtype, rows=rows)


def _check_shapes(state, param, name, by_rows) -> None:
    """`by_rows`: a rank may have some rows only."""
    first = 1 if by_rows else 0
    for key, value in _of_elements(state):
        expected = state_shape(param, key)
        if param.ndim and tuple(value.shape[first:]) != expected[first:]:
            raise RuntimeError(
                f"{key} of parameter {name} has shape {tuple(value.shape)}, but the parameter, of "
                "shape "
                f"{tuple(param.shape)}, needs {expected}: it was resized. Delete its entry in the "
                "optimizer's `state`, or load state that fits"
            )


def _follow(state, param) -> None:
    for key, value in _of_elements(state):
        if not is_placed_like(value, param):
            with errors.during("the move of state to where its parameter lies now"):
                state[key] = place_like(value, param)


def _of_elements(state) -> list:
    """[(key, tensor)] of what belongs to elements of the parameter."""
    return [
        (key, value)
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key in ROWS
    ]


def create_state(state, param, keys, dtype, rows=None) -> None:
    """Zeros for the state of one parameter, placed like it, on every rank alike: checkpoint keys
    may not differ.

    `keys`: "momentum_buffer", "exp_avg" and "exp_avg_sq" of the parameter's shape in `dtype`;
    "second_moment" (..., R, 1) in fp32 (bf16 has too few bits for an average over 20 steps);
    "step", a scalar. `rows`: how many rows of the state this rank keeps where it is not stored like
    the parameter; None means like the parameter.
    """
    for key in keys:
        device, wide = home_of(key, param, dtype)
        if key in state:
            if state[key].device != device:  # model.to() takes the parameters only
                state[key] = state[key].to(device)
        elif key == "step":
            state[key] = torch.zeros((), dtype=wide, device=device)
        elif rows is not None:
            last = param.shape[1:-1] + (1,) if key == "second_moment" else param.shape[1:]
            state[key] = torch.zeros((rows, *last), dtype=wide, device=device)
        elif key == "second_moment":
            state[key] = _zero_rows(param)
        else:
            state[key] = zeros_of(param, wide)


def _zero_rows(param):
    shape = state_shape(param, "second_moment")
    if not is_dtensor(param):
        return torch.zeros(shape, dtype=torch.float32, device=param.device)
    box = layout_of(param, shape=shape).boxes[this_rank()]
    local = torch.zeros([b - a for a, b in box], dtype=torch.float32, device=param.device)
    return as_dtensor(local, shape, param.device_mesh, param.placements)

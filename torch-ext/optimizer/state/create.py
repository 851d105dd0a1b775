"""Creation of state, and migration of state to a parameter's new mesh, placements or object.

`complete_state` creates missing state without communication, before a plan exists. `prepare_state`
moves existing state for the plans of a step, then creates missing state. The move of DTensors or
owner state is collective, so ranks with common parameters call `prepare_state` together, before a
step. `adopt_state` follows replaced parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from ..communication.matrix_owners import state as at_owners
from ..communication.owner_state import move_to_owners
from ..communication.redistribute import place_like
from ..kernels.backend import capturing
from ..kernels.quantized.blocks import is_quantized, mark_unwritten
from ..params import errors
from ..params.checks.group_values import check_values
from ..params.config import MuonConfig
from ..params.dtensor import is_dtensor, is_placed_like, local_of, zeros_of
from ..params.layout import row_chunk, this_rank, zeros_with_placements
from ..params.units import WHOLE, Split, splits_by_param, splits_of
from ..params.validation import device_of
from ..planning.planner import Plan
from ..rules.decay import INITIAL_KEY
from ..rules.muon import REST_KEY, SUM_KEY
from ..rules.rule import (
    BASE_KEYS,
    SCALE_KEY,
    STATES,
    all_state_keys,
    group_state_dtype,
    keys_of,
    matrix_keys,
    row_sharded_keys,
    sharded_keys,
    state_device_and_dtype,
    state_shape,
)
from .checks import row_entries
from .momentum.averages import adopt_averages


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Context manager for the creation of state and buffers, without inference mode and gradients.
    A step outside of torch.inference_mode could not write to tensors created inside.
    """
    # inference_mode(False) turns gradients on
    with torch.inference_mode(False), torch.no_grad():
        yield


def adopt_state(
    before: Sequence[Sequence[torch.Tensor]], groups: list[dict], state: dict
) -> list[list[torch.Tensor]]:
    """Give the state of a replaced parameter to its replacement of equal shape in the group. For
    users who prepare a model after the optimizer, and put the new parameters into the groups.

    `before`: result of the previous call. Returns the parameters of each group, for the next call.
    """
    current = {p for group in groups for p in group["params"]}
    for previous, group in zip(before, groups):
        # Without equal lengths nothing tells which parameter took which place
        is_paired = len(previous) == len(group["params"])
        for old, new in zip(previous, group["params"]) if is_paired else ():
            if old not in current and old in state and old.shape == new.shape:
                held = state.pop(old)
                # Existing state of the new parameter wins
                state.setdefault(new, held)
    return [list(group["params"]) for group in groups]


def complete_state(
    groups: list[dict], state: dict, options: Sequence[MuonConfig], skips_wrong: bool = False
) -> None:
    """Create missing state of all parameters that require a gradient: zero, in place, without
    communication. `options`: of each group. `skips_wrong`: leave out groups that are not
    `is_readable`, for which errors are raised otherwise.

    State is placed like the parameter. State kept by owners gets as many rows on each rank as a
    row-sharded DTensor, until the first step chooses owners. All parameters get state on every
    rank, since the keys of a checkpoint must be equal on all ranks.
    """
    for group, own in zip(groups, options):
        if skips_wrong and not is_readable(group, own.state_dtype):
            continue
        for param, split in zip(group["params"], splits_of(group)):
            if not param.requires_grad:
                continue
            held = state.setdefault(param, {})
            if is_dtensor(param):
                _shard_plain_state(held, param, split)
            _create_missing(held, param, group, split, own)


def _create_missing(
    held: dict, param: torch.Tensor, group: dict, split: Split, options: MuonConfig
) -> None:
    """Create the entries of `held`, the state of a parameter, that its group reads and that are
    missing. `options`: of the group.
    """
    # Owners are chosen in the first step, and `move_to_owners` brings rows to the owners
    rows = _rows_at_rank(param, options) if options.owner_keeps_state else None
    dtype, offloads = group_state_dtype(group, options.state_dtype), bool(options.offload_state)
    create_state(held, param, keys_of(group, param, dtype), dtype, split, rows, offloads)


def is_readable(group: dict, dtype: torch.dtype) -> bool:
    """Whether the group says which state its parameters have. Else one of its live keys is wrong,
    which the next step refuses, and saving must not: then state is saved as the last step left it.
    `dtype`: the option `state_dtype`.
    """
    try:
        # A wrong momentum_form would count as "ema", and a sum as momentum that is missing
        check_values(group)
        dtype = group_state_dtype(group, dtype)
        for param, split in zip(group["params"], splits_of(group)):
            for key in keys_of(group, param, dtype):
                state_shape(param, key, split)
    except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError):
        return False
    return True


def gathered_keys(group: dict, state: dict, dtype: torch.dtype) -> tuple[str, ...]:
    """Return `sharded_keys` of a group; of one that is not `is_readable`, the keys that the state
    of its parameters has, which on all ranks are those of the last step. `dtype`: the option
    `state_dtype`.
    """
    if is_readable(group, dtype):
        return sharded_keys([group])
    held = set().union(*(state.get(param, ()) for param in group["params"]))
    return tuple(sorted(BASE_KEYS | held.intersection(row_sharded_keys())))


def without_stale_numbers(
    before: Mapping[torch.Tensor, Split], now: Mapping[torch.Tensor, Split], state: dict
) -> dict[torch.Tensor, dict]:
    """Return {parameter: its state without numbers of whole matrices (`State.of_matrix`)}, of
    parameters whose split differs between `before`, with which state was made, and `now`: the
    numbers are of other matrices. State at the owners of matrices is left to its own checks.
    """
    keys, found = matrix_keys(), {}
    for param, split in before.items():
        held = state.get(param, {})
        stale = [key for key in keys & held.keys() if not at_owners.is_at_owners(held, key)]
        if stale and now.get(param, split) != split:
            found[param] = {key: value for key, value in held.items() if key not in stale}
    return found


def with_missing_keys(
    groups: list[dict],
    state: dict,
    options: Sequence[MuonConfig],
    state_splits: Mapping[torch.Tensor, Split],
) -> dict:
    """Return `state` with a completed copy of each parameter's state that lacks keys of its group,
    as after a live change of the group's rule or split: as the next step would create them.
    `state` itself stays unchanged, and parameters without state stay without; so do groups that are
    not `is_readable`. `options`: of each group. `state_splits`: `Preparation.state_splits`.
    """
    readable = [pair for pair in zip(groups, options) if is_readable(pair[0], pair[1].state_dtype)]
    if state_splits:
        now = splits_by_param(group for group, _ in readable)
        changed = without_stale_numbers(state_splits, now, state)
        state = {**state, **changed} if changed else state
    known, copies = set(all_state_keys()), {}
    for group, own in readable:
        dtype = group_state_dtype(group, own.state_dtype)
        for param, split in zip(group["params"], splits_of(group)):
            held, keys = state.get(param, {}), keys_of(group, param, dtype)
            if not (known.isdisjoint(held) or held.keys() >= set(keys)):
                copies[param] = dict(held)
                _create_missing(copies[param], param, group, split, own)
    return {**state, **copies} if copies else state


def _shard_plain_state(state: dict, param: torch.Tensor, split: Split) -> None:
    """Shard plain state, from before the model was sharded, like the DTensor `param`."""
    for key, value in row_entries(state):
        expected = state_shape(param, key, split)
        if not is_dtensor(value) and tuple(value.shape) == expected:
            state[key] = place_like(value, param)


def _rows_at_rank(param: torch.Tensor, options: MuonConfig) -> int:
    """Return the rows of this rank of the row-sharded state of a plain parameter."""
    group = options.process_group
    rows = param.shape[0] if param.ndim else 1
    return row_chunk(rows, group.size(), dist.get_group_rank(group, this_rank()))


def creates_state_only(groups: list[dict], state: dict) -> bool:
    """Return whether a step may be meant to create state only: no state exists, and every lr is 0.
    torch.distributed.checkpoint takes such a step, with zero gradients. The first step of a warm-up
    has lr 0 too, but counts.
    """
    if state:
        return False
    # Reading an lr tensor would synchronize, which a capture forbids
    return not capturing(device_of(groups)) and all(float(group["lr"]) == 0 for group in groups)


def prepare_state(plans: Sequence[Plan], state: dict, options: MuonConfig) -> None:
    """Move state to its owners or to the placements of its parameters, and create missing state.
    Collective.

    Raises RuntimeError if no rank holds a part of the state.
    """
    offloads = bool(options.offload_state)
    for plan in plans:
        if plan.state_rows is not None:
            keys = sharded_keys(plan.groups)
            members = {p: (name, keys) for p, name in zip(plan.params, plan.names)}
            wanted = dict(zip(plan.params, plan.state_rows))
            with errors.during("the move of state to new owners"):
                move_to_owners(state, members, wanted, plan.process_group, offloads)
            group_rank = dist.get_group_rank(plan.process_group, this_rank())
        if plan.matrix_owners is not None:
            _bring_to_owners(plan, state)
        for i, p in enumerate(plan.params):
            if plan.state_rows is None:
                _move_to_param(state[p], p)
            rows = None if plan.state_rows is None else plan.state_rows[i][group_rank]
            if plan.split(i).view == "flatten":
                _make_contiguous(state[p])
            dtype = group_state_dtype(plan.group, options.state_dtype)
            keys = keys_of(plan.group, p, dtype)
            create_state(state[p], p, keys, dtype, plan.split(i), rows, offloads)


def _bring_to_owners(plan: Plan, state: dict) -> None:
    """Move state that rules read at owners to the owners of the plan, and create missing state
    there. Collective.
    """
    owners = {p: plan.matrix_owners[i] for i, p in enumerate(plan.params) if plan.matrix_owners[i]}
    entries = [
        at_owners.StateEntry(p, plan.names[i], key, layouts[i], plan.split(i))
        for i, p in enumerate(plan.params)
        for key, layouts in plan.state_layouts.items()
        if p in owners
    ]
    for entry in entries:
        _move_to_param(state[entry.param], entry.param)
    with errors.during("the move of state to the owners of matrices"):
        at_owners.move_to_owners(state, entries, owners)
    for entry in entries:
        held = state[entry.param]
        if entry.key not in held:
            dtype = STATES[entry.key].dtype
            held[entry.key] = at_owners.zeros_at_owner(entry, owners[entry.param], dtype)


def _move_to_param(state: dict, param: torch.Tensor) -> None:
    """Redistribute state to the mesh and placements of its parameter, in place. Collective."""
    for key, value in row_entries(state):
        # Collective for DTensors that have to be gathered: ranks call it in the order of the plan
        if not is_placed_like(value, param):
            with errors.during("the move of state to where its parameter lies now"):
                state[key] = place_like(value, param)


def _make_contiguous(state: dict) -> None:
    """Replace state of other strides, as of a model in channels_last, by contiguous copies, in
    place of the dict's entries: split="flatten" views state as (O, I H W).
    """
    for key, value in row_entries(state):
        if not local_of(value).is_contiguous():
            state[key] = value.contiguous()


def create_state(
    state: dict,
    param: torch.Tensor,
    keys: Iterable[str],
    dtype: torch.dtype,
    split: Split = WHOLE,
    rows: int | None = None,
    offloads: bool = False,
) -> None:
    """Create missing zero state of a parameter, in place, and move existing state to the
    parameter's device, with `offloads` to the host. The initial weight is a copy of the parameter.

    `keys`: "momentum_buffer", "exp_avg" and "exp_avg_sq" of the parameter's shape in `dtype`;
    further state of a rule by `rules.rule.State`; "step", a scalar. `split`: how the parameter is
    cut into matrices. `rows`: number of rows on this rank if owners keep the state, except rests of
    weights; None: placed like the parameter. Called on every rank, even without local elements:
    keys of a checkpoint must be equal on all ranks.
    """
    keys = tuple(keys)
    # The momentum of the other form is stale: a later change back begins from zero
    for key, other in (("momentum_buffer", SUM_KEY), (SUM_KEY, "momentum_buffer")):
        if key in keys and key not in state:
            state.pop(other, None)
            state.pop(SCALE_KEY, None)  # a scale that is not finite makes NaN of zeros
    # Momentum in 8 bits without its scales means nothing
    momentum = next((k for k in ("momentum_buffer", SUM_KEY) if k in keys), None)
    needs_scales = SCALE_KEY in keys and SCALE_KEY not in state
    if needs_scales and is_quantized(getattr(state.get(momentum), "dtype", None)):
        del state[momentum]
    # The rest of a weight that is not split any more is stale, too
    if REST_KEY not in keys:
        state.pop(REST_KEY, None)
    adopt_averages(state, keys, param, dtype)
    for key in keys:
        device, key_dtype = state_device_and_dtype(key, param, dtype, offloads)
        # None: the parameter's
        place = device if offloads and device != param.device else None
        if key in state:
            # model.to() moves parameters only
            if state[key].device != device:
                state[key] = state[key].to(device)
        elif key == "step":
            state[key] = torch.zeros((), dtype=key_dtype, device=device)
        elif rows is not None and key != REST_KEY:  # every rank needs all of a rest
            # Rows of dim 0 only: the state of a 0-D parameter has shape (rows,)
            last = state_shape(param, key, split)[1:]
            state[key] = torch.zeros((rows, *last), dtype=key_dtype, device=device)
        elif STATES[key].per != "element":
            state[key] = _zeros_of_shape(param, state_shape(param, key, split), key_dtype)
        elif key == INITIAL_KEY:
            state[key] = zeros_of(param, key_dtype, place)
            local_of(state[key]).copy_(local_of(param))
        else:
            state[key] = zeros_of(param, key_dtype, place)
    if needs_scales and is_quantized(state[momentum].dtype):
        mark_unwritten(local_of(state[momentum]), local_of(state[SCALE_KEY]))


def _zeros_of_shape(
    param: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return zeros of a global shape, placed like the parameter."""
    if not is_dtensor(param):
        return torch.zeros(shape, dtype=dtype, device=param.device)
    # Not zeros_of: if a parameter is sharded by columns, a single rank stores its state per row
    return zeros_with_placements(param, param.placements, dtype, shape)

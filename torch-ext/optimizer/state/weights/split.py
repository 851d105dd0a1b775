"""Split weights outside of a step: their rests in state dicts, and fp32 weights that users read and
write.

A split weight is an fp32 weight in two halves: the bf16 parameter, and in the optimizer state the
rest of the 32 bits, int16 (`SplitWeights` in kernels/weights/split.py).

[Note: rests in state dicts]
NCCL and gloo send no 16-bit integers, and torch gathers and broadcasts the tensors of a state dict.
So a state dict has the bits of a rest as a bf16 tensor that shares memory with the int16 state. The
bf16 values mean nothing, and some are NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from ...communication.redistribute import place_like
from ...kernels.weights.split import joined, split
from ...params.config import MuonConfig
from ...params.dtensor import as_dtensor, is_dtensor, local_of
from ...params.errors import first_few, names_in, warn_caller
from ...params.model.names import clean_name
from ...rules.muon import DRAWN_KEY, MASTER_KEY, REST_KEY, SEED_KEY, is_split, is_stochastic
from ...rules.rule import rule_of, writes_weights

BITS = (torch.int16, torch.bfloat16)  # dtypes of a rest, in the state and in a state dict


def with_rests_as_bf16(state_dict: dict) -> dict:
    """Return a state dict with each rest as bf16, see [Note: rests in state dicts]."""
    states = {
        key: {**state, REST_KEY: _viewed(state[REST_KEY], torch.bfloat16)}
        if isinstance(state, dict) and REST_KEY in state
        else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def _viewed(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bits of a tensor as another dtype of 16 bits, in its memory."""
    local = local_of(value).view(dtype)
    if not is_dtensor(value):
        return local
    mesh, placements = value.device_mesh, value.placements
    return as_dtensor(local, value.shape, mesh, placements, value.stride())


def check_rest(dtype: torch.dtype, name: str) -> None:
    """Raise ValueError unless a saved rest of parameter `name` has one of the dtypes BITS."""
    if dtype not in BITS:
        raise ValueError(
            f"{REST_KEY} of parameter {name} has dtype {dtype} in the state, but holds the bits of "
            f"{BITS[0]}, in state dicts as {BITS[1]}: it was cast, and its bits are lost. Load "
            f"another checkpoint, or remove the key {REST_KEY!r}, and the weights begin rounded to "
            "bf16"
        )


def with_own_precision(saved: dict, own: dict) -> dict:
    """Return the options `saved` of a group without stochastic rounding or MASTER_KEY where `own`,
    the optimizer's group, excludes it: stochastic rounding of `own` drops MASTER_KEY; weights of
    `own` that are not bf16, are split, or are written by a rule drop stochastic rounding, with a
    warning.
    """
    if is_stochastic(own):
        return {key: value for key, value in saved.items() if key != MASTER_KEY}
    if not own["use_muon"] or not is_stochastic(saved):
        return saved
    is_needed = all(param.dtype == torch.bfloat16 for param in own["params"])
    if is_needed and own.get(MASTER_KEY) is None and not writes_weights(rule_of(own)):
        return saved
    warn_caller(
        "rounding='stochastic' of the state dict is not loaded into a group whose weights are not "
        f"bf16, have {MASTER_KEY}, or are written by formulas of a rule"
    )
    keys = "rounding", SEED_KEY, DRAWN_KEY
    return {key: value for key, value in saved.items() if key not in keys}


def check_not_offloaded(number: int, group: dict, options: MuonConfig) -> None:
    """Raise ValueError for weights that the loaded options of a group split, if state is offloaded.
    `group`: with the saved options.
    """
    if options.offload_state and any(is_split(group, param) for param in group["params"]):
        raise ValueError(
            f"parameter group {number} was saved with {MASTER_KEY}={group[MASTER_KEY]!r}, which "
            "offload_state excludes: load the state dict into an optimizer without offload_state, "
            f"or remove {MASTER_KEY!r} from the group of the state dict, and the weights go on as "
            "bf16 weights, without the bits beyond"
        )


def warn_of_rests(members: Iterable[tuple[torch.Tensor, dict, str, dict]]) -> None:
    """Warn once of loaded state without the rest of a split weight, and once of rests without a
    split weight. `members`: (parameter, its group with the saved options, name, saved state).
    """
    lacking, dropped = [], []
    for param, group, name, state in members:
        if state and is_split(group, param) != (REST_KEY in state):
            (dropped if REST_KEY in state else lacking).append(name)
    if lacking:
        warn_caller(
            f"the state of {len(lacking)} parameters ({first_few(lacking, says_count=False)}) has "
            f"no {REST_KEY}: it was saved without {MASTER_KEY}, and their fp32 weights begin at "
            "the bf16 weights. To begin at fp32 weights, pass them to load_master_weights()"
        )
    if dropped:
        warn_caller(
            f"the {REST_KEY} of {len(dropped)} parameters "
            f"({first_few(dropped, says_count=False)}) is not loaded, because they are no bf16 "
            f"parameters here, or their group has no {MASTER_KEY}: the bits of the "
            "weights beyond bf16 are lost. To keep them, load the checkpoint into bf16 parameters, "
            "and take the weights of master_weights()"
        )


def members_by_name(groups: Sequence[dict]) -> Iterator[tuple[str, torch.Tensor, dict]]:
    """Yield (name without prefixes of wrappers, parameter, group). Raises ValueError for parameters
    without a name, and for a name of two parameters.
    """
    seen = set()
    for group in groups:
        for param, name in names_in(group).items():
            if name.startswith("#"):
                raise ValueError(
                    f"parameter {name} of shape {tuple(param.shape)} has no name: build the "
                    "optimizer from named parameters, such as model.named_parameters()"
                )
            name = clean_name(name)
            if name in seen:
                raise ValueError(f"two parameters have the name {name}: name them apart")
            seen.add(name)
            yield name, param, group


def master_weight(param: torch.Tensor, group: dict, state: Mapping) -> torch.Tensor:
    """Return a copy of the weight of a parameter: in fp32 if it is split, else in its own dtype. A
    split weight without state is the parameter.
    """
    local = local_of(param)
    rest = state.get(REST_KEY)
    if not is_split(group, param):
        found = local.clone()
    else:
        found = local.float() if rest is None else joined(local, local_of(rest))
    if not is_dtensor(param):
        return found
    return as_dtensor(found, param.shape, param.device_mesh, param.placements, param.stride())


def local_weights(
    members: Sequence[tuple[str, torch.Tensor, dict]], weights: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Return the local part of the weight of each of `members`, from whole tensors or DTensors of
    any placements; collective for DTensors that have to be gathered.

    Raises ValueError, before any communication, for a missing weight or one of another shape.
    """
    for name, param, _ in members:
        if name not in weights:
            raise ValueError(
                f"there is no weight of parameter {name} among {len(weights)} weights: pass the "
                "weights of all parameters of the optimizer, by the names of the model"
            )
        shape = tuple(getattr(weights[name], "shape", ()))
        if not isinstance(weights[name], torch.Tensor) or shape != tuple(param.shape):
            raise ValueError(
                f"the weight of parameter {name} is {type(weights[name]).__name__} of shape "
                f"{shape}, but the parameter has shape {tuple(param.shape)}: pass its whole weight"
            )
    found = [place_like(weights[name].detach(), param) for name, param, _ in members]
    return [local_of(value).to(param.device) for value, (_, param, _) in zip(found, members)]


def write_parameter(param: torch.Tensor, group: dict, weight: torch.Tensor) -> torch.Tensor | None:
    """Write the local part of a weight to a parameter; return the rest of a split weight."""
    local = local_of(param)
    if not is_split(group, param):
        local.copy_(weight)
        return None
    high, rest = split(weight.float())
    local.copy_(high)
    return rest

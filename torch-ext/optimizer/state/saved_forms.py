"""The result of `state_dict()` in the forms that torch.distributed.checkpoint and torch.save need.
Nothing is copied but state that moves to the host.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable

import torch

from ..params.dtensor import extent, is_dtensor, local_of, with_local
from ..rules.elementwise import DTYPE_KEY
from ..rules.rule import rule_name, rule_of

# Keys of a group that describe the model, missing from groups to which they were not given
SPLITS = "split", "transposed", DTYPE_KEY
MUON = "muon"  # the rule of a group without the name of a rule


def called_by_checkpoint(function: str | None = None) -> bool:
    """Return whether torch.distributed.checkpoint is among the callers of the current function;
    with `function`, whether its function of that name is.

    torch.distributed.checkpoint loads into the tensors of `state_dict()`, and needs state of every
    parameter. Other callers must not get new state: accelerate's `prepare` calls `state_dict()`
    before the model is sharded, moves the state to the GPU and loads it back, so new state would be
    whole on every rank.
    """
    # torch has no flag for the purpose, so the call stack is searched
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("torch.distributed.checkpoint"):
            if function in (None, frame.f_code.co_name):
                return True
        frame = frame.f_back
    return False


def without_splits(state_dict: dict) -> dict:
    """Return a state dict whose groups hold {} as values of SPLITS.

    torch.distributed.checkpoint refuses a checkpoint that lacks a value of the optimizer: with {},
    which has no value, a checkpoint from before the split was set loads. The keys stay, since the
    flattened form demands all keys of the live groups. Loading never reads either value.
    """
    groups = [
        {key: {} if key in SPLITS else value for key, value in group.items()}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def with_rule_names(state_dict: dict) -> dict:
    """Return a state dict whose groups of matrices hold the name of their rule as `use_muon`, in
    place of True, unless the rule is Muon's.

    torch.distributed.checkpoint reads only the keys that the loading optimizer has. Groups of Muon
    and NorMuon have no key `rule`, and a new key would be missing in older checkpoints. `use_muon`
    is in all of them. Older versions of the package refuse the name, with an error.
    """
    groups = []
    for group in state_dict["param_groups"]:
        with contextlib.suppress(TypeError, ValueError):  # the next step refuses it
            if group["use_muon"] and (name := rule_name(type(rule_of(group)))) != MUON:
                group = {**group, "use_muon": name}
        groups.append(group)
    return {**state_dict, "param_groups": groups}


def saved_rule_name(saved: dict) -> str | None:
    """Return the name of the rule that `with_rule_names` put into a saved group; None for Muon's
    rule, AdamW and groups of other sources.
    """
    kind = saved.get("use_muon")
    return kind if isinstance(kind, str) else None


def on_one_device(state_dict: dict) -> dict:
    """Return a state dict with all state of offloaded optimizers on the host, if the caller is
    torch's `set_optimizer_state_dict` with `full_state_dict=True`.

    torch fills the tensors from whole ones and passes them to `load_state_dict`. Before that it
    raises ValueError ("Device mismatch") for state on several devices: with offload, state per
    element is on the host, and state per row, block or matrix on the GPU.
    """
    if not called_by_checkpoint("_load_optim_state_dict"):
        return state_dict
    return _with_values(state_dict, _on_host)


def with_own_storages(state_dict: dict) -> dict:
    """Return a state dict, or the dict of a pickle, in which each state on the host has a storage
    of its own bytes, shared with the optimizer.

    With offload, states of several dtypes lie in one storage, which torch.save refuses.
    """
    return _with_values(state_dict, _with_own_storage)


def _with_values(state_dict: dict, shown: Callable[[object], object]) -> dict:
    """Return a copy of a state dict, or of the dict of a pickle, with `shown(value)` in place of
    each value of a parameter's state.
    """
    state = copy.copy(state_dict["state"])  # a pickle keeps a defaultdict
    for key, entries in state.items():
        if isinstance(entries, dict):  # users may add other entries
            state[key] = {name: shown(value) for name, value in entries.items()}
    return {**state_dict, "state": state}


def _with_own_storage(value: object) -> object:
    """Return a tensor, or a DTensor's shard, in a storage that begins and ends with its elements;
    other values unchanged.
    """
    if not isinstance(value, torch.Tensor):
        return value
    local = local_of(value)
    storage = local.untyped_storage()
    start = local.storage_offset() * local.itemsize
    if local.device.type != "cpu" or not local.numel() or storage.nbytes() == local.nbytes:
        return value
    end = start + extent(local.shape, local.stride()) * local.itemsize
    own = storage[start:end]
    local = torch.empty(0, dtype=local.dtype).set_(own, 0, local.shape, local.stride())
    return with_local(value, local) if is_dtensor(value) else local


def _on_host(value: object) -> object:
    """Return a tensor with dims, or a DTensor's shard, on the host; other values unchanged."""
    if not isinstance(value, torch.Tensor) or not value.ndim or value.device.type == "cpu":
        return value
    local = local_of(value).cpu()
    return with_local(value, local) if is_dtensor(value) else local

"""What becomes of a state dict that is loaded: what fits is copied to where this rank keeps it, the rest is refused.

Decides what a saved state must look like, by name, shape, dtype and group, and does so before anything is changed.
Knows no file (checkpoint.py); what other optimizers write is in peers.py.
"""
from __future__ import annotations

import contextlib

import torch

from .groups import clean_name
from .layout import as_dtensor, is_by_rows, is_dtensor, local_of, place_like
from .names import in_group, name_of
from .owned import STATE_KEYS
from .peers import PEERS, listed, marked
from .store import home_of, state_keys, state_shape
from .validation import check_numbers

KINDS = {True: "Muon", False: "AdamW"}  # use_muon -> the kind of a group, for messages
OTHERS = "maximize", "amsgrad", "differentiable"  # options of torch's that change what a step is
ADAMW = "maximize", "amsgrad", "capturable", "decoupled_weight_decay"  # of torch's AdamW, which no group has here


class Loading:
    """One `load_state_dict`: torch gets the groups, and the state is put in place when it is done with them."""

    def __init__(self, groups, options):
        self.own, self.options, self.restored = [dict(group) for group in groups], options, {}

    @contextlib.contextmanager
    def inside(self, optimizer):
        """Have an optimizer's `load_state_dict` do it meanwhile."""
        hooks = [optimizer.register_load_state_dict_pre_hook(self.take),
                 optimizer.register_load_state_dict_post_hook(self.settle, prepend=True)]  # before those of others
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self, _, loaded):
        """Before: check and copy the state. Groups of other numbers of parameters are torch's to refuse, and what else
        somebody keeps in the state of a parameter is torch's to load.
        """
        if missing := {"state", "param_groups"} - set(loaded):
            raise ValueError(f"the state dict has no {min(missing)!r}, only {', '.join(map(repr, loaded)) or None}: "
                             "pass what an optimizer's state_dict() has returned")
        counts = [[len(group["params"]) for group in groups] for groups in (loaded["param_groups"], self.own)]
        if counts[0] != counts[1]:
            return None
        groups = [_in_own_order(saved, own) for saved, own in zip(loaded["param_groups"], self.own)]
        loaded = {**loaded, "param_groups": groups}
        self.restored = restore(loaded, self.own, self.options)
        numbers = {number for group in loaded["param_groups"] for number in group["params"]}
        return {**loaded, "state": {key: _of_others(state) if key in numbers else state
                                    for key, state in loaded["state"].items()}}

    def settle(self, optimizer) -> None:
        """After: names, and options that the saved groups lack, are the optimizer's own. Of those that it does not know
        torch's AdamW leaves some, which say what is done here anyway, or how AdamW did it.
        """
        for group, own in zip(optimizer.param_groups, self.own):
            for key in [key for key in ADAMW if key not in own]:
                group.pop(key, None)
            group.update({key: own[key] for key in own if key not in group or key == "param_names"})
        for param, state in self.restored.items():
            optimizer.state[param].update(state)


def _in_own_order(saved, own) -> dict:
    """A saved group with the numbers of its parameters in the order in which the own group has their names. As it is
    where it holds other names, or none, or comes from torch.distributed.checkpoint: that has names for numbers, and has
    put them in order already, but not `param_names`.
    """
    ours, theirs = ([clean_name(name) for name in group.get("param_names") or ()] for group in (own, saved))
    number = dict(zip(theirs, saved["params"]))
    if not len(ours) == len(theirs) == len(number) == len(saved["params"]) or set(ours) != set(number):
        return saved
    if not all(isinstance(key, int) for key in saved["params"]):
        return saved
    return {**saved, "params": [number[name] for name in ours], "param_names": own["param_names"]}


def restore(loaded, groups, options) -> dict:
    """{parameter: a copy of its saved state, in the dtype and place in which the optimizer keeps it}.

    `loaded`: a state dict of as many groups and parameters. Tensors that lie otherwise than the parameter are moved;
    from DTensors that is collective. Raises ValueError, naming the parameter, for what does not fit.
    """
    members = []
    for number, (group, saved) in enumerate(zip(groups, loaded["param_groups"])):
        _check_kind(number, group, saved)
        for i, (param, key) in enumerate(zip(group["params"], saved["params"])):
            if key in loaded["state"]:
                members.append((param, group, name_of(group, i), loaded["state"][key]))
    for param, group, name, state in members:
        check_state(param, state_keys(group), name, state)
    return {param: _restored(param, state_keys(group), state, options) for param, group, _, state in members}


def _of_others(state) -> dict:
    """What neither this optimizer keeps nor torch's AdamW, with an option that is refused."""
    return {key: value for key, value in state.items() if key not in (*STATE_KEYS, "max_exp_avg_sq")}


def check_state(param, keys, name, state) -> None:
    """Raise ValueError unless the saved `state` of a parameter can be that of one whose rule keeps `keys`: all of them
    or none, but NorMuon goes on with Muon's, which has no second moment.
    """
    if not isinstance(state, dict):
        raise ValueError(f"the state of parameter {name} is of type {type(state).__name__}, but it needs a dict of "
                         f"{', '.join(keys)}: it was saved by another optimizer, or is damaged")
    if state and not set(keys) - {"second_moment"} <= set(state):
        raise ValueError(f"the state of parameter {name} is {', '.join(sorted(state))}, but it needs "
                         f"{', '.join(keys)}: a part of it was lost, or it was saved by another optimizer or for "
                         "another kind of group")
    for key in [k for k in keys if k in state]:
        shape, came = state_shape(param, key), tuple(getattr(state[key], "shape", ()))
        if came != shape and not (key == "step" and came == (1,)):
            raise ValueError(f"{key} of parameter {name} has shape {came} in the state, but a parameter of shape "
                             f"{tuple(param.shape)} needs {shape}: it was saved for another parameter")
        dtype = _tensor(state[key]).dtype
        whole = key == "step" and not dtype.is_complex and dtype != torch.bool
        if not (dtype.is_floating_point or whole):
            raise ValueError(f"{key} of parameter {name} has dtype {dtype} in the state, but it needs a floating-point "
                             "one: it was saved by another optimizer, or is damaged")


def _check_saved_here(number: int, group: dict, saved: dict) -> None:
    """Raise ValueError for a saved group of another Muon, or of SGD: its momentum and its options
    mean something else. Keys that the own group has, too, are nobody's mark.
    """
    where = f"parameter group {number} was saved by"
    convert = "pass the state dict through convert_state_dict first, which says more"
    if names := marked(set(saved) - set(group)):
        raise ValueError(f"{where} {PEERS[names[0]].title} (keys {listed(saved)}), which scales its "
                         f"state or its steps differently: {convert}")
    if group["use_muon"] and "momentum" in saved and "adjust_lr_fn" not in saved:
        raise ValueError(f"{where} another optimizer: it has momentum, but no adjust_lr_fn (keys "
                         f"{listed(saved)}). If that was a Muon, {convert}")


def _check_kind(number, group, saved) -> None:
    _check_saved_here(number, group, saved)
    other = [key for key in OTHERS if saved.get(key)] + ["beta2"] * ("beta2" in saved and "beta2" not in group)
    other += ["decoupled_weight_decay"] * (saved.get("decoupled_weight_decay") is False and bool(saved["weight_decay"]))
    if other:
        raise ValueError(f"parameter group {number} was saved with {other[0]}={saved[other[0]]!r}, which is not known "
                         "here: go on with the one that saved it, or remove the key")
    ours, theirs = bool(group["use_muon"]), bool(saved.get("use_muon", group["use_muon"]))
    if ours != theirs:
        names = saved.get("param_names") or saved["params"]
        raise ValueError(f"parameter group {number} ({names[0]}, ...) is one of {KINDS[theirs]} in the state dict, but "
                         f"of {KINDS[ours]} here: build the groups in the order in which they were saved")
    with in_group(number, group):
        check_numbers({**group, **{key: saved[key] for key in saved if key in group}})


def _tensor(value):
    """Of a number, too, as of AdamW's steps in old files; the default dtype need not hold it."""
    return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _restored(param, keys, state, options) -> dict:
    kept = {}
    for key in [k for k in keys if k in state]:
        device, dtype = home_of(key, param, options.state_dtype)
        value = _tensor(state[key]).detach()
        if key == "step":
            value = value.reshape(())
        elif not options.owner_keeps_state or not is_by_rows(value, options.process_group):
            value = place_like(value, param)
        local = local_of(value).to(device, dtype, copy=True)
        dtensor = is_dtensor(value)
        kept[key] = as_dtensor(local, value.shape, value.device_mesh, value.placements) if dtensor else local
    return kept

"""The whole state of an optimizer in one safetensors file, for one process.

Decides the file's form: tensors `state.<parameter>.<key>`, as torch.distributed.checkpoint names them, and a header
that says what belongs to which parameter. Nothing is unpickled, and nothing is loaded before everything fits. Sharded
state goes through torch.distributed.checkpoint and needs nothing of this file.
"""
from __future__ import annotations

import json
import os

import torch

from .groups import clean_names
from .layout import is_dtensor
from .loaded import KINDS, check_state
from .names import given_names, in_group
from .owned import STATE_KEYS
from .store import state_keys
from .validation import TOLERATED, check_group

FORMAT, VERSION = "optimizer-state", "1"
STRUCTURE = ("params", "param_names", "use_muon")  # of a group: what its options are not


def export_state(optimizer, path, model=None) -> None:
    """Write the state and the options of all groups to a safetensors file, whole or not at all.

    `model` names the parameters; without it the groups' `param_names` do. For one process: ValueError for DTensors and
    where owners keep the state (use torch.distributed.checkpoint), or where a parameter has no name; RuntimeError after
    a step that failed half-way. Needs the package safetensors.
    """
    if optimizer._torn:
        raise RuntimeError("the last step of this optimizer failed half-way, so that a file would hold some state of "
                           "before it and some of after it: load a checkpoint (load_state_dict), then export")
    optimizer._early.refuse("export_state")
    optimizer.wait()
    optimizer._beta1.follow(optimizer.param_groups)
    names = _names(optimizer, model)
    tensors = {f"state.{name}.{key}": value.detach().cpu().contiguous() for param, name in names.items()
               for key, value in optimizer.state.get(param, {}).items() if key in STATE_KEYS}
    groups = [{"params": [names[p] for p in group["params"]], "use_muon": bool(group["use_muon"]),
               "options": {key: _plain(value) for key, value in group.items() if _is_option(key, value)}}
              for group in optimizer.param_groups]
    header = {"params": {name: list(p.shape) for p, name in names.items()}, "groups": groups,
              "tensors": {name: _described(t) for name, t in tensors.items()}}
    _write(path, tensors, {"format": FORMAT, "version": VERSION, **{k: json.dumps(v) for k, v in header.items()}})


def import_state(optimizer, path, model=None) -> None:
    """Load what `export_state` wrote: state by the parameters' names, and options of the groups in which they were.

    A group whose parameters were in several groups keeps its own options. Names as in `export_state`. Raises
    ValueError, before the optimizer is changed, for a file that is truncated or of another form, naming the parameter
    that is missing, unknown, of another shape or in another kind of group, or the option that is of another type.
    """
    names = _names(optimizer, model)
    header, tensors = _read(path)
    _check_params(path, {name: list(p.shape) for p, name in names.items()}, header["params"])
    states = {}
    for name, tensor in tensors.items():
        param, _, key = name.removeprefix("state.").rpartition(".")
        states.setdefault(param, {})[key] = tensor
    groups = []
    for i, group in enumerate(optimizer.param_groups):
        with in_group(i, group):
            groups.append(_saved_group(path, group, names, header["groups"], states))
    number = {name: i for i, name in enumerate(n for group in groups for n in group["params"])}
    if set(states) - set(number):
        raise ValueError(f"{path} has state of {min(set(states) - set(number))}, which it does not list as a parameter")
    for group in groups:
        group["params"] = [number[name] for name in group["params"]]
    optimizer.load_state_dict({"state": {number[n]: s for n, s in states.items()}, "param_groups": groups})


def _names(optimizer, model) -> dict:
    """{parameter: its name}, for what one process holds whole."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if model is not None:
        names = clean_names(model)
        known = {p: names[name] for name, p in model.named_parameters()}
    else:
        known = {p: name for g in optimizer.param_groups for p, name in zip(g["params"], given_names(g))}
    first = {}
    for i, param in enumerate(params):
        if known.get(param) is None:
            raise ValueError(f"parameter #{i} of shape {tuple(param.shape)} has no name: pass model=, the model that "
                             "has it, or build the optimizer from named parameters")
        if is_dtensor(param) or optimizer._options.owner_keeps_state:
            raise ValueError(f"the state of parameter {known[param]} is spread over several ranks, but one file is for "
                             "one process: use torch.distributed.checkpoint, which also writes safetensors")
        twin = first.setdefault(known[param], param)
        if twin is not param:
            raise ValueError(f"two parameters, of shapes {tuple(twin.shape)} and {tuple(param.shape)}, have the name "
                             f"{known[param]}, and one file holds one state by it: name them apart (param_names)")
    return {param: known[param] for param in params}


def _is_option(key, value) -> bool:
    """Whether JSON holds an entry of a group; what other tools keep there may be anything."""
    if key in STRUCTURE or not isinstance(key, str):
        return False
    try:
        json.dumps(_plain(value))
    except (TypeError, ValueError, RuntimeError, RecursionError):
        return False
    return True


def _plain(value):
    """An option as JSON has it."""
    if isinstance(value, (tuple, list)):
        return list(map(_plain, value))
    return value.item() if hasattr(value, "item") else value  # of torch or NumPy


def _as_own(key, own, value):
    """An option from JSON in the form in which a group has it. ValueError where one is a bool or a number, the other
    not; for the rest, see check_group.
    """
    types, allowed = ((bool,), "True or False") if isinstance(own, bool) else ((int, float), "a number")
    typed = isinstance(own, (bool, int, float, torch.Tensor)) and not (key in TOLERATED and value is None)
    if typed and type(value) not in types:
        raise ValueError(f"{key}={value!r} is not allowed: it must be {allowed}")
    if isinstance(own, torch.Tensor):
        return torch.full_like(own, value)
    return _as_tuples(value)


def _as_tuples(value):
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _described(tensor) -> list:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _write(path, tensors, metadata) -> None:
    """Under another name first: whoever is interrupted leaves the old file."""
    from safetensors.torch import save_file
    part = f"{os.fspath(path)}.{os.getpid()}.part"
    try:
        save_file(tensors, part, metadata)
        os.replace(part, path)
    finally:
        if os.path.exists(part):
            os.remove(part)


def _read(path):
    """(header, {name: tensor}) of a file that is what its header says; otherwise ValueError."""
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file: {error}") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is a safetensors file, but not one that export_state wrote: its format is "
                         f"{metadata.get('format')!r}")
    if metadata.get("version") != VERSION:
        raise ValueError(f"{path} has version {metadata.get('version')!r} of the format, but this package reads "
                         f"{VERSION!r}: load it with the package that wrote it")
    header = _header(path, metadata)
    for name in sorted(set(tensors) | set(header["tensors"])):
        came, said = name in tensors and _described(tensors[name]), header["tensors"].get(name, False)
        if came != said:
            raise ValueError(f"{path} holds {name} as {came or 'nothing'}, but its header says {said or 'nothing'}")
    return header, tensors


def _header(path, metadata) -> dict:
    try:
        header = {key: json.loads(metadata[key]) for key in ("params", "groups", "tensors")}
        if [type(header[key]) for key in header] != [dict, list, dict]:
            raise ValueError(f"{', '.join(header)} are not of the types that export_state writes")
        for group in header["groups"]:
            if not isinstance(group["use_muon"], bool):
                raise ValueError(f"use_muon={group['use_muon']!r} must be True or False")
            set(group["params"]), group["options"].items()
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has a header that cannot be read: {error}") from error
    return header


def _check_params(path, ours, theirs) -> None:
    for name in sorted(set(ours) | set(theirs)):
        if name not in theirs:
            raise ValueError(f"{path} has no parameter {name}, which the optimizer has")
        if name not in ours:
            raise ValueError(f"{path} has a parameter {name}, which the optimizer does not have")
        if ours[name] != theirs[name]:
            raise ValueError(f"parameter {name} has shape {ours[name]} here, but {theirs[name]} in {path}")


def _saved_group(path, group, names, saved, states) -> dict:
    """A group as a state dict has it, with the options of the file; `params` are names."""
    mine, keys = [names[p] for p in group["params"]], state_keys(group)
    for param, name in zip(group["params"], mine):
        was = next((g["use_muon"] for g in saved if name in g["params"]), group["use_muon"])
        if was != bool(group["use_muon"]):
            raise ValueError(f"parameter {name} was in a group of {KINDS[was]} when {path} was written, but is in one "
                             f"of {KINDS[not was]} here")
        if name in states and set(states[name]) != set(keys):
            raise ValueError(f"{path} has {', '.join(sorted(states[name]))} of parameter {name}, but its state here is "
                             f"{', '.join(sorted(keys))}")
        check_state(param, keys, name, states.get(name, {}))
    from_file = [g["options"] for g in saved if set(g["params"]) & set(mine)]
    options = from_file[0] if len(from_file) == 1 else {}
    taken = {key: _as_own(key, group[key], options[key]) for key in group if key in options}
    check_group({**group, **taken}, set(group))
    return {**group, **taken, "params": mine}

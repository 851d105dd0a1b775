"""The whole state of an optimizer of one process in one safetensors file.

Tensors are named `state.<parameter>.<key>`, as torch.distributed.checkpoint names them; the header
says which group each parameter was in. Nothing is unpickled, and nothing is loaded before
everything fits.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import stat

import torch

from ..params.dtensor import is_dtensor
from ..params.errors import given_names, in_group, shortened
from ..params.param_groups import clean_names
from ..params.validation import TOLERATED, check_group
from ..rules.rule import STATE_KEYS, state_keys
from .state_dict import KINDS, STRUCTURE, check_state, options_of

FORMAT, VERSION = "optimizer-state", "1"
DEPTH = 16  # levels of lists and dicts in a header; export_state writes 6 at most


def export_state(optimizer, path, model=None) -> None:
    """Write the state and the options of all groups to a safetensors file, whole or not at all.

    `path`: str, bytes or PathLike. An old file is replaced, also behind a symbolic link, and its
    mode is kept; a new one gets the mode that the umask leaves. `model` names the parameters;
    without it the groups' `param_names` do. For one process: ValueError for DTensors and where
    owners keep the state (use torch.distributed.checkpoint), or where a parameter has no name;
    RuntimeError after a step that failed half-way; OSError, with the path, where the file cannot be
    written. Needs the package safetensors.
    """
    path = _text_of(path)
    if optimizer._is_torn:
        raise RuntimeError(
            "the last step of this optimizer failed half-way, so that a file would hold some state "
            "of "
            "before it and some of after it: load a checkpoint (load_state_dict), then export"
        )
    optimizer._backward_overlap.raise_if_started("export_state")
    optimizer.wait()
    optimizer._beta1.follow(optimizer.param_groups)
    names = _names(optimizer, model)
    tensors = {
        f"state.{name}.{key}": value.detach().cpu().contiguous()
        for param, name in names.items()
        for key, value in optimizer.state.get(param, {}).items()
        if key in STATE_KEYS
    }
    groups = [
        {
            "params": [names[p] for p in group["params"]],
            "use_muon": bool(group["use_muon"]),
            "options": {
                key: _plain(value) for key, value in group.items() if _is_option(key, value)
            },
        }
        for group in optimizer.param_groups
    ]
    header = {
        "params": {name: list(p.shape) for p, name in names.items()},
        "groups": groups,
        "tensors": {name: _described(t) for name, t in tensors.items()},
    }
    _write(
        path,
        tensors,
        {
            "format": FORMAT,
            "version": VERSION,
            "digest": _digest(tensors),
            **{k: json.dumps(v) for k, v in header.items()},
        },
    )


def import_state(optimizer, path, model=None) -> None:
    """Load what `export_state` wrote: state by the parameters' names, and options of the groups in
    which they were.

    A group whose parameters were in several groups keeps its own options, with a warning. Names as
    in `export_state`. Raises ValueError, before the optimizer is changed, for a file that is
    truncated, damaged or of another form, naming the parameter that is missing, unknown, of another
    shape or in another kind of group, or the option that is of another type; OSError for a file
    that cannot be read.
    """
    path = _text_of(path)
    names = _names(optimizer, model)
    header, tensors = _read(path)
    _check_params(path, {name: list(p.shape) for p, name in names.items()}, header["params"])
    states = {}
    for name, tensor in tensors.items():
        param, _, key = name.removeprefix("state.").rpartition(".")
        states.setdefault(param, {})[key] = tensor
    own, groups = optimizer.param_groups, []
    for i, group in enumerate(own):
        with in_group(i, group):
            groups.append(_saved_group(path, i, own, names, header["groups"], states))
    number = {name: i for i, name in enumerate(n for group in groups for n in group["params"])}
    if set(states) - set(number):
        raise ValueError(
            f"{path} has state of {shortened(min(set(states) - set(number)))}, which "
            "it does not list as a parameter"
        )
    if header["digest"] not in (None, _digest(tensors)):  # None: an older version wrote the file
        raise ValueError(
            f"{path} is damaged: its tensors are not those that export_state wrote "
            "(their SHA-256 is not the one in the header). Load another file"
        )
    for group in groups:
        group["params"] = [number[name] for name in group["params"]]
    optimizer.load_state_dict(
        {"state": {number[n]: s for n, s in states.items()}, "param_groups": groups}
    )


def _names(optimizer, model) -> dict:
    """{parameter: its name}, for what one process holds whole."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if model is not None:
        names = clean_names(model)
        known = {p: names[name] for name, p in model.named_parameters()}
    else:
        known = {
            p: name for g in optimizer.param_groups for p, name in zip(g["params"], given_names(g))
        }
    first = {}
    for i, param in enumerate(params):
        if known.get(param) is None:
            raise ValueError(
                f"parameter #{i} of shape {tuple(param.shape)} has no name: pass model=, the model "
                "that "
                "has it, or build the optimizer from named parameters"
            )
        if is_dtensor(param) or optimizer._options.owner_keeps_state:
            raise ValueError(
                f"the state of parameter {known[param]} is spread over several ranks, but one file "
                "is for "
                "one process: use torch.distributed.checkpoint, which also writes safetensors"
            )
        twin = first.setdefault(known[param], param)
        if twin is not param:
            raise ValueError(
                f"two parameters, of shapes {tuple(twin.shape)} and {tuple(param.shape)}, have the "
                "name "
                f"{known[param]}, and one file holds one state by it: name them apart (param_names)"
            )
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
    """An option from JSON in the form in which a group has it. ValueError where one is a bool or a
    number, the other not; for the rest, see check_group.
    """
    types, allowed = (
        ((bool,), "True or False") if isinstance(own, bool) else ((int, float), "a number")
    )
    typed = isinstance(own, (bool, int, float, torch.Tensor)) and not (
        key in TOLERATED and value is None
    )
    if typed and type(value) not in types:
        raise ValueError(f"{key}={shortened(repr(value))} is not allowed: it must be {allowed}")
    if isinstance(own, torch.Tensor):
        return torch.full_like(own, value)
    return _as_tuples(value)


def _as_tuples(value):
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _described(tensor) -> list:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _digest(tensors: dict) -> str:
    """SHA-256 of tensors on the CPU: names, dtypes, shapes and bytes, in the order of names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        total.update(json.dumps([name, *_described(tensor)]).encode())
        if tensor.nbytes:
            total.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return f"sha256:{total.hexdigest()}"


def _text_of(path: str | bytes | os.PathLike) -> str:
    """A path as text. Raises ValueError for one that no file system takes."""
    text = os.fsdecode(path)
    if "\0" in text:
        raise ValueError(f"the path {shortened(repr(text))} holds a NUL character: remove it")
    return text


def _write(path: str, tensors: dict, metadata: dict) -> None:
    """Replace the file at `path` in one move: whoever is interrupted leaves the old one.

    The new file is written beside it under a random name, which no other thread, process or
    container has, and flushed to the disk. Raises OSError with the path.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = os.path.realpath(path)  # a symbolic link stays one
    part = os.path.join(os.path.dirname(target), f".{os.urandom(8).hex()}.part")
    try:
        mode = _create(part, target)
        save_file(tensors, part, metadata)
        if stat.S_IMODE(os.stat(part).st_mode) != mode:  # safetensors puts a file of its own there
            os.chmod(part, mode)
        _flush(part)
        os.replace(part, target)
        with contextlib.suppress(OSError):  # the file is whole; not every system flushes folders
            _flush(os.path.dirname(target), os.O_RDONLY)
    except (OSError, SafetensorError) as error:
        raise _write_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            os.remove(part)


def _create(part: str, target: str) -> int:
    """Create an empty file; returns its mode: that of the old file, or what the umask leaves."""
    old = os.stat(target) if os.path.exists(target) else None
    if old is not None and not stat.S_ISREG(old.st_mode):
        number = errno.EISDIR if stat.S_ISDIR(old.st_mode) else errno.EINVAL
        raise OSError(number, "it is no regular file, which a new one could replace")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        return stat.S_IMODE((os.fstat(file) if old is None else old).st_mode)
    finally:
        os.close(file)


def _flush(path: str, flags: int = os.O_RDWR) -> None:
    """Have a file, or the entries of a folder, written to the disk."""
    file = os.open(path, flags)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write_error(path: str, error: Exception) -> OSError:
    """What `open(path, "wb")` would raise: safetensors says the system's error as text, and
    temporary names help nobody.
    """
    number = re.search(r"\(os error (\d+)\)", str(error))
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, path)
    if number:
        return OSError(int(number[1]), os.strerror(int(number[1])), path)
    return OSError(f"cannot write {path}: {shortened(error)}")


def _read(path):
    """(header, {name: tensor}) of a file that is what its header says; otherwise ValueError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = file.keys()  # the file is no dict
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        text = f"{path} is truncated or no safetensors file: {shortened(error)}"
        raise ValueError(text) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} is a safetensors file, but not one that export_state wrote: its format is "
            f"{shortened(repr(metadata.get('format')))}"
        )
    if metadata.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {shortened(repr(metadata.get('version')))} of the "
            f"format, but this package reads {VERSION!r}: load it with the package "
            "that wrote it"
        )
    header = _header(path, metadata)
    for name in sorted(set(tensors) | set(header["tensors"])):
        came, said = (
            name in tensors and _described(tensors[name]),
            header["tensors"].get(name, False),
        )
        if came != said:
            raise ValueError(
                f"{path} holds {shortened(name)} as {shortened(came or 'nothing')}, "
                f"but its header says {shortened(said or 'nothing')}"
            )
    return header, tensors


def _header(path, metadata) -> dict:
    try:
        header = {key: json.loads(metadata[key]) for key in ("params", "groups", "tensors")}
        if [type(header[key]) for key in header] != [dict, list, dict]:
            raise ValueError(f"{', '.join(header)} are not of the types that export_state writes")
        if not _is_shallow(header):
            raise ValueError(f"it is nested more than {DEPTH} deep")
        for group in header["groups"]:
            _check_form(group)
    except RecursionError as error:
        raise ValueError(f"{path} has a header that cannot be read: nested too deep") from error
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has a header that cannot be read: {shortened(error)}") from error
    return {**header, "digest": metadata.get("digest")}


def _is_shallow(value: object) -> bool:
    """Whether lists and dicts lie at most DEPTH deep in each other."""
    level = [value]
    for _ in range(DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return not level


def _check_form(group: dict) -> None:
    """Raise ValueError, KeyError, TypeError or AttributeError for a group that export_state could
    not have written.
    """
    if not isinstance(group["use_muon"], bool):
        raise ValueError(f"use_muon={group['use_muon']!r} must be True or False")
    set(group["params"])
    # Older versions wrote it
    if wrong := sorted(group["options"].keys() & {*STRUCTURE} - {"name"}):
        raise ValueError(f"{wrong[0]!r} is among the options of a group")


def _check_params(path, ours, theirs) -> None:
    for name in sorted(set(ours) | set(theirs)):
        if name not in theirs:
            raise ValueError(f"{path} has no parameter {shortened(name)}, which the optimizer has")
        if name not in ours:
            raise ValueError(
                f"{path} has a parameter {shortened(name)}, which the optimizer does not have"
            )
        if ours[name] != theirs[name]:
            raise ValueError(
                f"parameter {shortened(name)} has shape {ours[name]} here, but "
                f"{shortened(theirs[name])} in {path}"
            )


def _saved_group(path, number, own, names, saved, states) -> dict:
    """Group `number` of the optimizer's `own` as a state dict has it, with the options of the file;
    `params` are names.
    """
    group, ours = own[number], [[names[p] for p in other["params"]] for other in own]
    mine, keys = ours[number], state_keys(group)
    for param, name in zip(group["params"], mine):
        was = next((g["use_muon"] for g in saved if name in g["params"]), group["use_muon"])
        if was != bool(group["use_muon"]):
            raise ValueError(
                f"parameter {name} was in a group of {KINDS[was]} when {path} was written, but is "
                "in one "
                f"of {KINDS[not was]} here"
            )
        if name in states and set(states[name]) != set(keys):
            raise ValueError(
                f"{path} has {shortened(', '.join(sorted(states[name])))} of "
                f"parameter {name}, but its state here is {', '.join(sorted(keys))}"
            )
        check_state(param, keys, name, states.get(name, {}))
    options = options_of(number, own, ours, [(set(g["params"]), g["options"]) for g in saved])
    taken = {key: _as_own(key, group[key], options[key]) for key in group if key in options}
    check_group({**group, **taken}, set(group))
    return {**group, **taken, "params": mine}

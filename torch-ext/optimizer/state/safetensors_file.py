"""The whole state of an optimizer of a single process in a safetensors file.

`export_state` writes, `import_state` reads. Tensors are named `state.<parameter>.<key>`, as by
torch.distributed.checkpoint; the header names the group of each parameter. Nothing is unpickled,
and the optimizer changes only after all checks.
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

from ..kernels.quantized.blocks import DTYPE as QUANTIZED
from ..params.checks.group_keys import OPTIONAL_KEYS, TOLERATED
from ..params.checks.saved_function import with_function, without_function
from ..params.dtensor import is_dtensor
from ..params.errors import given_names, in_group, shortened
from ..params.model.names import clean_names
from ..params.units import splits_of
from ..params.validation import check_group
from ..rules.muon import REST_KEY
from ..rules.rule import SCALE_KEY, all_state_keys, group_state_dtype, keys_of
from .create import is_readable
from .momentum.averages import loaded_keys, wide_if_needed
from .momentum.conversion import with_own_momentum
from .momentum.device_values import DeviceValues
from .state_dict import (
    KINDS,
    STRUCTURE,
    check_same_rule,
    check_saved_state,
    options_of,
    with_momentum_steps,
    with_own_rule,
    with_saved_rule,
)
from .weights.split import with_own_precision

FORMAT, VERSION = "optimizer-state", "1"
DEPTH = 16  # allowed levels of lists and dicts in a header; export_state writes at most 6


def export_state(
    optimizer: torch.optim.Optimizer,
    path: str | bytes | os.PathLike,
    model: torch.nn.Module | None = None,
) -> None:
    """Write the state and the options of all groups to a safetensors file, completely or not at
    all.

    `path`: an old file is replaced, also behind a symbolic link, and its mode is kept; a new file
    gets the mode of the umask. `model` names the parameters; without `model` the `param_names` of
    groups do. For a single process. Raises ValueError for DTensors, for state kept by owners (use
    torch.distributed.checkpoint) and for parameters without name, RuntimeError after a step that
    failed half-way, and OSError, with the path, if the file cannot be written. Needs the package
    safetensors.
    """
    path = _path_text(path)
    # A file outlives the warning that state_dict() gives, so this raises
    if optimizer._is_inconsistent:
        raise RuntimeError(
            "the last step of this optimizer failed half-way, so that a file would hold some state "
            "of before it and some of after it: load a checkpoint (load_state_dict), then export"
        )
    optimizer._backward_overlap.raise_if_started("export_state")
    # Updates of the last step may still be in flight with overlap_forward
    optimizer.wait()
    # AdamW's betas follow a `momentum` that a schedule set
    optimizer._beta1.follow(optimizer.param_groups)
    names = _param_names(optimizer, model)
    state, keys = optimizer._with_missing_keys(), _own_keys(optimizer)
    tensors = {
        f"state.{name}.{key}": value.detach().cpu().contiguous()
        for param, name in names.items()
        for key, value in state.get(param, {}).items()
        if key in keys[param]
    }
    groups = [
        {
            "params": [names[p] for p in group["params"]],
            "use_muon": bool(group["use_muon"]),
            "options": {
                key: _to_json(value) for key, value in group.items() if _is_option(key, value)
            },
        }
        for group in map(without_function, optimizer.param_groups)
    ]
    header = {
        "params": {name: list(p.shape) for p, name in names.items()},
        "groups": groups,
        "tensors": {name: _dtype_and_shape(t) for name, t in tensors.items()},
    }
    _write_file(
        path,
        tensors,
        {
            "format": FORMAT,
            "version": VERSION,
            "digest": _digest(tensors),
            **{k: json.dumps(v) for k, v in header.items()},
        },
    )


def _own_keys(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, tuple[str, ...]]:
    """Return {parameter: keys of its state under the rule of its group}. Other code may keep
    entries of its own in the state, and a rule from before a live change has left others. All keys
    of this package for a group that is not `is_readable`.
    """
    dtype = optimizer._options.state_dtype
    return {
        param: keys_of(group, param, group_state_dtype(group, dtype)) if reads else all_state_keys()
        for group in optimizer.param_groups
        for reads in [is_readable(group, dtype)]
        for param in group["params"]
    }


def import_state(
    optimizer: torch.optim.Optimizer,
    path: str | bytes | os.PathLike,
    model: torch.nn.Module | None = None,
) -> None:
    """Load a file of `export_state`: state by parameter names, and options of the groups in the
    file.

    A group with parameters from several saved groups keeps its own options, with a warning. Names
    as in `export_state`. Raises before the optimizer changes: ValueError for a truncated, damaged
    or foreign file, and for a missing or unknown parameter, a different shape or kind of group, or
    an option of a different type; OSError for an unreadable file.
    """
    path = _path_text(path)
    names = _param_names(optimizer, model)
    # Everything is checked before load_state_dict changes the optimizer
    header, tensors = _read_file(path)
    _check_params(path, {name: list(p.shape) for p, name in names.items()}, header["params"])
    states = {}
    for name, tensor in tensors.items():
        param, _, key = name.removeprefix("state.").rpartition(".")
        states.setdefault(param, {})[key] = tensor
    own = optimizer.param_groups
    dtype = optimizer._options.state_dtype
    groups = []
    for i, group in enumerate(own):
        with in_group(i, group), DeviceValues() as numbers:
            saved = _saved_group(path, i, own, names, header["groups"], states, dtype, numbers)
            groups.append(saved)
    # A state dict numbers the parameters in the order of the groups
    number = {name: i for i, name in enumerate(n for group in groups for n in group["params"])}
    if set(states) - set(number):
        raise ValueError(
            f"{path} has state of {shortened(min(set(states) - set(number)))}, which "
            "it does not list as a parameter"
        )
    # None: an older version wrote the file
    if header["digest"] not in (None, _digest(tensors)):
        raise ValueError(
            f"{path} is damaged: its tensors are not those that export_state wrote "
            "(their SHA-256 is not the one in the header). Load another file"
        )
    for group in groups:
        group["params"] = [number[name] for name in group["params"]]
    optimizer.load_state_dict(
        {"state": {number[n]: s for n, s in states.items()}, "param_groups": groups}
    )


def _param_names(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module | None
) -> dict[torch.Tensor, str]:
    """Return {parameter: name}. Raises ValueError for a parameter without name, a DTensor, state
    kept by owners, and a name used twice.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if model is not None:
        names = clean_names(model)
        known = {p: names[name] for name, p in model.named_parameters()}
    else:
        known = {
            p: name for g in optimizer.param_groups for p, name in zip(g["params"], given_names(g))
        }
    by_name = {}
    for i, param in enumerate(params):
        if known.get(param) is None:
            raise ValueError(
                f"parameter #{i} of shape {tuple(param.shape)} has no name: pass model=, the model "
                "that has it, or build the optimizer from named parameters"
            )
        if is_dtensor(param) or optimizer._owner_keeps_state:
            raise ValueError(
                f"the state of parameter {known[param]} is spread over several ranks, but one file "
                "is for one process: use torch.distributed.checkpoint, which also "
                "writes safetensors"
            )
        namesake = by_name.setdefault(known[param], param)
        if namesake is not param:
            raise ValueError(
                f"two parameters, of shapes {tuple(namesake.shape)} and {tuple(param.shape)}, have "
                f"the name {known[param]}, and one file holds one state by it: name them apart "
                "(param_names)"
            )
    return {param: known[param] for param in params}


def _is_option(key: object, value: object) -> bool:
    """Return whether an entry of a group can be saved as JSON; entries of other tools may be
    anything.
    """
    if key in STRUCTURE or not isinstance(key, str):
        return False
    # The only complete test of a value is the conversion
    try:
        json.dumps(_to_json(value))
    except (TypeError, ValueError, RuntimeError, RecursionError):
        return False
    return True


def _to_json(value: object) -> object:
    """Return an option in the form of JSON."""
    if isinstance(value, (tuple, list)):
        return list(map(_to_json, value))
    # Scalars of torch or NumPy
    return value.item() if hasattr(value, "item") else value


def _from_json(key: str, own: object, value: object) -> object:
    """Return an option from JSON in the form of the group's own option: a tensor if `own` is a
    tensor, else tuples for lists.

    Raises ValueError if only one of the two is a bool or only one is a number; all other checks are
    in check_group.
    """
    types = (int, float)
    allowed = "a number"
    if isinstance(own, bool):  # a subclass of int
        types = (bool,)
        allowed = "True or False"
    is_unset = key in TOLERATED and value is None
    # adjust_lr_fn may be a number, a name or None
    is_fixed = not is_unset and key != "adjust_lr_fn"
    is_typed = is_fixed and isinstance(own, (bool, int, float, torch.Tensor))
    if is_typed and type(value) not in types:
        raise ValueError(f"{key}={shortened(repr(value))} is not allowed: it must be {allowed}")
    # An lr tensor stays a tensor, on its device
    if isinstance(own, torch.Tensor):
        return torch.full_like(own, value)
    return _as_tuples(value)


def _as_tuples(value: object) -> object:
    """Return `value` with tuples in place of lists, at all levels."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _dtype_and_shape(tensor: torch.Tensor) -> list:
    """Return [dtype, shape] of a tensor for the header."""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _digest(tensors: dict) -> str:
    """Return the SHA-256 of tensors on the CPU: names, dtypes, shapes and bytes, in the order of
    names.
    """
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        total.update(json.dumps([name, *_dtype_and_shape(tensor)]).encode())
        # Without a copy to bytes: state may be as large as the model
        if tensor.nbytes:
            total.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return f"sha256:{total.hexdigest()}"


def _path_text(path: str | bytes | os.PathLike) -> str:
    """Return a path as text. Raises TypeError for a value that is no path, and ValueError for a
    path with a NUL character.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(
            f"path is of type {type(path).__name__}, but it must be the path of a file: pass "
            "(optimizer, path). A state dict goes to optimizer.load_state_dict"
        )
    text = os.fsdecode(path)
    if "\0" in text:
        raise ValueError(f"the path {shortened(repr(text))} holds a NUL character: remove it")
    return text


def _write_file(path: str, tensors: dict, metadata: dict) -> None:
    """Replace the file at `path` in a single move: an interrupted call leaves the old file.

    The new file is first written into the folder of `path`, under a random name unique among
    threads, processes and containers, and flushed to the disk. Raises OSError with the path.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # The file behind a symbolic link is replaced, not the link
    target = os.path.realpath(path)
    part = os.path.join(os.path.dirname(target), f".{os.urandom(8).hex()}.part")
    try:
        # Created first, to learn the mode that the umask leaves
        mode = _create(part, target)
        save_file(tensors, part, metadata)
        # safetensors replaces the created file by a file of its own, with another mode
        if stat.S_IMODE(os.stat(part).st_mode) != mode:
            os.chmod(part, mode)
        _flush_to_disk(part)
        os.replace(part, target)
        # The file is complete already; not every system can flush folders
        with contextlib.suppress(OSError):
            _flush_to_disk(os.path.dirname(target), os.O_RDONLY)
    except (OSError, SafetensorError) as error:
        raise _write_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            os.remove(part)


def _create(part: str, target: str) -> int:
    """Create an empty file `part`; return the mode of the old file `target`, or without old file
    the mode of the umask. Raises OSError if `target` is no regular file.
    """
    old = os.stat(target) if os.path.exists(target) else None
    if old is not None and not stat.S_ISREG(old.st_mode):
        number = errno.EISDIR if stat.S_ISDIR(old.st_mode) else errno.EINVAL
        raise OSError(number, "it is no regular file, which a new one could replace")
    # The system applies the umask; os.umask() would change the mask of all threads
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        return stat.S_IMODE((os.fstat(file) if old is None else old).st_mode)
    finally:
        os.close(file)


def _flush_to_disk(path: str, flags: int = os.O_RDWR) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    file = os.open(path, flags)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write_error(path: str, error: Exception) -> OSError:
    """Return the error that `open(path, "wb")` would raise. safetensors gives the system's error as
    text only, and the temporary name in a message would help nobody.
    """
    number = re.search(r"\(os error (\d+)\)", str(error))
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, path)
    if number:
        return OSError(int(number[1]), os.strerror(int(number[1])), path)
    return OSError(f"cannot write {path}: {shortened(error)}")


def _read_file(path: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """Return (header, {name: tensor}) of a file. Raises ValueError if the tensors are not those of
    the header, or the file is not of `export_state`.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = file.keys()  # a safe_open has no iterator
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
    header = _parse_header(path, metadata)
    for name in sorted(set(tensors) | set(header["tensors"])):
        found = name in tensors and _dtype_and_shape(tensors[name])
        expected = header["tensors"].get(name, False)
        if found != expected:
            raise ValueError(
                f"{path} holds {shortened(name)} as {shortened(found or 'nothing')}, "
                f"but its header says {shortened(expected or 'nothing')}"
            )
    return header, tensors


def _parse_header(path: str, metadata: dict[str, str]) -> dict:
    """Return the header of a file: params, groups, tensors and digest. Raises ValueError for a
    header not written by `export_state`.
    """
    try:
        header = {key: json.loads(metadata[key]) for key in ("params", "groups", "tensors")}
        if [type(header[key]) for key in header] != [dict, list, dict]:
            raise ValueError(f"{', '.join(header)} are not of the types that export_state writes")
        if not _is_shallow(header):
            raise ValueError(f"it is nested more than {DEPTH} deep")
        for group in header["groups"]:
            _check_group_form(group)
    except RecursionError as error:
        raise ValueError(f"{path} has a header that cannot be read: nested too deep") from error
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has a header that cannot be read: {shortened(error)}") from error
    return {**header, "digest": metadata.get("digest")}


def _is_shallow(value: object) -> bool:
    """Return whether lists and dicts are nested at most DEPTH deep."""
    level = [value]
    for _ in range(DEPTH):
        # Values one level deeper; without recursion, which a hostile header would exhaust
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return not level


def _check_group_form(group: dict) -> None:
    """Raise ValueError, KeyError, TypeError or AttributeError for a saved group not written by
    `export_state`.
    """
    if not isinstance(group["use_muon"], bool):
        raise ValueError(f"use_muon={group['use_muon']!r} must be True or False")
    set(group["params"])  # raises TypeError unless a collection of hashable entries
    # Older versions wrote the option `name`
    if wrong := sorted(group["options"].keys() & {*STRUCTURE} - {"name"}):
        raise ValueError(f"{wrong[0]!r} is among the options of a group")


def _check_params(
    path: str, shapes: dict[str, list[int]], saved_shapes: dict[str, list[int]]
) -> None:
    """Raise ValueError unless the optimizer and the file have equal parameter names and shapes."""
    for name in sorted(set(shapes) | set(saved_shapes)):
        if name not in saved_shapes:
            raise ValueError(
                f"{path} has no parameter {shortened(name)}, which the optimizer has: load the "
                "file of this model, or give the parameter the name that it had"
            )
        if name not in shapes:
            raise ValueError(
                f"{path} has a parameter {shortened(name)}, which the optimizer does not have: "
                "load the file of this model, or give the parameter the name that it had"
            )
        if shapes[name] != saved_shapes[name]:
            raise ValueError(
                f"parameter {shortened(name)} has shape {shapes[name]} here, but "
                f"{shortened(saved_shapes[name])} in {path}"
            )


def _saved_group(
    path: str,
    number: int,
    own: list[dict],
    names: dict[torch.Tensor, str],
    saved: list[dict],
    states: dict[str, dict],
    dtype: torch.dtype,
    numbers: DeviceValues,
) -> dict:
    """Return the optimizer's group `number` in the form of a state dict with the file's options;
    `params` are names.

    `own`: groups of the optimizer. `saved`: groups of the file. `states`: {parameter name: state};
    converted momentum replaces entries. `dtype`: the option `state_dtype`. Raises ValueError for
    state or options that do not fit, for values when `numbers` are read.
    """
    group = own[number]
    own_names = [[names[p] for p in entry["params"]] for entry in own]
    params = own_names[number]
    options = options_of(number, own, own_names, [(set(g["params"]), g["options"]) for g in saved])
    options = with_own_precision(with_own_rule(options, group), group)
    as_saved = with_saved_rule(group, options)
    for param, name, split in zip(group["params"], params, splits_of(group)):
        if name in states:
            states[name] = with_own_momentum(
                states[name], as_saved, options, name, split, dtype, numbers
            )
            states[name] = wide_if_needed(states[name], as_saved, param, name)
        # 8-bit momentum that an optimizer of another dtype loads has no scales any more
        is_8bit = SCALE_KEY in states.get(name, ())
        own_dtype = QUANTIZED if is_8bit else torch.float32
        keys = loaded_keys(as_saved, param, own_dtype, states.get(name))
        was_muon = next((g["use_muon"] for g in saved if name in g["params"]), group["use_muon"])
        if was_muon != bool(group["use_muon"]):
            raise ValueError(
                f"parameter {name} was in a group of {KINDS[was_muon]} when {path} was written, "
                f"but is in one of {KINDS[not was_muon]} here: put it into a group of the kind in "
                "which it was saved"
            )
        # Stricter than load_state_dict: a file holds all keys of a state or none. Rests are those
        # of the weights of the run that wrote the file
        if name in states and set(states[name]) - {REST_KEY} != set(keys) - {REST_KEY}:
            raise ValueError(
                f"{path} has {shortened(', '.join(sorted(states[name])))} of "
                f"parameter {name}, but its state here is {', '.join(sorted(keys))}: build the "
                "group with the rule and the options with which it was saved"
            )
        check_saved_state(param, keys, name, states.get(name, {}), numbers, split)
    check_same_rule(number, group, options)
    known = dict.fromkeys((*group, *OPTIONAL_KEYS))
    taken = {key: _from_json(key, group.get(key), options[key]) for key in known if key in options}
    taken = with_momentum_steps(with_function(number, taken, group), group)
    check_group({**group, **taken}, set(group))
    return {**group, **taken, "params": params}

"""Names of parameters and groups in error messages, and context in front of error messages.

A parameter's name is the fully qualified name under "param_names" of the group, else the index in
the group, "#3". Imports nothing of the package: every module may import from this file.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def given_names(group: dict) -> Sequence[str]:
    """The group's "param_names", in the order of "params"; () if no names are known.

    Shorter than "params" if parameters were appended without names. Longer lists are ignored:
    wrappers that distribute the parameters of a group over ranks (ZeroRedundancyOptimizer) keep the
    whole list of names, and the mapping from names to the remaining parameters is lost.
    """
    names = group.get("param_names") or ()
    params = group.get("params")
    return () if isinstance(params, (list, tuple)) and len(names) > len(params) else names


def name_of(group: dict, number: int) -> str:
    """The name for messages of parameter `number` of a group; "#<number>" without a given name."""
    names = given_names(group)
    return shortened(names[number]) if number < len(names) else f"#{number}"


def name_in(group: dict, param: torch.Tensor) -> str:
    """The name for messages of a parameter of `group`. Raises StopIteration if absent."""
    return name_of(group, next(i for i, p in enumerate(group["params"]) if p is param))


def name_among(groups: Iterable[dict], param: torch.Tensor) -> str:
    """The name for messages of a parameter of one of `groups`. Raises StopIteration if absent."""
    return next(
        name_in(group, param) for group in groups if any(p is param for p in group["params"])
    )


def names_in(group: dict) -> dict[torch.Tensor, str]:
    """{parameter: name for messages} of all parameters of a group."""
    return {param: name_of(group, i) for i, param in enumerate(group["params"])}


def names_of(params: Iterable[torch.Tensor], groups: Iterable[dict]) -> list[str]:
    """Name for messages of each of `params`, which are in `groups`."""
    known = {param: name for group in groups for param, name in names_in(group).items()}
    return [known[param] for param in params]


def in_group(number: int, group: dict) -> contextlib.AbstractContextManager[None]:
    """A context manager that prefixes errors raised inside with "in group <number> (<name of the
    first parameter>, ...)".
    """
    return during(label_of(number, group))


def label_of(number: int, group: dict) -> str:
    """A group for messages: "group <number> (<name of the first parameter>, ...)".

    `group` may come unchecked from the user: entries of "params" may be pairs (name, parameter).
    """
    entries = group.get("params")
    first = ""
    if isinstance(entries, (list, tuple)) and entries:
        named = isinstance(entries[0], tuple) and entries[0] and isinstance(entries[0][0], str)
        name = shortened(entries[0][0]) if named else name_of(group, 0)
        first = f" ({name}{', ...' if len(entries) > 1 else ''})"
    return f"group {number}{first}"


def fsdp_names() -> dict[int, str]:
    """{id of a parameter: fully qualified name} of all parameters sharded by FSDP2 in this process.

    Names start at the outermost module given to `fully_shard`. Reads private lists of torch; empty
    where torch lacks a list in the form of torch 2.11 to 2.15.
    """
    registry = sys.modules.get("torch.distributed._composable_state")
    states = getattr(registry, "_module_state_mapping", {})
    modules: dict[int, str] = {}
    # A module is found under several roots, once for each `fully_shard` above it. The longest name
    # is the one from the outermost root; the text itself breaks ties, independent of the order.
    for root in list(states):
        for name, module in root.named_modules():
            known = modules.get(id(module), "")
            modules[id(module)] = max(known, name, key=lambda text: (len(text), text))
    found = {}
    # Names only improve messages: attributes missing in an unknown version of torch are no error
    with contextlib.suppress(AttributeError):
        for sharded in itertools.chain.from_iterable(map(_sharded_by, list(states.values()))):
            info = sharded._module_info
            parts = (modules.get(id(info.module), ""), info.param_name)
            found[id(sharded.sharded_param)] = ".".join(filter(None, parts))
    return found


def _sharded_by(state: object) -> list:
    """The FSDPParam records of an FSDP2 state, or of a weak reference to an FSDP2 state; [] for
    states of other composable APIs.
    """
    state = state() if isinstance(state, weakref.ref) else state
    # The attribute depends on the version of torch: a list of groups, or a single group or None
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = groups or [getattr(state, "_fsdp_param_group", None)]
    return [param for group in groups if group is not None for param in group.fsdp_params]


LONGEST = 200  # characters of a value that a message repeats


def shortened(text: object) -> str:
    """`str(text)` for a message, cut after LONGEST characters: names and values come from users and
    files, and may be of any size.
    """
    text = str(text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"


def first_few(names: Iterable[object], most: int = 3, says_count: bool = True) -> str:
    """The first `most` of `names`, each shortened, for a message: "a, b, c, ... (7 in all)"; "none"
    without names. `says_count` False: "a, b, c, ...", where the message has the count already.
    """
    names = list(names)
    text = ", ".join(map(shortened, names[:most])) or "none"
    if len(names) > most:
        text += f", ... ({len(names)} in all)" if says_count else ", ..."
    return text


def warn_caller(text: str) -> None:
    """Issue a UserWarning at the innermost line outside torch and this package."""
    level = 2
    frame = sys._getframe(1)
    # __package__ is "<package>.params"; the name of the package itself differs between builds
    inner = "torch.", f"{__package__.rpartition('.')[0]}."
    # A fixed stacklevel would point into the wrappers that torch puts around step()
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(inner):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


@contextlib.contextmanager
def during(action: str) -> Iterator[None]:
    """A context manager that prefixes errors raised inside with "in <action>: " (`add_context`)."""
    try:
        yield
    except Exception as error:
        add_context(error, action)
        raise


def add_context(error: Exception, action: str) -> None:
    """Prefix the message of `error` with "in <action>: ", in place: the type of the error stays.

    Raises RuntimeError from `error` if the first argument of `error` is no text.
    """
    text = f"in {action}: {error}"
    if not error.args or not isinstance(error.args[0], str):
        raise RuntimeError(text) from error
    error.args = (text, *error.args[1:])

"""Names of parameters and groups in error messages, and errors that say where they happened.

Imports nothing of the package, so that every module may import it.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import warnings
import weakref


def given_names(group) -> list | tuple:
    """The names that a group was given for its parameters, in their order; fewer where parameters
    were appended.

    Of more names than parameters none is used: wrappers that divide the parameters of a group among
    ranks (ZeroRedundancyOptimizer) leave its other keys as they are, and do not say which names
    belong to the rest.
    """
    names, params = group.get("param_names") or (), group.get("params")
    return () if isinstance(params, (list, tuple)) and len(names) > len(params) else names


def name_of(group, number) -> str:
    """The name of a group's parameter for messages: as given, or its number."""
    names = given_names(group)
    return shortened(names[number]) if number < len(names) else f"#{number}"


def name_in(group, param) -> str:
    """The name of a parameter that is in a group, for messages."""
    return name_of(group, next(i for i, p in enumerate(group["params"]) if p is param))


def name_among(groups, param) -> str:
    """The name of a parameter that is in one of several groups, for messages."""
    return next(
        name_in(group, param) for group in groups if any(p is param for p in group["params"])
    )


def names_in(group) -> dict:
    """{parameter: its name}, for messages."""
    return {param: name_of(group, i) for i, param in enumerate(group["params"])}


def in_group(number, group):
    """A context in which errors say of which group they are, by its number and its first
    parameter.
    """
    entries, first = group.get("params"), ""
    if isinstance(entries, (list, tuple)) and entries:
        named = isinstance(entries[0], tuple) and entries[0] and isinstance(entries[0][0], str)
        name = shortened(entries[0][0]) if named else name_of(group, 0)
        first = f" ({name}{', ...' if len(entries) > 1 else ''})"
    return during(f"group {number}{first}")


def fsdp_names() -> dict[int, str]:
    """{id of a parameter: its name} of all that FSDP2 shards in this process, from the outermost
    module that was given to `fully_shard` on. Empty where torch keeps no such list in the form
    known here (torch 2.11 to 2.13).
    """
    registry = sys.modules.get("torch.distributed._composable_state")
    states = getattr(registry, "_module_state_mapping", {})
    modules: dict[int, str] = {}
    for root in list(states):
        for name, module in root.named_modules():
            known = modules.get(id(module), "")
            modules[id(module)] = max(known, name, key=lambda text: (len(text), text))
    found = {}
    with contextlib.suppress(AttributeError):
        for sharded in itertools.chain.from_iterable(map(_sharded_by, list(states.values()))):
            info = sharded._module_info
            parts = modules.get(id(info.module), ""), info.param_name
            found[id(sharded.sharded_param)] = ".".join(filter(None, parts))
    return found


def _sharded_by(state: object) -> list:
    """The records of parameters of one FSDP2 state, or of a weak reference to it; [] of other
    states.
    """
    state = state() if isinstance(state, weakref.ref) else state
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = groups or [getattr(state, "_fsdp_param_group", None)]
    return [param for group in groups if group is not None for param in group.fsdp_params]


LONGEST = 200  # characters of a value that a message repeats


def shortened(text: object) -> str:
    """Return `str(text)` for a message, cut after 200 characters: names and values come from users
    and files.
    """
    text = str(text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"


def warn_caller(text: str) -> None:
    """Warn at the line that called torch or this package."""
    level, frame = 2, sys._getframe(1)
    inner = "torch.", f"{__package__.rpartition('.')[0]}."  # of this package, not of params/
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(inner):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


@contextlib.contextmanager
def during(what: str):
    """Context manager: an error raised inside says during what it happened (`add_context`)."""
    try:
        yield
    except Exception as error:
        add_context(error, what)
        raise


def add_context(error: Exception, what: str) -> None:
    """Put `what` before the message of an error, which keeps its type. Raises a RuntimeError from
    an error whose first argument is no text.
    """
    text = f"in {what}: {error}"
    if not error.args or not isinstance(error.args[0], str):
        raise RuntimeError(text) from error
    error.args = (text, *error.args[1:])

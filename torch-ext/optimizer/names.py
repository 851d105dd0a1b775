"""How messages name parameters and groups. Knows groups as they are given, and nothing else."""
from __future__ import annotations

from . import debug


def name_of(group, number) -> str:
    """The name of a group's parameter for messages: as given, or its number."""
    names = group.get("param_names") or ()  # who appends to a group's parameters need not name them
    return names[number] if number < len(names) else f"#{number}"


def name_in(group, param) -> str:
    """The name of a parameter that is in a group, for messages."""
    return name_of(group, next(i for i, p in enumerate(group["params"]) if p is param))


def name_among(groups, param) -> str:
    """The name of a parameter that is in one of several groups, for messages."""
    return next(name_in(group, param) for group in groups if any(p is param for p in group["params"]))


def names_in(group) -> dict:
    """{parameter: its name}, for messages."""
    return {param: name_of(group, i) for i, param in enumerate(group["params"])}


def in_group(number, group):
    """A context in which errors say of which group they are, by its number and its first parameter."""
    entries, first = group.get("params"), ""
    if isinstance(entries, (list, tuple)) and entries:
        named = isinstance(entries[0], tuple) and entries[0] and isinstance(entries[0][0], str)
        first = f" ({entries[0][0] if named else name_of(group, 0)}{', ...' if len(entries) > 1 else ''})"
    return debug.during(f"group {number}{first}")

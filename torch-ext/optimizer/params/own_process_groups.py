"""The process group of each parameter group: the key "process_group" of a group, or else the
argument of the optimizer.

`OwnProcessGroups` takes the key out of new groups. A process group in `param_groups` could not be
pickled or copied, and torch.distributed.checkpoint demands every key of a group from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch.distributed as dist

from .config import MuonConfig, check_own_process_group, group_of_mesh

KEY = "process_group"


class Choice(NamedTuple):
    """The value that a parameter group has for "process_group"."""

    # None: plain parameters belong to this rank alone. In a pickle, the name of the group.
    process_group: dist.ProcessGroup | str | None
    is_world: bool  # torch's default group, which may be initialized anew


def has_process_group(params: object) -> bool:
    """Whether one of the parameter groups given to an optimizer has a process group."""
    entries = params if isinstance(params, (list, tuple)) else ()
    return any(isinstance(entry, dict) and entry.get(KEY) is not None for entry in entries)


def refuse_late_key(group: dict) -> None:
    """Raise ValueError for a group that got "process_group" after an optimizer took the group."""
    if KEY in group:
        raise ValueError(
            "the key process_group was set after the group was added to the optimizer: build a new "
            "optimizer, with the key in the group, or remove the key"
        )


class OwnProcessGroups:
    """The process groups of parameter groups. `choices`: of each group, in the order of
    `param_groups`; None: the group has no such key.
    """

    def __init__(self, choices: Iterable[Choice | None] = ()) -> None:
        """Take the choices of existing groups."""
        self.choices = list(choices)

    def take_key(self, param_group: dict, options: MuonConfig) -> dict:
        """Append the choice of a new group, and return the group without the key: a copy, since the
        user may build another optimizer of the dict. Raises ValueError for a value that is not
        allowed.
        """
        if KEY not in param_group:
            self.choices.append(None)
            return param_group
        given = group_of_mesh(param_group[KEY])
        check_own_process_group(given, options)
        is_world = given is not None and given is dist.group.WORLD
        self.choices.append(Choice(given, is_world))
        return {key: value for key, value in param_group.items() if key != KEY}

    def drop_last(self) -> None:
        """Forget the choice of the last group, which was refused."""
        del self.choices[-1]

    def last_options(self, options: MuonConfig) -> MuonConfig:
        """Return `options` with the process group of the last group."""
        return _with_choice(options, self.choices[-1])

    def options_of(self, options: MuonConfig, count: int) -> list[MuonConfig]:
        """Return the options of each of `count` groups: `options` with the group's process group.

        Raises RuntimeError if groups were added or removed other than by `add_param_group`: then no
        order tells which group made which choice.
        """
        if not any(self.choices):
            return [options] * count
        if len(self.choices) != count:
            raise RuntimeError(
                f"the optimizer has {count} parameter groups, but {len(self.choices)} were added, "
                "some with a process_group of their own: add groups by add_param_group() only, and "
                "build a new optimizer to remove one"
            )
        # There may be a group for each parameter, but few process groups
        known = {choice: _with_choice(options, choice) for choice in set(self.choices)}
        return [known[choice] for choice in self.choices]

    def mapped(self, function: Callable[[Choice], object]) -> OwnProcessGroups:
        """Return the choices with every process group replaced by `function(choice)`."""
        return OwnProcessGroups(
            choice
            if choice is None or choice.process_group is None
            else choice._replace(process_group=function(choice))
            for choice in self.choices
        )


def _with_choice(options: MuonConfig, choice: Choice | None) -> MuonConfig:
    """Return `options` with the process group of a parameter group."""
    if choice is None or choice.process_group is options.process_group:
        return options
    return replace(options, process_group=choice.process_group)

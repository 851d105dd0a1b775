"""Checks of values that schedules and users may change between steps: lr, momentum and the like.

Made at every step, on all groups. group_values.py checks options that no schedule changes.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence

import torch

from ...newton_schulz.coefficients import FP32_MAX
from ...rules.elementwise import check_radius
from ...rules.rule import has_radius, number_of
from ..errors import in_group
from .group_values import (
    BELOW_ONE,
    COUNTS,
    FINITE,
    FLAGS,
    LIMITS,
    check_betas,
    check_counts,
    check_flags,
    is_adamw,
    require,
)

MANY_GROUPS = 4  # groups above which values are compared as lists


def _values_of(key: str, groups: Sequence[dict]) -> Iterable[object]:
    """The values of `key` in the groups that have it. Computed in C."""
    having = map(dict.__contains__, groups, itertools.repeat(key))
    return map(operator.itemgetter(key), itertools.compress(groups, having))


def _are_usual(groups: Sequence[dict]) -> bool:
    """Whether scheduled values and radii are allowed floats, values of COUNTS allowed ints, and
    nesterov bools. Computed in C: there may be a group for each parameter. False without groups.
    """
    for key, (most, _) in COUNTS.items():
        values = list(_values_of(key, groups))
        if values and (set(map(type, values)) != {int} or min(values) < 0 or max(values) > most):
            return False
    radii = list(_values_of("radius", groups))
    # A rule without a radius may have any value under the key: such groups are checked singly
    if radii and (
        set(map(type, radii)) != {float} or not math.isfinite(sum(radii)) or min(radii) <= 0.0
    ):
        return False
    for key, (most, absent) in LIMITS.items():
        values = list(map(dict.get, groups, itertools.repeat(key), itertools.repeat(absent)))
        if set(map(type, values)) != {float} or not math.isfinite(sum(values)):
            return False
        if min(values) < 0.0 or max(values) >= most:
            return False
    return set(map(type, map(dict.get, groups, itertools.repeat("nesterov")))) == {bool}


def check_scheduled_values(groups: Sequence[dict]) -> None:
    """Raise ValueError, with group and key, for a wrong value of a key of LIMITS, FLAGS or
    COUNTS, of betas or radius, as schedules and users may have set them.

    Called at every step, before changes. Numbers on a GPU are not read: the host would wait.
    """
    usual = len(groups) > MANY_GROUPS and _are_usual(
        [group for group in groups if group.get("use_muon") is True]
    )
    for number, group in enumerate(groups):
        if usual and group.get("use_muon") is True:
            continue
        for key, (most, absent) in LIMITS.items():
            value = group.get(key, absent)
            # Without a context manager where possible
            if (
                type(value) is float
                and 0.0 <= value < most
                or isinstance(value, torch.Tensor)
                and _is_on_gpu(value)
            ):
                continue
            given = number_of(value)
            if 0 <= given < most or given == most == FP32_MAX:
                continue
            with in_group(number, group):
                require(False, key, value, FINITE if most == FP32_MAX else BELOW_ONE)
        if set(map(type, map(group.get, FLAGS))) != {bool}:
            with in_group(number, group):
                check_flags(group)
        if "radius" in group and has_radius(group):
            with in_group(number, group):
                check_radius(group)
        if not COUNTS.keys().isdisjoint(group):
            with in_group(number, group):
                check_counts(group)
        # An AdamW group without betas is refused by `check_changed_groups`, with another message
        known = group.get("use_muon") is True or group.get("betas") is None
        if not known and is_adamw(group):
            with in_group(number, group):
                check_betas("betas", group.get("betas"))


def _is_on_gpu(value: torch.Tensor) -> bool:
    """Whether `value` is a single number on a GPU: a read would make the host wait."""
    return value.device.type != "cpu" and value.numel() == 1

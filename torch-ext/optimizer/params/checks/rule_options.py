"""Checks of the rule of a group: with the options of the optimizer, and with options of other rules
in the group.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ...rules.elementwise import ELEMENTWISE, elementwise_of
from ...rules.rule import RULES, overrides, reads_gradients, rule_of
from .group_keys import is_same

# Defaults of torch's optimizers, whose groups may be passed on: options of rules of this package
# with another default
OF_TORCH = {"betas": (0.9, 0.999)}


def check_rule_with_options(
    group: Mapping[str, Any], capturable: bool, is_8bit: bool, state_at_owners: bool
) -> None:
    """Raise NotImplementedError if the rule of a Muon group does not work with options of the
    optimizer. `is_8bit`: whether `state_dtype` is int8.
    """
    rule = rule_of(group)
    if capturable and reads_gradients(rule):
        raise NotImplementedError(
            f"rule={group['rule']!r} overrides `update` or `write`, beside which torch reads "
            "gradients where they lay at the capture of a CUDA graph: leave capturable=True out "
            "(parts of the step are graphs without it), or compute in `before` and `after`"
        )
    if is_8bit and overrides(rule, "update"):
        raise NotImplementedError(
            f"rule={group['rule']!r} overrides `update`, which computes momentum in torch, but "
            "state_dtype=torch.int8 needs the package's kernels: use state_dtype=torch.bfloat16, "
            "or compute in `before` and `after`"
        )
    if is_8bit and rule.selection(group) is not None:
        raise NotImplementedError(
            f"rule={group['rule']!r} keeps what it does not orthogonalize in the momentum, which "
            "state_dtype=torch.int8 would round in every step: use state_dtype=torch.bfloat16 or "
            "torch.float32, or another rule"
        )
    if state_at_owners and rule.state and rule.selection(group) is not None:
        raise NotImplementedError(
            f"rule={group['rule']!r} selects rows, and their state, where both are stored, but "
            "with state_at_owners=True only the owner of a matrix has the state: leave the option "
            "out, or use another rule"
        )


@functools.cache
def owners_of_options() -> dict[str, dict[bool, dict[str, object]]]:
    """{option: {use_muon of groups: {name of a built-in rule with the option: default}}}.

    Options of the user's own rules are left out: keys of other tools may have equal names.
    """
    found: dict[str, dict[bool, dict[str, object]]] = {}
    # Only built-in rules of matrices are fused: `check_rule` refuses fused rules of users
    built_in = {name: rule for name, rule in RULES.items() if rule.fused}
    for use_muon, rules in ((True, built_in), (False, ELEMENTWISE)):
        for name, rule in rules.items():
            for key, default in rule.options.items():
                found.setdefault(key, {}).setdefault(use_muon, {})[name] = default
    return found


def owners_in_words(key: str, use_muon: bool) -> str:
    """The built-in rules with the option `key`, for messages about groups with this `use_muon`."""
    words = []
    for kind, owners in owners_of_options()[key].items():
        names = f"of {', '.join(map(repr, sorted(owners)))}"
        words.append(names if kind == use_muon else f"{names} with use_muon={kind}")
    return ", and ".join(words)


def unread_options(
    group: Mapping[str, Any], known: Collection[str], written: Mapping[str, object]
) -> Iterator[tuple[str, str, str]]:
    """Yield (key, the group's rule, rules with the key in words) for each option of a built-in rule
    that the group has and its own rule does not read.

    Skips keys in `known`, and default values: defaults of the rule with the option and of torch's
    optimizers, and `written`, the values that the optimizer itself writes into groups.
    """
    use_muon = bool(group["use_muon"])
    if group.get("rule") and group["rule"] not in (RULES if use_muon else ELEMENTWISE):
        return  # a wrong rule of a live group is refused later
    rule = rule_of(group) if use_muon else elementwise_of(group)
    own = group.get("rule") or rule.name
    # Newton-Schulz reads `eps`
    read = {*rule.options, *(("eps",) if use_muon else ())}
    owners = owners_of_options()
    for key in [key for key in group if key in owners and key not in read and key not in known]:
        # As in JSON
        value = tuple(group[key]) if isinstance(group[key], list) else group[key]
        defaults = [default for of in owners[key].values() for default in of.values()]
        defaults += [others[key] for others in (written, OF_TORCH) if key in others]
        if not any(is_same(value, default) for default in defaults):
            yield key, own, owners_in_words(key, use_muon)

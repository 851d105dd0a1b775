"""Keys of a parameter group that resemble own keys, and comparison of their values.

validation.py decides which keys are refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from ...rules.rule import truth_of

# Names of own keys in other optimizers: always an error, never read
ALIASES = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
RESEMBLES = 0.8  # difflib ratio from which an unknown key counts as a misspelt own key
RESEMBLES_NS = 0.5  # the ratio for keys with the own prefix `ns_`


def misspelt(key: str, own: set[str]) -> str:
    """The key of `own` most likely meant by an unknown key; "" without resemblance.

    Compounds of an own key (lr_scale, base_momentum) are keys of schedulers and loggers: "".
    """
    low = key.lower().replace("-", "_").strip("_")
    if low in own:
        return low
    if low in ALIASES:
        return ALIASES[low]
    if {"muon", "adam", "adamw"}.intersection(low.split("_")):
        return "use_muon"
    # Abbreviations of more than half of a key: "adjust_lr" means adjust_lr_fn, but "weight" need
    # not mean weight_decay
    if short := [
        known for known in sorted(own) if known.startswith(f"{low}_") and 2 * len(low) > len(known)
    ]:
        return short[0]
    # Not of `decay`: "weigth_decay" is no compound
    if any(low.startswith(f"{known}_") or low.endswith(f"_{known}") for known in own - {"decay"}):
        return ""
    ratio = RESEMBLES_NS if low.startswith("ns_") else RESEMBLES
    return next(iter(difflib.get_close_matches(low, sorted(own), 1, ratio)), "")


def is_same(value: object, other: object) -> bool:
    """Whether two values of any type are equal; False for incomparable values."""
    try:
        return value is other or bool(value == other)
    except (TypeError, ValueError, RuntimeError):  # the comparison of arrays has no truth value
        return False


def as_one_group(
    names: Sequence[str], saved: Sequence[tuple[set, dict]], structure: Collection[str]
) -> list[tuple[set, dict]]:
    """The saved groups that held some of `names`, merged into a list of one pair (parameter names,
    group); [] if their options differ. `saved`: such pairs. `structure`: keys that are no options.
    """
    held = [(members, group) for members, group in saved if not members.isdisjoint(names)]
    options = [{k: v for k, v in group.items() if k not in structure} for _, group in held]
    if not held or not all(is_same(each, options[0]) for each in options):
        return []
    return [(set().union(*(members for members, _ in held)), held[0][1])]


def is_false(value: object) -> bool:
    """Whether the value of an option is None, False, 0 or a tensor of 0."""
    return value is None or truth_of(value) == 0

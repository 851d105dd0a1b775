"""Keys of a parameter group: which are known, which are refused, and comparison of their values.

`check_keys` refuses a key without effect if the user probably expects an effect.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence

from ...rules.decay import DECOUPLED
from ...rules.elementwise import DTYPE_KEY, ELEMENTWISE
from ...rules.muon import (
    DRAWN_KEY,
    MASTER_KEY,
    MOMENTUM_FORMS,
    ROUNDINGS,
    SEED_KEY,
    SETTLED,
    STEPS_KEY,
)
from ...rules.rule import RULES, truth_of
from ..errors import shortened
from .group_values import is_adamw

# Keys of Muon and AdamW groups; NorMuon adds "beta2", other rules their options
GROUP_KEYS = frozenset(
    (
        "params",
        "param_names",
        "use_muon",
        "lr",
        "weight_decay",
        "momentum",
        "nesterov",
        "ns_coefficients",
        "eps",
        "ns_steps",
        "adjust_lr_fn",
        "split",
        "transposed",
        "rule",
        "betas",
        "process_group",
        "decay",
        "momentum_form",
        "rounding",
        "rounding_seed",
        "rounding_step",
        "master_weights",
        DTYPE_KEY,
        STEPS_KEY,
    )
)
# Keys that a group has only if they were given -> default. So checkpoints from before a key was
# added fit: torch.distributed.checkpoint refuses to load fewer keys than groups have
OPTIONAL_KEYS = {
    "decay": DECOUPLED,
    "momentum_form": MOMENTUM_FORMS[0],
    STEPS_KEY: SETTLED,
    "rounding": ROUNDINGS[0],
    SEED_KEY: 0,
    DRAWN_KEY: 0,
    MASTER_KEY: None,
}
# Keys that learning-rate schedulers add
SCHEDULED = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
# Keys of torch and torchtitan, allowed though without effect
TOLERATED = frozenset(("name", "fused", "foreach", "differentiable", *SCHEDULED))
# Options of torch.optim that change the result of a step, and are not implemented
CHANGED = ("maximize", "amsgrad", "differentiable")
# Name of an algorithm, as value of any key -> use_muon of a group stepped with the algorithm
ALGORITHMS = {"adam": False, "adamw": False, "muon": True, "normuon": True}
# Names of own keys in other optimizers: always an error, never read
ALIASES = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
RESEMBLES = 0.8  # difflib ratio from which an unknown key counts as a misspelt own key
RESEMBLES_NS = 0.5  # the ratio for keys with the own prefix `ns_`


def check_keys(
    group: dict,
    extra_keys: Collection[str],
    arguments: Mapping[str, object],
    known: Collection[str] = (),
) -> None:
    """Raise ValueError for a key without effect if the user probably expects an effect.

    Refused are keys of `arguments` with another value than the optimizer's, options of torch with
    an effect on steps, and, unless in `known`, unknown keys that resemble a key of the group, and
    names of an algorithm in contradiction to use_muon. All further keys belong to schedulers,
    wrappers and loggers, and stay. extra_keys, arguments: as in `validation.check_group`.
    """
    rule = (ELEMENTWISE if is_adamw(group) else RULES).get(group.get("rule"))
    options = rule.options if rule else ()
    # Matrices have the dtype of the optimizer
    others = () if is_adamw(group) else (DTYPE_KEY,)
    own = {*GROUP_KEYS, *extra_keys, *options}.difference(others)
    for key in [key for key in group if isinstance(key, str) and key not in own]:
        value = group[key]
        text = f"{shortened(key)}={shortened(repr(value))}"
        if key in arguments:
            # An equal value contradicts nothing
            if not is_same(value, arguments[key]):
                raise ValueError(
                    f"{text} is an argument of the optimizer, which holds for all groups and is "
                    f"{shortened(repr(arguments[key]))}: pass it to the optimizer, and remove the "
                    "key"
                )
        elif key in CHANGED:
            if not is_false(value):
                raise ValueError(
                    f"{text} is not allowed: this optimizer has no such option; remove the key"
                )
        elif key in known:
            continue
        elif key == "beta2":
            raise ValueError(
                f"{text} is not allowed: only groups of NorMuon have it, and AdamW groups have "
                "betas=(beta1, beta2); use NorMuon, or remove the key"
            )
        elif key not in TOLERATED and (meant := misspelt(key, own)):
            raise ValueError(
                f"unknown key {shortened(repr(key))}, which resembles {meant!r}; allowed are "
                f"{', '.join(sorted(own))}: remove or rename it"
            )
        if isinstance(value, str) and ALGORITHMS.get(
            value.lower(), not is_adamw(group)
        ) == is_adamw(group):
            raise ValueError(
                f"{text} names another algorithm than use_muon={not is_adamw(group)}, and only "
                "use_muon has an effect: set use_muon, or rename the value"
            )


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

"""Checks of single values in a parameter group: options that no schedule changes.

scheduled_values.py checks what schedules change, group_keys.py the keys. ValueError says the key,
the value received and the allowed values; callers add the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ...kernels.elementwise.weight_update import ALL
from ...newton_schulz.coefficients import FP32_MAX, steps_of
from ...rules.decay import DECAYS, DECOUPLED, form_of
from ...rules.elementwise import elementwise_of
from ...rules.muon import (
    AMBIGUOUS_SCALES,
    DRAWN_KEY,
    MASTER_KEY,
    MASTER_WEIGHTS,
    MOMENTUM_FORMS,
    ROUNDINGS,
    SCALES,
    SEED_KEY,
    SETTLED,
    STEPS_KEY,
    is_corrected,
    is_sum,
)
from ...rules.rule import number_of, overrides, rule_of, truth_of, writes_weights
from ..errors import shortened

FINITE = "a finite number >= 0 that fp32 holds"
BELOW_ONE = "a number in [0, 1)"
# Keys of a group that schedules set -> (least value that is not allowed, value without the key)
LIMITS = {
    "lr": (FP32_MAX, None),
    "weight_decay": (FP32_MAX, None),
    "momentum": (1.0, None),
    "beta2": (1.0, 0.0),
}
FLAGS = "use_muon", "nesterov"  # keys of a group that are true or false
# Keys of a group with whole numbers that are read in every step -> (largest value, values in words)
COUNTS = {
    STEPS_KEY: (SETTLED, f"a whole number from 0 to {SETTLED}, the steps so far"),
    SEED_KEY: ((1 << 63) - 1, "a whole number in [0, 2^63)"),
    DRAWN_KEY: ((1 << 63) - 1, "a whole number in [0, 2^63)"),
}


def check_values(group: dict) -> None:
    """Raise ValueError for a wrong value of eps, adjust_lr_fn, decay, momentum_form, rounding,
    master_weights, ns_coefficients, ns_steps, betas, rule or options of the rule: schedules change
    none of them.
    """
    require(0 <= number_of(group["eps"]) <= FP32_MAX, "eps", group["eps"], FINITE)
    _check_scale(group["adjust_lr_fn"])
    decay = group.get("decay", DECOUPLED)
    require(isinstance(decay, str) and decay in DECAYS, "decay", decay, f"one of {tuple(DECAYS)}")
    form = group.get("momentum_form", MOMENTUM_FORMS[0])
    is_form = isinstance(form, str) and form in MOMENTUM_FORMS
    require(is_form, "momentum_form", form, f"one of {MOMENTUM_FORMS}")
    check_rounding(group)
    check_counts(group)
    steps_of(group["ns_coefficients"], group["ns_steps"])
    other = elementwise_of(group) if is_adamw(group) else None
    if other is not None and "betas" in other.options and group.get("betas") is None:
        raise ValueError(
            "use_muon=False, but the group has no betas: to move a group from Muon to AdamW, set "
            "betas and eps along with use_muon"
        )
    if "betas" in group:
        check_betas("betas", group.get("betas"))
    _check_rule(group)


def check_rounding(group: Mapping) -> None:
    """Raise ValueError for a wrong value of rounding, and for stochastic rounding where other
    kernels than Muon's write the weights. `group`: a group, or the arguments of an optimizer.
    """
    rounding = group.get("rounding", ROUNDINGS[0])
    is_known = isinstance(rounding, str) and rounding in ROUNDINGS
    require(is_known, "rounding", rounding, f"one of {ROUNDINGS}")
    halves = group.get(MASTER_KEY)
    is_known = halves is None or isinstance(halves, str) and halves in MASTER_WEIGHTS
    require(is_known, MASTER_KEY, halves, f"one of {MASTER_WEIGHTS}")
    if rounding == ROUNDINGS[0]:
        return
    if halves is not None:
        raise ValueError(
            f"rounding={rounding!r} with {MASTER_KEY}={halves!r}, which keeps all bits "
            "of a weight, so that nothing is rounded: leave one of them out"
        )
    if is_adamw(group):
        raise ValueError(
            f"rounding={rounding!r} in a group with use_muon=False: torch's kernels write the "
            "weights of AdamW, and round to nearest. Leave rounding out, and keep these weights in "
            "fp32 if their learning rate is small"
        )
    if group.get("rule") is not None and writes_weights(rule_of(group)):
        raise ValueError(
            f"rounding={rounding!r} with rule={group['rule']!r}, which writes weights by formulas "
            "of its own, rounded to nearest: leave rounding out, or use another rule"
        )


def check_flags(group: Mapping) -> None:
    """Raise ValueError for a value of a key of FLAGS that is neither true nor false: of text, even
    "no" would count as True.
    """
    for key in FLAGS:
        if key in group:
            require(truth_of(group[key]) in (0, 1), key, group[key], "True or False")


def check_counts(group: Mapping) -> None:
    """Raise ValueError for a wrong value of a key of COUNTS in a group, or in the arguments of an
    optimizer.
    """
    for key, (most, allowed) in COUNTS.items():
        if key in group:
            value = group[key]
            # `type` instead of isinstance: True is an int
            require(type(value) is int and 0 <= value <= most, key, value, allowed)


def _check_rule(group: dict) -> None:
    """Raise ValueError for an unknown rule, for wrong or missing options of the rule, and for
    options that the rule does not read.
    """
    if group.get("rule") is None:
        return
    rule = (elementwise_of if is_adamw(group) else rule_of)(group)
    for key in [key for key in rule.options if key not in group]:
        raise ValueError(
            f"rule={group['rule']!r} needs the key {key!r}, by default {rule.options[key]!r}: add "
            "it to the group along with the rule"
        )
    rule.check(group)
    if is_adamw(group):
        return
    # A bias correction changes the numbers of the momentum, which only `update` replaces
    form = writes_weights(rule) and is_sum(group)
    form = form or overrides(rule, "update") and is_corrected(group)
    own = {"decay": writes_weights(rule) and form_of(group) != ALL, "momentum_form": form}
    for key in [key for key, differs in own.items() if differs]:
        raise ValueError(
            f"{key}={group[key]!r} with rule={group['rule']!r}, which has formulas of its own: "
            f"leave {key} out, or use another rule"
        )


def _check_scale(scale: object) -> None:
    """Raise ValueError for a wrong value of adjust_lr_fn. Calls no function, see
    `check_with_options`.
    """
    # By identity of types: an array would compare with each name element by element
    if isinstance(scale, str) and scale in AMBIGUOUS_SCALES:
        raise ValueError(
            f"adjust_lr_fn={scale!r} is not allowed, since packages differ in its meaning: "
            f"{AMBIGUOUS_SCALES[scale]}"
        )
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    require(
        scale is None
        or isinstance(scale, str)
        and scale in SCALES
        or is_number
        and 0 < scale <= FP32_MAX
        or callable(scale),
        "adjust_lr_fn",
        scale,
        f"one of {(None, *SCALES)}, a finite number > 0, or a function of (rows, columns)",
    )


def check_scale_function(function: Callable, shapes: Iterable[tuple[int, int]], name: str) -> None:
    """Raise ValueError, naming the parameter, for a factor of `function` that is no finite number >
    0. `shapes`: of the matrices of the parameter. An error of `function` itself is chained.
    """
    for rows, cols in shapes:
        what = f"adjust_lr_fn for parameter {name}, of whose matrices some are ({rows}, {cols}),"
        try:
            factor = function(rows, cols)
        except Exception as error:
            raise ValueError(
                f"{what} raised {type(error).__name__}: {shortened(error)}. It must be a function "
                "of two ints, the rows and the columns of a matrix"
            ) from error
        if not 0 < number_of(factor) <= FP32_MAX:
            raise ValueError(
                f"{what} returned {shortened(repr(factor))}: it must return a finite number > 0"
            )


def check_betas(key: str, betas: object) -> None:
    """Raise ValueError, naming `key`, unless `betas` is a pair of numbers in [0, 1)."""
    pair = (
        isinstance(betas, (tuple, list))
        and len(betas) == 2
        and all(0 <= number_of(b) < 1 for b in betas)
    )
    require(pair, key, betas, "two numbers in [0, 1)")


def is_adamw(group: Mapping) -> bool:
    """Whether use_muon of a group is false; works on unchecked groups, too."""
    return truth_of(group.get("use_muon", True)) == 0


def require(true: bool, key: str, came: object, allowed: str) -> None:
    """Raise ValueError for the value `came` of `key` unless `true`; `allowed`: values in words."""
    if not true:
        raise ValueError(f"{key}={shortened(repr(came))} is not allowed: it must be {allowed}")

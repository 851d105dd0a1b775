"""Check of the rule of a group with the options of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...rules.rule import overrides, reads_gradients, rule_of


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

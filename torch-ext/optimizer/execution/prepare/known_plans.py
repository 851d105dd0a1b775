"""Plans that were made before, for steps that plan anew without a change, as after a load.

`KnownPlans` saves this rank the time of planning, and nothing else: ranks compare plans all the
same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from ...newton_schulz import coefficients
from ...params.config import MuonConfig
from ...params.dtensor import gradient_dtype, local_of, mismatched_placements, properties_of
from ...planning.planner import Plan, Planner
from ...rules.elementwise import DTYPE_KEY
from ...rules.muon import MASTER_KEY
from .select import GroupParams, planned_values


class KnownPlans:
    """The plans of the last call of `of`, and what they were made from.

    Planning is a function of its inputs: equal inputs give equal plans. So ranks need not agree on
    which of them plan anew. `Planner.plan` issues no collective, and all that follows planning is
    done on every rank: the comparison of plans, the first exchanges, the move of state.
    """

    def __init__(self) -> None:
        """Start without plans."""
        self._inputs: list[tuple] | None = None  # of each part
        self._plans: list[list[Plan]] = []  # of each part

    def of(
        self, parts: Sequence[GroupParams], planner: Planner, options: MuonConfig
    ) -> list[Plan]:
        """Return the plans of `parts`. Raises as `Planner.plan` and `check_bucket_buffers`.

        `parts`: of `select_params`, all of them. `planner`: new, without loads. `options`: of the
        optimizer.
        """
        inputs = [(options, *_inputs(part, planner, options.ns_dtype)) for part in parts]
        if inputs != self._inputs:
            self._inputs, self._plans = None, []  # if planning fails
            self._plans = [
                planner.plan(part.groups, part.params, part.group_of, part.process_group)
                for part in parts
            ]
            planner.check_bucket_buffers()
            self._inputs = inputs
        else:
            self._plans = [
                [_of_groups(plan, part.groups) for plan in plans]
                for part, plans in zip(parts, self._plans)
            ]
        return [plan for plans in self._plans for plan in plans]

    def keep_only(self, params: Collection[torch.Tensor]) -> None:
        """Forget all plans if any has a parameter that is not in `params`: a plan keeps it alive,
        and will not be taken again.
        """
        if any(p not in params for plans in self._plans for plan in plans for p in plan.params):
            self._inputs, self._plans = None, []


def _inputs(part: GroupParams, planner: Planner, dtype: torch.dtype | None) -> tuple:
    """Everything that the plans of a part are made from, besides the options of the optimizer.
    `dtype`: the option `ns_dtype`.
    """
    group = part.groups[0]
    steps = None
    if group["use_muon"]:
        # Expected times depend on the coefficients themselves
        steps = coefficients.steps_of(group["ns_coefficients"], group["ns_steps"])
    return (
        planner.hardware(part.params, part.process_group),
        part.process_group,
        planned_values(part, dtype),
        steps,
        # AdamW groups of different kinds of state may be in one part
        [(one.get(MASTER_KEY), one.get(DTYPE_KEY), one.get("rule")) for one in part.groups],
        list(map(properties_of, part.params)),
        [type(local_of(p)) for p in part.params],  # the planner refuses wrappers of tensors
        list(map(gradient_dtype, part.params)),
    )


def _of_groups(plan: Plan, groups: Sequence[dict]) -> Plan:
    """Return the plan as it would be made now: with the live groups, which a load replaces, and the
    placements of the gradients of this step.
    """
    mismatched = {} if plan.in_chunks else mismatched_placements(plan.params)
    return replace(plan, groups=tuple(groups), mismatched=mismatched)

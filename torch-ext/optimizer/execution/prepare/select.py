"""Which parameters a step steps, and which of them are planned together.

`select_params` chooses the parameters of a step, and returns keys that stay equal while the plans
of the last step are valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
import torch.distributed as dist

from ...newton_schulz import coefficients, method
from ...params.config import MuonConfig
from ...params.dtensor import is_dtensor
from ...params.errors import name_in, warn_caller
from ...params.layout import ranks_of_group
from ...params.units import shapes_of, splits_by_param
from ...planning.plan import bucket_sort_key
from ...rules.decay import form_of
from ...rules.elementwise import DTYPE_KEY, elementwise_of
from ...rules.muon import comparable_scale, is_corrected, is_stochastic, is_sum
from ...rules.rule import host_constants, rule_of, selection_of, sends_signs


@dataclass(frozen=True)
class GroupParams:
    """Parameters of a step, of one live parameter group or of several that are stepped together."""

    groups: list[dict]
    params: list[torch.Tensor]
    group_of: list[int]  # index in `groups` of the group of each parameter
    # Ranks with copies of the plain parameters; None: plain parameters are this rank's alone
    process_group: dist.ProcessGroup | None


# (live group, its parameters to step, options with the process group of the plain ones)
Part = tuple[dict, list[torch.Tensor], MuonConfig]


def select_params(
    groups: Sequence[dict],
    options: MuonConfig,
    options_by_group: Sequence[MuonConfig],
    alone: bool,
) -> tuple[list[GroupParams], list[tuple]]:
    """Return (parameters to step, keys of their plans). While the keys stay equal, the plans of the
    last step are valid.

    `options_by_group`: of each group; they differ from `options` in process_group only.
    `alone`: parameters that this process steps without other ranks (plain tensors without a
    process_group). Else parameters that several ranks step together (DTensors, and plain tensors
    with a process_group). Warns of a shared parameter with a gradient but without requires_grad.
    """
    parts = []
    for group, part_options, members in by_process_group(groups, options, options_by_group):
        is_shared = part_options.process_group is not None
        params = [p for p in members if (not is_shared and not is_dtensor(p)) == alone]
        # Ranks must plan alike, so shared parameters are chosen by requires_grad, and
        # MissingGradients handles a missing gradient. Alone, parameters are chosen by gradient, as
        # in torch. With overlap_backward a step that began during backward cannot plan, so both
        # kinds are planned whether or not the gradient exists.
        by_requires_grad = not alone or options.overlap_backward
        chosen = [
            p
            for p in params
            if by_requires_grad and p.requires_grad or alone and p.grad is not None
        ]
        parts.append((group, chosen, part_options))
        for p in params if not alone else ():
            if p.grad is not None and not p.requires_grad:
                warn_caller(
                    f"parameter {name_in(group, p)} has a gradient but requires_grad=False: it is "
                    "left alone, for other ranks cannot know; to have it stepped, call "
                    "requires_grad_() on it"
                )
    found = step_together([part for part in parts if part[1]])
    # Sorted by the ids of groups: a new value of an option that only changes the order of plans
    # must not cause new plans
    keys = sorted((_plan_key(part, options.ns_dtype) for part in found), key=itemgetter(0))
    return found, keys


def by_process_group(
    groups: Sequence[dict], options: MuonConfig, options_by_group: Sequence[MuonConfig]
) -> list[tuple[dict, MuonConfig, list[torch.Tensor]]]:
    """Return [(group, options, parameters)]: the plain parameters of a group with a process
    group of its own come apart from the group's DTensors, which follow their meshes and are planned
    with the process group of the optimizer.
    """
    found = []
    for group, own in zip(groups, options_by_group):
        params = group["params"]
        if own.process_group is options.process_group:
            found.append((group, options, params))
            continue
        found.append((group, options, list(filter(is_dtensor, params))))
        found.append((group, own, [p for p in params if not is_dtensor(p)]))
    return found


def step_together(parts: Sequence[Part]) -> list[GroupParams]:
    """Put Muon groups together that differ only in numbers that a step reads on the device (lr,
    weight_decay, momentum, beta2) and in `split`: they are planned, packed and launched as one.

    Groups planned one by one would leave ranks without work: a group of one matrix has one owner.
    Groups for other ranks stay apart: a plan averages and keeps state over one process group. AdamW
    groups share buckets where owners keep state, with launches of their own; else they stay alone:
    torch's kernels take one lr.
    """
    together: dict[tuple, list[Part]] = {}
    for number, part in enumerate(parts):
        group, _, options = part
        # All ranks plan in one order. An order by the first group of each key would differ, because
        # a rank may lack groups of further ranks. Large sets of ranks come first, as in a step:
        # plans move state by collectives, and in the order of the groups ranks could wait for each
        # other in a circle. AdamW groups of equal ranks keep the order of the groups.
        process_group = options.process_group
        by_ranks = bucket_sort_key(() if process_group is None else ranks_of_group(process_group))
        key = by_ranks, 2, number, ""
        if not group["use_muon"] and options.owner_keeps_state:
            key = by_ranks, 1, 0, repr((elementwise_of(group).name, group.get(DTYPE_KEY)))
        if group["use_muon"]:
            scale = group["adjust_lr_fn"]
            if callable(scale):  # equal factors, in place of the address of the function
                scale = comparable_scale(scale, shapes_of(group, part[1]))
            key = by_ranks, 0, 0, repr((host_constants(group), scale))
        together.setdefault(key, []).append(part)
    return [
        GroupParams(
            [group for group, _, _ in members],
            [p for _, params, _ in members for p in params],
            [i for i, (_, params, _) in enumerate(members) for _ in params],
            members[0][2].process_group,
        )
        for members in (together[key] for key in sorted(together))
    ]


def _plan_key(part: GroupParams, dtype: torch.dtype | None) -> tuple:
    """Key of the plans of groups: groups, parameters, and the options that plans depend on."""
    # Bucket updates hold the live groups, hence the ids. Plans keep the groups alive, so no other
    # group can get the id.
    return tuple(map(id, part.groups)), *planned_values(part, dtype)


def planned_values(part: GroupParams, dtype: torch.dtype | None) -> tuple:
    """Return what plans depend on, besides the forms of parameters: parameters, and the options of
    their groups. `dtype`: the option `ns_dtype`.

    Coefficients enter only through the scratch bytes, and the direct matrices, of each shape: a
    schedule of coefficients seldom plans anew.
    """
    group = part.groups[0]  # equal in all that follows
    steps = None
    if group["use_muon"]:
        steps = coefficients.steps_of(group["ns_coefficients"], group["ns_steps"])
    splits = list(map(splits_by_param(part.groups).get, part.params))
    # A parameter that lost its dims since the constructor is refused by the planner
    shapes = {
        shape
        for p, split in zip(part.params, splits)
        if p.ndim > 1
        for shape in split.shapes(p.shape)
    }
    selection = selection_of(group)
    if selection is not None:
        shapes |= {selection.shape(*shape) for shape in shapes}
    dtype = method.products_dtype(dtype, part.params[0].device)
    forms = steps and {
        (
            shape,
            method.scratch_bytes(*shape, steps, dtype),
            method.supports_scattered_rows(*shape, steps),
        )
        for shape in shapes
    }
    return (
        tuple(part.group_of),
        group["use_muon"],
        group["adjust_lr_fn"],
        form_of(group),
        (is_sum(group), is_corrected(group), is_stochastic(group)),
        (group.get("master_weights"), group.get(DTYPE_KEY)),
        (rule_of if group["use_muon"] else elementwise_of)(group),
        group["use_muon"] and sends_signs(group),
        selection,
        forms,
        tuple(splits),
        tuple(map(id, part.params)),
    )

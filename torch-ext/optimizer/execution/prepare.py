"""Plans before the first step, and bound bucket updates after memory has moved."""

from __future__ import annotations

import warnings
from collections import Counter

from ..communication.nonfinite import NonfiniteFlags
from ..communication.plan_check import agree
from ..newton_schulz import coefficients, method
from ..params.dtensor import is_dtensor, local_of
from ..params.errors import name_in
from ..pipeline import BUCKETS_IN_FLIGHT, Pause
from ..planning.plan import bucket_sort_key, check_bucket_buffers
from ..planning.planner import Plan, Planner
from ..state.create import check_state, prepare_state
from .bucket_updates import BUCKET_UPDATES, AdamWUpdate, BoundBucket
from .param_store import Store
from .workspace import Workspace


def stepped(groups, options, alone) -> tuple[list, list]:
    """([(group, its parameters of a step)], what plans of them rest on), of those that this process
    takes alone, or with other ranks.

    Where ranks must act alike, those that want a gradient are; alone those that have one, as in
    torch. A step that began during backward cannot plan: with overlap_backward both are, and
    Presence leaves alone what has no gradient.
    """
    shared, units = options.process_group is not None, []
    for group in groups:
        params = [p for p in group["params"] if (not shared and not is_dtensor(p)) == alone]
        wanted = not alone or options.overlap_backward
        units.append(
            (
                group,
                [p for p in params if wanted and p.requires_grad or alone and p.grad is not None],
            )
        )
        for p in params if not alone else ():
            if p.grad is not None and not p.requires_grad:
                warnings.warn(
                    f"parameter {name_in(group, p)} has a gradient but requires_grad=False: it is "
                    "left "
                    "alone, for other ranks cannot know; to have it stepped, call requires_grad_() "
                    "on it",
                    stacklevel=2,
                )
    units = [(group, params) for group, params in units if params]
    return units, [_rests_on(*unit, options.ns_dtype) for unit in units]


def _rests_on(group, params, dtype) -> tuple:
    """The group itself, which routes read (a plan keeps it, so no other has its id); of
    coefficients only memory.
    """
    steps = (
        coefficients.steps_of(group["ns_coefficients"], group["ns_steps"])
        if group["use_muon"]
        else None
    )
    # One that has lost its dims is refused when it is planned
    shapes = {p.shape[-2:] for p in params if p.ndim > 1}
    dtype = method.products_dtype(dtype, params[0].device)
    forms = steps and {
        (shape, method.scratch(*shape, steps, dtype), method.splits(*shape, steps))
        for shape in shapes
    }
    return id(group), group["use_muon"], group["adjust_lr_fn"], forms, tuple(map(id, params))


def planned(units, state, options, process_groups, alone) -> list[Plan]:
    """The plans of a step's parameters, after all ranks have agreed on them, and their state.
    Collective.
    """
    planner = Planner(options, process_groups)
    if not alone:
        process_groups.learn([p for _, params in units for p in params], planner.process_group)
    plans = [plan for unit in units for plan in planner.plan(*unit)]
    planner.check_bucket_buffers()
    check_state(plans, state)
    agree(plans, options, process_groups)
    prepare_state(plans, state, options)
    return plans


# what capturable=True says, once each, where a graph does not fit
OTHER_NUMBERS = (
    "the step is not replayed, since a number other than lr, weight_decay and momentum changed"
)
OTHER_PLACES = (
    "AdamW's step is not replayed, since gradients lie elsewhere or a number other than lr changed"
)
OTHER_PARAMETERS = (
    "the step is not replayed, since parameters, their memory or the form of gradients changed or "
    "a "
    "gradient is missing"
)


def watch(plans, stores, process_groups, mode):
    """The Guard that flags what the step leaves alone; `mode`: what to do about it. None: nobody
    looks.
    """
    return (
        None
        if mode == "propagate"
        else NonfiniteFlags(plans, stores, process_groups, whole=mode != "skip")
    )


def make_stores(plans, state) -> list:
    """The memory of each plan's parameters. Raises RuntimeError for a parameter whose memory was
    freed.
    """
    for plan in plans:
        for p in plan.params:
            if p.numel() and local_of(p).numel() and not local_of(p).untyped_storage().nbytes():
                raise RuntimeError(
                    f"parameter {name_in(plan.group, p)} has no memory: it was freed, and has to "
                    "be "
                    "materialized again before the step"
                )
    return [
        Store(p.params, p.layouts, p.row_layouts, state, p.in_chunks, p.group, p.mismatched)
        for p in plans
    ]


def bind(plans, stores, options, process_groups, graphs):
    """[(route, live parameter group)] of all plans: their buckets share one workspace and one
    pipeline.

    `graphs`: those of buckets, and those of what is stepped where it is stored.
    """
    graphs, beside = graphs
    jobs = [
        (AdamWUpdate(store, beside if options.capturable else None), p.group)
        for p, store in zip(plans, stores)
        if p.shares is None
    ]
    tasks = _in_order(plans, stores, options)
    slots, at_home = _slots([bucket for _, _, bucket, _ in tasks], options)
    bounds, travelling = [], 0
    for store, hp, bucket, share in tasks:
        route = BUCKET_UPDATES[bucket.route]
        group = process_groups.of(bucket.ranks) if route.travels else None
        number = travelling if route.travels else at_home
        bounds.append((route, number, BoundBucket(bucket, share, store, options, group, hp)))
        travelling += route.travels
    workspace = Workspace(slots, stores[0].device if stores else None)
    for _, number, bound in bounds:
        workspace.reserve(number, bound.share)
    ranks = None
    for route, number, bound in bounds:
        if (
            route.travels
            and ranks not in (None, bound.bucket.ranks)
            and not options.overlap_backward
        ):
            jobs.append((Pause(), bound.hp))
        ranks = bound.bucket.ranks if route.travels else ranks
        bound.memory, bound.graphs, bound.slot = (
            workspace.take(number, bound.share),
            graphs,
            number % slots,
        )
        jobs.append((route(bound), bound.hp))
    return jobs


def _in_order(plans, stores, options) -> list:
    """[(store, live parameter group, bucket, share)] in the order of a step: those of the same
    ranks follow each other.

    Along backward: the first bucket of each family, then the second ones; those last that nothing
    brings in. Along forward the same, among those of the same ranks. The key says only what all
    ranks of a bucket know, so those of several families find one order.
    """
    tasks = []
    for plan, store in zip(plans, stores):
        counts, seen = Counter((b.route, b.ranks) for b, _ in plan.shares or ()), Counter()
        for bucket, share in plan.shares or ():
            family = bucket.route, bucket.ranks
            seen[family] += 1
            place, those = seen[family] / counts[family], bucket_sort_key(bucket.ranks)
            key = those, place * options.overlap_forward
            if options.overlap_backward:
                key = not share.crosses_inbound, place, those
            tasks.append((key, (store, plan.group, bucket, share)))
    return [task for _, task in sorted(tasks, key=lambda task: task[0])]


def _slots(buckets, options) -> tuple[int, int]:
    """(number of slots, that of buckets that stay at home)."""
    if not options.overlap_backward:
        return BUCKETS_IN_FLIGHT, 1  # while only the first that travels has been started
    check_bucket_buffers(buckets, options.workspace_bytes)  # again, with what this rank steps alone
    away = sum(BUCKET_UPDATES[bucket.route].travels for bucket in buckets)
    return away + 1, away


def name_buckets(jobs) -> None:
    """Give each bucket of a step's jobs its name in messages, which begins with its number in
    `plan_report`.
    """
    for number, (route, _) in enumerate(jobs):
        if route.bound is not None:
            route.label = _label(number, route.bound)


def _label(number, bound) -> str:
    ranks, first = bound.bucket.ranks, bound.store.names[bound.bucket.matrices[0].param]
    return (
        f"bucket {number} ({bound.bucket.route}; {len(bound.bucket.matrices)} matrices, the first "
        "of parameter "
        f"{first}; ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''})"
    )

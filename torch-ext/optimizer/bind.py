"""From plans to routes that can run: what happens before the first step, and after memory has moved.

Decides which memory a bucket gets, and the order of buckets in a step. Knows no optimizer; what a plan says (plan.py)
and what a route does (routes.py) it only passes on.
"""
from __future__ import annotations

from collections import Counter

from .bound import Bound, Workspace
from .guard import Guard
from .layout import local_of
from .names import name_in
from .pipeline import SLOTS, Pause
from .plan import check_slots, turn
from .routes import ROUTES, Elementwise
from .store import Store

# what capturable=True says, once each, where a graph does not fit
OTHER_NUMBERS = "the step is not replayed, since a number other than lr, weight_decay and momentum changed"
OTHER_PLACES = "AdamW's step is not replayed, since gradients lie elsewhere or a number other than lr changed"
OTHER_PARAMETERS = ("the step is not replayed, since parameters, their memory or the form of gradients changed or a "
                    "gradient is missing")


def watch(plans, stores, process_groups, mode):
    """The Guard that flags what the step leaves alone; `mode`: what to do about it. None: nobody looks."""
    return None if mode == "propagate" else Guard(plans, stores, process_groups, whole=mode != "skip")


def make_stores(plans, state) -> list:
    """The memory of each plan's parameters. Raises RuntimeError for a parameter whose memory was freed."""
    for plan in plans:
        for p in plan.params:
            if p.numel() and local_of(p).numel() and not local_of(p).untyped_storage().nbytes():
                raise RuntimeError(f"parameter {name_in(plan.group, p)} has no memory: it was freed, and has to be "
                                   "materialized again before the step")
    return [Store(p.params, p.layouts, p.row_layouts, state, p.in_chunks, p.group, p.strays) for p in plans]


def bind(plans, stores, options, process_groups, graphs):
    """[(route, live parameter group)] of all plans: their buckets share one workspace and one pipeline.

    `graphs`: those of buckets, and those of what is stepped where it is stored.
    """
    graphs, beside = graphs
    jobs = [(Elementwise(store, beside if options.capturable else None), p.group)
            for p, store in zip(plans, stores) if p.shares is None]
    tasks = _in_order(plans, stores, options)
    slots, at_home = _slots([bucket for _, _, bucket, _ in tasks], options)
    bounds, travelling = [], 0
    for store, hp, bucket, share in tasks:
        route = ROUTES[bucket.route]
        group = process_groups.of(bucket.ranks) if route.travels else None
        number = travelling if route.travels else at_home
        bounds.append((route, number, Bound(bucket, share, store, options, group, hp)))
        travelling += route.travels
    workspace = Workspace(slots, stores[0].device if stores else None)
    for _, number, bound in bounds:
        workspace.reserve(number, bound.share)
    ranks = None
    for route, number, bound in bounds:
        if route.travels and ranks not in (None, bound.bucket.ranks) and not options.overlap_backward:
            jobs.append((Pause(), bound.hp))
        ranks = bound.bucket.ranks if route.travels else ranks
        bound.memory, bound.graphs, bound.slot = workspace.take(number, bound.share), graphs, number % slots
        jobs.append((route(bound), bound.hp))
    return jobs


def _in_order(plans, stores, options) -> list:
    """[(store, live parameter group, bucket, share)] in the order of a step: those of the same ranks follow each other.

    Along backward: the first bucket of each family, then the second ones; those last that nothing brings in. Along
    forward the same, among those of the same ranks. The key says only what all ranks of a bucket know, so those of
    several families find one order.
    """
    tasks = []
    for plan, store in zip(plans, stores):
        counts, seen = Counter((b.route, b.ranks) for b, _ in plan.shares or ()), Counter()
        for bucket, share in plan.shares or ():
            family = bucket.route, bucket.ranks
            seen[family] += 1
            place, those = seen[family] / counts[family], turn(bucket.ranks)
            key = those, place * options.overlap_forward
            if options.overlap_backward:
                key = not share.crosses_inbound, place, those
            tasks.append((key, (store, plan.group, bucket, share)))
    return [task for _, task in sorted(tasks, key=lambda task: task[0])]


def _slots(buckets, options) -> tuple[int, int]:
    """(number of slots, that of buckets that stay at home)."""
    if not options.overlap_backward:
        return SLOTS, 1  # borrowed while only the first one that travels has been started
    check_slots(buckets, options.workspace_bytes)  # again, with what this rank steps alone
    away = sum(ROUTES[bucket.route].travels for bucket in buckets)
    return away + 1, away


def name_buckets(jobs) -> None:
    """Give each bucket of a step's jobs its name in messages, which begins with its number in `plan_report`."""
    for number, (route, _) in enumerate(jobs):
        if route.bound is not None:
            route.label = _label(number, route.bound)


def _label(number, bound) -> str:
    ranks, first = bound.bucket.ranks, bound.store.names[bound.bucket.matrices[0].param]
    return (f"bucket {number} ({bound.bucket.route}; {len(bound.bucket.matrices)} matrices, the first of parameter "
            f"{first}; ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''})")

"""Plans before the first step, and bound bucket updates after memory has moved."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from ..communication.missing_grads import MissingGradients, flag_counts
from ..communication.nonfinite import FlagBuffers, NonfiniteFlags
from ..communication.plan_check import check_plans
from ..communication.process_groups import ProcessGroups
from ..newton_schulz import coefficients, method
from ..params.config import MuonConfig
from ..params.dtensor import is_dtensor, local_of
from ..params.errors import name_in, warn_caller
from ..pipeline import BUCKETS_IN_FLIGHT, BucketUpdate, Pause
from ..planning.plan import Bucket, bucket_sort_key, check_bucket_buffers
from ..planning.planner import Plan, Planner
from ..state.create import check_state, prepare_state
from .bucket_updates import BUCKET_UPDATES, AdamWUpdate, BucketInputs
from .cuda_graphs import Graphs
from .param_store import Store
from .step_inputs import InputBuffers, StepInputs
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
                warn_caller(
                    f"parameter {name_in(group, p)} has a gradient but requires_grad=False: it is "
                    "left alone, "
                    "for other ranks cannot know; to have it stepped, call requires_grad_() on it"
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


def planned(units, state, options, process_groups, alone) -> tuple[list[Plan], list]:
    """(the plans of a step's parameters, after all ranks have agreed on them, the comparisons that
    `check_plans` leaves for the next step). Brings state to where it is to be. Collective.
    """
    planner = Planner(options, process_groups)
    if not alone:
        process_groups.find_existing(
            [p for _, params in units for p in params], planner.process_group
        )
    plans = [plan for unit in units for plan in planner.plan(*unit)]
    planner.check_bucket_buffers()
    check_state(plans, state)
    later = check_plans(plans, options, process_groups)
    prepare_state(plans, state, options)
    return plans, later


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


class BoundStep:
    """Everything of a step that is bound to memory. Replaced as a whole, never changed, when
    parameters, state or gradients lie elsewhere.

    `stores`: the tensors of each plan. `jobs`: [(update, live parameter group)] of the pipeline;
    `alone`: AdamW's updates, where these have a CUDA graph of their own: gradient addresses are
    baked into that graph, and capturing it again must not capture the graph that holds collectives
    again, for which other ranks would wait. `together`: the stores that `alone` does not step.
    """

    def __init__(
        self,
        plans: Sequence[Plan] = (),
        state: dict | None = None,
        options: MuonConfig | None = None,
        process_groups: ProcessGroups | None = None,
        graphs: tuple[Graphs, Graphs] | None = None,
        nonfinite: str = "propagate",
        written: Callable[[BucketUpdate], None] | None = None,
    ):
        """`graphs`: those of buckets, and those of `alone`; `nonfinite`: as in `Muon`; `written`:
        called with each update once its weights are written. Without plans nothing is bound.
        """
        self.jobs = []
        self.alone = []
        self.nonfinite = None  # None: gradients are not checked
        device = local_of(plans[0].params[0]).device if plans else torch.device("cpu")
        buffers = InputBuffers(plans, flag_counts(plans), device)
        flags = None if nonfinite == "propagate" else FlagBuffers(plans, device)
        self.stores = _make_stores(plans, state, buffers, flags)
        if flags is not None:  # made even without parameters: other ranks may have some
            whole = nonfinite != "skip"
            self.nonfinite = NonfiniteFlags(flags, plans, self.stores, process_groups, whole)
        jobs = _bind(plans, self.stores, options, process_groups, graphs, written) if plans else []
        self.missing = MissingGradients(plans, self.stores, process_groups, buffers.flags)
        early = len(jobs) if jobs and options.overlap_backward else 0
        self.inputs = StepInputs(buffers, self.stores, self.missing, early)
        for job in jobs:
            apart = options.capturable and isinstance(job[0], AdamWUpdate)
            (self.alone if apart else self.jobs).append(job)

    @property
    def all_jobs(self) -> list[tuple[BucketUpdate, dict]]:
        return self.jobs + self.alone

    @functools.cached_property
    def together(self) -> list[Store]:
        apart = {id(update.store) for update, _ in self.alone}
        return [store for store in self.stores if id(store) not in apart]


def _make_stores(
    plans: Sequence[Plan], state: dict, buffers: InputBuffers, flags: FlagBuffers | None
) -> list[Store]:
    """The memory of each plan's parameters. Raises RuntimeError for a parameter whose memory was
    freed.
    """
    for plan in plans:
        for p in plan.params:
            if p.numel() and local_of(p).numel() and not local_of(p).untyped_storage().nbytes():
                raise RuntimeError(
                    f"parameter {name_in(plan.group, p)} has no memory: it was freed, and has to "
                    "be materialized again before the step"
                )
    return [
        Store(
            plan.params,
            plan.layouts,
            plan.row_layouts,
            state,
            plan.in_chunks,
            plan.group,
            plan.mismatched,
            buffers.addresses[index],
            buffers.scalars[index],
            None if flags is None else flags.flags,
            None if flags is None else flags.flag_offset[index],
        )
        for index, plan in enumerate(plans)
    ]


def _bind(plans, stores, options, process_groups, graphs, written):
    """[(update, live parameter group)] of all plans: their buckets share one workspace and one
    pipeline.

    `graphs`: those of buckets, and those of what is stepped where it is stored. `written`: called
    with each update once its weights are written.
    """
    graphs, beside = graphs
    jobs = []
    for p, store in zip(plans, stores):
        if p.shares is None:
            own = beside if options.capturable else None
            label = f"AdamW ({len(p.params)} parameters, the first {store.names[0]})"
            jobs.append((AdamWUpdate(store, label, written, own), p.group))
    # With capturable, AdamW's updates have a graph of their own and no number in `plan_report`
    skipped = len(jobs) if options.capturable else 0
    tasks = _in_order(plans, stores, options)
    slots, at_home = _slots([bucket for _, _, bucket, _ in tasks], options)
    workspace = Workspace(slots, stores[0].device if stores else None)
    numbers, travelling = [], 0
    for _, _, bucket, share in tasks:
        travels = BUCKET_UPDATES[bucket.route].travels
        numbers.append(travelling if travels else at_home)
        travelling += travels
        workspace.reserve(numbers[-1], share)
    ranks = None
    for (store, group, bucket, share), number in zip(tasks, numbers):
        kind = BUCKET_UPDATES[bucket.route]
        if kind.travels and ranks not in (None, bucket.ranks) and not options.overlap_backward:
            jobs.append((Pause("Pause"), group))
        ranks = bucket.ranks if kind.travels else ranks
        inputs = BucketInputs(
            bucket=bucket,
            share=share,
            store=store,
            options=options,
            group=group,
            process_group=process_groups.get_or_create(bucket.ranks) if kind.travels else None,
            memory=workspace.take(number, share),
            slot=number % slots,
            graphs=graphs,
            label=_label(len(jobs) - skipped, bucket, store),
            written=written,
        )
        jobs.append((kind(inputs), group))
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


def _label(number: int, bucket: Bucket, store: Store) -> str:
    """A bucket's name in messages, which begins with its number in `plan_report`."""
    first = store.names[bucket.matrices[0].param]
    ranks = f"{', '.join(map(str, bucket.ranks[:8]))}{', ...' if len(bucket.ranks) > 8 else ''}"
    return (
        f"bucket {number} ({bucket.route}; {len(bucket.matrices)} matrices, the first of "
        f"parameter {first}; ranks {ranks})"
    )

"""`BoundStep`: the plans of a step, bound to the memory of this rank without communication."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...communication.missing_grads import MissingGradients, flag_counts
from ...communication.nonfinite import FlagBuffers, NonfiniteFlags
from ...communication.process_groups import ProcessGroups
from ...params.config import MuonConfig
from ...params.dtensor import local_of
from ...params.validation import device_of
from ...pipeline import BucketUpdate, Job, Pause, StepHook
from ...planning.plan import Bucket
from ...planning.planner import Plan
from ...qk_clip.hook import HeadClipping
from ...rules.elementwise import elementwise_of
from ...rules.muon import STEPS_KEY, is_stochastic
from ..bound_update import BucketInputs
from ..cuda_graphs import Graphs
from ..elementwise_updates import BUCKET_UPDATES, ElementwiseUpdate
from ..param_store import Store
from ..step_inputs import InputBuffers, StepInputs, make_stores
from ..workspace import Workspace
from .buckets import reserve, sorted_buckets
from .state_place import StatePlace


@dataclass(frozen=True)
class StepSetup:
    """The groups and options of an optimizer, and facts of the step to be prepared."""

    groups: Sequence[dict] = ()  # live parameter groups
    options: MuonConfig = MuonConfig()  # noqa: RUF009, immutable
    # Of each group: `options` with the group's process_group
    options_by_group: Sequence[MuonConfig] = ()
    # As ranks compare `options`: with `unscale_in_step` resolved
    compared: MuonConfig = MuonConfig()  # noqa: RUF009, immutable
    scaled: bool = False  # a GradScaler decides about the step
    collects: bool = False  # the step collects metrics
    # Of overlap_forward: told of state that moves, and of written buckets
    overlap: StepHook | None = None

    @property
    def nonfinite(self) -> str:
        """The option `nonfinite` in effect: with a GradScaler the step is skipped as a whole."""
        return "raise" if self.scaled else self.options.nonfinite


class BoundStep:
    """A step bound to memory: stores, bucket updates, inputs and flags of all plans.

    Views, buffers and launches never change after the constructor; a step changes what `stores`,
    `inputs` and `missing` know of its gradients. Replaced as a whole when parameters, state or
    gradients have moved. Without plans nothing is bound.
    """

    def __init__(
        self,
        plans: Sequence[Plan] = (),
        state: dict | None = None,
        setup: StepSetup = StepSetup(),
        process_groups: ProcessGroups | None = None,
        graphs: tuple[Graphs, Graphs] | None = None,
        place: StatePlace | None = None,
        former: Workspace | None = None,
    ) -> None:
        """`graphs`: (of `jobs`, of `adamw_jobs`). `place`: of state. `former`: workspace of the
        step that is replaced, see `Workspace.take_over`. Raises RuntimeError for a parameter whose
        memory was freed.
        """
        options, nonfinite = setup.options, setup.nonfinite
        self.jobs: list[Job] = []  # in the order of the pipeline
        # With capturable=True: AdamW where parameters are stored, in a CUDA graph of its own,
        # because gradient addresses are baked into it. Re-capturing it must not re-capture the
        # graph that holds collectives: other ranks would wait. Else empty.
        self.adamw_jobs: list[Job] = []
        self.nonfinite: NonfiniteFlags | None = None  # None: gradients are not checked
        device = local_of(plans[0].params[0]).device if plans else torch.device("cpu")
        buffers = InputBuffers(plans, flag_counts(plans), device)
        flags = None if nonfinite == "propagate" else FlagBuffers(plans, device)
        self.collects = setup.collects
        place = place or StatePlace()
        place.begin(device)
        self.stores = make_stores(plans, state, buffers, flags, setup.collects, place.store)
        # Live groups whose steps are counted for the bias correction of momentum
        self.counting_groups = [group for group in setup.groups if STEPS_KEY in group]
        # All groups with stochastic rounding, also those without a gradient: a process alone plans
        # without them, and counts their steps as ranks do
        self.drawing_groups = list(filter(is_stochastic, setup.groups))
        # Made even without parameters on this rank: the check is collective, and further ranks may
        # have parameters
        if flags is not None:
            whole = nonfinite != "skip"
            self.nonfinite = NonfiniteFlags(flags, plans, self.stores, process_groups, whole)
        clip = self._head_clipping(setup, process_groups)
        written = _notifier(clip, setup.overlap)
        shared = options, process_groups, graphs, written, place
        self.workspace: Workspace | None = None
        jobs = []
        if plans:
            jobs, self.workspace = _bind(plans, self.stores, *shared, former)
        if clip is not None:
            clip.bind(jobs)
        self.missing = MissingGradients(plans, self.stores, process_groups, buffers.flags)
        # Work around the buckets of each step, in this order. The clip comes before `missing`,
        # which copies back weights without a gradient on any rank, and so undoes their scaling
        hooks = (place.hook(self.stores), self.nonfinite, clip, self.missing, setup.overlap)
        self.hooks: list[StepHook] = [hook for hook in hooks if hook is not None]
        early = len(jobs) if jobs and options.overlap_backward else 0
        self.inputs = StepInputs(buffers, self.stores, self.missing, early)
        for job in jobs:
            apart = options.capturable and isinstance(job[0], ElementwiseUpdate)
            (self.adamw_jobs if apart else self.jobs).append(job)

    def _head_clipping(
        self, setup: StepSetup, process_groups: ProcessGroups | None
    ) -> HeadClipping | None:
        """The hook of QK-clip, also without parameters to step on this rank, since the hook is
        collective; None without `qk_clip`. Arguments as in the constructor.
        """
        if setup.options.qk_clip is None:
            return None
        return HeadClipping(
            setup.options.qk_clip,
            setup.groups,
            self.stores,
            setup.options,
            setup.options_by_group,
            process_groups,
            self.nonfinite,
            device_of(setup.groups),
        )

    @property
    def all_jobs(self) -> list[Job]:
        """All bucket updates with their groups."""
        return self.jobs + self.adamw_jobs

    @functools.cached_property
    def graphed_stores(self) -> list[Store]:
        """Stores of `jobs`: with capturable=True, those in the graph of the step."""
        apart = {id(update.store) for update, _ in self.adamw_jobs}
        return [store for store in self.stores if id(store) not in apart]


def _notifier(*hooks: StepHook | None) -> Callable[[BucketUpdate], None] | None:
    """A function that calls `bucket_written` of all hooks. None if the last hook is None, since
    only that hook (overlap_forward) needs to know at once.
    """
    if hooks[-1] is None:
        return None
    methods = [hook.bucket_written for hook in hooks if hook is not None]

    def notify_all(update: BucketUpdate) -> None:
        for method in methods:
            method(update)

    return methods[0] if len(methods) == 1 else notify_all


def _bind(
    plans: Sequence[Plan],
    stores: Sequence[Store],
    options: MuonConfig,
    process_groups: ProcessGroups,
    graphs: tuple[Graphs, Graphs],
    written: Callable[[BucketUpdate], None] | None,
    place: StatePlace,
    former: Workspace | None,
) -> tuple[list[Job], Workspace]:
    """Bind the updates of all plans, in the order of the pipeline; return them, and the workspace
    that buckets of all plans share. Arguments as in `BoundStep`.
    """
    bucket_graphs, adamw_graphs = graphs
    jobs = []
    for plan, store in zip(plans, stores):
        if plan.rank_plans is None:
            own_graphs = adamw_graphs if options.capturable else None
            name = elementwise_of(plan.group).name.replace("adamw", "AdamW")
            label = f"{name} ({len(plan.params)} parameters, the first {store.names[0]})"
            jobs.append((place.elementwise_update(store, label, written, own_graphs), plan.group))
    # Labels number updates as `plan_report`, where AdamW's updates come last with capturable
    skipped = len(jobs) if options.capturable else 0
    tasks = sorted_buckets(plans, stores, options)
    device = stores[0].device if stores else None
    workspace, numbers, names = reserve(tasks, options, device)
    if former is not None:
        workspace.take_over(former)
    ranks = None
    for (store, group, bucket, rank_plan), number, name in zip(tasks, numbers, names):
        kind = BUCKET_UPDATES[bucket.route]
        # Between buckets of different ranks, see `Pause`
        changes_ranks = kind.has_collectives and ranks not in (None, bucket.ranks)
        if changes_ranks and not options.overlap_backward:
            jobs.append((Pause("Pause"), group))
        ranks = bucket.ranks if kind.has_collectives else ranks
        inputs = BucketInputs(
            bucket=bucket,
            rank_plan=rank_plan,
            store=store,
            options=options,
            group=group,
            process_group=(
                process_groups.get_or_create(bucket.ranks) if kind.has_collectives else None
            ),
            memory=workspace.views_for(number, rank_plan, name),
            buffer_index=number % workspace.buffer_count,
            graphs=bucket_graphs,
            label=_label(len(jobs) - skipped, bucket, store),
            written=written,
            stack_name=name,
        )
        jobs.append((place.update_of(bucket.route)(inputs), group))
    return jobs, workspace


def _label(number: int, bucket: Bucket, store: Store) -> str:
    """Name of a bucket in messages: the number in `plan_report`, route, first parameter, ranks."""
    first = store.names[bucket.matrices[0].param]
    ranks = f"{', '.join(map(str, bucket.ranks[:8]))}{', ...' if len(bucket.ranks) > 8 else ''}"
    return (
        f"bucket {number} ({bucket.route}; {len(bucket.matrices)} matrices, the first of "
        f"parameter {first}; ranks {ranks})"
    )

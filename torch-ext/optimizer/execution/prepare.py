"""Preparation of a step: plans before the first step, bound bucket updates after memory has moved.

`Preparation` owns the plans and the bound step of an optimizer, and decides when to make either
anew. `make_plans` is collective and rare: at the first step, and when parameters or placements
change. `BoundStep` binds the plans to this rank's memory without communication, whenever
parameters, state or the form of gradients move.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
import torch.distributed as dist

from ..communication.missing_grads import MissingGradients, flag_counts
from ..communication.nonfinite import FlagBuffers, NonfiniteFlags
from ..communication.plan_check import check_plans
from ..communication.process_groups import ProcessGroups, world_now
from ..kernels.backend import capturing
from ..newton_schulz import coefficients, method
from ..params.config import MuonConfig
from ..params.dtensor import is_dtensor, local_of, properties_of
from ..params.errors import name_in, warn_caller
from ..params.layout import ranks_of_group
from ..params.units import shapes_of, splits_by_id
from ..params.validation import check_changed_groups, device_of
from ..pipeline import BUCKETS_IN_FLIGHT, BucketUpdate, Job, Pause, StepHook, precompile_kernels
from ..planning.plan import Bucket, bucket_sort_key, check_bucket_buffers
from ..planning.planner import Plan, Planner, warn_of_idle
from ..planning.rank_plan import RankPlan
from ..qk_clip.hook import HeadClipping
from ..rules.decay import form_of
from ..rules.elementwise import DTYPE_KEY, elementwise_of
from ..rules.muon import STEPS_KEY, comparable_scale, is_corrected, is_stochastic, is_sum
from ..rules.rule import host_constants, rule_of, selection_of, sends_signs
from ..state import create
from .bucket_updates import BucketInputs
from .cuda_graphs import Graphs, release_before_groups
from .elementwise_updates import BUCKET_UPDATES, ElementwiseUpdate, StatePlace
from .fingerprint import StepFingerprint, memory_key
from .param_store import Store
from .step_inputs import InputBuffers, StepInputs, make_stores
from .workspace import Workspace

BucketTask = tuple[Store, dict, Bucket, RankPlan]  # the dict: the live parameter group


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
    groups: Sequence[dict], options: MuonConfig, own: Sequence[MuonConfig], alone: bool
) -> tuple[list[GroupParams], list[tuple]]:
    """Return (parameters to step, keys of their plans). While the keys stay equal, the plans of the
    last step are valid.

    `own`: the options of each group, which differ from `options` in process_group only. `alone`:
    parameters that this process steps without other ranks (plain tensors without a process_group).
    Else parameters that several ranks step together (DTensors, and plain tensors with a
    process_group). Warns of a shared parameter with a gradient but without requires_grad.
    """
    parts = []
    for group, part_options, members in by_process_group(groups, options, own):
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
    keys = sorted((_plan_key(some, options.ns_dtype) for some in found), key=itemgetter(0))
    return found, keys


def by_process_group(
    groups: Sequence[dict], options: MuonConfig, own: Sequence[MuonConfig]
) -> list[tuple[dict, MuonConfig, list[torch.Tensor]]]:
    """Return [(group, options, parameters)]: the plain parameters of a group with a process
    group of its own come apart from the group's DTensors, which follow their meshes and are planned
    with the process group of the optimizer.
    """
    found = []
    for group, group_options in zip(groups, own):
        params = group["params"]
        if group_options.process_group is options.process_group:
            found.append((group, options, params))
            continue
        found.append((group, options, list(filter(is_dtensor, params))))
        found.append((group, group_options, [p for p in params if not is_dtensor(p)]))
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
    """Key of the plans of groups: groups, parameters, and the options that plans depend on.

    Coefficients enter only through the scratch bytes, and the direct matrices, of each shape: a
    schedule of coefficients seldom plans anew.
    """
    group = part.groups[0]  # equal in all that follows
    steps = None
    if group["use_muon"]:
        steps = coefficients.steps_of(group["ns_coefficients"], group["ns_steps"])
    splits = list(map(splits_by_id(part.groups).get, map(id, part.params)))
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
    # Bucket updates hold the live groups, hence the ids. Plans keep the groups alive, so no other
    # group can get the id.
    return (
        tuple(map(id, part.groups)),
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


def make_plans(
    parts: Sequence[GroupParams],
    state: dict,
    options: MuonConfig,
    own: Sequence[MuonConfig],
    process_groups: ProcessGroups,
    alone: bool,
) -> tuple[list[Plan], list[Callable[[], None]]]:
    """Plan all `parts`, check that all ranks have equal plans, and create or move state. `own`: the
    options of each parameter group.

    Return (plans, collective comparisons that `check_plans` leaves for the next step).
    Collective unless `alone`. Raises RuntimeError if ranks differ, or if state has another
    shape than its parameter.
    """
    planner = Planner(options, process_groups)
    if not alone:
        process_groups.find_existing(
            [p for part in parts for p in part.params],
            options.process_group,
            {group.process_group for group in own} - {None},
        )
    plans = [
        plan
        for part in parts
        for plan in planner.plan(part.groups, part.params, part.group_of, part.process_group)
    ]
    planner.check_bucket_buffers()
    # Before ranks compare plans: a rank that raises can be repaired and step again, while the
    # remaining ranks wait in `check_plans`
    create.check_held_state(plans, state, options.state_dtype)
    later = check_plans(plans, options, process_groups)
    create.prepare_state(plans, state, options)
    return plans, later


# Warnings of capturable=True, each given once, if a graph cannot be replayed
SCALARS_CHANGED = (
    "the step is not replayed, since a number other than lr, weight_decay, momentum and NorMuon's "
    "beta2 changed"
)
GRADIENTS_MOVED = (
    "AdamW's step is not replayed, since gradients lie elsewhere or a number other than lr changed"
)
PARAMETERS_CHANGED = (
    "the step is not replayed, since parameters, their memory, the form of gradients or "
    "collect_metrics changed or a gradient is missing"
)


class Preparation:
    """The plans and the bound step of an optimizer, each made anew only after changes.

    Plans depend on parameters, placements and options; making plans is collective. The bound step
    depends on memory too; binding is local. Without changes `is_current` is all a step calls.

    `bound`: the bound step, without plans if nothing is bound. `process_groups`: of all plans.
    `world`: torch.distributed's default group at the last step. `fingerprint`: of the last
    step; None if the next step has to look at everything.
    """

    def __init__(self, place: StatePlace) -> None:
        """Start without plans; call `drop_plans` before the first step. `place`: of state."""
        self.place = place
        self.bound = BoundStep()
        self.world: object = None
        self.process_groups: ProcessGroups | None = None
        self.graphs: Graphs | None = None  # of buckets, or of the whole step
        self.adamw_graphs: Graphs | None = None  # of `BoundStep.adamw_jobs`
        self.fingerprint: StepFingerprint | None = None
        # Each group's parameters at the last step
        self._members: Sequence[Sequence[torch.Tensor]] = ()
        # Argument `alone` of `select_params` -> plans
        self._plans: dict[bool, list[Plan]] = {False: [], True: []}
        self._plan_keys: dict[bool, list[tuple] | None] = {False: None, True: None}
        self._memory_key: tuple | None = None  # of the bound step
        self._param_forms: list | None = None  # of all parameters in plans, at the last binding
        # Comparisons of gradients that `check_plans` left for the next step
        self._uncompared: list[Callable[[], None]] = []

    def is_current(self, groups: Sequence[dict], state: dict, *more: object) -> bool:
        """Whether `bound` can step with the current gradients. Runs the collective comparisons left
        by the last plan. `more`: further values that `bound` depends on.
        """
        if self._uncompared:
            self._compare_again(groups)
        seen = self.fingerprint
        return seen is not None and seen.is_current(groups, state, *more)

    def is_as_bound(self, groups: Sequence[dict], state: dict) -> bool:
        """Whether buckets may start during backward: nothing but gradients has changed since the
        last step, and gradients are not checked for NaN and Inf first.
        """
        if self.fingerprint is None or world_now() is not self.world:
            return False
        return self.bound.nonfinite is None and self.fingerprint.is_static_current(groups, state)

    def prepare(
        self,
        groups: Sequence[dict],
        state: dict,
        options: MuonConfig,
        own: Sequence[MuonConfig],
        compared: MuonConfig,
        scaled: bool,
        collects: bool,
        hook: StepHook | None,
    ) -> None:
        """Plan if parameters or placements changed, bind if memory or the form of gradients did.

        `options`: of the optimizer. `own`: of each parameter group. `compared`: the options for the
        comparison of ranks, with `unscale_in_step` resolved. `scaled`: a GradScaler decides about
        the step. `collects`: the step collects metrics. `hook`: is told of state that moves, and of
        written buckets. Raises as `make_plans`, `memory_key` and `BoundStep`.
        """
        self.place.wait()
        check_changed_groups(groups, own)
        if None in self._plan_keys.values():
            warn_of_idle(groups)
        # Called without state too: this step creates the state
        self._members = create.adopt_state(self._members, groups, state)
        # Shared plans first: parameters that the process steps alone must not affect shared plans
        for alone in (False, True):
            parts, key = select_params(groups, options, own, alone)
            lost = create.is_state_missing(self._plans[alone], state, options.state_dtype)
            if key != self._plan_keys[alone] or lost:
                if hook is not None:
                    hook.before_state_moves(state)
                self._plans[alone], later = make_plans(
                    parts, state, compared, own, self.process_groups, alone
                )
                self._uncompared += later
                self._plan_keys[alone] = key
                self._memory_key = self._param_forms = self.fingerprint = None
        plans = self._plans[False] + self._plans[True]
        params = [p for plan in plans for p in plan.params]
        self.place.pack(plans, state, groups)
        key = *memory_key(params, state, groups), scaled, collects
        if key != self._memory_key:
            forms = [properties_of(p) for p in params]
            self.forget_memory()  # if binding fails
            # A parameter was cast, or placed otherwise, in place: plan again
            if self._param_forms not in (None, forms):
                self.drop_plans(options)
                return self.prepare(groups, state, options, own, compared, scaled, collects, hook)
            nonfinite = "raise" if scaled else options.nonfinite
            self._bind_plans(plans, state, options, nonfinite, groups, own, collects, hook)
            self._memory_key = key
            self._param_forms = forms
        # After planning, which may create state
        self.fingerprint = StepFingerprint(groups, state, scaled, collects)

    def _bind_plans(
        self,
        plans: list[Plan],
        state: dict,
        options: MuonConfig,
        nonfinite: str,
        groups: Sequence[dict],
        own: Sequence[MuonConfig],
        collects: bool,
        hook: StepHook | None,
    ) -> None:
        """Replace `bound`. `nonfinite`: as in `Muon`. Raises as `BoundStep`, `check_capturable`."""
        device = device_of(groups)
        self.bound.missing.wait()
        self.graphs.warn_once(PARAMETERS_CHANGED)
        for graphs in (self.graphs, self.adamw_graphs):
            graphs.begin(device)
        bound = BoundStep(
            plans,
            state,
            options,
            self.process_groups,
            (self.graphs, self.adamw_graphs),
            nonfinite,
            hook,
            groups,
            own,
            collects,
            self.place,
        )
        if options.capturable and self.graphs.on:
            self.process_groups.check_capturable()
            release_before_groups()
        # First binding of a plan: kernels of these shapes may not be compiled
        if self._param_forms is None:
            further = [launch for hook in bound.hooks for launch in hook.launches]
            precompile_kernels(bound.all_jobs, bound.missing.device, further)
        self.bound = bound

    def _compare_again(self, groups: Sequence[dict]) -> None:
        """Run the collective comparisons that `check_plans` left for this step."""
        # The comparison waits on the host, which a capture forbids
        if capturing(device_of(groups)):
            return
        later, self._uncompared = self._uncompared, []
        for compare in later:
            compare()

    def adopt_state(self, groups: list[dict], state: dict) -> None:
        """Give the state of replaced parameters to the parameters in their place now."""
        # Without state no parameters are held: a model that is sharded next can free the old ones
        members = create.adopt_state(self._members, groups, state)
        self._members = members if state else ()

    def forget_members(self) -> None:
        """Forget which parameters the groups held: the state was replaced as a whole."""
        self._members = ()

    def follow_world(self, world: object, options: MuonConfig) -> None:
        """Drop plans and process groups: torch.distributed has another default group, `world`."""
        self.world = world
        self.process_groups = None
        self.drop_plans(options)

    def release_groups(self) -> None:
        """Give up the created process groups; the next plan creates or finds groups."""
        self.process_groups.release()
        self.process_groups = None

    def drop_plans(self, options: MuonConfig) -> None:
        """Drop plans and the bound step; the next step makes both anew. State stays."""
        self._plans = {False: [], True: []}
        self._plan_keys = {False: None, True: None}
        self._param_forms = None
        self._uncompared = []
        # Process groups are kept from plan to plan: new groups at each plan would pile up
        if self.process_groups is None:
            self.process_groups = ProcessGroups(dedicated=options.overlaps)
        if self.graphs is None:
            reasons = SCALARS_CHANGED, GRADIENTS_MOVED
            self.graphs, self.adamw_graphs = [
                Graphs(reason * options.capturable, not options.offload_state) for reason in reasons
            ]
        self.unbind()

    def unbind(self) -> None:
        """Drop the bound step; plans stay."""
        self.forget_memory()
        self.bound = BoundStep()
        self.place.drop()
        for graphs in (self.graphs, self.adamw_graphs):
            graphs.drop()

    def forget_memory(self) -> None:
        """Let the next step bind anew."""
        self._memory_key = None
        self.fingerprint = None


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
        options: MuonConfig | None = None,
        process_groups: ProcessGroups | None = None,
        graphs: tuple[Graphs, Graphs] | None = None,
        nonfinite: str = "propagate",
        hook: StepHook | None = None,
        groups: Sequence[dict] = (),
        own: Sequence[MuonConfig] = (),
        collects: bool = False,
        place: StatePlace | None = None,
    ) -> None:
        """`graphs`: (of `jobs`, of `adamw_jobs`). `nonfinite`: as in `Muon`. `hook`: the last of
        `hooks`, and told of written buckets. `groups`: live parameter groups. `own`: options of
        each group. `collects`: metrics are collected. `place`: of state. Raises RuntimeError for a
        parameter whose memory was freed.
        """
        self.jobs: list[Job] = []  # in the order of the pipeline
        # With capturable=True: AdamW where parameters are stored, in a CUDA graph of its own,
        # because gradient addresses are baked into it. Re-capturing it must not re-capture the
        # graph that holds collectives: other ranks would wait. Else empty.
        self.adamw_jobs: list[Job] = []
        self.nonfinite: NonfiniteFlags | None = None  # None: gradients are not checked
        device = local_of(plans[0].params[0]).device if plans else torch.device("cpu")
        buffers = InputBuffers(plans, flag_counts(plans), device)
        flags = None if nonfinite == "propagate" else FlagBuffers(plans, device)
        self.collects = collects
        place = place or StatePlace()
        place.begin(device)
        self.stores = make_stores(plans, state, buffers, flags, collects, place.store)
        self.counting = [group for group in groups if STEPS_KEY in group]
        # Made even without parameters on this rank: the check is collective, and further ranks may
        # have parameters
        if flags is not None:
            whole = nonfinite != "skip"
            self.nonfinite = NonfiniteFlags(flags, plans, self.stores, process_groups, whole)
        clip = None
        # Made even without parameters to step on this rank: the hook is collective
        if options is not None and options.qk_clip is not None:
            clip = HeadClipping(
                options.qk_clip,
                groups,
                self.stores,
                options,
                own,
                process_groups,
                self.nonfinite,
                device_of(groups),
            )
        written = _all_told(clip, hook)
        shared = options, process_groups, graphs, written, place
        jobs = _bind(plans, self.stores, *shared) if plans else []
        if clip is not None:
            clip.bind(jobs)
        self.missing = MissingGradients(plans, self.stores, process_groups, buffers.flags)
        # Work around the buckets of each step, in this order
        hooks = (place.hook(self.stores), self.nonfinite, self.missing, clip, hook)
        self.hooks: list[StepHook] = [hook for hook in hooks if hook is not None]
        early = len(jobs) if jobs and options.overlap_backward else 0
        self.inputs = StepInputs(buffers, self.stores, self.missing, early)
        for job in jobs:
            apart = options.capturable and isinstance(job[0], ElementwiseUpdate)
            (self.adamw_jobs if apart else self.jobs).append(job)

    @property
    def all_jobs(self) -> list[Job]:
        """All bucket updates with their groups."""
        return self.jobs + self.adamw_jobs

    @functools.cached_property
    def graphed_stores(self) -> list[Store]:
        """Stores of `jobs`: with capturable=True, those in the graph of the step."""
        apart = {id(update.store) for update, _ in self.adamw_jobs}
        return [store for store in self.stores if id(store) not in apart]


def _all_told(*hooks: StepHook | None) -> Callable[[BucketUpdate], None] | None:
    """A function that calls `bucket_written` of all hooks. None if the last hook is None, since
    only that hook (overlap_forward) needs to know at once.
    """
    if hooks[-1] is None:
        return None
    told = [hook.bucket_written for hook in hooks if hook is not None]

    def tell(update: BucketUpdate) -> None:
        for written in told:
            written(update)

    return told[0] if len(told) == 1 else tell


def _bind(
    plans: Sequence[Plan],
    stores: Sequence[Store],
    options: MuonConfig,
    process_groups: ProcessGroups,
    graphs: tuple[Graphs, Graphs],
    written: Callable[[BucketUpdate], None] | None,
    place: StatePlace,
) -> list[Job]:
    """Bind the updates of all plans, in the order of the pipeline. Buckets of all plans share a
    workspace. Arguments as in `BoundStep`.
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
    ranks = None
    for (store, group, bucket, rank_plan), number, name in zip(tasks, numbers, names):
        kind = BUCKET_UPDATES[bucket.route]
        # Between buckets of different ranks, see `Pause`
        if kind.travels and ranks not in (None, bucket.ranks) and not options.overlap_backward:
            jobs.append((Pause("Pause"), group))
        ranks = bucket.ranks if kind.travels else ranks
        inputs = BucketInputs(
            bucket=bucket,
            rank_plan=rank_plan,
            store=store,
            options=options,
            group=group,
            process_group=process_groups.get_or_create(bucket.ranks) if kind.travels else None,
            memory=workspace.views_for(number, rank_plan, name),
            buffer_index=number % workspace.buffer_count,
            graphs=bucket_graphs,
            label=_label(len(jobs) - skipped, bucket, store),
            written=written,
            stack_name=name,
        )
        jobs.append((place.update_of(bucket.route)(inputs), group))
    return jobs


def reserve(
    tasks: Sequence[BucketTask], options: MuonConfig, device: torch.device | None = None
) -> tuple[Workspace, list[int], list[str | None]]:
    """Return (workspace with the bytes of all buckets counted, number of each bucket in it, name of
    the memory of its stacks). Allocates nothing. `device`: None if no memory will be taken.
    """
    buffer_count, local_number = _buffer_counts([bucket for _, _, bucket, _ in tasks], options)
    # Buckets with all-to-alls use bucket buffers in turn; all local buckets use one buffer
    travels = [BUCKET_UPDATES[bucket.route].travels for _, _, bucket, _ in tasks]
    counts = itertools.accumulate(travels, initial=0)
    numbers = [count if one else local_number for count, one in zip(counts, travels)]
    limit = options.workspace_bytes
    for names in (_stacks_apart(tasks, options), [None] * len(tasks)):
        workspace = Workspace(buffer_count, device)
        for (_, _, _, rank_plan), number, name in zip(tasks, numbers, names):
            workspace.reserve(number, rank_plan, name)
        if limit is None or sum(workspace.sizes.values()) <= limit:
            break
    return workspace, numbers, names


def _stacks_apart(tasks: Sequence[BucketTask], options: MuonConfig) -> list[str | None]:
    """Name of the memory of each bucket's stacks; None: the shared scratch. With offload_state
    local buckets use two memories in turn: U of the next one is written during Newton-Schulz.
    """
    found: list[str | None] = [None] * len(tasks)
    # Not with a selection, which writes whole pieces to the shared scratch
    ahead = [
        number
        for number, (_, group, bucket, _) in enumerate(tasks)
        if bucket.route == "local" and selection_of(group) is None
    ]
    if options.offload_state and not options.overlap_backward and len(ahead) > 1:
        for turn, number in enumerate(ahead):
            found[number] = f"stacks {turn % 2}"
    return found


def sorted_buckets(
    plans: Sequence[Plan], stores: Sequence[Store | None], options: MuonConfig
) -> list[BucketTask]:
    """Buckets of all plans in the order of a step.

    By default buckets of equal ranks are adjacent. With overlap_forward, the first buckets of all
    families (route, ranks) come first among buckets of equal ranks, then the second buckets. With
    overlap_backward the first buckets of all families come first, and buckets without an inbound
    all-to-all last. Sort keys contain only facts known to all ranks of a bucket, so all ranks find
    a common order.
    """
    tasks = []
    for plan, store in zip(plans, stores):
        counts = Counter((b.route, b.ranks) for b, _ in plan.rank_plans or ())
        seen = Counter()
        for bucket, rank_plan in plan.rank_plans or ():
            family = bucket.route, bucket.ranks
            seen[family] += 1
            position = seen[family] / counts[family]  # in the family, up to 1
            by_ranks = bucket_sort_key(bucket.ranks)
            key = by_ranks, position * options.overlap_forward
            if options.overlap_backward:
                key = not rank_plan.crosses_inbound, position, by_ranks
            tasks.append((key, (store, plan.group, bucket, rank_plan)))
    return [task for _, task in sorted(tasks, key=lambda task: task[0])]


def _buffer_counts(buckets: Sequence[Bucket], options: MuonConfig) -> tuple[int, int]:
    """(number of bucket buffers, buffer of local buckets). Raises as `check_bucket_buffers`."""
    if not options.overlap_backward:
        # Buffer 1: buckets without all-to-alls run when only bucket 0 has started
        return BUCKETS_IN_FLIGHT, 1
    # During backward any number of buckets may be in flight, each with a buffer of its own. The
    # planner has checked shared buckets; this check includes buckets that this rank steps alone.
    check_bucket_buffers(buckets, options.workspace_bytes)
    travelling = sum(BUCKET_UPDATES[bucket.route].travels for bucket in buckets)
    return travelling + 1, travelling


def _label(number: int, bucket: Bucket, store: Store) -> str:
    """Name of a bucket in messages: the number in `plan_report`, route, first parameter, ranks."""
    first = store.names[bucket.matrices[0].param]
    ranks = f"{', '.join(map(str, bucket.ranks[:8]))}{', ...' if len(bucket.ranks) > 8 else ''}"
    return (
        f"bucket {number} ({bucket.route}; {len(bucket.matrices)} matrices, the first of "
        f"parameter {first}; ranks {ranks})"
    )

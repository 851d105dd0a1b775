"""Preparation of a step: plans before the first step, bound bucket updates after memory has moved.

`Preparation` owns the plans and the bound step of an optimizer, and decides when to make either
anew. `make_plans` is collective and rare: at the first step, and when parameters or placements
change. `BoundStep` binds the plans to this rank's memory without communication, whenever
parameters, state or the form of gradients move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from ...communication.plan_check import check_plans
from ...communication.process_groups import ProcessGroups, world_now
from ...kernels.backend import capturing
from ...params.config import MuonConfig
from ...params.dtensor import properties_of
from ...params.units import Split
from ...params.validation import check_changed_groups, device_of
from ...pipeline import precompile_kernels
from ...planning.planner import Plan, Planner, warn_of_idle
from ...rules.rule import matrix_keys
from ...state import checks, create
from ..cuda_graphs import Graphs, release_before_groups
from ..fingerprint import StepFingerprint, memory_key
from .known_plans import KnownPlans
from .select import GroupParams, select_params
from .state_place import StatePlace
from .step import BoundStep, StepSetup


def make_plans(
    parts: Sequence[GroupParams],
    state: dict,
    setup: StepSetup,
    process_groups: ProcessGroups,
    alone: bool,
    state_splits: Mapping[torch.Tensor, Split],
    known: KnownPlans,
) -> tuple[list[Plan], list[Callable[[], None]]]:
    """Plan all `parts`, check that all ranks have equal plans, and create or move state. `alone`:
    as in `select_params`. `state_splits`: `Preparation.state_splits`. `known`: plans of before.

    Return (plans, collective comparisons that `check_plans` leaves for the next step).
    Collective unless `alone`. Raises RuntimeError if ranks differ, or if state has another
    shape than its parameter, and what `KnownPlans.of` raises.
    """
    options = setup.compared
    planner = Planner(options, process_groups)
    if not alone:
        process_groups.find_existing(
            [p for part in parts for p in part.params],
            options.process_group,
            {group.process_group for group in setup.options_by_group} - {None},
        )
    plans = known.of(parts, planner, options)
    # Before ranks compare plans: a rank that raises can be repaired and step again, while the
    # remaining ranks wait in `check_plans`
    changed = create.without_stale_numbers(state_splits, _splits_of_plans(plans), state)
    checks.check_held_state(plans, {**state, **changed}, options.state_dtype)
    later = check_plans(plans, options, process_groups, state)
    # Only now: where ranks differ in a split, the user may restore the old one
    state.update(changed)
    create.prepare_state(plans, state, options)
    return plans, later


def _splits_of_plans(plans: Sequence[Plan]) -> dict[torch.Tensor, Split]:
    """Return {parameter: how it is cut into matrices} of plans."""
    return {p: plan.split(i) for plan in plans for i, p in enumerate(plan.params)}


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
    step; None if the next step has to look at everything. `state_splits`: {parameter: `Split` with
    which its state was made}, of state with numbers of whole matrices. Plans say it too, but a load
    drops them.
    """

    def __init__(self, options: MuonConfig, place: StatePlace) -> None:
        """Start without plans. `options`: of the optimizer. `place`: of state."""
        self.place = place
        self.bound = BoundStep()
        self.world: dist.ProcessGroup | None = None
        self._dedicated = options.overlaps  # argument of `ProcessGroups`
        self.process_groups = ProcessGroups(dedicated=self._dedicated)
        # Of buckets or of the whole step, and of `BoundStep.adamw_jobs`. The constructor checks
        # arguments later, and `capturable` may be an array
        self.graphs, self.adamw_graphs = [
            Graphs(reason if options.capturable is True else "", not options.offload_state)
            for reason in (SCALARS_CHANGED, GRADIENTS_MOVED)
        ]
        self.fingerprint: StepFingerprint | None = None
        # Each group's parameters at the last step
        self._members: Sequence[Sequence[torch.Tensor]] = ()
        # Argument `alone` of `select_params` -> plans
        self._plans: dict[bool, list[Plan]] = {False: [], True: []}
        self._plan_keys: dict[bool, list[tuple] | None] = {False: None, True: None}
        self._known = {False: KnownPlans(), True: KnownPlans()}  # outlive `_plans`
        self._memory_key: tuple | None = None  # of the bound step
        self._param_forms: list | None = None  # of all parameters in plans, at the last binding
        # Comparisons of gradients that `check_plans` left for the next step
        self._uncompared: list[Callable[[], None]] = []
        self.state_splits: dict[torch.Tensor, Split] = {}

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

    def prepare(self, setup: StepSetup, state: dict) -> None:
        """Plan if parameters or placements changed, bind if memory or the form of gradients did.
        Raises as `check_changed_groups`, `make_plans`, `memory_key` and `BoundStep`.
        """
        groups, options = setup.groups, setup.options
        self.place.wait()
        check_changed_groups(groups, setup.options_by_group)
        if None in self._plan_keys.values():
            warn_of_idle(groups)
        # Called without state too: this step creates the state
        self._members = self._adopted(groups, state)
        # Shared plans first: parameters that the process steps alone must not affect shared plans
        for alone in (False, True):
            parts, key = select_params(groups, options, setup.options_by_group, alone)
            lost = checks.is_state_missing(self._plans[alone], state, options.state_dtype)
            if key != self._plan_keys[alone] or lost:
                if setup.overlap is not None:
                    setup.overlap.before_state_moves(state)
                self._plans[alone], later = make_plans(
                    parts,
                    state,
                    setup,
                    self.process_groups,
                    alone,
                    self.state_splits,
                    self._known[alone],
                )
                self.keep_state_splits(_splits_of_plans(self._plans[alone]), state)
                self._uncompared += later
                self._plan_keys[alone] = key
                self._memory_key = self._param_forms = self.fingerprint = None
        plans = self._plans[False] + self._plans[True]
        params = [p for plan in plans for p in plan.params]
        self.place.pack(plans, state, groups)
        key = *memory_key(params, state, groups), setup.scaled, setup.collects
        if key != self._memory_key:
            forms = [properties_of(p) for p in params]
            self.forget_memory()  # if binding fails
            # A parameter was cast, or placed otherwise, in place: plan again
            if self._param_forms not in (None, forms):
                self.drop_plans()
                return self.prepare(setup, state)
            self._bind_plans(plans, state, setup)
            self._memory_key = key
            self._param_forms = forms
        # After planning, which may create state
        self.fingerprint = StepFingerprint(groups, state, setup.scaled, setup.collects)

    def _bind_plans(self, plans: list[Plan], state: dict, setup: StepSetup) -> None:
        """Replace `bound`. Raises as `BoundStep` and `check_capturable`."""
        device = device_of(setup.groups)
        self.bound.missing.wait()
        self.graphs.warn_once(PARAMETERS_CHANGED)
        for graphs in (self.graphs, self.adamw_graphs):
            graphs.begin(device)
        bound = BoundStep(
            plans,
            state,
            setup,
            self.process_groups,
            (self.graphs, self.adamw_graphs),
            self.place,
            self.bound.workspace,
        )
        if setup.options.capturable and self.graphs.on:
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
        members = self._adopted(groups, state)
        self._members = members if state else ()

    def _adopted(self, groups: list[dict], state: dict) -> list[list[torch.Tensor]]:
        """`create.adopt_state`, of `state_splits` too; known plans do not keep replaced parameters
        alive.
        """
        held = {p for group in groups for p in group["params"]}
        for known in self._known.values():
            known.keep_only(held)
        create.adopt_state(self._members, groups, self.state_splits)
        return create.adopt_state(self._members, groups, state)

    def keep_state_splits(self, splits: Mapping[torch.Tensor, Split], state: dict) -> None:
        """Add to `state_splits`; without parameters whose state has no number of a whole matrix."""
        keys = matrix_keys()
        self.state_splits = {
            param: split
            for param, split in {**self.state_splits, **splits}.items()
            if not keys.isdisjoint(state.get(param, ()))
        }

    def forget_members(self) -> None:
        """Forget which parameters the groups held: the state was replaced as a whole."""
        self._members = ()

    def follow_world(self, world: dist.ProcessGroup | None) -> None:
        """Drop plans and process groups: torch.distributed has another default group, `world`."""
        self.world = world
        self._known = {False: KnownPlans(), True: KnownPlans()}
        self.process_groups = ProcessGroups(dedicated=self._dedicated)
        self.drop_plans()

    def release_groups(self) -> None:
        """Give up the created process groups; the next plan creates or finds groups."""
        self.process_groups.release()
        self.process_groups = ProcessGroups(dedicated=self._dedicated)

    def drop_plans(self) -> None:
        """Drop plans and the bound step. The next step plans again, compares ranks, and binds anew;
        without a change it takes the plans of before (`KnownPlans`). State stays, and so do process
        groups: new groups at each plan would pile up.
        """
        self._plans = {False: [], True: []}
        self._plan_keys = {False: None, True: None}
        self._param_forms = None
        self._uncompared = []
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

"""The methods of the optimizers that save, load, copy and pickle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from .communication.matrix_owners import state as at_owners
from .communication.owner_state import Shared, state_for_checkpoint
from .execution.overlap.forward import ForwardOverlapMethods, waits_for_updates
from .params.checks.saved_function import without_functions
from .params.config import MuonConfig
from .params.dtensor import local_of
from .params.errors import names_in
from .params.own_process_groups import Choice
from .params.units import Split, splits_by_param
from .planning.plan import bucket_sort_key
from .rules import rule as rules
from .rules.muon import REST_KEY
from .state import checks, create
from .state.consolidated import check_target, consolidate
from .state.saved_forms import (
    called_by_checkpoint,
    on_one_device,
    with_own_storages,
    with_rule_names,
    without_splits,
)
from .state.state_dict import Loading
from .state.weights.split import (
    local_weights,
    master_weight,
    members_by_name,
    with_rests_as_bf16,
    write_parameter,
)


class StateDictMethods(ForwardOverlapMethods):
    """Base class: the methods that save, load, copy and pickle, on any layout."""

    @property
    def _is_inconsistent(self) -> bool:
        """Whether a step failed half-way: some weights and state are old, some new."""
        return self._half_way or self._backward_overlap.failed

    def _adopt_state(self) -> None:
        """Give the state of replaced parameters to the parameters in their place now."""
        self._preparation.adopt_state(self.param_groups, self.state)

    @contextlib.contextmanager
    def _showing(self, state: dict) -> Iterator[None]:
        """Context manager in which `self.state` is `state`, for torch's own methods."""
        held = self.state
        self.state = state
        try:
            yield
        finally:
            self.state = held

    @waits_for_updates
    def init_state(self) -> None:
        """Create missing state, as zeros, of every parameter that requires a gradient: for code
        that loads into existing state before the first step. No communication; call on all ranks,
        once the model is sharded. Raises RuntimeError if buckets have started during backward.
        """
        self._backward_overlap.raise_if_started("init_state")
        self._create_state()

    def _create_state(self, skips_wrong: bool = False) -> None:
        """Create missing state. `skips_wrong`: as in `create.complete_state`."""
        self._adopt_state()
        self._find_world()
        with create.outside_inference_mode():
            create.complete_state(
                self.param_groups, self.state, self._options_by_group(), skips_wrong
            )
        self._adopt_state()

    @waits_for_updates
    @torch.no_grad()
    def master_weights(self) -> dict[str, torch.Tensor]:
        """Copies of all weights: {name without prefixes of wrappers: weight}. In fp32 of weights
        that are split with master_weights="split16", else in the dtype of the parameter. DTensors
        have the placements of their parameters. No communication. Raises ValueError for parameters
        without a name.
        """
        self._adopt_state()
        members = members_by_name(self.param_groups)
        return {name: master_weight(p, group, self.state.get(p, {})) for name, p, group in members}

    @waits_for_updates
    @torch.no_grad()
    def load_master_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Write weights to all parameters, by name, and the bits beyond bf16 of weights that are
        split with master_weights="split16" to their state. Creates missing state (`init_state`).

        `weights`: whole tensors, or DTensors of any placements, such as an fp32 model's state_dict
        or the result of `master_weights`; further names are ignored. Collective if DTensors have
        other placements than the parameters. Raises ValueError, before any change, for a missing
        weight, another shape, and parameters without a name.
        """
        self._backward_overlap.raise_if_started("load_master_weights")
        self._adopt_state()
        members = list(members_by_name(self.param_groups))
        found = local_weights(members, weights)
        rests = [write_parameter(p, group, w) for (_, p, group), w in zip(members, found)]
        # Created after the weights are written: decay="initial" copies the weights into state
        self.init_state()
        for (_, param, _), rest in zip(members, rests):
            if rest is not None and param.requires_grad:
                local_of(self.state[param][REST_KEY]).copy_(rest)

    @waits_for_updates
    def state_dict(self) -> dict:
        """As in torch; for torch.distributed.checkpoint, missing state is created (`init_state`). A
        function as adjust_lr_fn is not saved: a load keeps the function of the optimizer.

        If owners keep state (shard_state, unreduced gradients), every rank of process_group must
        call, except after consolidate_state_dict: the result holds DTensors sharded by rows, which
        any layout can load. With state_at_owners=True every rank must call, too, and finds state
        placed like its parameters. Raises RuntimeError, before any communication, if a rank does
        not call.
        Warns after a step that failed half-way.
        """
        by_checkpoint = called_by_checkpoint()
        saved = with_rests_as_bf16(without_functions(self._saved(by_checkpoint)))
        if self._options.offload_state:
            saved = on_one_device(saved) if by_checkpoint else with_own_storages(saved)
        return with_rule_names(without_splits(saved)) if by_checkpoint else saved

    def _saved(self, by_checkpoint: bool) -> dict:
        """`state_dict` with all keys; raises as `state_dict`. `by_checkpoint`: for
        torch.distributed.checkpoint.
        """
        self._check_state()
        self._beta1.follow(self.param_groups)
        self._adopt_state()
        is_begun = self._is_inconsistent or self._backward_overlap.has_started
        creates = by_checkpoint and not is_begun
        if not self._owner_keeps_state:
            state = self._completed() if creates else self._with_missing_keys()
            if self._options.state_at_owners:
                state = at_owners.as_placed_dtensors(state, self.param_groups)
            with self._showing(state):
                return super().state_dict()
        named = self._named()
        # torch.distributed.checkpoint saves the parts of all ranks: a consolidated state is no help
        gathered = None if by_checkpoint else self._consolidated
        if gathered is not None:
            state = self._with_missing_keys()
            if gathered.is_current(named, self.state, state):
                with self._showing(gathered.whole_state(named, state)):
                    return gathered.mark(super().state_dict())
        self._find_world()
        complete = self._completed if creates else None
        state = self.state if creates else self._with_missing_keys()
        offloads = bool(self._options.offload_state)
        shown = state_for_checkpoint(state, named, self._shared(), complete, offloads)
        with self._showing(shown):
            return super().state_dict()

    def _with_missing_keys(self) -> dict:
        """`state` as the next step would begin from, after a live change of a group."""
        with create.outside_inference_mode():
            return create.with_missing_keys(
                self.param_groups,
                self.state,
                self._options_by_group(),
                self._preparation.state_splits,
            )

    def _completed(self) -> dict:
        """`_with_missing_keys` of created state, for torch.distributed.checkpoint."""
        self._create_state(skips_wrong=True)
        return self._with_missing_keys()

    @waits_for_updates
    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gather the state kept by owners (shard_state, unreduced gradients) in CPU memory of rank
        `to` of process_group, or of every rank (None): a single rank can then save all state. Does
        nothing if no owner keeps state.

        Collective over process_group; with several process groups, each in turn, `to` must be None.
        Until the next step, load_state_dict or add_param_group, `state_dict()` returns whole
        tensors on rank `to` without communication; on further ranks a state dict without state,
        which load_state_dict refuses. Raises ValueError if `to` is no rank of process_group;
        RuntimeError, before any communication, if ranks call differently.
        """
        if not self._owner_keeps_state:
            check_target(to, None)
            self._check_state()
            return
        self._find_world()
        self._adopt_state()
        shared = self._shared()
        named = self._named()
        is_common = len(shared) == 1 and len(shared[0][1]) == len(named)
        check_target(to, shared[0][0], is_common)
        self._check_state()
        self._consolidated = None  # an error must not leave an earlier result
        self._consolidated = consolidate(
            self.state, self._with_missing_keys(), named, shared, to
        )

    def _check_state(self) -> None:
        """Before state is read: warn after a step that failed half-way, raise RuntimeError if
        gradients were changed after they were sent (overlap_backward).
        """
        if not checks.warn_inconsistent(self._is_inconsistent):
            self._backward_overlap.raise_if_changed()

    def _keep_state_splits(self, known: Mapping[torch.Tensor, Split] | None = None) -> None:
        """Put the splits of the groups into `Preparation.state_splits`; those of `known` come
        first.
        """
        splits = splits_by_param(self.param_groups, skips_wrong=True)
        self._preparation.keep_state_splits({**splits, **(known or {})}, self.state)

    def _named(self) -> dict:
        """{parameter: name} of all groups."""
        return {p: name for group in self.param_groups for p, name in names_in(group).items()}

    def _options_by_group(self) -> list[MuonConfig]:
        """The options of each group: of the optimizer, with the group's own process_group."""
        return self._own_process_groups.options_of(self._options, len(self.param_groups))

    @property
    def _owner_keeps_state(self) -> bool:
        """Whether only owners keep the state of plain parameters of some group."""
        return any(own.owner_keeps_state for own in self._options_by_group())

    def _shared(self) -> list[Shared]:
        """The process groups whose owners keep state, with the members of each:
        large sets of ranks first, the order of all collectives of several sets.
        """
        found: dict[tuple, Shared] = {}
        for group, own in zip(self.param_groups, self._options_by_group()):
            if own.owner_keeps_state:
                ranks = tuple(dist.get_process_group_ranks(own.process_group))
                keys = create.gathered_keys(group, self.state, own.state_dtype)
                members = {p: (name, keys) for p, name in names_in(group).items()}
                found.setdefault(ranks, (own.process_group, {}))[1].update(members)
        return [found[ranks] for ranks in sorted(found, key=bucket_sort_key)]

    @waits_for_updates
    def load_state_dict(self, state_dict: Mapping) -> None:
        """As in torch, from any layout: tensors are redistributed, and cast to `state_dtype`.

        Options missing in the saved groups (of torch.optim.Muon or AdamW, or of an older version)
        keep their values. State is matched by name if all groups of both sides have equal
        `param_names`, in any group; else by position. Raises, before any change: ValueError for
        state of another shape or kind, or a DTensor with the shard of another rank; RuntimeError if
        ranks load DTensors together (gathered, or kept by owners) and some rank does not call in
        time, or if process_group was destroyed.
        """
        self._half_way = self._half_way or self._backward_overlap.has_started  # if loading fails
        self._backward_overlap.drop_started()
        self._find_world()
        hooked = Loading(self.param_groups, self._options_by_group()).hooked(self)
        with create.outside_inference_mode(), hooked:
            super().load_state_dict(state_dict)
        self._beta1.forget()
        self._init_groups()
        self._live_keys.accept(self.param_groups)
        self._half_way = False
        self._consolidated = None
        # Ranks may have started different numbers of buckets: their process groups are out of step
        if self._options.overlap_backward:
            self._preparation.release_groups()
        self._drop_plans()
        self._preparation.forget_members()
        self._adopt_state()
        self._keep_state_splits()
        self._why_unbound = "after load_state_dict(), which drops the plan"

    @waits_for_updates
    def __getstate__(self) -> dict:
        """As in torch, for copies and pickles; a process group is kept by name."""
        self._beta1.follow(self.param_groups)
        self._adopt_state()  # a copy does not know which parameters were replaced
        options = replace(
            self._options, process_group=getattr(self._options.process_group, "group_name", None)
        )
        own = self._own_process_groups.mapped(lambda choice: choice.process_group.group_name)
        saved = super().__getstate__()
        return {
            **(with_own_storages(saved) if self._options.offload_state else saved),
            "_options": options,
            "_own_process_groups": own,
            "_adamw": self._adamw,
            "_rule": self._rule,
            "_rounding": self._rounding,
            "_master_weights": self._master_weights,
            "_rule_options": self._rule_options,
            "_rule_origins": rules.origins(self.param_groups),
            "_skipped": self._skipped,
            "_half_way": self._is_inconsistent,
            "_is_world": self._is_world,
            "_timing": self._timing,
            "_collects": self._collects,
            "_cuts": self._preparation.state_splits,
        }

    def __setstate__(self, state: dict) -> None:
        """As in torch; plans and bound memory are not copied."""
        # torch calls this in load_state_dict, and for a copy, for which `__init__` has not run
        if "_itself" not in vars(self):
            self._start(state["_options"])
        rules.register_origins(state.pop("_rule_origins", {}))
        state_splits = state.pop("_cuts", {})
        super().__setstate__(state)
        if isinstance(self._options.process_group, str):
            group = dist.distributed_c10d._resolve_process_group(self._options.process_group)
            self._options = replace(self._options, process_group=group)
        self._own_process_groups = self._own_process_groups.mapped(_resolved)
        self._has_all_groups = True
        self._live_keys.accept(self.param_groups)
        if "_options" in state:  # a copy: torch also calls this to load a state dict
            self._beta1.adopt(self.param_groups)
            # Older pickles have none: their state is taken for that of their groups
            self._keep_state_splits(state_splits)
        self._drop_plans()
        self._why_unbound = "in a copy, or after unpickling"


def _resolved(choice: Choice) -> dist.ProcessGroup | None:
    """The process group of a choice, which a pickle keeps by name."""
    name = choice.process_group
    return dist.distributed_c10d._resolve_process_group(name) if isinstance(name, str) else name

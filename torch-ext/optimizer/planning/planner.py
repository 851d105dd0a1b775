"""Planner: parameter groups -> plans.

`Planner.plan` checks the parameters of a group, derives layouts and returns `Plan`s: layouts,
buckets, and the rank's part of each bucket. Ranks with common parameters call `Planner` together,
for equal groups in equal order. Planning sends nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from ..kernels.launch import precompile
from ..kernels.launch.tile_config import architecture
from ..newton_schulz import method
from ..newton_schulz.method import gain_side_by_side
from ..params.dtensor import gradient_dtype, is_dtensor, local_of, mismatched_placements
from ..params.errors import names_in, names_of, warn_caller
from ..params.layout import Layout, layout_of, ranks_of_group, row_chunks, this_rank
from ..params.units import NOT_VIEWABLE, WHOLE, Split, check_splits, is_viewable, splits_by_param
from ..params.validation import check_param
from ..pipeline import BUCKETS_IN_FLIGHT, UpdatedParams
from ..rules.elementwise import averages_of, is_8bit
from ..rules.muon import is_split
from ..rules.rule import (
    Rule,
    group_state_dtype,
    rule_of,
    selection_of,
    state_device_and_dtype,
    weight_dtype,
)
from .cost_model import CostModel, latency_bytes
from .memory_model import ChunkPlanInputs, PlanInputs
from .plan import (
    OWNER_STATE_ROUTES,
    Bucket,
    along_backward,
    along_forward,
    check_bucket_buffers,
    chunks_along_backward,
    chunks_along_forward,
    make_plan,
    on_several_ranks,
    plan_chunks,
)
from .rank_plan import Piece, RankPlan, chunk_rank_plan, rank_plan_of
from .selected_layout import SelectedLayout, select, select_state

if TYPE_CHECKING:
    from collections import Counter

    from ..kernels.elementwise.multi_tensor import Skip, Source
    from ..params.config import MuonConfig


@dataclass(frozen=True)
class Plan:
    """The plan of all matrices of Muon groups, or of AdamW parameters of equal dtypes."""

    # Live parameter groups that are planned together. Muon groups differ only in numbers that a
    # step reads on the device; AdamW groups in any number, since a step launches each by itself.
    groups: tuple[dict, ...]
    params: list[torch.Tensor]
    layouts: list[Layout]  # of each parameter
    # State key -> layout of the state of each parameter, for state that owners read
    state_layouts: dict[str, list[Layout]]
    # (bucket, part of this rank) of each bucket with this rank; None: AdamW where parameters are
    # stored
    rank_plans: list[tuple[Bucket, RankPlan]] | None
    # Indices of parameters whose step takes several ranks, which must agree on missing gradients
    on_several_ranks: frozenset[int]
    in_chunks: bool = False  # parameters are cut into rows of dim 0, see `plan_chunks`
    cost_model_key: str = ""  # digest of the times that owners were chosen by, see `CostModel.key`
    # State at owners: rows of state of each parameter (outer) on each rank of the group (inner).
    # None: state is placed like the parameter.
    state_rows: list[list[int]] | None = None
    # With state_at_owners: owners of the matrices of each parameter, row-major, -1 of matrices
    # without elements; () if the parameter's state is placed like the parameter. None: the state of
    # every parameter is placed like the parameter
    matrix_owners: list[tuple[int, ...]] | None = None
    # Index of a parameter -> placements of its gradient, where other than the parameter's. The only
    # field that changes: a `Store` adds gradients found later. A new `Store` of the plan must know
    # them: a rank whose gradient is missing takes part in the redistribution all the same.
    mismatched: dict[int, tuple] = field(default_factory=dict)
    # How each parameter is cut into matrices; None: each (R, C) is one matrix. `layouts` and
    # `state_layouts` are those of the matrices, see `Layout.as_matrices`.
    splits: list[Split] | None = None
    group_of: tuple[int, ...] = ()  # index of each parameter's group; () for one group
    # Ranks that hold copies of the plain parameters; None: plain parameters are this rank's alone
    process_group: dist.ProcessGroup | None = None
    # Kind of a piece -> layout of each parameter by which `rank_plans` were made; {} without a
    # selection
    selected: dict[str, list[SelectedLayout]] = field(default_factory=dict)

    @property
    def group(self) -> dict:
        """The first group, for options in which all groups are equal."""
        return self.groups[0]

    def group_at(self, number: int) -> dict:
        """Return the live parameter group of parameter `number`."""
        return self.groups[self.group_of[number]] if self.group_of else self.group

    @functools.cached_property
    def names(self) -> list[str]:
        """Name of each parameter, for messages."""
        return names_of(self.params, self.groups)

    def split(self, number: int) -> Split:
        """Return how parameter `number` is cut into matrices."""
        return WHOLE if self.splits is None else self.splits[number]

    def check_strides(self, number: int) -> None:
        """Raise NotImplementedError if the split of parameter `number` cannot view its strides on
        this rank.
        """
        param = self.params[number]
        if not is_viewable(self.split(number), param):
            refusal = NOT_VIEWABLE.format(tuple(local_of(param).stride()))
            shape = tuple(param.shape)
            raise NotImplementedError(f"parameter {self.names[number]} of shape {shape}: {refusal}")

    def compared_by(self, number: int) -> tuple[int, ...]:
        """Return the ranks that agree on whether parameter `number` has a gradient; () if the rank
        steps the parameter alone.
        """
        layout = self.layouts[number]
        return layout.ranks if number in self.on_several_ranks and len(layout.boxes) > 1 else ()


class StoreOfPlan(UpdatedParams, Protocol):
    """Weights, gradients and state of a plan on this rank, as modules between planning and
    execution use them. The class, with all explanations, is `Store` in execution/param_store.py.
    """

    rank: int  # global
    group_of: Sequence[int]  # index in `groups` of each parameter's group
    splits: Sequence[Split]
    gradients: Sequence[torch.Tensor]  # of this step, local; zeros where missing
    missing: frozenset[int]  # indices of parameters without a gradient in this step
    addresses: torch.Tensor | None  # int64, of `gradients`; None without Triton
    flag_offset: Mapping[int, int]  # parameter index -> index of its first non-finite flag

    def sources(self, pieces: Sequence[Piece]) -> list[Source]:
        """Position of each piece inside a gradient."""

    def skip(self, pieces: Sequence[Piece]) -> Skip | None:
        """Non-finite flags of pieces; None: gradients are not checked."""

    def all_of(self, number: int) -> list[torch.Tensor]:
        """Local tensors of a parameter: weight and all state."""

    def counts_of(self, number: int) -> list[torch.Tensor]:
        """State of a parameter that changes in a step with lr 0 and zero gradients."""

    def rest_of(self, number: int) -> torch.Tensor | None:
        """The local rest of a split weight; None for a weight that is not split."""

    def report_all_missing(self) -> None:
        """Count every gradient of this step as missing."""


class AllToAllBackends(Protocol):
    """What a planner asks about process groups. The class is `ProcessGroups` in
    communication/process_groups.py, which imports this folder.
    """

    def find_backends(
        self, params: list[torch.Tensor], process_group: dist.ProcessGroup | None
    ) -> None:
        """Collect the backends of the existing groups of `params`."""

    def can_send_once(self, device: torch.device) -> bool:
        """Whether an all-to-all can send a part of the send buffer to several ranks."""


class Planner:
    """Planner of the parameter groups of a step; carries loads from group to group."""

    def __init__(self, options: MuonConfig, process_groups: AllToAllBackends) -> None:
        """Start without loads."""
        self.options = options  # of the optimizer; in `plan`, of the groups that are planned
        self.process_groups = process_groups
        self.rank = this_rank()  # global rank
        self.loads: dict[frozenset[int], Counter] = {}  # see `make_plan`
        self.buckets: list[Bucket] = []  # of all groups so far, also of other ranks
        # Of the parameters that are planned, by `_find_hardware`
        self.device = torch.device("cpu")
        self.architecture = ""  # key of kernels/launch/tables
        self.rank_bytes = 0  # limit on the workspace of a rank
        self.sends_once = False  # all-to-alls can send one copy to several ranks

    def plan(
        self,
        groups: Sequence[dict],
        params: Sequence[torch.Tensor],
        group_of: Sequence[int],
        process_group: dist.ProcessGroup | None,
    ) -> list[Plan]:
        """Return the plans of the parameters of groups that are stepped together; raise ValueError
        or NotImplementedError for a parameter that cannot be stepped.

        `params`: parameters of the groups in this step, not empty. `group_of`: index of the group
        of each parameter. AdamW groups come alone unless owners keep state. `process_group`: ranks
        with copies of the plain parameters; None: plain parameters are this rank's alone.
        """
        group = groups[0]
        self.options = replace(self.options, process_group=process_group)
        names = [names_in(group) for group in groups]
        # Checked again after the constructor: since then a module may have been cast or sharded
        for p, number in zip(params, group_of):
            check_param(p, names[number][p], groups[number])
        for own, known in zip(groups, names):
            check_splits(own, known, strides=False)
        self._find_hardware(params, process_group)
        if group["use_muon"]:
            return [self._matrices(groups, params, group_of)]
        # Chunks of a plan share all-to-all buffers, so a plan has a single dtype. Without chunks
        # only fp64 parameters are apart, since AdamW takes lr for them from the host, in fp64, and
        # split weights and averages in 8 bits, which have state of their own
        by_dtype = {}
        for p, number in zip(params, group_of):
            key = (p.dtype == torch.float64,)
            if self.options.owner_keeps_state:
                key = p.dtype, gradient_dtype(p)
            key = *key, is_split(groups[number], p), is_8bit(groups[number], p)
            by_dtype.setdefault(key, []).append((p, number))
        if self.options.owner_keeps_state:
            return [self._chunks(groups, *zip(*part)) for part in by_dtype.values()]
        return [self._elementwise(group, [p for p, _ in part]) for part in by_dtype.values()]

    def hardware(
        self, params: Sequence[torch.Tensor], process_group: dist.ProcessGroup | None
    ) -> tuple:
        """Return what plans of the parameters depend on besides parameters and options: the rank,
        and what `_find_hardware` sets. Sets it, too.
        """
        self._find_hardware(params, process_group)
        return self.rank, self.device, self.architecture, self.rank_bytes, self.sends_once

    def _find_hardware(
        self, params: Sequence[torch.Tensor], process_group: dist.ProcessGroup | None
    ) -> None:
        """Set the device of the parameters and what plans depend on: the device's architecture and
        memory, and what its all-to-alls can do.
        """
        self.device = local_of(params[0]).device
        self.architecture = architecture(self.device.type, self.device.index)
        self.rank_bytes = self.options.workspace_limit_bytes(self.device)
        # Imports Triton in a thread, while ranks compare plans
        precompile.preload_compiler(self.device)
        self.process_groups.find_backends(params, process_group)
        self.sends_once = self.process_groups.can_send_once(self.device)

    def _cost_model(self, group: dict) -> CostModel:
        """Return the cost model of a Muon group on the device."""
        return CostModel.of(group, self.device)

    def _rank_plans(
        self, buckets: Sequence[Bucket], rank_plan: Callable[[Bucket, int], RankPlan]
    ) -> list[tuple[Bucket, RankPlan]]:
        """Return [(bucket, this rank's part)] of the buckets with this rank. `rank_plan`: returns
        the part of a bucket on a rank.
        """
        return [(b, rank_plan(b, self.rank)) for b in buckets if self.rank in b.ranks]

    def _matrices(
        self, groups: Sequence[dict], params: Sequence[torch.Tensor], group_of: Sequence[int]
    ) -> Plan:
        """Return the plan of Muon groups that are stepped together. Raises ValueError if a bucket
        exceeds `workspace_bytes`.
        """
        group = groups[0]
        splits = list(map(splits_by_param(groups).get, params))
        layouts = self._layouts(params, splits)
        rule = rule_of(group)
        stored_state = {s.key: self._layouts(params, splits, s.per) for s in rule.state}
        sent, of_state, selected = layouts, stored_state, {}
        selection = selection_of(group)
        if selection is not None:
            # Where owners keep the state, only owners can select: ranks then send whole pieces
            sent = select(layouts, selection, not self.options.owner_keeps_state)
            of_state = {s.key: select_state(stored_state[s.key], sent, s.per) for s in rule.state}
            selected = {"matrix": sent, **of_state}
        cost_model = self._cost_model(group)
        rank_bytes = self.rank_bytes
        inputs = self._plan_inputs(rule, cost_model, rank_bytes)
        buckets = make_plan(
            sent,
            cost_model,
            self.loads,
            inputs,
            rank_bytes=rank_bytes,
            plain=self._plain_route(),
            minimize_workspace=self.options.workspace_bytes is None,
            state_layouts=of_state,
        )
        latency = latency_bytes(self.architecture)
        if self.options.overlap_backward:
            buckets = along_backward(buckets, sent, cost_model, inputs, latency, of_state)
        elif self.options.overlap_forward:
            buckets = along_forward(
                buckets, sent, cost_model, inputs, latency, rank_bytes, of_state
            )
        self._check_workspace_bytes(buckets, "one matrix per rank")
        part_of = partial(rank_plan_of, layouts=sent, state_layouts=of_state, inputs=inputs)
        rank_plans = self._rank_plans(buckets, part_of)
        return Plan(
            groups=tuple(groups),
            params=params,
            layouts=layouts,
            state_layouts=stored_state,
            rank_plans=rank_plans,
            on_several_ranks=on_several_ranks(buckets, layouts),
            cost_model_key=cost_model.key,
            state_rows=self._state_rows(buckets, params),
            matrix_owners=self._matrix_owners(buckets, layouts) if rule.state else None,
            mismatched=mismatched_placements(params),
            splits=splits,
            group_of=tuple(group_of),
            process_group=self.options.process_group,
            selected=selected,
        )

    def _plan_inputs(self, rule: Rule, cost_model: CostModel, rank_bytes: int) -> PlanInputs:
        """Return the `PlanInputs` of a Muon group with `rule`."""
        products = method.products_dtype(self.options.ns_dtype, self.device)
        scattered = partial(method.supports_scattered_rows, steps=cost_model.steps)
        weight_bytes = weight_dtype(rule, self.options.wire_dtype).itemsize
        return PlanInputs(
            element=self.options.wire_dtype.itemsize,
            state={s.key: s.per for s in rule.state},
            sends=tuple(rule.sends.items()),
            weight=weight_bytes if rule.reads_weight else 0,
            once=self.sends_once,
            scratch=partial(method.scratch_bytes, steps=cost_model.steps, dtype=products),
            supports_scattered_rows=scattered if rule.takes_scattered_rows else None,
            side_by_side=gain_side_by_side,
            # With overlap_backward every bucket has a buffer of its own: extra bytes count for each
            rank_bytes=None if self.options.overlap_backward else rank_bytes,
            state_at_owners=self.options.state_at_owners,
        )

    def _state_rows(
        self, buckets: Sequence[Bucket], params: Sequence[torch.Tensor]
    ) -> list[list[int]] | None:
        """Return `Plan.state_rows` of a Muon group: all rows at the owner, none elsewhere; None if
        state is not at owners.
        """
        if self._plain_route() not in OWNER_STATE_ROUTES:
            return None
        owners = {
            m.param: o
            for b in buckets
            if b.route in OWNER_STATE_ROUTES
            for m, o in zip(b.matrices, b.owners)
        }
        return [
            [p.shape[0] * (owners.get(i, self.rank) == rank) for rank in self._ranks()]
            for i, p in enumerate(params)
        ]

    def _matrix_owners(
        self, buckets: Sequence[Bucket], layouts: Sequence[Layout]
    ) -> list[tuple[int, ...]] | None:
        """Return `Plan.matrix_owners` of a Muon group."""
        if not self.options.state_at_owners:
            return None
        owner_of = {
            (m.param, m.at, m.unit): owner
            for b in buckets
            for m, owner in zip(b.matrices, b.owners)
        }
        return [
            ()
            if layout.plain
            else tuple(owner_of.get((i, *number), -1) for number in layout.matrices)
            for i, layout in enumerate(layouts)
        ]

    def _plain_route(self) -> str:
        """Return the route of plain parameters on several ranks, see [Note: routes]."""
        if not self.options.owner_keeps_state:
            return "exchange"
        return "own" if self.options.grads_are_reduced else "reduce"

    def _ranks(self) -> tuple[int, ...]:
        """Return the global ranks of the user's process group; this rank alone without a group."""
        process_group = self.options.process_group
        return (self.rank,) if process_group is None else ranks_of_group(process_group)

    def _elementwise(self, group: dict, params: Sequence[torch.Tensor]) -> Plan:
        """Return the plan of AdamW parameters without buckets: every rank steps what is stored."""
        return Plan(
            groups=(group,),
            params=params,
            layouts=self._layouts(params, [WHOLE] * len(params)),
            state_layouts={},
            rank_plans=None,
            on_several_ranks=frozenset(range(len(params))),
            mismatched=mismatched_placements(params),
            process_group=self.options.process_group,
        )

    def _chunks(
        self, groups: Sequence[dict], params: Sequence[torch.Tensor], group_of: Sequence[int]
    ) -> Plan:
        """Return the plan of AdamW parameters with state at owners, all of one dtype. Raises
        ValueError if a bucket exceeds `workspace_bytes`.
        """
        ranks, layouts = self._ranks(), self._layouts(params, [WHOLE] * len(params))
        shapes = [(p.shape[0], math.prod(p.shape[1:])) if p.ndim else (1, 1) for p in params]
        dtype = group_state_dtype(groups[0], self.options.state_dtype)
        # In 8 bits the two averages take a byte per element each, and their scales, of at most two
        # blocks for 65 columns, less than a byte each
        averages = averages_of(groups[group_of[0]], params[0])
        state_dtype = state_device_and_dtype(averages[0], params[0], dtype)[1]
        # Split weights are sent as fp32 weights, joined from both halves
        splits_weights = is_split(groups[group_of[0]], params[0])
        inputs = ChunkPlanInputs(
            gradient=gradient_dtype(params[0]).itemsize,
            weight=(torch.float32 if splits_weights else params[0].dtype).itemsize,
            state=state_dtype.itemsize,
            once=self.sends_once,
            reduced=self.options.grads_are_reduced,
            averages=len(averages),
        )
        latency = latency_bytes(self.architecture)
        if self.options.overlap_backward:
            buckets = chunks_along_backward(shapes, ranks, inputs, latency)
        elif self.options.overlap_forward:
            buckets = chunks_along_forward(shapes, ranks, inputs, latency, self.rank_bytes)
        else:
            buckets = plan_chunks(shapes, ranks, self.rank_bytes, inputs)
        self._check_workspace_bytes(buckets, "one row of a parameter per rank")
        state_rows = [row_chunks(rows, len(ranks)) for rows, _ in shapes]
        rank_plans = self._rank_plans(
            buckets, lambda bucket, rank: chunk_rank_plan(bucket, shapes, rank, inputs)
        )
        return Plan(
            groups=tuple(groups),
            params=list(params),
            layouts=layouts,
            state_layouts={},
            rank_plans=rank_plans,
            on_several_ranks=frozenset(range(len(params))),
            in_chunks=True,
            state_rows=state_rows,
            group_of=tuple(group_of),
            process_group=self.options.process_group,
        )

    def _layouts(
        self, params: Sequence[torch.Tensor], splits: Sequence[Split], per: str = ""
    ) -> list[Layout]:
        """Return the layout of each parameter's matrices, or of its state with a number for each
        `per`, see `Split.state_shape`.

        Parameters of equal shape, mesh, placements and split share a Layout object.
        """
        # A Layout has a box for every rank, so thousands of equal layouts would be slow; make_plan
        # and MemoryModel cache their results by the id of a layout
        known = {}
        keys = [
            (p.shape, split, p.device_mesh, p.placements) if is_dtensor(p) else (p.shape, split)
            for p, split in zip(params, splits)
        ]
        for key, p, split in zip(keys, params, splits):
            if key not in known:
                shape = split.state_shape(p.shape, per) if per else None
                layout = self._layout(p, shape)
                known[key] = layout.as_matrices(split, tuple(p.shape) if per else None, per)
        return [known[key] for key in keys]

    def _layout(self, param: torch.Tensor, shape: tuple[int, ...] | None) -> Layout:
        """Return the layout of a parameter, or of a tensor of `shape` placed like it."""
        return layout_of(param, self.options.process_group, shape)

    def check_bucket_buffers(self) -> None:
        """Raise ValueError if the buckets of all groups exceed `workspace_bytes` with
        overlap_backward; to be called after the last group.
        """
        # Buckets of other ranks count, too: all ranks raise together, or the ranks without an error
        # would wait for the rest in the plan check
        if self.options.overlap_backward:
            check_bucket_buffers(self.buckets, self.options.workspace_bytes)

    def _check_workspace_bytes(self, buckets: Sequence[Bucket], least: str) -> None:
        """Append to `self.buckets`; raise ValueError if a bucket exceeds `workspace_bytes`.

        `least`: content of the smallest possible bucket, for the message.
        """
        # make_plan and plan_chunks exceed the limit only with the smallest possible bucket
        self.buckets += buckets
        given = self.options.workspace_bytes
        needed = max((b.nbytes for b in buckets), default=0)
        if given is not None and needed > given and not self.options.overlap_backward:
            raise ValueError(
                f"workspace_bytes={given} is too small: with {least}, {BUCKETS_IN_FLIGHT} buckets "
                f"at a time, it takes {needed} bytes; pass at least that, or None"
            )


def warn_of_idle(groups: list[dict]) -> None:
    """Warn of an optimizer with parameters other than the model's: at the first step no parameter
    has a gradient on the rank, or a parameter is on the meta device.

    In both cases the optimizers of torch silently step nothing. Typical cause: the optimizer was
    built before `to_empty` or `fully_shard`.
    """
    entries = [entry for group in groups for entry in names_in(group).items()]
    entries = [(p, name) for p, name in entries if p.requires_grad]
    on_meta = [name for p, name in entries if p.device.type == "meta"]
    cause = (
        "the optimizer was built before the model got the parameters that it has now (by "
        "to_empty(), fully_shard() or a new layer): build it after that"
    )
    if on_meta:
        warn_caller(
            f"parameter {on_meta[0]} is on the meta device, where a step changes nothing. "
            f"If the model is elsewhere, {cause}"
        )
    elif entries and all(p.grad is None for p, _ in entries):
        warn_caller(
            f"this step finds a gradient at none of {len(entries)} parameters, the first "
            f"of which is {entries[0][1]}. If there was a backward, {cause}"
        )

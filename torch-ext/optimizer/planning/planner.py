"""`Planner`: parameter groups to plans. Ranks that share parameters call it together, for the same
groups in the same order.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from ..kernels.launch import precompile
from ..kernels.launch.tile_config import architecture
from ..newton_schulz import method
from ..newton_schulz.method import gain_side_by_side
from ..params.dtensor import gradient_dtype, is_dtensor, local_of, mismatched_placements
from ..params.errors import names_in
from ..params.layout import check_row_state, layout_of, row_chunks, this_rank
from ..params.validation import check_param
from ..pipeline import SLOTS
from ..rules.rule import state_device_and_dtype
from .cost_model import CostModel, latency_bytes
from .memory_model import ChunkPlanInputs, PlanInputs
from .plan import (
    OWNER_STATE_KINDS,
    along_backward,
    along_forward,
    check_slots,
    chunks_along_backward,
    chunks_along_forward,
    make_plan,
    plan_chunks,
)
from .rank_plan import chunk_share, share_of


@dataclass(frozen=True)
class Plan:
    """One group's parameters of one kind, where they and their row state live, and what this rank
    has of each bucket.

    `shares`: None if all of it is stepped elementwise where it is stored; `shared`: the numbers of
    the parameters for which ranks must act alike; `in_chunks`: whether they are cut into rows of
    dim 0; `pace`: a digest of the times by which owners were chosen; `kept`: how many rows of each
    parameter's state each rank keeps, None: as it is stored; `strays`: number of a parameter ->
    placements of its gradients, where those are not the parameter's.
    """

    group: dict
    params: list
    layouts: list
    row_layouts: list | None
    shares: list | None
    shared: frozenset
    in_chunks: bool = False
    pace: str = ""
    kept: list | None = None
    strays: dict = field(default_factory=dict)

    def compared_by(self, number) -> tuple:
        """The ranks that tell each other of a parameter's gradients; () if no other rank has to
        know.
        """
        layout = self.layouts[number]
        return layout.ranks if number in self.shared and len(layout.boxes) > 1 else ()


class Planner:
    """Plans the groups of one step.

    Ranks that share parameters call it together, for the same groups in the same order; nothing of
    state travels.
    """

    def __init__(self, options, process_groups):
        self.options, self.process_groups, self.rank, self.loads = (
            options,
            process_groups,
            this_rank(),
            {},
        )
        self.process_group, self.buckets = options.process_group, []

    def plan(self, group, params) -> list[Plan]:
        """The plans of one group."""
        names = names_in(group)
        for p in params:  # since they were checked, a module may have been cast or cut
            check_param(p, names[p], group["use_muon"])
            if "beta2" in group and group["use_muon"]:
                check_row_state(p, names[p])
        self.device = local_of(params[0]).device
        self.latency = latency_bytes(architecture(self.device.type, self.device.index))
        precompile.begin(self.device)
        self.process_groups.expect(params, self.process_group)
        if group["use_muon"]:
            return [self._matrices(group, params)]
        kinds = {}
        for p in params:
            kind = (
                (p.dtype, gradient_dtype(p))
                if self.options.owner_keeps_state
                else p.dtype == torch.float64
            )
            kinds.setdefault(kind, []).append(p)
        return [
            (self._chunks if self.options.owner_keeps_state else self._elementwise)(group, part)
            for part in kinds.values()
        ]

    def _matrices(self, group, params):
        layouts, wire = self._layouts(params), self.options.wire_dtype
        rows = self._layouts(params, of_rows=True) if "beta2" in group else None
        pace = CostModel.of(group, self.device)
        products = method.products_dtype(self.options.ns_dtype, self.device)
        room = self.options.workspace(self.device)
        terms = PlanInputs(
            wire.itemsize,
            4 if rows else 0,
            self.process_groups.send_once(self.device),
            partial(method.scratch_bytes, steps=pace.steps, dtype=products),
            partial(method.supports_scattered_rows, steps=pace.steps),
            gain_side_by_side,
            room=None if self.options.overlap_backward else room,
        )
        buckets = make_plan(
            layouts,
            pace,
            self.loads,
            terms,
            rank_bytes=room,
            plain=self._plain_kind(),
            minimize_workspace=self.options.workspace_bytes is None,
        )
        if self.options.overlap_backward:
            buckets = along_backward(buckets, layouts, pace, terms, self.latency)
        elif self.options.overlap_forward:
            buckets = along_forward(buckets, layouts, pace, terms, self.latency, room)
        self._check_room(buckets, "one matrix per rank")
        owners = {
            m.param: o
            for b in buckets
            if b.route in OWNER_STATE_KINDS
            for m, o in zip(b.matrices, b.owners)
        }
        kept = [
            [p.shape[0] * (owners.get(i, self.rank) == rank) for rank in self._ranks()]
            for i, p in enumerate(params)
        ]
        shares = [
            (b, share_of(b, self.rank, layouts, rows, terms))
            for b in buckets
            if self.rank in b.ranks
        ]
        travelling = frozenset(m.param for b in buckets if b.route != "local" for m in b.matrices)
        return Plan(
            group,
            params,
            layouts,
            rows,
            shares,
            travelling,
            pace=pace.key,
            kept=kept if self._plain_kind() in OWNER_STATE_KINDS else None,
            strays=mismatched_placements(params),
        )

    def _plain_kind(self) -> str:
        """The kind of buckets whose parameters every rank stores whole."""
        if not self.options.grads_are_reduced:
            return "reduce"
        return "own" if self.options.shard_state else "exchange"

    def _ranks(self) -> tuple:
        return (
            (self.rank,)
            if self.process_group is None
            else tuple(dist.get_process_group_ranks(self.process_group))
        )

    def _elementwise(self, group, params):
        return Plan(
            group,
            params,
            self._layouts(params),
            None,
            None,
            frozenset(range(len(params))),
            strays=mismatched_placements(params),
        )

    def _chunks(self, group, params):
        ranks, layouts = self._ranks(), self._layouts(params)
        shapes = [(p.shape[0], math.prod(p.shape[1:])) if p.ndim else (1, 1) for p in params]
        state = state_device_and_dtype("exp_avg", params[0], self.options.state_dtype)[1]
        terms = ChunkPlanInputs(
            gradient_dtype(params[0]).itemsize,
            params[0].dtype.itemsize,
            state.itemsize,
            self.process_groups.send_once(self.device),
            self.options.grads_are_reduced,
        )
        room = self.options.workspace(self.device)
        if self.options.overlap_backward:
            buckets = chunks_along_backward(shapes, ranks, terms, self.latency)
        elif self.options.overlap_forward:
            buckets = chunks_along_forward(shapes, ranks, terms, self.latency, room)
        else:
            buckets = plan_chunks(shapes, ranks, room, terms)
        self._check_room(buckets, "one row of a parameter per rank")
        kept = [row_chunks(rows, len(ranks)) for rows, _ in shapes]
        shares = [(b, chunk_share(b, shapes, self.rank, terms)) for b in buckets]
        return Plan(
            group,
            params,
            layouts,
            None,
            shares,
            frozenset(range(len(params))),
            in_chunks=True,
            kept=kept,
        )

    def _layouts(self, params, of_rows=False) -> list:
        """The layout of each parameter, or of its row state; those of one shape, mesh and placement
        share it.
        """
        known = {}
        keys = [
            (p.shape, p.device_mesh, p.placements) if is_dtensor(p) else (p.shape,) for p in params
        ]
        for key, p in zip(keys, params):
            if key not in known:
                known[key] = layout_of(
                    p, self.process_group, (*p.shape[:-1], 1) if of_rows else None
                )
        return [known[key] for key in keys]

    def check_slots(self) -> None:
        """After all groups: all ranks raise alike, since this looks at other ranks' buckets too."""
        if self.options.overlap_backward:
            check_slots(self.buckets, self.options.workspace_bytes)

    def _check_room(self, buckets, least) -> None:
        """A bucket that takes more than its part of the workspace holds no more than it must."""
        self.buckets += buckets
        given, needed = self.options.workspace_bytes, max((b.nbytes for b in buckets), default=0)
        if given is not None and needed > given and not self.options.overlap_backward:
            raise ValueError(
                f"workspace_bytes={given} is too small: with {least}, {SLOTS} buckets at a time, "
                "it takes "
                f"{needed} bytes; pass at least that, or None"
            )


def warn_of_idle(groups: list) -> None:
    """Warn of an optimizer whose parameters are not those of the model: at its first step none of
    them has a gradient at this rank, or one is on the meta device. torch's optimizers step nothing
    then, without a word.
    """
    entries = [entry for group in groups for entry in names_in(group).items()]
    entries = [(p, name) for p, name in entries if p.requires_grad]
    on_meta = [name for p, name in entries if p.device.type == "meta"]
    cause = (
        "the optimizer was built before the model got the parameters that it has now (by "
        "to_empty(), fully_shard() or a new layer): build it after that"
    )
    if on_meta:
        warnings.warn(
            f"parameter {on_meta[0]} is on the meta device, where a step changes "
            f"nothing. If the model is elsewhere, {cause}",
            stacklevel=2,
        )
    elif entries and all(p.grad is None for p, _ in entries):
        warnings.warn(
            f"this step finds a gradient at none of {len(entries)} parameters, the first "
            f"of which is {entries[0][1]}. If there was a backward, {cause}",
            stacklevel=2,
        )

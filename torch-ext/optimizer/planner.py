"""From parameter groups to plans: who plans what together, before the first step and after a change.

Decides what several ranks plan together, and what a plan rests on. Knows no optimizer; what a plan says (plan.py) it
only passes on.
"""
from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from . import polar
from .agree import agree
from .change import gradient_dtype
from .freight import ChunkTerms, Terms
from .iteration import gain_side_by_side
from .kernels import ahead
from .kernels.tiles import architecture
from .layout import (
    check_row_state,
    is_dtensor,
    layout_of,
    local_of,
    row_chunks,
    strays_of,
    this_rank,
)
from .names import name_in, names_in
from .pace import Pace, latency_bytes
from .pipeline import SLOTS
from .plan import (
    ROUTES_OF_OWNERS,
    along_backward,
    along_forward,
    check_slots,
    chunks_along_backward,
    chunks_along_forward,
    make_plan,
    plan_chunks,
)
from .settle import check_state, settle_state
from .share import chunk_share, share_of
from .store import home_of
from .validation import check_param


@dataclass(frozen=True)
class Plan:
    """One group's parameters of one kind, where they and their row state live, and what this rank has of each bucket.

    `shares`: None if all of it is stepped elementwise where it is stored; `shared`: the numbers of the parameters for
    which ranks must act alike; `in_chunks`: whether they are cut into rows of dim 0; `pace`: a digest of the times by
    which owners were chosen; `kept`: how many rows of each parameter's state each rank keeps, None: as it is stored;
    `strays`: number of a parameter -> placements of its gradients, where those are not the parameter's.
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
        """The ranks that tell each other of a parameter's gradients; () if no other rank has to know."""
        layout = self.layouts[number]
        return layout.ranks if number in self.shared and len(layout.boxes) > 1 else ()


class Planner:
    """Plans the groups of one step.

    Ranks that share parameters call it together, for the same groups in the same order; nothing of state travels.
    """

    def __init__(self, options, process_groups):
        self.options, self.process_groups, self.rank, self.loads = options, process_groups, this_rank(), {}
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
        ahead.begin(self.device)
        self.process_groups.expect(params, self.process_group)
        if group["use_muon"]:
            return [self._matrices(group, params)]
        kinds = {}
        for p in params:
            kind = (p.dtype, gradient_dtype(p)) if self.options.owner_keeps_state else p.dtype == torch.float64
            kinds.setdefault(kind, []).append(p)
        return [(self._chunks if self.options.owner_keeps_state else self._elementwise)(group, part)
                for part in kinds.values()]

    def _matrices(self, group, params):
        layouts, wire = self._layouts(params), self.options.wire_dtype
        rows = self._layouts(params, of_rows=True) if "beta2" in group else None
        pace = Pace.of(group, self.device)
        products = polar.products_dtype(self.options.ns_dtype, self.device)
        room = self.options.workspace(self.device)
        terms = Terms(wire.itemsize, 4 if rows else 0, self.process_groups.send_once(self.device),
                      partial(polar.scratch, steps=pace.steps, dtype=products), partial(polar.splits, steps=pace.steps),
                      gain_side_by_side, room=None if self.options.overlap_backward else room)
        plain = "reduce" if not self.options.grads_are_reduced else "own" if self.options.shard_state else "exchange"
        buckets = make_plan(layouts, pace, self.loads, terms, rank_bytes=room, plain=plain,
                            thrifty=self.options.workspace_bytes is None)
        if self.options.overlap_backward:
            buckets = along_backward(buckets, layouts, pace, terms, self.latency)
        elif self.options.overlap_forward:
            buckets = along_forward(buckets, layouts, pace, terms, self.latency, room)
        self._check_room(buckets, "one matrix per rank")
        owners = {m.param: o for b in buckets if b.route in ROUTES_OF_OWNERS for m, o in zip(b.matrices, b.owners)}
        kept = [[p.shape[0] * (owners.get(i, self.rank) == rank) for rank in self._ranks()]
                for i, p in enumerate(params)]
        shares = [(b, share_of(b, self.rank, layouts, rows, terms)) for b in buckets if self.rank in b.ranks]
        travelling = frozenset(m.param for b in buckets if b.route != "local" for m in b.matrices)
        return Plan(group, params, layouts, rows, shares, travelling, pace=pace.key,
                    kept=kept if plain in ROUTES_OF_OWNERS else None, strays=strays_of(params))

    def _ranks(self) -> tuple:
        return (self.rank,) if self.process_group is None else tuple(dist.get_process_group_ranks(self.process_group))

    def _elementwise(self, group, params):
        return Plan(group, params, self._layouts(params), None, None, frozenset(range(len(params))),
                    strays=strays_of(params))

    def _chunks(self, group, params):
        ranks, layouts = self._ranks(), self._layouts(params)
        shapes = [(p.shape[0], math.prod(p.shape[1:])) if p.ndim else (1, 1) for p in params]
        state = home_of("exp_avg", params[0], self.options.state_dtype)[1]
        terms = ChunkTerms(gradient_dtype(params[0]).itemsize, params[0].dtype.itemsize, state.itemsize,
                           self.process_groups.send_once(self.device), self.options.grads_are_reduced)
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
        return Plan(group, params, layouts, None, shares, frozenset(range(len(params))), in_chunks=True, kept=kept)

    def _layouts(self, params, of_rows=False) -> list:
        """The layout of each parameter, or of its row state; those of one shape, mesh and placement share it."""
        known = {}
        keys = [(p.shape, p.device_mesh, p.placements) if is_dtensor(p) else (p.shape,) for p in params]
        for key, p in zip(keys, params):
            if key not in known:
                known[key] = layout_of(p, self.process_group, (*p.shape[:-1], 1) if of_rows else None)
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
            raise ValueError(f"workspace_bytes={given} is too small: with {least}, {SLOTS} buckets at a time, it takes "
                             f"{needed} bytes; pass at least that, or None")


def stepped(groups, options, alone) -> tuple[list, list]:
    """([(group, its parameters of a step)], what plans of them rest on), of those that this process takes alone, or
    with other ranks.

    Where ranks must act alike, those that want a gradient are; alone those that have one, as in torch. A step that
    began during backward cannot plan: with overlap_backward both are, and Presence leaves alone what has no gradient.
    """
    shared, units = options.process_group is not None, []
    for group in groups:
        params = [p for p in group["params"] if (not shared and not is_dtensor(p)) == alone]
        wanted = not alone or options.overlap_backward
        units.append((group, [p for p in params if wanted and p.requires_grad or alone and p.grad is not None]))
        for p in params if not alone else ():
            if p.grad is not None and not p.requires_grad:
                warnings.warn(f"parameter {name_in(group, p)} has a gradient but requires_grad=False: it is left "
                              "alone, for other ranks cannot know; to have it stepped, call requires_grad_() on it",
                              stacklevel=2)
    units = [(group, params) for group, params in units if params]
    return units, [_rests_on(*unit, options.ns_dtype) for unit in units]


def warn_of_idle(groups: list) -> None:
    """Warn of an optimizer whose parameters are not those of the model: at its first step none of
    them has a gradient at this rank, or one is on the meta device. torch's optimizers step nothing
    then, without a word.
    """
    entries = [entry for group in groups for entry in names_in(group).items()]
    entries = [(p, name) for p, name in entries if p.requires_grad]
    on_meta = [name for p, name in entries if p.device.type == "meta"]
    cause = ("the optimizer was built before the model got the parameters that it has now (by "
             "to_empty(), fully_shard() or a new layer): build it after that")
    if on_meta:
        warnings.warn(f"parameter {on_meta[0]} is on the meta device, where a step changes "
                      f"nothing. If the model is elsewhere, {cause}", stacklevel=2)
    elif entries and all(p.grad is None for p, _ in entries):
        warnings.warn(f"this step finds a gradient at none of {len(entries)} parameters, the first "
                      f"of which is {entries[0][1]}. If there was a backward, {cause}",
                      stacklevel=2)


def _rests_on(group, params, dtype) -> tuple:
    """The group itself, which routes read (a plan keeps it, so no other has its id); of coefficients only memory."""
    steps = polar.steps_of(group["ns_coefficients"], group["ns_steps"]) if group["use_muon"] else None
    shapes = {p.shape[-2:] for p in params if p.ndim > 1}  # one that has lost its dims is refused when it is planned
    dtype = polar.products_dtype(dtype, params[0].device)
    forms = steps and {(shape, polar.scratch(*shape, steps, dtype), polar.splits(*shape, steps)) for shape in shapes}
    return id(group), group["use_muon"], group["adjust_lr_fn"], forms, tuple(map(id, params))


def planned(units, state, options, process_groups, alone) -> list[Plan]:
    """The plans of a step's parameters, after all ranks have agreed on them, and their state. Collective."""
    planner = Planner(options, process_groups)
    if not alone:
        process_groups.learn([p for _, params in units for p in params], planner.process_group)
    plans = [plan for unit in units for plan in planner.plan(*unit)]
    planner.check_slots()
    check_state(plans, state)
    agree(plans, options, process_groups)
    settle_state(plans, state, options)
    return plans

"""NaN and Inf flags of gradients, agreed across ranks: a flag per matrix (AdamW: per parameter).

`FlagBuffers`: the flags on the device. `NonfiniteFlags`: checks gradients and shares flags.
`Unscaling`: whether `step` or a torch.amp.GradScaler handles Inf. Flags stay on the device; kernels
read flags at run time. Only nonfinite="raise" makes the host wait, at the end of the step.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from operator import attrgetter, is_, is_not, itemgetter

import torch
import torch.distributed as dist

from ..kernels.elementwise.nonfinite_check import NonfiniteCheck
from ..params import errors
from ..params.config import MuonConfig
from ..params.dtensor import is_dtensor, raw_locals
from ..params.errors import first_few, name_in, warn_caller
from ..params.layout import sharded_among
from ..params.units import box_shape
from ..pipeline import StepHook
from ..planning.plan import Matrix, bucket_sort_key
from ..planning.planner import Plan, StoreOfPlan
from ..planning.rank_plan import Piece
from .process_groups import ProcessGroups


class FlagBuffers:
    """A flag on the device for each matrix (AdamW: parameter) of all plans.

    `flags`: fp32 (count,), 1 if a gradient is not finite. `flag_offset`: for each plan, {parameter
    index: index of the parameter's first flag}. `segments`: ranks -> slice of the flags shared by
    the ranks. `flag_params`: [(index of first flag, plan, parameter index)].
    """

    def __init__(self, plans: Sequence[Plan], device: torch.device) -> None:
        """Lay out the flags of all plans by set of ranks and fill with 0."""
        members = {}  # ranks that step a parameter together -> [(plan, parameter index)]
        for index, plan in enumerate(plans):
            for number in range(len(plan.params)):
                members.setdefault(plan.compared_by(number), []).append((index, number))
        self.flag_offset: list[dict[int, int]] = [{} for _ in plans]
        self.segments: dict[tuple, slice] = {}
        self.flag_params: list[tuple] = []
        self.count = 0  # flags of all plans
        # Flags of equal ranks are adjacent: a single all-reduce for each set of ranks
        for ranks in sorted(members, key=bucket_sort_key):
            start = self.count
            for index, number in members[ranks]:
                self.flag_offset[index][number] = self.count
                self.flag_params.append((self.count, plans[index], number))
                self.count += math.prod(_flag_shape(plans[index], number))
            self.segments[ranks] = slice(start, self.count)
        self.flags = torch.zeros(self.count, dtype=torch.float32, device=device)


class NonfiniteFlags(StepHook):
    """Checks the gradients of a step and shares the flags. Ranks with common parameters create and
    call the object together.
    """

    def __init__(
        self,
        buffers: FlagBuffers,
        plans: Sequence[Plan],
        stores: Sequence[StoreOfPlan],
        process_groups: ProcessGroups,
        whole: bool,
    ) -> None:
        """`whole`: a single non-finite gradient skips the whole step on all ranks
        (nonfinite="raise", or found_inf of a GradScaler); else only the matrix is skipped.
        """
        self.process_groups = process_groups
        self.skips_whole_step = whole
        self.flag_params = buffers.flag_params
        self.segments = buffers.segments
        self.count = buffers.count
        self.flags = buffers.flags
        self.local_flags = self.flags.new_zeros(self.count)
        self.plan_of = {id(store): plan for plan, store in zip(plans, stores)}
        meshes = {
            layout.ranks
            for plan in plans
            for layout in plan.layouts
            if whole and len(layout.boxes) > 1
        }
        # The ranks of meshes count as well: single ranks step the matrices of experts (EP), so
        # `segments` does not connect the ranks of the experts' mesh
        self.rank_sets = sorted(meshes.union(filter(None, self.segments)), key=bucket_sort_key)
        self.checked = [self._checked_gradients(plan, store) for plan, store in zip(plans, stores)]
        indices = [index for _, _, _, indices in self.checked for index in indices]
        self.flag_indices = torch.tensor(indices, dtype=torch.int64, device=self.flags.device)
        # Checks of gradients with several flags, one for each plan
        self.launches = [
            functools.partial(_bind_check(plan, store), store.addresses)
            for plan, store in zip(plans, stores)
            if store.addresses is not None
        ]

    def _checked_gradients(
        self, plan: Plan, store: StoreOfPlan
    ) -> tuple[StoreOfPlan, list[int], list[tuple[int, list]], list[int]]:
        """Return (store, indices of gradients with a single flag, [(index of a gradient, boxes of
        each of its units)] with several flags, flag indices of all in the order of
        `_flag_local_gradients`). With Triton the list of gradients with several flags is empty,
        since `_bind_check` checks all of these.
        """
        single = []
        several = []
        indices = [], []  # of the flags of `single`, of `several`
        for number, (layout, param) in enumerate(zip(plan.layouts, store.locals())):
            shape = _flag_shape(plan, number)
            # A rank without elements of the parameter has no gradient to check
            if not param.numel():
                continue
            # Flags of the units of matrices that this rank stores a part of
            flags = torch.arange(math.prod(shape), device="cpu").view(shape)
            flags = flags + store.flag_offset[number]
            if not shape:
                single.append(number)
                indices[0].append(int(flags))
                continue
            if store.addresses is not None:
                continue
            lead = tuple(slice(*side) for side in layout.boxes[store.rank][:-2])
            boxes = []
            for unit in sorted(layout.unit_sizes(store.rank)):
                boxes.append(
                    [
                        layout.place_of(store.rank, start, box_shape(box))
                        for box, start in layout.unit_boxes(store.rank, unit)
                    ]
                )
                indices[1].extend(flags[(*lead, unit)].flatten().tolist())
            several.append((number, boxes))
        return store, single, several, indices[0] + indices[1]

    def before_buckets(self, found_inf: torch.Tensor | float | None = None) -> None:
        """Set the flags for the gradients of the step. Collective.

        `found_inf`: result of a GradScaler, taken instead of a check of the gradients.
        """
        self.flags.zero_()
        if found_inf is None:
            self._flag_local_gradients()
        with errors.during("the comparison of NaN and Inf in gradients"):
            if found_inf is not None or self.skips_whole_step:
                # A GradScaler without gradients on this rank gives the number 0, no tensor
                flags = self.flags
                if found_inf is not None:
                    flags = torch.as_tensor(found_inf, device=flags.device)
                self._spread_maximum(
                    torch.cat([flags.to(self.flags).flatten(), self.flags.new_zeros(1)]).amax(
                        keepdim=True
                    )
                )
            else:
                for ranks in filter(None, self.segments):
                    group = self.process_groups.get_or_create(ranks)
                    dist.all_reduce(
                        self.flags[self.segments[ranks]], dist.ReduceOp.MAX, group=group
                    )

    def _flag_local_gradients(self) -> None:
        """Set the flag of each matrix (AdamW: parameter) with a NaN or Inf in the rank's
        gradient.
        """
        for check in self.launches:
            check()
        # A maximum norm is NaN or Inf exactly if an element is; no sum can overflow
        norms = []
        for store, single, several, _ in self.checked:
            norms += (
                torch._foreach_norm([store.gradients[i] for i in single], math.inf)
                if single
                else []
            )
            for i, boxes in several:
                matrices = store.splits[i].matrices(store.gradients[i])
                norms += [_largest(matrices, places) for places in boxes]
        if norms:
            norms = torch.cat([norm.flatten() for norm in norms])
            self.flags.index_copy_(0, self.flag_indices, norms.isfinite().logical_not().float())

    def _spread_maximum(self, maximum: torch.Tensor) -> None:
        """Set all flags to the maximum over all ranks connected by the sets of ranks.

        `maximum`: fp32 (1,), changed in place. The all-reduces run over every set of ranks in turn,
        in reverse order, and in turn again. So a value crosses all axes of a mesh, every chain of
        three sets of which each shares a rank with the next, and longer chains in the order of the
        sets or against it. Other arrangements of sets may need more rounds.
        """
        # The message of `raise_if_set` needs this rank's own flags, without those of further ranks
        self.local_flags.copy_(self.flags)
        # All ranks sort the sets of ranks alike, so that the all-reduces of all groups pair up
        for group in [*self._groups, *reversed(self._groups), *self._groups]:
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
        # `found_inf` of a GradScaler is a sum over devices, and may be larger than 1
        self.flags.copy_(maximum.clamp(max=1.0).expand_as(self.flags))

    @functools.cached_property
    def _groups(self) -> list[dist.ProcessGroup]:
        """Process groups of all sets of ranks, looked up at the first use."""
        return [self.process_groups.get_dedicated_or_shared(ranks) for ranks in self.rank_sets]

    def skipped_by_param(self, entries: Sequence[tuple[StoreOfPlan, int]]) -> list[int]:
        """Return how many matrices (AdamW: 1 for the parameter) the last step has skipped, for each
        (store, parameter index). Waits for the device.
        """
        flags = (self.flags > 0).tolist()
        found = []
        for store, number in entries:
            first = store.flag_offset[number]
            count = math.prod(_flag_shape(self.plan_of[id(store)], number))
            found.append(sum(flags[first : first + count]))
        return found

    def raise_if_set(self) -> None:
        """Raise RuntimeError if the step was skipped, with the names of the rank's non-finite
        gradients. Waits for the device.
        """
        # All flags are equal after `_spread_maximum`
        if not self.count or not float(self.flags[0]):
            return
        set_flags = set(self.local_flags.nonzero().flatten().tolist())
        names = [
            plan.names[number]
            for first, plan, number in self.flag_params
            if set_flags.intersection(range(first, first + math.prod(_flag_shape(plan, number))))
        ]
        where = f"of {first_few(names, 5)}" if names else "on another rank"
        # clip_grad_norm_ multiplies all gradients by a norm of NaN, so the names say nothing
        clipped = " before gradients are clipped, which spreads it to all" if len(names) > 5 else ""
        raise RuntimeError(
            f"NaN or Inf in the gradient {where}: no weight and no state has changed (nonfinite="
            f"'raise'). Look for what caused it{clipped}, or use nonfinite='skip'"
        )


def reduce_maximum(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace `values` by the maxima over the ranks of `group`. Collective."""
    with errors.during("the comparison of attention logits"):
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)


def reduce_sum(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace `values` by the sums over the ranks of `group`. Collective."""
    with errors.during("the sums of metrics"):
        dist.all_reduce(values, dist.ReduceOp.SUM, group=group)


def scalers_may_differ(groups: list[dict], options: Sequence[MuonConfig]) -> bool:
    """Return whether torch.amp.GradScaler may find Inf on a rank and none on another rank with
    common parameters.

    The scaler of each rank checks the rank's own gradients. Of DTensors the scaler takes the
    maximum over the ranks among which the first gradient is sharded. The maximum reaches all ranks
    if all parameters are sharded among equal ranks, as with fully_shard alone. `options`: of each
    group.
    """
    if not all(own.grads_are_reduced for own in options):
        return True
    wanted = [p for group in groups for p in group["params"] if p.requires_grad]
    if any(map(is_dtensor, wanted)) and not all(map(is_dtensor, wanted)):
        # The scaler of a rank checks only the rank's own gradients of plain parameters
        return True
    plain = {
        own.process_group
        for group, own in zip(groups, options)
        for p in group["params"]
        if p.requires_grad and not is_dtensor(p)
    }
    # Gradients are equal on the ranks of a process group, and differ beyond
    if len(plain) > 1:
        return True
    kinds = {
        (p.device_mesh, p.placements)
        for group in groups
        for p in group["params"]
        if _is_compared(p)
    }
    return len({sharded_among(mesh, placements) for mesh, placements in kinds}) > 1


class Unscaling:
    """Whether `step` or the torch.amp.GradScaler acts on the scaler's result.

    A scaler asks at every step. Parameters are examined one by one only if a parameter was
    replaced, frozen, unfrozen or got other placements since the last step.

    `answer`: the last result of `in_step`; None if no scaler has asked.
    """

    def __init__(self) -> None:
        """Start without an answer."""
        self.answer: bool | None = None
        self._seen = None  # `_classification_inputs` at the last evaluation
        self._mixed = []  # result of `_mixed_placements`
        self._has_warned = False

    def in_step(
        self, groups: list[dict], options: MuonConfig, options_by_group: Sequence[MuonConfig]
    ) -> bool:
        """Return whether `step` unscales gradients, and skips itself if a scaler found Inf.

        Warns once if missing gradients make the scaler of this rank compare over different ranks
        than the scalers of ranks with all gradients.
        """
        inputs = _classification_inputs(groups, (options, *options_by_group))
        if self._seen is None or not _is_equal(inputs, self._seen):
            given = options.unscale_in_step
            self.answer = given
            if given is None:
                self.answer = scalers_may_differ(groups, options_by_group)
            self._seen = inputs
            self._mixed = _mixed_placements(groups)
        self._has_warned = self._has_warned or any(map(_warn_if_unlike, self._mixed))
        return self.answer

    def set_answer(self, in_step: bool) -> None:
        """Take an answer that somebody has set on the optimizer."""
        self.answer = in_step

    def resolve(self, options: MuonConfig) -> MuonConfig:
        """Return the options for comparison between ranks: `unscale_in_step=None` is replaced by
        the answer. Without a scaler there is no answer, and ranks may differ.
        """
        return options if self.answer is None else replace(options, unscale_in_step=self.answer)


def _classification_inputs(groups: list[dict], options: tuple[MuonConfig, ...]) -> tuple:
    """Return everything that determines `scalers_may_differ` and `_mixed_placements`, without a
    Python loop over parameters: (options and group sizes, parameters, DTensor specs).
    """
    params = list(itertools.chain.from_iterable(map(itemgetter("params"), groups)))
    members = [(id(group), len(group["params"])) for group in groups]
    wanted = list(map(attrgetter("requires_grad"), params))
    return (
        (options, members, wanted),
        params,
        list(map(getattr, params, repeat("_spec"), repeat(None))),
    )


def _is_equal(inputs: tuple, seen: tuple) -> bool:
    """Return whether two results of `_classification_inputs` are equal. Parameters and specs are
    compared by identity.
    """
    objects = inputs[1] + inputs[2]
    seen_objects = seen[1] + seen[2]
    may_be_equal = inputs[0] == seen[0] and len(objects) == len(seen_objects)
    return may_be_equal and all(map(is_, objects, seen_objects))


def _mixed_placements(groups: list[dict]) -> list[list]:
    """Return [(group, parameter)] of DTensors with gradients, a list for each dtype with several
    placements or meshes.
    """
    of_dtype = {}
    for group in groups:
        for param in filter(_is_compared, group["params"]):
            of_dtype.setdefault(param.dtype, []).append((group, param))
    return [
        entries
        for entries in of_dtype.values()
        # With equal placements the scaler compares over equal ranks, whatever gradient comes first
        if len({(p.device_mesh, p.placements) for _, p in entries}) > 1
    ]


def _warn_if_unlike(entries: list) -> bool:
    """Warn, and return True, if the first parameter with a gradient on the rank has other
    placements than the first parameter at all. `entries`: a list of `_mixed_placements`.
    """
    first = entries[0]
    # GradScaler takes the gradients of each dtype together, and compares over the mesh of the first
    here = next((entry for entry in entries if entry[1].grad is not None), first)
    if (here[1].device_mesh, here[1].placements) == (first[1].device_mesh, first[1].placements):
        return False
    warn_caller(
        f"parameter {name_in(*first)} has no gradient here. torch.amp.GradScaler compares what it "
        "found over the mesh and by the placements of the first gradient of each dtype, here that "
        f"of {name_in(*here)}: ranks that have the other one compare otherwise, and all wait for "
        "each other until the process group's timeout. Have all ranks make the same gradients, "
        "zeros where need be"
    )
    return True


def _is_compared(param: torch.Tensor) -> bool:
    """Return whether a GradScaler compares the parameter's gradient across ranks: a DTensor with a
    gradient.
    """
    return is_dtensor(param) and param.requires_grad


def unscale(stores: Sequence[StoreOfPlan], grad_scale: torch.Tensor | None) -> None:
    """Divide the step's gradients by the scale of a GradScaler, in place. None: gradients are not
    scaled.
    """
    if grad_scale is None:
        return
    params = itertools.chain.from_iterable(map(attrgetter("params"), stores))
    grads = list(map(attrgetter("grad"), params))
    # Without a Python loop over parameters, since it runs in every step
    gradients = raw_locals(itertools.compress(grads, map(is_not, grads, repeat(None))))
    if gradients:
        torch._foreach_mul_(
            gradients, grad_scale.double().reciprocal().float().to(gradients[0].device)
        )


def _flag_shape(plan: Plan, number: int) -> tuple[int, ...]:
    """Return the shape of a parameter's flags: (leading dims, units) for Muon; () for AdamW, and
    for a parameter that is one matrix as stored.
    """
    # AdamW has a flag for each parameter, Muon for each matrix
    layout = plan.layouts[number]
    if plan.rank_plans is None or plan.in_chunks:
        return ()
    is_one = len(layout.shape) == 2 and layout.unit_count == 1
    return () if is_one else (*layout.shape[:-2], layout.unit_count)


def _bind_check(plan: Plan, store: StoreOfPlan) -> NonfiniteCheck:
    """Bind the check of the gradients with several flags: a rectangle for each box of a unit that
    the rank stores, of every matrix.
    """
    pieces = []
    for number, layout in enumerate(plan.layouts):
        shards = layout.boxes[store.rank]
        if not _flag_shape(plan, number) or not all(start < stop for start, stop in shards):
            continue
        sizes = layout.unit_sizes(store.rank)
        for at in itertools.product(*(range(*side) for side in shards[:-2])):
            for unit in sizes:
                matrix = Matrix(number, at, *layout.unit_shapes[unit], unit)
                pieces += [
                    Piece("matrix", matrix, box, store.rank, store.rank, True, start)
                    for box, start in layout.unit_boxes(store.rank, unit)
                ]
    shapes = [piece.shape for piece in pieces]
    return NonfiniteCheck(shapes, store.sources(pieces), store.gradients, store.skip(pieces))


def _largest(matrices: torch.Tensor, places: Sequence[tuple[slice, slice]]) -> torch.Tensor:
    """Return the largest magnitude in each of (..., R, C), within boxes of rows and columns; NaN
    and Inf stay.
    """
    norms = [
        torch.linalg.vector_norm(matrices[(..., *place)], math.inf, dim=(-2, -1))
        for place in places
    ]
    return norms[0] if len(norms) == 1 else torch.stack(norms).amax(0)

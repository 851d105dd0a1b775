"""NaN and Inf flags of gradients, agreed across ranks: one flag per matrix (AdamW: per parameter).

Flags stay on the device; kernels read them at run time. Only nonfinite="raise" makes the host wait,
at the end of the step.
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

from ..params import errors
from ..params.dtensor import is_dtensor, raw_locals
from ..params.errors import name_in, warn_caller
from ..params.layout import sharded_among
from ..planning.plan import bucket_sort_key
from ..planning.planner import Plan
from .process_groups import ProcessGroups


class FlagBuffers:
    """One flag on the device for each matrix (AdamW: parameter) of all plans.

    `flags`: fp32, 1 where a gradient is not finite. `first`: of each plan, {parameter index: index
    of its first flag}. `segments`: ranks -> the flags that they share. `numbers`: [(first flag,
    plan, parameter index)].
    """

    def __init__(self, plans: Sequence[Plan], device: torch.device):
        members = {}
        for index, plan in enumerate(plans):
            for number in range(len(plan.params)):
                members.setdefault(plan.compared_by(number), []).append((index, number))
        self.first = [{} for _ in plans]
        self.segments = {}
        self.numbers = []
        self.count = 0
        for ranks in sorted(members, key=bucket_sort_key):
            start = self.count
            for index, number in members[ranks]:
                self.first[index][number] = self.count
                self.numbers.append((self.count, plans[index], number))
                self.count += math.prod(_lead(plans[index], number))
            self.segments[ranks] = slice(start, self.count)
        self.flags = torch.zeros(self.count, dtype=torch.float32, device=device)


class NonfiniteFlags:
    """Finds and shares the flags of a step. Ranks that share parameters create and call it
    together.
    """

    def __init__(
        self,
        buffers: FlagBuffers,
        plans: Sequence[Plan],
        stores: Sequence[object],
        process_groups: ProcessGroups,
        whole: bool,
    ):
        """`whole`: for one broken gradient the whole step is left out (nonfinite="raise", or a
        GradScaler's found_inf).
        """
        self.process_groups = process_groups
        self.whole = whole
        self.numbers = buffers.numbers
        self.segments = buffers.segments
        self.count = buffers.count
        self.flags = buffers.flags
        self.broken = self.flags.new_zeros(self.count)
        meshes = {
            layout.ranks
            for plan in plans
            for layout in plan.layouts
            if whole and len(layout.boxes) > 1
        }
        # Experts that no rank shares are on a mesh, too
        self.told = sorted(meshes.union(filter(None, self.segments)), key=bucket_sort_key)
        self.watched = [self._watched(plan, store) for plan, store in zip(plans, stores)]
        places = [place for _, _, _, places in self.watched for place in places]
        self.places = torch.tensor(places, dtype=torch.int64, device=self.flags.device)

    def _watched(self, plan, store):
        """(store, numbers of its gradients with one flag, of those with several, the places of
        their flags).
        """
        single, several, places = [], [], ([], [])
        for number, (layout, param) in enumerate(zip(plan.layouts, store.locals())):
            lead = _lead(plan, number)
            if not param.numel():
                continue
            box = [slice(*side) for side in layout.boxes[store.rank][: len(lead)]]
            here = (
                torch.arange(math.prod(lead), device="cpu").view(lead)[tuple(box)]
                + store.first[number]
            )
            (several if lead else single).append(number)
            places[bool(lead)].extend(here.flatten().tolist())
        return store, single, several, places[0] + places[1]

    def check(self, found_inf=None) -> None:
        """Set the flags for this step's gradients; `found_inf`, a GradScaler's, in the gradients'
        place.
        """
        self.flags.zero_()
        if found_inf is None:
            self._look()
        with errors.during("the comparison of NaN and Inf in gradients"):
            if found_inf is not None or self.whole:
                # A GradScaler's 0: no gradient
                flags = self.flags if found_inf is None else torch.as_tensor(found_inf)
                self._spread(
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

    def _look(self):
        """A gradient is broken if its largest magnitude is not a finite number."""
        norms = []
        for store, single, several, _ in self.watched:
            norms += (
                torch._foreach_norm([store.gradients[i] for i in single], math.inf)
                if single
                else []
            )
            norms += [
                torch.linalg.vector_norm(store.gradients[i], math.inf, dim=(-2, -1))
                for i in several
            ]
        if norms:
            norms = torch.cat([norm.flatten() for norm in norms])
            self.flags.index_copy_(0, self.places, norms.isfinite().logical_not().float())

    def _spread(self, worst):
        """One flag for all, over every set of ranks in turn; the second round reaches ranks that
        share no set.
        """
        self.broken.copy_(self.flags)
        for group in self._groups * 2:
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
        self.flags.copy_(worst.clamp(max=1.0).expand_as(self.flags))

    @functools.cached_property
    def _groups(self) -> list:
        """Those of all sets of ranks, found when the first flag is to spread."""
        return [self.process_groups.get_dedicated_or_shared(ranks) for ranks in self.told]

    def raise_if_set(self) -> None:
        """Raise RuntimeError if the step was kept, naming what is broken at this rank. Waits for
        the device.
        """
        if not self.count or not float(self.flags[0]):
            return
        broken = set(self.broken.nonzero().flatten().tolist())
        names = [
            name_in(plan.group, plan.params[number])
            for first, plan, number in self.numbers
            if broken.intersection(range(first, first + math.prod(_lead(plan, number))))
        ]
        where = (
            f"of {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
            if names
            else "on another rank"
        )
        raise RuntimeError(
            f"NaN or Inf in the gradient {where}: no weight and no state has changed (nonfinite="
            "'raise'). Look for what caused it, or use nonfinite='skip'"
        )


def scalers_may_differ(groups, options) -> bool:
    """Whether torch.amp.GradScaler may find Inf on one rank and none on another with which it steps
    together.

    Each rank's scaler looks at its own gradients. Of DTensors it takes the maximum over the ranks
    among which its first gradient is sharded: enough where all parameters are sharded among the
    same ranks, as with fully_shard alone.
    """
    if not options.grads_are_reduced:
        return True
    wanted = [p for group in groups for p in group["params"] if p.requires_grad]
    if any(map(is_dtensor, wanted)) and not all(map(is_dtensor, wanted)):
        return True  # each rank's scaler sees the Inf of its own plain parameters only
    kinds = {
        (p.device_mesh, p.placements)
        for group in groups
        for p in group["params"]
        if _is_compared(p)
    }
    return len({sharded_among(mesh, placements) for mesh, placements in kinds}) > 1


class Unscaling:
    """Who acts on what a torch.amp.GradScaler finds: `step`, or the scaler.

    A scaler asks at every step. Parameters are looked at one by one only if one of them has been
    replaced, placed otherwise, frozen or unfrozen since the last step.

    `answer`: the last one; None if nobody has asked.
    """

    def __init__(self):
        self.answer: bool | None = None
        self._seen = None  # what the answer rests on, as `_rests_on` returns it
        self._rivals = []  # see `_rivals_of`
        self._has_warned = False

    def in_step(self, groups: list[dict], options: object) -> bool:
        """Whether `step` unscales, and leaves itself out where a scaler found Inf. Warns once if
        this rank's scaler compares by another first gradient than ranks that have all gradients.
        """
        now = _rests_on(groups, options)
        if self._seen is None or not _is_same(now, self._seen):
            asked = options.unscale_in_step
            self.answer = scalers_may_differ(groups, options) if asked is None else asked
            self._seen, self._rivals = now, _rivals_of(groups)
        self._has_warned = self._has_warned or any(map(_warn_of_unlike, self._rivals))
        return self.answer

    def resolve(self, options: object) -> object:
        """The options that ranks compare: with the answer in place of `unscale_in_step=None`. Where
        nobody has asked there is no scaler, and ranks may differ.
        """
        return options if self.answer is None else replace(options, unscale_in_step=self.answer)


def _rests_on(groups: list[dict], options: object) -> tuple:
    """What `scalers_may_differ` and `_rivals_of` look at, without Python for each parameter."""
    params = list(itertools.chain.from_iterable(map(itemgetter("params"), groups)))
    members = [(id(group), len(group["params"])) for group in groups]
    wanted = list(map(attrgetter("requires_grad"), params))
    return (
        (options, members, wanted),
        params,
        list(map(getattr, params, repeat("_spec"), repeat(None))),
    )


def _is_same(now: tuple, seen: tuple) -> bool:
    """Whether two results of `_rests_on` are equal; parameters and placements are compared by
    identity.
    """
    ours, theirs = now[1] + now[2], seen[1] + seen[2]
    return now[0] == seen[0] and len(ours) == len(theirs) and all(map(is_, ours, theirs))


def _rivals_of(groups: list[dict]) -> list[list]:
    """[(group, parameter)] of the DTensors that want a gradient, one list for each dtype in which
    they have several placements or meshes.
    """
    of_dtype = {}
    for group in groups:
        for param in filter(_is_compared, group["params"]):
            of_dtype.setdefault(param.dtype, []).append((group, param))
    return [
        entries
        for entries in of_dtype.values()
        if len({(p.device_mesh, p.placements) for _, p in entries}) > 1
    ]


def _warn_of_unlike(rivals: list) -> bool:
    """Warn, and return True, if the first of these parameters that has a gradient here is placed
    otherwise than the first one. `rivals`: one list of `_rivals_of`.
    """
    first = rivals[0]
    here = next((entry for entry in rivals if entry[1].grad is not None), first)
    if (here[1].device_mesh, here[1].placements) == (first[1].device_mesh, first[1].placements):
        return False
    warn_caller(
        f"parameter {name_in(*first)} has no gradient here. torch.amp.GradScaler compares what it "
        "found over "
        "the mesh and by the placements of the first gradient of each dtype, here that of "
        f"{name_in(*here)}: "
        "ranks that have the other one compare otherwise, and all wait for each other until the "
        "process "
        "group's timeout. Have all ranks make the same gradients, zeros where need be"
    )
    return True


def _is_compared(param) -> bool:
    return is_dtensor(param) and param.requires_grad


def unscale(stores, grad_scale) -> None:
    """Divide this step's gradients by a GradScaler's scale, in place; None: they are not scaled."""
    if grad_scale is None:
        return
    params = itertools.chain.from_iterable(map(attrgetter("params"), stores))
    whole = list(map(attrgetter("grad"), params))
    gradients = raw_locals(itertools.compress(whole, map(is_not, whole, repeat(None))))
    if gradients:
        torch._foreach_mul_(
            gradients, grad_scale.double().reciprocal().float().to(gradients[0].device)
        )


def _lead(plan, number) -> tuple:
    """The shape of the flags of a parameter: its leading dims where every matrix has one."""
    whole = plan.shares is None or plan.in_chunks
    return () if whole else tuple(plan.layouts[number].shape[:-2])

"""Classes of ranks with equal memory: a memory report looks at some ranks of each class, instead of
at thousands of ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from .params.dtensor import gradient_dtype
from .params.layout import Layout
from .planning.plan import Bucket
from .planning.planner import Plan
from .planning.rank_plan import RankPlan

Found = dict[int, list]  # rank -> what its memory depends on


class BucketParts:
    """The buckets of a plan, of all ranks, and how to find the part of each rank."""

    def __init__(
        self, buckets: Sequence[Bucket], rank_plan: Callable[[Bucket, int], RankPlan]
    ) -> None:
        """`rank_plan`: returns the part of a bucket on a rank."""
        self.buckets = buckets
        self.rank_plan = rank_plan

    def __call__(self, rank: int) -> list[tuple[Bucket, RankPlan]]:
        """Return [(bucket, its part on the rank)]."""
        return [(b, self.rank_plan(b, rank)) for b in self.buckets if rank in b.ranks]


def representatives(
    plans: Sequence[tuple[Plan, BucketParts | None]], ranks: Sequence[int], offloads: bool
) -> list[int]:
    """Return ranks, ascending, among them one with the most memory of all `ranks`.

    `plans`: [(plan, its buckets or None)]. `offloads`: state is offloaded, in the order of the
    parameters.

    Ranks of a class store boxes of equal sizes, and own matrices of equal shapes, placed alike.
    What is left of a rank is its place among its peers: if replicas follow each other, it can
    decide whether matrices are direct (see [Note: direct matrices] in rank_plan.py), for the last
    rank unlike for the first. So the first and the last rank of each class are returned.
    """
    found: Found = {rank: [] for rank in ranks}
    for plan, parts in plans:
        _add_boxes(found, plan)
        _add_owner_state(found, plan, offloads)
        kinds: dict[tuple, int] = {}  # what a bucket holds -> number
        for bucket in parts.buckets if parts is not None else ():
            _add_bucket(found, plan, bucket, kinds)
    classes = defaultdict(list)
    for rank, facts in found.items():
        classes[tuple(facts)].append(rank)
    return sorted({rank for members in classes.values() for rank in (members[0], members[-1])})


def parameter_forms(plan: Plan, numbers: Mapping[int, int], offloads: bool) -> list[list[int]]:
    """Return the indices of parameters in lists of equal memory on every rank. `numbers`: id of a
    group -> its number. `offloads`: as in `representatives`.
    """
    # Owners of state differ by parameter, and offloading has a budget for the first parameters
    if offloads or plan.state_rows is not None or plan.matrix_owners is not None:
        return [[i] for i in range(len(plan.params))]
    forms = defaultdict(list)
    for i, param in enumerate(plan.params):
        layouts = id(plan.layouts[i]), *(id(of_key[i]) for of_key in plan.state_layouts.values())
        group = numbers[id(plan.group_at(i))]
        gradient = gradient_dtype(param)
        forms[layouts, group, param.shape, param.dtype, gradient, plan.split(i)].append(i)
    return list(forms.values())


def _add_boxes(found: Found, plan: Plan) -> None:
    """Add the sizes of the boxes that each rank stores."""
    every = (plan.layouts, *plan.state_layouts.values(), *plan.selected.values())
    distinct = {id(layout): layout for layouts in every for layout in layouts}
    for layout in distinct.values():
        for rank, facts in found.items():
            box = layout.boxes.get(rank)
            facts.append(None if box is None else tuple(stop - start for start, stop in box))
            if box is not None and _has_units(layout):
                facts.append(tuple(_shapes(layout, rank, u) for u in layout.unit_sizes(rank)))


def _has_units(layout: Layout) -> bool:
    """Whether the pieces of a rank follow from more than the size of its box."""
    return layout.unit_count > 1 or bool(layout.interleaved) or layout.sends_parts


def _shapes(layout: Layout, rank: int, unit: int) -> tuple[tuple[int, int], ...]:
    """Return the shapes of the boxes of a unit that a rank stores."""
    return tuple((r1 - r0, c1 - c0) for ((r0, r1), (c0, c1)), _ in layout.unit_boxes(rank, unit))


def _add_owner_state(found: Found, plan: Plan, offloads: bool) -> None:
    """Add the state that each rank keeps as an owner."""
    if plan.state_rows is not None:
        layouts = plan.layouts
        for place, rank in enumerate(layouts[0].ranks if layouts else ()):
            rows = [(i, of_param[place]) for i, of_param in enumerate(plan.state_rows)]
            kept = [(i * offloads, id(layouts[i]), n) for i, n in rows if n]
            found[rank].append(tuple(kept))
    for i, owners in enumerate(plan.matrix_owners or ()):
        matrices = plan.layouts[i].matrices
        owned = defaultdict(list)
        for (_, unit), owner in zip(matrices, owners):
            owned[owner].append(plan.layouts[i].unit_shapes[unit])
        for rank, shapes in owned.items():
            if rank in found:
                found[rank].append((i * offloads, id(plan.layouts[i]), tuple(shapes)))


def _add_bucket(found: Found, plan: Plan, bucket: Bucket, kinds: dict[tuple, int]) -> None:
    """Add what each rank stores and owns in a bucket. `kinds`: what a bucket holds -> number."""
    layouts = plan.selected.get("matrix", plan.layouts)
    owned = defaultdict(tuple)  # rank -> matrices that it owns, in the order of the bucket
    units = Counter()  # (id of a layout, unit) -> number of matrices
    own_boxes = defaultdict(tuple)  # rank -> boxes that it stores of matrices that it owns
    owned_lists = defaultdict(list)
    for m, owner in zip(bucket.matrices, bucket.owners):
        layout = layouts[m.param]
        units[id(layout), m.unit] += 1
        owned_lists[owner].append((id(layout), layout.unit_shapes[m.unit], m.selected))
        if _has_units(layout):
            own_boxes[owner] += (_shapes(layout, owner, m.unit),)
    owned.update({rank: tuple(some) for rank, some in owned_lists.items()})
    distinct = {id(layouts[m.param]): layouts[m.param] for m in bucket.matrices}
    shapes = Counter()
    for (key, unit), count in units.items():
        shapes[key, distinct[key].unit_shapes[unit]] += count
    whole = frozenset(shapes.items()), frozenset(Counter(owned.values()).items())
    kind = bucket.route, len(bucket.ranks), bucket.memory, *whole
    number = kinds.setdefault(kind, len(kinds))
    replicas = {x.replicas: x for x in distinct.values() if len(x.replicas) > 1}
    sources = [list(_owned_by_replica(x, owned)) for x in replicas.values()]
    split = [layout for layout in distinct.values() if _has_units(layout)]
    for rank in bucket.ranks:
        facts = found[rank]
        facts += (number, owned.get(rank), own_boxes.get(rank))
        facts += (of[x.replica_of[rank]] for of, x in zip(sources, replicas.values()))
        for layout in split:
            stored = [(u, units[id(layout), u]) for u in layout.unit_sizes(rank)]
            facts.append(tuple((_shapes(layout, rank, u), n) for u, n in stored if n))


def _owned_by_replica(layout: Layout, owned: Mapping[int, tuple]) -> Iterator[frozenset]:
    """Yield for each replica what its ranks own: a rank sends pieces to owners in its replica."""
    for ranks in layout.replicas:
        yield frozenset(Counter(owned[rank] for rank in ranks if rank in owned).items())

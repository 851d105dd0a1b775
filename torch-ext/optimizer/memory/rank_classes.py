"""Classes of ranks with equal memory: a memory report looks at one rank of each class, instead of
at thousands of ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..params.dtensor import gradient_dtype
from ..params.layout import Layout
from ..params.units import box_shape
from ..planning.plan import Bucket
from ..planning.planner import Plan
from ..planning.rank_plan import AllToAllPlan, RankPlan

Facts = dict[int, list]  # rank -> facts that determine its memory


class BucketParts:
    """The buckets of a plan, of all ranks, and the parts of each rank in them. `weighed` makes a
    part once for all ranks that store boxes of equal sizes and own matrices of equal shapes.
    """

    def __init__(
        self, buckets: Sequence[Bucket], rank_plan: Callable[[Bucket, int], RankPlan]
    ) -> None:
        """`rank_plan`: returns the part of a bucket on a rank."""
        self.buckets = buckets
        self.rank_plan = rank_plan
        # Rank -> [(bucket, class of the rank in the bucket)], filled by `representatives`
        self.classes: dict[int, list[tuple[Bucket, tuple]]] = defaultdict(list)
        # Class -> (part, result of `weigh`)
        self.part_of_class: dict[tuple, tuple[RankPlan, int]] = {}

    def at(self, rank: int) -> list[tuple[Bucket, RankPlan]]:
        """Return [(bucket, its part on the rank)], with all pieces."""
        return [(b, self.rank_plan(b, rank)) for b in self.buckets if rank in b.ranks]

    def weighed(
        self, rank: int, weigh: Callable[[Bucket, RankPlan], int]
    ) -> tuple[list[tuple[Bucket, RankPlan]], int]:
        """Return ([(bucket, a part with the sizes of the part on the rank)], sum of `weigh` over
        the parts). Parts of matrices come without pieces, which would take much memory. After
        `representatives`.
        """
        parts, total = [], 0
        for bucket, rank_class in self.classes[rank]:
            if rank_class not in self.part_of_class:
                part = self.rank_plan(bucket, rank)
                nbytes = weigh(bucket, part)
                kept = _without_pieces(part) if bucket.owners else part
                self.part_of_class[rank_class] = kept, nbytes
            part, nbytes = self.part_of_class[rank_class]
            parts.append((bucket, part))
            total += nbytes
        return parts, total


def _without_pieces(part: RankPlan) -> RankPlan:
    """Return the part of a bucket without its pieces: sizes stay."""
    empty = AllToAllPlan({}, {}, (), (), ())
    return replace(part, stored=(), owned=(), inbound=empty, outbound=empty, kept={})


def representatives(
    plans: Sequence[tuple[Plan, BucketParts | None]], ranks: Sequence[int], offloads: bool
) -> list[int]:
    """Return ranks, ascending, among them one with the most memory of all `ranks`; fill the classes
    of the buckets.

    `plans`: [(plan, its buckets or None)]. `offloads`: state is offloaded, in the order of the
    parameters.

    Ranks of a class store boxes of equal sizes, and own matrices of equal shapes, placed alike. Of
    the place of a rank among its peers, two facts count, by which matrices are direct or not (see
    [Note: direct matrices] in rank_plan.py): whether the rank is in the first replica, and whether
    it is the last of its replica.
    """
    facts: Facts = {rank: [] for rank in ranks}
    for plan, parts in plans:
        boxes = _add_boxes(facts, plan)
        _add_owner_state(facts, plan, offloads)
        if parts is not None:
            _add_buckets(facts, plan, parts, boxes)
    first_of_class = {}
    for rank, of_rank in facts.items():
        first_of_class.setdefault(tuple(of_rank), rank)
    return sorted(first_of_class.values())


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


def _add_boxes(facts: Facts, plan: Plan) -> dict[int, int]:
    """Add the sizes of the boxes that each rank stores. Return rank -> a number, equal for ranks
    with equal sizes.
    """
    every = (plan.layouts, *plan.state_layouts.values(), *plan.selected.values())
    distinct = {id(layout): layout for layouts in every for layout in layouts}
    numbers, number_of = {}, {}
    for rank, of_rank in facts.items():
        sizes = []
        for layout in distinct.values():
            box = layout.boxes.get(rank)
            sizes.append(None if box is None else box_shape(box))
            if box is not None and _needs_unit_boxes(layout):
                sizes.append(tuple(_shapes(layout, rank, u) for u in layout.unit_sizes(rank)))
        number_of[rank] = numbers.setdefault(tuple(sizes), len(numbers))
        of_rank.append(number_of[rank])
    return number_of


def _needs_unit_boxes(layout: Layout) -> bool:
    """Whether the pieces of a rank follow from more than the size of its box."""
    return layout.unit_count > 1 or bool(layout.interleaved) or layout.sends_parts


def _shapes(layout: Layout, rank: int, unit: int) -> tuple[tuple[int, int], ...]:
    """Return the shapes of the boxes of a unit that a rank stores."""
    return tuple(box_shape(box) for box, _ in layout.unit_boxes(rank, unit))


def _add_owner_state(facts: Facts, plan: Plan, offloads: bool) -> None:
    """Add the state that each rank keeps as an owner."""
    if plan.state_rows is not None:
        layouts = plan.layouts
        forms = Counter(
            (i * offloads, id(layouts[i]), tuple(rows)) for i, rows in enumerate(plan.state_rows)
        )
        for place, rank in enumerate(layouts[0].ranks if layouts else ()):
            kept = [(*form[:2], form[2][place], count) for form, count in forms.items()]
            facts[rank].append(tuple(entry for entry in kept if entry[2]))
    for i, owners in enumerate(plan.matrix_owners or ()):
        matrices = plan.layouts[i].matrices
        owned = defaultdict(list)
        for (_, unit), owner in zip(matrices, owners):
            owned[owner].append(plan.layouts[i].unit_shapes[unit])
        for rank, shapes in owned.items():
            if rank in facts:
                facts[rank].append((i * offloads, id(plan.layouts[i]), tuple(shapes)))


def _add_buckets(facts: Facts, plan: Plan, parts: BucketParts, boxes: dict[int, int]) -> None:
    """Add the classes of each rank in the buckets of a plan, and fill `parts.classes`. `boxes`: as
    `_add_boxes` returns it.
    """
    contents: dict[tuple, int] = {}  # content of a bucket -> number
    for bucket in parts.buckets:
        if bucket.owners:
            in_bucket = _facts_in(plan, bucket, contents)
            classes = {rank: (boxes[rank], *of_rank) for rank, of_rank in in_bucket}
            for rank, rank_class in classes.items():
                facts[rank].append(rank_class)
        else:  # chunks: `_add_owner_state` tells the rows of each rank
            classes = {rank: (id(bucket), rank) for rank in bucket.ranks}
        for rank, rank_class in classes.items():
            parts.classes[rank].append((bucket, rank_class))


def _facts_in(
    plan: Plan, bucket: Bucket, contents: dict[tuple, int]
) -> Iterator[tuple[int, tuple]]:
    """Yield (rank, facts that determine the sizes of its part of a bucket). `contents`: content of
    a bucket -> number.
    """
    layouts = plan.selected.get("matrix", plan.layouts)
    units = Counter()  # (id of a layout, unit) -> number of matrices
    owned = defaultdict(list)  # rank -> matrices that it owns, in the order of the bucket
    for m, owner in zip(bucket.matrices, bucket.owners):
        layout = layouts[m.param]
        units[id(layout), m.unit] += 1
        stored = _shapes(layout, owner, m.unit) if _needs_unit_boxes(layout) else ()
        owned[owner].append((id(layout), layout.unit_shapes[m.unit], m.selected, stored))
    owned = {rank: tuple(of_rank) for rank, of_rank in owned.items()}
    distinct = {id(layouts[m.param]): layouts[m.param] for m in bucket.matrices}
    shapes = Counter()
    for (key, unit), count in units.items():
        shapes[key, distinct[key].unit_shapes[unit]] += count
    lists = Counter(tuple(entry[:3] for entry in of_rank) for of_rank in owned.values())
    content = frozenset(shapes.items()), frozenset(lists.items())
    content = bucket.route, len(bucket.ranks), bucket.memory, *content
    number = contents.setdefault(content, len(contents))
    replicas = {x.replicas: x for x in distinct.values() if len(x.replicas) > 1}
    sources = [list(_owned_by_replica(x, owned)) for x in replicas.values()]
    split = [layout for layout in distinct.values() if _needs_unit_boxes(layout)]
    for rank in bucket.ranks:
        of_rank = [number, owned.get(rank)]
        for of_replica, layout in zip(sources, replicas.values()):
            replica = layout.replica_of[rank]
            is_last = layout.replicas[replica][-1] == rank
            of_rank.append((of_replica[replica], replica == 0, is_last))
        for layout in split:
            held = [(u, units[id(layout), u]) for u in layout.unit_sizes(rank)]
            of_rank.append(tuple((_shapes(layout, rank, u), n) for u, n in held if n))
        yield rank, tuple(of_rank)


def _owned_by_replica(layout: Layout, owned: Mapping[int, tuple]) -> Iterator[frozenset]:
    """Yield for each replica what its ranks own: a rank sends pieces to owners in its replica."""
    for ranks in layout.replicas:
        lists = [tuple(entry[:3] for entry in owned[rank]) for rank in ranks if rank in owned]
        yield frozenset(Counter(lists).items())

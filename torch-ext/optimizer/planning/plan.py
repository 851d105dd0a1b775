"""Matrices, buckets, and `make_plan`, which assigns every matrix an owner and a bucket.

A pure function of layouts, options and measured times: every rank computes the same plan. Touches
no tensor, sends nothing.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial

from .bucketing import PARTS, cut, in_parts, rounds_of
from .cost_model import BucketTimes
from .load_balance import assign
from .memory_model import ALIGNMENT, MemoryModel, PlanInputs, total, workspace

# Of plain matrices whose owner keeps the state: gradients come reduced, or not
OWNER_STATE_KINDS = "own", "reduce"


@dataclass(frozen=True)
class Matrix:
    """The unit of orthogonalization: `rows` x `cols` of parameter number `param`, at the leading
    index `at` (experts).
    """

    param: int
    at: tuple
    rows: int
    cols: int

    @property
    def numel(self):
        return self.rows * self.cols


@dataclass(frozen=True)
class Bucket:
    """Matrices that travel together over `ranks`, the owner of each, the name of the route that
    steps them, the times that are expected where known, and what it takes of any rank at most:
    (bytes of a slot, bytes of the bench).
    """

    route: str
    ranks: tuple
    matrices: tuple
    owners: tuple
    part: BucketTimes | None = field(default=None, compare=False)
    memory: tuple = (0, 0)

    @property
    def nbytes(self) -> int:
        """Of a workspace that has room for any number of such buckets on every rank."""
        return workspace(*self.memory)


def check_slots(buckets, given) -> None:
    """Raise ValueError if buckets that all have a slot of their own take more of any rank than the
    bytes `given`.
    """
    away, home, bench = Counter(), Counter(), Counter()
    for bucket in buckets:
        slot, least = bucket.memory
        for rank in bucket.ranks:
            away[rank] += slot * (bucket.route != "local")
            home[rank] = max(home[rank], slot * (bucket.route == "local"))
            bench[rank] = max(bench[rank], least)
    needed = max((away[rank] + home[rank] + bench[rank] for rank in bench), default=0)
    if given is not None and needed > given:
        raise ValueError(
            f"workspace_bytes={given} is too small: with overlap_backward=True every bucket has a "
            "slot of "
            f"its own, which takes {needed} bytes together; pass at least that, or None, or leave "
            "overlap_backward out"
        )


def make_plan(
    layouts,
    cost,
    loads,
    terms=None,
    *,
    rank_bytes=1 << 30,
    plain="exchange",
    minimize_workspace=False,
) -> list:
    """Layouts -> [Bucket], the same on every rank; `terms`: a `PlanInputs`, None for its defaults.

    `cost(rows, cols)`: the work of one matrix, a whole number; a Pace with measured times says also
    how buckets are cut and ordered (else they are as few as fit). `loads`: work from earlier plans
    of this step, by the ranks that know of it and by rank, updated in place; `rank_bytes`: how much
    workspace buckets may take of one rank (more where one matrix per owner does); `plain`: the
    route of plain matrices on several ranks, see ROUTES_OF_OWNERS; `minimize_workspace`: take less
    where that costs 1 % of time at most.
    """
    families, pace = _families(layouts, plain), cost if getattr(cost, "measured", False) else None
    owner_of, buckets = _assign(families, layouts, cost, loads), []
    for route, ranks in sorted(families, key=lambda family: (turn(family[1]), family)):
        freight = MemoryModel(layouts, terms or PlanInputs(), route, ranks)
        layers = rounds_of(families[route, ranks], owner_of, cost, freight)
        price = partial(freight.price, owner_of, pace) if pace else None
        for group in cut(
            layers,
            freight.workspace_for,
            rank_bytes,
            price,
            freight.bytes_together if minimize_workspace else None,
        ):
            taken, matrices = (
                total(group),
                tuple(matrix for layer in group for matrix in layer.matrices),
            )
            owners = tuple(owner_of[m] for m in matrices)
            buckets.append(_bucket(freight, matrices, owners, taken, pace))
    return buckets


def _bucket(freight, matrices, owners, taken, pace) -> Bucket:
    part = pace and freight.part(matrices, owners, taken, pace)
    return Bucket(freight.route, freight.ranks, matrices, owners, part, freight.memory(taken))


def along_backward(buckets, layouts, cost, terms, latency) -> list[Bucket]:
    """The same matrices with the same owners, in buckets that are complete one after another while
    backward goes from the last parameter to the first. Those that stay at home stay as they are.

    `latency`: the fewest bytes that are worth a bucket on the wire, of one rank; the rest as in
    `make_plan`.
    """

    def cut_anew(owner_of, least, pack):
        order = sorted(owner_of, key=lambda m: (-m.param, m.at))
        return pack(in_parts([(m,) for m in order], least))

    return _along(cut_anew, buckets, layouts, cost, terms, latency)


def along_forward(buckets, layouts, cost, terms, latency, rank_bytes) -> list[Bucket]:
    """The same in buckets that land one after another as forward goes from the first parameter to
    the last: the next matrix of every owner, so that each bucket has work for all. As many as there
    is no room for fewer.
    """

    def cut_anew(owner_of, least, pack):
        queues = defaultdict(list)
        for matrix in sorted(owner_of, key=lambda m: (m.param, m.at)):
            queues[owner_of[matrix]].append(matrix)
        rounds = [
            tuple(m for m in together if m is not None)
            for together in itertools.zip_longest(*queues.values())
        ]
        found, count = pack(in_parts(rounds, least)), PARTS
        while max(b.nbytes for b in found) > rank_bytes and len(found) < len(rounds):
            count *= 2
            found = pack(in_parts(rounds, 0, count))
        return found

    return _along(cut_anew, buckets, layouts, cost, terms, latency)


def _along(cut_anew, buckets, layouts, cost, terms, latency) -> list[Bucket]:
    """`cut_anew(owner_of, least, pack)`: the buckets of one family, of at least so many elements;
    `pack` makes them of matrices.
    """
    families, pace, found = (
        defaultdict(dict),
        cost if getattr(cost, "measured", False) else None,
        [],
    )
    for bucket in buckets:
        families[bucket.route, bucket.ranks].update(zip(bucket.matrices, bucket.owners))
    for (route, ranks), owner_of in families.items():
        if route == "local":
            found += [
                bucket for bucket in buckets if (bucket.route, bucket.ranks) == (route, ranks)
            ]
            continue
        pack = partial(_packed, MemoryModel(layouts, terms, route, ranks), owner_of, pace)
        found += cut_anew(owner_of, latency * len(ranks) / terms.update, pack)
    return found


def _packed(freight, owner_of, pace, parts) -> list[Bucket]:
    found = []
    for matrices in parts:
        owners = tuple(owner_of[m] for m in matrices)
        found.append(_bucket(freight, matrices, owners, freight.sum(zip(matrices, owners)), pace))
    return found


def turn(ranks) -> tuple:
    """The key by which buckets are ordered in a step: those of the same ranks follow each other, on
    every rank.
    """
    return -len(ranks), ranks


def _families(layouts, plain) -> dict:
    """(route, ranks) -> matrices whose pieces lie on the same ranks and are stepped alike."""
    families, places = defaultdict(list), {}
    for param, layout in enumerate(layouts):
        if id(layout) not in places:  # parameters of one shape and placement share their layout
            places[id(layout)] = _places(layout, plain)
        for lead, family in places[id(layout)]:
            for at in itertools.product(*(range(a, b) for a, b in lead)):
                families[family].append(Matrix(param, at, *layout.shape[-2:]))
    return dict(families)


def _places(layout, plain) -> list:
    """[(box of leading indices, (route, ranks))]: who stores pieces of the matrices at these
    indices.
    """
    ranks_of = defaultdict(list)
    for rank, box in layout.boxes.items():
        if all(a < b for a, b in box[:-2]):
            ranks_of[box[:-2]].append(rank)
    found = []
    for lead, ranks in ranks_of.items():
        storing = [r for r in ranks if all(a < b for a, b in layout.boxes[r][-2:])]
        if len(storing) == 1:
            found.append((lead, ("local", tuple(storing))))
        elif storing:
            found.append((lead, (plain if layout.plain else "exchange", tuple(sorted(ranks)))))
    return found


def _assign(families, layouts, cost, loads) -> dict:
    """matrix -> owner, balanced over all shapes at once (load_balance.py).

    Only work on layouts that all ranks of a layout have part in counts: of other work some of them
    know nothing. So the layouts of the most ranks come first. Where the owner also keeps the state,
    a parameter has one owner for all its matrices.
    """
    owner_of, worlds = {}, defaultdict(list)
    world_of = {id(layout): layout for layout in layouts}
    world_of = {key: frozenset(layout.boxes) for key, layout in world_of.items()}
    for (route, ranks), matrices in families.items():
        for _, unit in itertools.groupby(
            matrices, key=lambda m: m.param if route in OWNER_STATE_KINDS else m
        ):
            unit = list(unit)
            work = max(1, cost(unit[0].rows, unit[0].cols)) * len(unit)
            worlds[world_of[id(layouts[unit[0].param])]].append(
                (unit[0].param, unit[0].at, ranks, work, unit)
            )
    for world in sorted(worlds, key=lambda world: (-len(world), sorted(world))):
        units, base = sorted(worlds[world], key=lambda u: u[:2]), Counter()
        for everybody in [e for e in loads if e >= world]:
            base.update(loads[everybody])
        owners, _ = assign(
            [(work, ranks) for _, _, ranks, work, _ in units], {r: base[r] for r in sorted(world)}
        )
        mine = loads.setdefault(world, Counter())
        for owner, (*_, work, unit) in zip(owners, units):
            owner_of.update(dict.fromkeys(unit, owner))
            mine[owner] += work
    return owner_of


def plan_chunks(shapes, ranks, rank_bytes, terms) -> list[Bucket]:
    """Buckets of parameters whose state is at owners elementwise: rank number i owns the i-th part
    of the rows of each.

    `shapes`: (rows, the rest) of each parameter; `terms`: see `ChunkPlanInputs`. A bucket takes
    some rows of every part; its Matrix says how many (`rows`), from which one on (`at`). One
    without elements is there for its count of steps.
    """
    slot, bench, fixed = _of_chunks(ranks, terms)
    element = workspace(slot, bench)
    N, numel, buckets = len(ranks), (rank_bytes - workspace(fixed, fixed)) // element, [[]]
    for param, (rows, cols) in enumerate(shapes):
        first, last = 0, -(-rows // N) if cols else 0
        buckets[-1] += [] if last else [Matrix(param, (0,), 0, 0)]
        while first < last:
            room = numel - sum(m.numel for m in buckets[-1])
            if room < cols and buckets[-1]:
                buckets.append([])
                continue
            count = min(max(room // cols, 1), last - first)
            buckets[-1].append(Matrix(param, (first,), count, cols))
            first += count
    sizes = [sum(m.numel for m in b) for b in buckets]
    route = "own_elementwise" if terms.reduced else "reduce_elementwise"
    return [
        Bucket(route, ranks, tuple(b), (), None, (slot * n + fixed, bench * n + fixed))
        for b, n in zip(buckets, sizes)
        if b
    ]


def _of_chunks(ranks, terms) -> tuple[int, int, int]:
    """What chunks take: (bytes of a slot for each element of a part, of the bench, of each for any
    number of them).
    """
    N, gradient, weight = len(ranks), terms.gradient, terms.weight
    leaves, returns, stepped = N * gradient, N * weight - weight, weight + 2 * terms.state
    if terms.reduced:  # the part's own gradient in place of the mean
        return 2 * returns + stepped + gradient, 0, 4 * ALIGNMENT * (N + 3)
    # as much arrives as leaves; the part's own weight and state, stepped; the mean
    return 2 * max(leaves, returns) + stepped, max(4, gradient), 3 * ALIGNMENT * (N + 3)


def chunks_along_backward(shapes, ranks, terms, latency) -> list[Bucket]:
    """As `plan_chunks`, in buckets for which gradients come one after another during backward; see
    `along_backward`.
    """
    return plan_chunks(shapes, ranks, _room_of_part(shapes, ranks, terms, latency), terms)[::-1]


def chunks_along_forward(shapes, ranks, terms, latency, rank_bytes) -> list[Bucket]:
    """As `plan_chunks`, in buckets that land one after another during forward; see `along_forward`."""
    room = min(rank_bytes, _room_of_part(shapes, ranks, terms, latency))
    return plan_chunks(shapes, ranks, room, terms)


def _room_of_part(shapes, ranks, terms, latency) -> int:
    """The workspace in which there is room for one of PARTS parts."""
    slot, bench, fixed = _of_chunks(ranks, terms)
    numel = sum(-(-rows // len(ranks)) * cols for rows, cols in shapes)
    most = max(-(-numel // PARTS), latency // (len(ranks) * terms.gradient))
    return workspace(fixed, fixed) + workspace(slot, bench) * most


def digest(buckets, layouts, *more) -> int:
    """A number that differs where two ranks' plans differ: exchanged once, instead of the plans. Of
    parameters only their order counts: between them a rank may have others, of which the ranks of
    these buckets know nothing.
    """
    place = {
        param: i for i, param in enumerate(sorted({m.param for b in buckets for m in b.matrices}))
    }
    text = repr(
        [
            (
                b.route,
                b.ranks,
                b.owners,
                [(place[m.param], m.at, m.rows, m.cols) for m in b.matrices],
            )
            for b in buckets
        ]
    ) + repr(more)
    text += repr([layouts[m.param].digest for b in buckets for m in b.matrices])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

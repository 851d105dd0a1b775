"""Which rank orthogonalizes which matrix, in which bucket, and how much workspace that takes. Touches no tensor.

Every rank computes the same plan from the same layouts, so that no message is needed to agree on it. What depends on
the rank (its pieces, the bytes it sends) is derived for that rank alone (share.py): a plan of 10,000 matrices on 4096
ranks never lists all their pieces.
"""
from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial

from .balance import assign
from .cut import cut, layers_of, total
from .pace import Part
from .pipeline import SLOTS

ALIGNMENT = 16  # bytes: what one rank sends to another begins where the widest load of a GPU may begin
SLOT, BENCH = 2, 3  # how much of the workspace a slot may take, and the bench, in equal parts


@dataclass(frozen=True)
class Matrix:
    """The unit of orthogonalization: `rows` x `cols` of parameter number `param`, at the leading index `at`
    (experts).
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
    """Matrices that travel together over `ranks`, the owner of each, the name of the route that steps them, in how large
    a workspace of one rank any number of such buckets have room, and the times that are expected where they are known.
    """
    route: str
    ranks: tuple
    matrices: tuple
    owners: tuple
    nbytes: int = 0
    part: Part | None = field(default=None, compare=False)


def make_plan(layouts, cost, loads, *, reduced=True, rank_bytes=1 << 30, itemsizes=None, thrifty=False) -> list[Bucket]:
    """Layouts -> buckets, the same on every rank.

    `cost(rows, cols)`: the work of one matrix, a whole number; a Pace with measured times says also how buckets are cut
    and ordered (else they are as few as fit). `loads`: work from earlier plans of this step, by the ranks that know of
    it and by rank, updated in place; `reduced`: the gradients of plain tensors are already summed over the ranks;
    `rank_bytes`: how much workspace buckets may take of one rank (more where one matrix per owner does); `itemsizes`:
    bytes of an element on the wire, of an "update" and, where it travels, of a "row" of row state; "scratch": what a
    matrix takes while it is iterated, see `polar.scratch`; `thrifty`: take less where that costs next to no time.
    """
    families, pace = _families(layouts, reduced), cost if getattr(cost, "measured", False) else None
    owner_of, buckets = _assign(families, layouts, cost, loads), []
    for route, ranks in sorted(families, key=lambda family: (turn(family[1]), family)):
        freight = _Freight(layouts, itemsizes or {"update": 2}, route, ranks)
        layers = layers_of(families[route, ranks], owner_of, cost, freight)
        price = partial(freight.price, owner_of, pace) if pace else None
        for group in cut(layers, freight.most, rank_bytes, price, freight.held if thrifty else None):
            taken, matrices = freight.together(group)
            owners = tuple(owner_of[m] for m in matrices)
            part = pace and freight.part(matrices, owners, taken, pace)
            buckets.append(Bucket(route, ranks, matrices, owners, freight.most(taken), part))
    return buckets


def turn(ranks) -> tuple:
    """The key by which buckets are ordered in a step: those of the same ranks follow each other, on every rank."""
    return -len(ranks), ranks


def _families(layouts, reduced) -> dict:
    """(route, ranks) -> matrices whose pieces lie on the same ranks and are stepped alike."""
    families, places = defaultdict(list), {}
    for param, layout in enumerate(layouts):
        if id(layout) not in places:  # parameters of one shape and placement share their layout
            places[id(layout)] = _places(layout, reduced)
        for lead, family in places[id(layout)]:
            for at in itertools.product(*(range(a, b) for a, b in lead)):
                families[family].append(Matrix(param, at, *layout.shape[-2:]))
    return dict(families)


def _places(layout, reduced) -> list:
    """[(box of leading indices, (route, ranks))]: who stores pieces of the matrices at these indices."""
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
            found.append((lead, ("exchange" if reduced or not layout.plain else "reduce", tuple(sorted(ranks)))))
    return found


def _assign(families, layouts, cost, loads) -> dict:
    """matrix -> owner, balanced over all shapes at once (balance.py).

    Only work on layouts that all ranks of a layout have part in counts: of other work some of them know nothing. So
    the layouts of the most ranks come first. Where gradients are reduced, the owner also keeps the state, and a
    parameter has one owner for all its matrices.
    """
    owner_of, worlds = {}, defaultdict(list)
    world_of = {id(layout): layout for layout in layouts}
    world_of = {key: frozenset(layout.boxes) for key, layout in world_of.items()}
    for (route, ranks), matrices in families.items():
        for _, unit in itertools.groupby(matrices, key=lambda m: m.param if route == "reduce" else m):
            unit = list(unit)
            work = max(1, cost(unit[0].rows, unit[0].cols)) * len(unit)
            worlds[world_of[id(layouts[unit[0].param])]].append((unit[0].param, unit[0].at, ranks, work, unit))
    for world in sorted(worlds, key=lambda world: (-len(world), sorted(world))):
        units, base = sorted(worlds[world], key=lambda u: u[:2]), Counter()
        for everybody in [e for e in loads if e >= world]:
            base.update(loads[everybody])
        owners, _ = assign([(work, ranks) for _, _, ranks, work, _ in units], {r: base[r] for r in sorted(world)})
        mine = loads.setdefault(world, Counter())
        for owner, (*_, work, unit) in zip(owners, units):
            owner_of.update(dict.fromkeys(unit, owner))
            mine[owner] += work
    return owner_of


class _Freight:
    """What matrices take of the workspace: bytes by use, and by owner or, of what leaves, by the copy that is sent."""

    def __init__(self, layouts, itemsizes, route, ranks):
        self.layouts, self.update, self.row = layouts, itemsizes["update"], itemsizes.get("row", 0)
        self.scratch = itemsizes.get("scratch", lambda R, C: (0, 0, 0))
        self.route, self.ranks, self.known, self.partitions = route, ranks, {}, {}

    def sum(self, owned) -> Counter:
        """`owned`: (matrix, its owner), any number of them."""
        taken = Counter()
        for matrix, owner in owned:
            taken.update(self._one(self.layouts[matrix.param], owner))
        return taken

    def _one(self, layout, owner) -> dict:
        R, C = layout.shape[-2:]
        numel, others, (key, long, square) = R * C * self.update, len(self.ranks) - 1, self.scratch(R, C)
        held = {("held", owner): numel + ALIGNMENT, ("rows", owner): 4 * R + ALIGNMENT, ("long", owner, key): long,
                ("square", owner, key): square}
        if self.route == "local":
            return held
        if self.route == "reduce":
            return {**held, ("held", owner): held["held", owner] + 4 * (R * C + ALIGNMENT), ("leave", 0, 0): numel,
                    ("return",): numel, ("in", owner): numel * (others + 1), ("out", owner): numel * others}
        if id(layout) not in self.known:
            self.known[id(layout)] = self._pieces(layout)
        pieces, largest, whole, partition = self.known[id(layout)]
        copy, alone = layout.copy_of[owner], whole[layout.copy_of[owner]] == pieces[owner]
        return {**held, ("leave", partition, copy): 0 if alone else largest[copy], ("return",): max(largest.values()),
                ("in", owner): whole[copy] - pieces[owner], ("out", owner): sum(whole.values()) - pieces[owner]}

    def _pieces(self, layout):
        """({rank: bytes of its piece}, {copy: those of its largest}, {copy: those of all}, number of the partition)."""
        pieces, largest, whole = {}, defaultdict(int), defaultdict(int)
        for rank in self.ranks:
            (r0, r1), (c0, c1) = layout.boxes[rank][-2:]
            nbytes = (r1 - r0) * ((c1 - c0) * self.update + self.row) if c0 < c1 else 0
            pieces[rank], copy = nbytes, layout.copy_of[rank]
            largest[copy], whole[copy] = max(largest[copy], nbytes), whole[copy] + nbytes
        return pieces, largest, whole, self.partitions.setdefault(layout.copies, len(self.partitions))

    def together(self, layers):
        """(what layers take together, their matrices)."""
        return total(layers), tuple(matrix for layer in layers for matrix in layer.matrices)

    def price(self, owner_of, pace, buckets) -> float:
        """When the last of `buckets`, lists of layers, is done, in ns."""
        parts = []
        for taken, matrices in map(self.together, buckets):
            parts.append(self.part(matrices, [owner_of[m] for m in matrices], taken, pace))
        return max(span.end for span in pace.spans(parts))

    def part(self, matrices, owners, taken, pace) -> Part:
        """The times of a bucket at the rank that has the most to do.

        Per element 14 bytes for momentum and update (G, M in and out, U), 10 for the weight (W in and out, U), at home;
        4 each way to gather pieces into a matrix and to cut it, at the owner.
        """
        counts, uses = defaultdict(Counter), defaultdict(list)
        for matrix, owner in zip(matrices, owners):
            counts[owner][matrix.rows, matrix.cols] += 1
        for (use, *_), nbytes in taken.items():
            uses[use].append(nbytes)
        travels, held = self.route != "local", max(uses["held"]) / self.update
        home = max(uses["return"]) / self.update if travels else held
        products = max(map(pace.stacks, counts.values())) + pace.memory(8 * held if travels else 0)
        inbound, outbound = max(uses["in"] + uses["leave"], default=0), max(uses["out"], default=0)
        return Part(pace.memory(14 * home), pace.wire(inbound), products, pace.wire(outbound), pace.memory(10 * home),
                    travels)

    def most(self, taken) -> int:
        """The workspace in which any number of such buckets have room, on every rank."""
        return workspace(*self.memory(taken))

    def held(self, buckets) -> int:
        """The workspace that buckets, lists of layers, take of one rank at most."""
        slots, benches = zip(*(self.memory(total(bucket)) for bucket in buckets))
        turns = SLOTS if self.route != "local" else 1
        return sum(max(slots[number::turns], default=0) for number in range(turns)) + max(benches)

    def memory(self, taken) -> tuple[int, int]:
        """(bytes of a slot, bytes of the bench) of any rank at most; see `Share.places`. What leaves a rank are pieces
        to which answers return.
        """
        iterated = {"long": defaultdict(int), "square": defaultdict(int)}
        for (use, *where), nbytes in taken.items():
            if use in iterated:
                iterated[use][where[0]] = max(iterated[use][where[0]], nbytes)
        slot, bench, fixed = 0, 0, 3 * ALIGNMENT * (len(self.ranks) + 2)
        for o, square in iterated["square"].items():
            wire = taken["return",] + max(taken["in", o], taken["out", o]) + fixed
            slot = max(slot, max(wire, iterated["long"][o] + fixed) + taken["rows", o])
            bench = max(bench, square + taken["held", o] + fixed)
        return slot, bench


def workspace(slot, bench) -> int:
    """The bytes in which all buckets have room that take so many bytes of their slot and of the bench."""
    return -(-max(slot * BENCH, bench * SLOT) * (SLOTS * SLOT + BENCH) // (SLOT * BENCH))


def plan_chunks(shapes, ranks, rank_bytes, itemsizes) -> list[Bucket]:
    """Buckets of parameters that are reduced elementwise: rank number i owns the i-th part of the rows of each.

    `shapes`: (rows, the rest) of each parameter; `itemsizes`: bytes of an element, of "gradient" and "weight". A bucket
    takes some rows of every part; its Matrix says how many (`rows`), from which one on (`at`).
    """
    N, gradient, weight = len(ranks), itemsizes["gradient"], itemsizes["weight"]
    leaves, returns, fixed = N * gradient, N * weight - weight, 3 * ALIGNMENT * (N + 2)
    element = workspace(2 * max(leaves, returns), max(4, gradient))
    numel, buckets = (rank_bytes - workspace(fixed, fixed)) // element, [[]]
    for param, (rows, cols) in enumerate(shapes):
        first, last = 0, -(-rows // N) if cols else 0
        while first < last:
            room = numel - sum(m.numel for m in buckets[-1])
            if room < cols and buckets[-1]:
                buckets.append([])
                continue
            count = min(max(room // cols, 1), last - first)
            buckets[-1].append(Matrix(param, (first,), count, cols))
            first += count
    return [Bucket("reduce_elementwise", ranks, tuple(b), (), workspace(fixed, fixed) + element * sum(m.numel for m in b))
            for b in buckets if b]


def digest(buckets, layouts, *more) -> int:
    """A number that differs where two ranks' plans differ: exchanged once, instead of the plans."""
    text = repr([(b.route, b.ranks, b.matrices, b.owners) for b in buckets]) + repr(more)
    placed = {}  # a layout that parameters share is written out once
    for layout in (layouts[m.param] for b in buckets for m in b.matrices):
        if id(layout) not in placed:
            boxes = repr((layout.shape, layout.copies, sorted(layout.boxes.items()))).encode()
            placed[id(layout)] = hashlib.sha256(boxes).hexdigest()
    text += repr([placed[id(layouts[m.param])] for b in buckets for m in b.matrices])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

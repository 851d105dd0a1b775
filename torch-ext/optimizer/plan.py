"""Which rank orthogonalizes which matrix, in which bucket, and how much workspace that takes. Touches no tensor.

Every rank computes the same plan from the same layouts, so that no message is needed to agree on it. What depends on
the rank (its pieces, the bytes it sends) is derived for that rank alone (share.py): a plan of 10,000 matrices on 4096
ranks never lists all their pieces.
"""
from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass

ALIGNMENT = 16  # bytes: what one rank sends to another begins where the widest load of a GPU may begin


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
    """Matrices that travel together over `ranks`, the owner of each, the name of the route that steps them, and how
    many bytes of workspace that takes of one rank at most.
    """
    route: str
    ranks: tuple
    matrices: tuple
    owners: tuple
    nbytes: int = 0


def make_plan(layouts, cost, loads, *, reduced=True, rank_bytes=1 << 28, itemsizes=None) -> list[Bucket]:
    """Layouts -> buckets, the same on every rank.

    `cost(rows, cols)`: the work of one matrix; `loads`: work from earlier plans of this step, by the ranks that know of
    it and by rank, updated in place; `reduced`: the gradients of plain tensors are already summed over the ranks;
    `rank_bytes`: how much workspace a bucket may take of one rank (it takes more where one matrix per owner does);
    `itemsizes`: bytes of an element on the wire, of an "update" and, where it travels, of a "row" of row state.
    """
    families = _families(layouts, reduced)
    owner_of, buckets = _assign(families, layouts, cost, loads), []
    for route, ranks in sorted(families, key=lambda family: (turn(family[1]), family)):
        freight = _Freight(layouts, itemsizes or {"update": 2}, route, ranks)
        for matrices, nbytes in _rounds(families[route, ranks], owner_of, cost, freight, rank_bytes):
            buckets.append(Bucket(route, ranks, tuple(matrices), tuple(owner_of[m] for m in matrices), nbytes))
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
    """matrix -> owner: the costliest first, each to the rank with the least work (Graham's LPT rule, 1969).

    Only work on layouts that all ranks of a family have part in counts: of other work some of them know nothing.
    Where the gradients are reduced, the owner also keeps the state, and a parameter has one owner for all its
    matrices.
    """
    owner_of, units, queues = {}, [], {}
    loads_on = {id(layout): layout for layout in layouts}
    loads_on = {key: loads.setdefault(frozenset(layout.boxes), Counter()) for key, layout in loads_on.items()}
    for (route, ranks), matrices in families.items():
        for _, unit in itertools.groupby(matrices, key=lambda m: m.param if route == "reduce" else m):
            unit = list(unit)
            units.append((-cost(unit[0].rows, unit[0].cols) * len(unit), unit[0].param, unit[0].at, ranks, unit))
    for work, param, _, ranks, unit in sorted(units, key=lambda u: u[:3]):
        if ranks not in queues:
            known = [load for everybody, load in loads.items() if everybody.issuperset(ranks)]
            queues[ranks] = known, sorted((sum(load[r] for load in known), r) for r in ranks)
        owner = _lightest(*queues[ranks])
        owner_of.update(dict.fromkeys(unit, owner))
        loads_on[id(layouts[param])][owner] -= work
    return owner_of


def _lightest(loads, heap):
    """The rank with the least work. What the heap says of the one on top may be out of date: then it is renewed."""
    while (now := sum(load[heap[0][1]] for load in loads)) != heap[0][0]:
        heapq.heapreplace(heap, (now, heap[0][1]))
    return heap[0][1]


def _rounds(matrices, owner_of, cost, freight, rank_bytes):
    """Yield (matrices, bytes of workspace) of one bucket after another.

    A bucket takes the next matrix of every owner, the costliest first, as long as there is room: each has work for all.
    """
    queues = defaultdict(list)
    for matrix in sorted(matrices, key=lambda m: (-cost(m.rows, m.cols), m.rows, m.param, m.at)):
        queues[owner_of[matrix]].append(matrix)
    bucket, taken = [], Counter()
    for layer in itertools.zip_longest(*(queues[owner] for owner in sorted(queues))):
        layer = [matrix for matrix in layer if matrix is not None]
        more = freight.sum((matrix, owner_of[matrix]) for matrix in layer)
        if bucket and freight.most(taken + more) > rank_bytes:
            yield bucket, freight.most(taken)
            bucket, taken = [], Counter()
        bucket, taken = bucket + layer, taken + more
    yield bucket, freight.most(taken)


class _Freight:
    """What matrices take of the workspace: bytes by use, and by owner or, of what leaves, by the copy that is sent."""

    def __init__(self, layouts, itemsizes, route, ranks):
        self.layouts, self.update, self.row = layouts, itemsizes["update"], itemsizes.get("row", 0)
        self.route, self.ranks, self.known, self.partitions = route, ranks, {}, {}

    def sum(self, owned) -> Counter:
        """`owned`: (matrix, its owner), any number of them."""
        total = Counter()
        for matrix, owner in owned:
            total.update(self._one(self.layouts[matrix.param], owner))
        return total

    def _one(self, layout, owner) -> dict:
        R, C = layout.shape[-2:]
        numel, others = R * C * self.update, len(self.ranks) - 1
        held = {("held", owner): numel + 4 * R + ALIGNMENT}
        if self.route == "local":
            return held
        if self.route == "reduce":
            return {("held", owner): held["held", owner] + 4 * (R * C + ALIGNMENT), ("leave", 0, 0): numel,
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

    def most(self, taken) -> int:
        """The bytes of any rank at most; see `Share.needs`. What arrives and what answers share memory."""
        leave, owners = defaultdict(int), {where[0] for use, *where in taken if use == "held"}
        for (use, *where), nbytes in taken.items():
            if use == "leave":
                leave[where[0]] = max(leave[where[0]], nbytes)
        owner = max(max(taken["in", o], taken["out", o]) + taken["held", o] for o in owners)
        return owner + sum(leave.values()) + taken["return",] + 3 * ALIGNMENT * (len(self.ranks) + 2)


def plan_chunks(shapes, ranks, rank_bytes, itemsizes) -> list[Bucket]:
    """Buckets of parameters that are reduced elementwise: rank number i owns the i-th part of the rows of each.

    `shapes`: (rows, the rest) of each parameter; `itemsizes`: bytes of an element, of "gradient" and "weight". A bucket
    takes some rows of every part; its Matrix says how many (`rows`), from which one on (`at`).
    """
    N, gradient, weight = len(ranks), itemsizes["gradient"], itemsizes["weight"]
    element = N * gradient + max(N * gradient, N * weight - weight) + N * weight - weight + max(4, gradient)
    fixed = 3 * ALIGNMENT * (N + 2)
    numel, buckets = (rank_bytes - fixed) // element, [[]]
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
    return [Bucket("reduce_elementwise", ranks, tuple(b), (), fixed + element * sum(m.numel for m in b))
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

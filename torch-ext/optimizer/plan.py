"""Which rank orthogonalizes which matrix, what travels for it, and in which bucket. Touches no tensor.

Every rank computes the same plan from the same layouts, so that no message is needed to agree on it. What depends on
the rank (its pieces, the bytes it sends) is derived from the plan for that rank alone: a plan of 10,000 matrices on
4096 ranks never lists all their pieces.
"""
from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import defaultdict
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
class Piece:
    """A rectangle of a matrix: stored at its `home`, computed at its `owner`.

    `kind`: "update" (of the matrix itself), "row" (of its (R, 1) row state) or "chunk" (of a parameter that is
    reduced elementwise). `fed`: this home's copy is the one that is sent to the owner.
    """
    kind: str
    matrix: Matrix
    box: tuple
    home: int
    owner: int
    fed: bool

    @property
    def shape(self):
        return tuple(stop - start for start, stop in self.box)

    @property
    def numel(self):
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Bucket:
    """Matrices that travel together over `ranks`, the owner of each, and the name of the route that steps them."""
    route: str
    ranks: tuple
    matrices: tuple
    owners: tuple


@dataclass(frozen=True)
class Travel:
    """One direction of a bucket at one rank: piece -> byte offset in its flat buffers, and the bytes for each peer."""
    leave: dict
    arrive: dict
    send_bytes: tuple
    recv_bytes: tuple


@dataclass(frozen=True)
class Share:
    """What one rank has of a bucket: the pieces it stores, the pieces it computes, and what it sends and receives.

    `crosses_inbound`, `crosses_outbound`: whether anything travels in that direction at all, on any rank.
    """
    home: tuple
    owned: tuple
    matrices: tuple
    inbound: Travel
    outbound: Travel
    crosses_inbound: bool
    crosses_outbound: bool


def make_plan(layouts, cost, loads, *, reduced=True, owner_bytes=1 << 26, itemsize=2) -> list[Bucket]:
    """Layouts -> buckets, the same on every rank.

    `cost(rows, cols)`: the work of one matrix; `loads`: work per rank from earlier plans of this step, updated in
    place; `reduced`: the gradients of plain tensors are already summed over the ranks; `owner_bytes`: how much one
    owner takes in one bucket (at least one matrix); `itemsize`: bytes of an element on the wire.
    """
    families = _families(layouts, reduced)
    owner_of = _assign(families, cost, loads)
    buckets = []
    for route, ranks in sorted(families, key=lambda key: (-sum(m.numel for m in families[key]), key)):
        for chunk in _rounds(families[route, ranks], owner_of, owner_bytes // itemsize, cost):
            buckets.append(Bucket(route, ranks, tuple(chunk), tuple(owner_of[m] for m in chunk)))
    return buckets


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


def _assign(families, cost, loads) -> dict:
    """matrix -> owner: the costliest first, each to the rank with the least work (Graham's LPT rule, 1969).

    Where the gradients are reduced, the owner also keeps the state, and a parameter has one owner for all its
    matrices.
    """
    owner_of, units = {}, []
    for (route, ranks), matrices in families.items():
        if route == "local":
            owner_of.update(dict.fromkeys(matrices, ranks[0]))
            loads[ranks[0]] = loads.get(ranks[0], 0) + sum(cost(m.rows, m.cols) for m in matrices)
            continue
        for _, unit in itertools.groupby(matrices, key=lambda m: m.param if route == "reduce" else m):
            unit = list(unit)
            units.append((-cost(unit[0].rows, unit[0].cols) * len(unit), unit[0].param, unit[0].at, ranks, unit))
    heaps = {}
    for work, _, _, ranks, unit in sorted(units, key=lambda u: u[:3]):
        owner_of.update(dict.fromkeys(unit, _lightest(heaps, loads, ranks, -work)))
    return owner_of


def _lightest(heaps, loads, ranks, work):
    """The rank with the least work, which then has `work` more. Several heaps share the loads: stale entries are
    renewed.
    """
    if ranks not in heaps:
        heaps[ranks] = [(loads.get(r, 0), r) for r in ranks]
        heapq.heapify(heaps[ranks])
    heap = heaps[ranks]
    while heap[0][0] != loads.get(heap[0][1], 0):
        heapq.heapreplace(heap, (loads.get(heap[0][1], 0), heap[0][1]))
    load, rank = heap[0]
    loads[rank] = load + work
    heapq.heapreplace(heap, (load + work, rank))
    return rank


def _rounds(matrices, owner_of, owner_numel, cost):
    """Yield the matrices of one bucket after another: in each, every owner takes up to `owner_numel` elements."""
    queues = defaultdict(list)
    for matrix in sorted(matrices, key=lambda m: (-cost(m.rows, m.cols), m.rows, m.param, m.at)):
        queues[owner_of[matrix]].append(matrix)
    rounds = defaultdict(list)
    for owner in sorted(queues):
        number, numel = 0, 0
        for matrix in queues[owner]:
            if numel and numel + matrix.numel > owner_numel:
                number, numel = number + 1, 0
            rounds[number].append(matrix)
            numel += matrix.numel
    yield from (rounds[i] for i in sorted(rounds))


def share_of(bucket, rank, layouts, row_layouts, itemsizes) -> Share:
    """What `rank` has of `bucket`. `itemsizes`: piece kind -> bytes; `row_layouts`: None without row state."""
    travelling = list(_pieces_at(bucket, rank, layouts, "update"))
    rows = list(_pieces_at(bucket, rank, row_layouts, "row")) if row_layouts else []
    reduce = bucket.route == "reduce"
    if reduce:  # the state lives at the owner
        pieces = [p for p in rows if p.home == p.owner == rank] + travelling
    else:
        pieces = travelling = rows + travelling
    fed = [p for p in travelling if p.fed]
    whole = all(_stored_whole(layouts[param], bucket.ranks) for param in {m.param for m in bucket.matrices})
    return Share(
        home=tuple(p for p in pieces if p.home == rank),
        owned=tuple(p for p in pieces if p.owner == rank),
        matrices=tuple(m for m, owner in zip(bucket.matrices, bucket.owners) if owner == rank),
        inbound=travel(fed, "home", "owner", rank, bucket.ranks, itemsizes, with_self=reduce),
        outbound=travel(travelling, "owner", "home", rank, bucket.ranks, itemsizes),
        crosses_inbound=reduce or not whole,
        crosses_outbound=bucket.route != "local")


def _stored_whole(layout, ranks) -> bool:
    """Whether each of `ranks` holds a copy of its own, so that its owner needs nothing from the others."""
    return len({layout.copy_of[r] for r in ranks}) == len(ranks)


def _pieces_at(bucket, rank, layouts, kind):
    """The pieces that `rank` stores or computes, in the order that both ends of every wire know: matrices, then
    homes.
    """
    for matrix, owner in zip(bucket.matrices, bucket.owners):
        layout = layouts[matrix.param]
        for home in bucket.ranks if owner == rank else (rank,):
            box = layout.boxes[home][-2:]
            if all(a < b for a, b in box):
                fed = bucket.route == "reduce" or layout.copy_of[home] == layout.copy_of[owner]
                yield Piece(kind, matrix, box, home, owner, fed)


def travel(pieces, source, target, rank, ranks, itemsizes, with_self=False) -> Travel:
    """Lay out one direction of travel in flat buffers: by peer, then row state first, then in the order of the plan."""
    pieces = [p for p in pieces if with_self or p.home != p.owner]
    leave, send = _lay_out([p for p in pieces if getattr(p, source) == rank], target, ranks, itemsizes)
    arrive, recv = _lay_out([p for p in pieces if getattr(p, target) == rank], source, ranks, itemsizes)
    return Travel(leave, arrive, send, recv)


def _lay_out(pieces, end, ranks, itemsizes):
    """({piece: byte offset}, bytes per peer). A peer's part is a multiple of ALIGNMENT; wider elements come first in
    it.
    """
    parts, offsets, sizes, at = defaultdict(list), {}, [], 0
    for piece in pieces:
        parts[getattr(piece, end)].append(piece)
    for peer in ranks:
        start = at
        for piece in sorted(parts.get(peer, ()), key=lambda p: -itemsizes[p.kind]):
            offsets[piece] = at
            at += piece.numel * itemsizes[piece.kind]
        at += -at % ALIGNMENT
        sizes.append(at - start)
    return offsets, tuple(sizes)


def chunk_share(shapes, ranks, rank, itemsizes) -> Share:
    """What `rank` has where whole parameters are reduced elementwise: rank number i owns the i-th chunk of the rows
    of each.

    `shapes`: (rows, the rest) of each parameter. `itemsizes`: "gradient" and "weight" -> bytes.
    """
    pieces = []
    for param, (rows, cols) in enumerate(shapes):
        step = -(-rows // len(ranks))
        for i, owner in enumerate(ranks):
            box = ((min(i * step, rows), min((i + 1) * step, rows)), (0, cols))
            matrix = Matrix(param, (i,), box[0][1] - box[0][0], cols)
            homes = ranks if owner == rank else (rank,)
            pieces += [Piece("chunk", matrix, box, home, owner, True) for home in homes if matrix.numel]
    inbound = travel(pieces, "home", "owner", rank, ranks, {"chunk": itemsizes["gradient"]}, with_self=True)
    outbound = travel(pieces, "owner", "home", rank, ranks, {"chunk": itemsizes["weight"]})
    home = tuple(p for p in pieces if p.home == rank)
    return Share(home, tuple(p for p in pieces if p.owner == rank),
                 tuple(p.matrix for p in home if p.owner == rank), inbound, outbound, True, True)


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

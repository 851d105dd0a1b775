"""What one rank has of a bucket: its pieces, and the offsets of its all-to-all buffers. Touches no
tensor.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from .memory_model import ALIGNMENT, parts
from .plan import OWNER_STATE_KINDS, Matrix


@dataclass(frozen=True)
class Piece:
    """A rectangle of a matrix: stored at its `home`, computed at its `owner`.

    `kind`: "update" (of the matrix itself), "row" (of its (R, 1) row state) or "chunk" (of a
    parameter that is reduced elementwise). `fed`: this home's copy is the one that is sent to the
    owner.
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
class AllToAllPlan:
    """One direction of a bucket at one rank: piece -> byte offset in its flat buffers, the bytes
    for each peer, and where they begin: what several peers get leaves from one place.
    """

    leave: dict
    arrive: dict
    send_bytes: tuple
    recv_bytes: tuple
    send_from: tuple

    @property
    def leaving(self) -> int:
        """The bytes of memory of all that leaves."""
        return max(map(sum, zip(self.send_from, self.send_bytes)), default=0)


@dataclass(frozen=True)
class RankPlan:
    """What one rank has of a bucket: the pieces it stores, the pieces it computes, and what it
    sends and receives.

    `crosses_inbound`, `crosses_outbound`: whether anything travels in that direction at all, on any
    rank; `copies`: whether the same goes to several ranks, and leaves from one place. `needs`: use
    -> bytes of workspace, see `places`. `kept`: pieces that are stored and computed here -> byte
    offset. `direct`: those of `matrices` that are read where their pieces arrived and are kept, and
    written where these leave from.
    """

    home: tuple
    owned: tuple
    matrices: tuple
    inbound: AllToAllPlan
    outbound: AllToAllPlan
    crosses_inbound: bool
    crosses_outbound: bool
    copies: bool
    needs: dict
    kept: dict
    direct: frozenset = frozenset()

    def places(self) -> tuple[dict, dict]:
        """({use: (memory, first byte)}, {memory: bytes}). The "slot" is the bucket's own from its
        first part to its last, the "bench" is for the one that is being computed.

        What leaves has left before answers return to its place, and what arrives is copied before
        answers leave from where it was; in between, while matrices are multiplied, both are free
        for what is iterated ("now", "next"). Where matrices are `direct`, only what has left is
        free. What was computed and is applied at the end stays in the slot: answers of matrices
        that leave ("kept"), and what is reduced ("stays").
        """
        size = {use: nbytes + -nbytes % ALIGNMENT for use, nbytes in self.needs.items()}
        if self.direct:
            kept, bench = (
                max(size["leave"], size["return"], size["next"]),
                ("square", "now", "stack", "mean"),
            )
            slot = {"leave": 0, "return": 0, "next": 0, "kept": kept, "arrive": kept + size["kept"]}
            wire = slot["arrive"] + size["arrive"]
        else:
            home, bench = (
                max(size["leave"], size["return"] + size["kept"]),
                ("square", "stack", "mean"),
            )
            slot = {
                "leave": 0,
                "return": 0,
                "kept": size["return"],
                "arrive": home,
                "now": 0,
                "next": size["now"],
            }
            wire = max(home + size["arrive"], size["now"] + size["next"])
        slot |= {"rows": wire, "stays": wire + size["rows"]}
        on_bench = zip(bench, itertools.accumulate((size[use] for use in bench), initial=0))
        found = {use: ("slot", at) for use, at in slot.items()} | {
            use: ("bench", at) for use, at in on_bench
        }
        return found, {
            "slot": slot["stays"] + size["stays"],
            "bench": sum(size[use] for use in bench),
        }


def share_of(bucket, rank, layouts, row_layouts, terms) -> RankPlan:
    """What `rank` has of `bucket`. `terms`: as in `make_plan`; `row_layouts`: None without row
    state.
    """
    travelling = list(_pieces_at(bucket, rank, layouts, "update"))
    rows = list(_pieces_at(bucket, rank, row_layouts, "row")) if row_layouts else []
    reduce = bucket.route == "reduce"
    if bucket.route in OWNER_STATE_KINDS:
        pieces = [p for p in rows if p.home == p.owner == rank] + travelling
    else:
        pieces = travelling = rows + travelling
    fed = [p for p in travelling if p.fed]
    copies = _copies(bucket, layouts)
    matrices = tuple(m for m, owner in zip(bucket.matrices, bucket.owners) if owner == rank)
    inbound = travel(fed, ("home", "owner"), rank, bucket.ranks, terms.itemsizes, with_self=reduce)
    outbound = travel(
        travelling, ("owner", "home"), rank, bucket.ranks, terms.itemsizes, terms.once
    )
    here = [
        p
        for p in travelling
        if p.home == p.owner == rank and p.kind == "update" and bucket.route != "local"
    ]
    kept, (nbytes,), _ = _lay_out(here, "home", (rank,), terms.itemsizes)
    needs = _needs(inbound, outbound, nbytes) | _iterated(matrices, terms)
    if reduce:
        needs["stays"] = _of_mean(inbound, terms.update)
    share = RankPlan(
        home=tuple(p for p in pieces if p.home == rank),
        owned=tuple(p for p in pieces if p.owner == rank),
        matrices=matrices,
        inbound=inbound,
        outbound=outbound,
        crosses_inbound=reduce or min(copies) < len(bucket.ranks),
        crosses_outbound=bucket.route != "local",
        copies=terms.once and max(copies) > 1,
        needs={
            **needs,
            "stack": _stacked(matrices, terms),
            "rows": sum(4 * m.rows for m in matrices),
        },
        kept=kept,
    )
    room = bucket.memory if terms.room is None else parts(max(terms.room, bucket.nbytes))
    if bucket.route in ("exchange", "own"):
        share = _in_pieces(share, room, terms)
    return _side_by_side(share, room, terms)


def _in_pieces(share, room, terms) -> RankPlan:
    """The share with its `direct` matrices: those that are cut into whole rows, by all copies
    alike, all at multiples of ALIGNMENT. As it is where (slot, bench) have no `room` for that, or
    where answers would leave from where matrices that are iterated later still lie.
    """
    read, leave, whole = share.inbound.arrive | share.kept, share.outbound.leave, set()
    boxes = {(p.matrix, p.box) for p in read}
    for p in [p for p in share.owned if p.kind == "update"]:
        numbers = p.matrix.cols * terms.update, read.get(p, 0), leave.get(p, 0)
        if (
            p.shape[1] < p.matrix.cols
            or (p.matrix, p.box) not in boxes
            or any(n % ALIGNMENT for n in numbers)
        ):
            whole.add(p.matrix)
    matrices = frozenset(
        m for m in share.matrices if m not in whole and terms.splits(m.rows, m.cols)
    )
    keys = {terms.scratch(m.rows, m.cols)[0] for m in matrices}
    if len(keys) > 1 and any(leave[p] != at for p, at in share.inbound.arrive.items()):
        return share
    stack = _stacked([m for m in share.matrices if m not in matrices], terms)
    return _if_it_fits(
        replace(share, direct=matrices, needs=share.needs | {"stack": stack}), room, share
    )


def _side_by_side(share, room, terms) -> RankPlan:
    """The share with memory for all of its iterations together, where they gain by that. As it is
    where (slot, bench) have no `room` for that.
    """
    shapes = [sorted((m.rows, m.cols)) for m in share.matrices]
    if not shapes or not terms.side_by_side(shapes):
        return share
    return _if_it_fits(
        replace(share, needs=share.needs | _iterated(share.matrices, terms, sum)), room, share
    )


def _if_it_fits(wanted, room, share) -> RankPlan:
    sizes = wanted.places()[1]
    return wanted if sizes["slot"] <= room[0] and sizes["bench"] <= room[1] else share


def _stacked(matrices, terms) -> int:
    """Bytes of whole matrices, one stack for each shape."""
    return sum(m.numel * terms.update + ALIGNMENT for m in matrices)


def _copies(bucket, layouts) -> list:
    """How many copies of its parameters the ranks of a bucket hold together, for each layout that
    there is.
    """
    known = {id(layouts[m.param]): layouts[m.param] for m in bucket.matrices}
    return [len(set(map(layout.copy_of.__getitem__, bucket.ranks))) for layout in known.values()]


def _needs(inbound, outbound, kept=0):
    return {
        "leave": inbound.leaving,
        "return": sum(outbound.recv_bytes),
        "kept": kept,
        "arrive": max(sum(inbound.recv_bytes), outbound.leaving),
        **dict.fromkeys(("rows", "stays", "stack", "now", "next", "square", "mean"), 0),
    }


def _of_mean(inbound, itemsize):
    """Bytes of what arrives from every rank, averaged in fp32 or wider; `itemsize`: of an element
    that arrives.
    """
    return inbound.recv_bytes[0] // itemsize * max(4, itemsize)


def _iterated(matrices, terms, together=max):
    """Bytes of the iteration's stacks, see `method.scratch_bytes`; `together`: max for keys that
    share them, or sum.
    """
    long, square = Counter(), Counter()
    for matrix in matrices:
        key, *nbytes = terms.scratch(matrix.rows, matrix.cols)
        long[key], square[key] = long[key] + nbytes[0], square[key] + nbytes[1]
    half = together([*long.values(), 0]) // 2
    return {"now": half, "next": half, "square": together([*square.values(), 0])}


def _pieces_at(bucket, rank, layouts, kind):
    """The pieces that `rank` stores or computes, in the order that both ends of every wire know:
    matrices, then homes, then parts of an interleaved dim.
    """
    for matrix, owner in zip(bucket.matrices, bucket.owners):
        layout = layouts[matrix.param]
        for home in bucket.ranks if owner == rank else (rank,):
            fed = bucket.route == "reduce" or layout.copy_of[home] == layout.copy_of[owner]
            boxes = [part[-2:] for part in layout.parts_of(home)]
            for box in [box for box in boxes if all(a < b for a, b in box)]:
                yield Piece(kind, matrix, box, home, owner, fed)


def travel(pieces, ends, rank, ranks, itemsizes, once=False, with_self=False) -> AllToAllPlan:
    """Lay out one direction of travel in flat buffers: by peer, then row state first, then in the
    order of the plan.

    `ends`: ("home", "owner") or ("owner", "home"); `itemsizes`: kind of a piece -> bytes of an
    element.
    """
    source, target = ends
    pieces = [p for p in pieces if with_self or p.home != p.owner]
    mine = [p for p in pieces if getattr(p, source) == rank]
    leave, send, starts = _lay_out(mine, target, ranks, itemsizes, once)
    arrive, recv, _ = _lay_out(
        [p for p in pieces if getattr(p, target) == rank], source, ranks, itemsizes
    )
    return AllToAllPlan(leave, arrive, send, recv, starts)


def _lay_out(pieces, end, ranks, itemsizes, once=False):
    """({piece: byte offset}, bytes per peer, their first). A peer's part is a multiple of
    ALIGNMENT; wider elements come first in it. `once`: parts of peers that get the same lie in one
    place.
    """
    parts, offsets, free, known = defaultdict(list), {}, 0, {}
    sizes, starts = ([0] * len(ranks) for _ in range(2))
    for piece in pieces:
        parts[getattr(piece, end)].append(piece)
    # Of thousands, most have no part
    for i in itertools.compress(itertools.count(), map(parts.__contains__, ranks)):
        part = sorted(parts[ranks[i]], key=lambda p: -itemsizes[p.kind])
        what = tuple((p.kind, p.matrix, p.box) for p in part) if once else i
        at = starts[i] = known.setdefault(what, free)
        for piece in part:
            offsets[piece] = at
            at += piece.numel * itemsizes[piece.kind]
        at += -at % ALIGNMENT
        sizes[i], free = at - starts[i], max(free, at)
    return offsets, tuple(sizes), tuple(starts)


def chunk_share(bucket, shapes, rank, terms) -> RankPlan:
    """What `rank` has of a bucket of `plan_chunks`; the same `shapes` and `terms`."""
    pieces, ranks = [], bucket.ranks
    for matrix in [m for m in bucket.matrices if m.numel]:
        rows = shapes[matrix.param][0]
        for i, owner in enumerate(ranks):
            start = i * -(-rows // len(ranks)) + matrix.at[0]
            box = (start, min(start + matrix.rows, rows)), (0, matrix.cols)
            homes = ranks if owner == rank else (rank,)
            pieces += [
                Piece("chunk", matrix, box, home, owner, True) for home in homes if start < rows
            ]
    home, owned = ([p for p in pieces if getattr(p, end) == rank] for end in ("home", "owner"))
    mine, gradient = [p for p in owned if p.home == rank], {"chunk": terms.gradient}
    inbound = travel(
        [] if terms.reduced else pieces, ("home", "owner"), rank, ranks, gradient, with_self=True
    )
    outbound = travel(pieces, ("owner", "home"), rank, ranks, {"chunk": terms.weight}, terms.once)
    kept, (nbytes,), _ = _lay_out(mine if terms.reduced else [], "home", (rank,), gradient)
    stays = 3 * ALIGNMENT + sum(p.numel for p in mine) * (terms.weight + 2 * terms.state)
    needs = _needs(inbound, outbound, nbytes) | {
        "mean": _of_mean(inbound, terms.gradient),
        "stays": stays,
    }
    return RankPlan(
        tuple(home),
        tuple(owned),
        (),
        inbound,
        outbound,
        not terms.reduced,
        True,
        terms.once,
        needs,
        kept,
    )

"""Workspace bytes that matrices take while they travel and while they are orthogonalized. Touches
no tensor.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from ..pipeline import SLOTS
from .cost_model import BucketTimes


@dataclass(frozen=True)
class Round:
    """One matrix of every owner that still has one, and what they take of the workspace
    together.
    """

    matrices: tuple
    taken: Counter


def total(layers) -> Counter:
    """What layers take of the workspace together."""
    taken = Counter(layers[0].taken)
    for layer in layers[1:]:
        taken.update(layer.taken)
    return taken


# Bytes: what one rank sends to another begins where the widest load of a GPU may begin
ALIGNMENT = 16
# Route -> read and written of an element in fp32: where it leaves, at its owner, where its update
# lands
BYTES = {
    "local": (14, 0, 10),  # G, M in and out, U | - | W in and out, U
    # G, M, U | pieces gathered into a matrix, and it cut | W, M in and out, G, U
    "exchange": (10, 8, 22),
    "own": (10, 8, 10),  # as in an exchange, but momentum stays with its owner
    # G, out | what arrives, averaged; as in an exchange, with momentum | W in and out, U
    "reduce": (6, 38, 10),
}
# Of SLOTS * SLOT + BENCH equal parts of the workspace, those of each slot, and of the bench
SLOT, BENCH = 2, 3


def workspace(slot, bench) -> int:
    """The bytes of the smallest workspace whose slots and bench, cut as above, have room for so
    many bytes each.
    """
    return -(-max(slot * BENCH, bench * SLOT) * (SLOTS * SLOT + BENCH) // (SLOT * BENCH))


def parts(nbytes) -> tuple[int, int]:
    """(bytes of a slot, bytes of the bench) of such a workspace."""
    return nbytes * SLOT // (SLOTS * SLOT + BENCH), nbytes * BENCH // (SLOTS * SLOT + BENCH)


def _no_scratch(R, C):
    return (0, 0, 0)


def _never(*_):
    return False


@dataclass(frozen=True)
class PlanInputs:
    """What a plan of matrices rests on, beside their layouts and what they cost. `update`, `row`:
    bytes of an element on the wire, and of a number of row state, 0 where none travels; `once`:
    whether what goes to several ranks leaves from one place; `scratch`: what a matrix takes while
    it is iterated, see `method.scratch_bytes`; `splits`: whether it may be in pieces, see
    `method.supports_scattered_rows`;
    `side_by_side`: whether several gain by memory of their own, see `iteration.gain_side_by_side`;
    `room`: the workspace that there may be for these two, None for what others take.
    """

    update: int = 2
    row: int = 0
    once: bool = False
    scratch: Callable = _no_scratch
    splits: Callable = _never
    side_by_side: Callable = _never
    room: int | None = None

    @property
    def itemsizes(self) -> dict:
        """Kind of a piece -> bytes of an element on the wire."""
        return {"update": self.update, "row": self.row}


@dataclass(frozen=True)
class ChunkPlanInputs:
    """The same for parameters that are cut into rows. `gradient`, `weight`, `state`: bytes of an
    element; `reduced`: whether gradients come reduced, so that none travel.
    """

    gradient: int
    weight: int
    state: int
    once: bool = False
    reduced: bool = False


@dataclass(frozen=True)
class MatrixFootprint:
    """What one matrix takes, in bytes: of its owner, down to `key`, and of every other rank."""

    inbound: int  # arrives at its owner
    outbound: int  # leaves its owner again
    # Of its memory, from which it leaves: ranks that hold the same may get it from one place
    spread: int
    held: int  # on the bench: the matrix
    stays: int  # in the slot: a number for each row, and the mean where gradients are reduced
    long: int  # in the slot, while it is iterated
    square: int  # on the bench, while it is iterated
    key: object  # matrices of one key are iterated at once, see `method.scratch_bytes`
    leaves: int  # the largest piece that goes to the owner
    copy: tuple  # whose pieces these are: (number of the partition, number of the copy)
    returns: int  # the largest piece that comes back


class MemoryModel:
    """What matrices of one family take together; Counters of (owner, number of a layout) stand for
    them.
    """

    def __init__(self, layouts, terms, route, ranks):
        self.update, self.row, self.scratch = (
            terms.update,
            terms.row * (route != "own"),
            terms.scratch,
        )
        self.route, self.ranks, self.layouts = route, ranks, layouts
        self.forms, self.numbers, self.loads, self.partitions = [], {}, {}, {}
        self.once = terms.once
        self.alike = self._alike({id(layout): layout for layout in layouts}.values())

    def _alike(self, layouts) -> dict:
        """rank -> the ranks that hold the same as it of all these layouts, where they can meet in
        one bucket, if what they get leaves once.
        """
        if not self.once:
            return {rank: [rank] for rank in self.ranks}
        layouts, alike = (
            [x for x in layouts if all(rank in x.boxes for rank in self.ranks)],
            defaultdict(list),
        )
        for rank in self.ranks:
            alike[tuple(x.boxes[rank][-2:] for x in layouts)].append(rank)
        return {rank: ranks for ranks in alike.values() for rank in ranks}

    def sum(self, owned) -> Counter:
        """`owned`: (matrix, its owner), any number of them."""
        return Counter((owner, self._number(self.layouts[matrix.param])) for matrix, owner in owned)

    def _number(self, layout):
        if id(layout) not in self.numbers:
            self.numbers[id(layout)] = len(self.forms)
            self.forms.append((layout, self.scratch(*layout.shape[-2:]), *self._pieces(layout)))
        return self.numbers[id(layout)]

    def _pieces(self, layout):
        """({rank: bytes of its piece}, {copy: those of its largest}, {copy: those of all}, those of
        pieces that differ, number of the partition).
        """
        pieces, largest, whole = {}, defaultdict(int), defaultdict(int)
        for rank in self.ranks if self.route in ("exchange", "own") else ():
            (r0, r1), (c0, c1) = layout.boxes[rank][-2:]
            nbytes = (r1 - r0) * ((c1 - c0) * self.update + self.row) if c0 < c1 else 0
            pieces[rank], copy = nbytes, layout.copy_of[rank]
            largest[copy], whole[copy] = max(largest[copy], nbytes), whole[copy] + nbytes
        places = sum(nbytes for rank, nbytes in pieces.items() if self.alike[rank][0] == rank)
        return (
            pieces,
            largest,
            whole,
            places,
            self.partitions.setdefault(layout.copies, len(self.partitions)),
        )

    def _load(self, owner, number) -> MatrixFootprint:
        if (owner, number) in self.loads:
            return self.loads[owner, number]
        layout, (key, long, square), pieces, largest, whole, places, partition = self.forms[number]
        R, C = layout.shape[-2:]
        numel, others = R * C * self.update, len(self.ranks) - 1
        inbound = outbound = spread = leaves = copy = returns = 0
        held, stays = numel + ALIGNMENT, 4 * R + ALIGNMENT
        if self.route == "reduce":
            stays += 4 * (R * C + ALIGNMENT)
            inbound, outbound, leaves, returns = numel * (others + 1), numel * others, numel, numel
            spread = numel if self.once else outbound
        elif self.route != "local":
            copy, here = layout.copy_of[owner], pieces[owner]
            inbound, outbound = whole[copy] - here, sum(whole.values()) - here
            spread = places if len(self.alike[owner]) > 1 else places - here
            leaves, returns = largest[copy] if inbound else 0, max(largest.values())
        load = MatrixFootprint(
            inbound,
            outbound,
            spread,
            held,
            stays,
            long,
            square,
            key,
            leaves,
            (partition, copy),
            returns,
        )
        return self.loads.setdefault((owner, number), load)

    def _together(self, taken):
        """({owner: [inbound, outbound, spread, held, stays]}, {(owner, key): [long, square]},
        {copy: leaving}, returning).
        """
        owners, iterated, leaves, returns = {}, {}, Counter(), 0
        for (owner, number), count in taken.items():
            load = self._load(owner, number)
            if owner not in owners:
                owners[owner] = [0, 0, 0, 0, 0]
            if (owner, load.key) not in iterated:
                iterated[owner, load.key] = [0, 0]
            mine, stacks = owners[owner], iterated[owner, load.key]
            mine[0] += count * load.inbound
            mine[1] += count * load.outbound
            mine[2] += count * load.spread
            mine[3] += count * load.held
            mine[4] += count * load.stays
            stacks[0] += count * load.long
            stacks[1] += count * load.square
            leaves[load.copy] += count * load.leaves
            returns += count * load.returns
        return owners, iterated, leaves, returns

    def price(self, owner_of, pace, buckets) -> float:
        """When the last of `buckets`, lists of layers, is done, in ns."""
        parts = []
        for bucket in buckets:
            matrices = [matrix for layer in bucket for matrix in layer.matrices]
            parts.append(self.part(matrices, [owner_of[m] for m in matrices], total(bucket), pace))
        return max(span.end for span in pace.spans(parts))

    def part(self, matrices, owners, taken, pace) -> BucketTimes:
        """The times of a bucket at the rank that has the most to do; see `BYTES`."""
        counts, (at_owners, _, leaves, returns) = defaultdict(Counter), self._together(taken)
        for matrix, owner in zip(matrices, owners):
            counts[owner][matrix.rows, matrix.cols] += 1
        inbound, outbound, _, held, _ = (max(nbytes) for nbytes in zip(*at_owners.values()))
        travels, (leave, gather, land) = self.route != "local", BYTES[self.route]
        inbound, away = max(inbound, *leaves.values()), max(leaves.values()) if travels else held
        gathered = gather * held / self.update + (inbound if self.route == "reduce" else 0)
        # Most owners have the same
        distinct = {frozenset(shapes.items()): shapes for shapes in counts.values()}
        products = max(map(pace.stacks, distinct.values())) + pace.memory(gathered)
        return BucketTimes(
            pace.memory(leave * away / self.update),
            pace.wire(inbound),
            products,
            pace.wire(outbound),
            pace.memory(land * (returns if travels else held) / self.update),
            travels,
        )

    def workspace_for(self, taken) -> int:
        """The workspace in which any number of buckets that take this have room, on every rank."""
        return workspace(*self.memory(taken))

    def bytes_together(self, buckets) -> int:
        """The workspace that these buckets, lists of layers, take of one rank at most: every slot
        and the bench are as large as the largest that uses them.
        """
        slots, benches = zip(*(self.memory(total(bucket)) for bucket in buckets))
        turns = SLOTS if self.route != "local" else 1
        return sum(max(slots[number::turns], default=0) for number in range(turns)) + max(benches)

    def memory(self, taken) -> tuple[int, int]:
        """(bytes of a slot, bytes of the bench) of any rank at most; see `RankPlan.places`. What
        leaves a rank are pieces to which answers return.
        """
        owners, iterated, _, returns = self._together(taken)
        slot, bench, fixed = 0, 0, 3 * ALIGNMENT * (len(self.ranks) + 2)
        for (owner, _), (long, square) in iterated.items():
            inbound, _, spread, held, stays = owners[owner]
            slot = max(slot, returns + inbound + stays, returns + spread + stays, long + stays)
            bench = max(bench, square + held)
        return slot + fixed, bench + fixed

"""Memory model: bytes of the workspace that the buckets of a family take on every rank.

`MemoryModel` sums the footprints of matrices, from layouts alone, for any owners. `PlanInputs` and
`ChunkPlanInputs` hold the sizes and options of a plan. `workspace_bytes` and `split_workspace`
convert between a workspace and the bucket buffers and shared scratch in the workspace. Touches no
tensor.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..pipeline import BUCKETS_IN_FLIGHT
from ..rules.rule import shape_per
from .cost_model import BucketTimes, CostModel

if TYPE_CHECKING:
    from ..params.layout import Layout

# Bytes. The data of each peer in an all-to-all buffer begins at a multiple, and so does every row
# of a matrix that is read where it arrived. The widest load of a GPU, and a TMA address, need 16.
ALIGNMENT = 16

# Bytes of an element of state and of a sent number, in fp32, at the owner and in the all-to-alls;
# of a weight as well, unless a rule takes weights in wire_dtype
WIDE_BYTES = 4

# Route -> bytes read and written per element outside Newton-Schulz, of fp32 parameters and bf16
# U and O: (before the inbound all-to-all, at the owner, after the outbound all-to-all). G:
# gradient, M: momentum, U: update, O: orthogonalized update, W: weight.
ELEMENT_BYTES = {
    # G, M in and out, U | nothing | W in and out, O
    "local": (14, 0, 10),
    # G, M, U | pieces copied into whole matrices and back | W, M in and out, G, O
    "exchange": (10, 8, 22),
    # As "exchange", but momentum is stored at the owner
    "own": (10, 8, 10),
    # G, copy of G | mean of what arrives, then as "exchange" with momentum | W in and out, O
    "reduce": (6, 38, 10),
}

# Division of a workspace: each of BUCKETS_IN_FLIGHT bucket buffers gets BUFFER_PARTS equal parts,
# the shared scratch gets SCRATCH_PARTS. With a fixed division the workspace that a bucket wants
# depends on the bucket alone.
BUFFER_PARTS, SCRATCH_PARTS = 2, 3


class MatrixLike(Protocol):
    """The attributes of `plan.Matrix`. plan.py imports modules that need the type."""

    param: int
    at: tuple[int, ...]
    rows: int
    cols: int
    unit: int
    numel: int
    iterated_shape: tuple[int, int]


@dataclass(frozen=True)
class Round:
    """At most a matrix per owner, and the sum of the matrices' footprints.

    `taken`: Counter of (owner, number of a layout in the MemoryModel), see `MemoryModel.sum`.
    """

    matrices: tuple[MatrixLike, ...]
    taken: Counter


def total(rounds: Sequence[Round]) -> Counter:
    """Return the sum of `taken` over one or more rounds."""
    taken = Counter(rounds[0].taken)
    for one in rounds[1:]:
        taken.update(one.taken)
    return taken


def workspace_bytes(bucket_buffer: int, shared_scratch: int) -> int:
    """Return the bytes of the smallest workspace with room for the given bytes of each bucket
    buffer and of the shared scratch; inverse of `split_workspace`.
    """
    all_parts = BUCKETS_IN_FLIGHT * BUFFER_PARTS + SCRATCH_PARTS
    larger = max(bucket_buffer * SCRATCH_PARTS, shared_scratch * BUFFER_PARTS)
    return -(-larger * all_parts // (BUFFER_PARTS * SCRATCH_PARTS))


def split_workspace(nbytes: int) -> tuple[int, int]:
    """Return (bytes of each bucket buffer, bytes of the shared scratch) of a workspace."""
    all_parts = BUCKETS_IN_FLIGHT * BUFFER_PARTS + SCRATCH_PARTS
    return nbytes * BUFFER_PARTS // all_parts, nbytes * SCRATCH_PARTS // all_parts


def _no_scratch(R: int, C: int) -> tuple[object, int, int]:
    """Default of `PlanInputs.scratch`: no matrix needs scratch."""
    return (0, 0, 0)


def never(*_: object) -> bool:
    """Default of `PlanInputs.side_by_side`: False."""
    return False


@dataclass(frozen=True)
class PlanInputs:
    """Sizes and options of a plan of matrices, besides layouts and costs. Equal on all ranks."""

    element: int = 2  # bytes of an element of U and O in the all-to-alls (`wire_dtype`)
    # State that owners read: key -> whether it has a number for each "element", "row", "column" or
    # "matrix"
    state: Mapping[str, str] = field(default_factory=dict)
    # Numbers that owners send with O: [(name, "row", "column" or "matrix")]
    sends: tuple[tuple[str, str], ...] = ()
    weight: int = 0  # bytes of an element of the weight at the owner; 0: the owner needs no weight
    # Data for several ranks is sent from one copy in the send buffer
    once: bool = False
    # (R, C) -> (key, bytes of scratch_a and scratch_b, bytes of gram_scratch), see
    # `method.scratch_bytes`
    scratch: Callable[[int, int], tuple[object, int, int]] = _no_scratch
    # (R, C) -> whether Newton-Schulz can read the matrix as scattered rows, see
    # `method.supports_scattered_rows`; None: the rule reads no scattered rows
    supports_scattered_rows: Callable[[int, int], bool] | None = None
    # [(short side, long side)] -> whether iterations of several shapes gain by scratch of their
    # own, see `method.gain_side_by_side`
    side_by_side: Callable[[list], bool] = never
    # Bytes of the workspace up to which scattered rows and scratch of each shape may be used; None:
    # only where neither takes further memory
    rank_bytes: int | None = None
    # Whether owners store the state of DTensors that they read: then the state is not sent
    state_at_owners: bool = False

    def owner_stores(self, layout: Layout) -> bool:
        """Whether the owner of a matrix stores the matrix's state, whatever `layout` says. False
        for plain parameters, whose state every rank has: see the option shard_state.
        """
        return self.state_at_owners and not layout.plain

    @property
    def has_direct(self) -> bool:
        """Whether matrices may be direct, see [Note: direct matrices] in rank_plan.py."""
        return self.supports_scattered_rows is not None

    @property
    def itemsizes(self) -> dict[str, int]:
        """Kind of a piece -> bytes of an element in the all-to-all."""
        kinds = [*self.state, *(sent_kind(name) for name, _ in self.sends)]
        own = {"matrix": self.element, "weight": self.weight or WIDE_BYTES}
        return {**own, **dict.fromkeys(kinds, WIDE_BYTES)}

    def wide_bytes(self, R: int, C: int) -> int:
        """Bytes at the owner of state, weight and sent numbers of an (R, C) matrix, each rounded up
        to ALIGNMENT: an upper bound of the share in a stack.
        """
        of, itemsizes = self.wide.items(), self.itemsizes
        sizes = [itemsizes[kind] * math.prod(shape_per(per, R, C)) for kind, per in of]
        return sum(nbytes + -nbytes % ALIGNMENT for nbytes in sizes)

    @functools.cached_property
    def wide(self) -> dict[str, str]:
        """Kind -> `per` of all tensors that an owner has beside U and O."""
        weight = {"weight": "element"} if self.weight else {}
        return {**self.state, **weight, **{sent_kind(name): per for name, per in self.sends}}


def sent_kind(name: str) -> str:
    """Kind of the pieces of a number that owners send with O."""
    return f"sent:{name}"


@dataclass(frozen=True)
class ChunkPlanInputs:
    """Sizes and options of a plan of chunks: parameters stepped element by element, cut into rows
    over owners.
    """

    gradient: int  # bytes of an element of the gradient
    weight: int  # bytes of an element of the weight
    state: int  # bytes of an element of each average
    once: bool = False  # as in PlanInputs
    reduced: bool = False  # gradients are already averaged over ranks: no inbound all-to-all
    averages: int = 2  # number of averages of the rule, such as `exp_avg`

    @property
    def stepped(self) -> int:
        """Bytes of the copies of weight and averages that are stepped, for an element."""
        return self.weight + self.averages * self.state


@dataclass(frozen=True)
class MatrixFootprint:
    """Bytes that a matrix takes: of the owner rank down to `key`, of any other rank below."""

    inbound: int  # received by the owner in the inbound all-to-all
    outbound: int  # sent by the owner in the outbound all-to-all
    # Send buffer of the outbound all-to-all; ranks with equal boxes are sent from one copy
    return_buffer_bytes: int
    held: int  # the whole matrix, and the part that the owner selects, in the shared scratch
    unselected: int  # the largest stored piece of which a part is sent, in the shared scratch
    until_apply: int  # state, and the mean of unreduced gradients, in the bucket buffer
    long: int  # scratch_a and scratch_b together, in the bucket buffer
    square: int  # gram_scratch, in the shared scratch
    key: object  # matrices of equal keys are iterated together, see `method.scratch_bytes`
    leaves: int  # largest piece that a rank sends to the owner
    replica: tuple[int, int]  # (number of the partition, number of the replica) that sends
    returns: int  # largest piece that a rank receives back


class MemoryModel:
    """Workspace bytes of the matrices of one family (`route`, `ranks`).

    A set of matrices is a Counter of (owner, number of a form): thousands of parameters have a
    handful of layouts, and units of a layout with equal shapes and pieces have one form. Matrices
    with equal owner and form have equal footprints.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        inputs: PlanInputs,
        route: str,
        ranks: tuple[int, ...],
        state_layouts: Mapping[str, Sequence[Layout]] | None = None,
    ) -> None:
        """`layouts`, `state_layouts`: as in `make_plan`. Parameters of one layout have equal
        layouts of state.
        """
        self.element = inputs.element  # bytes of an element
        self.inputs = inputs
        # Id of a layout -> layouts of the state that is sent; with route "own" the owner stores it
        self.of_state: dict[int, list[Layout]] = {}
        if state_layouts and route == "exchange":
            for layout, *of_state in zip(layouts, *state_layouts.values()):
                if not inputs.owner_stores(layout):
                    self.of_state[id(layout)] = of_state
        self.scratch = inputs.scratch
        self.once = inputs.once
        self.route = route
        self.ranks = ranks
        self.layouts = layouts  # by number of the parameter
        # By number of a form: (layout, shape of a unit, shape of the part that the owner selects or
        # None, scratch of what is iterated, result of `_unselected_bytes`, *results of `_pieces`)
        self.forms: list[tuple] = []
        # (id of a layout, unit), and (id of a layout, shape, sizes of pieces, selected shape,
        # unselected bytes) -> number of the form
        self.numbers: dict[tuple, int] = {}
        self.footprints: dict[tuple[int, int], MatrixFootprint] = {}  # by (owner, number)
        self.partitions: dict[tuple, int] = {}  # `Layout.replicas` -> number of the partition
        self.times: dict[frozenset, BucketTimes] = {}  # items of a sum -> `bucket_times`
        self.sizes: dict[frozenset, tuple[int, int]] = {}  # items of a sum -> `memory`
        every = itertools.chain(layouts, *self.of_state.values())
        self.alike = self._alike({id(layout): layout for layout in every}.values())

    def _alike(self, layouts: Iterable[Layout]) -> dict[int, list[int]]:
        """Return rank -> ranks that store equal boxes of every layout; each rank alone if nothing
        is sent from one copy.
        """
        if not self.once:
            return {rank: [rank] for rank in self.ranks}
        # Layouts of other families cannot meet in a bucket with these ranks
        layouts = [x for x in layouts if all(rank in x.boxes for rank in self.ranks)]
        alike = defaultdict(list)
        for rank in self.ranks:
            alike[tuple(x.boxes[rank][-2:] for x in layouts)].append(rank)
        return {rank: ranks for ranks in alike.values() for rank in ranks}

    def sum(self, owned: Iterable[tuple[MatrixLike, int]]) -> Counter:
        """Return the Counter of (owner, form number) of any number of (matrix, owner)."""
        return Counter(
            (owner, self._number(self.layouts[matrix.param], matrix.unit))
            for matrix, owner in owned
        )

    def _number(self, layout: Layout, unit: int) -> int:
        """Return the number of the form of a unit; compute sizes of pieces once per form.

        Units of a layout with equal pieces at every rank have one form.
        """
        if (id(layout), unit) not in self.numbers:
            shape = layout.unit_shapes[unit]
            selected = layout.selected_shapes[unit]
            unselected = self._unselected_bytes(layout, unit)
            sizes = self._pieces(layout, unit)
            form = id(layout), shape, tuple(sizes[0].items()), selected, unselected
            if form not in self.numbers:
                self.numbers[form] = len(self.forms)
                scratch = self.scratch(*(selected or shape))
                self.forms.append((layout, shape, selected, scratch, unselected, *sizes))
            self.numbers[id(layout), unit] = self.numbers[form]
        return self.numbers[id(layout), unit]

    def _pieces(
        self, layout: Layout, unit: int
    ) -> tuple[dict[int, int], dict[int, int], dict[int, int], int, int]:
        """Return sizes of pieces of a unit, with state, weight and sent numbers, in bytes: ({rank:
        piece}, {replica: largest piece}, {replica: sum}, sum over ranks with different boxes,
        partition number). The weight counts in both directions, so do sent numbers: an upper bound.

        Routes "local" and "reduce" send no pieces by layout: their dicts are empty.
        """
        pieces = {}
        largest, whole = defaultdict(int), defaultdict(int)
        for rank in self.ranks if self.route in ("exchange", "own") else ():
            nbytes = 0
            for ((r0, r1), (c0, c1)), _ in layout.unit_boxes(rank, unit):
                nbytes += self._piece_bytes(r1 - r0, c1 - c0)
            for of_state in self.of_state.get(id(layout), ()):
                # A rank may store state of a unit, but none of its elements
                nbytes += WIDE_BYTES * of_state.unit_numel(rank, unit)
            replica = layout.replica_of[rank]
            pieces[rank] = nbytes
            largest[replica] = max(largest[replica], nbytes)
            whole[replica] += nbytes
        distinct = sum(nbytes for rank, nbytes in pieces.items() if self.alike[rank][0] == rank)
        partition = self.partitions.setdefault(layout.replicas, len(self.partitions))
        return pieces, largest, whole, distinct, partition

    def _unselected_bytes(self, layout: Layout, unit: int) -> int:
        """Return the bytes of the largest piece of a unit as a rank stores it, and of the part that
        is sent; 0 if the whole piece is sent.
        """
        if not layout.sends_parts:
            return 0
        return max(
            sum(r * c * self.element + 2 * ALIGNMENT for r, c in layout.stored_shapes(rank, unit))
            + layout.unit_numel(rank, unit) * self.element
            for rank in self.ranks
        )

    def _piece_bytes(self, R: int, C: int) -> int:
        """Return the bytes of a piece of R x C elements, without state."""
        inputs = self.inputs
        weight = inputs.weight * (self.route == "exchange")
        sent = sum(math.prod(shape_per(per, R, C)) for _, per in inputs.sends)
        return R * C * (self.element + weight) + WIDE_BYTES * sent

    def _footprint(self, owner: int, number: int) -> MatrixFootprint:
        """Return the footprint of a matrix of form `number` at `owner`."""
        if (owner, number) in self.footprints:
            return self.footprints[owner, number]
        layout, shape, selected, scratch, unselected, *sizes = self.forms[number]
        pieces, largest, whole, distinct, partition = sizes
        key, long, square = scratch
        R, C = shape
        numel, others = R * C * self.element, len(self.ranks) - 1
        inbound = outbound = return_buffer = leaves = replica = returns = 0
        held, until_apply = numel + ALIGNMENT, self.inputs.wide_bytes(R, C) + ALIGNMENT
        if selected:
            held += math.prod(selected) * self.element + ALIGNMENT
        if self.route == "reduce":
            # Every rank sends a whole gradient, the owner included. The mean is in fp32.
            until_apply += 4 * (R * C + ALIGNMENT)
            returns = self._piece_bytes(R, C)
            inbound, outbound = numel * (others + 1), returns * others
            leaves = numel
            return_buffer = returns if self.once else outbound
        elif self.route != "local":
            replica, own = layout.replica_of[owner], pieces[owner]
            # Only the owner's replica sends pieces; every replica gets O
            inbound, outbound = whole[replica] - own, sum(whole.values()) - own
            # The piece of the owner stays, but ranks with an equal box still need a copy
            return_buffer = distinct if len(self.alike[owner]) > 1 else distinct - own
            leaves, returns = largest[replica] if inbound else 0, max(largest.values())
        footprint = MatrixFootprint(
            inbound,
            outbound,
            return_buffer,
            held,
            unselected,
            until_apply,
            long,
            square,
            key,
            leaves,
            (partition, replica),
            returns,
        )
        return self.footprints.setdefault((owner, number), footprint)

    def _together(
        self, taken: Mapping
    ) -> tuple[dict[int, list[int]], dict[tuple, list[int]], Counter, int, int]:
        """Return the footprints of a set of matrices, summed, in bytes: ({owner: [inbound,
        outbound, return buffer, held, until_apply]}, {(owner, key): [long, square]}, {replica:
        leaves}, returns, unselected).

        `leaves`, `returns` and `unselected` are upper bounds: sums of the largest pieces, which may
        be on different ranks.
        """
        owners, iterated = {}, {}
        leaves, returns, unselected = Counter(), 0, 0
        for (owner, number), count in taken.items():
            footprint = self._footprint(owner, number)
            if owner not in owners:
                owners[owner] = [0, 0, 0, 0, 0]
            if (owner, footprint.key) not in iterated:
                iterated[owner, footprint.key] = [0, 0]
            sums, scratch = owners[owner], iterated[owner, footprint.key]
            sums[0] += count * footprint.inbound
            sums[1] += count * footprint.outbound
            sums[2] += count * footprint.return_buffer_bytes
            sums[3] += count * footprint.held
            sums[4] += count * footprint.until_apply
            scratch[0] += count * footprint.long
            scratch[1] += count * footprint.square
            leaves[footprint.replica] += count * footprint.leaves
            returns += count * footprint.returns
            unselected += count * footprint.unselected
        return owners, iterated, leaves, returns, unselected

    def predicted_end(self, cost_model: CostModel, sums: Iterable[Mapping]) -> float:
        """Return the expected end of the last bucket, in ns from the start of the first. `sums`:
        of the footprints of each bucket, in order.
        """
        times = [self.bucket_times(taken, cost_model) for taken in sums]
        return max(span.end for span in cost_model.spans(times))

    def bucket_times(self, taken: Mapping, cost_model: CostModel) -> BucketTimes:
        """Return the expected times of a bucket, each phase at the rank with the most work; cached.

        `taken`: sum of the matrices' footprints, as from `sum`. `cost_model`: equal in all calls.
        """
        key = frozenset(taken.items())
        if key not in self.times:
            self.times[key] = self._bucket_times(taken, cost_model)
        return self.times[key]

    def _bucket_times(self, taken: Mapping, cost_model: CostModel) -> BucketTimes:
        """Compute `bucket_times`."""
        at_owners, _, leaves, returns, _ = self._together(taken)
        counts = defaultdict(Counter)  # owner -> shape -> number of matrices
        for (owner, number), count in taken.items():
            _, shape, selected, *_ = self.forms[number]
            counts[owner][selected or shape] += count
        inbound, outbound, _, held, _ = (max(nbytes) for nbytes in zip(*at_owners.values()))
        has_collectives = self.route != "local"
        before, at_owner, after = ELEMENT_BYTES[self.route]
        # A rank may send more than any owner receives, and the all-to-all waits for both
        inbound = max(inbound, *leaves.values())
        packed = max(leaves.values()) if has_collectives else held
        gathered = at_owner * held / self.element + (inbound if self.route == "reduce" else 0)
        # Most owners have equal counts, and a batch time is slow to compute
        distinct = {frozenset(shapes.items()): shapes for shapes in counts.values()}
        products = max(map(cost_model.batch_time, distinct.values())) + cost_model.memory_time(
            gathered
        )
        return BucketTimes(
            cost_model.memory_time(before * packed / self.element),
            cost_model.all_to_all_time(inbound),
            products,
            cost_model.all_to_all_time(outbound),
            cost_model.memory_time(after * (returns if has_collectives else held) / self.element),
            has_collectives,
        )

    def workspace_for(self, taken: Mapping) -> int:
        """Return the bytes of a workspace in which any number of buckets with footprint `taken`
        fit, on every rank.
        """
        return workspace_bytes(*self.memory(taken))

    def bytes_together(self, sums: Iterable[Mapping]) -> int:
        """Return the workspace bytes that buckets take on the rank with the most. `sums`: of the
        footprints of each bucket, in order.

        Bucket i of the family uses buffer i modulo the number of buffers. Every buffer, and the
        shared scratch, is as large as the largest user. "local" buckets share a single buffer.
        """
        buffers, scratches = zip(*map(self.memory, sums))
        count = BUCKETS_IN_FLIGHT if self.route != "local" else 1
        in_buffers = sum(max(buffers[number::count], default=0) for number in range(count))
        return in_buffers + max(scratches)

    def memory(self, taken: Mapping) -> tuple[int, int]:
        """Return (bytes of the bucket buffer, bytes of the shared scratch), an upper bound over all
        ranks, see `RankPlan.workspace_layout`; cached.
        """
        key = frozenset(taken.items())
        if key not in self.sizes:
            self.sizes[key] = self._memory(taken)
        return self.sizes[key]

    def _memory(self, taken: Mapping) -> tuple[int, int]:
        """Compute `memory`.

        Pieces that a rank sends are among the pieces of which O returns, so `returns` bounds
        the buffer for both.
        """
        owners, iterated, _, returns, unselected = self._together(taken)
        # Upper bound of the padding: every use of the workspace, and every peer's split of an
        # all-to-all buffer, begins at a multiple of ALIGNMENT
        fixed = 3 * ALIGNMENT * (len(self.ranks) + 2)
        buffer, scratch = 0, 0
        for (owner, _), (long, square) in iterated.items():
            inbound, _, return_buffer, held, until_apply = owners[owner]
            # State and means lie behind the all-to-all buffers, or behind the scratch of
            # Newton-Schulz, which reuses the buffers: behind the larger of the two
            buffer = max(
                buffer,
                returns + inbound + until_apply,
                returns + return_buffer + until_apply,
                long + until_apply,
            )
            # Whole pieces, from which a part is selected, use the memory of Newton-Schulz's squares
            # before and after the iteration
            scratch = max(scratch, max(square, unselected) + held)
        # Ranks that own nothing need memory for `unselected` as well
        return buffer + fixed, max(scratch, unselected) + fixed

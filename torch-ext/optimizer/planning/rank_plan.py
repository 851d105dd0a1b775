"""RankPlan: the part of a bucket on a single rank.

`rank_plan_of` derives from a bucket: pieces stored at the rank, pieces of matrices owned by the
rank, byte offsets in the all-to-all buffers (`AllToAllPlan`), and the bytes of each use of the
workspace. `chunk_rank_plan` is the counterpart for buckets of `plan_chunks`. Touches no tensor.

[Note: buffer reuse of the return all-to-all] The outbound all-to-all uses the buffers of the
inbound all-to-all with swapped roles: results O are sent from the inbound receive buffer ("arrive")
and received in the memory of the inbound send buffer ("leave", "return"). Between the two
collectives Newton-Schulz uses both as scratch ("scratch_a", "scratch_b").
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from .memory_model import ALIGNMENT, ChunkPlanInputs, PlanInputs, sent_kind, split_workspace
from .plan import OWNER_STATE_ROUTES, Bucket, Matrix

if TYPE_CHECKING:
    from ..params.layout import Layout

Box = tuple[tuple[int, int], tuple[int, int]]  # ((first row, end), (first column, end))


class Piece(NamedTuple):
    """A box of a matrix: stored at rank `stored_at`, orthogonalized at rank `owner`. A tuple, since
    plans hash each piece many times.
    """

    # "matrix": box of the matrix; a state key: box of the matrix' state; "weight": box of the
    # weight, on the way to the owner; "sent:NAME": numbers on the way from the owner; "chunk": rows
    # of a parameter of AdamW with state at owners
    kind: str
    matrix: Matrix
    box: Box  # in rows and columns of the unit; of a chunk, of the parameter
    stored_at: int  # rank that stores the piece
    owner: int  # rank that owns the matrix
    # The piece is sent to the owner, or stays there. False for replicas: a replica of the piece is
    # the source, and rank `stored_at` only receives O for the piece.
    is_source: bool
    # (row, column) of the (R, C) matrix of the parameter at which the box begins; unused in chunks
    start: tuple[int, int] = (0, 0)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        (top, bottom), (left, right) = self.box
        return bottom - top, right - left

    @property
    def numel(self) -> int:
        """Number of elements."""
        (top, bottom), (left, right) = self.box
        return (bottom - top) * (right - left)


@dataclass(frozen=True)
class AllToAllPlan:
    """An all-to-all of a bucket, seen from a rank; offsets and sizes in bytes, peers in the order
    of `Bucket.ranks`.
    """

    leave: dict[Piece, int]  # pieces to send -> offset in the send buffer
    arrive: dict[Piece, int]  # pieces to receive -> offset in the receive buffer
    send_bytes: tuple[int, ...]  # for each peer
    recv_bytes: tuple[int, ...]  # from each peer
    # Offset of each peer's split of the send buffer. Peers that get equal pieces may share a split.
    send_from: tuple[int, ...]

    @property
    def leaving(self) -> int:
        """Bytes of the send buffer; less than the sum of `send_bytes` if peers share a split."""
        return max(map(sum, zip(self.send_from, self.send_bytes)), default=0)


@dataclass(frozen=True)
class PieceSets:
    """The stored pieces of matrices, by the treatment in a step of route "exchange" or "own".

    `sent`, `kept` and `replicas` are disjoint, and together all stored pieces of matrices. All
    tuples are in the order of `RankPlan.stored`.
    """

    # Sent to the owner, another rank; O returns
    sent: tuple[Piece, ...]
    # Owned by the rank itself: nothing is sent, O stays in the workspace
    kept: tuple[Piece, ...]
    # Another rank is the source; only O arrives
    replicas: tuple[Piece, ...]
    # Part of `kept` whose momentum is computed while the inbound all-to-all runs
    during_inbound: tuple[Piece, ...]
    # Rest of `kept`: momentum is computed after the inbound all-to-all
    after_inbound: tuple[Piece, ...]


@dataclass(frozen=True)
class RankPlan:
    """The part of a bucket on a single rank.

    [Note: direct matrices] Newton-Schulz reads a direct matrix where its pieces arrived ("arrive")
    and are kept ("kept"), and writes the result where the pieces are sent from. Other matrices are
    first copied into a stack of whole matrices ("stack") and afterwards copied back.
    """

    stored: tuple[Piece, ...]  # stored at the rank
    owned: tuple[Piece, ...]  # of all ranks, of the matrices that the rank owns
    matrices: tuple[Matrix, ...]  # that the rank owns
    inbound: AllToAllPlan  # to owners
    outbound: AllToAllPlan  # from owners
    # Whether any rank of the bucket sends anything; equal on all ranks, so that all ranks skip a
    # collective or none does
    crosses_inbound: bool
    crosses_outbound: bool
    has_common_splits: bool  # outbound: several ranks are sent equal pieces from one split
    use_bytes: dict[str, int]  # use of the workspace -> bytes, see `workspace_layout`
    kept: dict[Piece, int]  # pieces stored and owned by the rank -> byte offset in use "kept"
    direct: frozenset[Matrix] = frozenset()  # see [Note: direct matrices]

    @functools.cached_property
    def piece_sets(self) -> PieceSets:
        """The stored pieces of matrices by treatment, for routes "exchange" and "own"."""
        stored = [p for p in self.stored if p.kind == "matrix"]
        kept = [p for p in stored if p in self.kept]
        # A whole matrix is assembled in the shared scratch, which the bucket before still uses
        # while this bucket's inbound all-to-all runs. Direct pieces stay in the bucket buffer.
        early = {p for p in kept if p.matrix in self.direct and self.crosses_inbound}
        return PieceSets(
            sent=tuple(p for p in stored if p in self.inbound.leave),
            kept=tuple(kept),
            replicas=tuple(p for p in stored if p not in self.inbound.leave and p not in self.kept),
            during_inbound=tuple(p for p in kept if p in early),
            after_inbound=tuple(p for p in kept if p not in early),
        )

    def workspace_layout(self) -> tuple[dict[str, tuple[str, int]], dict[str, int]]:
        """Return ({use: (memory, byte offset)}, {memory: bytes}).

        Memory "bucket_buffer" belongs to the bucket from the first phase to the last. Memory
        "shared_scratch" belongs to the bucket in computation. Uses:

        - "leave", "return": send buffer of the inbound, receive buffer of the outbound all-to-all
        - "arrive": receive buffer of the inbound, send buffer of the outbound all-to-all
        - "kept": U and O, or gradients, of pieces stored and owned by the rank
        - "wide": state, weights and sent numbers of owned matrices, in fp32; unused by Muon's rule
        - "until_apply": mean of unreduced gradients, or stepped weights and state of chunks
        - "selected": parts of whole matrices that the owner selects; "unselected": stored pieces of
          which parts are sent, alive within a single phase
        - "stack": whole matrices; "mean": mean of gradients of chunks
        - "scratch_a", "scratch_b", "gram_scratch": Newton-Schulz, see `orthogonalize`

        Uses of overlapping memory are never alive together, see [Note: buffer reuse of the return
        all-to-all]: "leave" is sent before O returns, and "arrive" is read before O is
        written over the received pieces. Direct matrices are read from "arrive" and "kept" during
        Newton-Schulz, so only the memory of "leave" is free for scratch, and "scratch_a" moves to
        the shared scratch.
        """
        size = {use: nbytes + -nbytes % ALIGNMENT for use, nbytes in self.use_bytes.items()}
        if self.direct:
            kept = max(size["leave"], size["return"], size["scratch_b"])
            arrive = kept + size["kept"]
            in_buffer = {"leave": 0, "return": 0, "scratch_b": 0, "kept": kept, "arrive": arrive}
            in_scratch = ("gram_scratch", "scratch_a", "stack", "selected", "mean")
            end = arrive + size["arrive"]
        else:
            # O of kept pieces is written after Newton-Schulz, behind the pieces that return
            arrive = max(size["leave"], size["return"] + size["kept"])
            in_buffer = {"leave": 0, "return": 0, "kept": size["return"], "arrive": arrive}
            in_buffer |= {"scratch_a": 0, "scratch_b": size["scratch_a"]}
            in_scratch = ("gram_scratch", "stack", "selected", "mean")
            end = max(arrive + size["arrive"], size["scratch_a"] + size["scratch_b"])
        # State and means are used in several phases, so their memory overlaps with no other use
        in_buffer |= {"wide": end, "until_apply": end + size["wide"]}
        # "unselected" is written before Newton-Schulz, and again afterwards, in memory that only
        # the iteration uses in between
        size["gram_scratch"] = max(size["gram_scratch"], size["unselected"])
        starts = itertools.accumulate((size[use] for use in in_scratch), initial=0)
        places = {use: ("bucket_buffer", offset) for use, offset in in_buffer.items()}
        places |= {use: ("shared_scratch", offset) for use, offset in zip(in_scratch, starts)}
        places["unselected"] = places["gram_scratch"]
        return places, {
            "bucket_buffer": in_buffer["until_apply"] + size["until_apply"],
            "shared_scratch": sum(size[use] for use in in_scratch),
        }


def rank_plan_of(
    bucket: Bucket,
    rank: int,
    layouts: Sequence[Layout],
    state_layouts: Mapping[str, Sequence[Layout]],
    inputs: PlanInputs,
) -> RankPlan:
    """Return the part of a bucket of matrices on `rank`.

    `layouts`, `state_layouts`, `inputs`: as in `make_plan`.
    """
    of_matrices = list(_pieces_at(bucket, rank, layouts, "matrix"))
    state, weights, sent = _wide_pieces(bucket, rank, of_matrices, state_layouts, inputs)
    reduce = bucket.route == "reduce"
    # The owner receives `sources`, and sends O, and state, of `exchanged` back
    exchanged = of_matrices
    sources = [p for p in of_matrices if p.is_source]
    if bucket.route not in OWNER_STATE_ROUTES:
        exchanged = state + of_matrices
        sources = [*(p for p in exchanged if p.is_source), *weights]
    pieces = [*state, *of_matrices, *weights, *sent]
    replicas = _replica_counts(bucket, layouts)
    matrices = tuple(m for m, owner in zip(bucket.matrices, bucket.owners) if owner == rank)
    # The owner's own unreduced gradient goes through the buffer too, because the mean is a single
    # reduction over equal splits. O of direct matrices is sent from where U arrived, so the splits
    # of the inbound all-to-all get room for the sent numbers of the outbound one.
    has_room = inputs.has_direct and not reduce
    room = [p for p in sent if p.is_source and has_room]
    inbound = _inbound(sources + room, rank, bucket.ranks, inputs, reduce)
    outbound = plan_all_to_all(
        exchanged + sent, ("owner", "stored_at"), rank, bucket.ranks, inputs.itemsizes, inputs.once
    )
    own = [
        p
        for p in exchanged
        if p.stored_at == p.owner == rank and p.kind == "matrix" and bucket.route != "local"
    ]
    kept, (kept_bytes,), _ = _lay_out(own, "stored_at", (rank,), inputs.itemsizes)
    nbytes = _all_to_all_bytes(inbound, outbound, kept_bytes) | _scratch_bytes(matrices, inputs)
    if reduce:
        nbytes["until_apply"] = _mean_bytes(inbound, inputs.element)
    nbytes |= _matrix_bytes(matrices, inputs)
    nbytes["unselected"] = _unselected_bytes(of_matrices, rank, layouts, inputs)
    rank_plan = RankPlan(
        stored=tuple(p for p in pieces if p.stored_at == rank),
        owned=tuple(p for p in pieces if p.owner == rank),
        matrices=matrices,
        inbound=inbound,
        outbound=outbound,
        # If each rank has a replica of its own (DDP), every owner already stores its matrices
        crosses_inbound=reduce or min(replicas) < len(bucket.ranks),
        crosses_outbound=bucket.route != "local",
        has_common_splits=inputs.once and max(replicas) > 1,
        use_bytes=nbytes,
        kept=kept,
    )
    limits = bucket.memory
    if inputs.rank_bytes is not None:
        limits = split_workspace(max(inputs.rank_bytes, bucket.nbytes))
    if bucket.route in ("exchange", "own"):
        rank_plan = _with_direct(rank_plan, limits, inputs)
    return _with_scratch_of_each(rank_plan, limits, inputs)


def _wide_pieces(
    bucket: Bucket,
    rank: int,
    of_matrices: Sequence[Piece],
    state_layouts: Mapping[str, Sequence[Layout]],
    inputs: PlanInputs,
) -> tuple[list[Piece], list[Piece], list[Piece]]:
    """Return the pieces in fp32 of `rank`: (state, weights, sent numbers) that belong to the pieces
    `of_matrices`.
    """
    state = [
        p
        for key, of_key in state_layouts.items()
        for p in _state_pieces_at(bucket, rank, of_key, key, inputs)
    ]
    weights = []
    if inputs.weight:
        weights = [p._replace(kind="weight") for p in of_matrices if p.is_source]
    if bucket.route in OWNER_STATE_ROUTES:
        # The owner stores state, and every rank all weights: both are in no all-to-all
        state, weights = (
            [p for p in some if p.stored_at == p.owner == rank] for some in (state, weights)
        )
    sent = [sent_piece(p, name, per) for name, per in inputs.sends for p in of_matrices]
    return state, weights, sent


def _with_direct(rank_plan: RankPlan, limits: tuple[int, int], inputs: PlanInputs) -> RankPlan:
    """Return the rank plan with direct matrices, see [Note: direct matrices].

    A matrix is direct if all pieces, of all replicas, are whole rows at multiples of ALIGNMENT.
    `limits`: (bytes of the bucket buffer, bytes of the shared scratch). Return `rank_plan` itself
    if direct matrices exceed `limits`, or if results would overwrite matrices before their
    iteration.
    """
    read, leave = rank_plan.inbound.arrive | rank_plan.kept, rank_plan.outbound.leave
    boxes = {(p.matrix, p.box) for p in read}
    whole = set()  # matrices that are not direct
    for p in [p for p in rank_plan.owned if p.kind == "matrix"]:
        row_and_offsets = p.matrix.cols * inputs.element, read.get(p, 0), leave.get(p, 0)
        if (
            p.shape[1] < p.matrix.cols
            # A replica with other boxes: its rows would be parts of several pieces
            or (p.matrix, p.box) not in boxes
            or any(n % ALIGNMENT for n in row_and_offsets)
        ):
            whole.add(p.matrix)
    direct = frozenset(
        m
        for m in rank_plan.matrices
        if m not in whole and inputs.has_direct and inputs.supports_scattered_rows(m.rows, m.cols)
    )
    # Matrices of one key are iterated together. With several keys, the results of the first key are
    # written before the matrices of the next key are read: safe only if every piece is sent from
    # exactly where it arrived.
    keys = {inputs.scratch(m.rows, m.cols)[0] for m in direct}
    if len(keys) > 1 and any(leave[p] != offset for p, offset in rank_plan.inbound.arrive.items()):
        return rank_plan
    stack = _stack_bytes([m for m in rank_plan.matrices if m not in direct], inputs)
    nbytes = rank_plan.use_bytes | {"stack": stack}
    return _if_within(replace(rank_plan, direct=direct, use_bytes=nbytes), limits, rank_plan)


def _with_scratch_of_each(
    rank_plan: RankPlan, limits: tuple[int, int], inputs: PlanInputs
) -> RankPlan:
    """Return the rank plan with separate scratch for every iteration, so that iterations of several
    shapes can run concurrently. Return `rank_plan` itself without a gain or where memory exceeds
    `limits`.
    """
    shapes = [sorted(m.iterated_shape) for m in rank_plan.matrices]
    if not shapes or not inputs.side_by_side(shapes):
        return rank_plan
    nbytes = rank_plan.use_bytes | _scratch_bytes(rank_plan.matrices, inputs, sum)
    return _if_within(replace(rank_plan, use_bytes=nbytes), limits, rank_plan)


def _if_within(wanted: RankPlan, limits: tuple[int, int], otherwise: RankPlan) -> RankPlan:
    """Return `wanted` if its memory is within (bucket buffer, shared scratch), else `otherwise`."""
    sizes = wanted.workspace_layout()[1]
    fits = sizes["bucket_buffer"] <= limits[0] and sizes["shared_scratch"] <= limits[1]
    return wanted if fits else otherwise


def _stack_bytes(matrices: Iterable[Matrix], inputs: PlanInputs) -> int:
    """Return the bytes of whole matrices, in a stack for each shape."""
    return sum(m.numel * inputs.element + ALIGNMENT for m in matrices)


def _matrix_bytes(matrices: Sequence[Matrix], inputs: PlanInputs) -> dict[str, int]:
    """Return the bytes of owned matrices, of the parts that the owner selects, and of tensors in
    fp32.
    """
    parts = [math.prod(m.selected) for m in matrices if m.selected]
    return {
        "stack": _stack_bytes(matrices, inputs),
        "selected": sum(numel * inputs.element + ALIGNMENT for numel in parts),
        "wide": sum(inputs.wide_bytes(m.rows, m.cols) for m in matrices),
    }


def _unselected_bytes(
    pieces: Iterable[Piece], rank: int, layouts: Sequence[Layout], inputs: PlanInputs
) -> int:
    """Return the bytes of the pieces stored by `rank` of which only parts are sent, and of the
    parts.
    """
    nbytes = 0
    for p in pieces:
        layout = layouts[p.matrix.param]
        if p.stored_at == rank and layout.sends_parts:
            numel = math.prod(layout.whole_shape(rank, p.matrix.unit, p.start)) + p.numel
            nbytes += numel * inputs.element + 2 * ALIGNMENT
    return nbytes


def _replica_counts(bucket: Bucket, layouts: Sequence[Layout]) -> list[int]:
    """Return the number of replicas on the ranks of a bucket, for each distinct layout."""
    known = {id(layouts[m.param]): layouts[m.param] for m in bucket.matrices}
    return [len(set(map(layout.replica_of.__getitem__, bucket.ranks))) for layout in known.values()]


def _all_to_all_bytes(
    inbound: AllToAllPlan, outbound: AllToAllPlan, kept: int = 0
) -> dict[str, int]:
    """Return the bytes of all uses of the workspace, without the uses of computation (0)."""
    computation = ("wide", "until_apply", "stack", "selected", "unselected", "mean")
    computation += ("scratch_a", "scratch_b", "gram_scratch")
    return {
        "leave": inbound.leaving,
        "return": sum(outbound.recv_bytes),
        "kept": kept,
        "arrive": max(sum(inbound.recv_bytes), outbound.leaving),
        **dict.fromkeys(computation, 0),
    }


def _mean_bytes(inbound: AllToAllPlan, itemsize: int) -> int:
    """Return the bytes of the mean over ranks of received gradients, in at least fp32; `itemsize`:
    bytes of a received element.
    """
    return inbound.recv_bytes[0] // itemsize * max(4, itemsize)


def _scratch_bytes(
    matrices: Iterable[Matrix], inputs: PlanInputs, together: Callable = max
) -> dict[str, int]:
    """Return the bytes of the scratch of Newton-Schulz, see `method.scratch_bytes`.

    Matrices of equal keys are iterated together. `together`: max if iterations of several keys
    share scratch, sum for separate scratch.
    """
    long, square = Counter(), Counter()
    for matrix in matrices:
        key, long_bytes, square_bytes = inputs.scratch(*matrix.iterated_shape)
        long[key] += long_bytes
        square[key] += square_bytes
    half = together([*long.values(), 0]) // 2
    gram = together([*square.values(), 0])
    return {"scratch_a": half, "scratch_b": half, "gram_scratch": gram}


def _pieces_at(bucket: Bucket, rank: int, layouts: Sequence[Layout], kind: str) -> Iterator[Piece]:
    """Yield the pieces stored or owned by `rank`.

    The order is by matrix, then rank, then group of an interleaved dim. Sender and receiver derive
    equal offsets from the order, without communication.
    """
    for matrix, owner in zip(bucket.matrices, bucket.owners):
        layout = layouts[matrix.param]
        for storing in bucket.ranks if owner == rank else (rank,):
            # Of sharded parameters the owner's replica sends; of unreduced gradients every rank
            is_source = (
                bucket.route == "reduce" or layout.replica_of[storing] == layout.replica_of[owner]
            )
            for box, start in layout.unit_boxes(storing, matrix.unit):
                yield Piece(kind, matrix, box, storing, owner, is_source, start)


def _state_pieces_at(
    bucket: Bucket, rank: int, layouts: Sequence[Layout], kind: str, inputs: PlanInputs
) -> Iterator[Piece]:
    """Yield the pieces of state that `rank` stores or owns: of a matrix whose owner stores the
    state, all of it.
    """
    at_owners = [m for m in bucket.matrices if inputs.owner_stores(layouts[m.param])]
    if not at_owners:
        yield from _pieces_at(bucket, rank, layouts, kind)
        return
    for p in _pieces_at(bucket, rank, layouts, kind):
        if not inputs.owner_stores(layouts[p.matrix.param]):
            yield p
    owner_of = dict(zip(bucket.matrices, bucket.owners))
    for m in at_owners:
        if owner_of[m] == rank:
            R, C = layouts[m.param].unit_shapes[m.unit]
            yield Piece(kind, m, ((0, R), (0, C)), rank, rank, True)


def has_plain(matrices: Iterable[Matrix], layouts: Sequence[Layout]) -> bool:
    """Whether any of `matrices` is of a plain parameter, whose state every rank has."""
    return any(layouts[m.param].plain for m in matrices)


def sent_piece(p: Piece, name: str, per: str) -> Piece:
    """Return the piece of the number `name` that belongs to the piece `p` of a matrix."""
    rows, columns = p.box
    box = rows if per == "row" else (0, 1), columns if per == "column" else (0, 1)
    return p._replace(kind=sent_kind(name), box=box)


def is_sent(p: Piece) -> bool:
    """Whether a piece is one of numbers on the way from the owner, see `sent_piece`."""
    return p.kind.startswith(sent_kind(""))


def _inbound(
    pieces: Iterable[Piece], rank: int, ranks: tuple[int, ...], inputs: PlanInputs, with_self: bool
) -> AllToAllPlan:
    """Return the all-to-all to the owners. Numbers of the way back among `pieces` count in the
    splits only: their bytes travel unwritten, and neither end reads them.
    """
    ends = "stored_at", "owner"
    made = plan_all_to_all(pieces, ends, rank, ranks, inputs.itemsizes, with_self=with_self)
    leave, arrive = (
        {p: offset for p, offset in offsets.items() if not is_sent(p)}
        for offsets in (made.leave, made.arrive)
    )
    return replace(made, leave=leave, arrive=arrive)


def plan_all_to_all(
    pieces: Iterable[Piece],
    ends: tuple[str, str],
    rank: int,
    ranks: tuple[int, ...],
    itemsizes: Mapping[str, int],
    once: bool = False,
    with_self: bool = False,
) -> AllToAllPlan:
    """Lay out an all-to-all in flat send and receive buffers, by peer, as seen from `rank`.

    `ends`: sending and receiving rank, as attributes of a Piece: ("stored_at", "owner") or
    ("owner", "stored_at"). `itemsizes`: kind of a piece -> bytes of an element. `once`: peers that
    get equal pieces share a split of the send buffer. `with_self`: also pieces from `rank` to
    itself.
    """
    source, target = ends
    pieces = [p for p in pieces if with_self or p.stored_at != p.owner]
    outgoing = [p for p in pieces if getattr(p, source) == rank]
    incoming = [p for p in pieces if getattr(p, target) == rank]
    leave, send, starts = _lay_out(outgoing, target, ranks, itemsizes, once)
    arrive, recv, _ = _lay_out(incoming, source, ranks, itemsizes)
    return AllToAllPlan(leave, arrive, send, recv, starts)


def _lay_out(
    pieces: Iterable[Piece],
    end: str,
    ranks: tuple[int, ...],
    itemsizes: Mapping[str, int],
    once: bool = False,
) -> tuple[dict[Piece, int], tuple[int, ...], tuple[int, ...]]:
    """Return ({piece: byte offset}, bytes per peer, offset per peer) of a flat buffer.

    `end`: attribute of a Piece with the peer. `once`: peers with equal pieces share a split.
    """
    of_peer = defaultdict(list)
    for piece in pieces:
        of_peer[getattr(piece, end)].append(piece)
    offsets, known = {}, {}  # piece -> offset; contents of a split -> offset
    sizes, starts = [0] * len(ranks), [0] * len(ranks)
    free = 0  # end of the splits so far
    # Most of thousands of peers have no split: compress skips them without a Python loop
    for i in itertools.compress(itertools.count(), map(of_peer.__contains__, ranks)):
        # Wide elements (fp32 state) first, so that every piece is aligned to its elements. Sent
        # numbers come last: O is sent from where U arrived, see `_with_direct`
        split = sorted(of_peer[ranks[i]], key=lambda p: (is_sent(p), -itemsizes[p.kind]))
        contents = tuple((p.kind, p.matrix, p.box) for p in split) if once else i
        offset = starts[i] = known.setdefault(contents, free)
        for piece in split:
            offset += -offset % itemsizes[piece.kind]
            offsets[piece] = offset
            offset += piece.numel * itemsizes[piece.kind]
        offset += -offset % ALIGNMENT
        sizes[i], free = offset - starts[i], max(free, offset)
    return offsets, tuple(sizes), tuple(starts)


def chunk_rank_plan(
    bucket: Bucket, shapes: Sequence[tuple[int, int]], rank: int, inputs: ChunkPlanInputs
) -> RankPlan:
    """Return the part of a bucket of `plan_chunks` on `rank`; `shapes`, `inputs`: as in
    `plan_chunks`.

    Every rank stores all rows. The owner of a chunk stores the state. With unreduced gradients
    every rank sends a gradient of the chunk to the owner.
    """
    pieces, ranks = [], bucket.ranks
    for matrix in [m for m in bucket.matrices if m.numel]:
        rows = shapes[matrix.param][0]
        for i, owner in enumerate(ranks):
            start = i * -(-rows // len(ranks)) + matrix.at[0]
            box = (start, min(start + matrix.rows, rows)), (0, matrix.cols)
            storing_ranks = ranks if owner == rank else (rank,)
            # The parts of the last ranks are shorter or empty
            pieces += [
                Piece("chunk", matrix, box, storing, owner, True)
                for storing in storing_ranks
                if start < rows
            ]
    stored = [p for p in pieces if p.stored_at == rank]
    owned = [p for p in pieces if p.owner == rank]
    own = [p for p in owned if p.stored_at == rank]
    gradient, weight = {"chunk": inputs.gradient}, {"chunk": inputs.weight}
    sources = [] if inputs.reduced else pieces
    inbound = plan_all_to_all(
        sources, ("stored_at", "owner"), rank, ranks, gradient, with_self=True
    )
    outbound = plan_all_to_all(pieces, ("owner", "stored_at"), rank, ranks, weight, inputs.once)
    kept, (kept_bytes,), _ = _lay_out(own if inputs.reduced else [], "stored_at", (rank,), gradient)
    # Copies of weight and averages are stepped, and replace the originals at the end
    stepped = sum(p.numel for p in own) * inputs.stepped
    nbytes = _all_to_all_bytes(inbound, outbound, kept_bytes) | {
        "mean": _mean_bytes(inbound, inputs.gradient),
        "until_apply": (1 + inputs.averages) * ALIGNMENT + stepped,
    }
    return RankPlan(
        stored=tuple(stored),
        owned=tuple(owned),
        matrices=(),
        inbound=inbound,
        outbound=outbound,
        crosses_inbound=not inputs.reduced,
        crosses_outbound=True,
        has_common_splits=inputs.once,
        use_bytes=nbytes,
        kept=kept,
    )

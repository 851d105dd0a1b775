"""Bucket updates whose state lies in host memory: those of bucket_updates.py and of
elementwise_updates.py, with launches on state in parts.

[Note: momentum before weights]
Momentum is fetched once: the launch that reads momentum for U also writes momentum
(`update_momentum_early`), so that a part leaves its slot at once. Price: if a step raises, the
momentum of a bucket may be new and its weights old. In two cases momentum is fetched again, and
written along with the weights. With overlap_backward the first launch runs during backward, when
the step may not change anything yet. With a selection momentum depends on O.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ...kernels.elementwise.momentum import Copy, copy_torch
from ...kernels.elementwise.multi_tensor import write_squares
from ...kernels.elementwise.weight_update import TO_INITIAL
from ...kernels.launch.precompile import in_dry_run
from ...kernels.weights.split import wide_copies
from ...pipeline import BucketUpdate
from ...planning.rank_plan import Piece, sent_piece
from ...rules import elementwise
from ...rules.decay import INITIAL_KEY, form_of
from ...rules.rule import MuonConstants, host_constants, is_offloaded, momentum_key
from ..bound_update import BucketInputs, Gradients, Means, Views
from ..bucket_updates import LocalUpdate, ShardedUpdate, UnreducedUpdate
from ..cuda_graphs import Graphs
from ..elementwise_updates import (
    ElementwiseUpdate,
    OwnerStateElementwiseUpdate,
    UnreducedElementwiseUpdate,
    flags_of,
)
from .memory import ALIGNMENT
from .parts import Cut, InParts, Launch, OffloadStore, Several, cut, whole_of
from .scheduler import Part

# Cuts of elementwise parameters begin at multiples, in elements: vectors of kernels stay whole
CUT = 1024


class OffloadedState:
    """Base class, before an update of bucket_updates.py: binds launches on state in parts."""

    def __init__(self, inputs: BucketInputs) -> None:
        # Pieces whose momentum is written before their weight
        self.packed_pieces: set[Piece] = set()
        self.without_momentum = False  # the weight update that is bound now leaves momentum out
        super().__init__(inputs)

    @property
    def update_momentum_early(self) -> bool:
        """See [Note: momentum before weights]."""
        during_backward = self.options.overlap_backward and self.has_collectives
        return self.selection is None and not during_backward

    @property
    def _states_in_place(self) -> list[str]:
        """State of each element is copied from its slot into the stacks."""
        return [key for key in super()._states_in_place if not is_offloaded(key)]

    def _momentum_args(self, pieces: Sequence[Piece], means: Means | None = None) -> tuple:
        """See `BoundUpdate`."""
        return () if self.without_momentum else super()._momentum_args(pieces, means)

    def _bind_pack(self, pieces: Sequence[Piece], to: Views, means: Means | None = None) -> Launch:
        """See `BoundUpdate`."""
        bind = super()._bind_pack
        if self.store.shown is not None:  # inside of a part
            return bind(pieces, to, means)
        if self.update_momentum_early:
            self.packed_pieces.update(pieces)
        # Selections are bound now, launches later: a weight update that is bound in between must
        # find that these pieces have a selection
        self.selected_pieces.bind(pieces)

        def bind_part(cuts: Sequence[Cut]) -> Launch:
            """Bind the launch of some cuts."""
            some = {c.piece: c.of(to[c.whole]) for c in cuts if c.whole in to}
            return bind([c.piece for c in cuts], ChainMap(some, to), _means_of(cuts, means))

        keys = [momentum_key(self.group)]
        return self._in_parts(pieces, keys, self.update_momentum_early, bind_part)

    def _bind_weight_update(
        self, pieces: Sequence[Piece], orthogonal: Views, means: Means | None = None
    ) -> Launch:
        """See `BoundUpdate`."""
        bind = super()._bind_weight_update
        if self.store.shown is not None:
            return bind(pieces, orthogonal, means)
        leaves_out = bool(pieces) and self.packed_pieces.issuperset(pieces)
        has_momentum = not leaves_out and self._has_momentum(pieces, means)
        keys = [momentum_key(self.group)] if has_momentum else []
        keys += [INITIAL_KEY] if form_of(self.group) == TO_INITIAL else []
        sends = self.rule.sends.items()

        def bind_part(cuts: Sequence[Cut]) -> Launch:
            """Bind the launch of some cuts."""
            some = {c.piece: c.of(orthogonal[c.whole]) for c in cuts}
            for c, (name, per) in itertools.product(cuts, sends):
                numbers = orthogonal[sent_piece(c.whole, name, per)]
                some[sent_piece(c.piece, name, per)] = c.of_numbers(numbers)
            self.without_momentum = leaves_out
            try:
                views = ChainMap(some, orthogonal)
                return bind([c.piece for c in cuts], views, _means_of(cuts, means))
            finally:
                self.without_momentum = False

        return self._in_parts(pieces, keys, has_momentum, bind_part)

    def _bind_loads(self, pieces: Sequence[Piece], to: Views) -> Launch:
        """See `BoundUpdate`."""
        pieces, others = self._offloaded(pieces, [None])
        store = self.store

        def bind_part(cuts: Sequence[Cut]) -> Launch:
            """Bind the copies of some cuts."""
            return Copy([c.of(to[c.whole]) for c in cuts], store.states([c.piece for c in cuts]))

        loads = [super()._bind_loads(others, to)]
        return Several([*loads, *self._parts(pieces, [None], False, bind_part)])

    def _bind_saves(self, pieces: Sequence[Piece], views: Views) -> Launch:
        """See `BoundUpdate`."""
        pieces, others = self._offloaded(pieces, [None])
        store = self.store

        def bind_part(cuts: Sequence[Cut]) -> Launch:
            """Bind the copies of some cuts."""
            some = [c.piece for c in cuts]
            new = [c.of(views[c.whole]) for c in cuts]
            return Copy(store.states(some), new, store.skip(some))

        saves = [super()._bind_saves(others, views)]
        return Several([*saves, *self._parts(pieces, [None], True, bind_part)])

    def _in_parts(
        self,
        pieces: Sequence[Piece],
        keys: Sequence[str | None],
        writes: bool,
        bind: Callable[[Sequence[Cut]], Launch],
    ) -> Launch:
        """Bind a launch on `pieces`, part by part where the states `keys` are offloaded. `writes`:
        whether the launch writes the state. `bind`: binds the launch of some cuts.
        """
        pieces, others = self._offloaded(pieces, keys)
        whole = [bind(list(map(whole_of, others)))] if others or not pieces else []
        launches = [*whole, *self._parts(pieces, keys, writes, bind)]
        return launches[0] if len(launches) == 1 else Several(launches)

    def _offloaded(
        self, pieces: Sequence[Piece], keys: Sequence[str | None]
    ) -> tuple[list[Piece], list[Piece]]:
        """(pieces with a state in host memory, all others)."""
        flags = [self.store.are_offloaded(pieces, key) for key in keys]
        found = list(map(any, zip(*flags))) if keys else [False] * len(pieces)
        return (
            [p for p, is_one in zip(pieces, found) if is_one],
            [p for p, is_one in zip(pieces, found) if not is_one],
        )

    def _parts(
        self,
        pieces: Sequence[Piece],
        keys: Sequence[str | None],
        writes: bool,
        bind: Callable[[Sequence[Cut]], Launch],
    ) -> list[Launch]:
        """The launch on offloaded `pieces`, as in `_in_parts`; [] without pieces."""
        # Of several launches on a piece, the launch bound first makes the selection: a launch must
        # not be bound a second time
        selects = any(map(self.store.selects_from, pieces))
        parts = [
            (Part(self.store.memory, views, writes), lambda cuts=cuts: bind(cuts))
            for cuts, views in cut(self.store, pieces, keys)
        ]
        # For metrics too: each binding counts elements
        once = selects or self.store.collector is not None
        return [InParts(self.store, parts, binds_once=once)] if parts else []


def _means_of(cuts: Sequence[Cut], means: Means | None) -> Means | None:
    """The places of cuts in the mean of unreduced gradients."""
    if means is None:
        return None
    sources, mean = means
    return {c.piece: c.of_source(sources[c.whole]) for c in cuts}, mean


class OffloadedLocalUpdate(OffloadedState, LocalUpdate):
    """`LocalUpdate` with state in host memory. U of a bucket is written while the bucket before is
    orthogonalized. The stacks of the two buckets lie in different memories, used in turn.
    """

    def __init__(self, inputs: BucketInputs) -> None:
        super().__init__(inputs)
        self.is_packed = False  # the launches that write U are enqueued
        self.packed_event = inputs.store.scheduler.streams.event("packed")
        if inputs.stack_name is not None:
            inputs.store.scheduler.bucket_refs.append(weakref.ref(self))

    def pack_early(self) -> None:
        """Write U on the stream PACK, once a step. Earlier work of the current stream may use the
        stacks; later work of that stream must first wait for `packed_event`.
        """
        if not self.is_packed:
            self.is_packed = True
            with self.store.scheduler.packing(self.packed_event):
                super()._run_pack(self.pack_all, host_constants(self.group))

    def begin_step(self) -> None:
        """Forget U that a failed step has written."""
        self.is_packed = False

    def _run_pack(
        self, pack: Launch, constants: MuonConstants, gradients: Gradients | tuple[()] = ()
    ) -> None:
        """Write U of this bucket, unless written already, and U of the next bucket; see
        `LaunchedUpdate`.
        """
        buckets = self.store.scheduler.buckets
        if in_dry_run() or self not in buckets:
            return super()._run_pack(pack, constants, gradients)
        for bucket in buckets[(at := buckets.index(self)) : at + 2]:
            bucket.pack_early()
        self.store.scheduler.wait_for(self.packed_event)
        self.is_packed = False


class OffloadedShardedUpdate(OffloadedState, ShardedUpdate):
    """`ShardedUpdate` with state in host memory. U is written while the bucket before is
    orthogonalized, see `pipeline.run`.
    """

    def __init__(self, inputs: BucketInputs) -> None:
        super().__init__(inputs)
        self.packed_event = inputs.store.scheduler.streams.event("packed")

    def before_inbound(self) -> contextlib.AbstractContextManager:
        """Put launches on the stream PACK; see `OwnerUpdate`. Not with overlap_backward, where the
        launches stay on the stream of backward. Not with a selection, whose scratch is in use by
        the bucket that is orthogonalized.
        """
        if self.options.overlap_backward or self.selection is not None:
            return super().before_inbound()
        return self.store.scheduler.packing(self.packed_event)

    def orthogonalize(self, constants: MuonConstants) -> None:
        """See `ShardedUpdate`."""
        self.store.scheduler.wait_for(self.packed_event)
        super().orthogonalize(constants)


class OffloadedUnreducedUpdate(OffloadedState, UnreducedUpdate):
    """`UnreducedUpdate` with state in host memory."""


class OffloadedChunks:
    """Base class, before an update of AdamW in chunks at owners: state is copied from slots to the
    workspace, stepped there, and copied back.
    """

    def __init__(self, inputs: BucketInputs) -> None:
        store: OffloadStore = inputs.store
        with store.showing(None):
            super().__init__(inputs)
        pairs = list(zip(self.current, self.stepped))
        offloaded = [(t.view(-1), s.view(-1)) for t, s in pairs if store.memory.holds(t)]
        others = [pair for pair in pairs if not store.memory.holds(pair[0])]
        self.current, self.stepped = [list(some) for some in zip(*others)] or ([], [])
        most = max(1, (store.scheduler.slot_bytes - 2 * ALIGNMENT) // 16) * 16
        cuts = []
        for state, copy in offloaded:
            count = most // state.itemsize
            cuts += zip(state.split(count), copy.split(count))
        parts = _fill(cuts, store.scheduler.slot_bytes)
        self.load_state = InParts(store, [self._part(some, False) for some in parts])
        self.save_state = InParts(store, [self._part(some, True) for some in parts])

    def _part(self, pairs: Sequence[tuple], writes: bool) -> tuple[Part, Callable[[], Launch]]:
        """A part with the copies of `pairs` (state, copy in the workspace): to the state if
        `writes`, else from it.
        """
        part = Part(self.store.memory, [state for state, _ in pairs], writes)

        def bind() -> Launch:
            """Bind the copies."""
            states = [part.on_device(state) for state, _ in pairs]
            copies = [copy for _, copy in pairs]
            to, source = (states, copies) if writes else (copies, states)
            return lambda: copy_torch(to, source)

        return part, bind

    def orthogonalize(self, constants: tuple) -> None:
        """See `UnreducedElementwiseUpdate`."""
        self.load_state()
        super().orthogonalize(constants)

    def apply(self, constants: tuple) -> None:
        """See `UnreducedElementwiseUpdate`."""
        super().apply(constants)
        self.save_state()


def _fill(pairs: Sequence[tuple], slot_bytes: int) -> list[list[tuple]]:
    """Put pairs (state, ...) together up to the bytes of a slot."""
    parts: list[list[tuple]] = []
    nbytes = 0
    for pair in pairs:
        more = pair[0].nbytes + 2 * ALIGNMENT
        if not parts or nbytes + more > slot_bytes:
            parts.append([])
            nbytes = 0
        parts[-1].append(pair)
        nbytes += more
    return parts


class OffloadedUnreducedElementwiseUpdate(OffloadedChunks, UnreducedElementwiseUpdate):
    """`UnreducedElementwiseUpdate` with state in host memory."""


class OffloadedOwnerStateElementwiseUpdate(OffloadedChunks, OwnerStateElementwiseUpdate):
    """`OwnerStateElementwiseUpdate` with state in host memory."""


# (index of a parameter, its elements in memory order; None: all of it)
Member = tuple[int, slice | None]


class OffloadedElementwiseUpdate(ElementwiseUpdate):
    """`ElementwiseUpdate` with state in host memory: parts of several parameters, or of one."""

    def __init__(
        self,
        store: OffloadStore,
        label: str,
        written: Callable[[BucketUpdate], None] | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        """Arguments of `ElementwiseUpdate`; graphs are never captured."""
        BucketUpdate.__init__(self, label, written, store)
        self.graphs = None
        self.keys = elementwise.state_keys_of(store.groups[0], store.params[0])
        self.weights = store.locals()
        self.states = {key: store.locals(key) for key in self.keys}
        self.averages = list(filter(is_offloaded, self.keys))
        members = [one for i in range(len(self.weights)) for one in self._members(i)]
        # Step count of each further cut of a parameter: (parameter, first element) -> copy. The
        # copies are made now: a part may be bound after an earlier part has advanced the original
        # count
        self.counts = {
            (i, at.start): store.add_step_copy(i, self.states["step"][i])
            for i, at in members
            if "step" in self.keys and at is not None and at.start > 0
        }
        at_home = [m for m in members if not self._host_views(m)]
        away = [m for m in members if self._host_views(m)]
        self.rows = None  # of sums for metrics, of each of `at_home` and `away`; None: no sums
        if store.collector is not None and members:
            self.rows = store.collector.of_parts([i for i, _ in at_home + away])
        self.at_home = self._bind(at_home, None, 0) if at_home else None
        self.launch = InParts(store, self._parts(away, len(at_home)))
        self.packed_event = store.scheduler.streams.event("packed")

    def _members(self, number: int) -> list[Member]:
        """Cut a parameter whose state is larger than a slot."""
        tensors = [self.weights[number], self.store.gradients[number]]
        tensors += [self.states[key][number] for key in self.averages]
        most = self.store.scheduler.slot_bytes // len(self.averages) - 2 * ALIGNMENT
        count = max(CUT, most // max(t.itemsize for t in tensors) // CUT * CUT)
        numel = tensors[0].numel()
        views = self._host_views((number, None))
        if numel <= count or not views or not all(t.is_contiguous() for t in tensors):
            return [(number, None)]
        return [(number, slice(at, min(numel, at + count))) for at in range(0, numel, count)]

    def _host_views(self, member: Member) -> list[torch.Tensor]:
        """State of a member in host memory."""
        views = [_elements(self.states[key][member[0]], member) for key in self.averages]
        return list(filter(self.store.memory.holds, views))

    def _parts(
        self, members: Sequence[Member], first: int
    ) -> list[tuple[Part, Callable[[], Launch]]]:
        """The parts of members, each with the function that binds it. `first`: row of the first."""
        found = []
        for some in self._together(members):
            views = [view for member in some for view in self._host_views(member)]
            part = Part(self.store.memory, views)
            found.append((part, partial(self._bind, some, part, first)))
            first += len(some)
        return found

    def _together(self, members: Sequence[Member]) -> list[list[Member]]:
        """Put members together up to the bytes of a slot."""
        parts: list[list[Member]] = []
        nbytes = 0
        for member in members:
            more = sum(view.nbytes + 2 * ALIGNMENT for view in self._host_views(member))
            if not parts or nbytes + more > self.store.scheduler.slot_bytes:
                parts.append([])
                nbytes = 0
            parts[-1].append(member)
            nbytes += more
        return parts

    def _bind(self, members: Sequence[Member], part: Part | None, first: int) -> Launch:
        """Bind the step of some members. `part`: None if no state of them is offloaded. `first`:
        row of the first.
        """
        store = self.store
        flags = flags_of(store, [i for i, _ in members])
        rows = None if self.rows is None else self.rows[first : first + len(members)]
        W = [_elements(self.weights[i], (i, at)) for i, at in members]
        states = [[self._state(key, member, part) for member in members] for key in self.keys]

        def step(group: Mapping) -> None:
            """Step the members."""
            G = [_elements(store.gradients[i], (i, at)) for i, at in members]
            old = [] if rows is None else wide_copies(W)
            elementwise.step_skipping_flagged(flags, W, G, states, group, store.scalars)
            if rows is not None:
                write_squares(rows, old, W, states[0])

        return step

    def _state(self, key: str, member: Member, part: Part | None) -> torch.Tensor:
        """State `key` of a member, where launches reach it."""
        number, at = member
        tensor = self.states[key][number]
        if key == "step":
            # torch's kernel advances one count for each tensor, so each cut needs a copy
            return tensor if at is None else self.counts.get((number, at.start), tensor)
        view = _elements(tensor, member)
        return part.on_device(view) if self.store.memory.holds(view) else view

    def step(self, group: dict) -> None:
        """Step all parameters; flagged parameters keep weight and state. The launches run beside
        Newton-Schulz, unless `written` has to be called once the weights are written.
        """
        scheduler = self.store.scheduler
        if self.written is not None or in_dry_run():
            return self._launch(group)
        # First U of the first bucket, for which Newton-Schulz waits
        for bucket in scheduler.buckets[:1]:
            bucket.pack_early()
        with scheduler.packing(self.packed_event):
            self._launch(group)

    def _launch(self, group: dict) -> None:
        """Launch all parts."""
        if self.at_home is not None:
            self.at_home(group)
        self.launch(group)


def _elements(tensor: torch.Tensor, member: Member) -> torch.Tensor:
    """The elements of a member in a tensor of its parameter."""
    return tensor if member[1] is None else tensor.view(-1)[member[1]]


# Route of a bucket -> class, as `elementwise_updates.BUCKET_UPDATES`
OFFLOADED_UPDATES = {
    "local": OffloadedLocalUpdate,
    "exchange": OffloadedShardedUpdate,
    "own": OffloadedShardedUpdate,
    "reduce": OffloadedUnreducedUpdate,
    "reduce_elementwise": OffloadedUnreducedElementwiseUpdate,
    "own_elementwise": OffloadedOwnerStateElementwiseUpdate,
}

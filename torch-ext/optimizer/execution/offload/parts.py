"""Launches on offloaded state, cut into parts of at most a slot, and the store that shows state.

`OffloadStore` returns views of a slot where `Store` returns views of state. `InParts` calls a
launch part by part.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ...kernels.elementwise.multi_tensor import Source
from ...kernels.launch.precompile import in_dry_run
from ...kernels.quantized.blocks import BLOCK, is_quantized
from ...planning.planner import Plan
from ...planning.rank_plan import Piece
from ...state.create import outside_inference_mode
from ..param_store import PlanInputViews, Store
from .memory import ALIGNMENT, HostBlocks
from .scheduler import Part, Scheduler

Launch = Callable[..., None]


class OffloadStore(Store):
    """A `Store` with state in host memory: launches are bound to slots, one part at a time."""

    def __init__(
        self,
        plan: Plan,
        state: dict,
        inputs: PlanInputViews,
        memory: HostBlocks,
        scheduler: Scheduler,
    ) -> None:
        self.memory = memory
        self.scheduler = scheduler
        self.shown: Part | None = None  # that launches are bound to now
        self.shows_host = False
        super().__init__(plan, state, inputs)

    @contextlib.contextmanager
    def showing(self, part: Part | None) -> Iterator[None]:
        """Context manager in which `states` returns views of the slot of `part`; with None, views
        of host memory.
        """
        self.shown, self.shows_host = part, part is None
        try:
            yield
        finally:
            self.shown, self.shows_host = None, False

    def states(self, pieces: Sequence[Piece], key: str | None = None) -> list[torch.Tensor]:
        """See `Store`; offloaded state only inside `showing`."""
        return list(map(self._reachable, super().states(pieces, key)))

    def _reachable(self, view: torch.Tensor) -> torch.Tensor:
        """A view that launches can read, in place of a view of state."""
        if self.shows_host or not self.memory.holds(view):
            return view
        assert self.shown is not None, "offloaded state is bound outside of a part"
        return self.shown.on_device(view)

    def host_views(self, pieces: Sequence[Piece], key: str | None) -> list[torch.Tensor]:
        """Views of state where it is stored."""
        return super().states(pieces, key)

    def are_offloaded(self, pieces: Sequence[Piece], key: str | None) -> list[bool]:
        """Whether the state `key` of each piece lies in host memory."""
        return list(map(self.memory.holds, self.host_views(pieces, key)))


class InParts:
    """A launch that is called part by part, each with its state in a slot."""

    def __init__(
        self,
        store: OffloadStore,
        parts: Sequence[tuple[Part, Callable[[], Launch]]],
        binds_once: bool = False,
    ) -> None:
        """`parts`: (part, function that binds the launch of the part). A part is bound when it
        first runs, since slots are given in the order of a step. `binds_once`: a part that was
        bound in a dry run is not bound again.
        """
        self.binds_once = binds_once
        self.store = store
        self.scheduler = store.scheduler
        self.parts = [part for part, _ in parts]
        self.binds = [bind for _, bind in parts]
        self.launches: list[Launch | None] = [None] * len(parts)
        for part in self.parts:
            self.scheduler.reserve(part)

    def _bind(self, number: int) -> Launch:
        """The bound launch of a part."""
        if self.launches[number] is None:
            part = self.parts[number]
            self.scheduler.place(part)
            with outside_inference_mode(), self.store.showing(part):
                self.launches[number] = self.binds[number]()
        return self.launches[number]

    def __call__(self, *arguments: object) -> None:
        """Fetch, compute and write back each part."""
        if in_dry_run():
            for number in range(len(self.parts)):
                self._rehearse(number, arguments)
            return
        scheduler = self.scheduler
        for number, part in enumerate(self.parts):
            launch = functools.partial(self.launches[number] or self._bind(number), *arguments)
            # Every step but the first has a known order, and needs no list of the following parts
            following = () if scheduler.order else self.parts[number + 1 :]
            scheduler.run(part, launch, following)

    def _rehearse(self, number: int, arguments: tuple) -> None:
        """Launch a part in a dry run, which compiles kernels only."""
        part = self.parts[number]
        if self.binds_once:
            return self._bind(number)(*arguments)
        self.scheduler.place_for_dry_run(part)
        with self.store.showing(part):
            launch = self.binds[number]()
        part.place_in(None)
        launch(*arguments)


class Several:
    """Launches one after the other, with equal arguments."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self.launches = list(launches)

    def __call__(self, *arguments: object) -> None:
        """Call all launches."""
        for launch in self.launches:
            launch(*arguments)


@dataclass(frozen=True)
class Cut:
    """A part of a piece: some of its rows or columns."""

    whole: Piece
    piece: Piece  # the part
    place: tuple[slice, slice]  # of the part in the whole

    def of(self, view: torch.Tensor) -> torch.Tensor:
        """The part of a view of the whole piece."""
        return view[self.place]

    def of_numbers(self, view: torch.Tensor) -> torch.Tensor:
        """The part of a view with one number per row, column or matrix."""
        sides = zip(self.place, view.shape)
        return view[tuple(side if n > 1 else slice(None) for side, n in sides)]

    def of_source(self, source: Source) -> Source:
        """The part of a place in a gradient."""
        first = [side.start or 0 for side in self.place]
        offset = sum(n * stride for n, stride in zip(first, source.strides))
        return replace(source, offset=source.offset + offset)


WHOLE = slice(None), slice(None)


def cut(
    store: OffloadStore, pieces: Sequence[Piece], keys: Sequence[str | None]
) -> list[tuple[list[Cut], list[torch.Tensor]]]:
    """Cut pieces so that the states `keys` of some of them fill a slot; return [(cuts, views of
    host memory)], a pair for each part. Of each piece at least one state is in host memory.
    """
    parts: list[tuple[list[Cut], list[torch.Tensor]]] = []
    left = 0  # bytes of the last part's slot
    for piece in pieces:
        views = [view for key in keys for view in store.host_views([piece], key)]
        held = list(filter(store.memory.holds, views))
        # State on the device may have other strides
        axis, count = _outer_dim(held[0])
        spare = 2 * ALIGNMENT * len(held)
        row_bytes = max(1, sum(view.nbytes for view in held) // count)
        is_large = count * row_bytes + spare > store.scheduler.slot_bytes
        # Rows or columns are selected from a whole piece. A piece with outer columns is cut only if
        # it must be
        is_cut = not store.selects_from(piece) and (axis == 0 or is_large)
        step = _cut_step(store, piece, views, axis) if is_cut else count
        first = 0
        while first < count:
            fits = min(count - first, (left - spare) // row_bytes // step * step)
            if fits <= 0:
                parts.append(([], []))
                left = store.scheduler.slot_bytes
                fits = min(count - first, max(step, (left - spare) // row_bytes // step * step))
            one = _cut_along(axis, piece, first, first + fits, count)
            views = [view for key in keys for view in store.host_views([one.piece], key)]
            parts[-1][0].append(one)
            parts[-1][1].extend(filter(store.memory.holds, views))
            left -= fits * row_bytes + spare
            first += fits
    return parts


def _cut_step(store: Store, piece: Piece, views: Sequence[torch.Tensor], axis: int) -> int:
    """Rows (axis 0) or columns at whose multiples a piece with states `views` may be cut: 8-bit
    momentum has a scale for each block along the last dim of the parameter.
    """
    along_blocks = axis == (0 if store.splits[piece.matrix.param].transposed else 1)
    return BLOCK if along_blocks and any(is_quantized(view.dtype) for view in views) else 1


def _outer_dim(view: torch.Tensor) -> tuple[int, int]:
    """(outer dim of a state in memory, its size)."""
    axis = int(view.stride(1) > view.stride(0) or view.shape[0] == 1)
    return axis, view.shape[axis]


def whole_of(piece: Piece) -> Cut:
    """All of a piece."""
    return Cut(piece, piece, WHOLE)


def _cut_along(axis: int, piece: Piece, first: int, stop: int, count: int) -> Cut:
    """Rows (axis 0) or columns of a piece, from `first` to `stop` of `count`."""
    if stop - first == count:
        return whole_of(piece)
    place, box, start = list(WHOLE), list(piece.box), list(piece.start)
    place[axis] = slice(first, stop)
    box[axis] = box[axis][0] + first, box[axis][0] + stop
    start[axis] += first
    part = piece._replace(box=tuple(box), start=tuple(start))
    return Cut(piece, part, tuple(place))

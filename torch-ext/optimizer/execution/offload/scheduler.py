"""The order of transfers of offloaded state: when each part is fetched, and the waits in between.

A launch that reads or writes offloaded state is cut into parts. A `Part` is fetched into a `Slot`
on the device, computed, and written back if the launch writes it. `Scheduler.run` does all three
for one part, and fetches the next parts ahead, in the order of the last step.

[Note: launches beside Newton-Schulz]
Momentum is needed for U only, and Newton-Schulz needs no state. So `packing` puts the launches that
write U of the next bucket, and AdamW, on the stream PACK: their transfers go on while matrices are
multiplied. For these launches PACK takes the place of COMPUTE in the waits below. PACK waits for
all earlier work of the caller's stream, which includes the last reader of the memory that U is
written to. The reader of U, and the end of the step, wait for PACK.

[Note: waits of offloaded state]
Four waits order the three streams, and two more the host:

1. A fetch waits for the launch that used the slot before, if that wrote nothing back.
2. A fetch waits for all earlier write-backs: the slot is free, and host memory is current.
3. A launch waits for the fetch of its part.
4. A write-back waits for the launch.
5. The host waits for the last write-back before it reads or writes state.
6. The host waits for the last fetch before it writes state.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from ...state.create import outside_inference_mode
from .memory import ALIGNMENT, HostBlocks, HostMemory
from .streams import COMPUTE, INWARD, OUTWARD, PACK, Copies, CopyStreams, NoStreams

# At a time a first part is computed, a second one fetched and a third one written back, each in a
# slot of its own. Further slots are filled while matrices are multiplied, which uses no state.
LEAST_SLOTS = 3


class Slot:
    """Memory on the device for one part at a time."""

    def __init__(self, memory: torch.Tensor, streams: NoStreams | CopyStreams, number: int) -> None:
        """`memory`: flat uint8, newly allocated: the current stream orders all earlier uses."""
        self.memory = memory
        self.number = number
        self.fetched = streams.event(f"fetched {number}")
        self.used = streams.event(f"used {number}")
        self.holds: Part | None = None  # fetched and not computed yet
        self.was_written = False  # the last part was written back, after its launch
        streams.share(memory)
        streams.record(self.used, COMPUTE)


class Part:
    """State that one launch reads or writes, in ranges of host memory and in a slot."""

    def __init__(
        self, memory: HostBlocks, views: Sequence[torch.Tensor], writes: bool = True
    ) -> None:
        """`views`: dense views of `memory`. `writes`: whether the launch changes the state."""
        self.memory = memory
        self.writes = writes
        self.ranges = memory.ranges_of(views)
        self.slot: Slot | None = None
        self.offsets: list[int] = []  # of each range in the slot, in bytes
        self.nbytes = 0
        for _, start, stop in self.ranges:
            # Elements keep their alignment, on which the accesses of kernels depend
            self.nbytes += -self.nbytes % ALIGNMENT + start % ALIGNMENT
            self.offsets.append(self.nbytes)
            self.nbytes += stop - start

    def place_in(self, slot: Slot | None) -> None:
        """Give the part its slot, at fixed addresses; None: take the slot away."""
        self.slot = slot
        self.fetches: Copies = []  # (memory in the slot, host memory)
        ranges = self.ranges if slot is not None else ()
        for offset, (block, start, stop) in zip(self.offsets, ranges):
            place = slot.memory[offset : offset + stop - start]
            self.fetches.append((place, block.flat[start:stop]))
        self.write_backs: Copies = [(host, place) for place, host in self.fetches]

    def on_device(self, view: torch.Tensor) -> torch.Tensor:
        """The counterpart in the slot of a view of the part, or of a view inside such a view."""
        number, block, first, stop = next(
            (number, *span) for number, span in enumerate(self.ranges) if _is_in(view, *span)
        )
        offset = self.offsets[number] - first
        place = self.slot.memory[offset + block.offset_of(view) : offset + stop]
        nbytes = place.numel() // view.itemsize * view.itemsize
        return place[:nbytes].view(view.dtype).as_strided(view.shape, view.stride())

    def overlaps(self, other: Part) -> bool:
        """Whether two parts share host memory."""
        return any(
            one is two and a < d and c < b
            for one, a, b in self.ranges
            for two, c, d in other.ranges
        )


def _is_in(view: torch.Tensor, block: HostMemory, start: int, stop: int) -> bool:
    """Whether a view begins in a range of a block."""
    return start <= block.offset_of(view) < stop


def _disjoint(order: Sequence[Part]) -> set[Part]:
    """The parts of a step that occur once and share no host memory with other parts of the step."""
    spans = sorted(
        (block.address + start, block.address + stop, number)
        for number, part in enumerate(order)
        for block, start, stop in part.ranges
    )
    shared, end, last = set(), 0, 0
    for start, stop, number in spans:
        if start < end:
            shared |= {last, number}
        if stop > end:
            end, last = stop, number
    return {part for number, part in enumerate(order) if number not in shared}


class Scheduler:
    """The slots of a bound step, and the transfers to and from them."""

    def __init__(
        self,
        streams: NoStreams | CopyStreams,
        device: torch.device,
        slot_bytes: int,
        slot_count: int = LEAST_SLOTS,
    ) -> None:
        """`slot_bytes`: of each slot; `reserve` may raise it until the first part runs."""
        self.streams = streams
        self.device = device
        self.slot_bytes = slot_bytes
        self.slot_count = slot_count
        self.slots: list[Slot] = []
        self.written = streams.event("written")  # after the last write-back
        self.read: object = streams.event("fetched")  # after the last fetch
        self.given = streams.event("given")  # after earlier work of the caller's stream
        self.packed = streams.event("packed")  # after the last launch of `packing`
        # Updates whose U is written a bucket ahead, in the order of a step. Weak references,
        # because updates hold the scheduler
        self.bucket_refs: list[weakref.ref] = []
        self.order: list[Part] = []  # of the last step
        self.disjoint: set[Part] = set()  # parts of `order` that share no host memory with others
        self.done: list[Part] = []  # parts of this step, in order
        self.ahead = 0  # number of parts of `order` that are fetched, or are past
        self.placed = 0  # parts with a slot

    def reserve(self, part: Part) -> None:
        """Make slots large enough for `part`."""
        self.slot_bytes = max(self.slot_bytes, part.nbytes)

    def _slot(self, number: int) -> Slot:
        """Slot `number`; the first call takes the memory of all slots."""
        if not self.slots:
            # Tensors made in inference mode could not be written to by a later step outside of it
            with outside_inference_mode():
                for i in range(self.slot_count):
                    memory = torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.device)
                    self.slots.append(Slot(memory, self.streams, i))
        return self.slots[number]

    def place(self, part: Part) -> None:
        """Give `part` the next slot in turn, unless it has one."""
        if part.slot is None:
            part.place_in(self._slot(self.placed % self.slot_count))
            self.placed += 1

    def place_for_dry_run(self, part: Part) -> None:
        """Give `part` a slot for launches that are only compiled."""
        part.place_in(self._slot(0))

    def run(self, part: Part, launch: Callable[[], None], following: Sequence[Part] = ()) -> None:
        """Fetch `part` unless already in its slot, call `launch` on the current stream, and write
        back. `following`: parts that run next, for a step without a known order.
        """
        slot, streams = part.slot, self.streams
        if slot.holds is not part:
            self._fetch(part)
        streams.wait(COMPUTE, slot.fetched)
        slot.holds = None
        # If the launch raises, some of its kernels may use the slot
        slot.was_written = False
        try:
            launch()
        finally:
            streams.record(slot.used, COMPUTE)
        if part.writes:
            self._write_back(part)
            slot.was_written = True
        self.done.append(part)
        self.ahead = max(self.ahead, len(self.done))
        if self.order:
            self.prefetch()
        else:
            self._fetch_next(following)

    @contextlib.contextmanager
    def packing(self, packed: object) -> Iterator[None]:
        """Context manager whose launches run on the stream PACK, see [Note: launches beside
        Newton-Schulz]. `packed`: event, recorded at the end; readers of U wait for the event.
        """
        streams = self.streams
        streams.record(self.given, COMPUTE)
        streams.wait(PACK, self.given)
        try:
            with streams.on_pack_stream():
                yield
        finally:
            streams.record(packed, PACK)
            streams.record(self.packed, PACK)

    @property
    def buckets(self) -> list:
        """The updates of `bucket_refs`."""
        return [bucket for ref in self.bucket_refs if (bucket := ref()) is not None]

    def wait_for(self, packed: object) -> None:
        """Let the current stream wait for an event of `packing`."""
        self.streams.wait(COMPUTE, packed)

    def _fetch_next(self, parts: Sequence[Part]) -> None:
        """Fetch the next parts of a launch, in a step without a known order."""
        for part in parts[: self.slot_count]:
            self.place(part)
            if part.slot.holds is None:
                self._fetch(part)
            elif part.slot.holds is not part:
                return

    def prefetch(self) -> None:
        """Fetch the next parts into slots that are free, if the order of the last step is known.

        State must not change between this call and the step.
        """
        while self.ahead < min(len(self.order), len(self.done) + self.slot_count):
            part = self.order[self.ahead]
            # The slot still holds an earlier part, which has to be computed first
            if part.slot.holds is not None:
                return
            self._fetch(part)
            self.ahead += 1

    def _fetch(self, part: Part) -> None:
        """Start the copy of a part into its slot."""
        slot, streams = part.slot, self.streams
        if not slot.was_written:
            streams.wait(INWARD, slot.used)
        streams.wait(INWARD, self.written)
        streams.copy(INWARD, part.fetches)
        streams.record(slot.fetched, INWARD)
        self.read = slot.fetched
        slot.holds = part

    def _write_back(self, part: Part) -> None:
        """Start the copy of a part back to host memory."""
        self.streams.wait(OUTWARD, part.slot.used)
        self.streams.copy(OUTWARD, part.write_backs)
        self.streams.record(self.written, OUTWARD)
        if part in self.disjoint:
            return  # no slot has a copy of this memory: only parts of `order` are fetched ahead
        # A slot that was filled before this write-back is stale
        for slot in self.slots:
            if slot.holds is not None and slot.holds.overlaps(part):
                slot.holds = None

    def end_step(self) -> None:
        """Let the current stream wait for launches of `packing`. Forget fetched parts, since state
        may change between steps; keep the order.
        """
        self.streams.wait(COMPUTE, self.packed)
        if self.done != self.order:
            self.disjoint = _disjoint(self.done)
        self.order, self.done, self.ahead = self.done, [], 0
        for slot in self.slots:
            slot.holds = None

    def wait(self) -> None:
        """Let the host wait until host memory holds the state of the last step, and no copy reads
        host memory. Forget fetched parts, since the host may write state next.
        """
        self.streams.synchronize(self.written)
        self.streams.synchronize(self.read)
        self.ahead = len(self.done)
        for slot in self.slots:
            slot.holds = None

"""Streams of the transfers of offloaded state, and the events between streams.

`CopyStreams` has a CUDA stream for each direction. `NoStreams` stands in for it on other devices,
where every operation is complete when the call returns. Streams are known by name: INWARD (host to
device), OUTWARD (device to host), COMPUTE (the current stream of the caller) and PACK (launches on
state that run beside the caller's stream).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

INWARD, OUTWARD, COMPUTE, PACK = "inward", "outward", "compute", "pack"
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (to, from) of each copy


class NoStreams:
    """The calls of `CopyStreams` on a device without streams of its own: copies at once."""

    def event(self, name: str) -> object:
        """Return a new event. `name`: for messages."""
        return name

    def record(self, event: object, stream: str) -> None:
        """Record `event`: complete when all earlier work of `stream` is."""

    def wait(self, stream: str, event: object) -> None:
        """Let later work of `stream` wait for the last record of `event`; without a record, do
        nothing. The host continues.
        """

    def synchronize(self, event: object) -> None:
        """Let the host wait for the last record of `event`."""

    def copy(self, stream: str, copies: Copies) -> None:
        """Copy on `stream`, INWARD or OUTWARD."""
        for to, source in copies:
            to.copy_(source)

    def share(self, memory: torch.Tensor) -> None:
        """Tell the allocator that all streams use `memory`, of the current and of later streams."""

    def on_pack_stream(self) -> contextlib.AbstractContextManager:
        """Context manager in which PACK is the current stream."""
        return contextlib.nullcontext()


class CopyStreams:
    """Two CUDA streams for copies, and one for launches, beside the current stream. Methods as in
    `NoStreams`.
    """

    def __init__(self, device: torch.device, streams: dict[str, torch.cuda.Stream]) -> None:
        """`streams`: of the last binding, {} before; changed in place. Streams are kept because
        torch has a pool of few streams and gives them out in turn: further streams would soon be
        shared with other code.
        """
        self.device = device
        self.streams = streams
        if not streams or streams[PACK].device != device:
            # Of higher priority: the short kernels of PACK run first if both streams have blocks
            streams[PACK] = torch.cuda.Stream(device, priority=-1)
            streams |= {name: torch.cuda.Stream(device) for name in (INWARD, OUTWARD)}
        # The stream PACK inside of `on_pack_stream`, which saves a call of torch; else None
        self.current: torch.cuda.Stream | None = None
        self.shared: list[torch.Tensor] = []
        self.told = set(self.streams.values())  # streams that the allocator knows to use `shared`

    def _stream(self, name: str) -> torch.cuda.Stream:
        """The stream with a name; COMPUTE may be another stream at every call."""
        if name != COMPUTE:
            return self.streams[name]
        if self.current is not None:
            return self.current
        stream = torch.cuda.current_stream(self.device)
        if stream not in self.told:
            self.told.add(stream)
            for memory in self.shared:
                memory.record_stream(stream)
        return stream

    def event(self, name: str) -> torch.cuda.Event:
        """See `NoStreams`."""
        return torch.cuda.Event()

    def record(self, event: torch.cuda.Event, stream: str) -> None:
        """See `NoStreams`."""
        event.record(self._stream(stream))

    def wait(self, stream: str, event: torch.cuda.Event) -> None:
        """See `NoStreams`."""
        # Events are recorded again later: an enqueued wait keeps to the last record before the wait
        event.wait(self._stream(stream))

    def synchronize(self, event: torch.cuda.Event) -> None:
        """See `NoStreams`."""
        event.synchronize()

    def copy(self, stream: str, copies: Copies) -> None:
        """See `NoStreams`. The host side of each copy is pinned memory."""
        if self.current is None:
            with torch.cuda.stream(self.streams[stream]):
                for to, source in copies:
                    to.copy_(source, non_blocking=True)
            return
        # Without torch's context manager, whose questions for the device and the current stream
        # take the host as long as a copy
        torch.cuda.set_stream(self.streams[stream])
        try:
            for to, source in copies:
                to.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(self.current)

    def share(self, memory: torch.Tensor) -> None:
        """See `NoStreams`: memory that is freed is not reused before copies and launches of all
        streams are done.
        """
        self.shared.append(memory)
        for stream in self.told:
            memory.record_stream(stream)

    @contextlib.contextmanager
    def on_pack_stream(self) -> Iterator[None]:
        """See `NoStreams`. Until the end nothing else may change the current stream."""
        with torch.cuda.stream(self.streams[PACK]):
            self.current = self.streams[PACK]
            try:
                yield
            finally:
                self.current = None


def streams_for(
    device: torch.device, streams: dict[str, torch.cuda.Stream]
) -> NoStreams | CopyStreams:
    """Return the streams of a device. `streams`: kept from binding to binding, changed in place."""
    return CopyStreams(device, streams) if device.type == "cuda" else NoStreams()

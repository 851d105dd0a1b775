"""Streams of the transfers of offloaded state, and the events between streams.

`CopyStreams` has a CUDA stream for each direction. `NoStreams` stands in for it on other devices,
where every operation is complete when the call returns. Streams are known by name: INWARD (host to
device), OUTWARD (device to host) and COMPUTE (the current stream of the caller).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

INWARD, OUTWARD, COMPUTE = "inward", "outward", "compute"
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
        """Tell the allocator that all streams use `memory`."""


class CopyStreams:
    """Two CUDA streams for copies, beside the current stream. Methods as in `NoStreams`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = {name: torch.cuda.Stream(device) for name in (INWARD, OUTWARD)}

    def _stream(self, name: str) -> torch.cuda.Stream:
        """The stream with a name; COMPUTE may be another stream at every call."""
        return self.streams.get(name) or torch.cuda.current_stream(self.device)

    def event(self, name: str) -> torch.cuda.Event:
        """See `NoStreams`."""
        return torch.cuda.Event()

    def record(self, event: torch.cuda.Event, stream: str) -> None:
        """See `NoStreams`."""
        event.record(self._stream(stream))

    def wait(self, stream: str, event: torch.cuda.Event) -> None:
        """See `NoStreams`."""
        # A wait that is enqueued keeps to the record of this moment: events are recorded again
        self._stream(stream).wait_event(event)

    def synchronize(self, event: torch.cuda.Event) -> None:
        """See `NoStreams`."""
        event.synchronize()

    def copy(self, stream: str, copies: Copies) -> None:
        """See `NoStreams`. The host side of each copy is pinned memory."""
        with torch.cuda.stream(self.streams[stream]):
            for to, source in copies:
                to.copy_(source, non_blocking=True)

    def share(self, memory: torch.Tensor) -> None:
        """See `NoStreams`: memory that is freed is not reused before the copies are done."""
        for stream in self.streams.values():
            memory.record_stream(stream)


def streams_for(device: torch.device) -> NoStreams | CopyStreams:
    """Return the streams of a device."""
    return CopyStreams(device) if device.type == "cuda" else NoStreams()

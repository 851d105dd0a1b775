"""All-to-all buffers with a view of each piece, and the mean of gradients over ranks at their
owner.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..kernels.elementwise.multi_tensor import Source


class Mean:
    """The mean over the ranks of what arrived from each, in fp32 (fp64 in fp64), summed in torch's
    order.
    """

    def __init__(self, wire, memory):
        ranks, nbytes = len(wire.travel.recv_bytes), wire.travel.recv_bytes[0]
        self.arrived = wire.recv.view(wire.dtype).view(ranks, nbytes // wire.dtype.itemsize)
        self.offsets, self.itemsize = wire.travel.arrive, wire.dtype.itemsize
        self.out = memory.view(torch.promote_types(wire.dtype, torch.float32))
        self.result = [self.out], torch.tensor([self.out.data_ptr()], device=self.out.device)

    def __call__(self):
        """The mean as a list of one gradient, and its address."""
        torch.sum(self.arrived, 0, dtype=self.out.dtype, out=self.out)
        self.out.div_(self.arrived.size(0))
        return self.result

    def source(self, piece):
        """Where the mean of `piece`, which arrived from all ranks alike, lies."""
        offset = self.offsets[piece] // self.itemsize % self.arrived.size(1)
        return Source(0, offset, (piece.shape[1], 1))

    def view(self, piece):
        return self.source(piece).view([self.out], piece.shape)


def piece_at(flat, offset, shape, dtype):
    """The (rows, cols) view of a flat uint8 buffer that begins at a byte offset."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    return flat[offset : offset + nbytes].view(dtype).view(shape)


class AllToAllBuffers:
    """One direction of travel: flat send and receive buffers, and the view of each piece in them.
    `leave`: one piece for each place, of those that go to several ranks.
    """

    def __init__(self, bound, direction, send, recv, dtype=None):
        self.travel, self.crosses = (
            getattr(bound.share, direction),
            getattr(bound.share, f"crosses_{direction}"),
        )
        self.group, self.dtype = bound.group, dtype or bound.options.wire_dtype
        self.send = bound.memory[send][: self.travel.leaving]
        self.recv = bound.memory[recv][: sum(self.travel.recv_bytes)]
        once = {at: p for p, at in self.travel.leave.items()}
        self.leave = {p: self._view(self.send, p, at) for at, p in once.items()}
        self.arrive = {p: self._view(self.recv, p, at) for p, at in self.travel.arrive.items()}
        self.parts = self._parts() if bound.share.copies and direction == "outbound" else None

    def _parts(self):
        """(What each peer sends, what each gets): some get the same memory."""
        sent = zip(self.travel.send_from, self.travel.send_bytes)
        return list(self.recv.split(self.travel.recv_bytes)), [
            self.send[at : at + size] for at, size in sent
        ]

    def _view(self, flat, piece, at):
        return piece_at(flat, at, piece.shape, torch.float32 if piece.kind == "row" else self.dtype)

    def go(self) -> list:
        """Start the collective, unless the plan says that no rank sends anything; return what is in
        flight.
        """
        if not self.crosses:
            return []
        if self.parts:
            return [dist.all_to_all(*self.parts, group=self.group, async_op=True)]
        splits = list(self.travel.recv_bytes), list(self.travel.send_bytes)
        return [
            dist.all_to_all_single(self.recv, self.send, *splits, group=self.group, async_op=True)
        ]

"""Gradients of all ranks -> their mean. Knows no route; which rank sent what, it does not see."""
from __future__ import annotations

import torch

from .kernels.table import Source


class Mean:
    """The mean over the ranks of what arrived from each, in fp32 (fp64 in fp64), summed in torch's order."""

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

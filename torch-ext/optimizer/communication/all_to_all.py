"""All-to-all buffers with a view of each piece, and the mean of gradients over ranks at their
owner.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from ..kernels.elementwise.multi_tensor import Source
from ..planning.rank_plan import Piece, RankPlan


class Mean:
    """The mean over the ranks of what arrived from each, in fp32 (fp64 in fp64), summed in torch's
    order.
    """

    def __init__(self, buffers: AllToAllBuffers, memory: torch.Tensor):
        """`buffers`: of an all-to-all in which every rank sends equally many bytes; `memory`: flat
        uint8, for the mean.
        """
        plan = buffers.plan
        ranks = len(plan.recv_bytes)
        count = plan.recv_bytes[0] // buffers.dtype.itemsize
        self.arrived = buffers.recv.view(buffers.dtype).view(ranks, count)
        self.offsets = plan.arrive
        self.itemsize = buffers.dtype.itemsize
        self.out = memory.view(torch.promote_types(buffers.dtype, torch.float32))
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
    """One direction of a bucket's all-to-all: flat send and receive buffers, and a view of each
    piece in them.

    `leave`: piece -> view in the send buffer, one piece for each place that is sent to several
    ranks. `arrive`: piece -> view in the receive buffer.
    """

    def __init__(
        self,
        share: RankPlan,
        process_group: dist.ProcessGroup | None,
        memory: Mapping[str, torch.Tensor],
        direction: str,
        uses: tuple[str, str],
        dtype: torch.dtype,
    ):
        """`direction`: "inbound" or "outbound"; `uses`: keys of the send and the receive buffer in
        `memory` (flat uint8 tensors); `dtype`: of pieces but rows of state, which are fp32.
        """
        self.plan = getattr(share, direction)
        self.has_traffic = getattr(share, f"crosses_{direction}")
        self.process_group = process_group
        self.dtype = dtype
        send, recv = uses
        self.send = memory[send][: self.plan.leaving]
        self.recv = memory[recv][: sum(self.plan.recv_bytes)]
        first = {offset: p for p, offset in self.plan.leave.items()}
        self.leave = {p: self._view(self.send, p, offset) for offset, p in first.items()}
        self.arrive = {p: self._view(self.recv, p, at) for p, at in self.plan.arrive.items()}
        self.per_peer = self._split() if share.copies and direction == "outbound" else None

    def _split(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(receive buffers, send buffers) by peer; replicas are sent from one place."""
        send = zip(self.plan.send_from, self.plan.send_bytes)
        sent = [self.send[offset : offset + nbytes] for offset, nbytes in send]
        return list(self.recv.split(self.plan.recv_bytes)), sent

    def _view(self, flat: torch.Tensor, piece: Piece, offset_bytes: int) -> torch.Tensor:
        dtype = torch.float32 if piece.kind == "row" else self.dtype
        return piece_at(flat, offset_bytes, piece.shape, dtype)

    def start(self) -> list[dist.Work]:
        """Start the all-to-all and return it in a list; empty if no rank sends anything."""
        if not self.has_traffic:
            return []
        if self.per_peer:
            recv, send = self.per_peer
            return [dist.all_to_all(recv, send, group=self.process_group, async_op=True)]
        return [
            dist.all_to_all_single(
                self.recv,
                self.send,
                list(self.plan.recv_bytes),
                list(self.plan.send_bytes),
                group=self.process_group,
                async_op=True,
            )
        ]

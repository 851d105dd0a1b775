"""All-to-all buffers of a bucket, and the mean of unreduced gradients at their owner.

`AllToAllBuffers`: a direction of a bucket's all-to-all, with a view of each piece. `Mean`: the
average over ranks of received gradients. `piece_at`: a view of a flat buffer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from ..kernels.elementwise.multi_tensor import Source
from ..planning.rank_plan import Piece, RankPlan


class Mean:
    """Mean over the ranks of the gradients that an all-to-all brought, computed in fp32 (fp64 for
    fp64 gradients).

    `arrived`: (ranks, elements), the receive buffer with a row for each sender. `out`: (elements,),
    the mean. torch.sum fixes the order of the summands, and therefore the bits.
    """

    def __init__(self, buffers: AllToAllBuffers, memory: torch.Tensor) -> None:
        """`buffers`: inbound buffers of an all-to-all in which every rank sends an equal number of
        bytes. `memory`: flat uint8 memory of the mean.
        """
        plan = buffers.plan
        ranks = len(plan.recv_bytes)
        count = plan.recv_bytes[0] // buffers.dtype.itemsize
        self.arrived = buffers.recv.view(buffers.dtype).view(ranks, count)
        self.offsets = plan.arrive
        self.itemsize = buffers.dtype.itemsize
        # bf16 and fp16 gradients are summed in fp32
        self.out = memory.view(torch.promote_types(buffers.dtype, torch.float32))
        # Built once: a step allocates nothing
        self.result = [self.out], torch.tensor([self.out.data_ptr()], device=self.out.device)

    def __call__(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Compute the mean in place and return ([mean], int64 address of the mean on the device),
        the form in which momentum kernels take gradients.
        """
        torch.sum(self.arrived, 0, dtype=self.out.dtype, out=self.out)
        self.out.div_(self.arrived.size(0))
        return self.result

    def source(self, piece: Piece) -> Source:
        """Return the position of `piece` in the mean. Any of the copies of the piece that arrived
        may be given: all ranks send equal layouts.
        """
        # Modulo: the offset within the sender's row, which is the offset within the mean
        offset = self.offsets[piece] // self.itemsize % self.arrived.size(1)
        return Source(0, offset, (piece.shape[1], 1))

    def view(self, piece: Piece) -> torch.Tensor:
        """Return the mean of `piece` as a view of shape (rows, cols)."""
        return self.source(piece).view([self.out], piece.shape)


def piece_at(
    flat: torch.Tensor, offset_bytes: int, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the (rows, cols) view of a flat uint8 buffer that begins at `offset_bytes`."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    return flat[offset_bytes : offset_bytes + nbytes].view(dtype).view(shape)


class AllToAllBuffers:
    """A direction of a bucket's all-to-all: flat send and receive buffers, and a view of each
    piece.

    `leave`: piece -> view in the send buffer; a single piece for each split of the buffer, even if
    several ranks receive the split. `arrive`: piece -> view in the receive buffer. `per_peer`:
    (receive buffers, send buffers) by peer if several ranks receive a split, else None.
    """

    def __init__(
        self,
        rank_plan: RankPlan,
        process_group: dist.ProcessGroup | None,
        memory: Mapping[str, torch.Tensor],
        direction: str,
        uses: tuple[str, str],
        dtype: torch.dtype,
        weight_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`direction`: "inbound" (shards to owner) or "outbound" (owner to shards). `uses`: keys of
        the send and of the receive buffer in `memory`, which maps uses of the workspace to flat
        uint8 tensors. `dtype`: of pieces of matrices and chunks. `weight_dtype`: of pieces of
        weights. All further pieces are fp32.
        """
        self.plan = getattr(rank_plan, direction)
        self.has_traffic = getattr(rank_plan, f"crosses_{direction}")
        self.process_group = process_group
        self.dtype = dtype
        self.weight_dtype = weight_dtype
        send_use, recv_use = uses
        self.send = memory[send_use][: self.plan.leaving]
        self.recv = memory[recv_use][: sum(self.plan.recv_bytes)]
        # Replicas sent from one split have equal offsets. Only the last such replica is entered in
        # `leave`, so that each split is written once.
        by_offset = {offset_bytes: p for p, offset_bytes in self.plan.leave.items()}
        self.leave = {
            p: self._view(self.send, p, offset_bytes) for offset_bytes, p in by_offset.items()
        }
        self.arrive = {
            p: self._view(self.recv, p, offset_bytes)
            for p, offset_bytes in self.plan.arrive.items()
        }
        self.per_peer = (
            self._split() if rank_plan.has_common_splits and direction == "outbound" else None
        )

    def _split(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return (receive buffers, send buffers) by peer. Peers with equal replicas share a send
        buffer.
        """
        splits = zip(self.plan.send_from, self.plan.send_bytes)
        send = [self.send[start : start + nbytes] for start, nbytes in splits]
        return list(self.recv.split(self.plan.recv_bytes)), send

    def _view(self, flat: torch.Tensor, piece: Piece, offset_bytes: int) -> torch.Tensor:
        """Return the view of a piece in a send or receive buffer."""
        dtypes = {"matrix": self.dtype, "chunk": self.dtype, "weight": self.weight_dtype}
        dtype = dtypes.get(piece.kind, torch.float32)
        return piece_at(flat, offset_bytes, piece.shape, dtype)

    def start(self) -> list[dist.Work]:
        """Start the all-to-all and return [handle]; [] if no rank of the bucket sends anything."""
        if not self.has_traffic:
            return []
        # all_to_all_single sends consecutive splits of a buffer, so the buffer would have to hold a
        # split of several peers several times
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

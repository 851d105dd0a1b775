"""Memory that buckets share, and the stacks of matrices in it that Newton-Schulz reads and
writes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from ..communication.all_to_all import piece_at
from ..kernels.elementwise.momentum import Copy
from ..kernels.elementwise.row_scattered import ScatteredRows
from ..planning.memory_model import ALIGNMENT
from ..planning.rank_plan import Piece, RankPlan


class Workspace:
    """Flat memory that buckets use in turn: a bucket buffer for each bucket in flight and one
    shared scratch, each as large as any bucket wants.
    """

    def __init__(self, slots, device):
        self.slots, self.device, self.sizes, self.buffers = slots, device, defaultdict(int), {}

    def reserve(self, number, share) -> None:
        """For bucket `number`. All buckets reserve before the first takes its part."""
        for memory, nbytes in share.workspace_layout()[1].items():
            key = self._key(number, memory)
            self.sizes[key] = max(self.sizes[key], nbytes)

    def views_for(self, number, share) -> dict:
        """use -> flat uint8 tensor of the bytes that the share needs, at its place."""
        lent = {}
        for use, (memory, at) in share.workspace_layout()[0].items():
            key = self._key(number, memory)
            if key not in self.buffers:
                self.buffers[key] = torch.empty(
                    self.sizes[key], dtype=torch.uint8, device=self.device
                )
            lent[use] = self.buffers[key][at : at + share.scratch_bytes[use]]
        return lent

    def _key(self, number, memory):
        return number % self.slots if memory == "bucket_buffer" else memory


def like(lists, flat):
    """Lists of contiguous tensors like those of `lists`, each list one after another in a flat
    uint8 buffer.
    """
    found, at = [], 0
    for tensors in lists:
        at += -at % ALIGNMENT
        found.append([])
        for t in tensors:
            found[-1].append(flat[at : at + t.nbytes].view(t.dtype).view(t.shape))
            at += t.nbytes
    return found


class Stacks:
    """`read`: matrices (N, R, C) of each shape as the iteration finds them, `written`: where it
    leaves them, `rows`: their (N, R, 1) row state. `come`, `go`: {piece computed here: the view of
    it in these}.

    What is whole stays in one place, and so does row state. The others are Splits.
    """

    def __init__(
        self,
        share: RankPlan,
        memory: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        came: Mapping[Piece, torch.Tensor] | None = None,
        leaves: Mapping[Piece, torch.Tensor] | None = None,
    ):
        """`memory`: workspace use -> flat uint8 tensor; `dtype`: of updates. `came`, `leaves`:
        {piece: its place} of all that is read and written where matrices are `direct`; of several
        places for one box, the first.
        """
        self.share = share
        self.inputs = []
        self.outputs = []
        self.row_state = []
        ends = [self._places(came), self._places(leaves)]
        members = defaultdict(list)
        whole = {}
        at = row = 0
        for matrix in self.share.matrices:
            members[matrix.rows, matrix.cols, matrix in self.share.direct].append(matrix)
        for (R, C, direct), matrices in members.items():
            N = len(matrices)
            rows = piece_at(memory["rows"], row, (N * R, 1), torch.float32)
            self.row_state.append(rows.view(N, R, 1))
            whole |= {(m, "row"): t for m, t in zip(matrices, self.row_state[-1])}
            row += 4 * N * R
            if direct:
                read, written = (
                    ScatteredRows([[at for _, at in sorted(end[m].items())] for m in matrices])
                    for end in ends
                )
            else:
                read = written = piece_at(memory["stack"], at, (N * R, C), dtype).view(N, R, C)
                whole |= {(m, "update"): t for m, t in zip(matrices, read)}
                at += read.nbytes + -read.nbytes % ALIGNMENT
            self.inputs.append(read)
            self.outputs.append(written)
        self.input_view, self.output_view = (
            {p: _view(p, whole, end) for p in self.share.owned} for end in ends
        )

    def _places(self, places):
        """{direct matrix: {box: place}}."""
        found = defaultdict(dict)
        for p, place in (places or {}).items():
            if p.kind == "update" and p.matrix in self.share.direct:
                found[p.matrix].setdefault(p.box, place)
        return found


def _view(p, whole, places):
    stack = whole.get((p.matrix, p.kind))
    return places[p.matrix][p.box] if stack is None else stack[slice(*p.box[0]), slice(*p.box[1])]


def copy_apart(to: dict, what: dict) -> Copy:
    """A Copy to the places of pieces, {piece: view}, of those that are not there."""
    apart = [(place, what[p]) for p, place in to.items() if place.data_ptr() != what[p].data_ptr()]
    return Copy([place for place, _ in apart], [view for _, view in apart])

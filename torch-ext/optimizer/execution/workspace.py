"""The workspace shared by buckets, the stacks of matrices in it that Newton-Schulz iterates, and
the memory of pieces from which a rank selects rows or columns (`BoundSelection`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..communication.all_to_all import piece_at
from ..kernels.elementwise.momentum import Copy
from ..kernels.elementwise.row_scattered import ScatteredRows
from ..newton_schulz.selection import Block, starts_of
from ..planning.memory_model import ALIGNMENT
from ..planning.plan import Matrix
from ..planning.rank_plan import Box, Piece, RankPlan
from ..rules.phases import SelectedPieces
from ..rules.rule import shape_per

if TYPE_CHECKING:
    from .param_store import Store

BoxViews = dict[Matrix, dict[Box, torch.Tensor]]  # matrix -> {box: view of the box}


class Workspace:
    """Flat memory common to all buckets of a step: a bucket buffer for each bucket in flight, and
    a single shared scratch. See `RankPlan.workspace_layout` for the uses of both.

    Bucket number i uses buffer i modulo the number of buffers. A buffer has the bytes of the
    largest bucket that uses it. Stacks of matrices may lie apart from the scratch, in a memory with
    a name: then they are written while another bucket uses the scratch.
    """

    def __init__(self, buffer_count: int, device: torch.device | None) -> None:
        """`device`: None only if no bucket will reserve memory."""
        self.buffer_count = buffer_count
        self.device = device
        # On which memory is taken, and later given back to torch's allocator
        on_gpu = device is not None and device.type == "cuda"
        self.stream = torch.cuda.current_stream(device) if on_gpu else None
        self.sizes: dict[int | str, int] = defaultdict(int)  # key of a buffer -> bytes
        self.buffers: dict[int | str, torch.Tensor] = {}  # key of a buffer -> flat uint8 tensor

    def reserve(self, number: int, rank_plan: RankPlan, stack_name: str | None = None) -> None:
        """Count the bytes of bucket `number`. All buckets reserve before the first `views_for`.
        `stack_name`: as in `layout_of`.
        """
        for memory, nbytes in layout_of(rank_plan, stack_name)[1].items():
            key = self._key(number, memory)
            self.sizes[key] = max(self.sizes[key], nbytes)

    def take_over(self, former: Workspace) -> None:
        """Use the buffers of a step that is bound no longer in place of new buffers of equal bytes.
        Call when all buckets have reserved.
        """
        # Two workspaces at a time could exceed the memory of a GPU. Buffers of other sizes exist
        # twice until the former step is dropped. The former step has ended in its buffers once
        # later launches of the same stream run
        if (former.device, former.stream) == (self.device, self.stream):
            for key, buffer in former.buffers.items():
                if self.sizes.get(key) == buffer.nbytes:
                    self.buffers[key] = buffer

    def views_for(
        self, number: int, rank_plan: RankPlan, stack_name: str | None = None
    ) -> dict[str, torch.Tensor]:
        """{use of the workspace: flat uint8 view} for bucket `number`; allocates on first use.
        `stack_name`: as in `layout_of`.
        """
        views = {}
        for use, (memory, offset_bytes) in layout_of(rank_plan, stack_name)[0].items():
            key = self._key(number, memory)
            # Not zeroed: every use is written before read
            if key not in self.buffers:
                self.buffers[key] = torch.empty(
                    self.sizes[key], dtype=torch.uint8, device=self.device
                )
            end = offset_bytes + rank_plan.use_bytes[use]
            views[use] = self.buffers[key][offset_bytes:end]
        return views

    # All buckets share a single scratch: a bucket uses the scratch between its two all-to-alls
    # only, and the pipeline ends the computation of a bucket before the next bucket is computed
    def _key(self, number: int, memory: str) -> int | str:
        """Key of the buffer for bucket `number`; "shared_scratch" is common to all buckets."""
        return number % self.buffer_count if memory == "bucket_buffer" else memory


def layout_of(
    rank_plan: RankPlan, stack_name: str | None = None
) -> tuple[dict[str, tuple[str, int]], dict[str, int]]:
    """`RankPlan.workspace_layout`, with the stacks in a memory `stack_name`; None: in the shared
    scratch.
    """
    if stack_name is None:
        return rank_plan.workspace_layout()
    nbytes = rank_plan.use_bytes
    places, sizes = replace(rank_plan, use_bytes={**nbytes, "stack": 0}).workspace_layout()
    return {**places, "stack": (stack_name, 0)}, {**sizes, stack_name: nbytes["stack"]}


def buffer_name(key: int | str) -> str:
    """Return the name of a buffer in reports: "bucket buffer <index>", "shared scratch", or of a
    memory of stacks.
    """
    return f"bucket buffer {key}" if isinstance(key, int) else key.replace("_", " ")


def views_like(
    lists: Sequence[Sequence[torch.Tensor]], flat: torch.Tensor
) -> list[list[torch.Tensor]]:
    """Lists of contiguous views of the flat uint8 tensor `flat`, with dtypes and shapes of `lists`.

    Tensors of a list follow without gaps; every list starts at a multiple of ALIGNMENT bytes.
    """
    views = []
    offset_bytes = 0
    for tensors in lists:
        offset_bytes += -offset_bytes % ALIGNMENT
        views.append([])
        for t in tensors:
            place = flat[offset_bytes : offset_bytes + t.nbytes]
            views[-1].append(place.view(t.dtype).view(t.shape))
            offset_bytes += t.nbytes
    return views


class Stacks:
    """The matrices owned by a rank, in stacks (N, R, C) of equal shapes, as Newton-Schulz takes
    them.

    Newton-Schulz reads the stacks `inputs` and writes the stacks `outputs`. For direct
    matrices (see [Note: direct matrices] in rank_plan.py) both are `ScatteredRows`: tables of where
    each row lies in the all-to-all buffers. All remaining matrices lie whole in the shared scratch,
    and input and output are a single tensor. `wide` has for each stack its other tensors by kind of
    a piece: state, weights and numbers to send, (N, R, C), (N, R, 1), (N, 1, C) or (N, 1, 1).
    """

    def __init__(
        self,
        rank_plan: RankPlan,
        memory: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        wide: Mapping[str, tuple[str, torch.dtype]],
        read_from: Mapping[Piece, torch.Tensor] | None = None,
        write_to: Mapping[Piece, torch.Tensor] | None = None,
    ) -> None:
        """`memory`: use of the workspace -> flat uint8 tensor. `dtype`: of U and O (wire_dtype).
        `wide`: kind of `PlanInputs.wide` -> (`per`, dtype).

        `read_from`, `write_to`: views of pieces of direct matrices; None without direct matrices.
        If several pieces have equal boxes (replicas), the first piece counts.
        """
        self.rank_plan = rank_plan
        self.inputs: list[torch.Tensor | ScatteredRows] = []
        self.outputs: list[torch.Tensor | ScatteredRows] = []
        self.wide: list[dict[str, torch.Tensor]] = []
        self.matrices: list[list[Matrix]] = []  # of each stack
        self.input_view: dict[Piece, torch.Tensor] = {}  # piece of an owned matrix -> view
        self.output_view: dict[Piece, torch.Tensor] = {}  # the counterpart in `outputs`
        inputs = self._box_views(read_from)
        outputs = self._box_views(write_to)
        # A direct matrix and a whole matrix of equal shape need stacks of different kinds
        members = defaultdict(list)
        for matrix in rank_plan.matrices:
            is_direct = matrix in rank_plan.direct
            members[matrix.rows, matrix.cols, is_direct, matrix.selected].append(matrix)
        whole = {}  # (matrix, kind of a piece) -> view of the matrix in a stack
        stack_offset_bytes = 0
        wide_offset_bytes = 0
        for (R, C, direct, _), matrices in members.items():
            N = len(matrices)
            self.matrices.append(matrices)
            self.wide.append({})
            for kind, (per, own_dtype) in wide.items():
                r, c = shape_per(per, R, C)
                flat = piece_at(memory["wide"], wide_offset_bytes, (N * r, c), own_dtype)
                self.wide[-1][kind] = stack = flat.view(N, r, c)
                whole |= {(m, kind): t for m, t in zip(matrices, stack)}
                # At multiples of ALIGNMENT as well: a kernel that adds elements has another layout,
                # hence other bits, for unaligned memory, and offsets depend on N
                wide_offset_bytes += flat.nbytes + -flat.nbytes % ALIGNMENT
            if direct:
                self.inputs.append(_scattered(matrices, inputs))
                self.outputs.append(_scattered(matrices, outputs))
                continue
            flat = piece_at(memory["stack"], stack_offset_bytes, (N * R, C), dtype)
            stack = flat.view(N, R, C)
            whole |= {(m, "matrix"): t for m, t in zip(matrices, stack)}
            # In place: `orthogonalize_` may replace matrices by their polar factors.
            # The next stack starts at a multiple of ALIGNMENT: TMA descriptors need aligned bases
            stack_offset_bytes += stack.nbytes + -stack.nbytes % ALIGNMENT
            self.inputs.append(stack)
            self.outputs.append(stack)
        # For each stack, the part of it that is iterated, (N, k, C) or (N, R, k); None: the whole
        self.selected = _selected(self.matrices, memory["selected"], dtype)
        self.input_view = {p: _view(p, whole, inputs) for p in rank_plan.owned}
        self.output_view = {p: _view(p, whole, outputs) for p in rank_plan.owned}

    def _box_views(self, views: Mapping[Piece, torch.Tensor] | None) -> BoxViews:
        """Views of the boxes of each direct matrix."""
        found = defaultdict(dict)
        for p, view in (views or {}).items():
            if p.kind == "matrix" and p.matrix in self.rank_plan.direct:
                found[p.matrix].setdefault(p.box, view)
        return found


def _selected(
    stacks: Sequence[Sequence[Matrix]], memory: torch.Tensor, dtype: torch.dtype
) -> list[torch.Tensor | None]:
    """Memory of the parts of each stack that the owner selects; None: the whole is iterated."""
    views, offset_bytes = [], 0
    for matrices in stacks:
        views.append(None)
        if matrices[0].selected:
            r, c = matrices[0].selected
            flat = piece_at(memory, offset_bytes, (len(matrices) * r, c), dtype)
            views[-1] = flat.view(len(matrices), r, c)
            offset_bytes += flat.nbytes + -flat.nbytes % ALIGNMENT
    return views


def _scattered(matrices: Sequence[Matrix], views: BoxViews) -> ScatteredRows:
    """A stack of direct matrices. Boxes are sorted by the first row, so rows are in order."""
    return ScatteredRows([[view for _, view in sorted(views[m].items())] for m in matrices])


def _view(p: Piece, whole: Mapping[tuple, torch.Tensor], views: BoxViews) -> torch.Tensor:
    """The view of a piece: inside a whole matrix, or where the box of a direct matrix lies."""
    # State always lies in stacks, even the state of direct matrices
    stack = whole.get((p.matrix, p.kind))
    if stack is None:
        return views[p.matrix][p.box]
    return stack[slice(*p.box[0]), slice(*p.box[1])]


def copy_unless_in_place(
    to: Mapping[Piece, torch.Tensor], what: Mapping[Piece, torch.Tensor]
) -> Copy:
    """A `Copy` from `what` to `to` of all pieces of `to` whose two views are different memory."""
    # Direct matrices are iterated where pieces arrive, and O is sent from where it was written
    apart = [(view, what[p]) for p, view in to.items() if view.data_ptr() != what[p].data_ptr()]
    return Copy([view for view, _ in apart], [view for _, view in apart])


class BoundSelection:
    """The stored pieces of a bucket from which this rank selects what it sends.

    `chosen`: piece -> (k,) int64, the selected rows or columns of the piece, valid from the pack of
    a step to the weight update. CUDA graphs of both hold the addresses.
    """

    def __init__(
        self, store: Store, memory: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> None:
        """`memory`: use of the workspace -> flat uint8 tensor. `dtype`: of U and O (wire_dtype)."""
        self.store = store
        self.memory = memory
        self.dtype = dtype
        self.chosen: dict[Piece, torch.Tensor] = {}
        self.bound: set[Piece] = set()  # of all calls of `bind`

    def unbound(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces from which this rank selects, without those of earlier calls of `bind`."""
        return [p for p in pieces if p not in self.bound and self.store.selects_from(p)]

    def bind(self, pieces: Sequence[Piece]) -> tuple[list[SelectedPieces], list[list[Piece]]]:
        """Bind those of `pieces` from which this rank selects; return (bound pieces, the pieces in
        each). All calls share memory, so contents last for a single phase.
        """
        alike = defaultdict(list)
        for p in [p for p in pieces if self.store.selects_from(p)]:
            self.bound.add(p)
            axis, blocks = self._blocks_of(p)
            alike[self.store.stored_shape(p), p.shape, axis, blocks].append(p)
        found, members, offset_bytes = [], [], 0
        for (shape, part, axis, blocks), some in alike.items():
            # Stacks have no gaps, and each matrix begins at a multiple of ALIGNMENT
            sizes = [math.prod(size) * self.dtype.itemsize for size in (shape, part)]
            has_gaps = any(nbytes % ALIGNMENT for nbytes in sizes)
            for together in [[p] for p in some] if has_gaps else [some]:
                stacks = []
                for R, C in (shape, part):
                    rows = len(together) * R, C
                    flat = piece_at(self.memory["unselected"], offset_bytes, rows, self.dtype)
                    stacks.append(flat.view(-1, R, C))
                    offset_bytes += flat.nbytes + -flat.nbytes % ALIGNMENT
                chosen = [self.chosen_of(p) for p in together]
                starts = starts_of(list(blocks), self.store.device)
                found.append(SelectedPieces(axis, list(blocks), starts, *stacks, chosen))
                members.append(together)
        return found, members

    def _blocks_of(self, piece: Piece) -> tuple[int, tuple[Block, ...]]:
        """The axis along which this rank selects from a piece, and the blocks of that axis."""
        layout = self.store.selected["matrix"][piece.matrix.param]
        return layout.blocks_at(self.store.rank, piece.matrix.unit, piece.start)

    def chosen_of(self, piece: Piece) -> torch.Tensor:
        """Return the memory of the selection of a piece, which may be bound later."""
        if piece not in self.chosen:
            size = piece.shape[self._blocks_of(piece)[0]]
            self.chosen[piece] = torch.zeros(size, dtype=torch.int64, device=self.store.device)
        return self.chosen[piece]


def whole_or(
    pieces: Sequence[Piece],
    views: Mapping[Piece, torch.Tensor],
    selected: Sequence[SelectedPieces],
    members: Sequence[Sequence[Piece]],
) -> list[torch.Tensor]:
    """The view in `views` of each piece; for a piece from which this rank selects, memory for the
    whole piece. `selected`, `members`: from `BoundSelection.bind`.
    """
    whole = {p: t for of, some in zip(selected, members) for p, t in zip(some, of.whole)}
    return [whole[p] if p in whole else views[p] for p in pieces]

"""`BoundUpdate`: how the updates of bucket_updates.py bind views, buffers and launches.

For the letters G, M, W, U and O see bucket_updates.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..communication.all_to_all import piece_at
from ..kernels.elementwise.momentum import Copy, MomentumForm
from ..kernels.elementwise.multi_tensor import NUMBERS, Source
from ..kernels.elementwise.row_scattered import ScatteredMatrices, stays
from ..kernels.elementwise.weight_update import TO_INITIAL, StochasticRounding
from ..kernels.quantized.blocks import is_quantized
from ..kernels.quantized.momentum import QuantizedView
from ..newton_schulz.orthogonalize import BoundOrthogonalization
from ..params.config import MuonConfig
from ..pipeline import BucketUpdate
from ..planning.memory_model import sent_kind
from ..planning.plan import Bucket, Matrix
from ..planning.rank_plan import Piece, RankPlan, sent_piece
from ..rules import muon
from ..rules.decay import INITIAL_KEY, form_of
from ..rules.muon import is_stochastic
from ..rules.phases import (
    AnyPack,
    AnyWeightUpdate,
    PackSelected,
    Phases,
    SaveSelected,
    SelectedStack,
    WeightUpdateSelected,
)
from ..rules.rule import momentum_key, reads_gradients, rule_of, selection_of, weight_dtype
from .cuda_graphs import Graphs
from .param_store import Store
from .workspace import BoundSelection, Stacks, whole_or

Gradients = tuple[list[torch.Tensor], torch.Tensor | None]  # (tensors, int64 addresses on device)
Views = Mapping[Piece, torch.Tensor]  # piece -> view of a buffer, (rows, columns)
# (place of each piece in the mean of unreduced gradients, the mean)
Means = tuple[Mapping[Piece, Source], torch.Tensor]


@dataclass(frozen=True)
class BucketInputs:
    """Constructor argument of all updates of a bucket."""

    bucket: Bucket
    rank_plan: RankPlan  # this rank's pieces and all-to-all offsets
    store: Store  # views of weights, gradients and state
    options: MuonConfig
    group: dict  # the live parameter group
    process_group: dist.ProcessGroup | None  # None: nothing is sent
    memory: dict[str, torch.Tensor]  # use of the workspace -> flat uint8 tensor
    buffer_index: int  # index of the bucket buffer that holds most of `memory`
    graphs: Graphs
    label: str  # the bucket's name in messages
    written: Callable[[BucketUpdate], None] | None  # called once the bucket's weights are written
    stack_name: str | None = None  # memory of its stacks, see `Workspace`; None: the shared scratch


class BoundUpdate(BucketUpdate):
    """Base class: an update of a bucket, bound to the rank's memory."""

    def __init__(self, inputs: BucketInputs) -> None:
        super().__init__(inputs.label, inputs.written, inputs.store)
        self.bucket = inputs.bucket
        self.rank_plan = inputs.rank_plan
        self.options = inputs.options
        self.group = inputs.group
        self.process_group = inputs.process_group
        self.memory = inputs.memory
        self.buffer_index, self.stack_name = inputs.buffer_index, inputs.stack_name
        self.graphs = inputs.graphs
        self.rank = inputs.store.rank  # global
        # On the device, of all groups: a schedule may change the numbers without a new capture
        self.lr_and_decay = inputs.store.scalars  # from element 0 on: lr, 1 - lr weight_decay
        self.momentum_weight = inputs.store.scalars[4:]  # from element 0 on: 1 - momentum
        dtype = inputs.options.wire_dtype
        self.selected_pieces = BoundSelection(inputs.store, inputs.memory, dtype)
        # In a CUDA graph torch's kernels read gradients at the addresses of the capture, the
        # package's kernels take addresses from device memory
        self.reads_gradients = False
        if inputs.group["use_muon"]:
            self.rule = rule_of(inputs.group)
            self.selection = selection_of(inputs.group)  # None: matrices are orthogonalized whole
            is_8bit = is_quantized(inputs.options.state_dtype)
            self.phases = Phases(self.rule, inputs.store.groups, inputs.store.scalars, is_8bit)
            self.reads_gradients = reads_gradients(self.rule)
            self.weight_dtype = weight_dtype(self.rule, inputs.options.wire_dtype)
            self.adjust_lr_fn = self.rule.adjust_lr_fn or inputs.group["adjust_lr_fn"]

    def _stored(self, kind: str = "matrix") -> list[Piece]:
        """Pieces stored by this rank; kinds as in `Piece`."""
        return [p for p in self.rank_plan.stored if p.kind == kind]

    def _stored_state(self) -> list[Piece]:
        """Pieces, stored by this rank, of state that the rule reads at the owner."""
        keys = [state.key for state in self.rule.state]
        return [p for p in self.rank_plan.stored if p.kind in keys]

    def _bind_loads(self, pieces: Sequence[Piece], to: Views) -> Copy:
        """Bind the copy of state and weights, read by the rule at the owner, to the views `to`.
        `pieces`: of state, stored by this rank. Weights: of this rank's pieces with a view in `to`,
        without replicas.
        """
        weights = [p for p in self._stored("weight") if p.is_source and p in to]
        # `PackSelected` copies state of selected rows, together with U
        pieces = [p for p in pieces if not self.store.selects_from(p)]
        views = self.store.states(pieces) + self.store.weights(weights)
        return Copy([to[p] for p in (*pieces, *weights)], views)

    def _bind_saves(self, pieces: Sequence[Piece], views: Views) -> Callable[[], None]:
        """Bind the copy of state back to where it is stored."""
        store = self.store
        parts = [p for p in pieces if store.selects_from(p)]
        pieces = [p for p in pieces if not store.selects_from(p)]
        save = Copy(store.states(pieces), [views[p] for p in pieces], store.skip(pieces))
        if not parts:
            return save
        matrix = {(p.matrix, p.start[0]): p for p in self._stored()}
        # With offloaded state a launch that selects from replicas may be bound after this copy
        chosen = [self.selected_pieces.chosen_of(matrix[p.matrix, p.start[0]]) for p in parts]
        some = SaveSelected(
            chosen, store.states(parts), [views[p] for p in parts], store.skip(parts)
        )
        return lambda: (save(), some())

    def _kept_views(self, dtype: torch.dtype | None = None) -> dict[Piece, torch.Tensor]:
        """Workspace of pieces stored and owned by this rank, in no all-to-all.

        O (AdamW: the gradient) stays in the workspace until weights are written. `dtype`: of the
        views; None: wire_dtype.
        """
        dtype = dtype or self.options.wire_dtype
        return {
            p: piece_at(self.memory["kept"], offset_bytes, p.shape, dtype)
            for p, offset_bytes in self.rank_plan.kept.items()
        }

    def _has_momentum(self, pieces: Sequence[Piece], means: Means | None = None) -> bool:
        """Whether this rank keeps the momentum of `pieces`: of routes "own" and "reduce" only
        owners do.
        """
        if self.bucket.route == "reduce":
            return means is not None
        return self.bucket.route != "own" or all(p.owner == self.rank for p in pieces)

    def _momentum_args(self, pieces: Sequence[Piece], means: Means | None = None) -> tuple:
        """Momentum arguments of `Pack` and `WeightUpdate`: (views of M, positions of the pieces in
        the gradients, example gradients). () unless `_has_momentum`. `means`: in place of the
        gradients of the store.
        """
        if not self._has_momentum(pieces, means):
            return ()
        momentum = self._momenta(pieces)
        if means is None:
            return momentum, self.store.sources(pieces), self.store.gradients
        sources, mean = means
        return momentum, [sources[p] for p in pieces], [mean]

    def _momenta(self, pieces: Sequence[Piece]) -> list[torch.Tensor] | list[QuantizedView]:
        """Views of M of `pieces`."""
        key = momentum_key(self.group)
        return self.store.momenta(pieces, key, self.options.state_dtype)

    def _bind_pack(self, pieces: Sequence[Piece], to: Views, means: Means | None = None) -> AnyPack:
        """Bind the launch that reads G and M of `pieces` and writes U to the views `to`. `means`:
        as in `_momentum_args`.
        """
        M, *sources = self._momentum_args(pieces, means)
        selected, members = self.selected_pieces.bind(pieces)
        U = whole_or(pieces, to, selected, members)
        form = self.store.skip(pieces), self._groups(pieces), self._momentum_form
        squares = self.store.sums(pieces, self.bucket.route)
        pack = self.phases.pack(M, U, *sources, *form, squares=squares)
        if not selected:
            return pack
        # Replicas send nothing, and have no view in `to`
        sent = [[to[p] for p in some] for some in members if some[0] in to]
        return PackSelected(pack, selected, sent, [self._state_of(some, to) for some in members])

    @property
    def _momentum_form(self) -> MomentumForm:
        """The form of M and U in `Pack` and `WeightUpdate`."""
        if self.selection is not None:
            return "feedback"
        return self.group.get("momentum_form", muon.MOMENTUM_FORMS[0])

    def _state_of(self, pieces: Sequence[Piece], to: Views) -> list[tuple]:
        """(stored state of `pieces`, views in `to` of its selected rows) for each state."""
        states = {(p.kind, p.matrix, p.start[0]): p for p in self._stored_state()}
        found = []
        for state in self.rule.state:
            stored = [states[state.key, p.matrix, p.start[0]] for p in pieces]
            if stored[0] in to:
                found.append((self.store.states(stored), [to[p] for p in stored]))
        return found

    def _bind_weight_update(
        self, pieces: Sequence[Piece], orthogonal: Views, means: Means | None = None
    ) -> AnyWeightUpdate:
        """Bind the launch that writes W and M of `pieces`; O, and numbers sent by the owner, are
        read from `orthogonal`. `means`: as in `_momentum_args`.
        """
        # No `Pack` has selected from replicas yet: the weight update does, by a `Pack` of its own
        replicas = self.selected_pieces.unbound(pieces)
        selected, members = self.selected_pieces.bind(pieces)
        update = self.phases.weight_update(
            self._sent(pieces, orthogonal),
            self.store.weights(pieces),
            whole_or(pieces, orthogonal, selected, members),
            [self._scale(p.matrix) for p in pieces],
            self.store.skip(pieces),
            *(self._momentum_args(pieces, means) or (None, (), ())),
            self._groups(pieces),
            **self._form_args(pieces),
        )
        if not selected:
            return update
        pack = self._bind_pack(replicas, {}) if replicas else None
        parts = [[orthogonal[p] for p in some] for some in members]
        return WeightUpdateSelected(update, selected, parts, pack)

    def _sent(self, pieces: Sequence[Piece], views: Views) -> list[dict[str, torch.Tensor]]:
        """Numbers that the owner sends for each piece of a matrix: name -> view in `views`."""
        sends = self.rule.sends.items()
        return [{name: views[sent_piece(p, name, per)] for name, per in sends} for p in pieces]

    def _form_args(self, pieces: Sequence[Piece]) -> dict[str, object]:
        """Arguments of `WeightUpdate` that say how `pieces` decay and are stored, and the form of
        M.
        """
        form = form_of(self.group)
        initial = self.store.states(pieces, INITIAL_KEY) if form == TO_INITIAL else ()
        found = {"decay": form, "initial": initial, "momentum_form": self._momentum_form}
        found["squares"] = self.store.sums(pieces, self.bucket.route, writes_weights=True)
        found["rounding"] = self.store.split_weights(pieces)
        if is_stochastic(self.group):
            found["rounding"] = StochasticRounding(self.store.positions(pieces), self.store.keys)
        return found

    def _groups(self, pieces: Sequence[Piece]) -> list[int]:
        """Number of the parameter group of each piece, in `Store.groups`."""
        return [self.store.group_of[p.matrix.param] for p in pieces]

    def _scale(self, matrix: Matrix) -> float:
        """Factor on the learning rate of a matrix, from the shape of all of it: `matrix.rows` may
        count selected rows only.
        """
        shape = self.store.layouts["matrix"][matrix.param].unit_shapes[matrix.unit]
        return muon.scale_of(*shape, self.adjust_lr_fn)

    def _make_stacks(self, read_from: Views | None = None, write_to: Views | None = None) -> Stacks:
        """The stacks of the bucket's owned matrices; arguments as in `Stacks`."""
        rule = self.rule
        wide = {state.key: (state.per, torch.float32) for state in rule.state}
        wide |= {"weight": ("element", self.weight_dtype)} if rule.reads_weight else {}
        wide |= {sent_kind(name): (per, torch.float32) for name, per in rule.sends.items()}
        dtype = self.options.wire_dtype
        return Stacks(self.rank_plan, self.memory, dtype, wide, read_from, write_to)

    def _leave_in_place(self, stacks: Stacks, kinds: Sequence[str]) -> set[Piece]:
        """Have the kernels of a fused rule read weights, and step state of each element, where both
        are stored; return the pieces left there. Either all pieces of a stack are left in place or
        none. `kinds`: of pieces.
        """
        piece_of = {(p.matrix, p.kind): p for p in self.rank_plan.stored}
        found = set()
        for wide, matrices in zip(stacks.wide, stacks.matrices):
            for kind in kinds:
                pieces = [piece_of[matrix, kind] for matrix in matrices]
                views = self.store.weights if kind == "weight" else self.store.states
                stored = views(pieces)
                if all(stays(t, (m.rows, m.cols)) for t, m in zip(stored, matrices)):
                    wide[kind] = ScatteredMatrices(stored)
                    found.update(pieces)
        return found

    @property
    def _states_in_place(self) -> list[str]:
        """Keys of state that kernels may step in place, if one rank stores all of a matrix's state.
        With checks for non-finite gradients state is copied instead, so that old state remains:
        see `Store.skip`.
        """
        of_elements = [state.key for state in self.rule.state if state.per == "element"]
        return of_elements if self.rule.fused and self.store.flags is None else []

    def _bind_iteration(self, stacks: Stacks) -> BoundOrthogonalization:
        """Bind Newton-Schulz from `stacks.inputs` to `stacks.outputs`, and for each stack the
        further inputs of the rule's phases: tensors in fp32, factor on lr, groups of the matrices.
        """
        self.units = [
            self.phases.bind(wide, self._scale(matrices[0]), self._group_offsets(matrices))
            for wide, matrices in zip(stacks.wide, stacks.matrices)
        ]
        # Parts of stacks that are selected here, at the owner; None: the whole is iterated
        self.parts = [
            None if part is None else SelectedStack(stack, part, self.selection)
            for stack, part in zip(stacks.inputs, stacks.selected)
        ]
        inputs, outputs = (
            [stack if one is None else one.part for stack, one in zip(some, self.parts)]
            for some in (stacks.inputs, stacks.outputs)
        )
        self.samples = self.store.samples(stacks.matrices, outputs)
        # Between the two all-to-alls the contents of the send buffer, and often of the receive
        # buffer, are no longer needed: Newton-Schulz uses both as scratch, see
        # `RankPlan.workspace_layout`
        scratch = [self.memory[use] for use in ("scratch_a", "scratch_b", "gram_scratch")]
        return BoundOrthogonalization(inputs, outputs, self.options.ns_dtype, scratch)

    def _group_offsets(self, matrices: Sequence[Matrix]) -> torch.Tensor | None:
        """First element of the numbers of each matrix's group, for a stack; None if all are 0."""
        groups = [self.store.group_of[matrix.param] for matrix in matrices]
        if not any(groups):
            return None
        return torch.tensor([NUMBERS * n for n in groups], device=self.store.device)

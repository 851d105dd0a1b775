"""Bucket updates: how the matrices or parameters of a bucket are stepped on this rank.

Start reading at `OwnerUpdate.run`, the order of all phases, and at `ShardedUpdate`, the phases of
FSDP2 and most layouts. `LocalUpdate` has no collectives. `UnreducedUpdate` averages gradients
itself. Three classes step AdamW's parameters. `BUCKET_UPDATES` maps routes of a plan to classes.

A piece is the box of a matrix stored by a rank; under FSDP2, a few whole rows. The owner of a
matrix is the rank chosen to orthogonalize the whole matrix. A constructor binds all tensors, views
and kernel launches of an update once. `run` then only launches kernels and starts collectives.

In comments and docstrings G is a gradient, M a momentum and W a weight. U is the update before
orthogonalization: the momentum (Nesterov: blended with G once more). O is the orthogonalized
update, the polar factor of a whole U.

[Note: momentum and weight together]
Momentum and weight are written together, after the return all-to-all: a step that raises leaves
each bucket entirely old or entirely new. Price: gradient and momentum are read twice (8 bytes per
element in fp32). If the whole step is one CUDA graph, no host error can come in between, and
momentum is written on the first read (`update_momentum_early`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from ..communication.all_to_all import AllToAllBuffers, Mean, piece_at
from ..kernels.backend import capturing
from ..kernels.elementwise.momentum import Copy, Pack, copy_torch
from ..kernels.elementwise.multi_tensor import NUMBERS
from ..kernels.elementwise.weight_update import TO_INITIAL, WeightUpdate
from ..newton_schulz.orthogonalize import BoundOrthogonalization
from ..params.config import MuonConfig
from ..params.dtensor import gradient_dtype
from ..pipeline import BucketUpdate, Running
from ..planning.plan import Bucket, Matrix
from ..planning.rank_plan import Piece, RankPlan
from ..rules import adamw, muon, normuon
from ..rules.decay import INITIAL_KEY, form_of
from ..rules.muon import is_sum
from ..rules.rule import MuonConstants, host_constants, momentum_key
from .cuda_graphs import Graphs
from .param_store import Store
from .workspace import Stacks, copy_unless_in_place, views_like

Gradients = tuple[list[torch.Tensor], torch.Tensor | None]  # (tensors, int64 addresses on device)
Views = Mapping[Piece, torch.Tensor]  # piece -> view of a buffer, (rows, columns)


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
        self.buffer_index = inputs.buffer_index
        self.graphs = inputs.graphs
        self.rank = inputs.store.rank  # global
        # On the device, of all groups: a schedule may change the numbers without a new capture
        self.lr_and_decay = inputs.store.scalars  # from element 0 on: lr, 1 - lr weight_decay
        self.momentum_weight = inputs.store.scalars[4:]  # from element 0 on: 1 - momentum

    # Binding

    def _stored(self, kind: str = "matrix") -> list[Piece]:
        """Pieces stored by this rank; kinds as in `Piece`."""
        return [p for p in self.rank_plan.stored if p.kind == kind]

    def _owned(self, kind: str) -> list[Piece]:
        """Pieces, stored by any rank, of matrices owned by this rank."""
        return [p for p in self.rank_plan.owned if p.kind == kind]

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

    def _momentum_args(self, pieces: Sequence[Piece]) -> tuple:
        """Momentum arguments of `Pack` and `WeightUpdate`: (views of M, positions of the pieces in
        the gradients, example gradients).

        () on route "own" if another rank owns a piece: only owners keep momentum.
        """
        if self.bucket.route == "own" and any(p.owner != self.rank for p in pieces):
            return ()
        momentum = self.store.states(pieces, momentum_key(self.group))
        return momentum, self.store.sources(pieces), self.store.gradients

    def _bind_pack(self, pieces: Sequence[Piece], to: Views) -> Pack:
        """Bind the launch that reads G and M of `pieces` and writes U to the views `to`."""
        M, *sources = self._momentum_args(pieces)
        skip = self.store.skip(pieces)
        groups = self._groups(pieces)
        return Pack(M, [to[p] for p in pieces], *sources, skip, groups, is_sum(self.group))

    def _bind_weight_update(self, pieces: Sequence[Piece], orthogonal: Views) -> WeightUpdate:
        """Bind the launch that writes W and M of `pieces`; O is read from `orthogonal`."""
        return WeightUpdate(
            self.store.weights(pieces),
            [orthogonal[p] for p in pieces],
            self._scales(pieces),
            self.store.skip(pieces),
            *(self._momentum_args(pieces) or (None, (), ())),
            self._groups(pieces),
            **self._form_args(pieces),
        )

    def _form_args(self, pieces: Sequence[Piece]) -> dict[str, object]:
        """Arguments of `WeightUpdate` that say how `pieces` decay, and the form of M."""
        form = form_of(self.group)
        initial = self.store.states(pieces, INITIAL_KEY) if form == TO_INITIAL else ()
        return {"decay": form, "initial": initial, "sums": is_sum(self.group)}

    def _groups(self, pieces: Sequence[Piece]) -> list[int]:
        """Number of the parameter group of each piece, in `Store.groups`."""
        return [self.store.group_of[p.matrix.param] for p in pieces]

    def _scales(self, pieces: Sequence[Piece]) -> list[float]:
        """Factor on the learning rate of each piece, from the shape of the whole matrix."""
        return [muon.scale_of(p.matrix, self.group["adjust_lr_fn"]) for p in pieces]

    def _bind_iteration(self, stacks: Stacks) -> BoundOrthogonalization:
        """Bind Newton-Schulz from `stacks.inputs` to `stacks.outputs`, and the groups of the
        matrices, whose beta2 the row normalization reads.
        """
        self.row_groups = [self._group_offsets(matrices) for matrices in stacks.matrices]
        # Between the two all-to-alls the send buffer, and often the receive buffer, hold nothing:
        # Newton-Schulz uses both as scratch, see `RankPlan.workspace_layout`
        scratch = [self.memory[use] for use in ("scratch_a", "scratch_b", "gram_scratch")]
        return BoundOrthogonalization(stacks.inputs, stacks.outputs, self.options.ns_dtype, scratch)

    # Running

    @property
    def update_momentum_early(self) -> bool:
        """Whether `Pack` writes M; see [Note: momentum and weight together]."""
        return self.graphs.inside_capture

    def replay(self, part: Callable, constants: tuple, argument: object = None) -> None:
        """Call `part(constants)`, or `part(argument)` if given, by a CUDA graph where possible.

        `part`: a bound method with kernel launches only. `constants`: every host value that the
        launches depend on; if a value changes, the graph is captured again.
        """
        argument = constants if argument is None else argument
        if self.graphs.may_capture:
            self.graphs(part, constants, argument)
        else:
            part(argument)

    def _normalize_rows(self, stacks: Stacks) -> None:
        """Launch NorMuon's row normalization of all stacks."""
        normuon.normalize(stacks.outputs, stacks.row_state, self.store.scalars, self.row_groups)

    def _group_offsets(self, matrices: Sequence[Matrix]) -> torch.Tensor | None:
        """First element of the numbers of each matrix's group, for a stack; None if all are 0."""
        groups = [self.store.group_of[matrix.param] for matrix in matrices]
        if not any(groups):
            return None
        return torch.tensor([NUMBERS * n for n in groups], device=self.store.device)

    def _run_pack(
        self, pack: Pack, constants: MuonConstants, gradients: Gradients | tuple[()] = ()
    ) -> None:
        """Launch `pack`. `gradients`: read in place of the gradients of the store."""
        store = self.store
        tensors, addresses = gradients or (store.gradients, store.addresses)
        early = self.update_momentum_early
        pack(tensors, addresses, self.momentum_weight, constants.nesterov, early)

    def _run_weight_update(
        self, update: WeightUpdate, gradients: Gradients | tuple[()] = (), was_packed: bool = True
    ) -> None:
        """Launch `update`. `gradients`: as in `_run_pack`. `was_packed`: the pieces of
        `update` have been in a `_run_pack` of the step, so M may already be new.
        """
        store = self.store
        tensors, addresses = gradients or (store.gradients, store.addresses)
        writes_momentum = not (was_packed and self.update_momentum_early)
        update(self.lr_and_decay, tensors, addresses, self.momentum_weight, writes_momentum)


class LocalUpdate(BoundUpdate):
    """Matrices stored whole by the rank and stepped without collectives (one process, EP).

    G is read where autograd left it, U is written into the stack of whole matrices and becomes O in
    place, and W and M are written from the stack.
    """

    def __init__(self, inputs: BucketInputs) -> None:
        super().__init__(inputs)
        stored = self._stored()
        rows = self._stored("row")
        self.stacks = Stacks(self.rank_plan, self.memory, self.options.wire_dtype)
        whole = self.stacks.input_view
        second_moment = self.store.states(rows, "second_moment")
        self.pack_all = self._bind_pack(stored, whole)
        # NorMuon's kernel takes the row state of a stack as one (N, R, 1) tensor
        self.load_rows = Copy([whole[p] for p in rows], second_moment)
        self.save_rows = Copy(second_moment, [whole[p] for p in rows], self.store.skip(rows))
        self.iterate = self._bind_iteration(self.stacks)
        self.update_all = self._bind_weight_update(stored, whole)

    @property
    def update_momentum_early(self) -> bool:
        """True in any capture: the whole update is a single part, so a graph with `Pack` also
        writes the weight.
        """
        return capturing(self.store.device)

    def run(self, group: dict) -> Running:
        """Step all matrices in a single part."""
        self.replay(self.step, host_constants(group))
        return
        yield  # makes the function a generator, as the pipeline expects

    def launches(self, group: dict) -> list[Callable[[], None]]:
        """All of `run`; see `BucketUpdate`."""
        return [partial(self.step, host_constants(group))]

    def step(self, constants: MuonConstants) -> None:
        """Launch all kernels of the bucket."""
        self._run_pack(self.pack_all, constants)
        self.load_rows()
        self.iterate(constants.steps, constants.eps)
        if constants.has_row_state:
            self._normalize_rows(self.stacks)
        self._run_weight_update(self.update_all)
        self.save_rows()


class OwnerUpdate(BoundUpdate):
    """Base class: shards -> owner -> shards. Subclasses define `pack`, `orthogonalize` and `apply`,
    and `pack_local` if `packs_local`.
    """

    travels = True
    packs_local = False  # some stored pieces are packed while the inbound all-to-all runs

    def run(self, group: dict) -> Running:
        """Step the bucket: pack, all-to-all to owners, orthogonalize, all-to-all to shards, apply.

        `ShardedUpdate` says where a gradient is after each line. At a `yield` the pipeline runs
        phases of further buckets, then waits for the yielded all-to-all and resumes.
        """
        constants = host_constants(group)
        self.replay(self.pack, constants)  # pieces owned by other ranks -> send buffer
        inbound = self.to_owner.start()  # send buffer -> the owners' receive buffers
        if self.packs_local:
            # Needs no peer, so it runs beside the all-to-all
            self.replay(self.pack_local, constants)  # pieces owned by this rank -> "kept"
        yield from inbound
        self.replay(self.orthogonalize, constants)  # assemble, Newton-Schulz, NorMuon, disassemble
        yield from self.to_shards.start()  # the owner's send buffer -> ranks that store the pieces
        self.replay(self.apply, constants)  # weight and momentum of all stored pieces

    def launches(self, group: dict) -> list[Callable[[], None]]:
        """The parts of `run` between collectives; see `BucketUpdate`."""
        constants = host_constants(group)
        parts = [self.pack, self.orthogonalize, self.apply]
        if self.packs_local:
            parts.append(self.pack_local)
        return [partial(part, constants) for part in parts]

    def _bind_buffers(
        self, in_dtype: torch.dtype | None = None, out_dtype: torch.dtype | None = None
    ) -> None:
        """Bind the buffers of both all-to-alls; None: wire_dtype.

        The receive buffer of the inbound all-to-all ("arrive") is the send buffer of the return
        all-to-all. Received pieces are copied into whole matrices before O overwrites the
        buffer; direct matrices are read and written in the buffer. The send buffer of the inbound
        all-to-all ("leave") shares memory with the receive buffer of the return all-to-all
        ("return"). See [Note: buffer reuse of the return all-to-all] in rank_plan.py.
        """
        arguments = self.rank_plan, self.process_group, self.memory
        in_dtype = in_dtype or self.options.wire_dtype
        out_dtype = out_dtype or self.options.wire_dtype
        self.to_owner = AllToAllBuffers(*arguments, "inbound", ("leave", "arrive"), in_dtype)
        self.to_shards = AllToAllBuffers(*arguments, "outbound", ("arrive", "return"), out_dtype)


class ShardedUpdate(OwnerUpdate):
    """FSDP2, HSDP, TP x FSDP, and DDP with reduced gradients. Layouts differ in pieces only.

    What becomes of the gradient G of a piece, phase by phase (FSDP2: G is the rank's rows of
    `param.grad` after the reduce-scatter of backward). G stays in `param.grad` and is only read; a
    rank sends U:

    - `pack`, owner is another rank: G and M are read, U is written to the inbound send buffer.
    - inbound all-to-all: U moves to the owner's receive buffer.
    - `pack_local`, owner is this rank: U is written to workspace "kept", if Newton-Schulz reads the
      matrix there (see [Note: direct matrices] in rank_plan.py). If no rank sends anything (DDP),
      there is nothing to run beside, and `orthogonalize` writes it.
    - `orthogonalize`: U of the remaining own pieces is written into the stack of whole matrices,
      and received U are copied beside. Newton-Schulz turns each whole U into O, and NorMuon
      rescales the rows of O. Pieces of O are copied to the return send buffer, or to "kept".
    - return all-to-all: O of a piece moves to all ranks with a copy of the piece.
    - `apply`: G and M are read again, and W and M are written.

    Each rank keeps the momentum of stored pieces. Under HSDP a single replica of a piece is the
    source of U. The remaining replicas receive O and advance M from their own G. On route "own"
    (shard_state) the source is the owner itself, and only the owner keeps momentum.
    """

    def __init__(self, inputs: BucketInputs) -> None:
        super().__init__(inputs)
        self._bind_buffers()
        kept = self._kept_views()
        # Views of direct matrices are read from the two receiving places, and written to the two
        # places that `to_shards` and `apply` read
        self.stacks = Stacks(
            self.rank_plan,
            self.memory,
            self.options.wire_dtype,
            {**self.to_owner.arrive, **kept},
            {**self.to_shards.leave, **kept},
        )
        self._bind_momentum(kept)
        self._bind_assembly(kept)
        self.iterate = self._bind_iteration(self.stacks)
        self._bind_weights()

    def _bind_momentum(self, kept: dict[Piece, torch.Tensor]) -> None:
        """Bind launches that write U: into the send buffer, into `kept`, or into the stacks."""
        pieces = self.rank_plan.piece_sets
        self.pack_sent = self._bind_pack(pieces.sent, self.to_owner.leave)
        self.packs_local = bool(pieces.during_inbound)
        self.pack_during_inbound = self._bind_pack(pieces.during_inbound, kept)
        self.pack_after_inbound = self._bind_pack(pieces.after_inbound, self.stacks.input_view)
        # NorMuon's row state has the layout of the parameter's rows: the owner needs all of it
        rows = [p for p in self._stored("row") if p.is_source]
        to = {**self.to_owner.leave, **self.stacks.input_view}
        self.send_rows = Copy([to[p] for p in rows], self.store.states(rows, "second_moment"))

    def _bind_assembly(self, kept: dict[Piece, torch.Tensor]) -> None:
        """Bind copies of pieces between buffers and stacks; direct matrices need none."""
        input_view = self.stacks.input_view
        output_view = self.stacks.output_view
        arrive = self.to_owner.arrive
        self.assemble = copy_unless_in_place({p: input_view[p] for p in arrive}, arrive)
        # O of a direct matrix is written once; a replica's place in the send buffer counts first
        direct = self.rank_plan.direct
        self.kept_orthogonal = {
            p: output_view[p] if p.matrix in direct else view for p, view in kept.items()
        }
        self.disassemble = copy_unless_in_place(
            {**self.to_shards.leave, **self.kept_orthogonal}, output_view
        )

    def _bind_weights(self) -> None:
        """Bind launches that write W, M and row state, from received or kept O."""
        rows = self._stored("row")
        output_view = self.stacks.output_view
        orthogonal = {
            **self.to_shards.arrive,
            **self.kept_orthogonal,
            # Row state of owned matrices stays in the stacks
            **{p: output_view[p] for p in rows if p in output_view},
        }
        second_moment = self.store.states(rows, "second_moment")
        self.save_rows = Copy(second_moment, [orthogonal[p] for p in rows], self.store.skip(rows))
        pieces = self.rank_plan.piece_sets
        self.update_packed = self._bind_weight_update([*pieces.sent, *pieces.kept], orthogonal)
        self.update_replicas = self._bind_weight_update(pieces.replicas, orthogonal)

    def pack(self, constants: MuonConstants) -> None:
        """Write U and row state of sent pieces to the send buffer; row state of own pieces goes to
        the stacks.
        """
        self._run_pack(self.pack_sent, constants)
        self.send_rows()

    def pack_local(self, constants: MuonConstants) -> None:
        """Write U of own pieces of direct matrices to "kept"."""
        self._run_pack(self.pack_during_inbound, constants)

    def orthogonalize(self, constants: MuonConstants) -> None:
        """Turn U of all owned matrices into O, and put O into the send buffer of `to_shards` and
        into "kept".
        """
        # The stacks lie in the shared scratch. While the inbound all-to-all ran, the bucket before
        # was still orthogonalized there, so own pieces could not be written any earlier. Without
        # an inbound all-to-all the pieces of direct matrices are packed here as well.
        self._run_pack(self.pack_after_inbound, constants)
        self.assemble()
        self.iterate(constants.steps, constants.eps)
        if constants.has_row_state:
            self._normalize_rows(self.stacks)
        self.disassemble()

    def apply(self, constants: object) -> None:
        """Write W, M and row state of all stored pieces."""
        self._run_weight_update(self.update_packed)
        # `Pack` has not read replicas: M is still old, whatever `update_momentum_early` says
        self._run_weight_update(self.update_replicas, was_packed=False)
        self.save_rows()


class UnreducedUpdate(OwnerUpdate):
    """Unreduced gradients -> owner, O -> every rank: DDP without its all-reduce.

    Every rank stores all parameters and has a gradient of its own batch. `pack` copies G, rounded
    to wire_dtype, to the send buffer. The owner averages the received gradients in fp32, and keeps
    the momentum alone. O returns to every rank, and every rank writes W.
    """

    def __init__(self, inputs: BucketInputs) -> None:
        super().__init__(inputs)
        self._bind_buffers()
        self.stacks = Stacks(self.rank_plan, self.memory, self.options.wire_dtype)
        self.iterate = self._bind_iteration(self.stacks)
        stored = self._stored()
        # All ranks store all pieces: one with this rank as owner is the whole matrix
        owned = [p for p in stored if p.owner == self.rank]
        gradients = self.store.gradients
        sources = self.store.sources(stored)
        self.fill = Copy.of_gradients([self.to_owner.leave[p] for p in stored], sources, gradients)
        # Momentum is written in `apply`, after the return all-to-all: the mean must survive until
        # then, in workspace that no later phase overwrites
        self.mean = Mean(self.to_owner, self.memory["until_apply"])
        self._bind_owned(owned, [self.mean.source(p) for p in owned])
        received = self.to_shards.arrive
        # No momentum: only the owner keeps and writes M
        self.update_received = WeightUpdate(
            self.store.weights(received),
            list(received.values()),
            self._scales(received),
            self.store.skip(received),
            groups=self._groups(received),
            **self._form_args(received),
        )

    def _bind_owned(self, owned: list[Piece], sources: list) -> None:
        """Bind launches on whole owned matrices. `sources`: positions of `owned` in the mean."""
        store = self.store
        rows = self._owned("row")
        M = store.states(owned, momentum_key(self.group))
        skip = store.skip(owned)
        whole = self.stacks.input_view
        means = sources, [self.mean.out]
        groups = self._groups(owned)
        sums = is_sum(self.group)
        self.pack_owned = Pack(M, [whole[p] for p in owned], *means, skip, groups, sums)
        second_moment = store.states(rows, "second_moment")
        self.load_rows = Copy([whole[p] for p in rows], second_moment)
        self.save_rows = Copy(second_moment, [whole[p] for p in rows], store.skip(rows))
        # The stacks lie in the shared scratch, which the next bucket takes over before `apply`
        kept = self._kept_views()
        self.disassemble = copy_unless_in_place({**self.to_shards.leave, **kept}, whole)
        self.update_owned = WeightUpdate(
            store.weights(owned),
            [kept[p] for p in owned],
            self._scales(owned),
            skip,
            M,
            *means,
            groups,
            **self._form_args(owned),
        )

    def pack(self, constants: object) -> None:
        """Copy G of every piece to the send buffer, rounded to wire_dtype."""
        self.fill(self.store.gradients, self.store.addresses)

    def orthogonalize(self, constants: MuonConstants) -> None:
        """Average the received gradients, and turn U of all owned matrices into O."""
        self._run_pack(self.pack_owned, constants, self.mean())
        self.load_rows()
        self.iterate(constants.steps, constants.eps)
        if constants.has_row_state:
            self._normalize_rows(self.stacks)
        self.disassemble()

    def apply(self, constants: object) -> None:
        """Write W of all pieces, and M and row state of owned matrices."""
        self._run_weight_update(self.update_owned, self.mean.result)
        self._run_weight_update(self.update_received)
        self.save_rows()


class AdamWUpdate(BucketUpdate):
    """AdamW of parameters stepped element by element where stored: no buckets, no collectives."""

    def __init__(
        self,
        store: Store,
        label: str,
        written: Callable[[BucketUpdate], None] | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        """`graphs`: None launches every step from Python. A captured graph keeps the addresses of
        gradients: a step replays only if no gradient has moved.
        """
        super().__init__(label, written, store)
        self.graphs = graphs
        self.weights = store.locals()
        self.states = [store.locals(key) for key in adamw.state_keys_of(store.group)]
        self.flags = _flags(store, range(len(self.weights)))

    def run(self, group: dict) -> Running:
        """Step all parameters."""
        if self.graphs is None:
            self.step(group)
        else:
            # torch's fused kernel takes addresses from the host, where this package's own kernels
            # read them from device memory: a graph is valid for these addresses only
            addresses = list(map(torch.Tensor.data_ptr, self.store.gradients))
            constants = host_constants(group, self.store.is_fp64)
            self.graphs(self.step, (*constants, addresses), group)
        return
        yield  # makes the function a generator, as the pipeline expects

    def step(self, group: dict) -> None:
        """Launch AdamW's kernels; flagged parameters keep weight and state."""
        store = self.store
        adamw.adamw_skipping_flagged(
            self.flags, self.weights, store.gradients, self.states, group, store.scalars
        )


class UnreducedAdamWUpdate(OwnerUpdate):
    """AdamW on unreduced gradients (DDP without its all-reduce): every rank owns a chunk of the
    rows of each parameter, averages the gradients of the chunk, and returns stepped weights.

    The owner steps copies of the weights and state of the chunk. The copies are written back in
    `apply`, after the return all-to-all: an error leaves the bucket entirely old.
    """

    def __init__(self, inputs: BucketInputs) -> None:
        super().__init__(inputs)
        store = self.store
        first = store.params[0]  # all parameters of the bucket have equal dtypes
        stored = self._stored("chunk")
        owned = [p for p in stored if p.owner == self.rank]
        self._bind_buffers(gradient_dtype(first), first.dtype)
        gradients = self._bind_gradients(stored, owned)
        keys = ("exp_avg", "exp_avg_sq")
        lists = [store.weights(owned), *(store.states(owned, key) for key in keys)]
        steps = [_steps(store, p) for p in owned]
        # Step counts are scalars of their own, which torch's kernel advances with each tensor
        copies = [*views_like(lists, self.memory["until_apply"]), [step.clone() for step in steps]]
        W, *states = copies
        self.current = [*itertools.chain(*lists), *steps]  # weights, state and counts of the owner
        self.stepped = [*itertools.chain(*copies)]  # copies of `current`
        self.lists = [W, [g.view(w.shape) for g, w in zip(gradients, W)], states]
        self.flags = _flags(store, [p.matrix.param for p in owned])
        self.without_rows = self._bind_counts()
        self._bind_weights(owned, W)

    def _bind_gradients(self, stored: list[Piece], owned: list[Piece]) -> list[torch.Tensor]:
        """Bind `fill` and `collect`; return the views that `collect` fills with the mean gradients
        of `owned`.
        """
        sources = self.store.sources(stored)
        gradients = self.store.gradients
        self.fill = Copy.of_gradients([self.to_owner.leave[p] for p in stored], sources, gradients)
        self.collect = Mean(self.to_owner, self.memory["mean"])
        return [self.collect.view(p) for p in owned]

    def _bind_counts(self) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """(step counts, flags) of parameters with the first chunk in the bucket and no rows owned
        by the rank.

        The counts advance on the rank as well: state must be equal on every rank.
        """
        state = [self.store.state[p] for p in self.store.params]
        begun = [m.param for m in self.bucket.matrices if m.at[0] == 0]
        without = [number for number in begun if not state[number]["exp_avg"].numel()]
        return [state[number]["step"] for number in without], _flags(self.store, without)

    def _bind_weights(self, owned: list[Piece], W: list[torch.Tensor]) -> None:
        """Bind copies of stepped weights `W` to the send buffer, and of received weights to
        parameters.
        """
        # A chunk is sent to every rank: pieces of one matrix differ in `stored_at` only
        stepped = {p.matrix: w for p, w in zip(owned, W)}
        W = [stepped[p.matrix] for p in self.to_shards.leave]
        self.sent = _views(self.to_shards.leave, W), W
        W = self.store.weights(self.to_shards.arrive)
        self.received = W, _views(self.to_shards.arrive, W)

    def run(self, group: dict) -> Running:
        """Step the bucket; phases as in `OwnerUpdate.run`."""
        constants = host_constants(group, self.store.is_fp64)
        self.replay(self.pack, constants)
        yield from self.to_owner.start()
        # AdamW reads lr and betas from the group itself
        self.replay(self.orthogonalize, constants, group)
        yield from self.to_shards.start()
        self.replay(self.apply, constants)

    def launches(self, group: dict) -> list[Callable[[], None]]:
        """`pack` only: torch's own kernels need no compilation beforehand."""
        return [partial(self.pack, ())]

    def pack(self, constants: object) -> None:
        """Copy gradients to the send buffer, in their own dtype."""
        self.fill(self.store.gradients, self.store.addresses)

    def orthogonalize(self, group: dict) -> None:
        """Step copies of own chunks, and copy the stepped weights to the send buffer. Named after
        the phase of `OwnerUpdate.run`; AdamW orthogonalizes nothing.
        """
        self.collect()
        copy_torch(self.stepped, self.current)
        adamw.adamw_skipping_flagged(self.flags, *self.lists, group, self.store.scalars)
        copy_torch(*self.sent)

    def apply(self, constants: object) -> None:
        """Write weights, state and step counts."""
        copy_torch(self.current, self.stepped)
        adamw.count_steps(*self.without_rows)
        copy_torch(*self.received)


class OwnerStateAdamWUpdate(UnreducedAdamWUpdate):
    """AdamW with shard_state: gradients are already reduced, so nothing is sent to owners."""

    def _bind_gradients(self, stored: list[Piece], owned: list[Piece]) -> list[torch.Tensor]:
        """Bind `fill`: copy the gradients of own chunks to "kept"."""
        kept = self._kept_views(self.to_owner.dtype)
        sources = self.store.sources(owned)
        self.fill = Copy.of_gradients([kept[p] for p in owned], sources, self.store.gradients)
        return [kept[p] for p in owned]

    def collect(self) -> None:
        """Do nothing: `fill` has already written the gradients."""


def _views(flat: Views, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The views `flat`, in the shapes of `like`."""
    return [view.view(w.shape) for view, w in zip(flat.values(), like)]


def _flags(store: Store, numbers: Sequence[int]) -> list[torch.Tensor] | None:
    """Non-finite flags of parameters, by index; None if gradients are not checked."""
    if store.flags is None:
        return None
    return [store.flags[store.flag_offset[i]] for i in numbers]


def _steps(store: Store, piece: Piece) -> torch.Tensor:
    """AdamW's step count for a chunk: the count in the state for the first chunk of a parameter, a
    copy for later chunks, because the kernel advances a count per tensor.
    """
    number = piece.matrix.param
    step = store.state[store.params[number]]["step"]
    return store.add_step_copy(number, step) if piece.matrix.at[0] else step


# Route of a bucket, as in `Bucket.route` -> class
BUCKET_UPDATES = {
    "local": LocalUpdate,
    "exchange": ShardedUpdate,
    "own": ShardedUpdate,
    "reduce": UnreducedUpdate,
    "reduce_elementwise": UnreducedAdamWUpdate,
    "own_elementwise": OwnerStateAdamWUpdate,
}

"""Bucket updates: how the matrices or parameters of a bucket are stepped on this rank.

Start reading at `OwnerUpdate.run`, the order of all phases, and at `ShardedUpdate`, the phases of
FSDP2 and most layouts. `LocalUpdate` has no collectives. `UnreducedUpdate` averages gradients
itself. Groups with use_muon=False are stepped by the classes of elementwise_updates.py.

A piece is the box of a matrix stored by a rank; under FSDP2, a few whole rows. The owner of a
matrix is the rank chosen to orthogonalize the whole matrix. A constructor binds all tensors, views
and kernel launches of an update once, by methods of `BoundUpdate` (bound_update.py). `run` then
only launches kernels and starts collectives.

In comments and docstrings G is a gradient, M a momentum and W a weight. U is the update before
orthogonalization: the momentum (Nesterov: blended with G once more). O is the orthogonalized
update, the polar factor of a whole U.

[Note: momentum and weight together]
Momentum and weight are written together, after the return all-to-all: a step that raises leaves
each bucket entirely old or entirely new, but for state that kernels step in place, at the owners
of matrices (`state_at_owners`). Price: gradient and momentum are read twice (8 bytes per element in
fp32). If the whole step is one CUDA graph, no host error can come in between, and
momentum is written on the first read (`update_momentum_early`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch

from ..communication.all_to_all import AllToAllBuffers, Mean
from ..kernels.backend import capturing
from ..kernels.elementwise.momentum import Copy, Pack
from ..kernels.elementwise.weight_update import WeightUpdate
from ..pipeline import Running
from ..planning.rank_plan import Piece, has_plain
from ..rules.rule import MuonConstants, host_constants
from .bound_update import BoundUpdate, BucketInputs, Gradients, Means
from .workspace import copy_unless_in_place


class LaunchedUpdate(BoundUpdate):
    """Base class: launches of what `BoundUpdate` binds, replayed as CUDA graphs where possible."""

    @property
    def update_momentum_early(self) -> bool:
        """Whether `Pack` writes M; see [Note: momentum and weight together]. With a selection M
        depends on O.
        """
        return self.graphs.inside_capture and self.selection is None

    def replay(self, part: Callable, constants: tuple) -> None:
        """Call `part(constants)`, by a CUDA graph where possible.

        `part`: a bound method with kernel launches only. `constants`: every host value that the
        launches depend on; if a value changes, the graph is captured again.
        """
        if self.graphs.may_capture:
            key = constants
            if self.reads_gradients:
                addresses = map(torch.Tensor.data_ptr, self.store.gradients)
                key = (*constants, tuple(addresses))
            self.graphs(part, key, constants)
        else:
            part(constants)

    def _run_iteration(self, constants: MuonConstants) -> None:
        """Turn U of all stacks into O: the rule's `before`, Newton-Schulz, the rule's `after`."""
        if self.phases.has_before:
            for stack, units in zip(self.stacks.inputs, self.units):
                self.phases.call("before", stack, units)
        selected = [part for part in self.parts if part is not None]
        for part in selected:
            part.select()
        self.iterate(constants.steps, constants.eps)
        for sample in self.samples:
            sample.measure()
        if self.phases.has_after:
            for stack, units, part in zip(self.stacks.outputs, self.units, self.parts):
                if part is None:
                    self.phases.call("after", stack, units)
                else:
                    part.call(self.phases, "after", units)
        for part in selected:
            part.write()

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


class LocalUpdate(LaunchedUpdate):
    """Matrices stored whole by the rank and stepped without collectives (one process, EP).

    G is read where autograd left it, U is written into the stack of whole matrices and becomes O in
    place, and W and M are written from the stack.
    """

    def __init__(self, inputs: BucketInputs) -> None:
        super().__init__(inputs)
        stored = self._stored()
        self.stacks = self._make_stacks()
        weight = ["weight"] if self.rule.fused and self.rule.reads_weight else []
        in_place = self._leave_in_place(self.stacks, [*self._states_in_place, *weight])
        state = [p for p in self._stored_state() if p not in in_place]
        whole = {p: view for p, view in self.stacks.input_view.items() if p not in in_place}
        self.pack_all = self._bind_pack(stored, whole)
        # Further state, and weights, are copied: the rule reads one tensor for each stack
        self.load = self._bind_loads(state, whole)
        self.save = self._bind_saves(state, whole)
        self.iterate = self._bind_iteration(self.stacks)
        self.update_all = self._bind_weight_update(stored, whole)

    @property
    def update_momentum_early(self) -> bool:
        """True in any capture, without a selection: the whole update is a single part, so a graph
        with `Pack` also writes the weight.
        """
        return capturing(self.store.device) and self.selection is None

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
        self.load()
        self._run_iteration(constants)
        self._run_weight_update(self.update_all)
        self.save()


class OwnerUpdate(LaunchedUpdate):
    """Base class: shards -> owner -> shards. Subclasses define `pack`, `orthogonalize` and `apply`,
    and `pack_local` if `packs_local`.
    """

    has_collectives = True
    packs_local = False  # some stored pieces are packed while the inbound all-to-all runs

    def run(self, group: dict, constants: tuple | None = None) -> Running:
        """Step the bucket: pack, all-to-all to owners, orthogonalize, all-to-all to shards, apply.

        `ShardedUpdate` says where a gradient is after each line. At a `yield` the pipeline runs
        phases of further buckets, then waits for the yielded all-to-all and resumes. `constants`:
        as in `replay`; None: `host_constants` of the group.
        """
        constants = host_constants(group) if constants is None else constants
        with self.before_inbound():
            self.replay(self.pack, constants)  # pieces owned by other ranks -> send buffer
            inbound = self.to_owner.start()  # send buffer -> the owners' receive buffers
            if self.packs_local:  # needs no peer, so it runs beside the all-to-all
                self.replay(self.pack_local, constants)  # pieces owned by this rank -> "kept"
        yield from inbound
        self.replay(self.orthogonalize, constants)  # assemble, Newton-Schulz, NorMuon, disassemble
        yield from self.to_shards.start()  # the owner's send buffer -> ranks that store the pieces
        self.replay(self.apply, constants)  # weight and momentum of all stored pieces

    def before_inbound(self) -> contextlib.AbstractContextManager:
        """Context manager around the phases before the inbound all-to-all has arrived."""
        return contextlib.nullcontext()

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
        weights = getattr(self, "weight_dtype", torch.float32)  # AdamW's never leave
        in_dtype = in_dtype or self.options.wire_dtype
        out_dtype = out_dtype or self.options.wire_dtype
        self.to_owner = AllToAllBuffers(
            *arguments, "inbound", ("leave", "arrive"), in_dtype, weights
        )
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
      and received U are copied beside. Newton-Schulz turns each whole U into O, and the rule
      rescales O (NorMuon: the rows of O). Pieces of O are copied to the return send buffer, or to
      "kept".
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
        self.stacks = self._make_stacks(
            {**self.to_owner.arrive, **kept}, {**self.to_shards.leave, **kept}
        )
        # State at owners that kernels step where it lies
        self.in_place: set[Piece] = set()
        if self.store.matrix_owners and not has_plain(
            self.rank_plan.matrices, inputs.store.layouts["matrix"]
        ):
            self.in_place = self._leave_in_place(self.stacks, self._states_in_place)
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
        # State has the layout of the parameter, so the owner needs the state of all pieces
        state = [p for p in self._stored_state() if p.is_source and p not in self.in_place]
        to = {**self.to_owner.leave, **self.stacks.input_view}
        self.send_wide = self._bind_loads(state, to)

    def _bind_assembly(self, kept: dict[Piece, torch.Tensor]) -> None:
        """Bind copies of pieces between buffers and stacks; direct matrices need none."""
        input_view = self.stacks.input_view
        output_view = self.stacks.output_view
        arrive = self.to_owner.arrive
        self.assemble = copy_unless_in_place({p: input_view[p] for p in arrive}, arrive)
        # O of a direct matrix is written to one place. If a replica of a kept piece is sent, the
        # place is in the send buffer, and `apply` reads O there.
        direct = self.rank_plan.direct
        self.kept_orthogonal = {
            p: output_view[p] if p.matrix in direct else view for p, view in kept.items()
        }
        self.disassemble = copy_unless_in_place(
            {**self.to_shards.leave, **self.kept_orthogonal}, output_view
        )

    def _bind_weights(self) -> None:
        """Bind launches that write W, M and state, from received or kept O."""
        output_view = self.stacks.output_view
        orthogonal = {
            **self.to_shards.arrive,
            **self.kept_orthogonal,
            # State and sent numbers of owned matrices stay in the stacks
            **{
                p: output_view[p]
                for p in self.rank_plan.stored
                if p.kind != "matrix" and p in output_view
            },
        }
        pieces = self.rank_plan.piece_sets
        self.update_packed = self._bind_weight_update([*pieces.sent, *pieces.kept], orthogonal)
        self.update_replicas = self._bind_weight_update(pieces.replicas, orthogonal)
        state = [p for p in self._stored_state() if p not in self.in_place]
        self.save = self._bind_saves(state, orthogonal)

    def pack(self, constants: MuonConstants) -> None:
        """Write U, and state and weights that the rule reads, of sent pieces to the send buffer;
        state and weights of own pieces go to the stacks.
        """
        self._run_pack(self.pack_sent, constants)
        self.send_wide()

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
        self._run_iteration(constants)
        self.disassemble()

    def apply(self, constants: MuonConstants) -> None:
        """Write W, M and state of all stored pieces."""
        self._run_weight_update(self.update_packed)
        # `Pack` has not read replicas: M is still old, whatever `update_momentum_early` says
        self._run_weight_update(self.update_replicas, was_packed=False)
        self.save()


class UnreducedUpdate(OwnerUpdate):
    """Unreduced gradients -> owner, O -> every rank: DDP without its all-reduce.

    Every rank stores all parameters and has a gradient of its own batch. `pack` copies G, rounded
    to wire_dtype, to the send buffer. The owner averages the received gradients in fp32, and keeps
    the momentum alone. O returns to every rank, and every rank writes W.
    """

    def __init__(self, inputs: BucketInputs) -> None:
        super().__init__(inputs)
        self._bind_buffers()
        self.stacks = self._make_stacks()
        self.iterate = self._bind_iteration(self.stacks)
        stored = self._stored()
        # Every rank stores whole parameters, so a piece owned by this rank is the whole matrix
        owned = [p for p in stored if p.owner == self.rank]
        gradients = self.store.gradients
        sources = self.store.sources(stored)
        self.fill = Copy.of_gradients([self.to_owner.leave[p] for p in stored], sources, gradients)
        # Momentum is written in `apply`, after the return all-to-all: the mean must survive until
        # then, in workspace that no later phase overwrites
        self.mean = Mean(self.to_owner, self.memory["until_apply"])
        self._bind_owned(owned, ({p: self.mean.source(p) for p in owned}, self.mean.out))
        received = [p for p in self.to_shards.arrive if p.kind == "matrix"]
        # `means` is left out: only the owner keeps and writes M
        self.update_received = self._bind_weight_update(received, self.to_shards.arrive)

    def _bind_owned(self, owned: list[Piece], means: Means) -> None:
        """Bind launches on whole owned matrices."""
        state = self._stored_state()  # of owned matrices: owners keep state
        whole = self.stacks.input_view
        self.pack_owned = self._bind_pack(owned, whole, means)
        self.load = self._bind_loads(state, whole)
        self.save = self._bind_saves(state, whole)
        # The stacks lie in the shared scratch, which the next bucket takes over before `apply`
        kept = self._kept_views()
        self.disassemble = copy_unless_in_place({**self.to_shards.leave, **kept}, whole)
        self.update_owned = self._bind_weight_update(owned, {**whole, **kept}, means)

    def pack(self, constants: MuonConstants) -> None:
        """Copy G of every piece to the send buffer, rounded to wire_dtype."""
        self.fill(self.store.gradients, self.store.addresses)

    def orthogonalize(self, constants: MuonConstants) -> None:
        """Average the received gradients, and turn U of all owned matrices into O."""
        self._run_pack(self.pack_owned, constants, self.mean())
        self.load()
        self._run_iteration(constants)
        self.disassemble()

    def apply(self, constants: MuonConstants) -> None:
        """Write W of all pieces, and M and state of owned matrices."""
        self._run_weight_update(self.update_owned, self.mean.result)
        self._run_weight_update(self.update_received)
        self.save()

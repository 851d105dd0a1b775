"""How each kind of bucket is stepped. Start reading here: `ShardedUpdate`.

Every update binds its views and kernels once, in its constructor. `run` is a generator that yields
collectives in flight; pipeline.py resumes it. The parts between two collectives launch kernels only
and are replayed as CUDA graphs.

[Note: momentum and weight together]
Momentum and weight are written together, after the return all-to-all: a step that raises leaves
each bucket entirely old or entirely new. Price: gradient and momentum are read twice (8 bytes per
element in fp32). If the whole step is one CUDA graph, no host error can come in between, and
momentum is written on the first read (`update_momentum_early`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from ..communication.all_to_all import AllToAllBuffers, Mean, piece_at
from ..kernels.backend import capturing
from ..kernels.elementwise.momentum import Copy, Pack, copy_torch
from ..kernels.elementwise.weight_update import Update
from ..newton_schulz.orthogonalize import BoundOrthogonalization
from ..params.config import MuonConfig
from ..params.dtensor import gradient_dtype
from ..pipeline import BucketUpdate
from ..planning.plan import Bucket
from ..planning.rank_plan import Piece, RankPlan
from ..rules import adamw, muon, normuon
from ..rules.rule import MuonConstants, host_constants
from .cuda_graphs import Graphs
from .param_store import Store
from .workspace import Stacks, copy_apart, like


@dataclass(frozen=True)
class BucketInputs:
    """All that one bucket's update is made of on this rank."""

    bucket: Bucket
    rank_plan: RankPlan  # this rank's pieces and all-to-all offsets
    store: Store  # views of weights, gradients and state
    options: MuonConfig
    group: dict  # the live parameter group
    process_group: dist.ProcessGroup | None  # None: nothing is sent
    memory: dict[str, torch.Tensor]  # workspace use -> flat uint8 tensor
    buffer_index: int  # the workspace slot that `memory` lies in
    graphs: Graphs
    label: str  # the bucket's name in messages
    written: Callable[[BucketUpdate], None] | None  # called once the bucket's weights are written


class BoundUpdate(BucketUpdate):
    """An update of one bucket, bound to this rank's memory."""

    def __init__(self, inputs: BucketInputs):
        super().__init__(inputs.label, inputs.written, inputs.store)
        self.bucket = inputs.bucket
        self.rank_plan = inputs.rank_plan
        self.options = inputs.options
        self.group = inputs.group
        self.process_group = inputs.process_group
        self.memory = inputs.memory
        self.buffer_index = inputs.buffer_index
        self.graphs = inputs.graphs
        self.rank = inputs.store.rank

    # Binding

    def _pieces(self, end: str, kind: str = "update") -> list[Piece]:
        """Pieces that this rank stores ("home") or computes ("owned")."""
        return [p for p in getattr(self.rank_plan, end) if p.kind == kind]

    def _kept(self, dtype: torch.dtype | None = None) -> dict[Piece, torch.Tensor]:
        """Buffers of pieces that this rank both stores and computes, which no all-to-all carries:
        their updates (AdamW: gradients) stay there until the weights are written.
        """
        dtype = dtype or self.options.wire_dtype
        return {
            p: piece_at(self.memory["kept"], offset, p.shape, dtype)
            for p, offset in self.rank_plan.kept.items()
        }

    def _momenta(self, pieces: Sequence[Piece]) -> tuple:
        """(momentum, source in the gradients, gradients) of pieces; () if another rank keeps their
        momentum.
        """
        if self.bucket.route == "own" and any(p.owner != self.rank for p in pieces):
            return ()
        momentum = self.store.states(pieces, "momentum_buffer")
        return momentum, self.store.sources(pieces), self.store.gradients

    def _bind_pack(self, pieces: Sequence[Piece], to: Mapping[Piece, torch.Tensor]) -> Pack:
        """Momentum of pieces, whose updates are written to `to`."""
        M, *sources = self._momenta(pieces)
        return Pack(M, [to[p] for p in pieces], *sources, self.store.skip(pieces))

    def _bind_update(self, pieces: Sequence[Piece], back: Mapping[Piece, torch.Tensor]) -> Update:
        """Weight and momentum of pieces, by updates that are read from `back`."""
        return Update(
            self.store.weights(pieces),
            [back[p] for p in pieces],
            self._scales(pieces),
            self.store.skip(pieces),
            *self._momenta(pieces),
        )

    def _scales(self, pieces: Sequence[Piece]) -> list[float]:
        """Factors on the learning rate, from each piece's whole matrix."""
        return [muon.scale_of(p.matrix, self.group["adjust_lr_fn"]) for p in pieces]

    def _bind_iteration(self, stacks: Stacks) -> BoundOrthogonalization:
        # Between the two all-to-alls their buffers are free, and serve as scratch
        scratch = [self.memory[use] for use in ("scratch_a", "scratch_b", "gram_scratch")]
        return BoundOrthogonalization(stacks.inputs, stacks.outputs, self.options.ns_dtype, scratch)

    # Running

    @property
    def update_momentum_early(self) -> bool:
        """See [Note: momentum and weight together]."""
        return self.graphs.inside_capture

    def replay(self, part: Callable, constants: tuple, argument: object = None) -> None:
        """Call `part(constants)`, or `part(argument)`, by a CUDA graph where possible. `constants`
        holds every host value that the part's launches depend on.
        """
        argument = constants if argument is None else argument
        if self.graphs.may_capture:
            self.graphs(part, constants, argument)
        else:
            part(argument)

    def _run_pack(self, pack: Pack, constants: MuonConstants, gradients: tuple = ()) -> None:
        """`gradients`: (tensors, addresses); empty for this step's."""
        store = self.store
        tensors, addresses = gradients or (store.gradients, store.addresses)
        early = self.update_momentum_early
        pack(tensors, addresses, store.scalars[4:5], constants.nesterov, early)

    def _run_update(self, update: Update, gradients: tuple = (), packed: bool = True) -> None:
        """`packed`: `_run_pack` has seen these pieces, so their momentum may be new already."""
        store = self.store
        tensors, addresses = gradients or (store.gradients, store.addresses)
        moves_momentum = not (packed and self.update_momentum_early)
        update(store.scalars[:2], tensors, addresses, store.scalars[4:5], moves_momentum)


class LocalUpdate(BoundUpdate):
    """Whole matrices stored on this rank: nothing is sent (one process, EP)."""

    def __init__(self, inputs: BucketInputs):
        super().__init__(inputs)
        home = self._pieces("home")
        rows = self._pieces("home", "row")
        self.stacks = Stacks(self.rank_plan, self.memory, self.options.wire_dtype)
        whole = self.stacks.input_view
        second_moment = self.store.states(rows, "second_moment")
        self.pack_all = self._bind_pack(home, whole)
        self.load_rows = Copy([whole[p] for p in rows], second_moment)
        self.save_rows = Copy(second_moment, [whole[p] for p in rows], self.store.skip(rows))
        self.iterate = self._bind_iteration(self.stacks)
        self.update_all = self._bind_update(home, whole)

    @property
    def update_momentum_early(self) -> bool:
        """The whole update is one part, so that any capture holds the weight as well."""
        return capturing(self.store.device)

    def run(self, group: dict) -> Iterator:
        self.replay(self.step, host_constants(group))
        return
        yield  # a generator like the others, without a collective

    def launches(self, group: dict) -> list[Callable[[], None]]:
        return [partial(self.step, host_constants(group))]

    def step(self, constants: MuonConstants) -> None:
        self._run_pack(self.pack_all, constants)
        self.load_rows()
        self.iterate(constants.steps, constants.eps)
        if constants.beta2 is not None:
            normuon.normalize(self.stacks.outputs, self.stacks.row_state, constants.beta2)
        self._run_update(self.update_all)
        self.save_rows()


class OwnerUpdate(BoundUpdate):
    """Gradients or momenta travel to the owners of matrices, updates travel back."""

    travels = True

    def run(self, group: dict) -> Iterator:
        constants = host_constants(group)
        self.replay(self.pack, constants)  # momentum of pieces owned elsewhere -> send buffer
        inbound = self.to_owner.start()  # all-to-all
        if self.packs_local:
            # Pieces owned here, while the others travel
            self.replay(self.pack_local, constants)
        yield from inbound
        self.replay(self.orthogonalize, constants)  # assemble, Newton-Schulz, NorMuon, disassemble
        yield from self.to_shards.start()  # all-to-all
        self.replay(self.apply, constants)  # weight and momentum

    packs_local = False

    def launches(self, group: dict) -> list[Callable[[], None]]:
        constants = host_constants(group)
        parts = [self.pack, self.orthogonalize, self.apply]
        if self.packs_local:
            parts.append(self.pack_local)
        return [partial(part, constants) for part in parts]

    def _bind_buffers(
        self, in_dtype: torch.dtype | None = None, out_dtype: torch.dtype | None = None
    ) -> None:
        """[Note: buffers of the return all-to-all]
        The receive buffer of the inbound all-to-all ("arrive") is the send buffer of the return
        all-to-all: its pieces are assembled, hence copied, before updates are written there. The
        two other buffers share memory as well, see `RankPlan.workspace_layout`.
        """
        own = self.rank_plan, self.process_group, self.memory
        wire = self.options.wire_dtype
        self.to_owner = AllToAllBuffers(*own, "inbound", ("leave", "arrive"), in_dtype or wire)
        self.to_shards = AllToAllBuffers(*own, "outbound", ("arrive", "return"), out_dtype or wire)


class ShardedUpdate(OwnerUpdate):
    """Shards -> owner -> shards. FSDP2, HSDP, TP x FSDP and DDP with reduced gradients differ in
    their pieces only. State stays with the shards (shard_state: with the owner).
    """

    def __init__(self, inputs: BucketInputs):
        super().__init__(inputs)
        self._bind_buffers()
        kept = self._kept()
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
        """Momentum and updates of pieces: into the send buffer, into `kept`, or into the stacks."""
        home = self._pieces("home")
        self.sent = [p for p in home if p in self.to_owner.leave]
        self.stays = [p for p in home if p in kept]
        # Whole matrices go to scratch, which the bucket before still uses; direct pieces do not
        early = [p for p in self.stays if p.matrix in self.rank_plan.direct]
        early = early if self.rank_plan.crosses_inbound else []
        late = [p for p in self.stays if p not in early]
        self.pack_sent = self._bind_pack(self.sent, self.to_owner.leave)
        self.packs_local = bool(early)
        self.pack_early = self._bind_pack(early, kept)
        self.pack_late = self._bind_pack(late, self.stacks.input_view)
        rows = [p for p in self._pieces("home", "row") if p.is_source]
        to = {**self.to_owner.leave, **self.stacks.input_view}
        self.send_rows = Copy([to[p] for p in rows], self.store.states(rows, "second_moment"))

    def _bind_assembly(self, kept: dict[Piece, torch.Tensor]) -> None:
        """Copies between buffers and stacks, of pieces that are not iterated where they lie."""
        come = self.stacks.input_view
        go = self.stacks.output_view
        arrive = self.to_owner.arrive
        self.assemble = copy_apart({p: come[p] for p in arrive}, arrive)
        direct = self.rank_plan.direct
        self.kept = {p: go[p] if p.matrix in direct else place for p, place in kept.items()}
        self.disassemble = copy_apart({**self.to_shards.leave, **self.kept}, go)

    def _bind_weights(self) -> None:
        """Weights, momenta and rows of state, by updates from the receive buffer or `kept`."""
        rows = self._pieces("home", "row")
        go = self.stacks.output_view
        back = {**self.to_shards.arrive, **self.kept, **{p: go[p] for p in rows if p in go}}
        second_moment = self.store.states(rows, "second_moment")
        self.save_rows = Copy(second_moment, [back[p] for p in rows], self.store.skip(rows))
        # Replicas whose gradient no owner asked for; they receive the update alone
        replicas = [p for p in self._pieces("home") if p not in self.sent and p not in self.stays]
        self.update = self._bind_update([*self.sent, *self.stays], back)
        self.update_replicas = self._bind_update(replicas, back)

    def pack(self, constants: MuonConstants) -> None:
        self._run_pack(self.pack_sent, constants)
        self.send_rows()

    def pack_local(self, constants: MuonConstants) -> None:
        self._run_pack(self.pack_early, constants)

    def orthogonalize(self, constants: MuonConstants) -> None:
        self._run_pack(self.pack_late, constants)
        self.assemble()
        self.iterate(constants.steps, constants.eps)
        if constants.beta2 is not None:
            normuon.normalize(self.stacks.outputs, self.stacks.row_state, constants.beta2)
        self.disassemble()

    def apply(self, _) -> None:
        self._run_update(self.update)
        self._run_update(self.update_replicas, packed=False)
        self.save_rows()


class UnreducedUpdate(OwnerUpdate):
    """Unreduced gradients -> owner, updates -> every rank: DDP without its all-reduce. State lives
    at the owner.
    """

    def __init__(self, inputs: BucketInputs):
        super().__init__(inputs)
        self._bind_buffers()
        store = self.store
        home = self._pieces("home")
        rows = self._pieces("owned", "row")
        owned = [p for p in home if p.owner == self.rank]
        self.stacks = Stacks(self.rank_plan, self.memory, self.options.wire_dtype)
        self.fill = Copy.of_gradients(
            [self.to_owner.leave[p] for p in home], store.sources(home), store.gradients
        )
        self.mean = Mean(self.to_owner, self.memory["until_apply"])
        M = store.states(owned, "momentum_buffer")
        skip = store.skip(owned)
        whole = self.stacks.input_view
        means = [self.mean.source(p) for p in owned], [self.mean.out]
        self.pack_owned = Pack(M, [whole[p] for p in owned], *means, skip)
        second_moment = store.states(rows, "second_moment")
        self.load_rows = Copy([whole[p] for p in rows], second_moment)
        self.save_rows = Copy(second_moment, [whole[p] for p in rows], store.skip(rows))
        kept = self._kept()
        self.disassemble = copy_apart({**self.to_shards.leave, **kept}, whole)
        self.iterate = self._bind_iteration(self.stacks)
        self.update_owned = Update(
            store.weights(owned), [kept[p] for p in owned], self._scales(owned), skip, M, *means
        )
        received = self.to_shards.arrive
        self.update_received = Update(
            store.weights(received),
            list(received.values()),
            self._scales(received),
            store.skip(received),
        )

    def pack(self, _) -> None:
        """Gradients travel as autograd left them, rounded to wire_dtype."""
        self.fill(self.store.gradients, self.store.addresses)

    def orthogonalize(self, constants: MuonConstants) -> None:
        self._run_pack(self.pack_owned, constants, self.mean())
        self.load_rows()
        self.iterate(constants.steps, constants.eps)
        if constants.beta2 is not None:
            normuon.normalize(self.stacks.outputs, self.stacks.row_state, constants.beta2)
        self.disassemble()

    def apply(self, _) -> None:
        self._run_update(self.update_owned, self.mean.result)
        self._run_update(self.update_received)
        self.save_rows()


class AdamWUpdate(BucketUpdate):
    """AdamW: every element is stepped where it is stored."""

    def __init__(
        self,
        store: Store,
        label: str,
        written: Callable[[BucketUpdate], None] | None = None,
        graphs: Graphs | None = None,
    ):
        """`graphs`: None launches every step anew; a graph holds the addresses of its gradients."""
        super().__init__(label, written, store)
        self.graphs = graphs
        self.weights = store.locals()
        self.states = [store.locals(key) for key in ("exp_avg", "exp_avg_sq", "step")]
        self.flags = _flags(store, range(len(self.weights)))

    def run(self, group: dict) -> Iterator:
        if self.graphs is None:
            self.step(group)
        else:
            addresses = list(map(torch.Tensor.data_ptr, self.store.gradients))
            constants = host_constants(group, self.store.is_fp64)
            self.graphs(self.step, (*constants, addresses), group)
        return
        yield  # a generator like the others, without a collective

    def step(self, group: dict) -> None:
        store = self.store
        adamw.adamw_unless(
            self.flags, self.weights, store.gradients, self.states, group, store.scalars
        )


class UnreducedAdamWUpdate(OwnerUpdate):
    """AdamW on unreduced gradients: every rank sums and steps its chunk of each parameter, and
    returns the weights. Its own weights and state are stepped as copies, which take their place
    once the return all-to-all is done.
    """

    def __init__(self, inputs: BucketInputs):
        super().__init__(inputs)
        store = self.store
        first = store.params[0]
        home = self._pieces("home", "chunk")
        owned = [p for p in home if p.owner == self.rank]
        self._bind_buffers(gradient_dtype(first), first.dtype)
        gradients = self._bind_gradients(home, owned)
        keys = ("exp_avg", "exp_avg_sq")
        now = [store.weights(owned), *(store.states(owned, key) for key in keys)]
        steps = [_steps(store, p) for p in owned]
        new = [*like(now, self.memory["until_apply"]), [step.clone() for step in steps]]
        W, *states = new
        self.now = [*itertools.chain(*now), *steps]
        self.new = [*itertools.chain(*new)]
        self.lists = [W, [g.view(w.shape) for g, w in zip(gradients, W)], states]
        self.flags = _flags(store, [p.matrix.param for p in owned])
        self.without_rows = self._bind_counts()
        stepped = {p.matrix: w for p, w in zip(owned, W)}
        W = [stepped[p.matrix] for p in self.to_shards.leave]
        self.sent = _views(self.to_shards.leave, W), W
        W = store.weights(self.to_shards.arrive)
        self.received = W, _views(self.to_shards.arrive, W)

    def _bind_gradients(self, home: list[Piece], owned: list[Piece]) -> list[torch.Tensor]:
        """Return the places of the gradients of this rank's chunks, filled by `collect`."""
        sources = self.store.sources(home)
        gradients = self.store.gradients
        self.fill = Copy.of_gradients([self.to_owner.leave[p] for p in home], sources, gradients)
        self.collect = Mean(self.to_owner, self.memory["mean"])
        return [self.collect.view(p) for p in owned]

    def _bind_counts(self) -> tuple:
        """(counts of steps, flags) of parameters that begin in this bucket and of which this rank
        has no rows: the counts go up here as well, so that state is the same on every rank.
        """
        state = [self.store.state[p] for p in self.store.params]
        begun = [m.param for m in self.bucket.matrices if m.at[0] == 0]
        without = [number for number in begun if not state[number]["exp_avg"].numel()]
        return [state[number]["step"] for number in without], _flags(self.store, without)

    def run(self, group: dict) -> Iterator:
        constants = host_constants(group, self.store.is_fp64)
        self.replay(self.pack, constants)
        yield from self.to_owner.start()
        self.replay(self.orthogonalize, constants, group)
        yield from self.to_shards.start()
        self.replay(self.apply, constants)

    def launches(self, group: dict) -> list[Callable[[], None]]:
        return [partial(self.pack, ())]

    def pack(self, _) -> None:
        self.fill(self.store.gradients, self.store.addresses)

    def orthogonalize(self, group: dict) -> None:
        """Step copies of this rank's chunks; nothing is orthogonalized under AdamW."""
        self.collect()
        copy_torch(self.new, self.now)
        adamw.adamw_unless(self.flags, *self.lists, group, self.store.scalars)
        copy_torch(*self.sent)

    def apply(self, _) -> None:
        copy_torch(self.now, self.new)
        adamw.count(*self.without_rows)
        copy_torch(*self.received)


class OwnerStateAdamWUpdate(UnreducedAdamWUpdate):
    """AdamW with shard_state: gradients come reduced, so that nothing travels to the owners."""

    def _bind_gradients(self, home: list[Piece], owned: list[Piece]) -> list[torch.Tensor]:
        kept = self._kept(self.to_owner.dtype)
        sources = self.store.sources(owned)
        self.fill = Copy.of_gradients([kept[p] for p in owned], sources, self.store.gradients)
        return [kept[p] for p in owned]

    def collect(self) -> None:
        pass


def _views(places: Mapping[Piece, torch.Tensor], like: Sequence[torch.Tensor]) -> list:
    """Places of pieces in a flat buffer, in the shapes of `like`."""
    return [place.view(w.shape) for place, w in zip(places.values(), like)]


def _flags(store: Store, numbers: Sequence[int]) -> list[torch.Tensor] | None:
    """Non-finite flags of AdamW's parameters; None if gradients are not checked."""
    return None if store.flags is None else [store.flags[store.flag_offset[i]] for i in numbers]


def _steps(store: Store, piece: Piece) -> torch.Tensor:
    """AdamW's count of steps for a chunk. The first chunk of a parameter counts in the state; later
    ones count along in copies.
    """
    number = piece.matrix.param
    step = store.state[store.params[number]]["step"]
    return store.add_step_copy(number, step) if piece.matrix.at[0] else step


BUCKET_UPDATES = {
    "local": LocalUpdate,
    "exchange": ShardedUpdate,
    "own": ShardedUpdate,
    "reduce": UnreducedUpdate,
    "reduce_elementwise": UnreducedAdamWUpdate,
    "own_elementwise": OwnerStateAdamWUpdate,
}

"""How each kind of bucket is stepped. Start reading here: `ShardedUpdate` with `OwnerUpdate.run`.

Every update binds its views and kernels once. `run` is a generator that yields collectives in
flight; the parts between two collectives are replayed as CUDA graphs.
"""

from __future__ import annotations

import itertools

import torch

from ..communication.all_to_all import AllToAllBuffers, Mean, piece_at
from ..kernels.backend import capturing
from ..kernels.elementwise.momentum import Copy, Pack, copy_torch
from ..kernels.elementwise.weight_update import Update
from ..params.dtensor import gradient_dtype
from ..pipeline import BucketUpdate
from ..rules import adamw, muon, normuon, rule
from .workspace import Stacks, copy_apart, like


class BoundBucket:
    """One bucket at this rank: its share of the plan, the tensors of its pieces, its process group
    and its memory.
    """

    def __init__(self, bucket, share, store, options, group, hp):
        self.bucket, self.share, self.store = bucket, share, store
        self.options, self.group, self.hp = options, group, hp
        self.rank, self.memory, self.slot, self.graphs = store.rank, None, None, None
        self.weights, self.states, self.sources = store.weights, store.states, store.sources

    def pieces(self, end, kind="update"):
        """The pieces that are stored ("home") or computed ("owned") at this rank."""
        return [p for p in getattr(self.share, end) if p.kind == kind]

    @property
    def moves_first(self) -> bool:
        """Whether momentum moves where it is read first, not along with the weight, which reads it
        a second time: where both go into one graph, no error of the host can come in between.
        """
        return capturing(self.store.device) if self.bucket.route == "local" else self.graphs.within

    def momentum(self, pack, hp, gradients=None):
        """`recipe.momentum` of a Pack; `gradients`: (tensors, addresses), None for this step's."""
        muon.momentum(pack, gradients or self.gradients(), self.store.numbers, hp, self.moves_first)

    def apply(self, update, gradients=None, packed=True):
        """`recipe.apply` of an Update; `packed`: its momenta went through `momentum` before."""
        moves = not (packed and self.moves_first)
        muon.apply(update, self.store.numbers, gradients or self.gradients(), moves)

    def kept(self, dtype=None):
        """{piece stored and computed here: where its update, or its gradient, stays until the
        bucket lands}.
        """
        dtype, memory = dtype or self.options.wire_dtype, self.memory["kept"]
        return {p: piece_at(memory, at, p.shape, dtype) for p, at in self.share.kept.items()}

    def momenta(self, pieces):
        """(M of each piece, where its gradient lies, this step's gradients); nothing of pieces that
        others keep.
        """
        if self.bucket.route == "own" and any(p.owner != self.rank for p in pieces):
            return ()
        return self.states(pieces, "momentum_buffer"), self.sources(pieces), self.store.gradients

    def gradients(self):
        return self.store.gradients, self.store.addresses

    def replay(self, part, hp):
        """Do part(hp), by a CUDA graph where it can be. What else it reads of this step lies on the
        device.
        """
        self.graphs(part, rule.host_constants(hp, self.store.wide), hp)

    def scales(self, pieces):
        return [muon.scale_of(p.matrix, self.hp["adjust_lr_fn"]) for p in pieces]

    def orthogonalize(self, stacks, hp):
        """The iteration of Stacks, in memory that is this bucket's while it is computed."""
        memory = [self.memory[use] for use in ("scratch_a", "scratch_b", "gram_scratch")]
        muon.orthogonalize(stacks.read, hp, self.options.ns_dtype, memory, stacks.written)


class LocalUpdate(BucketUpdate):
    """The whole matrix is at home: nothing travels."""

    rehearsed = ("step",)

    def __init__(self, bound):
        self.bound, home = bound, bound.pieces("home")
        rows, self.stacks = bound.pieces("home", "row"), Stacks(bound)
        whole = self.stacks.come
        V = bound.states(rows, "second_moment")
        self.pack = _pack(bound, home, whole)
        self.fetch_rows = Copy([whole[p] for p in rows], V)
        self.keep_rows = Copy(V, [whole[p] for p in rows], bound.store.skip(rows))
        self.update = _update(bound, home, whole)

    def run(self, hp):
        self.bound.replay(self.step, hp)
        return
        yield  # a story like the others, without a collective

    def step(self, hp):
        self.bound.momentum(self.pack, hp)
        self.fetch_rows()
        self.bound.orthogonalize(self.stacks, hp)
        normuon.normalize(self.stacks.written, self.stacks.rows, hp)
        self.bound.apply(self.update)
        self.keep_rows()


def _pack(bound, pieces, to):
    """Momentum of these pieces, whose updates go to the places that `to` says."""
    M, *sources = bound.momenta(pieces)
    return Pack(M, [to[p] for p in pieces], *sources, bound.store.skip(pieces))


def _update(bound, pieces, back):
    """Weights and momentum of these pieces, by updates that are where `back` says."""
    return Update(
        bound.weights(pieces),
        [back[p] for p in pieces],
        bound.scales(pieces),
        bound.store.skip(pieces),
        *bound.momenta(pieces),
    )


class OwnerUpdate(BucketUpdate):
    """There and back: what travels in, what is done with it, what travels out."""

    travels, rehearsed, meanwhile = True, ("leave", "compute", "land"), ()

    def run(self, hp):
        self.bound.replay(self.leave, hp)
        collectives = self.inbound.go()
        for part in self.meanwhile:
            self.bound.replay(getattr(self, part), hp)
        yield from collectives
        self.bound.replay(self.compute, hp)
        yield from self.outbound.go()
        self.bound.replay(self.land, hp)

    def leave(self, _):
        """Gradients as they are, where a route says nothing else."""
        self.fill(*self.bound.gradients())


class ShardedUpdate(OwnerUpdate):
    """Shards -> owner -> shards. FSDP2, HSDP, TP x FSDP and DDP differ in their pieces only. State
    stays at home (own: with the owner). Until the answer has landed nothing changes: momentum moves
    together with the weight. Only in a graph of the whole step, which no error of the host can
    interrupt, does it move where it is first read.
    """

    def __init__(self, bound):
        self.bound, home, rows = bound, bound.pieces("home"), bound.pieces("home", "row")
        self.inbound = AllToAllBuffers(bound, "inbound", "leave", "arrive")
        self.outbound = AllToAllBuffers(bound, "outbound", "arrive", "return")
        kept, direct = bound.kept(), bound.share.direct
        self.stacks = Stacks(
            bound, {**self.inbound.arrive, **kept}, {**self.outbound.leave, **kept}
        )
        come, go = self.stacks.come, self.stacks.go
        # away: sent to another owner; here: this rank is the owner; copies: only the answer comes,
        # to replicas
        away, here = ([p for p in home if p in those] for those in (self.inbound.leave, kept))
        copies = [p for p in home if p not in self.inbound.leave and p not in kept]
        # whole matrices go to the shared scratch, which the bucket before still uses; direct pieces
        # do not
        early = [p for p in here if p.matrix in direct and bound.share.crosses_inbound]
        self.pack, self.pack_kept = (
            _pack(bound, away, self.inbound.leave),
            _pack(bound, early, kept),
        )
        self.pack_here = _pack(bound, [p for p in here if p not in early], come)
        if early:
            self.rehearsed, self.meanwhile = (*self.rehearsed, "stay"), ("stay",)
        sent = {p: {**self.inbound.leave, **come}[p] for p in rows if p.is_source}
        self.send_rows = Copy(list(sent.values()), bound.states(sent, "second_moment"))
        self.assemble = copy_apart({p: come[p] for p in self.inbound.arrive}, self.inbound.arrive)
        stays = {p: go[p] if p.matrix in direct else place for p, place in kept.items()}
        self.dismantle = copy_apart({**self.outbound.leave, **stays}, go)
        back = {**self.outbound.arrive, **stays, **{p: go[p] for p in rows if p in go}}
        self.keep_rows = Copy(
            bound.states(rows, "second_moment"), [back[p] for p in rows], bound.store.skip(rows)
        )
        self.update, self.update_copies = (
            _update(bound, away + here, back),
            _update(bound, copies, back),
        )

    def leave(self, hp):
        self.bound.momentum(self.pack, hp)
        self.send_rows()

    def stay(self, hp):
        self.bound.momentum(self.pack_kept, hp)

    def compute(self, hp):
        self.bound.momentum(self.pack_here, hp)
        self.assemble()
        self.bound.orthogonalize(self.stacks, hp)
        normuon.normalize(self.stacks.written, self.stacks.rows, hp)
        self.dismantle()

    def land(self, hp):
        self.bound.apply(self.update)
        self.bound.apply(self.update_copies, packed=False)
        self.keep_rows()


class UnreducedUpdate(OwnerUpdate):
    """Unreduced gradients -> owner, updates -> everybody: DDP without its all-reduce. State lives
    at the owner.
    """

    def __init__(self, bound):
        self.bound, home, rows = bound, bound.pieces("home"), bound.pieces("owned", "row")
        owned = [p for p in home if p.owner == bound.rank]
        self.stacks = Stacks(bound)
        self.inbound = AllToAllBuffers(bound, "inbound", "leave", "arrive")
        self.outbound = AllToAllBuffers(bound, "outbound", "arrive", "return")
        self.fill = Copy.of_gradients(
            [self.inbound.leave[p] for p in home], bound.sources(home), bound.store.gradients
        )
        self.mean = Mean(self.inbound, bound.memory["until_apply"])
        M, skip, whole = (
            bound.states(owned, "momentum_buffer"),
            bound.store.skip(owned),
            self.stacks.come,
        )
        means = [self.mean.source(p) for p in owned], [self.mean.out]
        self.pack = Pack(M, [whole[p] for p in owned], *means, skip)
        self.fetch_rows = Copy([whole[p] for p in rows], bound.states(rows, "second_moment"))
        self.keep_rows = Copy(
            bound.states(rows, "second_moment"), [whole[p] for p in rows], bound.store.skip(rows)
        )
        kept = bound.kept()
        self.dismantle = copy_apart({**self.outbound.leave, **kept}, whole)
        self.update_owned = Update(
            bound.weights(owned), [kept[p] for p in owned], bound.scales(owned), skip, M, *means
        )
        others = self.outbound.arrive
        self.update = Update(
            bound.weights(others),
            list(others.values()),
            bound.scales(others),
            bound.store.skip(others),
        )

    def compute(self, hp):
        self.bound.momentum(self.pack, hp, self.mean())
        self.fetch_rows()
        self.bound.orthogonalize(self.stacks, hp)
        normuon.normalize(self.stacks.written, self.stacks.rows, hp)
        self.dismantle()

    def land(self, _):
        self.bound.apply(self.update_owned, self.mean.result)
        self.bound.apply(self.update)
        self.keep_rows()


class AdamWUpdate(BucketUpdate):
    """AdamW: every element is stepped where it is stored."""

    def __init__(self, store, graphs=None):
        """`graphs`: None launches every step anew; a graph holds the addresses of its gradients."""
        self.store, self.graphs, self.W = store, graphs, store.locals()
        self.states = [store.locals(key) for key in ("exp_avg", "exp_avg_sq", "step")]
        self.flags = _flags(store, range(len(self.W)))

    def run(self, hp):
        if self.graphs is None:
            self.step(hp)
        else:
            places = list(map(torch.Tensor.data_ptr, self.store.gradients))
            self.graphs(self.step, (*rule.host_constants(hp, self.store.wide), places), hp)
        return
        yield  # a story like the others, without a collective

    def step(self, hp):
        adamw.adamw_unless(
            self.flags, self.W, self.store.gradients, self.states, hp, self.store.numbers
        )


class UnreducedAdamWUpdate(OwnerUpdate):
    """AdamW on unreduced gradients: every rank sums and steps its chunk of each parameter and
    returns the weights. Its own weights and state are stepped as copies, which take their place
    when the bucket lands.
    """

    rehearsed = ("leave",)

    def __init__(self, bound):
        self.bound, home, first = bound, bound.pieces("home", "chunk"), bound.store.params[0]
        owned = [p for p in home if p.owner == bound.rank]
        self.inbound = AllToAllBuffers(bound, "inbound", "leave", "arrive", gradient_dtype(first))
        self.outbound = AllToAllBuffers(bound, "outbound", "arrive", "return", first.dtype)
        gradients = self.bind_gradients(home, owned)
        now = [
            bound.weights(owned),
            *(bound.states(owned, key) for key in ("exp_avg", "exp_avg_sq")),
        ]
        steps = [_steps(bound, p) for p in owned]
        memory = bound.memory["until_apply"]
        W, *states = next_ = [*like(now, memory), [step.clone() for step in steps]]
        self.now, self.next = [*itertools.chain(*now), *steps], [*itertools.chain(*next_)]
        self.lists = [W, [g.view(w.shape) for g, w in zip(gradients, W)], states]
        self.flags = _flags(bound.store, [p.matrix.param for p in owned])
        states, begun = [bound.store.state[p] for p in bound.store.params], bound.bucket.matrices
        without = [
            m.param for m in begun if m.at[0] == 0 and not states[m.param]["exp_avg"].numel()
        ]
        self.without_rows = [states[i]["step"] for i in without], _flags(bound.store, without)
        stepped = {p.matrix: w for p, w in zip(owned, W)}
        W = [stepped[p.matrix] for p in self.outbound.leave]
        self.sent = [place.view(w.shape) for place, w in zip(self.outbound.leave.values(), W)], W
        W = bound.weights(self.outbound.arrive)
        self.answered = (
            W,
            [place.view(w.shape) for place, w in zip(self.outbound.arrive.values(), W)],
        )

    def bind_gradients(self, home, owned) -> list:
        """Return where those of this rank's chunks are, once `collect` has run."""
        sources, gradients = self.bound.sources(home), self.bound.store.gradients
        self.fill = Copy.of_gradients([self.inbound.leave[p] for p in home], sources, gradients)
        self.collect = Mean(self.inbound, self.bound.memory["mean"])
        return [self.collect.view(p) for p in owned]

    def compute(self, hp):
        self.collect()
        copy_torch(self.next, self.now)
        adamw.adamw_unless(self.flags, *self.lists, hp, self.bound.store.numbers)
        copy_torch(*self.sent)

    def land(self, _):
        copy_torch(self.now, self.next)
        adamw.count(*self.without_rows)
        copy_torch(*self.answered)


class OwnerStateAdamWUpdate(UnreducedAdamWUpdate):
    """The same on gradients that come reduced: nothing travels in."""

    def bind_gradients(self, home, owned) -> list:
        kept, gradients = self.bound.kept(self.inbound.dtype), self.bound.store.gradients
        self.fill = Copy.of_gradients(
            [kept[p] for p in owned], self.bound.sources(owned), gradients
        )
        return [kept[p] for p in owned]

    def collect(self):
        pass


def _flags(store, numbers):
    """Those of so many parameters of AdamW, None if no one watches."""
    return None if store.flags is None else [store.flags[store.first[i]] for i in numbers]


def _steps(bound, piece):
    """AdamW's count of steps for a chunk; the chunks of a parameter that later buckets bring count
    along by themselves.
    """
    number = piece.matrix.param
    step = bound.store.state[bound.store.params[number]]["step"]
    return bound.store.twin(number, step) if piece.matrix.at[0] else step


BUCKET_UPDATES = {
    "local": LocalUpdate,
    "exchange": ShardedUpdate,
    "own": ShardedUpdate,
    "reduce": UnreducedUpdate,
    "reduce_elementwise": UnreducedAdamWUpdate,
    "own_elementwise": OwnerStateAdamWUpdate,
}

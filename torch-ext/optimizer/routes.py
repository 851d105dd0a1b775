"""How a bucket is stepped: Local, Exchange, Reduce, and for AdamW Elementwise, ReduceElementwise, OwnElementwise. The
only file whose collectives carry buckets.

Each route binds its views and launches once, and tells its story in `run`, a generator that yields a collective in
flight and goes on once that has finished; what lies between two collectives is a part that CUDA graphs replay
(graphs.py). No formula stands here (recipe.py), and no choice of owner or order (plan.py).
"""
from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from . import recipe
from .bound import like, piece_at
from .change import gradient_dtype
from .kernels.pack import Copy, Pack, copy_torch
from .kernels.update import Update
from .mean import Mean
from .pipeline import Route
from .stacks import Stacks, copy_apart


class Local(Route):
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
        recipe.normalize(self.stacks.written, self.stacks.rows, hp)
        self.bound.apply(self.update)
        self.keep_rows()


def _pack(bound, pieces, to):
    """Momentum of these pieces, whose updates go to the places that `to` says."""
    M, *sources = bound.momenta(pieces)
    return Pack(M, [to[p] for p in pieces], *sources, bound.store.skip(pieces))


def _update(bound, pieces, back):
    """Weights and momentum of these pieces, by updates that are where `back` says."""
    return Update(bound.weights(pieces), [back[p] for p in pieces], bound.scales(pieces), bound.store.skip(pieces),
                  *bound.momenta(pieces))


class Journey(Route):
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


class Exchange(Journey):
    """Shards -> owner -> shards. FSDP2, HSDP, TP x FSDP and DDP differ in their pieces only. State stays at home (own:
    with the owner). Until the answer has landed nothing changes: momentum moves together with the weight. Only in a
    graph of the whole step, which no error of the host can interrupt, does it move where it is first read.
    """

    def __init__(self, bound):
        self.bound, home, rows = bound, bound.pieces("home"), bound.pieces("home", "row")
        self.inbound = Wire(bound, "inbound", "leave", "arrive")
        self.outbound = Wire(bound, "outbound", "arrive", "return")
        kept, direct = bound.kept(), bound.share.direct
        self.stacks = Stacks(bound, {**self.inbound.arrive, **kept}, {**self.outbound.leave, **kept})
        come, go = self.stacks.come, self.stacks.go
        # away: sent to another owner; here: this rank is the owner; copies: only the answer comes, to replicas
        away, here = ([p for p in home if p in those] for those in (self.inbound.leave, kept))
        copies = [p for p in home if p not in self.inbound.leave and p not in kept]
        # whole matrices go to the bench, which the bucket before still uses; direct pieces do not
        early = [p for p in here if p.matrix in direct and bound.share.crosses_inbound]
        self.pack, self.pack_kept = _pack(bound, away, self.inbound.leave), _pack(bound, early, kept)
        self.pack_here = _pack(bound, [p for p in here if p not in early], come)
        if early:
            self.rehearsed, self.meanwhile = (*self.rehearsed, "stay"), ("stay",)
        sent = {p: {**self.inbound.leave, **come}[p] for p in rows if p.fed}
        self.send_rows = Copy(list(sent.values()), bound.states(sent, "second_moment"))
        self.assemble = copy_apart({p: come[p] for p in self.inbound.arrive}, self.inbound.arrive)
        stays = {p: go[p] if p.matrix in direct else place for p, place in kept.items()}
        self.dismantle = copy_apart({**self.outbound.leave, **stays}, go)
        back = {**self.outbound.arrive, **stays, **{p: go[p] for p in rows if p in go}}
        self.keep_rows = Copy(bound.states(rows, "second_moment"), [back[p] for p in rows], bound.store.skip(rows))
        self.update, self.update_copies = _update(bound, away + here, back), _update(bound, copies, back)

    def leave(self, hp):
        self.bound.momentum(self.pack, hp)
        self.send_rows()

    def stay(self, hp):
        self.bound.momentum(self.pack_kept, hp)

    def compute(self, hp):
        self.bound.momentum(self.pack_here, hp)
        self.assemble()
        self.bound.orthogonalize(self.stacks, hp)
        recipe.normalize(self.stacks.written, self.stacks.rows, hp)
        self.dismantle()

    def land(self, hp):
        self.bound.apply(self.update)
        self.bound.apply(self.update_copies, packed=False)
        self.keep_rows()


class Reduce(Journey):
    """Unreduced gradients -> owner, updates -> everybody: DDP without its all-reduce. State lives at the owner."""

    def __init__(self, bound):
        self.bound, home, rows = bound, bound.pieces("home"), bound.pieces("owned", "row")
        owned = [p for p in home if p.owner == bound.rank]
        self.stacks = Stacks(bound)
        self.inbound = Wire(bound, "inbound", "leave", "arrive")
        self.outbound = Wire(bound, "outbound", "arrive", "return")
        self.fill = Copy.of_gradients([self.inbound.leave[p] for p in home], bound.sources(home), bound.store.gradients)
        self.mean = Mean(self.inbound, bound.memory["stays"])
        M, skip, whole = bound.states(owned, "momentum_buffer"), bound.store.skip(owned), self.stacks.come
        means = [self.mean.source(p) for p in owned], [self.mean.out]
        self.pack = Pack(M, [whole[p] for p in owned], *means, skip)
        self.fetch_rows = Copy([whole[p] for p in rows], bound.states(rows, "second_moment"))
        self.keep_rows = Copy(bound.states(rows, "second_moment"), [whole[p] for p in rows], bound.store.skip(rows))
        kept = bound.kept()
        self.dismantle = copy_apart({**self.outbound.leave, **kept}, whole)
        self.update_owned = Update(bound.weights(owned), [kept[p] for p in owned], bound.scales(owned), skip, M,
                                   *means)
        others = self.outbound.arrive
        self.update = Update(bound.weights(others), list(others.values()), bound.scales(others),
                             bound.store.skip(others))

    def compute(self, hp):
        self.bound.momentum(self.pack, hp, self.mean())
        self.fetch_rows()
        self.bound.orthogonalize(self.stacks, hp)
        recipe.normalize(self.stacks.written, self.stacks.rows, hp)
        self.dismantle()

    def land(self, _):
        self.bound.apply(self.update_owned, self.mean.result)
        self.bound.apply(self.update)
        self.keep_rows()


class Elementwise(Route):
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
            self.graphs(self.step, (*recipe.baked(hp, self.store.wide), places), hp)
        return
        yield  # a story like the others, without a collective

    def step(self, hp):
        recipe.adamw_unless(self.flags, self.W, self.store.gradients, self.states, hp, self.store.numbers)


class ReduceElementwise(Journey):
    """AdamW on unreduced gradients: every rank sums and steps its chunk of each parameter and returns the weights. Its
    own weights and state are stepped as copies, which take their place when the bucket lands.
    """
    rehearsed = ("leave",)

    def __init__(self, bound):
        self.bound, home, first = bound, bound.pieces("home", "chunk"), bound.store.params[0]
        owned = [p for p in home if p.owner == bound.rank]
        self.inbound = Wire(bound, "inbound", "leave", "arrive", gradient_dtype(first))
        self.outbound = Wire(bound, "outbound", "arrive", "return", first.dtype)
        gradients = self.bind_gradients(home, owned)
        now = [bound.weights(owned), *(bound.states(owned, key) for key in ("exp_avg", "exp_avg_sq"))]
        steps = [_steps(bound, p) for p in owned]
        W, *states = next_ = [*like(now, bound.memory["stays"]), [step.clone() for step in steps]]
        self.now, self.next = [*itertools.chain(*now), *steps], [*itertools.chain(*next_)]
        self.lists = [W, [g.view(w.shape) for g, w in zip(gradients, W)], states]
        self.flags = _flags(bound.store, [p.matrix.param for p in owned])
        states, begun = [bound.store.state[p] for p in bound.store.params], bound.bucket.matrices
        without = [m.param for m in begun if m.at[0] == 0 and not states[m.param]["exp_avg"].numel()]
        self.without_rows = [states[i]["step"] for i in without], _flags(bound.store, without)
        stepped = {p.matrix: w for p, w in zip(owned, W)}
        W = [stepped[p.matrix] for p in self.outbound.leave]
        self.sent = [place.view(w.shape) for place, w in zip(self.outbound.leave.values(), W)], W
        W = bound.weights(self.outbound.arrive)
        self.answered = W, [place.view(w.shape) for place, w in zip(self.outbound.arrive.values(), W)]

    def bind_gradients(self, home, owned) -> list:
        """Return where those of this rank's chunks are, once `collect` has run."""
        sources, gradients = self.bound.sources(home), self.bound.store.gradients
        self.fill = Copy.of_gradients([self.inbound.leave[p] for p in home], sources, gradients)
        self.collect = Mean(self.inbound, self.bound.memory["mean"])
        return [self.collect.view(p) for p in owned]

    def compute(self, hp):
        self.collect()
        copy_torch(self.next, self.now)
        recipe.adamw_unless(self.flags, *self.lists, hp, self.bound.store.numbers)
        copy_torch(*self.sent)

    def land(self, _):
        copy_torch(self.now, self.next)
        recipe.count(*self.without_rows)
        copy_torch(*self.answered)


class OwnElementwise(ReduceElementwise):
    """The same on gradients that come reduced: nothing travels in."""

    def bind_gradients(self, home, owned) -> list:
        kept, gradients = self.bound.kept(self.inbound.dtype), self.bound.store.gradients
        self.fill = Copy.of_gradients([kept[p] for p in owned], self.bound.sources(owned), gradients)
        return [kept[p] for p in owned]

    def collect(self):
        pass


def _flags(store, numbers):
    """Those of so many parameters of AdamW, None if no one watches."""
    return None if store.flags is None else [store.flags[store.first[i]] for i in numbers]


def _steps(bound, piece):
    """AdamW's count of steps for a chunk; the chunks of a parameter that later buckets bring count along by
    themselves.
    """
    number = piece.matrix.param
    step = bound.store.state[bound.store.params[number]]["step"]
    return bound.store.twin(number, step) if piece.matrix.at[0] else step


ROUTES = {"local": Local, "exchange": Exchange, "own": Exchange, "reduce": Reduce,
          "reduce_elementwise": ReduceElementwise, "own_elementwise": OwnElementwise}


class Wire:
    """One direction of travel: flat send and receive buffers, and the view of each piece in them. `leave`: one piece
    for each place, of those that go to several ranks.
    """

    def __init__(self, bound, direction, send, recv, dtype=None):
        self.travel, self.crosses = getattr(bound.share, direction), getattr(bound.share, f"crosses_{direction}")
        self.group, self.dtype = bound.group, dtype or bound.options.wire_dtype
        self.send = bound.memory[send][:self.travel.leaving]
        self.recv = bound.memory[recv][:sum(self.travel.recv_bytes)]
        once = {at: p for p, at in self.travel.leave.items()}
        self.leave = {p: self._view(self.send, p, at) for at, p in once.items()}
        self.arrive = {p: self._view(self.recv, p, at) for p, at in self.travel.arrive.items()}
        self.parts = self._parts() if bound.share.copies and direction == "outbound" else None

    def _parts(self):
        """(What each peer sends, what each gets): some get the same memory."""
        sent = zip(self.travel.send_from, self.travel.send_bytes)
        return list(self.recv.split(self.travel.recv_bytes)), [self.send[at:at + size] for at, size in sent]

    def _view(self, flat, piece, at):
        return piece_at(flat, at, piece.shape, torch.float32 if piece.kind == "row" else self.dtype)

    def go(self) -> list:
        """Start the collective, unless the plan says that no rank sends anything; return what is in flight."""
        if not self.crosses:
            return []
        if self.parts:
            return [dist.all_to_all(*self.parts, group=self.group, async_op=True)]
        splits = list(self.travel.recv_bytes), list(self.travel.send_bytes)
        return [dist.all_to_all_single(self.recv, self.send, *splits, group=self.group, async_op=True)]

"""How a bucket is stepped: Local, Exchange, Reduce, Elementwise, ReduceElementwise. The only file whose collectives
carry buckets.

Each route binds its views and launches once, and tells its story in `run`, a generator that yields a collective in
flight and goes on once that has finished; what lies between two collectives is a part that CUDA graphs replay
(graphs.py). No formula stands here (recipe.py), and no choice of owner or order (plan.py).
"""
from __future__ import annotations

import torch
import torch.distributed as dist

from . import debug, recipe
from .graphs import capturing
from .kernels.pack import Copy, Pack, copy_torch
from .kernels.update import Update
from .mean import Mean
from .share import parted
from .store import gradient_dtype, piece_at


class Local:
    """The whole matrix is at home: nothing travels."""
    travels, rehearsed = False, ("step",)  # the parts that touch gradients, weights and state by launches only

    def __init__(self, bound):
        self.bound, home = bound, bound.pieces("home")
        self.stacks, self.rows, whole = bound.stacks()
        V, updates = bound.states(bound.pieces("home", "row"), "second_moment"), [whole[p] for p in home]
        skip, rows = bound.store.skip(home), bound.pieces("home", "row")
        self.pack = Pack(bound.states(home, "momentum_buffer"), updates, bound.sources(home), bound.store.gradients,
                         skip)
        self.fetch_rows = Copy([whole[p] for p in rows], V)
        self.keep_rows = Copy(V, [whole[p] for p in rows], bound.store.skip(rows))
        self.update = Update(bound.weights(home), updates, bound.scales(home), skip)

    def run(self, hp):
        self.bound.replay(self.step, hp)
        return
        yield  # a story like the others, without a collective

    def step(self, hp):
        recipe.momentum(self.pack, self.bound.gradients(), self.bound.store.numbers, hp)
        self.fetch_rows()
        self.bound.orthogonalize(self.stacks, hp)
        recipe.normalize(self.stacks, self.rows, hp)
        self.keep_rows()
        recipe.apply(self.update, self.bound.store.numbers)


class Journey:
    """There and back: what travels in, what is done with it, what travels out."""
    travels, rehearsed = True, ("leave", "compute", "land")

    def run(self, hp):
        self.bound.replay(self.leave, hp)
        yield from self.inbound.go()
        self.bound.replay(self.compute, hp)
        yield from self.outbound.go()
        self.bound.replay(self.land, hp)


class Exchange(Journey):
    """Shards -> owner -> shards. FSDP2, HSDP, TP x FSDP and DDP differ in their pieces only. State stays at home."""

    def __init__(self, bound):
        self.bound, home, rows = bound, bound.pieces("home"), bound.pieces("home", "row")
        self.stacks, self.rows, whole = bound.stacks()
        self.inbound = Wire(bound, "inbound", "leave", "arrive")
        self.outbound = Wire(bound, "outbound", "arrive", "return")
        # Where home and owner are one rank, the update is written into and read from the matrix itself. A replica whose
        # copy is not sent updates its momentum all the same; its update is written where the answer will arrive.
        back = {**self.outbound.arrive, **{p: whole[p] for p in (*home, *rows) if p in whole}}
        sent = {**back, **self.inbound.leave}
        V, sent_rows = bound.states(rows, "second_moment"), [p for p in rows if p.fed]
        self.pack, self.pack_here = (
            Pack(bound.states(some, "momentum_buffer"), [sent[p] for p in some], bound.sources(some),
                 bound.store.gradients, bound.store.skip(some)) for some in parted(home, self.inbound.leave))
        self.send_rows = Copy([sent[p] for p in sent_rows], bound.states(sent_rows, "second_moment"))
        self.assemble = Copy([whole[p] for p in self.inbound.arrive], list(self.inbound.arrive.values()))
        self.dismantle = Copy(list(self.outbound.leave.values()), [whole[p] for p in self.outbound.leave])
        self.keep_rows = Copy(V, [back[p] for p in rows], bound.store.skip(rows))
        self.update_here, self.update = _updates(bound, whole, back)

    def leave(self, hp):
        recipe.momentum(self.pack, self.bound.gradients(), self.bound.store.numbers, hp)
        self.send_rows()

    def compute(self, hp):
        recipe.momentum(self.pack_here, self.bound.gradients(), self.bound.store.numbers, hp)
        self.assemble()
        self.bound.orthogonalize(self.stacks, hp)
        recipe.normalize(self.stacks, self.rows, hp)
        self.dismantle()
        recipe.apply(self.update_here, self.bound.store.numbers)

    def land(self, hp):
        recipe.apply(self.update, self.bound.store.numbers)
        self.keep_rows()


def _updates(bound, whole, back):  # of what is computed here, before the next bucket is; and of what is answered
    return (Update(bound.weights(some), [back[p] for p in some], bound.scales(some), bound.store.skip(some))
            for some in parted(bound.pieces("home"), whole))


class Reduce(Journey):
    """Unreduced gradients -> owner, updates -> everybody: DDP without its all-reduce. State lives at the owner."""

    def __init__(self, bound):
        self.bound, home, rows = bound, bound.pieces("home"), bound.pieces("owned", "row")
        owned = [p for p in home if p.owner == bound.rank]
        self.stacks, self.rows, whole = bound.stacks()
        self.inbound = Wire(bound, "inbound", "leave", "arrive")
        self.outbound = Wire(bound, "outbound", "arrive", "return")
        self.fill = Copy.of_gradients([self.inbound.leave[p] for p in home], bound.sources(home), bound.store.gradients)
        self.mean = Mean(self.inbound, bound.memory["mean"])
        self.pack = Pack(bound.states(owned, "momentum_buffer"), [whole[p] for p in owned],
                         [self.mean.source(p) for p in owned], [self.mean.out], bound.store.skip(owned))
        self.fetch_rows = Copy([whole[p] for p in rows], bound.states(rows, "second_moment"))
        self.keep_rows = Copy(bound.states(rows, "second_moment"), [whole[p] for p in rows], bound.store.skip(rows))
        self.dismantle = Copy(list(self.outbound.leave.values()), [whole[p] for p in self.outbound.leave])
        self.update_here, self.update = _updates(bound, whole, {**self.outbound.arrive, **{p: whole[p] for p in owned}})

    def leave(self, _):
        self.fill(*self.bound.gradients())

    def compute(self, hp):
        recipe.momentum(self.pack, self.mean(), self.bound.store.numbers, hp)
        self.fetch_rows()
        self.bound.orthogonalize(self.stacks, hp)
        recipe.normalize(self.stacks, self.rows, hp)
        self.keep_rows()
        self.dismantle()
        recipe.apply(self.update_here, self.bound.store.numbers)

    def land(self, _):
        recipe.apply(self.update, self.bound.store.numbers)


class Elementwise:
    """AdamW: every element is stepped where it is stored."""
    travels, rehearsed = False, ()

    def __init__(self, store, graphs=None):
        """`graphs`: None launches every step anew; a graph holds the addresses of its gradients."""
        self.store, self.graphs, self.W = store, graphs, store.locals()
        self.states = [store.locals(key) for key in ("exp_avg", "exp_avg_sq", "step")]
        self.flags = _flags(store, range(len(self.W)))

    def run(self, hp):
        if self.graphs is None:
            self.step(hp)
        else:
            places = [g.data_ptr() for g in self.store.gradients]
            self.graphs(self.step, (*recipe.baked(hp, self.store.wide), places), hp)
        return
        yield  # a story like the others, without a collective

    def step(self, hp):
        _adamw(self.flags, self.W, self.store.gradients, self.states, hp, self.store.numbers)


class ReduceElementwise(Journey):
    """AdamW on unreduced gradients: every rank sums and steps its chunk of each parameter and returns the weights."""
    rehearsed = ("leave",)

    def __init__(self, bound):
        self.bound, home, first = bound, bound.pieces("home", "chunk"), bound.store.params[0]
        owned = [p for p in home if p.owner == bound.rank]
        self.inbound = Wire(bound, "inbound", "leave", "arrive", gradient_dtype(first))
        self.outbound = Wire(bound, "outbound", "arrive", "return", first.dtype)
        self.fill = Copy.of_gradients([self.inbound.leave[p] for p in home], bound.sources(home), bound.store.gradients)
        self.mean, W = Mean(self.inbound, bound.memory["mean"]), bound.weights(owned)
        self.lists = [W, [self.mean.view(p).view(w.shape) for p, w in zip(owned, W)],
                      [*(bound.states(owned, key) for key in ("exp_avg", "exp_avg_sq")),
                       [_steps(bound, p) for p in owned]]]
        self.flags = _flags(bound.store, [p.matrix.param for p in owned])
        begun = {p.matrix.param for p in home if p.matrix.at[0] == 0}
        states = [bound.store.state[p] for p in bound.store.params]
        without = sorted(i for i in begun if len(states[i]["exp_avg"]) == 0)
        self.without_rows = [states[i]["step"] for i in without], _flags(bound.store, without)
        self.sent = self._both_ends(self.outbound.leave)
        self.answered = self._both_ends(self.outbound.arrive)[::-1]

    def _both_ends(self, places):
        """(where weights lie on the wire, the weights), in the weights' shapes."""
        W = self.bound.weights(places)
        return [place.view(w.shape) for place, w in zip(places.values(), W)], W

    def leave(self, _):
        self.fill(*self.bound.gradients())

    def compute(self, hp):
        self.mean()
        _adamw(self.flags, *self.lists, hp, self.bound.store.numbers)
        recipe.count(*self.without_rows)
        copy_torch(*self.sent)

    def land(self, _):
        copy_torch(*self.answered)


def _flags(store, numbers):
    """Those of so many parameters of AdamW, None if no one watches."""
    return None if store.flags is None else [store.flags[store.first[i]] for i in numbers]


def _adamw(flags, *arguments):
    recipe.adamw(*arguments) if flags is None else recipe.adamw_unless(flags, *arguments)


def _steps(bound, piece):
    """AdamW's count of steps for a chunk; the chunks of a parameter that later buckets bring count along by
    themselves.
    """
    number = piece.matrix.param
    step = bound.store.state[bound.store.params[number]]["step"]
    return bound.store.twin(number, step) if piece.matrix.at[0] else step


ROUTES = {"local": Local, "exchange": Exchange, "reduce": Reduce, "reduce_elementwise": ReduceElementwise}


class Wire:
    """One direction of travel: flat send and receive buffers, and the view of each piece in them."""

    def __init__(self, bound, direction, send, recv, dtype=None):
        self.travel, self.crosses = getattr(bound.share, direction), getattr(bound.share, f"crosses_{direction}")
        self.group, self.dtype = bound.group, dtype or bound.options.wire_dtype
        self.send = bound.memory[send][:sum(self.travel.send_bytes)]
        self.recv = bound.memory[recv][:sum(self.travel.recv_bytes)]
        self.leave = {p: self._view(self.send, p, at) for p, at in self.travel.leave.items()}
        self.arrive = {p: self._view(self.recv, p, at) for p, at in self.travel.arrive.items()}

    def _view(self, flat, piece, at):
        return piece_at(flat, at, piece.shape, torch.float32 if piece.kind == "row" else self.dtype)

    def go(self):
        """Yield the collective, unless the plan says that no rank sends anything."""
        if self.crosses:
            splits = list(self.travel.recv_bytes), list(self.travel.send_bytes)
            yield dist.all_to_all_single(self.recv, self.send, *splits, group=self.group, async_op=True)


class Presence:
    """Puts back what the step changed of parameters that have no gradient.

    Where ranks must act alike, a missing gradient counts as zero unless no rank has one. After the step the ranks
    compare what they had, in one small collective, which only a rank that missed a gradient waits for. Of parameters
    whose matrices never travel, each rank leaves its own alone, and asks nobody.
    """

    flags = {}  # ranks -> (what this rank has, what any rank has), on the device, from a Feed

    def __init__(self, plans=(), stores=(), groups=None):
        self.members, self.groups, self.saved, self.works = {}, groups, {}, []
        self.device = stores[0].device if stores else torch.device("cpu")
        for plan, store in zip(plans, stores):
            for number, layout in enumerate(plan.layouts):
                ranks = layout.ranks if number in plan.shared and len(layout.boxes) > 1 else ()
                self.members.setdefault(ranks, []).append((store, number))

    def here(self) -> list[bool]:
        """Which gradients of the compared parameters are here, in the order of the flags."""
        return [store.here[number] for ranks, members in self.members.items() if ranks for store, number in members]

    def save(self) -> None:
        """Before the step: copy what may have to be put back."""
        if capturing(self.device):  # a graph cannot wait for what is outside of it; who captures has synchronized
            self.works = []
        self.wait()
        self.saved = {(ranks, i): [t.clone() for t in store.all_of(number)]
                      for ranks, members in self.members.items()
                      for i, (store, number) in enumerate(members) if not store.here[number]}

    def compare(self) -> None:
        """Ask the other ranks, at the end of the step's work."""
        with debug.during("the comparison of missing gradients"):
            self.works = [
                dist.all_reduce(anybody.copy_(mine), dist.ReduceOp.MAX, group=self.groups.of(ranks), async_op=True)
                for ranks, (mine, anybody) in self.flags.items()]
        if capturing(self.device):  # nothing outside a graph may wait for what is in it
            self.wait()

    def settle(self) -> None:
        """After the step: put back."""
        if self.saved:
            self.wait()
        for (ranks, i), before in self.saved.items():
            store, number = self.members[ranks][i]
            for now, then in zip(store.all_of(number), before):
                now.copy_(torch.where((self.flags[ranks][1][i] > 0).to(now.device), now, then) if ranks else then)

    def wait(self) -> None:
        """Until the last step's collective is done: then its memory may be used again."""
        works, self.works = self.works, []
        with debug.during("the comparison of missing gradients"):
            for work in works:
                work.wait()

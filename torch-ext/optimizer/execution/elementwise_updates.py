"""Bucket updates of groups with use_muon=False (AdamW, Lion, SGD, sign): parameters stepped element
by element, where they are stored or, with state at owners, in chunks of rows.

`BUCKET_UPDATES` maps routes of a plan to the classes of this module and of bucket_updates.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..communication.all_to_all import Mean
from ..kernels.elementwise.momentum import Copy, copy_torch
from ..kernels.elementwise.multi_tensor import NUMBERS
from ..kernels.metrics.sample import SampledSquares, Weights
from ..kernels.weights.split import join_into, split_into
from ..params.dtensor import gradient_dtype
from ..pipeline import BucketUpdate, Running
from ..planning.rank_plan import Piece
from ..rules import elementwise
from ..rules.rule import host_constants
from .bound_update import BucketInputs, Views
from .bucket_updates import LocalUpdate, OwnerUpdate, ShardedUpdate, UnreducedUpdate
from .cuda_graphs import Graphs
from .param_store import Store
from .workspace import views_like


class ElementwiseUpdate(BucketUpdate):
    """Parameters stepped element by element where stored: no buckets, no collectives."""

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
        self.splits = store.rest_of(0) is not None  # of all parameters, or of none
        keys = elementwise.state_keys_of(store.groups[0], store.params[0])
        self.states = [store.locals(key) for key in keys]
        self.flags = flags_of(store, range(len(self.weights)))
        # Parts of the parameters that are stepped at a time, each with its sums; None: no sums
        self.sums: list[tuple[slice, SampledSquares]] | None = None
        if store.collector is not None:
            rests = self.states[-1] if self.splits else ()
            average = elementwise.first_average(self.states)
            self.sums = store.collector.of_params(self.weights, rests, *average)

    def run(self, group: dict) -> Running:
        """Step all parameters."""
        if self.graphs is None:
            self.step(group)
        else:
            # torch's fused kernels take addresses of gradients from the host, not from device
            # memory as this package's kernels do: a graph is valid for these addresses only
            addresses = list(map(torch.Tensor.data_ptr, self.store.gradients))
            constants = host_constants(group, self.store.is_fp64)
            self.graphs(self.step, (*constants, addresses), group)
        return
        yield  # makes the function a generator, as the pipeline expects

    def step(self, group: dict) -> None:
        """Launch the kernels of the rule; flagged parameters keep weight and state."""
        store = self.store
        if self.sums is None:
            return elementwise.step_skipping_flagged(
                self.flags, self.weights, store.gradients, self.states, group, store.scalars
            )
        for some, add in self.sums:
            W, G = self.weights[some], store.gradients[some]
            states = [tensors[some] for tensors in self.states]
            flags = None if self.flags is None else self.flags[some]
            saved = add.save()
            elementwise.step_skipping_flagged(flags, W, G, states, group, store.scalars)
            add(saved)


class UnreducedElementwiseUpdate(OwnerUpdate):
    """An elementwise rule on unreduced gradients (DDP without its all-reduce): every rank owns a
    chunk of the rows of each parameter, averages the gradients of the chunk, and returns stepped
    weights.

    The owner steps copies of the weights and state of the chunk. The copies are written back in
    `apply`, after the return all-to-all: an error leaves the bucket entirely old. Copies of split
    weights are fp32 weights, and so are the weights sent: every rank keeps all rests.
    """

    def __init__(self, inputs: BucketInputs) -> None:
        super().__init__(inputs)
        store = self.store
        first = store.params[0]  # all parameters of the bucket have equal dtypes
        stored = self._stored("chunk")
        owned = [p for p in stored if p.owner == self.rank]
        self.splits = store.rest_of(0) is not None  # of all parameters, or of none
        self._bind_buffers(gradient_dtype(first), torch.float32 if self.splits else first.dtype)
        gradients = self._bind_gradients(stored, owned)
        self.rule = elementwise.elementwise_of(store.groups[0])  # of all groups of the bucket
        # Averages are in 8 bits in all groups of the bucket, or in none
        keys = elementwise.averages_of(store.groups[store.group_of[0]], first)
        weights, held = store.weights(owned), [store.states(owned, key) for key in keys]
        wide = [torch.empty(w.shape, dtype=torch.float32, device="meta") for w in weights]
        # Each chunk has a step count of its own: torch's kernel advances one count for each tensor
        steps = [[_steps(store, p) for p in owned]] if self.rule.counts else []
        like = [wide if self.splits else weights, *held]
        copies = [*views_like(like, self.memory["until_apply"])]
        copies += [[step.clone() for step in some] for some in steps]
        W, *states = copies
        self.halves = self._halves(W, owned) if self.splits else []
        # Sums of owned chunks: from weights, their copies, and copies of the first average
        self.sums: SampledSquares | None = None
        if store.collector is not None and owned:
            old = Weights(weights, [rest for _, _, rest in self.halves])
            self.sums = store.collector.of_chunks(
                owned, old, Weights(W), *elementwise.first_average(states[: len(keys)])
            )
        # The owner's weights (unless split), state and step counts, to be replaced by `stepped`
        self.current = [*itertools.chain(*([] if self.splits else [weights]), *held, *steps)]
        self.stepped = [*itertools.chain(*(states if self.splits else copies))]  # of `current`
        means = [g.view(w.shape) for g, w in zip(gradients, W)]
        self.by_group = self._bind_groups(owned, [W, means, *states])
        self.without_rows = self._bind_counts(keys[0])
        self.halves_received: list[tuple] = []  # as `halves`, of other owners
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

    def _bind_groups(self, owned: list[Piece], lists: list[list[torch.Tensor]]) -> list[tuple]:
        """Return arguments of `step_skipping_flagged` for each parameter group with owned chunks:
        torch's kernels take one lr. `lists`: weights, gradients and states of `owned`.
        """
        found = []
        groups = self._groups(owned)
        for number in sorted(set(groups)):
            chosen = [i for i, group in enumerate(groups) if group == number]
            W, G, *states = ([tensors[i] for i in chosen] for tensors in lists)
            flags = flags_of(self.store, [owned[i].matrix.param for i in chosen])
            scalars = self.store.scalars
            scalars = None if scalars is None else scalars[NUMBERS * number :]
            found.append((flags, W, G, states, self.store.groups[number], scalars))
        return found

    def _bind_counts(self, key: str) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """(step counts, flags) of parameters with the first chunk in the bucket and no rows owned
        by the rank. `key`: of the first average.

        The counts advance on the rank as well: state must be equal on every rank.
        """
        if not self.rule.counts:
            return [], None
        state = [self.store.state[p] for p in self.store.params]
        begun = [m.param for m in self.bucket.matrices if m.at[0] == 0]
        without = [n for n in begun if not state[n][key].numel()]
        return [state[number]["step"] for number in without], flags_of(self.store, without)

    def _bind_weights(self, owned: list[Piece], W: list[torch.Tensor]) -> None:
        """Bind copies of stepped weights `W` to the send buffer, and of received weights to
        parameters.
        """
        # A chunk is sent to every rank: pieces of one matrix differ in `stored_at` only
        stepped = {p.matrix: w for p, w in zip(owned, W)}
        W = [stepped[p.matrix] for p in self.to_shards.leave]
        self.sent = _views(self.to_shards.leave, W), W
        W = self.store.weights(self.to_shards.arrive)
        arrived = _views(self.to_shards.arrive, W)
        if self.splits:
            self.halves_received = self._halves(arrived, list(self.to_shards.arrive))
        self.received = ([], []) if self.splits else (W, arrived)

    def _halves(self, wide: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> list[tuple]:
        """(fp32 weights, bf16 weights, rests) of pieces of split weights."""
        rests = [self.store.rest_view(p) for p in pieces]
        return list(zip(wide, self.store.weights(pieces), rests))

    def run(self, group: dict) -> Running:
        """See `OwnerUpdate`; a bucket may hold parameters of several groups."""
        return super().run(group, tuple(self.store.host_constants()))

    def launches(self, group: dict) -> list[Callable[[], None]]:
        """`pack` only: torch's own kernels need no compilation beforehand."""
        return [partial(self.pack, ())]

    def pack(self, constants: tuple) -> None:
        """Copy gradients to the send buffer, in their own dtype."""
        self.fill(self.store.gradients, self.store.addresses)

    def orthogonalize(self, constants: tuple) -> None:
        """Step copies of own chunks, and copy the stepped weights to the send buffer. Named after
        the phase of `OwnerUpdate.run`; elementwise rules orthogonalize nothing.
        """
        self.collect()
        copy_torch(self.stepped, self.current)
        for halves in self.halves:
            join_into(*halves)
        # Rules read lr and betas from the live groups
        for arguments in self.by_group:
            elementwise.step_skipping_flagged(*arguments)
        copy_torch(*self.sent)

    def apply(self, constants: tuple) -> None:
        """Write weights, state and step counts."""
        if self.sums is not None:
            self.sums(self.sums.save())
        copy_torch(self.current, self.stepped)
        elementwise.count_steps(*self.without_rows)
        copy_torch(*self.received)
        for halves in (*self.halves, *self.halves_received):
            split_into(*halves)


class OwnerStateElementwiseUpdate(UnreducedElementwiseUpdate):
    """An elementwise rule with shard_state: gradients are already reduced, so nothing is sent to
    owners.
    """

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


def flags_of(store: Store, numbers: Sequence[int]) -> list[torch.Tensor] | None:
    """Non-finite flags of parameters, by index; None if gradients are not checked."""
    if store.flags is None:
        return None
    return [store.flags[store.flag_offset[i]] for i in numbers]


def _steps(store: Store, piece: Piece) -> torch.Tensor:
    """AdamW's step count for a chunk: for the first chunk of a parameter the count in the state,
    for later chunks a copy, because torch's kernel advances the count of every tensor that it
    steps.
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
    "reduce_elementwise": UnreducedElementwiseUpdate,
    "own_elementwise": OwnerStateElementwiseUpdate,
}

"""What one bucket has at this rank: its share of the plan, the tensors of its pieces, its process group and its memory.

Decides how memory is lent to buckets, and whether momentum moves before the weight. Must not know: how a route goes.
"""
from __future__ import annotations

from collections import defaultdict

import torch

from . import recipe
from .freight import ALIGNMENT
from .kernels import capturing


class Workspace:
    """Flat memory that buckets use in turn: a buffer for each slot and one for the bench, as large as any wants."""

    def __init__(self, slots, device):
        self.slots, self.device, self.sizes, self.buffers = slots, device, defaultdict(int), {}

    def reserve(self, number, share) -> None:
        """For bucket `number`. All buckets reserve before the first takes its part."""
        for memory, nbytes in share.places()[1].items():
            key = self._key(number, memory)
            self.sizes[key] = max(self.sizes[key], nbytes)

    def take(self, number, share) -> dict:
        """use -> flat uint8 tensor of the bytes that the share needs, at its place."""
        lent = {}
        for use, (memory, at) in share.places()[0].items():
            key = self._key(number, memory)
            if key not in self.buffers:
                self.buffers[key] = torch.empty(self.sizes[key], dtype=torch.uint8, device=self.device)
            lent[use] = self.buffers[key][at:at + share.needs[use]]
        return lent

    def _key(self, number, memory):
        return number % self.slots if memory == "slot" else memory


class Bound:
    """One bucket at this rank: its share of the plan, the tensors of its pieces, its process group and its memory."""

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
        """Whether momentum moves where it is read first, not along with the weight, which reads it a second time: where
        both go into one graph, no error of the host can come in between.
        """
        return capturing(self.store.device) if self.bucket.route == "local" else self.graphs.within

    def momentum(self, pack, hp, gradients=None):
        """`recipe.momentum` of a Pack; `gradients`: (tensors, addresses), None for this step's."""
        recipe.momentum(pack, gradients or self.gradients(), self.store.numbers, hp, self.moves_first)

    def apply(self, update, gradients=None, packed=True):
        """`recipe.apply` of an Update; `packed`: its momenta went through `momentum` before."""
        moves = not (packed and self.moves_first)
        recipe.apply(update, self.store.numbers, gradients or self.gradients(), moves)

    def kept(self, dtype=None):
        """{piece stored and computed here: where its update, or its gradient, stays until the bucket lands}."""
        dtype, memory = dtype or self.options.wire_dtype, self.memory["kept"]
        return {p: piece_at(memory, at, p.shape, dtype) for p, at in self.share.kept.items()}

    def momenta(self, pieces):
        """(M of each piece, where its gradient lies, this step's gradients); nothing of pieces that others keep."""
        if self.bucket.route == "own" and any(p.owner != self.rank for p in pieces):
            return ()
        return self.states(pieces, "momentum_buffer"), self.sources(pieces), self.store.gradients

    def gradients(self):
        return self.store.gradients, self.store.addresses

    def replay(self, part, hp):
        """Do part(hp), by a CUDA graph where it can be. What else it reads of this step lies on the device."""
        self.graphs(part, recipe.baked(hp, self.store.wide), hp)

    def scales(self, pieces):
        return [recipe.scale_of(p.matrix, self.hp["adjust_lr_fn"]) for p in pieces]

    def orthogonalize(self, stacks, hp):
        """The iteration of Stacks, in memory that is this bucket's while it is computed."""
        memory = [self.memory[use] for use in ("now", "next", "square")]
        recipe.orthogonalize(stacks.read, hp, self.options.ns_dtype, memory, stacks.written)


def piece_at(flat, offset, shape, dtype):
    """The (rows, cols) view of a flat uint8 buffer that begins at a byte offset."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    return flat[offset:offset + nbytes].view(dtype).view(shape)


def like(lists, flat):
    """Lists of contiguous tensors like those of `lists`, each list one after another in a flat uint8 buffer."""
    found, at = [], 0
    for tensors in lists:
        at += -at % ALIGNMENT
        found.append([])
        for t in tensors:
            found[-1].append(flat[at:at + t.nbytes].view(t.dtype).view(t.shape))
            at += t.nbytes
    return found

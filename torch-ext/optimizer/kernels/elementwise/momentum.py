"""Momentum, Nesterov and cast into the send buffer; copies of many tensors in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backend import use_triton
from ..launch.jit import jit
from .multi_tensor import Skip, Source, bind, elements, fresh, locate, moving, run, skips_of

tl = None  # Triton's language, put here by jit


class Pack:
    """M <- mu M + (1 - mu) G, and U <- (1 - mu) G + mu M (Nesterov) or M, over lists of rectangles."""

    def __init__(
        self,
        M: Sequence[torch.Tensor],
        U: Sequence[torch.Tensor],
        sources: Sequence[Source],
        gradients: Sequence[torch.Tensor],
        skip: Skip | None = None,
    ):
        """Bind momenta and updates, 2-D views of equal shapes that stay in place, and where their
        gradients lie.

        What `skip` names keeps M, and U gets M: what is computed from it stays finite.

        M, U and the gradients may each be fp32, bf16 or fp16; `gradients` are examples of what
        every call brings.
        """
        self.M, self.U, self.sources = list(M), list(U), list(sources)
        self.launches = (
            bind((self.M, self.U), sources, gradients) if M and use_triton(M[0].device) else None
        )
        self.skip, self.skips = skip, skips_of(skip, self.launches)

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        addresses: torch.Tensor | None,
        weight: torch.Tensor,
        nesterov: bool,
        update_momentum: bool = True,
    ):
        """Take this step's gradients, and their addresses as an int64 tensor on the device (None
        without Triton).

        `weight`: 1 - mu, one fp32 element on the device. M and U change in place, the gradients do
        not; without `update_momentum` M does not either, until `Update` moves it along with the weight. U
        gets the fp32 result, rounded once to its dtype.
        """
        if self.launches is None:
            gradients = moved(tensors, self.sources, self.M, self.skip)
            return pack_torch(self.M, self.U, gradients, weight, nesterov, update_momentum)
        for launch, (flags, places, skips) in zip(self.launches, self.skips):
            run(
                _pack_kernel,
                launch,
                addresses,
                weight,
                flags,
                places,
                int(update_momentum),
                NESTEROV=nesterov,
                SKIPS=skips,
            )


def moved(tensors, sources, M, skip):
    """The gradients; where M is to stay, M in the gradient's place: M + (1 - mu) (M - M) is M."""
    gradients = [s.view(tensors, m.shape) for s, m in zip(sources, M)]
    if skip is None:
        return gradients
    return [torch.where(skip.is_updated(i), g, m) for i, (g, m) in enumerate(zip(gradients, M))]


def pack_torch(M, U, G, weight, nesterov, update_momentum=True):
    """Compute `Pack` rectangle by rectangle, in the form x + (1 - mu)(g - x), as torch's lerp does."""
    for m, u, g in zip(M, U, G):
        new = nearer(m, g, weight)
        if update_momentum:
            m.copy_(new)
        u.copy_(nearer(new, g, weight) if nesterov else new)


def nearer(m, g, weight):
    """m + (1 - mu)(g - m) in fp32."""
    wide = m.float()
    return torch.sub(g.float(), wide).mul_(weight).add_(wide)


@jit.unspecialized("update_momentum")
def _pack_kernel(
    records,
    blocks,
    addresses,
    weight,
    flags,
    places,
    update_momentum,
    NESTEROV: tl.constexpr,
    SKIPS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    TYPE_0: tl.constexpr,
    TYPE_1: tl.constexpr,
    TYPE_2: tl.constexpr,
):
    """Lists: M, U, G."""
    record, row, column, inside = locate(records, blocks, FIELDS, BLOCK, ALIGNED)
    m_at = elements(record, row, column, 0, TYPE_0, 0, ALIGNED)
    u_at = elements(record, row, column, 1, TYPE_1, 0, ALIGNED)
    g_at = elements(record, row, column, 2, TYPE_2, fresh(record, addresses, FIELDS), ALIGNED)
    g = tl.load(g_at, mask=inside).to(tl.float32)
    m = tl.load(m_at, mask=inside).to(tl.float32)
    if SKIPS:
        g = tl.where(moving(inside, blocks, flags, places), g, m)
    share = tl.load(weight)
    m += share * (g - m)
    tl.store(m_at, m.to(TYPE_0), mask=tl.where(update_momentum != 0, inside, False))
    if NESTEROV:
        m += share * (g - m)
    tl.store(u_at, m.to(TYPE_1), mask=inside)


class Copy:
    """to <- what, with a cast (to the nearest, ties to even), over lists of rectangles."""

    def __init__(
        self, to: Sequence[torch.Tensor], what: Sequence[torch.Tensor], skip: Skip | None = None
    ):
        """Bind both ends, 2-D views of equal shapes that stay in place; what `skip` names is not
        copied.
        """
        self.to, self.what, self.sources = list(to), list(what), None
        self.launches = bind((self.to, self.what)) if to and use_triton(to[0].device) else None
        self.skip, self.skips = skip, skips_of(skip, self.launches)

    @classmethod
    def of_gradients(
        cls,
        to: Sequence[torch.Tensor],
        sources: Sequence[Source],
        gradients: Sequence[torch.Tensor],
    ):
        """Bind the one end, and where in fresh gradients the other end lies; the call takes tensors
        and addresses.
        """
        copy = cls((), ())
        copy.to, copy.sources = list(to), list(sources)
        copy.launches = (
            bind((copy.to,), sources, gradients) if to and use_triton(to[0].device) else None
        )
        copy.skips = skips_of(None, copy.launches)
        return copy

    def __call__(self, tensors: Sequence[torch.Tensor] = (), addresses: torch.Tensor | None = None):
        """Copy; with fresh gradients, take them and their addresses as `Pack` does."""
        if self.launches is None:
            views = (s.view(tensors, t.shape) for s, t in zip(self.sources or (), self.to))
            return copy_torch(
                self.to, list(views) if self.sources is not None else self.what, self.skip
            )
        for launch, (flags, places, skips) in zip(self.launches, self.skips):
            run(
                _copy_kernel,
                launch,
                addresses,
                flags,
                places,
                FRESH=self.sources is not None,
                SKIPS=skips,
            )


def copy_torch(to, what, skip=None):
    """Compute `Copy`."""
    if skip is not None:
        what = [torch.where(skip.is_updated(i), w, t) for i, (w, t) in enumerate(zip(what, to))]
    if to:
        torch._foreach_copy_(to, what)


@jit
def _copy_kernel(
    records,
    blocks,
    addresses,
    flags,
    places,
    FRESH: tl.constexpr,
    SKIPS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    TYPE_0: tl.constexpr,
    TYPE_1: tl.constexpr,
):
    """Lists: to, what."""
    record, row, column, inside = locate(records, blocks, FIELDS, BLOCK, ALIGNED)
    if SKIPS:
        inside = moving(inside, blocks, flags, places)
    base = fresh(record, addresses, FIELDS) if FRESH else 0
    value = tl.load(elements(record, row, column, 1, TYPE_1, base, ALIGNED), mask=inside)
    tl.store(
        elements(record, row, column, 0, TYPE_0, 0, ALIGNED),
        value.to(tl.float32).to(TYPE_0),
        mask=inside,
    )

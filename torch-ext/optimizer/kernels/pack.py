"""Momentum, Nesterov and cast, and plain copies: many rectangles in one launch, written straight where they are sent.

Decides: the arithmetic of the momentum, in fp32, every product and sum rounded on its own, so that an element's bits do
not depend on how its matrix is cut. Must not know: what the memory is for.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

from . import jit, use_triton
from .table import Source, bind, elements, fresh, locate, run

tl = None  # Triton's language, put here by jit


class Pack:
    """M <- mu M + (1 - mu) G, and U <- (1 - mu) G + mu M (Nesterov) or M, over lists of rectangles."""

    def __init__(self, M: Sequence[torch.Tensor], U: Sequence[torch.Tensor], sources: Sequence[Source],
                 gradients: Sequence[torch.Tensor]):
        """Bind momenta and updates, 2-D views of equal shapes that stay in place, and where their gradients lie.

        M, U and the gradients may each be fp32, bf16 or fp16; `gradients` are examples of what every call brings.
        """
        self.M, self.U, self.sources = list(M), list(U), list(sources)
        self.launches = bind((self.M, self.U), sources, gradients) if M and use_triton(M[0].device) else None

    def __call__(self, tensors: Sequence[torch.Tensor], addresses: torch.Tensor | None,
                 weight: torch.Tensor, nesterov: bool):
        """Take this step's gradients, and their addresses as an int64 tensor on the device (None without Triton).

        `weight`: 1 - mu, one fp32 element on the device. M and U change in place, the gradients do not. U gets the fp32
        result, rounded once to its dtype.
        """
        if self.launches is None:
            gradients = [s.view(tensors, m.shape) for s, m in zip(self.sources, self.M)]
            return pack_torch(self.M, self.U, gradients, weight, nesterov)
        for launch in self.launches:
            run(_pack_kernel, launch, addresses, weight, NESTEROV=nesterov)


def pack_torch(M, U, G, weight, nesterov):
    """Compute `Pack` rectangle by rectangle, in the form x + (1 - mu)(g - x), as torch's lerp does."""
    for m, u, g in zip(M, U, G):
        g, wide = g.float(), m.float()
        wide.add_(torch.sub(g, wide).mul_(weight))
        if wide is not m:
            m.copy_(wide)
        u.copy_(torch.sub(g, wide).mul_(weight).add_(wide) if nesterov else wide)


@jit
def _pack_kernel(records, blocks, addresses, weight, NESTEROV: tl.constexpr, FIELDS: tl.constexpr,
                 BLOCK: tl.constexpr, ALIGNED: tl.constexpr, TYPE_0: tl.constexpr, TYPE_1: tl.constexpr,
                 TYPE_2: tl.constexpr):
    """Lists: M, U, G."""
    record, row, column, inside = locate(records, blocks, FIELDS, BLOCK, ALIGNED)
    m_at = elements(record, row, column, 0, TYPE_0, 0, ALIGNED)
    u_at = elements(record, row, column, 1, TYPE_1, 0, ALIGNED)
    g_at = elements(record, row, column, 2, TYPE_2, fresh(record, addresses, FIELDS), ALIGNED)
    g = tl.load(g_at, mask=inside).to(tl.float32)
    m = tl.load(m_at, mask=inside).to(tl.float32)
    share = tl.load(weight)
    m += share * (g - m)
    tl.store(m_at, m.to(TYPE_0), mask=inside)
    if NESTEROV:
        m += share * (g - m)
    tl.store(u_at, m.to(TYPE_1), mask=inside)


class Copy:
    """to <- what, with a cast (to the nearest, ties to even), over lists of rectangles."""

    def __init__(self, to: Sequence[torch.Tensor], what: Sequence[torch.Tensor]):
        """Bind both ends, 2-D views of equal shapes that stay in place."""
        self.to, self.what, self.sources = list(to), list(what), None
        self.launches = bind((self.to, self.what)) if to and use_triton(to[0].device) else None

    @classmethod
    def of_gradients(cls, to: Sequence[torch.Tensor], sources: Sequence[Source], gradients: Sequence[torch.Tensor]):
        """Bind the one end, and where in fresh gradients the other end lies; the call takes tensors and addresses."""
        copy = cls((), ())
        copy.to, copy.sources = list(to), list(sources)
        copy.launches = bind((copy.to,), sources, gradients) if to and use_triton(to[0].device) else None
        return copy

    def __call__(self, tensors: Sequence[torch.Tensor] = (), addresses: torch.Tensor | None = None):
        """Copy; with fresh gradients, take them and their addresses as `Pack` does."""
        if self.launches is None:
            views = (s.view(tensors, t.shape) for s, t in zip(self.sources or (), self.to))
            return copy_torch(self.to, list(views) if self.sources is not None else self.what)
        for launch in self.launches:
            run(_copy_kernel, launch, addresses, FRESH=self.sources is not None)


def copy_torch(to, what):
    """Compute `Copy`."""
    if to:
        torch._foreach_copy_(to, what)


@jit
def _copy_kernel(records, blocks, addresses, FRESH: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
                 ALIGNED: tl.constexpr, TYPE_0: tl.constexpr, TYPE_1: tl.constexpr):
    """Lists: to, what."""
    record, row, column, inside = locate(records, blocks, FIELDS, BLOCK, ALIGNED)
    base = fresh(record, addresses, FIELDS) if FRESH else 0
    value = tl.load(elements(record, row, column, 1, TYPE_1, base, ALIGNED), mask=inside)
    tl.store(elements(record, row, column, 0, TYPE_0, 0, ALIGNED), value.to(tl.float32).to(TYPE_0), mask=inside)

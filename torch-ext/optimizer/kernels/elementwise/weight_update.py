"""Weight decay and update of many tensors in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backend import use_triton
from ..launch.jit import jit
from .momentum import moved, nearer
from .multi_tensor import Skip, Source, bind, elements, fresh, locate, moving, run, skips_of

tl = None  # Triton's language, put here by jit


class Update:
    """W <- (1 - lr weight_decay) W - (lr scale) U, over lists of rectangles; with momenta, M <- mu
    M + (1 - mu) G.
    """

    def __init__(
        self,
        W: Sequence[torch.Tensor],
        U: Sequence[torch.Tensor],
        scales: Sequence[float],
        skip: Skip | None = None,
        M: Sequence[torch.Tensor] | None = None,
        sources: Sequence[Source] = (),
        gradients: Sequence[torch.Tensor] = (),
    ):
        """Bind weights and updates, 2-D views of equal shapes that stay in place, and the scale of
        every rectangle; with momenta M of these shapes, where their gradients lie, as in `Pack`.

        W, U, M and the gradients may each be fp32, bf16 or fp16. What `skip` names keeps W and M.
        """
        self.W, self.U, self.M, self.sources = list(W), list(U), M, sources
        self.scales = torch.tensor(
            list(scales), dtype=torch.float32, device=W[0].device if W else None
        )
        self.launches = None
        if W and use_triton(W[0].device):
            self.launches = bind((W, U)) if M is None else bind((W, U, M), sources, gradients)
        self.skip, self.skips = skip, skips_of(skip, self.launches)
        self.scales_of = [
            self.scales[launch.origins.to(self.scales.device)] for launch in self.launches or ()
        ]

    def __call__(
        self,
        factors: torch.Tensor,
        tensors: Sequence[torch.Tensor] = (),
        addresses: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        update_momentum: bool = True,
    ):
        """Change W in place; the fp32 result is rounded once to its dtype.

        `factors`: lr and 1 - lr weight_decay, two fp32 elements on the device. With momenta: this
        step's gradients, their addresses and 1 - mu, as `Pack` takes them; without `update_momentum` M stays,
        for `Pack` has moved it.
        """
        if not self.W:
            return
        if self.launches is None:
            if self.M is not None and update_momentum:
                for m, g in zip(self.M, moved(tensors, self.sources, self.M, self.skip)):
                    m.copy_(nearer(m, g, weight))
            return update_torch(self.W, self.U, self.scales, *factors, self.skip)
        for launch, scales, (flags, places, skips) in zip(
            self.launches, self.scales_of, self.skips
        ):
            run(
                _update_kernel,
                launch,
                scales,
                factors,
                addresses,
                weight,
                flags,
                places,
                int(update_momentum),
                MOMENTA=self.M is not None,
                SKIPS=skips,
            )


def update_torch(W, U, scales, lr, keep, skip=None):
    """Compute the weights of `Update` rectangle by rectangle."""
    for i, (w, u, factor) in enumerate(zip(W, U, scales * lr)):
        new = w.float().mul(keep).sub_(u.float().mul(factor))
        w.copy_(new if skip is None else torch.where(skip.is_updated(i), new, w.float()))


@jit.unspecialized("update_momentum")
def _update_kernel(
    records,
    blocks,
    scales,
    factors,
    addresses,
    weight,
    flags,
    places,
    update_momentum,
    MOMENTA: tl.constexpr,
    SKIPS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    TYPE_0: tl.constexpr,
    TYPE_1: tl.constexpr,
    TYPE_2: tl.constexpr = None,
    TYPE_3: tl.constexpr = None,
):
    """Lists: W, U; with MOMENTA also M, G, where M changes if it `update_momentum`."""
    record, row, column, inside = locate(records, blocks, FIELDS, BLOCK, ALIGNED)
    factor = tl.load(scales + tl.load(blocks + tl.program_id(0).to(tl.int64) * 2)) * tl.load(
        factors
    )
    if SKIPS:
        inside = moving(inside, blocks, flags, places)
    w_at = elements(record, row, column, 0, TYPE_0, 0, ALIGNED)
    w = tl.load(w_at, mask=inside).to(tl.float32)
    u = tl.load(elements(record, row, column, 1, TYPE_1, 0, ALIGNED), mask=inside).to(tl.float32)
    if MOMENTA:
        moved = tl.where(update_momentum != 0, inside, False)
        m_at = elements(record, row, column, 2, TYPE_2, 0, ALIGNED)
        g_at = elements(record, row, column, 3, TYPE_3, fresh(record, addresses, FIELDS), ALIGNED)
        m = tl.load(m_at, mask=moved).to(tl.float32)
        m += tl.load(weight) * (tl.load(g_at, mask=moved).to(tl.float32) - m)
        tl.store(m_at, m.to(TYPE_2), mask=moved)
    tl.store(w_at, (w * tl.load(factors + 1) - u * factor).to(TYPE_0), mask=inside)

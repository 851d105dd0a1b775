"""Weight decay and the scaled update: many rectangles in one launch, read straight from where they arrive.

Decides: the arithmetic, in fp32, every product and sum rounded on its own, so that an element's bits do not depend on
how its matrix is cut. Must not know: where the update comes from.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

from . import jit, use_triton
from .table import Skip, bind, elements, locate, moving, run, skips_of

tl = None  # Triton's language, put here by jit


class Update:
    """W <- (1 - lr weight_decay) W - (lr scale) U, over lists of rectangles."""

    def __init__(self, W: Sequence[torch.Tensor], U: Sequence[torch.Tensor], scales: Sequence[float],
                 skip: Skip | None = None):
        """Bind weights and updates, 2-D views of equal shapes that stay in place, and the scale of every rectangle.

        W and U may each be fp32, bf16 or fp16. What `skip` names keeps W.
        """
        self.W, self.U = list(W), list(U)
        self.scales = torch.tensor(list(scales), dtype=torch.float32, device=W[0].device if W else None)
        self.launches = bind((self.W, self.U)) if W and use_triton(W[0].device) else None
        self.skip, self.skips = skip, skips_of(skip, self.launches)
        self.scales_of = [self.scales[launch.origins.to(self.scales.device)] for launch in self.launches or ()]

    def __call__(self, factors: torch.Tensor):
        """Change W in place; the fp32 result is rounded once to its dtype.

        `factors`: lr and 1 - lr weight_decay, two fp32 elements on the device.
        """
        if not self.W:
            return
        if self.launches is None:
            return update_torch(self.W, self.U, self.scales, *factors, self.skip)
        for launch, scales, (flags, places, skips) in zip(self.launches, self.scales_of, self.skips):
            run(_update_kernel, launch, scales, factors, flags, places, SKIPS=skips)


def update_torch(W, U, scales, lr, keep, skip=None):
    """Compute `Update` rectangle by rectangle."""
    for i, (w, u, factor) in enumerate(zip(W, U, scales * lr)):
        new = w.float().mul(keep).sub_(u.float().mul(factor))
        w.copy_(new if skip is None else torch.where(skip.moves(i), new, w.float()))


@jit
def _update_kernel(records, blocks, scales, factors, flags, places, SKIPS: tl.constexpr, FIELDS: tl.constexpr,
                   BLOCK: tl.constexpr, ALIGNED: tl.constexpr, TYPE_0: tl.constexpr, TYPE_1: tl.constexpr):
    """Lists: W, U."""
    record, row, column, inside = locate(records, blocks, FIELDS, BLOCK, ALIGNED)
    factor = tl.load(scales + tl.load(blocks + tl.program_id(0).to(tl.int64) * 2)) * tl.load(factors)
    if SKIPS:
        inside = moving(inside, blocks, flags, places)
    w_at = elements(record, row, column, 0, TYPE_0, 0, ALIGNED)
    w = tl.load(w_at, mask=inside).to(tl.float32)
    u = tl.load(elements(record, row, column, 1, TYPE_1, 0, ALIGNED), mask=inside).to(tl.float32)
    tl.store(w_at, (w * tl.load(factors + 1) - u * factor).to(TYPE_0), mask=inside)

"""Weight decay and weight update of many rectangles in one launch, with or without momentum."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backend import use_triton
from ..launch.jit import jit
from .momentum import gradients_or_momenta, lerp
from .multi_tensor import (
    Skip,
    Source,
    bind,
    element_pointers,
    gradient_address,
    locate,
    run,
    skips_of,
    unskipped,
)

tl = None  # Triton's language, put here by jit


class WeightUpdate:
    """Weight update of many rectangles: W <- (1 - lr weight_decay) W - (lr scale) O.

    With momenta bound, also M <- mu M + (1 - mu) G, as `Pack` with `update_momentum`. W: weight,
    O: orthogonalized update, M: momentum, G: gradient.
    """

    def __init__(
        self,
        W: Sequence[torch.Tensor],
        O: Sequence[torch.Tensor],
        scales: Sequence[float],
        skip: Skip | None = None,
        M: Sequence[torch.Tensor] | None = None,
        sources: Sequence[Source] = (),
        gradients: Sequence[torch.Tensor] = (),
    ):
        """Bind weights and O: lists of 2-D views with equal shapes, at fixed addresses.

        `scales`: factor on the learning rate of each rectangle. `M`: momenta of equal shapes, with
        `sources` and `gradients` as for `Pack`; None to leave momentum alone. W, O, M and the
        gradients may each be fp32, bf16 or fp16. Rectangles of `skip` keep W and M.
        """
        self.W = list(W)
        self.O = list(O)
        self.M = M
        self.sources = sources
        self.scales = torch.tensor(
            list(scales), dtype=torch.float32, device=W[0].device if W else None
        )
        self.launches = None
        if W and use_triton(W[0].device):
            self.launches = bind((W, O)) if M is None else bind((W, O, M), sources, gradients)
        self.skip = skip
        self.skips = skips_of(skip, self.launches)  # kernel arguments for each launch
        # Scale of each record, for each launch
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
    ) -> None:
        """Write W and, with momenta and `update_momentum`, M; in place, in fp32, rounded once.

        `factors`: lr and 1 - lr weight_decay, two fp32 elements on the device. `tensors`,
        `addresses`, `weight`: as for `Pack`, read with momenta only. Pass `update_momentum=False`
        if `Pack` has already written M in the current step.
        """
        if not self.W:
            return
        if self.launches is None:
            if self.M is not None and update_momentum:
                for m, g in zip(
                    self.M, gradients_or_momenta(tensors, self.sources, self.M, self.skip)
                ):
                    m.copy_(lerp(m, g, weight))
            return weight_update_torch(self.W, self.O, self.scales, *factors, self.skip)
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


def weight_update_torch(
    W: Sequence[torch.Tensor],
    O: Sequence[torch.Tensor],
    scales: torch.Tensor,
    lr: torch.Tensor,
    keep: torch.Tensor,
    skip: Skip | None = None,
) -> None:
    """Compute the weights of `WeightUpdate` in torch, by rectangle, with the bits of the kernel.

    `keep`: 1 - lr weight_decay.
    """
    for i, (w, o, factor) in enumerate(zip(W, O, scales * lr)):
        new = w.float().mul(keep).sub_(o.float().mul(factor))
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
    """Compute `WeightUpdate` for a block of elements. Lists of the table: W, O; with MOMENTA also
    M, G.

    `scales`: scale of each record. `update_momentum`: 0 leaves M alone. `flags`, `places`: see
    `unskipped`; read if SKIPS only.
    """
    record, row, column, inside = locate(records, blocks, FIELDS, BLOCK, ALIGNED)
    factor = tl.load(scales + tl.load(blocks + tl.program_id(0).to(tl.int64) * 2)) * tl.load(
        factors
    )
    if SKIPS:
        inside = unskipped(inside, blocks, flags, places)
    w_at = element_pointers(record, row, column, 0, TYPE_0, 0, ALIGNED)
    w = tl.load(w_at, mask=inside).to(tl.float32)
    o = tl.load(element_pointers(record, row, column, 1, TYPE_1, 0, ALIGNED), mask=inside).to(
        tl.float32
    )
    if MOMENTA:
        written = tl.where(update_momentum != 0, inside, False)
        m_at = element_pointers(record, row, column, 2, TYPE_2, 0, ALIGNED)
        g_at = element_pointers(
            record, row, column, 3, TYPE_3, gradient_address(record, addresses, FIELDS), ALIGNED
        )
        m = tl.load(m_at, mask=written).to(tl.float32)
        m += tl.load(weight) * (tl.load(g_at, mask=written).to(tl.float32) - m)
        tl.store(m_at, m.to(TYPE_2), mask=written)
    tl.store(w_at, (w * tl.load(factors + 1) - o * factor).to(TYPE_0), mask=inside)

"""Momentum and weight update of many rectangles by functions in plain torch, for rules without
fused kernels. Calls are those of `Pack` and `WeightUpdate`, with equal bits for Muon's formulas.

Rectangles are computed one at a time. Elementwise functions give an element equal bits in any
rectangle, so a matrix may be cut in any way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from .momentum import gradients_or_momenta
from .multi_tensor import Skip, Source

# (G, M, index of the group) -> (U, the new M)
Update = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
# (W, O, scale, numbers that the owner has sent, index of the group) -> the new W
Write = Callable[[torch.Tensor, torch.Tensor, float, Mapping[str, torch.Tensor], int], torch.Tensor]


class PackByRule:
    """`Pack` with `update` in place of Muon's momentum."""

    def __init__(
        self,
        update: Update,
        M: Sequence[torch.Tensor],
        U: Sequence[torch.Tensor],
        sources: Sequence[Source],
        gradients: Sequence[torch.Tensor],
        skip: Skip | None = None,
        groups: Sequence[int] | None = None,
    ) -> None:
        """Arguments of `Pack`, after `update`."""
        self.update = update
        self.M = list(M)
        self.U = list(U)
        self.sources = list(sources)
        self.skip = skip
        self.groups = list(groups or [0] * len(self.M))

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        addresses: torch.Tensor | None,
        weight: torch.Tensor,
        nesterov: bool,
        update_momentum: bool = True,
    ) -> None:
        """Write U and, with `update_momentum`, M, as `Pack`. `addresses`, `weight` and `nesterov`
        are not read: `update` knows its numbers.
        """
        write_updates(self, tensors, self.U if self.M else (), update_momentum)


def write_updates(
    of: PackByRule | WeightUpdateByRule,
    tensors: Sequence[torch.Tensor],
    U: Sequence[torch.Tensor],
    update_momentum: bool,
) -> None:
    """Write U, unless U is empty, and M of all rectangles of `of` from the gradients `tensors`."""
    gradients = gradients_or_momenta(tensors, of.sources, of.M, of.skip)
    for i, (m, g) in enumerate(zip(of.M, gradients)):
        wide = m.float()
        u, new = of.update(g.float(), wide, of.groups[i])
        if of.skip is not None:
            # The gradient of a skipped rectangle is M: finite, and U is not used
            new = torch.where(of.skip.is_updated(i), new, wide)
        if update_momentum:
            m.copy_(new)
        if U:
            U[i].copy_(u)


class WeightUpdateByRule:
    """`WeightUpdate` with `write` in place of Muon's weight update, and `update` of Muon's
    momentum.
    """

    def __init__(
        self,
        write: Write,
        update: Update,
        sent: Sequence[Mapping[str, torch.Tensor]],
        W: Sequence[torch.Tensor],
        O: Sequence[torch.Tensor],
        scales: Sequence[float],
        skip: Skip | None = None,
        M: Sequence[torch.Tensor] | None = None,
        sources: Sequence[Source] = (),
        gradients: Sequence[torch.Tensor] = (),
        groups: Sequence[int] | None = None,
    ) -> None:
        """Arguments of `WeightUpdate`, after `write`, `update` and the numbers `sent` for each
        rectangle.
        """
        self.write = write
        self.update = update
        self.sent = list(sent)
        self.W = list(W)
        self.O = list(O)
        self.scales = list(scales)
        self.skip = skip
        self.M = M
        self.sources = sources
        self.groups = list(groups or [0] * len(self.W))

    def __call__(
        self,
        factors: torch.Tensor,
        tensors: Sequence[torch.Tensor] = (),
        addresses: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        update_momentum: bool = True,
    ) -> None:
        """Write W and, with momenta and `update_momentum`, M, as `WeightUpdate`. `factors`,
        `addresses` and `weight` are not read.
        """
        if self.M is not None and update_momentum:
            write_updates(self, tensors, (), True)
        for i, (w, o) in enumerate(zip(self.W, self.O)):
            wide = w.float()
            new = self.write(wide, o.float(), self.scales[i], self.sent[i], self.groups[i])
            w.copy_(new if self.skip is None else torch.where(self.skip.is_updated(i), new, wide))

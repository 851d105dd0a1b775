"""Weight decay and weight update of many rectangles in one launch, with or without momentum."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backend import use_triton
from ..launch.jit import jit
from .momentum import fed, gradients_or_momenta, lerp, summed
from .multi_tensor import (
    NUMBERS,
    Skip,
    Source,
    bind,
    element_pointers,
    gradient_address,
    group_offset,
    groups_of,
    locate,
    run,
    skips_of,
    unskipped,
)

tl = None  # Triton's language, put here by jit

# Elements that decay, and towards what: all, towards 0; those whose update has not the opposite
# sign; all, towards initial weights
ALL, CAUTIOUS, TO_INITIAL = 0, 1, 2
RATE = 6  # element of a group's numbers with the rate of decay, see `rules.rule.device_scalars`


class WeightUpdate:
    """Weight update of many rectangles: W <- (1 - rate) W - (lr scale) O, with the rate of decay
    lr weight_decay, or another one of rules/decay.py.

    CAUTIOUS: elements with O W < 0 do not decay. TO_INITIAL: W <- W - rate (W - W0) - (lr scale) O.
    With momenta bound, also M <- mu M + (1 - mu) G, as `Pack` with `update_momentum`. With
    `feedback`: M <- M + (1 - mu) G, then M <- mu M where O is not -0.0, see [Note: unselected
    elements]. W: weight, O: orthogonalized update, M: momentum, G: gradient, W0: initial weight.
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
        groups: Sequence[int] | None = None,
        decay: int = ALL,
        initial: Sequence[torch.Tensor] = (),
        sums: bool = False,
        feedback: bool = False,
    ):
        """Bind weights and O: lists of 2-D views with equal shapes, at fixed addresses.

        `scales`: factor on the learning rate of each rectangle. `M`: momenta of equal shapes, with
        `sources` and `gradients` as for `Pack`; None to leave momentum alone. W, O, M and the
        gradients may each be fp32, bf16 or fp16. Rectangles of `skip` keep W and M. `groups`:
        number of the parameter group of each rectangle; None: group 0. `decay`: ALL, CAUTIOUS or
        TO_INITIAL. `initial`: W0 with TO_INITIAL, of equal shapes. `sums`: M is a sum, as in
        `Pack`.
        """
        self.W = list(W)
        self.O = list(O)
        self.M = M
        self.sources = sources
        self.decay = decay
        self.sums = sums
        self.feedback = feedback
        self.initial = list(initial)
        self.scales = torch.tensor(
            list(scales), dtype=torch.float32, device=W[0].device if W else None
        )
        self.launches = None
        if W and use_triton(W[0].device):
            lists = [W, O, *([] if M is None else [M]), *([initial] if initial else [])]
            self.launches = bind(lists) if M is None else bind(lists, sources, gradients)
        self.skip = skip
        self.skips = skips_of(skip, self.launches)  # kernel arguments for each launch
        self.group_offsets = [n * NUMBERS for n in groups or [0] * len(self.W)]
        self.groups = groups_of(groups, self.launches)
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

        `factors`: numbers of group 0, fp32 on the device: lr, 1 - rate, and the rate as element
        RATE, read with TO_INITIAL only; the values of group i are i * NUMBERS elements behind.
        `tensors`, `addresses`, `weight`: as for `Pack`, read with momenta only. Pass
        `update_momentum=False` if `Pack` has already written M in the current step.
        """
        if not self.W:
            return
        if self.launches is None:
            if self.M is not None and update_momentum:
                self._update_momenta(tensors, weight)
            return weight_update_torch(
                self.W,
                self.O,
                self.scales,
                factors,
                self.group_offsets,
                self.skip,
                self.decay,
                self.initial,
            )
        for launch, scales, (flags, places, skips), (groups, grouped) in zip(
            self.launches, self.scales_of, self.skips, self.groups
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
                groups,
                int(update_momentum),
                MOMENTA=self.M is not None,
                SKIPS=skips,
                GROUPED=grouped,
                DECAY=self.decay,
                SUMS=self.sums,
                FEEDBACK=self.feedback,
            )

    def _update_momenta(self, tensors: Sequence[torch.Tensor], weight: torch.Tensor) -> None:
        """Write M in torch, with the bits of the kernel. Arguments as for `__call__`."""
        gradients = gradients_or_momenta(tensors, self.sources, self.M, self.skip)
        for i, (m, g, at) in enumerate(zip(self.M, gradients, self.group_offsets)):
            if not self.sums and not self.feedback:
                m.copy_(lerp(m, g, weight[at]))
                continue
            if self.feedback:
                new = fed(m, g, weight[at])
                new = torch.where(is_unselected(self.O[i]), new, new * weight[at + 1])
            else:
                new = summed(m, g, weight[at + 1])
            skip = self.skip
            m.copy_(new if skip is None else torch.where(skip.is_updated(i), new, m.float()))


def weight_update_torch(
    W: Sequence[torch.Tensor],
    O: Sequence[torch.Tensor],
    scales: torch.Tensor,
    factors: torch.Tensor,
    group_offsets: Sequence[int],
    skip: Skip | None = None,
    decay: int = ALL,
    initial: Sequence[torch.Tensor] = (),
) -> None:
    """Compute the weights of `WeightUpdate` in torch, by rectangle, with the bits of the kernel.

    `factors`, at the offset of a rectangle: lr, 1 - rate; the rate as element RATE.
    """
    for i, (w, o, scale, at) in enumerate(zip(W, O, scales, group_offsets)):
        wide = w.float()
        if decay == ALL:
            new = wide.mul(factors[at + 1])
        elif decay == CAUTIOUS:
            new = torch.where(is_opposite(wide, o), wide, wide * factors[at + 1])
        else:
            new = wide - (wide - initial[i].float()) * factors[at + RATE]
        new.sub_(o.float().mul(scale * factors[at]))
        w.copy_(new if skip is None else torch.where(skip.is_updated(i), new, w.float()))


def is_unselected(o: torch.Tensor) -> torch.Tensor:
    """Return where o is -0.0, see [Note: unselected elements] in newton_schulz/selection.py."""
    return (o == 0) & torch.signbit(o)


def is_opposite(w: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """Return where w and o have opposite signs. Not by the product, which may underflow to 0."""
    return (w > 0) & (o < 0) | (w < 0) & (o > 0)


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
    groups,
    update_momentum,
    MOMENTA: tl.constexpr,
    SKIPS: tl.constexpr,
    GROUPED: tl.constexpr,
    DECAY: tl.constexpr,
    SUMS: tl.constexpr,
    FEEDBACK: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCESS: tl.constexpr,
    TYPE_0: tl.constexpr,
    TYPE_1: tl.constexpr,
    TYPE_2: tl.constexpr = None,
    TYPE_3: tl.constexpr = None,
    TYPE_4: tl.constexpr = None,
):
    """Compute `WeightUpdate` for a block of elements. Lists of the table: W, O; with MOMENTA also
    M; with DECAY TO_INITIAL also W0; with MOMENTA also G.

    `scales`: scale of each record. SUMS, FEEDBACK: form of M. `update_momentum`: 0 leaves M alone.
    `flags`, `places`: see `unskipped`; read if SKIPS only. `groups`: see `group_offset`; read if
    GROUPED only.
    """
    record, row, column, inside = locate(records, blocks, FIELDS, BLOCK, ACCESS)
    group = group_offset(blocks, groups, GROUPED)
    factor = tl.load(scales + tl.load(blocks + tl.program_id(0).to(tl.int64) * 2)) * tl.load(
        factors + group
    )
    if SKIPS:
        inside = unskipped(inside, blocks, flags, places)
    w_at = element_pointers(record, row, column, 0, TYPE_0, 0, ACCESS)
    w = tl.load(w_at, mask=inside).to(tl.float32)
    o = tl.load(element_pointers(record, row, column, 1, TYPE_1, 0, ACCESS), mask=inside).to(
        tl.float32
    )
    if MOMENTA:
        written = tl.where(update_momentum != 0, inside, False)
        m_at = element_pointers(record, row, column, 2, TYPE_2, 0, ACCESS)
        g_base = gradient_address(record, addresses, FIELDS)
        if DECAY == 2:  # G is behind W0
            g_at = element_pointers(record, row, column, 4, TYPE_4, g_base, ACCESS)
        else:
            g_at = element_pointers(record, row, column, 3, TYPE_3, g_base, ACCESS)
        m = tl.load(m_at, mask=written).to(tl.float32)
        if FEEDBACK:
            g = tl.load(g_at, mask=written).to(tl.float32)
            m = g * tl.load(weight + group) + m
            # The bits of -0.0: only the sign
            selected = o.to(tl.int32, bitcast=True) != -2147483648
            m = tl.where(selected, m * tl.load(weight + group + 1), m)
        elif SUMS:
            m = m * tl.load(weight + group + 1) + tl.load(g_at, mask=written).to(tl.float32)
        else:
            m += tl.load(weight + group) * (tl.load(g_at, mask=written).to(tl.float32) - m)
        tl.store(m_at, m.to(TYPE_2), mask=written)
    if DECAY == 0:  # ALL
        new = w * tl.load(factors + group + 1) - o * factor
    elif DECAY == 1:  # CAUTIOUS
        opposite = ((w > 0) & (o < 0)) | ((w < 0) & (o > 0))
        new = tl.where(opposite, w, w * tl.load(factors + group + 1)) - o * factor
    else:
        if MOMENTA:
            first_at = element_pointers(record, row, column, 3, TYPE_3, 0, ACCESS)
        else:
            first_at = element_pointers(record, row, column, 2, TYPE_2, 0, ACCESS)
        first = tl.load(first_at, mask=inside).to(tl.float32)
        new = w - (w - first) * tl.load(factors + group + 6) - o * factor
    tl.store(w_at, new.to(TYPE_0), mask=inside)

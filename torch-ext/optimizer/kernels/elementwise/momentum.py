"""Momentum with Nesterov and cast into a send buffer (`Pack`); multi-tensor copies (`Copy`).

Both bind views of tensors once (multi_tensor.py) and are called at every step with new gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from ..backend import use_triton
from ..launch.jit import jit
from .multi_tensor import (
    NUMBERS,
    Skip,
    Source,
    Squares,
    bind,
    element_pointers,
    gradient_address,
    group_offset,
    groups_of,
    locate,
    rows_of,
    run,
    skips_of,
    total_square,
    unskipped,
    write_momentum_squares,
)

tl = None  # Triton's language, put here by jit

# Form of M and U, see `Pack`: a value of the key `momentum_form`, or "feedback" of rules with a
# selection
MomentumForm = Literal["ema", "sum", "bias_corrected", "feedback"]
# Distance in elements, in the numbers of a group: from 1 - mu to y, the bias-corrected weight of G
NESTEROV = 4


class Pack:
    """Momentum of many rectangles: M <- mu M + (1 - mu) G, then U <- mu M + (1 - mu) G or U <- M.

    M: momentum, G: gradient, U: update, mostly a view of a send buffer. The first form of U is
    Nesterov momentum, with the new M. Form "sum": M <- mu M + G, then U <- mu M + G or U <- M.
    "bias_corrected": Nesterov's U is M + y (G - M), with a number y of the parameter group.
    "feedback": U <- M + (1 - mu) G, and M is written by `WeightUpdate`. With `signs` the signs of
    U, as rounded, take the place of U; zeros and NaN stay.
    """

    def __init__(
        self,
        M: Sequence[torch.Tensor],
        U: Sequence[torch.Tensor],
        sources: Sequence[Source],
        gradients: Sequence[torch.Tensor],
        skip: Skip | None = None,
        groups: Sequence[int] | None = None,
        form: MomentumForm = "ema",
        signs: bool = False,
        squares: Squares | None = None,
    ):
        """Bind M and U: lists of 2-D views with equal shapes, at fixed addresses. `groups`: number
        of the parameter group of each rectangle; None: group 0.

        `sources`: place of each rectangle in the gradients. `gradients`: examples with the dtypes
        and the alignment of all later gradients. M, U and the gradients may each be fp32, bf16 or
        fp16. Rectangles of `skip` keep M, and U gets M: results computed from U stay finite.
        `squares`: the sums of M are filled by each call, but not with "feedback", where M is never
        written; None: no sums are made.
        """
        self.M = list(M)
        self.U = list(U)
        self.sources = list(sources)
        self.launches = (
            bind((self.M, self.U), sources, gradients) if M and use_triton(M[0].device) else None
        )
        self.form = form
        self.signs = signs
        self.group_offsets = [n * NUMBERS for n in groups or [0] * len(self.M)]
        self.groups = groups_of(groups, self.launches)
        self.squares = None if form == "feedback" else squares
        device = M[0].device if M else None
        self.rows = rows_of(self.squares, self.launches, len(M), device)
        self.skip = skip
        self.skips = skips_of(skip, self.launches)  # kernel arguments for each launch

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        addresses: torch.Tensor | None,
        weight: torch.Tensor,
        nesterov: bool,
        update_momentum: bool = True,
    ) -> None:
        """Write U and, with `update_momentum`, M; both in place, computed in fp32, rounded once.

        `tensors`: all gradients of the step, unchanged. `addresses`: their addresses, int64 on the
        device (None without Triton). `weight`: 1 - mu of group 0, then mu, read with "sum" only, in
        fp32 on the device; y, read with "bias_corrected" only, is NESTEROV elements behind the
        first. The values of group i are i * NUMBERS elements behind. Without `update_momentum`,
        `WeightUpdate` writes M later, together with the weight.
        """
        assert not (self.form == "feedback" and update_momentum), "M is written by WeightUpdate"
        if self.launches is None:
            gradients = gradients_or_momenta(tensors, self.sources, self.M, self.skip)
            weights = [weight[at] for at in self.group_offsets]
            if self.form == "feedback":
                return pack_feedback_torch(self.M, self.U, gradients, weights, self.skip)
            if self.form == "sum":
                factors = [weight[at + 1] for at in self.group_offsets]
                pack_sums_torch(
                    self.M, self.U, gradients, factors, nesterov, update_momentum, self.skip
                )
            else:
                behind = NESTEROV if self.form == "bias_corrected" else 0
                mixes = [weight[at + behind] for at in self.group_offsets]
                pack_torch(self.M, self.U, gradients, weights, nesterov, update_momentum, mixes)
            for u in self.U if self.signs else ():
                u.copy_(torch.where(u > 0, 1.0, torch.where(u < 0, -1.0, u)))
            if self.squares is not None:
                write_momentum_squares(*self.rows, self.M, update_momentum)
            return
        for launch, (flags, places, skips), (groups, grouped), rows in zip(
            self.launches, self.skips, self.groups, self.rows
        ):
            run(
                _pack_kernel,
                launch,
                addresses,
                weight,
                flags,
                places,
                groups,
                rows,
                int(update_momentum),
                NESTEROV=nesterov,
                SKIPS=skips,
                GROUPED=grouped,
                SUMS=self.form == "sum",
                CORRECTED=self.form == "bias_corrected",
                FEEDBACK=self.form == "feedback",
                SIGNS=self.signs,
                COLLECTS=self.squares is not None,
            )


def gradients_or_momenta(
    tensors: Sequence[torch.Tensor],
    sources: Sequence[Source],
    M: Sequence[torch.Tensor],
    skip: Skip | None,
) -> list[torch.Tensor]:
    """Return the gradient of each rectangle, or the momentum M if the rectangle is skipped.

    With M as the gradient, the momentum stays: M + (1 - mu) (M - M) = M.
    """
    gradients = [s.view(tensors, m.shape) for s, m in zip(sources, M)]
    if skip is None:
        return gradients
    return [torch.where(skip.is_updated(i), g, m) for i, (g, m) in enumerate(zip(gradients, M))]


def pack_torch(
    M: Sequence[torch.Tensor],
    U: Sequence[torch.Tensor],
    G: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    nesterov: bool,
    update_momentum: bool = True,
    mixes: Sequence[torch.Tensor] | None = None,
) -> None:
    """Compute `Pack` in torch, rectangle by rectangle, with the bits of the kernel. `weights`: 1 -
    mu of each rectangle. `mixes`: the weight of G in Nesterov's U; None: `weights`.
    """
    for m, u, g, weight, mix in zip(M, U, G, weights, mixes or weights):
        new = lerp(m, g, weight)
        if update_momentum:
            m.copy_(new)
        u.copy_(lerp(new, g, mix) if nesterov else new)


def pack_sums_torch(
    M: Sequence[torch.Tensor],
    U: Sequence[torch.Tensor],
    G: Sequence[torch.Tensor],
    factors: Sequence[torch.Tensor],
    nesterov: bool,
    update_momentum: bool,
    skip: Skip | None,
) -> None:
    """Compute `Pack` of form "sum" in torch, with the bits of the kernel. `factors`: mu of each
    rectangle.
    """
    for i, (m, u, g, mu) in enumerate(zip(M, U, G, factors)):
        new = summed(m, g, mu)
        update = summed(new, g, mu) if nesterov else new
        if skip is not None:
            new, update = (torch.where(skip.is_updated(i), t, m.float()) for t in (new, update))
        if update_momentum:
            m.copy_(new)
        u.copy_(update)


def pack_feedback_torch(
    M: Sequence[torch.Tensor],
    U: Sequence[torch.Tensor],
    G: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    skip: Skip | None,
) -> None:
    """Compute `Pack` of form "feedback" in torch, with the bits of the kernel. `weights`: 1 - mu of
    each rectangle.
    """
    for i, (m, u, g, weight) in enumerate(zip(M, U, G, weights)):
        new = fed(m, g, weight)
        u.copy_(new if skip is None else torch.where(skip.is_updated(i), new, m.float()))


def fed(m: torch.Tensor, g: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return m + weight g in fp32."""
    return g.float().mul(weight).add_(m.float())


def summed(m: torch.Tensor, g: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    """Return mu m + g in fp32."""
    return m.float().mul(mu).add_(g.float())


def lerp(m: torch.Tensor, g: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return m + weight (g - m) in fp32, as torch.lerp computes mu m + (1 - mu) g."""
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
    groups,
    squares,
    update_momentum,
    NESTEROV: tl.constexpr,
    SKIPS: tl.constexpr,
    GROUPED: tl.constexpr,
    SUMS: tl.constexpr,
    CORRECTED: tl.constexpr,
    FEEDBACK: tl.constexpr,
    SIGNS: tl.constexpr,
    COLLECTS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCESS: tl.constexpr,
    TYPE_0: tl.constexpr,
    TYPE_1: tl.constexpr,
    TYPE_2: tl.constexpr,
):
    """Compute `Pack` for a block of elements. Lists of the table: M, U, G.

    `weight`: pointer to 1 - mu of group 0, then mu; y is NESTEROV (4) elements behind the first.
    SUMS: M is a sum. FEEDBACK: only U is written. CORRECTED: y is the weight of G in Nesterov's U.
    SIGNS: write signs of U.
    `flags`, `places`: see `unskipped`; read if SKIPS only. `groups`: see `group_offset`; read if
    GROUPED only. `squares`: a row of `Squares` for each program; written if COLLECTS only.
    """
    record, row, column, inside = locate(records, blocks, FIELDS, BLOCK, ACCESS)
    m_at = element_pointers(record, row, column, 0, TYPE_0, 0, ACCESS)
    u_at = element_pointers(record, row, column, 1, TYPE_1, 0, ACCESS)
    g_at = element_pointers(
        record, row, column, 2, TYPE_2, gradient_address(record, addresses, FIELDS), ACCESS
    )
    g = tl.load(g_at, mask=inside).to(tl.float32)
    m = tl.load(m_at, mask=inside).to(tl.float32)
    if FEEDBACK:
        rest = tl.load(weight + group_offset(blocks, groups, GROUPED))
        stepped = unskipped(inside, blocks, flags, places) if SKIPS else inside
        m = tl.where(stepped, g * rest + m, m)
    elif SUMS:
        mu = tl.load(weight + group_offset(blocks, groups, GROUPED) + 1)
        # A rectangle that is skipped: M stays, and U becomes M
        stepped = unskipped(inside, blocks, flags, places) if SKIPS else inside
        m = tl.where(stepped, m * mu + g, m)
        written = tl.where(update_momentum != 0, inside, False)
        tl.store(m_at, m.to(TYPE_0), mask=written)
        if COLLECTS:
            square = total_square(m.to(TYPE_0).to(tl.float32), written, ACCESS)
            tl.store(squares + tl.program_id(0).to(tl.int64) * 3 + 2, square)
        if NESTEROV:
            m = tl.where(stepped, m * mu + g, m)
    else:
        if SKIPS:
            g = tl.where(unskipped(inside, blocks, flags, places), g, m)
        at = weight + group_offset(blocks, groups, GROUPED)
        rest = tl.load(at)
        m += rest * (g - m)
        written = tl.where(update_momentum != 0, inside, False)
        tl.store(m_at, m.to(TYPE_0), mask=written)
        if COLLECTS:
            square = total_square(m.to(TYPE_0).to(tl.float32), written, ACCESS)
            tl.store(squares + tl.program_id(0).to(tl.int64) * 3 + 2, square)
        if NESTEROV:
            if CORRECTED:
                rest = tl.load(at + 4)
            m += rest * (g - m)
    u = m.to(TYPE_1)
    if SIGNS:
        m = u.to(tl.float32)
        u = tl.where(m > 0, 1.0, tl.where(m < 0, -1.0, m)).to(TYPE_1)
    tl.store(u_at, u, mask=inside)


class Copy:
    """Copies of many rectangles, `what` to `to`, with a cast (to nearest, ties to even)."""

    def __init__(
        self, to: Sequence[torch.Tensor], what: Sequence[torch.Tensor], skip: Skip | None = None
    ):
        """Bind targets and origins: lists of 2-D views with equal shapes, at fixed addresses.

        Rectangles of `skip` are not copied. The kernel casts by way of fp32.
        """
        self.to = list(to)
        self.what = list(what)
        self.sources = None  # places in gradients, see `of_gradients`
        self.launches = bind((self.to, self.what)) if to and use_triton(to[0].device) else None
        self.skip = skip
        self.skips = skips_of(skip, self.launches)  # kernel arguments for each launch

    @classmethod
    def of_gradients(
        cls,
        to: Sequence[torch.Tensor],
        sources: Sequence[Source],
        gradients: Sequence[torch.Tensor],
    ) -> Copy:
        """Return a `Copy` of gradients to bound targets; calls take gradients and addresses.

        `sources`, `gradients`: as for `Pack`.
        """
        copy = cls((), ())
        copy.to = list(to)
        copy.sources = list(sources)
        copy.launches = (
            bind((copy.to,), sources, gradients) if to and use_triton(to[0].device) else None
        )
        copy.skips = skips_of(None, copy.launches)
        return copy

    def __call__(
        self, tensors: Sequence[torch.Tensor] = (), addresses: torch.Tensor | None = None
    ) -> None:
        """Copy all rectangles. After `of_gradients`: `tensors`, `addresses` as for `Pack`."""
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


def copy_torch(
    to: Sequence[torch.Tensor], what: Sequence[torch.Tensor], skip: Skip | None = None
) -> None:
    """Compute `Copy` in torch."""
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
    ACCESS: tl.constexpr,
    TYPE_0: tl.constexpr,
    TYPE_1: tl.constexpr,
):
    """Compute `Copy` for a block of elements. Lists of the table: to, what.

    FRESH: `what` are gradients. `flags`, `places`: see `unskipped`; read if SKIPS only.
    """
    record, row, column, inside = locate(records, blocks, FIELDS, BLOCK, ACCESS)
    if SKIPS:
        inside = unskipped(inside, blocks, flags, places)
    base = gradient_address(record, addresses, FIELDS) if FRESH else 0
    value = tl.load(element_pointers(record, row, column, 1, TYPE_1, base, ACCESS), mask=inside)
    tl.store(
        element_pointers(record, row, column, 0, TYPE_0, 0, ACCESS),
        value.to(tl.float32).to(TYPE_0),
        mask=inside,
    )

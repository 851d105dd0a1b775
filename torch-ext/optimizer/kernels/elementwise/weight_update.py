"""Weight decay and weight update of many rectangles in one launch, with or without momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..backend import use_triton
from ..launch.jit import jit, launch_key
from ..weights.split import (
    NEAREST,
    STOCHASTIC,
    SplitWeights,
    joined_tile,
    split_tile,
    wide_copies,
    wide_weight,
    wide_weights,
    write_weight,
)
from .momentum import MomentumForm, fed, gradients_or_momenta, lerp, summed
from .multi_tensor import (
    NUMBERS,
    Positions,
    Skip,
    Source,
    Squares,
    bind,
    element_numbers,
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
    write_squares,
)
from .norms import BLOCK, OPTIONS, TILE, Groups, inverse, new, number_of, total_of
from .row_scattered import ALIGNMENT, ScatteredMatrices, matrix_at, memory_of_matrices

tl = None  # Triton's language, put here by jit

# Which elements decay, towards which value: all, to 0; where the update has not the opposite sign,
# to 0; all, to the initial weights. BY_FACTORS: factors of W and O come from the owner
ALL, CAUTIOUS, TO_INITIAL, BY_FACTORS = 0, 1, 2, 3
# Factors of O from the owner: none, one for each rectangle, one for each row
NO_FACTORS, OF_MATRICES, OF_ROWS = 0, 1, 2
RATE = 6  # element of a group's numbers with the rate of decay, see `rules.rule.device_scalars`


@dataclass(frozen=True)
class StochasticRounding:
    """Rounding of new weights to bf16, up or down, each with the probability that makes the mean of
    many roundings the exact value (arXiv 1502.02551). bf16 keeps the 16 high bits of fp32: a random
    number of 16 bits is added to the low ones, which are then cut off.

    The random number of an element is a hash of its place in the whole parameter and of the key of
    the step, so the bits do not depend on how the parameter is sharded.
    """

    positions: Sequence[Positions]  # of each rectangle
    keys: torch.Tensor  # int64 on the device, one for each parameter group: see `rules.muon`
    kind: ClassVar[int] = STOCHASTIC

    def lists(self, W: Sequence[torch.Tensor]) -> tuple[Sequence, list]:
        """Return the lists of weights and of positions for `bind`."""
        return W, [self.positions]

    def key_of(self, offset: int) -> torch.Tensor:
        """Return the key of the group whose numbers begin at an offset."""
        return self.keys[offset // NUMBERS]


class WeightUpdate:
    """Weight update of many rectangles: W <- (1 - rate) W - (lr scale) O, with the rate of decay
    lr weight_decay, or another one of rules/decay.py.

    CAUTIOUS: elements with O W < 0 do not decay. TO_INITIAL: W <- W - rate (W - W0) - (lr scale) O.
    With `factors` bound, lr scale is multiplied by a factor of the row or rectangle. BY_FACTORS:
    W <- keep W - factor O. With momenta bound, also M <- mu M + (1 - mu) G, as `Pack` with
    `update_momentum`. Form "feedback" of M: M <- M + (1 - mu) G, then M <- mu M where O is not
    -0.0, see [Note: unselected elements]. W: weight, O: orthogonalized update, M: momentum, G:
    gradient, W0: initial weight.
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
        momentum_form: MomentumForm = "ema",
        factors: Sequence[torch.Tensor] = (),
        keeps: Sequence[torch.Tensor] = (),
        rounding: StochasticRounding | SplitWeights | None = None,
        squares: Squares | None = None,
    ):
        """Bind weights and O: lists of 2-D views with equal shapes, at fixed addresses.

        `scales`: factor on the learning rate of each rectangle. `M`: momenta of equal shapes, with
        `sources` and `gradients` as for `Pack`; None to leave momentum alone. W, O, M and the
        gradients may each be fp32, bf16 or fp16. Rectangles of `skip` keep W and M. `groups`:
        number of the parameter group of each rectangle; None: group 0. `decay`: ALL, CAUTIOUS or
        TO_INITIAL. `initial`: W0 with TO_INITIAL, of equal shapes. `momentum_form`: of M, as in
        `Pack`. `factors` of O: (rows, 1) or (1, 1) for each rectangle, all of a kind, contiguous,
        fp32, at fixed addresses. `keeps`: factors of W likewise, (1, 1): then `decay` has no
        effect. `rounding`: None rounds to nearest; weights with stochastic rounding, and weights
        with a rest, are bf16. `squares`: filled by each call; None: no sums are made.
        """
        self.rounding = rounding
        self.W = list(W)
        self.O = list(O)
        self.M = M
        self.sources = sources
        self.decay = BY_FACTORS if keeps else decay
        self.factors = list(factors)
        self.keeps = list(keeps)
        self.factors_of = NO_FACTORS
        if factors:
            self.factors_of = OF_ROWS if any(len(t) > 1 for t in factors) else OF_MATRICES
        self.momentum_form = momentum_form
        self.initial = list(initial)
        self.scales = torch.tensor(
            list(scales), dtype=torch.float32, device=W[0].device if W else "cpu"
        )
        self.launches = None
        if W and use_triton(W[0].device):
            weights, more = (W, []) if rounding is None else rounding.lists(W)
            lists = [weights, O, *([] if M is None else [M]), *([initial] if initial else [])]
            lists += more
            keep_rows = self.factors_of == OF_ROWS
            places = () if M is None else (sources, gradients)
            self.launches = bind(lists, *places, keep_rows=keep_rows)
        self.squares = squares
        self.rows = rows_of(squares, self.launches, len(W), self.scales.device)
        self.skip = skip
        self.skips = skips_of(skip, self.launches)  # kernel arguments for each launch
        self.group_offsets = [n * NUMBERS for n in groups or [0] * len(self.W)]
        self.groups = groups_of(groups, self.launches)
        # Scale of each record, for each launch
        self.scales_of = [
            self.scales[launch.origins.to(self.scales.device)] for launch in self.launches or ()
        ]
        # Addresses of the factors of O and W of each record, for each launch
        pairs = [[t.data_ptr() for t in pair] for pair in zip(factors, keeps or factors)]
        addresses = torch.tensor(pairs, dtype=torch.int64, device="cpu")
        self.sent_of = [
            addresses[launch.origins].to(launch.records.device) if factors else launch.records
            for launch in self.launches or ()
        ]

    def __call__(
        self,
        factors: torch.Tensor,
        tensors: Sequence[torch.Tensor] = (),
        addresses: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        update_momentum: bool = True,
    ) -> None:
        """Write W and, with momenta and `update_momentum`, M; in place, in fp32, rounded once. The
        keys of `rounding` are read anew.

        `factors`: numbers of group 0, fp32 on the device: lr, 1 - rate, and the rate as element
        RATE, read with TO_INITIAL only; the values of group i are i * NUMBERS elements behind.
        `tensors`, `addresses`, `weight`: as for `Pack`, read with momenta only. Pass
        `update_momentum=False` if `Pack` has already written M in the current step.
        """
        if not self.W:
            return
        if self.launches is None:
            return self._call_torch(factors, tensors, weight, update_momentum)
        for launch, scales, sent, (flags, places, skips), (groups, grouped), rows in zip(
            self.launches, self.scales_of, self.sent_of, self.skips, self.groups, self.rows
        ):
            run(
                _update_kernel,
                launch,
                scales,
                sent,
                factors,
                addresses,
                weight,
                flags,
                places,
                groups,
                getattr(self.rounding, "keys", launch.records),
                rows,
                int(update_momentum),
                MOMENTA=self.M is not None,
                SKIPS=skips,
                GROUPED=grouped,
                DECAY=self.decay,
                SUMS=self.momentum_form == "sum",
                FACTORS=self.factors_of,
                ROUNDS=NEAREST if self.rounding is None else self.rounding.kind,
                FEEDBACK=self.momentum_form == "feedback",
                COLLECTS=self.squares is not None,
            )

    def _call_torch(
        self,
        factors: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        weight: torch.Tensor | None,
        update_momentum: bool,
    ) -> None:
        """Compute the call in torch, with the bits of the kernel."""
        writes_momenta = self.M is not None and update_momentum
        if writes_momenta:
            self._update_momenta(tensors, weight)
        rests = getattr(self.rounding, "rests", ())
        old = [] if self.squares is None else wide_copies(self.W, rests)
        weight_update_torch(
            self.W,
            self.O,
            self.scales,
            factors,
            self.group_offsets,
            self.skip,
            self.decay,
            self.initial,
            self.factors,
            self.keeps,
            self.rounding,
        )
        if self.squares is not None:
            W = wide_weights(self.W, rests)
            write_squares(*self.rows, old, W, self.M if writes_momenta else None)

    def _update_momenta(self, tensors: Sequence[torch.Tensor], weight: torch.Tensor) -> None:
        """Write M in torch, with the bits of the kernel. Arguments as for `__call__`."""
        gradients = gradients_or_momenta(tensors, self.sources, self.M, self.skip)
        for i, (m, g, at) in enumerate(zip(self.M, gradients, self.group_offsets)):
            if self.momentum_form not in ("sum", "feedback"):
                m.copy_(lerp(m, g, weight[at]))
                continue
            if self.momentum_form == "feedback":
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
    factors_of_O: Sequence[torch.Tensor] = (),
    keeps: Sequence[torch.Tensor] = (),
    rounding: StochasticRounding | SplitWeights | None = None,
) -> None:
    """Compute the weights of `WeightUpdate` in torch, by rectangle, with the bits of the kernel.

    `factors`, at the offset of a rectangle: lr, 1 - rate; the rate as element RATE.
    """
    rests = rounding.rests if isinstance(rounding, SplitWeights) else [None] * len(W)
    for i, (w, o, scale, at) in enumerate(zip(W, O, scales, group_offsets)):
        wide = wide_weight(w, rests[i])
        factor = scale * factors[at]
        if factors_of_O:
            factor = factors_of_O[i] if keeps else factor * factors_of_O[i]
        if decay == BY_FACTORS:
            new = wide.mul(keeps[i])
        elif decay == ALL:
            new = wide.mul(factors[at + 1])
        elif decay == CAUTIOUS:
            new = torch.where(is_opposite(wide, o), wide, wide * factors[at + 1])
        else:
            new = wide - (wide - initial[i].float()) * factors[at + RATE]
        new.sub_(o.float().mul(factor))
        if isinstance(rounding, StochasticRounding):
            numbers = rounding.positions[i].tensor(w.device)
            new = rounded_torch(new, numbers, rounding.key_of(at))
        write_weight(w, rests[i], new, None if skip is None else skip.is_updated(i))


def is_unselected(o: torch.Tensor) -> torch.Tensor:
    """Return where o is -0.0, see [Note: unselected elements] in newton_schulz/selection.py."""
    return (o == 0) & torch.signbit(o)


def is_opposite(w: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """Return where w and o have opposite signs. Not by the product, which may underflow to 0."""
    return (w > 0) & (o < 0) | (w < 0) & (o > 0)


def keep_norms(
    W: torch.Tensor | ScatteredMatrices,
    O: torch.Tensor,
    radius: torch.Tensor,
    keep: torch.Tensor,
    step: torch.Tensor,
    numbers: torch.Tensor,
    groups: Groups = None,
) -> None:
    """Write the factors of W and O of a step on the sphere of matrices with the norm of W:
    W <- keep W - step O.

    With D = W - lr r O / ||O||: keep = r / ||D||, step = keep lr r / ||O||. O (N, R, C) in fp32,
    bf16 or fp16; W (N, R, C) in fp32 or bf16, rounded to bf16 if O is bf16; keep, step (N, 1, 1) in
    fp32; `radius` (N, R, 1) in fp32: r, repeated for each row, written as ||W|| where 0. All
    contiguous. lr is the first of `numbers`, `groups` as for `normalize`. Factors are 0 instead of
    infinite.

    ||D||^2 comes from the sums of W W, W O and O O, so that matrices are read once. Rounding errors
    of the norm grow by at most ((1 + lr) / (1 - lr))^2.
    """
    if O.numel() == 0:
        return
    if not use_triton(O.device):
        return _keep_norms_torch(W, O, radius, keep, step, numbers, groups)
    N, R, C = O.shape
    size, tiles = R * C, -(-R * C // TILE)
    sums = new(keep, N, 3, tiles)
    memory, table, aligned = memory_of_matrices(W)
    aligned = aligned and O.data_ptr() % ALIGNMENT == 0
    key = TILE, table, aligned, launch_key(O, memory)
    arguments = memory, O, sums, size, tiles, table, aligned, TILE
    _products_kernel.launch(N * tiles, key, *arguments, **OPTIONS)
    key = BLOCK, R, tiles, groups is None, launch_key(radius, keep, step)
    arguments = sums, radius, keep, step, R, tiles, numbers, groups, BLOCK
    _sphere_kernel.launch(N, key, *arguments, **OPTIONS)


def _keep_norms_torch(
    W: torch.Tensor | ScatteredMatrices,
    O: torch.Tensor,
    radius: torch.Tensor,
    keep: torch.Tensor,
    step: torch.Tensor,
    numbers: torch.Tensor,
    groups: Groups = None,
) -> None:
    """Compute `keep_norms` in torch, matrix by matrix."""
    for i, (w, o) in enumerate(zip(W.unbind(), O.unbind())):
        lr = number_of(numbers, 0, groups, i)
        w, o = (w.to(o.dtype) if o.dtype == torch.bfloat16 else w).float(), o.float()
        r, size = radius[i, 0, 0], o.square().sum(1).sum().sqrt()
        r = torch.where(r > 0, r, w.square().sum(1).sum().sqrt())
        radius[i] = r
        length = torch.where(size > 0, lr * r / size, size)
        new = (w - length * o).square().sum(1).sum().sqrt()
        keep[i] = torch.where(new > 0, r / new, new)
        step[i] = keep[i, 0, 0] * length


def rounded_torch(values: torch.Tensor, numbers: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return `values` in fp32, rounded to bf16 as in `StochasticRounding`, with the bits of the
    kernel. `numbers`: of the elements, int64. `key`: int64.
    """
    low, high = numbers & 0xFFFFFFFF, numbers >> 32
    mixed = _mix_torch(low ^ (key & 0xFFFFFFFF)) ^ high ^ (key >> 32)
    noise = _mix_torch(mixed & 0xFFFFFFFF) & 0xFFFF
    bits = values.view(torch.int32).long()
    # NaN and Inf stay: a sum could turn a NaN into a number
    finite = (bits & 0x7F800000) != 0x7F800000
    bits = torch.where(finite, (bits + noise) & -0x10000, bits)
    return (bits << 32 >> 32).int().view(torch.float32)


def _mix_torch(x: torch.Tensor) -> torch.Tensor:
    """Return `_mix` of numbers of 32 bits in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    # Less 2^32, which changes no low bit: the product fits in 64 bits
    x = (x * (0x846CA68B - (1 << 32))) & 0xFFFFFFFF
    return x ^ (x >> 16)


@jit
def _mix(x):
    """Return a hash of 32 bits, uint32: "lowbias32" of Chris Wellons, github.com/skeeto/
    hash-prospector, in which each input bit changes each output bit with a probability near 1/2.
    """
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@jit
def _rounded(values, numbers, key):
    """Return `values` in fp32, rounded to bf16 as in `StochasticRounding`. `numbers`: of the
    elements, int64. `key`: int64.
    """
    low, high = numbers.to(tl.uint32), (numbers >> 32).to(tl.uint32)
    noise = _mix(_mix(low ^ key.to(tl.uint32)) ^ high ^ (key >> 32).to(tl.uint32)) & 0xFFFF
    bits = values.to(tl.uint32, bitcast=True)
    # NaN and Inf stay: a sum could turn a NaN into a number
    finite = (bits & 0x7F800000) != 0x7F800000
    bits = tl.where(finite, (bits + noise) & 0xFFFF0000, bits)
    return bits.to(tl.float32, bitcast=True)


@jit
def _new_momentum(m, g_at, o, written, weight, SUMS: tl.constexpr, FEEDBACK: tl.constexpr):
    """Return the new momentum in fp32. SUMS, FEEDBACK: its form."""
    if FEEDBACK:
        g = tl.load(g_at, mask=written).to(tl.float32)
        m = g * tl.load(weight) + m
        # The bits of -0.0: only the sign
        selected = o.to(tl.int32, bitcast=True) != -2147483648
        m = tl.where(selected, m * tl.load(weight + 1), m)
    elif SUMS:
        m = m * tl.load(weight + 1) + tl.load(g_at, mask=written).to(tl.float32)
    else:
        m += tl.load(weight) * (tl.load(g_at, mask=written).to(tl.float32) - m)
    return m


@jit.unspecialized("update_momentum")
def _update_kernel(
    records,
    blocks,
    scales,
    sent,
    factors,
    addresses,
    weight,
    flags,
    places,
    groups,
    keys,
    squares,
    update_momentum,
    MOMENTA: tl.constexpr,
    SKIPS: tl.constexpr,
    GROUPED: tl.constexpr,
    DECAY: tl.constexpr,
    SUMS: tl.constexpr,
    FACTORS: tl.constexpr,
    ROUNDS: tl.constexpr,
    FEEDBACK: tl.constexpr,
    COLLECTS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCESS: tl.constexpr,
    TYPE_0: tl.constexpr,
    TYPE_1: tl.constexpr,
    TYPE_2: tl.constexpr = None,
    TYPE_3: tl.constexpr = None,
    TYPE_4: tl.constexpr = None,
    TYPE_5: tl.constexpr = None,
):
    """Compute `WeightUpdate` for a block of elements. Lists of the table: W, O; with MOMENTA also
    M; with DECAY TO_INITIAL also W0; with ROUNDS STOCHASTIC positions, with SPLIT rests; with
    MOMENTA also G. Split weights are int16.

    `scales`: scale of each record. `sent`: addresses of the factors of O and of W of each record
    (records, 2), int64; read with FACTORS or BY_FACTORS only. SUMS, FEEDBACK: form of M.
    `update_momentum`: 0 leaves M alone. `flags`, `places`: see `unskipped`; read if SKIPS only.
    `groups`: see `group_offset`; read if GROUPED only. `keys`: int64, one for each group; read
    with STOCHASTIC only. `squares`: a row of `Squares` for each program; written if COLLECTS only.
    """
    record, row, column, inside = locate(records, blocks, FIELDS, BLOCK, ACCESS)
    group = group_offset(blocks, groups, GROUPED)
    number = tl.load(blocks + tl.program_id(0).to(tl.int64) * 2)
    factor = tl.load(scales + number) * tl.load(factors + group)
    if FACTORS != 0:
        factor_at = tl.load(sent + 2 * number).to(tl.pointer_type(tl.float32))
        if FACTORS == 2 and ACCESS != 2:  # OF_ROWS, of several rows
            sent_factor = tl.load(factor_at + row, mask=row < tl.load(record), other=0.0)
        else:
            sent_factor = tl.load(factor_at)
        factor = sent_factor if DECAY == 3 else factor * sent_factor
    stored = inside
    if SKIPS:
        inside = unskipped(inside, blocks, flags, places)
    stored = stored if COLLECTS else inside  # sums need the values of skipped rectangles, too
    w_at = element_pointers(record, row, column, 0, TYPE_0, 0, ACCESS)
    w = tl.load(w_at, mask=stored)
    LIST: tl.constexpr = 2 + MOMENTA + (DECAY == 2)  # of positions or rests
    SPLIT: tl.constexpr = ROUNDS == 2 and TYPE_0 == tl.int16
    if SPLIT:
        rest_at = element_pointers(record, row, column, LIST, tl.int16, 0, ACCESS)
        w = joined_tile(w, tl.load(rest_at, mask=stored))
    w = w.to(tl.float32)
    o_at = element_pointers(record, row, column, 1, TYPE_1, 0, ACCESS)
    o = tl.load(o_at, mask=inside).to(tl.float32)
    if MOMENTA:
        written = tl.where(update_momentum != 0, inside, False)
        m_at = element_pointers(record, row, column, 2, TYPE_2, 0, ACCESS)
        g_base = gradient_address(record, addresses, FIELDS)
        if DECAY == 2 and ROUNDS != 0:  # G is behind W0 and the positions or rests
            g_at = element_pointers(record, row, column, 5, TYPE_5, g_base, ACCESS)
        elif DECAY == 2 or ROUNDS != 0:
            g_at = element_pointers(record, row, column, 4, TYPE_4, g_base, ACCESS)
        else:
            g_at = element_pointers(record, row, column, 3, TYPE_3, g_base, ACCESS)
        counted = tl.where(update_momentum != 0, stored, False)
        m = tl.load(m_at, mask=counted).to(tl.float32)
        old_m = m
        m = _new_momentum(m, g_at, o, written, weight + group, SUMS, FEEDBACK)
        tl.store(m_at, m.to(TYPE_2), mask=written)
        if COLLECTS:
            new_m = tl.where(written, m.to(TYPE_2).to(tl.float32), old_m)
            momentum_square = total_square(new_m, counted, ACCESS)
    elif COLLECTS:
        momentum_square = 0.0
    if DECAY == 3:  # BY_FACTORS
        keep = tl.load(tl.load(sent + 2 * number + 1).to(tl.pointer_type(tl.float32)))
        new = w * keep - o * factor
    elif DECAY == 0:  # ALL
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
    if ROUNDS == 1:  # STOCHASTIC
        numbers = element_numbers(record, row, column, LIST, ACCESS)
        new = _rounded(new, numbers, tl.load(keys + group // 12))  # 12: NUMBERS
    if SPLIT:
        half, rest = split_tile(new)
        tl.store(rest_at, rest, mask=inside)
    else:
        half = new.to(TYPE_0)
        new = half.to(tl.float32)
    tl.store(w_at, half, mask=inside)
    if COLLECTS:
        new = tl.where(inside, new, w)
        squares_at = squares + tl.program_id(0).to(tl.int64) * 3
        tl.store(squares_at, total_square(new - w, stored, ACCESS))
        tl.store(squares_at + 1, total_square(new, stored, ACCESS))
        tl.store(squares_at + 2, momentum_square)


@jit
def _products_kernel(
    W, O, sums, size, tiles, TABLE: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr
):
    """Write sums over tiles of W W, W O and O O to `sums` (N, 3, tiles). `size`: R C."""
    matrix, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    place = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < size
    w = tl.load(matrix_at(W, matrix, size, TABLE, ALIGNED) + place, mask=inside, other=0.0)
    if O.dtype.element_ty == tl.bfloat16:
        w = w.to(tl.bfloat16)
    w = w.to(tl.float32)
    o_at = O + matrix * size
    if ALIGNED:
        # The order of the sums follows the widest access, so O's has to be known: W is in fp32
        # where it is stored, and may be in bf16 where it was sent to
        o_at = tl.multiple_of(o_at, 16)
    o = tl.load(o_at + place, mask=inside, other=0.0).to(tl.float32)
    at = sums + matrix * 3 * tiles + tile
    tl.store(at, tl.sum(w * w))
    tl.store(at + tiles, tl.sum(w * o))
    tl.store(at + 2 * tiles, tl.sum(o * o))


@jit
def _sphere_kernel(sums, radius, keep, step, R, tiles, numbers, groups, BLOCK: tl.constexpr):
    """Write `radius`, `keep` and `step` of `keep_norms`; a program per matrix."""
    matrix = tl.program_id(0).to(tl.int64)
    number = numbers
    if groups is not None:
        number += tl.load(groups + matrix)
    lr = tl.load(number)
    r = tl.load(radius + matrix * R)
    # Every thread has read the radius before any writes it
    tl.debug_barrier()
    start = sums + matrix * 3 * tiles
    ww = total_of(start, tiles, BLOCK)
    wo = total_of(start + tiles, tiles, BLOCK)
    oo = total_of(start + 2 * tiles, tiles, BLOCK)
    r = tl.where(r > 0, r, tl.sqrt(ww))
    length = tl.where(oo > 0, lr * r * inverse(oo), oo)
    new = ww - 2.0 * length * wo + length * length * oo
    # NaN stays NaN
    factor = tl.where(new <= 0, 0.0, r * inverse(new))
    tl.store(keep + matrix, factor)
    tl.store(step + matrix, factor * length)
    for first in range(0, R, BLOCK):
        row = first + tl.arange(0, BLOCK)
        tl.store(radius + matrix * R + row, tl.zeros((BLOCK,), dtype=tl.float32) + r, mask=row < R)


SCALED_DTYPES = torch.float32, torch.bfloat16, torch.float16


class ScaledWeights:
    """Multiplies many weights in place by a factor for each row, or for each column, in fp32 and
    rounded once: a launch for each dtype and access (`Launch.access`). Needs Triton, and weights of
    `SCALED_DTYPES`, no two of which share memory.
    """

    def __init__(
        self, W: Sequence[torch.Tensor], firsts: Sequence[tuple[int, int]], factors: torch.Tensor
    ) -> None:
        """`W`: weights of one or two dims, of any strides. `firsts`: of each weight, (index of its
        first factor, dim along which factors follow each other). `factors`: fp32, at a fixed
        address, read by each call.
        """
        matrices = [w if w.ndim == 2 else w.unsqueeze(0) for w in W]
        # Index of the first factor, steps of the index from row to row and from column to column
        places = [
            (first, int(dim < w.ndim - 1), int(dim == w.ndim - 1))
            for w, (first, dim) in zip(W, firsts)
        ]
        self.factors = factors
        self.launches = bind([matrices], keep_rows=True) if W else []
        self.of_launches = []  # places of each record, whether factors of any follow columns
        for launch in self.launches:
            own = [places[origin] for origin in launch.origins.tolist()]
            table = torch.tensor(own, dtype=torch.int64, device="cpu")
            self.of_launches.append((table.to(factors.device), any(one[2] for one in own)))

    def __call__(self) -> None:
        """Multiply all weights by the factors."""
        for launch, (places, is_across) in zip(self.launches, self.of_launches):
            run(_scale_kernel, launch, self.factors, places, ACROSS=is_across)


@jit
def _scale_kernel(
    records,
    blocks,
    factors,
    places,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCESS: tl.constexpr,
    TYPE_0: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Compute `ScaledWeights` for a block of elements. List of the table: W. `places`: of each
    record, see the constructor. ACROSS: factors of any weight follow its columns.
    """
    record, row, column, inside = locate(records, blocks, FIELDS, BLOCK, ACCESS)
    place = places + tl.load(blocks + tl.program_id(0).to(tl.int64) * 2) * 3
    if ACROSS:
        number = tl.load(place) + row * tl.load(place + 1) + column * tl.load(place + 2)
        factor = tl.load(factors + number, mask=inside, other=1.0)
    else:
        # Of VECTORS: one for each vector
        factor = tl.load(factors + tl.load(place) + row, mask=row < tl.load(record), other=1.0)
    at = element_pointers(record, row, column, 0, TYPE_0, 0, ACCESS)
    w = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (w * factor).to(TYPE_0), mask=inside)

"""The phases of a rule on the tensors of a bucket: `before` and `after` on stacks of whole
matrices, `update` and `write` on pieces.

Pieces of rules without fused kernels are computed one at a time. Elementwise functions give an
element equal bits in any piece, so a matrix may be cut in any way; on CPUs in whole vectors only
(`in_whole_vectors`).

Rules with a selection (newton_schulz/selection.py) orthogonalize only some rows or columns.
`SelectedStack` selects from whole matrices, at the owner. `SelectedPieces`, `PackSelected` and
`WeightUpdateSelected` select from stored pieces, in layouts where every rank can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..kernels.elementwise.momentum import MomentumForm, Pack, copy_torch, gradients_or_momenta
from ..kernels.elementwise.multi_tensor import (
    NUMBERS,
    Skip,
    Source,
    Squares,
    rows_of,
    write_momentum_squares,
    write_squares,
)
from ..kernels.elementwise.row_scattered import ScatteredRows
from ..kernels.elementwise.weight_update import ALL, StochasticRounding, WeightUpdate
from ..kernels.launch.precompile import in_dry_run
from ..kernels.quantized.momentum import QuantizedMomentum, UpdateWithMomentum
from ..kernels.weights.split import wide_copies, wide_weight, wide_weights, write_weight
from ..newton_schulz.selection import Block, Selection, choose, gather, scatter, starts_of
from .rule import Numbers, Rule, Units, overrides, rule_name, sends_signs, writes_weights

Stack = torch.Tensor | ScatteredRows
# (G, M, index of the group) -> (U, the new M)
Update = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
# (W, O, scale, numbers that the owner has sent, index of the group) -> the new W
Write = Callable[[torch.Tensor, torch.Tensor, float, Mapping[str, torch.Tensor], int], torch.Tensor]

# Rows and columns that `in_whole_vectors` passes at once: no more elements than torch gives to one
# thread, because threads divide a tensor anywhere
TILE = 64, 512
LANES = 64  # a multiple of the elements that torch's CPU functions take at a time: two vectors


class Phases:
    """A rule, with the numbers of the live groups that are stepped together."""

    def __init__(
        self,
        rule: Rule,
        groups: Sequence[Mapping[str, Any]],
        scalars: torch.Tensor,
        is_8bit: bool = False,
    ) -> None:
        """`groups`: live groups, of equal options. `scalars`: `device_scalars` of all groups, fp32
        on the device, NUMBERS elements each. `is_8bit`: momenta are `QuantizedView`s.
        """
        self.rule = rule
        self.is_8bit = is_8bit
        self.group = groups[0]
        self.scalars = scalars
        # By index of the group; views of `scalars`
        self.numbers = [Numbers(rule, group, s) for group, s in zip(groups, scalars.split(NUMBERS))]
        self.has_before = overrides(rule, "before")
        self.has_after = overrides(rule, "after")
        self.has_update = overrides(rule, "update")

    def pack(
        self, *arguments: Any, squares: Squares | None = None
    ) -> Pack | PackByRule | QuantizedMomentum:
        """Bind phase 1; arguments of `Pack`."""
        if self.is_8bit:
            signs = sends_signs(self.group)
            return QuantizedMomentum(*arguments, signs=signs, squares=squares)
        if not self.has_update:
            return Pack(*arguments, signs=sends_signs(self.group), squares=squares)
        return PackByRule(self._update, *arguments, squares=squares)

    def weight_update(
        self, sent: Sequence[Mapping[str, torch.Tensor]], *arguments: Any, **forms: Any
    ) -> AnyWeightUpdate:
        """Bind phase 3; `sent`: numbers for each rectangle, then arguments of `WeightUpdate`.
        `forms`: further arguments of `WeightUpdate`, the forms of decay, momentum and rounding;
        rules that write weights have one form.
        """
        W, O, scales, skip, M, sources, gradients, groups = arguments
        if not self.is_8bit or M is None:
            return self._weight_update(sent, *arguments, **forms)
        # Refuses "feedback", with which M depends on O
        momentum = QuantizedMomentum(
            M,
            None,
            sources,
            gradients,
            skip,
            groups,
            forms["momentum_form"],
            squares=forms.get("squares"),
        )
        update = self._weight_update(sent, W, O, scales, skip, None, (), (), groups, **forms)
        return UpdateWithMomentum(update, momentum)

    def _weight_update(
        self, sent: Sequence[Mapping[str, torch.Tensor]], *arguments: Any, **forms: Any
    ) -> WeightUpdate | WeightUpdateByRule:
        """Bind phase 3 without 8-bit momenta; arguments of `weight_update`. Raises ValueError for a
        form of decay, momentum or rounding if the rule writes weights by formulas of its own.
        """
        rule = self.rule
        # Validation has refused these forms, but a group may have changed in between
        rounding = forms.get("rounding")
        has_form = forms.get("momentum_form") == "sum" or forms.get("decay", ALL) != ALL
        has_form = has_form or isinstance(rounding, StochasticRounding)
        if writes_weights(rule) and has_form:
            raise ValueError(
                f"rule {rule_name(type(rule))!r} has no other form of decay, momentum or rounding"
            )
        if rule.fused:
            keys = zip(("factors", "keeps"), rule.write_factors)
            factors = {key: [one[name] for one in sent] for key, name in keys}
            return WeightUpdate(*arguments, **forms, **factors)
        if not writes_weights(rule):
            return WeightUpdate(*arguments, **forms)
        squares = forms.get("squares")
        rests = () if rounding is None else rounding.rests
        return WeightUpdateByRule(
            self._write, self._update, sent, rests, *arguments, squares=squares
        )

    def _update(
        self, G: torch.Tensor, M: torch.Tensor, group: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call `Rule.update` with the numbers of a group, and check its results."""

        def call(G: torch.Tensor, M: torch.Tensor, sent: object) -> tuple[torch.Tensor, ...]:
            U, new = self.rule.update(G, M, self.numbers[group])
            self._check("update", U, G)
            self._check("update", new, G)
            return U, new

        U, M = in_whole_vectors(call, (G, M))
        return U, M

    def _write(
        self,
        W: torch.Tensor,
        O: torch.Tensor,
        scale: float,
        sent: Mapping[str, torch.Tensor],
        group: int,
    ) -> torch.Tensor:
        """Call `Rule.write` with the numbers of a group, and check its result."""

        def call(
            W: torch.Tensor, O: torch.Tensor, sent: Mapping[str, torch.Tensor]
        ) -> tuple[torch.Tensor]:
            new = self.rule.write(W, O, scale, sent, self.numbers[group])
            self._check("write", new, W)
            return (new,)

        return in_whole_vectors(call, (W, O), sent, self.rule.sends)[0]

    def _check(self, method: str, result: object, like: torch.Tensor) -> None:
        """Raise ValueError unless a method has returned a tensor with the shape of `like`."""
        shape = getattr(result, "shape", None)
        if shape != like.shape or not result.is_floating_point():
            name = f"{rule_name(type(self.rule))}.{method}"
            raise ValueError(
                f"{name} returned {type(result).__name__} of shape "
                f"{None if shape is None else tuple(shape)} for a tensor of shape "
                f"{tuple(like.shape)}: it has to return a floating-point tensor of equal shape"
            )

    def bind(
        self, wide: Mapping[str, torch.Tensor], scale: float, groups: torch.Tensor | None
    ) -> Units:
        """Return the `Units` that `before` and `after` read beside a stack (N, R, C): views, bound
        once.

        `wide`: tensors in fp32 by kind, see `execution.workspace.Stacks`. `groups`: first element
        in the numbers of each matrix's group, (N,) int64 on the device; None: group 0.
        """
        rule = self.rule
        return Units(
            self.numbers[0],
            {state.key: wide[state.key] for state in rule.state},
            wide["weight"] if rule.reads_weight else None,
            {name: wide[f"sent:{name}"] for name in rule.sends},
            scale,
            self.scalars,
            groups,
        )

    def call(self, method: str, stack: Stack, units: Units) -> None:
        """Call `before` or `after` on a stack (N, R, C), in place. `units`: of `bind`."""
        rule = self.rule
        run = getattr(rule, method)
        if rule.fused:
            # Kernels read `Units.scalars` and `Units.groups`
            run(stack, units)
            return
        if in_dry_run():
            return
        N = stack.shape[0]
        # On CPUs one at a time: bits of an element may depend on its place (`in_whole_vectors`)
        together = rule.batched and stack.device.type != "cpu"
        for some in [slice(None)] if together else [slice(i, i + 1) for i in range(N)]:
            part = self._copy(units, some)
            result = run(stack[some].to(torch.float32, copy=True), part)
            self._check(method, result, stack[some])
            stack[some] = result
            for whole, new in ((units.state, part.state), (units.sent, part.sent)):
                for key, t in new.items():
                    whole[key][some] = t

    def _copy(self, units: Units, some: slice) -> Units:
        """Return the `Units` of some matrices, in memory of their own: the bits of torch's sums may
        depend on where a matrix begins.
        """
        part = replace(
            units,
            state={key: t[some].clone() for key, t in units.state.items()},
            weight=None if units.weight is None else units.weight[some].clone(),
            sent={key: t[some].clone() for key, t in units.sent.items()},
            groups=None if units.groups is None else units.groups[some],
        )
        return self._with_numbers(part)

    def _with_numbers(self, units: Units) -> Units:
        """Return `units` with the numbers of each matrix's group, gathered in every step because
        schedules change them.
        """
        if units.groups is None:
            return units
        scalars = self.scalars.view(-1, NUMBERS)[units.groups // NUMBERS]
        return replace(units, numbers=Numbers(self.rule, self.group, scalars))


def in_whole_vectors(
    call: Callable[..., tuple[torch.Tensor, ...]],
    tensors: Sequence[torch.Tensor],
    sent: Mapping[str, torch.Tensor] | None = None,
    sends: Mapping[str, str] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the results of an elementwise `call(*tensors, sent)` for tensors (r, c).

    On CPUs torch computes the elements after the last whole vectors by other code. Some functions,
    such as sigmoid, softplus and powers, then give other bits. So that the bits of an element do
    not depend on the piece, the call gets parts of the tensors with zeros up to whole vectors.
    `sent`: name -> numbers (r, 1), (1, c) or (1, 1). `sends`: name -> "row", "column" or "matrix".
    On other devices the call gets the tensors themselves.
    """
    sent, (rows, cols) = sent or {}, tensors[0].shape
    if tensors[0].device.type != "cpu" or not tensors[0].numel():
        return call(*tensors, sent)
    results: tuple[torch.Tensor, ...] = ()
    for i in range(0, rows, TILE[0]):
        for j in range(0, cols, TILE[1]):
            height, width = min(TILE[0], rows - i), min(TILE[1], cols - j)
            down, right = slice(i, i + height), slice(j, j + width)
            cuts = {"row": (down, slice(None)), "column": (slice(None), right), "matrix": ...}
            numbers = {
                key: _padded(t[cuts[sends[key]]], sends[key] == "row", sends[key] == "column")
                for key, t in sent.items()
            }
            found = call(*(_padded(t[down, right]) for t in tensors), numbers)
            results = results or tuple(t.new_empty(rows, cols) for t in found)
            for whole, part in zip(results, found):
                whole[down, right] = part[:height, :width]
    return results


def _padded(t: torch.Tensor, rows: bool = True, columns: bool = True) -> torch.Tensor:
    """Return a copy of t (r, c) with zeros up to multiples of LANES rows and columns."""
    sizes = [
        -(-size // LANES) * LANES if pads else size for size, pads in zip(t.shape, (rows, columns))
    ]
    padded = t.new_zeros(sizes)
    padded[: t.shape[0], : t.shape[1]] = t
    return padded


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
        form: MomentumForm = "ema",
        squares: Squares | None = None,
    ) -> None:
        """Arguments of `Pack`, after `update`. `form` is "ema": validation refuses "sum" and
        "bias_corrected", and "feedback" is of rules without an `update`.
        """
        self.update = update
        self.M = list(M)
        self.U = list(U)
        self.sources = list(sources)
        self.skip = skip
        self.groups = list(groups or [0] * len(self.M))
        self.squares = squares
        self.rows = rows_of(squares, None, len(self.M), self.M[0].device if self.M else None)

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
        if in_dry_run():
            return
        write_updates(self, tensors, self.U, update_momentum)
        if self.squares is not None:
            write_momentum_squares(*self.rows, self.M, update_momentum)


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
        rests: Sequence[torch.Tensor | None],
        W: Sequence[torch.Tensor],
        O: Sequence[torch.Tensor],
        scales: Sequence[float],
        skip: Skip | None = None,
        M: Sequence[torch.Tensor] | None = None,
        sources: Sequence[Source] = (),
        gradients: Sequence[torch.Tensor] = (),
        groups: Sequence[int] | None = None,
        squares: Squares | None = None,
    ) -> None:
        """Arguments of `WeightUpdate`, after `write`, `update`, the numbers `sent` for each
        rectangle, and the rests of split weights (() if none is split).
        """
        self.write = write
        self.update = update
        self.sent = list(sent)
        self.W = list(W)
        self.rests = list(rests) or [None] * len(self.W)
        self.O = list(O)
        self.scales = list(scales)
        self.skip = skip
        self.M = M
        self.sources = sources
        self.groups = list(groups or [0] * len(self.W))
        self.squares = squares
        self.rows = rows_of(squares, None, len(self.W), self.W[0].device if self.W else None)

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
        if in_dry_run():
            return
        writes_momenta = self.M is not None and update_momentum
        if writes_momenta:
            write_updates(self, tensors, (), True)
        old = [] if self.squares is None else wide_copies(self.W, self.rests)
        for i, (w, o, rest) in enumerate(zip(self.W, self.O, self.rests)):
            wide = wide_weight(w, rest)
            new = self.write(wide, o.float(), self.scales[i], self.sent[i], self.groups[i])
            write_weight(w, rest, new, None if self.skip is None else self.skip.is_updated(i))
        if self.squares is not None:
            W = wide_weights(self.W, self.rests)
            write_squares(*self.rows, old, W, self.M if writes_momenta else None)


class SelectedStack:
    """A stack of whole matrices at their owner, and the selected part, for Newton-Schulz."""

    def __init__(self, whole: torch.Tensor, part: torch.Tensor, selection: Selection) -> None:
        """`whole`: (N, R, C). `part`: (N, k, C) if rows are selected, (N, R, k) if columns are."""
        self.whole = whole
        self.part = part
        self.axis = selection.axis(*whole.shape[1:])
        self.blocks = selection.blocks_of(whole.shape[1 + self.axis])
        self.starts = starts_of(self.blocks, whole.device)
        self.chosen: torch.Tensor | None = None  # (N, k), between `select` and `write`

    def select(self) -> None:
        """Write the selected rows or columns of U to `part`."""
        self.chosen = choose(self.whole, self.axis, self.blocks, self.starts)
        gather(self.whole, self.axis, self.chosen, self.part)

    def call(self, phases: Phases, method: str, units: Units) -> None:
        """Call a phase on `part`, with the state of the selected rows."""
        index = self.chosen.unsqueeze(2)
        state = {key: t.gather(1, index) for key, t in units.state.items()}
        phases.call(method, self.part, replace(units, state=state))
        for key, t in state.items():
            units.state[key].scatter_(1, index, t)

    def write(self) -> None:
        """Write O of `part` to `whole`, see [Note: unselected elements]."""
        scatter(self.part, self.axis, self.chosen, self.whole)
        self.chosen = None


@dataclass(frozen=True)
class SelectedPieces:
    """Pieces of equal shape stored by a rank, from each of which equally many rows or columns are
    selected.

    `whole` and `part` are memory of a single phase: all of U or O, and the selected part.
    """

    axis: int  # 0: rows are selected, 1: columns
    blocks: list[Block]  # of the rows or columns of a piece
    starts: torch.Tensor  # first row or column of each block, see `starts_of`
    whole: torch.Tensor  # (n, r, c)
    part: torch.Tensor  # (n, k, c) or (n, r, k)
    chosen: list[torch.Tensor]  # (k,) int64 for each piece: the selection, from `select` on

    def select(self) -> torch.Tensor:
        """Select from U in `whole`; return the selection of all pieces, (n, k)."""
        chosen = choose(self.whole, self.axis, self.blocks, self.starts)
        torch._foreach_copy_(self.chosen, chosen.unbind())
        return chosen

    def spread(self, parts: Sequence[torch.Tensor], index: torch.Tensor) -> None:
        """Write O to `whole` from the selected part of each piece. `index`: memory for the
        selection of all pieces, (n, k) int64.
        """
        torch._foreach_copy_(self.part.unbind(), parts)
        torch.stack(self.chosen, out=index)
        scatter(self.part, self.axis, index, self.whole)


class PackSelected:
    """`Pack` into whole pieces, then copies of the selected part of each piece."""

    def __init__(
        self,
        pack: Pack,
        pieces: Sequence[SelectedPieces],
        to: Sequence[Sequence[torch.Tensor]] = (),
        state: Sequence[Sequence[tuple]] = (),
    ) -> None:
        """`pack`: writes U to `SelectedPieces.whole`. `to`: views of the selected parts of U of
        each of `pieces`; () to select only. `state`: for each of `pieces`, and each state of the
        rule, (views where it is stored, views of its selected rows).
        """
        self.pack = pack
        self.pieces = list(pieces)
        self.to = list(to)
        self.state = list(state)
        # Memory for the state of all pieces, (n, r, 1), and for that of selected rows, (n, k, 1)
        self.rows = [
            [
                tuple(_memory_for(views, stored[0].dtype) for views in (stored, sent))
                for stored, sent in states
            ]
            for states in self.state
        ]

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        addresses: torch.Tensor | None,
        weight: torch.Tensor,
        nesterov: bool,
        update_momentum: bool = False,
    ) -> None:
        """Write the selected parts of U and of state; arguments as for `Pack`. M stays."""
        self.pack(tensors, addresses, weight, False, False)
        chosen = [pieces.select() for pieces in self.pieces]
        pieces_and_state = zip(self.pieces, chosen, self.to, self.state, self.rows)
        for pieces, of, to, states, memory in pieces_and_state:
            gather(pieces.whole, pieces.axis, of, pieces.part)
            torch._foreach_copy_(to, pieces.part.unbind())
            for (stored, sent), (whole, rows) in zip(states, memory):
                torch.stack(stored, out=whole)
                torch.gather(whole, 1, of.unsqueeze(2), out=rows)
                torch._foreach_copy_(sent, rows.unbind())


def _memory_for(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for a stack of tensors of equal shape."""
    return tensors[0].new_empty((len(tensors), *tensors[0].shape), dtype=dtype)


class WeightUpdateSelected:
    """`WeightUpdate` from the selected parts of O."""

    def __init__(
        self,
        update: WeightUpdate,
        pieces: Sequence[SelectedPieces],
        parts: Sequence[Sequence[torch.Tensor]],
        pack: PackSelected | None = None,
    ) -> None:
        """`update`: reads O from `SelectedPieces.whole`. `parts`: of O, for each of `pieces`.
        `pack`: called first, to select from pieces of which nothing was packed in the step.
        """
        self.update = update
        self.pieces = list(pieces)
        self.parts = list(parts)
        self.pack = pack
        self.index = [_memory_for(pieces.chosen, torch.int64) for pieces in self.pieces]

    def __call__(
        self,
        factors: torch.Tensor,
        tensors: Sequence[torch.Tensor] = (),
        addresses: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        update_momentum: bool = True,
    ) -> None:
        """Write W and M, as `WeightUpdate`."""
        if self.pack is not None:
            self.pack(tensors, addresses, weight, False)
        for pieces, parts, index in zip(self.pieces, self.parts, self.index):
            pieces.spread(parts, index)
        self.update(factors, tensors, addresses, weight, update_momentum)


class SaveSelected:
    """`Copy` of the state of selected rows back to where it is stored."""

    def __init__(
        self,
        chosen: Sequence[torch.Tensor],
        stored: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        skip: Skip | None,
    ) -> None:
        """`chosen`: selected rows of each piece. `stored`: state of the piece, (r, 1). `parts`: of
        its selected rows, (k, 1).
        """
        self.chosen = list(chosen)
        self.stored = list(stored)
        self.parts = list(parts)
        self.skip = skip

    def __call__(self) -> None:
        """Write the state, but for rectangles of `skip`."""
        if in_dry_run():
            return
        new = [s.index_copy(0, k, part) for s, k, part in zip(self.stored, self.chosen, self.parts)]
        copy_torch(self.stored, new, self.skip)


AnyPack = Pack | PackByRule | QuantizedMomentum | PackSelected
AnyWeightUpdate = WeightUpdate | WeightUpdateByRule | UpdateWithMomentum | WeightUpdateSelected

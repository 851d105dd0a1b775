"""Placement of the state of each parameter: in host memory, or on the device.

`HostState.pack` moves state to its place, before a step is bound. State per element is offloaded.
State per row, column or matrix, and step counts, stay on the device: together a small part.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from ...params.config import MuonConfig
from ...params.dtensor import is_dtensor, local_of, with_local
from ...params.layout import this_rank
from ...params.units import Split, box_shape
from ...params.validation import device_of
from ...planning.planner import Plan
from ...planning.rank_plan import Piece
from ...rules.rule import group_state_dtype, is_offloaded, state_device_and_dtype, state_keys
from .memory import HostBlocks, HostMemory, is_dense

Strides = tuple[int, ...]


class KeptBytes:
    """The bytes of state that stay on the device: the first states that fit, in order of plans."""

    def __init__(self, offload_state: bool | int) -> None:
        """`offload_state`: the option; True: no byte stays."""
        self.left = 0 if offload_state is True else int(offload_state)

    def keeps(self, nbytes: int) -> bool:
        """Whether the next state, of `nbytes`, stays on the device."""
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True


StateId = tuple[int, str]  # (id of a parameter, key of its state)


class Residents:
    """The states that stay on the device. The decision on a state is kept: parameters that are
    stepped later do not drive a state out.
    """

    def __init__(self, offload_state: bool | int) -> None:
        self.bytes = KeptBytes(offload_state)
        self.known: dict[StateId, tuple[int, bool]] = {}  # (bytes, whether it stays)

    def has(self, state: StateId, nbytes: int) -> bool:
        """Whether a state of `nbytes` stays on the device."""
        if self.known.get(state, (None,))[0] != nbytes:
            self._forget(state)
            self.known[state] = nbytes, self.bytes.keeps(nbytes)
        return self.known[state][1]

    def forget_all_but(self, params: Collection[int]) -> None:
        """Forget parameters whose ids are not in `params`."""
        for state in [one for one in self.known if one[0] not in params]:
            self._forget(state)

    def _forget(self, state: StateId) -> None:
        """Forget a state; its bytes are free for others."""
        nbytes, stays = self.known.pop(state, (0, False))
        self.bytes.left += nbytes if stays else 0


@dataclass(frozen=True)
class Entry:
    """A state of a parameter that belongs into host memory."""

    param: torch.Tensor
    key: str
    local: torch.Tensor
    strides: Strides  # in host memory
    order: tuple  # sort key: neighbours are launched together

    @property
    def id(self) -> StateId:
        """The parameter and the key."""
        return id(self.param), self.key


class HostState:
    """The host memory of an optimizer's state.

    [Note: a place for each state]
    A state gets a place in host memory when its parameter is first stepped, and stays there: steps
    of other parameters copy nothing. A state that lies elsewhere, as after `load_state_dict`, gets
    a new place: the old place may be part of a state dict that the user keeps. The first block also
    has room for the state of parameters that have no gradient yet.
    """

    def __init__(self, options: MuonConfig) -> None:
        self.options = options
        self.memory = HostBlocks()
        self.elements = 0  # of parameters whose state in host memory the bound step reads
        # Places reserved for states that do not exist yet: (block, number of the place, bytes)
        self.unused: dict[StateId, tuple[HostMemory, int, int]] = {}

    @functools.cached_property
    def residents(self) -> Residents:
        """The states that stay on the device. Made at the first use, since the constructor runs
        before options are checked.
        """
        return Residents(self.options.offload_state)

    def pack(self, plans: Sequence[Plan], state: dict, groups: Sequence[dict]) -> None:
        """Move all state of `plans` to host memory or to the device. Replaces entries of `state` by
        views of host memory. `groups`: all parameter groups. No communication. The host must have
        waited for copies of the last step.
        """
        self._forget_others({id(p) for group in groups for p in group["params"]})
        device = device_of(groups)
        entries = sorted(self._entries(plans, state, device), key=lambda entry: entry.order)
        self.elements = sum({id(one.param): one.local.numel() for one in entries}.values())
        moved = self._elsewhere(entries)
        new = {one.id: one.local.nbytes for one in moved if not self._has_room(one)}
        if new:
            new |= self._later(plans, state, groups)
            block = self.memory.add(list(new.values()), device)
            for number, (one, nbytes) in enumerate(new.items()):
                self.unused[one] = block, number, nbytes
        for entry in moved:
            block, number, _ = self.unused.pop(entry.id)
            shape, dtype = entry.local.shape, entry.local.dtype
            place = block.view(number, shape, entry.strides, dtype)
            place.copy_(entry.local)
            _replace(state, entry.param, entry.key, place)
        held = [local_of(t) for of in state.values() for t in _tensors(of)]
        self.memory.drop_others(held, [block for block, _, _ in self.unused.values()])

    def _forget_others(self, params: Collection[int]) -> None:
        """Forget parameters whose ids are not in `params`."""
        self.residents.forget_all_but(params)
        self.unused = {one: at for one, at in self.unused.items() if one[0] in params}

    def _elsewhere(self, entries: Sequence[Entry]) -> list[Entry]:
        """The entries whose state is not in a place of its own in host memory, or has strides other
        than the entry's.
        """
        found, taken = [], set()
        for entry in entries:
            local = entry.local
            block = self.memory.block_of(local)
            has_place = block is not None and block.is_place(local)
            if not has_place or local.stride() != entry.strides or local.data_ptr() in taken:
                found.append(entry)
            taken.add(local.data_ptr())
        return found

    def _has_room(self, entry: Entry) -> bool:
        """Whether a place of the right size is reserved for an entry."""
        return self.unused.get(entry.id, (None, 0, -1))[2] == entry.local.nbytes

    def _later(
        self, plans: Sequence[Plan], state: dict, groups: Sequence[dict]
    ) -> dict[StateId, int]:
        """{state: bytes} of states without a place, of parameters that may be stepped later: plain
        parameters, which a process steps only in steps with a gradient.
        """
        planned = {id(p) for plan in plans for p in plan.params}
        found = {}
        for group, param in ((g, p) for g in groups for p in g["params"]):
            if id(param) in planned or not param.requires_grad or is_dtensor(param):
                continue
            dtype = group_state_dtype(group, self.options.state_dtype)
            for key in filter(is_offloaded, state_keys(group)):
                one, held = (id(param), key), state.get(param, {}).get(key)
                nbytes = param.numel() * state_device_and_dtype(key, param, dtype)[1].itemsize
                has_place = one in self.unused or held is not None and self.memory.holds(held)
                if nbytes and not has_place and not self.residents.has(one, nbytes):
                    found[one] = nbytes
        return found

    def _entries(self, plans: Sequence[Plan], state: dict, device: torch.device) -> Iterator[Entry]:
        """Yield a state that goes to host memory; move all others to the device."""
        pieces = [_pieces_by_param(plan) for plan in plans]
        for at, plan, i, key_number, key in _states(plans):
            param = plan.params[i]
            local = local_of(state[param][key])
            position, of_param = pieces[at].get(i, (i, []))
            strides = None
            if local.numel() and not self.residents.has((id(param), key), local.nbytes):
                first = local.stride() if self.memory.holds(local) else None
                strides = _dense_strides(plan, i, key, local, of_param, first)
            if strides is not None:
                yield Entry(param, key, local, strides, (at, key_number, position, i))
            elif local.device != device:
                _replace(state, param, key, local.to(device))


def _tensors(entries: object) -> list[torch.Tensor]:
    """The tensors in the state of a parameter."""
    values = entries.values() if isinstance(entries, dict) else ()
    return [value for value in values if isinstance(value, torch.Tensor)]


def _states(plans: Sequence[Plan]) -> Iterator[tuple[int, Plan, int, int, str]]:
    """Yield (number of the plan, plan, index of a parameter, number of the key, key) of each state
    per element.
    """
    for at, plan in enumerate(plans):
        for i in range(len(plan.params)):
            keys = filter(is_offloaded, state_keys(plan.group_at(i)))
            yield from ((at, plan, i, number, key) for number, key in enumerate(keys))


def _replace(state: dict, param: torch.Tensor, key: str, local: torch.Tensor) -> None:
    """Put a local tensor in place of an entry of the state, in the placements of the entry."""
    held = state[param][key]
    state[param][key] = with_local(held, local) if is_dtensor(held) else local


def _pieces_by_param(plan: Plan) -> dict[int, tuple[int, list[Piece]]]:
    """{index of a parameter: (position of its first piece in a step, pieces on this rank)}."""
    found: dict[int, tuple[int, list[Piece]]] = {}
    number = 0
    for bucket, rank_plan in plan.rank_plans or ():
        stored = rank_plan.stored
        if bucket.route in ("exchange", "own"):
            # Pieces in the order in which launches read their state
            sets = rank_plan.piece_sets
            in_order = (*sets.sent, *sets.during_inbound, *sets.after_inbound, *sets.replicas)
            stored = (*in_order, *(p for p in stored if p.kind != "matrix"))
        for piece in stored:
            found.setdefault(piece.matrix.param, (number, []))[1].append(piece)
            number += 1
    return found


def _dense_strides(
    plan: Plan,
    number: int,
    key: str,
    local: torch.Tensor,
    pieces: Sequence[Piece],
    first: Strides | None = None,
) -> Strides | None:
    """Strides of a state in host memory with which each piece is dense, hence one range of bytes.
    None if no strides do that, as for pieces that are blocks of rows and of columns at once.
    `first`: strides to try first.
    """
    weight = local_of(plan.params[number])
    split = plan.split(number)
    natural = torch.empty(local.shape, device="meta").stride()
    is_alike = weight.shape == local.shape and is_dense(weight)
    if is_alike and split.view != "flatten":
        natural = weight.stride()
    found = [natural] if first is None else [first, natural]
    # Not for 8-bit momentum, which kernels read by blocks of columns
    if split.view != "flatten" and local.ndim > 1 and local.is_floating_point():
        found += _strides_of_matrices(local.shape, split)
    of_key = [p for p in pieces if p.kind in ("matrix", key)]
    for strides in found:
        tensor = torch.empty_strided(local.shape, strides, device="meta")
        if all(is_dense(_view(plan, tensor, piece)) for piece in of_key):
            return tuple(strides)
    return None


def can_be_offloaded(plan: Plan, number: int, rank: int, dtype: torch.dtype) -> bool:
    """Whether `_dense_strides` finds strides for the state per element of a parameter at a rank.
    `dtype`: of the state. For reports, which have no state.
    """
    layout, split = plan.layouts[number], plan.split(number)
    units = range(layout.unit_count)
    boxes = [box for unit in units for box, _ in layout.unit_boxes(rank, unit)]
    R, C = box_shape(layout.boxes[rank][-2:])
    sizes = {(r1 - r0, c1 - c0) for (r0, r1), (c0, c1) in boxes}
    by_rows = all(c == C or r == 1 for r, c in sizes)
    by_columns = all(r == R or c == 1 for r, c in sizes)
    if split.view != "flatten" and dtype.is_floating_point:
        return by_rows or by_columns
    weight = local_of(plan.params[number])
    if split.view == "flatten" or not is_dense(weight):
        weight = torch.empty(weight.shape, device="meta")
    rows, columns = split.matrices(weight).stride()[-2:]
    return by_rows and columns == 1 or by_columns and rows == 1


def _strides_of_matrices(shape: Sequence[int], split: Split) -> list[Strides]:
    """Strides of a tensor whose `split.matrices` are contiguous, and of one whose transposed
    matrices are.
    """
    # The order of the dims in `split.matrices`, found from a tensor whose strides are all different
    labels = torch.empty_strided(shape, [1 << d for d in range(len(shape))], device="meta")
    dims = [stride.bit_length() - 1 for stride in split.matrices(labels).stride()]
    found = []
    for order in (dims, [*dims[:-2], dims[-1], dims[-2]]):
        strides, step = [0] * len(shape), 1
        for dim in reversed(order):
            strides[dim] = step
            step *= max(1, shape[dim])
        found.append(tuple(strides))
    return found


def _view(plan: Plan, local: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The view of a piece in a local state, as by `Store.states`."""
    rank, number = this_rank(), piece.matrix.param
    layouts = {**plan.state_layouts, "matrix": plan.layouts}
    layout = layouts[piece.kind][number]
    selected = plan.selected.get(piece.kind)
    if selected is not None and selected[number].at_source:
        # The piece to send is a part of the stored piece, and state lies at the stored piece
        rows, columns = selected[number].whole_shape(rank, piece.matrix.unit, piece.start)
        piece = piece._replace(box=((0, rows), (0, columns)))
    lead = zip(piece.matrix.at, layout.boxes[rank])
    matrix = plan.split(number).matrices(local)[tuple(i - start for i, (start, _) in lead)]
    return matrix[layout.place_of(rank, piece.start, piece.shape)]

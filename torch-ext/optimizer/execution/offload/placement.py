"""Where the state of each parameter lies: in host memory, or on the device.

`HostState.pack` moves state there, before a step is bound. State per element is offloaded; state
per row, column or matrix, and step counts, stay on the device: together a small part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ...params.dtensor import is_dtensor, local_of, with_local
from ...params.layout import this_rank
from ...params.units import Split
from ...planning.planner import Plan
from ...planning.rank_plan import Piece
from ...rules.rule import is_offloaded, state_keys
from .memory import HostMemory, is_dense

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


@dataclass(frozen=True)
class Entry:
    """A state of a parameter that host memory has a place for."""

    param: torch.Tensor
    key: str
    strides: Strides  # of the place
    order: tuple  # sort key: neighbours are launched together

    def form(self, state: Mapping) -> tuple:
        """(shape, strides, dtype) of the place."""
        local = local_of(state[self.param][self.key])
        return tuple(local.shape), self.strides, local.dtype


class HostState:
    """The host memory of an optimizer's state."""

    def __init__(self, offload_state: bool | int) -> None:
        self.offload_state = offload_state
        self.memory: HostMemory | None = None
        self.forms: list[tuple] = []  # of the places in `memory`

    def pack(self, plans: Sequence[Plan], state: dict, device: torch.device) -> None:
        """Put all state of `plans` where it belongs, and views of host memory in place of entries
        of `state`. No communication. The host must have waited for copies of the last step.
        """
        entries = sorted(self._entries(plans, state, device), key=lambda entry: entry.order)
        forms = [entry.form(state) for entry in entries]
        places = self._places(forms)
        held = [local_of(state[entry.param][entry.key]) for entry in entries]
        if not places or not all(map(_is_at, held, places)):
            # [Note: new memory for new state]
            # Never a copy into memory that is in use: a place of it may be the state of a parameter
            # that is in no plan now, or part of a state dict that somebody keeps
            sizes = [math.prod(shape) * dtype.itemsize for shape, _, dtype in forms]
            # State in the memory of before keeps that memory alive until it is copied
            self.memory, self.forms = HostMemory(sizes, device), forms
            places = self._places(forms)
            for entry, local, place in zip(entries, held, places):
                place.copy_(local)
                _replace(state, entry.param, entry.key, place)

    def _places(self, forms: Sequence[tuple]) -> list[torch.Tensor]:
        """A view of the memory for each of `forms`; [] if the memory has other places."""
        if forms != self.forms:
            return []
        return [self.memory.view(number, *form) for number, form in enumerate(forms)]

    def _entries(self, plans: Sequence[Plan], state: dict, device: torch.device) -> Iterator[Entry]:
        """Yield a state that goes to host memory; move all others to the device."""
        kept = KeptBytes(self.offload_state)
        pieces = [_pieces_by_param(plan) for plan in plans]
        for at, plan, i, key_number, key in _states(plans):
            param = plan.params[i]
            local = local_of(state[param][key])
            position, of_param = pieces[at].get(i, (i, []))
            strides = None
            if local.numel() and not kept.keeps(local.nbytes):
                strides = _dense_strides(plan, i, key, local, of_param)
            if strides is not None:
                yield Entry(param, key, strides, (at, key_number, position, i))
            elif local.device != device:
                _replace(state, param, key, local.to(device))


def _is_at(local: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether a state lies in a place."""
    return local.data_ptr() == place.data_ptr() and local.stride() == place.stride()


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
            # In the order of launches
            sets = rank_plan.piece_sets
            in_order = (*sets.sent, *sets.during_inbound, *sets.after_inbound, *sets.replicas)
            stored = (*in_order, *(p for p in stored if p.kind != "matrix"))
        for piece in stored:
            found.setdefault(piece.matrix.param, (number, []))[1].append(piece)
            number += 1
    return found


def _dense_strides(
    plan: Plan, number: int, key: str, local: torch.Tensor, pieces: Sequence[Piece]
) -> Strides | None:
    """Strides of a state in host memory with which each piece is dense, so that it is one range of
    bytes; None if there are none: blocks of rows and of columns at once.
    """
    weight = local_of(plan.params[number])
    split = plan.split(number)
    natural = torch.empty(local.shape, device="meta").stride()
    is_alike = weight.shape == local.shape and is_dense(weight)
    if is_alike and split.view != "flatten":
        natural = weight.stride()
    found = [natural]
    # 8-bit momentum is read by blocks of columns
    if split.view != "flatten" and local.ndim > 1 and local.is_floating_point():
        found += _strides_of_matrices(local.shape, split)
    of_key = [p for p in pieces if p.kind in ("matrix", key)]
    for strides in found:
        tensor = torch.empty_strided(local.shape, strides, device="meta")
        if all(is_dense(_view(plan, tensor, piece)) for piece in of_key):
            return tuple(strides)
    return None


def _strides_of_matrices(shape: Sequence[int], split: Split) -> list[Strides]:
    """Strides of a tensor whose `split.matrices` are contiguous, and of one whose transposed
    matrices are.
    """
    # The dims of the matrices, found by strides that no two dims share
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
        # A part is sent, and the whole is stored
        rows, columns = selected[number].whole_shape(rank, piece.matrix.unit, piece.start)
        piece = replace(piece, box=((0, rows), (0, columns)))
    lead = zip(piece.matrix.at, layout.boxes[rank])
    matrix = plan.split(number).matrices(local)[tuple(i - start for i, (start, _) in lead)]
    return matrix[layout.place_of(rank, piece.start, piece.shape)]

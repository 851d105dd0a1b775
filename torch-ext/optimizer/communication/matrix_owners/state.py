"""State of whole matrices at their owners (`state_at_owners`): the place of each matrix's state,
and moves between the owners and the placements of the parameters.

With the option, the owner of a matrix stores the state that a rule reads there. Each rank has one
flat tensor for a parameter and a key: the state of the matrices that the rank owns, row-major, in
the order of `Layout.matrices`. Entry OWNERS_KEY of the parameter's state has the owners, then a
number for the split. With the owners state can move without the plan that chose the owners. The
number keeps state from being moved by the matrices of another split. In state dicts the state
appears as DTensors with the placements of the parameter. `as_placed_dtensors` and `move_to_owners`
are collective: all ranks of a mesh call both together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...params import errors
from ...params.dtensor import is_dtensor, local_of
from ...params.errors import names_in
from ...params.layout import Box, Layout, layout_of, this_rank, zeros_with_placements
from ...params.units import Split, box_shape, splits_of
from ...planning.memory_model import ALIGNMENT
from ...planning.plan import bucket_sort_key, digest_int
from ...rules.rule import OWNERS_KEY, rule_of, state_shape
from ..process_groups import ProcessGroups, gather_integers
from ..store_barrier import wait_for_all

# End of the error message on ranks that waited in vain for other ranks
ADVICE = "Call it on all ranks, or leave out state_at_owners=True (docs/checkpoint.md)"
MISSING, AT_PLACEMENTS = -1, 0  # results of `_location`; state at owners has a number > 0

FlatSlice = tuple[int, tuple[int, int]]  # (first element in the flat tensor, (rows, columns))
MatrixIndex = tuple[tuple[int, ...], int]  # (leading indices, unit) of a matrix of a parameter


@dataclass(frozen=True, eq=False)
class StateEntry:
    """State `key` of a parameter that is a DTensor."""

    param: torch.Tensor
    name: str
    key: str
    layout: Layout  # of the matrices of the state
    split: Split  # how the parameter is cut into matrices


def slices_at(
    rank: int, layout: Layout, owners: Sequence[int], itemsize: int
) -> tuple[dict[MatrixIndex, FlatSlice], int]:
    """Return where a rank stores the state of the matrices that it owns, and the number of elements
    of its flat tensor. `layout`: of the state. `owners`: of `Layout.matrices`. `itemsize`: bytes of
    an element.
    """
    slices, free = {}, 0
    for (at, unit), owner in zip(layout.matrices, owners, strict=True):
        if owner == rank:
            R, C = layout.unit_shapes[unit]
            slices[at, unit] = free, (R, C)
            # Every matrix begins at a multiple of ALIGNMENT, as in stacks: see `ScatteredMatrices`
            free += R * C + -(R * C) % (ALIGNMENT // itemsize)
    return slices, free


def view_of(flat: torch.Tensor, flat_slice: FlatSlice) -> torch.Tensor:
    """Return the state of a matrix, (rows, columns), as a view of the flat tensor of its owner."""
    first, shape = flat_slice
    return flat[first : first + math.prod(shape)].view(shape)


def is_at_owners(state: Mapping[str, torch.Tensor], key: str) -> bool:
    """Whether entry `key` of a parameter's state is the flat tensor of an owner."""
    value = state.get(key)
    is_plain = isinstance(value, torch.Tensor) and not is_dtensor(value)
    return OWNERS_KEY in state and key != OWNERS_KEY and is_plain and value.ndim == 1


def owners_in(state: Mapping[str, torch.Tensor]) -> list[int]:
    """Return the owners of the matrices of a parameter, from entry OWNERS_KEY of its state."""
    return state[OWNERS_KEY].tolist()[:-1]


def check(
    state: Mapping[str, torch.Tensor],
    param: torch.Tensor,
    layouts: Mapping[str, Layout],
    split: Split,
    name: str,
) -> None:
    """Raise RuntimeError if state of a parameter lies at owners from which it cannot be taken.
    `layouts`: key -> layout of the state that the rule reads. `split`: how the parameter is cut.
    """
    for key in [key for key in state if is_at_owners(state, key)]:
        begin = f"{key} of parameter {name} is kept by the owners of its matrices, but"
        if is_dtensor(param) and key not in layouts:
            raise RuntimeError(
                f"{begin} the rule of the parameter's group has changed, and reads no {key}: "
                "delete the entry in the optimizer's `state`, or set the former rule"
            )
        if not (is_dtensor(param) and _matches(state, key, param, layouts[key], split)):
            raise RuntimeError(
                f"{begin} the parameter was resized, cut by another split, replaced by a plain "
                "tensor or moved to other ranks: save state_dict() before such a change, and load "
                "it afterwards, or delete the entry"
            )


def _matches(
    state: Mapping[str, torch.Tensor], key: str, param: torch.Tensor, layout: Layout, split: Split
) -> bool:
    """Whether the flat tensor of this rank, and the owners, are those of `layout` and `split`."""
    old = owners_in(state)
    if state[OWNERS_KEY][-1] != _digest_above_0((split, tuple(param.shape))):
        return False
    if len(old) != len(layout.matrices) or not set(old) <= {-1, *layout.ranks}:
        return False
    return slices_at(this_rank(), layout, old, state[key].itemsize)[1] == len(state[key])


def _digest_above_0(value: object) -> int:
    """Return an integer > 0 for a value, equal on ranks with an equal `repr` of it."""
    return 1 + digest_int(value)


def states_of(groups: Sequence[dict]) -> list[StateEntry]:
    """Return the state of all DTensors that rules of `groups` read at owners, in an order equal on
    all ranks with equal groups.
    """
    found = []
    known: dict[tuple, Layout] = {}  # a Layout has a box for every rank: parameters share layouts
    for group in groups:
        kept = rule_of(group).state if group["use_muon"] else ()
        names = names_in(group)
        members = zip(group["params"], splits_of(group)) if kept else ()
        members = [member for member in members if is_dtensor(member[0])]
        for (param, split), s in itertools.product(members, kept):
            shape = tuple(param.shape)
            where = shape, split, param.device_mesh, param.placements, s.per
            if where not in known:
                layout = layout_of(param, shape=split.state_shape(shape, s.per))
                known[where] = layout.as_matrices(split, shape, s.per)
            found.append(StateEntry(param, names[param], s.key, known[where], split))
    return found


def as_placed_dtensors(state: dict, groups: Sequence[dict]) -> dict:
    """Return the state with DTensors, placed like their parameters, in place of state at owners.
    Collective if any state is at owners; then raises RuntimeError, before any collective, if a rank
    does not call in time, or if state cannot be taken from its owners (`check`).
    """
    found = {p: {k: v for k, v in held.items() if k != OWNERS_KEY} for p, held in state.items()}
    # Before the first step, and after a load, all state is placed like its parameters
    if not any(OWNERS_KEY in held for held in state.values()):
        return found
    with errors.during("state_dict(), which all ranks call together with state_at_owners=True"):
        # A rank that saves alone gets an error, before it issues a collective
        members = states_of(groups)
        _check_all(state, members, groups)
        by_group = _by_process_group(members)
        for group, _ in by_group:
            wait_for_all(group, "state_dict()", ADVICE)
        for group, members in by_group:
            locations = _agreed_locations(state, members, group)
            at_owners = [location > AT_PLACEMENTS for location in locations]
            for entry in itertools.compress(members, at_owners):
                held = state[entry.param]
                placed = _to_placements(entry, held[entry.key], owners_in(held), group)
                found[entry.param][entry.key] = placed
    return found


def _check_all(state: dict, members: Sequence[StateEntry], groups: Sequence[dict]) -> None:
    """Call `check` for all parameters of `groups`; raises as `check`. `members`: result of
    `states_of`.
    """
    layouts: dict[int, dict[str, Layout]] = {}
    for entry in members:
        layouts.setdefault(id(entry.param), {})[entry.key] = entry.layout
    for group in groups:
        names = names_in(group)
        for param, split in zip(group["params"], splits_of(group)):
            of_param = layouts.get(id(param), {})
            check(state.get(param, {}), param, of_param, split, names[param])


def move_to_owners(
    state: dict, members: Sequence[StateEntry], wanted: Mapping[torch.Tensor, Sequence[int]]
) -> None:
    """Move state to the `wanted` owners, in place of the dict's entries. Missing state is left out.
    Collective.

    `wanted`: parameter -> owners of `Layout.matrices`. Raises RuntimeError, with the parameter's
    name, if state is at other places on other ranks.
    """
    for group, entries in _by_process_group(members):
        locations = dict(zip(entries, _agreed_locations(state, entries, group)))
        # Grouped by id, because == compares two tensors element by element
        for _, of_param in itertools.groupby(entries, key=lambda entry: id(entry.param)):
            of_param = list(of_param)
            owners, held = list(wanted[of_param[0].param]), state[of_param[0].param]
            moved = {
                entry.key: _moved(entry, held, locations[entry], owners, group)
                for entry in of_param
                if locations[entry] != MISSING
            }
            # State and owners are replaced together: after a failed collective both are still old
            held.update(moved)
            number = _digest_above_0((of_param[0].split, tuple(of_param[0].param.shape)))
            held[OWNERS_KEY] = torch.tensor([*owners, number], dtype=torch.int64, device="cpu")


def _moved(
    entry: StateEntry, held: Mapping, location: int, owners: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the flat tensor of state for `owners`. `held`: the parameter's state."""
    value = held[entry.key]
    if location > AT_PLACEMENTS:
        old = owners_in(held)
        if old == owners:
            return value
        value = _to_placements(entry, value, old, group)
    return _to_owners(entry, value, owners, group)


def zeros_at_owner(entry: StateEntry, owners: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return new state of the matrices that this rank owns."""
    size = slices_at(this_rank(), entry.layout, owners, dtype.itemsize)[1]
    return torch.zeros(size, dtype=dtype, device=entry.param.device)


def _by_process_group(
    members: Sequence[StateEntry],
) -> list[tuple[dist.ProcessGroup, list[StateEntry]]]:
    """Return [(process group of all ranks of a mesh, state of the parameters on the mesh)], large
    sets of ranks first, the order of all collectives of several sets.
    """
    by_ranks: dict[tuple[int, ...], list[StateEntry]] = {}
    for entry in members:
        by_ranks.setdefault(entry.layout.ranks, []).append(entry)
    groups = ProcessGroups()
    groups.find_existing([entry.param for entry in members], None)
    return [
        (groups.get_or_create(ranks), by_ranks[ranks])
        for ranks in sorted(by_ranks, key=bucket_sort_key)
    ]


def _location(state: Mapping, entry: StateEntry) -> int:
    """Return where state is: MISSING, AT_PLACEMENTS, or a number > 0 for the owners."""
    held = state.get(entry.param, {})
    if entry.key not in held:
        return MISSING
    if not is_at_owners(held, entry.key):
        return AT_PLACEMENTS
    return _digest_above_0(held[OWNERS_KEY].tolist())


def _agreed_locations(
    state: Mapping, members: Sequence[StateEntry], group: dist.ProcessGroup
) -> list[int]:
    """Return `_location` of all members. Raises RuntimeError if ranks of the group differ."""
    locations = [_location(state, entry) for entry in members]
    gathered = gather_integers(locations, group, local_of(members[0].param).device)
    for entry, *found in zip(members, *gathered):
        if len(set(found)) > 1:
            raise RuntimeError(
                f"{entry.key} of parameter {entry.name} is at other places on some ranks of its "
                "mesh: load the state on all ranks, or on none, and change it on all ranks alike"
            )
    return locations


def _pieces(
    entry: StateEntry, owners: Sequence[int]
) -> Iterator[tuple[MatrixIndex, int, int, Box, tuple]]:
    """Yield (matrix, owner, storing rank, box in the matrix, place in the parameter) of all pieces
    of state that this rank owns or stores, in an order equal on all ranks.
    """
    layout, me = entry.layout, this_rank()
    for (at, unit), owner in zip(layout.matrices, owners, strict=True):
        ranks = () if owner < 0 else layout.ranks if owner == me else (me,)
        for rank in [rank for rank in ranks if _has_leading(layout.boxes[rank], at)]:
            for box, start in layout.unit_boxes(rank, unit):
                yield (at, unit), owner, rank, box, start


def _has_leading(box: Box, at: tuple[int, ...]) -> bool:
    """Whether leading indices lie in a box of a parameter."""
    return all(first <= i < end for i, (first, end) in zip(at, box))


def _stored_view(
    entry: StateEntry, local: torch.Tensor, matrix: MatrixIndex, box: Box, start: tuple
) -> torch.Tensor:
    """Return the view of a piece in the local shard of state."""
    layout, me = entry.layout, this_rank()
    index = tuple(i - first for i, (first, _) in zip(matrix[0], layout.boxes[me]))
    shape = box_shape(box)
    return entry.split.matrices(local)[index][layout.place_of(me, start, shape)]


def _to_owners(
    entry: StateEntry, value: torch.Tensor, owners: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the flat tensor of this rank from state placed like the parameter."""
    local, me, replica_of = local_of(value).contiguous(), this_rank(), entry.layout.replica_of
    slices, size = slices_at(me, entry.layout, owners, value.itemsize)
    flat = torch.zeros(size, dtype=value.dtype, device=entry.param.device)
    local = local.to(flat.device)
    sent, received = [], []
    for matrix, owner, rank, box, start in _pieces(entry, owners):
        # Only ranks in the owner's replica send
        if replica_of[rank] != replica_of[owner]:
            continue
        if rank == me:
            sent.append((owner, _stored_view(entry, local, matrix, box, start)))
        if owner == me:
            whole = view_of(flat, slices[matrix])
            received.append((rank, whole[slice(*box[0]), slice(*box[1])]))
    _exchange(sent, received, flat, group)
    return flat


def _to_placements(
    entry: StateEntry, flat: torch.Tensor, owners: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Return state as a DTensor placed like its parameter from the flat tensors of `owners`."""
    param, me = entry.param, this_rank()
    shape = state_shape(param, entry.key, entry.split)
    flat = flat.to(param.device)
    # Zeros, and not empty memory: matrices without elements have no owner
    placed = zeros_with_placements(param, param.placements, flat.dtype, shape)
    local = local_of(placed)
    slices, _ = slices_at(me, entry.layout, owners, flat.itemsize)
    sent, received = [], []
    for matrix, owner, rank, box, start in _pieces(entry, owners):
        if owner == me:
            whole = view_of(flat, slices[matrix])
            sent.append((rank, whole[slice(*box[0]), slice(*box[1])]))
        if rank == me:
            received.append((owner, _stored_view(entry, local, matrix, box, start)))
    _exchange(sent, received, flat, group)
    return placed


def _exchange(
    sent: Sequence[tuple[int, torch.Tensor]],
    received: Sequence[tuple[int, torch.Tensor]],
    like: torch.Tensor,
    group: dist.ProcessGroup,
) -> None:
    """Send tensors and fill the views `received`, by an all-to-all. Both: (global rank of the peer,
    tensor), in an order equal on both ends. `like`: has their dtype and device.
    """
    ranks = dist.get_process_group_ranks(group)
    out, into = (
        [t for rank in ranks for peer, t in pairs if peer == rank] for pairs in (sent, received)
    )
    sizes = [
        [sum(t.numel() for peer, t in pairs if peer == rank) * like.itemsize for rank in ranks]
        for pairs in (sent, received)
    ]
    # As bytes, of which every backend can send any dtype
    parts = [t.reshape(-1) for t in out]
    send = torch.cat(parts) if parts else like.new_empty(0)
    recv = like.new_empty(sum(t.numel() for t in into))
    dist.all_to_all_single(
        recv.view(torch.uint8), send.view(torch.uint8), sizes[1], sizes[0], group=group
    )
    for view, part in zip(into, recv.split([t.numel() for t in into])):
        view.copy_(part.view(view.shape))

"""Bytes that plans predict, on a rank to show and on the rank with the most (`predicted`)."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..communication.matrix_owners.state import slices_at
from ..execution.offload.memory import ALIGNMENT
from ..execution.offload.offload import slots_for
from ..execution.offload.placement import KeptBytes, can_be_offloaded
from ..execution.prepare.buckets import reserve, sorted_buckets
from ..execution.workspace import buffer_name
from ..kernels.elementwise.multi_tensor import BLOCK, NUMBERS
from ..kernels.quantized.blocks import block_count, is_quantized
from ..params.config import MuonConfig
from ..params.dtensor import gradient_dtype
from ..params.layout import Layout, ranks_of_group
from ..params.units import box_shape
from ..planning.plan import Bucket
from ..planning.planner import Plan
from ..planning.rank_plan import Piece, RankPlan, has_plain
from ..rules.elementwise import (
    MAX_COPIED_ELEMENTS,
    elementwise_of,
    is_8bit,
    temporaries_of,
    wide_dtype,
)
from ..rules.muon import REST_KEY, is_split
from ..rules.rule import (
    STATES,
    group_state_dtype,
    is_offloaded,
    keys_of,
    rule_of,
    state_device_and_dtype,
    state_shape,
)
from .rank_classes import BucketParts, parameter_forms, representatives
from .rows import COPIES, KINDS, SLOT_ROW, TABLES, Key, MemoryReport, MemoryRow, row_key


def predicted(
    plans: Sequence[tuple[Plan, BucketParts | None]],
    groups: Sequence[dict],
    options: MuonConfig,
    rank_shown: int,
    measured_bytes: Mapping[Key, int] | None = None,
) -> MemoryReport:
    """Return the report of plans. `rank_shown`: the rank to show beside the largest.
    `measured_bytes`: bytes of that rank, in place of predicted ones.
    """
    ranks = sorted({rank for plan, _ in plans for x in plan.layouts for rank in x.ranks})
    numbers = {id(group): number for number, group in enumerate(groups)}
    offloads = bool(options.offload_state)
    forms = [parameter_forms(plan, numbers, offloads) for plan, _ in plans]
    chosen = {*representatives(plans, ranks, offloads), *{rank_shown}.intersection(ranks)}
    by_rank = {}
    weighers = [functools.partial(_bucket_table_bytes, plan, options) for plan, _ in plans]
    for rank in sorted(chosen) or [rank_shown]:
        of_rank, tables = [], 0
        for (plan, parts), weigh in zip(plans, weighers):
            if parts is not None:
                rank_plans, nbytes = parts.weighed(rank, weigh)
                plan, tables = replace(plan, rank_plans=rank_plans), tables + nbytes
            of_rank.append(plan)
        by_rank[rank] = _bytes_at(rank, of_rank, forms, numbers, options)
        by_rank[rank][TABLES] += tables
    largest = max(by_rank, key=lambda rank: sum(by_rank[rank].values()))
    mine = by_rank.get(rank_shown, Counter())
    if measured_bytes is not None:
        mine = Counter({key: n for key, n in mine.items() if key[0] in ("gradients", "temporary")})
        mine.update(measured_bytes)
    keys = sorted({*mine, *by_rank[largest]}, key=_order)
    rows = [MemoryRow(*key, mine[key], by_rank[largest][key]) for key in keys]
    return MemoryReport(
        rank_shown, largest, len(ranks) or 1, measured_bytes is not None, tuple(rows)
    )


def _order(key: Key) -> tuple:
    """Sort key of rows."""
    kind, what, group, dtype, where = key
    return KINDS.index(kind), -1 if group is None else group, what, dtype or "", where


def _bytes_at(
    rank: int,
    plans: Sequence[Plan],
    forms: Sequence[list[list[int]]],
    numbers: Mapping[int, int],
    options: MuonConfig,
) -> Counter:
    """Return key of a row -> bytes at a rank. `plans`: with the buckets of the rank. `forms`: of
    each plan, see `parameter_forms`. `numbers`: id of a group -> number of the group.
    """
    found, offloaded = Counter(), 0  # elements of parameters with offloaded state
    uncut = 0  # bytes of the largest piece that stays whole
    kept = KeptBytes(options.offload_state) if options.offload_state else None
    for plan, alike in zip(plans, forms):
        for i, *others in alike:
            param, count = plan.params[i], 1 + len(others)
            number = numbers[id(plan.group_at(i))]
            numel = _numel_at(rank, plan.layouts[i])
            dtypes = {"weights": param.dtype, "gradients": gradient_dtype(param)}
            for kind, dtype in dtypes.items():
                found[row_key(kind, kind, number, dtype)] += numel * dtype.itemsize * count
            state = Counter()
            for key in keys_of(plan.group_at(i), param, options.state_dtype):
                state.update(_state_at(rank, plan, i, key, number, options, kept))
            found.update({key: n * count for key, n in state.items()})
            on_host = {key: n for key, n in state.items() if key[-1] == "host" and n}
            offloaded += numel * any(on_host)
            sizes = [getattr(torch, key[3]).itemsize for key in on_host]
            uncut = max(uncut, _uncut_bytes(rank, plan, i, sizes))
        if not plan.group["use_muon"]:
            # Plans are stepped one after another, and so are the buckets of a plan: the largest
            # temporaries count, not the sum
            for members in _stepped_at(rank, plan):
                found[COPIES] = max(found[COPIES], _copied_bytes(members, plan, options))
    if offloaded:
        nbytes, count = slots_for(offloaded)
        found[SLOT_ROW] += max(nbytes, uncut) * count * (kept is not None)
    sizes = reserve(sorted_buckets(plans, [None] * len(plans), options), options)[0].sizes
    for name, nbytes in sizes.items():
        found[row_key("workspace", buffer_name(name), None, None)] += nbytes
    found[TABLES] += sum(8 * len(p.params) + 4 * NUMBERS * len(p.groups) for p in plans)
    return +found


def _numel_at(rank: int, layout: Layout) -> int:
    """Return the elements that a rank stores; 0 outside of the layout's ranks."""
    box = layout.boxes.get(rank)
    return 0 if box is None else math.prod(box_shape(box))


def _state_at(
    rank: int,
    plan: Plan,
    i: int,
    key: str,
    number: int,
    options: MuonConfig,
    kept: KeptBytes | None,
) -> dict[Key, int]:
    """Return {key of the row: bytes} of state `key` of parameter `i` at a rank, as
    `create.create_state` makes it. `kept`: of offload_state, None without.
    """
    param = plan.params[i]
    dtype = group_state_dtype(plan.group_at(i), options.state_dtype)
    device, dtype = state_device_and_dtype(key, param, dtype)
    layout = plan.layouts[i]
    if rank not in layout.boxes:
        return {}
    if key == "step":
        numel = 1
        # Parameters on the meta device are planned as on a GPU
        on_device = device.type == param.device.type or param.device.type == "meta"
    else:
        on_device = True
        if plan.state_rows is not None and key != REST_KEY:
            rows = plan.state_rows[i][ranks_of_group(plan.process_group).index(rank)]
            numel = rows * math.prod(state_shape(param, key, plan.split(i))[1:])
        elif plan.matrix_owners is not None and plan.matrix_owners[i] and key in plan.state_layouts:
            owners = plan.matrix_owners[i]
            numel = slices_at(rank, plan.state_layouts[key][i], owners, dtype.itemsize)[1]
        elif STATES[key].per == "block":
            # Boxes are those of matrices. Shards begin at whole blocks of columns as stored, see
            # `params.validation.check_blocks`
            stored = list(box_shape(layout.boxes[rank]))
            axis = -2 if plan.split(i).transposed else -1
            stored[axis] = block_count(stored[axis])
            numel = math.prod(stored)
        elif STATES[key].per != "element":
            numel = _numel_at(rank, plan.state_layouts[key][i])
        else:
            numel = _numel_at(rank, layout)
    nbytes = numel * dtype.itemsize
    if kept is not None and is_offloaded(key):
        on_device = not nbytes or kept.keeps(nbytes)
        if not on_device and plan.group["use_muon"] and not plan.selected:
            on_device = not can_be_offloaded(plan, i, rank, dtype)
    return {row_key("state", key, number, dtype, "device" if on_device else "host"): nbytes}


def _uncut_bytes(rank: int, plan: Plan, i: int, itemsizes: Sequence[int]) -> int:
    """Return the bytes in a slot of the largest piece of parameter `i` from which a rank selects
    rows or columns: such a piece is not cut. 0 if it selects none. `itemsizes`: of each offloaded
    state.
    """
    layouts = plan.selected.get("matrix", ())
    if not layouts or not layouts[i].at_source or not itemsizes:
        return 0
    layout = layouts[i]
    units = range(layout.unit_count)
    sizes = [r * c for unit in units for r, c in layout.stored_shapes(rank, unit)]
    total = _numel_at(rank, plan.layouts[i])
    # `sizes` has the pieces of one matrix; all matrices of a stack are cut alike
    found, start = 0, 0  # start: elements before the piece
    for numel in sizes * (total // max(1, sum(sizes))):
        nbytes, stop = 0, start + numel
        for size in itemsizes:
            # The padding behind a state, up to the next state in host memory, is copied as well
            spare = -total * size % ALIGNMENT * (stop == total)
            nbytes += -nbytes % ALIGNMENT + start * size % ALIGNMENT + numel * size + spare
        found, start = max(found, nbytes), stop
    return found


def _stepped_at(rank: int, plan: Plan) -> list[list[tuple[int, int]]]:
    """Return lists of (number of a parameter, elements) that a rank steps together, of a plan of an
    elementwise rule.
    """
    if plan.rank_plans is None:
        return [[(i, _numel_at(rank, layout)) for i, layout in enumerate(plan.layouts)]]
    return [
        [(p.matrix.param, p.numel) for p in rank_plan.stored if p.owner == rank]
        for _, rank_plan in plan.rank_plans
    ]


def _copied_bytes(members: Sequence[tuple[int, int]], plan: Plan, options: MuonConfig) -> int:
    """Return the most bytes that a step of an elementwise rule allocates at a time on a GPU.
    `members`: an entry of `_stepped_at`.
    """
    if options.nonfinite == "propagate":
        return _temporary_bytes(members, plan, options)
    # Parameters are stepped one at a time. Old values are copied, for flagged parameters.
    return max(
        (
            _old_bytes(i, numel, plan, options)
            + max(_temporary_bytes([(i, numel)], plan, options), numel * plan.params[i].itemsize)
            for i, numel in members
        ),
        default=0,
    )


def _old_bytes(i: int, numel: int, plan: Plan, options: MuonConfig) -> int:
    """Return the bytes of copies of the weight and state of parameter `i`, without step counts."""
    group, param = plan.group_at(i), plan.params[i]
    dtype = group_state_dtype(group, options.state_dtype)
    keys = [key for key in keys_of(group, param, options.state_dtype) if key != "step"]
    nbytes = numel * param.itemsize
    for key in keys:
        count = numel
        if STATES[key].per == "block":
            count = numel // param.shape[-1] * block_count(param.shape[-1])
        nbytes += count * state_device_and_dtype(key, param, dtype)[1].itemsize
    return nbytes


def _temporary_bytes(members: Sequence[tuple[int, int]], plan: Plan, options: MuonConfig) -> int:
    """Return the most bytes that a step of `members` together allocates at a time on a GPU: copies
    where weight, gradient and averages differ in dtype, and temporaries of foreach operations. See
    `rules.elementwise.step`.
    """
    # Whether parameters are stepped as copies -> bytes: the two kinds are stepped one after another
    together, largest = Counter(), Counter()
    for i, numel in members:
        group, param = plan.group_at(i), plan.params[i]
        rule = elementwise_of(group)
        if is_8bit(group, param):  # a kernel reads and writes all in place
            continue
        state = group_state_dtype(group, options.state_dtype)
        state = state_device_and_dtype(rule.averages[0], param, state)[1]
        wide = wide_dtype(param.dtype, state, rule, is_split(group, param))
        # Owners step fp32 copies of split weights, in the workspace
        is_fp32 = plan.in_chunks and is_split(group, param)
        weight = torch.float32 if is_fp32 else param.dtype
        dtypes = (weight, gradient_dtype(param), *[state] * len(rule.averages))
        copied = sum(wide.itemsize for dtype in dtypes if dtype != wide)
        each = copied + temporaries_of(group) * wide.itemsize
        together[copied > 0] += each * numel
        largest[copied > 0] = max(largest[copied > 0], each)
    return max(min(together[key], MAX_COPIED_ELEMENTS * largest[key]) for key in (False, True))


def _bucket_table_bytes(
    plan: Plan, options: MuonConfig, bucket: Bucket, rank_plan: RankPlan
) -> int:
    """Return about how many bytes the tables of launches on a GPU take for a bucket.

    Stored pieces of matrices are in two launches (pack, weight update), and in a third that writes
    8-bit momentum. Pieces of state and weights that a rule reads at the owner are in two copies,
    unless kernels read both where they are stored. Owned pieces of matrices that are copied into
    stacks are in two copies more, direct matrices have two addresses per row. Of selected rows or
    columns the indices are kept twice.
    """
    is_8bit = is_quantized(options.state_dtype) and plan.group["use_muon"]
    direct = rank_plan.direct
    nbytes = sum(2 * 8 * m.rows for m in direct)
    if bucket.route != "local":
        copied = [p for p in rank_plan.owned if p.matrix not in direct]
        nbytes += sum(2 * _launch_bytes(p.numel) for p in copied)
    in_place = _kinds_in_place(plan, bucket, options)
    stored = [p for p in rank_plan.stored if p.kind not in in_place]
    return nbytes + sum(_stored_table_bytes(plan, p, 3 if is_8bit else 2) for p in stored)


def _stored_table_bytes(plan: Plan, piece: Piece, launches: int) -> int:
    """Return about how many bytes a stored piece takes in tables of a number of launches."""
    layouts = plan.selected.get(piece.kind)
    layout = layouts and layouts[piece.matrix.param]
    if not layout or not layout.sends_parts:
        return launches * _launch_bytes(piece.numel)
    # Launches are over all of the piece as it is stored, and not over its selected part
    whole = math.prod(layout.whole_shape(piece.stored_at, piece.matrix.unit, piece.start))
    if piece.kind != "matrix":
        return 4 * (whole + piece.numel)  # memory of `PackSelected`
    indices = piece.shape[layout.axes[piece.matrix.unit]]
    return launches * _launch_bytes(whole) + 2 * 8 * indices


def _launch_bytes(numel: int) -> int:
    """Return about how many bytes a piece takes in the tables of a launch: a record of 12 to 20
    int64, and two int64 for a block of BLOCK elements.
    """
    return 8 * 16 + 16 * -(-numel // BLOCK)


def _kinds_in_place(plan: Plan, bucket: Bucket, options: MuonConfig) -> set[str]:
    """Return the kinds of pieces that fused kernels read where they are stored, without copies: see
    `LocalUpdate`.
    """
    rule = rule_of(plan.group) if plan.group["use_muon"] else None
    if rule is None or not rule.fused:
        return set()
    is_checked = options.nonfinite != "propagate"
    state = {s.key for s in rule.state if s.per == "element" and not is_checked}
    if bucket.route != "local":
        kept = plan.matrix_owners is not None and not has_plain(bucket.matrices, plan.layouts)
        return state if kept else set()
    return state | ({"weight"} if rule.reads_weight else set())

"""`Muon.memory_report` and `Muon.memory_forecast`: bytes of an optimizer by kind, on this rank and
on the rank with the most.

`MemoryReport` is the public result. `ForecastPlanner` plans without a step, also for ranks and GPUs
that do not exist. `predicted` sums the bytes of such plans, `measured` those of a bound step.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from .communication.matrix_owners.state import slices_at
from .communication.process_groups import ProcessGroups
from .execution.cuda_graphs import Graphs
from .execution.offload.memory import ALIGNMENT
from .execution.offload.offload import slots_for
from .execution.offload.placement import KeptBytes, can_be_offloaded
from .execution.prepare.buckets import reserve, sorted_buckets
from .execution.prepare.select import by_process_group, step_together
from .execution.prepare.state_place import StatePlace
from .execution.prepare.step import BoundStep
from .execution.workspace import buffer_name, layout_of
from .kernels.elementwise.multi_tensor import BLOCK, NUMBERS
from .kernels.quantized.blocks import block_count, is_quantized
from .newton_schulz.coefficients import steps_of
from .params.config import AssumedRanks, MuonConfig
from .params.dtensor import gradient_dtype, is_dtensor, local_of
from .params.layout import Layout, layout_by_rows, ranks_of_group
from .params.units import box_shape
from .params.validation import device_of
from .planning.cost_model import CostModel
from .planning.plan import Bucket
from .planning.planner import Plan, Planner
from .planning.rank_plan import Piece, RankPlan, has_plain
from .qk_clip.clip import QKClip, unattached
from .rank_classes import BucketParts, parameter_forms, representatives
from .report import as_bytes
from .rules.elementwise import (
    MAX_COPIED_ELEMENTS,
    elementwise_of,
    is_8bit,
    temporaries_of,
    wide_dtype,
)
from .rules.muon import REST_KEY, is_split
from .rules.rule import (
    OWNERS_KEY,
    STATES,
    group_state_dtype,
    is_offloaded,
    keys_of,
    rule_of,
    state_device_and_dtype,
    state_shape,
)

OPTIMIZER_KINDS = ("state", "workspace", "tables", "graphs", "temporary")
KINDS = ("weights", "gradients", *OPTIMIZER_KINDS)
LAYOUTS = ("fsdp", "ddp")
HEADS = ("kind", "what", "where", "this rank", "largest rank")
# (kind, what, group, dtype, where) of a row
Key = tuple[str, str, int | None, str | None, str]
ASSUMED_GPU = "sm90"  # architecture whose measured times are used for parameters on the meta device
# Classes of plans, which hold numbers only: `_tensors_in` does not search inside
PLANNED = (Plan, Bucket, RankPlan, Piece, Layout, MuonConfig)


@dataclass(frozen=True)
class MemoryRow:
    """A line of a `MemoryReport`."""

    kind: str  # one of KINDS
    what: str  # key of the state, name of the buffer, or what is held
    group: int | None  # number of the parameter group; None: of no single group
    dtype: str | None  # as "float32"; None: of several
    where: str  # "device": with the parameters; "host"
    nbytes: int  # on this rank
    largest_nbytes: int  # on the rank with the largest total

    def cells(self) -> list[str]:
        """The cells of the row as text, in the order of HEADS."""
        group = "" if self.group is None else f", group {self.group}"
        dtype = "" if self.dtype is None else f", {self.dtype}"
        sizes = map(as_bytes, (self.nbytes, self.largest_nbytes))
        return [self.kind, f"{self.what}{group}{dtype}", self.where, *sizes]


@dataclass(frozen=True)
class MemoryReport:
    """The result of `Muon.memory_report` and `Muon.memory_forecast`; `str(report)` is a table."""

    rank: int  # this rank
    largest_rank: int  # the rank with the largest total, by the plan
    rank_count: int  # ranks that the plan knows of
    is_measured: bool  # bytes of this rank are those of tensors that exist
    rows: tuple[MemoryRow, ...]

    def bytes_of(self, *kinds: str, where: str | None = None, largest: bool = False) -> int:
        """Bytes of this rank, or of the largest rank, in rows of `kinds` (none: all kinds) and of
        `where` (None: device and host).
        """
        rows = [row for row in self.rows if not kinds or row.kind in kinds]
        rows = [row for row in rows if where in (None, row.where)]
        return sum(row.largest_nbytes if largest else row.nbytes for row in rows)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of this rank, without weights and gradients."""
        return self.bytes_of(*OPTIMIZER_KINDS)

    @property
    def total_bytes(self) -> int:
        """Bytes of this rank, with weights and gradients."""
        return self.bytes_of()

    def as_dict(self) -> dict:
        """The report as a dict of numbers and texts, for logs: {kind: {"device", "host",
        "largest device", "largest host": bytes}}, the fields of the report, and "rows".
        """
        found = {
            kind: {
                f"{'largest ' * largest}{where}": self.bytes_of(kind, where=where, largest=largest)
                for largest in (False, True)
                for where in ("device", "host")
            }
            for kind in KINDS
        }
        return {**found, **asdict(self), "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        """The table, and below it the sums."""
        table = [HEADS, *(row.cells() for row in self.rows)]
        for name, kinds in (("optimizer", OPTIMIZER_KINDS), ("with weights and gradients", KINDS)):
            for where in ("device", "host"):
                sizes = [self.bytes_of(*kinds, where=where, largest=most) for most in (False, True)]
                table.append(["sum", name, where, *map(as_bytes, sizes)])
        widths = [max(len(row[i]) for row in table) for i in range(len(HEADS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in table
        ]
        how = "measured" if self.is_measured else "predicted"
        head = (
            f"memory of rank {self.rank}, {how}; the largest of {self.rank_count} ranks is rank "
            f"{self.largest_rank}, predicted"
        )
        return "\n".join([head, *lines])


class ForecastPlanner(Planner):
    """A `Planner` that keeps the buckets of all ranks, and that plans for GPUs where parameters are
    on the meta device.
    """

    def __init__(
        self,
        options: MuonConfig,
        process_groups: ProcessGroups,
        row_shards: int | None = None,
        gpu_bytes: int = 80 << 30,
    ) -> None:
        """`row_shards`: number of ranks over which FSDP2 would shard each parameter; None: as the
        parameters are. `gpu_bytes`: memory of the GPUs for meta parameters.
        """
        super().__init__(options, process_groups)
        self.row_shards = row_shards
        self.gpu_bytes = gpu_bytes
        # Id of the `rank_plans` of a plan -> its buckets, with the parts of all ranks
        self.parts_of: dict[int, BucketParts] = {}

    def _find_hardware(
        self,
        params: Sequence[torch.Tensor],
        process_group: dist.ProcessGroup | AssumedRanks | None,
    ) -> None:
        """Take the GPU of the constructor for parameters on the meta device."""
        if params[0].device.type != "meta":
            existing = None if isinstance(process_group, AssumedRanks) else process_group
            return super()._find_hardware(params, existing)
        self.device = params[0].device
        self.architecture = ASSUMED_GPU
        self.rank_bytes = self.options.workspace_limit_bytes(self.device, self.gpu_bytes)
        self.sends_once = True  # NCCL

    def _cost_model(self, group: dict) -> CostModel:
        """Return the cost model of the assumed GPU for parameters on the meta device."""
        if self.device.type != "meta":
            return super()._cost_model(group)
        return CostModel(steps_of(group["ns_coefficients"], group["ns_steps"]), ASSUMED_GPU)

    def _layout(self, param: torch.Tensor, shape: tuple[int, ...] | None) -> Layout:
        """Return the layout of a parameter, or of a tensor of `shape` placed like it."""
        if self.row_shards is None:
            return super()._layout(param, shape)
        return layout_by_rows(param.shape if shape is None else shape, self.row_shards)

    def _rank_plans(
        self, buckets: Sequence[Bucket], rank_plan: Callable[[Bucket, int], RankPlan]
    ) -> list[tuple[Bucket, RankPlan]]:
        """Keep how to find the parts of other ranks."""
        parts = BucketParts(buckets, rank_plan)
        mine = parts.at(self.rank)
        self.parts_of[id(mine)] = parts
        return mine


def forecast_arguments(
    ranks: int, layout: str, gpu_bytes: int, arguments: Mapping[str, object]
) -> dict[str, object]:
    """Return arguments of the constructor for `Muon.memory_forecast`: `arguments`, and a copy of a
    `qk_clip`, which belongs to the caller's optimizer. Raises ValueError for wrong arguments.
    """
    for key, value in (("ranks", ranks), ("gpu_bytes", gpu_bytes)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{key}={value!r} is not allowed: it must be a whole number >= 1")
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not allowed: it must be one of {LAYOUTS}")
    for key in ("process_group", "distributed_mesh"):  # the second is dion's name
        if arguments.get(key) is not None:
            raise ValueError(
                f"{key} is not allowed in a forecast, which knows of ranks by number only: leave "
                "it out, and pass ranks and layout='ddp'"
            )
    is_other = {"shard_state": True, "grads_are_reduced": False}
    for key in [key for key, value in is_other.items() if arguments.get(key) is value]:
        if layout != "ddp":
            raise ValueError(
                f"{key}={arguments[key]} with layout={layout!r}: only plain parameters that all "
                "ranks hold have the option; pass layout='ddp', or leave it out"
            )
    clip = arguments.get("qk_clip")
    copied = {"qk_clip": unattached(clip)} if isinstance(clip, QKClip) else {}
    return {**arguments, **copied}


def copied_groups(params: Iterable) -> list:
    """Return parameters, or copies of parameter groups, for an optimizer that writes into its
    groups. Raises ValueError for sharded parameters.
    """
    entries = [dict(entry) if isinstance(entry, dict) else entry for entry in params]
    for entry in entries:
        members = entry.get("params", ()) if isinstance(entry, dict) else [entry]
        if isinstance(entry, dict) and not isinstance(members, torch.Tensor):
            entry["params"] = members = list(members)
        for member in [members] if isinstance(members, torch.Tensor) else members:
            if is_dtensor(member[1] if isinstance(member, tuple) else member):
                raise ValueError(
                    "memory_forecast takes whole parameters, but a DTensor is among them: build "
                    "the optimizer, and call memory_report()"
                )
    return entries


def plans_of(
    planner: Callable[[], ForecastPlanner],
    groups: Sequence[dict],
    options: MuonConfig,
    options_by_group: Sequence[MuonConfig],
) -> list[tuple[Plan, BucketParts | None]]:
    """Return [(plan of this rank, its buckets with the parts of all ranks)] of a first step with
    gradients of all parameters that require one. None: a plan without buckets. Sends nothing.

    `planner`: returns a new planner; parameters that a process steps alone are planned apart, as in
    a step. `options_by_group`: the options of each group. Raises as `Planner.plan`, and ValueError
    if buckets exceed `workspace_bytes`.
    """
    plans = []
    for alone in (False, True):
        new_planner = planner()
        for part in step_together(_members(groups, options, options_by_group, alone)):
            for plan in new_planner.plan(
                part.groups, part.params, part.group_of, part.process_group
            ):
                plans.append((plan, new_planner.parts_of.get(id(plan.rank_plans))))
        new_planner.check_bucket_buffers()
    return plans


def _members(
    groups: Sequence[dict], options: MuonConfig, options_by_group: Sequence[MuonConfig], alone: bool
) -> list[tuple[dict, list[torch.Tensor], MuonConfig]]:
    """Return the parts of `step_together`: parameters that require a gradient, which this process
    steps `alone` or with other ranks.
    """
    parts = []
    for group, of_group, params in by_process_group(groups, options, options_by_group):
        shared = of_group.process_group is not None
        chosen = [p for p in params if p.requires_grad and (shared or is_dtensor(p)) != alone]
        parts.append((group, chosen, of_group))
    return [part for part in parts if part[1]]


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


SLOT_ROW: Key = ("workspace", "slots of offloaded state", None, None, "device")
TABLES: Key = ("tables", "addresses and shapes", None, None, "device")
COPIES: Key = ("temporary", "temporaries of elementwise rules", None, None, "device")


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
                found[_key(kind, kind, number, dtype)] += numel * dtype.itemsize * count
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
        found[_key("workspace", buffer_name(name), None, None)] += nbytes
    found[TABLES] += sum(8 * len(p.params) + 4 * NUMBERS * len(p.groups) for p in plans)
    return +found


def _key(
    kind: str, what: str, group: int | None, dtype: torch.dtype | None, where: str = "device"
) -> Key:
    """Return the key of a row."""
    return kind, what, group, None if dtype is None else str(dtype).removeprefix("torch."), where


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
    return {_key("state", key, number, dtype, "device" if on_device else "host"): nbytes}


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


def measured(
    bound: BoundStep,
    groups: Sequence[dict],
    state: Mapping,
    graphs: Sequence[Graphs | None],
    place: StatePlace,
) -> Counter:
    """Return key of a row -> bytes of this rank: of weights, state, workspace, tables and graphs
    that exist. `place`: of state.
    """
    found, counted = Counter(), set()
    home = device_of(groups).type
    for row, tensor in _held_by(groups, state, place):
        found[row] += local_of(tensor).nbytes
        counted.add(_memory_of(tensor))
    counted.update(_memory_of(p.grad) for g in groups for p in g["params"] if p.grad is not None)
    for memory in place.slots():
        found[SLOT_ROW] += memory.nbytes
        counted.add(_memory_of(memory))
    for name, memory in _workspace_of(bound).items():
        found[_key("workspace", name, None, None)] += memory.nbytes()
        counted.add(memory.data_ptr())
    for tensor in _tensors_in((bound.all_jobs, bound.inputs, bound.hooks, bound.stores)):
        if (at := _memory_of(tensor)) not in counted:
            counted.add(at)
            where = "device" if tensor.device.type == home else "host"
            row = _key("tables", "addresses and shapes", None, None, where)
            found[row] += tensor.untyped_storage().nbytes()
    if nbytes := sum(map(_pool_bytes, filter(None, graphs))):
        found[_key("graphs", "memory pools of CUDA graphs", None, None)] = nbytes
    return +found


def _held_by(
    groups: Sequence[dict], state: Mapping, place: StatePlace
) -> Iterator[tuple[Key, torch.Tensor]]:
    """Yield (key of the row, tensor) of all weights and state."""
    for number, group in enumerate(groups):
        for param in group["params"]:
            yield _key("weights", "weights", number, param.dtype), param
            held = [(key, t) for key, t in state.get(param, {}).items() if torch.is_tensor(t)]
            for key, value in [entry for entry in held if entry[0] != OWNERS_KEY]:
                is_away = place.holds(local_of(value)) or value.device.type != param.device.type
                where = "host" if is_away else "device"
                yield _key("state", key, number, value.dtype, where), value


def _memory_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory of a tensor."""
    return local_of(tensor).untyped_storage().data_ptr()


def _workspace_of(bound: BoundStep) -> dict[str, torch.UntypedStorage]:
    """Return name of a buffer -> memory of the buffer."""
    found = {}
    for update, _ in bound.all_jobs:
        if update.bucket is None:
            continue
        for use, (memory, _) in layout_of(update.rank_plan, update.stack_name)[0].items():
            key = update.buffer_index if memory == "bucket_buffer" else memory
            found[buffer_name(key)] = update.memory[use].untyped_storage()
    return found


def _tensors_in(root: object) -> Iterator[torch.Tensor]:
    """Yield the tensors that objects of this package hold, at any depth."""
    package = __name__.rpartition(".")[0]
    visited, waiting = set(), [root]
    while waiting:
        item = waiting.pop()
        if id(item) in visited or isinstance(item, PLANNED):
            continue
        visited.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, Mapping):
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting.extend(item)
        elif isinstance(item, functools.partial):
            waiting += [item.func, item.args, item.keywords]
        elif type(item).__module__.startswith(package) and hasattr(item, "__dict__"):
            waiting.append(vars(item))
        else:  # a method, or a function with a closure
            waiting.append(getattr(item, "__self__", None))
            cells = getattr(item, "__closure__", None) or ()
            waiting += [cell.cell_contents for cell in cells]


def _pool_bytes(graphs: Graphs) -> int:
    """Return the bytes that torch's allocator holds for the graphs of a step."""
    pools = {part.graph.pool() for part in graphs.parts.values() if part.graph is not None}
    segments = torch.cuda.memory_snapshot() if pools else ()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) in pools)

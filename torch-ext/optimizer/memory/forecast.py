"""Plans without a step, also for ranks and GPUs that do not exist (`ForecastPlanner`), and the
arguments of `Muon.memory_forecast`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from ..communication.process_groups import ProcessGroups
from ..execution.prepare.select import by_process_group, step_together
from ..newton_schulz.coefficients import steps_of
from ..params.config import AssumedRanks, MuonConfig
from ..params.dtensor import is_dtensor
from ..params.layout import Layout, layout_by_rows
from ..planning.cost_model import CostModel
from ..planning.plan import Bucket
from ..planning.planner import Plan, Planner
from ..planning.rank_plan import RankPlan
from ..qk_clip.clip import QKClip, unattached
from .rank_classes import BucketParts

LAYOUTS = ("fsdp", "ddp")
ASSUMED_GPU = "sm90"  # architecture whose measured times are used for parameters on the meta device


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

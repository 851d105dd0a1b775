"""Methods of the optimizers that say what a step did and what it takes: `plan_report`,
`memory_report`, `memory_forecast` and `metrics`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .communication.process_groups import ProcessGroups
from .execution.overlap.forward import waits_for_updates
from .execution.prepare.garbage import collection_paused
from .memory.forecast import ForecastPlanner, copied_groups, forecast_arguments, plans_of
from .memory.measured import measured
from .memory.predicted import predicted
from .memory.rows import MemoryReport
from .metrics.reading import read_metrics
from .metrics.values import Metrics
from .params.config import AssumedRanks
from .params.layout import this_rank
from .report import Report, report_of
from .state import checks
from .state_dict_methods import StateDictMethods


class ReportMethods(StateDictMethods):
    """Base class: methods that report. Subclasses set `_bound`, `_preparation`, `_watch`,
    `_backward_overlap`, `_why_unbound` and `qk_clip`.
    """

    @property
    def _has_sums(self) -> bool:
        """Whether `metrics` has values to return."""
        itself = self._itself()
        return itself._bound.collects and not itself._is_inconsistent

    @waits_for_updates
    def metrics(self, *, per_parameter: bool = False, local: bool = False) -> Metrics:
        """Values of the last step for logs, by parameter group and with `per_parameter` also by
        parameter: docs/metrics.md. Set `collect_metrics` to True before the step. Waits for the
        device.

        Collective over the ranks that hold parts or copies of common parameters: all of them call
        it. With `local` it sends nothing, and values are those of the elements that this rank
        counts: of several copies, one rank counts. Raises RuntimeError if there are no sums: no
        step since `collect_metrics` was set, `load_state_dict`, `add_param_group` or `release`; if
        the last step failed half-way; and if buckets have started during backward.
        """
        self._backward_overlap.raise_if_started("metrics")
        if self._is_inconsistent:
            raise checks.inconsistent_error()
        bound = self._bound
        if not bound.collects:
            raise RuntimeError(
                "there are no sums: no step since collect_metrics was set, load_state_dict, "
                "add_param_group or release(): set collect_metrics=True on the optimizer before "
                "step(), then call metrics()"
            )
        process_groups = None if local else self._preparation.process_groups
        return read_metrics(
            bound.stores,
            bound.missing,
            bound.nonfinite,
            self.param_groups,
            self.qk_clip,
            process_groups,
            per_parameter,
        )

    def plan_report(self) -> Report:
        """The plan of the last step, with the buckets of this rank: print it, or draw its
        `figure()`. Set the attribute `timing` to True before a step for measured times.

        Not collective. Raises RuntimeError if nothing is bound: before the first step, and after
        release(), load_state_dict() or add_param_group().
        """
        # A rank without parameters of its own has nothing to step, and an empty report
        if not self._bound.all_jobs and self._preparation.fingerprint is None:
            raise RuntimeError(
                f"nothing is bound {self._why_unbound}: call step() before plan_report()"
            )
        run = self._backward_overlap.pipeline_run
        return report_of(self._bound.all_jobs, this_rank(), self._watch, run)

    def memory_report(self) -> MemoryReport:
        """Bytes by kind, of this rank and of the rank with the most: weights, gradients, state,
        workspace, tables, memory of CUDA graphs. Print the report, or read its numbers.

        Before the first step, and after release(), the report predicts a step with gradients of all
        parameters: state and workspace exactly, tables approximately, graphs not at all. Else
        state, workspace, tables and graphs of this rank are measured. The largest rank is always
        predicted, and so are gradients and the temporaries of groups with use_muon=False. Memory of
        the model, NCCL, the driver and torch's allocator is not counted. Not collective.
        """
        itself = self._itself()
        bound, prepared = itself._bound, itself._preparation
        measured_bytes = None
        if bound.all_jobs:
            graphs = (prepared.graphs, prepared.adamw_graphs)
            measured_bytes = measured(
                bound, itself.param_groups, itself.state, graphs, prepared.place
            )
        return itself._forecast(this_rank(), measured_bytes)

    def _forecast(
        self,
        rank: int,
        measured_bytes: Mapping | None = None,
        row_shards: int | None = None,
        **gpu: object,
    ) -> MemoryReport:
        """Plan without a step, and return the report of the plan. Arguments as in
        `predicted` and `ForecastPlanner`.
        """
        options, options_by_group = self._options, self._options_by_group()

        def planner() -> ForecastPlanner:
            """Return a planner with process groups that nobody else uses."""
            groups = ProcessGroups(dedicated=options.overlaps)
            return ForecastPlanner(options, groups, row_shards, **gpu)

        with collection_paused():
            plans = plans_of(planner, self.param_groups, options, options_by_group)
            return predicted(plans, self.param_groups, options, rank, measured_bytes)

    @classmethod
    def memory_forecast(
        cls,
        params: Iterable,
        *,
        ranks: int = 1,
        layout: str = "fsdp",
        gpu_bytes: int = 80 << 30,
        **arguments: object,
    ) -> MemoryReport:
        """The `memory_report` of an optimizer before its first step, on `ranks` GPUs that need not
        exist: without process groups. Changes and steps nothing.

        `params`: as for the constructor, of the whole model, plain, usually on the meta device.
        `layout`: "fsdp", every parameter sharded along dim 0 by FSDP2, or "ddp", copies on all
        ranks. `gpu_bytes`: memory of a GPU, of which the workspace is a share; times of an H200
        divide the work. `arguments`: of the constructor, without process_group. For other layouts
        shard the meta model over a mesh, and call `memory_report`. Raises ValueError for other
        values, and what the constructor raises.
        """
        arguments = forecast_arguments(ranks, layout, gpu_bytes, arguments)
        if layout == "ddp":
            arguments.update(cls._ranks_as_argument(AssumedRanks(ranks)))
        opt = cls(copied_groups(params), **arguments)
        row_shards = ranks if layout == "fsdp" else None
        return opt._forecast(0, None, row_shards, gpu_bytes=gpu_bytes)

    @classmethod
    def _ranks_as_argument(cls, ranks: AssumedRanks) -> dict[str, object]:
        """The constructor's argument for ranks with copies of plain parameters."""
        return {"process_group": ranks}

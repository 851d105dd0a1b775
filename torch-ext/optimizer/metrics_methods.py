"""Methods of the optimizers for metrics of steps."""

from __future__ import annotations

from .execution.overlap.forward import waits_for_updates
from .metrics.reading import read_metrics
from .metrics.values import Metrics
from .state import create
from .state_dict_methods import StateDictMethods


class MetricsMethods(StateDictMethods):
    """Base class: the method `metrics`. Subclasses set `_bound`, `_preparation`,
    `_backward_overlap` and `qk_clip`.
    """

    @property
    def _has_sums(self) -> bool:
        """Whether `metrics` has values to return."""
        itself = self._itself()
        return itself._bound.collects and not itself._is_torn

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
        create.refuse_inconsistent(self._is_torn)
        bound = self._bound
        if not bound.collects:
            raise RuntimeError(
                "there are no sums: no step since collect_metrics was set, load_state_dict, "
                "add_param_group or release(): set collect_metrics=True on the optimizer before "
                "step(), then call metrics()"
            )
        process_groups = None if local else self._preparation.process_groups
        return read_metrics(bound, self.param_groups, self.qk_clip, process_groups, per_parameter)

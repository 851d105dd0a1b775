"""The values of `Muon.metrics`, as plain dataclasses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class ParameterMetrics:
    """Values of one parameter in a step.

    The update is the difference of the weights after and before the step, as stored: with lr, with
    weight decay, and rounded to the dtype of the weight.
    """

    update_rms: float  # root mean square of the update
    weight_rms: float  # root mean square of the new weight
    update_to_weight: float  # update_rms / weight_rms; inf for a weight of zeros
    # Frobenius norm of the new momentum; of AdamW and Lion, of exp_avg; of SGD, of momentum_sum
    momentum_norm: float
    update_share: float  # part of the sum of squares of all updates, from 0 to 1


@dataclass(frozen=True)
class GroupMetrics(ParameterMetrics):
    """Values of the parameters of a group that were stepped, as if they were one parameter."""

    skipped: int  # matrices (use_muon=False: parameters) left alone for NaN or Inf
    # ||O O^T - I||_F / sqrt(n) of the orthogonalized update O of a sampled matrix with the short
    # side n; the mean if several were sampled. None: none was, or the matrix had no gradient
    orthogonality_error: float | None


@dataclass(frozen=True)
class Metrics:
    """The result of `Muon.metrics`."""

    # By index in `param_groups`; a group without a stepped parameter is left out
    groups: Mapping[int, GroupMetrics]
    # By name; "group<n>.#<index>" without a name, "group<n>.#<index>.<name>" if several parameters
    # have the name; empty unless asked for
    parameters: Mapping[str, ParameterMetrics]
    clipped_heads: int | None = None  # by QK-clip, on all ranks; None without `qk_clip`

    def as_dict(self, prefix: str = "muon") -> dict[str, float]:
        """Return all values under flat keys, as loggers take them: "muon/group0/update_rms",
        "muon/parameters/blocks.0.q.weight/update_rms", "muon/clipped_heads". Values that are None
        are left out.
        """
        found = {}
        for number, values in self.groups.items():
            found |= {f"{prefix}/group{number}/{key}": value for key, value in _items(values)}
        for name, values in self.parameters.items():
            found |= {f"{prefix}/parameters/{name}/{key}": value for key, value in _items(values)}
        if self.clipped_heads is not None:
            found[f"{prefix}/clipped_heads"] = self.clipped_heads
        return found


def _items(values: ParameterMetrics) -> Iterator[tuple[str, float]]:
    """Return (name, value) of the values that are not None."""
    pairs = ((f.name, getattr(values, f.name)) for f in fields(values))
    return ((name, value) for name, value in pairs if value is not None)


@dataclass(frozen=True)
class Sums:
    """Sums over elements, of one parameter or of several."""

    update: float = 0.0  # of squares
    weight: float = 0.0
    momentum: float = 0.0
    elements: float = 0.0
    error: float = 0.0  # orthogonality errors of the sampled matrices
    samples: float = 0.0  # number of these
    read: float = 0.0  # elements that were read; the sums are scaled to all

    def __add__(self, other: Sums) -> Sums:
        """Return the sums over the elements of both."""
        return Sums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def values(self, total: float) -> tuple[float, ...]:
        """Return the values of `ParameterMetrics`. `total`: sum of the squares of all updates."""
        update, weight = (math.sqrt(x / self.elements) for x in (self.update, self.weight))
        ratio = update / weight if weight else math.inf if update else 0.0
        share = self.update / total if total else 0.0
        return update, weight, ratio, math.sqrt(self.momentum), share

    @property
    def orthogonality_error(self) -> float | None:
        """Mean of the errors; None without samples."""
        return self.error / self.samples if self.samples else None

"""`read_metrics`: the values of the last step, from the sums of this rank or of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import starmap
from typing import Protocol

import torch

from ..communication.missing_grads import MissingGradients
from ..communication.nonfinite import NonfiniteFlags, reduce_sum
from ..communication.process_groups import ProcessGroups
from ..params.errors import given_names
from ..planning.plan import bucket_sort_key
from ..planning.planner import StoreOfPlan
from ..qk_clip.clip import QKClip
from .collector import Collector
from .values import GroupMetrics, Metrics, ParameterMetrics, Sums


class MeasuredStore(StoreOfPlan, Protocol):
    """The store of a plan, of a step that collects metrics."""

    collector: Collector


def read_metrics(
    stores: Sequence[MeasuredStore],
    missing: MissingGradients,
    nonfinite: NonfiniteFlags | None,
    groups: Sequence[dict],
    clip: QKClip | None,
    process_groups: ProcessGroups | None,
    per_parameter: bool,
) -> Metrics:
    """Return the metrics of the last step. Waits for the device.

    `stores`, `missing`, `nonfinite`: of the bound step, which has collected (`BoundStep` in
    execution/prepare/step.py). `groups`: live parameter groups. `clip`: of the optimizer.
    `process_groups`: sums are added over the ranks of each parameter, collective; None: sums of
    this rank. `per_parameter`: whether to return values of each parameter as well.
    """
    clipped = None if clip is None else int(clip.clipped)
    if not stores:
        return Metrics({}, {}, clipped)
    entries = [(store, number) for store in stores for number in range(len(store.params))]
    stepped = missing.stepped()
    # A parameter without a gradient was restored: it counts nothing
    keeps = [stepped[id(store), number] for store, number in entries]
    device = stores[0].device
    table = torch.cat([store.collector.table(device) for store in stores])
    table[~torch.tensor(keeps, device=device)] = 0.0
    if process_groups is not None:
        _add_over_ranks(table, entries, process_groups)
    _scale(table)
    sums = list(starmap(Sums, table.tolist()))
    skipped = [0] * len(entries) if nonfinite is None else nonfinite.skipped_by_param(entries)
    total = sum(one.update for one in sums)
    number_of = {id(group): i for i, group in enumerate(groups)}
    keys = _keys_of(groups) if per_parameter else {}
    by_group: dict[int, Sums] = {}
    skipped_of: dict[int, int] = {}
    parameters = {}
    for (store, number), own, count in zip(entries, sums, skipped):
        if not own.elements:
            continue
        group = number_of[id(store.groups[store.group_of[number]])]
        by_group[group] = by_group.get(group, Sums()) + own
        skipped_of[group] = skipped_of.get(group, 0) + count
        if per_parameter:
            parameters[keys[store.params[number]]] = ParameterMetrics(*own.values(total))
    values = {
        i: GroupMetrics(*by_group[i].values(total), skipped_of[i], by_group[i].orthogonality_error)
        for i in sorted(by_group)
    }
    return Metrics(values, parameters, clipped)


def _scale(table: torch.Tensor) -> None:
    """Scale sums over sampled elements to all elements, in place. The factor is 1 without a
    sample.
    """
    elements, read = table[:, 3], table[:, 6]
    table[:, :3] *= (elements / read.clamp(min=1.0))[:, None]


def _keys_of(groups: Sequence[dict]) -> dict[torch.Tensor, str]:
    """The key of each parameter in `Metrics.parameters`: the name; "group<n>.#<index>" without a
    name; both for a name that several parameters have.
    """
    keys = {}
    counts = Counter(name for group in groups for name in given_names(group))
    for number, group in enumerate(groups):
        names = given_names(group)
        for i, p in enumerate(group["params"]):
            name = names[i] if i < len(names) else ""
            place = "" if counts[name] == 1 else f"group{number}.#{i}"
            keys[p] = ".".join(filter(None, (place, name)))
    return keys


def _add_over_ranks(
    table: torch.Tensor, entries: Sequence[tuple[MeasuredStore, int]], process_groups: ProcessGroups
) -> None:
    """Add the rows of a table over the ranks that hold parts or copies of the parameter."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for i, (store, number) in enumerate(entries):
        layout = store.collector.plan.layouts[number]
        if len(layout.boxes) > 1:
            rows.setdefault(layout.ranks, []).append(i)
    # As for logits of QK-clip: never in a group in which buckets may have begun during backward
    common = process_groups.shared_groups()
    for ranks in sorted(rows, key=bucket_sort_key):
        some = torch.tensor(rows[ranks], device=table.device)
        part = table[some]
        reduce_sum(part, common.get_or_create(ranks))
        table[some] = part

"""`Muon.plan_report`: the plan as a table, measured and expected times of a step, and a figure.

`Report` is the public result; `Stopwatch` measures a step; `report_of` makes the report from bound
updates. A timed step launches the kernels of an untimed step, with events in between.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import torch

from . import pipeline
from .execution.workspace import buffer_name, layout_of
from .pipeline import BucketUpdate, Job, Running
from .planning.cost_model import BucketTimes, CostModel, TimelineSpan
from .planning.load_balance import least_load
from .planning.plan import Bucket
from .rules.elementwise import elementwise_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Phase of a bucket, as in `TimelineSpan.what` -> color in the figure
COLORS = {
    "pack": "#0ea5e9",
    "products": "#c2410c",
    "pack, products": "#c2410c",
    "apply": "#16a34a",
    "all": "#c2410c",
    "in": "#6366f1",
    "out": "#a855f7",
    "under way": "#a5b4fc",
}
# Columns of the table, in the order of `Row.cells`
HEADS = (
    "bucket",
    "route",
    "ranks",
    "matrices",
    "mine",
    "workspace",
    "sends in",
    "sends out",
    "max/mean",
    "expected",
    "measured",
)


# An event of torch.cuda, or on CPUs a time in ns
Mark = torch.cuda.Event | int


class Stopwatch:
    """Measures the phases of all buckets in a step, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        # (index of the job, begin, end) of each phase between two collectives
        self.parts: list[tuple[int, Mark, Mark]] = []
        self.start = self.mark()

    def mark(self) -> Mark:
        """Now: an event in the current stream, or on CPUs the clock in ns."""
        if not self.cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def over(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs, with updates that are timed."""
        return [
            (_TimedUpdate(update, number, self), group)
            for number, (update, group) in enumerate(jobs)
        ]

    def spans(self) -> list[TimelineSpan]:
        """Measured spans in order of start, in ns from the start of the step. Waits for the device.

        A span "under way" of the lane "all-to-all" lasts from the end of a phase to the next phase
        of the bucket: an all-to-all, and the wait for phases of further buckets.
        """
        if self.cuda:
            torch.cuda.synchronize()
        phases = {}
        found = []
        for number, begin, end in self.parts:
            phases.setdefault(number, []).append((self._since(begin), self._since(end)))
        for number, parts in phases.items():
            # An update without collectives has a single phase; two phases: the plan has no inbound
            # all-to-all, so packing and products follow without a pause
            names = {1: ["all"], 2: ["pack, products", "apply"]}.get(
                len(parts), ["pack", "products", "apply"]
            )
            found += [
                TimelineSpan("stream", name, number, *phase) for name, phase in zip(names, parts)
            ]
            found += [
                TimelineSpan("all-to-all", "under way", number, a[1], b[0])
                for a, b in zip(parts, parts[1:])
            ]
        return sorted(found, key=lambda span: span.start)

    def _since(self, mark: Mark) -> float:
        """ns from the start of the step."""
        # elapsed_time returns ms
        return self.start.elapsed_time(mark) * 1e6 if self.cuda else mark - self.start


class _TimedUpdate(BucketUpdate):
    """An update with a mark of the stopwatch before and after each phase."""

    def __init__(self, update: BucketUpdate, number: int, watch: Stopwatch) -> None:
        """`number`: index of the job in the step."""
        super().__init__(update.label)
        self.update = update
        self.number = number
        self.watch = watch
        self.has_collectives = update.has_collectives

    def run(self, group: dict) -> Running:
        """Run the update; see `BucketUpdate`."""
        running = self.update.run(group)
        # `for` would hide where a phase begins: the generator resumes inside `next`
        while True:
            begin = self.watch.mark()
            collective = next(running, None)
            self.watch.parts.append((self.number, begin, self.watch.mark()))
            if collective is None:
                return
            yield collective


@dataclass(frozen=True)
class Row:
    """A bucket in the report, or AdamW's parameters of a plan."""

    bucket: int  # index of the job in the step
    route: str  # as in `Bucket.route`; "elementwise": AdamW where parameters are stored
    ranks: int  # number of ranks
    matrices: dict  # (rows, columns) that are orthogonalized -> count, of all ranks
    mine: int  # matrices owned by this rank
    workspace_bytes: int  # of this rank
    sent_in_bytes: int  # sent by this rank to owners
    sent_out_bytes: int  # sent by this rank as owner
    balance: float | None  # largest load of a rank / mean load, by the cost model
    expected_ms: float | None  # of this rank's stream; None without measured tables of the device
    measured_ms: float | None  # of this rank's stream; None unless the step was timed

    def cells(self) -> list[str]:
        """The cells of the row as text, in the order of HEADS."""
        shapes = ", ".join(f"{n} x {shape}" for shape, n in _by_shape(self.matrices).items())
        nbytes = (self.workspace_bytes, self.sent_in_bytes, self.sent_out_bytes)
        times = (self.expected_ms, self.measured_ms)
        return [
            str(self.bucket),
            self.route,
            str(self.ranks),
            shapes,
            str(self.mine),
            *map(as_bytes, nbytes),
            "-" if self.balance is None else f"{self.balance:.3f}",
            *("-" if ms is None else f"{ms:.3f} ms" for ms in times),
        ]


@dataclass(frozen=True)
class Report:
    """The result of `Muon.plan_report`; `str(report)` is a table. A rank sees only buckets with the
    rank as a member.
    """

    rank: int
    rows: tuple
    # Rank -> expected work of the buckets in `rows`: ns with measured times of the device, else
    # proportional to FLOPs
    loads: dict
    least_load: float  # lower bound of the largest load, for any assignment of whole matrices
    workspace: dict  # bucket buffer or shared scratch -> bytes
    expected: list = field(repr=False)  # of TimelineSpan; empty without measured times
    measured: list = field(repr=False)  # of TimelineSpan; empty unless the step was timed

    @property
    def balance(self) -> float | None:
        """The largest load over the mean; None if nothing is orthogonalized."""
        total = sum(self.loads.values())
        return max(self.loads.values()) * len(self.loads) / total if total else None

    def __str__(self) -> str:
        """The table, and below it workspace, balance and times of the whole step."""
        # Each column is as wide as its widest cell
        table = [HEADS, *(row.cells() for row in self.rows)]
        widths = [max(len(row[i]) for row in table) for i in range(len(HEADS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in table
        ]
        return "\n".join([f"plan of rank {self.rank}", *lines, *self._sums()])

    def _sums(self) -> Iterator[str]:
        """The lines below the table."""
        parts = ", ".join(f"{name} {as_bytes(nbytes)}" for name, nbytes in self.workspace.items())
        yield f"workspace: {as_bytes(sum(self.workspace.values()))} ({parts})"
        if self.balance is not None:
            least = self.least_load * len(self.loads) / sum(self.loads.values())
            yield (
                f"balance: largest load / mean = {self.balance:.3f} over {len(self.loads)} ranks; "
                f"as matrices are not cut, no less than {least:.3f}"
            )
        for name, found in (("expected", self.expected), ("measured", self.measured)):
            if found:
                end_ms = max(span.end for span in found) / 1e6
                yield f"{name}: {end_ms:.3f} ms from the first launch to the last"

    def as_dict(self) -> dict[str, object]:
        """Return all values in lists and in dicts with text as keys, as `json.dumps` takes them.

        Shapes of matrices are "768x3072". Rows have times in ms, spans in ns; units of `loads` are
        those of the attribute; `workspace` is in bytes.
        """
        rows = [asdict(row) | {"matrices": _by_shape(row.matrices)} for row in self.rows]
        spans = {
            name: [asdict(span) for span in found]
            for name, found in (("expected", self.expected), ("measured", self.measured))
        }
        return {
            "rank": self.rank,
            "rows": rows,
            "loads": {str(rank): load for rank, load in self.loads.items()},
            "least_load": self.least_load,
            "balance": self.balance,
            "workspace": dict(self.workspace),
            **spans,
        }

    def figure(self, path: str | None = None) -> Figure:
        """Draw the timeline of all buckets, as a matplotlib figure; save to `path` if given.

        Raises ModuleNotFoundError without matplotlib, ValueError without any times.
        """
        # Imported here: the package does not require matplotlib
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "plan_report().figure() draws with matplotlib, which is not installed"
            ) from None
        # On CPUs without measured tables there are no expected times
        panels = [
            (name, found)
            for name, found in (("expected", self.expected), ("measured", self.measured))
            if found
        ]
        if not panels:
            raise ValueError(
                "nothing to draw: no times were measured for this device; set timing = True on the "
                "optimizer and take a step"
            )
        figure = Figure(figsize=(11, 1.2 + 1.7 * len(panels)), layout="constrained")
        for axes, (name, found) in zip(
            figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels
        ):
            draw(axes, found)
            axes.set_title(f"{name}, rank {self.rank}", loc="left", fontsize=10)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


def _by_shape(matrices: Mapping[tuple[int, int], int]) -> dict[str, int]:
    """The number of matrices of each shape, by "<rows>x<columns>"."""
    return {"x".join(map(str, shape)): count for shape, count in matrices.items()}


def draw(axes: Axes, found: Sequence[TimelineSpan]) -> None:
    """Draw spans on two lanes, stream and all-to-all, with bucket numbers in wide spans."""
    width = max(span.end for span in found)
    seen = {}
    for span in found:
        lane = ("all-to-all", "stream").index(span.lane)
        duration = span.end - span.start
        bars = axes.barh(
            lane, duration / 1e6, left=span.start / 1e6, color=COLORS[span.what], edgecolor="white"
        )
        seen.setdefault(span.what, bars)
        # A number would be wider than a shorter span
        if duration > 0.02 * width:
            axes.text(
                (span.start + span.end) / 2e6,
                lane,
                str(span.bucket),
                ha="center",
                va="center",
                fontsize=8,
            )
    axes.set_yticks((0, 1), ("all-to-all", "stream"))
    axes.set_xlabel("ms")
    axes.legend(
        seen.values(), seen, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5)
    )


def report_of(
    jobs: Sequence[Job], rank: int, watch: Stopwatch | None = None, run: Callable = pipeline.run
) -> Report:
    """Return the report of a bound step.

    `jobs`: in the order of the step. `watch`: of the last step; None: no step was timed. `run`: the
    function of pipeline.py that runs the step, also for the simulated timeline.
    """
    measured = watch.spans() if watch else []
    measured_ms = Counter()  # index of a job -> ms in the stream
    for span in measured:
        measured_ms[span.bucket] += (span.end - span.start) / 1e6 * (span.lane == "stream")
    rows = [
        _row(number, update, group, measured_ms.get(number))
        for number, (update, group) in enumerate(jobs)
    ]
    models = [_cost_model(update, group) for update, group in jobs]
    loads = Counter()
    works = []  # expected work of each matrix
    for (update, _), model in zip(jobs, models):
        if model:
            loads.update(_loads(update.bucket, model))
            works += [model(*m.iterated_shape) for m in update.bucket.matrices]
    # Simulate only with measured times: work by FLOPs is no time
    known = next((model for model in models if model and model.measured), None)
    expected = known.spans([_times(update, known) for update, _ in jobs], run) if known else []
    bound = [update for update, _ in jobs if update.bucket is not None]
    return Report(
        rank,
        tuple(filter(None, rows)),
        dict(loads),
        least_load(works, max(len(loads), 1)),
        workspace_of(bound),
        expected,
        measured,
    )


def _cost_model(update: BucketUpdate, group: dict) -> CostModel | None:
    """The cost model of a bucket of matrices; None for AdamW and for a pause."""
    # Not by keys: torch puts every default of the optimizer into every group
    has_matrices = update.bucket is not None and group["use_muon"]
    return CostModel.of(group, update.store.device) if has_matrices else None


def _loads(bucket: Bucket, model: CostModel) -> Counter:
    """Expected work of each rank; zero for ranks that own nothing."""
    loads = Counter(dict.fromkeys(bucket.ranks, 0))
    for matrix, owner in zip(bucket.matrices, bucket.owners):
        loads[owner] += model(*matrix.iterated_shape)
    return loads


def _row(number: int, update: BucketUpdate, group: dict, measured_ms: float | None) -> Row | None:
    """The row of an update; None for a pause."""
    if update.bucket is None and update.store is not None:  # AdamW where parameters are stored
        shapes = Counter(tuple(p.shape) for p in update.store.params)
        # No workspace and no all-to-alls; a matrix column with the shapes of parameters
        return Row(
            number,
            "elementwise",
            1,
            shapes,
            len(update.store.params),
            0,
            0,
            0,
            None,
            None,
            measured_ms,
        )
    if update.bucket is None:
        return None
    bucket = update.bucket
    rank_plan = update.rank_plan
    model = _cost_model(update, group)
    loads = _loads(bucket, model) if model else {}
    # The balance of a bucket without work, as of empty matrices, is unknown
    total = sum(loads.values())
    times = _times(update, model) if model and model.measured else None
    return Row(
        number,
        bucket.route,
        len(bucket.ranks),
        Counter(m.iterated_shape for m in bucket.matrices),
        len(rank_plan.matrices),
        sum(rank_plan.workspace_layout()[1].values()),
        sum(rank_plan.inbound.send_bytes),
        sum(rank_plan.outbound.send_bytes),
        max(loads.values()) * len(loads) / total if total else None,
        (times.pack + times.products + times.apply) / 1e6 if times else None,
        measured_ms,
    )


def _times(update: BucketUpdate, model: CostModel) -> BucketTimes:
    """Expected times of an update, in ns: as planned, or of rules that step elements from the bytes
    moved, in fp32 (AdamW: 28 for each element).
    """
    element = 0
    if update.store is not None and not update.store.groups[0]["use_muon"]:
        # Weight and averages are read and written, the gradient is read
        element = 4 * (3 + 2 * len(elementwise_of(update.store.groups[0]).averages))
    if update.bucket is not None:
        rank_plan = update.rank_plan
        planned = update.bucket.times
        chunks = model.memory_time(
            element * sum(p.numel for p in rank_plan.owned if p.stored_at == p.owner)
        )
        inbound, outbound = (
            model.all_to_all_time(sum(plan.send_bytes))
            for plan in (rank_plan.inbound, rank_plan.outbound)
        )
        return planned or BucketTimes(0, inbound, chunks, outbound, 0, update.has_collectives)
    elements = 0
    if update.store is not None:
        elements = sum(w.numel() for w in update.store.locals())
    return BucketTimes(0, 0, 0, 0, model.memory_time(element * elements), update.has_collectives)


def workspace_of(updates: Sequence[BucketUpdate]) -> dict[str, int]:
    """Workspace of this rank: {name as of `buffer_name`: bytes}."""
    # Buckets take turns in a buffer: the largest counts, not the sum
    sizes = Counter()
    for update in updates:
        for memory, nbytes in layout_of(update.rank_plan, update.stack_name)[1].items():
            name = buffer_name(update.buffer_index if memory == "bucket_buffer" else memory)
            sizes[name] = max(sizes[name], nbytes)
    return dict(sizes)


def as_bytes(count: float) -> str:
    """A number of bytes as text, in the largest unit below the number."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024

"""`plan_report`: the plan as a table, times of a step, and a figure."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import torch

from .. import pipeline
from ..pipeline import BucketUpdate
from ..planning.cost_model import BucketTimes, CostModel, TimelineSpan
from ..planning.load_balance import least_load

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


class Stopwatch:
    """The times of one step: a mark before and after each part of a route's story, without waiting
    for the device.
    """

    def __init__(self, device):
        self.cuda, self.parts = device.type == "cuda", []
        self.start = self.mark()

    def mark(self):
        """Now: an event in the current stream, or on a CPU the clock's time in ns."""
        if not self.cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def over(self, jobs) -> list:
        """The same jobs, timed."""
        return [(_Timed(route, number, self), hp) for number, (route, hp) in enumerate(jobs)]

    def spans(self) -> list[TimelineSpan]:
        """What was measured; waits for the device. The wire's part lasts until its bucket goes
        on.
        """
        if self.cuda:
            torch.cuda.synchronize()
        stories, found = {}, []
        for number, begin, end in self.parts:
            stories.setdefault(number, []).append((self._since(begin), self._since(end)))
        for number, parts in stories.items():
            names = {1: ["all"], 2: ["pack, products", "apply"]}.get(
                len(parts), ["pack", "products", "apply"]
            )
            found += [
                TimelineSpan("stream", name, number, *part) for name, part in zip(names, parts)
            ]
            found += [
                TimelineSpan("wire", "under way", number, a[1], b[0])
                for a, b in zip(parts, parts[1:])
            ]
        return sorted(found, key=lambda span: span.start)

    def _since(self, mark):
        return self.start.elapsed_time(mark) * 1e6 if self.cuda else mark - self.start


class _Timed(BucketUpdate):
    """A route whose story leaves marks."""

    def __init__(self, route, number, watch):
        super().__init__(route.label)
        self.route = route
        self.number = number
        self.watch = watch
        self.travels = route.travels

    def run(self, hp):
        story = self.route.run(hp)
        while True:
            begin = self.watch.mark()
            collective = next(story, None)
            self.watch.parts.append((self.number, begin, self.watch.mark()))
            if collective is None:
                return
            yield collective


@dataclass(frozen=True)
class Row:
    """One bucket. Bytes are those of this rank, `matrices` shape -> how many in all, `mine` how
    many it computes; `balance` is the largest load over the mean, by the cost model; times are in
    ms of this rank's stream, None where they are not known.
    """

    bucket: int
    route: str
    ranks: int
    matrices: dict
    mine: int
    workspace_bytes: int
    sent_in_bytes: int
    sent_out_bytes: int
    balance: float | None
    expected_ms: float | None
    measured_ms: float | None

    def cells(self) -> list[str]:
        """The row as text."""
        shapes = ", ".join(
            f"{n} x {'x'.join(map(str, shape))}" for shape, n in self.matrices.items()
        )
        nbytes = (self.workspace_bytes, self.sent_in_bytes, self.sent_out_bytes)
        times = (self.expected_ms, self.measured_ms)
        return [
            str(self.bucket),
            self.route,
            str(self.ranks),
            shapes,
            str(self.mine),
            *map(_bytes, nbytes),
            "-" if self.balance is None else f"{self.balance:.3f}",
            *("-" if ms is None else f"{ms:.3f} ms" for ms in times),
        ]


@dataclass(frozen=True)
class Report:
    """What `Muon.plan_report` returns; `str(report)` is a table. Seen from one rank, which knows
    its own buckets.

    `loads`: rank -> expected work (ns where times were measured on this device, else in proportion
    to FLOPs) of the buckets that this rank has part in; `least_load`: what the most loaded rank has
    at least, however matrices are shared; `workspace`: the bytes of every bucket
    buffer and of the shared scratch. `expected`, `measured`: lists of TimelineSpan, empty where
    nothing is known.
    """

    rank: int
    rows: tuple
    loads: dict
    least_load: float
    workspace: dict
    expected: list = field(repr=False)
    measured: list = field(repr=False)

    @property
    def balance(self) -> float | None:
        """The largest load over the mean; None where nothing is orthogonalized."""
        total = sum(self.loads.values())
        return max(self.loads.values()) * len(self.loads) / total if total else None

    def __str__(self) -> str:
        table = [HEADS, *(row.cells() for row in self.rows)]
        widths = [max(len(row[i]) for row in table) for i in range(len(HEADS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in table
        ]
        return "\n".join([f"plan of rank {self.rank}", *lines, *self._sums()])

    def _sums(self):
        parts = ", ".join(f"{name} {_bytes(nbytes)}" for name, nbytes in self.workspace.items())
        yield f"workspace: {_bytes(sum(self.workspace.values()))} ({parts})"
        if self.balance is not None:
            least = self.least_load * len(self.loads) / sum(self.loads.values())
            yield (
                f"balance: largest load / mean = {self.balance:.3f} over {len(self.loads)} ranks; "
                "as matrices are "
                f"not cut, no less than {least:.3f}"
            )
        for name, found in (("expected", self.expected), ("measured", self.measured)):
            if found:
                end_ms = max(span.end for span in found) / 1e6
                yield f"{name}: {end_ms:.3f} ms from the first launch to the last"

    def figure(self, path=None):
        """Draw when buckets run, as a matplotlib figure; written to `path` if given. Needs
        matplotlib.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "plan_report().figure() draws with matplotlib, which is not installed"
            ) from None
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


def draw(axes, found) -> None:
    """Draw spans on two lanes, stream and wire, with the bucket's number in each that is wide
    enough.
    """
    width, seen = max(span.end for span in found), {}
    for span in found:
        lane, duration = ("wire", "stream").index(span.lane), span.end - span.start
        bars = axes.barh(
            lane, duration / 1e6, left=span.start / 1e6, color=COLORS[span.what], edgecolor="white"
        )
        seen.setdefault(span.what, bars)
        if duration > 0.02 * width:
            axes.text(
                (span.start + span.end) / 2e6,
                lane,
                str(span.bucket),
                ha="center",
                va="center",
                fontsize=8,
            )
    axes.set_yticks((0, 1), ("wire", "stream"))
    axes.set_xlabel("ms")
    axes.legend(
        seen.values(), seen, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5)
    )


def report_of(jobs, rank, watch=None, run=pipeline.run) -> Report:
    """The report of bound jobs, [(route, live parameter group)] in the order of a step; `watch`: of
    the last one; `run`: what steps them.
    """
    measured, took = watch.spans() if watch else [], Counter()
    for span in measured:
        took[span.bucket] += (span.end - span.start) / 1e6 * (span.lane == "stream")
    rows = [_row(number, route, hp, took.get(number)) for number, (route, hp) in enumerate(jobs)]
    paces = [_pace(route, hp) for route, hp in jobs]
    loads, works = Counter(), []
    for (route, _), pace in zip(jobs, paces):
        if pace:
            loads.update(_loads(route.bucket, pace))
            works += [pace(m.rows, m.cols) for m in route.bucket.matrices]
    known = next((pace for pace in paces if pace and pace.measured), None)
    expected = known.spans([_part(route, known) for route, _ in jobs], run) if known else []
    bounds = [route for route, _ in jobs if route.bucket is not None]
    return Report(
        rank,
        tuple(filter(None, rows)),
        dict(loads),
        least_load(works, max(len(loads), 1)),
        workspace_of(bounds),
        expected,
        measured,
    )


def _pace(route, hp):
    """The cost model of a route with matrices."""
    matrices = route.bucket is not None and "ns_steps" in hp
    return CostModel.of(hp, route.store.device) if matrices else None


def _loads(bucket, pace) -> Counter:
    """Expected work by rank, zero for ranks that own nothing."""
    loads = Counter(dict.fromkeys(bucket.ranks, 0))
    for matrix, owner in zip(bucket.matrices, bucket.owners):
        loads[owner] += pace(matrix.rows, matrix.cols)
    return loads


def _row(number, route, hp, measured_ms):
    """The row of one route, None for a pause."""
    if route.bucket is None and route.store is not None:  # AdamW where it is stored
        shapes = Counter(tuple(p.shape) for p in route.store.params)
        return Row(
            number,
            "elementwise",
            1,
            shapes,
            len(route.store.params),
            0,
            0,
            0,
            None,
            None,
            measured_ms,
        )
    if route.bucket is None:
        return None
    bucket, share, pace = route.bucket, route.rank_plan, _pace(route, hp)
    loads = _loads(bucket, pace) if pace else {}
    total, part = sum(loads.values()), _part(route, pace) if pace and pace.measured else None
    return Row(
        number,
        bucket.route,
        len(bucket.ranks),
        Counter((m.rows, m.cols) for m in bucket.matrices),
        len(share.matrices),
        sum(share.workspace_layout()[1].values()),
        sum(share.inbound.send_bytes),
        sum(share.outbound.send_bytes),
        max(loads.values()) * len(loads) / total if total else None,
        (part.pack + part.products + part.apply) / 1e6 if part else None,
        measured_ms,
    )


def _part(route, pace) -> BucketTimes:
    """What is expected of a route: as planned, or for AdamW from the bytes that it moves (28 per
    element in fp32).
    """
    if route.bucket is not None:
        share, planned = route.rank_plan, route.bucket.times
        chunks = pace.memory_time(28 * sum(p.numel for p in share.owned if p.home == p.owner))
        inbound, outbound = (
            pace.all_to_all_time(sum(way.send_bytes)) for way in (share.inbound, share.outbound)
        )
        return planned or BucketTimes(0, inbound, chunks, outbound, 0, route.travels)
    elements = sum(w.numel() for w in route.store.locals()) if route.store is not None else 0
    return BucketTimes(0, 0, 0, 0, pace.memory_time(28 * elements), route.travels)


def workspace_of(bounds) -> dict[str, int]:
    """What bound buckets take of this rank, in bytes: by bucket buffer, and the shared scratch."""
    sizes = Counter()
    for bound in bounds:
        for memory, nbytes in bound.rank_plan.workspace_layout()[1].items():
            name = f"bucket buffer {bound.buffer_index}" if memory == "bucket_buffer" else "shared scratch"
            sizes[name] = max(sizes[name], nbytes)
    return dict(sizes)


def _bytes(count) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024

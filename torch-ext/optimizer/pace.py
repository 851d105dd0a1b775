"""How long things take: products by shape, memory, the wire; and when buckets then run.

Decides: the cost model, integers in nanoseconds made from measured times (kernels/tables/*_pace.json), by which owners
are chosen, buckets are cut and ordered, and plans are reported. Must not know: matrices' owners, layouts, tensors.
"""
from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from . import pipeline, polar
from .kernels import tiles

NOMINAL = 1000  # FLOPs in a nanosecond, where nothing was measured: only ratios count there


@functools.cache
def table(arch: str) -> dict:
    """The measured times of an architecture; {} where there are none."""
    path = tiles.TABLES / f"{arch}_pace.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


class Pace:
    """Expected times, in ns, of the iteration `steps` (polar.Steps) on an architecture ("sm90", see kernels/tiles.py).

    Called with (R, C), it returns the time of one more (R, C) matrix in a stack. `measured` says whether these are
    times at all: of an architecture without a table only the ratios of products mean something.
    """

    def __init__(self, steps: polar.Steps, arch: str):
        self.steps, self.table = steps, table(arch)
        self.measured = bool(self.table)
        self.key = hashlib.sha256(repr((arch, self.table)).encode()).hexdigest()  # part of the plan's digest
        self._known = {}

    @classmethod
    def of(cls, hp, device) -> Pace:
        """That of a parameter group on a device."""
        steps = polar.steps_of(hp["ns_coefficients"], hp["ns_steps"])
        return cls(steps, tiles.architecture(device.type, device.index))

    def __call__(self, R: int, C: int) -> int:
        shape = (R, C)
        if shape not in self._known:
            flops = polar.cost(R, C, self.steps)
            self._known[shape] = max(1, round(flops / (self._rate(*sorted(shape)) if self.measured else NOMINAL)))
        return self._known[shape]

    def _rate(self, n, m):
        """FLOPs in a ns: what was measured at the same shape, or a mean in which near shapes count most."""
        total, weights = 0.0, 0.0
        for stack in self.table["stacks"]:
            rows, columns = sorted((stack["rows"], stack["columns"]))
            away = math.log2(max(n, 1) / rows) ** 2 + math.log2(max(m, 1) / columns) ** 2
            weight = 1 / (away + 1e-6) ** 2
            total, weights = total + weight * math.log(_rate_of(stack, self.table["stack_us"])), weights + weight
        return math.exp(total / weights)

    def stacks(self, counts: Mapping) -> int:
        """The time of a stack of each shape, `counts`: (R, C) -> matrices."""
        fixed = round(1e3 * self.table["stack_us"]) if self.measured else 0
        return sum(fixed + count * self(*shape) for shape, count in counts.items() if count)

    def memory(self, nbytes: float) -> int:
        """The time to read or write so many bytes, all counted."""
        return round(nbytes / self.table["copy_gbps"]) if self.measured else 0

    def wire(self, nbytes: float) -> int:
        """The time of an all-to-all in which no rank sends or receives more bytes."""
        if not (self.measured and nbytes):
            return 0
        return round(1e3 * self.table["wire_us"] + nbytes / self.table["wire_gbps"])

    def spans(self, parts) -> list[Span]:
        """When buckets run; see `spans`."""
        return spans(parts, self.table["exposed"] if self.measured else 0.0)


def _rate_of(stack, stack_us):
    """FLOPs in a ns of a measured stack, less what every stack takes."""
    steps = polar.steps_of("polar_express", 5)
    flops = stack["count"] * polar.cost(stack["rows"], stack["columns"], steps)
    return flops / (1e3 * (stack["us"] - stack_us))


@dataclass(frozen=True)
class Part:
    """The expected times of one bucket, in ns: before its way in, the way, the products, the way back, the rest."""
    pack: int
    inbound: int
    products: int
    outbound: int
    apply: int
    travels: bool = True


@dataclass(frozen=True)
class Span:
    """From `start` to `end`, in ns, bucket number `bucket` is at `what` on `lane` ("stream" or "wire")."""
    lane: str
    what: str
    bucket: int
    start: float
    end: float


def spans(parts, exposed: float) -> list[Span]:
    """When buckets run on one rank: the pipeline's own order on a stream that computes and a wire that carries.

    `exposed`: how much longer computing takes for each second in which the wire is busy beside it.
    """
    clock = _Clock(exposed)
    pipeline.run([(_Story(clock, number, part), None) for number, part in enumerate(parts)])
    return clock.spans


class _Clock:
    def __init__(self, exposed):
        self.exposed, self.spans, self.now, self.free = exposed, [], 0.0, 0.0

    def compute(self, what, bucket, duration):
        start, end = self.now, self.now + duration
        busy = sum(max(0.0, min(end, s.end) - max(start, s.start)) for s in self.spans[-16:] if s.lane == "wire")
        self.now = end + self.exposed * busy
        self.spans.append(Span("stream", what, bucket, start, self.now))

    def carry(self, what, bucket, duration):
        start = max(self.now, self.free)
        self.free = start + duration
        self.spans.append(Span("wire", what, bucket, start, self.free))
        return _Flight(self, self.free)


class _Flight:
    """A collective that is done at a known time."""

    def __init__(self, clock, end):
        self.clock, self.end = clock, end

    def wait(self):
        self.clock.now = max(self.clock.now, self.end)


class _Story:
    """A route that only takes time."""

    def __init__(self, clock, number, part):
        self.clock, self.number, self.part, self.travels = clock, number, part, part.travels

    def run(self, hp):
        clock, part, number = self.clock, self.part, self.number
        clock.compute("pack", number, part.pack)
        if part.inbound:
            yield clock.carry("in", number, part.inbound)
        clock.compute("products", number, part.products)
        if part.outbound:
            yield clock.carry("out", number, part.outbound)
        clock.compute("apply", number, part.apply)

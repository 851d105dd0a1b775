"""Cost model: expected time of Newton-Schulz by shape and batch, of memory traffic and of
all-to-alls, from measured tables; and a timeline simulation of the pipeline.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from .. import pipeline
from ..kernels.launch import tile_config
from ..kernels.matmul.api import RAW_SIDES
from ..kernels.onchip import gram_chain, polar, sm90_polar
from ..newton_schulz import coefficients, method

NOMINAL = 1000  # FLOPs in a nanosecond, where nothing was measured: only ratios count there
# The matrix whose time counts for its owner is one of so many: a lone one leaves processors without
# work
BATCH = 16


@functools.cache
def table(arch: str) -> dict:
    """The times of an architecture other than its products': {} where none were measured.

    `copy_gbps` (device copy, bytes read + written), `wire_gbps` and `wire_us` (an all-to-all,
    docs/facts.md), `exposed` (how much longer products take for each second of wire beside them),
    `norm` (of scaling to norm 1: per stack, and bytes moved per element, of bf16 that is cast, or
    not: kernels/raw_norm.py), `overlap_us` (by which a product begins before the launch before it
    ends), `on_chip_us` (of a small matrix in one program: and per column), `chain_us` (the same of
    sm90_polar.py), `follow_us` (of what follows Gram matrices in one program: of up to 64 rows, of
    more), `resident_us` (of that in gram_chain.py: per launch, per product, and per column of what
    is multiplied first).
    """
    path = tile_config.TABLES / f"{arch}_pace.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def latency_bytes(arch: str) -> int:
    """The bytes that the wire carries in the time of its latency; 0 where none was measured."""
    known = table(arch)
    return round(1e3 * known["wire_us"] * known["wire_gbps"]) if known else 0


class CostModel:
    """Expected times, in ns, of the iteration `steps` (steps.Steps) on an architecture ("sm90", see
    kernels/tiles.py).

    Called with (R, C), it returns what a matrix of that shape counts for its owner, an int above 0.
    `measured` says whether these are times at all: of an architecture without tables only the
    ratios mean something.
    """

    def __init__(self, steps: coefficients.Steps, arch: str):
        products = [e for e in tile_config.table(arch)["entries"] if e["bytes"] == 2]
        self.steps, self.table, self.processors = (
            steps,
            table(arch),
            tile_config.table(arch).get("processors", 1),
        )
        # A plan is the same on all GPUs of an architecture
        common = [e for e in products if "gpu" not in e]
        self.entries = {
            op: [e for e in common if e["op"] == op] for op in ("gram", "symmetric", "product")
        }
        self.measured = (
            bool(self.table)
            and all(self.entries.values())
            and all("us" in entry for entry in products)
        )
        # Part of the plan's digest
        self.key = hashlib.sha256(repr((arch, self.table, products)).encode()).hexdigest()
        self._known, self._costs = {}, {}

    @classmethod
    def of(cls, hp, device) -> CostModel:
        """That of a parameter group on a device."""
        steps = coefficients.steps_of(hp["ns_coefficients"], hp["ns_steps"])
        return cls(steps, tile_config.architecture(device.type, device.index))

    def __call__(self, R: int, C: int) -> int:
        if (R, C) not in self._costs:
            cost = (
                self.stacks({(R, C): BATCH}) // BATCH
                if self.measured
                else method.cost(R, C, self.steps) // NOMINAL
            )
            self._costs[R, C] = max(1, cost)
        return self._costs[R, C]

    def stacks(self, counts: Mapping) -> int:
        """The time of a stack of each shape, `counts`: (R, C) -> matrices; those of one short side
        share launches.
        """
        if not self.measured:
            return sum(count * self(*shape) for shape, count in counts.items())
        sides = defaultdict(Counter)
        for (R, C), count in counts.items():
            sides[min(R, C)][max(R, C)] += count
        return sum(self._side(n, tuple(sorted((+longs).items()))) for n, longs in sides.items())

    def _side(self, n, longs):
        """ns of the matrices of one short side; `longs`: (long side, matrices)."""
        if (n, longs) not in self._known:
            self._known[n, longs] = round(1e3 * self._side_us(n, longs))
        return self._known[n, longs]

    def _side_us(self, n, longs):
        us, shared, (launches, products, grams) = 0.0, Counter(), self._stays(n, longs)
        for m, count in longs:
            if polar.is_small(n, m) and not self.steps.aol:
                chained = (
                    sm90_polar.takes(n, m, len(self.steps.triples)) and "chain_us" in self.table
                )
                first, column = self.table["chain_us" if chained else "on_chip_us"]
                us += -(-count // self.processors) * (first + column * m)
                continue
            norm, made = self.table["norm"], method.launches(n, m, self.steps)
            # Of bf16, as on the wire
            raw = n in RAW_SIDES and made["gram"] > 1 and not self.steps.aol
            moved = count * n * m * norm["raw_bytes" if raw else "bytes"]
            us += norm["launch_us"] + moved / self.table["copy_gbps"] / 1e3
            us += (made["gram"] - grams) * self._product_us("gram", n, m, count)
            us += made["product"] * self._product_us("product", n, m, count)
            if made["product"] == len(self.steps.triples):  # the standard iteration shares none
                us += made["symmetric"] * self._product_us("symmetric", n, n, count)
            else:
                shared[made["symmetric"]] += count
        if n <= polar.LARGEST:
            return us + sum(
                -(-count // self.processors) * self.table["follow_us"][n > 64]
                for count in shared.values()
            )
        for made, count in shared.items():
            us += (made - products) * self._product_us("symmetric", n, n, count)
        return us + self._resident_us(launches, products, grams, longs)

    def _stays(self, n, longs):
        """(Launches of gram_chain.py, their products, how many begin with X X^T): none where other
        launches do it.
        """
        few = sum(count for _, count in longs) < gram_chain.FROM
        if few or n not in gram_chain.SIDES or "resident_us" not in self.table:
            return 0, 0, 0
        cut = coefficients.F16, method.restart_interval(n, longs[0][0], self.steps), n
        both, begins = zip(self.steps.segments(*cut), self.steps.pairs(*cut)), len(longs) == 1
        found = [
            (4 * (len(segment) - 1), begins and not (self.steps.aol and number == 0))
            for number, (segment, pair) in enumerate(both)
            if gram_chain.takes(segment, pair)
        ]
        return len(found), sum(products for products, _ in found), sum(gram for _, gram in found)

    def _resident_us(self, launches, products, grams, longs):
        if not launches:
            return 0.0
        launch, product, column = self.table["resident_us"]
        turns = -(-sum(count for _, count in longs) // self.processors)
        return turns * (launch * launches + product * products + column * longs[0][0] * grams)

    def _product_us(self, op, n, m, count):
        """One launch among others, with the tile that is expected to be fastest, alone."""
        alone = min(
            tile_config.expected_us(entry, n, m, count, self.processors)
            for entry in self.entries[op]
        )
        return alone - self.table["overlap_us"]

    def memory(self, nbytes: float) -> int:
        """The time to read or write so many bytes, all counted."""
        return round(nbytes / self.table["copy_gbps"]) if self.measured else 0

    def wire(self, nbytes: float) -> int:
        """The time of an all-to-all in which no rank sends or receives more bytes."""
        if not (self.measured and nbytes):
            return 0
        return round(1e3 * self.table["wire_us"] + nbytes / self.table["wire_gbps"])

    def spans(self, parts, run=pipeline.run) -> list[TimelineSpan]:
        """When buckets run; see `spans`."""
        return spans(parts, self.table["exposed"] if self.measured else 0.0, run)


@dataclass(frozen=True)
class BucketTimes:
    """The expected times of one bucket, in ns: before its way in, the way, the products, the way
    back, the rest.
    """

    pack: int
    inbound: int
    products: int
    outbound: int
    apply: int
    travels: bool = True


@dataclass(frozen=True)
class TimelineSpan:
    """From `start` to `end`, in ns, bucket number `bucket` is at `what` on `lane` ("stream" or
    "wire").
    """

    lane: str
    what: str
    bucket: int
    start: float
    end: float


def spans(parts, exposed: float, run=pipeline.run) -> list[TimelineSpan]:
    """When buckets run on one rank: the pipeline's own order on a stream that computes and a wire
    that carries.

    `exposed`: how much longer computing takes for each second in which the wire is busy beside it.
    """
    clock = _Clock(exposed)
    run([(_Story(clock, number, part), None) for number, part in enumerate(parts)])
    return clock.spans


class _Clock:
    def __init__(self, exposed):
        self.exposed, self.spans, self.now, self.free = exposed, [], 0.0, 0.0

    def compute(self, what, bucket, duration):
        start, end = self.now, self.now + duration
        busy = sum(
            max(0.0, min(end, s.end) - max(start, s.start))
            for s in self.spans[-16:]
            if s.lane == "wire"
        )
        self.now = end + self.exposed * busy
        self.spans.append(TimelineSpan("stream", what, bucket, start, self.now))

    def carry(self, what, bucket, duration):
        start = max(self.now, self.free)
        self.free = start + duration
        self.spans.append(TimelineSpan("wire", what, bucket, start, self.free))
        return _Flight(self, self.free)


class _Flight:
    """A collective that is done at a known time."""

    def __init__(self, clock, end):
        self.clock, self.end = clock, end

    def wait(self):
        self.clock.now = max(self.clock.now, self.end)


class _Story(pipeline.BucketUpdate):
    """A route that only takes time."""

    def __init__(self, clock, number, part):
        super().__init__(f"bucket {number}")
        self.clock = clock
        self.number = number
        self.part = part
        self.travels = part.travels

    def run(self, hp):
        clock, part, number = self.clock, self.part, self.number
        clock.compute("pack", number, part.pack)
        if part.inbound:
            yield clock.carry("in", number, part.inbound)
        clock.compute("products", number, part.products)
        if part.outbound:
            yield clock.carry("out", number, part.outbound)
        clock.compute("apply", number, part.apply)

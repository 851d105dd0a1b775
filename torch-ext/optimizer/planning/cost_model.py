"""Cost model: expected time of Newton-Schulz by shape and batch, of memory traffic and of
all-to-alls, from measured tables; and a timeline simulation of the pipeline.

`CostModel` predicts times of a rank. `spans` runs the real schedule (`pipeline.run`) on a clock
and returns when each phase of each bucket runs. Touches no tensor.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import pipeline
from ..kernels.launch import tile_config
from ..kernels.matmul.api import MIXED_INPUT_SIDES
from ..kernels.onchip import gram_chain, polar, sm90_polar
from ..newton_schulz import coefficients, method

if TYPE_CHECKING:
    import torch

# FLOPs per ns where no times were measured. Only ratios of costs matter then.
NOMINAL = 1000
# Batch size at which the cost of one matrix is measured: a single matrix leaves most processors
# idle, and an owner usually has several of a shape
BATCH = 16

Longs = tuple[tuple[int, int], ...]  # (long side, number of matrices), for one short side


@functools.cache
def table(arch: str) -> dict:
    """Return the measured times of an architecture, without matmuls (kernels/launch/tables); {} if
    nothing was measured.

    - `copy_gbps`: device copy, bytes read and written, GB/s
    - `all_to_all_us`, `all_to_all_gbps`: latency and rate of an all-to-all (docs/facts.md)
    - `exposed`: seconds by which matmuls grow per second of an all-to-all in parallel
    - `norm`: scaling to norm 1: `launch_us` per stack, bytes moved per element of a bf16 matrix
      with a cast (`bytes`) and without (`raw_bytes`)
    - `overlap_us`: by how much a matmul begins before the end of the launch before
    - `on_chip_us`: small matrix in one program (kernels/onchip/polar.py): constant, per column
    - `chain_us`: the equivalent for kernels/onchip/sm90_polar.py
    - `follow_us`: a restart interval of Gram matrices in one program: up to 64 rows, more rows
    - `resident_us`: kernels/onchip/gram_chain.py: per launch, per product, per column of X X^T
    """
    path = tile_config.TABLES / f"{arch}_pace.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def latency_bytes(arch: str) -> int:
    """Return the bytes that an all-to-all transfers in the time of its latency; 0 if nothing was
    measured. Smaller all-to-alls are dominated by latency.
    """
    known = table(arch)
    return round(1e3 * known["all_to_all_us"] * known["all_to_all_gbps"]) if known else 0


class CostModel:
    """Expected times, in ns, of a Newton-Schulz iteration on an architecture.

    A call with (rows, cols) returns the cost of a matrix for its owner, an int > 0. Costs are times
    if `measured`; else FLOPs in nominal units, and only ratios of costs have a meaning.
    """

    def __init__(self, steps: coefficients.Steps, arch: str) -> None:
        """`arch`: "sm90" or another name of kernels/launch/tables."""
        products = [e for e in tile_config.table(arch)["entries"] if e["bytes"] == 2]
        self.steps = steps
        self.table = table(arch)
        self.processors = tile_config.table(arch).get("processors", 1)  # SMs of a GPU
        # Entries for a single GPU model are left out: ranks with different models of an
        # architecture must get equal plans
        common = [e for e in products if "gpu" not in e]
        self.entries = {
            op: [e for e in common if e["op"] == op] for op in ("gram", "symmetric", "product")
        }
        self.measured = (
            bool(self.table)
            and all(self.entries.values())
            and all("us" in entry for entry in products)
        )
        # communication/plan_check.py compares keys: ranks with different tables would choose
        # different owners
        self.key = hashlib.sha256(repr((arch, self.table, products)).encode()).hexdigest()
        self._batch_times: dict[tuple[int, Longs], int] = {}  # (short side, longs) -> ns
        self._costs: dict[tuple[int, int], int] = {}  # (rows, cols) -> cost

    @classmethod
    def of(cls, group: Mapping, device: torch.device) -> CostModel:
        """Return the cost model of a parameter group on a device."""
        steps = coefficients.steps_of(group["ns_coefficients"], group["ns_steps"])
        return cls(steps, tile_config.architecture(device.type, device.index))

    def __call__(self, R: int, C: int) -> int:
        """Return the cost of an (R, C) matrix: the average over a batch of BATCH."""
        if (R, C) not in self._costs:
            cost = (
                self.batch_time({(R, C): BATCH}) // BATCH
                if self.measured
                else method.cost(R, C, self.steps) // NOMINAL
            )
            self._costs[R, C] = max(1, cost)
        return self._costs[R, C]

    def batch_time(self, counts: Mapping[tuple[int, int], int]) -> int:
        """Return the ns of Newton-Schulz on a batch; `counts`: (R, C) -> number of matrices.

        Shapes with equal short sides share the launches of n x n products: the time is less than
        the sum over shapes.
        """
        if not self.measured:
            return sum(count * self(*shape) for shape, count in counts.items())
        sides = defaultdict(Counter)  # short side -> long side -> number of matrices
        for (R, C), count in counts.items():
            sides[min(R, C)][max(R, C)] += count
        # +longs drops shapes without matrices
        return sum(self._side(n, tuple(sorted((+longs).items()))) for n, longs in sides.items())

    def _side(self, n: int, longs: Longs) -> int:
        """Return the ns of all matrices with short side `n`, cached."""
        if (n, longs) not in self._batch_times:
            self._batch_times[n, longs] = round(1e3 * self._side_us(n, longs))
        return self._batch_times[n, longs]

    def _side_us(self, n: int, longs: Longs) -> float:
        """Return the us of all matrices with short side `n`: the sum over the launches of
        newton_schulz/iteration.py.
        """
        us = 0.0
        # Number of n x n products of the Gram iteration -> number of matrices
        shared = Counter()
        launches, products, grams = self._in_gram_chain(n, longs)
        for m, count in longs:
            if polar.is_small(n, m) and not self.steps.aol:
                us += self._on_chip_us(n, m, count)
                continue
            made = method.launches(n, m, self.steps)
            us += self._norm_us(n, m, count, made)
            us += (made["gram"] - grams) * self._product_us("gram", n, m, count)
            us += made["product"] * self._product_us("product", n, m, count)
            if made["product"] == len(self.steps.triples):
                # Standard iteration: every long side has n x n products of its own
                us += made["symmetric"] * self._product_us("symmetric", n, n, count)
            else:
                shared[made["symmetric"]] += count
        if n <= polar.MAX_SHORT_SIDE:
            # All n x n products of a restart interval are one launch, one matrix per program
            return us + sum(
                -(-count // self.processors) * self.table["follow_us"][n > 64]
                for count in shared.values()
            )
        for made, count in shared.items():
            us += (made - products) * self._product_us("symmetric", n, n, count)
        return us + self._gram_chain_us(launches, products, grams, longs)

    def _on_chip_us(self, n: int, m: int, count: int) -> float:
        """Return the us of `count` small matrices (n, m), a program on a processor for each."""
        chained = (
            sm90_polar.supports_shape(n, m, len(self.steps.triples)) and "chain_us" in self.table
        )
        first, column = self.table["chain_us" if chained else "on_chip_us"]
        return -(-count // self.processors) * (first + column * m)

    def _norm_us(self, n: int, m: int, count: int, made: Mapping[str, int]) -> float:
        """Return the us of scaling `count` matrices (n, m) to norm 1, from bf16 as received;
        `made`: see `method.launches`.
        """
        norm = self.table["norm"]
        # Matrices that stay bf16 until the first product are only read, see `api.MIXED_INPUT_SIDES`
        raw = n in MIXED_INPUT_SIDES and made["gram"] > 1 and not self.steps.aol
        moved = count * n * m * norm["raw_bytes" if raw else "bytes"]
        return norm["launch_us"] + moved / self.table["copy_gbps"] / 1e3

    def _in_gram_chain(self, n: int, longs: Longs) -> tuple[int, int, int]:
        """Return (launches of kernels/onchip/gram_chain.py, n x n products in the launches,
        launches with X X^T as first product); zeros if the kernel does not run.
        """
        few = sum(count for _, count in longs) < gram_chain.FROM
        if few or n not in gram_chain.SIDES or "resident_us" not in self.table:
            return 0, 0, 0
        options = coefficients.F16, method.restart_interval(n, longs[0][0], self.steps), n
        both = zip(self.steps.intervals(*options), self.steps.pairs(*options))
        # With several long sides the X X^T of each is a launch of its own
        begins = len(longs) == 1
        found = [
            (4 * (len(interval) - 1), begins and not (self.steps.aol and number == 0))
            for number, (interval, pair) in enumerate(both)
            if gram_chain.supports_interval(interval, pair)
        ]
        return len(found), sum(products for products, _ in found), sum(gram for _, gram in found)

    def _gram_chain_us(self, launches: int, products: int, grams: int, longs: Longs) -> float:
        """Return the us of the launches of `_in_gram_chain`: a processor per matrix, in turns."""
        if not launches:
            return 0.0
        launch, product, column = self.table["resident_us"]
        turns = -(-sum(count for _, count in longs) // self.processors)
        return turns * (launch * launches + product * products + column * longs[0][0] * grams)

    def _product_us(self, op: str, n: int, m: int, count: int) -> float:
        """Return the us added by a matmul in a sequence of launches, with the fastest tile.

        `op`: "gram" (X X^T), "symmetric" (n x n with symmetric result) or "product" (Q X).
        """
        alone = min(
            tile_config.expected_us(entry, n, m, count, self.processors)
            for entry in self.entries[op]
        )
        return alone - self.table["overlap_us"]

    def memory_time(self, nbytes: float) -> int:
        """Return the ns to move `nbytes`, read plus written; 0 if nothing was measured."""
        return round(nbytes / self.table["copy_gbps"]) if self.measured else 0

    def all_to_all_time(self, nbytes: float) -> int:
        """Return the ns of an all-to-all with at most `nbytes` sent and received per rank; 0 for 0
        bytes, and if nothing was measured.
        """
        if not (self.measured and nbytes):
            return 0
        return round(1e3 * self.table["all_to_all_us"] + nbytes / self.table["all_to_all_gbps"])

    def spans(
        self, parts: Iterable[BucketTimes], run: Callable = pipeline.run
    ) -> list[TimelineSpan]:
        """Return the timeline of buckets on this architecture, see the function `spans`."""
        return spans(parts, self.table["exposed"] if self.measured else 0.0, run)


@dataclass(frozen=True)
class BucketTimes:
    """Expected times of the phases of a bucket, in ns."""

    pack: int  # momentum, copy into the send buffer
    inbound: int  # first all-to-all; 0: none
    products: int  # Newton-Schulz, and copies of whole matrices
    outbound: int  # second all-to-all; 0: none
    apply: int  # momentum, weights
    has_collectives: bool = True  # as `BucketUpdate.has_collectives`


@dataclass(frozen=True)
class TimelineSpan:
    """A phase `what` of bucket number `bucket`, from `start` to `end` in ns. `lane`: "stream" (the
    compute stream) or "all-to-all" (all-to-alls).
    """

    lane: str
    what: str
    bucket: int
    start: float
    end: float


def spans(
    buckets: Iterable[BucketTimes], exposed: float, run: Callable = pipeline.run
) -> list[TimelineSpan]:
    """Simulate the buckets of one rank; return the spans of all phases.

    The buckets run in the order of `run`, the pipeline's own code, on a compute stream and a
    network that transfers a single all-to-all at a time. `exposed`: ns by which computation grows
    per ns of an all-to-all in parallel.
    """
    clock = _Clock(exposed)
    run([(_SimulatedUpdate(clock, number, times), None) for number, times in enumerate(buckets)])
    return clock.spans


class _Clock:
    """Simulated time of one rank: when the compute stream and the network are free, in ns."""

    def __init__(self, exposed: float) -> None:
        self.exposed = exposed
        self.spans: list[TimelineSpan] = []
        self.now = 0.0  # end of the work on the compute stream
        self.free = 0.0  # end of the last all-to-all

    def compute(self, what: str, bucket: int, duration: float) -> None:
        """Append a phase to the compute stream, longer by its overlap with all-to-alls."""
        start = self.now
        end = start + duration
        # Only the last 16 spans are searched, for linear time: with BUCKETS_IN_FLIGHT buckets all
        # older all-to-alls have ended
        busy = sum(
            max(0.0, min(end, s.end) - max(start, s.start))
            for s in self.spans[-16:]
            if s.lane == "all-to-all"
        )
        self.now = end + self.exposed * busy
        self.spans.append(TimelineSpan("stream", what, bucket, start, self.now))

    def transfer(self, what: str, bucket: int, duration: float) -> _SimulatedCollective:
        """Start an all-to-all as soon as the network is free; return the collective in flight."""
        start = max(self.now, self.free)
        self.free = start + duration
        self.spans.append(TimelineSpan("all-to-all", what, bucket, start, self.free))
        return _SimulatedCollective(self, self.free)


class _SimulatedCollective:
    """A collective in flight with a known end."""

    def __init__(self, clock: _Clock, end: float) -> None:
        self.clock = clock
        self.end = end  # ns

    def wait(self) -> None:
        """Let the compute stream wait until the collective has ended."""
        self.clock.now = max(self.clock.now, self.end)


class _SimulatedUpdate(pipeline.BucketUpdate):
    """A bucket update without tensors: every phase only takes time."""

    def __init__(self, clock: _Clock, number: int, times: BucketTimes) -> None:
        super().__init__(f"bucket {number}")
        self.clock = clock
        self.number = number  # of the bucket
        self.times = times
        self.has_collectives = times.has_collectives

    def run(self, group: None) -> Iterator[_SimulatedCollective]:
        """Advance the clock by the phases of the bucket, see `BucketUpdate.run`."""
        clock, number = self.clock, self.number
        times = self.times
        clock.compute("pack", number, times.pack)
        if times.inbound:
            yield clock.transfer("in", number, times.inbound)
        clock.compute("products", number, times.products)
        if times.outbound:
            yield clock.transfer("out", number, times.outbound)
        clock.compute("apply", number, times.apply)

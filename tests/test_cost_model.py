"""The cost model: it is near what was measured, and buckets run in the pipeline's own order."""

from __future__ import annotations

import csv
import math
import statistics
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.ranks import part

ROOT = Path(__file__).resolve().parent.parent
HP = {"ns_coefficients": "polar_express", "ns_steps": 5}


def pace(arch, **changes):
    hp = {**HP, **changes}
    return part("planning.cost_model").CostModel(
        part("newton_schulz.orthogonalize").steps_of(hp["ns_coefficients"], hp["ns_steps"]), arch
    )


@pytest.mark.parametrize("arch", ["cpu", "sm90"])
@pytest.mark.parametrize("name", ["jordan", "polar_express", "cubic", "turbo"])
def test_cost_grows_with_the_matrix_and_knows_no_orientation(name, arch, optimizer):
    cost = pace(arch, ns_coefficients=name)
    assert cost(640, 256) == cost(256, 640) > 0
    assert cost(256, 256) < cost(256, 1024) < cost(1024, 1024) < cost(1024, 8192) < cost(4096, 4096)
    assert pace(arch, ns_steps=8)(512, 512) > pace(arch)(512, 512)
    assert all(isinstance(cost(*shape), int) and cost(*shape) > 0 for shape in [(1, 1), (3, 0), (7, 90_000)])


def test_without_measurements_cost_is_flops(optimizer):
    """5 steps of the Gram iteration on a square matrix: 9 n^3 for X X^T and Q X, 9 n^3 for the products between."""
    assert pace("cpu")(1000, 1000) == 18 * 1000**3 // part("planning.cost_model").NOMINAL
    unmeasured = pace("cpu")
    assert not unmeasured.measured and unmeasured.all_to_all_time(1 << 20) == unmeasured.memory_time(1 << 20) == 0


def test_expected_times_are_near_the_measured_ones(optimizer):
    """The newest captured run of every stack in the committed results: within a half, on average within 15 %."""
    newest = {}
    with open(ROOT / "benchmarks" / "results" / "polar.csv", newline="") as file:
        for row in csv.DictReader(file):
            iteration = row["algorithm"] in ("gram", "standard") and not row["spectrum"] and row["dtype"] == "bf16"
            if iteration and (row["run"], row["implementation"]) == ("graph", "ours") and row["median_ms"]:
                newest[row["gpu"], tuple(int(row[key]) for key in ("n", "rows", "cols"))] = float(row["median_ms"])
    ratios = [pace("sm90").batch_time({(R, C): N}) / 1e6 / ms for (gpu, (N, R, C)), ms in newest.items()
              if gpu == part("planning.cost_model").table("sm90")["gpu"] and min(R, C) >= 256]
    assert len(ratios) >= 10 and 1 / 1.5 < min(ratios) and max(ratios) < 1.5
    assert statistics.mean(abs(math.log(ratio)) for ratio in ratios) < 0.15


@pytest.mark.parametrize("shape", [(8, 8), (8, 12), (8, 64)])
@pytest.mark.parametrize("name", ["jordan", "polar_express", "cubic", "aol", "deepseek_v4"])
def test_the_launches_that_are_priced_are_those_that_are_made(name, shape, monkeypatch, optimizer):
    polar, made = part("newton_schulz.orthogonalize"), Counter()
    iteration = part("newton_schulz.iteration")
    steps = polar.steps_of(name)

    def counting(op, real):
        def counted(*args, **kwargs):
            made[op] += 1
            return real(*args, **kwargs)
        return counted

    for module, op, function in ((iteration, "gram", "gram"), (iteration, "symmetric", "symmetric_product"),
                                 (iteration, "product", "product")):
        monkeypatch.setattr(module, function, counting(op, getattr(module, function)))
    polar.orthogonalize_([torch.randn(2, *shape)], steps, dtype=torch.float16)
    assert made == Counter(part("newton_schulz.method").launches(*shape, steps))


def test_entries_for_gpus_of_a_name_are_no_part_of_times(monkeypatch, optimizer):
    """A plan is the same on all GPUs of an architecture; where an op has no other entries, nothing is known of it."""
    tiles = part("kernels.launch.tile_config")
    known = tiles.table("sm90")
    own = [{**entry, "gpu": "H100", "us": [9.0, 9.0, 9.0, 9.0]} for entry in known["entries"] if "us" in entry]
    monkeypatch.setattr(tiles, "table", lambda arch: {**known, "entries": known["entries"] + own})
    more = pace("sm90")
    assert more.measured and not any("gpu" in entry for some in more.entries.values() for entry in some)
    assert more.key != pace("cpu").key
    monkeypatch.setattr(tiles, "table", lambda arch: {**known, "entries": own})
    assert not pace("sm90").measured and pace("sm90")(768, 768) == pace("cpu")(768, 768)


def test_a_stack_takes_less_than_its_matrices_one_by_one(optimizer):
    p = pace("sm90")
    for shape in [(768, 768), (1024, 4096), (64, 256)]:
        assert p.batch_time({shape: 1}) <= p.batch_time({shape: 8}) < 8 * p.batch_time({shape: 1})
    apart = p.batch_time({(768, 768): 2}) + p.batch_time({(64, 1024): 3})
    assert p.batch_time({(768, 768): 2, (1024, 64): 3, (5, 5): 0}) == apart
    # one short side: the products of Gram matrices are shared
    together = p.batch_time({(1024, 4096): 2, (8192, 1024): 2})
    assert max(p.batch_time({(1024, 4096): 2}), p.batch_time({(1024, 8192): 2})) < together
    assert together < p.batch_time({(1024, 4096): 2}) + p.batch_time({(1024, 8192): 2})
    assert p.batch_time({(4096, 1024): 1, (1024, 4096): 1}) == p.batch_time({(1024, 4096): 2})


def test_what_stays_on_a_processor_takes_turns(optimizer):
    """Near the times measured on an H200 and an H100 (stacks.csv, "processors"), in us; of several long sides X X^T is
    launched apart.
    """
    p, resident = pace("sm90"), part("kernels.onchip.gram_chain")
    measured = {(64, 256, 256): 109, (48, 256, 256): 102, (64, 256, 768): 150, (66, 256, 1024): 165,
                (48, 256, 2048): 208, (64, 256, 2048): 234, (128, 256, 256): 133, (128, 256, 768): 194,
                (200, 256, 1024): 388}
    ratios = [1e-3 * p.batch_time({(R, C): N}) / us for (N, R, C), us in measured.items()]
    assert .85 < min(ratios) and max(ratios) < 1.15
    assert p.batch_time({(256, 768): 133}) - p.batch_time({(256, 768): 132}) > 60_000, "another turn"
    few, many = ({(256, 768): resident.FROM - 33 + more, (256, 512): 32} for more in (0, 1))
    in_chain = p._in_gram_chain
    assert not any(in_chain(256, ((512, 32), (768, few[256, 768])))) and in_chain(256, ((256, 48),)) == (2, 8, 2)
    assert in_chain(256, ((512, 32), (768, 16))) == (1, 8, 0) and not any(in_chain(192, ((512, 48),)))
    assert p.batch_time(many) > p.batch_time({(256, 768): resident.FROM})


def test_what_is_not_cast_is_only_read(monkeypatch, optimizer):
    """Its norm moves other bytes: of short sides that stay bf16, where they restart, and without AOL scaling."""
    known = part("planning.cost_model").table("sm90")
    norm = known["norm"]

    def saved(shape, raw_bytes, **changes):
        """ns of one matrix that `raw_bytes` less would save."""
        before = pace("sm90", **changes).batch_time({shape: 1})
        with monkeypatch.context() as patch:
            patch.setitem(known, "norm", norm | {"raw_bytes": norm["raw_bytes"] - raw_bytes})
            return before - pace("sm90", **changes).batch_time({shape: 1})

    for shape in [(256, 768), (3072, 1023)]:
        expected = shape[0] * shape[1] / known["copy_gbps"]
        assert saved(shape, 1.0) == pytest.approx(expected, abs=2)
        assert saved(shape, 1.0, ns_coefficients="cubic") == saved(shape, 1.0, ns_coefficients="turbo") == 0
    assert saved((1024, 4096), 1.0) == saved((128, 4096), 1.0) == 0


def test_the_key_names_the_table(optimizer):
    """It is part of what ranks compare: owners chosen by other times are other owners."""
    assert pace("cpu").key == pace("cpu").key != pace("sm90").key
    assert part("planning.cost_model").CostModel.of(HP, torch.device("cpu")).key == pace("cpu").key


def test_an_all_to_all_has_a_latency_and_a_rate(optimizer):
    p = pace("sm90")
    assert p.all_to_all_time(0) == 0 < p.all_to_all_time(1)
    more = p.all_to_all_time(2 << 30) - p.all_to_all_time(1 << 30)
    assert more == pytest.approx((1 << 30) / 330, rel=1e-6)


def lanes(spans, lane):
    return [(s.what, s.bucket, s.start, s.end) for s in spans if s.lane == lane]


def test_buckets_overlap_as_the_pipeline_lets_them(optimizer):
    """Bucket 1 travels in while bucket 0 is computed; the answer of 0 travels while 1 is computed."""
    cost_model = part("planning.cost_model")
    BucketTimes, spans = cost_model.BucketTimes, cost_model.spans
    assert lanes(spans([BucketTimes(1, 10, 100, 10, 2)] * 2, 0.0), "stream") == [
        ("pack", 0, 0, 1), ("pack", 1, 1, 2), ("products", 0, 11, 111), ("products", 1, 111, 211),
        ("apply", 0, 211, 213), ("apply", 1, 221, 223)]
    assert lanes(spans([BucketTimes(1, 10, 100, 10, 2)] * 2, 0.0), "all-to-all") == [
        ("in", 0, 1, 11), ("in", 1, 11, 21), ("out", 0, 111, 121), ("out", 1, 211, 221)]


def test_a_busy_network_slows_what_is_computed_beside_it(optimizer):
    cost_model = part("planning.cost_model")
    BucketTimes, spans = cost_model.BucketTimes, cost_model.spans
    alone, beside = (max(s.end for s in spans([BucketTimes(0, 10, 100, 10, 0)] * 4, exposed)) for exposed in (0.0, 0.5))
    assert alone == 420 and beside == 420 + 0.5 * 6 * 10


def test_what_stays_at_home_runs_beside_the_first_way_in(optimizer):
    cost_model = part("planning.cost_model")
    BucketTimes, spans = cost_model.BucketTimes, cost_model.spans
    local = BucketTimes(1, 0, 20, 0, 1, has_collectives=False)
    order = lanes(spans([BucketTimes(1, 50, 10, 5, 1), local], 0.0), "stream")
    assert order == [("pack", 0, 0, 1), ("pack", 1, 1, 2), ("products", 1, 2, 22), ("apply", 1, 22, 23),
                     ("products", 0, 51, 61), ("apply", 0, 66, 67)]

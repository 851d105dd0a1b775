"""The cost model: what was measured comes back, the rest lies between, and buckets run in the pipeline's own order."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import part

ROOT = Path(__file__).resolve().parent.parent
HP = {"ns_coefficients": "polar_express", "ns_steps": 5}
TABLES = sorted((ROOT / "torch-ext" / "optimizer" / "kernels" / "tables").glob("*_pace.json"))


def pace(arch, **changes):
    hp = {**HP, **changes}
    return part("pace").Pace(part("polar").steps_of(hp["ns_coefficients"], hp["ns_steps"]), arch)


@pytest.mark.parametrize("arch", ["cpu", "sm90"])
@pytest.mark.parametrize("name", ["jordan", "polar_express", "cubic", "turbo"])
def test_cost_grows_with_the_matrix_and_knows_no_orientation(name, arch, optimizer):
    cost = pace(arch, ns_coefficients=name)
    assert cost(64, 256) == cost(256, 64) > 0
    assert cost(256, 256) < cost(256, 1024) < cost(1024, 1024) < cost(1024, 8192) < cost(4096, 4096)
    assert pace(arch, ns_steps=8)(512, 512) > pace(arch)(512, 512)
    assert all(isinstance(cost(*shape), int) and cost(*shape) > 0 for shape in [(1, 1), (3, 0), (7, 90_000)])


def test_without_measurements_cost_is_flops(optimizer):
    """5 steps of the standard iteration on a square matrix: 15 n^3 for X X^T and P X, 5 n^3 for A^2."""
    assert pace("cpu")(1000, 1000) == 20 * 1000**3 // part("pace").NOMINAL
    assert not pace("cpu").measured and pace("cpu").wire(1 << 20) == pace("cpu").memory(1 << 20) == 0


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_measured_stacks_come_back(path, optimizer):
    """Exactly, unless one shape was measured with several counts: then within what they differ."""
    table = json.loads(path.read_text())
    shapes = [(s["rows"], s["columns"]) for s in table["stacks"]]
    for stack in table["stacks"]:
        shape = stack["rows"], stack["columns"]
        expected = pace(table["arch"]).stacks({shape: stack["count"]})
        assert expected == pytest.approx(1e3 * stack["us"], rel=0.01 if shapes.count(shape) == 1 else 0.1)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tables_hold_what_was_measured(path):
    """Every stack is a row of the results, and the tool writes the committed file again."""
    table = json.loads(path.read_text())
    with open(ROOT / "benchmarks" / "results" / "polar.csv", newline="") as file:
        rows = {(r["gpu"], r["n"], r["rows"], r["cols"], f"{1e3 * float(r['median_ms']):.1f}")
                for r in csv.DictReader(file) if r["run"] == "graph"}
    assert all((table["gpu"], str(s["count"]), str(s["rows"]), str(s["columns"]), f"{s['us']:.1f}") in rows
               for s in table["stacks"])
    assert 0 < table["exposed"] <= 1 and table["stack_us"] < min(s["us"] for s in table["stacks"])


def test_the_tool_writes_the_table(tmp_path):
    for path in TABLES:
        table = json.loads(path.read_text())
        command = [sys.executable, ROOT / "tools" / "fit_pace.py", "--gpu", table["gpu"], "--arch", table["arch"],
                   "--out", tmp_path / "new.json"]
        facts = [f"--{key.replace('_', '-')}={table[key]}" for key in ("copy_gbps", "wire_gbps", "wire_us", "exposed")]
        done = subprocess.run([*command, *facts], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        new = json.loads((tmp_path / "new.json").read_text())
        assert {**table, "stacks": None} == {**new, "stacks": None}
        assert table["stacks"] == new["stacks"]


def test_the_key_names_the_table(optimizer):
    """It is part of what ranks compare: owners chosen by other times are other owners."""
    assert pace("cpu").key == pace("cpu").key != pace("sm90").key
    assert part("pace").Pace.of(HP, torch.device("cpu")).key == pace("cpu").key


def test_the_wire_has_a_latency_and_a_rate(optimizer):
    p = pace("sm90")
    assert p.wire(0) == 0 < p.wire(1) and p.wire(2 << 30) - p.wire(1 << 30) == pytest.approx((1 << 30) / 330, rel=1e-6)


def lanes(spans, lane):
    return [(s.what, s.bucket, s.start, s.end) for s in spans if s.lane == lane]


def test_buckets_overlap_as_the_pipeline_lets_them(optimizer):
    """Bucket 1 travels in while bucket 0 is computed; the answer of 0 travels while 1 is computed."""
    Part, spans = part("pace").Part, part("pace").spans
    assert lanes(spans([Part(1, 10, 100, 10, 2)] * 2, 0.0), "stream") == [
        ("pack", 0, 0, 1), ("pack", 1, 1, 2), ("products", 0, 11, 111), ("products", 1, 111, 211),
        ("apply", 0, 211, 213), ("apply", 1, 221, 223)]
    assert lanes(spans([Part(1, 10, 100, 10, 2)] * 2, 0.0), "wire") == [
        ("in", 0, 1, 11), ("in", 1, 11, 21), ("out", 0, 111, 121), ("out", 1, 211, 221)]


def test_a_busy_wire_slows_what_is_computed_beside_it(optimizer):
    Part, spans = part("pace").Part, part("pace").spans
    alone, beside = (max(s.end for s in spans([Part(0, 10, 100, 10, 0)] * 4, exposed)) for exposed in (0.0, 0.5))
    assert alone == 420 and beside == 420 + 0.5 * 6 * 10


def test_what_stays_at_home_runs_beside_the_first_way_in(optimizer):
    Part, spans = part("pace").Part, part("pace").spans
    order = lanes(spans([Part(1, 50, 10, 5, 1), Part(1, 0, 20, 0, 1, travels=False)], 0.0), "stream")
    assert order == [("pack", 0, 0, 1), ("pack", 1, 1, 2), ("products", 1, 2, 22), ("apply", 1, 22, 23),
                     ("products", 0, 51, 61), ("apply", 0, 66, 67)]

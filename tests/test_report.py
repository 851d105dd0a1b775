"""The plan's report: it says what the plan and the all-to-alls say, times what it is told to, and changes no step."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import package, part, run_ranks, run_threads

SHAPES = [(16, 24), (24, 16), (10, 12), (16, 24), (3, 8, 6)] * 3


def stepped(rank, world, timing, reduced=None):
    """An optimizer after three steps: matrices sharded by rows, or copies whose gradients are not reduced."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    generator = torch.Generator().manual_seed(rank if reduced is False else 0)
    full = [torch.randn(shape, generator=generator) for shape in [*SHAPES, (20, 8)]]
    if reduced is None:
        mesh = init_device_mesh("cpu", (world,))
        full = [distribute_tensor(t, mesh, [Shard(len(t.shape) - 2)], src_data_rank=None) for t in full]
    params, options = [nn.Parameter(t.clone()) for t in full], {}
    if reduced is not None:
        options = {"process_group": dist.group.WORLD, "grads_are_reduced": reduced}
    groups = [{"params": params[:-1]}, {"params": params[-1:], "use_muon": False}]
    optimizer = package().NorMuon(groups, lr=0.1, workspace_bytes=40_000 if reduced is False else 32_000, **options)
    optimizer.timing = timing
    for _ in range(3):
        for p in params:
            p.grad = p.detach().clone()
        optimizer.step()
    return optimizer, params


def report_on(rank, world, timing, reduced=None):
    """(the report's parts, the plan's own figures, the weights) at one rank."""
    optimizer, params = stepped(rank, world, timing, reduced)
    report, bounds = optimizer.plan_report(), {}
    for number, (route, _) in enumerate(optimizer._bound.jobs):
        if route.bucket is not None:
            share, bucket = route.rank_plan, route.bucket
            assert route.label.startswith(f"bucket {number} (")  # in messages
            bounds[number] = (len(share.matrices), sum(share.inbound.send_bytes), sum(share.outbound.send_bytes),
                              Counter((m.rows, m.cols) for m in bucket.matrices), len(bucket.ranks))
    rows = {r.bucket: (r.mine, r.sent_in_bytes, r.sent_out_bytes, r.matrices, r.ranks) for r in report.rows
            if r.route != "elementwise"}
    local = [part("params.dtensor").local_of(p).clone() for p in params]
    return str(report), rows, bounds, report.loads, [s.what for s in report.measured], local, report.balance


@pytest.mark.parametrize("reduced", [None, True, False], ids=["fsdp", "ddp", "unreduced"])
def test_the_report_says_what_the_plan_says(reduced):
    results = run_ranks(4, report_on, True, reduced)
    for text, rows, bounds, loads, parts, _, balance in results:
        assert rows == bounds and len(rows) >= 3  # several buckets are in flight together
        assert loads == results[0][3] and sorted(loads) == [0, 1, 2, 3]
        assert balance == pytest.approx(max(loads.values()) * 4 / sum(loads.values()))
        lines = text.splitlines()
        assert lines[1].split()[:4] == ["bucket", "route", "ranks", "matrices"]
        assert all(re.match(r"\d+ +(exchange|reduce|elementwise|reduce_elementwise) ", line)
                   for line in lines[2:2 + len(rows)])
        assert f"largest load / mean = {balance:.3f} over 4 ranks" in text and "measured: " in text
        # No assignment of whole matrices is better; chunks of AdamW's parameters are no matrices
        assert float(re.search(r"no less than ([\d.]+)", text)[1]) <= balance + 1e-3
        assert {"under way", "apply"} <= set(parts)
    assert sum(mine for mine, *_ in (row for r in results for row in r[1].values())) == 21


def without_experts(rank, world):
    """One expert on two ranks: (buckets in the report of each, its text)."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    expert = nn.Parameter(distribute_tensor(torch.ones(1, 8, 8), mesh, [Shard(0)]))
    expert.grad = torch.ones_like(expert)
    opt = package().Muon([expert], lr=0.1)
    opt.step()
    return len(opt.plan_report().rows), str(opt.plan_report())


def test_a_rank_without_anything_to_step_has_an_empty_report(optimizer):
    (one, _), (none, text) = run_threads(2, without_experts)
    assert (one, none) == (1, 0) and text.startswith("plan of rank 1")


def test_timing_is_off_unless_asked_for_and_changes_no_bit():
    plain, timed = (run_ranks(2, report_on, timing) for timing in (False, True))
    assert all("measured:" not in r[0] and r[4] == [] for r in plain)
    for a, b in zip(plain, timed):
        assert all(torch.equal(x, y) for x, y in zip(a[5], b[5]))


def test_every_part_of_a_story_is_timed_once():
    (text, _, bounds, _, parts, *_), *_ = run_ranks(2, report_on, True)
    travelling = len(bounds)
    assert Counter(parts) == Counter({"pack": travelling, "products": travelling, "apply": travelling,
                                      "under way": 2 * travelling, "all": 1})
    assert all(re.search(rf"^{number} .* [\d.]+ ms$", text, re.MULTILINE) for number in bounds)


def expecting(rank, world):
    optimizer, _ = stepped(rank, world, False)
    return optimizer.plan_report()


def test_what_is_expected_where_times_were_measured(monkeypatch, tmp_path, optimizer):
    """A CPU with the times of a GPU."""
    cost_model = part("planning.cost_model")
    steps = part("newton_schulz.orthogonalize").steps_of("polar_express")
    monkeypatch.setattr(cost_model.CostModel, "of", lambda hp, device: cost_model.CostModel(steps, "sm90"))
    report = run_threads(4, expecting)[0]
    assert {"pack", "in", "products", "out", "apply"} <= {span.what for span in report.expected}
    assert all(row.expected_ms > 0 for row in report.rows if row.route == "exchange")
    end = max(span.end for span in report.expected) / 1e6
    assert f"expected: {end:.3f} ms" in str(report) and report.measured == []
    figure = report.figure(tmp_path / "plan.svg")
    assert len(figure.axes) == 1 and len(figure.axes[0].patches) == len(report.expected)
    assert "expected, rank 0" in (tmp_path / "plan.svg").read_text() or (tmp_path / "plan.svg").stat().st_size > 5000


def one_step(timing=False):
    params = [nn.Parameter(torch.randn(6, 4))]
    opt = package().Muon(params)
    opt.timing, params[0].grad = timing, torch.randn(6, 4)
    opt.step()
    return opt


def test_a_measured_step_is_drawn(optimizer, tmp_path):
    report = one_step(timing=True).plan_report()
    logged = json.loads(json.dumps(report.as_dict()))
    assert logged["measured"] and [row["bucket"] for row in logged["rows"]] == [row.bucket for row in report.rows]
    assert sum(sum(row["matrices"].values()) for row in logged["rows"]) == sum(
        sum(row.matrices.values()) for row in report.rows)
    assert logged["measured"][-1]["end"] == report.measured[-1].end and logged["workspace"] == report.workspace
    assert logged["loads"] == {str(rank): load for rank, load in report.loads.items()}
    assert [(s.lane, s.what) for s in report.measured] == [("stream", "all")] and report.rows[0].measured_ms > 0
    report.figure(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 3000


def test_errors_say_what_to_do(monkeypatch, optimizer):
    with pytest.raises(RuntimeError, match="nothing is bound before the first step"):
        package().Muon([nn.Parameter(torch.ones(2, 2))]).plan_report()
    report = one_step().plan_report()
    with pytest.raises(ValueError, match="set timing = True"):
        report.figure()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "local" in str(report)
    with pytest.raises(ModuleNotFoundError, match="matplotlib, which is not installed"):
        report.figure()


def test_bytes_are_readable(optimizer):
    read = part("report").as_bytes
    assert [read(n) for n in (0, 1023, 1024, 3 << 20, 5 << 40)] == ["0 B", "1023 B", "1.0 KiB", "3.0 MiB", "5120.0 GiB"]


def balance_beside_chunks(rank, world):
    """(max / mean of the report, the least that whole matrices allow) beside a large parameter of AdamW."""
    params = [nn.Parameter(torch.randn(8, 8)) for _ in range(4)] + [nn.Parameter(torch.randn(4096, 8))]
    groups = [{"params": params[:-1]}, {"params": params[-1:], "use_muon": False}]
    opt = package().Muon(groups, process_group=dist.group.WORLD, shard_state=True)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    report = opt.plan_report()
    return report.balance, report.least_load * world / sum(report.loads.values())


def test_chunks_of_adamw_are_no_matrices(optimizer):
    for balance, least in run_threads(2, balance_beside_chunks):
        assert least <= balance <= 2

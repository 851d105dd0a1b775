"""The step on paper: bytes are those of the package's own plan, all-to-alls follow their arguments, the fit fits."""

from __future__ import annotations

import csv
import importlib
import math
from collections import Counter
from pathlib import Path

import pytest

from tests.ranks import part

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def simulate(monkeypatch, optimizer):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("simulate")


def planned(simulate, model, mode, ranks, *arguments):
    options = simulate.arguments(list(map(str, arguments)))
    return simulate.planned(model, mode, ranks, options)


@pytest.mark.parametrize("model, mode, ranks", [("tiny", "fsdp", 16), ("tiny", "hsdp", 16), ("tiny", "ddp", 16),
                                                ("tiny_experts", "fsdp", 16)])
def test_bytes_are_those_of_the_plan(model, mode, ranks, simulate):
    """What every rank sends and receives, inside nodes and between them, against the rank plans of all ranks."""
    cluster = simulate.Cluster(node=4)
    layouts, buckets, _, _ = planned(simulate, model, mode, ranks, "--shards", 8, "--expert-parallel", 4)
    assert any(b.route == "exchange" for b in buckets)
    for bucket in [b for b in buckets if b.route == "exchange"]:
        for inbound in (True, False):
            found = simulate.traffic(bucket, layouts, cluster, inbound)
            expected = {where: Counter() for where in found}
            for rank in bucket.ranks:
                rank_plan = part("planning.rank_plan").rank_plan_of(
                    bucket, rank, layouts, {}, part("planning.memory_model").PlanInputs()
                )
                way = rank_plan.inbound if inbound else rank_plan.outbound
                here, there = ("", "owner ") if inbound else ("owner ", "")
                for pieces, end, peer in ((way.leave, here, "owner" if inbound else "stored_at"),
                                          (way.arrive, there, "stored_at" if inbound else "owner")):
                    peers = Counter()
                    for piece in pieces:
                        peers[getattr(piece, peer)] += 2 * piece.numel
                    for other, nbytes in peers.items():
                        far = other // 4 != rank // 4
                        expected[end + ("far" if far else "near")][rank] += nbytes
                        expected[f"{end}messages"][rank] += far
            for what, values in found.items():
                assert [expected[what][r] for r in bucket.ranks] == values.tolist(), what


def test_what_is_planned_fits_the_package_s_default(simulate):
    """With the memory of the iteration: three bucket buffers and the shared scratch, of each rank, within 2 GiB."""
    method = part("newton_schulz.method")
    layouts, buckets, times, _ = planned(simulate, "llama3_8b", "fsdp", 4)
    terms = part("planning.memory_model").PlanInputs(
        scratch=lambda R, C: method.scratch_bytes(R, C, times.steps, part("newton_schulz.coefficients").F16),
        supports_scattered_rows=lambda R, C: method.supports_scattered_rows(R, C, times.steps))
    for rank in range(4):
        taken = Counter()
        for number, bucket in enumerate(buckets):
            rank_plan = part("planning.rank_plan").rank_plan_of(bucket, rank, layouts, {}, terms)
            for memory, nbytes in rank_plan.workspace_layout()[1].items():
                place = memory, number % 3 * (memory == "bucket_buffer")
                taken[place] = max(taken[place], nbytes)
        assert 1 << 30 < sum(taken.values()) <= 2 << 30


@pytest.mark.parametrize("model, ranks, shards", [("llama3_8b", 4, 4), ("moe_experts", 8, 8), ("moe_experts", 8, 4)])
def test_workspace_is_what_a_rank_takes(model, ranks, shards, simulate):
    """Not what ranks with other experts take besides: local buckets share one bucket buffer, families take turns."""
    layouts, buckets, times, _ = planned(simulate, model, "fsdp", ranks, "--layers", 2, "--expert-parallel", shards)
    needed, terms = 0, part("planning.memory_model").PlanInputs(once=True, scratch=simulate.terms_of(times).scratch)
    for rank in range(ranks):
        taken, travelling = Counter(), 0
        for bucket in [bucket for bucket in buckets if rank in bucket.ranks]:
            travels = bucket.route != "local"
            rank_plan = part("planning.rank_plan").rank_plan_of(bucket, rank, layouts, {}, terms)
            for memory, nbytes in rank_plan.workspace_layout()[1].items():
                place = memory, (travelling % 3 if travels else 1) * (memory == "bucket_buffer")
                taken[place] = max(taken[place], nbytes)
            travelling += travels
        needed = max(needed, sum(taken.values()))
    assert needed <= 2**20 * (simulate.workspace_mib(buckets) + 1) <= 1.1 * needed


def test_all_to_alls_follow_their_arguments(simulate):
    layouts, (bucket,), *_ = planned(simulate, "tiny", "fsdp", 32)

    def ms(exchange, **changes):
        cluster = simulate.Cluster(**changes)
        return simulate.all_to_all_ms(simulate.traffic(bucket, layouts, cluster, True), bucket, cluster, exchange)

    assert ms("flat", network_us=1060.0) == pytest.approx(ms("flat") + 1)
    assert ms("flat", network_gbps=5.0) > ms("flat") > ms("flat", node=32) == ms("two-level", node=32)
    assert ms("two-level", message_us=100.0) < ms("flat", message_us=100.0)  # 3 messages in place of up to 24
    assert ms("flat", message_us=0.0) < ms("two-level", message_us=0.0)


def test_a_step_is_at_least_its_products_and_its_all_to_alls_count(simulate, monkeypatch):
    options = simulate.arguments(["--layers", "4"])
    fitted = {"device_ms": 0.0, "scale": 1.0, "host_ms": 100.0, "stack_ms": 1.0}
    flat, two = simulate.simulate("qwen3_1p7b", "fsdp", 64, simulate.Cluster(), fitted, options)
    assert (flat["exchange"], two["exchange"]) == ("flat", "two-level") and flat["matrices"] == 28
    assert flat["step_ms"] >= flat["products_ms"] and flat["step_ms"] >= flat["all_to_all_ms"] > 0
    elements = 28 / 196 * 1.409e9  # each received once and answered once, 2 bytes, less what stays in a node
    assert flat["network_mb"] >= 2 * 2 * elements / 64 * 56 / 64 / 1e6
    assert flat["balance"] >= flat["least_balance"] >= 1
    options.run = "eager"
    assert simulate.simulate("qwen3_1p7b", "fsdp", 64, simulate.Cluster(), fitted, options)[0]["step_ms"] > 100


def test_alone_every_copy_does_all_the_work(simulate):
    options = simulate.arguments(["--layers", "8", "--shards", "8"])
    fitted = {"device_ms": 0.0, "scale": 1.0, "host_ms": 0.0, "stack_ms": 0.0}
    shared, alone = (simulate.simulate("qwen3_1p7b", mode, 32, simulate.Cluster(), fitted, options)[0]
                     for mode in ("hsdp", "hsdp_alone"))
    assert alone["products_ms"] > 3 * shared["products_ms"] and alone["network_mb"] == 0 < shared["network_mb"]


def test_pieces_of_an_expert_that_lie_side_by_side_leave_no_node(simulate):
    far, near = (planned(simulate, "tiny_experts", "fsdp", 16, "--expert-parallel", 8, "--expert-shards", where)
                 for where in ("far", "near"))
    for (layouts, buckets, *_), crosses in ((far, True), (near, False)):
        found = [simulate.traffic(bucket, layouts, simulate.Cluster(node=2), True)["far"].any() for bucket in buckets]
        assert found == [crosses] * len(buckets) and len(buckets) == 8


def test_the_model_fits_what_was_measured(simulate):
    """Long steps of the committed results, which the device bounds, within 30 %; and errors are shown row by row."""
    measured = simulate.read_measured(simulate.RESULTS)
    fitted = simulate.fit(simulate.Cluster(), measured)
    assert len(fitted["rows"]) == len(measured) >= 5 and 0.7 < fitted["scale"] < 1.4
    for row, source in zip(fitted["rows"], measured):
        assert row["measured_ms"] == pytest.approx(float(source["median_ms"]), abs=0.01)
        error = 100 * (row["predicted_ms"] / row["measured_ms"] - 1)
        assert int(row["error"].split()[0]) == pytest.approx(error, abs=1)
        if row["measured_ms"] > max(10, 1.1 * float(source["host_ms"])):
            assert row["predicted_ms"] == pytest.approx(row["measured_ms"], rel=0.3), row


def test_lines_are_fitted(simulate):
    assert simulate.line([(1, 3.0), (2, 5.0), (10, 21.0)]) == pytest.approx((1, 2))
    assert simulate.line([(2, 4.0), (2, 6.0)]) == (0.0, 2.5) and simulate.line([]) == (0.0, 1.0)
    assert simulate.line([(1, 1.0), (2, 4.0)])[0] == 0.0  # no negative start


KEYS = "ranks mode model implementation optimizer run median_ms host_ms layers commit".split()


def table(path, lines):
    """A CSV of these rows, whose last field is the commit."""
    path.write_text("\n".join([",".join(KEYS), *lines, ""]))
    return path


def test_the_newest_row_of_a_kind_counts(simulate, tmp_path):
    path = table(tmp_path / "step.csv", [
        "4,fsdp,tiny,ours,muon,eager,9,1,,a", "4,fsdp,tiny,ours,muon,eager,8,1,,a",
        "4,fsdp,tiny,peer,muon,eager,7,1,,a", "4,reduce,tiny,ours,muon,eager,6,1,,a",
        "4,fsdp,tiny,ours,normuon,eager,5,1,,a", "4,fsdp,tiny,ours,muon,graph,4,1,,a"])
    assert [row["median_ms"] for row in simulate.read_measured(path)] == ["8", "4"]


def test_rows_of_another_gpu_count_where_there_are_no_others(simulate, tmp_path):
    rows = ["4,fsdp,tiny,ours,muon,eager,9,1,,a,NVIDIA H200", "4,fsdp,tiny,ours,muon,eager,8,1,,a,another"]
    path = tmp_path / "step.csv"
    for some, found in ((rows, "9"), (rows[1:], "8")):
        path.write_text("\n".join([",".join([*KEYS, "gpu"]), *some, ""]))
        assert [row["median_ms"] for row in simulate.read_measured(path)] == [found]


def test_rows_of_others_have_pairs(simulate, tmp_path):
    """A file of one's own has no row of the commit that brought them; only rows before such a row have none."""
    kinds = [f"{ranks},fsdp,tiny,ours,muon,eager,9,1,," for ranks in (2, 4, 8)]
    for commits, pairs in (("abc", [True] * 3), (("a", simulate.PAIRS_FROM, "b"), [False, True, True])):
        path = table(tmp_path / "step.csv", [kind + commit for kind, commit in zip(kinds, commits)])
        assert [row["pairs"] for row in simulate.read_measured(path)] == pairs


def test_rows_from_before_pairs_are_planned_step_by_step(simulate):
    """In the committed results both kinds; without pairs a square matrix takes two products of eighteen more."""
    assert {row["pairs"] for row in simulate.read_measured(simulate.RESULTS)} == {False, True}
    paired, single = (simulate.planned("tiny", "fsdp", 2, simulate.arguments([]), pairs)[2].steps
                      for pairs in (True, False))
    cost = part("newton_schulz.method").cost
    assert None not in paired.pairs(n=64)[1:] and single.pairs(n=64) == (None, None, None)
    assert 9 * cost(64, 64, single) == 10 * cost(64, 64, paired)


def test_rows_from_before_the_cuts_are_planned_with_theirs(simulate, tmp_path):
    """Of a file with such rows those before them, whatever GPU they are of, and later ones of the same commits, which
    were measured in turns; 3 + 2 then, and squares with the others.
    """
    method, options = part("newton_schulz.method"), simulate.arguments([])
    now, former = (simulate.planned("tiny", "fsdp", 2, options, former_cuts=cuts)[2].steps for cuts in (False, True))
    for shape, launches in (((768, 768), (3, 9)), ((768, 3072), (2, 13)), ((64, 64), (3, 9))):
        made = [method.launches(*shape, steps) for steps in (now, former)]
        expected = [launches, launches if shape[0] < 256 else (2, 12)]
        assert [(counts["gram"], counts["symmetric"]) for counts in made] == expected
    assert {method.restart_interval(768, m, former) for m in (768, 3072)} == {3}
    path = tmp_path / "step.csv"
    rows = [("2", simulate.PAIRS_FROM, "NVIDIA H200"), ("4", "a", "NVIDIA H200"), ("4", simulate.CUTS_FROM, "another"),
            ("8", "b", "NVIDIA H200"), ("16", "a", "NVIDIA H200")]
    path.write_text("\n".join([",".join([*KEYS, "gpu"]), *(
        f"{ranks},fsdp,tiny,ours,muon,eager,9,1,,{commit},{gpu}" for ranks, commit, gpu in rows), ""]))
    assert [(row["ranks"], row["former_cuts"]) for row in simulate.read_measured(path)] == [
        ("2", True), ("4", True), ("8", False), ("16", True)]


def test_slower_copies_lengthen_what_moves_memory_alone(simulate):
    fast, slow = (planned(simulate, "qwen3_1p7b", "ddp", 1, "--layers", 1, "--copy-gbps", gbps)[1][0].times
                  for gbps in (4300, 2150))
    assert slow.apply == pytest.approx(2 * fast.apply, rel=1e-3) and fast.products < slow.products < 1.2 * fast.products


def test_one_command_says_where_a_flat_exchange_stops_paying(simulate, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["simulate.py", "--models", "tiny", "--ranks", "8", "16", "64", "--layers", "20",
                                     "--message-us", "50", "--out", str(tmp_path)])
    simulate.main()
    text = capsys.readouterr().out
    assert "fitted to measured steps" in text and "tiny, fsdp: from 16 ranks on a flat all-to-all takes longer" in text
    with open(tmp_path / "scaling.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["ranks"], row["exchange"]) for row in rows] == [
        (ranks, exchange) for ranks in ("8", "16", "64") for exchange in ("flat", "two-level")]
    assert (tmp_path / "scaling.png").stat().st_size > 10_000 and math.isfinite(float(rows[-1]["step_ms"]))

"""The scripts under benchmarks/: a run on a CPU from CSV to figures, the grid, and the timing."""
from __future__ import annotations

import argparse
import collections
import csv
import gc
import importlib
import importlib.util
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.ranks import part, run_threads
from tests.scripts import run_script

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


def load(name, monkeypatch):
    """A script of benchmarks/ as a module."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module(name)


def run(script, *arguments):
    done = run_script(FOLDER / script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_measurement_to_figures(tmp_path):
    """A peer that is not installed leaves empty fields and a note; everything else is there."""
    table = tmp_path / "polar.csv"
    text = run("polar.py", "--shapes", "2x16x40", "3x20x8", "--products", "--spectra", "--peers", "cublas", "gns",
               "--presets", "turbo", "cubic", "--rounds", 2, "--burst-ms", 0.1, "--rest-ms", 0, "--commit", "abc",
               "--out", table)
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    ours = [row for row in rows if row["implementation"] == "ours"]
    assert {(row["n"], row["rows"], row["cols"], row["algorithm"]) for row in ours if row["run"] == "eager"} >= {
        ("2", "16", "40", "gram"), ("3", "20", "8", "gram"), ("2", "16", "40", "product")}
    assert len([row for row in ours if row["spectrum"]]) == 10
    timed = [row for row in rows if row["run"] == "eager" and row["implementation"].startswith("ours")]
    assert {row["implementation"] for row in timed} == {"ours", "ours turbo", "ours cubic"}
    assert all(0 < float(row["p20_ms"]) <= float(row["median_ms"]) <= float(row["p80_ms"]) for row in timed)
    assert all(0 < float(row["error_fp64"]) < 0.01 and row["commit"] == "abc" for row in ours + timed)
    if importlib.util.find_spec("gram_newton_schulz") is None:
        missing = [row for row in rows if row["implementation"] == "gns"]
        assert missing and all((row["median_ms"], row["note"]) == ("", "ModuleNotFoundError") for row in missing)
    assert "eager: " in text and "faster than cublas (1 shapes)" in text
    run("plot.py", table, "--out", tmp_path / "figures")
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {"time.png", "roofline.png", "spectra.png"}


def test_figures_of_the_usual_gpu_with_a_colour_for_each_line(monkeypatch):
    """cuBLAS was drawn as GNS is, and a few last rows of another GPU were all that was drawn."""
    plot = load("plot", monkeypatch)
    figures = importlib.import_module("figures")
    row = {"median_ms": "1", "run": "graph", "n": "1", "rows": "64", "cols": "64", "tflops_needed": "1", "spectrum": ""}
    rows = [row | {"gpu": gpu, "implementation": name, "algorithm": "matmul" if name == "cublas" else "gram"}
            for gpu, name in (("A", "ours"), ("A", "gns"), ("A", "cublas"), ("B", "ours"))]
    assert figures.usual_gpu(rows) == "A"
    _, axes = figures.plt.subplots()
    assert plot.roofline(axes, rows[:3], "A")
    colours = {line.get_label(): line.get_color() for line in axes.lines}
    assert colours[plot.CUBLAS] == "black" and {colours[name] for name in ("ours", "gns")} == {"tab:red", "tab:blue"}


def test_times_are_compared_with_those_of_the_same_commit(monkeypatch):
    """A peer's time on another host, at another commit, was divided by ours."""
    plot = load("plot", monkeypatch)
    row = {"run": "graph", "n": "1", "rows": "64", "cols": "64", "gpu": "A", "algorithm": "gram"}
    rows = [row | {"implementation": name, "commit": commit, "median_ms": ms} for name, commit, ms in (
        ("ours", "old", "2"), ("gns", "old", "6"), ("dion", "old", "8"), ("ours", "new", "1"), ("gns", "new", "5"))]
    _, axes = importlib.import_module("figures").plt.subplots()
    assert plot.times(axes, rows, "A")
    assert {line.get_label(): list(line.get_ydata()) for line in axes.lines[:-1]} == {"gns": [5.0]}


def test_first_calls_by_a_cold_and_a_warm_cache(tmp_path):
    out = tmp_path / "first.csv"
    run("first_call.py", "--divide", 64, "--commit", "abc", "--out", out)
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["cache"] for row in rows] == ["cold", "warm"] and {row["shapes"] for row in rows} == {"4"}
    assert all(0 < float(row["longest_s"]) <= float(row["first_s"]) for row in rows)


def test_a_rank_of_a_large_job_on_its_host(tmp_path):
    """One process; the fake group of torch needs no peers. Stages of a pipeline get a process group of their own."""
    out = tmp_path / "host.csv"
    run("host_scale.py", "--child", "--models", "tiny", "--meshes", "pp", "--ranks", 64, "--commit", "abc",
        "--out", out)
    with open(out, newline="") as file:
        rows = {row["call"]: row for row in csv.DictReader(file)}
    assert {"groups", "construct", "first_step", "step", "dcp_set", "replan", "memory_forecast"} < set(rows)
    assert rows["first_step"]["groups"] == "32" and not rows["replan"]["groups"]
    assert int(rows["step"]["collectives"]) > 0 and rows["step"]["buckets"] != "0"


def test_collectives_against_each_other(tmp_path):
    out = tmp_path / "wire.csv"
    run("wire.py", "--ranks", 2, "--mib", 0.01, "--rounds", 2, "--commit", "abc", "--out", out)
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({(row["what"], row["collective"]) for row in rows}) == len(rows) >= 5
    assert all(float(row["median_us"]) > 0 and row["ranks"] == "2" for row in rows)


@pytest.mark.parametrize(("what", "stacks"), [
    ("pieces", "1x144x160+1x160x144"), ("side_by_side", "1x72x72+1x72x96"), ("last_turn", "1x72x96"),
    ("ends", "2x72x96"), ("processors", "2x72x96"),
    ("gram_tiles", "2x72x96"), ("symmetric", "2x40x40"), ("product", "2x40x72")])
def test_ways_of_one_bucket(what, stacks, tmp_path):
    out = tmp_path / "stacks.csv"
    run("stacks.py", what, "--stacks", stacks, "--ranks", 3, "--rounds", 1, "--commit", "abc", "--out", out)
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({row["way"] for row in rows}) == {"gram_tiles": 1}.get(what, 2)
    assert all(float(row["median_us"]) > 0 for row in rows)


def test_kernels_of_rules(tmp_path):
    out = tmp_path / "kernels.csv"
    run("rule_kernels.py", "--models", "tiny", "--layers", 1, "--rules", "muon", "normuon", "--steps", 1, "--commit",
        "abc", "--out", out)
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [*dict.fromkeys(row["rule"] for row in rows)] == ["muon", "normuon"]
    assert all(float(row["us"]) >= 0 and float(row["launches"]) >= 1 and "#" not in row["kernel"] for row in rows)


def test_cuts_on_momenta_of_a_training(tmp_path):
    momenta, out = tmp_path / "momenta.pt", tmp_path / "schedules.csv"
    run("momenta.py", "--size", "tiny", "--at", 1, 3, "--eager", "--out", momenta)
    run("schedules.py", "errors", "--momenta", momenta, "--schedules", "polar_express:5", "--cuts", "3+2",
        "standard", "1+2+2", "taken", "--commit", "abc", "--out", out)
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["rows"], row["cols"], row["n"]) for row in rows} == {("64", "64", "8"), ("64", "192", "6")}
    assert [row["cut"] for row in rows] == ["3+2", "1+1+1+1+1", "1+2+2"] * 4  # of so small matrices, taken is standard
    assert all(row["error"] == row["error momentum"] and .9 < float(row["largest"]) < 1.1 for row in rows)


def test_schedules(tmp_path):
    """Cuts of a schedule with their errors and times, and the package beside a peer that is not installed."""
    out = tmp_path / "schedules.csv"
    run("schedules.py", "errors", "times", "peers", "--schedules", "polar_express:7", "--shapes", "16x24",
        "--matrices", 1, "--stacks", "2x16x40", "--peers", "gns", "--rounds", 1, "--burst-ms", 0.1, "--rest-ms", 0,
        "--commit", "abc", "--out", out)
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    errors, times, peers = ([row for row in rows if row["what"] == what] for what in ("errors", "times", "peers"))
    assert {"1+1+1+1+1+1+1", "3+4", "3+2+2"} < {row["cut"] for row in errors}
    assert all(0 < float(row["error half rank"]) <= float(row["error"]) for row in errors)
    assert [row["note"] for row in times].count("taken") == 1 and all(float(row["median_ms"]) > 0 for row in times)
    assert [(row["implementation"], bool(row["median_ms"])) for row in peers] == [("ours", True), ("gns", False)]


def test_rows_of_the_page_of_polar_factors(tmp_path):
    out = tmp_path / "page.csv"
    text = run("polar_page.py", "--stacks", "2x16x40", "--schedules", "polar_express:5", "jordan:8", "--peers", "gns",
               "--rounds", 1, "--burst-ms", 0.1, "--rest-ms", 0, "--commit", "abc", "--out", out)
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["implementation"], row["set"], row["steps"]) for row in rows] == [
        ("ours", "polar_express", "5"), ("gns", "polar_express", "5"), ("ours", "jordan", "8"), ("gns", "jordan", "8")]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]) and row["commit"] == "abc" for row in rows)
    assert all(0 < float(row["median_ms"]) and 0 < float(row["error"]) < 0.01 for row in rows[::2])
    if importlib.util.find_spec("gram_newton_schulz") is None:
        assert all((row["median_ms"], row["note"]) == ("", "ModuleNotFoundError") for row in rows[1::2])
    assert "all stacks and schedules were measured" in text


def test_the_table_of_polar_factors_takes_the_commit_with_most_stacks(monkeypatch):
    page = load("polar_page", monkeypatch)
    row = {"gpu": "NVIDIA H100 80GB HBM3", "set": "qwen3_8", "steps": "8", "version": "", "cols": "8", "n": "1",
           "run": "graph"}

    def timed(commit, date, name, rows, ms, error, memory=""):
        return row | {"commit": commit, "date": date, "implementation": name, "rows": rows, "median_ms": ms,
                      "error": error, "memory_mib": memory}

    rows = [timed("old", "2026-01-01", name, rows, ms, error) for name, rows, ms, error in (
        ("ours", "4", "1", "1e-3"), ("ours", "8", "2", "3e-3"), ("dion", "4", "4", "0.1"), ("dion", "8", "2", "0.3"))]
    rows += [timed("new", "2026-01-02", name, "4", ms, error, memory) for name, ms, error, memory in (
        ("ours", "1", "1e-3", "2"), ("gns", "0.9", "2e-3", "3"), ("dion", "9", "0.1", "3"))]
    called = [timed("new", "2026-01-02", name, "4", ms, "1e-3") | {"run": "eager"}  # calls count where no graph is
              for name, ms in (("ours", "2"), ("dion", "1"), ("muonium", "5"))]
    found = page.page(rows + called)
    assert found["table"][4] == (
        "| 2026-01-02 | H100 | 8, qwen3_8 | muonium, called | 1 | 2.50 | 2.50, 2.50 | 0 | 1.0e-03, 1.0e-03 |  | new |")
    found = page.page(rows)
    assert found["table"][2:] == [
        "| 2026-01-02 | H100 | 8, qwen3_8 | gns | 1 | 0.90 | 0.90, 0.90 | 1 | 2.0e-03, 1.0e-03 | 1.50 | new |",
        "| 2026-01-01 | H100 | 8, qwen3_8 | dion | 2 | 2.00 | 1.00, 4.00 | 0 | 2.0e-01, 2.0e-03 |  | old |"]
    later = [timed("new", "2026-01-03", name, "8", ms, "1e-3") for name, ms in (("ours", "1"), ("gns", "3.6"))]
    assert page.page(rows + later)["table"][2] == (  # rows of two days and one commit are one line
        "| 2026-01-03 | H100 | 8, qwen3_8 | gns | 2 | 1.80 | 0.90, 3.60 | 1 | 1.5e-03, 1.0e-03 | 1.50 | new |")
    others = ", ".join(name for name in page.peers.POLAR if name not in ("gns", "dion"))
    assert f"- NVIDIA H100 80GB HBM3, 8 steps: {others}." in found["missing rows"]
    assert f"- NVIDIA H100 80GB HBM3, 5 steps: {', '.join(page.peers.POLAR)}." in found["missing rows"]


@pytest.fixture
def factors(optimizer, tmp_path, monkeypatch):
    """(benchmarks/polar_page.py, a function that runs it on two tiny stacks with two other packages, the table)."""
    page, out = load("polar_page", monkeypatch), tmp_path / "page.csv"
    ours = part("newton_schulz.orthogonalize")  # the script replaces its restart_interval, and does not put it back
    monkeypatch.setattr(ours, "restart_interval", ours.restart_interval)
    monkeypatch.setattr(page.peers, "POLAR", {"whole": lambda steps: lambda X: X, "none": lambda steps: 1 / 0,
                                              "absent": lambda steps: importlib.import_module("no_such_package")})

    def measured(*arguments):
        monkeypatch.setattr(sys, "argv", ["polar_page.py", "--stacks", "2x8x12", "2x8x8", "--schedules",
                                          "polar_express:5", "--rounds", "1", "--burst-ms", "0.1", "--rest-ms", "0",
                                          "--commit", "abc", "--out", str(out), *map(str, arguments)])
        page.main()
        return [(row["implementation"], row["cols"], row["note"]) for row in importlib.import_module("rows").read(out)
                ] if out.exists() else []

    return page, measured


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a CPU's device")
def test_each_compiling_process_calls_its_share(factors, monkeypatch):
    """Ours first, then tuned packages on one stack of each kind, then the others; a failure ends nothing."""
    page, _ = factors
    called, config = [], importlib.import_module("torch._inductor.config")
    monkeypatch.setattr(config, "compile_threads", config.compile_threads)  # the function leaves 1
    monkeypatch.setattr(page, "makers", lambda package, steps, name, count, options: {
        maker: lambda maker=maker: lambda X: called.append((maker, tuple(X.shape))) or 1 / (maker != "fails")
        for maker in ("ours", *options.peers)})
    monkeypatch.setattr(page.peers, "TUNED", {"tuned": ("no_such_package", ())})
    tasks = [(shape, ("jordan", 5)) for shape in ((1, 16, 32), (1, 16, 16), (1, 32, 16))]
    for rank, share in (0, ((1, 16, 32), (1, 32, 16))), (1, ((1, 16, 16),)):
        called.clear()
        page.compile_all(rank, tasks, types.SimpleNamespace(jobs=2, peers=["fails", "tuned", "muonium"], tuning_ms=0,
                                                            pause=None))
        assert called == [*(("ours", shape) for shape in share), ("tuned", (1, 16, 16)), ("tuned", (1, 32, 16)),
                          *(("fails", shape) for shape in share)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU machine measures there")
def test_stacks_with_rows_are_not_measured_again(factors, capsys):
    page, measured = factors
    assert measured("--seconds", 0) == [] and "[(2, 8, 12, 5), (2, 8, 8, 5)]" in capsys.readouterr().out
    first = measured("--stacks", "2x8x12", "--peers", "none")
    assert first == [("ours", "12", ""), ("none", "12", "ZeroDivisionError")]
    assert "none (2, 8, 12): ZeroDivisionError" in capsys.readouterr().out
    measured("--stacks", "2x8x12", "--peers", "none")
    rows, names = measured(), ("ours", *page.peers.POLAR)
    assert rows[:2] == first and [row[:2] for row in rows[2:]] == [
        (name, cols) for cols in ("12", "8") for name in names]
    assert measured() == rows and len(measured("--commit", "other")) == len(rows) + 8
    page.peers.POLAR["absent"] = lambda steps: lambda X: X  # now it is installed
    assert measured("--stacks", "2x8x8")[-1] == ("absent", "8", "")
    assert len(measured("--stacks", "2x8x8")) == len(rows) + 12
    page.peers.TUNED |= {"whole": ("no_such_package", ()), "none": ("no_such_package", ())}
    assert [row[2] for row in measured("--tuning-ms", 2.5, "--commit", "t", "--stacks", "2x8x8")[-4:]] == [
        "", "tuned for 2.5 ms", "ZeroDivisionError", ""]


def test_nothing_is_measured_while_a_file_exists(tmp_path, monkeypatch):
    page, pause, looks = load("polar_page", monkeypatch), tmp_path / "pause", []
    page.hold(None)
    page.hold(str(pause))
    pause.touch()

    def sleep(seconds):
        looks.append((tmp_path / "pause.idle").exists())
        if len(looks) == 3:
            pause.unlink()

    monkeypatch.setattr(page.time, "sleep", sleep)
    page.hold(str(pause))
    assert looks == [True] * 3 and not (tmp_path / "pause.idle").exists()


def test_memory_of_a_call_does_not_depend_on_what_the_first_one_left(monkeypatch):
    """A cycle keeps 5 MiB of the first call, the second frees cycles as Python may, and allocates 3 MiB itself."""
    page, held = load("polar_page", monkeypatch), {"now": 0, "most": 0}

    class Buffer:
        def __init__(self, mib):
            self.bytes = mib * 2**20
            held["now"] += self.bytes
            held["most"] = max(held.values())

        def __del__(self):
            held["now"] -= self.bytes

    monkeypatch.setattr(page.polar, "DEVICE", "cuda")
    for name, function in {"synchronize": lambda: None, "memory_allocated": lambda: held["now"],
                           "max_memory_allocated": lambda: held["most"],
                           "reset_peak_memory_stats": lambda: held.update(most=held["now"])}.items():
        monkeypatch.setattr(torch.cuda, name, function)
    calls, memory = [], {}

    def call(X):
        if not calls:
            left = [Buffer(5)]
            left.append(left)
        elif gc.isenabled():
            gc.collect()
        calls.append(Buffer(3) and 0)

    page.with_memory(lambda: call, torch.empty(0), memory, "dion")
    assert memory == {"dion": 3.0} and len(calls) == 2 and gc.isenabled()


def test_the_page_is_printed_for_stacks_of_a_short_side(monkeypatch, capsys):
    page = load("polar_page", monkeypatch)
    rows = [dict(gpu="NVIDIA H200", steps="5", set="jordan", commit="c", run="graph", implementation=name, n="1",
                 rows=side, cols="600", median_ms=time, error="1e-3", memory_mib="2", date="2026-11-28", version="")
            for side, times in (("256", "12"), ("255", "18")) for name, time in zip(("ours", "dion"), times)]
    monkeypatch.setattr(page, "known_rows", lambda results: rows)
    for least, ratio in (256, "| 1 | 2.00 |"), (255, "| 2 | 4.00 |"):
        monkeypatch.setattr(sys, "argv", ["polar_page.py", "--short-side", str(least)])
        page.main()
        assert [line for line in capsys.readouterr().out.splitlines() if ratio in line and "dion" in line]


def test_compilers_see_a_stack_of_each_kind(monkeypatch):
    """Wide and tall ones, and sizes that are no multiples of 16: of each kind the one of the least work."""
    page = load("polar_page", monkeypatch)
    tasks = [(shape, ("jordan", 5)) for shape in page.STACKS["all"]]
    found = [shape for shape, _ in page.a_task_of_each_kind(tasks)]
    assert {(8, 50, 70), (16, 64, 128), (128, 70, 50), (32, 256, 64), (16, 100, 300)} < set(found)
    assert len(found) == 7 and page.a_task_of_each_kind(tasks[:1]) == tasks[:1]


@pytest.mark.parametrize("bad, found", [(0, [2]), (2, [1, 2, 3]), (9, [1, 2, 3, 4])])
def test_restarts_of_gns_are_as_few_as_are_stable(bad, found, monkeypatch):
    """By the package's own search: with less than `bad` restarts Q grows, and for one it raises."""
    peers, made = load("peers", monkeypatch), {}
    peers.gns_restarts.cache_clear()

    def search(values, triples, lowest, num_restarts):
        print("much")
        if num_restarts < bad - 1:
            raise ValueError("all blow up")
        return [2] if num_restarts == 1 else list(range(1, num_restarts + 1))

    stand_in(monkeypatch, "gram_newton_schulz.restart_autotune", find_best_restarts=search,
             simulate_perturbed_gram_newton_schulz=lambda *about, reset_indices: len(reset_indices),
             stability_metric=lambda restarts: 85 if restarts > bad else 1e5)
    package = sys.modules["gram_newton_schulz"]
    package.restart_autotune = sys.modules["gram_newton_schulz.restart_autotune"]
    package.GramNewtonSchulz = lambda **given: made.update(given)
    peers.gns(types.SimpleNamespace(triples=[[1.0, 2.0, 3.0]] * 5))
    assert made["gram_newton_schulz_reset_iterations"] == found and len(made["ns_coefficients"]) == 5
    peers.gns_restarts.cache_clear()


def stand_in(monkeypatch, name, **functions):
    """A module of a package that is not installed, and the packages above it."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    vars(sys.modules[name]).update(functions)


@pytest.mark.parametrize("shape", [(2, 24, 40), (2, 40, 24)])
def test_peers_compose_the_polynomials_of_the_schedule(shape, optimizer, part, monkeypatch):
    """With their kernels replaced by torch, in fp32: every package iterates with the coefficients that it is given."""
    peers, polar = load("peers", monkeypatch), load("polar", monkeypatch)

    def gram(X, out):
        out.copy_(X @ X.mT)

    def newton_schulz(X, count, kind, custom_coefficient_sets):
        assert (X.dtype, kind, torch.get_float32_matmul_precision()) == (torch.float32, "custom", "medium")
        assert count == len(custom_coefficient_sets)
        return torch.stack([polar.composed(x, types.SimpleNamespace(triples=custom_coefficient_sets, aol=False))
                            for x in X]).float()

    stand_in(monkeypatch, "dion.newton_schulz_triton", ns_line_1=lambda X, out: gram(X, out),
             ns_line_2=lambda A, alpha, beta, out: out.copy_(beta * A + alpha * A @ A))
    stand_in(monkeypatch, "muonium.kernels.gram", gram_=gram)
    stand_in(monkeypatch, "flash_muon.matmul_transpose_triton", matmul_transpose_assign=gram)
    stand_in(monkeypatch, "emerging_optimizers.orthogonalized_optimizers.muon_utils", newton_schulz=newton_schulz)
    torch.manual_seed(0)
    X, steps = torch.randn(shape), part("newton_schulz.coefficients").steps_of("polar_express", 5)
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for name in ("torch.compile", "dion", "muonium", "flash_muon", "emerging_optimizers"):
        with load("trajectories", monkeypatch).InFloat32():
            out = peers.POLAR[name](steps)(X)
        assert out.shape == X.shape and out.dtype == X.dtype, name
        assert max(polar.distance(o, polar.composed(x, steps)) for o, x in zip(out, X)) < 1e-5, name
    assert torch.get_float32_matmul_precision() == before

    def exact_factors(A):
        U, _, V = torch.linalg.svd(A, full_matrices=False)
        return U @ V, None

    monkeypatch.setattr(torch.linalg, "polar", exact_factors, raising=False)
    out = peers.POLAR["torch.linalg.polar"](steps)(X).double()
    short = out @ out.mT if shape[1] < shape[2] else out.mT @ out
    assert torch.allclose(short, torch.eye(24, dtype=torch.float64).expand(2, -1, -1), atol=1e-5)


def test_processes_share_the_configurations_of_tuned_kernels(monkeypatch):
    peers, taken = load("peers", monkeypatch), []
    for rank in range(6):
        kernel = types.SimpleNamespace(configs=[0, 1, 2, 3, 4])
        stand_in(monkeypatch, "flash_muon.matmul_transpose_triton", mmt_kernel=kernel)
        peers.take_share_of_configs(rank, 6, ["gns", "flash_muon"])
        taken += [kernel.configs]
    assert sorted(sum(taken[:5], [])) == [0, 1, 2, 3, 4] and all(taken)


def test_configurations_are_timed_for_as_long_as_one_says(monkeypatch):
    """Triton's tuner calls do_bench of its own: the attribute of the instance is what it finds."""
    triton = pytest.importorskip("triton")
    kernel = triton.autotune([triton.Config({}), triton.Config({}, num_warps=8)], [])(triton.jit(stand_in))
    peers, called = load("peers", monkeypatch), []
    stand_in(monkeypatch, "flash_muon.matmul_transpose_triton", mmt_kernel=kernel)
    monkeypatch.setattr(triton.testing, "do_bench", lambda call, **how: called.append(how))
    peers.set_tuning_time(20, ["gns", "flash_muon"])
    kernel.do_bench(None, quantiles=(0.5,))
    assert called == [{"warmup": 5, "rep": 20, "quantiles": (0.5,)}]


def test_a_table_with_other_columns_is_not_appended_to(tmp_path):
    (tmp_path / "old.csv").write_text("commit,gpu\n")
    done = run_script(FOLDER / "polar.py", "--out", tmp_path / "old.csv")
    assert done.returncode == 2 and "has other columns" in done.stderr


@pytest.mark.parametrize("before", [None, "", "a,b\r\n0,0\r\n"])
def test_rows_are_appended_below_one_header(before, tmp_path, monkeypatch):
    """Also to a file that is there and empty; new lines end alike everywhere, old ones stay as they are."""
    rows, path = load("rows", monkeypatch), tmp_path / "new" / "table.csv"
    if before is not None:
        path.parent.mkdir()
        path.write_bytes(before.encode())
    for number in (1, 2):
        rows.append(path, ("a", "b"), [{"b": number, "a": "x"}])
    assert path.read_bytes().decode() == (before or "a,b\n") + "x,1\nx,2\n"
    assert [row["b"] for row in rows.read(path)] == ["0"] * bool(before) + ["1", "2"]


def test_lines_of_measured_tables_end_alike():
    """Else an editor, or the next row, makes a difference of every line."""
    tables = sorted((FOLDER / "results").glob("*.csv"))
    assert tables and [path.name for path in tables if b"\r" in path.read_bytes()] == []


@pytest.mark.parametrize("script, arguments, message", [
    ("polar", ["--shapes", "2x16"], "2x16 is no stack NxRxC"),
    ("stacks", ["symmetric", "--stacks", "2x16x0"], "2x16x0 is no stack"),
    ("stacks", ["symmetric", "--stacks", "2x16x16+2x16x40"], "as many rows as columns"),
    ("step", ["--ranks", "1", "4"], "--ranks 4: each of them takes a GPU, and here are 2"),
    ("train", ["--ranks", "3"], "here are 2"), ("wire", ["--ranks", "3"], "here are 2"),
    ("convergence", ["--path", "dion=.", "timm=."], "--path timm=...: there is no such package here"),
    ("convergence", ["--data", "2"], "name the text of --data 2 by --corpus"),
    ("soak", ["--ranks", "4", "--run", "graph"], "needs a GPU for each of 4 ranks"),
    ("soak", ["--ranks", "6", "--mode", "ddp", "hsdp4"], "--mode hsdp4 needs another number of ranks than 6")])
def test_what_cannot_be_measured_is_said_at_once(script, arguments, message, optimizer, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    module = load(script, monkeypatch)
    monkeypatch.setattr("sys.argv", [f"{script}.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        getattr(module, "arguments", module.main)()
    assert message in capsys.readouterr().err


def test_learning_rates_are_those_of_the_document(tmp_path, monkeypatch):
    """docs/learning_rates.md says best rates and seeds of the committed sweeps; the figures draw all rates."""
    plot, figures = load("plot_lr", monkeypatch), load("figures", monkeypatch)
    sweeps = plot.sweeps_of(plot.read(FOLDER / "results" / "convergence.csv"))
    found = {}
    for column, rows in enumerate(sweeps.values()):
        runs = collections.defaultdict(dict)  # optimizer -> {rates: {seed: loss}}
        for row in rows:
            rates = tuple(float(row[key]) for key in ("lr", "embed_lr", "head_lr"))
            runs[row["optimizer"]].setdefault(rates, {})[row["seed"]] = float(row["heldout_loss"])
        for name, by_rates in runs.items():
            best = min((seeds["0"], rates) for rates, seeds in by_rates.items() if "0" in seeds)[1]  # by seed 0
            tried = {rates[0] for rates in by_rates if name == "adamw" or rates[1:] == best[1:]}
            alone = ", Muon's" if name in plot.convergence_table.RATE_OF_MUON else ", unswept"
            note = alone if len(tried) == 1 else ", at the edge" if best[0] in (min(tried), max(tried)) else ""
            found[name, column] = f"{best[0]:g} ({len(by_rates[best])}){note}"
            assert by_rates[best]["0"] < 1e9
    for name, by_lr in plot.demo_losses().items():  # which has all seeds at all rates
        lr = min((statistics.mean(seeds.values()), lr) for lr, seeds in by_lr.items())[1]
        found[name, len(sweeps)] = f"{lr:g} ({len(by_lr[lr])})"
    for losses in (*map(plot.losses_of, sweeps.values()), plot.demo_losses()):
        _, axes = figures.plt.subplots()
        assert plot.draw_losses(axes, losses, "")
        assert len(axes.get_xticks()) == len({lr for by_lr in losses.values() for lr in by_lr}) >= 5
    text = (FOLDER.parent / "docs" / "learning_rates.md").read_text(encoding="utf-8")
    part = text.partition("<!-- begin best rates -->")[2].partition("<!-- end best rates -->")[0]
    lines = [line[2:-2].split(" | ") for line in part.strip().splitlines()[2:]]
    assert {(line[0], column): cell.strip() for line in lines for column, cell in enumerate(line[1:]) if cell.strip()
            } == found


def test_one_command_draws_the_sweep_and_writes_its_tables(tmp_path, monkeypatch):
    """Differences from Muon are found with three seeds: lower, higher or none; others are open, not run, or without a
    best rate. The summary has the sweeps with the best rates of AdamW, Muon and NorMuon.
    """
    losses = {("adamw", 0.001): [0.9, 0.91, 0.9], ("muon", 0.004): [0.8, 0.81, 0.79],
              ("normuon", 0.004): [0.7, 0.711, 0.69], ("cubic", 0.004): [0.9, 0.911, 0.89],
              ("per_head", 0.004): [0.8, 0.811, 0.789], ("split16", 0.004): [0.8]}
    losses |= {(name, factor * lr): [0.95] for name, lr in losses if name not in ("cubic", "split16")
               for factor in (0.5, 2)}
    losses |= {("hyperball", 0.004): [0.81, 0.8, 0.8], ("hyperball", 0.002): [0.82]}
    columns = load("convergence", monkeypatch).COLUMNS
    common = dict.fromkeys(columns, "") | {"gpu": "A", "size": "30m", "corpus": "fake", "text_mb": "1.5",
                                           "parameters": "29000000", "torch": "2.11", "commit": "abc1234"}
    rows = importlib.import_module("rows")
    found = [common | row for row in rows_of_losses(losses)]
    for row in found:
        if row["optimizer"] == "cubic":
            row |= {"gpu": "NVIDIA B"}
    # Newer runs of Muon on another GPU: its line has the times of most lines, and those of B stand below
    found += [row | {"gpu": "NVIDIA B", "step_ms": "30"} for row in found if row["optimizer"] == "muon"]
    rows.append(tmp_path / "table.csv", columns, found)
    large = common | {"size": "124m", "corpus": "packages", "gpu": "A"}  # another sweep, which is not complete
    rows.append(tmp_path / "table.csv", columns, [large | row | {"steps": "600"} for row in rows_of_losses(
        {("adamw", 0.001): [0.6], ("muon", 0.004): [0.5, 0.52], ("muon", 0.002): [0.51]})])
    for name in ("learning_rates.md", "evidence.md"):
        shutil.copy(FOLDER.parent / "docs" / name, tmp_path / name)
    run("plot_lr.py", tmp_path / "table.csv", "--out", tmp_path / "figures", "--docs", tmp_path)
    rates = {path.name for path in (tmp_path / "figures").iterdir()}
    sweeps = ("30m_fake_100_steps", "124m_packages")
    losses = {"losses_30m_fake_100_steps.png"}  # in the other sweep no best rate is found
    assert rates == losses | {"differences.png"} | {f"learning_rates_{name}.png" for name in (*sweeps, "demo")}
    rates_page, text = ((tmp_path / name).read_text() for name in ("learning_rates.md", "evidence.md"))
    assert set(re.findall(r"\(figures/(.*?)\)", rates_page)) == rates - losses - {"differences.png"}
    assert set(re.findall(r"\(figures/(.*?)\)", text)) == losses | {"differences.png"}
    unwrapped = " ".join(text.split())
    assert ('M parameters, 100 steps, 2.0 M tokens of the text "fake" (1.5 MB). GPU: A, NVIDIA B. torch 2.11.'
            in unwrapped)
    # From 1.3 after step 50 to .8 after step 100: .9033, AdamW's loss, after step 89.67
    for line in ("muon | 0.004 | 3 | 0.8000 | 0.0100 | 1.8 M, 90 % | ",
                 "normuon | 0.004 | 3 | 0.7003 | 0.0105 | 1.6 M, 80 % | -0.0997 +- 0.0014",
                 "hyperball | 0.004, at the edge | 3 | 0.8033 | 0.0058 |  | "):
        assert f"| {line} | 10.00 | 1.00 | 5 | A |\n" in text
    assert re.search(r"^\| cubic .* \| 10.00 \| 1.00 \| 5 \| B \|$", text, re.M)
    assert "\nmuon on B: step 30.00 ms, optimizer 1.00 ms, 5 MiB.\n" in text
    # A column for each sweep; in the second no other optimizer but Muon and AdamW ran, with two rates and one
    for name, cell in {"normuon": r"\*\*lower\*\* -0\.0997 \+- 0\.0014", "per_head": r"\+0\.0000 \+- 0\.0025",
                       "cubic": r"\*\*higher\*\* \+0\.1003 \+- 0\.0014", "split16": r"open, 1 seed: \+0\.0000",
                       "keller": "not run", "hyperball": "rate not found"}.items():
        assert re.search(rf"^\| {name} \| .+ \| {cell} \| not run \|$", text, re.M), name
    assert re.search(r"^\| adamw \| .+ \| \*\*higher\*\* .+ \| rate not found \|$", text, re.M)
    for line in (" | 30m on fake, 100 steps", "AdamW: last loss | 0.9033", "Muon: tokens to that loss | 90 %",
                 "NorMuon: last loss minus AdamW's | -0.2030", "Muon: best `lr` of matrices / AdamW's | 4",
                 "NorMuon: time of a training step / AdamW's | 1.000 (A)"):
        assert f"| {line} |\n" in text
    assert "| muon | 0.004, at the edge | 2 | 0.5100 |" in text
    assert "No run yet: 30m on packages, 30m on stdlib, 124m on stdlib, 124m on fake." in text
    assert "| muon | 5 | 2 | 0 |\n" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 120
    assert "| muon | 0.004 (3) | 0.004 (2), at the edge | 0.016 (3) |\n" in rates_page
    assert "| split16 | 0.004 (1), Muon's |  |  |\n" in rates_page and "\n| keller " not in rates_page


def test_a_loss_without_the_best_rate_is_no_result(monkeypatch):
    """Rates at the edge, unswept, or Muon's before Muon's is found have no difference, no tokens, no curve."""
    plot, figures = load("plot_lr", monkeypatch), load("figures", monkeypatch)
    found = {(name, lr): [loss] * 3 for name in ("adamw", "muon") for lr, loss in ((1, 0.8), (2, 0.7), (4, 0.9))}
    losses = found | {("normuon", 1): [0.8], ("normuon", 2): [0.6], ("hyperball", 2): [0.5] * 3,
                      ("turbo", 2): [0.7], ("cubic", 1): [0.6]}  # cubic has the rate of another best of Muon's
    common = {"gpu": "A", "size": "30m", "corpus": "stdlib", "torch": "2.11", "commit": "abc"}
    for finished in True, False:
        rows = [common | row for row in rows_of_losses(losses)]
        if not finished:
            rows = [row for row in rows if (row["optimizer"], row["lr"]) != ("muon", "4")]
        expected = {"normuon": "rate not found", "hyperball": "rate not found", "cubic": "rate not found",
                    "turbo": "open, 1 seed: +0.0000" if finished else "rate not found", "keller": "not run"}
        assert {name: plot.verdict(rows, name) for name in expected} == expected
        lines = {line.split(" | ")[0][2:]: line.split(" | ") for line in plot.convergence_table.table(rows)}
        assert all(lines[name][5:7] == ["", ""] for name in ("normuon", "hyperball", "cubic"))
        assert lines["normuon"][1] == "2, at the edge" and lines["cubic"][1] == "1, unswept"
        names = [name for name in lines if name in plot.convergence_table.CALLS]
        results = {"adamw", "muon", "turbo"} if finished else {"adamw"}
        assert set(names[:len(results)]) == results and names[len(results)] == "hyperball"  # the last by their losses
        _, axes = figures.plt.subplots()
        assert plot.draw_curves(axes, rows, ("30m", "stdlib", "100"))
        curves = {"adamw, 0.700", "muon, 0.700", "no difference from muon found, or too few seeds"}
        assert set(axes.get_legend_handles_labels()[1]) == (curves if finished else {"adamw, 0.700"})
        _, axes = figures.plt.subplots()
        plot.draw_differences(axes, rows)
        assert len(axes.containers) == finished  # turbo alone


@pytest.mark.parametrize("script, arguments, cases", [
    ("offload", ["--models", "tiny"], 4), ("averages", ["--small"], 12)])
def test_state_on_the_host_and_in_8_bits_is_timed(script, arguments, cases, tmp_path):
    """With the columns of the committed rows."""
    run(f"{script}.py", *arguments, "--out", tmp_path / "table.csv")
    found, committed = (path.read_text().splitlines() for path in (
        tmp_path / "table.csv", FOLDER / "results" / f"{script}.csv"))
    assert found[0] == committed[0] and len(found) == 1 + cases


def test_parts_of_documents_and_dates_of_the_log(tmp_path, monkeypatch):
    documents, path = load("documents", monkeypatch), tmp_path / "page.md"
    path.write_text("a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n")
    documents.write_parts(path, {"x": ["new", "lines"]})
    assert path.read_text() == "a\n<!-- begin x -->\n\nnew\nlines\n\n<!-- end x -->\nb\n"
    assert documents.part(path, "x") == ["new", "lines"]
    with pytest.raises(SystemExit, match="needs each of these lines once: <!-- begin y -->, <!-- end y -->"):
        documents.write_parts(path, {"x": ["newer"], "y": []})
    assert documents.part(path, "x") == ["new", "lines"]
    log = tmp_path / "log.md"
    log.write_text("# Log\n\n## 2026-11-02, b?\n\n- Commit: abc1234, def5678 (x)\n\n## 2026-11-01, a?\n\n"
                   "- Commit: abc1234\n- Found: 1234567\n")
    assert documents.dates(log) == {"abc1234": "2026-11-02", "def5678": "2026-11-02"}


def test_figures_say_which_rows_there_are(tmp_path, monkeypatch):
    figures, path = load("figures", monkeypatch), tmp_path / "table.csv"
    path.write_text("gpu\nA\nB\nB\n")
    assert figures.rows_of(path) == ([{"gpu": "B"}] * 2, "B") and len(figures.rows_of(path, "A")[0]) == 1
    with pytest.raises(SystemExit, match="no rows of C, but of: A, B"):
        figures.rows_of(path, "C")
    path.write_text("gpu\n")
    with pytest.raises(SystemExit, match="no rows of any GPU, but of: none"):
        figures.rows_of(path)


def test_the_grid_covers_what_was_promised(monkeypatch):
    shapes = load("shapes", monkeypatch)
    grid = shapes.GRID
    assert len(set(grid)) == len(grid) >= 60 and not set(grid) & set(shapes.ROWS)
    sides = [min(s[1:]) for s in grid]
    aspects = [max(s[1:]) / min(s[1:]) for s in grid]
    assert max(sides) == 8192 and min(aspects) == 1 and max(aspects) == 8
    assert {64, 128, 256, 512, 1024, 2048, 4096, 8192} <= set(sides)
    assert min(s[0] for s in grid) == 1 and max(s[0] for s in grid) == 128
    tall, wide = ([s for s in grid if (s[1] > s[2]) is way and s[1] != s[2]] for way in (True, False))
    assert len(tall) >= 8 and len(wide) >= 30
    assert any(side % 8 for s in grid for side in s[1:]) and any(side % 128 for s in grid for side in s[1:])
    both = {s[1:] for s in grid} | {s[:0:-1] for s in grid}
    assert {(1600, 6400), (896, 4864), (2304, 9216), (1000, 3000), (50, 70)} <= both


def test_competitors_take_turns(monkeypatch):
    """Every competitor has its bursts in every round, each round begins with another one, inputs are fresh."""
    race = load("race", monkeypatch)
    events = []
    calls = {name: lambda name=name: events.append(name) for name in "ab"}
    times = race.race(calls, lambda: events.append("|"), rounds=2, burst_ms=0, rest_ms=0)
    rounds = "".join(events).split("|")[1:]
    assert [r.replace("aa", "a").replace("bb", "b")[0] for r in rounds] == ["a", "b"]
    assert all(set(r) == {"a", "b"} for r in rounds)
    assert all(len(t.ms) == len(t.host_us) == 4 for t in times.values())


def test_every_workload_of_the_kernels_benchmark_verifies(optimizer, device, monkeypatch):
    """As the runner does it: a right result passes its tolerance, one that is wrong by a tenth or missing does not."""
    made = load("benchmark", monkeypatch).Orthogonalize()
    names = [name.removeprefix("verify_") for name in dir(made) if name.startswith("verify_")]
    assert len(names) == 5 and made.out is None
    for name in names:
        made.kernel, made.device = optimizer, str(device)
        getattr(made, f"setup_{name}")()
        getattr(made, f"benchmark_{name}")()
        expected = getattr(made, f"verify_{name}")()
        assert torch.allclose(made.out, expected, atol=1e-2)
        for factor in (0.0, 0.9):
            assert not torch.allclose(made.out * factor, expected, atol=1e-2)


def test_the_kernels_benchmark_takes_the_cpu_where_there_is_no_gpu(monkeypatch):
    """Its runner says "cuda" wherever torch was built for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = load("benchmark", monkeypatch).Orthogonalize()
    made.device = "cuda"
    made.stack(2, 64, 128)
    assert made.device == "cpu" and made.X.device.type == "cpu" and made.X.shape == (2, 4, 8)


@pytest.mark.skipif(importlib.util.find_spec("kernels.cli") is None, reason="this kernels has no command line")
def test_kernels_benchmark_runs_and_verifies_every_workload(tmp_path):
    """The command itself, as `make bench` has it, on a build and a copy of the script."""
    make_build = [sys.executable, FOLDER.parent / "tools" / "make_build.py", "--out", tmp_path / "build"]
    subprocess.run(make_build, check=True, capture_output=True)
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(FOLDER / "benchmark.py", tmp_path / "benchmarks")
    command = "from kernels.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", command, "benchmark", ".", "--iterations", "2", "--warmup", "1",
                           "--output", "found.json"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert len(found) == 5 and all(workload["verified"] is True for workload in found), found


def test_formats_of_momentum_are_measured(part, monkeypatch):
    """The square map is that of the package; of 8-bit formats it loses least, and bf16 less."""
    formats, blocks = load("momentum_formats", monkeypatch), part("kernels.quantized.blocks")
    M = torch.randn(6, 130, generator=torch.Generator().manual_seed(0)) ** 3
    ours = blocks.dequantize(*blocks.quantize(M))
    torch.testing.assert_close(formats.Stored("square:64").rounded(M), ours, rtol=1e-5, atol=0)
    assert [len(formats.levels_of(name)) for name in ("square", "linear", "e4m3", "dynamic")] == [255, 255, 253, 256]
    found = formats.errors("sparse", ["bf16", "square:64", "linear:64", "linear, stochastic:64", "e4m3:64"], 12)
    losses = [of_momentum for _, of_momentum in found.values()]
    assert losses[:3] == sorted(losses[:3]) and losses[2] < losses[3] and losses[1] < losses[4]
    monkeypatch.setattr(formats, "read_corpus", lambda: (torch.arange(256).to(torch.uint8), None))
    assert [len(next(formats.PROBLEMS[name](1))) for name in ("training", "low rank, t 3")] == [14, 2]


@pytest.mark.gpu
def test_launches_are_counted(monkeypatch):
    race = load("race", monkeypatch)
    x = torch.ones(1000, device="cuda")
    replay, launches = race.captured(lambda: (x + 1) * 2)
    assert launches == 2
    x.fill_(3)
    assert (replay() == 8).all()


def test_the_step_of_a_trace_is_the_last_range_of_its_name(monkeypatch):
    """On the device also torch's own range, which is nested in "step"; on the host no range with a longer name."""
    monkeypatch.syspath_prepend(str(FOLDER.parent / "tools"))
    window = importlib.import_module("timeline").window
    named = [("user_annotation", "step", 1), ("user_annotation", "step", 5), ("user_annotation", "step_hooks", 20),
             ("user_annotation", "Optimizer.step#Muon.step", 40)]
    host = [{"cat": cat, "name": name, "ts": ts, "dur": 2} for cat, name, ts in named]
    device = [{"cat": "gpu_user_annotation", "name": name, "ts": ts, "dur": 4}
              for name, ts in (("step", 2), ("Optimizer.step#Muon.step", 7), ("Optimizer.zero_grad#Muon", 30))]
    assert window(host + device, on_device=False) == window(host, on_device=True) == (5, 7)
    assert window(host + device, on_device=True) == (7, 11) and window(device, on_device=False) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU machine measures there")
def test_step_measures_every_mode_and_is_drawn(optimizer, tmp_path):
    common = ["--models", "tiny", "--ranks", 2, "--steps", 2, "--warmup", 1, "--commit", "abc"]
    modes = ["fsdp", "hsdp", "hsdp4", "tp_fsdp", "ddp", "ddp_sharded", "reduce", "allreduce", "single"]
    assert "than 2 ranks: hsdp4\n" in run("step.py", *common, "--modes", *modes, "--out", tmp_path / "step.csv")
    also = ["lion", "muon_qk_clip", "muon_stochastic", "muon_initial"]
    text = run("step.py", *common, "--modes", "tp_fsdp", "--adamw", "--turns", 2, "--optimizers", "muon",
               "muon_metrics", "adamw", *also, "--memory", "--out", tmp_path / "metrics.csv")
    assert text.count("memory of rank 0 in MiB") == 2 * (2 + len(also))
    assert len(set(re.findall(r"^state +device +([\d.]+) +\1$", text, re.M))) > 2  # planned is measured
    with open(tmp_path / "metrics.csv", newline="") as file:
        turns = list(csv.DictReader(file))
    assert [(row["optimizer"], row["implementation"]) for row in turns] == 2 * [
        ("muon", "ours"), ("muon_metrics", "ours"), ("adamw", "torch"), *((name, "ours") for name in also)]
    state = {row["optimizer"]: float(row["state_mib"]) for row in turns}
    assert state["lion"] < state["muon"] == state["muon_qk_clip"] < state["muon_initial"]
    assert len({row["floor_ms"] for row in turns}) == 2
    assert {row["model"] for row in turns} == {"tiny_adamw"} and all(float(row["median_ms"]) > 0 for row in turns)
    text = run("step.py", *common, "--modes", "fsdp", "ep", "--runs", "eager", "graph", "--optimizers", "normuon",
               "--layers", 1, 3, "--trace", tmp_path, "--report", "--out", tmp_path / "step.csv")
    with open(tmp_path / "step.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    modes.remove("hsdp4")  # four replicas need four ranks
    assert [row["mode"] for row in rows[:8]] == modes
    assert {(row["mode"], row["run"], row["layers"], row["optimizer"]) for row in rows[8:]} == {
        (mode, run, layers, "normuon") for mode in ("fsdp", "ep") for run in ("eager", "graph") for layers in "13"}
    for row in rows:
        assert 0 < float(row["p20_ms"]) <= float(row["median_ms"]) <= float(row["p80_ms"])
        assert float(row["floor_ms"]) >= 0 and float(row["first_step_s"]) > 0 and row["commit"] == "abc"
    assert "max/mean" in text and "measured: " in text
    run("plot_step.py", tmp_path / "step.csv", "--out", tmp_path)
    assert (tmp_path / "step.png").stat().st_size > 10_000 and (tmp_path / "layers.png").stat().st_size > 10_000
    check_timeline(tmp_path)


def check_timeline(folder):
    """A real trace of two ranks: the exchange is found on the wire, the multiplications among the products."""
    traces = sorted(folder.glob("tiny_fsdp_normuon_eager_2ranks_rank*.json.gz"))
    assert len(traces) == 2
    command = [sys.executable, FOLDER.parent / "tools" / "timeline.py", *traces, "--out", folder / "timeline.png"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with open(folder / "timeline.csv", newline="") as file:
        busy = {(row["rank"], row["kind"]): row for row in csv.DictReader(file)}
    assert {rank for rank, _ in busy} == {"0", "1"} and (folder / "timeline.png").stat().st_size > 5000
    for rank in "01":
        assert all(float(busy[rank, kind]["busy_ms"]) > 0 for kind in ("wire", "products", "memory", "all"))
        assert int(busy[rank, "wire"]["launches"]) in range(2, 6)


DION_MUON = """
import torch
class Muon(torch.optim.SGD):
    def __init__(self, params, distributed_mesh, lr, mu, use_triton, **options):
        assert (distributed_mesh is None, lr, mu, use_triton) == (True, 1e-3, 0.95, False)
        assert options == {"weight_decay": 0.1, "nesterov": True, "adjust_lr": "rms_norm",
                           "use_gram_newton_schulz": False}
        super().__init__(params, lr=lr, momentum=mu)
"""
DION_NORMUON = "class NorMuon:\n    def __init__(self, *_, **__):\n        raise ValueError('no such option')\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU machine measures there")
def test_step_takes_turns_with_dion(optimizer, tmp_path, monkeypatch, capsys):
    """A stand-in for Dion: rows in turns; what is missing or fails is said, and the other cases are measured."""
    (tmp_path / "dion").mkdir()
    (tmp_path / "dion" / "muon.py").write_text(DION_MUON)
    (tmp_path / "dion" / "normuon.py").write_text(DION_NORMUON)
    text = run("step.py", "--models", "tiny", "--ranks", 1, "--layers", 1, "--steps", 1, "--warmup", 0, "--turns", 2,
               "--modes", "single", "--runs", "eager", "graph", "--path", f"dion={tmp_path}",
               "--optimizers", "dion_muon", "dion_normuon", "dion_muon_gram", "adamw", "--out", tmp_path / "step.csv")
    with open(tmp_path / "step.csv", newline="") as file:
        rows = [(row["implementation"], row["optimizer"], row["run"]) for row in csv.DictReader(file)]
    whose = "dion uncompiled" if os.environ.get("TORCHDYNAMO_DISABLE") == "1" else "dion"
    assert rows == 2 * [(whose, "dion_muon", "eager"), ("torch", "adamw", "eager")]
    assert text.count("left out, dion_normuon, tiny, eager: ValueError: no such option") == 2
    if importlib.util.find_spec("gram_newton_schulz") is None:
        assert "left out, dion_muon_gram: No module named 'gram_newton_schulz'" in text
    step = load("step", monkeypatch)
    (tmp_path / "empty").mkdir()
    assert not step.has_dion("dion_muon", tmp_path / "empty")
    assert "left out, dion_muon: there is no dion/muon.py" in capsys.readouterr().out
    for arguments, message in ((["--modes", "hsdp"], "--modes hsdp: not with dion_muon; modes of Dion are fsdp, ep"),
                               (["--adamw"], "--adamw: not with dion_muon"),
                               (["--path", "timm=."], "--path timm=.: only dion=DIR is known here")):
        monkeypatch.setattr("sys.argv", ["step.py", "--ranks", "1", "--optimizers", "dion_muon", *arguments])
        with pytest.raises(SystemExit, match="2"):
            step.arguments()
        assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU machine measures there")
def test_splits_and_groups_take_turns_with_a_step_without(optimizer, tmp_path):
    run("units.py", "--ranks", "1", "2", "--models", "tiny", "--steps", "2", "--warmup", "1", "--optimizers", "normuon",
        "--variants", "whole", "heads", "stacks", "one", "layer", "each", "--out", tmp_path / "units.csv")
    with open(tmp_path / "units.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == 2 * ["whole", "heads", "stacks", "one", "layer", "each"]
    assert [row["groups"] for row in rows] == 2 * ["1", "3", "1", "1", "4", "12"]
    assert len({row["buckets"] for row in rows if row["variant"] in ("whole", "one", "layer", "each")}) == 1


def test_floors_follow_the_mode(monkeypatch):
    """More stored replicas cost memory and all-to-alls; local matrices, and one GPU, have no all-to-all."""
    models = load("models", monkeypatch)
    shapes = models.shapes_of("llama3_8b")
    fsdp, hsdp, ddp = (models.floor_ms(shapes, 8, shards) for shards in (8, 4, 1))
    assert fsdp < hsdp < ddp < models.floor_ms(shapes, 8, 1, "allreduce")
    assert 55 < fsdp < 65 and 80 < ddp < 95  # as given with the targets: 61 and 84 ms
    experts = models.shapes_of("moe_experts")
    assert models.floor_ms(experts, 8, 8, "ep") < models.floor_ms(experts, 8, 8)
    assert models.floor_ms(experts, 1, 1) == pytest.approx(8 * models.floor_ms(experts, 8, 8, "ep"), rel=0.01)


def test_shapes_of_models(monkeypatch):
    """Kimi K2 has 1T parameters; layers can be fewer or more than the model's own."""
    models = load("models", monkeypatch)
    elements = {name: sum(math.prod(shape) for shape in models.shapes_of(name)) for name in models.MODELS}
    assert 1.00e12 < elements["kimi_k2"] < 1.05e12 and 6.9e9 < elements["llama3_8b"] < 7.1e9
    assert len(models.shapes_of("kimi_k2", 2)) == 2 * (5 + 3 + 3) + 3 and len(models.shapes_of("gpt2_124m", 30)) == 180
    # With what AdamW steps, all parameters of openai-community/gpt2 and of meta-llama/Llama-3.1-8B
    for name, count in (("gpt2_124m", 124_439_808), ("llama3_8b", 8_030_261_248)):
        elements[name] += sum(math.prod(shape) for shape in models.shapes_of(name, of=models.ADAMW))
        assert elements[name] == count


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU machine measures there")
def test_train_compares_optimizers(optimizer, tmp_path):
    text = run("train.py", "--ranks", 2, "--layers", 1, "--width", 64, "--heads", 2, "--batch", 4, "--seq", 32,
               "--warmup", 1, "--steps", 2, "--optimizers", "adamw", "muon", "muon+forward", "--out",
               tmp_path / "train.csv")
    with open(tmp_path / "train.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["optimizer"], row["implementation"], row["run"]) for row in rows] == [
        ("adamw", "torch", "eager"), ("muon", "ours", "eager"), ("muon", "ours", "forward")]
    assert len({row["heldout_loss"] for row in rows[1:]}) == 1
    for row in rows:
        assert 0 < float(row["optimizer_ms"]) < float(row["step_ms"]) and int(row["tokens"]) == 4 * 4 * 32
        phases = [float(row[f"{phase}_ms"]) for phase in ("forward", "backward", "clip")]
        assert 0 < min(phases) and max(phases) < float(row["step_ms"])
        assert 1 < float(row["heldout_loss"]) < 7
    for name in ("muon", r"muon\+forward"):
        took = rf"^{name}: [\d.]+ ms of [\d.]+ ms, [\d.]+ %; the step is [+-][\d.]+ % against AdamW's$"
        assert re.search(took, text, re.MULTILINE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU machine measures there")
def test_variants_with_equal_weights_multiply_equal_numbers(optimizer, tmp_path, monkeypatch):
    """The loss of a block's last step depends on weights and text alone where rates are 0."""
    held = ["adamw@muon", "muon@muon", "none@muon", "adamw+idle@muon"]
    text = run("train_parts.py", "--ranks", 2, "--layers", 1, "--width", 64, "--heads", 2, "--batch", 4, "--seq", 32,
               "--training", 1, "--turns", 1, "--settle", 1, "--steps", 2, "--variants", "adamw", "muon", *held,
               "--out", tmp_path / "parts.csv")
    with open(tmp_path / "parts.csv", newline="") as file:
        rows = {(row["variant"], row["when"]): row for row in csv.DictReader(file)}
    assert list(rows) == [("adamw", "before"), *((name, "turn") for name in ("adamw", "muon", *held)),
                          ("adamw@adamw", "released")]
    assert len({rows[name, "turn"]["loss"] for name in held}) == 1
    assert len({row["loss"] for row in rows.values()}) == 5  # every training goes on with weights of its own
    for row in rows.values():
        parts = sum(float(row[f"{name}_ms"]) for name in ("forward", "backward", "clip"))
        assert 0 < float(row["outside_ms"]) <= float(row["step_ms"]) and parts > 0 and row["steps"] == "2"
        assert row["mhz"] == row["joules"] == ""
    assert float(rows["none@muon", "turn"]["optimizer_ms"]) < float(rows["muon@muon", "turn"]["optimizer_ms"])
    module = load("train_parts", monkeypatch)
    lines = module.summary([module.numbers(row) for row in rows.values()])
    assert lines == text.splitlines()[-len(rows):] and "outside less AdamW's: +0.00" in "\n".join(lines)
    known = [{"when": "turn", "turn": turn, "variant": name, "outside_ms": ms, "forward_ms": ms, "backward_ms": ms}
             for name, times in {"muon": (4, 6, 8), "adamw": (3, 4, 5)}.items() for turn, ms in enumerate(times)]
    assert module.differences(known)[0] == "muon less adamw, outside_ms: +2.00 +- 2.48 (+1.00, +2.00, +3.00)"
    assert len(module.differences(known)) == 3 and module.differences(known[:4])[0].endswith(": +1.00 (+1.00)")
    with pytest.raises(argparse.ArgumentTypeError, match="name the @WEIGHTS"):
        module.Variant.of("none")


def test_clocks_are_means_over_spans(monkeypatch, capsys):
    found = load("clocks", monkeypatch).Clocks(None)
    assert "no clocks and no power" in capsys.readouterr().out and found.thread is None
    assert math.isnan(found.joules()) and all(map(math.isnan, found.during([(0.0, 9.0)])))
    found.samples = [(1.0, 1000.0, 500.0, False), (2.0, 1200.0, 700.0, True), (3.0, 9.0, 9.0, True)]
    assert found.during([(0.5, 1.5), (2.0, 3.0)]) == (1100.0, 600.0, 0.5)
    found.stop()


def test_rates_are_swept_until_both_neighbours_are_worse(monkeypatch):
    """AdamW's three rates, then one of each optimizer, from what is known so far."""
    sweep = load("convergence", monkeypatch)
    best = {"adamw": (4e-3, 8e-3, 1e-3), "muon": (1.6e-2,), "torch_muon": (8e-3,)}

    def loss(run):
        rates = [run.lr, run.embed_lr, run.head_lr] if run.optimizer == "adamw" else [run.lr]
        return sum(math.log2(rate / right) ** 2 for rate, right in zip(rates, best[run.optimizer])) + 0.01 * run.seed

    losses = {}
    while runs := [run for name in best for run in sweep.wanted(name, losses)]:
        losses |= {run: loss(run) for run in runs}
    assert not sweep.adamw_rates(losses)[1]
    for name, rates in best.items():
        seeds = sweep.PARITY_SEEDS if name == "muon" else sweep.SEEDS
        found = {run for run in losses if run.optimizer == name and run.lr == rates[0]
                 and (run.embed_lr, run.head_lr) == best["adamw"][1:]}
        assert {run.seed for run in found} == set(seeds)
    parity = {(run.optimizer, run.seed) for run in losses if run.lr == 1.6e-2 and run.optimizer != "adamw"}
    assert parity >= {(name, seed) for name in ("muon", "torch_muon") for seed in sweep.PARITY_SEEDS}
    assert len(losses) < 60


def searched(sweep, loss):
    """AdamW's best run as its three rates are searched, and the losses of all runs."""
    losses = {}
    while (found := sweep.adamw_rates(losses))[1]:
        losses |= {run: loss(run) for run in found[1]}
        assert len(losses) < 200
    return found[0], losses


def test_rates_are_searched_in_rounds_until_none_changes(monkeypatch):
    """The best rate of embeddings depends on that of the head here, so one round does not find it."""
    sweep = load("convergence", monkeypatch)

    def loss(run):
        lr, embed, head = (math.log2(rate / 2e-3) for rate in (run.lr, run.embed_lr, run.head_lr))
        return (lr + 1) ** 2 + (embed + head + lr - 3) ** 2 + 0.5 * (head - 4) ** 2

    best, losses = searched(sweep, loss)
    for rate in ("lr", "embed_lr", "head_lr"):
        for factor in (0.5, 2.0):
            assert losses[replace(best, **{rate: getattr(best, rate) * factor})] >= losses[best]
    assert 0 < len(losses) < 60


def test_runs_that_diverge_are_followed_by_lower_rates(monkeypatch):
    sweep = load("convergence", monkeypatch)
    start = sweep.OPTIMIZERS["adamw"][1]
    best, _ = searched(sweep, lambda run: sweep.LOST if run.lr > start / 8 else -run.lr)
    assert best.lr == start / 8
    best, losses = searched(sweep, lambda run: sweep.LOST)  # at no rate does it learn: the search ends
    assert best.lr >= 2.0**-13 * start and len(losses) < 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU machine measures there")
def test_convergence_goes_on_where_it_ended(optimizer, tmp_path, monkeypatch):
    """A call that ends after four runs, and another one: rows are trained once."""
    out = tmp_path / "convergence.csv"
    common = ("convergence.py", "--size", "tiny", "--steps", 2, "--eager", "--optimizers", "muon", "--data",
              FOLDER.parent / "tests", "--corpus", "tests", "--out", out)
    run(*common, "--runs", 4)
    with open(out, newline="") as file:
        first = list(csv.DictReader(file))
    text = run(*common)
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    runs = [tuple(row[key] for key in ("optimizer", "lr", "embed_lr", "head_lr", "seed")) for row in rows]
    assert len(set(runs)) == len(runs) > len(first) == 4 and rows[:len(first)] == first
    for name, seeds in ("adamw", 3), ("muon", 5):
        assert re.search(rf"^\| {name} \| [\d.]+(, at the edge)? \| {seeds} \|", text, re.M)
    assert "\n".join(load("convergence_table", monkeypatch).table(rows)) in text


PEER = """
import torch


class {name}(torch.optim.SGD):
    def __init__(self, params, **given):
        super().__init__(params, lr=given["lr"], weight_decay=given["weight_decay"])
        self.given = given
"""


def forget_peers():
    for name in [name for name in sys.modules if name == "muon" or name.startswith("peer_dion")]:
        del sys.modules[name]


@pytest.fixture
def sweep(optimizer, tmp_path, monkeypatch):
    """(benchmarks/convergence.py, options of a run on a CPU, with stand-ins for packages of others)."""
    for path, name in (("keller_jordan/muon.py", "SingleDeviceMuon"), ("dion/dion/normuon.py", "NorMuon")):
        file = tmp_path / path
        file.parent.mkdir(parents=True)
        file.write_text(PEER.format(name=name))
    module = load("convergence", monkeypatch)
    monkeypatch.setattr(sys, "path", list(sys.path))
    forget_peers()
    yield module, argparse.Namespace(
        size="tiny", steps=3, data=str(FOLDER.parent / "tests"), corpus="tests", eager=True, commit="abc",
        folders={name: tmp_path / name for name in ("keller_jordan", "dion")}, out=tmp_path / "convergence.csv",
        optimizers=["keller", "dion_normuon", "split16"], seconds=math.inf, runs=None, pause=None)
    forget_peers()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU machine measures there")
def test_low_precision_and_other_packages_train_like_the_rest(sweep):
    convergence, options = sweep
    found, losses = {}, {}
    for name in ("muon", "int8_momentum", "split16", "bf16_weights_stochastic", "keller", "dion_normuon"):
        run = convergence.Run(name, convergence.OPTIMIZERS[name].lr, 2e-3, 2e-3, 0)
        found[name] = convergence.Training(run, options, torch.device("cpu"))
        state = found[name].optimizers[0].state
        if name == "split16":  # it begins with the weights of the other runs, not with those rounded to bf16
            assert all(state[p]["weight_rest"].any() for p in found[name].model.blocks.parameters() if p.ndim == 2)
        losses[name] = [float(point.split(":")[1]) for point in found[name].row()["curve"].split()]
        assert losses[name] == sorted(losses[name], reverse=True), name
        dtypes = {p.dtype for p in found[name].model.blocks.parameters() if p.ndim == 2}
        assert dtypes == {torch.bfloat16 if convergence.OPTIMIZERS[name].bf16 else torch.float32}
        assert found[name].model.embed.weight.dtype == found[name].model.norm.weight.dtype == torch.float32
    for name in ("int8_momentum", "split16", "bf16_weights_stochastic"):
        assert losses[name] == pytest.approx(losses["muon"], abs=2e-3)
        matrix, exact = (found[key].model.blocks[0].attention.query.weight for key in (name, "muon"))
        assert not torch.equal(matrix.float(), exact) and torch.allclose(matrix.float(), exact, atol=2e-3), name
    matrix = found["int8_momentum"].model.blocks[0].attention.query.weight
    assert torch.int8 in {t.dtype for t in found["int8_momentum"].optimizers[0].state[matrix].values()}
    given = found["keller"].optimizers[0].given
    assert given["lr"] * given["weight_decay"] == pytest.approx(4e-3 * convergence.DECAY)
    assert found["dion_normuon"].optimizers[0].given == dict(
        lr=4e-3, mu=0.95, weight_decay=convergence.DECAY, nesterov=True, adjust_lr="rms_norm")


def test_the_sweep_leaves_out_packages_that_are_not_there_and_other_texts(sweep, capsys):
    convergence, options = sweep
    path = list(sys.path)
    assert convergence.Sweep(options).names == ["adamw", "keller", "dion_normuon", "split16"]
    forget_peers()
    sys.path[:] = path
    options.folders = {name: folder / "elsewhere" for name, folder in options.folders.items()}
    assert convergence.Sweep(options).names == ["adamw", "split16"]
    text = capsys.readouterr().out
    assert "dion_normuon is left out: there is no dion/normuon.py" in text
    assert "keller is left out: muon cannot be imported" in text
    row = dict.fromkeys(convergence.COLUMNS, "") | {"size": "tiny", "corpus": "tests", "steps": 3, "text_mb": 0.1}
    importlib.import_module("rows").append(options.out, convergence.COLUMNS, [row])
    with pytest.raises(SystemExit, match=r"the text has [\d.]+ MB, that of the rows of .* 0.1 MB"):
        convergence.Sweep(options)


def test_an_optimizer_whose_run_fails_is_left_out_and_others_go_on(sweep, capsys):
    convergence, options = sweep
    running = convergence.Sweep(options)
    run = convergence.Run("keller", 1e-2, 1e-3, 1e-3, 0)
    running.end(run, "Traceback: no")
    assert running.names == ["adamw", "dion_normuon", "split16"] and running.failed == ["keller"]
    assert "keller is left out from here on:\nTraceback: no" in capsys.readouterr().out and not options.out.exists()
    running.end(run, dict.fromkeys(convergence.COLUMNS, "1"))
    assert len(importlib.import_module("rows").read(options.out)) == 1


def test_the_plan_says_at_least_how_many_runs_are_missing(monkeypatch):
    sweep = load("convergence", monkeypatch)
    names = ["adamw", "muon", "torch_muon", "cautious", "split16"]

    def loss(run):
        return math.log2(run.lr / 5e-4) ** 2 + math.log2(run.embed_lr / 4e-3) ** 2 + 0.01 * run.seed

    losses, counts = {}, []
    while runs := [run for name in names for run in sweep.wanted(name, losses)]:
        missing = sweep.still_missing(names, losses)
        assert set(runs) <= {run for found in missing.values() for run in found}
        counts.append(len(losses) + sum(map(len, missing.values())))
        losses |= {run: loss(run) for run in runs}
    assert counts == sorted(counts) and counts[0] < len(losses) == counts[-1]
    assert not any(sweep.still_missing(names, losses).values())
    assert [len(runs) for runs in sweep.still_missing(["per_head"], losses).values()] == [0, 5]
    large = sweep.still_missing(names, {}, sweep.SIZES["124m"])  # AdamW's three rates together, three seeds each
    assert {name: len(runs) for name, runs in large.items()} == dict.fromkeys(names, 5) | {"split16": 3}
    assert {run.embed_lr / run.lr for run in large["adamw"]} == {2.0}
    assert {run.lr for run in large["muon"]} == {1e-3, 2e-3, 4e-3}


def test_optimizers_with_muons_step_take_its_rate(monkeypatch):
    """They begin once Muon's search has ended, and train three seeds with the best rate alone."""
    sweep = load("convergence", monkeypatch)
    assert set(sweep.RATE_OF_MUON) < set(sweep.OPTIMIZERS)

    def loss(run):
        return math.log2(run.lr / 5e-4) ** 2 + 0.01 * run.seed

    losses = {}
    for name in ("adamw", "muon"):
        while runs := sweep.wanted(name, losses):
            assert sweep.wanted("int8_momentum", losses) == [] or all(run.lr == 5e-4 for run in runs)
            losses |= {run: loss(run) for run in runs}
    first = {name: sweep.wanted(name, losses)[0].lr for name in ("normuon", "hyperball")}
    assert first == {"normuon": 5e-4, "hyperball": 1e-3}  # searches begin where Muon's ended
    for name in sweep.RATE_OF_MUON:
        runs = sweep.wanted(name, losses)
        assert [(run.lr, run.seed) for run in runs] == [(5e-4, seed) for seed in sweep.SEEDS]
        assert not sweep.wanted(name, losses | dict.fromkeys(runs, 0.0))


def test_the_best_rate_is_that_of_the_seeds_that_all_rates_have(monkeypatch):
    """A rate of few seeds does not win by its luck, and a rate without the first seed is not compared."""
    best = load("convergence_table", monkeypatch).best_rate
    assert best({2e-3: {0: 0.8}, 4e-3: {0: 0.7, 1: 0.9, 2: 0.95}}) == 4e-3
    assert best({2e-3: {0: 0.8, 1: 0.8}, 4e-3: {0: 0.7, 1: 1.0}, 8e-3: {1: 0.1}}) == 2e-3


def test_a_queue_takes_runs_of_later_sweeps_and_pauses(sweep, monkeypatch):
    """The searches of the first sweep leave a worker idle, which takes the next sweep's; nothing begins while the file
    of the pause exists; a run that would end too late does not begin.
    """
    convergence, options = sweep
    options.pause, options.optimizers = options.out.with_name("pause"), ["muon"]
    monkeypatch.setattr(convergence.Queue, "worker", lambda self, number: None)
    sweeps = [convergence.Sweep(argparse.Namespace(**vars(options) | {"steps": steps})) for steps in (3, 4)]
    queue = convergence.Queue(sweeps, options)
    for number in range(2):
        queue.begun[number] = queue.next_order()
    assert [(sweeps.index(part), run.optimizer, run.seed) for part, run in queue.begun.values()] == [
        (0, "adamw", 0), (1, "adamw", 0)]
    assert queue.next_order() is None  # both wait for AdamW's first run
    row = dict.fromkeys(convergence.COLUMNS, "") | vars(queue.begun.pop(0)[1]) | {
        "size": "tiny", "corpus": "tests", "steps": 3, "text_mb": convergence.text_mb(options.data),
        "heldout_loss": 1.0, "step_ms": 2e4}
    sweeps[0].end(convergence.Run.of(row), row)
    assert sweeps.index(queue.next_order()[0]) == 0
    options.seconds = 50.0  # its runs take 60 s
    assert queue.next_order() is None
    assert not queue.paused() and (options.pause.touch() or queue.paused())
    queue.begun.clear()
    done = threading.Timer(0.5, options.pause.unlink)
    done.start()
    queue.wait_while_paused()
    assert not options.pause.exists() and not options.pause.with_name("pause.idle").exists()


def test_a_process_ends_with_a_run_that_failed_and_another_goes_on(sweep, monkeypatch):
    """With threads in place of processes, trainings that only have a loss, and an optimizer whose runs fail."""
    convergence, options = sweep
    options.optimizers, workers = ["cautious", "muon"], []

    class Training:
        def __init__(self, run, options, device):
            self.run = run

        def row(self):
            if self.run.optimizer == "cautious":
                raise RuntimeError("no such optimizer")
            rates = (self.run.lr, self.run.embed_lr, self.run.head_lr)
            return dict.fromkeys(convergence.COLUMNS, 1) | vars(self.run) | {
                "size": "tiny", "corpus": "tests", "steps": 3, "text_mb": convergence.text_mb(options.data),
                "heldout_loss": sum(math.log2(rate / 1e-3) ** 2 for rate in rates) + 1e-3 * self.run.seed}

    def worker(self, number):
        orders = self.context.SimpleQueue()
        workers.append(threading.Thread(target=convergence.work, args=(number, [options], orders, self.results)))
        workers[-1].start()
        return workers[-1], orders

    monkeypatch.setattr(convergence, "Training", Training)
    monkeypatch.setattr(convergence.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(convergence.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(convergence.Queue, "worker", worker)
    with pytest.raises(SystemExit, match="runs failed of: cautious$"):
        convergence.Queue([convergence.Sweep(options)], options).run()
    assert len(workers) == 3 and not any(thread.is_alive() for thread in workers)
    losses = convergence.losses_of(convergence.rows_so_far(options))
    assert not any(convergence.still_missing(["muon"], losses).values()) and len(losses) > 10


def rows_of_losses(losses):
    """Rows of a sweep: (optimizer, rate) -> the loss of each seed; the curve falls by a line to the loss."""
    rates = {"embed_lr": "0.002", "head_lr": "0.002", "steps": "100", "tokens": "2000000", "step_ms": "10",
             "optimizer_ms": "1", "peak_mib": "5"}
    return [rates | {"optimizer": name, "lr": str(lr), "seed": str(seed), "heldout_loss": str(loss),
                     "curve": f"50:{loss + 0.5} 100:{loss}"}
            for (name, lr), found in losses.items() for seed, loss in enumerate(found)]


def test_parity_is_an_equivalence_test_over_seeds(monkeypatch):
    """torch_muon is compared at our best rate, not at its own."""
    sweep = load("convergence_table", monkeypatch)
    ours = [0.77, 0.76, 0.78, 0.75, 0.77]
    losses = {("muon", 0.004): ours, ("muon", 0.002): [0.9], ("torch_muon", 0.002): [0.1] * 5}
    assert sweep.parity(rows_of_losses(losses)) == [
        "", "muon less torch_muon: 0 seeds with both at these rates; 3 to 5 are needed."]
    for gap, equal in ((0.0, "yes"), (0.0045, "no")):
        torchs = [loss - gap + noise for loss, noise in zip(ours, (-0.001, 0, 0.001, 0, 0))]
        text = sweep.parity(rows_of_losses(losses | {("torch_muon", 0.004): torchs}))[1]
        assert text.startswith(f"muon less torch_muon, 5 seeds: {gap:+.5f} +- 0.00088 (95 %). A difference of 0.00118 ")
        assert f"two one-sided tests at 5 %: {equal}; their power, if both are equal, is 100 %" in text


def test_the_power_of_the_equivalence_test_is_that_of_simulated_sweeps(monkeypatch):
    sweep = load("convergence_table", monkeypatch)
    torch.manual_seed(0)
    for count in (3, 5):
        for error in (0.0015, 0.0025):
            gaps = error * math.sqrt(count) * torch.randn(100_000, count)
            found = gaps.mean(1).abs() + sweep.STUDENT_T[count][1] * gaps.std(1) / math.sqrt(count) < sweep.MARGIN
            assert abs(found.float().mean() - sweep.power_of_tost(error, count)) < 0.01


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU machine measures there")
def test_soak_finds_nothing_that_grows_or_differs(optimizer):
    text = run("soak.py", "--ranks", 2, "--model", "tiny", "--steps", 20, "--mode", "hsdp", "reduce")
    assert len(re.findall(r"^(hsdp|reduce) step \d+: [\d.]+ ms", text, re.M)) == 20
    assert len(re.findall(r"\+0 files, \+0 groups since step 6; 2 copies, 0 tensors differ", text)) == 2


def test_soak_fails_for_a_copy_that_differs_and_for_growth(optimizer, monkeypatch):
    """In one process, whose copy is said to differ, or which is said to have more at each look."""
    soak = load("soak", monkeypatch)
    had = [[float(i), 1.0, 1.0] for i in range(20)]
    for differing, holdings in ((1, lambda device: [1.0, 1.0, 1.0]), (0, lambda device: had.pop(0)[::-1])):
        run_threads(1, soak_of, soak, differing, holdings)


def soak_of(rank, world, soak, differing, holdings):
    class Steps:
        mode, rank, device, copies = "hsdp", 0, torch.device("cpu"), 2
        opt = type("Optimizer", (), {"skipped": torch.tensor(1)})

        def give(self, number, all_of_them):
            pass

        def step(self):
            return lambda: 1.0

        def differing(self):
            return differing

    soak.holdings = holdings
    with pytest.raises(SystemExit, match="something grew, copies differ"):
        soak.soak(Steps(), 20)

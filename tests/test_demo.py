"""The demo and the training example: a tiny run through get_kernel, its text, its options and its learning rates."""
from __future__ import annotations

import csv
import dataclasses
import functools
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.scripts import run_script

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TINY = ["--layers", "1", "--width", "64", "--heads", "2", "--batch", "8", "--seq", "32"]


@pytest.fixture
def example(monkeypatch):
    """A function: example("corpus") is the module examples/corpus.py."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def run_demo(*arguments: str, processes: int = 2) -> subprocess.CompletedProcess:
    """Run examples/demo.py with a tiny model."""
    return run_script(EXAMPLES / "demo.py", *TINY, "--processes", processes, *arguments, timeout=120)


def write_text(folder: Path, order: list[int]) -> None:
    """Many small files, created in the given order."""
    (folder / "package" / "tests").mkdir(parents=True)
    for number in order:
        (folder / "package" / f"file{number}.py").write_text(f"value = {number}\n" * 100)
        (folder / "package" / "tests" / f"file{number}.py").write_text("skipped\n" * 100)


ON_CPUS = pytest.mark.skipif(torch.cuda.is_available(), reason="the demo takes the GPUs that it finds")


@pytest.mark.parametrize("processes", [pytest.param(2, marks=ON_CPUS, id="cpu"),
                                       pytest.param(1, marks=pytest.mark.gpu, id="1 gpu"),
                                       pytest.param(2, marks=pytest.mark.gpus(2), id="2 gpus"),
                                       pytest.param(4, marks=pytest.mark.gpus(4), id="4 gpus")])
def test_both_optimizers_learn(optimizer, tmp_path, processes):
    done = run_demo("--steps", "16", "--eval-every", "8", "--lr", "0.01", "--out", str(tmp_path), processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.count("orthogonality error 0.") == 2  # of Muon, where the held-out loss is measured
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    runs = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert [run["optimizer"] for run in runs] == ["Muon", "AdamW"]
    for name in ("muon", "adamw"):
        with open(tmp_path / f"{name}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [int(row["step"]) for row in rows] == list(range(1, 17))
        assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"]) - 0.3
        assert [row["step"] for row in rows if row["heldout_loss"]] == ["8", "16"]
        assert all(0 < float(row["optimizer_ms"]) < float(row["step_ms"]) for row in rows)


@pytest.mark.parametrize("every, steps, plain", [(4, 10, [1, 2, 3, 6, 7]), (2, 3, [1, 2, 3]), (20, 1, [1])])
def test_times_are_those_of_steps_without_metrics(example, optimizer, monkeypatch, every, steps, plain):
    """Metrics are shown every so many steps; no other step collects, and the table leaves out steps that bind anew."""
    demo, train_gpt = example("demo"), example("train_gpt")
    text = torch.randint(256, (4000,), dtype=torch.uint8)
    monkeypatch.setattr(train_gpt, "read_corpus", lambda folder: (text, text))
    monkeypatch.setattr(train_gpt, "make_optimizer", lambda model, options: optimizer.Muon(
        optimizer.get_default_muon_param_groups(model), lr=0.01))
    options = demo.Options(steps=steps, eval_every=every, layers=1, width=64, heads=2, batch=2, seq=8)
    watch, bound = demo.Watch(options), []

    def after_step(step, opt):
        watch(step, opt)
        bound.append(opt._bound)

    records = list(train_gpt.train(options, torch.device("cpu"), after_step, watch.collects))
    assert [record.step for record in records if watch.is_plain(record.step)] == plain
    assert all(not bound[n - 1].collects and bound[n - 1] is bound[max(0, n - 2)] for n in plain)
    assert bool(watch.text) == (len(plain) < steps)
    slow = [dataclasses.replace(r, step_ms=2.0 if r.step in plain else 9.0, heldout_loss=1.0) for r in records]
    assert demo.summarize("Muon", 0.01, slow, watch).step_ms == 2.0


def test_a_failed_process_ends_the_demo(tmp_path):
    done = run_demo("--steps", "4", "--data", str(tmp_path), "--out", str(tmp_path))
    assert done.returncode == 1
    assert "The demo failed" in done.stdout and "ValueError" in done.stdout


def test_processes_share_the_batch_evenly(example, monkeypatch, capsys):
    """On three GPUs the demo failed as it stands, for 16 sequences."""
    demo = example("demo")
    for gpus, processes in ((0, 2), (1, 1), (3, 2), (6, 4), (8, 8)):
        monkeypatch.setattr(demo.torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert demo.processes_for(16) == processes
    monkeypatch.setattr(sys, "argv", ["demo.py", "--processes", "3"])
    with pytest.raises(SystemExit):
        demo.arguments()
    assert "--batch 16 cannot be split over 3 processes" in capsys.readouterr().err


class Leaving:
    """Leaves a file where Python is finalized while this is there."""

    def __init__(self, path: Path) -> None:
        self.leave = functools.partial(os.open, path, os.O_CREAT)

    def __del__(self) -> None:
        self.leave()


def stay(rank: int, *arguments, path: Path) -> None:
    """One process of a demo that does nothing; what `sys` holds is let go when Python is finalized."""
    sys.leaving = Leaving(path)


def nothing(rank: int, world: int) -> None:
    pass


@ON_CPUS
def test_processes_end_without_finalizing_python(example, monkeypatch, tmp_path):
    """Rarely, a thread of gloo was still letting go of a tensor then, and torch aborted the process."""
    run_ranks(1, nothing)  # else the demo would start the process that forks ranks, and all later ones start slowly
    demo, path = example("demo"), tmp_path / "finalized"
    monkeypatch.setattr(demo, "run_rank", functools.partial(stay, path=path))
    with pytest.raises(FileNotFoundError, match="muon.json"):  # what rank 0 of a real one writes
        demo.run_all(2, demo.Options(), 1.0)
    assert not path.exists()


def leaves(rank: int, world: int) -> tuple[bool, bool]:
    """Whether this rank's last collective is complete when the process group is left, and whether there still is one.
    Rank 1 starts the collective after rank 0 has, and after the time in which rank 0 would have ended.
    """
    sys.path.insert(0, str(EXAMPLES))
    try:
        train_gpt = importlib.import_module("train_gpt")
    finally:
        sys.path.remove(str(EXAMPLES))
    kept = dist.group.WORLD  # as FSDP2's meshes keep it
    if rank == 1:
        time.sleep(1.0)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    train_gpt.leave_process_group()
    return work.is_completed(), dist.is_initialized() or kept is None


def test_a_rank_leaves_when_all_have_come_to_their_end():
    """Else a thread of gloo lets go of the last collective while Python is finalized, and torch aborts the process."""
    assert run_ranks(2, leaves) == [(True, False)] * 2


def test_help_explains_every_option(example):
    train_gpt = example("train_gpt")
    text = train_gpt.parser("").format_help()
    for entry in dataclasses.fields(train_gpt.Options):
        assert "--" + entry.name.replace("_", "-") in text
        assert entry.metadata["help"].split("%")[0] in " ".join(text.split())


def test_text_does_not_depend_on_the_order_of_files(example, tmp_path):
    corpus = example("corpus")
    write_text(tmp_path / "one", list(range(200)))
    write_text(tmp_path / "two", list(range(200))[::-1])
    for one, two in zip(corpus.read_corpus(tmp_path / "one"), corpus.read_corpus(tmp_path / "two")):
        assert torch.equal(one, two)
        assert b"skipped" not in bytes(one.numpy())


def test_heldout_files_are_never_trained_on(example):
    corpus = example("corpus")
    files = corpus.source_files()
    train, heldout = corpus.read_corpus()
    assert len(train) + len(heldout) == sum(path.stat().st_size for path in files)
    sizes = [path.stat().st_size for path in files if corpus.is_heldout(path)]
    assert 0.01 < len(sizes) / len(files) < 0.1 and len(heldout) == sum(sizes)


def test_too_little_text_is_refused(example, tmp_path):
    with pytest.raises(ValueError, match="too little text"):
        example("corpus").read_corpus(tmp_path)


def test_windows_are_reproducible_and_one_byte_ahead(example):
    corpus = example("corpus")
    tokens = torch.randint(256, (1000,), dtype=torch.uint8)
    inputs, targets = corpus.random_windows(tokens, 5, 16, torch.Generator().manual_seed(3))
    again, _ = corpus.random_windows(tokens, 5, 16, torch.Generator().manual_seed(3))
    assert torch.equal(inputs, again) and torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("steps", [1, 2, 10, 200])
def test_learning_rate_rises_and_falls(example, steps):
    factors = [example("train_gpt").lr_factor(step, steps) for step in range(steps)]
    peak = factors.index(max(factors))
    assert all(0 < factor <= 1 for factor in factors)
    assert factors[:peak + 1] == sorted(factors[:peak + 1]) and factors[peak:] == sorted(factors[peak:], reverse=True)


def test_default_rates_are_the_best_of_a_fair_sweep(example):
    train_gpt, sweep = example("train_gpt"), example("sweep")
    losses = sweep.mean_losses(sweep.read_rows())
    assert set(losses) == set(train_gpt.BEST_LR)
    for name, by_lr in losses.items():
        best = min(by_lr, key=by_lr.get)
        assert best == train_gpt.BEST_LR[name]
        assert min(by_lr) < best < max(by_lr), f"{name}: the best rate lies on the edge of its grid"
        assert list(by_lr) == list(losses["adamw"])
    assert len({(row["optimizer"], row["lr"], row["seed"]) for row in sweep.read_rows()}) == len(sweep.read_rows())


def test_presets_are_trained_once(optimizer, tmp_path):
    """One row per measurement of the held-out loss; a second call adds nothing."""
    out = tmp_path / "presets.csv"
    command = [EXAMPLES / "presets.py", *TINY, "--steps", "4", "--eval-every", "2", "--lr", "0.01",
               "--sets", "turbo", "--seeds", "0", "--ns-dtype", "float16", "--out", out]
    texts = []
    for _ in range(2):
        done = run_script(*command)
        assert done.returncode == 0, done.stderr
        texts.append((out.read_text(), done.stdout))
    rows = list(csv.DictReader(texts[0][0].splitlines()))
    assert [(row["ns_coefficients"], row["ns_dtype"], row["step"]) for row in rows] == [
        ("turbo", "float16", "2"), ("turbo", "float16", "4")]
    assert texts[0] == texts[1] and f"({float(rows[-1]['heldout_loss']):.4f})" in texts[0][1]
    done = run_script(*command, "--steps", "2")
    assert len(out.read_text().splitlines()) == 4 and done.stdout.count("held-out") == 1  # that run's own


@pytest.mark.parametrize("script", ["presets", "sweep"])
def test_runs_of_another_model_have_another_table(example, monkeypatch, capsys, script):
    """Their rows could not be told from the demo's, whose losses were printed for them."""
    monkeypatch.setattr(sys, "argv", [script, *TINY])
    with pytest.raises(SystemExit):
        example(script).main()
    assert f"wants an --out of its own: {script}.csv" in capsys.readouterr().err

"""Missing and broken gradients while CUDA graphs replay the step: what steps without graphs do, to the last bit.

As in test_graphs.py, a tape stands for the graph on a CPU.
"""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from tests import test_graphs as graphs
from tests.paths import quiet
from tests.ranks import part, run_ranks
from tests.test_graphs import KINDS, STEPS, Run, count, counted, graphs_as, local, placed, tape  # noqa: F401
from tests.test_missing_grads import MODES, PATTERNS, patterns

pytestmark = quiet
SAID = ("a gradient is missing", "gradients lie elsewhere", "could not be captured")  # a word of each message


def on_tapes(rank, world, function, *args):
    """function(rank, world, *args, the stand-in for graphs, device) on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        # a tape holds gloo's
        patch.setattr(part("communication.process_groups").ProcessGroups, "check_capturable", lambda groups: None)
        return function(rank, world, *args, graphs.taped(patch), "cpu")


# missing ------------------------------------------------------------------------------------------------------------

def captured_patterns(rank, world, mode, hold, number, graph=torch.cuda.CUDAGraph, device="cuda"):
    """(what `patterns` says, how many graphs were replayed, how often each message was said)."""
    with counted(graph) as seen, warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        result = patterns(rank, world, mode, device, "capturable", hold, number)
    return result, len(seen), [count(messages, words) for words in SAID]


def check_patterns(results, number):
    """All but the first step are replayed; only AdamW's is captured anew where a gradient is or was missing."""
    for result, replays, messages in results:
        assert result == (True, True)
        assert replays >= number - 1
        assert messages[0] == messages[2] == 0 and messages[1] <= 1


def check_alone(result, replays, messages):
    """A process without others leaves parameters out: the step is planned anew, and captured if that lasts."""
    assert result == (True, True)
    assert replays > 0
    assert messages == [1, 0, 0]


@pytest.mark.interpreter
def test_patterns_on_tapes(tape):  # noqa: F811
    check_alone(*captured_patterns(0, 1, "alone", 3, 3, tape, "cpu"))


@pytest.mark.interpreter
@pytest.mark.parametrize("mode", MODES)
def test_patterns_over_eight_ranks_on_tapes(mode, tape):  # noqa: F811
    """Some of each mode; OPTIMIZER_PATTERNS=50 takes 200 in all."""
    number = int(os.environ.get("OPTIMIZER_PATTERNS", 5))
    check_patterns(run_ranks(8, on_tapes, captured_patterns, mode, 1, number, timeout=30 * number), number)


@pytest.mark.gpu
def test_patterns_on_a_gpu():
    check_alone(*captured_patterns(0, 1, "alone", 3, PATTERNS))


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.gpus(n)) for n in (2, 4, 8)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.gpu
def test_random_patterns_on_many_gpus(mode, world):
    """200 in all on each number of GPUs: another subset on each rank, and steps where none has any."""
    check_patterns(run_ranks(world, captured_patterns, mode, 1, PATTERNS, backend="nccl", timeout=120), PATTERNS)


# broken -------------------------------------------------------------------------------------------------------------

BROKEN = {3: (0, -3), 4: (1,), 7: (0, -2)}  # step -> parameters; the matrices are stepped by replays
PARAMETERS = len(graphs.MATRICES["cuda"]) + len(graphs.REST)
AT_ADAMW = PARAMETERS - 3  # the place of its first parameter
MODES_OF_RANKS = ["fsdp", "ddp", "reduce"]


def steps_on(device):
    """The interpreter is slow."""
    return range(STEPS if device == "cuda" else 5)


def runs_of(kinds, mode, world, device, **options):
    """A run of each kind, placed as `mode` says; None: in a process without others."""
    place, shared = placed(mode, world, device) if mode else (torch.clone, {})
    return [Run(kind, "NorMuon", place, device, **shared, **options) for kind in kinds]


def same(tensors, others):
    return all(torch.equal(local(a), local(b)) for a, b in zip(tensors, others, strict=True))


def broken_runs(rank, world, mode, nonfinite, graph=torch.cuda.CUDAGraph, device="cuda", kinds=KINDS):
    """Runs of every kind with broken gradients, beside one that is not given what is to be left alone.

    Returns (the steps at which a kind differs from it, what each has skipped, how often each raised, how many graphs
    each replayed).
    """
    runs, (left,) = runs_of(kinds, mode, world, device, nonfinite=nonfinite), runs_of(["off"], mode, world, device)
    wrong, raised, replays = [], dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
    for number in steps_on(device):
        names = BROKEN.get(number, ())
        if names and nonfinite == "raise":
            expected = left.tensors()  # as if there had been no step
        else:
            expected = left.step(number, missing=names)
        if mode == "reduce" and rank != world - 1:
            names = ()  # broken on one rank only
        for run in runs:
            with counted(graph) as seen:
                try:
                    tensors = run.step(number, broken=names)
                except RuntimeError as error:
                    assert "no weight and no state has changed" in str(error), error
                    tensors, raised[run.kind] = run.tensors(), raised[run.kind] + 1
            replays[run.kind] += len(seen)
            wrong += [] if same(tensors, expected) else [(number, run.kind)]
    return wrong, [run.optimizer.skipped.item() for run in runs], raised, replays


def check_broken(result, nonfinite, device="cuda"):
    wrong, skipped, raised, replays = result
    broken = [BROKEN[number] for number in steps_on(device) if number in BROKEN]
    assert wrong == []
    assert nonfinite != "skip" or {*skipped} == {sum(map(len, broken))}
    assert {*raised.values()} == {len(broken) if nonfinite == "raise" else 0}
    check_replays(replays, device)


def check_replays(replays, device):
    """All but the first step, and one with other ns_steps."""
    assert not replays.get("off") and replays["capturable"] >= len(steps_on(device)) - 2


@pytest.mark.interpreter
def test_broken_gradients_on_a_tape(tape):  # noqa: F811
    check_broken(broken_runs(0, 1, None, "skip", tape, "cpu", ["capturable"]), "skip", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_broken_gradients_on_a_gpu(nonfinite):
    check_broken(broken_runs(0, 1, None, nonfinite), nonfinite)


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.gpus(n)) for n in (2, 4)])
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("mode", MODES_OF_RANKS)
@pytest.mark.gpu
def test_broken_gradients_on_many_gpus(mode, nonfinite, world):
    """Also where one rank alone saw them."""
    for result in run_ranks(world, broken_runs, mode, nonfinite, backend="nccl", timeout=120):
        check_broken(result, nonfinite)


def spoiled(rank, world, mode, graph=torch.cuda.CUDAGraph, device="cuda", kinds=KINDS):
    """With "propagate" and two broken gradients: which parameters are others here than without them, by kind."""
    runs, (clean,) = runs_of(kinds, mode, world, device), runs_of(["off"], mode, world, device)
    for number in range(4):
        for run in (clean, *runs):
            run.step(number, broken=(0, -3) if number == 3 and run is not clean else ())
    return {run.kind: {i for i, pair in enumerate(zip(run.params, clean.params)) if not same(*[[t] for t in pair])}
            for run in runs}


@pytest.mark.gpu
def test_a_broken_gradient_spoils_no_other_matrix_on_a_gpu():
    assert spoiled(0, 1, None) == dict.fromkeys(KINDS, {0, AT_ADAMW})


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.gpus(n)) for n in (2, 4)])
@pytest.mark.parametrize("mode", MODES_OF_RANKS)
@pytest.mark.gpu
def test_a_broken_gradient_spoils_no_other_matrix_on_many_gpus(mode, world):
    """Of AdamW's parameter, only the rank with the broken element has it."""
    results = run_ranks(world, spoiled, mode, backend="nccl", timeout=120)
    assert [set().union(*(result[kind] for result in results)) for kind in KINDS] == [{0, AT_ADAMW}] * len(KINDS)


# GradScaler ---------------------------------------------------------------------------------------------------------

INFINITE = (3, 7)  # steps


def scaled_runs(rank, world, mode, graph=torch.cuda.CUDAGraph, device="cuda", kinds=KINDS):
    """Runs of every kind under a GradScaler, beside one with neither scale nor the steps that are left out.

    Returns (the steps at which a kind differs from it, each scale in the end, what each has skipped, and replayed).
    """
    runs = runs_of(kinds, mode, world, device, unscale_in_step=True)
    (plain,) = runs_of(["off"], mode, world, device)
    scalers, wrong, replays = [], [], dict.fromkeys(kinds, 0)
    for _ in runs:
        scalers.append(torch.amp.GradScaler(device, init_scale=256.0))
        scalers[-1].scale(torch.zeros((), device=device))  # makes the scale, as a loss would
    for number in steps_on(device):
        names = (0,) if number in INFINITE else ()
        expected = plain.tensors() if names else plain.step(number)
        if mode == "reduce" and rank != world - 1:
            names = ()
        for run, scaler in zip(runs, scalers):
            with counted(graph) as seen:
                tensors = run.step(number, broken=names, scale=scaler.get_scale(), take=scaled(run, scaler))
            replays[run.kind] += len(seen)
            wrong += [] if same(tensors, expected) else [(number, run.kind)]
    return wrong, [s.get_scale() for s in scalers], [run.optimizer.skipped.item() for run in runs], replays


def scaled(run, scaler):
    """A function that takes a run's step by a GradScaler."""
    def take():
        scaler.step(run.optimizer)
        scaler.update()

    return take


def check_scaled(result, scale, skips, device="cuda"):
    wrong, scales, skipped, replays = result
    assert wrong == []
    assert {*scales} == {scale} and {*skipped} == {skips}
    check_replays(replays, device)


@pytest.mark.interpreter
def test_a_grad_scaler_on_a_tape(tape):  # noqa: F811
    check_scaled(scaled_runs(0, 1, None, tape, "cpu", ["capturable"]), 128.0, 5, "cpu")


@pytest.mark.gpu
def test_a_grad_scaler_on_a_gpu():
    check_scaled(scaled_runs(0, 1, None), 64.0, 2 * PARAMETERS)


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.gpus(n)) for n in (2, 4)])
@pytest.mark.parametrize("mode", MODES_OF_RANKS)
@pytest.mark.gpu
def test_a_grad_scaler_on_many_gpus(mode, world):
    """With unreduced gradients, only the rank that saw it lowers its scale."""
    for rank, result in enumerate(run_ranks(world, scaled_runs, mode, backend="nccl", timeout=120)):
        check_scaled(result, 256.0 if mode == "reduce" and rank != world - 1 else 64.0, 2 * PARAMETERS)


# waiting ------------------------------------------------------------------------------------------------------------

def unwaiting(rank, world, mode, kind, nonfinite, scale=None, device="cuda"):
    """Steps during which it is an error that the host waits for the device; returns how many were skipped in each."""
    (run,) = runs_of([kind], mode, world, device, nonfinite=nonfinite, unscale_in_step=bool(scale))
    take, counts = run.optimizer.step, []
    if scale:
        scaler = torch.amp.GradScaler(device, init_scale=scale)
        scaler.scale(torch.zeros((), device=device))
        take = scaled(run, scaler)
    for number in range(4):
        run.step(number, scale=scale or 1.0, take=take)
    with graphs_as(kind):
        for broken in ((), (0, -3)):
            before = run.optimizer.skipped.clone()
            run.give(4, broken=broken)
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(3):
                    take()
            finally:
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            counts.append((run.optimizer.skipped - before).item())
    return counts


def expected_counts(nonfinite, scale):
    return [0, 3 * PARAMETERS if scale else 6 if nonfinite == "skip" else 0]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("nonfinite", "scale"), [("propagate", None), ("skip", None), ("propagate", 64.0),
                                                  ("skip", 64.0)])
def test_no_step_waits_for_the_gpu(nonfinite, scale, kind):
    assert unwaiting(0, 1, None, kind, nonfinite, scale) == expected_counts(nonfinite, scale)


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.gpus(n)) for n in (2, 4)])
@pytest.mark.parametrize("mode", MODES_OF_RANKS)
@pytest.mark.gpu
def test_no_step_waits_for_many_gpus(mode, world):
    """With "skip", whose flags the ranks compare in every step."""
    for kind in ("auto", "capturable"):
        results = run_ranks(world, unwaiting, mode, kind, "skip", backend="nccl", timeout=120)
        assert results == [expected_counts("skip", None)] * world

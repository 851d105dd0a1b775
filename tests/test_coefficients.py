"""Two steps as one polynomial: its numbers against the two steps in fp64, where it is taken, and what it saves."""
from __future__ import annotations

import ast
import importlib
import itertools
import math
import re
from pathlib import Path

import pytest
import torch

from tests import references
from tests.paths import PATHS, forget, quiet, take
from tests.ranks import everywhere
from tests.spectra import KINDS, spectrum

pytestmark = quiet
TOOLS = Path(__file__).resolve().parent.parent / "tools"

SETS = {"polar_express": 10, "polar_express_nanochat": 5, "polar_express_dion": 5, "polar_express_modded_nanogpt": 5,
        "cans": 5, "quintic": 5, "turbo": 4, "aol": 4, "jordan": 10, "deepseek_v4": 10, "anvil": 6}


@pytest.fixture
def steps(part):
    return part("newton_schulz.coefficients")


def places(steps, name):
    """(steps so far, the last two of which are a pair, that pair), for each place of a set that has one."""
    for count in range(2, SETS[name] + 1):
        triples = steps._beginning(name, count)
        pair = steps._pair(triples, name in steps.NEEDS_AOL)
        if pair:
            yield triples, pair


def of_two(A, first, second):
    def polynomial(triple, A):
        return triple[0] + triple[1] * A + triple[2] * A * A

    P = polynomial(first, A)
    return P * polynomial(second, A * P * P)


def of_pair(A, pair):
    S = pair.S[0] * A * A + pair.S[1] * A
    C = pair.C[0] * A * S + pair.C[1] * A + pair.C[2] * S
    H = pair.H[0] * C * C + pair.H[1] * A + pair.H[2] * S + pair.H[3] * C + pair.H[4]
    return H * H + pair.Q[0] * S + pair.Q[1] * C + pair.Q[2]


@pytest.mark.parametrize("name", SETS)
def test_a_pair_is_its_two_steps(steps, name):
    """To less than half of what one rounding to bf16 takes, wherever A may be, and 2 % beyond, where rounding may put
    it.
    """
    found = list(places(steps, name))
    assert found and all(len(triples) > 2 for triples, _ in found)
    for triples, pair in found:
        S = torch.linspace(0, 1, 100_001, dtype=torch.float64)
        for a, b, c in triples[:-2]:
            S = a * S + b * S**3 + c * S**5
        A = torch.linspace(0, 1.02 * float(S.max())**2, 100_001, dtype=torch.float64)
        exact = of_two(A, *triples[-2:])
        assert ((of_pair(A, pair) - exact) / exact).abs().max() < 0.8e-3
        assert max(abs(number) for product in pair for number in product) < 32


def test_a_pair_is_found_where_the_steps_begin_as_a_set_does(steps):
    """Also of triples that are given by hand; elsewhere A has another range."""
    named = steps.steps_of("polar_express")
    given = steps.steps_of(named.triples, 5)
    assert given.pairs(n=1) == named.pairs(n=1) and None not in named.pairs(n=1)[1:]
    jordan = steps.steps_of("jordan").pairs()
    assert steps.steps_of(steps.SETS["jordan"][0], 5).pairs() == jordan and None not in jordan
    moved = named.triples[1:] + named.triples[:1]
    assert steps.steps_of(moved, 5).pairs(n=1) == (None, None, None)
    assert steps.Steps(named.triples, aol=True).pairs(n=1) == (None, None, None)
    assert steps.steps_of("turbo").pairs()[0] is None and steps.Steps(steps.SETS["turbo"]).pairs()[1] is None


def test_only_products_in_fp16_take_pairs(steps):
    named = steps.steps_of("polar_express")
    assert [[p is not None for p in named.pairs(torch.float16, n)] for n in (1, 2, 3)] == [
        [False] * 5, [False, True, True], [False, True]]
    for dtype in (torch.float32, torch.bfloat16):
        assert not any(named.pairs(dtype, 2)) and not any(named.pairs(dtype))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [17, 64])
def test_the_four_products(part, device, monkeypatch, path, n):
    """Against fp64, of a matrix with all the values that A may have."""
    take(path, monkeypatch)
    steps, two_steps = part("newton_schulz.coefficients"), part("newton_schulz.iteration").two_steps
    triples, pair = next(places(steps, "polar_express"))
    basis = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]
    values = torch.linspace(0, 3.9, n, dtype=torch.float64)
    A = ((basis * values) @ basis.mT)[None].to(device, torch.float32)
    S, C = torch.empty_like(A), torch.empty_like(A)
    exact = (basis * of_pair(values, pair)) @ basis.mT
    two_steps(pair, A, S, C)
    torch.testing.assert_close(S[0].cpu().double(), exact, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name, most, made", [
    ("polar_express", 1, 5), ("polar_express", 2, 9), ("polar_express", 3, 13), ("jordan", 3, 12)])
def test_products_of_an_iteration(part, monkeypatch, name, most, made):
    """In fp16 a pair takes four, and with a step before it one more."""
    everywhere(monkeypatch, part("newton_schulz.coefficients"), "SMALL_SHORT_SIDE", 0)
    iteration, polar, counts = part("newton_schulz.iteration"), part("newton_schulz.orthogonalize"), []
    real = iteration.symmetric_product
    everywhere(
        monkeypatch, iteration, "symmetric_product", lambda *args, **more: (counts.append(1), real(*args, **more))
    )
    everywhere(monkeypatch, part("newton_schulz.method"), "restart_interval", lambda *about: most)
    polar.orthogonalize(torch.randn(24, 24), name, dtype=torch.float16)
    assert len(counts) == made


@pytest.mark.parametrize("most", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_only_what_is_read_whole_is_written_whole(part, monkeypatch, most, dtype):
    """As if symmetric products read lower triangles only: with pairs (fp16) and without, the same bits."""
    everywhere(monkeypatch, part("newton_schulz.coefficients"), "SMALL_SHORT_SIDE", 0)
    monkeypatch.setenv("OPTIMIZER_KERNELS", "torch")
    iteration, polar, told = part("newton_schulz.iteration"), part("newton_schulz.orthogonalize"), []
    real, upper = iteration.symmetric_product, torch.ones(24, 24, dtype=torch.bool).triu(1)

    def lower(C):
        return C.tril() + C.tril(-1).mT

    def of_triangles(A, B, out, alpha=1.0, addends=(), diagonal=0.0, whole=True):
        assert addends
        told.append(whole)
        real(lower(A), lower(B), out, alpha, [(lower(C), beta) for C, beta in addends], diagonal)
        return out if whole else out.masked_fill_(upper, float("nan"))

    everywhere(monkeypatch, part("newton_schulz.method"), "restart_interval", lambda *about: most)
    U = torch.randn(24, 24)
    before = polar.orthogonalize(U, dtype=dtype)
    forget(polar, monkeypatch)
    everywhere(monkeypatch, iteration, "symmetric_product", of_triangles)
    everywhere(monkeypatch, iteration, "read_triangles", lambda *matrices: True)
    assert torch.equal(polar.orthogonalize(U, dtype=dtype), before)
    assert told[-1] and 0 < sum(told) < len(told) / 2


# Cuts of more than five steps

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
LONGEST = 12
# Of large matrices in fp16 (docs/math.md, "Cuts of more than five steps"; benchmarks/results/schedules.csv)
LONG_CUTS = {("polar_express", 6): [2, 2, 2], ("polar_express", 7): [2, 2, 3], ("polar_express", 8): [2, 2, 4],
             ("polar_express", 9): [2, 2, 5], ("polar_express", 10): [2, 2, 3, 3], ("polar_express", 11): [2, 2, 3, 4],
             ("polar_express", 12): [2, 2, 4, 4], ("jordan", 7): [1, 2, 2, 2], ("jordan", 10): [2] * 5,
             ("jordan", 12): [2] * 6, ("deepseek_v4", 10): [2] * 5, ("qwen3_8", 8): [2, 2, 4], ("anvil", 6): [2, 2, 2]}


def schedules(steps):
    """(name, iteration) of every set, with 1 to LONGEST steps if it has any length."""
    for name, triples in steps.SETS.items():
        for count in range(1, LONGEST + 1) if name in steps.ANY_LENGTH else [len(triples)]:
            yield name, steps.steps_of(name, count)


def lengths(iteration, *about):
    return [len(interval) for interval in iteration.intervals(*about)]


def growths(iteration, *about):
    for interval in iteration.intervals(*about):
        yield len(interval), math.prod(a * a for a, _, _ in interval[:-1])


def test_every_cut_is_the_whole_schedule(steps):
    """In each dtype, for small and large matrices, whatever is allowed; long intervals are late and grow little."""
    for (name, iteration), dtype, n, most in itertools.product(
            schedules(steps), (F16, F32, BF16), (64, 255, 256, 4096), (1, 2, 3, 4, 5, 100)):
        about, count = (dtype, most, n), len(iteration.triples)
        assert sum(iteration.intervals(*about), ()) == iteration.triples, name
        assert max(lengths(iteration, *about)) <= most and len(iteration.pairs(*about)) == len(
            iteration.intervals(*about))
        short = (steps.MAX_INTERVAL_CUBIC if iteration.cubic else steps.MAX_INTERVAL)[dtype]
        first = 0
        for length, growth in growths(iteration, *about):
            if length > short - (dtype == F16 and (n < 256 or count > 5) and not iteration.cubic):
                assert dtype == F16 and n >= 256 and name in ("polar_express", "qwen3_8"), (name, count, about)
                assert first >= 4 and length <= 5 and growth <= 2**9
            first += length


@pytest.mark.parametrize("name, count", LONG_CUTS)
def test_cuts_of_long_schedules(steps, name, count):
    iteration = steps.steps_of(name, count)
    assert lengths(iteration) == LONG_CUTS[name, count]
    assert lengths(steps.steps_of(iteration.triples, count)) == LONG_CUTS[name, count]  # given as triples
    assert max(lengths(iteration, F16, 3)) <= 3


def test_rounding_leaves_the_range_of_no_schedule(steps):
    """Q of an interval is computed from a rounded A, and X is not. A rounding of A moves its eigenvalues by at most
    2^-11 of the largest one: by half as much again, no singular value leaves the range of the later intervals. Five
    steps of other sets bear less; leaving its range, `jordan` grows slowly.
    """
    for (name, iteration), most in itertools.product(schedules(steps), (2, 3, 100)):
        count = len(iteration.triples)
        if count < 5 or count == 5 and name not in ("polar_express", "quintic") or iteration.cubic or iteration.aol:
            continue
        parts, largest = iteration.intervals_with_pairs(F16, most, 256), 1.0
        for number, part in enumerate(parts):
            x = largest * torch.cat([torch.zeros(1), torch.logspace(-6, 0, 3000)]).double()
            error = 1.5 * 2.0**-11 * largest**2
            reached = torch.cat([x * factor_of(x * x + sign * error, *part) for sign in (-1, 1)]).abs()
            for later in parts[number + 1:]:
                reached *= factor_of(reached * reached, *later)
            assert reached.max() <= 1.5, (name, count, most, number)
            largest = (x * factor_of(x * x, *part)).max()


def factor_of(A, triples, pair):
    """Q of an interval, whose A has the eigenvalues given."""
    Q = torch.ones_like(A)
    for a, b, c in triples[:-2] if pair else triples:
        P = a + b * A + c * A * A
        Q, A = Q * P, P * A * P
    return Q * of_pair(A, pair) if pair else Q


def test_up_to_five_steps_are_cut_alike_whatever_is_allowed(steps):
    """The default is, and no set of five steps takes a long interval."""
    for name, iteration in schedules(steps):
        if len(iteration.triples) <= 5 and not iteration.cubic:
            assert iteration.intervals(F16, 3) == iteration.intervals(F16, 100), name
    assert lengths(steps.steps_of("polar_express")) == [2, 3] and lengths(steps.steps_of("jordan")) == [3, 2]


@pytest.mark.parametrize("alpha", [1, 2, 4, 8])
def test_longer_intervals_cost_no_more_for_long_matrices_and_more_steps_cost_more(part, steps, alpha):
    """Of square matrices an interval fewer costs no product with them, but may cost a pair."""
    method, n = part("newton_schulz.method"), 1024

    def cost(iteration, most):
        return method._cost(n, alpha * n, method._launches(iteration, F16, most, 256))

    before = {}
    for name, iteration in schedules(steps):
        costs = [cost(iteration, most) for most in (2, 3, 100)]
        if alpha > 1 and not iteration.cubic:
            assert costs == sorted(costs, reverse=True), name
        taken = method.cost(n, alpha * n, iteration)
        assert taken <= cost(iteration, 1) or iteration.cubic
        assert taken > before.get(name, 0), (name, len(iteration.triples))
        before[name] = taken


def test_long_intervals_are_taken_for_long_matrices(part, steps):
    """Eight, nine, eleven and twelve steps of polar_express save a twentieth by intervals of more than three steps; no
    other schedule takes them. Of more than five steps square matrices take the Gram iteration in fp16, too. Five steps
    with pairs restart twice up to an aspect ratio of 1.74.
    """
    method = part("newton_schulz.method")
    for name, iteration in schedules(steps):
        count, chosen = len(iteration.triples), {}
        for alpha in (1, 1.5, 1.7, 1.8, 2, 2.5, 4, 8):
            chosen[alpha] = method.restart_interval(1024, int(alpha * 1024), iteration)
        long = name in ("polar_express", "qwen3_8") and count in (8, 9, 11, 12)
        assert [chosen[alpha] for alpha in (4, 8)] == [100 if long or iteration.cubic else 3] * 2 or count < 3
        if name == "polar_express" and count == 5:
            assert [chosen[alpha] for alpha in (1, 1.5, 1.7, 1.8, 2, 4)] == [2, 2, 2, 3, 3, 3]
        if name == "jordan" and count == 5:
            assert {*chosen.values()} == {3}
        if count > 5:
            equal = iteration.intervals(F16, 2) == iteration.intervals(F16, 3)
            assert chosen[1] == method.restart_interval(4096, 4096, iteration) == (3 if equal else 2)
            assert method.restart_interval(1024, 1024, iteration, F32) == 1


@pytest.mark.parametrize("name, given, count", [
    ("qwen3_8", 5, 8), ("qwen3_8", 8, 8), ("deepseek_v4", 5, 10), ("deepseek_v4", 10, 10), ("anvil", 5, 6),
    ("anvil", 6, 6)])
def test_a_published_schedule_needs_its_name_only(steps, name, given, count):
    """ns_steps may stay at its default; another number that is not the schedule's raises."""
    assert len(steps.steps_of(name, given).triples) == count
    with pytest.raises(ValueError, match=f"the set '{name}' has {count} steps"):
        steps.steps_of(name, 7)


def test_qwen_is_the_default_with_eight_steps(steps):
    named = steps.steps_of("qwen3_8")
    assert named == steps.steps_of("polar_express", 8) and named.pairs() == steps.steps_of("polar_express", 8).pairs()
    assert [pair is None for pair in named.pairs()] == [True, False, False]  # none begins with the first step


@pytest.mark.parametrize("name, count", [("polar_express", 6), ("qwen3_8", 8), ("polar_express", 10),
                                         ("polar_express", 11), ("polar_express", 12), ("deepseek_v4", 10),
                                         ("anvil", 6), ("jordan", 8)])
def test_errors_of_long_schedules(part, steps, monkeypatch, name, count):
    """In fp16 in emulation: over all spectra the largest error is at most 1.25 times that of the standard iteration,
    and on each at most 1.25 times the larger of it and of intervals of at most three steps, plus .002.
    """
    take("torch", monkeypatch)
    everywhere(monkeypatch, part("newton_schulz.coefficients"), "SMALL_SHORT_SIDE", 0)
    everywhere(monkeypatch, part("newton_schulz.method"), "restart_interval", lambda *about: 100)
    polar, iteration = part("newton_schulz.orthogonalize"), steps.steps_of(name, count)
    forget(polar, monkeypatch)
    torch.manual_seed(0)
    errors = []
    for kind in KINDS:
        X = spectrum(kind, 128, 384).float()
        left, S, right = torch.linalg.svd(X.double() / X.double().norm(), full_matrices=False)
        for a, b, c in iteration.triples:
            S = a * S + b * S**3 + c * S**5
        target = (left * S) @ right
        results = (polar.orthogonalize(X, name, count, dtype=F16), references.standard(X, iteration, F16),
                   references.gram(X, iteration, F16, 3))
        ours, standard, short = (((O.double() - target).norm() / target.norm()).item() for O in results)
        assert ours <= 1.25 * max(standard, short) + 0.002, kind
        errors.append((ours, standard))
    largest, allowed = map(max, zip(*errors))
    assert math.isfinite(largest) and largest <= 1.25 * allowed


def test_a_set_that_is_none_is_named(optimizer, monkeypatch, capsys):
    monkeypatch.syspath_prepend(TOOLS)
    tool = importlib.import_module("fit_pairs")
    monkeypatch.setattr("sys.argv", ["fit_pairs.py", "jordan", "jardon"])
    with pytest.raises(SystemExit):
        tool.main()
    assert "no sets: jardon; there are" in capsys.readouterr().err


def test_numbers_are_fitted(optimizer, steps, monkeypatch, capsys):
    """The tool's command, with fewer tries than its own, for the default."""
    monkeypatch.syspath_prepend(TOOLS)
    tool = importlib.import_module("fit_pairs")
    for name, number in (("TRIES", 2), ("ROUNDS", 2)):
        monkeypatch.setattr(tool, name, number)
    monkeypatch.setattr("sys.argv", ["fit_pairs.py", "polar_express"])
    tool.main()
    lines = capsys.readouterr().out.splitlines()
    found = [re.fullmatch(r"polar_express (\d): Pair(.*),  # (.*)", line).groups() for line in lines]
    assert [at for at, *_ in found] == ["1", "3"]
    pairs = sorted(tool.pairs_of(steps.steps_of("polar_express")))
    for (_, numbers, error), (_, first, second, largest) in zip(found, pairs):
        A = torch.linspace(0, largest**2, 10_001, dtype=torch.float64)
        exact = of_two(A, first, second)
        pair = steps.Pair(*ast.literal_eval(numbers))
        assert ((of_pair(A, pair) - exact) / exact).abs().max() < 1.1 * float(error) < 1e-3

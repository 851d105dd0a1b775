"""Rules that orthogonalize some rows or columns (Dion2, Dion3): the papers' formulas in fp64, on every layout the bits
of one process, and plans of the smaller matrices.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.ranks import package, part, run_threads
from tests.test_rule_protocol import factor, polar
from tests.test_units import layouts, problem_of, stepped

LR, MU, DECAY, SHAPES = 0.02, 0.9, 0.1, [(24, 8), (8, 30), (3, 6, 32), (7, 40), (16, 16), (1, 5), (12, 1)]
# name: (rule, options); blocks of 6 or 8 ranks' shards, and of no layout's
OPTIONS = {
    "dion2": ("dion2", {}), "dion2, rows": ("dion2", {"select": "row", "fraction": 0.4, "blocks": 4}),
    "dion2, columns": ("dion2", {"select": "column", "fraction": 0.3, "blocks": 3}), "dion3": ("dion3", {"blocks": 3}),
}


# the reference -----------------------------------------------------------------------------------------------------

def selected(M, rows, fraction, blocks):
    """The rows (else columns) of the paper: the largest L1 norms, in Python."""
    sums = M.abs().sum(1 if rows else 0).tolist()
    length, found = max(1, math.ceil(len(sums) / blocks)), []
    for start in range(0, len(sums), length):
        block = range(start, min(start + length, len(sums)))
        found += sorted(block, key=lambda i: (-sums[i], i))[:math.ceil(fraction * len(block))]
    return sorted(found)


def reference(rule, W, G, state, fraction=0.25, select="short", blocks=1):
    """A step of microsoft/dion with selection_scope="global" on one matrix in fp64. Of M only the scale differs."""
    rows = rule == "dion3" or select == "row" or select == "short" and len(W) <= W.shape[1]
    M = state.setdefault("M", torch.zeros_like(W))
    M += G
    K = selected(M, rows, fraction, blocks)
    at = (K,) if rows else (slice(None), K)
    O = polar(M[at])
    M[at] *= MU
    if rule == "dion3":
        V = state.setdefault("V", torch.zeros(len(W), 1, dtype=W.dtype))
        V[K] = 0.95 * V[K] + 0.05 * (O ** 2).mean(1, keepdim=True)
        N = O / (V[K].sqrt() + 1e-8)
        O = N * O.norm() / N.norm()
    W *= 1 - LR * DECAY
    W[at] -= LR * factor(W) * O


@pytest.mark.parametrize("case", OPTIONS)
def test_a_rule_computes_its_formula(case, device, optimizer):
    rule, options = OPTIONS[case]
    torch.manual_seed(0)
    W = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    params = [nn.Parameter(w.float().to(device)) for w in W]
    muon = optimizer.Muon(params, lr=LR, momentum=MU, weight_decay=DECAY, rule=rule, **options,
                          ns_coefficients=(1.875, -1.25, 0.375), ns_steps=22, wire_dtype=torch.float32,
                          ns_dtype=torch.float32)
    states = [[{} for _ in range(3)] for _ in W]
    for _ in range(6):
        for p, w, of in zip(params, W, states):
            g = torch.randn_like(w)
            p.grad = g.float().to(device)
            for one, gradient, state in zip(w.view(-1, *w.shape[-2:]), g.view(-1, *w.shape[-2:]), of):
                reference(rule, one, gradient, state, **options)
        muon.step()
    for p, w, of in zip(params, W, states):
        moved = (w - p.detach().double().cpu()).norm() / w.norm()
        assert moved < 2e-4, (tuple(w.shape), float(moved))
        M = muon.state[p]["momentum_buffer"].double().cpu().view(-1, *w.shape[-2:])
        for ours, state in zip(M, of):
            assert torch.allclose(ours, (1 - MU) * state["M"], atol=1e-5)


def test_a_fraction_of_1_is_muon_without_nesterov(optimizer):
    torch.manual_seed(0)
    W, G = torch.randn(6, 10), torch.randn(3, 6, 10)
    p, q = nn.Parameter(W.clone()), nn.Parameter(W.clone())
    options = {"lr": LR, "wire_dtype": torch.float32}
    both = optimizer.Muon([p], rule="dion2", fraction=1, **options), optimizer.Muon([q], nesterov=False, **options)
    for g in G:
        p.grad, q.grad = g.clone(), g.clone()
        for muon in both:
            muon.step()
    assert torch.allclose(p, q, atol=1e-4)


def test_ties_and_nan_are_chosen_alike(device):
    """Of equal sums the first, NaN before all numbers; blocks count for themselves, the last one is shorter."""
    choose = part("newton_schulz.selection").choose
    Selection = part("newton_schulz.selection").Selection
    X = torch.tensor([[1.0, -1], [2, 0], [0, 2], [0.5, 1], [math.nan, 0], [math.inf, 0], [math.inf, 0]], device=device)
    stack = torch.stack([X, X.nan_to_num(0.0, 1.0), torch.zeros_like(X)])

    def chosen(fraction, blocks):
        return choose(stack, 0, Selection(fraction, "row", blocks).blocks_of(7)).tolist()

    assert chosen(2 / 7, 1) == [[4, 5], [0, 1], [0, 1]]
    assert chosen(3 / 7, 1) == [[4, 5, 6], [0, 1, 2], [0, 1, 2]]
    assert chosen(0.3, 2) == [[0, 1, 4], [0, 1, 5], [0, 1, 4]]
    assert choose(stack.mT.contiguous(), 1, Selection(2 / 7, "column").blocks_of(7)).tolist()[0] == [4, 5]


# layouts -----------------------------------------------------------------------------------------------------------

def alone(problem, rule, options):
    params = [nn.Parameter(full.clone()) for full in problem["fulls"]]
    groups = [{"params": [p], "split": form, "transposed": t} for p, (_, form, t) in zip(params, problem["members"])]
    optimizer = package().Muon(groups, lr=0.1, rule=rule, **options, **problem["options"])
    for gradients in problem["gradients"]:
        for p, g in zip(params, gradients):
            p.grad = g.clone()
        optimizer.step()
    return [{"weight": p.detach(), **optimizer.state[p]} for p in params]


def on_rank(rank, world, layout, cases, options):
    return stepped(rank, world, layout, cases, options)


def differences(layout, case, seeds, **more):
    rule, options = OPTIONS[case]
    cases = []
    for problem in (problem_of(layout, seed) for seed in seeds):
        if more:
            problem["has_little_room"], problem["options"]["nonfinite"] = False, "propagate"
        cases.append(("Muon", problem, alone(problem, rule, options)))
    world = math.prod(layouts()[layout][0])
    results = run_threads(world, on_rank, layout, cases, {"rule": rule, **options, **more})
    return [wrong for found in results for wrong in found]


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("case", OPTIONS)
def test_a_selection_has_the_same_bits_on_every_layout(case, layout, optimizer):
    assert differences(layout, case, range(2)) == []

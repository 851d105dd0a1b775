"""Rules that orthogonalize some rows or columns (Dion2, Dion3): the papers' formulas in fp64, on every layout the bits
of one process, and plans of the smaller matrices.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from tests.paths import quiet
from tests.ranks import package, part, run_threads
from tests.test_muon import take
from tests.test_rule_protocol import differences as differences_of_rule
from tests.test_rule_protocol import factor, polar
from tests.test_units import layouts

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


def reference(rule, W, G, state, fraction=0.25, select="short", blocks=1, decay="decoupled"):
    """A step of microsoft/dion with selection_scope="global" on one matrix in fp64. Of M only the scale differs. Forms
    of decay are those of this package.
    """
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
    update, first = torch.zeros_like(W), state.setdefault("W", W.clone())
    update[at] = O
    if decay == "cautious":  # the update of unselected elements is zero: they decay
        W -= LR * DECAY * W * (update * W >= 0)
    else:
        W -= {"lr_squared": LR}.get(decay, 1.0) * LR * DECAY * (W - first if decay == "initial" else W)
    W -= LR * factor(W) * update


FORMS = {
    "dion2, cautious": ("dion2", {"select": "row", "fraction": 0.4, "blocks": 4, "decay": "cautious"}),
    "dion2, initial": ("dion2", {"decay": "initial"}), "dion3, cautious": ("dion3", {"decay": "cautious"}),
    "dion3, initial": ("dion3", {"blocks": 3, "decay": "initial"}),
    "dion3, lr_squared": ("dion3", {"decay": "lr_squared"}),
}


@pytest.mark.parametrize("case", {**OPTIONS, **FORMS})
def test_a_rule_computes_its_formula(case, device, optimizer):
    rule, options = {**OPTIONS, **FORMS}[case]
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
        assert moved < 1e-6, (tuple(w.shape), float(moved))
        M = muon.state[p]["momentum_buffer"].double().cpu().view(-1, *w.shape[-2:])
        for ours, state in zip(M, of):
            assert torch.allclose(ours, (1 - MU) * state["M"], atol=1e-6)


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
    selection = part("newton_schulz.selection")
    Selection = selection.Selection
    X = torch.tensor([[1.0, -1], [2, 0], [0, 2], [0.5, 1], [math.nan, 0], [math.inf, 0], [math.inf, 0]], device=device)
    stack = torch.stack([X, X.nan_to_num(0.0, 1.0), torch.zeros_like(X)])

    def choose(stack, axis, blocks):
        return selection.choose(stack, axis, blocks, selection.starts_of(blocks, stack.device)).tolist()

    def chosen(fraction, blocks):
        return choose(stack, 0, Selection(fraction, "row", blocks).blocks_of(7))

    assert chosen(2 / 7, 1) == [[4, 5], [0, 1], [0, 1]]
    assert chosen(3 / 7, 1) == [[4, 5, 6], [0, 1, 2], [0, 1, 2]]
    assert chosen(0.3, 2) == [[0, 1, 4], [0, 1, 5], [0, 1, 4]]
    assert choose(stack.mT.contiguous(), 1, Selection(2 / 7, "column").blocks_of(7))[0] == [4, 5]


# layouts -----------------------------------------------------------------------------------------------------------

def differences(layout, case, seeds, **more):
    rule, options = OPTIONS[case]
    return differences_of_rule(layout, rule, seeds, keys=options, **more)


# Each layout with state, and with one of the others in turn. On each, some matrices are selected from at their owners,
# and on most, some where they are stored
CASES = [(layout, case) for i, layout in enumerate(layouts()) for case in {[*OPTIONS][i % 4]: 0, "dion3": 0}]


@pytest.mark.parametrize("layout, case", CASES)
def test_a_selection_has_the_same_bits_on_every_layout(layout, case, optimizer):
    assert differences(layout, case, range(1)) == []


def test_matrices_are_selected_from_at_owners_and_where_they_are_stored(optimizer, monkeypatch):
    """And neither takes more memory than planned."""
    select, found = part("planning.planner").select, set()
    rank_plan_of, counted = part("planning.planner").rank_plan_of, []

    def noted(layouts, selection, may_send_parts):
        made = select(layouts, selection, may_send_parts)
        found.update((axis, layout.at_source) for layout in made for axis in layout.axes)
        return made

    def bounded(bucket, rank, layouts, state_layouts, inputs):
        plan = rank_plan_of(bucket, rank, layouts, state_layouts, dataclasses.replace(inputs, rank_bytes=None))
        taken = plan.workspace_layout()[1]
        counted.append(bucket)
        assert all(ours <= most for ours, most in zip(taken.values(), bucket.memory))
        return rank_plan_of(bucket, rank, layouts, state_layouts, inputs)

    monkeypatch.setattr(part("planning.planner"), "rank_plan_of", bounded)
    monkeypatch.setattr(part("planning.planner"), "select", noted)
    for case in ("dion2, rows", "dion2, columns"):
        assert differences("fsdp rows", case, [1]) == []
    assert differences("one process", "dion2, columns", [5]) == []  # of some, all columns are selected
    assert found == {(axis, at_source) for axis in (0, 1) for at_source in (False, True)}
    assert len(counted) > 4


def planned(rank, world, layout, rule, options):
    """[(shapes that are orthogonalized, bytes sent in, bytes sent out)] of each bucket, and the work of this rank."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh, placement = init_device_mesh("cpu", (world,)), {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}
    torch.manual_seed(0)
    params = [nn.Parameter(distribute_tensor(torch.randn(s), mesh, [placement[layout]], src_data_rank=None))
              for s in [(64, 128)] * 4]
    muon = package().Muon(params, rule=rule, **options)
    for p in params:
        p.grad = p.detach().clone()
    muon.step()
    report = muon.plan_report()
    rows = [(dict(r.matrices), r.sent_in_bytes, r.sent_out_bytes) for r in report.rows]
    assert len(rows) == 1 and str(report)
    return *rows[0], report.loads[rank], report.workspace


@pytest.mark.parametrize("layout, options, part_of_in, part_of_out", [
    ("rows", {"blocks": 4}, 0.25, 0.25),  # every rank selects from its rows
    ("rows", {"blocks": 8}, 0.25, 0.25),
    ("rows", {"blocks": 1}, 1, 1),  # owners select
    ("rows", {"blocks": 4, "select": "column"}, 1, 1),
    ("columns", {"blocks": 4, "select": "column"}, 0.25, 0.25),
    ("copies", {"blocks": 1}, 1, 0.25),
])
def test_products_and_traffic_shrink(layout, options, part_of_in, part_of_out, optimizer):
    muon = run_threads(4, planned, layout, "muon", {})
    ours = run_threads(4, planned, layout, "dion2", {"fraction": 0.25, **options})
    shape = (64, 32) if options.get("select") == "column" else (16, 128)
    for (_, sent_in, sent_out, load, _), (found, ours_in, ours_out, less, _) in zip(muon, ours):
        assert found == {shape: 4}
        assert (ours_in, ours_out) == (sent_in * part_of_in, sent_out * part_of_out) and ours_out
        assert less < 0.5 * load


# options -----------------------------------------------------------------------------------------------------------

def test_a_change_of_an_option_plans_anew(optimizer):
    """As in an optimizer that had the value from the start and was given the state."""
    torch.manual_seed(0)
    W, G = torch.randn(8, 12), torch.randn(3, 8, 12)
    p, q = nn.Parameter(W.clone()), nn.Parameter(W.clone())
    ours = optimizer.Muon([p], rule="dion2", fraction=0.25)
    ours.param_groups[0]["lr"] = LR
    p.grad = G[0].clone()
    ours.step()
    for value, gradient in ((0.5, G[1]), (0.75, G[2])):
        ours.param_groups[0]["fraction"] = value
        with torch.no_grad():
            q.copy_(p)
        theirs = optimizer.Muon([q], lr=LR, rule="dion2", fraction=value)
        theirs.load_state_dict(ours.state_dict())
        p.grad, q.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
        assert torch.equal(p, q)
        assert dict(ours.plan_report().rows[0].matrices) == {(8 * value, 12): 1}


def test_groups_with_options_of_their_own(optimizer):
    """As in optimizers of their own, also where groups are stepped together."""
    torch.manual_seed(0)
    W = [torch.randn(10, 8) for _ in range(4)]
    own = [{"fraction": 0.3}, {"fraction": 0.6, "lr": 0.1}, {"fraction": 0.3, "lr": 0.2}, {"select": "row"}]
    params, others = ([nn.Parameter(w.clone()) for w in W] for _ in range(2))
    together = optimizer.Muon([{"params": [p], **group} for p, group in zip(params, own)], rule="dion2")
    apart = [optimizer.Muon([{"params": [p], **group}], rule="dion2") for p, group in zip(others, own)]
    for _ in range(3):
        for p, q, one in zip(params, others, apart):
            p.grad = torch.randn(10, 8)
            q.grad = p.grad.clone()
            one.step()
        together.step()
    assert all(map(torch.equal, params, others))


def test_options_are_arguments_and_keys_of_groups(optimizer):
    def make(*groups, **options):
        groups = [{"params": [nn.Parameter(torch.ones(4, 3))], **group} for group in groups]
        return [g for g in optimizer.Muon(groups, **options).param_groups]

    first, second, third = make({}, {"blocks": 2}, {"rule": "muon"}, rule="dion2", fraction=0.5)
    assert (first["fraction"], first["select"], first["blocks"]) == (0.5, "short", 1)
    assert (second["fraction"], second["blocks"]) == (0.5, 2) and "fraction" not in third
    assert make({}, rule="normuon", beta2=0.9)[0]["beta2"] == 0.9
    assert make({"rule": "dion3"}, rule="dion2", fraction=0.5)[0]["fraction"] == 0.25
    with pytest.raises(TypeError, match="fraction"):
        make({}, fraction=0.5)


# kernels -----------------------------------------------------------------------------------------------------------

@quiet
@pytest.mark.interpreter
@pytest.mark.parametrize("skips", [False, True])
def test_the_kernels_of_error_feedback_have_the_bits_of_torch(skips, device, monkeypatch):
    shapes, table = [(3, 5), (1, 7), (0, 4), (40, 16)], part("kernels.elementwise.multi_tensor")
    group = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9}
    numbers = torch.tensor(part("rules.rule").device_scalars(group) * 2, device=device)
    numbers[table.NUMBERS:] *= 0.5
    start, M, G, O = ([torch.randn(s, device=device) for s in shapes] for _ in range(4))
    for o in O:
        o[::2] = -0.0
        o[1::2, ::3] = 0.0
    sources = [table.Source(i, 0, tuple(g.stride())) for i, g in enumerate(G)]
    addresses = torch.tensor([g.data_ptr() for g in G], device=device)
    skip = table.Skip(torch.tensor([0.0, 1.0, 0.0, 0.0], device=device), (0, 1, 2, 3)) if skips else None
    results = []
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        W, momentum = ([t.clone() for t in some] for some in (start, M))
        U = [torch.full_like(m, math.nan) for m in M]
        pack = part("kernels.elementwise.momentum").Pack(
            momentum, U, sources, G, skip, [0, 1, 0, 1], "feedback")
        pack(G, addresses, numbers[4:], False, False)
        assert all(map(torch.equal, momentum, M))
        update = part("kernels.elementwise.weight_update").WeightUpdate(
            W, O, [0.5] * len(W), skip, momentum, sources, G, [0, 1, 0, 1], momentum_form="feedback")
        update(numbers, G, addresses, numbers[4:])
        results.append(W + momentum + U)
    assert all(map(torch.equal, *results))
    for i, (m, u, old, g) in enumerate(zip(results[0][4:8], results[0][8:], M, G)):
        new = old if skips and i == 1 else old + g * (0.1 if i % 2 == 0 else 0.05)
        torch.testing.assert_close(u, new)
        decay = torch.ones(len(m), 1, device=device)
        decay[1::2] = 1.0 if skips and i == 1 else 0.9 if i % 2 == 0 else 0.45
        torch.testing.assert_close(m, new * decay)


@quiet
@pytest.mark.parametrize("per", ["row", "column"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 7, 50), (3, 40, 16), (2, 0, 3)], ids=str)
def test_sums_of_a_shard_have_the_bits_of_the_matrix(shape, per, path, device, monkeypatch):
    sums_of = part("kernels.elementwise.aol")
    for name, size in (("BLOCK", 16), ("ROWS", 4), ("COLUMNS", 8)):
        monkeypatch.setattr(sums_of, name, size)
    X = torch.randn(shape, device=device)
    dim = 2 if per == "row" else 1
    found = sums_of.absolute_sums(X, per)
    torch.testing.assert_close(found, X.double().abs().sum(dim, keepdim=True).float())
    for shard, sums in zip(X.tensor_split(3, 3 - dim), found.tensor_split(3, 3 - dim)):
        for i in range(len(X)):
            assert torch.equal(sums_of.absolute_sums(shard[i:i + 1].contiguous(), per), sums[i:i + 1])


def skipped(rank, world, rule, options):
    """Whether weight and state of a matrix with a NaN are as before the step, and all others finite."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh, generator = init_device_mesh("cpu", (world,)), torch.Generator().manual_seed(0)

    def random():
        return distribute_tensor(torch.randn(12, 8, generator=generator), mesh, [Shard(0)], src_data_rank=None)

    params = [nn.Parameter(random()) for _ in "12"]
    optimizer = package().Muon(params, rule=rule, nonfinite="skip", **options)
    for step in range(3):
        for p in params:
            p.grad = random()
        if step == 1 and rank == 1:
            params[0].grad.to_local()[2, 3] = math.nan
        held = [t.full_tensor().clone() for t in (params[0].detach(), *optimizer.state[params[0]].values())]
        optimizer.step()
        now = [t.full_tensor() for t in (params[0].detach(), *optimizer.state[params[0]].values())]
        if step == 1 and not all(map(torch.equal, held, now)):
            return False
    return all(t.full_tensor().isfinite().all() for p in params for t in (p.detach(), *optimizer.state[p].values()))


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("rule", ["dion2", "dion3"])
def test_a_nan_leaves_weight_and_state_of_all_rows(rule, blocks, optimizer):
    options = {"blocks": blocks} | ({"select": "row"} if rule == "dion2" else {})
    assert run_threads(4, skipped, rule, options) == [True] * 4


def test_minus_zero_marks_unselected_elements_only(optimizer):
    """Also where O itself is -0.0."""
    selection = part("newton_schulz.selection")
    whole, chosen = torch.empty(1, 4, 3), torch.tensor([[1, 3]])
    selection.scatter(torch.full((1, 2, 3), -0.0), 0, chosen, whole)
    assert (whole == 0).all() and torch.signbit(whole)[0].any(1).tolist() == [True, False, True, False]


def blocks_of_columns(rank, world, rule, dim):
    """Blocks of columns on ranks that shard rows or columns: the weight after a step."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    full = torch.arange(68.0).view(17, 4).sin()
    if world > 1:
        full = distribute_tensor(full, init_device_mesh("cpu", (world,)), [Shard(dim)])
    param = nn.Parameter(full)
    groups = [{"params": [("weight", param)], "split": {"columns": [2, 1, 1]}}]
    opt = package().Muon(groups, lr=0.1, rule=rule, fraction=0.5)
    param.grad = param.detach().clone()
    opt.step()
    return param.full_tensor() if world > 1 else param.detach()


def test_state_of_rows_lies_beside_the_rows_or_is_refused(optimizer):
    """Blocks of columns, sharded along columns: a block's numbers may be on another rank. One rank had a KeyError."""
    for rule, dim in (("dion2", 0), ("dion2", 1), ("dion3", 0)):
        whole = blocks_of_columns(0, 1, rule, dim)
        assert all(torch.equal(found, whole) for found in run_threads(2, blocks_of_columns, rule, dim))
    with pytest.raises(RuntimeError, match="NotImplementedError.*weight of shape.*a rank has state of a block"):
        run_threads(2, blocks_of_columns, "dion3", 1)

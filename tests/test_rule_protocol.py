"""Rules by name and rules of a third party: on every layout the bits of one process, results of formulas in fp64, and
refusals of rules that could not keep that.
"""

from __future__ import annotations

import copy
import functools
import io
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import THOROUGH, package, part, run_ranks, run_threads
from tests.test_units import OWNERS, layouts, problem_of, stepped

LR, SHAPES = 0.02, [(24, 8), (8, 30), (3, 6, 32), (7, 40), (16, 16)]


def their_rule(**changes):
    """A class of rules outside the package, with state of every kind and all phases."""
    optimizer = package()

    class Damped(optimizer.Rule):
        state = (optimizer.State("of_elements", dtype=torch.bfloat16), optimizer.State("of_rows", "row"))
        options = {"damping": 0.5, "beta2": 0.9}
        sends = {"size": "matrix", "of_each_row": "row", "of_each_column": "column"}
        reads_weight = True

        def update(self, G, M, numbers):
            M = M + numbers.one_minus_momentum * (G - M)
            return torch.sigmoid(M) - 0.5, M  # on CPUs of other bits in the middle of a tensor than at its end

        def before(self, U, units):
            return U + units.numbers.damping * units.weight

        def after(self, O, units):
            units.state["of_elements"].lerp_(O.square(), 0.25)
            units.state["of_rows"].mul_(units.numbers.beta2).add_(O.square().mean(2, keepdim=True))
            units.sent["size"].copy_(units.weight.abs().amax((1, 2), keepdim=True))
            units.sent["of_each_row"].copy_(units.state["of_rows"].sqrt())
            units.sent["of_each_column"].copy_(O.abs().amax(1, keepdim=True))
            return O / (1 + units.state["of_elements"])

        def write(self, W, O, scale, sent, numbers):
            decayed = W * numbers.decay * (1 - 0.01 * torch.sigmoid(sent["of_each_column"]))
            return decayed - numbers.lr * scale * sent["size"] * O.sinh() / (1 + sent["of_each_row"] ** 0.7)

    for key, value in changes.items():
        setattr(Damped, key, value)
    return Damped


RULES = ["muon", "normuon", "adamuon", "hyperball", "muon_plus", "theirs"]
# Keep a number for each column, which owners cannot divide by rows
EVERYWHERE_ELSE = ["normuon_columns", "normuon_aspect"]


def chosen(rule):
    if not rule.startswith("theirs"):
        return rule
    Damped = their_rule()
    if rule == "theirs, without update":
        Damped.name = "Damped without update"
        del Damped.update
    elif rule == "theirs, of whole matrices":
        def after(self, O, units):
            units.state["of_rows"].mul_(units.numbers.beta2).add_(O.square().mean(2, keepdim=True))
            return O / (1 + units.state["of_rows"])

        Damped.name, Damped.after, Damped.sends = "Damped, of whole matrices", after, {}
        del Damped.update, Damped.write
    return Damped


def alone(problem, rule, keys):
    """Weight and state of each parameter after the steps of one process. `keys`: options of the rule."""
    params = [nn.Parameter(full.clone()) for full in problem["fulls"]]
    groups = [{"params": [p], "split": form, "transposed": t} for p, (_, form, t) in zip(params, problem["members"])]
    optimizer = package().Muon(groups, lr=0.1, rule=chosen(rule), **keys, **problem["options"])
    for gradients in problem["gradients"]:
        for p, g in zip(params, gradients):
            p.grad = g.clone()
        optimizer.step()
    return [{"weight": p.detach(), **optimizer.state[p]} for p in params]


def on_rank(rank, world, layout, problems, expected, rule, options):
    cases = [("Muon", problem, tensors) for problem, tensors in zip(problems, expected)]
    return stepped(rank, world, layout, cases, {"rule": chosen(rule), **options})


def differences(layout, rule, seeds, run=run_threads, keys=(), **options):
    problems = [problem_of(layout, seed) for seed in seeds]
    if options:
        for problem in problems:
            problem["has_little_room"], problem["options"]["nonfinite"] = False, "propagate"
    expected = [alone(problem, rule, dict(keys)) for problem in problems]
    world, options = math.prod(layouts()[layout][0]), {**dict(keys), **options}
    return [wrong for found in run(world, on_rank, layout, problems, expected, rule, options) for wrong in found]


@pytest.mark.parametrize("layout, rule", [
    (layout, rule) for i, layout in enumerate(layouts()) for j, rule in enumerate(RULES + EVERYWHERE_ELSE)
    if THOROUGH or (i + j) % 2 == 0 or rule == "theirs"])
def test_a_rule_has_the_same_bits_on_every_layout(layout, rule, optimizer):
    """A rule that has all phases and state of every kind meets every layout, others every second one. Of two problems,
    each rule and each layout meets both.
    """
    if rule in EVERYWHERE_ELSE and (layout in OWNERS or layout == "interleaved"):
        with pytest.raises((NotImplementedError, RuntimeError, BaseException)) as told:
            differences(layout, rule, range(1))
        assert "one number for each column" in str(told.value)
        return
    number = [*layouts()].index(layout) + (RULES + EVERYWHERE_ELSE).index(rule)
    assert differences(layout, rule, [number % 2 if THOROUGH else number // 2 % 2]) == []


WITH_STATE = ["adamuon", "normuon", "hyperball", "theirs", *EVERYWHERE_ELSE]


@pytest.mark.parametrize("layout", [name for name, (_, *placements) in layouts().items() if placements])
def test_state_at_owners_has_the_bits_of_state_beside_weights(layout, optimizer):
    """Of the rules each layout meets AdaMuon, whose state is stepped where it lies, and one of the others."""
    number = [*layouts()].index(layout)
    others = WITH_STATE[1:4] if layout == "interleaved" else WITH_STATE[1:]
    for rule in ("adamuon", others[number % len(others)]):
        assert differences(layout, rule, [number % 2], state_at_owners=True) == []


@pytest.mark.parametrize("rule", ["hyperball", "theirs"])
@pytest.mark.parametrize("layout", ["fsdp rows, uneven", "unreduced"])
def test_a_rule_has_the_same_bits_in_processes(layout, rule, optimizer):
    assert differences(layout, rule, [100], run_ranks) == []


@pytest.mark.parametrize("option", ["overlap_backward", "overlap_forward", "capturable"])
@pytest.mark.parametrize("layout, rule", [
    *((layout, "theirs") for layout in ("fsdp rows, uneven", "tp columns x fsdp rows", "unreduced")),
    ("fsdp rows, uneven", "dion3")])
def test_options_leave_the_bits_of_a_rule(layout, rule, option, optimizer):
    rule, keys = "hyperball" if (rule, option) == ("theirs", "capturable") else rule, {"blocks": 3}
    assert differences(layout, rule, [200], keys=keys if rule == "dion3" else {}, **{option: True}) == []


# formulas ----------------------------------------------------------------------------------------------------------

def polar(U):
    P, _, Q = torch.linalg.svd(U, full_matrices=False)
    return P @ Q


def adamuon(W, U, state, t, sign=True):
    O = polar(U.sign() if sign else U)
    state["V"] = 0.95 * state.get("V", 0) + 0.05 * O ** 2
    A = O / (state["V"].sqrt() + 1e-8)
    return W * (1 - LR * 0.1) - LR * factor(W) * A * (A.numel() ** 0.5) / A.norm()


def hyperball(W, U, state, t):
    R, O = state.setdefault("R", W.norm()), polar(U)
    new = W - LR * R * O / O.norm()
    return R * new / new.norm()


def muon_plus(W, U, state, t, before=(), after=(-2, -1)):
    U = U / U.norm()
    for dim in before:
        U = U / (U.norm(dim=dim, keepdim=True) ** 2 + 1e-7).sqrt()
    O = polar(U)
    for dim in after:
        O = O / (O.norm(dim=dim, keepdim=True) ** 2 + 1e-7).sqrt()
    return W * (1 - LR * 0.1) - LR * factor(W) * O


def normuon_columns(W, U, state, t, dim=-2):
    O = polar(U)
    state["V"] = 0.95 * state.get("V", 0) + 0.05 * (O ** 2).mean(dim, keepdim=True)
    N = O / (state["V"].sqrt() + 1e-8)
    return W * (1 - LR * 0.1) - LR * factor(W) * N * O.norm() / N.norm()


def factor(W):
    return max(1.0, W.shape[-2] / W.shape[-1]) ** 0.5


FORMULAS = {
    "adamuon": (adamuon, {}), "adamuon, without signs": (lambda *a: adamuon(*a, sign=False), {"sign": False}),
    "hyperball": (hyperball, {}), "normuon_columns": (normuon_columns, {}),
    "muon_plus": (muon_plus, {}),
    "normuon_aspect": (lambda W, *a: normuon_columns(W, *a, dim=-1 if W.shape[-2] >= W.shape[-1] else -2), {}),
    "muon_plus, rows": (lambda *a: muon_plus(*a, after=(-1,)), {"normalize": "row"}),
    "muon_eq": (lambda *a: muon_plus(*a, before=(-1,), after=()), {"equilibrate": "row", "normalize": None}),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_rule_computes_its_formula(name, device, optimizer):
    """In fp64, with the polar factor by an SVD."""
    formula, options = FORMULAS[name]
    torch.manual_seed(0)
    W = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    params = [nn.Parameter(w.float().to(device)) for w in W]
    rule = "muon_plus" if name == "muon_eq" else name.split(",")[0]
    muon = optimizer.Muon([{"params": params, "rule": rule, **options}], lr=LR, ns_coefficients=(1.875, -1.25, 0.375),
                          ns_steps=22, wire_dtype=torch.float32, ns_dtype=torch.float32)
    momenta, states = [torch.zeros_like(w) for w in W], [[{} for _ in range(3)] for _ in W]
    for t in range(4):
        for i, (p, w, m) in enumerate(zip(params, W, momenta)):
            g = torch.randn_like(w)
            p.grad = g.float().to(device)
            m.lerp_(g, 0.05)
            U = torch.lerp(m, g, 0.05)
            for k, (one, u) in enumerate(zip(w.view(-1, *w.shape[-2:]), U.view(-1, *w.shape[-2:]))):
                one.copy_(formula(one.clone(), u, states[i][k], t))
        muon.step()
    for p, w in zip(params, W):
        moved = (w - p.detach().double().cpu()).norm() / w.norm()
        assert moved < 1e-6, (name, tuple(w.shape), float(moved))


# GPUs --------------------------------------------------------------------------------------------------------------

def gpu_rank(rank, world, rule, options):
    """(key, parameter) of what differs from a step of this GPU alone: rows and columns of FSDP2, and copies."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh, wrong = init_device_mesh("cuda", (world,)), []
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = [(96, 64), (64, 192), (3, 40, 72), (1, 56)]
    fulls = [torch.randn(shape, generator=generator, device="cuda") for shape in shapes]
    gradients = [[torch.randn(f.shape, generator=generator, device="cuda") for f in fulls] for _ in range(5)]

    def run(place, **more):
        params = [nn.Parameter(place(f)) for f in fulls]
        muon = package().Muon(params, lr=0.1, rule=chosen(rule), **more)
        for some in gradients:
            for p, g in zip(params, some):
                p.grad = place(g)
            muon.step()
        return [{"weight": p.detach(), **muon.state[p]} for p in params]

    def whole(t):
        return t.full_tensor() if hasattr(t, "full_tensor") else t

    expected = run(torch.clone)
    for placement in (Shard(0), Shard(1), Replicate()):
        place = functools.partial(distribute_tensor, device_mesh=mesh, placements=[placement], src_data_rank=None)
        found = run(place, **options)
        wrong += [(str(placement), i, key) for i, (ours, theirs) in enumerate(zip(found, expected))
                  for key in theirs if not torch.equal(whole(ours[key]), theirs[key])]
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.gpus(2))])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("rule", [*RULES[2:], "theirs, without update", *EVERYWHERE_ELSE, "scion", "dion2", "dion3"])
def test_a_rule_has_the_bits_of_one_gpu(rule, capturable, world, optimizer):
    """In parts replayed as graphs, and as one graph."""
    options = {"capturable": capturable}
    if capturable and rule.startswith("theirs"):
        rule = "theirs, of whole matrices"
    for wrong in run_ranks(world, gpu_rank, rule, options, backend="nccl"):
        assert wrong == []


# groups, checkpoints -----------------------------------------------------------------------------------------------

def test_groups_with_rules_of_their_own(optimizer):
    """Each as in an optimizer of its own, also where several are stepped together."""
    torch.manual_seed(0)
    rules = ["muon", "normuon", "hyperball", their_rule(), "hyperball"]
    W = [torch.randn(10, 8) for _ in rules]
    lrs = [0.1, 0.2, 0.3, 0.4, 0.5]
    params, others = ([nn.Parameter(w.clone()) for w in W] for _ in range(2))
    together = optimizer.Muon([{"params": [p], "rule": rule, "lr": lr} for p, rule, lr in zip(params, rules, lrs)])
    apart = [optimizer.Muon([p], rule=rule, lr=lr) for p, rule, lr in zip(others, rules, lrs)]
    for _ in range(3):
        for p, q in zip(params, others):
            p.grad = torch.randn(10, 8)
            q.grad = p.grad.clone()
        together.step()
        for one in apart:
            one.step()
    assert all(map(torch.equal, params, others))
    assert [g["rule"] for g in together.param_groups] == ["muon", "normuon", "hyperball", "Damped", "hyperball"]


def test_an_option_of_a_rule_is_read_live(optimizer):
    torch.manual_seed(0)
    rule = their_rule()
    W, G = torch.randn(10, 8), torch.randn(2, 10, 8)
    p, q = nn.Parameter(W.clone()), nn.Parameter(W.clone())
    changed = optimizer.Muon([p], rule=rule)
    p.grad = G[0].clone()
    changed.step()
    before = p.detach().clone()
    changed.param_groups[0]["damping"] = 3.0
    p.grad = G[1].clone()
    changed.step()
    fixed = optimizer.Muon([q], rule=rule)
    for g in G:
        q.grad = g.clone()
        fixed.step()
        if torch.equal(q, before):
            fixed.param_groups[0]["damping"] = 3.0
    assert torch.equal(p, q)
    assert not torch.equal(p, before)


@pytest.mark.parametrize("rule", ["adamuon", "hyperball", "normuon", *EVERYWHERE_ELSE, "muon_plus", "theirs"])
def test_a_checkpoint_of_a_rule(rule, optimizer, tmp_path):
    """As a state dict through a file without code in it, and as a file of this package."""
    torch.manual_seed(0)
    W, G = torch.randn(10, 8), torch.randn(4, 10, 8)

    def steps(muon, p, some):
        for g in some:
            p.grad = g.clone()
            muon.step()
        return p.detach().clone()

    p = nn.Parameter(W.clone())
    muon = optimizer.Muon([("w", p)], rule=chosen(rule), lr=LR)
    middle = steps(muon, p, G[:2])
    file = io.BytesIO()
    torch.save(muon.state_dict(), file)
    optimizer.export_state(muon, tmp_path / "state.safetensors")
    end = steps(muon, p, G[2:])
    file.seek(0)
    q = nn.Parameter(middle.clone())
    again = optimizer.Muon([("w", q)], rule=chosen(rule), lr=LR)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(steps(again, q, G[2:]), end)
    r = nn.Parameter(middle.clone())
    from_file = optimizer.Muon([("w", r)], rule=chosen(rule), lr=LR)
    optimizer.import_state(from_file, tmp_path / "state.safetensors")
    assert torch.equal(steps(from_file, r, G[2:]), end)
    twin, s = copy.deepcopy(again), None
    s = twin.param_groups[0]["params"][0]
    more = torch.randn(1, 10, 8)
    assert torch.equal(steps(twin, s, more), steps(again, q, more))


def test_a_checkpoint_of_another_rule_is_refused(optimizer):
    p, q = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))
    saved = optimizer.Muon([p], rule="hyperball")
    p.grad = torch.ones(4, 3)
    saved.step()
    with pytest.raises(ValueError, match="rule='hyperball'.*'adamuon'"):
        optimizer.Muon([q], rule="adamuon").load_state_dict(saved.state_dict())


def resharded_on_rank(rank, world, rule, keys):
    """A state dict gathered from rows, loaded onto columns, and stepped on."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    W, G, results = torch.randn(9, 7), torch.randn(4, 9, 7), []

    class Model(nn.Module):
        def __init__(self, full, dim):
            super().__init__()
            self.w = nn.Parameter(distribute_tensor(full, mesh, [Shard(dim)], src_data_rank=None))

    def steps(model, muon, some):
        for g in some:
            model.w.grad = distribute_tensor(g, mesh, model.w.placements, src_data_rank=None)
            muon.step()

    model = Model(W, 0)
    muon = package().Muon(model.named_parameters(), rule=chosen(rule), lr=LR, **keys)
    steps(model, muon, G[:2])
    options = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(model, muon, options=options)
    other = Model(model.w.detach().full_tensor(), 1)
    steps(model, muon, G[2:])
    again = package().Muon(other.named_parameters(), rule=chosen(rule), lr=LR, **keys)
    again.init_state()
    set_optimizer_state_dict(other, again, saved, options=options)
    steps(other, again, G[2:])
    results.append(torch.equal(model.w.detach().full_tensor(), other.w.detach().full_tensor()))
    return all(results)


SELECTED = {"fraction": 0.5, "blocks": 3}


@pytest.mark.parametrize("rule, keys", [
    *((rule, {}) for rule in ("adamuon", "hyperball", "normuon_columns", "theirs")),
    ("dion2", SELECTED), ("dion3", SELECTED)])
def test_state_of_a_rule_goes_to_another_sharding(rule, keys, optimizer):
    assert all(run_ranks(3, resharded_on_rank, rule, keys))


# refusals ----------------------------------------------------------------------------------------------------------

def collective(self, O, units):
    dist.all_reduce(O)
    return O


def keeps(self, O, units):
    self.last = O
    return O


def fill(units):
    for number in units.sent.values():
        number.fill_(1)


def replaces(self, O, units):
    fill(units)
    units.state["of_rows"] = units.state["of_rows"][:, :1]
    return O


def resizes(self, O, units):
    fill(units)
    units.state["of_rows"].resize_(O.shape[0], 1, 1)
    return O


def sends_other_shapes(self, O, units):
    fill(units)
    units.sent["size"] = torch.ones(O.shape[0], O.shape[1], 1)
    return O


WRONG = {
    "a tensor on itself": ({"after": keeps, "sends": {}, "write": None}, ValueError, "keeps 'last' on itself"),
    "another shape": ({"before": lambda self, U, units: U[:, :-1]}, ValueError, "before returned"),
    "no tensor": ({"before": lambda self, U, units: None}, ValueError, "before returned NoneType"),
    "a sum in write": ({"write": lambda self, W, O, *others: W - O.sum()}, ValueError, "write is not elementwise"),
    "a sum over the rows above": ({"write": lambda self, W, O, *others: W - O.cumsum(0)}, ValueError,
                                  "write is not elementwise"),
    "numbers of rows": ({"update": lambda self, G, M, numbers: (G, M * torch.arange(1.0, 1 + len(M))[:, None])},
                        ValueError, "update is not elementwise"),
    "no floats": ({"before": lambda self, U, units: U.round().int()}, ValueError, "before returned torch.int32"),
    "a sum in update": ({"update": lambda self, G, M, numbers: (G / G.norm(), M)}, ValueError,
                        "update is not elementwise"),
    "one result": ({"update": lambda self, G, M, numbers: M}, ValueError, r"update must return \(U, the new M\)"),
    "a number that is not sent": ({"after": lambda self, O, units: O}, ValueError, r"has to fill units.sent\['size'\]"),
    "a number for each element": ({"sends": {"size": "element"}}, ValueError, r"sends\['size'\] is 'element'"),
    "no option": ({"before": lambda self, U, units: U * units.numbers.absent}, ValueError, "has no number 'absent'"),
    "an option of every group": ({"options": {"lr": 1.0}}, ValueError, "option 'lr' is a key of every group"),
    "a name of another rule": ({"name": "muon"}, ValueError, "has the name of a rule of"),
    "state of another shape": ({"after": replaces}, ValueError, "state 'of_rows' was replaced: change it in place"),
    "state that is resized": ({"after": resizes}, ValueError, "state 'of_rows' was replaced: change it in place"),
    "numbers of another shape": ({"after": sends_other_shapes}, ValueError, r"sent\['size'\] was replaced: change"),
    "the momentum in place": ({"update": lambda self, G, M, numbers: (G, M.mul_(0.9).add_(G))}, ValueError,
                              "update changes M in place"),
    "the weight in place": ({"write": lambda self, W, O, *others: W.sub_(O)}, ValueError, "write changes W in place"),
    "sent numbers in place": ({"write": lambda self, W, O, scale, sent, numbers: W - O * sent["size"].clamp_(max=0.1)},
                              ValueError, r"write changes sent\['size'\] in place"),
    "one state": ({"state": 3}, TypeError, "`state` is 3, but must be a tuple of State"),
    "names of options": ({"options": ["clip"]}, TypeError, "`options` is .'clip'., but must be a dict of defaults"),
    "an error": ({"before": lambda self, U, units: U @ U}, ValueError, "fails in a trial on small tensors"),
    "an option of units": ({"options": {"clip": 1.0}, "before": lambda self, U, units: U * units.clip}, ValueError,
                           "read as units.numbers.clip"),
    "a misspelt member of units": ({"before": lambda self, U, units: U * units.weights}, ValueError,
                                   "Units have numbers, state, weight, sent, scale"),
    "undeclared state": ({"after": lambda self, O, units: O * units.state["seen"]}, ValueError,
                         r"'seen'. Declared in `state` are \['of_elements', 'of_rows'\]"),
    "an unread weight": ({"reads_weight": False, "after": lambda self, O, units: O * units.weight}, ValueError,
                         "units.weight is None without reads_weight = True"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rules_are_refused(case, optimizer):
    changes, error, text = WRONG[case]
    rule = their_rule(**{key: value for key, value in changes.items() if value is not None})
    if changes.get("write", True) is None:
        del rule.write
    with pytest.raises(error, match=text):
        optimizer.Muon([nn.Parameter(torch.ones(4, 3))], rule=rule)


def told_on_rank(rank, world, changes):
    with pytest.raises(ValueError) as told:
        package().Muon([nn.Parameter(torch.ones(4, 3))], rule=their_rule(**changes))
    return str(told.value)


def test_a_rule_that_communicates_is_refused(optimizer):
    for told in run_ranks(2, told_on_rank, {"after": collective}):
        assert "calls the collective c10d.allreduce_" in told
    with pytest.raises(ValueError, match="calls torch.distributed .*process group.*: phases run for different"):
        optimizer.Muon([nn.Parameter(torch.ones(4, 3))], rule=their_rule(after=collective))


@pytest.mark.parametrize("state, text", [
    (lambda o: (o.State("mine", "layer"),), "per of state 'mine' is 'layer'"),
    (lambda o: (o.State("mine", dtype=torch.int64),), "dtype of state 'mine'"),
    (lambda o: ("mine",), "must be a State"),
    (lambda o: (o.State("exp_avg", "row"),), "state 'exp_avg' .* is in use"),
    (lambda o: (o.State("weight"),), "state 'weight' .* is in use"),
    (lambda o: (o.State("momentum_buffer"),), "state 'momentum_buffer' .* is in use"),
])
def test_wrong_state_is_refused(state, text, optimizer):
    class Mine(optimizer.Rule):
        pass

    Mine.state = state(optimizer)
    with pytest.raises((ValueError, TypeError), match=text):
        optimizer.Muon([nn.Parameter(torch.ones(4, 3))], rule=Mine)


def test_sums_in_a_stack_are_refused(optimizer):
    class Batched(optimizer.Rule):
        batched = True

        def after(self, O, units):
            return O / O.abs().sum()  # of all matrices

    with pytest.raises(ValueError, match="leave out `batched`"):
        optimizer.Muon([nn.Parameter(torch.ones(4, 3))], rule=Batched)


@pytest.mark.parametrize("rule, error, text", [
    ("hyperbal", ValueError, "there is no rule 'hyperbal': pass one of .*'hyperball'"),
    (3, TypeError, "must be one of .* or a subclass of Rule"),
    (nn.Linear, TypeError, "must be one of .* or a subclass of Rule"),
])
def test_what_is_no_rule_is_refused(rule, error, text, optimizer):
    with pytest.raises(error, match=text):
        optimizer.Muon([nn.Parameter(torch.ones(4, 3))], rule=rule)


def test_an_update_in_torch_is_refused_in_a_graph_of_the_step(optimizer):
    """The graph would read the gradients of its capture."""
    for rule in ("theirs", "theirs, without update"):
        with pytest.raises(NotImplementedError, match="rule='Damped.*' overrides `update` or `write`.*capturable=True"):
            optimizer.Muon([nn.Parameter(torch.ones(4, 3))], rule=chosen(rule), capturable=True)
    optimizer.Muon([nn.Parameter(torch.ones(4, 3))], rule=chosen("theirs, of whole matrices"), capturable=True)


@pytest.mark.parametrize("rule, key, value, text", [
    ("muon_plus", "normalize", "rows", "normalize='rows' must be one of"),
    ("adamuon", "sign", "no", "sign='no' must be True or False"),
    ("dion2", "fraction", 0, "fraction=0 must be a number > 0 and <= 1"),
    ("dion2", "fraction", True, "fraction=True must be"), ("dion2", "fraction", "0.5", "fraction='0.5' must be"),
    ("dion2", "fraction", math.nan, "fraction=nan must be"), ("dion2", "blocks", 0, "blocks=0 must be an int >= 1"),
    ("dion2", "blocks", 2.0, "blocks=2.0 must be an int >= 1"),
    ("dion2", "select", "rows", "select='rows' must be one of .*'short', 'row', 'column'"),
    ("dion2", "momentum_form", "sum", "momentum_form='sum' with rule='dion2'.*error feedback")])
def test_options_of_a_rule_are_checked(rule, key, value, text, optimizer):
    with pytest.raises(ValueError, match=text):
        optimizer.Muon([{"params": [nn.Parameter(torch.ones(4, 3))], "rule": rule, key: value}])
    with pytest.raises(ValueError, match=text):
        optimizer.Muon([nn.Parameter(torch.ones(4, 3))], rule=rule, **{key: value})


def test_normuon_is_muon_with_the_rule(optimizer):
    torch.manual_seed(0)
    W, G = torch.randn(10, 8), torch.randn(3, 10, 8)
    p, q = nn.Parameter(W.clone()), nn.Parameter(W.clone())
    a, b = optimizer.NorMuon([p], beta2=0.9), optimizer.Muon([{"params": [q], "beta2": 0.9}], rule="normuon")
    for g in G:
        p.grad, q.grad = g.clone(), g.clone()
        a.step()
        b.step()
    assert torch.equal(p, q)
    b.load_state_dict(a.state_dict())
    assert b.param_groups[0]["rule"] == "normuon"


def test_every_phase_in_torch_has_the_bits_of_the_kernels(optimizer):
    """Muon's rule written out in a class steps as the built-in one."""
    class Written(optimizer.Rule):
        def update(self, G, M, numbers):
            return super().update(G, M, numbers)

        def write(self, W, O, scale, sent, numbers):
            return super().write(W, O, scale, sent, numbers)

    torch.manual_seed(0)
    params = [[nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(i)))
               for i, shape in enumerate(SHAPES)] for _ in range(2)]
    both = [optimizer.Muon(some, rule=rule) for some, rule in zip(params, ("muon", Written))]
    for _ in range(3):
        for p, q in zip(*params):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for muon in both:
            muon.step()
    assert all(map(torch.equal, *params))


def test_rules_are_short_and_in_files_of_their_own():
    """A file of rules has at most 40 lines of code, with imports. No file outside rules/ and integrations/ names one of
    the rules beside Muon's, NorMuon's and AdamW's.
    """
    import ast
    import io
    import tokenize
    from pathlib import Path

    module = part("rules.rule")  # loads the package
    folder = Path(module.__file__).parent
    registered = {**module.RULES, **part("rules.elementwise").ELEMENTWISE}
    within = f"{package().__name__}.rules."
    names = {name for name, rule in registered.items() if type(rule).__module__.startswith(within)}
    modules = {type(registered[name]).__module__.removeprefix(within) for name in names}
    paths = [folder / f"{module.replace('.', '/')}.py" for module in modules]
    assert len(names) == 14 and len(paths) == 11
    layout = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
    lengths = {}
    for path in paths:
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        code = [t for t in tokens if t.type not in layout and not t.line.lstrip().startswith('"""')]
        lengths[path.name] = len({line for t in code for line in range(t.start[0], t.end[0] + 1)})
    assert 10 < min(lengths.values()) and max(lengths.values()) <= 40, lengths
    for path in set(folder.parent.rglob("*.py")) - set(folder.rglob("*.py")):
        if path.parent.name != "integrations":
            found = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            assert not found & (names - {"muon", "normuon", "adamw"}), path.name

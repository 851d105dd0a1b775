"""Checks of a class of rules beyond its results, and the sizes of gradients that Muon+ takes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from tests.ranks import package, part


def check(rule):
    part("rules.check").check_rule(rule, ())


def sending_rule(**members):
    return type("Sending", (package().Rule,), {"sends": {"size": "matrix"}, **members})


def fill(self, O, units):
    units.sent["size"].fill_(2.0)
    return O


def write(self, W, O, scale, sent, numbers):
    return W - sent["size"] * O


def test_numbers_that_nothing_fills_are_refused():
    with pytest.raises(ValueError, match="override `after`"):
        check(sending_rule(write=write))


@pytest.mark.parametrize("wrong, right", [
    ("afterr", "after"), ("befor", "before"), ("optons", "options"), ("states", "state"), ("Before", "before")])
def test_a_misspelt_member_is_refused_and_does_not_step_as_muon(wrong, right):
    base = part("rules.rule").Rule
    members = {wrong: lambda self, O, units: O * 2, "_afterwards": 1, "halved": lambda self, O: O / 2,
               **dict.fromkeys(("checks", "writer", "updated", "start", "names", "batches"), 1)}
    with pytest.raises(ValueError, match=f"`{wrong}`, which the package never reads: did you mean `{right}`"):
        check(type("Mine", (base,), members))
    check(type("Mine", (base,), {key: value for key, value in members.items() if key != wrong}))  # helpers are


@pytest.mark.parametrize("name", ["normuon", "muon_plus", "adamuon", "hyperball"])
def test_a_subclass_of_a_fused_rule_is_refused(name):
    known = type(part("rules.rule").RULES[name])
    with pytest.raises(ValueError, match="fused = False"):
        check(type("Mine", (known,), {"after": lambda self, O, units: O * 0}))


@pytest.mark.parametrize("name, inner", [("dion2", "selection"), ("scion", "adjust_lr_fn")])
def test_what_only_built_in_rules_have_is_refused(name, inner):
    """Also with phases in plain torch: the engine relies on it, and the trial cannot check it."""
    known = type(part("rules.rule").RULES[name])
    with pytest.raises(ValueError, match=f"inherits `{inner}` of a built-in rule"):
        check(type("Mine", (known,), {"fused": False}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_trial_leaves_and_ignores_defaults_of_torch(device):
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device(device):
            check(sending_rule(after=fill, write=write))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


READS, CUTS, COPIES, VERIFIES = "reads a value", "shape depends on values", "numbers of the host", "check a result"
# name -> (what the check says, a function of a matrix in fp32 that holds numbers > 0)
WAITS = {
    "item": (READS, lambda X: X.sum().item()),
    "float": (READS, lambda X: float(X.sum())),
    "if": (READS, lambda X: 1 if X.sum() > 0 else 0),
    "tolist": (READS, lambda X: X.tolist()),
    "cpu": (READS, lambda X: X.cpu()),
    "copy to the host": (READS, lambda X: torch.empty(X.shape).copy_(X)),
    "numpy": (READS, lambda X: np.asarray(X)),
    "equal": (READS, lambda X: torch.equal(X, X + 0)),
    "allclose": (READS, lambda X: torch.allclose(X, X)),
    "max of Python": (READS, lambda X: max(X[0, 0], X[0, 1])),
    "slice": (READS, lambda X: X[:X.sum().long()]),
    "index of one": (READS, lambda X: X[X[0].argmax()]),
    "nonzero": (CUTS, lambda X: X.nonzero()),
    "where of one argument": (CUTS, lambda X: torch.where(X > 0)),
    "mask": (CUTS, lambda X: X[X > 0]),
    "masked_select": (CUTS, lambda X: X.masked_select(X > 0)),
    "tensor where a mask is true": (CUTS, lambda X: X.__setitem__(X > 0, X.sum())),
    "unique": (CUTS, lambda X: X.unique()),
    "repeat_interleave": (CUTS, lambda X: X[0].repeat_interleave(torch.full_like(X[0], 2).long())),
    "tensor": (COPIES, lambda X: torch.tensor(2.0, device=X.device)),
    "new_tensor": (COPIES, lambda X: X.new_tensor([2.0])),
    "to": (COPIES, lambda X: torch.ones(4).to(X.device)),
    "copy_": (COPIES, lambda X: X.copy_(torch.ones(X.shape))),
    "inv": (VERIFIES, lambda X: torch.linalg.inv(X @ X.mT)),
    "inv_ex that checks": (VERIFIES, lambda X: torch.linalg.inv_ex(X @ X.mT, check_errors=True)),
    "inverse": (VERIFIES, lambda X: X.inverse()),
    "matrix_power": (VERIFIES, lambda X: torch.linalg.matrix_power(X, -1)),
    "solve": (VERIFIES, lambda X: torch.linalg.solve(X, X[0])),
    "lu_factor": (VERIFIES, lambda X: torch.linalg.lu_factor(X)),
    "cholesky": (VERIFIES, lambda X: torch.linalg.cholesky(X @ X.mT + torch.eye(4, device=X.device))),
    "svd": (VERIFIES, lambda X: torch.linalg.svd(X)),
    "svdvals": (VERIFIES, lambda X: torch.linalg.svdvals(X)),
    "norm of singular values": (VERIFIES, lambda X: torch.linalg.matrix_norm(X, 2)),
    "cond": (VERIFIES, lambda X: torch.linalg.cond(X)),
    "matrix_rank": (VERIFIES, lambda X: torch.linalg.matrix_rank(X)),
    "pinv": (VERIFIES, lambda X: torch.linalg.pinv(X)),
    "eigh": (VERIFIES, lambda X: torch.linalg.eigh(X @ X.mT)),
    "eigvalsh": (VERIFIES, lambda X: torch.linalg.eigvalsh(X @ X.mT)),
    "eig": (VERIFIES, lambda X: torch.linalg.eig(X)),
    "eigvals": (VERIFIES, lambda X: torch.linalg.eigvals(X)),
    "lstsq": (VERIFIES, lambda X: torch.linalg.lstsq(X, X[:, :2])),
    "matrix_exp": (READS, lambda X: torch.linalg.matrix_exp(X / 16)),
}
FREE = {
    "where": lambda X: torch.where(X.sum() > 0, X, 0.0),
    "a number where a mask is true": lambda X: X.__setitem__(X > 1, 0.0),
    "masked_fill": lambda X: X.masked_fill(X > 1, 2.0),
    "a row": lambda X: (X.__setitem__(0, 2.0), X.__setitem__(0, X[1])),
    "full": lambda X: X * torch.full((), 2.0, device=X.device),
    "a number of the host": lambda X: X * torch.tensor(2.0),
    "indices": lambda X: X[torch.arange(2, device=X.device)].gather(1, X[:2].argsort(1)),
    "repeat_interleave": lambda X: X[0].repeat_interleave(torch.full_like(X[0], 2).long(), output_size=2 * len(X[0])),
    "topk": lambda X: X.topk(2).values.isfinite().all(),
    "inv_ex": lambda X: torch.linalg.inv_ex(X @ X.mT),
    "solve_ex": lambda X: torch.linalg.solve_ex(X, X[0]),
    "cholesky_ex": lambda X: torch.linalg.cholesky_ex(X @ X.mT),
    "lu": lambda X: torch.linalg.lu(X),
    "qr": lambda X: torch.linalg.qr(X),
    "det": lambda X: torch.linalg.det(X),
    "slogdet": lambda X: torch.linalg.slogdet(X),
    "solve_triangular": lambda X: torch.linalg.solve_triangular(X, X, upper=True),
    "dtype": lambda X: X.double().to(torch.bfloat16),
    "as_tensor of a tensor": lambda X: torch.asarray(torch.as_tensor(X, dtype=torch.bfloat16)),
}


def phases(function):
    """{phase: a rule whose phase calls `function` with a matrix of numbers > 0}."""
    def looked(X):
        function(0 * X.sum() + torch.arange(1.0, 17.0, device=X.device).view(4, 4) + torch.eye(4, device=X.device))

    members = {
        "update": lambda self, G, M, numbers: (looked(M), G + M)[1:] * 2,
        "before": lambda self, U, units: (looked(U), U)[1],
        "after": lambda self, O, units: (looked(O), O)[1],
        "write": lambda self, W, O, scale, sent, numbers: (looked(O), W - O)[1],
    }
    return {phase: type(f"Waiting{phase}", (package().Rule,), {phase: f}) for phase, f in members.items()}


@pytest.mark.parametrize("name", WAITS)
def test_a_phase_in_which_the_host_would_wait_is_refused(name):
    said, function = WAITS[name]
    rule = phases(function)["after"]
    with pytest.raises(ValueError, match=rf"'Waitingafter': after .*{said}.* of test_rule_check.py, so the host would"):
        check(rule)


@pytest.mark.parametrize("phase", ["update", "before", "after", "write"])
def test_waits_are_found_in_each_phase(phase):
    """Also where the rule handles the error, or has reads of numbers of its group."""
    def function(X):
        with contextlib.suppress(Exception):
            X.sum().item()

    with pytest.raises(ValueError, match=f"'Waiting{phase}': {phase} reads a value"):
        check(phases(function)[phase])
    with pytest.raises(ValueError, match="after reads a value of a tensor"):
        check(type("Lr", (package().Rule,), {"after": lambda self, O, units: O * float(units.numbers.lr)}))


@pytest.mark.parametrize("name", [*FREE, "quantile"])
def test_what_a_gpu_does_without_the_host_is_no_wait(name):
    """torch reads the quantile's argument on CPUs only."""
    for rule in phases({**FREE, "quantile": lambda X: X.quantile(0.9, dim=1)}[name]).values():
        check(rule)


def test_an_option_of_any_name_may_be_read_on_the_host():
    def after(self, O, units):
        return O * float(units.numbers.radius) if units.numbers.nesterov else O

    check(type("Radius", (package().Rule,), {"options": {"radius": 2.0}, "after": after}))


@pytest.mark.parametrize("name", ["muon", "normuon", "normuon_columns", "normuon_aspect", "adamuon", "muon_plus",
                                  "hyperball", "scion", "dion2", "dion3"])
def test_rules_of_the_package_pass(name):
    check(type(part("rules.rule").RULES[name]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*WAITS, *(f"free: {name}" for name in FREE)])
def test_a_gpu_waits_where_the_check_says_so(name):
    """torch itself says where it waits. NumPy cannot read memory of a GPU at all."""
    is_free, X = name.startswith("free: "), torch.rand(4, 4, device="cuda") + torch.eye(4, device="cuda")
    function = FREE[name.removeprefix("free: ")] if is_free else WAITS[name][1]
    with contextlib.suppress(TypeError):
        function(X.clone())  # loads libraries
    torch.cuda.set_sync_debug_mode("error")
    try:
        with contextlib.nullcontext() if is_free else pytest.raises((RuntimeError, TypeError), match="synchron|numpy"):
            function(X)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def softened(W, O, sent):
    """Functions that torch computes by other code in the last elements of a tensor on a CPU."""
    return (torch.sigmoid(W) * sent["row"].abs() ** 0.7, torch.nn.functional.softplus(O) - sent["column"].cosh())


@pytest.mark.parametrize("shape", [(1, 1), (70, 513), (3, 1100), (64, 7)])
def test_a_piece_has_the_bits_of_the_whole(shape, device):
    """Cut anywhere, also between the parts that are computed at once."""
    run, (rows, cols) = part("rules.phases").in_whole_vectors, shape
    W, O = torch.randn(2, rows, cols, device=device)
    sent = {"row": torch.randn(rows, 1, device=device), "column": torch.randn(1, cols, device=device)}
    per = {"row": "row", "column": "column"}
    whole = run(softened, (W, O), sent, per)
    for found, exact in zip(whole, softened(W.double(), O.double(), {key: t.double() for key, t in sent.items()})):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    for r, c in ((slice(0, 1), slice(None)), (slice(rows // 3, None), slice(cols // 2, cols)), (slice(0), slice(1))):
        some = run(softened, (W[r, c], O[r, c]), {"row": sent["row"][r], "column": sent["column"][:, c]}, per)
        assert all(torch.equal(a, b[r, c]) for a, b in zip(some, whole))


def test_functions_with_code_for_vectors_are_elementwise():
    def update(self, G, M, numbers):
        return torch.nn.functional.softplus(G) + G.cosh(), torch.atan2(M, 3 * G)

    check(type("Softened", (package().Rule,), {"update": update}))


@pytest.mark.parametrize("size", [1e20, 1.0, 1e-25])
@pytest.mark.parametrize("order", ["row", "column", "row_column", "column_row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equalize_at_every_size(device, size, order, dtype):
    muon_plus = part("rules.named.muon_plus")
    X = (torch.randn(2, 6, 10, device=device) * size).to(dtype)
    exact = X.double() / X.double().square().sum((1, 2), keepdim=True).sqrt()
    for per in muon_plus.ORDERS[order]:
        dim = 2 if per == "row" else 1
        exact = exact / (exact.square().sum(dim, keepdim=True) + muon_plus.EPS).sqrt()
    alone = X[1:].clone()
    muon_plus.equalize(X, order, unit=True)
    muon_plus.equalize(alone, order, unit=True)
    torch.testing.assert_close(X.double(), exact, rtol=torch.finfo(dtype).eps / 2 + 3e-6, atol=1e-7)
    assert torch.equal(X[1:], alone)


def test_equalize_keeps_zeros(device):
    X = torch.zeros(2, 3, 4, device=device)
    part("rules.named.muon_plus").equalize(X, "row_column", unit=True)
    assert not X.any()

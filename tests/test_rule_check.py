"""Checks of a class of rules beyond its results, and the sizes of gradients that Muon+ takes."""

from __future__ import annotations

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

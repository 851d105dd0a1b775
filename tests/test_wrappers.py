"""Wrappers that derive a class from the class of the optimizer and hold the optimizer, as those of Lightning and Fabric
do: methods called on a wrapper read and change the optimizer.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.ranks import run_threads
from tests.test_overlap_backward import departures, fsdp


class Delegating:
    """Holds an optimizer and asks it for every attribute that neither the wrapper nor its class has."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type(f"Wrapped{type(optimizer).__name__}", (type(self), type(optimizer)), {})

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class LikeLightning(Delegating):
    """Has a step of its own."""

    def step(self, closure=None):
        return self._optimizer.step(closure)


class LikeFabric(LikeLightning):
    """Saves and loads by itself, too."""

    def state_dict(self):
        return self._optimizer.state_dict()

    def load_state_dict(self, state):
        self._optimizer.load_state_dict(state)


every_wrapper = pytest.mark.parametrize("wrapper", [Delegating, LikeLightning, LikeFabric])


def weights(value=1.0):
    return [nn.Parameter(torch.full((6, 4), value)), nn.Parameter(torch.full((4,), value))]


def built(optimizer, params, **options):
    groups = [{"params": params[:1]}, {"params": params[1:], "use_muon": False}]
    return optimizer.Muon(groups, lr=0.02, **options)


def give(params, value=None):
    generator = torch.Generator().manual_seed(0)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator) if value is None else torch.full_like(p, value)


@every_wrapper
def test_skipped_is_the_count_of_the_optimizer(wrapper, optimizer):
    params = weights()
    real = built(optimizer, params, nonfinite="skip")
    wrapped = wrapper(real)
    give(params, float("nan"))
    wrapped.step()
    assert int(wrapped.skipped) == int(real.skipped) == 2


@every_wrapper
def test_release_lets_go_of_the_memory_of_the_optimizer(wrapper, optimizer):
    params, others = weights(), weights()
    real, plain = built(optimizer, params), built(optimizer, others)
    wrapped = wrapper(real)
    for ps, opt in ((params, wrapped), (others, plain)):
        give(ps)
        opt.step()
    assert real._bound.stores != []
    wrapped.release()
    assert real._bound.stores == [] and real._preparation.fingerprint is None
    wrapped.step()
    plain.step()
    assert all(map(torch.equal, params, others))


@every_wrapper
def test_timing_reaches_the_optimizer_and_its_report(wrapper, optimizer):
    params = weights()
    real = built(optimizer, params)
    wrapped = wrapper(real)
    assert wrapped.timing is False
    wrapped.timing = True
    give(params)
    wrapped.step()
    assert real.timing is True and wrapped.timing is True
    assert real._watch is not None and str(wrapped.plan_report())
    wrapped.timing = False
    assert real.timing is False


@every_wrapper
def test_a_group_that_is_added_is_stepped(wrapper, optimizer):
    params, more = weights(), nn.Parameter(torch.ones(5, 5))
    real = built(optimizer, params)
    wrapped = wrapper(real)
    give(params)
    wrapped.step()
    wrapped.add_param_group({"params": [more]})
    give([more])
    wrapped.step()
    assert len(real.param_groups) == 3 and real._bound.stores != [] and not torch.equal(more, torch.ones(5, 5))


@every_wrapper
def test_a_state_that_is_loaded_is_the_optimizers(wrapper, optimizer):
    params, others = weights(), weights()
    saved = built(optimizer, others)
    give(others)
    saved.step()
    real = built(optimizer, params)
    wrapped = wrapper(real)
    give(params)
    wrapped.step()
    wrapped.step()
    wrapped.load_state_dict(saved.state_dict())
    assert torch.equal(real.state[params[0]]["momentum_buffer"], saved.state[others[0]]["momentum_buffer"])
    assert real.state[params[1]]["step"] == 1 and wrapped.state_dict()["state"].keys() == {0, 1}
    assert "state" not in vars(wrapped) and "param_groups" not in vars(wrapped)


def leaving(rank, world, wrapper):
    """Whether buckets left during the backward, through a wrapper and without; the bits of both."""
    found = []
    for through in (wrapper, lambda optimizer: optimizer):
        params, real, place = fsdp(world)
        found.append(departures(params, real, place, through(real)))
    return found


@pytest.mark.parametrize("wrapper", [Delegating, LikeLightning, LikeFabric])
def test_buckets_leave_within_last_backward_of_a_wrapper(wrapper):
    for (left, ours), (expected, theirs) in run_threads(2, leaving, wrapper):
        assert left == expected and min(left) > 0
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_a_copy_has_attributes_of_its_own(again, optimizer):
    """Copies are made without `__init__`."""
    params = weights()
    real = built(optimizer, params, nonfinite="skip")
    give(params, float("nan"))
    real.step()
    twin = again(real)
    twin.timing = True
    assert int(twin.skipped) == 2 and real.timing is False and twin.timing is True
    twin.release()
    assert real._bound.stores != [] and twin._bound.stores == [] and twin._itself() is twin

"""Inputs that PyTorch tests its own Muon with, given to torch.optim.Muon and to this package's: a
program.

    python -m tests.torch_inputs

A process of its own, since importing torch's test helpers freezes global flags of torch. Prints
what was compared, after "results", "states" or "errors"; exits with 3 where torch has no such
inputs.
"""

from __future__ import annotations

import copy
import sys
import types
import unittest
import warnings

import torch

from tests.ranks import package

EXACT = {"wire_dtype": torch.float32, "ns_dtype": torch.float32}
JORDAN = (3.4445, -4.7750, 2.0315)
SHAPES = [(20, 12), (12, 20), (16, 16)]
STEPS = 3
ROUNDING = 1e-4  # of weights of 1 in fp32, beside steps of 1e-3
# Of torch's errors: those that this class raises as ValueError, when it is built
OTHERWISE = (
    "a param group cannot have duplicate parameters",
    "does not support complex parameters",
)
ALLOWED = ("only support 2D parameters",)  # more dims are stacks of matrices here


def muons_entry() -> object:
    """torch's entry for Muon; its helpers import expecttest, which no optimizer input uses."""
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    try:
        from torch.testing._internal.common_optimizers import optim_db
    except ImportError as missing:
        leave(str(missing))
    entries = [entry for entry in optim_db if entry.optim_cls.__name__ == "Muon"]
    return entries[0] if entries else leave("no Muon among torch's inputs")


def leave(reason: str) -> None:
    print(reason)
    raise SystemExit(3)


def in_fp64(grad: torch.Tensor, coefficients: tuple, steps: int, eps: float) -> torch.Tensor:
    """torch's iteration with its products in fp64."""
    a, b, c = coefficients
    X = grad.double().T if grad.size(0) > grad.size(1) else grad.double()
    X = X / X.norm().clamp(min=eps)
    for _ in range(steps):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if grad.size(0) > grad.size(1) else X


def train(optimizer: torch.optim.Optimizer, params: list, numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def new_params() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def compare(options: dict, load: bool) -> float:
    """The largest difference between torch's weights and ours, relative to what all steps changed.
    `load`: ours is built with other options and takes theirs with the state, for the last step.
    """
    theirs, ours = new_params(), new_params()
    reference = torch.optim.Muon(theirs, **copy.deepcopy(options))
    given = (
        {"lr": 9.0, "momentum": 0.1}
        if load
        else {"ns_coefficients": JORDAN, **copy.deepcopy(options)}
    )
    optimizer = package().Muon(ours, **given, **EXACT)
    if load:
        train(reference, theirs, range(STEPS - 1))
        optimizer.load_state_dict(package().convert_state_dict(reference.state_dict()))
        for p, q in zip(ours, theirs):
            p.data.copy_(q.detach())
    numbers = range(STEPS - 1, STEPS) if load else range(STEPS)
    before = [p.detach().clone() for p in theirs]
    train(reference, theirs, numbers)
    train(optimizer, ours, numbers)
    return max(float((a - b).norm() / (b - old).norm()) for old, a, b in zip(before, ours, theirs))


def check_results(load: bool) -> None:
    entry = muons_entry()
    torch.optim._muon._zeropower_via_newtonschulz = in_fp64
    for given in entry.optim_inputs_func(device="cpu"):
        for more in ({}, {"nesterov": False}):
            difference = compare({**given.kwargs, **more}, load)
            kind = "states" if load else "results"
            print(f"{kind}: {given.desc} {more}: {difference:.1e}")
            assert difference < ROUNDING, (given.desc, difference)


def check_errors() -> None:
    for wrong in muons_entry().optim_error_inputs_func(device="cpu", dtype=torch.float32):
        given, error = wrong.optimizer_error_input, wrong.error_type
        error = ValueError if given.desc in OTHERWISE else error
        params = new_params() if given.params is None else given.params
        for tensor in params if isinstance(params, list) else ():
            if isinstance(tensor, torch.Tensor):
                tensor.requires_grad_()  # frozen parameters are left alone here, whatever they are
        print("errors:", given.desc, error.__name__)
        if given.desc in ALLOWED:
            package().Muon(params, **given.kwargs).step()
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)
                package().Muon(params, **given.kwargs)
        except error:
            continue
        raise AssertionError(f"{given.desc}: no {error.__name__}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    check_errors()
    check_results(load=False)
    check_results(load=True)

"""NorMuon of modded-nanogpt (github.com/KellerJordan/modded-nanogpt) on a CPU, for trajectories.py.

train_gpt.py asserts a GPU and starts training when it is imported. So two functions of its update are taken from the
file's syntax tree, without torch.compile, and run unchanged. Two things are written here: the Triton kernels that they
call, as the products that these compute, and the rest of `_normuon_update` for one rank. Its weights are 16 and 16 bits
of an fp32 number, which loses nothing, and torch has no shifts of them on CPUs: fp32 weights are stepped here.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable
from pathlib import Path

import torch

FUNCTIONS = {"polar_express", "_apply_normuon_variance_reduction"}
CONSTANT = "polar_express_coeffs"


def functions(file: Path) -> types.SimpleNamespace:
    """The functions FUNCTIONS of train_gpt.py. Raises KeyError with the name of one that is not there."""
    body = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
            node.decorator_list = []  # torch.compile and staticmethod
            body.append(node)
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == CONSTANT:
            body.append(node)
    names = {"torch": torch, "Tensor": torch.Tensor, "XXT": rows_product, "XTX": columns_product,
             "ba_plus_cAA": polynomial}
    exec(compile(ast.Module(body, type_ignores=[]), str(file), "exec"), names)
    return types.SimpleNamespace(**{name: names[name] for name in sorted(FUNCTIONS)})


def rows_product(X: torch.Tensor, out: torch.Tensor) -> None:
    """X X^T into out."""
    out.copy_(X @ X.mT)


def columns_product(X: torch.Tensor, out: torch.Tensor) -> None:
    """X^T X into out."""
    out.copy_(X.mT @ X)


def polynomial(A: torch.Tensor, alpha: float, beta: float, out: torch.Tensor) -> None:
    """beta A + alpha A A into out."""
    out.copy_(beta * A + alpha * (A @ A))


class NorMuon(torch.optim.Optimizer):
    """`_normuon_update` with cautious weight decay, for weights in fp32."""

    def __init__(self, weights: Iterable[torch.nn.Parameter], file: Path, lr: float, momentum: float, beta2: float,
                 weight_decay: float):
        super().__init__(weights, {"lr": lr, "momentum": momentum, "beta2": beta2, "weight_decay": weight_decay})
        self.theirs = functions(file)

    @torch.no_grad()
    def step(self) -> None:
        """Step each weight (..., R, C) in place."""
        for group in self.param_groups:
            for weight in group["params"]:
                self.step_one(weight, group)

    def step_one(self, weight: torch.Tensor, group: dict) -> None:
        """Step one weight in place."""
        rows, columns = weight.shape[-2:]
        dim, state = -1 if rows >= columns else -2, self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
            state["second"] = torch.zeros_like(weight.mean(dim, keepdim=True))
        update = self.theirs.polar_express(weight.grad.clone(), state["momentum"], torch.tensor(group["momentum"]))
        update = self.theirs._apply_normuon_variance_reduction(update, state["second"], group["beta2"], dim).float()
        rate = max(1.0, rows / columns) ** 0.5 * group["lr"]
        decay = group["weight_decay"] * group["lr"] * rate
        weight.sub_(weight * (update * weight >= 0) * decay + update * rate)

"""Matrices with given singular values: what errors of the polar factor are measured on."""

from __future__ import annotations

import torch

KINDS = ("gaussian", "k^-1/2", "1/k", "1/k^2", "log to 1e-3", "log to 1e-5", "half rank", "steps", "spike",
         "heavy rows")


def spectrum(name: str, n: int, m: int) -> torch.Tensor:
    """Return an (n, m) matrix, n <= m, in fp64 with singular values of the named kind."""
    k = torch.arange(1, n + 1, dtype=torch.float64)
    noise = torch.randn(n, m, dtype=torch.float64)
    values = {"k^-1/2": k**-0.5, "1/k": 1 / k, "1/k^2": k**-2, "log to 1e-3": torch.logspace(0, -3, n),
              "log to 1e-5": torch.logspace(0, -5, n), "half rank": k <= n // 2,
              "steps": torch.where(k <= n // 8, 1.0, 1e-4)}
    if name == "spike":
        noise[0, 0] = 1000.0
        return noise
    if name == "heavy rows":
        return noise * torch.randn(n, 1, dtype=torch.float64).mul(2).exp()
    if name == "gaussian":
        return noise
    left, right = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0], torch.linalg.qr(noise.mT)[0]
    return (left * values[name].double()) @ right.mT

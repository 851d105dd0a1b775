"""The algorithms as other packages write them, in plain torch: every product in fp32, then rounded once to `dtype`.

What an implementation of the same algorithm in the same precision is measured by.
"""
from __future__ import annotations

import torch


def standard(X: torch.Tensor, steps, dtype: torch.dtype) -> torch.Tensor:
    """X <- a X + B X with B = b A + c A^2 and A = X X^T: torch.matmul and torch.baddbmm, step by step."""
    X = _normalised(X, dtype)
    for a, b, c in steps.triples:
        A = _rounded(X @ X.mT, dtype)
        B = _rounded(b * A + c * (A @ A), dtype)
        X = _rounded(a * X + B @ X, dtype)
    return X


def gram(X: torch.Tensor, steps, dtype: torch.dtype, most: int = 100, halves: bool = False) -> torch.Tensor:
    """Gram Newton-Schulz as in Dao-AILab's package, with the restarts that `steps` asks for, and step by step.

    halves: one half of each n x n product is computed and mirrored, as by kernels of symmetric products. Rounded
    factors do not commute, so the mirrored product of singular matrices need not be singular.
    """
    X = _normalised(X, dtype)

    def square(product):
        return _rounded(product.tril() + product.tril(-1).mT if halves else product, dtype)

    for interval in steps.intervals(dtype, most, len(X)):
        R, Q = square(X @ X.mT), None
        for number, (a, b, c) in enumerate(interval, start=1):
            Z = square(b * R + c * (R @ R))
            one = torch.eye(len(R), device=R.device)
            Q = square(Z + a * one if Q is None else a * Q + Q @ Z)
            if number < len(interval):
                RZ = square(a * R + R @ Z)
                R = square(a * RZ + Z @ RZ)
        X = _rounded(Q @ X, dtype)
    return X


def _normalised(X, dtype):
    X = X.float()
    return _rounded(X / X.norm(), dtype)


def _rounded(X, dtype):
    return X.to(dtype).float()

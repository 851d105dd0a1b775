"""Environment variables for finding faults.

Decides: their names and what they may say. Must not know: anything else of the package; everybody may import it.
"""
from __future__ import annotations

import os

CHOICES = ("auto", "torch", "triton")
GRAPHS = ("auto", "off")


def kernels() -> str:
    """Say which kernels are wanted, by OPTIMIZER_KERNELS: auto (default), torch, or triton (CPU: its interpreter)."""
    return _check("OPTIMIZER_KERNELS", os.environ.get("OPTIMIZER_KERNELS", "auto"), CHOICES)


def graphs() -> str:
    """Say whether CUDA graphs may be used, by OPTIMIZER_GRAPHS: auto (default), or off."""
    return _check("OPTIMIZER_GRAPHS", os.environ.get("OPTIMIZER_GRAPHS", "auto"), GRAPHS)


def _check(name, choice, allowed):
    if choice not in allowed:
        raise ValueError(f"{name} is {choice!r}; it may be one of {', '.join(allowed)}")
    return choice

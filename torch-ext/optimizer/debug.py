"""Environment variables for finding faults.

Decides: their names and what they may say. Must not know: anything else of the package; everybody may import it.
"""
from __future__ import annotations

import os

CHOICES = ("auto", "torch", "triton")


def kernels() -> str:
    """Say which kernels are wanted, by OPTIMIZER_KERNELS: auto (default), torch, or triton (CPU: its interpreter)."""
    choice = os.environ.get("OPTIMIZER_KERNELS", "auto")
    if choice not in CHOICES:
        raise ValueError(f"OPTIMIZER_KERNELS is {choice!r}; it may be one of {', '.join(CHOICES)}")
    return choice

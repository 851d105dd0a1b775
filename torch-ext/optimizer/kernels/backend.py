"""Backend selection (Triton or torch), device properties, and the environment variables of
kernels.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from pathlib import Path

import torch

from ..params.errors import shortened

CHOICES = ("auto", "torch", "triton")


def kernels() -> str:
    """Say which kernels are wanted, by OPTIMIZER_KERNELS: auto (default), torch, or triton (CPU:
    its interpreter).
    """
    return _check("OPTIMIZER_KERNELS", os.environ.get("OPTIMIZER_KERNELS", "auto"), CHOICES)


def _check(name, choice, allowed):
    if choice not in allowed:
        raise ValueError(
            f"{name} is {shortened(repr(choice))}; it may be one of {', '.join(allowed)}"
        )
    return choice


def tiles() -> Path | None:
    """Return the file that OPTIMIZER_TILES names, a table of tiles in place of the package's own
    (docs/kernels.md).
    """
    name = os.environ.get("OPTIMIZER_TILES")
    if not name:
        return None
    try:
        is_file = Path(name).is_file()
    except (OSError, ValueError):  # a name that is too long, or that no system takes
        is_file = False
    if not is_file:
        raise ValueError(
            f"OPTIMIZER_TILES is {shortened(repr(name))}, which is no file; tools/tune_tiles.py "
            "writes one, or unset it"
        )
    return Path(name)


def choices() -> tuple[str, str]:
    """Return what all ranks must have alike, for one matrix to have the same bits on each: kernels,
    and which tiles.
    """
    own = tiles()
    return kernels(), hashlib.sha256(own.read_bytes()).hexdigest() if own else ""


CPU_ELEMENTS = 1 << 10  # elements that a CPU takes in one thread; what they take is no workspace


def use_triton(device: torch.device) -> bool:
    """Say whether operations on `device` run in Triton: NVIDIA from sm80, ROCm, XPU, where Triton
    is installed.
    """
    choice = kernels()
    if choice == "auto":
        return _triton_runs_on(device.type, device.index)
    return choice == "triton"


@functools.cache
def _triton_runs_on(kind: str, index: int | None) -> bool:
    if kind not in ("cuda", "xpu") or importlib.util.find_spec("triton") is None:
        return False
    return (
        kind == "xpu"
        or torch.version.hip is not None
        or torch.cuda.get_device_capability(index) >= (8, 0)
    )


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Say whether a kernel on `device` may begin before those launched earlier are done, and wait
    for them itself (programmatic dependent launch): on NVIDIA GPUs from sm90 on.
    """
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


@functools.cache
def processors_of(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def capturing(device: torch.device) -> bool:
    """Say whether what is launched now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def triton_version(device: torch.device) -> str | None:
    """Return the version of the Triton that operations on `device` run in; None where they run in
    torch.
    """
    return importlib.import_module("triton").__version__ if use_triton(device) else None


def cpu_slices(stack) -> list[slice]:
    """Return slices of as many matrices of a tensor or Split as one thread of a CPU takes at once:
    of one, where they lie in each other, or in pieces.
    """
    N, R, C = stack.shape
    apart = max(1, R * C + -(R * C) % 16)  # where each begins as new memory does
    count = max(1, CPU_ELEMENTS // apart) if stack.stride(0) >= R * C else 1
    return [slice(start, start + count) for start in range(0, N, count)]

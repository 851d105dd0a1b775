"""Selection of the backend (Triton or torch), device properties, environment variables of kernels.

`use_triton` is the one question that every launcher asks before it picks a backend. Imports torch
and `params.errors` only: all folders of `kernels` import this module. Triton is imported inside
functions, since an installation may lack Triton.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from pathlib import Path

import torch

from ..params.errors import shortened

CHOICES = ("auto", "torch", "triton")  # allowed values of OPTIMIZER_KERNELS

# Elements of one slice of `cpu_slices`. Few enough for torch to stay in one thread, and for the
# temporary tensors of a slice to be no workspace that the memory model has to count.
CPU_ELEMENTS = 1 << 10


def requested_backend() -> str:
    """Return the value of OPTIMIZER_KERNELS: "auto" (default), "torch" or "triton".

    On a CPU "triton" means Triton's interpreter. Raises ValueError for any further value.
    """
    return validate_choice(
        "OPTIMIZER_KERNELS", os.environ.get("OPTIMIZER_KERNELS", "auto"), CHOICES
    )


def validate_choice(name: str, choice: str, allowed: tuple[str, ...]) -> str:
    """Return `choice`. Raises ValueError, with the variable's name, unless `choice` is allowed."""
    if choice not in allowed:
        raise ValueError(
            f"{name} is {shortened(repr(choice))}; it may be one of {', '.join(allowed)}"
        )
    return choice


def tile_table_path() -> Path | None:
    """Return the file named by OPTIMIZER_TILES, or None if the variable is unset or empty.

    The file is a table of tile configurations (docs/kernels.md) and replaces the package's table of
    one architecture. Raises ValueError if the variable names no file. Does not read the file.
    """
    name = os.environ.get("OPTIMIZER_TILES")
    if not name:
        return None
    try:
        is_file = Path(name).is_file()
    except (OSError, ValueError):  # too long, or with characters that no file system takes
        is_file = False
    if not is_file:
        raise ValueError(
            f"OPTIMIZER_TILES is {shortened(repr(name))}, which is no file; tools/tune_tiles.py "
            "writes one, or unset it"
        )
    return Path(name)


def bit_relevant_settings() -> tuple[str, str]:
    """Return (OPTIMIZER_KERNELS, SHA-256 of the file of OPTIMIZER_TILES or "").

    All ranks must agree on both: backend and tiles decide in which order products are summed, hence
    the bits of a matrix. Raises ValueError as `requested_backend` and `tile_table_path` do.
    """
    own = tile_table_path()
    return requested_backend(), hashlib.sha256(own.read_bytes()).hexdigest() if own else ""


def use_triton(device: torch.device) -> bool:
    """Say whether operations on `device` run in Triton.

    "auto" chooses Triton on NVIDIA GPUs from sm80 on, ROCm and XPU, if Triton is installed. "torch"
    and "triton" decide for every device. Raises ValueError as `requested_backend` does.
    """
    choice = requested_backend()
    if choice == "auto":
        return _triton_runs_on(device.type, device.index)
    return choice == "triton"


@functools.cache
def _triton_runs_on(kind: str, index: int | None) -> bool:
    """Say whether Triton is installed and supports the device of type `kind` and number `index`."""
    if kind not in ("cuda", "xpu") or importlib.util.find_spec("triton") is None:
        return False
    return (
        kind == "xpu"
        or torch.version.hip is not None
        or torch.cuda.get_device_capability(index) >= (8, 0)
    )


@functools.cache
def is_nvidia(device: torch.device) -> bool:
    """Say whether `device` is a GPU of NVIDIA."""
    return device.type == "cuda" and torch.version.hip is None


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Say whether `device` supports programmatic dependent launch: NVIDIA GPUs from sm90 on.

    A kernel launched with `launch_pdl` may start before earlier kernels of the stream have ended,
    and waits for their results by `gdc_wait`.
    """
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


@functools.cache
def processors_of(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def capturing(device: torch.device) -> bool:
    """Say whether launches of the current stream go into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def triton_version(device: torch.device) -> str | None:
    """Return the version of Triton, or None if operations on `device` run in torch."""
    return importlib.import_module("triton").__version__ if use_triton(device) else None


def cpu_slices(stack: torch.Tensor) -> list[slice]:
    """Return slices of the batch dimension of a stack (N, R, C) for the torch path on a CPU.

    Each slice holds as many matrices as fit into CPU_ELEMENTS elements, at least one. Stacks whose
    matrices overlap in memory, and `ScatteredRows`, get slices of one matrix.
    """
    N, R, C = stack.shape
    # matmul/reference.py starts each fp32 product at a multiple of 64 bytes, where new memory
    # starts too: a matrix takes its elements rounded up to a multiple of 16
    padded = max(1, R * C + -(R * C) % 16)
    count = max(1, CPU_ELEMENTS // padded) if stack.stride(0) >= R * C else 1
    return [slice(start, start + count) for start in range(0, N, count)]

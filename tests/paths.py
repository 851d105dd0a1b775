"""The two paths of every kernel: "torch" and "triton".

Without a GPU, Triton's kernels run in Triton's CPU interpreter, which has to be chosen before triton is imported, and
so when pytest collects. It multiplies bf16 wrongly and rounds to bf16 towards zero: bf16 is tested there with care.
"""
from __future__ import annotations

import importlib.util
import os
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from tests import interpreter
from tests.interpreter import INTERPRETED, PATHS  # noqa: F401, for tests

if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"


def why_no_triton() -> str | None:
    """Say why Triton's kernels cannot run here, None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if INTERPRETED and tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4):
        return "Triton's interpreter does not work with numpy 2.4 or newer"
    return None


def compiler_environment(cache: Path) -> dict[str, str]:
    """The environment of a process that compiles kernels into an empty cache, where the interpreter excludes that.

    The numbers of source lines, which nothing reads there, take a tenth of the time; a fifth goes into malloc, unless a
    thread keeps what it frees.
    """
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"TRITON_CACHE_DIR": str(cache), "TRITON_DISABLE_LINE_INFO": "1",
                   "GLIBC_TUNABLES": "glibc.malloc.tcache_count=65535"}


quiet = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter's own


def take(path: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Send every operation of this test down a path; skip the test where it cannot go."""
    if path == "triton" and (reason := why_no_triton()):
        pytest.skip(reason)
    if path == "triton" and INTERPRETED:
        interpreter.hasten()
    monkeypatch.setenv("OPTIMIZER_KERNELS", path)
    return path


def forget(polar, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `polar` look at every call anew: what it knows of calls of a kind would hide what a test changes."""
    monkeypatch.setattr(polar, "_signatures", {})


def repeats(call, expected: torch.Tensor) -> bool:
    """Say whether a CUDA graph of `call()` gives this every time."""
    graph, same = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        O = call()
    for _ in range(3):
        O.zero_()
        graph.replay()
        same.append(torch.equal(O, expected))
    return all(same)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return memory that shows whether it has been written."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


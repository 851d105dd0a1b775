"""Finding faults: environment variables, and errors that say where they happened.

Decides: the variables' names and what they may say. Must not know: anything else of the package; everybody may
import it.
"""
from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

CHOICES = ("auto", "torch", "triton")
GRAPHS = ("auto", "off")
LONGEST = 200  # characters of a value that a message repeats


def shortened(text: object) -> str:
    """Return `str(text)` for a message, cut after 200 characters: names and values come from users and files."""
    text = str(text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"


def kernels() -> str:
    """Say which kernels are wanted, by OPTIMIZER_KERNELS: auto (default), torch, or triton (CPU: its interpreter)."""
    return _check("OPTIMIZER_KERNELS", os.environ.get("OPTIMIZER_KERNELS", "auto"), CHOICES)


def graphs() -> str:
    """Say whether CUDA graphs may be used, by OPTIMIZER_GRAPHS: auto (default), or off."""
    return _check("OPTIMIZER_GRAPHS", os.environ.get("OPTIMIZER_GRAPHS", "auto"), GRAPHS)


def _check(name, choice, allowed):
    if choice not in allowed:
        raise ValueError(f"{name} is {shortened(repr(choice))}; it may be one of {', '.join(allowed)}")
    return choice


def tiles() -> Path | None:
    """Return the file that OPTIMIZER_TILES names, a table of tiles in place of the package's own (docs/kernels.md)."""
    name = os.environ.get("OPTIMIZER_TILES")
    if not name:
        return None
    try:
        is_file = Path(name).is_file()
    except (OSError, ValueError):  # a name that is too long, or that no system takes
        is_file = False
    if not is_file:
        raise ValueError(f"OPTIMIZER_TILES is {shortened(repr(name))}, which is no file; tools/tune_tiles.py writes "
                         "one, or unset it")
    return Path(name)


def choices() -> tuple[str, str]:
    """Return what all ranks must have alike, for one matrix to have the same bits on each: kernels, and which tiles."""
    own = tiles()
    return kernels(), hashlib.sha256(own.read_bytes()).hexdigest() if own else ""


@contextlib.contextmanager
def during(what: str):
    """Let an error say during what it happened; it keeps its type where it has a message of its own."""
    try:
        yield
    except Exception as error:
        text = f"in {what}: {error}"
        if not error.args or not isinstance(error.args[0], str):
            raise RuntimeError(text) from error
        error.args = (text, *error.args[1:])
        raise

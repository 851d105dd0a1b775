"""The text: where it comes from, how it is split and drawn. Knows nothing of models or optimizers.

Tokens are bytes, so there is no tokenizer to train and a loss in nats per byte compares with any other model's.
"""
from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from pathlib import Path

import torch

VOCABULARY = 256
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
HELDOUT_ONE_IN = 20


def source_files(folder: str | Path | None = None) -> list[Path]:
    """Every *.py file under `folder` (default: this Python's standard library) in the order of their paths."""
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    kept = []
    for here, folders, files in os.walk(root):
        folders[:] = set(folders) - SKIPPED_FOLDERS  # what lies below is not even listed
        kept += [Path(here, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return [root / path for path in sorted(kept)]


def is_heldout(path: Path) -> bool:
    """Whether a file is only for evaluation: decided by the hash of its name, so the same on every machine."""
    return int.from_bytes(hashlib.sha256(path.name.encode()).digest()[:4], "big") % HELDOUT_ONE_IN == 0


@functools.lru_cache(maxsize=2)  # the demo trains four times on one text, a queue of sweeps in turns on two
def read_corpus(folder: str | Path | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of the training files and of the held-out files, two 1-D uint8 tensors."""
    text = {True: bytearray(), False: bytearray()}
    for path in source_files(folder):
        text[is_heldout(path)] += path.read_bytes()
    if min(map(len, text.values())) < 10_000:
        raise ValueError(f"too little text in {folder or 'the standard library'}: {len(text[False])} bytes to train on "
                         f"and {len(text[True])} held out; name a folder with more *.py files (--data)")
    return tuple(torch.frombuffer(text[heldout], dtype=torch.uint8) for heldout in (False, True))


def windows(tokens: torch.Tensor, starts: torch.Tensor, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (targets are one byte ahead), both (len(starts), seq) int64."""
    index = starts[:, None] + torch.arange(seq + 1, device=starts.device)
    drawn = tokens[index].long()
    return drawn[:, :-1], drawn[:, 1:]


def random_windows(tokens: torch.Tensor, count: int, seq: int, generator: torch.Generator):
    """`count` windows at random places; the same on every rank that holds the same generator state."""
    return windows(tokens, torch.randint(len(tokens) - seq, (count,), generator=generator), seq)


def even_windows(tokens: torch.Tensor, count: int, seq: int):
    """`count` windows spread evenly over the text: the fixed set on which the held-out loss is measured."""
    return windows(tokens, torch.linspace(0, len(tokens) - seq - 1, count).long(), seq)

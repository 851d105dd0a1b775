"""fp32 weights in two 16-bit tensors (`SplitWeights`): joined, split, and read or written whole.

The torch functions have the bits of the kernels. `joined_tile` and `split_tile` serve kernels of
other modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..backend import use_triton
from ..launch.jit import jit, launch_key

tl = None  # Triton's language, put here by jit

# How new weights are stored: rounded to nearest, rounded stochastically, or split in two tensors
NEAREST, STOCHASTIC, SPLIT = 0, 1, 2
TILE = 4096  # elements of a program
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


@dataclass(frozen=True)
class SplitWeights:
    """fp32 weights in two 16-bit tensors: the bf16 weight that the model sees, and the rest of the
    32 bits, int16.

    As integers, fp32 weight = 2^16 bf16 weight + rest. The bf16 weight is the fp32 weight rounded
    to nearest, with ties away from zero: with ties to even, two fp32 weights would have one bf16
    weight and one rest. Source: `store_param_remainders` of Transformer Engine's FusedAdam. All
    NaNs become one NaN, with rest 0.

    [Note: rest of another weight]
    Other code may write the bf16 weight between steps. The rest then belongs to another weight, and
    shifts the new weight by at most half a unit in the last place. Beside a weight of 0, a negative
    rest would make a NaN: such a rest counts as 0. No fp32 weight has such a pair.
    """

    rests: Sequence[torch.Tensor | None]  # of each rectangle; None: the weight is not split
    kind: ClassVar[int] = SPLIT

    def lists(self, W: Sequence[torch.Tensor]) -> tuple[list, list]:
        """Return the lists of weights and of rests for `bind`. Kernels know split weights by the
        dtype int16. The rest of a weight that is not split is a placeholder, never read.
        """
        pairs = list(zip(W, self.rests))
        weights = [w if rest is None else w.view(torch.int16) for w, rest in pairs]
        return weights, [[w if rest is None else rest for w, rest in pairs]]


def wide_weight(w: torch.Tensor, rest: torch.Tensor | None) -> torch.Tensor:
    """Return a weight in fp32, unchanged if it has that dtype; `rest`: of a split weight, else
    None.
    """
    return w.float() if rest is None else joined(w, rest)


def wide_weights(
    W: Sequence[torch.Tensor], rests: Sequence[torch.Tensor | None] = ()
) -> list[torch.Tensor]:
    """Return split weights in fp32, and other weights unchanged. `rests`: of each weight, None
    unless it is split; () if none is.
    """
    return [w if r is None else joined(w, r) for w, r in zip(W, rests)] if rests else list(W)


def wide_copies(
    W: Sequence[torch.Tensor], rests: Sequence[torch.Tensor | None] = ()
) -> list[torch.Tensor]:
    """Return copies in fp32; of fp64 in fp64. `rests`: as of `wide_weights`."""
    wide = wide_weights(W, rests)
    return [
        t.clone() if t.dtype == torch.float64 else t.to(torch.float32, copy=t is w)
        for t, w in zip(wide, W)
    ]


def write_weight(
    w: torch.Tensor,
    rest: torch.Tensor | None,
    new: torch.Tensor,
    is_updated: torch.Tensor | None = None,
) -> None:
    """Write the fp32 weight `new` to `w` and, of a split weight, to `rest`. `is_updated`: a single
    bool on the device, False leaves both unchanged; None: True.
    """
    parts = [(w, new)] if rest is None else list(zip((w, rest), split(new)))
    for old, part in parts:
        old.copy_(part if is_updated is None else torch.where(is_updated, part.to(old.dtype), old))


def joined(w: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Return the fp32 weights of `SplitWeights`: bf16 weights and int16 rests of equal shapes."""
    bits = w.view(torch.int16).int() << 16
    # See [Note: rest of another weight]
    low = torch.where((bits & 0x7FFFFFFF) == 0, rest.clamp_min(0), rest)
    return (bits + low).view(torch.float32)


def split(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (bf16 weights, int16 rests) of fp32 weights, as in `SplitWeights`."""
    bits = torch.where(wide.isnan(), 0x7FC00000, wide.view(torch.int32))
    high = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return high, bits.to(torch.int16)  # the low bits


def join_into(out: torch.Tensor, w: torch.Tensor, rest: torch.Tensor) -> None:
    """Write the fp32 weights of `SplitWeights` to `out`: `joined`, in one launch where all three
    are contiguous.
    """
    if not _launch_halves(_join_kernel, out, w, rest):
        out.copy_(joined(w, rest))


def split_into(wide: torch.Tensor, w: torch.Tensor, rest: torch.Tensor) -> None:
    """Write fp32 weights to `w` and `rest`: `split`, in one launch where all are contiguous."""
    if not _launch_halves(_split_kernel, wide, w, rest):
        write_weight(w, rest, wide)


def _launch_halves(kernel: jit, wide: torch.Tensor, w: torch.Tensor, rest: torch.Tensor) -> bool:
    """Launch `kernel` on contiguous tensors; return False where it cannot run."""
    tensors = wide, w.view(torch.int16), rest
    can_run = all(t.is_contiguous() for t in tensors) and use_triton(wide.device)
    if can_run and wide.numel():
        arguments = *tensors, wide.numel(), TILE
        programs = -(-wide.numel() // TILE)
        kernel.launch(programs, launch_key(*tensors), *arguments, **OPTIONS)
    return can_run


@jit
def joined_tile(weights, rests):
    """Return the fp32 weights of `SplitWeights`, from bf16 weights as int16, and int16 rests."""
    bits, low = weights.to(tl.int32) << 16, rests.to(tl.int32)
    # See [Note: rest of another weight]
    low = tl.where((bits & 0x7FFFFFFF) == 0, tl.maximum(low, 0), low)
    return (bits + low).to(tl.float32, bitcast=True)


@jit
def split_tile(wide):
    """Return (bf16 weights, rests) of fp32 weights, both as int16, as in `SplitWeights`."""
    bits = wide.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
    return ((bits + 0x8000) >> 16).to(tl.int16), bits.to(tl.int16)


@jit
def _join_kernel(wide, weights, rests, count, TILE: tl.constexpr):
    """Compute `join_into` for a tile; bf16 weights as int16. `count`: of elements."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < count
    w, rest = tl.load(weights + place, mask=inside), tl.load(rests + place, mask=inside)
    tl.store(wide + place, joined_tile(w, rest), mask=inside)


@jit
def _split_kernel(wide, weights, rests, count, TILE: tl.constexpr):
    """Compute `split_into` for a tile. Arguments as of `_join_kernel`."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < count
    w, rest = split_tile(tl.load(wide + place, mask=inside))
    tl.store(weights + place, w, mask=inside)
    tl.store(rests + place, rest, mask=inside)

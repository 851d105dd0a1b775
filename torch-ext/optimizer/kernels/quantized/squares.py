"""The 8-bit format of averages of squares: uint8 numbers, and the largest value of each BLOCK of a
row as an fp32 scale.

An element is (n / 255)^4 scale of its number n. The format is made for the square root of the
element, by which AdamW divides: the root is (n / 255)^2 sqrt(scale), the square map of blocks.py,
and spans a factor of 65025. Blocks lie as in blocks.py.

[Note: no second moment of zero]
An element above zero never gets the number 0: AdamW would divide m by a root of 0 plus eps, and a
single step could move the weight by |m| / eps. The least number makes the square root at most as
small as sqrt(scale) / 65025, so a rounded element makes a step smaller, not larger. docs/math.md
has the measurements behind the format.
"""

from __future__ import annotations

import torch

from ..launch.jit import jit
from .blocks import BLOCK, rounded_sqrt

tl = None  # Triton's language, put here by jit

LARGEST = 255  # largest number
# Blocks without a larger value become zeros: the least normal fp32 number
TINY = 2.0**-126
DTYPE = torch.uint8


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the fp32 tensor (..., R, C) of numbers (..., R, C) and scales (..., R, blocks)."""
    numbers = values.float()
    root = numbers * numbers * (1.0 / LARGEST**2)
    scale = scales.repeat_interleave(BLOCK, -1)[..., : values.shape[-1]]
    return root * root * scale


def quantize(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (uint8 numbers (..., R, C), fp32 scales (..., R, blocks)) of an fp32 tensor without
    negative elements, with the bits of `squares_tile`: each element is rounded to the nearest
    value, but those above zero never to zero.

    A block with NaN or Inf gets numbers 0 and a scale that is not finite: it reads as NaN.
    """
    columns = wide.shape[-1]
    blocks = torch.nn.functional.pad(wide, (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    # As integers: NaN is larger than Inf, and Inf than all finite values
    largest = blocks.abs().contiguous().view(torch.int32).amax(-1, keepdim=True)
    largest = largest.view(torch.float32)
    is_usable = (largest > TINY) & (largest < torch.inf)
    share = blocks / torch.where(is_usable, largest, 1.0) * float(LARGEST**4)
    # With h = n + 1/2, the middle of n^4 and (n + 1)^4 is (h^2 + 3/4)^2 - 1/2
    root = rounded_sqrt((rounded_sqrt(share + 0.5) - 0.75).clamp_min(0.0))
    numbers = (root + 0.5).floor().clamp_max(LARGEST)
    numbers = torch.where(blocks > 0, numbers.clamp_min(1.0), 0.0)
    numbers = torch.where(is_usable, numbers, 0.0).to(DTYPE)
    scales = torch.where(largest <= TINY, 0.0, largest)
    return numbers.flatten(-2)[..., :columns], scales.squeeze(-1)


@jit
def dequantized_squares_tile(numbers, scales):
    """Return the fp32 tile of uint8 numbers (blocks, BLOCK) and scales (blocks, 1)."""
    wide = numbers.to(tl.float32)
    root = wide * wide * 1.537870048196055e-05
    return root * root * scales


@jit
def squares_tile(wide):
    """Return (uint8 numbers, fp32 scales) of a tile (blocks, BLOCK) in fp32, a block in each row;
    scales: (blocks, 1). Elements outside of the matrix must be 0.
    """
    largest = tl.max(tl.abs(wide).to(tl.int32, bitcast=True), axis=1, keep_dims=True)
    largest = largest.to(tl.float32, bitcast=True)
    usable = (largest > 1.1754943508222875e-38) & (largest < float("inf"))
    share = tl.div_rn(wide, tl.where(usable, largest, 1.0)) * 4228250625.0
    root = tl.sqrt_rn(tl.maximum(tl.sqrt_rn(share + 0.5) - 0.75, 0.0))
    numbers = tl.minimum(tl.floor(root + 0.5), 255.0)
    numbers = tl.where(wide > 0, tl.maximum(numbers, 1.0), 0.0)
    numbers = tl.where(usable, numbers, 0.0)
    return numbers.to(tl.uint8), tl.where(largest <= 1.1754943508222875e-38, 0.0, largest)

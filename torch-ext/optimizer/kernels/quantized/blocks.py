"""The format of 8-bit state: int8 numbers, and an fp32 scale for each BLOCK of a row.

An element is n |n| scale of its number n; the scale is the largest magnitude of the block / 127^2.
The format is the square map ("linear-2" of 4-bit Shampoo, arXiv 2405.18144): small elements have
finer steps. Blocks begin at multiples of BLOCK of the whole row, so rows may be divided
among ranks in any way, and columns at multiples of BLOCK. 1 + 4 / BLOCK bytes per element.

[Note: 8-bit format]
Measured by momenta beside one in fp32 over 300 steps, for gradients of a small language model and
for low-rank gradients with heavy-tailed noise (docs/math.md has the table): the square map loses
less than linear int8, bitsandbytes' dynamic map and e4m3, and blocks of 64 less than of 128 and
256. Stochastic rounding loses more than rounding to the nearest, also in the sum over all steps.

[Note: unwritten blocks]
New state has numbers UNWRITTEN and scales -0.0, and reads as zero: -128 * 128 * -0.0 is 0.0. A step
writes neither value: a block of zeros has numbers 0 and scales 0.0. So a load can tell new state
from a momentum of zeros. torch's `set_optimizer_state_dict` copies an fp32 momentum into the new
numbers and leaves the new scales, and most elements of a momentum become 0 by that cast.
"""

from __future__ import annotations

from typing import Any

import torch

from ..launch.jit import jit

tl = None  # Triton's language, put here by jit

BLOCK = 64  # elements of a row with a common scale
LARGEST = 127  # largest number
UNWRITTEN = -128  # every number of a block that was created and never written
# Blocks without a larger magnitude become zeros: LARGEST / magnitude has to be finite
TINY = 1e-30
DTYPE = torch.int8


def is_quantized(dtype: object) -> bool:
    """Return whether a value of `state_dtype` is the 8-bit format."""
    return dtype is DTYPE


def block_count(columns: int | torch.Tensor) -> int | torch.Tensor:
    """Return the number of blocks of a row of `columns` elements; of each row for a tensor."""
    return -(-columns // BLOCK)


def rounded_sqrt(wide: torch.Tensor) -> torch.Tensor:
    """Return square roots in fp32, correctly rounded as in kernels: torch's on CPUs are not."""
    return wide.double().sqrt_().float() if wide.device.type == "cpu" else wide.sqrt()


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the fp32 tensor (..., R, C) of numbers (..., R, C) and scales (..., R, blocks)."""
    numbers = values.float()
    scale = scales.repeat_interleave(BLOCK, -1)[..., : values.shape[-1]]
    return numbers * numbers.abs() * scale


def quantize(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (int8 numbers (..., R, C), fp32 scales (..., R, blocks)) of an fp32 tensor, with the
    bits of `quantized_tile`: each element is rounded to the nearest value.

    A block with NaN or Inf gets numbers 0 and a scale that is not finite: it reads as NaN.
    """
    columns = wide.shape[-1]
    blocks = torch.nn.functional.pad(wide, (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    # As integers: NaN is larger than Inf, and Inf than all finite magnitudes
    magnitude = blocks.abs().contiguous().view(torch.int32)
    largest = magnitude.amax(-1, keepdim=True).view(torch.float32)
    is_usable = (largest > TINY) & (largest < torch.inf)
    # Not `LARGEST**2 / largest`, which torch computes as a reciprocal, rounded, times LARGEST**2
    inverse = torch.where(is_usable, torch.full_like(largest, LARGEST**2) / largest, 0.0)
    scales = torch.where(largest <= TINY, 0.0, largest * (1.0 / LARGEST**2))
    # Between n^2 and (n + 1)^2 the middle is n (n + 1) + 1/2
    numbers = (rounded_sqrt((blocks.abs() * inverse - 0.25).clamp_min(0.0)) + 0.5).floor()
    numbers = torch.where(is_usable, numbers.clamp_max(LARGEST), 0.0)
    numbers = torch.where(blocks < 0, -numbers, numbers).to(DTYPE)
    return numbers.flatten(-2)[..., :columns], scales.squeeze(-1)


def mark_unwritten(values: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill new numbers and scales, in place, see [Note: unwritten blocks]."""
    values.fill_(UNWRITTEN)
    scales.fill_(-0.0)


def are_together(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return whether numbers (..., R, C), at least one, and scales (..., R, blocks) can come from
    `quantize` or `mark_unwritten`: a bool on the device.
    """
    # The padding of a row repeats its last number, which lies in the padded block
    columns = torch.arange(scales.shape[-1] * BLOCK, device=values.device)
    columns = columns.clamp_max(values.shape[-1] - 1)
    blocks = values[..., columns].unflatten(-1, (-1, BLOCK))
    least, most = blocks.amin(-1), blocks.amax(-1)
    is_largest = (least >= -LARGEST) & ((least == -LARGEST) | (most == LARGEST))
    is_zero = (least == 0) & (most == 0)
    is_unwritten = (scales == 0) & scales.signbit()
    fits = torch.where((scales > 0) & scales.isfinite(), is_largest, is_zero)
    fits = torch.where(is_unwritten, (least == UNWRITTEN) & (most == UNWRITTEN), fits)
    return fits.all()


@jit
def dequantized_tile(numbers, scales):
    """Return the fp32 tile of int8 numbers (blocks, BLOCK) and scales (blocks, 1)."""
    wide = numbers.to(tl.float32)
    return wide * tl.abs(wide) * scales


@jit
def quantized_tile(wide):
    """Return (int8 numbers, fp32 scales) of a tile (blocks, BLOCK) in fp32, a block in each row;
    scales: (blocks, 1). Elements outside of the matrix must be 0.
    """
    magnitude = tl.abs(wide)
    largest = tl.max(magnitude.to(tl.int32, bitcast=True), axis=1, keep_dims=True)
    largest = largest.to(tl.float32, bitcast=True)
    usable = (largest > 1e-30) & (largest < float("inf"))
    inverse = tl.where(usable, tl.div_rn(16129.0, tl.where(usable, largest, 1.0)), 0.0)
    scales = tl.where(largest <= 1e-30, 0.0, largest * 6.2000123e-05)
    numbers = tl.floor(tl.sqrt_rn(tl.maximum(magnitude * inverse - 0.25, 0.0)) + 0.5)
    numbers = tl.where(usable, tl.minimum(numbers, 127.0), 0.0)
    return tl.where(wide < 0, -numbers, numbers).to(tl.int8), scales


def matrices_of(tensor: torch.Tensor, view: str) -> torch.Tensor:
    """Return the view (..., R, C) of a parameter's state along whose last dim blocks lie. `view`:
    of the parameter's `Split`.
    """
    if view == "flatten":
        return tensor.flatten(1)
    return tensor.permute(*range(2, tensor.ndim), 0, 1) if view == "taps" else tensor


def of_matrices(matrices: torch.Tensor, shape: Any, view: str) -> torch.Tensor:
    """Return the contiguous tensor of `shape` with the view `matrices`: reverses `matrices_of`."""
    if view == "taps":
        matrices = matrices.permute(-2, -1, *range(matrices.ndim - 2))
    return matrices.reshape(shape).contiguous()

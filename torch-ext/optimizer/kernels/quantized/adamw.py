"""AdamW with both averages in 8 bits: dequantized, updated and quantized by a single launch for
each parameter.

`exp_avg` has the format of blocks.py, `exp_avg_sq` that of squares.py. A program reads and writes
whole blocks: no more of an average than a tile ever exists in fp32. The weight is computed from the
new averages before these are rounded.

[Note: elements without gradient]
Rounded to the nearest, a small `exp_avg` that shrinks by beta1 would become the number that it was,
and move its weight for ever. So an element whose gradient is exactly 0 is rounded towards zero. Not
if it equals its number but for SLACK: in a row without any gradient all elements shrink with the
scale, and keep their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..backend import use_triton
from ..elementwise.weight_update import CAUTIOUS, TO_INITIAL
from ..launch.jit import jit, launch_key
from ..weights.split import joined_tile, split_tile, wide_weight, write_weight
from . import blocks, squares
from .blocks import BLOCK, dequantized_tile, quantized_tile
from .squares import dequantized_squares_tile, squares_tile

tl = None  # Triton's language, put here by jit

TILE = 4096  # elements of a program
# Elements that the torch path holds in fp32 at a time, on CPUs and elsewhere
SLICE, SLICE_OF_DEVICE = 1 << 18, 1 << 24
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
SLACK = 0.999  # see [Note: elements without gradient]


class Averages(NamedTuple):
    """Both averages of a parameter (..., R, C), in the order of state keys."""

    m: torch.Tensor  # int8 (..., R, C)
    v: torch.Tensor  # uint8 (..., R, C)
    m_scale: torch.Tensor  # fp32 (..., R, blocks)
    v_scale: torch.Tensor  # fp32 (..., R, blocks)


class Constants(NamedTuple):
    """Numbers that a launch takes from the host."""

    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    decay: int  # form of decay, see weight_update.py

    @classmethod
    def of(cls, beta1: float, beta2: float, eps: float, decay: int) -> Constants:
        """Return the constants, each rounded to fp32 once, as kernels and torch read them."""
        numbers = [1.0 - beta1, beta2, 1.0 - beta2, eps]
        # On the CPU whatever the default device is: a graph must not wait for the device
        numbers = torch.tensor(numbers, dtype=torch.float32, device="cpu")
        return cls(*numbers.tolist(), decay)


# Numbers of a parameter that kernels read in device memory, in this order
FACTORS = ("1 - rate of decay", "rate of decay", "step size", "root of the correction of v")


def step(
    w: torch.Tensor,
    g: torch.Tensor,
    averages: Averages,
    factors: torch.Tensor,
    constants: Constants,
    rest: torch.Tensor | None = None,
    initial: torch.Tensor | None = None,
) -> None:
    """Step a weight and its averages in place; g stays unchanged. All are of shape (..., R, C).

    `factors`: fp32 (4,) on the device, see FACTORS. `rest`: of a split weight. `initial`: the
    initial weight, read for decay to it.
    """
    if not w.numel():
        return
    state = [w, *averages, *(() if rest is None else (rest,))]
    rows = [_rows(t) for t in state]
    read = [_rows(g), None if initial is None else _rows(initial)]
    of_weight, *others = rows
    own_rest = None if rest is None else others[-1]
    launch = _launch if use_triton(w.device) else _step_torch
    launch(of_weight, read[0], Averages(*others[:4]), factors, constants, own_rest, read[1])
    for tensor, stepped in zip(state, rows):
        if stepped.data_ptr() != tensor.data_ptr():  # a copy, for want of a view by rows
            tensor.copy_(stepped.view(tensor.shape))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as (rows, columns) with columns side by side: a view, or else a copy."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(
    w: torch.Tensor,
    g: torch.Tensor,
    averages: Averages,
    factors: torch.Tensor,
    constants: Constants,
    rest: torch.Tensor | None,
    initial: torch.Tensor | None,
) -> None:
    """Launch `_adamw_kernel` on tensors (R, C)."""
    rows, columns = w.shape
    is_split = rest is not None
    if is_split:
        w = w.view(torch.int16)
    # Placeholders, which the kernel does not read
    tensors = [w, w if rest is None else rest, g, w if initial is None else initial, *averages]
    strides = [t.stride(0) for t in tensors]
    *numbers, decay = constants
    chosen = (decay, is_split, BLOCK, TILE)
    key = (*launch_key(*tensors, factors), *chosen)
    programs = -(-rows * blocks.block_count(columns) // (TILE // BLOCK))
    arguments = *tensors, *strides, factors, rows, columns, *numbers, *chosen
    _adamw_kernel.launch(programs, key, *arguments, **OPTIONS)


def _step_torch(
    w: torch.Tensor,
    g: torch.Tensor,
    averages: Averages,
    factors: torch.Tensor,
    constants: Constants,
    rest: torch.Tensor | None,
    initial: torch.Tensor | None,
) -> None:
    """Compute `_launch` in torch, with the bits of the kernel, a slice of rows at a time."""
    count = max(1, (SLICE if w.device.type == "cpu" else SLICE_OF_DEVICE) // w.shape[1])
    keep, rate, size, root_of_correction = factors.unbind()
    for start in range(0, len(w), count):
        some = slice(start, start + count)
        own = Averages(*(t[some] for t in averages))
        low = None if rest is None else rest[some]
        wide, gradient = wide_weight(w[some], low), g[some].float()
        m = blocks.dequantize(own.m, own.m_scale)
        v = squares.dequantize(own.v, own.v_scale)
        m = m + (gradient - m) * constants.one_minus_beta1
        v = v * constants.beta2 + gradient * constants.one_minus_beta2 * gradient
        update = m / (squares.rounded_sqrt(v) / root_of_correction + constants.eps)
        if constants.decay == TO_INITIAL:
            wide = wide - (wide - initial[some].float()) * rate
        elif constants.decay == CAUTIOUS:
            are_opposite = (wide > 0) & (m < 0) | (wide < 0) & (m > 0)
            wide = torch.where(are_opposite, wide, wide * keep)
        else:
            wide = wide * keep
        write_weight(w[some], low, wide - update * size)
        numbers, scales = blocks.quantize(m)
        kept = blocks.dequantize(numbers, scales).abs() * SLACK
        is_above = (gradient == 0) & (kept > m.abs())
        numbers = torch.where(is_above, numbers - numbers.sign(), numbers)
        of_squares, scales_of_squares = squares.quantize(v)
        new = Averages(numbers, of_squares, scales, scales_of_squares)
        torch._foreach_copy_(list(own), list(new))


def wide_momenta(M: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return 8-bit `exp_avg` in fp32, for sums of metrics."""
    return [blocks.dequantize(m, scale) for m, scale in zip(M, scales)]


@jit
def _adamw_kernel(
    weights,
    rests,
    gradients,
    initials,
    m_numbers,
    v_numbers,
    m_scales,
    v_scales,
    w_stride,
    rest_stride,
    g_stride,
    initial_stride,
    m_stride,
    v_stride,
    m_scale_stride,
    v_scale_stride,
    factors,
    rows,
    columns,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    DECAY: tl.constexpr,
    SPLIT: tl.constexpr,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute `step` for a tile of TILE / LENGTH blocks, each a row of the tile. Strides: from row
    to row, in elements.
    """
    of_row = (columns + (LENGTH - 1)) // LENGTH
    place = tl.program_id(0).to(tl.int64) * (TILE // LENGTH)
    place += tl.arange(0, TILE // LENGTH)[:, None]
    row = place // of_row
    block = (place - row * of_row).to(tl.int32)
    column = block * LENGTH + tl.arange(0, LENGTH)[None, :]
    is_row = row < rows
    inside = is_row & (column < columns)
    w_at = weights + row * w_stride + column
    rest_at = rests + row * rest_stride + column
    m_at = m_numbers + row * m_stride + column
    v_at = v_numbers + row * v_stride + column
    m_scale_at = m_scales + row * m_scale_stride + block
    v_scale_at = v_scales + row * v_scale_stride + block
    # 0 beside the matrix: the scale of a block is its largest magnitude
    g = tl.load(gradients + row * g_stride + column, mask=inside, other=0.0).to(tl.float32)
    m_scale = tl.load(m_scale_at, mask=is_row, other=0.0)
    v_scale = tl.load(v_scale_at, mask=is_row, other=0.0)
    m = dequantized_tile(tl.load(m_at, mask=inside, other=0), m_scale)
    v = dequantized_squares_tile(tl.load(v_at, mask=inside, other=0), v_scale)
    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + g * one_minus_beta2 * g
    root = tl.div_rn(tl.sqrt_rn(v), tl.load(factors + 3) + tl.zeros_like(v))
    update = tl.div_rn(m, root + eps)
    if SPLIT:
        low = tl.load(rest_at, mask=inside, other=0)
        w = joined_tile(tl.load(w_at, mask=inside, other=0), low)
    else:
        w = tl.load(w_at, mask=inside, other=0.0).to(tl.float32)
    keep = tl.load(factors)
    if DECAY == 2:  # TO_INITIAL
        first = tl.load(initials + row * initial_stride + column, mask=inside, other=0.0)
        w = w - (w - first.to(tl.float32)) * tl.load(factors + 1)
    elif DECAY == 1:  # CAUTIOUS
        opposite = ((w > 0) & (m < 0)) | ((w < 0) & (m > 0))
        w = tl.where(opposite, w, w * keep)
    else:
        w = w * keep
    w = w - update * tl.load(factors + 2)
    if SPLIT:
        high, low = split_tile(w)
        tl.store(w_at, high, mask=inside)
        tl.store(rest_at, low, mask=inside)
    else:
        tl.store(w_at, w.to(weights.dtype.element_ty), mask=inside)
    numbers, m_scale = quantized_tile(m)
    kept = tl.abs(dequantized_tile(numbers, m_scale)) * 0.999
    above = (g == 0) & (kept > tl.abs(m))
    sign = tl.where(numbers > 0, 1, tl.where(numbers < 0, -1, 0)).to(tl.int8)
    tl.store(m_at, tl.where(above, numbers - sign, numbers).to(tl.int8), mask=inside)
    tl.store(m_scale_at, m_scale, mask=is_row)
    numbers, v_scale = squares_tile(v)
    tl.store(v_at, numbers, mask=inside)
    tl.store(v_scale_at, v_scale, mask=is_row)

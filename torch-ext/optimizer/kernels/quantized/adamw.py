"""AdamW with both averages in 8 bits: dequantized, updated and quantized by a single launch for
each parameter.

`exp_avg` has the format of blocks.py, `exp_avg_sq` that of squares.py. A program reads and writes
whole blocks: no more of an average than a tile ever exists in fp32. The weight is computed from the
new averages before these are rounded.

[Note: elements without gradient]
A small `exp_avg` that shrinks by beta1 would be rounded back to its old number in every step, and
move its weight for ever. So an element whose gradient is exactly 0 is rounded towards zero.
Exception: an element within a factor SLACK of its number keeps the number. In a row without any
gradient all elements shrink with the scale, and their numbers stay.

[Note: ranges]
On NVIDIA's GPUs a tile takes one of two paths with equal bits. The usual one rounds roots and
quotients by the functions of rounded.py, which need operands in the middle of fp32's range. Powers
of two move them there, and change no bit: v times 2^90, m and its divisor times 2^80. An m that is
0 or from 2^-86 to 2^40 and any v below 2^34 then fit, with an eps from 2^-56 to 2^39 and a root of
the correction of v from 2^-14 on: the divisor of m is below 2^40, and no update is subnormal. All
further tiles (NaN, Inf, an eps of 0), and all tiles elsewhere, take `sqrt_rn` and `div_rn`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..backend import is_nvidia, use_triton
from ..elementwise.weight_update import CAUTIOUS, TO_INITIAL
from ..launch.jit import jit, launch_key
from ..weights.split import joined_tile, split_tile, wide_weight, write_weight
from . import blocks, squares
from .blocks import BLOCK, dequantized_tile, quantized_tile
from .rounded import quotient_tile, reciprocal_tile, root_tile
from .squares import dequantized_squares_tile, squares_tile

tl = None  # Triton's language, put here by jit

TILE = 1024  # elements of a program
ACCESS = 4  # elements of a thread side by side: the bytes of an average lie as fp32 weights do
# Elements that the torch path holds in fp32 at a time, on CPUs and elsewhere
SLICE, SLICE_OF_DEVICE = 1 << 18, 1 << 24
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
# Contiguous tensors. Without the limit of registers the rare path sets the count of every program:
# an embedding took 1.84 in place of 1.69 ms (measured on an H100, docs/memory.md)
OPTIONS_OF_NVIDIA = {**OPTIONS, "maxnreg": 80}
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
    if rest is not None:
        w = w.view(torch.int16)
    # Placeholders, which the kernel does not read
    tensors = [w, w if rest is None else rest, g, w if initial is None else initial, *averages]
    rows, columns = w.shape
    of_row = blocks.block_count(columns)
    count = rows * of_row  # 32 bits in the kernel: 2^31 blocks are 64 G elements and more
    strides = [t.stride(0) for t in tensors]
    # All contiguous: a row of the kernel is a block, and no index is divided
    is_flat = columns % BLOCK == 0 and strides == [columns] * 6 + [of_row] * 2
    if is_flat:
        rows, strides = count, [BLOCK] * 8
    *numbers, decay = constants
    nvidia = is_nvidia(w.device)
    options = OPTIONS_OF_NVIDIA if nvidia and is_flat else OPTIONS
    chosen = (decay, rest is not None, nvidia, is_flat, ACCESS, BLOCK, TILE, SLACK)
    key = (*launch_key(*tensors, factors), *chosen)
    arguments = *tensors, *strides, factors, rows, columns, *numbers, *chosen
    _adamw_kernel.launch(-(-count // (TILE // BLOCK)), key, *arguments, **options)


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
        update = m / (blocks.rounded_sqrt(v) / root_of_correction + constants.eps)
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


def wide_momenta(
    M: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor | None],
) -> list[torch.Tensor]:
    """Return elements of 8-bit `exp_avg` in fp32, for sums of metrics. `indices`: places in each
    tensor, row-major; for None the whole tensor.
    """
    found = []
    for m, scale, places in zip(M, scales, indices):
        if places is None:
            found.append(blocks.dequantize(m, scale))
            continue
        row = places // m.shape[-1]
        block = row * scale.shape[-1] + (places - row * m.shape[-1]) // BLOCK
        numbers = m.reshape(-1)[places].float()
        found.append(numbers * numbers.abs() * scale.reshape(-1)[block])
    return found


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
    NVIDIA: tl.constexpr,
    FLAT: tl.constexpr,
    ACCESS: tl.constexpr,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
    SLACK: tl.constexpr,
):
    """Compute `step` for a tile of TILE / LENGTH blocks, each a row of the tile. Strides: from row
    to row, in elements. NVIDIA: whether the GPU is NVIDIA's. FLAT: whether all tensors are
    contiguous and of whole blocks, which `rows` then counts. ACCESS: elements of a thread side by
    side. SLACK: see [Note: elements without gradient].
    """
    block = tl.arange(0, TILE // LENGTH)[:, None]
    column = tl.arange(0, LENGTH)[None, :]
    if FLAT:
        start = tl.program_id(0).to(tl.int64) * TILE
        is_row = block < rows - tl.program_id(0) * (TILE // LENGTH)
        inside = is_row & (column < LENGTH)
        row = 0
        column = block * LENGTH + column
    else:
        start = 0
        of_row = (columns + (LENGTH - 1)) // LENGTH
        block += tl.program_id(0) * (TILE // LENGTH)
        row = block // of_row
        block -= row * of_row
        column += block * LENGTH
        is_row = row < rows
        inside = is_row & (column < columns)
        row = row.to(tl.int64)
    w_at = _places(weights + start, row, w_stride, column, FLAT, ACCESS)
    rest_at = _places(rests + start, row, rest_stride, column, FLAT, ACCESS)
    g_at = _places(gradients + start, row, g_stride, column, FLAT, ACCESS)
    m_at = _places(m_numbers + start, row, m_stride, column, FLAT, ACCESS)
    v_at = _places(v_numbers + start, row, v_stride, column, FLAT, ACCESS)
    m_scale_at = _places(m_scales + start // LENGTH, row, m_scale_stride, block, FLAT, 1)
    v_scale_at = _places(v_scales + start // LENGTH, row, v_scale_stride, block, FLAT, 1)
    # 0 beside the matrix: the scale of a block is its largest magnitude
    g = tl.load(g_at, mask=inside, other=0.0).to(tl.float32)
    m_scale = tl.load(m_scale_at, mask=is_row, other=0.0)
    v_scale = tl.load(v_scale_at, mask=is_row, other=0.0)
    m = tl.load(m_at, mask=inside, other=0)
    v = tl.load(v_at, mask=inside, other=0)
    if SPLIT:
        low = tl.load(rest_at, mask=inside, other=0)
        w = joined_tile(tl.load(w_at, mask=inside, other=0), low)
    else:
        w = tl.load(w_at, mask=inside, other=0.0).to(tl.float32)
    keep = tl.load(factors)
    correction = tl.load(factors + 3)
    m = dequantized_tile(m, m_scale)
    v = dequantized_squares_tile(v, v_scale)
    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + g * one_minus_beta2 * g
    if NVIDIA:
        fits, most_m, most_v = _ranges(m, v, correction, eps)
        if fits:
            scaled = tl.fma(v, 1.2379400392853803e27, 7.888609052210118e-31)
            update = _fast_update(m, scaled, correction, eps)
            m_new, m_scale = _fast_numbers(m, g, most_m, SLACK)
            v_new, v_scale = _fast_squares(v, scaled, most_v)
        else:
            update, m_new, m_scale, v_new, v_scale = _results(m, v, g, correction, eps, SLACK)
    else:
        update, m_new, m_scale, v_new, v_scale = _results(m, v, g, correction, eps, SLACK)
    if DECAY == 2:  # TO_INITIAL
        first_at = _places(initials + start, row, initial_stride, column, FLAT, ACCESS)
        first = tl.load(first_at, mask=inside, other=0.0)
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
    tl.store(m_at, m_new, mask=inside)
    tl.store(m_scale_at, m_scale, mask=is_row)
    tl.store(v_at, v_new, mask=inside)
    tl.store(v_scale_at, v_scale, mask=is_row)


@jit
def _places(start, row, stride, column, FLAT: tl.constexpr, ACCESS: tl.constexpr):
    """Return pointers to elements of a tile."""
    places = start + column if FLAT else start + row * stride + column
    return tl.max_contiguous(places, (1, ACCESS))


@jit
def _ranges(m, v, correction, eps):
    """Return (whether a tile takes the shorter path, largest m of each row, largest v), see
    [Note: ranges].
    """
    magnitudes = tl.abs(m).to(tl.uint32, bitcast=True)
    most_m = tl.max(magnitudes, axis=1, keep_dims=True)
    # Of 0, 1 less is the largest integer
    least_m = tl.min(magnitudes - 1, axis=1, keep_dims=True)
    most_v = tl.max(v.to(tl.uint32, bitcast=True), axis=1, keep_dims=True)
    # 2^40, 2^34 and 2^-86, as integers: NaN is larger
    beyond = (most_m >= 0x53800000) | (most_v >= 0x50800000) | (least_m < 0x147FFFFF)
    fits = (eps >= 1.3877787807814457e-17) & (eps < 549755813888.0)
    fits = fits & (correction >= 6.103515625e-05) & (correction <= 1.0)
    fits = fits & (tl.max(tl.max(beyond.to(tl.int32), axis=0), axis=0) == 0)
    return fits, most_m.to(tl.float32, bitcast=True), most_v.to(tl.float32, bitcast=True)


@jit
def _results(m, v, g, correction, eps, SLACK: tl.constexpr):
    """Return (update, numbers of m, scales of m, numbers of v, scales of v) of any tile."""
    update = tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), correction + tl.zeros_like(v)) + eps)
    m_new, m_scale = _numbers(m, g, SLACK)
    v_new, v_scale = squares_tile(v)
    return update, m_new, m_scale, v_new, v_scale


@jit
def _numbers(m, g, SLACK: tl.constexpr):
    """Return (numbers, scales) of a tile m, see [Note: elements without gradient]."""
    numbers, scale = quantized_tile(m)
    kept = tl.abs(dequantized_tile(numbers, scale)) * SLACK
    above = (g == 0) & (kept > tl.abs(m))
    sign = tl.where(numbers > 0, 1, tl.where(numbers < 0, -1, 0)).to(tl.int8)
    return tl.where(above, numbers - sign, numbers).to(tl.int8), scale


@jit
def _fast_update(m, scaled, correction, eps):
    """Return the update of `_results`, see [Note: ranges]. `scaled`: v 2^90."""
    # 2^-35: the quotient is 2^80 times that of unscaled numbers
    small = correction * 2.9103830456733704e-11
    divisor = quotient_tile(root_tile(scaled), small, reciprocal_tile(small))
    divisor += eps * 1.2089258196146292e24
    return quotient_tile(m * 1.2089258196146292e24, divisor, reciprocal_tile(divisor))


@jit
def _fast_numbers(m, g, largest, SLACK: tl.constexpr):
    """Return `_numbers` of m; `largest`: of each row."""
    usable = largest > 1e-30
    divisor = tl.where(usable, largest, 1.0)
    inverse = quotient_tile(16129.0, divisor, reciprocal_tile(divisor))
    inverse = tl.where(usable, inverse, 0.0)
    scale = tl.where(usable, largest * 6.2000123e-05, 0.0)
    magnitude = tl.abs(m)
    # At least 2^-20 in place of 0: both become the number 0
    square = tl.maximum(magnitude * inverse - 0.25, 9.5367431640625e-07)
    number = (root_tile(square) + 0.5).to(tl.int32)
    wide = number.to(tl.float32)
    above = (g == 0) & (wide * wide * scale * SLACK > magnitude)
    number = tl.where(above, number - 1, number)
    return tl.where(m < 0, 0 - number, number).to(tl.int8), scale


@jit
def _fast_squares(v, scaled, largest):
    """Return `squares_tile` of v; `scaled`: v 2^90; `largest`: of each row."""
    usable = largest > 1.1754943508222875e-38
    divisor = tl.where(usable, largest * 1.2379400392853803e27, 1.0)
    # Where v is 0, x is 2^-100, and quotients may be subnormal, both beside the range of
    # `quotient_tile`. Such quotients are below 2^-60: 0.5, added to `share`, stays 0.5
    share = quotient_tile(scaled, divisor, reciprocal_tile(divisor)) * 4228250625.0
    square = tl.maximum(root_tile(share + 0.5) - 0.75, 9.5367431640625e-07)
    number = (root_tile(square) + 0.5).to(tl.int32)
    # At least 1 where v is above zero: its bits, as an integer, are then at least 1
    number = tl.maximum(number, tl.minimum(v.to(tl.int32, bitcast=True), usable.to(tl.int32)))
    return number.to(tl.uint8), tl.where(usable, largest, 0.0)

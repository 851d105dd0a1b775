"""Kernels that count where roots and quotients of rounded.py differ from `sqrt_rn` and `div_rn`, and their launches."""
from __future__ import annotations

import torch

from tests.ranks import part

tl = None  # Triton's language, put here by jit
jit, rounded = part("kernels.launch.jit").jit, part("kernels.quantized.rounded")
root_tile, reciprocal_tile, quotient_tile = rounded.root_tile, rounded.reciprocal_tile, rounded.quotient_tile

MANTISSAS = 1 << 23
MOST_DIVISORS = 1000  # for which all quotients are computed
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@jit
def roots_kernel(count, first, TILE: tl.constexpr):
    """Count wrong roots of TILE numbers from that with the bits `first` on, a tile for each program."""
    x = (tl.program_id(0) * TILE + tl.arange(0, TILE) + first).to(tl.float32, bitcast=True)
    wrong = root_tile(x).to(tl.int32, bitcast=True) != tl.sqrt_rn(x).to(tl.int32, bitcast=True)
    tl.atomic_add(count, tl.sum(wrong.to(tl.int32), axis=0))


@jit
def reciprocals_kernel(found, TILE: tl.constexpr):
    """Write 1 where the reciprocal of a number from 1 to 2 is not the nearest, else 0."""
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    y = (places + 0x3F800000).to(tl.float32, bitcast=True)
    tl.store(found + places, (reciprocal_tile(y) != tl.div_rn(tl.full((TILE,), 1.0, tl.float32), y)).to(tl.int8))


@jit
def dividends_kernel(count, divisors, TILE: tl.constexpr):
    """Count wrong quotients of all numbers from 1 to 2 and the divisor of a row of programs."""
    x = (tl.program_id(0) % (8388608 // TILE) * TILE + tl.arange(0, TILE) + 0x3F800000).to(tl.float32, bitcast=True)
    y = tl.load(divisors + tl.program_id(0) // (8388608 // TILE)) + tl.zeros_like(x)
    wrong = quotient_tile(x, y, reciprocal_tile(y)).to(tl.int32, bitcast=True) != tl.div_rn(x, y).to(
        tl.int32, bitcast=True)
    tl.atomic_add(count, tl.sum(wrong.to(tl.int32), axis=0))


@jit
def quotients_kernel(count, seed, least_x, span_x, least_y, span_y, TILE: tl.constexpr):
    """Count wrong quotients of random numbers with exponents from least_x and least_y on."""
    one, two, three, _ = tl.randint4x(seed, tl.program_id(0) * TILE + tl.arange(0, TILE))
    one, two, three = (one.to(tl.int32, bitcast=True), two.to(tl.int32, bitcast=True), three.to(tl.int32, bitcast=True))
    x_exponent = least_x + (three & 0xFFFF) % span_x
    y_exponent = least_y + ((three >> 16) & 0xFFFF) % span_y
    x = (((x_exponent + 127) << 23) | (one & 0x7FFFFF)).to(tl.float32, bitcast=True)
    y = (((y_exponent + 127) << 23) | (two & 0x7FFFFF)).to(tl.float32, bitcast=True)
    wrong = quotient_tile(x, y, reciprocal_tile(y)).to(tl.int32, bitcast=True) != tl.div_rn(x, y).to(
        tl.int32, bitcast=True)
    tl.atomic_add(count, tl.sum(wrong.to(tl.int32), axis=0))


def wrong_roots(tile=1024, mantissas=MANTISSAS, device="cuda"):
    """Of numbers from 1 to 4: all others are these times powers of 4."""
    count = torch.zeros(1, dtype=torch.int32, device=device)
    roots_kernel[2 * mantissas // tile, 1, 1](count, 0x3F800000, TILE=tile, **OPTIONS)
    return count.item()


def wrong_quotients(tile=1024, mantissas=MANTISSAS, samples=1 << 30, device="cuda"):
    """(number of divisors whose reciprocal is not the nearest number, wrong quotients by the first MOST_DIVISORS of
    these, of random numbers, and of small ones from 2^-126 on). With the nearest reciprocal a quotient is right by a
    theorem of Markstein ("Computation of elementary functions on the IBM RISC System/6000 processor", IBM Journal of
    Research and Development 34(1), 1990).
    """
    found = torch.zeros(MANTISSAS, dtype=torch.int8, device=device)
    reciprocals_kernel[mantissas // tile, 1, 1](found, TILE=tile, **OPTIONS)
    divisors = (found.nonzero()[:, 0].int() + 0x3F800000).view(torch.float32)
    counts = torch.zeros(3, dtype=torch.int32, device=device)
    if some := min(len(divisors), MOST_DIVISORS):
        dividends_kernel[some * (MANTISSAS // tile), 1, 1](counts, divisors, TILE=tile, **OPTIONS)
    for i, ranges in enumerate([(-60, 120, 24, 40), (-69, 30, 20, 37)]):
        quotients_kernel[samples // tile, 1, 1](counts[i + 1:], 5 + i, *ranges, TILE=tile, **OPTIONS)
    return [len(divisors), *counts.tolist()]

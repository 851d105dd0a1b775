"""Roots and quotients of fp32 tiles on NVIDIA's GPUs, rounded correctly without a branch.

`sqrt_rn` and `div_rn` branch once for each element, to a routine for operands near the ends of
fp32's range. The branches of a thread run one after another, and no instruction moves across them.
The usual path of both is an approximation by the GPU, corrected by fused multiply-adds. This module
computes the usual path alone, in the same operations, for operands whose range the caller knows.
tests/test_rounded.py compares the results with `sqrt_rn` and `div_rn`.

The approximation of a reciprocal has to be the GPU's own. rsqrt(x)^2 is as close to 1 / x, but with
it quotients by some divisors near a power of 2 were wrong in the last bit.
"""

from __future__ import annotations

from ..launch.jit import jit

tl = None  # Triton's language, put here by jit


@jit
def root_tile(x):
    """Return the square root of x, correctly rounded. x: finite, from 2^-100 on."""
    inverse = tl.rsqrt(x)
    root = x * inverse
    # `* -1.0` is a sign of the operand, `-root` a subtraction
    return tl.fma(tl.fma(root * -1.0, root, x), inverse * 0.5, root)


@jit
def reciprocal_tile(x):
    """Return 1 / x for `quotient_tile`. x: from 2^-125 to 2^125."""
    near = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.fma(near, tl.fma(x * -1.0, near, 1.0), near)


@jit
def quotient_tile(x, y, inverse):
    """Return x / y, correctly rounded. `inverse`: `reciprocal_tile` of y.

    x: 0, or of a magnitude from 2^-70 on: the remainder is a number of fp32 then. The quotient: 0,
    or from 2^-126 on. A subnormal quotient is rounded twice, 5 of 2^30 random ones to the wrong
    side (on an H100).
    """
    quotient = x * inverse
    return tl.fma(tl.fma(y * -1.0, quotient, x), inverse, quotient)

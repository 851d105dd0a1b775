"""Choice between the standard and the Gram iteration for a shape; FLOPs and scratch bytes of one
matrix.
"""

from __future__ import annotations

import functools

import torch

from ..kernels.onchip import polar
from .coefficients import ALL, F16, SMALL, Steps

WIDE = torch.float32, torch.bfloat16, torch.float16  # dtypes of matrices
# FLOPs that a CPU does while it mirrors one element of a symmetric matrix (docs/kernels.md)
CPU_MIRROR = 250
CPU_CALL = 500_000  # FLOPs that it does while it calls a product


def cost(R: int, C: int, steps: Steps) -> int:
    """Return the FLOPs that one (R, C) matrix needs, a symmetric result counted once. Owners are
    balanced by it where no times were measured.
    """
    n, m = sorted((R, C))
    return _cost(n, m, launches(n, m, steps))


def _cost(n, m, made):
    return (made["gram"] + 2 * made["product"]) * n * n * m + made["symmetric"] * n**3


def launches(n: int, m: int, steps: Steps) -> dict[str, int]:
    """Return how many products of each kind a stack of (n, m) matrices takes, n <= m, in fp16
    outside the chip.
    """
    return _launches(steps, F16, longest(n, m, steps), min(n, SMALL))


@functools.lru_cache(maxsize=1024)
def _launches(steps, dtype, most, n):
    """A step takes three n x n products besides its square, but for the last of a segment, which
    takes one, and none if it is also the first; a pair takes one less.
    """
    segments, pairs = steps.segments(dtype, most, n), steps.pairs(dtype, most, n)
    squares = sum(c != 0 for _, _, c in steps.triples)
    symmetric = (
        squares + 3 * (len(steps.triples) - len(segments)) - sum(pair is not None for pair in pairs)
    )
    return {"gram": len(segments), "symmetric": symmetric, "product": len(segments)}


def _cpu_cost(n, m, steps, dtype, most):
    """Return the time that an (n, m) matrix takes a CPU, in FLOPs: symmetric results are computed
    in full, and mirrored in the Gram iteration.
    """
    made, mirrored = _launches(steps, dtype, most, min(n, SMALL)), most > 1
    squares, calls = made["gram"] + made["symmetric"], sum(made.values())
    flops = 2 * (made["gram"] + made["product"]) * n * n * m + 2 * made["symmetric"] * n**3
    return flops + CPU_CALL * calls + (CPU_MIRROR * n * n + CPU_CALL) * squares * mirrored


@functools.lru_cache(maxsize=4096)
def longest(n: int, m: int, steps: Steps, dtype: torch.dtype = F16, on_cpu: bool = False) -> int:
    """Return the most steps between restarts: 1 is the standard iteration, others the Gram
    iteration, taken where it saves a tenth of the FLOPs. From LARGE on it is 2, which is more exact
    than 3, unless 3 saves another twentieth. Smaller matrices take 3 at once, to share launches
    with a model's long ones of the same short side.

    `on_cpu`, for products in fp32: the result is 1 where the Gram iteration saves less than a tenth
    of a CPU's time. Else it is the same as without `on_cpu`, so that the memory of `scratch`
    suffices.

    Of cubic steps always many: it costs no more, and a I + b A, rounded to 16 bits, loses more of b
    A than of b A + c A^2.
    """
    if steps.cubic:
        return ALL
    costs = {most: _cost(n, m, _launches(steps, dtype, most, min(n, SMALL))) for most in (1, 2, 3)}
    best = 2 if n >= LARGE and 100 * costs[2] <= 90 * costs[1] else 1
    best = 3 if 100 * costs[3] <= (90 if best == 1 else 95) * costs[best] else best
    slow = on_cpu and _cpu_cost(n, m, steps, dtype, best) > 0.9 * _cpu_cost(n, m, steps, dtype, 1)
    return 1 if slow else best


def products_dtype(dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of products: the chosen one, else fp32 on a CPU and fp16 elsewhere."""
    return dtype or (torch.float32 if device.type == "cpu" else torch.float16)


def scratch(R: int, C: int, steps: Steps, dtype: torch.dtype) -> tuple:
    """What one (R, C) matrix takes of the `memory` of `orthogonalize_` with products in dtype:
    (key, bytes of the first two, of the third).

    Matrices of one key are iterated together and need the sum of it; keys follow each other and
    share their memory.
    """
    n, m = sorted((R, C))
    most = longest(n, m, steps, dtype)
    return (_key(n, m, most), *takes(n, m, dtype.itemsize, most))


def _key(n, m, most):
    """Equal for matrices that share launches: those of one short side, in the standard iteration of
    one shape.
    """
    return n, most, m if most == 1 else 0


def splits(R: int, C: int, steps: Steps) -> bool:
    """Say whether (R, C) matrices may be Splits: those that are small, or scaled row by row, are
    read as a whole. So are rows of other lengths than multiples of 16, which the compiler would
    read in other orders than a whole matrix.
    """
    return not (C % 16 or steps.aol or polar.is_small(*sorted((R, C))))


LARGE = 3072  # short sides from here on fill a GPU alone (measured on an H200, docs/log.md)
MANY = 160_000_000  # numbers of all matrices up to which `gain_side_by_side` is true


def takes(n: int, m: int, itemsize: int, most: int) -> tuple[int, int]:
    """Return the bytes that `iterate` takes at most for one (n, m) matrix, n <= m: of its own
    shape, in two equal parts, and of n x n, with its scale.
    """
    long, short = (n * (side * itemsize + -side * itemsize % LINE) for side in (m, n))
    return 2 * long, (4 if most > 1 else 2) * short + LINE


def gain_side_by_side(shapes) -> bool:
    """Say whether the iterations of matrices (n, m), n <= m, are done earlier side by side: one
    fills the processors that another leaves idle, but large products drive each other out of the
    cache (measured on an H200, docs/log.md).
    """
    return max(n for n, _ in shapes) < LARGE and sum(n * m for n, m in shapes) <= MANY


# Bytes of the cache: TMA wants rows at multiples of 16, but those within lines take a third longer
LINE = 128

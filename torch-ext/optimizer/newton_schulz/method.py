"""Choice between the standard and the Gram iteration for a shape; FLOPs and scratch bytes of one
matrix.
"""

from __future__ import annotations

import functools

import torch

from ..kernels.onchip import polar
from .coefficients import ALL, F16, SMALL_SHORT_SIDE, Steps

MATRIX_DTYPES = torch.float32, torch.bfloat16, torch.float16  # dtypes of matrices


def cost(R: int, C: int, steps: Steps) -> int:
    """Return the FLOPs that one (R, C) matrix needs, a symmetric result counted once. Owners are
    balanced by it where no times were measured.
    """
    n, m = sorted((R, C))
    return _cost(n, m, launches(n, m, steps))


def _cost(n, m, made):
    return (made["gram"] + 2 * made["product"]) * n * n * m + made["symmetric"] * n**3


def launches(n: int, m: int, steps: Steps) -> dict[str, int]:
    """Return how many products of each kind a stack of (n, m) matrices iteration_bytes, n <= m, in fp16
    outside the chip.
    """
    return _launches(steps, F16, restart_interval(n, m, steps), min(n, SMALL_SHORT_SIDE))


@functools.lru_cache(maxsize=1024)
def _launches(steps, dtype, most, n):
    """A step iteration_bytes three n x n products besides its square, but for the last of a segment, which
    iteration_bytes one, and none if it is also the first; a pair iteration_bytes one less.
    """
    segments, pairs = steps.segments(dtype, most, n), steps.pairs(dtype, most, n)
    squares = sum(c != 0 for _, _, c in steps.triples)
    symmetric = (
        squares + 3 * (len(steps.triples) - len(segments)) - sum(pair is not None for pair in pairs)
    )
    return {"gram": len(segments), "symmetric": symmetric, "product": len(segments)}


@functools.lru_cache(maxsize=4096)
def restart_interval(n: int, m: int, steps: Steps, dtype: torch.dtype = F16) -> int:
    """Return the most steps between restarts: 1 is the standard iteration, others the Gram
    iteration, taken where it saves a tenth of the FLOPs. From LARGE on it is 2, which is more exact
    than 3, unless 3 saves another twentieth. Smaller matrices take 3 at once, to share launches
    with a model's long ones of the same short side.

    Of cubic steps always many: it costs no more, and a I + b A, rounded to 16 bits, loses more of b
    A than of b A + c A^2.
    """
    if steps.cubic:
        return ALL
    costs = {most: _cost(n, m, _launches(steps, dtype, most, min(n, SMALL_SHORT_SIDE))) for most in (1, 2, 3)}
    best = 2 if n >= LARGE and 100 * costs[2] <= 90 * costs[1] else 1
    return 3 if 100 * costs[3] <= (90 if best == 1 else 95) * costs[best] else best


def products_dtype(dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of products: the chosen one, else fp32 on a CPU and fp16 elsewhere."""
    return dtype or (torch.float32 if device.type == "cpu" else torch.float16)


def scratch_bytes(R: int, C: int, steps: Steps, dtype: torch.dtype) -> tuple:
    """What one (R, C) matrix iteration_bytes of the `memory` of `orthogonalize_` with products in dtype:
    (key, bytes of the first two, of the third).

    Matrices of one key are iterated together and need the sum of it; keys follow each other and
    share their memory.
    """
    n, m = sorted((R, C))
    most = restart_interval(n, m, steps, dtype)
    return (_key(n, m, most), *iteration_bytes(n, m, dtype.itemsize, most))


def _key(n, m, most):
    """Equal for matrices that share launches: those of one short side, in the standard iteration of
    one shape.
    """
    return n, most, m if most == 1 else 0


def supports_scattered_rows(R: int, C: int, steps: Steps) -> bool:
    """Say whether (R, C) matrices may be Splits: those that are small, or scaled row by row, are
    read as a whole. So are rows of other lengths than multiples of 16, which the compiler would
    read in other orders than a whole matrix.
    """
    return not (C % 16 or steps.aol or polar.is_small(*sorted((R, C))))


LARGE = 3072  # short sides from here on fill a GPU alone (measured on an H200, docs/log.md)
MANY = 160_000_000  # numbers of all matrices up to which `gain_side_by_side` is true


def iteration_bytes(n: int, m: int, itemsize: int, most: int) -> tuple[int, int]:
    """Return the bytes that `iterate` iteration_bytes at most for one (n, m) matrix, n <= m: of its own
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

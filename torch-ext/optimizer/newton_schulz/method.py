"""Choice between the standard and the Gram iteration for a shape; FLOPs and scratch bytes of one
matrix.

The choice is the restart interval: 1 is the standard iteration, more the Gram iteration (formulas
in iteration.py). Everything depends on shapes, dtypes and coefficients only, never on a device's
state, so all ranks choose alike, and planning can ask without tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ..kernels.onchip import polar
from .coefficients import F16, NO_RESTART, SMALL_SHORT_SIDE, Steps

MATRIX_DTYPES = torch.float32, torch.bfloat16, torch.float16
# TMA reads rows at any multiple of 16 bytes, but takes a third longer for rows that begin inside a
# cache line: rows of scratch begin at multiples of a line
CACHE_LINE_BYTES = 128
# Short sides from here on fill a GPU with one matrix (measured on an H200, docs/log.md)
LARGE_SHORT_SIDE = 3072
# Elements of all matrices up to which `gain_side_by_side` is true
MAX_SIDE_BY_SIDE_ELEMENTS = 160_000_000

# Most FLOPs of the Gram iteration in percent of the standard iteration, of schedules of up to five
# steps and of longer ones in fp16, whose standard iteration has the larger errors (docs/math.md,
# "Cuts of more than five steps"); and of a longer interval in percent of a shorter one
MAX_COST = 90
MAX_COST_LONG = 94
MAX_COST_OVER_GRAM = 95

# Times of a CPU in fp32, counted in FLOPs of its products (docs/kernels.md): to mirror an element
# of a symmetric matrix, and to call a product
CPU_MIRROR = 250
CPU_CALL = 500_000


def cost(R: int, C: int, steps: Steps) -> int:
    """Return the FLOPs to orthogonalize an (R, C) matrix, half of each symmetric product counted.

    Balances owners on GPUs without measured times.
    """
    n, m = sorted((R, C))
    return _cost(n, m, launches(n, m, steps))


def _cost(n: int, m: int, counts: dict[str, int]) -> int:
    """Return the FLOPs of products, `counts` as from `launches`: n^2 m for X X^T, 2 n^2 m for Q X,
    n^3 for a symmetric product.
    """
    return (counts["gram"] + 2 * counts["product"]) * n * n * m + counts["symmetric"] * n**3


def launches(n: int, m: int, steps: Steps) -> dict[str, int]:
    """Return how many products of each kind iterate a stack of (n, m) matrices, n <= m, in fp16.

    {"gram": X X^T, "symmetric": n x n products, "product": Q X}. Matrices that an onchip kernel
    iterates need fewer launches, but the products are counted alike.
    """
    # The cost model assumes fp16, the default on GPUs, whatever `ns_dtype`
    return _launches(steps, F16, restart_interval(n, m, steps), min(n, SMALL_SHORT_SIDE))


@functools.lru_cache(maxsize=1024)
def _launches(steps: Steps, dtype: torch.dtype, max_steps: int, n: int) -> dict[str, int]:
    """Return `launches` for a given dtype and restart interval.

    An interval of L steps takes A^2 for each step with c != 0, and 3 (L - 1) further products: two
    for the next A and one for Q per step, without the A of the last and the Q of the first step. A
    fused pair saves one product. `n`: short side, or SMALL_SHORT_SIDE for larger matrices, which
    `Steps.intervals` cuts alike; keeps the cache small.
    """
    intervals = steps.intervals(dtype, max_steps, n)
    pairs = steps.pairs(dtype, max_steps, n)
    squares = sum(c != 0 for _, _, c in steps.triples)
    symmetric = (
        squares
        + 3 * (len(steps.triples) - len(intervals))
        - sum(pair is not None for pair in pairs)
    )
    return {"gram": len(intervals), "symmetric": symmetric, "product": len(intervals)}


def _cpu_cost(n: int, m: int, steps: Steps, dtype: torch.dtype, max_steps: int) -> int:
    """Return the time of an (n, m) matrix on a CPU, in FLOPs. A CPU computes symmetric products in
    full, and the Gram iteration also mirrors each result.
    """
    counts = _launches(steps, dtype, max_steps, min(n, SMALL_SHORT_SIDE))
    mirrored = max_steps > 1
    squares = counts["gram"] + counts["symmetric"]
    calls = sum(counts.values())
    long_flops = 2 * (counts["gram"] + counts["product"]) * n * n * m
    flops = long_flops + 2 * counts["symmetric"] * n**3
    return flops + CPU_CALL * calls + (CPU_MIRROR * n * n + CPU_CALL) * squares * mirrored


@functools.lru_cache(maxsize=4096)
def restart_interval(
    n: int, m: int, steps: Steps, dtype: torch.dtype = F16, on_cpu: bool = False
) -> int:
    """Return the most steps between restarts for (n, m) matrices, n <= m, with products in `dtype`.

    1 is the standard iteration. The Gram iteration is chosen if it saves a tenth of the FLOPs, or
    of more than five steps in fp16 6 %, with an interval of

    - 2, which is more exact: for five steps of `polar_express` in fp16 up to an aspect ratio of
      1.74.
    - 3 if it saves another twentieth, or has the cuts of 2, and for `jordan`, for which 3 is more
      exact (`Steps.steady`).
    - NO_RESTART where late intervals may be long (`Steps.intervals`; eight steps or more) and save
      another twentieth: from aspect ratios of 1.7 to 2.1 on.
    - NO_RESTART for cubic steps (c = 0), always. The Gram iteration costs cubic steps no more, and
      the standard iteration would round a I + b A to 16 bits: that loses more of b A than of
      b A + c A^2.

    `Steps.intervals` cuts shorter intervals where the dtype demands.

    `on_cpu`, for products in fp32: 1 also if the Gram iteration saves less than a tenth of a CPU's
    time; otherwise the result without `on_cpu`, so that planned scratch (`scratch_bytes`) suffices.
    """
    if steps.cubic:
        return NO_RESTART
    key = min(n, SMALL_SHORT_SIDE)
    # Whole numbers, in percent: exact, so that all ranks decide alike
    made = {i: _launches(steps, dtype, i, key) for i in (1, 2, 3, NO_RESTART)}
    costs = {max_steps: _cost(n, m, counts) for max_steps, counts in made.items()}
    best = 1
    first = MAX_COST_LONG if dtype == F16 and len(steps.triples) > 5 else MAX_COST
    for max_steps in (3, NO_RESTART) if steps.steady else (2, 3, NO_RESTART):
        if 100 * costs[max_steps] <= (first if best == 1 else MAX_COST_OVER_GRAM) * costs[best]:
            best = max_steps
    if best == 2 and made[2] == made[3]:
        best = 3  # the same cuts; a change of ns_steps then seldom changes the batch key
    slow = on_cpu and _cpu_cost(n, m, steps, dtype, best) > 0.9 * _cpu_cost(n, m, steps, dtype, 1)
    return 1 if slow else best


def products_dtype(dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype of products: `dtype` if chosen, else fp32 on a CPU and fp16 elsewhere."""
    return dtype or (torch.float32 if device.type == "cpu" else torch.float16)


def scratch_bytes(
    R: int, C: int, steps: Steps, dtype: torch.dtype
) -> tuple[tuple[int, int, int], int, int]:
    """Return the scratch of an (R, C) matrix in `orthogonalize_`, with products in `dtype`: (batch
    key, bytes of the first two tensors of `memory` together, bytes of the third).

    Matrices of equal keys are iterated together: their bytes add up. Batches of different keys run
    in turn in shared memory: the maximum of the sums suffices.
    """
    n, m = sorted((R, C))
    max_steps = restart_interval(n, m, steps, dtype)
    return (batch_key(n, m, max_steps), *iteration_bytes(n, m, dtype.itemsize, max_steps))


def batch_key(n: int, m: int, max_steps: int) -> tuple[int, int, int]:
    """Return a key, equal for matrices in one `Iteration`: equal short sides in the Gram iteration,
    equal shapes in the standard iteration.
    """
    return n, max_steps, m if max_steps == 1 else 0


def supports_scattered_rows(R: int, C: int, steps: Steps) -> bool:
    """Whether Newton-Schulz reads and writes (R, C) matrices as `ScatteredRows`.

    Not matrices of onchip kernels, and not with AOL: both read rows or whole matrices by strides.
    C must be a multiple of 16: with other lengths the compiler reads a whole matrix in smaller
    parts than scattered rows, and sums the squares in another order, hence with other bits.
    """
    return not (C % 16 or steps.aol or polar.is_small(*sorted((R, C))))


def iteration_bytes(n: int, m: int, itemsize: int, max_steps: int) -> tuple[int, int]:
    """Return the scratch bytes of one (n, m) matrix, n <= m, in an `Iteration` at most: (X and its
    successor together, n x n matrices and fp32 factors).
    """
    long, short = (n * (side * itemsize + -side * itemsize % CACHE_LINE_BYTES) for side in (m, n))
    # A and Q, in the Gram iteration also Z and T; a line for the factors
    return 2 * long, (4 if max_steps > 1 else 2) * short + CACHE_LINE_BYTES


def gain_side_by_side(shapes: Sequence[Sequence[int]]) -> bool:
    """Whether iterations of (n, m) matrices, n <= m, end earlier side by side in a CUDA graph than
    one after another.

    A small batch leaves multiprocessors idle, which a second batch can use. Large products of two
    batches evict operands from the cache (measured on an H200, docs/log.md).
    """
    largest = max(n for n, _ in shapes)
    elements = sum(n * m for n, m in shapes)
    return largest < LARGE_SHORT_SIDE and elements <= MAX_SIDE_BY_SIDE_ELEMENTS

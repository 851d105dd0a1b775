"""Whole Newton-Schulz iterations of small matrices in a single kernel, a matrix per CTA.

`polar` orthogonalizes matrices with a short side of at most MAX_SHORT_SIDE and at most MAX_ELEMENTS
elements; on sm90 sm90_polar.py takes some of the shapes. `follow` computes a restart interval of
the Gram iteration from A = X X^T, for any long side. CTAs that keep the iteration in registers,
shared memory and cache save the launches and the memory traffic of products.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ..backend import use_triton
from ..elementwise.scaling import unit_of
from ..launch.jit import jit, launch_key, triton_dtype
from . import sm90_polar

tl = None  # Triton's language, put here by jit

MAX_SHORT_SIDE = 128
# Elements of a matrix. A single multiprocessor needs longer to read a larger matrix than launches
# that spread it over the GPU.
MAX_ELEMENTS = 1 << 16


def supports(U: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `polar` computes matrices like U (N, n, m), n <= m, with products in `dtype`."""
    small = dtype.itemsize == 2 and is_small(*U.shape[1:])
    return small and use_triton(U.device) and _tiles_of(U) is not None


def is_small(n: int, m: int) -> bool:
    """Whether `polar` supports the size of matrices (n, m), n <= m, with any dtype and device."""
    return n <= MAX_SHORT_SIDE and n * m <= MAX_ELEMENTS


def _tiles_of(U: torch.Tensor) -> tuple[tuple[int, int, int], dict[str, int]] | None:
    """((BLOCK, CHUNK, STAGES), launch options) for matrices like U (N, n, m), or None if the tiles
    do not fit shared memory.
    """
    block = 64 if U.shape[1] <= 64 else 128
    chunk = 64 if U.shape[2] <= 64 else 128
    found = pipeline_depth(
        shared_bytes(U.device.type, U.device.index), block * chunk, U.element_size()
    )
    return found and ((block, chunk, found[0]), {"num_warps": block // 16} | found[1])


def pipeline_depth(shared: int, elements: int, itemsize: int) -> tuple[int, dict[str, int]] | None:
    """(Pipeline stages of the sum of squares, launch options) for tiles of `elements` elements and
    `shared` bytes of shared memory; None if the tiles do not fit.

    The bytes per element are those of compiled kernels (tests/test_tile_config.py).
    """
    if shared >= max(3 * itemsize, 8) * elements:
        return 4, {}
    return (1, {"num_stages": 1}) if shared >= 4 * elements else None


@functools.cache
def shared_bytes(kind: str, index: int | None) -> int:
    """Bytes of shared memory that a CTA may have on device `kind:index`; 64 KiB if torch does not
    know.
    """
    device = torch.cuda.get_device_properties(index) if kind == "cuda" else None
    return getattr(device, "shared_memory_per_block_optin", 1 << 16)


def scratch_bytes(U: torch.Tensor, dtype: torch.dtype, steps: int) -> int:
    """Bytes of `memory` that `polar` needs for `steps` steps on matrices like U (N, n, m): X, if a
    matrix has more than one chunk of columns and does not stay in shared memory.
    """
    N, n, m = U.shape
    (_, chunk, _), _ = _tiles_of(U)
    return (
        0
        if m <= chunk or sm90_polar.supports(U, dtype, steps)
        else N * n * -(-m // chunk) * chunk * dtype.itemsize
    )


def polar(
    U: torch.Tensor,
    out: torch.Tensor,
    intervals: Sequence[Sequence[tuple[float, float, float]]],
    eps: float,
    dtype: torch.dtype,
    memory: torch.Tensor | None = None,
) -> None:
    """Write the approximate polar factor of every matrix of U (N, n, m), n <= m, to `out`, which
    may be U. Products and X are in `dtype`; U and out in fp32, bf16 or fp16, any strides.

    intervals: triples (a, b, c) per restart interval, from `Steps.intervals`. eps times the largest
    magnitude is added to the Frobenius norm. memory: a flat uint8 tensor of `scratch_bytes` or
    more; None to allocate.
    """
    firsts = 0  # Bit s: step s begins a restart interval
    steps = 0
    for interval in intervals:
        firsts |= 1 << steps
        steps += len(interval)
    triples = tuple(float(x) for interval in intervals for triple in interval for x in triple)
    if sm90_polar.supports(U, dtype, steps):
        return sm90_polar.polar(U, out, triples, firsts, eps, dtype)
    N, n, m = U.shape
    (block, chunk, stages), options = _tiles_of(U)
    key = (dtype, steps, firsts, *launch_key(U, out))
    # Squares of fp16 stay in the range of fp32: no second pass over U in another unit is compiled
    numbers = (triples, n, m, eps, U.dtype != torch.float16, steps)
    constants = (block, chunk, stages)
    if m <= chunk:
        return _standard_kernel.launch(
            N,
            key,
            U,
            out,
            U.stride(),
            out.stride(),
            *numbers,
            *constants,
            triton_dtype(dtype),
            **options,
        )
    nbytes = scratch_bytes(U, dtype, steps)
    memory = (
        torch.empty(nbytes, dtype=torch.uint8, device=U.device)
        if memory is None
        else memory[:nbytes]
    )
    X = memory.view(dtype).view(N, n, -1)
    _gram_kernel.launch(
        N,
        key,
        U,
        X,
        out,
        U.stride(),
        X.stride(),
        out.stride(),
        *numbers,
        firsts | 1 << steps,
        *constants,
        **options,
    )


def follows(A: torch.Tensor) -> bool:
    """Whether `follow` computes the restart intervals of Gram matrices like A (N, n, n)."""
    return use_triton(A.device) and A.element_size() == 2 and A.shape[1] <= MAX_SHORT_SIDE


def follow(
    A: torch.Tensor, Q: torch.Tensor, interval: Sequence[tuple[float, float, float]]
) -> None:
    """Write the polynomial Q of a restart interval to Q, from A = X X^T, which is only read.

    Q is the product over the steps (a, b, c) of a I + b A + c A^2; after each step A is updated to
    the Gram matrix of the updated X. A, Q (N, n, n), symmetric, of one 16-bit dtype.
    """
    N, n, _ = A.shape
    block = 64 if n <= 64 else 128
    triples = tuple(float(x) for triple in interval for x in triple)
    _interval_kernel.launch(
        N,
        (len(interval), *launch_key(A, Q)),
        A,
        Q,
        A.stride(),
        Q.stride(),
        triples,
        n,
        len(interval),
        block,
        num_warps=block // 16,
    )


@jit
def _standard_kernel(
    U,
    out,
    u_strides,
    out_strides,
    triples,
    n,
    m,
    eps,
    WIDE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Standard iteration of a matrix of at most CHUNK columns per program: X <- P X with P = a I +
    b A + c A^2 and A = X X^T.

    triples: the coefficients of all steps in a row. WIDE: U may need the second pass of
    `_sum_of_squares`. DTYPE: of products. Restarts do not matter, since A is computed in every
    step.
    """
    matrix = tl.program_id(0).to(tl.int64)
    row, column = (
        tl.arange(0, BLOCK).to(tl.int64)[:, None],
        tl.arange(0, CHUNK).to(tl.int64)[None, :],
    )
    inside = (row < n) & (column < m)
    u_address = U + matrix * u_strides[0] + row * u_strides[1]
    unit, norm = _unit_and_norm(
        U + matrix * u_strides[0], n, m, u_strides, eps, WIDE, BLOCK, CHUNK, STAGES
    )
    u = tl.load(u_address + column * u_strides[2], mask=inside, other=0.0)
    X = (u.to(tl.float32) * unit / norm).to(DTYPE)
    for step in tl.static_range(STEPS):
        sums = tl.dot(X, X.T)
        A = sums.to(DTYPE)
        P = triples[3 * step + 1] * A.to(tl.float32) + triples[3 * step + 2] * tl.dot(A, A)
        sums = tl.dot(P.to(DTYPE), X) + triples[3 * step] * X.to(tl.float32)
        X = sums.to(DTYPE)
    out_address = out + matrix * out_strides[0] + row * out_strides[1] + column * out_strides[2]
    tl.store(out_address, sums.to(out.dtype.element_ty), mask=inside)


@jit
def _gram_kernel(
    U,
    X,
    out,
    u_strides,
    x_strides,
    out_strides,
    triples,
    n,
    m,
    eps,
    WIDE: tl.constexpr,
    STEPS: tl.constexpr,
    FIRSTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gram iteration of a matrix per program. X: scratch for the scaled and cast matrix, in the
    dtype of products. FIRSTS: bit s is set if step s begins a restart interval, and bit STEPS.
    Other arguments as in `_standard_kernel`.
    """
    matrix = tl.program_id(0).to(tl.int64)
    row, column = (
        tl.arange(0, BLOCK).to(tl.int64)[:, None],
        tl.arange(0, CHUNK).to(tl.int64)[None, :],
    )
    u_address = U + matrix * u_strides[0] + row * u_strides[1]
    x_address = X + matrix * x_strides[0] + row * x_strides[1] + column
    out_address = out + matrix * out_strides[0] + row * out_strides[1]
    unit, norm = _unit_and_norm(
        U + matrix * u_strides[0], n, m, u_strides, eps, WIDE, BLOCK, CHUNK, STAGES
    )
    sums = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, m, CHUNK):
        inside = (row < n) & (k + column < m)
        u = tl.load(u_address + (k + column) * u_strides[2], mask=inside, other=0.0)
        x = (u.to(tl.float32) * unit / norm).to(X.dtype.element_ty)
        tl.store(x_address + k, x, mask=row < n)
        sums = tl.dot(x, x.T, sums)
    A = sums.to(X.dtype.element_ty)
    Q, q = A, 0.0
    for step in tl.static_range(STEPS):
        A, Q, q = _step(
            A,
            Q,
            q,
            triples[3 * step],
            triples[3 * step + 1],
            triples[3 * step + 2],
            (FIRSTS >> step) % 2 == 1,
            (FIRSTS >> (step + 1)) % 2 == 1,
            BLOCK,
        )
        if (FIRSTS >> (step + 1)) % 2 == 1:
            tl.debug_barrier()  # X is loaded by other threads than have stored it
            if step + 1 < STEPS:
                A = _restart(Q, x_address, n, m, BLOCK, CHUNK)
            else:
                _store_product(Q, x_address, out_address, out_strides[2], n, m, BLOCK, CHUNK)


@jit
def _interval_kernel(
    A, Q, a_strides, q_strides, triples, n, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute Q of a restart interval from A, a matrix per program. triples: the coefficients of
    STEPS steps in a row.
    """
    matrix = tl.program_id(0).to(tl.int64)
    row, column = (
        tl.arange(0, BLOCK).to(tl.int64)[:, None],
        tl.arange(0, BLOCK).to(tl.int64)[None, :],
    )
    inside = (row < n) & (column < n)
    address = A + matrix * a_strides[0] + row * a_strides[1] + column * a_strides[2]
    gram = tl.load(address, mask=inside, other=0.0)
    result, q = gram, 0.0
    for step in tl.static_range(STEPS):
        gram, result, q = _step(
            gram,
            result,
            q,
            triples[3 * step],
            triples[3 * step + 1],
            triples[3 * step + 2],
            step == 0,
            step == STEPS - 1,
            BLOCK,
        )
    tl.store(
        Q + matrix * q_strides[0] + row * q_strides[1] + column * q_strides[2], result, mask=inside
    )


@jit
def _step(A, Q, q, a, b, c, FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr):
    """A step of the Gram iteration, with Z = b A + c A^2: return A <- (Z + a I) A (Z + a I), and Q
    + q I <- (Q + q I) (Z + a I) as (Q, q).

    FIRST, LAST: the step's place in the restart interval. The first step leaves q I apart from Q,
    whose small elements would be lost in 16 bits. The last step adds q I to Q, and does not update
    A.
    """
    # The square of a symmetric A is symmetric in every bit, so Z need not be mirrored
    Z = (b * A.to(tl.float32) + c * tl.dot(A, A)).to(A.dtype)
    if FIRST:
        Q, q = Z, a
    else:
        Q = _rounded_symmetric(
            tl.dot(Q, Z)
            + a * Q.to(tl.float32)
            + q * Z.to(tl.float32)
            + _identity_times(q * a, BLOCK),
            A,
        )
        q = 0.0
    if LAST:
        Q = (Q.to(tl.float32) + _identity_times(q, BLOCK)).to(A.dtype)
    else:
        T = _rounded_symmetric(tl.dot(A, Z) + a * A.to(tl.float32), A)
        A = _rounded_symmetric(tl.dot(T, Z) + a * T.to(tl.float32), A)
    return A, Q, q


@jit
def _restart(Q, x_address, n, m, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """X <- Q X in place; return X X^T."""
    sums = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    inside = tl.arange(0, BLOCK)[:, None] < n
    for k in range(0, m, CHUNK):
        x = tl.dot(Q, tl.load(x_address + k, mask=inside, other=0.0)).to(Q.dtype)
        tl.store(x_address + k, x, mask=inside)
        sums = tl.dot(x, x.T, sums)
    return sums.to(Q.dtype)


@jit
def _store_product(
    Q, x_address, out_address, stride, n, m, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Store Q X to the result."""
    inside = tl.arange(0, BLOCK)[:, None] < n
    for k in range(0, m, CHUNK):
        x = tl.dot(Q, tl.load(x_address + k, mask=inside, other=0.0))
        column = k + tl.arange(0, CHUNK).to(tl.int64)[None, :]
        tl.store(
            out_address + column * stride,
            x.to(out_address.dtype.element_ty),
            mask=inside & (column < m),
        )


@jit
def _unit_and_norm(
    start,
    n,
    m,
    strides,
    eps,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return (unit, norm) of a matrix: the scaled matrix is U unit / norm, with a power of two as
    unit, and a norm of 1 for a matrix of zeros.
    """
    largest, unit, squares = _sum_of_squares(start, n, m, strides, WIDE, BLOCK, CHUNK, STAGES)
    norm = tl.sqrt(squares) + eps * (largest * unit)
    return unit, tl.where(norm == 0, 1.0, norm)


@jit
def _sum_of_squares(
    start,
    n,
    m,
    strides,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the largest magnitude of a matrix, a power of two that keeps squares in the range of
    fp32 (`unit_of` in scaling.py), and the sum of squares of the matrix times that unit.
    """
    largest, squares = _max_and_squares(start, n, m, strides, 1.0, BLOCK, CHUNK, STAGES)
    unit = unit_of(largest)
    if WIDE and unit != 1.0:
        _, squares = _max_and_squares(start, n, m, strides, unit, BLOCK, CHUNK, STAGES)
    return largest, unit, squares


@jit
def _max_and_squares(
    start, n, m, strides, unit, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr
):
    """Return the largest magnitude of a matrix, and the sum of squares of unit times the matrix."""
    largest = tl.zeros((BLOCK, CHUNK), dtype=tl.float32)
    squares = largest
    row = tl.arange(0, BLOCK)[:, None]
    for chunk in tl.range(0, tl.cdiv(m, CHUNK), num_stages=STAGES):
        column = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
        address = start + row.to(tl.int64) * strides[1] + column.to(tl.int64) * strides[2]
        u = tl.load(address, mask=(row < n) & (column < m), other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(u))
        # An explicit fma: the compiler may contract a sum of squares in either order, with other
        # bits
        squares = tl.fma(u * unit, u * unit, squares)
    return tl.max(largest), tl.sum(squares)


@jit
def _rounded_symmetric(sums, like):
    """Round to the dtype of `like`, and mirror the lower triangle."""
    rounded = sums.to(like.dtype)
    r, s = tl.arange(0, rounded.shape[0])[:, None], tl.arange(0, rounded.shape[1])[None, :]
    return tl.where(r >= s, rounded, rounded.T)


@jit
def _identity_times(value, BLOCK: tl.constexpr):
    """Return value I, of (BLOCK, BLOCK)."""
    r, s = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    return tl.where(r == s, value, 0.0)

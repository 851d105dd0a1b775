"""Whole iterations of small matrices in one program, and the Gram iteration of short sides up to
128.
"""

from __future__ import annotations

import functools

import torch

from ..backend import use_triton
from ..elementwise.scaling import unit_of
from ..launch.jit import jit, launch_key, triton_dtype
from . import sm90_polar

tl = None  # Triton's language, put here by jit

# Short side, elements; one processor reads a larger matrix for longer than launches take
LARGEST, MOST = 128, 1 << 16


def fits(U: torch.Tensor, dtype: torch.dtype) -> bool:
    """Say whether matrices U (N, n, m), n <= m, to be iterated in `dtype`, go through `polar`."""
    small = dtype.itemsize == 2 and is_small(*U.shape[1:])
    return small and use_triton(U.device) and _launch_of(U) is not None


def is_small(n: int, m: int) -> bool:
    """Say whether matrices (n, m), n <= m, go through `polar` if dtype and device allow it."""
    return n <= LARGEST and n * m <= MOST


def _launch_of(U):
    """((BLOCK, CHUNK, STAGES), options of the launch) for matrices U, or None where their tiles do
    not fit the chip.
    """
    block, chunk = 64 if U.shape[1] <= 64 else 128, 64 if U.shape[2] <= 64 else 128
    found = depth(shared_bytes(U.device.type, U.device.index), block * chunk, U.element_size())
    return found and ((block, chunk, found[0]), {"num_warps": block // 16} | found[1])


def depth(shared: int, elements: int, itemsize: int) -> tuple | None:
    """Return how far ahead tiles of so many elements are fetched, given the bytes of shared memory:
    stages of the sum of squares, and options of the launch. What they take was seen in compiled
    kernels (tests/test_tiles.py).
    """
    if shared >= max(3 * itemsize, 8) * elements:
        return 4, {}
    return (1, {"num_stages": 1}) if shared >= 4 * elements else None


@functools.cache
def shared_bytes(kind: str, index: int | None) -> int:
    """Return the bytes of shared memory that a program may have; 64 KiB where the driver does not
    say.
    """
    device = torch.cuda.get_device_properties(index) if kind == "cuda" else None
    return getattr(device, "shared_memory_per_block_optin", 1 << 16)


def takes(U: torch.Tensor, dtype: torch.dtype, steps: int) -> int:
    """Return the bytes of memory that `polar` takes for so many steps on matrices U."""
    (N, n, m), (_, chunk, _) = U.shape, _launch_of(U)[0]
    return (
        0
        if m <= chunk or sm90_polar.fits(U, dtype, steps)
        else N * n * -(-m // chunk) * chunk * dtype.itemsize
    )


def polar(
    U: torch.Tensor, out: torch.Tensor, segments, eps: float, dtype: torch.dtype, memory=None
) -> None:
    """Write to out the polar factor of every matrix of U (N, n, m), n <= m; they may be the same
    memory.

    segments: the triples (a, b, c) between restarts, as `steps.Steps.segments` gives them; memory:
    a flat uint8 tensor of the bytes that `takes` says or more, None for new memory.
    """
    firsts, steps = 0, 0
    for segment in segments:
        firsts |= 1 << steps
        steps += len(segment)
    triples = tuple(float(x) for segment in segments for triple in segment for x in triple)
    if sm90_polar.fits(U, dtype, steps):
        return sm90_polar.polar(U, out, triples, firsts, eps, dtype)
    (N, n, m), ((block, chunk, stages), options) = U.shape, _launch_of(U)
    key = (dtype, steps, firsts, *launch_key(U, out))
    numbers, constants = (
        (triples, n, m, eps, U.dtype != torch.float16, steps),
        (block, chunk, stages),
    )
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
    taken = takes(U, dtype, steps)
    memory = (
        torch.empty(taken, dtype=torch.uint8, device=U.device) if memory is None else memory[:taken]
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
    """Say whether Gram matrices A (N, n, n) go through `follow`."""
    return use_triton(A.device) and A.element_size() == 2 and A.shape[1] <= LARGEST


def follow(A: torch.Tensor, Q: torch.Tensor, segment) -> None:
    """Write to Q the product of the polynomials a I + b A + c A^2 of a segment's steps, A following
    them.

    A, Q (N, n, n), symmetric, of one dtype; segment: triples (a, b, c), as in `polar`.
    """
    N, n, _ = A.shape
    block, triples = 64 if n <= 64 else 128, tuple(float(x) for triple in segment for x in triple)
    _segment_kernel.launch(
        N,
        (len(segment), *launch_key(A, Q)),
        A,
        Q,
        A.stride(),
        Q.stride(),
        triples,
        n,
        len(segment),
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
    """One matrix of at most CHUNK columns per program: X <- P X, with P = a I + b A + c A^2 and A =
    X X^T.
    """
    matrix = tl.program_id(0).to(tl.int64)
    row, column = (
        tl.arange(0, BLOCK).to(tl.int64)[:, None],
        tl.arange(0, CHUNK).to(tl.int64)[None, :],
    )
    inside = (row < n) & (column < m)
    u_at = U + matrix * u_strides[0] + row * u_strides[1]
    unit, norm = _factors(
        U + matrix * u_strides[0], n, m, u_strides, eps, WIDE, BLOCK, CHUNK, STAGES
    )
    u = tl.load(u_at + column * u_strides[2], mask=inside, other=0.0)
    X = (u.to(tl.float32) * unit / norm).to(DTYPE)
    for step in tl.static_range(STEPS):
        sums = tl.dot(X, X.T)
        A = sums.to(DTYPE)
        P = triples[3 * step + 1] * A.to(tl.float32) + triples[3 * step + 2] * tl.dot(A, A)
        sums = tl.dot(P.to(DTYPE), X) + triples[3 * step] * X.to(tl.float32)
        X = sums.to(DTYPE)
    out_at = out + matrix * out_strides[0] + row * out_strides[1] + column * out_strides[2]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=inside)


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
    """One matrix per program. FIRSTS: bit s says that step s begins a segment, or is one after the
    last.
    """
    matrix = tl.program_id(0).to(tl.int64)
    row, column = (
        tl.arange(0, BLOCK).to(tl.int64)[:, None],
        tl.arange(0, CHUNK).to(tl.int64)[None, :],
    )
    u_at = U + matrix * u_strides[0] + row * u_strides[1]
    x_at = X + matrix * x_strides[0] + row * x_strides[1] + column
    out_at = out + matrix * out_strides[0] + row * out_strides[1]
    unit, norm = _factors(
        U + matrix * u_strides[0], n, m, u_strides, eps, WIDE, BLOCK, CHUNK, STAGES
    )
    sums = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, m, CHUNK):
        inside = (row < n) & (k + column < m)
        u = tl.load(u_at + (k + column) * u_strides[2], mask=inside, other=0.0)
        x = (u.to(tl.float32) * unit / norm).to(X.dtype.element_ty)
        tl.store(x_at + k, x, mask=row < n)
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
            tl.debug_barrier()  # other threads stored what this one loads
            if step + 1 < STEPS:
                A = _restart(Q, x_at, n, m, BLOCK, CHUNK)
            else:
                _finish(Q, x_at, out_at, out_strides[2], n, m, BLOCK, CHUNK)


@jit
def _segment_kernel(
    A, Q, a_strides, q_strides, triples, n, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Follow one matrix per program."""
    matrix = tl.program_id(0).to(tl.int64)
    row, column = (
        tl.arange(0, BLOCK).to(tl.int64)[:, None],
        tl.arange(0, BLOCK).to(tl.int64)[None, :],
    )
    inside = (row < n) & (column < n)
    at = A + matrix * a_strides[0] + row * a_strides[1] + column * a_strides[2]
    now = tl.load(at, mask=inside, other=0.0)
    result, q = now, 0.0
    for step in tl.static_range(STEPS):
        now, result, q = _step(
            now,
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
    """A <- (Z + a I) A (Z + a I) and Q + q I <- (Q + q I) (Z + a I) with Z = b A + c A^2; see
    iteration.py.
    """
    # The square of what is symmetric is so in every bit
    Z = (b * A.to(tl.float32) + c * tl.dot(A, A)).to(A.dtype)
    if FIRST:
        Q, q = Z, a
    else:
        Q = _symmetric(
            tl.dot(Q, Z) + a * Q.to(tl.float32) + q * Z.to(tl.float32) + _diagonal(q * a, BLOCK), A
        )
        q = 0.0
    if LAST:
        Q = (Q.to(tl.float32) + _diagonal(q, BLOCK)).to(A.dtype)
    else:
        T = _symmetric(tl.dot(A, Z) + a * A.to(tl.float32), A)
        A = _symmetric(tl.dot(T, Z) + a * T.to(tl.float32), A)
    return A, Q, q


@jit
def _restart(Q, x_at, n, m, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """X <- Q X; return X X^T."""
    sums = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    inside = tl.arange(0, BLOCK)[:, None] < n
    for k in range(0, m, CHUNK):
        x = tl.dot(Q, tl.load(x_at + k, mask=inside, other=0.0)).to(Q.dtype)
        tl.store(x_at + k, x, mask=inside)
        sums = tl.dot(x, x.T, sums)
    return sums.to(Q.dtype)


@jit
def _finish(Q, x_at, out_at, stride, n, m, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Store Q X."""
    inside = tl.arange(0, BLOCK)[:, None] < n
    for k in range(0, m, CHUNK):
        x = tl.dot(Q, tl.load(x_at + k, mask=inside, other=0.0))
        column = k + tl.arange(0, CHUNK).to(tl.int64)[None, :]
        tl.store(
            out_at + column * stride, x.to(out_at.dtype.element_ty), mask=inside & (column < m)
        )


@jit
def _factors(
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
    """Return the power of two by which a matrix is multiplied, and then the number by which it is
    divided.
    """
    largest, unit, squares = _squares_of(start, n, m, strides, WIDE, BLOCK, CHUNK, STAGES)
    norm = tl.sqrt(squares) + eps * (largest * unit)
    return unit, tl.where(norm == 0, 1.0, norm)


@jit
def _squares_of(
    start,
    n,
    m,
    strides,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the largest magnitude, a unit, and the sum of squares in that unit (scaling.py)."""
    largest, squares = _sum(start, n, m, strides, 1.0, BLOCK, CHUNK, STAGES)
    unit = unit_of(largest)
    if WIDE and unit != 1.0:
        _, squares = _sum(start, n, m, strides, unit, BLOCK, CHUNK, STAGES)
    return largest, unit, squares


@jit
def _sum(
    start, n, m, strides, unit, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr
):
    """Return the largest magnitude, and the sum of squares times the unit's square."""
    largest = tl.zeros((BLOCK, CHUNK), dtype=tl.float32)
    squares = largest
    row = tl.arange(0, BLOCK)[:, None]
    for turn in tl.range(0, tl.cdiv(m, CHUNK), num_stages=STAGES):
        column = turn * CHUNK + tl.arange(0, CHUNK)[None, :]
        at = start + row.to(tl.int64) * strides[1] + column.to(tl.int64) * strides[2]
        u = tl.load(at, mask=(row < n) & (column < m), other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(u))
        # Of a sum of squares either could be what is rounded first
        squares = tl.fma(u * unit, u * unit, squares)
    return tl.max(largest), tl.sum(squares)


@jit
def _symmetric(sums, like):
    """Round, and mirror the lower triangle."""
    low = sums.to(like.dtype)
    r, s = tl.arange(0, low.shape[0])[:, None], tl.arange(0, low.shape[1])[None, :]
    return tl.where(r >= s, low, low.T)


@jit
def _diagonal(value, BLOCK: tl.constexpr):
    r, s = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    return tl.where(r == s, value, 0.0)

"""Norms of matrices in bf16 that are multiplied as they are, on sm90: the first products scale and cast them (raw.py).

Decides: what becomes of matrices so large or small that squares of their elements leave the range of fp32. Must not
know: what happens to the matrices afterwards.
"""
from __future__ import annotations

import torch

from . import cpu_slices, has_pdl, jit, look, use_triton
from .norm import COPY, READ, SHARES, cast_by_tiles, norm_of_sums, power_of, unit_of
from .split import Split

tl = None  # Triton's language, put here by jit
BEYOND = 32, 32  # rows, and elements of a sum, that are taken at a time where squares leave the range of fp32
PROGRAMS = 128  # of a launch, or one for each matrix


def raw_norm(U: torch.Tensor | Split, X: torch.Tensor | None, factors: torch.Tensor, A: torch.Tensor, eps: float,
             scratch: torch.Tensor | None = None) -> None:
    """Write to factors (3, N), fp32, of U (N, n, m) in 16 bits, which is not cast here: by what it is multiplied for
    U U^T, before it is cast, and after; eps and scratch as for `unit_norm`. X: memory that U is copied to, in U's
    dtype; None if U, whose rows then are lines, is read in place later, too.

    Where squares might leave the range of fp32, U U^T, scaled, is written to A (N, n, n), and the first factor is -1.
    """
    if not use_triton(U.device):
        return raw_norm_torch(U, X, factors, A, eps)
    raw, turned = U if X is None else X, U.stride(2) > U.stride(1)
    cast = cast_by_tiles(*((U.mT, raw.mT) if turned else (U, raw)), scratch, READ if X is None else COPY)
    shares = min(SHARES, max(1, PROGRAMS // len(U)))
    _raw_norm_kernel.launch(
        len(U) * shares, (cast.key, look(raw, A)), raw, A, cast.sums, factors, factors.stride(0), cast.parts, shares,
        *U.shape[1:], raw.stride(), A.stride(), eps, int(X is not None), cast.block, *BEYOND, has_pdl(U.device),
        **cast.options)


def raw_norm_torch(U, X, factors, A, eps):
    """The same in fp64, in which nothing leaves the range."""
    for some in cpu_slices(U):
        wide = U[some].float()
        if X is not None:
            X[some].copy_(wide)
        wide = wide.double()
        largest = wide.abs().amax((1, 2))
        norm = wide.square().sum((1, 2)).sqrt() + eps * largest
        norm.masked_fill_(norm == 0, 1.0)
        power = norm.log2().floor().neg().exp2()
        beyond = (largest > 2.0**50) | (largest < 2.0**-40) & (largest > 0)
        factors[:, some] = torch.stack([(1 / norm).masked_fill(beyond, -1.0), power, 1 / (norm * power)]).float()
        wide = (wide / norm.view(-1, 1, 1))[beyond]
        A[some][beyond] = (wide @ wide.mT).to(A.dtype)


@jit.alike("apart", "parts", "shares", "copied")
def _raw_norm_kernel(U, A, sums, factors, apart, parts, shares, n, m, u_strides, a_strides, eps, copied,
                     BLOCK: tl.constexpr, SIDE: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr):
    """`shares` programs per matrix: its factors, from its sums; its A, where U's squares might leave the range of fp32,
    by products that are added in the order in which all are.
    """
    if PDL:
        if copied == 0:  # the next kernel may multiply U meanwhile, which was there before it was read
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # said again, it changes nothing
    matrix, share = (tl.program_id(0) // shares).to(tl.int64), tl.program_id(0) % shares
    most, unit, norm = norm_of_sums(sums + matrix * 2 * parts, parts, eps, BLOCK)
    power = tl.where(most == 0, 1.0, tl.minimum(power_of(norm) * unit, 2.0**127))
    scale = tl.where(most == 0, 1.0, unit / power / norm)
    beyond = (unit_of(most) != 1.0) & (most != 0)
    if share == 0:
        tl.store(factors + matrix, tl.where(beyond, -1.0, scale * power))
        tl.store(factors + apart + matrix, power)
        tl.store(factors + 2 * apart + matrix, scale)
    if beyond:
        down, side, step = tl.cdiv(n, SIDE), tl.arange(0, SIDE), tl.arange(0, STEP)
        for tile in range(share, down * down, shares):
            r, s = tile // down * SIDE + side, tile % down * SIDE + side
            total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
            for first in range(0, m, STEP):
                left = _scaled(U + matrix * u_strides[0], r, first + step, n, m, u_strides, power)
                right = _scaled(U + matrix * u_strides[0], s, first + step, n, m, u_strides, power)
                total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
            at = A + matrix * a_strides[0] + r.to(tl.int64)[:, None] * a_strides[1]
            result = (total * (scale * scale)).to(A.dtype.element_ty)
            tl.store(at + s.to(tl.int64)[None, :] * a_strides[2], result, mask=(r < n)[:, None] & (s < n)[None, :])


@jit
def _scaled(U, r, k, n, m, strides, power):
    """Rows r and columns k of a matrix, times a power of two."""
    at = U + r.to(tl.int64)[:, None] * strides[1] + k.to(tl.int64)[None, :] * strides[2]
    u = tl.load(at, mask=(r < n)[:, None] & (k < m)[None, :], other=0.0)
    return (u.to(tl.float32) * power).to(U.dtype.element_ty)

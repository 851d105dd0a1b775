"""The two Newton-Schulz iterations, on matrices that share launches: all of one short side.

Decides: which products are taken in which order, and in which memory. Must not know: what the coefficients mean, nor
how a product is computed.
"""
from __future__ import annotations

import itertools
import math

import torch

from .kernels.aol import aol, unit_rows
from .kernels.gram import gram, product, symmetric_product
from .kernels.norm import unit_norm


class Part:
    """The matrices of one long side: X (N, n, m), where their Gram matrices lie in A, and where results go."""

    def __init__(self, members, A, first, room):
        counts = [len(U) for U, _ in members]
        ends = list(itertools.accumulate(counts))
        self.places = [slice(end - count, end) for end, count in zip(ends, counts)]
        self.members, self.A = members, slice(first, first + ends[-1])
        self.X, self.Y = (room.empty(ends[-1], *members[0][0].shape[1:]) for _ in range(2))

    def begin(self, A, eps, scaled) -> list:
        """X <- U scaled and cast, A <- X X^T; return lengths of rows where they, not matrices, were scaled."""
        scale = unit_rows if scaled else lambda U, X: unit_norm(U, X, eps)
        lengths = [scale(U, self.X[place]) for (U, _), place in zip(self.members, self.places)]
        gram(self.X, A[self.A])
        return lengths

    def multiply(self, P, last) -> None:
        """X <- P X, or the last time out <- P X."""
        P = P[self.A]
        if last:
            for (_, out), place in zip(self.members, self.places):
                product(P[place], self.X[place], out)
        else:
            product(P, self.X, self.Y)
            self.X, self.Y = self.Y, self.X


class Room:
    """Memory for stacks in `dtype`: one after another in `flat` (uint8), or new memory where that is None."""

    def __init__(self, flat, dtype, device):
        self.flat, self.dtype, self.device, self.at = flat, dtype, device, 0

    def empty(self, N, n, m):
        """Uninitialised (N, n, m); on a GPU rows begin at multiples of 16 bytes, as TMA wants them."""
        step = 1 if self.device.type == "cpu" else 16 // self.dtype.itemsize
        shape = N, n, -(-m // step) * step
        if self.flat is None:
            return torch.empty(shape, dtype=self.dtype, device=self.device)[:, :, :m]
        first, last = self.at, self.at + math.prod(shape) * self.dtype.itemsize
        self.at = last + -last % 16
        return self.flat[first:last].view(self.dtype).view(shape)[:, :, :m]


def takes(n: int, m: int, itemsize: int, gram_form: bool) -> tuple[int, int]:
    """Return the bytes that `iterate` takes for one (n, m) matrix, n <= m: of its own shape, and of n x n."""
    long, short = (n * (side * itemsize + -side * itemsize % 16) for side in (m, n))
    return 2 * long, (4 if gram_form else 2) * short


def iterate(members, steps, eps: float, dtype: torch.dtype, gram_form: bool, memory=(None, None)) -> None:
    """Orthogonalize each U (N, n, m), n <= m, of members (U, out) into out; n is the same for all.

    They may be the same memory. `steps`: a `polar.Steps`; `dtype`: that of the products; `memory`: two flat uint8
    tensors of the bytes that `takes` says for all matrices together, None for new memory.
    """
    longs = sorted({U.shape[2] for U, _ in members})
    n, N = members[0][0].shape[1], sum(len(U) for U, _ in members)
    long, square = (Room(flat, dtype, members[0][0].device) for flat in memory)
    A, parts, lengths = square.empty(N, n, n), [], []
    for m in longs:
        first = parts[-1].A.stop if parts else 0
        parts.append(Part([pair for pair in members if pair[0].shape[2] == m], A, first, long))
        lengths += parts[-1].begin(A, eps, steps.aol)
    scales = aol(A, torch.cat(lengths)) if steps.aol else None
    more = [square.empty(N, n, n) for _ in range(3 if gram_form else 1)]
    if gram_form:
        _gram_iteration(parts, (A, *more), steps.segments(dtype), scales)
    else:
        _standard_iteration(parts, (A, *more), steps.triples, scales)


def _multiply(parts, P, scales, last):
    """X <- P X; with scales, P D X, D = diag(scales): one pass over P, for X is larger.

    The last product may be computed transposed, which wants P symmetric: there X is scaled.
    """
    if scales is not None and not last:
        P.mul_(scales.unsqueeze(1))
    for part in parts:
        if scales is not None and last:
            part.X.mul_(scales[part.A].unsqueeze(2))
        part.multiply(P, last)


def _standard_iteration(parts, squares, triples, scales):
    """X <- P X with P = a I + b A + c A^2 and A = X X^T, step by step.

    scales (N, n): where A is already scaled (AOL) and X is not, else None.
    """
    A, P = squares
    for step, triple in enumerate(triples, start=1):
        if step > 1:
            _restart(parts, A)
        _polynomial(A, triple, P)
        _multiply(parts, P, scales if step == 1 else None, step == len(triples))


def _gram_iteration(parts, squares, segments, scales):
    """Follow A and Q + q I, the product of the polynomials, in place of X; X <- Q X at the end of each segment.

    With Z = b A + c A^2: A <- (Z + a I) A (Z + a I), Q <- Q (Z + a I); a is added after the product, for in 16 bits
    Z + a I loses much of Z. A restart computes A afresh: rounding makes A and Q drift apart, and A indefinite.
    scales: see `_standard_iteration`.
    """
    A, Z, Q, T = squares
    for number, segment in enumerate(segments, start=1):
        if number > 1:
            _restart(parts, A)
        for step, (a, b, c) in enumerate(segment, start=1):
            _polynomial(A, (0.0, b, c), Z)
            if step < len(segment):
                symmetric_product(A, Z, T, addends=[(A, a)])
                symmetric_product(Z, T, A, addends=[(T, a)])
            if step == 1:
                Q, Z, q = Z, Q, a
            else:
                symmetric_product(Q, Z, T, 1.0, [(Q, a), (Z, q)] if q else [(Q, a)], q * a)
                Q, T, q = T, Q, 0.0
        if q:
            Q.diagonal(dim1=1, dim2=2).add_(q)
        _multiply(parts, Q, scales if number == 1 else None, number == len(segments))


def _restart(parts, A):
    """A <- X X^T."""
    for part in parts:
        gram(part.X, A[part.A])


def _polynomial(A, triple, P):
    """P <- a I + b A + c A^2."""
    a, b, c = triple
    if c:
        symmetric_product(A, A, P, c, [(A, b)], a)
    else:
        torch.mul(A, b, out=P).diagonal(dim1=1, dim2=2).add_(a)

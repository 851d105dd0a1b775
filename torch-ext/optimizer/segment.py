"""A segment of the Gram iteration, between two products with X: what follows a Gram matrix.

Decides: which symmetric products are taken in which order, and which are read as a whole. Must not know: what the
coefficients mean, nor how a product is computed.
"""
from __future__ import annotations

from .kernels.gram import linear, read_triangles, symmetric_product


def follow(segment, pair, A, Q, Z, T) -> tuple:
    """Follow A and Q + q I, the product of the polynomials, in place of X. Return Q with q = 0, and the other two.

    Only Q, at the end, is whole where symmetric products, and no others, take the rest and read triangles.

    With Z = b A + c A^2: A <- (Z + a I) A (Z + a I), Q <- Q (Z + a I); a is added after the product, for in 16 bits
    Z + a I loses much of Z. A restart computes A afresh: rounding makes A and Q drift apart, and A indefinite.
    """
    whole = not (all(c for _, _, c in segment) and read_triangles(A, Q, Z, T))
    q, last = 0.0, len(segment)
    for step, (a, b, c) in enumerate(segment[:-2] if pair else segment, start=1):
        polynomial(A, (0.0, b, c), Z, whole)
        if step < last:
            symmetric_product(A, Z, T, 1.0, [(A, a)], 0.0, whole)
            symmetric_product(Z, T, A, 1.0, [(T, a)], 0.0, whole)
        if step == 1:
            Q, Z, q = Z, Q, a
        else:
            addends = [(Q, a), (Z, q)] if q else [(Q, a)]
            symmetric_product(Q, Z, T, 1.0, addends, q * a, whole or step == last)
            Q, T, q = T, Q, 0.0
    if not pair:
        return Q, Z, T
    two_steps(pair, A, Z, T, whole, whole or last == 2)
    if last == 2:
        return Z, Q, T
    symmetric_product(Q, Z, T, 1.0, [(Z, q)])
    return T, Q, Z


def two_steps(pair, A, S, C, whole=True, end=True) -> None:
    """S <- the polynomial of two steps, in the `end` whole or not, as what is between; A and C are spoiled."""
    (square, a), (cube, ca, cs), (half, ha, hs, hc, h), (qs, qc, q) = pair
    symmetric_product(A, A, S, square, [(A, a)], 0.0, whole)
    symmetric_product(A, S, C, cube, [(A, ca), (S, cs)], 0.0, whole)
    symmetric_product(C, C, A, half, [(A, ha), (S, hs), (C, hc)], h, whole)
    symmetric_product(A, A, S, 1.0, [(S, qs), (C, qc)], q, end)


def polynomial(A, triple, P, whole=True) -> None:
    """P <- a I + b A + c A^2."""
    a, b, c = triple
    if c:
        symmetric_product(A, A, P, c, [(A, b)], a, whole)
    else:
        linear(A, b, a, P)

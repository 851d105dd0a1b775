"""A segment of the Gram iteration, between two products with X: what follows a Gram matrix.

Decides: which symmetric products are taken in which order, which are read as a whole, and whether they share a launch.
Must not know: what the coefficients mean, nor how a product is computed.
"""
from __future__ import annotations

import functools

from .kernels import products
from .kernels.gram import gram, linear, read_triangles, symmetric_product


def follow(segment, pair, A, Q, Z, T) -> tuple:
    """Follow A and Q + q I, the product of the polynomials, in place of X. Return Q with q = 0, and the other two.

    Only Q, at the end, is whole where symmetric products, and no others, take the rest and read triangles.
    """
    whole = not (all(c for _, _, c in segment) and read_triangles(A, Q, Z, T))
    return _follow(segment, pair, (A, Q, Z, T), whole, symmetric_product)


def shares_a_launch(segment, A) -> bool:
    """Say whether what follows A gains by `follow_at_once`."""
    return len(segment) > 1 and all(c for _, _, c in segment) and products.takes(A)


def follow_at_once(segment, pair, A, spare, X=None, scales=None) -> tuple:
    """Do the same in one launch. Return which matrix Q is then, and the other two, of four one behind another, the
    first of which is A. With X, A has yet to be X X^T. spare: matrices as large, whose last bytes may be spoiled.
    """
    if X is not None and not products.takes_gram(X, A):
        gram(X, A, scales)
        X = None
    made, names = _listed(segment, pair)
    products.take(made, A, spare, X, scales)
    return names


@functools.lru_cache(maxsize=256)
def _listed(segment, pair) -> tuple:
    """(The products that `follow` takes of the matrices 0 to 3, which of them Q and the other two are afterwards)."""
    made = []

    def note(left, right, out, alpha, addends, diagonal=0.0, whole=True):
        made.append((left, right, out, alpha, tuple(addends), diagonal))

    names = _follow(segment, pair, range(4), True, note)
    return tuple(made), names


def _follow(segment, pair, matrices, whole, multiply) -> tuple:
    """With Z = b A + c A^2: A <- (Z + a I) A (Z + a I), Q <- Q (Z + a I); a is added after the product, for in 16 bits
    Z + a I loses much of Z. A restart computes A afresh: rounding makes A and Q drift apart, and A indefinite.
    """
    (A, Q, Z, T), q, last = matrices, 0.0, len(segment)
    for step, (a, b, c) in enumerate(segment[:-2] if pair else segment, start=1):
        polynomial(A, (0.0, b, c), Z, whole, multiply)
        if step < last:
            multiply(A, Z, T, 1.0, [(A, a)], 0.0, whole)
            multiply(Z, T, A, 1.0, [(T, a)], 0.0, whole)
        if step == 1:
            Q, Z, q = Z, Q, a
        else:
            addends = [(Q, a), (Z, q)] if q else [(Q, a)]
            multiply(Q, Z, T, 1.0, addends, q * a, whole or step == last)
            Q, T, q = T, Q, 0.0
    if not pair:
        return Q, Z, T
    two_steps(pair, A, Z, T, whole, whole or last == 2, multiply)
    if last == 2:
        return Z, Q, T
    multiply(Q, Z, T, 1.0, [(Z, q)])
    return T, Q, Z


def two_steps(pair, A, S, C, whole=True, end=True, multiply=None) -> None:
    """S <- the polynomial of two steps, in the `end` whole or not, as what is between; A and C are spoiled."""
    (square, a), (cube, ca, cs), (half, ha, hs, hc, h), (qs, qc, q) = pair
    multiply = multiply or symmetric_product
    multiply(A, A, S, square, [(A, a)], 0.0, whole)
    multiply(A, S, C, cube, [(A, ca), (S, cs)], 0.0, whole)
    multiply(C, C, A, half, [(A, ha), (S, hs), (C, hc)], h, whole)
    multiply(A, A, S, 1.0, [(S, qs), (C, qc)], q, end)


def polynomial(A, triple, P, whole=True, multiply=None) -> None:
    """P <- a I + b A + c A^2."""
    a, b, c = triple
    if c:
        (multiply or symmetric_product)(A, A, P, c, [(A, b)], a, whole)
    else:
        linear(A, b, a, P)

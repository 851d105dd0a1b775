"""The matrices of one short and one long side that an iteration (iteration.py) takes together.

Decides: whether they are cast before the first product or on their way into it, and what each product with them reads
and writes. Must not know: which products follow which.
"""
from __future__ import annotations

import itertools

from .kernels.aol import unit_rows
from .kernels.gram import gram, product, takes_in_place
from .kernels.norm import unit_norm
from .kernels.raw_norm import raw_norm

LINE = 128  # bytes of the cache: TMA wants rows at multiples of 16, but those within lines take a third longer


class LongSide:
    """The matrices of one long side: X (N, n, m), by which scales they are yet to be multiplied (None: 1), where their
    Gram matrices lie in A, and where results go. `raw`: X begins as U itself; `later`, scales and powers, is what casts
    it in the first product, and `room` the memory that X then has in place of U's.
    """

    def __init__(self, members, raw, A, first, X, Y):
        counts = [len(U) for U, _ in members]
        ends = list(itertools.accumulate(counts))
        self.places = [slice(end - count, end) for end, count in zip(ends, counts)]
        self.members, self.raw, self.A, self.X, self.Y, self.room = members, raw, A[first:first + ends[-1]], X, Y, X
        self.rows, self.scales, self.later = slice(first, first + ends[-1]), None, ()

    def begin(self, eps, factors, lengths=None) -> None:
        """X <- U scaled and cast, row by row where there are `lengths` of rows to be told; or U as it is."""
        if self.raw:
            return self._begin_raw(eps, factors[:, self.rows])
        if lengths is None:
            self.scales = factors[0, self.rows]
        for (U, _), place in zip(self.members, self.places):
            if lengths is None:
                unit_norm(U, self.X[place], self.scales[place], eps, self.Y)
            else:
                unit_rows(U, self.X[place], lengths[self.rows][place])

    def _begin_raw(self, eps, factors):
        """X <- U, where it is, or a copy of what does not lie as X would."""
        U, self.scales, self.later = self.members[0][0], factors[0], (factors[2], factors[1])
        in_place = len(self.members) == 1 and _is_laid_out(U)
        self.X = U if in_place else self.X.view(U.dtype)
        for (U, _), place in zip(self.members, self.places):
            raw_norm(U, None if in_place else self.X[place], factors[:, place], self.A[place], eps, self.Y)

    def restart(self) -> None:
        """A <- X X^T."""
        gram(self.X, self.A, self.scales)

    def multiply(self, P) -> None:
        """X <- P X."""
        product(P[self.rows], self.X, self.Y, *self.later or (self.scales,))
        self.X, self.Y, self.room = self.Y, self.room, self.Y
        self.scales, self.later = None, ()

    def finish(self, P) -> None:
        """out <- P X."""
        P = P[self.rows]
        for (_, out), place in zip(self.members, self.places):
            product(P[place], self.X[place], out, None if self.scales is None else self.scales[place])


def _is_laid_out(U) -> bool:
    """Whether U is taken in place, and its rows begin where the cache's lines do, as in a Room."""
    return takes_in_place(U) and U.stride(1) * U.element_size() % LINE == 0

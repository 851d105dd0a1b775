"""The Newton-Schulz iterations over batches of matrices that share a short side.

`IterationPlan` runs several batches, `Iteration` one; both are bound to memory once and run any
number of times. `LongSide` holds the matrices of one long side. `follow` computes the polynomial Q
of one restart interval from A = X X^T. Knows no ranks.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence

import torch

from ..kernels.backend import capturing, use_triton
from ..kernels.elementwise.aol import aol, scale_columns, scale_rows, unit_rows
from ..kernels.elementwise.scaling import raw_norm, unit_norm
from ..kernels.matmul.api import (
    gram,
    linear,
    product,
    read_triangles,
    supports_in_place,
    supports_mixed_input,
    symmetric_product,
)
from ..kernels.matmul.reference import standard_torch, takes_matrix_by_matrix
from ..kernels.onchip import gram_chain, polar
from .coefficients import Steps
from .method import LINE, takes

# Three flat uint8 tensors in which an iteration keeps X, its successor, and n x n matrices
Memory = Sequence[torch.Tensor]


class Room:
    """Stacks one after another in memory that is lent. Matrices begin where the cache's lines do,
    on a GPU rows too.
    """

    def __init__(self, shapes, dtype, device):
        line = LINE // dtype.itemsize
        self.forms, end = _arrange(shapes, 1 if device.type == "cpu" else line, line)
        self.dtype, self.nbytes, self.memory = dtype, end * dtype.itemsize, None

    def lend(self, flat) -> None:
        """`flat`: uint8, of `nbytes` or more."""
        assert flat.numel() >= self.nbytes, "takes() promised less"
        self.memory = flat.view(self.dtype)

    def all(self) -> list:
        first = self.memory.storage_offset()
        return [
            self.memory.as_strided(shape, strides, first + at) for shape, strides, at in self.forms
        ]


@functools.lru_cache(maxsize=1024)
def _arrange(shapes, step, line):
    """[(shape, strides, offset)] for `Room`, and how many elements that takes."""
    forms, end = [], 0
    for N, n, m in shapes:
        pitch = m + -m % step
        size = n * pitch + -(n * pitch) % line
        forms.append(((N, n, m), (size, pitch, 1), end))
        end += N * size
    return forms, end


class IterationPlan:
    """The iterations of several stacks, bound to their memory: `run` launches products only.

    Each stack has a short side and a restart interval of its own. Where `memory` is large enough
    for all of them together, they run side by side in a CUDA graph, else one after the other in
    the same memory.
    """

    def __init__(
        self, stacks: Sequence[tuple[list, int]], steps: Steps, dtype: torch.dtype, memory: Memory
    ):
        """`stacks`: [(members, most steps between restarts)], see `Iteration`; `memory`: as
        there.
        """
        self.device = stacks[0][0][0][0].device
        parts = _divided(stacks, dtype, memory)
        self.side_by_side = parts is not None
        self.iterations = [
            Iteration(members, steps, dtype, most, own)
            for (members, most), own in zip(stacks, parts or itertools.repeat(memory))
        ]

    def run(self, eps: float) -> None:
        """Write the polar factor of every matrix; `eps` as in torch.optim.Muon."""
        if self.side_by_side and capturing(self.device):
            _side_by_side([functools.partial(one.run, eps) for one in self.iterations], self.device)
            return
        for iteration in self.iterations:
            iteration.run(eps)


def iterate_all(
    stacks: Sequence[tuple[list, int]],
    steps: Steps,
    eps: float,
    dtype: torch.dtype,
    memory: Memory | None = None,
) -> None:
    """Run an `IterationPlan` once. Without `memory` each stack takes new memory in turn."""
    if memory is not None:
        IterationPlan(stacks, steps, dtype, memory).run(eps)
        return
    for members, most in stacks:
        Iteration(members, steps, dtype, most).run(eps)


def _divided(stacks, dtype, memory):
    """The part of `memory` for each of `stacks`; None if it is not enough for all of them
    together.
    """
    if len(stacks) == 1:
        return None
    sizes = list(zip(*(_needs(members, dtype.itemsize, most) for members, most in stacks)))
    if any(map(operator.lt, map(torch.numel, memory), map(sum, sizes))):
        return None
    return list(zip(*(flat[: sum(parts)].split(parts) for flat, parts in zip(memory, sizes))))


def most_of(stacks, itemsize: int) -> tuple[int, ...]:
    """Return the bytes of `memory` that `iterate_all` takes at most, one after the other."""
    return tuple(
        map(max, zip((0, 0, 0), *(_needs(members, itemsize, most) for members, most in stacks)))
    )


def _needs(members, itemsize, most) -> tuple[int, int, int]:
    """The bytes of `memory` that `iterate` takes at most."""
    each = [(len(U), *takes(*U.shape[1:], itemsize, most)) for U, _ in members]
    long, square = (sum(sizes[0] * sizes[i] for sizes in each) for i in (1, 2))
    return long // 2, long // 2, square


def _side_by_side(works, device) -> None:
    """Into the graph that is being captured, each in a stream of its own."""
    here, streams = torch.cuda.current_stream(device), _streams(device, len(works) - 1)
    for stream, work in zip(streams, works[1:]):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            work()
    works[0]()
    for stream in streams:
        here.wait_stream(stream)


@functools.cache
def _streams(device, count) -> list:
    return [torch.cuda.Stream(device) for _ in range(count)]


class Iteration:
    """Newton-Schulz on stacks of one short side, bound to their memory.

    Views, scratch and restart intervals are computed once; `run` may be called any number of times
    and reads the matrices anew each time.
    """

    def __init__(
        self,
        members: list[tuple],
        steps: Steps,
        dtype: torch.dtype,
        most: int,
        memory: Memory | None = None,
    ):
        """`members`: [(U, out)], each (N, n, m) with n <= m and n equal for all; out may be U's
        memory, and each may be `ScatteredRows`. `dtype`: of products. `most`: steps between
        restarts, 1 in the standard iteration, more in the Gram iteration. `memory`: three flat
        uint8 tensors of the bytes that `takes` says for all matrices together, the first of two
        equal parts, the second, and the rest; None for new memory.
        """
        kinds = _by_kind(members, steps, dtype, most)
        counts = [sum(len(U) for U, _ in group) for group in kinds.values()]
        total = sum(counts)
        n, device = members[0][0].shape[1], members[0][0].device
        long = tuple((count, n, m) for count, (m, _) in zip(counts, kinds))
        squares = ((total, n, n),) * (4 if most > 1 else 2)
        rooms = [Room(shapes, dtype, device) for shapes in (long, long, squares)]
        sizes = [room.nbytes for room in rooms[:2]] + [rooms[2].nbytes + LINE * total]
        memory = memory or torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(sizes)
        for room, flat in zip(rooms, memory):
            room.lend(flat)
        # Three fp32 numbers for each matrix, behind the squares: scales of the cast, and powers
        scales = memory[2][rooms[2].nbytes :][: 12 * total]
        self.factors = scales.view(torch.float32).view(3, total)
        Xs, Ys, self.squares = (room.all() for room in rooms)
        self.parts, first = [], 0
        for ((_, raw), group), count, X, Y in zip(kinds.items(), counts, Xs, Ys):
            self.parts.append(LongSide(group, raw, self.squares[0], first, X, Y))
            first += count
        self.lengths = self.row_scales = None
        if steps.aol:
            self.lengths, self.row_scales = _factors(rooms[1].memory, total, n)
        self.intervals = steps.intervals(dtype, most, n)
        # On a CPU, in fp32, each matrix takes all standard steps before the next one does
        self.matrix_by_matrix = (
            most == 1
            and not steps.aol
            and not use_triton(device)
            and all(takes_matrix_by_matrix(p.X, p.Y, *self.squares) for p in self.parts)
        )

    def run(self, eps: float) -> None:
        """Write the polar factor of each U into its out."""
        for part in self.parts:
            part.begin(eps, self.factors, self.lengths)
        if self.matrix_by_matrix:
            A, Q = self.squares
            triples = [triple for interval, _ in self.intervals for triple in interval]
            for part in self.parts:
                part.hand_out(standard_torch(part.X, part.Y, A[0], Q[0], triples))
            return
        Q = self._iterate()
        for part in self.parts:
            part.finish(Q)

    def _iterate(self) -> torch.Tensor:
        """X <- Q X, restart interval by restart interval; return the last Q, yet to be applied.

        With AOL the rows of X have yet to get their scales D, which A = X X^T gives: the first
        product is X <- Q D X.
        """
        A, Q, *others = self.squares
        for number, (triples, pair) in enumerate(self.intervals):
            if number == 1 and self.row_scales is not None:
                scale_columns(Q, self.row_scales)  # one pass over Q, for X is larger
            for part in self.parts if number else ():
                part.multiply(Q)
            stays = gram_chain.supports(A, Q, triples, pair)
            scaled = number == 0 and self.row_scales is not None
            # The kernel that keeps A in shared memory computes X X^T, too
            fused = stays and len(self.parts) == 1 and not scaled
            for part in () if fused else self.parts:
                gram(part.X, part.A, part.scales)
            if scaled:
                aol(A, self.lengths, self.row_scales)
            if others and polar.follows(A):
                polar.follow(A, Q, triples)
            elif len(triples) == 1:
                polynomial(A, triples[0], Q)
            elif stays:
                long = (self.parts[0].X, self.parts[0].scales) if fused else None
                Q, *others = gram_chain.follow(triples, pair, A, Q, *others, long)
            else:
                Q, *others = follow(triples, pair, A, Q, *others)
        if len(self.intervals) == 1 and self.row_scales is not None:
            # The last product may be computed transposed, which wants Q symmetric
            for part in self.parts:
                scale_rows(part.X, self.row_scales[part.rows])
        return Q


def _by_kind(members, steps, dtype, most) -> dict:
    """(Long side, whether they are multiplied as they are) -> members."""
    kinds, restarts = {}, len(steps.segments(dtype, most, members[0][0].shape[1])) > 1
    for U, out in members:
        raw = restarts and not steps.aol and supports_mixed_input(U, dtype)
        kinds.setdefault((U.shape[2], raw), []).append((U, out))
    return dict(sorted(kinds.items()))


def _factors(memory, N, n):
    """Lengths (N, 2, n) and scales (N, n) of rows, fp32, in memory that is free until X <- P X, if
    it is enough.
    """
    memory, numbers = memory.view(torch.uint8), 3 * N * n
    flat = memory[: 4 * numbers] if memory.numel() >= 4 * numbers else memory.new_empty(4 * numbers)
    lengths, scales = flat.view(torch.float32).split((2 * N * n, N * n))
    return lengths.view(N, 2, n), scales.view(N, n)


def follow(segment, pair, A, Q, Z, T) -> tuple:
    """Follow A and Q + q I, the product of the polynomials, in place of X. Return Q with q = 0, and
    the other two.

    Only Q, at the end, is whole where symmetric products, and no others, take the rest and read
    triangles.

    With Z = b A + c A^2: A <- (Z + a I) A (Z + a I), Q <- Q (Z + a I); a is added after the
    product, for in 16 bits Z + a I loses much of Z. A restart computes A afresh: rounding makes A
    and Q drift apart, and A indefinite.
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
    """S <- the polynomial of two steps, in the `end` whole or not, as what is between; A and C are
    spoiled.
    """
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


class LongSide:
    """The matrices of one long side: X (N, n, m), by which scales they are yet to be multiplied
    (None: 1), where their Gram matrices lie in A, and where results go. `raw`: X begins as U
    itself; `later`, scales and powers, is what casts it in the first product, and `room` the memory
    that X then has in place of U's.
    """

    def __init__(self, members, raw, A, first, X, Y):
        counts = [len(U) for U, _ in members]
        ends = list(itertools.accumulate(counts))
        self.places = [slice(end - count, end) for end, count in zip(ends, counts)]
        self.members = members
        self.raw = raw
        self.rows = slice(first, first + ends[-1])
        self.A = A[self.rows]
        self.memory = X, Y
        # Products swap X and Y, and a first product that casts drops scales; `begin` sets them
        self.X = X
        self.Y = Y
        self.room = X
        self.scales = None
        self.later = ()

    def begin(self, eps, factors, lengths=None) -> None:
        """X <- U scaled and cast, row by row where there are `lengths` of rows to be told; or U as
        it is.
        """
        self.X, self.Y = self.memory
        self.room = self.X
        self.scales = None
        self.later = ()
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
            raw_norm(
                U,
                None if in_place else self.X[place],
                factors[:, place],
                self.A[place],
                eps,
                self.Y,
            )

    def multiply(self, P) -> None:
        """X <- P X."""
        product(P[self.rows], self.X, self.Y, *self.later or (self.scales,))
        self.X, self.Y, self.room = self.Y, self.room, self.Y
        self.scales, self.later = None, ()

    def finish(self, P) -> None:
        """out <- P X."""
        P = P[self.rows]
        for (_, out), place in zip(self.members, self.places):
            product(
                P[place], self.X[place], out, None if self.scales is None else self.scales[place]
            )

    def hand_out(self, results: torch.Tensor) -> None:
        """out <- results (N, n, m), which are in the order of X."""
        for (_, out), place in zip(self.members, self.places):
            out[:].copy_(results[place])


def _is_laid_out(U) -> bool:
    """Whether U is taken in place, and its rows begin where the cache's lines do, as in a Room."""
    return supports_in_place(U) and U.stride(1) * U.element_size() % LINE == 0

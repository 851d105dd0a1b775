"""Newton-Schulz iterations over batches of matrices that share a short side.

A matrix U (n, m), n <= m, divided by its Frobenius norm, is the first X. A step with coefficients
(a, b, c) computes

    A = X X^T,   P = a I + b A + c A^2,   X <- P X

and the last X approximates the polar factor of U. Two iterations compute these steps:

- Standard iteration: as written, with a new A in each step.
- Gram iteration (Dao-AILab's blog, March 2026): X stays unchanged during a restart interval, a few
  steps. Only n x n matrices are updated, from Q = I and A = X X^T on:

      A <- P A P,   Q <- P Q      in each step
      X <- Q X                    at the end of the interval

  Long matrices gain: the n x m products X X^T and Q X are computed once per interval, not per step.
  Each interval restarts from A = X X^T, because rounding makes A and Q drift apart, and A
  indefinite. The standard iteration is the case of intervals of one step, with Q = P.

A, P and Q of an interval are polynomials in one symmetric matrix: symmetric, and all products
commute. Kernels therefore compute one half of an n x n product and mirror it. `follow` computes Q
of an interval; `two_steps` computes the last two steps of an interval as one polynomial
(`coefficients.Pair`).

`Iteration` runs one batch: stacks of equal short side and restart interval. `LongSide` holds the
matrices of one long side in a batch. `IterationPlan` runs several batches. All three are bound to
memory once and run any number of times. Nothing in this module knows ranks, parameters or buckets.

[Note: deferred scales]
With Triton, X is stored as a power of two times U, near norm 1: scaling by a power of two rounds
nothing. The remaining factor s, s X = U / (||U|| + eps max |U|), is applied to the fp32 sums of the
first `gram` and the first product. In torch X is divided in fp32, and s = 1.

[Note: mixed input]
A stack in bf16 with products in fp16 is not cast before the iteration (`supports_mixed_input`):
`gram` multiplies U, and the first product X <- Q X casts U while loading tiles. A cast copy is
never written.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence

import torch

from ..kernels.backend import capturing, use_triton
from ..kernels.elementwise.aol import aol, scale_columns, scale_rows, unit_rows
from ..kernels.elementwise.row_scattered import ScatteredRows
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
from .coefficients import Pair, Steps, Triple
from .method import CACHE_LINE_BYTES, iteration_bytes

# Matrices (N, n, m) of one shape
Stack = torch.Tensor | ScatteredRows
# [(U, out)]: inputs, and where their polar factors go
Members = Sequence[tuple[Stack, Stack]]
# (members of one short side, most steps between restarts)
Batch = tuple[Members, int]
# Three flat uint8 tensors: two equal buffers for X and its successor, and one for n x n matrices
Memory = Sequence[torch.Tensor]


class ScratchLayout:
    """Stacks of scratch matrices, one after another in one flat buffer.

    Every matrix begins at a multiple of CACHE_LINE_BYTES; on a GPU every row does, too.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: torch.device
    ):
        """`shapes`: (N, n, m) of each stack."""
        line = CACHE_LINE_BYTES // dtype.itemsize
        # [(shape, strides, offset in elements)], and elements of all stacks together
        self.forms, end = _arrange(shapes, 1 if device.type == "cpu" else line, line)
        self.dtype = dtype
        self.nbytes = end * dtype.itemsize
        self.memory: torch.Tensor | None = None  # flat, of `dtype`, once bound

    def bind(self, flat: torch.Tensor) -> None:
        """Place the stacks at the start of `flat`, uint8, of `nbytes` bytes or more."""
        assert flat.numel() >= self.nbytes, "less than iteration_bytes() says"
        self.memory = flat.view(self.dtype)

    def views(self) -> list[torch.Tensor]:
        """Return a view (N, n, m) for each stack."""
        first = self.memory.storage_offset()
        return [
            self.memory.as_strided(shape, strides, first + offset)
            for shape, strides, offset in self.forms
        ]


@functools.lru_cache(maxsize=1024)
def _arrange(
    shapes: tuple[tuple[int, int, int], ...], row_step: int, line: int
) -> tuple[list[tuple], int]:
    """Return [(shape, strides, offset)] for `ScratchLayout`, and the elements of all stacks.

    Rows are padded to a multiple of `row_step` elements, matrices to a multiple of `line`.
    """
    forms = []
    end = 0
    for N, n, m in shapes:
        pitch = m + -m % row_step
        size = n * pitch + -(n * pitch) % line
        forms.append(((N, n, m), (size, pitch, 1), end))
        end += N * size
    return forms, end


class IterationPlan:
    """The iterations of several batches, bound to their memory: `run` launches products only.

    If `memory` is large enough for all batches together, batches run side by side in a CUDA graph.
    Otherwise batches run one after another.
    """

    def __init__(self, batches: Sequence[Batch], steps: Steps, dtype: torch.dtype, memory: Memory):
        """Arguments as in `Iteration`, `memory` at least as large as the largest batch needs
        (`max_scratch_bytes`).
        """
        self.device = batches[0][0][0][0].device
        parts = _split_memory(batches, dtype, memory)
        self.side_by_side = parts is not None  # each batch has memory of its own
        self.iterations = [
            Iteration(members, steps, dtype, max_steps, part)
            for (members, max_steps), part in zip(batches, parts or itertools.repeat(memory))
        ]

    def run(self, eps: float) -> None:
        """Write the polar factor of every matrix; `eps` as in `Iteration.run`."""
        # Eagerly, several streams cost the host more time than the GPU gains
        if self.side_by_side and capturing(self.device):
            works = [functools.partial(iteration.run, eps) for iteration in self.iterations]
            _side_by_side(works, self.device)
            return
        for iteration in self.iterations:
            iteration.run(eps)


def iterate_all(
    batches: Sequence[Batch],
    steps: Steps,
    eps: float,
    dtype: torch.dtype,
    memory: Memory | None = None,
) -> None:
    """Run an `IterationPlan` once. Without `memory` each batch allocates its own, in turn."""
    if memory is not None:
        IterationPlan(batches, steps, dtype, memory).run(eps)
        return
    for members, max_steps in batches:
        Iteration(members, steps, dtype, max_steps).run(eps)


def _split_memory(
    batches: Sequence[Batch], dtype: torch.dtype, memory: Memory
) -> list[tuple[torch.Tensor, ...]] | None:
    """Return a disjoint part of `memory` for each batch; None for a single batch, or if `memory`
    is too small for all batches together.
    """
    if len(batches) == 1:
        return None
    # For each of the three tensors: bytes per batch
    sizes = list(
        zip(*(_batch_bytes(members, dtype.itemsize, max_steps) for members, max_steps in batches))
    )
    if any(map(operator.lt, map(torch.numel, memory), map(sum, sizes))):
        return None
    return list(zip(*(flat[: sum(parts)].split(parts) for flat, parts in zip(memory, sizes))))


def max_scratch_bytes(batches: Sequence[Batch], itemsize: int) -> tuple[int, ...]:
    """Return the bytes of each tensor of `memory` that suffice for every batch, if batches run one
    after another. `itemsize`: of the dtype of products.
    """
    needs = (_batch_bytes(members, itemsize, max_steps) for members, max_steps in batches)
    return tuple(map(max, zip((0, 0, 0), *needs)))


def _batch_bytes(members: Members, itemsize: int, max_steps: int) -> tuple[int, int, int]:
    """Return the bytes of each tensor of `memory` that one batch needs at most."""
    each = [(len(U), *iteration_bytes(*U.shape[1:], itemsize, max_steps)) for U, _ in members]
    long, square = (sum(sizes[0] * sizes[i] for sizes in each) for i in (1, 2))
    return long // 2, long // 2, square


def _side_by_side(works: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Run each work in a stream of its own. For capture: the CUDA graph gets parallel branches."""
    current = torch.cuda.current_stream(device)
    streams = _streams(device, len(works) - 1)
    for stream, work in zip(streams, works[1:]):
        # Fork and join by events: a capture includes only streams that depend on its own stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            work()
    works[0]()
    for stream in streams:
        current.wait_stream(stream)


@functools.cache
def _streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(count)]


class Iteration:
    """Newton-Schulz on one batch of stacks with equal short sides, bound to memory.

    Views, scratch and restart intervals are computed once. `run` may be called any number of times
    and reads the matrices anew each time.
    """

    def __init__(
        self,
        members: Members,
        steps: Steps,
        dtype: torch.dtype,
        max_steps: int,
        memory: Memory | None = None,
    ):
        """`members`: [(U, out)], each (N, n, m) with n <= m, n equal for all; out may be the memory
        of U. `dtype`: of products. `max_steps`: most steps between restarts, 1 for the standard
        iteration. `memory`: three flat uint8 tensors of at least `_batch_bytes`, overwritten; None
        allocates.
        """
        by_length = _by_long_side(members, steps, dtype, max_steps)
        counts = [sum(len(U) for U, _ in group) for group in by_length.values()]
        total = sum(counts)
        n = members[0][0].shape[1]
        device = members[0][0].device
        long = tuple((count, n, m) for count, (m, _) in zip(counts, by_length))
        # A and Q; the Gram iteration also Z and T, see `follow`
        squares = ((total, n, n),) * (4 if max_steps > 1 else 2)
        layouts = [ScratchLayout(shapes, dtype, device) for shapes in (long, long, squares)]
        sizes = [layout.nbytes for layout in layouts[:2]]
        sizes.append(layouts[2].nbytes + CACHE_LINE_BYTES * total)
        memory = memory or torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(sizes)
        for layout, flat in zip(layouts, memory):
            layout.bind(flat)
        # (3, total) fp32, behind the squares: scales, see [Note: deferred scales]; for mixed input
        # also powers of two and the scales that remain after the cast, see `raw_norm`
        scales = memory[2][layouts[2].nbytes :][: 12 * total]
        self.factors = scales.view(torch.float32).view(3, total)
        Xs, Ys, self.squares = (layout.views() for layout in layouts)
        self.parts: list[LongSide] = []
        first = 0
        for ((_, raw), group), count, X, Y in zip(by_length.items(), counts, Xs, Ys):
            self.parts.append(LongSide(group, raw, self.squares[0], first, X, Y))
            first += count
        self.lengths: torch.Tensor | None = None  # AOL only, see `_row_factors`
        self.row_scales: torch.Tensor | None = None
        if steps.aol:
            self.lengths, self.row_scales = _row_factors(layouts[1].memory, total, n)
        self.intervals = steps.intervals_with_pairs(dtype, max_steps, n)
        # On a CPU in fp32, each matrix takes all steps of the standard iteration before the next
        # matrix begins, and stays in the CPU's cache
        self.matrix_by_matrix = (
            max_steps == 1
            and not steps.aol
            and not use_triton(device)
            and all(takes_matrix_by_matrix(p.X, p.Y, *self.squares) for p in self.parts)
        )

    def run(self, eps: float) -> None:
        """Write the polar factor of each U to its out; eps is added to the norm of U, in units of
        the largest element.
        """
        for part in self.parts:
            part.begin(eps, self.factors, self.lengths)
        if self.matrix_by_matrix:
            A, Q = self.squares
            triples = [triple for interval, _ in self.intervals for triple in interval]
            for part in self.parts:
                part.copy_out(standard_torch(part.X, part.Y, A[0], Q[0], triples))
            return
        Q = self._iterate()
        for part in self.parts:
            part.finish(Q)

    def _iterate(self) -> torch.Tensor:
        """X <- Q X for every restart interval but the last; return Q of the last interval, which
        `LongSide.finish` applies while writing the results.

        With AOL (arXiv 2208.03160) X begins with rows of length 1, still without the diagonal of
        row scales D. D is computed from the first A; then A <- D A D, and the first product is
        X <- Q D X.
        """
        A, Q, *others = self.squares
        for number, (triples, pair) in enumerate(self.intervals):
            if number == 1 and self.row_scales is not None:
                # Q <- Q D: a pass over Q costs less than a pass over X
                scale_columns(Q, self.row_scales)
            for part in self.parts if number else ():
                part.multiply(Q)
            on_chip = gram_chain.supports(A, Q, triples, pair)
            scaled = number == 0 and self.row_scales is not None
            # The kernel that keeps A in shared memory computes A = X X^T as well, but of one
            # stack, and leaves no A in memory for AOL
            fused = on_chip and len(self.parts) == 1 and not scaled
            for part in () if fused else self.parts:
                gram(part.X, part.A, part.scales)
            if scaled:
                aol(A, self.lengths, self.row_scales)
            if others and polar.follows(A):
                polar.follow(A, Q, triples)
            elif len(triples) == 1:
                polynomial(A, triples[0], Q)
            elif on_chip:
                long = (self.parts[0].X, self.parts[0].scales) if fused else None
                Q, *others = gram_chain.follow(triples, pair, A, Q, *others, long)
            else:
                Q, *others = follow(triples, pair, A, Q, *others)
        if len(self.intervals) == 1 and self.row_scales is not None:
            # X <- D X, not Q <- Q D: for a transposed out the last product reads Q as Q^T, and
            # Q D is not symmetric
            for part in self.parts:
                scale_rows(part.X, self.row_scales[part.rows])
        return Q


def _by_long_side(
    members: Members, steps: Steps, dtype: torch.dtype, max_steps: int
) -> dict[tuple[int, bool], list[tuple[Stack, Stack]]]:
    """Return {(long side, whether U is multiplied uncast): members}, in ascending order.

    A single interval has no product X <- Q X to cast U, and AOL casts U while dividing the rows:
    no mixed input in either case. See [Note: mixed input].
    """
    by_length = {}
    restarts = len(steps.intervals(dtype, max_steps, members[0][0].shape[1])) > 1
    for U, out in members:
        raw = restarts and not steps.aol and supports_mixed_input(U, dtype)
        by_length.setdefault((U.shape[2], raw), []).append((U, out))
    return dict(sorted(by_length.items()))


def _row_factors(memory: torch.Tensor, N: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp32 views (N, 2, n) for the lengths of rows and (N, n) for AOL's row scales.

    `memory`: the buffer of X's successor. The first X <- Q X overwrites the buffer, after the last
    read of both views. Matrices with rows of less than 12 bytes get new memory.
    """
    memory = memory.view(torch.uint8)
    numbers = 3 * N * n
    flat = memory[: 4 * numbers] if memory.numel() >= 4 * numbers else memory.new_empty(4 * numbers)
    lengths, scales = flat.view(torch.float32).split((2 * N * n, N * n))
    return lengths.view(N, 2, n), scales.view(N, n)


def follow(
    interval: Sequence[Triple],
    pair: Pair | None,
    A: torch.Tensor,
    Q: torch.Tensor,
    Z: torch.Tensor,
    T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute Q of one restart interval of two or more steps, and return (Q, scratch, scratch).

    All matrices (N, n, n). A holds X X^T; A, Z, T and the former content of Q are overwritten. The
    result is one of Q, Z and T. `interval`: triples (a, b, c) of the steps; `pair`: the polynomial
    of the last two steps, or None.

    With Z = b A + c A^2 and P = Z + a I, each step computes

        T = A Z + a A,   A <- Z T + a T       that is A <- P A P
        Q + q I <- Q Z + a Q + q Z + q a I    that is Q <- Q P

    The multiple of I is kept apart, as the numbers a and q: in 16 bits Z + a I loses much of Z. Q
    starts as I, so after the first step Q = Z and q = a, without a product. The last step needs no
    further A. The returned Q is complete, q = 0.

    Symmetric products may leave the tiles above the diagonal unwritten if all readers of the matrix
    are symmetric products that read lower tiles only. The returned Q is always whole.
    """
    # Steps with c = 0 use `linear`, which reads and writes whole matrices
    whole = not (all(c for _, _, c in interval) and read_triangles(A, Q, Z, T))
    q = 0.0
    last = len(interval)
    for step, (a, b, c) in enumerate(interval[:-2] if pair else interval, start=1):
        polynomial(A, (0.0, b, c), Z, whole)
        if step < last:
            symmetric_product(A, Z, T, 1.0, [(A, a)], 0.0, whole)
            symmetric_product(Z, T, A, 1.0, [(T, a)], 0.0, whole)
        if step == 1:
            Q, Z = Z, Q
            q = a
        else:
            addends = [(Q, a), (Z, q)] if q else [(Q, a)]
            symmetric_product(Q, Z, T, 1.0, addends, q * a, whole or step == last)
            Q, T = T, Q
            q = 0.0
    if not pair:
        return Q, Z, T
    two_steps(pair, A, Z, T, whole, whole or last == 2)
    if last == 2:
        return Z, Q, T
    # Q <- (Q + q I) Z, with Z the polynomial of the two steps
    symmetric_product(Q, Z, T, 1.0, [(Z, q)])
    return T, Q, Z


def two_steps(
    pair: Pair,
    A: torch.Tensor,
    S: torch.Tensor,
    C: torch.Tensor,
    whole: bool = True,
    end: bool = True,
) -> None:
    """Write the polynomial of two steps in A to S, by four products; A and C are overwritten.

        S = A^2 + A,   C = A S + A + S,   H = C^2 + A + S + C + I,   result = H^2 + S + C + I

    with a coefficient for each term (`coefficients.Pair`). All matrices (N, n, n). `whole`: write
    all tiles of S, C and H; `end`: write all tiles of the result.
    """
    (square, a), (cube, ca, cs), (half, ha, hs, hc, h), (qs, qc, q) = pair
    symmetric_product(A, A, S, square, [(A, a)], 0.0, whole)
    symmetric_product(A, S, C, cube, [(A, ca), (S, cs)], 0.0, whole)
    # H takes the memory of A
    symmetric_product(C, C, A, half, [(A, ha), (S, hs), (C, hc)], h, whole)
    symmetric_product(A, A, S, 1.0, [(S, qs), (C, qc)], q, end)


def polynomial(A: torch.Tensor, triple: Triple, P: torch.Tensor, whole: bool = True) -> None:
    """P <- a I + b A + c A^2, all (N, n, n); a pass without a product if c is 0."""
    a, b, c = triple
    if c:
        symmetric_product(A, A, P, c, [(A, b)], a, whole)
    else:
        linear(A, b, a, P)


class LongSide:
    """The matrices of one long side in a batch: their X (N, n, m), scales, and results.

    X and its successor Y alternate between two scratch buffers; each product X <- Q X swaps the
    buffers. With mixed input the first X is U itself, see [Note: mixed input].
    """

    def __init__(
        self,
        members: Members,
        raw: bool,
        A: torch.Tensor,
        first: int,
        X: torch.Tensor,
        Y: torch.Tensor,
    ):
        """`raw`: X begins as U, uncast. `A`: (total, n, n), the Gram matrices of the whole batch,
        `first` the index of this long side's first. `X`, `Y`: scratch (N, n, m).
        """
        counts = [len(U) for U, _ in members]
        ends = list(itertools.accumulate(counts))
        # Members' matrices in X, and this long side's matrices in the batch
        self.places = [slice(end - count, end) for end, count in zip(ends, counts)]
        self.rows = slice(first, first + ends[-1])
        self.members = members
        self.raw = raw
        self.A = A[self.rows]
        self.memory = X, Y
        # Set anew by `begin`, since products change all of them
        self.X = X
        self.Y = Y
        self.x_buffer = X  # scratch buffer of X; differs from X while X is U itself
        self.scales: torch.Tensor | None = None  # (N,) fp32, yet to be applied to X; None for 1
        # (scales, powers) of the product that casts X, each (N,) fp32; empty if X is cast
        self.cast_factors: tuple = ()

    def begin(self, eps: float, factors: torch.Tensor, lengths: torch.Tensor | None = None) -> None:
        """X <- U, scaled and cast to the dtype of products; with mixed input only the factors.

        `factors` (3, total) fp32 are written. With `lengths` (total, 2, n) fp32, for AOL, each row
        is divided by its length instead, and the lengths are written.
        """
        self.X, self.Y = self.memory
        self.x_buffer = self.X
        self.scales = None
        self.cast_factors = ()
        if self.raw:
            return self._begin_raw(eps, factors[:, self.rows])
        if lengths is None:
            self.scales = factors[0, self.rows]
        # Y is unused until the first product and serves as scratch of the sums
        for (U, _), place in zip(self.members, self.places):
            if lengths is None:
                unit_norm(U, self.X[place], self.scales[place], eps, self.Y)
            else:
                unit_rows(U, self.X[place], lengths[self.rows][place])

    def _begin_raw(self, eps: float, factors: torch.Tensor) -> None:
        """X <- U without a copy, or, if several stacks or other strides forbid that, a copy in the
        dtype of U. `factors`: this long side's (3, N).
        """
        U = self.members[0][0]
        self.scales = factors[0]
        self.cast_factors = factors[2], factors[1]
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

    def multiply(self, Q: torch.Tensor) -> None:
        """X <- Q X, with the deferred scales applied. `Q`: (total, n, n) of the batch."""
        product(Q[self.rows], self.X, self.Y, *self.cast_factors or (self.scales,))
        # Y gets the buffer of the old X, never the memory of U
        self.X = self.Y
        self.Y = self.x_buffer
        self.x_buffer = self.X
        self.scales = None
        self.cast_factors = ()

    def finish(self, Q: torch.Tensor) -> None:
        """out <- Q X, rounded to the dtype of out, for every member."""
        Q = Q[self.rows]
        for (_, out), place in zip(self.members, self.places):
            scales = None if self.scales is None else self.scales[place]
            product(Q[place], self.X[place], out, scales)

    def copy_out(self, results: torch.Tensor) -> None:
        """out <- results (N, n, m), in the order of X, for every member."""
        for (_, out), place in zip(self.members, self.places):
            # A slice of all matrices: `ScatteredRows` are copied by slices
            out[:].copy_(results[place])


def _is_laid_out(U: Stack) -> bool:
    """Whether U is multiplied where it lies: addressable by TMA, rows at multiples of a cache line,
    as in a `ScratchLayout`.
    """
    return supports_in_place(U) and U.stride(1) * U.element_size() % CACHE_LINE_BYTES == 0

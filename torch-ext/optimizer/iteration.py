"""The Newton-Schulz iterations, on matrices that share launches: all of one short side.

Decides: which segments and products with X follow each other, in which memory, and what runs side by side. Must not
know: what the coefficients mean, nor how a product is computed.
"""
from __future__ import annotations

import functools
import itertools
import operator

import torch

from .kernels import capturing, on_chip, resident
from .kernels.aol import aol, scale_columns, scale_rows
from .kernels.gram import takes_raw
from .long_side import LINE, LongSide
from .segment import follow, polynomial

LARGE = 3072  # short sides from here on fill a GPU alone (measured on an H200, docs/log.md)
MANY = 160_000_000  # numbers of all matrices up to which `gain_side_by_side` is true


class Room:
    """Stacks one after another in memory that is lent. Matrices begin where the cache's lines do, on a GPU rows too."""

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
        return [self.memory.as_strided(shape, strides, first + at) for shape, strides, at in self.forms]


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


def takes(n: int, m: int, itemsize: int, most: int) -> tuple[int, int]:
    """Return the bytes that `iterate` takes at most for one (n, m) matrix, n <= m: of its own shape, in two equal
    parts, and of n x n, with its scale.
    """
    long, short = (n * (side * itemsize + -side * itemsize % LINE) for side in (m, n))
    return 2 * long, (4 if most > 1 else 2) * short + LINE


def gain_side_by_side(shapes) -> bool:
    """Say whether the iterations of matrices (n, m), n <= m, are done earlier side by side: one fills the processors
    that another leaves idle, but large products drive each other out of the cache (measured on an H200, docs/log.md).
    """
    return max(n for n, _ in shapes) < LARGE and sum(n * m for n, m in shapes) <= MANY


def iterate_all(stacks, steps, eps: float, dtype: torch.dtype, memory=None) -> None:
    """`iterate` each of stacks (members, most steps between restarts): side by side, in a CUDA graph, if `memory` is
    enough for all of them together; else one after the other, in the same memory.
    """
    device, lent = stacks[0][0][0][0].device, _divided(stacks, dtype, memory)
    works = [functools.partial(iterate, members, steps, eps, dtype, most, own)
             for (members, most), own in zip(stacks, lent or itertools.repeat(memory))]
    if lent and capturing(device):
        return _side_by_side(works, device)
    for work in works:
        work()


def _divided(stacks, dtype, memory):
    """The part of `memory` for each of `stacks`; None if it is not enough for all of them together."""
    sizes = list(zip(*(_needs(members, dtype.itemsize, most) for members, most in stacks)))
    if memory is None or len(stacks) == 1 or any(map(operator.lt, map(torch.numel, memory), map(sum, sizes))):
        return None
    return list(zip(*(flat[:sum(parts)].split(parts) for flat, parts in zip(memory, sizes))))


def most_of(stacks, itemsize: int) -> tuple[int, ...]:
    """Return the bytes of `memory` that `iterate_all` takes at most, one after the other."""
    return tuple(map(max, zip((0, 0, 0), *(_needs(members, itemsize, most) for members, most in stacks))))


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


def iterate(members, steps, eps: float, dtype: torch.dtype, most: int, memory=None) -> None:
    """Orthogonalize each U (N, n, m), n <= m, of members (U, out) into out; n is the same for all.

    They may be the same memory, and each a Split. `steps`: a `steps.Steps`; `dtype`: that of products; `most`: steps
    between restarts, 1 in the standard iteration, more in the Gram iteration; `memory`: three flat uint8 tensors of the
    bytes that `takes` says for all matrices together, the first of two equal parts, the second, and the rest; None for
    new memory.
    """
    kinds = _by_kind(members, steps, dtype, most)
    counts = [sum(len(U) for U, _ in group) for group in kinds.values()]
    n, device = members[0][0].shape[1], members[0][0].device
    long, square = tuple((count, n, m) for count, (m, _) in zip(counts, kinds)), (sum(counts), n, n)
    rooms = [Room(shapes, dtype, device) for shapes in (long, long, (square,) * (4 if most > 1 else 2))]
    sizes = [room.nbytes for room in rooms[:2]] + [rooms[2].nbytes + LINE * sum(counts)]
    memory = memory or torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(sizes)
    for room, flat in zip(rooms, memory):
        room.lend(flat)
    factors = memory[2][rooms[2].nbytes:][:12 * sum(counts)].view(torch.float32).view(3, sum(counts))
    (Xs, Ys, squares), parts, first = (room.all() for room in rooms), [], 0
    for ((_, raw), group), count, X, Y in zip(kinds.items(), counts, Xs, Ys):
        parts.append(LongSide(group, raw, squares[0], first, X, Y))
        first += count
    lengths, row_scales = _factors(rooms[1].memory, *squares[0].shape[:2]) if steps.aol else (None, None)
    for part in parts:
        part.begin(eps, factors, lengths)
    cut = dtype, most, n
    segments = [*zip(steps.segments(*cut), steps.pairs(*cut))]
    P = _iteration(parts, squares, segments, lengths, row_scales)
    for part in parts:
        part.finish(P)


def _by_kind(members, steps, dtype, most) -> dict:
    """(Long side, whether they are multiplied as they are) -> members."""
    kinds, restarts = {}, len(steps.segments(dtype, most, members[0][0].shape[1])) > 1
    for U, out in members:
        raw = restarts and not steps.aol and takes_raw(U, dtype)
        kinds.setdefault((U.shape[2], raw), []).append((U, out))
    return dict(sorted(kinds.items()))


def _factors(memory, N, n):
    """Lengths (N, 2, n) and scales (N, n) of rows, fp32, in memory that is free until X <- P X, if it is enough."""
    memory, numbers = memory.view(torch.uint8), 3 * N * n
    flat = memory[:4 * numbers] if memory.numel() >= 4 * numbers else memory.new_empty(4 * numbers)
    lengths, scales = flat.view(torch.float32).split((2 * N * n, N * n))
    return lengths.view(N, 2, n), scales.view(N, n)


def _iteration(parts, squares, segments, lengths, scales):
    """X <- Q X, segment by segment; return the last Q, yet to be applied.

    segments: triples, and the pair that the last two are taken as, or None. squares: A and Q, and for more than a step
    at a time Z and T. scales (N, n): room for those of A (AOL), by the `lengths` of rows, which X has yet to get; None
    where there are none.
    """
    A, Q, *others = squares
    for number, (segment, pair) in enumerate(segments):
        if number:
            _multiply(parts, Q, scales if number == 1 else None)
        stays, scaled = resident.fits(A, Q, segment, pair), not number and scales is not None
        # the kernel that keeps A in shared memory computes X X^T, too
        long = (parts[0].X, parts[0].scales) if stays and len(parts) == 1 and not scaled else None
        if long is None:
            _restart(parts)
        if scaled:
            aol(A, lengths, scales)
        if others and on_chip.follows(A):
            on_chip.follow(A, Q, segment)
        elif len(segment) == 1:
            polynomial(A, segment[0], Q)
        elif stays:
            Q, *others = resident.follow(segment, pair, A, Q, *others, long)
        else:
            Q, *others = follow(segment, pair, A, Q, *others)
    _scale(parts, scales if len(segments) == 1 else None)
    return Q


def _multiply(parts, P, scales) -> None:
    """X <- P X, or P D X with scales, D = diag(scales)."""
    if scales is not None:
        scale_columns(P, scales)  # one pass over P, for X is larger
    for part in parts:
        part.multiply(P)


def _scale(parts, scales) -> None:
    """X <- D X: the last product may be computed transposed, which wants P symmetric."""
    for part in parts if scales is not None else ():
        scale_rows(part.X, scales[part.rows])


def _restart(parts) -> None:
    """A <- X X^T."""
    for part in parts:
        part.restart()

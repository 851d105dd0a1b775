"""Bucketing: where the matrices of one family are cut into buckets, and the order of the buckets.

`rounds_of` sorts a family into rounds with a matrix per owner. `cut` groups rounds into buckets, by
expected time where times are known. `in_equal_buckets` cuts a sequence into buckets of equal size,
for the modes in which the step overlaps with backward or forward. Sizes and times are callables of
the caller.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from .memory_model import MatrixLike, MemoryModel, Round

Buckets = list[list[Round]]

# Fractions of the limit that a bucket may take. Smaller buckets overlap more, but pay the latency
# of an all-to-all and the launches of a stack more often.
ROOM_FRACTIONS = (1, 1 / 2, 1 / 4, 1 / 8)
# Tried numbers of rounds in the small first bucket, and in the small last one; 0: no such bucket
END_ROUNDS = (0, 1, 2)
# Largest ratio of expected times at which another arrangement replaces the best so far. The cost
# model is not exact enough to tell closer times apart.
WORTHWHILE = 0.995
# Largest ratio of expected time to the best, at which buckets that take less memory are preferred
MAX_SLOWDOWN = 1.01
# Number of buckets of a family with overlap_backward, where each bucket takes memory of its own,
# and with overlap_forward
OVERLAP_BUCKETS = 8
# Ratio of the limit of one trial to the limit of the trial before, in the search for less memory
SHRINK = 0.85


def rounds_of(
    matrices: Iterable[MatrixLike], owner_of: Mapping[MatrixLike, int], memory_model: MemoryModel
) -> list[Round]:
    """Return the rounds of a family: round i has the i-th matrix of every owner.

    A bucket of whole rounds gives every owner work; only the last rounds may lack owners.
    `matrices`: in the order of `by_cost`.
    """
    queues: dict[int, list[MatrixLike]] = defaultdict(list)
    for matrix in matrices:
        queues[owner_of[matrix]].append(matrix)
    rounds = []
    for together in itertools.zip_longest(*(queues[owner] for owner in sorted(queues))):
        together = tuple(matrix for matrix in together if matrix is not None)
        taken = memory_model.sum((matrix, owner_of[matrix]) for matrix in together)
        rounds.append(Round(together, taken))
    return rounds


def by_cost(matrices: Iterable[MatrixLike], cost: Callable[[int, int], int]) -> list[MatrixLike]:
    """Return matrices in descending order of cost. The sort key depends on nothing local, so all
    ranks get equal orders.
    """
    return sorted(matrices, key=lambda m: (-cost(*m.iterated_shape), m.rows, m.param, m.at, m.unit))


def cut(
    rounds: Sequence[Round],
    workspace_for: Callable[[Counter], int],
    rank_bytes: int,
    predicted_end: Callable[[list[Counter]], float] | None = None,
    bytes_together: Callable[[list[Counter]], int] | None = None,
) -> Buckets:
    """Group rounds into buckets, each a list of rounds.

    `workspace_for(taken)`: bytes of a workspace for buckets with a sum `taken` of `Round.taken`.
    `rank_bytes`: limit of the bytes; a bucket of a single round may exceed the limit. A limit of
    more than twice the bytes of all rounds together has the effect of its half.
    `predicted_end(sums)`: expected end of the last bucket, in ns; `sums`: `taken` of each bucket,
    in order. `bytes_together(sums)`: bytes of the workspace shared by the buckets.

    Without `predicted_end` the buckets are as few as the limit allows. With `predicted_end` smaller
    buckets are tried, for more overlap; then a small first bucket, so that Newton-Schulz starts
    early; then a small last bucket, so that little is left to send when Newton-Schulz ends. With
    `bytes_together` the result is the tried arrangement of fewest bytes whose end is within
    MAX_SLOWDOWN of the best; without, only the time counts.
    """
    nbytes_of = _WorkspaceBytes(rounds, workspace_for)
    # A limit of more than twice the bytes of all rounds in one bucket is halved: then its fractions
    # divide the rounds, and a limit twice as large gives equal buckets
    together = nbytes_of(rounds)
    while 0 < 2 * together <= rank_bytes:
        rank_bytes //= 2
    best = _fill(rounds, nbytes_of, rank_bytes)
    choice = [1, 0, 0]  # fraction of the limit, rounds of the first bucket, rounds of the last
    if predicted_end is None or len(rounds) == 1:
        return best
    least = predicted_end(nbytes_of.sums(best))
    seen = {_key(best)}
    # Coordinate descent: the three choices one after another, each with the best values found so
    # far, instead of all 36 combinations. Every trial simulates the timeline.
    options = (ROOM_FRACTIONS, END_ROUNDS, END_ROUNDS)
    for position, option in [(i, option) for i, some in enumerate(options) for option in some]:
        tried = [*choice[:position], option, *choice[position + 1 :]]
        buckets = _arranged(rounds, nbytes_of, rank_bytes, tried)
        if _key(buckets) in seen or _is_too_large(buckets, nbytes_of, rank_bytes):
            continue
        seen.add(_key(buckets))
        done = predicted_end(nbytes_of.sums(buckets))
        if done < WORTHWHILE * least:
            best, choice = buckets, tried
            least = done
    if bytes_together is None:
        return best
    smaller = _smaller(rounds, nbytes_of, rank_bytes, choice)
    distinct = {_key(buckets): buckets for buckets in (best, *smaller)}
    latest = MAX_SLOWDOWN * least
    fewest = bytes_together(nbytes_of.sums(best))
    for buckets in distinct.values():
        sums = nbytes_of.sums(buckets)
        nbytes = bytes_together(sums)
        # The time is computed last: a simulation of the timeline takes longer than a sum
        if nbytes < fewest and predicted_end(sums) <= latest:
            best, fewest = buckets, nbytes
    return best


def _smaller(
    rounds: Sequence[Round], nbytes_of: _WorkspaceBytes, rank_bytes: int, choice: Sequence[float]
) -> Iterator[Buckets]:
    """Yield arrangements with smaller and smaller buckets, down to single rounds.

    First with the first and last bucket of `choice`, then without separate first and last buckets.
    """
    least = min(nbytes_of([one]) for one in rounds) / rank_bytes
    for ends in dict.fromkeys([tuple(choice[1:]), (0, 0)]):
        fraction = choice[0]
        longest = len(rounds)  # rounds of the longest bucket of the last trial
        while fraction >= least and longest > 1:
            buckets = _arranged(rounds, nbytes_of, rank_bytes, (fraction, *ends))
            longest = max(map(len, buckets))
            if not _is_too_large(buckets, nbytes_of, rank_bytes):
                yield buckets
            # Next limit: at most the fraction that the longest bucket uses. Every limit in between
            # gives equal buckets.
            fraction = SHRINK * min(fraction, max(map(nbytes_of, buckets)) / rank_bytes)


def in_equal_buckets(
    rounds: Sequence[Sequence[MatrixLike]], least: float, count: int = OVERLAP_BUCKETS
) -> list[tuple[MatrixLike, ...]]:
    """Cut a sequence of rounds, in the order of their buckets, into at most `count` buckets of
    about equal size; return the matrices of each bucket.

    `least`: fewest elements of a bucket; only the last bucket may be smaller. A round is never cut.
    """
    size = max(sum(m.numel for together in rounds for m in together) / count, least)
    buckets: list[list[MatrixLike]] = [[]]
    numel = 0
    for together in rounds:
        # Against the running total, so that the excess of one bucket shortens the next
        if numel >= size * len(buckets):
            buckets.append([])
        buckets[-1] += together
        numel += sum(m.numel for m in together)
    return [tuple(bucket) for bucket in buckets]


def _arranged(
    rounds: Sequence[Round], nbytes_of: _WorkspaceBytes, rank_bytes: int, choice: Sequence[float]
) -> Buckets:
    """Return buckets in the order: small first bucket, all middle rounds by descending cost, small
    last bucket.

    `choice`: (fraction of the limit for middle buckets, rounds of the first bucket, rounds of the
    last bucket). The first bucket has the cheapest rounds with work for every owner. The last
    bucket has the cheapest rounds of all.
    """
    fraction, lead, tail = choice
    end = max(0, len(rounds) - tail)
    full = sum(len(one.matrices) == len(rounds[0].matrices) for one in rounds[:end])
    start = max(0, full - lead)
    first = rounds[start:full]
    middle = [*rounds[:start], *rounds[full:end]]
    buckets = (first, *_fill(middle, nbytes_of, fraction * rank_bytes), rounds[end:])
    return [bucket for bucket in buckets if bucket]


def _fill(rounds: Sequence[Round], nbytes_of: _WorkspaceBytes, rank_bytes: float) -> Buckets:
    """Group rounds, in order, into as few buckets as `rank_bytes` bytes each allow.

    Each round is added to one running sum, so the time is linear in the number of rounds.
    """
    buckets: Buckets = []
    number = 0  # of the current bucket, see `_WorkspaceBytes`
    for one in rounds:
        longer = nbytes_of.extended(number, one)
        if buckets and nbytes_of.of(longer) <= rank_bytes:
            buckets[-1].append(one)
            number = longer
        else:
            buckets.append([one])
            number = nbytes_of.extended(0, one)
    return buckets


def _is_too_large(buckets: Buckets, nbytes_of: _WorkspaceBytes, rank_bytes: int) -> bool:
    """Return whether a bucket of more than one round exceeds the limit."""
    return any(len(bucket) > 1 and nbytes_of(bucket) > rank_bytes for bucket in buckets)


class _WorkspaceBytes:
    """Workspace bytes of lists of rounds, cached.

    Rounds with equal `taken` are of one kind; thousands of rounds are of a handful of kinds. Each
    list of kinds has a number, 0 for the empty list, stored under the number of the list without
    the last kind, and the last kind. A list costs an addition of counters if all but the last kind
    is known, and nothing if the whole list is known.
    """

    def __init__(self, rounds: Iterable[Round], workspace_for: Callable[[Counter], int]) -> None:
        """`rounds`: all rounds of which lists will be made."""
        self.workspace_for = workspace_for
        kinds: dict[frozenset, int] = {}  # `Round.taken` -> number of the kind
        self.kinds = {  # id of a round -> number of its kind
            id(one): kinds.setdefault(frozenset(one.taken.items()), len(kinds)) for one in rounds
        }
        # (number of a list, next kind) -> number of the list with a round of the kind appended
        self.numbers: dict[tuple[int, int], int] = {}
        self.taken = [Counter()]  # by number: sum of `Round.taken`
        self.sizes: dict[int, int] = {}  # by number: bytes of workspace

    def __call__(self, rounds: Iterable[Round]) -> int:
        """Return the bytes of workspace of a list of rounds."""
        return self.of(self._number(rounds))

    def sums(self, buckets: Buckets) -> list[Counter]:
        """Return the sum of `Round.taken` of each bucket."""
        return [self.taken[self._number(bucket)] for bucket in buckets]

    def _number(self, rounds: Iterable[Round]) -> int:
        """Return the number of a list of rounds."""
        number = 0
        for one in rounds:
            number = self.extended(number, one)
        return number

    def extended(self, number: int, one: Round) -> int:
        """Return the number of list `number` with the round `one` appended."""
        key = number, self.kinds[id(one)]
        if key not in self.numbers:
            self.numbers[key] = len(self.taken)
            taken = Counter(self.taken[number])
            taken.update(one.taken)
            self.taken.append(taken)
        return self.numbers[key]

    def of(self, number: int) -> int:
        """Return the bytes of workspace of a list, by its number."""
        if number not in self.sizes:
            self.sizes[number] = self.workspace_for(self.taken[number])
        return self.sizes[number]


def _key(buckets: Buckets) -> tuple[tuple[int, ...], ...]:
    """Return a hashable key of an arrangement: the ids of the rounds of each bucket."""
    return tuple(tuple(map(id, bucket)) for bucket in buckets)

"""Where the matrices of one family are cut into buckets, and in which order buckets go."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable

from .memory_model import Round

SHARES = (1, 1 / 2, 1 / 4, 1 / 8)  # of the room that a bucket may take
ENDS = (0, 1, 2)  # layers that make a bucket of their own, at the beginning and at the end
# More buckets, or another order, have to save some of the time: expectations are not exact
WORTHWHILE = 0.995
SPARE = 1.01  # how much of the best time less memory may cost
# Buckets of one family along backward, where each has memory of its own, or along forward
PARTS = 8
SHRINK = 0.85  # where less memory is looked for: each room to the one before it


def rounds_of(matrices, owner_of, cost, freight) -> list[Round]:
    """The next matrix of every owner, the costliest first: layer after layer, so that each has work
    for all.
    """
    queues = defaultdict(list)
    for matrix in sorted(matrices, key=lambda m: (-cost(m.rows, m.cols), m.rows, m.param, m.at)):
        queues[owner_of[matrix]].append(matrix)
    layers = []
    for together in itertools.zip_longest(*(queues[owner] for owner in sorted(queues))):
        together = tuple(matrix for matrix in together if matrix is not None)
        layers.append(
            Round(together, freight.sum((matrix, owner_of[matrix]) for matrix in together))
        )
    return layers


def cut(layers, workspace_for, room, predicted_end=None, bytes_together=None) -> list[list[Round]]:
    """Layers -> buckets. `workspace_for(taken)`: the workspace that such buckets want; `room`: the
    bytes it may have; `predicted_end(buckets)`: when the last is done.

    As few buckets as there is room for, unless others are done earlier: smaller ones, which overlap
    more; small layers first, so that products start early; small layers last, so that little is
    left to send when products end. `bytes_together(buckets)`: the workspace that these take. Where
    given, the buckets that take the fewest of those tried which are done in SPARE of the best time;
    else time alone counts.
    """
    size = _Sizes(workspace_for)
    best, choice = _fill(layers, size, room), [1, 0, 0]
    if predicted_end is None or len(layers) == 1:
        return best
    least, seen = predicted_end(best), {_key(best)}
    for which, option in [
        (which, option) for which, options in enumerate((SHARES, ENDS, ENDS)) for option in options
    ]:
        tried = [*choice[:which], option, *choice[which + 1 :]]
        buckets = _arranged(layers, size, room, tried)
        if _key(buckets) in seen or any(len(b) > 1 and size(b) > room for b in buckets):
            continue
        seen.add(_key(buckets))
        done = predicted_end(buckets)
        if done < WORTHWHILE * least:
            best, least, choice = buckets, done, tried
    if bytes_together is None:
        return best
    options = {_key(buckets): buckets for buckets in (best, *_smaller(layers, size, room, choice))}
    return _smallest(options.values(), bytes_together, predicted_end, SPARE * least)


def _smallest(options, bytes_together, predicted_end, latest):
    """The first option, or of the others that are done by `latest` the one that takes the fewest
    bytes.
    """
    best, *others = options
    fewest = bytes_together(best)
    for buckets in others:
        nbytes = bytes_together(buckets)
        if nbytes < fewest and predicted_end(buckets) <= latest:
            best, fewest = buckets, nbytes
    return best


def _smaller(layers, size, room, choice):
    """The same arrangement, then one without ends, each in smaller and smaller shares of the room,
    until every bucket is one layer.
    """
    least = min(size([layer]) for layer in layers) / room
    for ends in dict.fromkeys([tuple(choice[1:]), (0, 0)]):
        share, longest = choice[0], len(layers)
        while share >= least and longest > 1:
            buckets = _arranged(layers, size, room, (share, *ends))
            longest = max(map(len, buckets))
            if not any(len(b) > 1 and size(b) > room for b in buckets):
                yield buckets
            share = SHRINK * min(share, max(map(size, buckets)) / room)


def in_parts(rounds, least, count=PARTS) -> list[tuple]:
    """Tuples of matrices in the order in which they are to go -> the matrices in at most `count`
    parts of about one size, in elements, of `least` or more; only the last one may be smaller.
    """
    size = max(sum(m.numel for together in rounds for m in together) / count, least)
    parts, numel = [[]], 0
    for together in rounds:
        if numel >= size * len(parts):
            parts.append([])
        parts[-1] += together
        numel += sum(m.numel for m in together)
    return [tuple(part) for part in parts]


def _arranged(layers, size, room, choice):
    """The smallest layers that give every owner work | the others, in descending order | the
    smallest.
    """
    share, lead, tail = choice
    end = max(0, len(layers) - tail)
    full = sum(len(layer.matrices) == len(layers[0].matrices) for layer in layers[:end])
    first, between = (
        layers[max(0, full - lead) : full],
        layers[: max(0, full - lead)] + layers[full:end],
    )
    return [part for part in (first, *_fill(between, size, share * room), layers[end:]) if part]


def _fill(layers, size, room):
    """Layers in as few buckets as there is room for, in order. Each layer is added to one sum, so
    that the time is linear in the number of layers.
    """
    buckets, number = [], 0
    for layer in layers:
        longer = size.extended(number, layer)
        if buckets and size.of(longer) <= room:
            buckets[-1].append(layer)
            number = longer
        else:
            buckets.append([layer])
            number = size.extended(0, layer)
    return buckets


class _Sizes:
    """`workspace_for` of what lists of layers take together.

    Each list has a number, 0 for the empty one. A list that is one layer longer than a known one
    costs one addition, a known list none.
    """

    def __init__(self, workspace_for: Callable[[Counter], int]):
        self.workspace_for = workspace_for
        # (number of a list, id of the next layer) -> number of the list with that layer
        self.numbers: dict[tuple[int, int], int] = {}
        self.taken = [Counter()]  # by number: what the layers of the list take together
        self.sizes: dict[int, int] = {}  # by number: the bytes of workspace

    def __call__(self, layers: list[Round]) -> int:
        number = 0
        for layer in layers:
            number = self.extended(number, layer)
        return self.of(number)

    def extended(self, number: int, layer: Round) -> int:
        """Return the number of the list that has `layer` behind the layers of list `number`."""
        key = number, id(layer)
        if key not in self.numbers:
            self.numbers[key] = len(self.taken)
            taken = Counter(self.taken[number])
            taken.update(layer.taken)
            self.taken.append(taken)
        return self.numbers[key]

    def of(self, number: int) -> int:
        """Return the bytes of workspace of a list, by its number."""
        if number not in self.sizes:
            self.sizes[number] = self.workspace_for(self.taken[number])
        return self.sizes[number]


def _key(buckets):
    return tuple(tuple(map(id, bucket)) for bucket in buckets)

"""Where one family's matrices are cut into buckets, and in which order buckets go.

Decides by the room that a bucket may take and, where times are known, by when the last one is done: tensor cores
should start early, never wait for the wire, and end on a small transfer. Must not know: layouts, owners, routes.
"""
from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass

SHARES = (1, 1 / 2, 1 / 4, 1 / 8)  # of the room that a bucket may take
ENDS = (0, 1, 2)  # layers that make a bucket of their own, at the beginning and at the end
WORTH = 0.995  # more buckets, or another order, have to save some of the time: expectations are not exact
SPARE = 1.01  # of the time, for less memory
LESS = 0.8  # from one share to the next, where less memory is looked for


@dataclass(frozen=True)
class Layer:
    """One matrix of every owner that still has one, and what they take of the workspace together."""
    matrices: tuple
    taken: Counter


def layers_of(matrices, owner_of, cost, freight) -> list[Layer]:
    """The next matrix of every owner, the costliest first: layer after layer, so that each has work for all."""
    queues = defaultdict(list)
    for matrix in sorted(matrices, key=lambda m: (-cost(m.rows, m.cols), m.rows, m.param, m.at)):
        queues[owner_of[matrix]].append(matrix)
    layers = []
    for together in itertools.zip_longest(*(queues[owner] for owner in sorted(queues))):
        together = tuple(matrix for matrix in together if matrix is not None)
        layers.append(Layer(together, freight.sum((matrix, owner_of[matrix]) for matrix in together)))
    return layers


def cut(layers, most, room, price=None, held=None) -> list[list[Layer]]:
    """Layers -> buckets. `most(taken)`: the workspace that such a bucket wants; `price(buckets)`: when the last is done.

    As few buckets as there is room for, unless others are done earlier: smaller ones, which overlap more; small layers
    first, so that products start early; small layers last, so that little is left to send when products end.
    `held(buckets)`: the bytes that they take together; where given, as few as cost no more than SPARE of the time.
    """
    best, choice = _fill(layers, most, room), [1, 0, 0]
    if price is None or len(layers) == 1:
        return best
    least, seen = price(best), {_key(best)}
    for which, option in [(which, option) for which, options in enumerate((SHARES, ENDS, ENDS)) for option in options]:
        tried = [*choice[:which], option, *choice[which + 1:]]
        buckets = _arranged(layers, most, room, tried)
        if _key(buckets) in seen or any(len(b) > 1 and most(total(b)) > room for b in buckets):
            continue
        seen.add(_key(buckets))
        done = price(buckets)
        if done < WORTH * least:
            best, least, choice = buckets, done, tried
    return best if held is None else _smallest(best, held, _smaller(layers, most, room, choice), price)


def _smallest(best, held, others, price):
    """Of `best` and others that are done nearly as early, what takes the fewest bytes."""
    latest, least = SPARE * price(best), held(best)
    for buckets in others:
        if held(buckets) < least and price(buckets) <= latest:
            best, least = buckets, held(buckets)
    return best


def _smaller(layers, most, room, choice):
    """The same arrangement, and one without ends, in smaller and smaller shares of the room."""
    share, seen = choice[0], set()
    while share * room >= 1:
        for ends in (choice[1:], (0, 0)):
            buckets = _arranged(layers, most, room, (share, *ends))
            if _key(buckets) not in seen and not any(len(b) > 1 and most(total(b)) > room for b in buckets):
                seen.add(_key(buckets))
                yield buckets
        if max(map(len, _fill(layers, most, share * room))) == 1:
            return
        share *= LESS


def total(layers) -> Counter:
    """What layers take of the workspace together."""
    taken = Counter()
    for layer in layers:
        taken.update(layer.taken)
    return taken


def _arranged(layers, most, room, choice):
    """The smallest layers that give every owner work | the others, in descending order | the smallest."""
    share, lead, tail = choice
    end = max(0, len(layers) - tail)
    full = sum(len(layer.matrices) == len(layers[0].matrices) for layer in layers[:end])
    first, between = layers[max(0, full - lead):full], layers[:max(0, full - lead)] + layers[full:end]
    return [part for part in (first, *_fill(between, most, share * room), layers[end:]) if part]


def _fill(layers, most, room):
    buckets, taken = [], Counter()
    for layer in layers:
        if buckets and most(taken + layer.taken) <= room:
            buckets[-1].append(layer)
            taken = taken + layer.taken
        else:
            buckets.append([layer])
            taken = layer.taken
    return buckets


def _key(buckets):
    return tuple(tuple(map(id, bucket)) for bucket in buckets)

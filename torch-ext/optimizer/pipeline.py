"""The order in which buckets start, wait for their collectives and finish.

The only module that decides how communication and computation overlap. A bucket update is a
generator that yields collectives in flight; this module resumes it. Imports kernels/ and params/
only, so that the cost model can run the same schedule on clocks instead of buckets.
"""

from __future__ import annotations

import torch

from .kernels.launch import precompile
from .params import errors

# Buckets alive at once: one arriving, one being computed, one returning; each has memory of its own
BUCKETS_IN_FLIGHT = 3


class BucketUpdate:
    """How something is stepped, told by `run(hp)`: a generator that yields collectives in flight.

    `travels`: whether it yields any; `rehearsed`: names of its parts that are nothing but launches;
    `bound`: what it has of its bucket, or, without buckets, `store`: its tensors; `label`: its name
    in messages; `landed`: called at its end.
    """

    travels, rehearsed, bound, store, label, landed = False, (), None, None, None, None


class Pause(BucketUpdate):
    """A turn in which no bucket starts, between buckets of different ranks: the answers of one
    leave before the next.

    So all ranks issue the collectives of all their process groups in one order, whichever other
    groups they are in.
    """

    travels = True

    def run(self, hp):
        return
        yield


def precompile_kernels(jobs, device) -> None:
    """Have the kernels of all buckets compiled side by side, before the first step; nothing is
    launched or sent.
    """

    def work():
        for part, hp in parts:
            part(hp)

    parts = [(getattr(route, name), hp) for route, hp in jobs for name in route.rehearsed]
    if parts:
        precompile.precompile_kernels(device, work)


def run(jobs, closing=None) -> None:
    """Step all buckets. `jobs`: [(route, live parameter group)], in the same order on every rank.
    `closing`: what is done as soon as no bucket sends anything any more.

    In each turn a bucket starts on its way in, then the one before it is computed and sent back,
    then the one before that is applied: the wire is busy while matrices are multiplied. Buckets
    that stay at home run while the first one travels.
    """
    stories = [_told(route, hp) for route, hp in jobs if route.travels]
    at_home = [_told(route, hp) for route, hp in jobs if not route.travels]
    alive = _advance(stories[:1])
    for story in at_home:
        next(story, None)
    for story in [*stories[1:], None]:
        started = _advance([story] if story else [])
        alive = _resume(alive) + started
    if closing is not None:
        closing()
    _resume(alive)


def begin(route, hp):
    """Start one bucket on its way in: (its story, the collective in flight)."""
    story = _told(route, hp)
    return story, next(story)


def run_all_inbound_first(jobs, closing=None, begun=()) -> None:
    """Step all buckets: all start on their way in, then all are computed and sent back, then all
    are applied. `begun`: the first of those that travel, which `begin` has started. `closing` is
    done after all of them.

    Each has memory of its own. So ranks of which other buckets have begun issue the collectives of
    all process groups in one order, and none waits for another before the last matrix is computed.
    Buckets that stay at home run while the others travel in.
    """
    stories = [_told(route, hp) for route, hp in jobs if route.travels]
    at_home = [_told(route, hp) for route, hp in jobs if not route.travels]
    alive = [*begun, *_advance(stories[len(begun) :])]
    for story in at_home:
        next(story, None)
    while alive:
        alive = [later for one in alive for later in _resume([one])]
    if closing is not None:
        closing()


def run_beside(work, jobs, stream) -> None:
    """Do `work`, and step jobs that stay at home beside it, on a stream of their own (None: before
    it).
    """
    if stream is None or not jobs:
        run(jobs)
        return work()
    here = torch.cuda.current_stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        run(jobs)
    work()
    here.wait_stream(stream)


def _told(route, hp):
    """A route's story, at whose end it says that it has `landed`, where somebody wants to know. An
    error in it, or of a collective that it waits for, says which bucket that was.
    """
    with errors.during(route.label or type(route).__name__):
        yield from route.run(hp)
        if route.landed is not None:
            route.landed()


def _advance(stories):
    """[(story, collective it waits for)] of those that are not at their end."""
    return [
        (story, collective) for story in stories if (collective := next(story, None)) is not None
    ]


def _resume(alive):
    """Let every bucket on its way go on once its collective is done, the one that started last
    first.
    """
    resumed = []
    for story, collective in reversed(alive):
        try:
            collective.wait()
        except Exception as error:
            story.throw(error)
        resumed = _advance([story]) + resumed
    return resumed

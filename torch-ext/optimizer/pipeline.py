"""The order in which buckets start, wait for their collectives and finish.

The only module that decides how communication and computation overlap. A bucket update is a
generator that yields collectives in flight; this module resumes it. Imports kernels/ and params/
only, so that the cost model can run the same schedule on clocks instead of buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .kernels.launch import precompile
from .params import errors

# Buckets alive at once: one arriving, one being computed, one returning; each has memory of its own
SLOTS = 3


class BucketUpdate:
    """One bucket's part of a step: `run(group)` is a generator that yields collectives in flight.

    `label`: its name in messages. `written`: called with the update once `run` has ended, when its
    weights are written. `store`: the tensors of its parameters, None for a pause. `bucket`: its
    bucket of a plan, None for AdamW's parameters that are stepped where they are stored.
    """

    travels = False  # whether `run` yields collectives
    bucket = None

    def __init__(
        self,
        label: str,
        written: Callable[[BucketUpdate], None] | None = None,
        store: object = None,
    ):
        self.label = label
        self.written = written
        self.store = store

    def run(self, group: dict) -> Iterator:
        raise NotImplementedError

    def launches(self, group: dict) -> list[Callable[[], None]]:
        """Parts of `run` that launch kernels and do nothing else; for compilation beforehand."""
        return []


class Pause(BucketUpdate):
    """A turn in which no bucket starts, between buckets of different ranks: the updates of one are
    sent back before the next starts.

    All ranks then issue the collectives of all their process groups in one order, whichever other
    groups they are in.
    """

    travels = True

    def run(self, group: dict) -> Iterator:
        return
        yield


def precompile_kernels(jobs: list[tuple[BucketUpdate, dict]], device: torch.device) -> None:
    """Compile the kernels of all buckets side by side, before the first step. Launches and sends
    nothing.
    """
    launches = [launch for update, group in jobs for launch in update.launches(group)]

    def launch_all() -> None:
        for launch in launches:
            launch()

    if launches:
        precompile.precompile_kernels(device, launch_all)


def run(jobs, closing=None) -> None:
    """Step all buckets. `jobs`: [(route, live parameter group)], in the same order on every rank.
    `closing`: what is done as soon as no bucket sends anything any more.

    In each turn a bucket starts on its way in, then the one before it is computed and sent back,
    then the one before that is applied: the wire is busy while matrices are multiplied. Buckets
    that stay at home run while the first one travels.
    """
    stories, at_home = [], []
    for route, hp in jobs:
        (stories if route.travels else at_home).append(_told(route, hp))
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


def run_all_in(jobs, closing=None, begun=()) -> None:
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


def beside(work, jobs, stream) -> None:
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
    try:
        yield from route.run(hp)
        if route.written is not None:
            route.written(route)
    except Exception as error:
        errors.add_context(error, route.label)
        raise


def _advance(stories):
    """[(story, collective it waits for)] of those that are not at their end."""
    found = []
    for story in stories:
        collective = next(story, None)
        if collective is not None:
            found.append((story, collective))
    return found


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

"""The pipeline: the order in which buckets start, wait for collectives and finish.

The only module that decides how communication and computation overlap. `BucketUpdate.run` is a
generator that yields collectives in flight; `run` and `run_all_inbound_first` resume the
generators. Imports kernels/ and params/ only, so that planning/cost_model.py can import and run the
schedule, on a simulated clock.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Protocol

import torch

from .kernels.launch import precompile
from .params import errors

# At any time a first bucket is received, a second one computed and a third one sent back, each in a
# bucket buffer of its own. `run` fixes the number without reading the constant: with fewer buffers
# a bucket would overwrite the buffer of an earlier one.
BUCKETS_IN_FLIGHT = 3


class Collective(Protocol):
    """A collective in flight, such as a `torch.distributed.Work`."""

    def wait(self) -> object:
        """Let the current stream (on CPUs: the host) wait for the collective."""


class UpdatedParams(Protocol):
    """The parameters that a `BucketUpdate` steps: what callers of an update may read. The class is
    `Store` in execution/param_store.py, which imports this module.
    """

    params: Sequence[torch.Tensor]
    groups: Sequence[dict]  # live parameter groups that are stepped together
    device: torch.device

    def locals(self, key: str | None = None) -> list[torch.Tensor]:
        """Local tensors of all weights, or of state `key`."""


Running = Generator[Collective, None, None]  # a started `BucketUpdate.run`
InFlight = tuple[Running, Collective]  # an update, and the collective that it waits for


class BucketUpdate:
    """Base class: how a bucket, or a set of parameters without buckets, is stepped.

    Subclasses define `run(group)`, a generator that steps with the live parameter group `group` and
    yields every collective in flight. The pipeline waits for the collective, then resumes the
    generator.
    """

    has_collectives = False  # `run` yields collectives, if the plan needs them
    bucket = None  # the bucket of a plan; None for parameters without buckets, and for a pause

    def __init__(
        self,
        label: str,
        written: Callable[[BucketUpdate], None] | None = None,
        store: UpdatedParams | None = None,
    ):
        """`label`: name in error messages, such as "bucket 3 (...)". `written`: called with the
        update when `run` has ended and the weights are written; None: nothing to call. `store`: the
        tensors of the update's parameters, None for a pause.
        """
        self.label = label
        self.written = written
        self.store = store

    def run(self, group: dict) -> Running:
        """Step; see the class. Raises NotImplementedError: subclasses define the method."""
        raise NotImplementedError

    def launches(self, group: dict) -> list[Callable[[], None]]:
        """Parts of `run` that launch kernels and do nothing else, for `precompile_kernels`."""
        return []


# (update, live parameter group); None: of a simulated bucket (planning/cost_model.py)
Job = tuple[BucketUpdate, dict | None]


class StepHook:
    """Base class: work around the buckets of a step; every method does nothing by default.

    `Muon.step` calls `before_buckets`, runs the buckets, then calls `after_buckets`. Hooks are
    called in the order of the optimizer's list, which is equal on all ranks: a hook may issue
    collectives.

    `launches`: kernels of the hook, to be compiled before the first step.
    """

    launches: Sequence[Callable[[], None]] = ()

    def before_buckets(self, found_inf: torch.Tensor | float | None) -> None:
        """Called when the step has read all gradients and uploaded their addresses, before any
        weight or state changes. `found_inf`: result of a GradScaler for the step, None without one.
        """

    def bucket_written(self, update: BucketUpdate) -> None:
        """Called when the launches that write the weights of `update` are enqueued."""

    def after_buckets(self) -> None:
        """Called when the launches of all buckets are enqueued."""

    def on_error(self) -> None:
        """Called if a bucket, or `after_buckets` of any hook, raised. Must not raise."""

    def before_state_moves(self, state: dict) -> None:
        """Called before new plans, which may move the optimizer state to other memory or ranks."""


class Pause(BucketUpdate):
    """A turn without a new bucket, between buckets of different ranks: the bucket before the pause
    sends updates back before the bucket after the pause starts.

    With pauses all ranks issue the collectives of all process groups in a common order, even if
    some ranks are in further groups.
    """

    has_collectives = True  # issues none itself, but takes a turn among the buckets that do

    def run(self, group: dict | None) -> Running:
        """Do nothing."""
        return
        yield  # makes the function a generator


def precompile_kernels(
    jobs: Iterable[Job], device: torch.device, further: Iterable[Callable[[], None]] = ()
) -> None:
    """Compile the kernels of all buckets, and of `further` launches, in parallel, before the first
    step. Launches and sends nothing.
    """
    launches = [launch for update, group in jobs for launch in update.launches(group)]
    launches += further

    def launch_all() -> None:
        for launch in launches:
            launch()

    if launches:
        precompile.precompile_kernels(device, launch_all)


def run(jobs: Sequence[Job], closing: Callable[[], None] | None = None) -> None:
    """Step all buckets, at most BUCKETS_IN_FLIGHT at a time.

    `jobs`: in an equal order on all ranks. `closing`: called when no bucket will issue a further
    collective; the last bucket is applied after it.

    In turn i bucket i starts the inbound all-to-all, then bucket i - 1 is computed and starts the
    outbound all-to-all, then bucket i - 2 is applied. So all-to-alls run while matrices are
    multiplied. Updates without collectives run after the first bucket has started.
    """
    updates, local = [], []
    for update, group in jobs:
        (updates if update.has_collectives else local).append(_labelled(update, group))
    in_flight = _advance(updates[:1])
    for update in local:
        next(update, None)
    for update in [*updates[1:], None]:
        # The next bucket starts before the one in flight is waited for: else the network would be
        # idle while matrices are multiplied
        started = _advance([update] if update else [])
        in_flight = _resume(in_flight) + started
    if closing is not None:
        closing()
    _resume(in_flight)


def begin(update: BucketUpdate, group: dict) -> InFlight:
    """Start the inbound all-to-all of a bucket, for `run_all_inbound_first(begun=...)`."""
    started = _labelled(update, group)
    return started, next(started)


def run_all_inbound_first(
    jobs: Sequence[Job], closing: Callable[[], None] | None = None, begun: Sequence[InFlight] = ()
) -> None:
    """Step all buckets in three phases: all start the inbound all-to-all, then all are computed and
    sent back, then all are applied.

    `jobs`: in an equal order on all ranks. `begun`: results of `begin` for the first buckets with
    collectives. `closing`: called at the end. Every bucket needs a buffer of its own. Updates
    without collectives run while the first all-to-alls run.
    """
    # With overlap_backward ranks may have begun different numbers of buckets. All inbound
    # collectives before all outbound collectives is an order that does not depend on the numbers.
    updates = [_labelled(update, group) for update, group in jobs if update.has_collectives]
    local = [_labelled(update, group) for update, group in jobs if not update.has_collectives]
    in_flight = [*begun, *_advance(updates[len(begun) :])]
    for update in local:
        next(update, None)
    while in_flight:
        in_flight = [later for one in in_flight for later in _resume([one])]
    if closing is not None:
        closing()


def run_beside(
    work: Callable[[], None], jobs: Sequence[Job], stream: torch.cuda.Stream | None
) -> None:
    """Call `work`, and step jobs without collectives concurrently on `stream`; with None before
    `work`.
    """
    if stream is None or not jobs:
        run(jobs)
        return work()
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run(jobs)
    try:
        work()
    finally:  # also after an error, the next work must not overtake these jobs
        current.wait_stream(stream)


def _labelled(update: BucketUpdate, group: dict | None) -> Running:
    """Run an update, then call `written`. Errors of the update, and of collectives in flight, name
    the bucket.
    """
    try:
        yield from update.run(group)
        if update.written is not None:
            update.written(update)
    except Exception as error:
        errors.add_context(error, update.label)
        raise


def _advance(updates: Iterable[Running]) -> list[InFlight]:
    """Resume updates up to the next collective; return the updates still running."""
    found = []
    for update in updates:
        collective = next(update, None)
        if collective is not None:
            found.append((update, collective))
    return found


def _resume(in_flight: Sequence[InFlight]) -> list[InFlight]:
    """Wait for the collective of every update and advance the update, the last started first.
    Return the updates still running, the first started first.
    """
    resumed = []
    # The bucket started last is to be computed, the bucket before to be applied: computing first
    # lets the outbound all-to-all start early
    for update, collective in reversed(in_flight):
        try:
            collective.wait()
        except Exception as error:
            # Raised inside the generator, where the message gets the name of the bucket
            update.throw(error)
        resumed = _advance([update]) + resumed
    return resumed

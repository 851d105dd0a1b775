"""Overlap with the next forward: the step runs on a side stream, and readers wait for events.

`ForwardOverlap` records an event in the side stream after each bucket's weights are written. Module
hooks (module_hooks.py) let the stream of the next forward wait for the events of the module's own
weights only. `waits_for_updates` decorates methods with further reads of weights or state.

[Note: events are in order]
A step records all events on a single stream: waiting for an event includes all events before. An
event is therefore known by the index in the step, and comparing indices tells whether a further
wait is needed.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from types import ModuleType

import torch

from ...kernels.backend import capturing
from ...params.dtensor import raw_locals
from ...pipeline import BucketUpdate, Job, StepHook
from ..param_store import Store
from .module_hooks import ModelHooks


def _streams(device: torch.device) -> ModuleType | None:
    """The module with streams and events of a device; None without streams."""
    return torch.cuda if device.type == "cuda" else None


class ForwardOverlap(StepHook):
    """Events of the last step, each recorded after some weights are written, and waits for events.

    Parameters are known by id, sets of parameters as frozensets of ids. The buckets of a set are
    computed once for each set and binding.
    """

    def __init__(self, on: bool = False) -> None:
        """`on`: overlap_forward; False: `step` runs on the caller's stream, nobody waits."""
        self.on = on
        self.stream: torch.cuda.Stream | None = None  # side stream of the step
        self.event_pool: list[torch.cuda.Event] = []  # of all steps
        # Models whose modules wait -> their hooks
        self.models: Mapping[torch.nn.Module, ModelHooks] = weakref.WeakKeyDictionary()
        self._begin(None)
        self.bind((), ())

    def _begin(self, caller_stream: torch.cuda.Stream | None) -> None:
        """Forget the last step. `caller_stream`: the current stream of the caller of `step`; None:
        the step does not overlap.
        """
        self.caller_stream = caller_stream
        self.events: list[torch.cuda.Event] = []  # of the last step; the last ends the step
        self.is_running = caller_stream is not None  # a step launches on the side stream
        self.written_event: dict[int, int] = {}  # bucket -> index of the event after its weights
        self.waited_event: dict[torch.cuda.Stream, int] = {}  # stream -> last event waited for
        # Index of an event -> gradients that the step reads until then, see `after_buckets`
        self.held_gradients: dict[int, list] = {}
        self.missing: frozenset[int] = frozenset()  # ids of parameters without a gradient

    @contextlib.contextmanager
    def on_side_stream(self, device: torch.device, wait_for_all: bool = False) -> Iterator[None]:
        """Context manager for a step: launch on the side stream, after the current stream's work.

        At the end the current stream waits for parameters without a known model, or with
        `wait_for_all` for the whole step.
        """
        self.wait()
        self.device = device
        self.streams = _streams(device)
        # A graph of the user must contain the whole step, so a capture gets no side stream
        if not self.on or self.streams is None or capturing(device):
            self._begin(None)
            yield
            return
        if self.stream is None or self.stream.device != device:
            self.stream = self.streams.Stream(device)
            self.event_pool = []
        self._begin(self.streams.current_stream(device))
        self.stream.wait_stream(self.caller_stream)
        try:
            with self.streams.stream(self.stream):
                yield
                self._record_event()
        except BaseException:
            self.caller_stream.wait_stream(self.stream)
            self._begin(None)
            raise
        self.is_running = False
        last = len(self.events) - 1
        self.wait_for_event(self.caller_stream, last if wait_for_all else self._unknown_event())

    def bind(self, jobs: Sequence[Job], stores: Sequence[Store]) -> None:
        """Number the buckets of a bound step. Updates of `jobs` report to `bucket_written`.

        AdamW's parameters stepped where stored count as a bucket for each store.
        """
        # Stores hold the state, which `load_state_dict` replaces: not to be kept without need
        self.stores = stores if self.on else ()
        self.numbers: dict[int, int] = {}  # id of an update -> bucket
        # Bucket -> (index of the store, getter of the bucket's items in lists of the store)
        self.bucket_params: list[tuple[int, Callable]] = []
        self.buckets: dict[int, list[int]] = {}  # id of a parameter -> buckets that write it
        self.found: dict[frozenset[int], set[int]] = {}  # set of parameters -> buckets, a cache
        # The models, and the parameters of which no model is known, at the last `_unknown_event`
        self.models_then: list[ModelHooks] | None = None
        self.unknown: frozenset[int] = frozenset()
        for update, _ in jobs if self.on else ():
            if update.store is None:
                continue
            numbers = range(len(update.store.params))
            if update.bucket is not None:
                numbers = sorted({m.param for m in update.bucket.matrices})
            self.numbers[id(update)] = len(self.bucket_params)
            self._add_bucket(stores, update.store, numbers)
        # Parameters of no update (empty on this rank) get a bucket that never reports. So their
        # gradients are held until the end of the step.
        for store in stores if self.on else ():
            self._add_bucket(
                stores, store, [i for i, p in enumerate(store.params) if id(p) not in self.buckets]
            )
        self.record_stream(param for store in stores for param in store.params)

    def _add_bucket(self, stores: Sequence[Store], store: Store, numbers: Sequence[int]) -> None:
        """Add a bucket with the parameters `numbers` of `store`; nothing if empty."""
        for number in numbers:
            self.buckets.setdefault(id(store.params[number]), []).append(len(self.bucket_params))
        if numbers:
            self.bucket_params.append((stores.index(store), itemgetter(*numbers)))

    def record_stream(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tell the caching allocator about `tensors` used by a running step: memory freed by the
        caller is not reused before the side stream is done.
        """
        for tensor in raw_locals(tensors) if self.is_running else ():
            if getattr(tensor, "is_cuda", False):
                tensor.record_stream(self.stream)

    def bucket_written(self, update: BucketUpdate) -> None:
        """Record the event after which the weights of an update's parameters are written."""
        if self.is_running and id(update) in self.numbers:
            self.written_event[self.numbers[id(update)]] = len(self.events)
            self._record_event()

    def _record_event(self) -> None:
        """Record the next event of the step on the side stream."""
        # Events of the last step are recorded again: a wait that is already enqueued keeps to the
        # old record
        if len(self.events) == len(self.event_pool):
            self.event_pool.append(self.streams.Event())
        self.events.append(self.event_pool[len(self.events)])
        self.events[-1].record(self.stream)

    def after_buckets(self) -> None:
        """Keep the gradients of the step alive until the weights of all readers are written.

        The caller of `step` may set `param.grad` to None at once, and the allocator would reuse the
        memory on the caller's stream while the side stream reads.
        """
        if not self.is_running:
            return
        for bucket, (number, part) in enumerate(self.bucket_params):
            store = self.stores[number]
            # Without an event of its own a bucket depends on the final event, not yet recorded
            index = self.written_event.get(bucket, len(self.events))
            held = part(store.raw_gradients), part(store.gradients)
            self.held_gradients.setdefault(index, []).append(held)
        self.missing = frozenset(
            id(store.params[i]) for store in self.stores for i in store.missing
        )

    def before_state_moves(self, state: dict) -> None:
        """Keep the memory of all state until the side stream is done with the state."""
        for entry in state.values():
            if isinstance(entry, dict):
                self.record_stream(entry.values())

    def last_event_of(self, params: frozenset[int]) -> int:
        """Index of the last event that `params` depend on; -1 if the step writes none of `params`.

        Parameters restored after the step, and parameters of buckets without an event of their own,
        depend on the final event.
        """
        last = len(self.events) - 1
        if params not in self.found:
            self.found[params] = {bucket for key in params for bucket in self.buckets.get(key, ())}
        if not self.missing.isdisjoint(params):
            return last
        return max(
            (self.written_event.get(bucket, last) for bucket in self.found[params]), default=-1
        )

    def _unknown_event(self) -> int:
        """Index of the last event of parameters without a waiting model; the final event if no
        model waits for any parameter.
        """
        if (models := list(self.models.values())) != self.models_then:
            known = {
                key for hooks in models for key, param in hooks.known.items() if param() is not None
            }
            self.models_then = models
            self.unknown = frozenset(self.buckets.keys() - known)
        if len(self.unknown) == len(self.buckets):
            return len(self.events) - 1
        return self.last_event_of(self.unknown)

    def wait_for_event(self, stream: torch.cuda.Stream, index: int) -> None:
        """Let `stream` wait for the event with `index`, unless `stream` has waited already; see
        [Note: events are in order].
        """
        if self.waited_event.get(stream, -1) >= index:
            return
        stream.wait_event(self.events[index])
        self.waited_event[stream] = index
        # From now on the allocator may reuse gradients freed on this stream. `pop` has a default
        # since several threads of autograd may run this method at the same time.
        if stream == self.caller_stream:
            for done in [until for until in list(self.held_gradients) if until <= index]:
                self.held_gradients.pop(done, None)

    def wait_for_params(
        self, params: frozenset[int], reader: torch.cuda.Stream | None = None
    ) -> None:
        """Let streams wait until `params` are written: `reader` alone, or with None the current
        stream and the stream of `step`.
        """
        # A user who captures a graph has synchronized before
        if not self.events or capturing(self.device):
            return
        index = self.last_event_of(params)
        streams = (reader,)
        if reader is None:
            # The caller's stream too: held gradients are released there
            streams = self.streams.current_stream(self.device), self.caller_stream
        for stream in streams:
            self.wait_for_event(stream, index)

    def wait(self) -> None:
        """Let the current stream and the stream of `step` wait for the whole last step."""
        if self.events and not capturing(self.device):
            for stream in (self.streams.current_stream(self.device), self.caller_stream):
                self.wait_for_event(stream, len(self.events) - 1)

    def release(self) -> None:
        """Drop all references to weights and state, after a `wait` of the current stream. Later
        waits for any parameter of the last step wait for the final event.
        """
        self.missing = frozenset(self.buckets)
        self.bind((), ())

    def __del__(self, suppress: Callable = contextlib.suppress) -> None:
        """Let the current stream wait for the last step: later, nobody would."""
        # `suppress` is a default argument because at the end of the process the names of this
        # module may be gone, `contextlib` included
        with suppress(Exception):
            self.wait()

    def add_model(self, model: torch.nn.Module, params: Iterable[torch.Tensor]) -> None:
        """Let the modules of `model` wait for `params`, by hooks; replaces earlier hooks of the
        model. Raises TypeError for anything but a module.
        """
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"updates_return_during takes one torch.nn.Module, not {type(model).__name__}: "
                "call it once for each model"
            )
        if (before := self.models.pop(model, None)) is not None:
            before.remove()
        if self.on:
            # The hooks know nothing of waits before their registration
            self.wait()
            self.models[model] = hooks = ModelHooks(model, {id(p): p for p in params}, self)
            weakref.finalize(self, hooks.remove)


def waits_for_updates(method: Callable | None = None, *, reads_state: bool = True) -> Callable:
    """Decorate a method of an optimizer with reads or writes of weights or state: the current
    stream waits for the last step first. `reads_state`: with offload_state the host waits, too.

    The method runs on the optimizer itself, also if called on a wrapper of Lightning or Fabric.
    The class of a wrapper derives from the optimizer's class and forwards missing attributes to the
    optimizer; an attribute set by the method would stay on the wrapper.
    """

    if method is None:
        return functools.partial(waits_for_updates, reads_state=reads_state)

    @functools.wraps(method)
    def after(self: object, *arguments: object, **options: object) -> object:
        itself = self._itself()
        itself._forward_overlap.wait()
        if reads_state:
            itself._preparation.place.wait()
        return method(itself, *arguments, **options)

    return after


class ForwardOverlapMethods(torch.optim.Optimizer):
    """Base class: public methods of overlap_forward. Subclasses set `_forward_overlap`,
    `_preparation`, and `_itself`, a weak reference to the optimizer.
    """

    def updates_return_during(self, model: torch.nn.Module) -> None:
        """With overlap_forward=True, `step` no longer waits until weights of `model` are written:
        each module of `model` waits for the module's own weights before the forward.

        Call for each model, once the model is wrapped, sharded and compiled, and again after
        changes of modules. Raises TypeError for anything but a module.
        """
        self._forward_overlap.add_model(
            model, [p for group in self.param_groups for p in group["params"]]
        )

    def wait(self) -> None:
        """Let the current stream wait for the last `step`; the host continues, but waits for state
        in host memory (offload_state).

        Needed with overlap_forward=True before weights, state or gradients are read or written by
        anything but the forward of a model given to `updates_return_during`; with offload_state
        before state is read or written.
        """
        self._forward_overlap.wait()
        self._preparation.place.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. With set_to_none=False the current stream waits until the step has read the
        gradients; else the optimizer keeps gradients alive as long as needed.
        """
        if not set_to_none:
            self._forward_overlap.wait()
        super().zero_grad(set_to_none)

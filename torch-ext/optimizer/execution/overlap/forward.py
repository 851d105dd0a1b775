"""Overlap with the next forward: the step on a stream of its own, and events that other streams
wait for.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from operator import itemgetter

import torch

from ...kernels.backend import capturing
from ...params.dtensor import raw_locals
from ...pipeline import BucketUpdate
from .module_hooks import ModelHooks


def _streams(device):
    """What makes streams and events for a device; None where there are none."""
    return torch.cuda if device.type == "cuda" else None


class ForwardOverlap:
    """The events in the optimizer's stream behind which weights are written, and how far other
    streams have waited.

    A step looks at buckets only; which parameters they bring, and for which ones models wait, is
    found out once.
    """

    def __init__(self, on=False):
        self.on, self.stream, self.event_pool, self.models = (
            on,
            None,
            [],
            weakref.WeakKeyDictionary(),
        )
        self._begin(None)
        self.bind((), ())

    def _begin(self, home) -> None:
        """`home`: the stream in which `step` was called. Marks follow each other: who waits for
        one, waits for those before it, too.
        """
        self.home, self.events, self.is_open = home, [], home is not None
        # Bucket -> mark; stream -> mark; mark -> gradients
        self.written_event, self.waited_event, self.held_gradients = {}, {}, {}
        self.missing = frozenset()  # the parameters without a gradient

    @contextlib.contextmanager
    def on_side_stream(self, device, wait_for_all=False):
        """Context manager for a step: it goes to the optimizer's stream, after what the current one
        has been given, which then waits for what no known model has; `wait_for_all`: for
        everything.
        """
        self.wait()
        self.device, self.streams = device, _streams(device)
        if not self.on or self.streams is None or capturing(device):
            self._begin(None)
            yield
            return
        if self.stream is None or self.stream.device != device:
            self.stream, self.event_pool = self.streams.Stream(device), []
        self._begin(self.streams.current_stream(device))
        self.stream.wait_stream(self.home)
        try:
            with self.streams.stream(self.stream):
                yield
                self._record_event()
        except BaseException:
            self.home.wait_stream(self.stream)
            self._begin(None)
            raise
        self.is_open = False
        self.wait_for_event(self.home, len(self.events) - 1 if wait_for_all else self._unknown())

    def bind(self, jobs, stores) -> None:
        """Know the updates of `jobs`, which report to `bucket_written`. Weights that are freed
        meanwhile are still written.
        """
        self.numbers = {}  # id of an update -> its number
        # Bucket -> its part of a store; parameter -> its buckets
        self.bucket_params, self.buckets = [], {}
        # Parameters -> their buckets
        self.found, self.models_then, self.unknown = {}, None, frozenset()
        for route, _ in jobs if self.on else ():
            if route.store is None:
                continue
            numbers = range(len(route.store.params))
            if route.bucket is not None:
                numbers = sorted({m.param for m in route.bucket.matrices})
            self.numbers[id(route)] = len(self.bucket_params)
            self._brings(stores, route.store, numbers)
        # One bucket more, of what no route brings: it never lands
        for store in stores if self.on else ():
            self._brings(
                stores, store, [i for i, p in enumerate(store.params) if id(p) not in self.buckets]
            )
        self.record_stream(param for store in stores for param in store.params)

    def _brings(self, stores, store, numbers) -> None:
        for number in numbers:
            self.buckets.setdefault(id(store.params[number]), []).append(len(self.bucket_params))
        if numbers:
            self.bucket_params.append((stores.index(store), itemgetter(*numbers)))

    def record_stream(self, tensors) -> None:
        """What is freed meanwhile is given to nobody before the step is done with it."""
        for tensor in raw_locals(tensors) if self.is_open else ():
            if getattr(tensor, "is_cuda", False):
                tensor.record_stream(self.stream)

    def bucket_written(self, update: BucketUpdate) -> None:
        """Record the event after which the weights of an update's parameters are written."""
        if self.is_open and id(update) in self.numbers:
            self.written_event[self.numbers[id(update)]] = len(self.events)
            self._record_event()

    def _record_event(self) -> None:
        """Events are the same in every step: who waits for one does not see that it is recorded
        again.
        """
        if len(self.events) == len(self.event_pool):
            self.event_pool.append(self.streams.Event())
        self.events.append(self.event_pool[len(self.events)])
        self.events[-1].record(self.stream)

    def hold_gradients(self, stores) -> None:
        """At the end of a step's work: its gradients have to live until their parameters are
        written, as they came and as they were brought home.
        """
        if not self.is_open:
            return
        for bucket, (number, part) in enumerate(self.bucket_params):
            store, place = stores[number], self.written_event.get(bucket, len(self.events))
            self.held_gradients.setdefault(place, []).append(
                (part(store.raw_gradients), part(store.gradients))
            )
        self.missing = frozenset(id(store.params[i]) for store in stores for i in store.missing)

    def last_event_of(self, params) -> int:
        """The mark behind which the last of some parameters is written, by a frozenset of their
        ids; -1: none of them is. What has not landed by itself, and what is put back because no
        rank has a gradient of it, is written at the end.
        """
        last = len(self.events) - 1
        if params not in self.found:
            self.found[params] = {bucket for key in params for bucket in self.buckets.get(key, ())}
        if not self.missing.isdisjoint(params):
            return last
        return max(
            (self.written_event.get(bucket, last) for bucket in self.found[params]), default=-1
        )

    def _unknown(self) -> int:
        """The mark of the parameters for which no model waits; if one does for none, that which
        ends the step.
        """
        if (models := list(self.models.values())) != self.models_then:
            known = {
                key
                for waiting in models
                for key, param in waiting.known.items()
                if param() is not None
            }
            self.models_then, self.unknown = models, frozenset(self.buckets.keys() - known)
        return (
            len(self.events) - 1
            if len(self.unknown) == len(self.buckets)
            else self.last_event_of(self.unknown)
        )

    def wait_for_event(self, stream, place) -> None:
        """What follows in a stream comes after a mark."""
        if self.waited_event.get(stream, -1) >= place:
            return
        stream.wait_event(self.events[place])
        self.waited_event[stream] = place
        if stream == self.home:  # from now on its allocator may have the gradients
            for done in [at for at in list(self.held_gradients) if at <= place]:
                self.held_gradients.pop(done, None)  # another thread may have been faster

    def wait_for_params(self, params, reader=None) -> None:
        """What follows comes after the writing of some parameters, by a frozenset of their ids: in
        the current stream and in that of the step, or in the stream `reader` alone.
        """
        if not self.events or capturing(self.device):  # who captures has synchronized
            return
        place = self.last_event_of(params)
        for stream in (
            (self.streams.current_stream(self.device), self.home) if reader is None else (reader,)
        ):
            self.wait_for_event(stream, place)

    def wait(self) -> None:
        """What follows in the current stream comes after all of the last step."""
        if self.events and not capturing(self.device):
            for stream in (self.streams.current_stream(self.device), self.home):
                self.wait_for_event(stream, len(self.events) - 1)

    def release(self) -> None:
        """Let weights and state go, which the current stream has waited for. Who waits for any of
        them from now on waits for the end of the last step.
        """
        self.missing = frozenset(self.buckets)
        self.bind((), ())

    def __del__(self, suppress=contextlib.suppress):
        """Nobody waits any more for what an optimizer that goes has launched: now it is waited
        for.
        """
        with suppress(Exception):  # the process may be at its end, and this module's names gone
            self.wait()

    def add_model(self, model, params) -> None:
        """From now on the modules of a model wait for those of `params` that they have."""
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"updates_return_during takes one torch.nn.Module, not {type(model).__name__}: "
                "call it "
                "once for each model"
            )
        if (before := self.models.pop(model, None)) is not None:
            before.remove()
        if self.on:
            self.wait()
            self.models[model] = waiting = ModelHooks(model, {id(p): p for p in params}, self)
            weakref.finalize(self, waiting.remove)


def waits_for_updates(method):
    """Decorate a method of an optimizer that reads or changes weights or state: the current stream
    waits first.

    The method runs on the optimizer even where it is called on a wrapper of Lightning or Fabric.
    These derive a class from the optimizer's and look up in the optimizer only what the wrapper
    lacks, so that an attribute set by the method would stay on the wrapper.
    """

    @functools.wraps(method)
    def after(self, *arguments, **options):
        itself = self._itself()
        itself._forward_overlap.wait()
        return method(itself, *arguments, **options)

    return after


class ForwardOverlapMethods(torch.optim.Optimizer):
    """An optimizer whose updates may return during the next forward. Subclasses set `_forward_overlap` and
    `_itself`.
    """

    def updates_return_during(self, model: torch.nn.Module) -> None:
        """With overlap_forward=True, `step` no longer waits for the weights of this model: its
        modules do, each before its forward. Call it once the model is wrapped, sharded and
        compiled, for each model; again after changes.
        """
        self._forward_overlap.add_model(
            model, [p for group in self.param_groups for p in group["params"]]
        )

    def wait(self) -> None:
        """Have the current stream wait for all that the last `step` has launched: before weights,
        state or gradients are read or written otherwise than by the forward of a model given to
        `updates_return_during`. The host goes on.
        """
        self._forward_overlap.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. Gradients that become zeros are not read any more; others may go, and are
        kept while needed.
        """
        if not set_to_none:
            self._forward_overlap.wait()
        super().zero_grad(set_to_none)

"""Overlap with backward: gradient-ready hooks start the inbound all-to-alls of complete buckets.

`BackwardOverlap` registers a post-accumulate-grad hook on every parameter of a bucket. While
`Muon.last_backward` is open, a bucket starts once all gradients of the bucket exist and all
buckets before have started. `Muon.step` then continues the started buckets. Only muon.py imports
the module.

[Note: one order of collectives]
All ranks start buckets in the order of the step, whatever the order of gradients: NCCL and gloo
match collectives by position, and ranks with different orders would wait for peers forever.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from ... import pipeline
from ...kernels.backend import capturing
from ...params import errors
from ...params.dtensor import is_dtensor, raw_locals
from ...params.errors import name_in
from ...pipeline import BucketUpdate, InFlight, Job
from ..param_store import Store
from ..step_inputs import StepInputs

NOT_THEN = (
    "Gradients can neither be clipped nor accumulated further then: use last_backward() for the "
    "last micro-batch only, or leave overlap_backward out"
)

# (update, live parameter group, store, sorted indices in the store of the bucket's parameters)
EarlyBucket = tuple[BucketUpdate, dict, Store, list[int]]


class BackwardOverlap:
    """The buckets of a bound step allowed to start during backward, and the started buckets.

    Replaced as a whole when the step is bound anew.
    """

    def __init__(self, jobs: Sequence[Job] | None = None, inputs: StepInputs | None = None) -> None:
        """`jobs`: of the bound step, in order. Buckets without an inbound all-to-all come last, and
        start in the step. None: no bucket ever starts during backward.
        """
        self.inputs = inputs
        self.buckets: list[EarlyBucket] = []  # that may start during backward, in order
        # The function of pipeline.py that runs a step
        self.pipeline_run = pipeline.run if jobs is None else pipeline.run_all_inbound_first
        for update, group in [job for job in jobs or () if job[0].has_collectives]:
            # `sorted_buckets` puts buckets without an inbound all-to-all behind all others
            if not update.to_owner.has_traffic:
                break
            numbers = sorted({m.param for m in update.bucket.matrices})
            self.buckets.append((update, group, update.store, numbers))
        self.needed = [  # ids of the parameters of each bucket
            {id(store.params[i]) for i in numbers} for _, _, store, numbers in self.buckets
        ]
        self.device = inputs.device if inputs is not None else torch.device("cpu")
        # Buckets start on a side stream, so that backward does not wait for packing
        self.stream = (
            torch.cuda.Stream(self.device) if self.buckets and self.device.type == "cuda" else None
        )
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        self.is_open = False  # inside `allow_start`, and all buckets so far could start
        self.failed = False  # a bucket could not start, or sent values that the step does not have
        # Whether a gradient of the last step has changed since it was sent: one bool on CPU, valid
        # after `changed_event`. None: nothing to check.
        self.changed_flag: torch.Tensor | None = None
        self.changed_event: torch.cuda.Event | None = None
        self._reset()
        self._register_hooks()

    def _register_hooks(self) -> None:
        """Register `on_grad_ready` on every parameter of `buckets`."""
        # A parameter must not keep the optimizer alive, hence the weak reference
        on_ready = weakref.WeakMethod(self.on_grad_ready)
        params = {
            id(s.params[i]): s.params[i] for _, _, s, numbers in self.buckets for i in numbers
        }
        for param in params.values():
            self.handles.append(
                param.register_post_accumulate_grad_hook(
                    lambda p, on_ready=on_ready: (
                        method(p) if (method := on_ready()) is not None else None
                    )
                )
            )
        weakref.finalize(self, _remove, self.handles)

    def _reset(self) -> None:
        """Forget started buckets."""
        self.started: list[InFlight] = []  # first buckets of `buckets`, in order
        self.sent: list[SentGradients] = []  # of each started bucket
        # Of each bucket: ids of parameters whose gradient is not there yet
        self.pending: list[set[int]] = []

    @property
    def has_started(self) -> bool:
        """Whether the next step has begun. Peers wait for the started all-to-alls; no weight or
        state of this rank has changed.
        """
        return bool(self.started) or self.failed

    @contextlib.contextmanager
    def allow_start(self, ready: bool) -> Iterator[None]:
        """Context manager for a backward in which buckets may start.

        `ready`: parameters, state and options are as bound; else no bucket starts. Raises
        RuntimeError if buckets have started already, or for changed gradients of the last step.
        """
        if self.has_started:
            raise RuntimeError(
                "buckets of the next step have been sent already: call step() before the next "
                "last_backward(), which goes round the backward of the last micro-batch only"
            )
        self.raise_if_changed()
        # In a capture no bucket may start: the side stream is not part of the graph
        self.is_open = bool(ready and self.buckets) and not capturing(self.device)
        self.pending = [set(needed) for needed in self.needed]
        if self.stream is not None:
            # Buckets start after the last step, whose bucket buffers and inputs they use again
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            yield
        finally:
            self.is_open = False

    @torch._disable_dynamo
    @torch.no_grad()
    def on_grad_ready(self, param: torch.Tensor) -> None:
        """Hook: the gradient of `param` is accumulated. Start all complete buckets in order, see
        [Note: one order of collectives].
        """
        if not self.is_open:
            return
        for pending in self.pending[len(self.started) :]:
            pending.discard(id(param))
        while (
            self.is_open
            and len(self.started) < len(self.buckets)
            and not self.pending[len(self.started)]
        ):
            with _after_current(self.stream):
                self._start(*self.buckets[len(self.started)])

    def _start(self, update: BucketUpdate, group: dict, store: Store, numbers: list[int]) -> None:
        """Start the inbound all-to-all of a bucket. If a gradient is missing or has an
        unexpected form, no further bucket starts before the step.
        """
        if not store.try_read(numbers):
            self.is_open = False
            return
        try:
            self.inputs.upload()
            in_flight = pipeline.begin(update, group)
        except BaseException:
            # Peers may already have sent: only a checkpoint brings all ranks to a common state
            self.is_open = False
            self.failed = True
            raise
        self.started.append(in_flight)
        groups = [store.groups[store.group_of[i]] for i in numbers]
        self.sent.append(SentGradients(groups, [store.params[i] for i in numbers]))

    def check_unchanged(self, as_bound: bool, scaled: bool) -> None:
        """At the step: raise RuntimeError if started buckets have sent values different from those
        of the step.

        `as_bound`: parameters and state are as bound. `scaled`: a GradScaler wants gradients
        unscaled, or the step skipped.
        """
        what = None
        if not as_bound:
            what = (
                "parameters, their state or options of their groups changed, "
                "or process groups were made anew"
            )
        elif scaled:
            what = (
                "a GradScaler wants gradients unscaled, or the step left out: "
                "use it without overlap_backward"
            )
        elif any(sent.read_options() != sent.options for sent in self.sent):
            what = "momentum or nesterov changed: set them before the backward, or after the step"
        elif names := [name for sent in self.sent for name in sent.changed()]:
            what = f"the gradient of parameter {names[0]} changed. {NOT_THEN}"
        self._fail_if(what)
        self._join()
        self._compare_norms([sent.differs() for sent in self.sent if sent.norms is not None])

    def _fail_if(self, what: str | None) -> None:
        """Raise RuntimeError for the reason `what`, and refuse later steps; None: do nothing."""
        if what is not None:
            self.failed = True
            raise RuntimeError(
                f"after buckets were sent during backward, {what}. Other ranks may step with the "
                "gradients that were sent: load a checkpoint into the model and into the optimizer "
                "(load_state_dict), then go on"
            )

    def _compare_norms(self, differ: list[torch.Tensor]) -> None:
        """Raise RuntimeError if a gradient has changed since it was sent: on CPUs now, on GPUs when
        the next step begins. `differ`: a bool tensor on the device for each bucket.
        """
        if not differ:
            return
        # Asynchronous, since the host must not wait for the device in a step
        self.changed_flag = torch.stack(differ).any().to("cpu", non_blocking=True)
        if self.stream is None:
            return self.raise_if_changed()
        self.changed_event = torch.cuda.Event()
        self.changed_event.record()

    def raise_if_changed(self) -> None:
        """Raise RuntimeError if a gradient of the last step was changed after it was sent. Waits
        for the device if there is a result to read.
        """
        changed_flag, self.changed_flag = self.changed_flag, None
        if changed_flag is None:
            return
        if self.stream is not None:
            self.changed_event.synchronize()
        self._fail_if(f"gradients changed. {NOT_THEN}" if changed_flag else None)

    def _join(self) -> None:
        """Let the current stream wait for started buckets."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def raise_if_started(self, what: str) -> None:
        """Raise RuntimeError if the next step has begun. `what`: name of the refused method."""
        self.raise_if_changed()
        if self.has_started:
            raise RuntimeError(
                f"{what} is not possible now: buckets were sent during backward. Call step() first"
            )

    def run(self, jobs: Sequence[Job], closing: Callable[[], None] | None = None) -> None:
        """Step all buckets, and continue started buckets. `closing`: see pipeline.py."""
        started = self.started
        # Reset first: a step that raises must not leave finished generators in `started`
        self._reset()
        self.pipeline_run(jobs, closing, *([started] if started else ()))

    def drop_started(self) -> None:
        """Wait for started all-to-alls, and drop their buckets: a checkpoint is about to replace
        weights and state.
        """
        self._join()
        started = self.started
        self._reset()
        with errors.during("the wait for buckets that were sent during backward"):
            for _, collective in started:
                collective.wait()


class SentGradients:
    """The gradients of a started bucket and the options of the groups, at the time of sending."""

    def __init__(self, groups: Sequence[dict], params: Sequence[torch.Tensor]) -> None:
        """`groups`: live parameter group of each parameter."""
        self.groups = groups
        self.params = params
        self.gradients = [p.grad for p in params]
        self.options = self.read_options()
        self.versions = list(map(_versions, self.gradients))
        # torch._foreach_* operations on DTensors, as clipping uses, advance no version counter:
        # only norms show the change. None without DTensors.
        self.norms = self._norms() if any(map(is_dtensor, params)) else None

    def read_options(self) -> list[tuple]:
        """The options of each group that `pack` reads, as they are now."""
        return list(map(_pack_options, {id(group): group for group in self.groups}.values()))

    def _norms(self) -> torch.Tensor | None:
        """2-norms of the nonempty local gradients, on the device; None if all are empty."""
        nonempty = [local for local in raw_locals(self.gradients) if local.numel()]
        return torch.stack(torch._foreach_norm(nonempty)) if nonempty else None

    def changed(self) -> list[str]:
        """Names of parameters with a new gradient tensor, or with a gradient changed in place as
        far as version counters tell.
        """
        before = zip(self.groups, self.params, self.gradients, self.versions)
        return [
            name_in(group, p)
            for group, p, g, seen in before
            if p.grad is not g or _versions(g) != seen
        ]

    def differs(self) -> torch.Tensor:
        """Whether the norm of any gradient has changed: a bool tensor on the device."""
        now = self._norms()
        # NaN differs from NaN
        return ((now != self.norms) & ~(now.isnan() & self.norms.isnan())).any()


def _pack_options(group: dict) -> tuple:
    """Options of a group read by `pack`."""
    return (float(group["momentum"]), bool(group["nesterov"])) if group["use_muon"] else ()


def _versions(gradient: torch.Tensor) -> tuple[int, int]:
    """Version counters of in-place changes: of a gradient and of the local tensor. FSDP2's own
    operations advance only the second.
    """
    return gradient._version, raw_locals([gradient])[0]._version


def _remove(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    """Remove all hooks."""
    while handles:
        handles.pop().remove()


@contextlib.contextmanager
def _after_current(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Context manager: launch on `stream`, after everything in the current stream; None: launch on
    the current stream.
    """
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield

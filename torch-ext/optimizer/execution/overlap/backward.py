"""Overlap with backward: each bucket starts its all-to-all once its last gradient is there, in one
fixed order.
"""

from __future__ import annotations

import contextlib
import weakref

import torch

from ... import pipeline
from ...kernels.backend import capturing
from ...params import errors
from ...params.dtensor import is_dtensor, raw_locals
from ...params.errors import name_in

NOT_THEN = (
    "Gradients can neither be clipped nor accumulated further then: use last_backward() for the "
    "last "
    "micro-batch only, or leave overlap_backward out"
)


class BackwardOverlap:
    """What may leave, and what has left, of the buckets of one binding."""

    def __init__(self, jobs=None, inputs=None):
        """`jobs`: [(route, live parameter group)] in the order of a step; what nothing brings in
        leaves with it. None: nothing may leave.
        """
        self.inputs, self.buckets = inputs, []
        self.pipeline_run = pipeline.run if jobs is None else pipeline.run_all_inbound_first
        for route, hp in [job for job in jobs or () if job[0].travels]:
            if not route.to_owner.has_traffic:
                break
            numbers = sorted({m.param for m in route.bucket.matrices})
            self.buckets.append((route, hp, route.store, numbers))
        self.awaited = [
            {id(store.params[i]) for i in numbers} for _, _, store, numbers in self.buckets
        ]
        self.device = inputs.device if inputs is not None else torch.device("cpu")
        self.stream = (
            torch.cuda.Stream(self.device) if self.buckets and self.device.type == "cuda" else None
        )
        self.handles, self.is_open, self.failed, self.changed_flag = [], False, False, None
        self._let_go()
        self._listen()

    def _listen(self) -> None:
        """One hook for each parameter, which keeps nothing alive, and is removed when this goes."""
        come = weakref.WeakMethod(self.on_grad_ready)
        params = {
            id(s.params[i]): s.params[i] for _, _, s, numbers in self.buckets for i in numbers
        }
        for param in params.values():
            self.handles.append(
                param.register_post_accumulate_grad_hook(
                    lambda p, come=come: method(p) if (method := come()) is not None else None
                )
            )
        weakref.finalize(self, _remove, self.handles)

    def _let_go(self) -> None:
        self.started, self.sent, self.pending = [], [], []

    @property
    def has_started(self) -> bool:
        """Whether the next step has begun: other ranks wait for what has left, here nothing has
        changed.
        """
        return bool(self.started) or self.failed

    @contextlib.contextmanager
    def allow_start(self, ready):
        """Let buckets leave meanwhile; `ready`: the step would find everything else as it was
        bound.
        """
        if self.has_started:
            raise RuntimeError(
                "buckets have left already, for the step that is due: call step() before the next "
                "last_backward(), which goes round the backward of the last micro-batch only"
            )
        self.raise_if_changed()
        self.is_open = bool(ready and self.buckets) and not capturing(self.device)
        self.pending = [set(awaited) for awaited in self.awaited]
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            yield
        finally:
            self.is_open = False

    @torch._disable_dynamo
    @torch.no_grad()
    def on_grad_ready(self, param) -> None:
        """The gradient of a parameter is there. Buckets that are then complete leave, none before
        its turn.
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
            with _after(self.stream):
                self._leave(*self.buckets[len(self.started)])

    def _leave(self, route, hp, store, numbers) -> None:
        if not store.try_read(numbers):
            self.is_open = False
            return
        try:
            self.inputs.upload()
            begun = pipeline.begin(route, hp)
        except BaseException:
            self.is_open, self.failed = False, True
            raise
        self.started.append(begun)
        self.sent.append(Sent(hp, [store.params[i] for i in numbers]))

    def check_unchanged(self, as_bound, scaled) -> None:
        """At the step: raise RuntimeError unless what has left is what would leave now. `as_bound`:
        parameters and state are where they were bound; `scaled`: a GradScaler has gradients
        unscaled, or the step left out.
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
        elif any(_baked(sent.hp) != sent.numbers for sent in self.sent):
            what = "momentum or nesterov changed: set them before the backward, or after the step"
        elif names := [name for sent in self.sent for name in sent.changed()]:
            what = f"the gradient of parameter {names[0]} changed. {NOT_THEN}"
        self._refuse_torn(what)
        self._join()
        self._compare([sent.differs() for sent in self.sent if sent.norms is not None])

    def _refuse_torn(self, what) -> None:
        if what is not None:
            self.failed = True
            raise RuntimeError(
                f"after buckets had left during backward, {what}. Other ranks may step with what "
                "has "
                "left: load a checkpoint into the model and into the optimizer (load_state_dict), "
                "then "
                "go on"
            )

    def _compare(self, differ) -> None:
        """Have a look whether any gradient differs from what has left; on GPUs when the next step
        begins.
        """
        if not differ:
            return
        self.changed_flag = torch.stack(differ).any().to("cpu", non_blocking=True)
        if self.stream is None:
            return self.raise_if_changed()
        self.changed_event = torch.cuda.Event()
        self.changed_event.record()

    def raise_if_changed(self) -> None:
        """Raise RuntimeError if gradients of the last step had changed; waits for the device."""
        changed_flag, self.changed_flag = self.changed_flag, None
        if changed_flag is None:
            return
        if self.stream is not None:
            self.changed_event.synchronize()
        self._refuse_torn(f"gradients changed. {NOT_THEN}" if changed_flag else None)

    def _join(self) -> None:
        """What follows in the current stream comes after what has left."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def raise_if_started(self, what) -> None:
        """Raise RuntimeError if the next step has begun; `what` is asked for."""
        self.raise_if_changed()
        if self.has_started:
            raise RuntimeError(
                f"{what} is not possible now: buckets have left during backward. Call step() first"
            )

    def run(self, jobs, closing=None) -> None:
        """Step all buckets, going on with those that have left. `closing`: see pipeline.py."""
        started = self.started
        self._let_go()
        self.pipeline_run(jobs, closing, *([started] if started else ()))

    def drop_started(self) -> None:
        """Wait for what is on its way, and forget it: what it changed is to be loaded."""
        self._join()
        started = self.started
        self._let_go()
        with errors.during("the wait for buckets that had left during backward"):
            for _, collective in started:
                collective.wait()


class Sent:
    """What one bucket has taken along: its gradients as they were, and what it read of its
    group.
    """

    def __init__(self, hp, params):
        self.hp, self.params, self.gradients = hp, params, [p.grad for p in params]
        self.numbers, self.versions = _baked(hp), list(map(_versions, self.gradients))
        self.norms = self._norms() if any(map(is_dtensor, params)) else None

    def _norms(self):
        """A change of DTensors by torch._foreach_*, as clipping makes it, no counter of versions
        tells.
        """
        there = [local for local in raw_locals(self.gradients) if local.numel()]
        return torch.stack(torch._foreach_norm(there)) if there else None

    def changed(self) -> list[str]:
        """The parameters whose gradient is another one, or has changed as far as counters of
        versions tell.
        """
        before = zip(self.params, self.gradients, self.versions)
        return [
            name_in(self.hp, p) for p, g, seen in before if p.grad is not g or _versions(g) != seen
        ]

    def differs(self):
        """Whether a gradient has another norm than it had, on the device."""
        now = self._norms()
        return ((now != self.norms) & ~(now.isnan() & self.norms.isnan())).any()


def _baked(hp) -> tuple:
    """What a departure reads of a group."""
    return (float(hp["momentum"]), bool(hp["nesterov"])) if hp["use_muon"] else ()


def _versions(gradient) -> tuple:
    """The counters of in-place changes. FSDP2's own count for a DTensor's local tensor only, others
    for itself.
    """
    return gradient._version, raw_locals([gradient])[0]._version


def _remove(handles) -> None:
    while handles:
        handles.pop().remove()


@contextlib.contextmanager
def _after(stream):
    """On a stream (None: as it is), after what the current one has been given."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield

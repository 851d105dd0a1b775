"""CUDA graphs of parts of a step: capture, replay, release.

A part is a bound method of a bucket update with kernel launches only; with capturable=True a part
may also be a whole step with all collectives. `Graphs` captures a part on the second run with equal
host values, and replays the part from then on.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import warnings
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..kernels.backend import capturing, use_triton, validate_choice
from ..kernels.launch.jit import check_choice
from ..kernels.launch.tile_config import own_table
from ..params.errors import warn_caller

GRAPHS = ("auto", "off")


def graphs() -> str:
    """Return the value of OPTIMIZER_GRAPHS: "auto" (default) allows CUDA graphs, "off" does not."""
    return validate_choice("OPTIMIZER_GRAPHS", os.environ.get("OPTIMIZER_GRAPHS", "auto"), GRAPHS)


# Captures of one part. If the host values of a part keep changing, as by a schedule, further
# captures would cost more than their few replays save.
CAPTURES = 8


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Context manager with `device` as the current device, where kernels are launched; parameters
    may lie on another device.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def available(device: torch.device) -> bool:
    """Whether parts on `device` are captured: on NVIDIA GPUs with the Triton kernels, unless
    OPTIMIZER_GRAPHS is "off".
    """
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and graphs() == "auto"
        and use_triton(device)
    )


def check_environment(device: torch.device) -> None:
    """Raise ValueError, naming the variable, if an environment variable of the package has a value
    impossible for a step on `device`.
    """
    graphs()
    check_choice(device)
    own_table()


class PartGraph:
    """The CUDA graph of a part, and the host values at capture."""

    def __init__(self) -> None:
        self.last: object = None  # host values of the last run
        self.graph: torch.cuda.CUDAGraph | None = None
        self.captured: object = None  # host values in `graph`
        self.count = 0  # captures so far, successful or not


class Graphs:
    """The CUDA graphs of an optimizer, in a common memory pool.

    [Note: one pool for all graphs]
    Graphs are replayed in sequence on a single stream, and no tensor allocated in a capture is used
    after the part. Hence all graphs may share memory, and may be replayed in any order.
    """

    def __init__(self, reason: str = "", is_allowed: bool = True) -> None:
        """`reason`: text of the warning if a graph exists but cannot be replayed, given once; "":
        no warning. `is_allowed`: False captures nothing.
        """
        self.parts: dict[tuple[int, str], PartGraph] = {}  # (id of the owner, name of the method)
        self.stream: torch.cuda.Stream | None = None  # of captures
        self.reason = reason
        self.on = False  # parts are captured and replayed
        # No part is captured: not allowed, or a capture has failed
        self.failed = not is_allowed
        self.device = torch.device("cpu")
        # The running part is inside a larger capture, of the whole step or by the user: no error of
        # the host can come between the launches of the part and of later parts
        self.inside_capture = False
        # True: parts must go through `__call__`, which captures parts or sets `inside_capture`
        self.may_capture = False
        _all.add(self)

    def begin(self, device: torch.device) -> None:
        """Drop all graphs, and capture parts on `device` from now on."""
        self.drop()
        self.on = available(device) and not self.failed
        self.device = device
        self.may_capture = self.on or device.type != "cpu"
        # torch refuses a capture on the default stream
        self.stream = torch.cuda.Stream() if self.on else None

    def __call__(self, part: Callable, key: object, *arguments: object) -> None:
        """Call `part(*arguments)`, or replay the graph of `part` if `key` is unchanged.

        `part`: a bound method. `key`: every host value of the launches. Inside another capture
        the part is called, and captured by the outer graph.
        """
        if not self.on or torch.cuda.is_current_stream_capturing():
            self.inside_capture = capturing(self.device)
            return part(*arguments)
        self.inside_capture = False
        known = self.parts.setdefault((id(part.__self__), part.__name__), PartGraph())
        # The first run with a `key` is never captured: kernels compile and are tuned then, and a
        # value that changes in every step would waste the capture
        if known.captured != key and known.last == key and known.count < CAPTURES:
            self._capture(known, key, functools.partial(part, *arguments))
        known.last = key
        if known.graph is not None and known.captured == key:
            return known.graph.replay()
        self.warn_once(self.reason)
        part(*arguments)

    def _capture(self, known: PartGraph, key: object, work: Callable[[], None]) -> None:
        """Capture `work` into `known`; nothing runs on the device. If capture fails, warn, drop all
        graphs and run parts without graphs from now on.
        """
        graph = torch.cuda.CUDAGraph()
        # See [Note: one pool for all graphs]
        pool = next(
            (part.graph.pool() for part in self.parts.values() if part.graph is not None), None
        )
        known.count += 1
        try:
            with torch.cuda.stream(self.stream), warnings.catch_warnings():
                # A rank may own no matrix of a bucket: its part launches nothing
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                # The mode "global" would fail if another thread, such as NCCL's watchdog, calls a
                # function that captures forbid
                graph.capture_begin(*([pool] if pool else []), capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        except Exception as error:
            self.drop()
            self.on = False
            self.failed = True
            warn_caller(f"steps run without CUDA graphs, since one could not be captured: {error}")
        else:
            known.graph = graph
            known.captured = key

    def warn_once(self, why: str) -> None:
        """Warn of a graph without replay, and why; at most once, only if a graph exists and the
        constructor got a `reason`.
        """
        if self.reason and any(part.graph is not None for part in self.parts.values()):
            self.reason = ""
            warn_caller(
                f"capturable=True: {why}; it is captured anew once two steps are alike. Said once."
            )

    def drop(self) -> None:
        """Release all graphs and the memory pool.

        Call before bucket updates are replaced: parts are known by the id of the update, and a new
        update may get the id of a deleted update.
        """
        for part in self.parts.values():
            if part.graph is not None:
                part.graph.reset()
        self.parts = {}


_all = weakref.WeakSet()  # every Graphs of the process


def drop_all() -> None:
    """Drop the graphs of all optimizers; later steps capture anew."""
    for graphs in list(_all):
        graphs.drop()


@functools.cache
def release_before_groups() -> None:
    """Drop all graphs before torch destroys a process group, and before the process exits.

    When a communicator is destroyed, NCCL waits forever for graphs with collectives. Call before
    the first collective is captured. Wraps `dist.destroy_process_group` and
    `ProcessGroup.shutdown`, once per process.
    """
    atexit.register(drop_all)
    if not dist.is_available():
        return
    destroy = _after_release(dist.destroy_process_group)
    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy
    # `from torch.distributed import destroy_process_group` may have run before, and still holds the
    # unwrapped function, which calls this method
    dist.ProcessGroup.shutdown = _after_release(dist.ProcessGroup.shutdown)


def _after_release(function: Callable) -> Callable:
    """Wrap `function`: drop all graphs, then call `function`."""

    @functools.wraps(function)
    def release_before(*arguments: object, **more: object) -> object:
        drop_all()
        return function(*arguments, **more)

    return release_before

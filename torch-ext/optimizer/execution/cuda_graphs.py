"""CUDA graphs of parts of a step: capture, replay, release."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import warnings
import weakref

import torch
import torch.distributed as dist

from ..kernels.backend import _check, capturing, use_triton
from ..kernels.launch.jit import check_choice
from ..kernels.launch.tile_config import own_table
from ..params.errors import warn_caller

GRAPHS = ("auto", "off")


def graphs() -> str:
    """Say whether CUDA graphs may be used, by OPTIMIZER_GRAPHS: auto (default), or off."""
    return _check("OPTIMIZER_GRAPHS", os.environ.get("OPTIMIZER_GRAPHS", "auto"), GRAPHS)


CAPTURES = 8  # of one part; a part whose key keeps changing is not worth more


def on_device(device):
    """Launches go to the current device, which need not be the parameters': meanwhile, make it
    `device`.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def available(device) -> bool:
    """Whether parts on `device` are captured: NVIDIA GPUs with the Triton kernels, unless
    OPTIMIZER_GRAPHS forbids.
    """
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and graphs() == "auto"
        and use_triton(device)
    )


def check_environment(device) -> None:
    """Raise ValueError, with the variable, for an environment variable of this package that a step
    on `device` could not follow.
    """
    graphs()
    check_choice(device)
    own_table()


class PartGraph:
    """What is known of one part: the key of its last run, its graph and the key of that."""

    def __init__(self):
        self.last = self.graph = self.captured = None
        self.count = 0


class Graphs:
    """The CUDA graphs of one optimizer, in one memory pool.

    They run one after another on one stream, and no tensor of the pool outlives its part: they may
    share all memory, and come in any order. `reason`: what to say, once, where there is a graph
    that does not fit the step. `within`: whether the part that is launched goes into a graph with
    others: no error of the host comes between them.
    """

    def __init__(self, reason=""):
        self.parts, self.stream, self.reason = {}, None, reason
        self.on, self.failed, self.device, self.inside_capture = (
            False,
            False,
            torch.device("cpu"),
            False,
        )
        # Whether parts go through this object: it captures them, or knows a capture around them
        self.may_capture = False
        _all.add(self)

    def begin(self, device) -> None:
        """Capture what runs on `device` from now on, with new memory."""
        self.drop()
        self.on, self.device = available(device) and not self.failed, device
        self.may_capture = self.on or device.type != "cpu"
        self.stream = torch.cuda.Stream() if self.on else None

    def __call__(self, part, key, *arguments) -> None:
        """Do part(*arguments): a bound method whose host values are all in `key`.

        Inside another capture, part is captured with it.
        """
        if not self.on or torch.cuda.is_current_stream_capturing():
            self.inside_capture = capturing(self.device)
            return part(*arguments)
        self.inside_capture = False
        known = self.parts.setdefault((id(part.__self__), part.__name__), PartGraph())
        if known.captured != key and known.last == key and known.count < CAPTURES:
            self._capture(known, key, functools.partial(part, *arguments))
        known.last = key
        if known.graph is not None and known.captured == key:
            return known.graph.replay()
        self.warn_once(self.reason)
        part(*arguments)

    def _capture(self, known, key, work) -> None:
        """Capturing launches nothing. Where it fails, parts run as they are from now on."""
        graph = torch.cuda.CUDAGraph()
        shared = next(
            (part.graph.pool() for part in self.parts.values() if part.graph is not None), None
        )
        known.count += 1
        try:
            with torch.cuda.stream(self.stream), warnings.catch_warnings():
                # A part may have nothing to do
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                # other threads (NCCL's watchdog) may do what a capture forbids
                graph.capture_begin(
                    *([shared] if shared else []), capture_error_mode="thread_local"
                )
                try:
                    work()
                finally:
                    graph.capture_end()
        except Exception as error:
            self.drop()
            self.on, self.failed = False, True
            warn_caller(f"steps run without CUDA graphs, since one could not be captured: {error}")
        else:
            known.graph, known.captured = graph, key

    def warn_once(self, why) -> None:
        """Tell once that a graph is not replayed, where there is one and the user asked for it."""
        if self.reason and any(part.graph is not None for part in self.parts.values()):
            self.reason = ""
            warn_caller(
                f"capturable=True: {why}; it is captured anew once two steps are alike. Said once."
            )

    def drop(self) -> None:
        """Let all graphs go, and with them their memory; before the owners of parts go, whose ids
        name the parts.
        """
        for part in self.parts.values():
            if part.graph is not None:
                part.graph.reset()
        self.parts = {}


_all = weakref.WeakSet()


def drop_all() -> None:
    """Let all graphs of all optimizers go; the next steps capture them anew."""
    for graphs in list(_all):
        graphs.drop()


@functools.cache
def release_before_groups() -> None:
    """Have all graphs let go before process groups are destroyed and before the process exits.

    NCCL waits for graphs that hold its collectives, forever. Called before the first collective is
    captured.
    """
    atexit.register(drop_all)
    if not dist.is_available():
        return
    destroy = _after_release(dist.destroy_process_group)
    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy
    # who imported that by name before calls this
    dist.ProcessGroup.shutdown = _after_release(dist.ProcessGroup.shutdown)


def _after_release(function):
    @functools.wraps(function)
    def release_before(*arguments, **more):
        drop_all()
        return function(*arguments, **more)

    return release_before

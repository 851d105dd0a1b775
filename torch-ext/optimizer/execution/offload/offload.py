"""`Offload`: the place of offloaded state, and the classes of updates that step such state;
`Preparation` asks for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels.backend import capturing
from ...params.config import MuonConfig
from ...pipeline import BucketUpdate, StepHook
from ...planning.planner import Plan
from ..param_store import PlanInputViews
from ..prepare.state_place import StatePlace
from .memory import ALIGNMENT
from .parts import OffloadStore
from .placement import HostState
from .scheduler import LEAST_SLOTS, Scheduler
from .streams import streams_for
from .updates import OFFLOADED_UPDATES, OffloadedElementwiseUpdate

# Limits of the bytes of a slot. The calls for a part take the host tens of microseconds, in which
# PCIe transfers some MiB.
LEAST_SLOT, MOST_SLOT = 4 << 20, 16 << 20
# Number of elements, of parameters with offloaded state, for each byte of all slots: the slots take
# 0.042 bytes an element. Slots and state per row together take at most 0.05.
ELEMENTS_PER_BYTE = 24


def slots_for(elements: int) -> tuple[int, int]:
    """Return (bytes of each slot, number of slots). `elements`: of the parameters with offloaded
    state.
    """
    share = elements // ELEMENTS_PER_BYTE
    nbytes = min(MOST_SLOT, max(LEAST_SLOT, share // LEAST_SLOTS))
    nbytes -= nbytes % ALIGNMENT
    return nbytes, max(LEAST_SLOTS, share // nbytes)


class Offload(StatePlace):
    """The host memory of an optimizer's state, and the transfers of the bound step."""

    def __init__(self, options: MuonConfig) -> None:
        self.host = HostState(options)
        self.scheduler: Scheduler | None = None  # of the last bound step
        self.streams: dict = {}  # name -> CUDA stream, of all bound steps

    def pack(self, plans: Sequence[Plan], state: dict, groups: Sequence[dict]) -> None:
        """Move state to host memory, see `HostState.pack`."""
        self.host.pack(plans, state, groups)

    def begin(self, device: torch.device) -> None:
        """Begin to bind a step: its parts are fetched into new slots."""
        slots = slots_for(self.host.elements)
        self.scheduler = Scheduler(streams_for(device, self.streams), device, *slots)

    def store(self, plan: Plan, state: dict, inputs: PlanInputViews) -> OffloadStore:
        """Return the store of a plan."""
        return OffloadStore(plan, state, inputs, self.host.memory, self.scheduler)

    def update_of(self, route: str) -> type[BucketUpdate]:
        """Return the class of the updates of a route."""
        return OFFLOADED_UPDATES[route]

    @property
    def elementwise_update(self) -> type[BucketUpdate]:
        """The class of updates of AdamW where parameters are stored."""
        return OffloadedElementwiseUpdate

    def hook(self, stores: Sequence[OffloadStore]) -> StepHook:
        """Return the hook of a bound step."""
        return Transfers(self.scheduler, stores)

    def prefetch(self) -> None:
        """Begin to fetch the first parts of a step. State must not change until the step. Raises
        RuntimeError inside a CUDA graph.
        """
        if self.scheduler is not None:
            _refuse_capture(self.scheduler.device)
            self.scheduler.prefetch()

    def wait(self) -> None:
        """Let the host wait until host memory holds the state of the last step."""
        # A user who captures a graph has synchronized before, and must not do so during the capture
        if self.scheduler is not None and not capturing(self.scheduler.device):
            self.scheduler.wait()

    def drop(self) -> None:
        """Free the slots; host memory stays."""
        self.wait()
        self.scheduler = None

    def holds(self, local: torch.Tensor) -> bool:
        """See `StatePlace`."""
        return self.host.memory.holds(local)

    def slots(self) -> list[torch.Tensor]:
        """See `StatePlace`."""
        slots = [] if self.scheduler is None else self.scheduler.slots
        return [slot.memory for slot in slots]


def state_place_for(options: MuonConfig) -> StatePlace:
    """Return the place of an optimizer's state."""
    return Offload(options) if options.offload_state else StatePlace()


def _refuse_capture(device: torch.device) -> None:
    """Raise RuntimeError inside a CUDA graph."""
    if capturing(device):
        raise RuntimeError(
            "offload_state inside a CUDA graph of your own: state is copied by streams outside "
            "of the graph. Call step() outside of the graph, or leave offload_state out"
        )


class Transfers(StepHook):
    """Begins and ends the transfers of a step; the first of all hooks."""

    def __init__(self, scheduler: Scheduler, stores: Sequence[OffloadStore]) -> None:
        self.scheduler = scheduler
        self.stores = stores

    def _wait_if_missing(self) -> None:
        """Wait if a gradient is missing: then the host is about to read and write state."""
        if any(store.missing for store in self.stores):
            self.scheduler.wait()

    def before_buckets(self, found_inf: torch.Tensor | float | None) -> None:
        """Fetch the first parts. Raises RuntimeError inside a CUDA graph."""
        _refuse_capture(self.scheduler.device)
        for bucket in self.scheduler.buckets:
            bucket.begin_step()
        self._wait_if_missing()
        self.scheduler.prefetch()

    def after_buckets(self) -> None:
        """End the step, before missing gradients restore state."""
        self.scheduler.end_step()
        self._wait_if_missing()

    def on_error(self) -> None:
        """End the step, before state is restored."""
        self.scheduler.end_step()
        self.scheduler.wait()

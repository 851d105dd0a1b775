"""`StatePlace`: where state lies, and which classes of updates step state that lies there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...pipeline import BucketUpdate, StepHook
from ...planning.planner import Plan
from ..elementwise_updates import BUCKET_UPDATES, ElementwiseUpdate
from ..param_store import PlanInputViews, Store


class StatePlace:
    """Where state lies, and how a step is bound to it. This class: with the parameters.
    execution/offload has the other place, host memory.
    """

    def pack(self, plans: Sequence[Plan], state: dict, groups: Sequence[dict]) -> None:
        """Move the state of `plans` to this place, before a step is bound; here nothing has to
        move. `groups`: all parameter groups.
        """

    def begin(self, device: torch.device) -> None:
        """Begin to bind a step."""

    def store(self, plan: Plan, state: dict, inputs: PlanInputViews) -> Store:
        """Return the store of a plan."""
        return Store(plan, state, inputs)

    def update_of(self, route: str) -> type[BucketUpdate]:
        """Return the class of the updates of a route."""
        return BUCKET_UPDATES[route]

    @property
    def elementwise_update(self) -> type[BucketUpdate]:
        """The class of updates of AdamW where parameters are stored."""
        return ElementwiseUpdate

    def hook(self, stores: Sequence[Store]) -> StepHook | None:
        """Return the first hook of a bound step."""
        return None

    def prefetch(self) -> None:
        """Begin to fetch state of the next step, during backward."""

    def wait(self) -> None:
        """Let the host wait until the host can read and write state."""

    def drop(self) -> None:
        """Drop memory of the bound step."""

    def holds(self, local: torch.Tensor) -> bool:
        """Whether a local state lies away from its parameter."""
        return False

    def slots(self) -> list[torch.Tensor]:
        """Memory on the device for state that lies away from its parameter."""
        return []

"""`MuonConfig`: the arguments that hold for the whole optimizer, and their checks. Knows no
parameter.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from .errors import shortened

NONFINITE = ("propagate", "skip", "raise")


@dataclass(frozen=True)
class MuonConfig:
    """What holds for the whole optimizer: the keyword arguments of `Muon` that no group can
    change.
    """

    process_group: object = None
    grads_are_reduced: bool = True
    shard_state: bool = False
    state_dtype: torch.dtype = torch.float32
    wire_dtype: torch.dtype = torch.bfloat16
    ns_dtype: torch.dtype | None = None
    workspace_bytes: int | None = None
    capturable: bool = False
    nonfinite: str = "propagate"
    overlap_backward: bool = False
    overlap_forward: bool = False
    unscale_in_step: bool | None = None

    @classmethod
    def of(cls, given: dict) -> MuonConfig:
        """Those that are given, and defaults; of a 1-D DeviceMesh its process group.

        Raises TypeError for another name, ValueError for a mesh of several dims.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise TypeError(
                f"there is no argument {shortened(repr(unknown[0]))}: leave it out. Besides "
                f"torch.optim.Muon's there are adamw_betas, adamw_eps, {', '.join(known)}"
            )
        if "process_group" in given:
            given = {**given, "process_group": _group_of(given["process_group"])}
        return cls(**given)

    def check(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        wide = (torch.float32, torch.bfloat16)
        for key, allowed in (
            ("state_dtype", wide),
            ("wire_dtype", wide),
            ("ns_dtype", (None, *wide, torch.float16)),
        ):
            # An array has no truth value
            if all(getattr(self, key) is not dtype for dtype in allowed):
                raise self._refused(key, f"one of {allowed}")
        if not isinstance(self.nonfinite, str) or self.nonfinite not in NONFINITE:
            raise self._refused("nonfinite", f"one of {NONFINITE}")
        room = self.workspace_bytes
        if room is not None and (type(room) is not int or room < 1):
            raise self._refused("workspace_bytes", "a whole number >= 1, or None")
        for key in (
            "grads_are_reduced",
            "shard_state",
            "capturable",
            "overlap_backward",
            "overlap_forward",
        ):
            if type(getattr(self, key)) is not bool:
                raise self._refused(key, "True or False")
        if self.unscale_in_step is not None and type(self.unscale_in_step) is not bool:
            raise self._refused("unscale_in_step", "True, False or None")
        if not self.grads_are_reduced and self.process_group is None:
            raise ValueError(
                "grads_are_reduced=False needs process_group: the ranks over which gradients are "
                "averaged"
            )
        if self.shard_state and self.process_group is None:
            raise ValueError(
                "shard_state=True needs process_group: the ranks that hold copies of plain "
                "parameters, of which one is to keep the state; that of DTensors is sharded as "
                "they are"
            )
        if self.process_group is not None and not dist.is_initialized():
            raise ValueError(
                "process_group was given, but torch.distributed is not initialized: "
                "call init_process_group first"
            )
        if self.process_group is not None and not isinstance(self.process_group, dist.ProcessGroup):
            raise ValueError(
                f"process_group={shortened(repr(self.process_group))} is no process group of which "
                "this rank is a member: only its members may build the optimizer with it"
            )
        self._check_overlap()

    def _refused(self, key: str, allowed: str) -> ValueError:
        value = getattr(self, key)
        text = str(value) if key.endswith("_dtype") else repr(value)
        return ValueError(f"{key}={shortened(text)} is not allowed: it must be {allowed}")

    def _check_overlap(self) -> None:
        """Raise ValueError for what does not go together with buckets that leave during backward,
        or return during the next forward.
        """
        for key in ("overlap_backward", "overlap_forward"):
            if getattr(self, key) and self.capturable:
                raise ValueError(
                    f"{key}=True is not allowed with capturable=True, whose step is one graph: "
                    "leave one of them out"
                )
        if self.overlap_forward and self.nonfinite == "raise":
            raise ValueError(
                "overlap_forward=True is not allowed with nonfinite='raise', for which the host "
                "waits at the end of the step: leave one of them out"
            )
        if not self.overlap_backward:
            return
        if self.nonfinite != "propagate":
            raise ValueError(
                f"overlap_backward=True is not allowed with nonfinite={self.nonfinite!r}, which "
                "looks at all gradients before the first one leaves: leave one of them out"
            )
        if self.process_group is not None and self.grads_are_reduced:
            raise ValueError(
                "overlap_backward=True is not allowed with a process_group whose gradients come "
                "reduced: they could leave before DistributedDataParallel has reduced them. Use "
                "grads_are_reduced=False without DistributedDataParallel; leave process_group out "
                "where all parameters are DTensors"
            )

    @property
    def owner_keeps_state(self) -> bool:
        """Whether one rank alone keeps the state of a plain parameter that several hold."""
        return self.shard_state or not self.grads_are_reduced

    @property
    def overlaps(self) -> bool:
        """Whether the model's collectives are on their way beside the optimizer's."""
        return self.overlap_backward or self.overlap_forward

    def workspace(self, device) -> int:
        """The bytes that buckets may take of one rank, all together."""
        if self.workspace_bytes is not None:
            return self.workspace_bytes
        if device.type != "cuda":
            return 256 << 20
        return min(2 << 30, torch.cuda.get_device_properties(device).total_memory * 3 // 100)


def _group_of(given: object) -> object:
    """The process group of a 1-D DeviceMesh; anything else as it is. Raises ValueError for another
    DeviceMesh.
    """
    # Nobody has a mesh before that module is imported
    module = sys.modules.get("torch.distributed.device_mesh")
    if module is None or not isinstance(given, module.DeviceMesh):
        return given
    if given.ndim != 1:
        names = given.mesh_dim_names or tuple(range(given.ndim))
        raise ValueError(
            f"process_group is a DeviceMesh of {given.ndim} dims {names}: pass the process group "
            "of the dim whose ranks hold copies of plain parameters, for example "
            f"mesh.get_group({names[0]!r})"
        )
    return given.get_group()


def spelled_out(source, **how):
    """A decorator: `inspect.signature` and help() name what *args and **options stand for, the
    parameters of `source`; `how`: what to change in these.
    """

    def decorate(init):
        var = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        own = {
            name: p for name, p in inspect.signature(init).parameters.items() if p.kind not in var
        }
        others = [
            p.replace(**how)
            for name, p in inspect.signature(source).parameters.items()
            if name not in own
        ]
        init.__signature__ = inspect.Signature(
            sorted([*own.values(), *others], key=lambda p: p.kind)
        )
        return init

    return decorate

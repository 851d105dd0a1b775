"""Step inputs: gradient addresses, group scalars and flags of a step, uploaded in a single copy.

Kernels read lr, weight decay, momentum and the addresses of gradients from device memory. Launches
and CUDA graphs stay valid while the values change from step to step. `InputBuffers` lays out the
memory, and `make_stores` gives each plan its part. `StepInputs` uploads, only if a value has
changed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import torch

from ..communication.missing_grads import MissingGradients
from ..communication.nonfinite import FlagBuffers
from ..kernels.backend import capturing, use_triton
from ..kernels.elementwise.multi_tensor import NUMBERS
from ..metrics.collector import sampled_matrices
from ..params.dtensor import local_of
from ..planning.memory_model import ALIGNMENT
from ..planning.planner import Plan
from ..rules.muon import is_stochastic, rounding_key
from ..rules.rule import device_scalars
from .fingerprint import StepFingerprint
from .param_store import PlanInputViews, Store

# Copies to the device that may be in flight; each has pinned memory of its own
STAGING_BUFFERS = 4


class InputBuffers:
    """A single device buffer with all inputs of a step, and views of each reader's part."""

    def __init__(
        self, plans: Sequence[Plan], flag_counts: Mapping[tuple, int], device: torch.device
    ) -> None:
        """`flag_counts`: ranks -> number of gradients compared by the ranks in a step, see
        `MissingGradients`.
        """
        self.device = device
        addresses, end = _lay_out([8 * len(plan.params) for plan in plans], 0)
        scalars, end = _lay_out([4 * NUMBERS * len(plan.groups) for plan in plans], end)
        # Random bits are drawn by 64-bit keys, only where a group has stochastic rounding
        self.draws = any(is_stochastic(group) for plan in plans for group in plan.groups)
        keys, end = _lay_out([8 * len(plan.groups) * self.draws for plan in plans], end)
        flags, end = _lay_out([4 * count for count in flag_counts.values()], end)
        self.memory = torch.zeros(end, dtype=torch.uint8, device=device)
        # Of each plan: int64 addresses of the gradients; None without Triton, because torch's
        # kernels take the gradients themselves
        self.addresses: list[torch.Tensor | None] = [None] * len(plans)
        if use_triton(device):
            self.addresses = [self.memory[place].view(torch.int64) for place in addresses]
        # Of each plan: fp32 `device_scalars` of each group
        self.scalars = [self.memory[place].view(torch.float32) for place in scalars]
        # Of each plan: int64 `rounding_key` of each group
        self.keys = [self.memory[place].view(torch.int64) for place in keys]
        # Ranks -> (fp32 flags: this rank has the gradient; fp32 flags: any rank has the gradient).
        # The step uploads the first, an all-reduce fills the second.
        self.flags: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}
        for ranks, place in zip(flag_counts, flags):
            mine = self.memory[place].view(torch.float32)
            self.flags[ranks] = mine, torch.empty_like(mine)
        # Packs all values as the device reads them: native byte order, gaps as in `_lay_out`
        self.packer = struct.Struct(
            "="
            + _format(addresses, "q", 8)
            + _format(scalars, "f", 4)
            + _format(keys, "q", 8)
            + _format(flags, "f", 4)
        )


class StepInputs:
    """Has the stores read the gradients of a step, and uploads addresses, scalars and flags.

    Never waits for the device, unless the host is STAGING_BUFFERS uploads ahead.
    """

    def __init__(
        self,
        buffers: InputBuffers,
        stores: Sequence[Store],
        missing: MissingGradients,
        early_buckets: int = 0,
    ) -> None:
        """`early_buckets`: number of buckets that may start during backward, each with an
        upload."""
        self.stores = stores
        self.missing = missing
        self.device = buffers.device
        self.memory = buffers.memory
        self.packer = buffers.packer
        self.draws = buffers.draws  # a group has stochastic rounding
        # Bytes that the device holds; None if a replayed graph may have overwritten the buffer
        self.uploaded: bytes | None = b""
        self.replayed = False  # a captured graph contains an upload
        # Staging buffers that belong to captured graphs: a replay copies from them again
        self.captured_staging: list[torch.Tensor] = []
        self.staging: list[tuple[torch.Tensor, torch.cuda.Event]] = []  # (pinned memory, copied)
        if self.device.type == "cuda":
            nbytes = self.memory.numel()
            count = STAGING_BUFFERS * (1 + early_buckets)
            self.staging = [(_pinned(nbytes), torch.cuda.Event()) for _ in range(count)]

    def read_and_upload(
        self,
        seen: StepFingerprint | None = None,
        as_bound: bool = False,
        creates_state: bool = False,
    ) -> bool:
        """Read this step's gradients into the stores, and upload all values in stream order.

        `seen`: the fingerprint, if the check in this step has read the gradients. `as_bound`: keep
        the bound views, and copy gradients of another form; return whether any was copied.
        `creates_state`: as in `MissingGradients.begin_step`.
        """
        known = {} if seen is None else seen.pop_gradients()
        has_copied = False
        for store in self.stores:
            has_copied = store.read_gradients(known=known, as_bound=as_bound) or has_copied
        self.missing.begin_step(creates_state)
        self.upload()
        return has_copied

    def upload(self) -> None:
        """Upload the addresses, scalars and flags of the gradients in the stores, if changed.
        Raises RuntimeError for stochastic rounding inside the user's own CUDA graph.
        """
        values = []
        for store in self.stores:
            values += _addresses(store.gradients)
        for store in self.stores:
            for group in store.groups:
                values += device_scalars(group)
        if self.draws:
            values += [rounding_key(group) for store in self.stores for group in store.groups]
        packed = self.packer.pack(*values, *self.missing.local_flags())
        if capturing(self.device):
            if self.draws:
                raise RuntimeError(
                    "rounding='stochastic' inside a CUDA graph of your own, whose replays would "
                    "repeat the random bits of this step: call step() outside of it, with "
                    "capturable=True if the step is to be a graph"
                )
            self._copy_in_capture(packed)
        elif packed != self.uploaded:
            self._copy_to_device(packed)
            # A replay of a captured upload overwrites the buffer unseen: from then on every step
            # has to upload
            self.uploaded = None if self.replayed else packed

    def drop_gradients(self) -> None:
        """Drop references to gradients after the launches of a step."""
        for store in self.stores:
            store.drop_gradients()

    def _copy_to_device(self, packed: bytes) -> None:
        """Copy `packed` into the buffer; on GPUs asynchronously, from pinned memory."""
        source = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        if self.device.type != "cuda":
            self.memory.copy_(source)
            return
        buffer, copied = self.staging.pop(0)
        # Recorded about STAGING_BUFFERS steps ago: only a host that is far ahead waits
        copied.synchronize()
        self.memory.copy_(buffer.copy_(source), non_blocking=True)
        copied.record()
        self.staging.append((buffer, copied))

    def _copy_in_capture(self, packed: bytes) -> None:
        """Copy `packed` inside the user's own graph. Every replay copies the captured values again,
        so the staging buffer is never reused.
        """
        # Give away a spare buffer rather than allocate pinned memory inside a capture; the last
        # buffer stays for steps outside of graphs
        buffer = self.staging.pop(0)[0] if len(self.staging) > 1 else _pinned(len(packed))
        source = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        self.captured_staging.append(buffer.copy_(source))
        self.memory.copy_(buffer, non_blocking=True)
        self.uploaded = None
        self.replayed = True


def make_stores(
    plans: Sequence[Plan],
    state: dict | None,
    buffers: InputBuffers,
    flags: FlagBuffers | None,
    collects: bool,
    make_store: Callable[[Plan, dict, PlanInputViews], Store],
) -> list[Store]:
    """A store for each plan. Raises RuntimeError for a parameter whose memory was freed, or whose
    strides have changed so that its split cannot view them.
    """
    for plan in plans:
        for number, p in enumerate(plan.params):
            plan.check_strides(number)
            if p.numel() and local_of(p).numel() and not local_of(p).untyped_storage().nbytes():
                raise RuntimeError(
                    f"parameter {plan.names[number]} has no memory: it was freed, and has to "
                    "be materialized again before the step"
                )
    sampled = sampled_matrices(plans) if collects else [None] * len(plans)
    stores = []
    for index, plan in enumerate(plans):
        views = PlanInputViews(
            addresses=buffers.addresses[index],
            scalars=buffers.scalars[index],
            keys=buffers.keys[index],
            flags=None if flags is None else flags.flags,
            flag_offset={} if flags is None else flags.flag_offset[index],
            sampled=sampled[index],
        )
        stores.append(make_store(plan, state, views))
    return stores


def _addresses(gradients: Sequence[torch.Tensor | None]) -> list[int]:
    """Data pointers; 0 for a gradient not yet made by backward."""
    # Usually every gradient exists: then no Python loop over gradients
    if type(None) in set(map(type, gradients)):
        return [0 if g is None else g.data_ptr() for g in gradients]
    return list(map(torch.Tensor.data_ptr, gradients))


def _pinned(nbytes: int) -> torch.Tensor:
    """Page-locked host memory, for asynchronous copies to the device."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _format(places: Sequence[slice], letter: str, itemsize: int) -> str:
    """struct format of the values at `places`, with pad bytes up to the next place."""
    return "".join(
        f"{(p.stop - p.start) // itemsize}{letter}{-p.stop % ALIGNMENT}x" for p in places
    )


def _lay_out(sizes: Sequence[int], start: int) -> tuple[list[slice], int]:
    """(slices of `sizes` bytes from byte `start` on, each at a multiple of ALIGNMENT; the end)."""
    places = []
    for nbytes in sizes:
        places.append(slice(start, start + nbytes))
        start += nbytes + -nbytes % ALIGNMENT
    return places, start

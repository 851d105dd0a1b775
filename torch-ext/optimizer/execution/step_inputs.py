"""Gradient addresses and scalars of a step, in one copy to the device, only where they changed."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import torch

from ..communication.missing_grads import MissingGradients
from ..kernels.backend import capturing, use_triton
from ..planning.memory_model import ALIGNMENT
from ..planning.planner import Plan
from ..rules.rule import device_scalars
from .param_store import Store

STAGING_BUFFERS = 4  # copies that may be on their way to the device


class InputBuffers:
    """One buffer on the device that holds all inputs of a step, and the views of each reader.

    `addresses`: of each plan, int64 addresses of its gradients, None without Triton. `scalars`: of
    each plan, fp32 (`device_scalars`). `flags`: ranks -> (whether this rank has the gradients that
    they compare, whether any rank has), fp32.
    """

    def __init__(
        self, plans: Sequence[Plan], flag_counts: Mapping[tuple, int], device: torch.device
    ):
        """`flag_counts`: ranks -> number of gradients that they compare (`MissingGradients`)."""
        self.device = device
        addresses, end = _lay_out([8 * len(plan.params) for plan in plans], 0)
        scalars, end = _lay_out([4 * len(device_scalars(plan.group)) for plan in plans], end)
        flags, end = _lay_out([4 * count for count in flag_counts.values()], end)
        self.memory = torch.zeros(end, dtype=torch.uint8, device=device)
        self.addresses = [None] * len(plans)
        if use_triton(device):
            self.addresses = [self.memory[place].view(torch.int64) for place in addresses]
        self.scalars = [self.memory[place].view(torch.float32) for place in scalars]
        self.flags = {}
        for ranks, place in zip(flag_counts, flags):
            mine = self.memory[place].view(torch.float32)
            self.flags[ranks] = mine, torch.empty_like(mine)
        # Little-endian, with the gaps of alignment: how the host packs all of it
        self.packer = struct.Struct(
            "=" + _form(addresses, "q", 8) + _form(scalars, "f", 4) + _form(flags, "f", 4)
        )


class StepInputs:
    """Uploads gradient addresses and scalars of a step in one copy, only where they changed."""

    def __init__(
        self,
        buffers: InputBuffers,
        stores: Sequence[Store],
        missing: MissingGradients,
        early_buckets: int = 0,
    ):
        """`early_buckets`: how many buckets may leave before the step, each with an upload."""
        self.stores = stores
        self.missing = missing
        self.device = buffers.device
        self.memory = buffers.memory
        self.packer = buffers.packer
        self.sent = b""  # what the device holds; None after an upload that a graph replays
        self.replayed = False
        self.kept = []  # staging buffers that captured graphs read again
        self.pages = []
        if self.device.type == "cuda":
            nbytes = self.memory.numel()
            count = STAGING_BUFFERS * (1 + early_buckets)
            self.pages = [(_pinned(nbytes), torch.cuda.Event()) for _ in range(count)]

    def send(self, seen=None, as_bound=False) -> bool:
        """Have the stores know this step's gradients and the device its values, from here on in the
        stream's order. `seen`: the Look that has just seen them. Returns whether gradients had to
        be brought into the form in which the stores were bound (`as_bound`).
        """
        came = {} if seen is None else seen.take()
        brought = False
        for store in self.stores:
            brought = store.read(came=came, as_bound=as_bound) or brought
        self.tell()
        return brought

    def tell(self) -> None:
        """The device's part of it, of what the stores know."""
        values = []
        for store in self.stores:
            values += _addresses(store.gradients)
        for store in self.stores:
            values += device_scalars(store.hp)
        packed = self.packer.pack(*values, *self.missing.local_flags())
        if capturing(self.device):
            self._send_by_graph(packed)
        elif packed != self.sent:
            self._send(packed)
            self.sent = None if self.replayed else packed

    def forget(self) -> None:
        """The step is launched: nothing here may keep its gradients alive."""
        for store in self.stores:
            store.forget()

    def _send(self, packed) -> None:
        source = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        if self.device.type != "cuda":
            self.memory.copy_(source)
            return
        page, copied = self.pages.pop(0)
        # Recorded about STAGING_BUFFERS steps ago: only a host that is far ahead waits
        copied.synchronize()
        self.memory.copy_(page.copy_(source), non_blocking=True)
        copied.record()
        self.pages.append((page, copied))

    def _send_by_graph(self, packed) -> None:
        """Into the user's own graph: its replays send these values again, so the page is theirs
        from now on.
        """
        page = self.pages.pop(0)[0] if len(self.pages) > 1 else _pinned(len(packed))
        self.kept.append(page.copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8)))
        self.memory.copy_(page, non_blocking=True)
        self.sent, self.replayed = None, True


def _addresses(gradients) -> list[int]:
    """0 for those that are still to come."""
    if type(None) in set(map(type, gradients)):
        return [0 if g is None else g.data_ptr() for g in gradients]
    return list(map(torch.Tensor.data_ptr, gradients))


def _pinned(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _form(places, letter, size):
    return "".join(f"{(p.stop - p.start) // size}{letter}{-p.stop % ALIGNMENT}x" for p in places)


def _lay_out(sizes, at):
    """(slices of so many bytes, one after another at aligned places, where the next one would
    begin).
    """
    places = []
    for nbytes in sizes:
        places.append(slice(at, at + nbytes))
        at += nbytes + -nbytes % ALIGNMENT
    return places, at

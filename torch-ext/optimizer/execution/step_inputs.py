"""Gradient addresses and scalars of a step, in one copy to the device, only where they changed."""

from __future__ import annotations

import struct

import torch

from ..kernels.backend import capturing, use_triton
from ..planning.memory_model import ALIGNMENT
from ..rules.rule import device_scalars

PAGES = 4  # copies that may be on their way to the device


class StepInputs:
    """One buffer on the device, in which every store and every set of flags finds its own."""

    def __init__(self, stores, presence, early=0):
        """Give `stores` their `addresses` (int64, None without Triton) and `numbers` (fp32),
        `presence` its flags. `early`: how many buckets may leave before the step.
        """
        self.stores, self.presence, self.device = stores, presence, presence.device
        flags = {ranks: len(members) for ranks, members in presence.members.items() if ranks}
        addresses, at = _lay_out([8 * len(store.params) for store in stores], 0)
        numbers, at = _lay_out([4 * len(device_scalars(store.hp)) for store in stores], at)
        places, at = _lay_out([4 * count for count in flags.values()], at)
        self.memory = torch.zeros(at, dtype=torch.uint8, device=self.device)
        for store, here, there in zip(stores, addresses, numbers):
            store.addresses = (
                self.memory[here].view(torch.int64) if use_triton(self.device) else None
            )
            store.numbers = self.memory[there].view(torch.float32)
        mine = {
            ranks: self.memory[place].view(torch.float32) for ranks, place in zip(flags, places)
        }
        presence.flags = {ranks: (here, torch.empty_like(here)) for ranks, here in mine.items()}
        self.packer = struct.Struct(
            "=" + _form(addresses, "q", 8) + _form(numbers, "f", 4) + _form(places, "f", 4)
        )
        self.sent, self.replayed, self.kept, self.pages = b"", False, [], []
        if self.device.type == "cuda":
            self.pages = [(_pinned(at), torch.cuda.Event()) for _ in range(PAGES * (1 + early))]

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
        packed = self.packer.pack(*values, *self.presence.here())
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
        copied.synchronize()  # that was PAGES steps ago or so: only a host that is far ahead waits
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

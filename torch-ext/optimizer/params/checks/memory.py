"""Check that no two parameters share memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..dtensor import extent, local_of
from ..errors import name_of

# (address of the first byte, address after the last byte, index of the group, index of the
# parameter in the group, local tensor)
Span = tuple[int, int, int, int, torch.Tensor]


def check_memory(groups: Sequence[dict]) -> None:
    """Raise ValueError if two parameters share an element in memory, or if elements of a parameter
    share memory: the elements would be stepped more than once.

    Reads addresses and strides only, no values. Ignores parameters with requires_grad=False, and
    fake and meta tensors, as tensors without memory.
    """
    spans: list[Span] = []
    for number, group in enumerate(groups):
        for i, param in enumerate(group["params"]):
            local = local_of(param) if param.requires_grad else None
            if local is None or isinstance(local, FakeTensor) or local.is_meta or not local.numel():
                continue
            if not local.is_contiguous() and _may_overlap_itself(local):
                raise ValueError(
                    f"parameter {name_of(group, i)} of shape {tuple(param.shape)} has strides "
                    f"{local.stride()}, with which elements share memory (as after expand()): "
                    "clone() the tensor before it becomes a parameter"
                )
            # A storage of 0 bytes has been freed (FSDP2 does so); its address may be in use again
            if local.untyped_storage().nbytes():
                start = local.data_ptr()
                nbytes = extent(local.shape, local.stride()) * local.itemsize
                spans.append((start, start + nbytes, number, i, local))
    # Sorted by address, only runs of spans that overlap are compared element by element
    spans.sort(key=lambda span: span[:2])
    together: list[Span] = []
    end = 0
    for span in [*spans, None]:
        if span is None or span[0] >= end:
            _check_no_common_element(together, groups)
            together = []
        if span is not None:
            together.append(span)
            end = max(end, span[1])


def _may_overlap_itself(local: torch.Tensor) -> bool:
    """Whether elements of a tensor may share memory: in ascending order of strides, a stride is
    smaller than the span of all dims with smaller strides.
    """
    reach = 0  # offset, in elements, of the last element of the dims so far
    for stride, size in sorted(
        (stride, size) for size, stride in zip(local.shape, local.stride()) if size > 1
    ):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _check_no_common_element(spans: list[Span], groups: Sequence[dict]) -> None:
    """Raise ValueError if two of `spans` have an element in common. spans: a run of overlapping
    ranges of memory.

    Ranges may overlap without a common element: columns of a larger tensor.
    """
    if len(spans) < 2:
        return
    taken = _MemoryMap(spans)
    for index, span in enumerate(spans):
        if taken.at(span).any():
            other = next(o for o in spans[:index] if _MemoryMap([o, span]).add(o).at(span).any())
            one, two = (
                f"parameter {name_of(groups[g], i)} of group {g}" for _, _, g, i, _ in (other, span)
            )
            raise ValueError(
                f"{one} and {two} share memory, which would be stepped twice: leave one of them "
                "out, or clone() it before it becomes a parameter"
            )
        taken.add(span)


class _MemoryMap:
    """A bitmap of memory: a bool for each unit of memory, true if taken by an added tensor."""

    def __init__(self, spans: list[Span]) -> None:
        """An empty bitmap of the memory from the first to the last byte of `spans`, sorted by
        address.
        """
        self.start = spans[0][0]  # address of the first byte
        end = max(span[1] for span in spans)
        # Bytes per unit: the largest number that divides all item sizes and distances, so that
        # every element covers whole units
        self.unit = math.gcd(
            *(span[0] - self.start for span in spans), *(span[4].itemsize for span in spans)
        )
        self.taken = torch.zeros((end - self.start) // self.unit, dtype=torch.bool, device="cpu")

    def at(self, span: Span) -> torch.Tensor:
        """The view of the units of a tensor: the tensor's shape, then the units per element."""
        start, _, _, _, local = span
        count = local.itemsize // self.unit
        strides = (*(stride * count for stride in local.stride()), 1)
        return self.taken.as_strided(
            (*local.shape, count), strides, (start - self.start) // self.unit
        )

    def add(self, span: Span) -> _MemoryMap:
        """Set the units of a tensor; returns the bitmap."""
        self.at(span).fill_(True)
        return self

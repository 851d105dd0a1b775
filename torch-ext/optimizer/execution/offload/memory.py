"""Host memory of offloaded state: blocks, each one flat allocation, pinned for a GPU, with a view
of each state.

Neighbouring state of a block is copied at once: the copies of a launch take few calls.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import weakref
from collections.abc import Iterable, Sequence

import torch

# Every state begins at a multiple, in bytes: the widest access of a kernel, and cache lines
ALIGNMENT = 256
PORTABLE = 1  # flag of cudaHostRegister: pinned for every context of the process


class HostMemory:
    """A flat uint8 tensor on the host with a place for each of several states."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        """`sizes`: bytes of each state. `device`: of the parameters. Raises RuntimeError if a GPU
        cannot pin the memory.
        """
        padded = [nbytes + -nbytes % ALIGNMENT for nbytes in sizes]
        # Of each state, then the end
        self.starts = list(itertools.accumulate(padded, initial=0))
        # End of a state -> start of the next
        self.next_start = {
            start + nbytes: start + whole
            for start, nbytes, whole in zip(self.starts, sizes, padded)
            if nbytes
        }
        self.whole_places = dict(zip(self.starts, sizes))  # start -> bytes
        self.nbytes = self.starts[-1]
        self.flat = _host_bytes(self.nbytes, device, self)
        self.address = self.flat.data_ptr()

    def view(
        self, number: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """The place of state `number`, as a dense tensor of `shape` and `strides`."""
        start, stop = self.starts[number : number + 2]
        return self.flat[start:stop].view(dtype).as_strided(shape, strides)

    def offset_of(self, view: torch.Tensor) -> int:
        """Bytes from the start of the memory to the first element of a view."""
        return view.data_ptr() - self.address

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of this memory. Tensors without elements are not."""
        is_inside = 0 <= tensor.data_ptr() - self.address < self.nbytes
        return tensor.device.type == "cpu" and tensor.numel() > 0 and is_inside

    def is_place(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the memory has the bytes of one state, and no others."""
        start = self.offset_of(tensor)
        return self.whole_places.get(start) == tensor.nbytes and is_dense(tensor)

    def ranges_of(self, views: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        """The byte ranges (start, stop) of dense views, ascending; adjacent ranges are merged."""
        spans = []
        for view in views:
            start = self.offset_of(view)
            stop = start + view.nbytes
            # With the padding up to the next state, so that ranges of neighbours are merged
            spans.append((start, self.next_start.get(stop, stop)))
        ranges: list[tuple[int, int]] = []
        for start, stop in sorted(spans):
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = ranges[-1][0], max(stop, ranges[-1][1])
            else:
                ranges.append((start, stop))
        return ranges


Range = tuple[HostMemory, int, int]  # (block, first byte, end)


class HostBlocks:
    """All host memory of an optimizer: the block of the first step, and further blocks for states
    created later. A state never moves between blocks.
    """

    def __init__(self) -> None:
        self.blocks: list[HostMemory] = []

    def add(self, sizes: Sequence[int], device: torch.device) -> HostMemory:
        """Take a further block; arguments and errors as of `HostMemory`."""
        self.blocks.append(HostMemory(sizes, device))
        return self.blocks[-1]

    def block_of(self, tensor: torch.Tensor) -> HostMemory | None:
        """The block that a tensor is a view of; None if there is none."""
        return next((block for block in self.blocks if block.holds(tensor)), None)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of a block."""
        return self.block_of(tensor) is not None

    def ranges_of(self, views: Sequence[torch.Tensor]) -> list[Range]:
        """The ranges of dense views, by block; adjacent ranges are merged."""
        by_block = [(block, list(filter(block.holds, views))) for block in self.blocks]
        return [(block, *span) for block, some in by_block for span in block.ranges_of(some)]

    def drop_others(self, tensors: Iterable[torch.Tensor], blocks: Iterable[HostMemory]) -> None:
        """Drop blocks that hold none of `tensors`, and are none of `blocks`."""
        found = {id(self.block_of(tensor)) for tensor in tensors} | set(map(id, blocks))
        self.blocks = [block for block in self.blocks if id(block) in found]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill a range of memory, in any order of the dims."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda dim: dim[::-1]):
        if size != 1 and stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def _host_bytes(nbytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """Return flat uint8 memory on the host; for a CUDA device pinned as long as `owner` lives.
    Raises RuntimeError if the memory cannot be pinned.
    """
    if device.type != "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # torch's pinned allocator is not used: it rounds up to a power of two, and keeps freed memory.
    # The memory consists of whole pages, since two registrations must not share a page. The storage
    # begins where the registration does; otherwise `is_pinned` would be False. The mapping is
    # shared: after a fork, as by a data loader, writes to a private mapping would go to copies of
    # pages that the GPU does not know.
    whole = nbytes + -nbytes % mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, whole), dtype=torch.uint8)
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), whole, PORTABLE))
    if error:
        raise RuntimeError(
            f"offload_state: {whole} bytes of host memory cannot be pinned (cudaError {error}): "
            "free host memory, keep some state on the GPU with offload_state=<bytes>, or leave "
            "offload_state out"
        )
    finalizer = weakref.finalize(owner, _unpin, memory, device)
    # Not at the end of the process: the driver frees all memory, and its context may be gone
    finalizer.atexit = False
    return memory[:nbytes]


def _unpin(memory: torch.Tensor, device: torch.device) -> None:
    """Unpin memory, once no copy uses it any more."""
    # During a capture of a graph `synchronize` raises; no copy is in flight then
    with contextlib.suppress(Exception):
        torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

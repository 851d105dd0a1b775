"""Search for NaN and Inf in many rectangles of gradients, in one launch for each dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..launch.jit import jit
from .multi_tensor import (
    Skip,
    Source,
    bind,
    element_pointers,
    gradient_address,
    locate,
    run,
    skips_of,
)

tl = None  # Triton's language, put here by jit


class NonfiniteCheck:
    """Sets the flag of every rectangle of the gradients with a NaN or Inf. Needs Triton."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        sources: Sequence[Source],
        gradients: Sequence[torch.Tensor],
        flags: Skip,
    ):
        """Bind rectangles: `sources` and `gradients` as for `Pack`, `shapes` their (rows, columns).
        Several rectangles may share a flag.
        """
        self.launches = bind((), sources, gradients, shapes) if shapes else []
        self.flags = skips_of(flags, self.launches)  # kernel arguments for each launch

    def __call__(self, addresses: torch.Tensor) -> None:
        """Write 1 to the flags of rectangles with a NaN or Inf, and leave all other flags alone.

        `addresses`: int64 addresses of all gradients, on the device.
        """
        for launch, (flags, places, _) in zip(self.launches, self.flags):
            run(_check_kernel, launch, addresses, flags, places)


@jit
def _check_kernel(
    records,
    blocks,
    addresses,
    flags,
    places,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCESS: tl.constexpr,
    TYPE_0: tl.constexpr,
):
    """Compute `NonfiniteCheck` for a block of elements. List of the table: G.

    `flags`, `places`: see `Skip.of`. All programs that write a flag write 1.
    """
    record, row, column, inside = locate(records, blocks, FIELDS, BLOCK, ACCESS)
    address = gradient_address(record, addresses, FIELDS)
    at = element_pointers(record, row, column, 0, TYPE_0, address, ACCESS)
    g = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    # False for NaN, too
    is_finite = tl.abs(g) < float("inf")
    found = tl.max(tl.where(is_finite, 0, 1))
    place = places + tl.load(blocks + tl.program_id(0).to(tl.int64) * 2)
    tl.store(flags + tl.load(place), 1.0, mask=found > 0)

"""`LargestLogits`: largest logits of all layers in one tensor, so that the number of launches does
not grow with the number of layers. Sends nothing, and nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

# Number of sets of layers whose buffers are kept, besides one set for each single layer
MOST_BATCHES = 4


@dataclass(frozen=True)
class Batch:
    """Buffers for the logits of a set of layers, given in one call of `LargestLogits.add`.

    `finite`, `broken`: fp32 (heads of all given layers,), the finite logits and the flags.
    `sources`: views of both. `targets`: for each source, the view of `LargestLogits.values` that
    takes the maximum.
    """

    finite: torch.Tensor
    broken: torch.Tensor
    sources: list[torch.Tensor]
    targets: list[torch.Tensor]


class LargestLogits:
    """Largest logits of the heads of all layers, on a device.

    `values`: fp32 (2, heads of all layers), changed in place, never moved. First row: the largest
    finite logit of each head, -inf without. Second row: 1 where a logit was NaN or +Inf, else 0.
    `places`: index of the first head of each layer. Each layer has room for all of its heads: with
    fewer heads of this rank (TP), the first of them are used.
    """

    def __init__(self, heads: Mapping[str, int], device: torch.device) -> None:
        """Start without logits. `heads`: number of heads of each layer."""
        self.places, end = {}, 0
        self._heads = dict(heads)
        for layer, count in heads.items():
            self.places[layer] = end
            end += count
        # A tensor made in inference mode could not be changed outside
        with torch.inference_mode(False):
            self.without = torch.zeros(2, end, dtype=torch.float32, device=device)
            self.without[0].fill_(-math.inf)
            self.values = self.without.clone()
        self._batches: dict[tuple[str, ...], Batch] = {}  # given layers -> buffers

    def __getstate__(self) -> dict:
        """For copies and pickles: without the views, which would become separate tensors."""
        return {**vars(self), "_batches": {}}

    def add(self, layers: tuple[str, ...], logits: Sequence[torch.Tensor]) -> None:
        """Replace `values`, in place, by the maxima of `values` and `logits`.

        `logits`: (heads of this rank,) of each layer, on the device. A layer must have an equal
        number of heads in every call.
        """
        batch = self._batches.get(layers)
        if batch is None:
            batch = self._new_batch(layers, list(map(len, logits)))
        given = (logits[0] if len(logits) == 1 else torch.cat(logits)).to(torch.float32)
        torch.nan_to_num(given, -math.inf, -math.inf, -math.inf, out=batch.finite)
        torch.ne(given, batch.finite, out=batch.broken)
        torch._foreach_maximum_(batch.targets, batch.sources)

    def empty(self) -> None:
        """Forget all logits."""
        self.values.copy_(self.without)

    def forget(self, layer: str) -> None:
        """Forget the logits of a layer, which may have another number of heads from here on."""
        first = self.places[layer]
        part = slice(first, first + self._heads[layer])
        self.values[:, part].copy_(self.without[:, part])
        self._batches.clear()

    def _new_batch(self, layers: tuple[str, ...], counts: Sequence[int]) -> Batch:
        """Make the buffers of layers with `counts` heads."""
        if len(self._batches) >= len(self.places) + MOST_BATCHES:
            self._batches.clear()
        origins = [
            place
            for layer, count in zip(layers, counts)
            for place in range(self.places[layer], self.places[layer] + count)
        ]
        with torch.inference_mode(False):
            buffer = torch.empty(2, len(origins), dtype=torch.float32, device=self.values.device)
            sources, targets = [], []
            for at, origin, count in runs(origins):
                sources += buffer[:, at : at + count].unbind()
                targets += self.values[:, origin : origin + count].unbind()
            batch = Batch(buffer[0], buffer[1], sources, targets)
        self._batches[layers] = batch
        return batch


def runs(origins: Sequence[int], border: int = 0) -> Iterator[tuple[int, int, int]]:
    """Yield (first position, origin of the first position, number of positions) of each longest run
    of positions with consecutive origins. A run never crosses `border`: either all of its origins
    are below, or none is.
    """
    start = 0
    for at in range(1, len(origins) + 1):
        is_last = at == len(origins)
        if is_last or origins[at] != origins[at - 1] + 1 or origins[at] == border:
            yield start, origins[start], at - start
            start = at

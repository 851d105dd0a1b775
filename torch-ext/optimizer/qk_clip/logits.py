"""Largest attention logits of each head, from queries and keys, in chunks.

`max_logits` computes the maxima of one call of attention. `Recording` finds the calls of
`scaled_dot_product_attention` in the layers of a model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..params.dtensor import local_of
from ..params.errors import shortened, warn_caller
from ..params.model.names import clean_name

# A mask of numbers excludes the positions of numbers up to this one. Models write -1e4, -1e9 or the
# smallest number of a dtype in place of -inf.
MASKED = -1e3
# Logits in memory at once, for all batches and heads
CHUNK_ELEMENTS = 1 << 24
SDPA = nn.functional.scaled_dot_product_attention
# Names of the arguments of `SDPA` by position
SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@torch.no_grad()
def max_logits(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """The largest logit of each query head, fp32 (H,); -inf for a head without logits.

    query: (..., H, L, D); key: (..., K, S, D), where K divides H. attn_mask: as in
    `scaled_dot_product_attention`. A mask of numbers excludes positions of numbers up to `MASKED`.
    Larger numbers of the mask (biases) are not added: scaling queries and keys does not scale a
    bias.
    Logits are products in the dtype of the query. Costs 2 L S D operations for each head and batch,
    about half with `is_causal`.
    """
    query, key = local_of(query), local_of(key)
    H, L, D = query.shape[-3:]
    K, S = key.shape[-3:-1]
    query = query.reshape(-1, K, H // K, L, D)
    key = key.reshape(-1, K, 1, S, D)
    scale = 1 / math.sqrt(D) if scale is None else scale
    excluded = _excluded(attn_mask, query.shape[0], H, K)
    found = torch.full((H,), -math.inf, dtype=torch.float32, device=query.device)
    step = max(1, CHUNK_ELEMENTS // max(1, query.shape[0] * H * S))
    for start in range(0, L, step):
        stop = min(start + step, L)
        seen = min(stop, S) if is_causal else S  # later keys are masked for the whole chunk
        logits = query[..., start:stop, :] @ key[..., :seen, :].mT
        if is_causal:
            rows = torch.arange(start, stop, device=query.device)
            later = rows[:, None] < torch.arange(seen, device=query.device)
            logits = logits.masked_fill(later, -math.inf)
        if excluded is not None:
            part = excluded[..., start:stop, :] if excluded.shape[-2] > 1 else excluded
            part = part[..., :seen] if part.shape[-1] > 1 else part
            logits = logits.masked_fill(part, -math.inf)
        if logits.numel():
            found = torch.maximum(found, logits.amax((0, -2, -1)).flatten().float() * scale)
    return found


def _excluded(mask: torch.Tensor | None, batch: int, H: int, K: int) -> torch.Tensor | None:
    """True where a mask excludes, with five dims (batch, K, H / K, L, S) or sizes 1."""
    if mask is None:
        return None
    mask = local_of(mask)
    if mask.dtype != torch.bool:
        mask = mask > MASKED
    mask = mask.logical_not()
    while mask.ndim < 4:
        mask = mask.unsqueeze(0)
    if mask.ndim > 4:
        mask = mask.expand(*mask.shape[:-4], *mask.shape[-4:]).flatten(0, -4)
    heads = (K, H // K) if mask.shape[-3] == H and H > 1 else (1, 1)
    return mask.unflatten(-3, heads)


class Recording(TorchFunctionMode):
    """Context manager: records the largest logits of `scaled_dot_product_attention` in the modules
    of layers.

    A call belongs to the innermost running module that is a layer. Calls outside of layers are not
    recorded. Warns at the end of layers without a call: compiled modules, and modules that compute
    attention in another way, cannot be recorded.
    """

    def __init__(
        self, model: nn.Module, layers: Iterable[str], record: Callable[[str, torch.Tensor], None]
    ) -> None:
        """`layers`: paths of modules. Raises ValueError for a path without a module."""
        super().__init__()
        modules = {clean_name(path): module for path, module in model.named_modules()}
        if missing := [name for name in layers if name not in modules]:
            raise ValueError(
                f"the model has no module {shortened(missing[0])}: for recording, layers must have "
                "the paths of the modules that call attention"
            )
        self.modules = {name: modules[name] for name in layers}
        self.record = record
        self.silent = set(self.modules)  # layers without a recorded call
        self.running: list[str] = []  # layers whose forward runs, the innermost last
        self.handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Recording:
        for name, module in self.modules.items():
            begin = functools.partial(self._begin, name)
            self.handles.append(module.register_forward_pre_hook(begin))
            self.handles.append(module.register_forward_hook(self._end, always_call=True))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.running = []
        super().__exit__(*error)
        if self.silent and error[:1] in ((), (None,)):
            names = sorted(self.silent)
            warn_caller(
                f"{len(names)} of {len(self.modules)} layers, the first {shortened(names[0])}, "
                "called no scaled_dot_product_attention that could be recorded, and QK-clip will "
                "not scale their weights. Compiled modules and other kernels need QKClip.record"
            )

    def _begin(self, name: str, module: nn.Module, inputs: tuple) -> None:
        """Forward pre-hook of a layer."""
        self.running.append(name)

    def _end(self, module: nn.Module, inputs: tuple, output: object) -> None:
        """Forward hook of a layer, called after errors too."""
        # Checkpointing may stop a forward early, and then no hook is called
        if self.running:
            self.running.pop()

    def __torch_function__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """Call `function`; of attention in a layer, record the maxima."""
        kwargs = kwargs or {}
        if function is SDPA and self.running:
            given = {**dict(zip(SDPA_ARGUMENTS, args)), **kwargs}
            self.silent.discard(self.running[-1])
            names = ("query", "key", "attn_mask", "is_causal", "scale")
            self.record(self.running[-1], max_logits(**{n: given[n] for n in names if n in given}))
        return function(*args, **kwargs)

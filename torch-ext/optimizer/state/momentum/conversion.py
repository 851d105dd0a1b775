"""Conversion of loaded momentum: means into sums, and fp32 or bf16 into 8 bits and back.

8-bit momentum becomes fp32 where it was saved, before tensors are redistributed: its blocks are
whole there. fp32 momentum becomes 8-bit in the placements of the parameter, rounded to the nearest.
Conversion sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...kernels.quantized.blocks import (
    BLOCK,
    LARGEST,
    block_count,
    dequantize,
    is_quantized,
    matrices_of,
    of_matrices,
    quantize,
)
from ...params.dtensor import as_dtensor, is_dtensor, local_of
from ...params.units import Split
from ...rules.muon import SUM_KEY, is_sum
from ...rules.rule import SCALE_KEY, momentum_key

MEAN_KEY = "momentum_buffer"


def as_tensor(value: object, what: str = "a state") -> torch.Tensor:
    """Return a tensor unchanged, or a number (step counts in old files) as a tensor on the CPU.

    Raises ValueError, beginning with `what`, for anything else. Dtype and device are explicit: the
    default dtype may not hold the number, and the default device may have no memory.
    """
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.as_tensor(
            value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu"
        )
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(
            f"{what} is of type {type(value).__name__} in the state, but must be a "
            "tensor or a number: it was saved by another optimizer, or is "
            "damaged"
        ) from error


def converted(
    state: object, group: Mapping, saved: Mapping, name: str, split: Split, dtype: torch.dtype
) -> object:
    """Return the saved state of parameter `name` with the momentum of `group`, the optimizer's own
    with the rule of the `saved` one. `dtype`: the option `state_dtype`.

    8-bit momentum stays only if the optimizer has it too, in the same form. Raises ValueError for
    numbers and scales that do not fit together, and for numbers without scales.
    """
    if not isinstance(state, dict) or not group["use_muon"]:
        return state
    wanted = momentum_key(group)
    if SCALE_KEY not in state:
        refuse_cast_numbers(state, wanted, name)
        return in_momentum_form(state, group, saved)
    key = SUM_KEY if SUM_KEY in state else MEAN_KEY
    found = getattr(state.get(key), "dtype", None)
    if is_quantized(dtype) and is_quantized(found) and key == wanted:
        return state
    return in_momentum_form(_widened(state, key, name, split), group, saved)


def in_momentum_form(state: dict, group: Mapping, saved: Mapping) -> dict:
    """Return the saved state of a parameter with a sum in place of a mean as momentum, if `group`
    has a sum: the checkpoint is from before it had one. Exact if momentum was constant since the
    first step.
    """
    if not (is_sum(group) and MEAN_KEY in state):
        return state
    mean = as_tensor(state[MEAN_KEY], MEAN_KEY)
    if SUM_KEY in state or not mean.dtype.is_floating_point:
        return state
    wide = mean.to(torch.promote_types(mean.dtype, torch.float32))
    rest = {key: value for key, value in state.items() if key != MEAN_KEY}
    momentum = float(saved.get("momentum", group["momentum"]))
    return {**rest, SUM_KEY: wide / (1.0 - momentum)}


def _widened(state: dict, key: str, name: str, split: Split) -> dict:
    """Return the state of a parameter with 8-bit momentum `key` in fp32, and without scales."""
    if key not in state:
        return state  # refused by `check_state`
    rest = {other: value for other, value in state.items() if other not in (key, SCALE_KEY)}
    momentum, scales = (as_tensor(state[k], f"{k} of parameter {name}") for k in (key, SCALE_KEY))
    values, of_blocks = (matrices_of(local_of(t), split.view) for t in (momentum, scales))
    needed = (*values.shape[:-1], block_count(values.shape[-1]))
    if not is_quantized(values.dtype) or of_blocks.shape != needed:
        raise ValueError(
            f"the state of parameter {name} has {SCALE_KEY} of shape {tuple(of_blocks.shape)}, but "
            f"{key} of {values.dtype} and shape {tuple(values.shape)}, which needs {needed} beside "
            f"torch.int8: scales belong to blocks of {BLOCK} columns. It was saved with another "
            "split or version, or is damaged"
        )
    wide = dequantize(values, of_blocks.float())
    return {**rest, key: _like(momentum, of_matrices(wide, local_of(momentum).shape, split.view))}


def in_8_bits(
    momentum: torch.Tensor, shape: tuple[int, ...], split: Split
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (numbers, scales) of a floating-point momentum placed like its parameter, or kept by
    rows. `shape`: of all scales.
    """
    local = local_of(momentum)
    values, scales = quantize(matrices_of(local.float(), split.view))
    # The strides of the momentum are those of its parameter
    numbers = torch.empty_like(local, dtype=values.dtype)
    numbers.copy_(of_matrices(values, local.shape, split.view))
    of_rank = split.block_shape(local.shape, BLOCK)
    scales = of_matrices(scales, of_rank, split.view)
    if not is_dtensor(momentum):
        return numbers, scales
    mesh, placements = momentum.device_mesh, momentum.placements
    return _like(momentum, numbers), as_dtensor(scales, shape, mesh, placements)


def _like(momentum: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return `local` as a DTensor like `momentum`, or unchanged if that is a plain tensor."""
    if not is_dtensor(momentum):
        return local
    return as_dtensor(local, momentum.shape, momentum.device_mesh, momentum.placements)


def refuse_cast_numbers(state: dict, key: str, name: str) -> None:
    """Raise ValueError for momentum `key` with the numbers of an 8-bit one and without its scales:
    torch.distributed.checkpoint casts tensors to the dtype of those it loads into. Waits for the
    device.
    """
    local = local_of(state[key]) if isinstance(state.get(key), torch.Tensor) else None
    if local is None or not local.numel() or not local.dtype.is_floating_point:
        return
    if local.is_meta or isinstance(local, FakeTensor):
        return
    # The largest magnitude, without a copy
    largest = torch.linalg.vector_norm(local, torch.inf)
    if largest == LARGEST and torch.equal(local, local.round()):
        raise ValueError(
            f"{key} of parameter {name} holds whole numbers up to {LARGEST}: the checkpoint has it "
            "in 8 bits, and torch.distributed.checkpoint has cast the numbers, without scales. "
            "Load the checkpoint into an optimizer with state_dtype=torch.int8, and pass that "
            "one's state_dict() to load_state_dict() here"
        )

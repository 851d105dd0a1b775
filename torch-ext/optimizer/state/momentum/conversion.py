"""Conversion of loaded momentum: means into sums, and fp32 or bf16 into 8 bits and back.

8-bit momentum becomes fp32 in its saved placements, in which its blocks are whole, before tensors
are redistributed. fp32 momentum becomes 8-bit in the placements of the parameter, rounded to the
nearest. Conversion sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...kernels.quantized.blocks import (
    BLOCK,
    LARGEST,
    are_together,
    block_count,
    dequantize,
    is_quantized,
    matrices_of,
    of_matrices,
    quantize,
)
from ...params.dtensor import as_shard_like, is_dtensor, local_of, with_local
from ...params.units import Split
from ...rules.muon import SUM_KEY, is_sum
from ...rules.rule import SCALE_KEY, momentum_key
from .device_values import DeviceValues

MEAN_KEY = "momentum_buffer"
# Ends of messages
MIXED = (
    "torch's set_optimizer_state_dict mixes the formats if state was saved with another "
    "state_dtype, torch.int8 on one side: load into an optimizer with the saved state_dtype, then "
    "pass that optimizer's state_dict() to load_state_dict() here"
)
OTHER_SPLIT = (
    "If the split has changed, load into an optimizer with the saved split and "
    "state_dtype=torch.float32, then pass that optimizer's state_dict() to load_state_dict() here"
)


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


def with_own_momentum(
    state: object,
    group: Mapping,
    saved: Mapping,
    name: str,
    split: Split,
    dtype: torch.dtype,
    numbers: DeviceValues,
) -> object:
    """Return the saved state of parameter `name` with the momentum of `group`, the optimizer's own
    with the rule of the `saved` one. `dtype`: the option `state_dtype`.

    8-bit momentum stays only if the optimizer has it too, in the same form. Raises ValueError for
    numbers and scales that do not fit together, and for numbers without scales; what depends on
    values on a device is raised when `numbers` are read.
    """
    if not isinstance(state, dict) or not group["use_muon"]:
        return state
    wanted = momentum_key(group)
    if SCALE_KEY not in state:
        refuse_cast_numbers(state, wanted, name, numbers)
        return in_momentum_form(state, group, saved)
    key = SUM_KEY if SUM_KEY in state else MEAN_KEY
    if key not in state:
        return state  # refused by `check_saved_state`
    momentum, scales = (as_tensor(state[k], f"{k} of parameter {name}") for k in (key, SCALE_KEY))
    stays = is_quantized(dtype) and is_quantized(momentum.dtype) and key == wanted
    _check_blocks(momentum, scales, key, name, split, stays, numbers)
    if stays:
        return state
    wide = _widened(momentum, scales, split)
    rest = {other: value for other, value in state.items() if other not in (key, SCALE_KEY)}
    return in_momentum_form({**rest, key: wide}, group, saved)


def way_out(key: str, dtype: torch.dtype | None) -> str:
    """Return the end of a message about state `key` of a wrong shape or dtype; "" for most."""
    if key == SCALE_KEY:
        return f". {OTHER_SPLIT}"
    if key == "second_moment":
        return " (without second_moment it loads, and the mean squares begin anew)"
    return f". {MIXED}" if is_quantized(dtype) else ""


def in_momentum_form(state: dict, group: Mapping, saved: Mapping) -> dict:
    """Return the saved state of a parameter. If the momentum of `group` is a sum, a saved mean is
    turned into a sum: the checkpoint is from before momentum_form="sum". Exact if `momentum` was
    constant since the first step.
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


def _check_blocks(
    momentum: torch.Tensor,
    scales: torch.Tensor,
    key: str,
    name: str,
    split: Split,
    shapes_later: bool,
    numbers: DeviceValues,
) -> None:
    """Raise ValueError unless `momentum`, the state `key`, is in 8 bits and belongs to `scales`.
    `shapes_later`: leave wrong shapes to `check_saved_state`. `numbers`: read later, then the
    values are compared.
    """
    values, of_blocks = (matrices_of(local_of(t), split.view) for t in (momentum, scales))
    is_8bit = is_quantized(values.dtype)
    if not is_8bit or of_blocks.shape != (*values.shape[:-1], block_count(values.shape[-1])):
        if is_8bit and shapes_later and is_dtensor(momentum) == is_dtensor(scales):
            return
        needed = split.block_shape(momentum.shape, BLOCK)
        raise ValueError(
            f"the state of parameter {name} has {SCALE_KEY} of shape {tuple(scales.shape)}, but "
            f"{key} of {momentum.dtype} and shape {tuple(momentum.shape)}, which needs {needed} "
            f"beside torch.int8: scales belong to blocks of {BLOCK} columns. {MIXED}. {OTHER_SPLIT}"
        )
    if values.is_meta or isinstance(values, FakeTensor) or not values.numel():
        return

    def judge(are_of_scales: float) -> None:
        if not are_of_scales:
            raise ValueError(
                f"the numbers in {key} of parameter {name} are not those that belong to "
                f"{SCALE_KEY}: numbers or scales were loaded alone. {MIXED}"
            )

    # Offloaded numbers are on the host, their scales are not
    numbers.read_later(are_together(values, of_blocks.to(values.device)), judge)


def _widened(momentum: torch.Tensor, scales: torch.Tensor, split: Split) -> torch.Tensor:
    """Return 8-bit momentum in fp32."""
    values, of_blocks = (matrices_of(local_of(t), split.view) for t in (momentum, scales))
    wide = dequantize(values, of_blocks.to(values.device, torch.float32))
    return _like(momentum, of_matrices(wide, local_of(momentum).shape, split.view))


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
    return _like(momentum, numbers), as_shard_like(scales, momentum, shape)


def _like(momentum: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return `local` as a DTensor like `momentum`; unchanged if `momentum` is a plain tensor."""
    if is_dtensor(momentum) and local.device.type != momentum.device_mesh.device_type:
        return with_local(momentum, local)  # stays on the host
    return as_shard_like(local, momentum, momentum.shape)


def refuse_cast_numbers(state: dict, key: str, name: str, numbers: DeviceValues) -> None:
    """Raise ValueError, when `numbers` are read, for floating-point momentum `key` that holds 8-bit
    numbers without scales: torch.distributed.checkpoint casts saved tensors to the dtype of the
    optimizer's tensors.
    """
    local = local_of(state[key]) if isinstance(state.get(key), torch.Tensor) else None
    if local is None or not local.numel() or not local.dtype.is_floating_point:
        return
    if local.is_meta or isinstance(local, FakeTensor):
        return

    def judge(largest: float) -> None:
        if largest == LARGEST and torch.equal(local, local.round()):
            raise ValueError(
                f"{key} of parameter {name} holds whole numbers up to {LARGEST}: the checkpoint "
                "has it in 8 bits, and torch.distributed.checkpoint has cast the numbers, without "
                "scales. Load the checkpoint into an optimizer with state_dtype=torch.int8, and "
                "pass that one's state_dict() to load_state_dict() here"
            )

    # The largest magnitude, without a copy
    numbers.read_later(torch.linalg.vector_norm(local, torch.inf), judge)

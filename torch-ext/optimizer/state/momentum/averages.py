"""AdamW's averages and step count in saved state: fp32 or bf16 into 8 bits and back, and checks.

Like momentum (conversion.py), 8-bit averages become fp32 in their saved placements, before tensors
are redistributed, and wide averages (fp32 or bf16) become 8-bit in the placements of the parameter.
Numbers and scales have keys of their own, so that no average is loaded in place of one of another
format. A state with averages in both formats is refused: torch's `set_optimizer_state_dict` with
full tensors adds the saved averages to the optimizer's own, and with `broadcast_from_rank0` on a
single rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...kernels.quantized import blocks, squares
from ...kernels.quantized.blocks import is_quantized
from ...params.dtensor import as_shard_like, local_of
from ...rules.elementwise import is_8bit
from ...rules.muon import SUM_KEY
from ...rules.rule import (
    QUANTIZED_KEYS,
    STATES,
    WIDE_KEYS,
    keys_of,
    state_device_and_dtype,
    state_shape,
)
from .conversion import as_tensor
from .device_values import DeviceValues

# (key of the average, of its numbers, of its scales, format)
FORMATS = tuple(zip(WIDE_KEYS, QUANTIZED_KEYS[:2], QUANTIZED_KEYS[2:], (blocks, squares)))
# End of messages
BEGIN_ANEW = "load another checkpoint, or remove the parameter's state to begin anew"


def wide_if_needed(state: object, group: Mapping, param: torch.Tensor, name: str) -> object:
    """Return the saved state of parameter `name` with wide averages in place of averages in 8 bits
    that the optimizer keeps wide. Raises ValueError for averages in both formats, for incomplete
    ones, and for numbers and scales of wrong shapes or dtypes.
    """
    if not isinstance(state, dict) or group["use_muon"]:
        return state
    held = [key for key in QUANTIZED_KEYS if key in state]
    if held and any(key in state for key in WIDE_KEYS):
        raise ValueError(
            f"the state of parameter {name} has averages in 8 bits and wide ones: torch's "
            "set_optimizer_state_dict mixes the formats if the group was saved with another "
            "state_dtype. Load into an optimizer with the saved state_dtype, then pass that "
            "optimizer's state_dict() to load_state_dict() here"
        )
    if is_8bit(group, param) or not held:
        return state
    if missing := [key for key in QUANTIZED_KEYS if key not in state]:
        raise ValueError(
            f"the state of parameter {name} has {held[0]}, but not {missing[0]}: a part of it was "
            f"lost; {BEGIN_ANEW}"
        )
    for key in QUANTIZED_KEYS:
        value = as_tensor(state[key], f"{key} of parameter {name}")
        shape = state_shape(param, key)
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{key} of parameter {name} has shape {tuple(value.shape)} in the state, but a "
                f"parameter of shape {tuple(param.shape)} needs {shape}: it was saved for another "
                f"parameter; {BEGIN_ANEW}"
            )
        check_dtype(key, value.dtype, name)
    return widened(state)


def widened(state: Mapping) -> dict:
    """Return a state with averages in fp32 in place of complete averages in 8 bits."""
    found = {key: value for key, value in state.items() if key not in QUANTIZED_KEYS}
    for wide_key, numbers_key, scales_key, form in FORMATS:
        numbers, scales = state[numbers_key], state[scales_key]
        wide = form.dequantize(local_of(numbers), local_of(scales).float())
        found[wide_key] = as_shard_like(wide, numbers, numbers.shape)
    return found


def narrowed(state: Mapping, param: torch.Tensor) -> dict:
    """Return a state with averages in 8 bits in place of its wide averages, placed like these or
    kept by rows.
    """
    found = {key: value for key, value in state.items() if key not in WIDE_KEYS}
    for wide_key, numbers_key, scales_key, form in FORMATS:
        wide = state[wide_key]
        numbers, scales = form.quantize(local_of(wide).float())
        found[numbers_key] = as_shard_like(numbers.contiguous(), wide, wide.shape)
        shape = state_shape(param, scales_key)
        found[scales_key] = as_shard_like(scales.contiguous(), wide, shape)
    return found


def loaded_keys(
    group: Mapping, param: torch.Tensor, dtype: torch.dtype, state: object
) -> tuple[str, ...]:
    """Return `keys_of`, but with the keys of wide averages in place of the 8-bit keys if the saved
    `state` has wide averages: `narrowed` converts these after they are placed like the parameter.
    """
    keys = keys_of(group, param, dtype)
    if not (isinstance(state, dict) and is_8bit(group, param)):
        return keys
    if any(key in state for key in QUANTIZED_KEYS) or not set(WIDE_KEYS) <= set(state):
        return keys
    return (*(key for key in keys if key not in QUANTIZED_KEYS), *WIDE_KEYS)


def adopt_averages(
    state: dict, keys: tuple[str, ...], param: torch.Tensor, dtype: torch.dtype
) -> None:
    """Convert the averages of a live state to the form of `keys` and to `dtype`, in place, after a
    change of `state_dtype` in the group, and drop averages of the other form. `dtype`: the
    result of `group_state_dtype`.
    """
    for wanted, others in ((QUANTIZED_KEYS, WIDE_KEYS), (WIDE_KEYS, QUANTIZED_KEYS)):
        if not set(wanted) <= set(keys):
            continue
        is_missing = any(key not in state for key in wanted)
        if is_missing and all(key in state for key in others):
            converted = narrowed(state, param) if wanted == QUANTIZED_KEYS else widened(state)
            state.update({key: converted[key] for key in wanted})
        for key in others:
            state.pop(key, None)
    for key in [key for key in (*WIDE_KEYS, "momentum_buffer", SUM_KEY) if key in keys]:
        wide = state_device_and_dtype(key, param, dtype)[1]
        found = getattr(state.get(key), "dtype", wide)
        # 8 bits are refused by `check_bits`
        if found != wide and not (is_quantized(found) or is_quantized(wide)):
            state[key] = state[key].to(wide)


def check_dtype(key: str, dtype: torch.dtype, name: str) -> None:
    """Raise ValueError unless saved numbers `key` have their dtype, or scales a floating-point
    one.
    """
    is_scale = key not in QUANTIZED_KEYS[:2]
    if not (dtype.is_floating_point if is_scale else dtype == STATES[key].dtype):
        raise ValueError(
            f"{key} of parameter {name} has dtype {dtype} in the state, but it needs "
            f"{STATES[key].dtype}: it was cast, or is damaged; {BEGIN_ANEW}"
        )


def check_step_count(step: torch.Tensor, name: str, numbers: DeviceValues) -> None:
    """Raise ValueError, when `numbers` are read, unless AdamW's step count is a whole number
    >= 0.
    """
    step = local_of(step)
    # Without values, as of a model on the meta device
    if step.is_meta or isinstance(step, FakeTensor):
        return

    def judge(number: float) -> None:
        count = float(number)
        if not (0 <= count < math.inf and count.is_integer()):
            raise ValueError(
                f"step of parameter {name} is {count} in the state, but AdamW's count of "
                f"steps must be a whole number >= 0: the state is damaged; {BEGIN_ANEW}"
            )

    numbers.read_later(step, judge)

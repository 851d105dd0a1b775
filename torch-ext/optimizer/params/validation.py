"""Checks of parameter groups, options and parameters, before a step changes anything.

Raises ValueError (a value is wrong), NotImplementedError (a parameter is of an unsupported kind) or
RuntimeError (a step found a wrong gradient or tensor). Each message names the parameter or the key,
the value received, the allowed values, and a remedy. Nothing is communicated: each rank checks the
groups of the rank alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..kernels.quantized.blocks import BLOCK, is_quantized
from ..newton_schulz.coefficients import FP32_MAX
from ..newton_schulz.method import MATRIX_DTYPES
from ..rules.elementwise import DTYPE_KEY, elementwise_of, is_8bit
from ..rules.muon import MASTER_KEY, is_split, is_stochastic
from ..rules.rule import number_of, rule_of
from .checks.group_keys import check_keys
from .checks.group_values import (
    BELOW_ONE,
    FINITE,
    check_betas,
    check_flags,
    check_scale_function,
    check_values,
    require,
)
from .checks.rule_options import check_rule_with_options
from .dtensor import is_dtensor, local_of, properties_of
from .errors import in_group, name_in, name_of, names_in, shortened
from .layout import (
    check_local_shape,
    check_placements,
    check_state_sharding,
    check_unit_sharding,
    layout_of,
)
from .own_process_groups import refuse_late_key
from .units import WHOLE, Split, check_splits, splits_of

if TYPE_CHECKING:
    import torch.distributed as dist

    from .config import MuonConfig


class Members:
    """Facts about the existing groups, for the checks of a new group.

    Kept up to date while the constructor adds groups: looking at all earlier groups for each new
    group would cost quadratic time.
    """

    def __init__(self, groups: Iterable[dict] = ()) -> None:
        """Add all `groups`; "params" of each is a list of parameters."""
        self.ids: set[int] = set()  # of all parameters
        # (group, parameter): the first parameter that requires a gradient
        self.first: tuple[dict, torch.Tensor] | None = None
        for group in groups:
            self.add(group)

    def add(self, group: dict) -> None:
        """Add the parameters of `group`."""
        self.ids.update(map(id, group["params"]))
        if self.first is None:
            self.first = next(((group, p) for p in group["params"] if p.requires_grad), None)


def readable(params: object) -> object:
    """`params` as given to an optimizer, but a list for an iterator, which is readable only once.

    Raises TypeError for a model.
    """
    if isinstance(params, torch.nn.Module) and not isinstance(params, torch.nn.ParameterList):
        raise TypeError(
            f"params is a model, {type(params).__name__}: pass get_default_muon_param_groups(model)"
        )
    return list(params) if isinstance(params, Iterator) else params


def check_param_list(group: dict, others: list[dict], members: Members) -> None:
    """Raise ValueError for a new group without "params", or with a parameter listed twice or listed
    in an existing group.

    Torch's own checks come later and name no parameter. Replaces group["params"] by a list, and
    gives empty groups an empty "param_names" if needed (`_name_empty`). A group without parameters
    is allowed, as in torch. others: existing groups; members: facts about the existing groups.
    """
    if "params" not in group:
        keys = shortened(", ".join(map(repr, group)) or "none")
        raise ValueError(
            f"the group has no key 'params' (keys: {keys}): put the group's parameters, or pairs "
            "(name, parameter), under 'params'"
        )
    # A single parameter is unique; a set is refused by torch, for its random order
    if isinstance(group["params"], (torch.Tensor, set)):
        return
    # A generator can be read only once: torch gets the list
    group["params"] = entries = list(group["params"])
    _name_empty(group, others)
    count = len(group.get("param_names") or entries)
    # More names than parameters are allowed: see errors.given_names
    if count < len(entries):
        raise ValueError(
            f"param_names holds {count} names for {len(entries)} parameters: pass one name for "
            "each parameter"
        )
    seen = set()
    for number, entry in enumerate(entries):
        if isinstance(entry, tuple) and len(entry) != 2:
            raise ValueError(
                f"entry {number} of params is a tuple of {len(entry)} elements: pass parameters, "
                "or pairs (name, parameter)"
            )
        name, param = entry if isinstance(entry, tuple) else (name_of(group, number), entry)
        name = shortened(name)
        if id(param) in seen:
            raise ValueError(
                f"parameter {name} is twice in the group and would be stepped twice: list it once"
            )
        if id(param) in members.ids:
            raise ValueError(
                f"parameter {name} is in more than one parameter group and would be stepped "
                "twice: leave it in one group only"
            )
        seen.add(id(param))


def _name_empty(group: dict, others: list[dict]) -> None:
    """Give groups without parameters an empty "param_names" if the remaining groups are named.

    Torch refuses a mixture of groups with and without names. Written in place: the new `group` if
    existing groups are named; the empty existing groups if `group` is the first with names. others:
    the existing groups.
    """
    entries = group["params"]
    named = "param_names" in group or bool(entries) and isinstance(entries[0], tuple)
    # Torch has made sure that either all groups have names or none
    others_named = any("param_names" in other for other in others[:1])
    if others_named and not entries:
        group.setdefault("param_names", [])
    for other in others if named and not others_named else ():
        if not other["params"]:
            other["param_names"] = []


def check_group(
    group: dict, extra_keys: Collection[str] = (), arguments: Mapping[str, object] | None = None
) -> None:
    """Raise ValueError or NotImplementedError for wrong keys, values or parameters of a group.

    extra_keys: keys besides GROUP_KEYS, of a subclass. arguments: {name: value} of the optimizer's
    arguments that no group can change. Parameters with requires_grad=False are accepted unchecked,
    except lazy parameters.
    """
    check_keys(group, extra_keys, arguments or {})
    check_numbers(group)
    for i, param in enumerate(group["params"]):
        if param.requires_grad or isinstance(param, UninitializedTensorMixin):
            check_param(param, name_of(group, i), group)


def device_of(groups: Iterable[dict]) -> torch.device:
    """The device of the first parameter with requires_grad=True; else of the first parameter; the
    CPU without parameters.
    """
    first = None
    for group in groups:
        for param in group["params"]:
            if param.requires_grad:
                return param.device
            first = param if first is None else first
    return torch.device("cpu") if first is None else first.device


def check_across_params(
    groups: list[dict], options: Sequence[MuonConfig], first: tuple[dict, torch.Tensor] | None
) -> None:
    """Raise ValueError if parameters are on several devices, or if DTensors come with options for
    plain parameters. Parameters with requires_grad=False are ignored.

    options: of each group. first: `Members.first` of all groups of the optimizer; all parameters
    must be on its device.
    """
    for group, own in zip(groups, options):
        for i, param in enumerate(group["params"]):
            if param.requires_grad:
                _check_with_first(param, group, i, own, first)


def _check_with_first(
    param: torch.Tensor,
    group: dict,
    number: int,
    options: MuonConfig,
    first: tuple[dict, torch.Tensor],
) -> None:
    """Raise as `check_across_params`, for `param`, parameter `number` of `group`."""
    name = name_of(group, number)
    if is_dtensor(param) and options.shard_state:
        raise ValueError(
            f"shard_state=True, but parameter {name} is a DTensor, whose state is always sharded "
            "like the parameter: leave the option out, or use plain parameters"
        )
    if is_dtensor(param) and not options.grads_are_reduced:
        raise ValueError(
            f"grads_are_reduced=False, but parameter {name} is a DTensor, whose gradients are "
            "reduced by FSDP2 or tensor parallelism: leave the option out, or use plain parameters"
        )
    if param.device != first[1].device:
        raise ValueError(
            f"parameter {name} is on {param.device}, but {name_in(*first)} is on "
            f"{first[1].device}; an optimizer steps parameters of one device only: move the "
            "model to one device, or build an optimizer for each device"
        )


def check_numbers(group: dict) -> None:
    """Raise ValueError for a wrong value of an option of a group.

    Options of Muon are checked in AdamW groups, too, and vice versa: use_muon may change later.
    """
    check_flags(group)
    for key in ("lr", "weight_decay"):
        require(0 <= number_of(group[key]) <= FP32_MAX, key, group[key], FINITE)
    for key in ("momentum", "beta2"):
        require(0 <= number_of(group.get(key, 0)) < 1, key, group.get(key), BELOW_ONE)
    check_values(group)


def check_with_options(group: dict, options: MuonConfig, strides: bool = True) -> None:
    """Raise ValueError, TypeError or NotImplementedError, mostly naming the parameter, for values
    of a group that its parameters or `options` exclude: `split` and `transposed`, `decay`,
    `master_weights`, the rule and its state, 8-bit state, and a function `adjust_lr_fn` with a
    wrong factor for a matrix. `options`: of the group. `strides`: as in `check_splits`.
    """
    check_splits(group, names_in(group), strides)
    if group.get("decay") == "initial" and options.owner_keeps_state:
        raise NotImplementedError(
            "decay='initial' keeps the initial weights where the weights are stored, but with "
            "shard_state=True or grads_are_reduced=False only owners keep state: leave these "
            "options out, or use another decay"
        )
    if options.offload_state and any(is_split(group, param) for param in group["params"]):
        raise NotImplementedError(
            f"{MASTER_KEY}={group[MASTER_KEY]!r} keeps the rest of a weight on the device, but "
            "with offload_state all state per element lies in host memory: leave one of them out"
        )
    if not group["use_muon"]:
        return check_averages(group, options)
    rule = rule_of(group)
    is_8bit = is_quantized(options.state_dtype)
    check_rule_with_options(group, options.capturable, is_8bit, options.state_at_owners)
    state, selects, checked = rule.state, rule.selection(group) is not None, set()
    for number, (param, split) in enumerate(zip(group["params"], splits_of(group))):
        if param.requires_grad and param.ndim > 1:
            name = name_of(group, number)
            check_unit_sharding(param, name, split)
            for per in {s.per for s in state}:
                check_state_sharding(param, name, per, split, options.owner_keeps_state, selects)
            # Looks at every rank: once for parameters that are alike
            likeness = param.shape, split, properties_of(param)[3]
            if is_8bit and likeness not in checked:
                check_blocks(param, name, split, options.process_group, BLOCK)
                checked.add(likeness)
            if callable(group["adjust_lr_fn"]):
                check_scale_function(group["adjust_lr_fn"], split.shapes(param.shape), name)


def check_averages(group: dict, options: MuonConfig) -> None:
    """Raise ValueError for a wrong `state_dtype` of a group with use_muon=False, and
    NotImplementedError, naming the parameter, for averages that cannot be in 8 bits.
    """
    dtype = group.get(DTYPE_KEY)
    allowed = (None, torch.float32, torch.bfloat16, torch.int8)
    require(any(dtype is one for one in allowed), DTYPE_KEY, dtype, f"one of {allowed}")
    if not is_quantized(dtype):
        return
    rule = elementwise_of(group)
    if not rule.quantized:
        raise ValueError(
            f"state_dtype=torch.int8 with rule={rule.name!r}: only AdamW keeps its averages in 8 "
            "bits. Use state_dtype=torch.bfloat16, or leave the key out"
        )
    checked = set()
    for number, param in enumerate(group["params"]):
        likeness = param.shape, properties_of(param)[3]
        if param.requires_grad and is_8bit(group, param) and likeness not in checked:
            checked.add(likeness)  # looks at every rank
            name = name_of(group, number)
            if options.offload_state:
                raise NotImplementedError(
                    f"parameter {name}: state_dtype=torch.int8 in a group with use_muon=False "
                    "keeps averages on the device, but with offload_state all state per element "
                    "lies in host memory: leave one of them out"
                )
            check_blocks(param, name, WHOLE, options.process_group, BLOCK)


def check_blocks(
    param: torch.Tensor, name: str, split: Split, group: dist.ProcessGroup | None, length: int
) -> None:
    """Raise NotImplementedError, naming the parameter, if a unit or a shard of `param` begins or
    ends within a block of `length` columns as stored, or if scales of blocks with the placements of
    `param` would lie on other ranks than the blocks. `group`: as for `layout_of`.
    """
    stored, shape = Split(view=split.view), tuple(param.shape)
    found = layout_of(param, group).as_matrices(stored)
    scales = layout_of(param, group, stored.block_shape(shape, length)).as_matrices(stored)
    units = replace(split, transposed=False).cut(shape)
    sides = {side for block in units.columns for side in block.ranges}
    for rank in found.ranks:
        of_rank = [box[-1] for box in found.boxes_of(rank)]
        sides.update(of_rank)
        # Ranks without rows keep no scales
        expected = [(a // length, -(-b // length)) for a, b in of_rank]
        if expected != [box[-1] for box in scales.boxes_of(rank)]:
            sides.add((1, 1))  # refused below
    wrong = [a for side in sides for a in side if a % length and a != stored.shape(shape)[-1]]
    if wrong:
        raise NotImplementedError(
            f"parameter {name} of shape {shape}: state_dtype=torch.int8 keeps a scale for each "
            f"{length} columns, but a shard or a block of `split` begins within them. Shard rows, "
            f"or columns at multiples of {length}, or use state_dtype=torch.bfloat16"
        )


def check_changed_groups(groups: Sequence[dict], options: Sequence[MuonConfig]) -> None:
    """Check groups again before a step, after a change of groups or parameters since the last step.

    options: of each group. Raises as `check_values`, `check_with_options`, `check_across_params`;
    RuntimeError for fake tensors (an optimizer can be built for fake tensors, but a step needs
    memory) and for a plain gradient of a DTensor. lr and the like: `check_scheduled_values`.
    """
    for number, (group, own) in enumerate(zip(groups, options)):
        with in_group(number, group):
            refuse_late_key(group)
            check_values(group)
            # Strides may differ between ranks: `check_plans` has all ranks raise together
            check_with_options(group, own, strides=False)
        for param in group["params"]:
            if getattr(param, "_fsdp_flattened", False):
                refuse_fsdp1(name_in(group, param))
            if isinstance(local_of(param), FakeTensor):
                raise RuntimeError(
                    f"parameter {name_in(group, param)} is a fake tensor, which has no memory "
                    "that step() could change: call step() outside FakeTensorMode only, on real "
                    "parameters"
                )
            if is_dtensor(param) and param.grad is not None and not is_dtensor(param.grad):
                raise RuntimeError(
                    f"parameter {name_in(group, param)} is a DTensor, but its gradient is a plain "
                    f"tensor of shape {tuple(param.grad.shape)}: use DTensor.from_local or "
                    "distribute_tensor"
                )
    check_across_params(groups, options, Members(groups).first)


def refuse_fsdp1(name: str) -> None:
    """Raise ValueError for a parameter of FullyShardedDataParallel."""
    raise ValueError(
        f"parameter {name} is sharded by FSDP1 (torch.distributed.fsdp.FullyShardedDataParallel), "
        "which flattens parameters, so that the rows and columns of matrices are lost: shard the "
        "model with torch.distributed.fsdp.fully_shard (FSDP2), and build the optimizer after that"
    )


def check_module(model: object) -> None:
    """Raise TypeError if `model` is no nn.Module, ValueError for parameters flattened by FSDP1."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"get_default_muon_param_groups takes one torch.nn.Module, not {type(model).__name__}"
        )
    for name, param in model.named_parameters():
        if getattr(param, "_fsdp_flattened", False):
            refuse_fsdp1(shortened(name))


def check_adamw(betas: object, eps: object) -> None:
    """Raise ValueError for wrong values of the arguments adamw_betas and adamw_eps, also without
    AdamW groups.
    """
    check_betas("adamw_betas", betas)
    require(0 <= number_of(eps) <= FP32_MAX, "adamw_eps", eps, FINITE)


def check_param(param: torch.Tensor, name: str, group: dict) -> None:
    """Raise ValueError or NotImplementedError for a parameter with a type, layout, dtype, shape or
    sharding unsupported by the algorithm of `group`.
    """
    use_muon = group["use_muon"]
    if isinstance(param, UninitializedTensorMixin):
        raise ValueError(
            f"parameter {name} is lazy and has no shape yet: run the model once, then build the "
            "optimizer"
        )
    # FSDP1 marks flat parameters and, with use_orig_params=True, the original parameters
    if getattr(param, "_fsdp_flattened", False):
        refuse_fsdp1(name)
    what = f"parameter {name} of shape {tuple(param.shape)}"
    if param.is_sparse or param.layout != torch.strided:
        raise ValueError(
            f"{what} is sparse ({param.layout}); only dense parameters are allowed: call "
            "to_dense() on it"
        )
    if is_traceable_wrapper_subclass(local_of(param)):
        raise NotImplementedError(
            f"{what} is a {type(local_of(param)).__name__}, which keeps its elements in other "
            "tensors, but kernels need plain memory: keep the weights in high precision"
        )
    if param.dtype not in (*MATRIX_DTYPES, torch.float64):
        raise ValueError(
            f"{what} has dtype {param.dtype}; allowed are real floating-point parameters in "
            "float32, bfloat16, float16 and, for AdamW, float64: convert it, or use "
            "torch.view_as_real if it is complex"
        )
    if use_muon and param.dtype not in MATRIX_DTYPES:
        raise ValueError(
            f"{what} has dtype {param.dtype}; Muon steps float32, bfloat16 and float16 only: "
            "convert it, or put it into a group with use_muon=False"
        )
    if use_muon and is_stochastic(group) and param.dtype != torch.bfloat16:
        raise ValueError(
            f"{what} has dtype {param.dtype}, but rounding='stochastic' is for bf16 weights only: "
            "fp32 weights keep small updates, and fp16 has other bits. Leave rounding out, or put "
            "the parameter into a group with rounding='nearest'"
        )
    if group.get(MASTER_KEY) is not None and param.dtype == torch.float16:
        raise ValueError(
            f"{what} has dtype {param.dtype}, but {MASTER_KEY}={group[MASTER_KEY]!r} is for bf16 "
            "weights, which are the upper half of an fp32 number: convert it to bfloat16, or put "
            f"it into a group with {MASTER_KEY}=None"
        )
    if use_muon and param.ndim < 2:
        raise ValueError(
            f"{what} is {param.ndim}-D; Muon takes matrices (R, C) and stacks of them (..., R, C): "
            "put it into a group with use_muon=False, or use get_default_muon_param_groups(model); "
            "a framework that gives all parameters to a class of optimizers takes MuonFactory"
        )
    # Loaded from a file, or kept after destroy_process_group
    if is_dtensor(param) and not torch.distributed.is_initialized():
        raise ValueError(
            f"{what} is a DTensor, but torch.distributed is not initialized, so its mesh has no "
            "process groups: call init_process_group before the model is sharded, and keep it "
            "until training ends"
        )
    check_placements(param, name, use_muon)
    check_local_shape(param, name)

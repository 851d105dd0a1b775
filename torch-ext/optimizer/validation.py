"""Checks of parameter groups, their options and their parameters, before anything is stepped.

Raises ValueError or NotImplementedError that names the parameter or the option, the value that came and the values that
are allowed. Knows neither ranks nor models.
"""
from __future__ import annotations

import math

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .layout import check_local_shape, check_placements, is_dtensor, local_of
from .names import in_group, name_in, name_of, names_in
from .polar import WIDE
from .recipe import SCALES
from .steps import LARGEST, steps_of

GROUP_KEYS = frozenset(("params", "param_names", "use_muon", "lr", "weight_decay", "momentum", "nesterov",
                        "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "betas"))
SCHEDULED = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")  # of schedulers
FINITE = "a finite number >= 0 that fp32 holds"
TOLERATED = frozenset(("fused", "foreach", "differentiable", *SCHEDULED))  # torch's, torchtitan's; without effect


def check_unique(group, others) -> None:
    """Raise ValueError for a new group that holds no parameters, one twice, or one of another group; torch names none.
    """
    if "params" not in group:
        raise ValueError(f"there is no key 'params', but {', '.join(map(repr, group)) or 'nothing'}: it is to hold the "
                         "group's parameters, or pairs (name, parameter)")
    if isinstance(group["params"], (torch.Tensor, set)):  # one parameter; what torch refuses
        return
    group["params"] = entries = list(group["params"])  # it may be a generator; torch makes it a list too
    if not entries:
        raise ValueError("it has no parameters; leave the group out")
    names = group.get("param_names") or [f"#{i}" for i in range(len(entries))]
    if len(names) != len(entries):
        raise ValueError(f"param_names holds {len(names)} names for {len(entries)} parameters: pass one for each")
    seen, elsewhere = set(), {id(p) for other in others for p in other["params"]}
    for name, entry in zip(names, entries):
        if isinstance(entry, tuple) and len(entry) != 2:
            raise ValueError(f"an entry of params is a tuple of {len(entry)}: pass parameters, or pairs (name, "
                             "parameter)")
        name, param = entry if isinstance(entry, tuple) else (name, entry)
        if id(param) in seen:
            raise ValueError(f"parameter {name} is twice in a group; it would be stepped twice: leave one out")
        if id(param) in elsewhere:
            raise ValueError(f"parameter {name} is in more than one parameter group: leave it in one")
        seen.add(id(param))


def check_group(group, extra_keys=()) -> None:
    """Raise ValueError or NotImplementedError for a parameter group that could not be stepped; say which, why, what
    to do.
    """
    unknown = sorted(set(group) - GROUP_KEYS - TOLERATED - set(extra_keys))
    if unknown:
        allowed = ", ".join(sorted(GROUP_KEYS | set(extra_keys)))
        raise ValueError(f"unknown key {unknown[0]!r}; allowed are {allowed}: remove or rename it")
    if group.get("differentiable"):
        raise ValueError("differentiable=True is not allowed: a step is not recorded by autograd; remove it")
    check_numbers(group)
    for i, param in enumerate(group["params"]):
        check_param(param, name_of(group, i), group["use_muon"])


def device_of(groups) -> torch.device:
    """Where the parameters are; the CPU if somebody took all of them out of their groups."""
    return next((local_of(p).device for group in groups for p in group["params"]), torch.device("cpu"))


def check_together(groups, options) -> None:
    """Raise ValueError for what concerns more than one parameter: devices, and who reduces the gradients."""
    everything = [entry for group in groups for entry in names_in(group).items()]
    for param, name in everything:
        if is_dtensor(param) and options.shard_state:
            raise ValueError(f"shard_state=True, but parameter {name} is a DTensor, whose state is sharded as it is: "
                             "leave the option out, or use plain parameters")
        if is_dtensor(param) and not options.grads_are_reduced:
            raise ValueError(f"grads_are_reduced=False, but parameter {name} is a DTensor, whose gradients its "
                             "parallelism reduces: leave the option out, or use plain parameters")
        if param.device != everything[0][0].device:
            raise ValueError(f"parameter {name} is on {param.device}, but {everything[0][1]} is on "
                             f"{everything[0][0].device}; an optimizer steps one device: move the model, or build one "
                             "each")


def check_numbers(group) -> None:
    """Raise ValueError for what is not allowed of a group's numbers and names."""
    for key in ("use_muon", "nesterov"):
        _require(_number(group[key]) in (0, 1), key, group[key], "True or False")
    for key in ("lr", "weight_decay"):
        _require(0 <= _number(group[key]) <= LARGEST, key, group[key], FINITE)
    for key in ("momentum", "beta2") if group["use_muon"] else ():
        _require(0 <= _number(group.get(key, 0)) < 1, key, group.get(key), "a number in [0, 1)")
    _check_values(group)


def check_again(groups) -> None:
    """Check again, before a step, what no schedule changes; lr and the like may lie on a device and are not read. Raise
    RuntimeError for a fake tensor, which an optimizer may be made for, but not step, or a DTensor's plain gradient.
    """
    for number, group in enumerate(groups):
        with in_group(number, group):
            _check_values(group)
        for param in group["params"]:
            if isinstance(local_of(param), FakeTensor):
                raise RuntimeError(f"parameter {name_in(group, param)} is a fake tensor: it has no memory in which "
                                   "step() could change it. Leave the step out of what runs under FakeTensorMode")
            if is_dtensor(param) and param.grad is not None and not is_dtensor(param.grad):
                raise RuntimeError(f"parameter {name_in(group, param)} is a DTensor, but its gradient a plain tensor "
                                   f"of shape {tuple(param.grad.shape)}: use DTensor.from_local or distribute_tensor")


def _check_values(group) -> None:
    """Raise ValueError for what no schedule changes."""
    _require(0 <= _number(group["eps"]) <= LARGEST, "eps", group["eps"], FINITE)
    if group["use_muon"]:
        scales = (None, *SCALES)
        _require(group["adjust_lr_fn"] in scales, "adjust_lr_fn", group["adjust_lr_fn"], f"one of {scales}")
        steps_of(group["ns_coefficients"], group["ns_steps"])
        return
    betas = group.get("betas")
    if betas is None:
        raise ValueError("use_muon=False, but the group has no betas: where it goes over to AdamW, set betas and eps "
                         "along with use_muon")
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2 and all(0 <= _number(b) < 1 for b in betas)
    _require(pair, "betas", betas, "two numbers in [0, 1)")


def _number(value) -> float:
    """The value of a number or of a tensor of one element; NaN for anything else, such as "1e-3" from a YAML file."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def is_adamw(group) -> bool:
    """Whether a group that may be wrong in anything asks for AdamW."""
    return _number(group.get("use_muon", True)) == 0


def _require(true, key, came, allowed) -> None:
    if not true:
        raise ValueError(f"{key}={came!r} is not allowed: it must be {allowed}")


def check_param(param, name, use_muon) -> None:
    """Raise ValueError or NotImplementedError for a parameter that could not be stepped."""
    what = f"parameter {name} of shape {tuple(param.shape)}"
    if param.is_sparse or param.layout != torch.strided:
        raise ValueError(f"{what} is sparse ({param.layout}); only dense parameters are allowed: call to_dense() on it")
    if is_traceable_wrapper_subclass(local_of(param)):
        raise NotImplementedError(f"{what} is a {type(local_of(param)).__name__}, which keeps its elements in other "
                                  "tensors; kernels take plain memory: keep the weights in high precision")
    if param.dtype not in (*WIDE, torch.float64):
        raise ValueError(f"{what} has dtype {param.dtype}; allowed are real floating-point parameters in float32, "
                         "bfloat16, float16 and, for AdamW, float64: use torch.view_as_real for complex ones")
    if use_muon and param.dtype not in WIDE:
        raise ValueError(f"{what} has dtype {param.dtype}; Muon steps float32, bfloat16 and float16, in fp32: "
                         "convert it, or put it into a group with use_muon=False")
    if use_muon and param.ndim < 2:
        raise ValueError(f"{what} is {param.ndim}-D; Muon takes matrices (R, C) and stacks of them (..., R, C): "
                         "put it into a group with use_muon=False, or use get_default_muon_param_groups(model)")
    if is_dtensor(param) and not torch.distributed.is_initialized():
        raise ValueError(f"{what} is a DTensor, but torch.distributed is not initialized, so its mesh has no process "
                         "groups: call init_process_group before the model is sharded, and keep it until training ends")
    check_placements(param, name, use_muon)
    check_local_shape(param, name)

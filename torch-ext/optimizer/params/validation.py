"""Checks of parameter groups, their options and their parameters, before anything is stepped.

Raises ValueError or NotImplementedError that names the parameter or the option, the value that came
and the values that are allowed. Knows neither ranks nor models.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..newton_schulz.coefficients import LARGEST, steps_of
from ..newton_schulz.method import WIDE
from ..rules.muon import SCALES
from ..rules.rule import number_of
from .dtensor import is_dtensor, is_mismatched, local_of, raw_locals
from .errors import in_group, name_among, name_in, name_of, shortened
from .layout import check_local_shape, check_placements, check_row_state

GROUP_KEYS = frozenset(
    (
        "params",
        "param_names",
        "use_muon",
        "lr",
        "weight_decay",
        "momentum",
        "nesterov",
        "ns_coefficients",
        "eps",
        "ns_steps",
        "adjust_lr_fn",
        "betas",
    )
)
# Of schedulers
SCHEDULED = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
FINITE = "a finite number >= 0 that fp32 holds"
BELOW_ONE = "a number in [0, 1)"
# Torch's, torchtitan's; no effect
TOLERATED = frozenset(("name", "fused", "foreach", "differentiable", *SCHEDULED))
# Names that others use for our own keys
ALIASES = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
CHANGED = ("maximize", "amsgrad", "differentiable")  # options of torch's that change what a step is
RESEMBLES = 0.8  # difflib's ratio from which an unknown key counts as one of our own, misspelt
RESEMBLES_NS = 0.5  # the same for a key that begins with our own prefix `ns_`
# Name -> use_muon of a group of that kind
ALGORITHMS = {"adam": False, "adamw": False, "muon": True, "normuon": True}


class Members:
    """What checks of a new group need to know of the groups before it, without looking at all of
    them for each group.

    `ids`: of their parameters; `first`: the first (group, parameter) that requires a gradient.
    """

    def __init__(self, groups: Iterable[dict] = ()):
        self.ids: set[int] = set()
        self.first: tuple[dict, torch.Tensor] | None = None
        for group in groups:
            self.add(group)

    def add(self, group: dict) -> None:
        """Take in one more group."""
        self.ids.update(map(id, group["params"]))
        if self.first is None:
            self.first = next(((group, p) for p in group["params"] if p.requires_grad), None)


def check_unique(group, others, members) -> None:
    """Raise ValueError for a new group that lacks `params`, or holds a parameter twice or one of
    another group; torch's own errors name no parameter. A group without parameters is allowed, as
    in torch. `members`: of the `others`.
    """
    if "params" not in group:
        keys = shortened(", ".join(map(repr, group)) or "nothing")
        raise ValueError(
            f"there is no key 'params', but {keys}: it is to hold the group's parameters, or pairs "
            "(name, "
            "parameter)"
        )
    if isinstance(group["params"], (torch.Tensor, set)):  # one parameter; what torch refuses
        return
    # It may be a generator; torch makes it a list too
    group["params"] = entries = list(group["params"])
    _name_empty(group, others)
    count = len(group.get("param_names") or entries)
    # More names are left where a wrapper divides the parameters among ranks
    if count < len(entries):
        raise ValueError(
            f"param_names holds {count} names for {len(entries)} parameters: pass one for each"
        )
    seen = set()
    for number, entry in enumerate(entries):
        if isinstance(entry, tuple) and len(entry) != 2:
            raise ValueError(
                f"an entry of params is a tuple of {len(entry)}: pass parameters, or pairs (name, "
                "parameter)"
            )
        name, param = entry if isinstance(entry, tuple) else (name_of(group, number), entry)
        name = shortened(name)
        if id(param) in seen:
            raise ValueError(
                f"parameter {name} is twice in a group; it would be stepped twice: leave one out"
            )
        if id(param) in members.ids:
            raise ValueError(
                f"parameter {name} is in more than one parameter group: leave it in one"
            )
        seen.add(id(param))


def _name_empty(group: dict, others: list[dict]) -> None:
    """Give a group without parameters an empty list of names where the others are named: torch
    refuses a mixture.
    """
    entries = group["params"]
    named = "param_names" in group or bool(entries) and isinstance(entries[0], tuple)
    # As all of them are, or none
    others_named = any("param_names" in other for other in others[:1])
    if others_named and not entries:
        group.setdefault("param_names", [])
    for other in others if named and not others_named else ():
        if not other["params"]:
            other["param_names"] = []


def check_group(
    group: dict, extra_keys: Collection[str] = (), arguments: Mapping[str, object] | None = None
) -> None:
    """Raise ValueError or NotImplementedError for a parameter group that could not be stepped, or
    has a key that would be without effect though its name says otherwise.

    extra_keys: keys besides those of Muon's groups. arguments: {name: value} of the optimizer's
    arguments that no group can change. Parameters that require no gradient may be anything but
    lazy.
    """
    _check_keys(group, {*GROUP_KEYS, *extra_keys}, arguments or {})
    check_numbers(group)
    for i, param in enumerate(group["params"]):
        if param.requires_grad or isinstance(param, UninitializedTensorMixin):
            check_param(param, name_of(group, i), group)


def _check_keys(group: dict, own: set[str], arguments: Mapping[str, object]) -> None:
    """Raise ValueError for a key that is not known and resembles one of `own`, belongs to the
    optimizer, or asks for another algorithm. Other keys are those of schedulers, wrappers and
    loggers: they stay, without effect.
    """
    for key in [key for key in group if isinstance(key, str) and key not in own]:
        value, text = group[key], f"{shortened(key)}={shortened(repr(group[key]))}"
        if key in arguments:
            if not _is_same(value, arguments[key]):
                raise ValueError(
                    f"{text} is an argument of the optimizer, which holds for all groups and is "
                    f"{shortened(repr(arguments[key]))}: pass it to the optimizer, and remove the "
                    "key"
                )
        elif key in CHANGED:
            if not _is_false(value):
                raise ValueError(f"{text} is not allowed: no step here does that; remove the key")
        elif key == "beta2":
            raise ValueError(
                f"{text} is not allowed: it is a key of NorMuon's groups, and AdamW's have "
                "betas=(beta1, "
                "beta2); use NorMuon, or remove it"
            )
        elif key not in TOLERATED and (meant := _misspelt(key, own)):
            raise ValueError(
                f"unknown key {shortened(repr(key))}, which resembles {meant!r}; allowed are "
                f"{', '.join(sorted(own))}: remove or rename it"
            )
        if isinstance(value, str) and ALGORITHMS.get(
            value.lower(), not is_adamw(group)
        ) == is_adamw(group):
            raise ValueError(
                f"{text} names another algorithm than use_muon={not is_adamw(group)}, which is "
                "what "
                "counts: set use_muon, or rename the value"
            )


def _misspelt(key: str, own: set[str]) -> str:
    """The key of `own` that an unknown key stands for by its look; "" if it is somebody else's.

    Names in which a whole key of ours is one part, such as lr_scale or base_momentum, are others'.
    """
    low = key.lower().replace("-", "_").strip("_")
    if low in own:
        return low
    if low in ALIASES:
        return ALIASES[low]
    if {"muon", "adam", "adamw"}.intersection(low.split("_")):
        return "use_muon"
    if short := [
        known for known in sorted(own) if known.startswith(f"{low}_") and 2 * len(low) > len(known)
    ]:
        return short[0]
    if any(low.startswith(f"{known}_") or low.endswith(f"_{known}") for known in own):
        return ""
    ratio = RESEMBLES_NS if low.startswith("ns_") else RESEMBLES
    return next(iter(difflib.get_close_matches(low, sorted(own), 1, ratio)), "")


def _is_same(value: object, other: object) -> bool:
    try:
        return value is other or bool(value == other)
    except (TypeError, ValueError, RuntimeError):  # arrays
        return False


def _is_false(value: object) -> bool:
    return value is None or number_of(value) == 0


def device_of(groups) -> torch.device:
    """Where the parameters that require gradients are; without these, where any is; the CPU if
    there is none.
    """
    first = None
    for group in groups:
        for param in group["params"]:
            if param.requires_grad:
                return param.device
            first = param if first is None else first
    return torch.device("cpu") if first is None else first.device


def check_together(groups: list[dict], options, first: tuple[dict, torch.Tensor] | None) -> None:
    """Raise ValueError for what concerns more than one parameter: devices, and who reduces the
    gradients.

    `first`: see `Members`; of these groups and others. Parameters that require no gradient do not
    count.
    """
    for group in groups:
        for i, param in enumerate(group["params"]):
            if param.requires_grad:
                _check_beside(param, group, i, options, first)


def _check_beside(param, group, number, options, first) -> None:
    """`first`: (group, parameter), on whose device all are to be."""
    name = name_of(group, number)
    if is_dtensor(param) and options.shard_state:
        raise ValueError(
            f"shard_state=True, but parameter {name} is a DTensor, whose state is sharded as it "
            "is: leave "
            "the option out, or use plain parameters"
        )
    if is_dtensor(param) and not options.grads_are_reduced:
        raise ValueError(
            f"grads_are_reduced=False, but parameter {name} is a DTensor, whose gradients its "
            "parallelism "
            "reduces: leave the option out, or use plain parameters"
        )
    if param.device != first[1].device:
        raise ValueError(
            f"parameter {name} is on {param.device}, but {name_in(*first)} is on "
            f"{first[1].device}; an optimizer steps one device: move the model, or build one each"
        )


def check_memory(groups) -> None:
    """Raise ValueError for two parameters that share an element, or one whose elements share
    memory: each would be stepped more than once. Looks at addresses only, and at elements where
    ranges of memory overlap. Parameters that require no gradient do not count.
    """
    spans = []
    for number, group in enumerate(groups):
        for i, param in enumerate(group["params"]):
            local = local_of(param) if param.requires_grad else None
            if local is None or isinstance(local, FakeTensor) or local.is_meta or not local.numel():
                continue
            if not local.is_contiguous() and _lies_in_itself(local):
                raise ValueError(
                    f"parameter {name_of(group, i)} of shape {tuple(param.shape)} has strides "
                    f"{local.stride()}, by which elements share memory (as expand() makes them): "
                    "clone() "
                    "it before it becomes a parameter"
                )
            if local.untyped_storage().nbytes():  # else it was freed, and its address is anybody's
                start = local.data_ptr()
                spans.append((start, start + _extent(local) * local.itemsize, number, i, local))
    spans.sort(key=lambda span: span[:2])
    together, end = [], 0
    for span in [*spans, None]:
        if span is None or span[0] >= end:
            _check_apart(together, groups)
            together = []
        if span is not None:
            together.append(span)
            end = max(end, span[1])


def _extent(local: torch.Tensor) -> int:
    """How many elements of memory a tensor spans."""
    return 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride()))


def _lies_in_itself(local: torch.Tensor) -> bool:
    """Whether a stride is no longer than all that lies within it."""
    reach = 0
    for stride, size in sorted(
        (stride, size) for size, stride in zip(local.shape, local.stride()) if size > 1
    ):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _check_apart(spans, groups) -> None:
    """Raise ValueError if two tensors whose ranges of memory overlap have an element in common:
    rows or columns of one larger tensor do not. `spans`: (address, end, number of the group, number
    of the parameter, tensor) each.
    """
    if len(spans) < 2:
        return
    taken = _Map(spans)
    for place, span in enumerate(spans):
        if taken.at(span).any():
            other = next(o for o in spans[:place] if _Map([o, span]).add(o).at(span).any())
            one, two = (
                f"parameter {name_of(groups[g], i)} of group {g}" for _, _, g, i, _ in (other, span)
            )
            raise ValueError(
                f"{one} and {two} share memory, which would be stepped twice: leave one out, or "
                "clone() "
                "one before it becomes a parameter"
            )
        taken.add(span)


class _Map:
    """Which units of memory some tensors take; a unit: the most bytes that divide their elements
    and distances.
    """

    def __init__(self, spans):
        self.start, end = spans[0][0], max(span[1] for span in spans)
        self.unit = math.gcd(
            *(span[0] - self.start for span in spans), *(span[4].itemsize for span in spans)
        )
        self.taken = torch.zeros((end - self.start) // self.unit, dtype=torch.bool, device="cpu")

    def at(self, span) -> torch.Tensor:
        start, _, _, _, local = span
        count = local.itemsize // self.unit
        strides = (*(stride * count for stride in local.stride()), 1)
        return self.taken.as_strided(
            (*local.shape, count), strides, (start - self.start) // self.unit
        )

    def add(self, span) -> _Map:
        self.at(span).fill_(True)
        return self


def check_numbers(group) -> None:
    """Raise ValueError for what is not allowed of a group's numbers and names, also of those that
    only the other kind of group reads.
    """
    for key in ("use_muon", "nesterov"):
        _require(number_of(group[key]) in (0, 1), key, group[key], "True or False")
    for key in ("lr", "weight_decay"):
        _require(0 <= number_of(group[key]) <= LARGEST, key, group[key], FINITE)
    for key in ("momentum", "beta2"):
        _require(0 <= number_of(group.get(key, 0)) < 1, key, group.get(key), BELOW_ONE)
    _check_values(group)


def check_live(groups) -> None:
    """Raise ValueError, with group and key, for a number that a schedule may have put in between
    steps and that is not allowed: before anything of a step changes. Numbers on a GPU are not read.
    """
    for number, group in enumerate(groups):
        for key, most in (("lr", LARGEST), ("weight_decay", LARGEST), ("momentum", 1.0)):
            value = group.get(key)
            if (
                type(value) is float
                and 0.0 <= value < most
                or isinstance(value, torch.Tensor)
                and _is_away(value)
            ):
                continue
            with in_group(number, group):
                fits = 0 <= number_of(value) < most or number_of(value) == most == LARGEST
                _require(fits, key, value, FINITE if most == LARGEST else BELOW_ONE)
        # No betas: see check_again
        known = group.get("use_muon") is True or group.get("betas") is None
        if not known and is_adamw(group):
            with in_group(number, group):
                _check_betas("betas", group.get("betas"))


def _is_away(value: torch.Tensor) -> bool:
    """Whether reading a number would make the host wait for a device."""
    return value.device.type != "cpu" and value.numel() == 1


def check_again(groups, options) -> None:
    """Check again, before a step, what no schedule changes; lr and the like may lie on a device and
    are not read. Raise RuntimeError for a fake tensor, which an optimizer may be made for, but not
    step, or a DTensor's plain gradient.
    """
    for number, group in enumerate(groups):
        with in_group(number, group):
            _check_values(group)
        for param in group["params"]:
            if getattr(param, "_fsdp_flattened", False):
                refuse_fsdp1(name_in(group, param))
            if isinstance(local_of(param), FakeTensor):
                raise RuntimeError(
                    f"parameter {name_in(group, param)} is a fake tensor: it has no memory in "
                    "which "
                    "step() could change it. Leave the step out of what runs under FakeTensorMode"
                )
            if is_dtensor(param) and param.grad is not None and not is_dtensor(param.grad):
                raise RuntimeError(
                    f"parameter {name_in(group, param)} is a DTensor, but its gradient a plain "
                    "tensor "
                    f"of shape {tuple(param.grad.shape)}: use DTensor.from_local or "
                    "distribute_tensor"
                )
    check_together(groups, options, Members(groups).first)


def refuse_fsdp1(name: str) -> None:
    """Raise ValueError for a parameter of FullyShardedDataParallel."""
    raise ValueError(
        f"parameter {name} is sharded by FSDP1 (torch.distributed.fsdp.FullyShardedDataParallel), "
        "which "
        "keeps parts of flattened parameters on each rank, where Muon needs to know whole "
        "matrices: shard "
        "the model with torch.distributed.fsdp.fully_shard (FSDP2), and build the optimizer after "
        "that"
    )


def _check_values(group) -> None:
    """Raise ValueError for what no schedule changes."""
    _require(0 <= number_of(group["eps"]) <= LARGEST, "eps", group["eps"], FINITE)
    scale, scales = group["adjust_lr_fn"], (None, *SCALES)
    _require(
        scale is None or isinstance(scale, str) and scale in scales,
        "adjust_lr_fn",
        scale,
        f"one of {scales}",
    )
    steps_of(group["ns_coefficients"], group["ns_steps"])
    if is_adamw(group) and group.get("betas") is None:
        raise ValueError(
            "use_muon=False, but the group has no betas: where it goes over to AdamW, set betas "
            "and eps "
            "along with use_muon"
        )
    if "betas" in group:
        _check_betas("betas", group.get("betas"))


def _check_betas(key: str, betas: object) -> None:
    pair = (
        isinstance(betas, (tuple, list))
        and len(betas) == 2
        and all(0 <= number_of(b) < 1 for b in betas)
    )
    _require(pair, key, betas, "two numbers in [0, 1)")


def check_module(model: object) -> None:
    """Raise TypeError for anything but a module, ValueError for one whose parameters FSDP1 has
    flattened.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"get_default_muon_param_groups takes one torch.nn.Module, not {type(model).__name__}"
        )
    for name, param in model.named_parameters():
        if getattr(param, "_fsdp_flattened", False):
            refuse_fsdp1(shortened(name))


def check_adamw(betas: object, eps: object) -> None:
    """Raise ValueError for defaults of AdamW groups that are not allowed, also where there is no
    such group.
    """
    _check_betas("adamw_betas", betas)
    _require(0 <= number_of(eps) <= LARGEST, "adamw_eps", eps, FINITE)


def is_adamw(group) -> bool:
    """Whether a group that may be wrong in anything asks for AdamW."""
    return number_of(group.get("use_muon", True)) == 0


def _require(true, key, came, allowed) -> None:
    if not true:
        raise ValueError(f"{key}={shortened(repr(came))} is not allowed: it must be {allowed}")


def check_param(param, name, group) -> None:
    """Raise ValueError or NotImplementedError for a parameter that could not be stepped as `group`
    wants.
    """
    use_muon = group["use_muon"]
    if isinstance(param, UninitializedTensorMixin):
        raise ValueError(
            f"parameter {name} is lazy and has no shape yet: run the model once before the "
            "optimizer is "
            "built"
        )
    if getattr(param, "_fsdp_flattened", False):  # also of the flat parameter itself
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
            "tensors; kernels take plain memory: keep the weights in high precision"
        )
    if param.dtype not in (*WIDE, torch.float64):
        raise ValueError(
            f"{what} has dtype {param.dtype}; allowed are real floating-point parameters in "
            "float32, "
            "bfloat16, float16 and, for AdamW, float64: use torch.view_as_real for complex ones"
        )
    if use_muon and param.dtype not in WIDE:
        raise ValueError(
            f"{what} has dtype {param.dtype}; Muon steps float32, bfloat16 and float16, in fp32: "
            "convert it, or put it into a group with use_muon=False"
        )
    if use_muon and param.ndim < 2:
        raise ValueError(
            f"{what} is {param.ndim}-D; Muon takes matrices (R, C) and stacks of them (..., R, C): "
            "put it into a group with use_muon=False, or use get_default_muon_param_groups(model)"
        )
    if is_dtensor(param) and not torch.distributed.is_initialized():
        raise ValueError(
            f"{what} is a DTensor, but torch.distributed is not initialized, so its mesh has no "
            "process "
            "groups: call init_process_group before the model is sharded, and keep it until "
            "training ends"
        )
    check_placements(param, name, use_muon)
    check_local_shape(param, name)
    if use_muon and "beta2" in group:
        check_row_state(param, name)


gradient_of, _dtype, _requires_grad, _spec = map(
    attrgetter, ("grad", "dtype", "requires_grad", "_spec")
)


def check_gradients(params, groups) -> None:
    """Raise RuntimeError, naming the parameter, if a gradient is sparse, if its memory holds the
    numbers with the other sign, or if it has another shape: one that was made before the parameter
    was resized.
    """
    params = [p for p in params if p.grad is not None]
    for param, local, own in zip(params, raw_locals(map(gradient_of, params)), raw_locals(params)):
        wrong = _wrong_with(param, local, own)
        if wrong:
            raise RuntimeError(
                f"parameter {name_among(groups, param)} of shape {tuple(param.shape)} has a {wrong}"
            )


def _wrong_with(param, local, own) -> str:
    """What is, with a gradient whose part here is `local`, that of its parameter `own`."""
    if param.grad.layout is not torch.strided:
        return (
            "sparse gradient; Muon and its AdamW take dense ones: use sparse=False in "
            "nn.Embedding, or "
            "torch.optim.SparseAdam for it"
        )
    if local.is_neg():
        return (
            "gradient that is a lazily negated view (is_neg), whose memory has the other sign: put "
            "p.grad.resolve_neg() in its place"
        )
    if param.grad.shape != param.shape or local.shape != own.shape and not is_mismatched(param):
        return (
            f"gradient of shape {tuple(local.shape)} where its elements here have "
            f"{tuple(own.shape)}: it is that "
            "of another shape of the parameter; set p.grad to None and go backward again"
        )
    return ""

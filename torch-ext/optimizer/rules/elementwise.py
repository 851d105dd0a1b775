"""Rules of groups with use_muon=False: their protocol, and steps on lists of tensors.

A rule steps in a single elementwise phase: every rank steps the elements that it stores. The rules
are in elements/. Each computes in torch's fused or foreach functions, in the wider dtype of weight
and state. Forms of weight decay (decay.py) that a rule does not compute itself run beside it, as
foreach operations, before the step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch

from ..kernels.elementwise.weight_update import CAUTIOUS, RATE, TO_INITIAL
from ..kernels.quantized.blocks import BLOCK, is_quantized
from ..kernels.weights.split import join_into, split_into
from .decay import DECOUPLED, INITIAL_KEY, form_of, rate_of
from .muon import REST_KEY, is_split

Tensors = Sequence[torch.Tensor]
# Weight, gradient and averages of one parameter, or of a piece of one; then the step count of rules
# that count, with decay="initial" the initial weight, and the rest of a split weight
Member = tuple[torch.Tensor, ...]

_dtype = attrgetter("dtype")
# Elements of tensors that are stepped as copies at a time; bounds the memory of the copies
MAX_COPIED_ELEMENTS = 1 << 24
DEFAULT = "adamw"  # rule of a group without the key
# Key of a group with use_muon=False: dtype of its averages, None for the optimizer's. torch.int8
# is the 8-bit format of kernels/quantized/adamw.py
DTYPE_KEY = "state_dtype"


class Members(NamedTuple):
    """Lists of tensors that a rule steps together. All tensors of a parameter have one dtype and
    equal strides.
    """

    W: Tensors
    G: Tensors
    averages: Sequence[Tensors]  # in the order of `Elementwise.averages`
    steps: Tensors  # step counts; empty unless the rule counts
    lr: torch.Tensor | float  # on GPUs a number on the device, except in fp64
    weight_decay: float  # 0 unless the rule decays


class Elementwise:
    """A rule of groups with use_muon=False. A new rule is a subclass in elements/."""

    name: ClassVar[str]
    averages: ClassVar[tuple[str, ...]]  # keys of state with a number for each element
    counts: ClassVar[bool] = False  # whether each parameter has state `step`
    # Keys in place of `averages` where these are in 8 bits; (): the rule has no such form
    quantized: ClassVar[tuple[str, ...]] = ()
    # Keys of its groups besides those of every group, with defaults
    options: ClassVar[dict[str, Any]] = {}
    reads: ClassVar[tuple[str, ...]] = ()  # keys with a number, or a pair, for `constants`
    makes: ClassVar[tuple[int, int]] = (0, 0)  # what `temporaries` returns
    has_radius: ClassVar[bool] = False  # whether lr is multiplied by the option `radius`
    decays: ClassVar[bool] = False  # whether `step` takes weight_decay of the form "decoupled"
    # Whether bf16 is stepped in fp32, because foreach operations round after each operation
    in_fp32: ClassVar[bool] = True

    @classmethod
    def check(cls, group: Mapping[str, Any]) -> None:
        """Raise ValueError for a wrong option of a group; by default for a wrong radius."""
        if cls.has_radius:
            check_radius(group)

    def constants(self, group: Mapping[str, Any]) -> tuple:
        """Return numbers of a group that `step` takes from the host, besides lr and decay; by
        default the values of the keys `reads`, as floats.
        """
        numbers = []
        for key in self.reads:
            value = group[key]
            numbers += value if isinstance(value, (tuple, list)) else [value]
        return tuple(map(float, numbers))

    def temporaries(self, group: Mapping[str, Any]) -> tuple[int, int]:
        """Return how many tensors like W, for each W, `step` makes on a GPU: (at a time, returned).
        For `MemoryReport`.
        """
        return self.makes

    def step(self, members: Members, group: Mapping[str, Any]) -> Tensors:
        """Step W and state in place; return tensors with the signs of the update, read for
        decay="cautious". G stays unchanged. Raises NotImplementedError unless overridden.
        """
        raise NotImplementedError

    # Of rules with `quantized`: `step` for averages in 8 bits (rule, W, G, states, group, scalars)
    step_quantized: ClassVar[Callable[..., None] | None] = None


ELEMENTWISE: dict[str, Elementwise] = {}  # name -> rule


def register_elementwise(rule: type[Elementwise]) -> type[Elementwise]:
    """Add a class to `ELEMENTWISE`; return the class."""
    ELEMENTWISE[rule.name] = rule()
    return rule


def elementwise_of(group: Mapping[str, Any]) -> Elementwise:
    """Return the rule of a group with use_muon=False. Raises ValueError for an unknown name."""
    name = group.get("rule") or DEFAULT
    if not isinstance(name, str) or name not in ELEMENTWISE:
        raise ValueError(
            f"rule={name!r} is not allowed in a group with use_muon=False: it must be one of "
            f"{tuple(ELEMENTWISE)}, or leave it out for AdamW. Other rules step matrices, in "
            "groups with use_muon=True"
        )
    return ELEMENTWISE[name]


def check_radius(group: Mapping[str, Any]) -> None:
    """Raise ValueError unless the option `radius` of a group is a finite number > 0."""
    radius = group["radius"]
    is_number = isinstance(radius, (int, float)) and not isinstance(radius, bool)
    if not (is_number and 0 < radius < math.inf):
        raise ValueError(f"radius={radius!r} is not allowed: it must be a finite number > 0")


def torch_options(W: Tensors) -> dict[str, bool]:
    """Return arguments of torch's functions that step W: fused on GPUs, else foreach."""
    fused = W[0].is_cuda
    return {"foreach": not fused, "fused": fused, "maximize": False}


def step_size(group: Mapping[str, Any]) -> float:
    """Return lr, times the radius of rules with one, in fp64."""
    lr = float(group["lr"])
    return lr * float(group["radius"]) if elementwise_of(group).has_radius else lr


def is_8bit(group: Mapping[str, Any], param: torch.Tensor) -> bool:
    """Return whether the averages of a parameter of a group are in 8 bits. Parameters with fewer
    than two dims, or with rows shorter than a block, are small or would gain little: they keep
    averages in fp32, as does fp64.
    """
    if group["use_muon"] or not is_quantized(group.get(DTYPE_KEY)):
        return False
    has_blocks = param.ndim > 1 and param.shape[-1] >= BLOCK and param.dtype != torch.float64
    return has_blocks and bool(elementwise_of(group).quantized)


def averages_of(group: Mapping[str, Any], param: torch.Tensor) -> tuple[str, ...]:
    """Return the keys of the averages of a parameter of a group: in 8 bits those of numbers and
    scales.
    """
    rule = elementwise_of(group)
    return rule.quantized if is_8bit(group, param) else rule.averages


def first_average(states: Sequence[Tensors]) -> tuple[Tensors, Tensors]:
    """Return (first averages of parameters, their scales in 8 bits, else ()). `states`: lists of
    the state of `averages_of`, or more.
    """
    first = states[0]
    return (first, states[2]) if first and is_quantized(first[0].dtype) else (first, ())


def state_keys_of(group: Mapping[str, Any], param: torch.Tensor) -> tuple[str, ...]:
    """Return the keys of state that a step of a parameter reads, in the order of `states` of
    `step`.
    """
    averages = averages_of(group, param)
    keys = (*averages, "step") if elementwise_of(group).counts else averages
    keys = (*keys, INITIAL_KEY) if form_of(group) == TO_INITIAL else keys
    return (*keys, REST_KEY) if is_split(group, param) else keys


def step_skipping_flagged(
    flags: Tensors | None,
    W: Tensors,
    G: Tensors,
    states: Sequence[Tensors],
    group: Mapping[str, Any],
    scalars: torch.Tensor | None,
) -> None:
    """Compute `step`, but keep weight and state of each parameter with a flag above 0.

    `flags`: a number on the device per parameter (non-finite gradients), or None for plain `step`.
    The host never reads a flag: parameters are stepped one at a time, and old values copied back.
    """
    if flags is None:
        return step(W, G, states, group, scalars)
    for flag, w, g, *own in zip(flags, W, G, *states):
        old = [t.clone() for t in (w, *own)]
        step([w], [g], [[t] for t in own], group, scalars)
        # Selected on the device; the flag goes to the CPU only for state that lies there
        for new, before in zip((w, *own), old):
            new.copy_(torch.where((flag > 0).to(new.device), before, new))


def step(
    W: Tensors,
    G: Tensors,
    states: Sequence[Tensors],
    group: Mapping[str, Any],
    scalars: torch.Tensor | None,
) -> None:
    """Step weights and state in place, in the wider dtype of each weight and its averages, at least
    fp32 with `in_fp32` of the rule: rounded to bf16, a weight would lose a small step.

    `W`, `G`: weights and gradients, of equal shapes. `states`: lists of the state of
    `state_keys_of`. `scalars`: `device_scalars` in fp32 on the device; read on GPUs only. Either
    all weights are split or none is.

    torch's functions want weight, gradient and averages alike in dtype and strides. Parameters that
    differ are stepped as copies, at most MAX_COPIED_ELEMENTS elements at a time, and so are split
    weights.
    """
    rule = elementwise_of(group)
    if W and is_quantized(states[0][0].dtype):  # all averages are in 8 bits, or none is
        return rule.step_quantized(W, G, states, group, scalars)
    count = 2 + len(rule.averages)  # tensors of a member that have to be alike
    straight = list(zip(W, G, *states))
    copied = []
    splits = bool(straight) and is_split(group, W[0])
    if splits:
        straight, copied = [], straight
    elif not _all_fit(rule, W, G, *states[: count - 2]):
        members, straight = straight, []
        for member in members:
            w, _, m, *_ = member
            fits = all(_fits(t, wide_dtype(w.dtype, m.dtype, rule), m) for t in member[:count])
            (straight if fits else copied).append(member)
    # All rules but AdamW, and decay beside the rule, make temporaries
    in_parts = not _decays_inside(rule, group)
    for part in _in_parts(straight, rule) if in_parts else [straight] if straight else ():
        _step_alike(part, rule, group, scalars)
    for part in _in_parts(copied, rule):
        copies = [_copied(member[:count], rule, member[-1] if splits else None) for member in part]
        alike = [(*own, *member[count:]) for own, member in zip(copies, part)]
        _step_alike(alike, rule, group, scalars)
        # Back to weight and averages; the gradient has not changed
        for member, own in zip(part, copies) if splits else ():
            split_into(own[0], member[0], member[-1])
        places = [*range(2, count)] if splits else [0, *range(2, count)]
        pairs = [(member[i], own[i]) for own, member in zip(copies, part) for i in places]
        if pairs := [pair for pair in pairs if pair[0] is not pair[1]]:
            torch._foreach_copy_(*map(list, zip(*pairs)))


def temporaries_of(group: Mapping[str, Any]) -> int:
    """Return how many tensors like the weights `_step_alike` makes at a time on a GPU, in the dtype
    of the step.
    """
    rule = elementwise_of(group)
    most, returned = rule.temporaries(group)
    if not float(group["weight_decay"]) or _decays_inside(rule, group):
        return most
    if form_of(group) == CAUTIOUS:
        # The old weights are kept during the step; then two signs and their product join them
        return 1 + max(most, returned + 3)
    return max(most, 2 if form_of(group) == TO_INITIAL else 1)


def _decays_inside(rule: Elementwise, group: Mapping[str, Any]) -> bool:
    """Return whether `Elementwise.step` decays the weights itself."""
    return rule.decays and group.get("decay", DECOUPLED) == DECOUPLED


def _step_alike(
    members: Sequence[Member],
    rule: Elementwise,
    group: Mapping[str, Any],
    scalars: torch.Tensor | None,
) -> None:
    """Step members of uniform dtype and strides."""
    W, G, *states = map(list, zip(*members))
    count = len(rule.averages)
    averages, initial = states[:count], states[count + rule.counts :]
    # Kernels read lr from device memory in fp32, so a schedule needs no new CUDA graph. In fp64 lr
    # comes from the host, unrounded, and is among `host_constants`
    on_device = W[0].is_cuda and averages[0][0].dtype != torch.float64
    weight_decay = float(group["weight_decay"])
    old = []
    if weight_decay and not _decays_inside(rule, group):
        weight_decay = 0.0
        rate = scalars[RATE] if on_device else rate_of(group)
        if form_of(group) == CAUTIOUS:
            old = [w.clone() for w in W]
        else:
            _decay(W, rate, initial[0] if form_of(group) == TO_INITIAL else None)
    steps = states[count] if rule.counts else ()
    lr = scalars[0] if on_device else step_size(group)
    update = rule.step(Members(W, G, averages, steps, lr, weight_decay), group)
    if old:
        # 0 where the signs of weight and update are opposite, else 1
        keeps = torch._foreach_mul(torch._foreach_sign(old), torch._foreach_sign(update))
        torch._foreach_add_(keeps, 1.0)
        torch._foreach_clamp_max_(keeps, 1.0)
        torch._foreach_mul_(keeps, old)
        torch._foreach_mul_(keeps, rate)
        torch._foreach_sub_(W, keeps)


def _decay(
    W: Sequence[torch.Tensor], rate: torch.Tensor | float, towards: Sequence[torch.Tensor] | None
) -> None:
    """Compute W - rate (W - towards) in place; `towards` None: zeros. `towards` may have other
    dtypes and strides.
    """
    difference = W if towards is None else torch._foreach_sub(W, towards)
    torch._foreach_sub_(W, torch._foreach_mul(difference, rate))


def wide_dtype(
    weight_dtype: torch.dtype, average_dtype: torch.dtype, rule: Elementwise, is_split: bool = False
) -> torch.dtype:
    """Return the dtype in which a parameter is stepped. `is_split`: whether the weight is split,
    see `master_weights`.
    """
    wide = torch.promote_types(weight_dtype, average_dtype)
    return torch.promote_types(wide, torch.float32) if rule.in_fp32 or is_split else wide


def _fits(tensor: torch.Tensor, wide: torch.dtype, m: torch.Tensor) -> bool:
    """Whether a tensor of a parameter with average m needs no copy. `wide`: see `wide_dtype`."""
    return tensor.dtype == wide and tensor.stride() == m.stride()


def _all_fit(rule: Elementwise, *lists: Tensors) -> bool:
    """Whether no tensor needs a copy, decided without a Python loop over parameters: all dtypes are
    equal, and the strides of each parameter's tensors. The usual case.
    """
    # `map`, `set` and `count` loop in C
    dtypes = set(map(_dtype, itertools.chain(*lists)))
    if len(dtypes) != 1 or rule.in_fp32 and not dtypes <= {torch.float32, torch.float64}:
        return False
    strides = [list(map(torch.Tensor.stride, tensors)) for tensors in lists]
    return strides.count(strides[0]) == len(strides)


def _copied(
    tensors: Tensors, rule: Elementwise, rest: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return w, g, m and further averages in the dtype of the step and the strides of m; copies
    only where `_fits` is false. `rest`: of a split weight; None: w is whole.
    """
    w, _, m, *_ = tensors
    wide = wide_dtype(w.dtype, m.dtype, rule, rest is not None)
    found = [t if _fits(t, wide, m) else torch.empty_like(m, dtype=wide) for t in tensors]
    for copy, t in zip(found, tensors):
        if t is w and rest is not None:
            join_into(copy, w, rest)
        elif copy is not t:
            copy.copy_(t)
    return found


def _in_parts(members: Sequence[Member], rule: Elementwise) -> Iterator[list[Member]]:
    """Yield lists of members, or pieces of members, with at most MAX_COPIED_ELEMENTS elements. A
    large member that cannot be cut makes a list by itself.
    """
    part = []
    numel = 0
    for piece in (piece for member in members for piece in _pieces(member, rule)):
        if part and numel + piece[0].numel() > MAX_COPIED_ELEMENTS:
            yield part
            part = []
            numel = 0
        part.append(piece)
        numel += piece[0].numel()
    if part:
        yield part


def _pieces(member: Member, rule: Elementwise) -> list[Member]:
    """Cut a large contiguous member into flat pieces of MAX_COPIED_ELEMENTS elements.

    The first piece has the parameter's own `step`, the further pieces have clones of the old count,
    since torch's AdamW increments `step` for every piece.
    """
    count = 2 + len(rule.averages)
    step = member[count : count + rule.counts]  # of one element, or empty
    tensors = *member[:count], *member[count + rule.counts :]
    if tensors[0].numel() <= MAX_COPIED_ELEMENTS or not all(t.is_contiguous() for t in tensors):
        return [member]
    flat = zip(*(t.view(-1).split(MAX_COPIED_ELEMENTS) for t in tensors))
    return [
        (*some[:count], *(t.clone() if number else t for t in step), *some[count:])
        for number, some in enumerate(flat)
    ]


def count_steps(steps: Tensors, flags: Tensors | None = None) -> None:
    """Increment `step` of parameters that other ranks step: `step` is equal on every rank,
    also where no rows of a parameter are stored.

    `flags`: as in `step_skipping_flagged`; the step of a flagged parameter is not counted.
    """
    if flags is not None:
        for step, flag in zip(steps, flags):
            step.add_((flag == 0).to(step))
    elif steps:
        torch._foreach_add_(steps, 1)

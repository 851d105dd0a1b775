"""`find_split`: the projections that a weight holds, for `get_default_muon_param_groups`.

A fused weight holds several projections of one input: q, k and v; gate and up; the parts of a
Mamba layer. layouts.py reads the sizes of the projections from the classes, the attributes and the
config of the modules. The functions below look at one parameter, apply the first rule for it, and
check the sizes against its shape.

A name alone never chooses a split. A weight that looks fused by name and shape, or has q, k and v
in its name, in a class without a rule, may hold its projections in more than one order: the error
lists the possible splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from ..units import ATTRIBUTES, parse
from .heads import head_blocks
from .layouts import (
    ATTENTION,
    OTHERS,
    SUSPECTS,
    Blocks,
    Rule,
    Weight,
    class_paths,
    config_of_layer,
    is_stored_transposed,
)
from .structure import Place, Structure, is_linear, upwards

SHOWN = 8  # sizes of a list in a report
# A weight with more repetitions stays one matrix: gate and up that alternate element by element
# (GPT-OSS) would be thousands of rectangles for each matrix, and a launch has a record of each
MOST_REPETITIONS = 512


class Found(NamedTuple):
    """The keys of a group for a parameter, see units.py [Note: forms of split]."""

    split: object = None
    transposed: bool = False


def find_split(
    param: nn.Parameter, places: list[Place], structure: Structure, per_head: bool = False
) -> Found:
    """The projections that a parameter for Muon holds; with `per_head` the heads of weights of
    attention.

    The attributes `muon_split` and `muon_transposed` of the parameter come first, also with the
    value None. Weights of adapters are not split. Raises ValueError, naming the parameter, if its
    projections are unknown, or if the sizes found do not add up to its shape.
    """
    demanded = split_of_attributes(param)
    if demanded is not None:
        return demanded
    if param.ndim > 3:
        return Found()
    for place in places:
        weight = weight_of(param, place, structure)
        if weight is None:
            continue
        form = _form(weight, per_head)
        if form is not None or weight.transposed:
            return _checked(Found(form, weight.transposed), weight)
    return Found()


def split_of_attributes(param: nn.Parameter) -> Found | None:
    """The split by the attributes `muon_split` and `muon_transposed`; None without either."""
    if not any(hasattr(param, attribute) for attribute in ATTRIBUTES):
        return None
    split, transposed = (getattr(param, attribute, None) for attribute in ATTRIBUTES)
    return Found(split, bool(transposed))


def weight_of(param: nn.Parameter, place: Place, structure: Structure) -> Weight | None:
    """The facts about a parameter that the rules read; None for a tensor of an adapter."""
    path, module = structure.place_in_model(place)
    if module is None:
        return None
    leaf = place.name.rpartition(".")[2]
    parent, _, layer = path.rpartition(".")
    # The weight of a layer belongs to the module around the layer. A bare tensor, such as a stack
    # of experts, belongs to its own module
    is_layer = bool(path) and (is_linear(module) or leaf == "weight")
    if "parametrizations" in layer or ".parametrizations" in parent:
        return None
    holder = structure.modules.get(parent) if is_layer else module
    if holder is None:
        return None
    above = (structure.modules.get(up) for up in upwards(parent if is_layer else path))
    configs = (getattr(inner, "config", None) for inner in above)
    config = next((config for config in configs if config is not None), None)
    return Weight(
        name=place.name,
        layer=layer if is_layer else leaf,
        shape=tuple(param.shape),
        holder=holder,
        module=module,
        config=config_of_layer(config, holder),
        transposed=is_stored_transposed(holder, module, layer if is_layer else leaf),
    )


def _form(weight: Weight, per_head: bool) -> dict | None:
    """The split by the first rule for a weight; None for a weight that is one matrix. Raises
    ValueError, naming the parameter, for unknown heads or more than one possible split.
    """
    fused = _first(ATTENTION, weight)
    other = _first(OTHERS, weight) if fused is None else None
    if per_head and other is None:
        try:
            fused = head_blocks(weight, fused)
        except ValueError as error:
            raise ValueError(
                f"parameter {weight.name} of shape {weight.shape} belongs to attention of "
                f"{class_paths(weight.holder)[0]}, but {error}. Found: {weight.facts()}. "
                f"{_how(weight)}"
            ) from None
    found = other if fused is None else fused
    if found is not None:
        return _as_form(found, weight)
    for suspect in SUSPECTS:
        candidates = suspect(weight)
        if candidates is not None:
            raise ValueError(_refusal(weight, candidates))
    return None


def _first(rules: tuple[Rule, ...], weight: Weight) -> Blocks | None:
    """The projections by the first of the rules that applies and finds any."""
    found = (rule.blocks(weight) for rule in rules if rule.applies(weight))
    return next((blocks for blocks in found if blocks is not None), None)


def _as_form(blocks: Blocks, weight: Weight) -> dict | None:
    """`blocks` as a form of `split`; None if there is a single block."""
    if blocks.heads:
        dim = {"dim": blocks.dim} if blocks.dim else {}
        return {"heads": blocks.heads, **dim} if blocks.heads > 1 else None
    sizes = [size for size in blocks.sizes if size]
    if len(sizes) < 2 or blocks.repeat > MOST_REPETITIONS:
        return None
    form = {"columns" if weight.transposed else "rows": sizes}
    return {**form, "repeat": blocks.repeat} if blocks.repeat > 1 else form


def _checked(found: Found, weight: Weight) -> Found:
    """`found`, after a check of its sizes. Raises ValueError if they do not add up."""
    try:
        parse(found.split, found.transposed).cut(weight.shape)
    except ValueError as error:
        raise ValueError(
            f"parameter {weight.name} of shape {weight.shape} is a fused weight of "
            f"{class_paths(weight.holder)[0]}, but {error}. Found: {weight.facts()}. {_how(weight)}"
        ) from None
    return found


def _how(weight: Weight) -> str:
    """Advice for a weight whose parts cannot be told, with a pattern of its name."""
    parts = weight.name.removesuffix(".weight").split(".")[-2:]
    pattern = ".".join(parts[1:] if parts[0].isdigit() and parts[1:] else parts)
    return (
        f"Say which parts it holds by its name, for example named_splits={{{pattern!r}: "
        '{"rows": [sizes]}} (None: one matrix), or leave out `split` and set the key `split` of a '
        "group yourself"
    )


def _refusal(weight: Weight, candidates: list[Blocks]) -> str:
    """The message for a weight with more than one possible split."""
    # Of one head, q, k and v in turns are q, k and v one after another
    found = dict.fromkeys(repr(_as_form(blocks, weight)) for blocks in candidates)
    forms = " or ".join(found) or "sizes that add up to the outputs"
    return (
        f"parameter {weight.name} of shape {weight.shape} looks like a fused weight, but the order "
        f"of its parts is unknown: {class_paths(weight.holder)[0]} is no class that "
        f"`split` knows. Found: {weight.facts()}. Possible: {forms}, or one matrix. {_how(weight)}"
    )


def describe(found: Found) -> str:
    """The keys of a split in words for a report, with long lists shortened; "" for one matrix."""
    form = found.split
    if isinstance(form, Mapping):
        items = ", ".join(f"{key!r}: {_short(value)}" for key, value in form.items())
        form = f"{{{items}}}"
    elif form is not None:
        form = repr(form)
    words = [] if form is None else [f"split={form}"]
    return ", ".join(words + ["transposed=True"] * found.transposed)


def _short(value: object) -> str:
    """A value of a form; of a list with more than SHOWN sizes the first sizes and the number."""
    if not isinstance(value, (list, tuple)) or len(value) <= SHOWN:
        return repr(value)
    return f"[{', '.join(map(repr, value[: SHOWN // 2]))}, ... ({len(value)} in all)]"


def matrix_count(found: Found, param: torch.Tensor) -> int:
    """The number of matrices of a parameter under a split."""
    split = parse(found.split, found.transposed)
    stack = split.shape(tuple(param.shape))[:-2]
    count = split.cut(tuple(param.shape)).count
    for size in stack:
        count *= size
    return count

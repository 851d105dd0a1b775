"""`find_layers`: the attention layers of a model, from the rules of params/model.

The rules know the sizes of the projections of a weight. This module adds the roles of the
projections, collects the weights and biases of each module, and counts heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from ..params.errors import shortened, warn_caller
from ..params.model import heads as head_rules
from ..params.model.fused_weights import weight_of
from ..params.model.layouts import (
    ATTENTION,
    HEADS,
    OTHERS,
    Arrangement,
    Blocks,
    Weight,
    class_paths,
    codegen,
    looks_like_k_v,
    looks_like_q_k_v,
    query_and_gate,
)
from ..params.model.layouts import mla as latent
from ..params.param_groups import locate_params

# Modules between projections and logits that undo any scaling of the projections
NORMS = re.compile(r"^(q|k|qk|query|key)_?(layer_?)?norm$|^norm_(q|k)$|^(q|k)_ln$|^ln_(q|k)$")
# Classes without logits of tokens by tokens
LINEAR = re.compile(
    r"(^|\.)(XCA|\w*(Linear|Delta)Attention|MiniMaxLightningAttention|\w*xLSTMLayer)$"
)
COSINE = re.compile(r"Swin\w*V2|Swin2SR|swin_transformer_v2|cosine|ZayaCCA", re.IGNORECASE)
# Last part of the class names of modules that are attention. Deformable attention has no keys.
ATTENTION_CLASS = re.compile(r"(?<!Deformable)(Attention|Attn)$")
HOW = (
    "describe its layer by hand (docs/qk_clip.md), or leave the module out with exclude=[...] of "
    "QKClip.of"
)


@dataclass
class _Found:
    """The weights of one attention module: parameter name -> blocks as in a layer."""

    module: nn.Module
    weights: dict[str, object] = field(default_factory=dict)
    heads: int = 0
    kv_heads: int = 0


def find_layers(model: nn.Module, exclude: Iterable[str] = ()) -> dict[str, dict]:
    """{path of a module: layer} of all attention modules, see layers.py [Note: forms of a layer].
    Parameters need not be trained.

    Names and paths have no wrappers' prefixes, as in `get_default_muon_param_groups`. `exclude`:
    paths left out, with everything below. Raises ValueError, naming the module, if queries and keys
    """
    exclude = [exclude] if isinstance(exclude, str) else list(exclude)
    places, structure = locate_params(model)
    names = {place.name for entries in places.values() for place in entries}
    paths = {id(module): path for path, module in reversed(structure.modules.items())}
    found: dict[str, _Found] = {}
    for param, entries in places.items():
        place = entries[0]
        weight = weight_of(param, place, structure) if param.ndim == 2 else None
        if weight is None:
            continue
        path = paths[id(weight.holder)]
        if any(path == out or path.startswith(f"{out}.") for out in exclude):
            continue
        try:
            parts, heads, kv_heads = _parts(weight)
        except ValueError as error:
            raise ValueError(f"{_label(path, weight.holder)}: {error}; {HOW}") from None
        if parts is None:
            continue
        one = found.setdefault(path, _Found(weight.holder))
        one.weights[place.name] = parts
        one.heads, one.kv_heads = one.heads or heads, one.kv_heads or kv_heads
        bias = re.sub("weight$", "bias", place.name)
        if bias != place.name and bias in names:
            one.weights[bias] = _as_rows(parts)
    layers = {path: layer for path, one in found.items() if (layer := _layer(path, one))}
    left_out = [structure.modules[path] for path in exclude if path in structure.modules]
    unknown = _unknown(structure.modules, [*(one.module for one in found.values()), *left_out])
    count = f"{len(unknown)} modules, the first {unknown[0]}, look" if unknown else ""
    if not layers:
        raise ValueError(
            "the model has no attention whose queries and keys are known"
            f"{f' ({count} like attention)' if count else ''}: describe the layers by hand "
            "(docs/qk_clip.md)"
        )
    if count:
        warn_caller(
            f"{count} like attention, but their queries and keys are unknown: QK-clip will not "
            f"scale their weights. For each module, {HOW}"
        )
    return layers


def _unknown(modules: Mapping[str, nn.Module], known: Iterable[nn.Module]) -> list[str]:
    """Labels of modules with the class name of attention and two matrices or more, that neither
    contain nor belong to a module of `known`.

    `modules`: {path: module} of the model. Of nested modules only the innermost are named.
    """
    inner = list(known)
    known_ids = {id(module) for one in inner for module in one.modules()}
    labels = []
    for path, module in reversed(modules.items()):
        kind = class_paths(module)[0]
        if not ATTENTION_CLASS.search(kind) or LINEAR.search(kind) or id(module) in known_ids:
            continue
        within = {id(child) for child in module.modules()}
        matrices = [param for param in module.parameters() if param.ndim >= 2]
        if len(matrices) >= 2 and not any(id(one) in within for one in inner):
            inner.append(module)
            labels.append(_label(path, module))
    return labels[::-1]


def _label(path: str, module: nn.Module) -> str:
    """A module in messages."""
    return f"module {shortened(path)} ({class_paths(module)[0]})"


def _layer(path: str, found: _Found) -> dict | None:
    """The layer of a module; None for linear attention, which has no logits. Raises ValueError as
    `find_layers`.
    """
    kinds = class_paths(found.module)
    if any(LINEAR.search(kind) for kind in kinds):
        return None
    roles = {role for parts in found.weights.values() for role in parts["roles"]}
    label = _label(path, found.module)
    if not {"q", "k"} <= roles:
        raise ValueError(f"{label} has weights of the roles {sorted(roles)} alone; {HOW}")
    norms = [
        name
        for name, child in found.module.named_children()
        if NORMS.search(name) and not isinstance(child, nn.Identity)
    ]
    if norms or any(COSINE.search(kind) for kind in kinds):
        what = f"a norm ({', '.join(norms)})" if norms else "a norm"
        raise ValueError(
            f"{label} has {what} between projections and logits, which undoes any scaling of the "
            "projections: QK-clip has no effect there, and the norm bounds the logits; leave the "
            "module out with exclude=[...] of QKClip.of"
        )
    layer = {"heads": found.heads, "weights": found.weights}
    return layer if found.kv_heads in (0, found.heads) else {**layer, "kv_heads": found.kv_heads}


def _parts(weight: Weight) -> tuple[dict | None, int, int]:
    """(blocks with roles, query heads, key heads) of a weight; (None, 0, 0) for a weight without
    queries and keys. Raises ValueError if the number of heads is unknown.
    """
    for rule in ATTENTION:
        blocks = rule.blocks(weight) if rule.applies(weight) else None
        if blocks is not None:
            roles = _roles(rule.layout, weight, blocks)
            heads, kv_heads = _head_counts(rule.layout, weight, blocks, roles)
            return _blocks(weight, blocks.sizes, blocks.repeat, roles), heads, kv_heads
    for role, names, others in (
        ("q", head_rules.QUERIES, head_rules.KEYS),
        ("k", head_rules.KEYS, head_rules.QUERIES),
    ):
        is_role = weight.layer in names and head_rules.has_one(weight.holder, names)
        if is_role and (head_rules.has_one(weight.holder, others) or role == "q"):
            if not _is_attention(weight):
                continue
            heads = head_rules.query_heads(weight)
            if not heads:
                raise ValueError("the number of its heads is unknown")
            kv_heads = head_rules.key_heads(weight) if role == "k" else 0
            return _blocks(weight, (), 1, (role,)), heads, kv_heads
    is_other = any(rule.applies(weight) and rule.blocks(weight) for rule in OTHERS)
    if not is_other and (looks_like_q_k_v(weight) or looks_like_k_v(weight)):
        raise ValueError(
            f"its {weight.layer} of shape {weight.shape} looks like fused queries, keys and values "
            "of an unknown order"
        )
    return None, 0, 0


def _is_attention(weight: Weight) -> bool:
    """Whether a module with a layer named after queries has keys, too: alone or fused."""
    return head_rules.has_one(weight.holder, head_rules.KEYS) or head_rules.is_attention(weight)


def _roles(layout: Arrangement, weight: Weight, blocks: Blocks) -> tuple[str, ...]:
    """The roles of the projections of a fused weight, in the order of the blocks."""
    count = len(blocks.sizes)
    if layout is latent:
        if re.search(r"kv_b|wkv_b", weight.layer):
            return "k", "v"
        return ("q", "q_rope", "v")[:count]
    if layout is query_and_gate:
        return "q", "v"
    if layout is codegen:
        return "q", "v", "k"
    if count == 2:
        return ("q", "k") if "q" in weight.layer else ("k", "v")
    return "q", "k", "v"


def _head_counts(
    layout: Arrangement, weight: Weight, blocks: Blocks, roles: tuple[str, ...]
) -> tuple[int, int]:
    """(query heads, key heads) of a fused weight; 0 for a number that the weight does not tell.
    Raises ValueError if the number of heads is unknown.
    """
    if layout is latent:
        heads = weight.number("n_local_heads", *HEADS)
        return heads, heads
    size = {role: n * blocks.repeat for role, n in zip(roles, blocks.sizes)}
    heads = weight.heads()[0] or head_rules.query_heads(weight)
    if not heads:
        raise ValueError("the number of its heads is unknown")
    if "q" not in size:
        # Keys and values of cross attention, beside queries of their own
        return heads, weight.heads()[1]
    head_dim = size["q"] // heads
    return heads, size["k"] // head_dim if "k" in size and head_dim else 0


def _blocks(
    weight: Weight, sizes: tuple[int, ...], repeat: int, roles: tuple[str, ...]
) -> dict[str, object]:
    """The blocks of a layer; blocks of size 0 are left out (layers without rotary positions)."""
    kept = [(size, role) for size, role in zip(sizes, roles) if size]
    if sizes:
        roles = tuple(role for _, role in kept)
    parts = {
        "columns" if weight.transposed else "rows": [size for size, _ in kept],
        "roles": list(roles),
    }
    return {**parts, "repeat": repeat} if repeat > 1 else parts


def _as_rows(parts: dict) -> dict:
    """The blocks of a bias: those of the weight's outputs."""
    return {("rows" if key == "columns" else key): value for key, value in parts.items()}

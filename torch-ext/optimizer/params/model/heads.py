"""`head_blocks`: the heads of attention weights, for split="heads".

Weights with q, k and v are cut into the outputs of each head, output projections into the inputs
from each head. The number of heads comes from the attributes and the config of the modules.
"""

from __future__ import annotations

import torch
from torch import nn

from .layouts import (
    ATTENTION,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MLA,
    NAMED_Q_K_V,
    Blocks,
    Weight,
    is_stored_transposed,
)

# fmt: off
# Names of the layers of one attention module
QUERIES = ("q_proj", "query", "to_q", "wq", "q", "Wq", "q_lin", "query_proj", "q_attn",
           "q_proj_weight")
KEYS = ("k_proj", "key", "to_k", "wk", "k", "Wk", "k_lin", "key_proj", "k_proj_weight")
VALUES = ("v_proj", "value", "to_v", "wv", "v", "Wv", "v_lin", "value_proj",
          "v_proj_weight")
OUTPUTS = (
    "o_proj", "out_proj", "dense", "wo", "o", "Wo", "out_lin", "to_out", "c_proj", "proj",
    "output_proj"
)
# fmt: on


def head_blocks(weight: Weight, fused: Blocks | None) -> Blocks | None:
    """The heads of a weight of attention; None for all other weights.

    fused: the projections of the weight by a rule of ATTENTION, None without. Raises ValueError if
    the weight belongs to attention, but the number of heads is unknown or does not divide it.
    """
    if fused is not None:
        return _of_fused(weight, fused)
    heads = query_heads(weight)
    if weight.layer in OUTPUTS and is_attention(weight):
        return _equal(weight, heads, weight.inputs, is_output=False)
    if weight.layer in QUERIES and has_one(weight.holder, KEYS, VALUES):
        return _equal(weight, heads, weight.outputs)
    if weight.layer in KEYS + VALUES and has_one(weight.holder, QUERIES, KEYS):
        return _equal(weight, key_heads(weight), weight.outputs)
    return None


def query_heads(weight: Weight) -> int:
    """The number of query heads: by name, else by the head size and the outputs of q; else 0."""
    heads, head_dim = weight.number(*HEADS), weight.number(*HEAD_DIM)
    if heads or not head_dim or not has_one(weight.holder, QUERIES):
        return heads
    return _quotient(_outputs(weight, QUERIES), head_dim)


def key_heads(weight: Weight) -> int:
    """The number of key heads of an attention module with separate q and k. A config may hold the
    number of another module, so its number counts only if the outputs of k fit. Otherwise heads of
    k are as large as heads of q. Raises ValueError if heads do not divide the outputs.
    """
    keys, kv_heads = _outputs(weight, KEYS), weight.number(*KV_HEADS)
    if kv_heads and kv_heads * weight.number(*HEAD_DIM) == keys:
        return kv_heads
    head_dim = _quotient(_outputs(weight, QUERIES), query_heads(weight))
    return _quotient(keys, head_dim)


def _outputs(weight: Weight, names: tuple[str, ...]) -> int:
    """The output size of the layer, or of the tensor, of one of `names` beside a weight."""
    name = next(name for name in names if _is_member(weight.holder, name))
    member = getattr(weight.holder, name)
    member = getattr(member, "base_layer", member)  # peft
    is_tensor = isinstance(member, torch.Tensor)
    transposed = is_stored_transposed(weight.holder, weight.holder if is_tensor else member, name)
    return (member if is_tensor else member.weight).shape[-1 if transposed else -2]


def _of_fused(weight: Weight, fused: Blocks) -> Blocks:
    """The heads of the projections `fused` of a weight, in the order of the outputs."""
    head_dim = fused.head_dim
    if not head_dim and fused.repeat == 1:
        # Equal blocks: of k and v there may be fewer heads than of q
        names = HEADS if len(fused.sizes) == 3 else KV_HEADS + HEADS
        head_dim = _quotient(fused.sizes[0], weight.number(*names))
    sizes: list[int] = []
    for size in fused.sizes * fused.repeat:
        sizes += [head_dim] * _quotient(size, head_dim) if head_dim else [size]
    sizes = [size for size in sizes if size]
    if len(set(sizes)) == 1:
        return Blocks(heads=len(sizes), dim=int(weight.transposed))
    return Blocks(tuple(sizes))


def _equal(weight: Weight, heads: int, size: int, is_output: bool = True) -> Blocks:
    """`heads` equal blocks of the `size` outputs, or inputs, of a weight."""
    _quotient(size, heads)
    return Blocks(heads=heads, dim=int(weight.transposed == is_output))


def _quotient(size: int, parts: int) -> int:
    """size / parts. Raises ValueError if `parts` is unknown or does not divide `size`."""
    if not parts:
        raise ValueError("the number of its heads is unknown")
    if size % parts:
        raise ValueError(f"{parts} does not divide {size}")
    return size // parts


def is_attention(weight: Weight) -> bool:
    """Whether the module around a weight is attention: has q, k and v, a weight with a rule of
    ATTENTION, or the attributes of latent attention.
    """
    if has_one(weight.holder, QUERIES, KEYS, VALUES):
        return True
    if isinstance(weight.holder, nn.MultiheadAttention) or all(
        hasattr(weight.holder, name) for name in MLA
    ):
        return True
    names = [name for name, _ in weight.holder.named_children()]
    # A class without a rule: its q, k and v are named by the user, or refused
    return any(NAMED_Q_K_V.search(name) for name in names) or any(
        rule.applies(weight.named(name)) for name in names for rule in ATTENTION
    )


def has_one(module: nn.Module, *choices: tuple[str, ...]) -> bool:
    """Whether a module has a child or parameter of one of the names of each of `choices`."""
    return all(any(_is_member(module, name) for name in names) for names in choices)


def _is_member(module: nn.Module, name: str) -> bool:
    """Whether a module has a child or parameter of a name."""
    return isinstance(getattr(module, name, None), nn.Module | nn.Parameter)

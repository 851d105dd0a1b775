"""Classify one parameter of a model: a hidden matrix for Muon, or one of the kinds that AdamW
steps.

`classify` decides from shapes and module types first, from the parameter's place in the model
second, and from names last.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from .model_structure import NORM, Place, Structure, _own_parameters, _upwards, is_linear

# Parts of a split, in the order of the groups.
MUON, EMBEDDINGS, HEADS, OTHER, NO_DECAY = PARTS = (
    "muon",
    "embeddings",
    "heads",
    "other",
    "no_decay",
)

# fmt: off
# Output layers under any module: of language models, of question answering, BERT's next sentence,
# ELECTRA, DiT and Flux, DeepSeek's next tokens.
HEAD_NAMES = (
    "lm_head", "embed_out", "unembed", "output_layer", "to_logits", "qa_outputs",
    "seq_relationship", "dense_prediction", "final_layer.linear", "shared_head.head"
)
# Output layers only beside the body of a model, since layers inside a model have such names as
# well.
PLACED = re.compile(
    r"^(heads?|head_dist|score|classifier(_\w+)?|aux\d)$"
    r"|_(heads?|classifier|predictor|pred|logits)$"
)
# There, too, unless the output has the size that the first layer beside it takes
VAGUE_NAMES = ("output",)
# Vague as well, and only where the module is the layer itself and no container.
LONE_NAMES = (
    "fc", "proj_out", "decoder", "last_linear", "classif", "final_layer", "final_linear",
    "head_linear"
)
# Words in the names of layers between parts of a model
NO_OUTPUTS = ("proj", "projection", "projector", "pooler")

EMBEDDING_NAMES = ("wte", "wpe")  # besides names with "embed" in them
# Last words in the names of tensors whose rows are vectors that are learned one by one.
LEARNED = (
    "latents", "latent", "queries", "query", "table", "codebook", "codevectors", "prompt",
    "prompts", "probe", "prototypes", "centroids", "slots", "registers", "ape"
)
# Tensors of Mamba, S4 and RWKV that multiply states element by element, and of graph attention.
ELEMENTWISE = (
    "A_log", "A_real", "log_A_real", "inv_A_real", "A_imag", "time_faaaa", "time_decay",
    "time_first", "r_k", "att", "att_src", "att_dst", "att_edge", "attn_l", "attn_r"
)
# Last words in names of others
SCALES = ("scale", "scales", "alpha", "beta", "gamma", "gain", "logits")
# Tensors of adapters (peft) that hold vectors, logits or packed blocks: OFT (triangles of
# skew-symmetric matrices), C3A (first columns of circulant blocks), HRA (Householder vectors),
# VB-LoRA (a bank of vectors, logits), RandLoRA.
PACKED = (
    "oft_R", "c3a_kernel", "hra_u", "vblora_logits_A", "vblora_logits_B", "vblora_vector_bank",
    "randlora_lambda", "randlora_gamma"
)
ROUTERS, GATES = ("router", "routers", "gating"), ("gate", "gates", "wg")  # words in names
NORM_NAME = re.compile(r"(^|_)norm\d*$")
LOSS = re.compile(r"Loss$|ArcFace|CosFace|AMSoftmax")  # modules whose matrices are output layers
# fmt: on


class Kind(NamedTuple):
    """A decision: the part of the split that takes a parameter, and the reason in words."""

    part: str
    why: str


def classify(param: nn.Parameter, places: list[Place], structure: Structure) -> Kind:
    """The part of the split that takes a parameter. Raises ValueError for a lazy parameter, which
    has no shape.

    places: the names of a (tied) parameter and the modules there, at least one. An embedding or a
    head at one of the places decides for all.
    """
    if isinstance(param, nn.parameter.UninitializedTensorMixin):
        raise ValueError(
            f"parameter {places[0].name} has no shape yet: call the model once before its "
            "parameters are split"
        )
    kind = _by_shape(param, "_".join(place.name.rpartition(".")[2] for place in places))
    if kind is not None:
        return kind
    for rule in RULES:
        for place in places:
            kind = rule(param, place, structure)
            if kind is not None:
                return kind
    if param.ndim > 3:
        return Kind(OTHER, f"{param.ndim}-D")
    return Kind(MUON, "matrix" if param.ndim == 2 else "stack of matrices")


def output_size(param: torch.Tensor, module: nn.Module) -> int:
    """The output size of a linear layer's weight; 0 for a tensor that is no linear layer's."""
    if not is_linear(module) or param.ndim != 2:
        return 0
    # GPT-2 of transformers keeps (in, out)
    return param.shape[1 if type(module).__name__ == "Conv1D" else 0]


def _by_shape(param: torch.Tensor, leaves: str) -> Kind | None:
    """The kind of a parameter that is no matrix by its shape. leaves: the last parts of its names,
    joined by _.
    """
    if param.ndim < 2:
        return Kind(NO_DECAY, f"{param.ndim}-D")
    if param.numel() == 1:
        return Kind(NO_DECAY, "scalar")
    if param.numel() == max(param.shape) and (param.ndim > 2 or "weight" not in leaves):
        return Kind(NO_DECAY, "vector")  # (1, 1, C), or (C, 1) that is no layer's weight
    return (
        Kind(NO_DECAY, "bias")
        if any(word.startswith("bias") for word in leaves.split("_"))
        else None
    )


def _embedding(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Embeddings by type, also those to which an adapter was added; then by the names of the
    parameter, of its module and of the module around. Deeper inside of a module with such a name is
    a tower, which holds matrices.
    """
    path, module = structure.place_in_model(place)
    module = structure.base_of(path) if module is None else module
    kinds = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or re.search(
        r"Embedding(s|Bag)?$", type(module).__name__
    )
    parts = place.name.split(".")
    named = bool({"emb", "pos"} & set(parts[-1].split("_"))) or any(
        "embed" in part or part in EMBEDDING_NAMES for part in parts[-3:]
    )
    return Kind(EMBEDDINGS, "embedding") if kinds or named else None


def _learned(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Tokens, queries, tables and the like: bare tensors whose rows are vectors."""
    parts = place.name.split(".")
    leaves = parts[-2:] if isinstance(place.module, nn.ParameterDict) else parts[-1:]
    if any(
        "token" in leaf or "position" in leaf or leaf.rpartition("_")[2] in LEARNED
        for leaf in leaves
    ):
        return Kind(EMBEDDINGS, "learned vectors")
    # LayoutLMv3: (heads, buckets)
    if len(parts) > 1 and parts[-2].endswith("_bias") and "pos" in parts[-2]:
        return Kind(EMBEDDINGS, "learned vectors")
    if param.ndim == 3 and 1 in param.shape[1:]:
        return Kind(OTHER, "stack of vectors")
    bare = not is_linear(place.module) and not isinstance(place.module, nn.modules.conv._ConvNd)
    if (
        param.ndim == 3
        and param.shape[0] == 1
        and bare
        and not re.search(r"expert|moe", place.name.lower())
    ):
        return Kind(EMBEDDINGS, "learned vectors")  # (1, N, C): one vector for each position
    return None


def _head(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Output layers, by type, by rows that are the vocabulary, by name and place."""
    path, module = structure.place_in_model(place)
    if any(LOSS.search(type(structure.modules.get(above)).__name__) for above in _upwards(path)):
        return Kind(HEADS, "head")
    weight = param
    if module is None:  # an adapter
        module = structure.base_of(path)
        weight = getattr(module, "weight", param)
    rows = output_size(weight, module)
    leaf = [] if is_linear(module) else [place.name.rpartition(".")[2]]
    parts = [*path.split("."), *leaf] if path else leaf
    named = place.name.endswith(".weight") and not isinstance(module, nn.ParameterDict)
    found = (
        _has_vocabulary_rows(weight, rows, path, structure)
        or named
        and _is_last(weight, rows, path, structure)
        or any(
            _is_head_of(
                ".".join(parts[: i + 1]), path, rows or weight.shape[0], bool(rows), structure
            )
            for i in range(len(parts))
        )
    )
    return Kind(HEADS, "head") if found else None


def _is_head_of(unit: str, path: str, rows: int, linear: bool, structure: Structure) -> bool:
    """Whether the layer at `path` is an output of `unit`, and `unit` has the name and the place of
    a head.
    """
    name = unit.rpartition(".")[2]
    known = any(f".{unit}".endswith(f".{head}") for head in HEAD_NAMES)
    placed = PLACED.search(name) is not None
    vague = name in VAGUE_NAMES or name in LONE_NAMES and unit == path
    if not (known or placed or vague) or not structure.is_output(path, unit, rows if linear else 0):
        return False
    return known or structure.is_placed_as_head(unit, rows, vague)


def _has_vocabulary_rows(weight: torch.Tensor, rows: int, path: str, structure: Structure) -> bool:
    """Whether a linear layer has as many rows as the largest embedding around it, is not repeated,
    is not square, and nothing behind it takes its output.
    """
    if not rows or structure.is_repeated(path) or weight.shape[0] == weight.shape[1]:
        return False
    found = structure.vocabulary(path)
    return (
        found is not None
        and found[1][0] == rows
        and not structure.is_input_of_later_layer(rows, path, found[0])
    )


def _is_last(weight: torch.Tensor, rows: int, path: str, structure: Structure) -> bool:
    """Whether a linear layer beside the lists of layers of a model makes fewer numbers than it
    takes, of a size that is none of the model's hidden sizes and that nothing behind takes: an
    output layer by use.
    """
    holder, _, name = path.rpartition(".")
    words = name.split("_")
    if (
        not rows
        or rows >= weight.numel() // rows
        or structure.is_in_list(path)
        or (set(words) & set(NO_OUTPUTS) and not set(words) & {"out", "logits"})
    ):
        return False
    return (
        structure.has_list(holder, path)
        and not structure.is_hidden_size(rows, holder)
        and not structure.is_input_of_later_layer(rows, path, structure.root_of(path))
    )


def _module_type(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Convolutions and norms, by type."""
    if isinstance(place.module, nn.modules.conv._ConvNd):
        return Kind(OTHER, "convolution")
    names = place.name.split(".")[-2:-1]
    norm = NORM.search(type(place.module).__name__) or names and NORM_NAME.search(names[0])
    return Kind(NO_DECAY, "norm") if norm and not is_linear(place.module) else None


def _elementwise(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Tensors that multiply element by element, biases (E, R) beside a stack (E, R, C), parts of
    parametrizations.
    """
    *path, leaf = place.name.split(".")
    state = leaf in ("B", "C", "P") and hasattr(place.module, "A_imag")  # of S4
    if leaf in ELEMENTWISE or leaf.rpartition("_")[2] in SCALES or state:
        return Kind(OTHER, "elementwise")
    beside = [p.shape[:2] for p in _own_parameters(place.module) if p.ndim == 3]
    if param.ndim == 2 and "weight" not in leaf and param.shape in beside:
        return Kind(NO_DECAY, "bias")
    # Of weight_norm without parametrizations
    scale = leaf.endswith("_g") and hasattr(place.module, f"{leaf[:-1]}v")
    if 1 in param.shape and (scale or "parametrizations" in path):
        return Kind(OTHER, "part of a parametrization")
    return None


def _packed(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Tensors of adapters that are no matrices, and a matrix that is kept in three dimensions
    (XLNet).
    """
    if set(place.name.split(".")[-3:]) & set(PACKED):
        return Kind(OTHER, "packed")
    attention = re.search(r"att(ention|n)", f"{place.name} {type(place.module).__name__}".lower())
    if (
        param.ndim == 3
        and attention
        and "expert" not in place.name.lower()
        and param.shape[0] > param.shape[1]
    ):
        return Kind(OTHER, "one matrix in three dimensions")  # (model, heads, size of a head)
    return None


def _router(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Routers and gates of few rows.

    By use: as many rows as there are experts beside. By type or name: a router, or a gate with at
    most 1/FEW as many rows as columns, unless a layer beside takes the output (a bottleneck) or has
    the same shape (a gated linear unit).
    """
    if param.ndim != 2:
        return None
    path, leaf = place.name.rpartition(".")[::2]
    linear = is_linear(place.module)
    at = path if linear or leaf == "weight" else place.name
    host = structure.host_of(path) or ""
    names = [part for part in at[len(host) :].split(".") if part][-2:]
    words = {word for name in names for word in name.lower().split("_")}
    kinds = " ".join(type(structure.modules[above]).__name__ for above in list(_upwards(path))[:2])
    router = bool(words & set(ROUTERS)) or re.search(r"Router\b|Gating", kinds) is not None
    gate = bool(words & set(GATES)) or re.search(r"Gate\b", kinds) is not None
    found = structure.is_router(param, at, router, gate, linear and not host)
    return Kind(OTHER, "router or gate") if found else None


def _single(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Weights of linear layers that are vectors."""
    return (
        Kind(OTHER, "single row or column")
        if is_linear(place.module) and 1 in param.shape
        else None
    )


RULES: tuple[Callable[[torch.Tensor, Place, Structure], Kind | None], ...] = (
    _module_type,
    _embedding,
    _learned,
    _router,
    _head,
    _elementwise,
    _packed,
    _single,
)

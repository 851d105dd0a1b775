"""`classify`: decide whether a parameter is a hidden matrix, for Muon, or of a kind for AdamW.

Decides by shapes and module types first, by the parameter's place in the model (structure.py)
second, and by names last. The lists of names come from models in use
(tests/test_classification.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from .structure import NORM, Place, Structure, is_bias_of_experts, is_linear, upwards

# Parts of a split: names of parameter groups, in the order of the groups
PARTS = ("muon", "embeddings", "heads", "other", "no_decay")
MUON, EMBEDDINGS, HEADS, OTHER, NO_DECAY = PARTS

# fmt: off
# Names of output layers, anywhere in a model: language models, question answering, BERT's next
# sentence prediction, ELECTRA, DiT and Flux, DeepSeek's multi-token prediction.
HEAD_NAMES = (
    "lm_head", "embed_out", "unembed", "output_layer", "to_logits", "qa_outputs",
    "seq_relationship", "dense_prediction", "final_layer.linear", "shared_head.head"
)
HEAD_ENDS = tuple(f".{name}" for name in HEAD_NAMES)  # of a path behind a dot
# Names of output layers if beside the body of a model (`Structure.is_placed_as_head`): hidden
# layers have these names, too.
PLACED = re.compile(
    r"^(heads?|head_dist|score|classifier(_\w+)?|aux\d)$"
    r"|_(heads?|classifier|predictor|pred|logits)$"
)
# Names as in PLACED, unless the output size is the input size of the first layer beside the module
VAGUE_NAMES = ("output",)
# Names as in VAGUE_NAMES, of single layers only, not of containers.
LONE_NAMES = (
    "fc", "proj_out", "decoder", "last_linear", "classif", "final_layer", "final_linear",
    "head_linear"
)
# Words in the names of layers between parts of a model: a narrow projection is no output layer
NO_OUTPUTS = ("proj", "projection", "projector", "pooler")

EMBEDDING_NAMES = ("wte", "wpe")  # besides all names that contain "embed"
# Last words in the names of bare tensors whose rows are vectors learned one by one, as those of an
# embedding.
LEARNED = (
    "latents", "latent", "queries", "query", "table", "codebook", "codevectors", "prompt",
    "prompts", "probe", "prototypes", "centroids", "slots", "registers", "ape"
)
# Tensors that multiply element by element: of Mamba, S4, RWKV, graph attention.
ELEMENTWISE = (
    "A_log", "A_real", "log_A_real", "inv_A_real", "A_imag", "time_faaaa", "time_decay",
    "time_first", "r_k", "att", "att_src", "att_dst", "att_edge", "attn_l", "attn_r"
)
# Last words in the names of further tensors that multiply element by element
SCALES = ("scale", "scales", "alpha", "beta", "gamma", "gain", "logits")
# Tensors of adapters (peft) whose rows and columns are not those of a matrix: OFT (triangles of
# skew-symmetric matrices), C3A (first columns of circulant blocks), HRA (Householder vectors),
# VB-LoRA (a bank of vectors, logits), RandLoRA.
PACKED = (
    "oft_R", "c3a_kernel", "hra_u", "vblora_logits_A", "vblora_logits_B", "vblora_vector_bank",
    "randlora_lambda", "randlora_gamma"
)
ROUTERS, GATES = ("router", "routers", "gating"), ("gate", "gates", "wg")  # words in names
NORM_NAME = re.compile(r"(^|_)norm\d*$")
# Types of loss modules with class weights: their matrices are output layers
LOSS = re.compile(r"Loss$|ArcFace|CosFace|AMSoftmax")
# fmt: on


class Kind(NamedTuple):
    """The decision about a parameter."""

    part: str  # one of PARTS
    why: str  # reason in words, for the report


def classify(param: nn.Parameter, places: list[Place], structure: Structure) -> Kind:
    """The part of the split for a parameter, and the reason.

    places: name and module of the parameter, several for a tied parameter, at least one. Rules are
    tried in the order of RULES, each at every place: an embedding that is tied to a hidden layer is
    an embedding. Raises ValueError for a lazy parameter, which has no shape.
    """
    if isinstance(param, nn.parameter.UninitializedTensorMixin):
        raise ValueError(
            f"parameter {places[0].name} has no shape yet: run the model once before its "
            "parameters are split"
        )
    kind = _kind(param, places, structure)
    # Marks of S4 and Mamba, and of timm's models; Muon's matrices decay as a group
    marked = getattr(param, "_no_weight_decay", False) or any(
        structure.is_without_decay(place.name) for place in places
    )
    if marked and kind.part not in (MUON, NO_DECAY):
        return Kind(NO_DECAY, f"{kind.why}, marked by the model")
    return kind


def _kind(param: nn.Parameter, places: list[Place], structure: Structure) -> Kind:
    """`classify`, without marks of the model."""
    # Shape first: a vector is no matrix under any name
    kind = _by_shape(param, "_".join(place.name.rpartition(".")[2] for place in places))
    if kind is not None:
        return kind
    for rule in RULES:
        for place in places:
            kind = rule(param, place, structure)
            if kind is not None:
                return kind
    # Muon's default is 2-D and 3-D: the axes of a tensor with more dims have unknown roles
    if param.ndim > 3:
        return Kind(OTHER, f"{param.ndim}-D")
    return Kind(MUON, "matrix" if param.ndim == 2 else "stack of matrices")


def output_size(param: torch.Tensor, module: nn.Module) -> int:
    """The output size of `module`, a linear layer with the weight `param`; 0 if `module` is no
    linear layer or `param` is not 2-D.
    """
    if not is_linear(module) or param.ndim != 2:
        return 0
    # Conv1D of transformers (GPT-2) stores (inputs, outputs), nn.Linear (outputs, inputs)
    return param.shape[1 if type(module).__name__ == "Conv1D" else 0]


def _by_shape(param: torch.Tensor, leaves: str) -> Kind | None:
    """The kind of a parameter that is no matrix by shape, or is called a bias; else None.

    leaves: the last parts of all names of the parameter, joined by "_".
    """
    if param.ndim < 2:
        return Kind(NO_DECAY, f"{param.ndim}-D")
    if param.numel() == 1:
        return Kind(NO_DECAY, "scalar")
    # (1, 1, C) and the like, and (C, 1) unless it is the weight of a layer (`_single`)
    if param.numel() == max(param.shape) and (param.ndim > 2 or "weight" not in leaves):
        return Kind(NO_DECAY, "vector")
    return (
        Kind(NO_DECAY, "bias")
        if any(word.startswith("bias") for word in leaves.split("_"))
        else None
    )


def _embedding(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Embeddings: by module type, also below an adapter; else by the last three parts of the name.

    Parts further up do not count: a module called embedder may be a whole tower with matrices.
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
    """Learned vectors, stacked as rows of bare tensors: tokens, positions, queries, tables."""
    parts = place.name.split(".")
    leaves = parts[-2:] if isinstance(place.module, nn.ParameterDict) else parts[-1:]
    if any(
        "token" in leaf or "position" in leaf or leaf.rpartition("_")[2] in LEARNED
        for leaf in leaves
    ):
        return Kind(EMBEDDINGS, "learned vectors")
    # Relative position biases of LayoutLMv3: (heads, buckets)
    if len(parts) > 1 and parts[-2].endswith("_bias") and "pos" in parts[-2]:
        return Kind(EMBEDDINGS, "learned vectors")
    if param.ndim == 3 and 1 in param.shape[1:]:
        return Kind(OTHER, "stack of vectors")
    # (1, N, C): a vector for each of N positions, unless the 1 is a number of experts
    bare = not is_linear(place.module) and not isinstance(place.module, nn.modules.conv._ConvNd)
    if (
        param.ndim == 3
        and param.shape[0] == 1
        and bare
        and not re.search(r"expert|moe", place.name.lower())
    ):
        return Kind(EMBEDDINGS, "learned vectors")
    return None


def _head(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Output layers: by type of a loss module, by vocabulary size, by use, or by name and place."""
    path, module = structure.place_in_model(place)
    if _is_of_loss(path, structure):
        return Kind(HEADS, "head")
    weight = param
    # An adapter of a head trains a head: the layer below the adapter decides
    if module is None:
        module = structure.base_of(path)
        weight = getattr(module, "weight", param)
    rows = output_size(weight, module)
    leaf = [] if is_linear(module) else [place.name.rpartition(".")[2]]
    parts = [*path.split("."), *leaf] if path else leaf
    # `_is_last` decides about weights of layers, not about bare tensors
    named = place.name.endswith(".weight") and not isinstance(module, nn.ParameterDict)
    # Any enclosing module may have the name of a head: "classifier.dense.weight"
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


def _is_of_loss(path: str, structure: Structure) -> bool:
    """Whether the layer at `path` is a loss module, a child of a loss module, or part of torch's
    adaptive softmax. Deeper layers may be of a model that the loss module holds, as in
    sentence-transformers, and are no heads for that.
    """
    near = path, path.rpartition(".")[0]
    modules = ((above, structure.modules.get(above)) for above in upwards(path))
    return any(
        isinstance(module, nn.AdaptiveLogSoftmaxWithLoss)
        or above in near
        and LOSS.search(type(module).__name__)
        for above, module in modules
    )


def _is_head_of(unit: str, path: str, rows: int, linear: bool, structure: Structure) -> bool:
    """Whether the module at `unit` has the name and the place of a head, and the layer at `path`,
    at or below `unit`, makes the output of the head.

    rows: output size of the layer; linear: whether the layer is linear.
    """
    name = unit.rpartition(".")[2]
    known = f".{unit}".endswith(HEAD_ENDS)
    placed = PLACED.search(name) is not None
    vague = name in VAGUE_NAMES or name in LONE_NAMES and unit == path
    if not (known or placed or vague) or not structure.is_output(path, unit, rows if linear else 0):
        return False
    return known or structure.is_placed_as_head(unit, rows, vague)


def _has_vocabulary_rows(weight: torch.Tensor, rows: int, path: str, structure: Structure) -> bool:
    """Whether a linear layer has as many outputs as the vocabulary (the largest embedding of the
    nearest enclosing module with embeddings) has entries, and is not square, not in a list of
    equal layers, and not followed by a layer with an input of the vocabulary's size.

    rows: output size of the layer; 0: no linear layer.
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
    """Whether a linear layer is an output layer by use: beside the lists of layers of a model, with
    fewer outputs than inputs, and with an output size that is neither a hidden size of the model
    nor an input size of a later layer.
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
    """Convolutions by module type; norms by module type or name of the module."""
    if isinstance(place.module, nn.modules.conv._ConvNd):
        return Kind(OTHER, "convolution")
    names = place.name.split(".")[-2:-1]
    norm = NORM.search(type(place.module).__name__) or names and NORM_NAME.search(names[0])
    return Kind(NO_DECAY, "norm") if norm and not is_linear(place.module) else None


def _elementwise(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Tensors that multiply element by element; biases (E, R) or (E, C) of a stack (E, R, C);
    single rows and columns of parametrizations.
    """
    *path, leaf = place.name.split(".")
    # State-space tensors of S4, whose names are too short to be listed
    state = leaf in ("B", "C", "P") and hasattr(place.module, "A_imag")
    if leaf in ELEMENTWISE or leaf.rpartition("_")[2] in SCALES or state:
        return Kind(OTHER, "elementwise")
    if leaf == "D" and hasattr(place.module, "A_log"):
        return Kind(NO_DECAY, "elementwise")  # Mamba's skip, with a row for each head in Zamba
    # "b1", "mlp_b"; a matrix beside a 3-D tensor may have the shape by chance
    named = re.search(r"(^|_)b([^a-zA-Z]|$)", leaf)
    if param.ndim == 2 and named and is_bias_of_experts(param, place.module):
        return Kind(NO_DECAY, "bias")
    if 1 in param.shape and "parametrizations" in path:
        return Kind(OTHER, "part of a parametrization")
    return None


def _gain(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Magnitudes of torch.nn.utils.weight_norm: weight_g, beside weight_v."""
    leaf = place.name.rpartition(".")[2]
    is_gain = leaf.endswith("_g") and hasattr(place.module, f"{leaf[:-1]}v")
    return Kind(NO_DECAY, "gain of weight norm") if is_gain and 1 in param.shape else None


def _packed(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Packed tensors of adapters, complex numbers as pairs, and matrices stored with three dims
    (XLNet), which are no stacks of matrices.
    """
    if set(place.name.split(".")[-3:]) & set(PACKED):
        return Kind(OTHER, "packed")
    # As torch.view_as_real makes them
    if param.ndim == 3 and param.shape[-1] == 2 and "expert" not in place.name.lower():
        return Kind(OTHER, "pairs of numbers")
    attention = re.search(r"att(ention|n)", f"{place.name} {type(place.module).__name__}".lower())
    if (
        param.ndim == 3
        and attention
        and "expert" not in place.name.lower()
        and param.shape[0] > param.shape[1]
    ):
        # (model, heads, head size)
        return Kind(OTHER, "one matrix in three dimensions")
    return None


def _router(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Routers and gates of few rows (`Structure.is_router`).

    By use: as many rows as experts beside the layer. By type or name: a router, or a gate with at
    most 1/FEW as many rows as columns. Excluded are layers beside a layer that takes the output as
    input (a bottleneck) or has an equal shape (a gated linear unit).
    """
    if param.ndim != 2:
        return None
    path, leaf = place.name.rpartition(".")[::2]
    linear = is_linear(place.module)
    # A bare tensor has a path of its own: "mlp.gate" may be a parameter
    unit = path if linear or leaf == "weight" else place.name
    host = structure.host_of(path) or ""
    # Inside an adapter only names of the adapter count: LoRA of a router is no router
    names = [part for part in unit[len(host) :].split(".") if part][-2:]
    words = {word for name in names for word in name.lower().split("_")}
    kinds = " ".join(type(structure.modules[above]).__name__ for above in list(upwards(path))[:2])
    router = bool(words & set(ROUTERS)) or re.search(r"Router\b|Gating", kinds) is not None
    gate = bool(words & set(GATES)) or re.search(r"Gate\b", kinds) is not None
    found = structure.is_router(param, unit, router, gate, linear and not host)
    return Kind(OTHER, "router or gate") if found else None


def _single(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Weights of linear layers with a single row or column."""
    return (
        Kind(OTHER, "single row or column")
        if is_linear(place.module) and 1 in param.shape
        else None
    )


# The first rule with a result decides. The order matters: a router, for example, may have the shape
# of a head.
RULES: tuple[Callable[[torch.Tensor, Place, Structure], Kind | None], ...] = (
    _gain,
    _module_type,
    _embedding,
    _learned,
    _router,
    _head,
    _elementwise,
    _packed,
    _single,
)

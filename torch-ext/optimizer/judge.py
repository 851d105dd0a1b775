"""Which parameters of a model are hidden matrices, for the default groups: by shape, module and name.

Decides about one parameter; knows neither groups nor ranks.
"""
from __future__ import annotations

import math
import re

from torch import nn

# Output heads, wherever: of language models, of BERT's next sentence, ELECTRA, DiT and Flux, DeepSeek's next tokens.
HEADS = ("lm_head", "embed_out", "unembed", "output_layer", "to_logits", "qa_outputs", "seq_relationship",
         "dense_prediction", "final_layer.linear", "shared_head.head")
TOP_HEADS = ("output", "head", "heads", "head_dist", "score", "classifier")  # output heads at the top of a model only
LONE_HEADS = ("fc", "proj_out")  # there, too, if they are no list of layers: of ResNets, of diffusers and Whisper
EMBEDDINGS = ("wte", "wpe")  # besides names with "embed" in them
LEARNED = ("latents", "queries", "table", "codebook", "codevectors")  # ends of names of tensors whose rows are vectors
# Of Mamba, S4 and RWKV, whose states are multiplied by them element by element, and of graph attention.
ELEMENTWISE = ("A_log", "A_real", "log_A_real", "inv_A_real", "A_imag", "time_faaaa", "time_decay", "time_first", "r_k",
               "att", "att_src", "att_dst", "att_edge", "attn_l", "attn_r")
# containers whose children are at the top, too; the last two are those of adapters (peft) and of trl
TOPS = ("model", "transformer", "language_model", "net", "backbone", "base_model", "pretrained_model")


def largest_table(modules):
    """The shape of the largest nn.Embedding, which is that of an output head over the same vocabulary; or None."""
    shapes = [tuple(module.weight.shape) for module in modules if isinstance(module, nn.Embedding)]
    return max(shapes, key=math.prod, default=None)


def judge(param, places, table):
    """(whether Muon takes a parameter, why). One place that is an embedding or a head decides for all tied ones.
    `places`: its names and modules; `table`: the shape of the model's largest embedding, or None.
    """
    if isinstance(param, nn.parameter.UninitializedTensorMixin):
        raise ValueError(f"parameter {places[0][0]} has no shape yet: call the model once before its parameters are "
                         "split")
    leaves = "_".join(name.rpartition(".")[2] for name, _ in places)
    found = (_by_place(param, name, module, table) for name, module in places)
    why = _by_shape(param, leaves) or next(filter(None, found), None)
    return why is None, why or ("matrix" if param.ndim == 2 else "stack of matrices")


def _by_shape(param, leaves):
    """Why a parameter is no hidden matrix, by its shape and the last parts of its names."""
    if param.ndim not in (2, 3):
        return f"{param.ndim}-D"
    if param.numel() == 1:
        return "scalar"
    if param.numel() == max(param.shape) and (param.ndim == 3 or "weight" not in leaves):
        return "vector"  # (1, 1, C), or (C, 1) that is no layer's weight
    return "bias" if any(word.startswith("bias") for word in leaves.split("_")) else None


def _by_place(param, name, module, table):
    """Why a parameter is no hidden matrix, by one of its names and the module there."""
    *path, leaf = parts = name.split(".")
    if _is_embedding(parts, module):
        return "embedding"
    if any(word in leaf for word in ("token", "position")) or leaf.endswith(LEARNED):
        return "token"
    if _is_head(param, name, module, table):
        return "head"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolution"
    if re.search(r"Norm(Gated)?\d*d?$", type(module).__name__):  # no LayerNormLinear, which is a linear layer, too
        return "norm"
    if leaf in ELEMENTWISE or leaf in ("B", "C", "P") and hasattr(module, "A_imag"):  # the second: of S4
        return "elementwise"
    if _is_bias(param, leaf, module):
        return "bias"
    scale = leaf.endswith("_g") and hasattr(module, f"{leaf[:-1]}v")  # of the weight_norm without parametrizations
    if 1 in param.shape and (scale or "parametrizations" in path):
        return "part of a parametrization"
    return None


def _is_embedding(parts, module):
    """By type, or by the names of the parameter, its module and the one around; what is deeper in is a tower."""
    return (isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or bool({"emb", "pos"} & set(parts[-1].split("_")))
            or any("embed" in part or part in EMBEDDINGS for part in parts[-3:]))


def _is_head(param, name, module, table):
    """By name, or a linear layer that is no repeated one and has the shape of the largest embedding, unless square."""
    parts = name.split(".")
    top = next((part for part in parts if part not in TOPS), parts[-1])
    if any(f".{head}." in f".{name}." for head in HEADS):
        return True
    if top in TOP_HEADS or top.endswith(("_head", "_classifier")):
        return True
    if any(part.isdigit() for part in parts):
        return False
    linear = isinstance(module, nn.Linear) or type(module).__name__.endswith("Linear")
    return top in LONE_HEADS or linear and tuple(param.shape) == table and table[0] != table[1]


def _is_bias(param, leaf, module):
    """Whether it is (E, R) beside a stack (E, R, ...) of experts in one module."""
    beside = [p.shape[:2] for p in module.parameters(recurse=False) if p.ndim == 3]
    return param.ndim == 2 and "weight" not in leaf and param.shape in beside

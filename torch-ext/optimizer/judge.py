"""Which parameters of a model are hidden matrices, for the default groups: by shape, module and name.

Decides about one parameter; knows neither groups nor ranks.
"""
from __future__ import annotations

from torch import nn

HEADS = ("lm_head", "embed_out", "unembed", "output_layer", "to_logits", "qa_outputs")  # output heads, wherever
TOP_HEADS = ("output", "head", "heads", "score", "classifier")  # output heads at the top of a model only
EMBEDDINGS = ("wte", "wpe")  # besides names with "embed" in them
LEARNED = ("latents", "queries", "table", "codebook", "codevectors")  # ends of names of tensors whose rows are vectors
# containers whose children are at the top, too; the last is that of adapters (peft)
TOPS = ("model", "transformer", "language_model", "net", "backbone", "base_model")


def judge(param, places):
    """(whether Muon takes a parameter, why). One place that is an embedding or a head decides for all tied ones."""
    if isinstance(param, nn.parameter.UninitializedTensorMixin):
        raise ValueError(f"parameter {places[0][0]} has no shape yet: call the model once before its parameters are "
                         "split")
    if param.ndim not in (2, 3):
        return False, f"{param.ndim}-D"
    if param.numel() == 1:
        return False, "scalar"
    leaves = "_".join(name.rpartition(".")[2] for name, _ in places)
    if param.numel() == max(param.shape) and (param.ndim == 3 or "weight" not in leaves):
        return False, "vector"  # (1, 1, C), or (C, 1) that is no layer's weight
    if any(word.startswith("bias") for word in leaves.split("_")):
        return False, "bias"
    for name, module in places:
        *path, leaf = parts = name.split(".")
        top = next((part for part in parts if part not in TOPS), leaf)
        if (isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or any("embed" in part for part in parts)
                or set(parts) & set(EMBEDDINGS) or {"emb", "pos"} & set(leaf.split("_"))):
            return False, "embedding"
        if any(word in leaf for word in ("token", "position")) or leaf.endswith(LEARNED):
            return False, "token"
        if set(parts) & set(HEADS) or top in TOP_HEADS or top.endswith(("_head", "_classifier")):
            return False, "head"
        if isinstance(module, nn.modules.conv._ConvNd):
            return False, "convolution"
        if "Norm" in type(module).__name__:
            return False, "norm"
        if leaf == "A_log":  # of Mamba, whose state is multiplied by it element by element
            return False, "decay"
        scale = leaf.endswith("_g") and hasattr(module, f"{leaf[:-1]}v")  # of the weight_norm without parametrizations
        if 1 in param.shape and (scale or "parametrizations" in path):
            return False, "part of a parametrization"
    return True, "matrix" if param.ndim == 2 else "stack of matrices"

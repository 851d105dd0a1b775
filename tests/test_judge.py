"""Which parameters are hidden matrices: modules with the names and classes of models that are in use."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.test_groups import split


def nest(**named) -> nn.Module:
    """A model of these modules and tensors, whose names have __ in place of dots."""
    model = nn.Module()
    for name, made in named.items():
        *path, leaf = name.split("__")
        at = model
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        if isinstance(made, nn.Module):
            at.add_module(leaf, made)
        else:
            at.register_parameter(leaf, nn.Parameter(made))
    return model


def linear(rows=8, columns=8):
    return nn.Linear(columns, rows, bias=False)


def taken(**named) -> set[str]:
    """The names, with __ in place of dots, of what Muon takes of a model that has a hidden matrix besides."""
    by_name = split(nest(layers__0=linear(), **named))
    assert by_name.pop("layers.0.weight")
    return {name.replace(".", "__") for name, use_muon in by_name.items() if use_muon}


class Fused(nn.Module):
    """A norm and linear layers in one module, as Transformer Engine's."""

    def __init__(self):
        super().__init__()
        self.layer_norm_weight, self.layer_norm_bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.fc1_weight, self.fc2_weight = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(8, 12))


@pytest.mark.parametrize("name", ["LayerNormLinear", "LayerNormMLP", "TELayerNormColumnParallelLinear"])
def test_norms_fused_with_linear_layers_hold_matrices(name):
    assert taken(mlp=type(name, (Fused,), {})()) == {"mlp__fc1_weight", "mlp__fc2_weight"}


@pytest.mark.parametrize("name", ["T5LayerNorm", "LayerNorm2d", "RMSNormGated", "GroupNorm32", "BatchNorm1d", "Norm"])
def test_norms_by_the_end_of_their_name(name):
    assert taken(post=type(name, (Fused,), {})()) == set()


HEADS = ["fc", "backbone__fc", "proj_out", "model__proj_out", "final_layer__linear", "cls__seq_relationship",
         "head_dist", "discriminator_predictions__dense_prediction", "model__layers__61__shared_head__head",
         "pretrained_model__score", "base_model__model__fc__modules_to_save__default"]


@pytest.mark.parametrize("head", HEADS)
def test_heads_by_name(head):
    """Of ResNet, diffusers and Whisper, DiT and Flux, BERT, DeiT, ELECTRA, DeepSeek, and under trl's and peft's."""
    assert taken(**{head: linear(5)}) == set()


@pytest.mark.parametrize("name", ["blocks__0__proj_out", "blocks__0__fc", "fc1", "c_fc", "fc__0", "final_layer__adaLN",
                                  "cls__predictions__transform", "vocab_transform", "discriminator_predictions__dense",
                                  "decoder__fc", "attn__proj_out"])
def test_hidden_matrices_whose_names_are_like_those_of_heads(name):
    assert taken(**{name: linear(12)}) == {f"{name}__weight"}


@pytest.mark.parametrize("head", ["decoder", "cls__predictions__decoder", "predictions__decoder", "vocab_projector",
                                  "lm_loss", "model__anything"])
def test_a_head_by_the_shape_of_the_largest_embedding(head):
    """ModernBERT, BERT, ALBERT, DistilBERT, XLNet, none of them tied."""
    tables = {"tokens": nn.Embedding(40, 8), "kinds": nn.Embedding(12, 8)}
    assert taken(**tables, **{head: linear(40)}) == set()
    parallel = type("ColumnParallelLinear", (nn.Module,), {})()
    parallel.weight = nn.Parameter(torch.randn(40, 8))
    assert taken(**tables, **{head: parallel}) == set()


@pytest.mark.parametrize(("table", "name", "shape"), [
    ((40, 8), "blocks__0__up", (40, 8)), ((40, 8), "down", (8, 40)), ((40, 8), "up", (12, 8)), ((8, 8), "up", (8, 8))],
    ids=["repeated", "transposed", "of a smaller embedding", "square"])
def test_no_head_by_its_shape(table, name, shape):
    assert taken(tokens=nn.Embedding(*table), kinds=nn.Embedding(*min(table, (12, 8))), **{name: linear(*shape)}) == {
        f"{name}__weight"}


@pytest.mark.parametrize("names", [
    {"att__time_faaaa": (2, 4), "att__time_decay": (2, 4), "att__r_k": (2, 4)}, {"gat__att": (1, 2, 4)},
    {"gat__att_src": (1, 2, 4), "gat__att_dst": (1, 2, 4)}, {"kernel__log_A_real": (8, 4), "kernel__A_imag": (8, 4),
                                                            "kernel__C": (8, 4, 2)},
    {"kernel__A_real": (8, 4), "kernel__A_imag": (8, 4), "kernel__B": (1, 4, 2), "kernel__P": (1, 4, 2)},
    {"kernel__log_A_real": (8, 4)}, {"kernel__inv_A_real": (8, 4)}, {"att__time_first": (2, 4)},
    {"gat__att_edge": (1, 2, 4)}, {"gat__attn_l": (1, 2, 4)}, {"gat__attn_r": (1, 2, 4)}],
    ids=["RWKV", "GATv2", "GAT", "S4D", "S4", "log_A_real", "inv_A_real", "time_first", "att_edge", "attn_l", "attn_r"])
def test_what_is_multiplied_element_by_element_is_no_matrix(names):
    assert taken(**{name: torch.randn(shape) for name, shape in names.items()}) == set()


def test_names_of_states_are_also_names_of_matrices():
    """As of factors by hand: only beside A_imag is a C that of S4. RWKV's low-rank factors are matrices."""
    names = {"factors__B": (8, 4), "factors__C": (4, 8), "att__time_decay_w1": (8, 4), "att__time_maa_w2": (5, 4, 8)}
    assert taken(**{name: torch.randn(shape) for name, shape in names.items()}) == set(names)


def test_biases_of_a_stack_beside_it():
    shapes = {"experts__w1": (3, 12, 8), "experts__b1": (3, 12), "experts__router": (3, 8), "experts__weight": (3, 12)}
    assert taken(**{name: torch.randn(shape) for name, shape in shapes.items()}) == set(shapes) - {"experts__b1"}


def test_towers_inside_of_embeddings():
    """Phi-3-vision; an encoder that somebody calls embedder. Near the parameter, the name counts."""
    tower = "model__vision_embed_tokens__img_processor__layers__0__mlp"
    names = (tower + "__fc1", "embedder__layers__0__attn__qkv", "patch_embed__proj", "time_embedding__linear_1",
             "vision_embed_tokens", "embedding_hidden_mapping_in")
    assert taken(**{name: linear(12) for name in names}) == {f"{name}__weight" for name in names[:2]}
    by_name = split(nest(embedder=nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 1)))
    assert sum(by_name.values()) == 4

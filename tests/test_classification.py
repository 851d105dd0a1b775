"""Which parameters are hidden matrices: modules with the names and classes of models that are in use."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.ranks import package
from tests.test_param_groups import split


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
    assert taken(**{name: torch.randn(shape) for name, shape in shapes.items()}) == {"experts__w1", "experts__weight"}


def test_towers_inside_of_embeddings():
    """Phi-3-vision; an encoder that somebody calls embedder. Near the parameter, the name counts."""
    tower = "model__vision_embed_tokens__img_processor__layers__0__mlp"
    names = (tower + "__fc1", "embedder__layers__0__attn__qkv", "patch_embed__proj", "time_embedding__linear_1",
             "vision_embed_tokens", "embedding_hidden_mapping_in")
    assert taken(**{name: linear(12) for name in names}) == {f"{name}__weight" for name in names[:2]}
    by_name = split(nest(embedder=nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 1)))
    assert sum(by_name.values()) == 4


# heads by their place --------------------------------------------------------------------------------------------

class Net(nn.Module):
    """A model with a body and an output layer of some name."""

    def __init__(self, head, classes=10, dim=16):
        super().__init__()
        self.blocks = nn.ModuleList(linear(dim, dim) for _ in range(2))
        self.add_module(head, linear(classes, dim))


def held(**modules) -> nn.Module:
    """A module with these attributes."""
    model = nn.Module()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


HOLDERS = {
    "attribute": lambda net: held(vit=net), "two deep": lambda net: held(agent=held(policy=net)),
    "beside another": lambda net: held(policy=net, value_model=Net("fc", 3)),
    "list": lambda net: held(stages=nn.ModuleList([net])), "pipeline": lambda net: held(parts=nn.ModuleList(
        [held(embed=nn.Embedding(11, 16)), held(layers=nn.ModuleList([linear(16, 16)])), net])),
    "ensemble": lambda net: held(nets=nn.ModuleList([net, type(net)(list(net._modules)[-1])])),
    "dict": lambda net: held(nets=nn.ModuleDict({"student": net, "teacher": Net("fc", 3)})),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("head", ["head", "classifier", "score", "output", "fc", "lm_head", "decoder", "value_head"])
def test_a_head_is_known_however_deep_the_model_is_held(head, holder):
    by_name = split(HOLDERS[holder](Net(head)))
    heads = [use_muon for name, use_muon in by_name.items() if name.endswith(f"{head}.weight")]
    assert heads and not any(heads)
    assert all(use_muon for name, use_muon in by_name.items() if ".blocks." in name)


@pytest.mark.parametrize("head", ["head", "fc", "output"])
@pytest.mark.parametrize("hold", [lambda net: held(student=net, teacher=Net("fc", 3, 12)),
                                  lambda net: held(parts=nn.ModuleList([net, held(net=Net("fc", 3, 12))]))])
def test_modules_that_only_hold_models_do_not_change_the_split(head, hold):
    """Also of a head as wide as its model, which would be a hidden layer anywhere but at the top."""
    bare = split(Net(head, 16))
    assert bare[f"{head}.weight"] is False
    found = split(hold(Net(head, 16)))
    assert [use for name, use in found.items() if name.startswith(("student.", "parts.0."))] == list(bare.values())


def test_heads_of_small_networks_in_a_module():
    """Policy and value of reinforcement learning, without lists of layers; as many actions as observations."""
    def net(outputs):
        return held(fc1=linear(64, 4), fc2=linear(64, 64), head=linear(outputs, 64))

    by_name = split(held(policy=net(4), value=net(1)))
    assert {name for name, use_muon in by_name.items() if not use_muon} == {"policy.head.weight", "value.head.weight"}


def test_the_last_stage_of_a_pipeline_alone():
    """Without the embedding by whose shape the head of the whole model is known."""
    assert taken(decoder=linear(10)) == set()


@pytest.mark.parametrize("names", ["transformer_in__proj_in", "attn__output"])
def test_outputs_of_residual_blocks_are_hidden(names):
    """Layers at the top of a model whose output goes back to the size that the block takes (UNet3D, attention)."""
    block = names.split("__")[0]
    hidden = {f"{block}__norm": nn.LayerNorm(8), f"{block}__proj_in": linear(24, 8),
              f"{block}__blocks": nn.ModuleList([linear(24, 24)]), f"{block}__proj_out": linear(8, 24),
              f"{block}__output": linear(8, 24)}
    assert f"{block}__proj_out__weight" in taken(**hidden) and f"{block}__output__weight" in taken(**hidden)


def test_layers_below_a_head_are_hidden():
    """RoBERTa, VGG, Segformer, box heads: only the last one is an output, and none that a later one takes."""
    mlp = nn.Sequential(linear(32, 8), nn.ReLU(), linear(32, 32), nn.ReLU(), linear(5, 32))
    boxes = nn.ModuleList([linear(16, 8), linear(16, 16), linear(4, 16)])
    found = taken(lm_head__dense=linear(8, 8), lm_head__layer_norm=nn.LayerNorm(8), lm_head__decoder=linear(40, 8),
                  classifier=mlp, decode_head__linear_c=nn.ModuleList([linear(24, 8), linear(24, 16)]),
                  decode_head__fuse=nn.Conv2d(24, 3, 1), bbox_predictor__layers=boxes)
    assert found == {"lm_head__dense__weight", "classifier__0__weight", "classifier__2__weight",
                     "decode_head__linear_c__0__weight", "decode_head__linear_c__1__weight",
                     "bbox_predictor__layers__0__weight", "bbox_predictor__layers__1__weight"}


def test_outputs_by_use():
    """Fewer numbers than it takes, of a size that no layer has: whatever the name. A projection between parts is not
    meant, and what feeds the layers is not, either.
    """
    names = {"predict_state": linear(5, 8), "feat_out": linear(3, 8), "visual_projection": linear(6, 8),
             "proj_in": linear(8, 30)}
    assert taken(**names) == {"visual_projection__weight", "proj_in__weight"}


def test_heads_by_type():
    """torch's adaptive softmax; class centers in a loss (wav2vec's AMSoftmaxLoss)."""
    loss = type("AMSoftmaxLoss", (nn.Module,), {})()
    loss.weight = nn.Parameter(torch.randn(8, 3))
    adaptive = nn.AdaptiveLogSoftmaxWithLoss(8, 40, [10, 20], div_value=2.0)
    assert taken(body__crit=adaptive, objective=loss) == set()


def test_a_model_inside_a_loss_module():
    """sentence-transformers' SoftmaxLoss holds the model beside a head of its own."""
    model = nest(embed=nn.Embedding(40, 8), layers__0=linear(), lm_head=linear(40))
    loss = type("SoftmaxLoss", (nn.Module,), {})()
    loss.model, loss.classifier = nn.Sequential(model), linear(3, 24)
    assert {name for name, use_muon in split(loss).items() if use_muon} == {"model.0.layers.0.weight"}


def test_a_head_of_another_width_than_the_embedding():
    """RemBERT: (vocabulary, 24) beside an embedding (vocabulary, 8). What a later layer takes is no head."""
    assert taken(tokens=nn.Embedding(40, 8), cls__predictions__out=linear(40, 24)) == set()
    assert taken(tokens=nn.Embedding(40, 8), up=linear(40, 8), down=linear(8, 40)) == {"up__weight", "down__weight"}


# tensors that are no matrices ------------------------------------------------------------------------------------

class Adapter(nn.Module):
    """A layer of peft: the layer itself, and named tensors of one or more adapters."""

    def __init__(self, base, **tensors):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        for name, tensor in tensors.items():
            self.add_module(name, nn.ParameterDict({"default": nn.Parameter(tensor)})
                            if isinstance(tensor, torch.Tensor) else nn.ModuleDict({"default": tensor}))


PACKED = {"oft_R": (8, 28), "c3a_kernel": (4, 4, 16), "hra_u": (8, 4), "vblora_vector_bank": (16, 8),
          "vblora_logits_A": (4, 8, 16), "randlora_lambda": (8, 2), "trainable_tokens_delta": (2, 8),
          "adaption_prompt": (1, 4, 8), "prefix_task_rows": (3, 1, 8), "prefix_task_cols": (3, 4, 1)}


@pytest.mark.parametrize("name", PACKED)
def test_tensors_of_adapters_that_are_no_matrices(name):
    """Of OFT, C3A, HRA, VB-LoRA, RandLoRA, trainable tokens, adaption prompts, multitask prompts."""
    assert taken(model__q_proj=Adapter(linear(), **{name: torch.randn(PACKED[name])})) == set()


def test_adapters_of_embeddings_and_heads_belong_to_them():
    """By the type of the layer below, under any name; and factors of hidden layers are matrices, also of few rows."""
    def low():
        return Adapter(linear(), lora_A=linear(2, 8), lora_B=linear(8, 2))

    tied = Adapter(nn.Embedding(40, 8), lora_embedding_A=torch.randn(2, 40), lora_embedding_B=torch.randn(8, 2))
    head = Adapter(linear(40, 8), lora_A=linear(2, 8), lora_B=linear(40, 2))
    found = taken(model__shared=tied, lm_head=head, model__layers=nn.ModuleList(
        [held(gate_proj=low(), fc=low())]))
    assert found == {f"model__layers__0__{name}__lora_{factor}__default__weight"
                     for name in ("gate_proj", "fc") for factor in "AB"}


@pytest.mark.parametrize(("name", "shape"), [
    ("resampler__latent_query", (6, 8)), ("prompt", (1, 6, 8)), ("block__modulation", (1, 6, 8)),
    ("attn__compress_ape", (4, 8)), ("attn__q_norm__scale", (3, 8)), ("block__alpha", (4, 8)),
    ("encoder__rel_pos_bias", (4, 12))])
def test_learned_vectors_and_scales_by_name(name, shape):
    """Aria, VPT, Wan, GLM's and DeepSeek's compressors, norms for each head, EfficientViM, LayoutLMv3."""
    made = linear(*shape) if "bias" in name else torch.randn(shape)
    assert taken(**{name: made}) == set()


class RelativeAttention(nn.Module):
    """XLNet: one matrix (model, heads * size) in three dimensions. Beside it, heads that are a stack of matrices."""

    def __init__(self):
        super().__init__()
        self.q, self.per_head = nn.Parameter(torch.randn(16, 4, 4)), nn.Parameter(torch.randn(4, 16, 4))


def test_one_matrix_in_three_dimensions_is_no_stack():
    assert taken(blocks=nn.ModuleList([held(rel_attn=RelativeAttention())])) == {"blocks__0__rel_attn__per_head"}
    assert taken(attn__experts__w1=torch.randn(16, 4, 4)) == {"attn__experts__w1"}


# routers ---------------------------------------------------------------------------------------------------------

def moe(experts: int, **gates) -> nn.Module:
    stack = held()
    stack.up, stack.down = (nn.Parameter(torch.randn(experts, *shape)) for shape in ((24, 16), (16, 24)))
    return held(experts=stack, **gates)


ROUTERS = {
    "stack": lambda: moe(3, gate=linear(3, 16)), "any name": lambda: moe(3, pick=linear(3, 16)),
    "list": lambda: held(experts=nn.ModuleList(linear(24, 16) for _ in range(5)), wg=linear(5, 16)),
    "inside": lambda: moe(3, router=held(layer=linear(3, 16))), "bare": lambda: moe(3, gate=type(
        "TopKGate", (nn.Module,), {})()), "one row": lambda: moe(3, shared_expert_gate=linear(1, 16)),
    "experts as wide as they are many": lambda: held(  # Qwen3-Next: 512 experts of inner size 512
        gate=linear(3, 16),
        experts=nn.ModuleList(held(gate_proj=linear(3, 16), up_proj=linear(3, 16)) for _ in range(3))),
    "more experts than inputs": lambda: moe(20, router=linear(20, 16)),
    "noisy": lambda: moe(3, router=held(w_gate=linear(3, 16), w_noise=linear(3, 16))),
    "stored the other way": lambda: moe(3, gate=nn.Module()),
    "gate of heads": lambda: held(gate=linear(2, 32)), "by name": lambda: held(modality_router=linear(4, 16)),
}


@pytest.mark.parametrize("kind", ROUTERS)
def test_routers_and_gates_of_few_rows_go_to_adamw(kind):
    layer = ROUTERS[kind]()
    if kind in ("bare", "stored the other way"):
        layer.gate.weight = nn.Parameter(torch.randn((3, 16) if kind == "bare" else (16, 3)))
    by_name = split(held(layers=nn.ModuleList([held(mlp=layer), held(mlp=linear(16, 16))])))
    assert {name for name, use_muon in by_name.items() if use_muon and "experts" not in name} == {"layers.1.mlp.weight"}
    assert all(use_muon for name, use_muon in by_name.items() if "experts" in name)


@pytest.mark.parametrize("rows", [16, 32])
def test_gate_and_up_in_one_weight_with_a_row_for_each_expert(rows):
    fused = held(gate_up_proj=linear(rows, 16))
    assert "mlp__shared_expert__gate_up_proj__weight" in taken(mlp=moe(rows, shared_expert=fused))


def test_biases_of_experts_are_no_second_half_of_a_gated_unit():
    """The biases of GPT-OSS's experts have the router's shape: its experts are a module, or beside the gate."""
    shapes = {"up": (3, 16, 24), "up_bias": (3, 24), "down": (3, 24, 16), "down_bias": (3, 16)}
    other = {"mlp1": (3, 24, 16), "mlp1_b": (3, 24), "mlp2": (3, 16, 24), "mlp2_b": (3, 16)}
    routed = {f"blocks__0__mlp__experts__{name}": torch.randn(shape) for name, shape in shapes.items()}
    routed |= {f"blocks__1__mlp__{name}": torch.randn(shape) for name, shape in other.items()}
    found = taken(blocks__0__mlp__router=linear(3, 16), blocks__1__mlp__gate=linear(3, 16), **routed)
    assert found == {name for name in routed if not name.endswith(("_bias", "_b"))}


def test_a_matrix_beside_a_tensor_of_three_dims():
    """Layers of splines and raw convolutions hold no experts and no biases; pairs are complex numbers."""
    splines = type("KANLinear", (nn.Module,), {})()
    splines.base_weight, splines.spline = nn.Parameter(torch.randn(4, 32)), nn.Parameter(torch.randn(4, 32, 8))
    shapes = {"W": (16, 16), "kernel": (16, 16, 3), "B": (16, 8, 2)}
    scan = {"x_proj": (2, 12, 8), "D": (2, 12), "A_log": (2, 12, 4)}  # Zamba's heads
    named = {"mixer": shapes, "scan": scan}
    found = taken(kan=splines, **{f"{at}__{name}": torch.randn(shape) for at in named
                                  for name, shape in named[at].items()})
    assert found == {"kan__base_weight", "kan__spline", "mixer__W", "mixer__kernel", "scan__x_proj"}
    lora = {"mixer__B": torch.randn(16, 16), "mixer__kernel": torch.randn(16, 16, 3)}
    stack = {"experts__w": torch.randn(4, 16, 2), "mlp__W": torch.randn(4, 16, 24), "mlp__b": torch.randn(4, 24)}
    assert taken(**lora, **stack) == {*lora, "experts__w", "mlp__W"}


def test_marks_of_a_model_against_decay():
    """The attribute that S4 and Mamba set, and the method of timm's models; gains of the older weight_norm."""
    model = nest(layers__0=linear(), scan__A_log=torch.randn(8, 4), pos_embed=torch.randn(1, 9, 8), cls=linear(16, 8))
    model.scan.A_log._no_weight_decay = True
    model.no_weight_decay = lambda: {"pos_embed", "layers.0.weight"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(model.cls)
    groups = {group["name"]: group for group in package().get_default_muon_param_groups(model)}
    model.scan.no_weight_decay = lambda key: {key}
    with pytest.raises(TypeError, match="no_weight_decay.. of module scan .* must take no arguments"):
        package().get_default_muon_param_groups(model)
    assert set(groups["no_decay"]["param_names"]) == {"scan.A_log", "pos_embed", "cls.weight_g"}
    assert groups["no_decay"]["weight_decay"] == 0 and "layers.0.weight" in groups["muon"]["param_names"]


def test_gates_that_are_hidden_layers():
    """Gated linear units, also narrow ones of a shared expert with as many rows as there are experts; bottlenecks."""
    shared = held(gate_proj=linear(3, 64), up_proj=linear(3, 64), down_proj=linear(64, 3))
    stack = moe(3, shared_expert=shared)
    forget = held(f_a_proj=linear(2, 64), f_b_proj=linear(64, 2))
    found = taken(blocks=nn.ModuleList([held(mlp=stack, forget_gate=forget, gate=linear(64, 64))]))
    names = ("mlp__shared_expert__gate_proj", "mlp__shared_expert__up_proj", "mlp__shared_expert__down_proj",
             "forget_gate__f_a_proj", "forget_gate__f_b_proj", "gate")
    assert found == {"blocks__0__mlp__experts__up", "blocks__0__mlp__experts__down"} | {
        f"blocks__0__{name}__weight" for name in names}


# public models, where their packages are installed ---------------------------------------------------------------

def test_models_of_transformers():
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
             "intermediate_size": 96}
    xlnet = transformers.XLNetConfig(vocab_size=160, d_model=64, n_layer=1, n_head=4, d_inner=96)
    mixtral = transformers.MixtralConfig(**small, num_key_value_heads=2, num_local_experts=4)
    with torch.device("meta"):
        models = [transformers.RobertaForMaskedLM(transformers.RobertaConfig(**small)),
                  transformers.XLNetLMHeadModel(xlnet), transformers.MixtralForCausalLM(mixtral)]
    roberta, xlnet, mixtral = ({name: group["name"] for group in package().get_default_muon_param_groups(model)
                                for name in group["param_names"]} for model in models)
    assert roberta["lm_head.dense.weight"] == "muon"
    assert xlnet["transformer.layer.0.rel_attn.q"] == "other"
    assert mixtral["model.layers.0.mlp.gate.weight"] == "other" and mixtral["lm_head.weight"] == "heads"

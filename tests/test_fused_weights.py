"""`get_default_muon_param_groups(model, split="auto")`: which projections a fused weight holds.

Each module below has the class name, the attributes and the reshapes of a public model, at a small size.
"""

from __future__ import annotations

import re
import types

import pytest
import torch
from torch import nn

from tests.ranks import package, part

E, H, D, KV, INNER = 24, 6, 4, 2, 40  # hidden size, heads, head size, key heads, inner size


def found(model, split="auto", **options):
    """{name: (split, transposed)} of the parameters for Muon, after checks of the groups."""
    groups = package().get_default_muon_param_groups(model, split=split, **options)
    package().Muon([dict(group) for group in groups])  # all keys are allowed, all sizes add up
    params = [p for group in groups for p in group["params"]]
    assert len(params) == len(set(params)) == len(list(model.parameters()))
    muon = [group for group in groups if group["use_muon"]]
    assert [group["use_muon"] for group in groups] == sorted([group["use_muon"] for group in groups], reverse=True)
    keys = [(repr(group.get("split")), group.get("transposed", False)) for group in muon]
    assert len(keys) == len(set(keys)), "one group for each split"
    assert all(group["name"] == "muon" and group["adjust_lr_fn"] == "match_rms_adamw" for group in muon)
    return {name: (group.get("split"), group.get("transposed", False))
            for group in muon for name in group["param_names"]}


def splits(model, **options):
    """{name: split} of the parameters with a split."""
    return {name: split for name, (split, _) in found(model, **options).items() if split is not None}


def kind(name, path="model", **members):
    """A module of a class of this name and dotted path, with these children, parameters and attributes."""
    module = type(name, (nn.Module,), {"__module__": path})()
    for key, value in members.items():
        setattr(module, key, value)
    return module


def linear(rows, columns):
    return nn.Linear(columns, rows, bias=False)


def within(**members):
    """A model with a list of two layers that hold these modules."""
    layers = nn.ModuleList([nn.ModuleDict(members)])
    return kind("Model", layers=layers, norm=nn.LayerNorm(E))


def conv1d(columns, rows):
    module = type("Conv1D", (nn.Module,), {})()
    module.weight = nn.Parameter(torch.randn(rows, columns))
    return module


def attention(name, layer, rows, path="model", **attributes):
    """An attention module with a fused projection and an output projection."""
    return kind(name, path, **{layer: linear(rows, E)}, dense=linear(E, E), **attributes)


HEADS = {"num_attention_heads": H, "head_size": D}
GROUPED = {"num_heads": H, "num_key_value_heads": KV, "head_dim": D}
PER_HEAD = {"rows": [D, D, D], "repeat": H}
BLOCKS, GQA = {"rows": [E, E, E]}, {"rows": [E, KV * D, KV * D]}
GROUPS = {"rows": [H // KV * D, D, D], "repeat": KV}
ALL = (H + 2 * KV) * D  # rows of q, k, v with KV key heads
VISION = "transformers.models.qwen2_vl.modeling_qwen2_vl"

ATTENTION = {
    "GPT-NeoX": (attention("GPTNeoXAttention", "query_key_value", 3 * E, **HEADS), PER_HEAD),
    "BLOOM": (attention("BloomAttention", "query_key_value", 3 * E, num_heads=H, head_dim=D), PER_HEAD),
    "Persimmon": (attention("PersimmonAttention", "query_key_value", 3 * E, num_heads=H, head_dim=D), PER_HEAD),
    "MiniMax": (attention("MiniMaxLightningAttention", "qkv_proj", 3 * E, num_attention_heads=H, head_dim=D), PER_HEAD),
    "DeBERTa": (attention("DisentangledSelfAttention", "in_proj", 3 * E, num_attention_heads=H), PER_HEAD),
    "Falcon, new": (attention("FalconAttention", "query_key_value", ALL, num_heads=H, num_kv_heads=KV, head_dim=D,
                              new_decoder_architecture=True, multi_query=True), GROUPS),
    "Falcon, multi-query": (attention("FalconAttention", "query_key_value", E + 2 * D, num_heads=H, num_kv_heads=1,
                                      head_dim=D, new_decoder_architecture=False, multi_query=True),
                            {"rows": [E, D, D]}),
    "Falcon, heads": (attention("FalconAttention", "query_key_value", 3 * E, num_heads=H, num_kv_heads=H, head_dim=D,
                                new_decoder_architecture=False, multi_query=False), PER_HEAD),
    "MPT": (attention("MptAttention", "Wqkv", 3 * E, n_heads=H, head_dim=D), BLOCKS),
    "CodeGen": (attention("CodeGenAttention", "qkv_proj", 3 * E, num_attention_heads=8, head_dim=3),
                {"rows": [6, 6, 6], "repeat": 4}),
    "DBRX": (attention("DbrxAttention", "Wqkv", ALL, **GROUPED), GQA),
    "Phi-3": (attention("Phi3Attention", "qkv_proj", ALL, **GROUPED), GQA),
    "InternLM2": (attention("InternLM2FlashAttention2", "wqkv", ALL, **GROUPED), GROUPS),
    "ChatGLM2": (attention("SelfAttention", "query_key_value", ALL, multi_query_attention=True,
                           num_attention_heads_per_partition=H, hidden_size_per_attention_head=D,
                           num_multi_query_groups_per_partition=KV), GQA),
    "ChatGLM2, heads": (attention("SelfAttention", "query_key_value", 3 * E, multi_query_attention=False,
                                  num_attention_heads_per_partition=H, hidden_size_per_attention_head=D), PER_HEAD),
    "Baichuan": (attention("BaichuanAttention", "W_pack", 3 * E, num_heads=H, head_dim=D), BLOCKS),
    "Qwen": (attention("QWenAttention", "c_attn", 3 * E, num_heads=H, head_dim=D), BLOCKS),
    "nanoGPT": (attention("CausalSelfAttention", "c_attn", 3 * E, n_head=H, n_embd=E), BLOCKS),
    "StarCoder": (attention("GPTBigCodeAttention", "c_attn", E + 2 * D, num_heads=H, head_dim=D, multi_query=True),
                  {"rows": [E, D, D]}),
    "StarCoder, heads": (attention("GPTBigCodeAttention", "c_attn", 3 * E, num_heads=H, head_dim=D, multi_query=False),
                         PER_HEAD),
    "ModernBERT": (attention("ModernBertAttention", "Wqkv", 3 * E, head_dim=D,
                             config=types.SimpleNamespace(num_attention_heads=H)), BLOCKS),
    "flash-attn": (attention("MHA", "Wqkv", ALL, num_heads=H, num_heads_kv=KV, head_dim=D), GQA),
    "Qwen2-VL": (attention("VisionAttention", "qkv", 3 * E, VISION, num_heads=H, head_dim=D), BLOCKS),
    "EXAONE 4.5": (attention("Exaone4_5_VisionAttention", "qkv", ALL,
                             "transformers.models.exaone4_5.modeling_exaone4_5", **GROUPED), GQA),
    "timm": (attention("Attention", "qkv", 3 * E, "timm.layers.attention", num_heads=H, head_dim=D), BLOCKS),
    "timm, TinyViT": (attention("Attention", "qkv", 8 * H, "timm.models.tiny_vit", num_heads=H, key_dim=2, val_dim=4),
                      {"rows": [2, 2, 4], "repeat": H}),
    "torchvision": (attention("ShiftedWindowAttention", "qkv", 3 * E, "torchvision.models.swin_transformer"), BLOCKS),
    "Megatron": (attention("SelfAttention", "linear_qkv", ALL, "megatron.core.transformer.attention",
                           num_attention_heads_per_partition=H, num_query_groups_per_partition=KV,
                           hidden_size_per_attention_head=D), GROUPS),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_q_k_v_of_attention(name):
    module, split = ATTENTION[name]
    (layer,) = [key for key in module._modules if key != "dense"]
    assert found(within(attn=module)) == {f"layers.0.attn.{layer}.weight": (split, False),
                                          "layers.0.attn.dense.weight": (None, False)}


def test_numbers_come_from_the_config_where_the_module_has_none():
    config = types.SimpleNamespace(num_attention_heads=H)
    module = attention("GPTNeoXAttention", "query_key_value", 3 * E, config=config)
    assert list(splits(within(attn=module)).values()) == [PER_HEAD]
    tower = within(attn=attention("Phi3Attention", "qkv_proj", ALL))
    tower.config = types.SimpleNamespace(num_attention_heads=H, num_key_value_heads=KV, head_dim=D)
    outer = kind("Outer", tower=tower, config=types.SimpleNamespace(num_attention_heads=1))
    assert list(splits(outer).values()) == [GQA]


@pytest.mark.parametrize("dims", [{}, {"kdim": 10, "vdim": 12}])
def test_torch_multi_head_attention(dims):
    """One weight for q, k, v; with other sizes of keys or values, three weights."""
    names = splits(within(attn=nn.MultiheadAttention(E, H, **dims)))
    assert names == ({} if dims else {"layers.0.attn.in_proj_weight": BLOCKS})


def test_torch_transformer_and_recurrent_layers():
    layer = nn.TransformerEncoderLayer(E, H, INNER)
    model = kind("Model", encoder=nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), rnn=nn.LSTM(E, 10),
                 gru=nn.GRU(E, 10))
    assert splits(model) == {
        "encoder.layers.0.self_attn.in_proj_weight": BLOCKS,
        "rnn.weight_ih_l0": {"rows": [10] * 4}, "rnn.weight_hh_l0": {"rows": [10] * 4},
        "gru.weight_ih_l0": {"rows": [10] * 3}, "gru.weight_hh_l0": {"rows": [10] * 3}}


def test_gpt2_stores_transposed():
    attn = kind("GPT2Attention", c_attn=conv1d(3 * E, E), c_proj=conv1d(E, E), num_heads=H, is_cross_attention=False)
    cross = kind("GPT2Attention", c_attn=conv1d(2 * E, E), q_attn=conv1d(E, E), is_cross_attention=True)
    mlp = kind("GPT2MLP", c_fc=conv1d(4 * E, E), c_proj=conv1d(E, 4 * E))
    assert found(within(attn=attn, cross=cross, mlp=mlp)) == {
        "layers.0.attn.c_attn.weight": ({"columns": [E, E, E]}, True), "layers.0.attn.c_proj.weight": (None, True),
        "layers.0.cross.c_attn.weight": ({"columns": [E, E]}, True), "layers.0.cross.q_attn.weight": (None, True),
        "layers.0.mlp.c_fc.weight": (None, True), "layers.0.mlp.c_proj.weight": (None, True)}


@pytest.mark.parametrize("up, down", [("gate_up_proj", "down_proj"), ("Wi", "Wo"), ("input_linear", "output_linear"),
                                      ("fc1", "fc2"), ("dense_h_to_4h", "dense_4h_to_h"), ("w12", "w3")])
def test_gate_and_up(up, down):
    """By sizes: the next layer takes half of the outputs. A plain MLP of these names is not split."""
    gated = within(mlp=kind("MLP", **{up: linear(2 * INNER, E), down: linear(E, INNER)}))
    assert splits(gated) == {f"layers.0.mlp.{up}.weight": {"rows": [INNER, INNER]}}
    plain = within(mlp=kind("MLP", **{up: linear(INNER, E), down: linear(E, INNER)}))
    assert splits(plain) == {}


def experts(name, up, down, path="model", **attributes):
    tensors = {"gate_up_proj": up, "gate_up_proj_bias": (up[0], up[-1]), "down_proj": down}
    return kind(name, path, **{key: nn.Parameter(torch.randn(size)) for key, size in tensors.items()}, **attributes)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("in_turns", [False, True])
def test_experts(transposed, in_turns):
    """By the attributes that transformers sets."""
    up, down = ((3, E, 2 * INNER), (3, INNER, E)) if transposed else ((3, 2 * INNER, E), (3, E, INNER))
    stack = experts("AnyExperts", up, down, is_transposed=transposed, is_concatenated=not in_turns)
    sizes = {"columns" if transposed else "rows": [1, 1] if in_turns else [INNER, INNER]}
    split = {**sizes, "repeat": INNER} if in_turns else sizes
    assert found(within(experts=stack)) == {
        "layers.0.experts.gate_up_proj": (split, transposed), "layers.0.experts.down_proj": (None, transposed)}


def test_experts_by_class():
    llama = experts("Llama4TextExperts", (3, E, 2 * INNER), (3, INNER, E))
    oss = experts("GptOssExperts", (3, E, 2 * INNER), (3, INNER, E))
    dbrx = {name: nn.Parameter(torch.randn(3 * INNER, E)) for name in ("w1", "v1", "w2")}
    dbrx = kind("DbrxExpertGLU", **dbrx, moe_num_experts=3)
    jet = kind("JetMoeMoE", input_linear=kind("Stack", weight=nn.Parameter(torch.randn(3, 2 * INNER, E))),
               output_linear=kind("Stack", weight=nn.Parameter(torch.randn(3, E, INNER))))
    assert found(within(llama=llama, oss=oss, dbrx=dbrx, jet=jet)) == {
        "layers.0.llama.gate_up_proj": ({"columns": [INNER, INNER]}, True), "layers.0.llama.down_proj": (None, True),
        "layers.0.oss.gate_up_proj": ({"columns": [1, 1], "repeat": INNER}, True),
        "layers.0.oss.down_proj": (None, True),
        "layers.0.dbrx.w1": ({"heads": 3}, False), "layers.0.dbrx.v1": ({"heads": 3}, False),
        "layers.0.dbrx.w2": ({"heads": 3}, True),
        "layers.0.jet.input_linear.weight": ({"rows": [INNER, INNER]}, False),
        "layers.0.jet.output_linear.weight": (None, False)}


def test_latent_attention():
    """By the attributes of DeepSeek, with and without a low rank of q."""
    sizes = {"num_heads": H, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5, "kv_lora_rank": 10}
    mla = kind("AnyAttention", q_a_proj=linear(12, E), q_b_proj=linear(6 * H, 12), kv_b_proj=linear(9 * H, 10),
               kv_a_proj_with_mqa=linear(12, E), o_proj=linear(E, 5 * H), **sizes)
    lite = kind("AnyAttention", q_proj=linear(6 * H, E), o_proj=linear(E, 5 * H), **sizes)
    assert splits(within(mla=mla, lite=lite)) == {
        "layers.0.mla.q_b_proj.weight": {"rows": [4, 2], "repeat": H},
        "layers.0.mla.kv_b_proj.weight": {"rows": [4, 5], "repeat": H},
        "layers.0.mla.kv_a_proj_with_mqa.weight": {"rows": [10, 2]},
        "layers.0.lite.q_proj.weight": {"rows": [4, 2], "repeat": H}}


def test_latent_attention_without_rotary_positions():
    """The module's 0 counts, not the number of the config."""
    sizes = {"num_heads": H, "qk_nope_head_dim": 6, "qk_rope_head_dim": 0, "v_head_dim": 5, "kv_lora_rank": 10}
    module = kind("AnyAttention", q_proj=linear(6 * H, E), kv_a_proj_with_mqa=linear(10, E),
                  config=types.SimpleNamespace(qk_rope_head_dim=2), **sizes)
    assert splits(within(attn=module)) == {}


def test_linear_attention_and_state_spaces():
    state = {"A_log": nn.Parameter(torch.randn(8, 2)), "D": nn.Parameter(torch.randn(8))}
    mamba = kind("Mixer", in_proj=linear(16, E), x_proj=linear(7, 8), intermediate_size=8, ssm_state_size=2,
                 time_step_rank=3, **state)
    zamba = kind("Mixer", in_proj=linear(16, E), x_proj_weight=nn.Parameter(torch.randn(2, 7, 4)), intermediate_size=8,
                 ssm_state_size=2, time_step_rank=3, **state)
    mamba2 = kind("Mixer", in_proj=linear(2 * 8 + 2 * 6 + 4, E), intermediate_size=8, ssm_state_size=2, n_groups=3,
                  num_heads=4, **state)
    delta = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 3, "head_v_dim": 5}
    qwen = kind("Qwen3NextGatedDeltaNet", in_proj_qkvz=linear(2 * (3 + 3 + 10 + 10), E), in_proj_ba=linear(8, E),
                **delta)
    qwen35 = kind("Qwen3_5GatedDeltaNet", in_proj_qkv=linear(6 + 6 + 20, E), **delta)
    gated = kind("Qwen3NextAttention", q_proj=linear(2 * E, E), o_proj=linear(E, E), num_heads=H, head_dim=D)
    ungated = kind("Qwen3NextAttention", q_proj=linear(E, E), o_proj=linear(E, E), num_heads=H, head_dim=D)
    lfm = kind("Lfm2ShortConv", in_proj=linear(3 * E, E), out_proj=linear(E, E))
    assert splits(within(mamba=mamba, zamba=zamba, mamba2=mamba2, qwen=qwen, qwen35=qwen35, gated=gated, lfm=lfm,
                         ungated=ungated)) == {
        "layers.0.mamba.in_proj.weight": {"rows": [8, 8]}, "layers.0.mamba.x_proj.weight": {"rows": [3, 2, 2]},
        "layers.0.zamba.in_proj.weight": {"rows": [1, 1], "repeat": 8},
        "layers.0.zamba.x_proj_weight": {"rows": [3, 2, 2]},
        "layers.0.mamba2.in_proj.weight": {"rows": [8, 8, 6, 6, 4]},
        "layers.0.qwen.in_proj_qkvz.weight": {"rows": [3, 3, 10, 10], "repeat": 2},
        "layers.0.qwen.in_proj_ba.weight": {"rows": [2, 2], "repeat": 2},
        "layers.0.qwen35.in_proj_qkv.weight": {"rows": [6, 6, 20]},
        "layers.0.gated.q_proj.weight": {"rows": [D, D], "repeat": H},
        "layers.0.lfm.in_proj.weight": BLOCKS}


# the blocks are q, k, v of the module's own forward ---------------------------------------------------------------

def outputs_of_blocks(module, layer, x):
    """The outputs of each block of a fused weight, by the split that is found."""
    split = splits(within(attn=module))[f"layers.0.attn.{layer}.weight"]
    weight = getattr(module, layer).weight
    blocks = part("params.units").parse(split).cut(weight.shape).rows
    return [x @ torch.cat([weight[start:stop] for start, stop in block.ranges]).T for block in blocks]


def by_head(y):
    q, k, v = y.view(5, H, 3, D).unbind(-2)
    return q, k, v


def by_group(y):
    y = y.view(5, KV, H // KV + 2, D)
    return y[:, :, :-2], y[:, :, -2], y[:, :, -1]


def in_blocks(y):
    return y.split([E, KV * D, KV * D], -1)


def codegen(y):
    q, v, k = y.view(5, 4, -1).chunk(3, -1)
    return q, v, k


REFERENCE = {"GPT-NeoX": by_head, "BLOOM": by_head, "Falcon, heads": by_head, "InternLM2": by_group,
             "Falcon, new": by_group, "Phi-3": in_blocks, "ChatGLM2": in_blocks, "CodeGen": codegen}


@pytest.mark.parametrize("name", REFERENCE)
def test_blocks_are_what_the_forward_pass_reshapes_to(name):
    module, _ = ATTENTION[name]
    (layer,) = [key for key in module._modules if key != "dense"]
    x = torch.randn(5, E)
    expected = REFERENCE[name](getattr(module, layer)(x))
    for block, reference in zip(outputs_of_blocks(module, layer, x), expected, strict=True):
        torch.testing.assert_close(block, reference.reshape(5, -1))


def test_torch_multi_head_attention_projects_by_blocks():
    module = nn.MultiheadAttention(E, 1, bias=False, batch_first=True)
    x, y = torch.randn(1, 5, E), torch.randn(1, 3, E)
    q, k, v = (t @ w.T for t, w in zip((x, y, y), module.in_proj_weight.split([E, E, E])))
    expected = torch.softmax(q @ k.mT / E**0.5, -1) @ v @ module.out_proj.weight.T
    torch.testing.assert_close(module(x, y, y)[0], expected)


# split="heads" ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", sorted(set(ATTENTION) - {"timm, TinyViT", "torchvision", "EXAONE 4.5"}))
def test_heads_of_fused_attention(name):
    module, _ = ATTENTION[name]
    heads = 8 if name == "CodeGen" else H
    (layer,) = [key for key in module._modules if key != "dense"]
    rows = getattr(module, layer).weight.shape[0]
    assert found(within(attn=module), split="heads") == {
        f"layers.0.attn.{layer}.weight": ({"heads": rows // (E // heads)}, False),
        "layers.0.attn.dense.weight": ({"heads": heads, "dim": 1}, False)}


def test_heads_of_separate_projections():
    """The key heads follow from sizes where the number of the config is that of another module."""
    llama = kind("LlamaAttention", q_proj=linear(E, E), k_proj=linear(KV * D, E), v_proj=linear(KV * D, E),
                 o_proj=linear(E, E), head_dim=D,
                 config=types.SimpleNamespace(num_attention_heads=H, num_key_value_heads=KV))
    bert = kind("BertSelfAttention", query=linear(E, E), key=linear(E, E), value=linear(E, E), num_attention_heads=H,
                config=types.SimpleNamespace(num_key_value_heads=KV))
    mlp = kind("LlamaMLP", gate_up_proj=linear(2 * INNER, E), down_proj=linear(E, INNER), dense=linear(E, E))
    torch_like = nn.MultiheadAttention(E, H, kdim=10, vdim=12)
    columns, all_heads, few = {"heads": H, "dim": 1}, {"heads": H}, {"heads": KV}
    names = {"llama.q_proj.weight": all_heads, "llama.k_proj.weight": few, "llama.v_proj.weight": few,
             "llama.o_proj.weight": columns, "bert.query.weight": all_heads, "bert.key.weight": all_heads,
             "bert.value.weight": all_heads, "mlp.gate_up_proj.weight": {"rows": [INNER, INNER]},
             "mha.q_proj_weight": all_heads, "mha.k_proj_weight": all_heads, "mha.v_proj_weight": all_heads,
             "mha.out_proj.weight": columns}
    model = within(llama=llama, bert=bert, mlp=mlp, mha=torch_like)
    assert splits(model, split="heads") == {f"layers.0.{name}": split for name, split in names.items()}


def test_heads_of_transposed_weights_gated_queries_and_latent_attention():
    gpt2 = kind("GPT2Attention", c_attn=conv1d(3 * E, E), c_proj=conv1d(E, E), num_heads=H, is_cross_attention=False)
    gated = kind("Qwen3NextAttention", q_proj=linear(2 * E, E), k_proj=linear(KV * D, E), v_proj=linear(KV * D, E),
                 o_proj=linear(E, E), **GROUPED)
    sizes = {"num_heads": H, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "kv_lora_rank": 10}
    mla = kind("AnyAttention", q_b_proj=linear(6 * H, 12), kv_b_proj=linear(8 * H, 10), o_proj=linear(E, 4 * H),
               kv_a_proj_with_mqa=linear(12, E), **sizes)
    assert found(within(gpt2=gpt2, gated=gated, mla=mla), split="heads") == {
        "layers.0.gpt2.c_attn.weight": ({"heads": 3 * H, "dim": 1}, True),
        "layers.0.gpt2.c_proj.weight": ({"heads": H}, True),
        "layers.0.gated.q_proj.weight": ({"heads": 2 * H}, False),
        "layers.0.gated.k_proj.weight": ({"heads": KV}, False),
        "layers.0.gated.v_proj.weight": ({"heads": KV}, False),
        "layers.0.gated.o_proj.weight": ({"heads": H, "dim": 1}, False),
        "layers.0.mla.q_b_proj.weight": ({"rows": [4, 2] * H}, False),
        "layers.0.mla.kv_b_proj.weight": ({"heads": 2 * H}, False),
        "layers.0.mla.kv_a_proj_with_mqa.weight": ({"rows": [10, 2]}, False),
        "layers.0.mla.o_proj.weight": ({"heads": H, "dim": 1}, False)}


def test_numbers_of_a_config_that_differs_from_layer_to_layer():
    """transformers refuses to give such a number, and has a config for each layer."""
    class Config:
        is_heterogeneous = True
        per_layer_config = [None, types.SimpleNamespace(num_attention_heads=H)]

        @property
        def num_attention_heads(self):
            raise RuntimeError("ambiguous")

    known = attention("GPTNeoXAttention", "query_key_value", 3 * E, config=Config(), layer_idx=1)
    assert list(splits(within(attn=known)).values()) == [PER_HEAD]
    sizes = kind("Attention", q_proj=linear(E, E), k_proj=linear(KV * D, E), v_proj=linear(KV * D, E),
                 o_proj=linear(E, E), head_dim=D, config=Config())
    assert splits(within(attn=sizes), split="heads") == {
        "layers.0.attn.q_proj.weight": {"heads": H}, "layers.0.attn.k_proj.weight": {"heads": KV},
        "layers.0.attn.v_proj.weight": {"heads": KV}, "layers.0.attn.o_proj.weight": {"heads": H, "dim": 1}}


def test_an_unknown_number_of_heads_is_refused():
    module = kind("Attention", q_proj=linear(E, E), k_proj=linear(E, E), v_proj=linear(E, E), o_proj=linear(E, E))
    with pytest.raises(ValueError, match="layers.0.attn.q_proj.weight .*number of its heads is unknown"):
        found(within(attn=module), split="heads")
    assert splits(within(attn=module)) == {}


# refusals, attributes, wrappers, reports --------------------------------------------------------------------------

def test_an_unknown_class_is_refused_with_the_possible_splits():
    model = within(attn=attention("MyAttention", "qkv", 3 * E, num_heads=H), mlp=linear(E, E))
    with pytest.raises(ValueError) as error:
        found(model)
    text = str(error.value)
    for words in ("layers.0.attn.qkv.weight", f"({3 * E}, {E})", "MyAttention", "6 heads", f"'rows': [{E}, {E}, {E}]",
                  f"'rows': [{D}, {D}, {D}], 'repeat': {H}", "named_splits={'attn.qkv': {", "`split` of a group"):
        assert words in text
    assert package().get_default_muon_param_groups(model)[0]["name"] == "muon"  # split=None


@pytest.mark.parametrize("name, layer, rows, attributes", [
    ("LitAttention", "attn_qkv", ALL, GROUPED), ("Any", "c_attn", 3 * E, {}), ("Any", "in_proj", 3 * E, {}),
    ("Any", "gate_up_proj", 2 * INNER, {})])
def test_names_and_shapes_that_suggest_a_fused_weight_are_refused(name, layer, rows, attributes):
    with pytest.raises(ValueError, match=rf"layers.0.attn.{layer}.weight of shape \({rows}, {E}\) looks like a fused"):
        found(within(attn=attention(name, layer, rows, **attributes)))


def test_a_fused_key_and_value_beside_a_query():
    module = kind("Cross", to_q=linear(E, E), to_kv=linear(2 * E, E), num_heads=H)
    with pytest.raises(ValueError, match="to_kv"):
        found(within(attn=module))


@pytest.mark.parametrize("name", ["n_kv_heads", "n_kv_head", "num_kv_heads", None])
def test_fewer_key_heads_are_read_or_follow_from_the_outputs(name):
    """Without their number, all heads would be key heads, and the sizes of another order would add up."""
    heads, groups, size = 8, 2, 16
    module = attention("MyAttention", "qkv_proj", (heads + 2 * groups) * size, num_heads=heads, head_dim=size,
                       **({name: groups} if name else {}))
    with pytest.raises(ValueError, match=r"Possible: {'rows': \[128, 32, 32\]} or "
                                         r"{'rows': \[64, 16, 16\], 'repeat': 2}, or one matrix") as told:
        found(within(attn=module))
    assert ("2 key and value heads" in str(told.value)) == bool(name)


def test_sizes_that_are_unknown_are_no_reason_to_stay_whole():
    with pytest.raises(ValueError, match="qkv_proj.weight .*Possible: sizes that add up to the outputs, or one matrix"):
        found(within(attn=attention("MyAttention", "qkv_proj", 3 * E + 8, num_heads=H, head_dim=D)))
    with pytest.raises(ValueError, match="Possible: sizes that add up"):  # no thirds: 8 and 3 do not fit
        found(within(attn=attention("MyAttention", "qkv_proj", 3 * E, num_heads=8, num_kv_heads=3)))
    grouped = attention("MyAttention", "c_attn", ALL, **GROUPED)
    with pytest.raises(ValueError, match="c_attn.weight .* looks like a fused weight"):
        found(within(attn=grouped))
    module = kind("Cross", to_q=linear(E, E), to_kv=linear(E // 2, E), num_heads=H)
    with pytest.raises(ValueError, match="to_kv.weight .* looks like a fused weight"):
        found(within(attn=module))


def test_the_output_beside_an_unknown_fused_weight_has_heads():
    module = attention("MyAttention", "qkv", 3 * E, num_heads=H)
    assert named(within(attn=module), {"qkv": QKV}, "heads")["layers.0.attn.dense.weight"] == (
        {"heads": H, "dim": 1}, False)
    with pytest.raises(ValueError, match="dense.weight .*the number of its heads is unknown"):
        named(within(attn=attention("MyAttention", "qkv", 3 * E)), {"qkv": QKV}, "heads")


@pytest.mark.parametrize("layer, rows", [("in_proj", E), ("in_proj", 4 * E), ("kv_proj", E), ("c_attn", E)])
def test_names_alone_suggest_nothing(layer, rows):
    assert splits(within(attn=attention("Any", layer, rows))) == {}


def test_sizes_that_contradict_the_shape_are_refused():
    module = attention("Phi3Attention", "qkv_proj", ALL, **{**GROUPED, "num_key_value_heads": 3})
    with pytest.raises(ValueError, match=r"layers.0.attn.qkv_proj.weight of shape \(40, 24\).*add up to 48.*not to 40"):
        found(within(attn=module))


def test_all_refused_parameters_are_named_at_once():
    model = within(a=attention("A", "qkv", 3 * E), b=attention("B", "qkv", 3 * E))
    with pytest.raises(ValueError, match=r"parameters like it: layers.0.a.qkv.weight, layers.0.b.qkv.weight"):
        found(model)


@pytest.mark.parametrize("own", [None, {"heads": 3}])
def test_an_attribute_of_the_parameter_comes_first(own):
    module = attention("MyAttention", "qkv", 3 * E)
    module.qkv.weight.muon_split = own
    known = attention("MptAttention", "Wqkv", 3 * E, n_heads=H, head_dim=D)
    known.Wqkv.weight.muon_split = own
    assert splits(within(a=module, b=known)) == ({} if own is None else {"layers.0.a.qkv.weight": own,
                                                                        "layers.0.b.Wqkv.weight": own})
    module.dense.weight.muon_transposed = True
    assert found(within(a=module))["layers.0.a.dense.weight"] == (None, True)


QKV = {"rows": [E, E, E]}


def named(model, named_splits, split="auto", **keys):
    """{name: (split, transposed)} of all parameters for Muon, from `named_splits`."""
    groups = package().get_default_muon_param_groups(model, split=split, named_splits=named_splits, **keys)
    return {name: (group.get("split"), group.get("transposed", False))
            for group in groups if group["use_muon"] for name in group["param_names"]}


@pytest.mark.parametrize("split", [None, "auto", "heads"])
def test_a_split_by_name_comes_before_that_which_is_found(split):
    """The advice of the message for a weight that cannot be told, taken as it is written."""
    known = attention("MptAttention", "Wqkv", 3 * E, n_heads=H, head_dim=D)
    known.Wqkv.bias = nn.Parameter(torch.zeros(3 * E))  # passed over by the pattern
    model = within(a=attention("MyAttention", "qkv", 3 * E, num_heads=H), b=known)
    by_name = named(model, {r"a\.qkv": QKV, "b.Wqkv": None, re.compile("a.dense"): {"transposed": True}}, split)
    assert by_name["layers.0.a.qkv.weight"] == (QKV, False)
    assert by_name["layers.0.b.Wqkv.weight"] == (None, False)
    assert by_name["layers.0.a.dense.weight"] == (None, True)


def test_a_split_by_name_can_be_of_a_weight_stored_transposed():
    form = {"columns": [E, E, E], "transposed": True}
    model = within(a=kind("A", qkv=linear(E, 3 * E)))  # (in, out)
    assert named(model, {"qkv": form}, None)["layers.0.a.qkv.weight"] == ({"columns": [E, E, E]}, True)
    assert form == {"columns": [E, E, E], "transposed": True}
    both = {"split": "flatten", "transposed": True}
    assert named(model, {"qkv": both}, None)["layers.0.a.qkv.weight"] == ("flatten", True)


@pytest.mark.parametrize("form", [None, {"rows": [E, 2 * E]}, {**QKV, "transposed": True}])
def test_a_split_by_name_that_contradicts_the_attribute_is_refused(form):
    model = within(a=attention("A", "qkv", 3 * E))
    model.get_parameter("layers.0.a.qkv.weight").muon_split = {"rows": (E, E, E)}
    with pytest.raises(ValueError, match="qkv.weight of shape .* has two splits: .* by its attributes, and .* by name"):
        named(model, {"qkv": form}, None)
    assert named(model, {"qkv": QKV}, None)["layers.0.a.qkv.weight"] == (QKV, False)  # lists and tuples are alike


def test_splits_by_name_step_as_those_of_groups():
    torch.manual_seed(0)
    steps = []
    for by_name in (True, False):
        torch.manual_seed(1)
        model = within(a=attention("A", "qkv", 3 * E))
        groups = package().get_default_muon_param_groups(model, named_splits={"qkv": QKV} if by_name else None)
        if not by_name:
            qkv = model.get_parameter("layers.0.a.qkv.weight")
            groups[0]["params"] = [p for p in groups[0]["params"] if p is not qkv]
            del groups[0]["param_names"]
            groups.append({"params": [qkv], "split": QKV, "adjust_lr_fn": "match_rms_adamw"})
            for group in groups[1:]:
                group.pop("param_names", None)
        opt = package().Muon(groups, lr=0.1)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        opt.step()
        steps.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *steps))


@pytest.mark.parametrize("by_name, error, message", [
    ({"qvk": QKV}, ValueError, r"named_splits='qvk' matches no trainable parameter"),
    ({"qkv": {"rows": [E, E]}}, ValueError, r"parameter layers.0.a.qkv.weight of shape .*: .*add up to 48 rows"),
    ({"qkv": {"row": [E]}}, ValueError, r"named_splits='qkv': split=.* unknown key 'row'"),
    ({"qkv": {"heads": 3, "transposed": 1}}, TypeError, r"named_splits='qkv': transposed=1 must be True or False"),
    ({"qkv": QKV, "a": None}, ValueError, r"matches both named_splits='qkv' and named_splits='a', whose splits differ"),
    ({"embed": QKV}, ValueError, r"embed.* matches named_splits='embed', but goes to AdamW"),
    ({"bias": QKV}, ValueError, r"named_splits='bias' matches biases, norms or other vectors only"),
    ({3: QKV}, ValueError, r"named_splits holds 3, but only regular expressions and functions"),
    ({"(": QKV}, ValueError, r"is no regular expression"),
    ("qkv", TypeError, r"named_splits='qkv' is not allowed: it must be a mapping"),
])
def test_wrong_splits_by_name_are_refused(by_name, error, message):
    model = nn.Sequential()
    model.add_module("embed", nn.Embedding(9, E))
    model.add_module("layers", nn.ModuleList([kind("Block", a=attention("A", "qkv", 3 * E))]))
    model.add_module("norm", nn.LayerNorm(E))
    lines = []
    with pytest.raises(error, match=message):
        named(model, by_name, None, report=lines.append)
    assert bool(lines) == ("goes to AdamW" in message)  # the report says why


def test_reports_show_splits_of_attributes_without_an_argument():
    model, lines = within(a=attention("A", "qkv", 3 * E)), []
    plain_groups = package().get_default_muon_param_groups(model)
    model.get_parameter("layers.0.a.qkv.weight").muon_split = QKV
    groups = package().get_default_muon_param_groups(model, report=lines.append)
    assert f"split={{'rows': [{E}, {E}, {E}]}}: 1 parameters, 3 matrices: layers.*.a.qkv.weight" in lines[0]
    assert [sorted(group) for group in groups] == [sorted(group) for group in plain_groups]  # as saved so far
    model.get_parameter("layers.0.a.qkv.weight").muon_split = {"rows": [5]}
    with pytest.raises(ValueError, match="parameter layers.0.a.qkv.weight of shape .*add up to 5"):
        package().get_default_muon_param_groups(model)


def plain():
    mlp = kind("LlamaMLP", gate_proj=linear(INNER, E), up_proj=linear(INNER, E), down_proj=linear(E, INNER))
    return within(attn=kind("LlamaAttention", q_proj=linear(E, E), k_proj=linear(8, E), o_proj=linear(E, E)), mlp=mlp)


def test_a_model_without_fused_weights_gives_the_groups_of_split_none():
    model = plain()
    auto, default = (package().get_default_muon_param_groups(model, split=value) for value in ("auto", None))
    assert auto == default == package().get_default_muon_param_groups(model)


@pytest.mark.parametrize("value", ["all", True, {"rows": [1]}])
def test_other_values_of_split(value):
    with pytest.raises(ValueError, match='must be None, "auto" or "heads"'):
        package().get_default_muon_param_groups(plain(), split=value)


def test_parameters_for_adamw_are_not_split():
    name = r"attn\.Wqkv"
    model = within(attn=attention("MptAttention", "Wqkv", 3 * E, n_heads=H, head_dim=D))
    groups = package().get_default_muon_param_groups(model, split="auto", adamw=name)
    assert [group["name"] for group in groups] == ["muon", "other", "no_decay"]
    assert not any("split" in group or "transposed" in group for group in groups)


def test_wrappers_and_tied_weights():
    model = within(attn=attention("BloomAttention", "query_key_value", 3 * E, num_heads=H, head_dim=D))
    model.again = model.layers[0]["attn"].query_key_value
    assert splits(kind("DDP", module=model)) == {"layers.0.attn.query_key_value.weight": PER_HEAD}
    sharded = model.layers[0]["attn"]
    sharded.__class__ = type("FSDPBloomAttention", (type(sharded),), {})  # as fully_shard does
    assert list(splits(model).values()) == [PER_HEAD]


def test_adapters_are_not_split():
    layer = kind("Linear", base_layer=linear(3 * E, E), lora_A=nn.ModuleDict({"default": linear(4, E)}),
                 lora_B=nn.ModuleDict({"default": linear(3 * E, 4)}))
    module = kind("MptAttention", Wqkv=layer, n_heads=H, head_dim=D)
    assert splits(within(attn=module)) == {"layers.0.attn.Wqkv.base_layer.weight": BLOCKS}


def test_the_report_lists_each_split_with_its_parameters():
    layers = [attention("MptAttention", "Wqkv", 3 * E, n_heads=H, head_dim=D) for _ in range(2)]
    mlp = kind("GPT2MLP", c_fc=conv1d(4 * E, E), c_proj=conv1d(E, 4 * E))
    model = kind("Model", layers=nn.ModuleList(nn.ModuleDict({"attn": attn}) for attn in layers), mlp=mlp)
    reports = []
    package().get_default_muon_param_groups(model, split="auto", report=reports.append)
    lines = reports[0].splitlines()
    keys = f"split={{'rows': [{E}, {E}, {E}]}}"
    assert f"{keys}: 2 parameters, 6 matrices: layers.*.attn.Wqkv.weight" in lines
    assert "transposed=True: 2 parameters, 2 matrices: mlp.c_fc.weight, mlp.c_proj.weight" in lines
    (row,) = [line for line in lines if line.startswith("layers.1.attn.Wqkv.weight")]
    assert row.endswith(f"Muon   muon        matrix, {keys}")
    package().get_default_muon_param_groups(model, report=reports.append)
    assert "split=" not in reports[1]
    sizes = {"num_heads": H, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "kv_lora_rank": 10}
    mla = kind("AnyAttention", q_b_proj=linear(6 * H, 12), o_proj=linear(E, 4 * H), **sizes)
    package().get_default_muon_param_groups(within(mla=mla), split="heads", report=reports.append)
    assert "split={'rows': [4, 2, 4, 2, ... (12 in all)]}: 1 parameters, 12 matrices:" in reports[2]


def test_a_step_is_that_of_separate_weights():
    """Of torch's attention: q, k and v in one weight, or in three."""
    fused, apart = nn.Module(), nn.Module()
    fused.attn = nn.MultiheadAttention(E, H, bias=False)
    gradient = torch.randn(3 * E, E)
    for key, weight in zip("qkv", fused.attn.in_proj_weight.detach().split(E)):
        setattr(apart, key, nn.Parameter(weight.clone()))
    fused.attn.in_proj_weight.grad = gradient.clone()
    for key, grad in zip("qkv", gradient.split(E)):
        getattr(apart, key).grad = grad.clone()
    for model in (fused, apart):
        package().Muon(package().get_default_muon_param_groups(model, split="auto"), lr=0.1).step()
    torch.testing.assert_close(fused.attn.in_proj_weight, torch.cat([apart.q, apart.k, apart.v]), rtol=0, atol=0)


# transformers, where it is installed ------------------------------------------------------------------------------

SMALL = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
         "intermediate_size": 96}
MODELS = {
    "GPTNeoX": (SMALL, {"query_key_value": {"rows": [16, 16, 16], "repeat": 4}}),
    "Bloom": ({"vocab_size": 160, "hidden_size": 64, "n_layer": 1, "n_head": 4},
              {"query_key_value": {"rows": [16, 16, 16], "repeat": 4}}),
    "GPT2": ({"vocab_size": 160, "n_embd": 64, "n_layer": 1, "n_head": 4}, {"c_attn": {"columns": [64, 64, 64]}}),
    "Phi3": ({**SMALL, "num_key_value_heads": 2, "pad_token_id": 0},
             {"qkv_proj": {"rows": [64, 32, 32]}, "gate_up_proj": {"rows": [96, 96]}}),
    "Falcon": ({"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
                "new_decoder_architecture": True, "num_kv_heads": 2},
               {"query_key_value": {"rows": [32, 16, 16], "repeat": 2}}),
    "Mixtral": ({**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}, {"gate_up_proj": {"rows": [96, 96]}}),
    "GptOss": ({**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "head_dim": 16},
               {"gate_up_proj": {"columns": [1, 1], "repeat": 96}}),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    config, expected = MODELS[name]
    with torch.device("meta"):
        config = getattr(transformers, f"{name}Config")(**config)
        model = transformers.AutoModelForCausalLM.from_config(config)
    groups = package().get_default_muon_param_groups(model, split="auto")
    seen = {(full.removesuffix(".weight").rpartition(".")[2], repr(group["split"]))
            for group in groups if "split" in group for full in group["param_names"]}
    assert seen == {(layer, repr(split)) for layer, split in expected.items()}


FORWARD = {
    "GPTNeoX": SMALL, "GPTNeoXJapanese": {**SMALL, "intermediate_multiple_size": 2}, "Persimmon": SMALL,
    "Bloom": MODELS["Bloom"][0], "Falcon": MODELS["Falcon"][0], "Phi3": MODELS["Phi3"][0], "GPT2": MODELS["GPT2"][0],
    "GPTBigCode": MODELS["GPT2"][0], "CodeGen": {**MODELS["GPT2"][0], "rotary_dim": 8, "n_inner": 96},
    "Mpt": {"vocab_size": 160, "d_model": 64, "n_layers": 1, "n_heads": 4},
}


@pytest.mark.parametrize("name", FORWARD)
def test_blocks_in_the_forward_pass_of_transformers(name):
    """Without q, or without k, all scores are equal: both give the same outputs. Without v, attention adds nothing."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**FORWARD[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3) if p.ndim > 1 else p.fill_(float(p.ndim == 1 and bool(p.any())))
    names = ("query_key_value", "qkv_proj", "c_attn", "Wqkv")
    groups = package().get_default_muon_param_groups(model, split="auto")
    (weight, form, transposed), = [(p, group["split"], group.get("transposed", False)) for group in groups
                                   if "split" in group for full, p in zip(group["param_names"], group["params"])
                                   if full.split(".")[-2] in names]
    cut = part("params.units").parse(form, transposed).cut(weight.shape)
    tokens = torch.arange(12)[None]

    @torch.no_grad()
    def outputs(*without):
        kept = weight.clone()
        for block in without:
            for start, stop in block.ranges:
                weight.data.mT[..., start:stop].zero_() if not transposed else weight.data[:, start:stop].zero_()
        result = model(tokens).logits
        weight.copy_(kept)
        return result

    q, *others = cut.rows
    k, v = reversed(others) if name == "CodeGen" else others
    torch.testing.assert_close(outputs(q), outputs(k))
    torch.testing.assert_close(outputs(v), outputs(q, k, v))
    assert (outputs() - outputs(q)).abs().max() > 1e-3 and (outputs() - outputs(v)).abs().max() > 1e-3

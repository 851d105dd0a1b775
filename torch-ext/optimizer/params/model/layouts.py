"""Which projections the fused weights of known modules hold, and in which order.

A `Rule` names layers and the modules around them, by class or by attributes, and computes the
sizes of the projections. The classes are those of transformers 5, timm, torchvision, diffusers, of
models with code on the Hub (ChatGLM, InternLM2, Baichuan, Qwen, MPT), of DeepSeek, mamba_ssm,
flash-attn, Megatron and nanoGPT. Each rule follows the forward pass of its class.

`SUSPECTS` are the functions that recognize weights which look fused in other classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from .structure import is_linear

# fmt: off
# Names of a number, in the order in which attributes of the module, then of the config, are read
HEADS = (
    "num_attention_heads_per_partition", "num_heads", "num_attention_heads", "n_heads", "n_head"
)
KV_HEADS = (
    "num_multi_query_groups_per_partition", "num_query_groups_per_partition", "num_key_value_heads",
    "num_kv_heads", "num_heads_kv", "kv_n_heads", "n_head_kv", "n_kv_heads", "n_kv_head",
    "kv_heads", "n_query_groups"
)
HEAD_DIM = (
    "head_dim", "hidden_size_per_attention_head", "head_size", "attention_head_size"
)
INNER = ("intermediate_size", "d_inner")  # of Mamba layers
STATE = ("ssm_state_size", "d_state")
# Classes with weights stored as (in, out), experts included
STORED_TRANSPOSED = re.compile(
    r"\.(Llama4TextExperts|GptOssExperts|AriaExperts|OpenAIPrivacyFilterExperts)\.\w+$"
    r"|\.DbrxExpertGLU\.w2$"
)
INTERLEAVED = re.compile(r"\.GptOssExperts$")  # gate and up in turns
# fmt: on


@dataclass(frozen=True)
class Blocks:
    """The projections of a fused weight: `repeat` repetitions of blocks of `sizes` outputs, or
    `heads` equal blocks of dim `dim` as stored.

    `head_dim`: the head size where a block of `sizes` holds several heads; 0: unknown, or each
    repetition of a block is one head.
    """

    sizes: tuple[int, ...] = ()
    repeat: int = 1
    heads: int = 0
    dim: int = 0
    head_dim: int = 0


@dataclass(frozen=True)
class Weight:
    """A parameter and the modules around it.

    `layer`: the name of the linear layer, or of a bare tensor. `shape`: as stored. `holder`: the
    module around the layer, `module` the layer; both are the module of a bare tensor. `config`: of
    the innermost module that has one. `transposed`: whether stored as (in, out).
    """

    name: str
    layer: str
    shape: tuple[int, ...]
    holder: nn.Module
    module: nn.Module
    config: object
    transposed: bool

    @property
    def outputs(self) -> int:
        """The output size of the layer."""
        return self.shape[-1 if self.transposed else -2]

    @property
    def inputs(self) -> int:
        """The input size of the layer."""
        return self.shape[-2 if self.transposed else -1]

    def number(self, *names: str) -> int:
        """The first integer among the attributes `names` of the holder, else of the config; 0
        without. 0 is a value too: `qk_rope_head_dim` is 0 in layers without rotary positions.
        """
        for source in (self.holder, self.config):
            for name in names:
                value = _read(source, name)
                if type(value) is int and value >= 0:
                    return value
        return 0

    def flag(self, name: str) -> bool:
        """Whether the attribute `name` of the holder, else of the config, is true."""
        value = _read(self.holder, name)
        return bool(_read(self.config, name) if value is None else value)

    def named(self, layer: str) -> Weight:
        """A weight of the same module with the name `layer`."""
        return replace(self, layer=layer)

    def heads(self) -> tuple[int, int, int]:
        """(query heads, key heads, head size); 0 for unknown numbers of heads. An unknown head size
        follows from the outputs of a weight with q, k and v.
        """
        heads = self.number(*HEADS)
        kv_heads = self.number(*KV_HEADS) or heads
        head_dim = self.number(*HEAD_DIM)
        if heads and not head_dim and self.outputs % (heads + 2 * kv_heads) == 0:
            head_dim = self.outputs // (heads + 2 * kv_heads)
        return heads, kv_heads, head_dim

    def siblings(self) -> list[int]:
        """The input sizes of the other weights of the holder: its tensors, and the weights of its
        children.
        """
        others = [(name, self.holder, p) for name, p in self.holder.named_parameters(recurse=False)]
        for name, child in self.holder.named_children():
            inner = getattr(child, "base_layer", child)  # peft
            others.append((name, inner, getattr(inner, "weight", None)))
        return [
            tensor.shape[-2 if is_stored_transposed(self.holder, module, name) else -1]
            for name, module, tensor in others
            if name != self.layer
            and not name.endswith("bias")
            and tensor is not None
            and tensor.ndim in (2, 3)
        ]

    def facts(self) -> str:
        """The numbers found around the weight, for messages."""
        heads, _, head_dim = self.heads()
        kv_heads = self.number(*KV_HEADS)
        numbers = {"heads": heads, "key and value heads": kv_heads, "head size": head_dim}
        found = [f"{count} {what}" for what, count in numbers.items() if count]
        return ", ".join([*found, f"{self.outputs} outputs", f"{self.inputs} inputs"])


def config_of_layer(config: object, holder: nn.Module) -> object:
    """The config of one layer, where a config of transformers differs from layer to layer."""
    layer = getattr(holder, "layer_idx", None)
    if getattr(config, "is_heterogeneous", False) and type(layer) is int:
        return config.per_layer_config[layer]
    return config


def _read(source: object, name: str) -> object:
    """An attribute; None without, or if a config of transformers refuses to give a number that
    differs from layer to layer.
    """
    try:
        return getattr(source, name, None)
    except RuntimeError:
        return None


def class_paths(module: nn.Module) -> list[str]:
    """The dotted names of the class of a module and of its bases: FSDP2 makes a subclass."""
    kinds = [kind for kind in type(module).__mro__ if kind.__module__ != "builtins"]
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]


def is_stored_transposed(holder: nn.Module, module: nn.Module, layer: str) -> bool:
    """Whether a weight is stored as (in, out): `Conv1D` of transformers (GPT-2), and experts with
    the attribute `is_transposed` (transformers) or of a class that stores them so.
    """
    if is_linear(module):
        return any(path.rpartition(".")[2] == "Conv1D" for path in class_paths(module))
    stored = getattr(holder, "is_transposed", None)
    if isinstance(stored, bool):
        return stored
    return any(STORED_TRANSPOSED.search(f"{path}.{layer}") for path in class_paths(holder))


# Layouts: functions of a weight, which return the projections in the order of the outputs, or None
# for a weight that is not fused

Arrangement = Callable[[Weight], Blocks | None]


def equal(count: int) -> Arrangement:
    """`count` equal blocks."""
    return lambda weight: (
        Blocks((weight.outputs // count,) * count) if weight.outputs % count == 0 else None
    )


def q_k_v(weight: Weight) -> Blocks | None:
    """q, k, v one after another; with fewer key heads than query heads, k and v are smaller."""
    heads, kv_heads, head_dim = weight.heads()
    if not heads or not head_dim:
        return equal(3)(weight)
    sizes = heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
    return Blocks(sizes, head_dim=head_dim)


def per_head(weight: Weight) -> Blocks | None:
    """q, k, v of each head: the outputs are viewed as (heads, 3, head size)."""
    heads = weight.number(*HEADS)
    if not heads or weight.outputs % (3 * heads):
        return Blocks((weight.number(*HEAD_DIM),) * 3, heads)  # does not add up: refused later
    return Blocks((weight.outputs // (3 * heads),) * 3, heads)


def per_group(weight: Weight) -> Blocks:
    """The query heads of a key head, then k and v, of each key head."""
    heads, kv_heads, head_dim = weight.heads()
    queries = heads // max(1, kv_heads) * head_dim
    return Blocks((queries, head_dim, head_dim), kv_heads, head_dim=head_dim)


def falcon(weight: Weight) -> Blocks | None:
    """Falcon: by group (new architecture), all query heads with one k and v, or per head."""
    heads, _, head_dim = weight.heads()
    if weight.flag("new_decoder_architecture"):
        return per_group(weight)
    if weight.flag("multi_query"):
        return Blocks((heads * head_dim, head_dim, head_dim), head_dim=head_dim)
    return per_head(weight)


def codegen(weight: Weight) -> Blocks:
    """CodeGen: q, v, k of each of 4 cores of the TPU that it was trained on."""
    return Blocks((weight.outputs // 12,) * 3, 4, head_dim=weight.heads()[2])


def big_code(weight: Weight) -> Blocks | None:
    """GPT-BigCode: all query heads, k, v (multi-query); or per head. Cross attention: k and v."""
    if weight.flag("is_cross_attention"):
        return equal(2)(weight)
    heads, _, head_dim = weight.heads()
    if weight.flag("multi_query"):
        return Blocks((heads * head_dim, head_dim, head_dim), head_dim=head_dim)
    return per_head(weight)


def conv1d_attention(weight: Weight) -> Blocks | None:
    """GPT-2: q, k, v; k and v of cross attention."""
    return equal(2 if weight.flag("is_cross_attention") else 3)(weight)


def chat_glm(weight: Weight) -> Blocks | None:
    """ChatGLM: q, k, v with query groups; else per head."""
    return q_k_v(weight) if weight.flag("multi_query_attention") else per_head(weight)


def head_first(weight: Weight) -> Blocks | None:
    """timm's MaxViT: per head or q, k, v, by an attribute."""
    return per_head(weight) if weight.flag("head_first") else equal(3)(weight)


def key_and_value_dims(weight: Weight) -> Blocks:
    """TinyViT: q, k and a wider v of each head."""
    key = weight.number("key_dim")
    return Blocks((key, key, weight.number("val_dim")), weight.number(*HEADS))


def gate_and_up(weight: Weight) -> Blocks | None:
    """Gate and up of a gated linear unit: twice as many outputs as a layer beside it has inputs."""
    sizes = weight.siblings()
    is_plain = "gate" not in weight.layer and weight.outputs in sizes
    if weight.outputs % 2 or weight.outputs // 2 not in sizes or is_plain:
        return None
    half = weight.outputs // 2
    stacked = getattr(weight.holder, "is_concatenated", None)
    turns = any(INTERLEAVED.search(path) for path in class_paths(weight.holder))
    in_turns = turns if not isinstance(stacked, bool) else not stacked
    return Blocks((1, 1), half) if in_turns else Blocks((half, half))


def experts_in_rows(weight: Weight) -> Blocks:
    """DBRX: the matrices of all experts below each other, (experts * inner size, hidden size)."""
    return Blocks(heads=weight.number("moe_num_experts", "num_experts"))


def mla(weight: Weight) -> Blocks | None:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the latent vector and the key
    with rotary positions; k and v of each head; q without and with rotary positions of each head.
    """
    nope, rope = weight.number("qk_nope_head_dim"), weight.number("qk_rope_head_dim")
    heads, value = weight.number("n_local_heads", *HEADS), weight.number("v_head_dim")
    if re.search(r"kv_a|wkv_a", weight.layer):
        return Blocks((weight.number("kv_lora_rank"), rope))
    if re.search(r"kv_b|wkv_b", weight.layer):
        return Blocks((nope, value), heads)
    return Blocks((nope, rope, value) if "gate" in weight.layer else (nope, rope), heads)


def gated_delta_net(weight: Weight) -> Blocks:
    """Qwen3-Next: q, k, v, z (or b, a) of each key head. Qwen3.5: q, k, v one after another."""
    groups, key = weight.number("num_k_heads"), weight.number("head_k_dim")
    ratio = weight.number("num_v_heads") // max(1, groups)
    value = ratio * weight.number("head_v_dim")
    if weight.layer == "in_proj_qkv":
        return Blocks((groups * key, groups * key, groups * value))
    sizes = (ratio, ratio) if weight.layer == "in_proj_ba" else (key, key, value, value)
    return Blocks(sizes, groups)


def query_and_gate(weight: Weight) -> Blocks | None:
    """Qwen3-Next: q and the output gate of each head, where there is a gate."""
    heads, _, head_dim = weight.heads()
    if weight.outputs == heads * head_dim:
        return None
    return Blocks((head_dim, head_dim), heads)


def mamba_input(weight: Weight) -> Blocks | None:
    """Mamba: x and gate. Zamba: in turns. Mamba-2: gate, x, B, C and dt."""
    inner, state = weight.number(*INNER), weight.number(*STATE)
    if weight.outputs == 2 * inner:
        in_turns = hasattr(weight.holder, "x_proj_weight")
        return Blocks((1, 1), inner) if in_turns else Blocks((inner, inner))
    groups = weight.number("n_groups", "ngroups") * state
    return Blocks((inner, inner, groups, groups, weight.number("nheads", *HEADS)))


def mamba_scan(weight: Weight) -> Blocks:
    """Mamba: the low-rank time step, B and C."""
    state = weight.number(*STATE)
    return Blocks((weight.number("time_step_rank", "dt_rank"), state, state))


def xlstm(weight: Weight) -> Blocks:
    """xLSTM: q, k, v and output gate; input and forget gate."""
    if weight.layer == "ifgate_preact":
        return Blocks((weight.outputs // 2,) * 2)
    key, value = weight.number("qk_dim"), weight.number("v_dim")
    return Blocks((key, key, value, value))


def two_series(weight: Weight) -> Blocks | None:
    """DeepSeek-V4: two series of compressed entries, where there are two."""
    head_dim = weight.number("head_dim")
    return Blocks((head_dim, head_dim)) if weight.outputs == 2 * head_dim else None


def focal_net(weight: Weight) -> Blocks:
    """FocalNet: query, context and the gates of the focal levels."""
    gates = weight.number("focal_level") + 1
    return Blocks((weight.inputs, weight.inputs, gates))


def in_split(weight: Weight) -> Blocks:
    """timm's parallel blocks: sizes by the attribute `in_split`."""
    return Blocks(tuple(weight.holder.in_split))


@dataclass(frozen=True)
class Rule:
    """A layout and the weights that have it.

    `layers`: names of layers. `classes`: dotted names of the class of the holder; "" for any.
    `attributes`: the holder must have all of them, as positive numbers, tensors or modules.
    """

    layers: re.Pattern
    layout: Arrangement
    classes: re.Pattern | None = None
    attributes: tuple[str, ...] = ()

    def applies(self, weight: Weight) -> bool:
        """Whether the rule is for a weight."""
        return (
            self.layers.search(weight.layer) is not None
            and all(getattr(weight.holder, name, None) is not None for name in self.attributes)
            and (
                self.classes is None
                or any(self.classes.search(path) for path in class_paths(weight.holder))
            )
        )

    def blocks(self, weight: Weight) -> Blocks | None:
        """The projections of a weight; None if it is not fused."""
        return self.layout(weight)


def _rule(layers: str, layout: Arrangement, classes: str = "", *attributes: str) -> Rule:
    """A `Rule` of regular expressions for the whole name of a layer, and for the class: its last
    part, or a dotted name that starts with the package.
    """
    whole = re.compile(rf"^({layers})$")
    kinds = re.compile(rf"(^|\.)({classes})$") if classes else None
    return Rule(whole, layout, kinds, attributes)


GLU = (
    r"gate_up_proj|gate_up|up_gate_proj|Wi|wi|input_linear|fc1|dense_h_to_4h|linear_fc1|w12|w13"
    r"|weights_in|linear_in|linear_start|proj_in|fc_in"
)
MLA = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
DELTA = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
GATED_QUERY = r"\w*(Qwen3Next|Qwen3_5|Qwen3_5Moe|Qwen4Exp\w*)Attention"
TRANSFORMERS = r"transformers\.models\.\w+\.modeling_\w+"

# fmt: off
# Weights whose outputs are heads of attention
ATTENTION: tuple[Rule, ...] = (
    _rule("in_proj_weight", equal(3), r"torch\.nn\.modules\.activation\.MultiheadAttention"),
    # q, k, v of each head
    _rule("query_key_value", per_head,
          "GPTNeoXAttention|GPTNeoXJapaneseAttention|BloomAttention|PersimmonAttention"),
    _rule("qkv_proj", per_head, "MiniMaxLightningAttention"),
    _rule("in_proj", per_head, "DisentangledSelfAttention"),  # DeBERTa
    # Layouts that options choose
    _rule("query_key_value", falcon, "FalconAttention|FalconFlashAttention2"),
    _rule("query_key_value", chat_glm, "SelfAttention", "multi_query_attention"),
    _rule("c_attn", big_code, r"GPTBigCode\w*Attention\w*"),
    _rule("qkv_proj", codegen, "CodeGenAttention"),
    # q, k, v of each group of query heads
    _rule("wqkv", per_group, r"InternLM2\w*Attention\w*"),
    _rule("linear_qkv", per_group, r"megatron\.core\.transformer\.attention\.SelfAttention"),
    # q, k, v one after another
    _rule("c_attn", conv1d_attention,
          r"(GPT2|ImageGPT|DecisionTransformerGPT2)Attention|"
          r"transformers\.models\.openai\.modeling_openai\.Attention"),
    _rule("c_attn", equal(3), "CausalSelfAttention", "n_embd"),  # nanoGPT
    _rule("c_attn", equal(3), "QWenAttention"),
    _rule("W_pack", q_k_v, r"BaichuanAttention|\w*modeling_baichuan\.Attention"),
    _rule("Wqkv", q_k_v, r"MptAttention|DbrxAttention|ModernBertAttention|NomicBert\w*Attention|"
                         r"llmfoundry\.[\w.]*Attention"),
    _rule("Wqkv", q_k_v, r"GroupedQueryAttention|MultiQueryAttention", "kv_n_heads"),  # MPT
    _rule("Wqkv", q_k_v, "MHA", "num_heads_kv"),  # flash-attn
    _rule("Wqkv", q_k_v, "MHA", "n_head_kv"),  # Phi-2, with its code on the Hub
    _rule("qkv_proj", q_k_v, r"Phi3\w*Attention\w*|Phi4Multimodal\w*Attention\w*"),
    _rule("qkv_linear", equal(3), "LayoutLMv2SelfAttention"),
    _rule("att_proj", equal(3), r"BarkSelf(Flash)?Attention2?"),
    _rule("qkv", q_k_v, TRANSFORMERS + r"\.\w*Attention"),
    _rule("qkv", key_and_value_dims, r"timm\.models\.(tiny_vit)\.Attention"),
    _rule("qkv", head_first, r"timm\.models\.maxxvit\.\w*", "head_first"),
    _rule("qkv", equal(3), r"timm\.(models|layers)\.(?!gcvit|efficientformer|lambda|bottleneck)"
                           r"\w+\.\w*Attn\w*|timm\.(models|layers)\.(?!gcvit|efficientformer|"
                           r"lambda|bottleneck)\w+\.(\w*Attention\w*|MHSA|XCA)"),
    _rule("kv|qk", equal(2), r"timm\.(models|layers)\.(pvt_v2|twins|volo|convit|tnt|"
                             r"attention_pool)\.\w+"),
    _rule("qkv|to_qkv", equal(3), r"torchvision\.models\.[\w.]+"),
    _rule("kv_proj", equal(2), "JetMoeAttention"),
    _rule("to_kv", equal(2), r"EvollaSequenceCompressorAttention|"
                             r"GraniteSpeech\w*ConformerAttention"),
    # Latent attention; a gate beside the queries
    _rule("kv_b_proj|q_b_proj|q_proj|q_gate_proj|wkv_b|wq_b|wq", mla, "", *MLA),
    _rule("q_proj", query_and_gate, GATED_QUERY),
)
# All other fused weights
OTHERS: tuple[Rule, ...] = (
    _rule("kv_a_proj_with_mqa|wkv_a", mla, "", *MLA),
    _rule("in_proj", in_split, r"timm\.models\.vision_transformer\.\w+", "in_split"),
    _rule("projection_in", focal_net, "FocalNetModulation"),
    _rule(r"weight_[ih]h\w*", equal(4), r"torch\.nn\.modules\.rnn\.LSTM(Cell)?"),
    _rule(r"weight_[ih]h\w*", equal(3), r"torch\.nn\.modules\.rnn\.GRU(Cell)?"),
    _rule("kv_proj|gate_proj", two_series, r"DeepseekV4\w*(Compressor|Indexer)"),
    # Linear attention, state spaces, short convolutions
    _rule("in_proj_qkvz|in_proj_ba|in_proj_qkv", gated_delta_net, "", *DELTA),
    _rule("in_proj", mamba_input, "", "A_log", "D"),
    _rule("x_proj|x_proj_weight", mamba_scan, "", "A_log", "D"),
    _rule("in_proj", equal(3), r"Lfm\d\w*ShortConv"),
    _rule("qkv_opreact|ifgate_preact", xlstm, "xLSTMLayer"),
    # Gated linear units
    _rule("w1|v1|w2", experts_in_rows, "DbrxExpertGLU"),
    _rule(GLU, gate_and_up),
    _rule("proj", equal(2), r"diffusers\.models\.activations\.(GEGLU|SwiGLU)"),
)
# fmt: on


# Weights that look fused in a class without a rule

NAMED_Q_K_V = re.compile(r"qkv|query_key_value|queries_keys_values|^W_pack$")


def looks_like_q_k_v(weight: Weight) -> list[Blocks] | None:
    """The possible splits of a weight that is named after q, k and v; None for other names. A name
    that several kinds of layers have counts if the outputs are those of q, k and v.
    """
    weak = re.search(r"^(c_attn|att_proj|attn_proj|in_proj|in_proj_weight)$", weight.layer)
    fits = weight.outputs == 3 * weight.inputs or (
        weight.number(*KV_HEADS) and _adds_up(q_k_v(weight), weight)
    )
    if not NAMED_Q_K_V.search(weight.layer) and not (weak and fits):
        return None
    heads, kv_heads, head_dim = _fitting_heads(weight)
    if not heads or not head_dim:
        known = weight.number(*KV_HEADS)  # thirds would contradict fewer key heads
        candidates = [] if known and known != weight.number(*HEADS) else [equal(3)(weight)]
    else:
        queries, keys = heads * head_dim, kv_heads * head_dim
        in_turns = queries // kv_heads, head_dim, head_dim
        candidates = [Blocks((queries, keys, keys)), Blocks(in_turns, kv_heads)]
    return [blocks for blocks in candidates if _adds_up(blocks, weight)]


def _fitting_heads(weight: Weight) -> tuple[int, int, int]:
    """`Weight.heads` of a weight with q, k and v in an unknown class. Without a number of key heads
    it follows from the outputs: a default that does not fit would suggest wrong sizes.
    """
    heads, kv_heads, head_dim = weight.heads()
    if not weight.number(*KV_HEADS) and heads and head_dim:
        rest = weight.outputs // head_dim - heads  # heads of k and of v
        if weight.outputs % head_dim == 0 and rest > 0 and rest % 2 == 0:
            kv_heads = rest // 2
    return (heads, kv_heads, head_dim) if heads and heads % kv_heads == 0 else (0, 0, 0)


def looks_like_k_v(weight: Weight) -> list[Blocks] | None:
    """The possible splits of a weight that is named after k and v, beside a q; else None."""
    if not re.search(r"^(kv|kv_proj|to_kv|Wkv|wkv|c_attn|key_value)$", weight.layer):
        return None
    queries = ("q", "q_proj", "to_q", "Wq", "wq", "q_attn", "query")
    if not any(is_linear(getattr(weight.holder, name, None)) for name in queries):
        return None
    if weight.outputs % 2:
        return []
    heads = weight.number(*KV_HEADS) or weight.number(*HEADS)
    halves = Blocks((weight.outputs // 2,) * 2)
    if heads and weight.outputs % (2 * heads) == 0:
        return [halves, Blocks((weight.outputs // (2 * heads),) * 2, heads)]
    return [halves]


def _looks_like_gate_and_up(weight: Weight) -> list[Blocks] | None:
    """The possible splits of a weight that is named after gate and up, without a layer beside it
    that takes half of its outputs; else None.
    """
    named = re.search(r"^(gate_up_proj|gate_up|up_gate_proj|gate_and_up)$", weight.layer)
    if not named or weight.outputs % 2 or weight.outputs in weight.siblings():
        return None
    half = weight.outputs // 2
    return [Blocks((half, half)), Blocks((1, 1), half)]


def _adds_up(blocks: Blocks | None, weight: Weight) -> bool:
    """Whether the sizes of `blocks` make the outputs of a weight; False for None."""
    return blocks is not None and sum(blocks.sizes) * blocks.repeat == weight.outputs


SUSPECTS: tuple[Callable[[Weight], list[Blocks] | None], ...] = (
    looks_like_q_k_v,
    looks_like_k_v,
    _looks_like_gate_and_up,
)

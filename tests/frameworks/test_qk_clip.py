"""QK-clip on attention classes of transformers: layers found, maxima beside eager attention, logits after a step.

The reference takes the largest inputs of softmax from the eager implementation of the model with equal weights.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.overrides import TorchFunctionMode

transformers = pytest.importorskip("transformers")

BASE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ALIKE = {**BASE, "num_key_value_heads": 4}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False, "bos_token_id": 1,
       "eos_token_id": 2}
MLA = {**ALIKE, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
       "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
       "first_k_dense_replace": 1}
APART = {"q_proj": ("q",), "k_proj": ("k",)}
LATENT = {"q_b_proj": ("q", "q_rope"), "kv_b_proj": ("k", "v")}
FUSED = ("q", "k", "v")

# Name: (class of the config, its arguments, key heads, {layer of a projection: roles of its blocks})
FOUND = {
    "Llama": ("LlamaConfig", BASE, 2, APART),
    "Mixtral": ("MixtralConfig", {**BASE, "num_local_experts": 4, "sliding_window": 4}, 2, APART),
    "Qwen2, biases": ("Qwen2Config", BASE, 2, APART),
    "GPT-2, Conv1D": ("GPT2Config", GPT, 4, {"c_attn": FUSED}),
    "GPT-NeoX": ("GPTNeoXConfig", ALIKE, 4, {"query_key_value": FUSED}),
    "Falcon, by group": ("FalconConfig", {**BASE, "num_kv_heads": 2, "new_decoder_architecture": True}, 2,
                         {"query_key_value": FUSED}),
    "Phi-3": ("Phi3Config", BASE, 2, {"qkv_proj": FUSED}),
    "CodeGen": ("CodeGenConfig", {**GPT, "rotary_dim": 4}, 4, {"qkv_proj": ("q", "v", "k")}),
    "DeepSeek-V3": ("DeepseekV3Config", MLA, 4, LATENT),
    "DeepSeek-V3, whole queries": ("DeepseekV3Config", {**MLA, "q_lora_rank": None}, 4,
                                   {"q_proj": ("q", "q_rope"), "kv_b_proj": ("k", "v")}),
    "Gemma": ("GemmaConfig", {**BASE, "head_dim": 16}, 2, APART),
}
NORMED = {"Qwen3": ("Qwen3Config", {**BASE, "head_dim": 16}, "Qwen3Attention"),
          "Gemma3": ("Gemma3TextConfig", {**BASE, "head_dim": 16}, "Gemma3Attention")}


def recorded_of(clip, layer):
    """The maxima recorded for the next step."""
    recorded, at = clip._recorded[torch.device("cpu")], clip._recorded[torch.device("cpu")].places[layer]
    return recorded.values[0, at:at + clip.layers[layer].heads]


def built(kind, arguments, implementation):
    """A model in which logits are of the order of ten."""
    config = getattr(transformers, kind)(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1 or name.endswith("bias"):
                size = 1.0 if p.ndim == 1 or "embed" in name or "wte" in name else 2.5 / p.shape[-1] ** 0.5
                p.copy_(size * torch.randn(p.shape, generator=generator))
    return model


def run(model):
    tokens = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    mask[1, 9:] = 0  # the second text is shorter
    with torch.no_grad():
        model(input_ids=tokens, attention_mask=mask)


class SoftmaxInputs(TorchFunctionMode):
    """{layer: the largest input of softmax of each head} of the modules of these names."""

    def __init__(self, model, layers):
        super().__init__()
        self.found, self.running = {}, None
        for name in layers:
            model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: setattr(self, "running", name))
            model.get_submodule(name).register_forward_hook(lambda *_: setattr(self, "running", None))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "softmax" and self.running:
            logits = args[0] if args else kwargs["input"]
            self.found[self.running] = logits.amax((0, 2, 3)).float()
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", FOUND)
def test_maxima_are_those_of_eager_attention_and_a_step_bounds_them(name, optimizer):
    kind, arguments, kv_heads, projections = FOUND[name]
    for mode in ("keep", "shrink"):
        model = built(kind, arguments, "sdpa")
        clip = optimizer.QKClip.of(model, shared_keys=mode)
        assert len(clip.layers) == 2
        for layer in clip.layers.values():
            assert (layer.heads, layer.kv_heads) == (4, kv_heads)
            roles = {weight.rsplit(".", 2)[1]: part.roles for weight, part in layer.weights.items()}
            assert roles == projections
        names = dict(model.named_parameters())
        biased = {weight.replace(".weight", ".bias") for layer in clip.layers.values() for weight in layer.weights}
        assert all(bias in clip.layers[bias.rsplit(".", 2)[0]].weights for bias in biased & names.keys())
        opt = optimizer.Muon([{"params": [*names.items()], "use_muon": False}], lr=0.0, weight_decay=0.0, qk_clip=clip)
        with SoftmaxInputs(eager := built(kind, arguments, "eager"), clip.layers) as expected:
            run(eager)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with clip.recording(model):
                run(model)
        for layer, maxima in expected.found.items():
            torch.testing.assert_close(recorded_of(clip, layer), maxima, rtol=2e-6, atol=0)
        first = next(layer for layer in clip.layers if ".0." in layer)
        before = recorded_of(clip, first).clone()
        clip.threshold = float(before.sort().values[1])  # above two of four heads
        for p in names.values():
            p.grad = torch.zeros_like(p)
        opt.step()
        torch.testing.assert_close(opt.qk_clip.maxima[first], before, rtol=0, atol=0)
        with clip.recording(model):
            run(model)
        after, bounded = recorded_of(clip, first), before.clamp_max(clip.threshold)
        if mode == "keep":
            torch.testing.assert_close(after, bounded, rtol=2e-6, atol=0)
        assert (after <= bounded * (1 + 2e-6)).all() and len(expected.found) == 2


@pytest.mark.parametrize("name", NORMED)
def test_norms_of_queries_and_keys_are_refused_by_name(name, optimizer):
    kind, arguments, attention = NORMED[name]
    with pytest.raises(ValueError, match=rf"module model.layers.0.self_attn .*{attention}. has a norm .q_norm, k_norm"):
        optimizer.QKClip.of(built(kind, arguments, "sdpa"))


def test_eager_attention_is_told_by_name(optimizer):
    model = built("LlamaConfig", BASE, "eager")
    clip = optimizer.QKClip.of(model)
    with pytest.warns(UserWarning, match="2 of 2 layers, the first model.layers.0.self_attn, called no scaled_dot"):
        with clip.recording(model):
            run(model)

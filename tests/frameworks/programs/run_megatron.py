"""A tiny GPT of Megatron-Core under tensor, data and expert parallelism: run_megatron.py MODE RANKS EXPERT_RANKS.

train: fifty steps, with Megatron's clipping: losses with our entry and with Megatron's own muon, and how far apart the
weights are. bits: five steps with gradients drawn for whole parameters, and a checkpoint after three: digests of whole
weights, for each of copies (data parallel ranks hold everything), bf16 (also, with fp32 main parameters), layers (in
bf16, Megatron gives each rank some parameters), experts. RANKS of tensor, EXPERT_RANKS of expert parallelism, the
latter with experts only.
"""

from __future__ import annotations

import copy
import os
import re
import sys
import zlib
from unittest import mock

import torch
import torch.distributed as dist

from tests.frameworks.common import digest, megatron_on_cpu, say

megatron_on_cpu()

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.emerging_optimizers import _EMERGING_OPTIMIZERS
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer, tag_params_for_buffer_routing
from megatron.core.transformer import TransformerConfig

from tests.ranks import package

VOCABULARY, LENGTH, BATCH = 64, 16, 16


def model_of(ranks: int, how: str, expert_ranks: int) -> DistributedDataParallel:
    """Equal whole weights for any number of ranks. layers: as Megatron's training lays out its buffers."""
    torch.manual_seed(0)
    is_bf16 = how in ("bf16", "layers")
    more = {}
    if how == "experts":
        more = {"num_moe_experts": 4, "expert_model_parallel_size": expert_ranks, "moe_ffn_hidden_size": 40}
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        use_cpu_initialization=True, normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0,
        bias_dropout_fusion=False, masked_softmax_fusion=False, tensor_model_parallel_size=ranks, bf16=is_bf16,
        params_dtype=torch.bfloat16 if is_bf16 else torch.float32, gradient_accumulation_fusion=False, **more)
    spec = get_gpt_layer_local_spec(num_experts=more.get("num_moe_experts"), moe_grouped_gemm=False,
                                    normalization="RMSNorm")
    model = GPTModel(config, spec, VOCABULARY, LENGTH, share_embeddings_and_output_weights=False)
    model = model.bfloat16() if is_bf16 else model
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=how == "layers")
    layout = {}
    if how == "layers":
        tag_params_for_buffer_routing([model])
        copies = parallel_state.get_data_parallel_world_size()
        layout["full_param_layout"] = LayerWiseDistributedOptimizer.compute_full_param_layout(
            list(model.parameters()), None, copies, ddp)
    return DistributedDataParallel(config, ddp, model, **layout)


def optimizer_of(model, how: str, clip: float):
    config = OptimizerConfig(
        optimizer="muon", lr=0.01, weight_decay=0.1, clip_grad=clip, bf16=how in ("bf16", "layers"), muon_nesterov=True,
        muon_tp_mode="duplicated", muon_extra_scale_factor=0.2, muon_fp32_matmul_prec="highest",
        params_dtype=torch.bfloat16 if how in ("bf16", "layers") else torch.float32,
        use_layer_wise_distributed_optimizer=how == "layers")
    return get_megatron_optimizer(config, [model])


def train(model, how: str) -> list[float]:
    """The losses of steps on tokens of which 7 in 10 follow from the token before."""
    optimizer, losses = optimizer_of(model, how, 1.0), []
    generator = torch.Generator().manual_seed(1)
    places = torch.arange(LENGTH).expand(BATCH, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    for _ in range(50):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        is_known = torch.rand(BATCH, LENGTH, generator=generator) < 0.7
        for i in range(LENGTH):
            tokens[:, i + 1] = torch.where(is_known[:, i], (3 * tokens[:, i] + 7) % VOCABULARY, tokens[:, i + 1])
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:].contiguous()).float().mean()
        loss.backward()
        model.finish_grad_sync()
        success, norm, _ = optimizer.step()
        assert success and norm > 0
        losses.append(float(loss.detach()))
    return losses


def whole_name(name: str) -> str:
    """With the number of an expert among those of all ranks."""
    ranks, rank = (call() for call in (parallel_state.get_expert_model_parallel_world_size,
                                       parallel_state.get_expert_model_parallel_rank))
    return re.sub(r"local_experts\.(\d+)", lambda found: f"experts.{int(found[1]) + rank * 4 // ranks}", name)


def draw(model, step: int) -> None:
    """Write this rank's part of gradients, or with step -1 of weights, that are drawn for the whole parameters."""
    rank, ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    for name, p in model.named_parameters():
        is_sharded, dim = getattr(p, "tensor_model_parallel", False), getattr(p, "partition_dim", -1)
        shape = list(p.shape)
        if is_sharded:
            shape[dim] *= ranks
        generator = torch.Generator().manual_seed(zlib.crc32(whole_name(name).encode()) + step)
        whole = torch.randn(shape, generator=generator)
        if is_sharded:
            parts = whole.chunk(getattr(p, "partition_stride", 1), dim)
            whole = torch.cat([part.chunk(ranks, dim)[rank] for part in parts], dim)
        (p.main_grad if step >= 0 else p.data).copy_(whole)


def whole_weights(model) -> dict:
    """{name: whole parameter}, gathered over tensor and expert parallelism."""
    group, found = parallel_state.get_tensor_model_parallel_group(), {}
    for name, p in model.named_parameters():
        found[name] = p.detach().float()
        if getattr(p, "tensor_model_parallel", False):
            shards = [torch.empty_like(found[name]) for _ in range(group.size())]
            dist.all_gather(shards, found[name], group)
            parts = zip(*(shard.chunk(getattr(p, "partition_stride", 1), p.partition_dim) for shard in shards))
            found[name] = torch.cat([shard for part in parts for shard in part], p.partition_dim)
    found = {whole_name(name): value for name, value in found.items()}
    everywhere = [None] * parallel_state.get_expert_model_parallel_world_size()
    dist.all_gather_object(everywhere, found, parallel_state.get_expert_model_parallel_group())
    return {name: value for found in everywhere for name, value in found.items()}


def bits(model, how: str) -> dict:
    """Digests after five steps: straight, and with a new optimizer and a loaded state for the last two."""
    def part_of(optimizer):
        """layers: without Megatron's Adam, whose state dict needs more than torch's AdamW has."""
        return optimizer.chained_optimizers[0] if how == "layers" else optimizer

    def result() -> str:
        found = whole_weights(model)
        is_matrix = re.compile(r"linear_|router").search
        return digest({name: value for name, value in found.items() if how != "layers" or is_matrix(name)})

    draw(model, -1)
    optimizer = optimizer_of(model, how, 0.0)
    for step in range(5):
        if step == 3:
            saved = copy.deepcopy([part_of(optimizer).state_dict(), model.state_dict()])
        draw(model, step)
        optimizer.step()
    straight = result()
    model.load_state_dict(saved[1])
    optimizer = optimizer_of(model, how, 0.0)
    # As Megatron loads a checkpoint: state is there before
    part_of(optimizer).sharded_state_dict(model.sharded_state_dict(), is_loading=True)
    part_of(optimizer).load_state_dict(saved[0])
    for step in range(3, 5):
        draw(model, step)
        optimizer.step()
    muon = optimizer.chained_optimizers[0]
    muon = getattr(muon, "chained_optimizers", [muon])[0].optimizer
    keys = {key for state in muon.state.values() for key in state}
    count = sum(len(group["params"]) for group in muon.param_groups)
    return {"straight": straight, "resumed": result(), "state": sorted(keys), "optimizer": type(muon).__name__,
            "count": count}


def main() -> None:
    mode, ranks, expert_ranks = sys.argv[1], *map(int, sys.argv[2:])
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    own, found, trained = dict(_EMERGING_OPTIMIZERS), {}, {}
    package().register_megatron_muon(**({"wire_dtype": "fp32"} if mode == "train" else {}))
    for how in ("own", "copies") if mode == "train" else ("copies", "bf16", "layers", "experts"):
        parallel_state.initialize_model_parallel(
            ranks, expert_model_parallel_size=expert_ranks if how == "experts" else 1)
        entries = {**_EMERGING_OPTIMIZERS, **own} if how == "own" else {}
        with mock.patch.dict(_EMERGING_OPTIMIZERS, entries):
            model = model_of(ranks, how, expert_ranks)
            start = whole_weights(model) if mode == "train" else {}
            found[how] = train(model, how) if mode == "train" else bits(model, how)
            trained[how] = whole_weights(model) if mode == "train" else {}
        parallel_state.destroy_model_parallel()
    if mode == "train":
        found["deviation"] = {name: float((p - trained["copies"][name]).norm() / (p - start[name]).norm())
                              for name, p in trained["own"].items()}
    say(**found)
    dist.barrier()
    dist.destroy_process_group()


main()

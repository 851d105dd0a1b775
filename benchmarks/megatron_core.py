"""Muon under Megatron-Core: a GPT trained with Megatron's own `muon` and with our entry, on equal weights and tokens.

    make build && torchrun --nproc-per-node 2 benchmarks/megatron_core.py --tensor-parallel 2 --out megatron_core.csv

Needs megatron-core and emerging-optimizers (requirements/megatron.txt), and a GPU for each rank. Both models take each
step in turn, in bf16 with fp32 main parameters. A row for each of them: the first and the last loss, the largest
difference of losses in any step, and the median time of Megatron's `optimizer.step()` on the slowest rank, with its
clipping and, with --layer-wise, its all-gather of weights. --tp-mode is that of Megatron's own: duplicated and
distributed orthogonalize whole matrices, as our entry does, and blockwise shards.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
from rows import add_output, append  # noqa: E402
from step import device_name, pick_device, synchronize  # noqa: E402

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={HERE.parent}")

COLUMNS = ("commit gpu ranks tensor_parallel layer_wise implementation layers hidden steps first_loss last_loss "
           "largest_difference step_ms p80_step_ms torch megatron").split()
VOCABULARY = 1024


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--layer-wise", action="store_true", help="Megatron's layer-wise distributed optimizer")
    parser.add_argument("--tp-mode", choices=("duplicated", "distributed", "blockwise"), default="duplicated")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4, help="sequences of each data parallel rank")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10, help="steps whose times do not count")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    add_output(parser, COLUMNS, "megatron_core.csv")
    return parser.parse_args()


def model_of(options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """Megatron's GPT under its DistributedDataParallel, with equal weights at each call."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import layer_wise_optimizer as layer_wise
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(options.seed)
    config = TransformerConfig(
        num_layers=options.layers, hidden_size=options.hidden, ffn_hidden_size=4 * options.hidden,
        num_attention_heads=options.hidden // 64, num_query_groups=options.hidden // 128, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=options.tensor_parallel, bf16=True, params_dtype=torch.bfloat16,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False)
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, options.sequence,
                     share_embeddings_and_output_weights=False).to(device).bfloat16()
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=options.layer_wise)
    layout = {}
    if options.layer_wise:
        layer_wise.tag_params_for_buffer_routing([model])
        layout["full_param_layout"] = layer_wise.LayerWiseDistributedOptimizer.compute_full_param_layout(
            list(model.parameters()), None, parallel_state.get_data_parallel_world_size(), ddp)
    return DistributedDataParallel(config, ddp, model, **layout)


def optimizer_of(model: torch.nn.Module, options: argparse.Namespace, entries: dict) -> object:
    """Megatron's optimizer, built from `entries` of its registry."""
    from megatron.core.optimizer import OptimizerConfig, emerging_optimizers, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="muon", lr=options.lr, weight_decay=0.1, clip_grad=1.0, bf16=True, params_dtype=torch.bfloat16,
        muon_nesterov=True, muon_extra_scale_factor=0.2, muon_tp_mode=options.tp_mode,
        use_layer_wise_distributed_optimizer=options.layer_wise)
    with mock.patch.dict(emerging_optimizers._EMERGING_OPTIMIZERS, entries):
        return get_megatron_optimizer(config, [model])


def take_step(model, optimizer, tokens: torch.Tensor, mask: torch.Tensor, device) -> tuple[float, float]:
    """(loss, ms of optimizer.step())."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    places = torch.arange(tokens.shape[1] - 1, device=device).expand(len(tokens), -1)
    loss = model(tokens[:, :-1].contiguous(), places, mask, labels=tokens[:, 1:].contiguous()).float().mean()
    loss.backward()
    model.finish_grad_sync()
    synchronize(device)
    start = time.perf_counter()
    optimizer.step()
    synchronize(device)
    return float(loss.detach()), 1e3 * (time.perf_counter() - start)


def tokens_of(options: argparse.Namespace, step: int, rank: int, device) -> torch.Tensor:
    """Random walks over the vocabulary, which a model can learn."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    moves = torch.randint(1, 5, (options.batch, options.sequence + 1), generator=generator)
    return (moves.cumsum(1) % VOCABULARY).to(device)


def slowest(times: list[float], device) -> list[float]:
    found = torch.tensor(times, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def main() -> None:
    options = arguments()
    device = pick_device(int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    import megatron.core
    from kernels import get_kernel
    from megatron.core import parallel_state
    from megatron.core.optimizer.emerging_optimizers import _EMERGING_OPTIMIZERS
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(options.tensor_parallel)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(options.seed)
    entries = {"megatron": dict(_EMERGING_OPTIMIZERS)}
    get_kernel("org/optimizer", version=1).register_megatron_muon()
    entries["ours"] = dict(_EMERGING_OPTIMIZERS)
    made = {}
    for name, held in entries.items():
        model = model_of(options, device)
        made[name] = model, optimizer_of(model, options, held)
    mask = torch.ones(1, 1, options.sequence, options.sequence, device=device).tril() < 0.5
    losses, times = {name: [] for name in made}, {name: [] for name in made}
    for step in range(options.steps):
        tokens = tokens_of(options, step, parallel_state.get_data_parallel_rank(), device)
        for name in sorted(made, reverse=bool(step % 2)):
            loss, ms = take_step(*made[name], tokens, mask, device)
            losses[name].append(loss)
            times[name].append(ms)
    difference = max(abs(a - b) for a, b in zip(*losses.values()))
    rows = []
    for name in made:
        counted = slowest(times[name], device)[min(options.warmup, options.steps - 2):]
        p80 = statistics.quantiles(counted, n=5, method="inclusive")[3]
        rows.append({
            "commit": options.commit, "gpu": device_name(device), "ranks": dist.get_world_size(),
            "tensor_parallel": options.tensor_parallel, "layer_wise": options.layer_wise,
            "implementation": name if name == "ours" else f"megatron {options.tp_mode}", "layers": options.layers,
            "hidden": options.hidden, "steps": options.steps, "first_loss": f"{losses[name][0]:.5f}",
            "last_loss": f"{losses[name][-1]:.5f}", "largest_difference": f"{difference:.2e}",
            "step_ms": f"{statistics.median(counted):.3f}", "p80_step_ms": f"{p80:.3f}", "torch": torch.__version__,
            "megatron": megatron.core.__version__})
    if dist.get_rank() == 0:
        append(options.out, COLUMNS, rows)
        for row in rows:
            print(", ".join(f"{key} {row[key]}" for key in (
                "implementation", "first_loss", "last_loss", "largest_difference", "step_ms")))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The matrices of models that optimizer steps are measured on, and the floor of their step."""

from __future__ import annotations

import heapq

# Of an H200, not read from the package's table: floors of rows that were measured before are to stay what they were.
TENSOR_FLOPS = 790e12  # bf16 matrix product of 8192^3 with random data on an H200 (docs/facts.md)
COPY_BYTES_PER_S = 4.3e12  # bytes read and written by a device copy
ALL_TO_ALL_BYTES_PER_S = 325e9  # all_to_all_single over 8 ranks, per direction
EXPOSED_ALL_TO_ALL = 0.4  # the part of an all-to-all's time that lengthens the products it overlaps

MODELS = {  # name -> [(in how many layers, shape)]
    "gpt2_124m": [(12, shape) for shape in 4 * [(768, 768)] + [(3072, 768), (768, 3072)]],
    "qwen3_1p7b": [(28, s) for s in 2 * [(2048, 2048)] + 2 * [(1024, 2048)] + 2 * [(6144, 2048)] + [(2048, 6144)]],
    "llama3_8b": [(32, s) for s in 2 * [(4096, 4096)] + 2 * [(1024, 4096)] + 2 * [(14336, 4096)] + [(4096, 14336)]],
    "motif_12b": [(40, s) for s in 2 * [(4096, 4096)] + 2 * [(1024, 4096)] + 2 * [(4096, 16384)] + [(16384, 4096)]],
    "moe_experts": [(4, s) for s in 2 * [(128, 768, 2048)] + [(128, 2048, 768)]],
    # That of benchmarks/train.py
    "gpt_1b": [(20, s) for s in 4 * [(2048, 2048)] + 2 * [(5504, 2048)] + [(2048, 5504)]],
    # 1T parameters: latent attention and a dense MLP or 1 shared and 384 routed experts (arXiv 2507.20534 and the
    # config.json of moonshotai/Kimi-K2-Base); router and embeddings go to AdamW, as does whatever is no matrix
    "kimi_k2": [
        *((61, s) for s in [(1536, 7168), (12288, 1536), (576, 7168), (16384, 512), (7168, 8192)]),
        *((1, s) for s in 2 * [(18432, 7168)] + [(7168, 18432)]),
        *((60, s) for s in 2 * [(2048, 7168)] + [(7168, 2048)]),
        *((60, s) for s in 2 * [(384, 2048, 7168)] + [(384, 7168, 2048)])],
    "tiny": [(2, shape) for shape in [(32, 32), (32, 48), (48, 32)]],  # for tests, on a CPU
    "tiny_experts": [(1, shape) for shape in [(8, 16, 24), (8, 24, 16)]],
}

ADAMW = {  # name -> [(in how many layers, shape)]: embeddings, norms and biases, with use_muon=False
    "gpt2_124m": [(1, (50257, 768)), (1, (1024, 768)), *2 * [(1, (768,))],
                  *((12, (n,)) for n in (2304, 3072, *6 * [768]))],
    "qwen3_1p7b": [(1, (151936, 2048)), (1, (2048,)), *((28, (n,)) for n in (2048, 2048, 128, 128))],
    "llama3_8b": [*2 * [(1, (128256, 4096))], (1, (4096,)), *2 * [(32, (4096,))]],
    "gpt_1b": [*2 * [(1, (256, 2048))], (1, (2048,)), *2 * [(20, (2048,))]],
    "tiny": [(1, (700, 48)), (2, (32,))],
}
ADAMW_BYTES = 28  # an element: gradient in; weight and two averages in and out


def shapes_of(model: str, layers: int | None = None, of: dict = MODELS) -> list[tuple[int, ...]]:
    """The shape of every parameter, layer by layer; `layers` in place of the model's own number. `of`: MODELS, or ADAMW
    for the parameters that are AdamW's.

    What a model has in some of its layers only is in the first ones here.
    """
    own = max(count for count, _ in MODELS[model])
    return [shape for layer in range(layers or own) for count, shape in of[model]
            if layer < count or count == own]


def products_flops(rows: int, columns: int, steps: int = 5) -> float:
    """The FLOPs of one orthogonalization, symmetric results counted once: the cheaper of standard and one-restart
    Gram.
    """
    n, m = sorted((rows, columns))
    return min(steps * (3 * m + n) * n * n, (6 * m + (4 * steps - 6) * n) * n * n)


def floor_ms(shapes, ranks: int, shards: int | None = None, mode: str = "fsdp") -> float:
    """What the step takes at least: products at the measured rate over balanced ranks, memory traffic, exposed
    all-to-alls.

    `shards`: ranks that hold one copy together (default: all; 1: replicated). `mode` "reduce": gradients travel in from
    all ranks, state is the owner's; "ep": nothing travels; "allreduce": gradients, fp32, are all-reduced before.
    Memory, bytes an element: momentum 14 (gradient, momentum in and out, update) on one copy, split between all; update
    10, where stored; assembly 4 and back 4 at the owner. All-to-alls: what a rank receives, of its own and stored
    matrices.
    """
    matrices = [(s[-2:], numel) for s in shapes for numel in [s[-2] * s[-1]] * (s[0] if len(s) == 3 else 1)]
    loads, shards = [0.0] * ranks, shards or ranks
    for flops in sorted((products_flops(*shape) for shape, _ in matrices), reverse=True):
        heapq.heapreplace(loads, loads[0] + flops)
    elements = sum(numel for _, numel in matrices)
    stored, owned, others = elements / shards, elements / ranks, (ranks - 1) / ranks
    moved = stored * 10 + owned * (14 + 8 * (shards > 1))
    travels = owned * (1 - 1 / shards) + stored * others
    if mode == "reduce":  # pack 6, update 10; the owner sums what came (2 from each rank), and has momentum
        moved, travels = stored * 16 + owned * (2 * ranks + 14), 2 * stored * others
    if mode == "ep":
        moved, travels = stored * 24, 0
    reduced = 8 * elements * others if mode == "allreduce" else 0
    all_to_all_s = (2 * travels * EXPOSED_ALL_TO_ALL + reduced) / ALL_TO_ALL_BYTES_PER_S
    return 1e3 * (max(loads) / TENSOR_FLOPS + moved / COPY_BYTES_PER_S + all_to_all_s)

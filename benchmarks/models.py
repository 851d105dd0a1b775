"""The matrices of models that optimizer steps are measured on, and the floor of their step."""

from __future__ import annotations

import heapq

TENSOR_FLOPS = 790e12  # bf16 matrix product of 8192^3 with random data on an H200 (docs/facts.md)
COPY_BYTES_PER_S = 4.3e12  # bytes read and written by a device copy
WIRE_BYTES_PER_S = 325e9  # all_to_all_single over 8 ranks, per direction
EXPOSED_WIRE = 0.4  # the part of the wire's time that lengthens the products it overlaps

MODELS = {  # name -> [(how many, shape)]
    "gpt2_124m": [(12, shape) for shape in 4 * [(768, 768)] + [(3072, 768), (768, 3072)]],
    "qwen3_1p7b": [(28, s) for s in 2 * [(2048, 2048)] + 2 * [(1024, 2048)] + 2 * [(6144, 2048)] + [(2048, 6144)]],
    "llama3_8b": [(32, s) for s in 2 * [(4096, 4096)] + 2 * [(1024, 4096)] + 2 * [(14336, 4096)] + [(4096, 14336)]],
    "motif_12b": [(40, s) for s in 2 * [(4096, 4096)] + 2 * [(1024, 4096)] + 2 * [(4096, 16384)] + [(16384, 4096)]],
    "moe_experts": [(4, s) for s in 2 * [(128, 768, 2048)] + [(128, 2048, 768)]],
}


def shapes_of(model: str, layers: int | None = None) -> list[tuple[int, ...]]:
    """The shape of every parameter, layer by layer; `layers` in place of the model's own number."""
    per_layer = MODELS[model]
    return [shape for _ in range(layers or per_layer[0][0]) for _, shape in per_layer]


def products_flops(rows: int, columns: int, steps: int = 5) -> float:
    """The FLOPs of one orthogonalization, symmetric results counted once: the cheaper of standard and one-restart
    Gram.
    """
    n, m = sorted((rows, columns))
    return min(steps * (3 * m + n) * n * n, (6 * m + (4 * steps - 6) * n) * n * n)


def floor_ms(shapes, ranks: int, replicated: bool = False) -> float:
    """What the step takes at least: products at the measured rate over balanced ranks, memory traffic, exposed wire.

    Memory: momentum 14 bytes an element (gradient, momentum in and out, update), assembly 4 and back 4, update 10, at
    home; replicated parameters have all of home on every rank.
    """
    matrices = [(s[-2:], numel) for s in shapes for numel in [s[-2] * s[-1]] * (s[0] if len(s) == 3 else 1)]
    loads = [0.0] * ranks
    for flops in sorted((products_flops(*shape) for shape, _ in matrices), reverse=True):
        heapq.heapreplace(loads, loads[0] + flops)
    elements = sum(numel for _, numel in matrices)
    home, owned = elements if replicated else elements / ranks, elements / ranks
    memory_s = (home * 24 + owned * 4) / COPY_BYTES_PER_S
    travels = elements / ranks * (ranks - 1) * (1 if replicated else 2 / ranks)  # a copy for each, or there and back
    wire_s = 2 * travels / WIRE_BYTES_PER_S
    return 1e3 * (max(loads) / TENSOR_FLOPS + memory_s + EXPOSED_WIRE * wire_s)

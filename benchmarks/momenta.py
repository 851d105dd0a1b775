"""Matrices that Muon orthogonalizes in a training, for schedules.py: errors of restart intervals on them.

    make build && python benchmarks/momenta.py --size 30m --at 10 30 100 300 --out momenta.pt
    python benchmarks/schedules.py errors --momenta momenta.pt --schedules polar_express:5 --cuts 3+2 2+3 1+2+2

A GPT of convergence.py is trained with our Muon and the rates given. The schedule is that of a whole run of
convergence.py, also if `--at` ends earlier. --out gets {"step name": matrix}, U = (1 - momentum) G + momentum M in
bf16, of every hidden matrix at each of the steps --at.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent)]
from convergence import SIZES, Run, Training  # noqa: E402

MOMENTUM = 0.95


def main() -> None:
    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = Run("muon", options.lr, options.embed_lr, options.embed_lr, options.seed)
    training, found = Training(run, options, device), {}
    for step in range(max(options.at)):
        loss = training.backward(training.prepare(step))
        training.optimizers[0].step()
        if step + 1 in options.at:
            found |= {f"{step + 1} {name}": U.bfloat16().cpu() for name, U in matrices(training)}
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
        training.model.zero_grad()
    torch.save(found, options.out)
    print(f"{len(found)} matrices: {options.out}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="30m")
    parser.add_argument("--at", nargs="+", type=int, default=[10, 30, 100, 300], help="steps")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--embed-lr", type=float, default=2e-3, help="of embeddings, head and norms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default=None, help="folder whose *.py files are the text (default: Python's library)")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.steps, options.folders = None, {}
    return options


def matrices(training: Training):
    """Yield (name, U) of each hidden matrix, after a step whose gradients are still there."""
    optimizer = training.optimizers[0]
    for name, p in training.model.blocks.named_parameters():
        if p.ndim == 2:
            yield name, p.grad.lerp(optimizer.state[p]["momentum_buffer"], MOMENTUM)


if __name__ == "__main__":
    main()

"""What formats of stored momentum lose: the table of docs/math.md, "Momentum in 8 bits". On a CPU, about 4 minutes.

    make build && python benchmarks/momentum_formats.py
    ... --problems sparse --formats square:64 e4m3:64 --steps 100

Momenta run beside one in fp32, with the same gradients: each step computes M in fp32 from what is stored, and stores it
again, rounded. A figure is the relative error in percent, in the Frobenius norm, of O, five Newton-Schulz steps of
Nesterov's momentum, and in brackets of M as stored. It is the mean over the matrices, and over ten steps that are
spread over the second half.

A format is the levels in [-1, 1] of an element in units of the largest of its block along a row. Problems: "training",
the matrices of the GPT of examples/ (width 192, 2 layers, bytes of Python's standard library), stepped by the fp32
momentum; 128 x 256 matrices of "low rank, t NU", gradients of rank 8 that turn slowly, with noise of Student's t of NU
degrees of freedom, and rows and columns of lognormal size; and "sparse", noise in a random tenth of the columns.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "examples")]
from corpus import random_windows, read_corpus  # noqa: E402
from gpt import GPT  # noqa: E402
from kernels import get_kernel  # noqa: E402

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={Path(__file__).resolve().parents[1]}")

MOMENTUM, LR = 0.95, 0.02
LOOKS = 10  # steps at which errors are taken
FORMATS = ("square:64", "square:128", "square:256", "square, stochastic:64", "linear:64", "linear, stochastic:64",
           "dynamic:64", "e4m3:64", "e4m3, stochastic:64", "bf16")  # name:block


def levels_of(name: str) -> torch.Tensor:
    """Ascending values in [-1, 1], fp32."""
    numbers = torch.arange(-127, 128, dtype=torch.float64) / 127
    if name == "linear":
        found = numbers
    elif name == "square":  # that of state_dtype=torch.int8
        found = numbers * numbers.abs()
    elif name == "e4m3":
        found = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()
        found = found[found.isfinite()] / 448
    elif name == "dynamic":  # of bitsandbytes, arXiv 1511.04561: a decade has twice the levels of the one below
        ends = [torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float64) for i in range(7)]
        decades = [10.0 ** (i - 6) * (end[1:] + end[:-1]) / 2 for i, end in enumerate(ends)]
        found = torch.cat([torch.tensor([0.0, 1.0], dtype=torch.float64), *decades, *(-d for d in decades)])
    else:
        raise ValueError(f"{name} is no format")
    return found.unique().float()


class Stored:
    """A momentum in a format."""

    def __init__(self, form: str) -> None:
        name, _, block = form.partition(":")
        self.kind, _, rounding = name.partition(", ")
        self.block, self.is_stochastic = int(block or 0), rounding == "stochastic"
        if self.block:
            self.levels = levels_of(self.kind)
            self.middles = (self.levels[1:] + self.levels[:-1]) / 2
        self.held: dict[int, torch.Tensor] = {}
        self.generator = torch.Generator().manual_seed(1)

    def step(self, number: int, G: torch.Tensor) -> torch.Tensor:
        """Take a gradient of matrix `number`; return Nesterov's update."""
        M = self.held.get(number, torch.zeros_like(G)).lerp(G, 1 - MOMENTUM)
        self.held[number] = self.rounded(M)
        return M.lerp(G, 1 - MOMENTUM)

    def rounded(self, M: torch.Tensor) -> torch.Tensor:
        """M as it is stored."""
        if self.kind == "fp32":
            return M
        if self.kind == "bf16":
            return M.to(torch.bfloat16).float()
        columns = M.shape[-1]
        blocks = F.pad(M, (0, -columns % self.block)).unflatten(-1, (-1, self.block))
        largest = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-38)
        found = (blocks / largest).contiguous()
        if self.is_stochastic:
            above = torch.searchsorted(self.levels, found).clamp(1, len(self.levels) - 1)
            low, high = self.levels[above - 1], self.levels[above]
            is_up = torch.rand(found.shape, generator=self.generator) * (high - low) < found - low
            found = torch.where(is_up, high, low)
        else:
            found = self.levels[torch.searchsorted(self.middles, found)]
        return (found * largest).flatten(-2)[..., :columns]


def training(steps: int):
    """Yield the gradients of each step; the caller's O is sent back, and steps the weights."""
    tokens, _ = read_corpus()
    torch.manual_seed(0)
    model, generator = GPT(256, 2, 192, 4), torch.Generator().manual_seed(0)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("blocks")]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    adamw = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95))
    for _ in range(steps):
        inputs, targets = random_windows(tokens, 8, 64, generator)
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        O = yield [p.grad for p in matrices]
        with torch.no_grad():
            for p, o in zip(matrices, O):
                p.sub_(LR * max(1, p.shape[0] / p.shape[1]) ** 0.5 * o)
        adamw.step()
        model.zero_grad()


def low_rank(freedom: float):
    """As `training`: a problem of two matrices."""
    def gradients(steps: int):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(shape, generator=generator)

        A, B = normal(2, 128, 8), normal(2, 8, 256)
        rows, columns = normal(2, 128, 1).exp(), normal(2, 1, 256).exp()
        torch.manual_seed(0)
        noise = torch.distributions.StudentT(freedom)
        for _ in range(steps):
            A, B = (0.99 * x + 0.1411 * normal(*x.shape) for x in (A, B))
            yield [*(rows * columns * (A @ B / 8**0.5 + 0.5 * noise.sample((2, 128, 256))))]

    return gradients


def sparse(steps: int):
    """As `training`: a problem of two matrices."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn((2, 1, 256), generator=generator).exp()
    for _ in range(steps):
        is_hit = torch.rand((2, 1, 256), generator=generator) < 0.1
        yield [*(columns * is_hit * torch.randn((2, 128, 256), generator=generator))]


PROBLEMS = {"training": training, "low rank, t 3": low_rank(3.0), "low rank, t 1.5": low_rank(1.5), "sparse": sparse}


def errors(problem: str, formats, steps: int) -> dict[str, tuple[float, float]]:
    """{format: (error of O, of M)} in percent."""
    orthogonalize = get_kernel("org/optimizer", version=1).orthogonalize
    exact, stored = Stored("fp32"), {form: Stored(form) for form in formats}
    sums, count = {form: [0.0, 0.0] for form in formats}, 0
    looks = {steps - 1 - (steps // 2) * i // LOOKS for i in range(LOOKS)}
    source, O = PROBLEMS[problem](steps), None
    for number in range(steps):
        gradients = source.send(O) if number else next(source)
        O = [orthogonalize(exact.step(i, G)) for i, G in enumerate(gradients)]
        count += len(O) * (number in looks)
        for form, momentum in stored.items():
            U = [momentum.step(i, G) for i, G in enumerate(gradients)]
            for i, o in enumerate(O) if number in looks else ():
                sums[form][0] += distance(orthogonalize(U[i]), o)
                sums[form][1] += distance(momentum.held[i], exact.held[i])
    return {form: (100 * of_o / count, 100 * of_m / count) for form, (of_o, of_m) in sums.items()}


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), help="name:block (default: all of the table)")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    found = {problem: errors(problem, options.formats, options.steps) for problem in options.problems}
    print("| format | block |", " | ".join(options.problems), "|")
    print("|---" * (2 + len(options.problems)), end="|\n")
    for form in options.formats:
        name, _, block = form.partition(":")
        cells = [f"{of_o:.1f} ({of_m:.1f})" for of_o, of_m in (found[problem][form] for problem in options.problems)]
        print(f"| {name} | {block} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()

"""Time `orthogonalize` against the plain PyTorch form of the same iteration: `kernels benchmark .`, or `make bench`.

Shapes are those of a 1.2B transformer on a GPU, and small ones on a CPU. `verify_*` composes the same polynomials from
torch.matmul in fp32, matrix by matrix, so its time is what an optimizer without kernels or batches would take. On a CPU
ours has neither: matrices are taken one by one, for their bits, and fewer passes are made over them.
"""

from __future__ import annotations

import functools

import torch
from kernels.benchmark import Benchmark

# The classic quintic (Keller Jordan's Muon), five times: a triple that every implementation of Muon knows.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def newton_schulz(X: torch.Tensor) -> torch.Tensor:
    """Return the approximate polar factor of one matrix (R, C), in fp32, by a X + (b A + c A A) X with A = X X^T."""
    a, b, c = COEFFICIENTS
    wide = X.size(0) <= X.size(1)
    X = X.float() if wide else X.float().mT
    X = X / X.norm()
    for _ in range(STEPS):
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return X if wide else X.mT


class Orthogonalize(Benchmark):
    """Stacks of equal matrices, as the optimizer hands them over."""

    seed = 0

    def stack(self, count: int, rows: int, columns: int) -> None:
        """Draw `count` matrices; on a CPU their sides are 16 times smaller."""
        without_gpu = torch.device(self.device).type == "cuda" and not torch.cuda.is_available()
        self.device = "cpu" if without_gpu else self.device  # the runner goes by what torch was built for
        on_cpu = torch.device(self.device).type == "cpu"
        rows, columns = (rows // 16, columns // 16) if on_cpu else (rows, columns)
        dtype = torch.float32 if on_cpu else torch.bfloat16
        self.X = torch.randn(count, rows, columns, device=self.device, dtype=dtype)

    def run(self) -> None:
        self.result = self.kernel.orthogonalize(self.X, ns_coefficients=COEFFICIENTS, ns_steps=STEPS)

    def reference(self) -> torch.Tensor:
        return self.scaled(torch.stack([newton_schulz(matrix) for matrix in self.X]).to(self.X.dtype))

    def scaled(self, O: torch.Tensor) -> torch.Tensor:
        """Elements of about 1/4: the runner allows a difference of 1e-2, and in a polar factor that is all there is."""
        return O * (max(O.shape[1:]) ** 0.5 / 4)

    @property
    def out(self) -> torch.Tensor | None:
        """What the runner verifies, outside the time that it measures."""
        return None if self.result is None else self.scaled(self.result)

    @out.setter
    def out(self, value: torch.Tensor | None) -> None:
        self.result = value


SHAPES = {"attention": (16, 2048, 2048), "mlp": (8, 8192, 2048), "experts": (64, 768, 2048), "heads": (64, 128, 512),
          "uneven": (4, 1000, 3000)}
for _name, _shape in SHAPES.items():  # the runner looks for three methods of each workload
    setattr(Orthogonalize, f"setup_{_name}", functools.partialmethod(Orthogonalize.stack, *_shape))
    setattr(Orthogonalize, f"benchmark_{_name}", Orthogonalize.run)
    setattr(Orthogonalize, f"verify_{_name}", Orthogonalize.reference)

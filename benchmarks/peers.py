"""What other packages offer for the same computation: the whole polar factor, and X X^T alone.

A maker raises where its package is missing or refuses the shape; the benchmark then leaves its fields empty. Versions
with which the calls were written: gram-newton-schulz 0.1.6, quack-kernels 0.5.0, dion at its August 2026 state.
"""

from __future__ import annotations

from importlib import metadata

import torch

PACKAGES = {"gns": ("gram-newton-schulz", "quack-kernels"), "quack": ("quack-kernels",), "dion": ("dion",)}


def version(name: str) -> str:
    """The installed versions of a peer's packages; an import from a source tree has none."""
    found = []
    for package in PACKAGES.get(name, ()):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return " ".join(found)


# The polar factor: steps -> (function of a stack (N, R, C) in bf16, returning another). The same coefficients for all.


def torch_compile(steps):
    """The plain iteration in bf16, five products per step fused by torch.compile where it can."""

    def polar(X):
        tall = X.shape[1] > X.shape[2]
        Y = X.float().mT if tall else X.float()
        Y = (Y / (Y.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
        for a, b, c in steps.triples:
            A = Y @ Y.mT
            Y = torch.baddbmm(Y, torch.baddbmm(A, A, A, beta=b, alpha=c), Y, beta=a)
        return (Y.mT if tall else Y).to(X.dtype)

    return torch.compile(polar, dynamic=False, fullgraph=True)


def gns(steps):
    """Gram Newton-Schulz on quack's symmetric products (Dao-AILab), fp16, restart after two steps: its defaults.

    Its own CUDA graph (mode "reduce-overhead") is left out: the benchmark captures every call itself.
    """
    from gram_newton_schulz import GramNewtonSchulz

    return GramNewtonSchulz(ns_coefficients=[list(t) for t in steps.triples], ns_use_kernels=True,
                            compile_kwargs={"fullgraph": True, "dynamic": False})


def dion(steps):
    """Dion's Triton kernels for lines 1 and 2 and cuBLAS for line 3, as Dion composes them, in bf16."""
    from dion.newton_schulz_triton import ns_line_1, ns_line_2

    def polar(X):
        tall = X.shape[1] > X.shape[2]
        Y = X.mT if tall else X
        Y = (Y / (Y.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16().contiguous()
        A = torch.empty((*Y.shape[:2], Y.shape[1]), dtype=Y.dtype, device=Y.device)
        B, Z = torch.empty_like(A), torch.empty_like(Y)
        for a, b, c in steps.triples:
            ns_line_1(Y, out=A)
            ns_line_2(A, alpha=c, beta=b, out=B)
            torch.baddbmm(Y, B, Y, beta=a, out=Z)
            Y, Z = Z, Y
        return Y.mT if tall else Y

    return polar


POLAR = {"torch.compile": torch_compile, "gns": gns, "dion": dion}


# X X^T: () -> function (X, out) that writes to out.


def cublas_product():
    return lambda X, out: torch.bmm(X, X.mT, out=out)


def quack_product():
    from quack.gemm_interface import gemm_symmetric

    return lambda X, out: gemm_symmetric(X, X.mT, out=out)


def dion_product():
    from dion.newton_schulz_triton import ns_line_1

    return lambda X, out: ns_line_1(X, out=out)


PRODUCTS = {"cublas": cublas_product, "quack": quack_product, "dion": dion_product}

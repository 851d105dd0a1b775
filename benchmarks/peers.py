"""What other packages offer for the same computation: the whole polar factor, and X X^T alone.

A maker raises where its package is missing or refuses the shape; the benchmark then leaves its fields empty. Versions
with which the calls were written: gram-newton-schulz 0.1.6, quack-kernels 0.5.0, dion at 0a059a4, muonium 0.2.0,
flash-muon at 80ac87f, emerging-optimizers 0.3.0. Megatron-Core calls the function of emerging-optimizers.

A new package: write a maker below, and name it in POLAR. docs/polar_benchmark.md says how its rows come to the table.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import types
from importlib import metadata

import torch

PACKAGES = {"gns": ("gram-newton-schulz", "quack-kernels"), "quack": ("quack-kernels",), "dion": ("dion",),
            "muonium": ("muonium",), "flash_muon": ("flash-muon",), "emerging_optimizers": ("emerging-optimizers",)}


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
    """Gram Newton-Schulz on quack's symmetric products (Dao-AILab), fp16: its defaults, and its restarts for the
    coefficients. No product of it is tuned: quack has one configuration for symmetric ones, and others are called with
    tuned=False.

    Its own CUDA graph (mode "reduce-overhead") is left out: the benchmark captures every call itself.
    """
    from gram_newton_schulz import GramNewtonSchulz

    return GramNewtonSchulz(ns_coefficients=[list(t) for t in steps.triples], ns_use_kernels=True,
                            gram_newton_schulz_reset_iterations=gns_restarts(tuple(map(tuple, steps.triples))),
                            compile_kwargs={"fullgraph": True, "dynamic": False})


STABLE_Q = 100.0  # its default, one restart of five steps of Polar Express, has 85


@functools.lru_cache
def gns_restarts(triples) -> list[int]:
    """After which steps it restarts: by its own search, as its README asks for beyond five steps, with as few restarts
    as keep the condition number of Q below STABLE_Q. [2] for polar_express with 5 steps, its default.
    """
    import numpy
    from gram_newton_schulz import restart_autotune as search

    values, lowest = numpy.logspace(0, -10, 10000), -4e-4  # those of its command line
    for count in range(1, len(triples)):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                found = search.find_best_restarts(values, triples, lowest, num_restarts=count)
        except ValueError:  # all places blow up
            continue
        about = search.simulate_perturbed_gram_newton_schulz(values, triples, lowest, reset_indices=found)
        if search.stability_metric(about) < STABLE_Q:
            return found
    return list(range(1, len(triples)))


def normalized(X):
    """(Stack in bf16 with as many columns as rows or more, each matrix divided by its norm; whether it was turned)."""
    tall = X.shape[1] > X.shape[2]
    Y = X.mT if tall else X
    return (Y / (Y.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16().contiguous(), tall


def dion(steps):
    """Dion's Triton kernels for lines 1 and 2 and cuBLAS for line 3, as Dion composes them, in bf16."""
    from dion.newton_schulz_triton import ns_line_1, ns_line_2

    def polar(X):
        Y, tall = normalized(X)
        A = torch.empty((*Y.shape[:2], Y.shape[1]), dtype=Y.dtype, device=Y.device)
        B, Z = torch.empty_like(A), torch.empty_like(Y)
        for a, b, c in steps.triples:
            ns_line_1(Y, out=A)
            ns_line_2(A, alpha=c, beta=b, out=B)
            torch.baddbmm(Y, B, Y, beta=a, out=Z)
            Y, Z = Z, Y
        return Y.mT if tall else Y

    return polar


def muonium(steps):
    """muonium's Triton kernel for X X^T and A A, the rest by torch.compile, as muonium composes them, in bf16."""
    from muonium.kernels.gram import gram_

    def polar(X):
        Y, tall = normalized(X)
        A = torch.empty((*Y.shape[:2], Y.shape[1]), dtype=Y.dtype, device=Y.device)
        B = torch.empty_like(A)
        for a, b, c in steps.triples:
            gram_(Y, A)
            gram_(A, B)
            Y = a * Y + (b * A + c * B) @ Y
        return Y.mT if tall else Y

    return torch.compile(polar, dynamic=False, fullgraph=True)


def flash_muon(steps):
    """flash-muon's Triton kernel for X X^T and A A, one matrix after another: it takes no stacks. In bf16."""
    from flash_muon.matmul_transpose_triton import matmul_transpose_assign

    def polar(X):
        Y, tall = normalized(X)
        A = torch.empty((Y.shape[1], Y.shape[1]), dtype=Y.dtype, device=Y.device)
        B, found = torch.empty_like(A), []
        for Z in Y:
            for a, b, c in steps.triples:
                matmul_transpose_assign(Z, A)
                matmul_transpose_assign(A, B)
                Z = a * Z + (b * A + c * B) @ Z
            found.append(Z)
        Y = torch.stack(found)
        return Y.mT if tall else Y

    return polar


def emerging_optimizers(steps):
    """NVIDIA's newton_schulz, which Megatron-Core calls. It takes fp32, and iterates in bf16 at precision "medium"."""
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    triples = [tuple(triple) for triple in steps.triples]

    def polar(X):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            return newton_schulz(X.float(), len(triples), "custom", custom_coefficient_sets=triples).to(X.dtype)
        finally:
            torch.set_float32_matmul_precision(before)

    return polar


def linalg_polar(steps):
    """torch.linalg.polar, of torch after 2.13: the exact factor, whatever the steps, in fp32."""
    exact = torch.linalg.polar

    def polar(X):
        tall = X.shape[1] > X.shape[2]
        U = exact(X.float() if tall else X.float().mT)[0]
        return (U if tall else U.mT).to(X.dtype)

    return polar


POLAR = {"torch.compile": torch_compile, "gns": gns, "dion": dion, "muonium": muonium, "flash_muon": flash_muon,
         "emerging_optimizers": emerging_optimizers, "torch.linalg.polar": linalg_polar}

MISSING = ("ImportError", "ModuleNotFoundError")  # notes of rows of packages that are not installed


def is_missing(name: str) -> bool:
    """Whether a package of POLAR cannot be imported; False for an unknown one."""
    try:
        POLAR[name](types.SimpleNamespace(triples=((1.5, -0.5, 0.0),)))
    except ImportError:
        return True
    except Exception:  # it is told when it is measured
        pass
    return False


# Kernels that Triton's autotuner compiles with many configurations: (module, names of kernels). Those of muonium are
# tuned by torch.compile, which compiles them side by side by itself.
TUNED = {"dion": ("dion.newton_schulz_triton", ("ns_line_1_kernel", "ns_line_2_kernel")),
         "flash_muon": ("flash_muon.matmul_transpose_triton", ("mmt_kernel",))}
TUNED_BY_COMPILER = ("muonium",)


def tuners(names):
    """Yield Triton's autotuner of each tuned kernel of these packages, without packages that are missing."""
    for name in set(names) & TUNED.keys():
        module, kernels = TUNED[name]
        try:
            found = importlib.import_module(module)
        except ImportError:  # the benchmark says so
            continue
        yield from (getattr(found, kernel) for kernel in kernels)


def take_share_of_configs(rank: int, jobs: int, names) -> None:
    """Leave each tuned kernel of these packages every jobs-th configuration in this process, so that processes together
    compile all of them, side by side, into the cache on disk.
    """
    for tuner in tuners(names):
        tuner.configs = tuner.configs[rank % len(tuner.configs)::jobs]


def set_tuning_time(milliseconds: float, names) -> None:
    """Let the tuned kernels of these packages time each configuration for so long. Triton's own choice is 100 ms."""
    from triton.testing import do_bench

    for tuner in tuners(names):
        tuner.do_bench = functools.partial(do_bench, warmup=milliseconds / 4, rep=milliseconds)


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

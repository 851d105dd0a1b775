"""Roots and quotients without branches, and the path of AdamW's kernel for 8-bit averages that takes them. On an NVIDIA
GPU, or in the interpreter, whose multiply-adds are then fused as on such a GPU.
"""
from __future__ import annotations

import types

import numpy
import pytest
import torch

from tests.paths import INTERPRETED, quiet, take
from tests.ranks import part

pytestmark = [quiet, *[pytest.mark.interpreter] * INTERPRETED]


def fused(x, y, z):
    """x y + z of fp32 arrays, rounded once: the sum in fp64 is rounded to odd first."""
    product, z = x.astype(numpy.float64) * y, z.astype(numpy.float64)
    total = product + z
    back = total - product
    lost = (product - (total - back)) + (z - back)
    is_even = (total.view(numpy.int64) & 1) == 0
    toward = numpy.nextafter(total, numpy.where(lost > 0, numpy.inf, -numpy.inf))
    return numpy.where(is_even & (lost != 0), toward, total).astype(numpy.float32)


@pytest.fixture
def paths_of(monkeypatch):
    """Let the interpreter round `tl.fma` once. Return a function that chooses the path of NVIDIA's GPUs or the other,
    and the instructions of NVIDIA's that ran in the interpreter.
    """
    adamw, ran = part("kernels.quantized.adamw"), []
    choose = lambda choice: monkeypatch.setattr(adamw, "is_nvidia", lambda device: choice)  # noqa: E731
    if not INTERPRETED:
        return choose, ran
    from triton.runtime import interpreter

    def create_fma(self, x, y, z):
        return interpreter.TensorHandle(fused(*numpy.broadcast_arrays(x.data, y.data, z.data)), z.dtype.scalar)

    def create_inline_asm(self, text, constraints, values, *_):
        assert text.startswith("rcp.approx.ftz.f32 ")
        ran.append(text)
        found = interpreter.TensorHandle(1 / values[0].data, values[0].dtype.scalar)
        return types.SimpleNamespace(get_result=lambda _: found)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", create_inline_asm)
    return choose, ran


RECIPROCALS = 4  # of a tile on the shorter path

# name: (columns, factor of rows, of gradients, decay, eps, root of the correction of v)
CASES = {
    "usual": (192, 1.0, 1.0, 0, 1e-8, 0.7), "odd": (70, 1.0, 1.0, 1, 1e-8, 0.03),
    "least": (64, 1e-22, 1e-38, 2, 1e-15, 1.0), "small": (130, 1e-12, 1e-24, 0, 1e-8, 0.9),
    "large": (128, 1e4, 1e4, 1, 1e-3, 0.1),
    "beyond": (128, 1e16, 1e19, 0, 1e-8, 0.7), "no eps": (64, 1.0, 1.0, 2, 0.0, 0.7),
    "large eps": (64, 1.0, 1.0, 0, 1e12, 0.7),
}


@pytest.mark.parametrize("case", CASES)
def test_without_branches_the_kernel_has_the_same_bits(case, paths_of, device, monkeypatch):
    choose, ran = paths_of
    columns, size, of_gradients, decay, eps, correction = CASES[case]
    adamw, blocks, squares = (part(f"kernels.quantized.{name}") for name in ("adamw", "blocks", "squares"))
    torch.manual_seed(0)
    shape = (48, columns)
    with device:
        rows = size ** torch.rand(48, 1)
        m, ms = blocks.quantize(torch.randn(shape) * rows)
        v, vs = squares.quantize((torch.randn(shape) * rows) ** 2)
        g = torch.randn(shape) * of_gradients ** torch.rand(shape)
        start, first = torch.randn(shape), torch.randn(shape)
        factors = torch.tensor([0.99, 0.01, 0.2, correction])
    # Without gradient, without weight, and never seen: all averages are 0
    g[:, ::5], start[:, ::3], g[::7] = 0.0, 0.0, 0.0
    m[::14], v[::14], start[1::14] = 0, 0, 0.0
    constants, results = adamw.Constants.of(0.9, 0.95, eps, decay), []
    take("triton", monkeypatch)
    for choice in (False, True):
        choose(choice)
        w, own = start.clone(), adamw.Averages(m.clone(), v.clone(), ms.clone(), vs.clone())
        for _ in range(2):
            adamw.step(w, g, own, factors, constants, None, first if decay == 2 else None)
        results.append([w, *own])
        if choice and INTERPRETED and case not in ("beyond", "no eps", "large eps"):
            tiles = 2 * -(-ms.numel() // (adamw.TILE // adamw.BLOCK))  # of both steps
            assert tiles / 2 <= len(ran) / RECIPROCALS <= tiles  # at least half of them took the shorter path
        else:
            assert not ran
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_subnormal_updates_are_rounded_once(paths_of, device, monkeypatch):
    """By `div_rn`: the shorter path rounds a subnormal quotient twice. Some of them lie midway between two numbers."""
    choose, ran = paths_of
    adamw, blocks = (part(f"kernels.quantized.{name}") for name in ("adamw", "blocks"))
    torch.manual_seed(0)
    with device:
        g, factors = torch.zeros(64, 64), torch.tensor([1.0, 0.0, 1.0, 0.5])
        m, ms = torch.randint(-127, 128, (64, 64)).to(torch.int8), torch.full((64, 1), 2.0**-114)
        v, vs = torch.zeros(64, 64, dtype=torch.uint8), torch.zeros(64, 1)
    constants = adamw.Constants.of(0.5, 0.95, 3 * 2.0**35, 0)
    exact = blocks.dequantize(m, ms).double() / 2 / constants.eps
    assert ((exact * 2.0**149).frac().abs() == 0.5).sum() > 500
    take("triton", monkeypatch)
    for choice in (False, True):
        choose(choice)
        w, own = torch.zeros_like(g), adamw.Averages(m.clone(), v.clone(), ms.clone(), vs.clone())
        adamw.step(w, g, own, factors, constants)
        assert not ran and 0 < w.abs().max() < 2.0**-126
        assert torch.equal(w, -exact.float())


@pytest.mark.gpu
def test_roots_and_quotients_are_correctly_rounded():
    """All roots; all quotients by divisors whose reciprocal is not the nearest number, and random ones."""
    from tests import rounded_kernels

    assert rounded_kernels.wrong_roots() == 0
    divisors, *wrong = rounded_kernels.wrong_quotients()
    assert divisors <= rounded_kernels.MOST_DIVISORS and wrong == [0, 0, 0]

"""The 8-bit format and the kernel of 8-bit momentum: nearest values, fp64, equal bits of kernel and torch."""
from __future__ import annotations

import math
import sys

import pytest
import torch

from tests.paths import poisoned, quiet, take
from tests.ranks import part

pytestmark = quiet

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(3, 5), (1, 7), (0, 4), (9, 1), (2, 64), (5, 136), (3, 200)]


def values_of(scale):
    """All values of a block, ascending."""
    numbers = torch.arange(-127, 128, dtype=torch.float64)
    return numbers * numbers.abs() * scale


def test_each_element_becomes_the_nearest_value():
    torch.manual_seed(0)
    blocks = part("kernels.quantized.blocks")
    wide = torch.randn(40, 150)
    wide[:10] **= 3
    wide *= 10.0 ** torch.empty(40, 1).uniform_(-20, 20)
    numbers, scales = blocks.quantize(wide)
    assert numbers.dtype == torch.int8 and scales.shape == (40, 3)
    back = blocks.dequantize(numbers, scales)
    for i in range(40):
        for k in range(3):
            columns = slice(64 * k, min(64 * k + 64, 150))
            exact = wide[i, columns].double()
            known = values_of(scales[i, k].double())
            nearest = (exact[:, None] - known).abs().amin(1)
            lost = (exact - back[i, columns].double()).abs()
            # Beside the nearest, fp32 arithmetic may choose a value that is as near to 1e-6 of the largest
            assert (lost <= nearest + 1e-6 * exact.abs().max()).all()
            assert numbers[i, columns].abs().max() == 127


def test_the_inverse_of_a_scale_is_rounded_once():
    """As in the kernel: by a reciprocal, rounded, the second element of this block would be 75."""
    wide = torch.tensor([[2.4015378952026367, 0.848779559135437]])
    numbers, _ = part("kernels.quantized.blocks").quantize(wide)
    assert numbers.tolist() == [[127, 76]]


@pytest.mark.interpreter
def test_roots_are_correctly_rounded(device, monkeypatch):
    """Around the middles n (n - 1) + 1/2, where the last bit of a root decides: torch's roots on CPUs may lack it."""
    torch.manual_seed(3)
    table, module, results = part("kernels.elementwise.multi_tensor"), part("kernels.quantized.momentum"), []
    n = torch.arange(1, 128)[:, None]
    near = ((n * (n - 1) + 0.5).view(torch.int32) + torch.arange(-32, 32)).view(torch.float32)
    wide = torch.cat((near.view(-1, 64), torch.rand(2048, 64) * 16129))
    wide[:, 0] = 16129.0  # the inverse of the scale is 1
    wide = wide.to(device)
    at, numbers = torch.tensor([wide.data_ptr()], device=device), torch.ones(table.NUMBERS, device=device)
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        shape = len(wide), 64
        m = module.QuantizedView(torch.zeros(shape, dtype=torch.int8, device=device), torch.zeros(
            len(wide), 1, device=device))
        module.QuantizedMomentum([m], None, [table.Source(0, 0, (64, 1))], [wide])([wide], at, numbers, False)
        results.append(m.values.cpu())
    assert torch.equal(*results)
    roots = (wide.cpu() - 0.25).clamp_min(0.0).double().sqrt().float()
    assert torch.equal(results[0], (roots + 0.5).floor().to(torch.int8))


def test_what_has_no_magnitude_is_zero_and_what_is_not_finite_reads_as_nan():
    blocks = part("kernels.quantized.blocks")
    wide = torch.zeros(4, 70)
    wide[1], wide[2, 3], wide[3, 66] = 1e-31, math.inf, math.nan
    numbers, scales = blocks.quantize(wide)
    back = blocks.dequantize(numbers, scales)
    assert not numbers.any() and not back[:2].any()
    assert back[2, :64].isnan().all() and not back[2, 64:].any()
    assert back[3, 64:].isnan().all() and not back[3, :64].any()


def test_blocks_are_those_of_the_whole_row():
    """So rows divided in any way, and columns at multiples of a block, have the bits of the whole."""
    blocks, wide = part("kernels.quantized.blocks"), torch.randn(7, 192)
    numbers, scales = blocks.quantize(wide)
    for rows, columns in ((slice(0, 3), slice(None)), (slice(3, 7), slice(64, 192)), (slice(2, 2), slice(0, 64))):
        n, s = blocks.quantize(wide[rows, columns])
        assert torch.equal(n, numbers[rows, columns])
        assert torch.equal(s, scales[rows, columns.start and columns.start // 64: None if columns.stop is None else
                           columns.stop // 64])


def momenta(shapes, device, turned):
    """Views of 8-bit momentum, of all rows of a larger tensor, or of its transpose."""
    module, blocks = part("kernels.quantized.momentum"), part("kernels.quantized.blocks")
    found = []
    for r, c in shapes:
        r, c = (c, r) if turned else (r, c)
        numbers, scales = (t.to(device) for t in blocks.quantize(torch.randn(r + 2, c + 64) * torch.rand(r + 2, 1)))
        found.append(module.QuantizedView(numbers[1:r + 1, :c], scales[1:r + 1, :-(-c // 64)], turned))
    return found


def copies(M):
    module = part("kernels.quantized.momentum")
    return [module.QuantizedView(m.values.clone(), m.scales.clone(), m.transposed) for m in M]


def rectangle(m):
    """The fp64 values of a view, as the rectangle lies."""
    wide = part("kernels.quantized.blocks").dequantize(m.values, m.scales).double()
    return wide.mT if m.transposed else wide


def test_a_table_is_made_without_a_loop_over_programs():
    module, shapes, lines = part("kernels.quantized.momentum"), [(1000, 640), (3, 65), (1, 1)], []
    group = [(origin, [*shape, 7]) for origin, shape in enumerate(shapes)]

    def note(frame, event, _):
        lines.append(event)
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        table = module._launch((torch.int8,), 1, group, torch.device("cpu"))
    finally:
        sys.settrace(before)
    counts = [-(-rows * -(-columns // 64) // 64) for rows, columns in shapes]  # 64 blocks of 64 in a program
    assert table.blocks.tolist() == [[i, 64 * k] for i, count in enumerate(counts) for k in range(count)]
    assert table.records.tolist() == [record for _, record in group] and len(lines) < sum(counts)


@pytest.mark.interpreter
@pytest.mark.parametrize("turned, form", [(False, "mean"), (True, "mean"), (False, "sum"), (True, "sum of signs"),
                                          (True, "corrected"), (False, "corrected signs")])
@pytest.mark.parametrize("early, nesterov, skips", [(True, True, False), (False, False, True), (True, True, True)])
def test_the_kernel_has_the_bits_of_torch_and_computes_the_formula(early, nesterov, skips, form, turned, device,
                                                                   monkeypatch):
    torch.manual_seed(1)
    table, results = part("kernels.elementwise.multi_tensor"), []
    sums, corrected, signs = (word in form for word in ("sum", "corrected", "signs"))
    start = momenta(SHAPES, device, turned)
    G = [torch.randn(r + 1, c + 8, device=device) for r, c in SHAPES]
    sources = [table.Source(i, 8, (c + 8, 1)) for i, (_, c) in enumerate(SHAPES)]
    groups, numbers = [i % 2 for i in range(len(SHAPES))], torch.zeros(2 * table.NUMBERS, device=device)
    numbers[0], numbers[1], numbers[table.NUMBERS], numbers[table.NUMBERS + 1] = 0.1, 0.9, 0.2, 0.8
    mixes = numbers[part("kernels.elementwise.momentum").NESTEROV::table.NUMBERS]
    mixes += torch.tensor([0.3, 0.7], device=device)
    flags = torch.zeros(len(SHAPES), device=device)
    flags[-1] = 1.0
    skip = table.Skip(flags, tuple(range(len(SHAPES)))) if skips else None
    at = torch.tensor([g.data_ptr() for g in G], device=device)
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        M, U = copies(start), [poisoned(*shape, device=device) for shape in SHAPES]
        module = part("kernels.quantized.momentum")
        of_both = "sum" if sums else "ema"
        bound = module.QuantizedMomentum(
            M, U, sources, G, skip, groups, "bias_corrected" if corrected else of_both, signs)
        bound(G, at, numbers, nesterov, early)
        if not early:
            assert all(torch.equal(m.values, s.values) for m, s in zip(M, start))
            module.QuantizedMomentum(M, None, sources, G, skip, groups, of_both)(G, at, numbers, False)
        results.append(U + [m.values for m in M] + [m.scales for m in M])
    assert all(map(torch.equal, *results))

    def check_update(u, exact):
        if signs:  # where rounding leaves the sign
            u, exact = (t[exact.abs() > 1e-5] for t in (u, exact.sign()))
        torch.testing.assert_close(u.double(), exact, rtol=1e-5, atol=1e-6)

    for i, (shape, m, old) in enumerate(zip(SHAPES, M, start)):
        g = sources[i].view(G, shape).double()
        mu, share = (0.8, 0.2) if i % 2 else (0.9, 0.1)
        share = 1.0 if sums else share
        if skips and i == len(SHAPES) - 1:
            assert torch.equal(m.values, old.values) and torch.equal(m.scales, old.scales)
            check_update(results[0][i], rectangle(old))
            continue
        new = mu * rectangle(old) + share * g
        mix = (0.7 if i % 2 else 0.3) if corrected else share
        with_g = mu * new + g if sums else new + mix * (g - new)
        check_update(results[0][i], with_g if nesterov else new)
        if new.numel():  # half the widest step of a block, between 126^2 and 127^2
            assert (rectangle(m) - new).abs().max() <= 0.0079 * new.abs().max()


def test_vectors_have_the_bits_of_single_elements(device, path):
    """A block that begins 16 bytes apart or not, of bf16 updates and gradients."""
    torch.manual_seed(2)
    table, module, results, access = (part("kernels.elementwise.multi_tensor"), part("kernels.quantized.momentum"),
                                      [], [])
    G, (start,) = torch.randn(6, 136, device=device), momenta([(6, 128)], device, False)
    at, numbers = torch.tensor([G.data_ptr()], device=device), torch.full((table.NUMBERS,), 0.05, device=device)
    for offset in (0, 1):
        (m,), memory = copies([start]), torch.empty(6 * 136, device=device)
        u = memory.as_strided((6, 128), (136, 1), offset)
        bound = module.QuantizedMomentum([m], [u], [table.Source(0, 0, (136, 1))], [G])
        bound([G], None if path == "torch" else at, numbers, True)
        access += [launch.access for launch in bound.launches or ()]
        results.append((u.clone(), m.values, m.scales))
    assert all(map(torch.equal, *results))
    assert access in ([], [table.VECTORS, table.ELEMENTS])

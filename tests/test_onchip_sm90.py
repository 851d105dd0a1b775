"""Matrices whose whole iteration stays in shared memory: beside the other path, in any batch and place, on an H100 or
an H200. `tests/test_tile_config.py` compiles the kernel without one.
"""
from __future__ import annotations

import collections
import functools
import math
import statistics

import pytest
import torch

from tests import paths
from tests.ranks import everywhere
from tests.spectra import KINDS, spectrum
from tests.test_orthogonalize import error, exact

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [(2, 65, 129), (3, 96, 200), (2, 100, 256), (1, 128, 384), (2, 100, 500), (3, 128, 512), (2, 65, 512),
          (1, 128, 129)]
SETS = [("polar_express", 5), ("polar_express", 1), ("polar_express", 3), ("polar_express", 7), ("jordan", 5),
        ("jordan", 2), ("quintic", 5), ("polar_express_nanochat", 5), ("polar_express_dion", 5),
        ("cans", 5), ("cubic", 5), ("deepseek_v4", 10)]


@pytest.fixture
def polar(part, monkeypatch):
    paths.forget(part("newton_schulz.orthogonalize"), monkeypatch)
    return part("newton_schulz.orthogonalize")


@pytest.fixture
def chain(part, monkeypatch):
    """The module, on a GPU that it is for; `chain.taken` counts its launches, those from a tape left out."""
    module, kernels = part("kernels.onchip.sm90_polar"), part("kernels.launch.jit")
    if not torch.cuda.is_available() or not module.supports(torch.empty(1, 128, 512, device="cuda"), F16, 5):
        pytest.skip("needs sm90 and the Gluon of Triton 3.6")
    monkeypatch.setenv("OPTIMIZER_KERNELS", "triton")
    launch, module.taken = module.polar, []
    monkeypatch.setattr(part("kernels.launch.replay"), "_recordings", collections.OrderedDict())

    def counted(*arguments):
        module.taken += [1] * (not kernels.thread_state.dry_run)
        launch(*arguments)

    monkeypatch.setattr(module, "polar", counted)
    return module


def by_the_other_path(chain, polar, work):
    """What `work` returns without this kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "supports", lambda U, dtype, steps: False)
        paths.forget(polar, patch)
        before = len(chain.taken)
        result = work()
        assert len(chain.taken) == before
    return result


def relative(O, target):
    return ((O.double() - target).norm() / target.norm()).item()


def test_who_goes_through_it(part, monkeypatch):
    chain = part("kernels.onchip.sm90_polar")
    everywhere(monkeypatch, chain, "architecture", lambda kind, index: "sm90")
    everywhere(monkeypatch, chain, "knows_triton", lambda: True)
    sizes = [(64, 512), (65, 129), (128, 512), (128, 128), (129, 512), (128, 513)]
    assert [size for size in sizes if chain.supports(torch.empty(1, *size), F16, 5)] == sizes[1:3]
    assert not chain.supports(torch.empty(1, 128, 512), F32, 5)
    assert not chain.supports(torch.empty(1, 128, 512), F16, 11)
    everywhere(monkeypatch, chain, "architecture", lambda kind, index: "sm100")
    assert not chain.supports(torch.empty(1, 128, 512), F16, 5)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_layouts(chain, polar, shape, tall, x_dtype):
    torch.manual_seed(0)
    X = torch.randn(shape, device="cuda").to(x_dtype)
    X = X.mT.contiguous() if tall else X
    O, bound = polar.orthogonalize(X), 0.006 + (0.5 if x_dtype != F32 else 0) * torch.finfo(x_dtype).eps
    assert len(chain.taken) == 1 and error(O, X, polar.steps_of("polar_express")) < bound
    turned = X.mT.contiguous().mT
    assert error(polar.orthogonalize(turned), X, polar.steps_of("polar_express")) < bound
    scattered = torch.randn(shape[0], *X.shape[1:], 2, device="cuda").to(x_dtype)[..., 0]
    scattered.copy_(X)
    assert torch.equal(polar.orthogonalize(scattered), O)
    polar.orthogonalize_([X], polar.steps_of("polar_express"))
    assert torch.equal(X, O) and len(chain.taken) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("name, ns_steps", SETS, ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_errors_are_no_larger_than_on_the_other_path(chain, polar, name, ns_steps, dtype):
    torch.manual_seed(0)
    steps, ratios = polar.steps_of(name, ns_steps), []
    shapes = [(96, 288), (128, 512), (70, 129), (128, 200), (100, 384)]
    for kind, (n, m) in zip(KINDS, 2 * shapes):
        X = spectrum(kind, n, m)
        target, X = exact(X, steps).cuda(), X.float().cuda()
        work = functools.partial(polar.orthogonalize, X, name, ns_steps, dtype=dtype)
        ours, theirs = relative(work(), target), relative(by_the_other_path(chain, polar, work), target)
        assert ours < 1.3 * theirs + 1e-4, kind
        ratios.append(math.log(ours / theirs))
    assert len(chain.taken) == len(shapes) and statistics.mean(ratios) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(300, 128, 512), (150, 100, 200), (140, 256, 96)], ids=str)
def test_bits_do_not_depend_on_the_batch_or_the_place(chain, polar, shape, x_dtype):
    X = torch.randn(shape, device="cuda").to(x_dtype)
    X[7] = X[0]
    whole = polar.orthogonalize(X)
    assert torch.equal(whole[7], whole[0]) and torch.equal(polar.orthogonalize(X), whole)
    assert torch.equal(polar.orthogonalize(X[131:]), whole[131:])
    for place in (0, 5, shape[0] - 1):
        assert torch.equal(polar.orthogonalize(X[place].clone()), whole[place])


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("tall", [False, True])
def test_nan_and_zeros_stay_in_their_matrix(chain, polar, bad, tall):
    X = torch.randn(5, *((400, 100) if tall else (100, 400)), device="cuda")
    X[1, 2, 3], X[3] = bad, 0
    O = polar.orthogonalize(X)
    assert O[1].isnan().any() and not O[3].any() and O[[0, 2, 4]].isfinite().all()
    assert torch.equal(O[[0, 2, 4]], polar.orthogonalize(X[[0, 2, 4]]))


@pytest.mark.gpu
@pytest.mark.parametrize("power", [-126, -60, 60, 110])
@pytest.mark.parametrize("x_dtype", [F32, BF16], ids=str)
def test_powers_of_two_give_the_same_bits(chain, polar, power, x_dtype):
    X = torch.rand(200, 96, 300, device="cuda").add_(1.0).to(x_dtype)  # each has sums of its own to differ in
    for tall in (False, True):
        U = X.mT.contiguous() if tall else X
        assert torch.equal(polar.orthogonalize(U * 2.0**power), polar.orthogonalize(U))
    tiny = torch.randn(2, 96, 300, device="cuda") * 1e-40
    assert error(polar.orthogonalize(tiny), tiny, polar.steps_of("polar_express")) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", [F32, BF16], ids=str)
def test_a_graph_replays_the_same_bits(chain, polar, x_dtype):
    X = torch.randn(9, 128, 512, device="cuda").to(x_dtype)
    assert paths.repeats(lambda: polar.orthogonalize(X), polar.orthogonalize(X))


@pytest.mark.gpu
def test_other_memory_beside_it_is_left_alone(chain, polar):
    for shape in ((3, 100, 200), (3, 200, 100), (2, 128, 512)):
        room = torch.full((shape[0] + 2, *shape[1:]), 7.0, device="cuda")
        room[1:-1] = torch.randn(shape, device="cuda")
        polar.orthogonalize_([room[1:-1]], polar.steps_of("polar_express"))
        assert (room[0] == 7).all() and (room[-1] == 7).all() and len(chain.taken) > 0

"""The optimizer in one process: torch.optim.Muon and AdamW re-stated, every option, and the defects of others."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.paths import quiet, take
from tests.ranks import package, part, run_threads

SHAPES = [(16, 16), (48, 16), (16, 48), (7, 33), (33, 7), (1, 9), (9, 1), (64, 40)]
JORDAN = (3.4445, -4.7750, 2.0315)
EXACT = {"wire_dtype": torch.float32, "ns_dtype": torch.float32}
STEPS = 4


def weights(shapes, device="cpu", dtype=torch.float32):
    return [nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]


def gradients(params, steps=STEPS, dtype=None):
    """Fresh random gradients: for each step, one for each parameter."""
    return [[torch.randn_like(p).to(dtype or p.dtype) for p in params] for _ in range(steps)]


def copies(params):
    return [nn.Parameter(p.detach().clone()) for p in params]


def train(optimizer, params, grads):
    for step in grads:
        for p, g in zip(params, step):
            p.grad = None if g is None else g.clone()
        optimizer.step()
    return params


def stepped(name, params, grads, group=None, **options):
    """The parameters, as new tensors, after a step with each of `grads`; and the optimizer."""
    params = copies(params)
    optimizer = getattr(package(), name)([{"params": params, **(group or {})}], **options)
    return [p.detach() for p in train(optimizer, params, grads)], optimizer


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def zeropower(dtype):
    """torch's Newton-Schulz iteration with products in `dtype` instead of bf16."""
    def function(grad, ns_coefficients, ns_steps, eps):
        X = grad.to(dtype)
        X = X.mT if X.size(0) > X.size(1) else X
        X = X / X.norm().clamp(min=eps)
        a, b, c = ns_coefficients
        for _ in range(ns_steps):
            A = X @ X.mT
            X = a * X + (b * A + c * A @ A) @ X
        return (X.mT if grad.size(0) > grad.size(1) else X).to(grad.dtype)
    return function


# torch.optim.Muon ------------------------------------------------------------------------------------------------

@pytest.mark.kernels_ci
def test_the_arguments_are_those_of_torch(optimizer):
    """By position and by name; only the default coefficients are others."""
    theirs = list(inspect.signature(torch.optim.Muon).parameters.values())
    ours = [p for p in inspect.signature(optimizer.Muon).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in ours] == [p.name for p in theirs]
    assert all(a.default == b.default for a, b in zip(ours, theirs) if a.name != "ns_coefficients")


@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_arguments_by_position(name, optimizer):
    values = (0.03, 0.2, 0.8, False, JORDAN, 1e-6, 4, "match_rms_adamw")
    keys = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    group = getattr(optimizer, name)([nn.Parameter(torch.ones(2, 2))], *values).param_groups[0]
    assert tuple(group[key] for key in keys) == values


@pytest.mark.kernels_ci
@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_torchs_muon(adjust_lr_fn, nesterov, weight_decay, monkeypatch, device):
    """torch's own class, with its products in fp64: momentum, decay, scale and order are the same."""
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", zeropower(torch.float64))
    params = weights(SHAPES, device)
    grads = gradients(params)
    options = dict(lr=0.1, weight_decay=weight_decay, momentum=0.9, nesterov=nesterov, ns_coefficients=JORDAN, eps=1e-7,
                   ns_steps=5, adjust_lr_fn=adjust_lr_fn)
    theirs = copies(params)
    reference = torch.optim.Muon(theirs, **options)
    train(reference, theirs, grads)
    ours, muon = stepped("Muon", params, grads, **options, **EXACT)
    for old, a, b in zip(params, ours, theirs):
        assert (a - b).abs().max() <= 1e-5 * (b - old).abs().max()
    for a, b in zip(muon.param_groups[0]["params"], theirs):
        torch.testing.assert_close(muon.state[a]["momentum_buffer"], reference.state[b]["momentum_buffer"])


@pytest.mark.parametrize("options", [{}, EXACT], ids=["default", "fp32"])
def test_torchs_muon_as_it_is(options, device):
    """With bf16 products on their side, and by default a bf16 wire (and on GPUs fp16 products) on ours."""
    params = weights([(64, 64), (32, 96), (96, 32)], device)
    grads = gradients(params, 1)
    theirs = copies(params)
    train(torch.optim.Muon(theirs, lr=0.1, weight_decay=0.0), theirs, grads)
    ours, _ = stepped("Muon", params, grads, lr=0.1, weight_decay=0.0, ns_coefficients=JORDAN, **options)
    for old, a, b in zip(params, ours, theirs):
        assert (a - b).norm() < 0.03 * (b - old).norm()


@pytest.mark.parametrize("ns_coefficients", ["polar_express", "jordan", (1.5, -0.5, 0.0), [(2.0, -1.5, 0.5)] * 5])
def test_one_step_is_the_polar_factor_of_the_gradient(ns_coefficients, device):
    params = weights([(24, 10), (10, 24)], device)
    grads = gradients(params, 1)
    ours, _ = stepped("Muon", params, grads, lr=1.0, weight_decay=0.0, adjust_lr_fn="spectral_norm",
                      ns_coefficients=ns_coefficients, **EXACT)
    for old, new, g in zip(params, ours, grads[0]):
        U = package().orthogonalize(g, ns_coefficients, dtype=torch.float32)
        torch.testing.assert_close(old - new, U * math.sqrt(g.shape[0] / g.shape[1]), rtol=1e-4, atol=1e-5)


SCALES = {"original": lambda R, C: max(1.0, R / C) ** 0.5, None: lambda R, C: max(1.0, R / C) ** 0.5,
          "match_rms_adamw": lambda R, C: 0.2 * max(R, C) ** 0.5, "rms_norm": lambda R, C: 0.2 * max(R, C) ** 0.5,
          "spectral_norm": lambda R, C: (R / C) ** 0.5, "spectral_unclamped": lambda R, C: (R / C) ** 0.5,
          "sqrt_max": lambda R, C: max(R, C) ** 0.5, "shape_scaling": lambda R, C: max(1.0, R / C) ** 0.5,
          "unit_rms_norm": lambda R, C: (R / C) ** 0.5, 0.25: lambda R, C: 0.25,
          (lambda R, C: R + 0.5 * C): lambda R, C: R + 0.5 * C}


@pytest.mark.parametrize("adjust_lr_fn", SCALES)
@pytest.mark.parametrize("shape", [(32, 8), (8, 32), (16, 16), (3, 32, 8), (2, 2, 8, 32)])
def test_the_scale_of_the_update(adjust_lr_fn, shape, device):
    """A gradient with orthonormal rows or columns is its own polar factor: what is left is lr times the scale."""
    R, C = shape[-2:]
    U, _, Vh = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    grad, weight = (U @ Vh).to(device), torch.zeros(shape, device=device)
    (new,), _ = stepped("Muon", [weight], [[grad]], lr=0.5, weight_decay=0.7, adjust_lr_fn=adjust_lr_fn,
                        ns_coefficients="deepseek_v4", **EXACT)
    torch.testing.assert_close(-new, 0.5 * SCALES[adjust_lr_fn](R, C) * grad, rtol=2e-3, atol=1e-4)


def split_scale(rank, world, full, grad):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    param = nn.Parameter(distribute_tensor(full.clone(), mesh, [Shard(0)], src_data_rank=None))
    optimizer = package().NorMuon([param], lr=0.1, **EXACT)
    param.grad = distribute_tensor(grad, mesh, [Shard(0)], src_data_rank=None)
    optimizer.step()
    return param.to_local().detach()


def test_a_split_parameter_is_scaled_and_normalised_as_a_whole(optimizer):
    """Peers' defect: the shards of (40, 16) on four ranks are wide, and the rows of one rank are large."""
    full, grad = torch.randn(40, 16), torch.randn(40, 16)
    grad[:10] *= 100
    shards = run_threads(4, split_scale, full, grad)
    (whole,), _ = stepped("NorMuon", [full], [[grad]], lr=0.1, **EXACT)
    assert torch.equal(torch.cat(shards), whole)


# NorMuon ---------------------------------------------------------------------------------------------------------

def normuon(W, grads, lr, weight_decay, momentum, beta2, polar):
    """The paper's update in its authors' norm-preserving form, in fp64."""
    W, M, V = W.double(), torch.zeros_like(W, dtype=torch.float64), torch.zeros(W.shape[0], 1, dtype=torch.float64)
    for g in grads:
        g = g.double()
        M = momentum * M + (1 - momentum) * g
        U = polar((1 - momentum) * g + momentum * M)
        V = beta2 * V + (1 - beta2) * U.square().mean(1, keepdim=True)
        N = U / (V.sqrt() + 1e-8)
        N *= U.norm() / N.norm()
        W = W * (1 - lr * weight_decay) - lr * max(1.0, W.shape[0] / W.shape[1]) ** 0.5 * N
    return W, V


@pytest.mark.kernels_ci
@pytest.mark.parametrize("shape", [(24, 10), (10, 24), (12, 12), (1, 5), (5, 1)])
def test_normuon_is_its_papers(shape, device):
    (param,) = weights([shape], device)
    grads = gradients([param])
    for step in grads:
        step[0].mul_(torch.logspace(0, 1, shape[0], device=device)[:, None])
    options = dict(lr=0.1, ns_coefficients=JORDAN, momentum=0.9, beta2=0.8)
    (new,), optimizer = stepped("NorMuon", [param], grads, **options, **EXACT)
    expected, V = normuon(param.detach().cpu(), [g[0].cpu() for g in grads], 0.1, 0.1, 0.9, 0.8,
                          lambda U: zeropower(torch.float64)(U, JORDAN, 5, 1e-30))
    torch.testing.assert_close(new.cpu().double(), expected, rtol=1e-4, atol=1e-5)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert set(state) == {"momentum_buffer", "second_moment"} and state["second_moment"].shape == (shape[0], 1)
    torch.testing.assert_close(state["second_moment"].cpu().double(), V, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_the_second_moment_is_always_fp32(dtype, state_dtype, device):
    """Peers' defect: an average over 20 steps in 8 bits stands still."""
    params = weights([(6, 4), (3, 6, 4)], device, dtype)
    _, optimizer = stepped("NorMuon", params, gradients(params, 1), state_dtype=state_dtype)
    for state in optimizer.state.values():
        assert state["second_moment"].dtype == torch.float32 and state["momentum_buffer"].dtype == state_dtype


# AdamW -----------------------------------------------------------------------------------------------------------

@pytest.mark.kernels_ci
@pytest.mark.parametrize("options", [{}, {"lr": 0.03}, {"weight_decay": 0.0}, {"betas": (0.8, 0.99)}, {"eps": 1e-3}],
                         ids=str)
def test_torchs_adamw(options, device):
    """The same implementation: the same bits, and the same names of the state."""
    params = weights([(12, 7), (7,), (), (3, 2, 2, 2), (1, 5), (0, 4)], device)
    grads = gradients(params)
    options = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, **options}
    theirs = copies(params)
    fused = device.type == "cuda"
    reference = torch.optim.AdamW(theirs, foreach=not fused, fused=fused, **options)
    train(reference, theirs, grads)
    ours, optimizer = stepped("Muon", params, grads, {"use_muon": False, **options}, lr=7.0, weight_decay=5.0)
    assert same(ours, theirs)
    for a, b in zip(optimizer.param_groups[0]["params"], theirs):
        assert set(optimizer.state[a]) == set(reference.state[b]) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(optimizer.state[a][key], value) for key, value in reference.state[b].items())


def test_the_defaults_of_adamw_groups(optimizer):
    muon, vector = optimizer.Muon([nn.Parameter(torch.ones(3, 3))], lr=0.02), nn.Parameter(torch.ones(3))
    muon.add_param_group({"params": [vector], "use_muon": False})
    group = muon.param_groups[1]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.02, (0.9, 0.95), 1e-8, 0.1)
    other = optimizer.Muon([{"params": [vector], "use_muon": False}], adamw_betas=(0.8, 0.9), adamw_eps=1e-5)
    assert (other.param_groups[0]["betas"], other.param_groups[0]["eps"]) == ((0.8, 0.9), 1e-5)


def test_adamw_and_muon_in_one_optimizer(device):
    """Neither changes what the other does."""
    params = weights([(12, 7), (7,), (8, 8), (5, 5)], device)
    grads = gradients(params)
    mixed = copies(params)
    groups = [{"params": mixed[1:2], "use_muon": False}, {"params": mixed[::2]},
              {"params": mixed[3:], "use_muon": False}]
    train(package().Muon(groups), mixed, grads)
    for i, use_muon in enumerate([True, False, True, False]):
        (alone,), _ = stepped("Muon", [params[i]], [[step[i]] for step in grads], {"use_muon": use_muon})
        assert torch.equal(alone, mixed[i])


# dtypes ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("use_muon", [True, False])
def test_bf16_parameters_are_stepped_in_fp32_and_rounded_once(use_muon, device):
    params = weights([(12, 20), (20, 12)], device, torch.bfloat16)
    grads = gradients(params)
    group = {"use_muon": use_muon}
    low, optimizer = stepped("Muon", params, grads, group, lr=0.01, **EXACT)
    wide = [nn.Parameter(p.detach().float()) for p in params]
    reference = package().Muon([{"params": wide, **group}], lr=0.01, **EXACT)
    for step in grads:
        train(reference, wide, [[g.float() for g in step]])
        for w in wide:
            w.data.copy_(w.data.bfloat16())
    assert same([w.float() for w in low], wide)
    for p, w in zip(optimizer.param_groups[0]["params"], wide):
        for key, value in reference.state[w].items():
            assert optimizer.state[p][key].dtype == torch.float32 and torch.equal(optimizer.state[p][key], value)


@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
@pytest.mark.parametrize("use_muon", [True, False])
def test_state_in_bf16(use_muon, name, device):
    params = weights([(24, 16), (16, 24)], device)
    grads = gradients(params, 8)
    low, optimizer = stepped(name, params, grads, {"use_muon": use_muon}, lr=0.1, state_dtype=torch.bfloat16)
    wide, _ = stepped(name, params, grads, {"use_muon": use_muon}, lr=0.1)
    for state in optimizer.state.values():
        assert {k: v.dtype for k, v in state.items() if k not in ("step", "second_moment")} == dict.fromkeys(
            ["momentum_buffer"] if use_muon else ["exp_avg", "exp_avg_sq"], torch.bfloat16)
    for old, a, b in zip(params, low, wide):
        assert not torch.equal(a, b) and (a - b).norm() < 0.1 * (b - old).norm()


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize(("of_param", "of_grad"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
                         ids=str)
def test_gradients_of_another_dtype(of_param, of_grad, use_muon, device):
    """A bf16 parameter may accumulate its gradient in fp32: every bit of it counts."""
    params = weights([(12, 20), (9, 9)], device, of_param)
    if not hasattr(params[0], "grad_dtype"):
        pytest.skip("this torch ties the gradient's dtype to the parameter's")
    params = copies(params)
    optimizer = package().Muon([{"params": params, "use_muon": use_muon}], lr=0.1, **EXACT)
    wide = [nn.Parameter(p.detach().float()) for p in params]
    reference = package().Muon([{"params": wide, "use_muon": use_muon}], lr=0.1, **EXACT)
    for p, w in zip(params, wide):
        p.grad_dtype = of_grad
        p.grad = torch.randn_like(p, dtype=of_grad)
        w.grad = p.grad.float()
    optimizer.step()
    reference.step()
    assert same(params, [w.to(of_param) for w in wide])
    assert all(torch.equal(next(iter(optimizer.state[p].values())), next(iter(reference.state[w].values())))
               for p, w in zip(params, wide))


def test_parameters_of_two_dtypes_in_one_group(device):
    params = weights([(8, 6), (6, 8)], device) + weights([(8, 6), (5, 5)], device, torch.bfloat16)
    grads = gradients(params)
    for group in ({}, {"use_muon": False}):
        together, _ = stepped("NorMuon", params, grads, group)
        for i, p in enumerate(params):
            (alone,), _ = stepped("NorMuon", [p], [[step[i]] for step in grads], group)
            assert torch.equal(alone, together[i])


# every option changes the result (a peer's defect) --------------------------------------------------------------

MUON_OPTIONS = {"lr": 0.02, "weight_decay": 0.5, "momentum": 0.5, "nesterov": False, "ns_coefficients": "quintic",
                "eps": 0.5, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}
ADAMW_OPTIONS = {"lr": 0.02, "weight_decay": 0.5, "betas": (0.5, 0.6), "eps": 0.1}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("key", MUON_OPTIONS)
def test_every_option_of_muon_changes_the_result_also_by_group(key, device):
    params = weights([(12, 7), (7, 12)], device)
    grads, option = gradients(params), {key: MUON_OPTIONS[key]}
    usual, _ = stepped("Muon", params, grads)
    changed, _ = stepped("Muon", params, grads, **option)
    by_group, _ = stepped("Muon", params, grads, option)
    assert not any(torch.equal(a, b) for a, b in zip(usual, changed))
    assert same(changed, by_group)


@pytest.mark.parametrize("key", ADAMW_OPTIONS)
def test_every_option_of_adamw_changes_the_result_also_by_group(key, device):
    params = weights([(12, 7), (7,)], device)
    grads, value = gradients(params), ADAMW_OPTIONS[key]
    usual, _ = stepped("Muon", params, grads, {"use_muon": False})
    keyword = {"betas": "adamw_betas", "eps": "adamw_eps"}.get(key, key)
    changed, _ = stepped("Muon", params, grads, {"use_muon": False}, **{keyword: value})
    by_group, _ = stepped("Muon", params, grads, {"use_muon": False, key: value})
    assert not any(torch.equal(a, b) for a, b in zip(usual, changed))
    assert same(changed, by_group)


def test_beta2_changes_the_result_also_by_group(device):
    params = weights([(12, 7), (7, 12)], device)
    grads = gradients(params)
    usual, changed = (stepped("NorMuon", params, grads, **options)[0] for options in ({}, {"beta2": 0.5}))
    by_group, _ = stepped("NorMuon", params, grads, {"beta2": 0.5})
    plain, _ = stepped("Muon", params, grads)
    assert not any(torch.equal(a, b) for a, b in [*zip(usual, changed), *zip(usual, plain)])
    assert same(changed, by_group)


@pytest.mark.parametrize(("key", "value"), [("wire_dtype", torch.float32), ("state_dtype", torch.bfloat16),
                                            ("ns_dtype", torch.bfloat16)])
def test_every_dtype_changes_the_result_a_little(key, value, device):
    params = weights([(24, 16), (16, 24)], device)
    grads = gradients(params)
    usual, _ = stepped("Muon", params, grads, lr=0.1)
    changed, _ = stepped("Muon", params, grads, lr=0.1, **{key: value})
    for old, a, b in zip(params, usual, changed):
        assert not torch.equal(a, b) and (a - b).norm() < 0.1 * (a - old).norm()


def test_the_workspace_changes_no_bit(device):
    params = weights(SHAPES, device)
    grads = gradients(params)
    usual, _ = stepped("NorMuon", params, grads)
    small, _ = stepped("NorMuon", params, grads, workspace_bytes=140_000)
    assert same(usual, small)


@pytest.mark.parametrize("key", [*MUON_OPTIONS, "beta2"])
def test_the_group_is_read_at_every_step(key, device):
    """Schedules change it between steps."""
    value = {**MUON_OPTIONS, "beta2": 0.5}[key]
    params = weights([(12, 7), (7, 12)], device)
    grads = gradients(params, 4)
    _, optimizer = stepped("NorMuon", params, grads[:2])
    ours = optimizer.param_groups[0]["params"]
    fresh = copies(ours)
    other = package().NorMuon(fresh, **{key: value})
    for a, b in zip(ours, fresh):
        other.state[b] = {k: v.clone() for k, v in optimizer.state[a].items()}
    optimizer.param_groups[0][key] = value
    assert same(train(optimizer, ours, grads[2:]), train(other, fresh, grads[2:]))


def test_a_learning_rate_may_be_a_tensor_and_stays_what_it_is(device):
    """dion turns it into a tensor on the device."""
    params = weights([(12, 7), (7,)], device)
    grads, results = gradients(params), []
    for lr in (0.05, torch.tensor(0.05, dtype=torch.float64)):
        ours = copies(params)
        optimizer = package().Muon([{"params": ours[:1]}, {"params": ours[1:], "use_muon": False}], lr=lr)
        results.append(train(optimizer, ours, grads))
        assert all(type(group["lr"]) is type(lr) for group in optimizer.param_groups)
    assert same(*results)


@pytest.mark.parametrize("keys", [("adamw_betas",), ("beta2", "eps"), ("momentum", "weight_decay", "adamw_eps")],
                         ids=str)
def test_numbers_may_be_tensors(keys, device, tmp_path):
    """torch's AdamW takes them for betas."""
    params = weights([(12, 7), (7,)], device)
    grads, results = gradients(params, 3), []
    numbers = {"adamw_betas": (0.8, 0.9), "adamw_eps": 1e-6, "beta2": 0.9, "eps": 1e-6, "momentum": 0.9,
               "weight_decay": 0.2}
    for make in (lambda number: number, lambda number: torch.tensor(number, dtype=torch.float64)):
        ours = copies(params)
        options = {key: tuple(map(make, numbers[key])) if key == "adamw_betas" else make(numbers[key]) for key in keys}
        named = [{"params": [("up", ours[0])]}, {"params": [("bias", ours[1])], "use_muon": False}]
        optimizer = package().NorMuon(named, **options)
        results.append(train(optimizer, ours, grads))
        package().export_state(optimizer, tmp_path / "state")
        package().import_state(optimizer, tmp_path / "state")
    assert same(*results)


# what a step must leave alone -------------------------------------------------------------------------------------

@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
def test_gradients_are_read_only(nesterov, dtype, device):
    """Peers' defect: gradients used as scratch memory, or replaced by the update."""
    params = weights([(12, 7), (7, 12), (3, 6, 4), (5,)], device, dtype)
    groups = [{"params": params[:3]}, {"params": params[3:], "use_muon": False}]
    optimizer = package().NorMuon(groups, nesterov=nesterov)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn_like(p)
        tensors, values = [p.grad for p in params], [p.grad.clone() for p in params]
        optimizer.step()
        assert all(p.grad is t for p, t in zip(params, tensors)) and same(tensors, values)


@pytest.mark.parametrize("nesterov", [True, False])
def test_state_survives_zeroed_gradients(nesterov, device):
    """Peers' defect: the momentum was the gradient's memory."""
    params = weights([(12, 7)], device)
    optimizer = package().Muon(params, nesterov=nesterov)
    train(optimizer, params, gradients(params, 1))
    before = optimizer.state[params[0]]["momentum_buffer"].clone()
    optimizer.zero_grad(set_to_none=False)
    assert before.any() and torch.equal(optimizer.state[params[0]]["momentum_buffer"], before)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_momentum_is_the_average_of_the_gradients(name, nesterov, dtype, device):
    """Peers' defect: torch.optim.Muon normalises it in place for bf16 gradients without Nesterov."""
    params = weights([(12, 7), (7, 12), (8, 8), (2, 5, 3)], device, dtype)
    grads = gradients(params, 6)
    _, optimizer = stepped(name, params, grads, nesterov=nesterov, momentum=0.9)
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        expected = torch.zeros(p.shape, dtype=torch.float64, device=device)
        for step in grads:
            expected = 0.9 * expected + 0.1 * step[i].double()
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"].double(), expected, rtol=1e-5, atol=1e-6)


def test_frozen_parameters_are_left_alone(device):
    params = weights([(12, 7), (7, 12), (5,), (6,)], device)
    params[1].requires_grad_(False)
    params[3].requires_grad_(False)
    before = [p.detach().clone() for p in params]
    optimizer = package().Muon([{"params": params[:2]}, {"params": params[2:], "use_muon": False}])
    train(optimizer, params, [[torch.randn_like(p) if p.requires_grad else None for p in params]])
    assert [torch.equal(a, b) for a, b in zip(params, before)] == [False, True, False, True]
    params[1].requires_grad_(True)
    train(optimizer, params, gradients(params, 1))
    assert not torch.equal(params[1], before[1])


def test_what_has_a_gradient_is_stepped_though_it_wants_none(device):
    """As in torch: copies of weights in another precision are given their gradients, and want none."""
    params = weights([(12, 7), (5,)], device)
    masters = [p.detach().clone() for p in params]
    grads = gradients(params, 3)
    for ps in (params, masters):
        train(package().Muon([{"params": ps[:1]}, {"params": ps[1:], "use_muon": False}]), ps, grads)
    assert all(torch.equal(a, b) and not b.requires_grad for a, b in zip(params, masters))


def left_over(rank, world):
    """Rank 1 alone has a gradient of what wants none."""
    frozen, other = params = [nn.Parameter(torch.arange(84.0).view(shape)) for shape in ((12, 7), (7, 12))]
    frozen.requires_grad_(False)
    optimizer = package().Muon([("frozen", frozen), ("other", other)], process_group=dist.group.WORLD)
    train(optimizer, params, [[torch.eye(12, 7) if rank else None, torch.eye(7, 12)]])
    return frozen, other.detach()


def test_where_ranks_act_alike_what_wants_no_gradient_is_left_alone():
    with pytest.warns(UserWarning, match="frozen has a gradient but requires_grad=False: it is left alone"):
        results = run_threads(2, left_over)
    assert all(torch.equal(frozen, torch.arange(84.0).view(12, 7)) for frozen, _ in results)
    assert torch.equal(results[0][1], results[1][1]) and not torch.equal(results[0][1], torch.arange(84.0).view(7, 12))


def test_parameters_without_gradients_are_left_alone(device):
    """As in torch: neither decayed nor averaged, and their momentum waits."""
    params = weights([(12, 7), (7, 12), (5,), (6,)], device)
    alone = copies(params)
    grads = gradients(params, 5)
    for number in (1, 3):
        grads[number][0] = grads[number][2] = None
    groups = [{"params": params[:2]}, {"params": params[2:], "use_muon": False}]
    train(package().NorMuon(groups), params, grads)
    for i, use_muon in enumerate([True, True, False, False]):
        present = [[step[i]] for step in grads if step[i] is not None]
        (expected,), _ = stepped("NorMuon", [alone[i]], present, {"use_muon": use_muon})
        assert torch.equal(params[i], expected)


def test_no_gradient_at_all(device):
    params = weights([(12, 7), (5,)], device)
    before = copies(params)
    optimizer = package().Muon([{"params": params[:1]}, {"params": params[1:], "use_muon": False}])
    optimizer.step()
    assert same(params, before) and not any(optimizer.state.values())


# peers' defects ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-12, 1e-6, 1e6, 1e20, 1e30])
def test_the_size_of_the_gradients_does_not_matter(scale, name, device):
    """Peers' defect: casts before normalising, an absolute eps, squares that vanish."""
    params = weights([(24, 16), (16, 24)], device)
    grads = gradients(params, 2)
    usual, _ = stepped(name, params, grads, lr=0.1, weight_decay=0.0, **EXACT)
    scaled, _ = stepped(name, params, [[g * scale for g in step] for step in grads], lr=0.1, weight_decay=0.0, **EXACT)
    for old, a, b in zip(params, usual, scaled):
        assert (a - b).abs().max() < 2e-3 * (a - old).abs().max()


@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_zero_gradients_decay_only(name, device):
    """Peers' defect: NaN from 0 / 0, now or at the next step."""
    params = weights([(12, 7), (3, 6, 4)], device)
    zeros = [[torch.zeros_like(p) for p in params]]
    new, optimizer = stepped(name, params, zeros * 2, lr=0.1, weight_decay=0.5)
    for old, now in zip(params, new):
        torch.testing.assert_close(now, old.detach() * 0.95 ** 2)
    assert not any(t.any() for state in optimizer.state.values() for t in state.values())
    ours = optimizer.param_groups[0]["params"]
    train(optimizer, ours, gradients(ours, 1))
    assert all(p.isfinite().all() for p in ours)


@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_a_row_of_zeros_stays_finite(name, device):
    params = weights([(12, 7)], device)
    grads = gradients(params)
    for step in grads:
        step[0][3] = 0.0
    (new,), _ = stepped(name, params, grads, lr=0.1, weight_decay=0.0)
    assert new.isfinite().all() and torch.equal(new[3], params[0][3])


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
@pytest.mark.parametrize("shape", [(5, 8, 6), (2, 3, 6, 8)])
def test_a_stack_is_its_matrices_one_by_one(shape, name, device):
    """Peers' defect: the batch axis flattened into rows."""
    (stack,) = weights([shape], device)
    grads = gradients([stack])
    (together,), _ = stepped(name, [stack], grads)
    for i, matrix in enumerate(stack.detach().flatten(0, -3)):
        (alone,), _ = stepped(name, [matrix], [[step[0].flatten(0, -3)[i]] for step in grads])
        assert torch.equal(alone, together.flatten(0, -3)[i])


@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_a_matrix_does_not_depend_on_its_companions(name, device):
    params = weights([*SHAPES, *SHAPES[::-1], (3, 16, 16)], device)
    grads = gradients(params, 2)
    together, _ = stepped(name, params, grads)
    for i in (0, 3, 9, 16):
        (alone,), _ = stepped(name, [params[i]], [[step[i]] for step in grads])
        assert torch.equal(alone, together[i])


def test_a_broken_gradient_spoils_its_own_matrix_only(device):
    params = weights([(12, 7)] * 3 + [(7, 12)], device)
    grads = gradients(params, 2)
    good, _ = stepped("NorMuon", params, grads)
    grads[0][1][2, 3] = math.nan
    spoiled, _ = stepped("NorMuon", params, grads)
    assert [torch.equal(a, b) for a, b in zip(good, spoiled)] == [True, False, True, True]


def test_state_is_created_at_the_first_step_for_the_whole_group(optimizer):
    """Not at construction: Accelerate swaps the parameters after it."""
    params = weights([(12, 7), (0, 7), (3, 6, 4), (5,)])
    muon = optimizer.NorMuon([{"params": params[:3]}, {"params": params[3:], "use_muon": False}], lr=0.0)
    assert not any(muon.state.values())
    before = copies(params)
    train(muon, params, [[torch.zeros_like(p) for p in params]])
    assert same(params, before)
    assert [set(muon.state[p]) for p in params[:3]] == [{"momentum_buffer", "second_moment"}] * 3
    assert all(muon.state[p]["momentum_buffer"].shape == p.shape for p in params[:3])


def test_the_default_optimizer_trains(device):
    """A small regression: the loss falls by a factor of ten in 60 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
    x = torch.randn(64, 8, device=device)
    y = torch.tanh(x @ torch.randn(8, 4, device=device))
    optimizer = package().Muon(package().get_default_muon_param_groups(model), lr=0.02, weight_decay=0.0)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_moved_state_is_stepped(device):
    """RL trainers move the state to the host and back between phases: new tensors in the same dict."""
    params = weights([(12, 7), (5,)], device)
    grads = gradients(params)
    usual, mine = copies(params), copies(params)
    results = []
    for ours, move in ((usual, False), (mine, True)):
        optimizer = package().NorMuon([{"params": ours[:1]}, {"params": ours[1:], "use_muon": False}])
        for step in grads:
            train(optimizer, ours, [step])
            for state in optimizer.state.values() if move else ():
                for key, value in state.items():
                    state[key] = value.clone()
        results.append((ours, [t for p in ours for t in optimizer.state[p].values()]))
    assert same(results[0][0], results[1][0]) and same(results[0][1], results[1][1])


# kernels ----------------------------------------------------------------------------------------------------------

@quiet
@pytest.mark.interpreter
def test_a_step_through_the_kernels_is_one_without_them(part, monkeypatch, device):
    """Where there is no GPU, in Triton's interpreter."""
    params = weights([(12, 7), (7, 12), (2, 5, 3), (6,)], device)
    grads, results = gradients(params, 2), []
    for path in ("torch", "triton"):
        take(path, monkeypatch)
        ours = copies(params)
        optimizer = package().NorMuon([{"params": ours[:3]}, {"params": ours[3:], "use_muon": False}], lr=0.1, **EXACT)
        results.append(train(optimizer, ours, grads))
    # two steps of fp32 roundings, which the polynomials magnify, like small singular values, by up to their slope at 0
    slope = math.prod(a for a, _, _ in part("newton_schulz.orthogonalize").steps_of("polar_express").triples)
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=0, atol=2 * 0.1 * 2.0**-23 * slope)


@quiet
@pytest.mark.interpreter
def test_options_reach_the_kernels_as_numbers_of_one_type(part, monkeypatch, device):
    """A tensor for eps or a number for nesterov did not compile; and a kernel for eps=0 would have been taken again."""
    params = weights([(16, 16), (24, 40)], device)
    grads, found = gradients(params, 2), []
    take("triton", monkeypatch)
    kinds, pack = set(), part("kernels.elementwise.momentum").Pack
    call = pack.__call__
    monkeypatch.setattr(pack, "__call__", lambda *args: (kinds.add(type(args[4])), call(*args))[1])
    for eps, nesterov in ((1e-7, True), (torch.tensor(1e-7), torch.tensor(True)), (0.0, True), (0, 1.0)):
        ours = copies(params)
        optimizer = package().Muon(ours, lr=0.1, eps=eps, nesterov=nesterov, ns_dtype=torch.float16)
        found.append(train(optimizer, ours, grads))
    assert same(found[0], found[1]) and same(found[2], found[3]) and kinds == {bool}


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_parameters_of_16_and_64_bits(dtype, use_muon, device):
    """AdamW steps fp64 in fp64, also beside others in one group; Muon refuses it."""
    if use_muon and dtype == torch.float64:
        pytest.skip("refused: test_bad_input")
    params = weights([(12, 7), (5, 5)], device, dtype) + weights([(4, 3)], device)
    grads = gradients(params, 3)
    ours, optimizer = stepped("Muon", params, grads, {"use_muon": use_muon}, lr=0.01)
    if dtype == torch.float64:
        theirs = copies(params)
        train(torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95)), theirs, grads)
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, rtol=1e-12 if a.dtype == dtype else 1e-6, atol=1e-12)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert [next(t for key, t in optimizer.state[p].items() if key != "step").dtype
            for p in optimizer.param_groups[0]["params"]] == [wide, wide, torch.float32]


def test_a_step_inside_autocast_has_the_bits_of_one_outside(optimizer):
    """Products in bf16 would be too coarse for steps that are planned for fp32: weights moved by 1e10."""
    params = [nn.Parameter(torch.zeros(16, 64)) for _ in range(2)]
    for p, inside in zip(params, (False, True)):
        p.grad = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            optimizer.Muon([p], lr=1.0).step()
    assert torch.equal(*params) and params[0].abs().max() < 2


def under(dtype, function):
    """What a function gives while another dtype is the default one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return function()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_another_default_dtype_changes_no_bit(dtype, optimizer, device):
    """Also of matrices that are scaled before their squares are summed, and of counts that 16 bits do not hold."""
    stacks = [torch.randn(2, 24, 40, device=device) * scale for scale in (1.0, 1e-20, 1e20)]
    params = weights([(24, 40), (40, 24), (3, 8, 8), (9,)], device)
    grads = gradients(params, 3)

    def results():
        found = [optimizer.orthogonalize(X, name) for X in stacks for name in ("polar_express", "turbo", "cubic")]
        for name in ("Muon", "NorMuon"):
            ours = copies(params)
            opt = getattr(optimizer, name)([{"params": ours[:3]}, {"params": ours[3:], "use_muon": False}],
                                           nonfinite="skip")
            train(opt, ours, grads[:2])
            saved = opt.state_dict()
            saved["state"][3]["step"] = 70001.0  # as old files have it
            opt.load_state_dict(saved)
            found += train(opt, ours, grads[2:]) + [t for p in ours for t in opt.state[p].values()]
        return found

    usual, ours = results(), under(dtype, results)
    assert all(torch.equal(a, b) and a.dtype == b.dtype and a.isfinite().all() for a, b in zip(usual, ours))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_numbers_of_kernels_are_fp32_under_any_default_dtype(dtype):
    """On a GPU they are read as fp32."""
    pair = part("newton_schulz.coefficients").JORDAN
    factors = under(dtype, lambda: part("kernels.onchip.gram_chain")._program((), pair)[1])
    numbers = under(dtype, lambda: part("kernels.elementwise.norms")._numbers(0.95, torch.device("cpu")))
    assert factors.dtype == numbers.dtype == torch.float32


def test_a_compiled_training_step(optimizer):
    """The compiler leaves the step as it is, with AdamW groups too."""
    models = [nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    steps = []
    for model in models:
        opt = optimizer.Muon(optimizer.get_default_muon_param_groups(model), lr=0.01)

        def step(x, model=model, opt=opt):
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

        steps.append(step)
    torch._dynamo.reset()
    for _ in range(2):
        x = torch.randn(3, 4)
        steps[0](x)
        torch.compile(steps[1], backend="eager")(x)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_the_signature_names_every_argument(optimizer, name):
    """For help(), editors, and trainers that keep of their options what a signature names."""
    known = inspect.signature(getattr(optimizer, name)).parameters
    ours = inspect.signature(torch.optim.Muon).parameters
    assert [n for n in known][:len(ours)] == list(ours) and all(p.kind is not p.VAR_KEYWORD for p in known.values())
    assert known["wire_dtype"].default is torch.bfloat16 and known["adamw_eps"].default == 1e-8
    assert ("beta2" in known) == (name == "NorMuon")
    options = {n: p.default for n, p in known.items() if p.default is not p.empty}
    getattr(optimizer, name)([torch.nn.Parameter(torch.ones(2, 2))], **options)

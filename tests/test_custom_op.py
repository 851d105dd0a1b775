"""`orthogonalize` as an operator: opaque to the compiler, right without data, capturable, without a gradient."""
from __future__ import annotations

import contextlib
import functools
import types
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from tests.paths import quiet
from tests.ranks import everywhere

pytestmark = quiet

CHOICES = {"default": (), "turbo": ("turbo",), "a triple": ((3.4445, -4.775, 2.0315), 3),
           "triples": ([(3.0, -3.0, 1.0), [2, -1.5, 0.5]], 2)}


@pytest.fixture
def op(part):
    return part("newton_schulz.custom_op")


def stacks():
    """Inputs of every kind: wide, tall, without matrices, without elements, with other strides, of other dtypes."""
    yield torch.randn(2, 6, 20)
    yield torch.randn(20, 6)
    yield torch.randn(2, 3, 8, 8, dtype=torch.bfloat16)
    yield torch.randn(0, 4, 5)
    yield torch.randn(3, 0, 5)
    yield torch.randn(2, 20, 6, dtype=torch.float16).mT
    yield torch.randn(4, 9, 9)[::2, :, ::3]


@pytest.mark.parametrize("number", range(7))
def test_opcheck(op, number):
    """torch's own check: schema, the fake against the real result, and tracing with static and dynamic shapes."""
    X = list(stacks())[number]
    torch.library.opcheck(op._orthogonalize, (X, [2.0, -1.5, 0.5] * 2, False, 1e-7, torch.float32))
    torch.library.opcheck(op._orthogonalize, (X, [4.6051, -9.6552, 5.6769], True, 1e-7, None))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("choice", CHOICES)
def test_torch_compile_sees_one_opaque_operator(optimizer, op, device, choice):
    """No break, no warning, no recompilation for other values, the same bits as without the compiler."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda X: 2 * optimizer.orthogonalize(X + 1, *CHOICES[choice]), fullgraph=True,
                             backend=backend)
    with warnings.catch_warnings(), torch._dynamo.config.patch(error_on_recompile=True):
        warnings.simplefilter("error")
        for _ in range(2):
            X = torch.randn(2, 6, 20, device=device)
            assert torch.equal(compiled(X), 2 * optimizer.orthogonalize(X + 1, *CHOICES[choice]))
    (graph,) = graphs
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert len(names) == 3 and names[1].endswith("orthogonalize.default")


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_through_aot(optimizer, device, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(lambda X: optimizer.orthogonalize(X.mT).sum(dim=0), fullgraph=True, backend="aot_eager",
                             dynamic=dynamic)
    for N in (2, 3):
        X = torch.randn(N, 6, 20, device=device)
        assert torch.equal(compiled(X), optimizer.orthogonalize(X.mT).sum(dim=0))


def test_export(optimizer):
    class Model(torch.nn.Module):
        def forward(self, X):
            return optimizer.orthogonalize(X, "cubic")

    X = torch.randn(2, 6, 20)
    assert torch.equal(torch.export.export(Model(), (X,)).module()(X), optimizer.orthogonalize(X, "cubic"))


def test_there_is_no_gradient_and_it_is_said(optimizer):
    """A result that looked constant to autograd would be a wrong gradient without a word."""
    X = torch.randn(2, 6, 20, requires_grad=True)
    before = X.detach().clone()
    with pytest.raises(NotImplementedError, match=r"orthogonalize has no gradient; call it on X.detach\(\)"):
        optimizer.orthogonalize(X).sum().backward()
    assert X.grad is None and torch.equal(X, before)
    assert not optimizer.orthogonalize(X.detach()).requires_grad
    with torch.no_grad():
        assert not optimizer.orthogonalize(X).requires_grad
    for transform in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))):
        with pytest.raises(RuntimeError, match="autograd.Function"):
            transform(lambda x: optimizer.orthogonalize(x).sum())(X.detach())


def test_there_is_no_forward_derivative_either(optimizer):
    """The operator would give a tangent of zero."""
    X = torch.randn(6, 20)
    refused = functools.partial(pytest.raises, NotImplementedError, match="no forward-mode derivative")
    with refused():
        torch.func.jvp(optimizer.orthogonalize, (X,), (X,))
    with refused():
        torch.func.jacfwd(optimizer.orthogonalize)(X)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, X)
        with refused():
            optimizer.orthogonalize(dual)
        assert torch.equal(optimizer.orthogonalize(forward_ad.unpack_dual(dual).primal), optimizer.orthogonalize(X))


class Seen(TorchDispatchMode):
    """Keeps the names of operators."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names = [*getattr(self, "names", ()), str(function)]
        return function(*args, **(kwargs or {}))


def test_who_listens_sees_the_operator_and_nobody_else_pays_for_it(optimizer, op, device, monkeypatch):
    """A plain call goes round torch's dispatcher; modes, tracers, transforms and subclasses see one operator."""
    X = torch.randn(2, 6, 20, device=device)
    with Seen() as seen:
        expected = optimizer.orthogonalize(X)
    assert seen.names[0].endswith("orthogonalize.default")
    traced = make_fx(lambda X: optimizer.orthogonalize(X))(X).graph.nodes
    assert [str(node.target) for node in traced if node.op == "call_function"][0].endswith("orthogonalize.default")
    with FakeTensorMode() as fake:
        assert optimizer.orthogonalize(fake.from_tensor(X)).shape == X.shape
    assert torch.equal(optimizer.orthogonalize(torch._neg_view(X)), optimizer.orthogonalize(-X))
    for context in (contextlib.nullcontext, torch.no_grad, functools.partial(torch.autocast, device.type)):
        with context():
            assert op._is_plain(X)
    for context in (torch.inference_mode, functools.partial(torch.device, "cpu")):
        with context():
            assert not op._is_plain(X) and torch.equal(optimizer.orthogonalize(X), expected)
    with monkeypatch.context() as patch:
        patch.setattr(op, "_orthogonalize", None)
        assert torch.equal(optimizer.orthogonalize(X), expected)
    monkeypatch.setattr(op, "DISPATCHER_NAMES", ("what a later torch may lack",))
    assert op._plain_thread() is None
    monkeypatch.setattr(op, "_plain_thread_keys", None)
    assert not op._is_plain(X) and torch.equal(optimizer.orthogonalize(X), expected)


def test_vmap(optimizer):
    X = torch.randn(3, 2, 6, 20)
    torch.testing.assert_close(torch.func.vmap(optimizer.orthogonalize)(X), optimizer.orthogonalize(X))


def test_the_operator_and_the_function_give_the_same(optimizer, part, device):
    X = torch.randn(2, 6, 20, device=device)
    for choice in CHOICES.values():
        assert torch.equal(
            optimizer.orthogonalize(X, *choice), part("newton_schulz.orthogonalize").orthogonalize(X, *choice)
        )


@pytest.mark.parametrize("X, options, message", [
    (torch.zeros(5), {}, r"X is torch.float32 of shape \(5,\); pass matrices"),
    (torch.zeros(2, 2, dtype=torch.float64), {}, "pass matrices .* in fp32, bf16 or fp16"),
    (torch.zeros(2, 2), {"ns_coefficients": "newton"}, "ns_coefficients is 'newton'"),
    (torch.zeros(2, 2), {"ns_steps": 0}, "ns_steps is 0"),
])
def test_wrong_arguments_raise(optimizer, X, options, message):
    with pytest.raises(ValueError, match=message):
        optimizer.orthogonalize(X, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["polar_express", "turbo", "cubic"])
@pytest.mark.parametrize("shape", [(12, 768, 768), (2, 768, 3072), (1, 3072, 768), (8, 64, 128), (2, 50, 70)], ids=str)
def test_a_cuda_graph_replays_it(optimizer, shape, name):
    X = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    optimizer.orthogonalize(X, name)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        O = optimizer.orthogonalize(X, name)
    for _ in range(2):
        X.normal_()
        graph.replay()
        assert torch.equal(O, optimizer.orthogonalize(X, name))


@pytest.mark.gpu
def test_torch_compile_with_its_own_cuda_graphs(optimizer):
    torch._dynamo.reset()
    compiled = torch.compile(lambda X: 2 * optimizer.orthogonalize(X), fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        X = torch.randn(2, 256, 512, device="cuda")
        assert torch.equal(compiled(X), 2 * optimizer.orthogonalize(X))


@pytest.mark.gpus(2)
def test_a_device_that_is_not_the_current_one(optimizer):
    X = torch.randn(2, 256, 512)
    first, second = (optimizer.orthogonalize(X.to(f"cuda:{i}")) for i in range(2))
    assert second.device.index == 1 and torch.equal(first.cpu(), second.cpu())


@pytest.mark.parametrize("current", [0, 1])
def test_another_device_is_entered_and_the_current_one_is_not(op, monkeypatch, current):
    X, entered, made = types.SimpleNamespace(is_cuda=True, get_device=lambda: 1), [], []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_of", lambda X: entered.append(X) or contextlib.nullcontext())
    everywhere(monkeypatch, op, "polar_factor", lambda *arguments: made.append(arguments) or "O")
    assert op._compute(X, "steps", 1e-7, None) == "O" and made == [(X, "steps", 1e-7, None, None)]
    assert entered == [X] * (current == 0)


@pytest.mark.gpus(2)
def test_a_tensor_on_another_gpu(optimizer):
    X = torch.randn(3, 128, 256, device="cuda:1")
    O = [optimizer.orthogonalize(X) for _ in range(3)]
    with torch.cuda.device(1):
        expected = optimizer.orthogonalize(X)
    assert torch.cuda.current_device() == 0 and all(torch.equal(o, expected) for o in O) and expected.isfinite().all()


def test_what_is_not_looked_at_again(op, optimizer, monkeypatch):
    """A call like one before is: of usual options, of a tensor that nobody listens to; all else is looked at."""
    asked, X = [], torch.randn(2, 4, 6)
    everywhere(monkeypatch, op, "replay_known", lambda X, given: asked.append(given))
    first = optimizer.orthogonalize(X)
    assert asked == [("polar_express", 5, 1e-7, None)]
    for options in ({"eps": True}, {"eps": 0}, {"ns_steps": True}, {"ns_coefficients": (3.4445, -4.775, 2.0315)}):
        with contextlib.suppress(ValueError):
            optimizer.orthogonalize(X, **options)
    with torch.autograd.forward_ad.dual_level():
        optimizer.orthogonalize(X)
    optimizer.orthogonalize(X.clone().requires_grad_())
    assert len(asked) == 1
    everywhere(monkeypatch, op, "replay_known", lambda X, given: first)
    assert optimizer.orthogonalize(X) is first


def test_a_call_that_is_on_no_tape_is_made_as_the_first_was(optimizer, part, monkeypatch):
    """Also where other matrices lie otherwise, another dtype was asked for, or the kernels were changed."""
    polar, X, given = part("newton_schulz.orthogonalize"), torch.randn(2, 4, 6), ("polar_express", 5, 1e-7, None)
    kind = polar.CallSignature((0, 0, 0, 0))
    monkeypatch.setattr(polar, "_signatures", {polar._call_key(X, given): kind})
    everywhere(monkeypatch, polar, "use_triton", lambda device: True)
    monkeypatch.setattr(polar, "replay", lambda *arguments: arguments[0] is kind)
    assert polar.replay_known(X, given).shape == X.shape and polar.replay_known(X.mT, given) is None
    assert polar.replay_known(X, (*given[:3], torch.float32)) is None
    monkeypatch.setattr(polar, "replay", lambda *arguments: False)
    assert polar.replay_known(X, given) is None
    everywhere(monkeypatch, polar, "use_triton", lambda device: False)
    monkeypatch.setattr(polar, "replay", lambda *arguments: True)
    assert polar.replay_known(X, given) is None

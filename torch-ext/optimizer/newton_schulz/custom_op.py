"""`orthogonalize` as a torch operator: opaque to torch.compile and export, capturable in a CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from .._ops import add_op_namespace_prefix, ops
from . import coefficients
from .coefficients import Steps
from .orthogonalize import check, polar_factor, replay_known

SCHEMA = (
    "orthogonalize(Tensor X, float[] triples, bool aol, float eps, ScalarType? dtype) -> Tensor"
)


def _compute(X, steps, eps, dtype, given=None):
    if _is_elsewhere(X):
        with torch.cuda.device_of(X):  # to enter and leave takes longer than to ask
            return polar_factor(X, steps, eps, dtype, given)
    return polar_factor(X, steps, eps, dtype, given)


def _is_elsewhere(X) -> bool:
    """Say whether Triton would launch on another GPU than that of X."""
    return X.is_cuda and X.get_device() != torch.cuda.current_device()


def _operator(X, triples, aol, eps, dtype):
    return _compute(X, Steps(tuple(zip(*[iter(triples)] * 3)), aol), eps, dtype)


def _fake(X, triples, aol, eps, dtype):
    return X.new_empty(X.shape)


def _no_gradient(context, gradient):
    raise NotImplementedError(
        "orthogonalize has no gradient; call it on X.detach() or under torch.no_grad()"
    )


def _check_tangent(X):
    """The operator would drop a tangent, which is a zero derivative without a word; dynamo cannot
    look for one.
    """
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(X).tangent is not None:
        raise NotImplementedError(
            "orthogonalize has no forward-mode derivative either (jvp, jacfwd, dual tensors); "
            "call it on the primal"
        )


def _define() -> torch.library.Library | None:
    """Define the operator, by the parts of torch.library: its custom_op imports torch's compiler, 2
    s, when called.
    """
    if hasattr(ops, "orthogonalize"):  # this very build was loaded from another path before
        return None
    library = torch.library.Library(ops.name, "FRAGMENT")
    library.define(SCHEMA, tags=torch.Tag.pt2_compliant_tag)
    library.impl("orthogonalize", _operator, "CompositeExplicitAutograd")
    torch.library.register_fake(add_op_namespace_prefix("orthogonalize"), _fake, lib=library)
    torch.library.register_autograd(
        add_op_namespace_prefix("orthogonalize"), _no_gradient, lib=library
    )
    return library


_library = _define()  # the operator lives as long as this
_orthogonalize = ops.orthogonalize.default


ASKED = (
    "DispatchKey",
    "DispatchKeySet",
    "_dispatch_keys",
    "_dispatch_tls_local_include_set",
    "_len_torch_function_stack",
)


def _plain_thread() -> int | None:
    """The dispatcher's keys in a thread where nobody listens; None where this torch does not
    say.
    """
    if not all(hasattr(torch._C, name) for name in ASKED):
        return None
    keys = torch._C.DispatchKey
    return torch._C.DispatchKeySet(keys.BackendSelect).add(keys.ADInplaceOrView).raw_repr()


_plain = _plain_thread()
_plain_tensors: set = set()  # keys of tensors that nobody sees but their device's kernels


def _is_plain_tensor(X) -> bool:
    keys = torch._C._dispatch_keys(X).raw_repr()
    if keys not in _plain_tensors:
        _plain_tensors.add(torch._C._dispatch_keys(torch.empty(0, device=X.device)).raw_repr())
    return keys in _plain_tensors


def _is_plain(X) -> bool:
    """Say whether the operator would do nothing but compute: no gradient, tangent, compiler,
    tracer, transform, mode or kind of tensor is there to see it. The way through torch's dispatcher
    takes longer than a small matrix.
    """
    return (
        not torch.compiler.is_compiling()
        and _plain is not None
        and type(X) is torch.Tensor
        and not X.requires_grad
        and torch._C._dispatch_tls_local_include_set().raw_repr() == _plain
        and not torch._C._len_torch_function_stack()
        and getattr(forward_ad, "_current_level", 0) < 0
        and _is_plain_tensor(X)
    )


def orthogonalize(
    X: torch.Tensor,
    ns_coefficients: str | Sequence = "polar_express",
    ns_steps: int = 5,
    eps: float = 1e-7,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the approximate polar factor of every matrix of X, as a new tensor of X's shape and
    dtype.

    X (..., R, C) in fp32, bf16 or fp16, any strides; unchanged. ns_coefficients: the name of a set
    (by default that of arXiv 2505.16932), a triple (a, b, c) for each of ns_steps steps, or
    ns_steps triples; one step is X <- (a I + b A + c A^2) X with A = X X^T. With X = P S Q^T, the
    result is P p(S / ||X||) Q^T, p the composition of the steps' polynomials. eps counts in units
    of the largest element, so the result does not depend on the scale of X; "turbo" and "aol" do
    without it. `dtype` is that of the iteration: fp16 on an accelerator, fp32 on a CPU unless
    chosen. One operator under torch.compile, and capturable in a CUDA graph. There is no gradient:
    backward and forward mode raise NotImplementedError, reverse mode inside torch.func
    RuntimeError. ValueError names what is wrong with X or an option.
    """
    given = ns_coefficients, ns_steps, eps, dtype
    plain = _is_plain(X)
    # True is no 1 here
    usual = plain and (type(ns_coefficients), type(ns_steps), type(eps)) == (str, int, float)
    if usual and not _is_elsewhere(X) and (out := replay_known(X, given)) is not None:
        return out
    check(X, eps, dtype)
    _check_tangent(X)
    steps = coefficients.steps_of(ns_coefficients, ns_steps)
    if plain:
        return _compute(X, steps, eps, dtype, given if usual else None)
    return _orthogonalize(
        X, [number for triple in steps.triples for number in triple], steps.aol, eps, dtype
    )

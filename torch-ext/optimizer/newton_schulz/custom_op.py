"""`orthogonalize` as a torch operator: opaque to torch.compile and export, capturable in a CUDA
graph.

A plain eager call goes around torch's dispatcher, which takes longer than a small matrix
(`_is_plain`). The operator is used as soon as a compiler, a tracer, a mode, a transform or autograd
may look at the call.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NoReturn

import torch
from torch.autograd import forward_ad

from .._ops import add_op_namespace_prefix, ops
from . import coefficients
from .coefficients import Steps
from .orthogonalize import check, polar_factor, replay_known

SCHEMA = (
    "orthogonalize(Tensor X, float[] triples, bool aol, float eps, ScalarType? dtype) -> Tensor"
)


def _compute(
    X: torch.Tensor, steps: Steps, eps: float, dtype: torch.dtype | None, given: Hashable = None
) -> torch.Tensor:
    """Return `polar_factor`, computed on the GPU of X."""
    # Entering a device takes longer than comparing it with the current one
    if _is_elsewhere(X):
        with torch.cuda.device_of(X):
            return polar_factor(X, steps, eps, dtype, given)
    return polar_factor(X, steps, eps, dtype, given)


def _is_elsewhere(X: torch.Tensor) -> bool:
    """Whether X is on another GPU than the current one, on which Triton would launch."""
    return X.is_cuda and X.get_device() != torch.cuda.current_device()


def _operator(
    X: torch.Tensor, triples: list[float], aol: bool, eps: float, dtype: torch.dtype | None
) -> torch.Tensor:
    """Compute the operator. `triples`: a, b, c of all steps in a row, since a schema has no nested
    lists.
    """
    return _compute(X, Steps(tuple(zip(*[iter(triples)] * 3)), aol), eps, dtype)


def _fake(
    X: torch.Tensor, triples: list[float], aol: bool, eps: float, dtype: torch.dtype | None
) -> torch.Tensor:
    """Return a tensor like the operator's result, for fake tensors."""
    return X.new_empty(X.shape)


def _no_gradient(context: object, gradient: torch.Tensor) -> NoReturn:
    """Backward of the operator: raise NotImplementedError."""
    raise NotImplementedError(
        "orthogonalize has no gradient; call it on X.detach() or under torch.no_grad()"
    )


def _check_tangent(X: torch.Tensor) -> None:
    """Raise NotImplementedError if X carries a forward-mode tangent.

    The operator would silently drop the tangent, as if the derivative were zero. Not checked under
    torch.compile, since dynamo cannot trace the check.
    """
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(X).tangent is not None:
        raise NotImplementedError(
            "orthogonalize has no forward-mode derivative either (jvp, jacfwd, dual tensors); "
            "call it on the primal"
        )


def _define() -> torch.library.Library | None:
    """Define the operator; None if it exists, because this build was loaded from a second path.

    Uses the parts of torch.library, not `custom_op`, which imports torch's compiler (2 s) when
    called.
    """
    if hasattr(ops, "orthogonalize"):
        return None
    library = torch.library.Library(ops.name, "FRAGMENT")
    library.define(SCHEMA, tags=torch.Tag.pt2_compliant_tag)
    library.impl("orthogonalize", _operator, "CompositeExplicitAutograd")
    torch.library.register_fake(add_op_namespace_prefix("orthogonalize"), _fake, lib=library)
    torch.library.register_autograd(
        add_op_namespace_prefix("orthogonalize"), _no_gradient, lib=library
    )
    return library


# The operator lives as long as the library object
_library = _define()
_orthogonalize = ops.orthogonalize.default


# Private names of torch._C that tell whether anything listens to a call
DISPATCHER_NAMES = (
    "DispatchKey",
    "DispatchKeySet",
    "_dispatch_keys",
    "_dispatch_tls_local_include_set",
    "_len_torch_function_stack",
)


def _plain_thread() -> int | None:
    """Return the dispatch keys that a thread includes without any mode or transform, as a bit mask;
    None if this torch lacks a name of DISPATCHER_NAMES.
    """
    if not all(hasattr(torch._C, name) for name in DISPATCHER_NAMES):
        return None
    keys = torch._C.DispatchKey
    return torch._C.DispatchKeySet(keys.BackendSelect).add(keys.ADInplaceOrView).raw_repr()


_plain_thread_keys = _plain_thread()
# Dispatch keys of tensors that only the kernels of a device handle, a bit mask per device type
_plain_tensors: set[int] = set()


def _is_plain_tensor(X: torch.Tensor) -> bool:
    """Whether X has the dispatch keys of a fresh tensor on the same device: no subclass, lazy
    negation or functional wrapper.
    """
    keys = torch._C._dispatch_keys(X).raw_repr()
    if keys not in _plain_tensors:
        _plain_tensors.add(torch._C._dispatch_keys(torch.empty(0, device=X.device)).raw_repr())
    return keys in _plain_tensors


def _is_plain(X: torch.Tensor) -> bool:
    """Whether the operator would only compute: no gradient, tangent, compiler, tracer, transform,
    mode or tensor subclass is involved.
    """
    # The order counts: later lines use names that exist only if `_plain_thread_keys` is not None
    return (
        not torch.compiler.is_compiling()
        and _plain_thread_keys is not None
        and type(X) is torch.Tensor
        and not X.requires_grad
        and torch._C._dispatch_tls_local_include_set().raw_repr() == _plain_thread_keys
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

    X (..., R, C) in fp32, bf16 or fp16, any strides; unchanged.

    ns_coefficients: the name of a set (default: arXiv 2505.16932), a triple (a, b, c) for all
    ns_steps steps, or ns_steps triples. A step is X <- (a I + b A + c A^2) X with A = X X^T. For
    X = P S Q^T the result is P p(S / ||X||) Q^T, p the composition of the steps' polynomials.

    eps: added to ||X|| in units of the largest element, so the result does not depend on the scale
    of X. The sets "turbo" and "aol" scale rows instead and ignore eps.

    dtype: of the products; None for fp16 on an accelerator and fp32 on a CPU.

    A single operator under torch.compile, capturable in a CUDA graph, without a gradient: backward
    and forward mode raise NotImplementedError, reverse mode inside torch.func RuntimeError.
    ValueError states the error in X or an option.
    """
    # The options as passed, without any conversion: the key of a known call
    given = ns_coefficients, ns_steps, eps, dtype
    plain = _is_plain(X)
    # Exact types, since True == 1 as a key: a known call would skip the checks that refuse True
    usual = plain and (type(ns_coefficients), type(ns_steps), type(eps)) == (str, int, float)
    if usual and not _is_elsewhere(X) and (out := replay_known(X, given)) is not None:
        return out
    check(X, eps, dtype)
    _check_tangent(X)
    steps = coefficients.steps_of(ns_coefficients, ns_steps)
    if plain:
        return _compute(X, steps, eps, dtype, given if usual else None)
    # All coefficients in a row, see `_operator`
    return _orthogonalize(
        X, [number for triple in steps.triples for number in triple], steps.aol, eps, dtype
    )

"""The products in torch: the reference of kernels, and the path of CPUs."""

from __future__ import annotations

import torch

from ..backend import cpu_slices
from ..elementwise.row_scattered import ScatteredRows

ALIGNMENT_BYTES = 64


def product_torch(A, X, out, factor=1.0):
    """Compute `product` matrix by matrix: batched products of CPU libraries give bits that change
    with the batch.
    """
    if _is_like_new(out):
        return _add(_multiply(A, X, out), factor)
    for some in cpu_slices(out):
        out[some].copy_(_add(_multiply(A[some], X[some], _new(out, some)), _some(factor, some)))
    return out


def gram_torch(X, out, scales=None):
    """Compute `gram`; what a negative scale leaves alone is put back."""
    if scales is None:
        return symmetric_product_torch(X, X.mT, out)
    factors = scales.view(-1, 1, 1)
    for some in cpu_slices(out):
        known, factor = out[some].clone(), factors[some]
        symmetric_product_torch(X[some], X[some].mT, out[some], factor * factor)
        out[some].copy_(torch.where(factor < 0, known, out[some]))
    return out


def symmetric_product_torch(A, B, out, alpha=1.0, addends=(), diagonal=0.0):
    """Compute `symmetric_product` matrix by matrix, and what follows for as many as one thread
    takes at once.
    """
    if _is_like_new(out) and all(C.data_ptr() != out.data_ptr() for C, _ in addends):
        _add(_multiply(A, B, out), alpha, addends, diagonal)
        for some in cpu_slices(out):
            _mirror(out[some])
        return out
    for some in cpu_slices(out):
        result = _multiply(A[some], B[some], _new(out, some))
        beside = [(C[some], beta) for C, beta in addends]
        out[some].copy_(_mirror(_add(result, _some(alpha, some), beside, diagonal)))
    return out


def _mirror(result):
    """Make the lower triangles count on both sides, in place."""
    result.tril_()
    return result.add_(result.tril(-1).mT)


def _new(out, some):
    """Memory for products that are cast to some of out: each begins as new memory does."""
    N, n, m = out.shape
    apart = n * m + -(n * m) % (ALIGNMENT_BYTES // 4)
    memory = torch.empty(
        (min(some.stop, N) - some.start, apart), dtype=torch.float32, device=out.device
    )
    return memory.as_strided((len(memory), n, m), (apart, m, 1))


def _some(factor, some):
    """The factor of some matrices: of all the same, or a tensor."""
    return factor[some] if isinstance(factor, torch.Tensor) else factor


def _add(result, alpha, addends=(), diagonal=0.0):
    if isinstance(alpha, torch.Tensor) or alpha != 1.0:
        result.mul_(alpha)
    for C, beta in addends:
        result.add_(C, alpha=beta)
    if diagonal != 0.0:
        result.diagonal(dim1=1, dim2=2).add_(diagonal)
    return result


def _multiply(A, B, out):
    """Write products to out, which is like new; sums in fp32, also inside autocast."""
    if torch.is_autocast_enabled(out.device.type):  # entering it takes longer than a small product
        with torch.autocast(out.device.type, enabled=False):
            return _multiply(A, B, out)
    for a, b, o in zip(_operands(A), _operands(B), out.unbind()):
        torch.mm(a, b, out=o)
    return out


def _operands(stack):
    """Return the matrices in fp32. A CPU library may sum in another order where memory is aligned
    otherwise: each begins as new memory does.
    """
    if _is_aligned(stack):
        return stack.unbind()
    return (
        x.clone() if x.data_ptr() % ALIGNMENT_BYTES else x
        for x in map(torch.Tensor.float, stack.unbind())
    )


def _is_aligned(stack):
    return (
        stack.dtype == torch.float32
        and not (stack.data_ptr() | stack.stride(0) * 4) % ALIGNMENT_BYTES
    )


def _is_like_new(out):
    """Say whether every matrix lies as in new memory of fp32."""
    return (
        not isinstance(out, ScatteredRows)
        and _is_aligned(out)
        and out.stride()[1:] == (out.shape[2], 1)
    )

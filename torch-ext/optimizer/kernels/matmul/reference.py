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
        return _mirror(out)
    for some in cpu_slices(out):
        result = _multiply(A[some], B[some], _new(out, some))
        beside = [(C[some], beta) for C, beta in addends]
        out[some].copy_(_mirror(_add(result, _some(alpha, some), beside, diagonal)))
    return out


def takes_matrix_by_matrix(
    X: torch.Tensor, Y: torch.Tensor, A: torch.Tensor, Q: torch.Tensor
) -> bool:
    """Say whether `standard_torch` takes these stacks: every matrix lies as in new memory of
    fp32.
    """
    return all(map(_is_like_new, (X, Y, A, Q)))


def standard_torch(
    X: torch.Tensor,
    Y: torch.Tensor,
    A: torch.Tensor,
    Q: torch.Tensor,
    triples: list[tuple[float, float, float]],
) -> torch.Tensor:
    """Apply the standard iteration of `triples` (a, b, c) to every matrix of X (N, n, m); return
    the results.

    The results are X or Y (N, n, m); the other one is spoiled, and so are A and Q (n, n). A matrix
    takes all steps before the next matrix begins, so that it stays in the CPU's cache. A library
    product adds its addend itself: b A to c A^2, and a X to the product with X, as plain torch
    does. With a I inside the factor of X, spectra with a tail have up to 1.9 times the error
    (docs/kernels.md).
    """
    if torch.is_autocast_enabled(X.device.type):
        with torch.autocast(X.device.type, enabled=False):
            return standard_torch(X, Y, A, Q, triples)
    for x, y in zip(X.unbind(), Y.unbind()):
        for a, b, c in triples:
            torch.mm(x, x.mT, out=A)
            if c:
                torch.addmm(A, A, A, beta=b, alpha=c, out=Q)
            else:
                torch.mul(A, b, out=Q)
            torch.addmm(x, Q, x, beta=a, out=y)
            x, y = y, x
    return Y if len(triples) % 2 else X


def _mirror(result: torch.Tensor) -> torch.Tensor:
    """Copy the lower triangles of result (N, n, n) to the upper ones, in place.

    Square blocks cover a triangle: a block of half the side, beside it two of a quarter, and so on.
    All blocks of a size are copied at once, which takes no memory and less time than `tril` and a
    sum.
    """
    (N, n, _), (apart, down, across), first = result.shape, result.stride(), result.storage_offset()
    half = (1 << (n - 1).bit_length()) // 2
    while half:
        side, last = 2 * half, n // (2 * half) * 2 * half
        if last:
            shape, steps = (N, n // side, half, half), (apart, side * (down + across))
            right, left = first + half * across, first + half * down
            result.as_strided(shape, (*steps, down, across), right).copy_(
                result.as_strided(shape, (*steps, across, down), left)
            )
        if last + half < n:  # the last block has fewer columns
            here = slice(last, last + half)
            result[:, here, last + half :].copy_(result[:, last + half :, here].mT)
        half //= 2
    return result


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

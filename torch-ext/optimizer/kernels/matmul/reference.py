"""Products in torch: reference of the kernels, and implementation for devices without Triton.

Matrices are multiplied one by one (`torch.mm`), because batched products of CPU libraries have bits
that depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..backend import cpu_slices
from ..elementwise.row_scattered import ScatteredRows

# Alignment of memory that torch allocates on a CPU. A CPU library may choose its loops by
# alignment, and so sum in another order: every matrix gets this alignment (see `_operands`).
ALIGNMENT_BYTES = 64


def product_torch(
    A: torch.Tensor,
    X: torch.Tensor,
    out: torch.Tensor | ScatteredRows,
    factor: torch.Tensor | float = 1.0,
) -> torch.Tensor | ScatteredRows:
    """Compute `product` (api.py): write factor A X to `out`, and return `out`. factor: a number, or
    (N, 1, 1) in fp32.
    """
    if _is_like_new(out):
        return _add(_multiply(A, X, out), factor)
    for batch in cpu_slices(out):
        result = _multiply(A[batch], X[batch], _fp32_scratch(out, batch))
        out[batch].copy_(_add(result, _factor_of(factor, batch)))
    return out


def gram_torch(
    X: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `gram` (api.py). Matrices with a negative scale are restored from a copy."""
    if scales is None:
        return symmetric_product_torch(X, X.mT, out)
    factors = scales.view(-1, 1, 1)
    for batch in cpu_slices(out):
        before, factor = out[batch].clone(), factors[batch]
        symmetric_product_torch(X[batch], X[batch].mT, out[batch], factor * factor)
        out[batch].copy_(torch.where(factor < 0, before, out[batch]))
    return out


def symmetric_product_torch(
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor,
    alpha: torch.Tensor | float = 1.0,
    addends: Sequence[tuple[torch.Tensor, float]] = (),
    diagonal: float = 0.0,
) -> torch.Tensor:
    """Compute `symmetric_product` (api.py); alpha: a number, or (N, 1, 1) in fp32.

    If `out` can hold products in fp32, matrices are multiplied in place. Otherwise fp32 products of
    `cpu_slices`, as many matrices as a single thread computes, are cast into `out`.
    """
    if _is_like_new(out) and all(C.data_ptr() != out.data_ptr() for C, _ in addends):
        _add(_multiply(A, B, out), alpha, addends, diagonal)
        return _mirror(out)
    for batch in cpu_slices(out):
        result = _multiply(A[batch], B[batch], _fp32_scratch(out, batch))
        beside = [(C[batch], beta) for C, beta in addends]
        out[batch].copy_(_mirror(_add(result, _factor_of(alpha, batch), beside, diagonal)))
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

    The results are in X or Y (N, n, m); the other of the two, and A and Q (n, n), are overwritten.
    A matrix takes all steps before the next matrix begins, and so stays in the CPU's cache. A
    library product adds its addend itself: b A to c A^2, and a X to the product with X, as plain
    torch does. With a I inside the factor of X, spectra with a tail have up to 1.9 times the error
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


def _fp32_scratch(out: torch.Tensor | ScatteredRows, batch: slice) -> torch.Tensor:
    """Allocate fp32 products for the matrices `batch` of `out`; every matrix is aligned as new
    memory.
    """
    N, n, m = out.shape
    apart = n * m + -(n * m) % (ALIGNMENT_BYTES // 4)
    memory = torch.empty(
        (min(batch.stop, N) - batch.start, apart), dtype=torch.float32, device=out.device
    )
    return memory.as_strided((len(memory), n, m), (apart, m, 1))


def _factor_of(factor: torch.Tensor | float, batch: slice) -> torch.Tensor | float:
    """The factors of the matrices `batch`, if each matrix has a factor of its own."""
    return factor[batch] if isinstance(factor, torch.Tensor) else factor


def _add(
    result: torch.Tensor,
    alpha: torch.Tensor | float,
    addends: Sequence[tuple[torch.Tensor, float]] = (),
    diagonal: float = 0.0,
) -> torch.Tensor:
    """Compute alpha result + sum of beta C over addends (C, beta) + diagonal I, in place."""
    if isinstance(alpha, torch.Tensor) or alpha != 1.0:
        result.mul_(alpha)
    for C, beta in addends:
        result.add_(C, alpha=beta)
    if diagonal != 0.0:
        result.diagonal(dim1=1, dim2=2).add_(diagonal)
    return result


def _multiply(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write A B to `out`, for which `_is_like_new` is true. Sums in fp32, also inside autocast."""
    # Asked first, because entering an autocast context takes longer than a small product
    if torch.is_autocast_enabled(out.device.type):
        with torch.autocast(out.device.type, enabled=False):
            return _multiply(A, B, out)
    for a, b, o in zip(_operands(A), _operands(B), out.unbind()):
        torch.mm(a, b, out=o)
    return out


def _operands(stack: torch.Tensor) -> Iterable[torch.Tensor]:
    """Return the matrices in fp32, each aligned as new memory: copies where needed. A CPU library
    may sum in another order if memory is aligned in another way.
    """
    if _is_aligned(stack):
        return stack.unbind()
    return (
        x.clone() if x.data_ptr() % ALIGNMENT_BYTES else x
        for x in map(torch.Tensor.float, stack.unbind())
    )


def _is_aligned(stack: torch.Tensor) -> bool:
    """Whether every matrix is in fp32 and begins at a multiple of ALIGNMENT_BYTES."""
    return (
        stack.dtype == torch.float32
        and not (stack.data_ptr() | stack.stride(0) * 4) % ALIGNMENT_BYTES
    )


def _is_like_new(out: torch.Tensor | ScatteredRows) -> bool:
    """Whether every matrix of `out` is in fp32, contiguous, and aligned as new memory."""
    return (
        not isinstance(out, ScatteredRows)
        and _is_aligned(out)
        and out.stride()[1:] == (out.shape[2], 1)
    )

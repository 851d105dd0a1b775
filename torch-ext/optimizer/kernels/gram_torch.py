"""The products of gram.py in torch: what they are judged by, and the path of CPUs.

Decides: that the bits of a matrix depend on nothing but itself, whatever the CPU's library does. Must not know: what
the products are used for.
"""
from __future__ import annotations

import torch

from . import CPU_COPIES, cpu_slices, use_triton
from .split import Split

ALIGNMENT_BYTES = 64


def product_torch(A, X, out, factor=1.0):
    """Compute `product` matrix by matrix: batched products of CPU libraries give bits that change with the batch."""
    if _is_like_new(out):
        return _scale(_multiply(A, X, out), factor)
    for some in cpu_slices(out, CPU_COPIES):
        out[some].copy_(_scale(_multiply(A[some], X[some], _new(out, some)), _some(factor, some)))
    return out


def wants_room(out, room) -> bool:
    """Say whether products are written to `room` first, and copied: on a CPU they would be written to new memory."""
    return (isinstance(out, torch.Tensor) and not use_triton(out.device) and room.dtype == torch.float32
            and not _is_like_new(out))


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
    """Compute `symmetric_product` matrix by matrix, with the first addend inside the product, the rest for all."""
    if _is_like_new(out) and all(C.data_ptr() != out.data_ptr() for C, _ in addends[1:]):
        return _finish(_multiply(A, B, out, alpha, addends[:1]), addends[1:], diagonal)
    for some in cpu_slices(out):
        beside = [(C[some], beta) for C, beta in addends]
        result = _multiply(A[some], B[some], _new(out, some), _some(alpha, some), beside[:1])
        out[some].copy_(_finish(result, beside[1:], diagonal))
    return out


def takes_one_by_one(X, Y, A, Q, triples) -> bool:
    """Say whether `polynomials_torch` computes the standard iteration of these stacks with `triples`."""
    return all(c != 0.0 for _, _, c in triples) and all(map(_is_like_new, (X, Y, A, Q)))


def polynomials_torch(X, Y, A, Q, triples):
    """Take the steps of `triples` on every matrix of X (N, n, m), all but the last product: Q (N, n, n) is the last
    polynomial of X X^T, and X and Y (N, n, m) have changed places after every other step. A (N, n, n) is spoiled.

    One matrix after another, so that it stays in the CPU's cache for all steps. A and Q are not mirrored: in the
    standard iteration, where they multiply nothing but X and themselves, that changes no error.
    """
    if torch.is_autocast_enabled(X.device.type):
        with torch.autocast(X.device.type, enabled=False):
            return polynomials_torch(X, Y, A, Q, triples)
    for x, y, gram, polynomial in zip(X.unbind(), Y.unbind(), A.unbind(), Q.unbind()):
        diagonal = polynomial.diagonal()
        for step, (a, b, c) in enumerate(triples):
            if step:
                torch.mm(polynomial, x, out=y)
                x, y = y, x
            torch.mm(x, x.mT, out=gram)
            torch.addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
            diagonal.add_(a)


def _finish(result, addends, diagonal):
    """Add addends and the diagonal to products, and mirror them, in place."""
    for C, beta in addends:
        result.add_(C, alpha=beta)
    if diagonal != 0.0:
        result.diagonal(dim1=1, dim2=2).add_(diagonal)
    return _mirror(result)


def _mirror(result):
    """Copy the lower triangles of result (N, n, n) to the upper ones, in place.

    Square blocks cover a triangle: one of half the side, beside it two of a quarter, and so on. All blocks of one size
    are copied at once, which takes no memory, and a third of the time of `tril` and a sum.
    """
    (N, n, _), (apart, down, across), first = result.shape, result.stride(), result.storage_offset()
    half = (1 << (n - 1).bit_length()) // 2
    while half:
        side, last = 2 * half, n // (2 * half) * 2 * half
        if last:
            shape, steps = (N, n // side, half, half), (apart, side * (down + across))
            right, left = first + half * across, first + half * down
            result.as_strided(shape, (*steps, down, across), right).copy_(
                result.as_strided(shape, (*steps, across, down), left))
        if last + half < n:  # the last block has fewer columns
            here = slice(last, last + half)
            result[:, here, last + half:].copy_(result[:, last + half:, here].mT)
        half //= 2
    return result


def _new(out, some):
    """Memory for products that are cast to some of out: each begins as new memory does."""
    N, n, m = out.shape
    apart = n * m + -(n * m) % (ALIGNMENT_BYTES // 4)
    memory = torch.empty((min(some.stop, N) - some.start, apart), dtype=torch.float32, device=out.device)
    return memory.as_strided((len(memory), n, m), (apart, m, 1))


def _some(factor, some):
    """The factor of some matrices: of all the same, or a tensor."""
    return factor[some] if isinstance(factor, torch.Tensor) else factor


def _scale(result, factor):
    """Multiply result by a number, or by a tensor with one for each matrix, in place."""
    return result.mul_(factor) if isinstance(factor, torch.Tensor) or factor != 1.0 else result


def _multiply(A, B, out, alpha=1.0, addend=()):
    """Write alpha A B + beta C to out, which is like new and may be C; sums in fp32, also inside autocast.

    addend: [(C, beta)], or nothing. Both are part of the library's own product: passes over the result take as long as
    a small product.
    """
    if torch.is_autocast_enabled(out.device.type):  # entering it takes longer than a small product
        with torch.autocast(out.device.type, enabled=False):
            return _multiply(A, B, out, alpha, addend)
    if isinstance(alpha, torch.Tensor):
        return _scale(_multiply(A, B, out), alpha)
    As, Bs, outs = _operands(A), _operands(B), out.unbind()
    if addend:
        (C, beta), = addend
        for a, b, c, o in zip(As, Bs, map(torch.Tensor.float, C.unbind()), outs):
            torch.addmm(c, a, b, beta=beta, alpha=alpha, out=o)
    elif alpha != 1.0:
        for a, b, o in zip(As, Bs, outs):
            torch.addmm(o, a, b, beta=0.0, alpha=alpha, out=o)
    else:
        for a, b, o in zip(As, Bs, outs):
            torch.mm(a, b, out=o)
    return out


def _operands(stack):
    """Return the matrices in fp32. A CPU library may sum in another order where memory is aligned otherwise: each
    begins as new memory does.
    """
    if _is_aligned(stack):
        return stack.unbind()
    return (x.clone() if x.data_ptr() % ALIGNMENT_BYTES else x for x in map(torch.Tensor.float, stack.unbind()))


def _is_aligned(stack):
    return stack.dtype == torch.float32 and not (stack.data_ptr() | stack.stride(0) * 4) % ALIGNMENT_BYTES


def _is_like_new(out):
    """Say whether every matrix lies as in new memory of fp32."""
    return not isinstance(out, Split) and _is_aligned(out) and out.stride()[1:] == (out.shape[2], 1)

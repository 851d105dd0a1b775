"""A restart interval of the Gram iteration in shared memory, a matrix per CTA, on sm90: short sides
of 193 to 256, 48 matrices or more.

`follow` launches the kernel of sm90_gram_chain.py with a program: the list of symmetric products of
the interval, see [Note: program of products]. With fewer matrices, products that spread a matrix
over the GPU are faster.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ..backend import has_pdl
from ..launch import jit
from ..launch.jit import descriptor_template, launch_key, with_tensor
from ..launch.replay import knows_triton, persistent_copy, unit_scales
from ..launch.tile_config import architecture
from ..matmul.sm90_tma import is_addressable
from .sm90_gram_chain import gram_chain_kernel

SIDE = 128  # Rows of a square, of which a Gram matrix has three on and below the diagonal
STEP = 64  # Columns of X that are multiplied at a time
SIDES = range(193, 257)  # Short sides; two matrices of 256 x 256, as three squares each, fit
# Fewer matrices leave multiprocessors idle and take longer than launches of products: on an H200
# 40 x 256 x 768 takes 5 % longer in this kernel, 48 x 256 x 2048 1 % less, 48 x 256 x 256 7 % less
# (benchmarks/results/stacks.csv, "processors").
FROM = 48
# [Note: program of products] The kernel runs a list of products, each a code (`_code`) and five
# factors. Shared memory has room for two matrices, U and V; U begins as A. Two more matrices are
# stored in two slots in global memory, and one may be saved to the memory of the result Z.
# The place of an addend:
U = 0
V = 1
SLOT = 2  # A slot
# Where a result is stored besides U or V; the final result goes to Z
STORE_NONE, STORE_FIRST_SLOT, STORE_SECOND_SLOT, SAVE_TO_Z, STORE_RESULT = range(5)
# Flags, see `_code`
MIRROR = 1 << 11
RESTORE_FROM_Z = 1 << 12
DIAGONAL = 1 << 13
WAIT_STORES = 1 << 14

# A restart interval: triples (a, b, c) of steps; Pair: the two last steps as one polynomial
# (newton_schulz/coefficients.py)
Interval = Sequence[tuple[float, float, float]]
Pair = Sequence[Sequence[float]]


def supports_interval(interval: Interval, pair: Pair | None) -> bool:
    """Whether `follow` computes this restart interval, in 4 (len(interval) - 1) products: a pair of
    steps, after at most one other step, whose polynomial has a term c A^2.
    """
    return pair is not None and len(interval) <= 3 and bool(interval[0][2])


def supports(A: torch.Tensor, Q: torch.Tensor, interval: Interval, pair: Pair | None) -> bool:
    """Whether `follow` computes this restart interval for Gram matrices like A (N, n, n); Q and the
    other matrices are laid out like A.
    """
    if not (supports_interval(interval, pair) and A.shape[1] in SIDES and len(A) >= FROM):
        return False
    on_sm90 = A.dtype == torch.float16 and architecture(A.device.type, A.device.index) == "sm90"
    return on_sm90 and A.stride(0) >= 3 * SIDE * SIDE and is_addressable(A, Q) and knows_triton()


def follow(
    interval: Interval,
    pair: Pair,
    A: torch.Tensor,
    Q: torch.Tensor,
    Z: torch.Tensor,
    T: torch.Tensor,
    long: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the polynomial of a restart interval, with the bits of `follow` in iteration.py.

    Return the result, one of Q, Z and T, and the two others, which are overwritten. All (N, n, n),
    laid out alike; A is only read.

    long: (X (N, n, m), scales or None), to compute A = scale^2 X X^T as `gram` in the same kernel.
    Then A is not written, and read only for matrices with a negative scale. X is addressable by TMA
    and in 16 bits. An X in another dtype than A must have been complete before the previous launch
    began, because the kernel reads X before the previous kernel is done.
    """
    X, scales = long or (None, None)
    key = launch_key(A, Z, T, Q, *([] if X is None else [X]))
    known = _known.get(key)
    if known is None:
        known = _known[key] = _Launch(A, Z, X)
    scales = unit_scales(len(A), A.device) if scales is None else scales
    program = _program_on(tuple(interval[:-2]), pair, A.device)
    known((A if X is None else X, A, Z, T, Q), scales, program)
    return Z, Q, T


_known: dict[tuple, _Launch] = {}  # Shapes, strides and dtypes -> launch


class _Launch:
    """A launch for matrices of certain shapes, strides and dtypes: everything but addresses and
    program.
    """

    def __init__(self, A: torch.Tensor, Z: torch.Tensor, X: torch.Tensor | None):
        """X: the matrices to multiply first, or None to load A."""
        # The slots: per matrix three squares, one below the other, in the memory of T and of Q
        slots = A.as_strided((len(A), 3 * SIDE, SIDE), (A.stride(0), SIDE, 1))
        boxes = [
            (A, SIDE),
            (Z, SIDE),
            (slots, SIDE),
            (slots, SIDE),
            (slots, SIDE // 2),
            (slots, SIDE // 2),
        ]
        # Descriptors without addresses: x, a, z, one_box, other_box, one_half, other_half
        self.blanks = [
            descriptor_template(jit.make_descriptor(A if X is None else X, 2 * SIDE, STEP)),
            *(descriptor_template(jit.make_descriptor(t, rows, SIDE)) for t, rows in boxes),
        ]
        self.pdl = has_pdl(A.device)
        self.apart = A.stride(0)  # Elements from one matrix to the next
        self.steps = 0 if X is None else -(-X.shape[2] // STEP)  # Boxes of X; 0 to load A
        self.early = X is not None and X.dtype != A.dtype  # X is complete before the last launch

    def __call__(
        self, matrices: Sequence[torch.Tensor], scales: torch.Tensor, program: tuple
    ) -> None:
        """Launch a CTA per matrix. matrices: (X or A, A, Z, first slot, second slot)."""
        X, A, Z, one, other = matrices
        codes, factors, products, keep = program
        gram_chain_kernel.launch(
            len(A),
            self,
            *map(with_tensor, self.blanks, (X, A, Z, one, other, one, other)),
            one,
            other,
            self.apart,
            scales,
            self.steps,
            codes,
            factors,
            products,
            keep,
            self.early,
            num_warps=4,
            enable_fp_fusion=False,
            launch_pdl=self.pdl,
        )


@functools.lru_cache(maxsize=256)
def _program_on(
    first: tuple, pair: Pair, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """`_program` with codes and factors on `device`, held for as long as the process lives."""
    codes, factors, products, keep = _program(first, pair)
    return persistent_copy(codes, device), persistent_copy(factors, device), products, keep


def _program(first: tuple, pair: Pair) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return the program of a restart interval: codes (int32) and factors (fp32, five each) of the
    products, the number of products, and whether A goes to the first slot before the products.

    first: () or a single triple, the step before the pair. Products, addends, rounding and order,
    hence the bits, are as in iteration.py. Factors: alpha, diagonal, and a factor per addend.
    """
    (square, a), (cube, ca, cs), (half, ha, hs, hc, h), (qs, qc, q) = pair
    # The pair, `two_steps` in iteration.py: S, C, H and Q of coefficients.Pair. A is in U, S goes
    # to V; C replaces A in U, and H replaces C.
    last, flags = (STORE_NONE, RESTORE_FROM_Z | DIAGONAL) if first else (STORE_RESULT, DIAGONAL)
    products = [
        (_code(U, U, V, [U]), square, 0.0, a),
        (_code(U, V, U, [U, V], STORE_SECOND_SLOT, MIRROR | WAIT_STORES), cube, 0.0, ca, cs),
        (_code(U, U, U, [SLOT, V, U], STORE_NONE, DIAGONAL | WAIT_STORES), half, h, ha, hs, hc),
        (_code(U, U, V, [V, SLOT], last, flags), 1.0, q, qs, qc),
    ]
    # The step before. Z goes to V, and is saved to memory until the pair is done. A Z replaces A in
    # U, and Z A Z replaces A Z. The last product multiplies the pair's polynomial in V by Z + a I.
    if first:
        ((a, b, c),) = first
        products = [
            (_code(U, U, V, [U], SAVE_TO_Z), c, 0.0, b),
            (_code(U, V, U, [U], STORE_NONE, MIRROR), 1.0, 0.0, a),
            (_code(V, U, U, [U], STORE_FIRST_SLOT, MIRROR), 1.0, 0.0, a),
            *products,
            (_code(U, V, V, [V], STORE_RESULT, MIRROR), 1.0, 0.0, a),
        ]
    codes = torch.tensor([code for code, *_ in products], dtype=torch.int32, device="cpu")
    rows = [[*factors, 0.0, 0.0][:5] for _, *factors in products]
    factors = torch.tensor(rows, dtype=torch.float32, device="cpu")
    return codes, factors, len(products), int(not first)


def _code(
    left: int, right: int, to: int, addends: Sequence[int], then: int = STORE_NONE, flags: int = 0
) -> int:
    """Encode a product as an integer.

    left, right: the factors, U or V. to: where the result goes, U or V. addends: the first is in U,
    V or the first slot (SLOT), the second in V or the second slot (SLOT), the third in U. then:
    where the result is stored besides. Flags:

    MIRROR: make the squares on the diagonal symmetric. Not needed for the square of a matrix, which
    is symmetric in every bit.

    DIAGONAL: add a multiple of I.

    RESTORE_FROM_Z: load the matrix saved to Z into U after the product.

    WAIT_STORES: wait until earlier TMA stores to slots and Z are visible in global memory.
    """
    first, second, third = (*addends, None, None)[:3]
    assert first is not None and second in (None, V, SLOT) and third in (None, U)
    return (
        left
        | right << 1
        | to << 2
        | first << 3
        | (second or 0) << 5
        | (third is not None) << 7
        | then << 8
        | flags
    )

"""Gram matrices of 193 to 256 rows that stay in the shared memory of one multiprocessor for a
restart interval. sm90.
"""

from __future__ import annotations

import functools

import torch

from ..backend import has_pdl
from ..launch import jit
from ..launch.jit import descriptor_template, launch_key, with_tensor
from ..launch.replay import knows_triton, persistent_copy, unit_scales
from ..launch.tile_config import architecture
from ..matmul.sm90_tma import addressable
from .sm90_gram_chain import resident_kernel

SIDE, STEP = 128, 64  # of a square, and of the long side of what is multiplied at a time
SIDES = range(193, 257)  # of matrices whose three squares fit the memory of one
# Fewer matrices leave processors idle and take longer than launches: on an H200 40 x 256 x 768
# takes 5 % longer by one processor each, 48 x 256 x 2048 1 % less, 48 x 256 x 256 7 % less
# (benchmarks/results/stacks.csv, "processors").
FROM = 48
U, V, KEPT = 0, 1, 2  # where an addend lies: in a matrix in shared memory, or in what was kept
NOTHING, KEEP_ONE, KEEP_OTHER, LEND, END = range(5)  # what becomes of a result beside
MIRROR, BORROW, DIAGONAL, SETTLE = 1 << 11, 1 << 12, 1 << 13, 1 << 14  # see `_code`


def takes(segment, pair) -> bool:
    """Say whether `follow` knows these steps, in 4 (len(segment) - 1) products."""
    return pair is not None and len(segment) <= 3 and bool(segment[0][2])


def fits(A: torch.Tensor, Q: torch.Tensor, segment, pair) -> bool:
    """Say whether these steps on Gram matrices A (N, n, n) go through `follow`; Q and others lie
    alike.
    """
    if not (takes(segment, pair) and A.shape[1] in SIDES and len(A) >= FROM):
        return False
    on_sm90 = A.dtype == torch.float16 and architecture(A.device.type, A.device.index) == "sm90"
    return on_sm90 and A.stride(0) >= 3 * SIDE * SIDE and addressable(A, Q) and knows_triton()


def follow(
    segment, pair, A: torch.Tensor, Q: torch.Tensor, Z: torch.Tensor, T: torch.Tensor, long=None
) -> tuple:
    """Do what iteration.py's `follow` does, to the last bit. Return the result, one of Q, Z and T,
    and the other two; all (N, n, n), alike, of which only A is read.

    `long`, X (N, n, m) and its scales or None: do `gram(X, A, scales)` before that, but write
    nothing to A, of which then is read what the scales leave out. X is addressable and in 16 bits;
    in another dtype than A it was there before the last launch began.
    """
    X, scales = long or (None, None)
    key = launch_key(A, Z, T, Q, *([] if X is None else [X]))
    known = _known.get(key)
    if known is None:
        known = _known[key] = _Launch(A, Z, X)
    scales = unit_scales(len(A), A.device) if scales is None else scales
    known((A if X is None else X, A, Z, T, Q), scales, _placed(tuple(segment[:-2]), pair, A.device))
    return Z, Q, T


_known: dict = {}  # what decides about a launch -> _Launch


class _Launch:
    """A launch for matrices of certain shapes and strides: everything but their addresses and what
    is computed.
    """

    def __init__(self, A, Z, X):
        kept = A.as_strided((len(A), 3 * SIDE, SIDE), (A.stride(0), SIDE, 1))
        boxes = [
            (A, SIDE),
            (Z, SIDE),
            (kept, SIDE),
            (kept, SIDE),
            (kept, SIDE // 2),
            (kept, SIDE // 2),
        ]
        self.blanks = [
            descriptor_template(jit.make_descriptor(A if X is None else X, 2 * SIDE, STEP)),
            *(descriptor_template(jit.make_descriptor(t, rows, SIDE)) for t, rows in boxes),
        ]
        self.pdl, self.apart, self.steps = (
            has_pdl(A.device),
            A.stride(0),
            0 if X is None else -(-X.shape[2] // STEP),
        )
        self.early = X is not None and X.dtype != A.dtype

    def __call__(self, matrices, scales, program) -> None:
        (X, A, Z, one, other), (codes, factors, products, keep) = matrices, program
        resident_kernel.launch(
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
def _placed(first, pair, device) -> tuple:
    """`_program` with its codes and factors on a device, where they stay as long as the process
    lives.
    """
    codes, factors, products, keep = _program(first, pair)
    return persistent_copy(codes, device), persistent_copy(factors, device), products, keep


def _program(first, pair) -> tuple:
    """(Codes of the products, their factors, how many there are, whether A is kept): all that
    follows A with the steps `first`, one or none, and a pair. Products, addends and rounding are
    those of iteration.py, in its order.
    """
    (square, a), (cube, ca, cs), (half, ha, hs, hc, h), (qs, qc, q) = pair
    products = [  # A is in U, S goes to V; C takes A's place, and H that of C
        (_code(U, U, V, [U]), square, 0.0, a),
        (_code(U, V, U, [U, V], KEEP_OTHER, MIRROR | SETTLE), cube, 0.0, ca, cs),
        (_code(U, U, U, [KEPT, V, U], NOTHING, DIAGONAL | SETTLE), half, h, ha, hs, hc),
        (
            _code(
                U, U, V, [V, KEPT], *((NOTHING, BORROW | DIAGONAL) if first else (END, DIAGONAL))
            ),
            1.0,
            q,
            qs,
            qc,
        ),
    ]
    # Z goes to V and is lent until the pair is done; A Z takes A's place, and Z A Z its own
    if first:
        ((a, b, c),) = first
        products = [
            (_code(U, U, V, [U], LEND), c, 0.0, b),
            (_code(U, V, U, [U], NOTHING, MIRROR), 1.0, 0.0, a),
            (_code(V, U, U, [U], KEEP_ONE, MIRROR), 1.0, 0.0, a),
            *products,
            (_code(U, V, V, [V], END, MIRROR), 1.0, 0.0, a),
        ]
    codes = torch.tensor([code for code, *_ in products], dtype=torch.int32, device="cpu")
    factors = torch.tensor([[*factors, 0.0, 0.0][:5] for _, *factors in products], device="cpu")
    return codes, factors, len(products), int(not first)


def _code(left, right, to, addends, then=NOTHING, flags=0) -> int:
    """A product as a number: the matrices that are multiplied, where the result goes, its addends
    (the first is in U, V or kept as the one, the second in V or kept as the other, the third in U),
    and what becomes of it beside. MIRROR: squares on the diagonal are made symmetric, as those of A
    A are. DIAGONAL: a multiple of I is added. BORROW: what was lent comes to U afterwards. SETTLE:
    what was kept or lent before is in memory afterwards.
    """
    first, second, third = (*addends, None, None)[:3]
    assert first is not None and second in (None, V, KEPT) and third in (None, U)
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

"""Gram matrices of 193 to 256 rows and what follows them, a matrix on one processor, or on two: from its first product
to its last two matrices stay in shared memory, where a launch for each product would read and write all of them. For
sm90.

Decides: which products are taken so, one after another, and where their operands lie. Must not know: what the numbers
mean; iteration.py and pairs.py do. resident_sm90.py computes them, and cluster_sm90.py where there are processors
enough, which multiplies X, too.
"""
from __future__ import annotations

import functools

import torch

from . import has_pdl, look, processors_of, ring
from .cluster_sm90 import cluster_kernel
from .gram_sm90 import addressable
from .resident_sm90 import resident_kernel
from .ring import blank, filled
from .tape import knows_triton, lasting, ones
from .tiles import architecture

SIDE, STEP = 128, 64  # of a square, and of the long side of what is multiplied at a time
SIDES = range(193, 257)  # of matrices whose three squares fit the memory of one
FROM = 36  # matrices: fewer do not fill the GPU, and take longer than launches (docs/log.md)
U, V, KEPT = 0, 1, 2  # where an addend lies: in a matrix in shared memory, or in what was kept
NOTHING, KEEP_ONE, KEEP_OTHER, LEND, END = range(5)  # what becomes of a result beside
MIRROR, BORROW, DIAGONAL, SETTLE = 1 << 11, 1 << 12, 1 << 13, 1 << 14  # see `_code`


def takes(segment, pair) -> bool:
    """Say whether `follow` knows these steps, in 4 (len(segment) - 1) products."""
    return pair is not None and len(segment) <= 3 and bool(segment[0][2])


def fits(A: torch.Tensor, Q: torch.Tensor, segment, pair) -> bool:
    """Say whether these steps on Gram matrices A (N, n, n) go through `follow`; Q and others lie alike."""
    if not (takes(segment, pair) and A.shape[1] in SIDES and len(A) >= FROM):
        return False
    on_sm90 = A.dtype == torch.float16 and architecture(A.device.type, A.device.index) == "sm90"
    return on_sm90 and A.stride(0) >= 3 * SIDE * SIDE and addressable(A, Q) and knows_triton()


def shared(A: torch.Tensor) -> bool:
    """Say whether each of these matrices has two processors."""
    return 2 * len(A) <= processors_of(A.device)


def applies(A: torch.Tensor, Y) -> bool:
    """Say whether `follow` multiplies X (N, n, m) by what it makes of Gram matrices A, too, for Y like this."""
    return shared(A) and isinstance(Y, torch.Tensor) and Y.element_size() == 2 and addressable(Y)


def follow(steps, A: torch.Tensor, Q: torch.Tensor, Z: torch.Tensor, T: torch.Tensor, long=None, onward=()) -> tuple:
    """Do what iteration.py's `_follow` does for a segment and its pair, `steps[0]`, to the last bit. Return the result,
    one of Q, Z and T, and the other two; all (N, n, n), alike, of which only A is read.

    `long`, X (N, n, m) and its scales or None: do `gram(X, A, scales)` before that, but write nothing to A, of which
    then is read what the scales leave out. X is addressable and in 16 bits; in another dtype than A it was there before
    the last launch began. `onward`, [(Y, scales, powers or None)]: do `product(result, X, Y, scales, powers)` after it,
    but write no result; and all that with Y in place of X for `steps[1]`, if there are two.
    """
    (X, scales), ways = long or (None, None), [Y for Y, *_ in onward]
    key = look(A, Z, T, Q, *([] if X is None else [X]), *ways), len(ways)
    known = _known.get(key)
    if known is None:
        known = _known[key] = (_Shared if shared(A) else _Launch)(A, Z, X, ways)
    one = ones(len(A), A.device)
    factors = [one if factor is None else factor for factor in (scales, *(onward[0][1:] if onward else (None, None)))]
    known((A if X is None else X, A, Z, T, Q), ways, factors, _programs(tuple(steps), A.device))
    return Z, Q, T


_known: dict = {}  # what decides about a launch -> _Launch or _Shared


class _Launch:
    """A launch for matrices of certain shapes and strides: everything but their addresses and what is computed."""

    def __init__(self, A, Z, X, ways):
        kept = A.as_strided((len(A), 3 * SIDE, SIDE), (A.stride(0), SIDE, 1))
        boxes = [(A, SIDE), (Z, SIDE), (kept, SIDE), (kept, SIDE), (kept, SIDE // 2), (kept, SIDE // 2)]
        self.blanks = [blank(ring.description(A if X is None else X, 2 * SIDE, STEP)),
                       *(blank(ring.description(t, rows, SIDE)) for t, rows in boxes)]
        self.pdl, self.apart, self.steps = has_pdl(A.device), A.stride(0), 0 if X is None else -(-X.shape[2] // STEP)
        self.early = X is not None and X.dtype != A.dtype

    def __call__(self, matrices, ways, factors, programs) -> None:
        (X, A, Z, one, other), (codes, numbers, products, _, keep) = matrices, programs
        resident_kernel.launch(
            len(A), self, *map(filled, self.blanks, (X, A, Z, one, other, one, other)), one, other, self.apart,
            factors[0], self.steps, codes, numbers, products, keep, self.early, num_warps=4, enable_fp_fusion=False,
            launch_pdl=self.pdl)


class _Shared:
    """The same for two processors a matrix, which multiply X by the result and write that, if there is a way."""

    def __init__(self, A, Z, X, ways):
        long, boxes = (2 * SIDE, STEP), ((SIDE, SIDE), (SIDE // 2, SIDE), (SIDE, SIDE // 2))
        X = A if X is None else X
        forms = [(X, long), (A, boxes[0]), *(None if ways else (Z, box) for box in boxes),
                 *([None] * (2 - len(ways))), *((Y, long) for Y in ways)]
        self.blanks = [form and blank(ring.description(form[0], *form[1])) for form in forms]
        self.pdl, self.steps = has_pdl(A.device), 0 if X is A else -(-X.shape[2] // STEP)
        self.early = X.dtype != A.dtype

    def __call__(self, matrices, ways, factors, programs) -> None:
        (X, A, Z, *_), (*numbers, _) = matrices, programs
        tensors = (X, A, Z, Z, Z, *([None] * (2 - len(ways))), *ways)
        boxes = (form and filled(form, tensor) for form, tensor in zip(self.blanks, tensors))
        cluster_kernel.launch(
            len(A), self, *boxes, *factors, self.steps, *numbers, self.early, cluster=2, num_warps=4,
            enable_fp_fusion=False, launch_pdl=self.pdl)


@functools.lru_cache(maxsize=256)
def _programs(steps, device) -> tuple:
    """(Codes, factors, products of the first program, those of the second, whether A is kept) for one or two of steps,
    (segment, pair) each.
    """
    made = [_program(tuple(segment[:-2]), pair) for segment, pair in steps]
    codes, factors = (torch.cat(lists) for lists in list(zip(*made))[:2])
    (_, _, products, keep), more = made[0], sum(count for _, _, count, _ in made[1:])
    return lasting(codes, device), lasting(factors, device), products, more, keep


def _program(first, pair) -> tuple:
    """(Codes of the products, their factors, how many there are, whether A is kept): all that follows A with the steps
    `first`, one or none, and a pair. Products, addends and rounding are those of iteration.py, in its order.
    """
    (square, a), (cube, ca, cs), (half, ha, hs, hc, h), (qs, qc, q) = pair
    products = [  # A is in U, S goes to V; C takes A's place, and H that of C
        (_code(U, U, V, [U]), square, 0.0, a),
        (_code(U, V, U, [U, V], KEEP_OTHER, MIRROR | SETTLE), cube, 0.0, ca, cs),
        (_code(U, U, U, [KEPT, V, U], NOTHING, DIAGONAL | SETTLE), half, h, ha, hs, hc),
        (_code(U, U, V, [V, KEPT], *((NOTHING, BORROW | DIAGONAL) if first else (END, DIAGONAL))), 1.0, q, qs, qc)]
    if first:  # Z goes to V and is lent until the pair is done; A Z takes A's place, and Z A Z its own
        (a, b, c), = first
        products = [(_code(U, U, V, [U], LEND), c, 0.0, b),
                    (_code(U, V, U, [U], NOTHING, MIRROR), 1.0, 0.0, a),
                    (_code(V, U, U, [U], KEEP_ONE, MIRROR), 1.0, 0.0, a),
                    *products,
                    (_code(U, V, V, [V], END, MIRROR), 1.0, 0.0, a)]
    codes = torch.tensor([code for code, *_ in products], dtype=torch.int32, device="cpu")
    factors = torch.tensor([[*factors, 0.0, 0.0][:5] for _, *factors in products], device="cpu")
    return codes, factors, len(products), int(not first)


def _code(left, right, to, addends, then=NOTHING, flags=0) -> int:
    """A product as a number: the matrices that are multiplied, where the result goes, its addends (the first is in U, V
    or kept as the one, the second in V or kept as the other, the third in U), and what becomes of it beside. MIRROR:
    squares on the diagonal are made symmetric, as those of A A are. DIAGONAL: a multiple of I is added. BORROW: what
    was lent comes to U afterwards. SETTLE: what was kept or lent before is in memory afterwards; cluster_sm90.py, which
    keeps one matrix, and in registers, keeps what was in U, which is the same.
    """
    first, second, third = (*addends, None, None)[:3]
    assert first is not None and second in (None, V, KEPT) and third in (None, U)
    return (left | right << 1 | to << 2 | first << 3 | (second or 0) << 5 | (third is not None) << 7 | then << 8
            | flags)

"""The products of a segment of the Gram iteration, X X^T first, in one launch on sm90. A launch for each begins when
the last tile of the one before is done, and in its last turn leaves processors idle.

Decides: which products are taken so. Must not know: what the numbers mean. products_sm90.py computes them.
"""
from __future__ import annotations

import torch

from . import gram_sm90, has_pdl, jit, look, processors_of, ring
from .gram import ended
from .order import turns
from .products_sm90 import products_kernel
from .ring import blank, filled
from .tape import knows_triton, lasting, ones
from .tiles import Tile, architecture, choose, forced

tl = None  # Triton's language, put here by jit
TILE = Tile(128, 128, 64, 8, 5, 4, "pingpong")  # the bits are those of any
SIDES = range(1024, 7169)  # of one matrix from LARGE on; the products take two turns at least (docs/log.md)
LARGE = 4097
GRAM = [-1, -1, 0, 0, 0, 0, 0, 0], [1.0] + 7 * [0.0]  # X X^T, as _numbers has it
BLOCK = 1024  # numbers that a program clears


def takes(A: torch.Tensor) -> bool:
    """Say whether `take`, which wants all processors at once, gains with products of matrices like A (N, n, n)."""
    N, n, _ = A.shape
    if n not in SIDES or N == 1 and n < LARGE or A.element_size() != 2 or forced() is not None:
        return False
    if architecture(A.device.type, A.device.index) != "sm90" or not (knows_triton() and gram_sm90.addressable(A)):
        return False
    down = -(-n // TILE.rows)  # whose tiles are a tenth more than the matrix at most
    wide = choose("symmetric", A.dtype, n, n, A.device, N).loop == "cooperative"  # such tiles need no fours of rows
    if 10 * (down * TILE.rows) ** 2 > 11 * n * n or wide and down % 4:
        return False
    return N * (down * (down + 1) // 2) >= 2 * processors_of(A.device)


def takes_gram(X: torch.Tensor, A: torch.Tensor) -> bool:
    """Say whether X X^T, for X (N, n, m), gains by being the first of these products."""
    N, n, m = X.shape
    if X.dtype != A.dtype or not gram_sm90.addressable(X):
        return False
    return choose("gram", X.dtype, n, m, X.device, N).loop != "cooperative"  # which would be the faster one


def take(products, A: torch.Tensor, spare: torch.Tensor, X=None, scales=None) -> None:
    """Do `symmetric_product` for each of products, tuples of (left factor, right factor, result, alpha, addends,
    diagonal), to the last bit. Matrices are named by numbers: A (N, n, n) is 0, and as many lie behind it as are named,
    alike. With X (N, n, m), `gram` of it, with scales, goes before, into A. spare: (N, n, k), k >= n, in 16 bits too,
    at the end of which counts may be kept.
    """
    key = look(*((A,) if X is None else (A, X))), products
    known = _known.get(key)
    if known is None:
        known = _known[key] = _Launch(A, products, X)
    known(A, _counts(spare, known.counted), X, scales)
    ended()


def _counts(spare, size):
    """So many numbers in int32 at the end of a stack in 16 bits."""
    start = (len(spare) * spare.stride(0) - 2 * size) // 64 * 64
    return spare.as_strided((2 * size,), (1,), spare.storage_offset() + start).view(torch.int32)


_known: dict = {}  # what decides about a launch -> _Launch


class _Launch:
    """A launch for matrices of certain shapes and strides: everything but their addresses."""

    def __init__(self, A, products, X):
        N, n, _ = A.shape
        lists = [*([GRAM] if X is not None else []), *map(_numbers, products)]
        self.named = 1 + max(max(places[:6]) for places, _ in lists)
        self.programs, self.order, count, *_ = turns("symmetric", A, n, TILE)
        self.places, self.factors = (lasting(torch.tensor(numbers, dtype=dtype, device="cpu"), A.device)
                                     for numbers, dtype in zip(zip(*lists), (torch.int32, torch.float32)))
        self.numbers = N, count, len(lists), n, n if X is None else X.shape[2], _apart(N, n, count / self.programs)
        self.counted = 1 + N * len(lists) * -(-n // TILE.rows)
        every, box, square = self._all(A), (TILE.rows, TILE.inner), (TILE.rows, TILE.columns)
        self.blanks = [blank(ring.description(*form))
                       for form in ((A if X is None else X, *box), (every, *box), (every, *square))]
        self.pdl = has_pdl(A.device)

    def _all(self, A):
        """The matrices that products name, one after another."""
        return A.as_strided((self.named * len(A), *A.shape[1:]), A.stride())

    def __call__(self, A, counts, X, scales) -> None:
        every = self._all(A)
        tensors = A if X is None else X, every, every
        scales = ones(len(A), A.device) if scales is None else scales
        _clear_kernel.launch(-(-counts.numel() // BLOCK), look(counts), counts, counts.numel(), BLOCK, self.pdl,
                             launch_pdl=self.pdl)
        products_kernel.launch(
            self.programs, self, *map(filled, self.blanks, tensors), self.order, self.places, self.factors, scales,
            counts, *self.numbers, TILE.stages, num_warps=4, enable_fp_fusion=False,
            launch_cooperative_grid=True)


def _apart(N, n, turns) -> int:
    """Return by how many steps programs may be apart when they begin a turn, of matrices that take so many turns each:
    closely together they are faster, but wait for each other's ends where tiles follow soon on what they read, which
    is little of many turns, and where sums are short (docs/log.md).
    """
    soon = (N - 1) * turns < 1.5 and N * turns < 3
    return 1 << 20 if n <= 1280 or soon else 2


def _numbers(product) -> tuple[list[int], list[float]]:
    """(Places, factors) of a product: the left operand, the right one, the result, three addends, how many of them
    there are; alpha, the diagonal, the addends' factors.
    """
    left, right, out, alpha, addends, diagonal = product
    matrices, factors = zip(*addends)
    more = 3 - len(matrices)
    return ([left, right, out, *matrices, *[out] * more, len(matrices), 0],
            [alpha, diagonal, *factors, *[0.0] * more, 0.0, 0.0, 0.0])


@jit.alike("size")
def _clear_kernel(counts, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Write zeros."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(counts + at, tl.zeros((BLOCK,), dtype=tl.int32), mask=at < size)

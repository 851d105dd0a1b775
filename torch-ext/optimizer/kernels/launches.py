"""Launches of the products on sm90 that gram_sm90.py does not make itself: those of cooperative.py and of single.py.

Decides: which products single.py takes, and what these kernels are told. Must not know: what the products are used for.
"""
from __future__ import annotations

from . import ring
from .cooperative import cooperative_kernel
from .gram_sm90 import NONE, SYMMETRY, TmaLaunch, gains_by_pdl, three
from .order import turns
from .raw import raw_kernel
from .ring import blank, filled
from .single import single_kernel
from .tiles import Tile, architecture

SHORT = 256  # elements of a sum up to which the next kernel begins early after small tiles (docs/log.md)
RAW = [Tile(128, columns, 64, 8, 4, 4, "cooperative") for columns in (256, 128)]  # of raw.py: for many tiles, for few
FEW = 12  # rows of tiles up to which their order matters less than the time until it is read (docs/log.md)


class OfGluon(TmaLaunch):
    """The same by a Gluon kernel: `kernel`, told `_tensors` by the descriptors `blanks`, by `table` the order of tiles,
    if it is to be told that, their `count`, `numbers` and `constants`, and where it `mirrors` only what need be whole,
    whether the result need be.
    """

    mirrors = False

    def __call__(self, A, B, out, addends, factors, more, direction) -> None:
        tensors = self._tensors(*self._straightened(A, B, out), addends)
        told = (int(more is not False),) if self.mirrors else ()
        self.kernel.launch(
            self.programs, self, *map(filled, self.blanks, tensors), self.table, direction * self.count,
            *self.numbers, *told, self._scales(more), (*factors, *(beta for _, beta in addends), *NONE[len(addends):]),
            *self.constants, num_warps=4, enable_fp_fusion=False, launch_pdl=self.pdl)


class Cooperative(OfGluon):
    """The same by cooperative.py; of a "product" TMA can store the result."""

    kernel = cooperative_kernel

    def __init__(self, op, A, B, out, addends, factors, tile):
        symmetric, self.turned = op != "product", op == "product" and out.stride(2) != 1
        self.pdl = gains_by_pdl(op, A)
        same = op == "gram" or symmetric and A is B  # squares on the diagonal are rows times themselves
        A, B, out = self._straightened(A, B, out)
        inner = B.shape[2 if symmetric else 1]
        self.programs, self.order, self.count, *places = turns(op, out, inner, tile, paired=same)
        self.table, self.numbers = self.order, (*places, inner, len(addends))
        several = len(addends) > 1 or factors[1] != 0.0
        self.constants = SYMMETRY[op], self.turned, several, tile.rows, tile.columns, tile.stages
        side, step = tile.rows // 2, tile.inner
        left, right = (tile.rows, step), [(tile.columns, step), (tile.columns // 2, step)]
        boxes = [left[::-1] if self.turned else left, *(box if symmetric else box[::-1] for box in right)]
        blanks = zip(self._tensors(A, B, out, addends), boxes + 4 * [(side, side)])
        self.blanks = [blank(ring.description(t, *box)) for t, box in blanks]

    @staticmethod
    def _tensors(A, B, out, addends):
        return A, B, B, *three(addends, out), out


class Single(OfGluon):
    """The same by single.py; of what it `takes`."""

    kernel, turned, pdl, mirrors = single_kernel, False, True, True

    @staticmethod
    def takes(op, A, tile) -> bool:
        """Say whether so many addends can arrive in a ring that so many steps fill."""
        shape = tile.rows, tile.columns, tile.inner, tile.warps
        on_sm90 = architecture(A.device.type, A.device.index) == "sm90"  # others have no wgmma
        return (on_sm90 and tile.loop == "once" and op != "product"
                and shape in ((64, 64, 64, 4), (64, 128, 64, 4), (128, 128, 64, 4)) and tile.stages >= 3
                and A.shape[2] > (tile.stages - 2) * tile.inner)

    def __init__(self, op, A, B, out, addends, factors, tile):
        inner = A.shape[2]
        self.programs, self.order, self.count, _, _ = turns(op, out, inner, tile)
        short = inner <= SHORT and tile.columns == 64
        self.table = None if out.shape[1] <= FEW * tile.rows else self.order
        self.numbers = inner, len(addends), int(short)
        self.constants = SYMMETRY[op], tile.columns, tile.stages
        whole = [(tile.rows, tile.inner), (tile.columns, tile.inner)]
        operands = whole if op == "gram" else 2 * [(tile.inner, tile.inner)]  # one form for rows and what mirrors them
        boxes = operands + 4 * [(tile.rows, tile.rows)]
        self.blanks = [blank(ring.description(t, *box)) for t, box in zip(self._tensors(A, B, out, addends), boxes)]

    @staticmethod
    def _tensors(A, B, out, addends):
        return A, B, *three(addends, out), out


class Raw(TmaLaunch):
    """A X for X that is yet to be cast, by raw.py; `more`: scales and powers. Tiles are of the transposed result."""

    def __init__(self, A, X, out):
        for tile in RAW:
            self.programs, self.order, self.count, *places = turns("product", out.mT, A.shape[2], tile)
            if places[0]:  # else all tiles are halved
                break
        self.numbers, self.stages = (*places, A.shape[2]), tile.stages
        half = tile.rows // 2, tile.columns // 2
        boxes = (tile.inner, tile.rows), (tile.inner, tile.columns), (tile.inner, half[1]), (half[0], half[0])
        self.blanks = [blank(ring.description(t, *box)) for t, box in zip((X, A, A, out), boxes)]
        self.pdl = gains_by_pdl("product", A)

    def __call__(self, A, X, out, addends, factors, more, direction) -> None:
        raw_kernel.launch(
            self.programs, self, *map(filled, self.blanks, (X, A, A, out)), self.order, direction * self.count,
            *self.numbers, *more, self.stages, num_warps=4, enable_fp_fusion=False, launch_pdl=self.pdl)

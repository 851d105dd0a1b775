"""A program, the list of products that resident.py writes, as its kernels read it.

Decides: which bits of a code say what, as resident.py (`_code`) puts them there. Must not know: who computes which part
of a product. Needs Gluon.
"""
from __future__ import annotations

from .ring import gluon_jit

gl = None  # Gluon's language, put here by gluon_jit


@gluon_jit
def product_of(codes, factors, number):
    """Return a product's code and its five factors; read before there is anything to wait for."""
    code, at = gl.load(codes + number), factors + 5 * number
    return code, (gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4))


@gluon_jit
def operands_of(code):
    """Return the first squares of the factors: that of U, 0, or of V, 3."""
    return (code & 1) * 3, (code >> 1 & 1) * 3


@gluon_jit
def result_of(code):
    """Return the first square of where the result goes, and what becomes of it beside."""
    return (code >> 2 & 1) * 3, code >> 8 & 7


@gluon_jit
def mirrors(code):
    """Whether squares on the diagonal are made symmetric."""
    return code >> 11 & 1


@gluon_jit
def borrows(code):
    """Whether what was lent comes to U afterwards."""
    return (code >> 12 & 1) != 0


@gluon_jit
def has_diagonal(code):
    """Whether a multiple of I is added."""
    return (code >> 13 & 1) != 0


@gluon_jit
def settles(code):
    """Whether what was kept or lent before is in memory afterwards."""
    return (code >> 14 & 1) != 0


@gluon_jit
def addends_of(code):
    """How many there are."""
    return 1 + ((code >> 5 & 3) != 0) + (code >> 7 & 1)


@gluon_jit
def addend_of(code, f, k):
    """Return (where addend k lies: in U, 0, in V, 1, or in what was kept, 2; by what the sums are multiplied; by what
    the addend is).
    """
    place = gl.where(k == 0, code >> 3 & 3, gl.where(k == 1, code >> 5 & 3, 0))
    return place, gl.where(k == 0, f[0], 1.0), gl.where(k == 0, f[2], gl.where(k == 1, f[3], f[4]))


@gluon_jit
def part_of(square, like, ROW: gl.constexpr):
    """As much of an addend's square as there are sums, from row ROW on."""
    return square.slice(ROW, like.shape[0]).slice(0, like.shape[1], 1).load(like.type.layout).to(gl.float32)

"""Muon with a second moment of each row. Decides: what a group of it has besides Muon's. Must not know: a step."""
from __future__ import annotations

from .muon import Muon
from .options import spelled_out


class NorMuon(Muon):
    """Muon whose update is divided, row by row, by the root of its mean square over time, and keeps its Frobenius norm
    (arXiv 2510.05491, in the form of its authors' code).

    beta2: decay of that mean square, kept in fp32 as `second_moment` (..., R, 1); all else as in `Muon`.
    """
    _extra_keys = ("beta2",)

    @spelled_out(Muon.__init__)
    def __init__(self, params, *args, beta2=0.95, **kwargs):
        super().__init__(params, *args, beta2=beta2, **kwargs)

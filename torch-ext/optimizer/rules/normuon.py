"""NorMuon's row normalization of orthogonalized updates (arXiv 2510.05491)."""

from __future__ import annotations

from ..kernels.elementwise.normuon import normalize as normalize_rows


def normalize(stacks, rows, hp) -> None:
    """NorMuon (arXiv 2510.05491): divide each row by the root of its mean square over time; keep
    the Frobenius norm.

    A group without `beta2` is plain Muon's.
    """
    for U, V in zip(stacks, rows if "beta2" in hp else ()):
        normalize_rows(U, V, float(hp["beta2"]), 1e-8)

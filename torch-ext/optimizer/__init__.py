"""Muon on any sharding: `Muon`, `NorMuon`, their parameter groups, and `orthogonalize`."""
from __future__ import annotations

from .groups import get_default_muon_param_groups
from .muon import Muon, NorMuon
from .op import orthogonalize

__all__ = ["Muon", "NorMuon", "get_default_muon_param_groups", "orthogonalize"]

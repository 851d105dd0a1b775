"""Muon on any sharding: `Muon`, `NorMuon`, their parameter groups, their state in files, and `orthogonalize`."""
from __future__ import annotations

from .checkpoint import export_state, import_state
from .foreign import convert_state_dict
from .groups import get_default_muon_param_groups
from .muon import Muon
from .normuon import NorMuon
from .op import orthogonalize

__all__ = ["Muon", "NorMuon", "convert_state_dict", "export_state", "get_default_muon_param_groups", "import_state",
           "orthogonalize"]

"""Muon on any sharding.

Public names: the optimizers `Muon` and `NorMuon`, `get_default_muon_param_groups` for parameter
groups, `convert_state_dict`, `export_state` and `import_state` for state in files, the function
`orthogonalize`, `Rule` with `State` for rules of your own, and `QKClip` for attention logits. For
training frameworks: `MuonFactory`, `DionMuon`, `DionNorMuon`, `torchtitan_muon`,
`register_megatron_muon`, and `trainer_metrics` for logs. `sharded_view`: tensor parallelism with
plain tensors.
"""

from __future__ import annotations

from .communication.redistribute import sharded_view
from .integrations.dion import DionMuon, DionNorMuon
from .integrations.factory import MuonFactory
from .integrations.megatron import register_megatron_muon
from .integrations.titan import torchtitan_muon
from .integrations.trainer import trainer_metrics
from .muon import Muon, NorMuon
from .newton_schulz.custom_op import orthogonalize
from .params.param_groups import get_default_muon_param_groups
from .qk_clip.clip import QKClip
from .rules.rule import Rule, State
from .state.peers.convert import convert_state_dict
from .state.safetensors_file import export_state, import_state

__all__ = [
    "DionMuon",
    "DionNorMuon",
    "Muon",
    "MuonFactory",
    "NorMuon",
    "QKClip",
    "Rule",
    "State",
    "convert_state_dict",
    "export_state",
    "get_default_muon_param_groups",
    "import_state",
    "orthogonalize",
    "register_megatron_muon",
    "sharded_view",
    "torchtitan_muon",
    "trainer_metrics",
]

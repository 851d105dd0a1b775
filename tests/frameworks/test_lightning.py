"""Lightning's Trainer and Fabric with MuonFactory: one process, DDP, FSDP2; resumed with equal bits."""

from __future__ import annotations

import pytest

from tests.frameworks.common import run

pytest.importorskip("lightning")
pytest.importorskip("transformers")  # the model


@pytest.mark.parametrize("mode", ["one", "ddp", "ddp_shard_state", "fsdp2"])
def test_lightning(tmp_path, mode):
    """It starts its second process itself. Clipping and a scheduler are on."""
    said = run("lightning", 1 if mode == "one" else 2, tmp_path, mode, launches_itself=True)
    for rank in said:
        assert rank["straight"] == rank["resumed"] == said[0]["straight"]
        assert rank["weight"] == ("DTensor" if mode == "fsdp2" else "Parameter") and rank["rate"] < 0.01


@pytest.mark.parametrize("mode", ["ddp", "ddp_shard_state", "fsdp2"])
def test_fabric(tmp_path, mode):
    said = run("fabric", 2, tmp_path, mode)
    for rank in said:
        assert rank["straight"] == rank["resumed"] == said[0]["straight"]
        assert rank["weight"] == ("DTensor" if mode == "fsdp2" else "Parameter")
        assert rank["name"].startswith("model.layers.")  # without Fabric's wrapper

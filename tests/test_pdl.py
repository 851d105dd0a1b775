"""Kernels that may begin before those launched earlier are done (programmatic dependent launch) wait for these."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import everywhere, package, part

SHAPES = [(1, 256, 768), (16, 256, 768), (64, 256, 768), (64, 768, 256), (12, 768, 768), (3, 768, 3072),
          (1, 2048, 2048), (8, 1600, 1600)]
ROUNDS = 20


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_launches_one_on_top_of_the_other_give_what_launches_one_by_one_give(shape, monkeypatch):
    X, polar = torch.empty(shape, dtype=torch.bfloat16, device="cuda"), package().orthogonalize
    if not part("kernels.backend").has_pdl(X.device):
        pytest.skip("this GPU has no programmatic dependent launch")
    rounds = [torch.randn(shape, device="cuda").bfloat16() for _ in range(ROUNDS)]
    launched = []
    with monkeypatch.context() as patch:  # one by one, none of them from a tape
        module = part("newton_schulz.orthogonalize")
        everywhere(patch, module, "replay_or_record", lambda key, memory, tensors, work: work())
        patch.setattr(part("kernels.launch.replay"), "record", lambda *_: launched.append(torch.cuda.synchronize()))
        expected = [polar(U) for U in rounds]
    two_each = shape[0] == 64  # norms, their scales, and one launch for the rest (gram_chain.py)
    assert len(launched) >= (3 if two_each else 6) * ROUNDS
    polar(X.copy_(rounds[0]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = polar(X)
    replayed = []
    for U in rounds:
        X.copy_(U)
        graph.replay()
        replayed.append(out.clone())
    called = [polar(U) for U in rounds]
    for number in range(ROUNDS):
        assert torch.equal(replayed[number], expected[number])
        assert torch.equal(called[number], expected[number])


def test_only_nvidia_gpus_from_sm90_on_have_it(monkeypatch):
    """Others neither know the option nor the instructions."""
    has_pdl = part("kernels.backend").has_pdl.__wrapped__
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not has_pdl(torch.device("cpu")) and not has_pdl(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    assert has_pdl(torch.device("cuda", 0)) and not has_pdl(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not has_pdl(torch.device("cuda", 0))

"""Small state on GPUs: state in host memory, fp32 weights in two halves and 8-bit averages, sharded by FSDP2 over two
GPUs, have the bits of one GPU without offload, also after torch's functions have saved and loaded them.

Gradients are made on the CPU, so that all runs get the same bits.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dsd

from tests import test_checkpoint as checkpoints
from tests import test_master_weights as halves
from tests.ranks import package, part, run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
# Rows are divided unevenly; 64 divides the columns, and their halves
SHAPES = {"embed": (333, 128), "up": (129, 128), "down": (128, 256), "square": (64, 128), "norm": (128,)}
STEPS = 10
# Name -> (class, arguments, keys of AdamW's group)
KINDS = {
    "Muon in host memory": ("Muon", {"offload_state": True}, {}),
    "NorMuon in host memory": ("NorMuon", {"offload_state": True}, {}),
    "8-bit momentum in host memory": ("Muon", {"offload_state": True, "state_dtype": torch.int8}, {}),
    "a part in host memory": ("NorMuon", {"offload_state": 40_000}, {}),
    "halves": ("NorMuon", {"master_weights": "split16"}, {}),
    "8-bit averages": ("Muon", {}, {"state_dtype": torch.int8}),
}
WHOLE = dsd.StateDictOptions(full_state_dict=True)
OF_RANK_0 = dsd.StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Net(nn.Module):
    """Parameters with equal values in every call."""

    def __init__(self, dtype, device):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)))


def built(kind, device, shards, **more):
    """(model, optimizer), whole or sharded by FSDP2."""
    from torch.distributed.fsdp import fully_shard

    cls, options, of_averages = KINDS[kind]
    model = Net(BF16 if kind == "halves" else FP32, device)
    if shards:
        fully_shard(model)
    named = dict(model.named_parameters())
    rest = [(name, named.pop(name)) for name in ("embed", "norm")]
    groups = [{"params": [*named.items()]}, {"params": rest, "use_muon": False, "lr": 0.01, **of_averages}]
    return model, getattr(package(), cls)(groups, lr=0.02, **{**options, **more})


def stepped(model, opt, steps):
    """Gradients are multiples of 1/16 that bf16 holds."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for p in model.parameters():
            full = (torch.randint(-127, 128, p.shape, generator=generator) / 16).to(p.device, p.dtype)
            p.grad = placed_like(p, full)
        opt.step()


def placed_like(param, full):
    return checkpoints.routes.cut(full, param.device_mesh, param.placements) if hasattr(param, "placements") else full


def differences(model, opt, other, own):
    """Weights and states of which this rank's part is not that of a whole model, bit for bit."""
    opt.wait()
    found = []
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        ours, theirs = ({"weight": x.detach(), **o.state[x]} for o, x in ((opt, p), (own, q)))
        found += [name] * (ours.keys() != theirs.keys())
        found += [f"{name} {key}" for key, t in ours.items() if not is_part(t, theirs[key])]
    return found


def is_part(tensor, full):
    local = part("params.dtensor").local_of(tensor)
    expected = part("params.dtensor").local_of(placed_like(tensor, full))
    return local.dtype == expected.dtype and torch.equal(local.cpu(), expected.cpu())


def through_torch(rank, world, kind, device):
    """What differs from one GPU: after 10 steps, in the gathered state, and after steps that follow loads of it."""
    whole, own = built(kind, device, False, **({"offload_state": False} if "host" in kind else {}))
    stepped(whole, own, range(STEPS))
    model, opt = built(kind, device, True)
    stepped(model, opt, range(STEPS))
    found = {"steps": differences(model, opt, whole, own)}
    if opt._options.offload_state is True:
        of_elements = [(name, p, {"momentum_buffer", "exp_avg"} & opt.state[p].keys())
                       for name, p in model.named_parameters()]
        found["place"] = [name for name, p, keys in of_elements
                          if not keys or any(opt.state[p][key].device.type != "cpu" for key in keys)]
    # Of every rank, on its GPU; then of rank 0, on its host
    states = [dsd.get_optimizer_state_dict(model, opt, options=options) for options in (WHOLE, OF_RANK_0)]
    weights = dsd.get_model_state_dict(model, options=WHOLE)
    expected = dsd.get_optimizer_state_dict(whole, own)["state"]
    found["gathered"] = [
        f"{name} {key}" for state in states[:2 - (rank > 0)] for name, of in expected.items() for key, t in of.items()
        if not torch.equal(bits(state["state"][name][key]), bits(t))]
    stepped(whole, own, range(STEPS, STEPS + 3))
    of_torch = {"loaded": (states[0], WHOLE), "broadcast": (states[1], BROADCAST)}
    for case in (*of_torch, "copied"):
        fresh, other = built(kind, device, True)
        dsd.set_model_state_dict(fresh, dict(weights), options=WHOLE)
        if case == "copied":
            other.load_state_dict(opt.state_dict())
        else:
            state, options = of_torch[case]
            dsd.set_optimizer_state_dict(fresh, other, state, options=options)
        stepped(fresh, other, range(STEPS, STEPS + 3))
        found[case] = differences(fresh, other, whole, own)
    return found


def bits(tensor):
    """Some numbers of rests are NaN."""
    return tensor.cpu().view(torch.int16) if tensor.dtype == BF16 else tensor.cpu()


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.parametrize("kind", KINDS)
def test_two_gpus_have_the_bits_of_one_and_torch_gathers_and_loads_them(kind):
    for found in run_ranks(2, through_torch, kind, "cuda", backend="nccl", timeout=90):
        assert found == dict.fromkeys(found, [])


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", ["NorMuon in host memory", "Muon in 8 bits", "NorMuon in halves",
                                  "Muon in 8 bits in host memory"])
def test_a_run_goes_on_under_columns_and_back(name, tmp_path):
    """Through files of torch.distributed.checkpoint, with the bits of one GPU that never stops, without offload."""
    chain = [("fsdp", 2), ("fsdp columns", 2), ("fsdp", 2)]
    checkpoints.run_chain(chain, name, ["nested", "flat"], tmp_path, device="cuda", even="wide")


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True])
def test_halves_have_the_bits_of_fp32_weights_on_a_gpu(optimizer, capturable):
    """100 steps of Muon, and of torch's fused AdamW on joined copies; with `capturable` as replayed graphs."""
    start = halves.random_weights(torch.Generator().manual_seed(1))
    results = []
    for dtype in (FP32, BF16):
        params = [nn.Parameter(w.to("cuda", dtype, copy=True)) for w in start]
        opt = halves.make(params, split=dtype == BF16, capturable=capturable)
        opt.load_master_weights({f"w{i}": w.cuda() for i, w in enumerate(start)})
        halves.train(params, opt, torch.Generator().manual_seed(2), 100, lambda gradient: gradient.cuda())
        results.append(opt.master_weights())
        assert not capturable or any(one.graph for one in opt._preparation.graphs.parts.values())
    assert [name for name, w in results[0].items() if not torch.equal(w, results[1][name])] == []
    for i, w in enumerate(start):
        assert not torch.equal(results[1][f"w{i}"].cpu(), w)
        assert torch.equal(halves.weights_module().split(results[1][f"w{i}"])[0], params[i])


@pytest.mark.gpu
def test_momentum_on_the_host_is_converted_one_tensor_at_a_time(optimizer):
    """fp32 to 8 bits and back, and the GPU never holds both: the way for checkpoints of torch.distributed.checkpoint
    (docs/checkpoint.md).
    """
    named = [(f"w{i}", nn.Parameter(torch.zeros(1024, 1024, device="cuda"))) for i in range(32)]
    of_fp32 = sum(4 * p.numel() for _, p in named)
    for _, p in named:
        p.grad = torch.randn_like(p)
    for saved_in, state_dtype, most in ((FP32, torch.int8, 0.6), (torch.int8, FP32, 1.3)):
        saved_with = optimizer.Muon(named, offload_state=True, state_dtype=saved_in)
        saved_with.step()
        saved = saved_with.state_dict()
        saved_with.release()
        opt, resident = (optimizer.Muon(named, state_dtype=state_dtype) for _ in range(2))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        opt.load_state_dict(saved)
        assert torch.cuda.max_memory_allocated() - before < most * of_fp32
        saved["state"] = {i: {key: t.cuda() for key, t in of.items()} for i, of in saved["state"].items()}
        resident.load_state_dict(saved)
        for _, p in named:
            assert opt.state[p]["momentum_buffer"].is_cuda and opt.state[p]["momentum_buffer"].any()
            assert opt.state[p].keys() == resident.state[p].keys()
            assert all(torch.equal(t, resident.state[p][key]) for key, t in opt.state[p].items())

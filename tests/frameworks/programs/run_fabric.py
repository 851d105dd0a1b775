"""Lightning Fabric on 2 ranks. run_fabric.py {ddp,ddp_shard_state,fsdp2}: trains 4 steps, and again from step 2."""

from __future__ import annotations

import os
import sys

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

from tests.frameworks.common import ON_GPUS, Tokens, digest, llama, say
from tests.ranks import package

MODE, FOLDER = sys.argv[1], os.environ["FOLDER"] + "/saved"
ROWS = Tokens().rows


def shard(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


if MODE.startswith("ddp"):
    strategy = DDPStrategy(process_group_backend="nccl" if ON_GPUS else "gloo")
else:
    strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
fabric = Fabric(accelerator="cuda" if ON_GPUS else "cpu", devices=2, strategy=strategy)
fabric.launch()


def make():
    fabric.seed_everything(0, verbose=False)
    model = fabric.setup_module(llama())
    optimizer = package().MuonFactory()(model, lr=0.02, process_group="world", shard_state=MODE == "ddp_shard_state",
                                        unscale_in_step=False)
    return model, fabric.setup_optimizers(optimizer)


def train(model, optimizer, steps):
    for step in steps:
        for micro in (0, 1):
            with fabric.no_backward_sync(model, enabled=micro == 0):
                rows = ROWS[(step * 4 + micro * 2 + fabric.global_rank) % 60:][:2].to(fabric.device)
                fabric.backward(model(input_ids=rows, labels=rows).loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()


def bits(model, optimizer):
    optimizer.optimizer.consolidate_state_dict(to=None)
    own = optimizer.optimizer.state_dict()["state"]  # Fabric's wrapper gives it to rank 0 alone
    state = {f"{i}.{key}": value for i, entry in own.items() for key, value in entry.items()}
    return [digest(dict(model.named_parameters())), digest(state)]


model, optimizer = make()
train(model, optimizer, range(2))
fabric.save(FOLDER, {"model": model, "optimizer": optimizer})
train(model, optimizer, range(2, 4))
straight = bits(model, optimizer)
model, optimizer = make()
fabric.load(FOLDER, {"model": model, "optimizer": optimizer})
train(model, optimizer, range(2, 4))
say(straight=straight, resumed=bits(model, optimizer),
    weight=type(optimizer.param_groups[0]["params"][0]).__name__,
    name=optimizer.param_groups[0]["param_names"][0])
torch.distributed.barrier()

"""torchtitan's own containers, llama3 model and flat state. run_titan.py {one,parts,recut,pipeline}.

parts: two model parts on each rank; recut: the checkpoint of two parts goes on as one; pipeline: each pair of ranks has
one of two stages. Gradients are drawn, for torchtitan's attention needs a GPU.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.models.llama3 import _debugmodel

from tests.frameworks.common import digest, say
from tests.ranks import package

MODE, FOLDER = sys.argv[1], os.environ["FOLDER"]
STEPS = 4  # with a checkpoint after half of them


def whole():
    torch.manual_seed(0)
    config = _debugmodel("flex")
    config.layers = config.layers[:4]
    model = config.build()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    return model


def stages(model, count):
    """As torchtitan cuts a model: each stage keeps its layers, and their names."""
    made = []
    for stage in range(count):
        part = copy.deepcopy(model)
        for i in list(part.layers):
            if int(i) * count // 4 != stage:
                del part.layers[i]
        if stage:
            part.tok_embeddings = None
        if stage + 1 < count:
            part.norm = part.lm_head = None
        made.append(part)
    return made


def make(count, mesh, stage=None):
    parts = stages(whole(), count)
    parts = parts if stage is None else [parts[stage]]
    for part in parts:
        for layer in part.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(part, mesh=mesh)
    entry = package().torchtitan_muon(lr=0.02, adamw_lr=0.01, overrides={"*.wo.*": {"lr": 0.03}})
    optimizers = entry.build(model_parts=parts)
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=8)
    return parts, optimizers, schedulers


def train(parts, optimizers, schedulers, steps):
    for step in steps:
        for part in parts:
            for name, p in part.named_parameters():
                generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
                G = torch.randn(p.shape, generator=generator) * 0.01
                p.grad = distribute_tensor(G, p.device_mesh, p.placements, src_data_rank=None)
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()


def weights(parts):
    return {name: p for part in parts for name, p in part.named_parameters()}


def state(parts, optimizers, schedulers):
    return {"optimizer": optimizers.state_dict(), "model": weights(parts), "lr": schedulers.state_dict()}


dist.init_process_group("gloo")
world = dist.get_world_size()
if MODE == "pipeline":
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "fsdp"))
    shape = {"count": 2, "mesh": mesh["fsdp"], "stage": mesh.get_local_rank("pp")}
else:
    shape = {"count": 1 if MODE == "one" else 2, "mesh": init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    made = make(**shape)
before = digest(weights(made[0]))
made[1].state_dict()  # takes a step of zero gradients at zero lr
unmoved = before == digest(weights(made[0]))
train(*made, range(STEPS // 2))
dcp.save(state(*made), checkpoint_id=FOLDER)
train(*made, range(STEPS // 2, STEPS))
straight = digest(weights(made[0]))
if MODE == "recut":
    shape["count"] = 1
made = make(**shape)
target = state(*made)
dcp.load(target, checkpoint_id=FOLDER)
made[1].load_state_dict(target["optimizer"])
made[2].load_state_dict(target["lr"])
train(*made, range(STEPS // 2, STEPS))
say(straight=straight, resumed=digest(weights(made[0])), unmoved=unmoved,
    optimizers=[type(optimizer).__name__ for optimizer in made[1]],
    warned=[str(w.message) for w in caught if "matches no trainable" in str(w.message)],
    state=sorted({key.rpartition(".")[2] for key in target["optimizer"] if key.startswith("state.")}))
dist.barrier()
dist.destroy_process_group()

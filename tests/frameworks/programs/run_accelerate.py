"""accelerate alone. run_accelerate.py {ddp,ddp_shard_state,fsdp2}: trains 4 steps, and again from a checkpoint.

Then 4 steps without clipping: the norm of all gradients is summed in another order where they are sharded, and its last
bit changes all of them.
"""

from __future__ import annotations

import os
import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed

from tests.frameworks.common import ON_GPUS, Tokens, bits, fsdp2_on_cpu, llama, say
from tests.ranks import package

MODE, FOLDER = sys.argv[1], os.environ["FOLDER"]
NORMS = []


def make():
    AcceleratorState._reset_state()
    GradientState._reset_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT") if MODE == "fsdp2" else None
    accelerator = Accelerator(cpu=not ON_GPUS, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    set_seed(0)
    model = llama()
    optimizer = package().MuonFactory()(model, lr=0.02, process_group="world", shard_state=MODE == "ddp_shard_state")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(Tokens(), batch_size=4)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader)


def train(accelerator, model, optimizer, scheduler, batches, clips=True):
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients and clips:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                NORMS.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


if MODE == "fsdp2":
    fsdp2_on_cpu()
made = make()
accelerator, model, optimizer, scheduler, loader = made
batches = list(loader)
train(*made[:4], batches[:4])
optimizer.optimizer.consolidate_state_dict()  # does nothing without shard_state
accelerator.save_state(FOLDER)
train(*made[:4], batches[4:8])
optimizer.optimizer.consolidate_state_dict(to=None)
straight = bits(model, optimizer)
made = make()
accelerator, model, optimizer, *_ = made
accelerator.load_state(FOLDER)
train(*made[:4], batches[4:8])
optimizer.optimizer.consolidate_state_dict(to=None)
resumed = bits(model, optimizer)
first = optimizer.param_groups[0]["params"][0]
made = make()
train(*made[:4], batches[:8], clips=False)
made[2].optimizer.consolidate_state_dict(to=None)
say(straight=straight, resumed=resumed, unclipped=bits(*made[1:3]), norms=NORMS[:4], weight=type(first).__name__,
    rate=optimizer.param_groups[0]["lr"])
torch.distributed.barrier()

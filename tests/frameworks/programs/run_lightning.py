"""Lightning's Trainer. run_lightning.py {one,ddp,ddp_shard_state,fsdp2}: trains 6 steps, and from step 3 again."""

from __future__ import annotations

import os
import sys

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from tests.frameworks.common import ON_GPUS, Tokens, digest, llama, say
from tests.ranks import package

MODE, FOLDER = sys.argv[1], os.environ["FOLDER"]
FOUND = {}


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.sharded = llama(), False

    def configure_model(self):
        if MODE != "fsdp2" or self.sharded:
            return
        from torch.distributed.fsdp import fully_shard

        for layer in self.model.model.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])
        self.sharded = True

    def training_step(self, batch, i):
        return self.model(**batch).loss

    def configure_optimizers(self):
        optimizer = package().MuonFactory()(self, lr=0.02, process_group="world", shard_state=MODE == "ddp_shard_state",
                                            unscale_in_step=False)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_end(self):
        (optimizer,) = self.trainer.optimizers
        optimizer.consolidate_state_dict(to=None)
        state = {f"{i}.{key}": value for i, entry in optimizer.state_dict()["state"].items()
                 for key, value in entry.items()}
        FOUND["bits"] = [digest(dict(self.named_parameters())), digest(state)]
        FOUND["weight"] = type(optimizer.param_groups[0]["params"][0]).__name__
        FOUND["rate"] = float(optimizer.param_groups[0]["lr"])


def train(checkpoint=None):
    L.seed_everything(0, verbose=False)
    strategy = "auto"
    if MODE.startswith("ddp"):
        strategy = DDPStrategy(process_group_backend="nccl" if ON_GPUS else "gloo")
    elif MODE == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=True)
    trainer = L.Trainer(
        max_steps=6, accelerator="cuda" if ON_GPUS else "cpu", devices=1 if MODE == "one" else 2,
        strategy=strategy, logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=FOLDER,
        gradient_clip_val=0.5, accumulate_grad_batches=2, callbacks=[L.pytorch.callbacks.ModelCheckpoint(
            FOLDER, filename="{step}", save_top_k=-1, every_n_train_steps=3)])
    # Equal rows: Lightning begins the data anew inside an epoch
    loader = torch.utils.data.DataLoader([Tokens(1)[0]] * 64, batch_size=2)
    trainer.fit(Module(), loader, ckpt_path=checkpoint)
    return FOUND["bits"]


straight = train()
resumed = train(f"{FOLDER}/step=3.ckpt")
say(straight=straight, resumed=resumed, weight=FOUND["weight"], rate=FOUND["rate"])

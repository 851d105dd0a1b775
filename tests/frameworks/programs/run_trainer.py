"""transformers' Trainer with MuonFactory. run_trainer.py {one,ddp,fsdp2} [lora]: 6 steps, then from step 3 again."""

from __future__ import annotations

import os
import sys

import torch
from transformers import Trainer, TrainingArguments

from tests.frameworks.common import ON_GPUS, Tokens, bits, fsdp2_on_cpu, llama, say
from tests.ranks import package

MODE, WITH_LORA = sys.argv[1], "lora" in sys.argv
FOLDER = os.environ["FOLDER"]
CONFIG = {"lr": 0.02, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "process_group": "world",
          "overrides": {"*.q_proj.*": {"lr": 0.01}}}


def model():
    made = llama()
    if WITH_LORA:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        made = get_peft_model(made, LoraConfig(r=4, target_modules="all-linear"))
    return made


def train(resume=None):
    more = {} if MODE == "one" else {"ddp_backend": "nccl" if ON_GPUS else "gloo"}
    if MODE == "fsdp2":
        more |= {"fsdp": True, "fsdp_config": {
            "fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT"}}
    args = TrainingArguments(
        FOLDER, max_steps=6, per_device_train_batch_size=4 if MODE == "one" else 2,
        gradient_accumulation_steps=2, max_grad_norm=0.5, save_steps=3, logging_steps=3, report_to=[],
        use_cpu=not ON_GPUS,
        seed=0, disable_tqdm=True, learning_rate=0.02, lr_scheduler_type="cosine", warmup_steps=1, **more)
    trainer = Trainer(model(), args, train_dataset=Tokens(),
                      optimizer_cls_and_kwargs=(package().MuonFactory, dict(CONFIG)))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if MODE == "fsdp2":
    fsdp2_on_cpu()
trainer = train()
straight = bits(trainer.model, trainer.optimizer.optimizer)
trainer = train(f"{FOLDER}/checkpoint-3")
optimizer = trainer.optimizer.optimizer
first = optimizer.param_groups[0]["params"][0]
names = [name for group in optimizer.param_groups if group["use_muon"] for name in group["param_names"]]
say(straight=straight, resumed=bits(trainer.model, optimizer), optimizer=type(optimizer).__name__,
    weight=type(first).__name__, loss=trainer.state.log_history[0]["loss"], muon=names,
    wrapped=type(trainer.model_wrapped).__name__,
    rates=sorted({group["initial_lr"] for group in optimizer.param_groups}))
if torch.distributed.is_initialized():
    torch.distributed.barrier()

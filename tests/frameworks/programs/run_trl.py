"""TRL. run_trl.py {sft,dpo} [lora]: trains 4 steps, resumes from step 2. On several ranks with DDP, on CPUs."""

from __future__ import annotations

import os
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.frameworks.common import bits, llama, say
from tests.ranks import package

MODE, WITH_LORA, FOLDER = sys.argv[1], "lora" in sys.argv, os.environ["FOLDER"]


def tokenizer():
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab={**vocab, "<eos>": 256, "<pad>": 257}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def train(resume=None):
    torch.manual_seed(0)
    lora = None
    if WITH_LORA:
        from peft import LoraConfig

        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    common = dict(
        output_dir=FOLDER, max_steps=4, per_device_train_batch_size=2, save_steps=2, logging_steps=2, report_to=[],
        use_cpu=True, ddp_backend="gloo" if "RANK" in os.environ else None, bf16=False, seed=0, disable_tqdm=True,
        max_length=64, gradient_checkpointing=False)
    more = {"processing_class": tokenizer(), "peft_config": lora}
    model = llama(vocab_size=258, max_position_embeddings=128)
    if MODE == "sft":
        rows = Dataset.from_dict({"text": [f"{i} plus {i} is {2 * i}, and so on" for i in range(32)]})
        trainer = SFTTrainer(model, args=SFTConfig(**common), train_dataset=rows, **more)
    else:
        rows = Dataset.from_dict({"prompt": [f"{i} plus {i} is " for i in range(32)],
                                  "chosen": [f"{2 * i}" for i in range(32)],
                                  "rejected": [f"{3 * i}" for i in range(32)]})
        reference = None if WITH_LORA else llama(vocab_size=258, max_position_embeddings=128)
        trainer = DPOTrainer(model, reference, args=DPOConfig(**common), train_dataset=rows, **more)
    # DPOTrainer has no argument for it
    trainer.optimizer_cls_and_kwargs = package().MuonFactory, {
        "lr": 0.02, "rule": "normuon", "process_group": "world"}
    trainer.train(resume_from_checkpoint=resume)
    return trainer


trainer = train()
straight = bits(trainer.model, trainer.optimizer.optimizer)
trainer = train(f"{FOLDER}/checkpoint-2")
optimizer = trainer.optimizer.optimizer
names = [name for group in optimizer.param_groups if group["use_muon"] for name in group["param_names"]]
say(straight=straight, resumed=bits(trainer.model, optimizer), optimizer=type(optimizer).__name__,
    wrapped=type(trainer.model_wrapped).__name__, muon=[name.rpartition("layers.")[2] for name in names])
if torch.distributed.is_initialized():
    torch.distributed.barrier()

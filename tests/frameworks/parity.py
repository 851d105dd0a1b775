"""Fifty steps in a framework's loop, once with another Muon, once with this package's: how far apart are the weights?

The other Muon is the framework's own, or torch.optim.Muon with torch.optim.AdamW beside it. Casts of it to bf16 become
casts to fp32, as in benchmarks/trajectories.py: the comparison is of formulas and loops, not of rounding to bf16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import torch
from torch import nn

from tests.frameworks.common import ROOT, fabric, fsdp2_on_cpu
from tests.ranks import package

sys.path.append(str(ROOT / "benchmarks"))

STEPS = 50
# || ours - theirs || / || theirs - start || of each parameter. Rounding in fp32 makes 1e-6 to 3e-6 of it
TOLERANCE = 1e-5
LR, DECAY, MOMENTUM, BETAS, EPS = 0.02, 0.1, 0.9, (0.9, 0.95), 1e-8
VOCABULARY, WIDTH, BATCH = 16, 8, 8
# The values of MuonFactory for torch's formulas
VALUES = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "ns_coefficients": "jordan", "betas": [*BETAS],
          "eps": EPS, "adjust_lr_fn": "original", "wire_dtype": "fp32", "ns_dtype": "fp32", "process_group": "world"}


class Model(nn.Module):
    """A language model of matrices, a vector and embeddings, called as transformers' models are."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        # No LayerNorm: gradients before it have a singular value of rounding errors, which Muon makes large
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        torch.manual_seed(0)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=p.shape[-1] ** -0.5)

    def forward(self, input_ids, labels):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24, bias=False), nn.Linear(24, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(x)))


class Rows(torch.utils.data.Dataset):
    """Random tokens, and as a label the token that follows."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, VOCABULARY, (9,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": row[:-1], "labels": row[1:]}


def loader() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(Rows(), batch_size=BATCH)


def is_hidden(name: str, p: torch.Tensor) -> bool:
    return "layers." in name and p.ndim == 2


class InParts(torch.optim.Optimizer):
    """Several optimizers as one, stepped in fp32. The groups are those of the parts."""

    def __init__(self, *parts: torch.optim.Optimizer):
        super().__init__([{"params": [*group["params"]]} for part in parts for group in part.param_groups], {})
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> object:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = iter(self.param_groups)  # other ones after load_state_dict, which accelerate calls
        # Here: the Hub's CI collects the tests without benchmarks/
        from trajectories import InFloat32

        with torch.compiler.set_stance("force_eager"), InFloat32():
            for part in self.parts:
                part.param_groups = [next(groups) for _ in part.param_groups]
                part.step()
        return loss


class TorchMuon:
    """A factory such as MuonFactory: torch.optim.Muon for hidden matrices, torch.optim.AdamW for the rest."""

    def __call__(self, model: nn.Module, **_: object) -> InParts:
        named = [*model.named_parameters()]
        others = [{"params": [p for name, p in named if not is_hidden(name, p) and (p.ndim == 1) is vectors],
                   "weight_decay": 0.0 if vectors else DECAY} for vectors in (False, True)]
        hidden = [p for name, p in named if is_hidden(name, p)]
        return InParts(torch.optim.Muon(hidden, lr=LR, weight_decay=DECAY, momentum=MOMENTUM),
                       torch.optim.AdamW(others, lr=LR, betas=BETAS, eps=EPS))


def theirs_and_ours(**more: object) -> list[tuple[type, dict]]:
    """Factories and their values; `more`: further values of MuonFactory."""
    return [(TorchMuon, {}), (package().MuonFactory, {**VALUES, **more})]


def rate(step: int) -> float:
    """The schedule of the learning rate, as a factor."""
    return 1 / (1 + 0.1 * step)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole copies of the weights, without the prefixes of wrappers."""
    found = {name.rpartition("module.")[2]: p.detach() for name, p in model.named_parameters()}
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for name, p in found.items()}


def deviation(theirs: Mapping, ours: Mapping, start: Mapping | None = None) -> float:
    """The norm of the difference over the norm of the movement, the largest of all parameters."""
    start = weights(Model()) if start is None else start
    assert start.keys() == theirs.keys() == ours.keys()
    assert all(float((p - start[name]).norm()) > 0.01 for name, p in theirs.items()), "a weight was not stepped"
    return max(float((ours[name] - p).norm() / (p - start[name]).norm()) for name, p in theirs.items())


# The loops of frameworks. Each takes a factory with its values, and returns the weights.


def train_in_trainer(choice: tuple[type, dict], folder: str, shards: bool = False) -> dict[str, torch.Tensor]:
    """transformers' Trainer, with clipping, a schedule and shuffled data."""
    from transformers import Trainer, TrainingArguments

    more = {}
    if shards:
        fsdp2_on_cpu()
        more = {"ddp_backend": "gloo", "fsdp": True, "fsdp_config": {
            "fsdp_version": 2, "transformer_layer_cls_to_wrap": ["Block"]}}
    args = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=BATCH // (2 if shards else 1), max_grad_norm=0.5,
        save_strategy="no", report_to=[], use_cpu=True, seed=0, disable_tqdm=True, lr_scheduler_type="cosine",
        warmup_steps=5, **more)
    trainer = Trainer(Model(), args, train_dataset=Rows(), optimizer_cls_and_kwargs=choice)
    trainer.train()
    return weights(trainer.model)


def train_in_accelerate(choice: tuple[type, dict]) -> dict[str, torch.Tensor]:
    """accelerate, which averages gradients over two batches. On several ranks with FSDP2."""
    from accelerate import Accelerator

    factory, values = choice
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Model()
    optimizer = factory()(model, **values)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, loader(), schedule)
    for _ in range(2):
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return weights(model)


def train_in_lightning(choice: tuple[type, dict], folder: str) -> dict[str, torch.Tensor]:
    import lightning

    factory, values = choice

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.module = Model()

        def training_step(self, batch, i):
            return self.module(**batch)["loss"]

        def configure_optimizers(self):
            optimizer = factory()(self, **values)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, gradient_clip_val=0.5,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder)
    module = Module()
    trainer.fit(module, loader())
    return weights(module)


def train_in_fabric(choice: tuple[type, dict], shards: bool = False) -> dict[str, torch.Tensor]:
    def shard(model: nn.Module, mesh: object) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    factory, values = choice
    strategy = "auto"
    if shards:
        strategy = fabric().strategies.ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    launcher = fabric().Fabric(accelerator="cpu", devices=2 if shards else 1, strategy=strategy)
    launcher.launch()
    model = launcher.setup_module(Model())
    optimizer = launcher.setup_optimizers(factory()(model, **values))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, rate)
    for batch in loader():
        own = slice(launcher.global_rank, None, launcher.world_size)
        launcher.backward(model(batch["input_ids"][own], batch["labels"][own])["loss"])
        launcher.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return weights(model)


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, call: Callable | None = None) -> dict:
    """A plain loop, where only the framework's config and optimizer are compared. `call`: the loss of a batch."""
    for batch in loader():
        loss = call(batch) if call else model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)

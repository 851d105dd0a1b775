"""Train a small GPT with Muon, NorMuon or AdamW, on one process or with FSDP2 on many.

    python examples/train_gpt.py                                              one process
    torchrun --nproc-per-node 8 examples/train_gpt.py --layers 12 --width 768 --heads 12 --batch 256 --bf16

The optimizer is that of this checkout, as `make build` wrote it, unless LOCAL_KERNELS names another build.
"""
from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path

import torch
import torch.distributed as dist
from corpus import VOCABULARY, even_windows, random_windows, read_corpus
from gpt import GPT
from torch.nn import functional as F

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={Path(__file__).resolve().parents[1]}")
# The best of examples/results/sweep.csv, found with the defaults below.
BEST_LR = {"muon": 1.6e-2, "normuon": 1.6e-2, "adamw": 1e-3}
WARMUP = 0.1
HELDOUT_WINDOWS = 64


def option(default, text, **keywords):
    """A field of Options and its line in --help."""
    return field(default=default, metadata={"help": text, **keywords})


@dataclass(frozen=True)
class Options:
    """Everything that one training run depends on; each field is a command line option."""
    optimizer: str = option("muon", "the optimizer of the hidden matrices; the other parameters always get AdamW",
                            choices=sorted(BEST_LR))
    lr: float = option(None, "peak learning rate (default: the best of the committed sweep)", type=float)
    adamw_lr: float = option(None, "peak learning rate of what Muon leaves to AdamW (default: --lr)", type=float)
    ns_coefficients: str = option("polar_express", "coefficient set of Muon's and NorMuon's polar factor")
    ns_dtype: str = option(None, "its precision (default: fp16 on a GPU, fp32 on a CPU)", type=str,
                           choices=("float16", "bfloat16", "float32"))
    weight_decay: float = option(0.1, "decoupled weight decay, of all parameters")
    steps: int = option(160, "optimizer steps; 10 %% of them are warm-up, then the rate falls linearly to zero")
    batch: int = option(16, "sequences per step, over all processes")
    seq: int = option(128, "bytes per sequence")
    layers: int = option(5, "layers of the model")
    width: int = option(192, "width of the model")
    heads: int = option(6, "attention heads")
    seed: int = option(0, "seed of the weights and of the order of the text")
    data: str = option(None, "folder whose *.py files are the text (default: Python's standard library)", type=str)
    eval_every: int = option(20, "steps between two measurements of the held-out loss")
    out: str = option(None, "CSV file for one row per step", type=str)
    compile: bool = option(False, "compile each layer with torch.compile")
    bf16: bool = option(False, "run the model under bf16 autocast; weights stay in fp32")


def parser(description: str) -> argparse.ArgumentParser:
    """A command line with one option per field of Options."""
    made = argparse.ArgumentParser(description=description, conflict_handler="resolve",
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    for entry in fields(Options):
        keywords = dict(entry.metadata)
        flag = "--" + entry.name.replace("_", "-")
        if entry.default is False:
            made.add_argument(flag, action="store_true", **keywords)
            continue
        if entry.default is not None:
            keywords = {"type": type(entry.default), **keywords, "help": keywords["help"] + " (default: %(default)s)"}
        made.add_argument(flag, default=entry.default, **keywords)
    return made


def options_of(arguments: argparse.Namespace, **changes) -> Options:
    """The Options among parsed arguments, with some of them changed."""
    values = {entry.name: getattr(arguments, entry.name) for entry in fields(Options)}
    return Options(**{**values, **changes})


@dataclass(frozen=True)
class Record:
    """What one step left behind; losses in nats per byte, averaged over all processes."""
    step: int
    lr: float
    train_loss: float
    heldout_loss: float | None
    step_ms: float
    optimizer_ms: float
    tokens_per_s: float


def make_model(options: Options, device: torch.device) -> torch.nn.Module:
    """The model from its seed, sharded by FSDP2 over all processes where there are several."""
    torch.manual_seed(options.seed)
    model = GPT(VOCABULARY, options.layers, options.width, options.heads).to(device)
    if options.compile:
        for block in model.blocks:
            block.compile()
    if world_size() > 1:
        from torch.distributed.fsdp import fully_shard
        mesh = dist.device_mesh.init_device_mesh(device.type, (world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def make_optimizer(model: torch.nn.Module, options: Options) -> torch.optim.Optimizer:
    """Muon or NorMuon from the kernels hub on the hidden matrices and AdamW on the rest, or AdamW on everything."""
    lr = options.lr or BEST_LR[options.optimizer]
    if options.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr, (0.9, 0.95), weight_decay=options.weight_decay, fused=True)
    from kernels import get_kernel
    package = get_kernel("org/optimizer", version=1)
    groups = package.get_default_muon_param_groups(model)
    for group in groups:
        if not group["use_muon"]:
            group["lr"] = options.adamw_lr or lr
    kind = {"muon": package.Muon, "normuon": package.NorMuon}[options.optimizer]
    return kind(groups, lr=lr, weight_decay=options.weight_decay, ns_coefficients=options.ns_coefficients,
                ns_dtype=options.ns_dtype and getattr(torch, options.ns_dtype))


def lr_factor(step: int, steps: int) -> float:
    """Linear warm-up, then linear decay to zero."""
    warmup = max(1, round(WARMUP * steps))
    return min((step + 1) / warmup, (steps - step) / (steps - warmup + 1))


def world_size() -> int:
    """Processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def my_part(batch: torch.Tensor, device: torch.device) -> torch.Tensor:
    """This rank's sequences of a global batch, so that the text does not depend on the number of processes."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return batch[rank::world_size()].to(device)


def mean_over_ranks(loss: torch.Tensor) -> float:
    """The mean of the ranks' losses; waits for the device."""
    loss = loss.detach().float()
    if dist.is_initialized():
        dist.all_reduce(loss)
    return loss.item() / world_size()


def loss_of(model, batch, options: Options, device: torch.device) -> torch.Tensor:
    """Mean cross entropy of this rank's part of (inputs, targets)."""
    inputs, targets = (my_part(part, device) for part in batch)
    with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Timer:
    """Milliseconds of a `with` block: the host's clock on a CPU, events of the stream on a GPU.

    On a GPU, `read_ms` may be called only after the stream was synchronized.
    """

    def __init__(self, device: torch.device) -> None:
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self.times = [0.0, 0.0]

    def mark(self, end: int) -> None:
        if self.events:
            self.events[end].record()
        self.times[end] = time.perf_counter()

    def __enter__(self) -> None:
        self.mark(0)

    def __exit__(self, *error) -> None:
        self.mark(1)

    def read_ms(self) -> float:
        return self.events[0].elapsed_time(self.events[1]) if self.events else 1e3 * (self.times[1] - self.times[0])


def train(
    options: Options,
    device: torch.device,
    after_step: Callable[[int, torch.optim.Optimizer], None] | None = None,
    collects: Callable[[int], bool] | None = None,
) -> Iterator[Record]:
    """Train and yield a Record per step; every rank has to run it to its end.

    `after_step`: called with the number of the step and the optimizer, on all ranks, outside of the measured times.
    Steps of Muon then collect what `metrics()` of the optimizer returns: all of them, or those whose number `collects`
    accepts. Such a step takes longer. A change binds the optimizer's step anew, inside of the measured times.
    """
    if options.batch % world_size():
        raise ValueError(f"--batch {options.batch} cannot be split over {world_size()} processes")
    train_text, heldout_text = read_corpus(options.data)
    heldout = even_windows(heldout_text, HELDOUT_WINDOWS, options.seq)
    model = make_model(options, device)
    optimizer = make_optimizer(model, options)
    has_metrics = after_step is not None and options.optimizer != "adamw"
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, options.steps))
    order, timer = torch.Generator().manual_seed(options.seed), Timer(device)
    for step in range(1, options.steps + 1):
        if has_metrics:
            optimizer.collect_metrics = collects is None or collects(step)
        began, lr = time.perf_counter(), schedule.get_last_lr()[0]
        loss = loss_of(model, random_windows(train_text, options.batch, options.seq, order), options, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with timer:
            optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        train_loss = mean_over_ranks(loss)  # waits for the device, so the clock below and the timer are right
        seconds = time.perf_counter() - began
        if after_step is not None:
            after_step(step, optimizer)
        heldout_loss = None
        if step % options.eval_every == 0 or step == options.steps:
            with torch.no_grad():
                heldout_loss = mean_over_ranks(loss_of(model, heldout, options, device))
        yield Record(step, lr, train_loss, heldout_loss, 1e3 * seconds, timer.read_ms(),
                     options.batch * options.seq / seconds)


def leave_process_group() -> None:
    """Destroy the process group once all ranks have come to their end and this rank's collectives are complete.

    A process that ends while one of its collectives waits for a slower rank is aborted by torch ("terminate called
    without an active exception", pytorch/pytorch#190489; with Python before 3.14): a thread of gloo releases the
    tensors of the collective while Python is finalized. FSDP2's meshes keep these threads alive until then.
    """
    if dist.get_backend() == "gloo":  # threads of NCCL end with the group
        dist.barrier()
    dist.destroy_process_group()


def write_csv(path: str | Path, records: list[Record]) -> None:
    """One row per step; an empty cell where the held-out loss was not measured."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(entry.name for entry in fields(Record))
        writer.writerows([rounded(value) for value in astuple(record)] for record in records)


def rounded(value: float | None) -> float | None:
    """Six significant digits: more than a clock or a loss deserves, and short enough to read."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def pick_device(local_rank: int) -> torch.device:
    """This process's own GPU where there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def main() -> None:
    """One run, started by hand or by torchrun; rank 0 prints."""
    options = options_of(parser(__doc__).parse_args())
    device = pick_device(int(os.environ.get("LOCAL_RANK", "0")))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    chief = not dist.is_initialized() or dist.get_rank() == 0
    records = []
    for record in train(options, device):
        records.append(record)
        if chief and record.heldout_loss is not None:
            print(f"step {record.step:5d}  loss {record.train_loss:.3f}  held-out {record.heldout_loss:.3f}  "
                  f"{record.tokens_per_s:,.0f} tokens/s  optimizer {record.optimizer_ms:.1f} ms", flush=True)
    if chief and options.out:
        write_csv(options.out, records)
    if dist.is_initialized():
        leave_process_group()


if __name__ == "__main__":
    sys.exit(main())

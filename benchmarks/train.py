"""The optimizer's share of a real training step: a GPT of 1B parameters under FSDP2, bf16 compute, Muon against AdamW.

    make build && python benchmarks/train.py --ranks 8 --out train.csv

The model is that of examples/gpt.py, the text the demo's (bytes of Python source). Weights and gradients are fp32,
compute is bf16. Each optimizer trains the same model on the same text, after warm-up without a wait between steps; a
step's time is from event to event of the device, and so are those of its phases: forward, backward, clipping and the
optimizer's `step()`. Each is the largest over the ranks, then the median, so that phases may add up to more than a
step. One CSV row for each optimizer. AdamW is torch's, fused, on all parameters; Muon steps what is no hidden matrix
with AdamW, too. muon+forward is Muon with overlap_forward=True, muon+backward with overlap_backward=True, muon+graph
with capturable=True. Of muon+forward the time between events around `step()` says nothing: what it takes of the next
forward is in the time of a step. benchmarks/train_parts.py asks why forward and backward take longer with one optimizer
than with another.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]
from corpus import VOCABULARY, even_windows, random_windows, read_corpus  # noqa: E402
from gpt import GPT  # noqa: E402
from rows import add_output, append  # noqa: E402
from step import device_name, join, leave, on_ranks, one_gpu_each, synchronize  # noqa: E402

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={HERE.parent}")

COLUMNS = ("commit gpu ranks model implementation optimizer seed steps tokens train_loss heldout_loss step_ms "
           "optimizer_ms torch run parameters batch seq p80_step_ms compile coefficients forward_ms backward_ms "
           "clip_ms").split()
PHASES = ("forward", "backward", "clip", "optimizer")
LR = {"muon": 1e-2, "normuon": 1e-2, "adamw": 1e-3}  # of matrices, and of what AdamW steps; not tuned for this model
WAYS = ("forward", "backward", "graph")  # after an optimizer's name and a +
HELDOUT_WINDOWS = 64


def main() -> None:
    options = arguments()
    on_ranks(worker, options, options.ranks)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_training(parser)
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon", "normuon"],
                        choices=[*sorted(LR), *(f"{name}+{way}" for name in LR if name != "adamw" for way in WAYS)])
    parser.add_argument("--run", default="eager", choices=["eager", "graph"], help="graph: capturable=True, of Muon")
    parser.add_argument("--warmup", type=int, default=10, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=30, help="timed steps")
    parser.add_argument("--overlap", action="store_true", help="overlap_backward=True, of Muon; needs --clip 0")
    add_output(parser, COLUMNS, "train.csv")
    options = checked(parser)
    ways = {way for name in options.optimizers for way in name.split("+")[1:]}
    if (options.overlap or "backward" in ways) and options.clip:
        parser.error("overlap with backward needs --clip 0")
    if options.run == "graph" and (options.overlap or ways - {"graph"}) or options.overlap and "graph" in ways:
        parser.error("a graph of the whole step overlaps with nothing")
    return options


def add_training(parser) -> None:
    """The options of the model, of its text and of its optimizers."""
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2, help="processes, a GPU each")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch", type=int, default=192, help="sequences per step, over all ranks")
    parser.add_argument("--seq", type=int, default=1024, help="bytes per sequence")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients; 0: as they are")
    parser.add_argument("--compile", action="store_true", help="compile each layer")
    parser.add_argument("--coefficients", default="polar_express", help="ns_coefficients of Muon")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default=None, help="folder whose *.py files are the text")


def checked(parser):
    """The options, once they fit the GPUs here."""
    options = parser.parse_args()
    one_gpu_each(parser, options.ranks)
    if options.batch % options.ranks:
        parser.error(f"--batch {options.batch} cannot be split over {options.ranks} ranks")
    return options


def worker(rank: int, ranks: int, port: int, options) -> None:
    device, rows = join(rank, ranks, port), []
    for name in options.optimizers:
        row = Training(name, rank, device, options).row()
        if rank == 0:
            print({key: row[key] for key in (*COLUMNS[4:13], *COLUMNS[-3:], "run")}, flush=True)
            append(options.out, COLUMNS, [row])
            rows.append(row)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for line in shares(rows):
        print(line, flush=True)
    leave()


class Training:
    """One optimizer's run."""

    def __init__(self, name, rank, device, options):
        self.name, _, way = name.partition("+")
        self.rank, self.device, self.options = rank, device, options
        self.text, self.heldout = read_corpus(options.data)
        self.model = make_model(options, device)
        self.overlap = name != "adamw" and (options.overlap or way == "backward")
        ways = ["overlap"] * self.overlap + [way] * (way in ("forward", "graph"))
        self.run = "eager" if name == "adamw" else "+".join(ways) or options.run
        self.optimizer = make_optimizer(self.model, self.name, options, self.run.split("+"))
        self.order, self.marks, self.loss = torch.Generator().manual_seed(options.seed), [], None

    def step(self) -> None:
        """Forward, backward, the optimizer's step; nothing waits for the device."""
        batch = random_windows(self.text, self.options.batch, self.options.seq, self.order)
        marks = [self.mark()]
        self.loss = self.loss_of(batch)
        marks.append(self.mark())
        with self.optimizer.last_backward() if self.overlap else contextlib.nullcontext():
            self.loss.backward()
        marks.append(self.mark())
        if self.options.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        marks.append(self.mark())
        self.update()
        self.marks.append((*marks, self.mark()))
        self.forget()

    def update(self) -> None:
        self.optimizer.step()

    def forget(self) -> None:
        """The gradients."""
        self.optimizer.zero_grad()

    def loss_of(self, batch):
        inputs, targets = (self.sent(part[self.rank::self.options.ranks]) for part in batch)
        return F.cross_entropy(self.model(inputs).float().flatten(0, 1), targets.flatten())

    def sent(self, part):
        """A part of the text on the device. From memory that is not pinned the copy might wait for the device, and the
        host with it.
        """
        if self.device.type == "cuda":
            part = part.pin_memory()
        return part.to(self.device, non_blocking=True)

    def mark(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, one, other) -> float:
        """ms."""
        return one.elapsed_time(other) if self.device.type == "cuda" else 1e3 * (other - one)

    def row(self) -> dict:
        """Train, and return the CSV's row."""
        options = self.options
        for _ in range(options.warmup):
            self.step()
        self.marks = []
        for _ in range(options.steps + 1):  # the last one ends the step before it
            self.step()
        synchronize(self.device)
        steps = [self.between(a[0], b[0]) for a, b in zip(self.marks, self.marks[1:])]
        phases = [[self.between(*pair) for pair in zip(marks, marks[1:])] for marks in self.marks[:-1]]
        figures = torch.tensor([steps, *zip(*phases)], dtype=torch.float64, device=self.device)
        dist.all_reduce(figures, dist.ReduceOp.MAX)
        steps, *phases = figures.tolist()
        with torch.no_grad():
            heldout = self.loss_of(even_windows(self.heldout, HELDOUT_WINDOWS * options.ranks, options.seq))
        losses = torch.stack([self.loss.detach(), heldout])
        dist.all_reduce(losses)
        train_loss, heldout_loss = (losses / options.ranks).tolist()
        count = options.warmup + options.steps + 1
        parameters = sum(p.numel() for p in self.model.parameters())
        return {
            "commit": options.commit, "gpu": device_name(self.device), "ranks": options.ranks,
            "model": f"gpt_{options.layers}x{options.width}", "optimizer": self.name, "seed": options.seed,
            "implementation": "torch" if self.name == "adamw" else "ours", "steps": count,
            "tokens": count * options.batch * options.seq, "train_loss": round(train_loss, 4),
            "heldout_loss": round(heldout_loss, 4), "step_ms": round(statistics.median(steps), 3),
            **{f"{name}_ms": round(statistics.median(took), 3) for name, took in zip(PHASES, phases)},
            "torch": torch.__version__, "run": self.run, "parameters": parameters,
            "coefficients": "" if self.name == "adamw" else options.coefficients,
            "batch": options.batch, "seq": options.seq, "compile": int(options.compile),
            "p80_step_ms": round(sorted(steps)[int(0.8 * (len(steps) - 1))], 3)}


def make_model(options, device):
    """The model from its seed, sharded by FSDP2 layer by layer; compute in bf16, gradients reduced in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(options.seed)
    model = GPT(VOCABULARY, options.layers, options.width, options.heads).to(device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (options.ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        if options.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def make_optimizer(model, name, options, ways=()):
    """torch's fused AdamW on everything, or Muon on hidden matrices and AdamW on the rest. `ways`: what `run` of a row
    says.
    """
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), LR[name], (0.9, 0.95), weight_decay=0.1, fused=True)
    from kernels import get_kernel

    package = get_kernel("org/optimizer", version=1)
    kind = {"muon": package.Muon, "normuon": package.NorMuon}[name]
    groups = package.get_default_muon_param_groups(model)
    for group in groups:
        group["lr"] = LR[name if group["use_muon"] else "adamw"]
    optimizer = kind(groups, capturable="graph" in ways, overlap_backward="overlap" in ways,
                     overlap_forward="forward" in ways, ns_coefficients=options.coefficients)
    optimizer.updates_return_during(model)
    return optimizer


def shares(rows) -> list[str]:
    """What the optimizers take of a step, and how much longer a step is than with AdamW."""
    base = next((row["step_ms"] for row in rows if row["optimizer"] == "adamw"), None)
    names = [row["optimizer"] + f"+{row['run']}" * (row["run"] != "eager") for row in rows]
    return [f"{name}: {row['optimizer_ms']:.2f} ms of {row['step_ms']:.2f} ms, "
            f"{100 * row['optimizer_ms'] / row['step_ms']:.1f} %"
            + (f"; the step is {100 * (row['step_ms'] / base - 1):+.1f} % against AdamW's" if base else "")
            for name, row in zip(names, rows)]


if __name__ == "__main__":
    main()

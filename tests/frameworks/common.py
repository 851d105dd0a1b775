"""Tiny models and data for the programs of tests/frameworks, digests of their bits, and how programs run."""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
ON_GPUS = torch.cuda.is_available()  # in programs: what `run` shows them
SAID = "RESULT "  # a program prints this and a JSON object, once on each rank
# A program that takes longer prints where each rank is, and ends
LIMIT_S = float(os.environ.get("FRAMEWORK_PROGRAM_S", "450"))
if Path(sys.argv[0]).parent.name == "programs":
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**{**config, **more}))


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count: int = 64):
        self.rows = torch.randint(0, 128, (count, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i], "attention_mask": torch.ones_like(self.rows[i])}


def digest(tensors: dict) -> str:
    """Of the bits of whole tensors; DTensors are gathered, so all ranks have to call it."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        tensor = torch.as_tensor(tensor).detach()
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(name.encode() + tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def bits(model, optimizer) -> list[str]:
    """Digests of the weights and of the state."""
    state = {f"{i}.{key}": value for i, entry in optimizer.state_dict()["state"].items()
             for key, value in entry.items()}
    weights = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    return [digest(weights), digest(state)]


def say(**found) -> None:
    os.write(1, f"\n{SAID}{json.dumps(found)}\n".encode())  # at once: ranks share the pipe


def fabric() -> ModuleType:
    """Fabric, of lightning or of the small wheel lightning-fabric. Skips the test where neither is installed."""
    if importlib.util.find_spec("lightning"):
        return importlib.import_module("lightning.fabric")
    return pytest.importorskip("lightning_fabric")


def fsdp2_on_cpu() -> None:
    """Let accelerate shard on gloo ranks: it offers FSDP on accelerators only. Nothing of FSDP2 is changed.

    Does nothing where there are GPUs.
    """
    if ON_GPUS:
        return
    from accelerate import state
    from accelerate.utils import DistributedType

    original = state.AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type in (DistributedType.MULTI_CPU, DistributedType.FSDP):
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.AcceleratorState.__init__ = init


def megatron_on_cpu() -> None:
    """Let Megatron-Core run on gloo ranks, without dropout: it asks for tensors, types and random states of CUDA."""
    from megatron.core.tensor_parallel import random

    def on_cpu(function):
        def call(*args, **kwargs):
            if "cuda" in str(kwargs.get("device")):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

        return call

    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda *args: None
    random.CudaRNGStatesTracker.fork = lambda self, *args: contextlib.nullcontext()
    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *args: kind(self, *args) if args else kind(self).replace("torch.", "torch.cuda.")


def run(
    program: str, world: int, folder: Path, *args: str, launches_itself: bool = False, on_cpu: bool = False
) -> list[dict]:
    """Run a program of tests/frameworks/programs on `world` ranks; return what each rank said.

    The program finds an empty folder under FOLDER, and GPUs if there is one for each rank, unless `on_cpu`. All that it
    prints is printed here, so pytest shows it with a test that fails. Raises AssertionError where the program fails, or
    takes longer than LIMIT_S.
    """
    alone = world == 1 or launches_itself
    launch = [] if alone else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    path = Path(__file__).parent / "programs" / f"run_{program}.py"
    command = [sys.executable, "-W", "ignore", *launch, str(path), *args]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "FOLDER": str(folder), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1",
           "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if on_cpu or torch.cuda.device_count() < world:
        env |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    elif world == 1:  # else Trainer takes all of them
        env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        printed, _ = process.communicate(timeout=LIMIT_S + 60)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks then
        printed, _ = process.communicate()
    print(f"{program} {' '.join(args)}, rc {process.returncode}:\n{printed}")
    assert process.returncode == 0, f"{program} {' '.join(args)} failed: see what it printed"
    said = [json.loads(line[len(SAID):]) for line in printed.splitlines() if line.startswith(SAID)]
    assert len(said) == world
    return said

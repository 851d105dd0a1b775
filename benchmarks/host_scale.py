"""What a rank of a job of thousands of ranks pays on the host: time of each call of the optimizer, process groups.

    make build && python benchmarks/host_scale.py --out host_scale.csv

Every process is one rank of a large job: torch's process group "fake" has any number of ranks, and its collectives send
nothing. Parameters are DTensors made from the shards of this rank alone. Plans are those of H200s with NCCL. Kernels
are bound as on a GPU, but not launched, so values are garbage. Time on the host, memory, process groups and collectives
are those of a real rank; what a real rank waits for peers and for the device is left out.

A row is a call. memory_forecast: of the plain model on the meta device, sharded over as many ranks. bind: the step
after load_state_dict, which drops the plan. dcp_get, dcp_set: get_optimizer_state_dict and set_optimizer_state_dict.
replan: the step after a layer was frozen. memory_report: before the first step. seconds: of the processor, for one
call; of step the median of five. collectives: that the call issued. groups: numbers of ranks of the process groups that
the call created. peak_mib: of the process until then.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import json
import os
import pstats
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from rows import add_output, append  # noqa: E402

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={Path(__file__).resolve().parents[1]}")

COLUMNS = ("commit torch model layers mesh ranks parameters matrices call seconds collectives groups buckets "
           "peak_mib").split()
MODELS = {  # heads: (of queries, of keys, size); latent: (rank of queries, rank of keys, heads)
    "llama3_70b": dict(layers=80, vocabulary=128256, hidden=8192, heads=(64, 8, 128), mlp=28672, dense=80),
    # config.json of Qwen/Qwen3-235B-A22B: 128 experts of 1536 in every layer
    "qwen3_235b": dict(layers=94, vocabulary=151936, hidden=4096, heads=(64, 4, 128), experts=(128, 1536)),
    # config.json of deepseek-ai/DeepSeek-V3: 256 experts of 2048 and a shared one, from the fourth layer on
    "deepseek_v3": dict(layers=61, vocabulary=129280, hidden=7168, latent=(1536, 512, 128), experts=(256, 2048),
                        shared=2048, mlp=18432, dense=3),
    "tiny": dict(layers=2, vocabulary=64, hidden=32, heads=(4, 2, 8), experts=(8, 24), shared=24, mlp=64, dense=1),
}
MODELS["deepseek_v3_2d"] = MODELS["deepseek_v3"] | {"separate": True}  # a parameter for each matrix of an expert
MODELS["tiny_2d"] = MODELS["tiny"] | {"separate": True}
MESHES = ("fsdp", "hsdp", "tp", "ep", "pp")
TENSOR_RANKS = 8
LARGE = 1 << 14  # elements of a tensor whose values are left out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama3_70b", "qwen3_235b", "deepseek_v3", "deepseek_v3_2d"],
                        choices=MODELS)
    parser.add_argument("--meshes", nargs="+", default=MESHES[:-1], choices=MESHES, help="ep: of models with experts; "
                        "pp: one of two stages, with tp inside (default: all but pp)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 512, 2048])
    parser.add_argument("--layers", type=int, default=None, help="in place of the model's own number")
    parser.add_argument("--group", type=int, default=64, help="ranks that share the experts of a layer (ep), or that "
                        "hold one copy together (hsdp); default: %(default)s")
    parser.add_argument("--profile", nargs="*", default=[], help="calls to print a profile of")
    parser.add_argument("--skip", nargs="*", default=[], help="calls to leave out, of those that nothing else needs")
    parser.add_argument("--plans", type=Path, help="folder for the plan of each process, as JSON")
    add_output(parser, COLUMNS, "host_scale.csv")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return measure(options)
    cases = [(model, mesh, ranks) for model in options.models for mesh in options.meshes for ranks in options.ranks]
    given = {"group": options.group, "layers": options.layers, "commit": options.commit, "plans": options.plans}
    for model, mesh, ranks in cases:
        if mesh == "ep" and "experts" not in MODELS[model]:
            continue
        command = [sys.executable, __file__, "--child", "--models", model, "--meshes", mesh, "--ranks", str(ranks),
                   "--out", str(options.out), "--profile", *options.profile, "--skip", *options.skip]
        for key, value in given.items():
            command += [f"--{key}", str(value)] if value is not None else []
        if subprocess.run(command).returncode:
            print(f"{model}, {mesh}, {ranks} ranks: failed", flush=True)


# The model


def shaped(config: dict, here: range):
    """The model on the meta device, as Hugging Face names it. `here`: the experts of this rank, of separate ones."""
    import torch
    from torch import nn

    D, linear = config["hidden"], lambda rows, columns: nn.Linear(columns, rows, bias=False)

    def mlp(size):
        return nn.ModuleDict({"gate_proj": linear(size, D), "up_proj": linear(size, D), "down_proj": linear(D, size)})

    def attention():
        if "latent" in config:
            q, kv, heads = config["latent"]
            return nn.ModuleDict({
                "q_a_proj": linear(q, D), "q_a_layernorm": nn.RMSNorm(q), "q_b_proj": linear(heads * 192, q),
                "kv_a_proj_with_mqa": linear(kv + 64, D), "kv_a_layernorm": nn.RMSNorm(kv),
                "kv_b_proj": linear(heads * 256, kv), "o_proj": linear(D, heads * 128)})
        queries, keys, size = config["heads"]
        return nn.ModuleDict({"q_proj": linear(queries * size, D), "k_proj": linear(keys * size, D),
                              "v_proj": linear(keys * size, D), "o_proj": linear(D, queries * size)})

    def experts():
        count, size = config["experts"]
        found = nn.ModuleDict({"gate": linear(count, D)})
        if config.get("separate"):
            found["experts"] = nn.ModuleDict({str(number): mlp(size) for number in here})
        else:
            shapes = {"gate_proj": (size, D), "up_proj": (size, D), "down_proj": (D, size)}
            found["experts"] = nn.Module()
            for name, shape in shapes.items():
                found["experts"].register_parameter(name, nn.Parameter(torch.empty(count, *shape)))
        if "shared" in config:
            found["shared_experts"] = mlp(config["shared"])
        return found

    with torch.device("meta"):
        layers = nn.ModuleList([nn.ModuleDict({
            "self_attn": attention(), "mlp": mlp(config["mlp"]) if i < config.get("dense", 0) else experts(),
            "input_layernorm": nn.RMSNorm(D), "post_attention_layernorm": nn.RMSNorm(D)})
            for i in range(config["layers"])])
        return nn.ModuleDict({
            "model": nn.ModuleDict({"embed_tokens": nn.Embedding(config["vocabulary"], D), "layers": layers,
                                    "norm": nn.RMSNorm(D)}),
            "lm_head": linear(config["vocabulary"], D)})


ROWWISE = ("o_proj", "down_proj", "o_b_proj")
WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "gate", "embed_tokens")  # not cut by tensor parallelism


def placed(kind: str, ranks: int, group: int):
    """(name, parameter) -> (mesh, placements) of a kind of MESHES."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    def spread(param):
        """Stacks of experts are cut inside each matrix, as frameworks do with more ranks than experts."""
        return Shard(1 if param.ndim == 3 else 0)

    whole = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    if kind == "fsdp":
        return lambda name, param: (whole, [spread(param)])
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (ranks // group, group), mesh_dim_names=("replicate", "shard"))
        return lambda name, param: (mesh, [Replicate(), spread(param)])
    if kind == "ep":
        mesh = init_device_mesh("cpu", (ranks // group, group), mesh_dim_names=("efsdp", "ep"))

        def place(name, param):
            if ".experts." not in name:
                return whole, [Shard(0)]
            return (mesh, [Shard(1), Shard(0)]) if param.ndim == 3 else (mesh["efsdp"], [Shard(0)])

        return place
    names, sizes = ("fsdp", "tp"), (ranks // TENSOR_RANKS, TENSOR_RANKS)
    if kind == "pp":  # one of two stages
        mesh = init_device_mesh("cpu", (2, sizes[0] // 2, sizes[1]), mesh_dim_names=("pp", *names))["fsdp", "tp"]
    else:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)

    def place(name, param):
        module = name.removesuffix(".weight").rpartition(".")[-1]
        if param.ndim == 1 or module in WHOLE:
            return mesh, [Shard(0), Replicate()]
        rows, columns = param.ndim - 2, param.ndim - 1
        if module in ROWWISE:
            return mesh, [Shard(rows), Shard(columns)]
        return mesh, [_StridedShard(rows, split_factor=TENSOR_RANKS), Shard(rows)]

    return place


def part(package: str, name: str):
    """A module of the package."""
    return importlib.import_module(f"{package}.{name}")


def shard(model, place, package: str) -> None:
    """Replace every parameter by a DTensor of this rank's shard, without memory until it is written."""
    import torch
    from torch import nn

    box_at, as_dtensor = part(package, "params.layout").box_at, part(package, "params.dtensor").as_dtensor
    for prefix, module in model.named_modules():
        for name, param in [entry for entry in module._parameters.items() if entry[1] is not None]:
            mesh, placements = place(f"{prefix}.{name}", param)
            box = box_at(mesh.get_coordinate(), tuple(param.shape), placements, tuple(mesh.shape))
            weight, gradient = (as_dtensor(torch.empty([stop - start for start, stop in box]), param.shape, mesh,
                                           placements, param.stride()) for _ in range(2))
            module._parameters[name] = nn.Parameter(weight)
            module._parameters[name].grad = gradient


# The measurement


class Counted:
    """Counts the collectives that go through torch.distributed, and the process groups that it creates."""

    NAMES = "all_reduce all_gather all_gather_into_tensor all_to_all all_to_all_single broadcast barrier".split()

    def __init__(self, dist) -> None:
        self.collectives, self.groups = Counter(), []
        for name in self.NAMES:
            setattr(dist, name, self._counting(name, getattr(dist, name)))
        create = dist.new_group

        def new_group(ranks=None, *args, **kwargs):
            self.groups.append(len(ranks))
            return create(ranks, *args, **kwargs)

        dist.new_group = new_group

    def _counting(self, name, call):
        def counting(*args, **kwargs):
            self.collectives[name] += 1
            if name == "all_gather":  # so that comparisons between ranks find them equal
                for out in args[0]:
                    out.copy_(args[1])
            # The fake group copies what is sent into what is received, which may be of another size
            return Done() if name.startswith("all_to_all") else call(*args, **kwargs)

        return counting


class Done:
    """A collective that has ended."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


def as_on_gpus(package: str) -> None:
    """Plan for H200s with NCCL, bind kernels as on a GPU, and launch none."""
    import torch

    for name in ("kernels.launch.tile_config", "planning.planner"):
        part(package, name).architecture = lambda *_: "sm90"
    part(package, "params.config").MuonConfig.workspace_limit_bytes = lambda *_: 2 << 30
    part(package, "communication.process_groups").ProcessGroups.can_send_once = lambda *_: True
    part(package, "execution.bucket_updates").LaunchedUpdate.replay = lambda *_: None
    part(package, "execution.elementwise_updates").ElementwiseUpdate.step = lambda *_: None
    # State is neither written nor read: a GPU does both soon, and a CPU would take longer than for all that is measured
    zeros, cast, norm = torch.zeros_like, torch.Tensor.to, torch.linalg.vector_norm

    def zeros_like(tensor, **options):
        return (zeros if tensor.numel() < LARGE else torch.empty_like)(tensor, **options)

    def to(tensor, *args, copy=False, **options):
        is_large = copy and tensor.numel() >= LARGE
        return torch.empty_like(tensor) if is_large else cast(tensor, *args, copy=copy, **options)

    def vector_norm(tensor, *args, **options):
        return norm(tensor if tensor.numel() < LARGE else tensor.reshape(-1)[:1], *args, **options)

    torch.zeros_like, torch.Tensor.to, torch.linalg.vector_norm = zeros_like, to, vector_norm


def measure(options) -> None:
    """One process: a rank of one model on one mesh."""
    os.environ.update(OPTIMIZER_KERNELS="triton", TRITON_INTERPRET="1")
    import torch
    import torch.distributed as dist
    from kernels import get_kernel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    optimizer = get_kernel("org/optimizer", version=1)
    as_on_gpus(optimizer.__name__)
    (name,), (kind,), (ranks,) = options.models, options.meshes, options.ranks
    config = MODELS[name] | ({"layers": options.layers} if options.layers else {})
    count = config.get("experts", (0,))[0]
    every = range(count)
    here = every if kind != "ep" else range(count // options.group)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    model = shaped(config, here)
    shard(model, placed(kind, ranks, options.group), optimizer.__name__)
    params = list(model.parameters())
    counted = Counted(dist)
    row = {"commit": options.commit, "torch": torch.__version__, "model": name, "layers": config["layers"],
           "mesh": kind, "ranks": ranks, "parameters": len(params), "matrices": "", "buckets": ""}

    def call(what, function, times=1):
        if what in options.skip:
            return None
        counted.collectives.clear()
        counted.groups.clear()
        seconds, profile = [], cProfile.Profile() if what in options.profile else None
        for _ in range(times):
            start = time.process_time()
            result = profile.runcall(function) if profile else function()
            seconds.append(time.process_time() - start)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        row.update(call=what, seconds=round(statistics.median(seconds), 4), peak_mib=peak,
                   collectives=sum(counted.collectives.values()) // times,
                   groups=" ".join(map(str, counted.groups)))
        append(options.out, COLUMNS, [row])
        print(f"{name} {kind} {ranks} {what}: {row['seconds']} s, {dict(counted.collectives)} in {times}, "
              f"groups {counted.groups}, {peak} MiB", flush=True)
        if profile:
            pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return result

    call_all(optimizer, model, config, options, row, call)
    dist.destroy_process_group()


def call_all(optimizer, model, config, options, row, call) -> None:
    import torch
    from torch import nn
    from torch.distributed.checkpoint import state_dict as dsd

    groups = call("groups", lambda: optimizer.get_default_muon_param_groups(model))
    opt = call("construct", lambda: optimizer.Muon(groups, lr=1e-3))
    call("memory_report", opt.memory_report)  # before a step, hence of a plan of its own
    call("first_step", opt.step)
    jobs = [update for update, _ in opt._bound.all_jobs if getattr(update, "bucket", None) is not None]
    row.update(buckets=len(jobs), matrices=sum(len(update.bucket.matrices) for update in jobs))
    call("step", opt.step, 5)
    used = sorted(map(len, opt._preparation.process_groups.used), reverse=True)
    print(f"process groups of buckets, by number of ranks: {used}", flush=True)
    report = call("plan_report", opt.plan_report)
    call("print_plan", lambda: str(report))
    if options.plans:
        options.plans.mkdir(parents=True, exist_ok=True)
        file = options.plans / f"{row['model']}_{row['mesh']}_{row['ranks']}.json"
        file.write_text(json.dumps(report.as_dict(), default=str, sort_keys=True))
    saved = call("state_dict", opt.state_dict)
    call("load_state_dict", partial(opt.load_state_dict, saved))
    del saved
    call("bind", opt.step)
    held = call("dcp_get", partial(dsd.get_optimizer_state_dict, model, opt))
    call("dcp_set", partial(dsd.set_optimizer_state_dict, model, opt, held))
    del held
    like = next(p for group in opt.param_groups if group["use_muon"] for p in group["params"] if p.ndim == 2)
    with_local = part(optimizer.__name__, "params.dtensor").with_local
    new = nn.Parameter(with_local(like, like._local_tensor.clone()))
    call("add_param_group", partial(opt.add_param_group, {"params": [("new", new)]}))
    for param in model["model"]["layers"][0].parameters():
        param.requires_grad_(False)
        param.grad = None
    new.grad = torch.empty_like(new)
    call("replan", opt.step)
    del opt
    whole = shaped(config, range(config.get("experts", (0,))[0]))
    plain = optimizer.get_default_muon_param_groups(whole)
    call("memory_forecast", lambda: optimizer.Muon.memory_forecast(plain, ranks=row["ranks"]))


if __name__ == "__main__":
    main()

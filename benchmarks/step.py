"""Time of the whole optimizer step on several GPUs, by model, mode and optimizer; one CSV row for each measurement.

    make build && python benchmarks/step.py --ranks 8 --models gpt2_124m llama3_8b --out step.csv
    ... --runs eager graph --optimizers muon normuon --modes fsdp hsdp hsdp4 tp_fsdp ddp
    ... --optimizers muon dion_muon --runs eager replay --path dion=DIR    beside Dion's Muon, in turns
    ... --models moe_experts --modes ep single       nothing travels; the same experts on one GPU
    ... --modes reduce allreduce                     gradients reduced by the step, and by an all-reduce before it
    ... --modes ddp ddp_sharded                      state on every rank, and at its owner alone (shard_state=True)
    ... --ranks 1 2 4 8 --layers 4 8 16              as it grows
    ... --adamw --turns 3 --optimizers muon muon_metrics    what metrics cost a step with embeddings, norms and biases
    ... --optimizers muon adamw --runs eager replay  beside torch's fused AdamW on the same parameters
    ... --optimizers muon lion muon_offload --adamw    embeddings by Lion; AdamW's averages on the host, too
    ... --models kimi_k2 --modes ep --layers 1 --memory --report    bytes before the first step beside those of a step
    ... --trace traces                               one more step, profiled, for tools/timeline.py
    python benchmarks/plot_step.py step.csv          figures

Weights are 0.02 x normal and gradients 0.01 x normal, fp32. After warm-up, every step is timed between CUDA events,
with a synchronize and a barrier before it; a figure is the largest over the ranks, then the median over the steps.
`median_ms` is of a step that begins on an idle GPU, so that it holds the host's time too. `behind_ms` is of a step that
is queued behind 40 ms of products and a small all-reduce, as in a training run: the host is ahead, and ranks begin
together. `peak_mib` is the most memory that torch had allocated in these steps, with weights and gradients; `state_mib`
the part of the optimizer's state on the GPU. Without a GPU, ranks are CPU processes with gloo, times are the host's and
`behind_ms` stays empty: good to try the script.

Dion. `dion_muon` and `dion_normuon` are Muon and NorMuon of microsoft/dion, installed or in a checkout named by --path,
on the same parameters and gradients, with the same arguments and with Dion's Triton kernels; with `_gram` it takes
gram-newton-schulz in their place. A package that is not installed is left out, and a line says so. With
TORCHDYNAMO_DISABLE=1 nothing of Dion is compiled, which Dion recommends for CUDA graphs; rows are of "dion uncompiled"
then.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import importlib
import importlib.metadata
import math
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from models import ADAMW, ADAMW_BYTES, COPY_BYTES_PER_S, MODELS, floor_ms, shapes_of  # noqa: E402
from rows import add_output, append  # noqa: E402

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={Path(__file__).resolve().parents[1]}")

COLUMNS = ("commit gpu ranks mode model implementation optimizer run median_ms p20_ms p80_ms host_ms first_step_s "
           "extra_mib floor_ms torch triton layers behind_ms peak_mib state_mib").split()
MESHES = {  # mode -> (mesh shape for W ranks, placements as letters)
    "fsdp": lambda W: ((W,), "0"),
    "hsdp": lambda W: ((2, W // 2), "R0"),
    "hsdp4": lambda W: ((4, W // 4), "R0"),
    "tp_fsdp": lambda W: ((W // 2, 2), "01"),
    "ep": lambda W: ((W,), "0"),
    **dict.fromkeys(("ddp", "ddp_sharded", "reduce", "allreduce", "single"), lambda W: None),
}
IN_8_BITS = ("muon_int8", "normuon_int8", "muon_bf16_int8")  # with 8-bit momentum
# With bf16 weights and gradients, rounded to nearest, at random, or as halves of fp32
IN_BF16 = ("muon_bf16", "muon_stochastic", "muon_split16", "muon_bf16_int8", "muon_bf16_offload")
ON_HOST = ("muon_offload", "muon_bf16_offload")  # with all state on the host
WITH_METRICS = ("muon_metrics",)  # with collect_metrics
RULES = ("normuon_columns", "normuon_aspect", "adamuon", "muon_plus", "hyperball", "scion", "dion2",
         "dion3")  # by name, of matrices
AT_OWNERS = {f"{rule}_at_owners": rule for rule in ("adamuon", "normuon", "hyperball")}  # with state_at_owners
OF_OTHERS = ("lion", "sgd", "sign")  # by name, in place of AdamW: with --adamw
FORMS = {  # options of Muon
    **{f"muon_{decay}": {"decay": decay} for decay in ("cautious", "initial", "independent", "lr_squared")},
    "muon_sum": {"momentum_form": "sum"},
    "muon_bias_corrected": {"momentum_form": "bias_corrected"}, "muon_stochastic": {"rounding": "stochastic"},
    "muon_split16": {"master_weights": "split16"}, "muon_qk_clip": {}, "muon_averages_int8": {},
    **{f"{rule}_at_owners": {"rule": rule, "state_at_owners": True} for rule in AT_OWNERS.values()},
    **{rule: {"rule": rule} for rule in RULES},
    # Each rank of 1, 2, 4 or 8 selects from whole blocks, so only selected rows travel
    "dion2_blocks8": {"rule": "dion2", "select": "row", "blocks": 8}, "dion3_blocks8": {"rule": "dion3", "blocks": 8},
    **dict.fromkeys(IN_8_BITS, {"state_dtype": torch.int8}),
    **dict.fromkeys(ON_HOST, {"offload_state": True})}
# More state than momentum in fp32, or in another form
WITH_OTHER_STATE = (*IN_8_BITS, *ON_HOST, "muon_split16", "muon_initial", "muon_sum")
HEADS = {  # model -> (heads, key heads, position of q and of k in a layer), for muon_qk_clip
    "gpt2_124m": (12, 12, 0, 1), "qwen3_1p7b": (16, 8, 0, 2), "llama3_8b": (32, 8, 0, 2), "tiny": (4, 4, 0, 1)}
OPTIMIZERS = dict.fromkeys(("muon", "normuon", "adamw") + IN_8_BITS + IN_BF16 + ON_HOST + WITH_METRICS + RULES
                           + tuple(AT_OWNERS) + OF_OTHERS + tuple(FORMS))
AT_LEAST = {"hsdp": 2, "hsdp4": 4, "tp_fsdp": 2}  # ranks, of which the number has to be a multiple
REDUCED_BYTES = 25 << 20  # of gradients in one all-reduce, as DDP has it
OTHER_WORK = 25, 8192  # so many bf16 products of square matrices of this size take 40 ms on an H100
DION = {f"dion_{module}{end}": (module, name, bool(end)) for module, name in (("muon", "Muon"), ("normuon", "NorMuon"))
        for end in ("", "_gram")}  # -> (module, class, whether its products are gram-newton-schulz's)
DION_MODES = ("fsdp", "ep", "ddp", "single")  # it takes meshes of one dimension and reduced gradients


def main() -> None:
    options = arguments()
    for ranks in options.ranks:
        if left := [mode for mode in options.modes if not fits(mode, ranks)]:
            print(f"left out, since they need multiples of other numbers than {ranks} ranks: {', '.join(left)}")
        options.optimizers = [name for name in options.optimizers if name not in DION or has_dion(name, options.path)]
        on_ranks(worker, options, ranks)


def on_ranks(work, options, ranks: int) -> None:
    """Run work(rank, ranks, port, options) on so many processes, of which one appends each row once it has it: a case
    that fails later takes none with it.
    """
    store = meeting()
    start(work, (ranks, store.port, options), ranks)


def meeting() -> dist.TCPStore:
    """Where ranks find each other for as long as it is kept: its port was free, and no other process gets it."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def start(work, arguments, ranks: int) -> None:
    """Run work(rank, *arguments) on so many processes; without GPUs they share most of what a process imports."""
    mp.set_forkserver_preload(["torch._dynamo"])
    mp.start_processes(work, arguments, ranks, start_method="spawn" if torch.cuda.is_available() else "forkserver")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[torch.cuda.device_count() or 2],
                        help="GPUs, one process each; several numbers are measured one after the other")
    parser.add_argument("--models", nargs="+", default=["gpt2_124m"], choices=MODELS, help="which models' matrices")
    parser.add_argument("--modes", nargs="+", default=["fsdp"], choices=MESHES, help="how the parameters are laid out")
    parser.add_argument("--optimizers", nargs="+", default=["muon"],
                        choices=[*OPTIMIZERS, *DION])
    parser.add_argument("--runs", nargs="+", default=["eager"], choices=["eager", "graph", "replay"],
                        help="graph: step() with capturable=True; replay: of a CUDA graph of one's own that holds a "
                        "step, which is how peers are timed under a graph")
    parser.add_argument("--path", type=Path, default=None, metavar="dion=DIR", help="a checkout of microsoft/dion")
    parser.add_argument("--layers", type=int, nargs="+", default=[None], help="in place of the model's own number")
    parser.add_argument("--adamw", action="store_true",
                        help="also the models' embeddings, norms and biases, by AdamW; the rows' model ends in _adamw")
    parser.add_argument("--turns", type=int, default=1,
                        help="measure all cases of a model so often, in turns; a row for each")
    parser.add_argument("--steps", type=int, default=12, help="timed steps")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them")
    parser.add_argument("--workspace-mib", type=int, default=None, help="workspace_bytes, in MiB")
    parser.add_argument("--trace", type=Path, default=None, help="folder for traces of one more step, one per rank")
    parser.add_argument("--memory", action="store_true",
                        help="print rank 0's memory by kind, planned before the first step and measured after the last")
    parser.add_argument("--report", action="store_true", help="print rank 0's plan_report(), with one more step timed")
    add_output(parser, COLUMNS, "step.csv")
    options = parser.parse_args()
    one_gpu_each(parser, max(options.ranks))
    if options.path:
        name, _, folder = str(options.path).partition("=")
        if name != "dion" or not folder:
            parser.error(f"--path {options.path}: only dion=DIR is known here")
        options.path = Path(folder).resolve()
    if of_dion := sorted(DION.keys() & {*options.optimizers}):
        if options.adamw or (unknown := sorted({*options.modes} - {*DION_MODES})):
            what = "--adamw" if options.adamw else f"--modes {', '.join(unknown)}"
            parser.error(f"{what}: not with {', '.join(of_dion)}; modes of Dion are {', '.join(DION_MODES)}")
    if "replay" in options.runs and not torch.cuda.is_available():
        parser.error("--runs replay needs a GPU: it replays a CUDA graph")
    if options.adamw and (unknown := sorted(set(options.models) - set(ADAMW))):
        parser.error(f"--adamw: {', '.join(unknown)} has no embeddings here; models that have: {', '.join(ADAMW)}")
    if not options.adamw and (without := {*OF_OTHERS, "muon_averages_int8"} & {*options.optimizers}):
        parser.error(f"{', '.join(sorted(without))}: of the parameters that --adamw adds")
    if "muon_qk_clip" in options.optimizers and (unknown := sorted(set(options.models) - set(HEADS))):
        parser.error(f"muon_qk_clip: {', '.join(unknown)} has no heads here; models that have: {', '.join(HEADS)}")
    return options


def worker(rank: int, ranks: int, port: int, options) -> None:
    device = join(rank, ranks, port)
    for case in cases(options, ranks):
        row = measured(rank, ranks, device, options, case)
        gc.collect()  # graphs and hooks make cycles, which hold a model each
        if rank == 0 and row:
            print({k: row[k] for k in (*COLUMNS[2:15], *COLUMNS[17:])}, flush=True)
            append(options.out, COLUMNS, [row])
    leave()


def measured(rank, ranks, device, options, case) -> dict | None:
    """The case's row; None for a case of Dion that fails, which it does on all ranks alike: the others go on."""
    try:
        return Measurement(rank, ranks, device, options, **case).row()
    except Exception as error:
        if case["optimizer"] not in DION:
            raise
        if rank == 0:
            text = " ".join(str(error).split())[:300]
            print(f"left out, {case['optimizer']}, {case['model']}, {case['run']}: {type(error).__name__}: {text}",
                  flush=True)
        return None


def one_gpu_each(parser, ranks) -> None:
    """Tell whoever asks for more ranks than there are GPUs; without any, ranks are processes on the CPU."""
    if 0 < (gpus := torch.cuda.device_count()) < ranks:
        parser.error(f"--ranks {ranks}: each of them takes a GPU, and here are {gpus}")


def fits(mode, ranks) -> bool:
    return ranks % AT_LEAST.get(mode, 1) == 0


def cases(options, ranks):
    """What is measured with so many ranks, in every turn."""
    for model in [model for model in options.models for _ in range(options.turns)]:
        for layers in options.layers:
            for mode in [mode for mode in options.modes if fits(mode, ranks)]:
                for optimizer in options.optimizers:
                    for run in options.runs:
                        if run == "graph" and (optimizer == "adamw" or optimizer in DION):
                            continue  # these have no graph of their own: --runs replay
                        yield {"model": model, "layers": layers, "mode": mode, "optimizer": optimizer, "run": run}


class Measurement:
    """One optimizer on one model's matrices."""

    def __init__(self, rank, ranks, device, options, *, model, layers, mode, optimizer, run):
        self.rank, self.ranks, self.device, self.options = rank, ranks, device, options
        self.model, self.layers, self.mode, self.optimizer, self.run = model, layers, mode, optimizer, run
        self.shapes = shapes_of(model, layers)
        dtype = torch.bfloat16 if optimizer in IN_BF16 else torch.float32
        self.others = shapes_of(model, layers, ADAMW) if options.adamw else []  # stepped by AdamW
        self.params = parameters([*self.shapes, *self.others], mode, ranks, device, dtype)
        self.named = [(f"{number}", p) for number, p in enumerate(self.params)]
        self.clip, self.logits = self.qk_clip() if optimizer == "muon_qk_clip" else (None, {})
        self.opt = self.make()
        has_more = options.adamw and optimizer != "adamw" or optimizer in WITH_OTHER_STATE
        self.state = self.opt.init_state() if has_more else create_state(self.opt, self.params, mode)
        self.flat = flatten([p.grad for p in self.params]) if mode == "allreduce" else []
        if self.flat:
            give_back(self.params, self.flat)

    def make(self):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.params, lr=1e-3, fused=True, capturable=self.run != "eager")
        if self.optimizer in DION:
            return dion_of(self.optimizer, self.options.path, self.params, self.mode)
        from kernels import get_kernel

        package = get_kernel("org/optimizer", version=1)
        replicated = MESHES[self.mode](self.ranks) is None and self.mode != "single"
        shared = {"process_group": dist.group.WORLD} if replicated else {}
        room = self.options.workspace_mib
        kind = package.NorMuon if self.optimizer in ("normuon", "normuon_int8") else package.Muon
        groups = self.named
        if self.others:
            count = len(self.shapes)
            of_others = {"rule": self.optimizer} if self.optimizer in OF_OTHERS else {}
            if self.optimizer == "muon_averages_int8":
                of_others = {"state_dtype": torch.int8}
            groups = [{"params": groups[:count]}, {"params": groups[count:], "use_muon": False, **of_others}]
        form = {**FORMS.get(self.optimizer, {}), "qk_clip": self.clip}
        opt = kind(
            groups, **form, lr=1e-3, adjust_lr_fn="match_rms_adamw", grads_are_reduced=self.mode != "reduce",
            shard_state=self.mode == "ddp_sharded", capturable=self.run == "graph",
            workspace_bytes=None if room is None else room << 20, **shared)
        opt.collect_metrics = self.optimizer in WITH_METRICS
        return opt

    def qk_clip(self) -> tuple:
        """QK-clip of the queries and keys of all layers, and largest logits of which half are above the threshold."""
        from kernels import get_kernel

        heads, key_heads, q, k = HEADS[self.model]
        own = len(self.shapes) // (count := self.layers or max(count for count, _ in MODELS[self.model]))
        layers = {f"layer{i}": {"heads": heads, "kv_heads": key_heads, "weights": {
            f"{i * own + q}": "q", f"{i * own + k}": "k"}} for i in range(count)}
        logits = torch.tensor([90.0, 110.0], device=self.device).repeat(heads)[:heads]
        clip = get_kernel("org/optimizer", version=1).QKClip(100.0, layers)
        return clip, {"qk_logits": dict.fromkeys(layers, logits)}

    def step(self):
        """What is timed: the optimizer's step, with the gradients' all-reduce where that is the mode."""
        for work in [dist.all_reduce(flat, async_op=True) for flat in self.flat]:
            work.wait()
        self.opt.step(**self.logits)

    def row(self) -> dict:
        """The CSV's row."""
        synchronize(self.device)
        planned = self.opt.memory_report() if self.options.memory and hasattr(self.opt, "memory_report") else None
        before = allocated(self.device)
        start = time.perf_counter()
        self.step()
        synchronize(self.device)
        first_s = time.perf_counter() - start
        for _ in range(self.options.warmup):
            self.step()
        if self.run == "replay":
            self.replay()
        times, hosts = zip(*(timed(self.step, self.device) for _ in range(self.options.steps)))
        most = peak(self.device)
        behind = timed_behind(self.step, self.device, self.options.steps) if self.device.type == "cuda" else []
        self.look()
        if planned is not None and self.rank == 0:
            print(beside(planned, self.opt.memory_report(), most), flush=True)
        bytes_of_rank = most - before, most, self.state_bytes()
        figures = torch.tensor([*times, *hosts, *behind, first_s, *bytes_of_rank], dtype=torch.float64,
                               device=self.device)
        dist.all_reduce(figures, dist.ReduceOp.MAX)
        times, hosts, behind = (part.tolist() for part in figures[:-4].split([len(times), len(hosts), len(behind)]))
        first_s, *mib = figures[-4].item(), *(figures[-3:] / 2**20).tolist()
        quantiles = statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else times * 4
        return {
            "commit": self.options.commit, "gpu": device_name(self.device), "ranks": self.ranks,
            "mode": self.mode, "model": self.model + "_adamw" * bool(self.others),
            "implementation": implementation(self.optimizer),
            "optimizer": self.optimizer, "run": self.run,
            "median_ms": round(statistics.median(times), 4), "p20_ms": round(quantiles[0], 4),
            "p80_ms": round(quantiles[3], 4), "host_ms": round(statistics.median(hosts), 4),
            "first_step_s": round(first_s, 3), "extra_mib": round(mib[0], 1),
            "floor_ms": round(self.floor_ms(), 4), "torch": torch.__version__, "triton": triton_version(),
            "layers": self.layers or "", "behind_ms": round(statistics.median(behind), 4) if behind else "",
            "peak_mib": round(mib[1], 1), "state_mib": round(mib[2], 3)}

    def state_bytes(self) -> int:
        """Of the optimizer's state on this rank's device."""
        found = [t for of in self.opt.state.values() for t in of.values() if isinstance(t, torch.Tensor)]
        found = [t.to_local() if hasattr(t, "to_local") else t for t in found]
        return sum(t.nbytes for t in found if t.device.type == self.device.type)

    def replay(self) -> None:
        """From now on a step is the replay of a graph that holds one."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.opt.step(**self.logits)
        self.step = graph.replay

    def floor_ms(self) -> float:
        """Of this mode; that of a single GPU and of expert parallelism has no all-to-all. AdamW's part is its bytes."""
        mesh = MESHES[self.mode](self.ranks)
        if self.optimizer == "adamw":
            nbytes = ADAMW_BYTES * sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel()
                                       for p in self.params)
            return 1e3 * nbytes / COPY_BYTES_PER_S
        others_ms = 1e3 * ADAMW_BYTES * sum(map(math.prod, self.others)) / COPY_BYTES_PER_S
        if mesh is None:
            alone = self.mode == "single"
            return floor_ms(self.shapes, 1 if alone else self.ranks, 1, self.mode) + others_ms
        copies = mesh[0][0] if mesh[1][0] == "R" else 1
        shards = self.ranks // copies
        return floor_ms(self.shapes, self.ranks, shards, self.mode) + others_ms / shards

    def look(self) -> None:
        """The profiled step and the report, where they were asked for."""
        if self.options.trace is not None:
            self.options.trace.mkdir(parents=True, exist_ok=True)
            name = f"{self.model}_{self.mode}_{self.optimizer}_{self.run}_{self.ranks}ranks_rank{self.rank}.json.gz"
            trace(self.step, self.device, self.options.trace / name)
        if self.options.report and hasattr(self.opt, "plan_report"):
            self.opt.timing = True
            self.step()
            self.opt.timing = False
            if self.rank == 0:
                print(self.opt.plan_report(), flush=True)


def beside(planned, measured, most: int) -> str:
    """Two memory reports as a table of MiB by kind and place, and what torch had allocated at most."""
    lines = ["memory of rank 0 in MiB         planned   measured"]
    for kind in dict.fromkeys(row.kind for row in (*planned.rows, *measured.rows)):
        for where in ("device", "host"):
            sizes = [report.bytes_of(kind, where=where) / 2**20 for report in (planned, measured)]
            if any(sizes):
                lines.append(f"{kind:12} {where:12} {sizes[0]:14.2f} {sizes[1]:10.2f}")
    sizes = [report.bytes_of(where="device") / 2**20 for report in (planned, measured)]
    lines += [f"{'sum':12} {'device':12} {sizes[0]:14.2f} {sizes[1]:10.2f}",
              f"torch had allocated at most {most / 2**20:.2f}"]
    return "\n".join(lines)


def implementation(optimizer: str) -> str:
    """Whose optimizer it is: ours, torch's or Dion's."""
    if optimizer in DION:
        return "dion uncompiled" if os.environ.get("TORCHDYNAMO_DISABLE") == "1" else "dion"
    return "torch" if optimizer == "adamw" else "ours"


def has_dion(name: str, folder: Path | None) -> bool:
    """Whether Dion's optimizer of this name can be imported from its checkout or as installed; else a line says why."""
    from trajectories import Missing

    try:
        dion_class(name, folder)
        if DION[name][2]:
            importlib.import_module("gram_newton_schulz")
    except (Missing, ImportError) as error:
        print(f"left out, {name}: {error}", flush=True)
        return False
    return True


def dion_class(name: str, folder: Path | None) -> type:
    """The class of Dion's optimizer. Raises Missing or ImportError."""
    from trajectories import Place, alone

    module, class_name, _ = DION[name]
    return getattr(alone(Place("dion", folder).root("dion") / "dion", module), class_name)


def dion_of(name: str, folder: Path | None, params: list, mode: str) -> torch.optim.Optimizer:
    """Dion's optimizer with our defaults. Its mesh is that of the parameters, the group of all ranks with ddp."""
    mesh = getattr(params[0], "device_mesh", dist.group.WORLD if mode == "ddp" else None)
    return dion_class(name, folder)(
        params, mesh, lr=1e-3, mu=0.95, weight_decay=0.1, nesterov=True, adjust_lr="rms_norm",
        use_gram_newton_schulz=DION[name][2], use_triton=params[0].is_cuda)


def trace(step, device, path) -> None:
    """Write a Chrome trace of one step, marked as "step"."""
    from torch.profiler import record_function

    dist.barrier()
    settle(device)
    with profiled(device) as profiler:
        step()  # the first one under a profiler is slow
        synchronize(device)
        dist.barrier()
        with record_function("step"):
            step()
            synchronize(device)
        settle(device)
    export(profiler, path)


def profiled(device):
    """A profiler of the host and of the device."""
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda"))


def export(profiler, path) -> None:
    """Write a Chrome trace, compressed."""
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    path.write_bytes(gzip.compress(plain.read_bytes(), 6))  # torch itself compresses line by line, which takes longer
    plain.unlink()


def create_state(opt, params, mode):
    """Momentum that is there before memory is measured, as in a run that goes on (targets count what the step adds)."""
    if mode in ("reduce", "ddp_sharded") or not hasattr(opt, "init_state"):  # not ours
        return None
    for p in params:
        opt.state[p]["momentum_buffer"] = torch.zeros_like(p.detach(), dtype=torch.float32)


def parameters(shapes, mode, ranks, device, dtype=torch.float32) -> list:
    """Parameters with gradients, as DTensors on the mode's mesh or plain and equal on all ranks."""
    layout, generator = MESHES[mode](ranks), torch.Generator(device).manual_seed(0)
    if layout is not None:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh(device.type, layout[0])
        placements = [Replicate() if letter == "R" else Shard(int(letter)) for letter in layout[1]]
        # A vector has no columns to shard
        of_vectors = [Replicate() if p.is_shard(1) else p for p in placements]

    def normal(shape, size):
        whole = torch.randn(shape, device=device, generator=generator).mul_(size).to(dtype)
        if layout is None:
            return whole
        chosen = placements if len(shape) > 1 else of_vectors
        return distribute_tensor(whole, mesh, chosen, src_data_rank=None).clone()  # not a view of the whole

    params = [nn.Parameter(normal(shape, 0.02)) for shape in shapes]
    for p in params:
        p.grad = normal(p.shape, 0.01)
    return params


def flatten(gradients) -> list:
    """Flat tensors of about 25 MiB that hold the gradients one after another, as DDP reduces them."""
    flats, parts, nbytes = [], [], 0
    for gradient in gradients:
        parts.append(gradient.flatten())
        nbytes += gradient.nbytes
        if nbytes >= REDUCED_BYTES:
            flats, parts, nbytes = [*flats, torch.cat(parts)], [], 0
    return [*flats, torch.cat(parts)] if parts else flats


def give_back(params, flats) -> None:
    """Let the gradients be views of the flat tensors."""
    rest, views = list(params), []
    for flat in flats:
        at = 0
        while rest and at < flat.numel():
            p = rest.pop(0)
            views.append((p, flat[at:at + p.numel()].view(p.shape)))
            at += p.numel()
    for p, view in views:
        p.grad = view


def timed(step, device) -> tuple[float, float]:
    """(device ms, host ms) of one call; on a CPU both are the host's."""
    synchronize(device)
    dist.barrier()
    synchronize(device)
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return (1e3 * (time.perf_counter() - start),) * 2
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start = time.perf_counter()
    begin.record()
    step()
    end.record()
    host_ms = 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    return begin.elapsed_time(end), host_ms


def timed_behind(step, device, count: int) -> list[float]:
    """Device ms of so many steps, each queued behind OTHER_WORK and an all-reduce that all ranks wait for."""
    products, size = OTHER_WORK
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out, flag = torch.empty_like(left), torch.ones(8, device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        dist.barrier()
        for _ in range(products):
            torch.mm(left, right, out=out)
        dist.all_reduce(flag)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def join(rank: int, ranks: int, port: int) -> torch.device:
    """Become one of so many ranks, by NCCL on a GPU of one's own or by gloo on a CPU, as torchrun would have it; return
    the device.
    """
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    device, where = pick_device(rank), {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        where = {"device_id": device}
    dist.init_process_group("nccl" if where else "gloo", store=meet(port), rank=rank, world_size=ranks, **where)
    return device


def leave() -> None:
    """Destroy the process group once all ranks have come to their end and this rank's collectives are complete: torch
    may abort a process that ends while gloo still holds one (docs/reliability.md).
    """
    if dist.get_backend() == "gloo":  # threads of NCCL end with the group
        dist.barrier()
    dist.destroy_process_group()


def pick_device(rank) -> torch.device:
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


def synchronize(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def settle(device) -> None:
    """Wait for gloo's threads, which must not be at work when a profiler begins or ends."""
    if device.type != "cuda":
        dist.barrier()
        time.sleep(0.2)


def allocated(device) -> int:
    """Bytes allocated now; the peak is counted from here on."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak(device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def device_name(device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else f"CPU ({platform.machine()}), gloo"


def triton_version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("triton")
    return ""


if __name__ == "__main__":
    main()

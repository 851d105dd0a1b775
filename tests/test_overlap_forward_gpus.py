"""Updates that return during the next forward, on GPUs: the bits of steps that are waited for.

Updates are slowed down, so that a forward which did not wait would be over before the first of them; and it is shown
that one which does not wait has other bits. What a model frees is overwritten at once.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import everywhere, package, part, run_ranks
from tests.test_muon import same

STEPS = 6  # two to capture, four that are replayed
CYCLES = 40_000_000  # of the GPU's clock, about 20 ms: before each launch that writes weights
WIDTH = 256


class Block(nn.Module):
    """Attention and a feed-forward part, of operations whose sums have one order."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 640), nn.Linear(640, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        weights = (self.query(y) @ self.key(y).mT / WIDTH ** 0.5).softmax(-1)
        x = x + self.out(weights @ self.value(y))
        return x + self.down(self.up(self.last(x)).relu())


class Model(nn.Sequential):
    """Its embedding is frozen: on GPUs that gradient is summed in any order."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Embedding(50, WIDTH), *(Block() for _ in range(6)), nn.Linear(WIDTH, 50, bias=False))
        self[0].weight.requires_grad_(False)


def shard(model, world, way):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape = (2, world // 2) if way == "hsdp" else (world,)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replica", "shard")[-len(shape):])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if way == "narrow" else None
    more = {"mesh": mesh, **({"mp_policy": policy} if policy else {})}
    blocks = list(model)[1:-1]
    for block in blocks:
        fully_shard(block, **more)
    fully_shard(model, **more)
    if way == "prefetch":
        for block, following in zip(blocks, blocks[1:]):
            block.set_modules_to_forward_prefetch([following])


def slowed(patch) -> None:
    """The optimizer's stream takes its time."""
    bound = part("execution.bucket_updates").LaunchedUpdate
    at_home = part("execution.elementwise_updates").ElementwiseUpdate
    replay, run = bound.replay, at_home.run

    def replay_late(self, step, *constants):
        if step.__name__ in ("apply", "step"):
            torch.cuda._sleep(CYCLES)
        replay(self, step, *constants)

    def run_late(self, hp):
        torch.cuda._sleep(CYCLES)
        yield from run(self, hp)

    patch.setattr(bound, "replay", replay_late)
    patch.setattr(at_home, "run", run_late)


def broken(patch, what) -> None:
    """Nobody waits; FSDP2's streams do not; gradients are let go."""
    late, waiting = part("execution.overlap.forward").ForwardOverlap, part("execution.overlap.module_hooks")
    if what == "waits":
        patch.setattr(late, "wait_for_event", lambda self, stream, place: None)
    elif what == "gates":
        patch.setattr(waiting.UnshardHook, "__call__", lambda self, async_op=False: self.gather(async_op))
    elif what == "gradients":
        keep = late.after_buckets

        def keep_nothing(self):
            keep(self)
            self.held_gradients.clear()

        patch.setattr(late, "after_buckets", keep_nothing)


def optimizer_of(model, way, mode):
    """For "head", the last matrix is AdamW's, which is done early: the root, which has it, does not wait for all."""
    params, head = [p for p in model.parameters() if p.requires_grad], model[-1].weight if way == "head" else None
    is_muons = [p.ndim > 1 and p is not head for p in params]
    groups = [{"params": [p for p, is_muon in zip(params, is_muons) if is_muon]},
              {"params": [p for p, is_muon in zip(params, is_muons) if not is_muon], "use_muon": False, "lr": 1e-3}]
    options = {"overlap_forward": mode != "usual"}
    if way == "unreduced":
        options |= {"process_group": dist.group.WORLD, "grads_are_reduced": False}
    if way == "early":
        options["overlap_backward"] = True
    opt = package().NorMuon(groups, lr=0.02, **options)
    if mode != "untold":
        opt.updates_return_during(model)
    return opt


def trained(rank, world, way, mode, what=None):
    """(weights and state, at which steps the host and the current stream were ahead of the updates, how many parts are
    replayed). `mode`: "late"; "usual"; "untold": the option without a model. `what` is broken.
    """
    with pytest.MonkeyPatch.context() as patch:
        everywhere(patch, part("planning.planner"), "latency_bytes", lambda arch: 0)  # several buckets, however small
        if mode == "late":
            slowed(patch)
            broken(patch, what)
        model = Model().cuda()
        if way not in ("plain", "unreduced"):
            shard(model, world, way)
        opt, ahead = optimizer_of(model, way, mode), []
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * step + rank)
            for last in (False, True):  # two micro-batches
                if hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(last)
                loss = model(torch.randint(50, (4, 32), generator=generator).cuda()).float().square().mean()
                with opt.last_backward() if last else contextlib.nullcontext():
                    loss.backward()
            opt.param_groups[0]["lr"] = 0.02 / (1 + step)
            opt.step()
            here = torch.cuda.Event()
            here.record()
            overwrite(model, opt)
            here.synchronize()
            ahead.append(bool(opt._forward_overlap.events) and not opt._forward_overlap.events[-1].query())
        opt.wait()
        torch.cuda.synchronize()
        assert mode != "late" or world == 1 or way == "early" or len(opt._forward_overlap.events) > 8
        parts = opt._preparation.graphs.parts.values()
        return states(model, opt), ahead, sum(known.graph is not None for known in parts)


def overwrite(model, opt) -> None:
    """Let gradients go, and fill the memory that is free then."""
    local = part("params.dtensor").local_of
    likes = [local(p.grad) for p in model.parameters() if p.grad is not None]
    sizes = [(g.shape, g.dtype) for g in likes]
    likes.clear()
    opt.zero_grad()
    for _ in [torch.full(shape, float("nan"), dtype=dtype, device="cuda") for shape, dtype in sizes]:
        pass


def states(model, opt):
    local = part("params.dtensor").local_of
    return [local(t).detach().cpu() for p in model.parameters()
            for t in (p, *(opt.state[p].values() if p in opt.state else ()))]


def runs(world, way, *modes):
    return [run_ranks(world, trained, way, *mode, backend="nccl", timeout=150) for mode in modes]


def check(world, way) -> None:
    """Late steps have the bits of the usual ones, which have those of their repetition."""
    base = ("untold",) if way == "unreduced" else ("usual",)
    late, usual, again = runs(world, way, ("late",), base, base)
    for (ours, ahead, parts), (theirs, never, _), (repeated, _, _) in zip(late, usual, again):
        assert same(theirs, repeated), "the model itself has other bits in every run"
        assert same(ours, theirs)
        assert all(torch.isfinite(t).all() for t in ours)
        assert all(ahead[2:]), "nothing was late"
        assert not any(never) and parts > 0


def check_broken(world, way, what) -> None:
    """Without some of the waits, slowed steps do not have the bits."""
    base = ("untold",) if way == "unreduced" else ("usual",)
    late, usual = runs(world, way, ("late", what), base)
    assert any(not same(ours, theirs) for (ours, *_), (theirs, *_) in zip(late, usual))


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["plain", "fsdp", "narrow", "unreduced"])
def test_one_gpu_has_the_bits_of_steps_that_are_waited_for(way, optimizer):
    check(1, way)


@pytest.mark.gpu
@pytest.mark.parametrize("way, what", [("plain", "waits"), ("fsdp", "waits"), ("plain", "gradients")])
def test_one_gpu_has_other_bits_without_the_waits(way, what, optimizer):
    check_broken(1, way, what)


@pytest.mark.gpus(2)
@pytest.mark.gpu
@pytest.mark.parametrize("way", ["fsdp", "head", "narrow", "prefetch", "hsdp", "unreduced", "early"])
def test_two_gpus_have_the_bits_of_steps_that_are_waited_for(way, optimizer):
    check(2, way)


@pytest.mark.gpus(2)
@pytest.mark.gpu
@pytest.mark.parametrize("way, what", [("fsdp", "waits"), ("head", "waits"), ("head", "gates"),
                                       ("unreduced", "waits"), ("unreduced", "gradients")])
def test_two_gpus_have_other_bits_without_the_waits(way, what, optimizer):
    check_broken(2, way, what)


@pytest.mark.gpus(4)
@pytest.mark.gpu
@pytest.mark.parametrize("way", ["fsdp", "hsdp"])
def test_four_gpus_have_the_bits_of_steps_that_are_waited_for(way, optimizer):
    check(4, way)

"""Small state on every layout and in every way to step: state in host memory and fp32 weights in two halves have the
bits of fp32 weights and state on one process, weights that are rounded at random those of one process.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import package, part, run_threads
from tests.test_units import OWNERS, layouts, placed

BF16, FP32 = torch.bfloat16, torch.float32
OPTIONS = {
    "fp32": {}, "halves": {"master_weights": "split16"}, "host memory": {"offload_state": True},
    "bf16": {"rounding": "stochastic"}, "at random": {"rounding": "stochastic"},
}
REFERENCE = {"halves": "fp32", "host memory": "fp32", "at random": "bf16"}  # of one process
SHAPES = [(12, 8), (8, 12), (4, 8, 8), (12, 4), (16,)]  # the last two are AdamW's
STEPS = 2
ALL = ("hsdp", "ep x fsdp rows", "tp rows x fsdp columns", "tp rows x fsdp rows, strided")  # of these, all options
# Other layouts take the options in turn
PAIRS = [(layout, [*REFERENCE] if layout in ALL else [[*REFERENCE][number % 3]])
         for number, layout in enumerate(layouts()) if layout != "one process"]


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    """A step has many parts."""
    monkeypatch.setattr(part("execution.offload.offload"), "LEAST_SLOT", 1024)
    monkeypatch.setattr(part("execution.offload.updates"), "CUT", 16)


def made(option, place=lambda i, full: full.clone(), **more):
    """(parameters, optimizer) with equal weights in every call."""
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(shape, generator=generator) for shape in SHAPES]
    dtype = FP32 if option in ("fp32", "host memory") else BF16
    params = [nn.Parameter(place(i, w.to(dtype))) for i, w in enumerate(wide)]
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    groups = [{"params": named[:3]}, {"params": named[3:], "use_muon": False, "lr": 0.01}]
    opt = package().NorMuon(groups, lr=0.01, **OPTIONS[option], **more)
    if option in ("fp32", "halves", "host memory"):
        opt.load_master_weights({f"p{i}": w for i, w in enumerate(wide)})
    return params, opt


def gradients(step):
    """Multiples of 1/16 that bf16 holds, and their sum over four ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randint(-127, 128, shape, generator=generator) / 16 for shape in SHAPES]


def train(params, opt, steps, place=lambda i, full: full.clone(), change=lambda step, grads: grads):
    for step in steps:
        for i, (p, g) in enumerate(zip(params, change(step, gradients(step)))):
            p.grad = None if g is None else place(i, g.to(p.dtype))
        opt.step()


def local_parts(weights):
    return [part("params.dtensor").local_of(w) for w in weights]


@functools.cache
def one_process(option, steps=STEPS):
    params, opt = made(option)
    train(params, opt, range(steps))
    return list(opt.master_weights().values())


def on_layout(rank, world, layout, options_of):
    """The options whose weights differ from those of one process."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    mesh_shape, *placements = layouts()[layout]
    mesh = init_device_mesh("cpu", mesh_shape) if placements else None
    options = {} if mesh or world == 1 else {"process_group": dist.group.WORLD}
    options |= {OWNERS[0]: {"shard_state": True}, OWNERS[1]: {"grads_are_reduced": False}}.get(layout, {})

    def place(i, full):
        if mesh is None:
            return full.clone()
        of_vectors = [Shard(0) if one.is_shard(0) else Replicate() for one in placements[0]]
        return placed(full, mesh, of_vectors if full.ndim == 1 else placements[full.ndim - 2])

    wrong = []
    for option in options_of:
        params, opt = made(option, place, **options)
        train(params, opt, range(STEPS), place)
        found = local_parts(opt.master_weights().values())
        expected = local_parts(place(i, full) for i, full in enumerate(one_process(REFERENCE[option])))
        wrong += [(option, i) for i, pair in enumerate(zip(found, expected)) if not torch.equal(*pair)]
    return wrong


@pytest.mark.parametrize("layout, options", PAIRS, ids=str)
def test_every_layout_has_the_bits_of_one_process(layout, options, optimizer):
    for option in options:  # before the threads, which would each step it
        after, before = (one_process(REFERENCE[option], steps) for steps in (STEPS, 0))
        assert all((w - v).abs().max() > 1e-3 for w, v in zip(after, before))
    for wrong in run_threads(math.prod(layouts()[layout][0]), on_layout, layout, options):
        assert wrong == []


def missing_on(rank, step, grads):
    """In step 1 the first matrix and the first parameter of AdamW have a gradient on rank 1 only, the second matrix
    nowhere.
    """
    gone = {1} | ({0, 3} if rank == 0 else set()) if step == 1 else ()
    return [None if i in gone else g for i, g in enumerate(grads)]


def some_are_missing(rank, world, option):
    """Local weights and state after steps under FSDP2 rows in which some ranks lack gradients."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    params, opt = made(option, lambda i, full: placed(full, mesh, [Shard(0)]))
    train(params, opt, range(3), lambda i, full: placed(full, mesh, [Shard(0)]),
          lambda step, grads: missing_on(rank, step, grads))
    return [w.full_tensor() for w in opt.master_weights().values()]


@pytest.mark.parametrize("option", ["halves", "host memory"])
def test_gradients_that_are_missing_on_some_ranks(option, optimizer):
    """Zeros stand in on the ranks without one, as in steps of one process with zeros in these rows."""
    params, opt = made("fp32")

    def zeros(step, grads):
        grads = missing_on(1, step, grads)
        for i in (0, 3) if step == 1 else ():
            grads[i] = torch.cat([torch.zeros_like(grads[i][:6]), grads[i][6:]])  # rows of rank 0
        return grads

    train(params, opt, range(3), change=zeros)
    for found in run_threads(2, some_are_missing, option):
        assert all(map(torch.equal, found, (p.detach() for p in params)))


@pytest.mark.parametrize("option", ["halves", "host memory"])
@pytest.mark.parametrize("in_step", [False, True])
def test_a_scaler_leaves_out_steps_with_inf(option, in_step, optimizer):
    """Step 2 has an Inf in the gradient of a matrix, and is none."""
    plain, other = made("fp32")
    train(plain, other, (0, 1, 3))
    params, opt = made(option, unscale_in_step=in_step)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        for p, g in zip(params, gradients(step)):
            p.grad = None
            scaler.scale((p * g.to(p.dtype)).sum()).backward()
        if step == 2:
            params[0].grad[3, 3] = math.inf
        scaler.step(opt)
        scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(map(torch.equal, opt.master_weights().values(), (p.detach() for p in plain)))

"""Units inside a parameter: a parameter with `split` steps as separate parameters do, to the last bit, on every layout.

The separate parameters are stepped in one process. `indices_of` cuts a parameter on its own, with plain torch.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import package, part, run_ranks, run_threads
from tests.test_bucket_updates import cut
from tests.test_same_bits import mine, shown_state

NAMES, STEPS, LR = ["Muon", "NorMuon"], 3, 0.1
KERNELS = [(3,), (1, 1), (2, 3), (3, 3), (1, 2, 2)]  # of convolutions
OWNERS = "ddp, state at owners", "unreduced"  # layouts whose state owners keep


# the reference -----------------------------------------------------------------------------------------------------

def blocks(form, dim, size):
    """The indices of each block of rows (dim 0) or of columns (dim 1) of a matrix as stored."""
    numbers, form = torch.arange(size), {} if form is None else form
    if "heads" in form and form.get("dim", 0) == dim:
        return list(numbers.chunk(form["heads"]))
    key = ("rows", "columns")[dim]
    if key not in form:
        return [numbers]
    repeat = form.get("repeat", 1) if key == "rows" or "rows" not in form else 1
    return [block.flatten() for block in numbers.view(repeat, -1).split(form[key], 1)]


def indices_of(shape, form, transposed=False):
    """The index in the flattened parameter of each element of each unit."""
    numbers = torch.arange(math.prod(shape)).view(shape)
    if form == "flatten":
        found = [numbers.flatten(1)]
    elif form == "taps":
        found = numbers.flatten(2).unbind(2)
    else:
        rows, columns = (blocks(form, dim, shape[dim - 2]) for dim in (0, 1))
        found = [m[r][:, c] for m in numbers.view(-1, *shape[-2:]) for r in rows for c in columns]
    return [(unit.mT if transposed else unit).contiguous() for unit in found]


def taken(full, indices):
    """The units of a whole tensor."""
    return [full.flatten()[unit] for unit in indices]


def put(units, indices, shape):
    """The tensor of the parameter's shape that has these units."""
    whole = units[0].new_empty(math.prod(shape))
    for unit, index in zip(units, indices, strict=True):
        whole[index] = unit.expand(index.shape)
    return whole.view(shape)


def row_state_of(whole, form, transposed):
    """Row state as the optimizer keeps it: one in place of the columns of each block of columns of a unit."""
    if isinstance(form, str):
        if transposed:
            return whole[:1]
        return whole[:, :1] if form == "taps" else whole.flatten(1)[:, :1].view(-1, *[1] * (whole.ndim - 1))
    dim = -2 if transposed else -1
    firsts = torch.stack([block[0] for block in blocks(form, dim + 2, whole.shape[dim])])
    return whole.index_select(dim, firsts)


def separate(name, problem):
    """Weight and state of each parameter, put together from those of separate parameters after the steps."""
    indices = [indices_of(*member) for member in problem["members"]]
    of_member = [[nn.Parameter(u) for u in taken(full, i)] for full, i in zip(problem["fulls"], indices)]
    optimizer = getattr(package(), name)(sum(of_member, []), lr=LR, **problem["options"])
    for gradients in problem["gradients"]:
        for units, gradient, index in zip(of_member, gradients, indices):
            for p, g in zip(units, taken(gradient, index)):
                p.grad = g
        optimizer.step()
    found = []
    for (shape, form, transposed), units, index in zip(problem["members"], of_member, indices):
        tensors = {"weight": put([p.detach() for p in units], index, shape)}
        for key in optimizer.state[units[0]]:
            tensors[key] = put([optimizer.state[p][key] for p in units], index, shape)
        if "second_moment" in tensors:
            tensors["second_moment"] = row_state_of(tensors["second_moment"], form, transposed)
        found.append(tensors)
    return found


# random problems ---------------------------------------------------------------------------------------------------

def sizes(rng, multiple):
    """Sizes of blocks; their sum is a multiple."""
    found = [rng.randint(1, 9) for _ in range(rng.randint(1, 4))]
    found[-1] += -sum(found) % multiple
    return found


def matrix_form(rng, multiple, transposed):
    """(form, rows, columns), both numbers multiples."""
    free = multiple * rng.randint(1, max(1, 20 // multiple))
    kind = rng.choice(["rows", "columns", "both", "repeat", "repeat columns", "heads", "heads of columns", "none"])
    blocks_, repeat, heads = sizes(rng, multiple), rng.randint(2, 4), rng.randint(2, 5)
    width = multiple * rng.randint(1, max(1, 8 // multiple))
    if kind == "rows":
        return {"rows": blocks_}, sum(blocks_), free
    if kind == "columns":
        return {"columns": blocks_}, free, sum(blocks_)
    if kind == "both":
        other = sizes(rng, multiple)
        return {"rows": blocks_, "columns": other}, sum(blocks_), sum(other)
    if kind == "repeat":
        return {"rows": blocks_, "repeat": repeat}, repeat * sum(blocks_), free
    if kind == "repeat columns":
        return {"columns": blocks_, "repeat": repeat}, free, repeat * sum(blocks_)
    if kind == "heads":
        return {"heads": heads}, heads * width, free
    if kind == "heads of columns":
        return {"heads": heads, "dim": 1}, free, heads * width
    return None, width, free


def member(rng, kind, multiple, may_transpose):
    """(shape, form, transposed) of a "matrix", a "stack" or a "conv"."""
    transposed = may_transpose and rng.random() < 0.3
    if kind == "conv":
        O, I = (multiple * rng.randint(1, 8 // multiple) for _ in "OI")
        if rng.random() < 0.2:
            return (O, I, rng.randint(1, 9)), "flatten", transposed
        return (O, I, *rng.choice(KERNELS)), rng.choice(["flatten", "taps"]), transposed
    form, R, C = matrix_form(rng, multiple, transposed)
    lead = () if kind == "matrix" else (rng.choice([2, 4, 5]),)
    return (*lead, R, C), form, transposed


def problem_of(layout, seed):
    """Random parameters with their splits, gradients and options, as plain values; the same for each seed."""
    rng = random.Random(f"{layout} {seed}")
    is_even = "strided" in layout or "interleaved" in layout
    # NorMuon's row state of a transposed matrix cannot lie at owners, nor interleaved
    options = [4 if is_even else 1, layout not in OWNERS and layout != "interleaved"]
    members = [member(rng, kind, *options) for kind in rng.sample(["matrix", "matrix", "stack", "conv"], 4)]
    if layout == "interleaved":  # torch shards matrices so; of a convolution the optimizer refuses it
        members = [m for m in members if m[1] not in ("flatten", "taps")]
    generator = torch.Generator().manual_seed(seed)

    def gradient(shape):  # the sum over 4 equal ranks is exact
        return torch.randint(-127, 128, shape, generator=generator) / 16

    return {
        "members": members, "form": rng.choice(["list", "groups", "attributes"]),
        "fulls": [torch.randn(shape, generator=generator) for shape, *_ in members],
        "gradients": [[gradient(shape) for shape, *_ in members] for _ in range(STEPS)],
        "options": {"weight_decay": rng.choice([0.0, 0.1]), "wire_dtype": rng.choice([torch.float32, torch.bfloat16]),
                    "adjust_lr_fn": rng.choice([None, "match_rms_adamw", "spectral_norm"]),
                    "nonfinite": rng.choice(["propagate", "skip"])},
        "has_little_room": rng.random() < 0.5,
    }


def built(name, problem, params, **options):
    """An optimizer of the whole parameters, their splits said in one of three ways."""
    members = problem["members"]
    if problem["form"] == "groups":
        groups = [{"params": [p], "split": form, "transposed": t} for p, (_, form, t) in zip(params, members)]
    elif problem["form"] == "list":
        groups = [{"params": params, "split": [m[1] for m in members], "transposed": [m[2] for m in members]}]
    else:
        for p, (_, p.muon_split, p.muon_transposed) in zip(params, members):
            pass
        groups = [{"params": params}]
    return getattr(package(), name)(groups, lr=LR, **problem["options"], **options)


# layouts -----------------------------------------------------------------------------------------------------------

def layouts():
    """name: (mesh shape, placements of a matrix, of a stack, of a convolution); without placements plain parameters."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    R, S = Replicate(), Shard

    def strided(dim):
        return [_StridedShard(dim, split_factor=2), S(dim)]

    return {
        "one process": ((1,),), "ddp": ((3,),), "ddp, state at owners": ((3,),), "unreduced": ((4,),),
        "replicated": ((2,), [R], [R], [R]),
        "fsdp rows": ((2,), [S(0)], [S(1)], [S(0)]),
        "fsdp rows, uneven": ((3,), [S(0)], [S(1)], [S(0)]),
        "fsdp columns": ((3,), [S(1)], [S(2)], [S(1)]),
        "hsdp": ((2, 2), [R, S(0)], [R, S(1)], [R, S(0)]),
        "hsdp columns": ((2, 2), [R, S(1)], [R, S(2)], [R, S(1)]),
        "tp rows x fsdp columns": ((2, 2), [S(1), S(0)], [S(2), S(1)], [S(1), S(0)]),
        "tp columns x fsdp rows": ((2, 2), [S(0), S(1)], [S(1), S(2)], [S(0), S(1)]),
        "tp rows x fsdp rows, strided": ((2, 2), strided(0), strided(1), strided(0)),
        "tp columns x fsdp columns, strided": ((2, 2), strided(1), strided(2), strided(1)),
        "rows over both axes": ((2, 2), [S(0), S(0)], [S(0), S(1)], [S(0), S(0)]),
        "interleaved": ((2,), [_StridedShard(0, split_factor=2)], [_StridedShard(1, split_factor=2)], None),
        "ep": ((3,), [R], [S(0)], [R]),
        "ep, replicated": ((2, 2), [R, R], [R, S(0)], [S(0), R]),
        "ep x fsdp rows": ((2, 2), [S(0), R], [S(1), S(0)], [S(1), R]),
        "ep x fsdp columns": ((2, 2), [R, S(1)], [S(0), S(2)], [S(1), R]),
    }


def placed(full, mesh, placements):
    """The DTensor of a whole tensor. Of interleaved rows, a rank has its part of each half."""
    (placement, *others), rank = placements, mesh.get_local_rank(0)
    if others or type(placement).__name__ != "_StridedShard":
        return cut(full, mesh, placements)
    halves = [half.chunk(mesh.size(), placement.dim)[rank] for half in full.chunk(2, placement.dim)]
    return part("params.dtensor").as_dtensor(torch.cat(halves, placement.dim), full.shape, mesh, placements)


def kind_of(member_):
    return 3 if isinstance(member_[1], str) else len(member_[0]) - 1


def stepped(rank, world, layout, cases):
    """The names of what is not what separate parameters have, for each case."""
    from torch.distributed.tensor import init_device_mesh

    mesh_shape, *placements = layouts()[layout]
    mesh = init_device_mesh("cpu", mesh_shape) if placements else None
    local_of, wrong = part("params.dtensor").local_of, []
    for name, problem, expected in cases:
        ways = [placements[kind_of(m) - 1] for m in problem["members"]] if placements else None

        def place(i, full):
            return placed(full, mesh, ways[i]) if ways else full.clone()

        options = {} if placements or world == 1 else {"process_group": dist.group.WORLD}
        options |= {"shard_state": True} if layout == OWNERS[0] else {}
        options |= {"grads_are_reduced": False} if layout == OWNERS[1] else {}
        if problem["has_little_room"]:
            options["workspace_bytes"] = 150_000 * world
        params = [nn.Parameter(place(i, full)) for i, full in enumerate(problem["fulls"])]
        optimizer = built(name, problem, params, **options)
        for gradients in problem["gradients"]:
            for i, (p, g) in enumerate(zip(params, gradients)):
                p.grad = place(i, g)
            optimizer.step()
        state = shown_state(optimizer) if layout in OWNERS else optimizer.state
        for i, (p, whole) in enumerate(zip(params, expected)):
            ours = {"weight": p.detach(), **state[p]}
            assert ours.keys() == whole.keys()
            for key, value in whole.items():
                assert ours[key].shape == value.shape, (name, problem["members"][i], key, ours[key].shape)
                here = place(i, value) if ways or layout not in OWNERS else mine(value, ours[key])
                if not torch.equal(local_of(ours[key]), local_of(here)):
                    wrong.append((name, *problem["members"][i], key))
    return wrong


def cases_of(layout, seeds):
    problems = [problem_of(layout, seed) for seed in seeds]
    return [(name, problem, separate(name, problem)) for problem in problems for name in NAMES]


SEEDS = range(4)


@pytest.mark.parametrize("layout", layouts())
def test_a_split_parameter_steps_as_separate_parameters(layout, optimizer):
    world = math.prod(layouts()[layout][0])
    for wrong in run_threads(world, stepped, layout, cases_of(layout, SEEDS)):
        assert wrong == []


@pytest.mark.parametrize("layout", ["fsdp rows, uneven", "tp rows x fsdp rows, strided", "unreduced"])
def test_a_split_parameter_steps_as_separate_parameters_in_processes(layout, optimizer):
    """Over gloo, whose collectives do not complete when they are issued."""
    world = math.prod(layouts()[layout][0])
    for wrong in run_ranks(world, stepped, layout, cases_of(layout, [100])):
        assert wrong == []


def test_the_problems_are_many(optimizer):
    members = [m for layout in layouts() for seed in SEEDS for m in problem_of(layout, seed)["members"]]
    kinds = Counter(form if isinstance(form, str) else tuple(form or ()) for _, form, _ in members)
    assert len(kinds) == 10 and min(kinds.values()) >= 5, kinds
    assert sum(t for *_, t in members) > 50

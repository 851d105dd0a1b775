"""Units inside a parameter: a parameter with `split` steps as separate parameters do, to the last bit, on every layout.

The separate parameters are stepped in one process. `indices_of` cuts a parameter on its own, with plain torch.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import package, part, run_ranks, run_threads
from tests.test_bucket_updates import cut
from tests.test_muon import quiet, take
from tests.test_overlap_backward import come
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
    """The index in the flattened parameter of each element of each unit; units by rows first, as stepped."""
    numbers = torch.arange(math.prod(shape)).view(shape)
    if form == "flatten":
        found = [numbers.flatten(1)]
    elif form == "taps":
        found = numbers.flatten(2).unbind(2)
    else:
        rows, columns = (blocks(form, dim, shape[dim - 2]) for dim in (0, 1))
        pairs = [(r, c) for c in columns for r in rows] if transposed else [(r, c) for r in rows for c in columns]
        found = [m[r][:, c] for m in numbers.view(-1, *shape[-2:]) for r, c in pairs]
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
    return whole.index_select(dim, firsts.to(whole.device))


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


def matrix_form(rng, multiple):
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
    form, R, C = matrix_form(rng, multiple)
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
        for p, (_, form, t) in zip(params, members):
            p.muon_split, p.muon_transposed = form, t
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


def place_on(mesh, placements, members):
    """A function: the part of a whole tensor of the parameter of a number. Without a mesh, a copy."""
    def place(i, full):
        return placed(full, mesh, placements[kind_of(members[i]) - 1]) if mesh else full.clone()

    return place


def stepped(rank, world, layout, cases, more=None):
    """The names of what is not what separate parameters have, for each case. `more`: further options."""
    from torch.distributed.tensor import init_device_mesh

    mesh_shape, *placements = layouts()[layout]
    mesh = init_device_mesh("cpu", mesh_shape) if placements else None
    options = {} if mesh or world == 1 else {"process_group": dist.group.WORLD}
    options |= {OWNERS[0]: {"shard_state": True}, OWNERS[1]: {"grads_are_reduced": False}}.get(layout, {})
    wrong = []
    for name, problem, expected in cases:
        place = place_on(mesh, placements, problem["members"])
        wrong += unequal(name, problem, expected, place, layout, world, {**options, **(more or {})})
    return wrong


def unequal(name, problem, expected, place, layout, world, options):
    """(name, parameter, key) of each weight and state that differs from `expected` after the steps."""
    if problem["has_little_room"]:
        options["workspace_bytes"] = 150_000 * world
    params = [nn.Parameter(place(i, full)) for i, full in enumerate(problem["fulls"])]
    optimizer = built(name, problem, params, **options)
    for gradients in problem["gradients"]:
        optimizer.zero_grad()
        with optimizer.last_backward():
            for i in reversed(range(len(params))):
                come(params[i], place(i, gradients[i]))
        optimizer.step()
    optimizer.wait()
    local_of, wrong = part("params.dtensor").local_of, []
    is_shown = layout in OWNERS or options.get("state_at_owners")
    state = shown_state(optimizer) if is_shown else optimizer.state
    for i, (p, whole) in enumerate(zip(params, expected)):
        ours = {"weight": p.detach(), **state[p]}
        assert ours.keys() == whole.keys()
        for key, value in whole.items():
            assert ours[key].shape == value.shape, (name, problem["members"][i], key, ours[key].shape)
            here = mine(value, ours[key]) if layout in OWNERS else place(i, value)
            if not torch.equal(local_of(ours[key]), local_of(here)):
                wrong.append((name, *problem["members"][i], key))
    if layout in OWNERS:
        optimizer.consolidate_state_dict(None)
        consolidated = optimizer.state_dict()["state"]
        wrong += [(name, *problem["members"][i], key, "consolidated") for i, whole in enumerate(expected)
                  for key in consolidated[i] if not torch.equal(consolidated[i][key], whole[key])]
    return wrong


def cases_of(layout, seeds, names_of=lambda seed: NAMES):
    """(name, problem, expected) of each seed and each of its names."""
    problems = [(seed, problem_of(layout, seed)) for seed in seeds]
    return [(name, problem, separate(name, problem)) for seed, problem in problems for name in names_of(seed)]


SEEDS = range(4)


@pytest.mark.parametrize("layout", layouts())
def test_a_split_parameter_steps_as_separate_parameters(layout, optimizer):
    """The optimizers take turns with the problems of a layout, and begin by turns."""
    turn = [*layouts()].index(layout)
    cases = cases_of(layout, SEEDS, lambda seed: [NAMES[(seed + turn) % len(NAMES)]])
    world = math.prod(layouts()[layout][0])
    for wrong in run_threads(world, stepped, layout, cases):
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


@pytest.mark.parametrize("options", [{"overlap_backward": True}, {"overlap_forward": True}, {"capturable": True}])
@pytest.mark.parametrize("layout", ["fsdp rows, uneven", "tp columns x fsdp rows", "unreduced"])
def test_options_leave_the_bits_of_units(layout, options, optimizer):
    """Of a captured step there is none on a CPU."""
    world, cases = math.prod(layouts()[layout][0]), cases_of(layout, [200, 201])
    for _, problem, _ in cases:
        problem["has_little_room"] = False  # each bucket has a buffer of its own
        problem["options"]["nonfinite"] = "propagate"
    for wrong in run_threads(world, stepped, layout, cases, options):
        assert wrong == []


@quiet
@pytest.mark.interpreter
def test_units_through_the_kernels(monkeypatch, device):
    """Where there is no GPU, in Triton's interpreter: units are views with strides of any kind."""
    take("triton", monkeypatch)
    members = [((6, 6), {"rows": [2, 1], "repeat": 2}, False), ((6, 4), {"columns": [3, 1]}, True),
               ((3, 3, 1, 2), "flatten", False), ((3, 3, 2, 1), "taps", False)]
    generator = torch.Generator().manual_seed(0)
    fulls = [torch.randn(m[0], generator=generator).to(device) for m in members]
    gradients = [[torch.randn(m[0], generator=generator).to(device) for m in members] for _ in "12"]
    gradients[1][0][2, 3] = math.nan
    gradients[1][3] = gradients[1][3].to(memory_format=torch.channels_last)
    problem = {"members": members, "form": "list", "fulls": fulls, "gradients": gradients,
               "options": {"nonfinite": "skip", "ns_steps": 2}, "has_little_room": False}
    expected = separate("NorMuon", problem)
    assert unequal("NorMuon", problem, expected, lambda i, full: full.clone(), "one process", 1, {}) == []


# units that lie whole on a rank ------------------------------------------------------------------------------------

WHOLE = {  # placements of FSDP2 and HSDP whose cuts lie between units, and which ranks step a unit
    "heads": ([0], {"heads": 8}, {(0,), (1,), (2,), (3,)}),
    "heads of columns": ([1], {"heads": 8, "dim": 1}, {(0,), (1,), (2,), (3,)}),
    "rows": ([0], {"rows": [6, 6, 12]}, {(0,), (1,), (0, 1, 2, 3)}),  # the last lies on two ranks
    "hsdp": ([None, 0], {"heads": 8}, {(0, 2), (1, 3)}),
    "hsdp of columns": ([None, 1], {"heads": 4, "dim": 1}, {(0, 2), (1, 3)}),
}


def whole_units(rank, world, name, case):
    """The routes and ranks of this rank's buckets."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    dims, form, _ = WHOLE[case]
    mesh = init_device_mesh("cpu", (world,) if len(dims) == 1 else (2, world // 2))
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    param = nn.Parameter(cut(torch.randn(24, 24), mesh, placements))
    optimizer = getattr(package(), name)([{"params": [("w", param)], "split": form}])
    for _ in range(2):
        param.grad = cut(torch.randn(24, 24), mesh, placements)
        optimizer.step()
    return {(route.bucket.route, route.bucket.ranks) for route, _ in optimizer._bound.jobs}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", WHOLE)
def test_units_that_lie_whole_on_a_rank_never_travel(case, name, optimizer, monkeypatch):
    sent = []
    for collective in ("all_to_all", "all_to_all_single"):
        send = getattr(dist, collective)
        monkeypatch.setattr(dist, collective, lambda *args, send=send, **options: sent.append(options["group"].size())
                            or send(*args, **options))
    expected = WHOLE[case][2]
    for rank, families in enumerate(run_threads(4, whole_units, name, case)):
        assert families == {("local" if len(ranks) == 1 else "exchange", ranks) for ranks in expected if rank in ranks}
    assert set(sent) == {len(ranks) for ranks in expected if len(ranks) > 1}


def partly_missing(rank, world, name, present):
    """Two steps with heads that lie whole on the ranks; the gradient is on `present` ranks only in the second. Weight
    and state of all ranks.
    """
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh, generator = init_device_mesh("cpu", (world,)), torch.Generator().manual_seed(0)
    param = nn.Parameter(cut(torch.randn(24, 16, generator=generator), mesh, [Shard(0)]))
    optimizer = getattr(package(), name)([{"params": [param], "split": {"heads": 8}}], lr=LR, weight_decay=0.1)
    for step in range(2):
        gradient = cut(torch.randn(24, 16, generator=torch.Generator().manual_seed(step)), mesh, [Shard(0)])
        param.grad = gradient if not step or rank in present else None
        optimizer.step()
    return [t.full_tensor() for t in (param.detach(), *optimizer.state[param].values())]


@pytest.mark.parametrize("present", [(), (0, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_a_missing_gradient_of_whole_units_counts_as_zero_unless_no_rank_has_one(name, present, optimizer):
    fulls = [torch.randn(24, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    for rank in {0, 1, 2, 3} - {*present}:
        fulls[2].view(4, -1)[rank] = 0.0
    member_ = (24, 16), {"heads": 8}, False
    (expected,) = separate(name, {"members": [member_], "fulls": fulls[:1], "options": {"weight_decay": 0.1},
                                  "gradients": [[f] for f in fulls[1:2 + bool(present)]]})
    for found in run_threads(4, partly_missing, name, present):
        assert all(torch.equal(a, b) for a, b in zip(found, expected.values(), strict=True))


# NaN ---------------------------------------------------------------------------------------------------------------

def broken(layout):
    """A problem with a NaN in the last unit of a parameter in the second step, and in which unit."""
    members = [((24, 16), {"rows": [8, 6, 10], "columns": [4, 12]}, False), ((3, 12, 8), {"heads": 4}, False),
               ((6, 8, 3, 3), "taps", False), ((8, 12), None, True), ((8, 6, 2, 2), "flatten", False)]
    generator = torch.Generator().manual_seed(0)
    gradients = [[torch.randint(-127, 128, m[0], generator=generator) / 16 for m in members] for _ in range(STEPS)]
    for number in range(3):  # of a unit that two ranks share, of an expert, of a tap
        units = indices_of(*members[number])
        gradients[1][number].view(-1)[units[-1 - number][-1, -1]] = math.nan
    return {"members": members, "form": "groups", "fulls": [torch.randn(m[0], generator=generator) for m in members],
            "gradients": gradients, "options": {"nonfinite": "skip"}, "has_little_room": False}


def skipped(rank, world, layout, name, problem, expected):
    """(what is not what separate parameters have, how many units were skipped, what nonfinite="raise" says)."""
    from torch.distributed.tensor import init_device_mesh

    mesh_shape, *placements = layouts()[layout]
    place = place_on(init_device_mesh("cpu", mesh_shape) if placements else None, placements, problem["members"])
    found = []
    for nonfinite in ("skip", "raise"):
        options = {} if placements or world == 1 else {"process_group": dist.group.WORLD}
        params = [nn.Parameter(place(i, full)) for i, full in enumerate(problem["fulls"])]
        optimizer = built(name, {**problem, "options": {"nonfinite": nonfinite}}, params, **options)
        try:
            for gradients in problem["gradients"]:
                for i, (p, g) in enumerate(zip(params, gradients)):
                    p.grad = place(i, g)
                optimizer.step()
            found.append(optimizer.skipped.item())
        except RuntimeError as error:
            found.append(str(error))
    return stepped(rank, world, layout, [(name, problem, expected)]), found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["one process", "ddp", "fsdp rows, uneven", "hsdp", "tp columns x fsdp rows"])
def test_a_nan_in_a_unit_leaves_that_unit_alone_unchanged(layout, name, optimizer):
    problem = broken(layout)
    expected = separate(name, problem)
    assert all(t.isfinite().all() for tensors in expected for t in tensors.values())
    world = math.prod(layouts()[layout][0])
    for wrong, (count, told) in run_threads(world, skipped, layout, name, problem, expected):
        assert wrong == [] and count == 3
        assert "NaN or Inf in the gradient" in told and "no weight and no state has changed" in told


# checkpoints -------------------------------------------------------------------------------------------------------

CHAIN = [("fsdp columns, 2", 2, [1], [2], [1]), ("one process", 1, None, None, None), ("tp", 2, [0], [1], [1]),
         ("tp x fsdp", 4, [1, 0], [2, 0], [0, 1])]
SAVED = [((12, 16), {"columns": [4, 6, 6]}, False), ((16, 12), {"heads": 4, "dim": 1}, False),
         ((2, 12, 8), {"rows": [3, 5, 4], "columns": [2, 6]}, False), ((12, 10), {"rows": [4, 8]}, True),
         ((6, 4, 3, 3), "taps", False), ((6, 4, 3, 3), "flatten", False), ((4, 6, 2, 2), "taps", True)]


def through_dcp(rank, world, way, folder, fulls, gradients, expected):
    """Load the checkpoint of the stage before, step, save; what is not what separate parameters have."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as dsd
    from torch.distributed.tensor import Shard, init_device_mesh

    number, (_, _, *dims) = way, CHAIN[way]
    mesh = None if world == 1 else init_device_mesh("cpu", (world,) if len(dims[0]) == 1 else (2, world // 2))
    place = place_on(mesh, [[Shard(d) for d in of_kind or ()] for of_kind in dims], SAVED)
    model = nn.ParameterDict({f"w{i}": nn.Parameter(place(i, full)) for i, full in enumerate(fulls)})
    params = list(model.values())
    optimizer = package().NorMuon([{"params": [(f"w{i}", p)], "split": form, "transposed": t}
                                   for i, (p, (_, form, t)) in enumerate(zip(params, SAVED))], lr=LR)
    if number:
        state = {"model": dsd.get_model_state_dict(model), "optimizer": dsd.get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=f"{folder}/{number - 1}")
        dsd.set_model_state_dict(model, state["model"])
        dsd.set_optimizer_state_dict(model, optimizer, state["optimizer"])
        params = list(model.values())
        assert [group["split"] for group in optimizer.param_groups] == [form for _, form, _ in SAVED]
    for i, (p, g) in enumerate(zip(params, gradients)):
        p.grad = place(i, g)
    optimizer.step()
    state = {"model": dsd.get_model_state_dict(model), "optimizer": dsd.get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/{number}")
    local_of, wrong = part("params.dtensor").local_of, []
    for i, (p, whole) in enumerate(zip(params, expected)):
        for key, value in whole.items():
            ours = p.detach() if key == "weight" else optimizer.state[p][key]
            if not torch.equal(local_of(ours), local_of(place(i, value))):
                wrong.append((SAVED[i], key))
    return wrong


def test_a_checkpoint_goes_to_any_other_layout(optimizer, tmp_path):
    generator = torch.Generator().manual_seed(0)
    fulls = [torch.randn(shape, generator=generator) for shape, *_ in SAVED]
    gradients = [[torch.randn(f.shape, generator=generator) for f in fulls] for _ in CHAIN]
    for way, (_, world, *_) in enumerate(CHAIN):
        problem = {"members": SAVED, "fulls": fulls, "gradients": gradients[:way + 1], "options": {}}
        expected = separate("NorMuon", problem)
        for wrong in run_ranks(world, through_dcp, way, str(tmp_path), fulls, gradients[way], expected):
            assert wrong == []


def saved_problem():
    generator = torch.Generator().manual_seed(0)
    return {"members": SAVED, "form": "groups", "fulls": [torch.randn(m[0], generator=generator) for m in SAVED],
            "gradients": [[torch.randn(m[0], generator=generator) for m in SAVED] for _ in range(STEPS)],
            "options": {}, "has_little_room": False}


def trained(problem, params, optimizer, steps):
    for gradients in problem["gradients"][steps]:
        for p, g in zip(params, gradients):
            p.grad = g.clone()
        optimizer.step()


@pytest.mark.parametrize("how", ["state_dict", "file", "torch.save"])
def test_a_saved_state_goes_on(how, optimizer, tmp_path):
    problem = saved_problem()
    model = nn.ParameterList(f.clone() for f in problem["fulls"])
    params = list(model)
    first = built("NorMuon", problem, params)
    trained(problem, params, first, slice(0, 2))
    heirs = copy.deepcopy(model)
    heir = built("NorMuon", problem, list(heirs))
    if how == "file":
        optimizer.export_state(first, tmp_path / "state.safetensors", model=model)
        optimizer.import_state(heir, tmp_path / "state.safetensors", model=heirs)
    elif how == "torch.save":
        torch.save(first.state_dict(), tmp_path / "state.pt")
        heir.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    else:
        heir.load_state_dict(first.state_dict())
    trained(problem, heirs, heir, slice(2, 3))
    for p, whole in zip(heirs, separate("NorMuon", problem)):
        assert all(torch.equal(value, {"weight": p, **heir.state[p]}[key]) for key, value in whole.items())


def test_state_of_another_split_is_refused(optimizer):
    def build(form):
        param = nn.Parameter(torch.ones(6, 12))
        param.grad = torch.ones(6, 12)
        return optimizer.NorMuon([{"params": [("w", param)], "split": form}])

    saved = build({"heads": 3, "dim": 1})
    saved.step()
    with pytest.raises(ValueError, match=r"second_moment of parameter w has shape \(6, 3\).*another split"):
        build({"heads": 4, "dim": 1}).load_state_dict(saved.state_dict())
    other = build({"rows": [2, 4]})
    saved.param_groups[0]["split"] = {"heads": 4, "dim": 1}
    with pytest.raises(RuntimeError, match="parameter w .* its split has changed"):
        saved.step()
    other.step()
    other.param_groups[0]["split"] = {"rows": [2, 3]}
    with pytest.raises(ValueError, match=r"parameter w of .*: the sizes \[2, 3\] add up to 5 rows, not to 6"):
        other.step()
    other.param_groups[0]["split"] = {"rows": [4, 2]}  # of the same state
    other.step()


def test_a_split_is_the_models_and_not_the_checkpoints(optimizer):
    """Also of a checkpoint whose groups have no such key."""
    params = [nn.Parameter(torch.ones(6, 12)) for _ in "abc"]
    forms = {"rows": [2, 4]}, {"rows": [3, 3]}, None
    first, second, plain = (optimizer.NorMuon([{"params": [p], **({"split": form} if form else {})}])
                            for p, form in zip(params, forms))
    assert not {"split", "transposed"} & plain.state_dict()["param_groups"][0].keys()
    for p, opt in zip(params, (first, second, plain)):
        p.grad = torch.ones(6, 12)
        opt.step()
    for saved, heir in ((first, second), (plain, second)):
        heir.load_state_dict(saved.state_dict())
        assert heir.param_groups[0]["split"] == {"rows": [3, 3]}
    plain.load_state_dict(first.state_dict())
    assert "split" not in plain.param_groups[0]
    for opt in (second, plain):
        opt.step()


def test_a_split_that_is_changed_in_place_counts(optimizer):
    params = [nn.Parameter(torch.eye(8, 6)) for _ in "ab"]
    first, second = (optimizer.Muon([{"params": [p], "split": {"rows": sizes}}], lr=LR)
                     for p, sizes in zip(params, ([2, 6], [4, 4])))
    assert first.param_groups[0]["split"] == {"rows": [2, 6]}
    generator = torch.Generator().manual_seed(0)
    for step in range(2):
        for p, opt in zip(params, (first, second)):
            p.grad = torch.randn(8, 6, generator=generator.manual_seed(step))
            if step or opt is second:
                opt.param_groups[0]["split"]["rows"][:] = [4, 4]
            opt.step()
    params[0].grad, params[1].grad = (torch.ones(8, 6) for _ in "ab")
    moved = [p.detach().clone() for p in params]
    first.step()
    second.step()
    assert not torch.equal(moved[0], moved[1]) and not torch.equal(moved[0], params[0])


# refusals ----------------------------------------------------------------------------------------------------------

FORMS = {  # form, shape, what is told
    "rows too few": ({"rows": [4, 3]}, (8, 6), "the sizes [4, 3] add up to 7 rows, not to 8"),
    "columns too many": ({"columns": [4, 3]}, (8, 6), "the sizes [4, 3] add up to 7 columns, not to 6"),
    "repeat": ({"rows": [3], "repeat": 2}, (8, 6), "the sizes [3] add up to 2 times 3 rows, not to 8"),
    "heads": ({"heads": 3}, (8, 6), "3 heads do not divide 8 rows into equal parts"),
    "heads of columns": ({"heads": 4, "dim": 1}, (8, 6), "4 heads do not divide 6 columns into equal parts"),
    "more heads than rows": ({"heads": 16}, (8, 6), "16 heads do not divide 8 rows"),
    "a text": ("head", (8, 6), "split='head' is unknown; allowed: None, {"),
    "a key": ({"row": [8]}, (8, 6), "has the unknown key 'row'; allowed: None, {"),
    "a number": (8, (8, 6), "split=8 is a int; allowed"),
    "sizes are a text": ({"rows": "abc"}, (8, 6), "rows must be a list of sizes"),
    "size 0": ({"rows": [8, 0]}, (8, 6), "rows must be a list of positive integers"),
    "size -1": ({"columns": [7, -1]}, (8, 6), "columns must be a list of positive integers"),
    "size True": ({"rows": [True, 7]}, (8, 6), "rows must be a list of positive integers"),
    "size 4.0": ({"rows": [4.0, 4]}, (8, 6), "rows must be a list of positive integers"),
    "no sizes": ({"rows": []}, (8, 6), "rows must be a list of positive integers"),
    "a size alone": ({"rows": 8}, (8, 6), "rows must be a list of sizes"),
    "heads 0": ({"heads": 0}, (8, 6), "heads must be a positive integer"),
    "heads True": ({"heads": True}, (8, 6), "heads must be a positive integer"),
    "repeat -1": ({"rows": [8], "repeat": -1}, (8, 6), "repeat must be a positive integer"),
    "dim 2": ({"heads": 2, "dim": 2}, (8, 6), "dim must be 0 (rows) or 1 (columns)"),
    "dim True": ({"heads": 2, "dim": True}, (8, 6), "dim must be 0 (rows) or 1 (columns)"),
    "dim without heads": ({"rows": [8], "dim": 0}, (8, 6), "dim goes with heads"),
    "heads and rows": ({"heads": 2, "rows": [8]}, (8, 6), "heads cannot be combined with rows, columns or repeat"),
    "nothing": ({}, (8, 6), "says no sizes; allowed"),
    "repeat alone": ({"repeat": 2}, (8, 6), "says no sizes; allowed"),
    "taps of a matrix": ("taps", (8, 6), 'split="taps" is for weights of convolutions'),
}


def refused(error, told, params, **group):
    with pytest.raises(error) as raised:
        package().NorMuon([{"params": params, **group}])
    assert all(text in str(raised.value) for text in told), str(raised.value)


@pytest.mark.parametrize("way", ["group", "list", "attribute"])
@pytest.mark.parametrize("case", FORMS)
def test_a_wrong_form_is_refused_by_name(case, way, optimizer):
    form, shape, told = FORMS[case]
    first, second = nn.Parameter(torch.ones(8, 6)), nn.Parameter(torch.ones(shape))
    group = {"list": {"split": [None, form]}, "group": {"split": form}}.get(way, {})
    params = [("second", second)] if way == "group" else [("first", first), ("second", second)]
    if way == "attribute":
        second.muon_split = form
    refused((ValueError, TypeError), [f"parameter second of shape {shape}: ", told], params, **group)


@pytest.mark.parametrize("wrong", ["yes", 1, 0, [], torch.tensor(True)])
def test_transposed_is_true_or_false(wrong, optimizer):
    weight = nn.Parameter(torch.ones(8, 6))
    value = [wrong] if isinstance(wrong, list) else wrong
    refused(TypeError, ["parameter w of shape (8, 6)", "must be True or False"], [("w", weight)], transposed=value)


@pytest.mark.parametrize("group", [{"split": {"heads": 2}}, {"split": "flatten"}, {"transposed": True},
                                   {"split": [{"heads": 2}]}])
def test_a_split_in_a_group_of_adamw_is_refused(group, optimizer):
    refused(ValueError, ["(w)", f"{next(iter(group))}=", "use_muon=False", "remove the key"],
            [("w", nn.Parameter(torch.ones(8, 6)))], use_muon=False, **group)


@pytest.mark.parametrize("key, attribute, own, other", [
    ("split", "muon_split", {"heads": 2}, {"heads": 4}), ("split", "muon_split", "flatten", {"heads": 4}),
    ("transposed", "muon_transposed", False, True)])
def test_two_splits_of_a_parameter_are_refused(key, attribute, own, other, optimizer):
    weight = nn.Parameter(torch.ones(8, 6))
    setattr(weight, attribute, own)
    told = ["parameter w has two splits", f"{attribute}={own!r}", f"{key}={other!r}", "Remove one of the two"]
    refused(ValueError, told, [("w", weight)], **{key: other})
    assert package().NorMuon([{"params": [("w", weight)], key: own}]).param_groups[0][key] == own  # said twice alike


@pytest.mark.parametrize("key, value", [("split", [None]), ("split", [{"heads": 2}] * 3), ("transposed", [True])])
def test_a_list_holds_a_value_for_each_parameter(key, value, optimizer):
    params = [(str(i), nn.Parameter(torch.ones(8, 6))) for i in range(2)]
    refused(ValueError, [f"{key} is a list of {len(value)} values, but the group has 2 parameters"], params,
            **{key: value})


@pytest.mark.parametrize("form", ["flatten", "taps"])
def test_a_flattened_parameter_must_be_a_view(form, optimizer):
    weight = nn.Parameter(torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last))
    if form == "flatten":
        refused(NotImplementedError, ["parameter w of shape (4, 3, 2, 2)", "channels_last", "contiguous()"],
                [("w", weight)], split=form)
        weight = nn.Parameter(weight.data.contiguous())
    muon = optimizer.NorMuon([{"params": [("w", weight)], "split": form}])
    weight.grad = torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last)  # a gradient may be any
    muon.step()
    if form == "flatten":
        weight.data = weight.data.to(memory_format=torch.channels_last)
        with pytest.raises(NotImplementedError, match=r"parameter w of shape .*channels_last"):
            muon.step()


SHARDED = {  # (mesh shape, shape, form, transposed, what is told); "strided 0" is interleaved
    "flatten, dim 2": ([2], (4, 3, 4, 2), "flatten", False, "sharded along their first two dims only"),
    "flatten, dim 2 of three": ([2], (4, 3, 4), "flatten", False, "sharded along their first two dims only"),
    "flatten, empty on a rank": ([2], (4, 3, 1), "flatten", False, "sharded along their first two dims only"),
    "taps, interleaved": (["strided 2"], (4, 3, 4, 2), "taps", False, "split='taps' stacks matrices"),
    "transposed, interleaved": (["strided 0"], (8, 6), None, True, "the rule keeps one number for each row"),
}


def refused_on_rank(rank, world, case):
    from torch.distributed.tensor import Shard, init_device_mesh
    from torch.distributed.tensor.placement_types import _StridedShard

    (dim,), shape, form, transposed, told = SHARDED[case]
    way = Shard(dim) if isinstance(dim, int) else _StridedShard(int(dim[-1]), split_factor=2)
    param = nn.Parameter(placed(torch.ones(shape), init_device_mesh("cpu", (world,)), [way]))
    refused(NotImplementedError, [f"parameter w of shape {shape}", told], [("w", param)], split=form,
            transposed=transposed)
    return True


@pytest.mark.parametrize("case", SHARDED)
def test_a_shard_that_cannot_be_cut_is_refused_on_all_ranks(case, optimizer):
    assert run_threads(2, refused_on_rank, case) == [True] * 2


def owned(rank, world, options):
    weight = nn.Parameter(torch.ones(8, 6))
    group = {"params": [("w", weight)], "transposed": True}
    with pytest.raises(NotImplementedError) as raised:
        package().NorMuon([dict(group)], process_group=dist.group.WORLD, **options)
    package().Muon([group], process_group=dist.group.WORLD, **options)
    return str(raised.value)


@pytest.mark.parametrize("options", [{"shard_state": True}, {"grads_are_reduced": False}])
def test_row_state_of_a_transposed_matrix_at_owners_is_refused(options, optimizer):
    for told in run_threads(2, owned, options):
        assert "parameter w of shape" in told and "one number for each row, which cannot be divided by rows" in told


# attributes --------------------------------------------------------------------------------------------------------

def test_attributes_are_read_and_kept(optimizer):
    """accelerate replaces the parameters of a group by sharded ones, which have no attributes."""
    params = [nn.Parameter(torch.randn(8, 6)) for _ in range(3)]
    params[0].muon_split, params[1].muon_transposed = {"heads": 2}, True
    muon = optimizer.NorMuon([{"params": params}], lr=LR)
    group = muon.param_groups[0]
    assert group["split"] == [{"heads": 2}, None, None] and group["transposed"] == [None, True, None]
    group["params"] = heirs = [nn.Parameter(p.detach().clone()) for p in params]
    apart = [nn.Parameter(t.contiguous()) for t in (*params[0].detach().chunk(2), params[1].detach().mT)]
    other = optimizer.NorMuon([*apart, params[2]], lr=LR)
    for p in (*heirs, params[2]):
        p.grad = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for p, g in zip(apart, (*heirs[0].grad.chunk(2), heirs[1].grad.mT)):
        p.grad = g.contiguous()
    muon.step()
    other.step()
    assert torch.equal(heirs[0], torch.cat(apart[:2])) and torch.equal(heirs[1], apart[2].mT)
    assert torch.equal(heirs[2], params[2])


@pytest.mark.parametrize("attribute, value", [("muon_split", {"heads": 3}), ("muon_transposed", True)])
@pytest.mark.parametrize("shape", [(8, 6), (8,)])
def test_attributes_of_parameters_of_adamw_are_refused(attribute, value, shape, optimizer):
    weight = nn.Parameter(torch.ones(shape))
    setattr(weight, attribute, value)
    weight.grad = torch.ones(shape)
    advice = "or put the parameter into a group with use_muon=True" if len(shape) > 1 else "takes matrices only"
    other = optimizer.Muon([("other", nn.Parameter(torch.ones(4, 4)))])
    for build in (optimizer.Muon, lambda groups: other.add_param_group(*groups)):
        with pytest.raises(ValueError) as raised:
            build([{"params": [("w", weight)], "use_muon": False}])
        told = f"parameter w of shape {shape} has the attribute {attribute}={value!r}, but is in a group with use_muon"
        assert told in str(raised.value) and advice in str(raised.value)
    weight.requires_grad_(False)  # as it is never stepped, nothing is ignored
    frozen = optimizer.Muon([{"params": [("w", weight)], "use_muon": False}])
    weight.requires_grad_()
    weight.grad = torch.ones(shape)
    with pytest.raises(ValueError, match="parameter w of shape .* has the attribute"):
        frozen.step()


@pytest.mark.parametrize("attribute, value", [("muon_split", None), ("muon_transposed", False)])
def test_attributes_that_demand_nothing_are_allowed(attribute, value, optimizer):
    weight = nn.Parameter(torch.ones(8, 6))
    setattr(weight, attribute, value)
    weight.grad = torch.ones(8, 6)
    optimizer.Muon([{"params": [weight], "use_muon": False}]).step()


# ranks that differ -------------------------------------------------------------------------------------------------

DIFFERENT = {"split": ({"split": {"heads": 2}}, {"split": {"heads": 4}}, "group option split"),
             "none": ({}, {"split": {"heads": 4}}, "group option split"),
             "transposed": ({}, {"transposed": True}, "group option transposed"),
             "list": ({"split": [{"heads": 2}]}, {"split": [None]}, "group option split")}


def differs(rank, world, case, sharded):
    from torch.distributed.tensor import Shard, init_device_mesh

    group = DIFFERENT[case][rank == 2]
    weight = torch.ones(8, 8)
    options = {} if sharded else {"process_group": dist.group.WORLD}
    if sharded:
        weight = cut(weight, init_device_mesh("cpu", (world,)), [Shard(0)])
    param = nn.Parameter(weight)
    param.grad = torch.ones_like(param)
    muon = package().Muon([{"params": [("w", param)], **group}], **options)
    with pytest.raises(RuntimeError) as raised:
        muon.step()
    return str(raised.value)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_with_different_splits_are_told(case, sharded, optimizer):
    for told in run_threads(4, differs, case, sharded, timeout=20):
        assert f"Ranks [2] and ranks [0, 1, 3] differ in: {DIFFERENT[case][2]}" in told, told


# torch.distributed.checkpoint --------------------------------------------------------------------------------------

class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(12, 8, generator=torch.Generator().manual_seed(0)))
        self.out = nn.Parameter(torch.randn(8, 12, generator=torch.Generator().manual_seed(1)))


def fused(cls, keys):
    model = Fused()
    groups = [{"params": [("qkv", model.qkv)], **keys}, {"params": [("out", model.out)]}]
    return model, getattr(package(), cls)(groups, lr=LR)


def fused_step(model, optimizer, number):
    for i, p in enumerate(model.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * number + i))
    optimizer.step()


def reloaded(rank, world, path, cls, before, after, flat, without=()):
    """The state of an optimizer with keys `before` in one with keys `after`; `without`: keys of qkv's state that are
    not loaded. Returns both optimizers.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    (model, optimizer), (other, heir) = fused(cls, before), fused(cls, after)
    for number in range(2):
        fused_step(model, optimizer, number)
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=path)
    loaded = {"optim": get_optimizer_state_dict(other, heir, options=options)}
    for key in without:
        del loaded["optim"]["state"]["qkv"][key]
    dcp.load(loaded, checkpoint_id=path)
    set_optimizer_state_dict(other, heir, loaded["optim"], options=options)
    for name in ("qkv", "out"):
        theirs, ours = optimizer.state[getattr(model, name)], heir.state[getattr(other, name)]
        assert all(torch.equal(theirs[key], ours[key]) for key in theirs if not (name == "qkv" and key in without))
    group = heir.param_groups[0]
    assert {key: group[key] for key in ("split", "transposed") if key in group} == after
    fused_step(other, heir, 2)
    return group["lr"] == optimizer.param_groups[0]["lr"] and "second_moment" not in without


KEPT = {  # row state of these has one shape
    "none, heads": ({}, {"split": {"heads": 2}}), "heads, none": ({"split": {"heads": 2}}, {}),
    "blocks, others": ({"split": {"rows": [4, 8]}}, {"split": {"rows": [8, 4]}}),
    "a list, none": ({"split": [{"heads": 3}]}, {}), "none, a list": ({}, {"split": [{"heads": 3}]}),
}
OTHER = {  # of these it has not
    "none, columns": ({}, {"split": {"columns": [4, 4]}}), "columns, none": ({"split": {"columns": [4, 4]}}, {}),
    "none, transposed": ({}, {"transposed": True}), "transposed, none": ({"transposed": True}, {}),
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("cls, case", [
    *(("NorMuon", case) for case in KEPT), *(("Muon", case) for case in (*KEPT, *OTHER))])
def test_a_checkpoint_loads_into_another_split(cls, case, flat, tmp_path, optimizer):
    assert run_ranks(1, reloaded, str(tmp_path), cls, *{**KEPT, **OTHER}[case], flat) == [True]


@pytest.mark.parametrize("case", OTHER)
def test_row_state_of_another_shape_begins_anew(case, tmp_path, optimizer):
    """torch names the entry, and the rest loads without it."""
    with pytest.raises(RuntimeError, match=r"Size mismatch between saved .* for optim.state.qkv.second_moment"):
        run_ranks(1, reloaded, str(tmp_path / "1"), "NorMuon", *OTHER[case], False)
    run_ranks(1, reloaded, str(tmp_path / "2"), "NorMuon", *OTHER[case], False, ("second_moment",))


def test_only_a_checkpoint_is_without_splits(optimizer):
    _, muon = fused("Muon", {"split": {"heads": 2}, "transposed": True})
    group = muon.state_dict()["param_groups"][0]
    assert group["split"] == {"heads": 2} and group["transposed"] is True

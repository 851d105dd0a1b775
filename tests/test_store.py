"""What a rank stores, seen piece by piece: views of the very memory, state of the right form, memory lent in turn."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.ranks import package, part, run_threads

F32, BF16 = torch.float32, torch.bfloat16
ROWS = {"second_moment": "row"}  # state


def store_of(params, keys=("momentum_buffer",), dtype=F32, rows=None):
    store, layout, state = part("execution.param_store"), part("params.layout"), {p: {} for p in params}
    for p in params:
        part("state.create").create_state(state[p], p, keys, dtype, rows=rows)
    layouts = [layout.layout_of(p) for p in params]
    rows = {"second_moment": [layout.layout_of(p, shape=(*p.shape[:-1], 1)) for p in params]}
    plan = part("planning.planner").Plan(({"params": params},), params, layouts, rows, None, frozenset())
    return store.Store(plan, state)


def layouts_of(store):
    """Layouts of the matrices, and of state."""
    return store.layouts["matrix"], {"second_moment": store.layouts["second_moment"]}


def pieces_of(params, kind="matrix"):
    """All matrices of plain parameters, whole."""
    plan = part("planning.plan")
    matrices = [plan.Matrix(i, at, *p.shape[-2:]) for i, p in enumerate(params)
                for at in itertools.product(*map(range, p.shape[:-2]))]
    Piece = part("planning.rank_plan").Piece
    return [Piece(kind, m, ((0, m.rows), (0, m.cols if kind == "matrix" else 1)), 0, 0, True) for m in matrices]


def shares_memory(view, tensor):
    return view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


# views -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("make", [torch.clone, lambda t: t.mT.contiguous().mT], ids=["contiguous", "transposed"])
def test_pieces_are_views_of_weights_and_state(make, optimizer):
    params = [nn.Parameter(make(torch.randn(s))) for s in [(6, 4), (3, 4, 6), (2, 2, 5, 3)]]
    store, pieces = store_of(params, ("momentum_buffer", "second_moment")), pieces_of(params)
    assert len(pieces) == 1 + 3 + 4
    for piece, weight, buffer in zip(pieces, store.weights(pieces), store.states(pieces, "momentum_buffer")):
        param = params[piece.matrix.param]
        assert torch.equal(weight, param[piece.matrix.at].detach()) and shares_memory(weight, param)
        buffer.fill_(7)
        assert (store.state[param]["momentum_buffer"][piece.matrix.at] == 7).all() and not weight.requires_grad
    rows = pieces_of(params, "second_moment")
    for piece, V in zip(rows, store.states(rows, "second_moment")):
        whole = store.state[params[piece.matrix.param]]["second_moment"]
        assert V.shape == (piece.matrix.rows, 1) and shares_memory(V, whole)


@pytest.mark.parametrize("offset", [0, 5])
def test_sources_find_pieces_in_any_gradient(offset, optimizer):
    """Told only this step's tensors: with another storage offset, and other strides than the weight's."""
    params = [nn.Parameter(torch.randn(s)) for s in [(6, 4), (3, 4, 6)]]
    store, pieces = None, pieces_of(params)
    for p in params:
        p.grad = torch.randn(p.numel() + offset)[offset:].view(*p.shape[:-2], p.shape[-1], p.shape[-2]).mT
    store = store_of(params)
    for source, piece in zip(store.sources(pieces), pieces):
        grad = params[piece.matrix.param].grad
        assert torch.equal(source.view(store.gradients, piece.shape), grad[piece.matrix.at])
        assert source.offset >= 0


def test_a_missing_gradient_is_zero_of_the_weights_form(optimizer):
    params = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4, 6))]
    params[0].grad = torch.ones(6, 4)
    store = store_of(params)
    assert store.gradients[0] is not None and not store.gradients[1].any() and store.gradients[1].shape == (4, 6)
    params[1].grad = torch.ones(4, 6)
    store.read_gradients()
    assert store.gradients[1].all()


# what a glance sees ------------------------------------------------------------------------------------------------

def other_dtype_of_a_missing_gradient(param, state):
    param.grad_dtype = torch.float64


def another_order_in_the_same_memory(param, state):
    param.data = param.data.mT


def state_elsewhere(param, state):
    state[param] = {"momentum_buffer": torch.zeros(4, 4)}


def frozen(param, state):
    param.requires_grad_(False)


def a_gradient(param, state):
    param.grad = torch.zeros(4, 4)


@pytest.mark.parametrize("change", [other_dtype_of_a_missing_gradient, another_order_in_the_same_memory,
                                    state_elsewhere, frozen, a_gradient])
def test_a_glance_sees_what_binding_depends_on(change, optimizer):
    if change is other_dtype_of_a_missing_gradient and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("torch before 2.10")
    param, fingerprint = nn.Parameter(torch.randn(4, 4)), part("execution.fingerprint").fingerprint
    groups, first = [{"params": [param], "use_muon": True, "adjust_lr_fn": None}], {"momentum_buffer": param.clone()}
    state = {param: first}
    before = fingerprint(groups, state, False)
    assert before == fingerprint(groups, state, False)
    change(param, state)
    assert before != fingerprint(groups, state, False)


def another_gradient(p, state, groups):
    p.grad = torch.ones_like(p)


def another_rate(p, state, groups):
    groups[0]["lr"] = 0.5


def nothing(p, state, groups):
    pass


def gradient(make):
    def change(p, state, groups):
        p.grad = make(p)
    return change


def data_of(what):
    def change(p, state, groups):
        tensor = {"weight": p, "gradient": p.grad, "state": state[p]["momentum_buffer"]}[what]
        tensor.data = tensor.detach().clone()
    return change


def parameter_instead(p, state, groups):
    groups[0]["params"] = [nn.Parameter(p.detach())]


def option(key, value):
    return lambda p, state, groups: groups[0].update({key: value})


CHANGES = {
    "the gradient is transposed": gradient(lambda p: torch.ones(6, 4).mT), "it is missing": gradient(lambda p: None),
    "it is negated lazily": gradient(lambda p: torch._neg_view(torch.ones(4, 6))),
    "it is sparse": gradient(lambda p: p.detach().to_sparse()),
    "it lies elsewhere in a line": gradient(lambda p: torch.ones(25)[1:].view(4, 6)),
    "weight elsewhere": data_of("weight"), "state elsewhere": data_of("state"), "another parameter": parameter_instead,
    "frozen": lambda p, state, groups: p.requires_grad_(False), "ns_steps": option("ns_steps", 7),
    "adjust_lr_fn": option("adjust_lr_fn", "rms_norm"), "use_muon": option("use_muon", False),
    "another state": lambda p, state, groups: state[p].update(momentum_buffer=state[p]["momentum_buffer"].clone()),
    "more state": lambda p, state, groups: state[p].update(more=torch.zeros(4, 6)),
    "a new group": lambda p, state, groups: groups.append({"params": []}),
}
SAME = {"nothing": nothing, "another gradient": another_gradient, "lr": another_rate,
        "the gradient's memory": data_of("gradient")}


def looked(change, place=lambda tensor: tensor):
    """(whether the quick way was taken, whether it and the whole look find all as it was)."""
    p = nn.Parameter(place(torch.ones(4, 6)))
    p.grad, state = place(torch.ones(4, 6)), {p: {"momentum_buffer": place(torch.zeros(4, 6))}}
    groups = [{"params": [p], "use_muon": True, "adjust_lr_fn": None, "ns_steps": 5, "lr": 0.1}]
    with torch.no_grad():
        look = part("execution.fingerprint").StepFingerprint(groups, state, False)
        change(p, state, groups)
        return look.has_fast_check, look._fast_check(groups, state, (False,)), look.is_current(groups, state, False)


@pytest.mark.parametrize("name", [*CHANGES, *SAME])
def test_a_quick_look_sees_no_less_and_takes_no_gradient_for_a_change(name, optimizer):
    same = name in SAME
    assert looked({**CHANGES, **SAME}[name]) == (True, same, same)


def placed(rank, world):
    from torch.distributed.tensor import Partial, Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))

    def place(tensor):
        return distribute_tensor(tensor, mesh, [Replicate()])

    def elsewhere(p, state, groups):
        p.grad = type(p.grad).from_local(torch.ones(4, 6), mesh, [Partial()])

    return [looked(change, place) for change in (nothing, another_gradient, elsewhere, CHANGES["it is missing"],
                                                 CHANGES["frozen"])]


def test_a_quick_look_knows_placements(optimizer):
    for found in run_threads(2, placed):
        assert found == [(True, True, True)] * 2 + [(True, False, False)] * 3


def test_gradients_of_a_step_that_failed_are_not_taken_for_later_ones(optimizer):
    """The quick look has seen them, nobody has taken them; the next look is a whole one that finds all as it was."""
    p = nn.Parameter(torch.ones(4, 6))
    p.grad, groups = torch.ones(4, 6), [{"params": [p]}]
    with torch.no_grad():
        look = part("execution.fingerprint").StepFingerprint(groups, {})
        assert look.is_current(groups, {}) and look.gradients
        look.has_fast_check = False
        assert look.is_current(groups, {}) and look.pop_gradients() == {}


def of_a_later_torch(*tensors, **given):
    raise TypeError("incompatible constructor arguments")


@pytest.mark.parametrize("guards", [None, of_a_later_torch], ids=["missing", "other arguments"])
def test_without_guards_looks_are_whole(guards, optimizer, monkeypatch):
    monkeypatch.setattr(part("execution.fingerprint"), "TensorGuards", guards)
    for change, same in ((nothing, True), (CHANGES["frozen"], False)):
        p = nn.Parameter(torch.ones(4, 6))
        p.grad, state, groups = torch.ones(4, 6), {p: {}}, [{"params": [p]}]
        look = part("execution.fingerprint").StepFingerprint(groups, state)
        change(p, state, groups)
        assert not look.has_fast_check and look.is_current(groups, state) == same


@pytest.mark.parametrize("kept", [{"count": 1}, 1], ids=str)
def test_what_others_keep_in_the_state_need_not_be_tensors(kept, optimizer):
    param = nn.Parameter(torch.randn(4, 4))
    param.grad, muon = torch.randn(4, 4), optimizer.Muon([param])
    for number in range(4):
        if number != 1:
            muon.state["another's"] = kept
        before = param.detach().clone()
        muon.step()
        assert not torch.equal(param, before)


def shard_on_rank(rank, world):
    """The pieces of a sharded parameter, for each of the ways to cut it."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh, plan = init_device_mesh("cpu", (2, 2)), part("planning.plan")
    rows_columns, experts = [Shard(0), Shard(1)], [Shard(1), Shard(0)]
    for shape, placements in [((7, 6), rows_columns), ((1, 9), rows_columns), ((5, 4, 6), experts)]:
        full = torch.arange(torch.Size(shape).numel(), dtype=F32).view(shape)
        param = nn.Parameter(distribute_tensor(full, mesh, placements, src_data_rank=None))
        store = store_of([param], ("momentum_buffer", "second_moment"))
        buckets = plan.make_plan(store.layouts["matrix"], lambda R, C: R * C, {})
        for bucket in (b for b in buckets if rank in b.ranks):
            rank_plan = part("planning.rank_plan").rank_plan_of(
                bucket, rank, *layouts_of(store), part("planning.memory_model").PlanInputs(4, ROWS)
            )
            stored = [p for p in rank_plan.stored if p.kind == "matrix"]
            for piece, weight in zip(stored, store.weights(stored)):
                assert torch.equal(weight, full[piece.matrix.at][tuple(slice(*side) for side in piece.box)])
                assert shares_memory(weight, part("params.dtensor").local_of(param))
            rows = [p for p in rank_plan.stored if p.kind == "second_moment"]
            assert all(V.shape == p.shape for V, p in zip(store.states(rows, "second_moment"), rows))
    return True


def test_pieces_of_a_shard_are_its_part_of_the_matrix(optimizer):
    assert all(run_threads(4, shard_on_rank))


# state -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("of_param", [F32, BF16])
def test_state_is_zeros_of_the_right_form(of_param, dtype, optimizer):
    param, state = nn.Parameter(torch.randn(3, 6, 4).to(of_param)), {}
    part("state.create").create_state(state, param, ("momentum_buffer", "second_moment", "step", "exp_avg"), dtype)
    assert {k: (tuple(v.shape), v.dtype) for k, v in state.items()} == {
        "momentum_buffer": ((3, 6, 4), dtype), "second_moment": ((3, 6, 1), F32), "step": ((), F32),
        "exp_avg": ((3, 6, 4), dtype)}
    assert not any(v.any() or v.requires_grad for v in state.values())


def zeros_on_rank(rank, world):
    """Of a parameter that lies transposed: (the state's global form, the local one), ours and zeros_like's."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh, local = init_device_mesh("cpu", (world,)), torch.ones(6, 3).mT
    param = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((6, 6)), stride=(1, 6))
    ours, theirs = part("params.dtensor").zeros_of(param, BF16), torch.zeros_like(param, dtype=BF16)
    assert not ours.to_local().any() and not ours.requires_grad
    return [(t.shape, t.stride(), t.dtype, t.placements, t.to_local().stride(), t.device_mesh == mesh)
            for t in (ours, theirs)]


def test_placed_zeros_are_those_of_torch(optimizer):
    assert all(ours == theirs for ours, theirs in run_threads(2, zeros_on_rank))


def test_state_that_is_there_stays(optimizer):
    param, state = nn.Parameter(torch.randn(6, 4)), {"momentum_buffer": torch.ones(6, 4)}
    buffer = state["momentum_buffer"]
    part("state.create").create_state(state, param, ("momentum_buffer", "second_moment"), F32)
    assert state["momentum_buffer"] is buffer and buffer.all() and set(state) == {"momentum_buffer", "second_moment"}


@pytest.mark.parametrize("rows", [0, 2])
def test_state_of_an_owner_alone(rows, optimizer):
    """Where the gradients are reduced, a rank keeps the state of its rows only; the keys are the same everywhere."""
    param, state = nn.Parameter(torch.randn(6, 4)), {}
    part("state.create").create_state(state, param, ("momentum_buffer", "second_moment"), F32, rows=rows)
    assert {k: tuple(v.shape) for k, v in state.items()} == {"momentum_buffer": (rows, 4), "second_moment": (rows, 1)}


# memory lent to buckets ------------------------------------------------------------------------------------------

def rank_plan_with(needs):
    """A rank plan of which only the memory counts."""
    rank_plan = part("planning.rank_plan")
    travel = rank_plan.AllToAllPlan({}, {}, (), (), ())
    uses = ("leave", "return", "kept", "arrive", "scratch_a", "scratch_b", "wide", "until_apply", "gram_scratch",
            "stack", "mean", "selected", "unselected")
    return rank_plan.RankPlan((), (), (), travel, travel, True, True, False, {**dict.fromkeys(uses, 0), **needs}, {})


def test_buckets_of_one_slot_share_memory_and_the_others_do_not(optimizer):
    """All have the shared scratch in common, and none needs more than the largest."""
    workspace = part("execution.workspace").Workspace(3, torch.device("cpu"))
    rank_plans = [rank_plan_with({"leave": 60 * (1 + i % 4), "return": 80, "arrive": 7 * i, "scratch_a": 45,
                                  "scratch_b": 45, "kept": 5 * i, "wide": 20, "until_apply": 3 * i, "stack": 32,
                                  "gram_scratch": 8 + 8 * i, "mean": 9, "selected": 11, "unselected": 9 + 9 * i})
                  for i in range(6)]
    for number, rank_plan in enumerate(rank_plans):
        workspace.reserve(number, rank_plan)
    taken = [workspace.views_for(number, rank_plan) for number, rank_plan in enumerate(rank_plans)]
    buffers, scratch = [], []
    for rank_plan, lent in zip(rank_plans, taken):
        assert {use: t.numel() for use, t in lent.items()} == rank_plan.use_bytes
        assert all(t.data_ptr() % part("planning.plan").ALIGNMENT == 0 for t in lent.values() if t.numel())
        buffers.append(lent["wide"].untyped_storage().data_ptr())
        scratch.append(lent["stack"].untyped_storage().data_ptr())
        in_buffer = ("leave", "return", "scratch_a", "scratch_b")
        assert {lent[use].untyped_storage().data_ptr() for use in in_buffer} == {buffers[-1]}
        in_scratch = ("gram_scratch", "mean", "selected", "unselected")
        assert {lent[use].untyped_storage().data_ptr() for use in in_scratch} == {scratch[-1]}
        end = lent["unselected"].data_ptr() + lent["unselected"].numel()
        assert all(lent[use].data_ptr() >= end for use in ("stack", "selected", "mean"))
    assert buffers[:3] == buffers[3:] and len({*buffers, *scratch}) == 4 and len(set(scratch)) == 1
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for lent in taken for t in lent.values()}
    sizes_of = [rank_plan.workspace_layout()[1] for rank_plan in rank_plans]
    largest = [max(sizes_of[i]["bucket_buffer"], sizes_of[i + 3]["bucket_buffer"]) for i in range(3)]
    assert [sizes[at] for at in (*buffers[:3], scratch[0])] == [*largest, sizes_of[-1]["shared_scratch"]]


def test_piece_at_views_bytes(optimizer):
    flat = torch.zeros(64, dtype=torch.uint8)
    view = part("communication.all_to_all").piece_at(flat, 16, (3, 2), F32)
    view.copy_(torch.arange(6.0).view(3, 2))
    assert shares_memory(view, flat) and torch.equal(flat[16:40].view(F32), torch.arange(6.0)) and not flat[40:].any()


def bound_on_rank(rank, world, route):
    """The stacks of a bucket do not overlap, hold every matrix computed here, and the needs cover them."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    plan = part("planning.plan")
    mesh = init_device_mesh("cpu", (world,))
    shapes = [(7, 5), (5, 7), (7, 5), (3, 3), (9, 1)]
    params = [nn.Parameter(distribute_tensor(torch.zeros(s), mesh, [Shard(0)], src_data_rank=None)) for s in shapes]
    store = store_of(params, ("momentum_buffer", "second_moment"))
    (bucket,) = [b for b in plan.make_plan(store.layouts["matrix"], lambda R, C: R * C, {}) if b.route == route]
    rank_plan = part("planning.rank_plan").rank_plan_of(
        bucket, rank, *layouts_of(store), part("planning.memory_model").PlanInputs(2, ROWS)
    )
    memory = {use: torch.empty(n, dtype=torch.uint8) for use, n in rank_plan.use_bytes.items()}
    wide = {"second_moment": ("row", torch.float32)}
    made = part("execution.workspace").Stacks(rank_plan, memory, torch.bfloat16, wide)
    stacks, rows, views = made.inputs, [wide["second_moment"] for wide in made.wide], made.input_view
    assert sum(s.shape[0] for s in stacks) == len(rank_plan.matrices) and set(views) == set(rank_plan.owned)
    for i, tensor in enumerate([*stacks, *rows]):
        tensor.fill_(i + 1)
    assert all((tensor == i + 1).all() for i, tensor in enumerate([*stacks, *rows]))
    assert all(v.shape == p.shape for p, v in views.items())
    assert all(s.data_ptr() % plan.ALIGNMENT == 0 for s in stacks) or not stacks
    return len(rank_plan.matrices)


def test_the_matrices_of_a_bucket_lie_side_by_side(optimizer):
    assert sum(run_threads(3, bound_on_rank, "exchange")) == 5


# the workspace that was promised, against the memory that a step takes --------------------------------------------

class Peak(TorchDispatchMode):
    """`most`: of storages of `large` bytes or more that were made inside, the most bytes alive at once."""

    def __init__(self, large):
        super().__init__()
        self.large, self.alive, self.most = large, {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [storage for storage in _storages(result)
                if storage.nbytes() >= self.large and storage._cdata not in self.alive]
        given = {storage._cdata for storage in _storages((args, kwargs))} if made else ()  # a collective: all threads'
        for storage in made:
            if storage._cdata not in given:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
                self.most = max(self.most, sum(nbytes for _, nbytes in self.alive.values()))
        return result


def _storages(things):
    tensors = [things] if isinstance(things, torch.Tensor) else tree_leaves(things)
    return [thing.untyped_storage() for thing in tensors if isinstance(thing, torch.Tensor)]


def measured_on_rank(rank, world, shapes, mode, room):
    """(bytes of stacks and buffers that two steps take at most, the report's sum, its buckets) at one rank."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    placed, options = {"fsdp": [Shard(0), Shard(1)], "hsdp": [Replicate(), Shard(0)]}.get(mode), {}
    full = [torch.linspace(-1, 1, rows * cols).view(rows, cols) for rows, cols in shapes]
    if placed:
        mesh = init_device_mesh("cpu", (2, world // 2))
        full = [distribute_tensor(t, mesh, placed, src_data_rank=None) for t in full]
    elif mode != "alone":
        options = {"process_group": dist.group.WORLD, "grads_are_reduced": mode == "ddp"}
    params = [nn.Parameter(t.clone()) for t in full]
    for p in params:
        p.grad = p.detach().clone()
    optimizer = package().NorMuon(params, lr=0.1, workspace_bytes=room, **options)
    with Peak(2 * 4 * max(rows * cols for rows, cols in shapes)) as peak:  # a CPU multiplies matrix by matrix
        optimizer.step()
        optimizer.step()
    report = optimizer.plan_report()
    return peak.most, report.workspace, len(report.rows), peak.large


@pytest.mark.parametrize("mode, once", [*((mode, False) for mode in ("fsdp", "hsdp", "ddp", "unreduced", "alone")),
                                        *((mode, True) for mode in ("hsdp", "ddp", "unreduced"))])
@pytest.mark.parametrize("room", [None, 100_000])
@pytest.mark.parametrize("shapes", [[(24, 32)] * 32, [(16, 64), (64, 16), (32, 32), (32, 16)] * 10],
                         ids=["one", "mixed"])
def test_a_step_takes_the_workspace_that_was_promised_and_no_more(once, shapes, room, mode, optimizer, monkeypatch):
    """`once`: what several ranks get leaves from one place, as on GPUs."""
    monkeypatch.setattr(part("communication.process_groups").ProcessGroups, "can_send_once", lambda *_: once)
    world = 1 if mode == "alone" else 4  # alone, each rank would do the same
    for most, workspace, buckets, large in run_threads(world, measured_on_rank, shapes, mode, room):
        assert most == sum(nbytes for nbytes in workspace.values() if nbytes >= large) > 0
        assert room is None or sum(workspace.values()) <= room
        assert buckets >= (1 if room is None else 3)

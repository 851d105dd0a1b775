"""State that owners keep, in files: those of one rank are refused by name, and consolidated ones go on with the bits of
one process on any number of ranks. A call that only some ranks make raises there and disturbs no other rank."""

from __future__ import annotations

import copy
import datetime

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.ranks import package, part, run_ranks, run_threads
from tests.test_shard_state import F32, MATRICES, parameters, same, state_of, train

WAYS = {"shard_state": {"shard_state": True}, "unreduced": {"shard_state": False, "grads_are_reduced": False}}
LAYOUTS = [("even", [(8, 6), (4, 4)], [(8, 3)]), ("uneven", [(7, 6), (5, 3)], [(5, 3)])]


def small(shapes, rest):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes + rest]


def of(params, matrices, way=None, group=None, name="NorMuon", **options):
    """An optimizer of named parameters, the first `matrices` of them under Muon; `way` None: every rank has all of the
    state.
    """
    group = {} if way is None else {"process_group": group or dist.group.WORLD, **WAYS[way]}
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    groups = [{"params": named[:matrices]}, {"params": named[matrices:], "use_muon": False, "lr": 0.01}]
    return getattr(package(), name)([g for g in groups if g["params"]], lr=0.1, **group, **options)


def after_steps(shapes, rest, way, count=2):
    params = small(shapes, rest)
    optimizer = of(params, len(shapes), way)
    train(optimizer, params, range(count))
    return params, optimizer


def refusal(load, *arguments):
    with pytest.raises(ValueError) as raised:
        load(*arguments)
    return str(raised.value)


# files of one rank ---------------------------------------------------------------------------------------------------


def loads_rank_0s_file(rank, world, shapes, rest, way, folder):
    """What each rank is told, and whether it keeps what it had, goes on, and takes its own file."""
    params, optimizer = after_steps(shapes, rest, way)
    torch.save({"optimizer": optimizer.state_dict()}, f"{folder}/{rank}.pt")
    dist.barrier()
    own = copy.deepcopy(optimizer.state_dict())
    heir_params, heir = after_steps(shapes, rest, way, count=1)
    before, weights = state_of(heir, heir_params), [p.detach().clone() for p in heir_params]
    theirs = torch.load(f"{folder}/0.pt", weights_only=True)["optimizer"]
    told = refusal(heir.load_state_dict, theirs)
    unchanged = same(before, state_of(heir, heir_params)) and same(weights, heir_params)
    taken = []
    for mine in (torch.load(f"{folder}/{rank}.pt", weights_only=True)["optimizer"], own, optimizer.state_dict()):
        heir.load_state_dict(mine)
        taken.append(same(state_of(optimizer, params), state_of(heir, heir_params)))
    return told, unchanged, taken


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "shapes", "rest"), LAYOUTS)
@pytest.mark.parametrize("world", [2, 3])
def test_a_file_of_rank_0_is_refused_on_all_ranks(world, name, shapes, rest, way, optimizer, tmp_path):
    results = run_ranks(world, loads_rank_0s_file, shapes, rest, way, str(tmp_path))
    assert all(unchanged for _, unchanged, _ in results) and all(all(taken) for *_, taken in results)
    first, *others = [told for told, *_ in results]
    assert "momentum_buffer of parameter w0 is this rank's own part" in first
    assert f"ranks {list(range(1, world))} were given a part that is not theirs" in first
    for rank, told in enumerate(others, 1):
        assert f"momentum_buffer of parameter w0 is the part that rank 0 of {world} stored" in told
        assert f"but this is rank {rank}" in told
    for told in (first, *others):
        assert "consolidate_state_dict() on all ranks before rank 0 writes" in told and "full_state_dict=True" in told


def tell(group, call, advice, refuse=False):
    """Of `wait_for_all`, for which threads have no store: which ranks refuse."""
    flags = [torch.zeros(1) for _ in range(group.size())]
    dist.all_gather(flags, torch.full((1,), float(refuse)), group=group)
    return [rank for rank, flag in zip(dist.get_process_group_ranks(group), flags) if flag]


def loads_on_a_grid(rank, world, cause):
    """What is said where rank 3 of a grid of four refuses a state that has to be gathered."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    if rank > 3:
        return None
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Replicate(), Shard(0)]))
    heir = package().Muon([("w", weight)])
    saved = heir.state_dict()
    rows = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0), Replicate()])
    damaged = rank == 3 and cause == "damaged"
    saved["state"][0] = {"momentum_buffer": rows.to(torch.int64) if damaged else rows}
    return refusal(heir.load_state_dict, saved)


@pytest.mark.parametrize("cause", ["another rank's", "damaged"])
@pytest.mark.parametrize("world", [4, 5])
def test_all_ranks_of_a_grid_refuse_together(world, cause, optimizer, monkeypatch):
    """Over the default group where it has the same ranks, else over one axis after another."""
    shards = part("state.shard_check")
    monkeypatch.setattr(shards, "wait_for_all", tell)
    if cause != "damaged":
        monkeypatch.setattr(shards, "is_own_shard", lambda value: dist.get_rank() != 3)
    *others, last = run_threads(world, loads_on_a_grid, cause, timeout=20)[:4]
    expected = "has dtype torch.int64" if cause == "damaged" else "is the part that another rank"
    assert expected in last
    assert all("but ranks [3] were given a part that is not theirs or does not fit" in told
               or world == 5 and "or ranks that load with them" in told for told in others), others


def writes_rank_0s(optimizer, path, rank):
    saved = optimizer.state_dict()
    if rank == 0:
        torch.save(saved, path)


def loads_elsewhere(rank, world, shapes, rest, folder):
    """Rank 0's file, loaded by optimizers that keep all of the state on every rank."""
    _, optimizer = after_steps(shapes, rest, "shard_state")
    writes_rank_0s(optimizer, f"{folder}/0.pt", rank)
    dist.barrier()
    theirs, told = torch.load(f"{folder}/0.pt", weights_only=True), []
    for options in ({}, {"process_group": dist.group.WORLD}):
        params = small(shapes, rest)
        named = [(f"w{i}", p) for i, p in enumerate(params)]
        heir = package().NorMuon([{"params": named[:2]}, {"params": named[2:], "use_muon": False}], **options)
        told.append(refusal(heir.load_state_dict, theirs))
        heir.load_state_dict(optimizer.state_dict())  # of this rank, gathered
        whole = [t.full_tensor() if hasattr(t, "full_tensor") else t
                 for _, s in sorted(optimizer.state_dict()["state"].items()) for _, t in sorted(s.items())]
        assert same(whole, state_of(heir, params))
    return told


def test_every_kind_of_optimizer_refuses_it(optimizer, tmp_path):
    results = run_ranks(2, loads_elsewhere, *LAYOUTS[0][1:], str(tmp_path))
    assert all("is this rank's own part, but ranks [1]" in told for told in results[0])
    assert all("is the part that rank 0 of 2 stored, but this is rank 1" in told for told in results[1])


def writes(rank, world, shapes, rest, path):
    _, optimizer = after_steps(shapes, rest, "shard_state")
    writes_rank_0s(optimizer, path, rank)


def loads_of_other_run(rank, world, shapes, rest, path, way):
    params = small(shapes, rest)
    return refusal(of(params, len(shapes), way).load_state_dict, torch.load(path, weights_only=True))


@pytest.mark.parametrize("way", ["shard_state", None])
def test_a_file_of_one_of_two_ranks_is_refused_by_three_and_by_one(way, optimizer, tmp_path):
    shapes, rest = LAYOUTS[0][1:]
    path = str(tmp_path / "0.pt")
    run_ranks(2, writes, shapes, rest, path)
    told = run_ranks(3, loads_of_other_run, shapes, rest, path, way)
    assert all("momentum_buffer of parameter w0" in text and "consolidate_state_dict()" in text for text in told)
    assert all(f"this is rank {rank}" in text for rank, text in enumerate(told))
    alone = refusal(of(small(shapes, rest), len(shapes)).load_state_dict, torch.load(path, weights_only=True))
    assert "was stored in parts by 2 ranks, of which there is no process group here" in alone


def of_fsdp(rank, world, folder):
    """DTensors of FSDP2's placements: another rank's shard is refused, copies of one shard are not."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh, results = init_device_mesh("cpu", (world,)), []
    for number, placement in enumerate((Shard(0), Replicate())):
        weight = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [placement]))
        optimizer = package().Muon([("w", weight)])
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        path = f"{folder}/{number}.pt"
        if rank == 0:
            torch.save(optimizer.state_dict(), path)
        dist.barrier()
        saved = torch.load(path, weights_only=True)
        if rank and placement.is_shard():
            results.append(refusal(optimizer.load_state_dict, saved))
        else:
            optimizer.load_state_dict(saved)
            results.append("loaded")
    return results


def test_another_ranks_shard_of_fsdp_is_refused(optimizer, tmp_path):
    first, second = run_ranks(2, of_fsdp, str(tmp_path))
    assert first == ["loaded", "loaded"] and second[1] == "loaded"
    assert "momentum_buffer of parameter w is the part that rank 0 of 2 stored, but this is rank 1" in second[0]


def of_wrong_size(rank, world):
    """Rows of another number than this rank stores, from a file that does not say whose they are."""
    params, optimizer = after_steps([(7, 6)], [], "shard_state")
    saved = optimizer.state_dict()
    rows = saved["state"][0]["momentum_buffer"]
    saved["state"][0]["momentum_buffer"] = part("communication.owner_state").by_rows(
        torch.ones(4, 6), rows.shape, dist.group.WORLD
    )
    return refusal(optimizer.load_state_dict, saved)


def test_rows_of_another_number_are_refused(optimizer):
    first, second = run_ranks(2, of_wrong_size)
    assert "this rank's own part" in first
    assert "is the part that another rank of 2 stored, but this is rank 1" in second


def in_place(rank, world, folder):
    """torch.distributed.checkpoint loads into the state dict itself, which stays this rank's own."""
    params, optimizer = after_steps(*LAYOUTS[1][1:], "shard_state")
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    heir_params, heir = after_steps(*LAYOUTS[1][1:], "shard_state", count=1)
    state = {"optimizer": heir.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    heir.load_state_dict(state["optimizer"])
    return same(state_of(optimizer, params), state_of(heir, heir_params))


def test_distributed_checkpoints_of_the_state_dict_are_taken(optimizer, tmp_path):
    assert run_ranks(2, in_place, str(tmp_path)) == [True, True]


# consolidated state --------------------------------------------------------------------------------------------------


def in_seconds(seconds):
    return dist.new_group(timeout=datetime.timedelta(seconds=seconds))


def everything(name, way, group=None, **options):
    """An optimizer of parameters of all kinds: uneven rows, fewer rows than ranks, 0-D, empty."""
    params = parameters()
    return params, of(params, len(MATRICES), way, group, name, wire_dtype=F32, **options)


def consolidates(rank, world, name, way, to, options, folder):
    """Train two steps, consolidate, and have rank `to` alone call state_dict()."""
    params, optimizer = everything(name, way, in_seconds(4), **options)
    train(optimizer, params, range(2))
    held = [(t.data_ptr(), t.shape) for p in params for t in optimizer.state[p].values()]
    optimizer.consolidate_state_dict(to)
    assert held == [(t.data_ptr(), t.shape) for p in params for t in optimizer.state[p].values()]
    for group in optimizer.param_groups:
        group["lr"] /= 2  # a scheduler may come between
    told = None
    if to in (None, rank):
        saved = optimizer.state_dict()
        tensors = [t for state in saved["state"].values() for t in state.values()]
        assert {type(t) for t in tensors} == {torch.Tensor} and {t.device.type for t in tensors} == {"cpu"}
        assert [group["lr"] for group in saved["param_groups"]] == [0.05, 0.005]
        if rank == (to or 0):
            torch.save([params, saved], f"{folder}/saved.pt")
    dist.barrier()
    if to not in (None, rank):
        saved = optimizer.state_dict()
        assert saved["state"] == {} and saved["consolidated_on_rank"] == to
        told = refusal(optimizer.load_state_dict, saved)
    train(optimizer, params, range(2, 4))
    return params, told


def goes_on(rank, world, name, way, options, folder):
    """Two more steps from the file of `consolidates`, loaded on every rank. Returns parameters, and the whole state
    before and after.
    """
    weights, saved = torch.load(f"{folder}/saved.pt", weights_only=False)
    params, optimizer = everything(name, way, **options)
    with torch.no_grad():
        for p, weight in zip(params, weights):
            p.copy_(weight)
    optimizer.load_state_dict(saved)
    loaded = [t.clone() for t in state_of(optimizer, params)]
    optimizer.consolidate_state_dict(None)  # what is still whole on every rank
    assert same(loaded, state_of(optimizer, params))
    train(optimizer, params, range(2, 4))
    return [p.detach() for p in params], loaded, state_of(optimizer, params)


def one_process(name, options):
    params, optimizer = everything(name, None, **options)
    train(optimizer, params, range(2))
    for group in optimizer.param_groups:
        group["lr"] /= 2
    middle = [t.clone() for t in state_of(optimizer, params)]
    train(optimizer, params, range(2, 4))
    return params, middle, state_of(optimizer, params)


@pytest.mark.parametrize(("name", "way", "world", "to", "options"), [
    ("Muon", "shard_state", 2, 0, {}), ("NorMuon", "shard_state", 3, 2, {}), ("NorMuon", "shard_state", 3, None, {}),
    ("NorMuon", "shard_state", 2, 1, {"state_dtype": torch.bfloat16}),
    ("Muon", "shard_state", 2, None, {"state_dtype": torch.bfloat16})], ids=str)
def test_what_one_rank_saves_goes_on_anywhere_with_the_bits_of_one_process(name, way, world, to, options, optimizer,
                                                                            tmp_path):
    params, middle, end = one_process(name, options)
    results = run_ranks(world, consolidates, name, way, to, options, str(tmp_path))
    assert all(same(params, theirs) for theirs, _ in results)
    for rank, (_, told) in enumerate(results):
        assert told is None if to in (None, rank) else f"gathered it on rank {to}. Load, on all ranks, what" in told
    for again, others in ((world, way), (5 - world, way), (2, None)):
        for weights, loaded, state in run_ranks(again, goes_on, name, others, options, str(tmp_path)):
            assert same(params, weights) and same(middle, loaded) and same(end, state)


def unreduced_bits(rank, world, folder):
    """With unreduced gradients: a run that is resumed from the file of rank 0, and one that is not."""
    params, optimizer = everything("NorMuon", "unreduced")
    train(optimizer, params, range(2))
    optimizer.consolidate_state_dict()
    if rank == 0:
        torch.save(optimizer.state_dict(), f"{folder}/saved.pt")
    dist.barrier()
    heirs, heir = everything("NorMuon", "unreduced")
    with torch.no_grad():
        for p, weight in zip(heirs, params):
            p.copy_(weight)
    heir.load_state_dict(torch.load(f"{folder}/saved.pt", weights_only=True))
    for those, stepper in ((params, optimizer), (heirs, heir)):
        train(stepper, those, range(2, 4))
    return same(params, heirs) and same(state_of(optimizer, params), state_of(heir, heirs))


@pytest.mark.parametrize("world", [2, 3])
def test_unreduced_gradients_too(world, optimizer, tmp_path):
    assert run_ranks(world, unreduced_bits, str(tmp_path)) == [True] * world


def consolidates_in_threads(rank, world, to):
    params, optimizer = everything("NorMuon", "shard_state")
    train(optimizer, params, range(2))
    optimizer.consolidate_state_dict(to)
    found = optimizer.state_dict()["state"]
    return [t for i in range(len(params)) if i in found for _, t in sorted(found[i].items())]


@pytest.mark.parametrize("to", [3, None])
def test_many_ranks_with_rows_for_few(to, optimizer):
    params, one = everything("NorMuon", None)
    train(one, params, range(2))
    expected = state_of(one, params)
    results = run_threads(8, consolidates_in_threads, to)
    assert all(same(expected, found) if to in (None, rank) else found == [] for rank, found in enumerate(results))


CHANGES = {
    "step": lambda opt, params: train(opt, params, [5]),
    "load_state_dict": lambda opt, params: opt.load_state_dict(opt.saved),
    "add_param_group": lambda opt, params: opt.add_param_group({"params": [("new", nn.Parameter(torch.ones(4, 4)))]}),
    "state in place": lambda opt, params: opt.state[params[0]]["momentum_buffer"].add_(1),
    "state": lambda opt, params: opt.state[params[0]].update(
        momentum_buffer=opt.state[params[0]]["momentum_buffer"].clone()),
}


def becomes_stale(rank, world):
    """What rank 0 alone is told after each change, and whether ranks together still get what is true."""
    told = {}
    for change, make in CHANGES.items():
        params = small([(7, 6), (4, 4)], [(5, 3)])
        optimizer = of(params, 2, "shard_state", in_seconds(2))
        train(optimizer, params, range(2))
        optimizer.saved = copy.deepcopy(optimizer.state_dict())
        optimizer.consolidate_state_dict()
        assert rank or optimizer.state_dict()["state"][0]["momentum_buffer"].shape == (7, 6)
        make(optimizer, params)
        if rank == 0:
            with pytest.raises(RuntimeError) as raised:
                optimizer.state_dict()
            told[change] = str(raised.value)
        dist.barrier()
        shown = optimizer.state_dict()["state"][0]["momentum_buffer"]
        optimizer.consolidate_state_dict()
        assert torch.equal(shown.full_tensor(), optimizer.state_dict()["state"][0]["momentum_buffer"]) if rank == 0 \
            else shown.full_tensor() is not None
    return told


def test_consolidated_state_is_never_stale(optimizer):
    told, _ = run_ranks(2, becomes_stale)
    assert told.keys() == CHANGES.keys()
    assert all("ranks [0] called state_dict(), but ranks [1] did not within 1 s" in text for text in told.values())


def steps_unseen(rank, world):
    """A step makes it stale also where its kernels write state past torch, which counts no version then."""
    params = small([(4, 4)], [])
    optimizer = of(params, 1, "shard_state", in_seconds(2))
    train(optimizer, params, range(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part("state.consolidated").Consolidated, "is_current", lambda *_: True)
        optimizer.consolidate_state_dict()
        assert rank or optimizer.state_dict()["state"][0]["momentum_buffer"].shape == (4, 4)
        train(optimizer, params, [1])
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"ranks \[1\] did not within 1 s"):
                optimizer.state_dict()
    dist.barrier()
    return True


def test_a_step_makes_it_stale_whatever_it_runs(optimizer):
    assert run_ranks(2, steps_unseen) == [True, True]


def has_nothing_to_do(rank, world):
    """Where every rank has its state, nothing is gathered: rank 0 alone may call it, and state_dict() stays."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    placed = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]))
    plain = nn.Parameter(torch.ones(4, 6))
    equal = []
    for weight, options in ((placed, {}), (plain, {}), (plain, {"process_group": dist.group.WORLD})):
        optimizer = package().Muon([("w", weight)], **options)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        before = optimizer.state_dict()
        if rank == 0:
            optimizer.consolidate_state_dict()
        equal.append(str(before) == str(optimizer.state_dict()))
    return equal


def test_without_owners_nothing_is_done(optimizer):
    assert run_ranks(2, has_nothing_to_do) == [[True] * 3] * 2


def wrong_targets(rank, world):
    optimizer = of(small([(4, 4)], []), 1, "shard_state")
    return [refusal(optimizer.consolidate_state_dict, to) for to in (-1, 2, True, "0", 0.0)]


def test_a_rank_that_is_none_is_refused(optimizer):
    for told in run_ranks(2, wrong_targets):
        assert [text.split(" is not allowed")[0] for text in told] == ["to=-1", "to=2", "to=True", "to='0'", "to=0.0"]
        assert all(text.endswith("a rank of process_group, 0 to 1, or None for every rank") for text in told)
    with pytest.raises(ValueError, match="to=-1 is not allowed"):
        package().Muon([nn.Parameter(torch.ones(2, 2))]).consolidate_state_dict(-1)


# calls that not all ranks make ---------------------------------------------------------------------------------------


def lone_calls(rank, world, way):
    """Some ranks save alone, catch what they are told, and train on; then all save together, and it is right."""
    params = small([(7, 6), (4, 4)], [(5, 3)])
    optimizer = of(params, 2, way, in_seconds(2))
    train(optimizer, params, range(2))
    told = []
    for number, callers in enumerate(([0], list(range(world - 1)), [0])):
        if rank in callers:
            with pytest.raises(RuntimeError) as raised:
                optimizer.state_dict()
            told.append(str(raised.value))
        train(optimizer, params, [2 + number])
    shown = state_of(optimizer, params)
    optimizer.consolidate_state_dict(None)
    return told, same(shown, state_of(optimizer, params)), params


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_saves_alone_is_told_and_disturbs_nobody(world, way, optimizer):
    results = run_ranks(world, lone_calls, way)
    assert all(right and same(results[0][2], params) for _, right, params in results)
    callers = list(range(world - 1))
    assert [len(told) for told, *_ in results] == [3, *[1] * (world - 2), 0]
    for text in (results[0][0][0], results[0][0][2]):
        assert f"ranks [0] called state_dict(), but ranks {list(range(1, world))} did not within 1 s" in text
        assert "call consolidate_state_dict() on all ranks before it, or leave out shard_state=True" in text
    for rank in callers:
        text = results[rank][0][1 if rank == 0 else 0]
        assert f"ranks {callers} called state_dict(), but ranks [{world - 1}] did not within " in text


def unlike_calls(rank, world):
    params = small([(4, 4)], [])
    optimizer, told = of(params, 1, "shard_state"), []
    train(optimizer, params, range(1))
    for first, second in ((optimizer.state_dict, optimizer.consolidate_state_dict),
                          (lambda: optimizer.consolidate_state_dict(1), lambda: optimizer.consolidate_state_dict(0))):
        with pytest.raises(RuntimeError) as raised:
            second() if rank else first()
        told.append(str(raised.value))
    optimizer.consolidate_state_dict()  # the same round on all of them
    return told


def test_unlike_calls_are_told(optimizer):
    first, second = run_ranks(2, unlike_calls)
    assert "ranks [0] called state_dict(), but ranks [1] consolidate_state_dict(to=0)" in first[0]
    assert "ranks [1] called consolidate_state_dict(to=0), but ranks [0] state_dict()" in second[0]
    assert "ranks [0] called consolidate_state_dict(to=1), but ranks [1] consolidate_state_dict(to=0)" in first[1]


def bounds(rank, world):
    barrier = part("communication.store_barrier")
    return [barrier._bound_seconds(in_seconds(seconds)) for seconds in (10, 1000)]


def test_the_first_rank_waits_less_than_the_others(optimizer):
    first, second = run_ranks(2, bounds)
    assert first == [5.0, part("communication.store_barrier").FIRST_RANK_SECONDS] and second == [10.0, 1000.0]


def forgets_rounds(rank, world):
    """A group made anew, or a process that joined later, knows no round of before."""
    barrier, met = part("communication.store_barrier"), []
    for _ in range(3):
        met.append(barrier.wait_for_all(dist.group.WORLD, "call", "advice", refuse=rank == 1))
    if rank == 0:
        barrier._next_round.clear()
    met.append(barrier.wait_for_all(dist.group.WORLD, "call", "advice"))
    return met


def test_ranks_meet_whatever_rounds_they_know(optimizer):
    assert run_ranks(3, forgets_rounds) == [[[1], [1], [1], []]] * 3


class Behind:
    """A store in which the first look does not see the end of a round."""

    def __init__(self, store):
        self.store, self.looks = store, 0

    def __getattr__(self, name):
        return getattr(self.store, name)

    def check(self, keys):
        self.looks += 1
        return self.looks > 1 and self.store.check(keys)


def comes_as_it_ends(rank, world):
    """Rank 0 gives up just before rank 1 comes, which goes on to the next round."""
    barrier, group = part("communication.store_barrier"), in_seconds(2)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"ranks \[0\] called call, but ranks \[1\] did not within 1 s. advice"):
            barrier.wait_for_all(group, "call", "advice")
    dist.barrier()
    store = Behind(barrier._shared_store(group))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(barrier, "_shared_store", lambda group: store)
        return barrier.wait_for_all(group, "call", "advice"), store.looks > 1


def test_a_rank_that_comes_as_a_round_ends_takes_the_next_one(optimizer):
    assert run_ranks(2, comes_as_it_ends) == [([], False), ([], True)]

"""State in host memory: equal bits on all layouts, state dicts, missing gradients, reports, refusals. The order of
transfers is the subject of test_offload_waits.py. Slots are small here, so that a step has many parts.
"""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import package, part, run_threads
from tests.test_bucket_updates import cut

SHAPES = [(16, 24), (24, 16), (10, 12), (16, 24), (3, 8, 6), (34, 16)]
OTHERS = [(200, 8), (7,), ()]
STEPS = 6
# Name -> (class, arguments)
RULES = {
    "muon": ("Muon", {}),
    "normuon, cut into heads": ("NorMuon", {}),
    "sum": ("Muon", {"momentum_form": "sum"}),
    "state in bf16": ("Muon", {"state_dtype": torch.bfloat16}),
    "8 bits": ("NorMuon", {"state_dtype": torch.int8}),
    "adamuon": ("Muon", {"rule": "adamuon"}),
    "dion2": ("Muon", {"rule": "dion2"}),
    "hyperball": ("Muon", {"rule": "hyperball"}),
    "towards the initial weights": ("NorMuon", {"decay": "initial"}),
    "nonfinite": ("NorMuon", {"nonfinite": "skip"}),
}
# Name -> (layout, arguments)
LAYOUTS = {
    "fsdp": ("rows", {}),
    "fsdp, during backward": ("rows", {"overlap_backward": True}),
    "fsdp, dion2": ("rows", {"rule": "dion2"}),
    "fsdp, 8 bits": ("rows", {"state_dtype": torch.int8}),
    "hsdp": ("replicated rows", {}),
    "tp": ("columns", {"decay": "initial"}),
    "fsdp, hyperball during backward": ("rows", {"rule": "hyperball", "overlap_backward": True}),
    "ddp": ("copies", {}),
    "ddp, dion2": ("copies", {"rule": "dion2"}),
    "ddp, dion3": ("copies", {"rule": "dion3"}),
    "ddp, state at owners": ("copies", {"shard_state": True}),
    "ddp, unreduced": ("copies", {"grads_are_reduced": False}),
    "ddp, unreduced, adamuon": ("copies", {"grads_are_reduced": False, "rule": "adamuon"}),
    "fsdp, adamuon during backward": ("rows", {"rule": "adamuon", "overlap_backward": True}),
}


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    monkeypatch.setattr(part("execution.offload.offload"), "LEAST_SLOT", 2048)
    monkeypatch.setattr(part("execution.offload.updates"), "CUT", 16)


def build(place=lambda t: t, cls="Muon", device="cpu", shapes=SHAPES, others=OTHERS, split=None, **options):
    """(parameters, optimizer) with a group of AdamW; equal values in every call."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(place(torch.randn(s, generator=generator).to(device))) for s in [*shapes, *others]]
    named, count = [(f"p{number}", p) for number, p in enumerate(params)], len(shapes)
    groups = [{"params": named[:count], "split": split}, {"params": named[count:], "use_muon": False, "lr": 0.01}]
    return params, getattr(package(), cls)(groups, lr=0.02, weight_decay=0.1, **options)


def give(params, step, place=lambda t: t, without=()):
    """Gradients of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    for number, p in enumerate(params):
        g = torch.randn(p.shape, generator=generator).to(p.device)
        p.grad = None if number in without else place(g)


def held(params, opt):
    """Local weights and state, by key."""
    local = part("params.dtensor").local_of
    found = {(i, None): local(p).clone() for i, p in enumerate(params)}
    opt.wait()
    for i, p in enumerate(params):
        found |= {(i, key): local(t).clone() for key, t in opt.state[p].items()}
    return found


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(t, theirs[key]) for key, t in ours.items())


def memory_of(opt):
    return opt._preparation.place.host.memory


def addresses_of(opt):
    return [block.address for block in memory_of(opt).blocks]


def offloaded(params, opt):
    """Keys of the states that lie in host memory, by parameter."""
    local, memory = part("params.dtensor").local_of, memory_of(opt)
    return [{key for key, t in opt.state[p].items() if memory.holds(local(t))} for p in params]


def part_count(opt):
    return len(opt._preparation.place.scheduler.order)


@pytest.mark.parametrize("rule", RULES)
def test_one_process_gets_equal_bits(rule):
    cls, options = RULES[rule]
    split = [None, {"heads": 2, "dim": 1}, {"rows": [4, 6]}, {"heads": 4}, None, "flatten"] if "heads" in rule else None
    results = []
    for offload_state in (False, True):
        params, opt = build(cls=cls, split=split, offload_state=offload_state, **options)
        for step in range(STEPS):
            give(params, step)
            if rule == "nonfinite" and step in (1, 3):
                params[0].grad[3, 3] = params[6].grad[150, 1] = torch.nan
            opt.step()
        results.append(held(params, opt))
    assert same(*results)
    assert part_count(opt) > 2 * part("execution.offload.scheduler").LEAST_SLOTS
    of_elements = [{key for key, t in opt.state[p].items() if t.shape == p.shape and key != "step"} for p in params]
    assert offloaded(params, opt) == of_elements and all(map(len, of_elements))


@pytest.mark.parametrize("options", [{}, {"rule": "adamuon"}, {"nonfinite": "skip"}, {"collect": True}], ids=str)
def test_buckets_that_are_packed_ahead_get_equal_bits(options):
    options, results = dict(options), []
    collect = options.pop("collect", False)
    for offload_state in (False, True):
        params, opt = build(shapes=[(16, 24)] * 5, others=OTHERS[:1], offload_state=offload_state,
                            workspace_bytes=40000 * (2 if "rule" in options else 1), **options)
        opt.collect_metrics = collect
        for step in range(4):
            give(params, step, without=(1, 3) if step == 2 else ())
            if options.get("nonfinite") and step == 1:
                params[2].grad[0, 0] = params[5].grad[1, 1] = torch.inf
            opt.step()
        results.append(held(params, opt))
    assert same(*results)
    assert len(opt._preparation.place.scheduler.buckets) > 2
    # The report before a step, and the one after it, count both memories of packed matrices
    rows = {row.what: row.nbytes for row in opt.memory_report().rows if row.kind == "workspace"}
    opt.release()
    assert rows == {row.what: row.nbytes for row in opt.memory_report().rows if row.kind == "workspace"}
    assert {"stacks 0", "stacks 1"} < rows.keys()


def on_ranks(rank, world, layout, options, folder=None):
    """Whether a rank gets equal bits with and without offload; number of parts of a step."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    place = torch.clone
    if layout == "copies":
        options = {**options, "process_group": dist.group.WORLD}
    else:
        placements = {"rows": [Shard(0)], "columns": [Shard(1)], "replicated rows": [Replicate(), Shard(0)]}[layout]
        mesh = init_device_mesh("cpu", (2, world // 2) if len(placements) == 2 else (world,))

        def place(t):
            fits = [s if t.ndim > 1 else Replicate() for s in placements]
            return cut(t, mesh, fits)

    results = []
    for offload_state in (False, True):
        params, opt = build(place, "Muon" if "rule" in options else "NorMuon", offload_state=offload_state, **options)
        left = 0
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 + step)
            gradients = [torch.randn(p.shape, generator=generator) for p in params]
            if options.get("grads_are_reduced") is False:
                gradients = [g + rank for g in gradients]
            with opt.last_backward():
                for p, g in [*zip(params, gradients)][::-1]:
                    p.grad = None
                    torch.autograd.backward([p], [place(g)])
            left += len(opt._backward_overlap.started)
            opt.step()
        results.append(held(params, opt))
        assert (left > 0) == options.get("overlap_backward", False)
    return same(*results), part_count(opt), sum(map(len, offloaded(params, opt)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_get_equal_bits(name):
    for is_same, parts, count in run_threads(4 if name == "hsdp" else 2, on_ranks, *LAYOUTS[name]):
        assert is_same and parts > 3 and count > 3


def test_momentum_is_fetched_once_and_written_before_the_weights():
    """With overlap_backward it is fetched again, since the first launch may run before the step."""
    params, opt = build(offload_state=True)
    for step in range(2):
        give(params, step)
        opt.step()
    scheduler = opt._preparation.place.scheduler
    assert all(one.writes for one in scheduler.order)
    ranges = [span for one in scheduler.order for span in one.ranges]
    assert len(ranges) == len(set(ranges))
    (block,) = memory_of(opt).blocks
    assert sum(b - a for _, a, b in ranges) <= block.nbytes
    assert [one.slot.number for one in scheduler.order] == [i % 3 for i in range(len(scheduler.order))]


def test_parts_fill_their_slots(monkeypatch):
    """A matrix is cut where the slot ends: every part but the last of a launch has no room for a further row."""
    monkeypatch.setattr(part("execution.offload.offload"), "LEAST_SLOT", 16384)
    params, opt = build(shapes=[(100, 24), (24, 100)] * 5, others=[], offload_state=True)
    give(params, 0)
    opt.step()
    sizes = [one.nbytes for one in opt._preparation.place.scheduler.order]
    assert len(sizes) == 7 and max(sizes) <= 16384
    # A row, and what is left out for the alignment of three pieces
    assert min(sizes[:-1]) > 16384 - 4 * 100 - 3 * 512


@pytest.mark.parametrize("transposed", [False, True])
def test_8_bit_momentum_with_outer_columns_is_cut_between_blocks(transposed):
    """Weights column by column in memory: momentum too large for a slot is cut within its rows, which have a scale for
    each 64 numbers.
    """
    results = []
    for offload_state in (False, True):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(s[::-1]).T) for s in ((96, 200), (40, 300), (1, 5000))]
        group = {"params": weights, "transposed": transposed}
        opt = package().Muon([group], lr=0.02, state_dtype=torch.int8, offload_state=offload_state)
        for step in range(2):
            give(weights, step)
            opt.step()
        results.append(held(weights, opt))
    assert same(*results)
    assert part_count(opt) > 10


def initial_weights_on_the_host(rank, world):
    """Whether a rank gets equal bits with and without offload of the initial weights alone, and what is offloaded."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh, results = init_device_mesh("cpu", (world,)), []
    for offload_state in (False, 4 * 48 * 200):
        torch.manual_seed(0)
        whole, gradients = torch.randn(96, 200), torch.randn(3, 96, 200)
        by_column = [t.chunk(world)[rank].T.contiguous().T for t in (whole, *gradients)]
        W, *Gs = (DTensor.from_local(t, mesh, [Shard(0)]) for t in by_column)
        weight = nn.Parameter(W)
        group = {"params": [weight], "split": {"rows": [24, 48, 24]}}
        options = {"decay": "initial", "weight_decay": 0.1, "overlap_backward": True}
        opt = package().Muon([group], lr=0.02, offload_state=offload_state, **options)
        for G in Gs:
            weight.grad = G
            opt.step()
        results.append(held([weight], opt))
    return same(*results), offloaded([weight], opt)


def test_pieces_are_cut_along_the_state_that_is_on_the_host():
    """The momentum stays on the device, column by column as its weight. The initial weight goes to the host row by
    row, since units are blocks of rows.
    """
    for is_same, keys in run_threads(2, initial_weights_on_the_host):
        assert is_same and keys == [{"initial_weight"}]


def test_the_first_parts_are_fetched_during_backward():
    results = []
    for offload_state in (False, True):
        params, opt = build(offload_state=offload_state, overlap_backward=True)
        for step in range(4):
            with opt.last_backward():
                if offload_state and step > 0:
                    scheduler = opt._preparation.place.scheduler
                    assert [slot.holds for slot in scheduler.slots] == scheduler.order[:3]
                give(params, step)
            opt.step()
        results.append(held(params, opt))
    assert same(*results)


def spec_of_another_device(rank, world):
    """A shard on the host stays there, whatever the devices of the mesh: "meta" is none of them."""
    from torch.distributed.tensor import Shard, init_device_mesh

    like = cut(torch.ones(6, 4), init_device_mesh("cpu", (world,)), [Shard(0)])
    found = part("params.dtensor").with_local(like, torch.ones(3, 4, dtype=torch.bfloat16, device="meta"))
    assert (found.shape, found.dtype, found.placements) == (like.shape, torch.bfloat16, like.placements)
    return found.device.type, found.device_mesh is like.device_mesh


def test_a_dtensor_may_have_its_shard_elsewhere():
    assert run_threads(2, spec_of_another_device) == [("meta", True)] * 2


READERS = {
    "wait": lambda opt: opt.wait(),
    "state_dict": lambda opt: opt.state_dict(),
    "load_state_dict": lambda opt: opt.load_state_dict(opt.state_dict()),
    "init_state": lambda opt: opt.init_state(),
    "release": lambda opt: opt.release(),
    "copy": copy.deepcopy,
    "add_param_group": lambda opt: opt.add_param_group({"params": [("new", nn.Parameter(torch.ones(2, 2)))]}),
}


@pytest.mark.parametrize("name", READERS)
def test_methods_that_read_state_wait_on_the_host(name, monkeypatch):
    params, opt = trained(range(2), offload_state=True)
    waits, scheduler = [], opt._preparation.place.scheduler
    monkeypatch.setattr(scheduler.streams, "synchronize", waits.append)
    give(params, 2)
    opt.step()
    with opt.last_backward():
        pass
    assert waits == []  # a step does not, nor a backward
    READERS[name](opt)
    assert scheduler.written in waits and scheduler.read in waits


@pytest.mark.parametrize("options", [{}, {"rule": "adamuon"}, {"offload_state": 9000}], ids=str)
def test_metrics_are_those_without_offload(options):
    """Sums are made part by part, of the parameters that are cut as well."""
    found = []
    for offload_state in (False, options.get("offload_state", True)):
        params, opt = build(**{**options, "offload_state": offload_state})
        opt.collect_metrics = True
        for step in range(3):
            give(params, step)
            opt.step()
        found.append(opt.metrics(per_parameter=True).as_dict())
    assert found[1] == pytest.approx(found[0], rel=1e-5) and len(found[0]) > 40


# State dicts


def trained(steps, **options):
    params, opt = build(cls="NorMuon", **options)
    for step in steps:
        give(params, step)
        opt.step()
    return params, opt


@pytest.mark.parametrize("first, second", [(True, False), (False, True), (True, True), (3000, True)])
def test_state_dicts_go_between_host_and_device(first, second):
    params, opt = trained(range(3), offload_state=first)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    others, other = trained(range(5, 7), offload_state=second)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    addresses = addresses_of(other) if second else None
    for p, q in zip(params, others):
        q.data.copy_(p.data)
    for stepped, one in ((params, opt), (others, other)):
        for step in range(3, 6):
            give(stepped, step)
            one.step()
    assert same(held(params, opt), held(others, other))
    if second:  # not into the memory of before, which a state dict may hold
        assert not {*addresses_of(other)} & {*addresses} and all(offloaded(others, other))


@pytest.mark.parametrize("options, group", [
    ({"state_dtype": torch.int8}, {"use_muon": False}), ({}, {"state_dtype": torch.bfloat16, "use_muon": False}),
    ({"rule": "adamuon", "state_dtype": torch.bfloat16}, {})], ids=["int8 and fp32", "bf16 of a group", "adamuon"])
def test_states_of_several_dtypes_are_saved(options, group, optimizer):
    """torch.save refuses tensors of two dtypes in one storage, as the host memory is. The file has no other bytes."""
    params = [nn.Parameter(torch.randn(64, 64)) for _ in range(2)]
    opt = optimizer.Muon([{"params": params[:1]}, {"params": params[1:], **group}], offload_state=True, **options)
    for p in params:
        p.grad = torch.randn(64, 64)
    opt.step()
    opt.state["another's"] = 1  # of a wrapper
    whole, one, pickled = io.BytesIO(), io.BytesIO(), io.BytesIO()
    saved = opt.state_dict()
    torch.save(opt, pickled)
    pickled.seek(0)
    again = torch.load(pickled, weights_only=False)
    assert same(again.state_dict()["state"][0], saved["state"][0]) and again.state["new"] == {}
    torch.save(saved, whole)
    torch.save(saved["state"][0], one)
    whole.seek(0)
    found = torch.load(whole)["state"]
    assert len(one.getvalue()) < len(whole.getvalue())
    for number, p in enumerate(params):
        assert all(torch.equal(found[number][key], value) for key, value in opt.state[p].items())
        assert all(value.data_ptr() == saved["state"][number][key].data_ptr() for key, value in opt.state[p].items())


def test_a_copy_has_memory_of_its_own():
    params, opt = trained(range(2), offload_state=True)
    twins, twin = copy.deepcopy((params, opt))
    for step in range(2, 4):
        give(params, step)
        opt.step()
    for step in range(2, 4):
        give(twins, step)
        twin.step()
    assert same(held(params, opt), held(twins, twin))
    assert not {*addresses_of(opt)} & {*addresses_of(twin)}


def copied_shards(rank, world):
    """A copy, and a load of a copied state dict, of state sharded like DTensors."""
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    params, opt = build(lambda t: cut(t, mesh, [Shard(0)]), shapes=SHAPES[:2], others=[(8, 8)], offload_state=True)
    for step in range(2):
        give(params, step, lambda t: cut(t, mesh, [Shard(0)]))
        opt.step()
    twins, twin = copy.deepcopy((params, opt))
    twin.load_state_dict(copy.deepcopy(opt.state_dict()))
    for ps, one in ((params, opt), (twins, twin)):
        give(ps, 2, lambda t: cut(t, mesh, [Shard(0)]))
        one.step()
    return same(held(params, opt), held(twins, twin))


def test_state_of_dtensors_is_copied():
    assert all(run_threads(2, copied_shards))


def test_state_that_the_user_changes_is_used():
    """Between steps, in place or as new tensors; parameters that change places keep their state."""
    results = []
    for offload_state in (False, True):
        params, opt = trained(range(2), offload_state=offload_state)
        opt.wait()
        opt.state[params[0]]["momentum_buffer"].mul_(0.5)
        opt.state[params[1]]["momentum_buffer"] = torch.ones(24, 16)
        one, two = opt.state[params[0]], opt.state[params[3]]
        one["momentum_buffer"], two["momentum_buffer"] = two["momentum_buffer"], one["momentum_buffer"]
        for step in range(2, 4):
            give(params, step)
            opt.step()
        results.append(held(params, opt))
    assert same(*results) and all(offloaded(params, opt))


def resharded(rank, world, folder, first, second):
    """Saved by torch.distributed.checkpoint under rows, loaded under columns."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh, results = init_device_mesh("cpu", (world,)), []

    def made(dim, offload_state):
        params, opt = build(lambda t: cut(t, mesh, [Shard(dim)]), "NorMuon", others=[(12, 8)],
                            offload_state=offload_state)
        for step in range(2):
            give(params, step + 7 * dim, lambda t: cut(t, mesh, [Shard(dim)]))
            opt.step()
        return params, opt

    def named(params, opt):
        state = opt.state_dict()["state"]
        return {f"{i}.{key}": t for i in range(len(params)) for key, t in state[i].items()}

    params, opt = made(0, first)
    dcp.save(named(params, opt), checkpoint_id=folder)
    others, other = made(1, second)
    loaded = named(others, other)
    dcp.load(loaded, checkpoint_id=folder)
    whole = {**other.state_dict()}
    whole["state"] = {i: {key: loaded[f"{i}.{key}"] for key in of} for i, of in whole["state"].items()}
    other.load_state_dict(whole)
    give(others, 9, lambda t: cut(t, mesh, [Shard(1)]))
    for group in other.param_groups:
        group["lr"] = 0.0
        group["momentum"] = 0.95
    for p, q in zip(params, others):
        ours, theirs = ({key: t.full_tensor() if hasattr(t, "full_tensor") else t for key, t in o.state[x].items()}
                        for o, x in ((opt, p), (other, q)))
        results.append(ours.keys() == theirs.keys() and all(torch.equal(t, theirs[key]) for key, t in ours.items()))
    other.step()
    return all(results), all(offloaded(others, other)) if second else None


@pytest.mark.parametrize("first, second", [(True, False), (False, True)])
def test_dcp_reshards_between_host_and_device(first, second, tmp_path):
    assert run_threads(2, resharded, str(tmp_path), first, second) == [(True, True if second else None)] * 2


# Steps that are not like the last


def test_release_frees_the_slots_and_keeps_host_memory():
    params, opt = trained(range(2), offload_state=True)
    plain, other = trained(range(2))
    addresses = addresses_of(opt)
    slot = part("execution.offload.scheduler").Slot  # torch 2.15 has a class of this name, too
    assert [t for t in gc.get_objects() if type(t) is slot]
    opt.release()
    gc.collect()
    assert opt._preparation.place.scheduler is None
    assert not [t for t in gc.get_objects() if type(t) is slot]
    for step in range(2, 4):
        for ps, one in ((params, opt), (plain, other)):
            give(ps, step)
            one.step()
    assert same(held(params, opt), held(plain, other)) and addresses_of(opt) == addresses


@pytest.mark.parametrize("options", [{}, {"nonfinite": "raise"}, {"nonfinite": "skip"}], ids=str)
def test_missing_and_nonfinite_gradients(options):
    results = []
    for offload_state in (False, True):
        params, opt = build(cls="NorMuon", offload_state=offload_state, **options)
        for step in range(5):
            give(params, step, without=(1, 4, 6) if step in (1, 2) else ())
            if step == 3 and options:
                params[2].grad[0, 0] = torch.inf
            if step == 3 and options.get("nonfinite") == "raise":
                before = held(params, opt)
                with pytest.raises(RuntimeError, match="NaN or Inf"):
                    opt.step()
                assert same(before, held(params, opt))
            else:
                opt.step()
        results.append(held(params, opt))
    assert same(*results)


@pytest.mark.parametrize("way", ["requires_grad", "missing"])
def test_parameters_that_take_turns_keep_their_own_state(way):
    """Parameters of equal shape, of which other ones are stepped each time: experts without tokens, or heads in turn.
    No state may lie where that of a parameter lies that sits the step out.
    """
    results = []
    for offload_state in (False, True):
        params, opt = build(shapes=[(16, 8)] * 3, others=[(40,)] * 2, offload_state=offload_state)
        for step, stepped in enumerate([(0, 3), (1, 4), (0, 3), (0, 1, 3, 4), (0, 2), (0, 1, 4), (0, 1, 2, 3, 4)]):
            give(params, step, without=set(range(5)) - set(stepped))
            if way == "requires_grad":
                for number, p in enumerate(params):
                    p.requires_grad_(number in stepped)
            opt.step()
        results.append(held(params, opt))
    assert same(*results)


def test_a_change_of_the_stepped_parameters_copies_no_state(monkeypatch):
    """The first block has room for parameters without a gradient; later ones get a block of their own."""
    memory, host_bytes, taken = part("execution.offload.memory"), part("execution.offload.memory")._host_bytes, []
    monkeypatch.setattr(memory, "_host_bytes", lambda *args: taken.append(args[0]) or host_bytes(*args))
    monkeypatch.setattr(part("execution.offload.offload"), "slots_for", lambda nbytes: (1024, 3))
    results = []
    for offload_state in (False, True):
        params, opt = build(shapes=[(16, 8)] * 4, others=[(40,)] * 2, offload_state=offload_state)
        where = {}
        for step, stepped in enumerate([(0, 4), (1, 2, 5), (0, 3), (0, 1, 2, 3, 4, 5), (2,), (0, 1, 4, 6), (5, 6)]):
            if step == 5:
                params.append(nn.Parameter(torch.ones(16, 8)))
                opt.add_param_group({"params": [("late", params[-1])]})
            give(params, step, without=set(range(7)) - set(stepped))
            opt.step()
            for number, p in enumerate(params) if offload_state else ():
                for key in {"momentum_buffer", "exp_avg", "exp_avg_sq"} & set(opt.state.get(p, ())):
                    address = opt.state[p][key].data_ptr()
                    assert where.setdefault((number, key), address) == address
        results.append(held(params, opt))
    assert same(*results)
    assert taken == [4 * 4 * 16 * 8 + 2 * 2 * 256, 4 * 16 * 8] and len(where) == 5 + 2 * 2


def test_what_stays_on_the_device_stays_when_others_are_stepped():
    """With offload_state=<bytes>, a parameter of a later step takes no bytes from one that sits it out."""
    params, opt = build(shapes=[(16, 8)] * 3, others=[], offload_state=16 * 8 * 4)
    for step, stepped in enumerate([(1,), (0, 2), (0, 1, 2)]):
        give(params, step, without={0, 1, 2} - set(stepped))
        opt.step()
    assert list(map(len, offloaded(params, opt))) == [1, 0, 1]


def test_a_state_dict_keeps_its_values_after_another_one_is_loaded():
    params, opt = build(offload_state=True)
    for step in range(2):
        give(params, step)
        opt.step()
        if step == 0:
            first = copy.deepcopy(opt.state_dict())
    second = opt.state_dict()
    expected = copy.deepcopy(second)
    opt.load_state_dict(first)
    give(params, 2)
    opt.step()
    opt.wait()
    for number, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(second["state"][number][key], value), (number, key)


@pytest.mark.parametrize("options", [{}, {"overlap_backward": True}], ids=str)
def test_state_that_is_written_after_backward_has_begun(options):
    """As `wait` promises; a part that was fetched before is fetched again."""
    results = []
    for offload_state in (False, True):
        params, opt = build(offload_state=offload_state, **options)
        for step in range(4):
            with opt.last_backward():
                give(params, step)
                if step == 2:
                    opt.wait()
                    for state in opt.state.values():
                        for key in ("momentum_buffer", "exp_avg"):
                            if key in state:
                                state[key].mul_(0.5)
            opt.step()
        results.append(held(params, opt))
    assert same(*results)


def test_gradients_of_another_form_and_frozen_parameters():
    """What is bound anew goes on with the state in host memory."""
    results = []
    for offload_state in (False, True):
        params, opt = build(offload_state=offload_state)
        for step in range(6):
            give(params, step)
            if step == 2:
                params[0].grad = params[0].grad.T.contiguous().T
                params[6].grad = params[6].grad.T.contiguous().T  # of AdamW, larger than a slot: not cut
            params[3].requires_grad_(step < 4)
            params[3].grad = params[3].grad if step < 4 else None
            opt.step()
        results.append(held(params, opt))
    assert same(*results)


def test_an_error_leaves_a_step_that_can_be_loaded_over(monkeypatch):
    params, opt = trained(range(2), offload_state=True)
    saved = copy.deepcopy((opt.state_dict(), [p.detach() for p in params]))
    before = held(params, opt)
    bucket = part("execution.bucket_updates").LaunchedUpdate
    monkeypatch.setattr(bucket, "_run_iteration", lambda *_: 1 / 0)
    give(params, 2)
    with pytest.raises(ZeroDivisionError):
        opt.step()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="failed half-way"):
        opt.step()
    opt.load_state_dict(saved[0])
    for p, w in zip(params, saved[1]):
        p.data.copy_(w)
    assert same(before, held(params, opt))
    opt.step()


# Bytes


def test_the_report_says_what_lies_where(monkeypatch):
    params, opt = build(cls="NorMuon", offload_state=True)
    numel = [sum(p.numel() for p in group["params"]) for group in opt.param_groups]
    before = opt.memory_report()
    give(params, 0)
    opt.step()
    after = opt.memory_report()
    for report in (before, after):
        assert report.bytes_of("state", where="host") == 4 * numel[0] + 8 * numel[1]
        slots = [row for row in report.rows if "slots" in row.what]
        assert [(row.kind, row.where, row.nbytes) for row in slots] == [("workspace", "device", 3 * 2048)]
    small = sum(t.nbytes for p in params for key, t in opt.state[p].items() if key in ("step", "second_moment"))
    assert after.bytes_of("state", where="device") == before.bytes_of("state", where="device") == small
    kept, other = build(cls="NorMuon", offload_state=4 * 16 * 24 + 100)
    before = other.memory_report()
    give(kept, 0)
    other.step()
    for report in (before, other.memory_report()):
        # The first matrix, and averages of 7 and of 1 element, which fit into the rest
        assert report.bytes_of("state", where="device") - small == 4 * 16 * 24 + 2 * 4 * (7 + 1)
    assert offloaded(kept, other)[0] == set() and offloaded(kept, other)[1] == {"momentum_buffer"}


def test_a_large_model_keeps_little_of_its_state_on_the_gpu(monkeypatch):
    monkeypatch.undo()
    with torch.device("meta"):
        layer = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
        matrices = [nn.Parameter(torch.empty(s)) for s in 8 * layer]
        others = [nn.Parameter(torch.empty(s)) for s in [(128256, 4096), (4096,)]]
    groups = [{"params": matrices}, {"params": others, "use_muon": False}]
    count = sum(p.numel() for p in matrices + others)
    for cls, ranks in (("Muon", 1), ("NorMuon", 1), ("NorMuon", 8)):
        report = getattr(package(), cls).memory_forecast(groups, ranks=ranks, offload_state=True)
        on_gpu = report.bytes_of("state", where="device") + sum(r.nbytes for r in report.rows if "slots" in r.what)
        assert on_gpu <= 0.05 * count / ranks
        assert report.bytes_of("state", where="host") >= 3.9 * count / ranks


# What is refused


@pytest.mark.parametrize("value", [0, -1, 1.5, "cpu", None])
def test_values_that_are_no_place(value, optimizer):
    with pytest.raises(ValueError, match="offload_state=.* is not allowed: it must be True, False or a whole number"):
        optimizer.Muon([nn.Parameter(torch.ones(2, 2))], offload_state=value)


def test_split_weights_are_refused(optimizer):
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    with pytest.raises(NotImplementedError, match="master_weights='split16' .* offload_state .* leave one of them out"):
        optimizer.Muon([weight], offload_state=True, master_weights="split16")


@pytest.mark.parametrize("way", ["load_state_dict", "import_state"])
@pytest.mark.parametrize("use_muon", [True, False])
def test_a_checkpoint_of_split_weights_is_refused_when_it_is_loaded(optimizer, tmp_path, way, use_muon):
    """Before any change; without the option in the state dict the weights go on in bf16."""
    def made(**options):
        weight = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        opt = optimizer.Muon([{"params": [("weight", weight)], "use_muon": use_muon}], **options)
        weight.grad = torch.ones_like(weight)
        opt.step()
        return weight, opt

    weight, opt = made(offload_state=True)
    other = made(master_weights="split16")[1]
    saved, file = other.state_dict(), tmp_path / "state.safetensors"
    before, groups = held([weight], opt), [dict(group) for group in opt.param_groups]
    optimizer.export_state(other, file)
    with pytest.raises(ValueError, match="group 0 was saved with master_weights.*without offload_state.*remove"):
        opt.load_state_dict(saved) if way == "load_state_dict" else optimizer.import_state(opt, file)
    assert same(before, held([weight], opt)) and opt.param_groups == groups
    opt.step()
    for group in saved["param_groups"]:
        del group["master_weights"]
    with pytest.warns(UserWarning, match="weight_rest of 1 parameters .* is not loaded"):
        opt.load_state_dict(saved)
    opt.step()


def test_a_graph_of_the_whole_step_is_refused(optimizer):
    with pytest.raises(ValueError, match="offload_state is not allowed with capturable=True.*Leave one of them out"):
        optimizer.Muon([nn.Parameter(torch.ones(2, 2))], offload_state=True, capturable=True)


def test_a_step_inside_a_graph_of_the_user_is_refused(monkeypatch):
    params, opt = trained(range(1), offload_state=True)
    before = held(params, opt)
    monkeypatch.setattr(part("execution.offload.offload"), "capturing", lambda device: True)
    give(params, 1)
    with pytest.raises(RuntimeError, match="offload_state inside a CUDA graph of your own.*outside of the graph"):
        opt.step()
    monkeypatch.undo()
    assert same(before, held(params, opt))
    opt.step()


def test_a_dry_run_gives_no_part_a_slot():
    """On a GPU the kernels of the first step are compiled by launches that do nothing."""
    results = []
    for offload_state in (False, True):
        params, opt = build(offload_state=offload_state)
        give(params, 0)
        opt._prepare(False)
        weights, state = [p.detach().clone() for p in params], part("kernels.launch.jit").thread_state
        state.dry_run = True
        try:
            for update, group in opt._bound.all_jobs:
                for launch in update.launches(group) if offload_state else ():
                    launch()
        finally:
            state.dry_run = False
        for p, w in zip(params, weights):  # on a CPU torch takes the place of kernels that are left out
            p.data.copy_(w)
        assert not offload_state or opt._preparation.place.scheduler.placed == 0
        for step in range(2):
            give(params, step)
            opt.step()
        results.append(held(params, opt))
    assert same(*results)


def test_steps_inside_of_inference_mode():
    results = []
    for offload_state in (False, True):
        params, opt = build(rule="adamuon", offload_state=offload_state)
        for step in range(4):
            give(params, step)
            with torch.inference_mode(step < 2):
                opt.step()
        results.append(held(params, opt))
    assert same(*results)


def test_graphs_are_never_captured(monkeypatch):
    """Not even where the device has graphs."""
    for offload_state in (False, True):
        params, opt = build(offload_state=offload_state)
        monkeypatch.setattr(part("execution.cuda_graphs"), "available", lambda device: True)
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_: None)
        graphs = opt._preparation.graphs
        graphs.begin(torch.device("cpu"))
        assert graphs.on is not offload_state


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"overlap_forward": True}, {"rule": "adamuon"}, {"nonfinite": "skip"},
                                     {"state_dtype": torch.bfloat16}], ids=str)
def test_equal_bits_on_a_gpu_over_many_steps(options, monkeypatch):
    """Without blocking launches, and without a wait of the host between steps: a race shows in the bits."""
    monkeypatch.setattr(part("execution.offload.offload"), "LEAST_SLOT", 1 << 20)
    monkeypatch.setattr(part("execution.offload.updates"), "CUT", 1024)
    shapes, others = [(1024, 1024), (512, 2048), (2048, 512)] * 8, [(32000, 256), (1024,)]
    results = []
    for offload_state in (False, True):
        params, opt = build(device="cuda", shapes=shapes, others=others, offload_state=offload_state,
                            workspace_bytes=160 << 20, **options)
        torch.manual_seed(0)
        gradients = [[torch.randn(p.shape, device="cuda") for p in params] for _ in range(4)]
        for step in range(20):
            for p, g in zip(params, gradients[step % 4]):
                p.grad = g
            opt.step()
        results.append({key: t.cpu() for key, t in held(params, opt).items()})
    assert part_count(opt) > 30 and all(block.flat.is_pinned() for block in memory_of(opt).blocks)
    assert all(opt.state[p]["momentum_buffer"].device.type == "cpu" for p in params[:24])
    assert same(*results)


@pytest.mark.gpu
def test_memory_on_a_gpu(monkeypatch):
    """State takes no memory of the GPU but slots. benchmarks/step.py has the times."""
    monkeypatch.undo()
    shapes = [(4096, 4096)] * 16
    peaks = []
    for offload_state in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        params, opt = build(device="cuda", shapes=shapes, others=[(32000, 1024)], offload_state=offload_state)
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        opt.step()
        torch.cuda.reset_peak_memory_stats()
        opt.step()
        opt.wait()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        state = sum(t.nbytes for p in params for t in opt.state[p].values())
        report = opt.memory_report()
        del params, opt
    assert peaks[0] - peaks[1] >= 0.9 * state
    slots = sum(row.nbytes for row in report.rows if "slots" in row.what)
    assert slots + report.bytes_of("state", where="device") <= 0.05 * state / 4

"""`memory_report`: what it predicts before a step is there after it; forecasts need no ranks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import everywhere, package, part, run_threads
from tests.test_store import Peak

SHAPES = [(16, 24), (24, 16), (10, 12), (16, 24), (3, 8, 6), (34, 16)]
OTHERS = [(20, 8), (7,)]
# Name -> (process groups' mode, arguments)
WAYS = {
    "fsdp": ("fsdp", {}),
    "fsdp in bf16": ("fsdp", {"state_dtype": torch.bfloat16, "workspace_bytes": 40_000}),
    "fsdp in 8 bits": ("fsdp", {"state_dtype": torch.int8}),
    "fsdp, overlap": ("fsdp", {"overlap_backward": True}),
    "fsdp, offload": ("fsdp", {"offload_state": 2_000}),
    "ddp": ("ddp", {}),
    "ddp, state at owners": ("ddp", {"shard_state": True, "workspace_bytes": 40_000}),
    "ddp, unreduced": ("ddp", {"grads_are_reduced": False}),
    "ddp, unreduced in 8 bits": ("ddp", {"grads_are_reduced": False, "state_dtype": torch.int8}),
}


def groups_of(wrapped=lambda t: t) -> tuple[list, list]:
    """(parameters, groups): matrices of NorMuon, and parameters of AdamW."""
    params = [nn.Parameter(wrapped(torch.ones(shape))) for shape in SHAPES + OTHERS]
    named, count = [(f"p{number}", p) for number, p in enumerate(params)], len(SHAPES)
    return params, [{"params": named[:count]}, {"params": named[count:], "use_muon": False}]


def before_and_after(rank, world, way):
    """The reports of a rank before the first step, after it and after `release`; bytes of its state."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    kind, options = WAYS[way]
    wrapped = {}
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        wrapped = {"wrapped": lambda t: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None)}
    else:
        options = {**options, "process_group": dist.group.WORLD}
    params, groups = groups_of(**wrapped)
    opt = package().NorMuon(groups, **options)
    before = opt.memory_report()
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    local = part("params.dtensor").local_of
    held = sum(local(t).nbytes for state in opt.state.values() for t in state.values())
    after = opt.memory_report()
    opt.release()
    return before, after, opt.memory_report(), held


def figures(report, *, largest: bool = False) -> dict:
    """Bytes of each row; tables are estimates before a step."""
    return {(r.kind, r.what, r.group, r.dtype, r.where): r.largest_nbytes if largest else r.nbytes
            for r in report.rows if r.kind != "tables" and (r.largest_nbytes if largest else r.nbytes)}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_predicted_is_there_after_a_step(way):
    world = 3
    results = run_threads(world, before_and_after, way)
    for rank, (before, after, released, held) in enumerate(results):
        assert figures(before) == figures(after)
        assert [r.is_measured for r in (before, after, released)] == [False, True, False]
        assert figures(released) == figures(before)
        assert after.bytes_of("state") == held > 0 < after.bytes_of("workspace")
        assert (before.rank, before.rank_count) == (rank, world)
    # Without ranks: the parameters whole, on this process
    kind, options = WAYS[way]
    forecast = package().NorMuon.memory_forecast(groups_of()[1], ranks=world, layout=kind, **options)
    assert figures(forecast) == figures(results[0][1])
    totals = [before.total_bytes for before, *_ in results]
    for before, after, *_ in results:
        assert before.largest_rank == after.largest_rank == forecast.largest_rank
        assert figures(after, largest=True) == figures(results[before.largest_rank][1])
        assert totals[before.largest_rank] == max(totals)


def of_rules(rank, world, kind):
    """{rule: (report before the first step, report after it)} of a rank."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    wrapped, options = {}, {}
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        wrapped = {"wrapped": lambda t: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None)}
    else:
        options = {"process_group": dist.group.WORLD}
    found = {}
    for name, (of_rule, rule_of_rest) in RULES.items():
        params, groups = groups_of(**wrapped)
        groups[1].update(rule_of_rest)
        opt = package().Muon(groups, **of_rule, **options)
        before = opt.memory_report()
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        found[name] = before, opt.memory_report()
        opt.release()
    return found


def of_blocks(rank, world, split):
    """Reports before and after a step of rows over ranks, for each dtype of momentum and way of storing a matrix."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh, found = init_device_mesh("cpu", (world,)), []
    for dtype, transposed in itertools.product((torch.float32, torch.int8), (False, True)):
        params = [nn.Parameter(distribute_tensor(torch.ones(s), mesh, [Shard(0)], src_data_rank=None))
                  for s in ((12, 256), (4, 8, 128), (6, 70, 2))]
        groups = [{"params": params[:2], "split": split, "transposed": transposed},
                  {"params": params[2:], "split": "flatten", "transposed": transposed}]
        opt = package().Muon(groups, state_dtype=dtype, offload_state=True)
        before = opt.memory_report()
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        found.append((before, opt.memory_report()))
    return found


@pytest.mark.parametrize("split", [None, [{"rows": [4, 8], "columns": [128, 128]}, {"columns": [64, 64]}],
                                   {"heads": 2, "dim": 1}], ids=str)
def test_it_is_known_where_the_state_of_blocks_lies(split):
    """Numbers in 8 bits stay on the GPU with blocks of columns, and their scales have other shapes if transposed."""
    for found in run_threads(2, of_blocks, split):
        for before, after in found:
            assert figures(before) == figures(after)


def of_mixed_selections(rank, world):
    """Reports before and after two steps, and whether weights are those of state on the device."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh, found, weights = init_device_mesh("cpu", (world,)), [], []
    for offload_state in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(distribute_tensor(torch.randn(s), mesh, [Shard(1)], src_data_rank=None))
                  for s in ((12, 256), (4, 8, 128), (6, 512))]
        opt = package().Muon(params, rule="dion3", blocks=2, offload_state=offload_state)
        before = opt.memory_report()
        for _ in range(2):
            for p in params:
                p.grad = p.detach().sin()
            opt.step()
        found.append((before, opt.memory_report()))
        weights.append([p.to_local() for p in params])
    return found, all(map(torch.equal, *weights))


def test_only_pieces_from_which_a_rank_selects_stay_whole(monkeypatch):
    """Other pieces of a launch are cut, so slots are as small as predicted. Ranks select from the stack, owners from
    the other parameters.
    """
    monkeypatch.setattr(part("execution.offload.offload"), "LEAST_SLOT", 1024)
    for found, is_equal in run_threads(2, of_mixed_selections):
        assert is_equal
        for before, after in found:
            assert figures(before) == figures(after)


# Name -> (arguments, keys of the group with use_muon=False)
RULES = {
    "muon, initial": ({"decay": "initial"}, {"rule": "sgd"}),
    "dion2": ({"rule": "dion2"}, {}),
    "dion2 in blocks": ({"rule": "dion2", "blocks": 3, "select": "row"}, {"rule": "lion"}),
    "dion3": ({"rule": "dion3", "blocks": 3}, {"rule": "sign"}),
    "dion2 in host memory": ({"rule": "dion2", "offload_state": True}, {}),
    "dion3 in host memory": ({"rule": "dion3", "decay": "initial", "offload_state": True}, {}),
    "hyperball": ({"rule": "hyperball"}, {}),
    "adamuon": ({"rule": "adamuon"}, {}),
    "adamuon, state at owners": ({"rule": "adamuon", "state_at_owners": True}, {}),
    "hyperball, state at owners": ({"rule": "hyperball", "state_at_owners": True}, {}),
    "normuon_columns": ({"rule": "normuon_columns"}, {}),
    "normuon_aspect": ({"rule": "normuon_aspect"}, {}),
    "muon_plus, skip": ({"rule": "muon_plus", "nonfinite": "skip"}, {}),
    "scion": ({"rule": "scion"}, {}),
}


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_every_rule_takes_what_is_predicted(kind, monkeypatch):
    # Less than a matrix from which a rank selects rows
    monkeypatch.setattr(part("execution.offload.offload"), "LEAST_SLOT", 1024)
    results = run_threads(3, of_rules, kind)
    for name, (of_rule, rule_of_rest) in RULES.items():
        for found in results:
            before, after = map(figures, found[name])
            assert before == after, name
        _, groups = groups_of()
        groups[1].update(rule_of_rest)
        forecast = package().Muon.memory_forecast(groups, ranks=3, layout=kind, **of_rule)
        assert figures(forecast) == figures(results[0][name][1]), name


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("rule", ["lion", "sign", "sgd"])
def test_checked_parameters_are_stepped_beside_their_old_values(rule, nonfinite, optimizer):
    param = nn.Parameter(torch.ones(40, 30))
    opt = optimizer.Muon([{"params": [param], "use_muon": False, "rule": rule, "nesterov": False}], nonfinite=nonfinite)
    param.grad = torch.ones_like(param)
    opt.step()
    with Peak(1000) as peak:
        opt.step()
    assert peak.most == opt.memory_report().bytes_of("temporary") > 0


@pytest.mark.parametrize("decay", ["decoupled", "cautious", "initial"])
@pytest.mark.parametrize("rule", ["lion", "sign", "adamw in bf16"])
def test_temporaries_of_elementwise_rules_are_those_of_a_step(rule, decay, optimizer, monkeypatch):
    """Parameters are stepped in parts of limited size. Lion and sign make as many tensors on a CPU as on a GPU. AdamW
    makes some of its own on CPUs only, beside copies of weight and gradient and the temporaries of decay.
    """
    most = 2000
    for module in ("rules.elementwise", "memory.predicted"):
        monkeypatch.setattr(part(module), "MAX_COPIED_ELEMENTS", most)
    dtype = torch.bfloat16 if rule.endswith("bf16") else torch.float32
    params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((5000,), (40, 30), (30, 20))]
    groups = [{"params": params, "use_muon": False, "rule": rule.split()[0]}]
    opt = optimizer.Muon(groups, decay=decay)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    with Peak(1000) as peak:
        opt.step()
    predicted = opt.memory_report().bytes_of("temporary")
    if rule.startswith("adamw"):
        assert predicted == most * (8 + {"decoupled": 0, "cautious": 16, "initial": 8}[decay]) < peak.most
    else:
        assert peak.most == predicted > 0


@pytest.mark.parametrize("name", [name for name, (options, _) in RULES.items()
                                  if "rule" in options and "offload_state" not in options])
def test_the_tables_of_a_gpu_are_about_as_large_as_predicted(name, monkeypatch):
    """Tables are bound as on a GPU; nothing is launched."""
    shapes = (256, 1024), (96, 32), (512, 256)
    opt = package().Muon([nn.Parameter(torch.ones(shape)) for shape in shapes], **RULES[name][0])
    before = opt.memory_report().bytes_of("tables")
    everywhere(monkeypatch, part("kernels.backend"), "use_triton", lambda device: True)
    everywhere(monkeypatch, part("pipeline"), "precompile_kernels", lambda *_: None)
    for p in opt.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    opt._prepare(False)
    assert 0.5 <= before / opt.memory_report().bytes_of("tables") <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True])
def test_graphs_on_a_gpu_take_memory(capturable, optimizer):
    """Graphs of a step are captured in the second step, and freed by `release`. The rule allocates inside of them: the
    package's own launches do not, and their graphs take no memory of the allocator.
    """
    class Damped(optimizer.Rule):
        def after(self, O, units):
            return O / (1 + O.square())

    params = [nn.Parameter(torch.randn(256, 128, device="cuda")) for _ in range(2)]
    groups = [{"params": params[:1]}, {"params": params[1:], "use_muon": False}]
    opt = optimizer.Muon(groups, rule=Damped, capturable=capturable)
    for p in params:
        p.grad = torch.ones_like(p)
    found = [opt.memory_report().bytes_of("graphs")]
    for _ in range(3):
        opt.step()
    found.append(opt.memory_report().bytes_of("graphs"))
    opt.release()
    found.append(opt.memory_report().bytes_of("graphs"))
    assert found[0] == found[2] == 0 < found[1]


def llama_70b():
    """Groups of the parameters of Llama-3-70B, on the meta device."""
    layer = [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), (28672, 8192), (28672, 8192), (8192, 28672)]
    with torch.device("meta"):
        matrices = [nn.Parameter(torch.empty(shape)) for shape in 80 * layer]
        others = [nn.Parameter(torch.empty(shape)) for shape in 2 * [(128256, 8192)] + 161 * [(8192,)]]
    return [{"params": matrices}, {"params": others, "use_muon": False}]


def test_a_model_on_meta_is_planned_for_gpus_that_do_not_exist(optimizer):
    groups = llama_70b()
    given = [dict(group) for group in groups]
    report = optimizer.Muon.memory_forecast(groups, ranks=16)
    assert groups == given  # an optimizer would write its defaults into them
    numel = [sum(math.prod(p.shape) for p in group["params"]) for group in groups]
    assert report.bytes_of("weights") == report.bytes_of("gradients") == 4 * sum(numel) // 16
    steps = 4 * len(groups[1]["params"])
    assert report.bytes_of("state") == 4 * numel[0] // 16 + 8 * numel[1] // 16 + steps
    # A matrix per rank in each of three buckets, and the whole matrices of one: more than the default limit
    assert 3 * 2 * 28672 * 8192 < report.bytes_of("workspace") < 4 << 30
    narrow = optimizer.Muon.memory_forecast(groups, ranks=16, state_dtype=torch.bfloat16)
    assert narrow.bytes_of("state") == 2 * numel[0] // 16 + 4 * numel[1] // 16 + steps
    assert narrow.bytes_of("temporary") == 8 << 24  # AdamW steps copies of its averages
    eight = optimizer.Muon.memory_forecast(groups, ranks=16, state_dtype=torch.int8)
    assert eight.bytes_of("state") == numel[0] // 16 + 4 * numel[0] // 64 // 16 + 8 * numel[1] // 16 + steps
    rows = {(r.what, r.dtype): r.nbytes for r in eight.rows if r.kind == "state" and r.group == 0}
    assert rows == {("momentum_buffer", "int8"): numel[0] // 16, ("momentum_scale", "float32"): numel[0] // 256}


def test_reports_are_numbers_and_a_table(optimizer):
    report = optimizer.Muon.memory_forecast([nn.Parameter(torch.ones(64, 32))])
    found = report.as_dict()
    assert found["state"] == {"device": 8192, "host": 0, "largest device": 8192, "largest host": 0}
    assert found["rank_count"] == 1 and found["rows"][0]["kind"] == "weights"
    lines = str(report).splitlines()
    assert lines[1].split() == ["kind", "what", "where", "this", "rank", "largest", "rank"]
    assert "state      momentum_buffer, group 0, float32" in str(report) and "8.0 KiB" in str(report)
    assert report.optimizer_bytes == report.total_bytes - 2 * 8192


@pytest.mark.parametrize("arguments, message", [
    ({"ranks": 0}, "ranks=0 is not allowed"),
    ({"ranks": True}, "ranks=True is not allowed"),
    ({"layout": "tp"}, "layout='tp' is not allowed: it must be one of"),
    ({"gpu_bytes": 80.0}, "gpu_bytes=80.0 is not allowed"),
    ({"shard_state": True}, "shard_state=True with layout='fsdp'"),
    ({"grads_are_reduced": False}, "grads_are_reduced=False with layout='fsdp'"),
    ({"process_group": object()}, "process_group is not allowed in a forecast"),
    ({"lr": -1}, "lr=-1 is not allowed"),
    ({"layout": "ddp", "shard_state": 1}, "shard_state=1 is not allowed"),
    ({"layout": "ddp", "overlap_backward": True}, "overlap_backward=True is not allowed with process_group"),
])
def test_wrong_arguments_are_refused(arguments, message, optimizer):
    with pytest.raises(ValueError, match=message):
        optimizer.Muon.memory_forecast([nn.Parameter(torch.ones(4, 4))], **arguments)


@pytest.mark.parametrize("at_owners", [{"shard_state": True}, {"grads_are_reduced": False}])
@pytest.mark.parametrize("options", [{"rule": "normuon_columns"}, {"decay": "initial"}])
def test_a_forecast_refuses_what_the_constructor_refuses(options, at_owners, optimizer):
    def forecast(**more):
        params = [nn.Parameter(torch.ones(8, 4))]
        return optimizer.Muon.memory_forecast(params, ranks=2, layout="ddp", **options, **more)

    assert forecast().bytes_of("state") > 0
    with pytest.raises(NotImplementedError, match="leave"):
        forecast(**at_owners)


def test_a_group_may_repeat_arguments_of_a_forecast(optimizer):
    """As at construction: a key of a group that says what the argument says contradicts nothing."""
    group = {"params": [nn.Parameter(torch.ones(8, 4))], "shard_state": True}
    report = optimizer.Muon.memory_forecast([group], ranks=2, layout="ddp", shard_state=True)
    assert report.bytes_of("state") == 4 * 8 * 4  # whole at its owner
    dion = optimizer.DionMuon.memory_forecast([nn.Parameter(torch.ones(8, 4))], ranks=2, layout="ddp", mu=0.5)
    assert dion.bytes_of("state") == 4 * 8 * 4


@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_a_forecast_refuses_the_mesh_of_dion(layout, optimizer):
    with pytest.raises(ValueError, match="distributed_mesh is not allowed in a forecast.*pass ranks"):
        optimizer.DionMuon.memory_forecast([nn.Parameter(torch.ones(8, 4))], layout=layout, distributed_mesh="x")


def test_a_forecast_leaves_the_qk_clip_to_the_optimizer(optimizer):
    """Before the optimizer is built, and after; wrong layers are refused."""
    layer = {"heads": 2, "kv_heads": 2, "weights": {"q": "q", "k": "k"}}
    clip = optimizer.QKClip(layers={"layer": layer})
    named = [(name, nn.Parameter(torch.ones(8, 4))) for name in "qk"]
    before = optimizer.Muon.memory_forecast(named, qk_clip=clip)
    opt = optimizer.Muon(named, qk_clip=clip)
    clip.record("layer", torch.tensor([200.0, 1.0]))
    assert str(optimizer.Muon.memory_forecast(named, qk_clip=clip)) == str(before)
    for _, p in named:
        p.grad = torch.ones_like(p)
    opt.step()
    assert int(clip.clipped) == 1
    with pytest.raises(ValueError, match="parameter q is not among the names"):
        optimizer.Muon.memory_forecast([("k", nn.Parameter(torch.ones(8, 4)))], qk_clip=clip)
    with pytest.raises(TypeError, match="qk_clip must be a QKClip"):
        optimizer.Muon.memory_forecast(named, qk_clip="x")

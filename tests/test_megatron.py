"""The entry for Megatron-Core, on parameters with Megatron's attributes, without Megatron.

tests/frameworks/test_megatron.py registers the entry in Megatron-Core itself.
"""

from __future__ import annotations

import copy
import re
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import package, part, run_threads

HIDDEN, FFN, STEPS = 16, 24, 5
QKV = [8, 4, 4]  # rows of a query group: 2 heads of 4, k, v
# Name -> (shape, dim that tensor parallelism shards, number of parts along it)
SHAPES = {
    "layers.0.linear_qkv.weight": ((4 * sum(QKV), HIDDEN), 0, 1),
    "layers.0.linear_proj.weight": ((HIDDEN, 32), 1, 1),
    "layers.0.mlp.linear_fc1.weight": ((2 * FFN, HIDDEN), 0, 2),
    "layers.0.mlp.linear_fc2.weight": ((HIDDEN, FFN), 1, 1),
    "layers.0.mlp.router.weight": ((4, HIDDEN), None, 1),
}


def config_of(**changed):
    """The fields of Megatron's OptimizerConfig that the entry reads, with their defaults."""
    fields = {"lr": 0.02, "weight_decay": 0.1, "optimizer": "muon", "use_layer_wise_distributed_optimizer": False,
              "muon_momentum": 0.95, "muon_split_qkv": True, "muon_nesterov": False, "muon_scale_mode": "spectral",
              "muon_fp32_matmul_prec": "medium", "muon_coefficient_type": "quintic", "muon_num_ns_steps": 5,
              "muon_extra_scale_factor": 1.0, "muon_tp_mode": "blockwise", "muon_scalar_optimizer": "adam"}
    return SimpleNamespace(**{**fields, **changed})


def cut(whole, dim, parts, rank, ranks):
    """The shard of a rank: of each part a slice."""
    if dim is None or ranks == 1:
        return whole.clone()
    return torch.cat([part.chunk(ranks, dim)[rank] for part in whole.chunk(parts, dim)], dim)


def drawn(name, step=-1):
    """A whole weight, or the whole gradient of a step."""
    seed = sorted(SHAPES).index(name) + 100 * step + 1000
    return torch.randn(SHAPES[name][0], generator=torch.Generator().manual_seed(seed))


def model_of(rank=0, ranks=1, names=SHAPES, dtype=torch.float32):
    """{name: parameter} as `rank` of `ranks` of tensor parallelism stores them, with Megatron's attributes."""
    found = {}
    for name in names:
        _, dim, parts = SHAPES[name]
        found[name] = nn.Parameter(cut(drawn(name), dim, parts, rank, ranks).to(dtype))
        found[name].tensor_model_parallel = dim is not None
        found[name].partition_dim = -1 if dim is None else dim
        found[name].partition_stride = parts
    return found


def chunk_of(model, **ddp):
    """A model chunk under Megatron's DistributedDataParallel."""
    config = SimpleNamespace(num_attention_heads=8, num_query_groups=4, kv_channels=4, gated_linear_unit=True)
    names = [(f"module.module.{name}", param) for name, param in model.items()]
    return SimpleNamespace(config=config, ddp_config=SimpleNamespace(**ddp), named_parameters=lambda: iter(names))


def optimizer_of(model, groups=None, split_gate_up=False, options=(), **config):
    """Built as Megatron builds it: the class of the entry, with the arguments from the config."""
    megatron = part("integrations.megatron")
    config = config_of(**config)
    arguments = megatron._arguments(split_gate_up, dict(options), config, [chunk_of(model)], groups)
    return megatron.MegatronMuon([{"params": list(model.values()), "wd_mult": 1.0}], **arguments)


def train(optimizer, model, rank=0, ranks=1, steps=range(STEPS)):
    """Steps with the gradients of `drawn`, in `main_param` where there is one."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for step in steps:
        for name, p in model.items():
            p = getattr(p, "main_param", p)
            p.grad = cut(drawn(name, step), *SHAPES[name][1:], rank, ranks) if id(p) in held else None
        optimizer.step()
    return model


def trained(**arguments):
    model = model_of()
    return train(optimizer_of(model, **arguments), model)


def assert_shards_of(model, whole, rank, ranks, names=SHAPES):
    for name in names:
        assert torch.equal(model[name], cut(whole[name], *SHAPES[name][1:], rank, ranks)), name


def groups_of(mesh, **axes):
    return SimpleNamespace(**{name: mesh.get_group(axis) for name, axis in axes.items()})


# What is stepped


def test_units_step_as_separate_parameters():
    """q, k and v of all query groups; gate and up; the rest whole."""
    model = trained(split_gate_up=True, muon_nesterov=True)
    separate, parts = [], {}
    for name in SHAPES:
        rows = torch.arange(SHAPES[name][0][0])
        blocks = [rows]
        if "linear_qkv" in name:
            blocks = rows.view(4, -1).split(QKV, 1)
        if "linear_fc1" in name:
            blocks = rows.chunk(2)
        parts[name] = [index.reshape(-1) for index in blocks]
        separate += [(name, index, nn.Parameter(drawn(name)[index])) for index in parts[name]]
    muon = package().Muon([p for *_, p in separate], lr=0.02, nesterov=True, ns_coefficients="quintic",
                          adjust_lr_fn="sqrt_max")
    for step in range(STEPS):
        for name, index, p in separate:
            p.grad = drawn(name, step)[index]
        muon.step()
    for name, index, p in separate:
        assert torch.equal(model[name][index], p), name


@pytest.mark.parametrize("changed, options", [
    ({"muon_scale_mode": "unit_rms_norm", "muon_extra_scale_factor": 0.5},
     {"adjust_lr_fn": lambda R, C: 0.5 * (R / C) ** 0.5}),
    ({"muon_coefficient_type": "simple", "muon_num_ns_steps": 3}, {"ns_coefficients": "jordan", "ns_steps": 3}),
    ({"muon_momentum": 0.5, "weight_decay": 0.0}, {"momentum": 0.5, "weight_decay": 0.0}),
])
def test_values_of_the_config(changed, options):
    names = ["layers.0.mlp.linear_fc2.weight"]
    model, alone = model_of(names=names), model_of(names=names)
    train(optimizer_of(model, **changed), model)
    defaults = {"lr": 0.02, "nesterov": False, "ns_coefficients": "quintic", "adjust_lr_fn": "sqrt_max"}
    train(package().Muon(list(alone.values()), **{**defaults, **options}), alone)
    assert torch.equal(model[names[0]], alone[names[0]])


def test_schedules_and_options():
    """Numbers are read from Megatron's groups in each step; options come before the config."""
    model, other = model_of(), model_of()
    optimizer = optimizer_of(model, options={"ns_coefficients": "jordan"})
    train(optimizer, model, steps=range(1))
    optimizer.param_groups[0].update(lr=0.5, weight_decay=0.0, momentum=0.8)
    train(optimizer, model, steps=range(1, 3))
    plain = optimizer_of(other, muon_coefficient_type="simple")
    train(plain, other, steps=range(1))
    plain.muon.param_groups[0].update(lr=1.0)  # has no effect
    plain.param_groups[0].update(lr=0.5, weight_decay=0.0, momentum=0.8)
    train(plain, other, steps=range(1, 3))
    assert_shards_of(model, other, 0, 1)
    assert not torch.equal(model["layers.0.linear_proj.weight"], trained()["layers.0.linear_proj.weight"])


# Tensor parallelism


def shard_and_train(rank, world, mode, whole):
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    groups = groups_of(mesh, tp="tp", dp_cp="dp", expt_tp="tp", expt_dp="dp")
    tp, ranks = mesh.get_local_rank("tp"), 2
    dtype = torch.bfloat16 if mode == "main" else torch.float32
    model, names = model_of(tp, ranks, dtype=dtype), list(SHAPES)
    optimizer = optimizer_of(model, groups, split_gate_up=True,
                             use_layer_wise_distributed_optimizer=mode == "layers")
    if mode == "layers":
        names = names[mesh.get_local_rank("dp") :: 2]
        optimizer.param_groups[0]["params"] = [model[name] for name in names]
    if mode == "main":  # Float16OptimizerWithFloat16Params
        for i, (name, p) in enumerate(model.items()):
            p.main_param = cut(drawn(name), *SHAPES[name][1:], tp, ranks)
            p.main_param.tensor_model_parallel = p.tensor_model_parallel
            optimizer.param_groups[0]["params"][i] = p.main_param
    train(optimizer, model, tp, ranks, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    assert all(value.shape == p.shape and type(value) is torch.Tensor
               for p, state in optimizer.state.items() for value in state.values())
    optimizer.release()
    for i, p in enumerate(optimizer.state):  # what Megatron's offload_to_cpu does, and what others do
        p.data = p.data.clone()
        if i % 2:
            optimizer.state[p]["momentum_buffer"] = optimizer.state[p]["momentum_buffer"].clone()
        else:
            optimizer.state[p]["momentum_buffer"].data = optimizer.state[p]["momentum_buffer"].data.clone()
    muon = optimizer.muon
    train(optimizer, model, tp, ranks, range(2, 3))
    bound = muon._bound
    train(optimizer, model, tp, ranks, range(3, 4))
    assert optimizer.muon is muon and muon._bound is bound  # a step plans and binds nothing
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()
    optimizer.load_state_dict(saved)
    kept = {name: getattr(p, "main_param", p) for name, p in model.items()}
    assert_shards_of(kept, whole[0], tp, ranks, names)
    train(optimizer, model, tp, ranks, range(4, 5))
    assert all(view.param is view.local or view.param.grad is None for view in optimizer._views)
    assert_shards_of(kept, whole[1], tp, ranks, names)
    return {row.route for row in optimizer.muon.plan_report().rows}


def main_parameters_without_ranks(nonfinite):
    """fp32 main parameters that this rank alone steps, and whose memory moves."""
    model = model_of()
    optimizer = optimizer_of(model, options={"nonfinite": nonfinite})
    for i, (name, p) in enumerate(model.items()):
        p.main_param = optimizer.param_groups[0]["params"][i] = drawn(name)
    for step in range(STEPS):
        train(optimizer, model, steps=range(step, step + 1))
        for p in model.values():
            p.main_param.data = p.main_param.data.clone()
    return model, optimizer


def test_main_parameters_without_ranks(recwarn):
    model, optimizer = main_parameters_without_ranks("propagate")
    assert_shards_of({name: p.main_param for name, p in model.items()}, trained(), 0, 1)
    assert recwarn.list == []
    model, optimizer = main_parameters_without_ranks("skip")
    for p in model.values():
        p.main_param.grad = torch.full_like(p.main_param, torch.nan)
    optimizer.step()
    assert int(optimizer.muon.skipped) == len(SHAPES) + 2  # q, k and v are three matrices
    assert_shards_of({name: p.main_param for name, p in model.items()}, trained(), 0, 1)


def whole_results():
    """Weights after four steps, and after a fifth step with the momentum of the second."""
    model = model_of()
    optimizer = optimizer_of(model, split_gate_up=True)
    train(optimizer, model, steps=range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    train(optimizer, model, steps=range(2, 4))
    before = {name: p.detach().clone() for name, p in model.items()}
    optimizer.load_state_dict(saved)
    return before, train(optimizer, model, steps=range(4, 5))


@pytest.mark.parametrize("mode", ["copies", "layers", "main"])
def test_shards_step_as_whole_matrices(mode):
    """2 x 2 ranks of data and tensor parallelism: bits of one process, also after Megatron has put main parameters in
    place, assigned parameters to ranks, moved memory and loaded a state dict. State is plain and has the shard's shape.
    """
    routes = run_threads(4, shard_and_train, mode, whole_results())
    assert set().union(*routes) == {"exchange"} if mode == "copies" else {"exchange"} <= set().union(*routes)


def experts_and_gtp(rank, world):
    """Experts: 2 ranks with different experts, 2 with copies. Rows sharded by tensor parallelism, then by GTP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    outer, inner = mesh.get_local_rank("outer"), mesh.get_local_rank("inner")
    names = [["layers.0.mlp.linear_fc2.weight"], ["layers.0.mlp.linear_fc1.weight"]][inner]
    model = model_of(names=names)
    for p in model.values():  # gate and up are parts only of a shard
        p.expert_tp, p.allreduce = True, False
    groups = groups_of(mesh, tp="inner", dp_cp="inner", expt_dp="outer", gtp_remat="outer")
    experts = optimizer_of(model, groups)
    train(experts, model)
    name = "layers.0.linear_qkv.weight"
    gtp = {name: nn.Parameter(drawn(name).chunk(2)[inner].chunk(2)[outer].clone())}
    gtp[name].tensor_model_parallel, gtp[name].partition_dim, gtp[name].is_gtp_weight_remat = True, 0, True
    optimizer = optimizer_of(gtp, SimpleNamespace(tp=groups.tp, gtp_remat=groups.gtp_remat, dp_cp=None))
    for step in range(STEPS):
        gtp[name].grad = drawn(name, step).chunk(2)[inner].chunk(2)[outer]
        optimizer.step()
    return names[0], model[names[0]].detach(), gtp[name].detach()


def test_experts_step_among_their_copies_and_rows_of_gtp_are_put_together():
    whole, found = trained(), run_threads(4, experts_and_gtp)
    for name, weight, _ in found:
        assert torch.equal(weight, whole[name])
    name = "layers.0.linear_qkv.weight"
    rows = [weight for *_, weight in found]  # by rank: (outer, inner)
    assert torch.equal(torch.cat([rows[0], rows[2], rows[1], rows[3]]), whole[name])


def cut_query_groups(rank, world):
    """Two query groups over four ranks of tensor parallelism, and over one."""
    whole = torch.arange(48.0 * HIDDEN).view(48, HIDDEN).sin()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)) if world > 1 else None
    p = nn.Parameter(whole.chunk(world)[rank].clone())
    p.tensor_model_parallel, p.partition_dim = True, 0
    megatron = part("integrations.megatron")
    chunk = chunk_of({"linear_qkv.weight": p})
    chunk.config.num_query_groups = 2
    groups = None if mesh is None else groups_of(mesh, tp="tp")
    optimizer = megatron.MegatronMuon([{"params": [p]}], **megatron._arguments(False, {}, config_of(), [chunk], groups))
    p.grad = whole.cos().chunk(world)[rank].clone()
    optimizer.step()
    assert optimizer.muon.param_groups[0]["split"] == [{"rows": [16, 4, 4], "repeat": 2}]
    return p.detach()


def test_units_do_not_depend_on_the_number_of_ranks():
    assert torch.equal(torch.cat(run_threads(4, cut_query_groups)), cut_query_groups(0, 1))


def meshes_under_a_default_device(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = [mesh.get_group("dp"), mesh.get_group("tp")]
    with torch.device("meta"):
        found = part("integrations.megatron")._mesh_of(groups, "cpu")
    return found.mesh.tolist()


def test_meshes_do_not_depend_on_the_default_device():
    assert run_threads(4, meshes_under_a_default_device) == [[[0, 1], [2, 3]]] * 4


# Views of shards


def views(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(96.0).view(12, 8)
    for dim, parts in ((0, 1), (1, 1), (0, 3), (1, 2)):
        local = nn.Parameter(cut(whole, dim, parts, rank, world))
        view = package().sharded_view(local, mesh, (dim,), parts)
        assert view.shape == whole.shape and view.requires_grad and view.is_leaf
        # torch 2.11 cannot gather every _StridedShard
        layout = part("params.layout").layout_of(view)
        assert torch.equal(layout.shard_of(whole, rank), local)
        local.data = local.data + 1
        assert view.to_local().data_ptr() == local.data_ptr()
    for dims, parts in (((2,), 1), ((0, 1), 1), ((None,), 2), ((0,), 5), ((0,), 0)):
        with pytest.raises(ValueError, match="is not allowed for a shard of shape"):
            package().sharded_view(torch.zeros(6, 8), mesh, dims, parts)
    for wrong, message in (({"dims": 0}, "dims=0 is not allowed .*must be a tuple"),
                           ({"dims": (True,)}, r"dims=\(True,\) is not allowed"),
                           ({"dims": (1.0,)}, r"dims=\(1.0,\) is not allowed"),
                           ({"parts": 2.0}, "parts=2.0 is not allowed: .*whole number"),
                           ({"parts": True}, "parts=True is not allowed")):
        with pytest.raises(ValueError, match=message):
            package().sharded_view(torch.zeros(6, 8), mesh, **wrong)
    copies = package().sharded_view(torch.zeros(6, 8), init_device_mesh("cpu", (1, world)), (None, 1))
    assert copies.shape == (6, 16)


def test_sharded_views():
    run_threads(2, views)


# State


def test_momentum_of_bf16_parameters_stays_fp32():
    """Through a checkpoint, bit by bit, and after a program has rounded it."""
    model = model_of(dtype=torch.bfloat16)
    optimizer = optimizer_of(model)
    for p in model.values():
        p.grad = torch.randn_like(p)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    loaded = optimizer_of(model)
    loaded.load_state_dict(saved)
    for p in model.values():
        assert loaded.state[p]["momentum_buffer"].dtype == torch.float32
        assert torch.equal(loaded.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])
        loaded.state[p]["momentum_buffer"] = loaded.state[p]["momentum_buffer"].bfloat16()
    loaded.step()
    assert {state["momentum_buffer"].dtype for state in loaded.state.values()} == {torch.float32}
    for view in loaded._views:
        assert loaded.muon.state[view.param]["momentum_buffer"] is loaded.state[view.local]["momentum_buffer"]


def test_momentum_of_another_shape_is_refused():
    model = model_of()
    optimizer = optimizer_of(model)
    train(optimizer, model, steps=range(1))
    name = "layers.0.mlp.linear_fc2.weight"
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][list(model).index(name)]["momentum_buffer"] = torch.zeros(HIDDEN, FFN // 2)
    optimizer.load_state_dict(saved)
    before = {name: p.detach().clone() for name, p in model.items()}
    with pytest.raises(ValueError, match=rf"parameter {name}: .* shape \(16, 12\), .* shape \(16, 24\): load a"):
        train(optimizer, model, steps=range(1, 2))
    assert_shards_of(model, before, 0, 1)


# The registry


@dataclass
class Entry:
    """Fields of Megatron's EmergingOptimizerEntry."""

    optimizer_cls: type
    init_state_fn: object = None
    config_to_kwargs: object = None
    default_param_overrides: dict = field(default_factory=dict)


@pytest.fixture
def registry(monkeypatch):
    """Stands for megatron.core.optimizer.emerging_optimizers."""
    names = ["megatron", "megatron.core", "megatron.core.optimizer", "megatron.core.optimizer.emerging_optimizers"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, sys.modules[name])
    module = sys.modules[names[-1]]
    module._EMERGING_OPTIMIZERS, module.EmergingOptimizerEntry = {"muon": "Megatron's"}, Entry
    return module


def test_the_entry_takes_the_place_of_megatrons(registry):
    package().register_megatron_muon(split_gate_up=True, wire_dtype="fp32")
    entry = registry._EMERGING_OPTIMIZERS["muon"]
    model = model_of()
    arguments = entry.config_to_kwargs(config_of(), [chunk_of(model)], None)
    optimizer = entry.optimizer_cls([{"params": list(model.values())}, {"params": []}], **arguments)
    entry.init_state_fn(optimizer, config_of())
    assert all(not state["momentum_buffer"].any() for state in optimizer.state.values())
    assert len(optimizer.state) == len(SHAPES)
    train(optimizer, model)
    assert_shards_of(model, trained(split_gate_up=True, options={"wire_dtype": torch.float32}), 0, 1)
    package().register_megatron_muon("sharded_muon")
    assert set(registry._EMERGING_OPTIMIZERS) == {"muon", "sharded_muon"}


@pytest.mark.parametrize("options, error, message", [
    ({"ns_stepz": 5}, ValueError, "there is no key 'ns_stepz'; did you mean 'ns_steps'"),
    ({"ns_steps": "5"}, ValueError, "ns_steps: '5' is a text"),
    ({"ns_steps": 0}, ValueError, "register_megatron_muon: .*ns_steps"),
    ({"wire_dtype": "fp8"}, ValueError, "wire_dtype: there is no dtype 'fp8'"),
    ({"shard_state": True}, ValueError, "there is no key 'shard_state'"),
    ({"name": 3}, ValueError, "name=3 is not allowed: it must be a text"),
    ({"name": ""}, ValueError, "name='' is not allowed"),
    ({"eps": -1.0}, ValueError, "register_megatron_muon: eps=-1.0 is not allowed"),
    ({"split_gate_up": "yes"}, ValueError, "split_gate_up='yes' is not allowed: it must be True or False"),
])
def test_options_that_are_refused(registry, options, error, message):
    with pytest.raises(error, match=message):
        package().register_megatron_muon(**options)
    assert registry._EMERGING_OPTIMIZERS == {"muon": "Megatron's"}


@pytest.mark.parametrize("missing", ["megatron", "megatron.core.optimizer"])
def test_without_megatron_the_way_out_is_said(registry, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match="register_megatron_muon: Megatron-Core cannot .*install megatron-core 0.19"):
        package().register_megatron_muon()


def test_an_older_megatron_is_refused(registry):
    del registry.EmergingOptimizerEntry
    with pytest.raises(ImportError, match="install megatron-core 0.19 or newer"):
        package().register_megatron_muon()


@pytest.mark.parametrize("changed, message", [
    ({"muon_scale_mode": "spectrum"}, "muon_scale_mode: 'spectrum' is not allowed; did you mean 'spectral'"),
    ({"muon_extra_scale_factor": "0.2"}, "muon_extra_scale_factor='0.2' is not allowed: it must be a finite"),
    ({"muon_extra_scale_factor": -1.0}, "muon_extra_scale_factor=-1.0 is not allowed"),
    ({"muon_split_qkv": "no"}, "muon_split_qkv='no' is not allowed: it must be True or False"),
    ({"muon_coefficient_type": ["quintic"]}, r"muon_coefficient_type: \['quintic'\] is not allowed"),
    ({"muon_coefficient_type": "custom"}, "muon_coefficient_type: 'custom' is not allowed; allowed: aol, cans"),
    ({"muon_fp32_matmul_prec": "low"}, "muon_fp32_matmul_prec: 'low'"),
    ({"muon_num_ns_steps": 0}, "OptimizerConfig: muon_num_ns_steps"),
    ({"muon_momentum": 1.5}, "OptimizerConfig: muon_momentum"),
    ({"weight_decay": -1.0}, "OptimizerConfig: weight_decay"),
    ({"muon_scalar_optimizer": "lion", "optimizer": "ours"}, "muon_scalar_optimizer='lion' has no .*optimizer='ours'"),
])
def test_values_that_are_refused_by_their_key_of_the_config(changed, message):
    with pytest.raises(ValueError, match=message):
        optimizer_of(model_of(), **changed)


def test_the_optimizer_of_vectors_under_names_that_megatron_knows():
    for name in ("muon", "dist_muon", "adaptive_muon"):
        optimizer_of(model_of(), optimizer=name, muon_scalar_optimizer="lion")


def test_layouts_that_are_refused():
    arguments = part("integrations.megatron")._arguments
    for ddp, key in (({"use_megatron_fsdp": True}, "use_megatron_fsdp"),
                     ({"use_distributed_optimizer": True}, "use_layer_wise_distributed_optimizer")):
        with pytest.raises(ValueError, match=key):
            arguments(False, {}, config_of(), [chunk_of(model_of(), **ddp)], None)
    arguments(False, {}, config_of(optimizer="dist_muon"), [chunk_of(model_of(), use_distributed_optimizer=True)], None)
    model = model_of()
    model["layers.0.mlp.linear_fc1.weight"].is_gtp_weight_remat = True
    with pytest.raises(ValueError, match=re.escape("layers.0.mlp.linear_fc1.weight: split_gate_up=True")):
        optimizer_of(model, split_gate_up=True)
    chunk = chunk_of({"experts.linear_fc1.weight0": model_of()["layers.0.mlp.linear_fc1.weight"]})
    chunk.config.moe_mlp_glu_interleave_size = 32
    arguments(False, {}, config_of(), [chunk], None)
    with pytest.raises(ValueError, match="experts.linear_fc1.weight0: .* moe_mlp_glu_interleave_size"):
        arguments(True, {}, config_of(), [chunk], None)
    with pytest.raises(ValueError, match="closure"):
        optimizer_of(model_of()).step(lambda: 0.0)


def qkv_arguments(p, groups=None, **sizes):
    chunk = chunk_of({"linear_qkv.weight": p})
    for key, value in sizes.items():
        setattr(chunk.config, key, value)
    arguments = part("integrations.megatron")._arguments
    return lambda **config: arguments(False, {}, config_of(**config), [chunk], groups)


def test_query_groups_that_do_not_fit_are_refused():
    for rows, sizes, message in ((72, {}, "it has 72 rows, which are no multiple of the 16 rows"),
                                 (64, {"kv_channels": None}, "query group are unknown: .*kv_channels")):
        make = qkv_arguments(nn.Parameter(torch.zeros(rows, HIDDEN)), **sizes)
        with pytest.raises(ValueError, match=f"parameter linear_qkv.weight: .*{message}.*muon_split_qkv=False"):
            make()
        make(muon_split_qkv=False)
    own = nn.Parameter(torch.zeros(64, HIDDEN))
    own.qkv_split_shapes = [24, 4, 4]  # of the parameter, without those of the config
    traits = qkv_arguments(own, kv_channels=None)()["traits"][own]
    assert traits.split(64) == {"rows": [24, 4, 4], "repeat": 2}
    qkv_arguments(nn.Parameter(torch.zeros(72, HIDDEN), requires_grad=False))()


def test_query_groups_with_padding_of_each_rank_are_refused():
    def group(ranks):
        return SimpleNamespace(size=lambda: ranks)

    p = nn.Parameter(torch.zeros(24, HIDDEN))  # 2 query groups and 16 rows of padding over 2 ranks of GTP
    p.tensor_model_parallel, p.partition_dim, p.is_gtp_weight_remat, p.pad_length = True, 0, True, 16
    make = qkv_arguments(p, SimpleNamespace(tp=group(2), gtp_remat=group(2)))
    with pytest.raises(ValueError, match="parameter linear_qkv.weight: .*padding.*muon_split_qkv=False"):
        make()
    make(muon_split_qkv=False)
    qkv_arguments(p, SimpleNamespace(tp=group(1), gtp_remat=group(2)))()
    p.pad_length, p.data = 8, torch.zeros(20, HIDDEN)
    with pytest.raises(ValueError, match="40 rows, of which 8 are padding"):
        qkv_arguments(p, SimpleNamespace(tp=group(1), gtp_remat=group(2)))()

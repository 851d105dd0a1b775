"""Saved on one layout, loaded on another: the very bits of a run that was never stopped.

Every chain of layouts trains three steps on each, saves, and loads what the layout before it saved; beside it is one
process that never stops. Gradients are multiples of 2^-4 that 7 bits hold, so that the mean of equal ones is exact and
`grads_are_reduced=False` gives the bits of the others.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dsd

from tests import test_bucket_updates as routes
from tests.ranks import package, part, run_ranks

UNEVEN = {"dense.up": (33, 7), "dense.down": (10, 12), "dense.square": (16, 16), "dense.thin": (3, 8),
          "experts.w1": (8, 6, 10), "experts.w2": (8, 10, 6), "rest.embed": (50, 6), "rest.norm": (7,)}
EVEN = {"dense.up": (32, 8), "dense.down": (16, 24), "dense.odd": (20, 6), "experts.w1": (8, 6, 10),
        "rest.embed": (48, 6), "rest.norm": (7,)}
# Columns in parts of 64 on 4 ranks: blocks of 8-bit momentum
WIDE = {"dense.up": (33, 256), "dense.down": (10, 512), "experts.w1": (8, 6, 256), "experts.w2": (8, 10, 256),
        "rest.embed": (50, 6), "rest.norm": (7,)}
# A parameter for each rule, under the rule's name
BY_ROWS = {"dense.muon": (33, 7), "dense.normuon": (10, 12), "dense.adamuon": (9, 7), "dense.hyperball": (7, 10),
           "dense.muon_plus": (12, 8), "dense.scion": (9, 14), "dense.dion2": (17, 6), "dense.dion3": (13, 9),
           "experts.adamuon": (8, 6, 10), "experts.dion3": (8, 10, 6), "rest.adamw": (50, 6), "rest.lion": (7,),
           "rest.sgd": (9, 5), "rest.sign": (11, 3)}
# Owners of state cannot divide state of columns
BY_COLUMNS = {"dense.normuon_columns": (9, 7), "dense.normuon_aspect": (7, 12), "dense.scion": (12, 7),
              "experts.normuon_aspect": (8, 10, 6), "rest.sgd": (9, 5), "rest.adamw": (4, 6)}
AT_OWNERS = {"dense.adamuon": (33, 7), "dense.hyperball": (7, 10), "dense.normuon_columns": (10, 12),
             "experts.adamuon": (8, 6, 10), "experts.normuon": (8, 10, 6), "rest.adamw": (50, 6)}
# Most of them bf16
HALVES = {"dense.square": (32, 8), "dense.odd": (16, 24), "experts.w2": (8, 6, 10), "rest.embed": (48, 6),
          "rest.norm": (7,)}
SHAPES = {False: UNEVEN, True: EVEN, "wide": WIDE, "halves": HALVES, "rules": BY_ROWS,  # by `even`
          "column rules": BY_COLUMNS, "rules at owners": AT_OWNERS}
BF16 = ("dense.square", "dense.odd", "experts.w2", "rest.norm",  # the others are fp32
        "dense.hyperball", "dense.scion", "rest.lion", "experts.normuon_aspect")
STEPS = 3
IN = {"8 bits": {"state_dtype": torch.int8}, "halves": {"master_weights": "split16"},  # after a name
      "host memory": {"offload_state": True},
      "8 bits in host memory": {"state_dtype": torch.int8, "offload_state": True}}


def placements_of(layout, world):
    """(mesh shape, {kind of parameter: placements}); None for the layouts of plain parameters. "NAME at owners" is
    layout NAME with state_at_owners=True.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    R, S, half = Replicate(), Shard, world // 2
    return {
        "fsdp": ((world,), {"dense": [S(0)], "experts": [S(0)], "rest": [S(0)]}),
        "fsdp columns": ((world,), {"dense": [S(1)], "experts": [S(2)], "rest": [S(0)]}),
        "hsdp": ((2, half), dict.fromkeys(("dense", "experts", "rest"), [R, S(0)])),
        "tp x fsdp": ((2, half), {"dense": [S(0), S(1)], "experts": [S(0), S(2)], "rest": [S(0), R]}),
        "tp x fsdp, strided": ((half, 2), {"dense": [_StridedShard(0, split_factor=2), S(0)],
                                           "experts": [S(1), S(0)], "rest": [S(0), R]}),
        "ep": ((world,), {"dense": [R], "experts": [S(0)], "rest": [R]}),
        "ep x fsdp": ((2, half), {"dense": [S(0), R], "experts": [S(1), S(0)], "rest": [S(0), R]}),
        "hsdp x tp": ((2, 2, world // 4), {"dense": [R, S(0), S(1)], "experts": [R, S(0), S(1)], "rest": [R, S(0), R]}),
    }.get(layout.removesuffix(" at owners"))


def model_of(shapes, layout, world, device="cpu"):
    """A model of parameters only, whole or cut; a function that cuts a whole tensor as the parameter of a name is."""
    from torch.distributed.tensor import init_device_mesh

    mesh_shape, placements = placements_of(layout, world) or (None, {})
    mesh = init_device_mesh(device, mesh_shape) if mesh_shape else None

    def cut(name, full):
        full = full.to(device)
        places = placements.get(name.split(".")[0])
        return full.clone() if places is None else routes.cut(full, mesh, places)

    model = nn.ModuleDict({kind: nn.ParameterDict() for kind in ("dense", "experts", "rest")})
    for name, shape in shapes.items():
        kind, leaf = name.split(".")
        model[kind][leaf] = nn.Parameter(cut(name, torch.zeros(shape, dtype=dtype_of(name))))
    return model, cut


def dtype_of(name):
    return torch.bfloat16 if name in BF16 else torch.float32


def build(model, name, layout="one process", **more):
    plain = {"ddp": {"process_group": dist.group.WORLD},
             "shard_state": {"process_group": dist.group.WORLD, "shard_state": True},
             "unreduced": {"process_group": dist.group.WORLD, "grads_are_reduced": False}}.get(layout, {})
    plain |= {"state_at_owners": True} if layout.endswith(" at owners") else {}
    if name == "each rule":
        groups = [{"params": [p], "rule": n.split(".")[1], "use_muon": not n.startswith("rest"), "lr": 0.02}
                  for n, p in model.named_parameters()]
        return package().Muon(groups, **plain, **more)
    rest = [p for n, p in model.named_parameters() if n.startswith("rest")]
    matrices = [p for n, p in model.named_parameters() if not n.startswith("rest")]
    groups = [{"params": matrices[:2], "lr": 0.02, "momentum": 0.9}, {"params": matrices[2:], "lr": 0.05},
              {"params": rest, "use_muon": False, "lr": 0.01}]
    name, _, bits = name.partition(" in ")
    return getattr(package(), name)(groups, **plain, **more, **IN.get(bits, {}))


def initial(shapes):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(s, generator=generator).to(dtype_of(name)) for name, s in shapes.items()}


def fill(model, cut, tensors):
    local_of = part("params.dtensor").local_of
    for name, param in model.named_parameters():
        local_of(param).copy_(local_of(cut(name, tensors[name])))


def train(model, cut, optimizer, numbers):
    for number in numbers:
        generator = torch.Generator().manual_seed(100 + number)
        for name, param in model.named_parameters():
            gradient = torch.randint(-127, 128, param.shape, generator=generator) / 16
            param.grad = cut(name, gradient.to(param.dtype))
        optimizer.step()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shown(model, optimizer):
    """All weights and all state, by name."""
    tensors = {**dsd.get_model_state_dict(model), **tensors_of(flat_state(model, optimizer))}
    assert len(tensors) > 2 * len(list(model.parameters()))
    return {key: t.detach() for key, t in tensors.items()}


def content(model, optimizer):
    """The same, whole."""
    return {key: whole(t).cpu() for key, t in shown(model, optimizer).items()}


def unequal(model, optimizer, other):
    """The names of the weights and states of which this rank's part differs from the content of another run."""
    mine = shown(model, optimizer)
    assert mine.keys() == other.keys()
    return [key for key in mine if not is_part(mine[key], other[key])]


def is_part(tensor, full):
    """Whether a tensor holds, of this rank's part of `full`, the very bits."""
    if tensor.shape != full.shape or tensor.dtype != full.dtype:
        return False
    if hasattr(tensor, "to_local"):
        full, tensor = (t.to_local() for t in (routes.cut(full, tensor.device_mesh, tensor.placements), tensor))
    tensor, full = tensor.cpu(), full.cpu()
    if tensor.dtype == torch.bfloat16:  # rests of split weights are any bits
        tensor, full = tensor.view(torch.int16), full.view(torch.int16)
    return torch.equal(tensor, full)


def whole_run(rank, world, name, even, device, count):
    """The content of a run on one process after the steps of each stage."""
    shapes, contents = SHAPES[even], []
    model, keep = model_of(shapes, "one process", 1, device)
    fill(model, keep, initial(shapes))
    optimizer = build(model, name)
    for number in range(count):
        train(model, keep, optimizer, range(STEPS * number, STEPS * (number + 1)))
        contents.append({key: t.clone() for key, t in content(model, optimizer).items()})
    return contents


@functools.cache
def uninterrupted(name, even, device, count=9):
    """What all ranks compare with, made once."""
    (contents,) = run_ranks(1, whole_run, name, even, device, count, backend="nccl" if device == "cuda" else "gloo")
    return contents


def flat_state(model, optimizer):
    return dsd.get_optimizer_state_dict(model, optimizer, options=FLAT)


def tensors_of(state):
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


FLAT, NESTED = (dsd.StateDictOptions(flatten_optimizer_state_dict=flat) for flat in (True, False))


class Dcp:
    """DCP's own format: hyperparameters travel along. Weights are loaded where they are: set_model_state_dict, which
    Safetensors calls, would copy each onto itself, which takes DTensor longer than all the steps.
    """

    def __init__(self, options):
        self.options = options

    def save(self, model, optimizer, folder):
        state = {"model": dsd.get_model_state_dict(model),
                 "optimizer": dsd.get_optimizer_state_dict(model, optimizer, options=self.options)}
        dcp.save(state, checkpoint_id=folder)

    def load(self, model, optimizer, folder):
        state = {"model": dsd.get_model_state_dict(model),
                 "optimizer": dsd.get_optimizer_state_dict(model, optimizer, options=self.options)}
        dcp.load(state, checkpoint_id=folder)
        dsd.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=self.options)


class Safetensors:
    """DCP's Hugging Face storage: tensors only, one file for each rank, or one for all. Steps are 0-D, and torch
    consolidates 0-D tensors to zeros, so they travel as views of one element.
    """

    def __init__(self, consolidated):
        self.consolidated = consolidated

    def save(self, model, optimizer, folder):
        writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=self.consolidated)
        tensors = dsd.get_model_state_dict(model) | tensors_of(flat_state(model, optimizer))
        dcp.save({key: torch.atleast_1d(t) for key, t in tensors.items()}, storage_writer=writer)

    def load(self, model, optimizer, folder):
        weights, state = dsd.get_model_state_dict(model), flat_state(model, optimizer)
        tensors = {key: torch.atleast_1d(t) for key, t in (weights | tensors_of(state)).items()}
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(folder))  # into the tensors of `state`
        dsd.set_model_state_dict(model, weights)
        dsd.set_optimizer_state_dict(model, optimizer, state, options=FLAT)


FORMATS = {"nested": Dcp(NESTED), "flat": Dcp(FLAT), "safetensors": Safetensors(False),
           "consolidated safetensors": Safetensors(True)}


def stages(rank, world, name, even, kinds, numbered, folder, device, capturable):
    """Train on some layouts of a chain in turn; return what differs from the uninterrupted run after each.

    `numbered`: (number, layout, content of the uninterrupted run) of each.
    """
    differences, shapes = [], SHAPES[even]
    for number, layout, expected in numbered:
        model, cut = model_of(shapes, layout, world, device)
        optimizer = build(model, name, layout, capturable=capturable)
        if number:
            FORMATS[kinds[(number - 1) % len(kinds)]].load(model, optimizer, f"{folder}/{number - 1}")
        else:
            fill(model, cut, initial(shapes))
        train(model, cut, optimizer, range(STEPS * number, STEPS * (number + 1)))
        if capturable and device == "cuda":
            assert any(part.graph for part in optimizer._preparation.graphs.parts.values())
        FORMATS[kinds[number % len(kinds)]].save(model, optimizer, f"{folder}/{number}")
        differences.append(unequal(model, optimizer, expected))
    return differences


def run_chain(chain, name, kinds, folder, device="cpu", even=False, capturable=False):
    """Layouts of as many ranks that follow each other share a process group. `kinds`: of the files, in turn."""
    stages_of = {"count": len(chain)} if name == "each rule" else {}  # other chains share one run
    on_device = name.removesuffix(" in host memory")
    numbered, contents = list(enumerate(chain)), uninterrupted(on_device, even, device, **stages_of)
    while numbered:
        world = numbered[0][1][1]
        count = next((i for i, (_, (_, ranks)) in enumerate(numbered) if ranks != world), len(numbered))
        part_of = [(number, layout, contents[number]) for number, (layout, _) in numbered[:count]]
        how = {"backend": "nccl" if device == "cuda" else "gloo", "timeout": 120}
        for differences in run_ranks(world, stages, name, even, kinds, part_of, str(folder), device, capturable, **how):
            assert differences == [[]] * count, [(number, layout) for number, layout, _ in part_of]
        numbered = numbered[count:]


ONE = ("one process", 1)
FEWER_RANKS = [("fsdp", 8), ("fsdp", 4), ("fsdp", 2), ONE, ("fsdp", 8)]
MODES = [("fsdp", 4), ("hsdp", 4), ("tp x fsdp", 4), ("ep x fsdp", 4), ("ddp", 4), ("fsdp columns", 4), ("ddp", 2)]
OWNED = [("unreduced", 4), ("fsdp", 4), ("unreduced", 4), ONE, ("unreduced", 2), ("ddp", 2), ("unreduced", 8),
         ("unreduced", 2), ("tp x fsdp", 4)]
STRIDED = [("fsdp", 8), ("tp x fsdp, strided", 8), ("hsdp x tp", 8), ("tp x fsdp, strided", 4), ("unreduced", 4), ONE]
EXPERTS = [("tp x fsdp", 4), ("ep", 4), ("fsdp", 4), ("ep", 3), ("ddp", 3), ("ep", 2)]  # 8 experts, also over 3 ranks
CHAINS = {"fewer ranks": (FEWER_RANKS, "Muon"), "modes": (MODES, "NorMuon"), "owned": (OWNED, "NorMuon"),
          "strided": (STRIDED, "Muon"), "experts": (EXPERTS, "NorMuon")}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_goes_on_with_its_bits_on_another_layout(chain, tmp_path):
    """28 pairs of layouts, with parameters in fp32 and bf16, flattened and not in turn."""
    layouts, name = CHAINS[chain]
    run_chain(layouts, name, ["nested", "flat"], tmp_path, even=chain == "strided")


def test_and_with_8_bit_momentum(tmp_path):
    chain = [("unreduced", 4), ("fsdp columns", 4), ("tp x fsdp", 4)]
    run_chain(chain, "NorMuon in 8 bits", ["nested", "flat"], tmp_path, even="wide")


EACH_RULE = {
    "rules": [("fsdp", 4), ("tp x fsdp", 4), ("unreduced", 4), ("fsdp columns", 2), ("ddp", 2)],
    "column rules": [("hsdp", 4), ("fsdp columns", 4), ("tp x fsdp", 4), ("ddp", 2)],
    "rules at owners": [("hsdp at owners", 4), ("tp x fsdp at owners", 4), ("ep x fsdp", 4)],
}


@pytest.mark.parametrize("shapes", EACH_RULE)
def test_and_so_does_the_state_of_each_rule(shapes, tmp_path):
    run_chain(EACH_RULE[shapes], "each rule", ["nested", "flat"], tmp_path, even=shapes)


def test_each_rule_has_its_parameter():
    leaves = {tuple(name.split(".")) for name in (*BY_ROWS, *BY_COLUMNS)}
    assert {leaf for kind, leaf in leaves if kind == "rest"} == set(part("rules.elementwise").ELEMENTWISE)
    rules = part("rules.rule").RULES.items()
    own = {name for name, rule in rules if type(rule).__module__.startswith(f"{package().__name__}.")}
    assert {leaf for kind, leaf in leaves if kind != "rest"} == own


def test_and_with_split_weights(tmp_path):
    run_chain([("tp x fsdp", 4), ("unreduced", 4), ("fsdp columns", 4)], "NorMuon in halves", ["flat"], tmp_path)


SMALL_STATE = {  # name -> (layouts, shapes)
    "NorMuon in 8 bits": ([("ep x fsdp", 4), ("hsdp", 4), ("shard_state", 4)], "wide"),
    "Muon in host memory": ([("hsdp", 4), ("shard_state", 4), ("tp x fsdp, strided", 4)], True),
    "NorMuon in halves": ([("ep", 4), ("tp x fsdp, strided", 4), ("hsdp x tp", 8)], "halves"),
}


@pytest.mark.parametrize("name", SMALL_STATE)
def test_and_with_small_state_on_further_layouts(name, tmp_path):
    """State on the host is compared with a run whose state is on the device."""
    chain, shapes = SMALL_STATE[name]
    run_chain(chain, name, ["flat", "nested"], tmp_path, even=shapes)


@pytest.mark.parametrize("kind", ["safetensors", "consolidated safetensors"])
def test_and_through_safetensors(kind, tmp_path):
    chain = [("fsdp", 4), ("unreduced", 4), ("tp x fsdp", 4), ONE, ("fsdp columns", 2)]
    run_chain(chain, "NorMuon", [kind], tmp_path)


TWO_GPUS = [("fsdp", 2), ("unreduced", 2), ("ddp", 2), ("fsdp columns", 2), ONE, ("unreduced", 2)]
FOUR_GPUS = [("fsdp", 4), ("hsdp", 4), ("tp x fsdp", 4), ("ep x fsdp", 4), ("unreduced", 4), ("fsdp", 2), ("ddp", 4)]


@pytest.mark.parametrize("chain", [pytest.param(TWO_GPUS, marks=pytest.mark.gpus(2), id="2 GPUs"),
                                   pytest.param(FOUR_GPUS, marks=pytest.mark.gpus(4), id="4 GPUs")])
@pytest.mark.parametrize(("kinds", "capturable"), [
    (("nested", "flat"), False), (("safetensors", "consolidated safetensors"), False), (("flat", "nested"), True)],
    ids=str)
@pytest.mark.gpu
def test_a_run_goes_on_with_its_bits_on_gpus(chain, kinds, capturable, tmp_path):
    """11 pairs of layouts over NCCL; with `capturable`, the steps on each layout are two launched and one replayed."""
    run_chain(chain, "NorMuon", kinds, tmp_path, device="cuda", capturable=capturable)

"""Which parameters go to Muon: by shape, module and name, each into exactly one group."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.ranks import package, part


def split(model, **options):
    """{cleaned name: whether Muon takes it}, after checking that every trainable parameter is in one group."""
    groups = package().get_default_muon_param_groups(model, **options)
    params = [p for group in groups for p in group["params"]]
    assert len(params) == len(set(params))
    assert set(params) == {p for p in model.parameters() if p.requires_grad}
    assert all(len(group["params"]) == len(group["param_names"]) > 0 for group in groups)
    names = [name for group in groups for name in group["param_names"]]
    assert len(names) == len(set(names))
    package().Muon(groups)
    return {name: group["use_muon"] for group in groups for name in group["param_names"]}


class Attention(nn.Module):
    def __init__(self, dim, last="output"):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.add_module(last, nn.Linear(dim, dim, bias=False))


class Experts(nn.Module):
    def __init__(self, count, dim):
        super().__init__()
        self.gate = nn.Linear(dim, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, 2 * dim, dim))
        self.down = nn.Parameter(torch.randn(count, dim, 2 * dim))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.mlp = Experts(3, dim)


class Model(nn.Module):
    def __init__(self, dim=8, vocab=20, tie=False, head="lm_head"):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Block(dim) for _ in range(2)])
        self.norm = nn.RMSNorm(dim)
        self.add_module(head, nn.Linear(dim, vocab, bias=False))
        if tie:
            getattr(self, head).weight = self.tok_embeddings.weight


MUON = {f"layers.{i}.{name}" for i in range(2)
        for name in ("attn.qkv.weight", "attn.output.weight", "mlp.up", "mlp.down")}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("head", ["lm_head", "output", "head", "embed_out", "unembed", "score", "classifier"])
def test_a_transformer(head):
    by_name = split(Model(head=head))
    assert {name for name, use_muon in by_name.items() if use_muon} == MUON
    assert by_name["tok_embeddings.weight"] is False and by_name[f"{head}.weight"] is False
    assert by_name["layers.0.norm.weight"] is False and by_name["layers.0.attn.qkv.bias"] is False
    assert by_name["layers.0.mlp.gate.weight"] is False  # the router of the experts


@pytest.mark.parametrize("head", ["lm_head", "output"])
def test_tied_weights_count_once_and_as_an_embedding(head):
    by_name = split(Model(tie=True, head=head))
    assert {name for name, use_muon in by_name.items() if use_muon} == MUON
    assert ("tok_embeddings.weight" in by_name) + (f"{head}.weight" in by_name) == 1


def test_a_head_tied_to_an_embedding_that_comes_later():
    """Whichever of its names is met first."""
    model = nn.Module()
    model.project = nn.Linear(8, 20, bias=False)
    model.hidden = nn.Linear(8, 8)
    model.table = nn.Embedding(20, 8)
    model.table.weight = model.project.weight
    assert split(model) == {"project.weight": False, "hidden.weight": True, "hidden.bias": False}


@pytest.mark.parametrize("last", ["output", "out_proj", "head_proj", "c_proj"])
def test_an_attention_output_is_no_head(last):
    """Peers' defect: a skip list matches the middle of a name. Here the module is near the top of the model, too."""
    model = nn.Module()
    model.attn = Attention(8, last)
    model.layers = nn.ModuleList([nn.ModuleDict({"attn": Attention(8, last)})])
    by_name = split(model)
    assert by_name[f"attn.{last}.weight"] and by_name[f"layers.0.attn.{last}.weight"]


def test_a_name_that_contains_the_name_of_a_head_or_embedding():
    names = ("heads_mixer", "output_gate", "overhead", "scores", "lm_head_norm_proj")
    by_name = split(nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names}))
    assert all(by_name.values())


@pytest.mark.parametrize("name", ["latents", "queries", "scale_shift_table", "codebook", "codevectors"])
def test_learned_vectors_are_no_matrix(name):
    """Perceiver's latents, queries of decoders, PixArt's tables of modulation, codes of wav2vec 2.0."""
    model = nn.Module()
    model.hidden = nn.Linear(8, 8, bias=False)
    model.register_parameter(name, nn.Parameter(torch.zeros(1, 6, 8) if name == "codevectors" else torch.zeros(6, 8)))
    assert split(model) == {"hidden.weight": True, name: False}


def test_a_head_inside_a_language_model_of_another_model():
    model = nn.Module()
    model.vision = nn.Linear(8, 8)
    model.language_model = Model()
    by_name = split(model)
    assert by_name["language_model.lm_head.weight"] is False
    assert by_name["language_model.tok_embeddings.weight"] is False and by_name["vision.weight"]


def test_embeddings_are_known_by_type():
    model = nn.ModuleDict({"a": nn.Embedding(5, 4), "b": nn.EmbeddingBag(5, 4), "c": nn.Linear(4, 4)})
    assert split(model) == {"a.weight": False, "b.weight": False, "c.weight": True, "c.bias": False}


class Subclass(nn.Embedding):
    """As sharded and scaled embeddings of many models are."""


def test_embeddings_are_known_by_their_base():
    assert split(nn.Sequential(Subclass(5, 4), nn.Linear(4, 4, bias=False))) == {"0.weight": False, "1.weight": True}


class VisionTransformer(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 17, dim))
        self.block = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, 10)


def test_position_embeddings_and_class_tokens_are_no_stacks_of_matrices():
    """(1, N, D) and (1, 1, D): parameters of their own, without a module that says what they are."""
    by_name = split(VisionTransformer())
    assert {name for name, use_muon in by_name.items() if use_muon} == {"block.weight"}


@pytest.mark.parametrize("layer", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d])
def test_convolutions_go_to_adamw(layer):
    """(C, C, K) is no stack of expert weights."""
    model = nn.Sequential(layer(4, 4, 3, bias=False), nn.Linear(4, 4, bias=False))
    assert split(model) == {"0.weight": False, "1.weight": True}


class Tables(nn.Module):
    """Positions without a module that says so (minGPT, SAM, VITS), Mamba's decays, scales of rows; and matrices."""

    def __init__(self):
        super().__init__()
        for name, shape in {"pos_emb": (1, 9, 8), "rel_pos_h": (7, 4), "emb_rel_k": (1, 9, 4), "A_log": (8, 4),
                            "post": (4, 4), "member": (4, 4), "log": (4, 4)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.pos_proj, self.hidden = nn.Linear(8, 8, bias=False), nn.Linear(8, 6, bias=False)
        nn.utils.weight_norm(self.hidden)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_tables_and_scales_of_rows_are_no_matrices():
    assert {name for name, use_muon in split(Tables()).items() if use_muon} == {
        "post", "member", "log", "pos_proj.weight", "hidden.weight_v"}


@pytest.mark.parametrize("head", ["distillation_classifier", "value_head"])
def test_a_head_that_is_one_of_several(head):
    model = nn.ModuleDict({"hidden": nn.Linear(8, 8, bias=False), head: nn.Linear(8, 3, bias=False)})
    assert split(nn.ModuleDict({"model": model})) == {"model.hidden.weight": True, f"model.{head}.weight": False}


def test_norms_go_to_adamw_whatever_their_shape():
    model = nn.Sequential(nn.LayerNorm((4, 6)), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.RMSNorm((2, 3)),
                          nn.Linear(4, 4, bias=False))
    by_name = split(model)
    assert {name for name, use_muon in by_name.items() if use_muon} == {"4.weight"}


def test_attention_of_torch():
    by_name = split(nn.TransformerEncoderLayer(8, 2, 16))
    assert {name for name, use_muon in by_name.items() if use_muon} == {
        "self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"}


def test_frozen_parameters_are_in_no_group():
    model = Model()
    model.layers[0].requires_grad_(False)
    by_name = split(model)
    assert {name for name, use_muon in by_name.items() if use_muon} == {name for name in MUON if ".1." in name}
    assert not any(name.startswith("layers.0") for name in by_name)


def test_a_model_without_other_parameters_has_one_group():
    groups = package().get_default_muon_param_groups(nn.Linear(4, 4, bias=False))
    assert [group["use_muon"] for group in groups] == [True]


@pytest.mark.parametrize("model", [
    nn.Sequential(nn.LayerNorm(4)), nn.Sequential(nn.Embedding(5, 4), nn.Conv2d(3, 3, 3)),
    nn.Linear(4, 4).requires_grad_(False), nn.Sequential()], ids=["norm", "embedding", "frozen", "empty"])
def test_nothing_for_muon_is_an_error(model):
    with pytest.raises(ValueError, match="no parameter of the model goes to Muon.*use_muon=True"):
        package().get_default_muon_param_groups(model)


# wrappers --------------------------------------------------------------------------------------------------------

def compiled(model):
    return torch.compile(model, backend="eager")


def blocks_compiled(model):
    for i, block in enumerate(model.layers):
        model.layers[i] = torch.compile(block, backend="eager")
    return model


def checkpointed(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for i, block in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(block)
    return model


class Parallel(nn.Module):
    """The prefix of DistributedDataParallel, without its process group."""

    def __init__(self, module):
        super().__init__()
        self.module = module


WRAPPERS = {
    "compile": compiled, "blocks compiled": blocks_compiled, "checkpoint": checkpointed, "DDP": Parallel,
    "DDP of compile": lambda m: Parallel(compiled(m)), "compile of DDP": lambda m: compiled(Parallel(m)),
    "all": lambda m: compiled(Parallel(blocks_compiled(checkpointed(m)))),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_are_those_of_the_model_without_its_wrappers(wrapper):
    for tie in (False, True):
        model = Model(tie=tie, head="output")
        bare = split(model)
        assert split(WRAPPERS[wrapper](model)) == bare


def distributed(rank, world):
    model = nn.parallel.DistributedDataParallel(Model())
    return split(model)


def test_the_real_ddp_has_that_prefix():
    from tests.ranks import run_threads

    assert run_threads(1, distributed) == [split(Model())]


def test_a_module_of_the_model_may_be_called_module():
    model = nn.Module()
    model.first = nn.Linear(4, 4, bias=False)
    model.encoder = Parallel(nn.Linear(4, 4, bias=False))
    assert split(model) == {"first.weight": True, "encoder.module.weight": True}


@pytest.mark.parametrize(("name", "expected"), [
    ("module.a.weight", "a.weight"), ("_orig_mod.module.a._checkpoint_wrapped_module.b", "a.b"),
    ("a.module.b", "a.module.b"), ("module", "module"), ("weight", "weight"),
    ("_fsdp_wrapped_module.a._fsdp_wrapped_module.b", "a.b")])
def test_clean_name(name, expected, optimizer):
    assert part("params.model.names").clean_name(name) == expected


# report ----------------------------------------------------------------------------------------------------------

def test_the_report_lists_every_parameter_and_the_totals():
    reports, model = [], Model(tie=True)
    by_name = split(model, report=reports.append)
    (text,) = reports
    lines = text.splitlines()
    assert len(lines) == len(by_name) + 2
    for name, use_muon in by_name.items():
        (line,) = [line for line in lines if line.split()[0] == name]
        assert ("Muon" if use_muon else "AdamW") in line
        shape = tuple(dict(model.named_parameters())[name].shape)
        assert str(shape) in line
    assert "embedding" in next(line for line in lines if line.startswith("tok_embeddings"))
    for use_muon, title in ((True, "Muon"), (False, "AdamW")):
        params = [p for n, p in model.named_parameters() if by_name.get(n) is use_muon]
        total = next(line for line in lines if line.startswith(f"{title}:"))
        numbers = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", total)]
        assert numbers == [len(params), sum(p.numel() for p in params)]


def test_nothing_for_muon_is_reported_before_it_is_an_error():
    reports = []
    with pytest.raises(ValueError, match="0.weight"):
        package().get_default_muon_param_groups(nn.Sequential(nn.LayerNorm(4)), report=reports.append)
    assert "AdamW: 2 parameters" in reports[0]


def test_the_groups_train_with_one_learning_rate():
    """The Muon group's update has the size of AdamW's."""
    groups = package().get_default_muon_param_groups(Model())
    assert groups[0]["adjust_lr_fn"] == "match_rms_adamw" and "adjust_lr_fn" not in groups[1]
    optimizer = package().NorMuon(groups, lr=0.01, weight_decay=0.0)
    before = [[p.detach().clone() for p in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    optimizer.step()
    for group, old in zip(optimizer.param_groups, before):
        sizes = [(p - o).square().mean().sqrt().item() for p, o in zip(group["params"], old)]
        assert all(0.001 < size < 0.02 for size in sizes)


class Odd(nn.Module):
    """Heads and embeddings as bare parameters, below modules, and under parametrizations."""

    def __init__(self):
        super().__init__()
        self.wte, self.lm_head = nn.Parameter(torch.randn(9, 4)), nn.Parameter(torch.randn(9, 4))
        self.logit_scale = nn.Parameter(torch.ones(1, 1))
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3))
        self.hidden = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False))
        self.classifier = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
        self.module = nn.Linear(4, 4, bias=False)


def test_heads_and_embeddings_wherever_they_are(optimizer):
    muon, *_ = optimizer.get_default_muon_param_groups(Odd())
    assert muon["param_names"] == [
        "hidden.parametrizations.weight.original1", "classifier.0.weight", "module.weight"]


class Vectors(nn.Module):
    """Biases of stacked experts (gpt-oss) and of attention (torch, XLNet), one number for each head (Swin), vectors."""

    def __init__(self):
        super().__init__()
        for name, shape in {"up": (4, 6, 8), "up_bias": (4, 8), "bias_k": (1, 1, 6), "r_w_bias": (2, 3),
                            "biases": (2, 4, 8), "logit_scale": (3, 1, 1), "time_mix": (1, 1, 6), "ia3": (6, 1),
                            "weight": (1, 6), "weight_ih_l0": (8, 1), "debiased": (3, 6)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def test_biases_and_vectors_of_any_number_of_dims_are_no_matrices():
    assert {name for name, use_muon in split(Vectors()).items() if use_muon} == {
        "up", "weight", "weight_ih_l0", "debiased"}
    by_name = split(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    assert {name for name, use_muon in by_name.items() if use_muon} == {"in_proj_weight", "out_proj.weight"}


@pytest.mark.parametrize("head", ["score", "classifier"])
def test_a_head_under_adapters(head):
    """peft: base_model.model.<the model>, whose head is trained whole beside the adapters."""
    inner = nn.ModuleDict({"model": nn.ModuleDict({"q": nn.Linear(8, 8, bias=False)}),
                           head: nn.ModuleDict({"modules_to_save": nn.Linear(8, 2, bias=False)})})
    assert split(nn.ModuleDict({"base_model": nn.ModuleDict({"model": inner})})) == {
        "base_model.model.model.q.weight": True, f"base_model.model.{head}.modules_to_save.weight": False}


def test_a_child_called_module_keeps_its_name(optimizer):
    model = nn.Linear(4, 4, bias=False)
    model.module = nn.Linear(4, 4, bias=False)
    (muon,) = optimizer.get_default_muon_param_groups(model)
    assert muon["param_names"] == ["weight", "module.weight"]


def test_a_parameter_without_a_shape_is_named(optimizer):
    with pytest.raises(ValueError, match="parameter 0.weight has no shape yet"):
        optimizer.get_default_muon_param_groups(nn.Sequential(nn.LazyLinear(3)))


# parts -----------------------------------------------------------------------------------------------------------

def test_each_part_is_a_group_with_its_options(optimizer):
    """Muon's group is the first one; only vectors have no weight decay of their own."""
    groups = optimizer.get_default_muon_param_groups(Model())
    assert [group["name"] for group in groups] == ["muon", "embeddings", "heads", "other", "no_decay"]
    assert [group["use_muon"] for group in groups] == [True, False, False, False, False]
    assert [group.get("weight_decay") for group in groups] == [None, None, None, None, 0.0]
    assert [group["param_names"] for group in groups[1:4]] == [
        ["tok_embeddings.weight"], ["lm_head.weight"], ["layers.0.mlp.gate.weight", "layers.1.mlp.gate.weight"]]
    assert {p.ndim for p in groups[4]["params"]} == {1}


def test_weight_decay_of_the_optimizer_does_not_reach_vectors(optimizer):
    model = Model()
    opt = optimizer.Muon(optimizer.get_default_muon_param_groups(model), lr=0.5, weight_decay=0.5)
    assert [group["weight_decay"] for group in opt.param_groups] == [0.5, 0.5, 0.5, 0.5, 0.0]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    after = dict(model.named_parameters())
    assert torch.equal(after["norm.weight"], before["norm.weight"])
    assert torch.equal(after["layers.0.attn.qkv.bias"], before["layers.0.attn.qkv.bias"])
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"] * 0.75)


def test_an_lr_for_adamw(optimizer):
    """A tensor is copied for each group, since schedulers change it in place."""
    groups = optimizer.get_default_muon_param_groups(Model(), adamw_lr=1e-3)
    assert [group.get("lr") for group in groups] == [None, 1e-3, 1e-3, 1e-3, 1e-3]
    assert "lr" not in optimizer.get_default_muon_param_groups(Model())[1]
    lr = torch.tensor(1e-3)
    given = [group["lr"] for group in optimizer.get_default_muon_param_groups(Model(), adamw_lr=lr)[1:]]
    given[0].fill_(7.0)
    assert [float(value) for value in [lr, *given[1:]]] == pytest.approx([1e-3] * 4)


def test_convolutions_are_no_embeddings(optimizer):
    """Patches of a vision transformer, whose module has "embed" in its name, and depthwise filters (C, 1, K)."""
    model = VisionTransformer()
    model.depthwise = nn.Conv1d(8, 8, 3, groups=8)
    parts = {name: group["name"] for group in optimizer.get_default_muon_param_groups(model)
             for name in group["param_names"]}
    assert [parts[name] for name in ("patch_embed.weight", "depthwise.weight", "pos_embed")] == [
        "other", "other", "embeddings"]


# patterns --------------------------------------------------------------------------------------------------------

def in_part(groups, part) -> set[str]:
    return {name for group in groups if group["name"] == part for name in group["param_names"]}


@pytest.mark.parametrize("pattern", [
    r"layers\.1\.mlp\.(up|down)$", re.compile(r"1\.mlp\.(up|down)"), [r"1\.mlp\.up", r"1\.mlp\.down"],
    lambda name, module, param: isinstance(module, Experts) and param.ndim == 3 and ".1." in name],
    ids=["string", "compiled", "list", "function"])
def test_patterns_move_matrices_to_adamw(pattern):
    reports = []
    groups = package().get_default_muon_param_groups(Model(), adamw=pattern, report=reports.append)
    assert MUON - in_part(groups, "muon") == {"layers.1.mlp.up", "layers.1.mlp.down"} <= in_part(groups, "other")
    (line,) = [line for line in reports[0].splitlines() if line.startswith("layers.1.mlp.up")]
    assert "AdamW" in line and "adamw=" in line


def test_patterns_move_others_to_muon():
    """Also by a tied parameter's second name."""
    groups = package().get_default_muon_param_groups(Model(tie=True), muon=["lm_head", r"mlp\.gate"])
    assert in_part(groups, "muon") == MUON | {
        "tok_embeddings.weight", "layers.0.mlp.gate.weight", "layers.1.mlp.gate.weight"}
    package().Muon(groups)


def test_a_pattern_that_matches_a_parameter_that_is_there_already_changes_nothing():
    groups = package().get_default_muon_param_groups(Model(), adamw="tok_embeddings", muon=r"attn\.qkv\.weight")
    assert in_part(groups, "embeddings") == {"tok_embeddings.weight"} and in_part(groups, "muon") == MUON


@pytest.mark.parametrize(("options", "message"), [
    ({"adamw": r"mpl\."}, r"adamw='mpl.*matches no trainable parameter.*tok_embeddings.weight.*\(\d+ in all\)"),
    ({"muon": [r"mlp\.up", "no_such"]}, "muon='no_such' matches no trainable parameter"),
    ({"muon": lambda name, module, param: False}, "muon='<lambda>' matches no"),
    ({"adamw": "qkv.weight", "muon": "attn.qkv.weight"}, "parameter layers.0.attn.qkv.weight .* matches both"),
    ({"muon": r"norm\.weight"}, r"parameter layers.0.norm.weight of shape \(8,\).*Muon takes matrices"),
    ({"adamw": "("}, "is no regular expression"), ({"adamw": 3}, "adamw=3 is not allowed"),
    ({"muon": [3]}, "muon holds 3")],
    ids=["unused", "one unused", "function", "both", "vector", "syntax", "type", "type in list"])
def test_patterns_that_cannot_be_meant_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        package().get_default_muon_param_groups(Model(), **options)


def test_a_pattern_that_matches_only_frozen_parameters_is_refused():
    model = Model()
    model.lm_head.requires_grad_(False)
    with pytest.raises(ValueError, match="muon='lm_head' matches no trainable parameter"):
        package().get_default_muon_param_groups(model, muon="lm_head")


# a model without matrices ----------------------------------------------------------------------------------------

def test_a_model_that_is_meant_to_have_no_matrices(optimizer):
    """A pipeline's first stage, adapters of vectors. The error says how to go on."""
    stage = nn.ModuleDict({"tok_embeddings": nn.Embedding(6, 4), "norm": nn.LayerNorm(4)})
    with pytest.raises(ValueError, match="allow_no_matrices=True"):
        optimizer.get_default_muon_param_groups(stage)
    groups = optimizer.get_default_muon_param_groups(stage, allow_no_matrices=True)
    assert [(group["name"], len(group["params"])) for group in groups] == [("embeddings", 1), ("no_decay", 2)]
    optimizer.Muon(groups)


def test_a_model_without_trainable_parameters_has_no_groups(optimizer):
    with pytest.raises(ValueError, match="no parameter of the model goes to Muon"):
        optimizer.get_default_muon_param_groups(nn.Linear(4, 4).requires_grad_(False), allow_no_matrices=True)


# more wrappers ---------------------------------------------------------------------------------------------------

class Fabric(nn.Module):
    """Lightning Fabric's wrapper: the model that runs, and the one that was given."""

    def __init__(self, model):
        super().__init__()
        self._forward_module = Parallel(model)
        self._original_module = model


@pytest.mark.parametrize("wrap", [Fabric, lambda m: Fabric(compiled(m)), lambda m: Parallel(Parallel(m)),
                                  lambda m: Parallel(Fabric(m))], ids=["Fabric", "compiled", "twice", "both"])
def test_names_and_split_under_fabric_and_double_wrappers(wrap):
    assert split(wrap(Model(head="output"))) == split(Model(head="output"))


@pytest.mark.parametrize("name, why, advice", [
    ("embed.weight", "embedding", "pass its name as muon="), ("norm.weight", "1-D", "Muon takes matrices only"),
    ("layers.0.weight", "adamw=", "pass its name as muon=")])
def test_a_split_of_a_parameter_that_goes_to_adamw_is_refused(name, why, advice, optimizer):
    model = nn.ModuleDict({"embed": nn.Embedding(64, 16), "layers": nn.ModuleList([nn.Linear(16, 16) for _ in "ab"]),
                           "norm": nn.LayerNorm(16)})
    param = model.get_parameter(name)
    param.muon_split = {"heads": 2}
    tables = []
    with pytest.raises(ValueError) as raised:
        optimizer.get_default_muon_param_groups(model, adamw="layers.0.weight", report=tables.append)
    told = f"parameter {name} of shape {tuple(param.shape)} has the attribute muon_split={{'heads': 2}}, but goes to"
    assert told in str(raised.value) and why in str(raised.value) and advice in str(raised.value) and tables
    param.requires_grad_(False)
    optimizer.get_default_muon_param_groups(model)

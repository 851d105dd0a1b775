"""Fifty steps in the loops of frameworks: this package's weights are those of the framework's Muon, or of torch's."""

from __future__ import annotations

import copy
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml

from tests.frameworks import parity
from tests.frameworks.common import fabric, run
from tests.frameworks.parity import TOLERANCE, VALUES, InParts, Model, deviation, theirs_and_ours, weights
from tests.frameworks.test_configs import module_of, olmo_core_optim, recipe
from tests.ranks import package, part

DION = {"momentum_form": "sum", "ns_coefficients": "polar_express_dion", "nesterov": False}  # as MuonFactory names it


def test_trainer(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    theirs, ours = (parity.train_in_trainer(choice, str(tmp_path)) for choice in theirs_and_ours())
    assert deviation(theirs, ours) <= TOLERANCE


def test_accelerate():
    pytest.importorskip("accelerate")
    theirs, ours = map(parity.train_in_accelerate, theirs_and_ours())
    assert deviation(theirs, ours) <= TOLERANCE


def test_lightning(tmp_path):
    pytest.importorskip("lightning")
    choices = theirs_and_ours(unscale_in_step=False)
    theirs, ours = (parity.train_in_lightning(choice, str(tmp_path)) for choice in choices)
    assert deviation(theirs, ours) <= TOLERANCE


def test_fabric():
    fabric()
    theirs, ours = map(parity.train_in_fabric, theirs_and_ours(unscale_in_step=False))
    assert deviation(theirs, ours) <= TOLERANCE


def test_a_wrong_mapping_is_seen():
    fabric()
    theirs, ours = map(parity.train_in_fabric, theirs_and_ours(unscale_in_step=False, momentum=0.901))
    assert deviation(theirs, ours) > 100 * TOLERANCE


@pytest.mark.parametrize("loop", ["trainer", "fabric"])
def test_two_ranks_with_fsdp2(tmp_path, loop):
    """torch.optim.Muon steps DTensors here."""
    if loop == "fabric":
        fabric()
        if not os.environ.get("OPTIMIZER_FRAMEWORKS"):
            pytest.skip("takes 20 s of two cores; runs with OPTIMIZER_FRAMEWORKS, as in the workflow test.yml")
    else:
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    for said in run("parity", 2, tmp_path, loop, on_cpu=True):
        assert said["deviation"] <= TOLERANCE


class DistMuonOnOneRank(torch.optim.Optimizer):
    """torchtitan's DistMuon by its own three functions. Its class moves shards between GPUs, and refuses a CPU."""

    def __init__(self, groups):
        super().__init__(groups, {"momentum": parity.MOMENTUM, "nesterov": True, "eps": 1e-7, "ns_steps": 5,
                                  "ns_coefficients": (3.4445, -4.7750, 2.0315), "adjust_lr_fn": None})

    @torch.no_grad()
    def step(self, closure=None):
        from torchtitan.distributed.flex_shard import dist_muon as own

        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                update = own._prepare_muon_input(
                    p.grad, momentum, momentum=group["momentum"], nesterov=group["nesterov"], out=torch.empty_like(p))
                own._compute_muon_direction(
                    update, ns_coefficients=group["ns_coefficients"], ns_steps=group["ns_steps"], eps=group["eps"],
                    out=update)
                own._apply_muon_update(
                    p, update, lr=group["lr"], weight_decay=group["weight_decay"], adjust_lr_fn=group["adjust_lr_fn"],
                    compute_matrix_shape=p.shape)


def test_torchtitan(monkeypatch):
    """In its containers of optimizers and schedules."""
    pytest.importorskip("torchtitan")
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

    kinds = {"DistMuon": DistMuonOnOneRank, "AdamW": torch.optim.AdamW}
    monkeypatch.setattr(OptimizersContainer, "_resolve_optimizer_factory",
                        staticmethod(lambda name: lambda groups: InParts(kinds[name](groups))))
    adamw = {"lr": parity.LR, "betas": parity.BETAS, "eps": parity.EPS}
    groups = [ParamGroupConfig(pattern="layers", optimizer_name="DistMuon",
                               optimizer_kwargs={"lr": parity.LR, "weight_decay": parity.DECAY}),
              ParamGroupConfig(pattern="norm", optimizer_name="AdamW", optimizer_kwargs={**adamw, "weight_decay": 0.0}),
              ParamGroupConfig(pattern=".", optimizer_name="AdamW",
                               optimizer_kwargs={**adamw, "weight_decay": parity.DECAY})]
    results = []
    theirs = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    for config in (theirs, package().torchtitan_muon(**VALUES)):
        model = Model()
        optimizers = config.build(model_parts=[model])
        schedules = LRSchedulersContainer.Config(warmup_steps=5).build(
            optimizers=optimizers, training_steps=parity.STEPS)
        for batch in parity.loader():
            model(**batch)["loss"].backward()
            optimizers.step()
            schedules.step()
            optimizers.zero_grad()
        results.append(weights(model))
    assert deviation(*results) <= TOLERANCE


def test_nemo_automodel(monkeypatch):
    """Its `MuonConfig`, which calls dion, beside the recipe of the page."""
    pytest.importorskip("dion")
    config = pytest.importorskip("nemo_automodel.recipes._typed_config")
    from nemo_automodel.components.config.loader import ConfigNode
    from nemo_automodel.components.optim.optimizer import MuonConfig

    module_of("NeMo Automodel", monkeypatch)
    theirs = {"_target_": "dion.Muon", "lr": parity.LR, "weight_decay": parity.DECAY, "mu": parity.MOMENTUM,
              "scalar_betas": [*parity.BETAS], "scalar_eps": parity.EPS, "lm_head_lr": parity.LR}
    # It decays vectors, but neither embeddings nor the head
    decays = {"re:embed|lm_head": {"weight_decay": 0.0}, "norm.*": {"weight_decay": parity.DECAY}}
    values = {**VALUES, **DION, "adjust_lr": "spectral_norm", "overrides": decays}
    del values["adjust_lr_fn"]  # it takes keys that end with _fn for paths to import
    results = []
    for entry in (theirs, {"_target_": "my_module.MuonConfig", "muon": values}):
        made = config.RecipeConfig(ConfigNode({"optimizer": entry})).optimizer
        model = Model()
        [optimizer] = made.build(model, device_mesh=None, is_peft=False)
        is_theirs = entry is theirs
        assert isinstance(made, MuonConfig) is is_theirs
        results.append(parity.train_plainly(model, InParts(optimizer) if is_theirs else optimizer))
    assert deviation(*results) <= TOLERANCE


def test_olmo_core(monkeypatch):
    """Its `MuonConfig`, which calls dion, beside the recipe of the page, on its transformer."""
    pytest.importorskip("dion")
    olmo = olmo_core_optim(monkeypatch)
    from olmo_core.nn.transformer import TransformerConfig

    module_of("OLMo-core", monkeypatch)
    values = {**yaml.safe_load(recipe("OLMo-core", "yaml")), "lr": 0.01}
    dion, arguments = part("integrations.dion"), part("integrations.dion")._muon_arguments
    monkeypatch.setattr(dion, "_muon_arguments", lambda *given: {**arguments(*given), "wire_dtype": torch.float32})
    torch.manual_seed(0)
    config = TransformerConfig.llama_like(vocab_size=16, d_model=16, n_layers=1, n_heads=2)
    first = config.build(init_device="cpu")
    for p in first.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    results = []
    for kind in ("muon", "sharded_muon"):
        model = copy.deepcopy(first)
        optimizer = olmo.OptimConfig.from_dict({**values, "type": kind}).build(model)
        if kind == "muon":
            optimizer = InParts(optimizer)
        else:
            assert isinstance(optimizer, package().DionMuon)

        def loss_of(batch, model=model):
            logits = model(batch["input_ids"])
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

        results.append(parity.train_plainly(model, optimizer, loss_of))
    assert deviation(*results, start=weights(first)) <= TOLERANCE


def test_axolotl():
    """Its `optimizer: muon`, in its trainer's `create_optimizer`. It never steps vectors, so they are frozen here."""
    eps = 1e-12  # its AdamW adds eps before the correction of the bias, torch's after it: 4.6e-5 with 1e-8
    mixin = pytest.importorskip("axolotl.core.trainers.mixins.optimizer")
    own = pytest.importorskip("axolotl.contribs.mit.muon").MuonOptimizerFactory
    theirs = {"lr": parity.LR, "weight_decay": parity.DECAY, "betas": parity.BETAS, "eps": eps}
    ours = {**VALUES, "eps": eps, "momentum": 0.95, "momentum_form": "sum", "adjust_lr_fn": "match_rms_adamw"}
    results = []
    for choice in ((own, theirs), (package().MuonFactory, ours)):
        trainer = mixin.OptimizerMixin.__new__(mixin.OptimizerMixin)  # Trainer's own constructor reads a whole config
        trainer.model, trainer.optimizer, trainer.optimizer_cls_and_kwargs = Model(), None, choice
        trainer.args = mock.MagicMock(
            loraplus_lr_ratio=None, embedding_lr_scale=None, embedding_lr=None, lr_groups=None)
        trainer.model.norm.requires_grad_(False)
        optimizer = trainer.create_optimizer()
        results.append(parity.train_plainly(trainer.model, InParts(optimizer) if choice[0] is own else optimizer))
    start = weights(Model())
    for found in (*results, start):
        del found["norm.weight"]
    assert deviation(*results, start=start) <= TOLERANCE


@pytest.fixture
def one_rank(monkeypatch):
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)):
        monkeypatch.setenv(name, str(value))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_deepspeed(monkeypatch, one_rank):
    """Its own Muon in ZeRO 0, 1 and 2, and ours in ZeRO 0. Ours in ZeRO 1 to 3 gets flat pieces, and raises.

    One test, since DeepSpeed keeps groups of the first process group for good.
    """
    deepspeed = pytest.importorskip("deepspeed")
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", {})  # compile nothing
    monkeypatch.setattr(get_accelerator(), "is_bf16_supported", lambda: False)  # iterate in fp32
    own = {"type": "Muon", "params": {
        "lr": parity.LR, "weight_decay": parity.DECAY, "momentum": parity.MOMENTUM, "betas": parity.BETAS,
        "eps": parity.EPS, "ns_method": "standard"}}
    values = {**VALUES, "overrides": {"norm.*": {"weight_decay": parity.DECAY}}}  # it decays vectors

    def trained(stage: int | None, clipping: float) -> dict:
        model = Model()
        config = {"train_micro_batch_size_per_gpu": parity.BATCH, "gradient_clipping": clipping}
        if stage is None:
            more = {"optimizer": package().MuonFactory()(model, **values)}
        else:
            more = {"model_parameters": model.parameters()}
            config |= {"optimizer": own, "zero_optimization": {"stage": stage}}
        with torch.compiler.set_stance("force_eager"):
            engine, *_ = deepspeed.initialize(model=model, config=config, **more)
            for batch in parity.loader():
                engine.backward(engine(**batch)["loss"])
                engine.step()
        return weights(model)

    # ZeRO 1 and 2 clip after Muon: its updates, not gradients
    for clipping, stages in ((0.5, (0,)), (0.0, (1, 2))):
        ours = trained(None, clipping)
        for stage in stages:
            assert deviation(trained(stage, clipping), ours) <= TOLERANCE, stage

    for stage in (1, 2, 3):
        model = Model()
        config = {"train_micro_batch_size_per_gpu": parity.BATCH, "zero_optimization": {"stage": stage},
                  "zero_allow_untested_optimizer": True}
        ours = package().MuonFactory()(model, **values)
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=ours)
        engine.backward(engine(**next(iter(parity.loader())))["loss"])
        with pytest.raises(ValueError, match="is 1-D; Muon takes matrices"):
            engine.step()

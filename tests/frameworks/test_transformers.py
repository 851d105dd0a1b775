"""transformers' Trainer, TRL and accelerate with MuonFactory: one process, DDP, FSDP2, LoRA; resumed."""

from __future__ import annotations

import pytest
import torch

from tests.frameworks.common import Tokens, llama, run
from tests.ranks import package

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def assert_resumed(said):
    for rank in said:
        assert rank["straight"] == rank["resumed"] == said[0]["straight"]


@pytest.mark.parametrize(("mode", "world", "weight", "wrapped"), [
    ("one", 1, "Parameter", "LlamaForCausalLM"), ("ddp", 2, "Parameter", "DistributedDataParallel"),
    ("fsdp2", 2, "DTensor", "FSDPLlamaForCausalLM")])
def test_trainer(tmp_path, mode, world, weight, wrapped):
    said = run("trainer", world, tmp_path, mode)
    assert_resumed(said)
    for rank in said:
        assert (rank["optimizer"], rank["weight"], rank["wrapped"]) == ("Muon", weight, wrapped)
        assert rank["rates"] == [0.01, 0.02] and len(rank["muon"]) == 14


def test_metrics_in_the_logs(tmp_path):
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=4, report_to=[],
                             save_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available())
    choice = package().MuonFactory, {"lr": 0.02, "process_group": "world"}
    trainer = Trainer(llama(), args, train_dataset=Tokens(), optimizer_cls_and_kwargs=choice)
    trainer.add_callback(package().trainer_metrics(trainer, every=3))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "muon/group0/orthogonality_error" in entry]
    assert [entry["step"] for entry in logged] == [3, 6]
    assert all(0 < entry["muon/group0/update_to_weight"] < 1 for entry in logged)


@pytest.mark.parametrize(("mode", "world"), [("one", 1), ("ddp", 2), ("fsdp2", 2)])
def test_trainer_with_lora(tmp_path, mode, world):
    pytest.importorskip("peft")
    said = run("trainer", world, tmp_path, mode, "lora")
    assert_resumed(said)
    assert len(said[0]["muon"]) == 28 and all("lora_" in name for name in said[0]["muon"])
    assert (said[0]["wrapped"] == "DistributedDataParallel") == (mode == "ddp")


@pytest.mark.parametrize(("mode", "lora", "world"), [
    ("sft", (), 1), ("sft", (), 2), ("sft", ("lora",), 1), ("dpo", (), 1), ("dpo", ("lora",), 1)],
    ids=["sft", "sft-ddp", "sft-lora", "dpo", "dpo-lora"])
def test_trl(tmp_path, mode, lora, world):
    """Two ranks: with DDP."""
    for name in ("trl", "peft", "datasets"):
        pytest.importorskip(name)
    said = run("trl", world, tmp_path, mode, *lora, on_cpu=True)
    assert_resumed(said)
    for rank in said:
        assert rank["optimizer"] == "NorMuon" and len(rank["muon"]) == (28 if lora else 14)
        assert (rank["wrapped"] == "DistributedDataParallel") == (world == 2)


def test_accelerate(tmp_path):
    """Equal bits of weights and state in all modes where gradients are equal: without clipping, or without shards."""
    found = {}
    for mode in ("ddp", "ddp_shard_state", "fsdp2"):
        (tmp_path / mode).mkdir()
        said = run("accelerate", 2, tmp_path / mode, mode)
        assert_resumed(said)
        assert said[0]["weight"] == ("DTensor" if mode == "fsdp2" else "Parameter")
        assert said[0]["rate"] < 0.01  # the scheduler has stepped the optimizer's groups
        found[mode] = said[0]
    ddp, shard_state, fsdp2 = found.values()
    assert ddp["unclipped"] == shard_state["unclipped"] == fsdp2["unclipped"] != ddp["straight"]
    assert ddp["straight"] == shard_state["straight"]
    assert ddp["norms"][0] > 0.5 and fsdp2["norms"][0] == pytest.approx(ddp["norms"][0], rel=1e-6)


@pytest.mark.parametrize("of_loss", [False, True], ids=["model", "loss"])
def test_sentence_transformers(tmp_path, of_loss):
    """By `optimizer_cls_and_kwargs` without the weights of the loss; by `optimizers` with them. Resumed with equal bits
    of what sentence-transformers saves, which is not the loss.
    """
    for name in ("sentence_transformers", "datasets"):
        pytest.importorskip(name)
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers import losses, models
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(40))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    BertModel(BertConfig(vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                         intermediate_size=64, max_position_embeddings=32)).save_pretrained(tmp_path / "bert")
    data = Dataset.from_dict({"a": [f"w{i % 40}" for i in range(48)], "b": [f"w{i % 7}" for i in range(48)],
                              "label": [i % 3 for i in range(48)]})

    def train(resume=None):
        torch.manual_seed(0)
        model = st.SentenceTransformer(modules=[models.Transformer(str(tmp_path / "bert")), models.Pooling(32)])
        args = st.SentenceTransformerTrainingArguments(
            str(tmp_path / "out"), max_steps=4, save_steps=2, per_device_train_batch_size=4, report_to=[],
            disable_tqdm=True, use_cpu=True)
        loss = losses.SoftmaxLoss(model, 32, 3)
        first = loss.classifier.weight.detach().clone()
        config = {"lr": 1e-3, "process_group": "world"}
        chosen = {"optimizers": (package().MuonFactory()(loss, **config), None)} if of_loss else {
            "optimizer_cls_and_kwargs": (package().MuonFactory, config)}
        trainer = st.SentenceTransformerTrainer(model, args, train_dataset=data, loss=loss, **chosen)
        trainer.train(resume_from_checkpoint=resume)
        names = [name for group in trainer.optimizer.optimizer.param_groups if group["use_muon"]
                 for name in group["param_names"]]
        return [p.detach() for p in model.parameters()], names, not torch.equal(first, loss.classifier.weight)

    weights, names, moved = train()
    assert len(names) == 13 and all(".encoder." in name or ".pooler." in name for name in names)
    assert moved == of_loss
    resumed = train(str(tmp_path / "out" / "checkpoint-2"))[0]
    assert of_loss or all(map(torch.equal, weights, resumed))

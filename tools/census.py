"""Count which parameters of public models the default groups give to Muon, and compare two versions of the split.

    pip install transformers timm torchvision diffusers peft
    python tools/census.py --markdown census.md
    python tools/census.py --against ../before/torch-ext/optimizer --changed changed.txt

Every model is built on the meta device from its default configuration with at most 4 layers, so neither weights nor
memory are needed. A class that cannot be built this way is counted and left out. `--against` names the folder
`torch-ext/optimizer` of another version; `--changed` then lists each parameter that changed its side, with numbers in
names replaced by N.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import math
import multiprocessing
import pickle
import re
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

SOURCE = Path(__file__).resolve().parent.parent / "torch-ext" / "optimizer"
LIBRARIES = ("transformers", "timm", "torchvision", "diffusers", "peft")
LAYERS = 4  # of each stack of layers; hybrid models repeat their kinds of layers after 4
SECONDS = 120  # to build one model and to split it
DEPTHS = re.compile(r"(^|_)(n|num)_?([a-z]+_)*(layers?|blocks?)$|^layers$|^depth$")
ROW = re.compile(r"^(\S+)\s+(\(.*?\))\s+(Muon|AdamW)\s+(?:(?:muon|embeddings|heads|other|no_decay) +)?(.*)$")

Build = Callable[[], torch.nn.Module]


def models(library: str) -> Iterator[tuple[str, Build]]:
    """(name, function that builds the model) of each model of a library."""
    return globals()[f"_{library}"]()


def _transformers() -> Iterator[tuple[str, Build]]:
    """Every class in the mappings of transformers' AutoModel classes."""
    import transformers
    from transformers.models.auto import modeling_auto

    transformers.logging.set_verbosity_error()
    seen = set()
    mappings = [name for name in vars(modeling_auto) if name.startswith("MODEL_") and name.endswith("MAPPING_NAMES")]
    for mapping in sorted(mappings):
        for classes in getattr(modeling_auto, mapping).values():
            for name in (classes,) if isinstance(classes, str) else classes:
                if name not in seen:
                    seen.add(name)
                    yield name, lambda name=name: _from_config(getattr(transformers, name))


def _from_config(kind: type) -> torch.nn.Module:
    """A transformers model of its default configuration, with few layers where its configuration allows them."""
    try:
        config = kind.config_class()
        _shorten(config)
        return kind(config)
    except Exception:  # some configurations need as many layers as they say
        return kind(kind.config_class())


def _shorten(config) -> None:
    """Give a configuration and those inside it at most LAYERS layers, in place."""
    values = dict(vars(config))
    lengths = {value for key, value in values.items() if DEPTHS.search(key) and isinstance(value, int)}
    for key, value in values.items():
        if DEPTHS.search(key) and isinstance(value, int):
            setattr(config, key, min(value, LAYERS))
        elif key == "depths" and isinstance(value, (list, tuple)):
            setattr(config, key, type(value)(min(depth, 2) for depth in value))
        elif isinstance(value, list) and len(value) in lengths and len(value) > LAYERS:
            setattr(config, key, value[:LAYERS])
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _shorten(value)


def _timm(each: int = 3) -> Iterator[tuple[str, Build]]:
    """The first few architectures of every module of timm."""
    import timm

    for module in sorted(timm.list_modules()):
        for name in timm.list_models(module=module)[:each]:
            yield name, lambda name=name: timm.create_model(name, pretrained=False)


def _torchvision() -> Iterator[tuple[str, Build]]:
    import torchvision

    for name in torchvision.models.list_models():
        more = {} if name.startswith("quantized") else {"weights": None}
        more |= {"weights_backbone": None} if _is_composed(name) else {}
        yield name, lambda name=name, more=more: torchvision.models.get_model(name, **more)


def _is_composed(name: str) -> bool:
    """Whether a torchvision model is built around a classification model."""
    return any(part in name for part in ("rcnn", "retinanet", "fcos", "ssd", "fcn", "deeplab", "lraspp"))


def _diffusers() -> Iterator[tuple[str, Build]]:
    import inspect

    import diffusers

    diffusers.logging.set_verbosity_error()
    for name in sorted(dir(diffusers)):
        kind = getattr(diffusers, name, None) if "Pipeline" not in name and name[:1].isupper() else None
        if isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin) and kind is not diffusers.ModelMixin:
            shorter = {p.name: min(p.default, LAYERS) for p in inspect.signature(kind.__init__).parameters.values()
                       if DEPTHS.search(p.name) and isinstance(p.default, int)}
            yield name, lambda kind=kind, shorter=shorter: kind(**shorter)


def _peft() -> Iterator[tuple[str, Build]]:
    """Each kind of adapter on a small Llama, and combinations with whole modules, embeddings and heads."""
    import peft

    q = ["q_proj", "v_proj"]
    lm = {"task_type": "CAUSAL_LM"}
    prompt = {**lm, "num_virtual_tokens": 4}
    kinds = {
        "AdaLora": {"target_modules": q, "total_step": 10}, "Adamss": {"target_modules": q},
        "AdaptionPrompt": {**lm, "adapter_len": 4, "adapter_layers": 1},
        "BOFT": {"boft_block_size": 4, "target_modules": q},
        "Beft": {"target_modules": q}, "C3A": {"block_size": 16, "target_modules": q},
        "CPT": {**prompt, "cpt_token_ids": [1, 2, 3, 4], "cpt_tokens_type_mask": [1, 1, 2, 2]},
        "Cartridge": {**prompt}, "Deft": {"target_modules": q}, "Delora": {"target_modules": q},
        "FourierFT": {"n_frequency": 16, "target_modules": q}, "Frod": {"target_modules": q},
        "Glora": {"target_modules": q}, "Gralora": {"target_modules": q}, "HRA": {"target_modules": q},
        "Hira": {"target_modules": q}, "IA3": {"target_modules": q, "feedforward_modules": []},
        "Kasa": {}, "LNTuning": {**lm}, "Lily": {"target_modules": q}, "LoHa": {"target_modules": q},
        "LoKr": {"target_modules": q}, "Lora": {"target_modules": q}, "Miss": {"target_modules": q},
        "MultitaskPromptTuning": {**prompt, "num_tasks": 3},
        "OFT": {"oft_block_size": 8, "r": 0, "target_modules": q}, "OSF": {"target_modules": q},
        "Peanut": {"target_modules": q}, "Poly": {"target_modules": q, "n_tasks": 2}, "PrefixTuning": {**prompt},
        "PromptEncoder": {**prompt}, "PromptTuning": {**prompt}, "Psoft": {"target_modules": q},
        "Pvera": {"target_modules": q}, "RandLora": {"target_modules": q},
        "Road": {"group_size": 32, "target_modules": q},
        "Shadow": {}, "Shira": {"target_modules": q}, "Supertuning": {"target_modules": q},
        "TinyLora": {"target_modules": q}, "TrainableTokens": {"token_indices": [1, 2]},
        "UniLora": {"target_modules": q},
        "VBLoRA": {"num_vectors": 16, "vector_length": 8, "topk": 2, "target_modules": q},
        "Velora": {}, "Vera": {"target_modules": q}, "WaveFT": {"n_frequency": 16, "target_modules": q},
    }
    for kind, options in kinds.items():
        yield f"{kind}Config", lambda kind=kind, options=options: peft.get_peft_model(
            _llama(), getattr(peft, f"{kind}Config")(**options))
    lora = {
        "all linear layers": {"target_modules": "all-linear"}, "DoRA": {"target_modules": q, "use_dora": True},
        "embeddings": {"target_modules": [*q, "embed_tokens"]}, "head": {"target_modules": [*q, "lm_head"]},
        "whole head": {"target_modules": q, "modules_to_save": ["lm_head", "embed_tokens"]},
        "tokens": {"target_modules": q, "trainable_token_indices": [1, 2]},
        "bias": {"target_modules": q, "bias": "all"},
    }
    for title, options in lora.items():
        yield f"LoraConfig, {title}", lambda options=options: peft.get_peft_model(
            _llama(), peft.LoraConfig(r=4, **options))
    yield "PrefixTuningConfig, projection", lambda: peft.get_peft_model(
        _llama(), peft.PrefixTuningConfig(**prompt, prefix_projection=True, encoder_hidden_size=32))
    yield "PromptEncoderConfig, LSTM", lambda: peft.get_peft_model(
        _llama(), peft.PromptEncoderConfig(**prompt, encoder_reparameterization_type="LSTM"))
    yield "LoraConfig, classification", lambda: peft.get_peft_model(
        _llama("LlamaForSequenceClassification"), peft.LoraConfig(task_type="SEQ_CLS", target_modules=q))
    yield "LoraConfig, token classification", lambda: peft.get_peft_model(
        _llama("LlamaForTokenClassification"), peft.LoraConfig(task_type="TOKEN_CLS", target_modules=q))


def _llama(kind: str = "LlamaForCausalLM") -> torch.nn.Module:
    import transformers

    config = transformers.LlamaConfig(vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    return getattr(transformers, kind)(config)


def split_of(folder: Path) -> Callable[[torch.nn.Module], list[tuple[str, str, str, str]]]:
    """A function that returns (name, shape, side, reason) of each parameter, by the split in a source folder.

    Only the module of the default groups and its imports are loaded, as parts of a package of another name.
    """
    package = f"split_{abs(hash(folder)):x}"
    if package not in sys.modules:
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(folder)]
    nested = (folder / "params" / "param_groups.py").exists()  # older folders are flat
    groups = importlib.import_module(f"{package}.params.param_groups" if nested else f"{package}.groups")

    def split(model: torch.nn.Module) -> list[tuple[str, str, str, str]]:
        reports = []
        try:
            groups.get_default_muon_param_groups(model, report=reports.append)
        except ValueError:
            if not reports:
                raise
        return [match.groups() for match in map(ROW.match, reports[0].splitlines()) if match]

    return split


class Late(Exception):
    """A model took too long."""


def _alarm(*_) -> None:
    raise Late(f"took more than {SECONDS} s")


def _declare_operators() -> None:
    """Declare the operators without which torchvision cannot be imported where its binary does not load."""
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:  # transformers and diffusers do without it
        return
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


def build(library: str, name: str, make: Build, cache: Path | None) -> torch.nn.Module:
    """A model on the meta device, from the cache if it is there, with all parameters trainable, or an adapter's."""
    path = cache and cache / f"{library}.{re.sub(r'[^-_a-zA-Z0-9.]', '_', name)}.pickle"
    if path and path.exists():
        with open(path, "rb") as file:
            return pickle.load(file)
    try:
        with torch.device("meta"):
            model = make()
    except (NotImplementedError, RuntimeError):
        if library != "peft":
            raise
        model = make()  # the adapter's initialization reads the weights, which are small
    if library != "peft":
        model.requires_grad_()
    if path:
        try:
            path.write_bytes(pickle.dumps(model))
        except Exception:  # a model with a local function
            path.unlink(missing_ok=True)
    return model


def count(library: str, part: int, parts: int, folders: list[Path], cache: Path | None, out: Path) -> list[str]:
    """A line of JSON for every `parts`-th model of a library: its name and its split, or its error. The lines are also
    written to a file beside `out`, one after the other, so that progress can be seen.
    """
    warnings.filterwarnings("ignore")
    _declare_operators()
    splits = [split_of(folder) for folder in folders]
    signal.signal(signal.SIGALRM, _alarm)
    lines = []
    with open(f"{out}.{library}.{part}", "w") as file:
        for number, (name, make) in enumerate(models(library)):
            if number % parts != part:
                continue
            record = {"library": library, "model": name}
            signal.alarm(SECONDS)
            try:
                model = build(library, name, make, cache)
                record["splits"] = [split(model) for split in splits]
            except Exception as error:  # a model of another world than ours: optional packages, files to download
                record["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            signal.alarm(0)
            lines.append(json.dumps(record))
            print(lines[-1], file=file, flush=True)
    return lines


def pattern(name: str) -> str:
    return re.sub(r"\d+", "N", name)


def changed(records: list[dict]) -> list[str]:
    """A line for each parameter that the second split moved to the other side, once for each name and reason."""
    found = collections.defaultdict(list)
    for record in records:
        new, *old = record.get("splits", [[]])
        before = {name: (side, why) for name, _, side, why in old[0]} if old else {}
        for name, shape, side, why in new:
            was, because = before.get(name, (side, why))
            if was != side:
                found[record["library"], pattern(name), was, because, side, why].append((record["model"], shape))
    lines = []
    for (library, name, was, because, side, why), places in sorted(found.items()):
        classes = sorted({model for model, _ in places})
        shown = ", ".join(classes[:4]) + (f" and {len(classes) - 4} more" if len(classes) > 4 else "")
        lines.append(f"{library}: {name} {places[0][1]}: {was} ({because}) -> {side} ({why}) in {shown}")
    return lines


def markdown(records: list[dict]) -> str:
    """The tables of docs/groups.md: counts for each library, and for each reason."""
    totals, reasons = collections.defaultdict(collections.Counter), collections.defaultdict(collections.Counter)
    for record in records:
        total = totals[record["library"]]
        total["failed" if "error" in record else "models"] += 1
        for _, shape, side, why in record.get("splits", [[]])[0]:
            elements = math.prod(json.loads(f"[{shape.strip('(),')}]"))
            total[side] += 1
            total[f"{side} elements"] += elements
            reasons[side, why][record["library"]] += 1
    libraries = [library for library in LIBRARIES if library in totals]
    lines = ["| library | models | not built | parameters to Muon | to AdamW | elements to Muon |", "|" + "---|" * 6]
    for library in libraries:
        total = totals[library]
        share = total["Muon elements"] / max(1, total["Muon elements"] + total["AdamW elements"])
        numbers = [total[key] for key in ("models", "failed", "Muon", "AdamW")]
        lines.append(f"| {library} | {' | '.join(f'{number:,}' for number in numbers)} | {share:.1%} |")
    lines += ["", "| side | reason | " + " | ".join(libraries) + " |", "|---|---|" + "---|" * len(libraries)]
    order = sorted(reasons.items(), key=lambda item: (item[0][0] != "Muon", -sum(item[1].values())))
    for (side, why), by_library in order:
        lines.append(f"| {side} | {why} | " + " | ".join(f"{by_library[library]:,}" for library in libraries) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", nargs="+", default=LIBRARIES, choices=LIBRARIES)
    parser.add_argument("--against", type=Path, help="the folder torch-ext/optimizer of another version")
    parser.add_argument("--changed", type=Path, help="write the parameters that changed their side here")
    parser.add_argument("--markdown", type=Path, help="write the tables here instead of printing them")
    parser.add_argument("--records", type=Path, default=Path("census.jsonl"), help="one line of JSON for each model")
    parser.add_argument("--cache", type=Path, help="a folder that keeps the built models between runs")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    options = parser.parse_args()
    folders = [SOURCE, *([options.against.resolve()] if options.against else [])]
    if options.cache:
        options.cache.mkdir(parents=True, exist_ok=True)
    lines = []
    for library in options.libraries:
        work = [(library, part, options.jobs, folders, options.cache, options.records) for part in range(options.jobs)]
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            lines += [line for part in pool.starmap(count, work) for line in part]
    options.records.write_text("".join(f"{line}\n" for line in lines))
    records = [json.loads(line) for line in lines]
    if options.changed:
        options.changed.write_text("".join(f"{line}\n" for line in changed(records)))
    text = markdown(records)
    if options.markdown:
        options.markdown.write_text(text)
    print(text)


if __name__ == "__main__":
    main()

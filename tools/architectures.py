"""Write the table of fused weights in docs/architectures.md: `python tools/architectures.py`, with transformers.

The page itself names the architectures, with options of the configuration in parentheses. Each is built on the meta
device in its default configuration, with few layers; its rows are what split="auto" finds. Rows without sizes (the
first, of experts) are checked and left as they are. `--check` writes nothing, and fails where the page would change.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={ROOT}")
from kernels import get_kernel  # noqa: E402

sys.path.insert(0, str(ROOT / "tools"))
import census  # noqa: E402

PAGE = ROOT / "docs" / "architectures.md"
END = "Classes outside of transformers"  # the tables below are of other libraries
KINDS = "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForPreTraining", "Model"  # the first that exists
LAYERS = 8  # by then all kinds of layers of hybrid models have come
# What the default configuration of some models lacks, or a class with more parts than the first of KINDS
NEEDS = {
    "Dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8}},
    "DeepseekV2 (q_lora_rank=None)": {"q_lora_rank": None, "hidden_size": 2048, "num_attention_heads": 16},
    "Dots1": {"n_routed_experts": 8, "n_shared_experts": 1},
    "Falcon (multi_query=False)": {"multi_query": False, "hidden_size": 2048, "num_attention_heads": 32},
    "Falcon (new_decoder_architecture)": {"new_decoder_architecture": True, "hidden_size": 8192,
                                          "num_attention_heads": 128, "num_kv_heads": 8},
    "GPT2 (cross attention)": {"add_cross_attention": True},
    "HunYuanMoEV1": {"head_dim": 64},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
}
VALUES = {"": True, "True": True, "False": False, "None": None}
CLASSES = {"Gemma3": "Gemma3ForConditionalGeneration", "Hiera": "HieraModel"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where the page would change, and write nothing")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    census.LAYERS = LAYERS
    text, found, wrong = PAGE.read_text(), {}, []
    for names, rows in sections(text).items():
        for name in names.split(", "):
            try:
                found[name] = rows_of(name)
            except Exception as error:  # a configuration that this version of transformers cannot build
                wrong.append(f"{name} was not built: {type(error).__name__}: {str(error)[:100]}")
                continue
            # Remarks in parentheses, and weights that stay whole, are written by hand
            known = {row.partition(" (")[0] for row in rows if "| whole (" not in row}
            if ", " not in names and set(found[name]) != known:
                wrong.append(f"{name}: the page has\n  " + "\n  ".join(rows) + "\nfound\n  " + "\n  ".join(found[name]))
                text = text.replace(table(name, rows), table(name, found[name]))
            elif ", " in names and not any(row.startswith("`experts.gate_up_proj`") for row in found[name]):
                wrong.append(f"{name} has no such experts")
    print("\n".join(wrong) or f"the page is that of {len(found)} architectures")
    if options.check:
        sys.exit(bool(wrong))
    PAGE.write_text(text)


def sections(text: str) -> dict[str, list[str]]:
    """Architecture, or several with commas -> its rows, without the first column."""
    found, name = {}, ""
    for line in text.partition(END)[0].splitlines():
        if match := re.fullmatch(r"\| (.*?) ?\| (`.*) \|", line):
            name = match[1].strip() or name
            found.setdefault(name, []).append(match[2])
    return found


def table(name: str, rows: list[str]) -> str:
    """The lines of an architecture."""
    return "".join(f"| {'' if number else name} | {row} |\n" for number, row in enumerate(rows))


@functools.cache
def classes() -> dict[str, dict]:
    """Name of an architecture -> end of the name of a class -> function that builds the model."""
    found = {}
    for name, _ in census.models("transformers"):
        arch = re.sub(r"(For[A-Z][A-Za-z]*|LMHeadModel|Model)$", "", name)
        found.setdefault(arch, {})[name[len(arch):]] = name
    return found


def rows_of(name: str) -> list[str]:
    """The rows that split="auto" gives for an architecture, each once."""
    model = build(name)
    names, rows = {id(param): path for path, param in model.named_parameters()}, {}
    for group in get_kernel("org/optimizer", version=1).get_default_muon_param_groups(model, split="auto"):
        members = zip(group["params"], *(each(group, key) for key in ("split", "transposed")))
        for member, split, transposed in members if group.get("use_muon", True) else ():
            path, param = member if isinstance(member, tuple) else (names[id(member)], member)
            if split or transposed:
                path = re.sub(r"\.\d+(?=\.)", ".*", path.removesuffix(".weight"))
                layer = re.search(r"([^.*]+(\.\*)*\.)?[^.]+$", path)[0]
                form = (f"`{json.dumps(split)}`" if split else "whole") + ", `transposed`" * bool(transposed)
                rows[f"`{layer}` | {'x'.join(map(str, param.shape))} | {form}"] = None
    return list(rows)


def each(group: dict, key: str) -> list:
    """A value for each parameter of a group."""
    value = group.get(key)
    return value if isinstance(value, list) else [value] * len(group["params"])


def build(name: str) -> torch.nn.Module:
    """An architecture on the meta device, with few layers where its configuration allows them."""
    import transformers

    arch, _, option = name.partition(" (")
    known = classes()[arch]
    kind = getattr(transformers, CLASSES.get(arch) or known[next(end for end in (*KINDS, *known) if end in known)])
    pairs = [value.partition("=") for value in option.rstrip(")").split(", ") if value]
    values = NEEDS.get(name) or {key: VALUES.get(value, value) for key, _, value in pairs}
    with torch.device("meta"):
        try:
            config = kind.config_class(**values)
            census._shorten(config)
            return kind(config)
        except Exception:  # some configurations need as many layers as they say
            return kind(kind.config_class(**values))


if __name__ == "__main__":
    main()

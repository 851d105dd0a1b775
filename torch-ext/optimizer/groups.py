"""Default parameter groups: which parameters of a model go to Muon, and which to AdamW.

judge.py classifies one parameter; this module walks the model and builds the groups. Every trainable parameter lands
in exactly one group.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from .judge import judge, largest_table
from .validation import check_module

# DDP, torch.compile, FSDP1, activation checkpointing
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def clean_name(name: str) -> str:
    """A fully qualified name without the prefixes of DDP, torch.compile, FSDP1 and activation checkpointing."""
    first, *rest = [part for part in name.split(".") if part not in WRAPPERS[1:]] or [name]
    return ".".join(rest if first == "module" and rest else [first, *rest])


def clean_names(model: nn.Module) -> dict[str, str]:
    """{fully qualified name: clean name} of a model's parameters. A first `module` is a wrapper's where all have it."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    clean = {name: clean_name(f"module.{name}") for name in names}  # which takes that one off again, and no other
    wrapped = all(name.startswith("module.") for name in clean.values())
    return {name: inner.removeprefix("module.") if wrapped else inner for name, inner in clean.items()}


@dataclass(frozen=True)
class Row:
    """One parameter of the split: its name, its shape, whether Muon takes it, and why."""
    name: str
    shape: tuple
    use_muon: bool
    why: str


def get_default_muon_param_groups(model: nn.Module, *, report=None) -> list[dict]:
    """Split the parameters of `model` for `Muon`: hidden matrices to Muon, the rest to AdamW.

    Muon takes 2-D weights and 3-D stacks of expert weights (E, R, C). Embeddings, output heads, convolutions, norms,
    biases (also those of a stack, (E, R)), vectors and scalars, whatever their number of dims, go to AdamW. A head is
    known by its name, or as a linear layer outside lists of layers that has the shape of the largest nn.Embedding. Tied
    weights count once, frozen ones not at all. The Muon group sets adjust_lr_fn="match_rms_adamw" (arXiv 2502.16982),
    so that one learning rate serves both. `report`: a function that gets the split as a printable table (for example
    `print`). Raises ValueError if nothing goes to Muon, or if a parameter is lazy and has no shape yet.
    """
    check_module(model)
    rows, chosen = [], {True: [], False: []}
    for row, param in _split(model):
        rows.append(row)
        chosen[row.use_muon].append((row.name, param))
    if report is not None:
        report(table(rows))
    if not chosen[True]:
        raise ValueError("no parameter of the model goes to Muon: it has no trainable 2-D weight or 3-D stack besides "
                         "embeddings, heads and convolutions; pass groups with use_muon=True yourself\n" + table(rows))
    groups = [_group(chosen[True], True, adjust_lr_fn="match_rms_adamw"), _group(chosen[False], False)]
    return [group for group in groups if group["params"]]


def _group(named, use_muon, **options):
    return {"params": [p for _, p in named], "param_names": [n for n, _ in named], "use_muon": use_muon, **options}


def _split(model):
    """Yield (Row, parameter) for each trainable parameter, once, in the order of the model. What a parametrization
    keeps belongs to the module whose weight it makes.
    """
    tied, names, modules = {}, clean_names(model), dict(model.named_modules(remove_duplicate=False))
    for prefix, module in modules.items():
        for leaf, param in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            owner, _, made = prefix.partition(".parametrizations")
            tied.setdefault(param, []).append((names[leaf], modules[owner] if made else module))
    table_shape = largest_table(modules.values())
    for param in dict.fromkeys(model.parameters()):
        places = tied[param]
        if param.requires_grad:
            use_muon, why = judge(param, places, table_shape)
            yield Row(places[0][0], tuple(param.shape), use_muon, why), param


def table(rows) -> str:
    """The split as text: one line for each parameter, totals below."""
    width = max((len(row.name) for row in rows), default=4)
    lines = [f"{r.name:{width}}  {r.shape!s:20}  {'Muon' if r.use_muon else 'AdamW':5}  {r.why}" for r in rows]
    for use_muon, name in ((True, "Muon"), (False, "AdamW")):
        shapes = [row.shape for row in rows if row.use_muon == use_muon]
        lines.append(f"{name}: {len(shapes)} parameters, {sum(map(math.prod, shapes)):,} elements")
    return "\n".join(lines)

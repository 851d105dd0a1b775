"""Default parameter groups: which parameters of a model go to Muon, and which to AdamW.

classification.py classifies one parameter; this module names the model's parameters without
wrappers' prefixes, applies the user's patterns, and builds the groups. Every trainable parameter
lands in exactly one group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .classification import MUON, NO_DECAY, OTHER, PARTS, Kind, classify
from .errors import shortened
from .model_structure import Place, Structure
from .validation import check_module

# Attributes under which wrappers keep a model: torch.compile, FSDP1, activation checkpointing,
# Lightning Fabric. DDP's, and DeepSpeed's, is `module`, which models also use: it counts as a
# wrapper's only where all names begin with it.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
ORIGINAL = "_original_module"  # where Fabric keeps the model a second time, without wrappers

Match = Callable[[str, nn.Module, nn.Parameter], bool]


def clean_name(name: str) -> str:
    """A fully qualified name without the prefixes of DDP, torch.compile, FSDP1, activation
    checkpointing and Fabric.
    """
    parts = _parts(name)
    depth = int(len(parts) > 1 and parts[0] == "module")
    return ".".join(_parts(name, depth)) or name


def clean_names(model: nn.Module) -> dict[str, str]:
    """{fully qualified name: clean name} of a model's parameters. A first `module` is a wrapper's
    where all have it.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    depth = _wrapper_depth(names)
    return {name: ".".join(_parts(name, depth)) or name for name in names}


def _wrapper_depth(names: list[str]) -> int:
    """How many parts `module` all names begin with: wrappers' in wrappers."""
    depth, every = 0, [_parts(name) for name in names if ORIGINAL not in name.split(".")]
    while every and all(len(parts) > depth + 1 and parts[depth] == "module" for parts in every):
        depth += 1
    return depth


def _parts(name: str, depth: int = 0) -> list[str]:
    """The parts of a name without wrappers' and without the first `depth`, which are parts
    `module`.
    """
    parts = name.split(".")
    if ORIGINAL in parts:
        return [part for part in parts[parts.index(ORIGINAL) + 1 :] if part not in WRAPPERS]
    return [part for part in parts if part not in WRAPPERS][depth:]


@dataclass(frozen=True)
class Row:
    """One parameter of the split: its name, its shape, its part (a name of a group), and why."""

    name: str
    shape: tuple
    part: str
    why: str

    @property
    def use_muon(self) -> bool:
        """Whether Muon takes the parameter."""
        return self.part == MUON


def get_default_muon_param_groups(
    model: nn.Module,
    *,
    adamw=(),
    muon=(),
    adamw_lr: float | torch.Tensor | None = None,
    allow_no_matrices: bool = False,
    report: Callable[[str], object] | None = None,
) -> list[dict]:
    """Split the trainable parameters of `model` into groups for `Muon`: hidden matrices to Muon,
    the rest to AdamW.

    Muon takes 2-D weights (R, C) and 3-D stacks of expert weights (E, R, C). The other groups go to
    AdamW and are, in this order, "embeddings", "heads" (output layers), "other" (convolutions,
    routers and gates of few rows, adapters' packed tensors, ...) and "no_decay" (norms, biases and
    other vectors, with weight_decay=0). The key "name" of a group says which one it is. The Muon
    group is the first one, and groups without parameters are left out. Tied weights count once,
    frozen ones not at all. Names are without the prefixes of wrappers. The Muon group sets
    adjust_lr_fn="match_rms_adamw" (arXiv 2502.16982), so that one learning rate serves both kinds.

    adamw, muon: parameters to move to AdamW, or to Muon: a regular expression that is searched in
    the name, a function of (name, module, parameter), or a list of these. adamw_lr: the lr of all
    AdamW groups; None: that of the optimizer. allow_no_matrices: True for a model that is meant to
    have nothing for Muon, such as a pipeline's first stage. report: a function that gets the split
    as a printable table, for example `print`.

    Raises ValueError if nothing goes to Muon, if a pattern matches no trainable parameter, if a
    parameter matches patterns of both kinds or cannot be stepped by Muon, or if a parameter is lazy
    and has no shape yet.
    """
    check_module(model)
    patterns = {"adamw": _patterns("adamw", adamw), "muon": _patterns("muon", muon)}
    rows = []
    params: dict[str, list] = {part: [] for part in PARTS}
    for row, param in _split(model, patterns):
        rows.append(row)
        params[row.part].append((row.name, param))
    for pattern in (pattern for kind in patterns.values() for pattern in kind if not pattern.found):
        raise ValueError(
            f"{pattern} matches no trainable parameter of the model, whose names are "
            f"{_some([row.name for row in rows])}: correct the pattern, or leave it out"
        )
    if report is not None:
        report(table(rows))
    if not params[MUON] and not (allow_no_matrices and rows):
        raise ValueError(
            "no parameter of the model goes to Muon: it has no trainable 2-D weight or 3-D stack "
            "besides "
            "embeddings, heads and convolutions. If that is meant, as for a pipeline's first stage "
            "or "
            "adapters of vectors, pass allow_no_matrices=True; otherwise name matrices with "
            "muon=..., or "
            "pass groups with use_muon=True yourself\n" + table(rows)
        )
    return [_group(part, named, adamw_lr) for part, named in params.items() if named]


def _group(
    part: str, named: list[tuple[str, nn.Parameter]], adamw_lr: float | torch.Tensor | None
) -> dict:
    """One parameter group, with the options that its part of the split sets."""
    group = {
        "name": part,
        "params": [p for _, p in named],
        "param_names": [n for n, _ in named],
        "use_muon": part == MUON,
    }
    if part == MUON:
        return {**group, "adjust_lr_fn": "match_rms_adamw"}
    if part == NO_DECAY:
        group["weight_decay"] = 0.0
    if adamw_lr is not None:  # a tensor of its own for each group: schedulers change it in place
        group["lr"] = adamw_lr.clone() if isinstance(adamw_lr, torch.Tensor) else adamw_lr
    return group


class Pattern:
    """One pattern of an argument: whether it matches a parameter, and whether it has matched
    any.
    """

    def __init__(self, argument: str, given):
        self.argument, self.given, self.found = argument, given, False
        if not (isinstance(given, (str, re.Pattern)) or callable(given)):
            raise ValueError(
                f"{argument} holds {shortened(repr(given))}, but it must be a regular expression, "
                "a "
                "function of (name, module, parameter), or a list of these"
            )
        try:
            self.regex = re.compile(given) if isinstance(given, (str, re.Pattern)) else None
        except re.error as error:
            raise ValueError(f"{self} is no regular expression: {error}") from error

    def __str__(self) -> str:
        given = self.given.pattern if isinstance(self.given, re.Pattern) else self.given
        given = given if isinstance(given, str) else getattr(given, "__name__", given)
        return f"{self.argument}={shortened(repr(given))}"

    def matches(self, param: nn.Parameter, places: list[Place]) -> bool:
        """Whether the pattern matches a parameter at one of its places."""
        call = (
            self.given
            if self.regex is None
            else lambda name, module, param: self.regex.search(name)
        )
        found = any(call(place.name, place.module, param) for place in places)
        self.found |= found
        return found


def _patterns(argument: str, given) -> list[Pattern]:
    """The patterns of an argument: None, one pattern, or several."""
    one = isinstance(given, (str, re.Pattern)) or callable(given)
    if not one and given is not None and not isinstance(given, (list, tuple, set, frozenset)):
        raise ValueError(
            f"{argument}={shortened(repr(given))} is not allowed: it must be a regular expression, "
            "a "
            "function of (name, module, parameter), or a list of these"
        )
    return [Pattern(argument, entry) for entry in ([given] if one else given or ())]


def _some(names: list[str]) -> str:
    return (
        ", ".join(names[:3]) + (f", ... ({len(names)} in all)" if len(names) > 3 else "")
        if names
        else "none"
    )


def _split(
    model: nn.Module, patterns: dict[str, list[Pattern]]
) -> Iterator[tuple[Row, nn.Parameter]]:
    """Yield (Row, parameter) for each trainable parameter, once, in the order of the model."""
    places, structure = _places(model)
    for param in dict.fromkeys(model.parameters()):
        if param.requires_grad:
            kind = _moved(param, places[param], classify(param, places[param], structure), patterns)
            yield Row(places[param][0].name, tuple(param.shape), kind.part, kind.why), param


def _places(model: nn.Module) -> tuple[dict[nn.Parameter, list[Place]], Structure]:
    """All places of each parameter, and the structure of the model. What a parametrization keeps
    belongs to the module whose weight it makes. A wrapper and the module in it have one clean path,
    which stands for the inner one.
    """
    names, modules = clean_names(model), dict(model.named_modules(remove_duplicate=False))
    depth = _wrapper_depth(list(names))
    places, clean = {}, {}
    for prefix, module in modules.items():
        owner, _, made = prefix.partition(".parametrizations")
        for full, param in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            place = Place(names[full], modules[owner] if made else module)
            places.setdefault(param, []).append(place)
        if next(module.parameters(), None) is not None:
            clean[".".join(_parts(prefix, depth))] = module
    return places, Structure(clean)


def _moved(
    param: nn.Parameter, places: list[Place], kind: Kind, patterns: dict[str, list[Pattern]]
) -> Kind:
    """The kind of a parameter after the user's patterns, each of which is asked."""
    to_adamw = [pattern for pattern in patterns["adamw"] if pattern.matches(param, places)]
    to_muon = [pattern for pattern in patterns["muon"] if pattern.matches(param, places)]
    name = f"parameter {places[0].name} of shape {tuple(param.shape)}"
    if to_adamw and to_muon:
        raise ValueError(
            f"{name} matches both {to_adamw[0]} and {to_muon[0]}: make one of them narrower"
        )
    if to_muon and param.ndim < 2:
        raise ValueError(
            f"{name} matches {to_muon[0]}, but Muon takes matrices (R, C) and stacks of them (..., "
            "R, C): "
            "make the pattern narrower"
        )
    if to_adamw and kind.part == MUON:
        return Kind(OTHER, str(to_adamw[0]))
    return Kind(MUON, str(to_muon[0])) if to_muon and kind.part != MUON else kind


def table(rows: list[Row]) -> str:
    """The split as text: one line for each parameter, totals below."""
    width = max((len(row.name) for row in rows), default=4)
    lines = [
        f"{row.name:{width}}  {row.shape!s:20}  {'Muon' if row.use_muon else 'AdamW':5}  "
        f"{row.part:10}  {row.why}"
        for row in rows
    ]
    for use_muon, name in ((True, "Muon"), (False, "AdamW")):
        shapes = [row.shape for row in rows if row.use_muon == use_muon]
        lines.append(f"{name}: {len(shapes)} parameters, {sum(map(math.prod, shapes)):,} elements")
    return "\n".join(lines)

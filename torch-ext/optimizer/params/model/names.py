"""Names of parameters without the prefixes of wrappers (DDP, torch.compile, FSDP1, activation
checkpointing, Fabric): equal names before and after a model is wrapped.

Imports nothing of the package.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

# Attributes under which wrappers keep a model: torch.compile, FSDP1, activation checkpointing,
# Lightning Fabric. DDP and DeepSpeed use `module`, a name that models use, too: `module` counts as
# a wrapper's only if all names begin with it (`wrapper_depth`).
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
ORIGINAL = "_original_module"  # where Fabric keeps the model a second time, without wrappers


def clean_name(name: str) -> str:
    """A fully qualified name without the prefixes of DDP, torch.compile, FSDP1, activation
    checkpointing and Fabric.

    Of a lone name, a first part `module` always counts as DDP's prefix; see `clean_names` for all
    names of a model.
    """
    parts = _parts(name)
    # "module" alone is the name of a parameter
    depth = int(len(parts) > 1 and parts[0] == "module")
    return clean_path(name, depth) or name


def clean_names(model: nn.Module) -> dict[str, str]:
    """{fully qualified name: name without wrappers' prefixes} of all parameters of a model; tied
    parameters under every name.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    depth = wrapper_depth(names)
    return {name: clean_path(name, depth) or name for name in names}


def clean_path(path: str, depth: int) -> str:
    """The path of a module or parameter without wrappers' attributes, and without the first `depth`
    parts, which are DDP's `module`; "" for a wrapper around the whole model.
    """
    return ".".join(_parts(path, depth))


def wrapper_depth(names: Iterable[str]) -> int:
    """The number of parts `module` at the start of all names: the nesting depth of DDP wrappers."""
    depth = 0
    # Names below ORIGINAL are cut there anyway (`_parts`), and have no prefix of DDP
    every = [_parts(name) for name in names if ORIGINAL not in name.split(".")]
    while every and all(len(parts) > depth + 1 and parts[depth] == "module" for parts in every):
        depth += 1
    return depth


def _parts(name: str, depth: int = 0) -> list[str]:
    """The parts of a name, without wrappers' attributes and without the first `depth` parts
    (`module` of DDP). Below ORIGINAL only the parts after ORIGINAL count.
    """
    parts = name.split(".")
    if ORIGINAL in parts:
        return [part for part in parts[parts.index(ORIGINAL) + 1 :] if part not in WRAPPERS]
    return [part for part in parts if part not in WRAPPERS][depth:]

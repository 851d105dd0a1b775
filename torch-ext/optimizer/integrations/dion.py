"""`DionMuon` and `DionNorMuon`: this package's optimizers with the arguments and group keys of
`dion.Muon` and `dion.NorMuon` (github.com/microsoft/dion at 0a059a4), for programs that call them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

import torch

from ..muon import Muon, NorMuon
from .config import ConfigError, in_config_terms, refuse_text, refuse_unknown

# Keys of dion's groups -> keys of Muon groups. `epsilon` is left out: dion adds a number to the
# norm, this package a number relative to the largest element, small for gradients of any scale
RENAMED = {"mu": "momentum", "muon_beta2": "beta2"}
KEPT = ("lr", "weight_decay", "nesterov", "param_names", "name")
OWN = ("params", "algorithm", "mu", "muon_beta2", "beta1", "beta2", "cautious_wd", "epsilon")
ELEMENTWISE = ("adamw", "lion")  # algorithms of groups that are no matrices
SHAPES = ("adjust_lr", "flatten", "num_heads", "split_sizes")
# None of dion is the factor 1, while None of `Muon` is torch's factor
FACTORS = {"spectral_norm": "spectral_norm", "rms_norm": "rms_norm", None: 1.0}
# Argument or key of `Muon` -> dion's, for messages
CALLED = {
    "momentum": "mu",
    "beta2": "muon_beta2",
    "eps": "epsilon",
    "adjust_lr_fn": "adjust_lr",
    "process_group": "distributed_mesh",
    "use_muon=False": "algorithm='adamw'",
}
# Types of the values of a group: texts in place of numbers and of truth values are refused
TYPES = {
    **dict.fromkeys(("lr", "mu", "muon_beta2", "beta1", "beta2", "weight_decay", "epsilon"), 0.0),
    **dict.fromkeys(("cautious_wd", "nesterov", "flatten"), False),
}
COEFFICIENTS = {True: "polar_express_dion", False: "quintic"}  # by `use_polar_express`


def _pairs(group: Mapping) -> list[tuple[str | None, torch.Tensor]]:
    """(name or None, parameter) of a group's parameters."""
    params = group["params"]
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    return [param if isinstance(param, tuple) else (None, param) for param in params]


def _split_of(group: Mapping, params: list[torch.Tensor]) -> object:
    """The value of `split` for `flatten`, `num_heads` and `split_sizes`; None without any. Raises
    ConfigError for wrong values, several of the three, and sizes that do not fit a parameter.
    """
    flatten, heads, sizes = (group.get(key) for key in ("flatten", "num_heads", "split_sizes"))
    if heads is not None and not _is_size(heads):
        raise ConfigError(f"num_heads={heads!r} is not allowed: it must be a whole number >= 1")
    is_list = isinstance(sizes, (list, tuple))
    if sizes is not None and not (is_list and all(_is_size(size) for size in sizes)):
        raise ConfigError(
            f"split_sizes={sizes!r} is not allowed: it must be a list of numbers of rows, whole "
            "numbers >= 1"
        )
    if sum(bool(value) for value in (flatten, sizes, heads is not None and heads != 1)) > 1:
        raise ConfigError(
            f"flatten={flatten!r}, num_heads={heads!r} and split_sizes={sizes!r} exclude each "
            "other: leave all but one out"
        )
    rows = {p.shape[0] for p in params if p.ndim == 2}
    if sizes is not None:
        if wrong := rows - {sum(sizes)}:
            raise ConfigError(
                f"split_sizes={list(sizes)} add up to {sum(sizes)} rows, but a parameter has "
                f"{min(wrong)}"
            )
        return {"rows": list(sizes)}
    if heads is not None and heads != 1:
        if wrong := [count for count in rows if count % heads]:
            raise ConfigError(f"num_heads={heads} does not divide the {min(wrong)} rows")
        return {"heads": heads}
    # One form for each parameter: a matrix needs no flattening
    return ["flatten" if p.ndim > 2 else None for p in params] if flatten else None


def _is_size(value: object) -> bool:
    """Whether a value is a whole number >= 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_beta(value: object) -> bool:
    """Whether a value is a number in [0, 1)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1


def _muon_group(group: Mapping, params: list[torch.Tensor]) -> dict[str, object]:
    """The keys of a Muon group for a group of dion's "muon" or "normuon". Raises ConfigError for an
    unknown `adjust_lr`, and as `_split_of`.
    """
    keys = {new: group[old] for old, new in RENAMED.items() if old in group}
    factor = group.get("adjust_lr", "spectral_norm")
    if not (factor is None or isinstance(factor, str)) or factor not in FACTORS:
        raise ConfigError(f"adjust_lr={factor!r} must be one of {list(FACTORS)}")
    split = _split_of(group, params)
    return {**keys, "adjust_lr_fn": FACTORS[factor], **({} if split is None else {"split": split})}


def _elementwise_group(group: Mapping) -> dict[str, object]:
    """The keys of a group with use_muon=False for a group of dion's "adamw" or "lion"."""
    betas = {"use_muon": False, "betas": (group["beta1"], group["beta2"])}
    if group["algorithm"] == "lion":
        return {**betas, "rule": "lion"}
    return {**betas, "eps": group["epsilon"]}


def translated(given: Mapping, defaults: Mapping) -> dict[str, object]:
    """The parameter group of this package for a group of dion. `defaults`: dion's arguments.

    Raises NotImplementedError for a tensor as `weight_decay`, ConfigError for unknown keys and
    algorithms, for texts in place of numbers, and without `params`.
    """
    allowed = {*OWN, *KEPT, *SHAPES} - ({"muon_beta2"} - {*defaults})
    refuse_unknown(given, allowed, "group of dion")
    if "params" not in given:
        raise ConfigError("group of dion: the key 'params' is missing")
    group = {**defaults, **given}
    for key, value in group.items():
        refuse_text(key, value, TYPES.get(key))
    for key in ("beta1", "beta2"):
        if not _is_beta(group[key]):
            raise ConfigError(f"{key}={group[key]!r} is not allowed: it must be a number in [0, 1)")
    algorithm = group["algorithm"]
    if algorithm not in (defaults["algorithm"], *ELEMENTWISE):
        raise ConfigError(
            f"algorithm={algorithm!r} must be {defaults['algorithm']!r}, 'adamw' or 'lion'"
        )
    if isinstance(group["weight_decay"], torch.Tensor):
        raise NotImplementedError(
            "weight_decay is a tensor, which is not supported: pass a number; a change of "
            "group['weight_decay'] between steps is read by the next step"
        )
    pairs = _pairs(group)
    keys = {key: group[key] for key in KEPT if key in group}
    if algorithm in ELEMENTWISE:
        keys.pop("nesterov", None)
        keys.update(_elementwise_group(group))
    else:
        keys.update(_muon_group(group, [param for _, param in pairs]))
    if group["cautious_wd"]:
        keys["decay"] = "cautious"
    named = all(name is not None for name, _ in pairs)
    return {"params": pairs if named else [param for _, param in pairs], **keys}


def _muon_arguments(
    groups: list[dict], mesh: object, use_polar_express: bool, newton_schulz_func: object
) -> dict[str, object]:
    """Arguments of `Muon` for the arguments of dion that no group has. Raises NotImplementedError
    for a function as `newton_schulz_func`, ConfigError for a text as `use_polar_express`.
    """
    if newton_schulz_func is not None:
        raise NotImplementedError(
            "newton_schulz_func is not supported: leave it out, and name the coefficients with "
            "Muon(..., ns_coefficients=...)"
        )
    refuse_text("use_polar_express", use_polar_express, True)
    coefficients = COEFFICIENTS[bool(use_polar_express)]
    ranks = {}
    # DTensors carry their mesh: the argument is for copies on the ranks of DDP
    if mesh is not None and _has_plain(groups):
        ranks["process_group"] = mesh
    return {"momentum_form": "sum", "ns_coefficients": coefficients, **ranks}


def _has_plain(groups: list[dict]) -> bool:
    """Whether a parameter is no DTensor."""
    # Imported only for programs with a mesh: importing is slow
    from torch.distributed.tensor import DTensor

    return any(not isinstance(param, DTensor) for group in groups for _, param in _pairs(group))


def _groups(params: Iterable, defaults: Mapping) -> list[dict]:
    """The groups of this package for the argument `params` of dion. Raises ConfigError for groups
    and parameters side by side, and as `translated`.
    """
    entries = list(params)
    if not any(isinstance(entry, Mapping) for entry in entries):
        # No parameters give no group, which torch's constructor refuses
        entries = [{"params": entries}] if entries else []
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise ConfigError(
                f"params has groups and a {type(entry).__name__}: put parameters beside groups into"
                " a group of their own, {'params': [...]}"
            )
    return [translated(group, defaults) for group in entries]


class _DionGroups(torch.optim.Optimizer):
    """Base class: groups with dion's keys in `add_param_group`, as at construction. Subclasses call
    `_start_with` in their constructor.
    """

    _dion: dict[str, object]  # dion's arguments that a group may replace

    def _start_with(
        self,
        params: Iterable,
        of_all_groups: tuple[object, bool, object],
        *,
        betas: tuple[float, float],
        **of_groups: object,
    ) -> None:
        """Call the constructor of `Muon` or `NorMuon`. `of_all_groups`: distributed_mesh,
        use_polar_express and newton_schulz_func. `betas` and `of_groups`: the arguments that a
        group may replace, by their keys. Raises ConfigError for wrong `betas`, and as `translated`,
        `_muon_arguments` and `Muon`.
        """
        with self._in_dions_terms():
            is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2
            if not (is_pair and all(map(_is_beta, betas))):
                raise ConfigError(
                    f"betas={betas!r} is not allowed: it must be two numbers in [0, 1)"
                )
            self._dion = {**of_groups, "beta1": betas[0], "beta2": betas[1]}
            groups = _groups(params, self._dion)
            more = _muon_arguments(groups, *of_all_groups)
            if "muon_beta2" in of_groups:
                more["beta2"] = of_groups["muon_beta2"]
            arguments = ("lr", "weight_decay", "mu", "nesterov")
            super().__init__(groups, *(of_groups[key] for key in arguments), **more)

    def _in_dions_terms(self) -> contextlib.AbstractContextManager:
        """A context manager that names arguments and keys as dion does in errors raised inside."""
        return in_config_terms(type(self).__name__, CALLED, has_groups=True)

    def add_param_group(self, param_group: dict) -> None:
        """Add a group with the keys of dion. Raises as the constructor does, and leaves the
        optimizer unchanged.
        """
        # The constructor adds groups that are translated already
        if not (self._has_all_groups and isinstance(param_group, Mapping)):
            return super().add_param_group(param_group)
        with self._in_dions_terms():
            super().add_param_group(translated(param_group, self._dion))

    @classmethod
    def _ranks_as_argument(cls, ranks: object) -> dict[str, object]:
        """As in `Muon`."""
        return {"distributed_mesh": ranks}

    def __getstate__(self) -> dict:
        """As in `Muon`."""
        return {**super().__getstate__(), "_dion": self._dion}


class DionMuon(_DionGroups, Muon):
    """`Muon` with the arguments of `dion.Muon`. Groups have dion's keys at construction and in
    `add_param_group`, and this package's keys in `param_groups`.

    Momentum is a sum, as in dion. `use_gram_newton_schulz` and `use_triton` have no effect: the
    package chooses its kernels. `epsilon` is that of AdamW groups. `distributed_mesh` counts for
    parameters that are no DTensors. Raises NotImplementedError for `newton_schulz_func` and a
    tensor as `weight_decay`.
    """

    def __init__(
        self,
        params: Iterable,
        distributed_mesh: object = None,
        lr: float = 0.01,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        cautious_wd: bool = False,
        epsilon: float = 1e-8,
        nesterov: bool = False,
        adjust_lr: str | None = "spectral_norm",
        flatten: bool = False,
        use_gram_newton_schulz: bool = False,
        use_triton: bool = False,
        use_polar_express: bool = True,
        newton_schulz_func: Callable | None = None,
    ) -> None:
        self._start_with(
            params,
            (distributed_mesh, use_polar_express, newton_schulz_func),
            algorithm="muon",
            lr=lr,
            mu=mu,
            betas=betas,
            weight_decay=weight_decay,
            cautious_wd=cautious_wd,
            epsilon=epsilon,
            nesterov=nesterov,
            adjust_lr=adjust_lr,
            flatten=flatten,
        )


class DionNorMuon(_DionGroups, NorMuon):
    """`NorMuon` with the arguments of `dion.NorMuon`, as `DionMuon` has those of `dion.Muon`."""

    def __init__(
        self,
        params: Iterable,
        distributed_mesh: object = None,
        lr: float = 0.01,
        mu: float = 0.95,
        muon_beta2: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        cautious_wd: bool = False,
        epsilon: float = 1e-8,
        nesterov: bool = False,
        adjust_lr: str | None = "spectral_norm",
        flatten: bool = False,
        use_gram_newton_schulz: bool = False,
        use_triton: bool = False,
        use_polar_express: bool = True,
        newton_schulz_func: Callable | None = None,
    ) -> None:
        self._start_with(
            params,
            (distributed_mesh, use_polar_express, newton_schulz_func),
            algorithm="normuon",
            lr=lr,
            mu=mu,
            muon_beta2=muon_beta2,
            betas=betas,
            weight_decay=weight_decay,
            cautious_wd=cautious_wd,
            epsilon=epsilon,
            nesterov=nesterov,
            adjust_lr=adjust_lr,
            flatten=flatten,
        )

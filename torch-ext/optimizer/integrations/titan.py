"""`torchtitan_muon`: the optimizer entry of a torchtitan config (torchtitan 0.3)."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .config import OVERRIDES, ConfigError, in_config_terms, patterns
from .factory import WHERE, MuonFactory

OF_MAPPINGS = ("named_splits", OVERRIDES)  # keys of a config that map patterns to values
KEYS_WITH_PATTERNS = ("adamw", "muon", *OF_MAPPINGS)


def torchtitan_muon(lr: float = 8e-4, **values: object) -> object:
    """The config of an `OptimizersContainer` of torchtitan with `Muon` for each part of a model, in
    place of torchtitan's `default_adamw(lr)`.

    values: keys of `MuonFactory`. Pipeline stages may lack matrices, and parameters that a pattern
    matches: a pattern that matches no parameter of a rank's stages is left out with a warning.
    Raises ImportError without torchtitan 0.3. The container raises ConfigError for torchtitan's
    `param_groups` and `implementation="fused_opt_states_bf16"`.
    """
    return _container().Config(muon={"lr": lr, **values})


def _matching(key: str, given: object, names: Iterable[str]) -> object:
    """`given`, the patterns under `key` of the config, without those that match none of `names`. Of
    `overrides` only the first pattern that matches a name counts.
    """
    if key in OF_MAPPINGS and not isinstance(given, Mapping):
        return given  # `MuonFactory` says what is wrong
    left, found = list(names), []
    for pattern in patterns(key, list(given) if isinstance(given, Mapping) else given):
        rest = [name for name in left if not pattern(name)]
        if len(rest) < len(left):
            found.append(pattern.__name__)
        if key == OVERRIDES:
            left = rest
    return {text: given[text] for text in found} if key in OF_MAPPINGS else found


def _values_of_part(
    values: dict[str, object], names: list[str], matrices: list[str]
) -> dict[str, object]:
    """The values of a config for a part of a model with parameters `names`, of which `matrices`
    are no vectors.
    """
    part = {"allow_no_matrices": True, **values}
    for key in KEYS_WITH_PATTERNS:
        if part.get(key):
            # Patterns of splits pass over vectors, and a pattern of vectors alone is an error
            part[key] = _matching(key, part[key], matrices if key == "named_splits" else names)
    return part


def _check_patterns(values: dict[str, object]) -> None:
    """Raise ConfigError for a value of the config that should be a pattern and is none."""
    with in_config_terms(WHERE):
        for key in KEYS_WITH_PATTERNS:
            given = values.get(key)
            if key not in OF_MAPPINGS:
                patterns(key, given)
            elif isinstance(given, Mapping):
                patterns(key, list(given))


def _warn_unmatched(values: dict[str, object], names: list[str], matrices: list[str]) -> None:
    """Warn of each pattern that matches none of `names`, the parameters of all parts; of splits,
    none of `matrices`.
    """
    for key in KEYS_WITH_PATTERNS:
        given = values.get(key) or ()
        if key in OF_MAPPINGS and not isinstance(given, Mapping):
            continue
        texts = {given} if isinstance(given, str) else set(given)
        of_key = matrices if key == "named_splits" else names
        for text in sorted(texts - set(_matching(key, given, of_key))):
            warnings.warn(
                f"{key}: {text!r} matches no trainable parameter of this rank's parts: right for "
                "pipeline stages on other ranks, else correct the pattern",
                stacklevel=3,
            )


@functools.cache
def _container() -> type:
    """The class of the container, a subclass of torchtitan's."""
    from torchtitan.components.checkpointer.utils import canonical_fqn
    from torchtitan.components.optimizer import OptimizersContainer

    class MuonOptimizersContainer(OptimizersContainer):
        """A container of one optimizer for each part of a model. The class does not use
        torchtitan's table of optimizers, to which no entry can be added. Raises ConfigError for
        unsupported options and wrong patterns.
        """

        @dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config):
            """torchtitan's config, and the keys of `MuonFactory` under `muon`."""

            muon: dict[str, Any] = field(default_factory=dict)

        def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
            if config.param_groups or config.implementation == "fused_opt_states_bf16":
                raise ConfigError(
                    "optimizer: param_groups and implementation='fused_opt_states_bf16' are not "
                    "supported with Muon: use overrides={pattern: {...}} and state_dtype='bf16'"
                )
            self.model_parts, self.optimizers = model_parts, []
            trained = [
                {canonical_fqn(n): p.ndim for n, p in part.named_parameters() if p.requires_grad}
                for part in model_parts
            ]
            names = [list(dims) for dims in trained]
            matrices = [[name for name in dims if dims[name] > 1] for dims in trained]
            _check_patterns(config.muon)
            _warn_unmatched(config.muon, sum(names, []), sum(matrices, []))
            for number, (part, *of_part) in enumerate(zip(model_parts, names, matrices)):
                optimizer = MuonFactory()(part, **_values_of_part(config.muon, *of_part))
                self.optimizers.append(optimizer)
                labels = [group["name"] for group in optimizer.param_groups]
                self._log_optimizer(optimizer, number, labels)
            groups = [group for opt in self.optimizers for group in opt.param_groups]
            params = [param for group in groups for param in group["params"]]
            self._validate_params(params)
            self._post_init(params)

    return MuonOptimizersContainer

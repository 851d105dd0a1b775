"""`MuonFactory`: an optimizer from a model and plain values, as transformers' Trainer asks for it.

Trainer(optimizer_cls_and_kwargs=(MuonFactory, {...})) builds the factory without arguments and
calls it with the model, sharded or not, and the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from ..muon import Muon, NorMuon
from ..params.param_groups import get_default_muon_param_groups
from . import config
from .config import OVERRIDES, ConfigError, NamePattern, in_config_terms, refuse_unknown

WHERE = "MuonFactory"
# Types of values whose defaults are None
NUMBERS = {"adamw_lr": 1e-3, "workspace_bytes": 1}


class Overridden(NamedTuple):
    """A group, and the entry of `overrides` that made it."""

    where: str  # the entry's key in the config; empty for a group of the config's own values
    keys: Mapping  # the entry's values as the config has them
    group: dict


class MuonFactory:
    """A callable that builds `Muon` with the groups of `get_default_muon_param_groups` from the
    values of a YAML or JSON config.

    Keys are the arguments of `Muon` and of `get_default_muon_param_groups`, the options of the
    rule, and `overrides`. Differences: `betas` and `eps` are AdamW's, `ns_eps` is `eps` of Muon,
    and `adjust_lr` is another name of `adjust_lr_fn`. `adamw` and `muon` are globs of whole names,
    or regular expressions after "re:". dtypes are names such as "bf16". process_group="world" is
    the default group of torch.distributed, found when the factory is called. `qk_clip` is a mapping
    of the arguments of `QKClip.of`. report=True prints the groups. `overrides`: {pattern: {key:
    value}}, keys of groups for the parameters whose names match; the first pattern that matches
    counts.

    `fused`, `foreach` and `device_mesh` are ignored; `amsgrad`, `differentiable` and `maximize` may
    be False. Any further key raises ValueError.
    """

    def __call__(self, model: nn.Module, training_args: object = None, /, **given: object) -> Muon:
        """The optimizer of the trainable parameters of `model`.

        training_args: ignored; axolotl passes them. Raises ConfigError (a ValueError), TypeError or
        NotImplementedError, naming the key of the config.
        """
        given = {key: value for key, value in given.items() if key not in config.IGNORED}
        for key in config.ONLY_FALSE:
            if value := given.pop(key, False):
                raise ConfigError(f"{WHERE}: {key}={value!r} is not supported: leave it out")
        spelling = config.spelling_of(given)
        with in_config_terms(WHERE, spelling):
            options = config.rule_options(given.get("rule"))
            refuse_unknown(given, _allowed(options), "config")
            for key, value in given.items():
                config.refuse_text(key, value, _default(key, options))
        if given.get("adamw_lr") is not None:
            with in_config_terms(WHERE, {"lr": "adamw_lr"}), config.of_no_group():
                Muon([config.trial_matrix()], lr=given["adamw_lr"])
        with in_config_terms(WHERE, spelling):
            arguments, grouping, of_muon = _sorted(given, options)
            # A key of every Muon group, which the argument of `Muon` does not replace
            if "adjust_lr_fn" in arguments:
                of_muon["adjust_lr_fn"] = arguments["adjust_lr_fn"]
            groups = _groups(model, grouping, given.get(OVERRIDES) or {})
            for group in groups:
                if group["use_muon"]:
                    group.update(of_muon)
            arguments = _resolved(arguments, model)
            overridden = _override(groups, given.get(OVERRIDES) or {}, given.get("rule"))
        return _build(overridden, arguments, spelling)


def _allowed(options: Mapping) -> set[str]:
    """All keys of a config, for a rule with `options`."""
    muon = {*config.MUON_ARGUMENTS, *config.CALLED, *config.ALSO_CALLED}
    return muon | set(config.GROUP_ARGUMENTS) | set(options) | {OVERRIDES}


def _default(key: str, options: Mapping) -> object:
    """The default of a key of the config."""
    known = {**config.GROUP_ARGUMENTS, **config.MUON_ARGUMENTS, **options, **NUMBERS}
    return known.get(config.argument_of(key))


def _sorted(given: Mapping, options: Mapping) -> tuple[dict, dict, dict]:
    """The values of a config by their use: arguments of `Muon`, arguments of
    `get_default_muon_param_groups`, options of the rule. Raises ConfigError for two names of a key.
    """
    arguments, grouping, options_of_rule, spelt = {}, {}, {}, {}
    for key, value in given.items():
        if key in config.GROUP_ARGUMENTS:
            grouping[key] = value
        elif key in options:
            options_of_rule[key] = value
        elif key != OVERRIDES:
            name = config.argument_of(key)
            if name in arguments:
                raise ConfigError(f"{spelt[name]} and {key} mean one value: give one of them")
            arguments[name], spelt[name] = value, key
    return arguments, grouping, options_of_rule


def _groups(model: nn.Module, grouping: Mapping, overrides: object) -> list[dict]:
    """The groups of a model, for arguments of `get_default_muon_param_groups` in a config. Raises
    ConfigError for wrong values, and as that function, except that `split` refuses no weight that
    gets a split by `overrides`.
    """
    grouping = dict(grouping)
    for key in ("adamw", "muon"):
        if key in grouping:
            grouping[key] = config.patterns(key, grouping[key])
    if isinstance(grouping.get("named_splits"), Mapping):
        named = grouping["named_splits"].items()
        grouping["named_splits"] = {NamePattern(key, "named_splits"): form for key, form in named}
    split, report = grouping.get("split"), grouping.get("report")
    if isinstance(split, Mapping):
        raise ConfigError(
            f"split: {split!r} is not allowed: it must be None, 'auto' or 'heads'. Such a split is "
            f"a key of parameters: {OVERRIDES}: {{pattern: {{split: ...}}}}"
        )
    if report is not None and not isinstance(report, bool) and not callable(report):
        raise ConfigError(f"report: {report!r} is not allowed: it must be true or false")
    if isinstance(report, bool):
        # Rank 0 alone prints the table
        is_first = not (dist.is_available() and dist.is_initialized() and dist.get_rank())
        grouping["report"] = print if report and is_first else None
    return _default_groups(model, grouping, overrides)


def _default_groups(model: nn.Module, grouping: Mapping, overrides: object) -> list[dict]:
    """`get_default_muon_param_groups(model, **grouping)`, in which weights that get a split by
    `overrides` stay one matrix where it would refuse them. Raises as that function, in terms of
    configs.
    """
    try:
        return get_default_muon_param_groups(model, **grouping)
    except (TypeError, ValueError) as error:
        refused = getattr(error, "parameters", ())  # of `UnknownSplits`, no public name
        settled = frozenset(name for name in refused if _has_own_split(overrides, name))
        if not settled:
            raise type(error)(_as_of_config(str(error))) from error
    # One matrix, until `_override` gives them their split
    named = {**(grouping.get("named_splits") or {}), (lambda name, *_: name in settled): None}
    return _default_groups(model, {**grouping, "named_splits": named}, {})


def _has_own_split(overrides: object, name: str) -> bool:
    """Whether the first pattern of `overrides` that matches a name has the key `split`."""
    entries = overrides.items() if isinstance(overrides, Mapping) else ()  # refused by `_override`
    matches = (keys for text, keys in entries if NamePattern(text, OVERRIDES)(name))
    keys = next(matches, {})
    return isinstance(keys, Mapping) and "split" in keys


def _as_of_config(message: str) -> str:
    """A message of `get_default_muon_param_groups` with the patterns and keys of configs."""
    message = message.replace("named_splits={'", "named_splits={'re:").replace(
        'such as {"qkv"', 'such as {"re:qkv"'
    )
    message = message.replace(
        "set the key `split` of a group yourself", f"set split in {OVERRIDES}: {{pattern: ...}}"
    )
    if "matches no trainable parameter" in message:
        message += ". A pattern of a config is a glob of the whole name, or 're:' and a regex"
    return message


def _resolved(arguments: Mapping, model: nn.Module) -> dict[str, object]:
    """Arguments of `Muon`, with names of dtypes and process groups replaced by the objects."""
    resolved = dict(arguments)
    for key, value in arguments.items():
        if key.endswith("_dtype"):
            resolved[key] = config.dtype_of(key, value)
        elif key in ("betas", "adamw_betas") and isinstance(value, list):
            resolved[key] = tuple(value)
    if "process_group" in arguments:
        resolved["process_group"] = config.process_group_of(arguments["process_group"])
        if isinstance(arguments["process_group"], str) and resolved["process_group"] is None:
            # A single process has no copies of parameters. With None in place of "world" one config
            # serves any number of processes.
            for key in ("shard_state", "grads_are_reduced"):
                resolved.pop(key, None)
    if "qk_clip" in arguments:
        resolved["qk_clip"] = config.clip_of(arguments["qk_clip"], model)
    return resolved


def _override(groups: list[dict], overrides: object, rule: object) -> list[Overridden]:
    """The groups, with the parameters that a pattern matches in groups of their own. `rule`: of the
    config. Raises ConfigError for values of wrong types, and for a pattern without a match.
    """
    if not isinstance(overrides, Mapping):
        raise ConfigError(
            f"{OVERRIDES}: {overrides!r} is not allowed: it must map patterns to keys of groups"
        )
    found = []
    for text, keys in overrides.items():
        where = f"{OVERRIDES}[{text!r}]"
        if not isinstance(keys, Mapping):
            raise ConfigError(f"{where}: {keys!r} is not allowed: it must map keys to values")
        pattern, count = NamePattern(text, OVERRIDES), len(found)
        groups = [
            rest for group in groups for rest in _split(group, pattern, keys, where, rule, found)
        ]
        if len(found) == count:
            raise ConfigError(
                f"{where} matches no trainable parameter, or only parameters that patterns before "
                "it match: correct the pattern, or move it to the front"
            )
    return [Overridden("", {}, group) for group in groups] + found


def _split(
    group: dict,
    pattern: NamePattern,
    keys: Mapping,
    where: str,
    rule: object,
    found: list[Overridden],
) -> list[dict]:
    """Move the parameters that `pattern` matches from `group` to a new group, which gets `keys` and
    is appended to `found`. Returns [the remaining group], or [] if nothing remains.
    """
    matched, rest = [], []
    for pair in zip(group["param_names"], group["params"]):
        (matched if pattern(pair[0]) else rest).append(pair)
    if matched:
        values = _group_values(group, keys, where, rule, matched[0][0])
        # Options of the config's rule are no keys of another rule
        dropped = config.rule_options(rule) if group["use_muon"] and "rule" in keys else ()
        kept = {key: v for key, v in _members(group, matched).items() if key not in dropped}
        found.append(Overridden(where, keys, {**kept, **values}))
    return [_members(group, rest)] if rest else []


def _members(group: dict, pairs: list[tuple]) -> dict:
    """A copy of `group` with the parameters of `pairs`, (name, parameter)."""
    names, params = zip(*pairs)
    return {**group, "params": list(params), "param_names": list(names)}


def _group_values(
    group: dict, keys: Mapping, where: str, rule: object, name: str
) -> dict[str, object]:
    """The values of a pattern as keys of a group. `rule`: of the config, for matrices. `name`: the
    first parameter, for messages.

    Raises ConfigError for keys that the group does not have.
    """
    with in_config_terms(where):
        if group["use_muon"]:
            defaults, kind = config.group_keys(keys.get("rule", rule)), "Muon"
            allowed = {*defaults, *config.OPTIONAL_KEYS, *config.ALSO_CALLED, "ns_eps"} - {"eps"}
        else:
            defaults, kind = config.elementwise_keys(keys.get("rule")), "AdamW"
            allowed = {*defaults, "decay", "rule", "state_dtype"}
    refuse_unknown(keys, allowed, f"{where}, for {kind} ({name})")
    values = {}
    for key, value in keys.items():
        name = {"ns_eps": "eps", **config.ALSO_CALLED}.get(key, key)
        if name in values:
            raise ConfigError(f"{where}: two keys mean {name}, one of them {key}: give one of them")
        if name == "state_dtype":
            value = config.dtype_of(f"{where}: {key}", value)
        config.refuse_text(f"{where}: {key}", value, defaults.get(name))
        values[name] = tuple(value) if key == "betas" and isinstance(value, list) else value
    return values


def _optimizer(groups: list[dict], arguments: Mapping) -> Muon:
    """`Muon`, or for its rule `NorMuon`, of groups."""
    arguments = dict(arguments)
    if arguments.get("rule") == "normuon":
        del arguments["rule"]
        return NorMuon(groups, **arguments)
    return Muon(groups, **arguments)


def _build(overridden: list[Overridden], arguments: Mapping, spelling: Mapping[str, str]) -> Muon:
    """The optimizer of groups; errors name keys of the config. `spelling`: of `spelling_of`."""
    try:
        return _optimizer([entry.group for entry in overridden], arguments)
    except (ValueError, TypeError, NotImplementedError):
        with in_config_terms(WHERE, spelling), config.of_no_group():
            # The arguments alone may be at fault: then a trial with any parameter fails too. The
            # trial has no clip, which needs the model.
            of_any = {key: value for key, value in arguments.items() if key != "qk_clip"}
            matrix = config.trial_matrix(arguments.get("rounding"))
            _optimizer([{"params": [matrix]}], of_any)
        for where, keys, group in filter(lambda entry: entry.where, overridden):
            # Otherwise an entry of `overrides` may be at fault: then a trial of its group fails too
            own = config.spelling_of(keys, group["use_muon"])
            with in_config_terms(f"{WHERE}: {where}", own):
                _optimizer([group], arguments)
        with in_config_terms(WHERE, spelling):
            raise

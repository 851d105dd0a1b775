"""Values of a user's YAML or JSON config: keys, patterns of names, dtypes, and errors in the words
of the config.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import inspect
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from ..muon import Muon
from ..params.param_groups import get_default_muon_param_groups
from ..qk_clip.clip import QKClip
from ..rules.rule import Rule

# Keys that frameworks give to every optimizer, without a meaning here: torch's implementations,
# and the mesh, which DTensors carry themselves
IGNORED = ("fused", "foreach", "device_mesh")
ONLY_FALSE = ("amsgrad", "differentiable", "maximize")  # options that no step of Muon has
# `eps` and `betas` are those of Adam in every framework
CALLED = {"betas": "adamw_betas", "eps": "adamw_eps", "ns_eps": "eps"}
# dion's name of an argument: NeMo Automodel takes a key that ends with _fn for a path to import
ALSO_CALLED = {"adjust_lr": "adjust_lr_fn"}
OTHER_NAMES = {"learning_rate": "lr", "adamw_learning_rate": "adamw_lr"}  # too unlike to be guessed
OVERRIDES = "overrides"
DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "int8": torch.int8,
}
# Keys of an override that a Muon group has only if they are given
OPTIONAL_KEYS = (
    "decay",
    "momentum_form",
    "rounding",
    "rounding_seed",
    "master_weights",
    "rule",
    "split",
    "transposed",
)
# Keys that all groups have, but that groups with use_muon=False do not read
OF_MATRICES = ("ns_coefficients", "ns_steps", "adjust_lr_fn")
IN_GROUP = re.compile(r"in group \d+ \((.*?)\): ")  # begins messages of `Muon`
REGEX = "re:"  # prefix of a pattern that is a regular expression


def arguments_of(function: Callable) -> dict[str, object]:
    """{name: default} of the arguments of `function` besides the first."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {p.name: p.default for p in parameters if p.kind not in kinds and p.name != "params"}


class ConfigError(ValueError):
    """An error that names keys as the config does."""


def trial_matrix(rounding: object = None) -> nn.Parameter:
    """A parameter (2, 2) for trying arguments of `Muon`, of a dtype that every option allows.
    `rounding`: among the arguments. "stochastic" is for bf16 alone.
    """
    is_stochastic = isinstance(rounding, str) and rounding == "stochastic"
    dtype = torch.bfloat16 if is_stochastic else torch.float32
    return nn.Parameter(torch.zeros(2, 2, dtype=dtype, device="cpu"))


MUON_ARGUMENTS = arguments_of(Muon.__init__)
GROUP_ARGUMENTS = arguments_of(get_default_muon_param_groups)


def group_keys(rule: str | type[Rule] | None = None) -> dict[str, object]:
    """{key: default} of a Muon group, with the options of `rule`. Raises as Muon does for an
    unknown rule.
    """
    return _keys_of({} if rule is None else {"rule": rule})


def elementwise_keys(rule: str | None = None) -> dict[str, object]:
    """{key: default} of a group with use_muon=False that its `rule` reads, AdamW for None. Raises
    as Muon does for an unknown rule.
    """
    found = _keys_of({"use_muon": False, **({} if rule is None else {"rule": rule})})
    unread = set(OF_MATRICES)
    if "betas" in found:
        unread |= {"momentum", "nesterov"}  # momentum is beta1
    if rule not in (None, "adamw"):
        unread.add("eps")
    if rule == "sign":
        unread.add("nesterov")
    return {key: value for key, value in found.items() if key not in unread}


def _keys_of(group: Mapping) -> dict[str, object]:
    """{key: default} of the keys that an optimizer adds to a group. Raises ConfigError for an
    unknown `rule`, without the number of a group that the config does not have.
    """
    try:
        with of_no_group():
            (made,) = Muon([{"params": [trial_matrix()], **group}]).param_groups
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    inner = ("params", "param_names", "use_muon", "rule")
    return {key: value for key, value in made.items() if key not in inner}


@contextlib.contextmanager
def of_no_group() -> Iterator[None]:
    """A context manager for building an optimizer of one unnamed parameter. Raises errors from
    inside again, without the number of the group, which the config does not have.
    """
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        raise type(error)(str(error).removeprefix("in group 0 (#0): ")) from error


def argument_of(key: str) -> str:
    """The argument of `Muon` that a key of the config means."""
    return {**CALLED, **ALSO_CALLED}.get(key, key)


def spelling_of(given: Mapping, is_muon: bool = True) -> dict[str, str]:
    """{argument of `Muon`: key of the config} of the arguments with another name in the config.
    `given`: the config; a spelling found there comes first. `is_muon`: `eps` of `Muon` is meant,
    not that of AdamW.
    """
    usual = {CALLED[key]: key for key in CALLED if is_muon or key != "ns_eps"}
    own = {argument_of(key): key for key in given if argument_of(key) in {*usual, "adjust_lr_fn"}}
    return {**usual, **own}


def rule_options(rule: str | type[Rule] | None) -> dict[str, object]:
    """{name: default} of the options of a rule; {} for None."""
    plain = group_keys()
    return {key: value for key, value in group_keys(rule).items() if key not in plain}


def near(key: str, allowed: Collection[str]) -> str:
    """ "did you mean ...?" with the names of `allowed` that resemble `key`, or all names."""
    known = OTHER_NAMES.get(key.lower(), key.lower())
    found = [known] if known in allowed else difflib.get_close_matches(key, allowed, 3, 0.6)
    if found:
        return f"did you mean {' or '.join(map(repr, found))}?"
    return f"allowed: {', '.join(sorted(allowed))}"


def refuse_unknown(given: Mapping, allowed: Collection[str], where: str) -> None:
    """Raise ConfigError for the first key of `given` that is not in `allowed`."""
    for key in given:
        if key not in allowed:
            raise ConfigError(f"{where}: there is no key {key!r}; {near(str(key), allowed)}")


def refuse_text(key: str, value: object, default: object) -> None:
    """Raise ConfigError for a text in place of a number, which YAML makes of 1e-3, or of a truth
    value; and for a truth value in place of a number, which YAML makes of on.
    """
    if isinstance(value, bool) and type(default) in (int, float):
        raise ConfigError(
            f"{key}: {value} is a truth value, but {type(default).__name__} is needed (YAML reads "
            "yes, no, on and off as truth values)"
        )
    if isinstance(value, str) and isinstance(default, (int, float)):
        how = (
            "write true or false, without quotation marks"
            if isinstance(default, bool)
            else "YAML reads 1e-3 as a text, and 1.0e-3 as a number"
        )
        raise ConfigError(
            f"{key}: {value!r} is a text, but {type(default).__name__} is needed ({how})"
        )


class NamePattern:
    """A pattern of parameter names: a glob of the whole name (`*` also matches dots), or after
    "re:" a regular expression that is searched in the name. A function for
    `get_default_muon_param_groups`, whose messages show `__name__`.
    """

    def __init__(self, text: object, where: str) -> None:
        """`where`: the key of the config. Raises ConfigError for a value that is no pattern."""
        if not isinstance(text, str) or not text:
            raise ConfigError(
                f"{where}: {text!r} is not allowed: a pattern is a glob such as '*.q_proj.weight', "
                "or 're:' and a regular expression"
            )
        self.__name__ = text
        is_regex = text.startswith(REGEX)
        try:
            regex = re.compile(text[len(REGEX) :] if is_regex else fnmatch.translate(text))
        except re.error as error:
            raise ConfigError(f"{where}: {text!r} is no regular expression ({error})") from error
        self._find = regex.search if is_regex else regex.match

    def __call__(self, name: str, module: object = None, param: object = None) -> bool:
        """Whether the pattern matches a name."""
        return self._find(name) is not None


def patterns(key: str, given: object) -> list[NamePattern]:
    """The patterns under `key` of the config. `given`: None, a text or a list of texts. Raises
    ConfigError for other values.
    """
    if given is None:
        return []
    if not isinstance(given, (str, list, tuple)):
        raise ConfigError(
            f"{key}: {given!r} is not allowed: it must be a pattern or a list of patterns"
        )
    return [NamePattern(text, key) for text in ([given] if isinstance(given, str) else given)]


def dtype_of(key: str, given: object) -> object:
    """The torch.dtype that a text names; any value but a text is returned unchanged. Raises
    ConfigError for an unknown name.
    """
    if not isinstance(given, str):
        return given
    name = given.removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"{key}: there is no dtype {given!r}; {near(name, DTYPES)}")
    return DTYPES[name]


def process_group_of(given: object) -> object:
    """The process group of the value of `process_group`: "world" is the default group, and None
    in a program of one process. Raises ConfigError for numbers, lists, mappings and other texts.
    Warns where a launcher started several processes that do not know each other yet.
    """
    is_text = isinstance(given, str)
    if isinstance(given, (bool, int, float, list, Mapping)) or (is_text and given != "world"):
        raise ConfigError(
            f"process_group: {given!r} is not allowed: it must be 'world', None or a process group"
        )
    if not is_text:
        return given
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD if dist.get_world_size() > 1 else None
    world = os.environ.get("WORLD_SIZE", "")
    if world.isdecimal() and int(world) > 1:
        warnings.warn(
            "process_group: 'world' means None, because torch.distributed is not initialized yet, "
            f"though WORLD_SIZE is {world}: each process steps all matrices, "
            "and shard_state and grads_are_reduced have no effect. Build the optimizer after "
            "torch.distributed.init_process_group",
            stacklevel=4,  # the caller of MuonFactory
        )
    return None


def clip_of(given: object, model: nn.Module) -> object:
    """The QKClip of a mapping of the arguments of `QKClip.of`; a QKClip and None are returned
    unchanged. Raises ConfigError for other values and unknown arguments, and as `QKClip.of`.
    """
    if given is None or isinstance(given, QKClip):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"qk_clip: {given!r} is not allowed: it must map arguments of QKClip.of to values, "
            "such as {threshold: 100.0}"
        )
    allowed = {**arguments_of(QKClip.of), **arguments_of(QKClip.__init__)}
    allowed.pop("layers")
    refuse_unknown(given, allowed, "qk_clip")
    for key, value in given.items():
        refuse_text(f"qk_clip: {key}", value, allowed[key])
    patterns("qk_clip: exclude", given.get("exclude"))
    return QKClip.of(model, **given)


@contextlib.contextmanager
def in_config_terms(
    where: str, called: Mapping[str, str] | None = None, has_groups: bool = False
) -> Iterator[None]:
    """A context manager that raises errors from inside again: prefixed with `where`, with arguments
    named as in the config, and a ValueError as ConfigError.

    `called`: {argument: key of the config}; None: the result of `spelling_of`. `has_groups`: the
    config has groups, so messages keep the number of a group.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except (ValueError, TypeError, NotImplementedError) as error:
        called = spelling_of({}) if called is None else called
        words = re.compile(rf"\b({'|'.join(called)})\b(?!\.)")
        text = words.sub(lambda found: called[found.group()], str(error))
        if not has_groups:
            text = _without_group(text)
        # An outer context does not translate the message of a ConfigError a second time
        kind = ConfigError if isinstance(error, ValueError) else type(error)
        raise kind(f"{where}: {text}") from error


def _without_group(message: str) -> str:
    """A message of `Muon` without the number of a group, but with the names of its parameters."""
    found = IN_GROUP.match(message)
    if found is None:
        return message
    rest = message[found.end() :]
    return rest if rest.startswith("parameter ") else f"parameters {found[1]}: {rest}"

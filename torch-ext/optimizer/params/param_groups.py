"""`get_default_muon_param_groups`: split the parameters of a model into Muon and AdamW groups.

model/classification.py decides about each parameter. The functions below apply the user's patterns,
find splits of fused weights, and build the groups. Every trainable parameter lands in exactly one
group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from .errors import first_few, shortened
from .model.classification import MUON, NO_DECAY, OTHER, PARTS, Kind, classify
from .model.fused_weights import Found, describe, find_split, matrix_count, split_of_attributes
from .model.names import clean_names, clean_path, wrapper_depth
from .model.structure import Place, Structure
from .units import demanded_split, parse, remedy
from .validation import check_module

Match = Callable[[str, nn.Module, nn.Parameter], bool]  # (name, holding module, parameter)
PatternLike = str | re.Pattern | Match
Patterns = PatternLike | Collection[PatternLike] | None  # the arguments `adamw` and `muon`
SPLITS = (None, "auto", "heads")  # values of the argument `split`


@dataclass(frozen=True)
class Row:
    """A line of `table`: a parameter, the group that it goes to, and how it is cut."""

    name: str  # without wrappers' prefixes
    shape: tuple[int, ...]
    part: str  # name of the group, one of PARTS
    why: str  # reason in words, or the user's pattern
    found: Found = Found()  # noqa: RUF009, immutable: how the parameter is split
    matrices: int = 0  # number of matrices of a parameter with a split
    is_keyed: bool = True  # whether the split is a key of the group, not only an attribute

    @property
    def use_muon(self) -> bool:
        """Whether Muon takes the parameter."""
        return self.part == MUON

    @property
    def keys(self) -> Found:
        """The keys `split` and `transposed` of the group."""
        return self.found if self.is_keyed else Found()


class UnknownSplits(ValueError):
    """The error for weights that look fused, and whose parts are unknown. `parameters`: their
    names.
    """

    def __init__(self, message: str, parameters: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.parameters = parameters


def get_default_muon_param_groups(
    model: nn.Module,
    *,
    adamw: Patterns = (),
    muon: Patterns = (),
    adamw_lr: float | torch.Tensor | None = None,
    allow_no_matrices: bool = False,
    split: str | None = None,
    named_splits: Mapping[PatternLike, object] | None = None,
    report: Callable[[str], object] | None = None,
) -> list[dict]:
    """Split the trainable parameters of `model` into groups for `Muon`: hidden matrices to Muon,
    the rest to AdamW.

    Muon gets 2-D weights (R, C) and 3-D stacks of expert weights (E, R, C). AdamW gets, in this
    order, the groups "embeddings", "heads" (output layers), "other" (convolutions, routers and
    gates of few rows, packed tensors of adapters, ...) and "no_decay" (norms, biases and further
    vectors, with weight_decay=0; also embeddings and heads that the model marks by the attribute
    `_no_weight_decay` or a method `no_weight_decay`). The key "name" of a group holds the group's
    name. The Muon group comes first; groups without parameters are left out. Tied weights count
    once, frozen weights not at all. Parameter names are without the prefixes of wrappers. The Muon
    group sets adjust_lr_fn="match_rms_adamw" (arXiv 2502.16982): Muon and AdamW can share a
    learning rate.

    adamw, muon: parameters to move to AdamW, or to Muon: a regular expression searched in the name,
    a function of (name, module, parameter), or a list of regular expressions and functions.
    adamw_lr: the lr of all AdamW groups; None: the optimizer's lr. allow_no_matrices: True for a
    model without any matrix for Muon, such as a pipeline's first stage. split: "auto" finds fused
    weights (q, k and v; gate and up; parts of latent attention and of Mamba layers) and weights
    stored as (in, out). Each projection is then a matrix of its own; heads are not cut apart. The
    parameters for Muon come in one group for each `split` and `transposed`, with the keys that say
    them; see units.py [Note: forms of split]. "heads": also each head of q, k and v is a matrix
    (rows), and in output projections the columns of each head. None: each weight is one matrix.
    named_splits: {pattern: form of a split} for matrices by name, which `split` then leaves alone.
    A form may also have the key "transposed", or be {"split": form, "transposed": True}; None is
    one matrix. Names outlast sharding, unlike the attribute `muon_split`, which fully_shard drops.
    report: a function called with the groups as a printable table, for example `print`.

    Raises ValueError if nothing goes to Muon, if a pattern matches no trainable parameter, if a
    parameter matches patterns of both kinds or cannot be stepped by Muon, if a parameter that goes
    to AdamW has an attribute `muon_split` or `muon_transposed` or a named split, if a named split
    is not possible or contradicts another one, if a parameter is lazy and has no shape yet, or if
    `split` finds a weight that looks fused, but cannot tell how.
    """
    check_module(model)
    if report is not None and not callable(report):
        raise ValueError(
            f"report={shortened(repr(report))} is not allowed: it must be a function that gets the "
            "groups as text, such as print"
        )
    if split not in SPLITS:
        raise ValueError(
            f'split={split!r} is not allowed: it must be None, "auto" or "heads"; splits of '
            "parameters by name are named_splits"
        )
    named = _named_patterns(named_splits)
    patterns = {"adamw": _patterns("adamw", adamw), "muon": _patterns("muon", muon)}
    places, structure = locate_params(model)
    classified = list(_classified(model, places, structure, patterns))
    named_of = {param: _named_split(row, param, places[param], named) for row, param in classified}
    rows = [row for row, _ in classified]
    # Most likely a misspelt name: silently keeping the default would surprise later
    for pattern in [*patterns["adamw"], *patterns["muon"], *(pattern for pattern, _ in named)]:
        if pattern.found:
            continue
        if pattern.found_vectors:
            raise ValueError(
                f"{pattern} matches biases, norms or other vectors only, which are not split: "
                "correct the pattern, or leave it out"
            )
        raise ValueError(
            f"{pattern} matches no trainable parameter of the model, whose names are "
            f"{first_few(row.name for row in rows)}: correct the pattern, or leave it out"
        )
    classified = _find_splits(classified, places, structure, split, named_of)
    rows = [row for row, _ in classified]
    # Before the next errors: the table shows why parameters do not go to Muon
    if report is not None:
        report(table(rows))
    _refuse_ignored_splits(classified, [pattern for pattern, _ in named])
    if not any(row.use_muon for row in rows) and not (allow_no_matrices and rows):
        raise ValueError(
            "no parameter of the model goes to Muon: it has no trainable 2-D weight or 3-D stack "
            "besides embeddings, heads and convolutions. If this is intended, as for a pipeline's "
            "first stage or adapters of vectors, pass allow_no_matrices=True; otherwise select "
            "matrices with muon=..., or build groups with use_muon=True yourself\n" + table(rows)
        )
    # Groups in the order of PARTS; of the groups for Muon, the group without a split comes first
    groups: dict[tuple[str, str], list] = {(part, repr(Found())): [] for part in PARTS}
    for row, param in classified:
        groups.setdefault((row.part, repr(row.keys)), []).append((row, param))
    ordered = sorted(groups.items(), key=lambda item: PARTS.index(item[0][0]))
    return [_group(members, adamw_lr) for _, members in ordered if members]


def _refuse_ignored_splits(
    classified: list[tuple[Row, nn.Parameter]], named: list[Pattern]
) -> None:
    """Raise ValueError, naming the first parameter, if a parameter with an attribute `muon_split`
    or `muon_transposed`, or with a split by one of `named`, goes to AdamW, which cuts nothing.
    """
    for pattern in [pattern for pattern in named if pattern.ignored]:
        row = pattern.ignored
        raise ValueError(
            f"parameter {row.name} of shape {row.shape} matches {pattern}, but goes to AdamW "
            f"({row.why}), which steps elements, and cuts nothing. Narrow the pattern, or pass the "
            "parameter's name as muon= as well"
        )
    for row, param in classified:
        if not row.use_muon and (demanded := demanded_split(param)):
            raise ValueError(
                f"parameter {row.name} of shape {row.shape} has the attribute {demanded}, but goes "
                f"to AdamW ({row.why}), which steps elements, and cuts nothing. {remedy(param)}"
            )


def _find_splits(
    classified: list[tuple[Row, nn.Parameter]],
    places: dict[nn.Parameter, list[Place]],
    structure: Structure,
    split: str | None,
    named: dict[nn.Parameter, Found | None],
) -> list[tuple[Row, nn.Parameter]]:
    """Return the pairs `classified` with splits of the parameters for Muon: by `named`, else as
    the argument `split` finds them. Raises ValueError for the first parameter whose split cannot be
    told, with the names of all.
    """
    result, refused = [], {}
    for row, param in classified:
        found = named[param]
        try:
            if row.use_muon and found is None and split is not None:
                found = find_split(param, places[param], structure, split == "heads")
        except ValueError as error:
            refused[row.name] = error
            continue
        if row.use_muon and found is None:
            # The optimizer reads attributes itself, so the group stays unchanged
            found, row = split_of_attributes(param), replace(row, is_keyed=False)
        elif row.use_muon:
            _refuse_two_splits(row, param, found)
        if row.use_muon and found not in (None, Found()):
            row = _with_split(row, found, param)
        result.append((row, param))
    if refused:
        first = next(iter(refused.values()))
        others = f" (parameters like it: {first_few(refused)})" if len(refused) > 1 else ""
        raise UnknownSplits(f"{first}{others}", tuple(refused))
    return result


def _refuse_two_splits(row: Row, param: nn.Parameter, found: Found) -> None:
    """Raise ValueError, naming the parameter, if its attributes demand another split than `found`,
    the split by its name.
    """
    own = split_of_attributes(param)
    if own is None or own == found:
        return
    if _with_split(row, own, param).found and parse(*own) != parse(*found):
        raise ValueError(
            f"parameter {row.name} of shape {row.shape} has two splits: {describe(own) or None} by "
            f"its attributes, and {describe(found) or None} by named_splits. Remove one of the two"
        )


def _with_split(row: Row, found: Found, param: nn.Parameter) -> Row:
    """`row` with a split. Raises ValueError or TypeError, naming the parameter, if the split is not
    possible for its shape.
    """
    try:
        count = matrix_count(found, param)
    except (TypeError, ValueError) as error:
        raise type(error)(f"parameter {row.name} of shape {row.shape}: {error}") from None
    return replace(row, found=found, why=f"{row.why}, {describe(found)}", matrices=count)


def _group(members: list[tuple[Row, nn.Parameter]], adamw_lr: float | torch.Tensor | None) -> dict:
    """The parameter group of pairs (Row, parameter) of one part and one split."""
    first = members[0][0]
    part = first.part
    group = {
        "name": part,
        "params": [p for _, p in members],
        "param_names": [row.name for row, _ in members],
        "use_muon": first.use_muon,
    }
    if part == MUON:
        group["adjust_lr_fn"] = "match_rms_adamw"
        if first.keys.split is not None:
            group["split"] = first.keys.split
        if first.keys.transposed:
            group["transposed"] = True
        return group
    # All further options keep the optimizer's defaults
    if part == NO_DECAY:
        group["weight_decay"] = 0.0
    # Schedulers change a tensor lr in place, group by group: each group needs a tensor of its own
    if adamw_lr is not None:
        group["lr"] = adamw_lr.clone() if isinstance(adamw_lr, torch.Tensor) else adamw_lr
    return group


class Pattern:
    """A pattern of the arguments `adamw`, `muon` or `named_splits`: a regular expression or a
    function.
    """

    def __init__(self, argument: str, given: PatternLike) -> None:
        """argument: "adamw", "muon" or "named_splits". Raises ValueError for a pattern of another
        type, or an invalid regular expression.
        """
        self.argument = argument
        self.given = given
        self.found = False  # whether any parameter has matched
        self.found_vectors = False  # of `named_splits`: whether a vector has matched
        self.ignored: Row | None = None  # of `named_splits`: the first match that goes to AdamW
        if not (isinstance(given, (str, re.Pattern)) or callable(given)):
            raise ValueError(
                f"{argument} holds {shortened(repr(given))}, but only regular expressions and "
                "functions of (name, module, parameter) are allowed"
            )
        try:
            self.regex = re.compile(given) if isinstance(given, (str, re.Pattern)) else None
        except re.error as error:
            raise ValueError(
                f"{self} is no regular expression ({error}): correct it, or pass re.escape(name)"
            ) from error

    def __str__(self) -> str:
        """argument=pattern, as written by the user, for messages and reports."""
        given = self.given.pattern if isinstance(self.given, re.Pattern) else self.given
        given = given if isinstance(given, str) else getattr(given, "__name__", given)
        return f"{self.argument}={shortened(repr(given))}"

    def matches(self, param: nn.Parameter, places: list[Place]) -> bool:
        """Whether the pattern matches a parameter at any of `places`, its names.
        Sets `found`.
        """
        found = self.would_match(param, places)
        self.found |= found
        return found

    def would_match(self, param: nn.Parameter, places: list[Place]) -> bool:
        """As `matches`, without a change of `found`."""
        call = (
            self.given
            if self.regex is None
            else lambda name, module, param: self.regex.search(name)
        )
        return any(call(place.name, place.module, param) for place in places)


def _patterns(argument: str, given: Patterns) -> list[Pattern]:
    """The patterns of an argument: None, a pattern, or a collection of patterns.

    Raises ValueError for values of another type.
    """
    # Refuses a dict, whose keys would silently count as patterns
    one = isinstance(given, (str, re.Pattern)) or callable(given)
    if not one and given is not None and not isinstance(given, (list, tuple, set, frozenset)):
        raise ValueError(
            f"{argument}={shortened(repr(given))} is not allowed: it must be a regular expression, "
            "a function of (name, module, parameter), or a list of these"
        )
    return [Pattern(argument, entry) for entry in ([given] if one else given or ())]


def _named_patterns(given: Mapping[PatternLike, object] | None) -> list[tuple[Pattern, Found]]:
    """The patterns and splits of the argument `named_splits`. Raises ValueError or TypeError for
    values of another type.
    """
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise TypeError(
            f"named_splits={shortened(repr(given))} is not allowed: it must be a mapping of "
            'regular expressions to splits, such as {"qkv": {"rows": [768, 768, 768]}}'
        )
    named = []
    for key, form in given.items():
        pattern, transposed = Pattern("named_splits", key), False
        if isinstance(form, Mapping) and {"split", "transposed"} & form.keys():
            transposed = form.get("transposed", False)
            rest = {name: value for name, value in form.items() if name != "transposed"} or None
            form = form["split"] if rest and rest.keys() == {"split"} else rest
        if isinstance(form, Mapping):  # equal sizes are equal forms, and may be saved
            form = {k: list(v) if isinstance(v, Sequence) and not isinstance(v, str) else v
                    for k, v in form.items()}  # fmt: skip
        try:
            if not isinstance(transposed, bool):
                raise TypeError(f"transposed={transposed!r} must be True or False")
            parse(form, transposed)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{pattern}: {error}") from None
        named.append((pattern, Found(form, transposed)))
    return named


def _named_split(
    row: Row, param: nn.Parameter, places: list[Place], named: list[tuple[Pattern, Found]]
) -> Found | None:
    """The split of a parameter by its name; None without one. Sets `found` of the patterns.
    Sets `ignored` of a pattern if the parameter goes to AdamW. Raises ValueError if two patterns
    contradict.
    """
    if param.ndim < 2:  # "qkv" is meant for the weight, not for its bias
        for pattern, _ in named:
            pattern.found_vectors |= pattern.would_match(param, places)
        return None
    # Every pattern is called, also after a match: unmatched patterns are an error
    matching = [(pattern, found) for pattern, found in named if pattern.matches(param, places)]
    if not matching:
        return None
    pattern, found = matching[0]
    name = f"parameter {row.name} of shape {row.shape}"
    for other, differing in matching[1:]:
        if differing != found:
            raise ValueError(
                f"{name} matches both {pattern} and {other}, whose splits differ: narrow one of "
                "the patterns"
            )
    if not row.use_muon:
        pattern.ignored = pattern.ignored or row
    return found


def _classified(
    model: nn.Module,
    places: dict[nn.Parameter, list[Place]],
    structure: Structure,
    patterns: dict[str, list[Pattern]],
) -> Iterator[tuple[Row, nn.Parameter]]:
    """Yield (Row, parameter) for each trainable parameter in the order of the model, tied
    parameters once. `places`, `structure`: as `locate_params` returns them.

    Sets `found` of the patterns.
    """
    for param in dict.fromkeys(model.parameters()):
        if param.requires_grad:
            kind = _moved(param, places[param], classify(param, places[param], structure), patterns)
            yield Row(places[param][0].name, tuple(param.shape), kind.part, kind.why), param


def locate_params(model: nn.Module) -> tuple[dict[nn.Parameter, list[Place]], Structure]:
    """All places of each parameter in the model (name and module; several for tied parameters), and
    the structure of the model. Names lack wrappers' prefixes.
    """
    names = clean_names(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    depth = wrapper_depth(names)
    places: dict[nn.Parameter, list[Place]] = {}
    clean: dict[str, nn.Module] = {}  # path without wrappers' prefixes -> module
    for prefix, module in modules.items():
        # Tensors of a parametrization belong to the module that uses the parametrized weight
        owner, _, made = prefix.partition(".parametrizations")
        for full, param in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            place = Place(names[full], modules[owner] if made else module)
            places.setdefault(param, []).append(place)
        # A wrapper and its inner module have equal paths: the inner module comes last and stays
        if next(module.parameters(), None) is not None:
            clean[clean_path(prefix, depth)] = module
    return places, Structure(clean)


def _moved(
    param: nn.Parameter, places: list[Place], kind: Kind, patterns: dict[str, list[Pattern]]
) -> Kind:
    """The kind of a parameter after the user's patterns; `kind`: the kind by classification.

    Raises ValueError if patterns contradict, or move a vector to Muon.
    """
    # Every pattern is called, also after a match: unmatched patterns are an error
    to_adamw = [pattern for pattern in patterns["adamw"] if pattern.matches(param, places)]
    to_muon = [pattern for pattern in patterns["muon"] if pattern.matches(param, places)]
    name = f"parameter {places[0].name} of shape {tuple(param.shape)}"
    if to_adamw and to_muon:
        raise ValueError(
            f"{name} matches both {to_adamw[0]} and {to_muon[0]}: narrow one of the patterns"
        )
    if to_muon and param.ndim < 2:
        raise ValueError(
            f"{name} matches {to_muon[0]}, but Muon takes matrices (R, C) and stacks of matrices "
            "(..., R, C) only: narrow the pattern"
        )
    if to_adamw and kind.part == MUON:
        return Kind(OTHER, str(to_adamw[0]))
    return Kind(MUON, str(to_muon[0])) if to_muon and kind.part != MUON else kind


def table(rows: list[Row]) -> str:
    """The groups as text: a line for each parameter, with totals below."""
    width = max((len(row.name) for row in rows), default=4)
    lines = [
        f"{row.name:{width}}  {row.shape!s:20}  {'Muon' if row.use_muon else 'AdamW':5}  "
        f"{row.part:10}  {row.why}"
        for row in rows
    ]
    for use_muon, name in ((True, "Muon"), (False, "AdamW")):
        shapes = [row.shape for row in rows if row.use_muon == use_muon]
        lines.append(f"{name}: {len(shapes)} parameters, {sum(map(math.prod, shapes)):,} elements")
    return "\n".join(lines + _split_lines(rows))


def _split_lines(rows: list[Row]) -> list[str]:
    """A line for each split of parameters: the number of parameters and of their matrices, and the
    names, with * for numbers.
    """
    by_split: dict[str, list[Row]] = {}
    for row in rows:
        if row.found != Found():
            by_split.setdefault(describe(row.found), []).append(row)
    return [
        f"{keys}: {len(members)} parameters, {sum(row.matrices for row in members):,} matrices: "
        + ", ".join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", row.name) for row in members))
        for keys, members in by_split.items()
    ]

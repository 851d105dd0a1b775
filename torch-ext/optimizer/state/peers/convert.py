"""Conversion of state dicts of other Muons.

`convert_state_dict` renames the tensors and options of another package's Muon, and refuses options
without counterpart. Parameters are unknown to the conversion: shapes are checked at loading
(state_dict.py). Facts about the packages are in facts.py, the converters of their groups in
sources.py.
"""

from __future__ import annotations

from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...params.dtensor import is_dtensor
from ...params.errors import first_few, shortened
from ...rules.decay import DECOUPLED
from ...rules.muon import SUM_KEY
from .facts import (
    IGNORED,
    PEERS,
    SHARED,
    SOURCES,
    WHOLES,
    candidates,
    going_on_from_adamw,
    listed,
    marked,
)
from .sources import CONVERTERS, OfState, Options, total_of

SUM_SOURCES = ("motif", "dion", "muonium")  # sources whose momentum is a sum


def convert_state_dict(
    state_dict: dict, source: str | None = None, *, momentum_form: str = "ema", **arguments: object
) -> dict:
    """Return the state dict of another Muon as a new state dict for `load_state_dict` of this
    package.

    `source`: package of origin ("torch" for torch.optim.Muon and this package, "keller_jordan",
    "motif", "dion", "emerging_optimizers", "megatron", "timm", "nanochat", "modded_nanogpt",
    "deepspeed", "muonium"); None: recognized by keys. `arguments`: constructor arguments of the
    source's optimizer missing from the state dict; by default the source's defaults (facts.py).
    `momentum_form`: "ema" turns sums into means; "sum" keeps the sums of "motif", "dion" and
    "muonium", and sets momentum_form="sum": exact even if momentum is scheduled.
    Numbers in neither place (coefficients of Motif and Dion) are kept from the loading optimizer.
    Tensors are renamed, sums become means, options are renamed, and the next step equals the
    source's. Dion's `num_heads` and `split_sizes` become `split` of the converted group; loading
    keeps the optimizer's own `split`, so give its groups an equal one. Parameters may be numbered,
    or named as by get_optimizer_state_dict (not flattened).

    Raises ValueError for a state dict of no known Muon, for keys of several sources without
    `source`, and for a Muon group without the momentum of some parameters (a single rank of Keller
    Jordan's Muon). Raises NotImplementedError, with option and source, for options without
    counterpart.
    """
    _check_form(state_dict)
    source = _source(state_dict, source)
    if momentum_form not in ("ema", *(["sum"] if source in SUM_SOURCES else [])):
        raise ValueError(
            f"momentum_form={shortened(repr(momentum_form))} is not allowed: it must be 'ema', or "
            f"'sum' for the sources with sums, {', '.join(SUM_SOURCES)}; this one is {source!r}"
        )
    arguments = _arguments(source, arguments)
    if source == "torch":
        return state_dict
    states = dict(state_dict["state"])
    groups = []
    # Some sources step parameters without gradient too: then each must have state
    stepped = PEERS[source].steps_all and any(states.values())
    parts = [
        (f"group {number}", part)
        for number, group in enumerate(state_dict["param_groups"])
        for part in _parts(f"group {number}", group, states, source)
    ]
    for where, part in parts:
        options, of_state = _converted(where, part, states, source, arguments)
        if options["use_muon"]:
            _check_whole(where, part, states, stepped)
        shared = {key: part[key] for key in part if key in SHARED}
        form = momentum_form if options["use_muon"] else "ema"
        groups.append({"decay": DECOUPLED, "momentum_form": form, **shared, **options})
        for param in [param for param in part["params"] if states.get(param)]:
            converted = of_state(states[param])
            if form == "sum":
                converted[SUM_KEY] = total_of(states[param])
                del converted["momentum_buffer"]
            states[param] = converted
    return {**state_dict, "state": states, "param_groups": groups}


def _check_form(state_dict: object) -> None:
    """Raise ValueError unless `state_dict` is a state dict; NotImplementedError for a known
    checkpoint that contains a state dict.
    """
    keys = set(state_dict) if isinstance(state_dict, dict) else set()
    # A known checkpoint gets advice; any other value the general message below
    for whole, (source, advice) in WHOLES.items():
        if whole <= keys:
            raise NotImplementedError(
                f"this is a checkpoint of {PEERS[source].title}, not its optimizer's state dict: "
                f"{advice}"
            )
    if not {"state", "param_groups"} <= keys:
        came = f"this is a {type(state_dict).__name__}"
        if isinstance(state_dict, dict):
            found = first_few(state_dict, says_count=False) if state_dict else "nothing"
            came = f"this one has {found}"
        raise ValueError(
            f"a state dict has `state` and `param_groups`; {shortened(came)}: pass it as "
            "state_dict() returns it, or from get_optimizer_state_dict without "
            "flatten_optimizer_state_dict"
        )


def _source(state_dict: dict, source: str | None) -> str:
    """Return the name of the source: the given name, else the only package that writes such keys.
    Raises ValueError for a name that is unknown or contradicts the keys, and for unclear keys.
    """
    if source is not None and source not in SOURCES:
        raise ValueError(
            f"source={shortened(repr(source))} is not known: it must be None or one of "
            f"{', '.join(SOURCES)}"
        )
    keys = set().union(*state_dict["param_groups"])
    saved = set().union(*state_dict["state"].values())
    if source is not None:
        others = [name for name in marked(keys, saved) if name != source]
        if others:
            raise ValueError(
                f"source={source!r}, but the state dict has keys that {_titles(others)} alone "
                f"writes: its groups have {listed(keys)}, its states {listed(saved)}. Leave "
                "`source` out"
            )
        return source
    names = candidates(keys, saved)
    if len(names) == 1:
        return names[0]
    if names:
        raise ValueError(
            f"the groups of this state dict have {listed(keys)}, as those of {_titles(names)} "
            f"have, whose rules differ: pass source={' or source='.join(map(repr, names))}"
        )
    known = ", ".join(["torch.optim.Muon", *(peer.title for peer in PEERS.values())])
    raise ValueError(
        f"this is the state dict of no Muon that is known: its groups have {listed(keys)}, its "
        f"states {listed(saved)}; known are {known}{going_on_from_adamw(saved, 'exp_avg')}"
    )


def _titles(names: list[str]) -> str:
    """Return the titles of sources, for messages."""
    return " and ".join(PEERS[name].title for name in names)


def _arguments(source: str, given: dict) -> dict:
    """Return the source's arguments: given, else default. Raises ValueError for unknown ones."""
    taken = PEERS[source].arguments if source in PEERS else {}
    if unknown := sorted(set(given) - set(taken)):
        raise ValueError(
            f"{unknown[0]}={shortened(repr(given[unknown[0]]))} is no argument that the state dict "
            f"of source {source!r} lacks: allowed are {', '.join(taken) or 'none'}"
        )
    return {**taken, **given}


def _converted(
    where: str, group: dict, states: dict, source: str, arguments: dict
) -> tuple[Options, OfState]:
    """Return (options of a group under this package's names, function that converts a state).
    Raises ValueError for missing and for unknown keys, else as the converter (CONVERTERS).
    """
    own = [states[param] for param in group["params"] if states.get(param)]
    _check_tensors(where, own, source)
    try:
        converted = CONVERTERS[source](where, group, own, arguments)
    # A converter reads the keys that its source writes
    except KeyError as missing:
        raise ValueError(
            f"{where} or its states have no key {missing}, which those of {PEERS[source].title} "
            f"have: the group has {listed(group)}"
        ) from None
    if unknown := set(group) - SHARED - IGNORED - PEERS[source].keys:
        raise ValueError(
            f"{where} has {listed(unknown)}, which {PEERS[source].title} does not write: another "
            "optimizer saved it, or another version. Remove what does not change a step"
        )
    return converted


def _parts(where: str, group: dict, states: dict, source: str) -> list[dict]:
    """Return the group in parts of a single kind: timm chooses Muon or AdamW by parameter. Raises
    ValueError for a parameter of unknown kind.
    """
    if source != "timm" or not group["params"]:
        return [group]
    # Depending on timm's version the group says `use_fallback` or `use_muon`; state overrides both
    flag = not group["use_fallback"] if "use_fallback" in group else group.get("use_muon")
    kinds = [states.get(param, {}).get("use_muon", flag) for param in group["params"]]
    if len(known := set(kinds) - {None}) == 1:
        return [{**group, "use_muon": known.pop()}]
    if None in kinds:
        param = group["params"][kinds.index(None)]
        raise ValueError(
            f"{where} does not say whether timm's Muon steps parameter {param} by Muon or by "
            "AdamW, since its state is missing: set `use_muon` in the group, or put state for the "
            "parameter"
        )
    parts = []
    for use_muon in (True, False):
        part = {**group, "use_muon": use_muon}
        for key in [key for key in ("params", "param_names") if key in group]:
            part[key] = [entry for entry, kind in zip(group[key], kinds) if bool(kind) == use_muon]
        parts.append(part)
    return parts


def _check_tensors(where: str, own: list[dict], source: str) -> None:
    """Raise NotImplementedError for state in tensor subclasses other than DTensor, such as
    quantized state.
    """
    for value in (value for state in own for value in state.values()):
        if is_traceable_wrapper_subclass(value) and not is_dtensor(value):
            raise NotImplementedError(
                f"{where} of {PEERS[source].title} keeps state as {type(value).__name__}, which "
                "has no counterpart here: save it in plain tensors"
            )


def _check_whole(where: str, group: dict, states: dict, stepped: bool) -> None:
    """Raise ValueError for a group without the momentum of some parameters. `stepped`: the source
    steps all parameters, so even a group without any state is incomplete.
    """
    names = group.get("param_names") or group["params"]
    lacking = [str(n) for n, param in zip(names, group["params"]) if not states.get(param)]
    if lacking and (stepped or len(lacking) < len(names)):
        raise ValueError(
            f"{where} lacks the momentum of {len(lacking)} of its {len(names)} parameters "
            f"({first_few(lacking, says_count=False)}). Keller Jordan's "
            "distributed Muon keeps each on one rank: gather the states of all ranks into one "
            "state dict first. Where a parameter was never trained, put zeros"
        )

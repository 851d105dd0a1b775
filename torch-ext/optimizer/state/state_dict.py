"""Loading of state dicts: groups are matched, everything is checked before any change, then state
is copied into place.

`Loading`: hooks around torch's `load_state_dict`. `matched_groups`: saved groups in the division of
the optimizer. `restore`: checks by name, shape, dtype and kind of group, then copies in the
optimizer's dtypes and placements. `options_of` and `check_saved_state` serve safetensors_file.py
too.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

import torch

from ..communication.redistribute import place_like
from ..kernels.quantized.blocks import is_quantized
from ..params.checks.group_keys import CHANGED, OPTIONAL_KEYS, as_one_group
from ..params.checks.live_keys import warn_of_saved_arguments
from ..params.checks.saved_function import has_function, with_function
from ..params.config import ARGUMENTS, MuonConfig
from ..params.dtensor import is_by_rows, is_dtensor, local_of, with_local, with_shard
from ..params.errors import first_few, in_group, name_of, names_in, shortened, warn_caller
from ..params.model.classification import NO_DECAY
from ..params.model.names import clean_name
from ..params.units import WHOLE, Split, splits_by_param, splits_of
from ..params.validation import check_numbers
from ..rules.decay import INITIAL_KEY
from ..rules.elementwise import DEFAULT, elementwise_of, is_8bit
from ..rules.muon import REST_KEY, SETTLED, STEPS_KEY, SUM_KEY
from ..rules.rule import (
    OWNERS_KEY,
    QUANTIZED_KEYS,
    SCALE_KEY,
    WIDE_KEYS,
    all_state_keys,
    group_state_dtype,
    matrix_keys,
    rule_of,
    state_device_and_dtype,
    state_shape,
)
from .consolidated import refuse_elsewhere
from .momentum.averages import check_dtype, check_step_count, loaded_keys, narrowed, wide_if_needed
from .momentum.conversion import as_tensor, in_8_bits, way_out, with_own_momentum
from .momentum.device_values import DeviceValues
from .peers.facts import check_source, going_on_from_adamw, listed
from .saved_forms import SPLITS, called_by_checkpoint, saved_rule_name
from .shard_check import check_shards
from .weights.split import check_not_offloaded, check_rest, warn_of_rests, with_own_precision

KINDS = {True: "Muon", False: "AdamW"}  # use_muon -> the kind of a group, for messages
# End of the message about an empty state dict
EMPTY = (
    ". It is empty: Fabric's wrapper returns {} on all ranks but rank 0, and its attribute "
    "`optimizer` has the whole state_dict() on every rank"
)
# Keys of groups of torch's AdamW that this optimizer has no option for
ADAMW = "maximize", "amsgrad", "capturable", "decoupled_weight_decay"
# Keys of a group that loading never changes. `split` and `transposed` describe the model, and
# `state_dtype` and other ARGUMENTS the optimizer, so the optimizer's own values stay.
LABELS = ("param_names", "name", *SPLITS, *ARGUMENTS)
STRUCTURE = ("params", "use_muon", *LABELS)  # keys of a group that are no options


class Loading:
    """A `load_state_dict` in two parts: torch loads the groups, and this class the state of the
    optimizer.
    """

    def __init__(self, groups: list[dict], options: Sequence[MuonConfig]) -> None:
        """Keep copies of the optimizer's groups from before the load. `options`: of each group."""
        self.own = [dict(group) for group in groups]  # groups before the load
        self.options = options
        self.restored = {}  # parameter -> state, set by `before_torch`

    @contextlib.contextmanager
    def hooked(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Context manager in which `before_torch` and `after_torch` are hooks of the optimizer's
        `load_state_dict`.
        """
        # After the user's pre-hooks, which may change the state dict; before the user's post-hooks
        hooks = [
            optimizer.register_load_state_dict_pre_hook(self.before_torch),
            optimizer.register_load_state_dict_post_hook(self.after_torch, prepend=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def before_torch(self, _: torch.optim.Optimizer, loaded: dict) -> dict | None:
        """Check and copy the loaded state; return the state dict for torch, with the groups of the
        optimizer, and with foreign entries of the state only.

        Raises ValueError before anything changes. None: torch loads `loaded` unchanged.
        """
        if missing := {"state", "param_groups"} - set(loaded):
            raise ValueError(
                f"the state dict has no {min(missing)!r}, only "
                f"{shortened(', '.join(map(repr, loaded))) or None}: "
                "pass what an optimizer's state_dict() has returned" + EMPTY * (not loaded)
            )
        refuse_elsewhere(loaded)
        warn_of_saved_arguments(loaded["param_groups"], ARGUMENTS, self.options)
        saved_splits = _saved_splits(loaded["param_groups"])
        groups = matched_groups(loaded["param_groups"], self.own)
        if list(map(_param_count, groups)) != list(map(_param_count, self.own)):
            # A checkpoint of torch.distributed.checkpoint without state: torch raises
            return None
        groups = [with_function(number, *pair) for number, pair in enumerate(zip(groups, self.own))]
        groups = list(map(with_momentum_steps, groups, self.own))
        groups = list(map(with_own_precision, map(with_own_rule, groups, self.own), self.own))
        states = {key: without_holes(state) for key, state in loaded["state"].items()}
        _drop_stale_numbers(states, groups, self.own, saved_splits)
        loaded = {**loaded, "param_groups": groups, "state": states}
        self.restored = restore(loaded, self.own, self.options)
        # Elsewhere a state dict may lack state on purpose, as of parameters that were never stepped
        if called_by_checkpoint():
            _warn_of_missing_state(self.own, self.restored)
        # torch gets no state of this optimizer: it would cast the state to the parameter's dtype
        numbers = {number for group in loaded["param_groups"] for number in group["params"]}
        return {
            **loaded,
            "param_groups": list(map(with_own_kind, groups, self.own)),
            "state": {
                key: _foreign_entries(state) if key in numbers else state
                for key, state in loaded["state"].items()
            },
        }

    def after_torch(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the copied state in place, and complete the groups.

        Names, splits, arguments of the optimizer, and options missing from the saved groups, stay
        as before the load. Drops keys of torch.optim.AdamW without an option here (ADAMW).
        """
        for group, own in zip(optimizer.param_groups, self.own):
            for key in [key for key in (*ADAMW, *SPLITS, *ARGUMENTS) if key not in own]:
                group.pop(key, None)
            for key, default in OPTIONAL_KEYS.items():
                if key in group and key not in own and group[key] == default:
                    del group[key]
            # Saved by an older version or by torch, a group may lack options of this optimizer
            group.update({key: own[key] for key in own if key not in group or key in LABELS})
        for param, state in self.restored.items():
            optimizer.state[param].update(state)


def matched_groups(saved: list[dict], own: list[dict]) -> list[dict]:
    """Return the saved groups in the division of the optimizer's own groups, with `params` in the
    own order.

    Matched by name if all groups of both sides have `param_names`, each name occurs once, and both
    sides have equal names; the division into groups may differ then, and options follow
    `options_of`. Otherwise matched by position, and within a group by name if both groups have
    equal names. Raises ValueError if groups of different lengths cannot be matched by name, if
    names contradict positions, and if a parameter changed to the other kind of group.
    """
    # torch.distributed.checkpoint has names in place of numbers
    if not all(isinstance(key, int) for group in saved for key in group["params"]):
        return _match_checkpoint_groups(saved, own)
    lengths = list(map(_param_count, saved))
    own_lengths = list(map(_param_count, own))
    names = [set(_clean_names(group)) for group in saved]
    own_names = [set(_clean_names(group)) for group in own]
    # Equal division: by position, and by name within each group
    if lengths == own_lengths and names == own_names:
        return [_reordered(*pair) for pair in zip(saved, own)]
    obstacle = _name_obstacle(saved, own)
    if obstacle is None:
        return _match_by_name(saved, own)
    if lengths != own_lengths:
        raise ValueError(
            f"the state dict has groups of {shortened(lengths)} parameters, this "
            f"optimizer of {shortened(own_lengths)}, and they cannot be matched by name: "
            f"{obstacle}. Build the groups as they were saved, or name the parameters "
            "of both optimizers (pass pairs (name, parameter))"
            f"{going_on_from_adamw(set().union(*saved), 'betas')}"
        )
    # By position, as torch does
    matched = [_reordered(*pair) for pair in zip(saved, own)]
    _check_position_names(matched, own)
    return matched


def _check_position_names(matched: list[dict], own: list[dict]) -> None:
    """Check the names in groups that were matched by position although names differ.

    Raises ValueError if a parameter would get the state of a different parameter although the state
    dict holds its own. Warns if the state dict does not have the name: torch goes by position
    silently, and runs with renamed modules rely on it.
    """
    saved_names = {name for group in matched for name in _clean_names(group)}
    renamed = []  # (name in the state dict, name in this optimizer)
    for number, (saved, group) in enumerate(zip(matched, own)):
        names = _clean_names(saved)
        own_names = _clean_names(group)
        is_named = len(names) == len(own_names) == len(group["params"])
        pairs = zip(names, own_names) if is_named else ()
        for name, own_name in [pair for pair in pairs if pair[0] != pair[1]]:
            renamed.append((name, own_name))
            if own_name in saved_names:
                raise ValueError(
                    f"parameter {shortened(own_name)} of group {number} would get the "
                    f"state of {shortened(name)}, which has its position in the state "
                    "dict, and not its own: not all names are on both sides "
                    f"({_name_obstacle(matched, own)}), so state goes by position. Give "
                    "both optimizers the same names, or remove 'param_names' from the "
                    "groups of the state dict if the positions are right"
                )
    if renamed:
        name, own_name = map(shortened, renamed[0])
        warn_caller(
            f"{len(renamed)} parameters have other names here than in the state dict, and "
            f"get their state by position, as in torch: the first is {own_name} here and "
            f"{name} there. If that is not a new name of the same parameter, build the "
            "groups in the order in which they were saved"
        )


def _param_count(group: dict) -> int:
    """Return the number of a group's parameters."""
    return len(group["params"])


def _clean_names(group: dict) -> list[str]:
    """Return the names of a group's parameters without prefixes of wrappers; [] without names."""
    return [clean_name(name) for name in group.get("param_names") or ()]


def _name_obstacle(saved: list[dict], own: list[dict]) -> str | None:
    """Return the reason why parameters cannot be matched by name; None if possible."""
    names = {}
    for where, groups in (("in the state dict", saved), ("here", own)):
        for number, group in enumerate(groups):
            if len(_clean_names(group)) != len(group["params"]):
                return f"group {number} {where} does not name its parameters"
        found = Counter(name for group in groups for name in _clean_names(group))
        if twice := sorted(name for name, count in found.items() if count > 1):
            return f"{shortened(twice[0])} is the name of two parameters {where}"
        names[where] = set(found)
    first, second = names.values()
    # A name on one side only
    for only, where in ((first - second, "only in the state dict"), (second - first, "only here")):
        if only:
            return f"parameter {shortened(min(only))} is {where}"
    return None


def _match_by_name(saved: list[dict], own: list[dict]) -> list[dict]:
    """Return `matched_groups` for equal names on both sides. Raises ValueError for groups of
    another optimizer, rule or kind.
    """
    where = {
        name: (group, key)
        for group in saved
        for name, key in zip(_clean_names(group), group["params"])
    }
    members = [(set(_clean_names(group)), group) for group in saved]
    names = list(map(_clean_names, own))
    matched = []
    for number, group in enumerate(own):
        for name in names[number]:
            _check_options(number, group, where[name][0])
            _check_param_kind(name, group, where[name][0])
        options = options_of(number, own, names, members)
        params = [where[name][1] for name in names[number]]
        matched.append({**options, "params": params, "param_names": group.get("param_names", [])})
    return matched


def options_of(number: int, own: list[dict], names: list[list[str]], saved: list[tuple]) -> dict:
    """Return the options of the optimizer's group `number`, taken from the saved groups.

    `names`: parameter names of each own group. `saved`: (parameter names, group) of each saved
    group. Options come from the saved group with all parameters, or from several with equal
    options, else none do, with a warning. Weight decay: see `_keeps_no_decay`.
    """
    own_names = names[number]
    if not own_names:
        return {}
    for members, group in (*saved, *as_one_group(own_names, saved, STRUCTURE)):
        if members.issuperset(own_names):
            options = {key: value for key, value in group.items() if key not in STRUCTURE}
            # Groups that were one group with this group when the state was saved
            siblings = [
                other
                for i, other in enumerate(own)
                if i != number and names[i] and members.issuperset(names[i])
            ]
            if _keeps_no_decay(own[number], siblings, options):
                saved_decay = options.pop("weight_decay")
                warn_caller(
                    f"group {number} ({shortened(own_names[0])}, ...) keeps weight_decay=0: its "
                    f"parameters were saved in one group with others that have weight "
                    f"decay here, with weight_decay={shortened(saved_decay)}. Set the group's "
                    "weight_decay after loading to go on with that"
                )
            return options
    warn_caller(
        f"group {number} ({shortened(own_names[0])}, ...) keeps its own lr and other options: its "
        "parameters were saved in several groups, whose options may differ"
    )
    return {}


def _keeps_no_decay(own: dict, siblings: list[dict], options: dict) -> bool:
    """Return whether a group without weight decay keeps weight_decay=0 although the saved `options`
    have some: the group was split off from groups with weight decay after the save.

    `siblings`: own groups with equal saved options. The default group "no_decay" always counts as
    split off.
    """
    is_split = own.get("name") == NO_DECAY or any(group["weight_decay"] for group in siblings)
    return bool(siblings and is_split and not own["weight_decay"] and options.get("weight_decay"))


def _match_checkpoint_groups(saved: list[dict], own: list[dict]) -> list[dict]:
    """Return groups of torch.distributed.checkpoint, which have names instead of numbers and the
    division of the own groups.

    In the nested form torch gives the options of a saved group to only one of the groups cut from
    it, and mixes the options of several saved groups. If groups are named, the saved `param_names`
    tell the parameters of each saved group, and options follow `options_of`. Otherwise groups stay
    as torch divided them. Raises ValueError for groups of another optimizer, rule or kind.
    """
    own_names = [_clean_names(group) for group in own]
    params = [[clean_name(name) for name in group["params"]] for group in saved]
    known = {name for names in own_names for name in names}
    # `param_names` of the groups as saved, before torch divided the groups anew
    carried = [(set(_clean_names(group)), group) for group in saved if group.get("param_names")]
    if own_names != params or not carried or any(not names <= known for names, _ in carried):
        return saved
    matched = []
    for number, (names, group) in enumerate(zip(own_names, saved)):
        _check_options(number, own[number], group)
        _check_kind(number, own[number], group)
        options = options_of(number, own, own_names, carried) if names else group
        matched.append({**options, "params": group["params"]})
    return matched


def _reordered(saved: dict, own: dict) -> dict:
    """Return a saved group with `params` in the order of the own group's names; unchanged if names
    differ.
    """
    own_names = _clean_names(own)
    names = _clean_names(saved)
    number = dict(zip(names, saved["params"]))
    # Unequal lengths: names are missing, or a name occurs twice
    is_named = len(own_names) == len(names) == len(number) == len(saved["params"])
    if not own_names or not is_named or set(own_names) != set(number):
        return saved
    params = [number[name] for name in own_names]
    return {**saved, "params": params, "param_names": own["param_names"]}


def without_holes(state: object) -> object:
    """Return the saved state of a parameter without keys that hold an empty dict. torch's flattened
    form has an empty dict for each key of a parameter without state.
    """
    if not isinstance(state, dict):
        return state
    holes = {key for key in all_state_keys() if isinstance(state.get(key), dict) and not state[key]}
    return {key: value for key, value in state.items() if key not in holes}


def _warn_of_missing_state(groups: list[dict], restored: dict) -> None:
    """Warn if a checkpoint lacks state of parameters with gradients."""
    named = [entry for group in groups for entry in names_in(group).items()]
    lacking = [name for param, name in named if param.requires_grad and not restored.get(param)]
    if lacking:
        warn_caller(
            f"no state was loaded for {len(lacking)} parameters "
            f"({first_few(lacking, says_count=False)}), which begin anew: the checkpoint has none, "
            "or, in the flattened form, the optimizer had none when it was loaded; then call "
            "init_state() first, and load again"
        )


def _saved_splits(saved: list[dict]) -> dict[int, Split]:
    """Return {number in the state dict: how the parameter was cut} of parameters of saved groups.
    Groups of torch.distributed.checkpoint, with names or `without_splits`, do not say it.
    """
    groups = [
        group
        for group in saved
        if all(isinstance(key, int) for key in group["params"])
        and not any(group.get(key) == {} for key in SPLITS)
    ]
    return splits_by_param(groups, skips_wrong=True)  # a damaged group is not loaded anyway


def _drop_stale_numbers(
    states: dict, saved: list[dict], own: list[dict], saved_splits: Mapping[int, Split]
) -> None:
    """Replace entries of `states` by copies without numbers of whole matrices (`State.of_matrix`),
    for parameters with other splits in the groups `own`. `saved_splits`: of `_saved_splits`.
    """
    for group, matched in zip(own, saved):
        for key, split in zip(matched["params"], splits_of(group)):
            if saved_splits.get(key, split) != split and isinstance(states.get(key), dict):
                states[key] = {k: v for k, v in states[key].items() if k not in matrix_keys()}


def restore(loaded: dict, groups: list[dict], options: Sequence[MuonConfig]) -> dict:
    """Return {parameter: copy of the saved state, in the dtype and placements of the optimizer}.

    `loaded`: a state dict with an equal number of groups and parameters. `options`: of each group.
    Tensors with other placements than the parameter's are redistributed; for DTensors that is
    collective. Raises ValueError, with the parameter's name, for state that does not fit.
    """
    members = []  # (parameter, result of `with_saved_rule`, name, saved state)
    saved_groups = []  # of each member
    splits = splits_by_param(groups)
    for number, (group, saved) in enumerate(zip(groups, loaded["param_groups"])):
        _check_options(number, group, saved)
        _check_kind(number, group, saved)
        as_saved = with_saved_rule(group, saved)
        check_not_offloaded(number, as_saved, options[number])
        for i, (param, key) in enumerate(zip(group["params"], saved["params"])):
            if key in loaded["state"]:
                members.append((param, as_saved, name_of(group, i), loaded["state"][key]))
                saved_groups.append(saved)
    of_param = {p: own for group, own in zip(groups, options) for p in group["params"]}
    refusal = None
    try:
        with DeviceValues() as numbers:
            members = [
                (*member[:3], _in_own_form(*member, saved, splits[param], of_param[param], numbers))
                for member, saved, param in zip(members, saved_groups, map(itemgetter(0), members))
            ]
    except ValueError as error:
        refusal = error  # raised by check_shards: other ranks may wait for this rank
    check_shards(members, of_param, refusal)
    warn_of_rests(members)
    return {
        param: _restored_state(param, group, state, splits[param], of_param[param])
        for param, group, _, state in members
    }


def _in_own_form(
    param: torch.Tensor,
    group: dict,
    name: str,
    state: object,
    saved: dict,
    split: Split,
    options: MuonConfig,
    numbers: DeviceValues,
) -> dict:
    """Return the saved state of a parameter with momentum in the form of `group`. Raises ValueError
    unless the state fits, for values on a device when `numbers` are read. `saved`: the saved group.
    """
    dtype = options.state_dtype
    state = with_own_momentum(state, group, saved, name, split, dtype, numbers)
    state = wide_if_needed(state, group, param, name)
    keys = loaded_keys(group, param, dtype, state)
    check_saved_state(param, keys, name, state, numbers, split)
    return state


def with_saved_rule(group: dict, saved: dict) -> dict:
    """Return `group` with the options of the saved group on which the keys of state depend."""
    return {**group, **{key: saved[key] for key in OPTIONAL_KEYS if key in saved}}


def with_own_rule(saved: dict, own: dict) -> dict:
    """Return the options `saved` with the rule of the own group in place of "muon".

    Every rule can load Muon's state. The saved key `rule` would otherwise overwrite the group's
    rule.
    """
    if not own["use_muon"] or saved.get("rule") != "muon" or rule_of(own).name == "muon":
        return saved
    options = {key: value for key, value in saved.items() if key != "rule"}
    return {**options, "rule": own["rule"]} if own.get("rule") else options


def with_own_kind(saved: dict, own: dict) -> dict:
    """Return the options `saved` with the own `use_muon`, which is of the same kind, in place of
    the name of a rule.
    """
    return {**saved, "use_muon": own["use_muon"]} if saved_rule_name(saved) else saved


def with_momentum_steps(saved: dict, own: dict) -> dict:
    """Return the options `saved` with SETTLED as `momentum_steps` if only the own group counts
    steps: a checkpoint without the count has a momentum of unknown age, taken as old.
    """
    return {STEPS_KEY: SETTLED, **saved} if STEPS_KEY in own else saved


def _foreign_entries(state: object) -> dict:
    """Return the entries of a parameter's state that neither this optimizer nor torch's AdamW
    keeps.
    """
    # max_exp_avg_sq: of torch's AdamW with amsgrad
    known = (*all_state_keys(), "max_exp_avg_sq", OWNERS_KEY)
    return {key: value for key, value in state.items() if key not in known}


def check_saved_state(
    param: torch.Tensor,
    keys: Sequence[str],
    name: str,
    state: object,
    numbers: DeviceValues,
    split: Split = WHOLE,
) -> None:
    """Raise ValueError unless `state` can be the saved state of `param` under a rule with state
    `keys`: all keys or none. Any rule also accepts Muon's state, momentum alone. Initial weights of
    decay="initial" and rests of split weights may be missing. `numbers`: read later, a step count
    among them. `split`: how the parameter is cut into matrices.
    """
    name = shortened(name)
    if not isinstance(state, dict):
        raise ValueError(
            f"the state of parameter {name} is of type {type(state).__name__}, but it needs a dict "
            f"of {', '.join(keys)}: it was saved by another optimizer, or is damaged"
        )
    # An empty state is allowed: the parameter starts anew
    momentum = {"momentum_buffer", SUM_KEY} & set(keys)
    needed = momentum or set(keys) - {INITIAL_KEY, REST_KEY}
    if state and not needed <= set(state):
        raise ValueError(
            f"the state of parameter {name} is {listed(state)}, but it needs {', '.join(keys)}: a "
            "part of it was lost, or it was saved by another optimizer or for another kind of "
            f"group{going_on_from_adamw(state, 'exp_avg') if momentum else ''}"
        )
    for key in [k for k in keys if k in state]:
        shape = state_shape(param, key, split)
        saved_shape = tuple(getattr(state[key], "shape", ()))
        # A step count of shape (1,) is reshaped by `_restored_state`
        if saved_shape != shape and not (key == "step" and saved_shape == (1,)):
            raise ValueError(
                f"{key} of parameter {name} has shape {shortened(saved_shape)} in the state, "
                f"but a parameter of shape {tuple(param.shape)} needs {shape}: it was "
                f"saved for another parameter or with another split{way_out(key, None)}"
            )
        dtype = as_tensor(state[key], f"{key} of parameter {name}").dtype
        is_count = key == "step" and not dtype.is_complex and dtype != torch.bool
        is_8bit = (
            key in momentum and is_quantized(dtype) and SCALE_KEY in keys and SCALE_KEY in state
        )
        if key == REST_KEY:
            check_rest(dtype, name)
        elif key in QUANTIZED_KEYS:
            check_dtype(key, dtype, name)
        elif not (dtype.is_floating_point or is_count or is_8bit):
            raise ValueError(
                f"{key} of parameter {name} has dtype {dtype} in the state, but it needs a "
                "floating-point one: it was saved by another optimizer, or is damaged"
                + way_out(key, dtype)
            )
    if "step" in keys and "step" in state:
        check_step_count(as_tensor(state["step"]), name, numbers)


def _check_param_kind(name: str, group: dict, saved: dict) -> None:
    """Raise ValueError for a parameter saved in a group of the other kind (Muon or AdamW)."""
    is_muon = bool(group["use_muon"])
    was_muon = bool(saved.get("use_muon", is_muon))
    if is_muon != was_muon:
        raise ValueError(
            f"parameter {shortened(name)} is in a group of {KINDS[was_muon]} in the "
            f"state dict, but in one of {KINDS[is_muon]} here: put it into a group of "
            "the kind in which it was saved"
        )


def check_same_rule(number: int, group: dict, saved: dict) -> None:
    """Raise ValueError for a group that was saved with another rule. Every rule accepts the
    momentum of Muon, which groups without a key `rule` have.
    """
    if group["use_muon"]:
        # `beta2` of torch.distributed.checkpoint may be a key of this optimizer alone
        was = saved_rule_name(saved) or saved.get("rule")
        was = was or ("normuon" if "beta2" in saved else None)
        now = group.get("rule") or ("normuon" if "beta2" in group else "muon")
    else:
        # Groups of torch's AdamW, and of AdamW here, have betas and no rule
        was = saved.get("rule") or (DEFAULT if "betas" in saved else None)
        now = elementwise_of(group).name
    if was not in (None, "muon", now):
        raise ValueError(
            f"parameter group {number} was saved with rule={was!r}, but has {now!r} here: build "
            "the group with the rule with which it was saved"
        )


def _check_options(number: int, group: dict, saved: dict) -> None:
    """Raise ValueError for a group of a different optimizer, and for options that change the rule
    of a step and are unknown to this optimizer.
    """
    check_source(number, group, saved)
    check_same_rule(number, group, saved)
    other = [key for key in CHANGED if saved.get(key)]
    other += ["decoupled_weight_decay"] * (
        saved.get("decoupled_weight_decay") is False and bool(saved["weight_decay"])
    )
    if other:
        raise ValueError(
            f"parameter group {number} was saved with "
            f"{other[0]}={shortened(saved[other[0]])}, which is not known here: go on "
            "with the one that saved it, or remove the key"
        )


def _check_kind(number: int, group: dict, saved: dict) -> None:
    """Raise ValueError for a saved group of the other kind, or with a number out of range."""
    is_muon = bool(group["use_muon"])
    was_muon = bool(saved.get("use_muon", is_muon))
    if is_muon != was_muon:
        names = saved.get("param_names") or saved["params"] or ["no parameters"]
        raise ValueError(
            f"parameter group {number} ({shortened(names[0])}, ...) is one of "
            f"{KINDS[was_muon]} in the state dict, but of {KINDS[is_muon]} here: build the "
            "groups in the order in which they were saved"
        )
    # The saved numbers of the options that this group has
    known = {key: saved[key] for key in saved if key in group or key in OPTIONAL_KEYS}
    if has_function(saved):
        del known["adjust_lr_fn"]
    known = with_own_kind(known, group)
    with in_group(number, group):
        check_numbers({**group, **known})


def _restored_state(
    param: torch.Tensor, group: dict, state: dict, split: Split, options: MuonConfig
) -> dict:
    """Return a copy of a parameter's saved state in the dtypes and placements of the optimizer.
    `group`: with the options on which the keys depend.
    """
    restored = {}
    offloads = bool(options.offload_state)
    momentum_dtype = group_state_dtype(group, options.state_dtype)
    keys = loaded_keys(group, param, momentum_dtype, state)
    for key in [k for k in keys if k in state]:
        device, dtype = state_device_and_dtype(key, param, momentum_dtype, offloads)
        value = as_tensor(state[key]).detach()
        if key == "step":
            value = value.reshape(())
        # Rows of owner state stay rows; the next step moves the rows to the owners
        elif key == REST_KEY or not (
            options.owner_keeps_state and is_by_rows(value, options.process_group)
        ):
            value = place_like(value, param)
        local = local_of(value)
        if key == REST_KEY:  # its bits, see [Note: rests in state dicts]
            local = local.view(dtype)
        # Not a cast: numbers of a block belong to its scale
        to_8_bits = is_quantized(dtype) and value.dtype.is_floating_point
        # A copy: the user's state dict must not change with the next step
        local = local.to(device, local.dtype if to_8_bits else dtype, copy=True)
        restored[key] = local
        if is_dtensor(value) and offloads:
            restored[key] = with_local(value, local)
        elif is_dtensor(value):
            restored[key] = with_shard(value, local)
        if to_8_bits:
            scales_shape = state_shape(param, SCALE_KEY, split)
            restored[key], restored[SCALE_KEY] = in_8_bits(restored[key], scales_shape, split)
    becomes_8bit = is_8bit(group, param) and set(WIDE_KEYS) <= set(restored)
    return narrowed(restored, param) if becomes_8bit else restored

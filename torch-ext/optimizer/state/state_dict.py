"""Loading of state dicts: checks by name, shape, dtype and group before anything changes, then
copies into place.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..communication.redistribute import place_like
from ..params.classification import NO_DECAY
from ..params.dtensor import as_dtensor, is_by_rows, is_dtensor, local_of
from ..params.errors import in_group, name_of, names_in, shortened, warn_caller
from ..params.param_groups import clean_name
from ..params.validation import CHANGED, check_numbers
from ..rules.rule import STATE_KEYS, home_of, state_keys, state_shape
from .consolidated import refuse_elsewhere
from .peers import PEERS, listed, marked
from .shard_check import check_shards

KINDS = {True: "Muon", False: "AdamW"}  # use_muon -> the kind of a group, for messages
# Of torch's AdamW, which no group has here
ADAMW = "maximize", "amsgrad", "capturable", "decoupled_weight_decay"
LABELS = ("param_names", "name")  # of a group, which loading never changes
STRUCTURE = ("params", "use_muon", *LABELS)  # keys of a group that are no options


def called_by_checkpoint() -> bool:
    """Whether torch.distributed.checkpoint is among the callers of this function.

    It loads into the tensors of `state_dict()` and needs state of every parameter. Others call
    `state_dict()` before the model is sharded (accelerate's `prepare` does, and moves the state to
    the GPU and loads it back): state that was created for them would be whole on every rank.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("torch.distributed.checkpoint"):
            return True
        frame = frame.f_back
    return False


class Loading:
    """One `load_state_dict`: torch gets the groups, and the state is put in place when it is done
    with them.
    """

    def __init__(self, groups, options):
        self.own, self.options, self.restored = [dict(group) for group in groups], options, {}

    @contextlib.contextmanager
    def hooked(self, optimizer):
        """Have an optimizer's `load_state_dict` do it meanwhile."""
        # Before those of others
        hooks = [
            optimizer.register_load_state_dict_pre_hook(self.before_torch),
            optimizer.register_load_state_dict_post_hook(self.after_torch, prepend=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def before_torch(self, _, loaded):
        """Check and copy the state, before torch loads. Returns the state dict that torch is to
        load: its groups are those of the optimizer, and its state is what others keep in the state
        of a parameter.
        """
        if missing := {"state", "param_groups"} - set(loaded):
            raise ValueError(
                f"the state dict has no {min(missing)!r}, only "
                f"{', '.join(map(repr, loaded)) or None}: "
                "pass what an optimizer's state_dict() has returned"
            )
        refuse_elsewhere(loaded)
        groups = matched_groups(loaded["param_groups"], self.own)
        if list(map(_length, groups)) != list(map(_length, self.own)):
            return None  # of torch.distributed.checkpoint without any state; torch refuses it
        states = {key: without_holes(state) for key, state in loaded["state"].items()}
        loaded = {**loaded, "param_groups": groups, "state": states}
        self.restored = restore(loaded, self.own, self.options)
        if called_by_checkpoint():
            _warn_of_lacking_state(self.own, self.restored)
        numbers = {number for group in loaded["param_groups"] for number in group["params"]}
        return {
            **loaded,
            "state": {
                key: _of_others(state) if key in numbers else state
                for key, state in loaded["state"].items()
            },
        }

    def after_torch(self, optimizer) -> None:
        """After: names, and options that the saved groups lack, are the optimizer's own. Of those
        that it does not know torch's AdamW leaves some, which say what is done here anyway, or how
        AdamW did it.
        """
        for group, own in zip(optimizer.param_groups, self.own):
            for key in [key for key in ADAMW if key not in own]:
                group.pop(key, None)
            group.update({key: own[key] for key in own if key not in group or key in LABELS})
        for param, state in self.restored.items():
            optimizer.state[param].update(state)


def matched_groups(saved: list[dict], own: list[dict]) -> list[dict]:
    """The saved groups, divided as the optimizer's own and with their `params` in that order.

    By name where all groups of both sides have `param_names`, each name once, and the names are the
    same; the division into groups may differ then, and options go by `options_of`. Else by
    position, and within a group by name where that has the same names. Raises ValueError where
    groups of other lengths cannot be matched by name, where names contradict the positions, and
    where a parameter has gone over to a group of the other kind.
    """
    if not all(isinstance(key, int) for group in saved for key in group["params"]):
        return _with_all_options(saved, own)
    lengths, ours = (list(map(_length, groups)) for groups in (saved, own))
    names, own_names = ([set(_clean_names(group)) for group in groups] for groups in (saved, own))
    if lengths == ours and names == own_names:
        return [_in_own_order(*pair) for pair in zip(saved, own)]
    obstacle = _obstacle(saved, own)
    if obstacle is None:
        return _by_name(saved, own)
    if lengths != ours:
        raise ValueError(
            f"the state dict has groups of {shortened(lengths)} parameters, this "
            f"optimizer of {shortened(ours)}, and they cannot be matched by name: "
            f"{obstacle}. Build the groups as they were saved, or name the parameters "
            "of both optimizers (pass pairs (name, parameter))"
        )
    matched = [_in_own_order(*pair) for pair in zip(saved, own)]
    _check_positions(matched, own)
    return matched


def _check_positions(matched: list[dict], own: list[dict]) -> None:
    """Judge groups that are matched by position and whose names disagree.

    Raises ValueError if a parameter would get the state of another, although the state dict has
    its own. Warns if the state dict does not know the name: torch goes by position then, without a
    word, and runs that rename their modules rely on it.
    """
    known, renamed = {name for group in matched for name in _clean_names(group)}, []
    for number, (saved, group) in enumerate(zip(matched, own)):
        theirs, ours = _clean_names(saved), _clean_names(group)
        pairs = zip(theirs, ours) if len(theirs) == len(ours) == len(group["params"]) else ()
        for name, here in [pair for pair in pairs if pair[0] != pair[1]]:
            renamed.append((name, here))
            if here in known:
                raise ValueError(
                    f"parameter {shortened(here)} of group {number} would get the "
                    f"state of {shortened(name)}, which has its position in the state "
                    "dict, and not its own: not all names are on both sides "
                    f"({_obstacle(matched, own)}), so state goes by position. Give "
                    "both optimizers the same names, or remove 'param_names' from the "
                    "groups of the state dict if the positions are right"
                )
    if renamed:
        name, here = map(shortened, renamed[0])
        warn_caller(
            f"{len(renamed)} parameters have other names here than in the state dict, and "
            f"get their state by position, as in torch: the first is {here} here and "
            f"{name} there. If that is not a new name of the same parameter, build the "
            "groups in the order in which they were saved"
        )


def _length(group: dict) -> int:
    return len(group["params"])


def _clean_names(group: dict) -> list[str]:
    return [clean_name(name) for name in group.get("param_names") or ()]


def _obstacle(saved: list[dict], own: list[dict]) -> str | None:
    """The reason why parameters cannot be matched by name; None if they can."""
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
    for only, where in ((first - second, "only in the state dict"), (second - first, "only here")):
        if only:
            return f"parameter {shortened(min(only))} is {where}"
    return None


def _by_name(saved: list[dict], own: list[dict]) -> list[dict]:
    """`matched_groups` where every name is on both sides."""
    where = {
        name: (group, key)
        for group in saved
        for name, key in zip(_clean_names(group), group["params"])
    }
    members, matched = [(set(_clean_names(group)), group) for group in saved], []
    names = list(map(_clean_names, own))
    for number, group in enumerate(own):
        for name in names[number]:
            _check_options(number, group, where[name][0])
            _check_kind_of(name, group, where[name][0])
        options = options_of(number, own, names, members)
        params = [where[name][1] for name in names[number]]
        matched.append({**options, "params": params, "param_names": group.get("param_names", [])})
    return matched


def options_of(number: int, own: list[dict], names: list[list[str]], saved: list[tuple]) -> dict:
    """The options that group `number` of the optimizer's `own` groups takes.

    `names`: of the parameters of each own group. `saved`: (names of its parameters, the group) of
    each saved group. The options are those of the saved group that held all the parameters, but for
    weight decay as `_keeps_no_decay` says. Where several groups held them, the own group keeps its
    options ({} is returned), with a warning; and where there are no parameters, without one.
    """
    mine = names[number]
    if not mine:
        return {}
    for members, group in saved:
        if members.issuperset(mine):
            options = {key: value for key, value in group.items() if key not in STRUCTURE}
            beside = [
                other
                for i, other in enumerate(own)
                if i != number and names[i] and members.issuperset(names[i])
            ]
            if _keeps_no_decay(own[number], beside, options):
                came = options.pop("weight_decay")
                warn_caller(
                    f"group {number} ({shortened(mine[0])}, ...) keeps weight_decay=0: its "
                    f"parameters were saved in one group with others that have weight "
                    f"decay here, with weight_decay={shortened(came)}. Set the group's "
                    "weight_decay after loading to go on with that"
                )
            return options
    warn_caller(
        f"group {number} ({shortened(mine[0])}, ...) keeps its own lr and other options: its "
        "parameters were saved in several groups, whose options may differ"
    )
    return {}


def _keeps_no_decay(own: dict, beside: list[dict], options: dict) -> bool:
    """Whether a group without weight decay stays so, although the saved `options` have some: it
    was split off from groups with weight decay after the state was saved.

    `beside`: the own groups that take the same saved options. The default group "no_decay" counts
    as split off whatever the others have.
    """
    split = own.get("name") == NO_DECAY or any(group["weight_decay"] for group in beside)
    return bool(beside and split and not own["weight_decay"] and options.get("weight_decay"))


def _with_all_options(saved: list[dict], own: list[dict]) -> list[dict]:
    """Groups of torch.distributed.checkpoint: divided as the own ones, with names for numbers.

    Nested, torch gives the options of a saved group to one of the groups that were cut from it, and
    those of several to a group made of them. The `param_names` that came along tell which
    parameters the saved group had, where the groups are named: then options go by `options_of`.
    Else groups stay as torch has divided them.
    """
    ours = [_clean_names(group) for group in own]
    params = [[clean_name(name) for name in group["params"]] for group in saved]
    known = {name for names in ours for name in names}
    carried = [(set(_clean_names(group)), group) for group in saved if group.get("param_names")]
    if ours != params or not carried or any(not names <= known for names, _ in carried):
        return saved
    matched = []
    for number, (names, group) in enumerate(zip(ours, saved)):
        _check_options(number, own[number], group)
        _check_kind(number, own[number], group)
        options = options_of(number, own, ours, carried) if names else group
        matched.append({**options, "params": group["params"]})
    return matched


def _in_own_order(saved: dict, own: dict) -> dict:
    """A saved group with `params` in the order in which the own group has their names; as it is
    where the names differ.
    """
    ours, theirs = _clean_names(own), _clean_names(saved)
    number = dict(zip(theirs, saved["params"]))
    if (
        not ours
        or not len(ours) == len(theirs) == len(number) == len(saved["params"])
        or set(ours) != set(number)
    ):
        return saved
    return {**saved, "params": [number[name] for name in ours], "param_names": own["param_names"]}


def without_holes(state: object) -> object:
    """A parameter's saved state without keys that hold an empty dict. torch's flattened form puts
    one for each key of a parameter that had no state when it was saved.
    """
    if not isinstance(state, dict):
        return state
    holes = {key for key in STATE_KEYS if isinstance(state.get(key), dict) and not state[key]}
    return {key: value for key, value in state.items() if key not in holes}


def _warn_of_lacking_state(groups: list[dict], restored: dict) -> None:
    """Warn if a checkpoint does not bring state of all parameters that require a gradient."""
    named = [entry for group in groups for entry in names_in(group).items()]
    lacking = [name for param, name in named if param.requires_grad and not restored.get(param)]
    if lacking:
        first = shortened(", ".join(lacking[:3])) + ", ..." * (len(lacking) > 3)
        text = (
            f"no state was loaded for {len(lacking)} parameters ({first}), which begin anew: the "
            "checkpoint has none, or, in the flattened form, the optimizer had none when it was "
            "loaded; then call init_state() first, and load again"
        )
        warn_caller(text)


def restore(loaded, groups, options) -> dict:
    """{parameter: a copy of its saved state, in the dtype and place in which the optimizer keeps
    it}.

    `loaded`: a state dict of as many groups and parameters. Tensors that lie otherwise than the
    parameter are moved; from DTensors that is collective. Raises ValueError, naming the parameter,
    for what does not fit.
    """
    members = []
    for number, (group, saved) in enumerate(zip(groups, loaded["param_groups"])):
        _check_options(number, group, saved)
        _check_kind(number, group, saved)
        for i, (param, key) in enumerate(zip(group["params"], saved["params"])):
            if key in loaded["state"]:
                members.append((param, group, name_of(group, i), loaded["state"][key]))
    refusal = None
    try:
        for param, group, name, state in members:
            check_state(param, state_keys(group), name, state)
    except ValueError as error:
        refusal = error  # other ranks may wait for this one
    check_shards(members, options, refusal)
    return {
        param: _restored(param, state_keys(group), state, options)
        for param, group, _, state in members
    }


def _of_others(state) -> dict:
    """What neither this optimizer keeps nor torch's AdamW, with an option that is refused."""
    return {
        key: value for key, value in state.items() if key not in (*STATE_KEYS, "max_exp_avg_sq")
    }


def check_state(param, keys, name, state) -> None:
    """Raise ValueError unless the saved `state` of a parameter can be that of one whose rule keeps
    `keys`: all of them or none, but NorMuon goes on with Muon's, which has no second moment.
    """
    name = shortened(name)
    if not isinstance(state, dict):
        raise ValueError(
            f"the state of parameter {name} is of type {type(state).__name__}, but it needs a dict "
            "of "
            f"{', '.join(keys)}: it was saved by another optimizer, or is damaged"
        )
    if state and not set(keys) - {"second_moment"} <= set(state):
        raise ValueError(
            f"the state of parameter {name} is "
            f"{shortened(', '.join(sorted(map(str, state))))}, but it needs "
            f"{', '.join(keys)}: a part of it was lost, or it was saved by another "
            "optimizer or for another kind of group"
        )
    for key in [k for k in keys if k in state]:
        shape, came = state_shape(param, key), tuple(getattr(state[key], "shape", ()))
        if came != shape and not (key == "step" and came == (1,)):
            raise ValueError(
                f"{key} of parameter {name} has shape {shortened(came)} in the state, "
                f"but a parameter of shape {tuple(param.shape)} needs {shape}: it was "
                "saved for another parameter"
            )
        dtype = _tensor(state[key], f"{key} of parameter {name}").dtype
        whole = key == "step" and not dtype.is_complex and dtype != torch.bool
        if not (dtype.is_floating_point or whole):
            raise ValueError(
                f"{key} of parameter {name} has dtype {dtype} in the state, but it needs a "
                "floating-point "
                "one: it was saved by another optimizer, or is damaged"
            )
    if "step" in keys and "step" in state:
        _check_count(_tensor(state["step"]), name)


def _check_count(step: torch.Tensor, name: str) -> None:
    """Raise ValueError unless AdamW's count of steps is a whole number >= 0. Reads the device."""
    step = local_of(step)
    if step.is_meta or isinstance(step, FakeTensor):
        return
    count = float(step)
    if not (0 <= count < math.inf and count.is_integer()):
        raise ValueError(
            f"step of parameter {name} is {count} in the state, but AdamW's count of "
            "steps must be a whole number >= 0: the state is damaged; load another "
            "checkpoint, or remove the parameter's state to begin anew"
        )


def _check_kind_of(name: str, group: dict, saved: dict) -> None:
    """Raise ValueError for a parameter of `group` that was saved in a group of the other kind."""
    ours, theirs = bool(group["use_muon"]), bool(saved.get("use_muon", group["use_muon"]))
    if ours != theirs:
        raise ValueError(
            f"parameter {shortened(name)} is in a group of {KINDS[theirs]} in the "
            f"state dict, but in one of {KINDS[ours]} here: put it into a group of "
            "the kind in which it was saved"
        )


def _check_saved_here(number: int, group: dict, saved: dict) -> None:
    """Raise ValueError for a saved group of another Muon, or of SGD: its momentum and its options
    mean something else. Keys that the own group has, too, are nobody's mark.
    """
    where = f"parameter group {number} was saved by"
    convert = "pass the state dict through convert_state_dict first, which says more"
    if names := marked(set(saved) - set(group)):
        raise ValueError(
            f"{where} {PEERS[names[0]].title} (keys {listed(saved)}), which scales its "
            f"state or its steps differently: {convert}"
        )
    # A state dict of an older version may lack one of them
    own = {"adjust_lr_fn", "ns_coefficients"}
    if group["use_muon"] and "momentum" in saved and not own & set(saved):
        raise ValueError(
            f"{where} another optimizer: it has momentum, but no adjust_lr_fn (keys "
            f"{listed(saved)}). If that was a Muon, {convert}"
        )


def _check_options(number, group, saved) -> None:
    """Raise ValueError for a group of another optimizer, and for options of a saved group that
    would change the rule of a step and are not known here.
    """
    _check_saved_here(number, group, saved)
    other = [key for key in CHANGED if saved.get(key)] + ["beta2"] * (
        "beta2" in saved and "beta2" not in group
    )
    other += ["decoupled_weight_decay"] * (
        saved.get("decoupled_weight_decay") is False and bool(saved["weight_decay"])
    )
    if other:
        raise ValueError(
            f"parameter group {number} was saved with "
            f"{other[0]}={shortened(saved[other[0]])}, which is not known here: go on "
            "with the one that saved it, or remove the key"
        )


def _check_kind(number, group, saved) -> None:
    """Raise ValueError for a saved group of the other kind, or with a number out of range."""
    ours, theirs = bool(group["use_muon"]), bool(saved.get("use_muon", group["use_muon"]))
    if ours != theirs:
        names = saved.get("param_names") or saved["params"] or ["no parameters"]
        raise ValueError(
            f"parameter group {number} ({shortened(names[0])}, ...) is one of "
            f"{KINDS[theirs]} in the state dict, but of {KINDS[ours]} here: build the "
            "groups in the order in which they were saved"
        )
    with in_group(number, group):
        check_numbers({**group, **{key: saved[key] for key in saved if key in group}})


def _tensor(value: object, what: str = "a state") -> torch.Tensor:
    """A tensor, or a number (AdamW's steps in old files) as one on the CPU. The default dtype need
    not hold the number, and the default device may be without memory. Raises ValueError that begins
    with `what` for anything else.
    """
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.as_tensor(
            value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu"
        )
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(
            f"{what} is of type {type(value).__name__} in the state, but must be a "
            "tensor or a number: it was saved by another optimizer, or is "
            "damaged"
        ) from error


def _restored(param, keys, state, options) -> dict:
    kept = {}
    for key in [k for k in keys if k in state]:
        device, dtype = home_of(key, param, options.state_dtype)
        value = _tensor(state[key]).detach()
        if key == "step":
            value = value.reshape(())
        elif not options.owner_keeps_state or not is_by_rows(value, options.process_group):
            value = place_like(value, param)
        local = local_of(value).to(device, dtype, copy=True)
        dtensor = is_dtensor(value)
        kept[key] = (
            as_dtensor(local, value.shape, value.device_mesh, value.placements)
            if dtensor
            else local
        )
    return kept

"""State of other Muons in this package's form.

Decides by the keys of groups and states which optimizer saved a state dict, and what its tensors and options are
called here. Knows no parameter: what does not fit one is found when it is loaded (loaded.py).

Momentum is a mean here, M <- mu M + (1 - mu) G; some keep a sum, S <- mu S + G. With mu constant since the start,
M = (1 - mu) S.
"""
from __future__ import annotations

import torch

from .validation import SCHEDULED

SHARED = ("params", "param_names", "lr", "weight_decay", *SCHEDULED)  # the same in all
JORDANS = frozenset((*SHARED, "momentum", "use_muon", "betas", "eps"))
RENAMED = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}
DION_RULES = ("muon", "normuon", "adamw")
DIONS = {"cautious_wd": (False, None), "adjust_lr": ("spectral_norm", "rms_norm"), "num_heads": (None, 1),
         "split_sizes": (None,)}  # options that change a step, and their values that exist here


def convert_state_dict(state_dict) -> dict:
    """The state dict of another Muon as one that `load_state_dict` takes here; the given one is not changed.

    Known by their keys: torch.optim.Muon and this package's own (returned as they are); Keller Jordan's, with or
    without Adam; Motif's; Dion's Muon and NorMuon, with AdamW. Tensors are renamed, sums become means, and options get
    this package's names, so that the next step is theirs; what is not in the state dict (Motif's and Dion's
    coefficients) stays the loading optimizer's own. Parameters may be numbered, or named as by get_optimizer_state_dict
    (not flattened).

    Raises ValueError for any other state dict, and for a group of Muon's that lacks the momentum of some parameters, as
    that of one rank of Keller Jordan's does; NotImplementedError for options that do not exist here.
    """
    if "state" not in state_dict or "param_groups" not in state_dict:
        found = [*map(str, list(state_dict)[:3]), *["..."] * (len(state_dict) > 3)]
        raise ValueError(f"a state dict has `state` and `param_groups`; this one has {', '.join(found) or 'nothing'}: "
                         "pass it as state_dict() returns it, or from get_optimizer_state_dict without "
                         "flatten_optimizer_state_dict")
    convert = _source(state_dict)
    if convert is None:
        return state_dict
    states, groups = dict(state_dict["state"]), []
    stepped = convert is _jordan and any(states.values())  # it steps every parameter, also without a gradient
    for number, group in enumerate(state_dict["param_groups"]):
        dims = [value.ndim for p in group["params"] for value in states.get(p, {}).values() if hasattr(value, "ndim")]
        options, of_state = convert(f"group {number}", group, max(dims, default=0))
        if options["use_muon"]:
            _check_whole(f"group {number}", group, states, stepped)
        groups.append({**{key: group[key] for key in SHARED if key in group}, **options})
        for param in group["params"]:
            if states.get(param):
                states[param] = of_state(states[param])
    return {**state_dict, "state": states, "param_groups": groups}


def _source(state_dict):
    """The function that converts a group: (its name, the group, the most dims of its tensors) -> (its options, the
    function of its states); None if there is nothing to convert.
    """
    groups = state_dict["param_groups"]
    keys, kept = set().union(*groups), set().union(*state_dict["state"].values())
    if "algorithm" in keys:
        return _dion
    if "ns_coefficients" in keys:
        return None
    if {"use_muon", "ns_steps", "adamw_betas"} <= keys:
        return _motif
    if keys <= JORDANS and "momentum" in keys:
        return _jordan
    raise ValueError(f"this is the state dict of no Muon that is known: its groups have {', '.join(sorted(keys))}, its "
                     f"states {', '.join(sorted(kept)) or 'nothing'}; known are torch.optim.Muon, Keller Jordan's, "
                     "Motif's, and Dion's Muon and NorMuon")


def _jordan(name, group, dims):
    if not group.get("use_muon", True):
        return _adamw(group["betas"], group["eps"]), dict
    _check_dims(name, dims, flattened=dims == 4)
    return {"use_muon": True, "momentum": group["momentum"], "nesterov": True, "ns_coefficients": "jordan",
            "ns_steps": 5, "adjust_lr_fn": "original"}, dict


def _motif(name, group, dims):
    if not group["use_muon"]:
        return _adamw(group["adamw_betas"], group["adamw_eps"]), _renamed
    return {"use_muon": True, "momentum": group["momentum"], "nesterov": group["nesterov"],
            "ns_steps": group["ns_steps"], "adjust_lr_fn": "match_rms_adamw"}, _mean(group["momentum"])


def _dion(name, group, dims):
    rule = group["algorithm"]
    if rule not in DION_RULES:
        raise NotImplementedError(f"{name} is stepped by {rule!r}; only {DION_RULES} have a counterpart here")
    for key in DIONS if rule != "adamw" else ("cautious_wd",):
        if group.get(key, DIONS[key][0]) not in DIONS[key]:
            raise NotImplementedError(f"{name} has {key}={group[key]!r}, for which there is no option here: to take "
                                      f"the state without it, set {key}={DIONS[key][0]!r} in the state dict")
    if rule == "adamw":
        def of_state(state):
            renamed = {"exp_avg": state["momentum"], "exp_avg_sq": state["variance"]}
            return {"step": torch.tensor(float(group["step"]), dtype=torch.float32), **renamed}
        return _adamw((group["beta1"], group["beta2"]), group["epsilon"]), of_state
    _check_dims(name, dims, flattened=group["flatten"])
    options = {"use_muon": True, "momentum": group["mu"], "nesterov": group["nesterov"],
               "adjust_lr_fn": group["adjust_lr"]}
    if rule == "normuon":
        options["beta2"] = group["muon_beta2"]
    return options, _mean(group["mu"])


def _check_dims(name, dims, flattened) -> None:
    if flattened and dims > 2:
        raise NotImplementedError(f"{name} has {dims}-D parameters, which were stepped as one matrix each; here they "
                                  "are stacks of matrices: make the parameters 2-D, or step them by AdamW")


def _check_whole(name, group, states, stepped) -> None:
    names = group.get("param_names") or group["params"]
    lacking = [str(n) for n, param in zip(names, group["params"]) if not states.get(param)]
    if lacking and (stepped or len(lacking) < len(names)):
        raise ValueError(f"{name} lacks the momentum of {len(lacking)} of its {len(names)} parameters "
                         f"({', '.join(lacking[:3])}{', ...' * (len(lacking) > 3)}). Keller Jordan's distributed Muon "
                         "keeps each on one rank: gather the states of all ranks into one state dict first. Where a "
                         "parameter was never trained, put zeros")


def _adamw(betas, eps) -> dict:
    return {"use_muon": False, "betas": tuple(betas), "eps": eps}


def _renamed(state) -> dict:
    return {RENAMED.get(key, key): value for key, value in state.items() if key in ("step", *RENAMED)}


def _mean(mu):
    """The function of states whose momentum is a sum: in fp32, since their own dtype may have 8 bits."""
    def of_state(state):
        (total,) = (state[key] for key in ("momentum_buffer", "momentum") if key in state)
        kept = {"momentum_buffer": total.to(torch.promote_types(total.dtype, torch.float32)) * (1 - float(mu))}
        if "variance_neuron" in state:
            kept["second_moment"] = state["variance_neuron"]
        return kept
    return of_state

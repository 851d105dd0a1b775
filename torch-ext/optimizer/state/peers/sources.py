"""Converters of the groups of other Muons, one for each package.

A converter reads a group and the states of its parameters, and returns the group's options under
this package's names, and a function that converts a state.

[Note: momentum as mean or sum] In this package momentum is a mean, M <- mu M + (1 - mu) G. Some
packages keep a sum, S <- mu S + G. With constant mu since the first step, M = (1 - mu) S.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence

import torch

from ...newton_schulz.coefficients import SETS, Triple
from ...params.errors import shortened
from ...rules.decay import DECOUPLED
from .dion_splits import split_of, with_unscaled_rows
from .facts import EMERGING_REPEAT_LAST, EMERGING_SETS, PEERS, TIMM_SETS

# Keys of Motif's AdamW state -> keys of this package
RENAMED = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}
ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")
DION_RULES = ("muon", "normuon", "adamw")
# For each source: options that change a step, with the values that have a counterpart; the first
# value stands for a missing option
DIONS = {"adjust_lr": ("spectral_norm", "rms_norm", None)}
# timm's adjust_lr_fn -> adjust_lr_fn of this package
TIMM_SCALES = {
    "original": "original",
    "match_rms_adamw": "match_rms_adamw",
    "rms_to_rms": "spectral_norm",
}
TIMMS = {"algo": ("muon",), "scale_eps": (False,), "adjust_lr_fn": tuple(TIMM_SCALES)}
MEGATRONS = {"split_qkv": (False,), "tp_mode": ("duplicated", "distributed")}
NANOCHATS = {"beta2": (None,), "weight_decay": (0,)}
DEEPSPEEDS = {"bias_correction": (True, 1), "amsgrad": (False,), "adam_w_mode": (True, 1)}
MUONIUMS = {"maximize": (False,), "split_sizes": (None,), "amsgrad": (False,)}
# weight_decay_method of Emerging-Optimizers -> (decay, power of lr in the rate of decay)
EMERGING_DECAYS = {"decoupled": ("decoupled", 1), "independent": ("independent", 0)}
EMERGING_DECAYS["palm"] = "lr_squared", 2
# scale_mode of Emerging-Optimizers -> adjust_lr_fn
EMERGING_SCALES = {
    "spectral": "sqrt_max",
    "shape_scaling": "original",
    "unit_rms_norm": "spectral_norm",
}
RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # learning rates in a group
SMALL_EPS = 1e-6  # up to here an absolute eps only avoids a division by a norm of zero

Options = dict  # a group's options under this package's names
OfState = Callable[[dict], dict]  # converts the state of a parameter


def _jordan(where: str, group: dict, own: list[dict], arguments: dict) -> tuple[Options, OfState]:
    """Convert a group of Keller Jordan's Muon."""
    if not group.get("use_muon", True):
        return _adamw(group["betas"], group["eps"]), dict
    _check_dims(where, own, (4,))
    # Constants in Keller Jordan's code, which groups do not hold
    return {
        "use_muon": True,
        "momentum": group["momentum"],
        "nesterov": True,
        "ns_coefficients": "jordan",
        "ns_steps": 5,
        "adjust_lr_fn": "original",
    }, dict


def _motif(where: str, group: dict, own: list[dict], arguments: dict) -> tuple[Options, OfState]:
    """Convert a group of Motif's Muon."""
    if not group["use_muon"]:
        return _adamw(group["adamw_betas"], group["adamw_eps"]), _renamed
    # Without ns_coefficients: those of the loading optimizer stay
    return {
        "use_muon": True,
        "momentum": group["momentum"],
        "nesterov": group["nesterov"],
        "ns_steps": group["ns_steps"],
        "adjust_lr_fn": "match_rms_adamw",
    }, _mean(group["momentum"])


def _dion(where: str, group: dict, own: list[dict], arguments: dict) -> tuple[Options, OfState]:
    """Convert Dion's Muon, NorMuon or AdamW. Raises NotImplementedError for other rules."""
    rule = group["algorithm"]
    if rule not in DION_RULES:
        raise NotImplementedError(
            f"{where} is stepped by {rule!r} of Dion's package; only {DION_RULES} have a "
            "counterpart here"
        )
    decay = "cautious" if group["cautious_wd"] else DECOUPLED
    if rule != "adamw":
        _check_options(where, "dion", group, DIONS)
    else:

        def of_state(state: dict) -> dict:
            """Convert a state of Dion's AdamW."""
            # `step_dev` counts the steps of one parameter; older versions only count the group's
            step = state.get("step_dev", group["step"])
            on = step.device if isinstance(step, torch.Tensor) else "cpu"
            step = torch.as_tensor(step, dtype=torch.float32, device=on)
            return {"step": step, "exp_avg": state["momentum"], "exp_avg_sq": state["variance"]}

        options = _adamw((group["beta1"], group["beta2"]), group["epsilon"])
        return {**options, "decay": decay}, of_state
    _check_dims(where, own, range(3, 10) if group["flatten"] else ())
    _check_eps(where, "dion", "epsilon", group["epsilon"])
    options = {
        "use_muon": True,
        "momentum": group["mu"],
        "nesterov": group["nesterov"],
        # None: no factor
        "adjust_lr_fn": group["adjust_lr"] or 1.0,
        "decay": decay,
    }
    form = split_of(where, group)
    if form is not None:
        options["split"] = form
    if rule == "normuon":
        options["beta2"] = group["muon_beta2"]
    # None: unknown, and the coefficients of the loading optimizer stay
    if arguments["use_polar_express"] is not None:
        express = arguments["use_polar_express"]
        options["ns_coefficients"] = "polar_express_dion" if express else "quintic"
        options["ns_steps"] = 5
    of_state = _mean(group["mu"])
    if form is None or "rows" not in form:
        return options, of_state
    return options, with_unscaled_rows(where, form["rows"], group["adjust_lr"], of_state)


def _emerging(
    where: str, group: dict, own: list[dict], arguments: dict, source: str = "emerging_optimizers"
) -> tuple[Options, OfState]:
    """Convert a group of Emerging-Optimizers' Muon, or, with other `arguments`, of Megatron-LM's.
    Raises ValueError for a wrong argument, NotImplementedError for AdaptiveMuon.
    """
    if any("moment2_buffer" in state for state in own):
        raise NotImplementedError(
            f"{where} is of AdaptiveMuon, which {PEERS[source].title} comes with: its second "
            "moment (moment2_buffer) has no counterpart here"
        )
    method = arguments["weight_decay_method"]
    # Without weight decay the method makes no difference
    if not float(group["weight_decay"]):
        method = "decoupled"
    if method not in EMERGING_DECAYS:
        _refuse(where, source, "weight_decay_method", method, "decoupled")
    decay, power = EMERGING_DECAYS[method]
    kind = arguments["coefficient_type"]
    mode = arguments["scale_mode"]
    _check_one_of("coefficient_type", kind, EMERGING_SETS)
    _check_one_of("scale_mode", mode, EMERGING_SCALES)
    factor = float(arguments["extra_scale_factor"])
    if not 0 < factor < math.inf:
        raise ValueError(
            f"extra_scale_factor={factor} is not allowed: it must be a finite number > 0"
        )
    # 0.2 sqrt(max(R, C)) is match_rms_adamw; any other factor is moved into lr
    matched = mode == "spectral" and factor == 0.2
    steps = arguments["num_ns_steps"]
    return {
        "use_muon": True,
        "momentum": group["momentum"],
        "nesterov": bool(arguments["nesterov"]),
        "adjust_lr_fn": "match_rms_adamw" if matched else EMERGING_SCALES[mode],
        **_coefficients(EMERGING_SETS[kind], steps, cycle=kind not in EMERGING_REPEAT_LAST),
        **_scaled(group, 1.0 if matched else factor, power),
        "decay": decay,
    }, _kept("momentum_buffer")


def _megatron(where: str, group: dict, own: list[dict], arguments: dict) -> tuple[Options, OfState]:
    """Convert a group of Megatron-LM's Muon. Raises ValueError for a group without momentum."""
    if "momentum" not in group:
        raise ValueError(
            f"{where} of this state dict of Megatron-LM has no momentum: it is not its Muon's. "
            "Megatron keeps one state dict for each kind of optimizer; pass Muon's"
        )
    _check_options(where, "megatron", arguments, MEGATRONS, "argument")
    method = "decoupled" if arguments["use_decoupled_weight_decay"] else "l2"
    return _emerging(where, group, own, {**arguments, "weight_decay_method": method}, "megatron")


def _timm(where: str, group: dict, own: list[dict], arguments: dict) -> tuple[Options, OfState]:
    """Convert a group of timm's Muon."""
    fallback = group.get("fallback_lr_scale")
    # Older versions have `adamw_lr`, relative to the learning rate before a schedule
    if fallback is None:
        base = group.get("initial_lr", group["lr"])
        fallback = 1.0 if group.get("adamw_lr") is None or not base else group["adamw_lr"] / base
    if not group["use_muon"]:
        # With nesterov timm steps by NAdamW
        _check_options(where, "timm", group, {"nesterov": (False,)})
        options = {**_adamw(group["betas"], group["eps"]), **_scaled(group, fallback)}
        return options, _kept(*ADAMW_STATE)
    _check_options(where, "timm", group, TIMMS)
    _check_eps(where, "timm", "eps", group["eps"])
    _check_dims(where, own, range(3, 10), f" (conv_mode={group['conv_mode']!r})")
    # The name of a set, a triple, or a list of triples
    triples = group["ns_coefficients"]
    if isinstance(triples, str):
        _check_one_of("ns_coefficients", triples, TIMM_SETS)
        triples = TIMM_SETS[triples]
    triples = [triples] if not isinstance(triples[0], (tuple, list)) else triples
    options = {
        "use_muon": True,
        "momentum": group["momentum"],
        "nesterov": bool(group["nesterov"]),
        "adjust_lr_fn": TIMM_SCALES[group["adjust_lr_fn"]],
        **_coefficients(triples, group["ns_steps"], group["safety_factor"]),
    }
    return options, _kept("momentum_buffer")


def _nanochat(where: str, group: dict, own: list[dict], arguments: dict) -> tuple[Options, OfState]:
    """Convert a group of nanochat: AdamW of MuonAdamW, the first version of Muon, or the second
    version (with beta2) without variance. Raises NotImplementedError for Muon of MuonAdamW.
    """
    if group.get("kind", "muon") == "adamw":
        return _adamw(group["betas"], group["eps"]), _kept(*ADAMW_STATE)
    if "kind" in group or "nesterov" not in group:
        raise NotImplementedError(
            f"{where} is of nanochat's MuonAdamW, whose Muon evens rows, rescales the update, "
            "divides by the variance of rows or columns and decays cautiously, and keeps the "
            "momenta of a group as one tensor: it has no counterpart here"
        )
    if "beta2" in group:
        _check_options(where, "nanochat", group, NANOCHATS)
        # The second version takes 5 steps at most, and divides the norm by 1.02, as this set does
        steps = min(group["ns_steps"], 5)
        coefficients = _coefficients(SETS["polar_express_dion"], steps)
    else:
        coefficients = {"ns_coefficients": "jordan", "ns_steps": group["ns_steps"]}
    decay = {} if "weight_decay" in group else {"weight_decay": 0.0}
    return {
        "use_muon": True,
        "momentum": group["momentum"],
        "nesterov": bool(group["nesterov"]),
        "adjust_lr_fn": "original",
        **coefficients,
        **decay,
    }, _kept("momentum_buffer")


def _modded(where: str, group: dict, own: list[dict], arguments: dict) -> tuple[Options, OfState]:
    """Raise NotImplementedError: modded-nanogpt's NorMuon has no counterpart."""
    raise NotImplementedError(
        f"{where} is of {PEERS['modded_nanogpt'].title}, which divides by the variance of rows or "
        "columns, decays cautiously and keeps the momenta of a group in the group: it has no "
        "counterpart here"
    )


def _deepspeed(
    where: str, group: dict, own: list[dict], arguments: dict
) -> tuple[Options, OfState]:
    """Convert a group of DeepSpeed's Muon. Raises NotImplementedError for state of ZeRO."""
    if not group.get("use_muon", True):
        _check_options(where, "deepspeed", {**arguments, **group}, DEEPSPEEDS)
        return _adamw(group["betas"], group["eps"]), _kept(*ADAMW_STATE)
    if arguments["muon_num_heads"] is not None:
        _refuse(where, "deepspeed", "muon_num_heads", arguments["muon_num_heads"], None)
    # Momentum of a matrix is at least 2-D; ZeRO's partitions are 1-D
    if any(dims == 1 for dims in _dims(own)):
        raise NotImplementedError(
            f"{where} is of DeepSpeed's Muon under ZeRO, which keeps flat partitions of the "
            "momentum, not matrices: it has no counterpart here"
        )
    return _jordan(where, group, own, arguments)


def _muonium(where: str, group: dict, own: list[dict], arguments: dict) -> tuple[Options, OfState]:
    """Convert muonium's Muon, NorMuon or AdamW. Raises NotImplementedError for other rules."""
    rule = group["algorithm"]
    wd = float(group["wd"])
    lr = float(group["lr"])
    _check_options(where, "muonium", group, MUONIUMS)
    if not group["use_muon"]:
        if wd:
            _check_options(where, "muonium", group, {"decoupled_weight_decay": (True,)})
        options = {**_adamw(group["betas"], group["eps"]), "lr": lr, "weight_decay": wd}
        return options, _kept(*ADAMW_STATE)
    if rule not in ("muon", "normuon"):
        raise NotImplementedError(
            f"{where} is stepped by {rule!r} of muonium; only 'muon' and 'normuon' have a "
            "counterpart here"
        )
    _check_dims(where, own, range(3, 10) if group["flatten"] else ())
    # muonium's Muon scales weight decay by the shape of each matrix
    if wd:
        wd *= _decay_ratio(where, group, own)
    express = group["orthogonalization_strategy"] == "polar_express"
    options = {
        "use_muon": True,
        "lr": lr,
        "weight_decay": wd,
        "momentum": group["momentum"],
        "nesterov": bool(group["nesterov"]),
        "adjust_lr_fn": "original",
        **_coefficients(SETS["polar_express_dion" if express else "jordan"], group["ns_steps"]),
    }
    form = split_of(where, group)
    if form is not None:
        options["split"] = form
    if rule == "normuon":
        options["beta2"] = group["muon_beta2"]
    return options, _mean(group["momentum"])


def _decay_ratio(where: str, group: dict, own: list[dict]) -> float:
    """Return the factor sqrt(max(1, R / C)) by which muonium multiplies weight decay. Raises
    NotImplementedError unless equal for all matrices of the group.
    """
    _check_options(where, "muonium", group, {"use_cautious_wd": (False,)})
    ratios = {float(state["lr_ratio"]) for state in own}
    if len(ratios) != 1:
        raise NotImplementedError(
            f"{where} has wd={group['wd']}, and muonium's Muon multiplies it by sqrt(max(1, R / "
            "C)) of each matrix, here by numbers that differ or are not known: one weight_decay "
            "cannot say that. Set wd=0 to take the state without it"
        )
    return ratios.pop()


# Source -> converter of a group. Arguments: name of the group in messages, group, states of its
# parameters, constructor arguments. Result: options, and the function that converts a state.
# Raises NotImplementedError for a group or an option without counterpart.
CONVERTERS: dict[str, Callable] = {
    "keller_jordan": _jordan,
    "motif": _motif,
    "dion": _dion,
    "emerging_optimizers": _emerging,
    "megatron": _megatron,
    "timm": _timm,
    "nanochat": _nanochat,
    "modded_nanogpt": _modded,
    "deepspeed": _deepspeed,
    "muonium": _muonium,
}


def _refuse(
    where: str, source: str, key: str, value: object, instead: object, kind: str = "option"
) -> None:
    """Raise NotImplementedError for an option without counterpart. `instead`: the value to set for
    going on without the option.
    """
    # Where the user can change the value
    how = "in the state dict" if kind == "option" else "as an argument"
    raise NotImplementedError(
        f"{where} has {key}={shortened(repr(value))}, an {kind} of {PEERS[source].title} that has "
        f"no counterpart here: to take the state without it, set {key}={instead!r} {how}"
    )


def _check_options(
    where: str, source: str, group: dict, allowed: dict[str, tuple], kind: str = "option"
) -> None:
    """Raise NotImplementedError for a present option with a value not in `allowed`."""
    for key, values in allowed.items():
        if group.get(key, values[0]) not in values:
            _refuse(where, source, key, group[key], values[0], kind)


def _check_one_of(key: str, value: object, allowed: Iterable[str]) -> None:
    """Raise ValueError unless `value` is in `allowed`."""
    if value not in allowed:
        raise ValueError(
            f"{key}={shortened(repr(value))} is not known: it must be one of {', '.join(allowed)}"
        )


def _check_eps(where: str, source: str, key: str, value: object) -> None:
    """Raise NotImplementedError for an eps large enough to damp updates: the source's eps is
    absolute, this package's is relative.
    """
    if float(value) > SMALL_EPS:
        _refuse(where, source, key, value, SMALL_EPS)


def _dims(own: list[dict]) -> list[int]:
    """Return the number of dims of each momentum."""
    return [value.ndim for state in own for key, value in state.items() if "momentum" in key]


def _check_dims(where: str, own: list[dict], flattened: Container[int], how: str = "") -> None:
    """Raise NotImplementedError for momenta with dims that the source flattens into matrices."""
    for dims in _dims(own):
        if dims in flattened:
            raise NotImplementedError(
                f"{where} has {dims}-D parameters, which were stepped as matrices of another "
                f"shape{how}; here they are stacks of matrices: make the parameters 2-D, or step "
                "them by AdamW"
            )


def _coefficients(
    triples: Sequence[Triple], steps: int, divisor: float = 1.0, cycle: bool = False
) -> Options:
    """Return the options for the first `steps` triples; after the last triple start again (`cycle`)
    or repeat the last. `divisor`: a factor on the norm, absorbed in the first triple.
    """
    chosen: list[Triple] = [
        tuple(triples[i % len(triples) if cycle else min(i, len(triples) - 1)])
        for i in range(steps)
    ]
    # p(x / d) = (a / d) x + (b / d^3) x^3 + (c / d^5) x^5
    a, b, c = chosen[0]
    chosen[0] = a / divisor, b / divisor**3, c / divisor**5
    # A name if one of the sets has these triples: reports and saved groups stay readable
    is_jordan = set(chosen) == set(SETS["jordan"])
    names = [name for name in ("quintic", "polar_express_dion") if SETS[name] == tuple(chosen)]
    name = "jordan" if is_jordan else names[0] if names else tuple(chosen)
    return {"ns_coefficients": name, "ns_steps": steps}


def _scaled(group: dict, factor: float, power: int = 0) -> Options:
    """Return the learning rates of a group times `factor`, and weight_decay / factor^power, so that
    lr^power weight_decay stays.
    """
    if factor == 1:
        return {}
    weight_decay = {"weight_decay": group["weight_decay"] / factor**power} if power else {}
    return {**{key: group[key] * factor for key in RATES if key in group}, **weight_decay}


def _adamw(betas: Iterable[float], eps: float) -> Options:
    """Return the options of an AdamW group."""
    return {"use_muon": False, "betas": tuple(betas), "eps": eps}


def _kept(*keys: str) -> OfState:
    """Return a function of states that keeps only `keys`."""
    return lambda state: {key: state[key] for key in keys if key in state}


def _renamed(state: dict) -> dict:
    """Return a state with this package's keys for AdamW."""
    return {
        RENAMED.get(key, key): value for key, value in state.items() if key in ("step", *RENAMED)
    }


def _mean(mu: object) -> OfState:
    """Return a function of states that turns a momentum sum into a mean, see [Note: momentum as
    mean or sum]. Computed in fp32, since the state's dtype may have 8 bits of precision.
    """

    def of_state(state: dict) -> dict:
        """Convert a state with a momentum sum, and Dion's NorMuon state `variance_neuron`."""
        total = total_of(state)
        wide = total.to(torch.promote_types(total.dtype, torch.float32))
        converted = {"momentum_buffer": wide * (1 - float(mu))}
        if "variance_neuron" in state:
            converted["second_moment"] = state["variance_neuron"]
        return converted

    return of_state


def total_of(state: dict) -> torch.Tensor:
    """Return the momentum sum in the state of a parameter."""
    # Exactly one of the two names is there
    (total,) = (state[key] for key in ("momentum_buffer", "momentum") if key in state)
    return total

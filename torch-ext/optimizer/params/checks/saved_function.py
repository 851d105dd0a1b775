"""A function as `adjust_lr_fn` in state dicts, which hold a text in its place."""

from __future__ import annotations

FUNCTION = "function"  # in a state dict, in place of a function as adjust_lr_fn


def without_function(group: dict) -> dict:
    """Return a group with FUNCTION in place of a function as adjust_lr_fn: torch.save cannot write
    a lambda, and torch.load would have to import the function.
    """
    return {**group, "adjust_lr_fn": FUNCTION} if callable(group.get("adjust_lr_fn")) else group


def without_functions(state_dict: dict) -> dict:
    """Return `state_dict` with `without_function` of each group."""
    return {**state_dict, "param_groups": list(map(without_function, state_dict["param_groups"]))}


def has_function(saved: dict) -> bool:
    """Return whether the options `saved` of a group hold FUNCTION as adjust_lr_fn."""
    scale = saved.get("adjust_lr_fn")
    return isinstance(scale, str) and scale == FUNCTION


def with_function(number: int, saved: dict, own: dict) -> dict:
    """Return the options `saved` with the function of the own group `number` in place of FUNCTION.
    Raises ValueError if the own group, one of Muon, has none.
    """
    if not has_function(saved):
        return saved
    if own["use_muon"] and not callable(own["adjust_lr_fn"]):
        raise ValueError(
            f"parameter group {number} was saved with a function as adjust_lr_fn, which no "
            f"checkpoint holds, but has adjust_lr_fn={own['adjust_lr_fn']!r} here: pass the "
            "function to the optimizer, or set adjust_lr_fn in the group of the state dict"
        )
    return {**saved, "adjust_lr_fn": own["adjust_lr_fn"]}

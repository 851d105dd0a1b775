"""Numbers of groups that learning-rate schedulers write: beta1 of AdamW groups, and tensors.

`Beta1` keeps `momentum` and `betas[0]` of an AdamW group, or of Lion, equal. Schedulers like
OneCycleLR cycle `momentum` in every group of an optimizer with a default for `momentum`; in groups
with betas, beta1 must follow. `unshare_tensors` gives each group separate tensors. No function
reads a parameter.
"""

from __future__ import annotations

import math

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..params.errors import shortened
from .elementwise import DEFAULT, ELEMENTWISE
from .rule import number_of


class Beta1:
    """Keeps `momentum` and `betas[0]` of AdamW groups equal. The last common value is remembered,
    to tell a change of `momentum` from a change of `betas`.
    """

    def __init__(self) -> None:
        # id of a group -> (the group, its last beta1). The group is kept alive, so that no new
        # group gets its id
        self.last: dict[int, tuple[dict, float]] = {}

    def follow(self, groups: list[dict]) -> None:
        """Set `momentum` and `betas` of each AdamW group to the value that changed, in place.

        `betas` count if both changed, or if the group is new. A value that is no number (a text,
        None, a tensor of several elements) stays unchanged, and so does its counterpart: the next
        step refuses the value with the name of the group. Raises nothing, since `state_dict()` and
        copies call this method as well.
        """
        for group in groups:
            betas = group.get("betas")
            if group["use_muon"] or not isinstance(betas, (tuple, list)) or len(betas) != 2:
                continue
            if not has_betas(group):
                continue
            _, last = self.last.get(id(group), (None, None))
            beta1 = number_of(betas[0])
            momentum = number_of(group.get("momentum"))
            # A schedule has set the momentum: the two were equal after the last call
            is_set = beta1 == last != momentum
            if math.isnan(beta1) or is_set and math.isnan(momentum):
                continue
            if is_set:
                beta1 = momentum
                group["betas"] = betas = (momentum, betas[1])
            group["momentum"] = betas[0]
            if beta1 != last:
                self.last[id(group)] = group, beta1

    def adopt(self, groups: list[dict]) -> None:
        """Remember the groups of a copy in which `momentum` and `betas[0]` are equal: the next
        change of either counts.
        """
        for group in groups:
            if not group["use_muon"] and has_betas(group) and isinstance(group.get("betas"), tuple):
                beta1 = number_of(group["betas"][0])
                if beta1 == number_of(group.get("momentum")):
                    self.last[id(group)] = group, beta1

    def forget(self) -> None:
        """Forget all groups: after loading a state dict, groups are new, and `betas` count."""
        self.last = {}


def has_betas(group: dict) -> bool:
    """Whether the rule of a group with use_muon=False reads `betas`, not `momentum`. A group may
    have betas from an earlier rule.
    """
    rule = ELEMENTWISE.get(group.get("rule") or DEFAULT)
    return rule is None or "betas" in rule.options


def check_momentum(group: dict, given: object, default: object) -> None:
    """Raise ValueError if a new group whose rule reads betas was given another `momentum` than
    beta1.

    `given`: `momentum` of the group before defaults were filled in, None if absent. The default of
    the optimizer is accepted without effect, since wrappers copy all arguments into every group.
    """
    if not has_betas(group):
        return
    if given is not None and given != default and given != group["betas"][0]:
        raise ValueError(
            f"momentum={shortened(repr(given))} in a group of {group.get('rule') or 'AdamW'}, "
            f"whose betas are {group['betas']}: momentum is beta1 there; set betas, and remove "
            "momentum"
        )


def unshare_tensors(groups: list[dict]) -> None:
    """Give each group separate tensors for lr and further numbers, in place.

    A scheduler writes into a tensor in place, and torch puts one default tensor into all groups.
    The first group keeps a shared tensor, later groups get copies.
    """
    seen = set()
    for group in groups:
        tensors = {key: value for key, value in group.items() if isinstance(value, torch.Tensor)}
        for key, value in tensors.items():
            # By address: two tensor objects may share memory. Fake tensors have no address
            address = 0 if isinstance(value, FakeTensor) else value.data_ptr()
            group[key] = value.detach().clone() if (address or id(value)) in seen else value
            seen.add(address or id(value))

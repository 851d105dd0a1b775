"""Numbers of groups that schedules change through another key, or share: beta1 of AdamW groups,
tensors.

Decides: that `momentum` of an AdamW group is its beta1, since schedulers such as OneCycleLR cycle
`momentum` in every group of an optimizer that has a default of that name; that no two groups have
one tensor. Knows no parameter.
"""

from __future__ import annotations

import math

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..params.errors import shortened
from .rule import number_of


class Beta1:
    """What `momentum` and `betas` of AdamW groups were when they were last made equal."""

    def __init__(self):
        self.last = {}  # id of a group -> (the group, its beta1)

    def follow(self, groups: list[dict]) -> None:
        """Make `momentum` and `betas[0]` of each AdamW group equal, after the one that has changed.

        Where both have changed, or the group is new, `betas` count. A value that is no number (a
        text, None, a tensor of several elements) stays as it is, and the other one too: the next
        step refuses it with the group's name. Raises nothing, since `state_dict()` and copies need
        the numbers as well.
        """
        for group in groups:
            betas = group.get("betas")
            if group["use_muon"] or not isinstance(betas, (tuple, list)) or len(betas) != 2:
                continue
            _, last = self.last.get(id(group), (None, None))
            beta1 = number_of(betas[0])
            momentum = number_of(group.get("momentum"))
            is_set = beta1 == last != momentum  # the momentum, since both were made equal
            if math.isnan(beta1) or is_set and math.isnan(momentum):
                continue
            if is_set:
                beta1 = momentum
                group["betas"] = betas = (momentum, betas[1])
            group["momentum"] = betas[0]
            if beta1 != last:
                self.last[id(group)] = group, beta1

    def forget(self) -> None:
        """Let all groups go, and take those that come for new ones: a load makes other groups."""
        self.last = {}


def check_momentum(group: dict, given: object, default: object) -> None:
    """Raise ValueError for an AdamW group that was given a `momentum` of its own, other than its
    beta1.

    given: the value in the group before defaults were filled in, None: there was none. The
    optimizer's own default is taken, since wrappers copy all arguments into every group; it has no
    effect.
    """
    if given is not None and given != default and given != group["betas"][0]:
        raise ValueError(
            f"momentum={shortened(repr(given))} in a group of AdamW, whose betas are "
            f"{group['betas']}: "
            "momentum is beta1 there; set betas, and remove momentum"
        )


def part_tensors(groups: list[dict]) -> None:
    """Give each group tensors of its own for lr and other numbers: a scheduler writes into them,
    and torch gives one default to all groups. The first group that has a tensor keeps it, the
    others get copies.
    """
    seen = set()
    for group in groups:
        tensors = {key: value for key, value in group.items() if isinstance(value, torch.Tensor)}
        for key, value in tensors.items():
            address = 0 if isinstance(value, FakeTensor) else value.data_ptr()
            group[key] = value.detach().clone() if (address or id(value)) in seen else value
            seen.add(address or id(value))

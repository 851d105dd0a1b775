"""Forms of weight decay, by the key `decay` of any group.

With O the update (scale O is subtracted), W0 the weights before the first step, and lr and
weight_decay of the group:

| decay         | W becomes                                     | source                        |
|---------------|-----------------------------------------------|-------------------------------|
| `decoupled`   | (1 - lr weight_decay) W - lr scale O          | arXiv 1711.05101              |
| `cautious`    | as above where O W >= 0, else W - lr scale O  | arXiv 2510.12402              |
| `independent` | (1 - weight_decay) W - lr scale O             | Emerging-Optimizers           |
| `lr_squared`  | (1 - lr^2 weight_decay) W - lr scale O        | "palm" of Emerging-Optimizers |
| `initial`     | W - lr weight_decay (W - W0) - lr scale O     | L2-SP, arXiv 1802.01483       |

AdamC (arXiv 2506.02285) decays by lr^2 / lr_max weight_decay: `lr_squared` with weight_decay /
lr_max. All forms are elementwise, from the old W. Matrices decay in
kernels/elementwise/weight_update.py, other parameters in elementwise.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..kernels.elementwise.weight_update import ALL, CAUTIOUS, TO_INITIAL

# decay -> which elements decay, and towards which value
DECAYS = {
    "decoupled": ALL,
    "cautious": CAUTIOUS,
    "independent": ALL,
    "initial": TO_INITIAL,
    "lr_squared": ALL,
}
DECOUPLED = "decoupled"  # the default: a group without the key
INITIAL_KEY = "initial_weight"  # state with W0


def form_of(group: Mapping[str, Any]) -> int:
    """Return the form of decay that launches are bound for: ALL, CAUTIOUS or TO_INITIAL."""
    return DECAYS[group.get("decay", DECOUPLED)]


def rate_of(group: Mapping[str, Any]) -> float:
    """Return the rate of decay of a step, by which W shrinks: lr weight_decay of `decoupled`."""
    lr = float(group["lr"])
    decay = group.get("decay", DECOUPLED)
    factor = {"independent": 1.0, "lr_squared": lr * lr}.get(decay, lr)
    return factor * float(group["weight_decay"])

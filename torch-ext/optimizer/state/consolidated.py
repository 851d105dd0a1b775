"""State that owners keep, gathered on one rank: what `state_dict()` returns after consolidating.

Decides how long the gathered state is current, and what the ranks return that did not get it. The
collective part is in owner_state.py.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..communication.owner_state import ADVICE, gather, replaced_state
from ..communication.store_barrier import wait_for_all
from ..params import errors
from ..rules.rule import ROW_SHARDED_KEYS

# Key of the state dict of a rank that did not get the state; its value is the global rank that did.
ELSEWHERE = "consolidated_on_rank"


@dataclass(frozen=True)
class Consolidated:
    """`whole`: {parameter: {key: tensor on the CPU}}; empty where `elsewhere`, the global rank that
    has it, is not None. `seen`: the `_fingerprint` of the state from which it was gathered.
    """

    whole: dict
    elsewhere: int | None
    seen: dict

    def is_current(self, named: dict, state: dict) -> bool:
        """Whether the optimizer still has the parameters `named` and the tensors that were
        gathered. A step drops this object: its kernels do not count in the versions of tensors.
        """
        now = _fingerprint(named, state)
        return now.keys() == self.seen.keys() and all(
            version == self.seen[entry][1] and reference() is self.seen[entry][0]()
            for entry, (reference, version) in now.items()
        )

    def state_dict(self, optimizer: torch.optim.Optimizer, named: dict) -> dict:
        """The whole state dict, without communication. Where the state is elsewhere, a state dict
        without state, which `load_state_dict` refuses.
        """
        state = optimizer.state
        shown = {
            param: {**state[param], **self.whole.get(param, {})}
            for param in named
            if param in state
        }
        with replaced_state(optimizer, shown if self.elsewhere is None else {}):
            found = torch.optim.Optimizer.state_dict(optimizer)
        return found if self.elsewhere is None else {**found, ELSEWHERE: self.elsewhere}


def consolidate(state: dict, named: dict, group: dist.ProcessGroup, to: int | None) -> Consolidated:
    """Gather the state on rank `to` of the group, None: on every rank. Collective. Raises
    RuntimeError, before anything is sent, if not all ranks of the group call it with the same `to`.
    """
    call = f"consolidate_state_dict(to={to})"
    with errors.during(f"{call}, which all ranks of process_group call together"):
        wait_for_all(group, call, ADVICE)
        whole = gather(state, named, group, to)
    elsewhere = None if to in (None, group.rank()) else dist.get_global_rank(group, to)
    return Consolidated(whole, elsewhere, _fingerprint(named, state))


def check_target(to: int | None, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError unless `to` is a rank of the group or None. Without a group, any rank is."""
    if to is None or type(to) is int and 0 <= to and (group is None or to < group.size()):
        return
    allowed = "a rank of process_group" + ("" if group is None else f", 0 to {group.size() - 1}")
    raise ValueError(f"to={to!r} is not allowed: it must be {allowed}, or None for every rank")


def refuse_elsewhere(state_dict: dict) -> None:
    """Raise ValueError for the state dict of a rank that the state was not gathered on."""
    if ELSEWHERE in state_dict:
        rank = state_dict[ELSEWHERE]
        raise ValueError(
            "this state dict holds no state: consolidate_state_dict() had gathered it "
            f"on rank {rank}. Load, on all ranks, what state_dict() returned there"
        )


def _fingerprint(named: dict, state: dict) -> dict:
    """{(id of a parameter, key): (reference to a tensor of its state, its version)}; and an entry
    for the parameter itself, with key None.
    """
    found = {(id(param), None): (weakref.ref(param), 0) for param in named}
    for param in named:
        for key in ROW_SHARDED_KEYS:
            if isinstance(value := state.get(param, {}).get(key), torch.Tensor):
                version = 0 if value.is_inference() else value._version
                found[id(param), key] = (weakref.ref(value), version)
    return found

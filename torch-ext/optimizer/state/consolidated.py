"""State kept by owners, gathered on a rank: the content of `state_dict()` after
`consolidate_state_dict()`.

`consolidate` gathers (collective, by communication/owner_state.py). `Consolidated` knows how long
the gathered state is current, and what ranks without the state return.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..communication.owner_state import ADVICE, Shared, call_with_keys, gather
from ..communication.store_barrier import wait_for_all
from ..params import errors
from ..rules.rule import row_sharded_keys

# Key in the state dict of a rank without the gathered state -> global rank with the gathered state
ELSEWHERE = "consolidated_on_rank"

NO_REFERENCE = type(None)  # called as a weak reference is, it returns None


@dataclass(frozen=True)
class Consolidated:
    """Gathered state of an optimizer.

    `whole`: {parameter: {key: tensor on the CPU}}. `elsewhere`: global rank with the gathered state
    if this rank has none, else None; `whole` is then empty. `seen`: `_fingerprint` of the state at
    the gather.
    """

    whole: dict
    elsewhere: int | None
    seen: dict

    def is_current(self, named: dict, state: dict, completed: dict) -> bool:
        """Return whether the optimizer still has the parameters `named` and the gathered tensors,
        unchanged, and would begin the same state anew. `completed`: as in `consolidate`. A step
        must drop the object itself: kernels do not change the version counters of tensors.
        """
        current = _fingerprint(named, state, completed)
        # Objects are compared too: an id may belong to a new object after the old one died
        return current.keys() == self.seen.keys() and all(
            version == self.seen[entry][1] and reference() is self.seen[entry][0]()
            for entry, (reference, version) in current.items()
        )

    def whole_state(self, named: dict, state: dict) -> dict:
        """Return the optimizer state with whole tensors; {} on a rank without the gathered state.
        No communication.
        """
        if self.elsewhere is not None:
            return {}
        return {
            param: {**state[param], **self.whole.get(param, {})}
            for param in named
            if param in state
        }

    def mark(self, state_dict: dict) -> dict:
        """Return `state_dict`; on a rank without the gathered state with a further key, for which
        `load_state_dict` refuses the state dict.
        """
        return state_dict if self.elsewhere is None else {**state_dict, ELSEWHERE: self.elsewhere}


def consolidate(
    state: dict, completed: dict, named: dict, shared: Sequence[Shared], to: int | None
) -> Consolidated:
    """Gather the state on rank `to` of the process group, None: on every rank. Collective. Raises
    RuntimeError before any collective if not all ranks of a group call with an equal `to`.

    `completed`: of `create.with_missing_keys`. `named`: {parameter: name} of all parameters.
    `shared`: as in `state_for_checkpoint`; a single entry unless `to` is None.
    """
    call = f"consolidate_state_dict(to={to})"
    with errors.during(f"{call}, which all ranks of process_group call together"):
        # A rank that calls alone, or with another `to`, gets an error before the first collective
        for group, members in shared:
            wait_for_all(group, call_with_keys(call, members), ADVICE)
        whole = {}
        for group, members in shared:
            whole |= gather(completed, members, group, to)
    group = shared[0][0]
    elsewhere = None if to in (None, group.rank()) else dist.get_global_rank(group, to)
    return Consolidated(whole, elsewhere, _fingerprint(named, state, completed))


def check_target(to: int | None, group: dist.ProcessGroup | None, is_common: bool = True) -> None:
    """Raise ValueError unless `to` is a rank of the group or None. Without a group every rank
    number is valid. `is_common`: all plain parameters are in the process group; else `to` must be
    None.
    """
    if to is not None and not is_common:
        raise ValueError(
            f"to={to!r} is not allowed where parameter groups have several process groups, or "
            "process_group=None: ranks hold different parameters, and no rank has the state of "
            "all. Pass to=None on all ranks, and let every rank save its own state_dict(), or use "
            "torch.distributed.checkpoint"
        )
    if to is None or type(to) is int and 0 <= to and (group is None or to < group.size()):
        return
    allowed = "a rank of process_group" + ("" if group is None else f", 0 to {group.size() - 1}")
    raise ValueError(f"to={to!r} is not allowed: it must be {allowed}, or None for every rank")


def refuse_elsewhere(state_dict: dict) -> None:
    """Raise ValueError for the state dict of a rank without the gathered state."""
    if ELSEWHERE in state_dict:
        rank = state_dict[ELSEWHERE]
        raise ValueError(
            "this state dict holds no state: consolidate_state_dict() had gathered it "
            f"on rank {rank}. Load, on all ranks, what state_dict() returned there"
        )


def _fingerprint(named: dict, state: dict, completed: dict) -> dict:
    """Return {(id of a parameter, key): (weak reference to the state tensor, version counter)}, and
    an entry with key None for the parameter itself. Tensors that only `completed` has, which is
    made for each call, have no reference, and shape and dtype in place of the counter.
    """
    found = {(id(param), None): (weakref.ref(param), 0) for param in named}
    for param in named:
        for key in row_sharded_keys():
            value = completed.get(param, {}).get(key)
            if isinstance(value, torch.Tensor) and value is not state[param].get(key):
                found[id(param), key] = NO_REFERENCE, (value.shape, value.dtype)
            elif isinstance(value, torch.Tensor):
                # Tensors made in inference mode have no version counter
                version = 0 if value.is_inference() else value._version
                found[id(param), key] = (weakref.ref(value), version)
    return found

"""State that a new plan wants at another rank: where gradients come unreduced, only the owner of a parameter keeps it.

Decides: who has the state, who gets it, and when it is lost. Must not know: why the plan is another one (parameters
frozen or thawed, groups added, a full state loaded on every rank).
"""
from __future__ import annotations

import torch
import torch.distributed as dist

from . import debug
from .groups import name_in
from .layout import this_rank

KEYS = ("momentum_buffer", "second_moment")


def move_state(plans, state, groups) -> None:
    """Bring the state of matrices to their owners. Collective, right after the ranks agreed on the plans.

    Raises RuntimeError where no rank has the state of a parameter.
    """
    for plan in plans:
        buckets = [b for b, _ in plan.shares or () if b.route == "reduce"]
        owners = {m.param: owner for b in buckets for m, owner in zip(b.matrices, b.owners)}
        if owners:
            with debug.during("the move of state to new owners"):
                _bring(plan, sorted(owners.items()), state, groups.of(buckets[0].ranks))


def _bring(plan, owners, state, group) -> None:
    states = [state[plan.params[number]] for number, _ in owners]
    device = states[0][KEYS[0]].device
    mine = torch.tensor([_whole(s, plan.params[number]) for s, (number, _) in zip(states, owners)], device=device)
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(theirs, mine, group=group)
    for (number, owner), own, column in zip(owners, states, torch.stack(theirs).T.tolist()):
        holders = [rank for rank, has in zip(dist.get_process_group_ranks(group), column) if has]
        param = plan.params[number]
        if not holders:
            raise RuntimeError(f"no rank has the state of parameter {name_in(plan.group, param)} any more: its owner "
                               "is gone; load a checkpoint (load_state_dict)")
        if owner not in holders:
            _send(own, param, holders[0], owner, group)
        elif this_rank() != owner:
            _drop(own)


def _whole(own, param) -> bool:
    """Whether a rank keeps the state of all of a parameter; of one without elements, every rank does."""
    return own[KEYS[0]].shape == param.shape


def _send(own, param, holder, owner, group) -> None:
    """From one rank to the owner, through all: this happens once, and one parameter at a time."""
    for key in [key for key in KEYS if key in own]:
        shape = (*param.shape[:-1], 1) if key == "second_moment" else param.shape
        value = own[key].contiguous() if this_rank() == holder else own[key].new_empty(shape)
        dist.broadcast(value, holder, group=group)
        own[key] = value
    if this_rank() != owner:
        _drop(own)


def _drop(own) -> None:
    for key in [key for key in KEYS if key in own]:
        own[key] = own[key][:0].clone()

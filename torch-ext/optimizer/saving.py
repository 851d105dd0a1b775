"""The optimizer's state as others see it: state dicts, loading, copies and pickles.

Decides: when an optimizer's state may be read, and what a copy takes along. Must not know: how a step goes; what a
loaded state has to be is said in loaded.py.
"""
from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from .consolidated import check_target, consolidate
from .late import Returning, settled
from .loaded import Loading, called_by_checkpoint
from .names import names_in
from .owned import presented
from .settle import complete_state, inherit, lasting, warn_torn


class Saving(Returning):
    """An optimizer that is saved and loaded on any layout."""
    @property
    def _torn(self) -> bool:
        """Whether a step failed half-way."""
        return self._half_way or self._early.failed

    def _hand_over(self) -> None:
        """Give state of parameters that were replaced to those in their place. Without state no
        parameter is kept in mind: who shards a model next wants the memory of the whole ones back.
        """
        members = inherit(self._members, self.param_groups, self.state)
        self._members = members if self.state else ()

    @settled
    def init_state(self) -> None:
        """Create zero state of every parameter that requires a gradient and has none: before the
        first step, for code that loads into the state that is there. Without a step, a plan or
        communication; call it on all ranks, once the model is sharded. RuntimeError while buckets
        have left during backward.
        """
        self._early.refuse("init_state")
        self._hand_over()
        self._find_world()
        with lasting():
            complete_state(self.param_groups, self.state, self._options)
        self._hand_over()

    @settled
    def state_dict(self) -> dict:
        """As in torch. With shard_state or unreduced gradients collective over process_group, of
        which each rank has a part of the state: it comes as DTensors cut by rows, for any layout.
        Raises RuntimeError, before anything is sent, if not all of these ranks call it. After
        consolidate_state_dict, until the next step, it asks no other rank. Called by
        torch.distributed.checkpoint, it creates what state there is none of (`init_state`). Warns
        after a step that failed half-way.
        """
        self._judge_state()
        self._beta1.follow(self.param_groups)
        self._hand_over()
        create = called_by_checkpoint() and not self._torn and not self._early.begun
        if not self._options.owner_keeps_state:
            if create:
                self.init_state()
            return super().state_dict()
        named = self._named()
        gathered = None if called_by_checkpoint() else self._consolidated  # it saves all ranks' parts
        if gathered is not None and gathered.is_current(named, self.state):
            return gathered.state_dict(self, named)
        self._find_world()
        with presented(self, named, self._options.process_group, self.init_state if create else None):
            return super().state_dict()

    @settled
    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gather the state that owners keep (shard_state, unreduced gradients) in the CPU memory of
        rank `to` of process_group, None: of every rank. One rank can then save it alone.

        Collective over process_group. Until the next step, load_state_dict or add_param_group,
        `state_dict()` returns whole tensors on rank `to`, without communication; on the others it
        returns a state dict without state, which load_state_dict refuses. Where owners keep no
        state this does nothing: state_dict() asks no other rank there. Raises ValueError if `to` is
        no rank of process_group, RuntimeError, before anything is sent, if not all ranks call it
        alike. Warns after a step that failed half-way.
        """
        check_target(to, self._options.process_group if self._options.owner_keeps_state else None)
        self._judge_state()
        if not self._options.owner_keeps_state:
            return
        self._find_world()
        self._consolidated = None  # should it fail
        group = self._options.process_group
        self._consolidated = consolidate(self.state, self._named(), group, to)

    def _judge_state(self) -> None:
        """Before the state is read: warn if a step has torn it, raise if gradients changed after they
        had left.
        """
        if not warn_torn(self._torn):
            self._early.judge()

    def _named(self) -> dict:
        """{parameter: its name}."""
        return {p: name for group in self.param_groups for p, name in names_in(group).items()}

    @settled
    def load_state_dict(self, state_dict) -> None:
        """As in torch, from any layout: tensors that lie otherwise than the parameters are moved, and get the dtype of
        `state_dtype`. What the saved groups lack (those of torch.optim.Muon or AdamW, or of an older version) stays
        this optimizer's own. State goes by name where all groups of both sides have the same
        `param_names`, also in other groups; else by position. Raises ValueError, before anything is
        changed, for state of another shape or kind.
        """
        self._half_way = self._half_way or self._early.begun  # should loading fail
        self._early.drain()
        self._find_world()
        with lasting(), Loading(self.param_groups, self._options).inside(self):
            super().load_state_dict(state_dict)
        self._beta1.forget()
        self._take_groups()
        self._half_way, self._consolidated = False, None
        if self._options.overlap_backward:  # not all ranks may have sent alike over these
            self._process_groups.release()
            self._process_groups = None
        self._forget()
        self._members = ()
        self._hand_over()
        self._unbound = "after load_state_dict(), which drops the plan"

    @settled
    def __getstate__(self):
        self._beta1.follow(self.param_groups)
        options = replace(self._options, process_group=getattr(self._options.process_group, "group_name", None))
        return {**super().__getstate__(), "_options": options, "_adamw": self._adamw, "_skipped": self._skipped,
                "_half_way": self._torn, "_is_world": self._is_world}

    def __setstate__(self, state) -> None:
        if "_itself" not in vars(self):  # a copy, for which `__init__` has not run
            self._start(state["_options"])
        super().__setstate__(state)
        if isinstance(self._options.process_group, str):
            group = dist.distributed_c10d._resolve_process_group(self._options.process_group)
            self._options = replace(self._options, process_group=group)
        self._has_all_groups = True
        self._forget()
        self._unbound = "in a copy, or after unpickling"

"""The optimizer's state as others see it: state dicts, loading, copies and pickles.

Decides: when an optimizer's state may be read, and what a copy takes along. Must not know: how a step goes; what a
loaded state has to be is said in loaded.py.
"""
from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from .late import Returning, settled
from .loaded import Loading
from .names import names_in
from .owned import presented
from .settle import warn_torn


class Saving(Returning):
    """An optimizer that is saved and loaded on any layout."""

    @property
    def _torn(self) -> bool:
        """Whether a step failed half-way."""
        return self._half_way or self._early.failed

    @settled
    def state_dict(self) -> dict:
        """As in torch. With shard_state or unreduced gradients collective over process_group, of which each rank has a
        part of the state: it comes as DTensors cut by rows, for any layout. Warns after a step that failed half-way.
        """
        if not warn_torn(self._torn):
            self._early.judge()
        self._beta1.follow(self.param_groups)
        if not self._options.owner_keeps_state:
            return super().state_dict()
        self._find_world()
        named = {p: name for group in self.param_groups for p, name in names_in(group).items()}
        with presented(self, named, self._options.process_group):
            return super().state_dict()

    @settled
    def load_state_dict(self, state_dict) -> None:
        """As in torch, from any layout: tensors that lie otherwise than the parameters are moved, and get the dtype of
        `state_dtype`. What the saved groups lack (those of torch.optim.Muon or AdamW, or of an older version) stays
        this optimizer's own. State goes by position, and by name where a group was saved with the same names in another
        order. Raises ValueError, before anything is changed, for state of another shape or kind.
        """
        self._half_way = self._half_way or self._early.begun  # should loading fail
        self._early.drain()
        self._find_world()
        with Loading(self.param_groups, self._options).inside(self):
            super().load_state_dict(state_dict)
        self._beta1.forget()
        self._take_groups()
        self._half_way = False
        if self._options.overlap_backward:  # not all ranks may have sent alike over these
            self._process_groups.release()
            self._process_groups = None
        self._forget()

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

"""This rank's parameters, gradients and state, as views of the pieces of a plan. Issues no
collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from ..communication.redistribute import to_parameter_placements
from ..kernels.elementwise.multi_tensor import Skip, Source
from ..params import errors
from ..params.dtensor import (
    gradient_dtype,
    is_mismatched,
    local_of,
    mismatched_placements,
    raw_locals,
)
from ..params.errors import names_in
from ..params.layout import Layout, this_rank, zeros_with_placements
from ..params.validation import check_gradients, gradient_of
from .fingerprint import copy_in_form, form_of_gradient, missing_from


class Store:
    """The tensors of one parameter group at this rank, seen piece by piece.

    `layouts`, `row_layouts`: of each parameter and of its row state (None without). `state`: the
    optimizer's. `in_chunks`: the parameters are cut into rows of dim 0, and their gradients are
    made contiguous for that. `group`: the live group. `strays`: number of a parameter -> placements of
    its gradients, where those are others; is added to. `addresses` (of gradients) and `numbers` (of
    the group): on the device, uploaded in each step (`StepInputs`). `flags`: all non-finite flags
    of the step, None if nobody checks. `gradients`: this step's, as they are read; `came`: as
    autograd left them; `missing`: the numbers of those that it did not make.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        layouts: Sequence[Layout],
        row_layouts: Sequence[Layout] | None,
        state: dict,
        in_chunks: bool = False,
        group: dict | None = None,
        mismatched: dict | None = None,
        addresses: torch.Tensor | None = None,
        scalars: torch.Tensor | None = None,
        flags: torch.Tensor | None = None,
        flag_offset: Mapping[int, int] | None = None,
    ):
        self.params = params
        self.state = state
        self.rank = this_rank()
        self.in_chunks = in_chunks
        self.group = group
        self.addresses = addresses
        self.scalars = scalars
        self.flags = flags
        self.flag_offset = flag_offset or {}  # parameter index -> index of its first flag
        self.layouts = {"update": layouts, "row": row_layouts}
        self.step_copies = defaultdict(list)
        self.device = local_of(params[0]).device
        self.is_fp64 = params[0].dtype == torch.float64
        self.names = (
            list(range(len(params))) if group is None else list(map(names_in(group).get, params))
        )
        self.mismatched = {} if mismatched is None else mismatched
        self.forms = None
        self._find_mismatched()
        self.read_gradients(
            bring=lambda param, grad: torch.zeros(
                local_of(param).shape, dtype=grad.dtype, device=self.device
            )
        )
        self.forms = list(map(form_of_gradient, self.gradients))

    def _find_mismatched(self) -> None:
        self.mismatched.update(mismatched_placements(self.params))

    def read_gradients(self, bring=to_parameter_placements, as_bound=False, came=None) -> bool:
        """Take this step's gradients, which autograd may have put elsewhere; a missing one counts
        as zero. `bring`: what makes one like its parameter that is placed otherwise; where one is
        missing, too, for others wait. `as_bound`: give all the form for which this was bound, and
        return whether any had another. `came`: those of all parameters, by id, where they are
        known.
        """
        if as_bound:
            check_gradients(self.params, [self.group])
            self._find_mismatched()
        known = came and map(came.__getitem__, map(id, self.params))
        self.raw_gradients = list(known) if known else raw_locals(map(gradient_of, self.params))
        self.missing, self.gradients = (
            frozenset(missing_from(self.raw_gradients)),
            list(self.raw_gradients),
        )
        for number in self.missing:
            self.gradients[number] = _zeros(self.params[number])
        for number, placements in self.mismatched.items():
            param = self.params[number]
            with errors.during(f"the way home of the gradient of parameter {self.names[number]}"):
                grad = (
                    zeros_with_placements(param, placements, gradient_dtype(param))
                    if param.grad is None
                    else param.grad
                )
                self.gradients[number] = bring(param, grad)
        if self.in_chunks:
            self.gradients = list(map(torch.Tensor.contiguous, self.gradients))
        return as_bound and self._give_bound_form()

    def _give_bound_form(self) -> bool:
        """Copy gradients of another form than that for which this was bound; return whether any
        was.
        """
        forms = zip(self.gradients, self.forms)
        others = [number for number, (g, form) in enumerate(forms) if form_of_gradient(g) != form]
        for number in others:
            self.gradients[number] = copy_in_form(
                self.gradients[number], self.forms[number], self.names[number]
            )
        return bool(others)

    def report_all_missing(self) -> None:
        """Count every gradient of this step as missing."""
        self.missing = frozenset(range(len(self.params)))

    def try_read(self, numbers) -> bool:
        """Take the gradients of some parameters before the others. False if one of them is missing,
        or is not as those for which this was bound.
        """
        for number in numbers:
            param = self.params[number]
            if param.grad is None or param.grad.layout is not torch.strided or is_mismatched(param):
                return False
            (gradient,) = raw_locals([param.grad])
            if gradient.is_neg():
                return False
            self.gradients[number] = gradient.contiguous() if self.in_chunks else gradient
            if form_of_gradient(self.gradients[number]) != self.forms[number]:
                return False
        return True

    def drop_gradients(self):
        """Let the gradients go: once the step is launched, their memory is for whatever the caller
        does next.
        """
        self.raw_gradients, self.gradients = (), [None] * len(self.params)

    def sources(self, pieces):
        """Where each piece lies in the gradients, for launches that are told only the gradients'
        addresses.
        """
        return [self._source(p, self.gradients[p.matrix.param]) for p in pieces]

    def _source(self, piece, gradient):
        (start, _), (_, cols) = piece.box
        if piece.kind == "chunk":
            return Source(piece.matrix.param, start * cols, (cols, 1))
        view = self._view(gradient, piece)
        return Source(
            piece.matrix.param,
            view.storage_offset() - gradient.storage_offset(),
            tuple(view.stride()),
        )

    def weights(self, pieces):
        """W of each piece: (rows, cols) views, of a chunk (rows, ...)."""
        return [self._view(local_of(self.params[p.matrix.param]), p) for p in pieces]

    def states(self, pieces, key):
        """State `key` of each piece, views like those of W. Of chunks, the owner stores its own
        only.
        """
        locals_ = [local_of(self.state[self.params[p.matrix.param]][key]) for p in pieces]
        first = [p.matrix.at[0] if p.kind == "chunk" else None for p in pieces]
        return [
            self._view(s, p) if at is None else s[at : at + p.shape[0]]
            for s, p, at in zip(locals_, pieces, first)
        ]

    def skip(self, pieces):
        """Which pieces launches leave as they are: those whose matrix is flagged (nonfinite.py).
        None: no one watches.
        """
        return (
            None
            if self.flags is None
            else Skip(self.flags, tuple(self._flag_at(p) for p in pieces))
        )

    def _flag_at(self, piece) -> int:
        place, lead = (
            0,
            () if piece.kind == "chunk" else self.layouts["update"][piece.matrix.param].shape[:-2],
        )
        for size, at in zip(lead, piece.matrix.at):
            place = place * size + at
        return self.flag_offset[piece.matrix.param] + place

    def all_of(self, number) -> list:
        """The local tensors of one parameter: its weight, all its state and the step copies of that."""
        param = self.params[number]
        return [
            *map(local_of, filter(torch.is_tensor, (param, *self.state[param].values()))),
            *self.step_copies[number],
        ]

    def counts_of(self, number: int) -> list[torch.Tensor]:
        """AdamW's count of steps of one parameter, and its step copies; empty for Muon's parameters."""
        count = self.state[self.params[number]].get("step")
        return [] if count is None else [local_of(count), *self.step_copies[number]]

    def add_step_copy(self, number, state):
        """A copy of a state of parameter `number` that changes along with it."""
        self.step_copies[number].append(state.clone())
        return self.step_copies[number][-1]

    def locals(self, key=None):
        """The local tensors of the parameters, or of their state `key`."""
        return [local_of(self.state[p][key] if key else p) for p in self.params]

    def _view(self, local, piece):
        """What this rank's shard holds of `piece`."""
        if piece.kind == "chunk":
            return torch.atleast_1d(local)[slice(*piece.box[0])]
        layout = self.layouts[piece.kind][piece.matrix.param]
        box = layout.boxes[self.rank]
        part = local[tuple(i - start for i, (start, _) in zip(piece.matrix.at, box))]
        return part[layout.place_of(self.rank, piece.box)] if layout.interleaved else part


def _zeros(param):
    """Of the form that `change.form_of_zeros` says, also where rows lie apart, which zeros_like
    would close up.
    """
    local = local_of(param)
    return torch.empty_strided(
        local.shape, local.stride(), dtype=gradient_dtype(param), device=local.device
    ).zero_()

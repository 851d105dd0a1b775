"""Parameter store: local weights, gradients and state, as views of the pieces of a plan.

Issues a single kind of collective, through `to_parameter_placements`: the redistribution of a
gradient with placements different from the parameter's.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..communication.matrix_owners.state import slices_at, view_of
from ..communication.redistribute import to_parameter_placements
from ..kernels.elementwise.multi_tensor import Positions, Skip, Source, Squares
from ..kernels.elementwise.row_scattered import ScatteredRows
from ..kernels.quantized.blocks import BLOCK, block_count, is_quantized
from ..kernels.quantized.momentum import QuantizedView
from ..kernels.weights.split import SplitWeights
from ..metrics.collector import Collector, OrthogonalitySample
from ..params import errors
from ..params.checks.gradients import check_gradients, gradient_of
from ..params.dtensor import (
    gradient_dtype,
    is_mismatched,
    local_of,
    mismatched_placements,
    raw_locals,
)
from ..params.layout import this_rank, zeros_with_placements
from ..params.model.names import clean_name
from ..planning.plan import Matrix
from ..planning.planner import Plan
from ..planning.rank_plan import Piece
from ..rules.muon import REST_KEY, SUM_KEY, is_split
from ..rules.rule import OWNERS_KEY, SCALE_KEY, host_constants
from ..state.checks import check_bits
from .fingerprint import GradientForm, copy_in_form, form_of_gradient, missing_from


@dataclass(frozen=True)
class PlanInputViews:
    """Views of the device inputs of a step that belong to one plan."""

    # int64 addresses of gradients; None without Triton
    addresses: torch.Tensor | None = None
    scalars: torch.Tensor | None = None  # fp32 `device_scalars` of all groups
    keys: torch.Tensor | None = None  # int64 `rounding_key` of all groups, empty if none draws
    flags: torch.Tensor | None = None  # fp32 non-finite flags of the whole step; None: no check
    # Parameter index -> index in `flags` of its first non-finite flag
    flag_offset: Mapping[int, int] = field(default_factory=dict)
    # Matrices whose orthogonality is measured; None: the step collects no metrics
    sampled: Collection[Matrix] | None = None


class Store:
    """The local tensors of the parameters of a plan: weights, gradients and state.

    Parameters are numbered by their position in `params`. Views of weights and state are bound
    once. Gradients are new tensors in every step (`read_gradients`): bound launches hold positions
    inside a gradient (`sources`), and read the addresses of gradients from device memory.
    """

    def __init__(self, plan: Plan, state: dict, inputs: PlanInputViews | None = None) -> None:
        """`state`: of the optimizer. `inputs`: None without device inputs of a step.

        `plan.mismatched` is updated in place with gradients found later.
        """
        inputs = inputs or PlanInputViews()
        self.params = plan.params
        self.state = state  # of the optimizer: parameter -> {key: tensor}
        self.rank = this_rank()  # global
        # Whether parameters are cut into chunks of dim 0; gradients are made contiguous then
        self.in_chunks = plan.in_chunks
        self.groups = plan.groups  # live groups that are stepped together
        self.group_of = plan.group_of or [0] * len(plan.params)  # index of each parameter's group
        self.addresses = inputs.addresses
        self.scalars = inputs.scalars
        self.keys = inputs.keys
        self.flags = inputs.flags
        self.flag_offset = inputs.flag_offset
        # Sums for `Muon.metrics`; None: nothing is collected
        self.collector: Collector | None = None
        if inputs.sampled is not None:
            self.collector = Collector(plan, self.rank, inputs.sampled)
        self.splits = list(map(plan.split, range(len(plan.params))))
        # Indices of parameters whose gradients must be viewed as (O, I H W)
        self.flattened = [i for i, split in enumerate(self.splits) if split.view == "flatten"]
        # Kind of a piece -> layout of each parameter
        self.layouts = {**plan.state_layouts, "matrix": plan.layouts, "weight": plan.layouts}
        self.matrix_owners = plan.matrix_owners  # None: state is placed like the parameters
        # Kind of a piece -> layouts of pieces of which only parts are sent
        self.selected = plan.selected
        # (parameter index, key) -> places in the flat tensor of state at owners
        self.flat_slices: dict[tuple[int, str], dict] = {}
        # Parameter index -> copies of AdamW's step count, see `add_step_copy`
        self.step_copies: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.device = local_of(plan.params[0]).device
        self.is_fp64 = plan.params[0].dtype == torch.float64
        self.names = plan.names  # for messages
        self.mismatched = plan.mismatched
        # This step's gradients: local tensors as autograd left them, None where missing
        self.raw_gradients: Sequence[torch.Tensor | None] = ()
        # This step's gradients: local tensors as launches read them, zeros where missing. None
        # between `drop_gradients` and the next read.
        self.gradients: list[torch.Tensor | None] = []
        self.missing: frozenset[int] = frozenset()  # indices of parameters without a gradient
        self.forms: list[GradientForm] | None = None  # that launches are bound for
        self._find_mismatched()
        # Binding needs gradients as examples only: zeros in place of a redistributed gradient keep
        # the constructor free of collectives
        self.read_gradients(
            bring=lambda param, grad: torch.zeros(
                local_of(param).shape, dtype=grad.dtype, device=self.device
            )
        )
        self.forms = list(map(form_of_gradient, self.gradients))

    def host_constants(self) -> list[tuple]:
        """`host_constants` of all groups: Muon groups that are stepped together have equal ones."""
        groups = self.groups[:1] if self.groups[0]["use_muon"] else self.groups
        return [host_constants(group, self.is_fp64) for group in groups]

    def _find_mismatched(self) -> None:
        """Add gradients with placements different from the parameter's to `mismatched`."""
        self.mismatched.update(mismatched_placements(self.params))

    def read_gradients(
        self,
        bring: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = to_parameter_placements,
        as_bound: bool = False,
        known: Mapping[int, torch.Tensor | None] | None = None,
    ) -> bool:
        """Read the gradients of this step from the parameters; a missing gradient counts as zero.

        `bring(param, grad)`: returns the local part of a mismatched gradient in the placements of
        the parameter. `as_bound`: copy gradients into the form bound by launches; return whether
        any gradient had another form. `known`: id of a parameter -> local gradient, if
        already known. Raises RuntimeError for a gradient of a wrong shape or layout.
        """
        if as_bound:
            check_gradients(self.params, self.groups)
            self._find_mismatched()
        gradients = known and map(known.__getitem__, map(id, self.params))
        self.raw_gradients = (
            list(gradients) if gradients else raw_locals(map(gradient_of, self.params))
        )
        self.missing = frozenset(missing_from(self.raw_gradients))
        self.gradients = list(self.raw_gradients)
        for number in self.missing:
            self.gradients[number] = _zeros(self.params[number])
        # Sorted, since redistribution is collective, and ranks may find them in another order
        for number, placements in sorted(self.mismatched.items()):
            param = self.params[number]
            with errors.during(
                f"the redistribution of the gradient of parameter {self.names[number]}"
            ):
                # Redistribution is a collective: a rank without the gradient joins with zeros, or
                # the remaining ranks would wait forever
                grad = (
                    zeros_with_placements(param, placements, gradient_dtype(param))
                    if param.grad is None
                    else param.grad
                )
                self.gradients[number] = bring(param, grad)
        if self.in_chunks:
            self.gradients = list(map(torch.Tensor.contiguous, self.gradients))
        for number in self.flattened:
            self.gradients[number] = self.gradients[number].contiguous()
        return as_bound and self._copy_to_bound_forms()

    def _copy_to_bound_forms(self) -> bool:
        """Replace gradients of an unexpected form by copies; return whether any was copied."""
        forms = zip(self.gradients, self.forms)
        others = [number for number, (g, form) in enumerate(forms) if form_of_gradient(g) != form]
        for number in others:
            gradient, form = self.gradients[number], self.forms[number]
            if number in self.missing:  # zeros are zeros in every dtype
                gradient = gradient.to(form[0])
            self.gradients[number] = copy_in_form(gradient, form, self.names[number])
        return bool(others)

    def report_all_missing(self) -> None:
        """Count every gradient of this step as missing."""
        self.missing = frozenset(range(len(self.params)))

    def try_read(self, numbers: Sequence[int]) -> bool:
        """Read the gradients of some parameters during backward, before `read_gradients`.

        Return False if a gradient is missing, or has another form than launches are bound for.
        """
        for number in numbers:
            param = self.params[number]
            if param.grad is None or param.grad.layout is not torch.strided or is_mismatched(param):
                return False
            (gradient,) = raw_locals([param.grad])
            # Lazily negated: the memory holds the values with the other sign
            if gradient.is_neg():
                return False
            contiguous = self.in_chunks or number in self.flattened
            self.gradients[number] = gradient.contiguous() if contiguous else gradient
            if form_of_gradient(self.gradients[number]) != self.forms[number]:
                return False
        return True

    def drop_gradients(self) -> None:
        """Drop references to gradients: after the launches of a step their memory may be freed."""
        self.raw_gradients = ()
        self.gradients = [None] * len(self.params)

    def sources(self, pieces: Sequence[Piece]) -> list[Source]:
        """Position of each piece inside a gradient, for launches with gradient addresses."""
        return [self._source(p, self.gradients[p.matrix.param]) for p in pieces]

    def _source(self, piece: Piece, gradient: torch.Tensor) -> Source:
        """Position of a piece: parameter index, offset in elements, strides in elements."""
        (start, _), (_, cols) = piece.box
        # Gradients of chunks are contiguous, see `read_gradients`
        if piece.kind == "chunk":
            return Source(piece.matrix.param, start * cols, (cols, 1))
        view = self._view(gradient, piece)
        return Source(
            piece.matrix.param,
            view.storage_offset() - gradient.storage_offset(),
            tuple(view.stride()),
        )

    def weights(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Views of the weights: (rows, columns) of each piece; of a chunk, (rows, ...)."""
        # A stack of experts has many pieces
        local = functools.cache(lambda number: local_of(self.params[number]))
        return [self._view(local(p.matrix.param), p) for p in pieces]

    def states(self, pieces: Sequence[Piece], key: str | None = None) -> list[torch.Tensor]:
        """Views of state `key` of each piece, (rows, columns); of a chunk, (rows, ...). `key` None:
        the state named by `Piece.kind`.

        State of a chunk is stored by the owner alone, from the first row of the owner's chunk on.
        """
        if key is None and self.matrix_owners is not None:
            return list(map(self._state, pieces))
        local = functools.cache(lambda number, key: local_of(self.state[self.params[number]][key]))
        found = []
        for piece in pieces:
            state = local(piece.matrix.param, key or piece.kind)
            if piece.kind == "chunk":
                first = piece.matrix.at[0]
                found.append(state[first : first + piece.shape[0]])
            else:
                found.append(self._view(state, piece))
        return found

    def _state(self, piece: Piece) -> torch.Tensor:
        """View of the state of a piece, stored by the owner or placed like the parameter."""
        number, matrix = piece.matrix.param, piece.matrix
        local = local_of(self.state[self.params[number]][piece.kind])
        if not self.matrix_owners[number]:
            return self._view(local, piece)
        layout = self.layouts[piece.kind][number]
        if (number, piece.kind) not in self.flat_slices:
            owners = self.matrix_owners[number]
            found, _ = slices_at(self.rank, layout, owners, local.itemsize)
            self.flat_slices[number, piece.kind] = found
        return view_of(local, self.flat_slices[number, piece.kind][matrix.at, matrix.unit])

    def split_weights(self, pieces: Sequence[Piece]) -> SplitWeights | None:
        """Views of the rests of split weights, (rows, columns) of each piece; None if no weight of
        `pieces` is split.
        """
        views = list(map(self.rest_view, pieces))
        return None if all(view is None for view in views) else SplitWeights(views)

    def rest_view(self, piece: Piece) -> torch.Tensor | None:
        """View of the rest of a piece of a split weight (the bits that bf16 lacks), shaped like the
        view of the weight; None for weights that are not split.
        """
        rest = self.rest_of(piece.matrix.param)
        return None if rest is None else self._view(rest, piece)

    def rest_of(self, number: int) -> torch.Tensor | None:
        """The local rest of a split weight; None for a weight that is not split."""
        param = self.params[number]
        splits = is_split(self.groups[self.group_of[number]], param)
        return local_of(self.state[param][REST_KEY]) if splits else None

    def sums(
        self, pieces: Sequence[Piece], route: str, writes_weights: bool = False
    ) -> Squares | None:
        """Memory for the sums of a launch over pieces, see `Collector.of_pieces`; None if nothing
        is collected.
        """
        if self.collector is None:
            return None
        sizes = [math.prod(self.stored_shape(p)) for p in pieces] if writes_weights else None
        return self.collector.of_pieces(pieces, route, sizes)

    def samples(
        self, matrices: Sequence[Sequence[Matrix]], outputs: Sequence[torch.Tensor | ScatteredRows]
    ) -> list[OrthogonalitySample]:
        """Matrices whose orthogonality is measured, see `Collector.samples`."""
        return [] if self.collector is None else self.collector.samples(matrices, outputs)

    def positions(self, pieces: Sequence[Piece]) -> list[Positions]:
        """Number of each element of pieces of matrices, for random bits: row-major over all
        matrices of the parameter, whatever rank stores the element. The numbers of two named
        parameters begin far apart, so that different parameters draw different bits. Ranks compare
        given names.
        """
        found = []
        for p in pieces:
            R, C = self.layouts["matrix"][p.matrix.param].shape[-2:]
            first = (self._number_of(p) * R + p.start[0]) * C + p.start[1]
            found.append(Positions(first + self.firsts[p.matrix.param], self.stored_shape(p), C))
        return found

    @functools.cached_property
    def firsts(self) -> list[int]:
        """First number of the elements of each parameter, see `positions`: from the name without
        prefixes of wrappers; 0 without a given name.
        """
        names = [None if name.startswith("#") else clean_name(name) for name in self.names]
        # 27 bits above the 32 low bits of a number
        return [0 if n is None else (zlib.crc32(n.encode()) >> 5) << 32 for n in names]

    def momenta(
        self, pieces: Sequence[Piece], key: str, dtype: torch.dtype
    ) -> list[torch.Tensor] | list[QuantizedView]:
        """Views of momentum `key` of each piece of a matrix. `dtype`: the option `state_dtype`.
        Raises RuntimeError for momentum that a step would misread.
        """
        found = self.states(pieces, key)
        for piece, tensor in zip(pieces, found):
            check_bits(key, self.names[piece.matrix.param], tensor.dtype, dtype)
        return self._quantized(pieces, found) if is_quantized(dtype) else found

    def _quantized(
        self, pieces: Sequence[Piece], numbers: Sequence[torch.Tensor]
    ) -> list[QuantizedView]:
        """Views of 8-bit momentum: views of the `numbers` of each piece, with the scales of its
        blocks.
        """
        found = []
        for piece, values in zip(pieces, numbers):
            number = piece.matrix.param
            split = self.splits[number]
            scales = split.matrices(local_of(self.state[self.params[number]][SCALE_KEY]))
            if split.transposed:
                values, scales = values.mT, scales.mT
            layout = self.layouts["matrix"][number]
            scales = scales[self._leading(piece)]
            rows, columns = layout.place_of(self.rank, piece.start, piece.shape)
            if split.transposed:
                rows, columns = columns, rows
            # Shards and units begin at multiples of BLOCK columns, see `check_blocks`
            blocks = slice(columns.start // BLOCK, block_count(columns.stop))
            found.append(QuantizedView(values, scales[rows, blocks], split.transposed))
        return found

    def skip(self, pieces: Sequence[Piece]) -> Skip | None:
        """Pieces left unchanged by launches if the flag of the matrix is set at run time (see
        nonfinite.py). None: gradients are not checked.
        """
        if self.flags is None:
            return None
        return Skip(self.flags, tuple(self._flag_index(p) for p in pieces))

    def _flag_index(self, piece: Piece) -> int:
        """Index in `flags` of a piece's matrix (row-major over leading dims, then unit); of a
        chunk, of the parameter.
        """
        offset = self.flag_offset[piece.matrix.param]
        if piece.kind == "chunk":
            return offset
        layout = self.layouts["matrix"][piece.matrix.param]
        return offset + self._number_of(piece) * layout.unit_count + piece.matrix.unit

    def _number_of(self, piece: Piece) -> int:
        """Number of a piece's matrix among those of its parameter, row-major over leading dims."""
        number = 0
        for size, index in zip(self.layouts["matrix"][piece.matrix.param].shape, piece.matrix.at):
            number = number * size + index
        return number

    def selects_from(self, piece: Piece) -> bool:
        """Whether `piece` is the part of a stored piece that this rank selects."""
        layouts = self.selected.get(piece.kind)
        return layouts is not None and layouts[piece.matrix.param].at_source

    def stored_shape(self, piece: Piece) -> tuple[int, int]:
        """(rows, columns) of a piece as stored: views of the store have this shape."""
        if not self.selects_from(piece):
            return piece.shape
        layout = self.selected[piece.kind][piece.matrix.param]
        return layout.whole_shape(self.rank, piece.matrix.unit, piece.start)

    def all_of(self, number: int) -> list[torch.Tensor]:
        """Local tensors of a parameter: weight, all state, and copies of the step count."""
        param = self.params[number]
        held = [value for key, value in self.state[param].items() if key != OWNERS_KEY]
        return [*map(local_of, filter(torch.is_tensor, (param, *held))), *self.step_copies[number]]

    def counts_of(self, number: int) -> list[torch.Tensor]:
        """AdamW's step count of a parameter, and all copies; of Muon's parameters, 8-bit momentum
        and its scales: a step without gradients would write zeros, see [Note: unwritten blocks].
        """
        state = self.state[self.params[number]]
        keys = ("momentum_buffer", SUM_KEY, SCALE_KEY) if SCALE_KEY in state else ("step",)
        found = [local_of(state[key]) for key in keys if key in state]
        return found + self.step_copies[number]

    def add_step_copy(self, number: int, step: torch.Tensor) -> torch.Tensor:
        """Return a new copy of the step count of a parameter, for a further chunk.

        Copies are restored together with the count after a step without a gradient.
        """
        self.step_copies[number].append(step.clone())
        return self.step_copies[number][-1]

    def locals(self, key: str | None = None) -> list[torch.Tensor]:
        """Local tensors of all weights, or of state `key`."""
        return [local_of(self.state[p][key] if key else p) for p in self.params]

    def _view(self, local: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The view of `piece` in a local shard: (rows, columns); of a chunk, (rows, ...)."""
        if piece.kind == "chunk":
            return torch.atleast_1d(local)[slice(*piece.box[0])]
        layout = self.layouts[piece.kind][piece.matrix.param]
        matrices = self.splits[piece.matrix.param].matrices(local)
        place = layout.place_of(self.rank, piece.start, self.stored_shape(piece))
        return matrices[(*self._leading(piece), *place)]

    def _leading(self, piece: Piece) -> tuple[int, ...]:
        """The leading indices (experts) of a piece's matrix in the local shard."""
        box = self.layouts[piece.kind][piece.matrix.param].boxes[self.rank]
        # Indices of a matrix are global; the shard may begin at any of them
        return tuple(i - start for i, (start, _) in zip(piece.matrix.at, box))


def _zeros(param: torch.Tensor) -> torch.Tensor:
    """Zeros in place of a missing gradient, in the form of `fingerprint.form_of_zeros`.

    Strides are those of the local weight. zeros_like would close gaps between rows.
    """
    local = local_of(param)
    return torch.empty_strided(
        local.shape, local.stride(), dtype=gradient_dtype(param), device=local.device
    ).zero_()

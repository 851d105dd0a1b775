"""`Collector`: the sums that the updates of a plan make during a step, on the device.

Updates ask the collector of their plan for memory when they are bound (`of_pieces`, `of_params`,
`samples`), and their launches write there in every step. The memory never moves, so CUDA graphs
hold its address. `Collector.table` reads the sums, after the step.

[Note: counted once] Of several copies of an element, one rank counts: the source of the piece.
Owners count matrices whose state they alone keep, and their own chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from ..kernels.elementwise.multi_tensor import Squares
from ..kernels.elementwise.row_scattered import ScatteredRows
from ..kernels.launch.precompile import in_dry_run
from ..kernels.metrics.sample import Region, SampledSquares, Weights
from ..params.dtensor import local_of
from ..planning.plan import OWNER_STATE_ROUTES, Bucket, Matrix
from ..planning.planner import Plan
from ..planning.rank_plan import Piece
from .regions import regions_of, regions_of_rows

COLUMNS = 7  # of a table: the fields of `values.Sums`
PROBES = 16  # random vectors that estimate the orthogonality error; exact for short sides up to 16
# Elements of the largest matrix that is sampled
SAMPLED_ELEMENTS = 1 << 20
# Elements of old weights that are saved at a time, where torch's own kernels write the new weights
SAVED_ELEMENTS = 1 << 22


class OrthogonalitySample:
    """A matrix of a bucket whose O is measured at its owner: ||O O^T - I||_F / sqrt(n).

    The Frobenius norm of E = O O^T - I is that of E Z, on average over matrices Z of random signs /
    sqrt(k) with k columns (M. F. Hutchinson, 1990): k matrix-vector products in place of O O^T.
    """

    def __init__(self, stack: torch.Tensor | ScatteredRows, index: int, param: int) -> None:
        """`stack`: O (N, R, C), of which matrix `index` is measured. `param`: its parameter."""
        self.stack = stack
        self.index = index
        self.param = param
        n = min(stack.shape[1:])
        probes = torch.eye(n, dtype=torch.float32, device="cpu")
        if n > PROBES:
            generator = torch.Generator("cpu").manual_seed(0)
            signs = torch.randint(2, (n, PROBES), generator=generator, device="cpu") * 2 - 1
            probes = signs.float() / math.sqrt(PROBES)
        self.probes = probes.to(stack.device)
        # In 16 bits the products have O's dtype, in which the probes are exact: a cast of O would
        # be a further launch, and products in fp32 are slow. Rounding adds 0.002 in quadrature
        dtype = stack.dtype if stack.dtype.itemsize == 2 else torch.float32
        self.narrow_probes = self.probes.to(dtype)
        # n times the square of the error: a step has the fewest launches
        self.square = torch.zeros((), dtype=torch.float32, device=stack.device)

    def measure(self) -> None:
        """Write `square`, without a wait of the host."""
        if in_dry_run():
            return
        is_scattered = isinstance(self.stack, ScatteredRows)
        X = self.stack.matrix(self.index) if is_scattered else self.stack[self.index]
        X = X.to(self.narrow_probes.dtype)
        if X.shape[0] > X.shape[1]:
            X = X.mT
        # The difference is in fp32
        rest = (X @ (X.mT @ self.narrow_probes) - self.probes).view(-1)
        torch.dot(rest, rest, out=self.square)

    def error(self) -> torch.Tensor:
        """Return the error, fp64 on the device."""
        return (self.square.double() / min(self.stack.shape[1:])).sqrt()


class Collector:
    """The memory in which the updates of a plan collect sums during a step, see the module."""

    def __init__(self, plan: Plan, rank: int, sampled: Iterable[Matrix]) -> None:
        """`rank`: this rank. `sampled`: of `sampled_matrices`."""
        self.plan = plan
        self.rank = rank
        self.sampled = frozenset(sampled)
        # (sums, row of each rectangle: index of the parameter, or behind the last if not counted)
        self.sums: list[tuple[Squares, list[int]]] = []
        self.found_samples: list[OrthogonalitySample] = []
        self.elements = [0] * len(plan.params)  # that this rank counts
        self.read = [0] * len(plan.params)  # part of `elements` that the sums have

    def of_pieces(
        self, pieces: Sequence[Piece], route: str, sizes: Sequence[int] | None = None
    ) -> Squares | None:
        """Return memory for the sums of a launch over `pieces`; None if this rank counts none.

        `route`: of the bucket. `sizes`: elements of each piece, for the launch that writes weights;
        None for a launch that writes momentum only.
        """
        of_owner = route in OWNER_STATE_ROUTES
        count = len(self.elements)
        rows = []
        for i, p in enumerate(pieces):
            counts = p.owner == p.stored_at if of_owner or p.kind == "chunk" else p.is_source
            rows.append(p.matrix.param if counts else count)
            if counts and sizes is not None:
                self._count(p.matrix.param, sizes[i])
        if set(rows) <= {count}:
            return None
        return self._add(rows)

    def of_params(
        self,
        W: Sequence[torch.Tensor],
        rests: Sequence[torch.Tensor],
        M: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor] = (),
    ) -> list[tuple[slice, SampledSquares]]:
        """Return sums of parameters that are stepped where stored, by parts of the parameters that
        are stepped at a time: saved weights are bounded by SAVED_ELEMENTS, or by those of the
        largest parameter. `W`, `M`: local weights and momenta. `rests`: of split weights, or ().
        `scales`: of momenta in 8 bits, or ().
        """
        parts, size = [], math.inf
        regions = [regions_of(layout, self.rank) for layout in self.plan.layouts]
        for number, some in enumerate(regions):
            slots = sum(region.slots for region in some)
            if size + slots > SAVED_ELEMENTS:
                parts.append(slice(number, number))
                size = 0
            size += slots
            parts[-1] = slice(parts[-1].start, number + 1)
        found = []
        for part in parts:
            weights = Weights(W[part], rests[part])
            numbers = range(part.start, part.stop)
            counts = [self.rank in self.plan.layouts[number].replicas[0] for number in numbers]
            squares = self._add_sampled(numbers, regions[part], counts)
            own = squares, regions[part], weights, weights, M[part], scales[part]
            found.append((part, SampledSquares(*own)))
        return found

    def of_chunks(
        self,
        pieces: Sequence[Piece],
        old: Weights,
        new: Weights,
        M: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor] = (),
    ) -> SampledSquares:
        """Return sums of chunks of parameters that this rank owns, see `SampledSquares`."""
        numbers, regions = [p.matrix.param for p in pieces], []
        for p, number in zip(pieces, numbers):
            (first, stop), _ = p.box
            shape = local_of(self.plan.params[number]).shape
            regions.append(regions_of_rows(shape, first, stop - first))
        squares = self._add_sampled(numbers, regions, [True] * len(pieces))
        return SampledSquares(squares, regions, old, new, M, scales)

    def _add_sampled(
        self, numbers: Sequence[int], regions: Sequence[Sequence[Region]], counts: Sequence[bool]
    ) -> Squares:
        """Return memory for the sums of `regions`, the rectangles of each of the parameters
        `numbers` or of a part of it; count the elements where `counts` is True.
        """
        for number, some, is_counted in zip(numbers, regions, counts):
            for region in some if is_counted else ():
                self._count(number, region.rows * region.cols, region.count())
        behind = len(self.elements)
        return self._add([n if is_counted else behind for n, is_counted in zip(numbers, counts)])

    def _count(self, number: int, elements: int, read: int | None = None) -> None:
        """Count elements of a parameter, of which `read` are in the sums; None: all."""
        self.elements[number] += elements
        self.read[number] += elements if read is None else read

    def of_parts(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return rows for the sums of parts of parameters that are stepped where stored. `numbers`:
        parameter of each part; together the parts of a parameter hold all of its elements.
        """
        count = len(self.elements)
        counts = [self.rank in layout.replicas[0] for layout in self.plan.layouts]
        for number in set(numbers):
            self._count(number, local_of(self.plan.params[number]).numel() * counts[number])
        squares = self._add([number if counts[number] else count for number in numbers])
        (rows,) = squares.lay_out(None, len(numbers), local_of(self.plan.params[0]).device)
        return rows

    def _add(self, rows: list[int]) -> Squares:
        """Return new memory for the sums of rectangles."""
        self.sums.append((Squares(), rows))
        return self.sums[-1][0]

    def samples(
        self, matrices: Sequence[Sequence[Matrix]], outputs: Sequence[torch.Tensor | ScatteredRows]
    ) -> list[OrthogonalitySample]:
        """Return the samples among the matrices of stacks; `outputs`: the stacks with their O."""
        found = [
            OrthogonalitySample(stack, i, matrix.param)
            for stack, some in zip(outputs, matrices)
            for i, matrix in enumerate(some)
            if matrix in self.sampled
        ]
        self.found_samples += found
        return found

    def table(self, device: torch.device) -> torch.Tensor:
        """Return the sums of this rank, fp64 (parameters, COLUMNS) on the device."""
        count = len(self.elements)
        total = torch.zeros(count + 1, COLUMNS, dtype=torch.float64, device=device)
        for squares, rows in self.sums:
            if squares.rows:
                index = torch.tensor(rows, device=device)
                total[:, :3].index_add_(0, index, squares.totals(len(rows)))
        total[:count, 3] = torch.tensor(self.elements, dtype=torch.float64, device=device)
        for sample in self.found_samples:
            total[sample.param, 4] += sample.error()
            total[sample.param, 5] += 1
        total[:count, 6] = torch.tensor(self.read, dtype=torch.float64, device=device)
        return total[:count]


def sampled_matrices(plans: Sequence[Plan]) -> list[set[Matrix]]:
    """Return for each plan the matrices whose orthogonality is measured: one for each parameter
    group and set of ranks that step matrices together. The largest matrix of at most
    SAMPLED_ELEMENTS elements is taken, else the smallest; all ranks of the set choose alike.
    """
    candidates: dict[tuple, list[tuple]] = {}
    for index, plan in enumerate(plans):
        buckets: list[Bucket] = [bucket for bucket, _ in plan.rank_plans or ()]
        for bucket in buckets if plan.group["use_muon"] else ():
            for m in bucket.matrices:
                size = math.prod(m.iterated_shape)
                order = size if size > SAMPLED_ELEMENTS else -size
                place = order > 0, order, index, m.param, m.at, m.unit
                key = bucket.ranks, id(plan.group_at(m.param))
                candidates.setdefault(key, []).append((place, m))
    found: list[set[Matrix]] = [set() for _ in plans]
    for some in candidates.values():
        place, matrix = min(some, key=lambda candidate: candidate[0])
        found[place[2]].add(matrix)
    return found
